"""A folder of image files with captions in text or .json files beside them, or in metadata.jsonl / metadata.csv."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.cache.arrow import batches
from pipeline.cache.keys import ItemRows
from pipeline.cache.layout import digest
from pipeline.cache.scratch import Scratch
from pipeline.errors import UserError
from pipeline.sources import annotation_files
from pipeline.sources.caption_columns import CaptionRule
from pipeline.sources.filenames import (
    EXTENSIONS,
    base,
    composed,
    error_text,
    escaped,
    extension,
    kind_of_file,
    lost_picture,
    spellings,
    stem,
    unsafe_reason,
)
from pipeline.sources.filesystem import LEADS_OUT, Filesystem, LocalFilesystem, Unreadable, mode_of
from pipeline.sources.further import Further
from pipeline.sources.metadata_files import (
    FILE_COLUMN,
    METADATA_NAMES,
    REJECTS,
    MetadataReader,
    PictureRows,
    Pictures,
    check_caption_columns,
    no_column,
)
from pipeline.sources.range_prefetch import FileRange
from pipeline.sources.reject_kinds import Kinds
from pipeline.sources.sidecars import CAPTION_ENDINGS, MAX_CAPTION_BYTES, TEXT_ENDINGS, SampleColumns, read_sidecar
from pipeline.sources.source import (
    Format,
    Fragment,
    Given,
    Item,
    ListedItems,
    Part,
    Place,
    PrefetchedSource,
    Reject,
    Source,
    Stats,
    with_further,
)
from pipeline.sources.unread import explain

METADATA_BATCH = 4096
"""Rows of a metadata file whose pictures are looked up at once."""

SIDECAR_BATCH = 256
"""Pictures whose caption files are requested at once; an object store answers the requests in parallel."""


_PICTURE, _TEXT, _OBJECT, _PREFIXED = "", "0", "1", "2"
"""Kinds of files while they are sorted; of caption files by precedence: text, X.json, and .json with a longer name than
the picture's."""

_PICTURES = pa.schema([("item", pa.string())])
FILES = pa.schema([("kind", pa.string()), ("name", pa.string())])
_SIDECARS = pa.schema([("item", pa.string()), *FILES])
_FURTHER = pa.schema([("item", pa.string()), ("name", pa.string())])


class _Found:
    """Files of a folder while it is listed. refused: pictures among the rejects; further: by kind, for their owners."""

    def __init__(self, scratch: Scratch, further: Sequence[Further]):
        self.captions, self.rejects = scratch.row_writer(FILES), scratch.row_writer(REJECTS)
        self.further = {one: scratch.row_writer(_FURTHER) for one in further if one.column is None}
        self.metadata: list[str] = []
        self.refused = 0


