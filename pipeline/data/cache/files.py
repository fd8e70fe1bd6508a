"""The files of a cache: documents with their copies, content-addressed files, numbers, age. Everything here is written
once, on the operations of `cache.store.Store`.

A file appears whole and checked, or not at all: it is published under a name that is not taken (`Store.create`).
Names are relative to the cache, with forward slashes.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol, TypeVar
from weakref import WeakSet

import pyarrow as pa

from sana_pipe.base import disk, process_identity, retrying
from sana_pipe.base.disk import Handle, cache_errors, file_digest, raise_if_of_machine
from sana_pipe.base.errors import CacheError, IntegrityError
from sana_pipe.data.cache import layout
from sana_pipe.data.cache import scratch as scratches
from sana_pipe.data.cache.config import MirrorConfig
from sana_pipe.data.cache.folder_store import FolderStore
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.cache.mirror import Mirror
from sana_pipe.data.cache.object_store import PARALLEL_REQUESTS, ObjectStore
from sana_pipe.data.cache.store import FileEntry, Store

T = TypeVar("T")


class Closing(Protocol):
    """A reader that keeps files open and can reopen them."""

    def close(self) -> None: ...


class Files:
    """The published files of a cache.

    Args:
        root: a folder, or a URL with a scheme that fsspec knows (`file://` is a folder).
        mirror: the folder for local copies of objects, and its size.
        patience_s: seconds to wait for a network file system or object store that does not answer.

    Attributes:
        on_disk: whether they are in a folder.
        damage: lost or damaged document -> what is wrong. Its copy was read instead.
        repairs: whether such a document is written again immediately.
        reopen_s: seconds for which a shard that was reopened because of a wrong record is not reopened again.
        readers: all readers; they close their files when descriptors or disk space run out.

    Raises:
        CacheError: see `ObjectStore`.
    """

    repairs = False

    def __init__(self, root: Path | str, mirror: MirrorConfig | None = None, patience_s: float = retrying.PATIENCE_S):
        text, self.patience_s = str(root), patience_s
        self.on_disk = isinstance(root, Path) or "://" not in text or text.startswith("file://")
        self.store: Store
        self._mirror: Mirror | None = None
        # Reopening an object may transfer the whole shard, and a damaged shard can have many damaged records.
        self.reopen_s = 0.0 if self.on_disk else 30.0
        if self.on_disk:
            self.store = FolderStore(Path(root if isinstance(root, Path) else text.removeprefix("file://")), patience_s)
        else:
            self.store = objects = ObjectStore(text, mirror or MirrorConfig(), patience_s)
            self._mirror = objects.mirror
        self.damage: dict[str, str] = {}
        self.readers: WeakSet[Closing] = WeakSet()

    @cached_property
    def room(self) -> int | None:
        """Bytes that the local mirror of an object store can hold; None for a folder, which has no mirror."""
        return self._mirror.room if self._mirror else None

    @property
    def root(self) -> Path:
        """The folder of a cache on a disk."""
        if not isinstance(self.store, FolderStore):
            raise TypeError(f"{self.where('')} is not on a disk")
        return self.store.root

    def path(self, name: str) -> Path:
        return self.root / name

    def close_readers(self) -> None:
        """Close the open files of all readers, except those being read now."""
        for reader in list(self.readers):
            reader.close()

    def when_reachable(self, read: Callable[[], T]) -> T:
        """The result of `read`, repeated while the network file system is disconnected.

        Raises:
            AwayError: it stays disconnected for `patience_s`.
            OSError: as `read`.
        """
        return retrying.when_reachable(read, self.where(""), self.patience_s)

    def where(self, name: str) -> str:
        """The file's full name, for messages."""
        return self.store.where(name)

    def probe(self) -> None:
        """Test, before any work is done, whether an object store can publish. Raises as `ObjectStore.probe`."""
        if isinstance(self.store, ObjectStore):
            self.store.probe()

    def check_writable(self) -> None:
        """Test whether files can be published in the folder of a cache: written, synced, read back, linked under a name
        and renamed. `probe` did so for an object store.

        Raises:
            CacheError: they cannot.
        """
        if self.on_disk:
            name, data = f"tmp/{process_identity.name_prefix()}-{uuid.uuid4().hex}", b"sana-pipe\n"
            self.store.create(name, data)  # if this fails there is nothing to remove
            try:
                self.store.replace(name, data)
            finally:
                self.store.remove(name)

    # ------------------------------------------------------------ reading

    def exists(self, name: str) -> bool:
        """Return whether a file, or the copy of a lost document, exists."""
        return self.has_file(name) or (layout.is_document(name) and self.has_file(Paths.copy(name)))

    def has_file(self, name: str) -> bool:
        """Return whether a file of exactly this name exists; copies of documents do not count."""
        return self.store.stat(name) is not None

    def read(self, name: str) -> bytes:
        """The bytes of a file.

        Raises:
            IntegrityError: it is missing, or the disk cannot read it.
            CacheError: it cannot be read for another reason.
        """
        try:
            return self.store.read(name)
        except FileNotFoundError:
            raise self._missing(name) from None

    def _missing(self, name: str) -> IntegrityError:
        return IntegrityError(f"{self.where(name)}: is missing", fix=layout.REPAIR)

    def names(self, folder: str) -> list[str]:
        """Sorted names in a folder, lost documents with a copy included; an absent folder is empty."""
        return sorted({name for name, _ in self._list_both(folder)})

    def folders(self, folder: str) -> list[str]:
        """Sorted names of the folders in a folder, as `names`."""
        return sorted({name for name, is_folder in self._list_both(folder) if is_folder})

    def _list_both(self, folder: str) -> list[tuple[str, bool]]:
        documents = folder.partition("/")[0] in layout.DOCUMENTS
        return self.store.list(folder) + (self.store.list(Paths.copy(folder)) if documents else [])

    def unit_names(self, folder: str) -> list[str]:
        """The documents of a plan's units, in the order of the units. They are in folders of their first two
        characters."""
        paths = {path for where in (folder, Paths.copy(folder)) for path in self._below(where)}
        return [f"{folder}/{path}" for path in sorted(paths) if path.endswith(".json") and path[:3] == f"{path[3:5]}/"]

    def _below(self, folder: str) -> Iterator[str]:
        """The files in the folders of a folder, relative to it."""
        if not self.on_disk:  # one listing
            yield from (name.removeprefix(f"{folder}/") for name in self.names_below(folder))
            return
        for name, is_folder in self.store.list(folder):
            if is_folder:
                yield from (f"{name}/{inner}" for inner, _ in self.store.list(f"{folder}/{name}"))

    def walk(self, folder: str) -> Iterator[FileEntry]:
        """All files of the cache below a folder, in the order of their names; an absent folder is empty."""
        return self.store.walk(folder)

    def names_below(self, folder: str) -> Iterator[str]:
        """The names of these files. Behind a web server `walk` asks for the size of each."""
        return self.store.names_below(folder)

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        """File -> its size in bytes; absent files are left out."""
        return {name: size for name, _, size in self.sized((name, None) for name in names) if size is not None}

    def sized(self, wanted: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T, int | None]]:
        """Files with a value of the caller's, and their sizes in bytes; None: absent. On a disk one at a time, in an
        object store by listing their folders."""
        if self.on_disk:
            for name, value in wanted:
                entry = self.store.stat(name)
                yield name, value, None if entry is None else entry.size
            return
        wanted = list(wanted)
        folders = sorted({"/".join(name.split("/")[:-1][:2]) for name, _ in wanted})
        names = {name for name, _ in wanted}
        sizes = {entry.name: entry.size for folder in folders for entry in self.walk(folder) if entry.name in names}
        yield from ((name, value, sizes.get(name)) for name, value in wanted)

    def documents(self, names: list[str]) -> Iterator[dict]:
        """`document` of many, in order."""
        if self.on_disk:
            yield from map(self.document, names)
            return
        with ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:
            yield from pool.map(self.document, names)

    def open(self, name: str, *, trust: bool = False) -> Handle:
        """Open a content-addressed file for reading at offsets.

        Args:
            trust: the caller checks what it reads, and opens the file again without trust if that is wrong. A local
                copy of an object that a process of this machine has checked is not checked again.

        Raises:
            FileNotFoundError: it is missing.
            CacheError: it cannot be read.
        """
        if self._mirror is None:
            return self.store.open(name)
        return self._mirror.open(name, trust=trust)

    def ranged(self, name: str) -> Handle:
        """Open for reading a few ranges of a large file: from an object store only those are transferred."""
        return self.store.open(name) if self.store.has_ranges else self.open(name)

    def _whole(self, name: str) -> Handle:
        """Open for reading a file once: the mirror keeps no copy."""
        if self._mirror is None:
            return self.store.open(name)
        return self._mirror.fetched(name)

    def _fetch(self, name: str, path: Path) -> None:
        """Copy a file to a new local file."""
        if self._mirror is None:
            with cache_errors(path):
                self.store.fetch(name, path)
        else:  # makes space on its disk
            self._mirror.fetch(name, path)

    def digest(self, name: str) -> str:
        """Hex xxh3-128 of a file's bytes as they are now in the store. The mirror's copy of a damaged object is
        dropped, so that a check of its records reads the object, too. Raises as `open`."""
        read = self.store.open if self.store.has_ranges else self._whole
        digest = self.when_reachable(lambda: disk.digest_of(read(name)))
        if self._mirror and digest != PurePosixPath(name).stem:
            self._mirror.drop(name)
        return digest

    # ------------------------------------------------------------ writing

    def temporary(self) -> AbstractContextManager[Path]:
        """An unused path under `tmp/`; the file is removed at the end if it is still there."""
        return disk.temporary_in(self.store.local / "tmp", self.store.local)

    def put(self, name: str, data: bytes) -> bool:
        """Publish bytes under a name that is not taken. Returns False if it is.

        A document is visible once it is published; its copy follows. If the copy of a lost document is found then, that
        document is restored: it still has the name.
        """
        if not self.store.create(name, data):
            return False
        copy = Paths.copy(name)
        if layout.is_document(name) and not self.store.create(copy, data) and (lost := self.read(copy)) != data:
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

    def put_content(self, data: bytes, folder_of: str, suffix: str, twice: bool = False) -> str:
        """Publish bytes under the digest of their content; returns the digest. An existing file with these bytes is
        refreshed, a damaged file is replaced.

        Args:
            twice: also publish the copy; for what cannot be made from other files.
        """
        digest = layout.content_digest(data)
        target = Paths.table(digest, suffix) if folder_of == "tables" else f"{folder_of}/{digest}.{suffix}"
        for name in (target, Paths.copy(target)) if twice else (target,):
            if self.refresh_intact(name):
                continue
            with self.temporary() as path:
                disk.write_synced(path, data)
                self.publish_content(path, name, digest)
        return digest

    def put_table(self, write: Callable[[BinaryIO], object], suffix: str, twice: bool = False) -> str:
        """`put_content` of what `write` writes, into `tables/`; it need not fit into memory."""
        with self.temporary() as path:
            with cache_errors(path), open(path, "x+b") as file:
                write(file)
                file.flush()
                digest = file_digest(path)  # of what was written; `publish_content` compares what is on the disk
                disk.sync(file)
            name = Paths.table(digest, suffix)
            if not self.refresh_intact(name):
                self.publish_content(path, name, digest)
        if twice:
            self.duplicate(name)
        return digest

    def publish_content(self, temporary: Path, name: str, digest: str) -> None:
        """Publish a finished file whose content has `digest`, after reading it back.

        If the name is taken by the same content, that file is refreshed; a damaged file is replaced (never truncated:
        processes that have it open keep the old bytes).
        """
        disk.check_digest(temporary, digest)
        if not self.store.create(name, temporary) and not self.refresh_intact(name):
            self.store.replace(name, temporary)

    def duplicate(self, name: str) -> bool:
        """Store a content-addressed file and its copy from the intact one of both, which is refreshed. Returns False if
        neither is intact."""
        for source, target in ((name, Paths.copy(name)), (Paths.copy(name), name)):
            if self.is_intact(source):
                with self.temporary() as path:
                    self._fetch(source, path)
                    self.publish_content(path, target, PurePosixPath(name).stem)
                return self.refresh(source)
        return False

    def is_intact(self, name: str) -> bool:
        """Return whether a content-addressed file exists and its bytes match its name. Raises as `open`, if the fault
        is not the file's."""
        try:
            return self.digest(name) == PurePosixPath(name).stem
        except (IntegrityError, OSError) as error:
            if isinstance(error, OSError):
                raise_if_of_machine(error, self.where(name))
            return False

    def refresh_intact(self, name: str) -> bool:
        """`refresh` a content-addressed file; returns whether it exists and is intact."""
        return self.refresh(name) and self.is_intact(name)

    def replace(self, name: str, data: bytes | Path) -> None:
        """Write a file that may change (reports, claims); readers see the old bytes or the new ones. data: bytes, or a
        written and synced file of `temporary`."""
        self.store.replace(name, data)

    def replace_document(self, name: str, data: bytes) -> None:
        """Write a document that another state takes the place of, and its copy. The copy comes first: a process that is
        killed in between has the old document, and begins again."""
        for path in (Paths.copy(name), name):
            self.store.replace(path, data)

    def remove(self, name: str) -> None:
        """Remove a file, if it exists, and its copy. Only for files that readers ignore (claims) or that are unused."""
        if layout.has_copy(name):
            self.store.remove(Paths.copy(name))
        self.store.remove(name)

    def set_aside(self, name: str) -> None:
        """Move a damaged file and its copy to `damaged/`, so that the name is free again."""
        for path in (name, Paths.copy(name)):
            if self.has_file(path):
                self.store.move(path, f"damaged/{path}-{uuid.uuid4().hex[:8]}")

    # ------------------------------------------------------------ age

    def now(self) -> float:
        """The time by the clock of the store, in seconds since 1970; writes a file to read it."""
        if self.on_disk:
            return disk.now_in(self.root / "tmp")
        name = f"tmp/clock-{uuid.uuid4().hex}"
        self.store.create(name, b"")
        entry = self.store.stat(name)
        self.store.remove(name)
        if entry is None:
            raise CacheError(f"{self.where(name)}: was written but cannot be found")
        return entry.modified

    def refresh(self, name: str) -> bool:
        """Set a file's modification time to now, so that `discard` spares it. Must be called before a reference to the
        file is published. Returns False if the file is missing."""
        return self.store.refresh(name)

    def discard(self, name: str, before: float) -> bool:
        """Remove a file and its copy if it was last written or refreshed at or before a moment (see `now`). Returns
        whether it was removed."""
        removed = self.store.remove(name, before)
        if removed and layout.has_copy(name):
            self.store.remove(Paths.copy(name))
        return removed

    def drop_mirrored(self) -> int:
        """Remove the local copies of objects that the store does not have any more. Returns how many."""
        if self._mirror is None:
            return 0
        there = {
            PurePosixPath(name).name for top in ("shards", "tables", "copies/tables") for name in self.names_below(top)
        }
        gone = [path.name for _, _, path in self._mirror.list_copies() if path.name not in there]
        for name in gone:
            self._mirror.drop(name)
        return len(gone)

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
                copy, way_out = Paths.copy(name), layout.way_out(name)
                lost = not self.has_file(name) and not self.has_file(copy)
                raise IntegrityError(
                    f"{error.what}, and its copy {self.where(copy)} is lost or damaged, too",
                    fix=way_out if lost else f"{layout.REPAIR}, then {way_out}",
                ) from None
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
            raise IntegrityError(f"{self.where(name)}: is a different document", found=other, fix=layout.REPAIR)
        return body

    def mapped(
        self, name: str, digest: str, *, mirrored: bool = False, checked: dict[str, tuple[int, ...]] | None = None
    ) -> pa.Buffer:
        """The bytes of a content-addressed file, checked; a large file is mapped into memory.

        Args:
            mirrored: the mirror keeps a copy, for the other processes of this machine.
            checked: files that were checked -> their identities then. One that is the same is not read again; small
                files are mapped, too.

        Raises:
            IntegrityError: it is missing or damaged.
        """

        known = {} if checked is None else checked

        def read(trust: bool) -> tuple[str, pa.Buffer]:
            handle = self.open(name, trust=trust) if mirrored else self._whole(name)
            if checked is None and handle.size <= scratches.LIMIT:
                with handle.file() as file:
                    data = file.read()
                return layout.content_digest(data), pa.py_buffer(data)
            # Not through the mapping: pages that no lookup needs must not take up memory.
            identity = handle.identity()  # before the check: bytes may change meanwhile
            actual = digest if known.get(name) == identity else disk.digest_of(handle)
            if actual != digest:
                return actual, pa.py_buffer(b"")
            known[name] = identity
            return actual, handle.map()

        try:
            actual, data = self.when_reachable(lambda: read(mirrored))
            if mirrored and actual != digest:  # a local copy of an object, which is fetched again
                actual, data = self.when_reachable(lambda: read(False))
        except FileNotFoundError:
            raise self._missing(name) from None
        except OSError as error:
            raise_if_of_machine(error, self.where(name))
            raise IntegrityError(f"{self.where(name)}: cannot be read: {error.strerror}", fix=layout.REPAIR) from None
        if actual != digest:
            what = f"{self.where(name)}: its bytes do not match its name"
            raise IntegrityError(what, expected=digest, found=actual, fix=layout.REPAIR)
        return data

    @property
    def scratch(self) -> scratches.Scratch:
        """Temporary storage for what does not fit into memory: in the cache or the mirror; in the system's folder for
        temporary files if nothing can be written to a cache on a disk."""
        folder = self.store.local / "tmp"
        writable = not self.on_disk or os.access(folder if folder.is_dir() else self.root, os.W_OK)
        return scratches.Scratch(self.temporary if writable else None)

    # ------------------------------------------------------------ housekeeping

    def sweep(self) -> int:
        """Remove temporary files of this cache or its mirror that no living writer can own. Returns how many.
        Unfinished uploads are invisible; a lifecycle rule of the bucket (abort incomplete multipart uploads) frees
        their space."""
        return disk.sweep_in(self.store.local / "tmp")

    @property
    def reports(self) -> Path:
        """A local folder for lists and metrics that are no part of the cache's data."""
        return self.store.local / "reports"

    def free_bytes(self) -> int | None:
        """Free space in bytes (without regard to quotas); None for an object store."""
        return disk.free_at(self.root) if self.on_disk else None

    def scratch_bytes(self) -> int:
        """Free space for unfinished files, in bytes."""
        return disk.free_at(self.store.local)
