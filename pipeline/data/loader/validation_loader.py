"""Read some samples of a snapshot once each, in a fixed order: the data of a validation.

`FixedOrder` chooses samples of every bucket in proportion to its size and cuts them into global batches;
`ValidationLoader` reads this rank's microbatch of each with the loader that training uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np

from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.loader.loader import Batch, Loader, LoaderSettings
from sana_pipe.data.loader.schedule import ScheduledBatch, permute


class FixedOrder:
    """Some samples of every bucket, each once.

    Args:
        counts: samples per bucket.
        samples: number to take; fewer if there are not as many.
        batch: global batch.
        seed: key of the choice.
    """

    def __init__(self, counts: Sequence[int], samples: int, batch: int, seed: int):
        self.batches = [batch] * len(counts)
        ends = np.cumsum([0, *counts])
        total = int(ends[-1])
        taken = [int(end) * min(samples, total) // max(total, 1) for end in ends]
        self._steps: list[tuple[int, np.ndarray]] = []
        for bucket, count in enumerate(counts):
            chosen = np.sort(permute(np.arange(taken[bucket + 1] - taken[bucket]), count, "validation", seed, bucket))
            self._steps += [(bucket, chosen[start : start + batch]) for start in range(0, len(chosen), batch)]

    def __len__(self) -> int:
        """Number of global batches."""
        return len(self._steps)

    def step(self, step: int) -> ScheduledBatch:
        """The global batch of a step; its first `counted(step)` samples count."""
        bucket, positions = self._steps[step]
        filled = np.pad(positions, (0, self.batches[bucket] - len(positions)), mode="edge")
        return ScheduledBatch(step, 0, bucket, filled, np.zeros(len(filled), np.int64))

    def counted(self, step: int) -> int:
        return len(self._steps[step][1])


class ValidationLoader:
    """Each iteration yields this rank's microbatches, and how many samples at the beginning of each count.

    Args:
        settings: the steps are ignored.
        samples: of the snapshot, over all ranks.
    """

    def __init__(self, snapshot: Snapshot, settings: LoaderSettings, samples: int):
        self.settings, batch = settings, settings.microbatch * settings.world
        self.order = FixedOrder([bucket.samples for bucket in snapshot.buckets], samples, batch, settings.seed)
        self.loader = Loader(snapshot, replace(settings, start_step=0, stop_step=len(self.order)), self.order)

    def __iter__(self) -> Iterator[tuple[Batch, int]]:
        size = self.settings.microbatch
        with closing(iter(self.loader)) as steps:
            for (batch,), state in steps:
                counted = self.order.counted(state.step - 1) - self.settings.rank * size
                yield batch, min(max(counted, 0), size)
