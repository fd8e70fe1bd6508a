"""A cache in an object store: the operations of `Files` over fsspec.

What: `ObjectFiles` publishes with the store's conditional put ("if nothing of that name is there") where `Files` uses
a hard link, and reads shards and tables through a mirror on the machine's own disk. `files_at` opens either.
Why: a store makes an object visible whole or not at all, so a put that is refused when the name is taken is all that
publication needs; whether a store really refuses is tried out before anything is encoded (some ignore the condition).
Files are never opened for writing there: leaving such a block by an exception commits what was written so far.
Price: listing, asking and putting are requests, some ten milliseconds each; a shard is written to this disk first and
then sent (each part with a checksum that the store verifies), a document is read back. Credentials and addresses are
those of the driver (s3fs: AWS_*, or fsspec's own configuration).

A cache behind a web server (http, https) can be read, if the server lists folders as `python -m http.server` does:
shards come whole, so it need not know ranges. Nothing can be published there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar
from uuid import uuid4
from weakref import WeakSet

import xxhash
from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem

from pipeline import retrying
from pipeline.cache import drivers, layout
from pipeline.cache.files import Entry, Files, Handle, file_digest, free_at, is_scarce
from pipeline.cache.mirror import Mirror
from pipeline.config import MirrorConfig
from pipeline.errors import AwayError, CacheError, IntegrityError

TOGETHER = 16
"""Requests side by side, where many small objects are read."""

_PIECE = 16 << 20

T = TypeVar("T")


def files_at(root: str | Path, mirror: MirrorConfig | None = None, patience_s: float = retrying.PATIENCE_S) -> Files:
    """The files of a cache: a folder, or a URL with a scheme that fsspec knows (`file://` is a folder)."""
    text = str(root)
    if isinstance(root, Path) or "://" not in text:
        return Files(root, patience_s)
    if text.startswith("file://"):
        return Files(text.removeprefix("file://"), patience_s)
    return ObjectFiles(text, mirror or MirrorConfig(), patience_s)


class _Ranges(Handle):
    """An object, read by ranges."""

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
        mirror: where copies are kept on this machine.
        patience_s: how long the store is waited for if it does not answer.

    Raises:
        CacheError: see `drivers.open_url`.
    """

    reopen_s = 30.0  # it may be a whole transfer, and a damaged shard can have many damaged records

    def __init__(self, url: str, mirror: MirrorConfig, patience_s: float = retrying.PATIENCE_S):
        self.patience_s = patience_s
        self.url = url.rstrip("/")
        self.damage = {}
        # Without listings that are kept: another machine's commits would not be seen.
        self.fs, self._base = drivers.open_url(self.url, CacheError, patience_s, use_listings_cache=False)
        self.store = "/".join(self.url.split("/")[:3])
        self._web = url.partition("://")[0].lower() in ("http", "https")
        self.readers = WeakSet()
        folder = Path(mirror.path).expanduser() if mirror.path else Path.home() / ".cache" / "sana-pipe"
        self.mirror = Mirror(folder, int(mirror.gib * 2**30))

    @cached_property
    def room(self) -> int:  # type: ignore[override]
        return self.mirror.room

    def path(self, name: str) -> Path:
        raise TypeError(f"{self.where(name)} is not on a disk")

    @property
    def root(self) -> Path:  # type: ignore[override]
        raise TypeError(f"{self.url} is not on a disk")

    def where(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def probe(self) -> None:
        """Put an object twice: the second put has to be refused."""
        name, data = f"tmp/probe-{uuid4().hex}", b"sana-pipe\n"
        self._writable(name)
        try:
            if not self._conditional():
                raise CacheError(
                    f"{self.url}: the fsspec driver for this scheme looks first and writes then, so that two writers "
                    "may both believe to have been first",
                    fix="put the cache on a disk, NFS or S3",
                )
            if not self._create(name, data) or self._create(name, data + b"again"):
                raise CacheError(
                    f"{self.url}: this object store does not refuse to overwrite (a conditional put, If-None-Match), "
                    "which publication needs",
                    fix="use another store, or encode into a folder and copy it",
                )
            if self.read(name) != data:
                raise IntegrityError(f"{self.where(name)}: reads back other bytes than were written")
        finally:
            self.remove(name)

    def _conditional(self) -> bool:
        """Whether the driver has a conditional put of its own; fsspec's general one is none."""
        own = type(self.fs)
        if issubclass(own, AsyncFileSystem):
            return own._pipe_file is not AsyncFileSystem._pipe_file
        return own.pipe_file is not AbstractFileSystem.pipe_file

    # ------------------------------------------------------------ reading

    def holds(self, name: str) -> bool:
        return self._info(name) is not None

    def read(self, name: str) -> bytes:
        try:
            return self._read(name, lambda path: self.fs.cat_file(path))
        except FileNotFoundError:
            raise IntegrityError(f"{self.where(name)}: is missing", fix=layout.REPAIR) from None

    def documents(self, names: list[str]) -> Iterator[dict]:
        with ThreadPoolExecutor(TOGETHER) as pool:
            yield from pool.map(self.document, names)

    def walk(self, folder: str) -> Iterator[Entry]:
        try:
            found = drivers.find(self.fs, self._path(folder), lambda path, ask: self._read(self._name(path), ask))
        except FileNotFoundError:
            return
        files = [(p, info) for p, info in sorted(found.items()) if p != self._path(folder) and info["type"] == "file"]
        with ThreadPoolExecutor(TOGETHER) as pool:  # a web server's lists say no sizes
            asked = pool.map(
                lambda own: own[1] if own[1].get("size") is not None else self._info(self._name(own[0])), files
            )
            for (path, _), info in zip(files, asked, strict=True):
                if info is not None:
                    size = self._size(self._name(path)) if info.get("size") is None else int(info["size"])
                    yield Entry(self._name(path), size, _moment(info))

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        wanted = list(names)
        found: dict[str, int] = {}
        for folder in sorted({"/".join(name.split("/")[:-1][:2]) for name in wanted}):
            found.update((entry.name, entry.size) for entry in self.walk(folder))
        return {name: found[name] for name in wanted if name in found}

    def open(self, name: str) -> Handle:
        return self.mirror.open(name, lambda: self._size(name), lambda path: self._fetch(name, path))

    def ranged(self, name: str) -> Handle:
        if self._web:
            return self.open(name)
        self._size(name)
        return _Ranges(self, name)

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """Bytes of an object; fewer where it ends.

        Raises:
            CacheError: the server sent more than was asked for.
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
        """Of the object itself; a copy here of one that is damaged is dropped, so that its records are judged too."""
        if self._web:  # it may not know ranges
            with self.mirror.temporary() as path:
                self._fetch(name, path)
                found = file_digest(path)
            if found != PurePosixPath(name).stem:
                self.mirror.drop(name)
            return found
        state, size = xxhash.xxh3_128(), self._size(name)
        for start in range(0, size, _PIECE):
            end = min(start + _PIECE, size)
            piece = self._read(name, partial(self.fs.cat_file, start=start, end=end))
            if len(piece) != end - start:
                raise CacheError(
                    f"{self.where(name)}: the server sent another range than was asked for",
                    expected=f"{end - start} bytes from {start}",
                    found=f"{len(piece)} bytes",
                )
            state.update(piece)
        if state.hexdigest() != PurePosixPath(name).stem:
            self.mirror.drop(name)
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
        if self._size(name) != size:
            raise IntegrityError(f"{self.where(name)}: was not stored whole", expected=f"{size} bytes")
        return True

    def _put(self, name: str, data: bytes) -> bool:
        if not self._create(name, data):
            return False
        if self.read(name) != data:
            raise IntegrityError(f"{self.where(name)}: reads back other bytes than were written")
        return True

    def publish_content(self, temporary: Path, name: str, digest: str) -> None:
        found = file_digest(temporary)
        if found != digest:
            raise IntegrityError(
                f"{temporary}: reads back other bytes than were written",
                expected=digest,
                found=found,
                fix="check the disk",
            )
        if not self.publish(temporary, name):  # over it: as young as a new one, and right
            self._write(name, lambda path: self.fs.put_file(str(temporary), path))

    def replace(self, name: str, data: bytes) -> None:
        self._write(name, lambda path: self.fs.pipe_file(path, data))

    def _move(self, name: str, to: str) -> None:
        self.replace(to, self.read(name))
        self._remove(name)

    def _remove(self, name: str) -> None:
        self._writable(name)
        with suppress(FileNotFoundError):
            self._asked(name, self.fs.rm_file, "removed")

    def now(self) -> float:
        name = f"tmp/clock-{uuid4().hex}"
        self._create(name, b"")
        info = self._info(name)
        self.remove(name)
        if info is None:
            raise CacheError(f"{self.where(name)}: was written and is not there")
        return _moment(info)

    def freshen(self, name: str) -> bool:
        """By a copy onto itself, which the store makes."""
        # S3 refuses a copy that changes nothing.
        s3 = {"MetadataDirective": "REPLACE"} if "s3" in self.fs.protocol else {}
        self._writable(name)
        try:
            self._asked(name, lambda path: self.fs.cp_file(path, path, **s3), "written")
        except FileNotFoundError:
            return False
        return True

    def _discard(self, name: str, before: float) -> bool:
        """Between the look and the removal there is one request: stores have no removal on condition of age."""
        info = self._info(name)
        if info is None or _moment(info) > before:
            return False
        self._remove(name)
        return True

    def sweep(self) -> int:
        """Remove this machine's unfinished copies. Unfinished uploads are invisible; a lifecycle rule of the bucket
        (abort incomplete multipart uploads) frees their room."""
        return self.mirror.sweep()

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
            found = self._read(folder, lambda path: self.fs.ls(path, detail=True))
        except FileNotFoundError:
            return []
        base = self._path(folder)
        # Some web servers' lists hold links that sort them.
        found = [info for info in found if not (self._web and "?" in str(info["name"]))]
        pairs = [(str(info["name"]).rstrip("/"), str(info["type"])) for info in found]
        return [(path.rpartition("/")[2], kind) for path, kind in pairs if path != base]

    def _info(self, name: str) -> dict[str, Any] | None:
        try:
            return self._read(name, self.fs.info)
        except FileNotFoundError:
            return None

    def _size(self, name: str) -> int:
        size = self._read(name, self.fs.info).get("size")
        if size is None:
            raise CacheError(f"{self.where(name)}: the server does not say how large it is")
        return int(size)

    def _fetch(self, name: str, path: Path) -> None:
        self._read(name, lambda remote: self.fs.get_file(remote, str(path)))

    def _create(self, name: str, data: bytes) -> bool:
        attempts = 0

        def create(path: str) -> None:
            nonlocal attempts
            attempts += 1
            self.fs.pipe_file(path, data, mode="create")

        try:
            self._write(name, create)
        except FileExistsError:
            # An attempt whose answer was lost may have been the first of all.
            return attempts > 1 and self.read(name) == data
        return True

    def _read(self, name: str, ask: Callable[[str], T]) -> T:
        return self._asked(name, ask, "read")

    def _writable(self, name: str) -> None:
        if self._web:
            raise CacheError(
                f"{self.where(name)}: a cache behind a web server can only be read",
                fix="encode and bucket into a folder or an object store; train, verify and status read it from here",
            )

    def _write(self, name: str, ask: Callable[[str], T]) -> T:
        self._writable(name)
        try:
            return self._asked(name, ask, "written")
        except FileNotFoundError as error:
            raise CacheError(f"{self.where(name)}: cannot be written: {error}", fix="make the bucket") from None

    def _asked(self, name: str, ask: Callable[[str], T], what: str) -> T:
        """Ask the store, again if need be.

        Raises:
            FileNotFoundError, FileExistsError: as the driver.
            AwayError: the store was away for too long.
            OSError: this machine has no space or no descriptors left.
            CacheError: anything else that it says.
        """
        try:
            return retrying.tried(lambda: ask(self._path(name)), self.store, self.patience_s)
        except (FileNotFoundError, FileExistsError):
            raise
        except retrying.NoAnswer as error:
            raise AwayError(f"{self.where(name)}: cannot be {what}: {error}", fix=error.fix) from None
        except retrying.Refused as error:
            raise CacheError(f"{self.where(name)}: cannot be {what}: {error}", fix=error.fix) from None
        except PermissionError as error:
            raise CacheError(
                f"{self.where(name)}: may not be {what}: {error}", fix="check the credentials and the bucket's policy"
            ) from None
        except NotImplementedError:
            raise CacheError(f"{self.where(name)}: {self.fs.protocol} cannot be {what} this way") from None
        except Exception as error:  # every driver has its own
            if is_scarce(error):
                raise
            raise CacheError(f"{self.where(name)}: cannot be {what}: {type(error).__name__}: {error}") from None


def _moment(info: dict[str, Any]) -> float:
    """When an object was written; drivers call it differently."""
    keys = ("LastModified", "mtime", "updated", "last_modified", "modified", "created")
    when = next((info[key] for key in keys if info.get(key)), None)
    if when is None:
        return time.time()  # nobody knows: never old
    if isinstance(when, str):
        when = datetime.fromisoformat(when)
    return when.timestamp() if isinstance(when, datetime) else float(when)
