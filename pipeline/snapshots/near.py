"""Groups of near-duplicate pictures from their perceptual hashes, for `bucket.dedup: near`.

What: two pictures are near if the hash of one, as it is or mirrored, differs from that of the other or of its inner
part in at most `distance` of 128 bits. `groups` joins all such pairs, exactly; `best` chooses the picture that stays.
How: of the 8 words of two near hashes there is one that differs in at most distance / 8 bits and, with the three words
after it, in at most distance / 2 (Qin and Xiao, Pigeonring, VLDB 2018). So for each word the hashes are sorted from it
on, and each range is compared with the ranges whose prefix differs in that few bits.
Price: about 140 bytes of memory a picture. Time grows with the square, divided by up to 65,536.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np

from pipeline.images.perceptual_hash import VIEW_WORDS, WORDS, flipped

MIN_QUALITY = 64
"""Pictures below are in no group: their bits are noise, or those of every flat area."""

IN_RANGE = 256  # hashes of a view in a range, for which numpy's calls cost little
ROWS, COLUMNS = 512, 1024  # of a block: 4 MiB of differences
DENSE = 1 << 22  # pairs of two ranges from which on blocks inside one group are skipped
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
    search = _Search(words, distance, forest)
    for word in range(VIEW_WORDS):
        search.from_word(word)
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


def best(group: np.ndarray, pixels: np.ndarray, caption: np.ndarray, identity: np.ndarray) -> np.ndarray:
    """Which picture of each group stays: the most pixels, then the longest caption, then the smallest id.

    Args:
        group: (n,) int64, from `groups`.
        pixels, caption: (n,) int64: width x height, and the length of the longest caption.
        identity: (n,) of different ids that can be sorted.

    Returns:
        (n,) bool.
    """
    order = np.lexsort((identity, -caption, -pixels, group))
    stays = np.zeros(len(group), bool)
    stays[order[np.append(True, np.diff(group[order]) != 0)[: len(order)]]] = True
    return stays


def _unique(hashed: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Different hashes among some rows, (m, 16) uint16; and which of them each row has, (len(rows),)."""
    words = hashed[rows, :WORDS]
    order = np.lexsort(words.view(np.uint64).T)
    ordered = words[order]
    new = np.append(True, (ordered[1:] != ordered[:-1]).any(axis=1))
    member = np.empty(len(rows), np.int64)
    member[order] = np.cumsum(new) - 1
    return ordered[new], member


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
    """The hashes of two views from one word on, sorted.

    Attributes:
        keys: (2 m,) uint64, that word highest and the three words after it.
        rows: (2 m,) 2 x row + view.
        starts: (2^bits + 1,) of the ranges of equal first bits.
    """

    def __init__(self, views: tuple[np.ndarray, np.ndarray], word: int, bits: int):
        keys = np.empty((len(views[0]), 2), np.uint64)
        for number, view in enumerate(views):
            for place in range(4):
                keys[:, number] <<= np.uint64(16)
                keys[:, number] |= view[:, (word + place) % VIEW_WORDS]
        order = np.argsort(keys.ravel())
        self.keys, self.rows = keys.ravel()[order], order
        self.starts = np.searchsorted(self.keys >> np.uint64(64 - bits), np.arange((1 << bits) + 1, dtype=np.uint64))


class _Search:
    """Finds near pairs of different hashes (m, 16), and joins them in a forest."""

    def __init__(self, words: np.ndarray, distance: int, forest: _Forest):
        self._distance, self._forest = distance, forest
        whole, inner = words[:, :VIEW_WORDS], words[:, VIEW_WORDS:]
        self._left, self._right = (whole, flipped(whole)), (whole, inner)
        self._bits = min(16, max(1, (len(words) // IN_RANGE).bit_length()))
        near = (range(self._bits) if count else () for count in range(distance // VIEW_WORDS + 1))
        self._masks = [sum(1 << bit for bit in some) for n, bits in enumerate(near) for some in combinations(bits, n)]
        self._differing = np.empty(ROWS * COLUMNS, np.uint64)
        self._counts = np.empty(ROWS * COLUMNS, np.uint8)
        self._waiting: list[tuple[np.ndarray, np.ndarray]] = []
        self._many = 0

    def from_word(self, word: int) -> None:
        """All pairs of which this word, and it with the three after it, differ in few bits."""
        left, right = (_Sorted(views, word, self._bits) for views in (self._left, self._right))
        ends = right.starts.tolist()
        for prefix, (start, end) in enumerate(zip(left.starts[:-1].tolist(), left.starts[1:].tolist(), strict=True)):
            for other in (prefix ^ mask for mask in self._masks) if end > start else ():
                self._compare(left, slice(start, end), right, slice(ends[other], ends[other + 1]))
        self._verify()

    def _compare(self, left: _Sorted, here: slice, right: _Sorted, there: slice) -> None:
        is_dense = (here.stop - here.start) * (there.stop - there.start) > DENSE
        for rows in _parts(here, ROWS):
            for columns in _parts(there, COLUMNS):
                if is_dense and self._is_one_group(left.rows[rows], right.rows[columns]):
                    continue
                a, b = left.keys[rows], right.keys[columns]
                shape, size = (len(a), len(b)), len(a) * len(b)
                differing, counts = self._differing[:size].reshape(shape), self._counts[:size].reshape(shape)
                np.bitwise_count(np.bitwise_xor(a[:, None], b, out=differing), out=counts)
                at = np.flatnonzero(counts <= self._distance // 2)
                if len(at):
                    self._add(left.rows[rows][at // len(b)], right.rows[columns][at % len(b)])

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
        differing = _words(self._left, left) ^ _words(self._right, right)
        near = np.bitwise_count(differing).sum(axis=1) <= self._distance
        self._forest.join(left[near] // 2, right[near] // 2)


def _words(views: tuple[np.ndarray, np.ndarray], rows: np.ndarray) -> np.ndarray:
    """(k, 8) uint16: the words of 2 x row + view."""
    return np.where((rows % 2 == 0)[:, None], views[0][rows // 2], views[1][rows // 2])


def _parts(whole: slice, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, whole.stop)) for start in range(whole.start, whole.stop, size))
