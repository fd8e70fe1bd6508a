"""Filesystems of sources: whole files and ranges of them, on a disk or (`remote`) behind a URL.

Names are relative to a root, with forward slashes. Tars and tables need only `stat`, ranges and a seekable file. Every
name is checked here before it is used, so that sources do not have to.
Price: on a disk each read resolves the links in the name again; with opening, a read costs some 60 us.
"""

from __future__ import annotations

import difflib
import errno
import io
import os
import posixpath
import re
import shlex
import stat as stat_module
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

from sana_pipe.base import retrying
from sana_pipe.base.disk import raise_if_of_machine
from sana_pipe.base.errors import AwayError, UserError
from sana_pipe.data.cache.scratch import Scratch
from sana_pipe.data.sources.filenames import (
    error_text,
    escaped,
    has_surrogates,
    is_url,
    is_web,
    spellings,
    unsafe_reason,
)

T = TypeVar("T")

LEADS_OUT = "a link leads out of the source folder; give a copy without links (cp -rL)"
ON_THE_WEB = "is on a web server, and only files are read: img2dataset fetches pictures (docs/encoding.md)"
MAX_POINTER = 1024
POINTERS = (
    (rb"version https://git-lfs\.github\.com/", "is a pointer of Git LFS, not the file: fetch it with `git lfs pull`"),
    (rb"/annex/objects/", "is a pointer of git-annex, not the file: fetch it with `git annex get`"),
    (
        rb"(\.\./)+(blobs|\.git)/\S+\Z",
        "is a link that was copied as text: copy the files (cp -rL), or fetch them anew (hf download --local-dir DIR)",
    ),
)
"""The contents of small files that stand in place of a file, and the reason."""


class Unreadable(OSError):
    """The bytes of one item cannot be read; the message is the reason in plain words."""

    @property
    def fix(self) -> str | None:
        """Say what helps, where the driver of a store knows it."""
        return getattr(self.__cause__, "fix", None)

    @classmethod
    def of(cls, name: str, error: Exception) -> Unreadable:
        """The same for an error of reading a file. Raises as `raise_if_of_machine`."""
        raise_if_of_machine(error, escaped(name))
        return cls(f"{escaped(name)}: {escaped(error_text(error))}")


def or_unreadable(read: Callable[..., T], *args: Any) -> T | Unreadable:
    """The result, or the error in place of it."""
    try:
        return read(*args)
    except Unreadable as error:
        return error


def is_read_error(error: BaseException) -> bool:
    """Return whether bytes could not be read. Errors of bytes that were read have no number, or come from a seek to a
    place that a damaged header names."""
    numbers = (None, errno.EINVAL, errno.EOVERFLOW)
    return isinstance(error, Unreadable) or (isinstance(error, OSError) and error.errno not in numbers)


def unreadable_reason(name: str, error: OSError, what: str = "") -> str:
    """The reason of a reject that the next scan tries again, for an error of reading a file. what: the part of the file
    and a colon. Raises as `raise_if_of_machine`."""
    raise_if_of_machine(error, escaped(name))
    return f"unreadable: {what}{escaped(error_text(error)).removeprefix(escaped(name) + ': ')}"


