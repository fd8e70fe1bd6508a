"""Make a snapshot again without some of its samples, and on the successors of its shards.

Everything else stays: the order of rows, weights, buckets, policies, options. So a snapshot that lost no sample has the
same content id. Nothing is chosen anew, so no other picture comes in: `bucket` with the options does that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.keys import as_keys, fixed
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.cache.rewriting import Successor
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.cache.snapshot_head import Bucket, Head, TextPlace, check_files
from sana_pipe.data.cache.snapshot_lists import Chunk, ChunkTable, ShardTable
from sana_pipe.data.cache.snapshot_samples import NAMES, ContentDigest, picture_keys, write_chunk
from sana_pipe.data.snapshots.assemble import epoch_steps

Successors = Mapping[str, Successor]
"""Shard -> what takes its place."""


@dataclass(frozen=True)
class Changes:
    """The changes in the snapshots of a cache.

    Attributes:
        keys: name of an encoding -> keys of records that go, S16 (n,).
        successors: name of an encoding -> successors of its shards.
        tables: digest of the table of a scan, or of `bucket.metadata` -> that of the table in its place.
        snapshots: id of a snapshot -> that of the one in its place.
    """

    keys: Mapping[str, np.ndarray]
    successors: Mapping[str, Successors]
    tables: Mapping[str, str]
    snapshots: Mapping[str, str]

    def goes(self, snapshot: Snapshot, samples: pa.Table) -> np.ndarray:
        """(n,) bool: which samples have a picture's record that goes."""
        goes = np.zeros(len(samples), bool)
        for kind, encoding in snapshot.pictures.items():
            if len(keys := self.keys.get(encoding.name, ())):
                goes |= np.isin(picture_keys(samples, kind), keys)
        return goes

    def samples_of(self, snapshot: Snapshot) -> np.ndarray:
        """(samples,) bool: `goes` of all samples."""
        return np.concatenate([np.empty(0, bool), *(self.goes(snapshot, samples) for samples in snapshot.tables())])

    def concern(self, head: Head) -> bool:
        """Return whether a head names a shard or a table that is replaced."""
        if any(table in self.tables for table in (*head.sources.values(), head.metadata)):
            return True
        if head.folder is not None:
            return False
        kinds = ((head.shards[kind], self._of_kind(head, kind)) for kind in head.shards)
        return any(shard in shards for shards, successors in kinds for shard in successors)

    def _of_kind(self, head: Head, kind: str) -> Successors:
        return {} if head.folder is not None else self.successors.get(head.encodings_by_kind[kind].name, {})


def remade(cache: Cache, snapshot: Snapshot, changes: Changes) -> str | None:
    """Publish a snapshot without the samples that go; returns its id, None if no sample is left.

    Raises:
        IntegrityError: the snapshot is damaged.
    """
    head, stays = snapshot.head, ~changes.samples_of(snapshot)
    buckets, stays = _buckets(head, stays)
    if not stays.any():
        return None
    lists = {kind: _Shards(shards, changes._of_kind(head, kind)) for kind, shards in head.shards.items()}
    digest = ContentDigest()

    def chunks() -> Iterator[Chunk]:
        first = 0
        for samples, names in zip(snapshot.tables(), snapshot.name_tables(), strict=True):
            mask = pa.array(stays[first : first + len(samples)])
            first += len(samples)
            left = samples.filter(mask).combine_chunks(), names.filter(mask).combine_chunks()
            if len(left[0]):
                rows, named = _placed(*left, lists, snapshot.caption.kind)
                digest.add(rows)
                yield write_chunk(cache.files, rows, named)

    made = replace(
        head,
        buckets=tuple(buckets),
        shards={kind: shards.table for kind, shards in lists.items()},
        null=_null(head.null, lists[snapshot.caption.kind]),
        sources={source: changes.tables.get(table, table) for source, table in head.sources.items()},
        options=_options(head, changes),
        chunks=ChunkTable.of(chunks()),
        parent=None if head.parent is None else changes.snapshots.get(head.parent) or head.parent,
        counts={"samples": int(stays.sum())},
        leaked={changes.snapshots.get(part) or part: count for part, count in (head.leaked or {}).items()} or None,
    ).with_content_id(digest.values())
    made.put_lists(cache.files)
    check_files(cache.files, made)
    cache.files.ensure(Paths.snapshot(made.id), made.sealed())
    return made.id


def _options(head: Head, changes: Changes) -> Mapping[str, Mapping[str, Any]] | None:
    """The options that a snapshot was made with, with the table of `bucket.metadata` as it is now."""
    if head.options is None or head.metadata is None:
        return head.options
    table = changes.tables.get(head.metadata, head.metadata)
    return {**head.options, "bucket": {**head.options["bucket"], "metadata": table}}


