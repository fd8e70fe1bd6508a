"""A folder of image files with captions in text or .json files next to them, or in metadata.jsonl / metadata.csv."""

from __future__ import annotations

import os
import posixpath
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby, islice
from operator import itemgetter
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from sana_pipe.base.errors import UserError
from sana_pipe.data.cache.arrow import batches
from sana_pipe.data.cache.item_rows import ItemRows
from sana_pipe.data.cache.layout import digest
from sana_pipe.data.cache.scratch import Scratch
from sana_pipe.data.sources import listing_hints
from sana_pipe.data.sources.caption_columns import CaptionRule, PictureCaptions
from sana_pipe.data.sources.controls_and_masks import ControlOrMask
from sana_pipe.data.sources.filenames import (
    EXTENSIONS,
    base,
    composed,
    error_text,
    escaped,
    extension,
    is_text,
    kind_of_file,
    lost_picture,
    spellings,
    stem,
    unsafe_reason,
)
from sana_pipe.data.sources.filesystem import LEADS_OUT, Filesystem, LocalFilesystem, Unreadable, mode_of
from sana_pipe.data.sources.metadata_files import (
    FILE_COLUMN,
    METADATA_NAMES,
    REJECTS,
    MetadataReader,
    Pictures,
    check_caption_columns,
    no_column,
)
from sana_pipe.data.sources.range_prefetch import FileRange
from sana_pipe.data.sources.reject_kinds import Kinds
from sana_pipe.data.sources.sidecars import (
    CAPTION_ENDINGS,
    MAX_CAPTION_BYTES,
    TEXT_ENDINGS,
    Content,
    SampleColumns,
    captions_of,
    read_sidecar,
)
from sana_pipe.data.sources.source import (
    Format,
    Fragment,
    Given,
    Item,
    ListedItems,
    Part,
    Place,
    Reject,
    Source,
    Stats,
    with_controls_and_masks,
)
from sana_pipe.data.sources.unread import annotations_refused, explain, form_of_annotations

SHARED = "caption file of several pictures"
METADATA_BATCH = 4096
"""Rows of a metadata file whose pictures are looked up at once."""

SIDECAR_BATCH = 256
"""Pictures whose caption files are requested at once; an object store answers the requests in parallel."""


_PICTURE, _SISTER, TEXT, OBJECT, _PREFIXED = "", "!", "0", "1", "2"
"""Kinds of files, in the order in which those of one name are sorted: a picture, one whose control picture or mask is
in another folder, and caption files by precedence: text, X.json, and .json with a longer name than the picture's.
Behind them come the control pictures and masks, by `ControlOrMask.kind`."""

_PICTURES = pa.schema([("item", pa.string())])
FILES = pa.schema([("base", pa.string()), ("kind", pa.string()), ("name", pa.string())])
_NEXT_TO = pa.schema([("item", pa.string()), ("kind", pa.string()), ("name", pa.string())])


class _Found:
    """Files of a folder while it is listed. next_to: captions, control pictures and masks, with the `base` of their
    pictures; refused: pictures among the rejects; linked: folders that are links."""

    def __init__(self, scratch: Scratch):
        self.next_to, self.rejects = scratch.row_writer(FILES), scratch.row_writer(REJECTS)
        self.metadata: list[str] = []
        self.linked: list[str] = []
        self.refused = 0


