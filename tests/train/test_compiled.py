"""torch.compile per block: the same gradients, one graph for all shapes, and a bound on the graphs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from sana_pipe.base.launch import Launch
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.parallel import mesh
from sana_pipe.train.parallel.activation_checkpoint import apply_activation_checkpointing
from sana_pipe.train.parallel.compile import compile_blocks, compile_conditions
from sana_pipe.train.parallel.parallelize import parallelize
from tests.support.workers import tiny_run

STEPS = (0, 1, 0)  # two shapes, taken in turn


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Limits of a test are not those of the next."""
    before = torch._dynamo.config.recompile_limit, torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch._dynamo.config.recompile_limit = before[0]
    torch.set_num_threads(before[1])


def _gradients(model: torch.nn.Module) -> list[dict[str, torch.Tensor]]:
    settings = tiny_run.config()
    parts = [tiny_run.microbatches(tiny_run.global_batch(step), 4) for step in STEPS]
    return [tiny_run.gradients(model, settings, batches)[2] for batches in parts]


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    ["plain", "recomputed", "selective", "recomputed and sharded"],
)
def test_gradients_are_those_without_compilation(way: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    result = {}
    with mesh.open_mesh(Launch(), tiny_run.config().train.parallel, torch.device("cpu")):
        for compiled in (False, True):
            model = tiny_run.model(tiny_run.config())
            names = list(model.state_dict())
            if way != "plain":
                mode = "selective" if way == "selective" else "full"
                apply_activation_checkpointing(model.blocks, TrainConfig(activation_checkpointing=mode))
            if compiled:
                compile_blocks(model.blocks, counter)  # type: ignore[arg-type]
                compile_conditions(model, counter)  # type: ignore[arg-type]
            if "sharded" in way:
                for part in (*model.blocks, model):
                    fully_shard(part, mesh=init_device_mesh("cpu", (1,)))
                assert all(isinstance(block, FSDPModule) for block in model.blocks)
            assert list(model.state_dict()) == names
            result[compiled] = _gradients(model)
    assert counter.frame_count == 2, "one graph for all blocks and shapes, one for text and timestep"
    for ours, plain in zip(result[True], result[False], strict=True):
        assert tiny_run.distance(ours, plain) <= 1e-6


def test_compiled_code_of_other_operations_is_not_taken_from_the_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Code that was compiled for an operation with other arguments fails: the disk's cache has to tell them apart.
    The tag of a user stays, and torch makes a file name of it for a job that has an id."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    config, tags = torch.compiler.config, []
    for arguments in ("Tensor x", "Tensor x, bool of_weights=True"):
        with config.patch(job_id="job", cache_key_tag="mine"):  # after monkeypatch torch would not find them any more
            with torch.library._scoped_library("sana_pipe", "FRAGMENT") as library:
                library.define(f"probe({arguments}) -> Tensor")
                layer = torch.nn.Linear(2, 2)
                compile_blocks([layer], "eager")
                compile_blocks([torch.nn.Linear(2, 2)], "eager")
            layer(torch.zeros(3, 2))
            tags.append(config.cache_key_tag)
    assert tags[0] != tags[1] and all(tag.startswith("mine") for tag in tags)
    assert list((tmp_path / "dynamo").glob("*mine-*.pkl"))


@pytest.mark.slow
def test_the_configuration_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr("sana_pipe.train.parallel.parallelize.COMPILE_BACKEND", counter)
    for how, frames in (("none", 0), ("block", 2)):
        settings = tiny_run.config(layers=1, compile=how)
        with mesh.open_mesh(Launch(), settings.train.parallel, torch.device("cpu")) as device_mesh:
            parallel_model = parallelize(tiny_run.model(settings), device_mesh, settings.train)
            tiny_run.gradients(parallel_model.module, settings, [tiny_run.global_batch(0)])
        assert counter.frame_count == frames


@pytest.mark.slow
@pytest.mark.parametrize("text", ["padded", "packed"])
def test_one_graph_serves_all_buckets_and_text_lengths(text: str) -> None:
    """40 buckets and 3 text lengths, forward and backward; nothing is compiled after the first batch."""
    model, counter = tiny_run.model(tiny_run.config(layers=2)), CompileCounterWithBackend("aot_eager")
    plain = tiny_run.model(tiny_run.config(layers=2))
    compile_blocks(model.blocks, counter)  # type: ignore[arg-type]
    compile_conditions(model, counter)  # type: ignore[arg-type]
    channels, width = model.config.in_channels, model.config.caption_channels
    generator = torch.Generator().manual_seed(0)
    for height, columns in itertools.product((2, 3, 4, 5, 6, 8, 9, 11), (2, 4, 5, 7, 16)):
        for rows in (5, 7, 16):
            latents = torch.randn(3, channels, height, columns, generator=generator)
            mask = torch.arange(rows)[None] < torch.tensor([rows, 2, 4])[:, None]
            captions = torch.randn(3, rows, width, generator=generator)
            given = latents, captions[mask] if text == "packed" else captions, mask, torch.tensor([10.0, 500.0, 900.0])
            out = model(*given)
            out.square().mean().backward()
            assert counter.frame_count == 2
    assert torch.allclose(out, plain(*given), atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_inductor_compiles_two_graphs_and_nothing_after_the_second_step() -> None:
    """Real code for this CPU, as `train.compile: auto` takes on a GPU; values and gradients of plain PyTorch."""
    settings = tiny_run.config(layers=2)
    model, plain = tiny_run.model(settings), tiny_run.model(settings)
    counter = CompileCounterWithBackend("inductor")
    compile_blocks(model.blocks, counter)  # type: ignore[arg-type]
    compile_conditions(model, counter)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    shapes = itertools.product(((4, 6), (6, 4), (8, 8), (3, 16), (16, 2)), (5, 7, 16))
    for step, ((height, width), rows) in enumerate(shapes):
        latents = torch.randn(3, model.config.in_channels, height, width, generator=generator)
        captions = torch.randn(3, rows, model.config.caption_channels, generator=generator)
        mask = torch.arange(rows)[None] < torch.tensor([rows, 2, 4])[:, None]
        outputs = [made(latents, captions, mask, torch.tensor([10.0, 500.0, 900.0])) for made in (model, plain)]
        assert torch.allclose(*outputs, atol=1e-4)
        for out in outputs:
            out.square().mean().backward()
        if step == 1:
            compiled = counter.frame_count, torch._dynamo.utils.counters["inductor"]["fxgraph_cache_miss"]
            assert compiled[0] <= 2
    assert (counter.frame_count, torch._dynamo.utils.counters["inductor"]["fxgraph_cache_miss"]) == compiled
    found, expected = ({n: p.grad for n, p in made.named_parameters()} for made in (model, plain))
    assert tiny_run.distance(found, expected) <= 1e-4  # type: ignore[arg-type]


@pytest.mark.slow
def test_one_graph_too_many_is_an_error_and_not_left_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_run.model(tiny_run.config(layers=1))
    compile_blocks(model.blocks, "eager")
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 1)
    dim = model.config.inner_dim

    def run(samples: int) -> None:
        conditions = torch.zeros(samples, 3, dim), torch.zeros(samples, 1, 1, 3), torch.zeros(samples, 6, dim)
        model.blocks[0](torch.zeros(samples, 6, dim), *conditions, 3, 2)

    for samples in (2, 3, 4):
        run(samples)
    with pytest.raises(FailOnRecompileLimitHit):
        run(1)  # a size of one is a constant of its graph
