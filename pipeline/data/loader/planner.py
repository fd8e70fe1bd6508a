"""Plan steps: the samples of a global batch and the caption of each visit, as columns. `Loader` decides whether a
caption is dropped.

`Planner.step(t)` is the schedule's step, joined with the snapshot: where every record lies, how many rows its text has,
and the length that text is padded to. It is the same on every rank and reads no tensor bytes.
Columns, because an object per sample and caption costs more than reading the sample. Price: every rank looks up the
columns of the whole global batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.cache.snapshot_samples import Columns, Places, taken
from sana_pipe.data.loader import randomness
from sana_pipe.data.loader.length_grouping import LengthGrouping
from sana_pipe.data.loader.schedule import Schedule, ScheduledBatch, permute
from sana_pipe.data.sources.caption_rules import choose

CANDIDATES = 256
"""Limit on the substitutes that are tried for a sample."""


@dataclass(frozen=True)
class BatchPlan:
    """One optimizer step of `n` samples, or a share of it.

    Attributes:
        step, epoch, bucket: as in `schedule.ScheduledBatch`.
        visits: (n,) int64.
        sample_id: (n,) uint64.
        pictures: places of the picture records by kind, (n,) each.
        texts: places of the caption that each visit sees, (n,) each.
        length: rows that text is padded to, for the whole global batch.
    """

    step: int
    epoch: int
    bucket: int
    visits: np.ndarray
    sample_id: np.ndarray
    pictures: dict[str, Places]
    texts: Places
    length: int

    def __len__(self) -> int:
        return len(self.visits)

    def share(self, which: slice) -> BatchPlan:
        """The plan of some samples of this one."""
        return replace(
            self,
            visits=self.visits[which],
            sample_id=self.sample_id[which],
            pictures={kind: taken(places, which) for kind, places in self.pictures.items()},
            texts=taken(self.texts, which),
        )

    def put(self, i: int, other: BatchPlan) -> BatchPlan:
        """Return this plan with its i-th sample replaced by the only sample of another plan."""

        def patched(column: np.ndarray, values: np.ndarray) -> np.ndarray:
            copy = column.copy()
            copy[i] = values[0]
            return copy

        def places(ours: Places, theirs: Places) -> Places:
            return {name: patched(column, theirs[name]) for name, column in ours.items()}

        return replace(
            self,
            sample_id=patched(self.sample_id, other.sample_id),
            pictures={kind: places(ours, other.pictures[kind]) for kind, ours in self.pictures.items()},
            texts=places(self.texts, other.texts),
        )


class BatchOrder(Protocol):
    """The global batch of each step. batches: their size, by bucket."""

    batches: list[int]

    def step(self, step: int) -> ScheduledBatch: ...


class Planner:
    """Plans the steps of one order of a snapshot. Safe for several threads.

    Args:
        seed, phase: key the order and the choice of captions (`train.seed`, and how many runs come before this one by
            `train --from`).
        length_window: batches of each bucket, on average, that are sorted by length together; 0 or 1: none.
        kinds: of picture records that plans have the places of; None: all.
        order: another order than the snapshot's schedule; without length windows.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        seed: int,
        phase: int,
        length_window: int = 0,
        kinds: Collection[str] | None = None,
        order: BatchOrder | None = None,
    ):
        self.snapshot, self.seed, self.phase, self.kinds = snapshot, seed, phase, kinds
        self._multiple = snapshot.head.policies.pad_text_multiple
        self.schedule = order or Schedule.of(snapshot.head, seed=seed, phase=phase)
        self._order: BatchOrder | LengthGrouping = self.schedule
        if isinstance(self.schedule, Schedule) and length_window > 1:
            steps = length_window * len(snapshot.buckets)
            self._order = LengthGrouping(self.schedule, steps, self._rows, seed=seed, phase=phase)

    def step(self, step: int) -> BatchPlan:
        """The whole global batch of a step."""
        batch = self._order.step(step)
        columns, texts = self.columns(batch.bucket, batch.positions, batch.visits)
        longest = int(texts["rows"].max())
        length = min(-(-longest // self._multiple) * self._multiple, self.snapshot.caption.max_length)
        return BatchPlan(
            batch.step, batch.epoch, batch.bucket, batch.visits, columns.sample_id, columns.pictures, texts, length
        )

    def substitutes(self, plan: BatchPlan, i: int) -> Iterator[BatchPlan]:
        """Samples that may replace the i-th sample of a plan, best first: of the same bucket, with text that fits.

        They depend on the order, the step and the sample alone, so they are the same on every topology. Since their
        text fits, the shapes of other ranks do not change.
        """
        identity, visit = int(plan.sample_id[i]), plan.visits[i : i + 1]
        count = self.snapshot.buckets[plan.bucket].samples
        keys = ("quarantine", self.seed, self.phase, plan.step, identity)
        for position in permute(np.arange(min(count, CANDIDATES)), count, *keys).tolist():
            columns, texts = self.columns(plan.bucket, np.array([position]), visit)
            if int(columns.sample_id[0]) != identity and int(texts["rows"][0]) <= plan.length:
                yield replace(plan, visits=visit, sample_id=columns.sample_id, pictures=columns.pictures, texts=texts)

    def columns(self, bucket: int, positions: np.ndarray, visits: np.ndarray) -> tuple[Columns, Places]:
        """Columns of some samples of a bucket, and of the caption that each visit sees; positions, visits: (n,)."""
        columns = self.snapshot.columns(positions + self.snapshot.row(bucket, 0), self.kinds)
        return columns, taken(columns.captions, self._chosen_captions(columns, visits))

    def _rows(self, bucket: int, positions: np.ndarray, visits: np.ndarray) -> np.ndarray:
        return self.columns(bucket, positions, visits)[1]["rows"]

    def _chosen_captions(self, columns: Columns, visits: np.ndarray) -> np.ndarray:
        """The caption that each visit sees, as rows of `columns.captions`."""
        first, end = columns.first[:-1], columns.first[1:]
        rows, several = first.copy(), np.flatnonzero(end - first != 1)
        if not len(several):
            return rows
        ids = columns.sample_id[several].tolist()
        draws = randomness.draws(self.seed, self.phase, visits[several].tolist(), ids).caption
        for i, draw in zip(several.tolist(), draws.tolist(), strict=True):
            rows[i] += choose(columns.captions["weight"][first[i] : end[i]].tolist(), draw)
        return rows
