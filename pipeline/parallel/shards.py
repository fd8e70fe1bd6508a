"""This process's shard of a tensor, and sums over the shards that gradients pass through."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate


def local(tensor: Tensor) -> Tensor:
    """The shard of a DTensor, sharing its memory, through autograd; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def reduce_backward(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Identity; the gradient is summed over the shards.

    Args:
        mesh: one dimension, the processes that have the shards.
    """
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def reduce_forward(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of `x` over the shards; the gradient passes unchanged."""
    return DTensor.from_local(x, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()]).to_local()


def all_reduce(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """All-reduce in forward and in backward, for a sum that each process uses in its part of the computation."""
    return reduce_backward(reduce_forward(x, mesh), mesh)
