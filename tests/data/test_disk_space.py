"""Encoding pauses while the disk is full, holds no claim meanwhile, and goes on."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import sana_pipe.stages.encode
from sana_pipe import __version__
from sana_pipe.base.disk import cache_errors
from sana_pipe.base.errors import CacheError, NoSpaceError
from sana_pipe.config import Config
from sana_pipe.data.cache import index
from sana_pipe.data.cache.cache import Cache, Unit
from sana_pipe.data.cache.files import Files
from sana_pipe.data.encoding import estimate
from sana_pipe.data.work import claims, disk_space, engine, ray_engine
from sana_pipe.data.work.disk_space import DiskSpace
from sana_pipe.data.work.progress import Progress
from sana_pipe.data.work.stop import Stop, Stopped
from tests.support.empty_units import Maker, claimed, planned
from tests.support.trees import files

MakeConfig = Callable[..., Config]
MUCH = 1 << 50


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", create=True)


@pytest.fixture
def todo(cache: Cache) -> engine.Work:
    """Eight units."""
    return planned(cache)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Readings of the free bytes: each is taken once, the last one for ever. Polls are quick."""
    readings = [MUCH]
    monkeypatch.setattr(Files, "scratch_bytes", lambda self: readings.pop(0) if len(readings) > 1 else readings[0])
    monkeypatch.setattr(disk_space, "POLL_S", 0.02)
    return readings


def space_of(
    cache: Cache, sleep: Callable[[float], None] = time.sleep, reserve: int = 0, wait_s: float = 30
) -> DiskSpace:
    """Units need 1000 bytes each."""
    space = DiskSpace(cache, lambda plan, unit: 1000, sleep)
    space.reserve, space.wait_s = reserve, wait_s
    return space


def run(maker: Any, work: engine.Work, space: DiskSpace, stop: Stop | None = None) -> tuple[tuple[int, int], Progress]:
    bar = Progress("units", 0)
    worker = engine.Worker(claims.Claims(maker.cache.files, 60), stop or Stop(0))
    done = engine.make_units(maker, work, worker, bar, space)
    return done, bar


