"""Tables of pictures: parquet files with image bytes or file names, and JSONL or CSV listings of files.

A row of a parquet file is named by `data.key_field`, else `<file>/<digest of the picture, or its name>`, never by its
position: a row that is deleted or moved in its file renames no other. Rows of a listing have the names of the pictures,
so that a listing and a folder give the same samples. Names of pictures are relative to `data.image_root`, else to the
table's folder, or URLs of objects (`objects`); URLs of web servers are refused (`web_tables`). Price: parquet is read
by row group. Row groups of up to `GROUP_BYTES` stay in memory; one above `MAX_GROUP_BYTES` is refused, with a command.
"""

from __future__ import annotations

import posixpath
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import pyarrow as pa

from sana_pipe.base.config import setting
from sana_pipe.base.errors import AwayError, UserError
from sana_pipe.data.cache.arrow import ParquetFile
from sana_pipe.data.cache.layout import content_digest, digest
from sana_pipe.data.sources.caption_columns import text_columns
from sana_pipe.data.sources.controls_and_masks import ControlOrMask
from sana_pipe.data.sources.filenames import (
    EXTENSIONS,
    error_text,
    escaped,
    extension,
    has_surrogates,
    is_link,
    is_web,
    shown,
    stem,
)
from sana_pipe.data.sources.filesystem import Filesystem, Unreadable, is_read_error, unreadable_reason
from sana_pipe.data.sources.folder import FolderSource, Listing, texts
from sana_pipe.data.sources.metadata_files import (
    LINK_COLUMNS,
    NAME_COLUMNS,
    MetadataReader,
    check_caption_columns,
    first_row,
    no_column,
    only,
    picture_column,
)
from sana_pipe.data.sources.name_patterns import kind_of
from sana_pipe.data.sources.objects import WithObjects, is_object
from sana_pipe.data.sources.range_prefetch import FileRange
from sana_pipe.data.sources.source import FilesSource, Format, Given, Item, Part, Place, Reject, Source
from sana_pipe.data.sources.unread import annotations_refused, form_of_annotations
from sana_pipe.data.sources.web_tables import CAPTIONS, refused

RULE = "parquet-3"
FIRST_ROWS = 1024
"""Rows that are decoded at once to find the first name in a table."""

GROUP_BYTES = 512 << 20
MAX_GROUP_BYTES = 1 << 30
PICTURE_COLUMNS = ("image", "img", "picture", "photo", "jpg", "jpeg", "png", "webp", "image_bytes", "bytes", "content")
"""Columns of bytes that are the pictures, the best first. One of another name is, if its bytes are pictures."""

SNIFFED = 16
"""Rows of a column that are looked at to find out whether it holds pictures."""

MAX_OTHERS = 64
"""Other files of a source whose columns are looked at for a message."""

JSON_CAPTIONS = ("caption", "tags")
"""Caption columns of .json listings without the configured one."""

_MAGIC = re.compile(
    rb"\xff\xd8\xff|\x89PNG|GIF8|BM|II\*\x00|MM\x00\*|RIFF....WEBP|....ftyp(?:avi|hei|mif|hev|msf)|....JXL |\xff\x0a"
    rb"|....jP  |qoif|\x00\x00\x01\x00|P[1-7]\s|DDS |8BPS",
    re.DOTALL,
)
"""The beginnings of files of pictures."""


