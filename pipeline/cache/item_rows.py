"""Rows of a table by item: sorted digests of the items, 24 bytes an item in temporary files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from pipeline.cache.arrow import batches
from pipeline.cache.key_columns import SortedKeys, binary, fixed, halves, is_last
from pipeline.cache.many_keys import item_keys
from pipeline.cache.scratch import Scratch


class ItemRows:
    """Finds rows of a table by their item; of equal items the last.

    Args:
        table: with a column `item`.
    """

    def __init__(self, table: pa.Table, scratch: Scratch):
        self.table = table
        found = scratch.arrays(_sorted(table, scratch), {"high": np.uint64, "low": np.uint64, "row": np.int64})
        self._keys, self._rows = SortedKeys(found["high"], found["low"]), found["row"]

    def find(self, items: Sequence[str]) -> np.ndarray:
        """Rows (n,) int64 of items, -1 where absent."""
        at = self._keys.find(item_keys(items))
        rows = np.full(len(at), -1, np.int64)
        rows[at >= 0] = self._rows[at[at >= 0]]
        return rows


def _sorted(table: pa.Table, scratch: Scratch) -> Iterator[dict[str, np.ndarray]]:
    def keyed() -> Iterator[pa.Table]:
        first = 0
        for batch in batches(table.select(["item"])):
            keys = item_keys(batch.column("item").to_pylist())
            yield pa.table({"key": binary(keys), "row": np.arange(first, first + len(keys))})
            first += len(keys)

    for part in scratch.sorted_by_key(keyed()):
        keys = fixed(part.column("key"))
        last = is_last(keys)
        high, low = halves(keys[last])
        yield {"high": high, "low": low, "row": part.column("row").to_numpy()[last]}
