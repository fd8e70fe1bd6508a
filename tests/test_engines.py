"""Engines: the same cache whoever encodes a unit, and whatever becomes of the others."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import stages.encode
from pipeline.cache import index
from pipeline.cache.root import Cache, Unit
from pipeline.config import Config, dump, load
from pipeline.errors import UserError
from pipeline.processes import command
from pipeline.work import claims, engine
from pipeline.work.claims import Claims
from pipeline.work.progress import Progress
from pipeline.work.stop import Stop, Stopped
from tests.support.empty_units import Maker, claimed, planned
from tests.support.trees import files

ROOT = Path(__file__).resolve().parent.parent
MakeConfig = Callable[..., Config]
STALE_S = 3
UNITS = (
    "encode.unit_images=2",
    "encode.unit_captions=3",
    "encode.image_batch=2",
    "encode.text_batch=2",
    f"encode.claim_timeout_s={STALE_S}",
)


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
    claims._place = {}
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
    assert owner.take(plan.recipe, plan.number, unit.unit) == "ours"
    maker = Maker(cache)
    with owner.heartbeat(plan.recipe, plan.number, unit.unit):
        began = time.monotonic()
        assert here(maker, todo, stale_s=60) == (0, 1)
    assert time.monotonic() - began < 20, "it waited for more than a sign of life"
    assert unit.unit not in maker.done
    assert len(maker.done) == 7


def test_a_unit_of_a_lost_owner_is_taken_over(cache: Cache, todo: engine.Work) -> None:
    plan, unit = todo[0]
    other_machine(cache).take(plan.recipe, plan.number, unit.unit)
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
        index.publish_commit(cache.files, plan.recipe, plan.number, late)

    assert here(Maker(cache, commits_meanwhile), todo) == (0, 0)


def test_claims_of_committed_units_are_swept(cache: Cache, todo: engine.Work) -> None:
    plan, unit = todo[0]
    owner = other_machine(cache)
    owner.take(plan.recipe, plan.number, unit.unit)
    owner.take(plan.recipe, plan.number, todo[1][1].unit)
    index.publish_commit(cache.files, plan.recipe, plan.number, index.Commit(unit.unit, None, 0, 0, None, (), {}))
    assert claims.sweep(cache, [plan]) == 1
    assert [p.stem for p in claimed(cache)] == [todo[1][1].unit]


# ---------------------------------------------------------------- signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
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


# ---------------------------------------------------------------- what a user may get wrong


def test_without_ray_the_message_names_the_command(
    small_cache_copy: Path, make_config: MakeConfig, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'sana-pipe\[ray\]'"):
        stages.encode.run(make_config(tmp_path), data=str(photos), engine="ray")


def test_ray_has_one_driver(make_config: MakeConfig, photos: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="one process hands out"):
        stages.encode.run(make_config(tmp_path), data=str(photos), engine="ray", task_index=0, task_count=2)


def test_launch_recipes_are_no_configurations_but_are_shipped() -> None:
    import tomllib

    from pipeline.config import shipped

    recipes = sorted((ROOT / "configs" / "launch").iterdir())
    assert len(recipes) >= 4
    assert not set(recipes) & set(shipped())
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["configs"]
    assert "launch/*" in package
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


def encode(config: Config, photos: Path, *options: str, **variables: str) -> subprocess.Popen[str]:
    path = Path(config.cache).parent / "config.yaml"
    path.write_text(dump(config))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(
        command("encode", "--config", str(path), "--data", str(photos), *options),
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def ended(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def truth(photos: Path, make_config: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The cache that one undisturbed process makes."""
    folder = tmp_path_factory.mktemp("undisturbed")
    ended(encode(make_config(folder, *UNITS), photos))
    return files(folder / "cache")


def stop_with_a_claim(process: subprocess.Popen[str], cache: Path) -> None:
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
        assert process.poll() is None, process.communicate()[0]
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
    config = make_config(tmp_path, *UNITS)
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
    (tmp_path / "config.yaml").write_text(dump(make_config(tmp_path, *UNITS)))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "-m",
            "pipeline.cli",
            "encode",
            "--config",
            str(tmp_path / "config.yaml"),
            "--data",
            str(photos),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    made = made_by([done.stdout])
    assert set(made) == {"1 of 2", "2 of 2"}
    assert [sum(column) for column in zip(*made.values(), strict=True)] == [13, 12]
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
    config = make_config(tmp_path, *UNITS)
    made = made_by([ended(p) for p in [encode(config, photos, **environment) for environment in variables]])
    assert set(made) == {"1 of 2", "2 of 2"}
    assert [sum(column) for column in zip(*made.values(), strict=True)] == [13, 12]
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
) -> None:
    config = make_config(tmp_path, *UNITS, f"encode.grace_s={grace}")
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
    config = make_config(tmp_path, *UNITS)
    driver = encode(config, photos, "--engine", "ray", RAY_ADDRESS=cluster.address, **RAY)
    doomed = cluster.add_node(num_cpus=1)  # joins while the driver waits or scans
    end = time.monotonic() + 200
    while not units_done(tmp_path / "cache"):
        assert driver.poll() is None, driver.communicate()[0]
        assert time.monotonic() < end
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
    config = make_config(tmp_path, *UNITS)
    driver = encode(config, photos, "--engine", "ray", **RAY)  # without RAY_ADDRESS: a local cluster
    end = time.monotonic() + 200
    while not units_done(tmp_path / "cache"):
        assert driver.poll() is None, driver.communicate()[0]
        assert time.monotonic() < end
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
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 2, output
    assert "the Ray cluster cannot be reached" in output
    assert "Traceback" not in output