class Listing:
    """The pictures of a source with their caption files, in temporary files.

    Args:
        pictures: names in any order, each once.
        captions: caption files, columns `kind` and `name`.
        rejects: columns `item` and `reason`.
        rows: what the metadata files say about them; set before items are asked for.

    Attributes:
        further: files by name, with the `Further.owner` of each. others: pictures that rows name as further pictures.
        rejects: ascending by item. orphans: caption files without a picture.
    """

    def __init__(
        self,
        scratch: Scratch,
        pictures: Iterable[str],
        captions: Callable[[], pa.Table] = FILES.empty_table,
        rows: Pictures | None = None,
    ):
        self.rows = rows
        self.further: dict[Further, ItemRows] = {}
        self.others: ItemRows | None = None
        self.pictures = scratch.rows(_PICTURES, scratch.sorted_rows((name,) for name in pictures))
        self.rejects = REJECTS.empty_table()
        self.orphans = Kinds()
        self._scratch = scratch
        self._sidecars = ItemRows(scratch.rows(_SIDECARS, self._owned(captions())), scratch)

    def __len__(self) -> int:
        return len(self.pictures)

    def reject(self, rejects: Iterable[tuple[str, ...]]) -> None:
        """Take over all rejects: (item, reason)."""
        numbered = ((item, f"{number:020d}", reason) for number, (item, reason) in enumerate(rejects))
        ordered = ((item, reason) for item, _, reason in self._scratch.sorted_rows(numbered))
        self.rejects = self._scratch.rows(REJECTS, ordered)

    @property
    def has_sidecars(self) -> bool:
        """Whether any picture has a caption file."""
        return bool(len(self._sidecars.table))

    def keys(self, start: int, stop: int) -> list[str]:
        """Some pictures, by their position."""
        return self.pictures.column("item").slice(start, stop - start).to_pylist()

    def metadata(self, keys: list[str]) -> list[PictureRows | None]:
        """What the metadata files say about pictures."""
        return [None] * len(keys) if self.rows is None else self.rows.find(keys)

    def sidecars(self, keys: list[str]) -> list[list[str]]:
        """The caption files of some pictures."""
        kinds, names = (self._sidecars.table.column(name) for name in FILES.names)
        every = self._sidecars.every(keys)
        return [[name for _, name in sorted((kinds[at].as_py(), names[at].as_py()) for at in rows)] for rows in every]

    def further_of(self, further: Further, keys: list[str]) -> list[list[str]]:
        """The further pictures of some pictures, by name."""
        owners, found = [further.owners(key) for key in keys], self.further[further]
        rows = iter(found.every(list(chain.from_iterable(owners))))
        names = found.table.column("name")
        return [[names[row].as_py() for _ in some for row in next(rows)] for some in owners]

    def rejected(self, start: int, stop: int) -> Iterator[Reject]:
        """Some rejects, by their position."""
        columns = self.rejects.slice(start, stop - start).columns
        yield from map(Reject, *(column.to_pylist() for column in columns))

    def _owned(self, captions: pa.Table) -> Iterator[tuple[str, str, str]]:
        """(picture, kind, caption file): a caption file goes to the pictures of its name, a .json file without any to
        those with the longest name that it begins with."""
        above: list[tuple[str, list[str]]] = []  # names that the next ones may begin with, the longest last
        for name, files in groupby(self._scratch.sorted_rows(self._by_base(captions)), itemgetter(0)):
            while above and not name.startswith(above[-1][0]):
                above.pop()
            pictures: list[str] = []
            for _, kind, file in files:
                if kind == _PICTURE:
                    pictures.append(file)
                elif pictures:
                    yield from ((picture, kind, file) for picture in _owners(file, pictures))
                elif kind == _OBJECT and above and "/" not in name.removeprefix(above[-1][0]):
                    yield from ((picture, _PREFIXED, file) for picture in above[-1][1])
                else:
                    self.orphans.note(f".{extension(file)} file without a picture", 1, [file])
            if pictures:
                above.append((name, pictures))

    def _by_base(self, captions: pa.Table) -> Iterator[tuple[str, str, str]]:
        """(`base`, kind, name) of each picture and caption file."""
        for (name,) in texts(self.pictures):
            yield base(name), _PICTURE, name
        for kind, name in texts(captions):
            yield base(name), kind, name