def _buckets(head: Head, stays: np.ndarray) -> tuple[list[Bucket], np.ndarray]:
    """The buckets that are left, and which samples are: with `bucket.remainder=drop` no bucket is smaller than a
    batch."""
    buckets, stays, first = list[Bucket](), stays.copy(), 0
    for bucket in head.buckets:
        rows = slice(first, first + bucket.samples)
        first = rows.stop
        samples, parts, visits = int(stays[rows].sum()), None, Fraction(int(stays[rows].sum()))
        if bucket.parts is not None:
            ends = np.cumsum([0, *(part.samples for part in bucket.parts)])
            counts = [int(stays[rows][low:high].sum()) for low, high in pairwise(ends.tolist())]
            left = [replace(part, samples=n) for part, n in zip(bucket.parts, counts, strict=True) if n]
            parts, visits = tuple(left), sum((part.samples * part.weight for part in left), Fraction(0))
        if not samples or (head.policies.small == "drop" and not epoch_steps(visits, bucket.batch, "drop")[0]):
            stays[rows] = False
        else:
            buckets.append(replace(bucket, samples=samples, parts=parts))
    return buckets, stays


class _Shards:
    """A list of shards after the change. numbers: of each of the old shards, (shards,) uint32."""

    def __init__(self, listed: ShardTable, successors: Successors):
        names, sizes = list[str](), list[int]()
        self.numbers, self.moved = np.zeros(len(listed), np.uint32), dict[int, Successor]()
        for number, (name, size) in enumerate(zip(listed, listed.sizes.tolist(), strict=True)):
            successor = successors.get(name)
            if successor is not None:
                self.moved[number] = successor
                if successor.shard is None:
                    continue
                name, size = successor.shard, successor.bytes
            self.numbers[number] = len(names)
            names.append(name)
            sizes.append(size)
        self.successors, self.table = successors, ShardTable.of(names, sizes)

    def moves(self, structs: pa.StructArray, values: np.ndarray, column: str) -> np.ndarray:
        """Values (n,) of places in a shard, moved to where `column` of the record tables has them now."""
        shards, keys, values = structs.field("shard").to_numpy(), fixed(structs.field("key")), values.copy()
        for number, successor in self.moved.items():
            rows = np.flatnonzero(shards == number)
            if len(rows):
                values[rows] = successor.places(keys[rows], column)
        return values

    def placed(self, structs: pa.StructArray) -> pa.StructArray:
        """Places of records, with the numbers and offsets of now."""
        new = {
            "shard": pa.array(self.numbers[structs.field("shard").to_numpy()]),
            "offset": pa.array(self.moves(structs, structs.field("offset").to_numpy(), "offset")),
        }
        fields = list(structs.type)
        children = [new.get(field.name, structs.field(field.name)) for field in fields]
        return pa.StructArray.from_arrays(children, fields=fields)


def _placed(samples: pa.Table, names: pa.Table, lists: Mapping[str, _Shards], text: str) -> tuple[pa.Table, pa.Table]:
    """Rows of a snapshot, with the places of now. Both tables are in one piece. text: the kind of captions."""
    columns = {name: samples.column(name).chunk(0) for name in samples.column_names}
    captions, written = columns["captions"], names.column("captions").chunk(0)
    structs, where = captions.flatten(), written.flatten()
    offsets = lists[text].moves(structs, where.field("offset").to_numpy(), "caption_offset")
    fields = list(where.type)
    children = [pa.array(offsets) if f.name == "offset" else where.field(f.name) for f in fields]
    moved = pa.StructArray.from_arrays(children, fields=fields)
    for kind, shards in lists.items():
        if kind != text:
            columns[kind] = shards.placed(columns[kind])
    columns["captions"] = _lists(captions, lists[text].placed(structs))
    named = names.set_column(NAMES.get_field_index("captions"), NAMES.field("captions"), _lists(written, moved))
    return pa.table(list(columns.values()), schema=samples.schema), named


def _lists(before: pa.ListArray, values: pa.StructArray) -> pa.ListArray:
    """Lists of the same lengths with other values."""
    counts = before.value_lengths().to_numpy()
    return pa.ListArray.from_arrays(
        pa.array(np.append(0, np.cumsum(counts)).astype(np.int32)), values, type=before.type
    )


def _null(null: TextPlace, shards: _Shards) -> TextPlace:
    successor = shards.successors.get(null.shard)
    if successor is None or successor.shard is None:
        return null
    [offset] = successor.places(as_keys([null.key])).tolist()
    return replace(null, shard=successor.shard, offset=int(offset))
