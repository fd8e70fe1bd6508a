"""The values of many records of an index, for what `bucket` decides by them (near-duplicates, balance)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.codec import PLAIN
from sana_pipe.data.cache.encodings import Encoding
from sana_pipe.data.cache.index import RecordIndex
from sana_pipe.data.cache.shard import ShardReader

READ_BYTES = 64 << 20


def read_records(
    encoding: Encoding,
    index: RecordIndex,
    caches: Sequence[Cache],
    rows: np.ndarray,
    count: np.ndarray,
    shape: tuple[int, ...],
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Verified records in the order of storage, about `READ_BYTES` at a time.

    Args:
        caches: those of the index, in the same order.
        rows: (n,) of the index. count: (n,) rows of each record, of `shape`.

    Yields:
        Which records, (k,); their rows, one after the other, uint16 (m, *shape); the end of each, (k,).

    Raises:
        IntegrityError: a record is damaged.
    """
    most = max(1, READ_BYTES // (2 * int(np.prod(shape)) * max(1, int(count.max(initial=1)))))
    names = ["shard", "offset", "key", "checksum", *([] if encoding.storage == PLAIN else ["length"])]
    cache_of = index.caches[index.columns["shard"][rows]]
    for number, cache in enumerate(caches):
        reader, ours = ShardReader(cache.files, index.encoding), np.flatnonzero(cache_of == number)
        ours = ours[np.lexsort((index.columns["offset"][rows[ours]], index.columns["shard"][rows[ours]]))]
        for start in range(0, len(ours), most):
            some = ours[start : start + most]
            places = {name: index.columns[name][rows[some]] for name in names}
            ends = np.cumsum(count[some])
            values = np.empty((int(ends[-1]), *shape), np.uint16)
            begin, every = ends - count[some], np.arange(len(some))
            bad = reader.read_batch(index.shards, places, every, values, begin, ends, verify=True, on_read=None)
            if bad:
                raise bad[0][1]
            yield some, values, ends