class ListingSource(FolderSource):
    """Files named by JSONL or CSV files.

    Rows that name the same file become one item with all their captions. A missing file is noticed when it is read, and
    becomes a reject.

    The column that names the file is `data.image_field`, else that of `picture_column`. In a .json
    file a name without an ending is that of the picture with this stem (kohya's `meta_cap.json`).
    """

    def __init__(self, given: Given, files: Collection[str], format: str):
        is_json = all(extension(file) == "json" for file in files)
        super().__init__(
            WithObjects(given.filesystem, given.patience_s),
            replace(given.rule, fallback=JSON_CAPTIONS) if is_json else given.rule,
            given.name,
        )
        self._stems: tuple[str, dict[str, str]] | None = None
        self.files, self.format = sorted(set(files)), format
        self.image_field, self.image_root = given.config.image_field, given.config.image_root

    paired_by = frozenset({"column"})

    def _list(self) -> Listing:
        self.filesystem.refresh()
        self.filesystem.require(self.files)
        self._reset_ignored()
        self._stems, self.picture_columns = None, frozenset()
        metadata = MetadataReader(self.filesystem, self.rule, self.scratch, self.controls_and_masks, self.files)
        for file in self.files:
            self._read_listing(metadata, file)
        named, pictures, rejects = metadata.finish()
        names = self.scratch.sorted_rows(texts(named.select(["item"])))
        listing = Listing(self.scratch, (name for (name,), _ in groupby(names)), rows=pictures)
        listing.reject(texts(rejects))
        if not len(listing) and not len(listing.rejects):
            raise UserError(f"{self.location}: the listing names no picture", fix="sana-pipe encode --data LISTING")
        return listing

    def _read_listing(self, metadata: MetadataReader, file: str) -> None:
        column, is_json = self.image_field, extension(file) == "json"
        for where, row in metadata.rows(file):
            column = column or picture_column(row)
            key = metadata.key(where, row, column or NAME_COLUMNS[0], _folder(file, self.image_root))
            if key is not None and column is not None:
                metadata.add(where, row, column, self._with_ending(key) if is_json else key)
        if not metadata.columns:
            return
        if column is None or column not in metadata.columns:
            raise no_column(
                self.filesystem,
                file,
                repr(column) if column else "that names the pictures",
                metadata.columns,
                "--set data.image_field=COLUMN",
                f"one of {', '.join(NAME_COLUMNS)}, or the value of data.image_field",
            )
        other = ", or write a .jsonl with it, one object for each picture in a line" if is_json else ""
        check_caption_columns(self.filesystem, file, self.rule, metadata.columns, column, other, self.rule.seen)
        self.picture_columns |= {column}

    @property
    def uses_files(self) -> bool:
        return True

    @cached_property
    def _names_objects(self) -> bool:
        return bool(self.files) and is_object(first_row(self.filesystem, self.files[0], self.image_field)[0])

    @property
    def is_remote(self) -> bool:
        return super().is_remote or self._names_objects

    def _with_ending(self, name: str) -> str:
        """The picture of a name that may lack its ending."""
        if extension(name) in EXTENSIONS:
            return name
        folder = posixpath.dirname(name)
        if self._stems is None or self._stems[0] != folder:
            pictures = (file for file in self.filesystem.names(folder) if extension(file) in EXTENSIONS)
            self._stems = folder, {stem(file): file for file in pictures}
        return self._stems[1].get(name, name)


@dataclass(frozen=True)
class _Layout:
    """The way in which a parquet file holds its pictures: in which column, whether as bytes, and whether in a store.
    unused: other columns of pictures."""

    column: str
    holds_bytes: bool
    names_objects: bool
    unused: frozenset[str]


