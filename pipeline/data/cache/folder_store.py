"""A cache in a folder, on a local disk or NFS.

A file is written under `tmp/`, synced, read back from the disk and compared, then published by a hard link, which fails
if the name is taken: put-if-absent on local disks and NFS. A process killed at any instant leaves the old state or the
new state, plus an invisible file in `tmp/`. A file system without hard links is refused with a message. The group of a
new file or folder may do what it may with the cache's folder (`disk.share`).
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TypeVar

from sana_pipe.base import disk, retrying
from sana_pipe.base.disk import Handle, cache_errors, is_foreign, make_folder, raise_if_of_machine
from sana_pipe.base.errors import CacheError, IntegrityError, ResourceError, not_permitted
from sana_pipe.data.cache import layout
from sana_pipe.data.cache.store import FileEntry

T = TypeVar("T")


class FolderStore:
    """A `Store` in a folder."""

    has_ranges = True

    def __init__(self, root: Path, patience_s: float):
        self.root = self.local = root
        self.patience_s = patience_s

    def path(self, name: str) -> Path:
        return self.root / name

    def where(self, name: str) -> str:
        return str(self.path(name))

    def _temporary(self) -> AbstractContextManager[Path]:
        return disk.temporary_in(self.root / "tmp", self.root)

    # ------------------------------------------------------------ writing

    def create(self, name: str, data: bytes | Path) -> bool:
        if isinstance(data, bytes):
            if self.stat(name) is not None:
                return False
            with self._temporary() as path:
                disk.write_synced(path, data)
                disk.check_digest(path, layout.content_digest(data))
                return self.create(name, path)
        target = self.path(name)
        with cache_errors(target, self.root):
            make_folder(target.parent, self.root)
            disk.share(data, self.root)
            try:
                os.link(data, target)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK):
                    raise CacheError(
                        f"{self.root}: this file system has no hard links, which publication needs",
                        fix="put the cache on a local disk or NFS, then copy it where you want it",
                    ) from None
                raise
            disk.sync_path(target.parent)
        return True

    def replace(self, name: str, data: bytes | Path) -> None:
        if isinstance(data, bytes):
            with self._temporary() as path:
                disk.write_synced(path, data)
                self.replace(name, path)
            return
        target = self.path(name)
        with cache_errors(target, self.root):
            make_folder(target.parent, self.root)
            disk.share(data, self.root)
            os.replace(data, target)
            disk.sync_path(target.parent)

    def move(self, name: str, to: str) -> None:
        with cache_errors(self.path(to), self.root):
            make_folder(self.path(to).parent, self.root)
            os.replace(self.path(name), self.path(to))

    def refresh(self, name: str) -> bool:
        path = self.path(name)
        with cache_errors(path, self.root):
            try:
                os.utime(path)
            except FileNotFoundError:
                self._refuse_dangling_link(path)
                return False
            except PermissionError:  # another user's file: replace it by a copy
                with self._temporary() as copy:
                    self.fetch(name, copy)
                    disk.check_digest(copy, disk.file_digest(path))
                    self.replace(name, copy)
        return True

    def _refuse_dangling_link(self, path: Path) -> None:
        with suppress(OSError):  # no link, or removed meanwhile
            target = os.readlink(path)
            raise CacheError(
                f"{path}: is a link to {target}, which is missing",
                fix="mount the disk of that file, or remove the link",
            )

    def remove(self, name: str, before: float | None = None) -> bool:
        path = self.path(name)
        with cache_errors(path, self.root):
            if before is not None:
                try:
                    with open(path, "rb") as file:  # opening it on NFS gets the server's time, not a cached time
                        young = os.fstat(file.fileno()).st_mtime > before
                except FileNotFoundError:
                    return False
                if young:
                    return False
            path.unlink(missing_ok=True)
        return True

    # ------------------------------------------------------------ reading

    def read(self, name: str) -> bytes:
        return self._ask(name, self.path(name).read_bytes, "read")

    def open(self, name: str) -> Handle:
        return Handle(self._ask(name, lambda: os.open(self.path(name), os.O_RDONLY), "opened"))

    def fetch(self, name: str, path: Path) -> None:
        with self.open(name).file() as file, open(path, "xb") as copy:
            shutil.copyfileobj(file, copy, 4 << 20)
            disk.sync(copy)

    def list(self, folder: str) -> list[tuple[str, bool]]:
        def entries() -> list[tuple[str, bool]]:
            return [(e.name, e.is_dir()) for e in os.scandir(self.path(folder)) if not is_foreign(e.name)]

        try:
            return self._ask(folder, entries, "listed")
        except FileNotFoundError:
            return []

    def names_below(self, folder: str) -> Iterator[str]:
        return (entry.name for entry in self.walk(folder))

    def walk(self, folder: str) -> Iterator[FileEntry]:
        def unlisted(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                raise_if_of_machine(error, error.filename)
                raise CacheError(f"{error.filename}: cannot be listed: {error.strerror}") from None

        for parent, folders, names in os.walk(self.path(folder), onerror=unlisted):
            folders[:] = sorted(name for name in folders if not is_foreign(name))
            for name in sorted(name for name in names if not is_foreign(name)):
                path = Path(parent, name)
                with suppress(FileNotFoundError):  # a claim or a temporary file that was removed meanwhile
                    status = path.stat()
                    yield FileEntry(path.relative_to(self.root).as_posix(), status.st_size, status.st_mtime)

    def stat(self, name: str) -> FileEntry | None:
        def look() -> FileEntry | None:
            try:
                status = self.path(name).stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
            return FileEntry(name, status.st_size, status.st_mtime)

        return self._ask(name, look, "looked up")

    def _ask(self, name: str, ask: Callable[[], T], action: str) -> T:
        try:
            return retrying.when_reachable(ask, self.where(""), self.patience_s)
        except FileNotFoundError:
            raise
        except OSError as error:
            if action == "read" and error.errno == errno.EIO:
                raise IntegrityError(f"{self.where(name)}: cannot be read: {error.strerror}") from None
            raise_if_of_machine(error, self.where(name))
            refused = not_permitted(self.path(name), ResourceError)  # says nothing about the file's bytes
            raise refused or CacheError(f"{self.where(name)}: cannot be {action}: {error.strerror}") from None
