"""JSONL, JSON and CSV files whose rows name pictures: metadata.jsonl / metadata.csv in a folder, and listings.

Rows pass through temporary files, since those that name one picture may stand anywhere: memory does not grow with them.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import pickle
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, BinaryIO, cast

import pyarrow as pa

from sana_pipe.base.config import setting
from sana_pipe.base.errors import UserError
from sana_pipe.data.cache.item_rows import ItemRows
from sana_pipe.data.cache.scratch import Scratch
from sana_pipe.data.sources.caption_columns import TEXT_FILE, CaptionRule, PictureCaptions, columns_of, has_column
from sana_pipe.data.sources.controls_and_masks import ControlOrMask
from sana_pipe.data.sources.filenames import error_text, escaped, extension, has_surrogates, is_web, short_repr, shown
from sana_pipe.data.sources.filesystem import Filesystem, Unreadable
from sana_pipe.data.sources.sidecars import MAX_CAPTION_BYTES, parse_json
from sana_pipe.data.sources.unread import TURNS, annotations_refused
from sana_pipe.data.sources.web_tables import refused

METADATA_NAMES = ("metadata.jsonl", "metadata.csv")
FILE_COLUMN = "file_name"
NAME_COLUMNS = (
    *(FILE_COLUMN, "image_path", "path", "image", "img", "file", "filename", "file_path", "filepath"),
    *("image_name", "images"),
)
LINK_COLUMNS = ("url", "URL", "image_url", "img_url", "image_link", "link")
FIRST_ROWS = 64
"""Rows of a listing that are searched for a picture, to find out what it names."""

_CAPTION = "caption"
"""The column of a caption in a JSON object {picture: caption}."""

_SEPARATORS = (",", ";", "\t", "|")
MAX_JSON = 1 << 28
"""Limit on the characters of a JSON file."""

READ_BYTES = 1 << 20
"""Bytes of a file that are read at once."""

_PICTURES = pa.schema([("item", pa.string())])
_NAMED = pa.schema([("item", pa.string()), ("row", pa.large_binary())])
REJECTS = pa.schema([("item", pa.string()), ("reason", pa.string())])


class Pictures:
    """The rows about pictures, in temporary files. table: columns `item` and `row`, in the rows' order; others: the
    columns that name other pictures, of which a picture has a list where its rows differ."""

    def __init__(self, table: pa.Table, scratch: Scratch, others: Sequence[str] = ()):
        self._rows, self._others = ItemRows(table, scratch), others

    def find(self, keys: list[str]) -> list[PictureCaptions | None]:
        """Return what the rows say about each picture; None where no row names it."""
        return [self._merged(rows) if rows else None for rows in self._rows.every(keys)]

    def _merged(self, rows: list[int]) -> PictureCaptions:
        picture, named = PictureCaptions(), dict[str, list[str]]()
        for row in rows:
            said = PictureCaptions(*pickle.loads(self._rows.table.column("row")[row].as_buffer()))
            picture.add(said)
            for column in self._others:
                if (name := said.meta.get(column)) is not None and name not in named.setdefault(column, []):
                    named[column].append(name)
        picture.meta |= {column: names for column, names in named.items() if len(names) > 1}
        return picture


class MetadataReader:
    """Reads metadata files of one source. Rows that name pictures and rejects are in temporary files.

    Attributes:
        column_names: the columns that name control pictures and masks. others: those, column `item`.
        columns: of the file that is read, in order of appearance, as far as its rows have been read.

    Args:
        files: all that will be read, for a message.
    """

    def __init__(
        self,
        filesystem: Filesystem,
        rule: CaptionRule,
        scratch: Scratch,
        controls_and_masks: Sequence[ControlOrMask] = (),
        files: Sequence[str] = (),
    ):
        self.filesystem, self.rule, self._scratch = filesystem, rule, scratch
        self._in_columns = [one for one in controls_and_masks if one.column is not None]
        self.column_names = [str(one.column) for one in self._in_columns]
        self.others = scratch.row_writer(_PICTURES)
        self._named, self._rejects = scratch.row_writer(_NAMED), scratch.row_writer(REJECTS)
        self.columns: dict[str, None] = {}
        self._files, self._reader = files, RowReader("", io.BytesIO())
        self._any_name = False

    def finish(self) -> tuple[pa.Table, Pictures, pa.Table]:
        """The rows that name a picture (column `item`), what they say, and the rejects (`REJECTS`); nothing can be read
        any more."""
        named = self._named.finish()
        return named, Pictures(named, self._scratch, self.column_names), self._rejects.finish()

    def reject(self, where: str, reason: str) -> None:
        """Note a row that cannot be used."""
        self._rejects.add(where, reason)

    def rows(self, file: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """(`FILE:LINE`, values by column) of the rows of a file; lines that are no row become rejects."""
        any_line, self.columns, self._any_name = False, {}, False
        try:
            self._reader = reader = RowReader(file, self.filesystem.open(file, spool=True))
            self.columns = reader.columns
            for line, row in reader:
                any_line = True
                if isinstance(row, str):
                    self.rule.seen.update(reader.columns)  # those of a CSV file whose rows are all refused
                    self.reject(f"{file}:{line}", row)
                else:
                    yield f"{file}:{line}", row
        except OSError as error:
            raise UserError(
                f"{self.filesystem.location}: a file of captions cannot be read",
                found=error if isinstance(error, Unreadable) else f"{escaped(file)}: {error_text(error)}",
                fix="make it readable, or move it away",
            ) from None
        if not any_line:
            self.reject(file, "has no rows")

    def key(self, where: str, row: dict[str, Any], picture: str, folder: str) -> str | None:
        """The key of the file that a row names relative to `folder`; None, and a reject, if it must not be used. Names
        of control pictures and masks become keys in the row. picture: the column.

        Raises:
            UserError: the first name of the file is a picture on a web server.
        """
        for one in self._in_columns:
            if isinstance(is_better := one.is_better(row), str):
                self.reject(where, is_better)
                return None
            if is_better:
                row[picture], row[str(one.column)] = row.get(str(one.column)), row.get(picture)
        value = row.get(picture)
        name = row[picture] = only(value)
        if not isinstance(name, str) or not name:
            self.reject(where, f"names no file ({picture} is {short_repr(name)})")
            return None
        if not self._any_name and is_web(name) and not self.filesystem.is_below(name):
            form = self._reader.form if isinstance(value, str) else None
            file = self._reader.file
            raise refused(self.filesystem, self._files or [file], file, picture, name, [*self.columns], self.rule, form)
        self._any_name = True
        try:
            for column in self.column_names:
                name = only(row.get(column))
                row[column] = self.filesystem.key(name, folder) if isinstance(name, str) and name else None
                if row[column] is not None:
                    self.others.add(row[column])
            name = row[picture]
            return self.filesystem.key(name, folder)
        except ValueError as error:
            self.reject(where, f"names {shown(str(name))!r}: {error}")
            return None

    def add(self, where: str, row: dict[str, Any], column: str, key: str) -> None:
        """Add a row to the picture `key`. column: names the file."""
        said = self.rule.read(row, where=where)
        said.meta.pop(column, None)
        self._named.add(key, pickle.dumps((said.candidates, said.problems, said.meta, said.hidden, said.is_lost)))


def picture_column(row: Collection[str]) -> str | None:
    """The column of a listing that names the pictures."""
    return next((column for column in (*NAME_COLUMNS, *LINK_COLUMNS) if column in row), None)


def first_row(
    filesystem: Filesystem, file: str, image_field: str | None, any_row: bool = False
) -> tuple[str, dict[str, Any]]:
    """The first picture that a listing names, and its row; ("", {}) if none of the first rows does. any_row: the first
    row, also if it names none."""
    try:
        for _, row in islice(RowReader(file, filesystem.open(file)), FIRST_ROWS):
            name = only(row.get(image_field or picture_column(row) or "")) if isinstance(row, dict) else None
            if isinstance(name, str) and name and isinstance(row, dict):
                return name, row
            if any_row and isinstance(row, dict):
                return "", row
    except OSError:  # is reported by the listing
        pass
    return "", {}


def only(value: Any) -> Any:
    """The value, or that of a list with a single one, as data sets for vision-language models have it."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def check_caption_columns(
    filesystem: Filesystem,
    file: str,
    rule: CaptionRule,
    columns: Collection[str],
    picture: str,
    alternative: str = "",
    others: Collection[str] = (),
) -> None:
    """Raises a UserError if a table has no caption column. picture: the column of the picture, or of its file;
    alternative: appended to the fix; others: columns of other tables, whose captions the fix must keep."""
    if not columns or not rule.lacks_captions(columns):
        return
    if TURNS in columns:
        raise annotations_refused(filesystem, file, "LLaVA")
    likely = rule.likely(column for column in columns if column != picture)
    fix = f"add a caption column to {filesystem.full_name(file)}"
    if likely:
        used = {column: weight for column, weight in rule.fields if has_column(others, column)}
        fix = setting("data.caption_field", likely)
        if used:
            fix = setting("data.caption_weights", {**used, likely: 1.0})
        else:
            rule.offered.add(likely)
    if rule.config.caption is not None:
        alternative += f"; {setting('data.caption_weights', {TEXT_FILE: 1})} leaves it out: all get data.caption"
    expected = f"the columns {picture!r} and {' or '.join(map(repr, rule.columns))} ({rule.setting})"
    raise no_column(filesystem, file, repr(rule.columns[0]), columns, fix + alternative, expected)


