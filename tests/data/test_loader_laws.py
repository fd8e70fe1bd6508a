"""The loader's laws on a cache of a few small records: order, text, windows, buffers, errors, quarantine."""

from __future__ import annotations

import dataclasses
import fcntl
import gc
import itertools
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sana_pipe.base import disk
from sana_pipe.base.errors import CacheError, IntegrityError, UserError
from sana_pipe.data.cache import shard
from sana_pipe.data.cache import snapshot as snapshots
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.shard import ShardReader
from sana_pipe.data.loader import length_grouping, quarantine, randomness
from sana_pipe.data.loader.loader import Loader, LoaderState, unpack
from sana_pipe.data.loader.planner import Planner
from sana_pipe.data.loader.schedule import Schedule
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.signals.text import TextEncoding
from tests.support import tiny_cache
from tests.support.consumed import loader, seen, sequence
from tests.support.damage import flip
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
WORLDS = (1, 2, 3, 4, 6, 8, 12)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return tiny_cache.build(tmp_path_factory.mktemp("tiny") / "cache")


@pytest.fixture(scope="module")
def truth(cache: Cache) -> list[list[str]]:
    return sequence(loader(cache))


# ---------------------------------------------------------------- order


@pytest.mark.parametrize(
    ("ahead", "window"),
    [
        (0, 0),
        (1, 3),
        (2, 0),
        (5, 3),
        *(pytest.param(*p, marks=pytest.mark.slow) for p in ((0, 3), (1, 0), (2, 3), (5, 0))),
    ],
)
def test_order_law(cache: Cache, truth: list[list[str]], ahead: int, window: int) -> None:
    """Every world, with so many steps read ahead by so many threads, gives the same sequence."""
    expected = sequence(loader(cache, length_window=window)) if window else truth
    assert len({row for step in expected for row in step}) == sum(map(len, expected)), "nothing to tell visits apart"
    for world in WORLDS:
        options = {"prefetch": ahead, "threads": max(1, ahead), "world": world, "length_window": window}
        ranks = [sequence(loader(cache, rank=rank, **options)) for rank in range(world)]
        assert [list(itertools.chain(*parts)) for parts in zip(*ranks, strict=True)] == expected, world


