"""Find the checkpoints of a run with the lowest held-out loss, by the validation rows of its `metrics.jsonl`.

Only a loss that was measured after the step of a checkpoint counts for it. Losses of different validation sets, and of
last and EMA weights, are not compared with each other. A loss that is not finite counts for nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from sana_pipe.train.training.metrics import read_events

METRICS = "metrics.jsonl"
Losses = dict[int, float]
"""Held-out losses by step."""


def losses(run: Path, *, ema: bool = False) -> list[Losses]:
    """The losses of a run directory by validation set, the set of the newest row last; empty without validations.

    Raises:
        UserError: the rows cannot be read.
    """
    path, name = run / METRICS, "ema_loss" if ema else "loss"
    by_set: dict[str | None, Losses] = {}
    for row in read_events(path, events_only=True).get("validation", []) if path.exists() else []:
        of_set = by_set.pop(row.get("snapshot"), {})
        by_set[row.get("snapshot")] = of_set
        if isinstance(row.get(name), float):
            of_set[row["step"]] = row[name]
    return list(by_set.values())


def best(run: Path, steps: Collection[int], *, ema: bool = False) -> tuple[int, Losses] | None:
    """Find the step, of those with a checkpoint, with the lowest loss on the newest validation set, and the losses of
    all of them; None: none has one. Of equal losses the first step's."""
    there = _of_steps((losses(run, ema=ema) or [{}])[-1], steps)
    return (min(there, key=lambda step: (there[step], step)), there) if there else None


def lowest(run: Path, steps: Collection[int]) -> set[int]:
    """The steps whose checkpoints rotation leaves: the best of each validation set, by last and by EMA weights."""
    found = set()
    for ema in (False, True):
        for of_set in losses(run, ema=ema):
            if there := _of_steps(of_set, steps):
                found.add(min(there, key=lambda step: (there[step], step)))
    return found


def _of_steps(of_set: Losses, steps: Collection[int]) -> Losses:
    return {step: of_set[step] for step in sorted(steps) if step in of_set}
