"""Memory techniques under sharding, in one launch: torchrun -m tests.support.workers.memory_modes FOLDER.

Both processes read the same batch, so the averaged gradient is that of one process, which is computed first.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from benchmarks.saved_bytes import saved_bytes
from sana_pipe.base.launch import Launch, detect
from sana_pipe.base.processes import run_and_exit
from sana_pipe.train.parallel import mesh, saved_tensors
from sana_pipe.train.parallel.parallelize import ParallelModel, parallelize
from sana_pipe.train.training import optimizers
from sana_pipe.train.training.optimizers import in_backward
from tests.support import saved_activations
from tests.support.workers import tiny_run

CPU = torch.device("cpu")
WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "every-2": {"activation_checkpointing": "every-2"},
    "int8": {"activation_compression": "int8"},
    "full, int8": {"activation_checkpointing": "full", "activation_compression": "int8"},
    "parameters on the host": {"parallel": {"offload": "all"}},
}
IN_BF16 = ("none", "full", "selective", "int8")


def settings(precision: str, **train: Any) -> Any:
    return tiny_run.config(precision=precision, **train).train


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def laid_out(train: Any) -> tuple[mesh.Layout, DeviceMesh]:
    layout = mesh.check_sizes(train.parallel, dist.get_world_size())
    return layout, init_device_mesh("cpu", layout.sizes, mesh_dim_names=mesh.DIMS)


def parallel_model(device_mesh: Any, train: Any, layers: int) -> ParallelModel:
    return parallelize(saved_activations.model(torch.float32, layers=layers), device_mesh, train)


def block_bytes(device_mesh: Any, train: Any, sizes: tuple[int, int] = (1, 2)) -> tuple[float, dict[str, Tensor]]:
    """MB that one block keeps, and the gradients of the longer of two models."""
    dtype = saved_activations.PRECISIONS[train.precision]
    given, counts = saved_activations.inputs(dtype), []
    for layers in sizes:
        module = parallel_model(device_mesh, train, layers).module
        total, out = saved_bytes(lambda m=module: m(*given), [*module.parameters(), *given])  # type: ignore[misc]
        counts.append(total)
        out.float().square().mean().backward()
    blocks = sizes[1] - sizes[0]
    gradients = {name: whole(p.grad) for name, p in module.named_parameters()}
    return (counts[1] - counts[0]) / blocks / 1e6, gradients


def alone(precision: str, layers: int) -> dict[str, Tensor]:
    dtype = saved_activations.PRECISIONS[precision]
    _, gradients = saved_activations.measure(saved_activations.model(dtype, layers=layers), dtype)
    return {name: gradient.float() for name, gradient in gradients.items()}


def sharded(device_mesh: Any) -> dict[str, Any]:
    result: dict[str, Any] = {}
    by_one = [name for name in WAYS if name != "every-2"]
    for precision, sizes, names in (
        ("fp32", (2, 4), ["none", "every-2"]),
        ("fp32", (1, 2), by_one),
        ("bf16", (1, 2), IN_BF16),
    ):
        plain = alone(precision, sizes[1])
        for name in names:
            kept, gradients = block_bytes(device_mesh, settings(precision, **WAYS[name]), sizes)
            if name == "none":
                reference = gradients
            result[f"{precision} {name}"] = {
                "kept": kept,
                "distance": tiny_run.distance(gradients, plain),
                "from none": tiny_run.distance(gradients, reference),
            }
    return result


def cut(device_mesh: Any) -> dict[str, Any]:
    """The same where every process has a slice of each matrix."""
    result: dict[str, Any] = {}
    plain = alone("fp32", 2)
    for name in ("none", "selective", "int8", "full, int8"):
        train = settings("fp32", **WAYS[name], parallel={"dp_shard": 1, "tp_size": 2})
        kept, gradients = block_bytes(laid_out(train)[1], train)
        result[name] = {"kept": kept, "distance": tiny_run.distance(gradients, plain)}
    return result


def parameters_left_alone(device_mesh: Any) -> dict[str, Any]:
    """What would be kept if the gathered parameters were not recognised."""
    result = {}
    for sabotaged in (False, True):
        blind = mock.patch.object(saved_tensors, "module_storages", return_value=set()) if sabotaged else nullcontext()
        with blind:
            kept, _ = block_bytes(device_mesh, settings("fp32", **WAYS["int8"]))
        result["blind" if sabotaged else "as it is"] = kept
    block = saved_activations.model(torch.float32).blocks[0]
    result["parameters"] = sum(p.numel() for p in block.parameters()) * 4 / 1e6
    return result


def count_gradients(parameters: list[Any], alive: list[int]) -> None:
    """Note how many gradients there are whenever one is complete."""
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(p.grad is not None for p in parameters))
        )


def updates(device_mesh: Any) -> dict[str, Any]:
    """Losses, norms and weights of five steps with the optimizer after and within the backward pass."""
    result: dict[str, Any] = {}
    weights: dict[str, dict[str, Tensor]] = {}
    plain = {"clip": None, "lr": 3e-4}
    variants: dict[str, dict[str, Any]] = {
        "after": {},
        "within": {"optim": {"in_backward": True}},
        "on the host": {"parallel": {"offload": "all"}},
        "within, on the host": {"optim": {"in_backward": True}, "parallel": {"offload": "all"}},
        "copies, within": {"optim": {"in_backward": True}, "parallel": {"dp_replicate": 2, "dp_shard": 1}},
        "cut, within": {"optim": {"in_backward": True}, "parallel": {"dp_shard": 1, "tp_size": 2}},
        "came after": {"optim": {"name": "came", "betas": None, "eps": None}},
        "came within": {"optim": {"name": "came", "betas": None, "eps": None, "in_backward": True}},
        "stages, on the host": {
            "parallel": {"dp_shard": 1, "pp_size": 2, "offload": "all"},
            "activation_checkpointing": "selective",
        },
    }
    for name, way in variants.items():
        train = settings("fp32", **{**way, "optim": {**plain, **way.get("optim", {})}})
        layout, here = laid_out(train)
        parallel = parallelize(tiny_run.model(tiny_run.config()), here, train)
        optimizer = optimizers.build(parallel.module, train.optim, CPU)
        alive: list[int] = []
        if train.optim.in_backward:
            in_backward.fuse(optimizer, parallel)
        parameters = list(parallel.module.parameters())
        count_gradients(parameters, alive)
        step = tiny_run.train_step(parallel, train, optimizer)
        size = 4 if layout.pp > 1 else 8
        part = layout.data_rank(dist.get_rank()), layout.data_world
        batches = (tiny_run.microbatches(tiny_run.global_batch(n), size, *part) for n in range(5))
        outcomes = [step(pieces, n) for n, pieces in enumerate(batches, start=1)]
        weights[name] = {n: whole(p.detach()) for n, p in parallel.module.named_parameters()}
        reference = weights["came after" if "came" in name else "after"]
        result[name] = {
            "losses": [float(o.loss) for o in outcomes],
            "norms": [float(o.grad_norm) for o in outcomes],
            "gradients at once": max(alive),
            "distance": tiny_run.distance(weights[name], {n: reference[n] for n in weights[name]}),
            "devices": sorted({saved_tensors.local(p).device.type for p in parameters}),
            "offloaded": sum(
                group.offload_policy.__class__.__name__ == "CPUOffloadPolicy"
                for module in parallel.module.modules()
                if isinstance(module, FSDPModule) and (group := module._get_fsdp_state()._fsdp_param_group) is not None
            ),
            "wrapped": sum(isinstance(module, FSDPModule) for module in parallel.module.modules()),
        }
    return result


def main() -> None:
    folder, launch = Path(sys.argv[1]), detect()
    assert isinstance(launch, Launch)
    with mesh.open_mesh(launch, tiny_run.config().train.parallel, CPU) as device_mesh:
        result = {check.__name__: check(device_mesh) for check in (sharded, cut, parameters_left_alone, updates)}
        if launch.is_main:
            (folder / "found.json").write_text(json.dumps(result))


if __name__ == "__main__":
    run_and_exit(main)
