"""Groups of near-duplicate pictures from their perceptual hashes, for `bucket.dedup: near`.

What: two pictures are near if the hash of one, as it is or mirrored, differs from that of the other or of its inner
part in at most `distance` of 128 bits. `groups` joins all such pairs, exactly.
How: cut into words, two near hashes have one word that differs in at most its share of the distance, and so do the 64
bits from there on (Qin and Xiao, Pigeonring, VLDB 2018). So for each word the hashes are sorted from it on, and each
range of equal prefixes is compared with the ranges whose prefix differs in that few bits. At 10^6 hashes this takes
100 s; faiss 1.15 (exact, CPU) would take 2,100 s, by 20,000 queries.
Price: about 300 bytes of memory a picture (2.8 GB for 10^7). Time grows with their square, divided by up to 65,536.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np

from pipeline.images.perceptual_hash import BITS, VIEW_WORDS, WORDS, flipped

MIN_QUALITY = 64
"""Pictures below are in no group: their bits are noise, or those of every flat area."""

IN_RANGE = 32  # hashes in a range of equal prefixes: fewer cost calls, more cost comparisons
ROWS, COLUMNS = 512, 1024  # of a block: 4 MiB of differences
DENSE = 1 << 22  # comparisons of a range from which on blocks inside one group are skipped
WAITING = 1 << 20  # candidates that are verified at a time


def groups(hashed: np.ndarray, distance: int) -> np.ndarray:
    """The group of each picture.

    Args:
        hashed: uint16 (n, 17), of different files.
        distance: bits of 128 in which near pictures may differ.

    Returns:
        (n,) int64: the smallest row of the group. A picture without a near one, or below `MIN_QUALITY`, is alone.
    """
    result = np.arange(len(hashed))
    rows = np.flatnonzero(hashed[:, WORDS] >= MIN_QUALITY)
    if not len(rows):
        return result
    words, member = _unique(hashed, rows)
    forest = _Forest(len(words))
    _Search(words, distance, forest).run()
    member = forest.roots(np.arange(len(words)))[member]
    smallest = np.full(len(words), len(hashed))
    np.minimum.at(smallest, member, rows)
    result[rows] = smallest[member]
    return result


def distances(one: np.ndarray, others: np.ndarray) -> np.ndarray:
    """In how many bits a picture differs from others, as `groups` compares them: (n,) int64. one: uint16 (17,); others:
    (n, 17)."""
    result = np.full(len(others), 16 * VIEW_WORDS, np.int64)
    for left, right in ((one[None], others), (others, one[None])):
        for view in (left[:, :VIEW_WORDS], flipped(left[:, :VIEW_WORDS])):
            for other in (right[:, :VIEW_WORDS], right[:, VIEW_WORDS:WORDS]):
                np.minimum(result, np.bitwise_count(view ^ other).sum(axis=1, dtype=np.int64), out=result)
    return result


def _unique(hashed: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Different hashes among some rows, (m, 16) uint16; and which of them each row has, (len(rows),)."""
    words = hashed[rows, :WORDS]
    order = np.lexsort(words.view(np.uint64).T)
    ordered = words[order]
    new = np.append(True, (ordered[1:] != ordered[:-1]).any(axis=1))
    member = np.empty(len(rows), np.int64)
    member[order] = np.cumsum(new) - 1
    return ordered[new], member


Views = tuple[np.ndarray, np.ndarray]
"""Two hashes of each picture: (m, 8) uint16 each."""


