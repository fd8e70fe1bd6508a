"""Groups of near-duplicates that an earlier `bucket` found, so that the next compares only hashes that are new.

What: a file in the cache has a digest of each hash and the number of its group, for the hashes of the last `bucket`
with at least `LEAST`. It is derived: one that is missing, damaged or of other rules is made again.
Why exact: near pairs of two hashes do not depend on others. So the hashes of a group that is still whole are joined as
they were, and no two groups that were apart have a near pair. A group that lost a hash is compared anew.
Price: 20 bytes a hash in the file, 65 bytes of memory while groups are looked up.
"""

from __future__ import annotations

import os

import numpy as np
import pyarrow as pa
import xxhash

from sana_pipe.base.disk import cache_errors
from sana_pipe.base.errors import IntegrityError
from sana_pipe.data.cache.files import Files
from sana_pipe.data.cache.keys import SortedKeys, binary, fixed, halves
from sana_pipe.data.cache.layout import content_digest
from sana_pipe.data.cache.shard import from_ipc, write_ipc
from sana_pipe.data.images.perceptual_hash import RULE

PATH = "reports/near-groups.arrow"
LEAST = 4096
"""Hashes from which on groups are stored: fewer are compared in a moment."""
VERSION = "1"
"""A change of what is near requires a change of it."""
_AT_A_TIME = 1 << 16


class GroupMemory:
    """Groups by hash. rules: what they depend on, in words."""

    def __init__(self, distance: int):
        self._rules = f"{VERSION} {RULE} {distance}"
        self._keys, self._groups = SortedKeys.of([]), np.empty(0, np.uint32)
        self._asked: np.ndarray | None = None  # keys of the last question
        self._is_new = False

    @classmethod
    def read(cls, files: Files, distance: int) -> GroupMemory:
        """The groups that a cache stores; without usable ones an empty memory.

        Raises:
            CacheError: the storage cannot be read.
        """
        memory = cls(distance)
        if not files.has_file(PATH):
            return memory
        try:
            table = from_ipc(files.read(PATH), PATH)
        except IntegrityError:  # or it was removed just now
            return memory
        said = table.schema.metadata or {}
        if table.schema.remove_metadata() != _SCHEMA or said.get(b"rules") != memory._rules.encode():
            return memory
        keys, groups = fixed(table.column("key")), table.column("group").to_numpy()
        if said.get(b"digest") == _digest(keys, groups):
            memory._keys, memory._groups = SortedKeys(*halves(keys)), groups
        return memory

    def known(self, unique: np.ndarray) -> np.ndarray:
        """The number of the group of each hash, (n,) int64; -1: it must be compared. unique: (n, 48) uint16, different
        hashes with colours."""
        self._asked = _keys_of(unique)
        at = self._keys.find(self._asked)
        there = at >= 0
        groups = np.full(len(unique), -1, np.int64)
        groups[there] = self._groups[at[there]]
        count = int(self._groups.max(initial=0)) + 1
        whole = np.bincount(groups[there], minlength=count) == np.bincount(self._groups, minlength=count)
        groups[there] = np.where(whole[groups[there]], groups[there], -1)
        self._is_new = not (there.all() and len(self._keys) == len(unique))
        return groups

    def learn(self, roots: np.ndarray) -> None:
        """Take the groups of the hashes that `known` was asked for. roots: (n,) a number of the group of each."""
        if not self._is_new or self._asked is None:
            return
        high, low = halves(self._asked)
        order = np.lexsort((low, high))
        self._keys, self._groups = SortedKeys(high[order], low[order]), roots[order].astype(np.uint32)

    def write(self, files: Files) -> None:
        """Store what was learned, where it differs from what the file has."""
        if not self._is_new or self._asked is None or len(self._keys) < LEAST:
            return
        keys = np.sort(self._asked)
        table = pa.table([binary(keys), pa.array(self._groups)], schema=_SCHEMA)
        said = {"rules": self._rules, "digest": _digest(keys, self._groups)}
        with files.temporary() as temporary:
            with cache_errors(temporary), open(temporary, "xb") as file:
                write_ipc(table.replace_schema_metadata(said), file)
                file.flush()
                os.fsync(file.fileno())
            files.replace(PATH, temporary)
        self._is_new = False


_SCHEMA = pa.schema([pa.field("key", pa.binary(16)), pa.field("group", pa.uint32())])


def _digest(keys: np.ndarray, groups: np.ndarray) -> bytes:
    return content_digest(np.ascontiguousarray(keys).tobytes() + np.ascontiguousarray(groups).tobytes()).encode()


def _keys_of(unique: np.ndarray) -> np.ndarray:
    """A digest of each row, (n,) S16."""
    keys, size = np.empty(len(unique), "S16"), unique.shape[1] * unique.itemsize
    for start in range(0, len(unique), _AT_A_TIME):
        rows = np.ascontiguousarray(unique[start : start + _AT_A_TIME]).tobytes()
        digests = (xxhash.xxh3_128_digest(rows[at : at + size]) for at in range(0, len(rows), size))
        keys[start : start + _AT_A_TIME] = np.frombuffer(b"".join(digests), "S16")
    return keys
