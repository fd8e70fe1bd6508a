"""Where pictures and captions come from: a `Source` lists items and reads their bytes.

What: the interface, and the first implementation, a folder of image files with captions in `.txt` files beside them
or in `metadata.jsonl` / `metadata.csv` (Hugging Face's imagefolder).
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
import stat as stat_module
import unicodedata
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import UserError

# Formats that `image` refuses are listed, too: a folder of HEIC photos must show as rejects, not as "no pictures".
EXTENSIONS = frozenset(
    {
        "jpg", "jpeg", "jpe", "jfif", "jif", "mpo", "png", "apng", "webp", "bmp", "dib", "gif", "tif", "tiff",
        "avif", "avifs", "jp2", "j2k", "j2c", "jpc", "jpf", "jpx", "jpm", "ppm", "pgm", "pbm", "pnm", "pfm", "qoi",
        "tga", "icb", "vda", "vst", "ico", "heic", "heif", "hif", "jxl", "psd", "dds", "exr", "hdr", "eps", "svg",
        "pcx", "sgi", "dng", "cr2", "cr3", "nef", "arw", "raf", "orf", "rw2",
    }
)  # fmt: skip
METADATA_NAMES = ("metadata.jsonl", "metadata.csv")
FILE_COLUMN = "file_name"
MAX_CAPTION_BYTES = 1 << 20


@dataclass(frozen=True)
class Item:
    """A picture and what is said about it.

    key: its name within the source; forward slashes, unique, stable when the source moves.
    captions: (text, weight) candidates, at least one; weights are relative.
    meta: what else the source knows, JSON values by column name.
    """

    key: str
    captions: tuple[tuple[str, float], ...]
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reject:
    """Something that looked like a part of the data and cannot be used. key: a file, or `FILE:LINE` of a metadata
    file; characters that a terminal would act on are escaped."""

    key: str
    reason: str


class Unreadable(OSError):
    """The bytes of one item cannot be had; the message is the plain reason."""


class Source(ABC):
    """A listing of items and access to their bytes."""

    name: str
    """With the key it identifies a sample, so it must not change when the source is moved."""

    ignored: int = 0
    """Files that the last listing passed over because they are no pictures (nor captions of one)."""

    @abstractmethod
    def items(self) -> Iterator[Item | Reject]:
        """Items in ascending order of their keys (by code point), with the rejects among or before them.

        Raises:
            UserError: the source as a whole cannot be what was meant (it does not exist, it holds no picture).
        """

    @abstractmethod
    def stat(self, key: str) -> tuple[int, int]:
        """(size in bytes, modification time in ns): equal values mean unchanged bytes.

        Raises:
            Unreadable: there is no such item any more, or its key is not one of this source.
        """

    @abstractmethod
    def read(self, key: str) -> bytes:
        """The whole file.

        Raises:
            Unreadable: as in `stat`, or the bytes cannot be read.
        """


class FolderSource(Source):
    """A folder of pictures, searched recursively.

    Captions of `dir/X.jpg`: the text of `dir/X.txt` (UTF-8, all of it, surrounding whitespace removed; NVlabs' loader
    takes the first line only), and the `caption_field` of every row that names the file in a `metadata.jsonl` or
    `metadata.csv` (`file_name` is relative to the metadata file's folder, which may be a subfolder). Captions that
    differ are all kept as candidates with equal weights. The other columns of a row become the item's `meta` (where
    several rows name one file, the first one that has the column counts).

    Hidden files and folders and files that are no pictures are ignored and counted. Links are followed to files inside
    the root only; linked folders are not entered. Names are taken as they are: no Unicode or case folding, except that
    extensions may be in any case.

    Args:
        root: the folder.
        caption_field: the column of the metadata files that holds the caption.
        name: the source's name in sample identities.

    Raises:
        UserError: the root does not exist or is no folder.
    """

    def __init__(self, root: Path | str, caption_field: str, name: str = "folder"):
        self.root = Path(root)
        self.caption_field = caption_field
        self.name = name
        self.ignored_kinds: Counter[str] = Counter()
        if not self.root.is_dir():
            raise UserError(
                f"the data folder {str(root)!r} " + ("is not a folder" if self.root.exists() else "does not exist"),
                expected="a folder of pictures with captions in .txt files or a metadata.jsonl / metadata.csv",
                fix="sana-pipe encode --data DIR",
            )
        self._real_root = os.path.realpath(self.root)

    def items(self) -> Iterator[Item | Reject]:
        listing = self._list()
        self.ignored_kinds = listing.ignored
        self.ignored = listing.ignored.total()
        if not listing.pictures and not listing.refused_pictures:
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(listing.ignored.items()))
            raise UserError(
                f"the data folder {str(self.root)!r} holds no picture",
                expected="files that end in .jpg, .png, .webp, .tif, ... (in subfolders, too)",
                found=kinds or "an empty folder",
                fix="sana-pipe encode --data DIR with the folder that holds the pictures",
            )
        told: dict[str, _Told] = {}
        rejects = listing.rejects
        for metadata in sorted(listing.metadata):
            rejects.extend(self._read_metadata(metadata, listing, told))
        return self._join(listing, rejects, told)

    def path(self, key: str) -> Path:
        """Where the item is.

        Raises:
            Unreadable: the key is absolute, climbs or leaves the root through a link.
        """
        problem = _hostile(key)
        if problem:
            raise Unreadable(f"{_shown(key)}: {problem}")
        path = os.path.join(self.root, *key.split("/"))
        if not self._inside(path):
            raise Unreadable(f"{_shown(key)}: a link leads out of the source folder")
        return Path(path)

    def stat(self, key: str) -> tuple[int, int]:
        path = self.path(key)
        try:
            found = os.stat(path)
        except (OSError, ValueError) as error:
            raise Unreadable(f"{_shown(key)}: {_said(error)}") from None
        if not stat_module.S_ISREG(found.st_mode):
            raise Unreadable(f"{_shown(key)}: is not a regular file")
        return found.st_size, found.st_mtime_ns

    def read(self, key: str) -> bytes:
        return self._read(key, self.path(key))

    def _read(self, key: str, path: Path | str, limit: int | None = None) -> bytes:
        """The file, or at most `limit` + 1 of its bytes. Where it lies has been checked."""
        try:
            # Not blocking: opening a pipe that nobody writes to would hang the run.
            handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
            with open(handle, "rb") as stream:
                if not stat_module.S_ISREG(os.fstat(handle).st_mode):
                    raise Unreadable(f"{_shown(key)}: is not a regular file")
                return stream.read() if limit is None else stream.read(limit + 1)
        except Unreadable:
            raise
        except (OSError, ValueError) as error:
            raise Unreadable(f"{_shown(key)}: {_said(error)}") from None

    def _inside(self, path: str) -> bool:
        try:
            return os.path.commonpath((self._real_root, os.path.realpath(path))) == self._real_root
        except (OSError, ValueError):
            return False

    def _list(self) -> _Listing:
        listing = _Listing()
        folders = [""]
        while folders:
            folder = folders.pop()
            try:
                with os.scandir(os.path.join(self.root, folder)) as entries:
                    found = list(entries)
            except OSError as error:
                listing.rejects.append(Reject(_shown(folder) or ".", f"the folder cannot be read: {_said(error)}"))
                continue
            for entry in found:
                self._sort_in(entry, folder, listing, folders)
        return listing

    def _sort_in(self, entry: os.DirEntry[str], folder: str, listing: _Listing, folders: list[str]) -> None:
        name = entry.name
        key = f"{folder}/{name}" if folder else name
        extension = _extension(name)
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
                    Reject(_shown(key), "is a linked folder; move or mount its pictures under the root")
                )
            else:
                folders.append(key)
            return
        lowered = name.lower()
        is_metadata = lowered in METADATA_NAMES
        if not (is_metadata or extension in EXTENSIONS or extension == "txt"):
            listing.ignored[f".{_shown(extension)} file" if extension else "file without an extension"] += 1
            return
        problem = _hostile(key)
        if problem is None and link:
            problem = None if self._inside(entry.path) else "a link leads out of the source folder"
            if problem is None and not os.path.exists(entry.path):
                problem = "is a broken link"
        if problem is None:
            try:
                if not entry.is_file():
                    problem = "is not a regular file"
            except OSError as error:
                problem = _said(error)
        if problem is not None:
            listing.rejects.append(Reject(_shown(key), problem))
            listing.refused_pictures += extension in EXTENSIONS
        elif is_metadata:
            listing.metadata.append(key)
        elif extension == "txt":
            listing.texts.setdefault(_stem(key), []).append(key)
        else:
            listing.pictures.add(key)

    def _join(self, listing: _Listing, rejects: list[Reject], told: dict[str, _Told]) -> Iterator[Item | Reject]:
        stems = {_stem(key) for key in listing.pictures}
        orphans = sum(len(keys) for stem, keys in listing.texts.items() if stem not in stems)
        if orphans:
            listing.ignored[".txt file without a picture"] += orphans
            self.ignored = listing.ignored.total()
        return self._generate(listing, rejects, told)

    def _generate(self, listing: _Listing, rejects: list[Reject], told: dict[str, _Told]) -> Iterator[Item | Reject]:
        yield from sorted(rejects, key=lambda reject: reject.key)
        for key in sorted(listing.pictures):
            captions: list[str] = []
            problems: list[Reject] = []
            for text in sorted(listing.texts.get(_stem(key), ())):
                outcome = self._sidecar(text)
                if isinstance(outcome, Reject):
                    problems.append(outcome)
                elif outcome not in captions:
                    captions.append(outcome)
            row = told.get(key)
            if row is not None:
                captions.extend(caption for caption in row.captions if caption not in captions)
            if captions:
                yield from problems
                yield Item(key, tuple((caption, 1.0) for caption in captions), row.meta if row is not None else {})
            elif problems or (row is not None and row.problems):
                reasons = [f"{p.key} {p.reason}" for p in problems] + (row.problems if row is not None else [])
                yield Reject(key, "has no usable caption: " + "; ".join(reasons))
            else:
                stem = posixpath.basename(_stem(key))
                yield Reject(key, f"has no caption: no {stem}.txt beside it and no metadata row that names it")

    def _sidecar(self, key: str) -> str | Reject:
        try:
            data = self._read(key, os.path.join(self.root, key), MAX_CAPTION_BYTES)
        except Unreadable as error:
            return Reject(key, f"cannot be read: {str(error).removeprefix(_shown(key) + ': ')}")
        if len(data) > MAX_CAPTION_BYTES:
            return Reject(key, f"is larger than {MAX_CAPTION_BYTES:,} bytes, which is no caption")
        try:
            caption = data.decode("utf-8-sig").strip()
        except UnicodeDecodeError as error:
            return Reject(key, f"is not UTF-8 (byte {error.start})")
        return caption or Reject(key, "is empty")

    def _read_metadata(self, metadata: str, listing: _Listing, told: dict[str, _Told]) -> list[Reject]:
        """Enters the rows of one metadata file into `told`; returns what could not be used of it."""
        try:
            data = self.read(metadata)
        except Unreadable as error:
            return [Reject(metadata, f"cannot be read: {str(error).removeprefix(_shown(metadata) + ': ')}")]
        rejects: list[Reject] = []
        rows: list[tuple[int, dict[str, Any]]] = []
        columns: dict[str, None] = {}
        parse = _csv_rows if metadata.lower().endswith(".csv") else _jsonl_rows
        for line, row in parse(data, columns):
            if isinstance(row, str):
                rejects.append(Reject(f"{metadata}:{line}", row))
            else:
                rows.append((line, row))
        missing = [column for column in (FILE_COLUMN, self.caption_field) if columns and column not in columns]
        if missing:
            file = os.path.join(self.root, metadata)
            others = [_shown(column) for column in columns if column != FILE_COLUMN]
            fix = f"rename the column that names the pictures to {FILE_COLUMN!r} in {file}"
            if FILE_COLUMN not in missing:
                fix = f"--set data.caption_field={others[0]}" if others else f"add a caption column to {file}"
                fix += f", or remove {file} if the captions are in .txt files"
            raise UserError(
                f"{file} has no column {missing[0]!r}",
                expected=f"the columns {FILE_COLUMN!r} and {self.caption_field!r} (data.caption_field)",
                found="the columns " + ", ".join(repr(_shown(column)) for column in columns),
                fix=fix,
            )
        if not rows and not rejects:
            rejects.append(Reject(metadata, "holds no row"))
        for line, row in rows:
            self._enter(metadata, line, row, listing, told, rejects)
        return rejects

    def _enter(
        self,
        metadata: str,
        line: int,
        row: dict[str, Any],
        listing: _Listing,
        told: dict[str, _Told],
        rejects: list[Reject],
    ) -> None:
        where = f"{metadata}:{line}"
        named = row.get(FILE_COLUMN)
        if not isinstance(named, str) or not named:
            rejects.append(Reject(where, f"names no file ({FILE_COLUMN} is {_brief(named)})"))
            return
        problem = _hostile(named)
        if problem is not None:
            rejects.append(Reject(where, f"names {_shown(named)!r}: {problem}"))
            return
        key = posixpath.normpath(posixpath.join(posixpath.dirname(metadata), named))
        if key not in listing.pictures:
            known = "is not usable" if os.path.lexists(os.path.join(self.root, key)) else "does not exist"
            rejects.append(
                Reject(where, f"names {named!r}, which {known} as a picture under {posixpath.dirname(key) or '.'}")
            )
            return
        entry = told.setdefault(key, _Told())
        for column, value in row.items():
            if column not in (FILE_COLUMN, self.caption_field):
                entry.meta.setdefault(column, value)
        caption = row.get(self.caption_field)
        reason = None
        if caption is None or (isinstance(caption, str) and not caption.strip()):
            present = self.caption_field in row
            reason = f"has an empty {self.caption_field!r}" if present else f"has no {self.caption_field!r}"
        elif not isinstance(caption, str):
            reason = f"has {_brief(caption)} for {self.caption_field!r}, which is not text"
        if reason is not None:
            entry.problems.append(f"{where} {reason}")
            rejects.append(Reject(where, reason))
        elif isinstance(caption, str):
            entry.captions.append(caption.strip())


@dataclass
class _Listing:
    """What a walk through the folder found. Keys throughout."""

    pictures: set[str] = field(default_factory=set)
    texts: dict[str, list[str]] = field(default_factory=dict)  # by stem: x.txt and x.TXT may both exist
    metadata: list[str] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    refused_pictures: int = 0
    ignored: Counter[str] = field(default_factory=Counter)


@dataclass
class _Told:
    """What the metadata files say about one picture."""

    captions: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)


def _extension(name: str) -> str:
    return posixpath.splitext(name)[1][1:].lower()


def _stem(key: str) -> str:
    return posixpath.splitext(key)[0]


def _broken(text: str) -> bool:
    """Holds surrogates: from a name or a text that is not UTF-8, or an escape that stands for half a character."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def _hostile(name: str) -> str | None:
    """Why a relative name must not be used as one, or None."""
    if _broken(name):
        return "the name is not valid UTF-8"
    if any(unicodedata.category(character) == "Cc" for character in name):
        return "the name has control characters"
    if "\\" in name:
        return "the name has a backslash"
    if name.startswith("/") or not name:
        return "the name is absolute" if name else "the name is empty"
    if ".." in name.split("/"):
        return "the name climbs with '..'"
    return None


