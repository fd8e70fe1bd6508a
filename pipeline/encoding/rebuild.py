"""Rebuild: repairs documents that were lost or damaged together with their copies.

`rebuild_documents` restores a document from its copy. If both are damaged, it moves them to `damaged/` and derives a
new one from other files:
- commits and segments, or the lists of segments, from shards,
- plans from commits,
- recipes from snapshots,
- a scan, a name or a prompt set that is no longer the last, from its successor.
Why: the head of a shard names its unit, and its record table lists its records. So no lost document costs an encoding.
Price: what only the document stated is lost: the reasons of rejects (these records are tried again), the batches of
units (a damaged record of such a unit is made again in a batch of one), the location of a source, the snapshot of a
name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.cache import arrow, copies, index, layout, shard
from pipeline.cache.arrow import take_rows
from pipeline.cache.index import Commit, RecordReject
from pipeline.cache.key_columns import SortedKeys, binary, fixed, halves, is_last, of_halves
from pipeline.cache.layout import PACKED, Paths
from pipeline.cache.recipes import CaptionRecipe, Recipe, recipe_class
from pipeline.cache.root import Cache, Unit, WorkPlan
from pipeline.encoding.plan import CAPTIONS, IMAGES
from pipeline.errors import IntegrityError
from pipeline.signals.latent import LatentRecipe

LOST = "the document that said what became of it was lost"
"""Reason of a reject for a planned record that is missing in its unit's shard; the record is tried again."""


def rebuild_documents(cache: Cache) -> None:
    """Restore or derive every damaged or lost document of a cache; the rest is moved to `damaged/`."""
    files = cache.files
    files.repairs = True
    for name in [Paths.FORMAT, *(name for name, _ in copies.documents(files))]:
        if not copies.repair(files, name) and name != Paths.FORMAT:
            files.set_aside(name)
    owners = {name for folder in ("plans", "units", "segments", "shards") for name in files.folders(folder)}
    for name in filter(layout.is_document, (f"snapshots/{name}" for name in files.names("snapshots"))):
        for kind, values in files.document(name)["recipes"].items():
            if (recipe := recipe_class(kind).from_values(values)).name in owners:
                cache.add_recipe(recipe)
    _unreadable_scans(cache)
    prompts = map(Paths.prompts, files.folders("prompts"))
    for folder in (*map(Paths.scans, cache.sources()), *map(Paths.names, cache.snapshot_names()), *prompts):
        _fill_gaps(cache, folder)
    for owner in sorted(owners):
        if owner.startswith(PACKED):
            _unreadable_segments(cache, owner)
            _unreadable_plans(cache, owner)
            if _numbers(cache, Paths.plans(owner)):
                _commits(cache, owner)
                continue
            for name in files.unit_names(Paths.units(owner, 0)):  # only `bucket --pack` can plan them
                files.set_aside(name)
        elif files.exists(Paths.recipe(owner)):
            _unreadable_segments(cache, owner)
            _plans(cache, owner)
            _adopt(cache, owner, _commits(cache, owner))
            for plan in cache.plans(owner):
                index.merge(files, owner, plan.number, (unit.unit for unit in plan.units))


def _unreadable_scans(cache: Cache) -> None:
    """Set aside earlier scans whose table is lost. `encode` makes the table of the last scan again."""
    forgotten: set[str] = set()
    with suppress(IntegrityError):
        forgotten = cache.forgotten_scans()
    for source in cache.sources():
        for number in _numbers(cache, Paths.scans(source))[:-1]:
            name = Paths.numbered(Paths.scans(source), number)
            if name not in forgotten and not _readable(cache, cache.files.document(name)["table"]):
                cache.files.set_aside(name)


def _fill_gaps(cache: Cache, folder: str) -> None:
    """Fill the gaps in a numbered folder of which only the last document counts, with copies of the next document."""
    numbers = _numbers(cache, folder)
    for number in sorted(set(range(max(numbers, default=0))) - set(numbers), reverse=True):
        successor = cache.files.document(Paths.numbered(folder, number + 1))
        cache.files.put(Paths.numbered(folder, number), layout.seal(successor))


def _numbers(cache: Cache, folder: str) -> list[int]:
    """The numbers of the existing documents; unlike `Files.numbers` it accepts gaps."""
    return layout.numbers_of(cache.files.names(folder))


def _readable(cache: Cache, table: str, suffix: str = "parquet") -> bool:
    return cache.files.duplicate(Paths.table(table, suffix))


def _unreadable_segments(cache: Cache, owner: str) -> None:
    """Set aside the segments whose list of commits is lost; the shards name their units."""
    for number in layout.numbers_of(cache.files.names(f"segments/{owner}")):
        name = Paths.segment(owner, number)
        listed = cache.files.document(name)["commits"]["table"]
        if not _readable(cache, listed, "arrow"):
            cache.files.set_aside(name)
            cache.files.set_aside(Paths.table(listed, "arrow"))


