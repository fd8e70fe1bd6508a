"""A process's shard of a tensor, and sums over the shards that gradients pass through."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """The shard of a DTensor, sharing its memory, through autograd; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharding_groups(tensor: Tensor, dimension: int | None = None) -> tuple[ProcessGroup, ...]:
    """The groups whose processes hold different parts of a tensor, or of one of its dimensions. A placement may be
    strided (FSDP2 over tensor parallelism)."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh, placements = tensor.device_mesh, tensor.placements
    sharded = (i for i, kind in enumerate(placements) if not kind.is_replicate() and mesh.size(i) > 1)
    return tuple(mesh.get_group(i) for i in sharded if dimension in (None, getattr(placements[i], "dim", None)))


def sum_over_shards(x: Tensor, mesh: DeviceMesh, *, forward: bool = False, backward: bool = False) -> Tensor:
    """The sum of `x`, of its gradient, or of both over the processes that have the shards; what is not summed passes
    unchanged. Both: for a sum that each process uses in its part of the computation. mesh: one dimension."""
    return _Sum.apply(x, mesh, forward, backward)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, forward: bool, backward: bool) -> Tensor:
        ctx.mesh = mesh if backward else None
        return _summed(x, mesh) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient if ctx.mesh is None else _summed(gradient, ctx.mesh), None, None, None


def _summed(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "sum", (mesh, 0)))
