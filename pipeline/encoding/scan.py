"""Scan: a source's items, with what is needed to plan work: digests, sizes, captions, and what cannot be used.

What: one row per item: key, size, mtime, image digest, width and height after orientation, captions, or the reason why
the item is left out.
Why: a row whose size and mtime are unchanged keeps its digest, so a second scan reads no pixels; the table is stored
in the cache, so that `bucket` works where the sources are not.
Price: a first scan reads every file once (the digest needs all bytes). `--rehash` reads them again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa

from pipeline.cache import layout
from pipeline.cache.store import Cache
from pipeline.data import image
from pipeline.data.source import FolderSource, Item, Reject
from pipeline.errors import UserError

SCAN = pa.schema(
    [
        ("item", pa.string()), ("size", pa.int64()), ("mtime_ns", pa.int64()), ("digest", pa.binary(16)),
        ("width", pa.int32()), ("height", pa.int32()),
        ("captions", pa.list_(pa.struct([("text", pa.string()), ("weight", pa.float32())]))),
        ("meta", pa.string()), ("reject", pa.string()),
    ]
)  # fmt: skip
"""`reject` is null for usable items."""


def scan(
    source: FolderSource, name: str, cache: Cache, *, max_pixels: int, workers: int, rehash: bool,
    progress: Callable[[int], None], refuse: Callable[[int, int], str | None] = lambda height, width: None,
) -> pa.Table:  # fmt: skip
    """Read a source's listing and headers.

    Args:
        name: the source's name, under which an earlier scan is looked up.
        rehash: do not trust size and mtime.
        progress: called with the number of items done so far.
        refuse: (height, width) of a readable picture -> why it is left out all the same, or None. Asked anew on every
            scan, so that a changed policy takes effect on known rows.

    Raises:
        UserError: two items have the same sample id, or this is another data set under a known name.
    """
    known = {} if rehash else _known(cache, name)

    def row(found: Item | Reject) -> dict[str, Any]:
        if isinstance(found, Reject):
            return _row(found.key, reject=found.reason)
        captions = [{"text": text, "weight": weight} for text, weight in found.captions]
        meta = json.dumps(found.meta, sort_keys=True, ensure_ascii=False, default=str)
        try:
            size, mtime = source.stat(found.key)
        except OSError as error:
            return _row(found.key, captions=captions, meta=meta, reject=f"unreadable: {error}")
        before = known.get(found.key)
        if before is not None and before["size"] == size and before["mtime_ns"] == mtime:
            return {**before, "captions": captions, "meta": meta}
        row = _row(found.key, size=size, mtime_ns=mtime, captions=captions, meta=meta)
        try:
            data = source.read(found.key)
            row["digest"] = layout.digest(data)
            row["width"], row["height"] = image.probe(data, max_pixels)
        except OSError as error:
            row["reject"] = f"unreadable: {error}"
        except image.ImageReject as reject:
            row["reject"] = str(reject)
        return row

    columns: dict[str, list[Any]] = {column: [] for column in SCAN.names}
    ids: dict[int, str] = {}
    with ThreadPoolExecutor(max(1, workers)) as pool:
        for count, done in enumerate(pool.map(row, source.items()), 1):
            if done["width"] is not None:  # else there is another reason already
                done["reject"] = refuse(done["height"], done["width"])
            own = layout.sample_id(name, done["item"])
            if done["reject"] is None and (twin := ids.setdefault(own, done["item"])) != done["item"]:
                raise UserError(
                    f"items {twin!r} and {done['item']!r} of source {name!r} have the same 64-bit sample id",
                    fix="rename one of the two files",
                )
            for column, values in columns.items():
                values.append(done[column])
            progress(count)
    table = pa.table(columns, schema=SCAN)
    _same_set(cache, name, source, table)
    return table


def _row(item: str, **values: Any) -> dict[str, Any]:
    empty: dict[str, Any] = dict.fromkeys(SCAN.names)
    return {**empty, "item": item, "captions": [], **values}


def _known(cache: Cache, name: str) -> dict[str, dict[str, Any]]:
    last = cache.last_scan(name)
    if last is None:
        return {}
    rows = cache.table(last["table"]).to_pylist()
    # An item that was left out for its captions was never read; one whose bytes were bad stays bad while unchanged.
    # Only max_pixels may be raised since; it stands in the reason.
    return {r["item"]: r for r in rows if r["digest"] is not None and "max_pixels" not in (r["reject"] or "")}


def _same_set(cache: Cache, name: str, source: FolderSource, table: pa.Table) -> None:
    last = cache.last_scan(name)
    if last is None or last["root"] == str(source.root.resolve()):
        return
    before = set(cache.table(last["table"]).column("item").to_pylist())
    if before and table.num_rows and before.isdisjoint(table.column("item").to_pylist()):
        raise UserError(
            f"source {name!r} was last read from {last['root']}; {source.root} shares none of its {len(before)} items",
            fix=f"if this is another data set, give it its own name: --source-name NAME (sources so far: "
            f"{', '.join(cache.sources())})",
        )
