"""Plan: missing records, cut into units whose members and batches never change.

`plan_images` and `plan_captions` append at most one plan for work that no earlier plan assigned and no shard holds, and
return every plan.

A record counts as not assigned if it failed for a temporary cause (its file was gone or had changed), or if its shard
is missing or truncated. Records and rejects of later plans win.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sana_pipe.base.errors import IntegrityError
from sana_pipe.data.cache import arrow, scan_table
from sana_pipe.data.cache.arrow import batches, take_rows
from sana_pipe.data.cache.cache import Cache, Unit, WorkList
from sana_pipe.data.cache.encodings import CaptionEncoding, Encoding, PictureEncoding
from sana_pipe.data.cache.index import committed
from sana_pipe.data.cache.keys import SortedKeys, as_keys, binary, fixed, is_first
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.cache.scratch import Scratch
from sana_pipe.data.encoding.config import EncodeConfig
from sana_pipe.data.images import buckets
from sana_pipe.data.sources import caption_rules

IMAGES = pa.schema(
    [
        ("key", pa.binary(16)),
        ("source", pa.string()),
        *scan_table.PLACE,
        ("height", pa.int32()),
        ("width", pa.int32()),
    ]
)
"""The place and the target resolution of each picture; `item` is null for one that a sample lacks."""
SCANNED = ["item", "part", "where", "digest", "height", "width", "reject", "pictures"]
"""The columns of a scan that `image_work` reads."""
CAPTIONS = pa.schema([("key", pa.binary(16)), ("caption", pa.string())])
"""`caption` is the caption as written; null marks the null record."""


def image_work(
    scan: pa.Table,
    source: str,
    encoding: PictureEncoding,
    table: list[tuple[int, int]],
    scratch: Scratch | None = None,
    only: Iterable[str] | None = None,
) -> pa.Table:
    """Rows of `IMAGES` for the usable items of a scan that have the picture, in listing order; equal pictures once.

    Args:
        scratch: temporary storage.
        only: keys (hex) of the wanted rows; default: all.
    """
    scratch = scratch or Scratch()

    def records() -> Iterator[pa.Table]:
        for batch in batches(scan.select(SCANNED)):
            usable = batch.filter(pc.is_null(batch.column("reject"))).combine_chunks()
            items = scan_table.places(usable, encoding.picture)
            there = pc.is_valid(items.column("digest"))
            usable, items = usable.filter(there), items.filter(there).combine_chunks()
            height, width = (usable.column(c).to_numpy().astype(np.int64) for c in ("height", "width"))
            which = buckets.nearest_all(table, height, width)
            keys = encoding.keys(fixed(items.column("digest")), table, which)
            sides = np.array(table, np.int32).reshape(-1, 2)[which]
            sources = pa.repeat(pa.scalar(source, pa.string()), len(usable))
            columns = [binary(keys), sources, *items.columns, pa.array(sides[:, 0]), pa.array(sides[:, 1])]
            yield _with_keys(pa.table(columns, schema=IMAGES), only)

    every = scratch.table(IMAGES, records())
    first = scratch.array(len(every), bool)
    for _, rows, one in scratch.by_key(_keys(every)):
        first[rows[one]] = True
    return every if first.all() else _chosen(every, first, scratch)


def _chosen(table: pa.Table, mask: np.ndarray, scratch: Scratch) -> pa.Table:
    """The rows of a mask, (n,) bool."""
    starts = range(0, len(table), arrow.ROWS)
    chosen = (table.slice(start, arrow.ROWS).filter(pa.array(mask[start : start + arrow.ROWS])) for start in starts)
    return scratch.table(table.schema, chosen)


def _keys(work: pa.Table) -> Iterator[np.ndarray]:
    """The keys of a work list, (n,) S16 each."""
    return (fixed(batch.column("key")) for batch in batches(work.select(["key"])))


def caption_work(
    scan: pa.Table, encoding: CaptionEncoding, scratch: Scratch | None = None, only: Iterable[str] | None = None
) -> pa.Table:
    """Rows of `CAPTIONS` for the null record and the captions of a scan's usable items, in the order of their keys;
    equal captions once, as first written. scratch, only: as in `image_work`."""

    def texts() -> Iterator[pa.Array]:
        for batch in batches(scan.select(["captions", "reject"])):
            usable = batch.filter(pc.is_null(batch.column("reject")))
            for chunk in usable.column("captions").chunks:
                yield pc.list_flatten(chunk).field("text")

    return text_work(texts(), encoding, scratch, only)


def text_work(
    texts: Iterable[pa.Array],
    encoding: CaptionEncoding,
    scratch: Scratch | None = None,
    only: Iterable[str] | None = None,
) -> pa.Table:
    """Rows of `CAPTIONS` for the null record and some captions as written (strings), in the order of their keys; equal
    captions once, as first written."""
    scratch = scratch or Scratch()

    def written() -> Iterator[pa.Table]:
        for part in texts:
            once = part.unique()
            normalised = caption_rules.normalise_all(once, encoding.normalisation)
            yield _with_keys(pa.table([binary(encoding.keys(normalised)), once], CAPTIONS), only)

    def rows() -> Iterator[pa.Table]:
        null = pa.table([binary(as_keys([encoding.null_key])), pa.nulls(1, pa.string())], schema=CAPTIONS)
        yield _with_keys(null, only)
        for part in scratch.sorted_by_key(written()):
            yield part.filter(pa.array(is_first(fixed(part.column("key")))))

    return scratch.table(CAPTIONS, rows())


FIXED = 8
"""Pictures of a batch where `encode.image_batch` is auto and the memory is no limit or not known."""
TEXT_BATCH = 128
"""Limit on captions of one batch; the text encoder divides it into forward passes of similar length and at most 8192
tokens. These fit into any GPU that holds the encoder."""

CPU_TEXT_BATCH = 4
"""The same with `encode.device: cpu`."""

UNIT_BYTES = 64 << 20
"""Limit on a unit's records."""

