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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import pyarrow as pa

from pipeline.cache.keys import ItemRows
from pipeline.cache.scratch import Scratch
from pipeline.config import setting
from pipeline.errors import UserError
from pipeline.sources import annotation_files
from pipeline.sources.caption_columns import CaptionRule
from pipeline.sources.filenames import error_text, escaped, extension, has_surrogates, short_repr, shown
from pipeline.sources.filesystem import Filesystem, Unreadable
from pipeline.sources.further import Further
from pipeline.sources.sidecars import MAX_CAPTION_BYTES, PictureCaptions, parse_json

METADATA_NAMES = ("metadata.jsonl", "metadata.csv")
FILE_COLUMN = "file_name"
NAME_COLUMNS = (FILE_COLUMN, "image_path", "path", "image", "img", "file", "filename", "file_path", "filepath")
LINK_COLUMNS = ("url", "URL", "image_url", "img_url", "image_link", "link")
_CAPTION = "caption"
"""The column of a caption in a JSON object {picture: caption}."""

_SEPARATORS = (",", ";", "\t", "|")
_MARKS = {
    codecs.BOM_UTF8: ("utf-8", "surrogateescape"),
    codecs.BOM_UTF16_LE: ("utf-16-le", "surrogatepass"),
    codecs.BOM_UTF16_BE: ("utf-16-be", "surrogatepass"),
}
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder(parse_constant=lambda name: None)

_PICTURES = pa.schema([("item", pa.string())])
_NAMED = pa.schema([("item", pa.string()), ("row", pa.large_binary())])
REJECTS = pa.schema([("item", pa.string()), ("reason", pa.string())])


class Pictures:
    """What the rows say about pictures, in temporary files. table: columns `item` and `row`, in the rows' order."""

    def __init__(self, table: pa.Table, scratch: Scratch):
        self._rows = ItemRows(table, scratch)

    def find(self, keys: list[str]) -> list[PictureCaptions | None]:
        """What the rows say about each picture; None where no row names it."""
        return [self._merged(rows) if rows else None for rows in self._rows.every(keys)]

    def _merged(self, rows: list[int]) -> PictureCaptions:
        picture = PictureCaptions()
        for row in rows:
            picture.add(PictureCaptions(*pickle.loads(self._rows.table.column("row")[row].as_buffer())))
        return picture


