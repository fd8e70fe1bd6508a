"""Shard a model over processes: FSDP2, each block and then the rest.

What: `shard` calls `fully_shard` on the given blocks and on the model, with fp32 parameters, bf16 compute where the
configuration says bf16, and fp32 gradient reduction.
Why per block: one block's parameters are gathered at a time. Why also for one process in bf16: the fp32 master
parameters are cast block by block, where autocast would keep bf16 copies of all of them (about 3 GiB for Sana 1.6B)
and would run the linear attention's fp32 products in bf16.
The root is told not to cast its inputs. FSDP2's default would cast every floating tensor given to `forward`, also the
timestep, and bf16 has 8 bits for a number up to 1000: 873 becomes 872 before the sinusoid, which made the gradient
error 9 times that of the bf16 model itself. So the caller casts what is to be cast and keeps the timestep in fp32.
Price: with microbatches whose gradients are not reduced each time, every process holds one full fp32 gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from pipeline.config import TrainConfig

COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16}


def shard(model: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh, train: TrainConfig) -> nn.Module:
    """Make `model` sharded in place, on the mesh's device, and return it.

    In fp32 with one process there is nothing to shard or to cast: the model is only moved to the device.

    Args:
        model: fp32 parameters, the same values on every process (each keeps its own slice of its own copy).
        blocks: the modules whose parameters are gathered together; all of them inside `model`.
        mesh: one dimension, the sharding one.
    """
    if any(parameter.dtype != torch.float32 for parameter in model.parameters()):
        raise ValueError("master parameters must be float32")
    if train.precision == "fp32" and mesh.size() == 1:
        return model.to(mesh.device_type)
    compute = COMPUTE[train.precision]
    reshard = train.parallel.reshard_after_forward
    inner = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    outer = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=inner)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=outer)
    missing = [type(block).__name__ for block in (*blocks, model) if not isinstance(block, FSDPModule)]
    if missing:
        raise RuntimeError(f"fully_shard did not take hold of {missing}")
    return model


def sync_gradients(model: nn.Module, wanted: bool) -> None:
    """Whether the next backward pass reduces the gradients over the processes (only the last microbatch needs to)."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(wanted)
