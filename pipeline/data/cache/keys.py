"""16-byte keys as numpy arrays and Arrow columns, and digests of many texts at a time.

The keys of a single picture or caption are in `cache.encodings`. An item costs four digests in `bucket`; framing
in Arrow leaves one call of xxhash for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from sana_pipe.data.cache.layout import framed

BATCH = 1 << 16
"""Keys that are looked up at a time."""


def is_first(keys: np.ndarray) -> np.ndarray:
    """(n,) bool: which of sorted keys (S16) differ from the key before."""
    first, second = (np.ascontiguousarray(keys).view(np.uint64)[half::2] for half in (0, 1))
    return np.append(True, (first[1:] != first[:-1]) | (second[1:] != second[:-1]))[: len(keys)]


class SortedKeys:
    """Keys in ascending order, which binary search finds. high, low: (n,) uint64 `halves` of the keys."""

    def __init__(self, high: np.ndarray, low: np.ndarray):
        self.high, self.low = high, low

    @classmethod
    def of(cls, keys: list[bytes]) -> SortedKeys:
        """16-byte keys in any order."""
        return cls(*halves(np.unique(as_keys(keys))))

    def __len__(self) -> int:
        return len(self.high)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Positions (int64) of keys (S16), -1 where absent; of equal keys the first."""
        result = np.full(len(keys), -1, np.int64)
        if len(self.high):
            for start in range(0, len(keys), BATCH):
                result[start : start + BATCH] = self._find(keys[start : start + BATCH])
        return result

    def _find(self, keys: np.ndarray) -> np.ndarray:
        high, low = halves(keys)
        order = np.argsort(high)  # in key order: random probes of a large index miss the CPU caches
        rows = np.empty(len(keys), np.int64)
        rows[order] = np.searchsorted(self.high, high[order])
        last = len(self.high) - 1
        rows = np.minimum(rows, last)
        while True:  # keys with equal first halves are adjacent
            equal, other = self.high[rows] == high, self.low[rows]
            before = equal & (other < low) & (rows < last)
            if not before.any():
                return np.where(equal & (other == low), rows, -1)
            rows[before] += 1


def halves(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """S16 keys as (high, low) uint64 arrays, which sort like the bytes, and faster."""
    both = np.ascontiguousarray(keys).view(">u8")
    return both[::2].astype(np.uint64), both[1::2].astype(np.uint64)


def of_halves(high: np.ndarray, low: np.ndarray | int = 0) -> np.ndarray:
    """S16 keys of uint64 arrays (n,); the inverse of `halves`."""
    both = np.empty((len(high), 2), ">u8")
    both[:, 0], both[:, 1] = high, low
    return both.view("S16")[:, 0]


def as_keys(keys: list[bytes]) -> np.ndarray:
    """16-byte keys as an array that numpy can sort and compare."""
    return np.frombuffer(b"".join(keys), dtype="S16") if keys else np.empty(0, "S16")


def binary(keys: np.ndarray) -> pa.Array:
    """An S16 array as a fixed_size_binary(16) column; the inverse of `fixed`."""
    return pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(16), len(keys), [None, pa.py_buffer(np.ascontiguousarray(keys))]
    )


def fixed(column: pa.ChunkedArray | pa.Array) -> np.ndarray:
    """A fixed_size_binary(16) column as a numpy S16 array."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], pa.binary(16))
    if not len(array):
        return np.empty(0, "S16")
    return np.frombuffer(array.buffers()[1], dtype="S16", count=len(array), offset=array.offset * 16)


def to_numpy(column: pa.ChunkedArray) -> np.ndarray:
    """A column of numbers or 16-byte keys as a numpy array; the inverse of `to_column`."""
    return fixed(column) if pa.types.is_fixed_size_binary(column.type) else column.to_numpy()


def to_column(values: np.ndarray) -> pa.Array:
    """Numbers or S16 keys as an Arrow column."""
    return binary(values) if values.dtype.kind == "S" else pa.array(values)


def key_bytes(value: Any) -> bytes:
    """The 16 bytes of an S16 element (numpy strips trailing zero bytes)."""
    return bytes(value).ljust(16, b"\0")


class Digests:
    """A set of names, most of which are digests of 32 hex digits: these take 16 bytes each, however often they are
    added."""

    def __init__(self, names: Iterable[str] = ()):
        self._sorted, self._new, self._others = np.empty(0, "S16"), bytearray(), set[str]()
        self.update(names)

    def update(self, names: Iterable[str]) -> None:
        for name in names:
            self.add(name)

    def add(self, name: str) -> None:
        if (key := _of_hex(name)) is None:
            self._others.add(name)
        else:
            self._new += key
            if len(self._new) > 16 * max(BATCH, len(self._sorted)):
                self._settled()

    def _settled(self) -> np.ndarray:
        if self._new:
            self._sorted = np.unique(np.concatenate([self._sorted, np.frombuffer(bytes(self._new), "S16")]))
            self._new = bytearray()
        return self._sorted

    def __contains__(self, name: str) -> bool:
        if (key := _of_hex(name)) is None:
            return name in self._others
        keys = self._settled()
        at = int(np.searchsorted(keys, np.bytes_(key)))
        return at < len(keys) and key_bytes(keys[at]) == key

    def __len__(self) -> int:
        return len(self._settled()) + len(self._others)

    def __iter__(self) -> Iterator[str]:
        yield from (key_bytes(key).hex() for key in self._settled())
        yield from sorted(self._others)


def _of_hex(name: str) -> bytes | None:
    """The 16 bytes that a name spells in lower case; None if it is no such name."""
    try:
        key = bytes.fromhex(name)
    except ValueError:
        return None
    return key if len(key) == 16 and key.hex() == name else None


def sample_ids(source: str, items: pa.Array, variant: str = "") -> np.ndarray:
    """`sample_id` of items of a source (strings without null): (n,) uint64.

    Args:
        variant: distinguishes several samples of an item.
    """
    end = [pa.scalar(framed(variant), pa.large_binary())] if variant else []
    digests = digests_of(framed("sample") + framed(source), *framed_all(items), *end)
    return np.ascontiguousarray(digests.view("<u8")[::2])


def item_keys(items: Iterable[str]) -> np.ndarray:
    """Digests (n,) S16 of items, by which tables of items are joined."""
    digest = xxhash.xxh3_128_digest
    return np.frombuffer(b"".join([digest(item.encode("utf-8", "surrogatepass")) for item in items]), "S16")


def framed_all(texts: pa.Array) -> tuple[pa.Array, pa.Array]:
    """The lengths of texts as 8 little-endian bytes, and the texts; together they are `framed` of each."""
    lengths = pc.binary_length(texts).to_numpy().astype("<i8")
    column = pa.FixedSizeBinaryArray.from_buffers(pa.binary(8), len(texts), [None, pa.py_buffer(lengths)])
    return column.cast(pa.large_binary()), texts.cast(pa.large_binary())


def digests_of(start: bytes, *columns: pa.Array | pa.Scalar) -> np.ndarray:
    """Digests (n,) S16 of `start` followed by the bytes of each column."""
    first, separator = pa.scalar(start, pa.large_binary()), pa.scalar(b"", pa.large_binary())
    joined = pc.binary_join_element_wise(first, *columns, separator).to_pylist()
    return np.frombuffer(b"".join(map(xxhash.xxh3_128_digest, joined)), "S16")
