"""Audit: what is in a cache, and whether every byte of it is right.

What: `status` counts, `verify` reads everything and names each damaged document, table, shard and record.
Why: a cache that many machines wrote and copied should be able to prove that it is complete and right.
Price: `verify` reads every byte once; `status` reads documents and scans, and asks for sizes of what named snapshots
need. A document is read on its own, one request after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache as remembered
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.cache import codec, copies, index, shard
from pipeline.cache.layout import PACKED, REPAIR, Paths, is_document
from pipeline.cache.snapshot import Caption, Snapshot, check_files, shard_files
from pipeline.cache.store import Cache, Plan, Unit
from pipeline.errors import CacheError, IntegrityError
from pipeline.urls import strip_credentials

ENCODE, BUCKET, BACKUP = "sana-pipe encode --data DIR", "sana-pipe bucket", "restore it from a backup of the cache"
GC = "sana-pipe gc --yes"


@dataclass(frozen=True)
class Finding:
    """Something wrong. `records` are hex keys of damaged records, where the damage is inside a shard; `fix` is the
    command that mends it."""

    path: str
    problem: str
    recipe: str = ""
    plan: int = -1
    unit: str = ""
    records: tuple[str, ...] = ()
    fix: str = REPAIR


def recipe_names(cache: Cache) -> list[str]:
    return [n.removesuffix(".json") for n in cache.files.names("recipes") if n.endswith(".json")]


def packs(cache: Cache) -> list[str]:
    """Names of the packs, finished or not: folders of plans, units and joint shards."""
    found = [name for name in cache.files.folders("plans") if name.startswith(PACKED)]
    return [name for name in found if cache.files.numbers(Paths.plans(name))]


# ---------------------------------------------------------------- status


def status(cache: Cache, now: float | None = None) -> dict[str, Any]:
    """Counts of a cache, while or after it is filled: JSON values.

    `rate` is records per second over the commits of the last ten minutes (0 when there were none), `eta_s` the time
    that the records of the units still missing take at that rate (null when unknown). `damaged` says of what cannot be
    read, or is not all there, the `problem` and the `fix`; it is left out of the counts. Records are not looked at.
    """
    moment = time.time() if now is None else now
    damaged: dict[str, dict[str, str]] = {}

    @contextmanager
    def readable(what: str) -> Iterator[None]:
        try:
            yield
        except CacheError as error:
            damaged[what] = {"problem": error.what, "fix": error.fix or REPAIR}

    stores: dict[str, dict[str, Any]] = {}
    for name in [*recipe_names(cache), *packs(cache)]:
        with readable(Paths.plans(name)):
            stores[name] = _store(cache, name, moment)
    sources: dict[str, dict[str, Any]] = {}
    going_on = bool(next(cache.files.walk("fragments"), None))
    for name in cache.sources():
        with readable(Paths.scans(name)):
            scan = cache.last_scan(name)
            if scan is None:
                continue
            reasons = cache.table(scan["table"]).column("reject")
            planned = all(stores.get(scan[kind], {}).get("plans") for kind in ("latent", "text"))
            going_on |= reasons.null_count > 0 and not planned
            sources[name] = {
                "items": len(reasons),
                "rejected": len(reasons) - reasons.null_count,
                "root": strip_credentials(scan["root"]),
                "latent": scan["latent"],
                "text": scan["text"],
            }
    names: dict[str, str | None] = {}
    packed: list[str] = []
    for name in cache.snapshot_names():
        with readable(Paths.names(name)):
            names[name] = of = cache.snapshot_of(name)
            if of is not None:
                opened = Snapshot(cache.files, of)
                packed.extend([name] * opened.packed)
                check_files(cache.files, opened.head)
    damaged |= {name: {"problem": problem, "fix": REPAIR} for name, problem in cache.files.damage.items()}
    complete = not going_on and not damaged and all(s["units"] == s["units_done"] for s in stores.values())
    return {
        "cache": cache.location,
        "complete": complete,
        "stores": stores,
        "sources": sources,
        "snapshots": names,
        "packed": packed,
        "damaged": damaged,
        "free_bytes": cache.files.free_bytes(),
    }


def _store(cache: Cache, name: str, moment: float) -> dict[str, Any]:
    """Counts of a recipe or of a pack."""
    plans = cache.plans(name)
    units = done = planned = made = size = rejects = 0
    recent: list[tuple[float, int]] = []
    for plan in plans:
        units += len(plan.units)
        planned += sum(unit.count for unit in plan.units)
        counts = {unit.unit: unit.count for unit in plan.units}
        written = {entry.name: entry.modified for entry in cache.files.walk(Paths.units(name, plan.number))}
        for commit in index.commits(cache.files, name, plan.number):
            done += 1
            made += commit.records
            size += commit.bytes
            rejects += len(commit.rejects)
            planned -= counts.get(commit.unit, 0)
            when = written.get(Paths.unit(name, plan.number, commit.unit))
            if when is not None and moment - when < 600:
                recent.append((when, commit.records))
    span = moment - min((t for t, _ in recent), default=moment)
    rate = sum(n for _, n in recent) / span if span > 1 else 0.0
    return {
        "plans": len(plans),
        "units": units,
        "units_done": done,
        "records": made,
        "records_missing": planned,
        "bytes": size,
        "rejects": rejects,
        "rate": rate,
        "eta_s": planned / rate if rate else None,
    }


# ---------------------------------------------------------------- verify


def verify(cache: Cache, progress: Callable[[int], None] = lambda size: None) -> Iterator[Finding]:
    """Read everything and yield what is wrong, as it is found: `verify_documents`, then `verify_contents`."""
    yield from verify_documents(cache, progress)
    yield from verify_contents(cache, progress)


def verify_documents(cache: Cache, progress: Callable[[int], None] = lambda size: None) -> Iterator[Finding]:
    """Documents that are damaged, lost, or contradict the shards.

    Args:
        progress: called with the bytes of each file that was read.
    """
    files, named = cache.files, set[str]()
    for name, size in [(Paths.FORMAT, 0), *copies.documents(files)]:
        pair = copies.inspect(files, name)
        named.add(name)
        if pair.document:
            files.damage.setdefault(name, pair.document)
            yield Finding(name, pair.document + ("" if pair.data is None else "; its copy is right"))
        elif pair.copy:
            yield Finding(Paths.copy(name), pair.copy)
        else:
            named.remove(name)
        progress(size)
    yield from (finding for finding in contradictions(cache) if finding.path not in named)


def verify_contents(
    cache: Cache, progress: Callable[[int], None] = lambda size: None, again: dict[str, set[bytes]] | None = None
) -> Iterator[Finding]:
    """Tables, shards, records and snapshots that are damaged or missing. Documents that cannot be read are passed over.

    Args:
        progress: called with the bytes of each file that was read.
        again: of each shard the keys of damaged records that another shard has; added to.
    """
    files = cache.files
    wanted: dict[str, str] = {}  # table -> the document that refers to it
    apart: dict[
        str, str
    ] = {}  # the same of chunks of snapshots and channel scales: missing ones are named further down
    forgotten: set[str] = set()
    with suppress(CacheError):
        forgotten = cache.forgotten_scans()
    for name, _ in copies.documents(files):
        if name in forgotten:
            continue
        with suppress(CacheError):
            referred = apart if name.startswith(("snapshots/", "scales/")) else wanted
            referred.update(dict.fromkeys(_needs(name, files.document(name)), name))
    there: set[str] = set()
    fix_of = partial(_fix_of, referred={**apart, **wanted})
    for entry in files.walk("tables"):
        there.add(entry.name)
        try:
            if files.digest(entry.name) != PurePosixPath(entry.name).stem:
                yield Finding(entry.name, "its bytes do not match its name", fix=fix_of(entry.name))
        except (CacheError, OSError) as error:
            yield Finding(entry.name, _problem(error), fix=fix_of(entry.name))
        progress(entry.size)
    for name in sorted(set(wanted) - there):
        yield Finding(name, f"is missing, and {wanted[name]} refers to it", fix=fix_of(name))
    again = {} if again is None else again
    pointed, needed = named_snapshots(cache), set[str]()
    for snapshot in pointed:
        with suppress(CacheError):
            needed |= set(shard_files(files.document(Paths.snapshot(snapshot))))
    for name in recipe_names(cache):
        yield from _verify_scale(cache, name)
        records = remembered(partial(cache.index, name))
        for plan, commit in _commits(cache, name):
            try:
                yield from _verify_unit(cache, name, plan, commit, records, needed, again, progress)
            except (CacheError, OSError) as error:
                where = Paths.shard(name, str(commit.shard))
                what = f"is damaged, and which records cannot be told: {_problem(error)}"
                yield Finding(where, what, recipe=name, plan=plan, unit=commit.unit)
    read: set[str] = set()
    for name in filter(is_document, (f"snapshots/{head}" for head in files.names("snapshots"))):
        yield from verify_snapshot(cache, name, again, pointed)
        yield from _verify_packed(cache, name, read, progress)


def named_snapshots(cache: Cache) -> dict[str, str]:
    """The snapshots that names point to now, each with one of these names. Those that cannot be read are left out."""
    found = {}
    for name in cache.snapshot_names():
        with suppress(CacheError):
            if (snapshot := cache.snapshot_of(name)) is not None:
                found[snapshot] = name
    return found


def _problem(error: CacheError | OSError) -> str:
    return error.what if isinstance(error, CacheError) else f"cannot be read: {error.strerror or error}"


def _needs(name: str, body: dict[str, Any]) -> Iterator[str]:
    """Tables that a document refers to."""
    folder = name.partition("/")[0]
    if folder == "snapshots":
        yield from (Paths.table(chunk[kind], "arrow") for chunk in body["chunks"] for kind in ("samples", "names"))
        yield from (Paths.table(table, "parquet") for table in body["sources"].values())
    elif folder == "scales":
        yield Paths.table(body["table"], "npy")
    elif folder in ("sources", "plans"):
        yield Paths.table(body["table"], "parquet")
    elif folder in ("units", "segments"):
        tables = [body["table"], *(commit["table"] for commit in body.get("commits", ()))]
        yield from (Paths.table(table, "arrow") for table in tables if table)


def _fix_of(table: str, referred: dict[str, str]) -> str:
    """What mends a table. referred: table -> a document that refers to it."""
    if table not in referred:
        return GC
    fixes = {"sources": ENCODE, "snapshots": BUCKET, "scales": BACKUP}
    return fixes.get(referred[table].partition("/")[0], REPAIR)


def _verify_packed(cache: Cache, name: str, read: set[str], progress: Callable[[int], None]) -> Iterator[Finding]:
    """What is wrong with the joint shards of a packed snapshot. read: those that were read already, and are now."""
    try:
        snapshot = Snapshot(cache.files, PurePosixPath(name).stem)
    except CacheError:
        return  # the damaged head has been named already
    for path, size in snapshot.shard_files().items() if snapshot.packed else ():
        if path in read:
            continue
        read.add(path)
        digest = PurePosixPath(path).stem
        try:
            intact = cache.files.digest(path) == digest
            progress(size)
            bad = () if intact else tuple(_bad_joint_records(snapshot, digest))
        except FileNotFoundError:
            yield Finding(path, "the joint shard is missing")
        except (CacheError, OSError) as error:
            yield Finding(path, f"cannot be read: {error}")
        else:
            if not intact:
                what = f"{len(bad)} records are damaged" if bad else "bytes outside the records are damaged"
                yield Finding(path, what, records=bad)


def _bad_joint_records(snapshot: Snapshot, digest: str) -> Iterator[str]:
    """Hex keys of the damaged records of a joint shard."""
    readers = {kind: snapshot.reader(kind) for kind in ("latent", "text")}
    numbers = {kind: names.index(digest) for kind, names in snapshot.shards.items() if digest in names}
    latent, width = snapshot.latent_recipe, snapshot.text_recipe.width

    def damaged(kind: str, own: Any, into: np.ndarray) -> bool:
        try:
            readers[kind].read(digest, own.offset, own.key, own.checksum, into, own.length)
        except IntegrityError:
            return True
        return False

    first = 0
    for table in snapshot.tables():
        mine = np.flatnonzero(table.column("shard").to_numpy() == numbers.get("latent", -1))
        for row in (mine + first).tolist():
            sample = snapshot.sample(row)
            bucket = snapshot.buckets[sample.bucket]
            shape = (latent.channels, bucket.height // latent.compression, bucket.width // latent.compression)
            if damaged("latent", sample, np.empty(shape, np.uint16)):
                yield sample.key.hex()
            for caption, where in zip(sample.captions, snapshot.written(row), strict=True):
                bad = damaged("text", caption, np.empty((caption.rows, width), np.uint16))
                try:
                    readers["text"].caption(digest, where["offset"], where["length"], caption.key, where["checksum"])
                except IntegrityError:
                    bad = True
                if bad:
                    yield caption.key.hex()
        first += table.num_rows
    null = snapshot.null
    if null["shard"] == digest:
        own = Caption(
            digest,
            null["offset"],
            null["rows"],
            1.0,
            bytes.fromhex(null["key"]),
            bytes.fromhex(null["checksum"]),
            null.get("length"),
        )
        if damaged("text", own, np.empty((null["rows"], width), np.uint16)):
            yield null["key"]


def _verify_scale(cache: Cache, recipe: str) -> Iterator[Finding]:
    """A table of channel scales that is missing; damage to one has been named with the other tables."""
    try:
        table = cache.files.document(Paths.scale(recipe))["table"] if cache.files.exists(Paths.scale(recipe)) else None
    except CacheError:
        return  # the damaged document has been named already
    if table is not None and not cache.files.exists(Paths.table(table, "npy")):
        yield Finding(Paths.table(table, "npy"), f"the channel scales of {recipe} are missing", fix=BACKUP)


def _commits(cache: Cache, recipe: str) -> Iterator[tuple[int, index.Commit]]:
    try:
        for number in cache.files.numbers(Paths.plans(recipe)):
            for commit in index.commits(cache.files, recipe, number):
                yield number, commit
    except CacheError:
        return  # the damaged document has been named already


def _verify_unit(
    cache: Cache,
    recipe: str,
    plan: int,
    commit: index.Commit,
    records: Callable[[], index.RecordIndex],
    needed: set[str],
    again: dict[str, set[bytes]],
    progress: Callable[[int], None],
) -> Iterator[Finding]:
    """What is wrong with the shard of a commit.

    Args:
        records: opens the index of its recipe; called only where there is damage.
        needed: shards of named snapshots, which are missed even where other shards have their records.
        again: of each shard the damaged records that another has; added to.
    """
    if commit.shard is None:
        return
    name = Paths.shard(recipe, commit.shard)
    own: dict[str, Any] = {"recipe": recipe, "plan": plan, "unit": commit.unit}
    try:
        intact = cache.files.digest(name) == commit.shard
        progress(commit.bytes)
    except FileNotFoundError:
        keys = _keys(cache, commit)
        lost = not_replaced(records, commit, keys)
        again[commit.shard] = set(keys) - set(map(bytes.fromhex, lost))
        lost = tuple(key.hex() for key in keys) if name in needed else lost
        if lost or not keys:
            yield Finding(name, f"the shard is missing with {len(lost) or commit.records} records", records=lost, **own)
        return
    except (CacheError, OSError) as error:
        yield Finding(name, f"cannot be read: {error}", **own)
        return
    if not intact:
        damaged = bad_records(cache, recipe, commit)
        bad = not_replaced(records, commit, damaged)
        again[commit.shard] = set(damaged) - set(map(bytes.fromhex, bad))
        if damaged and not bad:
            return  # a repair made every damaged record again, or another cache's copy counts
        what = f"{len(bad)} of {commit.records} records are damaged" if bad else "bytes outside the records are damaged"
        yield Finding(name, what, records=bad, **own)


def not_replaced(records: Callable[[], index.RecordIndex], commit: index.Commit, keys: list[bytes]) -> tuple[str, ...]:
    """Hex of those keys whose record that counts stands in no other shard than this commit's. records: opens the index
    of its recipe."""
    if not keys:
        return ()
    found = records()
    rows = found.find(index.as_keys(keys)).tolist()
    elsewhere = [row >= 0 and found.shards[found.columns["shard"][row]] != commit.shard for row in rows]
    return tuple(key.hex() for key, other in zip(keys, elsewhere, strict=True) if not other)


def _keys(cache: Cache, commit: index.Commit) -> list[bytes]:
    try:
        return [row["key"] for row in record_rows(cache, commit)]
    except CacheError:
        return []


def record_rows(cache: Cache, commit: index.Commit) -> list[dict[str, Any]]:
    """Rows of a commit's record table.

    Raises:
        IntegrityError: the table is missing or damaged.
    """
    assert commit.table is not None
    name = Paths.table(commit.table, "arrow")
    return shard.from_ipc(cache.files.content(name, commit.table), name).to_pylist()


def bad_records(cache: Cache, recipe: str, commit: index.Commit) -> list[bytes]:
    """Keys of the records of a shard whose payload or caption is not what was written; all if it is missing."""
    reader = shard.Reader(cache.files, recipe)
    bad = []
    assert commit.shard is not None
    if not cache.files.exists(Paths.shard(recipe, commit.shard)):
        return [row["key"] for row in record_rows(cache, commit)]
    for row in record_rows(cache, commit):
        try:
            payload(reader, recipe, commit.shard, row)
            if "caption_offset" in row:
                reader.caption(
                    commit.shard, row["caption_offset"], row["caption_length"], row["key"], row["caption_checksum"]
                )
        except IntegrityError:
            bad.append(row["key"])
    return bad


def payload(reader: shard.Reader, recipe: str, name: str, row: dict[str, Any]) -> np.ndarray:
    """One verified record of a shard (uint16)."""
    latent = recipe.startswith("latent-")
    shape = (row["channels"], row["height"], row["width"]) if latent else (row["rows"], row["width"])
    into = np.empty(shape, np.uint16)
    reader.read(name, row["offset"], row["key"], row["checksum"], into, row["length"])
    return into


def verify_snapshot(
    cache: Cache, name: str, again: dict[str, set[bytes]], pointed: Container[str]
) -> Iterator[Finding]:
    """What is wrong with one snapshot (its head's file), but for its head: records of it that are damaged, its chunks,
    shards missing or of another size.

    Args:
        again: shard -> keys of damaged records that were made again elsewhere. A snapshot that refers to one of them
            has to be made again, if anybody needs it.
        pointed: ids of the snapshots that names point to.
    """
    try:
        snapshot = Snapshot(cache.files, PurePosixPath(name).stem)
    except CacheError:
        return  # the damaged head has been named already
    try:
        if bad := sum(refers_to(snapshot, again)) if any(again.values()) else 0:
            if snapshot.id in pointed:
                yield Finding(name, f"refers to {bad} damaged records that were made again since", fix=BUCKET)
            return
        check_files(cache.files, snapshot.head)
        for number in range(len(snapshot.head["chunks"])):
            snapshot.check_chunk(number)
    except CacheError as error:
        yield Finding(name, error.what, fix=error.fix or REPAIR)


def maker(name: str) -> str:
    """The command that makes what a lost document was for."""
    return BUCKET if name.partition("/")[0] in ("snapshots", "names") else ENCODE


def refers_to(snapshot: Snapshot, records: dict[str, set[bytes]]) -> Iterator[int]:
    """How many of some records (shard -> keys) a snapshot refers to, chunk by chunk; at last, whether to one of them as
    its null record. A packed snapshot has copies of its own."""
    if snapshot.packed:
        return
    wanted = {
        kind: {names.index(s): keys for s, keys in records.items() if s in names}
        for kind, names in snapshot.shards.items()
    }
    for table in snapshot.tables():
        captions = pa.concat_arrays([chunk.flatten() for chunk in table.column("captions").chunks])
        columns = {
            "latent": (table.column("shard").to_numpy(), index.fixed(table.column("key"))),
            "text": (captions.field("shard").to_numpy(), index.fixed(captions.field("key"))),
        }
        yield sum(
            int(np.isin(keys[shards == number], index.as_keys(sorted(bad))).sum())
            for kind, (shards, keys) in columns.items()
            for number, bad in wanted[kind].items()
        )
    yield int(bytes.fromhex(snapshot.null["key"]) in records.get(snapshot.null["shard"], ()))


# ---------------------------------------------------------------- what contradicts itself


def contradictions(cache: Cache) -> Iterator[Finding]:
    """Where documents and shards contradict one another, as they do when a document was lost or damaged.

    Nothing may be removed from a cache while there is one: what a lost document referred to looks unneeded. Reads every
    document, and the heads of those shards that no commit refers to.

    A shard that no commit refers to is harmless if its unit is committed with another one (a late worker's, a crash
    before the commit) and if its bytes do not say what it is. If its unit is planned and not committed, or in no plan,
    either its document was lost or the work was never finished. Joint shards are copies of records that are elsewhere:
    they count for nothing here.
    """
    files, named = cache.files, named_snapshots(cache)
    heads = set(files.names("snapshots"))
    for name, _ in copies.documents(files):
        folder, *rest = PurePosixPath(name).with_suffix("").parts
        if folder == "snapshots" and rest[0] not in named:
            continue  # nobody needs it
        if folder == "units" and files.exists(f"segments/{rest[0]}/{rest[1]}.json"):
            continue  # the segment stands for it
        try:
            files.document(name)
        except CacheError as error:
            yield Finding(name, error.what)
    for snapshot, name in sorted(named.items()):
        if f"{snapshot}.json" not in heads:
            yield Finding(Paths.snapshot(snapshot), f"is missing, and {Paths.names(name)} refers to it", fix=BUCKET)
    if heads and not any(files.names(Paths.names(name)) for name in cache.snapshot_names()):
        yield Finding("names", "there are snapshots, and no name points to any", fix=BUCKET)
    for folder in (*map(Paths.scans, cache.sources()), *map(Paths.names, cache.snapshot_names())):
        yield from _gap(cache, folder)
    owners = {name for folder in ("plans", "units", "segments", "shards") for name in files.folders(folder)}
    known = set(recipe_names(cache))
    for owner in sorted(owners | {name.removesuffix(".json") for name in files.names("scales")} | known):
        if not owner.startswith(PACKED) and owner not in known:
            yield Finding(Paths.recipe(owner), "is missing, and there are plans, commits or shards of this recipe")
        yield from _gap(cache, Paths.plans(owner))
        if not owner.startswith(PACKED):
            yield from _unfounded(cache, owner)


def _gap(cache: Cache, folder: str) -> Iterator[Finding]:
    try:
        cache.files.numbers(folder)
    except CacheError as error:
        yield Finding(folder, error.what)


def _unfounded(cache: Cache, owner: str) -> Iterator[Finding]:
    """Commits, shards and scales of a recipe without the document that they follow from."""
    files = cache.files
    # Against the order in which they are written: what appears meanwhile is then no contradiction.
    written = [entry.name for entry in files.walk(f"shards/{owner}")]
    planned: dict[str, int] = {}
    try:
        listed = {name.removesuffix(".json") for name in files.names(f"segments/{owner}")}
        listed |= set(files.folders(f"units/{owner}"))
        commits = [(int(name), commit) for name in sorted(listed) for commit in index.commits(files, owner, int(name))]
        for plan in cache.plans(owner):
            planned.update((unit.unit, plan.number) for unit in plan.units)
    except CacheError:
        return  # the damaged document has been named already
    plans = set(planned.values())
    for number in sorted({number for number, _ in commits} - plans):
        where = Paths.numbered(Paths.plans(owner), number)
        yield Finding(where, "is missing, and there are commits of its units", recipe=owner, plan=number)
    for number, commit in commits:
        if number in plans and planned.get(commit.unit) != number:
            where = Paths.numbered(Paths.plans(owner), number)
            yield Finding(where, f"does not list unit {commit.unit}, which is committed", owner, number, commit.unit)
    shards, units = {commit.shard for _, commit in commits}, {commit.unit for _, commit in commits}
    for name in written:
        stem = PurePosixPath(name).stem
        if stem in shards:
            continue
        try:
            unit = shard.read_head(files, name)["unit"]
        except CacheError:
            continue
        number = planned.get(unit, planned.get(index.adopted_unit(owner, stem), -1))
        if unit in units or (number >= 0 and unit in index.committed(files, owner, number)):
            continue
        if number >= 0:
            what = f"unit {unit} of this shard is not committed: encode was stopped there, or its commit was lost"
            yield Finding(name, what, fix=f"{ENCODE}, or {REPAIR}")
        else:
            what = f"unit {unit} of this shard is in no plan: bucket was stopped at another cache, or a plan was lost"
            yield Finding(name, what, fix=f"{BUCKET}, or {REPAIR}")
    if shards - {None} and not files.exists(Paths.scale(owner)):
        try:
            lossy = codec.storage_of(cache.recipe(owner)) == codec.INT8
        except CacheError:
            return
        if lossy:
            yield Finding(Paths.scale(owner), "is missing, and there are records that were made with these scales")


def unit_of(cache: Cache, recipe: str, plan: int, unit: str) -> tuple[Plan, Unit]:
    found = cache.plan(recipe, plan)
    return found, next(u for u in found.units if u.unit == unit)
