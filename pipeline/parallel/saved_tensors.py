"""Offload or quantise the tensors that autograd saves for the backward pass.

What: `Offloader.hooks` is a context for a module's forward pass. In it every tensor that autograd saves is replaced by
a `_StoredTensor` (in host memory, in 8 bits, or both) and rebuilt when the backward pass asks for it.
Left as they are: the module's parameters and buffers and every view of them (recognised by their storage while the
forward pass runs: under FSDP2 they are then gathered, and a copy would keep the whole model alive), tensors of fewer
than 1,024 values, and for compression everything that is not floating point.
Equal tensors are stored once (queries, keys and values share their input, all blocks share the captions). A tensor
comes back with its size, strides and dtype: torch's own `save_on_cpu` rebuilds it contiguous, after which a recomputed
block saves other tensors than before and the backward pass fails.
Price: a copy to the host and back per tensor over PCIe (pinned memory, on the computing stream), or the two passes of
`compression`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pipeline.parallel.compression import Format, quantise, restore

SMALLEST = 1024
"""Tensors of fewer values stay as they are: norm statistics, tables, masks."""


def local(tensor: Tensor) -> Tensor:
    """This process's part of a DTensor; any other tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def storage_of(tensor: Tensor) -> int:
    """A number that tensors share if and only if they share memory (while one of them lives)."""
    return local(tensor).untyped_storage()._cdata


class _StoredTensor:
    """One saved tensor in its stored form. `parts`: its values in memory order, or codes and scales."""

    __slots__ = (
        "__weakref__",
        "alive",
        "copied",
        "count",
        "device",
        "dtype",
        "format",
        "parts",
        "shards",
        "size",
        "stride",
    )

    def __init__(self, tensor: Tensor, compress: Format | None, offload: bool):
        plain = local(tensor)
        self.alive = StorageWeakRef(plain.untyped_storage())  # while it exists, its address is not reused
        self.shards: tuple[Any, ...] | None = None
        if isinstance(tensor, DTensor):
            self.shards = tensor.device_mesh, tensor.placements, tensor.size(), tensor.stride()
        self.size, self.stride, self.dtype, self.device = plain.size(), plain.stride(), plain.dtype, plain.device
        flat = _unexpanded(plain).permute(_order(plain)).reshape(-1)
        self.count, self.format = flat.numel(), compress
        self.parts: tuple[Tensor, ...] = quantise(flat, compress) if compress else (flat,)
        self.copied: torch.Event | None = None
        if offload:
            pinned = self.device.type != "cpu"
            self.parts = tuple(_to_host(part, pinned) for part in self.parts)
            if pinned:
                self.copied = torch.Event(self.device)
                self.copied.record(torch.accelerator.current_stream(self.device))

    def tensor(self) -> Tensor:
        if self.copied is not None:
            torch.accelerator.current_stream(self.device).wait_event(self.copied)
        parts = [part.to(self.device, non_blocking=True) for part in self.parts]
        flat = restore(parts[0], parts[1], self.count, self.dtype) if self.format else parts[0]
        plain = self._shaped(flat)
        if self.shards is None:
            return plain
        mesh, placements, size, stride = self.shards
        return DTensor.from_local(plain, mesh, placements, run_check=False, shape=size, stride=stride)

    def _shaped(self, flat: Tensor) -> Tensor:
        expanded = [n > 1 and s == 0 for n, s in zip(self.size, self.stride, strict=True)]
        size = [1 if wide else n for n, wide in zip(self.size, expanded, strict=True)]
        extent = 1 + sum((n - 1) * s for n, s in zip(size, self.stride, strict=True))
        if extent == self.count:  # no gaps: the values in memory order are the memory
            return flat.as_strided(self.size, self.stride)
        memory = torch.empty(extent, dtype=self.dtype, device=self.device)
        order = sorted(range(len(size)), key=lambda d: -self.stride[d])
        target = memory.as_strided(size, self.stride).permute(order)
        target.copy_(flat.view(target.shape))
        return memory.as_strided(self.size, self.stride)


