"""Groups of samples that stay on one side of a held-out part, by a column: an artist, a patient, a folder.

What: `add_groups` gives each item of a scan the key of its value; `united` joins the groups that share a picture.
How: samples are nodes of a forest. Equal values join them, so do equal files and near-duplicates, over any number of
steps. The key of a set is the smallest key of its values (without any: of its files), so more data change it only
where they join sets.
Price: 8 bytes of memory a sample, and two sorts on disk.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sana_pipe.data.cache.arrow import batches
from sana_pipe.data.cache.keys import as_keys, binary, halves, of_halves
from sana_pipe.data.cache.layout import digest
from sana_pipe.data.snapshots import filters
from sana_pipe.data.snapshots.filters import Filter
from sana_pipe.data.snapshots.frames import Frame, pieces
from sana_pipe.data.snapshots.join import GROUP, Joined
from sana_pipe.data.snapshots.near import Forest

OPTION = "bucket.group"
LARGEST = 5
"""Groups that are shown."""
NONE = b""
"""A key of zeros, as numpy compares it: no value."""
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that a product names its row. Sorting needs keys that are spread evenly."""


@dataclass(frozen=True)
class Values:
    """The values of the column.

    Attributes:
        column: its name, as it was given.
        also: (k, 2) S16: keys of two values that one item has, as a list.
    """

    column: str
    also: np.ndarray


def add_groups(joined: Joined, scans: Mapping[str, pa.Table], column: str) -> tuple[dict[str, pa.Table], Values]:
    """Add the column `GROUP` to the usable items of each source.

    Args:
        column: of `bucket.group`.

    Raises:
        UserError: it is no column, or no item has it.
    """
    rule = Filter(column, OPTION)
    if rule.column is None or filters.of_bucket({rule.column}):
        raise rule.wrong("is not a column", expected="a column, such as artist, exif.model or folder")
    grouped, also, lacking = dict[str, pa.Table](), list[np.ndarray](), list[str]()
    for source, scan in scans.items():
        writer, found = joined.scratch.writer("S16"), False
        for batch in batches(scan):
            found_keys, pairs = keys(filters.texts(rule.column, batch, source))
            writer.add(found_keys)
            also.append(pairs)
            found |= bool((found_keys != NONE).any())
        grouped[source] = scan.append_column(GROUP, binary(writer.finish()))
        lacking += [] if found else [source]
    if len(lacking) == len(scans) and any(map(len, scans.values())):
        metadata = [filters.Metadata(batches(scan.select(["item", "meta"])), rule.paths) for scan in scans.values()]
        known = {path for each in metadata for path in each.known}
        rule.check_columns(known, sorted({name for each in metadata for name in each.valid}))
    joined.notes += [f"source {source!r}: none of its items has a value of {column} ({OPTION})" for source in lacking]
    return grouped, Values(column, np.concatenate([np.empty((0, 2), "S16"), *also]))


