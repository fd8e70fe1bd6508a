"""The loader's laws with real processes: order under gloo; killed at random instants, resumed at other world sizes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sana_pipe.data.cache.cache import Cache
from tests.support import tiny_cache
from tests.support.consumed import loader, sequence
from tests.support.damage import flip
from tests.support.launched import found, run_worker

ROOT = Path(__file__).resolve().parents[2]
STEPS = 120


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return tiny_cache.build(tmp_path_factory.mktemp("tiny") / "cache")


@pytest.mark.dist
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_order_law_with_real_processes(cache: Cache, tmp_path: Path, processes: int) -> None:
    run_worker("gather_order", cache.root, tmp_path, 3, processes=processes, timeout_s=240)
    assert found(tmp_path) == sequence(loader(cache, length_window=3))


@pytest.mark.dist
def test_quarantine_with_real_processes(tmp_path: Path) -> None:
    """A bad record on one rank: all ranks go on with equal shapes, and the sequence is that of one process."""
    cache = tiny_cache.build(tmp_path / "cache")
    for path in sorted(cache.root.glob("shards/text-*/*/*.tar"))[:3]:
        data = path.read_bytes()
        place = next(i for i in range(0, len(data), 512) if data[i : i + 6] == b"\x93NUMPY") + 128
        flip(path, place)
    expected = sequence(loader(cache, quarantine=tmp_path / "alone.jsonl"))
    run_worker("gather_order", cache.root, tmp_path, 0, tmp_path / "four.jsonl", processes=4, timeout_s=240)
    assert found(tmp_path) == expected
    alone, four = (sorted((tmp_path / f"{name}.jsonl").read_text().splitlines()) for name in ("alone", "four"))
    assert alone and alone == four


# ---------------------------------------------------------------- killed and resumed


class Consumers:
    """Starts consuming processes, and ends them with SIGKILL."""

    def __init__(self) -> None:
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.support.workers.consumer"]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environ, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def start(self, **job: Any) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def consumers() -> Iterator[Consumers]:
    started = Consumers()
    yield started
    assert started.process.stdin is not None
    started.process.stdin.close()
    started.process.wait(30)


def run(
    consumers: Consumers,
    cache: Cache,
    folder: Path,
    world: int,
    start: int,
    kill_after: float | None,
    options: dict[str, Any],
) -> list[list[str]]:
    """Consume from a step on with so many processes; returns the steps that all of them consumed, put together."""
    folder.mkdir()
    outs = [folder / f"{rank}.jsonl" for rank in range(world)]
    running = [
        consumers.start(
            out=str(out),
            cache=str(cache.root),
            rank=rank,
            world=world,
            start=start,
            stop=STEPS,
            pace=0.01,
            options=options,
        )
        for rank, out in enumerate(outs)
    ]
    if kill_after is not None:
        time.sleep(kill_after)
        for process in running:
            if alive(process):
                os.kill(process, signal.SIGKILL)
    deadline = time.monotonic() + 120
    while any(map(alive, running)):
        assert time.monotonic() < deadline, "consumers hang"
        time.sleep(0.01)
    parts = []
    for out in outs:
        text = out.read_text() if out.exists() else ""
        rows = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        assert [row["step"] for row in rows] == list(range(start, start + len(rows)))
        parts.append([row["seen"] for row in rows])
    return [[row for part in step for row in part] for step in zip(*parts, strict=False)]


@pytest.mark.fault
@pytest.mark.parametrize("window", [0, 3])
def test_resume_law(consumers: Consumers, cache: Cache, tmp_path: Path, fault_seed: int, window: int) -> None:
    """Killed at a random instant, resumed with 4, then 2, then 8 processes, killed each time but the last: what was
    consumed is the uninterrupted run, batch for batch."""
    draw = random.Random(fault_seed)
    options = {"length_window": window, "prefetch": draw.choice([0, 1, 5]), "threads": draw.choice([1, 2, 5])}
    expected = sequence(loader(cache, length_window=window, stop_step=STEPS))
    before = set(os.listdir("/dev/shm"))
    consumed: list[list[str]] = []
    for attempt, world in enumerate((draw.choice([1, 3, 6]), 4, 2, 8)):
        kill_after = None if attempt == 3 else draw.random() * 0.35 + 0.02
        consumed += run(consumers, cache, tmp_path / str(attempt), world, len(consumed), kill_after, options)
        if attempt == 0:
            assert len(consumed) < STEPS, "the first run was not interrupted"
    assert len(consumed) == STEPS
    assert consumed == expected
    assert set(os.listdir("/dev/shm")) <= before


@pytest.mark.fault
def test_a_resume_that_is_one_step_off_would_be_noticed(consumers: Consumers, cache: Cache, tmp_path: Path) -> None:
    """Sabotage: the second run starts one step late, as if the state belonged to a batch that was only read ahead."""
    expected = sequence(loader(cache, stop_step=STEPS))
    consumed = run(consumers, cache, tmp_path / "0", 3, 0, 0.1, {})
    consumed += run(consumers, cache, tmp_path / "1", 4, len(consumed) + 1, None, {})
    assert consumed != expected
