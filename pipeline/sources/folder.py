"""A folder of image files with captions in .txt or .json files beside them, or in metadata.jsonl / metadata.csv."""

from __future__ import annotations

import os
import posixpath
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from pipeline.cache.layout import digest
from pipeline.errors import UserError
from pipeline.sources.caption_columns import CaptionCandidate, CaptionRule
from pipeline.sources.filenames import EXTENSIONS, error_text, escaped, extension, stem, unsafe_reason
from pipeline.sources.filesystem import Filesystem, LocalFilesystem, Unreadable
from pipeline.sources.metadata_files import FILE_COLUMN, METADATA_NAMES, MetadataReader, PictureRows
from pipeline.sources.range_prefetch import FileRange
from pipeline.sources.sidecars import MAX_CAPTION_BYTES, SampleColumns, read_sidecar
from pipeline.sources.source import Item, Part, PartRange, PrefetchedSource, Reject, Seen

_SIDECAR_BATCH = 256
"""Pictures whose caption files are requested at once; an object store answers the requests in parallel."""


@dataclass
class Listing:
    """The files of a source by kind. All names are keys."""

    pictures: set[str] = field(default_factory=set)
    texts: dict[str, list[str]] = field(default_factory=dict)
    """Stem -> its .txt files (x.txt and x.TXT may both exist)."""
    objects: dict[str, list[str]] = field(default_factory=dict)
    """Stem -> its .json files."""
    prefixed: dict[str, list[str]] = field(default_factory=dict)
    """Stem of a picture -> .json files whose name begins with it and goes on."""
    metadata: list[str] = field(default_factory=list)
    rows: dict[str, PictureRows] = field(default_factory=dict)
    """Picture -> what the metadata files say about it."""
    rejects: list[Reject] = field(default_factory=list)
    refused_pictures: int = 0

    def sidecars(self, key: str) -> list[str]:
        """The caption files of a picture."""
        tables = (self.texts, self.objects, self.prefixed)
        return [name for files in tables for name in sorted(files.get(stem(key), ()))]

    def assign_prefixed(self) -> None:
        """Give each .json file without a picture of its name to the picture with the longest name it begins with."""
        stems = {stem(key) for key in self.pictures}
        for name in [name for name in self.objects if name not in stems]:
            prefixes = (name[:n] for n in range(len(name) - 1, name.rfind("/") + 1, -1))
            picture = next((prefix for prefix in prefixes if prefix in stems), None)
            if picture is not None:
                self.prefixed.setdefault(picture, []).extend(self.objects.pop(name))


@dataclass
class _PictureCaptions:
    """Captions of one picture from all its files.

    problems: captions that cannot be used.
    without: .json files without a caption column; they may serve for their other columns.
    """

    candidates: list[CaptionCandidate] = field(default_factory=list)
    problems: list[Reject] = field(default_factory=list)
    without: list[str] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)


