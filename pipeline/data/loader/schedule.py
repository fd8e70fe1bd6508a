"""The training order: a pure function of (the snapshot's head, seed, phase, step).

`Schedule.step(t)` gives the bucket of optimizer step t and the visits (position, visit) of its global batch. Ranks,
microbatches and prefetching only slice it, so any number of nodes agree without communication, and the state of a run
is one integer. Step t is computed in O(batch) time and memory at any t.
The laws of epochs, weights and blocks: docs/design.md.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import lcm
from typing import Any

import numpy as np
import xxhash

from pipeline.base.errors import CacheError
from pipeline.data.cache.snapshot_head import Head

_ROUNDS = 6
_SMALL = 1 << 15
"""Permutations up to this size are computed whole and cached, at most 16 MiB of them."""
_FEW = 20
"""Indexes up to which one by one is faster than an array."""
_MIX = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
_LAST = np.uint64(31)
"""Shifts and factors of SplitMix64's finaliser (Steele, Lea and Flood, 2014), the round function of `permute`."""


@dataclass(frozen=True)
class ScheduledBatch:
    """One optimizer step's global batch.

    Attributes:
        step, epoch, bucket: numbers.
        positions: (B,) int64 positions of the samples in the bucket.
        visits: (B,) int64 how often each sample was visited before.
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
    half = (max(2, (size - 1).bit_length()) + 1) // 2
    material = _material(*key)
    keys = [xxhash.xxh3_64_intdigest(material, seed=r) for r in range(_ROUNDS)]
    if len(index) <= _FEW:
        return np.array([_permute_one(value, size, half, keys) for value in index.tolist()], np.int64)
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    rounds = np.array(keys, np.uint64)
    todo = index.astype(np.uint64)
    value, outside = todo, np.arange(len(todo))
    while len(outside) > _FEW:
        left, right = todo >> bits, todo & mask
        mixed, shifted = np.empty_like(left), np.empty_like(left)
        for key_of_round in rounds:
            np.bitwise_xor(right, key_of_round, out=mixed)
            for shift, factor in _MIX:
                np.right_shift(mixed, shift, out=shifted)
                mixed ^= shifted
                mixed *= factor
            np.right_shift(mixed, _LAST, out=shifted)
            mixed ^= shifted
            mixed &= mask
            mixed ^= left
            left, right, mixed = right, mixed, left
        left <<= bits
        left |= right
        value[outside] = left
        outside = outside[left >= size]
        todo = value[outside]
    value[outside] = [_permute_one(rest, size, half, keys) for rest in todo.tolist()]
    return value.astype(np.int64)


def _permute_one(value: int, size: int, half: int, keys: Sequence[int]) -> int:
    """`permute` of one index."""
    mask, whole = (1 << half) - 1, (1 << 64) - 1
    while True:
        left, right = value >> half, value & mask
        for key_of_round in keys:
            mixed = right ^ key_of_round
            mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & whole
            mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & whole
            left, right = right, left ^ ((mixed ^ (mixed >> 31)) & mask)
        value = left << half | right
        if value < size:
            return value


def _material(*key: int | str) -> bytes:
    return b"".join(k.to_bytes(8, "little") if isinstance(k, int) else k.encode() + b"\0" for k in key)


def _drawn(size: int, *key: int | str) -> int:
    """A keyed pseudo-random number below `size`."""
    return xxhash.xxh3_64_intdigest(_material(*key)) % size


@dataclass(frozen=True)
class Blocks:
    """The layout of a packed bucket: its positions lie in blocks of `block` samples; `window` blocks are shuffled
    together."""

    block: int
    window: int

    def permute(self, index: np.ndarray, size: int, *key: int | str) -> np.ndarray:
        """A keyed permutation of range(size) like `permute`, in which neighbouring places lie in few blocks.

        The last block may be short. It takes one keyed slot among the others, so that the place at which a block begins
        is known without adding up the blocks before it.
        """
        # Ten samples, blocks of 4, two blocks shuffled together, key "k": blocks 0 and 1 are whole, block 2 has the
        # positions 8 and 9. Its drawn slot is 0, so the slots begin at the places 0, 2 and 6. Three slots make two
        # windows: slot 0 alone, and slots 1 and 2. Places are permuted inside their window, then whole blocks are
        # permuted over the slots:
        #   place      0 1 | 2 3 4 5 6 7 8 9
        #   position   8 9 | 2 5 0 3 7 4 1 6
        # So steps that read neighbouring places read block 2 first, and then blocks 0 and 1 together.
        count = -(-size // self.block)
        if count <= 1:
            return permute(index, size, *key)
        last, rest = count - 1, size - (count - 1) * self.block
        at = _drawn(count, "short", *key)
        windows = -(-count // self.window)

        def begin(slot: np.ndarray | int) -> Any:
            return slot * self.block - (slot > at) * (self.block - rest)

        def slot_of(place: np.ndarray) -> np.ndarray:
            after = place - at * self.block
            return np.where(after < 0, place // self.block, at + (after >= rest) * ((after - rest) // self.block + 1))

        place = np.asarray(index, np.int64)
        window = ((slot_of(place) + 1) * windows - 1) // count
        mixed = np.empty_like(place)
        for number in np.unique(window).tolist():
            low, high = begin(number * count // windows), begin((number + 1) * count // windows)
            inside = window == number
            mixed[inside] = low + permute(place[inside] - low, high - low, "window", *key, number)
        slot = slot_of(mixed)
        block = np.where(slot == at, last, permute(np.minimum(slot - (slot > at), last - 1), last, "blocks", *key))
        return block * self.block + mixed - begin(slot)


GROUP = 64
"""Batches that are permuted together in a block order, roughly."""


def interleaved(slots: np.ndarray, counts: Sequence[int], group: int, *key: int | str) -> tuple[np.ndarray, np.ndarray]:
    """Weave several streams into one, evenly mixed. Each stream keeps its order.

    The slots are cut into groups of about `group`. A group has every stream's share, rounded by a keyed offset, in a
    permuted order.

    Args:
        slots: (n,) int64 below sum(counts).
        counts: length of each stream.

    Returns:
        For each slot its stream, and its number in the stream, (n,) int64 each.
    """
    # Streams of 4 and 2 batches, groups of about 3, key "k": two groups. Before group n a stream has given
    # (n * length + shift) // 2 of its batches; the drawn shifts are 1 and 1:
    #   before group     0  1  2
    #   stream 0 gave    0  2  4      so each group has two batches of stream 0 and one of stream 1,
    #   stream 1 gave    0  1  2      in an order that is permuted inside the group:
    #   slot     0 1 2 | 3 4 5
    #   stream   0 1 0 | 0 0 1
    #   number   0 0 1 | 2 3 1
    # A slot is computed alone: a bisection finds its group, the group's order gives stream and number.
    total = sum(counts)
    groups = max(1, total // group)
    shift = np.array([_drawn(groups, "shift", *key, stream) for stream in range(len(counts))])
    lengths = np.array(counts, np.int64)

    def slots_before(number: int) -> np.ndarray:
        return (number * lengths + shift) // groups

    streams, numbers = np.empty(len(slots), np.int64), np.empty(len(slots), np.int64)
    left = np.arange(len(slots))
    while len(left):
        slot = int(slots[left[0]])
        low, high = 0, groups
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if slots_before(middle).sum() <= slot else (low, middle)
        before, after = slots_before(low), slots_before(low + 1)
        begin, size = int(before.sum()), int((after - before).sum())
        labels = np.repeat(np.arange(len(counts)), after - before)[permute(np.arange(size), size, "order", *key, low)]
        order = np.argsort(labels, kind="stable")
        number = np.empty_like(order)
        number[order] = np.concatenate([np.arange(a, b) for a, b in zip(before, after, strict=True)])
        inside = (slots[left] >= begin) & (slots[left] < begin + size)
        at = slots[left[inside]] - begin
        streams[left[inside]], numbers[left[inside]] = labels[at], number[at]
        left = left[~inside]
    return streams, numbers


class _UnweightedBucket:
    """A bucket without parts, under `carry` or `drop`."""

    def __init__(self, count: int, batch: int, small: str, key: tuple[int, int, int], blocks: Blocks | None):
        self.count, self.batch, self.small, self.key, self.blocks = count, batch, small, key, blocks

    def batches_before(self, epochs: int) -> int:
        """Batches in the first `epochs` epochs."""
        return epochs * self.count // self.batch if self.small == "carry" else epochs * (self.count // self.batch)

    def members(self, epoch: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions and visits of a batch by its number in the epoch."""
        if self.small == "carry":
            visits = np.arange(self.batch, dtype=np.int64) + (self.batches_before(epoch) + number) * self.batch
            epochs, places = visits // self.count, visits % self.count
        else:
            epochs = np.full(self.batch, epoch, np.int64)
            places = np.arange(self.batch, dtype=np.int64) + number * self.batch
        return _permuted_positions("samples", self.key, self.count, epochs, places, self.blocks), epochs


