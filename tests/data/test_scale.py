"""The model of large runs: the simulator counts what a real run counts, its snapshot lies as a real one lies, the page
shows what the command prints."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from benchmarks import reading_simulator as simulate
from benchmarks import scale_model as scale
from benchmarks.loader import build
from benchmarks.reading_simulator import (
    CountedSnapshot,
    Imagined,
    ImaginedSnapshot,
    MirrorModel,
    ModelFiles,
    NodeCounts,
)
from sana_pipe.data.cache import layout, mirror, shard
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.config import MirrorConfig
from sana_pipe.data.cache.mirror import Mirror
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.encoding import estimate
from sana_pipe.data.loader import randomness, schedule
from sana_pipe.data.loader.loader import Loader
from sana_pipe.data.loader.planner import Planner
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.signals.text import TextEncoding
from tests.support import tiny_cache
from tests.support.loading import loader_settings
from tests.support.packed import pack

BUCKETS = {(256, 256): 240, (128, 256): 180}
BLOCK, STEPS = 24, 40


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    cache = tiny_cache.build(tmp_path_factory.mktemp("scale") / "cache", BUCKETS, batch=12, per_shard=20)
    pack(cache, BLOCK, window=3)
    return cache


def snapshot_ids(disk: Cache) -> dict[str, str]:
    packed = disk.open_snapshot()
    return {"packed": packed.id, "plain": str(packed.head.parent)}


def limit_of(snapshot: Snapshot) -> int:
    """A third of the data."""
    return sum(snapshot.shard_files().values()) // 3


def settings(world: int) -> Any:
    return loader_settings(world=world, caption_drop=0.2)


@pytest.fixture
def real_run(disk: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the real loaders of some ranks over an object store in memory, and counts at the driver and the kernel."""

    def run(kind: str, world: int, ranks: range, rounds: int = STEPS) -> NodeCounts:
        place = f"/{uuid4().hex}"
        MemoryFileSystem().put(f"{disk.root}/", f"{place}/", recursive=True)
        source = Snapshot(disk.files, snapshot_ids(disk)[kind])
        gib = limit_of(source) / 2**30
        seen: Counter[str] = Counter()

        def counted(where: Any, name: str, count: Any) -> None:
            real = getattr(where, name)

            def call(*args: Any, **options: Any) -> Any:
                result = real(*args, **options)
                count(result, *args)
                return result

            monkeypatch.setattr(where, name, call)

        def request(result: Any, fs: Any, path: str, *more: Any) -> None:
            seen["requests"] += "/shards/" in path and not inside

        def get_file(fs: Any, path: str, *more: Any, real: Any = MemoryFileSystem.get_file, **options: Any) -> Any:
            inside.append(path)  # this driver asks itself for `info`
            result = real(fs, path, *more, **options)
            inside.clear()
            request(result, fs, path)
            seen["fetches"] += "/shards/" in path
            seen["fetched"] += MemoryFileSystem.store[path].size * ("/shards/" in path)
            return result

        def opened(handle: Any, where: Mirror, name: str, *more: Any) -> None:
            if name.startswith("shards/"):
                seen["opened"] += 1
            # the kernel's clock is too coarse to tell which copy was opened last
            clock[0] += 1000
            os.utime(where.mark_of(Path(PurePosixPath(name).name)), ns=(clock[0], clock[0]))

        def spans(size: int, *more: Any) -> None:
            seen["spans"] += 1
            seen["read"] += size

        clock = [time.time_ns() + 10**12]
        inside: list[str] = []
        opened_once = Cache(f"memory:/{place}", mirror=MirrorConfig(path=str(tmp_path / "mirror"), gib=gib))
        snapshot = Snapshot(opened_once.files, source.id)
        snapshot.columns(np.arange(len(snapshot)))  # the index comes through the same mirror
        snapshot.shard_files()  # and so do the lists
        snapshot.files.store.mirror.drop(next(iter(snapshot.head.tables())))  # type: ignore[attr-defined]
        for path in (tmp_path / "mirror").glob("??/*"):
            path.unlink()
        loaders = []
        counted(MemoryFileSystem, "info", request)
        monkeypatch.setattr(MemoryFileSystem, "get_file", get_file)
        counted(Mirror, "open", opened)
        counted(shard.os, "preadv", spans)
        monkeypatch.setattr(mirror, "digest_of", lambda handle, real=mirror.digest_of: _without(seen, real, handle))
        for rank in ranks:
            loaders.append(Loader(snapshot, replace(settings(world), rank=rank)))
        for step in range(rounds):
            for loader in loaders:
                seen["samples"] += sum(len(batch.sample_ids) for batch in loader.load(step).batches)
        return NodeCounts(steps=rounds, **seen)

    return run


def _without(seen: Counter[str], real: Any, handle: Any) -> str:
    """The digest of a copy, whose reads are not reads of records."""
    before = seen["spans"], seen["read"]
    result = real(handle)
    seen["spans"], seen["read"] = before
    seen["hashed"] += os.fstat(handle.descriptor).st_size
    return result


