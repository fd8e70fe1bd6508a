"""The training order: a pure function of (the snapshot's head, seed, phase, step).

`Schedule.step(t)` gives the bucket of optimizer step t and the visits (position, visit) of its global batch. Ranks,
microbatches and prefetching only slice it, so any number of nodes agree without communication, and the state of a run
is one integer. Step t is computed in O(batch) time and memory at any t.
The laws of epochs, weights and blocks: docs/design.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import lcm
from typing import Any

import numpy as np
import xxhash

from sana_pipe.base.errors import CacheError
from sana_pipe.data.cache.snapshot_head import Head

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
        positions: (B,) int64 positions of the samples in the bucket: its rows, from 0. Rows are in the order of part,
            place in an earlier snapshot (`bucket.grow`) and sample id.
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


class Order:
    """The plain order: each pass over a bucket takes its samples in a keyed permutation, each epoch its batches.

    An order answers two questions. `one_pass`: which sample is visited at a place of a pass. `woven`: which of several
    streams gives what comes at a slot; streams are the batches of all buckets in an epoch, and the visits of the
    weighted parts of a bucket. A subclass with both is another order; `Schedule.of` chooses it.
    """

    def one_pass(self, places: np.ndarray, size: int, *key: int | str) -> np.ndarray:
        """The position at each place of a pass over `size` samples, a bijection of range(size). key: of the pass."""
        # Five samples of bucket 0, seed and phase 0. Pass 0 has the key ("samples", 0, 0, 0, 0), pass 1 (..., 1):
        #   place                 0 1 2 3 4
        #   position in pass 0    2 4 1 0 3
        #   position in pass 1    0 2 1 4 3
        # A bucket of few samples looks them up in the whole permutation, which is cached.
        return _whole(size, *key)[places] if size <= _SMALL else permute(places, size, *key)

    def woven(
        self, slots: np.ndarray, counts: Sequence[int], group: int, *key: int | str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the stream of each slot, and its number in the stream, as `interleaved` does. All slots are permuted
        together, so that group is not used and a stream does not keep its order."""
        # Streams of 4 and 2 batches, key "k". Slots are permuted; below 4 they are of stream 0:
        #   slot       0 1 2 3 4 5
        #   permuted   1 3 5 4 2 0
        #   stream     0 0 1 1 0 0
        #   number     1 3 1 0 2 0
        ends = np.cumsum(counts)
        mixed = permute(slots, int(ends[-1]), *key)
        streams = np.searchsorted(ends, mixed, side="right")
        return streams, mixed - (ends - counts)[streams]

    def positions(self, passes: np.ndarray, places: np.ndarray, size: int, *key: int | str) -> np.ndarray:
        """The position at each place, each in its pass. key: of all passes."""
        # The five samples of `one_pass`, of which a batch of 4 begins at place 3 of pass 0 and goes on in pass 1:
        #   pass       0 0 1 1
        #   place      3 4 0 1
        #   position   0 3 0 2
        first, last = int(passes.min()), int(passes.max())
        if first == last:
            return self.one_pass(places, size, *key, first)
        positions = np.empty(len(places), np.int64)
        for number in range(first, last + 1):
            inside = passes == number
            positions[inside] = self.one_pass(places[inside], size, *key, number)
        return positions


@lru_cache(maxsize=64)
def _whole(size: int, *key: int | str) -> np.ndarray:
    """`permute` of all of range(size), cached: a small bucket needs all of it soon."""
    return permute(np.arange(size), size, *key)