def test_a_rank_dependent_order_would_be_noticed(
    cache: Cache, truth: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sabotage: ranks that begin one step apart are not the sequence."""
    ranks = [sequence(loader(cache, world=2, rank=rank, start_step=rank, stop_step=11 + rank)) for rank in range(2)]
    assert [list(itertools.chain(*parts)) for parts in zip(*ranks, strict=True)] != truth[:11]


def test_the_sequence_is_what_the_plain_functions_say(cache: Cache) -> None:
    """An oracle without planner, buffer pool or batch reads: schedule, samples and records one by one."""
    snapshot = cache.open_snapshot()
    schedule = Schedule(
        [b.samples for b in snapshot.buckets], [b.batch for b in snapshot.buckets], seed=5, phase=1, remainder="carry"
    )
    latents, texts = (
        ShardReader(snapshot.files, r.name)
        for r in (snapshot.encoding(LatentEncoding), snapshot.encoding(TextEncoding))
    )
    for step, (batches, _) in enumerate(loader(cache, caption_drop=0.0, stop_step=6)):
        plan = schedule.step(step)
        rows = iter([(batch, i) for batch in batches for i in range(len(batch.sample_ids))])
        for position, visit in zip(plan.positions.tolist(), plan.visits.tolist(), strict=True):
            sample = snapshot.sample(snapshot.row(plan.bucket, position))
            drawn = randomness.draws(5, 1, [visit], [sample.sample_id])
            weights = [c.weight for c in sample.captions]
            share = np.cumsum(weights) / sum(weights)
            caption = sample.captions[int(np.searchsorted(share, drawn.caption[0], side="right"))]
            batch, i = next(rows)
            latent, text = np.empty(batch.latents.shape[1:], np.uint16), np.empty((caption.rows, 3), np.uint16)
            place = sample.pictures["latent"]
            latents.read(place.shard, place.offset, place.key, place.checksum, latent)
            texts.read(caption.shard, caption.offset, caption.key, caption.checksum, text)
            assert batch.sample_ids[i] == sample.sample_id
            assert np.array_equal(batch.latents[i].view(torch.int16).numpy().view(np.uint16), latent)
            result = batch.captions[i].view(torch.int16).numpy().view(np.uint16)
            assert np.array_equal(result[: caption.rows], text) and not result[caption.rows :].any()
            assert int(batch.mask[i].sum()) == caption.rows and bool(batch.mask[i, : caption.rows].all())
            assert float(batch.logit[i]) == np.float32(drawn.logit[0])


def test_draws_are_those_of_a_generator_of_their_own() -> None:
    """Keying an old generator again gives the stream of a new one: written down, as every order depends on it."""
    import struct

    import xxhash

    for number in range(20):
        packed = struct.pack("<QQQQ", 1, 2, 3, number) + b"draws"
        key = np.frombuffer(xxhash.xxh3_128_digest(packed), np.uint64)
        fresh = np.random.Generator(np.random.Philox(key=key))
        expected = [fresh.random(), fresh.random(), fresh.standard_normal()]
        actual = randomness.draws(1, 2, [0, 3, 3], [number, number, number + 1])  # whatever it is asked for with
        assert [values[1] for values in actual] == expected
        randomness.generator("other", 0, 0, 0, 0).integers(0, 9, 3, np.uint32)  # leaves half a word behind
    assert randomness.draws(0, 0, [0], [0]).caption.tolist() == [0.6314775042138685]
    assert [len(values) for values in randomness.draws(0, 0, [], [])] == [0, 0, 0]


def test_columns_across_chunks_are_what_the_samples_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sana_pipe.data.cache.snapshot_samples.CHUNK_ROWS", 7)
    opened = tiny_cache.build(tmp_path / "cache").open_snapshot()
    assert len(opened.head.chunks) > 3
    rng = np.random.default_rng(0)
    for rows in (
        rng.permutation(len(opened)),
        rng.integers(0, len(opened), 9),
        np.array([8, 7, 8]),
        np.array([6]),
        np.arange(0),
    ):
        result = opened.columns(rows)
        captions = result.captions
        for i, row in enumerate(rows.tolist()):
            sample = opened.sample(row)
            seen = result.sample_id[i], result.pictures["latent"]["offset"][i]
            assert seen == (sample.sample_id, sample.pictures["latent"].offset)
            at = slice(result.first[i], result.first[i + 1])
            expected = [(c.offset, c.rows, c.key.rstrip(b"\0")) for c in sample.captions]
            assert (
                list(zip(*(captions[name][at].tolist() for name in ("offset", "rows", "key")), strict=True)) == expected
            )
        assert result.first[-1] == len(captions["rows"]) and len(result.first) == len(rows) + 1


def test_every_storage_reads_the_same_way(tmp_path: Path, truth: list[list[str]]) -> None:
    other = tiny_cache.build(tmp_path / "zstd", storage="bf16-zstd")
    assert [[row.split()[0] for row in step] for step in sequence(loader(other, prefetch=2))] == [
        [row.split()[0] for row in step] for step in truth
    ]


def test_resuming_at_step_a_million_reads_only_the_next_batch(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[str, int]] = []
    real = ShardReader.read_span

    def counted(self: ShardReader, shard: str, offset: int, views: list[memoryview]) -> int:
        read.append((shard, sum(map(len, views))))
        return real(self, shard, offset, views)

    monkeypatch.setattr(ShardReader, "read_span", counted)
    reading = loader(cache, start_step=10**6, stop_step=10**6 + 1, caption_drop=0.0)
    [(batches, state)] = list(reading)
    assert state.step == 10**6 + 1
    payload = sum(b.latents.numel() * 2 + int(b.mask.sum()) * 3 * 2 for b in batches)
    between = sum(size for _, size in read) - payload  # neighbours are read in one call, with what lies between
    assert payload <= sum(size for _, size in read)
    assert between < 2 * 24 * 2048
    assert len(read) <= 2 * 24


def test_neighbours_are_read_in_one_call(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = ShardReader.read_span
    monkeypatch.setattr(
        ShardReader,
        "read_span",
        lambda self, s, o, v: calls.append(len(v)) or real(self, s, o, v),  # type: ignore[func-returns-value]
    )
    list(loader(cache, stop_step=4))
    assert max(calls) > 1
    assert len(calls) < 4 * 2 * 24 / 2


# ---------------------------------------------------------------- text


def test_packed_text_is_the_padded_one(cache: Cache) -> None:
    options = {"world": 2, "rank": 1}
    padded, packed = (list(loader(cache, text=text, **options)) for text in ("padded", "packed"))
    for (one, _), (two, _) in zip(padded, packed, strict=True):
        assert [b.captions.shape[0] for b in two] == [int(b.mask.sum()) for b in one], "padding in packed text"
        for a, b in zip(one, two, strict=True):
            assert b.cu_seqlens is not None and b.cu_seqlens.dtype == torch.int32 and a.cu_seqlens is None
            assert b.cu_seqlens.tolist() == [0, *np.cumsum(a.mask.sum(1).numpy()).tolist()]
            assert torch.equal(unpack(b.captions, b.cu_seqlens, b.mask), a.captions)
    assert [seen(b) for b, _ in padded] == [seen(b) for b, _ in packed]


# ---------------------------------------------------------------- length windows


def longest(cache: Cache, window: int, steps: int) -> int:
    planner = Planner(cache.open_snapshot(), seed=5, phase=1, length_window=window)
    return sum(int(planner.step(step).texts["rows"].max()) * 24 for step in range(steps))


def test_windows_keep_every_visit_and_pad_less(tmp_path: Path) -> None:
    cache = tiny_cache.build(tmp_path / "cache", {(16, 16): 200, (16, 24): 120})
    snapshot = cache.open_snapshot()
    plain, sorted_ = (Planner(snapshot, seed=5, phase=1, length_window=window) for window in (0, 4))
    steps = plain.schedule.steps_upto(2)

    def visits(planner: Planner, first: int, stop: int) -> Counter[tuple[int, int]]:
        result: Counter[tuple[int, int]] = Counter()
        for step in range(first, stop):
            plan = planner.step(step)
            result.update(zip(plan.sample_id.tolist(), plan.visits.tolist(), strict=True))
        return result

    for epoch in range(2):
        span = plain.schedule.steps_upto(epoch), plain.schedule.steps_upto(epoch + 1)
        assert visits(plain, *span) == visits(sorted_, *span), "a window moved a visit into another epoch"
    assert [plain.step(s).bucket for s in range(steps)] == [sorted_.step(s).bucket for s in range(steps)]
    assert longest(cache, 4, steps) < 0.8 * longest(cache, 0, steps)
    lengths = [int(sorted_.step(s).texts["rows"].max()) for s in range(steps)]
    assert lengths != sorted(lengths), "the batches of a window are not shuffled"
    late = Planner(snapshot, seed=5, phase=1, length_window=4)
    assert np.array_equal(late.step(steps - 1).sample_id, sorted_.step(steps - 1).sample_id)


def test_windows_against_an_oracle() -> None:
    """Random sizes: the multiset of every window and bucket is the schedule's, and its batches do not overlap in
    length."""
    rng = np.random.default_rng(0)
    for _ in range(8):
        counts = rng.integers(1, 40, rng.integers(1, 4)).tolist()
        batch, steps = int(rng.integers(2, 8)), int(rng.integers(2, 12))
        schedule = Schedule(counts, [batch] * len(counts), seed=1, phase=0, remainder="carry")

        def rows(bucket: int, positions: np.ndarray, visits: np.ndarray) -> np.ndarray:
            return (positions * 7 + bucket + visits * 3) % 11

        ordered = length_grouping.LengthGrouping(schedule, steps, rows, seed=1, phase=0)
        total = schedule.steps_upto(3)
        bounds = [schedule.steps_upto(e) for e in range(4)]
        spans = [(s, min(s + steps, b)) for a, b in itertools.pairwise(bounds) for s in range(a, b, steps)]
        assert sum(b - a for a, b in spans) == total
        truth = [schedule.step(step) for step in range(total)]
        for span in spans:
            for bucket in range(len(counts)):
                mine = [ordered.step(s) for s in range(*span) if truth[s].bucket == bucket]
                theirs = [truth[s] for s in range(*span) if truth[s].bucket == bucket]
                assert all(step.bucket == bucket for step in mine)
                pairs = [
                    Counter(p for s in x for p in zip(s.positions.tolist(), s.visits.tolist())) for x in (mine, theirs)
                ]
                assert pairs[0] == pairs[1]
                spread = sorted(
                    (rows(bucket, s.positions, s.visits).min(), rows(bucket, s.positions, s.visits).max()) for s in mine
                )
                assert all(a[1] <= b[0] for a, b in itertools.pairwise(spread))


def test_the_window_is_part_of_the_state(cache: Cache) -> None:
    [*_, (_, state)] = list(loader(cache, length_window=3))
    assert state.as_dict()["length_window"] == 3 and LoaderState.from_dict(state.as_dict()) == state
    [*_, (_, plain)] = list(loader(cache))
    assert "length_window" not in plain.as_dict(), "old checkpoints have none"
    assert sequence(loader(cache, length_window=3)) != sequence(loader(cache))


# ---------------------------------------------------------------- buffers


def test_a_batch_in_use_is_never_overwritten(cache: Cache, truth: list[list[str]]) -> None:
    """Beyond the contract: whoever keeps every batch gets fresh buffers for the others, not other bytes."""
    reading = loader(cache, prefetch=3, threads=2)
    retained = [batches for batches, _ in reading]
    assert [seen(batches) for batches in retained] == truth
    assert reading.pool.made >= len(retained)
    del retained
    gc.collect()
    assert len(reading.pool.free) == reading.pool.made, "a buffer is lost"


def test_a_tensor_of_a_batch_keeps_the_whole_buffer(cache: Cache) -> None:
    reading = loader(cache, stop_step=8)
    masks = [batches[0].mask[0] for batches, _ in reading]
    expected = [batches[0].mask[0].clone() for batches, _ in loader(cache, stop_step=8)]
    assert all(torch.equal(a, b) for a, b in zip(masks, expected, strict=True))


def test_a_buffer_is_as_large_as_the_largest_part(tmp_path: Path) -> None:
    large = tiny_cache.build(tmp_path / "cache", {(128, 64): 12, (64, 64): 12}, batch=2000)
    for world in (1, 2):
        reading = loader(large, world=world, microbatch=2000)
        text = reading.snapshot.encoding(TextEncoding)
        parts = []
        for [batch], _ in reading:
            count = len(batch.sample_ids)
            texts = (count * text.max_length * text.width * 2, count * text.max_length)
            sizes = (batch.latents.nbytes, batch.noise.nbytes, batch.logit.nbytes, *texts)
            parts.append(sum(-(-size // 4096) * 4096 for size in sizes))
        assert reading.pool.size == max(parts) > min(parts)


def test_the_shards_of_a_step_are_those_of_its_samples(cache: Cache) -> None:
    reading = loader(cache, world=2, rank=1)
    snapshot = reading.snapshot
    for step, (batches, _) in enumerate(reading):
        rows = {snapshot.sample_id(row): row for row in range(len(snapshot))}
        samples = [snapshot.sample(rows[identity]) for batch in batches for identity in batch.sample_ids]
        files = {Path(path).stem: size for path, size in reading.shard_paths(step).items()}
        assert {sample.pictures["latent"].shard for sample in samples} <= files.keys()
        known = {sample.pictures["latent"].shard for sample in samples} | {
            c.shard for sample in samples for c in sample.captions
        }
        assert files.keys() <= known
        for path, size in reading.shard_paths(step).items():
            assert (cache.root / path).stat().st_size == size


def test_each_process_checks_its_share_of_the_shards(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[list[str]] = []
    real = snapshots.Snapshot.check_shards

    def check(snapshot: snapshots.Snapshot, share: slice = slice(None)) -> None:
        looked.append([name for name, _ in snapshot.head.each_shard_file(share)])
        real(snapshot, share)

    monkeypatch.setattr(snapshots.Snapshot, "check_shards", check)
    for rank in range(3):
        loader(cache, world=3, rank=rank)
    every = [name for name, _ in cache.open_snapshot().head.each_shard_file(slice(None))]
    assert sorted(itertools.chain(*looked)) == sorted(every)


def test_buffers_are_used_again(cache: Cache) -> None:
    reading = loader(cache, prefetch=0, stop_step=40)
    places = set()
    for batches, _ in reading:
        places.add(batches[0].latents.data_ptr())
    assert reading.pool.made == len(places) == 2, "the one that is in use, and the next"


def test_a_batch_stays_until_the_next_but_one_is_asked_for(cache: Cache) -> None:
    """For copies to a GPU in flight, which hold no tensor: the buffer of a batch that was let go of is not free while
    the next one is in use, and free once the one after that is."""
    reading = loader(cache, stop_step=20)
    # The loader's setting, not its pool's: without a GPU there is no page-locked memory.
    reading.settings = dataclasses.replace(reading.settings, pin=True)
    steps, places = iter(reading), []
    for _ in range(20):
        batches, _ = next(steps)
        places.append(batches[0].latents.data_ptr())  # latents stand first in the buffer
        del batches
        free = {memory.data_ptr() for memory in reading.pool.free}
        assert not free & set(places[-2:]), "a buffer is free too early"
    assert reading.pool.made <= 3


def test_what_stood_in_a_buffer_never_shows(cache: Cache, truth: list[list[str]]) -> None:
    reading = loader(cache)
    real = reading.pool.take

    def dirty() -> np.ndarray:
        buffer = real()
        buffer[:] = 0xA5
        return buffer

    reading.pool.take = dirty  # type: ignore[method-assign]
    assert sequence(reading) == truth


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that loaders began to load; each batch says that it has 1 MiB."""
    steps: list[int] = []
    real = Loader.load

    def load(self: Loader, step: int, report: Any = None) -> Any:
        steps.append(step)
        return dataclasses.replace(real(self, step, report), size=1 << 20)

    monkeypatch.setattr(Loader, "load", load)
    return steps


def test_reading_ahead_is_bounded_in_bytes(cache: Cache, loaded: list[int]) -> None:
    steps = iter(loader(cache, prefetch=None, prefetch_mib=4, threads=2, stop_step=None))
    for taken in range(1, 6):
        next(steps)
        until(lambda least=taken + 3: len(loaded) >= least)
        time.sleep(0.2)
        assert len(loaded) <= taken + 5
    steps.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("ahead", [1, 3])
def test_reading_ahead_is_bounded_in_steps(cache: Cache, loaded: list[int], ahead: int) -> None:
    steps = iter(loader(cache, prefetch=ahead, threads=2, stop_step=None))
    for taken in range(1, 6):
        next(steps)
        until(lambda least=taken + 1: len(loaded) >= least)
        time.sleep(0.2)
        assert len(loaded) <= taken + 1 + ahead, "one for the next step, and those ahead of it"
    steps.close()  # type: ignore[attr-defined]


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("error", [OSError("the disk is gone"), MemoryError("no room"), SystemExit(3)])
def test_any_error_arrives_at_its_batch(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, threads: int, error: BaseException
) -> None:
    real = ShardReader.read_batch
    planned = Planner.step
    at: dict[int, int] = {}

    def note(self: Planner, step: int) -> Any:
        at[threading.get_ident()] = step
        return planned(self, step)

    def fail(self: ShardReader, *arguments: Any, **options: Any) -> Any:
        if at[threading.get_ident()] == 4:
            raise error
        return real(self, *arguments, **options)

    monkeypatch.setattr(Planner, "step", note)
    monkeypatch.setattr(ShardReader, "read_batch", fail)
    steps = iter(loader(cache, prefetch=6, threads=threads))
    began = time.monotonic()
    assert [next(steps)[1].step for _ in range(4)] == [1, 2, 3, 4]
    with pytest.raises(type(error), match=r"gone|room|3"):
        next(steps)
    assert time.monotonic() - began < 5
    assert not [t for t in threading.enumerate() if t.name.startswith("loader-")], "threads are left"


def test_a_read_that_hangs_is_named_in_time(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ShardReader.read_span
    release, calls = threading.Event(), itertools.count()

    def hang(self: ShardReader, shard: str, offset: int, views: list[memoryview]) -> int:
        if next(calls) == 60:
            release.wait(30)
        return real(self, shard, offset, views)

    reading = loader(cache, prefetch=2, threads=2, timeout_s=0.4, stop_step=None)
    monkeypatch.setattr(ShardReader, "read_span", hang)
    began = time.monotonic()
    with pytest.raises(CacheError, match=r"\.tar: record [0-9a-f]{32} at byte \d+ takes too long") as caught:
        for _ in reading:
            pass
    assert time.monotonic() - began < 5
    assert "patience_s" in str(caught.value)
    release.set()


def test_slow_reads_that_go_on_are_no_error(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is for one read, not for a step of many."""
    real = ShardReader.read_span

    def slow(self: ShardReader, shard: str, offset: int, views: list[memoryview]) -> int:
        time.sleep(0.05)
        return real(self, shard, offset, views)

    reading = loader(cache, prefetch=1, threads=1, timeout_s=0.3, stop_step=1)
    monkeypatch.setattr(ShardReader, "read_span", slow)
    assert len(list(reading)) == 1


@pytest.mark.slow
def test_a_process_with_a_hanging_read_ends(cache: Cache) -> None:
    """A read of a dead file system must not keep the process alive: the thread is left behind."""
    script = (
        "import sys, threading; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path; from sana_pipe.data.cache.cache import Cache\n"
        "from sana_pipe.data.cache.shard import ShardReader\n"
        "from tests.support.consumed import loader\n"
        "reading = loader(Cache(Path(sys.argv[2])), prefetch=2, threads=2, timeout_s=0.5)\n"
        "ShardReader.read_span = lambda *a: threading.Event().wait()\n"
        "list(reading)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, ROOT, cache.root], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "takes too long" in done.stderr


def test_leaving_early_leaves_nothing(cache: Cache) -> None:
    before = {folder: set(os.listdir(folder)) for folder in ("/dev/shm", "/proc/self/fd")}
    for _ in range(5):
        steps = iter(loader(cache, prefetch=4, threads=3, stop_step=None))
        next(steps)
        steps.close()  # type: ignore[attr-defined]
        del steps
    gc.collect()
    assert not [t for t in threading.enumerate() if t.name.startswith("loader-")]
    assert set(os.listdir("/dev/shm")) == before["/dev/shm"]
    assert len(os.listdir("/proc/self/fd")) <= len(before["/proc/self/fd"]) + 1


# ---------------------------------------------------------------- quarantine


@pytest.fixture
def rotten(tmp_path: Path, cache: Cache) -> tuple[Cache, set[int]]:
    """A copy of the cache with one latent and one text record damaged; the ids of the samples they belong to."""
    import shutil

    root = Path(shutil.copytree(cache.root, tmp_path / "cache"))
    snapshot = Cache(root).open_snapshot()
    one, two = snapshot.sample(3), snapshot.sample(11)
    for encoding, place in (
        (snapshot.encoding(LatentEncoding), one.pictures["latent"]),
        (snapshot.encoding(TextEncoding), two.captions[0]),
    ):
        path = root / f"shards/{encoding.name}/{place.shard[:2]}/{place.shard}.tar"
        flip(path, place.offset)
    return Cache(root), {one.sample_id, two.sample_id}


def test_without_a_quarantine_a_bad_record_stops_the_run(rotten: tuple[Cache, set[int]]) -> None:
    with pytest.raises(IntegrityError, match=r"record .* has the wrong checksum") as caught:
        sequence(loader(rotten[0], caption_drop=0.0, stop_step=8))
    assert (caught.value.fix or "").startswith("sana-pipe verify --repair")


@pytest.mark.parametrize("text", ["padded", "packed"])
def test_quarantine_replaces_the_same_samples_everywhere(
    rotten: tuple[Cache, set[int]], cache: Cache, tmp_path: Path, text: str
) -> None:
    damaged, bad = rotten
    clean = sequence(loader(cache, caption_drop=0.0))
    result: dict[int, list[list[str]]] = {}
    lines: dict[int, list[dict[str, Any]]] = {}
    for world in (1, 2, 4):
        file = tmp_path / f"quarantine-{world}.jsonl"
        options = {"caption_drop": 0.0, "quarantine": file, "world": world, "text": text, "prefetch": 2, "threads": 2}
        loaders = [loader(damaged, rank=rank, **options) for rank in range(world)]
        ranks = [sequence(one) for one in loaders]
        result[world] = [list(itertools.chain(*parts)) for parts in zip(*ranks, strict=True)]
        lines[world] = [json.loads(line) for line in file.read_text().splitlines()]
        assert sum(one.substituted for one in loaders) == len(lines[world])
    assert result[1] == result[2] == result[4]
    key = lambda line: (line["step"], line["sample"], line["record"], line["by"])  # noqa: E731
    assert sorted(lines[1], key=key) == sorted(lines[2], key=key) == sorted(lines[4], key=key)
    changed = [
        (a, b) for one, two in zip(clean, result[1], strict=True) for a, b in zip(one, two, strict=True) if a != b
    ]
    assert changed and {int(a.split()[0], 16) for a, _ in changed} <= bad, "another sample than a bad one changed"
    assert not bad & {int(row.split()[0], 16) for _, row in changed}
    assert all(a.split(" ", 1)[1].rsplit(" ", 1)[0] == b.split(" ", 1)[1].rsplit(" ", 1)[0] for a, b in changed), (
        "a replacement changed a shape"
    )
    assert {int(line["sample"], 16) for line in lines[1]} == bad
    assert len(lines[1]) == len(changed)
    for line in lines[1]:
        assert set(line) == {"shard", "record", "sample", "step", "by", "reason"}
        assert line["shard"] in line["reason"] and line["record"] in line["reason"]


def test_a_substitute_fits_into_the_text_length(cache: Cache) -> None:
    """Other ranks know nothing of it: the length of a step must not change."""
    planner = Planner(cache.open_snapshot(), seed=5, phase=1)
    plan = planner.step(0)
    long = list(planner.substitutes(plan, 0))
    short = list(planner.substitutes(dataclasses.replace(plan, length=4), 0))
    rows_of_long, rows_of_short = ([int(other.texts["rows"][0]) for other in some] for some in (long, short))
    assert rows_of_short == [rows for rows in rows_of_long if rows <= 4]
    assert 4 in rows_of_short and len(short) < len(long)
    assert int(plan.sample_id[0]) not in [int(other.sample_id[0]) for other in long]


def test_only_what_is_handed_out_is_written_down(rotten: tuple[Cache, set[int]], tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    steps = iter(loader(rotten[0], caption_drop=0.0, quarantine=file, prefetch=8, threads=2))
    next(steps)
    time.sleep(0.3)
    steps.close()  # type: ignore[attr-defined]
    assert not file.exists() or {json.loads(line)["step"] for line in file.read_text().splitlines()} <= {0}


def test_a_line_of_the_quarantine_is_written_under_a_lock_and_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks append to the same file, perhaps from other nodes."""
    path = tmp_path / "q.jsonl"
    file, calls = quarantine.Quarantine(path), list[tuple[str | int, int]]()
    monkeypatch.setattr(fcntl, "lockf", lambda stream, how: calls.append((how, path.stat().st_size)))
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append(("sync", path.stat().st_size)))
    file.write([quarantine.UnreadableRecord("s", "r", 1, 2, 3, "torn")])
    assert calls == [(fcntl.LOCK_EX, 0), ("sync", path.stat().st_size)] and path.read_text()


def test_a_quarantine_that_cannot_be_written_stops_the_run(rotten: tuple[Cache, set[int]], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        sequence(loader(rotten[0], caption_drop=0.0, quarantine=tmp_path / "no" / "q.jsonl"))


def test_a_bucket_with_nothing_to_put_in_its_place_stops_the_run(tmp_path: Path) -> None:
    cache = tiny_cache.build(tmp_path / "cache", {(16, 16): 2}, batch=1)
    for path in cache.root.glob("shards/latent-*/*/*.tar"):
        data = bytearray(path.read_bytes())
        for sample in (cache.open_snapshot().sample(0), cache.open_snapshot().sample(1)):
            data[sample.pictures["latent"].offset] ^= 1
        path.write_bytes(data)
    with pytest.raises(IntegrityError, match="wrong checksum"):
        sequence(loader(cache, quarantine=tmp_path / "q", stop_step=1))


def test_a_record_that_is_right_when_read_again_is_no_error(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = ShardReader.read_span, itertools.count()

    def once(self: ShardReader, shard: str, offset: int, views: list[memoryview]) -> int:
        got = real(self, shard, offset, views)
        if next(calls) % 7 == 0:
            views[0][0] ^= 1
        return got

    expected = sequence(loader(cache, stop_step=4))
    reading = loader(cache, stop_step=4)
    monkeypatch.setattr(ShardReader, "read_span", once)
    assert sequence(reading) == expected


@pytest.mark.parametrize("read", ["bf16", "bf16-zstd", "captions"])
def test_a_shard_that_was_replaced_is_read_anew(tmp_path: Path, read: str) -> None:
    """A repair publishes by rename; who has the damaged file open would read it for ever."""
    cache = tiny_cache.build(tmp_path / "cache", storage="bf16" if read == "captions" else read)
    reading, snapshot = loader(cache, stop_step=4), cache.open_snapshot()

    def outcome() -> list[Any]:
        if read == "captions":
            return [snapshot.captions(row, reading.readers["text"]) for row in range(len(snapshot))]
        return sequence(reading)

    expected = outcome()
    for reader in reading.readers.values():
        reader.close()
    for path in cache.root.glob("shards/*/*/*.tar"):
        reading.readers["latent" if "latent-" in str(path) else "text"].read_span(path.stem, 0, [bytearray(1)])
        right = path.read_bytes()
        path.write_bytes(bytes(byte ^ 1 for byte in right))  # in the file that is open
        (tmp_path / "new").write_bytes(right)
        os.replace(tmp_path / "new", path)
    assert outcome() == expected


@pytest.fixture
def few_descriptors() -> Iterator[Callable[[int], None]]:
    """`few_descriptors(n)` leaves this process n descriptors."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def leave(count: int) -> None:
        taken = set(map(int, os.listdir("/dev/fd")))
        free = (number for number in itertools.count() if number not in taken)
        resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, count, None)), before[1]))

    yield leave
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_files_with_numbers_above_the_limit_take_none_below(few_descriptors: Callable[[int], None]) -> None:
    with open(os.devnull) as file:
        above = fcntl.fcntl(file, fcntl.F_DUPFD, 900)
        few_descriptors(40)
        left = disk.descriptors_left()
        os.close(above)
        assert disk.descriptors_left() == left


@pytest.mark.parametrize("sized", [True, False])
def test_a_process_with_few_descriptors_reads_many_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_descriptors: Callable[[int], None], sized: bool
) -> None:
    """Readers open fewer shards where few descriptors are left; where those run out all the same, they let go."""
    monkeypatch.setattr(disk, "SPARE_DESCRIPTORS", 8)
    cache = tiny_cache.build(tmp_path / "cache", per_shard=1)
    expected = sequence(loader(cache))
    few_descriptors(40)
    if not sized:
        monkeypatch.setattr(shard, "descriptors_left", lambda: 10_000)
    reading = loader(cache)
    assert sequence(reading) == expected
    links = (f"/dev/fd/{number}" for number in os.listdir("/dev/fd"))
    still_open = sum(os.readlink(link).startswith(str(tmp_path)) for link in links if os.path.lexists(link))
    assert 0 < still_open <= 40 and (not sized or 8 < still_open <= 32), "as many as there may be"


def test_chunks_take_no_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sana_pipe.data.cache.snapshot_samples.CHUNK_ROWS", 4)
    opened = tiny_cache.build(tmp_path / "cache").open_snapshot()
    opened.sample(0)
    before = os.listdir("/dev/fd")
    assert len({opened.sample_id(row) for row in range(len(opened))}) == len(opened)
    assert [opened.source_item(row)[0] for row in range(len(opened))] == ["item"] * len(opened)
    assert len(opened.head.chunks) > 10
    assert len(os.listdir("/dev/fd")) == len(before)


def test_after_a_failed_step_nothing_more_is_read(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the steps behind it, which fail as well and weigh nothing, would go on without a bound."""
    began: list[int] = []
    real = Planner.step

    def note(self: Planner, step: int) -> Any:
        began.append(step)
        if step >= 5:
            raise OSError(5, "Input/output error")
        return real(self, step)

    monkeypatch.setattr(Planner, "step", note)
    steps = iter(loader(cache, prefetch=None, threads=3, stop_step=None))
    next(steps)
    time.sleep(0.5)
    assert max(began) < 5 + 3
    with pytest.raises(OSError, match="Input/output"):
        list(steps)


def test_a_disk_that_refuses_is_an_error_of_the_record(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = os.preadv

    def preadv(descriptor: int, views: Any, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".tar"):
            raise OSError(5, "Input/output error")
        return real(descriptor, views, offset)

    reading = loader(cache, prefetch=2, threads=2)
    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(IntegrityError, match=r"shards/.*\.tar: record [0-9a-f]{32} .*cannot be read: Input/output"):
        next(iter(reading))


def test_a_quarantine_that_cannot_be_written_is_found_at_the_start(cache: Cache, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        loader(cache, prefetch=0, threads=1, quarantine=tmp_path / "none" / "q.jsonl")
