"""Names in tables that are URLs: objects of stores (`s3://BUCKET/NAME`) are read as files are, with the user's
credentials; pictures on web servers are not (`web_tables`).
"""

from __future__ import annotations

import posixpath
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from sana_pipe.base.urls import strip_credentials
from sana_pipe.data.cache.scratch import Scratch
from sana_pipe.data.sources.filenames import is_url, unsafe_reason
from sana_pipe.data.sources.filesystem import Filesystem, Unreadable
from sana_pipe.data.sources.remote import RemoteFilesystem

STORES = ("s3", "s3a", "gs", "gcs", "hf", "az", "abfs", "abfss")
"""Schemes of stores."""


def is_object(name: str) -> bool:
    """Return whether a name is the URL of an object of a store."""
    return name.partition("://")[0].strip().lower() in STORES and is_url(name)


def split(url: str) -> tuple[str, str]:
    """The bucket or repository of an object as a URL, and the name in it."""
    scheme, _, rest = url.strip().partition("://")
    parts = rest.split("/")
    count = 1
    if scheme.lower() == "hf":  # hf://OWNER/NAME, hf://datasets/OWNER/NAME
        count = 3 if parts[0] in ("datasets", "spaces", "models") else 2
    return f"{scheme.lower()}://{'/'.join(parts[:count])}", "/".join(parts[count:])


class WithObjects(Filesystem):
    """A filesystem whose names may also be URLs of objects of stores. Each bucket is opened once.

    Args:
        files: of the other names.
        patience_s: how long to wait for a store that does not answer.
    """

    def __init__(self, files: Filesystem, patience_s: float):
        self.files, self.location, self._patience_s = files, files.location, patience_s
        self._stores: dict[str, RemoteFilesystem] = {}
        self._lock = threading.Lock()
        self._names_objects = False

    def _at(self, name: str) -> tuple[Filesystem, str]:
        """The filesystem of a name, and the name there."""
        if not is_object(name):
            return self.files, name
        bucket, inner = split(name)
        with self._lock:
            if bucket not in self._stores:
                self._stores[bucket] = RemoteFilesystem(bucket, self._patience_s)
            return self._stores[bucket], inner

    @property
    def is_remote(self) -> bool:
        return self._names_objects or bool(self._stores) or self.files.is_remote

    @property
    def roots(self) -> tuple[str, ...]:
        return self.files.roots

    def full_name(self, name: str) -> str:
        return name if is_object(name) else self.files.full_name(name)

    def key(self, name: str, folder: str) -> str:
        """Return the key of the other filesystem; of an object that is not below its root, the URL."""
        url = name if is_url(name) else posixpath.join(folder, name)
        if not is_object(url) or self.is_below(url):
            return self.files.key(name, folder)
        bucket, inner = split(url)
        if strip_credentials(url) != url:
            raise ValueError("is a URL with credentials or a query, which would be written into the cache")
        if problem := unsafe_reason(inner):
            raise ValueError(problem)
        self._names_objects = True
        return f"{bucket}/{inner}"

    def find(self) -> Iterator[str]:
        return self.files.find()

    def find_top_first(self) -> Iterator[str]:
        return self.files.find_top_first()

    def find_with_sizes(self, scratch: Scratch) -> Iterator[str]:
        return self.files.find_with_sizes(scratch)

    def names(self, folder: str) -> list[str]:
        return self.files.names(folder)

    def stat(self, name: str) -> tuple[int, int]:
        files, inner = self._at(name)
        return files.stat(inner)

    def read(self, name: str, limit: int | None = None) -> bytes:
        files, inner = self._at(name)
        return files.read(inner, limit)

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        files, inner = self._at(name)
        return files.read_range(inner, offset, length)

    def open(self, name: str, spool: bool = False) -> BinaryIO:
        files, inner = self._at(name)
        return files.open(inner, spool)

    def read_many(self, names: list[str], limit: int) -> list[bytes | Unreadable]:
        if any(map(is_object, names)):
            return super().read_many(names, limit)
        return self.files.read_many(names, limit)

    def stat_many(self, names: Iterable[str]) -> dict[str, tuple[int, int] | Unreadable]:
        grouped: dict[Filesystem, dict[str, str]] = defaultdict(dict)
        for name in names:
            files, inner = self._at(name)
            grouped[files][inner] = name
        stats: dict[str, tuple[int, int] | Unreadable] = {}
        for files, by_inner in grouped.items():
            stats |= {by_inner[inner]: stat for inner, stat in files.stat_many(by_inner).items()}
        return stats

    def refresh(self) -> None:
        self.files.refresh()
        with self._lock:
            self._stores.clear()
