"""Commits and the index: which records a cache holds, and where.

What: a unit's commit document (`units/<recipe>/<plan>/<unit>.json`) is the only thing that makes its shard visible.
When every unit of a plan is committed, one segment document takes their place, so that opening a cache reads one
document per finished plan and never lists a folder per unit. `RecordIndex` answers "where is this key".
Why: a crash leaves only invisible files; a doubled or late worker publishes a name that is taken: nothing changes.
Price: a record may stand in two shards (a repair); the later plan wins, so an index is built in plan order. Plans
that were adopted from another cache come before all others, the first of them last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.cache import layout
from pipeline.cache.files import Files
from pipeline.cache.layout import Paths
from pipeline.cache.shard import RECORDS, from_ipc, read_table, to_ipc
from pipeline.errors import IntegrityError

ADOPTED = "adopted"
"""Key in the provenance of a commit that came from another cache (see `pipeline.cache.adopt`)."""


@dataclass(frozen=True)
class Reject:
    """A record that a unit could not make. `retry` marks causes that may pass (a file that was gone or had changed)."""

    key: str
    item: str
    reason: str
    retry: bool = False


@dataclass(frozen=True)
class Commit:
    """What became of one unit. `shard` is None when every record was rejected."""

    unit: str
    shard: str | None
    bytes: int
    records: int
    table: str | None
    rejects: tuple[Reject, ...]
    provenance: dict[str, Any]

    def body(self) -> dict[str, Any]:
        return {
            "unit": self.unit,
            "shard": self.shard,
            "bytes": self.bytes,
            "records": self.records,
            "table": self.table,
            "rejects": [vars(r) for r in self.rejects],
            "provenance": self.provenance,
        }

    @classmethod
    def from_body(cls, body: dict[str, Any]) -> Commit:
        return cls(**{**body, "rejects": tuple(Reject(**r) for r in body["rejects"])})


def publish_commit(files: Files, recipe: str, plan: int, commit: Commit) -> bool:
    """Make a unit's shard visible. Returns False if the unit was committed before (ours then stays invisible)."""
    return files.put(Paths.unit(recipe, plan, commit.unit), layout.seal(commit.body()))


def adopted_unit(recipe: str, shard: str) -> str:
    """The id of the unit that a shard of another cache becomes here: a fork of that cache may have another outcome of
    the unit that it came from."""
    return layout.digest("adopted", recipe, shard).hex()


def committed(files: Files, recipe: str, plan: int) -> set[str]:
    """Units of a plan that are done."""
    if files.exists(Paths.segment(recipe, plan)):
        return {c["unit"] for c in files.document(Paths.segment(recipe, plan))["commits"]}
    return {name[:-5] for name in files.names(Paths.units(recipe, plan)) if name.endswith(".json")}


def commits(files: Files, recipe: str, plan: int) -> list[Commit]:
    """Commits of a plan, sorted by unit: out of its segment if there is one, else out of its unit documents."""
    if files.exists(Paths.segment(recipe, plan)):
        return [Commit.from_body(body) for body in files.document(Paths.segment(recipe, plan))["commits"]]
    names = [Paths.unit(recipe, plan, unit) for unit in sorted(committed(files, recipe, plan))]
    return [Commit.from_body(body) for body in files.documents(names)]


def table_bytes(table: pa.Table) -> bytes:
    return to_ipc(table)


def merge(files: Files, recipe: str, plan: int, units: list[str]) -> bool:
    """Write the segment of a plan once all its units are committed. The same bytes whoever writes it.

    Returns:
        True if the plan has a segment afterwards.
    """
    if files.exists(Paths.segment(recipe, plan)):
        return True
    if committed(files, recipe, plan) != set(units):
        return False
    done = commits(files, recipe, plan)
    digest, rows = merged(files, recipe, done)
    body = {"recipe": recipe, "plan": plan, "table": digest, "records": rows}
    files.put(Paths.segment(recipe, plan), layout.seal({**body, "commits": [commit.body() for commit in done]}))
    return True


def merged(files: Files, recipe: str, done: list[Commit]) -> tuple[str, int]:
    """Publish the merged record table of commits; returns its digest and its rows."""
    whole = whole_table(files, recipe, done)
    return files.put_content(to_ipc(whole), "tables", "arrow"), whole.num_rows


def whole_table(files: Files, recipe: str, done: list[Commit]) -> pa.Table:
    """The merged record table of commits."""
    tables = [_unit_table(files, recipe, commit) for commit in done if commit.table]
    return pa.concat_tables(tables) if tables else _with_shard(RECORDS[recipe.partition("-")[0]].empty_table(), "")


