"""Reading speed: the loader against webdataset, MosaicML streaming and LitData, and against plain memcpy.

Synthetic records of Sana's sizes (latents of five buckets around 1024 px, captions of log-normal length, mean about 82
tokens). The loader and webdataset read the very same shards; MosaicML streaming and LitData get the same samples in
their own formats (uint16 arrays, no compression, no hashes: their fastest). All deliver shuffled, collated batches of
32 of one bucket from the page cache, in turn within one run, each timed from the sixth batch on; the loader goes on
reading ahead when the clock stops, so that what it had ahead when the clock started is no advantage.

What favours the others: webdataset pairs nothing (two plain streams) and shuffles in a buffer of 500 samples; none of
them verifies anything; the loader's scalars (caption choice, drop, times) are drawn in its time. Its noise is switched
off, because the other sides draw none.

Peers that cannot be imported are left out, and named. For all of them use a separate environment:
    python -m venv peers && peers/bin/pip install -e . torchvision mosaicml-streaming litdata
    peers/bin/python -m benchmarks.loader
(pip may have to be told to ignore the upper bounds that mosaicml-streaming puts on transformers: --no-deps.)

Keys: vs_best_peer (loader without verification, the best of length windows of 8, packed text, and packed text read
inline, without threads), with _verified
the same with it; _padded is plain order, padded. of_memcpy: payload bytes/s over those of copying as many bytes,
without verification; of_memcpy_verified with it. cpu_s_per_gb: CPU seconds per GB of payload of the loader (verified,
as vs_best_peer_verified); cpu_s_per_gb_PEER of the others.
"""

from __future__ import annotations

import argparse
import importlib
import io
import itertools
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch

from benchmarks.report import finish, median, table
from sana_pipe.base.processes import run_and_exit
from sana_pipe.data.cache import index, layout, shard
from sana_pipe.data.cache.cache import Cache, Unit
from sana_pipe.data.cache.encodings import Encoding
from sana_pipe.data.cache.snapshot_head import Policies
from sana_pipe.data.loader import randomness
from sana_pipe.data.loader.loader import Loader, LoaderSettings
from sana_pipe.data.signals.control import ControlEncoding
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.signals.text import TextEncoding
from sana_pipe.data.snapshots.assemble import BucketTable, assemble
from sana_pipe.data.snapshots.join import EncodedRecords, Joined, Resolution, join

BUCKETS = [(1024, 1024), (1152, 896), (896, 1152), (1344, 768), (768, 1344)]
BATCH = 32
WARM = 5
AHEAD = 24
"""Steps until every buffer of the loader has been in use: first use costs page faults, once per run."""
WIDTH = 2304


def build(
    root: Path,
    count: int,
    *,
    buckets: list[tuple[int, int]] = BUCKETS,
    batch: int = BATCH,
    latent: LatentEncoding | None = None,
    text: TextEncoding | None = None,
    control: ControlEncoding | None = None,
    tokens_each: int | None = None,
) -> Cache:
    """A cache and snapshot of `count` samples, through the real scan table, plans, shards and join. Values are bf16
    between 1/8 and 1; encodings of Sana where none is given, and no control pictures. tokens_each: of every caption."""
    from sana_pipe.data.cache.scan_table import SCAN

    cache = Cache(root, create=True)
    rng = np.random.default_rng(0)
    latent, text = latent or LatentEncoding(), text or TextEncoding()
    encodings: list[Encoding] = [latent, *([] if control is None else [control]), text]
    for encoding in encodings:
        cache.add_encoding(encoding)
    tokens = np.clip(rng.lognormal(np.log(70), 0.55, count), 8, 300).astype(int)
    if tokens_each is not None:
        tokens[:] = tokens_each
    rows: list[dict[str, Any]] = [
        {
            "item": f"{i:06d}.jpg",
            "size": 1,
            "mtime_ns": 1,
            "digest": layout.digest(str(i)),
            "width": buckets[i % len(buckets)][1],
            "height": buckets[i % len(buckets)][0],
            "captions": [{"text": f"caption {i}", "weight": 1.0}],
            "meta": "{}",
            "reject": None,
        }
        for i in range(count)
    ]
    for encoding in encodings:
        plan, table_rows = [], []
        for start in range(0, count, 256):
            unit = f"{start:032x}"
            with shard.ShardWriter(cache.files, encoding, unit) as writer:
                if encoding is text and start == 0:
                    writer.add(text.null_key, _bits(rng, (300, text.width)), caption="", valid=1)
                for i in range(start, min(start + 256, count)):
                    height, width = buckets[i % len(buckets)]
                    if isinstance(encoding, LatentEncoding):
                        values = _bits(rng, encoding.shape(height, width))
                        writer.add(encoding.key(rows[i]["digest"], height, width), values)
                    else:
                        key = text.key(f"caption {i}")
                        writer.add(key, _bits(rng, (int(tokens[i]), text.width)), caption=f"caption {i}")
                made = writer.finish()
            plan.append(index.commit_of(cache.files, unit, made))
            table_rows.extend(made[2].column("key").to_pylist())
        units = [Unit(commit.unit, 0, commit.records, 32) for commit in plan]
        cache.add_plan(encoding.name, 0, units, pa.table({"key": pa.array(table_rows, pa.binary(16))}))
        for commit in plan:
            index.publish_commit(cache.files, encoding.name, 0, commit)
    joined = Joined()
    records = EncodedRecords(encodings, {one.kind: cache.index(one.name) for one in encodings})
    join(joined, "synthetic", pa.Table.from_pylist(rows, schema=SCAN), records, Resolution(buckets))
    table = BucketTable(buckets, [batch] * len(buckets))
    assembled = assemble(joined, joined.frame(), records, table, Policies("carry", pad_text_multiple=1), {})
    cache.add_snapshot(assembled.written(cache.files), None)
    return cache