class Listing:
    """The pictures of a source with the files next to them, in temporary files.

    Args:
        pictures: names in any order, each once.
        next_to: caption files, control pictures and masks, columns of `FILES`; called after the last picture.
        controls_and_masks: the kinds of control pictures and masks.
        rows: what the metadata files say about the pictures; set before items are asked for.

    Attributes:
        others: pictures that rows name as control pictures and masks.
        rejects: columns `item` and `reason`, ascending by item. orphans: files next to no picture; loose: the caption
            files among them, as of `Source.loose`. shared: caption files of several pictures.
    """

    def __init__(
        self,
        scratch: Scratch,
        pictures: Iterable[str],
        next_to: Callable[[], pa.Table] = FILES.empty_table,
        controls_and_masks: Sequence[ControlOrMask] = (),
        rows: Pictures | None = None,
    ):
        self.rows = rows
        self.others: ItemRows | None = None
        self.pictures = scratch.rows(_PICTURES, scratch.sorted_rows((name,) for name in pictures))
        self.rejects = REJECTS.empty_table()
        self.orphans, self.shared, self.loose = Kinds(), Kinds(), Kinds()
        self._scratch, self._controls_and_masks = scratch, {one.kind: one for one in controls_and_masks}
        files = next_to()
        self._next_to = ItemRows(scratch.rows(_NEXT_TO, self._owned(files) if len(files) else ()), scratch)

    def __len__(self) -> int:
        return len(self.pictures)

    def reject(self, rejects: Iterable[tuple[str, ...]]) -> None:
        """Take over all rejects: (item, reason)."""
        numbered = ((item, f"{number:020d}", reason) for number, (item, reason) in enumerate(rejects))
        ordered = ((item, reason) for item, _, reason in self._scratch.sorted_rows(numbered))
        self.rejects = self._scratch.rows(REJECTS, ordered)

    @property
    def has_captions(self) -> bool:
        """Return whether any picture has a caption file."""
        kinds = pc.unique(self._next_to.table.column("kind")).to_pylist()
        return not self._controls_and_masks.keys() >= set(kinds)

    def keys(self, start: int, stop: int) -> list[str]:
        """Some pictures, by their position."""
        return self.pictures.column("item").slice(start, stop - start).to_pylist()

    def metadata(self, keys: list[str]) -> list[PictureCaptions | None]:
        """Return what the metadata files say about pictures."""
        return [None] * len(keys) if self.rows is None else self.rows.find(keys)

    def next_to(self, keys: list[str]) -> list[dict[str, list[str]]]:
        """The files next to some pictures: names by kind."""
        kinds, names = (self._next_to.table.column(column) for column in ("kind", "name"))
        result: list[dict[str, list[str]]] = [{} for _ in keys]
        for files, rows in zip(result, self._next_to.every(keys), strict=True):
            for kind, name in sorted((kinds[row].as_py(), names[row].as_py()) for row in rows):
                files.setdefault(kind, []).append(name)
        return result

    def rejected(self, start: int, stop: int) -> Iterator[Reject]:
        """Some rejects, by their position."""
        columns = self.rejects.slice(start, stop - start).columns
        yield from map(Reject, *(column.to_pylist() for column in columns))

    def _owned(self, next_to: pa.Table) -> Iterator[tuple[str, str, str]]:
        """(picture, kind, file): a file goes to the pictures of its name, in any case, a .json file without any to
        those with the longest name that it begins with."""
        above: list[tuple[str, list[str]]] = []  # names that the next ones may begin with, the longest last
        for name, files in groupby(self._scratch.sorted_rows(self._by_base(next_to)), itemgetter(0)):
            while above and not name.startswith(above[-1][0]):
                above.pop()
            pictures, below = list[str](), list[str]()
            for _, kind, file in files:
                one, owners = self._controls_and_masks.get(kind), list[str]()
                if kind in (_PICTURE, _SISTER):
                    (pictures if kind == _PICTURE else below).append(file)
                    continue
                if one is not None:
                    owners = _of_control_or_mask(one, file, pictures + (below if one.folder is not None else []))
                elif pictures:
                    owners = _owners(file, pictures)
                elif kind == OBJECT and above and "/" not in name.removeprefix(above[-1][0]):
                    kind, owners = _PREFIXED, above[-1][1]
                if not owners:
                    what = f".{extension(file)} file without a" if one is None else f"{one.kind} picture of no"
                    self.orphans.note(f"{what} picture", 1, [file])
                    if one is None:
                        note_loose(self.loose, file)
                elif one is None and len(owners) > 1:
                    self.shared.note(SHARED, 1, [f"{file} of {' and '.join(owners)}"])
                yield from ((picture, kind, file) for picture in owners)
            if pictures:
                above.append((name, pictures))

    def _by_base(self, next_to: pa.Table) -> Iterator[tuple[str, ...]]:
        """Rows of `FILES` for all files."""
        in_folders = [one for one in self._controls_and_masks.values() if one.folder is not None]
        for (name,) in texts(self.pictures):
            yield base(name).lower(), _PICTURE, name
            for below in dict.fromkeys(below for one in in_folders for below in one.owners(name)[1:]):
                yield below.lower(), _SISTER, name
        for name, kind, file in texts(next_to):
            yield name.lower(), kind, file


