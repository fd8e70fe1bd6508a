"""Audit: reads a whole cache and names each damaged document, table, shard and record.

Why: a cache that many machines wrote and copied should be able to prove that it is complete and right.
Price: every byte is read once. Documents are read one request after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache as run_once
from functools import cached_property, partial
from itertools import chain
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sana_pipe.base.errors import CacheError, IntegrityError
from sana_pipe.data.cache import copies, index, layout, shard
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.contradictions import contradictions
from sana_pipe.data.cache.encodings import encoding_class
from sana_pipe.data.cache.files import Files
from sana_pipe.data.cache.findings import (
    GC,
    Finding,
    Replaced,
    bucket_command,
    damage_only,
    encoding_names,
    named_snapshots,
    skip_damaged,
)
from sana_pipe.data.cache.keys import as_keys, binary, fixed
from sana_pipe.data.cache.layout import REPAIR, Paths, is_document
from sana_pipe.data.cache.references import Reference, references, tables_of_head
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.cache.snapshot_head import Head, TextPlace, check_files
from sana_pipe.data.cache.snapshot_samples import RecordPlace

OnFileRead = Callable[[int], None]
"""A function that takes the size in bytes of each file that was read."""


def verify(cache: Cache, on_file_read: OnFileRead = lambda size: None) -> Iterator[Finding]:
    """Read everything and yield each finding as it appears: `verify_documents`, then `verify_contents`."""
    yield from verify_documents(cache, on_file_read)
    yield from verify_contents(cache, on_file_read)


def verify_documents(cache: Cache, on_file_read: OnFileRead = lambda size: None) -> Iterator[Finding]:
    """Documents that are damaged, lost, or contradict the shards."""
    files, reported = cache.files, set[str]()
    alone: dict[str, int] = {}
    for name, size in chain([(Paths.FORMAT, 0)], copies.documents(files), alone.items()):
        pair = copies.inspect(files, name)
        if name not in alone and pair.copy and not files.has_file(Paths.copy(name)):
            alone[name] = size  # the copy may be on its way: looked at again at the end
            continue
        if pair.document:
            files.damage.setdefault(name, pair.document)
            reported.add(name)
            state = f"; {pair.copy}" if pair.data is None and pair.copy != pair.document else ""
            yield Finding(name, pair.document + ("; its copy is intact" if pair.data is not None else state))
        elif pair.copy:
            reported.add(name)
            yield Finding(Paths.copy(name), pair.copy)
        on_file_read(size)
    yield from (finding for finding in contradictions(cache) if finding.path not in reported)


def verify_contents(
    cache: Cache, on_file_read: OnFileRead = lambda size: None, replaced: Replaced | None = None
) -> Iterator[Finding]:
    """Tables, shards, records and snapshots that are damaged or missing. Unreadable documents are skipped.

    Args:
        replaced: damaged records that another shard holds are added to it.
    """
    replaced, contents = {} if replaced is None else replaced, Contents(cache)
    for part in contents.parts():
        yield from contents.verify(part, replaced, on_file_read)
    yield from contents.verify_snapshots(replaced)


PART_BYTES, PART_FILES = 64 << 20, 1000
"""Limits on the tables of a part."""


@dataclass(frozen=True)
class Part:
    """Files that one process verifies at once: a shard, or some tables.

    Attributes:
        names: their paths in the cache.
        sizes: in bytes, as the listing or the commit says; 0: missing.
        encoding, plan, unit: of the commit of a shard.
        snapshot: which refers to the shard, if there is no commit (of joint shards).
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    encoding: str = ""
    plan: int = -1
    unit: str = ""
    snapshot: str = ""

    @property
    def id(self) -> str:
        """Hex digest of what is verified. Parts of an unchanged cache have the same ids in every process."""
        return layout.digest("part", *self.names, self.encoding, str(self.plan), self.unit, self.snapshot).hex()

    @property
    def is_shard(self) -> bool:
        return bool(self.encoding or self.snapshot)

    @property
    def bytes(self) -> int:
        return sum(self.sizes)


