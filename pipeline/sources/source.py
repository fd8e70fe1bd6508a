"""Where pictures and captions come from: a `Source` lists items and reads their bytes.

What: the interface, and the first implementation, a folder of image files with captions in `.txt` or `.json` files
beside them or in `metadata.jsonl` / `metadata.csv` (Hugging Face's imagefolder). Archives are in `tars`, tables and
listings in `tables`; `detect` opens whatever `--data` names.
Why an interface this small: whoever scans needs the keys in a fixed order with their captions, something that tells
whether the bytes have changed, and the bytes. Archives, tables and object stores can answer these as well as a disk.
Price: a listing holds all keys and the captions of the metadata files in memory (some 200 bytes a picture).

Nothing is dropped in silence: whatever cannot become an item becomes a `Reject` with a reason, and files that are
plainly no pictures are counted in `ignored`.
"""

from __future__ import annotations

import csv
import io
import json
import os
import posixpath
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from pipeline.cache.layout import digest
from pipeline.errors import UserError
from pipeline.sources.caption_columns import Candidate, CaptionRule
from pipeline.sources.filenames import EXTENSIONS, brief, broken, extension, hostile, said, shown, stem
from pipeline.sources.filesystem import Disk, Store, Unreadable
from pipeline.sources.range_prefetch import Ahead, Place

METADATA_NAMES = ("metadata.jsonl", "metadata.csv")
FILE_COLUMN = "file_name"
MAX_CAPTION_BYTES = 1 << 20
_TOGETHER = 256  # pictures whose caption files are asked for at once (an object store answers them side by side)


@dataclass(frozen=True)
class Item:
    """A picture and what is said about it.

    key: its name within the source; forward slashes, unique, stable when the source moves.
    captions: (text, weight) candidates, at least one; weights are relative.
    meta: what else the source knows, JSON values by column name.
    where: where its bytes are inside its part, in the source's own words; None where the key says it all.
    """

    key: str
    captions: tuple[tuple[str, float], ...]
    meta: dict[str, Any] = field(default_factory=dict)
    where: str | None = None


@dataclass(frozen=True)
class Part:
    """A piece of a source that is listed on its own: an archive, a table.

    stamp: equal stamps mean that listing it again gives the same; None if only listing it can tell.
    """

    name: str
    stamp: str | None = None


Seen = dict[str, tuple[int, int] | Unreadable]
"""Key -> what `Source.stat` says of it."""


@dataclass(frozen=True)
class Run:
    """A piece of a part that is listed, read and shared on its own.

    look: what `stat` says of the keys; may take as long as asking for every file's size, and runs in any thread.
    identity: what `look` gave -> a digest of all that decides what `items` yields and what their bytes are; as slow.
    items: the listing of the piece.
    count: how many items and rejects that will be; None if only listing tells.
    """

    look: Callable[[], Seen]
    identity: Callable[[Seen], bytes]
    items: Callable[[], Iterator[Item | Reject]]
    count: int | None = None


@dataclass(frozen=True)
class Reject:
    """Something that looked like a part of the data and cannot be used. key: a file, or `FILE:LINE` of a metadata
    file; characters that a terminal would act on are escaped."""

    key: str
    reason: str


