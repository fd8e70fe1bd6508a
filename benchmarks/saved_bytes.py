"""Bytes that a forward pass saves for the backward pass.

What: `saved_bytes` runs a function and counts the memory that was allocated inside it and is still alive afterwards,
each storage once: saved tensors, codes and scales, outputs that selective checkpointing stores, random states.
Parameters, inputs and the result are not counted.
Why not count the calls of a saved-tensor hook: hooks do not see what inner hooks save.
Price: every operation passes through Python once more. On fake tensors nothing is computed, so full-size models take
seconds.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SETTLE_S = 0.3
"""With other processes the bytes are read until they stay the same for so long."""


class _Allocations(TorchDispatchMode):
    """Records every storage that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.storages.update(map(StorageWeakRef, _storages(tree_leaves(result))))
        return result


def _storages(leaves: Iterable[Any]) -> list[torch.UntypedStorage]:
    plain = [t._local_tensor if isinstance(t, DTensor) else t for t in leaves if isinstance(t, Tensor)]
    return [tensor.untyped_storage() for tensor in plain]


def saved_bytes(forward: Callable[[], Tensor], known: Iterable[Tensor] = ()) -> tuple[int, Tensor]:
    """Bytes allocated by `forward()` that outlive it, and its result.

    Args:
        forward: returns a tensor with its graph.
        known: parameters and inputs; memory that they share is not counted.
    """
    excluded = set(map(StorageWeakRef, _storages(known)))
    with _Allocations() as allocations:
        result = forward()
    gc.collect()
    excluded |= set(map(StorageWeakRef, _storages([result])))
    refs = allocations.storages - excluded
    left, before = _alive(refs), -1
    while left != before and dist.is_initialized() and dist.get_world_size() > 1:
        before = left
        time.sleep(SETTLE_S)  # gloo's threads let go of a collective's tensors a moment after it
        left = _alive(refs)
    return left, result


def _alive(refs: Iterable[StorageWeakRef]) -> int:
    """Bytes of the storages that still exist."""
    there = (torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in refs if not ref.expired())
    return sum(storage.nbytes() for storage in there if storage is not None)
