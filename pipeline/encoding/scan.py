"""Scan: the items of a source, with all that planning needs: digests, sizes, captions, reasons of rejects.

A scan is a table with one row per item: key, size, mtime, image digest, width and height after orientation, captions,
or the reason why the item is left out.
Why: an item with unchanged size and mtime keeps its digest, so a second scan reads no pixels. The table is stored in
the cache, so that `bucket` works without the sources. A part of a source (a tar, a parquet file) with an unchanged
stamp is not even listed: its rows are taken from the last scan. The rest is cut into fragments (see `fragments`): a
part with a stamp, or `RUN` items of a part without. Each fragment is read by one process, and a fragment that a killed
process has read is not read again. Fragments without new pictures are not distributed: checking file times is cheap, so
every process does it. Of several processes only one makes the table (`Scan.table`); `Scan.id` says that two processes
would make the same, and the others make fragments (`Scan.help`).
Price: a first scan reads every file once (the digest needs all bytes); `--rehash` reads them again. Each process lists
every part that has no stamp, and asks for the size and time of each of its files (of new pictures twice, and in the
process that makes the table twice of all, if there are several; the answers for all would fill the memory). Without
times or ETags from the server nothing can be shared or reused. A part with a stamp is not cut, so a single huge tar is
read by one process.
Unreadable items are tried again by the next scan, but not when an interrupted scan continues.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import islice, repeat
from typing import Any, TypeVar

import click
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.cache import arrow, layout
from pipeline.cache.arrow import ROWS
from pipeline.cache.item_rows import ItemRows
from pipeline.cache.key_columns import binary, fixed, is_first
from pipeline.cache.layout import Paths
from pipeline.cache.many_keys import sample_ids
from pipeline.cache.root import Cache
from pipeline.cache.scratch import Scratch
from pipeline.config import DataConfig
from pipeline.encoding.fragments import Fragments, Rows, ScanSuperseded
from pipeline.encoding.reading import as_read
from pipeline.errors import IntegrityError, UserError
from pipeline.images import decoding
from pipeline.sources import detect
from pipeline.sources.filesystem import Unreadable
from pipeline.sources.links import DEAD, DeadLink
from pipeline.sources.reasons import Kinds
from pipeline.sources.source import Fragment, Item, ListedItems, Place, Reject, Source, Stats

T = TypeVar("T")
R = TypeVar("R")

SCAN = pa.schema(
    [
        ("item", pa.string()),
        ("size", pa.int64()),
        ("mtime_ns", pa.int64()),
        ("digest", pa.binary(16)),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("captions", pa.list_(pa.struct([("text", pa.string()), ("weight", pa.float32())]))),
        ("meta", pa.string()),
        ("reject", pa.string()),
        ("part", pa.string()),
        ("stamp", pa.string()),
        ("where", pa.string()),
        ("ignored", pa.string()),
    ]
)
"""`reject` is null for usable items. `part` and `where` are those of a `Place`, `stamp` is the part's; they are null
for files. `ignored` of the first row of a part with a stamp, which an unchanged part is not listed for: what its
listing skipped, a `Kinds` as JSON, or null."""

AHEAD = 1024
"""Limit on listed items that wait for a reader, so that the listing stays close to the reading."""

RUNS_AHEAD = 16
"""Limit on fragments whose files have been looked at before their turn."""

RUN = 2048
"""Items of a fragment in a part without a stamp."""

RULE = "fragment-4"
"""Version of the rules that make rows. A version with other rules does not use fragments of this version."""

HEADS = (1 << 16, 1 << 20)
"""Bytes that `from_header` reads of a picture; the second number if the first was not enough."""

UNREADABLE = "unreadable"
"""How the reasons of rejects begin that come from a failed read and not from the bytes."""

Look = Callable[[Source, Place, int, int], dict[str, Any]]
"""(source, place, max_pixels, max_bytes) -> some of the columns `size`, `digest`, `width`, `height`, `reject`."""


def from_bytes(source: Source, place: Place, max_pixels: int, max_bytes: int = decoding.MAX_BYTES) -> dict[str, Any]:
    """Digest and size of a picture, from all of its bytes."""
    try:
        data = source.read(place)
    except DeadLink as error:
        return {"reject": str(error)}
    except OSError as error:
        return {"reject": f"unreadable: {error}"}
    return {"size": len(data), "digest": layout.digest(data), **_size(data, max_pixels, max_bytes)}


def from_header(source: Source, place: Place, max_pixels: int, max_bytes: int = decoding.MAX_BYTES) -> dict[str, Any]:
    """Size of a picture from its first bytes; empty if its header lies further behind.

    An orientation behind the pixels (possible in PNG and WebP) is not seen.
    """
    try:
        size = source.stat(place)[0]
        for length in HEADS:
            data = source.head(place, length)
            columns = _size(data, max_pixels, max_bytes)
            if "width" in columns or len(data) >= size or _limited(columns["reject"]):
                return columns
    except DeadLink as error:
        return {"reject": str(error)}
    except OSError as error:
        return {"reject": f"unreadable: {error}"}
    return {}


def _size(data: bytes, max_pixels: int, max_bytes: int) -> dict[str, Any]:
    try:
        width, height = decoding.probe(data, max_pixels, max_bytes)
    except decoding.ImageReject as reject:
        return {"reject": str(reject)}
    return {"width": width, "height": height}


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
    max_bytes: int = decoding.MAX_BYTES,
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
    settings = _Settings(max_pixels, max_bytes, rehash, look, progress, lru_cache(1 << 16)(refuse))
    source.scratch = cache.files.scratch if cache is not None else Scratch()
    pool = ThreadPoolExecutor(max(1, workers, source.requests if source.is_remote else 1))
    try:
        yield Scan(source, name, cache, pool, settings, fragments)
    finally:
        pool.shutdown(cancel_futures=True)


_RowsByItem = dict[str, dict[str, Any]]


@dataclass
class _Piece:
    """Rows of the table: taken from the last scan, or to be made from a fragment.

    Attributes:
        kept: first row and number of rows in the last scan; None: they are made.
        count: number of rows, None if only listing can tell.
        rows: first row and number of rows of what was made, in `Scan.made`; None until then.
        stats: item -> (size, mtime), as far as asked for.
        before: item -> its row in the last scan, as far as looked up.
    """

    kept: tuple[int, int] | None
    part: str = ""
    stamp: str | None = None
    fragment: Fragment | None = None
    stats: Stats = field(default_factory=dict)
    before: _RowsByItem = field(default_factory=dict)
    rows: tuple[int, int] | None = None
    count: int | None = None

    def forget(self) -> None:
        """Let go of all that making the rows needs."""
        self.fragment, self.stats, self.before = None, {}, {}


@dataclass(frozen=True)
class _Settings:
    """See `begin`."""

    max_pixels: int
    max_bytes: int
    rehash: bool
    look: Look
    progress: Callable[[int, int | None], None]
    refuse: Callable[[int, int], str | None]


class Scan:
    """One pass over a source; see `begin`.

    Attributes:
        scans: number of scan documents of the source when it began; -1 if they do not matter to it.
    """

    def __init__(
        self,
        source: Source,
        name: str,
        cache: Cache | None,
        pool: ThreadPoolExecutor,
        settings: _Settings,
        fragments: Fragments | None,
    ):
        self.source, self.name, self.cache, self.pool = source, name, cache, pool
        self.settings, self.fragments = settings, fragments
        self._several = fragments is not None and fragments.worker.tasks > 1
        self._scratch = source.scratch
        self._trusted = None if settings.rehash else cache
        number = len(cache.files.numbers(Paths.scans(name))) if cache is not None else 0
        self.scans = -1 if self._trusted is None else number
        self._last_body = cache.last_scan(name) if cache is not None else None
        self.made = self._scratch.table_writer(SCAN)
        self._known: ItemRows | None = None
        self._reused = False
        self._done = 0
        self._counted = 0
        self._unlisted, self._listed = 0, list[int]()
        self._shared, self._unshared = dict[str, _Piece](), list[_Piece]()
        self._made_here: set[str] = set()

    @cached_property
    def last(self) -> pa.Table | None:
        """The table of the last scan, if it is trusted."""
        return None if self._trusted is None else _last(self._trusted, self._last_body)

    @cached_property
    def pieces(self) -> list[_Piece]:
        """The pieces of the table, in the source's order. Those with new pictures are in `_shared`; the others are
        made, or are in `_unshared` if there are several processes."""
        pieces = self._cut()
        counts = [piece.count for piece in pieces]
        self._counted, self._unlisted = sum(count or 0 for count in counts), counts.count(None)
        self._look(pieces)
        return pieces

    @cached_property
    def id(self) -> str:
        """A digest of all that decides the table, hex; for scans with several processes."""
        settings = self.settings
        last = layout.canonical(self._last_body) if self._last_body is not None else b""
        rules = (str(settings.max_pixels), str(settings.max_bytes), str(settings.rehash), last)
        kept = (f"{piece.part}\0{piece.stamp}" for piece in self.pieces if piece.kept is not None)
        return layout.digest(RULE, self.name, self.source.location, *rules, *kept, "made", *self._identities).hex()

    def help(self) -> None:
        """Make fragments that no process has made. Their rows are not read."""
        assert self.fragments is not None
        if not self.pieces:
            return
        with suppress(ScanSuperseded):
            self.fragments.help(list(self._shared), self._make_shared, self._reach, self.scans)

    def table(self) -> pa.Table:
        """The table of the scan.

        Raises:
            UserError: two items have the same sample id, or this is another data set under a known name.
            ScanSuperseded: another process finished its scan meanwhile.
            Stopped: a signal asked for the end.
        """
        tables = self._tables()
        judged = (_judged(batch, self.settings.refuse) for piece in tables for batch in arrow.batches(piece))
        table = self._scratch.table(SCAN, judged)
        if self.last is None or not self.last.equals(table):  # the last scan made this check
            check_unique(self.name, table, self._scratch)
        if self.cache is not None:
            _same_set(self.cache, self.name, self.source, table)
        return table

    def _tables(self) -> list[pa.Table]:
        """The pieces of the table, in the source's order."""
        pieces = self.pieces
        for piece in self._unshared:
            self._check()
            self._make(piece)
        if self.fragments is not None:
            self._gather(self.fragments)
        if self.source.rule is not None and not self._reused:  # the scan of reused rows made this check
            self.source.rule.check_seen()
        made, tables = self.made.finish(), []
        for piece in pieces:
            if piece.rows is not None:
                tables.append(made.slice(*piece.rows))
            elif piece.kept is not None and self.last is not None:
                tables.append(self.last.slice(*piece.kept))
                for skipped in tables[-1].column("ignored").drop_null().to_pylist():
                    self.source.ignored.merge(Kinds(**json.loads(skipped)))
        return tables

    def _make(self, piece: _Piece) -> None:
        table, ignored = self._made(piece)
        self.source.ignored.merge(ignored)
        piece.rows = self.made.add(table)
        piece.forget()
        self._list(piece)

    def _look(self, pieces: list[_Piece]) -> None:
        """Find the pieces with new pictures."""

        def looked(piece: _Piece) -> tuple[_Piece, Stats]:
            return piece, piece.fragment.look() if piece.fragment is not None else {}

        def identified(piece_and_new: tuple[_Piece, bool]) -> tuple[_Piece, bool, bytes]:
            piece, new = piece_and_new
            assert piece.fragment is not None
            return piece, new, piece.fragment.identity(piece.stats)

        def not_kept() -> Iterator[tuple[_Piece, bool]]:
            for piece, stats in _mapped(self.pool, looked, pieces, RUNS_AHEAD):
                self._check()
                if piece.kept is not None:
                    self._reach(piece.kept[1])
                    continue
                piece.stats = stats
                new = self.fragments is not None and self._new(piece)
                if new or self._several:
                    yield piece, new
                else:
                    self._make(piece)

        settings, self._identities = self.settings, list[str]()
        for piece, new, identity in _mapped(self.pool, identified, not_kept(), RUNS_AHEAD):
            self._check()
            decisive = (str(settings.max_pixels), str(settings.max_bytes), str(settings.rehash))
            fragment = layout.digest(RULE, self.name, *decisive, piece.part, identity).hex()
            if new:
                self._shared[fragment] = piece
            else:
                self._unshared.append(piece)
            self._identities.append(fragment)
            # of all pieces they would be in memory; they are asked for again when a piece is made
            piece.stats, piece.before = {}, {}

    def _make_shared(self, fragment: str) -> Rows:
        rule, piece = self.source.rule, self._shared[fragment]
        table, ignored = self._made(piece)
        piece.stats, piece.before = {}, {}  # the listing stays: a fragment may be lost before its rows are read
        if fragment not in self._made_here:
            self.source.ignored.merge(ignored)
        self._made_here.add(fragment)
        return Rows(table, ignored, tuple(sorted(rule.seen)) if rule is not None else ())

    def _gather(self, fragments: Fragments) -> None:
        """Have the shared pieces made by all processes."""
        rule = self.source.rule

        def arrived(fragment: str, rows: Rows) -> None:
            piece = self._shared[fragment]
            piece.rows = self.made.add(rows.table)
            piece.forget()
            self._list(piece)
            if fragment not in self._made_here:
                self._reach(len(rows.table))
                self.source.ignored.merge(rows.ignored)
                if rule is not None:
                    rule.seen.update(rows.columns)

        fragments.gather(list(self._shared), self._make_shared, arrived, self.scans)

    def _cut(self) -> list[_Piece]:
        pieces, listed = [], ListedItems(self._scratch)
        again = (UNREADABLE, *([DEAD] if self.source.retries_links else []))
        runs = _runs(last, again) if (last := self._stamps()) is not None else {}
        for part in self.source.parts():
            self._check()
            run = runs.get(part.name)
            if run is not None and part.stamp is not None and run[0] == part.stamp:
                self._reused = True
                pieces.append(_Piece(run[1:], part.name, part.stamp, count=run[2]))
                continue
            if self._known is None and (last := self._known_before()) is not None:
                self._known = _known(last, self._scratch, not self.source.retries_links)
            fragments = self.source.fragments(part, RUN, listed)
            pieces += [_Piece(None, part.name, part.stamp, each, count=each.count) for each in fragments]
        listed.finish()
        return pieces

    def _known_before(self) -> pa.Table | None:
        """The table of the last scan, if its rows may be used: with `rehash`, of links that have died."""
        if self.settings.rehash and self.source.has_links and self.cache is not None:
            return _last(self.cache, self._last_body)
        return self.last

    def _stamps(self) -> pa.Table | None:
        """The columns of the last scan that `_runs` needs. One of several processes seldom needs the others."""
        if not self._several or self._trusted is None:
            return self.last
        return _last(self._trusted, self._last_body, ["part", "stamp", "reject"])

    def _new(self, piece: _Piece) -> bool:
        """Whether the piece may have a new picture. A piece with a stamp may: it is not listed to find out."""
        if piece.stamp is not None:
            return True
        before = self._before(list(piece.stats))
        for key, stat in piece.stats.items():
            if not isinstance(stat, Unreadable) and unchanged_row(before.get(key), *stat) is None:
                return True
        piece.before = before  # made at once; of pieces that wait for their turn the rows are looked up again
        return False

    def _before(self, items: list[str]) -> _RowsByItem:
        """The rows of the last scan, by item. An item that was never read has none."""
        if self._known is None or not items:
            return {}
        rows = self._known.find(items)
        found = arrow.pick_rows(self._known.table, np.unique(rows[rows >= 0]))
        return {row["item"]: row for some in found for row in some.to_pylist()}

    def _with_before(self, piece: _Piece) -> Iterator[tuple[Item | Reject, dict[str, Any] | None]]:
        """The listing of a piece, with the row of the last scan."""
        assert piece.fragment is not None
        rest = iter(piece.fragment.items())
        while entries := list(islice(rest, RUN)):
            before = piece.before or self._before([entry.key for entry in entries if isinstance(entry, Item)])
            yield from ((entry, before.get(entry.key)) for entry in entries)

    def _made(self, piece: _Piece) -> tuple[pa.Table, Kinds]:
        """The rows of a piece, and what its listing skipped."""
        before, ignored = self.source.ignored, Kinds()
        self.source.ignored = ignored
        try:
            table = self._read(piece)
        finally:
            self.source.ignored = before
        if piece.stamp is not None and ignored.total and len(table):
            column = pa.array([json.dumps(vars(ignored)), *repeat(None, len(table) - 1)], pa.string())
            table = table.set_column(SCAN.names.index("ignored"), "ignored", column)
        return table, ignored

    def _read(self, piece: _Piece) -> pa.Table:
        """List a piece and read its new pictures."""
        columns: dict[str, list[Any]] = {column: [] for column in SCAN.names}
        tables = []
        for row in _mapped(self.pool, lambda entry: self._row(*entry, piece.stats), self._with_before(piece)):
            self._check(in_hand=True)
            row |= {"part": piece.part or None, "stamp": piece.stamp}
            for column, values in columns.items():
                values.append(row[column])
            self._reach(1)
            if len(columns["item"]) == ROWS:
                tables.append(pa.table(columns, schema=SCAN))
                columns = {column: [] for column in SCAN.names}
        return pa.concat_tables([*tables, pa.table(columns, schema=SCAN)])

    def _row(self, item: Item | Reject, last: dict[str, Any] | None, stats: Stats) -> dict[str, Any]:
        """The row of an item. last: in the last scan; stats: item -> (size, mtime), as far as asked for."""
        if isinstance(item, Reject):
            return _row(item.key, reject=item.reason)
        captions = [{"text": text, "weight": weight} for text, weight in item.captions]
        listed = {"captions": captions, "meta": item.meta_json, "where": item.where, "ignored": None}
        try:
            stat = stats.get(item.key) or self.source.stat(item.place)
            if isinstance(stat, Unreadable):
                raise stat
        except OSError as error:
            return _row(item.key, **listed, reject=f"unreadable: {error}")
        before = unchanged_row(last, *stat)
        if before is not None and not self.settings.rehash:
            return {**before, **listed}
        read = self.settings.look(self.source, item.place, self.settings.max_pixels, self.settings.max_bytes)
        if before is not None and before["width"] is not None and "width" not in read and stat[0] < 0:
            return {**before, **listed}  # a link that died; its record may be in the cache
        if stat[0] >= 0:
            read["size"] = stat[0]
        return _row(item.key, mtime_ns=stat[1], **listed, **read)

    def _list(self, piece: _Piece) -> None:
        if piece.count is None and piece.rows is not None:
            self._listed.append(piece.rows[1])

    def _reach(self, rows: int) -> None:
        self._done += rows
        self.settings.progress(self._done, self._total())

    def _total(self) -> int | None:
        if not self._unlisted:
            return self._counted
        if not self._listed:
            return None
        return max(self._done, self._counted + round(sum(self._listed) * self._unlisted / len(self._listed)))

    def _check(self, in_hand: bool = False) -> None:
        if self.fragments is not None:
            self.fragments.worker.stop.check_batch() if in_hand else self.fragments.worker.stop.check()


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
        return detect.reopen(scan, as_read(config, scan), name, location, cache.files.patience_s)
    if location is None:
        raise UserError(f"no source {name!r} was encoded into this cache", found=", ".join(cache.sources()))
    return detect.open_source(location, config, name, patience_s=cache.files.patience_s)