class FolderSource(PrefetchedSource):
    """A folder of pictures, searched recursively.

    Captions of `dir/X.jpg`: the text of `dir/X.txt` (UTF-8, all of it, surrounding whitespace removed; NVlabs' loader
    takes the first line only), the caption columns of the JSON object in `dir/X.json`, and those of every row that
    names the file in a `metadata.jsonl` or `metadata.csv` (`file_name` is relative to the metadata file's folder, which
    may be a subfolder, or absolute). `X.jpg.txt`, `X.caption` and the like are read as `X.txt` (see `sidecars`).
    Different captions all become candidates, weighted as `CaptionRule` says. The other columns become the item's `meta`
    (the first value of a column counts; JSON files come before rows).

    Files of NVlabs' SanaImgDataset are recognised by their content: `dir/X<anything>.json` with {"X": {column: text}}
    or {"X": {column: score}}; a score of `prompt` is that of `X.txt`.

    Hidden files and folders, and files that are not pictures, are ignored and counted. Links are followed to files
    inside the root only (`LocalFilesystem.inside`); linked folders are not entered. Keys are names as the disk has
    them; captions and rows may write them in another Unicode form, and extensions may be in any case.

    Args:
        root: the folder, or another filesystem.
        rule: which captions; or the column of the metadata files that holds them.
        name: the source's name in sample identities.
    """

    def __init__(self, root: Path | str | Filesystem, rule: CaptionRule | str, name: str = "folder"):
        self.filesystem = root if isinstance(root, Filesystem) else LocalFilesystem(root)
        self.location = self.filesystem.location
        self.rule: CaptionRule = rule if isinstance(rule, CaptionRule) else CaptionRule.column(rule)
        self.name = name
        self.ignored = Kinds()

    further_by = frozenset({"suffix", "folder", "column"})

    def items(self) -> Iterator[Item | Reject]:
        listing = self._list()  # errors of the whole folder are raised here, before the iteration
        return chain(listing.rejected(0, len(listing.rejects)), self._items(0, len(listing), listing))

    def fragments(self, part: Part, size: int, listed: ListedItems) -> Iterator[Fragment]:
        """Ranges of pictures by name, so that the process that lists need not read every caption."""
        listing = self._list()
        for first in range(0, len(listing.rejects), size):
            after = min(first + size, len(listing.rejects))
            rejects = partial(listing.rejected, first, after)
            yield Fragment(dict, partial(_identity_of, rejects), rejects, after - first)
        for first in range(0, len(listing), size):
            after = min(first + size, len(listing))
            yield Fragment(
                partial(self._stats, first, after, listing),
                partial(self._identity, first, after, listing),
                partial(self._items, first, after, listing),
                after - first,
            )

    def _stats(self, start: int, stop: int, listing: Listing) -> Stats:
        keys = listing.keys(start, stop)
        stats = self.filesystem.stat_many(keys)
        if not self.further:
            return stats
        every = self._further_places(keys, listing.metadata(keys), listing)
        names = {key: [place.item for places in found.values() for place in places] for key, found in every.items()}
        others = self.filesystem.stat_many(sorted(set(chain.from_iterable(names.values()))))

        def whole(key: str) -> tuple[int, int] | Unreadable:
            some = [stats[key], *(others[name] for name in names[key])]
            bad = next((stat for stat in some if isinstance(stat, Unreadable)), None)
            return bad or with_further(some[0], some[1:])  # type: ignore[arg-type]

        return {key: whole(key) for key in keys}

    def _identity(self, start: int, stop: int, listing: Listing, stats: Stats) -> bytes:
        keys = listing.keys(start, stop)
        sidecars = dict(zip(keys, listing.sidecars(keys), strict=True))
        files = self.filesystem.stat_many(sorted({name for names in sidecars.values() for name in names}))

        def described(key: str, rows: PictureRows | None) -> str:
            return repr((key, stats[key], [(name, files[name]) for name in sidecars[key]], rows))

        return digest("files", self.rule.identity(), repr(self.further), *map(described, keys, listing.metadata(keys)))

    def stat(self, place: Place) -> tuple[int, int]:
        return self.filesystem.stat(place.item)

    def _range(self, place: Place) -> FileRange:
        return FileRange(place.item)

    # ------------------------------------------------------------ listing

    def _list(self) -> Listing:
        """All names by kind, with the contents of the metadata files."""
        self.filesystem.refresh()
        self._reset_ignored()
        found, disk = _Found(self.scratch, self.further), self.filesystem
        if isinstance(disk, LocalFilesystem):
            files = self._walk(disk, found)
        else:
            files = ((key, unsafe_reason(key)) for key in disk.find_with_sizes(self.scratch))
        pictures = (key for key, problem in files if self._is_picture(key, problem, found))
        listing = Listing(self.scratch, pictures, found.captions.finish)
        self.ignored.merge(listing.orphans)
        metadata = MetadataReader(self.filesystem, self.rule, self.scratch, self.further)
        self._assign_further(listing, found)
        if not len(listing) and not found.refused:
            what, way = explain(self.filesystem) or ("", "sana-pipe encode --data DIR with the folder of the pictures")
            kinds = "\n" + "\n".join(self.ignored.ranked().lines()) if self.ignored.total else "an empty folder"
            raise UserError(
                f"the data folder {self.location!r} holds no picture",
                expected="files that end in .jpg, .png, .webp, .tif, ... (in subfolders, too)",
                found=": ".join(filter(None, [what, kinds])),
                fix=way,
            )
        if not found.metadata and not listing.has_sidecars and self.rule.default is None:
            self._refuse_annotations(listing)
        rows = ItemRows(listing.pictures, self.scratch) if found.metadata else None
        for file in sorted(found.metadata):
            assert rows is not None
            self._read_metadata(metadata, file, rows)
        _, listing.rows, rejects = metadata.finish()
        listing.others = ItemRows(metadata.others.finish(), self.scratch) if metadata.column_names else None
        listing.reject(chain(texts(found.rejects.finish()), texts(rejects)))
        return listing

    def _assign_further(self, listing: Listing, found: _Found) -> None:
        """Take over the further pictures; those of no picture are ignored."""
        pictures = self.scratch.row_writer(_PICTURES)
        if found.further:
            for key in (key for batch in batches(listing.pictures) for key in batch.column("item").to_pylist()):
                for owner in {owner for one in found.further for owner in one.owners(key)}:
                    pictures.add(owner)
        owned = ItemRows(pictures.finish(), self.scratch) if found.further else None
        for one, writer in found.further.items():
            table = writer.finish()
            listing.further[one] = ItemRows(table, self.scratch)
            for batch in batches(table):
                assert owned is not None
                for row in np.flatnonzero(owned.find(batch.column("item").to_pylist()) < 0).tolist():
                    self._ignore(f"{one.kind} picture of no picture", 1, [batch.column("name")[row].as_py()])

    def _refuse_annotations(self, listing: Listing) -> None:
        """Raises a UserError if captions of another form lie among the pictures, which have none."""
        for file in chain.from_iterable(self.ignored.examples.values()):
            if form := annotation_files.form_of(self.filesystem, file):
                pictures = chain.from_iterable(batch.column("item").to_pylist() for batch in batches(listing.pictures))
                raise annotation_files.refused(self.filesystem, file, form, pictures)

    def _walk(self, disk: LocalFilesystem, found: _Found) -> Iterator[tuple[str, str | None]]:
        """The files that are not hidden, and why each must not be used, or None."""
        for key, entry in disk.walk():
            if entry.name.startswith("."):
                self._ignore("hidden", 1, [key])
            elif disk.is_folder(entry):
                found.rejects.add(escaped(key), "is a linked folder; move or mount its pictures under the root")
            else:
                yield key, _problem(entry, key, disk) if _is_data(entry.name, extension(key)) else None

    def _is_picture(self, key: str, problem: str | None, found: _Found) -> bool:
        """Whether a file is a usable picture by its name; another one is added to `found` or ignored. problem: why it
        must not be used."""
        kind, name = extension(key), posixpath.basename(key)
        if not _is_data(name, kind):
            problem = lost_picture(name)
            if problem is not None:
                found.rejects.add(escaped(key), problem)
                found.refused += 1
            else:
                self._ignore(kind_of_file(key), 1, [key])
        elif kind in TEXT_ENDINGS and self.rule.text_weight is None:
            self._ignore(f".{kind} file (data.caption_weights does not list txt)", 1, [key])
        elif problem is not None:
            found.rejects.add(escaped(key), problem)
            found.refused += kind in EXTENSIONS
        elif name.lower() in METADATA_NAMES:
            found.metadata.append(key)
        elif kind in CAPTION_ENDINGS:
            found.captions.add(_OBJECT if kind == "json" else _TEXT, key)
        elif owned := next(((one, owner) for one in found.further if (owner := one.owner(key)) is not None), None):
            found.further[owned[0]].add(owned[1], key)
        else:
            return True
        return False

    def _read_metadata(self, metadata: MetadataReader, file: str, pictures: ItemRows) -> None:
        """Read the rows of one metadata file."""
        keyed = (
            (where, row, metadata.key(where, row, FILE_COLUMN, posixpath.dirname(file)))
            for where, row in metadata.rows(file)
        )
        source = ((where, row, key) for where, row, key in keyed if key is not None)
        while named := list(islice(source, METADATA_BATCH)):
            spelled = [spellings(key) for *_, key in named]
            known = iter((pictures.find(list(chain.from_iterable(spelled))) >= 0).tolist())
            for (where, row, key), forms in zip(named, spelled, strict=True):
                usable = [form for form, is_known in zip(forms, islice(known, len(forms)), strict=True) if is_known]
                if usable:
                    metadata.add(where, row, FILE_COLUMN, usable[0])
                    continue
                disk = self.filesystem if isinstance(self.filesystem, LocalFilesystem) else None
                exists = disk is not None and os.path.lexists(os.path.join(disk.root, key))
                state = "is not usable" if exists else "does not exist"
                name = row[FILE_COLUMN]
                reason = f"names {name!r}, which {state} as a picture under {posixpath.dirname(key) or '.'}"
                metadata.reject(where, reason)
        path, columns = self.filesystem.full_name(file), metadata.columns
        if columns and FILE_COLUMN not in columns:
            fix = f"rename the column that names the pictures to {FILE_COLUMN!r} in {path}"
            raise no_column(self.filesystem, file, repr(FILE_COLUMN), columns, fix)
        alternative = f", or remove {path} if the captions are in .txt files"
        check_caption_columns(self.filesystem, file, self.rule, columns, FILE_COLUMN, alternative)

    # ------------------------------------------------------------ items

    def _items(self, first: int, after: int, listing: Listing) -> Iterator[Item | Reject]:
        for start in range(first, after, SIDECAR_BATCH):
            stop = min(start + SIDECAR_BATCH, after)
            batch = listing.keys(start, stop)
            sidecars = dict(zip(batch, listing.sidecars(batch), strict=True))
            names = sorted({name for files in sidecars.values() for name in files})
            data = dict(zip(names, self.filesystem.read_many(names, MAX_CAPTION_BYTES), strict=True))
            every = listing.metadata(batch)
            further = self._further_places(batch, every, listing)
            others = None if listing.others is None else dict(zip(batch, listing.others.find(batch) >= 0, strict=True))
            for key, rows in zip(batch, every, strict=True):
                contents = {name: read_sidecar(name, data[name]) for name in sidecars[key]}
                if others is not None and others[key] and rows is None and not contents:
                    continue  # a further picture of another one
                for item in self._item(key, contents, rows):
                    yield self._with_further(item, further[key].__getitem__) if isinstance(item, Item) else item

    def _further_places(
        self, keys: list[str], rows: list[PictureRows | None], listing: Listing
    ) -> dict[str, dict[Further, list[Place]]]:
        """The further pictures of some pictures. rows: what metadata files say about them."""
        every: dict[str, dict[Further, list[Place]]] = {key: {} for key in keys}
        for one in self.further:
            if one.column is None:
                names = listing.further_of(one, keys)
            else:
                named = [None if row is None else row.meta.get(one.column) for row in rows]
                names = [[name] if name else [] for name in named]
            for key, some in zip(keys, names, strict=True):
                every[key][one] = [Place(name) for name in some]
        return every

    def _item(
        self, key: str, contents: dict[str, str | dict[str, Any] | Reject], rows: PictureRows | None
    ) -> Iterator[Item | Reject]:
        """An item and its rejects. contents: of the caption files; rows: from the metadata files."""
        name = posixpath.basename(stem(key))
        columns, contents = self._split_sample_files(key, contents)
        picture = PictureRows()
        if columns.captions:
            captions = self.rule.read(columns.captions, columns.scores)
            picture.candidates += captions.candidates
            picture.problems += [(key, reason) for reason in captions.problems]
        without = [self._add_content(picture, file, content, columns.scores) for file, content in contents.items()]
        if rows is not None:
            picture.add(rows)
        weighted = self._weighted(picture.candidates, key)
        if weighted:
            for file, problem in picture.problems:
                self._note(file, problem)
            yield Item(key, weighted, picture.meta)
            return
        reasons = [f"{where} {problem}" for where, problem in picture.problems] + list(filter(None, without))
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
            elif base(file) == base(key):
                others[file] = content
            else:
                self._ignore(".json file without a picture", 1, [file])
        return columns, others

    def _add_content(
        self, picture: PictureRows, file: str, content: str | dict[str, Any] | Reject, scores: dict[str, Any]
    ) -> str | None:
        """Add one caption file. scores: by column, for the text file. The result says that a .json file has no caption
        column, though it may serve for its other columns."""
        if isinstance(content, Reject):
            picture.problems.append((content.key, content.reason))
        elif isinstance(content, str):
            if content:
                picture.candidates.append(self.rule.text_file(content, scores))
            else:
                picture.problems.append((file, "is empty"))
        else:
            captions = self.rule.read(content)
            picture.candidates += captions.candidates
            others = {column: value for column, value in content.items() if column not in self.rule.columns}
            picture.meta = {**others, **picture.meta}
            reason = "; ".join(captions.problems)
            if reason and any(column in content for column in self.rule.columns):
                picture.problems.append((file, reason))
            elif reason:
                return f"{file} {reason}"
        return None


