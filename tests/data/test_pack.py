"""Packed snapshots: the same records in joint shards, under the same laws, and read in long runs."""

from __future__ import annotations

import io
import itertools
import json
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sana_pipe.stages.bucket
import sana_pipe.stages.pack
import sana_pipe.stages.snapshots
import sana_pipe.stages.status
import sana_pipe.stages.verify
from sana_pipe.base.errors import IntegrityError, UserError
from sana_pipe.config import Config
from sana_pipe.data.cache import audit, compare, index, layout
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.findings import packs
from sana_pipe.data.cache.garbage import unneeded
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.cache.snapshot_head import BucketPart, PackedOrder
from sana_pipe.data.cache.status import status
from sana_pipe.data.loader.loader import Loader, LoaderSettings
from sana_pipe.data.loader.schedule import Schedule
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.snapshots import heldout, packing
from sana_pipe.data.work import engine
from tests.support import synthetic, tiny_cache
from tests.support.consumed import loader, sequence
from tests.support.damage import flip
from tests.support.messages import naming
from tests.support.packed import pack

SIZES = {(16, 16): 30, (16, 24): 26, (24, 16): 7}


def made(root: Path, **options: Any) -> tuple[Cache, Snapshot, Snapshot]:
    cache = tiny_cache.build(root, **options)
    return cache, cache.open_snapshot(), pack(cache)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Cache, Snapshot, Snapshot]:
    return made(tmp_path_factory.mktemp("pack") / "cache")


@pytest.fixture
def copy(both: tuple[Cache, Snapshot, Snapshot], tmp_path: Path) -> Cache:
    return Cache(shutil.copytree(both[0].root, tmp_path / "copy"))


