"""Prove the absence of withdrawn pictures: look for their digests and keys in every table and shard of a cache,
whether anything names the file or not."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sana_pipe.base.errors import CacheError
from sana_pipe.data.cache import shard, withdrawn
from sana_pipe.data.cache.arrow import parquet_batches
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.findings import Finding, damage_only
from sana_pipe.data.cache.keys import as_keys, binary
from sana_pipe.data.cache.layout import FORGET
from sana_pipe.data.cache.shard import from_ipc
from sana_pipe.data.snapshots import metadata_table

FOLDERS = ("shards", "tables", "copies/tables", "fragments", "damaged")


def remains(cache: Cache) -> Iterator[Finding]:
    """Files that still have a record or row of a withdrawn picture, or that cannot be read to find out.

    Rejects of scans that say that the picture is withdrawn do not count: `encode` met the file again.
    """
    takedowns = withdrawn.takedowns(cache)
    keys = {key for each in takedowns for some in each.keys.values() for key in some}
    wanted = sorted({bytes.fromhex(each) for each in {*keys, *(d for each in takedowns for d in each.digests)}})
    if not wanted:
        return
    fixed, names = binary(as_keys(wanted)), metadata_table.withdrawn_names(cache)
    for folder in FOLDERS:
        for entry in cache.files.walk(folder):
            name = entry.name.partition("@")[0]
            try:
                found = _found(cache, entry.name, name, fixed, names)
            except (CacheError, OSError, pa.ArrowException) as error:
                problem = damage_only(error) if isinstance(error, CacheError | OSError) else f"cannot be read: {error}"
                yield Finding(entry.name, f"cannot be searched: {problem}")
                continue
            if found:
                yield Finding(entry.name, f"has {found} keys or digests of withdrawn pictures", fix=FORGET)


def _found(cache: Cache, path: str, name: str, wanted: pa.Array, names: set[str]) -> int:
    """Return how many values of a file are wanted ones. names: keys of wanted rows of a table of metadata."""
    if name.endswith(".tar"):
        return _count(shard.read_table(cache.files, path), wanted)
    if name.endswith(".arrow"):
        return _count(from_ipc(cache.files.read(path), path), wanted)
    if name.endswith(".parquet"):
        schema, every = parquet_batches(cache.files.read(path))
        if schema.names == metadata_table.SCHEMA.names:
            return sum(int(np.count_nonzero(metadata_table.goes(rows, names))) for rows in every)
        return sum(_count(_without_rejects(rows), wanted) for rows in every)
    return 0


def _without_rejects(rows: pa.Table) -> pa.Table:
    """The rows that are no rejects of withdrawn pictures."""
    if "reject" not in rows.column_names:
        return rows
    return rows.filter(pc.invert(pc.fill_null(pc.equal(rows.column("reject"), withdrawn.REASON), False)))


def _count(table: pa.Table, wanted: pa.Array) -> int:
    return sum(_count_in(chunk, wanted) for column in table.columns for chunk in column.chunks)


def _count_in(values: pa.Array, wanted: pa.Array) -> int:
    """Count wanted values in a column of digests, or anywhere in lists and structs."""
    kind = values.type
    if pa.types.is_list(kind):
        return _count_in(pc.list_flatten(values), wanted)
    if pa.types.is_struct(kind):
        return sum(_count_in(pc.struct_field(values, [at]), wanted) for at in range(kind.num_fields))
    if pa.types.is_fixed_size_binary(kind) or pa.types.is_binary(kind):
        if pa.types.is_fixed_size_binary(kind) and kind.byte_width != 16:
            return 0
        found = pc.is_in(values, value_set=wanted.cast(kind))
        return int(np.count_nonzero(found.to_numpy(zero_copy_only=False)))
    return 0