class Offloader:
    """Stores one model's saved tensors in another form.

    Args:
        compress: 8-bit format, or None for exact values.
        offload: store them in host memory.

    Attributes:
        stored: number of tensors stored so far, shared ones counted once.
    """

    def __init__(self, compress: Format | None = None, offload: bool = False):
        self.compress, self.offload, self.stored = compress, offload, 0
        self._live: WeakValueDictionary[tuple[Any, ...], _StoredTensor] = WeakValueDictionary()

    def host_bytes(self) -> int:
        """Bytes that saved tensors occupy in host memory now."""
        return sum(part.nbytes for stored in self._live.values() for part in stored.parts) if self.offload else 0

    @contextlib.contextmanager
    def hooks(self, module: nn.Module, only: Tensor | None = None, compress: bool = True) -> Iterator[None]:
        """Inside, this object stores what autograd saves.

        Args:
            module: runs its forward pass inside; its parameters and buffers are left as they are.
            only: compress this tensor and its views alone.
            compress: False offloads without compression.
        """
        excluded = module_storages(module)
        chosen = None if only is None else storage_of(only)

        def pack(tensor: Tensor) -> Tensor | _StoredTensor:
            if not _storable(tensor) or (storage := storage_of(tensor)) in excluded:
                return tensor
            squeeze = compress and tensor.is_floating_point() and tensor.itemsize > 1 and chosen in (None, storage)
            return self._store(tensor, self.compress if squeeze else None)

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            yield

    def _store(self, tensor: Tensor, compress: Format | None) -> Tensor | _StoredTensor:
        if compress is None and not self.offload:
            return tensor
        plain = local(tensor)
        key = (
            storage_of(tensor),
            plain.storage_offset(),
            plain.size(),
            plain.stride(),
            plain.dtype,
            plain._version,
            compress,
            isinstance(tensor, DTensor),
        )
        stored = self._live.get(key)
        if stored is None:
            with torch.no_grad():
                stored = self._live[key] = _StoredTensor(tensor, compress, self.offload)
            self.stored += 1
        return stored


def module_storages(module: nn.Module) -> set[int]:
    """Storages of a module's parameters and buffers as they are now; under FSDP2 the gathered ones."""
    return {storage_of(tensor) for tensor in (*module.parameters(), *module.buffers())}


def _unpack(saved: Tensor | _StoredTensor) -> Tensor:
    if isinstance(saved, _StoredTensor):
        with torch.no_grad():
            return saved.tensor()
    return saved


def _storable(tensor: Tensor) -> bool:
    """Whether the tensor is large enough and can be rebuilt exactly: no overlapping values, no unknown subclass."""
    if not isinstance(tensor, DTensor) and is_traceable_wrapper_subclass(tensor):
        return False
    plain = local(tensor)
    if plain.layout != torch.strided:
        return False
    unexpanded = _unexpanded(plain)
    extent = 1
    for dim in reversed(_order(unexpanded)):
        if unexpanded.shape[dim] > 1:
            if unexpanded.stride(dim) < extent:
                return False
            extent += (unexpanded.shape[dim] - 1) * unexpanded.stride(dim)
    return unexpanded.numel() >= SMALLEST


def _unexpanded(tensor: Tensor) -> Tensor:
    """The tensor with expanded dimensions reduced to length 1."""
    for dim in range(tensor.ndim):
        if tensor.shape[dim] > 1 and tensor.stride(dim) == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _order(tensor: Tensor) -> list[int]:
    """Dimensions from the widest stride to the closest."""
    return sorted(range(tensor.ndim), key=lambda dim: -tensor.stride()[dim])


def _to_host(tensor: Tensor, pinned: bool) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
    return host.copy_(tensor, non_blocking=pinned)
