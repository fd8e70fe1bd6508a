"""The last scan of a source: rows of unchanged parts and items are used again, and what is missing is counted.

The rows of a part (a tar, a parquet file) with an unchanged stamp are used without listing it. In other parts an item
with unchanged size and mtime keeps its digest, so a second scan reads no pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sana_pipe.base.errors import IntegrityError, UserError
from sana_pipe.data.cache import arrow
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.item_rows import ItemRows
from sana_pipe.data.cache.keys import fixed
from sana_pipe.data.cache.scan_table import SCAN
from sana_pipe.data.images import decoding
from sana_pipe.data.sources.controls_and_masks import remedy
from sana_pipe.data.sources.reject_kinds import Kinds
from sana_pipe.data.sources.source import Source

UNREADABLE = "unreadable"
"""The beginnings of reasons of rejects that come from a failed read and not from the bytes."""

RowsByItem = dict[str, dict[str, Any]]


class LastScan:
    """The last scan of a source in a cache, if there is one.

    Args:
        rehash: do not trust size and mtime, so that no row is used again.

    Attributes:
        document: of the scan.
    """

    def __init__(self, source: Source, name: str, cache: Cache | None, rehash: bool):
        self._source, self._cache, self._rehash = source, cache, rehash
        self.document = cache.last_scan(name) if cache is not None else None

    @cached_property
    def table(self) -> pa.Table | None:
        """Return its table, if it is trusted."""
        return None if self._rehash else self._read()

    def parts(self, alone: bool) -> dict[str, tuple[str, int, int]]:
        """Part -> (stamp, first row, rows), for parts whose rows can be used again if the stamp is unchanged.

        Args:
            alone: this process needs the rows, too; one of several seldom does.
        """
        few = ["part", "stamp", "reject"]
        table = self.table if alone or self._rehash else self._read(few)
        return {} if table is None else _runs(table)

    def find(self, items: list[str]) -> RowsByItem:
        """Rows by item. An item that was never read has none. Several threads may call it after a first call."""
        if self._known is None or not items:
            return {}
        rows = self._known.find(items)
        picked = arrow.pick_rows(self._known.table, np.unique(rows[rows >= 0]))
        return {row["item"]: row for some in picked for row in some.to_pylist()}

    @cached_property
    def _known(self) -> ItemRows | None:
        """The rows that stay as they are while their item is unchanged."""
        last = self.table

        # An item that was rejected for its captions was never read. Bad bytes stay bad while unchanged, except if a
        # limit was the reason, because the limit may be higher now.
        def read(last: pa.Table) -> Iterator[pa.Table]:
            for batch in arrow.batches(last):
                limited = pc.fill_null(pc.match_substring(batch.column("reject"), decoding.LIMIT), False)
                yield batch.filter(pc.and_(pc.is_valid(batch.column("digest")), pc.invert(limited)))

        scratch = self._source.scratch
        return None if last is None else ItemRows(scratch.table(SCAN, read(last)), scratch)

    def _read(self, columns: list[str] | None = None) -> pa.Table | None:
        if self._cache is None or self.document is None:
            return None
        return _table(self._cache, self.document, columns)


def _table(cache: Cache, scan: dict[str, Any], columns: list[str] | None = None) -> pa.Table | None:
    """The table of a scan; None if it is lost or damaged, so that every item is read again."""
    try:
        return cache.table(scan["table"], columns)
    except IntegrityError as error:
        click.echo(f"{error.what}; the source is read again from the start")
        return None


def _runs(table: pa.Table) -> dict[str, tuple[str, int, int]]:
    """Part -> (stamp, first row, rows), for parts whose rows can be used again as long as the stamp is unchanged."""
    again: set[str] = set()
    runs: list[tuple[str | None, str | None, int]] = []  # part, stamp, first row
    first = 0
    for batch in arrow.batches(table.select(["part", "stamp", "reject"])):
        rejects = batch.filter(pc.is_valid(batch.column("reject"))).to_pylist()
        again |= {r["part"] for r in rejects if r["reject"].startswith(UNREADABLE) or is_limited(r["reject"])}
        ends = [pc.run_end_encode(batch.column(c).combine_chunks()).run_ends.to_numpy() for c in ("part", "stamp")]
        for start in sorted({0, *ends[0].tolist()[:-1], *ends[1].tolist()[:-1]}):
            part, stamp = batch.column("part")[start].as_py(), batch.column("stamp")[start].as_py()
            if not runs or runs[-1][:2] != (part, stamp):
                runs.append((part, stamp, first + start))
        first += len(batch)
    starts = [*(start for _, _, start in runs), first]
    return {
        part: (stamp, start, end - start)
        for (part, stamp, start), end in zip(runs, starts[1:], strict=True)
        if part is not None and stamp is not None and part not in again
    }


def unchanged_row(row: dict[str, Any] | None, size: int, mtime: int) -> dict[str, Any] | None:
    """The row of the last scan, if size and mtime are unchanged."""
    return row if row is not None and (size, mtime) == (row["size"], row["mtime_ns"]) else None


def is_limited(reject: str) -> bool:
    """Return whether a higher limit would let the picture in."""
    return decoding.LIMIT in reject


def count_missing(cache: Cache, source: Source, table: pa.Table, most: float) -> int:
    """Return how many usable pictures of the last scan are missing in `table`.

    A picture is missing if neither its item nor its bytes are among the readable rows. A picture that a setting leaves
    out is not missing.

    Args:
        most: the largest share of the pictures of the last scan that may be missing, from 0 to 1.

    Raises:
        UserError: more are missing.
    """
    document = cache.last_scan(source.name)
    if document is None or (last := _table(cache, document)) is None:
        return 0
    before = last.column("reject").null_count
    if last.equals(table):
        return 0
    scratch = cache.files.scratch
    now = scratch.table(table.schema, map(_readable, arrow.batches(table)))
    rows = ItemRows(now, scratch)

    def missing() -> Iterator[pa.Table]:
        for batch in arrow.batches(last):
            usable = batch.filter(pc.is_null(batch.column("reject")))
            yield usable.filter(pa.array(rows.find(usable.column("item").to_pylist()) < 0))

    lost = scratch.table(SCAN, missing())
    lost = lost.filter(pa.array(scratch.absent(_digests(lost), _digests(now), len(lost))))
    if len(lost) > most * before:
        here = ItemRows(table, scratch)

        def reasons() -> Iterator[tuple[str, str]]:
            for item in (item for batch in arrow.batches(lost) for item in batch.column("item").to_pylist()):
                row = int(here.find([item])[0])
                yield item, (table.column("reject")[row].as_py() if row >= 0 else None) or "no longer exists"

        kinds, name = Kinds.of(reasons()), source.name
        lacking = remedy(source.controls_and_masks, kinds.counts)
        another = "" if lacking else "; if this is another data set: --source-name NAME"
        raise UserError(
            f"{len(lost)} of the {before} pictures of source {name!r} (last read from {document['root']}) are missing",
            expected=f"at most {most:.0%} (encode.max_shrink)",
            found="\n".join(["the reasons, with examples:", *kinds.lines()]),
            fix=f"{lacking or 'put them back'}; if they were removed on purpose: --set encode.max_shrink=1{another}",
        )
    return len(lost)


def _readable(table: pa.Table) -> pa.Table:
    return table.filter(pc.or_(pc.is_null(table.column("reject")), pc.is_valid(table.column("width"))))


def _digests(table: pa.Table) -> Iterator[np.ndarray]:
    return (fixed(batch.column("digest")) for batch in arrow.batches(table.select(["digest"])))