class ParquetSource(FilesSource):
    """Parquet files; see the module."""

    format = "parquet"
    WHERE = re.compile(
        r"=(?P<name>.*)|(?P<group>\d+):(?P<row>\d+)\+(?P<size>\d+)(/(?P<column>.*))?",
        re.DOTALL,
    )
    paired_by = frozenset({"column"})
    has_keys = True

    def __init__(self, given: Given, files: Iterable[str]):
        super().__init__(WithObjects(given.filesystem, given.patience_s), files, given.rule, given.name)
        self.image_field, self.image_root = given.config.image_field, given.config.image_root
        self.key_field = given.config.key_field
        self._layouts: dict[str, _Layout] = {}
        self._groups: OrderedDict[tuple[str, int, str], pa.Array] = OrderedDict()
        self._open: OrderedDict[str, ParquetFile] = OrderedDict()
        self._lock = threading.RLock()

    # ------------------------------------------------------------ listing

    def _prepare(self) -> None:
        with self._lock:
            self._open, self._groups, self._layouts = OrderedDict(), OrderedDict(), {}

    def parts(self) -> list[Part]:
        parts = super().parts()
        self.picture_columns = frozenset(layout.column for layout in self._layouts.values())
        self.unused_columns = frozenset().union(*(layout.unused for layout in self._layouts.values()))
        return parts

    def part(self, name: str) -> Iterator[Item | Reject]:
        try:
            self._versions[name] = self.filesystem.stat(name)
            table = self._file(name)
        except (pa.ArrowException, OSError) as error:
            wrong = f"is not a parquet file: {escaped(error_text(error))}"
            yield Reject(escaped(name), unreadable_reason(name, error) if is_read_error(error) else wrong)
            return
        others = self._other_columns(name, table)
        first, taken = 0, Counter[str]()
        for group in range(table.metadata.num_row_groups):
            count = table.metadata.row_group(group).num_rows
            yield from self._rows_of_group(name, others, group, first, taken)
            first += count
        if not first:
            yield Reject(escaped(name), "has no rows")

    def _rows_of_group(
        self, name: str, others: list[str], group: int, first: int, taken: Counter[str]
    ) -> Iterator[Item | Reject]:
        """The items of a row group.

        Args:
            others: columns other than the picture.
            first: the number of the group's first row in the file.
            taken: names in the file -> rows that have them so far; updated.
        """
        try:
            table, column = self._file(name), self._layout(name).column
            rows, pictures = self._read_group(name, table, group, others)
            controls_and_masks = {one: self._group(name, group, one.column) for one in self.controls_and_masks}
        except (pa.ArrowException, OSError) as error:
            which = f"rows {first} to {first + table.metadata.row_group(group).num_rows - 1}"
            wrong = f"{which} cannot be read: {escaped(error_text(error))}"
            yield Reject(escaped(name), unreadable_reason(name, error, f"{which}: ") if is_read_error(error) else wrong)
            return
        for row, values in enumerate(rows):
            position, picture = f"{name}/{first + row:09d}", _value(pictures[row])
            reasons = {f: v.reason for f, v in {**values, column: picture}.items() if isinstance(v, _BadValue)}
            if reasons:
                yield Reject(position, "; ".join(f"its {escaped(f)!r} {reason}" for f, reason in reasons.items()))
                continue
            key = self._key(name, position, values, picture, taken)
            if isinstance(key, Reject):
                yield key
            else:
                at = Place(key, name, f"{group}:{row}")
                item = self._item(at, values, picture)
                if isinstance(item, Item) and controls_and_masks:
                    other = {one: _value(every[row]) for one, every in controls_and_masks.items()}
                    item = self._in_order(self._with_pictures(item, at, other), values, column)
                if isinstance(item, Reject) and self.key_field is None:
                    item = Reject(position, item.reason)
                yield item

    def _key(self, name: str, position: str, values: dict[str, Any], picture: Any, taken: Counter[str]) -> str | Reject:
        """The name of a row; a reject if `data.key_field` has none.

        Args:
            position: the name of a row that is rejected.
            values: of the columns other than the picture.
            taken: as for `_rows_of_group`.
        """
        # Rows A, B, A of train.parquet, by their pictures' digests: train.parquet/a..., train.parquet/b...,
        # train.parquet/a...-2. Without the first row the third is train.parquet/a...: an equal picture, so its
        # records stay, and no other row has another name.
        if self.key_field is not None:
            value = only(values.get(self.key_field))
            if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
                found = "is empty" if value in (None, "") else f"is {shown(str(value))}, not text or a whole number"
                return Reject(position, f"its {escaped(self.key_field)!r} {found} (data.key_field)")
            return str(value)
        data, file = _bytes_and_name(picture)
        if data is None and file is None:
            return position
        key = f"{name}/{content_digest(data) if data is not None else file}"
        taken[key] += 1
        return key if taken[key] == 1 else f"{key}-{taken[key]}"

    def _in_order(self, item: Item | Reject, values: dict[str, Any], column: str) -> Item | Reject:
        """An item whose picture and rejected picture change places where the row's label says so. column: of the
        picture."""
        for one in self.controls_and_masks if isinstance(item, Item) else ():
            assert isinstance(item, Item)
            if isinstance(is_better := one.is_better(values), str):
                return Reject(item.key, is_better)
            if is_better and (better := dict(item.pictures)[one.kind]) is not None:
                name = item.where[1:] if str(item.where).startswith("=") and item.where else f"{item.key}/{column}"
                worse = Place(name, item.part, item.where)
                pictures = tuple((kind, worse if kind == one.kind else place) for kind, place in item.pictures)
                item = replace(item, part=better.part, where=better.where, pictures=pictures)
        return item

    def _with_pictures(self, item: Item, row: Place, values: dict[ControlOrMask, Any]) -> Item | Reject:
        """An item with its control pictures and masks. row: its place without that of the picture; values: of their
        columns."""
        found: dict[ControlOrMask, list[Place]] = {}
        for one, value in values.items():
            data, file = _bytes_and_name(value)
            assert row.part is not None
            if data is not None:
                where = f"{row.where}+{len(data)}/{one.column}"
                found[one] = [Place(f"{row.item}/{one.column}", row.part, where)]
                continue
            try:
                key = file and self.filesystem.key(file, _folder(row.part, self.image_root))
            except ValueError as error:
                return Reject(row.item, f"its {escaped(str(one.column))!r} names {shown(file or '')!r}: {error}")
            found[one] = [Place(key, row.part, f"={key}")] if key else []
        return self._with_controls_and_masks(item, found)

    def _other_columns(self, name: str, table: ParquetFile) -> list[str]:
        """The columns other than the picture.

        Raises:
            UserError: there is no column of pictures, or none of captions.
        """
        column = self._layout(name).column
        schema = pa.schema([f for f in table.schema_arrow if f.name != column and not _has_bytes(f.type)])
        columns = _columns_of(schema)
        if self.key_field is not None and self.key_field not in columns:
            raise no_column(
                self.filesystem,
                name,
                repr(self.key_field),
                columns,
                "--set data.key_field=COLUMN",
                "text or whole numbers, each once",
            )
        if self.rule.lacks_captions(columns):
            check_caption_columns(self.filesystem, name, self.rule, columns, column, others=self._columns_next_to(name))
        return list(schema.names)

    def _columns_next_to(self, name: str) -> set[str]:
        """The columns of some of the other files."""
        columns = set[str]()
        for file in [file for file in self.files if file != name][:MAX_OTHERS]:
            with suppress(pa.ArrowException, OSError):  # is reported where the rows are read
                columns.update(_columns_of(self._file(file).schema_arrow))
        return columns

    def _read_group(
        self, name: str, table: ParquetFile, group: int, columns: list[str]
    ) -> tuple[list[dict[str, Any]], pa.Array]:
        """Read, of a row group, the values of `columns` by row, and all pictures."""
        count = table.metadata.row_group(group).num_rows
        values = table.read_row_group(group, columns=columns)
        pictures = self._group(name, group)
        if len(pictures) != count or (columns and len(values) != count):
            raise pa.ArrowInvalid(f"{len(pictures)} pictures and {len(values)} rows instead of {count}")
        return _rows(values) or [{} for _ in range(count)], pictures

    @cached_property
    def _names_objects(self) -> bool:
        """Return whether the first file names objects of stores, as far as can be told."""
        try:
            return bool(self.files) and self._layout(self.files[0]).names_objects
        except AwayError:  # the listing would wait again
            raise
        except (UserError, OSError, pa.ArrowException):  # is reported by the listing
            return False

    @property
    def is_remote(self) -> bool:
        return super().is_remote or self._names_objects

    @property
    def uses_files(self) -> bool:
        return any(map(self.names_files, self.files))

    def names_files(self, name: str) -> bool:
        """Return whether a file is a table of pictures that are files here."""
        try:
            with self._lock:
                table, layout = self._file(name), self._layout(name)
                others = [other for other in table.schema_arrow.names if other != layout.column]
                if (layout.holds_bytes and not _nulls(table, layout.column)) or self.rule.lacks_captions(others):
                    return False
                return self._exists(name, _first_name(table, layout.column))
        except (pa.ArrowException, OSError, UserError):  # is reported where the rows are read
            return False

    def _exists(self, table: str, name: str) -> bool:
        folder = _folder(table, self.image_root)
        return bool(name) and not is_object(name) and is_file(self.filesystem, name, folder)

    def _item(self, row: Place, values: dict[str, Any], picture: Any) -> Item | Reject:
        """The item of a row. row: its place without that of the picture; values: of the columns other than the
        picture."""
        key, part, where = row
        assert part is not None
        data, file = _bytes_and_name(picture)
        if data is not None:
            where = f"{where}+{len(data)}"
        elif file is None:
            several = len(picture) if isinstance(picture, list) else 0
            return Reject(key, f"has {several} pictures: write a row for each" if several else "has no picture")
        else:
            try:
                where = "=" + self.filesystem.key(file, _folder(part, self.image_root))
            except ValueError as error:
                return Reject(key, f"names {shown(file)!r}: {error}")
        item = self._captioned(Place(key, part, where), self.rule.read(values))
        if isinstance(item, Item) and any(has_surrogates(text) for text, _ in item.captions):
            return Reject(item.key, "its caption is not valid Unicode")
        if isinstance(item, Item) and data is not None and file:
            item.meta.setdefault("path", file)
        return item

    def _layout(self, part: str) -> _Layout:
        """Say how a file holds its pictures.

        Raises:
            UserError: as `_picture_column`; the first name is a URL of a web server.
            ArrowException, OSError: as `_file`.
        """
        with self._lock:
            if part not in self._layouts:
                table = self._file(part)
                column = self._picture_column(part, table)
                kind, first = table.schema_arrow.field(column).type, ""
                with suppress(pa.ArrowException, OSError):  # is reported where the rows are read
                    if not _holds_bytes(kind) or _nulls(table, column):
                        first = _first_name(table, column)
                if is_web(first) and not self.filesystem.is_below(first):
                    form = "parquet" if _entry(kind) is kind and _text(kind) else None
                    columns = _columns_of(table.schema_arrow)
                    raise refused(self.filesystem, self.files or [part], part, column, first, columns, self.rule, form)
                used = {column, *(one.column for one in self.controls_and_masks)}
                others = (f for f in table.schema_arrow if f.name not in used and _holds_bytes(f.type))
                unused = (f.name for f in others if pa.types.is_struct(f.type) or kind_of(f.name))
                self._layouts[part] = _Layout(column, _holds_bytes(kind), is_object(first), frozenset(unused))
            return self._layouts[part]

    def _picture_column(self, part: str, table: ParquetFile) -> str:
        """The column of the pictures.

        Raises:
            UserError: there is none, or several.
        """
        schema = table.schema_arrow
        kinds = dict(zip(schema.names, schema.types, strict=True))
        for one in self.controls_and_masks:
            if kinds.pop(str(one.column), None) is None:
                fix = f"--set data.pictures.{one.kind}.column=COLUMN"
                raise no_column(self.filesystem, part, repr(one.column), schema.names, fix)
        twice = sorted({field for field in schema.names if schema.names.count(field) > 1})
        if twice:
            raise UserError(
                f"{self.location}/{part} has two columns {escaped(twice[0])!r}",
                fix="write it again with a different name for each",
            )
        if self.image_field is not None:
            candidates = [name for name in (self.image_field,) if name in kinds]
        else:
            candidates = self._candidates(part, table, kinds)
        if len(candidates) > 1:
            raise UserError(
                f"{self.location}/{part} has several columns that may be the pictures",
                found=", ".join(f"{escaped(name)}: {kinds[name]}" for name in candidates),
                fix=setting("data.image_field", *candidates),
            )
        for name in candidates:
            if _holds_bytes(kinds[name]) or _text(kinds[name]):
                return name
        raise UserError(
            f"{self.location}/{part} has no column of pictures"
            + (f" {self.image_field!r}" if self.image_field is not None else ""),
            expected="a struct of bytes and path (Hugging Face), a column of bytes, or a column of file names",
            found=", ".join(f"{escaped(field.name)}: {field.type}" for field in schema),
            fix="--set data.image_field=COLUMN",
        )

    def _candidates(self, part: str, table: ParquetFile, kinds: dict[str, pa.DataType]) -> list[str]:
        """The columns that may be the pictures: the one with the best known name, else all."""
        bytes_columns = [name for name, kind in kinds.items() if _holds_bytes(kind)]
        known = [name for column in PICTURE_COLUMNS for name in bytes_columns if name.lower() == column]
        if known:
            return known[:1]
        others = [name for name in bytes_columns if _has_pictures(table, name)]
        names = [name for name in (*NAME_COLUMNS, *LINK_COLUMNS) if name in kinds and _text(kinds[name])][:1]
        if others and names:  # next to bytes, names of files that are not here are the names of the bytes
            with suppress(pa.ArrowException, OSError):  # is reported where the rows are read
                first = _first_name(table, names[0])
                called_so = names[0] in PICTURE_COLUMNS
                names = names if called_so or is_link(first) or self._exists(part, first) else []
        return others + names

    def _stamp(self, file: str) -> str | None:
        """None if rows name files, which may change without the table."""
        try:
            table, layout, version = self._file(file), self._layout(file), self._versions[file]
        except (OSError, pa.ArrowException):
            return None
        decisive = (
            self.rule.identity(),
            str(self.image_field),
            str(self.key_field),
            repr(self.controls_and_masks),
            *map(str, version),
        )
        columns = [layout.column, *(str(one.column) for one in self.controls_and_masks)]
        names_files = any(not _holds_bytes(table.schema_arrow.field(c).type) or _nulls(table, c) for c in columns)
        return None if names_files else digest(RULE, *decisive).hex()

    # ------------------------------------------------------------ reading

    def stat(self, place: Place) -> tuple[int, int]:
        part, where = self._located(place)
        if where["size"] is None:
            return self.filesystem.stat(where["name"])
        return int(where["size"]), self._version(part)

    def _range(self, place: Place) -> FileRange | None:
        name = self._located(place)[1]["name"]
        return None if name is None else FileRange(name)

    def read(self, place: Place) -> bytes:
        where = self._located(place)[1]
        if where["name"] is not None:
            return super().read(place)
        data, _ = _bytes_and_name(self._value_at(place))
        if data is None:
            raise Unreadable(f"{escaped(place.item)}: no longer has a picture")
        return data

    def _value_at(self, place: Place) -> Any:
        """The value of the picture's column in the row of a place."""
        part, where = self._located(place)
        try:
            return _value(self._group(part, int(where["group"]), where["column"])[int(where["row"])])
        except (pa.ArrowException, IndexError, OSError) as error:
            raise Unreadable.of(place.item, error) from None

    def _file(self, name: str) -> ParquetFile:
        """The open file. Raises an ArrowException or OSError if it cannot be read."""
        with self._lock:
            table = self._open.get(name)
            if table is None:
                table = self._open[name] = ParquetFile(self.filesystem.open(name))
                if len(self._open) > 16:
                    self._open.popitem(last=False)
            return table

    def _group(self, part: str, group: int, column: str | None = None) -> pa.Array:
        """The pictures of a row group. column: of control pictures and masks."""
        with self._lock:
            column = column or self._layout(part).column
            pictures = self._groups.get((part, group, column))
            if pictures is None:
                table = self._file(part)
                size = _size(table, group, column)
                if size > MAX_GROUP_BYTES:
                    raise UserError(
                        f"{self.location}/{part}: row group {group} holds {size:,} bytes of pictures, and no smaller "
                        "piece of a parquet file can be read",
                        expected=f"row groups of at most {MAX_GROUP_BYTES:,} bytes",
                        fix="write it again: pyarrow.parquet.write_table(table, file, row_group_size=256)",
                    )
                pictures = table.read_row_group(group, columns=[column]).column(0).combine_chunks()
                self._groups[part, group, column] = pictures
                while len(self._groups) > 1 and sum(array.nbytes for array in self._groups.values()) > GROUP_BYTES:
                    self._groups.popitem(last=False)
            else:
                self._groups.move_to_end((part, group, column))
            return pictures