class Contents:
    """The tables, shards and snapshots of a cache, in parts that processes may share.

    Args:
        snapshot: id of the only snapshot whose files are verified: its lists and shards, and the tables of the plans
            that made these, which a repair reads. None: everything.
    """

    def __init__(self, cache: Cache, snapshot: str | None = None):
        self.cache, self.snapshot = cache, snapshot
        self.named = named_snapshots(cache)
        self._indexes: dict[str, Callable[[], index.RecordIndex]] = {}

    @cached_property
    def _only_shards(self) -> dict[str, int] | None:
        """The shards of the only snapshot, with their sizes; None: all shards."""
        return None if self.snapshot is None else dict(Head.read(self.cache.files, self.snapshot).each_shard_file())

    @cached_property
    def _needed(self) -> dict[str, Reference]:
        """Tables that documents refer to."""
        needed: dict[tuple[str, ...], dict[str, Reference]] = {}
        wanted: set[tuple[str, ...]] = {(str(self.snapshot),)}
        for reference in references(self.cache):
            owner = PurePosixPath(reference.document).with_suffix("").parts[1:]
            tables = needed.setdefault(owner, {})
            if self.snapshot is not None and not reference.stored:
                continue  # scans, which only reports read
            with skip_damaged():
                for path in reference.files:
                    if path.startswith("tables/"):
                        tables[path] = reference
                    elif self._only_shards is not None and path in self._only_shards:
                        wanted.add(owner)
        chosen = (tables for owner, tables in needed.items() if self.snapshot is None or owner in wanted)
        return {path: reference for tables in chosen for path, reference in tables.items()}

    @cached_property
    def _snapshots(self) -> list[Snapshot]:
        """The named ones that can be read."""
        snapshots = []
        for name in self.named:
            with skip_damaged():
                snapshots.append(Snapshot(self.cache.files, name))
        return snapshots

    # ------------------------------------------------------------ parts

    def parts(self) -> Iterator[Part]:
        """Tables first, because repairing a shard reads them; then shards, and joint shards of packed snapshots."""
        yield from self._tables()
        with_commit = set[str]()
        for encoding in encoding_names(self.cache):
            for plan, commit in _commits(self.cache, encoding):
                path = "" if commit.shard is None else Paths.shard(encoding, commit.shard)
                if path and (self._only_shards is None or path in self._only_shards):
                    with_commit.add(path)
                    yield Part((path,), (commit.bytes,), encoding, plan, commit.unit)
        for name in self._heads():
            yield from self._joint_shards(PurePosixPath(name).stem, with_commit)

    def _tables(self) -> Iterator[Part]:
        files, needed, sizes = self.cache.files, self._needed, dict[str, int]()
        for entry in chain(files.walk("tables"), files.walk(Paths.copy("tables"))):
            if self.snapshot is None or entry.name.removeprefix("copies/") in needed:
                sizes[entry.name] = entry.size
        for table, reference in sorted(needed.items(), key=lambda pair: pair[0]):
            for name in (table, Paths.copy(table))[: reference.stored]:
                sizes.setdefault(name, 0)
        names, size = list[str](), 0
        for name in sizes:
            if names and (size + sizes[name] > PART_BYTES or len(names) == PART_FILES):
                yield Part(tuple(names), tuple(sizes[each] for each in names))
                names, size = [], 0
            names.append(name)
            size += sizes[name]
        if names:
            yield Part(tuple(names), tuple(sizes[each] for each in names))

    def _heads(self) -> Iterator[str]:
        """Paths of the heads that are verified."""
        if self.snapshot is not None:
            yield Paths.snapshot(self.snapshot)
            return
        yield from filter(is_document, (f"snapshots/{head}" for head in self.cache.files.names("snapshots")))

    def _joint_shards(self, snapshot_id: str, seen: set[str]) -> Iterator[Part]:
        """The shards of a snapshot that have no commit of an encoding. seen: shards to skip; updated."""
        try:
            snapshot = Snapshot(self.cache.files, snapshot_id)
            shards = snapshot.shard_files() if snapshot.packed or self.snapshot is not None else {}
        except CacheError as error:
            damage_only(error)
            return  # `verify_documents` reports the damaged head, the table's part a damaged list
        for path, size in shards.items():
            if path not in seen:
                seen.add(path)
                yield Part((path,), (size,), snapshot=snapshot_id)

    # ------------------------------------------------------------ verifying

    def verify(self, part: Part, replaced: Replaced, on_file_read: OnFileRead) -> Iterator[Finding]:
        """Read a part and say what is wrong.

        Args:
            replaced: damaged records that another shard holds are added to it.
        """
        for name, size in zip(part.names, part.sizes, strict=True):
            if not (problem := _problem(self.cache.files, name, size, on_file_read)):
                continue
            if part.unit:
                yield from self._of_shard(part, problem, replaced)
            elif part.snapshot:
                yield self._of_joint_shard(part, problem)
            else:
                yield self._of_table(name, problem)

    def verify_snapshots(self, replaced: Replaced) -> Iterator[Finding]:
        """`verify_snapshot` of every head. replaced: as the verification of all parts left it."""
        for name in self._heads():
            yield from verify_snapshot(self.cache, name, replaced, self.named)

    def _of_table(self, name: str, problem: str) -> Finding:
        table = name.removeprefix("copies/")
        reference = self._needed.get(table)
        if problem == MISSING and reference is not None:
            problem = f"is missing, but {reference.document} refers to it"
        return Finding(name, problem, fix=_fix_of_table(self.cache.files, table, reference))

    def _of_joint_shard(self, part: Part, problem: str) -> Finding:
        [path], bad = part.names, tuple[str, ...]()
        snapshot = Snapshot(self.cache.files, part.snapshot)
        if problem == WRONG and snapshot.packed:
            try:
                bad = tuple(_bad_joint_records(snapshot, PurePosixPath(path).stem))
                problem = f"{len(bad)} records are damaged" if bad else "bytes outside the records are damaged"
            except (CacheError, OSError) as error:
                problem = damage_only(error)
        return Finding(path, problem, records=bad)

    def _of_shard(self, part: Part, problem: str, replaced: Replaced) -> Iterator[Finding]:
        commits = index.each_commit(self.cache.files, part.encoding, part.plan)
        commit = next(commit for commit in commits if commit.unit == part.unit)
        open_index = self._indexes.setdefault(part.encoding, run_once(partial(self.cache.index, part.encoding)))
        shard = _Shard(self.cache, part.encoding, part.plan, commit, open_index, self._snapshots)
        try:
            yield from shard.findings(problem, replaced)
        except (CacheError, OSError) as error:
            yield shard.finding(f"is damaged, and its damaged records cannot be listed: {damage_only(error)}")