def _mapped(pool: ThreadPoolExecutor, work: Callable[[T], R], listing: Iterable[T], ahead: int = AHEAD) -> Iterator[R]:
    """`pool.map` in order that takes at most `ahead` items of the listing in advance."""
    waiting: deque[Future[R]] = deque()
    for item in listing:
        waiting.append(pool.submit(work, item))
        if len(waiting) >= ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


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
            one, other = (table.column("item")[part.column("row")[i].as_py()].as_py() for i in (at - 1, at))
            if one != other:
                raise UserError(
                    f"items {one!r} and {other!r} of source {name!r} have the same 64-bit sample id",
                    fix="rename one of the two files",
                )


def _row(item: str, **values: Any) -> dict[str, Any]:
    empty: dict[str, Any] = dict.fromkeys(SCAN.names)
    return {**empty, "item": item, "captions": [], **values}


def _table(cache: Cache, scan: dict[str, Any], columns: list[str] | None = None) -> pa.Table | None:
    """The table of a scan; None if it is lost or damaged, so that every item is read again."""
    try:
        return cache.table(scan["table"], columns)
    except IntegrityError as error:
        click.echo(f"{error.what}; the source is read anew")
        return None


def _last(cache: Cache, last: dict[str, Any] | None, columns: list[str] | None = None) -> pa.Table | None:
    """The table of the last scan, or some of its columns."""
    return None if last is None else _table(cache, last, columns)