class Parquet(Format):
    """Parquet files of pictures, or of the names of some."""

    endings = ("parquet",)

    def names(self, given: Given, file: str) -> str:
        if self.source(given, [file]).uses_files:
            return "files"
        with suppress(pa.ArrowException, OSError, UserError), given.filesystem.open(file) as data:
            return "pictures" if any("binary" in str(kind) for kind in ParquetFile(data).schema_arrow.types) else ""
        return "pictures"  # the error is reported where the rows are read

    def source(self, given: Given, files: Iterable[str]) -> Source:
        return ParquetSource(given, files)


class Jsonl(Format):
    """Listings of files, one JSON object in a line or one array of them."""

    endings: tuple[str, ...] = ("jsonl", "ndjson")
    named_endings: tuple[str, ...] = ("json",)
    is_listing = True

    def names(self, given: Given, file: str) -> str:
        if extension(file) in self.named_endings and form_of_annotations(given.filesystem, file):
            return ""
        name, row = first_row(given.filesystem, file, given.config.image_field)
        if is_link(name):
            return "links" if not row.keys().isdisjoint((*given.rule.columns, *CAPTIONS)) else ""
        named = extension(file) in self.named_endings  # such a file is looked at where nothing else has captions
        has_caption = given.rule.has_caption_column(row) or (named and bool(text_columns(row)))
        return "files" if name and has_caption and names_picture(given, name) else ""

    def source(self, given: Given, files: Iterable[str]) -> Source:
        filesystem, files = given.filesystem, sorted(set(files))
        if files and form_of_annotations(filesystem, files[0]) == "COCO":
            raise annotations_refused(filesystem, files[0], "COCO")
        return ListingSource(given, files, self.name)