def no_column(
    filesystem: Filesystem, file: str, what: str, columns: Iterable[str], fix: str, expected: str | None = None
) -> UserError:
    """The error for a table with other columns. what: the column that is missing."""
    found = "the columns " + ", ".join(repr(escaped(column)) for column in columns)
    return UserError(f"{filesystem.full_name(file)} has no column {what}", expected=expected, found=found, fix=fix)


NOT_UTF8 = "is not UTF-8: save the file as UTF-8 (iconv -f CP1252 -t UTF-8)"
"""The reason of lines in the encoding of older programs."""

Rows = Iterator[tuple[int, dict[str, Any] | str]]
"""(line number, row, or the reason why the line is no row)."""


class RowReader:
    """The rows of a JSONL or CSV file, one at a time, or of a JSON file, which is read as a whole.

    A JSON file is an array of objects, or an object {picture: its columns, caption or captions}; JSON and JSONL are
    told apart by the first lines, since either is found under the other's name. The separator of a CSV file is found in
    its header; empty cells are None. UTF-16 is read where its mark begins the file, as Excel and PowerShell write it.

    Args:
        file: its name, which decides the format.
        stream: the open file; the iteration closes it.

    Attributes:
        columns: in order of appearance, of the rows read so far.
        form: the plain format of the file once a row was read: csv (commas), tsv, json (an array) or jsonl; None: none.
    """

    def __init__(self, file: str, stream: BinaryIO):
        self.file, self._stream, self._ending = file, stream, extension(file)
        self.columns: dict[str, None] = {}
        self.form: str | None = None

    def __iter__(self) -> Rows:
        """A CSV record has the number of its last line, a row of a JSON file its own."""
        line = 0
        with io.BufferedReader(cast("io.RawIOBase", self._stream), READ_BYTES) as stream:
            wide = stream.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
            encoding, errors = ("utf-16", "surrogatepass") if wide else ("utf-8-sig", "surrogateescape")
            text = io.TextIOWrapper(stream, encoding, errors, newline="")  # lines of old Macs end with \r
            try:
                for line, row in self._rows(text):
                    if isinstance(row, dict):
                        self.columns.update(dict.fromkeys(columns_of(row) if dict in map(type, row.values()) else row))
                    if wide:
                        self.form = None
                    yield line, row
            except UnicodeDecodeError:
                yield line + 1, "is not UTF-16; what follows is not read"

    def _rows(self, text: io.TextIOWrapper) -> Rows:
        first, second = text.readline(MAX_JSON), text.readline(MAX_JSON)
        lines = chain(filter(None, [first, second]), text)
        if self._ending in ("csv", "tsv") or (self._ending == "txt" and first.strip()[:1] not in ("[", "{")):
            return self._csv(lines)
        if self._is_json(first, second):
            self.form = "json" if first.lstrip().startswith("[") else None
            return _json(first + second + text.read(MAX_JSON))
        self.form = "jsonl"
        return _jsonl(lines)

    def _is_json(self, first: str, second: str) -> bool:
        """Return whether the file is one JSON value, and not one in each line. first, second: its lines."""
        if self._ending != "json":
            return first.lstrip().startswith("[")
        row = parse_json(first) if len(first) <= MAX_CAPTION_BYTES else ""
        if isinstance(row, str) or second.lstrip().startswith("{"):
            return isinstance(row, str)
        return row.keys().isdisjoint((*NAME_COLUMNS, *LINK_COLUMNS))

    def _csv(self, lines: Iterator[str]) -> Rows:
        csv.field_size_limit(max(csv.field_size_limit(), MAX_CAPTION_BYTES))
        first, above, header = next(lines, ""), 0, list[str]()
        named = re.fullmatch(r"sep=(.)[\r\n]*", first)
        if named:  # Excel's own line
            first, above = next(lines, ""), 1
        delimiter = named[1] if named else "\t" if self._ending == "tsv" else _separator(first)
        self.form = None if named else {",": "csv", "\t": "tsv"}.get(delimiter)
        reader = csv.reader(chain([first] if first else [], lines), delimiter=delimiter, strict=True)
        while True:
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield reader.line_num + above, f"is not CSV: {error}"
                continue
            line = reader.line_num + above
            if not fields:
                continue
            if not header:
                header = [name.strip() for name in fields]
                if any(map(has_surrogates, header)):
                    yield line, "the header is not UTF-8"
                    return
                self.columns.update(dict.fromkeys(header))
                twice = sorted({escaped(name) for name in header if header.count(name) > 1})
                if twice:
                    yield line, f"the header has a column twice ({', '.join(twice)}); the last one is used"
            elif len(fields) != len(header):
                yield line, f"has {len(fields)} fields, the header has {len(header)}"
            elif any(map(has_surrogates, fields)):
                yield line, NOT_UTF8
            else:
                yield (
                    line,
                    dict(zip(header, [value or None for value in fields] if "" in fields else fields, strict=True)),
                )


