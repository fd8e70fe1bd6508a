"""A cache of a few small records with a snapshot, written by the real writers in milliseconds and without encoders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sana_pipe.data.cache import index, layout, shard, snapshot_samples
from sana_pipe.data.cache.cache import Cache, Unit
from sana_pipe.data.cache.snapshot_head import Bucket, Head, Policies, TextPlace
from sana_pipe.data.cache.snapshot_lists import ChunkTable, ShardTable
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.signals.text import TextEncoding

SIZES = {(16, 16): 30, (16, 24): 26, (24, 16): 7}
BATCH = 24


def encodings(storage: str = "bf16", weights: str = "w") -> tuple[LatentEncoding, TextEncoding]:
    return (
        LatentEncoding(weights=weights, compression=8, channels=2, storage=storage),
        TextEncoding(weights=weights, width=3, max_length=9, storage=storage),
    )


def build(
    root: Path,
    sizes: dict[tuple[int, int], int] = SIZES,
    *,
    batch: int = BATCH,
    per_shard: int = 8,
    small: str = "carry",
    storage: str = "bf16",
    seed: int = 0,
    names: str = "item",
    weights: str = "w",
) -> Cache:
    """`sizes`: samples by bucket. Every third sample has two captions. Equal arguments, equal bytes."""
    cache = Cache(root, create=True)
    rng = np.random.default_rng(seed)
    latent, text = encodings(storage, weights)
    records: dict[str, list[dict[str, Any]]] = {"latent": [], "text": []}
    order = [size for size, count in sizes.items() for _ in range(count)]
    for i, (height, width) in enumerate(order):
        values = _bits(rng, (2, height // 8, width // 8))
        records["latent"].append({"key": latent.key(layout.digest(names, str(i)), height, width), "array": values})
        for j in range(2 if i % 3 == 0 else 1):
            caption = f"{names} {i} said in way {j}"
            values = _bits(rng, (1 + (i * 5 + j * 3) % 9, 3))
            records["text"].append({"key": text.key(caption), "array": values, "caption": caption, "of": i})
    records["text"].append({"key": text.null_key, "array": _bits(rng, (9, 3)), "caption": "", "valid": 1})
    rows_by_key: dict[bytes, dict[str, Any]] = {}
    shards: dict[str, dict[str, int]] = {"latent": {}, "text": {}}
    for encoding in (latent, text):
        kind_records = records[encoding.kind]
        cache.add_encoding(encoding)
        units, commits = [], []
        for start in range(0, len(kind_records), per_shard):
            unit = f"{start:032x}"
            with shard.ShardWriter(cache.files, encoding, unit) as writer:
                for record in kind_records[start : start + per_shard]:
                    more = {name: record[name] for name in ("caption", "valid") if name in record}
                    writer.add(record["key"], record["array"], **more)
                name, size, table = writer.finish()
            number = len(shards[encoding.kind])
            rows_by_key.update({row["key"]: {**row, "number": number, "name": name} for row in table.to_pylist()})
            shards[encoding.kind][name] = size
            units.append(Unit(unit, start, table.num_rows, 1))
            commits.append(index.commit_of(cache.files, unit, (name, size, table)))
        cache.add_plan(
            encoding.name, 0, units, pa.table({"key": pa.array([r["key"] for r in kind_records], pa.binary(16))})
        )
        for commit in commits:
            index.publish_commit(cache.files, encoding.name, 0, commit)
        assert index.merge(cache.files, encoding.name, 0, [u.unit for u in units])
    rows, written, buckets, first = [], [], [], 0
    for (height, width), count in sizes.items():
        buckets.append(Bucket(height, width, count, batch))
        picked: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for i in range(first, first + count):
            captions = [rows_by_key[r["key"]] for r in records["text"] if r.get("of") == i]
            identity = layout.sample_id(names, str(i))
            picked.append(
                (
                    {
                        "sample_id": identity,
                        "latent": _place(rows_by_key[records["latent"][i]["key"]]),
                        "captions": [
                            {**_place(c), "rows": c["valid"], "weight": 1.0 + k} for k, c in enumerate(captions)
                        ],
                    },
                    {
                        "sample_id": identity,
                        "source": names,
                        "item": str(i),
                        "captions": [
                            {
                                "offset": c["caption_offset"],
                                "length": c["caption_length"],
                                "checksum": c["caption_checksum"],
                            }
                            for c in captions
                        ],
                    },
                )
            )
        picked.sort(key=lambda pair: pair[0]["sample_id"])
        rows += [pair[0] for pair in picked]
        written += [pair[1] for pair in picked]
        first += count
    null, chunk_rows = rows_by_key[text.null_key], snapshot_samples.CHUNK_ROWS
    tables = (
        pa.Table.from_pylist(rows, schema=snapshot_samples.samples_schema([latent, text])),
        pa.Table.from_pylist(written, schema=snapshot_samples.NAMES),
    )
    head = Head(
        encodings={"latent": latent.values(), "text": text.values()},
        policies=Policies(small, pad_text_multiple=2),
        buckets=tuple(buckets),
        shards={kind: ShardTable.of(sizes, sizes.values()) for kind, sizes in shards.items()},
        null=TextPlace(
            null["name"],
            null["offset"],
            rows=9,
            valid=1,
            key=null["key"],
            checksum=null["checksum"],
            length=null["length"],
        ),
        left_out={},
        sources={},
        chunks=ChunkTable.of(
            snapshot_samples.write_chunk(cache.files, *(table.slice(first, chunk_rows) for table in tables))
            for first in range(0, len(rows), chunk_rows)
        ),
    )
    cache.add_snapshot(head, None)
    return cache


def _place(row: dict[str, Any]) -> dict[str, Any]:
    return {"shard": row["number"], **{name: row[name] for name in ("offset", "key", "checksum", "length")}}


def _bits(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(0, 0x7F80, shape, np.uint16)
