"""Compress the tensors that autograd saves for the backward pass.

In `Compressor.hooks` every tensor that autograd saves is replaced by 8-bit codes and a scale for each 128 values: with
one for a whole tensor its largest value would decide the error of all others. Left as they are: parameters and buffers
with their views (FSDP2 has gathered them: codes would keep the whole model), tensors of fewer than 1,024 values or with
gaps, and what is not floating point. Equal tensors are stored once.
Price: an error of at most 1/254 of a block's largest value, 1.03 bytes per value, two passes over the tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from sana_pipe.train.parallel.shards import local

BLOCK = 128
SMALLEST = 1024
"""Tensors of fewer values stay as they are: norm statistics, tables, masks."""


def quantise(flat: Tensor) -> tuple[Tensor, Tensor]:
    """A one-dimensional floating tensor in 8 bits. A block with an infinite value or a NaN comes back as NaN.

    Returns:
        codes (ceil(n / 128) * 128,) int8; scales (ceil(n / 128),) float32: value = code * scale.
    """
    padding = -flat.numel() % BLOCK
    blocks = (torch.nn.functional.pad(flat, (0, padding)) if padding else flat).view(-1, BLOCK)  # a pad by 0 copies
    low, high = torch.aminmax(blocks, dim=1)
    scales = torch.maximum(high, -low).float().div_(127)
    scaled = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]  # fp32; zeros stay zeros
    return scaled.round_().to(torch.int8).view(-1), scales


def restore(codes: Tensor, scales: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """(count,) in `dtype`: the tensor that `quantise` was given, up to its rounding."""
    values = codes.view(-1, BLOCK).float().mul_(scales[:, None])
    return values.view(-1)[:count].to(dtype)


def storage_of(tensor: Tensor) -> int:
    """A number that tensors share if and only if they share memory (while one of them lives)."""
    return tensor.untyped_storage()._cdata


class _Compressed:
    """One saved tensor in 8 bits."""

    __slots__ = ("__weakref__", "alive", "codes", "dtype", "scales", "size", "stride")

    def __init__(self, tensor: Tensor):
        self.alive = StorageWeakRef(tensor.untyped_storage())  # while it exists, its address is not reused
        self.size, self.stride, self.dtype = tensor.size(), tensor.stride(), tensor.dtype
        self.codes, self.scales = quantise(_in_memory_order(tensor).reshape(-1))

    def tensor(self) -> Tensor:
        flat = restore(self.codes, self.scales, self.size.numel(), self.dtype)
        return flat.as_strided(self.size, self.stride)


class Compressor:
    """Stores one model's saved tensors in 8 bits. stored: their number so far, shared ones counted once."""

    def __init__(self) -> None:
        self.stored = 0
        self._live: WeakValueDictionary[tuple[Any, ...], _Compressed] = WeakValueDictionary()

    def __deepcopy__(self, memo: Any) -> Compressor:
        return Compressor()

    @contextlib.contextmanager
    def hooks(self, module: nn.Module, only: Tensor | None = None) -> Iterator[None]:
        """Inside, this object stores what autograd saves of the module's forward pass. only: this tensor and its views
        alone."""
        excluded = module_storages(module)
        chosen = None if only is None else storage_of(only)

        # Autograd calls `pack` for what an operation saves and `_unpack` when the backward pass wants it. Of
        # y = (x @ w).relu(), z = y @ v it saves x, w, y, y again, v. w and v are parameters and stay. y is saved twice:
        # storage, offset, shape, strides, dtype and version are equal, so both get the same codes. After an operation
        # in place the version differs: other codes. 130 values 2.54, -1, 0, ..., 127 are two blocks, of 128 and of 2
        # and padding; their scales are 2.54 / 127 = 0.02 and 127 / 127 = 1, the first codes 127, -50, 0. One scale for
        # all would be 1, and 2.54 would come back as 3.
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
                stored = self._live[key] = _Compressed(tensor)
            self.stored += 1
        return stored

    def _unpack(self, saved: Tensor | _Compressed) -> Tensor:
        with torch.no_grad():
            return saved.tensor() if isinstance(saved, _Compressed) else saved


def module_storages(module: nn.Module) -> set[int]:
    """Storages of a module's parameters and buffers as they are now; under FSDP2 the gathered ones."""
    return {storage_of(local(tensor)) for tensor in (*module.parameters(), *module.buffers())}


def _compressible(tensor: Tensor) -> bool:
    """Return whether the tensor is worth it and is rebuilt exactly: its values fill its memory."""
    large = tensor.is_floating_point() and tensor.numel() >= SMALLEST
    return large and _in_memory_order(tensor).is_contiguous()


def _in_memory_order(tensor: Tensor) -> Tensor:
    """The tensor with its widest stride first."""
    return tensor.permute(sorted(range(tensor.ndim), key=lambda dim: -tensor.stride()[dim]))
