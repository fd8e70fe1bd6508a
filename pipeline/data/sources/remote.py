"""Files behind a URL: object stores, web servers and the Hugging Face hub, through fsspec.

Ranges are read by range requests. A file that will be read completely (a tar during a scan) is spooled: its blocks are
stored in a temporary file, so each is transferred once. A web server without ranges silently sends the whole file; that
is detected at the first answer, and from then on its files are transferred whole, into the temporary file.
Price: temporary files of up to `SPOOL_BYTES` together (at most half of the free space there). Every error of a driver
that concerns one file becomes `Unreadable`, after retries where they may help.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import quote, unquote, urlsplit

import pyarrow as pa
import xxhash

from sana_pipe.base import retrying
from sana_pipe.base.disk import raise_if_of_machine
from sana_pipe.base.errors import UserError, expanded
from sana_pipe.base.urls import strip_credentials
from sana_pipe.data.cache.connections import (
    CHANGE_TIMES,
    Connection,
    ObjectAwayError,
    RequestFailed,
    refuse_credentials,
)
from sana_pipe.data.cache.item_rows import ItemRows
from sana_pipe.data.cache.scratch import Scratch
from sana_pipe.data.sources.filenames import error_text, escaped, is_url, unsafe_reason
from sana_pipe.data.sources.filesystem import Filesystem, RangeFile, Unreadable, check_length, or_unreadable

BLOCK = 4 << 20
SPOOL_BYTES = 8 << 30
SPOOLED_FILES = 4
PARALLEL_REQUESTS = 16
KNOWN = 1 << 17
"""Files whose size is remembered, besides those of `find_with_sizes`."""

_UNKNOWN = -1
_DESCRIBED = pa.schema([("item", pa.string()), ("size", pa.int64()), ("version", pa.int64())])

CHANGE_MARKS = (
    "ETag",
    "etag",
    "generation",
    "md5Hash",
    "content_md5",
    "Content-MD5",
    "xet_hash",
    "blob_id",
    "oid",
    "sha256",
    "Last-Modified",
    *CHANGE_TIMES,
)
"""Keys of a driver's description that change with the content, the best first."""

T = TypeVar("T")