WRONG, MISSING = "its bytes do not match its name", "is missing"


def _problem(files: Files, path: str, size: int, on_file_read: OnFileRead) -> str:
    """Say what is wrong with a content-addressed file; "" if nothing."""
    try:
        intact = files.digest(path) == PurePosixPath(path).stem
    except FileNotFoundError:
        return MISSING
    except (CacheError, OSError) as error:
        return damage_only(error)
    on_file_read(size)
    return "" if intact else WRONG


def _fix_of_table(files: Files, table: str, reference: Reference | None) -> str:
    """Return what repairs a table or its copy. reference: to the table; None if nothing needs it."""
    if any(map(files.is_intact, (table, Paths.copy(table)))):
        return REPAIR
    return GC if reference is None else reference.fix


# ---------------------------------------------------------------- joint shards of packed snapshots


def _bad_joint_records(snapshot: Snapshot, digest: str) -> Iterator[str]:
    """Hex keys of the damaged records of a joint shard."""
    text, width = snapshot.caption.kind, snapshot.caption.width
    readers = {kind: snapshot.reader(kind) for kind in snapshot.shards}
    numbers = {kind: names.index(digest) for kind, names in snapshot.shards.items() if digest in names}

    def damaged(kind: str, record: RecordPlace | TextPlace, shape: tuple[int, ...]) -> bool:
        into = np.empty(shape, np.uint16)
        try:
            readers[kind].read(digest, record.offset, record.key, record.checksum, into, record.length)
        except IntegrityError:
            return True
        return False

    first, lead = 0, next(iter(snapshot.pictures))
    for table in snapshot.tables():
        shards = pc.struct_field(table.column(lead), "shard").to_numpy()
        for row in (np.flatnonzero(shards == numbers.get(lead, -1)) + first).tolist():
            sample = snapshot.sample(row)
            for kind, place in sample.pictures.items():
                if damaged(kind, place, snapshot.shape(kind, sample.bucket)):
                    yield place.key.hex()
            for caption, where in zip(sample.captions, snapshot.written(row), strict=True):
                bad = damaged(text, caption, (caption.rows, width))
                try:
                    readers[text].caption(digest, where["offset"], where["length"], caption.key, where["checksum"])
                except IntegrityError:
                    bad = True
                if bad:
                    yield caption.key.hex()
        first += table.num_rows
    null = snapshot.null
    if null.shard == digest and damaged(text, null, (null.rows, width)):
        yield null.key.hex()


