"""How opening, memory, the first batch and resuming grow with the number of samples in a snapshot.

Snapshots of 10^5, 10^6 and (without --quick) 10^7 samples in five buckets, made by the real writer; all samples point
at the same few hundred real records, so that batches are read and verified as ever while the index has its full size.
Each figure is taken in a process of its own, from the page cache. The schedule alone is also asked at 10^9 samples.

Keys per size N (1e5, ...): open_s_N (snapshot and loader), first_batch_s_N, resume_1e6_s_N (from nothing to the batch
after step 10^6), resume_1e6_mib_N (what that read from shards), rss_mb_N (memory of the process's own after 200 more
steps: what grows with neither N nor time), mapped_mb_N (mapped files at that moment, which the kernel may drop).
lists_s, lists_mb: opening a snapshot of 300,000 shards (without looking at their files), and the process's own memory
for it.
schedule_1e9_s: making the schedule and asking it for step 10^6; schedule_1e9_mb: memory that took.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.report import finish, table
from sana_pipe.base.processes import run_and_exit
from sana_pipe.data.cache import codec, layout, shard, snapshot_lists
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.cache.snapshot_head import Bucket, Head, Policies, TextPlace
from sana_pipe.data.cache.snapshot_samples import CHUNK_ROWS, NAMES, WRITTEN, samples_schema, write_chunk
from sana_pipe.data.loader.loader import Loader, LoaderSettings
from sana_pipe.data.loader.schedule import Schedule
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.signals.text import TextEncoding

BUCKETS = [(256, 256), (288, 224), (224, 288), (320, 192), (192, 320)]
BATCH, RECORDS, STEPS = 32, 40, 200


def build(root: Path, count: int) -> None:
    """A snapshot of `count` samples over a few real records."""
    cache = Cache(root, create=True)
    rng = np.random.default_rng(0)
    latent, text = LatentEncoding(weights="scale"), TextEncoding(weights="scale", width=256)
    for encoding in (latent, text):
        cache.add_encoding(encoding)
    tables, shards = {}, {}
    for encoding in (latent, text):
        with shard.ShardWriter(cache.files, encoding, "unit") as writer:
            for i in range(RECORDS * len(BUCKETS)):
                height, width = BUCKETS[i // RECORDS]
                shape = (32, height // 32, width // 32) if encoding is latent else (8 + i, 256)
                writer.add(layout.digest(encoding.name, str(i)), rng.integers(0, 0x7F80, shape, np.uint16), caption="x")
            if encoding is text:
                writer.add(text.null_key, np.zeros((300, 256), np.uint16), caption="", valid=1)
            name, size, tables[encoding.kind] = writer.finish()
        shards[encoding.kind] = snapshot_lists.ShardTable.of([name], [size])
    null = tables["text"].to_pylist()[-1]
    chunks, buckets, start = [], [], 0
    for height, width in BUCKETS:
        own = count // len(BUCKETS)
        buckets.append(Bucket(height, width, own, BATCH))
        start += own
    for first in range(0, start, CHUNK_ROWS):
        rows = np.arange(first, min(first + CHUNK_ROWS, start))
        record = rows // (count // len(BUCKETS)) * RECORDS + rows % RECORDS
        samples, names = _rows(rows, record, tables, samples_schema([latent, text]))
        chunks.append(write_chunk(cache.files, samples, names))
    head = Head(
        encodings={"latent": latent.values(), "text": text.values()},
        policies=Policies("carry", pad_text_multiple=16),
        buckets=tuple(buckets),
        shards=shards,
        null=TextPlace(
            shards["text"][0],
            null["offset"],
            rows=300,
            valid=1,
            key=null["key"],
            checksum=null["checksum"],
            length=null["length"],
        ),
        left_out={},
        sources={},
        chunks=snapshot_lists.ChunkTable.of(chunks),
    )
    assert latent.storage == text.storage == codec.PLAIN
    cache.add_snapshot(head, None)


def _rows(
    rows: np.ndarray, record: np.ndarray, tables: dict[str, pa.Table], schema: pa.Schema
) -> tuple[pa.Table, pa.Table]:
    latent, text = (tables[kind].take(pa.array(record)).combine_chunks() for kind in ("latent", "text"))

    def column(of: pa.Table, name: str) -> pa.Array:
        return of.column(name).chunk(0)

    zero, one = pa.array(np.zeros(len(rows), np.uint32)), pa.array(np.ones(len(rows), np.float32))
    lists = pa.array(np.arange(len(rows) + 1, dtype=np.int32))

    def place(of: pa.Table, struct: pa.StructType, *more: pa.Array) -> pa.StructArray:
        columns = [zero, *(column(of, name) for name in ("offset", "key", "checksum")), *more]
        return pa.StructArray.from_arrays(columns, fields=list(struct))

    caption = place(text, schema.field("captions").type.value_type, column(text, "valid"), one)
    identity = pa.array(rows.astype(np.uint64))
    samples = pa.table(
        [identity, place(latent, schema.field("latent").type), pa.ListArray.from_arrays(lists, caption)], schema=schema
    )
    written = pa.StructArray.from_arrays(
        [column(text, "caption_offset"), column(text, "caption_length"), column(text, "caption_checksum")],
        fields=list(WRITTEN),
    )
    source = pa.array(["synthetic"]).take(pa.array(np.zeros(len(rows), np.int64)))
    names = pa.table(
        [identity, source, identity.cast(pa.string()), pa.ListArray.from_arrays(lists, written)], schema=NAMES
    )
    return samples, names


def memory() -> tuple[float, float]:
    """This process's own memory, and the mapped files in it, in MB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) / 1e3, int(lines["RssFile"].split()[0]) / 1e3


