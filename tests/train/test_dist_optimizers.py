"""Optimizers and precisions on four processes: CAME for any sharding, copies that stay equal, one verdict on overflow,
states and averages through a chain of strategies.

One launch (`tests/support/workers/optimizers.py`) runs all of it; the tests below judge what it results.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from sana_pipe.train.training import metrics
from tests.support.checkpoints import load_model_state
from tests.support.launched import found, run_worker
from tests.support.workers import optimizers, tiny_run

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("optimizers")
    run_worker("optimizers", folder, timeout_s=550)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    return found(folder)


@pytest.mark.parametrize("place", optimizers.PLACES)
def test_came_on_shards_is_came(results: dict[str, Any], place: str) -> None:
    """Parameters and every mean, whole."""
    assert results["came"][place] <= 1e-5


@pytest.mark.parametrize("name", optimizers.MODELS)
def test_came_on_a_spread_model_is_came_in_one_process(results: dict[str, Any], name: str) -> None:
    assert results["models"][name] <= 1e-6


def test_came_sums_few_times(results: dict[str, Any]) -> None:
    assert results["calls"] == {"FSDP2": 3, "HSDP": 3, "DDP": 0, "FSDP2 x TP": results["calls"]["FSDP2 x TP"]}
    assert results["calls"]["FSDP2 x TP"] <= 14


def test_copies_of_bf16_weights_stay_equal(results: dict[str, Any]) -> None:
    for optimizer in ("adamw", "came"):
        a, b, c, d = results["copies"][f"HSDP, {optimizer}"]
        assert (a, b) == (c, d)
        assert a != b
        assert len(set(results["copies"][f"DDP, {optimizer}"])) == 1
        a, b, c, d = results["copies"][f"FSDP2 x TP, {optimizer}"]
        assert (a, c) == (b, d)
        assert a != c


def test_an_overflow_on_one_process_is_left_out_on_all(results: dict[str, Any]) -> None:
    assert results["overflow"] == [[True, 2.0**7, True]] * 4


@pytest.mark.parametrize("name", ["came", "adamw8bit"])
def test_state_and_average_survive_a_chain_of_strategies(folder: Path, name: str) -> None:
    if name == "adamw8bit" and not importlib.util.find_spec("torchao"):
        pytest.skip("torchao is not installed")
    limit = 1e-5 if name == "came" else 2e-3
    last = f"checkpoints/step-{optimizers.CHAIN[-1][2]:08d}"
    for ema in (False, True):
        _, chain = load_model_state(folder / f"chain-{name}" / last, ema=ema)
        _, whole = load_model_state(folder / f"whole-{name}" / last, ema=ema)
        distance = tiny_run.distance(optimizers.without_noise(chain), optimizers.without_noise(whole))
        assert distance <= limit, f"ema {ema}"
    losses = [
        [row["loss"] for row in metrics.read(folder / f"{run}-{name}/metrics.jsonl")] for run in ("chain", "whole")
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5 if name == "came" else 1e-2)