UNIT_IMAGES = 1024
"""Limit on a unit's pictures."""

UNIT_CAPTIONS = 512
"""Limit on a unit's captions."""

WINDOW = 65536
"""Pictures of the listing from which units of one resolution are formed. More fills units better, fewer keeps reads
local."""

Fitting = Callable[[int, int], int]
"""(height, width) in pixels -> pictures of a batch."""
Cut = tuple[np.ndarray, int]
"""The rows of a unit in its window, and its batch."""


def plan_images(
    cache: Cache,
    encoding: PictureEncoding,
    work: pa.Table,
    config: EncodeConfig,
    fitting: Fitting | None = None,
) -> list[WorkList]:
    """Adopt the existing plans of a kind of picture records, and append a plan for the rows that they do not cover.

    Units hold one target resolution each, drawn from windows of `WINDOW` items of the listing.

    Args:
        fitting: the batch where `image_batch` is auto; None: `FIXED`.
    """

    def cut(window: pa.Table) -> Iterator[Cut]:
        for shape, rows in by_target(window):
            most = unit_images(encoding, shape)
            batch = images_of_batch(config, shape, fitting)
            yield from ((rows[first : first + most], batch) for first in range(0, len(rows), most))

    def windows(missing: pa.Table) -> Iterator[pa.Table]:
        yield from (missing.slice(start, WINDOW) for start in range(0, len(missing), WINDOW))

    return _plan(cache, encoding, work, windows, cut)


def by_target(rows: pa.Table) -> Iterator[tuple[tuple[int, int], np.ndarray]]:
    """The target resolutions (height, width) of some rows of `IMAGES`, and the positions of the rows of each."""
    height, width = (rows.column(side).to_numpy().astype(np.int64) for side in ("height", "width"))
    targets = height << 32 | width
    for target in np.unique(targets).tolist():
        yield (target >> 32, target & 0xFFFFFFFF), np.flatnonzero(targets == target)


