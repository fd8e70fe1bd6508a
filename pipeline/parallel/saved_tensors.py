"""Compress the tensors that autograd saves for the backward pass.

What: `Compressor.hooks` is a context for a module's forward pass. In it every tensor that autograd saves is replaced by
its codes and scales (`compression`) and rebuilt, with its size, strides and dtype, when the backward pass asks for it.
Left as they are: parameters and buffers with all their views, tensors of fewer than 1,024 values or with gaps, and what
is not floating point. Parameters are recognised by their storage during the forward pass: FSDP2 has gathered them then,
so codes of each would keep the whole model in memory.
Equal tensors are stored once: queries, keys and values share their input, all blocks share the captions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from pipeline.parallel.compression import Format, quantise, restore
from pipeline.parallel.shards import local

SMALLEST = 1024
"""Tensors of fewer values stay as they are: norm statistics, tables, masks."""


def storage_of(tensor: Tensor) -> int:
    """A number that tensors share if and only if they share memory (while one of them lives)."""
    return tensor.untyped_storage()._cdata


class _Compressed:
    """One saved tensor in 8 bits."""

    __slots__ = ("__weakref__", "alive", "codes", "dtype", "scales", "size", "stride")

    def __init__(self, tensor: Tensor, kind: Format):
        self.alive = StorageWeakRef(tensor.untyped_storage())  # while it exists, its address is not reused
        self.size, self.stride, self.dtype = tensor.size(), tensor.stride(), tensor.dtype
        self.codes, self.scales = quantise(_in_memory_order(tensor).reshape(-1), kind)

    def tensor(self) -> Tensor:
        flat = restore(self.codes, self.scales, self.size.numel(), self.dtype)
        return flat.as_strided(self.size, self.stride)


class Compressor:
    """Stores one model's saved tensors in 8 bits.

    Attributes:
        stored: number of tensors stored so far, shared ones counted once.
    """

    def __init__(self, kind: Format):
        self.kind, self.stored = kind, 0
        self._live: WeakValueDictionary[tuple[Any, ...], _Compressed] = WeakValueDictionary()

    def __deepcopy__(self, memo: Any) -> Compressor:
        return Compressor(self.kind)

    @contextlib.contextmanager
    def hooks(self, module: nn.Module, only: Tensor | None = None) -> Iterator[None]:
        """Inside, this object stores what autograd saves.

        Args:
            module: runs its forward pass inside; its parameters and buffers are left as they are.
            only: compress this tensor and its views alone.
        """
        excluded = module_storages(module)
        chosen = None if only is None else storage_of(only)

        def pack(tensor: Tensor) -> Tensor | _Compressed:
            if not _compressible(tensor) or (storage := storage_of(tensor)) in excluded:
                return tensor
            return self._store(tensor) if chosen in (None, storage) else tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            yield

    def _store(self, tensor: Tensor) -> _Compressed:
        place = storage_of(tensor), tensor.storage_offset(), tensor.size(), tensor.stride()
        key = *place, tensor.dtype, tensor._version
        stored = self._live.get(key)
        if stored is None:
            with torch.no_grad():
                stored = self._live[key] = _Compressed(tensor, self.kind)
            self.stored += 1
        return stored

    def _unpack(self, saved: Tensor | _Compressed) -> Tensor:
        with torch.no_grad():
            return saved.tensor() if isinstance(saved, _Compressed) else saved


def module_storages(module: nn.Module) -> set[int]:
    """Storages of a module's parameters and buffers as they are now; under FSDP2 the gathered ones."""
    return {storage_of(local(tensor)) for tensor in (*module.parameters(), *module.buffers())}


def _compressible(tensor: Tensor) -> bool:
    """Whether the tensor is worth it and is rebuilt exactly: its values fill its memory."""
    large = tensor.is_floating_point() and tensor.itemsize > 1 and tensor.numel() >= SMALLEST
    return large and _in_memory_order(tensor).is_contiguous()


def _in_memory_order(tensor: Tensor) -> Tensor:
    """The tensor with its widest stride first."""
    return tensor.permute(sorted(range(tensor.ndim), key=lambda dim: -tensor.stride()[dim]))
