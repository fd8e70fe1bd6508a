"""A cache in an object store, over fsspec, and a mirror of it on the local disk.

`create` is the store's conditional put (If-None-Match). Some stores ignore the condition: `probe` tests it. A store
shows an object whole or not at all, and S3 compares each put and part with a checksum that the driver sends; where none
is sent, documents are read back and sizes compared. Credentials and addresses are the driver's (s3fs: AWS_*).

A cache behind a web server (http, https) can be read if the server lists folders as `python -m http.server` does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from sana_pipe.base.disk import Handle, is_foreign, is_out_of_space, raise_if_of_machine
from sana_pipe.base.errors import CacheError, IntegrityError, expanded
from sana_pipe.data.cache.config import MirrorConfig
from sana_pipe.data.cache.connections import CHANGE_TIMES, Connection, RequestFailed, has_own
from sana_pipe.data.cache.mirror import Mirror
from sana_pipe.data.cache.store import FileEntry

PARALLEL_REQUESTS = 16
"""Requests in flight where many small objects are read."""

PIECE = 16 << 20
"""Bytes of a range where a whole object is read by ranges."""

T = TypeVar("T")


class _Ranges(Handle):
    """An object of `size` bytes that is read by range requests."""

    def __init__(self, store: ObjectStore, name: str, size: int):
        self._store, self._name, self._size = store, name, size
        self.piece = PIECE

    def read_into(self, view: memoryview, offset: int) -> int:
        length = max(0, min(len(view), self._size - offset))
        if length:
            view[:length] = self._store.read_range(self._name, offset, length)
        return length

    def __del__(self) -> None:
        pass


class ObjectStore:
    """A `Store` of objects below a URL.

    Args:
        url: of the cache.
        mirror: the folder for local copies and its size.
        patience_s: seconds to wait for a store that does not answer.

    Raises:
        CacheError: see `Connection`.
    """

    def __init__(self, url: str, mirror: MirrorConfig, patience_s: float):
        # Without the driver's cache of listings, which would hide the commits of other machines.
        self.connection = Connection(url, CacheError, patience_s, use_listings_cache=False)
        self.url, self.fs, self._base = self.connection.url, self.connection.fs, self.connection.root
        self.mirror = Mirror(Path(mirror.path or expanded("~/.cache/sana-pipe")), int(mirror.gib * 2**30), self)
        self.local = self.mirror.root

    @property
    def has_ranges(self) -> bool:
        return not self.connection.is_web  # a web server may not support them

    def where(self, name: str) -> str:
        return self.connection.where(name)

    def probe(self) -> None:
        """Put an object twice: the second put must be refused.

        Raises:
            CacheError: publication is not safe here, or nothing can be written.
        """
        name, data = f"tmp/probe-{uuid4().hex}", b"sana-pipe\n"
        self._refuse_web(name)
        if not has_own(self.fs, "pipe_file"):
            raise CacheError(
                f"{self.url}: the fsspec driver for this scheme has no conditional put: it looks first and then "
                "writes, so that two writers can both succeed",
                fix="put the cache on a disk, NFS or S3",
            )
        created = self.create(name, data)  # if this fails there is nothing to remove
        try:
            if not created or self.create(name, data + b"again"):
                raise CacheError(
                    f"{self.url}: this object store does not refuse to overwrite (a conditional put, If-None-Match), "
                    "which publication needs",
                    fix="use another store, or encode into a folder and copy it",
                )
            self._check_stored(name, data)
        finally:
            self.remove(name)

    # ------------------------------------------------------------ writing

    def create(self, name: str, data: bytes | Path) -> bool:
        attempts = 0

        def put(path: str) -> None:
            nonlocal attempts
            attempts += 1
            self._send(path, data, mode="create")

        try:
            self._write(name, put)
        except FileExistsError:
            # An earlier attempt of ours may have succeeded although its answer was lost.
            return attempts > 1 and isinstance(data, bytes) and self.read(name) == data
        if not self.connection.sends_checksums:
            with suppress(FileNotFoundError):  # a claim that was removed meanwhile
                self._check_stored(name, data)
        return True

    def _check_stored(self, name: str, data: bytes | Path) -> None:
        if isinstance(data, bytes):
            if self.read(name) != data:
                raise IntegrityError(f"{self.where(name)}: the bytes read back are not those that were written")
            return
        entry, size = self.stat(name), data.stat().st_size
        if entry is None or entry.size != size:
            raise IntegrityError(f"{self.where(name)}: was not stored whole", expected=f"{size} bytes")

    def replace(self, name: str, data: bytes | Path) -> None:
        self._write(name, lambda path: self._send(path, data))

    def _send(self, path: str, data: bytes | Path, **mode: str) -> None:
        if isinstance(data, bytes):
            self.fs.pipe_file(path, data, **mode)
        else:
            self.fs.put_file(str(data), path, **mode)

    def move(self, name: str, to: str) -> None:
        self.replace(to, self.read(name))
        self.remove(name)

    def refresh(self, name: str) -> bool:
        # The store copies the object onto itself. S3 refuses that unless the copy replaces the metadata.
        s3 = {"MetadataDirective": "REPLACE"} if "s3" in self.fs.protocol else {}
        self._refuse_web(name)
        try:
            self._ask(name, lambda path: self.fs.cp_file(path, path, **s3), "written")
        except FileNotFoundError:
            return False
        return True

    def remove(self, name: str, before: float | None = None) -> bool:
        self._refuse_web(name)
        if before is not None:
            # Stores cannot remove on condition of age: another process may refresh the object between two requests.
            entry = self.stat(name)
            if entry is None or entry.modified > before:
                return False
        with suppress(FileNotFoundError):
            self._ask(name, self.fs.rm_file, "removed")
        return True

    # ------------------------------------------------------------ reading

    def read(self, name: str) -> bytes:
        return self._ask(name, self.connection.read)

    def open(self, name: str) -> Handle:
        entry = self.stat(name)
        if entry is None:
            raise FileNotFoundError(self.where(name))
        return _Ranges(self, name, entry.size)

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """`length` bytes of an object from `offset`.

        Raises:
            CacheError: the server sent more or fewer.
        """
        piece: bytes = self._ask(name, lambda path: self.fs.cat_file(path, start=offset, end=offset + length))
        if len(piece) != length:
            raise CacheError(
                f"{self.where(name)}: the server sent a different range from the one that was asked for",
                expected=f"{length} bytes from {offset}",
                found=f"{len(piece)} bytes",
            )
        return piece

    def fetch(self, name: str, path: Path) -> None:
        self._ask(name, lambda remote: self.fs.get_file(remote, str(path)))

    def list(self, folder: str) -> list[tuple[str, bool]]:
        try:
            entries = self._ask(folder, lambda path: self.fs.ls(path, detail=True))
        except FileNotFoundError:
            return []
        base = self._path(folder)
        # The listings of some web servers have links for sorting them.
        entries = [info for info in entries if not (self.connection.is_web and "?" in str(info["name"]))]
        pairs = [(str(info["name"]).rstrip("/"), info["type"] == "directory") for info in entries]
        named = ((path.rpartition("/")[2], is_folder) for path, is_folder in pairs if path != base)
        return [(name, is_folder) for name, is_folder in named if not is_foreign(name)]

    def names_below(self, folder: str) -> Iterator[str]:
        yield from sorted(self._below(folder))

    def _below(self, folder: str) -> dict[str, dict[str, Any]]:
        """Return what the listing says of each file below a folder."""
        root = self._path(folder)
        try:
            with self._errors(folder):
                return {
                    path[len(self._base) + 1 :]: info
                    for path, info in self.connection.find(root)
                    if path != root and info["type"] == "file" and not is_foreign(path.rpartition("/")[2])
                }
        except FileNotFoundError:
            return {}

    def walk(self, folder: str) -> Iterator[FileEntry]:
        infos = self._below(folder)
        if all(info.get("size") is not None for info in infos.values()):
            yield from (self._entry(name, infos[name]) for name in sorted(infos))
            return
        with ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:  # the listing of a web server has no sizes
            yield from (entry for entry in pool.map(self.stat, sorted(infos)) if entry is not None)

    def stat(self, name: str) -> FileEntry | None:
        try:
            return self._entry(name, self._ask(name, self.connection.info))
        except FileNotFoundError:
            return None

    def _entry(self, name: str, info: dict[str, Any]) -> FileEntry:
        if info.get("size") is None:
            raise CacheError(f"{self.where(name)}: the server does not say how large it is")
        return FileEntry(name, int(info["size"]), _modified(info))

    # ------------------------------------------------------------ requests

    def _path(self, name: str) -> str:
        return f"{self._base}/{name}" if name else self._base

    def _refuse_web(self, name: str) -> None:
        if self.connection.is_web:
            raise CacheError(
                f"{self.where(name)}: a cache behind a web server can only be read",
                fix="encode and bucket into a folder or an object store; train, verify and status read it from here",
            )

    def _write(self, name: str, ask: Callable[[str], None]) -> None:
        self._refuse_web(name)
        try:
            self._ask(name, ask, "written")
        except FileNotFoundError as error:
            raise CacheError(f"{self.where(name)}: cannot be written: {error}", fix="make the bucket") from None

    def _ask(self, name: str, ask: Callable[[str], T], action: str = "read") -> T:
        """The answer of `ask` for the driver's path of a file; repeated while the store does not answer.

        Raises:
            FileNotFoundError, FileExistsError: as the driver.
            AwayError: the store did not answer for `patience_s`.
            OSError: this machine has no disk space or file descriptors left.
            CacheError: any other failure.
        """
        with self._errors(name):
            return self.connection.request(name, lambda: ask(self._path(name)), action)

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except RequestFailed as error:
            raise CacheError(f"{self.where(name)}: {error}", fix=error.fix) from None
        except OSError as error:
            if not is_out_of_space(error):  # the mirror makes space
                raise_if_of_machine(error, self.where(name))
            raise


def _modified(info: dict[str, Any]) -> float:
    """Return when an object was written, in seconds since 1970."""
    when = next((info[key] for key in CHANGE_TIMES if info.get(key)), None)
    if when is None:
        return time.time()  # unknown: never old
    if isinstance(when, str):
        when = datetime.fromisoformat(when)
    return when.timestamp() if isinstance(when, datetime) else float(when)
