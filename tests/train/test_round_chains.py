"""Rounds (`train --from`) on several processes, and killed at any moment: the end is that of rounds in one process."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from sana_pipe.train.training import checkpoint, metrics
from tests.support import tiny_cache
from tests.support.forked import Forked, ranks, succeed
from tests.support.workers import round_chain, tiny_run

pytestmark = pytest.mark.timeout(600)
ATTEMPTS = 3
"""Kills at most; then the chain is left to end."""


def start(folder: Path, name: str, processes: int, *arguments: str) -> list[Forked]:
    return ranks(processes, str(folder), name, *arguments, worker="round_chain")


def learned(run: Path) -> dict[str, Any]:
    """By round: losses, weights and averages at the end, and what the summary says of the data."""
    result = {}
    for name in "abc":
        last = checkpoint.newest(run / name / "checkpoints")
        assert last is not None
        summary = json.loads((run / name / "summary.json").read_text())
        result[name] = {
            "losses": [row["loss"] for row in metrics.read(run / name / "metrics.jsonl")],
            "weights": [dict(checkpoint.ModelTensors(last, ema=ema)) for ema in (False, True)],
            "data": {key: summary[key] for key in ("name", "phase", "snapshot", "steps", "samples", "lr")},
        }
    return result


def check_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in "abc":
        here, there = found[name], expected[name]
        assert here["data"] == there["data"]
        assert here["losses"] == pytest.approx(there["losses"], abs=1e-5)
        for weights, others in zip(here["weights"], there["weights"], strict=True):
            assert tiny_run.distance(weights, others) <= 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache, and the undisturbed rounds of one process."""
    folder = tmp_path_factory.mktemp("chains")
    with pytest.MonkeyPatch.context() as patch:  # values that can be trained on
        patch.setattr(
            tiny_cache, "_bits", lambda rng, shape: (rng.standard_normal(shape, "f4").view("u4") >> 16).astype("u2")
        )
        tiny_cache.build(folder / "cache")
    succeed(start(folder, "undisturbed", 1), 240)
    return folder


@pytest.mark.dist
def test_rounds_on_two_processes_are_those_of_one(folder: Path) -> None:
    """Groups open and close several times in each process."""
    both = start(folder, "two", 2)
    succeed(both, 240)
    output = both[0].output()
    assert output.count("begins from") == 2 and output.count("training ") == 3
    check_alike(learned(folder / "two"), learned(folder / "undisturbed"))


@pytest.mark.dist
def test_a_signal_ends_a_round_and_the_next_start_goes_on(folder: Path) -> None:
    both = start(folder, "stopped", 2, "1.0")  # seconds a step: round b is not over when the signal arrives
    assert both[0].says("begins from")
    for process in both:
        process.send_signal(signal.SIGTERM)
    output = both[0].output(120)
    assert [process.wait(60) for process in both] == [0, 0]
    assert "stopped by SIGTERM" in output, output
    assert not (folder / "stopped/c").exists()
    three = start(folder, "stopped", 3)
    succeed(three, 240)
    output = three[0].output()
    assert "nothing to do: 5 steps are done" in output and "resumed from" in output
    check_alike(learned(folder / "stopped"), learned(folder / "undisturbed"))


@pytest.mark.fault
def test_rounds_killed_at_any_moment_are_the_undisturbed_ones(fault_seed: int, folder: Path) -> None:
    """SIGKILL of all processes at a random instant, again and again, each time resumed on another number of them."""
    chance, name, kills = random.Random(fault_seed), f"killed-{fault_seed}", 0
    for _ in range(ATTEMPTS):
        processes = start(folder, name, chance.choice([1, 2, 3]), "0.1")
        processes[0].says("^training ", 1 + chance.randrange(3))  # let some rounds begin
        time.sleep(chance.uniform(0.0, 1.0))
        kills += processes[0].poll() is None
        for process in processes:
            process.kill()
            process.wait()
    assert kills > 0
    succeed(start(folder, name, 2), 240)
    check_alike(learned(folder / name), learned(folder / "undisturbed"))
    for each in round_chain.ROUNDS:
        assert not checkpoint.leftovers(folder / name / each / "checkpoints")
