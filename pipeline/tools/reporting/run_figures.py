"""The numbers of a run: losses, validation, speed, waiting, memory next to the plan, and the differences of two runs.

What: `run_figures` reads a run directory, or a folder of run directories, and the runs that they began from. Curves are
thinned to `POINTS` points, each the mean of its steps with their lowest and highest value, so that a page about a long
run stays small and a spike stays visible.
Price: the journal is parsed once; all its rows are in memory meanwhile (0.2 GB for 100,000 rows).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sana_pipe.base.errors import UserError
from sana_pipe.base.options import flat, value_at
from sana_pipe.config import read_tree
from sana_pipe.tools.reporting import run_pictures, run_plots
from sana_pipe.tools.reporting.adapter_figures import AdapterFigures, AdapterProblem, adapter_figures
from sana_pipe.tools.reporting.run_pictures import DrawingFigures, UnreadableDrawing
from sana_pipe.train.training.metrics import read_events

JOURNAL = "metrics.jsonl"
ORIGIN = "from.json"
"""The file that `train --from` wrote into a run directory: the checkpoint that it began from."""
SUMMARY = "summary.json"
POINTS = 400
NOT_PLOTTED = ("quarantined",)
"""Columns of the journal that become curves, although no plot of `run_plots.PLOTS` shows them."""


@dataclass(frozen=True)
class Curve:
    """Values by optimizer step. low, high: where each value is the mean of several, their lowest and highest."""

    step: list[float]
    value: list[float]
    low: list[float] | None = None
    high: list[float] | None = None


@dataclass(frozen=True)
class ValidationFigures:
    """Curves of the held-out loss.

    Attributes:
        rows: how often it was measured; samples: on how many samples the last time.
        ema_loss: None without EMA.
        by_age: of old and new samples.
        parts: of a loss that has several.
    """

    rows: int
    samples: int | None
    loss: Curve | None
    ema_loss: Curve | None
    by_sigma: dict[str, Curve]
    by_bucket: dict[str, Curve]
    by_age: dict[str, Curve]
    parts: dict[str, Curve]


@dataclass(frozen=True)
class PartFigures:
    """The numbers of a run directory.

    Attributes:
        began: the time of the first start; None: the journal has none.
        attempts: how often it was started; processes, device: of the last start.
        snapshots: their ids, in the order of the starts.
        rows: of the journal. steps: of the last row.
        last, mean, curves: by column of the journal: the last value, the mean, all values.
        prediction, summary: the documents of the run directory.
    """

    name: str
    folder: str
    began: str | None
    attempts: int
    processes: int | None
    device: str | None
    snapshots: list[str]
    rows: int
    steps: int | None
    last: dict[str, float]
    mean: dict[str, float]
    curves: dict[str, Curve]
    validation: ValidationFigures | None
    pictures: list[DrawingFigures | UnreadableDrawing]
    adapter: AdapterFigures | AdapterProblem | None
    prediction: dict[str, Any] | None
    summary: dict[str, Any] | None


@dataclass(frozen=True)
class DifferingOption:
    """An option and its values in two runs."""

    option: str
    here: Any
    there: Any


@dataclass(frozen=True)
class RunFigures:
    """The numbers of a run.

    Attributes:
        parts: one for each run directory, in the order in which they began.
        lost: sentences about runs that a part began from (`train --from`) and that are not there any more.
        options: those that differ from the run that it is compared with; None: it is not compared.
    """

    folder: str
    parts: list[PartFigures]
    lost: list[str]
    options: list[DifferingOption] | None = None


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run directory or a folder of run directories."""
    return _is_part(folder) or any(_is_part(path) for path in _folders(folder))


def _is_part(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (JOURNAL, SUMMARY))


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []


def run_figures(folder: Path, earlier: bool = False) -> RunFigures:
    """Read the numbers of a run. One run directory is one part.

    Args:
        earlier: the runs that this one began from, and those before them, are parts, too.

    Raises:
        UserError: it is not a run directory.
    """
    if not is_run(folder):
        raise UserError(
            f"{folder}: is not a run directory",
            expected=f"a folder with {JOURNAL} or {SUMMARY}, or a folder of such folders",
            found="a folder without them" if folder.is_dir() else "no such folder",
            fix="give the folder that a training wrote (its train.output): --run DIR or --compare DIR",
        )
    lost: list[str] = []
    folders = [path for path in (folder, *_folders(folder)) if _is_part(path)]
    known = {path.resolve() for path in folders}
    for path in folders if earlier else ():  # grows as it is walked
        origin, problem = _origin(path)
        if origin is not None and origin.resolve() not in known:
            if _is_part(origin):
                folders.append(origin)
                known.add(origin.resolve())
            elif origin.name not in _siblings(path, folder):
                problem = f"{path} began from {origin}, which is no longer a run directory"
        lost += [problem] if problem else []
    parts = sorted(map(_part, folders), key=lambda part: part.began or "")
    return RunFigures(str(folder), parts, lost)


def _siblings(part: Path, folder: Path) -> set[str]:
    """Names of the other runs next to a run: after a move of their folder they are its origins."""
    return {path.name for path in _folders(folder) if _is_part(path)} if part.parent == folder else set()