class MetadataReader:
    """Reads metadata files of one source. Rows that name pictures and rejects are in temporary files.

    Attributes:
        column_names: the columns that name further pictures. others: those, column `item`.
        columns: of the file that is read, in order of appearance, as far as its rows have been read.
    """

    def __init__(self, filesystem: Filesystem, rule: CaptionRule, scratch: Scratch, further: Sequence[Further] = ()):
        self.filesystem, self.rule, self._scratch = filesystem, rule, scratch
        self.column_names = [one.column for one in further if one.column is not None]
        self.others = scratch.row_writer(_PICTURES)
        self._named, self._rejects = scratch.row_writer(_NAMED), scratch.row_writer(REJECTS)
        self.columns: dict[str, None] = {}

    def finish(self) -> tuple[pa.Table, Pictures, pa.Table]:
        """The rows that name a picture (column `item`), what they say, and the rejects (`REJECTS`); nothing can be read
        any more."""
        named = self._named.finish()
        return named, Pictures(named, self._scratch), self._rejects.finish()

    def reject(self, where: str, reason: str) -> None:
        """Note a row that cannot be used."""
        self._rejects.add(where, reason)

    def rows(self, file: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """(`FILE:LINE`, values by column) of the rows of a file; lines that are no row become rejects."""
        any_line = False
        reader = RowReader(file, self.filesystem.lines(file))
        self.columns = reader.columns
        try:
            for line, row in reader:
                any_line = True
                if isinstance(row, str):
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
            self.reject(file, "holds no row")

    def key(self, where: str, row: dict[str, Any], picture: str, folder: str) -> str | None:
        """The key of the file that a row names relative to `folder`; None, and a reject, if it must not be used. Names
        of further pictures become keys in the row. picture: the column."""
        name = row.get(picture)
        if not isinstance(name, str) or not name:
            self.reject(where, f"names no file ({picture} is {short_repr(name)})")
            return None
        try:
            for column in self.column_names:
                name = row.get(column)
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
        meta = {other: value for other, value in row.items() if other != column and other not in self.rule.columns}
        captions = self.rule.read(row)
        problems = [(where, reason) for reason in captions.problems]
        self._named.add(key, pickle.dumps((captions.candidates, problems, meta)))


def check_caption_columns(
    filesystem: Filesystem, file: str, rule: CaptionRule, columns: Collection[str], picture: str, alternative: str = ""
) -> None:
    """Raises a UserError if a table has no caption column. picture: the column of the picture, or of its file;
    alternative: appended to the fix."""
    if not columns or not rule.lacks_captions(columns):
        return
    if annotation_files.TURNS in columns:
        raise annotation_files.refused(filesystem, file, "LLaVA")
    likely = rule.likely(column for column in columns if column != picture)
    fix = setting("data.caption_field", likely) if likely else f"add a caption column to {filesystem.full_name(file)}"
    expected = f"the columns {picture!r} and {' or '.join(map(repr, rule.columns))} ({rule.setting})"
    raise no_column(filesystem, file, repr(rule.columns[0]), columns, fix + alternative, expected)


def no_column(
    filesystem: Filesystem, file: str, what: str, columns: Iterable[str], fix: str, expected: str | None = None
) -> UserError:
    """The error for a table with other columns. what: the column that is missing."""
    found = "the columns " + ", ".join(repr(escaped(column)) for column in columns)
    return UserError(f"{filesystem.full_name(file)} has no column {what}", expected=expected, found=found, fix=fix)


class RowReader:
    """The rows of a JSONL, JSON or CSV file, of which one is in memory at a time.

    A JSON file is an array of objects, or an object {picture: its columns, or its caption}; JSON and JSONL are told
    apart by the first line, since either is found under the other's name. The separator of a CSV file is found in its
    header. UTF-16 is read where its mark begins the file, as Excel and PowerShell write it.

    Args:
        file: its name, which decides the format.
        stream: its lines.

    Attributes:
        columns: in order of appearance, of the rows read so far.
        header: bytes that make a file of the bytes of a row that follow them; known with the first row.
    """

    def __init__(self, file: str, stream: Iterable[bytes]):
        self._stream, self._ending = stream, extension(file)
        self.columns: dict[str, None] = {}
        self.header = b""
        self._encoding, self._errors = "utf-8", "surrogateescape"
        self._end = 0

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any] | str]]:
        """(line number, row, or the reason why the line is not a row). A CSV record has the number of its last line, a
        row of a JSON file its own."""
        yield from ((line, row) for line, _, row in self.placed())

    def placed(self) -> Iterator[tuple[int, tuple[int, int], dict[str, Any] | str]]:
        """As the iteration, with the position of the row: its first byte, and the byte after its last."""
        rows = self._csv if self._ending in ("csv", "tsv") else self._json if self._is_json() else self._jsonl
        for line, place, row in rows():
            if isinstance(row, dict):
                self.columns.update(dict.fromkeys(row))
            yield line, place, row

    def _is_json(self) -> bool:
        """Whether the file is one JSON value, and not one in each line."""
        lines = iter(self._stream)
        first = next(lines, b"")
        self._stream = chain([first], lines)
        text = first.decode("utf-8-sig", "replace").strip()
        if self._ending != "json":
            return text.startswith("[")
        row = parse_json(text) if len(text) <= MAX_CAPTION_BYTES else ""
        return isinstance(row, str) or row.keys().isdisjoint((*NAME_COLUMNS, *LINK_COLUMNS))

    def _bytes(self, text: str) -> bytes:
        return text.encode(self._encoding, self._errors)

    def _texts(self) -> Iterator[str]:
        """The lines of the file; `_end` is behind the last one. Bytes that are not UTF-8 are surrogates."""
        lines, pending = iter(self._stream), ""
        first = next(lines, b"")
        mark = next((mark for mark in _MARKS if first.startswith(mark)), b"")
        if mark:
            self._encoding, self._errors = _MARKS[mark]
            self.header, self._end = mark, len(mark)
        decoder = codecs.getincrementaldecoder(self._encoding)(self._errors)
        for raw in chain([first[len(mark) :]], lines, [None]):
            if raw is None and self._encoding != "utf-8":
                decoder.errors = "replace"  # half a character
            *whole, pending = (pending + decoder.decode(raw or b"", final=raw is None)).split("\n")
            for text in [*(line + "\n" for line in whole), *([pending] if raw is None and pending else [])]:
                # As `csv` expects them: the lines of old Macs end with \r.
                for line in io.StringIO(text, newline="") if "\r" in text else [text]:
                    self._end += len(self._bytes(line))
                    yield line

    def _jsonl(self) -> Iterator[tuple[int, tuple[int, int], dict[str, Any] | str]]:
        for line, text in enumerate(self._texts(), start=1):
            if text.strip():
                place = self._end - len(self._bytes(text)), self._end
                yield line, place, "is not UTF-8" if has_surrogates(text) else parse_json(text)

    def _json(self) -> Iterator[tuple[int, tuple[int, int], dict[str, Any] | str]]:
        text, number = _JsonText(self._texts(), self._bytes), 0
        opening = text.next()
        text.offset += len(self.header)
        self.header += self._bytes(opening)
        try:
            if opening not in ("[", "{"):
                raise ValueError("begins neither with '[' nor with '{'")
            text.skip(opening)
            while text.next() != {"[": "]", "{": "}"}[opening]:
                if number:
                    text.skip(",")
                text.next()
                start, key = text.offset, text.value() if opening == "{" else None
                if opening == "{":
                    text.skip(":")
                value, number = text.value(), number + 1
                yield number, (start, text.offset), _json_row(key, value)
            text.skip("]" if opening == "[" else "}")
            if text.next():
                raise ValueError("has more behind its end")
        except ValueError as error:
            yield number + 1, (0, 0), f"is not JSON: {error}; what follows is not read"

    def _csv(self) -> Iterator[tuple[int, tuple[int, int], dict[str, Any] | str]]:
        csv.field_size_limit(max(csv.field_size_limit(), MAX_CAPTION_BYTES))
        texts, before, header = self._texts(), list[str](), list[str]()
        first = next(texts, "")
        named = re.fullmatch(r"sep=(.)[\r\n]*", first)
        if named:  # Excel's own line
            before.append(first)
            first = next(texts, "")
        above = len(before)

        def recorded() -> Iterator[str]:
            for text in chain([first] if first else [], texts):
                if not header:
                    before.append(text)
                yield text

        delimiter = named[1] if named else "\t" if self._ending == "tsv" else _separator(first)
        reader = csv.reader(recorded(), delimiter=delimiter, strict=True)
        while True:
            start = self._end
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield reader.line_num + above, (start, self._end), f"is not CSV: {error}"
                continue
            line, place = reader.line_num + above, (start, self._end)
            if not fields:
                continue
            if not header:
                header = fields
                self.header += b"".join(map(self._bytes, before))
                if any(map(has_surrogates, header)):
                    yield line, place, "the header is not UTF-8"
                    return
                self.columns.update(dict.fromkeys(header))
                twice = sorted({escaped(name) for name in header if header.count(name) > 1})
                if twice:
                    yield line, place, f"the header has a column twice ({', '.join(twice)}); the last one counts"
            elif len(fields) != len(header):
                yield line, place, f"has {len(fields)} fields, the header has {len(header)}"
            elif any(map(has_surrogates, fields)):
                yield line, place, "is not UTF-8"
            else:
                yield line, place, dict(zip(header, fields, strict=True))


