"""Rows of JSON lines, and the same numbers to trackers.

`Rows` appends rows to a file. A file that cannot be written (a full disk) ends no work: its rows wait for the next row.
docs/metrics.md says what a row of each stage has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sana_pipe.base.errors import UserError
from sana_pipe.base.metrics.trackers import Trackers

_TAIL = 1 << 16
"""Bytes at the end of a file in which `last` looks for a row."""


class Rows:
    """The rows of one process. Close it.

    Args:
        trackers: closed with the rows.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, log: Callable[[str], None], trackers: Trackers | None = None):
        """Open for appending. A last line torn by a kill gets its newline first."""
        self.path, self._log, self._trackers = path, log, trackers
        torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        self._file = path.open("ab", buffering=0)
        self._unwritten = b"\n" if torn else b""

    def append(self, values: dict[str, Any]) -> None:
        """Append a row, with its time.

        Raises:
            OSError: it cannot be written now; it is written before the next row.
            ValueError: a number is not finite.
        """
        self._unwritten += json.dumps({**values, "time": now()}, allow_nan=False).encode() + b"\n"
        self._flush()

    def write(self, values: dict[str, Any]) -> None:
        """Append a row, now or later."""
        late = bool(self._unwritten)
        try:
            self.append(values)
        except OSError as error:
            if not late:
                self._log(f"warning: {self.path}: cannot be written: {error.strerror}; new rows wait until it can be")

    def track(self, step: int, values: dict[str, Any], group: str) -> None:
        """Hand the numbers of a row to the trackers."""
        if self._trackers is not None:
            self._trackers.log(step, values, group)

    def close(self) -> None:
        try:
            self._flush()
        except OSError as error:
            rows = self._unwritten.count(b"\n")
            self._log(f"warning: {self.path}: {rows} rows were not written and are lost: {error.strerror}")
        self._file.close()
        if self._trackers is not None:
            self._trackers.close()

    def _flush(self) -> None:
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]


def read(path: Path, having: str = "") -> Iterator[dict[str, Any]]:
    """The rows of a file, without torn lines. having: only lines with this text are parsed.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if having in line and (row := _row(line)) is not None:
                    yield row
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}", fix="check the path and its permissions") from None


def last(path: Path) -> dict[str, Any] | None:
    """The newest row that is no event; None: there is none near the end of the file, or no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL))
            rows = [_row(line) for line in file.read().splitlines()]
    except OSError:
        return None
    return next((row for row in reversed(rows) if row is not None and "event" not in row), None)


def now() -> str:
    """UTC, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _row(line: str | bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
