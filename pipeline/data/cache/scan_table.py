"""The table of a scan: a row for each item of a source, with the places of its pictures."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sana_pipe.data.cache.layout import digest

PLACE = pa.schema([("item", pa.string()), ("part", pa.string()), ("where", pa.string()), ("digest", pa.binary(16))])
"""The place of a picture's bytes (a `sources.source.Place`), and their digest."""

_FURTHER = [field.with_type(pa.binary()) if field.name == "digest" else field for field in PLACE]
"""A list of structs with a column of fixed size has other bytes in Parquet files of pyarrow 26 than of earlier ones."""

SCAN = pa.schema(
    [
        ("item", pa.string()),
        ("size", pa.int64()),
        ("mtime_ns", pa.int64()),
        ("digest", pa.binary(16)),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("captions", pa.list_(pa.struct([("text", pa.string()), ("weight", pa.float32())]))),
        ("meta", pa.string()),
        ("reject", pa.string()),
        ("part", pa.string()),
        ("stamp", pa.string()),
        ("where", pa.string()),
        ("ignored", pa.string()),
        ("pictures", pa.list_(pa.struct([("kind", pa.string()), *_FURTHER]))),
    ]
)
"""`reject` is null for usable items. `part` and `where` are those of a `Place`, `stamp` is the part's; they are null
for files. `ignored` of the first row of a part with a stamp, which an unchanged part is not listed for: what its
listing skipped, a `Kinds` as JSON, or null. `pictures`: the control pictures and masks, null without any; `size` is
that of the picture, `mtime_ns` changes with every one of them."""

ABSENT = digest("no picture")
"""Stands for the digest of a control picture or mask that a sample lacks and need not have; its `item` is null."""


def places(scan: pa.Table, picture: str) -> pa.Table:
    """`PLACE` of a picture of each item, with nulls where there is none. picture: the kind of a control picture or
    mask; "" for the item's own."""
    if not picture:
        return scan.select(PLACE.names)
    pieces = [_controls_and_masks(chunk, picture) for chunk in scan.column("pictures").chunks]
    return pa.concat_tables([PLACE.empty_table(), *pieces])


def _controls_and_masks(pictures: pa.ListArray, kind: str) -> pa.Table:
    every, owners = pc.list_flatten(pictures), pc.list_parent_indices(pictures).to_numpy()
    chosen = pc.equal(pc.struct_field(every, "kind"), kind).to_numpy(zero_copy_only=False)
    rows = np.full(len(pictures), -1, np.int64)
    rows[owners[chosen]] = np.flatnonzero(chosen)
    found = every.take(pa.array(rows, mask=rows < 0))
    return _as_places(found)


def control_and_mask_places(scan: pa.Table) -> pa.Table:
    """`PLACE` of every control picture or mask of the items."""
    pieces = [pc.list_flatten(chunk) for chunk in scan.column("pictures").chunks]
    return pa.concat_tables([PLACE.empty_table(), *map(_as_places, pieces)])


def _as_places(files: pa.StructArray) -> pa.Table:
    return pa.table([pc.struct_field(files, field.name).cast(field.type) for field in PLACE], schema=PLACE)
