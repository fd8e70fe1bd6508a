"""The protocol of a source: it lists items, says whether their bytes have changed, and reads them.

`Source` is implemented by `folder` (files beside captions), `tars` (webdataset) and `tables` (parquet and listings);
`detect` chooses one for `--data`.
Why an interface this small: a scan needs the keys in a fixed order with their captions, a sign that the bytes have
changed, and the bytes. Archives, tables and object stores can answer these as well as a disk.
Price: a listing is in temporary files beside the cache; what an object store other than S3 lists is in memory first.

Nothing is dropped silently: what cannot become an item becomes a `Reject` with a reason, and files that are plainly
not pictures are counted in `ignored`, as are captions that cannot be used of pictures that have another one.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice
from threading import Lock
from typing import Any
from weakref import ref

import pyarrow as pa

from pipeline.cache.arrow import ROWS
from pipeline.cache.item_rows import ItemRows
from pipeline.cache.layout import digest
from pipeline.cache.scratch import Scratch
from pipeline.sources.caption_columns import CaptionCandidate, CaptionRule
from pipeline.sources.filesystem import Filesystem, Unreadable
from pipeline.sources.range_prefetch import PARALLEL_REQUESTS, FileRange, RangePrefetch
from pipeline.sources.reasons import Kinds, kind

_PICKLED = pa.schema([("run", pa.large_binary())])
_PLACES = pa.schema([(name, pa.string()) for name in ("item", "part", "where")])


@dataclass(frozen=True)
class Item:
    """A picture with its captions.

    key: its name within the source; forward slashes, unique, stable when the source moves.
    captions: (text, weight) candidates, at least one; weights are relative.
    meta: other columns of the source, JSON values by column name.
    where: the position of its bytes inside its part, in a format of the source; None where the key is enough.
    """

    key: str
    captions: tuple[tuple[str, float], ...]
    meta: dict[str, Any] = field(default_factory=dict)
    where: str | None = None


@dataclass(frozen=True)
class Part:
    """A piece of a source that is listed separately: an archive, a table.

    stamp: equal stamps mean that listing the part again gives the same result; None if only listing can tell.
    """

    name: str
    stamp: str | None = None


Stats = dict[str, tuple[int, int] | Unreadable]
"""Key -> the result of `Source.stat`."""


@dataclass(frozen=True)
class Fragment:
    """A range of a part that is listed, read and distributed separately.

    look: calls `stat` for the keys; takes as long as asking for every file's size; may run in any thread.
    identity: result of `look` -> a digest of everything that decides what `items` yields and what the bytes are; as
        slow as `look`.
    items: lists the range.
    count: number of items and rejects in it; None if only listing can tell.
    """

    look: Callable[[], Stats]
    identity: Callable[[Stats], bytes]
    items: Callable[[], Iterator[Item | Reject]]
    count: int | None = None


@dataclass(frozen=True)
class Reject:
    """Something that looks like data and cannot be used. key: a file, or `FILE:LINE` of a metadata file; characters
    that a terminal would interpret are escaped."""

    key: str
    reason: str


class Source(ABC):
    """A listing of items and access to their bytes."""

    name: str
    """Identifies a sample together with the key, so it must not change when the source is moved."""

    format: str = "folder"
    """The value of `--format` that selects this class."""

    location: str
    """The absolute path or URL, in the form that `--data` takes."""

    rule: CaptionRule | None = None
    """Selects the captions; None for a source that selects otherwise."""

    scratch: Scratch = Scratch()
    """Temporary storage for items and their places."""

    picture_columns: frozenset[str] = frozenset()
    """The columns of tables that the last listing took pictures from."""

    _runs: ref[SpilledItems] | None = None

    has_links: bool = False
    """Whether the last listing may have links (see `links`): items of which only the address is known, so that their
    `stat` is (-1, a number derived from the address)."""

    retries_links: bool = False
    """Whether a scan tries links again that gave no picture in an earlier one."""

    requests: int = PARALLEL_REQUESTS
    """Reads that should be in flight at once, if it is remote."""

    left_out: Kinds = Kinds()
    """Files beside the source that are not part of it, by kind."""

    ignored: Kinds = Kinds()
    """What the last listing skipped, by kind, with `left_out`: files, members and captions."""

    def parts(self) -> list[Part]:
        """The parts of the listing, in its order. A part with an unchanged stamp need not be listed again if `recall`
        is given its places."""
        return [Part("")]

    def part(self, name: str) -> Iterator[Item | Reject]:
        """The items of one part, in ascending order of their keys."""
        return self.items()

    def runs(self, part: Part, size: int) -> Iterator[Fragment]:
        """A part cut into runs of `size` items. A part with a stamp is a single run, known without listing it."""
        if part.stamp is not None:
            stamp = part.stamp
            yield Fragment(dict, lambda stats: digest("part", part.name, stamp), lambda: self.part(part.name))
            return
        listing = iter(self.part(part.name))
        while entries := list(islice(listing, size)):
            yield self._run(part.name, entries)

    def _run(self, part: str, entries: list[Item | Reject]) -> Fragment:
        runs = self._runs() if self._runs is not None else None
        if runs is None or not runs.is_open:
            runs = SpilledItems(self.scratch)
            self._runs = ref(runs)  # the file is deleted with the last run
        load = runs.add(entries)
        self.release(entry.key for entry in entries)
        return Fragment(
            partial(self._stat_all, part, load),
            lambda stats: _identity(load(), stats),
            lambda: self._placed(part, load()),
            len(entries),
        )

    def _placed(self, part: str, entries: list[Item | Reject]) -> Iterator[Item | Reject]:
        """Entries of which each item can be read. Its place is kept until it is released."""
        for entry in entries:
            if isinstance(entry, Item) and entry.where is not None:
                self._place(entry.key, part, entry.where)
            yield entry

    def _stat_all(self, part: str, load: Callable[[], list[Item | Reject]]) -> Stats:
        stats: Stats = {}
        for entry in self._placed(part, load()):
            if isinstance(entry, Item):
                try:
                    stats[entry.key] = self.stat(entry.key)
                except Unreadable as error:
                    stats[entry.key] = error
        self.release(stats)
        return stats

    def _place(self, key: str, part: str, where: str) -> None:  # noqa: B027 - a folder needs none
        """Note where the bytes of a listed item are."""

    def recall(self, places: Iterable[tuple[str, str, str]]) -> None:  # noqa: B027 - a folder needs none
        """Take over (key, part, where) of a listing in place of those known so far, so that `stat` and `read` work
        without a new listing."""

    def release(self, keys: Iterable[str]) -> None:  # noqa: B027 - a folder has none
        """Forget the places of listed items, which are not needed before the next `recall`."""

    @abstractmethod
    def items(self) -> Iterator[Item | Reject]:
        """Items in ascending order of their keys (by code point), with the rejects among or before them.

        Raises:
            UserError: the source as a whole cannot be right (it does not exist, it holds no picture).
        """

    @abstractmethod
    def stat(self, key: str) -> tuple[int, int]:
        """(size in bytes, modification time in ns or a number derived from an ETag): equal values mean unchanged bytes.
        Size -1: not known before the item is read.

        Raises:
            Unreadable: the item no longer exists, or the key does not belong to this source.
        """

    def head(self, key: str, length: int) -> bytes:
        """At least the first `length` bytes, or the whole item if it is shorter or cannot be read in part.

        Raises:
            Unreadable: as in `read`.
        """
        return self.read(key)

    @abstractmethod
    def read(self, key: str) -> bytes:
        """The bytes of an item.

        Raises:
            Unreadable: as in `stat`, or the bytes cannot be read.
        """

    @property
    def is_remote(self) -> bool:
        """Whether every read is a network round trip, so that many should be in flight at once."""
        return False

    @contextmanager
    def reading(self, keys: Iterable[str]) -> Iterator[Callable[[str], bytes]]:
        """`read` for keys that will each be read once, in about this order; remote bytes are prefetched. The context
        ends when all have been read or the rest is not needed."""
        yield self.read

    # ------------------------------------------------------------ for subclasses

    def _reset_ignored(self) -> None:
        self.ignored = Kinds()
        self.ignored.merge(self.left_out)

    def _ignore(self, kind: str, count: int = 1, examples: Sequence[str] = ()) -> None:
        """Count skipped files or captions. examples: their names."""
        self.ignored.note(kind, count, examples)

    def _note(self, key: str, problem: str) -> None:
        """Count a caption that cannot be used of a picture that has another one. key: of the picture, or the file."""
        self._ignore(f"caption of a usable picture: {kind(key, problem)}", 1, [key])

    def _weighted(self, candidates: list[CaptionCandidate], key: str) -> tuple[tuple[str, float], ...]:
        """The captions of an item with their weights; counts the candidates that the rule never draws."""
        assert self.rule is not None
        captions, dropped = self.rule.weigh(candidates, key, self.name)
        if dropped:
            self._ignore("caption that is never drawn (its score is below data.score_threshold)", dropped, [key])
        return captions


class PrefetchedSource(Source):
    """A source whose items are files, or ranges of files, that are requested ahead of time where they are remote."""

    filesystem: Filesystem

    @property
    def is_remote(self) -> bool:
        return self.filesystem.is_remote

    @contextmanager
    def reading(self, keys: Iterable[str]) -> Iterator[Callable[[str], bytes]]:
        if not self.is_remote:
            yield self.read
            return
        places = ((key, place) for key in keys if (place := self._place_of(key)) is not None)
        with RangePrefetch(self.filesystem, places, self.read) as prefetch:
            yield prefetch.read

    @abstractmethod
    def _place_of(self, key: str) -> FileRange | None:
        """Where the bytes of an item are; None if its file was not listed."""


class FilesSource(Source):
    """Files with many items each, every file a part.

    Args:
        filesystem: of the files.
        files: their names.
        rule: which captions.
        name: the source's name in sample identities.
    """

    rule: CaptionRule

    def __init__(self, filesystem: Filesystem, files: Iterable[str], rule: CaptionRule, name: str):
        self.filesystem, self.rule, self.name = filesystem, rule, name
        self.location = filesystem.location
        self.files = sorted(set(files), key=lambda file: file + "/")
        self.ignored = Kinds()
        self._versions: dict[str, tuple[int, int]] = {}
        self._listed: dict[str, tuple[str, str]] = {}
        self._recall: Callable[[], ItemRows | None] = lambda: None
        self._recall_lock = Lock()

    def parts(self) -> list[Part]:
        self.filesystem.refresh()
        self._versions = self.filesystem.require(self.files)
        self._reset_ignored()
        self._prepare()
        return [Part(file, self._stamp(file)) for file in self.files]

    def items(self) -> Iterator[Item | Reject]:
        for part in self.parts():
            yield from self.part(part.name)

    def recall(self, places: Iterable[tuple[str, str, str]]) -> None:
        def tables() -> Iterator[pa.Table]:
            rest = iter(places)
            while some := list(islice(rest, ROWS)):
                yield pa.table(list(zip(*some, strict=True)), _PLACES.names).cast(_PLACES)

        # Made when an item is first asked for: `encode` with nothing to do needs no places.
        self._recall = cache(lambda: ItemRows(self.scratch.table(_PLACES, tables()), self.scratch))
        self._listed = {}

    def release(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._listed.pop(key, None)

    def _place(self, key: str, part: str, where: str) -> None:
        """Note where the bytes of a listed item are."""
        self._listed[key] = part, where

    def _where(self, key: str) -> tuple[str, str] | None:
        """(part, where) of an item; None if it was not listed."""
        place = self._listed.get(key)
        if place is not None:
            return place
        with self._recall_lock:
            recalled = self._recall()
        if recalled is None or (row := int(recalled.find([key])[0])) < 0:
            return None
        item, part, where = (column[row].as_py() for column in recalled.table.columns)
        return (part, where) if item == key else None

    def _version(self, part: str) -> int:
        """The modification time (ns) or number of the ETag of a file, read once per listing."""
        version = self._versions.get(part)
        if version is None:
            version = self._versions[part] = self.filesystem.stat(part)
        return version[1]

    @abstractmethod
    def _prepare(self) -> None:
        """Called by each new listing, before any part is listed."""

    @abstractmethod
    def _stamp(self, file: str) -> str | None:
        """`Part.stamp` of a file."""


class SpilledItems:
    """Runs of listed items in one temporary table, pickled: as objects they would occupy a kilobyte an item.

    The table is finished when a run is first read; then no more can be added.
    """

    def __init__(self, scratch: Scratch):
        self._writer, self._lock = scratch.table_writer(_PICKLED), Lock()
        self._table: pa.Table | None = None
        self._error: Exception | None = None

    @property
    def is_open(self) -> bool:
        return self._table is None

    def add(self, entries: list[Item | Reject]) -> Callable[[], list[Item | Reject]]:
        """Append a run. Returns a function that reads it, for any thread."""
        row, _ = self._writer.add(pa.table([pa.array([pickle.dumps(entries)], pa.large_binary())], schema=_PICKLED))
        return partial(self._read, row)

    def _read(self, row: int) -> list[Item | Reject]:
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._table is None:
                try:
                    self._table = self._writer.finish()
                except Exception as error:  # a full disk: the same for every reader
                    self._error = error
                    raise
        entries: list[Item | Reject] = pickle.loads(self._table.column(0)[row].as_buffer())
        return entries


def _identity(entries: list[Item | Reject], stats: Stats) -> bytes:
    return digest("items", *map(repr, entries), *map(repr, stats.values()))
