"""Reads of local files that fail for a time."""

from __future__ import annotations

import io
import os

import pytest

from pipeline.sources.filesystem import BoundedReader, LocalFilesystem


def fail_reads(monkeypatch: pytest.MonkeyPatch, name: str, number: int, after: int = 0, times: int = 1) -> None:
    """Let reads of a file fail, for all that a `LocalFilesystem` opens.

    Args:
        number: of the error, as in `errno`.
        after: reads before the first that fails.
        times: reads that fail.
    """
    left, real = [after], LocalFilesystem.open

    class Failing(io.FileIO):
        def readinto(self, buffer: object) -> int:
            left[0] -= 1
            if -times <= left[0] < 0:
                raise OSError(number, os.strerror(number))
            return super().readinto(buffer)  # type: ignore[arg-type, return-value]

    def opened(self: LocalFilesystem, file: str, spool: bool = False) -> object:
        stream = real(self, file, spool)
        return BoundedReader(Failing(self.path(file))) if file == name else stream

    monkeypatch.setattr(LocalFilesystem, "open", opened)