def keys(lists: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    """The key of each item's first value, (n,) S16; and the pairs of `Values.also`. lists: texts of each item."""
    encoded = lists.flatten().dictionary_encode()
    of_text = as_keys([bytes(16), *(value_key(text) for text in encoded.dictionary.to_pylist())])
    found = of_text[pc.fill_null(encoded.indices, -1).to_numpy() + 1]
    owners = lists.value_parent_indices().to_numpy()
    owners, found = owners[found != NONE], found[found != NONE]
    result, first = np.zeros(len(lists), "S16"), np.diff(owners, prepend=-1) > 0
    result[owners[first]] = found[first]
    return result, np.stack([result[owners[~first]], found[~first]], axis=1)


def value_key(text: str) -> bytes:
    """The key of a value. Numbers are equal however they are written: 7, 7.0 and "7". Blank text is no value."""
    text = text.strip()
    if re.fullmatch(filters.NUMBER, text):
        text = repr(float(text))
    return digest("group", text) if text else bytes(16)


def united(joined: Joined, frame: Frame, values: Values, near: np.ndarray | None) -> tuple[np.ndarray, dict[str, Any]]:
    """Join all samples that equal values, equal files or near-duplicates connect.

    Example: a (artist 1), b (artist 1), c (artist 2), d (no artist); b and c look the same. The sets are a, b, c and d.

    Args:
        near: (n,) S16 keys of groups of near-duplicates; None: equal files alone are one picture.

    Returns:
        (n,) S16 keys of the sets, and what `bucket` prints of them.
    """
    count, scratch, also = len(frame), joined.scratch, values.also
    forest = Forest(count + len(also))  # a pair of values is a node, too
    pictures, distinct = frame.digest if near is None else near, 0
    for _, rows, first in scratch.by_key(pictures[piece] for piece in pieces(count)):
        forest.join(*_links(rows, first))
    of_rows = (_or_own(frame.group[piece], piece) for piece in pieces(count))
    for _, rows, first in scratch.by_key(chain(of_rows, also.T if len(also) else ())):
        is_sample = rows < count
        nodes = np.where(is_sample, rows, count + (rows - count) % max(1, len(also)))
        forest.join(*_links(nodes, first))
        has_value = is_sample & (frame.group[np.minimum(rows, count - 1)] != NONE)
        distinct += int(np.count_nonzero(np.logical_or.reduceat(has_value, np.flatnonzero(first))))
    result, sets = scratch.array(count, "S16"), _Sets()
    roots = (forest.roots(np.arange(piece.start, piece.stop)).astype(np.uint64) for piece in pieces(count))
    for _, rows, first in scratch.by_key(of_halves(some * _SPREAD, some) for some in roots):
        number, without = np.cumsum(first) - 1, frame.group[rows] == NONE
        keys = np.where(without, pictures[rows], frame.group[rows])
        high, low = halves(keys)
        order = np.lexsort((low, high, without, number))
        smallest = order[np.flatnonzero(first)]  # of each set; a value comes before files
        result[rows] = keys[smallest][number]
        sets.add(np.bincount(number), rows[smallest], ~without[smallest], int(np.count_nonzero(without)))
    return result, sets.report(joined, frame, values.column, distinct)


def _links(nodes: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each node that is not the first of its key, and the node that is."""
    heads = nodes[first][np.cumsum(first) - 1]
    return nodes[~first], heads[~first]


def _or_own(keys: np.ndarray, piece: slice) -> np.ndarray:
    """The keys of some rows; a row without a value gets a key that no other row has."""
    rows = np.arange(piece.start, piece.stop, dtype=np.uint64)
    return np.where(keys == NONE, of_halves(rows * _SPREAD, rows), keys)


class _Sets:
    """Counts sets of samples, and remembers the largest."""

    def __init__(self) -> None:
        self._sets = self._without = 0
        self._largest: list[tuple[int, int]] = []

    def add(self, sizes: np.ndarray, rows: np.ndarray, has_value: np.ndarray, without: int) -> None:
        """Add sets (k,): a row of each, and whether it has a value; without: samples in them that have none."""
        self._sets += int(np.count_nonzero(has_value))
        self._without += without
        several = np.flatnonzero(sizes > 1)
        most = several[np.lexsort((rows[several], -sizes[several]))][:LARGEST]
        self._largest += zip((-sizes[most]).tolist(), rows[most].tolist(), strict=True)
        self._largest = sorted(self._largest)[:LARGEST]

    def report(self, joined: Joined, frame: Frame, column: str, distinct: int) -> dict[str, Any]:
        """JSON values: `column`, `values`, `groups` (fewer than values, where pictures join them), `samples`,
        `without_value` (samples) and the `largest`, also of pictures without a value that look the same."""
        return {
            "column": column,
            "values": distinct,
            "groups": self._sets,
            "samples": len(frame),
            "without_value": self._without,
            "largest": [
                {
                    "samples": -size,
                    "share": -size / len(frame),
                    "example": f"{joined.sources[int(frame.source[row])]}: {frame.item[row].as_py()}",
                }
                for size, row in self._largest
            ],
        }
