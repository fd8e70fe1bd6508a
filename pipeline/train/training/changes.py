"""Compare a run's base weights with those of its begin, and refuse a run whose weights or data have changed since: a
finished run would show nothing of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sana_pipe.base.errors import UserError
from sana_pipe.base.options import value_at
from sana_pipe.train.models.config import StartWeights
from sana_pipe.train.training.checkpoint import Document, beginning

_WEIGHTS = ("id", "revision", "variant")


def of_weights(weights: StartWeights | None, document: Document) -> list[str]:
    """Say what differs between `model.weights` of a checkpoint and those of now."""
    lines = []
    for name in _WEIGHTS:
        before, now = value_at(document.config, f"model.weights.{name}"), getattr(weights, name, None)
        if before != now:
            lines.append(f"model.weights.{name}: {before!r} then, {now!r} now")
    return lines


def refuse(output: Path, lines: Sequence[str]) -> None:
    """Raise a UserError for a run directory whose checkpoints are of other data or weights than the next run's."""
    if lines:
        raise UserError(
            f"{output}: its checkpoints were trained on other data or weights than the present ones, so nothing was "
            "learnt of these\n  " + "\n  ".join(lines),
            fix=f"to train a further round from it: sana-pipe train {beginning(output)}; to train from the start: the "
            "same command with --set train.output=DIR",
        )
