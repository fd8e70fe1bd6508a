"""Reading speed: the loader (verified and not) against webdataset on the very same shards and against plain memcpy.

Synthetic records of Sana's sizes (latents of five buckets around 1024 px, captions of log-normal length, mean about 82
tokens), written by the real writer. All sides deliver padded, collated batches of 32 from the page cache, in turn
within one run. webdataset shuffles in a buffer and pairs nothing: it gets two plain streams, which is less work
than the loader does. The loader's noise is switched off, because the other side draws none.
"""

from __future__ import annotations

import argparse
import io
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
import webdataset

from benchmarks.report import finish, median, table
from pipeline.cache import index, layout, shard, snapshot
from pipeline.cache.store import Cache, Unit
from pipeline.data import randomness
from pipeline.data.join import Joined, assemble, join
from pipeline.data.loader import Loader

BUCKETS = [(1024, 1024), (1152, 896), (896, 1152), (1344, 768), (768, 1344)]
BATCH = 32


def build(root: Path, count: int) -> Cache:
    """A cache and snapshot of `count` samples, through the real scan table, plans, shards and join."""
    from pipeline.encoding.scan import SCAN

    cache = Cache(root, create=True)
    rng = np.random.default_rng(0)
    latent, text = layout.LatentRecipe(), layout.TextRecipe()
    for recipe in (latent, text):
        cache.add_recipe(recipe)
    tokens = np.clip(rng.lognormal(np.log(70), 0.55, count), 8, 300).astype(int)
    rows = [
        {
            "item": f"{i:06d}.jpg", "size": 1, "mtime_ns": 1, "digest": layout.digest(str(i)),
            "width": BUCKETS[i % 5][1], "height": BUCKETS[i % 5][0],
            "captions": [{"text": f"caption {i}", "weight": 1.0}], "meta": "{}", "reject": None,
        }
        for i in range(count)
    ]  # fmt: skip
    for recipe in (latent, text):
        plan, table_rows = [], []
        for start in range(0, count, 256):
            unit = f"{start:032x}"
            with shard.ShardWriter(cache.files, recipe, unit) as writer:
                if recipe is text and start == 0:
                    writer.add(layout.null_key(text.id), _bits(rng, (300, 2304)), caption="", valid=1)
                for i in range(start, min(start + 256, count)):
                    height, width = BUCKETS[i % 5]
                    if recipe is latent:
                        key = layout.latent_key(latent.id, rows[i]["digest"], height, width)
                        writer.add(key, _bits(rng, (32, height // 32, width // 32)))
                    else:
                        key = layout.text_key(text.id, f"caption {i}")
                        writer.add(key, _bits(rng, (int(tokens[i]), 2304)), caption=f"caption {i}")
                name, size, records = writer.finish()
            digest = cache.files.put_content(index.table_bytes(records), "tables", "arrow")
            plan.append((unit, index.Commit(unit, name, size, records.num_rows, digest, (), {})))
            table_rows.extend(records.column("key").to_pylist())
        units = [Unit(u, 0, c.records, 32) for u, c in plan]
        cache.add_plan(recipe.name, 0, units, pa.table({"key": pa.array(table_rows, pa.binary(16))}))
        for _, commit in plan:
            index.publish_commit(cache.files, recipe.name, 0, commit)
    joined = Joined()
    latents, texts = cache.index(latent.name), cache.index(text.name)
    join(joined, "synthetic", pa.Table.from_pylist(rows, schema=SCAN), BUCKETS, latent, text, latents, texts)
    head, samples, names, _ = assemble(
        joined, BUCKETS, batch=BATCH, small="carry", pad_text_multiple=1, latent=latent, text=text, latents=latents,
        texts=texts, sources={},
    )  # fmt: skip
    cache.add_snapshot(snapshot.build(cache.files, head, samples, names), None)
    return cache


def _bits(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(0, 0x7F80, shape, np.uint16)


class Measured:
    """Samples/s, payload bytes/s and CPU seconds per GB of one side, one entry per round."""

    def __init__(self) -> None:
        self.rate: list[float] = []
        self.speed: list[float] = []
        self.cpu: list[float] = []

    def run(self, work) -> None:  # type: ignore[no-untyped-def]
        wall, cpu = time.perf_counter(), time.process_time()
        samples, size = work()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        self.rate.append(samples / wall)
        self.speed.append(size / wall)
        self.cpu.append(cpu / (size / 1e9))


def ours(cache: Cache, steps: int, verify: bool, threads: int) -> tuple[int, int]:
    loader = Loader(
        cache.open_snapshot(), seed=0, phase=0, rank=0, world=1, microbatch=BATCH, caption_drop=0.0, null_mask="bos",
        prefetch=4 if threads else 0, threads=max(threads, 1), stop_step=steps,
    )  # fmt: skip
    real_checksum, real_noise = layout.checksum, randomness.noise
    randomness.noise = lambda *a: None  # the others draw none
    if not verify:
        expected: dict[bytes, bytes] = {}
        for row in range(len(loader.snapshot)):
            sample = loader.snapshot.sample(row)
            expected[sample.key] = sample.checksum
            expected.update((c.key, c.checksum) for c in sample.captions)
        layout.checksum = lambda recipe, key, payload: expected[key]
    try:
        samples = size = 0
        for batches, _ in loader:
            for batch in batches:
                samples += len(batch.sample_ids)
                size += batch.latents.numel() * 2 + int(batch.mask.sum()) * 2304 * 2
        return samples, size
    finally:
        layout.checksum, randomness.noise = real_checksum, real_noise


def theirs(cache: Cache, steps: int) -> tuple[int, int]:
    """webdataset: shuffled streams of both shard kinds, decoded with numpy, padded and stacked by 32."""
    size = 0
    for kind in ("latent", "text"):
        urls = sorted(map(str, cache.root.glob(f"shards/{kind}-*/*/*.tar")))
        stream = webdataset.WebDataset(urls, shardshuffle=100, seed=0, empty_check=False).shuffle(500)
        waiting: dict[tuple[int, ...], list[np.ndarray]] = {}
        left = steps * BATCH
        for sample in stream:
            array = np.load(io.BytesIO(sample["npy"]))
            group = waiting.setdefault(array.shape if kind == "latent" else (), [])
            group.append(array)
            size += array.nbytes
            left -= 1
            if len(group) == BATCH:
                longest = max(len(a) for a in group)
                batch = np.zeros((BATCH, longest, *array.shape[1:]), np.uint16)
                for i, one in enumerate(group):
                    batch[i, : len(one)] = one
                torch.from_numpy(batch.view(np.int16)).view(torch.bfloat16)
                group.clear()
            if not left:
                break
    return steps * BATCH, size


def copying(payload: np.ndarray, target: np.ndarray, samples: int) -> tuple[int, int]:
    for start in range(0, len(payload), len(target)):
        piece = payload[start : start + len(target)]
        target[: len(piece)] = piece
    return samples, payload.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    count, rounds = (640, 3) if given.quick else (given.samples, given.rounds)
    names = [
        "webdataset",
        "loader, inline, verified",
        "loader, 2 threads, verified",
        "loader, 2 threads, unverified",
        "memcpy",
    ]
    sides = {name: Measured() for name in names}
    with tempfile.TemporaryDirectory() as folder:
        cache = build(Path(folder) / "cache", count)
        steps = count // BATCH
        payload = np.ones(count * 440_000 // 8, np.uint64)
        target = np.empty(16 << 20, np.uint64)
        for _ in range(rounds):
            sides[names[0]].run(lambda: theirs(cache, steps))
            sides[names[1]].run(lambda: ours(cache, steps, True, 0))
            sides[names[2]].run(lambda: ours(cache, steps, True, 2))
            sides[names[3]].run(lambda: ours(cache, steps, False, 2))
            sides[names[4]].run(lambda: copying(payload, target, count))
    table(
        ["side", "samples/s", "MB/s", "CPU s/GB"],
        [[n, median(s.rate), median(s.speed) / 1e6, median(s.cpu)] for n, s in sides.items()],
    )
    best, verified, bare, memcpy = (sides[names[i]] for i in (0, 2, 3, 4))

    def ratio(one: Measured, other: Measured, what: str) -> float:
        return median([a / b for a, b in zip(getattr(one, what), getattr(other, what), strict=True)])

    finish(
        {
            "vs_webdataset_verified": ratio(verified, best, "rate"),
            "vs_webdataset_verified_inline": ratio(sides[names[1]], best, "rate"),
            "vs_webdataset": ratio(bare, best, "rate"),
            "of_memcpy": ratio(bare, memcpy, "speed"),
            "cpu_s_per_gb": median(verified.cpu),
            "cpu_s_per_gb_webdataset": median(best.cpu),
        }
    )


if __name__ == "__main__":
    main()
