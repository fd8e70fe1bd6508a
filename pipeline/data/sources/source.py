"""The protocol of a source: it lists the items of its parts, and reads the bytes at a place, which needs no listing.

`Source` is implemented by `folder` (files next to captions), `tars` (webdataset) and `tables` (parquet and listings).
Each has a `Format`, from which `detect` chooses for `--data`.
Price: a listing is in temporary files next to the cache; what an object store other than S3 lists is in memory first.
Nothing is dropped silently: what cannot become an item becomes a `Reject` with a reason, and files that are plainly
not pictures are counted in `ignored`, as are captions that cannot be used of pictures that have another one.
"""

from __future__ import annotations

import json
import pickle
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import pyarrow as pa

from sana_pipe.base.config import setting
from sana_pipe.base.errors import UserError
from sana_pipe.data.cache.layout import digest
from sana_pipe.data.cache.scratch import Scratch
from sana_pipe.data.sources.caption_columns import CaptionRule, PictureCaptions
from sana_pipe.data.sources.config import DataConfig
from sana_pipe.data.sources.controls_and_masks import ControlOrMask
from sana_pipe.data.sources.filenames import escaped, extension, kind_of_file
from sana_pipe.data.sources.filesystem import Filesystem, Unreadable, or_unreadable
from sana_pipe.data.sources.range_prefetch import PARALLEL_REQUESTS, FileRange, RangePrefetch
from sana_pipe.data.sources.reject_kinds import Kinds, kind

_LISTED = pa.schema([("entries", pa.large_binary())])


class Place(NamedTuple):
    """The place of an item's bytes.

    item: its key.
    part: the file of the source that holds it; None for an item that is a file.
    where: the position inside the part, in a format of the source; None where the key is enough.
    """

    item: str
    part: str | None = None
    where: str | None = None


@dataclass(frozen=True)
class Item:
    """A picture with its captions.

    key: its name within the source; forward slashes, unique, stable when the source moves.
    captions: (text, weight) candidates, at least one; weights are relative.
    meta: other columns of the source, JSON values by column name.
    part, where: as in `Place`.
    pictures: (kind, place) of each control picture or mask; a place is None if the sample lacks it and need not have
    it.
    """

    key: str
    captions: tuple[tuple[str, float], ...]
    meta: dict[str, Any] = field(default_factory=dict)
    part: str | None = None
    where: str | None = None
    pictures: tuple[tuple[str, Place | None], ...] = ()

    @property
    def place(self) -> Place:
        return Place(self.key, self.part, self.where)

    @property
    def meta_json(self) -> str:
        """`meta` as a scan stores it."""
        return json.dumps(self.meta, sort_keys=True, ensure_ascii=False, default=str)


@dataclass(frozen=True)
class Part:
    """A piece of a source that is listed separately: an archive, a table.

    stamp: equal stamps mean that listing the part again gives the same result; None if only listing can tell.
    """

    name: str
    stamp: str | None = None


Stats = dict[str, tuple[int, int] | Unreadable]
"""Key -> the result of `Source.stat_item`."""