def content(snapshot: Snapshot) -> dict[int, tuple[Any, ...]]:
    """Everything that is said of each sample, and every byte of its records."""
    readers = {kind: snapshot.reader(kind) for kind in ("latent", "text")}
    encoding, result = snapshot.encoding(LatentEncoding), {}
    for row in range(len(snapshot)):
        sample = snapshot.sample(row)
        bucket = snapshot.buckets[sample.bucket]
        latent = np.empty((encoding.channels, bucket.height // 8, bucket.width // 8), np.uint16)
        place = sample.pictures["latent"]
        readers["latent"].read(place.shard, place.offset, place.key, place.checksum, latent, place.length)
        texts = []
        for caption in sample.captions:
            text = np.empty((caption.rows, 3), np.uint16)
            readers["text"].read(caption.shard, caption.offset, caption.key, caption.checksum, text, caption.length)
            texts.append((caption.key, caption.checksum, caption.weight, text.tobytes()))
        said = snapshot.captions(row, readers["text"])
        result[sample.sample_id] = (
            sample.bucket,
            place.key,
            place.checksum,
            latent.tobytes(),
            texts,
            said,
            snapshot.source_item(row),
        )
    return result


@pytest.mark.parametrize("storage", ["bf16", "bf16-zstd"])
def test_a_shard_has_about_the_size_asked_for(tmp_path: Path, storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "OVERHEAD", 100)
    source = tiny_cache.build(tmp_path / "cache", storage=storage).open_snapshot()
    bytes_of_bucket = dict.fromkeys(range(len(source.buckets)), 0)
    for row in range(len(source)):
        sample = source.sample(row)
        pixels = source.buckets[sample.bucket].height * source.buckets[sample.bucket].width
        latent = (
            sample.pictures["latent"].length
            or 2 * source.encoding(LatentEncoding).channels * pixels // source.encoding(LatentEncoding).compression ** 2
        )
        texts = [caption.length or 2 * 3 * caption.rows for caption in sample.captions]
        bytes_of_bucket[sample.bucket] += latent + sum(texts) + 100 * (1 + 2 * len(texts))
    for samples in (1.4, 2.6, 5.3):
        target = round(samples * bytes_of_bucket[0] / source.buckets[0].samples)
        expected = [
            min(bucket.samples, max(1, round(target * bucket.samples / bytes_of_bucket[number])))
            for number, bucket in enumerate(source.buckets)
        ]
        assert packing.block_sizes(source, target) == expected and expected[0] == round(samples)


@pytest.mark.parametrize(("storage", "rows"), [("bf16", [21] * 3), ("bf16-zstd", [20, 20, 20, 3])])
def test_a_packed_snapshot_holds_the_same_samples(
    tmp_path: Path, storage: str, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "CHUNK_ROWS", rows[0])
    cache, source, packed = made(tmp_path / "cache", storage=storage)
    assert [chunk.rows for chunk in packed.head.chunks] == rows
    assert content(packed) == content(source)
    if storage != "bf16":
        assert packed.head.null.length == source.head.null.length is not None
    assert packed.id != source.id and packed.head.parent == source.id and packed.packed and not source.packed
    assert cache.snapshot_of("latest") == packed.id and packed.head.policies.packed == PackedOrder(2)
    assert not compare.difference(source, packed)
    assert tuple(replace(bucket, block=None) for bucket in packed.buckets) == source.buckets
    assert not list(audit.verify(cache))
    for path in packed.shard_files():
        assert path.startswith(f"shards/{packed.head.folder}/")
    order = [[s.sample_id(row) for row in range(len(s))] for s in (source, packed)]
    assert order[0] != order[1]
    sizes = Counter(packed.sample(row).pictures["latent"].shard for row in range(len(packed)))
    assert set(sizes.values()) <= {4, 30 % 4, 26 % 4, 7 % 4}, "blocks are shards"


def test_shards_have_about_the_size_that_was_asked_for(tmp_path: Path) -> None:
    cache = tiny_cache.build(tmp_path / "cache", {(512, 512): 100, (64, 64): 300}, batch=8, per_shard=100)
    plan = packing.planned(cache, cache.open_snapshot(), 1)
    packer = packing.Packer(cache, cache.open_snapshot(), plan)
    told: list[tuple[int, int]] = []
    sizes = [packer.make(plan, unit, lambda *counts: told.append(counts)).bytes for unit in plan.units[:-1]]
    assert len(sizes) > 3
    assert told == [(unit.count, 0) for unit in plan.units[:-1]], "progress"
    full = [size for size, unit in zip(sizes, plan.units, strict=False) if unit.count in (plan.units[0].count,)]
    assert all(0.6 * 2**20 < size < 1.4 * 2**20 for size in full), sizes


def test_webdataset_pairs_latent_text_and_captions(both: tuple[Cache, Snapshot, Snapshot]) -> None:
    webdataset = pytest.importorskip("webdataset")
    cache, source, packed = both
    paths = sorted(str(cache.root / name) for name in packed.shard_files())
    truth = content(source)
    result = 0
    for sample in webdataset.WebDataset(paths, shardshuffle=False, empty_check=False):
        expected = truth[int(sample["__key__"], 16)]
        assert np.load(io.BytesIO(sample["latent.npy"])).tobytes() == expected[3]
        names = ["", "1."][: len(expected[4])]
        assert [np.load(io.BytesIO(sample[f"{n}text.npy"])).tobytes() for n in names] == [
            text[3] for text in expected[4]
        ]
        assert [sample[f"{n}txt"].decode() for n in names] == expected[5]
        assert {k for k in sample if not k.startswith("__")} == {"latent.npy"} | {
            f"{n}{kind}" for n in names for kind in ("text.npy", "txt")
        }
        result += 1
    assert result == len(truth)
    decoded = next(iter(webdataset.WebDataset(paths, shardshuffle=False, empty_check=False).decode()))
    assert decoded["latent.npy"].dtype == np.uint16 and isinstance(decoded["txt"], str)


def test_packing_is_a_function_of_the_content(tmp_path: Path) -> None:
    (_, _, one), (_, _, other) = made(tmp_path / "a"), made(tmp_path / "b")
    assert one.id == other.id
    shards = [{path.name: path.read_bytes() for path in (tmp_path / n / "shards").rglob("*.tar")} for n in "ab"]
    assert shards[0] == shards[1]
    _, source, _ = made(tmp_path / "c", seed=1)
    assert packing.planned(Cache(tmp_path / "c"), source, 4).encoding != one.head.folder


def test_weighted_parts_are_shuffled_and_packed_apart(tmp_path: Path) -> None:
    cache = tiny_cache.build(tmp_path / "cache")
    head = cache.open_snapshot().head
    weighted = replace(head.buckets[0], parts=(BucketPart(10, Fraction(2)), BucketPart(20, Fraction(1, 2))))
    head = replace(head, parent=None, buckets=(weighted, *head.buckets[1:]))
    source = cache.open_snapshot(cache.add_snapshot(head, None))
    packed = pack(cache)
    assert content(packed) == content(source)
    for rows in (range(10), range(10, 30)):
        assert {packed.sample_id(row) for row in rows} == {source.sample_id(row) for row in rows}
    assert not {packed.sample(r).pictures["latent"].shard for r in range(10)} & {
        packed.sample(r).pictures["latent"].shard for r in range(10, 30)
    }
    schedule, visits = Schedule.of(packed.head, seed=5, phase=1), Counter[int]()
    for t in range(schedule.steps_upto(40)):
        step = schedule.step(t)
        if step.bucket == 0:
            visits.update(step.positions.tolist())
    fast, slow = [visits[i] for i in range(10)], [visits[i] for i in range(10, 30)]
    assert all(abs(n - 80) <= 2 for n in fast) and all(abs(n - 20) <= 2 for n in slow)
    assert not list(audit.verify(cache))


def test_what_is_packed_is_not_packed_again(both: tuple[Cache, Snapshot, Snapshot]) -> None:
    cache, source, packed = both
    with pytest.raises(UserError, match=rf"is packed already[\s\S]*{source.id}"):
        packing.planned(cache, packed, 4)


def test_bucket_again_finds_what_was_packed(copy: Cache) -> None:
    """The same samples are the snapshot that was packed, although `latest` points to the packed one."""
    packed = copy.open_snapshot()
    source = Snapshot(copy.files, str(packed.head.parent))
    assert copy.add_snapshot(replace(source.head, parent=None), None) == source.id
    assert pack(copy).id == packed.id


def test_the_commands(
    small_cache_copy: Path, make_config: Callable[..., Config], capsys: pytest.CaptureFixture[str]
) -> None:
    """Real encoders' records: bucket, pack, status, snapshots, verify; packing again changes nothing."""
    config = make_config(small_cache_copy.parent)
    cache = Cache(small_cache_copy)
    source = cache.open_snapshot()
    packed = sana_pipe.stages.pack.run(config, name="far", as_json=True)
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    opened = cache.open_snapshot("far")
    assert (told["snapshot"], told["packed_from"], told["name"]) == (packed, source.id, "far")
    assert told["shards"] == len(opened.shard_files()) and (told["made"], told["left"]) == (13, 0)
    assert opened.id == packed and opened.head.parent == source.id
    assert cache.open_snapshot().id == source.id, "nobody asked for another newest snapshot"
    assert told["bytes"] == sum(opened.shard_files().values())
    before = {path: path.stat().st_mtime_ns for path in small_cache_copy.rglob("*") if "names" not in path.parts}
    again = sana_pipe.stages.bucket.run(config)
    assert again == source.id and sana_pipe.stages.pack.run(config, again) == packed
    assert cache.open_snapshot(f"{source.id[:12]}.packed").id == packed
    assert sana_pipe.stages.pack.run(config, latest=True) == packed == cache.open_snapshot().id
    after = {path: path.stat().st_mtime_ns for path in small_cache_copy.rglob("*") if "names" not in path.parts}
    assert {p for p in after if p.is_file()} == {p for p in before if p.is_file()}, "something was made again"
    out = capsys.readouterr().out
    assert f"packed {source.id} into {told['shards']} shards" in out and f"snapshot {packed}" in out
    assert sana_pipe.stages.status.run(config) == 0 and f"snapshot far: {packed} (packed)" in capsys.readouterr().out
    assert sana_pipe.stages.snapshots.run(config) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if "(packed)" in line]
    assert line.startswith(packed[:12]) and source.id[:12] in line
    name = next(iter(opened.shard_files()))
    flip(small_cache_copy / name, 4000)
    assert sana_pipe.stages.verify.run(config) == IntegrityError.exit_code
    assert sana_pipe.stages.verify.run(config, repair=True) == 0 and sana_pipe.stages.verify.run(config) == 0
    with pytest.raises(UserError, match="is packed already"):
        sana_pipe.stages.pack.run(config)


def test_a_pack_whose_name_is_taken_leaves_nothing_to_be_finished(
    small_cache_copy: Path, make_config: Callable[..., Config]
) -> None:
    config = make_config(small_cache_copy.parent)
    cache = Cache(small_cache_copy)
    cache.point("mine", cache.open_snapshot().id)
    with pytest.raises(UserError, match=naming("'mine'", "--move")):
        sana_pipe.stages.pack.run(config, name="mine")
    assert packs(cache) == [] and sana_pipe.stages.status.run(config) == 0
    packed = sana_pipe.stages.pack.run(config, name="mine", move=True)
    assert (
        cache.snapshot_of("mine") == packed == sana_pipe.stages.pack.run(config, cache.open_snapshot().id, name="mine")
    )


def test_packing_sweeps_claims_and_restores_copies(small_cache_copy: Path, make_config: Callable[..., Config]) -> None:
    """What a killed process and a bad disk leave."""
    config = make_config(small_cache_copy.parent)
    cache = Cache(small_cache_copy)
    source = cache.open_snapshot().id
    sana_pipe.stages.pack.run(config)
    [name] = packs(cache)
    cache.files.put(Paths.claim(name, 0, cache.plan(name, 0).units[0].unit), b"{}\n")
    copy = cache.files.path(Paths.copy(Paths.numbered(Paths.plans(name), 0)))
    copy.unlink()
    sana_pipe.stages.pack.run(config, source)
    assert not cache.files.names(Paths.claims(name, 0)) and copy.exists()


def test_the_longest_name_can_be_packed(small_cache_copy: Path, make_config: Callable[..., Config]) -> None:
    config = make_config(small_cache_copy.parent)
    cache = Cache(small_cache_copy)
    cache.point("n" * 100, cache.open_snapshot().id)
    packed = sana_pipe.stages.pack.run(config, "n" * 100)
    assert cache.snapshot_of("n" * 85 + ".packed") == packed


# ---------------------------------------------------------------- training


def test_order_law_and_exactly_once(both: tuple[Cache, Snapshot, Snapshot]) -> None:
    cache, _, packed = both
    truth = sequence(loader(cache))
    for world, ahead in itertools.product((1, 2, 3, 4, 8, 12), (0, 3)):
        ranks = [sequence(loader(cache, rank=r, world=world, prefetch=ahead, threads=2)) for r in range(world)]
        assert [list(itertools.chain(*parts)) for parts in zip(*ranks, strict=True)] == truth
    schedule = Schedule.of(packed.head, seed=5, phase=1)
    steps, ids = schedule.steps_upto(8), {size: Counter[int]() for size in SIZES}
    for batches, _ in loader(cache, stop_step=steps):
        for batch in batches:
            ids[batch.bucket].update(batch.sample_ids)
    assert sum(sum(visits.values()) for visits in ids.values()) == steps * tiny_cache.BATCH
    for size, visits in ids.items():
        assert len(visits) == SIZES[size] and max(visits.values()) - min(visits.values()) <= 1
        assert 0 <= 8 * SIZES[size] - sum(visits.values()) < tiny_cache.BATCH, (
            "more than the stated remainder is missing"
        )


def test_the_same_visit_is_the_same_in_both(both: tuple[Cache, Snapshot, Snapshot]) -> None:
    """Only the order differs: what a visit of a sample shows (its records, caption, noise, times) does not."""
    cache, source, packed = both
    result = []
    for snapshot in (source, packed):
        counts = Counter[tuple[int, bytes]]()
        steps = Schedule.of(snapshot.head, seed=5, phase=1).steps_upto(24)  # 24 epochs fill batches of 24 exactly
        settings: dict[str, Any] = {"caption_drop": 0.2, "prefetch": 0, "threads": 1}
        every = Loader(
            snapshot,
            LoaderSettings(seed=5, phase=1, rank=0, world=1, microbatch=24, text="packed", stop_step=steps, **settings),
        )
        for (batch,), _ in every:
            assert batch.cu_seqlens is not None
            for i, identity in enumerate(batch.sample_ids):
                text = batch.captions[batch.cu_seqlens[i] : batch.cu_seqlens[i + 1]]
                counts[
                    identity,
                    b"".join(
                        t.contiguous().flatten().view(torch.uint8).numpy().tobytes()
                        for t in (batch.latents[i], text, batch.noise[i], batch.logit[i : i + 1])
                    ),
                ] += 1
        result.append(counts)
    assert result[0] == result[1] and sum(result[0].values()) == 24 * sum(SIZES.values())


def test_resume_at_any_step(both: tuple[Cache, Snapshot, Snapshot]) -> None:
    cache, _, _ = both
    truth = sequence(loader(cache, stop_step=12))
    for start in range(12):
        assert sequence(loader(cache, start_step=start, stop_step=12, prefetch=2)) == truth[start:]


def test_unpacked_snapshots_keep_their_order(both: tuple[Cache, Snapshot, Snapshot]) -> None:
    _, source, _ = both
    plain = Schedule(
        [b.samples for b in source.buckets], [b.batch for b in source.buckets], seed=5, phase=1, remainder="carry"
    )
    order = Schedule.of(source.head, seed=5, phase=1)
    for step in range(40):
        assert order.step(step).positions.tolist() == plain.step(step).positions.tolist()


# ---------------------------------------------------------------- integrity


def test_a_flipped_bit_in_a_joint_shard_is_named(copy: Cache) -> None:
    packed = copy.open_snapshot()
    sample = packed.sample(3)
    place = sample.pictures["latent"]
    path = copy.root / f"shards/{packed.head.folder}/{place.shard[:2]}/{place.shard}.tar"
    flip(path, place.offset + 1)
    with pytest.raises(IntegrityError, match=rf"{place.shard}[\s\S]*record {place.key.hex()}"):
        list(loader(copy, stop_step=40))
    finding = next(iter(audit.verify(copy)))
    assert (finding.path, finding.records) == (str(path.relative_to(copy.root)), (place.key.hex(),))
    assert packing.restored(copy, finding.path) and not list(audit.verify(copy))
    caption = sample.captions[0]
    flip(path, packed.written(3)[0]["offset"])
    finding = next(iter(audit.verify(copy)))
    assert finding.records == (caption.key.hex(),) and "1 records" in finding.problem
    assert packing.restored(copy, finding.path)
    flip(path, path.stat().st_size - 1)
    assert "outside the records" in next(iter(audit.verify(copy))).problem
    assert packing.restored(copy, finding.path) and not list(audit.verify(copy))
    null = packed.null
    flip(copy.root / f"shards/{packed.head.folder}/{null.shard[:2]}/{null.shard}.tar", null.offset)
    assert next(iter(audit.verify(copy))).records == (null.key.hex(),)
    with pytest.raises(IntegrityError, match=null.key.hex()):
        loader(copy)


@pytest.mark.parametrize("step", [397, pytest.param(7, marks=pytest.mark.nightly)])
def test_no_bit_of_a_joint_shard_goes_unnoticed(copy: Cache, step: int) -> None:
    """Some bytes, by reading all records (silent only outside of them) and by `verify` (never silent)."""
    packed = copy.open_snapshot()
    shard = packed.sample(0).pictures["latent"].shard
    path = copy.root / f"shards/{packed.head.folder}/{shard[:2]}/{shard}.tar"
    right, truth = path.read_bytes(), content(packed)
    for at in range(0, len(right), step):
        flip(path, at)
        assert copy.files.digest(str(path.relative_to(copy.root))) != shard
        with suppress(IntegrityError):
            assert content(Snapshot(copy.files, packed.id)) == truth, "wrong bytes were handed out"
        path.write_bytes(right)


def test_a_missing_joint_shard_is_refused_and_made_again(copy: Cache) -> None:
    packed = copy.open_snapshot()
    path = sorted(packed.shard_files())[2]
    (copy.root / path).unlink()
    with pytest.raises(IntegrityError, match="missing"):
        loader(copy)
    assert {finding.path for finding in audit.verify(copy)} == {path, f"snapshots/{packed.id}.json"}
    assert packing.restored(copy, path) and not list(audit.verify(copy))


def test_a_lost_commit_of_a_joint_shard_is_made_again(copy: Cache) -> None:
    folder = copy.open_snapshot().head.folder or ""
    before = index.commits(copy.files, folder, 0)
    [name, *_] = sorted(path.relative_to(copy.root).as_posix() for path in copy.root.glob(f"units/{folder}/*/*/*.json"))
    for place in (name, layout.Paths.copy(name)):
        (copy.root / place).unlink()
    assert len(index.commits(copy.files, folder, 0)) == len(before) - 1
    source = copy.open_snapshot(str(copy.open_snapshot().head.parent))
    packer = packing.Packer(copy, source, copy.plan(folder, 0))
    [lost] = [unit for _, unit in engine.missing_units(copy, [packer.plan])]
    packer.pack_unit(lost)
    said = [
        [(commit.unit, commit.shard, commit.table) for commit in each]
        for each in (before, index.commits(copy.files, folder, 0))
    ]
    assert said[0] == said[1]


def test_a_damaged_record_is_never_packed(tmp_path: Path) -> None:
    cache = tiny_cache.build(tmp_path / "cache")
    source = cache.open_snapshot()
    sample = source.sample(9)
    place = sample.pictures["latent"]
    path = cache.root / layout.Paths.shard(source.encoding(LatentEncoding).name, place.shard)
    flip(path, place.offset)
    with pytest.raises(IntegrityError, match=f"record {place.key.hex()}"):
        pack(cache)
    assert cache.open_snapshot().id == source.id


# ---------------------------------------------------------------- publication


def test_gc_spares_what_is_named_and_what_is_being_packed(copy: Cache) -> None:
    later = time.time() + 10**7
    packed = copy.open_snapshot()

    def reasons(of: str) -> dict[str, str]:
        return {path: why for path, _, why in unneeded(copy, now=later) if of in path}

    assert not reasons(packed.head.folder)
    source_head = Snapshot(copy.files, str(packed.head.parent)).head
    named = copy.add_snapshot(replace(source_head, parent=None), None)
    assert named == packed.head.parent, "the source is the newest again"
    result = reasons(packed.head.folder)
    assert len(result) == 2 * len(packed.shard_files()) + 1, "shards, units, the plan"
    for path, _, _ in list(unneeded(copy, now=later)):
        copy.files.remove(path)
    assert not list(audit.verify(copy)) and not list(unneeded(copy, now=later))
    source = copy.open_snapshot()
    plan = packing.planned(copy, source, 1)
    packing.Packer(copy, source, plan).pack_unit(plan.units[0])
    assert not reasons(plan.encoding), "a pack that is not finished goes on"
    assert status(copy)["stores"][plan.encoding]["units_done"] == 1 and not status(copy)["complete"]


CHILD = """
import sys, time
import sana_pipe.data.snapshots.packing as packing
from sana_pipe.data.cache.joint import JointWriter
import sana_pipe.stages.bucket
import sana_pipe.stages.pack
import sana_pipe.stages.snapshots
import sana_pipe.stages.status
import sana_pipe.stages.verify
import sana_pipe.data.work.claims
from sana_pipe.config import load
real = JointWriter.finish
def slow(self):
    print("finish", flush=True)
    time.sleep(float(sys.argv[2]))
    return real(self)
JointWriter.finish = slow
config = load("tiny", [f"cache={sys.argv[1]}", "bucket.pack_mib=1"])
sana_pipe.data.work.claims.STALE_S = 2
print("packed", sana_pipe.stages.pack.run(config), flush=True)
"""


def start(root: Path, slow: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(root), str(slow)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )


BIG = {(256, 256): 600, (128, 256): 300}


@pytest.mark.fault
def test_killed_while_packing_the_next_run_finishes(tmp_path: Path) -> None:
    """SIGKILL in the middle; then two processes at once. The same bytes as without, and no unit twice."""
    truth = tiny_cache.build(tmp_path / "truth", BIG, per_shard=300)
    cache = tiny_cache.build(tmp_path / "cache", BIG, per_shard=300)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sana_pipe.stages.pack.click, "echo", lambda *a, **k: None)
        done = start(truth.root, 0)
        assert done.wait(60) == 0
    label = f"{truth.open_snapshot().id[:12]}.packed"
    expected = truth.open_snapshot(label)
    assert expected.packed and len(expected.shard_files()) >= 5
    victim = start(cache.root, 0.3)
    assert victim.stdout is not None
    for _ in range(3):
        assert victim.stdout.readline().strip() == "finish"
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert cache.snapshot_of(label) is None, "no half of a pack is to be seen"
    folder = expected.head.folder
    before = status(cache)["stores"][folder]["units_done"]
    assert before >= 2
    helpers = [start(cache.root, 0.05) for _ in range(2)]
    outs = [helper.communicate(timeout=90)[0] for helper in helpers]
    assert all(helper.returncode == 0 for helper in helpers)
    assert sum(out.count("finish") for out in outs) <= len(expected.shard_files()) - before + 1
    assert cache.open_snapshot(label).id == expected.id
    result = {p.relative_to(cache.root) for p in (cache.root / "shards" / folder).rglob("*.tar")}
    assert result == {p.relative_to(truth.root) for p in (truth.root / "shards" / folder).rglob("*.tar")}
    assert not list(audit.verify(cache))


def test_a_pack_has_the_held_out_part_of_its_source(tmp_path: Path) -> None:
    """It stays the pack's after another run of `bucket`, and the source needs no name."""
    of = synthetic.config(tmp_path / "cache", "bucket.heldout=0.3")
    cache = synthetic.add(of, "one", synthetic.pictures(12))
    source = sana_pipe.stages.bucket.run(of)
    part = cache.snapshot_of("latest.heldout")
    packed = sana_pipe.stages.pack.run(of)
    assert part is not None and packed is not None
    assert cache.snapshot_of(f"{source[:12]}.packed.heldout") == part
    sana_pipe.stages.bucket.run(synthetic.config(tmp_path / "cache", "bucket.heldout=0.3", "bucket.filter=score > 2"))
    assert heldout.find(cache, cache.open_snapshot(packed)) == part