def _separator(header: str) -> str:
    """What separates the columns of a CSV file: what finds a column that names pictures, else the most frequent."""
    for separator in _SEPARATORS:
        names = [name.strip().strip('"') for name in header.split(separator)]
        if len(names) > 1 and not {*NAME_COLUMNS, *LINK_COLUMNS}.isdisjoint(names):
            return separator
    return max(_SEPARATORS, key=header.count)


class _JsonText:
    """Reads values from the text of a JSON file, a line at a time.

    Attributes:
        offset: bytes before the next character.
    """

    def __init__(self, texts: Iterator[str], encoded: Callable[[str], bytes]):
        self._texts, self._encoded = texts, encoded
        self._text, self._at, self.offset = "", 0, 0

    def next(self) -> str:
        """The next character that is not white space; empty at the end."""
        while True:
            match = _SPACE.match(self._text, self._at)
            assert match is not None
            self._advance(match.end())
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def skip(self, character: str) -> None:
        """Read a character. Raises a ValueError if the next one is another."""
        if (found := self.next()) != character:
            raise ValueError(f"expected {character!r} and found {found!r}" if found else "it is cut")
        self._advance(self._at + 1)

    def value(self) -> Any:
        """Read a value. Raises a ValueError if there is none."""
        self.next()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
                break
            except (ValueError, RecursionError) as error:
                if len(self._text) - self._at > MAX_CAPTION_BYTES or not self._more():
                    raise ValueError(str(error).partition(":")[0]) from None
        self._advance(end)
        return value

    def _advance(self, at: int) -> None:
        self.offset += len(self._encoded(self._text[self._at : at]))
        self._at = at

    def _more(self) -> bool:
        text = next(self._texts, "")
        self._text, self._at = self._text[self._at :] + text, 0
        return bool(text)


def _json_row(key: Any, value: Any) -> dict[str, Any] | str:
    """The row of a value in a JSON file, or the reason why it is none. key: of the value in an object."""
    if key is not None and isinstance(value, str):
        value = {_CAPTION: value}
    if not isinstance(value, dict):
        where = "" if key is None else f"under {short_repr(key)} "
        return f"holds {where}{short_repr(value)}, no row; write a .jsonl, one object for each picture in a line"
    if has_surrogates(json.dumps([key, value], ensure_ascii=False)):
        return "has an escape that stands for half a character, which is not valid Unicode"
    if key is None or not value.keys().isdisjoint((*NAME_COLUMNS, *LINK_COLUMNS)):
        return value
    return {FILE_COLUMN: key, **value}
