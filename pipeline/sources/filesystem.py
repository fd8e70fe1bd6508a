"""Where files lie: a `Store` reads whole files and ranges of them, on a disk or (`remote`) anywhere else.

What: a few operations on names relative to a root, with forward slashes; `Disk` is a local folder.
Why: a source that reads tars or tables needs `stat`, ranges and a seekable file, and nothing else of the place where
they lie. Every name is checked before it is used, so that no source has to.
Price: on a disk each read resolves the name's links again; with opening, a read costs some 60 us.
"""

from __future__ import annotations

import difflib
import io
import os
import posixpath
import stat as stat_module
from abc import ABC, abstractmethod
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from pipeline.errors import UserError
from pipeline.sources.filenames import hostile, said, shown


class Unreadable(OSError):
    """The bytes of one item cannot be had; the message is the plain reason."""


class Store(ABC):
    """Files under a root. Reading a name that may not be used, or that is not there, raises `Unreadable`."""

    location: str
    """The root, for messages and for finding it again."""

    @property
    def far(self) -> bool:
        """Whether every read is a round trip over a network, so that many should be under way at once."""
        return False

    @abstractmethod
    def find(self) -> list[str]:
        """Sorted names of all files under the root that are not hidden.

        Raises:
            UserError: a folder of it cannot be listed.
        """

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """Sorted names (relative to the root) of the files right in a folder; empty if there is none, or if a web
        server does not list it.

        Raises:
            UserError: it cannot be listed.
        """

    @abstractmethod
    def stat(self, name: str) -> tuple[int, int]:
        """(size, number that changes with the bytes: the modification time in ns, or made from an ETag)."""

    @abstractmethod
    def read(self, name: str, limit: int | None = None) -> bytes:
        """The whole file, or at most `limit` + 1 bytes of it."""

    @abstractmethod
    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """Exactly these bytes; fewer are an error."""

    @abstractmethod
    def open(self, name: str, spool: bool = False) -> BinaryIO:
        """The file, seekable. spool: what is read of it will be read again soon."""

    def read_many(self, names: list[str], limit: int) -> list[bytes | Unreadable]:
        """`read` of many small files; an error stands in its file's place."""
        return [self._read_one(name, limit) for name in names]

    def stat_many(self, names: Iterable[str]) -> dict[str, tuple[int, int] | Unreadable]:
        """`stat` of many files; an error stands in its file's place."""
        return {name: self._stat_one(name) for name in names}

    def listed(self, names: Iterable[str]) -> dict[str, tuple[int, int]]:
        """`stat` of files that were asked for by name.

        Raises:
            UserError: some are not there or cannot be read; a data set without them is another one.
        """
        found: dict[str, tuple[int, int]] = {}
        bad: dict[str, Unreadable] = {}
        for name, seen in self.stat_many(names).items():
            if isinstance(seen, Unreadable):
                bad[name] = seen
            else:
                found[name] = seen
        if bad:
            first, error = next(iter(bad.items()))
            missing = isinstance(error.__cause__, FileNotFoundError)
            near = difflib.get_close_matches(first, self.names(posixpath.dirname(first)), n=1) if missing else []
            hint = f"did you mean {near[0]}? Else " if near else ""
            raise UserError(
                f"{self.location}: {len(bad)} of {len(bad) + len(found)} listed files cannot be read",
                found="; ".join(map(str, islice(bad.values(), 3))) + (" ..." if len(bad) > 3 else ""),
                fix=f"{hint}bring them back, or name only those that are to be used",
            )
        return found

    def _stat_one(self, name: str) -> tuple[int, int] | Unreadable:
        try:
            return self.stat(name)
        except Unreadable as error:
            return error

    def _read_one(self, name: str, limit: int) -> bytes | Unreadable:
        try:
            return self.read(name, limit)
        except Unreadable as error:
            return error

    def refresh(self) -> None:  # noqa: B027 - a disk keeps nothing
        """Forget what is known of the files."""


