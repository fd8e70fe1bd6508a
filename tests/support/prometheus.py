"""A strict reader of Prometheus' text format 0.0.4, which shares no code with the writer.

https://prometheus.io/docs/instrumenting/exposition_formats/, and what node exporter's textfile collector adds: no
timestamps, no series twice.
"""

from __future__ import annotations

import re
from pathlib import Path

Series = tuple[str, frozenset[tuple[str, str]]]

_NAME = "[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"'
_SAMPLE = re.compile(rf"({_NAME})\{{((?:{_LABEL}(?:,|(?=\}})))*)\}} ([^ ]+)")
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


def parse(text: str) -> dict[Series, float]:
    """The values by name and labels.

    Raises:
        AssertionError: names the line that breaks a rule.
    """
    assert text.endswith("\n"), "the last line has no end"
    values: dict[Series, float] = {}
    helped, typed, family = set[str](), dict[str, str](), ""
    for line in text[:-1].split("\n"):
        if match := re.fullmatch(rf"# HELP ({_NAME}) (.+)", line):
            family = match[1]
            assert family not in helped and family not in typed, f"a family twice: {line}"
            helped.add(family)
        elif match := re.fullmatch(rf"# TYPE ({_NAME}) (counter|gauge|histogram|summary|untyped)", line):
            assert match[1] == family and family not in typed, f"not after its help: {line}"
            typed[family] = match[2]
        else:
            match = _SAMPLE.fullmatch(line)
            assert match is not None, f"no sample: {line!r}"
            assert match[1] == family and family in typed, f"outside of its family: {line}"
            assert (typed[family] == "counter") == family.endswith("_total"), f"a counter ends in _total: {line}"
            pairs = re.findall(_LABEL, match[2])
            labels = {name: re.sub(r'\\[\\"n]', lambda escape: _ESCAPES[escape[0]], value) for name, value in pairs}
            assert len(labels) == len(pairs), f"a label twice: {line}"
            series = family, frozenset(labels.items())
            assert series not in values, f"a series twice: {line}"
            values[series] = float(match[5])
            assert typed[family] != "counter" or values[series] >= 0, line
    return values


def read(path: Path) -> dict[Series, float]:
    """`parse` of a file."""
    return parse(path.read_text(encoding="utf-8"))


def total(values: dict[Series, float], name: str, **labels: str) -> float:
    """The sum of a family's values that have these labels; fails if there is none."""
    chosen = [value for (family, of), value in values.items() if family == name and set(labels.items()) <= of]
    assert chosen, f"no {name} with {labels}"
    return sum(chosen)
