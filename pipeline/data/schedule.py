"""The training order: a pure function of (bucket sizes, global batches, seed, phase, step).

What: `Schedule.step(t)` gives the bucket of optimizer step t and the visits (position, epoch) of its global batch.
Why: ranks, microbatches and prefetching only slice it, so any number of nodes agree without talking, and the state of
a run is one integer. Step t is found in O(batch) time and memory at any t.
Price: a keyed permutation of six Feistel rounds per index instead of a stored shuffle.

An epoch of a bucket with n samples and global batch B visits each sample once:
* `carry`: the bucket's visits form one endless stream, epoch after epoch, cut into batches of B; what does not fill a
  batch is carried into the next epoch. Over any number of epochs two samples' visits differ by at most one (n >= B).
* `drop`: each epoch uses floor(n / B) whole batches of its own permutation; the remainder is another one each epoch.
The order of batches within an epoch is a permutation of its own, across all buckets.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
import xxhash

_ROUNDS = 6


@dataclass(frozen=True)
class Step:
    """One optimizer step's global batch.

    Attributes:
        step: its number.
        epoch: the epoch it belongs to.
        bucket: index of its bucket.
        positions: (B,) int64 positions of the samples in the bucket.
        visits: (B,) int64 how often each of them was visited before.
    """

    step: int
    epoch: int
    bucket: int
    positions: np.ndarray
    visits: np.ndarray


def permute(index: np.ndarray, size: int, *key: int | str) -> np.ndarray:
    """Keyed pseudo-random permutation of range(size), evaluated at `index` (int64 array).

    A balanced Feistel network (Luby and Rackoff, 1988) on the smallest even number of bits that covers `size`,
    with cycle walking for the values outside; O(1) memory.
    """
    if size <= 1:
        return np.zeros_like(index)
    half = np.uint64((max(2, (size - 1).bit_length()) + 1) // 2)
    mask = np.uint64((1 << int(half)) - 1)
    material = b"".join(k.to_bytes(8, "little") if isinstance(k, int) else k.encode() + b"\0" for k in key)
    keys = [np.uint64(xxhash.xxh3_64_intdigest(material, seed=r)) for r in range(_ROUNDS)]
    value = index.astype(np.uint64)
    outside = np.ones(len(value), bool)
    while outside.any():
        left, right = value[outside] >> half, value[outside] & mask
        for own in keys:
            left, right = right, left ^ (_mix(right ^ own) & mask)
        value[outside] = (left << half) | right
        outside = value >= size
    return value.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


class Schedule:
    """The order of training.

    Args:
        counts: samples per bucket.
        batches: global batch per bucket.
        seed, phase: other values, another order.
        small: `carry` or `drop` (see the module's docstring).

    Raises:
        ValueError: no bucket ever fills a batch.
    """

    def __init__(self, counts: list[int], batches: list[int], *, seed: int, phase: int, small: str):
        if small not in ("carry", "drop"):
            raise ValueError(f"small must be 'carry' or 'drop', found {small!r}")
        self.counts, self.batches = list(counts), list(batches)
        self.seed, self.phase, self.small = seed, phase, small
        if not any(self._upto(bucket, 1 << 32) for bucket in range(len(counts))):
            raise ValueError("no bucket ever fills a batch")

    def _upto(self, bucket: int, epochs: int) -> int:
        """Batches of a bucket in its first `epochs` epochs."""
        count, batch = self.counts[bucket], self.batches[bucket]
        return epochs * count // batch if self.small == "carry" else epochs * (count // batch)

    def steps_upto(self, epochs: int) -> int:
        """Optimizer steps in the first `epochs` epochs."""
        return sum(self._upto(bucket, epochs) for bucket in range(len(self.counts)))

    def steps_in(self, epoch: int) -> int:
        return self.steps_upto(epoch + 1) - self.steps_upto(epoch)

    def epoch_of(self, step: int) -> int:
        """The epoch that holds a step: the only one with steps_upto(epoch) <= step < steps_upto(epoch + 1)."""
        low, high = 0, 1
        while self.steps_upto(high) <= step:
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.steps_upto(middle) <= step else (low, middle)
        return low

    def step(self, step: int) -> Step:
        """The global batch of a step."""
        epoch = self.epoch_of(step)
        before = [self._upto(b, epoch) for b in range(len(self.counts))]
        here = [self._upto(b, epoch + 1) - before[b] for b in range(len(self.counts))]
        ends = np.cumsum(here).tolist()
        slot = int(permute(np.array([step - sum(before)]), ends[-1], "order", self.seed, self.phase, epoch)[0])
        bucket = bisect_right(ends, slot)
        own = slot - (ends[bucket] - here[bucket])
        count, batch = self.counts[bucket], self.batches[bucket]
        if self.small == "carry":
            visits = np.arange(batch, dtype=np.int64) + (before[bucket] + own) * batch
            epochs, places = visits // count, visits % count
        else:
            epochs = np.full(batch, epoch, np.int64)
            places = np.arange(batch, dtype=np.int64) + own * batch
        positions = np.empty(batch, np.int64)
        for e in np.unique(epochs):
            mine = epochs == e
            positions[mine] = permute(places[mine], count, "samples", self.seed, self.phase, bucket, int(e))
        return Step(step, epoch, bucket, positions, epochs)