class _WeightedBucket:
    """A bucket of weighted parts. parts: (samples, weight)."""

    def __init__(
        self,
        parts: Sequence[tuple[int, Fraction]],
        batch: int,
        small: str,
        key: tuple[int, int, int],
        blocks: Blocks | None,
    ):
        self.parts, self.batch, self.small, self.key, self.blocks = parts, batch, small, key, blocks
        self.rate = sum((samples * weight for samples, weight in parts), Fraction(0))
        # Visits per epoch repeat with the weights' common denominator, and so do whole batches per epoch.
        self.period = lcm(*(weight.denominator for _, weight in parts))
        self.prefix = [0]
        if small != "carry":
            for epoch in range(self.period):
                self.prefix.append(self.prefix[-1] + (self.visits(epoch + 1) - self.visits(epoch)) // batch)

    def visits(self, epochs: int) -> int:
        """Visits due to the weights in the first `epochs` epochs."""
        return sum(self.spent(part, epochs) for part in range(len(self.parts)))

    def spent(self, part: int, epochs: int) -> int:
        samples, weight = self.parts[part]
        return epochs * samples * weight.numerator // weight.denominator

    def batches_before(self, epochs: int) -> int:
        if self.small == "carry":
            return self.visits(epochs) // self.batch
        whole, rest = divmod(epochs, self.period)
        return whole * self.prefix[-1] + self.prefix[rest]

    def members(self, epoch: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        if self.small != "carry":
            return self.slots(epoch, np.arange(self.batch, dtype=np.int64) + number * self.batch)
        at = (self.batches_before(epoch) + number) * self.batch
        end, pieces = at + self.batch, []
        while at < end:
            epoch = self.epoch_of(at)
            start, after = self.visits(epoch), self.visits(epoch + 1)
            pieces.append(self.slots(epoch, np.arange(at - start, min(end, after) - start, dtype=np.int64)))
            at = min(end, after)
        return np.concatenate([p for p, _ in pieces]), np.concatenate([v for _, v in pieces])

    def epoch_of(self, visit: int) -> int:
        """The epoch of a visit of the bucket's stream: visits(epoch) <= visit < visits(epoch + 1)."""
        low = int(visit / self.rate)  # visits(e) lies above e * rate - parts and not above e * rate
        high = low + int((len(self.parts) + 1) / self.rate) + 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.visits(middle) <= visit else (low, middle)
        return low

    def slots(self, epoch: int, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions and visits at some slots of an epoch, which mix the parts."""
        if self.blocks is None:
            mixed = permute(slots, self.visits(epoch + 1) - self.visits(epoch), "mix", *self.key, epoch)
        else:
            counts = [self.spent(part, epoch + 1) - self.spent(part, epoch) for part in range(len(self.parts))]
            stream, number = interleaved(slots, counts, self.batch, "mix", *self.key, epoch)
            mixed = np.concatenate([[0], np.cumsum(counts)])[stream] + number
        positions, visits = np.empty(len(slots), np.int64), np.empty(len(slots), np.int64)
        low = first = 0
        for part, (samples, _) in enumerate(self.parts):
            start = self.spent(part, epoch)
            high = low + self.spent(part, epoch + 1) - start
            inside = (mixed >= low) & (mixed < high)
            if inside.any():
                passes, places = np.divmod(mixed[inside] - low + start, samples)
                positions[inside] = first + _permuted_positions(
                    "part", (*self.key, part), samples, passes, places, self.blocks
                )
                visits[inside] = passes
            low, first = high, first + samples
        return positions, visits


def _permuted_positions(
    what: str, key: tuple[int, ...], size: int, passes: np.ndarray, places: np.ndarray, blocks: Blocks | None
) -> np.ndarray:
    """The position at each place, by the permutation of its pass."""
    first, last = int(passes.min()), int(passes.max())
    if first == last:
        return _one_pass(what, key, size, first, places, blocks)
    positions = np.empty(len(places), np.int64)
    for number in range(first, last + 1):
        inside = passes == number
        positions[inside] = _one_pass(what, key, size, number, places[inside], blocks)
    return positions


def _one_pass(
    what: str, key: tuple[int, ...], size: int, number: int, places: np.ndarray, blocks: Blocks | None
) -> np.ndarray:
    if blocks is not None:
        return blocks.permute(places, size, what, *key, number)
    return _whole(size, what, *key, number)[places] if size <= _SMALL else permute(places, size, what, *key, number)


@lru_cache(maxsize=64)
def _whole(size: int, *key: int | str) -> np.ndarray:
    """`permute` of all of range(size), cached: a small bucket needs all of it soon."""
    return permute(np.arange(size), size, *key)


class Schedule:
    """The order of training.

    Args:
        counts: samples per bucket.
        batches: global batch per bucket.
        seed, phase: key of the order (`train.seed`, and how many runs come before this one by `train --from`).
        small: `carry` or `drop` (see docs/design.md).
        parts: per bucket None, or (samples, weight) of its parts in the order of positions.
        blocks: per bucket of a packed snapshot; None: the plain order.

    Raises:
        CacheError: an earlier version had this `small`.
        ValueError: no bucket ever fills a batch, or the parts do not add up.
    """

    def __init__(
        self,
        counts: list[int],
        batches: list[int],
        *,
        seed: int,
        phase: int,
        small: str,
        parts: Sequence[Sequence[tuple[int, Fraction]] | None] | None = None,
        blocks: Sequence[Blocks] | None = None,
    ):
        if small not in ("carry", "drop"):
            raise CacheError(
                f"the snapshot was made with bucket.remainder = {small}, which this version does not know",
                expected="carry or drop",
                fix="train on a new snapshot (sana-pipe bucket), or with the version of sana-pipe that made this one",
            )
        self.counts, self.batches = list(counts), list(batches)
        self.seed, self.phase, self.small = seed, phase, small
        self._buckets: list[_UnweightedBucket | _WeightedBucket] = []
        for bucket, (count, batch) in enumerate(zip(counts, batches, strict=True)):
            bucket_parts, key = parts[bucket] if parts else None, (seed, phase, bucket)
            bucket_blocks = blocks[bucket] if blocks else None
            if bucket_parts is None:
                self._buckets.append(_UnweightedBucket(count, batch, small, key, bucket_blocks))
                continue
            if sum(n for n, _ in bucket_parts) != count or any(weight <= 0 for _, weight in bucket_parts):
                raise ValueError(f"bucket {bucket} has {count} samples; its parts are {bucket_parts}")
            self._buckets.append(_WeightedBucket(bucket_parts, batch, small, key, bucket_blocks))
        self._blocks = blocks is not None
        if not any(bucket.batches_before(1 << 32) for bucket in self._buckets):
            raise ValueError("no bucket ever fills a batch")

    @classmethod
    def of(cls, head: Head, *, seed: int, phase: int) -> Schedule:
        """The order of a snapshot, from its head."""
        buckets, packed = head.buckets, head.policies.packed
        return cls(
            [bucket.samples for bucket in buckets],
            [bucket.batch for bucket in buckets],
            seed=seed,
            phase=phase,
            small=head.policies.small,
            parts=[None if b.parts is None else [(part.samples, part.weight) for part in b.parts] for b in buckets],
            blocks=[Blocks(bucket.block or bucket.samples, packed.window) for bucket in buckets] if packed else None,
        )

    def steps_upto(self, epochs: int) -> int:
        """Optimizer steps in the first `epochs` epochs."""
        return sum(bucket.batches_before(epochs) for bucket in self._buckets)

    def samples_upto(self, steps: int) -> int:
        """Samples in the global batches of the first `steps` steps."""
        if len(set(self.batches)) == 1:
            return steps * self.batches[0]
        epoch = self.epoch_of(steps)
        before = [bucket.batches_before(epoch) for bucket in self._buckets]
        whole = sum(count * batch for count, batch in zip(before, self.batches, strict=True))
        return whole + sum(self.batches[self._place(step)[1]] for step in range(sum(before), steps))

    def epoch_of(self, step: int) -> int:
        """The epoch of a step: steps_upto(epoch) <= step < steps_upto(epoch + 1)."""
        low, high = 0, 1
        while self.steps_upto(high) <= step:
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.steps_upto(middle) <= step else (low, middle)
        return low

    def step(self, step: int) -> ScheduledBatch:
        """The global batch of a step."""
        epoch, bucket, number = self._place(step)
        positions, visits = self._buckets[bucket].members(epoch, number)
        return ScheduledBatch(step, epoch, bucket, positions, visits)

    def _place(self, step: int) -> tuple[int, int, int]:
        """The epoch and bucket of a step, and the number of its batch in that epoch of the bucket."""
        # Bucket 0 has 5 samples in batches of 2, bucket 1 has 3 in batches of 1, remainder `carry`. After 1, 2 and 3
        # epochs they have given 2, 5, 7 and 3, 6, 9 batches: 5, 11 and 16 steps. Step 6 is in epoch 1, which began
        # with step 5, so its place there is 1. The epoch has 3 batches of each bucket in a keyed order, and at place 1
        # stands batch 0 of bucket 0. This is batch 2 of its stream: visits 4 and 5, the last of epoch 0 and the first
        # of epoch 1. So the remainder of an epoch is carried into the next.
        epoch = self.epoch_of(step)
        before = [bucket.batches_before(epoch) for bucket in self._buckets]
        batches = [bucket.batches_before(epoch + 1) - done for bucket, done in zip(self._buckets, before, strict=True)]
        return epoch, *self._batch_at(epoch, step - sum(before), batches)

    def _batch_at(self, epoch: int, place: int, batches: list[int]) -> tuple[int, int]:
        """The batch at a place of an epoch: its bucket, and its number there. batches: per bucket."""
        key = ("order", self.seed, self.phase, epoch)
        if self._blocks:
            streams, numbers = interleaved(np.array([place], np.int64), batches, GROUP, *key)
            return int(streams[0]), int(numbers[0])
        ends = np.cumsum(batches).tolist()
        slot = int(permute(np.array([place]), ends[-1], *key)[0])
        bucket = bisect_right(ends, slot)
        return bucket, slot - (ends[bucket] - batches[bucket])