def _record_table(files: Files, digest: str, again: Callable[[], pa.Table]) -> pa.Table:
    """A record table; one that is missing or damaged is made again, if its bytes come out the same, and published if
    `files.repairs`.

    Raises:
        IntegrityError: it does not.
    """
    name = Paths.table(digest, "arrow")
    try:
        return from_ipc(files.content(name, digest), files.where(name))
    except IntegrityError:
        try:
            table = again()
        except (IntegrityError, OSError):
            table = None
        data = b"" if table is None else to_ipc(table)
        if layout.content_digest(data) != digest:
            raise
        if files.repairs:
            files.put_content(data, "tables", "arrow")
        return from_ipc(data, files.where(name))


def _with_shard(table: pa.Table, shard: str) -> pa.Table:
    return table.append_column("shard", pa.array([shard] * table.num_rows, pa.string()).dictionary_encode())


def _unit_table(files: Files, recipe: str, commit: Commit) -> pa.Table:
    assert commit.table is not None
    assert commit.shard is not None
    kind, name = recipe.partition("-")[0], Paths.table(commit.table, "arrow")
    where = Paths.shard(recipe, commit.shard)
    table = _record_table(files, commit.table, lambda: read_table(files, where)[1])
    if table.schema != RECORDS[kind] or table.num_rows != commit.records:
        raise IntegrityError(
            f"{files.where(name)}: is not the record table of unit {commit.unit}",
            expected=f"{commit.records} {kind} records",
            found=f"{table.num_rows} rows of {table.schema.names}",
        )
    return _with_shard(table, commit.shard)


def lost(files: Files, folder: str, shards: list[str], sizes: list[int]) -> np.ndarray:
    """Which shards below a folder of `shards/` are missing or of another size in bytes: one listing."""
    names = [Paths.shard(folder, name) for name in shards]
    found = files.sizes(names)
    return np.array([found.get(name) != size for name, size in zip(names, sizes, strict=True)], bool)


