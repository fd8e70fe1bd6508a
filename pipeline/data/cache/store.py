"""A store, the place of a cache's files: five operations that write and six that read. A folder (`folder_store`) and
an object store (`object_store`) implement them; `cache.files.Files` is everything else, written once.

Names are relative to the cache, with forward slashes. An operation waits for a place that does not answer, for
`patience_s` seconds at most, and raises `AwayError` then. Errors that do not concern the bytes of a file are
`CacheError` or `ResourceError`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sana_pipe.base.disk import Handle


@dataclass(frozen=True)
class FileEntry:
    """A file of the cache. size: in bytes; modified: in seconds since 1970, by the clock of the store."""

    name: str
    size: int
    modified: float


class Store(Protocol):
    """The operations on files, and what is known of the place.

    Attributes:
        local: a folder of this machine for unfinished files (in `tmp/`) and reports.
        has_ranges: whether `open` works.
    """

    @property
    def local(self) -> Path: ...

    @property
    def has_ranges(self) -> bool: ...

    def where(self, name: str) -> str:
        """The file's full name, for messages."""

    # ------------------------------------------------------------ writing

    def create(self, name: str, data: bytes | Path) -> bool:
        """Publish bytes, or a written and synced local file, under a name that is not taken; whole or not at all.
        Returns False if the name is taken. Bytes are read back, where the store does not compare checksums itself.

        Raises:
            IntegrityError: other bytes are read back.
            CacheError: nothing can be written there.
        """

    def replace(self, name: str, data: bytes | Path) -> None:
        """Write a file, or give its name to a written and synced local file; readers see the old bytes or the new."""

    def move(self, name: str, to: str) -> None:
        """Rename a file, damaged or not."""

    def refresh(self, name: str) -> bool:
        """Set a file's modification time to now. Returns False if the file is missing."""

    def remove(self, name: str, before: float | None = None) -> bool:
        """Remove a file, if it exists. before: only if it was last written or refreshed at or before this time.
        Returns whether it was removed, if `before` is given."""

    # ------------------------------------------------------------ reading

    def read(self, name: str) -> bytes:
        """The bytes of a file. Raises FileNotFoundError, and IntegrityError if the disk cannot read it."""

    def open(self, name: str) -> Handle:
        """A file for reading ranges of it. Raises FileNotFoundError."""

    def fetch(self, name: str, path: Path) -> None:
        """Copy a whole file to a new local file. Raises FileNotFoundError, and OSErrors of writing."""

    def list(self, folder: str) -> list[tuple[str, bool]]:
        """(name, whether it is a folder) of what is in a folder, in any order; an absent folder is empty."""

    def walk(self, folder: str) -> Iterator[FileEntry]:
        """All files below a folder, in the order of their names; an absent folder is empty."""

    def names_below(self, folder: str) -> Iterator[str]:
        """The names of all files below a folder, as `walk`; sizes are not asked for."""

    def stat(self, name: str) -> FileEntry | None:
        """A file's size and time; None if it is missing."""