@dataclass(frozen=True)
class Fragment:
    """A range of a part that is listed, read and distributed separately. Its functions may run in any thread.

    look: calls `stat_item` for the items; takes as long as asking for every file's size.
    identity: result of `look` -> a digest of everything that decides what `items` yields and what the bytes are; as
        slow as `look`.
    items: lists the range.
    count: number of items and rejects in it; None if only listing can tell.
    """

    look: Callable[[], Stats]
    identity: Callable[[Stats], bytes]
    items: Callable[[], Iterator[Item | Reject]]
    count: int | None = None

    @classmethod
    def known(cls, identity: bytes, items: Callable[[], Iterator[Item | Reject]], count: int | None = None) -> Fragment:
        """A fragment whose identity is known without looking at the items."""
        return cls(dict, lambda stats: identity, items, count)


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
    """Selects this class when the source is opened again."""

    filesystem: Filesystem
    """The filesystem of its files."""

    named: tuple[str, ...] = ()
    """The file, if the user named a single one; it may be a link that leads out of its folder."""

    rule: CaptionRule
    """Selects the captions."""

    scratch: Scratch = Scratch()
    """Temporary storage for listings."""

    picture_columns: frozenset[str] = frozenset()
    """The columns of tables that the last listing took pictures from."""

    unused_columns: frozenset[str] = frozenset()
    """The columns of tables that hold pictures, too, and are not used."""

    controls_and_masks: Sequence[ControlOrMask] = ()
    """The control pictures and masks of each item that a listing looks for."""

    has_keys = False
    paired_by: frozenset[str] = frozenset()
    """The ways in which it can find them: names of fields of `ControlOrMask`."""

    files: Sequence[str] = ()
    """The files that the items are listed in; none for a folder of pictures."""

    pictures_next_to: int = 0
    """Pictures of the folder in which tables were found that name pictures."""

    shares_captions: bool = False
    """True where several pictures of a sample have its caption."""

    holds_latents: bool = False
    """True if the items are latents and not pictures."""

    loose: Kinds = Kinds()
    """Files of text of the last listing that are the caption of no picture, by folder and ending."""

    shared: Kinds = Kinds()
    """Files of the last listing that are the caption of several pictures each."""

    left_out: Kinds = Kinds()
    """Files next to the source that are not part of it, by kind."""

    ignored: Kinds = Kinds()
    """The files, members and captions that the last listing skipped, by kind, with `left_out`."""

    @property
    def location(self) -> str:
        """The absolute path or URL, in the form that `--data` takes."""
        return self.filesystem.location

    def document(self) -> dict[str, Any]:
        """Return what a scan document says of the source, so that it can be opened again."""
        format = {"source_format": self.format} if self.format != Source.format else {}
        return {"root": self.location, **format, **({"named": list(self.named)} if self.named else {})}

    def parts(self) -> list[Part]:
        """The parts of the listing, in its order. A part with an unchanged stamp need not be listed again."""
        return [Part("")]

    @abstractmethod
    def part(self, name: str) -> Iterator[Item | Reject]:
        """The items of one part, in ascending order of their keys (by code point), those of a table in the order of its
        rows; rejects are among or before them.

        Raises:
            UserError: the source as a whole cannot be right (it does not exist, it holds no picture).
        """

    def items(self) -> Iterator[Item | Reject]:
        """The items of all parts."""
        for part in self.parts():
            yield from self.part(part.name)

    def fragments(self, part: Part, size: int, listed: ListedItems) -> Iterator[Fragment]:
        """A part cut into fragments of `size` items. A part with a stamp is one fragment, known without listing it; the
        items of another part are added to `listed`."""
        if part.stamp is None:
            yield from listed.fragments(self, part, size)
            return
        yield Fragment.known(digest("part", part.name, part.stamp), lambda: self.part(part.name))

    @abstractmethod
    def stat(self, place: Place) -> tuple[int, int]:
        """(size in bytes, modification time in ns or a number derived from an ETag): equal values mean unchanged bytes.

        Raises:
            Unreadable: the item no longer exists, or the place does not belong to this source.
        """

    def stat_item(self, item: Item) -> tuple[int, int]:
        """`stat` of an item with its control pictures and masks: the size of its own, and a number that changes with
        each.

        Raises:
            Unreadable: as in `stat`, of any of them.
        """
        return with_controls_and_masks(self.stat(item.place), (self.stat(place) for _, place in item.pictures if place))

    def head(self, place: Place, length: int) -> bytes:
        """Read at least the first `length` bytes, or the whole item if it is shorter or cannot be read in part.

        Raises:
            Unreadable: as in `read`.
        """
        at = self._range(place)
        if at is None:
            return self.read(place)
        if at.size is None:
            return self.filesystem.read(at.file, length)
        return self.filesystem.read_range(at.file, at.offset, min(at.size, length))

    def read(self, place: Place) -> bytes:
        """The bytes at a place, whether or not this object has listed it.

        Raises:
            Unreadable: as in `stat`, or the bytes cannot be read.
        """
        at = self._range(place)
        if at is None:
            raise NotImplementedError
        return self._read_range(at)

    def read_next_to(self, file: str, limit: int) -> bytes:
        """The beginning of a file that is no item, `limit` bytes or a little more.

        Raises:
            Unreadable: it cannot be read.
        """
        return self.filesystem.read(file, limit)

    @property
    def is_remote(self) -> bool:
        """Return whether every read is a network round trip, so that many should be in flight at once."""
        return self.filesystem.is_remote

    @property
    def uses_files(self) -> bool:
        """Return whether items are files that tables name, so that pictures next to the tables are not left out."""
        return False

    @contextmanager
    def reading(self, places: Iterable[Place]) -> Iterator[Callable[[Place], bytes]]:
        """`read` for places that will each be read once, in about this order; remote bytes are prefetched. The context
        ends when all have been read or the rest is not needed."""
        if not self.is_remote:
            yield self.read
            return
        with RangePrefetch(self._prefetched, self._ranges(places), self.read) as prefetch:
            yield prefetch.read

    def _prefetched(self, at: FileRange) -> bytes:
        if not self.filesystem.is_remote:  # many whole files would answer many requests
            raise Unreadable(f"{at.file}: its server does not support ranges after all")
        return self._read_range(at)

    def _read_range(self, at: FileRange) -> bytes:
        if at.size is None:
            return self.filesystem.read(at.file)
        return self.filesystem.read_range(at.file, at.offset, at.size)

    def _ranges(self, places: Iterable[Place]) -> Iterator[tuple[Place, FileRange]]:
        for place in places:
            with suppress(Unreadable):  # is raised where it is read
                if (at := self._range(place)) is not None:
                    yield place, at

    # ------------------------------------------------------------ for subclasses

    def _range(self, place: Place) -> FileRange | None:
        """Return where an item's bytes are, if they are a file or a range of one; a source with others has its own
        `read`.

        Raises:
            Unreadable: the place does not belong to this source.
        """
        return None

    def _with_controls_and_masks(self, item: Item, found: Mapping[ControlOrMask, Sequence[Place]]) -> Item | Reject:
        """An item with its control pictures and masks; a Reject if it lacks a required one, or has several of a kind.
        found: the places of each of `controls_and_masks`."""
        pictures = list[tuple[str, Place | None]]()
        for wanted in self.controls_and_masks:
            places = found[wanted]
            if len(places) > 1:
                names = ", ".join(escaped(place.item) for place in places[:3])
                return Reject(item.key, f"has {len(places)} {wanted.kind} pictures: {names}")
            if not places and wanted.required:
                return Reject(item.key, f"{wanted.lacking} ({wanted.option})")
            pictures.append((wanted.kind, places[0] if places else None))
        return replace(item, pictures=tuple(pictures)) if pictures else item

    def _reset_ignored(self) -> None:
        self.ignored = Kinds()
        self.ignored.merge(self.left_out)

    def _ignore(self, kind: str, count: int = 1, examples: Sequence[str] = ()) -> None:
        """Count skipped files or captions. examples: their names."""
        self.ignored.note(kind, count, examples)

    def _captioned(self, place: Place, said: PictureCaptions, otherwise: str = "has no caption") -> Item | Reject:
        """The item at a place with the captions of its picture, or a Reject: for what is wrong with them, else
        `otherwise`. Counts what cannot be used of a picture with another caption, and what the rule never draws."""
        key, problems = place.item, [f"{where or 'its row'} {problem}" for where, problem in said.problems]
        captions, never_drawn = self.rule.weigh(said.candidates, key, self.name)
        if never_drawn:
            self._ignore(
                "caption that is never drawn (its score is too low, see data.caption_scores)", never_drawn, [key]
            )
        if said.hidden is not None and not said.candidates:
            self.rule.offered.add(said.hidden)
            advice = setting("data.caption_field", said.hidden)
            return Reject(key, f"has a caption in another column: {said.hidden!r} ({advice})")
        if not captions or (said.is_lost and not said.candidates):
            return Reject(key, f"has no usable caption: {'; '.join(problems)}" if problems else otherwise)
        for problem in problems:
            self._ignore(f"caption of a usable picture: {kind(key, problem)}", 1, [key])
        return Item(key, captions, said.meta, place.part, place.where)