def _origin(folder: Path) -> tuple[Path | None, str]:
    """The run directory that a run began from, if any, and what keeps it from being read."""
    path = folder / ORIGIN
    try:
        return Path(str(json.loads(path.read_text(encoding="utf-8"))["checkpoint"])).parents[1], ""
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        return None, f"{path} cannot be read: {error!r}"


def _part(folder: Path) -> PartFigures:
    events = read_events(folder / JOURNAL) if (folder / JOURNAL).is_file() else {}
    rows, starts = events.get(None, []), events.get("start", [])
    parts = dict.fromkeys(name for row in rows for name in row.get("parts") or {})
    names = [*(plot.column for plot in run_plots.PLOTS), *NOT_PLOTTED]
    places = {name: (name,) for name in names} | {f"loss: {name}": ("parts", name) for name in parts}
    columns = {name: column for name, place in places.items() if len((column := _column(rows, *place))[0])}
    return PartFigures(
        name=folder.name,
        folder=str(folder),
        began=starts[0].get("time") if starts else None,
        attempts=len(starts),
        processes=starts[-1].get("processes") if starts else None,
        device=starts[-1].get("device") if starts else None,
        snapshots=list(dict.fromkeys(start["snapshot"] for start in starts if start.get("snapshot"))),
        rows=len(rows),
        steps=rows[-1]["step"] if rows else None,
        last={name: rows[-1][name] for name in names if _number(rows[-1].get(name))} if rows else {},
        mean={name: float(values.mean()) for name, (_, values) in columns.items()},
        curves={name: thinned(steps, values) for name, (steps, values) in columns.items()},
        validation=_validation(events.get("validation", [])),
        pictures=run_pictures.listed(folder, events.get("pictures", [])),
        adapter=adapter_figures(folder),
        prediction=_document(folder / "prediction.json"),
        summary=_document(folder / SUMMARY),
    )


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _column(rows: Iterable[dict[str, Any]], *path: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps (n,) and values (n,) float64 of the rows that have a number there."""
    steps, values = [], []
    for row in rows:
        if _number(value := value_at(row, path)):
            steps.append(row["step"])
            values.append(value)
    return np.array(steps, np.float64), np.array(values, np.float64)


def _curve(rows: list[dict[str, Any]], *path: str) -> Curve | None:
    steps, values = _column(rows, *path)
    return thinned(steps, values) if len(steps) else None


def thinned(steps: np.ndarray, values: np.ndarray) -> Curve:
    """Make a curve. Above `POINTS` points each is the mean of equally many neighbours, with `low` and `high`, at their
    last step."""
    if len(steps) <= POINTS:
        return Curve(steps.tolist(), values.tolist())
    first = np.arange(POINTS) * len(steps) // POINTS
    counts = np.diff(np.append(first, len(steps)))
    return Curve(
        step=steps[first + counts - 1].tolist(),
        value=(np.add.reduceat(values, first) / counts).tolist(),
        low=np.minimum.reduceat(values, first).tolist(),
        high=np.maximum.reduceat(values, first).tolist(),
    )


def _validation(rows: list[dict[str, Any]]) -> ValidationFigures | None:
    if not rows:
        return None

    def several(name: str) -> dict[str, Curve]:
        keys = dict.fromkeys(key for row in rows for key in (row.get(name) or {}))
        found = {key: _curve(rows, name, key) for key in keys}
        return {key: curve for key, curve in found.items() if curve is not None}

    return ValidationFigures(
        rows=len(rows),
        samples=rows[-1].get("samples"),
        loss=_curve(rows, "loss"),
        ema_loss=_curve(rows, "ema_loss"),
        by_sigma=several("by_sigma"),
        by_bucket=several("by_bucket"),
        by_age=several("by_age"),
        parts=several("parts"),
    )


def _document(path: Path) -> dict[str, Any] | None:
    """A JSON object of the run directory; None where it is missing or unreadable: it is no part of the journal."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def undecoded(run: RunFigures) -> list[tuple[str, str]]:
    """List the drawings of a run that are not decoded, with the command for it: of its folder, and of each run that it
    began from."""
    folders: dict[str, list[DrawingFigures | UnreadableDrawing]] = {}
    for part in run.parts:
        inside = Path(part.folder).is_relative_to(run.folder)
        folders.setdefault(run.folder if inside else part.folder, []).extend(part.pictures)
    counts = {folder: sum(not is_decoded(each) for each in drawings) for folder, drawings in folders.items()}
    return [
        (
            f"{count} of {len(folders[folder])} drawings of {folder} are not decoded",
            run_pictures.decode_command(Path(folder)),
        )
        for folder, count in counts.items()
        if count
    ]


def is_decoded(drawing: DrawingFigures | UnreadableDrawing) -> bool:
    return isinstance(drawing, DrawingFigures) and drawing.pictures is not None


# ---------------------------------------------------------------- two runs


def differing_options(first: RunFigures, second: RunFigures) -> list[DifferingOption]:
    """Options whose values differ, from `config.yaml` of the last part of each run.

    Raises:
        UserError: a configuration is missing or unreadable.
    """
    folders = (Path(run.parts[-1].folder) for run in (first, second))
    here, there = (dict(flat(read_tree(folder / "config.yaml"))) for folder in folders)
    return [
        DifferingOption(name, here.get(name), there.get(name))
        for name in dict.fromkeys([*here, *there])
        if here.get(name) != there.get(name)
    ]
