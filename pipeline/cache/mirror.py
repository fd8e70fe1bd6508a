"""The mirror: copies of content-addressed objects on this machine's disk, bounded, checked, shared by its processes.

What: `Mirror.open` gives an object's bytes as an open file. A copy is fetched once, whole, whoever of the processes
asks first; its digest is compared with its name at every opening; a damaged copy is fetched again.
Why: records are then read with preadv exactly as from a local cache, an object store sees few large sequential reads
instead of many small ones, and a broken disk heals itself from the origin.
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

from pipeline.cache.files import Handle, digest_of, explained, sweep_in, temporary_in
from pipeline.errors import CacheError


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
            CacheError: there is no room for it. And whatever `size` and `fetch` raise.
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
                    f"{name}: is larger than the whole mirror {self.root}", expected=f"at most {self.limit:,} bytes",
                    found=f"{needed:,} bytes", fix=f"set mirror.gib to more than {needed / 2**30:.3f}",
                )  # fmt: skip
            with self.temporary() as path:
                with explained(path):
                    fetch(path)
                    handle = Handle(os.open(path, os.O_RDONLY))
                    if digest_of(handle) == last.stem:
                        copy.parent.mkdir(parents=True, exist_ok=True)
                        with self._locked("room"):
                            self._make_room(needed, spared=copy)
                            os.replace(path, copy)
            return handle

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

    def _make_room(self, needed: int, spared: Path) -> None:
        copies = []
        for path in self.root.glob("??/*"):
            with suppress(FileNotFoundError):
                found = path.stat()
                copies.append((found.st_mtime, found.st_size, path))
        total = sum(size for _, size, _ in copies)
        for _, size, path in sorted(copies):
            if total + needed <= self.limit:
                break
            if path != spared:
                path.unlink(missing_ok=True)
            total -= size

    @contextmanager
    def _locked(self, digest: str) -> Iterator[None]:
        """One process and thread at a time per lock file; the system lets go of it if its holder dies."""
        folder = self.root / "locks"
        with explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder / digest[:2], os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
