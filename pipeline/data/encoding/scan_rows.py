"""The rows of a scan: what is known of a picture, and how a fragment's rows are made."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, repeat
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from sana_pipe.base.errors import escaped
from sana_pipe.data.cache import layout, scan_table
from sana_pipe.data.cache.arrow import ROWS, batches
from sana_pipe.data.cache.encodings import Encoding
from sana_pipe.data.cache.scan_table import SCAN
from sana_pipe.data.cache.withdrawn import REASON
from sana_pipe.data.encoders import imported
from sana_pipe.data.encoding.last_scan import UNREADABLE, LastScan, RowsByItem, is_limited, unchanged_row
from sana_pipe.data.images import decoding
from sana_pipe.data.signals.latent import are_imported, compression
from sana_pipe.data.sources.filesystem import Unreadable
from sana_pipe.data.sources.reject_kinds import Kinds
from sana_pipe.data.sources.source import Fragment, Item, Place, Reject, Source, Stats

T = TypeVar("T")
R = TypeVar("R")

AHEAD = 1024
"""Limit on listed items that wait for a reader, so that the listing stays close to the reading."""

RUN = 2048
"""Items of a fragment in a part without a stamp."""

HEADS = (1 << 16, 1 << 20)
"""Bytes that `from_header` reads of a picture: the first number, then the second, then the whole."""

UNREAD = bytes(8)
"""The beginning of the digests of pictures of which only the header was read."""

Look = Callable[[Source, Place, int], dict[str, Any]]
"""(source, place, max_pixels) -> some of the columns `size`, `digest`, `width`, `height`, `reject`."""


def from_bytes(source: Source, place: Place, max_pixels: int) -> dict[str, Any]:
    """Digest and size of a picture, from all of its bytes."""
    try:
        data = source.read(place)
    except OSError as error:
        return {"reject": f"unreadable: {error}"}
    return {"size": len(data), "digest": layout.digest(data), **_size(data, max_pixels)}


def from_latent(source: Source, place: Place, max_pixels: int, *, compression: int) -> dict[str, Any]:
    """Digest of a latent's member, and size of its picture. compression: pixels of a side per latent side."""
    try:
        data = source.read(place)
    except OSError as error:
        return {"reject": f"unreadable: {error}"}
    columns: dict[str, Any] = {"size": len(data), "digest": layout.digest(data)}
    try:
        width, height = imported.size(data, compression)
    except imported.LatentReject as reject:
        return {**columns, "reject": str(reject)}
    return {**columns, "width": width, "height": height}


def looks(encodings: Sequence[Encoding]) -> tuple[Look, Look]:
    """The ways to look at items: by their first bytes if these are enough, and whole."""
    if are_imported(encodings):
        look = partial(from_latent, compression=compression(encodings))
        return look, look
    return from_header, from_bytes


def from_header(source: Source, place: Place, max_pixels: int) -> dict[str, Any]:
    """Size of a picture from its first bytes; what `from_bytes` gives if its header lies beyond them.

    An orientation behind the pixels (possible in PNG and WebP) is not seen. In place of a digest of the bytes there is
    one of the place, which begins with `UNREAD`.
    """
    try:
        size = source.stat(place)[0]
        for length in HEADS:
            data = source.head(place, length)
            columns = _size(data, max_pixels)
            if "width" in columns or len(data) >= size or is_limited(columns["reject"]):
                unread = UNREAD + layout.digest(*map(str, place))[:8]
                return {"digest": unread, **columns}
    except OSError as error:
        return {"reject": f"unreadable: {error}"}
    return from_bytes(source, place, max_pixels)


def unread(table: pa.Table) -> int:
    """Return how many usable pictures of a scan are known by their headers alone."""
    count = 0
    for batch in batches(table.select(["digest", "reject"])):
        starts = pc.binary_slice(batch.column("digest"), 0, 8)
        count += pc.sum(pc.and_(pc.equal(starts, UNREAD), pc.is_null(batch.column("reject")))).as_py() or 0
    return count


def _size(data: bytes, max_pixels: int) -> dict[str, Any]:
    try:
        width, height = decoding.probe(data, max_pixels)
    except decoding.ImageReject as reject:
        return {"reject": str(reject)}
    return {"width": width, "height": height}


@dataclass(frozen=True)
class Settings:
    """See `scan.begin`."""

    max_pixels: int
    rehash: bool
    look: Look
    progress: Callable[[int, int | None], None]
    refuse: Callable[[int, int], str | None]
    withdrawn: frozenset[bytes] = frozenset()