def test_it_pauses_without_a_claim_says_so_once_and_goes_on(
    cache: Cache, todo: engine.Work, free: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    free[:] = [MUCH, MUCH, 999, 999, 999, 999, MUCH]
    held: list[list[Path]] = []
    space = space_of(cache, lambda seconds: held.append(claimed(cache)))
    maker = Maker(cache)
    assert run(maker, todo, space)[0] == (0, 0)
    assert len(maker.done) == 8
    assert len(held) >= 2
    assert not any(held), "a claim was held during the pause"
    err = capsys.readouterr().err
    assert err.count("paused:") == 1
    assert "1000 B can be written; 999 B are free" in err
    assert err.count("encoding continues") == 1
    assert list((cache.root / "tmp").iterdir()) == []


def test_the_reserve_counts(cache: Cache, todo: engine.Work, free: list[int]) -> None:
    space = DiskSpace(cache, lambda plan, unit: 1000)
    free[:] = [2**30 + 1000]
    space.check(*todo[0])
    free[:] = [2**30 + 999]
    with pytest.raises(NoSpaceError, match="in reserve"):
        space.check(*todo[0])


@pytest.mark.parametrize("wait_s", [0.0, 0.2])
def test_after_the_wait_it_is_an_error_for_people(
    wait_s: float, cache: Cache, todo: engine.Work, free: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    free[:] = [MUCH, 0]
    maker = Maker(cache)
    with pytest.raises(NoSpaceError, match="in reserve") as caught:
        run(maker, todo, space_of(cache, wait_s=wait_s))
    assert caught.value.exit_code == 6
    assert len(maker.done) == 1
    assert claimed(cache) == []
    assert capsys.readouterr().err.count("paused:") == (1 if wait_s else 0)
    free[:] = [MUCH]
    run(maker, todo, space_of(cache))
    assert len(maker.done) == 8


def test_a_pause_looks_again_until_its_time_is_up(
    cache: Cache,
    todo: engine.Work,
    free: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The time runs from the first lack of space to a unit that was made, however often a unit is tried."""
    now, slept = [100.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(disk_space, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(disk_space, "POLL_S", 5.0)
    space = space_of(cache, sleep, 2 << 20, 12.0)
    first, unit = NoSpaceError("first"), todo[0]
    free[:] = [3 << 20, 0, 3 << 20]
    space.wait(*unit, first)
    assert slept == [5.0, 5.0]
    now[0] += 1
    free[:] = [0]
    with pytest.raises(NoSpaceError, match="in reserve"):
        space.wait(*unit, first)
    assert slept == [5.0, 5.0, 1.0]
    with pytest.raises(NoSpaceError) as caught:
        space.wait(*unit, first)
    assert caught.value is first and len(slept) == 3, "no time is left"
    err = capsys.readouterr().err
    assert err.count("paused: first: waiting at most 12 s until 2.0 MiB can be written; 3.0 MiB are free") == 1
    space.unit_made()
    space.unit_made()
    assert capsys.readouterr().err.count("encoding continues") == 1
    with pytest.raises(NoSpaceError):
        space.wait(*unit, first)
    assert slept[3:] == [5.0, 5.0, 2.0], "the next pause gets its full time"


def test_a_unit_of_no_known_size_still_tries_a_byte(
    cache: Cache, todo: engine.Work, free: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(os, "posix_fallocate", lambda file, start, size: asked.append((start, size)))
    DiskSpace(cache, lambda plan, unit: 0, lambda seconds: None).wait(*todo[0], NoSpaceError("full"))
    assert asked == [(0, 1)]


def test_a_signal_ends_the_pause(cache: Cache, todo: engine.Work, free: list[int]) -> None:
    free[:] = [0]
    stop = Stop(grace_s=60)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
    with pytest.raises(Stopped), stop.signals():
        timer.start()  # here the signal is caught, however late this process goes on
        run(Maker(cache), todo, space_of(cache, stop.sleep, wait_s=600), stop)
    timer.join()
    assert claimed(cache) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_write_that_fails_pauses_until_the_bytes_can_be_allocated(
    number: int,
    cache: Cache,
    todo: engine.Work,
    free: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with a quota: free bytes show nothing."""
    refused = []
    real = os.posix_fallocate

    def allocate(file: int, start: int, size: int) -> None:
        if len(refused) < 2:
            refused.append(size)
            raise OSError(number, os.strerror(number))
        real(file, start, size)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    failed = []

    def hook(unit: Unit, progress: Callable[[int, int], None]) -> None:
        progress(1, 0)
        if not failed:
            failed.append(unit.unit)
            with cache_errors(cache.root / "shard"):
                raise OSError(number, os.strerror(number))

    held: list[list[Path]] = []
    maker = Maker(cache, hook)
    _, bar = run(maker, todo, space_of(cache, lambda seconds: held.append(claimed(cache))))
    assert refused == [1000, 1000]
    assert held == [[], [], []]
    assert sorted(maker.done) == sorted(unit.unit for _, unit in todo)
    assert (bar.done, bar.total) == (8, 8), "what the failed attempt counted is counted once"
    assert list((cache.root / "tmp").iterdir()) == []


def test_a_disk_that_fills_again_and_again_is_given_up(cache: Cache, todo: engine.Work, free: list[int]) -> None:
    """Allocation works and writing does not: the time since a unit came through is what is limited."""
    tries = []

    def hook(unit: Unit, progress: Callable[[int, int], None]) -> None:
        tries.append(unit.unit)
        raise NoSpaceError("full again")

    with pytest.raises(NoSpaceError, match="full again"):
        run(Maker(cache, hook), todo, space_of(cache, wait_s=0.5))
    assert len(tries) > 1


def test_another_refusal_is_no_pause(cache: Cache, todo: engine.Work, free: list[int]) -> None:
    def hook(unit: Unit, progress: Callable[[int, int], None]) -> None:
        with cache_errors(cache.root / "shard"):
            raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.raises(CacheError, match="Permission denied") as caught:
        run(Maker(cache, hook), todo, space_of(cache))
    assert caught.value.exit_code == 3


def test_what_a_unit_needs(small_cache: Path) -> None:
    whole = Cache(small_cache)
    for kind, low, high in (("latent", 0.5, 1.0), ("text", 0.7, 2.0)):
        encoding = whole.encodings(kind)[0].name
        [plan] = whole.plans(encoding)
        sizes = {commit.unit: commit.bytes for commit in index.commits(whole.files, encoding, 0)}
        for unit in plan.units:
            assert low < estimate.unit_bytes(whole, plan, unit) / sizes[unit.unit] < high, kind


def test_a_real_run_waits_and_its_bytes_are_the_same(
    photos: Path,
    make_config: MakeConfig,
    small_cache: Path,
    tmp_path: Path,
    free: list[int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free[:] = [MUCH, 0]
    with monkeypatch.context() as patch, pytest.raises(NoSpaceError):
        patch.setattr(disk_space, "WAIT_S", 0.0)
        sana_pipe.stages.encode.run(make_config(tmp_path), data=str(photos))
    assert len(list((tmp_path / "cache").glob("shards/*/*/*"))) == 1
    assert list((tmp_path / "cache" / "tmp").iterdir()) == []
    free[:] = [0, 0, 0, 0, MUCH]
    sana_pipe.stages.encode.run(make_config(tmp_path), data=str(photos))
    assert capsys.readouterr().err.count("paused:") == 1
    ours, theirs = files(tmp_path / "cache"), files(small_cache)
    assert ours == {name: data for name, data in theirs.items() if name in ours}
    assert {name for name in theirs if name.startswith("shards/")} <= set(ours)


def test_a_ray_task_waits_too(
    photos: Path,
    make_config: MakeConfig,
    tmp_path: Path,
    free: list[int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = make_config(tmp_path)
    monkeypatch.setattr(disk_space, "WAIT_S", 0.0)
    free[:] = [0]
    with pytest.raises(NoSpaceError):
        sana_pipe.stages.encode.run(config, data=str(photos))
    cache = Cache(config.cache)
    encoding = cache.encodings("text")[0].name
    [plan] = cache.plans(encoding)

    def task() -> ray_engine.Done:
        text = config.model_dump_json()
        build = partial(sana_pipe.stages.encode.ray_encoder, text, (), ())
        order = ray_engine.WorkerSettings(text, str(tmp_path), __version__, build)
        before = Path.cwd()
        try:
            return ray_engine.make_unit(order, encoding, 0, plan.units[-1].unit)
        finally:
            os.chdir(before)
            ray_engine.makers.clear()

    with pytest.raises(NoSpaceError) as caught:
        task()
    assert caught.value.exit_code == 6
    assert not engine.is_done(cache, plan, plan.units[-1])
    free[:] = [0, 0, 0, MUCH]
    capsys.readouterr()
    monkeypatch.setattr(disk_space, "WAIT_S", 30.0)
    done = task()
    err = capsys.readouterr().err
    assert (err.count("paused:"), err.count("there is space again")) == (1, 1)
    assert done.records == plan.units[-1].count
    assert done.meter.tokens > 0
    assert 0 < done.meter.busy_s <= (done.meter.wall_s or 0)
    assert engine.is_done(cache, plan, plan.units[-1])


def test_the_error_survives_the_way_back_from_a_worker() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(NoSpaceError("full", expected="2 GiB", fix="free space")))
    assert (type(error), error.exit_code, error.what, error.fix) == (NoSpaceError, 6, "full", "free space")
    assert "2 GiB" in str(error)
