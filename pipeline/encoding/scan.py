"""Scan: a source's items, with what is needed to plan work: digests, sizes, captions, and what cannot be used.

What: one row per item: key, size, mtime, image digest, width and height after orientation, captions, or the reason why
the item is left out.
Why: a row whose size and mtime are unchanged keeps its digest, so a second scan reads no pixels; the table is stored
in the cache, so that `bucket` works where the sources are not.
A part of a source (a tar, a parquet file) whose stamp is unchanged is not even listed again: its rows are taken over.
Price: a first scan reads every file once (the digest needs all bytes). `--rehash` reads them again.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pyarrow.compute

from pipeline.cache import layout
from pipeline.cache.store import Cache
from pipeline.config import DataConfig
from pipeline.data import detect, image
from pipeline.data.source import Item, Reject, Source
from pipeline.errors import UserError

SCAN = pa.schema(
    [
        ("item", pa.string()), ("size", pa.int64()), ("mtime_ns", pa.int64()), ("digest", pa.binary(16)),
        ("width", pa.int32()), ("height", pa.int32()),
        ("captions", pa.list_(pa.struct([("text", pa.string()), ("weight", pa.float32())]))),
        ("meta", pa.string()), ("reject", pa.string()),
        ("part", pa.string()), ("stamp", pa.string()), ("where", pa.string()),
    ]
)  # fmt: skip
"""`reject` is null for usable items. `part`, `stamp` and `where` say where an item's bytes are inside an archive or a
table (see `Source`); they are null for files, and missing in tables of earlier versions."""

AHEAD = 1024
"""Items that may wait for a reader: a listing is not held in memory twice, and stays near what is being read."""


HEADS = (1 << 16, 1 << 20)
"""Bytes that `from_header` reads of a picture; the second number where the first was not enough."""

Look = Callable[[Source, str, int], dict[str, Any]]
"""(source, key, max_pixels) -> the columns `digest`, `width`, `height`, `reject`, as far as they are found."""


def from_bytes(source: Source, key: str, max_pixels: int) -> dict[str, Any]:
    """Digest and size of a picture, from all of its bytes."""
    try:
        data = source.read(key)
    except OSError as error:
        return {"reject": f"unreadable: {error}"}
    return {"digest": layout.digest(data), **_size(data, max_pixels)}


def from_header(source: Source, key: str, max_pixels: int) -> dict[str, Any]:
    """Size of a picture from its first bytes, as far as they tell: nothing at all if its header lies further behind.

    An orientation that stands behind the pixels (possible in PNG and WebP) is not seen.
    """
    try:
        size = source.stat(key)[0]
        for length in HEADS:
            data = source.head(key, length)
            found = _size(data, max_pixels)
            if "width" in found or len(data) >= size or "max_pixels" in found["reject"]:
                return found
    except OSError as error:
        return {"reject": f"unreadable: {error}"}
    return {}


def _size(data: bytes, max_pixels: int) -> dict[str, Any]:
    try:
        width, height = image.probe(data, max_pixels)
    except image.ImageReject as reject:
        return {"reject": str(reject)}
    return {"width": width, "height": height}


def scan(
    source: Source, name: str, cache: Cache | None, *, max_pixels: int, workers: int, rehash: bool,
    progress: Callable[[int], None], refuse: Callable[[int, int], str | None] = lambda height, width: None,
    look: Look = from_bytes,
) -> pa.Table:  # fmt: skip
    """Read a source's listing and headers.

    Args:
        name: the source's name, under which an earlier scan is looked up.
        cache: where; nothing is written. None: there is no earlier scan.
        rehash: do not trust size and mtime.
        progress: called with the number of items done so far.
        refuse: (height, width) of a readable picture -> why it is left out all the same, or None. Asked anew on every
            scan, so that a changed policy takes effect on known rows.
        look: how a picture that is not known is examined.

    Raises:
        UserError: two items have the same sample id, or this is another data set under a known name.
    """
    last = None if rehash or cache is None else _last(cache, name)
    runs = _runs(last) if last is not None else {}
    known: dict[str, dict[str, Any]] | None = None

    def row(found: Item | Reject) -> dict[str, Any]:
        if isinstance(found, Reject):
            return _row(found.key, reject=found.reason)
        captions = [{"text": text, "weight": weight} for text, weight in found.captions]
        meta = json.dumps(found.meta, sort_keys=True, ensure_ascii=False, default=str)
        own = {"captions": captions, "meta": meta, "where": found.where}
        try:
            size, mtime = source.stat(found.key)
        except OSError as error:
            return _row(found.key, **own, reject=f"unreadable: {error}")
        before = (known or {}).get(found.key)
        if before is not None and before["size"] == size and before["mtime_ns"] == mtime:
            return {**before, **own}
        return _row(found.key, size=size, mtime_ns=mtime, **own, **look(source, found.key, max_pixels))

    tables: list[pa.Table] = []
    count = 0
    with ThreadPoolExecutor(max(1, workers)) as pool:
        for part in source.parts():
            run = runs.get(part.name)
            if last is not None and run is not None and part.stamp is not None and run[0] == part.stamp:
                tables.append(last.slice(run[1], run[2]))
                count += run[2]
                progress(count)
                continue
            if known is None:
                known = _known(last)
            columns: dict[str, list[Any]] = {column: [] for column in SCAN.names}
            for done in _mapped(pool, row, source.part(part.name)):
                done |= {"part": part.name or None, "stamp": part.stamp}
                for column, values in columns.items():
                    values.append(done[column])
                count += 1
                progress(count)
            tables.append(pa.table(columns, schema=SCAN))
    table = _judged(pa.concat_tables(tables or [SCAN.empty_table()]).combine_chunks(), refuse)
    _unique(name, table)
    if cache is not None:
        _same_set(cache, name, source, table)
    source.recall(places(table))
    return table


def reopen(cache: Cache, name: str, config: DataConfig, location: str | None = None) -> Source:
    """The source of the last scan, ready to read its items.

    Args:
        location: where it is now; default: where it was.

    Raises:
        UserError: no such source was scanned, or it is not there any more.
    """
    scan = cache.last_scan(name)
    if scan is None:
        raise UserError(f"no source {name!r} was encoded into this cache", found=", ".join(cache.sources()))
    table = cache.table(scan["table"])
    found = list(places(table))
    parts = sorted({part for _, part, _ in found})
    source = detect.reopen(location or scan["root"], scan.get("source_format", "folder"), parts, config, name)
    source.recall(found)
    return source


def places(table: pa.Table) -> Iterator[tuple[str, str, str]]:
    """(item, part, where) of the usable items that lie inside something: what `Source.recall` takes."""
    if "where" not in table.column_names:
        return
    inside = table.filter(pa.compute.is_valid(table.column("where")))
    yield from zip(*(inside.column(c).to_pylist() for c in ("item", "part", "where")), strict=True)


def _mapped(
    pool: ThreadPoolExecutor, work: Callable[[Item | Reject], dict[str, Any]], listing: Iterable[Item | Reject]
) -> Iterator[dict[str, Any]]:
    """`pool.map` in order, with at most `AHEAD` of the listing taken before it is needed."""
    waiting: deque[Any] = deque()
    for found in listing:
        waiting.append(pool.submit(work, found))
        if len(waiting) >= AHEAD:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _judged(table: pa.Table, refuse: Callable[[int, int], str | None]) -> pa.Table:
    """The table with today's policy: a row that has a width has no other reason to be left out."""
    columns = (table.column(column).to_pylist() for column in ("height", "width", "reject"))
    verdicts = [
        reject if width is None else refuse(height, width) for height, width, reject in zip(*columns, strict=True)
    ]
    return table.set_column(SCAN.names.index("reject"), "reject", pa.array(verdicts, pa.string()))


