"""YAML as the configuration and `--set` have it: values to text and back, and the error on what is no YAML.

Scalars are those of YAML 1.2 (PyYAML's are those of 1.1, to which `no` and `1:30` are no text).
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from sana_pipe.base.errors import ConfigError

NO_YAML = (yaml.YAMLError, ValueError, RecursionError)
"""The errors that PyYAML raises, also for numbers with too many digits, a thirteenth month and lists nested too
deeply."""


MAX_VALUES = 100_000
"""Limit on the values of a file, aliases and merge keys written out: a few lines can mean billions."""


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice, and aliases that stand for too much. Scalars are those of YAML 1.2:
    0100 is a hundred, 1e-4 a number; 1:30, 2026-01-01 and `no` are text."""

    def __init__(self, stream: Any):
        super().__init__(stream)
        self._sizes: dict[yaml.Node, int] = {}  # of the mappings and lists that are complete

    def compose_sequence_node(self, anchor: Any) -> yaml.SequenceNode:
        node = super().compose_sequence_node(anchor)
        self._measure(node, node.value)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        self._measure(node, chain.from_iterable(node.value))
        words = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        keys: set[str] = set()
        for word in words:
            if word.value in keys:
                raise _wrong(word, f"key {word.value!r} is given twice", "keep one of the two lines")
            keys.add(word.value)
        return node

    def _measure(self, node: yaml.Node, inside: Iterable[yaml.Node]) -> None:
        sizes = [1 if isinstance(child, yaml.ScalarNode) else self._sizes.get(child) for child in inside]
        if None in sizes:
            raise _wrong(node, "an alias stands inside of what it names", "write out its values in place of the alias")
        self._sizes[node] = 1 + sum(filter(None, sizes))
        if self._sizes[node] > MAX_VALUES:
            what = f"its aliases and merge keys stand for more than {MAX_VALUES:,} values"
            raise _wrong(node, what, "write out the values that are needed")


def _wrong(node: yaml.Node, what: str, fix: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=what, problem_mark=node.start_mark, note=fix)


def not_yaml(source: Path | str, error: Exception) -> ConfigError:
    """The error on a file, or on the text of an option, that is no YAML. `error`: one of `NO_YAML`."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        fix = "`sana-pipe config` prints a valid file"
        return ConfigError(f"{source} is not valid YAML: {error}", fix=fix)
    mark, fix = error.problem_mark, error.note or "correct it there, or just before"
    if alias := re.fullmatch("found undefined alias '(.+)'", error.problem or ""):
        fix = f"an earlier line has to name the value, `&{alias[1]} VALUE`; or write it in place of `*{alias[1]}`"
    what = ": ".join(filter(None, (error.context, error.problem)))
    line = (mark.buffer or "").rstrip("\0").splitlines()[mark.line : mark.line + 1]
    place = f"{source}, line {mark.line + 1}" if isinstance(source, Path) else source
    return ConfigError(f"{place}: not valid YAML: {what}", found=line[0].strip() if line else None, fix=fix)


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 reads as something else."""


def _integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    return int(text, 0 if text[:2] in ("0o", "0x") else 10)


_Loader.yaml_implicit_resolvers = {}
_Dumper.yaml_implicit_resolvers = {first: [*rules] for first, rules in yaml.SafeDumper.yaml_implicit_resolvers.items()}
for _tag, _pattern, _first in (
    ("merge", "<<", "<"),
    ("null", "~|null|Null|NULL|", ("", *"~nN")),
    ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", "[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+\.?[0-9]*)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), list(_first))
_Loader.add_constructor("tag:yaml.org,2002:int", _integer)


def from_yaml(text: str) -> Any:
    """The value that a configuration file or `--set` means. Raises one of `NO_YAML`."""
    return yaml.load(text, Loader=_Loader)


def as_yaml(value: Any, **style: Any) -> str:
    """A value as YAML that `from_yaml` reads as this value."""
    return yaml.dump(value, Dumper=_Dumper, **style)


def on_one_line(value: Any) -> str:
    """A value on one line as `from_yaml` reads it: text without quotes where these are not needed."""
    with suppress(*NO_YAML):
        if isinstance(value, str) and value.isprintable() and from_yaml(value) == value:
            return value
    return json.dumps(value, ensure_ascii=isinstance(value, str) and not value.isprintable())


WIDTH = 118
"""Columns of a comment that `edited` writes."""


def edited(text: str, option: str, value: Any, why: str, instead: str | None = None) -> str:
    """The text of a file with another value of an option, below its reason; all other comments stay.

    A section that lacks the option gets it at its end. A comment on the line of the old value goes with it.

    Args:
        instead: another option of its section, whose place it takes.
    """
    lines, keys = text.splitlines(), option.split(".")
    node: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    indent, start, stop, depth = "", 0, 0, 0
    for depth, key in enumerate(keys):
        rest, indent = keys[depth + 1 :], " " * node.start_mark.column
        there = {name.value: (name, below) for name, below in node.value}
        found = there.get(key) or there.get("" if rest or instead is None else instead)
        if found is None:
            start = stop = _end(node)
            break
        name, below = found
        start, stop = name.start_mark.line, _end(below)
        if rest and isinstance(below, yaml.MappingNode) and not below.flow_style:
            node = below
            continue
        if rest:  # the section stands on the line of its name
            whole = from_yaml(text[below.start_mark.index : below.end_mark.index])
            value, keys = _with(whole if isinstance(whole, dict) else {}, rest, value), keys[: depth + 1]
        break
    new = [f"{indent}{'  ' * more}{key}:" for more, key in enumerate(keys[depth:-1])]
    indent += "  " * len(new)
    reason = textwrap.wrap(why, WIDTH - len(indent), break_long_words=False, break_on_hyphens=False)
    new += [f"{indent}# {line}" for line in reason]
    new.append(f"{indent}{keys[-1]}: {_flow(value)}")
    return "\n".join([*lines[:start], *new, *lines[stop:]]) + "\n"


def _end(node: yaml.Node) -> int:
    """The line after the last value of a node."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.line) + (node.end_mark.column > 0)


def _with(section: dict[str, Any], keys: list[str], value: Any) -> dict[str, Any]:
    """A section with another value of an option below it."""
    first, *rest = keys
    below = section.get(first)
    return {**section, first: _with(below if isinstance(below, dict) else {}, rest, value) if rest else value}


def _flow(value: Any) -> str:
    """A value on one line, as it stands in a file."""
    text = as_yaml(value, default_flow_style=True, width=10**6, sort_keys=False, allow_unicode=True)
    return text.removesuffix("...\n").rstrip("\n")
