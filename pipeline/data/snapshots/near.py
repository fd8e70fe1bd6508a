"""Groups of near-duplicate pictures from their perceptual hashes, for `bucket.dedup: near`.

What: two pictures are near if the hash of one, as it is or mirrored, differs from that of the other or of its inner
part in at most `distance` of 128 bits, and the mean chroma of no cell by more than `COLOURS`, up to a common factor.
`groups` joins all such pairs, exactly.
How: of words cut from two near hashes one, and the 64 bits from it on, differ in at most their share of the distance
(Pigeonring, VLDB 2018). Sorted from each word on, ranges of prefixes that are that near are compared.
Price: 310 bytes of memory a picture (3.1 GB and 800 s for 10^7). Time grows with their square, divided by up to 65,536.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Protocol

import numpy as np

from sana_pipe.data.images.perceptual_hash import BITS, GRID, VIEW_COLOURS, VIEW_WORDS, WORDS, chroma, flipped

DISTANCE = 17
"""Bits of 128 in which the hashes of near pictures may differ."""
MIN_QUALITY = 64
"""Quality below which pictures are in no group: their bits are noise, or those of every flat area."""

COLOURS = 8
"""Levels of 255 in which the mean chroma of a cell may differ between copies."""
FACTOR = 1.5
"""Factor by which the chroma of a copy may be multiplied or divided, as a change of brightness does."""

IN_RANGE = 32  # hashes in a range of equal prefixes: fewer cost calls, more cost comparisons
ROWS, COLUMNS = 512, 1024  # of a block: 4 MiB of differences
DENSE = 1 << 22  # comparisons of a range from which on blocks inside one group are skipped
WAITING = 1 << 20  # candidates that are verified at a time
COMPARED = 1 << 15  # pairs whose colours are compared at a time: 16 MiB


Report = Callable[[int, int], object]
"""A function that takes the number of hashes that have been compared with all others, and the number of all."""


class Memory(Protocol):
    """Groups of hashes that were compared earlier, as `group_memory.GroupMemory`."""

    def known(self, unique: np.ndarray) -> np.ndarray:
        """The group of each hash, (n,) int64; -1: it must be compared."""

    def learn(self, roots: np.ndarray) -> None:
        """Take the groups of these hashes, (n,)."""


def groups(
    hashed: np.ndarray,
    distance: int,
    report: Report = lambda done, total: None,
    memory: Memory | None = None,
) -> np.ndarray:
    """The group of each picture.

    Args:
        hashed: uint16 (n, 49), of different files.
        distance: bits of 128 in which near pictures may differ.
        report: called some times a second.
        memory: what it knows is not compared again; it learns the rest.

    Returns:
        (n,) int64: the smallest row of the group. A picture without a near one, or below `MIN_QUALITY`, is alone.
    """
    result = np.arange(len(hashed))
    rows = np.flatnonzero(hashed[:, WORDS] >= MIN_QUALITY)
    if not len(rows):
        return result
    unique, member = _unique(hashed, rows)
    forest, is_new = Forest(len(unique)), np.ones(len(unique), bool)
    if memory is not None:
        before = memory.known(unique)
        is_new = before < 0
        order = np.argsort(before, kind="stable")[int(is_new.sum()) :]
        same = np.flatnonzero(before[order[1:]] == before[order[:-1]])
        forest.join(order[same], order[same + 1])
    if is_new.any():
        Search(unique, distance, forest, is_new).run(report)
    roots = forest.roots(np.arange(len(unique)))
    if memory is not None:
        memory.learn(roots)
    member = roots[member]
    smallest = np.full(len(unique), len(hashed))
    np.minimum.at(smallest, member, rows)
    result[rows] = smallest[member]
    return result


def distances(one: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Count the bits in which a picture differs from others, as `groups` compares them; all bits where colours differ.

    Args:
        one: uint16 (49,), or (n, 49): another for each of the others.
        others: uint16 (n, 49).

    Returns:
        (n,) int64.
    """
    result = np.full(len(others), BITS, np.int64)
    one = np.atleast_2d(one)
    for left, right in ((one, others), (others, one)):
        for whole in (left, flipped(left)):
            for view in range(2):
                other = right[:, VIEW_WORDS * view : VIEW_WORDS * (view + 1)]
                bits = np.bitwise_count(whole[:, :VIEW_WORDS] ^ other).sum(axis=1, dtype=np.int64)
                at = np.flatnonzero(bits < result)
                first, second = (each if len(each) == 1 else each[at] for each in (whole, right))
                alike = _same_colours(_view_colours(first, 0), _view_colours(second, view))
                at = at[np.broadcast_to(alike, len(at))]
                result[at] = bits[at]
    return result


