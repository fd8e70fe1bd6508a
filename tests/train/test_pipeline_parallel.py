"""The model cut into stages, what a pipeline refuses, and the schedules it keeps: in one process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B
from torch.testing._internal.distributed.fake_pg import FakeStore

from sana_pipe.base.errors import ConfigError
from sana_pipe.base.launch import Launch
from sana_pipe.train.models.sana import SanaTransformer
from sana_pipe.train.models.sana_config import SanaConfig
from sana_pipe.train.models.sana_shape import Numerics
from sana_pipe.train.models.sana_stage import SanaStage
from sana_pipe.train.parallel import pipeline_parallel
from sana_pipe.train.parallel.config import ParallelConfig
from sana_pipe.train.training.trainer import fit
from tests.support.workers import tiny_run

CPU = torch.device("cpu")


def config(**changes: Any) -> SanaConfig:
    arch = tiny_run.config(layers=7).model.arch
    assert arch is not None
    return SanaConfig.from_arch({**arch, **changes}, 8)


def stages_of(model: SanaTransformer, count: int) -> list[SanaStage]:
    return [model.stage(part.start, part.stop) for part in pipeline_parallel.stage_ranges(len(model.blocks), count)]  # type: ignore[misc]


def inputs(batch: int = 2, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(1)
    mask = torch.arange(9)[None] < torch.randint(1, 10, (batch, 1))
    return {
        "latents": torch.randn(batch, 4, 6, 10, dtype=dtype),
        "captions": torch.randn(batch, 9, 24, dtype=dtype),
        "mask": mask,
        "timesteps": torch.rand(batch) * 999,
    }


# ---------------------------------------------------------------------------------------------------------- cutting


@pytest.mark.parametrize(("blocks", "stages"), [(20, 1), (20, 3), (7, 4), (5, 5), (60, 8)])
def test_slices_are_consecutive_and_even(blocks: int, stages: int) -> None:
    parts = pipeline_parallel.stage_ranges(blocks, stages)
    assert [block for part in parts for block in part] == list(range(blocks))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[0] == min(sizes), "the first stage holds the activations of the most microbatches"


@pytest.mark.parametrize("count", [2, 3, 7])
def test_the_stages_partition_the_state_dict(count: int) -> None:
    model = SanaTransformer.from_scratch(config(qk_norm="rms_norm_across_heads"), 0)
    names = [name for stage in stages_of(model, count) for name in stage.state_dict()]
    assert sorted(names) == sorted(model.state_dict())
    for stage in stages_of(model, count):
        for name, parameter in stage.named_parameters():
            assert parameter is model.get_parameter(name)


@pytest.mark.parametrize("changes", [{}, {"qk_norm": "rms_norm_across_heads"}, {"interpolation_scale": 2.0}])
@pytest.mark.parametrize(
    ("dtype", "fp32_residual"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_the_chain_of_stages_is_the_model(changes: dict[str, Any], dtype: torch.dtype, fp32_residual: bool) -> None:
    """Also that what is declared to travel between them is what does, to the stride: buffers are made after it."""
    model = SanaTransformer.from_scratch(config(**changes), 0, dtype=dtype, numerics=Numerics(fp32_residual))
    given = inputs(dtype=dtype)
    stages = stages_of(model, 3)
    travelling, shared = stages[0].split(given)
    declared: Any
    for stage in stages:
        travelling = stage(*travelling, **shared)
        actual = (travelling,) if stage.is_last else travelling
        declared = (stage.example_output(given),) if stage.is_last else stage.example_hidden(given)
        for tensor, stand_in in zip(actual, declared, strict=True):
            assert (tensor.shape, tensor.dtype, tensor.stride()) == (stand_in.shape, stand_in.dtype, stand_in.stride())
            assert tensor.requires_grad
            assert not tensor._is_view(), "FSDP2 warns of views"
    assert torch.equal(travelling, model(**given))


def test_a_stage_refuses_what_the_model_refuses() -> None:
    stage = stages_of(SanaTransformer.on_meta(config()), 2)[0]
    given = inputs()
    with pytest.raises(TypeError, match="must be bool"):
        stage.split({**given, "mask": given["mask"].float()})
    with pytest.raises(TypeError, match="must be float32"):
        SanaTransformer.from_scratch(config(), 0).time_embed(given["timesteps"].bfloat16(), torch.bfloat16)


def test_gradients_for_the_stage_before_are_contiguous() -> None:
    """Whatever order a block leaves them in: they are sent as they lie in memory."""
    stage = stages_of(SanaTransformer.from_scratch(config(), 0), 2)[1]

    class Turned(nn.Module):
        def forward(self, hidden: Tensor, *_: Any) -> Tensor:
            return torch.matmul(torch.eye(hidden.shape[-1]), hidden.transpose(1, 2)).transpose(1, 2)

    stage.transformer_blocks = nn.ModuleDict({"0": Turned()})  # type: ignore[assignment]
    received = [torch.randn(t.shape, requires_grad=True) for t in stage.example_hidden(inputs())]
    _, shared = stage.split(inputs())
    (gradient,) = torch.autograd.grad(stage(*received, **shared).square().sum(), received[:1])
    assert gradient.is_contiguous()


# -------------------------------------------------------------------------------------------------------- schedules


@pytest.fixture
def one_of_many() -> Iterator[Any]:
    """This process as one of some that do not exist; nothing is sent."""
    opened = []

    def open_group(size: int) -> dist.ProcessGroup:
        if opened:
            dist.destroy_process_group()
        opened.append(size)
        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    yield open_group
    if opened:
        dist.destroy_process_group()


def first_of_two(one_of_many: Any) -> pipeline_parallel.Pipeline:
    one_of_many(2)
    stage = stages_of(SanaTransformer.from_scratch(config(), 0), 2)[0]
    return pipeline_parallel.Pipeline(stage, init_device_mesh("cpu", (2,)))


def accepted_by_torch(size: int, count: int, group: dist.ProcessGroup) -> bool:
    stage = PipelineStage(nn.Identity(), 0, size, CPU, group=group)
    try:
        Schedule1F1B(stage, count, loss_fn=nn.MSELoss())
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_is_refused_is_what_torch_refuses(one_of_many: Any, size: int) -> None:
    group = one_of_many(size)
    for count in range(1, 12):
        try:
            pipeline_parallel.check(20, {"8x8": count}, 1, size)
            passed = True
        except ConfigError:
            passed = False
        assert passed == accepted_by_torch(size, count, group), count


@pytest.mark.parametrize(("share", "microbatch"), [(12, 5), (12, 4)])
def test_the_refusal_names_values_that_work(share: int, microbatch: int) -> None:
    shares = {"16x64": 6 * microbatch, "32x32": share}  # the first one is right
    with pytest.raises(ConfigError, match=f"bucket 32x32: {share} samples") as caught:
        pipeline_parallel.check(20, shares, microbatch, 4)
    named = re.search(r"train.microbatch = ([\d, ]+) ?(or|$)", str(caught.value))
    assert named is not None
    for value in named[1].split(", "):
        pipeline_parallel.check(20, shares, int(value), 4)


def test_shares_that_no_microbatch_saves() -> None:
    with pytest.raises(ConfigError, match=r"fix:      sana-pipe bucket .*multiple = 4") as caught:
        pipeline_parallel.check(20, {"32x32": 3}, 1, 4)
    with pytest.raises(
        ConfigError, match=r"(?s)32x32: 2 .*nor can those of 1 other.*fix:      sana-pipe bucket .*multiple = 4"
    ):
        pipeline_parallel.check(20, {"32x32": 2, "64x16": 3}, 2, 4)
    assert "train.microbatch" not in str(caught.value).partition("fix:")[2]


def test_fewer_blocks_than_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"(?s)3 blocks .* 4 stages.*pp_size = 4.*pp_size of at most 3$"):
        pipeline_parallel.check(3, {}, 1, 4)
    pipeline_parallel.check(4, {}, 1, 4)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"layers": 1}, "1 blocks"),
        ({"microbatch": 8}, "bucket 64x64: 8 samples"),
    ],
)
def test_the_trainer_refuses_before_any_process_group_starts(settings: dict[str, Any], says: str) -> None:
    """Nobody listens at this address: waiting for it would be an error of its own, and much later."""
    given = tiny_run.config(parallel={"pp_size": 2}, **settings)
    launch = Launch(world=2, local_world=2, rendezvous="tcp://127.0.0.1:1")
    with pytest.raises(ConfigError, match=says):
        fit(given.train, tiny_run.task(given), launch)
    assert not dist.is_initialized()


def test_parameters_stay_gathered_in_a_pipeline() -> None:
    assert ParallelConfig().reshards(2) and not ParallelConfig(pp_size=2).reshards(2)
    assert not ParallelConfig().reshards(1) and ParallelConfig(offload="all").reshards(1)
    assert ParallelConfig(pp_size=2, reshard_after_forward=True).reshards(1)


def test_one_schedule_per_shape_and_no_more_than_a_few(one_of_many: Any) -> None:
    pipeline = first_of_two(one_of_many)
    shapes = [inputs(batch) for batch in (1, 2, 3)]
    first = [pipeline.schedule_for(2, given) for given in shapes]
    assert len({id(schedule) for schedule in first}) == 3
    assert [pipeline.schedule_for(2, given) for given in shapes] == first
    assert pipeline.schedule_for(3, shapes[0]) not in first
    for batch in range(4, 40):
        pipeline.schedule_for(2, inputs(batch))
    assert len(pipeline.schedules) <= 4
