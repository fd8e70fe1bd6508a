"""Packed snapshots in an object store: sequential reads through a small mirror, healing, packing there."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from sana_pipe.base.errors import IntegrityError
from sana_pipe.data.cache import audit
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.config import MirrorConfig
from sana_pipe.data.cache.object_store import ObjectStore
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.loader import shard_prefetch
from sana_pipe.data.loader.loader import Loader, LoaderSettings
from sana_pipe.data.loader.schedule import Schedule
from sana_pipe.data.snapshots import packing
from tests.support import tiny_cache
from tests.support.consumed import seen
from tests.support.loading import loader_settings
from tests.support.packed import pack

pytestmark = pytest.mark.slow

BUCKETS = {(256, 256): 480, (128, 256): 360}
BLOCK = 24
AWAITED_S = 60.0


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    cache = tiny_cache.build(tmp_path_factory.mktemp("pack-s3") / "cache", BUCKETS, batch=12, per_shard=24)
    pack(cache, BLOCK, window=3)
    return cache


@pytest.fixture(scope="module")
def place(disk: Cache, s3_bucket: str) -> str:
    """A copy of the cache in the bucket; nobody writes into it but to mend what he broke."""
    import fsspec

    url = f"{s3_bucket}/{uuid4().hex}"
    fsspec.filesystem("s3").put(f"{disk.root}/", f"{url.removeprefix('s3://')}/", recursive=True)
    return url


def consume(snapshot: Snapshot, **options: Any) -> Iterator[list[str]]:
    settings: dict[str, Any] = {
        "seed": 5,
        "phase": 1,
        "rank": 0,
        "world": 1,
        "microbatch": 12,
        "caption_drop": 0.0,
        "prefetch": 2,
        "threads": 2,
        "stop_step": 12,
    }
    for batches, _ in Loader(snapshot, LoaderSettings(**{**settings, **options})):
        yield seen(batches)


class Watched:
    """A cache behind a mirror of a size, with every fetch written down."""

    def __init__(self, place: str, folder: Path, size: int, patch: pytest.MonkeyPatch):
        self.cache = Cache(place, mirror=MirrorConfig(path=str(folder), gib=size / 2**30))
        self.fetched: Counter[str] = Counter()
        self.most, self.folder = 0, folder
        lock, real = threading.Lock(), ObjectStore.fetch

        def fetch(store: ObjectStore, name: str, path: Path) -> None:
            with lock:
                self.fetched[name] += 1
                self.most = max(self.most, self.size())
            real(store, name, path)

        patch.setattr(ObjectStore, "fetch", fetch)

    def size(self) -> int:
        return sum(path.stat().st_size for path in self.folder.glob("??/*") if path.exists())

    def shards(self) -> Counter[str]:
        return Counter({name: count for name, count in self.fetched.items() if name.startswith("shards/")})


def data(snapshot: Snapshot) -> int:
    return sum(snapshot.shard_files().values())


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_epoch_reads_each_packed_shard_about_once(
    disk: Cache, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    """With a mirror of less than half the data: at most a tenth more than once each. The order of the snapshot that it
    was packed from fetches every shard again and again: the reason for packing."""
    packed = disk.open_snapshot()
    source = Snapshot(disk.files, str(packed.head.parent))
    size = int(0.45 * data(packed))
    here = Watched(place, tmp_path / "mirror", size, monkeypatch)
    opened = here.cache.open_snapshot()
    steps = Schedule.of(packed.head, seed=5, phase=1).steps_upto(1)
    assert steps == 70
    result = list(consume(opened, stop_step=steps, prefetch=ahead))
    assert result == list(consume(packed, stop_step=steps, prefetch=0)), "a disk gives the same"
    fetched = here.shards()
    assert set(fetched) == set(packed.shard_files())
    read = sum(packed.shard_files()[name] * count for name, count in fetched.items())
    assert sum(fetched.values()) <= 1.1 * len(fetched) and read <= 1.1 * data(packed), fetched.most_common(5)
    assert 0 < here.most <= size
    if ahead:
        return
    plain = Watched(place, tmp_path / "other", size, monkeypatch)
    list(consume(Snapshot(plain.cache.files, source.id), stop_step=steps, prefetch=ahead))
    latents = [name for name in plain.shards() if name.startswith("shards/latent-")]
    assert sum(plain.shards()[name] for name in latents) > 5 * len(latents)
    assert plain.most <= size


def test_a_mirror_that_is_too_small_is_reported(
    disk: Cache, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = disk.open_snapshot()
    assert shard_prefetch.advice(packed) is None, "there is no mirror"
    shards = [size for size in packed.shard_files().values() if size > 50_000]
    for size, printed in ((19 * max(shards), True), (26 * max(shards), False)):  # 2 buckets x 2 windows of 3, twice: 24
        opened = Watched(place, tmp_path / "mirror", size, monkeypatch).cache.open_snapshot()
        assert (shard_prefetch.advice(opened) is not None) is printed
        plain = Snapshot(opened.files, str(packed.head.parent))
        assert shard_prefetch.advice(plain) is None


def test_epochs_that_follow_and_resumed_runs_stay_sequential(
    disk: Cache, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = disk.open_snapshot()
    here = Watched(place, tmp_path / "mirror", int(0.45 * data(packed)), monkeypatch)
    opened = here.cache.open_snapshot()
    truth = list(consume(packed, stop_step=210, prefetch=0))
    assert list(consume(opened, start_step=35, stop_step=210)) == truth[35:]
    assert sum(here.shards().values()) <= 1.1 * 3 * len(packed.shard_files())
    ranks = [list(consume(opened, stop_step=20, world=3, rank=rank)) for rank in range(3)]
    assert [list(itertools.chain(*parts)) for parts in zip(*ranks, strict=True)] == truth[:20]


def test_coming_shards_are_fetched_while_a_batch_is_in_use(
    disk: Cache, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Far beyond the steps that are read ahead, as far as half of the mirror goes and not further."""
    packed = disk.open_snapshot()
    size = int(0.6 * data(packed))
    here = Watched(place, tmp_path / "mirror", size, monkeypatch)
    steps = consume(here.cache.open_snapshot(), stop_step=None, prefetch=1)
    next(steps)

    def settled(least: int) -> int:
        """Fetches, once there are so many and no more come; on a busy machine the first may take seconds."""
        before, ends = -1, time.monotonic() + AWAITED_S
        while (before != (before := sum(here.shards().values())) or before < least) and time.monotonic() < ends:
            time.sleep(0.5)
        return before

    planner = Loader(
        packed,
        loader_settings(seed=5, phase=1),
    )
    at_once = {name for step in range(3) for name in planner.shard_paths(step)}
    first = settled(len(at_once) + 4)
    assert first > len(at_once) + 3, "nothing was fetched ahead"
    largest = max(packed.shard_files().values())
    ahead = sum(packed.shard_files()[name] for name in set(here.shards()) - at_once)
    assert ahead <= size // 2 + largest
    for _ in range(12):
        next(steps)
    assert settled(first + 1) > first, "it goes on as training does"
    steps.close()  # type: ignore[attr-defined]
    assert not [t for t in threading.enumerate() if t.name.startswith("fetch-") and t.is_alive() and not _ends(t)]