@dataclass
class Slice:
    """Rows of the table: taken from the last scan, or made from a fragment.

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
    before: RowsByItem = field(default_factory=dict)
    rows: tuple[int, int] | None = None
    count: int | None = None


class RowMaker:
    """Lists a fragment and reads its new pictures.

    Args:
        pool: reads pictures.
        last: rows that are used again.
        check: called for each row; raises if the end was asked for.
        reach: called with the number of rows that are done.
    """

    def __init__(
        self,
        source: Source,
        last: LastScan,
        pool: ThreadPoolExecutor,
        settings: Settings,
        check: Callable[[], None],
        reach: Callable[[int], None],
    ):
        self.source, self.last, self.pool, self.settings = source, last, pool, settings
        self._check, self._reach = check, reach

    def make(self, slice: Slice) -> tuple[pa.Table, Kinds]:
        """The rows of a slice, and what its listing skipped."""
        before, ignored = self.source.ignored, Kinds()
        self.source.ignored = ignored
        try:
            table = self._table(slice)
        finally:
            self.source.ignored = before
        if slice.stamp is not None and ignored.total and len(table):
            column = pa.array([json.dumps(vars(ignored)), *repeat(None, len(table) - 1)], pa.string())
            table = table.set_column(SCAN.names.index("ignored"), "ignored", column)
        return table, ignored

    def _table(self, slice: Slice) -> pa.Table:
        columns: dict[str, list[Any]] = {column: [] for column in SCAN.names}
        tables = []
        for row in mapped(self.pool, lambda entry: self._row(*entry, slice.stats), self._entries(slice), AHEAD):
            self._check()
            row = self._admitted(row) | {"part": slice.part or None, "stamp": slice.stamp}
            for column, values in columns.items():
                values.append(row[column])
            self._reach(1)
            if len(columns["item"]) == ROWS:
                tables.append(pa.table(columns, schema=SCAN))
                columns = {column: [] for column in SCAN.names}
        return pa.concat_tables([*tables, pa.table(columns, schema=SCAN)])

    def _entries(self, slice: Slice) -> Iterator[tuple[Item | Reject, dict[str, Any] | None]]:
        """The listing of a slice, with the rows of the last scan."""
        assert slice.fragment is not None
        rest = iter(slice.fragment.items())
        while entries := list(islice(rest, RUN)):
            before = slice.before or self.last.find([entry.key for entry in entries if isinstance(entry, Item)])
            yield from ((entry, before.get(entry.key)) for entry in entries)

    def _row(self, item: Item | Reject, last: dict[str, Any] | None, stats: Stats) -> dict[str, Any]:
        """The row of an item. last: in the last scan; stats: item -> (size, mtime), as far as asked for."""
        if isinstance(item, Reject):
            return _row(item.key, reject=item.reason)
        captions = [{"text": text, "weight": weight} for text, weight in item.captions]
        listed = {"captions": captions, "meta": item.meta_json, "where": item.where, "ignored": None}
        try:
            stat = stats.get(item.key) or self.source.stat_item(item)
            if isinstance(stat, Unreadable):
                raise stat
        except OSError as error:
            return _row(item.key, **listed, reject=f"unreadable: {error}")
        before = unchanged_row(last, *stat)
        if before is not None and before["reject"] is None and _controls_and_masks_of(before) != item.pictures:
            before = None
        if before is not None and not self.settings.rehash:
            return {**before, **listed}
        read = self.settings.look(self.source, item.place, self.settings.max_pixels)
        read |= self._controls_and_masks(item, read)
        read["size"] = stat[0]
        return _row(item.key, mtime_ns=stat[1], **listed, **read)

    def _admitted(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row, or the reject of a withdrawn picture: of that the cache keeps the name and the digest alone."""
        pictures = {row["digest"], *(one.get("digest") for one in row["pictures"] or ())}
        if not pictures & self.settings.withdrawn:
            return row
        return _row(row["item"], reject=REASON, **{name: row[name] for name in ("size", "mtime_ns", "digest", "where")})

    def _controls_and_masks(self, item: Item, read: dict[str, Any]) -> dict[str, Any]:
        """The columns that an item's control pictures and masks decide. read: those of its own picture."""
        if "reject" in read or not item.pictures:
            return {}
        rows, settings = list[dict[str, Any]](), self.settings
        same_area = {one.kind for one in self.source.controls_and_masks if one.same_area}
        for kind, place in item.pictures:
            if place is None:
                rows.append({"kind": kind, "digest": scan_table.ABSENT})
                continue
            found = settings.look(self.source, place, settings.max_pixels)
            if reason := found.get("reject") or (_another_shape(found, read) if kind in same_area else None):
                start = f"{UNREADABLE}: " if reason.startswith(UNREADABLE) else ""
                reason = f"{start}its {kind} picture {escaped(place.item)}: {reason.removeprefix(start)}"
                return {"reject": reason, **dict.fromkeys(("digest", "width", "height"))}  # looked at again
            rows.append({"kind": kind, **place._asdict(), "digest": found.get("digest")})
        return {"pictures": rows}


def _another_shape(other: dict[str, Any], picture: dict[str, Any]) -> str | None:
    """Say why a control picture or mask cannot show the same area, or None; sides may be rounded. Both: `width` and
    `height`, or nothing yet."""
    if not ("width" in other and "width" in picture):
        return None
    (w, h), (width, height) = ((some["width"], some["height"]) for some in (other, picture))
    if abs(w * height - width * h) <= max(w, h, width, height):
        return None
    return f"has {w}x{h} pixels, another aspect ratio than the picture's {width}x{height}"


def _controls_and_masks_of(row: dict[str, Any]) -> tuple[tuple[str, Place | None], ...]:
    """`Item.pictures` as a row of the last scan has them."""
    every = row["pictures"] or ()
    return tuple((one["kind"], Place(*(one[f] for f in Place._fields)) if one["item"] else None) for one in every)


def _row(item: str, **values: Any) -> dict[str, Any]:
    empty: dict[str, Any] = dict.fromkeys(SCAN.names)
    return {**empty, "item": item, "captions": [], **values}


def mapped(pool: ThreadPoolExecutor, work: Callable[[T], R], listing: Iterable[T], ahead: int) -> Iterator[R]:
    """`pool.map` in order that takes at most `ahead` items of the listing in advance."""
    waiting: deque[Future[R]] = deque()
    for item in listing:
        waiting.append(pool.submit(work, item))
        if len(waiting) >= ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
