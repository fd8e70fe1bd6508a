"""Every strategy gives what one plain process gives: gradients, norm, and the losses of twenty steps (variants: six).

One launch (`tests/support/workers/strategies.py`) runs all of them; the tests below judge what it results.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sana_pipe.base.errors import ConfigError
from sana_pipe.train.parallel import mesh, tensor_parallel
from sana_pipe.train.parallel.config import ParallelConfig
from sana_pipe.train.parallel.parallelize import blocks_of
from tests.support.launched import found_by_size, run_worker
from tests.support.workers import strategies, tiny_run

PARTS = {"self-attention heads": 70, "cross-attention heads": 20, "GLUMBConv channels": 5600}
ROWS = [(world, name) for world, cases in strategies.CASES.items() for name in cases]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("strategies")
    run_worker("strategies", folder, timeout_s=800)
    return found_by_size(folder, strategies.CASES)


@pytest.mark.dist
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("world", "name"), ROWS)
def test_parity(results: dict[int, dict[str, Any]], world: int, name: str) -> None:
    row = results[world][name]
    if row["precision"] != "fp32":
        fp16 = row["precision"] == "fp16"  # three bits more than bf16
        assert row["gradient"] <= (0.25 if fp16 else 1.25) * row["plain_bf16"]
        assert row["losses"] <= (1e-3 if fp16 else 1e-2)
        assert row["tokens"] == ["torch.float32"]
        return
    assert row["gradient"] <= (1e-5 if row["qk_norm"] else 2e-6)
    assert row["loss"] <= 2e-6
    assert row["norm"] <= 2e-6
    assert row["losses"] <= 1e-5


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_parity_with_twenty_steps_in_all_variants(tmp_path: Path) -> None:
    run_worker("strategies", tmp_path, "--long", timeout_s=3500)
    results = found_by_size(tmp_path, strategies.CASES)
    for world, name in ROWS:
        test_parity(results, world, name)


@pytest.mark.dist
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("world", "name"), ROWS)
def test_the_wrapping_is_really_there(results: dict[int, dict[str, Any]], world: int, name: str) -> None:
    row, settings = results[world][name], strategies.settings_of(strategies.CASES[world][name])
    layout, there = mesh.check_sizes(settings.train.parallel, world), row["wrapping"]
    sharded = layout.data_world > 1 or settings.train.precision != "fp32"
    assert there["data_world"] == layout.data_world
    assert there["fsdp_blocks"] == (there["blocks"] if sharded else 0)
    assert there["compiled"] == (there["blocks"] if settings.train.compile == "block" else 0)
    per_block = 20 if row["qk_norm"] else 16
    assert there["over_tp"] == (per_block * there["blocks"] if layout.tp > 1 else 0)
    data = ("dp_replicate/" if layout.dp_replicate > 1 else "") + "dp_shard" if sharded else ""
    assert there["dims"] == ([data, f"{data}/tp".strip("/")] if layout.tp > 1 else [data])
    wide = strategies.CASES[world][name].get("arch") == "two heads of 32"
    whole = (0.605 if wide else 0.63) if layout.tp > 1 else 1.0  # of the small models; the rest is on every process
    assert there["share"] == pytest.approx(whole / layout.dp_shard, abs=0.02)


def test_a_model_states_its_blocks() -> None:
    whole = tiny_run.model(tiny_run.config())
    assert blocks_of(whole) == list(whole.transformer_blocks)
    assert blocks_of(whole.stage(1, 3)) == whole.blocks[1:]


def test_sizes_that_remain() -> None:
    assert mesh.check_sizes(ParallelConfig(tp_size=2), 8) == mesh.Layout(1, 1, 4, 2)
    assert mesh.check_sizes(ParallelConfig(dp_replicate=-1, dp_shard=2), 8) == mesh.Layout(1, 4, 2, 1)
    assert str(mesh.Layout(2, 1, 4, 1)) == "2 pp x 4 dp_shard"
    assert str(mesh.Layout(1, 1, 1, 1)) == "one process"


@pytest.mark.parametrize(
    ("sizes", "world", "says"),
    [
        ({"tp_size": 3}, 8, "(?s)tp_size = 3.*launch of 8.*a multiple of 3.*launch 9"),
        ({"dp_replicate": 2, "dp_shard": 2}, 8, "(?s)dp_replicate = 2, dp_shard = 2.*launch of 8.*4 process.*launch 4"),
        ({"tp_size": 2, "pp_size": 2}, 2, "(?s)launch of 2.*a multiple of 4.*launch 4"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int], world: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        mesh.check_sizes(ParallelConfig(**sizes), world)


def test_who_reads_which_part_of_a_batch() -> None:
    layout = mesh.Layout(2, 2, 2, 2)
    assert [layout.data_rank(rank) for rank in range(16)] == [0, 0, 1, 1, 2, 2, 3, 3] * 2
    assert (layout.data_world, layout.model_parallel_size) == (4, 4)


def test_a_tp_size_that_does_not_divide_is_refused_with_those_that_do() -> None:
    tensor_parallel.check(PARTS, 10, 0.0)
    tensor_parallel.check(PARTS, 1, 0.1)
    with pytest.raises(ConfigError, match=r"(?s)tp_size = 4.*\[1, 2, 5, 10\].* 70 "):
        tensor_parallel.check(PARTS, 4, 0.0)
    with pytest.raises(ConfigError, match=r"dropout = 0\.1"):
        tensor_parallel.check(PARTS, 2, 0.1)
