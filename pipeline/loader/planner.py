"""Plans of steps: the samples of a global batch and which of their captions each visit sees, as columns.

What: `Planner.step(t)` is the schedule's step, joined with the snapshot: where every record stands, how many rows its
text has, and the length that text is padded to. The same on every rank; no tensor bytes are read.
Why columns: an object per sample and caption costs more than reading the sample.
Price: the columns of the whole global batch are looked up on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pipeline.cache.snapshot import Columns, Snapshot
from pipeline.loader import randomness
from pipeline.loader.length_bucketing import Windows
from pipeline.loader.schedule import Schedule, permute
from pipeline.sources.caption_rules import choose

CANDIDATES = 256
"""How many samples are tried in place of one that cannot be read."""


@dataclass(frozen=True)
class Plan:
    """One optimizer step of `n` samples, or a part of it.

    Attributes:
        step, epoch, bucket: as in `Step`.
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

    def part(self, which: slice) -> Plan:
        def cut(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {name: column[which] for name, column in columns.items()}

        return replace(self, visits=self.visits[which], samples=cut(self.samples), texts=cut(self.texts))

    def put(self, i: int, other: Plan) -> Plan:
        """This plan with its i-th sample replaced by the only one of another."""

        def patched(mine: dict[str, np.ndarray], its: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            out = {name: column.copy() for name, column in mine.items()}
            for name, column in its.items():
                out[name][i] = column[0]
            return out

        return replace(self, samples=patched(self.samples, other.samples), texts=patched(self.texts, other.texts))


class Planner:
    """Plans the steps of one order of a snapshot. Safe for several threads.

    Args:
        seed, phase: key the order and the choice of captions.
        length_window: batches of each bucket, on average, that are sorted by length together; 0 or 1: none.
        least: rows that there must be room for in every batch, whatever its captions.
    """

    def __init__(self, snapshot: Snapshot, *, seed: int, phase: int, length_window: int = 0, least: int = 0):
        self.snapshot, self.seed, self.phase, self.least = snapshot, seed, phase, least
        self.schedule = Schedule.of(snapshot.head, seed=seed, phase=phase)
        self._multiple = int(snapshot.head["policies"]["pad_text_multiple"])
        self._order: Schedule | Windows = self.schedule
        if length_window > 1:
            steps = length_window * len(snapshot.buckets)
            self._order = Windows(self.schedule, steps, self._rows, seed=seed, phase=phase)

    def step(self, step: int) -> Plan:
        """The whole global batch of a step."""
        own = self._order.step(step)
        samples, texts = self._columns(own.bucket, own.positions, own.visits)
        longest = max(int(texts["rows"].max()), self.least)
        length = min(-(-longest // self._multiple) * self._multiple, self.snapshot.text_recipe.max_length)
        return Plan(own.step, own.epoch, own.bucket, own.visits, samples, texts, length)

    def substitutes(self, plan: Plan, i: int) -> list[Plan]:
        """What may stand in for the i-th sample of a plan, best first: samples of the same bucket whose text fits.

        A function of the order, the step and the sample alone, so it is the same on every rank of every topology; and
        since it fits, the other ranks' shapes do not change.
        """
        identity, visit = int(plan.samples["sample_id"][i]), plan.visits[i : i + 1]
        count = self.snapshot.buckets[plan.bucket].samples
        keys = ("quarantine", self.seed, self.phase, plan.step, identity)
        found = []
        for position in permute(np.arange(min(count, CANDIDATES)), count, *keys).tolist():
            samples, texts = self._columns(plan.bucket, np.array([position]), visit)
            if int(samples["sample_id"][0]) != identity and int(texts["rows"][0]) <= plan.length:
                found.append(replace(plan, visits=visit, samples=samples, texts=texts))
        return found

    def _columns(
        self, bucket: int, positions: np.ndarray, visits: np.ndarray
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        columns = self.snapshot.columns(positions + self.snapshot.row(bucket, 0))
        seen = self._seen(columns, visits)
        return columns.samples, {name: column[seen] for name, column in columns.captions.items()}

    def _rows(self, bucket: int, positions: np.ndarray, visits: np.ndarray) -> np.ndarray:
        return self._columns(bucket, positions, visits)[1]["rows"]

    def _seen(self, columns: Columns, visits: np.ndarray) -> np.ndarray:
        """Which caption each visit sees, as rows of `columns.captions`."""
        first, after = columns.first[:-1], columns.first[1:]
        seen, several = first.copy(), np.flatnonzero(after - first != 1)
        if not len(several):
            return seen
        which = visits[several].tolist(), columns.samples["sample_id"][several].tolist()
        drawn = randomness.draws(self.seed, self.phase, *which).caption
        for i, own in zip(several.tolist(), drawn.tolist(), strict=True):
            seen[i] += choose(columns.captions["weight"][first[i] : after[i]].tolist(), own)
        return seen
