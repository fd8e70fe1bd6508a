"""Scan: a table of the items of a source, with digest, size and captions of each, or the reason why it is left out.

Parts with an unchanged stamp are reused (`last_scan`), the rest is cut into fragments: a part with a stamp, or `RUN`
items of a part without. A fragment with new pictures is read by one of the processes (`fragments`); one without is
cheap to check, so every process does it. One process makes the table (`Scan.table`), the others help (`Scan.help`).
Price: a first scan reads every file once, since the digest needs all bytes. Each process lists every part that has no
stamp and asks for the size and time of each file. A single huge tar is read by one process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sana_pipe.base.errors import UserError, escaped
from sana_pipe.data.cache import arrow, layout
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.keys import binary, fixed, is_first, sample_ids
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.cache.scan_table import SCAN
from sana_pipe.data.cache.scratch import Scratch
from sana_pipe.data.cache.withdrawn import withdrawn
from sana_pipe.data.encoding import scan_rows
from sana_pipe.data.encoding.fragments import Fragments, Rows, ScanSuperseded
from sana_pipe.data.encoding.last_scan import LastScan, unchanged_row
from sana_pipe.data.encoding.reading import as_read
from sana_pipe.data.encoding.scan_rows import Look, RowMaker, Settings, Slice, from_bytes, mapped
from sana_pipe.data.sources import detect
from sana_pipe.data.sources.config import DataConfig
from sana_pipe.data.sources.filesystem import Unreadable
from sana_pipe.data.sources.range_prefetch import PARALLEL_REQUESTS
from sana_pipe.data.sources.reject_kinds import Kinds
from sana_pipe.data.sources.source import ListedItems, Source

RUNS_AHEAD = 16
"""Limit on fragments whose files have been looked at before their turn."""

RULE = "fragment-4"
"""Version of the rules that make rows. A version with other rules does not use fragments of this version."""


def scan(source: Source, name: str, cache: Cache | None, **options: Any) -> pa.Table:
    """Read a source's listing and headers; see `begin` for the arguments, and `Scan.table`."""
    while True:
        try:
            with begin(source, name, cache, **options) as this:
                return this.table()
        except ScanSuperseded:
            continue


@contextmanager
def begin(
    source: Source,
    name: str,
    cache: Cache | None,
    *,
    max_pixels: int,
    workers: int,
    rehash: bool,
    progress: Callable[[int, int | None], None],
    refuse: Callable[[int, int], str | None] = lambda height, width: None,
    look: Look = from_bytes,
    fragments: Fragments | None = None,
) -> Iterator[Scan]:
    """Begin a scan.

    Args:
        name: of the source, under which the cache stores its scans.
        cache: has the last scan; None: there is none.
        rehash: do not trust size and mtime.
        progress: called with the number of items done, and the total: None until a part is listed, then an estimate by
            the mean of the listed parts until all are.
        refuse: (height, width) of a readable picture -> why it is left out, or None. Asked in every scan, so that a
            changed policy applies to known rows.
        look: examines a new picture.
        fragments: shares the work and makes it resumable; None: this process does everything, and writes nothing.
    """
    gone = withdrawn(cache) if cache is not None else frozenset[bytes]()
    settings = Settings(max_pixels, rehash, look, progress, lru_cache(1 << 16)(refuse), gone)
    source.scratch = cache.files.scratch if cache is not None else Scratch()
    pool = ThreadPoolExecutor(max(1, workers, PARALLEL_REQUESTS if source.is_remote else 1))
    try:
        yield Scan(source, name, cache, pool, settings, fragments)
    finally:
        pool.shutdown(cancel_futures=True)


class _ScanProgress:
    """Reports the rows done and the total: None until a part is listed, then an estimate until all are.

    Args:
        report: called with both.
    """

    def __init__(self, report: Callable[[int, int | None], None]):
        self._report, self._done, self._counted = report, 0, 0
        self._unlisted, self._listed = 0, list[int]()

    def expect(self, counts: list[int | None]) -> None:
        """The rows of each slice, as far as known."""
        self._counted, self._unlisted = sum(count or 0 for count in counts), counts.count(None)

    def made(self, slice: Slice) -> None:
        """A slice has been made."""
        if slice.count is None and slice.rows is not None:
            self._listed.append(slice.rows[1])

    def reach(self, rows: int) -> None:
        self._done += rows
        total: int | None = self._counted
        if self._unlisted:
            listed = self._listed
            rest = round(sum(listed) * self._unlisted / len(listed)) if listed else 0
            total = max(self._done, self._counted + rest) if listed else None
        self._report(self._done, total)


