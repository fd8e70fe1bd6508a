"""A cache in an object store as one listing finds it, for `status`: a file is read again only if the listing says that
it has changed.

What was read is kept in a file on this machine, and the commands that change a cache join it to one object
(`Paths.LISTED`). Both are copies and no second truth: an entry is used only for a file that the listing still shows
with the same mark, so writers need no lock, and a lost or outdated file costs requests, not correctness.
Price: S3 lists 1,000 files a request.
"""

from __future__ import annotations

import copy
import hashlib
import os
import zlib
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pyarrow as pa

from sana_pipe.base.errors import CacheError, IntegrityError
from sana_pipe.data.cache import layout
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.files import Files
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.cache.object_store import ObjectStore
from sana_pipe.data.cache.shard import from_ipc, to_ipc
from sana_pipe.data.cache.store import FileEntry

SMALL = 1 << 20
"""Bytes of a table that is kept, at most."""
TOGETHER = 64 << 20
"""Bytes of all entries that are kept, at most."""
_MARKS = ("ETag", "etag", "md5Hash", "generation")
"""Keys in the description of a file for what changes with its bytes; drivers differ."""

Entries = dict[str, tuple[str, bytes]]
"""File -> the mark that a listing showed, and its bytes."""


def listed(cache: Cache) -> Cache:
    """The cache as one listing finds it now; a cache on a disk or behind a web server itself."""
    store = cache.files.store
    if not isinstance(store, ObjectStore) or store.connection.is_web:
        return cache
    view = copy.copy(cache)
    view.files = ListedFiles(cache.files, _Listing(store))
    return view


class _Listing(ObjectStore):
    """The files of a store as one listing found them."""

    def __init__(self, origin: ObjectStore):
        vars(self).update(vars(origin))
        self.infos = origin._below("")
        self._names = sorted(self.infos)

    def _below(self, folder: str) -> dict[str, dict[str, Any]]:
        return {name: self.infos[name] for name in self._each(folder)}

    def _each(self, folder: str) -> Iterator[str]:
        prefix = f"{folder}/" if folder else ""
        for number in range(bisect_left(self._names, prefix), len(self._names)):
            if not self._names[number].startswith(prefix):
                return
            yield self._names[number]

    def list(self, folder: str) -> list[tuple[str, bool]]:
        start = len(folder) + 1 if folder else 0
        parts = (name[start:].partition("/") for name in self._each(folder))
        return list(dict.fromkeys((name, bool(slash)) for name, slash, _ in parts))

    def stat(self, name: str) -> FileEntry | None:
        info = self.infos.get(name)
        return None if info is None else self._entry(name, info)

    def mark(self, name: str) -> str | None:
        """Return what changes with the bytes of a file; None: there is no such file."""
        entry = self.stat(name)
        if entry is None:
            return None
        info = self.infos[name]
        return f"{entry.size} {next((info[key] for key in _MARKS if info.get(key)), entry.modified)}"


class ListedFiles(Files):
    """Files as a listing found them, for reading.

    Args:
        origin: the files.
        listing: of them.

    Attributes:
        entries: files that were read; damaged and missing ones are read again each time.
    """

    def __init__(self, origin: Files, listing: _Listing):
        vars(self).update(vars(origin))
        self.store = self._listing = listing
        self.damage, self.readers = {}, WeakSet()
        self._kept: Entries = {}
        self._joined: Entries | None = None
        with suppress(OSError, CacheError):  # nothing is kept yet
            self._kept = unpacked(_local(self).read_bytes())
        self.entries: Entries = {name: entry for name, entry in self._kept.items() if name == Paths.LISTED}

    def read(self, name: str) -> bytes:
        mark = self._listing.mark(name)
        if mark is None:
            raise self._missing(name)
        for entries in (self.entries, self._kept):
            if (known := entries.get(name)) is not None and known[0] == mark:
                break
        else:
            known = self._joined_entry(name, mark) or (mark, super().read(name))
        if mark.startswith(f"{len(known[1])} "):  # else it was written since the listing
            self.entries[name] = known
        return known[1]

    def _joined_entry(self, name: str, mark: str) -> tuple[str, bytes] | None:
        """The entry of a file in the object that writers join; one that this machine has read is not read again."""
        if name.startswith("claims/"):
            return None
        if self._joined is None:
            self._joined, now = {}, self._listing.mark(Paths.LISTED)
            if now is not None and self._kept.get(Paths.LISTED) != (now, b""):
                with suppress(IntegrityError):
                    self._joined = unpacked(super().read(Paths.LISTED))
                self.entries[Paths.LISTED] = now, b""
        known = self._joined.get(name)
        return known if known is not None and known[0] == mark else None

    def mapped(
        self, name: str, digest: str, *, mirrored: bool = False, checked: dict[str, tuple[int, ...]] | None = None
    ) -> pa.Buffer:
        entry = self.store.stat(name)
        if entry is not None and entry.size <= SMALL and layout.content_digest(data := self.read(name)) == digest:
            return pa.py_buffer(data)
        return super().mapped(name, digest, mirrored=mirrored, checked=checked)

    def keep(self) -> None:
        """Keep what was read for the next listing, on this machine. Without space or permission it is read again."""
        if self.entries == self._kept:
            return
        with suppress(OSError, CacheError), self.temporary() as path:
            path.write_bytes(packed(self.entries))
            _local(self).parent.mkdir(exist_ok=True)
            os.replace(path, _local(self))

    def join(self) -> None:
        """Publish what was read as one object, for listings of other machines. Where that fails, they read each file,
        and this command has done its work nevertheless."""
        passing = (Paths.LISTED, "claims/")
        data = packed({name: entry for name, entry in self.entries.items() if not name.startswith(passing)})
        if hashlib.md5(data, usedforsecurity=False).hexdigest() not in (self._listing.mark(Paths.LISTED) or ""):
            with suppress(OSError, CacheError):
                self.replace(Paths.LISTED, data)


def discard(files: Files) -> None:
    """Remove both copies of what was read: a takedown must leave nothing. Those of other machines end with their next
    `status`."""
    files.remove(Paths.LISTED)
    with suppress(OSError):
        _local(files).unlink()


def _local(files: Files) -> Path:
    return files.store.local / "listed" / layout.digest(files.where("")).hex()


def packed(entries: Entries) -> bytes:
    """Entries as bytes: the digest (hex) of what follows, then a compressed Arrow table."""
    rows, room = list[tuple[str, str, bytes]](), TOGETHER
    for name, (mark, data) in sorted(entries.items()):
        room -= len(data)
        rows += [(name, mark, data)] if room >= 0 else []
    kinds = (pa.string(), pa.string(), pa.binary())
    columns = (pa.array([row[number] for row in rows], kind) for number, kind in enumerate(kinds))
    body = zlib.compress(to_ipc(pa.table(list(columns), ["name", "mark", "data"])))
    return layout.content_digest(body).encode() + body


def unpacked(data: bytes) -> Entries:
    """Return entries from the bytes of `packed`; none of damaged bytes, or of another version's."""
    digest, body = data[:32], data[32:]
    if not body or layout.content_digest(body).encode() != digest:
        return {}
    table = from_ipc(zlib.decompress(body), Paths.LISTED)
    if table.column_names != ["name", "mark", "data"]:
        return {}
    return {row["name"]: (row["mark"], row["data"]) for row in table.to_pylist()}