class FilesSource(Source):
    """Files with many items each, every file a part.

    Args:
        filesystem: of the files.
        files: their names.
        rule: which captions.
        name: the source's name in sample identities.
    """

    WHERE: re.Pattern[str]
    """The pattern that `Place.where` of its items matches."""

    def __init__(self, filesystem: Filesystem, files: Iterable[str], rule: CaptionRule, name: str):
        self.filesystem, self.rule, self.name = filesystem, rule, name
        self.files = sorted(set(files), key=lambda file: file + "/")
        self.ignored = Kinds()
        self._versions: dict[str, tuple[int, int]] = {}

    def parts(self) -> list[Part]:
        self.filesystem.refresh()
        self._versions = self.filesystem.require(self.files)
        self._reset_ignored()
        self._prepare()
        return [Part(file, self._stamp(file)) for file in self.files]

    def _located(self, place: Place) -> tuple[str, re.Match[str]]:
        """The part of a place, and its `where`.

        Raises:
            Unreadable: it is a place of a source of another format.
        """
        match = self.WHERE.fullmatch(place.where or "")
        if place.part is None or match is None:
            raise Unreadable(f"{escaped(place.item)}: is in none of the files of this source, which are {self.format}")
        return place.part, match

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


@dataclass(frozen=True)
class Given:
    """The data that `--data` names, and how it is to be read. files: that the user named; None: those of the whole
    folder."""

    filesystem: Filesystem
    files: list[str] | None
    rule: CaptionRule
    config: DataConfig
    name: str
    patience_s: float