class Scan:
    """One pass over a source; see `begin`.

    Attributes:
        scans: number of scan documents of the source when it began; -1 if they do not matter to it.
        made: the rows that are not taken from the last scan.
    """

    def __init__(
        self,
        source: Source,
        name: str,
        cache: Cache | None,
        pool: ThreadPoolExecutor,
        settings: Settings,
        fragments: Fragments | None,
    ):
        self.source, self.name, self.cache, self.pool = source, name, cache, pool
        self.settings, self.fragments = settings, fragments
        self._several = fragments is not None and fragments.worker.tasks > 1
        trusted = cache is not None and not settings.rehash
        self.scans = len(cache.files.numbers(Paths.scans(name))) if cache is not None and trusted else -1
        self.last = LastScan(source, name, cache, settings.rehash)
        self.made = source.scratch.table_writer(SCAN)
        self._progress = _ScanProgress(settings.progress)
        in_hand = (lambda: None) if fragments is None else fragments.worker.stop.check_batch
        self._maker = RowMaker(source, self.last, pool, settings, in_hand, self._progress.reach)
        self._shared, self._unshared = dict[str, Slice](), list[Slice]()
        self._identities, self._made_here = list[str](), set[str]()

    @cached_property
    def slices(self) -> list[Slice]:
        """The slices of the table, in the source's order. Those with new pictures are in `_shared`; the others are
        made, or are in `_unshared` if there are several processes."""
        slices = self._cut()
        self._progress.expect([slice.count for slice in slices])
        self._look(slices)
        return slices

    @cached_property
    def id(self) -> str:
        """A digest of all that decides the table, hex; for scans with several processes."""
        last = layout.canonical(self.last.document) if self.last.document is not None else b""
        kept = (f"{slice.part}\0{slice.stamp}" for slice in self.slices if slice.kept is not None)
        return layout.digest(
            RULE, self.name, self.source.location, *self._decisive, last, *kept, "made", *self._identities
        ).hex()

    @property
    def _decisive(self) -> tuple[str, ...]:
        """The settings that decide rows."""
        gone = [digest.hex() for digest in sorted(self.settings.withdrawn)]
        return str(self.settings.max_pixels), str(self.settings.rehash), *gone

    def table(self) -> pa.Table:
        """The table of the scan.

        Raises:
            UserError: two items have the same sample id.
            ScanSuperseded: another process finished its scan meanwhile.
            Stopped: a signal asked for the end.
        """
        tables, refuse = self._tables(), self.settings.refuse
        judged = (_judged(batch, refuse) for some in tables for batch in arrow.batches(some))
        table = self.source.scratch.table(SCAN, judged)
        if self.last.table is None or not self.last.table.equals(table):  # the last scan made this check
            check_unique(self.name, table, self.source.scratch)
        return table

    def _tables(self) -> list[pa.Table]:
        """The rows of the slices, in the source's order."""
        slices = self.slices
        for slice in self._unshared:
            self._check()
            self._make(slice)
        if self.fragments is not None:
            self.fragments.gather(list(self._shared), self._make_shared, self._take, self.scans)
        if all(slice.kept is None for slice in slices):
            self.source.rule.check_seen()  # the scan of reused rows made this check
        made, tables = self.made.finish(), []
        for slice in slices:
            if slice.rows is not None:
                tables.append(made.slice(*slice.rows))
            elif slice.kept is not None and self.last.table is not None:
                tables.append(self.last.table.slice(*slice.kept))
                for skipped in tables[-1].column("ignored").drop_null().to_pylist():
                    self.source.ignored.merge(Kinds(**json.loads(skipped)))
        return tables

    def _check(self) -> None:
        if self.fragments is not None:
            self.fragments.worker.stop.check()

    # ------------------------------------------------------------ cutting

    def _cut(self) -> list[Slice]:
        slices, listed = [], ListedItems(self.source.scratch)
        reusable = self.last.parts(alone=not self._several)
        for part in self.source.parts():
            self._check()
            stamp, first, count = reusable.get(part.name, (None, 0, 0))
            if stamp is not None and stamp == part.stamp:
                slices.append(Slice((first, count), part.name, part.stamp, count=count))
                continue
            fragments = self.source.fragments(part, scan_rows.RUN, listed)
            slices += [Slice(None, part.name, part.stamp, each, count=each.count) for each in fragments]
        listed.finish()
        return slices

    def _look(self, slices: list[Slice]) -> None:
        """Find the slices with new pictures, and make those of one process that have none."""
        if any(slice.kept is None for slice in slices):
            self.last.find([])  # before other threads call it
        for slice, new, identity in mapped(self.pool, self._looked, slices, RUNS_AHEAD):
            self._check()
            if slice.kept is not None:
                self._progress.reach(slice.kept[1])
            elif identity is None:
                self._make(slice)
            else:
                fragment = layout.digest(RULE, self.name, *self._decisive, slice.part, identity).hex()
                self._identities.append(fragment)
                if new:
                    self._shared[fragment] = slice
                else:
                    self._unshared.append(slice)
                # of all slices they would be in memory; they are asked for again when a slice is made
                slice.stats, slice.before = {}, {}

    def _looked(self, slice: Slice) -> tuple[Slice, bool, bytes | None]:
        """A slice, whether it may have new pictures that are to be shared, and the identity of one that is not made at
        once. Runs in any thread."""
        if slice.fragment is None:
            return slice, False, None
        slice.stats = slice.fragment.look()
        new = self.fragments is not None and self._has_new(slice)
        return slice, new, slice.fragment.identity(slice.stats) if new or self._several else None

    def _has_new(self, slice: Slice) -> bool:
        """Return whether the slice may have a new picture. A part with a stamp may: it is not listed to find out."""
        if slice.stamp is not None:
            return True
        slice.before = self.last.find(list(slice.stats))
        stats = ((key, stat) for key, stat in slice.stats.items() if not isinstance(stat, Unreadable))
        return any(unchanged_row(slice.before.get(key), *stat) is None for key, stat in stats)

    def _make(self, slice: Slice) -> None:
        table, ignored = self._maker.make(slice)
        self.source.ignored.merge(ignored)
        self._add(slice, table)

    def _add(self, slice: Slice, table: pa.Table) -> None:
        """Take over the rows of a slice, and let go of all that making them needed."""
        slice.rows = self.made.add(table)
        slice.fragment, slice.stats, slice.before = None, {}, {}
        self._progress.made(slice)

    # ------------------------------------------------------------ sharing

    def help(self) -> None:
        """Make fragments that no process has made. Their rows are not read."""
        assert self.fragments is not None
        if self.slices:
            with suppress(ScanSuperseded):
                self.fragments.help(list(self._shared), self._make_shared, self._progress.reach, self.scans)

    def _make_shared(self, fragment: str) -> Rows:
        rule, slice = self.source.rule, self._shared[fragment]
        table, ignored = self._maker.make(slice)
        slice.stats, slice.before = {}, {}  # the listing stays: a fragment may be lost before its rows are read
        if fragment not in self._made_here:
            self.source.ignored.merge(ignored)
        self._made_here.add(fragment)
        return Rows(table, ignored, tuple(sorted(rule.seen)))

    def _take(self, fragment: str, rows: Rows) -> None:
        """Take over the rows of a fragment, which this process or another one has made."""
        self._add(self._shared[fragment], rows.table)
        if fragment not in self._made_here:
            self._progress.reach(len(rows.table))
            self.source.ignored.merge(rows.ignored)
            self.source.rule.seen.update(rows.columns)


