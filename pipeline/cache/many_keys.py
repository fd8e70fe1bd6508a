"""Keys and ids of many pictures, captions or items at a time; those of each are in `pipeline.cache.layout`.

Why columns: an item costs four digests in `bucket`. Framing in Arrow leaves one call of xxhash for each.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from pipeline.cache.layout import framed


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