@dataclass(frozen=True)
class _Listed:
    """A picture of a listing. captions: its caption files; rows: what metadata files say about it;
    controls_and_masks: as of `Source._with_controls_and_masks`."""

    key: str
    captions: list[str]
    rows: PictureCaptions | None
    controls_and_masks: dict[ControlOrMask, list[Place]]


class FolderSource(Source):
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
        self.rule = rule if isinstance(rule, CaptionRule) else CaptionRule.column(rule)
        self.name = name
        self.ignored = Kinds()

    paired_by = frozenset({"suffix", "folder", "column"})

    def part(self, name: str) -> Iterator[Item | Reject]:
        listing = self._list()
        yield from listing.rejected(0, len(listing.rejects))
        yield from self._items(0, len(listing), listing)

    def fragments(self, part: Part, size: int, listed: ListedItems) -> Iterator[Fragment]:
        """Ranges of pictures by name, so that the process that lists need not read every caption."""
        listing = self._list()
        for first in range(0, len(listing.rejects), size):
            after = min(first + size, len(listing.rejects))
            rejects = partial(listing.rejected, first, after)
            yield Fragment.known(digest("items", *map(repr, rejects())), rejects, after - first)
        for first in range(0, len(listing), size):
            after = min(first + size, len(listing))
            yield Fragment(
                partial(self._stats, first, after, listing),
                partial(self._identity, first, after, listing),
                partial(self._items, first, after, listing),
                after - first,
            )

    def _listed(self, start: int, stop: int, listing: Listing) -> list[_Listed]:
        """Some pictures, by their position."""
        keys = listing.keys(start, stop)
        result = []
        for key, next_to, rows in zip(keys, listing.next_to(keys), listing.metadata(keys), strict=True):
            captions = [name for kind in (TEXT, OBJECT, _PREFIXED) for name in next_to.get(kind, ())]
            controls_and_masks = {}
            for one in self.controls_and_masks:
                named = rows.meta.get(one.column) if rows is not None and one.column is not None else None
                names = named if isinstance(named, list) else [named] if named else next_to.get(one.kind, ())
                controls_and_masks[one] = [Place(name) for name in names]
            result.append(_Listed(key, captions, rows, controls_and_masks))
        return result

    def _stats(self, start: int, stop: int, listing: Listing) -> Stats:
        if not self.controls_and_masks:
            return self.filesystem.stat_many(listing.keys(start, stop))
        names = {
            picture.key: [
                picture.key,
                *(place.item for places in picture.controls_and_masks.values() for place in places),
            ]
            for picture in self._listed(start, stop, listing)
        }
        stats = self.filesystem.stat_many(sorted(set(chain.from_iterable(names.values()))))

        def whole(key: str) -> tuple[int, int] | Unreadable:
            some = [stats[name] for name in names[key]]
            bad = next((stat for stat in some if isinstance(stat, Unreadable)), None)
            return bad or with_controls_and_masks(some[0], some[1:])  # type: ignore[arg-type]

        return {key: whole(key) for key in names}

    def _identity(self, start: int, stop: int, listing: Listing, stats: Stats) -> bytes:
        pictures = self._listed(start, stop, listing)
        files = self.filesystem.stat_many(sorted({name for picture in pictures for name in picture.captions}))
        described = (
            repr((picture.key, stats[picture.key], [(name, files[name]) for name in picture.captions], picture.rows))
            for picture in pictures
        )
        return digest("files", self.rule.identity(), repr(self.controls_and_masks), *described)

    def stat(self, place: Place) -> tuple[int, int]:
        return self.filesystem.stat(place.item)

    def _range(self, place: Place) -> FileRange:
        return FileRange(place.item)

    # ------------------------------------------------------------ listing

    def _list(self) -> Listing:
        """All names by kind, with the contents of the metadata files."""
        self.filesystem.refresh()
        self._reset_ignored()
        self.loose = Kinds()
        found, disk = _Found(self.scratch), self.filesystem
        if isinstance(disk, LocalFilesystem):
            files = self._walk(disk, found)
        else:
            files = ((key, unsafe_reason(key)) for key in disk.find_with_sizes(self.scratch))
        pictures = (key for key, problem in files if self._is_picture(key, problem, found))
        listing = Listing(self.scratch, pictures, found.next_to.finish, self.controls_and_masks)
        self.ignored.merge(listing.orphans)
        self.shared = listing.shared
        self.loose.merge(listing.loose)
        metadata = MetadataReader(self.filesystem, self.rule, self.scratch, self.controls_and_masks)
        if not len(listing) and not found.refused:
            what, way = explain(self.filesystem) or ("", "--data DIR with the folder of the pictures")
            if found.linked:
                what = f"links to folders, which are not followed: {', '.join(map(escaped, found.linked[:3]))}"
                way = f"--data {shlex.quote(escaped(self.filesystem.full_name(found.linked[0])))}"
            kinds = "\n" + "\n".join(self.ignored.ranked().lines()) if self.ignored.total else "an empty folder"
            raise UserError(
                f"the data folder {self.location!r} holds no picture",
                expected="files that end in .jpg, .png, .webp, .tif, ... (in subfolders, too)",
                found=": ".join(filter(None, [what, kinds])),
                fix=way,
            )
        if not found.metadata and not listing.has_captions and self.rule.config.caption in (None, "none"):
            self._refuse_annotations(listing)
        rows = ItemRows(listing.pictures, self.scratch) if found.metadata else None
        for file in sorted(found.metadata):
            assert rows is not None
            self._read_metadata(metadata, file, rows)
        _, listing.rows, rejects = metadata.finish()
        listing.others = ItemRows(metadata.others.finish(), self.scratch) if metadata.column_names else None
        listing.reject(chain(texts(found.rejects.finish()), texts(rejects)))
        return listing

    def _refuse_annotations(self, listing: Listing) -> None:
        """Raises a UserError if captions of another form, or a listing, lie among the pictures, which have none."""
        for file in chain.from_iterable(self.ignored.examples.values()):
            wanted = self.rule.config.caption is None
            if wanted and (form := form_of_annotations(self.filesystem, file)):
                raise annotations_refused(self.filesystem, file, form)
            listing_hints.refuse(self.filesystem, file, listing.pictures.column("item"), self.rule)

    def _walk(self, disk: LocalFilesystem, found: _Found) -> Iterator[tuple[str, str | None]]:
        """The files that are not hidden, and why each must not be used, or None."""
        for key, entry in disk.walk():
            if entry.name.startswith("."):
                self._ignore("hidden", 1, [key])
            elif disk.is_folder(entry):
                found.rejects.add(escaped(key), "is a linked folder; move or mount its pictures below the data folder")
                found.linked.append(key)
            else:
                yield key, _problem(entry, key, disk) if _is_data(entry.name, extension(key)) else None

    def _is_picture(self, key: str, problem: str | None, found: _Found) -> bool:
        """Return whether a file is a usable picture by its name; another one is added to `found` or ignored. problem:
        why it must not be used."""
        kind, name = extension(key), key.rpartition("/")[2]
        if not _is_data(name, kind):
            problem = lost_picture(name)
            if problem is not None:
                found.rejects.add(escaped(key), problem)
                found.refused += 1
            else:
                self._ignore(kind_of_file(key), 1, [key])
                if self.rule.text_weight is not None:
                    note_loose(self.loose, key)
        elif kind in TEXT_ENDINGS and self.rule.text_weight is None:
            self._ignore(f".{kind} file (data.caption_weights does not list txt)", 1, [key])
        elif problem is not None:
            found.rejects.add(escaped(key), problem)
            found.refused += kind in EXTENSIONS
        elif name.lower() in METADATA_NAMES:
            found.metadata.append(key)
        elif kind in CAPTION_ENDINGS:
            found.next_to.add(base(key), OBJECT if kind == "json" else TEXT, key)
        elif owned := next(
            ((owner, one.kind) for one in self.controls_and_masks if (owner := one.owner(key)) is not None), None
        ):
            found.next_to.add(*owned, key)
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
        check_caption_columns(self.filesystem, file, self.rule, columns, FILE_COLUMN, alternative, self.rule.seen)

    # ------------------------------------------------------------ items

    def _items(self, first: int, after: int, listing: Listing) -> Iterator[Item | Reject]:
        for start in range(first, after, SIDECAR_BATCH):
            pictures = self._listed(start, min(start + SIDECAR_BATCH, after), listing)
            names = sorted({name for picture in pictures for name in picture.captions})
            data = dict(zip(names, self.filesystem.read_many(names, MAX_CAPTION_BYTES), strict=True))
            others = set[str]()
            if listing.others is not None:
                keys = [picture.key for picture in pictures]
                others = {key for key, row in zip(keys, listing.others.find(keys).tolist(), strict=True) if row >= 0}
            for picture in pictures:
                if picture.key in others and picture.rows is None and not picture.captions:
                    continue  # a control picture or mask of another one
                contents = {name: read_sidecar(name, data[name]) for name in picture.captions}
                item = self._item(picture.key, contents, picture.rows)
                yield (
                    self._with_controls_and_masks(item, picture.controls_and_masks) if isinstance(item, Item) else item
                )

    def _item(self, key: str, contents: dict[str, Content], rows: PictureCaptions | None) -> Item | Reject:
        """The item of a picture, or why it is none. contents: of the caption files; rows: from the metadata files."""
        own, columns = self._split_sample_files(key, contents)
        picture, row = captions_of(self.rule, own, columns, key)
        if rows is not None:
            picture.add(rows)
        otherwise = (
            f"has no caption: no {posixpath.basename(stem(key))}.txt next to it and no metadata row that names it"
        )
        if row and not self.rule.has_caption_column(row):
            file = next((file for file, content in own.items() if isinstance(content, dict)), key)
            otherwise = f"has no usable caption: {file} {self.rule.lacking(row)}"
        return self._captioned(Place(key), picture, otherwise)

    def _split_sample_files(self, key: str, contents: dict[str, Content]) -> tuple[dict[str, Content], SampleColumns]:
        """The picture's own caption files, and the columns from files of NVlabs' SanaImgDataset, which hold an object
        under the picture's name. A file that only begins with the picture's name and is of another kind is ignored."""
        name = posixpath.basename(stem(key))
        own, columns = dict[str, Content](), SampleColumns()
        for file, content in contents.items():
            if isinstance(content, dict) and isinstance(content.get(name), dict):
                columns.add(content[name])
            elif base(file).lower() == base(key).lower():
                own[file] = content
            else:
                self._ignore(".json file without a picture", 1, [file])
        return own, columns


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


