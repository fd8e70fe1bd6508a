"""Optimizers and precisions on several processes against one: python -m tests.support.workers.optimizers FOLDER.

Imports once, then forks the processes of each launch; the tests judge what FOLDER/found.json holds.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from sana_pipe.base.launch import Launch
from sana_pipe.base.processes import run_and_exit
from sana_pipe.config import Config
from sana_pipe.train.parallel import collectives, mesh
from sana_pipe.train.parallel.parallelize import ParallelModel, parallelize
from sana_pipe.train.parallel.shards import local
from sana_pipe.train.training import optimizers
from sana_pipe.train.training.optimizers import came
from sana_pipe.train.training.optimizers.came import CAME
from sana_pipe.train.training.trainer import fit
from tests.support.workers import tiny_run
from tests.support.workers.strategies import launches

CPU = torch.device("cpu")
SHAPES = [(7, 5), (2, 16), (10, 6, 1, 1), (12, 1, 3, 3), (8, 6, 3, 3), (9,), (3,), (3, 5)]
JOINT = ((0, 7), (5, 6))
"""Which of them are rows of one matrix, or of one vector, under NVlabs' numerics."""
PLACES: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "rows": ((4,), [Shard(0)]),
    "columns": ((4,), [Shard(1)]),
    "rows and columns": ((2, 2), [Shard(0), Shard(1)]),
    "copies of rows": ((2, 2), [Replicate(), Shard(0)]),
    "rows of rows": ((2, 2), [Shard(0), Shard(0)]),
}
MODELS = {
    "FSDP2": {"dp_shard": 4},
    "HSDP": {"dp_replicate": 2, "dp_shard": 2},
    "FSDP2 x TP": {"dp_shard": 2, "tp_size": 2},
    "DDP": {"dp_replicate": 4, "dp_shard": 1},
}
STEPS = 10
CHAIN: tuple[tuple[int, dict[str, Any], int], ...] = (
    (4, {"dp_shard": 4}, 2),
    (1, {}, 4),
    (4, {"dp_shard": 2, "tp_size": 2}, 6),
    (4, {"dp_shard": 2, "pp_size": 2}, 8),
)
"""(processes, how, until which step)."""
FOLDER = Path()


def came_of(place: str | None, nvlabs: bool) -> dict[str, Tensor]:
    """Parameters and state after some steps, whole; `place` None: plain tensors."""
    torch.manual_seed(0)
    values = [torch.randn(shape) for shape in SHAPES]
    steps = [[torch.randn(shape) * 10.0 ** (-step) for shape in SHAPES] for step in range(5)]

    sizes, placements = PLACES[place] if place is not None else ((), [])
    over = init_device_mesh("cpu", sizes) if sizes else None  # once: each process group has threads

    def put(tensor: Tensor) -> Tensor:
        if over is None:
            return tensor.clone()
        fitting = [Replicate() if tensor.ndim < 2 and p == Shard(1) else p for p in placements]
        return distribute_tensor(tensor, over, fitting)

    parameters = [nn.Parameter(put(value)) for value in values]
    joint = [[parameters[i] for i in members] for members in JOINT] if nvlabs else []
    optimizer = CAME(parameters, lr=1e-2, factor_kernels=not nvlabs, joint=joint)
    for gradients in steps:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = put(gradient)
        optimizer.step()
    result = {}
    for i, parameter in enumerate(parameters):
        stored = {"": parameter.detach(), **{n: v for n, v in optimizer.state[parameter].items() if n != "step"}}
        for name, value in stored.items():
            assert isinstance(value, DTensor) == (place is not None), name
            result[f"{i}{name}{nvlabs}"] = value.full_tensor() if isinstance(value, DTensor) else value
    return result


def settings_of(parallel: dict[str, int], **train: Any) -> Config:
    # CAME's first steps are ten times as long as later ones: at 3e-4 they would magnify rounding errors.
    base = {"microbatch": 2, "parallel": parallel, "optim": {"name": "came", "lr": 3e-5}}
    return tiny_run.config(**{**base, **train})


def trained(launch: Launch, settings: Config, group: Any) -> tuple[ParallelModel, int]:
    """The model after some steps, and how often CAME summed over processes in one of them."""
    layout = mesh.check_sizes(settings.train.parallel, launch.world)
    parallel_model = parallelize(tiny_run.model(settings), group, settings.train)
    calls = 0

    def counting(tensor: Tensor, group: Any = None) -> None:
        nonlocal calls
        calls += 1
        dist.all_reduce(tensor, group=group)

    class Counted:
        all_reduce = staticmethod(counting)
        ProcessGroup = dist.ProcessGroup

    before, came.dist = came.dist, Counted  # type: ignore[assignment]
    try:
        tiny_run.train_losses(parallel_model, settings, STEPS, layout.data_rank(launch.rank), layout.data_world)
    finally:
        came.dist = before
    return parallel_model, calls // STEPS


def weights(module: nn.Module) -> dict[str, Tensor]:
    return without_noise(
        {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().float() for n, p in module.named_parameters()}
    )


