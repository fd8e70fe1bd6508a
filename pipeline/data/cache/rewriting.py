"""Take records out of an encoding: shards, plans and commits without them; every other record keeps its bytes.

A shard with such a record gets a successor with the others, for the same unit. Units keep their ids, so a shard that a
kill leaves behind is a harmless leftover. New shards are written first, snapshots are made on them, and only then
`replace_documents` puts plans and commits in place: until then all that a cache names is there.
Price: a changed batch of a unit may give other bytes when one of its records is encoded again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sana_pipe.data.cache import arrow, audit, index, layout, shard
from sana_pipe.data.cache.cache import Cache, Unit, Units
from sana_pipe.data.cache.keys import SortedKeys, as_keys, binary, fixed, halves
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.cache.snapshot_lists import publish


@dataclass(frozen=True)
class Successor:
    """The successor of a shard.

    Attributes:
        shard: its name; None if no record is left.
        bytes: its size.
        records: its record table.
    """

    shard: str | None
    bytes: int
    records: pa.Table

    def places(self, keys: np.ndarray, column: str = "offset") -> np.ndarray:
        """A column of the record table, (n,) uint64, for keys (n,) S16 that it has."""
        stored = fixed(self.records.column("key"))
        high, low = halves(stored)
        order = np.lexsort((low, high))
        rows = order[SortedKeys(high[order], low[order]).find(keys)]
        return self.records.column(column).to_numpy()[rows].astype(np.uint64)


class Rewriter:
    """Takes records out of one encoding of a cache.

    Args:
        encoding: its name.
        keys: of the records, 16 bytes each.

    Attributes:
        successors: shard -> what takes its place.
    """

    def __init__(self, cache: Cache, encoding: str, keys: list[bytes]):
        self.cache, self.name = cache, encoding
        self.keys = binary(as_keys(keys))
        self.hex = {key.hex() for key in keys}
        self.successors: dict[str, Successor] = {}
        self._commits: dict[str, index.Commit | None] = {}

    def write_shards(self) -> None:
        """Write the successors of all shards that hold one of the records. Nothing names them yet.

        Raises:
            IntegrityError: another record of such a shard is damaged.
        """
        for number in self.cache.files.numbers(Paths.plans(self.name)):
            for commit in index.each_commit(self.cache.files, self.name, number):
                if commit.table is None or commit.shard is None or commit.shard in self.successors:
                    continue
                rows = index.record_table(self.cache.files, commit)
                goes = self._goes(rows)
                if pc.any(goes).as_py():
                    self._succeed(commit, rows.filter(pc.invert(goes)))

    def _goes(self, rows: pa.Table) -> pa.ChunkedArray:
        return pc.is_in(rows.column("key"), value_set=self.keys)

    def _succeed(self, commit: index.Commit, rows: pa.Table) -> None:
        """Write the successor of a commit's shard. rows: of its record table, those that stay."""
        files, old = self.cache.files, str(commit.shard)
        left = [reject for reject in commit.rejects if reject.key not in self.hex]
        if not len(rows):
            self.successors[old] = Successor(None, 0, rows)
            empty = replace(commit, shard=None, bytes=0, records=0, table=None, rejects=tuple(left))
            self._commits[old] = empty if left else None
            return
        reader = shard.ShardReader(files, self.name, ranged=True)
        head = shard.read_head(files, Paths.shard(self.name, old))  # an adopted shard names another cache's unit
        unit = str(head["unit"])
        with shard.ShardWriter(files, self.cache.encoding(self.name), unit) as writer:
            for row in rows.to_pylist():
                audit.copy_record(writer, reader, old, row)
            made = writer.finish()
        self.successors[old] = Successor(*made)
        self._commits[old] = index.commit_of(files, commit.unit, made, left, commit.provenance)

    # ------------------------------------------------------------ documents

    def replace_documents(self) -> None:
        """Put the plans and the commits of what is left in place. `write_shards` must have ended."""
        for number in self.cache.files.numbers(Paths.plans(self.name)):
            self._replace_plan(number)
            self._replace_commits(number)

    def _replace_plan(self, number: int) -> None:
        cache, name = self.cache, Paths.numbered(Paths.plans(self.name), number)
        body = cache.files.document(name)
        table = cache.table(body["table"])
        stays = np.concatenate([np.empty(0, bool), *(self._stays(batch) for batch in arrow.batches(table))])
        if stays.all():
            return
        before = np.concatenate([[0], np.cumsum(stays)]).tolist()
        units = [
            Unit(unit.unit, before[unit.start], before[unit.start + unit.count] - before[unit.start], unit.batch)
            for unit in cache.plan(self.name, number).units
        ]
        rows = (batch.filter(pa.array(self._stays(batch))) for batch in arrow.batches(table))
        body["table"] = cache.put_table(cache.files.scratch.table(table.schema, rows))
        body["units"] = publish(cache.files, Units.table_of(unit for unit in units if unit.count)).values()
        cache.files.replace_document(name, layout.seal(body))

    def _stays(self, batch: pa.Table) -> np.ndarray:
        return ~self._goes(batch).to_numpy()

    def _replace_commits(self, number: int) -> None:
        files, name = self.cache.files, Paths.segment(self.name, number)
        if files.exists(name):
            commits = list(index.each_commit(files, self.name, number))
            left = list(self._left(commits))
            if left != commits:
                listed = index.Commits.table_of(left)
                table, rows = index.merged(files, self.name, left)
                body = {"encoding": self.name, "plan": number, "table": table, "records": rows}
                body["commits"] = publish(files, listed).values()
                files.replace_document(name, layout.seal(body))
        for path in files.unit_names(Paths.units(self.name, number)):  # also those that the segment replaced
            commit = index.Commit.from_body(files.document(path))
            stays = list(self._left([commit]))
            if not stays:
                files.remove(path)
            elif stays != [commit]:
                files.replace_document(path, layout.seal(stays[0].body()))

    def _left(self, commits: list[index.Commit]) -> Iterator[index.Commit]:
        """The commits of what is left of some units."""
        for commit in commits:
            if commit.shard in self.successors:
                if (successor := self._commits[commit.shard]) is not None:
                    yield successor
                continue
            rejects = tuple(reject for reject in commit.rejects if reject.key not in self.hex)
            if commit.shard is not None or rejects:
                yield commit if len(rejects) == len(commit.rejects) else replace(commit, rejects=rejects)
