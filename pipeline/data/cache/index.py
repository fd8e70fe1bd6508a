"""Commits and the index: which records a cache has, and where.

A shard is visible only through a commit: its unit's document (`Paths.unit`) or, once all units
of the plan are committed, one segment document. Readers then use the segment instead (`gc` removes the unit documents
later), so opening a cache reads one document per finished plan. `RecordIndex` finds records by key.
A record may be in two shards (after a repair). The later plan wins, so an index is built in plan order. Adopted
plans come before all others, in reverse order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import PurePosixPath
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sana_pipe.base.errors import IntegrityError
from sana_pipe.data.cache import arrow, layout
from sana_pipe.data.cache.encodings import records_schema
from sana_pipe.data.cache.files import Files
from sana_pipe.data.cache.keys import BATCH, SortedKeys, as_keys, halves, is_first, to_column, to_numpy
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.cache.shard import from_ipc, read_table, to_ipc, write_ipc
from sana_pipe.data.cache.snapshot_lists import ENTRIES, EntryList, publish

T = TypeVar("T")
ADOPTED = "adopted"
"""Key in the provenance of a commit from another cache (see `cache.adopt`)."""


def by(count: int, entries: Iterable[T]) -> Iterator[list[T]]:
    """Entries in lists of `count`."""
    entries = iter(entries)
    while some := list(islice(entries, count)):
        yield some


@dataclass(frozen=True)
class RecordReject:
    """A record that a unit could not make. retry: the cause may be temporary (a file was missing or had changed)."""

    key: str
    item: str
    reason: str
    retry: bool = False


@dataclass(frozen=True)
class Commit:
    """The result of one unit. shard: None if every record was rejected."""

    unit: str
    shard: str | None
    bytes: int
    records: int
    table: str | None
    rejects: tuple[RecordReject, ...]
    provenance: dict[str, Any]

    def body(self) -> dict[str, Any]:
        return {**vars(self), "rejects": [vars(reject) for reject in self.rejects]}

    @classmethod
    def from_body(cls, body: dict[str, Any]) -> Commit:
        return cls(**{**body, "rejects": tuple(RecordReject(**r) for r in body["rejects"])})


_REJECT = {"key": pa.string(), "item": pa.string(), "reason": pa.string(), "retry": pa.bool_()}
COMMITS = pa.schema(
    {
        "unit": pa.string(),
        "shard": pa.string(),
        "bytes": pa.int64(),
        "records": pa.int64(),
        "table": pa.string(),
        "rejects": pa.list_(pa.struct(_REJECT)),
        "provenance": pa.dictionary(pa.int32(), pa.string()),
    }
)
"""`provenance` is canonical JSON; equal ones are in the table once."""


class Commits(EntryList[Commit]):
    """The commits of a segment, each made when it is asked for. Equal provenance is one object."""

    @staticmethod
    def entries(rows: pa.Table) -> Iterator[Commit]:
        known: dict[str, dict[str, Any]] = {}
        for row in rows.to_pylist():
            if (made_by := row["provenance"]) not in known:
                known[made_by] = json.loads(made_by)
            yield Commit.from_body({**row, "provenance": known[made_by]})

    @staticmethod
    def table_of(commits: Iterable[Commit]) -> pa.Table:
        """The table of a list of commits."""
        schema = pa.schema([*COMMITS][:-1])
        provenance, numbers, parts = dict[bytes, int](), list[pa.Array](), [schema.empty_table()]
        for some in by(ENTRIES, commits):
            parts.append(pa.Table.from_pylist([commit.body() for commit in some], schema))
            made_by = (layout.canonical(commit.provenance) for commit in some)
            numbers.append(pa.array([provenance.setdefault(text, len(provenance)) for text in made_by], pa.int32()))
        indices = pa.concat_arrays([pa.array([], pa.int32()), *numbers])
        column = pa.DictionaryArray.from_arrays(indices, pa.array([text.decode() for text in provenance], pa.string()))
        return pa.concat_tables(parts).append_column(COMMITS.field("provenance"), column)


def commit_of(
    files: Files,
    unit: str,
    shard: tuple[str, int, pa.Table],
    rejects: Iterable[RecordReject] = (),
    provenance: Mapping[str, Any] | None = None,
) -> Commit:
    """The commit of a shard whose file is written; writes the table of its records. shard: (digest, bytes, records), as
    `ShardWriter.finish` returns them."""
    name, size, records = shard
    data = to_ipc(records)
    table = layout.content_digest(data)
    if not files.put(Paths.table(table, "arrow"), data):
        files.put_content(data, "tables", "arrow")
    return Commit(unit, name, size, records.num_rows, table, tuple(rejects), dict(provenance or {}))


def publish_commit(files: Files, encoding: str, plan: int, commit: Commit) -> bool:
    """Make a unit's shard visible. Returns False if the unit has a commit already; the new shard stays invisible."""
    return files.put(Paths.unit(encoding, plan, commit.unit), layout.seal(commit.body()))