class Source(ABC):
    """A listing of items and access to their bytes."""

    name: str
    """With the key it identifies a sample, so it must not change when the source is moved."""

    format: str = "folder"
    """What `--format` calls it."""

    location: str
    """Where it lies, as `--data` would name it, absolute."""

    rule: CaptionRule | None = None
    """Which captions it takes, if it is up to a rule."""

    ignored: int = 0
    """Files that the last listing passed over because they are no pictures (nor captions of one)."""

    def parts(self) -> list[Part]:
        """What `items` consists of, in its order. A part whose stamp has not changed need not be listed again, if
        `recall` is told what was found in it."""
        return [Part("")]

    def part(self, name: str) -> Iterator[Item | Reject]:
        """The items of one part, in ascending order of their keys."""
        return self.items()

    def runs(self, part: Part, size: int) -> Iterator[Run]:
        """A part cut into runs of `size` items. One with a stamp is one run, which it takes no listing to know."""
        if part.stamp is not None:
            stamp = part.stamp
            yield Run(dict, lambda seen: digest("part", part.name, stamp), lambda: self.part(part.name))
            return
        listing = iter(self.part(part.name))
        while found := list(islice(listing, size)):
            yield self._run(found)

    def _run(self, found: list[Item | Reject]) -> Run:
        return Run(partial(self._look, found), partial(_identity, found), partial(iter, found), len(found))

    def _look(self, found: list[Item | Reject]) -> Seen:
        seen: Seen = {}
        for one in found:
            if isinstance(one, Item):
                try:
                    seen[one.key] = self.stat(one.key)
                except Unreadable as error:
                    seen[one.key] = error
        return seen

    def recall(self, places: Iterable[tuple[str, str, str]]) -> None:  # noqa: B027 - a folder needs none
        """Learn (key, part, where) from an earlier listing: `stat` and `read` then work without another."""

    @abstractmethod
    def items(self) -> Iterator[Item | Reject]:
        """Items in ascending order of their keys (by code point), with the rejects among or before them.

        Raises:
            UserError: the source as a whole cannot be what was meant (it does not exist, it holds no picture).
        """

    @abstractmethod
    def stat(self, key: str) -> tuple[int, int]:
        """(size in bytes, modification time in ns or a number made from an ETag): equal values mean unchanged bytes.

        Raises:
            Unreadable: there is no such item any more, or its key is not one of this source.
        """

    def head(self, key: str, length: int) -> bytes:
        """The first `length` bytes at least, or all there are. A source that can only read an item whole does so.

        Raises:
            Unreadable: as in `read`.
        """
        return self.read(key)

    @abstractmethod
    def read(self, key: str) -> bytes:
        """The whole file.

        Raises:
            Unreadable: as in `stat`, or the bytes cannot be read.
        """

    @property
    def far(self) -> bool:
        """Whether every read is a round trip over a network, so that many should be under way at once."""
        return False

    @contextmanager
    def reading(self, keys: Iterable[str]) -> Iterator[Callable[[str], bytes]]:
        """`read`, for keys of which each will be read once, about in this order: what is far away is fetched ahead.
        The context ends when all have been read or none is wanted any more."""
        yield self.read


def _identity(found: list[Item | Reject], seen: Seen) -> bytes:
    return digest("items", *map(repr, found), *map(repr, seen.values()))