# ---------------------------------------------------------------- plans


def _unreadable_plans(cache: Cache, owner: str) -> None:
    """Set aside the plans of which a table is lost."""
    for number in _numbers(cache, Paths.plans(owner)):
        plan = cache.plan(owner, number)
        tables = ((plan.table, "parquet"), (plan.units_table, "arrow"))
        if lost := [table for table in tables if not _readable(cache, *table)]:
            cache.files.set_aside(Paths.numbered(Paths.plans(owner), number))
        for table in lost:
            cache.files.set_aside(Paths.table(*table))


def _plans(cache: Cache, recipe: str) -> None:
    """Derive lost plans, and plans whose table is lost, from the commits of their units."""
    files, folder = cache.files, Paths.plans(recipe)
    _unreadable_plans(cache, recipe)
    listed = set(layout.numbers_of(files.names(f"segments/{recipe}")))
    folders = layout.numbers_of(files.folders(f"units/{recipe}"), "")
    listed |= {number for number in folders if files.unit_names(Paths.units(recipe, number))}
    numbers = _numbers(cache, folder)
    for number in sorted(set(range(max([-1, *listed, *numbers]) + 1)) - set(numbers)):
        with suppress(IntegrityError):  # one of its shards is lost, too: the plan stays lost until the shard is back
            _add_plan(cache, recipe, number, index.commits(files, recipe, number))


def _add_plan(cache: Cache, recipe: str, number: int, commits: list[Commit]) -> None:
    """Publish a plan of the units of some commits, in this order."""
    known, units = cache.recipe(recipe), list[Unit]()
    reader = shard.ShardReader(cache.files, recipe)

    def tables() -> Iterator[pa.Table]:
        start = 0
        for commit in commits:
            table = _work(cache, known, reader, commit)
            units.append(Unit(commit.unit, start, table.num_rows, 1))
            start += table.num_rows
            yield table

    if isinstance(known, LatentRecipe):
        table = _with_pictures(cache, known, cache.files.scratch.table(IMAGES, tables()))
    else:
        table = cache.files.scratch.table(CAPTIONS, tables())
    cache.add_plan(recipe, number, units, table)


def _work(cache: Cache, recipe: Recipe, reader: shard.ShardReader, commit: Commit) -> pa.Table:
    """Rows of a plan's table for the records and rejects of a commit; see `_with_pictures`."""
    rows = list[dict[str, Any]]()
    if commit.shard is not None:
        for row in shard.read_table(cache.files, Paths.shard(recipe.name, commit.shard))[1].to_pylist():
            work = {"key": row["key"]}
            if isinstance(recipe, LatentRecipe):
                work |= {side: row[side] * recipe.compression for side in ("height", "width")}
            elif isinstance(recipe, CaptionRecipe) and row["key"] != recipe.null_key:
                at = (row["caption_offset"], row["caption_length"], row["key"], row["caption_checksum"])
                work["caption"] = reader.caption(commit.shard, *at)
            rows.append(work)
    for reject in commit.rejects:
        rows.append({"key": bytes.fromhex(reject.key), "caption": reject.item, "item": reject.item})
    return pa.Table.from_pylist(rows, schema=IMAGES if isinstance(recipe, LatentRecipe) else CAPTIONS)


_PICTURE = ["source", "item", "part", "where", "digest"]


def _with_pictures(cache: Cache, recipe: LatentRecipe, table: pa.Table) -> pa.Table:
    """Rows of `IMAGES` with the picture that a last scan has for their key; without one they are as they were."""
    scratch = cache.files.scratch

    def keyed() -> Iterator[dict[str, np.ndarray]]:
        for part in scratch.sorted_by_key(arrow.batches(table.select(["key"]))):
            high, low = halves(fixed(part.column("key")))
            yield {"high": high, "low": low}

    wanted = SortedKeys(**scratch.arrays(keyed(), {"high": np.uint64, "low": np.uint64}))

    def both() -> Iterator[pa.Table]:
        for start in range(0, len(table), arrow.ROWS):
            rows = table.slice(start, arrow.ROWS)
            yield rows.append_column("row", pa.array(np.arange(start, start + len(rows))))
        for pictures in _pictures(cache, recipe, table):
            found = pictures.filter(pa.array(wanted.find(fixed(pictures.column("key"))) >= 0))
            yield found.append_column("row", pa.array(np.full(len(found), -1)))

    def joined() -> Iterator[pa.Table]:
        for part in scratch.sorted_by_key(both()):  # of equal keys the pictures come last
            row, last = part.column("row").to_numpy(), np.flatnonzero(is_last(fixed(part.column("key"))))
            picture = np.repeat(last, np.diff(last, prepend=-1))
            at = np.flatnonzero(row >= 0)
            picture = np.where(row[picture[at]] < 0, picture[at], at)
            columns = take_rows(part.select(_PICTURE), picture)
            rest = take_rows(part.select(["key", "height", "width"]), at)
            ordered = [binary(of_halves(row[at].astype(np.uint64))), rest.column("key"), *columns.columns]
            yield pa.table([*ordered, *rest.columns[1:]], ["key", "own", *_PICTURE, "height", "width"])

    in_order = (part.drop_columns("key").rename_columns(IMAGES.names) for part in scratch.sorted_by_key(joined()))
    return scratch.table(IMAGES, in_order)