def adopted_unit(encoding: str, shard: str) -> str:
    """The id of the unit for an adopted shard. It depends on the shard, because forks of a cache may have different
    results of the same unit."""
    return layout.digest("adopted", encoding, shard).hex()


def committed(files: Files, encoding: str, plan: int) -> set[str]:
    """The committed units of a plan."""
    if files.exists(Paths.segment(encoding, plan)):
        listed = Commits.read(files, files.document(Paths.segment(encoding, plan))["commits"])
        return set(listed.table["unit"].to_pylist())
    return {PurePosixPath(name).stem for name in files.unit_names(Paths.units(encoding, plan))}


def commits(files: Files, encoding: str, plan: int) -> list[Commit]:
    """Commits of a plan, sorted by unit: from its segment if there is one, else from its unit documents."""
    return list(each_commit(files, encoding, plan))


def each_commit(files: Files, encoding: str, plan: int) -> Iterator[Commit]:
    """`commits`, one at a time: some plans have 10^5."""
    return _commits(files, encoding, plan)[1]


def _commits(files: Files, encoding: str, plan: int) -> tuple[str | None, Iterator[Commit]]:
    """The digest of a plan's merged record table, None without a segment, and its commits as `commits` has them."""
    if files.exists(Paths.segment(encoding, plan)):
        segment = files.document(Paths.segment(encoding, plan))
        return segment["table"], iter(Commits.read(files, segment["commits"]))
    return None, map(Commit.from_body, files.documents(files.unit_names(Paths.units(encoding, plan))))


def merge(files: Files, encoding: str, plan: int, units: Iterable[str]) -> bool:
    """Write the segment of a plan once all its units are committed. Every process writes the same bytes.

    Returns:
        True if the plan has a segment afterwards.
    """
    if files.exists(Paths.segment(encoding, plan)):
        return True
    if committed(files, encoding, plan) != set(units):
        return False
    listed = Commits.table_of(each_commit(files, encoding, plan))
    digest, rows = merged(files, encoding, Commits.entries_of(listed))
    body = {"encoding": encoding, "plan": plan, "table": digest, "records": rows}
    body["commits"] = publish(files, listed).values()
    files.put(Paths.segment(encoding, plan), layout.seal(body))
    return True


def merged(files: Files, encoding: str, done: Iterable[Commit]) -> tuple[str, int]:
    """Publish the merged record table of commits; returns its digest and its rows."""
    whole = whole_table(files, encoding, done)
    return files.put_table(partial(write_ipc, whole), "arrow"), whole.num_rows


def whole_table(files: Files, encoding: str, done: Iterable[Commit]) -> pa.Table:
    """The merged record table of commits, in one piece; a large table is in temporary files."""
    schema, shards = records_schema(encoding.partition("-")[0]), dict[str, int]()

    def parts() -> Iterator[dict[str, np.ndarray]]:
        for commit in done:
            if commit.table and len(table := _unit_table(files, encoding, commit)):
                assert commit.shard is not None
                columns = {name: to_numpy(table.column(name)) for name in schema.names}
                yield {**columns, "shard": np.full(len(table), shards.setdefault(commit.shard, len(shards)))}

    columns = files.scratch.arrays(parts(), {**{field.name: _dtype(field.type) for field in schema}, "shard": np.int32})
    shard = pa.DictionaryArray.from_arrays(columns.pop("shard"), pa.array(list(shards), pa.string()))
    return pa.table([to_column(values) for values in columns.values()], schema=schema).append_column("shard", shard)


def _record_table(files: Files, digest: str, rebuild: Callable[[], pa.Table]) -> pa.Table:
    """A record table. A missing or damaged table is rebuilt, and published if `files.repairs`.

    Raises:
        IntegrityError: the rebuilt table has another digest.
    """
    name = Paths.table(digest, "arrow")
    try:
        return from_ipc(files.mapped(name, digest), files.where(name))
    except IntegrityError:
        try:
            table = rebuild()
        except (IntegrityError, OSError):
            table = None
        data = b"" if table is None else to_ipc(table)
        if layout.content_digest(data) != digest:
            raise
        if files.repairs:
            files.put_content(data, "tables", "arrow")
        return from_ipc(data, files.where(name))


def record_table(files: Files, commit: Commit) -> pa.Table:
    """The table of a commit's records, of an encoding or a pack.

    Raises:
        IntegrityError: it is missing or damaged.
    """
    assert commit.table is not None
    name = Paths.table(commit.table, "arrow")
    return from_ipc(files.mapped(name, commit.table), files.where(name))


