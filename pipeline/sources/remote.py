"""Files that are not on this disk: object stores, web servers and the hub, through fsspec.

What: `RemoteFilesystem` answers what `LocalFilesystem` answers. Ranges are asked for as ranges; a file that will be read all over at once
(a tar that is being scanned) is kept for that time in a temporary file, piece by piece, so that it is transferred once.
Why the length of every answer is checked: a web server without ranges sends the whole file and says nothing. It is
found out at the first answer; from then on its files are fetched whole, once, into the temporary file.
Price: temporary files of up to `SPOOL_BYTES` together (never more than half of what is free there); a server without
ranges costs one whole transfer of a file whenever it has been dropped from there.

Whatever a driver raises becomes `Unreadable` with its message, after a few tries unless trying again is no use.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import quote, unquote, urlsplit

import xxhash

from pipeline import retrying
from pipeline.cache import drivers
from pipeline.errors import AwayError, UserError
from pipeline.sources.filenames import error_text, escaped, unsafe_reason
from pipeline.sources.filesystem import Filesystem, RangeFile, Unreadable, check_length
from pipeline.urls import strip_credentials

BLOCK = 4 << 20
SPOOL_BYTES = 8 << 30
SPOOLED_FILES = 4
TOGETHER = 16

_VERSIONS = (
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
    "LastModified",
    "last_modified",
    "Last-Modified",
    "mtime",
    "modified",
    "updated",
    "created",
)

T = TypeVar("T")


class RemoteFilesystem(Filesystem):
    """Files below a URL.

    Args:
        url: of the root, with a scheme that fsspec knows.
        patience_s: how long it is waited for if it does not answer.

    Raises:
        UserError: see `drivers.open_url`.
    """

    def __init__(self, url: str, patience_s: float = retrying.PATIENCE_S):
        self.fs, self._root = drivers.open_url(url, UserError, patience_s)
        self.location, self._patience_s = url.rstrip("/"), patience_s
        self._store = "/".join(url.split("/")[:3])
        self.ranged = True
        self._web = url.partition("://")[0].lower() in ("http", "https")
        self._known: dict[str, dict[str, Any]] = {}
        self._spools: OrderedDict[str, _Spool] = OrderedDict()
        self._lock = threading.Lock()
        self._proven = False  # a server has sent a range
        self._first = threading.Lock()

    @property
    def is_remote(self) -> bool:
        return self.ranged

    # ------------------------------------------------------------ names

    def path(self, name: str) -> str:
        """What the driver calls the file."""
        problem = unsafe_reason(name)
        if problem:
            raise Unreadable(f"{escaped(name)}: {problem}")
        return f"{self._root}/{quote(name) if self._web else name}"

    def _name(self, path: str) -> str | None:
        """The name relative to the root; None for what is not below it."""
        if self._web:
            path = path.partition("?")[0].partition("#")[0]
        if not path.startswith(self._root + "/"):
            return None
        name = path[len(self._root) + 1 :]
        return unquote(name) if self._web else name

    def find(self) -> list[str]:
        try:
            found = drivers.find(
                self.fs,
                self._root,
                lambda path, ask: self._tried(self._name(path) or "it", lambda: ask(path), "listed"),
            )
        except Unreadable as error:
            raise UserError(
                f"{self.location}: cannot be listed: {error}", fix="check the address and who may read it"
            ) from None
        names = []
        for path, info in found.items():
            name = self._name(path)
            if not name or name.endswith("/") or any(part.startswith(".") and part != ".." for part in name.split("/")):
                continue
            names.append(name)
            self._known[name] = info
        return sorted(names)

    def names(self, folder: str) -> list[str]:
        base = self.path(folder) if folder else self._root
        try:
            found = self._tried(folder or "it", lambda: _listed(self.fs, base), "listed")
        except Unreadable as error:
            if self._web and retrying.status_of(error) in (
                401,
                403,
                405,
                501,
            ):  # many web servers list nothing; who asks can do without
                return []
            raise UserError(
                f"{self.location}/{folder}: cannot be listed: {error}", fix="check who may list the bucket"
            ) from None
        names = []
        for info in found:
            name = self._name(str(info["name"]))
            if name and info.get("type") == "file":
                names.append(name)
                if info.get("size") is not None:
                    self._known[name] = info
        return sorted(names)

    def refresh(self) -> None:
        self.fs.invalidate_cache()
        with self._lock:
            self._known = {}
            self._spools = OrderedDict()

    def stat(self, name: str) -> tuple[int, int]:
        info = self._info(name)
        version = next((info[key] for key in _VERSIONS if info.get(key)), None)
        if version is None:  # nothing tells whether it has changed: never the same
            return int(info["size"]), time.time_ns()
        return int(info["size"]), xxhash.xxh3_64_intdigest(str(version).encode()) >> 1

    def _info(self, name: str) -> dict[str, Any]:
        info = self._known.get(name)
        if info is None or info.get("size") is None or (self._web and "url" not in info):
            path = self.path(name)
            info = self._tried(name, lambda: self.fs.info(path))
            if info.get("type") == "directory":
                raise Unreadable(f"{escaped(name)}: is a folder")
            if info.get("size") is None:
                raise Unreadable(f"{escaped(name)}: the server does not say how large it is")
            self._known[name] = info
        return info

    # ------------------------------------------------------------ bytes

    def read(self, name: str, limit: int | None = None) -> bytes:
        path = self.path(name)
        size = self._info(name)["size"]
        if limit is not None and size > limit:
            return self.read_range(name, 0, limit + 1)
        data = self._tried(name, lambda: self.fs.cat_file(path))
        return check_length(name, data, 0, size)

    def read_many(self, names: list[str], limit: int) -> list[bytes | Unreadable]:
        with ThreadPoolExecutor(TOGETHER) as pool:
            return list(pool.map(lambda name: self._read_one(name, limit), names))

    def stat_many(self, names: Iterable[str]) -> dict[str, tuple[int, int] | Unreadable]:
        asked = list(names)
        if all(self._known.get(name, {}).get("size") is not None for name in asked):  # a listing has said it
            return super().stat_many(asked)
        with ThreadPoolExecutor(TOGETHER) as pool:
            return dict(zip(asked, pool.map(self._stat_one, asked), strict=True))

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        if length == 0:
            return b""
        with self._lock:
            spool = self._spools.get(name)
        if spool is None and self.ranged:
            data = self._fetch(name, offset, length)
            if data is not None:
                return check_length(name, data, offset, length)
        if spool is None:
            spool = self._spool(name)
        return check_length(name, spool.read(offset, length), offset, length)

    def open(self, name: str, spool: bool = False) -> BinaryIO:
        if spool:
            self._spool(name)
        return cast("BinaryIO", RangeFile(self, name))

    def _fetch(self, name: str, offset: int, length: int) -> bytes | None:
        """A range; None if this server sent more than that (and so the whole file)."""
        path = self.path(name)
        with nullcontext() if self._proven else self._first:  # many who find it out at once would get many files
            if not self.ranged:
                return None
            data = self._tried(name, lambda: self.fs.cat_file(path, start=offset, end=offset + length))
            if len(data) > length:
                self.ranged = False
                return None
            self._proven = True
        return data

    def _spool(self, name: str) -> _Spool:
        """The temporary copy of a file; the oldest are dropped."""
        size = self._info(name)["size"]
        with self._lock:
            spool = self._spools.get(name)
            if spool is not None:
                self._spools.move_to_end(name)
                return spool
            room = min(SPOOL_BYTES, shutil.disk_usage(tempfile.gettempdir()).free // 2)
            while self._spools and (
                len(self._spools) >= SPOOLED_FILES or size + sum(s.size for s in self._spools.values()) > room
            ):
                self._spools.popitem(last=False)
            if size > room:
                if not self.ranged:
                    raise Unreadable(
                        f"{escaped(name)}: the server sends no ranges, and there is no room for a copy of {size:,} bytes "
                        f"in {tempfile.gettempdir()}"
                    )
                return _Spool(self, name, size, keep=False)
            self._spools[name] = spool = _Spool(self, name, size, keep=True)
            return spool

    def _tried(self, name: str, ask: Callable[[], T], what: str = "read") -> T:
        """What the driver returns, asked again if need be.

        Raises:
            Unreadable: this file cannot be had.
            UserError: nothing can be had from this store.
        """
        try:
            return retrying.tried(ask, self._store, self._patience_s)
        except retrying.NoAnswer as error:
            if error.alone:
                raise Unreadable(f"{escaped(name)}: {escaped(str(error))}") from None
            raise AwayError(f"{self.location}: {escaped(name)} cannot be {what}: {error}", fix=error.fix) from None
        except retrying.Refused as error:
            raise UserError(f"{self.location}: cannot be {what}: {error}", fix=error.fix) from None
        except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
            kind = {
                FileNotFoundError: "does not exist",
                PermissionError: f"may not be read: {escaped(error_text(error))}",
            }
            raise Unreadable(f"{escaped(name)}: {kind.get(type(error), error_text(error))}") from error
        except Exception as error:  # every driver has its own
            answer = strip_credentials(escaped(error_text(error)))
            raise Unreadable(f"{escaped(name)}: {type(error).__name__}: {answer}") from error


class _Spool:
    """A file's pieces in a temporary file, fetched when they are first asked for."""

    def __init__(self, remote: RemoteFilesystem, name: str, size: int, keep: bool):
        self.remote, self.name, self.size, self.keep = remote, name, size, keep
        self._file = tempfile.TemporaryFile() if keep else None  # noqa: SIM115 - closed with the spool
        self._have: set[int] = set()
        self._lock = threading.Lock()

    def read(self, offset: int, length: int) -> bytes:
        length = max(0, min(length, self.size - offset))
        if self._file is None:
            return self.remote._fetch(self.name, offset, length) or b""
        with self._lock:
            missing = [b for b in range(offset // BLOCK, -(-(offset + length) // BLOCK)) if b not in self._have]
            if missing:
                self._fill(missing[0], missing[-1] + 1)
        return os.pread(self._file.fileno(), length, offset)

    def _fill(self, first: int, after: int) -> None:
        assert self._file is not None
        start, end = first * BLOCK, min(after * BLOCK, self.size)
        data = self.remote._fetch(self.name, start, end - start) if self.remote.ranged else None
        if data is None:
            start, after, first, end = 0, -(-self.size // BLOCK), 0, self.size
            data = self.remote.read(self.name)
        check_length(self.name, data, start, end - start)
        self._file.seek(start)
        self._file.write(data)
        self._file.flush()
        self._have.update(range(first, after))


def _listed(fs: Any, folder: str) -> list[dict[str, Any]]:
    try:
        return list(fs.ls(folder, detail=True))
    except FileNotFoundError:
        return []


def last_part(url: str) -> str:
    """What a URL would be called: the last part of its path, or its host."""
    parts = urlsplit(url)
    return parts.path.rstrip("/").rpartition("/")[2] or parts.netloc
