"""A chain of phases: which are finished, and what each has learned.

A phase is a separate run directory, `train.output`/NAME, that begins from the last checkpoint of the phase before.
`survey` reads from the directories alone where the chain stands, so no second record can contradict them, and a phase
may be added or edited between two starts.
Price: a phase is taken for finished when its last checkpoint has the steps that it began with; more steps for it are
another phase.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.amounts import duration
from pipeline.cache.disk import replacing
from pipeline.cache.snapshot import Head
from pipeline.config import Config
from pipeline.errors import ConfigError, writing
from pipeline.loader.schedule import Schedule
from pipeline.training import checkpoint
from pipeline.training.metrics import not_looked_at, read_events

NAME = "summary.json"


@dataclass(frozen=True)
class PhaseState:
    """What the run directory of a phase says. last: its newest checkpoint, if any. finished: its steps are done, with
    the validation and the pictures after the last, or a later phase has begun."""

    name: str
    folder: Path
    last: checkpoint.Resumed | None
    finished: bool


def survey(config: Config) -> list[PhaseState]:
    """The phases in their order.

    Raises:
        ConfigError: a phase without a checkpoint stands before one that has begun.
        CheckpointError: the newest checkpoint of a phase is damaged.
    """
    places: list[PhaseState] = []
    for phase in config.phases:
        folder = Path(config.train.output) / phase.name
        last = checkpoint.newest(folder / "checkpoints")
        resumed = None if last is None else checkpoint.Resumed(last, checkpoint.read_document(last))
        if resumed is not None:
            missing = next((place.name for place in places if place.last is None), None)
            if missing is not None:
                raise ConfigError(
                    f"phases: {missing!r} has no checkpoint and stands before {phase.name!r}, which has begun",
                    fix=f"put {missing!r} behind the phases that have begun, or set another train.output",
                )
            places = [PhaseState(place.name, place.folder, place.last, True) for place in places]
        places.append(PhaseState(phase.name, folder, resumed, resumed is not None and _is_finished(folder, resumed)))
    return places


def _is_finished(folder: Path, last: checkpoint.Resumed) -> bool:
    train = last.document.config["train"]
    validation, drawn = train.get("validation"), train.get("pictures") is not None
    snapshot = validation and validation["snapshot"]
    return last.done > train["steps"] or (
        last.done == train["steps"]
        and not not_looked_at(folder, last.done, snapshot, validated=validation is not None, drawn=drawn)
    )


def summarize(place: PhaseState, head: Head | None) -> dict[str, Any]:
    """Write `summary.json` of a finished phase and return it.

    name, phase: the phase, and its number. snapshot: id. steps; samples: of their global batches (null without `head`).
    loss: mean of the rows of the last tenth of the steps. lr: the highest rate. seconds: of all attempts. images_per_s:
    median of the rows. validation: the last row `event: validation` of the journal, or null. checkpoint: its name.

    Args:
        head: of the phase's snapshot; None: it is not there any more.
    """
    assert place.last is not None
    state = place.last.document.state
    journal = place.folder / "metrics.jsonl"
    events = read_events(journal) if journal.exists() else {}
    rows = events.get(None, [])
    late = [row for row in rows if row["step"] > 0.9 * state.step] or rows[-1:]
    speeds = sorted(row["images_per_s"] for row in rows)
    schedule = None if head is None else Schedule.of(head, seed=state.seed, phase=state.phase)
    summary = {
        "name": place.name,
        "phase": state.phase,
        "snapshot": state.snapshot,
        "steps": state.step,
        "samples": None if schedule is None else schedule.samples_upto(state.step),
        "loss": sum(row["loss"] for row in late) / len(late) if late else None,
        "lr": max((row["lr"] for row in rows), default=None),
        "seconds": sum(start.get("seconds", 0.0) for start in events.get("start", [])),
        "images_per_s": speeds[len(speeds) // 2] if speeds else None,
        "validation": next(reversed(events.get("validation", [])), None),
        "checkpoint": place.last.folder.name,
    }
    path = place.folder / NAME
    with writing(path, "check the rights, then --resume auto", again="--resume auto"), replacing(path) as work:
        work.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return summary


def table(summaries: list[dict[str, Any]]) -> list[str]:
    """The phases side by side, for people."""

    def shown(value: Any, form: str) -> str:
        return "-" if value is None else format(value, form)

    ages = [(row["validation"] or {}).get("by_age") or {} for row in summaries]
    divided = ("old", "new") if any(ages) else ()
    lines = [("phase", "snapshot", "steps", "samples", "rate", "loss", "validation", *divided, "images/s", "time")]
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