def without_noise(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The bias of the cross attention's keys has no gradient but rounding errors, and CAME and Adam make full steps of
    them."""
    return {name: value for name, value in found.items() if not name.endswith("attn2.to_k.bias")}


def digest(parameters: Mapping[str, Tensor]) -> str:
    result = xxhash.xxh3_64()
    for _, parameter in sorted(parameters.items()):
        result.update(local(parameter.detach()).contiguous().view(torch.uint8).numpy().data)
    return result.hexdigest()


def overflow(launch: Launch, group: Any) -> list[Any]:
    """Only the third process's shard of one gradient is infinite: what all of them made of it."""
    settings = tiny_run.config(precision="fp16", microbatch=2)
    parallel_model = parallelize(tiny_run.model(settings), group, settings.train)
    if launch.rank == 2:
        original = parallel_model.forward_backward

        def spoilt(*arguments: Any, **named: Any) -> list[Tensor]:
            result = original(*arguments, **named)
            gradient = dict(parallel_model.module.named_parameters())["proj_out.weight"].grad
            assert gradient is not None
            local(gradient)[0, 0] = float("inf")
            return result

        parallel_model.forward_backward = spoilt  # type: ignore[method-assign]
    optimizer = optimizers.build(parallel_model.module, settings.train.optim, CPU)
    step = tiny_run.train_step(parallel_model, settings.train, optimizer)
    step.scale.state["scale"].fill_(2.0**8)  # nothing else overflows
    before = digest(dict(parallel_model.module.named_parameters()))
    outcome = step(tiny_run.microbatches(tiny_run.global_batch(0), 2, launch.rank, launch.world), 1)
    same = digest(dict(parallel_model.module.named_parameters())) == before
    return collectives.all_gather_objects([outcome.skipped, step.scale.value, same])


def compare(launch: Launch) -> None:
    result: dict[str, Any] = {"came": {}, "models": {}, "calls": {}, "copies": {}}
    meetings = 0

    def meeting() -> Launch:
        nonlocal meetings
        meetings += 1
        return Launch(launch.rank, 4, launch.rank, 4, rendezvous=f"{launch.rendezvous}-{meetings}")

    plain = came_of(None, False) | came_of(None, True)
    with mesh.open_mesh(meeting(), settings_of({}).train.parallel, CPU):
        for place in PLACES:
            mine = came_of(place, False) | came_of(place, True)
            result["came"][place] = max(
                float((mine[n] - plain[n]).norm() / plain[n].norm().clamp(min=1e-30)) for n in plain
            )
    expected = torch.load(FOLDER / "alone.pt")
    for name, parallel in MODELS.items():
        settings = settings_of(parallel)
        with mesh.open_mesh(meeting(), settings.train.parallel, CPU) as group:
            parallel_model, result["calls"][name] = trained(launch, settings, group)
            result["models"][name] = tiny_run.distance(weights(parallel_model.module), expected)
    for name in ("HSDP", "DDP", "FSDP2 x TP"):
        for optimizer in ("adamw", "came"):
            settings = settings_of(MODELS[name], precision="bf16_pure", optim={"name": optimizer})
            with mesh.open_mesh(meeting(), settings.train.parallel, CPU) as group:
                parallel_model, _ = trained(launch, settings, group)
                whole = {
                    n: p
                    for n, p in parallel_model.module.named_parameters()
                    if name != "FSDP2 x TP"
                    or not (isinstance(p, DTensor) and "tp" in (p.device_mesh.mesh_dim_names or ()))
                }
                result["copies"][f"{name}, {optimizer}"] = collectives.all_gather_objects(digest(whole))
    with mesh.open_mesh(meeting(), settings_of({}).train.parallel, CPU) as group:
        result["overflow"] = overflow(launch, group)
    if launch.is_main:
        (FOLDER / "found.json").write_text(json.dumps(result))


def resumed(launch: Launch, name: str, link: int) -> None:
    world, parallel, until = CHAIN[link]
    precision = "bf16" if name == "adamw8bit" else "fp32"
    settings = tiny_run.config(
        FOLDER / f"chain-{name}",
        steps=until,
        microbatch=2,
        optim={"name": name},
        ema={"decay": 0.9},
        layers=2,
        parallel=parallel,
        precision=precision,
    )
    layout = mesh.check_sizes(settings.train.parallel, world)
    task = tiny_run.task(settings, layout.data_rank(launch.rank), layout.data_world)
    here = (
        Launch()
        if world == 1
        else Launch(launch.rank, world, launch.rank, world, rendezvous=f"{launch.rendezvous}-{name}-{link}")
    )
    fit(settings.train, task, here, resume="auto", log=lambda line: None)


def uninterrupted(launch: Launch, name: str) -> None:
    precision = "bf16" if name == "adamw8bit" else "fp32"
    settings = tiny_run.config(
        FOLDER / f"whole-{name}",
        steps=CHAIN[-1][2],
        microbatch=2,
        optim={"name": name},
        ema={"decay": 0.9},
        layers=2,
        precision=precision,
    )
    fit(settings.train, tiny_run.task(settings), Launch(), log=lambda line: None)


def alone() -> None:
    settings = settings_of({}, microbatch=8)
    model = tiny_run.model(settings)
    tiny_run.train_losses(model, settings, STEPS)
    torch.save(weights(model), FOLDER / "alone.pt")


def main() -> None:
    global FOLDER
    FOLDER = Path(sys.argv[1])
    torch.set_num_threads(1)
    names = ["came"]
    if importlib.util.find_spec("torchao"):
        import sana_pipe.train.training.optimizers.adamw_8bit  # noqa: F401  # once, not in every process

        names.append("adamw8bit")
    launches(1, FOLDER, lambda launch: alone())
    launches(4, FOLDER, compare)
    for name in names:
        launches(1, FOLDER, partial(uninterrupted, name=name))
        for link, (world, _, _) in enumerate(CHAIN):
            launches(world, FOLDER, partial(resumed, name=name, link=link))


if __name__ == "__main__":
    run_and_exit(main)