class RemoteFilesystem(Filesystem):
    """Files below a URL.

    Args:
        url: of the root, with a scheme that fsspec knows.
        patience_s: how long to wait for a server that does not answer.

    Raises:
        UserError: see `Connection`.
    """

    def __init__(self, url: str, patience_s: float):
        self.connection = Connection(url, UserError, patience_s)
        self.fs, self._root, self._web = self.connection.fs, self.connection.root, self.connection.is_web
        self.location = self.connection.url
        self.supports_ranges = True
        self._known: dict[str, tuple[int, int]] = {}
        self._described: ItemRows | None = None
        self._spools: OrderedDict[str, _Spool] = OrderedDict()
        self._lock = threading.Lock()
        self._ranges_proven = False  # the server has sent a range
        self._first_range = threading.Lock()

    @property
    def is_remote(self) -> bool:
        return self.supports_ranges

    # ------------------------------------------------------------ names

    def path(self, name: str) -> str:
        """The driver's path of a file."""
        problem = unsafe_reason(name)
        if problem:
            raise Unreadable(f"{escaped(name)}: {problem}")
        return f"{self._root}/{quote(name) if self._web else name}"

    def _name(self, path: str) -> str | None:
        """The name relative to the root, given the driver's path; None for a path that is not below the root."""
        if self._web:
            path = path.partition("?")[0].partition("#")[0]
        if not path.startswith(self._root + "/"):
            return None
        name = path[len(self._root) + 1 :]
        return unquote(name) if self._web else name

    def find(self) -> Iterator[str]:
        return (name for name, _ in self._find())

    def find_top_first(self) -> Iterator[str]:
        """`find`. Where its beginning is cheap (`Connection.is_paged`), the files of the root itself come before it."""
        if self.connection.is_paged:
            yield from (name for name, _ in self._find(deep=False))
        yield from (name for name in self.find() if "/" in name or not self.connection.is_paged)

    def _find(self, deep: bool = True) -> Iterator[tuple[str, dict[str, Any]]]:
        try:
            with self._errors(""):
                for path, info in self.connection.find(self._root, deep):
                    name = self._name(path)
                    if name and not name.endswith("/") and not _is_hidden(name):
                        yield name, info
        except Unreadable as error:
            raise self._unlisted("", error) from None

    def find_with_sizes(self, scratch: Scratch) -> Iterator[str]:
        if self._web:  # its pages say no sizes
            yield from self.find()
            return
        described = scratch.row_writer(_DESCRIBED)
        for name, info in self._find():
            described.add(name, *_description(info))
            yield name
        self._described = ItemRows(described.finish(), scratch)

    def names(self, folder: str) -> list[str]:
        base = self.path(folder) if folder else self._root
        try:
            entries = self._request(folder, lambda: _list(self.fs, base), "listed")
        except Unreadable as error:
            if self._web and retrying.http_status(error) in (401, 403, 405, 501):
                return []  # many web servers do not list folders
            raise self._unlisted(folder, error) from None
        names = []
        for info in entries:
            name = self._name(str(info["name"]))
            if name and info.get("type") == "file":
                names.append(name)
                if not self._web:
                    self._remember(name, info)
        return sorted(names)

    def _unlisted(self, folder: str, error: Unreadable) -> UserError:
        reason = str(error).removeprefix(f"{escaped(folder)}: ").removeprefix("cannot be listed: ")
        return UserError(
            f"{self.full_name(folder).rstrip('/')}: cannot be listed: {reason}",
            fix=error.fix or "check the address and who may list it",
        )

    def refresh(self) -> None:
        self.fs.invalidate_cache()
        with self._lock:
            self._known, self._described = {}, None
            self._spools = OrderedDict()

    def stat(self, name: str) -> tuple[int, int]:
        return _seen(self._known_of([name])[0] or self._ask(name))

    def _known_of(self, names: list[str]) -> list[tuple[int, int] | None]:
        """Size and version of files as far as they are known without a request."""
        known = [self._known.get(name) for name in names]
        if self._described is not None:
            sizes, versions = (self._described.table.column(column) for column in ("size", "version"))
            for at, row in enumerate(self._described.find(names).tolist()):
                if row >= 0 and (size := sizes[row].as_py()) >= 0:
                    known[at] = size, versions[row].as_py()
        return known

    def _ask(self, name: str) -> tuple[int, int]:
        path = self.path(name)
        info = self._request(name, lambda: self.fs.info(path))
        if info.get("type") == "directory":
            raise Unreadable(f"{escaped(name)}: is a folder")
        if info.get("size") is None:
            raise Unreadable(f"{escaped(name)}: the server does not say how large it is")
        return self._remember(name, info)

    def _remember(self, name: str, info: dict[str, Any]) -> tuple[int, int]:
        size, version = _description(info)
        if size != _UNKNOWN:
            with self._lock:
                self._known[name] = size, version
                if len(self._known) > KNOWN:
                    del self._known[next(iter(self._known))]
        return size, version

    # ------------------------------------------------------------ bytes

    def read(self, name: str, limit: int | None = None) -> bytes:
        path = self.path(name)
        size, _ = self.stat(name)
        if limit is not None and size > limit:
            return self.read_range(name, 0, limit + 1)
        data = self._request(name, lambda: self.connection.read(path))
        return check_length(name, data, 0, size)

    def read_many(self, names: list[str], limit: int) -> list[bytes | Unreadable]:
        with ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:
            return list(pool.map(lambda name: or_unreadable(self.read, name, limit), names))

    def stat_many(self, names: Iterable[str]) -> dict[str, tuple[int, int] | Unreadable]:
        wanted = list(names)
        known = dict(zip(wanted, self._known_of(wanted), strict=True))
        missing = [name for name, described in known.items() if described is None]
        with ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:
            asked = dict(zip(missing, pool.map(partial(or_unreadable, self.stat), missing), strict=True))
        return {name: asked[name] if described is None else _seen(described) for name, described in known.items()}

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        if length == 0:
            return b""
        with self._lock:
            spool = self._spooled(name)
        if spool is None and self.supports_ranges:
            data = self._fetch(name, offset, length)
            if data is not None:
                return check_length(name, data, offset, length)
        if spool is None:
            spool = self._spool(name)
            assert spool is not None, "without ranges"
        return check_length(name, spool.read(offset, length), offset, length)

    def open(self, name: str, spool: bool = False) -> BinaryIO:
        if spool:
            self._spool(name)
        return cast("BinaryIO", RangeFile(self, name))

    def _fetch(self, name: str, offset: int, length: int) -> bytes | None:
        """A range; None if the server sent more than that, and so does not support ranges."""
        path = self.path(name)
        # Until a range has arrived, one request at a time: else many threads could each receive a whole file.
        with nullcontext() if self._ranges_proven else self._first_range:
            if not self.supports_ranges:
                return None
            data = self._request(name, lambda: self.fs.cat_file(path, start=offset, end=offset + length))
            if len(data) > length:
                self.supports_ranges = False
                return None
            self._ranges_proven = True
        return data

    def _spooled(self, name: str) -> _Spool | None:
        """The temporary copy of a file, which becomes the most recently used one; None if there is none."""
        if name in self._spools:
            self._spools.move_to_end(name)
        return self._spools.get(name)

    def _spool(self, name: str) -> _Spool | None:
        """The temporary copy of a file; makes space by evicting the least recently used ones. None if there is not
        enough, for a file whose ranges can be read."""
        size, _ = self.stat(name)
        with self._lock:
            spool = self._spooled(name)
            if spool is not None:
                return spool
            limit = min(SPOOL_BYTES, shutil.disk_usage(tempfile.gettempdir()).free // 2)
            while self._spools and (
                len(self._spools) >= SPOOLED_FILES or size + sum(s.size for s in self._spools.values()) > limit
            ):
                self._spools.popitem(last=False)
            if size > limit:
                if not self.supports_ranges:
                    raise Unreadable(
                        f"{escaped(name)}: the server does not support ranges, and {tempfile.gettempdir()} lacks space "
                        f"for a copy of {size:,} bytes"
                    )
                return None
            self._spools[name] = spool = _Spool(self, name, size)
            return spool

    def _request(self, name: str, ask: Callable[[], T], action: str = "read") -> T:
        """The answer of `ask`, repeated while the server does not answer.

        Raises:
            Unreadable: this file cannot be read.
            UserError: the server as a whole cannot be used.
        """
        with self._errors(name):
            return self.connection.request(escaped(name), ask, action)

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        """Raise errors that concern one file as `Unreadable`."""
        file = f"{escaped(name)}: " if name else ""
        try:
            yield
        except FileNotFoundError as error:
            raise Unreadable(f"{file}does not exist") from error
        except ObjectAwayError as error:
            raise Unreadable(file + escaped(error.reason)) from error
        except (RequestFailed, OSError) as error:
            raise_if_of_machine(error, f"{self.location}/{escaped(name)}")
            raise Unreadable(file + strip_credentials(escaped(error_text(error)))) from error


def _description(info: dict[str, Any]) -> tuple[int, int]:
    """Size and version of a file, each `_UNKNOWN` where the driver does not say it."""
    size, mark = info.get("size"), next((info[key] for key in CHANGE_MARKS if info.get(key)), None)
    version = _UNKNOWN if mark is None else xxhash.xxh3_64_intdigest(str(mark).encode()) >> 1
    return _UNKNOWN if size is None else int(size), version


def _seen(described: tuple[int, int]) -> tuple[int, int]:
    """The result of `stat`. A file whose changes cannot be seen counts as changed every time."""
    size, version = described
    return size, time.time_ns() if version == _UNKNOWN else version


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") and part != ".." for part in name.split("/"))


class _Spool:
    """A temporary copy of a file, whose blocks are fetched when they are first read."""

    def __init__(self, remote: RemoteFilesystem, name: str, size: int):
        self.remote, self.name, self.size = remote, name, size
        try:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the spool
        except OSError as error:
            raise Unreadable.of(name, error) from error
        self._blocks: set[int] = set()
        self._lock = threading.Lock()

    def read(self, offset: int, length: int) -> bytes:
        length = max(0, min(length, self.size - offset))
        with self._lock:
            missing = [
                block for block in range(offset // BLOCK, -(-(offset + length) // BLOCK)) if block not in self._blocks
            ]
            if missing:
                self._fill(missing[0], missing[-1] + 1)
        return os.pread(self._file.fileno(), length, offset)

    def _fill(self, first: int, after: int) -> None:
        start, end = first * BLOCK, min(after * BLOCK, self.size)
        data = self.remote._fetch(self.name, start, end - start) if self.remote.supports_ranges else None
        if data is None:
            start, after, first, end = 0, -(-self.size // BLOCK), 0, self.size
            data = self.remote.read(self.name)
        check_length(self.name, data, start, end - start)
        try:
            self._file.seek(start)
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            raise Unreadable.of(self.name, error) from error
        self._blocks.update(range(first, after))


def _list(fs: Any, folder: str) -> list[dict[str, Any]]:
    try:
        return list(fs.ls(folder, detail=True))
    except FileNotFoundError:
        return []


def read_file(location: str, patience_s: float) -> bytes:
    """A whole file that the user named: a path or a URL.

    Raises:
        OSError: it cannot be read.
        UserError: the URL holds credentials, its server as a whole cannot be used, or a home folder is not known.
    """
    if not is_url(location) or location.startswith("file://"):
        return Path(expanded(location.removeprefix("file://"))).read_bytes()
    refuse_credentials(location)
    folder, _, name = location.rpartition("/")
    files = RemoteFilesystem(folder, patience_s)
    return files.read(unquote(name) if files.connection.is_web else name)


def last_part(url: str) -> str:
    """A name for a URL: the last part of its path, or its host."""
    parts = urlsplit(url)
    return parts.path.rstrip("/").rpartition("/")[2] or parts.netloc
