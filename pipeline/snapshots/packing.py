"""Packing: a snapshot whose records lie in joint shards, in a shuffled order, so that storage is read in long runs.

What: `planned` cuts a snapshot into units of about one shard each: runs of a keyed permutation of each bucket. `Packer`
copies the records of a unit into a joint shard and commits it; `assembled` makes the packed snapshot of all units.
Why: a random order over shards that lie in the order of encoding fetches every shard again and again, unless all of
them fit into the mirror. Records in a shuffled order need only a shuffle of blocks (`pipeline.loader.schedule`).
Units are committed like those of `encode`, so packing is resumed, shared and taken over by the same rules.
Price: the cache holds every packed record twice. Each record is read by itself (an object store is asked for ranges);
one shard at a time is held in memory. In training every machine reads a part of each batch, so every machine fetches
every shard.

The bytes are a function of the snapshot's content and the target size of a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.cache import index, layout
from pipeline.cache.codec import PLAIN
from pipeline.cache.joint import JointWriter, Record
from pipeline.cache.layout import Paths
from pipeline.cache.shard import from_ipc
from pipeline.cache.snapshot import CHUNK_ROWS, NAMES, Snapshot, chunk, samples_schema
from pipeline.cache.store import Cache, Plan, Unit
from pipeline.errors import CacheError, IntegrityError, UserError
from pipeline.loader.schedule import permute

OVERHEAD = 1536
"""Bytes of tar and npy headers and padding per member, about."""
_SPAN = 1 << 16


def planned(cache: Cache, snapshot: Snapshot, mib: int) -> Plan:
    """The plan of packing a snapshot into shards of about `mib` MiB; the same for every process.

    Raises:
        UserError: the snapshot is packed already.
    """
    if snapshot.packed:
        raise UserError(
            f"snapshot {snapshot.id} is packed already", fix=f"--snapshot {snapshot.head['parent']}, its parent"
        )
    content = layout.canonical({**snapshot.head, "parent": None})
    name = f"{layout.PACKED}{layout.digest('pack', content, str(mib)).hex()}"
    while not cache.files.numbers(Paths.plans(name)):
        blocks = block_sizes(snapshot, mib << 20)
        units, row = [], 0
        for _, first, samples, block in _runs(snapshot.head, blocks):
            for start in range(first, first + samples, block):
                count = min(block, first + samples - start)
                units.append(Unit(layout.digest("unit", name, str(start)).hex(), start, count, 1))
            row = first + samples
        units.append(Unit(layout.digest("unit", name, "null").hex(), row, 1, 1))
        table = pa.table({"snapshot": [snapshot.id], "mib": [mib], "blocks": [blocks]})
        cache.add_plan(name, 0, units, table)
    return cache.plan(name, 0)


def block_sizes(snapshot: Snapshot, target: int) -> list[int]:
    """Samples per shard of about `target` bytes, for each bucket."""
    recipe, width = snapshot.latent_recipe, snapshot.text_recipe.width
    sizes = []
    for number, bucket in enumerate(snapshot.buckets):
        pixels = (bucket.height // recipe.compression) * (bucket.width // recipe.compression)
        total, first = 0, snapshot.row(number, 0)
        for start in range(0, bucket.samples, _SPAN):
            rows = np.arange(first + start, first + min(start + _SPAN, bucket.samples))
            found = snapshot.columns(rows)
            latents, texts = found.samples.get("length"), found.captions.get("length")
            total += 2 * recipe.channels * pixels * len(rows) if latents is None else int(latents.sum())
            total += int((found.captions["rows"].astype(np.int64) * width * 2 if texts is None else texts).sum())
            total += OVERHEAD * (len(rows) + 2 * len(found.captions["rows"]))
        sizes.append(min(bucket.samples, max(1, round(target * bucket.samples / total))))
    return sizes


def source_of(cache: Cache, plan: Plan) -> str:
    """The id of the snapshot that a plan packs."""
    return cache.table(plan.table).column("snapshot")[0].as_py()


def _runs(head: dict[str, Any], blocks: list[int]) -> Iterator[tuple[tuple[int, int], int, int, int]]:
    """What is shuffled together, in the order of rows: ((bucket, part), first row, samples, samples per shard)."""
    first = 0
    for number, bucket in enumerate(head["buckets"]):
        for part, own in enumerate(bucket.get("parts", [bucket])):
            yield (number, part), first, own["samples"], blocks[number]
            first += own["samples"]


class Packer:
    """Packs units of one plan.

    Args:
        snapshot: what is packed.
        threads: how many records are read at the same time.
    """

    def __init__(self, cache: Cache, snapshot: Snapshot, plan: Plan, threads: int = 8):
        self.cache, self.snapshot, self.plan, self.threads = cache, snapshot, plan, threads
        self._latents = snapshot.reader("latent", ranged=True)
        self._texts = snapshot.reader("text", ranged=True)
        self._blocks = cache.table(plan.table).column("blocks")[0].as_py()

    def make(self, plan: Plan, unit: Unit, progress: Callable[[int, int], None]) -> index.Commit:
        """Copy the records of one unit, each verified, and commit it. `progress`: told of (samples, 0).

        Raises:
            IntegrityError: a record of the snapshot is damaged.
        """
        own, files = self.snapshot, self.cache.files
        with JointWriter(files, plan.recipe, unit.unit, own.latent_recipe, own.text_recipe) as writer:
            if unit.start == len(own):
                writer.add_null(self._null(), int(own.null["valid"]))
            else:
                for sample in self._samples(unit):
                    writer.add(*sample)
            name, size, table = writer.finish()
        digest = files.put_content(index.table_bytes(table), "tables", "arrow")
        commit = index.Commit(unit.unit, name, size, unit.count, digest, (), {})
        index.publish_commit(files, plan.recipe, plan.number, commit)
        progress(unit.count, 0)
        return commit

    def restore(self, shard: str) -> bool:
        """Write a damaged or missing shard of the plan again. Returns whether it is right now."""
        units = {unit.unit: unit for unit in self.plan.units}
        for commit in index.commits(self.cache.files, self.plan.recipe, self.plan.number):
            if commit.shard == shard:
                return self.make(self.plan, units[commit.unit], lambda made, rejected: None).shard == shard
        return False

    def rows(self, unit: Unit) -> np.ndarray:
        """Rows of the snapshot that a unit holds, in its order: (n,) int64."""
        for key, first, samples, _ in _runs(self.snapshot.head, self._blocks):
            if first <= unit.start < first + samples:
                places = np.arange(unit.start - first, unit.start - first + unit.count)
                return first + permute(places, samples, "pack", self.plan.recipe, *key)
        raise IndexError(f"no bucket holds row {unit.start}")

    def _samples(self, unit: Unit) -> list[tuple[int, Record, list[tuple[Record, float, str]], str, str]]:
        recipe, width = self.snapshot.latent_recipe, self.snapshot.text_recipe.width
        rows = self.rows(unit).tolist()
        samples = [self.snapshot.sample(row) for row in rows]
        places = [self.snapshot.written(row) for row in rows]
        wanted: list[tuple[str, int, Callable[[], tuple[Any, Any]]]] = []

        def text(i: int, j: int) -> tuple[Any, Any]:
            own, at = samples[i].captions[j], places[i][j]
            length = own.rows * width * 2 if own.length is None else own.length
            payload = self._texts.stored(own.shard, own.offset, own.key, own.checksum, length)
            said = self._texts.caption(own.shard, at["offset"], at["length"], own.key, at["checksum"])
            return (i, j), (Record(own.key, own.checksum, payload, (own.rows, width)), own.weight, said)

        def latent(i: int) -> tuple[Any, Any]:
            own, bucket = samples[i], self.snapshot.buckets[samples[i].bucket]
            shape = (recipe.channels, bucket.height // recipe.compression, bucket.width // recipe.compression)
            length = 2 * int(np.prod(shape)) if own.length is None else own.length
            payload = self._latents.stored(own.shard, own.offset, own.key, own.checksum, length)
            return (i, -1), Record(own.key, own.checksum, payload, shape)

        for i, sample in enumerate(samples):
            wanted.append((sample.shard, sample.offset, lambda i=i: latent(i)))  # type: ignore[misc]
            for j, caption in enumerate(sample.captions):
                wanted.append((caption.shard, caption.offset, lambda i=i, j=j: text(i, j)))  # type: ignore[misc]
        wanted.sort(key=lambda own: own[:2])
        with ThreadPoolExecutor(self.threads) as pool:
            found = dict(pool.map(lambda own: own[2](), wanted))
        return [
            (
                sample.sample_id,
                found[i, -1],
                [found[i, j] for j in range(len(sample.captions))],
                *self.snapshot.origin(row),
            )
            for i, (sample, row) in enumerate(zip(samples, rows, strict=True))
        ]

    def _null(self) -> Record:
        null, width = self.snapshot.null, self.snapshot.text_recipe.width
        key, checksum = bytes.fromhex(null["key"]), bytes.fromhex(null["checksum"])
        length = null.get("length") or null["rows"] * width * 2
        payload = self._texts.stored(null["shard"], null["offset"], key, checksum, length)
        return Record(key, checksum, payload, (null["rows"], width))


def assembled(cache: Cache, snapshot: Snapshot, plan: Plan, window: int) -> dict[str, Any]:
    """The head of the packed snapshot, its chunks written. Every unit must be committed.

    Args:
        window: blocks that are shuffled together while training.
    """
    done = {commit.unit: commit for commit in index.commits(cache.files, plan.recipe, plan.number)}
    commits = [done[unit.unit] for unit in plan.units]
    shards = [{"name": commit.shard, "bytes": commit.bytes} for commit in commits]
    latent, text = snapshot.latent_recipe, snapshot.text_recipe
    blocks = cache.table(plan.table).column("blocks")[0].as_py()
    null = _table(cache, commits[-1]).to_pylist()[0]
    chunks: list[dict[str, Any]] = []
    waiting: list[tuple[pa.Table, pa.Table]] = []

    def write(rows: int) -> None:
        samples, names = (pa.concat_tables(own) for own in zip(*waiting, strict=True))
        chunks.append(chunk(cache.files, samples.slice(0, rows), names.slice(0, rows)))
        waiting[:] = [(samples.slice(rows), names.slice(rows))] if rows < samples.num_rows else []

    for number, commit in enumerate(commits[:-1]):
        waiting.append(_placed(_table(cache, commit), number, samples_schema(latent, text)))
        while sum(own.num_rows for own, _ in waiting) >= CHUNK_ROWS:
            write(CHUNK_ROWS)
    if waiting:
        write(sum(own.num_rows for own, _ in waiting))
    return {
        **snapshot.head,
        "parent": snapshot.id,
        "policies": {**snapshot.head["policies"], "packed": {"window": window}},
        "buckets": [{**own, "block": block} for own, block in zip(snapshot.head["buckets"], blocks, strict=True)],
        "folder": plan.recipe,
        "shards": {"latent": shards[:-1], "text": shards},
        "null": {
            "shard": shards[-1]["name"],
            "offset": null["offset"],
            "rows": null["rows"],
            "valid": null["valid"],
            "key": null["key"].hex(),
            "checksum": null["checksum"].hex(),
            **({"length": null["length"]} if text.storage != PLAIN else {}),
        },
        "chunks": chunks,
    }


def _table(cache: Cache, commit: index.Commit) -> pa.Table:
    assert commit.table is not None
    name = Paths.table(commit.table, "arrow")
    table = from_ipc(cache.files.content(name, commit.table), cache.files.where(name))
    if table.num_rows != commit.records:
        raise IntegrityError(
            f"{cache.files.where(name)}: is not the record table of unit {commit.unit}",
            expected=f"{commit.records} rows",
            found=f"{table.num_rows} rows",
        )
    return table


def _placed(table: pa.Table, shard: int, schema: pa.Schema) -> tuple[pa.Table, pa.Table]:
    """A joint shard's rows as rows of a snapshot: samples and names. shard: its number among the snapshot's."""
    whole = table.combine_chunks()
    lists = whole.column("captions").chunk(0)
    structs = lists.flatten()
    kind = lists.type.value_type
    at = kind.get_field_index("shard")
    children = [structs.field(i) for i in range(kind.num_fields)]
    children[at] = pa.array(np.full(len(structs), shard, np.uint32))
    placed = pa.ListArray.from_arrays(
        lists.offsets, pa.StructArray.from_arrays(children, fields=list(kind)), type=lists.type
    )
    columns = {
        "captions": placed,
        "shard": pa.array(np.full(len(whole), shard, np.uint32)),
    }
    samples = pa.table([columns.get(name, whole.column(name)) for name in schema.names], schema=schema)
    names = pa.table([whole.column({"captions": "written"}.get(name, name)) for name in NAMES.names], schema=NAMES)
    return samples, names


def restored(cache: Cache, name: str) -> bool:
    """Write a damaged or missing joint shard again, out of the snapshot that it was packed from.

    Args:
        name: of the file, `shards/packed-<id>/<dd>/<digest>.tar`.

    Raises:
        CacheError: that snapshot, or the plan, is no longer there or is damaged.
    """
    folder, digest = name.split("/")[1], name.rpartition("/")[2].removesuffix(".tar")
    if not cache.files.numbers(Paths.plans(folder)):
        raise CacheError(f"{cache.files.where(name)}: its plan is gone", fix="sana-pipe bucket --pack")
    plan = cache.plan(folder, 0)
    return Packer(cache, Snapshot(cache.files, source_of(cache, plan)), plan).restore(digest)
