"""Rows of a table found by their item."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from sana_pipe.data.cache.arrow import batches
from sana_pipe.data.cache.keys import SortedKeys, halves, item_keys
from sana_pipe.data.cache.scratch import Scratch


class ItemRows:
    """Finds rows of a table by their item.

    Args:
        table: with a column `item`.
    """

    def __init__(self, table: pa.Table, scratch: Scratch):
        self.table = table
        types = {"high": np.uint64, "low": np.uint64, "start": np.int64, "row": np.int64}
        found = scratch.arrays(_by_item(table, scratch), types)
        self._keys, self._starts, self._rows = SortedKeys(found["high"], found["low"]), found["start"], found["row"]

    def find(self, items: Sequence[str]) -> np.ndarray:
        """Rows (n,) int64 of items, of equal items the last; -1 where absent."""
        groups = self._keys.find(item_keys(items))
        rows, there = np.full(len(groups), -1, np.int64), groups >= 0
        rows[there] = self._rows[self._ends(groups[there]) - 1]
        return rows

    def every(self, items: Sequence[str]) -> list[list[int]]:
        """List all rows of each item, ascending."""
        groups, result = self._keys.find(item_keys(items)), list[list[int]]([] for _ in items)
        (there,) = np.nonzero(groups >= 0)
        starts, ends = self._starts[groups[there]], self._ends(groups[there])
        for at, start, end in zip(there.tolist(), starts.tolist(), ends.tolist(), strict=True):
            result[at] = self._rows[start:end].tolist()
        return result

    def _ends(self, groups: np.ndarray) -> np.ndarray:
        """Return where the rows of groups end."""
        following = np.minimum(groups + 1, len(self._starts) - 1)
        return np.where(groups + 1 < len(self._starts), self._starts[following], len(self._rows))


def _by_item(table: pa.Table, scratch: Scratch) -> Iterator[dict[str, np.ndarray]]:
    before, parts = 0, batches(table.select(["item"]))
    for keys, rows, first in scratch.by_key(item_keys(part.column("item").to_pylist()) for part in parts):
        high, low = halves(keys[first])
        yield {"high": high, "low": low, "start": before + np.flatnonzero(first), "row": rows}
        before += len(rows)