class Csv(Jsonl):
    """The same, separated by commas, semicolons, tabs or `|`; also in a .txt file whose header names files."""

    endings = ("csv", "tsv")
    named_endings = ("txt",)

    def has(self, filesystem: Filesystem, file: str) -> bool:
        if extension(file) not in self.named_endings:
            return super().has(filesystem, file)
        name, row = first_row(filesystem, file, None)  # such as Kaggle's captions.txt
        return bool(name) and len(row) > 1


def _columns_of(schema: pa.Schema) -> list[str]:
    """The columns, those of structures behind a dot."""

    def every(field: pa.Field, name: str) -> list[str]:
        inner = field.type if pa.types.is_struct(field.type) else ()
        return [name, *(each for one in inner for each in every(one, f"{name}.{one.name}"))]

    return [name for field in schema for name in every(field, field.name)]


def _folder(table: str, image_root: str | None) -> str:
    """The folder that the names in a table are relative to."""
    return posixpath.dirname(table) if image_root is None else image_root


@dataclass(frozen=True)
class _BadValue:
    """Stands for a value that Python has no object for."""

    reason: str


def _in_python(kind: pa.DataType) -> pa.DataType:
    """The type to read: nanoseconds, which are values of pandas only where that is installed, as microseconds."""
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    if kind in (pa.time64("ns"), pa.duration("ns")):
        return pa.time64("us") if kind == pa.time64("ns") else pa.duration("us")
    return kind