def unit_images(encoding: PictureEncoding, shape: tuple[int, int]) -> int:
    """Pictures of a unit."""
    return max(1, min(UNIT_IMAGES, UNIT_BYTES // (2 * math.prod(encoding.shape(*shape)))))


def images_of_batch(config: EncodeConfig, size: tuple[int, int], fitting: Fitting | None) -> int:
    """Pictures of a batch by `image_batch`. fitting: as in `plan_images`."""
    given: Any = config.image_batch
    if given != "auto":
        return int(given)
    return FIXED if fitting is None else fitting(*size)


def captions_of_batch(config: EncodeConfig) -> int:
    """Limit on captions of a batch. By the option alone: processes with other devices share a plan."""
    return CPU_TEXT_BATCH if config.device == "cpu" else TEXT_BATCH


def plan_captions(cache: Cache, encoding: CaptionEncoding, work: pa.Table, config: EncodeConfig) -> list[WorkList]:
    """Adopt the existing text plans, and append a plan for the rows that they do not cover.

    Units are ranges of the sorted keys. A unit's rows are sorted by caption length, so that a batch holds captions of
    similar length; the encoder cuts it into forward passes by tokens.
    """

    batch = captions_of_batch(config)

    def cut(window: pa.Table) -> Iterator[Cut]:
        length = pc.fill_null(pc.binary_length(window.column("caption")), -1).to_numpy()
        for first in range(0, len(window), UNIT_CAPTIONS):
            yield first + np.argsort(length[first : first + UNIT_CAPTIONS], kind="stable"), batch

    def windows(missing: pa.Table) -> Iterator[pa.Table]:
        rows = UNIT_CAPTIONS * max(1, arrow.ROWS // UNIT_CAPTIONS)
        null = pc.index(pc.is_null(missing.column("caption")), True).as_py()
        if null >= 0:  # the null record, in a separate unit
            yield missing.slice(null, 1)
            missing = pa.concat_tables([missing.slice(0, null), missing.slice(null + 1)])
        yield from (missing.slice(start, rows) for start in range(0, len(missing), rows))

    return _plan(cache, encoding, work, windows, cut)


def _plan(
    cache: Cache,
    encoding: Encoding,
    work: pa.Table,
    windows: Callable[[pa.Table], Iterator[pa.Table]],
    cut: Callable[[pa.Table], Iterator[Cut]],
) -> list[WorkList]:
    """See `plan_images`. windows: the missing rows in pieces; cut: a piece -> its units."""
    while True:
        plans = cache.plans(encoding.name)
        mask = _missing(cache, encoding, plans, work)
        if not mask.any():
            return plans
        scratch, number, units = cache.files.scratch, len(plans), list[Unit]()
        members = ((window, list(cut(window))) for window in windows(_chosen(work, mask, scratch)))
        table = scratch.table(work.schema, _planned(members, units, encoding, number))
        cache.add_plan(encoding.name, number, units, table)


def plan_following(cache: Cache, encoding: PictureEncoding, lead: list[WorkList]) -> None:
    """Append a plan of another kind of picture records for each unfinished plan of `lead` none of whose pictures has
    such a record: the same rows in the same units. Whoever makes a unit of the lead makes its records of this kind from
    the same pixels (see `encoding.unit_encoder`); alone, they are made like any."""
    scratch = cache.files.scratch
    for plan in (plan for plan in lead if not _finished(cache, plan)):
        while True:
            plans = cache.plans(encoding.name)
            if (plan.encoding, plan.number) in {each.lead for each in plans}:
                break
            rows = scratch.table(IMAGES, (_of_kind(encoding, part) for part in batches(cache.table(plan.table))))
            if not len(rows) or not _missing(cache, encoding, plans, rows).all():
                break
            number = len(plans)
            keys = ((unit, fixed(rows.column("key").slice(unit.start, unit.count))) for unit in plan.units)
            units = (Unit.of(encoding.name, number, some, unit.start, unit.batch) for unit, some in keys)
            cache.add_plan(encoding.name, number, units, rows, (plan.encoding, plan.number))


def _of_kind(encoding: PictureEncoding, rows: pa.Table) -> pa.Table:
    """Rows of `IMAGES` with the keys of another kind of records."""
    height, width = (rows.column(side).to_numpy().astype(np.int64) for side in ("height", "width"))
    targets, which = np.unique(height << 32 | width, return_inverse=True)
    sizes = [(int(target) >> 32, int(target) & 0xFFFFFFFF) for target in targets]
    return rows.set_column(0, IMAGES.field("key"), binary(encoding.keys(fixed(rows.column("digest")), sizes, which)))


def lead_made(cache: Cache, plan: WorkList, lead: str) -> Callable[[Unit], bool]:
    """Return whether a unit of a plan need not wait for the unit that it goes with: that one is committed, is not
    there, or is not of the encoding `lead`, whose units this run makes first (such as after another VAE was
    configured)."""
    if plan.lead is None or plan.lead[0] != lead or _finished(cache, first := cache.plan(*plan.lead)):
        return lambda unit: True
    done = {None, *committed(cache.files, *plan.lead)}
    units = {(unit.start, unit.count): unit.unit for unit in first.units}
    return lambda unit: units.get((unit.start, unit.count)) in done


def _planned(
    members: Iterator[tuple[pa.Table, list[Cut]]],
    units: list[Unit],
    encoding: Encoding,
    number: int,
) -> Iterator[pa.Table]:
    """The rows of a plan's table, in the order of its units, which are added to `units`."""
    start = 0
    for window, parts in members:
        keys = fixed(window.column("key"))
        for rows, batch in parts:
            units.append(Unit.of(encoding.name, number, keys[rows], start, batch))
            start += len(rows)
        yield take_rows(window, np.concatenate([rows for rows, _ in parts]))


def _missing(cache: Cache, encoding: Encoding, plans: list[WorkList], work: pa.Table) -> np.ndarray:
    """(n,) bool: which rows a new plan must list: not assigned, failed for a temporary cause, or lost with their shard.

    A finished plan assigned what its records and rejects name, which the index has. So only the keys of other plans are
    read: a key in one of them, or that failed or was lost, waits until they are finished.
    """
    unfinished = [plan for plan in plans if not _finished(cache, plan)]  # before the index, which then has the others
    scratch, start = cache.files.scratch, 0
    missing = scratch.array(len(work), bool)
    for batch, present, refused in settled(cache, encoding, work.select(["key"])):
        missing[start : start + len(batch)] = ~present & ~refused
        start += len(batch)
    if not unfinished or not missing.any():
        return missing

    planned = (keys for plan in unfinished for keys in _keys(cache.table(plan.table, ["key"])))
    missing &= scratch.absent(_keys(work), planned, len(work))
    return missing


def settled(cache: Cache, encoding: Encoding, work: pa.Table) -> Iterator[tuple[pa.Table, np.ndarray, np.ndarray]]:
    """Pieces of a work list, each with two arrays, (n,) bool: whose records exist, and whose cannot be made."""
    index = cache.index(encoding.name)
    impossible = SortedKeys.of([bytes.fromhex(key) for key, reject in index.outcomes.items() if not reject.retry])
    for batch in batches(work):
        keys = fixed(batch.column("key"))
        present, refused = index.present(keys), np.zeros(len(keys), bool)
        left = np.flatnonzero(~present)
        refused[left] = impossible.find(keys[left]) >= 0
        yield batch, present, refused


def count_missing(cache: Cache, encoding: Encoding, work: pa.Table) -> tuple[int, int]:
    """Return how many records of a work list are missing, and how many exist. Permanent failures are neither."""
    missing = existing = 0
    for _, present, refused in settled(cache, encoding, work.select(["key"])):
        missing += int((~present & ~refused).sum())
        existing += int(present.sum())
    return missing, existing


def retryable_at_another_place(
    cache: Cache, encoding: Encoding, work_of: Callable[[Iterable[str]], pa.Table]
) -> pa.Table | None:
    """Rows of an image work list that failed for a temporary cause at another place; None if there are none.

    work_of: keys (hex) -> their rows.

    Equal pictures are encoded once, from the place that the plan names. If that item has changed or moved since, the
    picture can be encoded from the place of this row.
    """
    index = cache.index(encoding.name)
    failed = [key for key, reject in index.outcomes.items() if reject.retry]
    if not failed:
        return None
    rows = work_of(failed)
    rows = rows.filter(pa.array(~index.present(fixed(rows.column("key")))))
    columns, tried = ["key", "item", "part", "where"], set[tuple[Any, ...]]()
    for plan in cache.plans(encoding.name):
        for batch in batches(cache.table(plan.table, columns)):
            tried.update(tuple(row.values()) for row in batch.filter(has_key(batch, failed)).to_pylist())
    now = (tuple(row.values()) for row in rows.select(columns).to_pylist())
    rows = rows.filter(pa.array([place not in tried for place in now], pa.bool_()))
    return rows if len(rows) else None


def with_current_places(cache: Cache, rows: pa.Table) -> pa.Table:
    """Rows of a plan with the places of their pictures by the last scans: a picture may have moved since."""
    if "part" not in rows.column_names:
        return rows
    now, wanted = dict[tuple[str, bytes], dict[str, Any]](), rows.column("digest").combine_chunks()
    for source in pc.unique(rows.column("source")).to_pylist():
        with suppress(IntegrityError):  # its table is damaged
            if (scan := cache.last_scan(source)) is not None:
                for some in batches(cache.table(scan["table"], [*scan_table.PLACE.names, "pictures"])):
                    part = pa.concat_tables([scan_table.places(some, ""), scan_table.control_and_mask_places(some)])
                    same = part.filter(pc.is_in(part.column("digest"), value_set=wanted))
                    now |= {(source, row["digest"]): row for row in same.to_pylist()}
    placed = [{**row, **now.get((row["source"], row["digest"]), {})} for row in rows.to_pylist()]
    return pa.Table.from_pylist(placed, schema=rows.schema)


def _with_keys(work: pa.Table, keys: Iterable[str] | None) -> pa.Table:
    return work if keys is None else work.filter(has_key(work, keys))


def has_key(work: pa.Table, keys: Iterable[str]) -> pa.ChunkedArray:
    """Find which rows of a work list have one of these keys (hex)."""
    return pc.is_in(work.column("key"), value_set=binary(as_keys([bytes.fromhex(key) for key in keys])))


def _finished(cache: Cache, plan: WorkList) -> bool:
    if cache.files.exists(Paths.segment(plan.encoding, plan.number)):
        return True
    return committed(cache.files, plan.encoding, plan.number) == {unit.unit for unit in plan.units}
