"""Rows of a table by item: sorted digests of the items, 24 bytes an item or row in temporary files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from pipeline.cache.arrow import batches
from pipeline.cache.keys import SortedKeys, halves, is_last, item_keys
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


class ItemGroups:
    """Finds all rows of an item.

    Args:
        table: with a column `item`.
    """

    def __init__(self, table: pa.Table, scratch: Scratch):
        types = {"high": np.uint64, "low": np.uint64, "start": np.int64, "row": np.int64}
        found = scratch.arrays(_grouped(table, scratch), types)
        self._keys, self._starts, self._rows = SortedKeys(found["high"], found["low"]), found["start"], found["row"]

    def find(self, items: Sequence[str]) -> list[list[int]]:
        """For each item its rows, ascending."""
        return [self._of(group) for group in self._keys.find(item_keys(items)).tolist()]

    def _of(self, group: int) -> list[int]:
        if group < 0:
            return []
        start, *after = self._starts[group : group + 2].tolist()
        rows: list[int] = self._rows[start : after[0] if after else None].tolist()
        return rows


def _keys(table: pa.Table) -> Iterator[np.ndarray]:
    return (item_keys(batch.column("item").to_pylist()) for batch in batches(table.select(["item"])))


def _grouped(table: pa.Table, scratch: Scratch) -> Iterator[dict[str, np.ndarray]]:
    before = 0
    for keys, rows, first in scratch.by_key(_keys(table)):
        high, low = halves(keys[first])
        yield {"high": high, "low": low, "start": before + np.flatnonzero(first), "row": rows}
        before += len(rows)


def _sorted(table: pa.Table, scratch: Scratch) -> Iterator[dict[str, np.ndarray]]:
    for keys, rows, _ in scratch.by_key(_keys(table)):
        last = is_last(keys)
        high, low = halves(keys[last])
        yield {"high": high, "low": low, "row": rows[last]}
