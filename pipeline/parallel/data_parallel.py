"""Data parallelism: FSDP2 on each block and then the rest, over any number of copies.

What: `shard` calls `fully_shard` on the given blocks and on the model, with fp32 parameters, bf16 or fp16 compute where
the configuration says so, and the reduction dtype it says; for `bf16_pure` the parameters are bf16 themselves. A mesh
of one dimension is FSDP2; of two, (copies, shards), HSDP; with one shard per copy it keeps whole parameters on every
process and averages gradients, as DDP does.
Why the same call for DDP: mixed precision, checkpoints and clipping are then one thing in every strategy, and torch's
`DistributedDataParallel` would have to run under autocast, of which the next paragraph tells.
Why per block: one block's parameters are gathered at a time. Why also for one process in bf16: the fp32 master
parameters are cast block by block, where autocast would keep bf16 copies of all of them (about 3 GiB for Sana 1.6B)
and would run the linear attention's fp32 products in bf16.
No module casts its inputs. FSDP2's default would cast every floating tensor given to `forward`, also the timestep, and
bf16 has 8 bits for a number up to 1000: 873 becomes 872 before the sinusoid, which made the gradient error 9 times that
of the bf16 model itself; and the fp32 tokens that run through the blocks under `train.residual: fp32`. So the caller
casts what is to be cast and keeps the timestep in fp32.
The policy has no dtype for buffers: Sana's model registers none, so there is none to cast.
Price: with microbatches whose gradients are not reduced each time, every process holds one full fp32 gradient. In DDP's
place FSDP2 copies a block's parameters before use even when there is nothing to gather.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from pipeline.config import TrainConfig
from pipeline.parallel.mesh import REPLICATE, SHARD

COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "bf16_pure": torch.bfloat16}
STORED = {"bf16_pure": torch.bfloat16}
"""What parameters are kept in, where it is not fp32."""


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The part of a run's mesh over which parameters are sharded and gradients averaged."""
    return mesh[REPLICATE, SHARD] if mesh[REPLICATE].size() > 1 else mesh[SHARD]


def shard(model: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh, train: TrainConfig) -> nn.Module:
    """Make `model` sharded in place, on the mesh's device, and return it.

    In fp32 with one process there is nothing to shard or to cast: the model is only moved to the device. With
    `train.parallel.offload: all` parameters stay in host memory (pinned where there is a GPU), gradients come there,
    and so do the optimizer's states, which it makes beside its parameters.

    Args:
        model: fp32 parameters (bf16 ones for `bf16_pure`), on the meta device (then they are undefined afterwards: see
            `filling`) or the same values on every process (each keeps its own slice of its own copy).
        blocks: the modules whose parameters are gathered together; all of them inside `model`.
        mesh: of the run, with the dimensions of `pipeline.parallel.mesh`.
    """
    stored = STORED.get(train.precision, torch.float32)
    if any(parameter.dtype != stored for parameter in model.parameters()):
        raise ValueError(f"parameters must be {stored} for {train.precision}")
    over = data_mesh(mesh)
    offload = train.parallel.offload == "all"
    if train.precision == "fp32" and over.size() == 1 and not offload:
        return _here(model, mesh.device_type)
    where = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
    compute, reduce = COMPUTE[train.precision], COMPUTE[train.parallel.reduce_dtype]
    reshard = train.parallel.reshards
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)
    for module in (*blocks, model):
        fully_shard(module, mesh=over, reshard_after_forward=reshard, mp_policy=policy, offload_policy=where)
    missing = [type(block).__name__ for block in (*blocks, model) if not isinstance(block, FSDPModule)]
    if missing:
        raise RuntimeError(f"fully_shard did not take hold of {missing}")
    if train.parallel.prefetch_blocks is not None:
        _prefetch([block for block in blocks if isinstance(block, FSDPModule)], train.parallel.prefetch_blocks)
    return _here(model, "cpu" if offload else mesh.device_type)


def _here(model: nn.Module, device: str) -> nn.Module:
    """On the device; a model on the meta device gets memory for the parts that are its own, with undefined values."""
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    return model.to_empty(device=device) if on_meta else model.to(device)


def _prefetch(blocks: list[FSDPModule], ahead: int) -> None:
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + ahead])
        block.set_modules_to_backward_prefetch(blocks[max(0, i - ahead) : i][::-1])


def sync_gradients(model: nn.Module, wanted: bool) -> None:
    """Whether the next backward pass reduces the gradients over the processes (only the last microbatch needs to)."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(wanted)