class FolderSource(PrefetchedSource):
    """A folder of pictures, searched recursively.

    Captions of `dir/X.jpg`: the text of `dir/X.txt` (UTF-8, all of it, surrounding whitespace removed; NVlabs' loader
    takes the first line only), the caption columns of the JSON object in `dir/X.json`, and those of every row that
    names the file in a `metadata.jsonl` or `metadata.csv` (`file_name` is relative to the metadata file's folder, which
    may be a subfolder). Different captions all become candidates, weighted as `CaptionRule` says. The other columns
    become the item's `meta` (the first value of a column counts; JSON files come before rows).

    Files of NVlabs' SanaImgDataset are recognised by their content: `dir/X<anything>.json` with {"X": {column: text}}
    or {"X": {column: score}}; a score of `prompt` is that of `X.txt`.

    Hidden files and folders, and files that are not pictures, are ignored and counted. Links are followed to files
    inside the root only; linked folders are not entered. Names are used unchanged: no Unicode or case folding, except
    that extensions may be in any case.

    Args:
        root: the folder, or another filesystem.
        rule: which captions; or the one column of the metadata files that holds them.
        name: the source's name in sample identities.

    Raises:
        UserError: the root does not exist or is not a folder.
    """

    def __init__(self, root: Path | str | Filesystem, rule: CaptionRule | str, name: str = "folder"):
        if not isinstance(root, Filesystem):
            if not os.path.isdir(root):
                raise UserError(
                    f"the data folder {str(root)!r} "
                    + ("is not a folder" if os.path.exists(root) else "does not exist or may not be read"),
                    expected="a folder of pictures with captions in .txt files or a metadata.jsonl / metadata.csv",
                    fix="sana-pipe encode --data DIR",
                )
            root = LocalFilesystem(root)
        self.filesystem = root
        self.location = root.location
        self.rule: CaptionRule = rule if isinstance(rule, CaptionRule) else CaptionRule.column(rule)
        self.name = name
        self.ignored_kinds = Counter()

    def items(self) -> Iterator[Item | Reject]:
        listing = self._list()  # errors of the whole folder are raised here, before the iteration
        rejects = sorted(listing.rejects, key=lambda reject: reject.key)
        return chain(rejects, self._items(sorted(listing.pictures), listing))

    def runs(self, part: Part, size: int) -> Iterator[PartRange]:
        """Runs of pictures by name, so that the process that lists need not read every caption."""
        listing = self._list()
        if listing.rejects:
            rejects: list[Item | Reject] = sorted(listing.rejects, key=lambda reject: reject.key)
            yield self._run(rejects)
        keys = sorted(listing.pictures)
        for start in range(0, len(keys), size):
            part_keys = keys[start : start + size]
            yield PartRange(
                partial(self.filesystem.stat_many, part_keys),
                partial(self._identity, part_keys, listing),
                partial(self._items, part_keys, listing),
                len(part_keys),
            )

    def _identity(self, keys: list[str], listing: Listing, stats: Seen) -> bytes:
        sidecars = {key: listing.sidecars(key) for key in keys}
        files = self.filesystem.stat_many(sorted({name for names in sidecars.values() for name in names}))

        def described(key: str) -> str:
            return repr((key, stats[key], [(name, files[name]) for name in sidecars[key]], listing.rows.get(key)))

        return digest("files", self.rule.identity(), *map(described, keys))

    def path(self, key: str) -> Path:
        """The item's path on this disk.

        Raises:
            Unreadable: the key is absolute, climbs or leaves the root through a link.
        """
        if not isinstance(self.filesystem, LocalFilesystem):
            raise Unreadable(f"{escaped(key)}: is not on this disk")
        return self.filesystem.path(key)

    def stat(self, key: str) -> tuple[int, int]:
        return self.filesystem.stat(key)

    def read(self, key: str) -> bytes:
        return self.filesystem.read(key)

    def head(self, key: str, length: int) -> bytes:
        return self.filesystem.read(key, length)

    def _place_of(self, key: str) -> FileRange:
        return FileRange(key)

    # ------------------------------------------------------------ listing

    def _list(self) -> Listing:
        """All names by kind, with the contents of the metadata files."""
        self.filesystem.refresh()
        self._reset_ignored()
        listing = Listing()
        if isinstance(self.filesystem, LocalFilesystem):
            self._walk(self.filesystem, listing)
        else:
            for key in self.filesystem.find():
                self._classify(key, unsafe_reason(key), listing)
        metadata = MetadataReader(self.filesystem, self.rule)
        if not listing.pictures and not listing.refused_pictures:
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.ignored_kinds.items()))
            raise UserError(
                f"the data folder {metadata.root!r} holds no picture",
                expected="files that end in .jpg, .png, .webp, .tif, ... (in subfolders, too)",
                found=kinds or "an empty folder",
                fix="sana-pipe encode --data DIR with the folder that holds the pictures",
            )
        for file in sorted(listing.metadata):
            self._read_metadata(metadata, file, listing.pictures)
        listing.rows = metadata.pictures
        listing.rejects += metadata.rejects
        listing.assign_prefixed()
        stems = {stem(key) for key in listing.pictures}
        for kind, files in (("txt", listing.texts), ("json", listing.objects)):
            orphans = sum(len(keys) for name, keys in files.items() if name not in stems)
            if orphans:
                self._ignore(f".{kind} file without a picture", orphans)
        return listing

    def _walk(self, disk: LocalFilesystem, listing: Listing) -> None:
        folders = [""]
        while folders:
            folder = folders.pop()
            try:
                with os.scandir(os.path.join(disk.root, folder)) as scan:
                    entries = list(scan)
            except OSError as error:
                disk.raise_unlisted(error)
            for entry in entries:
                key = f"{folder}/{entry.name}" if folder else entry.name
                if entry.name.startswith("."):
                    self._ignore("hidden")
                elif not _is_folder(entry):
                    self._classify(key, _problem(entry, key, disk) if _is_data(entry.name) else None, listing)
                elif entry.is_symlink():
                    reason = "is a linked folder; move or mount its pictures under the root"
                    listing.rejects.append(Reject(escaped(key), reason))
                else:
                    folders.append(key)

    def _classify(self, key: str, problem: str | None, listing: Listing) -> None:
        """Add a file to the listing by its name. problem: why it must not be used."""
        kind, name = extension(key), posixpath.basename(key)
        if not _is_data(name):
            self._ignore(f".{escaped(kind)} file" if kind else "file without an extension")
        elif kind == "txt" and self.rule.text_weight is None:
            self._ignore(".txt file (data.caption_weights does not list txt)")
        elif problem is not None:
            listing.rejects.append(Reject(escaped(key), problem))
            listing.refused_pictures += kind in EXTENSIONS
        elif name.lower() in METADATA_NAMES:
            listing.metadata.append(key)
        elif kind == "txt":
            listing.texts.setdefault(stem(key), []).append(key)
        elif kind == "json":
            listing.objects.setdefault(stem(key), []).append(key)
        else:
            listing.pictures.add(key)

    def _read_metadata(self, metadata: MetadataReader, file: str, pictures: set[str]) -> None:
        """Read the rows of one metadata file."""
        rows, columns = metadata.read(file)
        path = metadata.path(file)
        if columns and FILE_COLUMN not in columns:
            raise UserError(
                f"{path} has no column {FILE_COLUMN!r}",
                expected=f"the columns {FILE_COLUMN!r} and {metadata.caption_columns}",
                found="the columns " + ", ".join(repr(escaped(column)) for column in columns),
                fix=f"rename the column that names the pictures to {FILE_COLUMN!r} in {path}",
            )
        alternative = f", or remove {path} if the captions are in .txt files"
        metadata.check_columns(file, columns, FILE_COLUMN, alternative)
        folder = posixpath.dirname(file)
        for line, row in rows:
            where = f"{file}:{line}"
            name = metadata.file_name(where, row, FILE_COLUMN)
            if name is None:
                continue
            key = posixpath.normpath(posixpath.join(folder, name))
            if key in pictures:
                metadata.add(where, row, FILE_COLUMN, key)
                continue
            disk = self.filesystem if isinstance(self.filesystem, LocalFilesystem) else None
            exists = disk is not None and os.path.lexists(os.path.join(disk.root, key))
            state = "is not usable" if exists else "does not exist"
            reason = f"names {name!r}, which {state} as a picture under {posixpath.dirname(key) or '.'}"
            metadata.rejects.append(Reject(where, reason))

    # ------------------------------------------------------------ items

    def _items(self, keys: list[str], listing: Listing) -> Iterator[Item | Reject]:
        for start in range(0, len(keys), _SIDECAR_BATCH):
            batch = keys[start : start + _SIDECAR_BATCH]
            sidecars = {key: listing.sidecars(key) for key in batch}
            names = sorted({name for files in sidecars.values() for name in files})
            data = dict(zip(names, self.filesystem.read_many(names, MAX_CAPTION_BYTES), strict=True))
            for key in batch:
                contents = {name: read_sidecar(name, data[name]) for name in sidecars[key]}
                yield from self._item(key, contents, listing.rows.get(key))

    def _item(
        self, key: str, contents: dict[str, str | dict[str, Any] | Reject], rows: PictureRows | None
    ) -> Iterator[Item | Reject]:
        """An item and its rejects. contents: of the caption files; rows: from the metadata files."""
        name = posixpath.basename(stem(key))
        columns, contents = self._split_sample_files(key, contents)
        picture = _PictureCaptions()
        if columns.captions:
            captions = self.rule.read(columns.captions, columns.scores)
            picture.candidates += captions.candidates
            picture.problems += [Reject(key, reason) for reason in captions.problems]
        for file, content in contents.items():
            self._add_content(picture, file, content, columns.scores)
        row_problems: list[str] = []
        if rows is not None:
            picture.candidates += rows.candidates
            picture.meta = {**rows.meta, **picture.meta}
            row_problems = rows.problems
        weighted = self._weighted(picture.candidates, key)
        if weighted:
            yield from picture.problems
            yield Item(key, weighted, picture.meta)
            return
        reasons = [f"{p.key} {p.reason}" for p in picture.problems] + picture.without + row_problems
        if reasons:
            yield Reject(key, "has no usable caption: " + "; ".join(reasons))
        else:
            yield Reject(key, f"has no caption: no {name}.txt beside it and no metadata row that names it")

    def _split_sample_files(
        self, key: str, contents: dict[str, str | dict[str, Any] | Reject]
    ) -> tuple[SampleColumns, dict[str, str | dict[str, Any] | Reject]]:
        """The columns from files of NVlabs' SanaImgDataset, which hold an object under the picture's name; and the
        other caption files. A file that only begins with the picture's name and is of another kind is ignored."""
        name = posixpath.basename(stem(key))
        columns, others = SampleColumns(), {}
        for file, content in contents.items():
            if isinstance(content, dict) and isinstance(content.get(name), dict):
                columns.add(content[name])
            elif stem(file) == stem(key):
                others[file] = content
            else:
                self._ignore(".json file without a picture")
        return columns, others

    def _add_content(
        self, picture: _PictureCaptions, file: str, content: str | dict[str, Any] | Reject, scores: dict[str, Any]
    ) -> None:
        """Add one caption file. scores: by column, for the text file."""
        if isinstance(content, Reject):
            picture.problems.append(content)
        elif isinstance(content, str):
            if content:
                picture.candidates.append(self.rule.text_file(content, scores))
            else:
                picture.problems.append(Reject(file, "is empty"))
        else:
            captions = self.rule.read(content)
            picture.candidates += captions.candidates
            others = {column: value for column, value in content.items() if column not in self.rule.columns}
            picture.meta = {**others, **picture.meta}
            reason = "; ".join(captions.problems)
            if reason and any(column in content for column in self.rule.columns):
                picture.problems.append(Reject(file, reason))
            elif reason:
                picture.without.append(f"{file} {reason}")


def _is_data(name: str) -> bool:
    kind = extension(name)
    return kind in EXTENSIONS or kind in ("txt", "json") or name.lower() in METADATA_NAMES


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a circle of links
        return False


def _problem(entry: os.DirEntry[str], key: str, disk: LocalFilesystem) -> str | None:
    """Why a file must not be used, or None."""
    problem = unsafe_reason(key)
    if problem is not None:
        return problem
    if entry.is_symlink():
        if not disk.inside(entry.path):
            return "a link leads out of the source folder"
        if not os.path.exists(entry.path):
            return "is a broken link"
    try:
        return None if entry.is_file() else "is not a regular file"
    except OSError as error:
        return error_text(error)