def _bits(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(0x3E00, 0x3F80, shape, np.uint16)


def samples(cache: Cache) -> Iterator[dict[str, np.ndarray]]:
    """Every sample of the snapshot, in its order: what the other formats are written from."""
    opened = cache.open_snapshot()
    latents, texts = (
        shard.ShardReader(cache.files, r.name) for r in (opened.encoding(LatentEncoding), opened.encoding(TextEncoding))
    )
    for row in range(len(opened)):
        sample = opened.sample(row)
        bucket, caption = opened.buckets[sample.bucket], sample.captions[0]
        latent = np.empty((32, bucket.height // 32, bucket.width // 32), np.uint16)
        place = sample.pictures["latent"]
        latents.read(place.shard, place.offset, place.key, place.checksum, latent)
        text = np.empty((caption.rows, WIDTH), np.uint16)
        texts.read(caption.shard, caption.offset, caption.key, caption.checksum, text)
        yield {"latent": latent, "text": text}


# ---------------------------------------------------------------- sides: each yields (samples, payload bytes) per batch

Side = Iterator[tuple[int, int]]


def ours(cache: Cache, verify: bool, threads: int, text: Literal["padded", "packed"], window: int) -> Side:
    loader = Loader(
        cache.open_snapshot(),
        LoaderSettings(
            seed=0,
            phase=0,
            rank=0,
            world=1,
            microbatch=BATCH,
            caption_drop=0.0,
            prefetch=None if threads else 0,
            threads=max(threads, 1),
            verify=verify,
            text=text,
            length_window=window,
        ),
    )
    for step, (batches, _) in enumerate(loader):
        for batch in batches if step >= AHEAD else ():
            rows = int(batch.mask.sum()) if batch.cu_seqlens is None else len(batch.captions)
            yield len(batch.sample_ids), batch.latents.numel() * 2 + rows * WIDTH * 2


def collated(stream: Iterator[dict[str, np.ndarray]]) -> Side:
    """Batches of one bucket out of a shuffled stream, text padded to the longest."""
    waiting: dict[tuple[int, ...], list[dict[str, np.ndarray]]] = {}
    for sample in stream:
        group = waiting.setdefault(np.shape(sample.get("latent", ())), [])
        group.append(sample)
        if len(group) < BATCH:
            continue
        size = 0
        for name in sample:
            arrays = [np.asarray(one[name]) for one in group]
            size += sum(array.nbytes for array in arrays)
            longest = max(len(array) for array in arrays)
            batch = np.empty((BATCH, longest, *arrays[0].shape[1:]), np.uint16)
            for i, one in enumerate(arrays):
                batch[i, : len(one)] = one
                batch[i, len(one) :] = 0
            torch.from_numpy(batch.view(np.int16)).view(torch.bfloat16)
        group.clear()
        yield BATCH, size


def webdataset(cache: Cache, folder: Path) -> Side:
    """The loader's shards, as two streams; a batch is complete when both kinds have it."""
    import webdataset as wds

    def stream(kind: str, name: str) -> Iterator[dict[str, np.ndarray]]:
        urls = sorted(map(str, cache.root.glob(f"shards/{kind}-*/*/*.tar")))
        for sample in wds.WebDataset(urls, shardshuffle=100, seed=0, empty_check=False).shuffle(500):
            array = np.load(io.BytesIO(sample["npy"]))
            if kind == "latent" or len(array) < 300:  # not the null record
                yield {name: array}

    for (count, one), (_, two) in zip(collated(stream("latent", "latent")), collated(stream("text", "text"))):
        yield count, one + two


def write_streaming(cache: Cache, folder: Path) -> None:
    from streaming import MDSWriter

    columns = {"latent": "ndarray:uint16", "text": "ndarray:uint16"}
    with MDSWriter(out=str(folder), columns=columns, size_limit=64 << 20) as writer:
        for sample in samples(cache):
            writer.write(sample)


def streaming(cache: Cache, folder: Path) -> Side:
    import streaming as mosaic

    mosaic.base.util.clean_stale_shared_memory()
    yield from collated(iter(mosaic.StreamingDataset(local=str(folder), shuffle=True, batch_size=BATCH)))


def write_litdata(cache: Cache, folder: Path) -> None:
    from litdata.streaming.writer import BinaryWriter

    folder.mkdir()
    writer = BinaryWriter(str(folder), chunk_bytes=64 << 20)
    for i, sample in enumerate(samples(cache)):
        writer[i] = sample
    writer.done()
    writer.merge()


def litdata(cache: Cache, folder: Path) -> Side:
    from litdata import StreamingDataset

    yield from collated(iter(StreamingDataset(str(folder), shuffle=True, drop_last=False)))


def copying(payload: np.ndarray, targets: list[np.ndarray]) -> Side:
    """Plain copies of pieces of one step's size, into four targets in turn."""
    size = len(targets[0])
    for i in itertools.count():
        start = i * size % (len(payload) - size)
        np.copyto(targets[i % len(targets)], payload[start : start + size])
        yield BATCH, size * 2


PEERS: dict[str, tuple[Callable[[Cache, Path], Side], Callable[[Cache, Path], None] | None]] = {
    "webdataset": (webdataset, None),
    "streaming": (streaming, write_streaming),
    "litdata": (litdata, write_litdata),
}


class Measured:
    """Samples/s, payload bytes/s and CPU seconds per GB of one side, one entry per round."""

    def __init__(self) -> None:
        self.rate: list[float] = []
        self.speed: list[float] = []
        self.cpu: list[float] = []

    def run(self, side: Side, steps: int) -> None:
        for _ in range(WARM):
            next(side)
        wall, cpu, count, size = time.perf_counter(), _cpu(), 0, 0
        for samples, payload in itertools.islice(side, steps):
            count, size = count + samples, size + payload
        wall, cpu = time.perf_counter() - wall, _cpu() - cpu
        side.close()  # type: ignore[attr-defined]
        self.rate.append(count / wall)
        self.speed.append(size / wall)
        self.cpu.append(cpu / (size / 1e9))


def _cpu() -> float:
    return sum(
        u.ru_utime + u.ru_stime for u in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    count, rounds = (1280, 3) if given.quick else (given.samples, given.rounds)
    randomness.noise = lambda *a: None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cache = build(folder / "cache", count)
        sides: dict[str, Callable[[], Side]] = {}
        for peer, (read, write) in PEERS.items():
            try:
                importlib.import_module(peer)
            except Exception as error:
                print(f"{peer} is left out: {type(error).__name__}: {str(error).splitlines()[0]}")
                continue
            if write is not None:
                write(cache, folder / peer)
            sides[peer] = lambda read=read, peer=peer: read(cache, folder / peer)  # type: ignore[misc]
        peers = list(sides)
        variants = [("padded", 0), ("padded", 8), ("packed", 0)]
        for verify in (True, False):
            for text, window in variants:
                label = f"loader, {text}{', windows of 8' if window else ''}{', verified' if verify else ''}"
                sides[label] = lambda v=verify, t=text, w=window: ours(cache, v, 2, t, w)  # type: ignore[misc]
            end = ", verified" if verify else ""
            sides[f"loader, packed, inline{end}"] = lambda v=verify: ours(cache, v, 0, "packed", 0)  # type: ignore[misc]
        payload = np.ones(count * 440_000 // 2, np.uint16)
        targets = [np.ones(BATCH * 440_000 // 2, np.uint16) for _ in range(4)]
        sides["memcpy"] = lambda: copying(payload, targets)
        steps = count // BATCH - WARM - len(BUCKETS)  # the others may end with incomplete batches of every bucket
        results = {side: Measured() for side in sides}
        order = list(sides)
        for _ in range(rounds):
            for side in order:
                results[side].run(sides[side](), steps if side in peers else 5 * steps)  # about equally long
            order = order[3:] + order[:3]  # so that no side always follows the same one
        if "streaming" in peers:
            shutil.rmtree(folder / "streaming")
    table(
        ["side", "samples/s", "MB/s", "CPU s/GB"],
        [[n, median(s.rate), median(s.speed) / 1e6, median(s.cpu)] for n, s in results.items()],
    )

    def ratio(one: str, other: str, what: str) -> float:
        return median([a / b for a, b in zip(getattr(results[one], what), getattr(results[other], what), strict=True)])

    best = max(peers, key=lambda peer: median(results[peer].rate))
    fast = ("loader, padded, windows of 8", "loader, packed", "loader, packed, inline")
    bare, verified = (max((f + end for f in fast), key=lambda n: median(results[n].rate)) for end in ("", ", verified"))
    finish(
        {
            "vs_best_peer": ratio(bare, best, "rate"),
            "vs_best_peer_verified": ratio(verified, best, "rate"),
            "vs_best_peer_padded": ratio("loader, padded", best, "rate"),
            "vs_best_peer_padded_verified": ratio("loader, padded, verified", best, "rate"),
            "of_memcpy": ratio(bare, "memcpy", "speed"),
            "of_memcpy_verified": ratio(verified, "memcpy", "speed"),
            "cpu_s_per_gb": median(results[verified].cpu),
            "cpu_s_per_gb_memcpy": median(results["memcpy"].cpu),
            **{f"cpu_s_per_gb_{peer}": median(results[peer].cpu) for peer in peers},
            "best_peer": best,
            "fastest": bare,
        }
    )


if __name__ == "__main__":
    run_and_exit(main)
