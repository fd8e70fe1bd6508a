"""Validation: the loss on held-out samples at fixed noise levels, while a run goes on.

Fixed levels, noise and captions, because the loss of flow matching differs more between noise levels than between good
and bad weights (the mean over equidistant levels is MLPerf Training's rule for text-to-image). Nothing of the training
changes: no generator is used, averages are exchanged with the weights and back bit for bit, gathered parameters are
freed, and blocks run uncompiled, so that no graph is added.
Price: `samples` x `LEVELS` forward passes each time (about a third of a step each), twice with averages, and twice for
an objective with a contrast.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sana_pipe.data.loader.loader import Batch
from sana_pipe.train.models.flow_matching import equidistant
from sana_pipe.train.parallel.collectives import broadcast_from_rank_0, run_on_all
from sana_pipe.train.training.build import TrainingRun
from sana_pipe.train.training.config import ValidationConfig
from sana_pipe.train.training.feeding import Feed
from sana_pipe.train.training.lock import Lock
from sana_pipe.train.training.metrics import Metrics
from sana_pipe.train.training.stop_request import StopRequest

LEVELS = 8
"""Noise levels at which each sample is measured, as in MLPerf Training's text-to-image benchmark."""
Totals = dict[tuple[int, int], Tensor]
"""Sums by bucket: (groups, levels + parts + 1) float64, those of the losses at each level and of each part of a loss
that has several, and the numbers of samples; before these, for an objective with a contrast, the sums of what it adds
to the loss and the numbers of samples that have another one in their microbatch. The groups are `_AGES` where the task
names old samples, else there is one."""
_AGES = ("old", "new")


