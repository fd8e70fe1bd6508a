"""Reads of local files that fail for a time."""

from __future__ import annotations

import errno
import io
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from sana_pipe.data.sources.filesystem import BoundedReader, LocalFilesystem


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
            return super().readinto(buffer)  # type: ignore[arg-type]

    def opened(self: LocalFilesystem, file: str, spool: bool = False) -> object:
        stream = real(self, file, spool)
        return BoundedReader(Failing(self.path(file))) if file == name else stream

    monkeypatch.setattr(LocalFilesystem, "open", opened)


def disconnect(monkeypatch: pytest.MonkeyPatch, root: str, every: int = 1) -> set[str]:
    """Let calls that read or list something below a folder fail as if its network file system had gone.

    Args:
        root: the folder.
        every: which calls of each kind fail: the first, and then each so many.

    Returns:
        The names of the calls that failed, to which each failure is added.
    """
    failed, calls = set[str](), Counter[str]()

    def failing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **options: Any) -> Any:
            place = self.fileno() if isinstance(self, io.IOBase) else self
            place = os.readlink(f"/dev/fd/{place}") if isinstance(place, int) else os.fspath(place)
            calls[name] += place.startswith(root)
            if place.startswith(root) and calls[name] % every == 1 % every:
                failed.add(name)
                raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), place)
            return function(self, *args, **options)

        return call

    for name in ("open", "stat", "scandir"):
        monkeypatch.setattr(os, name, failing(name, getattr(os, name)))
    methods = {name: failing(name, getattr(io.FileIO, name)) for name in ("readinto", "readall")}
    monkeypatch.setattr(io, "FileIO", type("Disconnected", (io.FileIO,), methods))
    return failed
