"""`sana-pipe config`: the effective configuration, with the meaning, default and origin of each option.

The output is a valid configuration file, so `--config sana_600m_512 > sana-pipe.yaml` starts your own. `--markdown`
writes the reference in docs/configuration.md. Both come from the docstrings and types of the fields.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from typing import Any

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from sana_pipe.base.errors import ConfigError
from sana_pipe.base.options import holds_several, section_of, value_at, values_of, within
from sana_pipe.base.yaml_text import as_yaml
from sana_pipe.config import Config, Given, option_fields, written

WIDTH = 110


def run(config: Config, given: Given, name: str | None = None, as_json: bool = False) -> int:
    """Print the options.

    Args:
        config: the effective configuration.
        given: which options the file and `--set` gave.
        name: print this option or section alone.

    Raises:
        ConfigError: there is no option or section called `name`.
    """
    values = written(config)
    rows = [row for row in _rows(values, given) if name is None or within(row["name"], name)]
    if not rows:
        assert name is not None
        above = [name.rsplit(".", count)[0] for count in range(name.count("."), 0, -1)]
        if name in dict(option_fields()) and (null := [each for each in above if value_at(values, each, "") is None]):
            raise ConfigError(
                f"{name} is an option of {null[0]}, which is null",
                fix=f"sana-pipe config {null[0]} --set {null[0]}={{}}; docs/configuration.md has every option",
            )
        known = ", ".join(section for section, field in option_fields() if section_of(field))
        raise ConfigError(
            f"there is no option or section {name!r}",
            expected=f"an option such as train.optim.lr, or a section: {known}",
            fix="sana-pipe config",
        )
    if as_json:
        click.echo(json.dumps({"file": str(given.file), "options": rows}))
        return 0
    printed: list[str] = []
    for row in rows:
        *sections, _ = row["name"].split(".")
        for depth, section in enumerate(sections):  # headings of the sections that this row is the first of
            if sections[: depth + 1] != printed[: depth + 1]:
                click.echo(f"{'  ' * depth}{section}:")
                printed = sections[: depth + 1]
        printed = sections
        click.echo("\n".join(_lines(row, "  " * len(sections))))
    return 0


def markdown() -> str:
    """The reference of all options, as docs/configuration.md holds it."""
    lines = [
        "# Options",
        "",
        "* Every option; `sana-pipe config` prints your values and where each comes from, as a file to start with.",
        "* Most runs need few: `bucket.batch`, `train.epochs`, `train.optim.lr`, `train.validation`, `train.pictures`.",
        "* Change one without a file by `--set train.optim.lr=2e-5`; a wrong name is an error that names the nearest.",
        "",
        "Generated from the fields in `pipeline/config.py` by `sana-pipe config --markdown > docs/configuration.md`.",
        "Values are read as in YAML 1.2, in files and behind `--set`; text that reads as a number needs quotes. In",
        "paths, also those of the command line, `~` and `$NAME` are replaced; a variable that is not set is an error.",
    ]
    sections: dict[str, list[str]] = {"": []}
    about = {"": "Options outside of sections."}
    for name, field in option_fields():
        above, _, key = name.rpartition(".")
        below, mapping = section_of(field), holds_several(field)
        if below is not None:
            path = f"{name}.NAME" if mapping else name
            sections[path], about[path] = [], _one_line(below.__doc__)
        if below is None or mapping or _default(field) == "null":
            default = _default(field)
            cells = (
                f"`{key}`",
                values_of(field),
                "required" if default is None else f"`{default}`",
                _one_line(field.description),
            )
            sections[above].append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    for path, rows in sections.items():
        if rows:
            heading = ["", f"## {path or 'Top level'}", "", about[path], "", "| option | values | default | meaning |"]
            lines += [*heading, "|---|---|---|---|", *rows]
    return "\n".join(lines)


def _rows(values: dict[str, Any], given: Given) -> Iterator[dict[str, Any]]:
    """Every option that has a value: name, value, default, origin, kind, meaning."""
    for name, field in option_fields():
        *sections, key = name.split(".")
        parent = value_at(values, sections)
        if "NAME" in sections or not isinstance(parent, dict):  # below a mapping, or a section that is null
            continue
        value = parent[key]
        if section_of(field) is not None and value and not holds_several(field):
            continue  # a section: its options follow
        yield {
            "name": name,
            "value": value,
            "default": _default(field),
            "from": given.given_by(name),
            "values": values_of(field),
            "meaning": _one_line(field.description),
        }


def _lines(row: dict[str, Any], indent: str) -> Iterator[str]:
    """One option as YAML under its comment."""
    facts = [row["values"], "required" if row["default"] is None else f"default {row['default']}"]
    if row["from"] != "default":
        facts.append(f"set by {row['from']}")
    wrapper = textwrap.TextWrapper(WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    yield from wrapper.wrap(row["meaning"])
    yield from wrapper.wrap(f"[{'; '.join(facts)}]")
    yield f"{indent}{row['name'].rpartition('.')[2]}: {_as_yaml(row['value'])}"


def _as_yaml(value: Any) -> str:
    """A value in one line of YAML."""
    return as_yaml([value], default_flow_style=True, width=10**6, allow_unicode=True).strip()[1:-1]


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _default(field: FieldInfo) -> str | None:
    """The default as YAML in one line; None: the option is required."""
    if field.is_required():
        return None
    value = field.get_default(call_default_factory=True)
    plain = {} if isinstance(value, BaseModel) else list(value) if isinstance(value, tuple) else value
    return _as_yaml(plain)
