"""The samples of a snapshot: two Arrow tables for each chunk on disk, columns and objects in memory.

One table (`samples_schema`) is what training reads: the place of each record. The other (`NAMES`) is for people.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from sana_pipe.data.cache import layout
from sana_pipe.data.cache.codec import PLAIN
from sana_pipe.data.cache.encodings import Encoding, caption_of, pictures_of
from sana_pipe.data.cache.files import Files
from sana_pipe.data.cache.keys import fixed, key_bytes
from sana_pipe.data.cache.shard import to_ipc
from sana_pipe.data.cache.snapshot_lists import Chunk

CHUNK_ROWS = 1 << 18
"""Rows of a chunk at most."""

_KEY = pa.binary(16)
_PLACE = [("shard", pa.uint32()), ("offset", pa.uint64()), ("key", _KEY), ("checksum", _KEY)]
_LENGTH = ("length", pa.uint64())
_WHERE = ("shard", "offset", "length")
"""Fields that say where the bytes of a record are."""
WRITTEN = pa.struct([("offset", pa.uint64()), ("length", pa.uint32()), ("checksum", _KEY)])
NAMES = pa.schema(
    [("sample_id", pa.uint64()), ("source", pa.string()), ("item", pa.string()), ("captions", pa.list_(WRITTEN))]
)
"""Rows for people, one per sample: where it came from, and where its captions lie in the text shards."""


def samples_schema(encodings: Iterable[Encoding]) -> pa.Schema:
    """Rows that training reads, one per sample: `sample_id`, a struct with the place of its record for each kind of
    picture record (named after the kind), and `captions`, a list of such structs with `rows` and `weight`.

    `shard` is an index into the head's `shards` of that kind. `length` (bytes of the payload) is there where a kind is
    not stored as plain values, `weight` also where records have one (`PictureEncoding.weighted`).
    """
    every = list(encodings)
    caption = caption_of(every)
    weight = ("weight", pa.float32())
    pictures = [(each.kind, _place(each, *([weight] if each.weighted else []))) for each in pictures_of(every)]
    captions = pa.list_(_place(caption, ("rows", pa.uint32()), weight))
    return pa.schema([("sample_id", pa.uint64()), *pictures, ("captions", captions)])


def _place(encoding: Encoding, *more: tuple[str, pa.DataType]) -> pa.StructType:
    return pa.struct([*_PLACE, *([] if encoding.storage == PLAIN else [_LENGTH]), *more])


def picture_keys(samples: pa.Table, kind: str) -> np.ndarray:
    """Keys of the picture records of a kind in a table of samples, S16 (n,)."""
    return fixed(pc.struct_field(samples.column(kind), "key"))


def write_chunk(files: Files | None, samples: pa.Table, names: pa.Table) -> Chunk:
    """Write one chunk: up to `CHUNK_ROWS` rows of `samples_schema` and of `NAMES`, in the same order. files: None: the
    result alone."""
    put = partial(files.put_content, folder_of="tables", suffix="arrow", twice=True) if files else layout.content_digest
    return Chunk(samples.num_rows, put(to_ipc(samples)), put(to_ipc(names)))


class ContentDigest:
    """The digest of what training sees of samples, wherever their records lie: ids, keys and checksums of records, rows
    and weights of captions, in the order of rows.

    Each column has a digest of its own, so that the bounds of chunks decide nothing. Example: a cache whose shards were
    packed, copied to a bucket, or written by eight workers has other `shard` and `offset` columns and the same digest.
    """

    def __init__(self) -> None:
        self._columns: dict[str, xxhash.xxh3_128] = {}

    def add(self, samples: pa.Table) -> None:
        """Take in the next rows, a table of `samples_schema`."""
        for name, column in zip(samples.column_names, samples.columns, strict=True):
            for chunk in column.chunks:
                self._add(name, chunk)

    def _add(self, name: str, values: pa.Array) -> None:
        if pa.types.is_list(values.type):
            self._add(f"{name}.count", values.value_lengths())
            values = values.flatten()
        if not pa.types.is_struct(values.type):
            numbers = fixed(values) if values.type == _KEY else values.to_numpy(zero_copy_only=False)
            state = self._columns.setdefault(name, xxhash.xxh3_128())
            state.update(np.ascontiguousarray(numbers).tobytes())
            return
        for field in values.type:
            if field.name not in _WHERE:
                self._add(f"{name}.{field.name}", values.field(field.name))

    def values(self) -> dict[str, str]:
        """Column -> its digest in hex."""
        return {name: state.hexdigest() for name, state in sorted(self._columns.items())}


@dataclass(frozen=True, kw_only=True)
class RecordPlace:
    """The place of a record. length: bytes of a payload that is not plain values. weight: of the pair that a rejected
    picture is of; None for other records of pictures."""

    shard: str
    offset: int
    key: bytes
    checksum: bytes
    length: int | None = None
    weight: float | None = None


@dataclass(frozen=True, kw_only=True)
class Caption(RecordPlace):
    """The place of a caption's record. rows: its valid rows."""

    rows: int
    weight: float


