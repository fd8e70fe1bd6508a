"""Predict for `sana-pipe init` what its run needs: memory, time and disk space, as `plan` computes them."""

from __future__ import annotations

from collections.abc import Callable

from sana_pipe.base.amounts import amount
from sana_pipe.tools.planning import auto, extent, predict
from sana_pipe.tools.planning.predict import Data, Machine
from sana_pipe.tools.planning.search import Search
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.spec import ModelSpec


def run_lines(
    train: TrainConfig, shape: ModelSpec, data: Data, machine: Machine | None, supports: Callable[[str], bool]
) -> list[str]:
    """Memory and time of the run.

    Args:
        machine: None: memory and speed are not predicted.
        supports: whether the weights work in a value of `train.precision`.

    Raises:
        NothingFitsError: nothing fits into the card, as predicted.
    """
    lines, step = list[str](), None
    if machine is not None and not machine.card.supports(train.precision):
        lines.append(
            f"warning: {machine.card.name} has no bf16, so memory and speed are not predicted "
            "(--set train.precision=fp32, or another card)"
        )
    elif machine is not None:
        search = Search(shape, data, machine, supports)
        decided, lines = auto.decide(train, machine, lambda: search)
        layout_of_run = predict.check(decided, shape, data, machine.gpus)
        step = search.candidate(decided, layout_of_run).time.step
    return lines + extent.lines(train, shape, data, step)[:1]  # without its warning: the epochs are chosen


def disk_lines(train: TrainConfig, shape: ModelSpec, data: Data, cache: int, free: int | None) -> list[str]:
    """The size of the cache, and a warning if the disk is too small for it and the checkpoints.

    Args:
        cache: bytes of the cache. free: bytes of its disk; None: unknown.
    """
    steps = extent.steps_of(train, data)
    count = 0 if steps is None else extent.kept_checkpoints(train, steps)
    kept = count * predict.checkpoint_bytes(shape, train)
    lines = [f"the cache: about {amount(cache)}, without a tokenizer (sana-pipe encode --dry-run counts)"]
    if free is not None and free < cache + kept:
        lines.append(
            f"warning: {amount(free)} are free here, but {amount(cache + kept)} are needed: use another disk for cache "
            "and train.output, or a lower train.keep_checkpoints"
        )
    return lines
