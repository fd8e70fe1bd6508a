"""JSONL and CSV files whose rows name pictures: metadata.jsonl / metadata.csv in a folder, and listings."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import UserError
from pipeline.sources.caption_columns import CaptionCandidate, CaptionRule
from pipeline.sources.filenames import escaped, has_surrogates, short_repr, unsafe_reason
from pipeline.sources.filesystem import Filesystem, LocalFilesystem, Unreadable
from pipeline.sources.sidecars import MAX_CAPTION_BYTES, parse_json
from pipeline.sources.source import Reject

METADATA_NAMES = ("metadata.jsonl", "metadata.csv")
FILE_COLUMN = "file_name"

Rows = list[tuple[int, dict[str, Any]]]
"""(line number, values by column)"""


@dataclass
class PictureRows:
    """What the rows that name a picture say about it.

    problems: captions that cannot be used, with their place.
    meta: the other columns; of several rows with the same column the first counts.
    """

    candidates: list[CaptionCandidate] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)


class MetadataReader:
    """Reads metadata files of one source.

    Attributes:
        pictures: key -> what the rows say about it.
        rejects: rows that cannot be used.
    """

    def __init__(self, filesystem: Filesystem, rule: CaptionRule):
        self.filesystem, self.rule = filesystem, rule
        self.root = str(filesystem.root) if isinstance(filesystem, LocalFilesystem) else filesystem.location
        self.pictures: dict[str, PictureRows] = {}
        self.rejects: list[Reject] = []

    def path(self, file: str) -> str:
        """The file's full name, for messages."""
        return f"{self.root.rstrip('/')}/{file}"

    def read(self, file: str) -> tuple[Rows, list[str]]:
        """The rows of a file and its columns in order of appearance; lines that are no row become rejects."""
        try:
            data = self.filesystem.read(file)
        except Unreadable as error:
            raise UserError(
                f"{self.root}: a file of captions cannot be read", found=error, fix="make it readable, or move it away"
            ) from None
        columns: dict[str, None] = {}
        rows: Rows = []
        problems: list[Reject] = []
        parse = _csv_rows if file.lower().endswith(".csv") else _jsonl_rows
        for line, row in parse(data, columns):
            if isinstance(row, str):
                problems.append(Reject(f"{file}:{line}", row))
            else:
                rows.append((line, row))
        if not rows and not problems:
            problems.append(Reject(file, "holds no row"))
        self.rejects += problems
        return rows, list(columns)

    @property
    def caption_columns(self) -> str:
        """The columns that the rule reads and the setting that names them, for messages."""
        return " or ".join(map(repr, self.rule.columns)) + f" ({self.rule.setting})"

    def check_columns(self, file: str, columns: list[str], file_column: str, alternative: str = "") -> None:
        """Raises a UserError if no caption column exists. alternative: appended to the fix."""
        if not columns or not self.rule.lacks_captions(columns):
            return
        others = [escaped(column) for column in columns if column != file_column]
        fix = f"--set data.caption_field={others[0]}" if others else f"add a caption column to {self.path(file)}"
        raise UserError(
            f"{self.path(file)} has no column {self.rule.columns[0]!r}",
            expected=f"the columns {file_column!r} and {self.caption_columns}",
            found="the columns " + ", ".join(repr(escaped(column)) for column in columns),
            fix=fix + alternative,
        )

    def file_name(self, where: str, row: dict[str, Any], column: str) -> str | None:
        """The file that a row names; None, and a reject, if the name must not be used."""
        name = row.get(column)
        if not isinstance(name, str) or not name:
            self.rejects.append(Reject(where, f"names no file ({column} is {short_repr(name)})"))
            return None
        problem = unsafe_reason(name)
        if problem is not None:
            self.rejects.append(Reject(where, f"names {escaped(name)!r}: {problem}"))
            return None
        return name

    def add(self, where: str, row: dict[str, Any], column: str, key: str) -> None:
        """Add a row to the picture `key`. column: names the file."""
        picture = self.pictures.setdefault(key, PictureRows())
        for other, value in row.items():
            if other != column and other not in self.rule.columns:
                picture.meta.setdefault(other, value)
        captions = self.rule.read(row)
        picture.candidates += captions.candidates
        for reason in captions.problems:
            picture.problems.append(f"{where} {reason}")
            self.rejects.append(Reject(where, reason))


def _jsonl_rows(data: bytes, columns: dict[str, None]) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """(line number, row, or the reason why the line is not a row); fills `columns` in order of appearance."""
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
            if any(map(has_surrogates, header)):
                yield reader.line_num, "the header is not UTF-8"
                return
            columns.update(dict.fromkeys(header))
            twice = sorted({escaped(name) for name in header if header.count(name) > 1})
            if twice:
                yield reader.line_num, f"the header has a column twice ({', '.join(twice)}); the last one counts"
        elif len(fields) != len(header):
            yield reader.line_num, f"has {len(fields)} fields, the header has {len(header)}"
        elif any(map(has_surrogates, fields)):
            yield reader.line_num, "is not UTF-8"
        else:
            yield reader.line_num, dict(zip(header, fields, strict=True))