@dataclass(frozen=True)
class Sample:
    """One sample. pictures: its records by kind."""

    sample_id: int
    bucket: int
    pictures: Mapping[str, RecordPlace]
    captions: tuple[Caption, ...]


Places = dict[str, np.ndarray]
"""Many records as columns, with the names of `RecordPlace` or `Caption`. `shard` is a number; keys and checksums are
S16; `length` is absent where payloads are plain values."""


@dataclass(frozen=True)
class Columns:
    """Many samples as columns.

    Attributes:
        sample_id: (n,) uint64.
        pictures: places of the picture records by kind, (n,) each.
        captions: places of the captions of all samples, in the samples' order; sample i has the rows
            `first[i]:first[i + 1]`.
    """

    sample_id: np.ndarray
    pictures: dict[str, Places]
    captions: Places
    first: np.ndarray

    def take(self, rows: np.ndarray, kinds: Collection[str] | None = None) -> Columns:
        """Some samples ((n,) int64), in that order, with their captions. kinds: of picture records; None: all."""
        begin = self.first[rows].astype(np.int64)
        counts = self.first[rows + 1] - begin
        first = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(counts, out=first[1:])
        caption_rows = np.arange(first[-1]) + np.repeat(begin - first[:-1], counts)
        wanted = self.pictures if kinds is None else kinds
        pictures = {kind: taken(self.pictures[kind], rows) for kind in wanted}
        return Columns(self.sample_id[rows], pictures, taken(self.captions, caption_rows), first)

    @classmethod
    def join(cls, parts: list[Columns]) -> Columns:
        """Concatenate."""
        ends = np.cumsum([0, *(part.first[-1] for part in parts)])
        firsts = [part.first[:-1] + end for part, end in zip(parts, ends[:-1], strict=True)]
        return cls(
            np.concatenate([part.sample_id for part in parts]),
            {kind: concatenated([part.pictures[kind] for part in parts]) for kind in parts[0].pictures},
            concatenated([part.captions for part in parts]),
            np.concatenate([*firsts, ends[-1:]]),
        )


def taken(places: Places, rows: np.ndarray | slice) -> Places:
    """Some rows of all columns."""
    return {name: column[rows] for name, column in places.items()}


def concatenated(parts: list[Places]) -> Places:
    """Rows of several, one after the other."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def columns_of(table: pa.Table) -> Columns:
    """Numpy views of a mapped chunk."""
    whole = table.combine_chunks()
    columns = {name: whole.column(name).chunk(0) for name in whole.schema.names}
    lists, sample_id = columns.pop("captions"), columns.pop("sample_id")
    pictures = {kind: _places(column) for kind, column in columns.items()}
    return Columns(sample_id.to_numpy(), pictures, _places(lists.values), lists.offsets.to_numpy())


def _places(struct: pa.StructArray) -> Places:
    fields = {each.name: struct.field(i) for i, each in enumerate(struct.type)}
    return {
        name: fixed(column) if column.type == _KEY else column.to_numpy(zero_copy_only=False)
        for name, column in fields.items()
    }


def values_at(places: Places, at: int, shards: Sequence[str]) -> dict[str, Any]:
    """A record's place by name."""
    values = {name: key_bytes(c[at]) if c.dtype.kind == "S" else c[at].item() for name, c in places.items()}
    return {**values, "shard": shards[int(places["shard"][at])]}
