"""torch.compile per block: the same gradients, one graph per shape, and a bound on the shapes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from pipeline.config import TrainConfig
from pipeline.errors import ConfigError
from pipeline.launch import Launch
from pipeline.loader import compile_shapes
from pipeline.parallel import mesh
from pipeline.parallel.activation_checkpoint import checkpoint_blocks
from pipeline.parallel.compile import compile_blocks
from pipeline.parallel.parallelize import parallelize
from tests.support import tiny_cache
from tests.support.workers import tiny_run

STEPS = (0, 1, 0)  # two shapes, taken in turn


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Graphs and limits of one test are none of the next one's."""
    before = torch._dynamo.config.recompile_limit, torch.get_num_threads()
    torch._dynamo.reset()
    torch.set_num_threads(1)
    yield
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = before[0]
    torch.set_num_threads(before[1])


def _gradients(model: torch.nn.Module) -> list[dict[str, torch.Tensor]]:
    settings = tiny_run.config()
    parts = [tiny_run.microbatches(tiny_run.global_batch(step), 4) for step in STEPS]
    return [tiny_run.gradients(model, settings, batches)[2] for batches in parts]


@pytest.mark.parametrize("way", ["plain", "recomputed", "recomputed and sharded", "selective"])
def test_gradients_are_those_without_compilation(way: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    result = {}
    with mesh.open_mesh(Launch(), tiny_run.config().train.parallel, torch.device("cpu")):
        for compiled in (False, True):
            model = tiny_run.model(tiny_run.config())
            names = list(model.state_dict())
            if way != "plain":
                checkpoint_blocks(model.blocks, "selective" if way == "selective" else "full")
            if compiled:
                compile_blocks(model.blocks, counter, 2)  # type: ignore[arg-type]
            if "sharded" in way:
                for part in (*model.blocks, model):
                    fully_shard(part, mesh=init_device_mesh("cpu", (1,)))
                assert all(isinstance(block, FSDPModule) for block in model.blocks)
            assert list(model.state_dict()) == names
            result[compiled] = _gradients(model)
    assert counter.frame_count == 2, "one graph for all blocks and each shape"
    for ours, plain in zip(result[True], result[False], strict=True):
        assert tiny_run.distance(ours, plain) <= 1e-6


def test_the_configuration_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(
        "pipeline.parallel.parallelize.compile_blocks",
        lambda blocks, backend, count: compile_blocks(blocks, counter, count),
    )
    for how, frames in (("none", 0), ("block", 1)):
        settings = tiny_run.config(compile=how, compile_backend="aot_eager")
        with mesh.open_mesh(Launch(), settings.train.parallel, torch.device("cpu")) as device_mesh:
            parallel_model = parallelize(tiny_run.model(settings), device_mesh, settings.train)
            tiny_run.gradients(parallel_model.module, settings, [tiny_run.global_batch(0)])
        assert counter.frame_count == frames


def test_shapes_beyond_the_limit_are_an_error_and_not_quietly_left_uncompiled() -> None:
    model = tiny_run.model(tiny_run.config(layers=1))
    compile_blocks(model.blocks, "eager", 1)
    torch._dynamo.config.recompile_limit = 2
    shape = [torch.zeros(1, 1, 32), torch.zeros(1, 1, 1, 1), torch.zeros(1, 6, 32)]
    for tokens in (1, 2):
        model.blocks[0](torch.zeros(1, tokens, 32), *shape, tokens, 1)
    with pytest.raises(FailOnRecompileLimitHit):
        model.blocks[0](torch.zeros(1, 3, 32), *shape, 3, 1)


def test_too_many_shapes_are_refused_with_what_would_lower_them(tmp_path: Path) -> None:
    """Three buckets with captions of up to 9 rows padded to multiples of 2; batches of 24 on 2 processes."""
    snapshot = tiny_cache.build(tmp_path / "cache").open_snapshot()

    def refused(limit: int, microbatch: int) -> str:
        with pytest.raises(ConfigError) as caught:
            compile_shapes.check(snapshot, TrainConfig(compile_max_shapes=limit, microbatch=microbatch), 2)
        return str(caught.value)

    text = refused(14, 6)
    assert "15 shapes: 3 bucket(s), 5 text length(s)\n" in text
    for part in ("bucket.pad_text_multiple=9", "fewer data.buckets", "compile_max_shapes=15", "train.compile=none"):
        assert part in text
    assert "microbatch" not in text
    compile_shapes.check(snapshot, TrainConfig(compile_max_shapes=15, microbatch=6), 2)
    assert "30 shapes" in refused(29, 7)
    assert "a train.microbatch that divides" in refused(29, 7)
    one = tiny_cache.build(tmp_path / "one", {(16, 16): 30}).open_snapshot()
    compile_shapes.check(one, TrainConfig(compile_max_shapes=5, microbatch=12), 2)


def test_the_stage_refuses_before_anything_starts(small_cache_copy: Path, make_config: object, tmp_path: Path) -> None:
    import stages.train

    config = make_config(tmp_path, f"cache={small_cache_copy}", "train.compile=block", "train.compile_max_shapes=1")  # type: ignore[operator]
    with pytest.raises(ConfigError, match=r"train\.compile: block"):
        stages.train.run(config, say=lambda line: None)
    assert not (tmp_path / "run").exists()