class FolderSource(Source):
    """A folder of pictures, searched recursively.

    Captions of `dir/X.jpg`: the text of `dir/X.txt` (UTF-8, all of it, surrounding whitespace removed; NVlabs' loader
    takes the first line only), the caption columns of the JSON object in `dir/X.json`, and those of every row that
    names the file in a `metadata.jsonl` or `metadata.csv` (`file_name` is relative to the metadata file's folder, which
    may be a subfolder). Captions that differ are all kept as candidates, weighted as `candidates` says. The other
    columns become the item's `meta` (where several say something, the first one counts; JSON files before rows).

    Files of NVlabs' SanaImgDataset are known by what they hold: `dir/X<anything>.json` with {"X": {column: text}} or
    {"X": {column: score}}; a score of `prompt` is that of `X.txt`.

    Hidden files and folders and files that are no pictures are ignored and counted. Links are followed to files inside
    the root only; linked folders are not entered. Names are taken as they are: no Unicode or case folding, except that
    extensions may be in any case.

    Args:
        root: the folder, or another store.
        rule: which captions; or the one column of the metadata files that holds them.
        name: the source's name in sample identities.

    Raises:
        UserError: the root does not exist or is no folder.
    """

    def __init__(self, root: Path | str | Store, rule: CaptionRule | str, name: str = "folder"):
        if not isinstance(root, Store):
            if not os.path.isdir(root):
                raise UserError(
                    f"the data folder {str(root)!r} "
                    + ("is not a folder" if os.path.exists(root) else "does not exist or may not be read"),
                    expected="a folder of pictures with captions in .txt files or a metadata.jsonl / metadata.csv",
                    fix="sana-pipe encode --data DIR",
                )
            root = Disk(root)
        self.store = root
        self.location = root.location
        self.rule: CaptionRule = rule if isinstance(rule, CaptionRule) else CaptionRule.column(rule)
        self.name = name
        self.ignored_kinds: Counter[str] = Counter()

    @property
    def _shown_root(self) -> str:
        return str(self.store.root) if isinstance(self.store, Disk) else self.store.location

    def items(self) -> Iterator[Item | Reject]:
        return self._generate(*self._listed())

    def runs(self, part: Part, size: int) -> Iterator[Run]:
        """Runs of pictures by their names, so that whoever lists need not read the captions of all of them."""
        listing, rejects, told = self._listed()
        if rejects:
            early: list[Item | Reject] = sorted(rejects, key=lambda reject: reject.key)
            yield self._run(early)
        keys = sorted(listing.pictures)
        for start in range(0, len(keys), size):
            some = keys[start : start + size]
            yield Run(
                partial(self.store.stat_many, some),
                partial(self._identity, some, listing, told),
                partial(self._some, some, listing, told),
                len(some),
            )

    def _identity(self, keys: list[str], listing: _Listing, told: dict[str, _Entry], seen: Seen) -> bytes:
        beside = {key: listing.beside(key) for key in keys}
        texts = self.store.stat_many(sorted({name for names in beside.values() for name in names}))
        parts = (repr((key, seen[key], [(name, texts[name]) for name in beside[key]], told.get(key))) for key in keys)
        return digest("files", self.rule.identity(), *parts)

    def _listed(self) -> tuple[_Listing, list[Reject], dict[str, _Entry]]:
        """All names, what cannot be used, and what the metadata files say."""
        self.store.refresh()
        listing = self._list()
        self.ignored_kinds = listing.ignored
        self.ignored = listing.ignored.total()
        if not listing.pictures and not listing.refused_pictures:
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(listing.ignored.items()))
            raise UserError(
                f"the data folder {self._shown_root!r} holds no picture",
                expected="files that end in .jpg, .png, .webp, .tif, ... (in subfolders, too)",
                found=kinds or "an empty folder",
                fix="sana-pipe encode --data DIR with the folder that holds the pictures",
            )
        told: dict[str, _Entry] = {}
        rejects = listing.rejects
        for metadata in sorted(listing.metadata):
            rejects.extend(self._read_metadata(metadata, listing, told))
        stems = {stem(key) for key in listing.pictures}
        for one in [one for one in listing.objects if one not in stems]:
            longest = (one[:n] for n in range(len(one) - 1, one.rfind("/") + 1, -1))
            picture = next((name for name in longest if name in stems), None)
            if picture is not None:
                listing.suffixed.setdefault(picture, []).extend(listing.objects.pop(one))
        for kind, files in (("txt", listing.texts), ("json", listing.objects)):
            orphans = sum(len(keys) for one, keys in files.items() if one not in stems)
            if orphans:
                listing.ignored[f".{kind} file without a picture"] += orphans
        self.ignored = listing.ignored.total()
        return listing, rejects, told

    def path(self, key: str) -> Path:
        """Where the item is on this disk.

        Raises:
            Unreadable: the key is absolute, climbs or leaves the root through a link.
        """
        if not isinstance(self.store, Disk):
            raise Unreadable(f"{shown(key)}: is not on this disk")
        return self.store.path(key)

    def stat(self, key: str) -> tuple[int, int]:
        return self.store.stat(key)

    def read(self, key: str) -> bytes:
        return self.store.read(key)

    def head(self, key: str, length: int) -> bytes:
        return self.store.read(key, length)

    @property
    def far(self) -> bool:
        return self.store.far

    @contextmanager
    def reading(self, keys: Iterable[str]) -> Iterator[Callable[[str], bytes]]:
        if not self.far:
            yield self.read
            return
        with Ahead(self.store, ((key, Place(key)) for key in keys), self.read) as ahead:
            yield ahead.read

    def _list(self) -> _Listing:
        listing = _Listing()
        if not isinstance(self.store, Disk):
            for key in self.store.find():
                problem = hostile(key)
                self._sort_name(key, listing, problem)
            return listing
        folders = [""]
        while folders:
            folder = folders.pop()
            try:
                with os.scandir(os.path.join(self.store.root, folder)) as entries:
                    found = list(entries)
            except OSError as error:
                self.store.unlisted(error)
            for entry in found:
                self._sort_in(entry, folder, listing, folders, self.store)
        return listing

    def _sort_in(self, entry: os.DirEntry[str], folder: str, listing: _Listing, folders: list[str], disk: Disk) -> None:
        name = entry.name
        key = f"{folder}/{name}" if folder else name
        if name.startswith("."):
            listing.ignored["hidden"] += 1
            return
        link = entry.is_symlink()
        try:
            is_folder = entry.is_dir()
        except OSError:  # a link in a circle
            is_folder = False
        if is_folder:
            if link:
                listing.rejects.append(
                    Reject(shown(key), "is a linked folder; move or mount its pictures under the root")
                )
            else:
                folders.append(key)
            return
        if not _is_data(name):
            self._sort_name(key, listing, None)
            return
        problem = hostile(key)
        if problem is None and link:
            problem = None if disk.inside(entry.path) else "a link leads out of the source folder"
            if problem is None and not os.path.exists(entry.path):
                problem = "is a broken link"
        if problem is None:
            try:
                if not entry.is_file():
                    problem = "is not a regular file"
            except OSError as error:
                problem = said(error)
        self._sort_name(key, listing, problem)

    def _sort_name(self, key: str, listing: _Listing, problem: str | None) -> None:
        """Enter a file; `problem` is why it must not be used."""
        kind, name = extension(key), posixpath.basename(key)
        if not _is_data(name):
            listing.ignored[f".{shown(kind)} file" if kind else "file without an extension"] += 1
        elif kind == "txt" and self.rule.text_weight is None:
            listing.ignored[".txt file (data.caption_weights does not list txt)"] += 1
        elif problem is not None:
            listing.rejects.append(Reject(shown(key), problem))
            listing.refused_pictures += kind in EXTENSIONS
        elif name.lower() in METADATA_NAMES:
            listing.metadata.append(key)
        elif kind == "txt":
            listing.texts.setdefault(stem(key), []).append(key)
        elif kind == "json":
            listing.objects.setdefault(stem(key), []).append(key)
        else:
            listing.pictures.add(key)

    def _generate(self, listing: _Listing, rejects: list[Reject], told: dict[str, _Entry]) -> Iterator[Item | Reject]:
        yield from sorted(rejects, key=lambda reject: reject.key)
        yield from self._some(sorted(listing.pictures), listing, told)

    def _some(self, keys: list[str], listing: _Listing, told: dict[str, _Entry]) -> Iterator[Item | Reject]:
        for start in range(0, len(keys), _TOGETHER):
            some = keys[start : start + _TOGETHER]
            beside = {key: listing.beside(key) for key in some}
            names = sorted({name for files in beside.values() for name in files})
            data = dict(zip(names, self.store.read_many(names, MAX_CAPTION_BYTES), strict=True))
            for key in some:
                yield from self._item(key, {name: data[name] for name in beside[key]}, told.get(key))

    def _item(self, key: str, beside: dict[str, bytes | Unreadable], row: _Entry | None) -> Iterator[Item | Reject]:
        candidates: list[Candidate] = []
        problems: list[Reject] = []
        without: list[str] = []
        meta: dict[str, Any] = {}
        own = posixpath.basename(stem(key))
        outcomes = {name: sidecar(name, data) for name, data in beside.items()}
        told = SampleColumns()  # by files of NVlabs' SanaImgDataset, which are about the picture by its name
        for name, outcome in list(outcomes.items()):
            if isinstance(outcome, dict) and isinstance(outcome.get(own), dict):
                told.add(outcome[own])
                del outcomes[name]
            elif stem(name) != stem(key):  # begins with the picture's name, and is about something else
                del outcomes[name]
                self.ignored_kinds[".json file without a picture"] += 1
                self.ignored = self.ignored_kinds.total()
        if told.captions:
            found = self.rule.read(told.captions, told.scores)
            candidates += found.candidates
            problems += [Reject(key, reason) for reason in found.problems]
        for name, outcome in outcomes.items():
            if isinstance(outcome, str):
                problem = None if outcome else Reject(name, "is empty")
                if outcome:
                    candidates.append(self.rule.text_file(outcome, told.scores))
            elif isinstance(outcome, Reject):
                problem = outcome
            else:
                found = self.rule.read(outcome)
                candidates += found.candidates
                meta = {**{c: v for c, v in outcome.items() if c not in self.rule.columns}, **meta}
                reason = "; ".join(found.problems)
                problem = None
                if any(column in outcome for column in self.rule.columns):
                    problem = Reject(name, reason) if reason else None
                elif reason:  # a JSON file without captions may be there for what else it says
                    without.append(f"{name} {reason}")
            if problem is not None:
                problems.append(problem)
        if row is not None:
            candidates += row.candidates
            meta = {**row.meta, **meta}
        captions, dropped = self.rule.settle(candidates, key, self.name)
        if dropped:
            self.ignored_kinds["caption that is never drawn (its score is below data.score_threshold)"] += dropped
            self.ignored = self.ignored_kinds.total()
        if captions:
            yield from problems
            yield Item(key, captions, meta)
        elif problems or without or (row is not None and row.problems):
            reasons = [f"{p.key} {p.reason}" for p in problems] + without + (row.problems if row is not None else [])
            yield Reject(key, "has no usable caption: " + "; ".join(reasons))
        else:
            yield Reject(key, f"has no caption: no {own}.txt beside it and no metadata row that names it")

    def _read_metadata(self, metadata: str, listing: _Listing, told: dict[str, _Entry]) -> list[Reject]:
        """Enters the rows of one metadata file into `told`; returns what could not be used of it."""
        rows, columns, rejects = self._rows(metadata)
        if columns and FILE_COLUMN not in columns:
            file = f"{self._shown_root.rstrip('/')}/{metadata}"
            raise UserError(
                f"{file} has no column {FILE_COLUMN!r}",
                expected=f"the columns {FILE_COLUMN!r} and {self._wanted()}",
                found="the columns " + ", ".join(repr(shown(column)) for column in columns),
                fix=f"rename the column that names the pictures to {FILE_COLUMN!r} in {file}",
            )
        self._check_columns(metadata, columns, FILE_COLUMN, ", or remove {file} if the captions are in .txt files")
        folder = posixpath.dirname(metadata)
        for line, row in rows:
            where = f"{metadata}:{line}"
            named = self._named(where, row, FILE_COLUMN, rejects)
            if named is None:
                continue
            key = posixpath.normpath(posixpath.join(folder, named))
            if key not in listing.pictures:
                there = isinstance(self.store, Disk) and os.path.lexists(os.path.join(self.store.root, key))
                known = "is not usable" if there else "does not exist"
                rejects.append(
                    Reject(where, f"names {named!r}, which {known} as a picture under {posixpath.dirname(key) or '.'}")
                )
                continue
            self._enter(where, row, FILE_COLUMN, told.setdefault(key, _Entry()), rejects)
        return rejects

    def _rows(self, metadata: str) -> tuple[list[tuple[int, dict[str, Any]]], dict[str, None], list[Reject]]:
        """(line, row) of a JSONL or CSV file, its columns, and what is no row."""
        columns: dict[str, None] = {}
        try:
            data = self.store.read(metadata)
        except Unreadable as error:
            raise UserError(
                f"{self._shown_root}: a file of captions cannot be read",
                found=error,
                fix="make it readable, or move it away",
            ) from None
        rejects: list[Reject] = []
        rows: list[tuple[int, dict[str, Any]]] = []
        parse = _csv_rows if metadata.lower().endswith(".csv") else _jsonl_rows
        for line, row in parse(data, columns):
            if isinstance(row, str):
                rejects.append(Reject(f"{metadata}:{line}", row))
            else:
                rows.append((line, row))
        if not rows and not rejects:
            rejects.append(Reject(metadata, "holds no row"))
        return rows, columns, rejects

    def _wanted(self) -> str:
        return " or ".join(map(repr, self.rule.columns)) + f" ({self.rule.setting})"

    def _check_columns(self, metadata: str, columns: dict[str, None], file_column: str, otherwise: str) -> None:
        """Raises a UserError if no caption column is there."""
        if not columns or not self.rule.wanting(columns):
            return
        file = f"{self._shown_root.rstrip('/')}/{metadata}"
        others = [shown(column) for column in columns if column != file_column]
        fix = f"--set data.caption_field={others[0]}" if others else f"add a caption column to {file}"
        raise UserError(
            f"{file} has no column {self.rule.columns[0]!r}",
            expected=f"the columns {file_column!r} and {self._wanted()}",
            found="the columns " + ", ".join(repr(shown(column)) for column in columns),
            fix=fix + otherwise.format(file=file),
        )

    def _named(self, where: str, row: dict[str, Any], column: str, rejects: list[Reject]) -> str | None:
        """The file that a row names, if it may be used."""
        named = row.get(column)
        if not isinstance(named, str) or not named:
            rejects.append(Reject(where, f"names no file ({column} is {brief(named)})"))
            return None
        problem = hostile(named)
        if problem is not None:
            rejects.append(Reject(where, f"names {shown(named)!r}: {problem}"))
            return None
        return named

    def _enter(self, where: str, row: dict[str, Any], column: str, entry: _Entry, rejects: list[Reject]) -> None:
        """Add what a row says about its picture."""
        for other, value in row.items():
            if other != column and other not in self.rule.columns:
                entry.meta.setdefault(other, value)
        found = self.rule.read(row)
        entry.candidates += found.candidates
        for reason in found.problems:
            entry.problems.append(f"{where} {reason}")
            rejects.append(Reject(where, reason))