def measure(root: Path, start: int) -> dict[str, float]:
    """What one process sees. Prints nothing else."""
    began = time.perf_counter()
    loader = Loader(
        Cache(root).open_snapshot(),
        LoaderSettings(
            seed=0,
            phase=0,
            rank=0,
            world=1,
            microbatch=BATCH,
            caption_drop=0.1,
            prefetch=0,
            threads=1,
            start_step=start,
        ),
    )
    opened, read = time.perf_counter() - began, _read()
    steps = iter(loader)
    next(steps)
    first, read = time.perf_counter() - began, _read() - read
    for _ in range(STEPS):
        next(steps)
    own, mapped = memory()
    return {
        "open_s": opened,
        "first_batch_s": first - opened,
        "all_s": first,
        "mib": read / 2**20,
        "rss_mb": own,
        "mapped_mb": mapped,
    }


def _read() -> int:
    """Bytes that this process has asked the kernel for (mapped files do not count)."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


SHARDS = 300_000


def build_lists(root: Path) -> str:
    """The id of a snapshot of `SHARDS` shards, which do not exist."""
    build(root, CHUNK_ROWS)
    cache = Cache(root)
    opened = cache.open_snapshot().head
    half = SHARDS // 2
    shards = {
        kind: snapshot_lists.ShardTable.of((layout.digest(kind, str(i)).hex() for i in range(half)), [1 << 26] * half)
        for kind in opened.shards
    }
    head = replace(opened, shards=shards)
    head.put_lists(cache.files)
    cache.files.ensure(layout.Paths.snapshot(head.id), head.sealed())
    return head.id


def measure_lists(root: Path, snapshot_id: str) -> dict[str, float]:
    files = Cache(root).files
    Snapshot(files, snapshot_id).sample(7)  # imports what it needs
    before, began = memory()[0], time.perf_counter()
    opened = Snapshot(files, snapshot_id)
    opened.shard_sizes().max()
    _ = opened.shards["text"][SHARDS // 2 - 1], opened.shards["latent"][0]
    taken, own = time.perf_counter() - began, memory()[0] - before
    return {"s": taken, "mb": own}


def schedule_alone() -> dict[str, float]:
    before, began = memory()[0], time.perf_counter()
    Schedule([2 * 10**8] * 5, [BATCH] * 5, seed=0, phase=0, remainder="carry").step(10**6)
    return {"s": time.perf_counter() - began, "mb": memory()[0] - before}


def apart(*arguments: object) -> dict[str, float]:
    """A measurement in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.snapshot_scale", "--one", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--one", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        if not given.one:
            found = schedule_alone()
        elif len(given.one[1]) == 32:
            found = measure_lists(Path(given.one[0]), given.one[1])
        else:
            found = measure(Path(given.one[0]), int(given.one[1]))
        print(json.dumps(found))
        return
    figures: dict[str, float | str] = {}
    rows = []
    for power in (5, 6) if given.quick else (5, 6, 7):
        with tempfile.TemporaryDirectory() as folder:
            build(Path(folder) / "cache", 10**power)
            start, late = apart(Path(folder) / "cache", 0), apart(Path(folder) / "cache", 10**6)
        for name, value in (
            ("open_s", start["open_s"]),
            ("first_batch_s", start["first_batch_s"]),
            ("rss_mb", start["rss_mb"]),
            ("mapped_mb", start["mapped_mb"]),
            ("resume_1e6_s", late["all_s"]),
            ("resume_1e6_mib", late["mib"]),
        ):
            figures[f"{name}_1e{power}"] = value
        rows.append(
            [
                f"10^{power}",
                start["open_s"],
                start["first_batch_s"],
                late["all_s"],
                late["mib"],
                start["rss_mb"],
                start["mapped_mb"],
            ]
        )
    with tempfile.TemporaryDirectory() as folder:
        found = apart(Path(folder) / "cache", build_lists(Path(folder) / "cache"))
        figures |= {"lists_s": found["s"], "lists_mb": found["mb"]}
    alone = apart()
    table(["samples", "open s", "first batch s", "resume at 10^6 s", "MiB read", "own MB", "mapped MB"], rows)
    finish({**figures, "schedule_1e9_s": alone["s"], "schedule_1e9_mb": alone["mb"]})


if __name__ == "__main__":
    run_and_exit(main)