def _runs(table: pa.Table, retried: tuple[str, ...]) -> dict[str, tuple[str, int, int]]:
    """Part -> (stamp, first row, rows), for parts whose rows can be used again as long as the stamp is unchanged.

    retried: how the reasons of rejects begin that are tried again.
    """
    again: set[str] = set()
    runs: list[tuple[str | None, str | None, int]] = []  # part, stamp, first row
    first = 0
    for batch in arrow.batches(table.select(["part", "stamp", "reject"])):
        rejects = batch.filter(pc.is_valid(batch.column("reject"))).to_pylist()
        again |= {r["part"] for r in rejects if r["reject"].startswith(retried) or _limited(r["reject"])}
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


def _known(last: pa.Table, scratch: Scratch, dead: bool) -> ItemRows:
    """The rows that stay as they are while their item is unchanged. dead: also those of links without a picture."""
    # An item that was rejected for its captions was never read. Bad bytes stay bad while unchanged, except if a limit
    # was the reason, because the limit may be higher now.
    limits = "|".join(map(re.escape, decoding.LIMITS))

    def read() -> Iterator[pa.Table]:
        for batch in arrow.batches(last):
            limited = pc.fill_null(pc.match_substring_regex(batch.column("reject"), limits), False)
            known = pc.is_valid(batch.column("digest"))
            if dead:
                known = pc.or_(known, pc.fill_null(pc.starts_with(batch.column("reject"), DEAD), False))
            yield batch.filter(pc.and_(known, pc.invert(limited)))

    return ItemRows(scratch.table(SCAN, read()), scratch)