class Filesystem(ABC):
    """Files under a root. Reading a name that is unsafe or does not exist raises `Unreadable`."""

    location: str
    """The root, for messages and for opening it again."""

    @property
    def is_remote(self) -> bool:
        """Return whether every read is a network round trip, so that many should be in flight at once."""
        return False

    @property
    def roots(self) -> tuple[str, ...]:
        """The root as absolute names may write it."""
        return (self.location,)

    def full_name(self, name: str) -> str:
        """Name the file for messages."""
        return f"{self.location.rstrip('/')}/{name}"

    def is_below(self, url: str) -> bool:
        """Return whether a URL or absolute name is below the root."""
        return any(url.startswith(f"{root.rstrip('/')}/") for root in self.roots)

    def key(self, name: str, folder: str) -> str:
        """The name within the root of a file that a table names: relative to `folder`, or absolute and below the root.
        It may have the backslashes of Windows.

        Raises:
            ValueError: it must not be used; the message is the reason.
        """
        path = name.removeprefix("file://").replace("\\", "/")
        roots = [f"{root.rstrip('/')}/" for root in self.roots]
        named = ((full, root) for full in (path, posixpath.join(folder, path)) for root in roots)
        inside = next((full.removeprefix(root) for full, root in named if full.startswith(root)), None)
        if inside is None and is_url(full := path if is_url(path) else folder):
            raise ValueError(ON_THE_WEB if is_web(full) else "is a URL, not a name within the data")
        problem = unsafe_reason(path if inside is None else inside)
        if problem is not None:
            raise ValueError(problem)
        return posixpath.normpath(posixpath.join(folder, path) if inside is None else inside)

    @abstractmethod
    def find(self) -> Iterator[str]:
        """Names of all files under the root that are not hidden, in any order.

        Raises:
            UserError: a folder under the root cannot be listed.
        """

    def find_top_first(self) -> Iterator[str]:
        """`find`, the files of the root itself first, where that costs nothing."""
        return self.find()

    def find_with_sizes(self, scratch: Scratch) -> Iterator[str]:
        """`find`, for a source that will ask for the size of every file: a remote one remembers what its server says
        with the names. scratch: storage for that."""
        return self.find()

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """Sorted names (relative to the root) of the files in a folder itself; empty if there is no such folder or a
        web server does not list it.

        Raises:
            UserError: the folder cannot be listed.
        """

    @abstractmethod
    def stat(self, name: str) -> tuple[int, int]:
        """(size in bytes, version: the modification time in ns, or a number derived from an ETag)."""

    @abstractmethod
    def read(self, name: str, limit: int | None = None) -> bytes:
        """The whole file, or at most `limit` + 1 bytes of it."""

    @abstractmethod
    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`; fewer raise `Unreadable`."""

    @abstractmethod
    def open(self, name: str, spool: bool = False) -> BinaryIO:
        """The file, seekable. spool: the whole file will be read soon, so a remote file is worth a temporary copy."""

    def read_many(self, names: list[str], limit: int) -> list[bytes | Unreadable]:
        """`read` of many small files; for a file that fails, the error."""
        return [or_unreadable(self.read, name, limit) for name in names]

    def stat_many(self, names: Iterable[str]) -> dict[str, tuple[int, int] | Unreadable]:
        """`stat` of many files; for a file that fails, the error."""
        return {name: or_unreadable(self.stat, name) for name in names}

    def require(self, names: Iterable[str]) -> dict[str, tuple[int, int]]:
        """`stat` of files that the user named.

        Raises:
            UserError: some of them cannot be read; without them it would be another data set.
        """
        stats: dict[str, tuple[int, int]] = {}
        errors: dict[str, Unreadable] = {}
        for name, result in self.stat_many(names).items():
            if isinstance(result, Unreadable):
                errors[name] = result
            else:
                stats[name] = result
        if errors:
            first, error = next(iter(errors.items()))
            missing = isinstance(error.__cause__, FileNotFoundError)
            others = set(self.names(posixpath.dirname(first))) - set(stats) if missing else ()
            fix = "put them back, or list only those that should be used"
            raise UserError(
                f"{self.location}: {len(errors)} of {len(errors) + len(stats)} listed files cannot be read",
                found="; ".join(map(str, islice(errors.values(), 3))) + (" ..." if len(errors) > 3 else ""),
                fix=error.fix or suggestion(first, others, fix),
            )
        return stats

    def refresh(self) -> None:  # noqa: B027 - a disk caches nothing
        """Drop cached listings and file contents."""


def suggestion(name: str, names: Iterable[str], fix: str) -> str:
    """A fix that begins with the nearest of `names`, if one is near."""
    near = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean {escaped(near[0])}? Else {fix}" if near else fix


def refuse_surrogates(location: str) -> None:
    """Raise a UserError for a path or URL that is not UTF-8."""
    if has_surrogates(location):
        raise UserError(
            f"the path of the data is not valid UTF-8: {escaped(location)}",
            fix="rename the folder, or mount it elsewhere",
        )


def mode_of(path: Path | str, patience_s: float) -> int:
    """The mode of what a path names, as `os.stat` gives it; 0 if there is nothing, or it may not be looked at.

    Raises:
        AwayError: its file system stays disconnected for `patience_s`.
    """
    try:
        return retrying.when_reachable(lambda: os.stat(path), str(path), patience_s).st_mode
    except (OSError, ValueError):
        return 0


def _blobs(root: str) -> list[str]:
    """The folder that the links of a snapshot in the Hugging Face hub's cache lead to, if the root is in one."""
    parents = (folder.parent for folder in (Path(root), *Path(root).parents) if folder.name == "snapshots")
    return [str(parent / "blobs") for parent in parents if (parent / "blobs").is_dir()]


def let_read(path: str) -> str:
    """The command that lets this user read a folder and all below it."""
    return f"chmod -R u+rX {shlex.quote(path)}, as its owner or root"


class LocalFilesystem(Filesystem):
    """A local folder. Only links to files inside it are followed, and those of the Hugging Face hub's cache
    (`snapshots/REVISION/...`) to its `blobs`.

    A file that is missing is looked for in the other Unicode forms of its name. A pointer in place of a large file (Git
    LFS, git-annex) cannot be read.

    Args:
        named: files that the user named; links among them are followed.
        patience_s: how long to wait for a network file system that does not answer; then `AwayError`.

    Raises:
        UserError: the path is not UTF-8, so that no document can name it.
    """

    def __init__(self, root: Path | str, patience_s: float = retrying.PATIENCE_S, named: Iterable[str] = ()):
        self.root, self.patience_s, self.named = Path(root), patience_s, tuple(named)
        self.location = self._real_root = os.path.realpath(self.root)
        refuse_surrogates(self.location)
        self._inside = [self._real_root, *_blobs(self._real_root)]
        links = (os.path.realpath(self.root / name) for name in self.named)
        self._inside += [real for real in links if real not in self._inside]

    @property
    def roots(self) -> tuple[str, ...]:
        return os.path.abspath(self.root), self.location

    def path(self, name: str) -> Path:
        problem = unsafe_reason(name)
        if problem:
            raise Unreadable(f"{escaped(name)}: {problem}")
        forms = [os.path.join(self.root, form) for form in spellings(name)]
        path = next(filter(os.path.lexists, forms), forms[0]) if len(forms) > 1 else forms[0]
        if not self.inside(path):
            raise Unreadable(f"{escaped(name)}: {LEADS_OUT}")
        return Path(path)

    def inside(self, path: str) -> bool:
        """Return whether a path is below the root once all its links are followed, or where else links may lead."""
        try:
            real = os.path.realpath(path)
            return any(os.path.commonpath((root, real)) == root for root in self._inside)
        except (OSError, ValueError):
            return False

    def when_reachable(self, read: Callable[[], T]) -> T:
        """See `retrying.when_reachable`."""
        return retrying.when_reachable(read, self.location, self.patience_s)

    def find(self) -> Iterator[str]:
        for name, entry in self.walk():
            if not entry.name.startswith(".") and not self.is_folder(entry):
                yield name

    def walk(self) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """All that is no folder to enter: files, and what is hidden, and linked folders."""
        folders = deque([""])
        while folders:  # level by level, so that a few names show what there is
            folder = folders.popleft()
            for entry in self.entries(folder):
                name = f"{folder}/{entry.name}" if folder else entry.name
                if entry.name.startswith(".") or not self.is_folder(entry) or entry.is_symlink():
                    yield name, entry
                else:
                    folders.append(name)

    def entries(self, folder: str) -> Iterator[os.DirEntry[str]]:
        """The entries of a folder itself. Raises as `raise_unlisted`."""
        try:
            with self._scan(folder) as entries:
                yield from entries
        except OSError as error:
            self.raise_unlisted(error)

    def _scan(self, folder: str) -> AbstractContextManager[Iterator[os.DirEntry[str]]]:
        path = os.path.join(self.root, folder).rstrip("/") or "/"

        def scan() -> AbstractContextManager[Iterator[os.DirEntry[str]]]:
            try:
                os.stat(os.path.join(path, "."))  # fails where names may be listed, but files not opened
                return os.scandir(path)
            except OSError as error:
                error.filename = path
                raise

        return self.when_reachable(scan)

    def is_folder(self, entry: os.DirEntry[str]) -> bool:
        """Return whether an entry is a folder, or a link to one; False for a circle of links. Waits as
        `when_reachable`."""
        try:
            return self.when_reachable(entry.is_dir)
        except OSError:
            return False

    def raise_unlisted(self, error: OSError) -> NoReturn:
        """Raise a UserError for a folder that cannot be listed: the listing would be incomplete."""
        raise_if_of_machine(error, str(error.filename))
        if retrying.is_disconnected(error):
            raise AwayError(
                f"{error.filename}: the folder cannot be read: {error_text(error)}",
                fix="look at the mount, then run the same command again",
            ) from error
        raise UserError(
            f"{error.filename}: the folder cannot be read: {error_text(error)}",
            expected=f"every folder under {self.location} to be readable",
            fix=f"{let_read(str(error.filename))}, or move it out of {self.location}",
        )

    def names(self, folder: str) -> list[str]:
        try:
            with self._scan(folder) as entries:
                names = [entry.name for entry in entries if entry.is_file()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self.raise_unlisted(error)
        return sorted(f"{folder}/{name}" if folder else name for name in names)

    def stat(self, name: str) -> tuple[int, int]:
        path = self.path(name)
        try:
            status = self.when_reachable(lambda: os.stat(path))
        except (OSError, ValueError) as error:
            raise Unreadable.of(name, error) from error
        if not stat_module.S_ISREG(status.st_mode):
            raise Unreadable(f"{escaped(name)}: is not a regular file")
        return status.st_size, status.st_mtime_ns

    def read(self, name: str, limit: int | None = None) -> bytes:
        return self._read(name, 0, -1 if limit is None else limit + 1)

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        return check_length(name, self._read(name, offset, length), offset, length)

    def _read(self, name: str, offset: int, length: int) -> bytes:
        with self.open(name) as stream:
            try:
                if offset:
                    stream.seek(offset)
                return stream.read(length)
            except (OSError, ValueError) as error:
                raise Unreadable.of(name, error) from None

    def open(self, name: str, spool: bool = False) -> BinaryIO:
        path = self.path(name)

        def opened() -> int:
            # Not blocking: opening a pipe without a writer would hang the run.
            handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
            try:
                problem = _problem_of(handle)
                if problem is not None:
                    raise Unreadable(f"{escaped(name)}: {problem}")
            except OSError:
                os.close(handle)
                raise
            return handle

        try:
            return self.when_reachable(lambda: BoundedReader(PatientFile(opened, self.when_reachable)))
        except Unreadable:
            raise
        except (OSError, ValueError) as error:
            raise Unreadable.of(name, error) from None


def _problem_of(handle: int) -> str | None:
    """Say why an open file holds no data, or None."""
    status = os.fstat(handle)
    if not stat_module.S_ISREG(status.st_mode):
        return "is not a regular file"
    text = os.pread(handle, MAX_POINTER, 0) if status.st_size <= MAX_POINTER else b""
    return next((reason for pattern, reason in POINTERS if re.match(pattern, text)), None)


class PatientFile(io.FileIO):
    """A file whose reads are repeated while its file system is disconnected. The old descriptor may be stale then, so
    the file is opened again.

    Args:
        opened: opens the file and returns its descriptor.
        when_reachable: see `LocalFilesystem`.
    """

    def __init__(self, opened: Callable[[], int], when_reachable: Callable[[Callable[[], Any]], Any]):
        super().__init__(opened())
        self._opened, self._when_reachable = opened, when_reachable

    def readinto(self, buffer: Any) -> int:
        return self._repeated(lambda: io.FileIO.readinto(self, buffer))

    def readall(self) -> bytes:
        return self._repeated(lambda: io.FileIO.readall(self))

    def _repeated(self, read: Callable[[], Any]) -> Any:
        position = self.tell()
        failed = False

        def once() -> Any:
            nonlocal failed
            if failed:
                handle = self._opened()
                os.dup2(handle, self.fileno(), inheritable=False)
                os.close(handle)
                self.seek(position)
            failed = True
            return read()

        return self._when_reachable(once)


class BoundedReader(io.BufferedReader):
    """Never allocates more than the file's size: the sizes requested come from untrusted headers."""

    def __init__(self, raw: Any, buffer_size: int = io.DEFAULT_BUFFER_SIZE):
        self._size = raw.seek(0, os.SEEK_END)
        raw.seek(0)
        super().__init__(raw, buffer_size)

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size > io.DEFAULT_BUFFER_SIZE:
            size = min(size, max(0, self._size - self.tell()))
        return super().read(size)


class RangeFile(io.RawIOBase):
    """A file object over `read_range`, for tarfile and pyarrow."""

    def __init__(self, filesystem: Filesystem, name: str):
        self._filesystem, self._name, self._position = filesystem, name, 0
        self._size = filesystem.stat(name)[0]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence])
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._size - self._position)
        length = left if size is None or size < 0 else min(size, left)
        data = self._filesystem.read_range(self._name, self._position, length) if length else b""
        self._position += len(data)
        return data

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def check_length(name: str, data: bytes, offset: int, length: int) -> bytes:
    """The data; raises `Unreadable` if it is not `length` bytes."""
    if len(data) != length:
        raise Unreadable(
            f"{escaped(name)}: gave {len(data)} of {length} bytes at {offset}; the file has been cut or changed"
        )
    return data