def _ends(thread: threading.Thread) -> bool:
    thread.join(10)
    return not thread.is_alive()


def test_a_mirror_that_holds_everything_is_planned_up_to_a_bound(
    disk: Cache, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_prefetch, "STEPS", 90)
    packed = disk.open_snapshot()
    here = Watched(place, tmp_path / "mirror", 4 * data(packed) + 2**22, monkeypatch)
    planned: list[int] = []
    real = Loader.shard_paths
    monkeypatch.setattr(Loader, "shard_paths", lambda self, step: planned.append(step) or real(self, step))
    result = []
    for step, rows in enumerate(consume(here.cache.open_snapshot(), stop_step=None, prefetch=1)):
        result.append(rows)
        assert not planned or max(planned) <= step + 2 + 90
        if step == 150:
            break
    assert planned == list(range(len(planned))) and len(planned) > 150
    assert result == list(consume(packed, stop_step=151, prefetch=0))
    assert max(here.shards().values()) == 1


def test_without_fetching_ahead_it_would_be_noticed(
    disk: Cache, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sabotage: shard prefetch that plans no step."""
    monkeypatch.setattr(shard_prefetch, "STEPS", 0)
    monkeypatch.setattr(sys.modules[__name__], "AWAITED_S", 2.0)
    with pytest.raises(AssertionError, match="nothing was fetched ahead"):
        test_coming_shards_are_fetched_while_a_batch_is_in_use(disk, place, tmp_path, monkeypatch)


def test_damage_here_is_healed_and_damage_there_is_named(
    disk: Cache, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = disk.open_snapshot()
    here = Watched(place, tmp_path / "mirror", 2 * data(packed) + 2**22, monkeypatch)
    truth = list(consume(here.cache.open_snapshot()))
    for copy in (tmp_path / "mirror").glob("??/*.tar"):
        content = bytearray(copy.read_bytes())
        content[len(content) // 2] ^= 1
        copy.write_bytes(content)
    assert list(consume(here.cache.open_snapshot())) == truth
    assert max(here.shards().values()) == 2

    step = Schedule.of(packed.head, seed=5, phase=1).step(0)
    sample = packed.sample(packed.row(step.bucket, int(step.positions[0])))
    files = here.cache.files
    assert isinstance(files.store, ObjectStore)
    name = next(name for name in packed.shard_files() if sample.pictures["latent"].shard in name)
    right = files.read(name)
    wrong = bytearray(right)
    wrong[sample.pictures["latent"].offset] ^= 1
    try:
        files.store.fs.pipe_file(f"{place.removeprefix('s3://')}/{name}", bytes(wrong))
        files.store.mirror.drop(name)
        with pytest.raises(
            IntegrityError,
            match=rf"s3://.*{sample.pictures['latent'].shard}[\s\S]*record {sample.pictures['latent'].key.hex()}",
        ):
            list(consume(here.cache.open_snapshot()))
        finding = next(iter(audit.verify(here.cache)))
        assert (finding.path, finding.records) == (name, (sample.pictures["latent"].key.hex(),))
        assert packing.restored(here.cache, name)
    finally:
        files.store.fs.pipe_file(f"{place.removeprefix('s3://')}/{name}", right)
    assert not list(audit.verify(here.cache))


def test_packing_in_the_store_reads_ranges_and_gives_the_same(
    disk: Cache, s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    local = tiny_cache.build(tmp_path / "local", {(256, 256): 60, (128, 256): 30}, batch=12, per_shard=24)
    url = f"{s3_bucket}/{uuid4().hex}"
    fsspec.filesystem("s3").put(f"{local.root}/", f"{url.removeprefix('s3://')}/", recursive=True)
    here = Watched(url, tmp_path / "mirror", 2**21, monkeypatch)
    assert pack(here.cache, 8).id == pack(local, 8).id
    assert not here.shards(), "whole shards were fetched"
    assert not list(audit.verify(here.cache))
