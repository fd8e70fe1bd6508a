"""Keys and ids of many pictures, captions or items at a time; those of each are in `pipeline.cache.layout`.

Why columns: an item costs four digests in `bucket`. Framing in Arrow leaves one call of xxhash for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from pipeline.cache.key_columns import binary
from pipeline.cache.layout import framed


def latent_keys(recipe_id: str, digests: np.ndarray, sizes: Sequence[tuple[int, int]], which: np.ndarray) -> np.ndarray:
    """`latent_key` of pictures: (n,) S16.

    Args:
        digests: (n,) S16, of the pictures.
        sizes: (height, width) in pixels.
        which: (n,) int64, each picture's position in `sizes`.
    """
    start = framed("latent") + framed(recipe_id) + (16).to_bytes(8, "little")
    ends = pa.array([framed(f"{height}x{width}") + framed("") for height, width in sizes], pa.large_binary())
    return _digests(start, binary(digests).cast(pa.large_binary()), ends.take(pa.array(which)))


def text_keys(recipe_id: str, normalised: pa.Array) -> np.ndarray:
    """`text_key` of captions (strings without null): (n,) S16."""
    start = framed("text") + framed(recipe_id) + (16).to_bytes(8, "little")
    return _digests(start, binary(_digests(b"", *_framed(normalised))).cast(pa.large_binary()))


def sample_ids(source: str, items: pa.Array, variant: str = "") -> np.ndarray:
    """`sample_id` of items of a source (strings without null): (n,) uint64.

    Args:
        variant: distinguishes several samples of an item.
    """
    end = [pa.scalar(framed(variant), pa.large_binary())] if variant else []
    digests = _digests(framed("sample") + framed(source), *_framed(items), *end)
    return np.ascontiguousarray(digests.view("<u8")[::2])


def item_keys(items: Iterable[str]) -> np.ndarray:
    """Digests (n,) S16 of items, by which tables of items are joined."""
    digest = xxhash.xxh3_128_digest
    return np.frombuffer(b"".join([digest(item.encode("utf-8", "surrogatepass")) for item in items]), "S16")


def _framed(texts: pa.Array) -> tuple[pa.Array, pa.Array]:
    """The lengths of texts as 8 little-endian bytes, and the texts; together they are `framed` of each."""
    lengths = pc.binary_length(texts).to_numpy().astype("<i8")
    column = pa.FixedSizeBinaryArray.from_buffers(pa.binary(8), len(texts), [None, pa.py_buffer(lengths)])
    return column.cast(pa.large_binary()), texts.cast(pa.large_binary())


def _digests(start: bytes, *columns: pa.Array | pa.Scalar) -> np.ndarray:
    """Digests (n,) S16 of `start` followed by the bytes of each column."""
    first, separator = pa.scalar(start, pa.large_binary()), pa.scalar(b"", pa.large_binary())
    joined = pc.binary_join_element_wise(first, *columns, separator).to_pylist()
    return np.frombuffer(b"".join(map(xxhash.xxh3_128_digest, joined)), "S16")
