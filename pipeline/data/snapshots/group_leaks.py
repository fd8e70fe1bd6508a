"""The samples of a held-out snapshot that share a group of `bucket.group` with a sample that is trained on.

What: values of the column are read from the scans of both snapshots. An item with a list of values joins them, over any
number of steps, as in `snapshots.groups`; pictures that look the same are counted by `near_samples.leaked`.
Price: 50 bytes of memory a different value, and one read of the scans.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from sana_pipe.data.cache.arrow import batches
from sana_pipe.data.cache.keys import sample_ids
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.snapshots import filters, groups
from sana_pipe.data.snapshots.filters import Filter
from sana_pipe.data.snapshots.near import Forest


def sharing(
    trained: np.ndarray, scans: Mapping[str, pa.Table], theirs: Mapping[str, pa.Table], part: Snapshot, column: str
) -> np.ndarray | None:
    """Find the samples of `part` whose group has a sample of the training, (n,) bool in the order of rows; None: the
    samples of one of the two have no value.

    Args:
        trained: (k,) uint64, ids of the pictures that are trained on.
        scans, theirs: by source, those of the training and of `part`, with the metadata of `bucket.metadata`.
        column: of `bucket.group`.
    """
    rows = np.concatenate([_ids(table) for table in part.name_tables()])
    _, values, pairs = _values(scans, trained, column)
    ids, others, more = _values(theirs, rows, column)
    if not len(values) or not len(others):
        return None
    nodes = np.concatenate([values, others, *pairs.T, *more.T])
    names, number = np.unique(nodes, return_inverse=True)
    ours, held_out, *ends = np.split(number, np.cumsum([len(values), len(others), *[len(pairs)] * 2, len(more)]))
    forest = Forest(len(names))
    for first, second in (ends[:2], ends[2:]):
        forest.join(first, second)
    shared = np.isin(forest.roots(held_out), forest.roots(ours))
    return np.isin(rows, ids[shared])


def _ids(names: pa.Table) -> np.ndarray:
    """Ids of the pictures of samples, (n,) uint64. names: `source` and `item` of each."""
    sources, items = names.column("source").to_numpy(zero_copy_only=False), names.column("item")
    ids = np.empty(len(names), np.uint64)
    for source in np.unique(sources.astype(str)).tolist():
        of_source = sources == source
        ids[of_source] = sample_ids(source, items.filter(pa.array(of_source)).combine_chunks())
    return ids


def _values(
    scans: Mapping[str, pa.Table], wanted: np.ndarray, column: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The items with an id in `wanted` that have a value: their ids, (n,) uint64, and the keys of their first values,
    (n,) S16; and (k, 2) S16, pairs of values of one item."""
    path = Filter(column, groups.OPTION).column
    assert path is not None, "`groups.add_groups` refuses others"
    ids, keys, pairs = [np.empty(0, np.uint64)], [np.empty(0, "S16")], [np.empty((0, 2), "S16")]
    for source, scan in scans.items():
        for batch in batches(scan):
            of_batch = sample_ids(source, batch.column("item").combine_chunks())
            there = np.isin(of_batch, wanted)
            if not there.any():
                continue
            found, more = groups.keys(filters.texts(path, batch.filter(pa.array(there)), source))
            has_value = found != groups.NONE
            ids.append(of_batch[there][has_value])
            keys.append(found[has_value])
            pairs.append(more)
    return np.concatenate(ids), np.concatenate(keys), np.concatenate(pairs)