def reopen(cache: Cache, name: str, config: DataConfig, location: str | None = None) -> Source:
    """The source of the last scan, to read places of plans and scans. A source that was not scanned into this cache
    (its records were adopted) is opened where `location` says it is.

    Args:
        location: where the source is now; default: where it was scanned.

    Raises:
        UserError: no such source was scanned, or it has gone.
    """
    scan = cache.last_scan(name)
    if scan is not None:
        return detect.reopen(scan, as_read(config, scan), name, location, cache.patience_s)
    if location is None:
        raise UserError(f"no source {name!r} was encoded into this cache", found=", ".join(cache.sources()))
    return detect.open_source(location, config, name, patience_s=cache.patience_s)


def _judged(table: pa.Table, refuse: Callable[[int, int], str | None]) -> pa.Table:
    """The rows after the present policy. A row with a width was readable, so only a policy can reject it."""
    width, height = (pc.fill_null(table.column(name), 0).to_numpy().astype(np.int64) for name in ("width", "height"))
    sizes, which = np.unique(height << 32 | width, return_inverse=True)
    verdicts = pa.array(
        [refuse(size >> 32, size & 0xFFFFFFFF) if size else None for size in sizes.tolist()], pa.string()
    )
    reject = pc.if_else(pc.is_valid(table.column("width")), verdicts.take(pa.array(which)), table.column("reject"))
    return table.set_column(SCAN.names.index("reject"), "reject", reject)


def check_unique(name: str, table: pa.Table, scratch: Scratch) -> None:
    def ids() -> Iterator[pa.Table]:
        first = 0
        for batch in arrow.batches(table.select(["item", "reject"])):
            usable = pc.is_null(batch.column("reject")).to_numpy()
            items = arrow.text(batch.column("item").filter(pa.array(usable)))
            halves = np.zeros((len(items), 2), "<u8")
            halves[:, 0] = sample_ids(name, items)
            yield pa.table({"key": binary(halves.view("S16")), "row": first + np.flatnonzero(usable)})
            first += len(batch)

    for part in scratch.sorted_by_key(ids()):
        for at in np.flatnonzero(~is_first(fixed(part.column("key")))):
            one, other = (table.slice(part.column("row")[i].as_py(), 1).to_pylist()[0] for i in (at - 1, at))
            if one["item"] != other["item"]:
                raise UserError(
                    f"items {one['item']!r} and {other['item']!r} of source {name!r} have the same 64-bit sample id",
                    fix="rename one of the two files",
                )
            raise UserError(
                f"two items of source {name!r} are called {escaped(one['item'])!r}",
                expected="each name once",
                found=escaped(f"{_where(one)} and {_where(other)}"),
                fix="--set data.key_field=COLUMN, another column, or null",
            )


def _where(row: dict[str, Any]) -> str:
    """The file of a row of a scan, and the position in it."""
    return f"{row['part']} ({row['where']})" if row["part"] else str(row["item"])
