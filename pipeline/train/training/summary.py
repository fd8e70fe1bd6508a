"""Summarize what a finished run has learned: `summary.json` in its directory, and a table of it and the runs that it
began from.

Price: the journal is read once more when a run ends.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sana_pipe.base.amounts import duration
from sana_pipe.base.disk import replacing
from sana_pipe.base.errors import UserError, writing
from sana_pipe.data.cache.snapshot_head import Head
from sana_pipe.data.loader.loader import LoaderState
from sana_pipe.data.loader.schedule import Schedule
from sana_pipe.train.training.checkpoint import recorded_origin
from sana_pipe.train.training.metrics import read_events

NAME = "summary.json"


def summarize(last: Path, state: LoaderState, head: Head) -> dict[str, Any]:
    """Write `summary.json` of a finished run and return it.

    name: of the run directory. phase: how many runs come before it. snapshot: id. steps; samples: of their global
    batches. loss: mean of the rows of the last tenth of the steps. lr: the highest rate. seconds: of all attempts.
    images_per_s: median of the rows. validation: the last row `event: validation` of the journal, or null. checkpoint:
    its name.

    Args:
        last: the newest checkpoint of the run; state: its state. head: of its snapshot.
    """
    run = last.parents[1]
    journal = run / "metrics.jsonl"
    events = read_events(journal) if journal.exists() else {}
    rows = events.get(None, [])
    late = [row for row in rows if row["step"] > 0.9 * state.step] or rows[-1:]
    speeds = sorted(row["images_per_s"] for row in rows)
    summary = {
        "name": run.absolute().name,
        "phase": state.phase,
        "snapshot": state.snapshot,
        "steps": state.step,
        "samples": Schedule.of(head, seed=state.seed, phase=state.phase).samples_upto(state.step),
        "loss": sum(row["loss"] for row in late) / len(late) if late else None,
        "lr": max((row["lr"] for row in rows), default=None),
        "seconds": sum(start.get("seconds", 0.0) for start in events.get("start", [])),
        "images_per_s": speeds[len(speeds) // 2] if speeds else None,
        "validation": next(reversed(events.get("validation", [])), None),
        "checkpoint": last.name,
    }
    path = run / NAME
    with writing(path, "check the permissions, then --resume auto", again="--resume auto"), replacing(path) as work:
        work.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return summary


def rounds(run: Path) -> list[dict[str, Any]]:
    """Read the summaries of a run and of the runs that it began from, the first one first, as far as they are there."""
    summaries: list[dict[str, Any]] = []
    seen: set[Path] = set()
    while run.resolve() not in seen:
        seen.add(run.resolve())
        try:
            summaries.insert(0, json.loads((run / NAME).read_text(encoding="utf-8")))
            origin = recorded_origin(run)
        except (OSError, ValueError, UserError):
            break
        if origin is None:
            break
        run = Path(origin).parents[1]
    return summaries


def table(summaries: list[dict[str, Any]]) -> list[str]:
    """The rounds side by side, for people."""

    def shown(value: Any, form: str) -> str:
        return "-" if value is None else format(value, form)

    ages = [(row["validation"] or {}).get("by_age") or {} for row in summaries]
    divided = ("old", "new") if any(ages) else ()
    lines = [("round", "snapshot", "steps", "samples", "rate", "loss", "validation", *divided, "images/s", "time")]
    for row, by_age in zip(summaries, ages, strict=True):
        validation = (row["validation"] or {}).get("loss")
        lines.append(
            (
                row["name"],
                row["snapshot"][:12],
                str(row["steps"]),
                shown(row["samples"], "d"),
                shown(row["lr"], ".2e"),
                shown(row["loss"], ".4f"),
                shown(validation if isinstance(validation, float) else None, ".4f"),
                *(shown(by_age.get(age), ".4f") for age in divided),
                shown(row["images_per_s"], ".1f"),
                duration(row["seconds"]),
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]