class Disk(Store):
    """A local folder. Links are followed to files inside it only."""

    def __init__(self, root: Path | str):
        self.root = Path(root)
        self.location = str(self.root.resolve())
        self._real_root = os.path.realpath(self.root)

    def path(self, name: str) -> Path:
        problem = hostile(name)
        if problem:
            raise Unreadable(f"{shown(name)}: {problem}")
        path = os.path.join(self.root, *name.split("/"))
        if not self.inside(path):
            raise Unreadable(f"{shown(name)}: a link leads out of the source folder")
        return Path(path)

    def inside(self, path: str) -> bool:
        try:
            return os.path.commonpath((self._real_root, os.path.realpath(path))) == self._real_root
        except (OSError, ValueError):
            return False

    def find(self) -> list[str]:
        found = []
        for folder, folders, files in os.walk(self.root, onerror=self.unlisted):
            folders[:] = [name for name in folders if not name.startswith(".")]
            base = os.path.relpath(folder, self.root)
            prefix = "" if base == "." else base.replace(os.sep, "/") + "/"
            found += [prefix + name for name in files if not name.startswith(".")]
        return sorted(found)

    def unlisted(self, error: OSError) -> NoReturn:
        """A folder that cannot be listed may hold anything: the listing would not be whole.

        Raises:
            UserError: always.
        """
        raise UserError(
            f"{error.filename}: the folder cannot be read: {said(error)}",
            expected=f"every folder under {self.location} to be readable",
            fix=f"chmod -R u+rX {error.filename}, or move it out of {self.location}",
        )

    def names(self, folder: str) -> list[str]:
        try:
            with os.scandir(os.path.join(self.root, folder)) as entries:
                found = [entry.name for entry in entries if entry.is_file()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self.unlisted(error)
        return sorted(f"{folder}/{name}" if folder else name for name in found)

    def stat(self, name: str) -> tuple[int, int]:
        path = self.path(name)
        try:
            found = os.stat(path)
        except (OSError, ValueError) as error:
            raise Unreadable(f"{shown(name)}: {said(error)}") from error
        if not stat_module.S_ISREG(found.st_mode):
            raise Unreadable(f"{shown(name)}: is not a regular file")
        return found.st_size, found.st_mtime_ns

    def read(self, name: str, limit: int | None = None) -> bytes:
        with self.open(name) as stream:
            try:
                return stream.read() if limit is None else stream.read(limit + 1)
            except OSError as error:
                raise Unreadable(f"{shown(name)}: {said(error)}") from None

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        with self.open(name) as stream:
            try:
                stream.seek(offset)
                data = stream.read(length)
            except (OSError, ValueError) as error:
                raise Unreadable(f"{shown(name)}: {said(error)}") from None
        return whole(name, data, offset, length)

    def open(self, name: str, spool: bool = False) -> BinaryIO:
        path = self.path(name)
        handle = -1
        try:
            # Not blocking: opening a pipe that nobody writes to would hang the run.
            handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
            if not stat_module.S_ISREG(os.fstat(handle).st_mode):
                os.close(handle)
                raise Unreadable(f"{shown(name)}: is not a regular file")
            return BoundedReader(io.FileIO(handle))
        except Unreadable:
            raise
        except (OSError, ValueError) as error:
            raise Unreadable(f"{shown(name)}: {said(error)}") from None


class BoundedReader(io.BufferedReader):
    """Allocates no more than the file has: the sizes that are asked for come from headers that anybody wrote."""

    def __init__(self, raw: Any, buffer_size: int = io.DEFAULT_BUFFER_SIZE):
        self._size = raw.seek(0, os.SEEK_END)
        raw.seek(0)
        super().__init__(raw, buffer_size)

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size > io.DEFAULT_BUFFER_SIZE:
            size = min(size, max(0, self._size - self.tell()))
        return super().read(size)


class RangeFile(io.RawIOBase):
    """A file object over `read_range`: what tarfile and pyarrow want to have."""

    def __init__(self, store: Store, name: str):
        self._store, self._name, self._at = store, name, 0
        self._size = store.stat(name)[0]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence])
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._size - self._at)
        length = left if size is None or size < 0 else min(size, left)
        data = self._store.read_range(self._name, self._at, length) if length else b""
        self._at += len(data)
        return data

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def whole(name: str, data: bytes, offset: int, length: int) -> bytes:
    """The data, if there are as many bytes as were asked for."""
    if len(data) != length:
        raise Unreadable(
            f"{shown(name)}: gave {len(data)} of {length} bytes at {offset}; the file has been cut or changed"
        )
    return data
