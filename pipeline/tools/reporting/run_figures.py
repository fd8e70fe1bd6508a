"""The numbers of a run: losses, validation, speed, waiting, memory next to the plan, and the differences of two runs.

What: `run_figures` reads a run directory, or a folder of run directories, and the runs that they began from, into JSON
values. Curves are thinned to `POINTS` points, each the mean of its steps with their lowest and highest value, so that a
page about a long run stays small and a spike stays visible.
Price: the journal is parsed once; all its rows are in memory meanwhile (0.2 GB for 100,000 rows).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.base.errors import UserError
from pipeline.base.options import flat, value_at
from pipeline.config import read_tree
from pipeline.tools.reporting import run_pictures
from pipeline.tools.reporting.adapter_figures import adapter_figures
from pipeline.train.training.metrics import read_events

JOURNAL = "metrics.jsonl"
ORIGIN = "from.json"
"""The file that `train --from` wrote into a run directory: the checkpoint that it began from."""
SUMMARY = "summary.json"
POINTS = 400
CURVES = (
    *("loss", "grad_norm", "lr", "images_per_s", "tokens_per_s", "data_wait", "mfu"),
    *("memory_gib", "reserved_gib", "rss_gib", "quarantined", "loss_scale"),
)
"""Columns of the journal that become curves."""
Curve = dict[str, list[float]]


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


def run_figures(folder: Path, earlier: bool = False) -> dict[str, Any]:
    """The numbers of a run: `folder`; `parts`, one for each run directory in the order in which they began; `lost`,
    sentences about runs that a part began from (`train --from`) and that are not there any more. One run has one part.

    Args:
        earlier: the runs that this one began from, and those before them, are parts, too.

    Raises:
        UserError: it is no run directory.
    """
    if not is_run(folder):
        raise UserError(
            f"{folder}: is no run directory",
            expected=f"a folder with {JOURNAL}, or with folders that have one",
            fix="sana-pipe train writes one to train.output; --run DIR names another",
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
                problem = f"{path} began from {origin}, and there is no run any more"
        lost += [problem] if problem else []
    parts = sorted(map(_part, folders), key=lambda part: part["began"] or "")
    return {"folder": str(folder), "parts": parts, "lost": lost}


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


def _part(folder: Path) -> dict[str, Any]:
    events = read_events(folder / JOURNAL) if (folder / JOURNAL).is_file() else {}
    rows, starts = events.get(None, []), events.get("start", [])
    parts = dict.fromkeys(name for row in rows for name in row.get("parts") or {})
    places = {name: (name,) for name in CURVES} | {f"loss: {name}": ("parts", name) for name in parts}
    columns = {name: column for name, place in places.items() if len((column := _column(rows, *place))[0])}
    return {
        "name": folder.name,
        "folder": str(folder),
        "began": starts[0].get("time") if starts else None,
        "attempts": len(starts),
        "processes": starts[-1].get("processes") if starts else None,
        "device": starts[-1].get("device") if starts else None,
        "snapshots": list(dict.fromkeys(start["snapshot"] for start in starts if start.get("snapshot"))),
        "rows": len(rows),
        "steps": rows[-1]["step"] if rows else None,
        "last": {name: rows[-1][name] for name in CURVES if _number(rows[-1].get(name))} if rows else {},
        "mean": {name: float(values.mean()) for name, (_, values) in columns.items()},
        "curves": {name: thinned(steps, values) for name, (steps, values) in columns.items()},
        "validation": _validation(events.get("validation", [])),
        "pictures": run_pictures.listed(folder, events.get("pictures", [])),
        "adapter": adapter_figures(folder),
        "prediction": _document(folder / "prediction.json"),
        "summary": _document(folder / SUMMARY),
    }


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
    """`step` and `value`. Above `POINTS` points each is the mean of equally many neighbours, with `low` and `high`, at
    their last step."""
    if len(steps) <= POINTS:
        return {"step": steps.tolist(), "value": values.tolist()}
    first = np.arange(POINTS) * len(steps) // POINTS
    counts = np.diff(np.append(first, len(steps)))
    return {
        "step": steps[first + counts - 1].tolist(),
        "value": (np.add.reduceat(values, first) / counts).tolist(),
        "low": np.minimum.reduceat(values, first).tolist(),
        "high": np.maximum.reduceat(values, first).tolist(),
    }


def _validation(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Curves of the held-out loss: `loss`, `ema_loss` (null without EMA), `by_sigma`, `by_bucket`, `by_age`
    (old and new samples), `parts` (of a loss that has several)."""
    if not rows:
        return None

    def several(name: str) -> dict[str, Curve]:
        keys = dict.fromkeys(key for row in rows for key in (row.get(name) or {}))
        found = {key: _curve(rows, name, key) for key in keys}
        return {key: curve for key, curve in found.items() if curve is not None}

    return {
        "rows": len(rows),
        "samples": rows[-1].get("samples"),
        "loss": _curve(rows, "loss"),
        "ema_loss": _curve(rows, "ema_loss"),
        **{name: several(name) for name in ("by_sigma", "by_bucket", "by_age", "parts")},
    }


def _document(path: Path) -> dict[str, Any] | None:
    """A JSON object of the run directory; None where it is missing or unreadable: it is no part of the journal."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


# ---------------------------------------------------------------- two runs


def differing_options(first: dict[str, Any], second: dict[str, Any]) -> list[dict[str, Any]]:
    """Options whose values differ: `option`, `here`, `there`; from `config.yaml` of the last part of each run.

    Raises:
        UserError: a configuration is missing or unreadable.
    """
    folders = (Path(run["parts"][-1]["folder"]) for run in (first, second))
    here, there = (dict(flat(read_tree(folder / "config.yaml"))) for folder in folders)
    return [
        {"option": name, "here": here.get(name), "there": there.get(name)}
        for name in dict.fromkeys([*here, *there])
        if here.get(name) != there.get(name)
    ]