def _view_colours(hashed: np.ndarray, view: int) -> np.ndarray:
    start = WORDS + 1 + VIEW_COLOURS * view
    return hashed[:, start : start + VIEW_COLOURS]


def _same_colours(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return whether each pair of words of colours is alike, (n,) bool. first, second: uint16 (n, 16), or (1, 16)."""
    a, b = (chroma(words).astype(np.float32) for words in (first, second))
    dot, squares = (a * b).sum(axis=1), (b * b).sum(axis=1)
    factor = np.clip(dot / np.maximum(squares, 1), 1 / FACTOR, FACTOR)[:, None]
    scaled = np.abs(a - factor * b) / np.maximum(factor, 1)
    return np.minimum(np.abs(a - b).max(axis=1), scaled.max(axis=1)) <= COLOURS


def _unique(hashed: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Different hashes with different colours among some rows, (m, 48) uint16; and which of them each row has."""
    words = np.empty((len(rows), WORDS + 2 * VIEW_COLOURS), np.uint16)
    words[:, :WORDS], words[:, WORDS:] = hashed[rows, :WORDS], hashed[rows, WORDS + 1 :]
    order = np.lexsort(words.view(np.uint64).T)
    words = words[order]
    new = np.append(True, (words[1:] != words[:-1]).any(axis=1))
    member = np.empty(len(rows), np.int64)
    member[order] = np.cumsum(new) - 1
    return words[new], member


class Forest:
    """Disjoint sets of 0 .. count - 1; the root of a set is its smallest member."""

    def __init__(self, count: int):
        self._parent = np.arange(count)

    def roots(self, of: np.ndarray) -> np.ndarray:
        while not np.array_equal(above := self._parent[of], of):
            of = above
        return of

    def join(self, first: np.ndarray, second: np.ndarray) -> None:
        """Unite the sets of each pair."""
        nodes, numbers = np.unique(np.concatenate([self.roots(first), self.roots(second)]), return_inverse=True)
        root = np.arange(len(nodes))
        low, high = numbers[: len(first)], numbers[len(first) :]
        while len(low):
            np.minimum.at(root, np.maximum(low, high), np.minimum(low, high))
            while not np.array_equal(above := root[root], root):
                root = above
            low, high = root[low], root[high]
            low, high = low[low != high], high[low != high]
        self._parent[nodes] = nodes[root]


class _Sorted:
    """The hashes from one bit on: those of whole pictures, sorted, then those of inner parts, sorted.

    Attributes:
        keys: (2 m,) uint64, the 64 bits from there on.
        hashes: (2 m,) uint32, of which hash: 2 x row + view.
        starts: (2 x 2^prefix + 1,) of the ranges of a view whose first bits are equal.
    """

    def __init__(self, halves: np.ndarray, first: int, prefix: int):
        count = len(halves)
        self.keys, self.hashes = np.empty(2 * count, np.uint64), np.empty(2 * count, np.uint32)
        prefixes, starts = np.arange(1 << prefix, dtype=np.uint64) << np.uint64(64 - prefix), list[np.ndarray]()
        for view in range(2):
            part = slice(view * count, (view + 1) * count)
            keys = _from_bit(halves[:, 2 * view : 2 * view + 2], first)
            order = np.argsort(keys)
            self.keys[part], self.hashes[part] = keys[order], 2 * order + view
            starts.append(view * count + np.searchsorted(self.keys[part], prefixes))
        self.starts = np.concatenate([*starts, [2 * count]])


class Search:
    """Finds near pairs of different hashes with colours (m, 48), and joins them in a forest.

    The 128 bits are cut into as few words as leave one with at most `radius` differences. A mirrored hash is the hash
    with fixed bits inverted, so it is in the range of another prefix.

    Args:
        is_new: (m,) bool: pairs of two others are not compared.
    """

    def __init__(self, unique: np.ndarray, distance: int, forest: Forest, is_new: np.ndarray):
        self._is_new, self._all_new = is_new, bool(is_new.all())
        halves = np.ascontiguousarray(unique[:, :WORDS]).view(np.uint64)
        self._halves, self._distance, self._forest = halves, distance, forest
        self._colours = unique[:, WORDS:].reshape(-1, 2, VIEW_COLOURS)
        radius = distance // VIEW_WORDS
        self._words = distance // (radius + 1) + 1
        self._prefix = min(BITS // self._words, max(1, (2 * len(halves) // IN_RANGE).bit_length() - 1), 20)
        self._half = -(-self._words // 2) * distance // self._words  # differences in the words that 64 bits touch
        flips = (some for count in range(radius + 1) for some in combinations(range(self._prefix), count))
        self._masks = np.array([sum(1 << bit for bit in some) for some in flips])
        self._mirror = flipped(np.zeros((1, VIEW_WORDS), np.uint16)).view(np.uint64)
        self._differing = np.empty(ROWS * COLUMNS, np.uint64)
        self._counts = np.empty(ROWS * COLUMNS, np.uint8)
        self._waiting: list[tuple[np.ndarray, np.ndarray]] = []
        self._many = 0

    def run(self, report: Report) -> None:
        count, total = 1 << self._prefix, len(self._halves)
        for word in range(self._words):
            first = word * BITS // self._words
            by = _Sorted(self._halves, first, self._prefix)
            mirror = _from_bit(self._mirror, first)
            inverted = int(mirror[0] >> np.uint64(64 - self._prefix))
            is_new = self._is_new[by.hashes // 2]
            occupied = np.diff(by.starts[: count + 1]) > 0
            if not self._all_new:
                occupied &= self._near_new(by.keys[is_new] >> np.uint64(64 - self._prefix), inverted)
            for prefix in np.flatnonzero(occupied).tolist():
                near = prefix ^ self._masks
                plain, mirrored = (
                    _ranges(by.starts, np.concatenate([some[some >= prefix], some + count]))  # two wholes meet once
                    for some in (near, near ^ inverted)
                )
                columns = np.concatenate([plain, mirrored])
                keys = by.keys[columns]
                keys[len(plain) :] ^= mirror
                rows = np.arange(by.starts[prefix], by.starts[prefix + 1])
                if self._all_new:
                    self.compare(by, rows, columns, keys, len(plain))
                else:
                    left, right = is_new[rows], is_new[columns]
                    self.compare(by, rows[left], columns, keys, len(plain))
                    some = columns[right], keys[right]
                    self.compare(by, rows[~left], *some, int(np.count_nonzero(right[: len(plain)])))
                report((word * total + int(by.starts[prefix + 1])) // self._words, total)
            self._verify()

    def _near_new(self, prefixes: np.ndarray, inverted: int) -> np.ndarray:
        """Prefixes of whole pictures in whose range or near ranges are new hashes, (2^prefix,) bool. prefixes: of all
        views of new hashes; inverted: the bits of a prefix that a mirrored hash has inverted."""
        own, near = np.unique(prefixes.astype(np.int64)), np.zeros(1 << self._prefix, bool)
        for mask in self._masks.tolist():
            near[own ^ mask] = near[own ^ mask ^ inverted] = True
        return near

    def compare(self, by: _Sorted, of: np.ndarray, columns: np.ndarray, keys: np.ndarray, plain: int) -> None:
        """Compare a range of whole pictures with other hashes: their keys, from number `plain` on mirrored."""
        if not len(of) or not len(columns):
            return
        left, left_keys = by.hashes[of] // 2, by.keys[of]

        def right(at: np.ndarray) -> np.ndarray:
            return 2 * by.hashes[columns[at]].astype(np.int64) + (at >= plain)

        is_dense = len(left) * len(keys) > DENSE
        for rows in _parts(len(left), ROWS):
            for some in _parts(len(keys), COLUMNS * ROWS // min(ROWS, len(left))):
                if is_dense and self._is_one_group(left[rows], right(np.arange(len(keys))[some])):
                    continue
                a, b = left_keys[rows], keys[some]
                shape, size = (len(a), len(b)), len(a) * len(b)
                differing, counts = self._differing[:size].reshape(shape), self._counts[:size].reshape(shape)
                np.bitwise_count(np.bitwise_xor(a[:, None], b, out=differing), out=counts)
                at = np.flatnonzero(counts <= self._half)
                if len(at):
                    self._add(left[rows][at // len(b)], right(some.start + at % len(b)))

    def _is_one_group(self, left: np.ndarray, right: np.ndarray) -> bool:
        self._verify()
        roots = self._forest.roots(np.concatenate([left, right // 4]))
        return bool((roots == roots[0]).all())

    def _add(self, left: np.ndarray, right: np.ndarray) -> None:
        apart = left != right // 4
        self._waiting.append((left[apart], right[apart]))
        self._many += len(self._waiting[-1][0])
        if self._many >= WAITING:
            self._verify()

    def _verify(self) -> None:
        """Join the candidates whose whole distance is small enough. right: 4 x row + 2 x view + mirrored."""
        if not self._many:
            self._waiting = []
            return
        left, right = (np.concatenate(some) for some in zip(*self._waiting, strict=True))
        self._waiting, self._many = [], 0
        apart = self._forest.roots(left) != self._forest.roots(right // 4)
        left, right = left[apart], right[apart]
        views = self._halves.reshape(-1, 2)
        differing = views[2 * left] ^ views[right // 2] ^ self._mirror * (right % 2)[:, None].astype(np.uint64)
        near = np.flatnonzero(np.bitwise_count(differing).sum(axis=1) <= self._distance)
        near = near[self._alike(left[near], right[near])]
        self._forest.join(left[near], right[near] // 4)

    def _alike(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Return whether the colours of each pair are alike. left, right: as of `_verify`."""
        alike = np.empty(len(left), bool)
        for part in _parts(len(left), COMPARED):
            whole, other = self._colours[left[part], 0], right[part]
            mirrored = whole.reshape(-1, GRID, GRID)[:, :, ::-1].reshape(whole.shape)
            whole = np.where((other % 2 == 1)[:, None], mirrored, whole)
            alike[part] = _same_colours(whole, self._colours[other // 4, other // 2 % 2])
        return alike


def _from_bit(halves: np.ndarray, first: int) -> np.ndarray:
    """64 of 128 bits from one on, cyclically: (k,) uint64. halves: (k, 2)."""
    shift = np.uint64(first % 64)
    high, low = halves[:, first // 64], halves[:, 1 - first // 64]
    return high << shift | low >> np.uint64(1) >> (np.uint64(63) - shift)


def _ranges(starts: np.ndarray, of: np.ndarray) -> np.ndarray:
    """All numbers of some ranges, one range after the other."""
    begin, stops = starts[of], starts[of + 1]
    lengths = stops - begin
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) + np.repeat(begin - ends + lengths, lengths)


def _parts(count: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, count, size))
