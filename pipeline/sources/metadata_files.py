"""JSONL and CSV files whose rows name pictures: metadata.jsonl / metadata.csv in a folder, and listings.

Rows pass through temporary files, since those that name one picture may stand anywhere: memory does not grow with them.
Price: a row is written twice, since the columns of JSON rows are known at the end of the file only.
"""

from __future__ import annotations

import codecs
import csv
import io
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from pipeline.cache.arrow import batches
from pipeline.cache.item_rows import ItemGroups
from pipeline.cache.scratch import Scratch
from pipeline.errors import UserError
from pipeline.sources.caption_columns import CaptionCandidate, CaptionRule
from pipeline.sources.filenames import error_text, escaped, has_surrogates, short_repr, shown
from pipeline.sources.filesystem import Filesystem, LocalFilesystem, Unreadable
from pipeline.sources.sidecars import MAX_CAPTION_BYTES, parse_json

METADATA_NAMES = ("metadata.jsonl", "metadata.csv")
FILE_COLUMN = "file_name"
NAME_COLUMNS = (FILE_COLUMN, "image_path", "path", "image", "img", "file", "filename", "file_path", "filepath")

_ROWS = pa.schema([("line", pa.int64()), ("row", pa.large_binary())])
_NAMED = pa.schema([("item", pa.string()), ("row", pa.large_binary())])
REJECTS = pa.schema([("item", pa.string()), ("reason", pa.string())])


@dataclass
class PictureRows:
    """What the rows that name a picture say about it.

    problems: captions that cannot be used, with their place.
    meta: the other columns; of several rows with the same column the first counts.
    """

    candidates: list[CaptionCandidate] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)


class Pictures:
    """What the rows say about pictures, in temporary files. table: columns `item` and `row`, in the rows' order."""

    def __init__(self, table: pa.Table, scratch: Scratch):
        self._table, self._groups = table, ItemGroups(table, scratch)

    def find(self, keys: list[str]) -> list[PictureRows | None]:
        """What the rows say about each picture; None where no row names it."""
        return [self._merged(rows) if rows else None for rows in self._groups.find(keys)]

    def _merged(self, rows: list[int]) -> PictureRows:
        picture = PictureRows()
        for row in rows:
            candidates, problems, meta = pickle.loads(self._table.column("row")[row].as_buffer())
            picture.candidates += candidates
            picture.problems += problems
            for column, value in meta.items():
                picture.meta.setdefault(column, value)
        return picture


class _Rows:
    """(line number, values by column) of a file, in temporary files."""

    def __init__(self, table: pa.Table):
        self._table = table

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for batch in batches(self._table):
            for line, row in zip(*batch.columns, strict=True):
                yield line.as_py(), pickle.loads(row.as_buffer())


class MetadataReader:
    """Reads metadata files of one source. Rows that name pictures and rejects are in temporary files."""

    def __init__(self, filesystem: Filesystem, rule: CaptionRule, scratch: Scratch):
        self.filesystem, self.rule, self._scratch = filesystem, rule, scratch
        self._named, self._rejects = scratch.row_writer(_NAMED), scratch.row_writer(REJECTS)
        self.root = str(filesystem.root) if isinstance(filesystem, LocalFilesystem) else filesystem.location

    def finish(self) -> tuple[pa.Table, Pictures, pa.Table]:
        """The rows that name a picture (column `item`), what they say, and the rejects (`REJECTS`); nothing can be read
        any more."""
        named = self._named.finish()
        return named, Pictures(named, self._scratch), self._rejects.finish()

    def reject(self, where: str, reason: str) -> None:
        """Note a row that cannot be used."""
        self._rejects.add(where, reason)

    def path(self, file: str) -> str:
        """The file's full name, for messages."""
        return f"{self.root.rstrip('/')}/{file}"

    def read(self, file: str) -> tuple[Iterable[tuple[int, dict[str, Any]]], list[str]]:
        """(line number, values by column) of the rows of a file, and its columns in order of appearance; lines that are
        no row become rejects."""
        rows, any_line = self._scratch.row_writer(_ROWS), False
        reader = RowReader(file, self.filesystem.lines(file))
        try:
            for line, row in reader:
                any_line = True
                if isinstance(row, str):
                    self.reject(f"{file}:{line}", row)
                else:
                    rows.add(line, pickle.dumps(row))
        except OSError as error:
            raise UserError(
                f"{self.root}: a file of captions cannot be read",
                found=error if isinstance(error, Unreadable) else f"{escaped(file)}: {error_text(error)}",
                fix="make it readable, or move it away",
            ) from None
        if not any_line:
            self.reject(file, "holds no row")
        return _Rows(rows.finish()), list(reader.columns)

    @property
    def caption_columns(self) -> str:
        """The columns that the rule reads and the setting that names them, for messages."""
        return _caption_columns(self.rule)

    def check_columns(self, file: str, columns: list[str], file_column: str, alternative: str = "") -> None:
        """Raises a UserError if no caption column exists. alternative: appended to the fix."""
        check_caption_columns(self.path(file), self.rule, columns, file_column, alternative)

    def key(self, where: str, row: dict[str, Any], column: str, folder: str) -> str | None:
        """The key of the file that a row names relative to `folder`; None, and a reject, if it must not be used."""
        name = row.get(column)
        if not isinstance(name, str) or not name:
            self.reject(where, f"names no file ({column} is {short_repr(name)})")
            return None
        try:
            return self.filesystem.key(name, folder)
        except ValueError as error:
            self.reject(where, f"names {shown(name)!r}: {error}")
            return None

    def add(self, where: str, row: dict[str, Any], column: str, key: str) -> None:
        """Add a row to the picture `key`. column: names the file."""
        meta = {other: value for other, value in row.items() if other != column and other not in self.rule.columns}
        captions = self.rule.read(row)
        problems = [f"{where} {reason}" for reason in captions.problems]
        self._named.add(key, pickle.dumps((captions.candidates, problems, meta)))
        for reason in captions.problems:
            self.reject(where, reason)


