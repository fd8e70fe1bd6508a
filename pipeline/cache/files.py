"""Publication: a file appears whole and checked, or not at all.

A file is written under `tmp/`, synced, read back from the disk and compared, then published by a hard link, which fails
if the name is taken: put-if-absent on local disks and NFS. A process killed at any instant leaves the old state or the
new state, plus an invisible file in `tmp/`. A file system without hard links is refused with a message.

Names are relative to the root, with forward slashes. `Files` works on a folder on a disk or on NFS;
`pipeline.cache.objects.ObjectFiles` has the same operations over an object store.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol, TypeVar
from weakref import WeakSet

import pyarrow as pa

from pipeline import retrying
from pipeline.cache import layout, local_files
from pipeline.cache import scratch as scratches
from pipeline.cache.layout import Paths
from pipeline.cache.local_files import (
    Handle,
    cache_errors,
    file_digest,
    is_foreign,
    make_folder,
    raise_if_of_machine,
    sync,
    sync_path,
    write_synced,
)
from pipeline.errors import CacheError, IntegrityError, ResourceError, UserError, not_permitted

T = TypeVar("T")


@dataclass(frozen=True)
class FileEntry:
    """A file of the cache. size: in bytes; modified: in seconds since 1970, by the clock of its file system."""

    name: str
    size: int
    modified: float


class Closing(Protocol):
    """A reader that keeps files open and can reopen them."""

    def close(self) -> None: ...


class Files:
    """A folder of published files.

    Attributes:
        room: bytes that the local mirror of an object store can hold; None for a folder, which has no mirror.
        patience_s: how long to wait for a network file system or object store that does not answer.
        damage: lost or damaged document -> what is wrong. Its copy was read instead.
        repairs: whether such a document is written again immediately.
        reopen_s: seconds for which a shard that was reopened because of a wrong record is not reopened again.
        readers: all readers; they close their files when descriptors or disk space run out.
    """

    room: int | None = None
    repairs = False
    reopen_s = 0.0

    def __init__(self, root: Path | str, patience_s: float = retrying.PATIENCE_S):
        self.root, self.patience_s = Path(root), patience_s
        self.damage: dict[str, str] = {}
        self.readers: WeakSet[Closing] = WeakSet()

    def close_readers(self) -> None:
        """Close the open files of all readers, except those being read now."""
        for reader in list(self.readers):
            reader.close()

    def path(self, name: str) -> Path:
        return self.root / name

    def when_reachable(self, read: Callable[[], T]) -> T:
        """The result of `read`, repeated while the network file system is disconnected.

        Raises:
            AwayError: it stays disconnected for `patience_s`.
            OSError: as `read`.
        """
        return retrying.when_reachable(read, self.where(""), self.patience_s)

    def where(self, name: str) -> str:
        """The file's full name, for messages."""
        return str(self.path(name))

    def probe(self) -> None:
        """Test, before any work is done, whether files can be published here.

        Raises:
            CacheError: publication is not safe here, or nothing can be written.
        """

    def exists(self, name: str) -> bool:
        """Whether a file, or the copy of a lost document, exists."""
        return self.has_file(name) or (layout.is_document(name) and self.has_file(Paths.copy(name)))

    def has_file(self, name: str) -> bool:
        """Whether a file of exactly this name exists; copies of documents do not count."""
        try:
            return self.when_reachable(self.path(name).exists)
        except OSError as error:
            raise self._unreadable(name, error, "looked for") from None

    def _unreadable(self, name: str, error: OSError, what: str = "read") -> UserError:
        """The error for a file that this machine or this user cannot read, which says nothing about its bytes."""
        raise_if_of_machine(error, self.where(name))
        refused = not_permitted(self.path(name), ResourceError)
        return refused or CacheError(f"{self.where(name)}: cannot be {what}: {error.strerror}")

    def read(self, name: str) -> bytes:
        """The bytes of a file.

        Raises:
            IntegrityError: it is missing, or the disk cannot read it.
            CacheError: it cannot be read for another reason.
        """
        try:
            return self.when_reachable(self.path(name).read_bytes)
        except FileNotFoundError:
            raise IntegrityError(f"{self.path(name)}: is missing", fix=layout.REPAIR) from None
        except OSError as error:
            if error.errno == errno.EIO:
                raise IntegrityError(f"{self.path(name)}: cannot be read: {error.strerror}") from None
            raise self._unreadable(name, error) from None

    def names(self, folder: str) -> list[str]:
        """Sorted names in a folder, lost documents with a copy included; an absent folder is empty."""
        return sorted({name for name, _ in self._list_both(folder)})

    def folders(self, folder: str) -> list[str]:
        """Sorted names of the folders in a folder, as `names`."""
        return sorted({name for name, kind in self._list_both(folder) if kind == "directory"})

    def unit_names(self, folder: str) -> list[str]:
        """The documents of a plan's units, in the order of the units. They are in folders of their first two
        characters."""
        paths = {path for where in (folder, Paths.copy(folder)) for path in self._below(where)}
        return [f"{folder}/{path}" for path in sorted(paths) if path.endswith(".json") and path[:3] == f"{path[3:5]}/"]

    def _below(self, folder: str) -> Iterator[str]:
        """The files in the folders of a folder, relative to it."""
        for name, kind in self._list(folder):
            if kind == "directory":
                yield from (f"{name}/{inner}" for inner, _ in self._list(f"{folder}/{name}"))

    def _list_both(self, folder: str) -> list[tuple[str, str]]:
        documents = folder.partition("/")[0] in layout.DOCUMENTS
        return self._list(folder) + (self._list(Paths.copy(folder)) if documents else [])

    def _list(self, folder: str) -> list[tuple[str, str]]:
        """(name, `file` or `directory`) of the entries of a folder."""
        try:
            return self.when_reachable(
                lambda: [
                    (entry.name, "directory" if entry.is_dir() else "file")
                    for entry in os.scandir(self.path(folder))
                    if not is_foreign(entry.name)
                ]
            )
        except FileNotFoundError:
            return []
        except OSError as error:
            raise_if_of_machine(error, self.where(folder))
            raise CacheError(f"{self.where(folder)}: cannot be listed: {error.strerror}") from None

    def walk(self, folder: str) -> Iterator[FileEntry]:
        """All files of the cache below a folder, in the order of their names; an absent folder is empty."""

        def unlisted(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                raise_if_of_machine(error, error.filename)
                raise CacheError(f"{error.filename}: cannot be listed: {error.strerror}") from None

        for parent, folders, names in os.walk(self.path(folder), onerror=unlisted):
            folders[:] = sorted(name for name in folders if not is_foreign(name))
            for name in sorted(name for name in names if not is_foreign(name)):
                path = Path(parent, name)
                try:
                    status = path.stat()
                except FileNotFoundError:  # a claim or a temporary file that was removed meanwhile
                    continue
                yield FileEntry(path.relative_to(self.root).as_posix(), status.st_size, status.st_mtime)

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        """File -> its size in bytes; absent files are left out."""
        return {name: size for name, _, size in self.sized((name, None) for name in names) if size is not None}

    def sized(self, wanted: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T, int | None]]:
        """Files with a value of the caller's, and their sizes in bytes; None: absent. On a disk one at a time."""
        for name, value in wanted:
            try:
                yield name, value, self.when_reachable(self.path(name).stat).st_size
            except FileNotFoundError:
                yield name, value, None
            except OSError as error:
                raise self._unreadable(name, error) from None

    def documents(self, names: list[str]) -> Iterator[dict]:
        """`document` of many, in order."""
        return map(self.document, names)

    def open(self, name: str, *, trust: bool = False) -> Handle:
        """Open a content-addressed file for reading at offsets.

        Args:
            trust: the caller checks what it reads, and opens the file again without trust if that is wrong. A local
                copy of an object that a process of this machine has checked is not checked again.

        Raises:
            FileNotFoundError: it is missing.
            CacheError: it cannot be read.
        """
        try:
            return Handle(self.when_reachable(lambda: os.open(self.path(name), os.O_RDONLY)))
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._unreadable(name, error, "opened") from None

    def ranged(self, name: str) -> Handle:
        """As `open`, for reading a few ranges of a large file: from an object store only those are transferred."""
        return self.open(name)

    def digest(self, name: str) -> str:
        """Hex xxh3-128 of a file's bytes as they are now. Raises as `open`."""
        return self.when_reachable(lambda: local_files.digest_of(self.open(name)))

    # ------------------------------------------------------------ writing

    def temporary(self) -> AbstractContextManager[Path]:
        """An unused path under `tmp/`; the file is removed at the end if it is still there."""
        return local_files.temporary_in(self.root / "tmp")

    def publish(self, temporary: Path, name: str) -> bool:
        """Give a finished temporary file its name, unless the name is taken.

        Returns:
            False if the name was taken (the temporary file is left as it is).
        """
        target = self.path(name)
        with cache_errors(target):
            make_folder(target.parent)
            try:
                os.link(temporary, target)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK):
                    raise CacheError(
                        f"{self.root}: this file system has no hard links, which publication needs",
                        fix="put the cache on a local disk or NFS, then copy it where you want it",
                    ) from None
                raise
            sync_path(target.parent)
        return True

    def put(self, name: str, data: bytes) -> bool:
        """Publish bytes under a name that is not taken. Returns False if it is.

        A document is visible once it is published; its copy follows. If the copy of a lost document is found then, that
        document is restored: it still has the name.
        """
        if not self._put(name, data):
            return False
        copy = Paths.copy(name)
        if layout.is_document(name) and not self._put(copy, data) and (lost := self.read(copy)) != data:
            self.replace(name, lost)
            return False
        return True

    def ensure(self, name: str, data: bytes) -> None:
        """Publish a document whose name is derived from its content; a damaged document is written again."""
        if self.put(name, data):
            return
        try:
            self.document(name)
        except IntegrityError:
            for path in (name, Paths.copy(name)):
                self.replace(path, data)

    def _put(self, name: str, data: bytes) -> bool:
        if self.has_file(name):
            return False
        with self.temporary() as path:
            write_synced(path, data)
            check_digest(path, layout.content_digest(data))
            return self.publish(path, name)

    def put_content(self, data: bytes, folder_of: str, suffix: str, twice: bool = False) -> str:
        """Publish bytes under the digest of their content; returns the digest. An existing file with these bytes is
        freshened, a damaged file is replaced.

        Args:
            twice: also publish the copy; for what cannot be made from other files.
        """
        digest = layout.content_digest(data)
        target = Paths.table(digest, suffix) if folder_of == "tables" else f"{folder_of}/{digest}.{suffix}"
        for name in (target, Paths.copy(target)) if twice else (target,):
            if self.freshen(name):
                with suppress(IntegrityError):  # missing again while `discard` checks its age
                    if self.read(name) == data:
                        continue
            with self.temporary() as path:
                write_synced(path, data)
                self.publish_content(path, name, digest)
        return digest

    def put_content_file(self, path: Path, suffix: str) -> str:
        """`put_content` of a written file into `tables/`, which need not fit into memory. Publishes no copy."""
        digest = file_digest(path)  # of what was written; `publish_content` compares what is on the disk
        with cache_errors(path), open(path, "rb+") as file:
            sync(file)
        target = Paths.table(digest, suffix)
        if self.freshen(target):
            with suppress(OSError):  # missing again while `discard` checks its age
                if self.digest(target) == digest:
                    return digest
        self.publish_content(path, target, digest)
        return digest

    def duplicate(self, name: str) -> bool:
        """Store a content-addressed file and its copy from the intact one of both, which is freshened. Returns False if
        neither is intact."""
        digest = PurePosixPath(name).stem
        for source, target in ((name, Paths.copy(name)), (Paths.copy(name), name)):
            if not self.is_intact(source):
                continue
            with self.temporary() as path:
                with cache_errors(path), self.open(source).file() as file, open(path, "xb") as copy:
                    shutil.copyfileobj(file, copy, 4 << 20)
                    sync(copy)
                self.publish_content(path, target, digest)
            return self.freshen(source)
        return False

    def is_intact(self, name: str) -> bool:
        """Whether a content-addressed file exists and its bytes match its name. Raises as `open`, if the fault is not
        the file's."""
        try:
            return self.digest(name) == PurePosixPath(name).stem
        except (IntegrityError, OSError) as error:
            if isinstance(error, OSError):
                raise_if_of_machine(error, self.where(name))
            return False

    def publish_content(self, temporary: Path, name: str, digest: str) -> None:
        """Publish a finished file whose content has `digest`, after reading it back.

        If the name is taken by the same content, that file is freshened; a damaged file is replaced (never truncated:
        processes that have it open keep the old bytes).
        """
        check_digest(temporary, digest)
        while not self.publish(temporary, name):
            with suppress(FileNotFoundError):  # removed meanwhile: try again
                if not self.freshen(name):
                    self._refuse_dangling_link(name)
                    continue
                if file_digest(self.path(name)) != digest:
                    with cache_errors(self.path(name)):
                        os.replace(temporary, self.path(name))
                        sync_path(self.path(name).parent)
                return

    def _refuse_dangling_link(self, name: str) -> None:
        with suppress(OSError):  # no link, or removed meanwhile
            target = os.readlink(self.path(name))
            raise CacheError(
                f"{self.path(name)}: is a link to {target}, which is missing",
                fix="mount the disk of that file, or remove the link",
            )

    def replace(self, name: str, data: bytes) -> None:
        """Write a file that may change (reports, claims); readers see the old bytes or the new ones."""
        with self.temporary() as path:
            write_synced(path, data)
            self.replace_by(path, name)

    def replace_by(self, temporary: Path, name: str) -> None:
        """`replace` by a written temporary file, which need not fit into memory."""
        target = self.path(name)
        with cache_errors(target):
            make_folder(target.parent)
            os.replace(temporary, target)

    def remove(self, name: str) -> None:
        """Remove a file, if it exists, and its copy. Only for files that readers ignore (claims) or that are unused."""
        if layout.has_copy(name):
            self._remove(Paths.copy(name))
        self._remove(name)

    def set_aside(self, name: str) -> None:
        """Move a damaged file and its copy to `damaged/`, so that the name is free again."""
        for path in (name, Paths.copy(name)):
            if self.has_file(path):
                self._move(path, f"damaged/{path}-{uuid.uuid4().hex[:8]}")

    def _move(self, name: str, to: str) -> None:
        with cache_errors(self.path(to)):
            self.path(to).parent.mkdir(parents=True, exist_ok=True)
            os.replace(self.path(name), self.path(to))

    def _remove(self, name: str) -> None:
        with cache_errors(self.path(name)):
            self.path(name).unlink(missing_ok=True)

    # ------------------------------------------------------------ age

    def now(self) -> float:
        """The time by the clock of the file system, in seconds since 1970; writes a temporary file to read it."""
        return local_files.now_in(self.root / "tmp")

    def freshen(self, name: str) -> bool:
        """Set a file's modification time to now, so that `discard` spares it. Must be called before a reference to the
        file is published. Returns False if the file is missing."""
        path = self.path(name)
        with cache_errors(path):
            try:
                os.utime(path)
            except FileNotFoundError:
                return False
            except PermissionError:  # another user's file: replace it by a copy
                with self.temporary() as copy:
                    shutil.copyfile(path, copy)
                    with open(copy, "rb+") as file:
                        sync(file)
                    check_digest(copy, file_digest(path))
                    os.replace(copy, path)
                    sync_path(path.parent)
        return True

    def discard(self, name: str, before: float) -> bool:
        """Remove a file and its copy if it was last written or freshened at or before a moment (see `now`). Returns
        whether it was removed."""
        removed = self._discard(name, before)
        if removed and layout.has_copy(name):
            self._remove(Paths.copy(name))
        return removed

    def _discard(self, name: str, before: float) -> bool:
        # The file is moved aside before its age is read. A process that freshens it either did so before,
        # and the file is put back, or does so afterwards, and `freshen` reports it as missing.
        path, old = self.path(name), False
        aside = local_files.aside(self.root / "tmp", name)
        with cache_errors(path):
            make_folder(aside.parent)
            try:
                os.rename(path, aside)
                try:
                    with open(aside, "rb") as file:  # opening it on NFS gets the server's time, not a cached time
                        old = os.fstat(file.fileno()).st_mtime <= before
                finally:
                    aside.unlink() if old else local_files.put_back(aside, path)
            except FileNotFoundError:  # it is gone, or a gc on another machine gave it its name again
                return False
        return old

    def put_back(self) -> None:
        """Give the files their names again that a killed process has moved aside in `discard`.

        Raises:
            CacheError: that failed.
        """
        for path, name in local_files.left_aside(self.root / "tmp"):
            with cache_errors(self.path(name)), suppress(FileNotFoundError):  # another process did it
                local_files.put_back(path, self.path(name))

    # ------------------------------------------------------------ numbered documents

    def numbers(self, folder: str) -> list[int]:
        """Numbers of the documents `NNNNNNNN.json` in a folder, without a gap.

        Raises:
            IntegrityError: a number is missing in the middle.
        """
        numbers = layout.numbers_of(self.names(folder))
        if numbers != list(range(len(numbers))):
            missing = sorted(set(range(max(numbers) + 1)) - set(numbers))
            raise IntegrityError(
                f"{self.where(folder)}: documents are missing",
                expected="numbers without a gap",
                found=f"no {missing[:5]}",
                fix=layout.REPAIR,
            )
        return numbers

    def document(self, name: str) -> dict:
        """The body of a document, checked; read from its copy if the document is lost or damaged (see `damage`).

        Raises:
            IntegrityError: the document and its copy are lost or damaged.
            CacheError: it is of another version, or cannot be read now.
        """
        try:
            return self.parse(name, self.read(name))
        except IntegrityError as error:
            if not layout.is_document(name):
                raise
            try:
                body = self.parse(name, data := self.read(Paths.copy(name)))
            except IntegrityError:
                raise error from None
            if name not in self.damage:
                self.damage[name] = error.what
                state = "the document was restored" if self.repairs else f"to restore it: {layout.REPAIR}"
                retrying.log(f"{error.what}; its copy is read instead ({state})")
            if self.repairs:
                self.replace(name, data)
            return body

    def parse(self, name: str, data: bytes) -> dict:
        """The body of a document from the bytes of one of its two files, checked.

        Raises:
            IntegrityError: they are damaged or another document.
            CacheError: they are of another version.
        """
        body = layout.unseal(data, self.where(name))
        if other := layout.contradicts_name(name, body):
            raise IntegrityError(f"{self.where(name)}: is another document", found=other, fix=layout.REPAIR)
        return body

    def content(self, name: str, digest: str) -> bytes:
        """The bytes of a content-addressed file, checked."""
        data = self.read(name)
        actual = layout.content_digest(data)
        if actual != digest:
            raise self._altered(name, digest, actual)
        return data

    def mapped(self, name: str, digest: str) -> pa.Buffer:
        """The bytes of a content-addressed file, checked; a large file is mapped into memory. Raises as `content`."""
        if self.sizes([name]).get(name, 0) <= scratches.LIMIT:
            return pa.py_buffer(self.content(name, digest))
        try:
            handle = self.open(name)
            actual = self.when_reachable(lambda: local_files.digest_of(handle))
        except OSError as error:  # it was there a moment ago
            raise_if_of_machine(error, self.where(name))
            raise IntegrityError(f"{self.where(name)}: cannot be read: {error.strerror}", fix=layout.REPAIR) from None
        if actual != digest:
            raise self._altered(name, digest, actual)
        return handle.map()

    def _altered(self, name: str, digest: str, actual: str) -> IntegrityError:
        what = f"{self.where(name)}: its bytes do not match its name"
        return IntegrityError(what, expected=digest, found=actual, fix=layout.REPAIR)

    @property
    def scratch(self) -> scratches.Scratch:
        """Temporary storage for what does not fit into memory: in the cache or, if nothing can be written there, in the
        system's folder for temporary files."""
        folder = self.root / "tmp"
        writable = os.access(folder if folder.is_dir() else self.root, os.W_OK)
        return scratches.Scratch(self.temporary if writable else None)

    # ------------------------------------------------------------ housekeeping

    def sweep(self) -> int:
        """Remove temporary files that no living writer can own. Returns how many."""
        with suppress(CacheError):  # of another user; `gc` names it
            self.put_back()
        return local_files.sweep_in(self.root / "tmp")

    @property
    def reports(self) -> Path:
        """A local folder for lists and metrics that are no part of the cache's data."""
        return self.root / "reports"

    def free_bytes(self) -> int | None:
        """Free space in bytes (without regard to quotas); None for an object store."""
        return local_files.free_at(self.root)

    def scratch_bytes(self) -> int:
        """Free space for unfinished files, in bytes."""
        return local_files.free_at(self.root)


def check_digest(path: Path, digest: str) -> None:
    """Read a written file back.

    Raises:
        IntegrityError: its digest is another.
    """
    actual = file_digest(path)
    if actual != digest:
        raise IntegrityError(
            f"{path}: reads back other bytes than were written", expected=digest, found=actual, fix="check the disk"
        )