def _pictures(cache: Cache, recipe: LatentRecipe, table: pa.Table) -> Iterator[pa.Table]:
    """Rows of `IMAGES` for each picture of the last scans at each of the sizes of a plan's table."""
    seen = (part.select(["height", "width"]).drop_null().to_pylist() for part in arrow.batches(table))
    sizes = sorted({(row["height"], row["width"]) for rows in seen for row in rows})
    for source in cache.sources():
        scan = cache.last_scan(source)
        if scan is None or scan["latent"] != recipe.name or not _readable(cache, scan["table"]):
            continue
        for batch in arrow.batches(cache.table(scan["table"], _PICTURE[1:])):
            usable = batch.filter(pc.is_valid(batch.column("digest")))
            digests, count = fixed(usable.column("digest")), len(usable)
            for number, (height, width) in enumerate(sizes):
                keys = binary(recipe.keys(digests, sizes, np.full(count, number)))
                sides = (pa.array(np.full(count, side, np.int32)) for side in (height, width))
                yield pa.table([keys, pa.repeat(pa.scalar(source), count), *usable.columns, *sides], schema=IMAGES)


# ---------------------------------------------------------------- commits


def _commits(cache: Cache, owner: str) -> list[Commit]:
    """Commit the units whose shard exists and is intact.

    Returns:
        Commits of intact shards that belong to no plan; none of a pack, whose plan cannot be derived.
    """
    files = cache.files
    planned = {unit.unit: (plan, unit) for plan in cache.plans(owner) for unit in plan.units}
    commits = [commit for plan in cache.plans(owner) for commit in index.commits(files, owner, plan.number)]
    shards, units = {commit.shard for commit in commits}, {commit.unit for commit in commits}
    unplanned = []
    for entry in files.walk(f"shards/{owner}"):
        digest = entry.name.rpartition("/")[2].removesuffix(".tar")
        with suppress(IntegrityError, FileNotFoundError):
            if digest in shards:
                continue
            named = shard.read_head(files, entry.name)["unit"]
            unit_id = index.unit_of(owner, digest, named, lambda unit: unit in planned or unit in units)
            if unit_id in units:
                continue
            if files.digest(entry.name) != digest:
                files.set_aside(entry.name)  # not committed: its records are still to be made
                continue
            adopted = index.adopted_unit(owner, digest)
            unit_id = unit_id if unit_id in planned else adopted
            _, table = shard.read_table(files, entry.name)
            provenance = {"rebuilt": True, **({index.ADOPTED: True} if unit_id == adopted else {})}
            commit = index.commit_of(files, unit_id, (digest, entry.size, table), provenance=provenance)
            if unit_id not in planned:
                unplanned.append(commit)
                continue
            plan, unit = planned[unit_id]
            rejects = () if owner.startswith(PACKED) else tuple(_missing_records(cache, plan, unit, table))
            index.publish_commit(files, owner, plan.number, replace(commit, rejects=rejects))
            units.add(unit_id)
    return [] if owner.startswith(PACKED) else unplanned


def _missing_records(cache: Cache, plan: WorkPlan, unit: Unit, records: pa.Table) -> Iterator[RecordReject]:
    rows = cache.unit_rows(plan, unit)
    present = pc.is_in(rows.column("key"), value_set=records.column("key").combine_chunks())
    for row in rows.filter(pc.invert(present)).to_pylist():
        yield RecordReject(row["key"].hex(), row.get("item") or row.get("caption") or "", LOST, retry=True)


def _adopt(cache: Cache, recipe: str, commits: list[Commit]) -> None:
    """Add the shards of a lost plan to this cache, as `bucket` adopts those of another cache."""
    if commits:
        number = len(_numbers(cache, Paths.plans(recipe)))
        _add_plan(cache, recipe, number, commits)
        for commit in commits:
            index.publish_commit(cache.files, recipe, number, commit)