def simulated(disk: Cache, kind: str, world: int, ranks: range) -> NodeCounts:
    name = snapshot_ids(disk)[kind]
    model = MirrorModel(limit_of(Snapshot(disk.files, name)))
    snapshot = CountedSnapshot(ModelFiles(disk.root, model), name)
    counts = simulate.simulate(snapshot, settings(world), ranks, STEPS)
    assert (counts.needed, counts.needed_bytes) == (counts.fetches, counts.fetched), "nothing is fetched ahead"
    return replace(counts, waited=0.0, needed=0, needed_bytes=0)


@pytest.mark.parametrize(
    ("kind", "world", "ranks"),
    [
        ("plain", 1, range(1)),
        pytest.param("packed", 3, range(3), marks=pytest.mark.slow),
        pytest.param("packed", 4, range(1, 3), marks=pytest.mark.slow),
    ],
)
def test_the_simulator_counts_what_a_real_run_counts(
    disk: Cache, real_run: Any, kind: str, world: int, ranks: range
) -> None:
    """Requests and bytes at the driver of an object store, checked bytes, and reads at the kernel."""
    real = real_run(kind, world, ranks)
    assert simulated(disk, kind, world, ranks) == real
    assert real.fetches > 20 and real.spans > 100


def test_another_model_counts_something_else(disk: Cache, real_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: the comparison notices a mirror that removes nothing, one that removes too early, a process that keeps
    no shard open, one that reads each record by itself, and another order. The clock changes no count."""
    real, limit = real_run("packed", 3, range(3)), MirrorModel.__init__

    def mirror_of(share: float) -> Any:
        return lambda self, size, *more: limit(self, int(size * share), *more)

    def opens_again(self: simulate.CountingReader, name: str) -> Any:
        return self._open_shard(layout.Paths.shard(self.folder, name))

    for where, name, wrong, same in (
        (simulate.Store, "fetch_s", lambda *_: 1.0, True),
        (MirrorModel, "__init__", mirror_of(9.0), False),
        (MirrorModel, "__init__", mirror_of(0.7), False),
        (simulate.CountingReader, "_handle", opens_again, False),
        (shard, "GAP", -1, False),
        (schedule, "GROUP", 2, False),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, wrong)
            assert (simulated(disk, "packed", 3, range(3)) == real) is same, name


def test_an_imagined_snapshot_lies_as_a_packed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the rows of a real one's captions: the same shards, offsets, rows and sizes."""
    latent, text = LatentEncoding(weights="w", compression=8, channels=2), TextEncoding(weights="w", width=3)
    cache = build(tmp_path / "cache", 250, buckets=[(64, 64), (32, 128)], batch=12, latent=latent, text=text)
    real = pack(cache, 24, window=3)
    every = [np.arange(b.samples) + real.row(i, 0) for i, b in enumerate(real.buckets)]
    rows = np.concatenate([real.columns(part).captions["rows"] for part in every]).astype(np.int64)
    batches = {(b.height, b.width): b.batch for b in real.buckets}
    content = Imagined(len(real), batches, latent, text, blocks=tuple(b.block or 0 for b in real.buckets), window=3)
    monkeypatch.setattr(ImaginedSnapshot, "rows", lambda self, places: rows[places])
    imagined = ImaginedSnapshot(content, MirrorModel(1 << 40))
    assert [b.samples for b in imagined.buckets] == [b.samples for b in real.buckets]
    assert imagined.shard_count == len(real.head.shards["latent"])
    for part in every:
        one, two = real.columns(part), imagined.columns(part)
        for name in ("shard", "offset"):
            assert (one.pictures["latent"][name] == two.pictures["latent"][name]).all(), name
        for name in ("shard", "offset", "rows"):
            assert (one.captions[name] == two.captions[name]).all(), name
    for number, size in enumerate(real.head.shards["latent"].sizes):
        table = int(size) - imagined.shard_bytes("packed", number)
        assert 0 < table < 4096 + 24 * 256, "only the record table is left out"
    steps = [Planner(s, seed=0, phase=0).step(7).pictures["latent"]["offset"] for s in (real, imagined)]
    assert (steps[0] == steps[1]).all(), "and so the planner chooses the same"


def test_an_imagined_unpacked_snapshot_has_each_place_once() -> None:
    content = Imagined(3000, {(64, 64): 16, (32, 128): 16}, LatentEncoding(weights="w"), TextEncoding(weights="w"))
    whole = ImaginedSnapshot(content, MirrorModel(1 << 40))
    parts = [whole.columns(np.arange(bucket * 1500, bucket * 1500 + 1500)) for bucket in (0, 1)]
    for kind, lying in (("latent", [p.pictures["latent"] for p in parts]), ("text", [p.captions for p in parts])):
        places = {(int(s), int(o)) for part in lying for s, o in zip(part["shard"], part["offset"], strict=True)}
        assert len(places) == 3000
        numbers = {number for number, _ in places}
        assert all(whole.shard_bytes(kind, number) > 0 for number in numbers)
        assert numbers == set(range(len(numbers)))
        order = [np.lexsort((part["offset"], part["shard"])) for part in lying]
        assert all((np.abs(np.diff(rows)) == 1).mean() < 0.02 for rows in order), "neighbouring rows lie far apart"


def test_waits_follow_from_the_store(disk: Cache) -> None:
    """None with an instant store; with a slow one at least the fetches' time over the reading threads; fetching ahead
    hides a part."""
    name, threads, step_s = snapshot_ids(disk)["packed"], 2, 0.5
    limit = 10 * limit_of(Snapshot(disk.files, name))

    def run(request_s: float, prefetch: int | None) -> NodeCounts:
        store = simulate.Store(request_s=request_s, stream_gbs=1e9, node_gbs=1e9, hash_s_gb=0.0)
        snapshot = CountedSnapshot(ModelFiles(disk.root, MirrorModel(limit, store)), name)
        reading = replace(settings(1), prefetch=prefetch, threads=threads)
        return simulate.simulate(snapshot, reading, range(1), 35, step_s=step_s)

    assert run(0.0, None).waited == pytest.approx(0.0, abs=1e-6)
    slow, alone = run(2.0, None), run(2.0, 0)
    assert alone.fetches == len(Snapshot(disk.files, name).head.shards["text"])
    assert alone.waited >= 2 * 2.0 * (alone.fetches - 1) / threads - 35 * step_s
    assert 0 < slow.waited < alone.waited


def test_bytes_are_those_of_the_estimate() -> None:
    million, billion = scale.cache_of(10**6), scale.cache_of(10**9)
    assert billion.total == pytest.approx(1000 * million.total)
    latent, text = LatentEncoding(weights="w"), TextEncoding(weights="w")
    mean = np.mean([estimate.text_bytes(text, int(rows), simulate.CAPTION_BYTES) for rows in simulate.caption_rows()])
    assert million.text / 1e6 == pytest.approx(mean, rel=0.002)
    shapes = scale.data_of(scale.configured(8)).buckets
    mean = np.mean([estimate.picture_bytes(latent, *shape) for shape in shapes])
    assert million.latents / 1e6 == pytest.approx(mean, rel=0.002)
    assert scale.cache_of(10**6, "int8").total < scale.cache_of(10**6, "bf16-zstd").total < million.total


@pytest.mark.slow
def test_operations_of_the_encoders() -> None:
    """Counted on the modules of diffusers and transformers at the released sizes, without memory."""
    import torch
    from diffusers import AutoencoderDC
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import Gemma2Config, Gemma2Model

    widths, multiscales = (128, 256, 512, 512, 1024, 1024), ((), (), (), (5,), (5,), (5,))
    kinds = ["ResBlock"] * 3 + ["EfficientViTBlock"] * 3
    with torch.device("meta"), torch.no_grad():
        vae = AutoencoderDC(
            latent_channels=32,
            encoder_block_types=kinds,
            encoder_block_out_channels=widths,
            encoder_layers_per_block=(2, 2, 2, 3, 3, 3),
            encoder_qkv_multiscales=multiscales,
            downsample_block_type="Conv",
            decoder_block_out_channels=widths,
        )
        with FlopCounterMode(display=False) as counter:
            vae.encoder(torch.empty(1, 3, 1024, 1024))
        assert counter.get_total_flops() == pytest.approx(scale.VAE_FLOPS, rel=0.001)
        gemma = Gemma2Model(
            Gemma2Config(
                vocab_size=256,
                hidden_size=2304,
                intermediate_size=9216,
                num_hidden_layers=26,
                num_attention_heads=8,
                num_key_value_heads=4,
                head_dim=256,
            )
        )
        with FlopCounterMode(display=False) as counter:
            gemma(input_ids=torch.zeros(1, 80, dtype=torch.long), attention_mask=torch.ones(1, 80, dtype=torch.long))
        assert counter.get_total_flops() / 80 == pytest.approx(scale.TEXT_FLOPS, rel=0.001)


# ---------------------------------------------------------------- the page

PAGE = Path(__file__).parents[2] / "docs" / "measurements.md"


def shown() -> list[str]:
    """Rows of the tables that the command writes."""
    written = PAGE.read_text(encoding="utf-8").partition("\n## A billion pairs, 512 GPUs\n")[2]
    written = written.partition("\n### What grows with the items\n")[0]
    return [line for line in written.splitlines() if line.startswith("|")]


def printed(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[list[str], dict[str, Any]]:
    from benchmarks import scale as measurement

    monkeypatch.setattr(randomness, "noise", randomness.noise)  # put back afterwards
    monkeypatch.setattr("sys.argv", ["scale", *words])
    measurement.main()
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if line.startswith("|")], json.loads(lines[-1])


@pytest.mark.slow
def test_the_page_has_what_the_command_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, figures = printed(["--quick"], monkeypatch, capsys)
    assert [row for row in rows if row not in shown()] == [], "python -m benchmarks.scale --page docs/measurements.md"
    assert len(rows) > 12
    assert figures["amplification_1e09_512_plain"] > 20 * figures["amplification_1e09_512_packed64x4"] > 20


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_the_page_has_all_that_the_command_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, figures = printed([], monkeypatch, capsys)
    assert rows == shown(), "python -m benchmarks.scale --page docs/measurements.md"
    assert figures["peak_mib"] < 4096
