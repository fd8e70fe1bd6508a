"""Context parallelism: bands of rows, what is refused, and what a band of the model computes in one process.

Parity with one process: `tests/test_strategies.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.cache.root import Cache
from pipeline.config import ParallelConfig
from pipeline.errors import ConfigError
from pipeline.launch import Launch
from pipeline.models.sana import SanaTransformer
from pipeline.parallel import context_parallel, mesh
from pipeline.training.checks import check_inputs
from tests.support.workers import tiny_run


class Group:
    """What `context_parallel.band` asks a mesh."""

    def __init__(self, size: int, rank: int):
        self.size, self.get_local_rank = (lambda: size), (lambda: rank)


@pytest.mark.parametrize(("rows", "size"), [(8, 2), (8, 3), (6, 4), (5, 5), (127, 8)])
def test_bands_are_disjoint_cover_all_rows_and_differ_by_one_row_at_most(rows: int, size: int) -> None:
    bands = [context_parallel.band(rows, Group(size, rank)) for rank in range(size)]  # type: ignore[arg-type]
    assert [row for first, last in bands for row in range(first, last)] == list(range(rows))
    heights = {last - first for first, last in bands}
    assert min(heights) >= 1 and max(heights) - min(heights) <= 1


def test_fewer_rows_than_processes_are_refused_wherever_they_come_from() -> None:
    with pytest.raises(ConfigError, match=r"(?s)3 rows.*cp_size = 4.*cp_size=3"):
        context_parallel.band(3, Group(4, 0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parallel", "world", "says"),
    [
        ({"cp_size": 2, "tp_size": 2}, 4, r"(?s)cp_size = 2 .* tp_size = 2.*tp_size=1"),
        ({"cp_size": 2, "pp_size": 2}, 4, r"(?s)cp_size = 2 .* pp_size = 2.*pp_size=1"),
        ({"cp_size": 8}, 8, r"(?s)cp_size = 8 .* 6 rows .* bucket 48x80.*cp_size=6"),
        ({"cp_size": 3}, 4, r"(?s)cp_size = 3.*launch of 4.*a multiple of 3"),
    ],
)
def test_what_is_not_built_is_refused_before_anything_is_started(
    parallel: dict[str, int], world: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tiny_run.config(parallel=parallel)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **kwargs: pytest.fail("started"))
    with pytest.raises(ConfigError, match=says):
        check_inputs(settings, tiny_run.task(settings), Launch(0, world, 0, world), lambda line: None)


def test_all_pictures_of_a_run_count(small_cache: Path, make_config: Any, tmp_path: Path) -> None:
    """Those of training and of validation, and those that are drawn."""
    import stages.train

    cache = Cache(small_cache)
    snapshot = cache.open_snapshot()
    settings = make_config(
        tmp_path, f"cache={small_cache}", "train.device=cpu", "train.parallel.cp_size=64", "train.compile=none"
    )
    task = stages.train.task(settings, stages.train.Inputs(snapshot), Launch())
    least = min(snapshot.buckets, key=lambda bucket: bucket.height)
    rows = least.height // snapshot.latent_recipe.compression
    assert len(task.heights) == len(snapshot.buckets)
    assert task.heights[f"bucket {least.height}x{least.width}"] == rows
    with pytest.raises(ConfigError, match=rf"(?s)cp_size = 64 .* {rows} rows .*cp_size={rows}"):
        check_inputs(settings, task, Launch(0, 64, 0, 64), lambda line: None)
    low = SimpleNamespace(buckets=[SimpleNamespace(height=16, width=96)])
    drawn = tiny_run.prompts(settings, (24, 64))
    heights = stages.train.latent_heights(snapshot, low, drawn)  # type: ignore[arg-type]
    assert heights == {**task.heights, "bucket 16x96": 16 // snapshot.latent_recipe.compression, "train.pictures": 3}


def test_dropout_is_refused() -> None:
    context_parallel.check({}, ParallelConfig(), 0.1)
    context_parallel.check({}, ParallelConfig(cp_size=2), 0.0)
    with pytest.raises(ConfigError, match=r"dropout = 0\.1"):
        context_parallel.check({}, ParallelConfig(cp_size=2), 0.1)


def test_sizes_and_who_reads_which_part_of_a_batch() -> None:
    layout = mesh.check_sizes(ParallelConfig(dp_replicate=2, cp_size=3), 12)
    assert layout == mesh.Layout(1, 2, 2, 1, 3) and str(layout) == "2 dp_replicate x 2 dp_shard x 3 cp"
    assert [layout.data_rank(rank) for rank in range(12)] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert (layout.data_world, layout.model_parallel_size, layout.shards) == (4, 3, 6)
    assert layout.sizes == (1, 2, 6, 1), "parameters are sharded over the processes that share pictures, too"


def test_auto_does_not_choose_it() -> None:
    with pytest.raises(ValueError, match="cp_size"):
        ParallelConfig(sizes="auto", cp_size=2)


def test_a_band_has_the_tokens_and_position_embedding_of_its_rows() -> None:
    shape = replace(tiny_run.model(tiny_run.config()).config, interpolation_scale=2.0, patch_size=2)
    model = SanaTransformer.from_scratch(shape, seed=0)
    latents = torch.randn(2, tiny_run.CHANNELS, 14, 6)
    assert model.rows(latents) == 7
    whole = model.patch_embed(latents).unflatten(1, (7, 3))
    for first, last in ((0, 3), (3, 5), (5, 7)):
        band = model.patch_embed(model.crop(latents, first, last), band=(first, 7))
        torch.testing.assert_close(band.unflatten(1, (last - first, 3)), whole[:, first:last], atol=1e-6, rtol=0)


def test_the_model_states_every_place_where_rows_meet() -> None:
    """With all of them joined by hand, a block of one band is the band of the block; without any of them it is not."""
    model = tiny_run.model(tiny_run.config())
    block, plan = model.blocks[0], model.context_parallel_plan
    torch.manual_seed(0)
    hidden, context = torch.randn(2, 8 * 5, 32), torch.randn(2, 3, 32)
    rest = context, torch.zeros(2, 1, 1, 3), torch.randn(2, 6, 32)
    seen: dict[str, Tensor] = {}

    def noting(name: str) -> Callable[..., Tensor]:
        def note(x: Tensor, *_: Any) -> Tensor:
            seen[name] = x.detach()
            return x

        return note

    def set_to(**given: Any) -> None:
        for place, role in plan.items():
            name, _, attribute = place.rpartition(".")
            setattr(block.get_submodule(name), attribute, given[role])

    set_to(total=noting("state"), surround=noting("tokens"), margins=(0, 0))
    whole = block(hidden, *rest, 8, 5)
    state, tokens = seen["state"], seen["tokens"]
    given = {
        "total": lambda own: state,
        "surround": lambda x, width: torch.cat([tokens[:, 10:15], x, tokens[:, 30:35]], dim=1),
        "margins": (1, 1),
    }
    set_to(**given)
    torch.testing.assert_close(block(hidden[:, 15:30], *rest, 3, 5), whole[:, 15:30], atol=1e-5, rtol=1e-5)
    for missing in ({"total": None}, {"surround": None, "margins": (0, 0)}):
        set_to(**{**given, **missing})
        assert (block(hidden[:, 15:30], *rest, 3, 5) - whole[:, 15:30]).abs().max() > 1e-3