def _unique(name: str, table: pa.Table) -> None:
    ids: dict[int, str] = {}
    for item in table.filter(pa.compute.is_null(table.column("reject"))).column("item").to_pylist():
        own = layout.sample_id(name, item)
        if ids.setdefault(own, item) != item:
            raise UserError(
                f"items {ids[own]!r} and {item!r} of source {name!r} have the same 64-bit sample id",
                fix="rename one of the two files",
            )


def _row(item: str, **values: Any) -> dict[str, Any]:
    empty: dict[str, Any] = dict.fromkeys(SCAN.names)
    return {**empty, "item": item, "captions": [], **values}


def _last(cache: Cache, name: str) -> pa.Table | None:
    """The table of the last scan, with the columns of this version."""
    last = cache.last_scan(name)
    if last is None:
        return None
    table = cache.table(last["table"])
    for column in SCAN:
        if column.name not in table.column_names:
            table = table.append_column(column, pa.nulls(table.num_rows, column.type))
    return table.select(SCAN.names).cast(SCAN)


def _runs(table: pa.Table) -> dict[str, tuple[str, int, int]]:
    """Part -> (stamp, first row, rows), for the parts whose rows may be taken over as they are."""
    parts, stamps = (table.column(column).to_pylist() for column in ("part", "stamp"))
    again = {part for part, reject in zip(parts, table.column("reject").to_pylist(), strict=True)
             if reject is not None and (reject.startswith("unreadable") or "max_pixels" in reject)}  # fmt: skip
    runs: dict[str, tuple[str, int, int]] = {}
    start = 0
    for at in range(1, len(parts) + 1):
        if at == len(parts) or (parts[at], stamps[at]) != (parts[start], stamps[start]):
            part, stamp = parts[start], stamps[start]
            if part is not None and stamp is not None and part not in again:
                runs[part] = (stamp, start, at - start)
            start = at
    return runs


def _known(last: pa.Table | None) -> dict[str, dict[str, Any]]:
    if last is None:
        return {}
    # An item that was left out for its captions was never read; one whose bytes were bad stays bad while unchanged.
    # Only max_pixels may be raised since; it stands in the reason.
    rows = last.to_pylist()
    return {r["item"]: r for r in rows if r["digest"] is not None and "max_pixels" not in (r["reject"] or "")}


def _same_set(cache: Cache, name: str, source: Source, table: pa.Table) -> None:
    last = cache.last_scan(name)
    if last is None or last["root"] == source.location:
        return
    before = set(cache.table(last["table"]).column("item").to_pylist())
    if before and table.num_rows and before.isdisjoint(table.column("item").to_pylist()):
        raise UserError(
            f"source {name!r} was last read from {last['root']}; {source.location} shares none of its {len(before)} "
            "items",
            fix=f"if this is another data set, give it its own name: --source-name NAME (sources so far: "
            f"{', '.join(cache.sources())})",
        )
