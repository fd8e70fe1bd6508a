"""Load parameter values into a parallel model, each process its own shards.

Why through DCP's load planner: it knows which box of a tensor a process holds for every sharding (also FSDP2 over
tensor parallelism, where a shard is a slice of a slice), and checkpoints are read with it.
Price: one box at a time is in host memory next to the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)


class WeightSource(Protocol):
    """Values by name and box."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor: ...


@torch.no_grad()
def load_sharded(module: nn.Module, source: WeightSource) -> None:
    """Overwrite every parameter of `module` with the source's values, cast to its dtype. No process waits for another.
    The module has memory, and may hold a part of the source's names."""
    parameters = dict(module.named_parameters())
    described = {name: _metadata(source.shapes[name], parameter.dtype) for name, parameter in parameters.items()}
    planner = DefaultLoadPlanner()
    planner.set_up_planner(dict(parameters), Metadata(state_dict_metadata=dict(described)), is_coordinator=False)
    for item in planner.create_local_plan().items:
        value = source.read(item.dest_index.fqn, item.storage_offsets, item.lengths)
        planner.resolve_tensor(item).copy_(value)


def _metadata(shape: tuple[int, ...], dtype: torch.dtype) -> TensorStorageMetadata:
    size = torch.Size(shape)
    whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(shape)), sizes=size)
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, [whole])
