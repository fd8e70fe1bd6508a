"""Plan steps: the samples of a global batch and the caption of each visit, as columns. `Loader` decides whether a
caption is dropped.

`Planner.step(t)` is the schedule's step, joined with the snapshot: where every record lies, how many rows its text has,
and the length that text is padded to. It is the same on every rank and reads no tensor bytes.
Columns, because an object per sample and caption costs more than reading the sample. Price: every rank looks up the
columns of the whole global batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from pipeline.cache.snapshot import Columns, Snapshot
from pipeline.loader import randomness
from pipeline.loader.length_grouping import LengthGrouping
from pipeline.loader.schedule import Schedule, ScheduledBatch, permute
from pipeline.signals.text import TextRecipe
from pipeline.sources.caption_rules import choose

CANDIDATES = 256
"""Limit on the substitutes that are tried for a sample."""


@dataclass(frozen=True)
class BatchPlan:
    """One optimizer step of `n` samples, or a part of it.

    Attributes:
        step, epoch, bucket: as in `schedule.ScheduledBatch`.
        visits: (n,) int64.
        samples: columns of the samples, (n,) each (see `Columns`).
        texts: columns of the caption that each visit sees, (n,) each.
        length: rows that text is padded to, for the whole global batch.
    """

    step: int
    epoch: int
    bucket: int
    visits: np.ndarray
    samples: dict[str, np.ndarray]
    texts: dict[str, np.ndarray]
    length: int

    def __len__(self) -> int:
        return len(self.visits)

    def part(self, which: slice) -> BatchPlan:
        def cut(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {name: column[which] for name, column in columns.items()}

        return replace(self, visits=self.visits[which], samples=cut(self.samples), texts=cut(self.texts))

    def put(self, i: int, other: BatchPlan) -> BatchPlan:
        """This plan with its i-th sample replaced by the only sample of another plan."""

        def patched(columns: dict[str, np.ndarray], values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            copies = {name: column.copy() for name, column in columns.items()}
            for name, value in values.items():
                copies[name][i] = value[0]
            return copies

        return replace(self, samples=patched(self.samples, other.samples), texts=patched(self.texts, other.texts))


class BatchOrder(Protocol):
    """The global batch of each step. batches: their size, by bucket."""

    batches: list[int]

    def step(self, step: int) -> ScheduledBatch: ...


class Planner:
    """Plans the steps of one order of a snapshot. Safe for several threads.

    Args:
        seed, phase: key the order and the choice of captions (`train.seed`, `train.phase`).
        length_window: batches of each bucket, on average, that are sorted by length together; 0 or 1: none.
        min_rows: text of every batch is padded to at least so many rows (for the null record).
        order: another order than the snapshot's schedule; without length windows.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        seed: int,
        phase: int,
        length_window: int = 0,
        min_rows: int = 0,
        order: BatchOrder | None = None,
    ):
        self.snapshot, self.seed, self.phase, self.min_rows = snapshot, seed, phase, min_rows
        self._multiple = snapshot.head.policies.pad_text_multiple
        self.schedule = order or Schedule.of(snapshot.head, seed=seed, phase=phase)
        self._order: BatchOrder | LengthGrouping = self.schedule
        if isinstance(self.schedule, Schedule) and length_window > 1:
            steps = length_window * len(snapshot.buckets)
            self._order = LengthGrouping(self.schedule, steps, self._rows, seed=seed, phase=phase)

    def step(self, step: int) -> BatchPlan:
        """The whole global batch of a step."""
        batch = self._order.step(step)
        samples, texts = self.columns(batch.bucket, batch.positions, batch.visits)
        longest = max(int(texts["rows"].max()), self.min_rows)
        length = min(-(-longest // self._multiple) * self._multiple, self.snapshot.recipe(TextRecipe).max_length)
        return BatchPlan(batch.step, batch.epoch, batch.bucket, batch.visits, samples, texts, length)

    def substitutes(self, plan: BatchPlan, i: int) -> Iterator[BatchPlan]:
        """Samples that may replace the i-th sample of a plan, best first: of the same bucket, with text that fits.

        They depend on the order, the step and the sample alone, so they are the same on every topology. Since their
        text fits, the shapes of other ranks do not change.
        """
        identity, visit = int(plan.samples["sample_id"][i]), plan.visits[i : i + 1]
        count = self.snapshot.buckets[plan.bucket].samples
        keys = ("quarantine", self.seed, self.phase, plan.step, identity)
        for position in permute(np.arange(min(count, CANDIDATES)), count, *keys).tolist():
            samples, texts = self.columns(plan.bucket, np.array([position]), visit)
            if int(samples["sample_id"][0]) != identity and int(texts["rows"][0]) <= plan.length:
                yield replace(plan, visits=visit, samples=samples, texts=texts)

    def columns(
        self, bucket: int, positions: np.ndarray, visits: np.ndarray
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Columns of some samples of a bucket, and of the caption that each visit sees; positions, visits: (n,)."""
        columns = self.snapshot.columns(positions + self.snapshot.row(bucket, 0))
        rows = self._chosen_captions(columns, visits)
        return columns.samples, {name: column[rows] for name, column in columns.captions.items()}

    def _rows(self, bucket: int, positions: np.ndarray, visits: np.ndarray) -> np.ndarray:
        return self.columns(bucket, positions, visits)[1]["rows"]

    def _chosen_captions(self, columns: Columns, visits: np.ndarray) -> np.ndarray:
        """The caption that each visit sees, as rows of `columns.captions`."""
        first, end = columns.first[:-1], columns.first[1:]
        rows, several = first.copy(), np.flatnonzero(end - first != 1)
        if not len(several):
            return rows
        ids = columns.samples["sample_id"][several].tolist()
        draws = randomness.draws(self.seed, self.phase, visits[several].tolist(), ids).caption
        for i, draw in zip(several.tolist(), draws.tolist(), strict=True):
            rows[i] += choose(columns.captions["weight"][first[i] : end[i]].tolist(), draw)
        return rows