def _shown(name: str) -> str:
    """The name for tables and terminals: control characters, surrogates and invisible marks escaped."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in name
    )


def _brief(value: Any) -> str:
    text = _shown(repr(value))
    return text if len(text) <= 60 else text[:57] + "..."


def _said(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _jsonl_rows(data: bytes, columns: dict[str, None]) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """(line number, row, or the reason why the line is none); fills `columns` in order of appearance."""
    for line, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not raw.strip():
            continue
        try:
            row = json.loads(raw.decode("utf-8"), parse_constant=_null)
        except UnicodeDecodeError:
            yield line, "is not UTF-8"
        except (ValueError, RecursionError) as error:
            yield line, f"is not JSON: {error}"
        else:
            if b"\\ud" in raw.lower() and _broken(json.dumps(row, ensure_ascii=False)):
                yield line, "has an escape that stands for half a character, which is not valid Unicode"
            elif isinstance(row, dict):
                columns.update(dict.fromkeys(row))
                yield line, row
            else:
                yield line, f"is not a JSON object but {_brief(row)}"


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
            columns.update(dict.fromkeys(header))
            twice = sorted({_shown(name) for name in header if header.count(name) > 1})
            if twice:
                yield reader.line_num, f"the header has a column twice ({', '.join(twice)}); the last one counts"
        elif len(fields) != len(header):
            yield reader.line_num, f"has {len(fields)} fields, the header has {len(header)}"
        elif any(map(_broken, fields)):
            yield reader.line_num, "is not UTF-8"
        else:
            yield reader.line_num, dict(zip(header, fields, strict=True))