def check_caption_columns(
    path: str, rule: CaptionRule, columns: list[str], file_column: str, alternative: str = ""
) -> None:
    """Raises a UserError if a table has no caption column. path: its full name; alternative: appended to the fix."""
    if not columns or not rule.lacks_captions(columns):
        return
    others = [escaped(column) for column in columns if column != file_column]
    fix = f"--set data.caption_field={others[0]}" if others else f"add a caption column to {path}"
    raise UserError(
        f"{path} has no column {rule.columns[0]!r}",
        expected=f"the columns {file_column!r} and {_caption_columns(rule)}",
        found="the columns " + ", ".join(repr(escaped(column)) for column in columns),
        fix=fix + alternative,
    )


def _caption_columns(rule: CaptionRule) -> str:
    return " or ".join(map(repr, rule.columns)) + f" ({rule.setting})"


class RowReader:
    """The rows of a JSONL or CSV file, of which one is in memory at a time.

    Args:
        file: its name, which decides the format.
        stream: its lines.

    Attributes:
        columns: in order of appearance, of the rows read so far.
        header: the bytes before the first row of a CSV file.
    """

    def __init__(self, file: str, stream: Iterable[bytes]):
        self._stream, self._is_csv = stream, file.lower().endswith(".csv")
        self.columns: dict[str, None] = {}
        self.header = b""
        self._before_rows: list[bytes] | None = []
        self._end = 0

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any] | str]]:
        """(line number, row, or the reason why the line is not a row). A CSV record has the number of its last line."""
        yield from ((line, row) for line, _, row in self.placed())

    def placed(self) -> Iterator[tuple[int, tuple[int, int], dict[str, Any] | str]]:
        """As the iteration, with the position of the row: its first byte, and the byte after its last."""
        yield from self._csv() if self._is_csv else self._jsonl()

    def _jsonl(self) -> Iterator[tuple[int, tuple[int, int], dict[str, Any] | str]]:
        for line, raw in enumerate(self._stream, start=1):
            start, self._end = self._end, self._end + len(raw)
            text = raw.removeprefix(codecs.BOM_UTF8) if line == 1 else raw
            if not text.strip():
                continue
            try:
                row = parse_json(text.decode("utf-8"))
            except UnicodeDecodeError:
                row = "is not UTF-8"
            if isinstance(row, dict):
                self.columns.update(dict.fromkeys(row))
            yield line, (start, self._end), row

    def _texts(self) -> Iterator[str]:
        """The lines of a CSV file, as `csv` expects them."""
        for raw in self._stream:
            for text in io.StringIO(raw.decode("utf-8", errors="surrogateescape"), newline=""):
                first, data = self._end == 0, text.encode("utf-8", errors="surrogateescape")
                self._end += len(data)
                if self._before_rows is not None:
                    self._before_rows.append(data)
                yield text.removeprefix("\ufeff") if first else text

    def _csv(self) -> Iterator[tuple[int, tuple[int, int], dict[str, Any] | str]]:
        csv.field_size_limit(max(csv.field_size_limit(), MAX_CAPTION_BYTES))
        reader = csv.reader(self._texts(), strict=True)
        header: list[str] | None = None
        while True:
            start = self._end
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield reader.line_num, (start, self._end), f"is not CSV: {error}"
                continue
            place = start, self._end
            if not fields:
                continue
            if header is None:
                header = fields
                self.header = b"".join(self._before_rows or [])
                self._before_rows = None
                if any(map(has_surrogates, header)):
                    yield reader.line_num, place, "the header is not UTF-8"
                    return
                self.columns.update(dict.fromkeys(header))
                twice = sorted({escaped(name) for name in header if header.count(name) > 1})
                if twice:
                    reason = f"the header has a column twice ({', '.join(twice)}); the last one counts"
                    yield reader.line_num, place, reason
            elif len(fields) != len(header):
                yield reader.line_num, place, f"has {len(fields)} fields, the header has {len(header)}"
            elif any(map(has_surrogates, fields)):
                yield reader.line_num, place, "is not UTF-8"
            else:
                yield reader.line_num, place, dict(zip(header, fields, strict=True))
