"""Start values, saves and resumed runs on several processes.

One process (`tests/support/workers/checkpoints.py`) forks all the launches; the tests below judge what they results.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.launched import run_worker
from tests.support.workers import checkpoints

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("checkpoints")
    run_worker("checkpoints", where, timeout_s=500)
    return where


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / f"{name}.json").read_text())


def test_resumed_under_other_strategies_is_uninterrupted(folder: Path) -> None:
    results = read(folder, "chain")
    assert results["legs"] == [""] * len(checkpoints.CHAIN)
    assert results["processes"] == [world for _, world, _ in checkpoints.CHAIN]
    assert len(results["losses"]) == 2 * len(checkpoints.CHAIN)
    assert max(results["losses"]) <= 1e-5
    assert len(results["weights"]) == len(checkpoints.CHAIN)
    assert max(results["weights"]) <= 1e-5
    assert max(results["averages"]) <= 1e-5
    assert results["averages from weights"] > 1e-4


@pytest.mark.parametrize("name", [name for name, _, _ in checkpoints.CHAIN[:4]])
def test_begun_from_a_checkpoint_under_other_strategies_is_begun_on_one_process(folder: Path, name: str) -> None:
    """Losses, weights and averages are those of the run that goes on with the same batches."""
    result = read(folder, "begun")[name]
    assert result["refused"] == ""
    assert max(result["losses"] + result["weights"]) <= 1e-5


@pytest.mark.parametrize("name", checkpoints.LAYOUTS)
def test_start_values_in_slices_are_those_of_one_process(folder: Path, name: str) -> None:
    results = read(folder, f"filled {name}")
    assert results["drawn"]
    assert results["stored"]
    assert results["stored, dtypes"] == ["torch.float32"], "the files are bf16"


def test_each_of_two_processes_reads_and_holds_half(folder: Path) -> None:
    results = read(folder, "memory")
    for process in results["processes"]:
        assert 0.4 < process["drawn"]["grown"] / results["model"] < 0.7
        assert process["stored"]["grown"] / results["model"] < 0.7
        assert 0.45 < process["stored"]["read"] / results["file"] < 0.55


def test_a_late_thread_does_not_meet_the_training(folder: Path) -> None:
    assert read(folder, "aside") == read(folder, "waited") == ""
    aside, waited = read(folder, "aside files")
    assert {**aside, ".metadata": None} == {**waited, ".metadata": None}


def test_a_save_that_fails_on_one_process_stops_all_in_the_same_words(folder: Path) -> None:
    first, second = read(folder, "failing")
    assert first == second
    assert "NoSpaceError" in first
    assert re.search(r"step-00000004\.\w+\.tmp", first)
    assert "No space left on device" in first
