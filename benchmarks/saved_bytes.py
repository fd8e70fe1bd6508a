"""How many bytes a forward pass leaves behind for the backward pass.

What: `kept_bytes` runs a function and counts the memory that was made inside it and is still alive afterwards, each
storage once. That is whatever a technique holds on to, by any way: saved tensors, codes and scales, outputs that
selective checkpointing stores, random states. Parameters, inputs and the result itself are not counted.
Why not count the calls of a saved-tensor hook: hooks see only what is saved outside all inner hooks.
Price: every operation passes through Python once more. On fake tensors nothing is computed, so full-size models count
in seconds.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Births(TorchDispatchMode):
    """Notes every storage that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen.update(map(StorageWeakRef, _storages(tree_leaves(result))))
        return result


def _storages(leaves: Iterable[Any]) -> list[torch.UntypedStorage]:
    plain = [t._local_tensor if isinstance(t, DTensor) else t for t in leaves if isinstance(t, Tensor)]
    return [tensor.untyped_storage() for tensor in plain]


def saved_bytes(forward: Callable[[], Tensor], known: Iterable[Tensor] = ()) -> tuple[int, Tensor]:
    """Bytes made by `forward()` that outlive it, and its result.

    Args:
        forward: returns a tensor with its graph.
        known: parameters and inputs; memory that they share is not counted.
    """
    own = set(map(StorageWeakRef, _storages(known)))
    with _Births() as births:
        result = forward()
    gc.collect()
    own |= set(map(StorageWeakRef, _storages([result])))
    left = (torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in births.seen - own if not ref.expired())
    return sum(storage.nbytes() for storage in left if storage is not None), result