def _value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.cast(_in_python(scalar.type)).as_py()
    except UnicodeDecodeError:
        return _BadValue("is not UTF-8")
    except Exception:  # ValueError, OverflowError, KeyError of a time zone
        return _BadValue(f"holds a {scalar.type} that Python's types cannot hold; write it as text, or leave it out")


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    """Rows of a table; `_BadValue` for values that cannot be read."""

    def values(column: pa.ChunkedArray) -> list[Any]:
        try:
            return column.cast(_in_python(column.type)).to_pylist()
        except Exception:
            return [_value(scalar) for scalar in column]

    columns = [values(column) for column in table.columns]
    return [dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True)]


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else value


def _bytes_and_name(picture: Any) -> tuple[bytes | None, str | None]:
    picture = only(picture)
    if isinstance(picture, dict):
        data, named = picture.get("bytes"), picture.get("path")
        return (data if isinstance(data, bytes) and data else None), (
            named if isinstance(named, str) and named else None
        )
    if isinstance(picture, bytes):
        return (picture or None), None
    return None, picture if isinstance(picture, str) and picture else None


def _first_name(table: ParquetFile, column: str) -> str:
    """The first picture of a column that is given by a name; "" if there is none, or bytes come first."""
    rows = SNIFFED if _holds_bytes(table.schema_arrow.field(column).type) else FIRST_ROWS
    for batch in table.iter_batches(rows, columns=[column]):
        for value in map(_value, batch.column(0)):
            data, name = _bytes_and_name(value)
            if data is not None:
                return ""
            if name is not None:
                return name
    return ""


