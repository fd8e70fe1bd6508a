"""Copies of a process's tensors in host memory, for checkpoints that are written while training goes on.

What: `HostCopy.of` copies a tree of tensors into one buffer, which the next call reuses; page-locked where a tensor
comes from a GPU.
Why one buffer: torch's allocator of pinned memory rounds every block up to a power of two and never returns it. Shards
of 19 GB in separate blocks would occupy 25 to 30 GB from the first save on.
Price: the buffer occupies host memory from the first save to the end of the run.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only

_ALIGN = 64
"""Each tensor begins at a multiple of this many bytes."""


class HostCopy:
    """Copies tensors to host memory.

    Args:
        log: prints one line if memory cannot be page-locked; copies are then slower.
    """

    def __init__(self, log: Callable[[str], None] = lambda line: None):
        self._log = log
        self._memory: mmap.mmap | None = None
        self._release: Callable[[], object] | None = None  # undoes the page-locking

    @property
    def nbytes(self) -> int:
        """Size of the buffer."""
        return len(self._memory) if self._memory is not None else 0

    def of(self, tree: Any) -> Any:
        """The tree of dictionaries with every tensor copied. The next call overwrites the copies.

        DTensors and other wrapper subclasses keep their class around the copied parts. (DTensor's constructor would
        move a part back to the mesh's device. torch's `DefaultStager` allocates, which the states of 8-bit optimizers
        do not implement.) Every copy has a storage of exactly its size: DCP clones larger storages, and keeps the
        clones until the file is written.
        """
        parts = [part for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) for part in _plain_parts(leaf)]
        on_gpu = any(part.is_cuda for part in parts)
        self._reserve(sum(map(_room, parts)), on_gpu)
        end = 0

        def copy(part: Tensor) -> Tensor:
            nonlocal end
            begin, end = end, end + _room(part)
            if not part.numel():  # `frombuffer` refuses it
                return torch.empty(part.shape, dtype=part.dtype)
            assert self._memory is not None
            flat = torch.frombuffer(self._memory, dtype=part.dtype, count=part.numel(), offset=begin)
            return flat.view(part.shape).copy_(part, non_blocking=True)

        copied = tree_map_only(Tensor, lambda tensor: _rebuilt(tensor, copy), tree)
        if on_gpu:
            torch.cuda.current_stream().synchronize()  # until the copies from the GPU are done
        return copied

    def _reserve(self, size: int, on_gpu: bool) -> None:
        if self.nbytes >= size and (self._release is not None or not on_gpu):
            return
        if self._release is not None:
            self._release()
        self._memory = self._release = None  # before the larger buffer: never both at a time
        self._memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if on_gpu:
            self._release = _page_lock(self, self._memory, self._log)


def _room(part: Tensor) -> int:
    return -(-part.nbytes // _ALIGN) * _ALIGN


def _plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """The ordinary tensors in a tensor, in the order of `_rebuilt`."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor.detach()
        return
    for name in tensor.__tensor_flatten__()[0]:
        if isinstance(part := getattr(tensor, name), Tensor):
            yield from _plain_parts(part)


def _rebuilt(tensor: Tensor, copy: Callable[[Tensor], Tensor]) -> Tensor:
    """The tensor around copies of its ordinary tensors."""
    if not is_traceable_wrapper_subclass(tensor):
        return copy(tensor.detach())
    names, context = tensor.__tensor_flatten__()
    # attributes that are no tensors (a mesh) stay as they are
    parts = {name: tree_map_only(Tensor, lambda part: _rebuilt(part, copy), getattr(tensor, name)) for name in names}
    return type(tensor).__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())


def _page_lock(holder: object, memory: mmap.mmap, log: Callable[[str], None]) -> Callable[[], object]:
    """Register memory with CUDA until the returned function is called or `holder` is gone."""
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    runtime = torch.cuda.cudart()
    error = int(runtime.cudaHostRegister(address, len(memory), 1))  # 1: portable, valid in every context
    if error:
        _forget_error()
        log(f"note: {len(memory) / 2**30:.1f} GiB cannot be page-locked (CUDA error {error}): checkpoints copy slower")
        return lambda: None
    return weakref.finalize(holder, runtime.cudaHostUnregister, address)


def _forget_error() -> None:
    """Clear CUDA's last error, which the check after the next kernel's launch would raise.

    `torch.cuda.cudart` lacks the function, but torch loads the runtime's symbols for the whole process.
    """
    with contextlib.suppress(AttributeError):  # another runtime, such as ROCm's
        ctypes.CDLL(None).cudaGetLastError()