class Format(ABC):
    """The way in which a format is recognised and opened; `formats.FORMATS` lists all of them."""

    endings: tuple[str, ...] = ()
    """The endings of its files, without the dot."""

    named_endings: tuple[str, ...] = ()
    """Further endings that a file may have which the user names."""

    is_listing = False
    """True if a file only lists pictures: in a folder it counts at the top alone, and if `names` says something."""

    replaces = ""
    """The format that a folder shows, too, whose files are parts of this one."""

    def __init__(self, name: str):
        self.name = name

    def may_list(self, file: str) -> bool:
        """Return whether a file at the top of a folder of pictures without captions may list them; `names` tells."""
        return self.is_listing and "/" not in file and extension(file) in self.named_endings

    def shows(self, file: str) -> bool:
        """Return whether a file of a folder shows by its name that the folder is of this format."""
        return extension(file) in self.endings and not (self.is_listing and "/" in file)

    def has(self, filesystem: Filesystem, file: str) -> bool:
        """Return whether a file that the user named is of this format."""
        return extension(file) in (*self.endings, *self.named_endings)

    def names(self, given: Given, file: str) -> str:
        """Return what the rows of a table name: `files` of the folder or `links` elsewhere, with captions, or
        `pictures` of their own; "" for a listing of something else."""
        return "pictures"

    def files(self, given: Given) -> tuple[Iterable[str], Kinds]:
        """The files of the source, and the kinds of those that are left out.

        Raises:
            UserError: there is none.
        """
        if given.files is not None:
            return given.files, Kinds()
        files, others = self.divide(given.filesystem)
        if not files:
            raise UserError(
                f"{given.filesystem.location}: holds no {' or '.join(f'.{ending}' for ending in self.endings)} file",
                found=f"{others.total} other files",
                fix="leave --format out, or give the folder that holds them",
            )
        return files, others

    def divide(self, filesystem: Filesystem) -> tuple[list[str], Kinds]:
        """The files of this format, and the others by kind."""
        return divided(filesystem, self.shows)

    @abstractmethod
    def source(self, given: Given, files: Iterable[str]) -> Source:
        """The source of some files; of none, one that only reads."""


def divided(filesystem: Filesystem, wanted: Callable[[str], bool]) -> tuple[list[str], Kinds]:
    """The files that are wanted, sorted, and the others by kind."""
    chosen, others = [], Kinds()
    for file in filesystem.find():
        if wanted(file):
            chosen.append(file)
        else:
            others.note(kind_of_file(file), 1, [file])
    return sorted(chosen), others


def with_controls_and_masks(stat: tuple[int, int], others: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """`Source.stat_item` from the `stat` of its pictures."""
    size, number = stat
    if every := list(others):
        number = int.from_bytes(digest("pictures", repr((number, every)))[:7], "little")
    return size, number


class ListedItems:
    """Items of parts that only listing can tell, pickled in one temporary table, a fragment in a row: as objects they
    would occupy a kilobyte each.

    First everything is listed (`fragments`), then `finish` is called, then the fragments can be used.
    """

    def __init__(self, scratch: Scratch):
        self._writer, self._table = scratch.table_writer(_LISTED), _LISTED.empty_table()

    def fragments(self, source: Source, part: Part, size: int) -> Iterator[Fragment]:
        """List a part of a source and cut it into fragments of `size` items and rejects."""
        listing = iter(source.part(part.name))
        while entries := list(islice(listing, size)):
            row, _ = self._writer.add(pa.table([[pickle.dumps(entries)]], schema=_LISTED))
            look, identity = partial(self._look, source, row), partial(self._identity, row)
            yield Fragment(look, identity, partial(self._of, row), len(entries))

    def finish(self) -> None:
        """Close the table.

        Raises:
            NoSpaceError: the disk is full.
        """
        self._table = self._writer.finish()

    def _of(self, row: int) -> Iterator[Item | Reject]:
        yield from pickle.loads(self._table.column("entries")[row].as_buffer())

    def _look(self, source: Source, row: int) -> Stats:
        items = [entry for entry in self._of(row) if isinstance(entry, Item)]
        ask = partial(or_unreadable, source.stat_item)
        if not source.is_remote:
            return {item.key: ask(item) for item in items}
        with ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:
            return dict(zip((item.key for item in items), pool.map(ask, items), strict=True))

    def _identity(self, row: int, stats: Stats) -> bytes:
        return digest("items", *map(repr, self._of(row)), *map(repr, stats.values()))
