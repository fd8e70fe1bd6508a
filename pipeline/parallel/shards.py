"""This process's shard of a tensor."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """The shard of a DTensor, sharing its memory, through autograd; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
