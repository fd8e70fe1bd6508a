"""Curves through all parts of a run, one behind the other on an axis of optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sana_pipe.tools.reporting.plots import Line
from sana_pipe.tools.reporting.run_figures import Curve, PartFigures, RunFigures, ValidationFigures

CurveOf = Callable[[PartFigures], Curve | None]
"""The choice of a curve in a part of a run."""


def column(name: str) -> CurveOf:
    """The curve of a column of the journal."""
    return lambda part: part.curves.get(name)


def held_out(part: PartFigures) -> Curve | None:
    return None if part.validation is None else part.validation.loss


@dataclass(frozen=True)
class Division:
    """The held-out loss divided. by: what divides it; label: of a value."""

    by: str
    label: str
    curves: Callable[[ValidationFigures], dict[str, Curve]]

    def values(self, part: PartFigures) -> dict[str, Curve]:
        return {} if part.validation is None else self.curves(part.validation)


_DIVISIONS = (
    Division("sigma", "sigma {}", lambda checks: checks.by_sigma),
    Division("bucket", "bucket {}", lambda checks: checks.by_bucket),
    Division("age", "{} samples", lambda checks: checks.by_age),
    Division("part", "{}", lambda checks: checks.parts),
)


def starts(run: RunFigures) -> list[float]:
    """The steps that were done before each part of a run began; at the end those of all."""
    before = [0.0]
    for part in run.parts:
        checks = held_out(part)
        steps = [part.steps or 0, *([] if checks is None else checks.step)]
        before.append(before[-1] + max(steps + [drawing.step for drawing in part.pictures]))
    return before


def length(run: RunFigures) -> float:
    return starts(run)[-1]


def marks(run: RunFigures) -> list[tuple[float, str]]:
    """Return where the parts of a run begin; empty if it has one."""
    names = [part.name for part in run.parts]
    return list(zip(starts(run), names, strict=False)) if len(names) > 1 else []


def line(name: str, run: RunFigures, curve_of: CurveOf, scale: float = 1.0) -> Line:
    """The curve of each part, one behind the other."""
    x, y, low, high = list[float](), list[float](), list[float](), list[float]()
    for start, part in zip(starts(run), run.parts, strict=False):
        if (curve := curve_of(part)) is None:
            continue
        x += [start + step for step in curve.step]
        y += [scale * value for value in curve.value]
        low += [scale * value for value in curve.low or curve.value]
        high += [scale * value for value in curve.high or curve.value]
    return Line(name, x, y) if low == high else Line(name, x, y, low, high)


def divided(run: RunFigures) -> Iterator[tuple[Division, dict[str, Line]]]:
    """Each division of the held-out loss, and its curves by value."""

    def of(division: Division, value: str) -> Line:
        return line(division.label.format(value), run, lambda part: division.values(part).get(value))

    for division in _DIVISIONS:
        values = dict.fromkeys(value for part in run.parts for value in division.values(part))
        yield division, {value: of(division, value) for value in values}


def labels(runs: Sequence[RunFigures]) -> list[str]:
    """Names of runs; their folders where the names are equal."""
    names = [Path(run.folder).name for run in runs]
    return names if len(set(names)) == len(names) else [run.folder for run in runs]
