"""The extent of a run: steps, pictures, epochs, hours, and the disk space of its checkpoints."""

from __future__ import annotations

from sana_pipe.base.amounts import amount, duration, figure
from sana_pipe.tools.planning.predict import Data, checkpoint_bytes
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.spec import ModelSpec

MANY_EPOCHS = 100
"""From so many on a model has most likely learnt its pictures by heart."""


def kept_checkpoints(train: TrainConfig, steps: int) -> int:
    """Return how many checkpoints there are at most at the end of a run: the best may be among the newest."""
    saved = [*range(train.save_every, steps, train.save_every), steps]
    older = saved[: -train.keep_checkpoints]
    marked = 0 if train.keep_every is None else sum(step % train.keep_every == 0 for step in older)
    best = 0
    if train.validation is not None and any(step % train.validation.every == 0 for step in older):
        best = 1 if train.ema is None else 2
    return len(saved) - len(older) + min(len(older), marked + best)


def steps_of(train: TrainConfig, data: Data) -> int | None:
    """The steps of a run; None: `train.epochs` of an unknown number of samples."""
    if train.epochs is None:
        return train.steps
    return None if data.samples is None else max(1, round(train.epochs * data.samples / _batch(data)))


def _batch(data: Data) -> float:
    return sum(data.buckets.values()) / len(data.buckets)


def lines(train: TrainConfig, shape: ModelSpec, data: Data, step_s: float | None = None) -> list[str]:
    """The run in a line, and a warning of a great many epochs.

    Args:
        step_s: seconds of a step, if they are known.
    """
    if (steps := steps_of(train, data)) is None:
        return []
    pictures = steps * _batch(data)
    size = checkpoint_bytes(shape, train)
    count = kept_checkpoints(train, steps)
    parts = [f"{steps:,} steps of {_batch(data):,.0f} pictures, {pictures:,.0f} in all"]
    epochs = None if data.samples is None else pictures / data.samples
    if epochs is not None:
        parts.append(f"{figure(epochs)} epochs of {data.samples:,}")
    if step_s is not None:
        parts.append(f"about {duration(steps * step_s)}")
    parts.append(f"checkpoints of {amount(size)}, {amount(count * size)} for the {count} that are kept")
    result = ["the run: " + ", ".join(parts)]
    if epochs is not None and epochs >= MANY_EPOCHS:
        result.append(
            f"warning: each picture is trained on about {epochs:,.0f} times, until the model knows it by heart: more "
            "pictures, or fewer steps (--set train.steps=null --set train.epochs=20)"
        )
    return result