def unchanged_row(row: dict[str, Any] | None, size: int, mtime: int) -> dict[str, Any] | None:
    """The row of the last scan, if size (-1: not known) and mtime are unchanged."""
    return row if row is not None and size in (-1, row["size"]) and row["mtime_ns"] == mtime else None


def _limited(reject: str) -> bool:
    """Whether a higher limit would let the picture in."""
    return any(limit in reject for limit in decoding.LIMITS)


def _same_set(cache: Cache, name: str, source: Source, table: pa.Table) -> None:
    last = cache.last_scan(name)
    if last is None or last["root"] == source.location:
        return
    known = _table(cache, last)
    if known is None or not known.num_rows or not table.num_rows:
        return
    before = ItemRows(known, cache.files.scratch)
    items = (batch.column("item").to_pylist() for batch in arrow.batches(table))
    if all((before.find(some) < 0).all() for some in items):
        raise UserError(
            f"source {name!r} was last read from {last['root']}; {source.location} shares none of its "
            f"{known.num_rows} items",
            fix=f"if this is another data set, give it its own name: --source-name NAME (sources so far: "
            f"{', '.join(cache.sources())})",
        )


def gone(cache: Cache, name: str, table: pa.Table, most: float) -> int:
    """How many usable pictures of the last scan are missing in `table`.

    A picture is missing if neither its item nor its bytes are among the readable rows. A picture that a setting leaves
    out is not missing.

    Args:
        most: the largest share of the pictures of the last scan that may be missing, from 0 to 1.

    Raises:
        UserError: more are missing.
    """
    last = _last(cache, cache.last_scan(name))
    if last is None:
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

    lost = _elsewhere(scratch.table(SCAN, missing()), now, scratch)
    if len(lost) > most * before:
        here = ItemRows(table, scratch)

        def reasons() -> Iterator[tuple[str, str]]:
            for item in (item for batch in arrow.batches(lost) for item in batch.column("item").to_pylist()):
                row = int(here.find([item])[0])
                yield item, (table.column("reject")[row].as_py() if row >= 0 else None) or "is not there any more"

        kinds = Kinds.of(reasons())
        raise UserError(
            f"{len(lost)} of the {before} pictures of source {name!r} are missing",
            expected=f"at most {most:.0%} (encode.max_shrink)",
            found="\n" + "\n".join(kinds.lines()),
            fix="bring them back; if they are gone for good: --set encode.max_shrink=1; if this is another data set: "
            "--source-name NAME",
        )
    return len(lost)


def _readable(table: pa.Table) -> pa.Table:
    return table.filter(pc.or_(pc.is_null(table.column("reject")), pc.is_valid(table.column("width"))))


def _elsewhere(lost: pa.Table, now: pa.Table, scratch: Scratch) -> pa.Table:
    """The rows of `lost` whose bytes are in no row of `now`."""
    if not len(lost):
        return lost

    def digests() -> Iterator[pa.Table]:
        for number, table in enumerate((now, lost)):
            first = 0
            for batch in arrow.batches(table.select(["digest"])):
                row = np.arange(first, first + len(batch)) if number else np.full(len(batch), -1)
                keyed = pa.table({"key": batch.column("digest"), "row": row})
                yield keyed.filter(pc.is_valid(keyed.column("key")))
                first += len(batch)

    gone = scratch.array(len(lost), bool)
    for part in scratch.sorted_by_key(digests()):
        rows = part.column("row").to_numpy()
        start = np.flatnonzero(is_first(fixed(part.column("key"))))
        absent = np.repeat(np.minimum.reduceat(rows, start) >= 0, np.diff([*start, len(rows)]))
        gone[rows[absent]] = True
    return lost.filter(pa.array(gone))
