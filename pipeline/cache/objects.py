"""A cache in an object store: the operations of `Files` over fsspec.

`ObjectFiles` publishes with the store's conditional put (If-None-Match) where `Files` uses a hard link, and reads
shards and tables through a mirror on the local disk. A store shows an object whole or not at all, and S3 compares each
put and part with a checksum that the driver sends. Where none is sent, documents are read back and sizes compared. Some
stores ignore the condition: `probe` tests it. Credentials and addresses are the driver's (s3fs: AWS_*, or fsspec's).

A cache behind a web server (http, https) can be read if the server lists folders as `python -m http.server` does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime
from functools import cached_property, partial
from operator import itemgetter
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar
from uuid import uuid4
from weakref import WeakSet

import pyarrow as pa
import xxhash

from pipeline import retrying
from pipeline.cache import layout
from pipeline.cache import scratch as scratches
from pipeline.cache.drivers import CHANGE_TIMES, Connection, RequestFailed, has_own
from pipeline.cache.files import FileEntry, Files, check_digest
from pipeline.cache.local_files import (
    Handle,
    cache_errors,
    digest_of,
    file_digest,
    free_at,
    is_foreign,
    is_out_of_space,
    raise_if_of_machine,
)
from pipeline.cache.mirror import Mirror
from pipeline.config import MirrorConfig
from pipeline.errors import CacheError, IntegrityError, expanded

PARALLEL_REQUESTS = 16
"""Requests in flight where many small objects are read."""

PIECE = 16 << 20

T = TypeVar("T")


def files_at(root: str | Path, mirror: MirrorConfig | None = None, patience_s: float = retrying.PATIENCE_S) -> Files:
    """The files of a cache at a path or a URL with a scheme that fsspec knows (`file://` is a path)."""
    text = str(root)
    if isinstance(root, Path) or "://" not in text:
        return Files(root, patience_s)
    if text.startswith("file://"):
        return Files(text.removeprefix("file://"), patience_s)
    return ObjectFiles(text, mirror or MirrorConfig(), patience_s)


class _Ranges(Handle):
    """An object that is read by range requests."""

    def __init__(self, files: ObjectFiles, name: str):
        self._files, self._name = files, name

    def read_into(self, view: memoryview, offset: int) -> int:
        data = self._files.read_range(self._name, offset, len(view)) if len(view) else b""
        view[: len(data)] = data
        return len(data)

    def file(self) -> BinaryIO:
        return self._files.open(self._name).file()

    def __del__(self) -> None:
        pass


class ObjectFiles(Files):
    """Objects below a URL.

    Args:
        url: of the cache.
        mirror: the folder for local copies and its size.
        patience_s: how long to wait for a store that does not answer.

    Raises:
        CacheError: see `Connection`.
    """

    reopen_s = 30.0  # reopening may transfer the whole shard, and a damaged shard can have many damaged records

    def __init__(self, url: str, mirror: MirrorConfig, patience_s: float = retrying.PATIENCE_S):
        self.damage = {}
        # Without the driver's cache of listings, which would hide the commits of other machines.
        self.connection = Connection(url, CacheError, patience_s, use_listings_cache=False)
        self.url, self.fs, self._base = self.connection.url, self.connection.fs, self.connection.root
        self.readers = WeakSet()
        self.mirror = Mirror(Path(mirror.path or expanded("~/.cache/sana-pipe")), int(mirror.gib * 2**30))

    @property
    def patience_s(self) -> float:  # type: ignore[override]
        return self.connection.patience_s

    @cached_property
    def room(self) -> int:  # type: ignore[override]
        return self.mirror.room

    def path(self, name: str) -> Path:
        raise TypeError(f"{self.where(name)} is not on a disk")

    @property
    def root(self) -> Path:  # type: ignore[override]
        raise TypeError(f"{self.url} is not on a disk")

    def where(self, name: str) -> str:
        return self.connection.where(name)

    def probe(self) -> None:
        """Put an object twice: the second put must be refused."""
        name, data = f"tmp/probe-{uuid4().hex}", b"sana-pipe\n"
        self._writable(name)
        if not has_own(self.fs, "pipe_file"):
            raise CacheError(
                f"{self.url}: the fsspec driver for this scheme has no conditional put: it looks first and writes "
                "then, so that two writers can both succeed",
                fix="put the cache on a disk, NFS or S3",
            )
        created = self._put(name, data)  # if this fails there is nothing to remove
        try:
            if not created or self._put(name, data + b"again"):
                raise CacheError(
                    f"{self.url}: this object store does not refuse to overwrite (a conditional put, If-None-Match), "
                    "which publication needs",
                    fix="use another store, or encode into a folder and copy it",
                )
            if self.read(name) != data:
                raise IntegrityError(f"{self.where(name)}: reads back other bytes than were written")
        finally:
            self.remove(name)

    # ------------------------------------------------------------ reading

    def has_file(self, name: str) -> bool:
        return self._info(name) is not None

    def read(self, name: str) -> bytes:
        try:
            return self._read(name, self.connection.read)
        except FileNotFoundError:
            raise self._missing(name) from None

    def _below(self, folder: str) -> Iterator[str]:
        return (entry.name.removeprefix(f"{folder}/") for entry in self.walk(folder))  # one listing

    def _missing(self, name: str) -> IntegrityError:
        return IntegrityError(f"{self.where(name)}: is missing", fix=layout.REPAIR)

    def documents(self, names: list[str]) -> Iterator[dict]:
        with ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:
            yield from pool.map(self.document, names)

    def walk(self, folder: str) -> Iterator[FileEntry]:
        root = self._path(folder)
        try:
            with self._errors(folder):
                entries = [
                    (self._name(path), info.get("size"), _modified(info))
                    for path, info in self.connection.find(root)
                    if path != root and info["type"] == "file" and not is_foreign(path.rpartition("/")[2])
                ]
        except FileNotFoundError:
            return
        entries.sort(key=itemgetter(0))
        known = [FileEntry(name, int(size), modified) for name, size, modified in entries if size is not None]
        if len(known) == len(entries):
            yield from known
            return

        def complete(name: str) -> FileEntry | None:  # the listing of a web server has no sizes
            info = self._info(name)
            if info is None:
                return None
            size = self._size(name) if info.get("size") is None else int(info["size"])
            return FileEntry(name, size, _modified(info))

        with ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:
            yield from (entry for entry in pool.map(complete, (name for name, *_ in entries)) if entry is not None)

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        wanted = set(names)
        folders = sorted({"/".join(name.split("/")[:-1][:2]) for name in wanted})
        return {entry.name: entry.size for folder in folders for entry in self.walk(folder) if entry.name in wanted}

    def sized(self, wanted: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T, int | None]]:
        wanted = list(wanted)
        sizes = self.sizes(name for name, _ in wanted)
        return ((name, value, sizes.get(name)) for name, value in wanted)

    def open(self, name: str, *, trust: bool = False) -> Handle:
        return self.mirror.open(name, lambda: self._size(name), lambda path: self._fetch(name, path), trust=trust)

    def mapped(self, name: str, digest: str) -> pa.Buffer:
        with self.temporary() as path, cache_errors(path):
            try:
                self._fetch_aside(name, path)
            except FileNotFoundError:
                raise self._missing(name) from None
            handle, size = Handle(os.open(path, os.O_RDONLY)), path.stat().st_size
        if (actual := digest_of(handle)) != digest:
            raise self._altered(name, digest, actual)
        if size > scratches.LIMIT:
            return handle.map()
        with handle.file() as file:
            return pa.py_buffer(file.read())

    @property
    def scratch(self) -> scratches.Scratch:
        return scratches.Scratch(self.temporary)

    def ranged(self, name: str) -> Handle:
        if self.connection.is_web:
            return self.open(name)
        self._size(name)
        return _Ranges(self, name)

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """Up to `length` bytes of an object from `offset`; fewer at its end.

        Raises:
            CacheError: the server sent more.
        """
        piece = self._read(name, partial(self.fs.cat_file, start=offset, end=offset + length))
        if len(piece) > length:
            raise CacheError(
                f"{self.where(name)}: the server sent another range than was asked for",
                expected=f"{length} bytes from {offset}",
                found=f"{len(piece)} bytes",
            )
        return piece

    def digest(self, name: str) -> str:
        """Hex xxh3-128 of the object in the store. The mirror's copy of a damaged object is dropped, so that a check of
        its records reads the object, too."""
        if self.connection.is_web:  # it may not support ranges
            with self.mirror.temporary() as path:
                self._fetch_aside(name, path)
                digest = file_digest(path)
        else:
            digest = self._digest_by_ranges(name)
        if digest != PurePosixPath(name).stem:
            self.mirror.drop(name)
        return digest

    def _fetch_aside(self, name: str, path: Path) -> None:
        """Fetch an object that the mirror does not keep."""
        self.mirror.fetch(partial(self._fetch, name), path, lambda: self._size(name))

    def _digest_by_ranges(self, name: str) -> str:
        state, size = xxhash.xxh3_128(), self._size(name)
        for start in range(0, size, PIECE):
            length = min(PIECE, size - start)
            piece = self.read_range(name, start, length)
            if len(piece) != length:
                raise CacheError(
                    f"{self.where(name)}: the server sent another range than was asked for",
                    expected=f"{length} bytes from {start}",
                    found=f"{len(piece)} bytes",
                )
            state.update(piece)
        return state.hexdigest()

    # ------------------------------------------------------------ writing

    def temporary(self) -> AbstractContextManager[Path]:
        return self.mirror.temporary()

    def publish(self, temporary: Path, name: str) -> bool:
        try:
            self._write(name, lambda path: self.fs.put_file(str(temporary), path, mode="create"))
        except FileExistsError:
            return False
        size = temporary.stat().st_size
        if not self.connection.sends_checksums and self._size(name) != size:
            raise IntegrityError(f"{self.where(name)}: was not stored whole", expected=f"{size} bytes")
        return True

    def publish_content(self, temporary: Path, name: str, digest: str) -> None:
        check_digest(temporary, digest)
        if not self.publish(temporary, name):  # overwriting freshens the object, and restores a damaged object
            self.replace_by(temporary, name)

    def replace(self, name: str, data: bytes) -> None:
        self._write(name, lambda path: self.fs.pipe_file(path, data))

    def replace_by(self, temporary: Path, name: str) -> None:
        self._write(name, lambda path: self.fs.put_file(str(temporary), path))

    def _move(self, name: str, to: str) -> None:
        self.replace(to, self.read(name))
        self._remove(name)

    def _remove(self, name: str) -> None:
        self._writable(name)
        with suppress(FileNotFoundError):
            self._request(name, self.fs.rm_file, "removed")

    def now(self) -> float:
        name = f"tmp/clock-{uuid4().hex}"
        self._put(name, b"")
        info = self._info(name)
        self.remove(name)
        if info is None:
            raise CacheError(f"{self.where(name)}: was written and cannot be found")
        return _modified(info)

    def freshen(self, name: str) -> bool:
        """The store copies the object onto itself."""
        # S3 refuses such a copy unless it replaces the metadata.
        s3 = {"MetadataDirective": "REPLACE"} if "s3" in self.fs.protocol else {}
        self._writable(name)
        try:
            self._request(name, lambda path: self.fs.cp_file(path, path, **s3), "written")
        except FileNotFoundError:
            return False
        return True

    def _discard(self, name: str, before: float) -> bool:
        # Stores cannot remove on condition of age: another process may freshen the object between these two requests.
        info = self._info(name)
        if info is None or _modified(info) > before:
            return False
        self._remove(name)
        return True

    def put_back(self) -> None:
        """Nothing to do: `_discard` moves nothing."""

    def sweep(self) -> int:
        """Remove unfinished files of the local mirror. Unfinished uploads are invisible; a lifecycle rule of the bucket
        (abort incomplete multipart uploads) frees their space."""
        return self.mirror.sweep()

    @property
    def reports(self) -> Path:
        return self.mirror.root / "reports"

    def free_bytes(self) -> int | None:
        return None

    def scratch_bytes(self) -> int:
        return free_at(self.mirror.root)

    # ------------------------------------------------------------ requests

    def _path(self, name: str) -> str:
        return f"{self._base}/{name}" if name else self._base

    def _name(self, path: str) -> str:
        return path[len(self._base) + 1 :]

    def _list(self, folder: str) -> list[tuple[str, str]]:
        try:
            entries = self._read(folder, lambda path: self.fs.ls(path, detail=True))
        except FileNotFoundError:
            return []
        base = self._path(folder)
        # The listings of some web servers have links for sorting them.
        entries = [info for info in entries if not (self.connection.is_web and "?" in str(info["name"]))]
        pairs = [(str(info["name"]).rstrip("/"), str(info["type"])) for info in entries]
        named = ((path.rpartition("/")[2], kind) for path, kind in pairs if path != base)
        return [(name, kind) for name, kind in named if not is_foreign(name)]

    def _info(self, name: str) -> dict[str, Any] | None:
        try:
            return self._read(name, self.connection.info)
        except FileNotFoundError:
            return None

    def _size(self, name: str) -> int:
        size = self._read(name, self.connection.info).get("size")
        if size is None:
            raise CacheError(f"{self.where(name)}: the server does not say how large it is")
        return int(size)

    def _fetch(self, name: str, path: Path) -> None:
        self._read(name, lambda remote: self.fs.get_file(remote, str(path)))

    def _put(self, name: str, data: bytes) -> bool:
        attempts = 0

        def create(path: str) -> None:
            nonlocal attempts
            attempts += 1
            self.fs.pipe_file(path, data, mode="create")

        try:
            self._write(name, create)
        except FileExistsError:
            # An earlier attempt of ours may have succeeded although its answer was lost.
            return attempts > 1 and self.read(name) == data
        if not self.connection.sends_checksums:
            with suppress(FileNotFoundError):  # a claim that was removed meanwhile
                if self._read(name, self.connection.read) != data:
                    raise IntegrityError(f"{self.where(name)}: reads back other bytes than were written")
        return True

    def _read(self, name: str, ask: Callable[[str], T]) -> T:
        return self._request(name, ask)

    def _writable(self, name: str) -> None:
        if self.connection.is_web:
            raise CacheError(
                f"{self.where(name)}: a cache behind a web server can only be read",
                fix="encode and bucket into a folder or an object store; train, verify and status read it from here",
            )

    def _write(self, name: str, ask: Callable[[str], T]) -> T:
        self._writable(name)
        try:
            return self._request(name, ask, "written")
        except FileNotFoundError as error:
            raise CacheError(f"{self.where(name)}: cannot be written: {error}", fix="make the bucket") from None

    def _request(self, name: str, ask: Callable[[str], T], action: str = "read") -> T:
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
    """When an object was written, in seconds since 1970."""
    when = next((info[key] for key in CHANGE_TIMES if info.get(key)), None)
    if when is None:
        return time.time()  # unknown: never old
    if isinstance(when, str):
        when = datetime.fromisoformat(when)
    return when.timestamp() if isinstance(when, datetime) else float(when)
