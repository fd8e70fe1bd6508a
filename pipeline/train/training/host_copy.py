"""Copies of a process's tensors in host memory, for checkpoints and averages that are made while training goes on.

torch's `StateDictStager` copies each storage into one of exactly its size, page-locks it for tensors of a GPU, and
reuses it at the next save. (torch's allocator of pinned memory would round every block up to a power of two.) Wrapper
subclasses are taken apart first: the states of 8-bit optimizers do not implement what the stager asks of them.
Price: the copies occupy host memory from the first save to the end of the run.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only


class HostCopy:
    """Copies tensors to host memory.

    Args:
        log: prints one line if memory cannot be page-locked; copies are then slower.
    """

    def __init__(self, log: Callable[[str], None] = lambda line: None):
        self._log, self._stager = log, StateDictStager()
        self._may_lock = True

    def of(self, tree: Any, *, wait: bool = True) -> Any:
        """The tree of dictionaries with every tensor copied. The next call overwrites the copies.

        Args:
            wait: until the copies from the GPU are done; else they are when the current stream has done them.
        """
        parts = [part for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) for part in plain_parts(leaf)]
        on_gpu = any(part.is_cuda for part in parts)
        self._stager.pin_memory = on_gpu and self._may_lock
        try:
            staged = self._stager.stage(parts, non_blocking=on_gpu)
        except RuntimeError as error:
            if not self._stager.pin_memory:
                raise
            _forget_error()
            self._log(f"note: {error}: memory cannot be page-locked, so checkpoints are copied more slowly")
            self._may_lock = self._stager.pin_memory = False
            staged = self._stager.stage(parts, non_blocking=on_gpu)
        if on_gpu and wait:
            torch.cuda.current_stream().synchronize()
        copies = iter(staged)
        return tree_map_only(Tensor, lambda tensor: _rebuilt(tensor, copies), tree)


def thread_of_this_device(name: str) -> ThreadPoolExecutor:
    """One thread that uses this process's GPU. A new thread's GPU is number 0: each call of CUDA there would open a
    context on the GPU of another process."""
    if not torch.cuda.is_initialized():
        return ThreadPoolExecutor(1, name)
    return ThreadPoolExecutor(1, name, torch.cuda.set_device, (torch.cuda.current_device(),))


def plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """The ordinary tensors in a tensor, in one order."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor.detach()
        return
    for name in tensor.__tensor_flatten__()[0]:
        if isinstance(part := getattr(tensor, name), Tensor):
            yield from plain_parts(part)


def _rebuilt(tensor: Tensor, copies: Iterator[Tensor]) -> Tensor:
    """The tensor around copies of its ordinary tensors."""
    if not is_traceable_wrapper_subclass(tensor):
        return next(copies)
    names, context = tensor.__tensor_flatten__()
    # attributes that are no tensors (a mesh) stay as they are
    parts = {name: tree_map_only(Tensor, lambda part: _rebuilt(part, copies), getattr(tensor, name)) for name in names}
    return type(tensor).__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())


def _forget_error() -> None:
    """Clear CUDA's last error, which the check after the next kernel's launch would raise. `torch.cuda.cudart` lacks
    the function, but torch loads the runtime's symbols for the whole process."""
    with contextlib.suppress(AttributeError):  # another runtime, such as ROCm's
        ctypes.CDLL(None).cudaGetLastError()
