"""The mirror: local copies of content-addressed objects, with a size limit, verified, shared by all local processes.

`Mirror.open` returns an object as an open file. The first process that asks for an object fetches it whole. An opening
compares the copy's digest with its name and fetches a damaged copy again. It then leaves a mark with the copy's inode,
size and times; an opening with `trust` believes a mark that fits. So the processes of a machine check a shard once, not
once each; readers verify every record, and open a shard without trust if one is wrong.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path, PurePosixPath

from sana_pipe.base import counters
from sana_pipe.base.disk import Handle, cache_errors, digest_of, free_at, make_folder, share, temporary_in
from sana_pipe.base.errors import CacheError, NoSpaceError
from sana_pipe.data.cache.store import Store

_ROOM = "room"
"""The lock of removals."""
SPARE = 256 << 20
"""Bytes of disk space that stay free as long as there are copies to remove."""
PARTS = 256
"""Copies are listed before each fetch, or, if they are small, whenever a process has fetched this part of the limit."""
PROCESSES = 8
"""Processes of a machine that may fetch such a part each before they list again; for them the limit holds."""


class Mirror:
    """A folder of copies.

    Args:
        root: the folder; made when it is first needed.
        limit: size of all copies together, in bytes.
        origin: the store of the objects.
    """

    def __init__(self, root: Path, limit: int, origin: Store):
        self.root, self.limit, self.origin = root, limit, origin
        self._unlisted = 0
        """Bytes that may be fetched before copies are listed again; read and written with the lock of removals."""

    def open(self, name: str, *, trust: bool = False) -> Handle:
        """An object as an open file.

        Args:
            name: of the object; its last part is the digest of its bytes, and a suffix.
            trust: do not check a copy that was checked and has not changed since.

        Returns:
            The file. If the origin itself is damaged, its bytes as they are, without a copy in the mirror: readers
            verify each record.

        Raises:
            CacheError: the object is larger than the limit.
            NoSpaceError: the disk is full and no copy is left to remove. Also what the origin raises.
        """
        # Processes A and B of a machine open one shard. A has its lock (one of 256, by the digest's beginning), sees no
        # copy, makes room under the lock of removals, fetches into tmp/, checks the digest and renames. B then has the
        # lock: the copy is there, and its mark says that these bytes (device, inode, size, times) were checked.
        # A copy may be removed while it is open: the handle stays readable. A copy that a disk has changed has another
        # digest or identity: it is fetched again. An object whose digest is wrong after the fetch is damaged at its
        # origin: it is opened from tmp/ and not renamed, so that each process asks the origin again.
        last = PurePosixPath(name)
        copy = self.root / last.stem[:2] / last.name
        with self._locked(last.stem):
            with suppress(OSError):  # no copy, or the disk cannot read it: fetch it
                handle = Handle(os.open(copy, os.O_RDONLY))
                if (trust and self._is_marked(copy, handle)) or digest_of(handle) == last.stem:
                    self._mark(copy, handle)
                    return handle
            needed = self._size(name)
            if needed > self.limit:
                raise CacheError(
                    f"{name}: is larger than the whole mirror {self.root}",
                    expected=f"at most {self.limit:,} bytes",
                    found=f"{needed:,} bytes",
                    fix=f"set mirror.gib to more than {needed / 2**30:.3f}",
                )
            with self._locked(_ROOM):
                self._make_space(needed)
            with self.temporary() as path:
                self.fetch(name, path)
                with cache_errors(path):
                    handle = Handle(os.open(path, os.O_RDONLY))
                    if digest_of(handle) == last.stem:
                        make_folder(copy.parent, self.root)
                        share(path, self.root)
                        os.replace(path, copy)
                        self._mark(copy, handle)
            return handle

    def fetch(self, name: str, path: Path) -> None:
        """Fetch an object into a file of `temporary`. If the disk fills up meanwhile, remove copies and try again.

        Raises:
            NoSpaceError: no copy is left to remove.
        """
        while True:
            try:
                with cache_errors(path):
                    return self.origin.fetch(name, path)
            except NoSpaceError:
                path.unlink(missing_ok=True)
                needed = self._size(name)
                with self._locked(_ROOM):
                    if not self._remove_oldest(needed):
                        raise self._full(needed) from None
            except CacheError as error:
                if isinstance(error.__cause__, FileNotFoundError):  # the origin has no such object
                    raise error.__cause__ from None
                raise

    def fetched(self, name: str) -> Handle:
        """An object as an open file without a name, of which the mirror keeps no copy. Raises as `fetch`."""
        with self.temporary() as path:
            self.fetch(name, path)
            return Handle(os.open(path, os.O_RDONLY))

    def _size(self, name: str) -> int:
        entry = self.origin.stat(name)
        if entry is None:
            raise FileNotFoundError(self.origin.where(name))
        return entry.size

    def mark_of(self, copy: Path) -> Path:
        """The mark of a copy: its identity when it was checked. Its time is that of the last opening."""
        return self.root / "checked" / copy.name

    def _mark(self, copy: Path, handle: Handle) -> None:
        """Note that an open copy has the right bytes, and was opened now. Without the mark it is checked again."""
        with suppress(OSError):
            mark, identity = self.mark_of(copy), repr(handle.identity())
            if mark.exists() and mark.read_text() == identity:
                os.utime(mark)
                return
            make_folder(mark.parent, self.root)
            with self.temporary() as path:
                path.write_text(identity)
                share(path, self.root)
                os.replace(path, mark)

    def _is_marked(self, copy: Path, handle: Handle) -> bool:
        with suppress(OSError):
            return self.mark_of(copy).read_text() == repr(handle.identity())
        return False

    def _remove(self, copy: Path) -> None:
        for path in (copy, self.mark_of(copy)):
            path.unlink(missing_ok=True)

    def _full(self, needed: int) -> NoSpaceError:
        return NoSpaceError(
            f"{self.root}: the mirror's disk is full",
            expected=f"{needed:,} bytes free",
            found=f"{free_at(self.root):,} bytes, and no copy that could be removed",
            fix=f"free space on the disk of {self.root}, or set mirror.path to a folder on another one",
        )

    def drop(self, name: str) -> None:
        """Remove the copy of an object."""
        last = PurePosixPath(name)
        copy = self.root / last.stem[:2] / last.name
        with cache_errors(copy):
            self._remove(copy)

    def temporary(self) -> AbstractContextManager[Path]:
        """An unused path; the file is removed at the end if it is still there."""
        return temporary_in(self.root / "tmp", self.root)

    @property
    def room(self) -> int:
        """Bytes that the mirror can hold: `limit`, or half of the disk space available to it, since removed files that
        are still open occupy space, too."""
        available = sum(size for _, size, _ in self.list_copies()) + free_at(self.root) - SPARE
        return max(0, min(self.limit, available // 2))

    def list_copies(self) -> list[tuple[float, int, Path]]:
        """(last opening, size in bytes, path) of every copy, oldest first."""
        copies = []
        for path in self.root.glob("??/*"):
            with suppress(FileNotFoundError):
                status, opened = path.stat(), 0.0
                with suppress(FileNotFoundError):
                    opened = self.mark_of(path).stat().st_mtime
                copies.append((opened or status.st_mtime, status.st_size, path))
        return sorted(copies)

    def _make_space(self, needed: int) -> None:
        """Remove the oldest copies until `needed` more bytes fit into the limit and onto the disk.

        Raises:
            NoSpaceError: the disk has no space for them and no copy is left.
        """
        if needed <= self._unlisted and free_at(self.root) >= needed + SPARE:
            self._unlisted -= needed
            return
        part = self.limit // PARTS if needed * PARTS <= self.limit else 0
        self._unlisted = max(0, part - needed)
        copies, limit = self.list_copies(), self.limit - PROCESSES * part
        total = sum(size for _, size, _ in copies)
        for _, size, path in copies:
            if total + needed <= limit and free_at(self.root) >= needed + SPARE:
                return
            self._evict(path)
            total -= size
        if free_at(self.root) < needed:
            raise self._full(needed)

    def _remove_oldest(self, needed: int) -> bool:
        """Remove the oldest copies, `needed` bytes in total if there are so many; returns whether there were any."""
        removed = 0
        for _, size, path in self.list_copies():
            if removed < needed:
                self._evict(path)
                removed += size
        return removed > 0

    def _evict(self, copy: Path) -> None:
        self._remove(copy)
        counters.add(evictions=1)

    @contextmanager
    def _locked(self, digest: str) -> Iterator[None]:
        """Exclusive per lock file among threads and processes; the kernel releases the lock of a process that dies."""
        folder = self.root / "locks"
        lock = folder / digest[:2]
        with cache_errors(lock, self.root):
            make_folder(folder, self.root)
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            share(lock, self.root)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