# ---------------------------------------------------------------- shards


def _commits(cache: Cache, encoding: str) -> Iterator[tuple[int, index.Commit]]:
    """(plan number, commit), up to the first unreadable document, which `verify_documents` reports."""
    with skip_damaged():
        for number in cache.files.numbers(Paths.plans(encoding)):
            for commit in index.each_commit(cache.files, encoding, number):
                yield number, commit


@dataclass(frozen=True)
class _Shard:
    """The shard of a commit.

    Args:
        open_index: of its encoding; called only if there is damage.
        snapshots: the named ones. If one refers to a record in this shard, the record must be right here: the snapshot
            reads this shard even if another shard holds the record, too.
    """

    cache: Cache
    encoding: str
    plan: int
    commit: index.Commit
    open_index: Callable[[], index.RecordIndex]
    snapshots: list[Snapshot]

    def finding(self, problem: str, records: tuple[str, ...] = ()) -> Finding:
        path = Paths.shard(self.encoding, str(self.commit.shard))
        return Finding(path, problem, self.encoding, self.plan, self.commit.unit, records)

    def findings(self, problem: str, replaced: Replaced) -> Iterator[Finding]:
        """Say which records are damaged. replaced: this function adds the damaged keys that another shard holds."""
        commit = self.commit
        if problem == MISSING:
            keys = self._keys()
            lost = self._to_repair(keys, replaced)
            if lost or not keys:
                yield self.finding(f"the shard is missing, with {len(lost) or commit.records} records", lost)
        elif problem == WRONG:
            damaged = bad_records(self.cache, self.encoding, commit)
            bad = self._to_repair(damaged, replaced)
            if bad:
                yield self.finding(f"{len(bad)} of {commit.records} records are damaged", bad)
            elif not damaged:
                yield self.finding("bytes outside the records are damaged")
        else:
            yield self.finding(problem)

    def _keys(self) -> list[bytes]:
        with skip_damaged():
            return [row["key"] for row in record_rows(self.cache, self.commit)]
        return []

    def _to_repair(self, keys: list[bytes], replaced: Replaced) -> tuple[str, ...]:
        """List the damaged keys (hex) that must be made again. Keys that another shard holds are added to
        `replaced`."""
        needed = unreplaced_keys(self.open_index, self.commit, keys)
        name = str(self.commit.shard)
        elsewhere = replaced[name] = set(keys) - needed
        for snapshot in self.snapshots if elsewhere else ():
            with skip_damaged():  # `verify_snapshot` reports it
                for part in referred_keys(snapshot, {name: elsewhere}):
                    needed.update(binary(part).to_pylist())
        return tuple(key.hex() for key in keys if key in needed)


def unreplaced_keys(open_index: Callable[[], index.RecordIndex], commit: index.Commit, keys: list[bytes]) -> set[bytes]:
    """List the damaged keys of a commit that no other shard has a good record for.

    Args:
        open_index: of the encoding; not called without keys.
    """
    if not keys:
        return set()
    records = open_index()
    rows = records.find(as_keys(keys)).tolist()
    elsewhere = [row >= 0 and records.shards[records.columns["shard"][row]] != commit.shard for row in rows]
    return {key for key, other in zip(keys, elsewhere, strict=True) if not other}


def record_rows(cache: Cache, commit: index.Commit) -> list[dict[str, Any]]:
    """Rows of a commit's record table.

    Raises:
        IntegrityError: the table is missing or damaged.
    """
    return index.record_table(cache.files, commit).to_pylist()


def bad_records(cache: Cache, encoding: str, commit: index.Commit) -> list[bytes]:
    """Keys of the damaged records of a shard (payload or caption); all keys if the shard is missing."""
    reader = shard.ShardReader(cache.files, encoding)
    bad = []
    assert commit.shard is not None
    if not cache.files.exists(Paths.shard(encoding, commit.shard)):
        return [row["key"] for row in record_rows(cache, commit)]
    for row in record_rows(cache, commit):
        try:
            payload(reader, encoding, commit.shard, row)
            if "caption_offset" in row:
                reader.caption(
                    commit.shard, row["caption_offset"], row["caption_length"], row["key"], row["caption_checksum"]
                )
        except IntegrityError:
            bad.append(row["key"])
    return bad