def _jsonl(lines: Iterator[str]) -> Rows:
    for line, text in enumerate(lines, start=1):
        if text.strip():
            yield line, NOT_UTF8 if has_surrogates(text) else parse_json(text)


def _json(text: str) -> Rows:
    if len(text) >= MAX_JSON:
        yield 1, f"has {MAX_JSON:,} characters or more; write a .jsonl, one object for each picture in a line"
        return
    try:
        value = json.loads(text, parse_constant=lambda name: None)
    except (ValueError, RecursionError) as error:
        yield 1, f"is not JSON: {error}"
        return
    rows = value if isinstance(value, list) else [value]
    entries = value.items() if isinstance(value, dict) else ((None, each) for each in rows)
    for line, (key, each) in enumerate(entries, start=1):
        yield line, _json_row(key, each)


def _separator(header: str) -> str:
    """Return what separates the columns of a CSV file: what finds a column that names pictures, else the most
    frequent."""
    for separator in _SEPARATORS:
        names = [name.strip().strip('"') for name in header.split(separator)]
        if len(names) > 1 and not {*NAME_COLUMNS, *LINK_COLUMNS}.isdisjoint(names):
            return separator
    return max(_SEPARATORS, key=header.count)


def _all_text(values: list[Any]) -> bool:
    """Return whether a list has texts alone, one at least."""
    return bool(values) and all(isinstance(value, str) for value in values)


def _json_row(key: Any, value: Any) -> dict[str, Any] | str:
    """The row of a value in a JSON file, or the reason why it is none. key: of the value in an object."""
    if key is not None and (isinstance(value, str) or (isinstance(value, list) and _all_text(value))):
        value = {_CAPTION: value}
    if not isinstance(value, dict):
        where = "" if key is None else f"under {short_repr(key)} "
        return (
            f"holds {where}{short_repr(value)}, which is no row; write a .jsonl, an object for each picture in a line"
        )
    if has_surrogates(json.dumps([key, value], ensure_ascii=False)):
        return "has an escape that stands for half a character, which is not valid Unicode"
    if key is None or not value.keys().isdisjoint((*NAME_COLUMNS, *LINK_COLUMNS)):
        return value
    return {FILE_COLUMN: key, **value}
