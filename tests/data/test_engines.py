"""Engines: the same cache whoever encodes a unit, and whatever becomes of the others."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import sana_pipe.stages.encode
from sana_pipe import __version__
from sana_pipe.base import retrying
from sana_pipe.base.errors import NoSpaceError, UserError
from sana_pipe.config import Config, dump, load
from sana_pipe.data.cache import index, layout
from sana_pipe.data.cache.cache import Cache, Unit, WorkList
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.encoding.config import EncodeConfig
from sana_pipe.data.work import claims, engine, ray_engine
from sana_pipe.data.work.claims import Claims
from sana_pipe.data.work.disk_space import DiskSpace
from sana_pipe.data.work.progress import Meter, Progress
from sana_pipe.data.work.stop import SIGNALS, Stop, Stopped
from tests.support.constants import constants, set_constants, unit_sizes, with_site
from tests.support.empty_units import Maker, claimed, planned
from tests.support.forked import Forked
from tests.support.messages import naming
from tests.support.trees import files

ROOT = Path(__file__).resolve().parents[2]
MakeConfig = Callable[..., Config]
STALE_S = 3
BATCHES = (
    "data.pictures={control: {made: canny}, mask: {made: alpha}}",
    "encode.image_batch=2",
)


@pytest.fixture(scope="module", autouse=True)
def small_units(small_cache: Path) -> Iterator[None]:
    """Small units, which other workers take over soon. The cache that tests share is made before, with usual ones."""
    with constants({**unit_sizes(2, 3), "sana_pipe.data.work.claims.STALE_S": STALE_S}):
        yield


# ---------------------------------------------------------------- the local engine, with a maker that only commits


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", create=True)


@pytest.fixture
def todo(cache: Cache) -> engine.Work:
    return planned(cache)


def here(
    maker: Any, todo: engine.Work, task: int = 0, tasks: int = 1, stale_s: float = 60, stop: Stop | None = None
) -> tuple[int, int]:
    worker = engine.Worker(Claims(maker.cache.files, stale_s), stop or Stop(0), task, tasks)
    return engine.make_units(maker, todo, worker, Progress("units", 0))


def other_machine(cache: Cache) -> Claims:
    """A worker of which this machine knows nothing but its claims."""
    claims = Claims(cache.files, 60)
    claims.place = {}
    return claims


def test_its_own_share_comes_first_then_the_others(cache: Cache, todo: engine.Work) -> None:
    maker = Maker(cache)
    assert here(maker, todo, task=1, tasks=3) == (0, 0)
    mine = [u.unit for _, u in todo if int(u.unit[:8], 16) % 3 == 1]
    assert 0 < len(mine) < 8
    assert maker.done[: len(mine)] == mine
    assert sorted(maker.done) == sorted(u.unit for _, u in todo)
    assert claimed(cache) == []


def test_two_at_once_do_each_unit_once(cache: Cache, todo: engine.Work) -> None:
    makers = [Maker(cache, lambda unit, progress: time.sleep(0.05)) for _ in range(3)]
    calls: list[str] = []
    for maker in makers:
        slow = maker.hook
        maker.hook = lambda unit, progress, slow=slow: (calls.append(unit.unit), slow(unit, progress))  # type: ignore
    threads = [threading.Thread(target=here, args=(maker, todo)) for maker in makers]  # no shares at all
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(calls) == sorted(u.unit for _, u in todo)
    assert claimed(cache) == []


def test_a_unit_of_a_living_owner_is_left_to_it(cache: Cache, todo: engine.Work) -> None:
    owner = other_machine(cache)
    owner.stale_s = 0.6
    plan, unit = todo[3]
    assert owner.take(plan.encoding, plan.number, unit.unit) == "ours"
    maker = Maker(cache)
    with owner.heartbeat(plan.encoding, plan.number, unit.unit):
        began = time.monotonic()
        assert here(maker, todo, stale_s=60) == (0, 1)
    assert time.monotonic() - began < 20, "it waited for more than a sign of life"
    assert unit.unit not in maker.done
    assert len(maker.done) == 7


def test_a_unit_of_a_lost_owner_is_taken_over(cache: Cache, todo: engine.Work) -> None:
    plan, unit = todo[0]
    other_machine(cache).take(plan.encoding, plan.number, unit.unit)
    maker = Maker(cache)
    began = time.monotonic()
    assert here(maker, todo, stale_s=1) == (0, 0)
    assert time.monotonic() - began >= 1
    assert maker.done[-1] == unit.unit, "the others were done while the claim was watched"
    assert len(maker.done) == 8
    assert claimed(cache) == []


def test_a_unit_committed_while_it_was_claimed_is_not_done_again(cache: Cache, todo: engine.Work) -> None:
    plan, unit = todo[-1]
    late = index.Commit(unit.unit, None, 0, 0, None, (), {"by": "another"})

    def commits_meanwhile(this: Unit, progress: Callable[[int, int], None]) -> None:
        assert this.unit != unit.unit
        index.publish_commit(cache.files, plan.encoding, plan.number, late)

    assert here(Maker(cache, commits_meanwhile), todo) == (0, 0)


def test_claims_of_committed_units_are_swept(cache: Cache, todo: engine.Work) -> None:
    plan, unit = todo[0]
    owner = other_machine(cache)
    owner.take(plan.encoding, plan.number, unit.unit)
    owner.take(plan.encoding, plan.number, todo[1][1].unit)
    index.publish_commit(cache.files, plan.encoding, plan.number, index.Commit(unit.unit, None, 0, 0, None, (), {}))
    assert claims.sweep(cache, [plan]) == 1
    assert [p.stem for p in claimed(cache)] == [todo[1][1].unit]


def test_committed_units_are_swept_plan_by_plan(cache: Cache, todo: engine.Work) -> None:
    plan = todo[0][0]
    cache.add_plan(plan.encoding, 1, [Unit(layout.digest("other").hex(), 0, 1, 1)], pa.table({"n": [0]}))
    second = cache.plan(plan.encoding, 1)
    owner = other_machine(cache)
    for of, unit in [*todo, (second, second.units[0])]:
        owner.take(of.encoding, of.number, unit.unit)
    folder = cache.root / Paths.claims(plan.encoding, plan.number)
    (folder / f"{todo[0][1].unit}.txt").touch()
    for of, unit in [*todo[:3], (second, second.units[0])]:
        assert index.publish_commit(cache.files, of.encoding, of.number, empty(unit))
    assert claims.sweep(cache, [plan]) == 3
    assert claims.sweep(cache, [plan, second]) == 1
    left = [f"{todo[0][1].unit}.txt", *(f"{unit.unit}.json" for _, unit in todo[3:])]
    assert sorted(p.name for p in claimed(cache)) == sorted(left)


def empty(unit: Unit) -> index.Commit:
    return index.Commit(unit.unit, None, 0, 0, None, (), {})


def test_missing_units_are_those_without_a_commit(cache: Cache, todo: engine.Work) -> None:
    plan = todo[0][0]
    segment = cache.root / Paths.segment(plan.encoding, plan.number)
    for _, unit in todo[1:3]:
        index.publish_commit(cache.files, plan.encoding, plan.number, empty(unit))
    assert engine.missing_units(cache, [plan]) == [todo[0], *todo[3:]]
    assert [engine.is_done(cache, plan, unit) for _, unit in todo] == [False, True, True, *[False] * 5]
    assert not segment.exists()
    for _, unit in [todo[0], *todo[3:]]:
        index.publish_commit(cache.files, plan.encoding, plan.number, empty(unit))
    assert engine.missing_units(cache, [plan]) == []
    assert segment.exists(), "a finished plan gets its segment"
    (cache.root / Paths.unit(plan.encoding, plan.number, todo[0][1].unit)).unlink(missing_ok=True)
    assert engine.is_done(cache, plan, todo[0][1])


class Letters(engine.Job[str]):
    """Items of one kind: `others` are published after `collect` was asked so often."""

    def __init__(self, others: dict[str, int] | None = None):
        self.others, self.events = dict(others or {}), []  # type: ignore[var-annotated]
        self.made: set[str] = set()

    def claim_key(self, item: str) -> tuple[str | int, ...]:
        return "letters", item

    def collect(self, item: str) -> bool:
        self.events.append(f"look {item[8:]}")
        if item in self.others:
            self.others[item] -= 1
        return item in self.made or self.others.get(item) == 0

    def make(self, item: str) -> None:
        self.events.append(f"make {item[8:]}")
        self.made.add(item)


def slept(worker: engine.Worker) -> list[float]:
    """What the worker sleeps; nothing waits."""
    times: list[float] = []
    worker.stop.sleep = times.append  # type: ignore[method-assign]
    return times


def test_each_item_is_looked_at_again_once_it_is_claimed(cache: Cache) -> None:
    worker = engine.Worker(Claims(cache.files, 48), Stop(0))
    job = Letters({"00000000b": 1, "00000000c": 2})
    times = slept(worker)
    worker.run(job, ["00000000a", "00000000b", "00000000c"], lambda item: item)
    assert job.events == ["look a", "look a", "make a", "look b", "look c", "look c"]
    assert times == []
    assert claimed(cache) == []


def test_shares_are_told_by_the_id_and_the_rest_has_an_order_of_its_own(cache: Cache) -> None:
    items = [f"{number:08x}{number:x}" for number in range(16)]
    assert [engine.in_share(item + "ff", 2, 5) for item in items] == [number % 5 == 2 for number in range(16)]
    worker = engine.Worker(Claims(cache.files, 48), Stop(0), 2, 5)
    job = Letters()
    worker.run(job, items, lambda item: item)
    rest = sorted((i for i in items if int(i, 16) // 16 % 5 != 2), key=lambda i: layout.digest(worker.claims.token, i))
    assert [event[5:] for event in job.events if event.startswith("make")] == ["2", "7", "c", *(i[8:] for i in rest)]


@pytest.mark.parametrize(("given", "sleeps"), [({}, 2.0), ({"poll_s": 0.5}, 0.5), ({"poll_s": 9.0}, 2.0)])
def test_only_an_idle_worker_waits(cache: Cache, given: dict[str, float], sleeps: float) -> None:
    other_machine(cache).take("letters", "00000000b")
    worker = engine.Worker(Claims(cache.files, 48), Stop(0))
    job = Letters({"00000000b": 4})
    times = slept(worker)
    worker.run(job, ["00000000b", "00000000a"], lambda item: item, **given)
    assert times == [sleeps, sleeps], "not in the first round, in which it made something"
    assert not engine.Job.leave(job, "00000000b"), "nothing is left to a living owner unless the job says so"
    full = NoSpaceError("full")
    with pytest.raises(NoSpaceError) as caught:
        engine.Job.wait_for_space(job, "00000000b", full)
    assert caught.value is full


def test_the_bar_expects_what_this_worker_makes(cache: Cache, todo: engine.Work) -> None:
    """Its share from the start, others as it takes them; nothing that another one made or makes."""
    totals: list[int | None] = []
    bar = Progress("units", 0)

    def hook(unit: Unit, progress: Callable[[int, int], None]) -> None:
        progress(1, 2)
        totals.append(bar.total)

    plan = todo[0][0]
    worker = engine.Worker(Claims(cache.files, 60), Stop(0), 1, 3)
    mine = [unit for _, unit in todo if worker.in_my_share(unit.unit)]
    others = [unit for _, unit in todo if not worker.in_my_share(unit.unit)]
    for done in (mine[0], others[0]):
        index.publish_commit(cache.files, plan.encoding, plan.number, empty(done))
    maker = Maker(cache, hook)
    assert engine.make_units(maker, todo, worker, bar) == (0, 0)
    share = len(mine) - 1
    assert totals == [*[share] * share, *range(share + 1, share + len(others))]
    assert (bar.done, bar.rejected, bar.total) == (6, 12, 6)


def test_what_a_full_disk_undid_is_not_counted(cache: Cache, todo: engine.Work) -> None:
    failed: set[str] = set()

    def hook(unit: Unit, progress: Callable[[int, int], None]) -> None:
        progress(1, 2)
        if unit.unit not in failed:
            failed.add(unit.unit)
            raise NoSpaceError("full")

    space = DiskSpace(cache, lambda plan, unit: 1, lambda seconds: None)
    worker, bar = engine.Worker(Claims(cache.files, 60), Stop(0), 1, 3), Progress("units", 0)
    engine.make_units(Maker(cache, hook), todo, worker, bar, space)
    assert len(failed) == 8, "of its share, and of the others"
    assert (bar.done, bar.rejected, bar.total) == (8, 16, 8)


def test_records_are_summed_and_what_is_left_is_not_expected(cache: Cache, todo: engine.Work) -> None:
    class Counted(Maker):
        def make(self, plan: WorkList, unit: Unit, progress: Callable[[int, int], None]) -> index.Commit:
            return replace(super().make(plan, unit, progress), records=len(self.done))

    owner = other_machine(cache)
    held = [(plan.encoding, plan.number, unit.unit) for plan, unit in (todo[3], todo[5])]
    for work in held:
        owner.take(*work)
    worker = engine.Worker(Claims(cache.files, 60), Stop(0))
    beats = iter(range(1, 100))

    def sleep(seconds: float) -> None:
        for work in held:
            owner.files.replace(Paths.claim(*work), owner.content(next(beats)))

    worker.stop.sleep = sleep  # type: ignore[method-assign]
    bar = Progress("units", 0)
    assert engine.make_units(Counted(cache), todo, worker, bar) == (sum(range(1, 7)), 2)
    assert bar.total == 6


# ---------------------------------------------------------------- signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_after_a_signal_the_unit_in_hand_is_finished(cache: Cache, todo: engine.Work, number: signal.Signals) -> None:
    stop = Stop(grace_s=60)

    def hook(unit: Unit, progress: Callable[[int, int], None]) -> None:
        os.kill(os.getpid(), number)
        progress(1, 0)

    maker = Maker(cache, hook)
    with pytest.raises(Stopped), stop.signals():
        here(maker, todo, stop=stop)
    assert stop.name == number.name
    assert len(maker.done) == 1
    assert claimed(cache) == []


def test_after_nohup_the_end_of_the_terminal_ends_nothing(cache: Cache, todo: engine.Work) -> None:
    def hook(unit: Unit, progress: Callable[[int, int], None]) -> None:
        stop.catch()  # as after a library has replaced handlers
        os.kill(os.getpid(), signal.SIGHUP)
        progress(1, 0)

    before, stop, maker = signal.signal(signal.SIGHUP, signal.SIG_IGN), Stop(grace_s=60), Maker(cache, hook)
    try:
        with stop.signals():
            here(maker, todo, stop=stop)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert stop.name is None and maker.done


@pytest.mark.parametrize(("grace", "signals"), [(0, 1), (60, 2)])
def test_past_the_grace_or_at_the_second_signal_it_is_dropped(
    cache: Cache, todo: engine.Work, grace: float, signals: int
) -> None:
    stop = Stop(grace_s=grace)

    def hook(unit: Unit, progress: Callable[[int, int], None]) -> None:
        for _ in range(signals):
            os.kill(os.getpid(), signal.SIGTERM)
        progress(1, 0)

    maker = Maker(cache, hook)
    with pytest.raises(Stopped), stop.signals():
        here(maker, todo, stop=stop)
    assert maker.done == []
    assert claimed(cache) == []


def test_the_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped), Stop(0).signals():
        os.kill(os.getpid(), signal.SIGTERM)  # no unit in hand: at once
        time.sleep(5)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock of `Stop`'s, which only sleep moves on."""
    clock = [100.0]

    def sleep(seconds: float) -> None:
        assert 0 < seconds <= 0.1, "a signal is noticed soon"
        clock[0] += seconds

    monkeypatch.setattr("sana_pipe.data.work.stop.time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    return clock


def test_the_grace_runs_from_the_first_signal(now: list[float]) -> None:
    stop = Stop(grace_s=5)
    with stop.polite():
        stop.check()
        stop.check_batch()
        stop.note(signal.SIGUSR1, None)
        with pytest.raises(Stopped, match="SIGUSR1"):
            stop.check()
        now[0] += 4.9
        stop.check_batch()
        now[0] += 0.1
        with pytest.raises(Stopped, match="SIGUSR1"):
            stop.check_batch()
    with pytest.raises(Stopped, match="SIGTERM"):
        stop.note(signal.SIGTERM, None)  # no longer polite
    stop = Stop(grace_s=5)
    with stop.polite():
        for number in (signal.SIGUSR1, signal.SIGTERM):
            stop.check_batch()
            stop.note(number, None)
        with pytest.raises(Stopped, match="SIGTERM"):
            stop.check_batch()


def test_a_sleep_takes_its_time_and_ends_at_a_signal(now: list[float]) -> None:
    stop = Stop(grace_s=5)
    stop.sleep(0)
    stop.sleep(0.35)
    assert now[0] == pytest.approx(100.35)
    stop.name = "SIGTERM"
    with pytest.raises(Stopped, match="SIGTERM"):
        stop.sleep(1)
    assert now[0] == pytest.approx(100.35)


def test_signals_are_caught_inside_the_block_only() -> None:
    stop, handlers = Stop(0), [signal.getsignal(number) for number in SIGNALS]
    checks = list(retrying.wait_checks)
    with stop.signals():
        assert retrying.wait_checks == [*checks, stop.check_batch], "waiting for storage ends, too"
        for number in SIGNALS:
            assert signal.getsignal(number) == stop.note
            signal.signal(number, signal.SIG_IGN)  # as a library may
        stop.catch()
        assert all(signal.getsignal(number) == stop.note for number in SIGNALS)
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    assert retrying.wait_checks == checks

    def elsewhere() -> None:
        with stop.signals():
            stop.catch()
            done.append(retrying.wait_checks == checks)

    done: list[bool] = []
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert done == [True], "a thread beside the main one catches nothing"
    assert [signal.getsignal(number) for number in SIGNALS] == handlers


# ---------------------------------------------------------------- what a user may get wrong


def test_without_ray_the_message_names_the_command(
    small_cache_copy: Path, make_config: MakeConfig, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'sana-pipe\[ray\]'"):
        sana_pipe.stages.encode.run(make_config(tmp_path), data=str(photos), engine="ray")


def test_ray_has_one_driver(make_config: MakeConfig, photos: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=naming("--engine ray", "2 processes")):
        sana_pipe.stages.encode.run(make_config(tmp_path), data=str(photos), engine="ray", task_index=0, task_count=2)


def test_launch_recipes_are_no_configurations_but_are_shipped() -> None:
    import tomllib

    from sana_pipe.config import shipped

    recipes = sorted((ROOT / "configs" / "launch").iterdir())
    assert len(recipes) >= 4
    assert not set(recipes) & set(shipped())
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert "launch/*" in data["sana_pipe.configs"]
    for recipe in recipes:
        subprocess.run(["bash", "-n", str(recipe)], check=True)
        text = recipe.read_text()
        for override in re.findall(r"--set (\S+=\S+)", text):
            load("tiny", [override])
        for words in re.findall(r"^(?!#).*sana-pipe ((?:encode|train)\b[^\n\\]*)", text, re.MULTILINE):
            options = set(re.findall(r"--[a-z-]+", words))
            assert options <= {
                "--config",
                "--data",
                "--engine",
                "--set",
                "--task-index",
                "--task-count",
                "--resume",
            }, words


# ---------------------------------------------------------------- real processes


def encode(config: Config, photos: Path, *options: str, **variables: str) -> Forked:
    path = Path(config.cache).parent / "config.yaml"
    path.write_text(dump(config))
    environment = {"OMP_NUM_THREADS": "1", **variables}
    return Forked("encode", "--config", str(path), "--data", str(photos), *options, environ=environment)


def ended(process: Forked) -> str:
    output = process.output()
    assert process.wait() == 0, output
    return output


@pytest.fixture(scope="module")
def truth(photos: Path, make_config: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The cache that one undisturbed process makes."""
    folder = tmp_path_factory.mktemp("undisturbed")
    ended(encode(make_config(folder, *BATCHES), photos))
    return files(folder / "cache")


def stop_with_a_claim(process: Forked, cache: Path) -> None:
    """SIGSTOP to a process at a moment at which it holds a claim."""

    def holds() -> bool:
        for path in (cache / "claims").rglob("*.json"):
            try:
                if json.loads(path.read_bytes())["process"] == str(process.pid):
                    return True
            except (OSError, ValueError):
                continue
        return False

    end = time.monotonic() + 120
    while time.monotonic() < end:
        assert process.poll() is None, process.output()
        if holds():
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.05)
            if holds():
                return
            process.send_signal(signal.SIGCONT)
        time.sleep(0.005)
    raise AssertionError("the process never held a claim")


@pytest.mark.dist
@pytest.mark.parametrize("count", [2, 4])
def test_one_stopped_past_the_others_end_and_continued(
    count: int, truth: dict[str, bytes], photos: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(tmp_path, *BATCHES)
    shares = [("--task-index", str(i), "--task-count", str(count)) for i in range(count)]
    sleeper = encode(config, photos, *shares[0])
    try:
        stop_with_a_claim(sleeper, tmp_path / "cache")
        for other in [encode(config, photos, *options) for options in shares[1:]]:
            ended(other)
        assert files(tmp_path / "cache") == truth, "before the stopped one goes on"
    finally:
        sleeper.send_signal(signal.SIGCONT)
    ended(sleeper)
    assert files(tmp_path / "cache") == truth


def made_by(outputs: list[str]) -> dict[str, list[int]]:
    """Worker -> captions and pictures that it made."""
    result: dict[str, list[int]] = {}
    for worker, made in re.findall(r"worker (\d+ of \d+): (\d+) \w+ encoded here", "\n".join(outputs)):
        result.setdefault(worker, []).append(int(made))
    return result


@pytest.mark.dist
def test_torchrun_gives_the_shares(
    truth: dict[str, bytes], photos: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(dump(make_config(tmp_path, *BATCHES)))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "-m",
            "sana_pipe.cli",
            "encode",
            "--config",
            str(tmp_path / "config.yaml"),
            "--data",
            str(photos),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": with_site(str(ROOT))},
        cwd=ROOT,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    made = made_by([done.stdout])
    assert set(made) == {"1 of 2", "2 of 2"}
    assert [sum(column) for column in zip(*made.values(), strict=True)] == [13, 12, 12, 12]
    assert files(tmp_path / "cache") == truth


STEP = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2"}
ARRAY = {"SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_MAX": "3", "SLURM_ARRAY_TASK_STEP": "2"}


@pytest.mark.dist
@pytest.mark.parametrize(
    "variables",
    [
        [{**STEP, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)} for i in range(2)],
        [{**ARRAY, "SLURM_ARRAY_TASK_COUNT": "2", "SLURM_ARRAY_TASK_ID": str(i)} for i in (1, 3)],
    ],
    ids=["srun", "array"],
)
def test_slurm_gives_the_shares(
    variables: list[dict[str, str]],
    truth: dict[str, bytes],
    photos: Path,
    make_config: MakeConfig,
    tmp_path: Path,
) -> None:
    config = make_config(tmp_path, *BATCHES)
    made = made_by([ended(p) for p in [encode(config, photos, **environment) for environment in variables]])
    assert set(made) == {"1 of 2", "2 of 2"}
    assert [sum(column) for column in zip(*made.values(), strict=True)] == [13, 12, 12, 12]
    assert files(tmp_path / "cache") == truth


@pytest.mark.dist
@pytest.mark.parametrize(("number", "grace"), [(signal.SIGTERM, 0), (signal.SIGUSR1, 60)])
def test_a_signal_ends_it_cleanly_and_it_continues(
    number: signal.Signals,
    grace: int,
    truth: dict[str, bytes],
    photos: Path,
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = make_config(tmp_path, *BATCHES)
    set_constants(monkeypatch, {"sana_pipe.data.work.stop.GRACE_S": grace})
    process = encode(config, photos)
    stop_with_a_claim(process, tmp_path / "cache")
    process.send_signal(number)
    process.send_signal(signal.SIGCONT)
    output = ended(process)
    assert f"stopped by {number.name}" in output
    assert "run the same command again" in output
    assert list((tmp_path / "cache" / "tmp").iterdir()) == []
    assert [p for p in (tmp_path / "cache" / "claims").rglob("*") if p.is_file()] == []
    result = files(tmp_path / "cache")
    assert result != truth
    assert len([p for p in result if p.startswith("units/")]) == (1 if grace else 0)
    ended(encode(config, photos))
    assert files(tmp_path / "cache") == truth


# ---------------------------------------------------------------- Ray


class FakeRay(ModuleType):
    """As much of ray as the engine uses: tasks run when they are waited for, in the order of their start."""

    class RayError(Exception):
        pass

    class RayTaskError(RayError):
        cause: BaseException

    def __init__(self, slots: list[float]):
        super().__init__("ray")
        self.exceptions, self.slots, self.started = self, slots, False
        self.others: list[dict[str, Any]] = []
        self.calls: list[Any] = []
        self.waiting: list[Any] = []
        self.most = 0
        self.resources: dict[str, float] = {"CPU": 8}
        self.fails: dict[int, Exception] = {}

    def is_initialized(self) -> bool:
        return self.started

    def init(self, **options: Any) -> None:
        self.calls.append(("init", options))
        self.started = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def put(self, value: Any) -> Any:
        self.calls.append(("put", value))
        return value

    def cluster_resources(self) -> dict[str, float]:
        return self.resources

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": cpus > 0, "Resources": {"CPU": abs(cpus), "GPU": 1}} for cpus in self.slots] + self.others

    def remote(self, function: Callable[..., Any]) -> Any:
        def start(*arguments: Any) -> int:
            self.waiting.append(lambda: function(*arguments))
            return len(self.waiting) - 1

        def options(**given: Any) -> Any:
            self.calls.append(("options", given))
            return SimpleNamespace(remote=start)

        return SimpleNamespace(options=options)

    def wait(self, refs: list[int], num_returns: int, timeout: float) -> tuple[list[int], list[int]]:
        self.most = max(self.most, len(refs))
        self.calls.append(("wait", len(refs), num_returns, timeout))
        return refs[:num_returns], refs[num_returns:]

    def get(self, ref: int) -> Any:
        if ref in self.fails:
            raise self.fails[ref]
        return self.waiting[ref]()

    def cancel(self, ref: int, force: bool) -> None:
        assert not force
        self.calls.append(("cancel", ref))


class MeteredMaker(Maker):
    """A maker of tasks: each unit has three records, one reject and as many tokens as its number."""

    meter: Meter

    def make(self, plan: WorkList, unit: Unit, progress: Callable[[int, int], None]) -> index.Commit:
        self.meter.tokens += unit.start
        commit = super().make(plan, unit, progress)
        return replace(commit, records=3, rejects=(index.RecordReject("0" * 32, "a.png", "bad"),))

    def disk_space(self) -> DiskSpace:
        return DiskSpace(self.cache, lambda plan, unit: plan.number + unit.count)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    fake, folder = FakeRay([2.0, -4.0]), Path.cwd()
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_engine, "makers", {})
    handler = signal.getsignal(signal.SIGTERM)
    yield fake
    signal.signal(signal.SIGTERM, handler)
    os.chdir(folder)


def cluster_of(cache: Cache, stop: Stop | None = None, **settings: Any) -> ray_engine.Cluster:
    return ray_engine.Cluster(EncodeConfig(**settings), "key", lambda: MeteredMaker(cache), stop or Stop(0))


def test_ray_tasks_are_handed_out_a_few_ahead_and_counted(
    cache: Cache, todo: engine.Work, ray: FakeRay, capsys: pytest.CaptureFixture[str]
) -> None:
    bar = Progress("units", 0, Meter())
    stop = Stop(0)
    with stop.signals(), cluster_of(cache, stop) as cluster:
        assert cluster.run([], bar) == 0
        assert ray.calls == [], "no cluster is started for nothing"
        assert cluster.run(todo, bar) == 8 * 3
        assert signal.getsignal(signal.SIGTERM) == stop.note, "ray replaces it"
        assert cluster.run(todo, bar) == 0, "committed units are made once"
    assert ray.most == 2 * 2 + 2, "dead nodes do not count"
    assert (bar.done, bar.rejected, bar.total, bar.meter.tokens) == (24, 8, 16, sum(range(8)))
    names = [call if isinstance(call, str) else call[0] for call in ray.calls]
    assert [name for name in names if name != "wait"] == ["init", "put", "options", "options", "shutdown"]
    options = {"logging_level": "WARNING", "log_to_driver": True}
    assert ray.calls[0] == ("init", options)
    order = ray.calls[1][1]
    assert (order.key, order.folder, order.version) == ("key", str(Path.cwd()), __version__)
    assert ray.calls[2][1] == {"max_retries": 10, "num_cpus": 1.0, "num_gpus": 0.0}
    assert {call[2:] for call in ray.calls if call[0] == "wait"} == {(1, 0.5)}
    [maker] = ray_engine.makers.values()
    assert maker.done == [unit.unit for _, unit in todo], "in the order of the plan, by one maker"  # type: ignore
    assert "waiting for one" not in capsys.readouterr().out
    before = list(ray.calls)
    with cluster_of(cache) as cluster:
        cluster.connect()
    assert ray.calls[len(before) :] == [("put", cluster.order)], "another's cluster is not ended"


@pytest.mark.parametrize(
    ("settings", "resources", "need"),
    [
        ({}, {"CPU": 8}, (1.0, 0.0)),
        ({}, {"GPU": 0}, (1.0, 0.0)),
        ({"device": "auto"}, {"GPU": 1}, (1.0, 1.0)),
        ({"device": "cpu"}, {"GPU": 1}, (1.0, 0.0)),
    ],
)
def test_what_a_ray_task_needs(
    cache: Cache, ray: FakeRay, settings: Any, resources: dict[str, float], need: tuple[float, float]
) -> None:
    ray.resources = resources
    assert cluster_of(cache, **settings).need() == {"num_cpus": need[0], "num_gpus": need[1]}


def test_how_many_ray_tasks_run_at_once(cache: Cache, ray: FakeRay) -> None:
    cluster = cluster_of(cache)
    ray.slots, ray.others = [4.0, 7.0, -9.0], [{"Alive": True, "Resources": {"CPU": 1}}]
    assert cluster.slots({"num_cpus": 1.5, "num_gpus": 0.0}) == 2 + 4
    assert cluster.slots({"num_cpus": 1.0, "num_gpus": 0.25}) == 4 + 4, "none without a GPU"
    assert cluster.slots({"num_cpus": 0.0, "num_gpus": 0.0}) == 3, "one on each living node"
    assert cluster.slots({"num_cpus": 100.0, "num_gpus": 0.0}) == 0


def test_without_a_node_ray_waits_and_says_so_once(
    cache: Cache, todo: engine.Work, ray: FakeRay, capsys: pytest.CaptureFixture[str]
) -> None:
    ray.slots, ray.resources = [], {"GPU": 8}
    assert cluster_of(cache).run(todo, Progress("units", 0)) == 24
    assert ray.most == 2
    assert capsys.readouterr().out.count("no node of the Ray cluster has 1 CPUS and 1 GPUS yet") == 1


def test_errors_of_ray_tasks(cache: Cache, todo: engine.Work, ray: FakeRay) -> None:
    def failed(error: Exception) -> BaseException:
        ray.calls.clear()
        ray.waiting.clear()
        ray.fails = {1: error}
        with pytest.raises(BaseException) as caught:
            cluster_of(cache, Stop(7)).run(todo, Progress("units", 0))
        cancelled = [call[1] for call in ray.calls if call[0] == "cancel"]
        assert cancelled == [2, 3, 4, 5, 6], "those that were started and not done"
        assert ray.calls[-1] == ("wait", len(cancelled), len(cancelled), 7.0), "they clean up after themselves"
        return caught.value

    by_user, other = ray.RayTaskError("remote"), ray.RayTaskError("remote")
    by_user.cause, other.cause = NoSpaceError("full"), ValueError("odd")
    assert failed(by_user) is by_user.cause
    assert failed(other) is other
    gone = failed(ray.RayError("  the node died\n more"))
    assert isinstance(gone, UserError) and gone.exit_code == UserError("").exit_code
    assert gone.found == "RayError: the node died"


def test_a_signal_ends_what_ray_runs(cache: Cache, todo: engine.Work, ray: FakeRay) -> None:
    stop = Stop(60)

    class Signalled(MeteredMaker):
        def make(self, plan: WorkList, unit: Unit, progress: Callable[[int, int], None]) -> index.Commit:
            stop.note(signal.SIGTERM, None)
            return super().make(plan, unit, progress)

    cluster = ray_engine.Cluster(EncodeConfig(), "key", lambda: Signalled(cache), stop)
    bar = Progress("units", 0)
    with pytest.raises(Stopped, match="SIGTERM"):
        cluster.run(todo, bar)
    assert bar.done == 3, "the result that was there is counted"
    assert [call[1] for call in ray.calls if call[0] == "cancel"] == [1, 2, 3, 4, 5]


def test_a_ray_task_refuses_another_version_and_reuses_its_maker(
    cache: Cache, todo: engine.Work, ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, built, parsed = todo[0][0], [], []
    real = Cache.plan
    monkeypatch.setattr(Cache, "plan", lambda *args: parsed.append(args) or real(*args))

    def build() -> MeteredMaker:
        built.append(MeteredMaker(cache))
        return built[-1]

    def task(number: int, key: str = "a", version: str = __version__, folder: str = "") -> ray_engine.Done:
        order = ray_engine.WorkerSettings(key, folder or str(tmp_path), version, build)
        return ray_engine.make_unit(order, plan.encoding, plan.number, todo[number][1].unit)

    with pytest.raises(UserError) as caught:
        task(0, version="0")
    assert (caught.value.expected, caught.value.found, built) == ("0", __version__, [])
    done = task(2)
    assert Path.cwd() == tmp_path
    assert (done.records, done.rejects, done.meter.tokens) == (3, 1, 2)
    assert 0 < (done.meter.wall_s or 0) < 60
    again = task(2)
    assert again == ray_engine.Done(0, 0, Meter(wall_s=0.0))
    assert len(built) == 1
    assert task(3, folder=str(tmp_path / "absent")).records == 3, "relative paths may not matter"
    assert len(parsed) == 1, "a plan is read once, not for each unit"
    assert task(4, key="b").records == 3
    assert len(parsed) == 2, "the maker has another cache"
    assert (len(built), list(ray_engine.makers)) == (2, ["b"]), "one encoder at a time"


@pytest.mark.parametrize("kind", [ConnectionError, RuntimeError, ValueError])
def test_a_ray_cluster_that_cannot_be_reached(
    cache: Cache, ray: FakeRay, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**options: Any) -> None:
        raise kind("  nobody there\nmore")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(UserError) as caught, cluster_of(cache) as cluster:
        cluster.connect()
    assert caught.value.found == "nobody there"
    assert "shutdown" not in ray.calls
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        ray_engine.check_reachable()
    with pytest.raises(UserError) as caught:
        ray_engine.check_reachable()
    assert str(caught.value.found).startswith(f"RAY_ADDRESS=127.0.0.1:{port}: ")


needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed (pip install 'sana-pipe[ray]')"
)
RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(ROOT)}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster of one node without CPUs: whatever works joins later."""
    for name, value in RAY.items():
        monkeypatch.setenv(name, value)
    from ray.cluster_utils import Cluster

    result = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        yield result
    finally:
        result.shutdown()


def units_done(cache: Path) -> int:
    return len(list((cache / "units").rglob("*.json"))) if (cache / "units").exists() else 0


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_ray_cluster_makes_the_same_cache_while_nodes_join_and_die(
    cluster: Any, truth: dict[str, bytes], photos: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(tmp_path, *BATCHES)
    driver = encode(config, photos, "--engine", "ray", RAY_ADDRESS=cluster.address, **RAY)
    doomed = cluster.add_node(num_cpus=1)  # joins while the driver waits or scans
    while not units_done(tmp_path / "cache"):
        assert driver.poll() is None, driver.output()
        time.sleep(0.005)
    cluster.remove_node(doomed, allow_graceful=False)
    before = units_done(tmp_path / "cache")
    total = len([name for name in truth if name.startswith("units/")])
    assert before < total, "the node was killed too late to prove anything"
    cluster.add_node(num_cpus=1)
    ended(driver)
    assert files(tmp_path / "cache") == truth


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_signal_to_the_driver_cancels_the_tasks_and_it_continues(
    truth: dict[str, bytes], photos: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(tmp_path, *BATCHES)
    driver = encode(config, photos, "--engine", "ray", **RAY)  # without RAY_ADDRESS: a local cluster
    while not units_done(tmp_path / "cache"):
        assert driver.poll() is None, driver.output()
        time.sleep(0.005)
    driver.send_signal(signal.SIGTERM)
    assert "stopped by SIGTERM" in ended(driver)
    assert list((tmp_path / "cache" / "tmp").iterdir()) == []
    assert files(tmp_path / "cache") != truth
    ended(encode(config, photos))  # the local engine finishes what the other began
    assert files(tmp_path / "cache") == truth


@needs_ray
@pytest.mark.slow
def test_an_address_without_a_cluster_is_an_error_for_people(
    photos: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    process = encode(make_config(tmp_path), photos, "--engine", "ray", RAY_ADDRESS="127.0.0.1:1", **RAY)
    output = process.output()
    assert process.wait() == 2, output
    assert "the Ray cluster cannot be reached" in output
    assert "Traceback" not in output