class Folder(Format):
    """A folder of pictures."""

    def shows(self, file: str) -> bool:
        name = posixpath.basename(file)
        return name.lower() in METADATA_NAMES or extension(file) in EXTENSIONS or lost_picture(file) is not None

    def has(self, filesystem: Filesystem, file: str) -> bool:
        return False

    def files(self, given: Given) -> tuple[Iterable[str], Kinds]:
        if given.files is not None:
            what = f"{given.filesystem.location}/{given.files[0]}: is a file, not a folder of pictures"
            raise UserError(what, fix="leave --format out, or give a folder")
        return (), Kinds()

    def source(self, given: Given, files: Iterable[str]) -> Source:
        return FolderSource(given.filesystem, given.rule, given.name)


def texts(table: pa.Table) -> Iterator[tuple[str, ...]]:
    """The rows of a table of text."""
    for batch in batches(table):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _identity_of(rejects: Callable[[], Iterator[Reject]], stats: Stats) -> bytes:
    return digest("items", *map(repr, rejects()))


def _is_data(name: str, kind: str) -> bool:
    return kind in EXTENSIONS or kind in CAPTION_ENDINGS or name.lower() in METADATA_NAMES


def _owners(file: str, pictures: list[str]) -> list[str]:
    """The pictures that a caption file with the same `base` belongs to: `X.jpg.txt` to X.jpg, else to those whose name
    it has up to the ending, as written or in another Unicode form; else to all."""
    name = stem(file)
    for form in (str, composed) if len(pictures) > 1 else ():
        owners = [picture for picture in pictures if form(name) in (form(picture), form(stem(picture)))]
        if owners:
            return owners
    return pictures


def _problem(entry: os.DirEntry[str], key: str, disk: LocalFilesystem) -> str | None:
    """Why a file must not be used, or None."""
    problem = unsafe_reason(key)
    if problem is not None:
        return problem
    if entry.is_symlink():
        if not disk.inside(entry.path):
            return LEADS_OUT
        if not mode_of(entry.path, disk.patience_s):
            return "is a broken link"
    try:
        return None if entry.is_file() else "is not a regular file"
    except OSError as error:
        return error_text(error)
