"""Pipelines give what one plain process gives, alone and with every other strategy, and do not hang.

One launch (`tests/support/workers/pipelines.py`) runs all of it; the tests below judge what it results.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sana_pipe.train.models.sana import SanaTransformer
from sana_pipe.train.models.sana_config import SanaConfig
from sana_pipe.train.parallel import mesh
from tests.support.launched import found_by_size, run_worker
from tests.support.workers import pipelines

ROWS = [(world, name) for world, cases in pipelines.CASES.items() for name in cases]


def dist(test: Any) -> Any:
    return pytest.mark.dist(pytest.mark.timeout(900)(test))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pipelines")
    run_worker("pipelines", path, timeout_s=800)
    return path


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[int, dict[str, Any]]:
    return found_by_size(folder, (1, *pipelines.CASES))


@dist
@pytest.mark.parametrize(("world", "name"), ROWS)
def test_parity(results: dict[int, dict[str, Any]], world: int, name: str) -> None:
    """Of two steps of different shapes, one after the other, and of the losses of a run that changes shapes."""
    row = results[world]["parity"][name]
    if "bf16" in name:
        for gradient, plain in zip(row["gradient"], row["plain bf16"], strict=True):
            assert gradient <= 1.25 * plain
        assert row["losses"] <= 3e-2
        assert row["tokens"] == ["torch.float32"]
        return
    assert max(row["gradient"]) <= (1e-5 if "norm" in name else 2e-6)
    assert max(row["loss"]) <= 2e-6
    assert max(row["norm"]) <= 2e-6
    assert row["losses"] <= 1e-5


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_parity_with_twenty_steps_in_all_variants(tmp_path: Path) -> None:
    run_worker("pipelines", tmp_path, "--long", timeout_s=3500)
    results = found_by_size(tmp_path, pipelines.CASES)
    for world, name in ROWS:
        test_parity(results, world, name)


@dist
@pytest.mark.parametrize(("world", "name"), ROWS)
def test_the_wrapping_is_really_there(results: dict[int, dict[str, Any]], world: int, name: str) -> None:
    settings = pipelines.settings_of(pipelines.CASES[world][name])
    train, parallel, arch = settings.train, settings.train.parallel, settings.model.arch
    layout, there = mesh.check_sizes(parallel, world), results[world]["parity"][name]["wrapping"]
    assert arch is not None and len(there) == world
    copies = layout.data_world * layout.tp
    names = sorted(name for part in there for name in part["names"])
    whole = SanaTransformer.on_meta(SanaConfig.from_arch(arch, 8)).state_dict()
    assert names == sorted([*whole] * copies), "every parameter on one process of each pipeline"
    blocks = sorted(block for part in there for block in part["blocks"])
    assert blocks == sorted([str(block) for block in range(pipelines.LAYERS)] * copies)
    every = {"none": 1000, "full": 1, "every-2": 2}[train.activation_checkpointing]
    for part in there:
        assert part["blocks"], "no stage is empty"
        sharded = layout.data_world > 1 or train.precision == "bf16"
        assert part["sharded"] == (len(part["blocks"]) + 1 if sharded else 0)
        assert part["recomputed"] == [name for name in part["blocks"] if (int(name) + 1) % every == 0]
        data = ("dp_replicate/" if layout.dp_replicate > 1 else "") + "dp_shard" if sharded else ""
        assert part["dims"] == ([data, f"{data}/tp".strip("/")] if layout.tp > 1 else [data])


@dist
@pytest.mark.parametrize("chain", ["pp, then one", "one, then pp", "pp x fsdp2, then one", "one, then pp x fsdp2"])
def test_a_run_changes_its_stages(results: dict[int, dict[str, Any]], chain: str) -> None:
    row = results[1][chain]
    assert row["losses"] <= 1e-5
    assert row["weights"] <= 1e-5
    assert row["averages"] <= 1e-5
    assert row["files"] == {"one, then pp": 2, "one, then pp x fsdp2": 4}.get(chain, 1), "all processes wrote"


@dist
def test_a_bad_number_is_reported_by_every_process(results: dict[int, dict[str, Any]]) -> None:
    """Only the last stage computes losses."""
    first, second = results[2]["said"]
    assert first == second
    assert "NonFiniteError: step 2" in first
    assert f"such a loss: {1006:016x}\n" in first, "named once"


@dist
def test_nobody_waits_longer_than_the_timeout(results: dict[int, dict[str, Any]]) -> None:
    """In a pipeline that is not all processes of the launch, and so has groups of its own."""
    assert pipelines.STALL - 1 <= results[4]["gave up after"] <= 3 * pipelines.STALL


@dist
def test_one_schedule_for_two_shapes_would_be_noticed(folder: Path) -> None:
    assert "ended with" in (folder / "another-shape.txt").read_text()