def payload(reader: shard.ShardReader, encoding: str, name: str, row: dict[str, Any]) -> np.ndarray:
    """Read and verify a record of a shard: uint16, of the shape that its row has for the axes of its kind.

    Raises:
        IntegrityError: it is damaged.
    """
    into = np.empty([row[axis] for axis in encoding_class(encoding.rpartition("-")[0]).axes], np.uint16)
    reader.read(name, row["offset"], row["key"], row["checksum"], into, row["length"])
    return into


def copy_record(writer: shard.ShardWriter, reader: shard.ShardReader, name: str, row: dict[str, Any]) -> None:
    """Add a record of another shard of the encoding, verified, with the same bytes.

    Args:
        name: of that shard. row: of its record table.

    Raises:
        IntegrityError: it is damaged.
    """
    array = payload(reader, writer.encoding.name, name, row)
    stored = bytes(reader.stored(name, row["offset"], row["key"], row["checksum"], row["length"]))
    caption = None
    if "caption_offset" in row:
        where = (row["caption_offset"], row["caption_length"], row["key"], row["caption_checksum"])
        caption = reader.caption(name, *where)
    # Stored bytes are copied: compressing a lossy record again would change it.
    writer.add(row["key"], array, caption=caption, valid=row.get("valid"), stored=stored)


# ---------------------------------------------------------------- snapshots


def verify_snapshot(cache: Cache, name: str, replaced: Replaced, named: Mapping[str, str]) -> Iterator[Finding]:
    """Say what is wrong with a snapshot besides its head and its tables: damaged records that it refers to, shards that
    are missing or have another size.

    Args:
        name: path of the head.
        replaced: a named snapshot that refers to one of these records has to be made again.
        named: snapshots that names point to -> one of the names.
    """
    try:
        head = Head.read(cache.files, PurePosixPath(name).stem)
    except CacheError as error:
        damage_only(error)
        return  # `verify_documents` reports the damaged head
    try:
        snapshot = Snapshot(cache.files, PurePosixPath(name).stem)
        if bad := sum(map(len, referred_keys(snapshot, replaced))) if any(replaced.values()) else 0:
            if snapshot.id in named:
                fix = bucket_command(named[snapshot.id], head)
                yield Finding(name, f"refers to {bad} damaged records that were made again since", fix=fix)
            return
        check_files(cache.files, head)
        for number in range(len(head.chunks)):
            snapshot.check_chunk(number)
    except CacheError as error:
        tables = tables_of_head(head)
        if not all(any(map(cache.files.is_intact, (table, Paths.copy(table)))) for table in tables):
            return  # `_verify_tables` reports it, with the command that makes it again
        pointing = named.get(PurePosixPath(name).stem)
        yield Finding(name, damage_only(error), fix=(error.fix or REPAIR) if pointing is not None else GC)


def referred_keys(snapshot: Snapshot, records: Mapping[str, Collection[bytes]]) -> Iterator[np.ndarray]:
    """Find which of some records a snapshot refers to. A packed snapshot refers to none: it has copies.

    Args:
        records: shard -> keys.

    Yields:
        Keys, S16 (n,), chunk by chunk, each once per reference; at the end the null record's.
    """
    if snapshot.packed:
        return
    wanted = {
        kind: {names.index(s): keys for s, keys in records.items() if s in names}
        for kind, names in snapshot.shards.items()
    }
    for table in snapshot.tables():
        captions = pa.concat_arrays([chunk.flatten() for chunk in table.column("captions").chunks])
        columns = {kind: table.column(kind).combine_chunks() for kind in snapshot.pictures}
        columns[snapshot.caption.kind] = captions
        for kind, places in columns.items():
            shards, keys = places.field("shard").to_numpy(), fixed(places.field("key"))
            for number, bad in wanted[kind].items():
                yield keys[(shards == number) & np.isin(keys, as_keys(sorted(bad)))]
    null = snapshot.null.key
    yield as_keys([null] if null in records.get(snapshot.null.shard, ()) else [])