@dataclass
class _Listing:
    """What a walk through the folder found. Keys throughout."""

    pictures: set[str] = field(default_factory=set)
    texts: dict[str, list[str]] = field(default_factory=dict)  # by stem: x.txt and x.TXT may both exist
    objects: dict[str, list[str]] = field(default_factory=dict)  # the same of .json
    suffixed: dict[str, list[str]] = field(default_factory=dict)  # by stem: .json whose name begins with it
    metadata: list[str] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    refused_pictures: int = 0
    ignored: Counter[str] = field(default_factory=Counter)

    def beside(self, key: str) -> list[str]:
        """The caption files of a picture."""
        own = stem(key)
        return [name for files in (self.texts, self.objects, self.suffixed) for name in sorted(files.get(own, ()))]


@dataclass
class _Entry:
    """What the metadata files say about one picture."""

    candidates: list[Candidate] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass
class SampleColumns:
    """What files of NVlabs' datasets say about one sample, by column."""

    captions: dict[str, Any] = field(default_factory=dict)
    scores: dict[str, Any] = field(default_factory=dict)

    def add(self, entry: dict[str, Any]) -> None:
        """Numbers are scores, everything else is said."""
        for column, value in entry.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                self.scores[column] = value
            else:
                self.captions[column] = value


def sidecar(name: str, data: bytes | Unreadable) -> str | dict[str, Any] | Reject:
    """What a .txt or .json file beside a picture says: its text, or its object."""
    if isinstance(data, Unreadable):
        return Reject(name, f"cannot be read: {str(data).removeprefix(shown(name) + ': ')}")
    if len(data) > MAX_CAPTION_BYTES:
        return Reject(name, f"is larger than {MAX_CAPTION_BYTES:,} bytes, which is no caption")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return Reject(name, f"is not UTF-8 (byte {error.start})")
    if extension(name) != "json":
        return text.strip()
    value = parse_json(text)
    return value if isinstance(value, dict) else Reject(name, value)