def is_file(filesystem: Filesystem, name: str, folder: str) -> bool:
    """Return whether a name in a table, relative to `folder` or absolute, is that of a file of the data."""
    try:
        return bool(filesystem.stat(filesystem.key(name, folder)))
    except (ValueError, Unreadable):
        return False


def names_picture(given: Given, name: str) -> bool:
    """Return whether a name in a listing at the top, maybe without its ending, is that of a picture of the data."""
    folder = given.config.image_root or ""
    if extension(name) in EXTENSIONS:
        return is_file(given.filesystem, name, folder)
    with suppress(ValueError):
        key = given.filesystem.key(name, folder)
        files = given.filesystem.names(posixpath.dirname(key))
        return any(stem(file) == key and extension(file) in EXTENSIONS for file in files)
    return False


def _has_pictures(table: ParquetFile, column: str) -> bool:
    """Return whether the first values of a column are pictures, or it is not known because they are missing."""
    try:
        batch = next(table.iter_batches(SNIFFED, columns=[column]), None)
        values = [] if batch is None else [_bytes_and_name(_first(_value(value)))[0] for value in batch.column(0)]
    except (pa.ArrowException, OSError):  # is reported where the rows are read
        return True
    present = [value for value in values if value]
    return not present or any(_MAGIC.match(value) for value in present)