def note_loose(loose: Kinds, file: str) -> None:
    """Note a file that is the caption of no picture, if it may hold a caption."""
    if is_text(file):
        loose.note(posixpath.join(posixpath.dirname(file), f"*.{extension(file)}"), 1, [file])


def texts(table: pa.Table) -> Iterator[tuple[str, ...]]:
    """The rows of a table of text."""
    for batch in batches(table):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _is_data(name: str, kind: str) -> bool:
    return kind in EXTENSIONS or kind in CAPTION_ENDINGS or name.lower() in METADATA_NAMES


def _owners(file: str, pictures: list[str]) -> list[str]:
    """The pictures that a caption file with the same `base` in some case belongs to: `X.jpg.txt` to X.jpg, else to
    those whose name it has up to the ending, as written or in another Unicode form; else to all."""
    if len(pictures) == 1:
        return pictures
    name = stem(file)
    pictures = [picture for picture in pictures if base(picture) == base(file)] or pictures
    for form in (str, composed):
        owners = [picture for picture in pictures if form(name) in (form(picture), form(stem(picture)))]
        if owners:
            return owners
    return pictures


def _of_control_or_mask(one: ControlOrMask, file: str, pictures: list[str]) -> list[str]:
    """The pictures that a control picture or mask belongs to: of some whose names differ in case those that it has."""
    if one.folder is not None:
        owner = (one.owner(file) or "").lower()
        pictures = [picture for picture in pictures if owner in map(str.lower, one.owners(picture))]
    if len(pictures) <= 1:
        return pictures
    return one.nearest(file, [picture for picture in pictures if one.owner(file) in one.owners(picture)] or pictures)


def _problem(entry: os.DirEntry[str], key: str, disk: LocalFilesystem) -> str | None:
    """Say why a file must not be used, or None."""
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
