"""Curves through all parts of a run, one behind the other on an axis of optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline.base.options import value_at
from pipeline.tools.reporting.plots import Line

VALIDATION = "validation", "loss"
"""The path of the held-out loss in a part of a run."""
_DIVIDED = (
    ("by_sigma", "sigma", "sigma {}"),
    ("by_bucket", "bucket", "bucket {}"),
    ("by_age", "age", "{} samples"),
    ("parts", "part", "{}"),
)
"""Figures of the held-out loss in parts: their name, what divides them, and the label of a part."""


def starts(run: dict[str, Any]) -> list[float]:
    """The steps that were done before each part of a run began; at the end those of all."""
    before = [0.0]
    for part in run["parts"]:
        steps = [part["steps"] or 0, *(value_at(part, (*VALIDATION, "step")) or [])]
        before.append(before[-1] + max(steps + [drawing["step"] for drawing in part["pictures"]]))
    return before


def length(run: dict[str, Any]) -> float:
    return starts(run)[-1]


def marks(run: dict[str, Any]) -> list[tuple[float, str]]:
    """Return where the parts of a run begin; empty if it has one."""
    names = [part["name"] for part in run["parts"]]
    return list(zip(starts(run), names, strict=False)) if len(names) > 1 else []


def line(name: str, run: dict[str, Any], path: Sequence[str], scale: float = 1.0) -> Line:
    """The curve at a path of each part, such as `("curves", "loss")`."""
    x: list[float] = []
    columns: dict[str, list[float]] = {"value": [], "low": [], "high": []}
    for start, part in zip(starts(run), run["parts"], strict=False):
        curve = value_at(part, path) or {"step": [], "value": []}
        x += [start + step for step in curve["step"]]
        for key, column in columns.items():
            column += [scale * value for value in curve.get(key, curve["value"])]
    if columns["low"] == columns["high"]:
        return Line(name, x, columns["value"])
    return Line(name, x, columns["value"], columns["low"], columns["high"])


def divided(run: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Line]]]:
    """Each division of the held-out loss: its name, what divides it, and a curve by value."""
    for key, what, label in _DIVIDED:
        values = dict.fromkeys(value for part in run["parts"] for value in value_at(part, ("validation", key)) or ())
        yield key, what, {value: line(label.format(value), run, ("validation", key, value)) for value in values}


def labels(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Names of runs; their folders where the names are equal."""
    names = [Path(run["folder"]).name for run in runs]
    return names if len(set(names)) == len(names) else [run["folder"] for run in runs]