@dataclass(frozen=True)
class Blocks(Order):
    """The order of a packed bucket: its positions lie in blocks of `block` samples; `window` blocks are shuffled
    together. Streams are woven so that each keeps its order."""

    block: int
    window: int

    def one_pass(self, places: np.ndarray, size: int, *key: int | str) -> np.ndarray:
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
            return permute(places, size, *key)
        last, rest = count - 1, size - (count - 1) * self.block
        at = _drawn(count, "short", *key)
        windows = -(-count // self.window)

        def begin(slot: np.ndarray | int) -> Any:
            return slot * self.block - (slot > at) * (self.block - rest)

        def slot_of(place: np.ndarray) -> np.ndarray:
            after = place - at * self.block
            return np.where(after < 0, place // self.block, at + (after >= rest) * ((after - rest) // self.block + 1))

        place = np.asarray(places, np.int64)
        window = ((slot_of(place) + 1) * windows - 1) // count
        mixed = np.empty_like(place)
        for number in np.unique(window).tolist():
            low, high = begin(number * count // windows), begin((number + 1) * count // windows)
            inside = window == number
            mixed[inside] = low + permute(place[inside] - low, high - low, "window", *key, number)
        slot = slot_of(mixed)
        block = np.where(slot == at, last, permute(np.minimum(slot - (slot > at), last - 1), last, "blocks", *key))
        return block * self.block + mixed - begin(slot)

    def woven(
        self, slots: np.ndarray, counts: Sequence[int], group: int, *key: int | str
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `interleaved`."""
        return interleaved(slots, counts, group, *key)


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
    """The batches of a bucket without weights. remainder: `carry` or `drop`, as `bucket.remainder` says."""

    def __init__(self, count: int, batch: int, remainder: str, key: tuple[int, int, int], order: Order):
        self.count, self.batch, self.carries, self.key, self.order = count, batch, remainder == "carry", key, order

    def batches_before(self, epochs: int) -> int:
        """Batches in the first `epochs` epochs."""
        return epochs * self.count // self.batch if self.carries else epochs * (self.count // self.batch)

    def members(self, epoch: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions and visits of a batch by its number in the epoch (`Schedule._place` orders numbers)."""
        # Five samples in batches of 2. `carry`: visits never stop, epoch 0 has batches 0 and 1 of the stream. Batch 0
        # of epoch 1 is batch 2 of the stream, visits 4 and 5: place 4 of pass 0 and place 0 of pass 1.
        # `drop`: place 4 of each pass is left out. Batch 0 of epoch 1 has the places 0 and 1 of pass 1.
        if self.carries:
            visits = np.arange(self.batch, dtype=np.int64) + (self.batches_before(epoch) + number) * self.batch
            passes, places = visits // self.count, visits % self.count
        else:
            passes = np.full(self.batch, epoch, np.int64)
            places = np.arange(self.batch, dtype=np.int64) + number * self.batch
        return self.order.positions(passes, places, self.count, "samples", *self.key), passes


class _WeightedBucket:
    """The batches of a bucket of weighted parts. parts: (samples, weight). remainder: `carry` or `drop`."""

    def __init__(
        self,
        parts: Sequence[tuple[int, Fraction]],
        batch: int,
        remainder: str,
        key: tuple[int, int, int],
        order: Order,
    ):
        self.parts, self.batch, self.carries, self.key, self.order = parts, batch, remainder == "carry", key, order
        self.rate = sum((samples * weight for samples, weight in parts), Fraction(0))
        # Visits per epoch repeat with the weights' common denominator, and so do whole batches per epoch.
        self.period = lcm(*(weight.denominator for _, weight in parts))
        self.prefix = [0]
        if not self.carries:
            for epoch in range(self.period):
                self.prefix.append(self.prefix[-1] + (self.visits(epoch + 1) - self.visits(epoch)) // batch)

    def visits(self, epochs: int) -> int:
        """Visits due to the weights in the first `epochs` epochs."""
        return sum(self.spent(part, epochs) for part in range(len(self.parts)))

    def spent(self, part: int, epochs: int) -> int:
        """Visits of a part in the first `epochs` epochs."""
        samples, weight = self.parts[part]
        return epochs * samples * weight.numerator // weight.denominator

    def batches_before(self, epochs: int) -> int:
        """Batches in the first `epochs` epochs."""
        if self.carries:
            return self.visits(epochs) // self.batch
        whole, rest = divmod(epochs, self.period)
        return whole * self.prefix[-1] + self.prefix[rest]

    def members(self, epoch: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions and visits of a batch by its number in the epoch (`Schedule._place` orders numbers)."""
        if not self.carries:
            return self.positions_at(epoch, np.arange(self.batch, dtype=np.int64) + number * self.batch)
        at = (self.batches_before(epoch) + number) * self.batch
        end, pieces = at + self.batch, []
        while at < end:
            epoch = self.epoch_of(at)
            start, after = self.visits(epoch), self.visits(epoch + 1)
            pieces.append(self.positions_at(epoch, np.arange(at - start, min(end, after) - start, dtype=np.int64)))
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

    def positions_at(self, epoch: int, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions and visits at some slots of an epoch, which mix the parts."""
        # Part 0 has 4 samples of weight 1/2, at positions 0 to 3; part 1 has 2 of weight 1, at 4 and 5. So each epoch
        # has 2 visits of each. In epoch 1 part 0 is at place 2 of its pass 0, and part 1 begins its pass 1. Seed 0:
        #   slot            0   1   2   3
        #   part, number    0,1 0,0 1,1 1,0      the streams of visits, woven
        #   pass, place     0,3 0,2 1,1 1,0      counted from the first epoch on
        #   position        1   0   5   4        after the permutations 2 3 0 1 of part 0 and 0 1 of part 1
        counts = [self.spent(part, epoch + 1) - self.spent(part, epoch) for part in range(len(self.parts))]
        streams, numbers = self.order.woven(slots, counts, self.batch, "mix", *self.key, epoch)
        positions, visits = np.empty(len(slots), np.int64), np.empty(len(slots), np.int64)
        first = 0
        for part, (samples, _) in enumerate(self.parts):
            inside = streams == part
            if inside.any():
                passes, places = np.divmod(numbers[inside] + self.spent(part, epoch), samples)
                positions[inside] = first + self.order.positions(passes, places, samples, "part", *self.key, part)
                visits[inside] = passes
            first += samples
        return positions, visits


class Schedule:
    """The order of training.

    Args:
        counts: samples per bucket.
        batches: global batch per bucket.
        seed, phase: key of the order (`train.seed`, and how many runs come before this one by `train --from`).
        remainder: `carry` or `drop` (see docs/design.md); `small` in the head of a snapshot.
        parts: per bucket None, or (samples, weight) of its parts in the order of positions.
        orders: one per bucket, all of a class; None: the plain order. The first weaves the batches of all buckets.

    Raises:
        CacheError: an earlier version had this remainder.
        ValueError: no bucket ever fills a batch, or the parts do not add up.
    """

    def __init__(
        self,
        counts: list[int],
        batches: list[int],
        *,
        seed: int,
        phase: int,
        remainder: str,
        parts: Sequence[Sequence[tuple[int, Fraction]] | None] | None = None,
        orders: Sequence[Order] | None = None,
    ):
        if remainder not in ("carry", "drop"):
            raise CacheError(
                f"the snapshot was made with bucket.remainder = {remainder}, which this version does not know",
                expected="carry or drop",
                fix="train on a new snapshot (sana-pipe bucket), or with the version of sana-pipe that made this one",
            )
        self.counts, self.batches = list(counts), list(batches)
        self.seed, self.phase = seed, phase
        self._orders = orders or [Order()] * len(self.counts)
        self._buckets: list[_UnweightedBucket | _WeightedBucket] = []
        for bucket, (count, batch) in enumerate(zip(counts, batches, strict=True)):
            bucket_parts, key = parts[bucket] if parts else None, (seed, phase, bucket)
            order = self._orders[bucket]
            if bucket_parts is None:
                self._buckets.append(_UnweightedBucket(count, batch, remainder, key, order))
                continue
            if sum(n for n, _ in bucket_parts) != count or any(weight <= 0 for _, weight in bucket_parts):
                raise ValueError(f"bucket {bucket} has {count} samples; its parts are {bucket_parts}")
            self._buckets.append(_WeightedBucket(bucket_parts, batch, remainder, key, order))
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
            remainder=head.policies.small,
            parts=[None if b.parts is None else [(part.samples, part.weight) for part in b.parts] for b in buckets],
            orders=[Blocks(bucket.block or bucket.samples, packed.window) for bucket in buckets] if packed else None,
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
        key = ("order", self.seed, self.phase, epoch)
        place = np.array([step - sum(before)], np.int64)
        buckets, numbers = self._orders[0].woven(place, batches, GROUP, *key)
        return epoch, int(buckets[0]), int(numbers[0])
