"""Pack a snapshot: copy its records, in a shuffled order, into joint shards, so that storage is read in long runs.

`planned` cuts a snapshot into units of about one shard each: runs of a keyed permutation of each bucket. `Packer`
copies the records of a unit into a joint shard and commits it; `assembled` makes the packed snapshot from all units.
Units are committed like those of `encode`, so packing is resumed and shared between processes by the same rules.

The bytes are a function of the snapshot's content and the target size of a shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from sana_pipe.base.errors import CacheError, UserError
from sana_pipe.data.cache import index, layout
from sana_pipe.data.cache.cache import Cache, Unit, WorkList
from sana_pipe.data.cache.codec import PLAIN
from sana_pipe.data.cache.joint import JointWriter, Payload
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.cache.shard import ShardReader
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.cache.snapshot_head import Bucket, BucketPart, Head, PackedOrder, TextPlace
from sana_pipe.data.cache.snapshot_lists import Chunk, ChunkTable, ShardTable
from sana_pipe.data.cache.snapshot_samples import (
    CHUNK_ROWS,
    NAMES,
    ContentDigest,
    Places,
    RecordPlace,
    samples_schema,
    write_chunk,
)
from sana_pipe.data.loader.schedule import permute

OVERHEAD = 1536
"""Bytes of tar and npy headers and padding per member, roughly."""
_SPAN = 1 << 16
"""Rows whose columns are read at a time."""
WINDOW = 4
"""Shards of a bucket that training shuffles together (see pipeline/data/loader/schedule.py)."""
THREADS = 8
"""Records that are read at the same time."""


def folder_of(snapshot: Snapshot, mib: int) -> str:
    """Folder of the plans, units and shards of a pack into shards of about `mib` MiB."""
    return f"{layout.PACKED}{layout.digest('pack', snapshot.head.without_history, str(mib)).hex()}"


def planned(cache: Cache, snapshot: Snapshot, mib: int) -> WorkList:
    """The plan of packing a snapshot into shards of about `mib` MiB; the same for every process.

    Raises:
        UserError: the snapshot is packed already.
    """
    if snapshot.packed:
        raise UserError(
            f"snapshot {snapshot.id} is packed already", fix=f"--snapshot {snapshot.head.parent}, its parent"
        )
    name = folder_of(snapshot, mib)
    while not cache.files.numbers(Paths.plans(name)):
        blocks = block_sizes(snapshot, mib << 20)
        units, row = [], 0
        for run in _runs(snapshot.buckets, blocks):
            row = run.first + run.samples
            for start in range(run.first, row, run.block):
                count = min(run.block, row - start)
                units.append(Unit(layout.digest("unit", name, str(start)).hex(), start, count, 1))
        units.append(Unit(layout.digest("unit", name, "null").hex(), row, 1, 1))
        shuffle = snapshot.head.content_id or name  # so packs of equal content are equal, in any cache
        table = pa.table({"snapshot": [snapshot.id], "mib": [mib], "blocks": [blocks], "shuffle": [shuffle]})
        cache.add_plan(name, 0, units, table)
    return cache.plan(name, 0)


def block_sizes(snapshot: Snapshot, target: int) -> list[int]:
    """Samples per shard of about `target` bytes, for each bucket."""
    sizes = []
    for number, bucket in enumerate(snapshot.buckets):
        total, first = 0, snapshot.row(number, 0)
        for start in range(0, bucket.samples, _SPAN):
            columns = snapshot.columns(np.arange(first + start, first + min(start + _SPAN, bucket.samples)))
            for kind, places in columns.pictures.items():
                total += _stored(places, len(places["shard"]), snapshot.shape(kind, number))
            captions, rows = columns.captions, int(columns.captions["rows"].sum(dtype=np.int64))
            total += _stored(captions, rows, (snapshot.caption.width,))
            total += OVERHEAD * (len(columns.pictures) * len(columns.sample_id) + 2 * len(captions["rows"]))
        sizes.append(min(bucket.samples, max(1, round(target * bucket.samples / total))))
    return sizes


def _stored(places: Places, count: int, shape: tuple[int, ...]) -> int:
    """Bytes of the payloads of some records. count, shape: of their values, if they are stored plain."""
    lengths = places.get("length")
    return 2 * count * math.prod(shape) if lengths is None else int(lengths.sum())


def source_of(cache: Cache, plan: WorkList) -> str:
    """The id of the snapshot that a plan packs."""
    return cache.table(plan.table).column("snapshot")[0].as_py()


def _blocks(cache: Cache, plan: WorkList) -> list[int]:
    """Samples per shard, for each bucket."""
    return cache.table(plan.table).column("blocks")[0].as_py()


def _shuffle(cache: Cache, plan: WorkList) -> str:
    """The key of the permutations. Plans of earlier versions do not state it: it is the name of their folder."""
    table = cache.table(plan.table)
    return table.column("shuffle")[0].as_py() if "shuffle" in table.column_names else plan.encoding


class _Run(NamedTuple):
    """Rows that are shuffled together: a bucket, or a part of it. block: samples per shard."""

    key: tuple[int, int]
    first: int
    samples: int
    block: int


def _runs(buckets: Sequence[Bucket], blocks: list[int]) -> Iterator[_Run]:
    first = 0
    for number, bucket in enumerate(buckets):
        pieces: Sequence[Bucket | BucketPart] = bucket.parts or (bucket,)
        for part, piece in enumerate(pieces):
            yield _Run((number, part), first, piece.samples, blocks[number])
            first += piece.samples


class Packer:
    """Packs units of one plan.

    Args:
        snapshot: what is packed.
    """

    def __init__(self, cache: Cache, snapshot: Snapshot, plan: WorkList):
        self.cache, self.snapshot, self.plan = cache, snapshot, plan
        self._readers = {kind: snapshot.reader(kind, ranged=True) for kind in snapshot.pictures}
        self._texts = snapshot.reader(snapshot.caption.kind, ranged=True)
        self._blocks = _blocks(cache, plan)
        self._shuffle = _shuffle(cache, plan)

    def make(self, plan: WorkList, unit: Unit, progress: Callable[[int, int], None]) -> index.Commit:
        """`pack_unit`, as `work.engine` calls it. progress: called with (samples, 0)."""
        commit = self.pack_unit(unit)
        progress(unit.count, 0)
        return commit

    def pack_unit(self, unit: Unit) -> index.Commit:
        """Copy the records of one unit into a joint shard, each verified, and commit it.

        Raises:
            IntegrityError: a record of the snapshot is damaged.
        """
        snapshot, plan, files = self.snapshot, self.plan, self.cache.files
        with JointWriter(files, plan.encoding, unit.unit, snapshot.head.encodings_by_kind) as writer:
            if unit.start == len(snapshot):
                null = snapshot.null
                writer.add_null(_record(self._texts, null, (null.rows, snapshot.caption.width)), null.valid)
            else:
                self._add_samples(writer, self.rows(unit).tolist())
            made = writer.finish()
        commit = replace(index.commit_of(files, unit.unit, made), records=unit.count)
        index.publish_commit(files, plan.encoding, plan.number, commit)
        return commit

    def restore(self, shard: str) -> bool:
        """Write a damaged or missing shard of the plan again. Returns whether it has the same bytes as before."""
        units = {unit.unit: unit for unit in self.plan.units}
        for commit in index.commits(self.cache.files, self.plan.encoding, self.plan.number):
            if commit.shard == shard:
                return self.pack_unit(units[commit.unit]).shard == shard
        return False

    def rows(self, unit: Unit) -> np.ndarray:
        """Rows of the snapshot that a unit holds, in its order: (n,) int64."""
        for run in _runs(self.snapshot.buckets, self._blocks):
            if run.first <= unit.start < run.first + run.samples:
                places = np.arange(unit.start - run.first, unit.start - run.first + unit.count)
                return run.first + permute(places, run.samples, "pack", self._shuffle, *run.key)
        raise IndexError(f"no bucket holds row {unit.start}")

    def _add_samples(self, writer: JointWriter, rows: list[int]) -> None:
        """Add the samples of some rows, in that order. Their records are read in the order of storage, and all are in
        memory at once."""
        samples = [self.snapshot.sample(row) for row in rows]
        written = [self.snapshot.written(row) for row in rows]
        width = self.snapshot.caption.width

        def picture(i: int, kind: str) -> Payload:
            shape = self.snapshot.shape(kind, samples[i].bucket)
            return _record(self._readers[kind], samples[i].pictures[kind], shape)

        def text(i: int, j: int) -> tuple[Payload, float, str]:
            caption, at = samples[i].captions[j], written[i][j]
            record = _record(self._texts, caption, (caption.rows, width))
            original = self._texts.caption(caption.shard, at["offset"], at["length"], caption.key, at["checksum"])
            return record, caption.weight, original

        reads: list[tuple[str, int, Callable[[], Any], tuple[int, str | int]]] = []
        for i, sample in enumerate(samples):
            for kind, place in sample.pictures.items():
                reads.append((place.shard, place.offset, partial(picture, i, kind), (i, kind)))
            for j, caption in enumerate(sample.captions):
                reads.append((caption.shard, caption.offset, partial(text, i, j), (i, j)))
        reads.sort(key=lambda read: read[:2])
        with ThreadPoolExecutor(THREADS) as pool:
            records = dict(pool.map(lambda read: (read[3], read[2]()), reads))
        for i, (sample, row) in enumerate(zip(samples, rows, strict=True)):
            captions = [records[i, j] for j in range(len(sample.captions))]
            pictures = {kind: records[i, kind] for kind in sample.pictures}
            writer.add(sample.sample_id, pictures, captions, *self.snapshot.source_item(row))


def _record(reader: ShardReader, place: RecordPlace | TextPlace, shape: tuple[int, ...]) -> Payload:
    length = 2 * int(np.prod(shape)) if place.length is None else place.length
    payload = reader.stored(place.shard, place.offset, place.key, place.checksum, length)
    return Payload(place.key, place.checksum, payload, shape, getattr(place, "weight", None))


def assembled(cache: Cache, snapshot: Snapshot, plan: WorkList) -> Head:
    """The head of the packed snapshot; writes its chunks. Every unit must be committed."""
    done = {commit.unit: commit for commit in index.commits(cache.files, plan.encoding, plan.number)}
    commits = [done[unit.unit] for unit in plan.units]
    shards = [str(commit.shard) for commit in commits]
    sizes = [commit.bytes for commit in commits]
    of_text, of_pictures = ShardTable.of(shards, sizes), ShardTable.of(shards[:-1], sizes[:-1])
    null = index.record_table(cache.files, commits[-1]).to_pylist()[0]
    length = null["length"] if snapshot.caption.storage != PLAIN else None
    head, blocks = snapshot.head, _blocks(cache, plan)
    digest = ContentDigest()
    chunks = ChunkTable.of(_chunks(cache, snapshot, commits[:-1], digest))
    packed = replace(
        head,
        parent=snapshot.id,
        policies=replace(head.policies, packed=PackedOrder(WINDOW)),
        buckets=tuple(replace(bucket, block=block) for bucket, block in zip(head.buckets, blocks, strict=True)),
        folder=plan.encoding,
        shards={kind: of_text if kind == snapshot.caption.kind else of_pictures for kind in head.shards},
        null=TextPlace(shards[-1], null["offset"], null["rows"], null["valid"], null["key"], null["checksum"], length),
        chunks=chunks,
    )
    return packed.with_content_id(digest.values())


def _chunks(cache: Cache, snapshot: Snapshot, commits: list[index.Commit], digest: ContentDigest) -> Iterator[Chunk]:
    """Write the rows of all units, cut into chunks. digest: takes them in."""
    schema = samples_schema(snapshot.head.encodings_by_kind.values())
    waiting: list[tuple[pa.Table, pa.Table]] = []
    rows = 0
    for number, commit in enumerate(commits):
        waiting.append(_placed(index.record_table(cache.files, commit), number, schema))
        digest.add(waiting[-1][0])
        rows += waiting[-1][0].num_rows
        while rows >= CHUNK_ROWS or (rows and number == len(commits) - 1):
            samples, names = (pa.concat_tables(tables) for tables in zip(*waiting, strict=True))
            yield write_chunk(cache.files, samples.slice(0, CHUNK_ROWS), names.slice(0, CHUNK_ROWS))
            rows = max(0, rows - CHUNK_ROWS)
            waiting = [(samples.slice(CHUNK_ROWS), names.slice(CHUNK_ROWS))] if rows else []


def _placed(table: pa.Table, shard: int, schema: pa.Schema) -> tuple[pa.Table, pa.Table]:
    """The rows of a joint shard as rows of a snapshot: samples and names. shard: its number in the snapshot."""
    whole = table.combine_chunks()

    def placed(structs: pa.StructArray) -> pa.StructArray:
        children = [structs.field(i) for i in range(structs.type.num_fields)]
        children[structs.type.get_field_index("shard")] = pa.array(np.full(len(structs), shard, np.uint32))
        return pa.StructArray.from_arrays(children, fields=list(structs.type))

    columns = {name: whole.column(name).chunk(0) for name in schema.names}
    for name, column in columns.items():
        if pa.types.is_struct(column.type):
            columns[name] = placed(column)
    lists = columns["captions"]
    columns["captions"] = pa.ListArray.from_arrays(lists.offsets, placed(lists.flatten()), type=lists.type)
    samples = pa.table(list(columns.values()), schema=schema)
    names = pa.table([whole.column({"captions": "written"}.get(name, name)) for name in NAMES.names], schema=NAMES)
    return samples, names


def restored(cache: Cache, name: str) -> bool:
    """Write a damaged or missing joint shard again, from the snapshot that was packed. Returns whether it is restored.

    Args:
        name: of the file, `shards/packed-<id>/<dd>/<digest>.tar`.

    Raises:
        CacheError: that snapshot or the plan is missing or damaged.
    """
    folder, digest = name.split("/")[1], name.rpartition("/")[2].removesuffix(".tar")
    if not cache.files.numbers(Paths.plans(folder)):
        raise CacheError(f"{cache.files.where(name)}: its plan is missing", fix="sana-pipe bucket --pack")
    plan = cache.plan(folder, 0)
    return Packer(cache, Snapshot(cache.files, source_of(cache, plan)), plan).restore(digest)