def _unit_table(files: Files, encoding: str, commit: Commit) -> pa.Table:
    assert commit.table is not None
    assert commit.shard is not None
    shard = Paths.shard(encoding, commit.shard)
    return _record_table(files, commit.table, lambda: read_table(files, shard))


def missing_shards(files: Files, folder: str, shards: Sequence[str], sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    """(n,) bool: which shards below a folder of `shards/` are missing or have another size in bytes; one listing."""
    wanted = zip((Paths.shard(folder, name) for name in shards), sizes, strict=True)
    return np.fromiter((actual != size for _, size, actual in files.sized(wanted)), bool)


@dataclass(frozen=True)
class _CommittedPlan:
    """The part of a plan's commits that an index needs; with their provenance they would be several times as large.

    Attributes:
        shards: columns of their names. bytes: (n,) int64 of each.
        table: digest of the merged record table; None without a segment.
        unmerged: without a segment the commits with a shard, without their rejects and provenance.
    """

    number: int
    is_adopted: bool
    shards: list[pa.Array]
    bytes: np.ndarray
    rejects: list[RecordReject]
    table: str | None
    unmerged: list[Commit]

    @classmethod
    def read(cls, files: Files, encoding: str, number: int) -> _CommittedPlan:
        shards, sizes = list[pa.Array](), [np.empty(0, np.int64)]
        rejects, unmerged, adopted = list[RecordReject](), list[Commit](), set[bool]()
        table, done = _commits(files, encoding, number)
        for some in by(BATCH, done):
            adopted |= {ADOPTED in commit.provenance for commit in some}
            rejects += [reject for commit in some for reject in commit.rejects]
            with_shard = [commit for commit in some if commit.shard is not None]
            shards.append(pa.array([commit.shard for commit in with_shard], pa.string()))
            sizes.append(np.array([commit.bytes for commit in with_shard], np.int64))
            if table is None:
                unmerged += [replace(commit, rejects=(), provenance={}) for commit in with_shard]
        return cls(number, adopted == {True}, shards, np.concatenate(sizes), rejects, table, unmerged)


class RecordIndex:
    """Every record of one encoding. Keys are found by binary search over sorted 16-byte keys.

    Attributes:
        shards: names of the shards; the column `shard` has positions in this list.
        bytes: size of each shard in bytes.
        columns: numpy columns of the record table, sorted by key, and `shard` (uint32).
        rejects: every reject of every unit.
        caches: for each shard, the position of its cache (see `union`); otherwise 0.
        lost: for each shard, whether it is missing or has another size than its commit says (one listing at first use).
    """

    def __init__(self, files: Files, encoding: str, plans: list[int]):
        self.encoding, self.kind, self._files = encoding, encoding.partition("-")[0], files
        every = self._by_precedence(plans)
        self.rejects = [reject for plan in every for reject in plan.rejects]
        self.shards: list[str] = [name for plan in every for chunk in plan.shards for name in chunk.to_pylist()]
        self.bytes = np.concatenate([np.empty(0, np.int64), *(plan.bytes for plan in every)])
        self.caches = np.zeros(len(self.shards), np.int32)
        starts = np.cumsum([0, *(len(plan.bytes) for plan in every)]).tolist()
        self._fill(part for plan, start in zip(every, starts, strict=False) for part in self._tables(plan, start))

    def _by_precedence(self, plans: list[int]) -> list[_CommittedPlan]:
        """The plans, the lowest precedence first: adopted plans in reverse order, then the others."""
        every = [_CommittedPlan.read(self._files, self.encoding, plan) for plan in plans]
        return [plan for plan in every[::-1] if plan.is_adopted] + [plan for plan in every if not plan.is_adopted]

    def _tables(self, plan: _CommittedPlan, start: int) -> Iterator[pa.Table]:
        """The records of a plan, some at a time: of the merged table if it has a segment. The column `shard` has
        positions (uint32), the plan's from `start` on."""

        def merge(done: Iterable[Commit]) -> pa.Table:
            return whole_table(self._files, self.encoding, done)

        if plan.table is None:
            table = merge(plan.unmerged)
        else:
            commits = partial(each_commit, self._files, self.encoding, plan.number)
            table = _record_table(self._files, plan.table, lambda: merge(commits()))
        return _numbered(table, pa.concat_arrays([pa.array([], pa.string()), *plan.shards]), start)

    @cached_property
    def lost(self) -> np.ndarray:
        return missing_shards(self._files, self.encoding, self.shards, self.bytes)

    @cached_property
    def outcomes(self) -> dict[str, RecordReject]:
        """Key (hex) -> its reject; of several the one of the latest plan, which knew the earlier ones."""
        return {reject.key: reject for reject in self.rejects}

    def _fill(self, batches: Iterable[pa.Table]) -> None:
        """Take over records, the lowest precedence first: of equal keys the last stays."""
        scratch = self._files.scratch
        schema = records_schema(self.kind).append(pa.field("shard", pa.uint32()))

        def parts() -> Iterator[dict[str, np.ndarray]]:
            for part in scratch.sorted_by_key(batches):
                columns = {field.name: to_numpy(part.column(field.name)) for field in schema}
                last = np.append(is_first(columns["key"])[1:], True)
                if not last.all():
                    columns = {name: values[last] for name, values in columns.items()}
                high, low = halves(columns["key"])
                yield {**columns, "high": high, "low": low}

        dtypes: dict[str, Any] = {field.name: _dtype(field.type) for field in schema}
        columns = scratch.arrays(parts(), {**dtypes, "high": np.uint64, "low": np.uint64})
        self._sorted = SortedKeys(columns.pop("high"), columns.pop("low"))
        self.columns: dict[str, np.ndarray] = columns
        self.keys = columns["key"]

    @classmethod
    def union(cls, indexes: list[RecordIndex]) -> RecordIndex:
        """One index over the indexes of several caches for the same encoding.

        For a key in several caches the first cache wins, unless its shard is lost. `caches` has the position of each
        shard's index.
        """
        if len(indexes) == 1:
            return indexes[0]
        union, local = cls.__new__(cls), indexes[0]
        union.encoding, union.kind, union._files = local.encoding, local.kind, local._files
        shards, sizes, caches = list[str](), list[int](), list[int]()
        others = [
            (number, other, np.ones(len(other.shards), bool)) for number, other in enumerate(indexes[1:], start=1)
        ]
        by_precedence = [(0, local, ~local.lost), *others, (0, local, local.lost)]
        position: dict[str, int] = {}
        for number, part, usable in by_precedence:
            for i in np.flatnonzero(usable).tolist():
                if (name := part.shards[i]) not in position:
                    position[name] = len(shards)
                    shards.append(name)
                    sizes.append(int(part.bytes[i]))
                    caches.append(number)
        union.shards, union.bytes, union.caches = shards, np.array(sizes, np.int64), np.array(caches, np.int32)
        union.rejects = [reject for part in indexes for reject in part.rejects]

        def batches() -> Iterator[pa.Table]:
            for _, part, usable in by_precedence[::-1]:  # `_fill` takes the last of equal keys
                positions = np.array([position[name] for name in part.shards], np.uint32)
                for start in range(0, len(part), BATCH):
                    columns = {name: values[start : start + BATCH] for name, values in part.columns.items()}
                    rows = usable[columns["shard"]]
                    columns["shard"] = positions[columns["shard"]]
                    yield pa.table({name: to_column(values[rows]) for name, values in columns.items()})

        union._fill(batches())
        return union

    def __len__(self) -> int:
        return len(self.keys)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Rows of 16-byte keys (dtype S16, see `as_keys`), -1 where absent."""
        return self._sorted.find(keys)

    def present(self, keys: np.ndarray) -> np.ndarray:
        """(n,) bool: which records exist in a shard that is not lost. keys: as in `find`."""
        rows = self.find(keys)
        present = rows >= 0
        present[present] = ~self.lost[self.columns["shard"][rows[present]]]
        return present

    def has(self, key: bytes) -> bool:
        """Return whether a record exists in a shard that is not lost."""
        return bool(self.present(as_keys([key]))[0])


def _dtype(kind: pa.DataType) -> Any:
    return "S16" if pa.types.is_fixed_size_binary(kind) else pa.array([], kind).to_numpy(zero_copy_only=False).dtype


def _numbered(table: pa.Table, shards: pa.Array, start: int) -> Iterator[pa.Table]:
    """The rows of a record table, with the names of shards (its last column, a dictionary) as uint32 positions.
    shards: names, from position `start` on."""
    if not table.num_rows:
        return
    table = table.unify_dictionaries()
    names = table.column("shard").chunk(0).dictionary.cast(pa.string())
    found = pc.index_in(names, value_set=shards[::-1])  # of equal names the last
    positions = (start + len(shards) - 1 - found.to_numpy()).astype(np.uint32)
    for part in arrow.batches(table):
        rows = [positions[chunk.indices.to_numpy(zero_copy_only=False)] for chunk in part.column("shard").chunks]
        yield part.set_column(part.num_columns - 1, "shard", pa.chunked_array([pa.array(some) for some in rows]))