class Validation:
    """Call it after every step, and before the first. Build it on every process; the journal is the first one's.
    ended: why the objective ends the run; None: it goes on."""

    def __init__(self, run: TrainingRun, journal: Metrics | None, stop: StopRequest, lock: Lock):
        self.run, self.journal, self.stop, self.lock = run, journal, stop, lock
        context = run.context
        self.settings, make = context.train.validation or ValidationConfig(), context.task.validation
        self.parts = None if make is None else run_on_all(lambda: make(context.layout))
        self.levels = equidistant(LEVELS)
        self.group: dist.ProcessGroup | None = None  # of the feed
        self._divided = () if context.task.old_samples is None else ("by_age",)
        parts = run.trainable.objective.parts
        self._parts = tuple(parts) if len(parts) > 1 else ()
        self._contrast = run.trainable.objective.contrast if context.train.microbatch > 1 else None
        has_parts = self._parts or self._contrast is not None
        self.ended: str | None = None
        self._keys = "loss", "by_sigma", "by_bucket", *self._divided, *(("parts",) if has_parts else ())

    def __call__(self, step: int) -> bool:
        """Validate if it is due. Collective. Returns False if a stop request ended it early."""
        if self.parts is None or not is_due(self.run, step, self.settings.every, self._is_done):
            return True
        self.run.step.await_verdict()
        began = time.perf_counter()
        totals, averaged = self._measured(), None
        if totals is not None and self.run.ema is not None:
            with self.run.ema.swapped_in():
                averaged = self._measured()
        if totals is None or (averaged is None and self.run.ema is not None):
            return False
        if self.journal is not None and not self.lock.lost:
            values = {
                "step": step,
                **self._means(totals),
                **self._means(averaged, "ema_"),
                "samples": round(float(sum(sums[:, -1].sum() for sums in totals.values()))),
                "snapshot": self.settings.snapshot,
                "seconds": time.perf_counter() - began,
                **({"leaked": leaked} if (leaked := self.run.context.task.leaked) else {}),
            }
            self.journal.validation(self.run.context.train.steps, values)
        if self.run.trainable.objective.may_end and step:
            self.ended = broadcast_from_rank_0(self._why_end)
        return True

    def _why_end(self) -> str | None:
        parts = [] if self.journal is None else self.journal.validated_parts(self.settings.snapshot)
        return self.run.trainable.objective.why_end(parts) if parts else None

    def _is_done(self) -> bool:
        return self.journal is not None and self.journal.has_validation(self.run.done, self.settings.snapshot)

    def _measured(self) -> Totals | None:
        """One pass over the samples; None if a stop request ended it. Collective."""
        context, step, model = self.run.context, self.run.step, self.run.model
        totals: Totals = {}
        with closing(self._microbatches()) as microbatches, evaluating(self.run):
            feed = Feed(microbatches, lambda: 0, context.folder, context.task.patience_s, context.log, self.group)
            self.group = feed.group
            for _, (batch,), counted in feed:
                prepared = (step.prepare(batch, level) for level in self.levels)
                rows = torch.stack(model.losses(prepared, step.loss))[:, :, :counted]
                groups = self._groups(batch.sample_ids[:counted]).to(rows.device)
                losses, parts = rows[:, 0].double(), rows[:, 1:].double().mean(0)
                contrast = self._contrasting(batch, losses.mean(0))
                values = torch.cat([losses, parts, *contrast, losses.new_ones(1, counted)])
                sums = torch.stack([values[:, group].sum(1) for group in groups])
                # waits for the device, so that the loader may use the batch's memory again
                totals[batch.bucket] = totals.get(batch.bucket, torch.zeros(())) + sums.cpu()
        if feed.broken:
            feed.raise_failure()
            return None
        # Processes that share a model have the same sums, which the division by their counts makes up for.
        joined = torch.stack(list(totals.values()))
        if dist.get_world_size() > 1:
            dist.all_reduce(joined)
        return dict(zip(totals, joined / context.layout.model_parallel_size, strict=True))

    def _contrasting(self, batch: Batch, losses: Tensor) -> list[Tensor]:
        """Return what the objective's contrast adds to the losses (n,) of the samples that count, and which of them
        have another one in the microbatch: (1, n) each. None without a contrast."""
        if self._contrast is None:
            return []
        step, other = self.run.step, self.run.trainable.objective.contrasted(batch)
        rows = self.run.model.losses((step.prepare(other, level) for level in self.levels), step.loss)
        added = torch.stack(rows)[:, :1, : len(losses)].double().mean(0) - losses
        compared = torch.full_like(added, len(losses) > 1)  # one that is alone is repeated to fill the microbatch
        return [added * compared, compared]

    def _groups(self, ids: Sequence[int]) -> Tensor:
        """Find which samples are in which group, bool (groups, n)."""
        old = self.run.context.task.old_samples
        if old is None:
            return torch.ones(1, len(ids), dtype=torch.bool)
        is_old = torch.from_numpy(np.isin(np.array(ids, np.uint64), old))
        return torch.stack([is_old, ~is_old])

    def _microbatches(self) -> Generator[tuple[list[Batch], int]]:
        assert self.parts is not None
        for batch, counted in self.parts:
            self.stop.check()
            yield [batch], counted

    def _mean(self, sums: Tensor) -> float | None:
        return _finite(float(sums[: len(self.levels)].mean() / sums[-1]))

    def _means(self, totals: Totals | None, prefix: str = "") -> dict[str, Any]:
        """The part of a row about these weights."""
        if totals is None:
            return {prefix + name: None for name in self._keys}
        groups = torch.stack(list(totals.values())).sum(0)
        joined = groups.sum(0)
        count, means_by_row = len(self.levels), (joined[:-1] / joined[-1]).tolist()
        by_sigma = dict(zip(self.levels, means_by_row[:count], strict=True))
        means = {
            "loss": _finite(sum(by_sigma.values()) / len(by_sigma)),
            "by_sigma": {f"{sigma:g}": _finite(loss) for sigma, loss in by_sigma.items()},
            "by_bucket": {f"{h}x{w}": self._mean(sums.sum(0)) for (h, w), sums in totals.items()},
            **{name: dict(zip(_AGES, map(self._mean, groups), strict=True)) for name in self._divided},
        }
        parts = dict(zip(self._parts, map(_finite, means_by_row[count:]), strict=False))
        if self._contrast is not None:
            added, compared = joined[-3:-1].tolist()
            there = compared and means["loss"] is not None
            parts[self._contrast] = _finite(means["loss"] + added / compared) if there else None
        if parts:
            means["parts"] = parts
        return {prefix + name: value for name, value in means.items()}


def is_due(run: TrainingRun, step: int, every: int, is_done: Callable[[], bool]) -> bool:
    """Return whether something is done now that is done before the first step, every `every` steps and after the last,
    unless the run is to end, or an attempt before a resume has done it (`is_done`, on the first process)."""
    if run.step.stop_wanted or (step % every and step != run.context.train.steps):
        return False
    return step != run.done or not step or not broadcast_from_rank_0(is_done)


@contextmanager
def evaluating(run: TrainingRun) -> Iterator[None]:
    """Inside, the model computes without dropout and uncompiled; afterwards gathered parameters are freed."""
    model, uncompiled = run.model, nullcontext[Any]()
    if run.context.train.compile != "none":
        uncompiled = torch.compiler.set_stance("force_eager")
    model.module.eval()
    try:
        with uncompiled:
            yield
    finally:
        model.module.train()
        model.reshard()


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