def _binary(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)


def _text(kind: pa.DataType) -> bool:
    kind = _entry(kind)
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _image_struct(kind: pa.StructType) -> bool:
    names = {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)}
    return "bytes" in names and _binary(names["bytes"])


def _entry(kind: pa.DataType) -> pa.DataType:
    """The type of a list's entries, or the type itself."""
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return kind.value_type if any(is_one(kind) for is_one in lists) else kind


def _holds_bytes(kind: pa.DataType) -> bool:
    kind = _entry(kind)
    return _binary(kind) or (pa.types.is_struct(kind) and _image_struct(kind))


def _has_bytes(kind: pa.DataType) -> bool:
    """Return whether values of a type have bytes somewhere in them."""
    if pa.types.is_struct(kind):
        return any(_has_bytes(kind.field(i).type) for i in range(kind.num_fields))
    inner = getattr(kind, "value_type", None)
    return _binary(kind) or (inner is not None and _has_bytes(inner))


def _columns(table: ParquetFile, group: int, column: str) -> list[tuple[str, Any]]:
    """(path, metadata) of the chunks of a column. A chunk's path may be damaged where the schema's is not."""
    paths = [table.metadata.schema.column(i).path for i in range(table.metadata.num_columns)]
    chunks = table.metadata.row_group(group)
    return [(path, chunks.column(i)) for i, path in enumerate(paths) if path.split(".")[0] == column]


def _size(table: ParquetFile, group: int, column: str) -> int:
    return sum(chunk.total_uncompressed_size for _, chunk in _columns(table, group, column))


def _nulls(table: ParquetFile, column: str) -> bool:
    """Return whether a row may hold no bytes (and so name a file)."""
    for group in range(table.metadata.num_row_groups):
        for path, chunk in _columns(table, group, column):
            inner = path.removeprefix(column)
            if inner in ("", ".bytes") or (inner and path.rpartition(".")[2] in ("bytes", "element", "item", "array")):
                statistics = chunk.statistics
                if statistics is None or not statistics.has_null_count or statistics.null_count:
                    return True
    return False
