"""The mirror: copies of content-addressed objects on this machine's disk, bounded, checked, shared by its processes.

What: `Mirror.open` gives an object's bytes as an open file. A copy is fetched once, whole, whoever of the processes
asks first; its digest is compared with its name at every opening; a damaged copy is fetched again.
Why: records are then read with preadv exactly as from a local cache, an object store sees few large sequential reads
instead of many small ones, and a broken disk heals itself from the origin.
It takes no space that the disk does not have: the copies that were opened longest ago go when the bound is reached or
less than `SPARE` bytes of the disk stay free, and only then is it an error.
Price: a random order over far more shards than the mirror holds fetches shards again and again: give it the room
(`mirror.gib`), or train from a packed snapshot, which is read in the order in which it lies there. Copies being fetched
come on top of the bound, one per thread; so do those that were removed and are still open.

The copies that were opened longest ago go first. A file that is removed while it is being read stays readable for who
has it open.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path, PurePosixPath

from pipeline.cache.local_files import Handle, cache_errors, digest_of, free_at, sweep_in, temporary_in
from pipeline.errors import CacheError, NoSpaceError

SPARE = 256 << 20
"""Bytes of the disk that copies leave free, as long as there is another copy to remove."""


class Mirror:
    """A folder of copies.

    Args:
        root: the folder; made when it is first needed.
        limit: how many bytes of copies may be there.
    """

    def __init__(self, root: Path, limit: int):
        self.root, self.limit = root, limit

    def open(self, name: str, size: Callable[[], int], fetch: Callable[[Path], None]) -> Handle:
        """An object's bytes.

        Args:
            name: of the object; its last part is the digest of its bytes, and a suffix.
            size: gives its size in bytes; asked only if it has to be fetched.
            fetch: writes the object into a file.

        Returns:
            An open file. If the origin itself does not match its name, what it holds, and no copy is kept: who reads a
            record of it checks that record.

        Raises:
            CacheError: it is larger than the bound.
            NoSpaceError: the disk is full, though no other copy is left. And whatever `size` and `fetch` raise.
        """
        last = PurePosixPath(name)
        copy = self.root / last.stem[:2] / last.name
        with self._locked(last.stem):
            with suppress(OSError):  # it is not there, or the disk cannot read it: it is fetched anew
                handle = Handle(os.open(copy, os.O_RDONLY))
                if digest_of(handle) == last.stem:
                    os.utime(copy)
                    return handle
            needed = size()
            if needed > self.limit:
                raise CacheError(
                    f"{name}: is larger than the whole mirror {self.root}",
                    expected=f"at most {self.limit:,} bytes",
                    found=f"{needed:,} bytes",
                    fix=f"set mirror.gib to more than {needed / 2**30:.3f}",
                )
            with self._locked("room"):
                self._make_room(needed, disk=True)
            with self.temporary() as path:
                self._fetched(fetch, path, needed)
                with cache_errors(path):
                    handle = Handle(os.open(path, os.O_RDONLY))
                    if digest_of(handle) == last.stem:
                        copy.parent.mkdir(parents=True, exist_ok=True)
                        with self._locked("room"):
                            self._make_room(needed, spared=copy)
                            os.replace(path, copy)
            return handle

    def _fetched(self, fetch: Callable[[Path], None], path: Path, needed: int) -> None:
        """Fetch into a file. If others filled the disk meanwhile, copies are removed for it, as long as there are any.

        Raises:
            NoSpaceError: nothing is left to remove.
        """
        while True:
            try:
                with cache_errors(path):
                    return fetch(path)
            except NoSpaceError:
                path.unlink(missing_ok=True)
                with self._locked("room"):
                    if not self._remove_oldest(needed):
                        raise self._full(needed) from None

    def _full(self, needed: int) -> NoSpaceError:
        return NoSpaceError(
            f"{self.root}: the mirror's disk is full",
            expected=f"{needed:,} bytes free",
            found=f"{free_at(self.root):,} bytes, and no copy that could be removed",
            fix=f"free space on the disk of {self.root}, or set mirror.path to a folder on another one",
        )

    def drop(self, name: str) -> None:
        """Forget the copy of an object."""
        last = PurePosixPath(name)
        (self.root / last.stem[:2] / last.name).unlink(missing_ok=True)

    def temporary(self) -> AbstractContextManager[Path]:
        """A path that nobody else uses; removed at the end if still there."""
        return temporary_in(self.root / "tmp")

    def sweep(self) -> int:
        """Remove unfinished files that no living process can own. Returns how many."""
        return sweep_in(self.root / "tmp")

    @property
    def room(self) -> int:
        """Bytes of copies that can be here at a time: `limit`, or half of what the disk has for them, since those that
        were removed and are still open take up space, too."""
        available = sum(size for _, size, _ in self._copies()) + free_at(self.root) - SPARE
        return max(0, min(self.limit, available // 2))

    def _copies(self) -> list[tuple[float, int, Path]]:
        """(when it was opened last, bytes, path) of every copy, oldest first."""
        copies = []
        for path in self.root.glob("??/*"):
            with suppress(FileNotFoundError):
                found = path.stat()
                copies.append((found.st_mtime, found.st_size, path))
        return sorted(copies)

    def _make_room(self, needed: int, *, spared: Path | None = None, disk: bool = False) -> None:
        """Remove the oldest copies until `needed` more bytes stay within the bound.

        Args:
            spared: a copy that is about to be replaced.
            disk: the bytes are still to be written, so they have to fit onto the disk, too.

        Raises:
            NoSpaceError: they do not, though no copy is left.
        """
        copies = self._copies()
        total = sum(size for _, size, _ in copies)
        for _, size, path in copies:
            if total + needed <= self.limit and not (disk and free_at(self.root) < needed + SPARE):
                return
            if path != spared:
                path.unlink(missing_ok=True)
            total -= size
        if disk and free_at(self.root) < needed:
            raise self._full(needed)

    def _remove_oldest(self, needed: int) -> bool:
        """Remove copies of `needed` bytes together, or all; returns whether there were any."""
        removed = 0
        for _, size, path in self._copies():
            if removed < needed:
                path.unlink(missing_ok=True)
                removed += size
        return removed > 0

    @contextmanager
    def _locked(self, digest: str) -> Iterator[None]:
        """One process and thread at a time per lock file; the system lets go of it if its holder dies."""
        folder = self.root / "locks"
        with cache_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder / digest[:2], os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