def parse_json(text: str) -> dict[str, Any] | str:
    """A JSON object, or the reason why the text is none."""
    try:
        value = json.loads(text, parse_constant=_null)
    except (ValueError, RecursionError) as error:
        return f"is not JSON: {error}"
    if "\\ud" in text.lower() and broken(json.dumps(value, ensure_ascii=False)):
        return "has an escape that stands for half a character, which is not valid Unicode"
    return value if isinstance(value, dict) else f"is not a JSON object but {brief(value)}"


def _is_data(name: str) -> bool:
    kind = extension(name)
    return kind in EXTENSIONS or kind in ("txt", "json") or name.lower() in METADATA_NAMES


def _jsonl_rows(data: bytes, columns: dict[str, None]) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """(line number, row, or the reason why the line is none); fills `columns` in order of appearance."""
    for line, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not raw.strip():
            continue
        try:
            row = parse_json(raw.decode("utf-8"))
        except UnicodeDecodeError:
            yield line, "is not UTF-8"
            continue
        if isinstance(row, dict):
            columns.update(dict.fromkeys(row))
        yield line, row


def _null(name: str) -> None:
    """NaN and Infinity, which Python writes and JSON has not, count as null."""


def _csv_rows(data: bytes, columns: dict[str, None]) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """As `_jsonl_rows`; the first record is the header, and a record's number is that of its last line."""
    text = data.removeprefix(b"\xef\xbb\xbf").decode("utf-8", errors="surrogateescape")
    csv.field_size_limit(max(csv.field_size_limit(), MAX_CAPTION_BYTES))
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] | None = None
    while True:
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield reader.line_num, f"is not CSV: {error}"
            continue
        if not fields:
            continue
        if header is None:
            header = fields
            if any(map(broken, header)):
                yield reader.line_num, "the header is not UTF-8"
                return
            columns.update(dict.fromkeys(header))
            twice = sorted({shown(name) for name in header if header.count(name) > 1})
            if twice:
                yield reader.line_num, f"the header has a column twice ({', '.join(twice)}); the last one counts"
        elif len(fields) != len(header):
            yield reader.line_num, f"has {len(fields)} fields, the header has {len(header)}"
        elif any(map(broken, fields)):
            yield reader.line_num, "is not UTF-8"
        else:
            yield reader.line_num, dict(zip(header, fields, strict=True))