class _Forest:
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
    """The hashes of two views from one bit on, sorted.

    Attributes:
        keys: (2 m,) uint64, the 64 bits from there on.
        rows: (2 m,) 2 x row + view.
        starts: (2^prefix + 1,) of the ranges whose first bits are equal.
    """

    def __init__(self, views: Views, first: int, prefix: int):
        keys = np.empty((len(views[0]), 2), np.uint64)
        for number, view in enumerate(views):
            halves = np.ascontiguousarray(view).view(np.uint64)
            high, low = halves[:, first // 64], halves[:, 1 - first // 64]
            shift = np.uint64(first % 64)
            keys[:, number] = high << shift | low >> np.uint64(1) >> (np.uint64(63) - shift)
        self.rows = np.argsort(keys.ravel())
        self.keys = keys.ravel()[self.rows]
        self.starts = np.searchsorted(self.keys >> np.uint64(64 - prefix), np.arange((1 << prefix) + 1, dtype="u8"))


class _Search:
    """Finds near pairs of different hashes (m, 16), and joins them in a forest.

    The 128 bits are cut into as few words as leave one with at most `radius` differences.
    """

    def __init__(self, words: np.ndarray, distance: int, forest: _Forest):
        self._distance, self._forest = distance, forest
        whole, inner = words[:, :VIEW_WORDS], words[:, VIEW_WORDS:]
        self._left, self._right = (whole, flipped(whole)), (whole, inner)
        radius = distance // VIEW_WORDS
        self._words = distance // (radius + 1) + 1
        self._prefix = min(BITS // self._words, max(1, (2 * len(words) // IN_RANGE).bit_length() - 1), 20)
        self._half = -(-self._words // 2) * distance // self._words  # differences in the words that 64 bits touch
        flips = (some for count in range(radius + 1) for some in combinations(range(self._prefix), count))
        self._masks = np.array([sum(1 << bit for bit in some) for some in flips])
        self._differing = np.empty(ROWS * COLUMNS, np.uint64)
        self._counts = np.empty(ROWS * COLUMNS, np.uint8)
        self._waiting: list[tuple[np.ndarray, np.ndarray]] = []
        self._many = 0

    def run(self) -> None:
        for word in range(self._words):
            first = word * BITS // self._words
            left, right = (_Sorted(views, first, self._prefix) for views in (self._left, self._right))
            for prefix in np.flatnonzero(np.diff(left.starts)).tolist():
                near = prefix ^ self._masks
                columns = _ranges(right.starts[near], right.starts[near + 1])
                if len(columns):
                    rows = slice(left.starts[prefix], left.starts[prefix + 1])
                    self._compare(left.keys[rows], left.rows[rows], right.keys[columns], right.rows[columns])
            self._verify()

    def _compare(self, left: np.ndarray, left_rows: np.ndarray, right: np.ndarray, right_rows: np.ndarray) -> None:
        """Compare all keys of the left with all of the right."""
        is_dense = len(left) * len(right) > DENSE
        for rows in _parts(len(left), ROWS):
            for columns in _parts(len(right), COLUMNS * ROWS // min(ROWS, len(left))):
                if is_dense and self._is_one_group(left_rows[rows], right_rows[columns]):
                    continue
                a, b = left[rows], right[columns]
                shape, size = (len(a), len(b)), len(a) * len(b)
                differing, counts = self._differing[:size].reshape(shape), self._counts[:size].reshape(shape)
                np.bitwise_count(np.bitwise_xor(a[:, None], b, out=differing), out=counts)
                at = np.flatnonzero(counts <= self._half)
                if len(at):
                    self._add(left_rows[rows][at // len(b)], right_rows[columns][at % len(b)])

    def _is_one_group(self, left: np.ndarray, right: np.ndarray) -> bool:
        self._verify()
        roots = self._forest.roots(np.concatenate([left, right]) // 2)
        return bool((roots == roots[0]).all())

    def _add(self, left: np.ndarray, right: np.ndarray) -> None:
        apart = left // 2 != right // 2
        self._waiting.append((left[apart], right[apart]))
        self._many += len(self._waiting[-1][0])
        if self._many >= WAITING:
            self._verify()

    def _verify(self) -> None:
        """Join the candidates whose whole distance is small enough."""
        if not self._many:
            self._waiting = []
            return
        left, right = (np.concatenate(some) for some in zip(*self._waiting, strict=True))
        self._waiting, self._many = [], 0
        apart = self._forest.roots(left // 2) != self._forest.roots(right // 2)
        left, right = left[apart], right[apart]
        differing = _view_words(self._left, left) ^ _view_words(self._right, right)
        near = np.bitwise_count(differing).sum(axis=1) <= self._distance
        self._forest.join(left[near] // 2, right[near] // 2)


def _view_words(views: Views, rows: np.ndarray) -> np.ndarray:
    """(k, 8) uint16: the words of 2 x row + view."""
    return np.where((rows % 2 == 0)[:, None], views[0][rows // 2], views[1][rows // 2])


def _ranges(starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """All numbers of some ranges, one range after the other."""
    lengths = stops - starts
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) + np.repeat(starts - ends + lengths, lengths)


def _parts(count: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, count, size))