class RecordIndex:
    """Every record of one recipe. Keys are looked up by binary search over sorted 16-byte keys.

    Attributes:
        shards: names of the shards, in the order in which `shard` numbers refer to them.
        bytes: size in bytes of each of `shards`.
        columns: numpy columns of the record table, sorted by key, and `shard` (uint32).
        rejects: every reject of every unit.
        origin: per shard, which of several caches it is from (see `union`); 0 for all otherwise.
        lost: per shard, whether it is missing or of another size than its commit says (one listing, at first use).
    """

    def __init__(self, files: Files, recipe: str, plans: list[int]):
        self.recipe, self.kind, self._files = recipe, recipe.partition("-")[0], files
        self.rejects: list[Reject] = []
        self.shards: list[str] = []
        self.bytes: list[int] = []
        tables = []
        listed = [(plan, commits(files, recipe, plan)) for plan in plans]
        adopted = [bool(done) and all(ADOPTED in c.provenance for c in done) for _, done in listed]
        order = [e for e, taken in zip(listed[::-1], adopted[::-1], strict=True) if taken]
        for plan, done in order + [e for e, taken in zip(listed, adopted, strict=True) if not taken]:
            for commit in done:
                self.rejects.extend(commit.rejects)
                if commit.shard is not None:
                    self.shards.append(commit.shard)
                    self.bytes.append(commit.bytes)
            if files.exists(Paths.segment(recipe, plan)):
                digest = files.document(Paths.segment(recipe, plan))["table"]
                tables.append(_record_table(files, digest, partial(whole_table, files, recipe, done)))
                if missing := {*RECORDS[self.kind].names, "shard"} - set(tables[-1].column_names):
                    raise IntegrityError(
                        f"{files.where(Paths.segment(recipe, plan))}: is not of {self.kind} records",
                        expected=", ".join(sorted(missing)),
                        found=", ".join(tables[-1].column_names),
                        fix=layout.REPAIR,
                    )
            else:
                tables.extend(_unit_table(files, recipe, commit) for commit in done if commit.table)
        schema = RECORDS[self.kind]
        whole = pa.concat_tables([t.select(schema.names) for t in tables]) if tables else schema.empty_table()
        self.origin = [0] * len(self.shards)
        number = {name: i for i, name in enumerate(self.shards)}
        shard = np.concatenate([np.empty(0, np.uint32), *(_numbers(t.column("shard"), number) for t in tables)])
        columns = {"shard": shard}
        for name in schema.names:
            column = whole.column(name)
            columns[name] = fixed(column) if pa.types.is_fixed_size_binary(column.type) else column.to_numpy()
        self._fill(columns)

    @cached_property
    def lost(self) -> np.ndarray:
        return lost(self._files, self.recipe, self.shards, self.bytes)

    def _fill(self, columns: dict[str, np.ndarray]) -> None:
        high, low = halves(columns["key"])
        # A later plan's record of the same key wins: a stable sort keeps plan order, the last of equals is kept.
        order = np.lexsort((low, high))
        if len(order) > 1:
            high, low = high[order], low[order]
            order = order[np.append((high[1:] != high[:-1]) | (low[1:] != low[:-1]), True)]
        self.columns: dict[str, np.ndarray] = {name: values[order] for name, values in columns.items()}
        self.keys = self.columns["key"]
        self._high, self._low = halves(self.keys)

    @classmethod
    def union(cls, indexes: list[RecordIndex]) -> RecordIndex:
        """One index over several caches' indexes of the same recipe; of a key that several hold the first's counts,
        but the last of all are records of the first whose shard is lost.

        `origin` says for each of its `shards` which of the indexes it is from.
        """
        if len(indexes) == 1:
            return indexes[0]
        whole, here = cls.__new__(cls), indexes[0]
        whole.recipe, whole.kind = here.recipe, here.kind
        whole.shards, whole.bytes, whole.origin, whole.rejects = [], [], [], []
        others = [(at, one, np.ones(len(one.shards), bool)) for at, one in enumerate(indexes[1:], start=1)]
        ranks = [(0, here, ~here.lost), *others, (0, here, here.lost)]
        first: dict[str, int] = {}
        for at, one, counts in ranks:
            for i in np.flatnonzero(counts).tolist():
                if one.shards[i] not in first:
                    first[one.shards[i]] = len(whole.shards)
                    whole.shards.append(one.shards[i])
                    whole.bytes.append(one.bytes[i])
                    whole.origin.append(at)
        whole.rejects = [reject for one in indexes for reject in one.rejects]
        parts = []  # the last of equals is kept
        for _, one, counts in ranks[::-1]:
            number = np.array([first[name] for name in one.shards], np.uint32)
            parts.append((one, number, counts[one.columns["shard"]]))
        columns = {
            name: np.concatenate([one.columns[name][rows] for one, _, rows in parts])
            for name in here.columns
            if name != "shard"
        }
        shards = np.concatenate([number[one.columns["shard"][rows]] for one, number, rows in parts])
        whole._fill({"shard": shards, **columns})
        return whole

    def __len__(self) -> int:
        return len(self.keys)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Rows of 16-byte keys (dtype S16, see `as_keys`), -1 where absent."""
        if not len(self.keys):
            return np.full(len(keys), -1, np.int64)
        high, low = halves(keys)
        order = np.argsort(high)  # neighbours in turn: random probes of a large index miss every cache
        rows = np.empty(len(keys), np.int64)
        rows[order] = np.searchsorted(self._high, high[order])
        last = len(self.keys) - 1
        rows = np.minimum(rows, last)
        while True:  # keys with equal first halves stand one after the other
            on = (self._high[rows] == high) & (self._low[rows] < low) & (rows < last)
            if not on.any():
                break
            rows[on] += 1
        return np.where((self._high[rows] == high) & (self._low[rows] == low), rows, -1)

    def there(self, keys: np.ndarray) -> np.ndarray:
        """(n,) bool: which records are there and their shards, too. keys: as in `find`."""
        rows = self.find(keys)
        there = rows >= 0
        there[there] = ~self.lost[self.columns["shard"][rows[there]]]
        return there

    def has(self, key: bytes) -> bool:
        """Whether a record is there and its shard, too."""
        return bool(self.there(as_keys([key]))[0])


def _numbers(column: pa.ChunkedArray, number: dict[str, int]) -> np.ndarray:
    """Names of shards (a dictionary column) as uint32 numbers."""
    chunks = [np.empty(0, np.uint32)]
    for chunk in column.chunks:
        names = np.array([number[name] for name in chunk.dictionary.to_pylist()], np.uint32)
        chunks.append(names[chunk.indices.to_numpy(zero_copy_only=False)])
    return np.concatenate(chunks)


def halves(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """S16 keys as two uint64 each, which sort as the bytes do, and faster."""
    both = np.ascontiguousarray(keys).view(">u8").reshape(-1, 2).astype(np.uint64)
    return np.ascontiguousarray(both[:, 0]), np.ascontiguousarray(both[:, 1])


def as_keys(keys: list[bytes]) -> np.ndarray:
    """16-byte keys as an array that numpy can sort and compare."""
    return np.frombuffer(b"".join(keys), dtype="S16") if keys else np.empty(0, "S16")


def binary(keys: np.ndarray) -> pa.Array:
    """An S16 array as a fixed_size_binary(16) column; the inverse of `fixed`."""
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), len(keys), [None, pa.py_buffer(keys.tobytes())])


def fixed(column: pa.ChunkedArray | pa.Array) -> np.ndarray:
    """A fixed_size_binary(16) column as a numpy S16 array."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], pa.binary(16))
    if not len(array):
        return np.empty(0, "S16")
    return np.frombuffer(array.buffers()[1], dtype="S16", count=len(array), offset=array.offset * 16)


def key_bytes(value: Any) -> bytes:
    """The 16 bytes of an S16 element (numpy strips trailing zero bytes)."""
    return bytes(value).ljust(16, b"\0")
