"""Offload or quantise the tensors that autograd saves for the backward pass.

What: `Offloader.hooks` is a context for a module's forward pass. In it every tensor that autograd saves is replaced by
a `_StoredTensor` (in host memory, in 8 bits, or both) and rebuilt when the backward pass asks for it.
Left as they are: the module's parameters and buffers with all their views, tensors of fewer than 1,024 values, and for
compression everything that is not floating point. Parameters are recognised by their storage during the forward pass.
FSDP2 has gathered them then, so a copy of each would keep the whole model in memory.
Equal tensors are stored once (queries, keys and values share their input, all blocks share the captions). A tensor
comes back with its size, strides and dtype: torch's own `save_on_cpu` rebuilds it contiguous, after which a recomputed
block saves other tensors than before and the backward pass fails.
On a GPU the copies run beside the computation: on a separate stream, to pinned memory, and back before the backward
pass asks for them (`OnDevice`). Why not torchtune's `OffloadActivations`: it changes DTensors and strided
tensors, and stores equal tensors several times.
Price: a copy to the host and back per tensor over PCIe, and up to `AHEAD` tensors that stay on the device meanwhile; or
the two passes of `compression`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pipeline.parallel.compression import Format, quantise, restore

SMALLEST = 1024
"""Tensors of fewer values stay as they are: norm statistics, tables, masks."""
PIECE = 4 << 20
"""Bytes of a block of pinned memory that holds part of a larger tensor; a power of two."""
AHEAD = 4
"""Tensors whose copies to or from the host may be under way: those of one recomputed block."""


def local(tensor: Tensor) -> Tensor:
    """This process's part of a DTensor; any other tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def storage_of(tensor: Tensor) -> int:
    """A number that tensors share if and only if they share memory (while one of them lives)."""
    return local(tensor).untyped_storage()._cdata


class _StoredTensor:
    """One saved tensor in its stored form. `parts`: its values in memory order, or codes and scales; tensors on the
    device until they are offloaded, then what `Transfers.to_host` gave."""

    __slots__ = (
        "__weakref__",
        "alive",
        "count",
        "device",
        "dtype",
        "format",
        "parts",
        "shards",
        "size",
        "stride",
    )

    def __init__(self, tensor: Tensor, compress: Format | None):
        plain = local(tensor)
        self.alive = StorageWeakRef(plain.untyped_storage())  # while it exists, its address is not reused
        self.shards: tuple[Any, ...] | None = None
        if isinstance(tensor, DTensor):
            self.shards = tensor.device_mesh, tensor.placements, tensor.size(), tensor.stride()
        self.size, self.stride, self.dtype, self.device = plain.size(), plain.stride(), plain.dtype, plain.device
        flat = _unexpanded(plain).permute(_order(plain)).reshape(-1)
        self.count, self.format = flat.numel(), compress
        self.parts: tuple[Any, ...] = quantise(flat, compress) if compress else (flat,)

    def tensor(self, parts: Sequence[Tensor]) -> Tensor:
        """The saved tensor. parts: `parts` on the device."""
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


def piece_sizes(count: int, itemsize: int) -> list[int]:
    """Values of the blocks of pinned memory for a tensor of `count` values.

    torch's allocator of pinned memory rounds each block up to a power of two bytes and never returns it. Whole blocks
    of `PIECE` bytes lose nothing, and tensors of every size use them in turn; what the last blocks lose is at most an
    eighth of the tensor, or 512 bytes.
    """
    whole, rest = divmod(count, PIECE // itemsize)
    sizes = [PIECE // itemsize] * whole
    while rest:
        rounded = 1 << (rest - 1).bit_length()
        part = rest if (rounded - rest) * itemsize <= max(512, count * itemsize // 8) else rounded // 2
        sizes.append(part)
        rest -= part
    return sizes


class HostPieces:
    """Pinned memory for a tensor, in blocks. shape, dtype: the tensor's. pieces: flat parts of it, in order."""

    def __init__(self, like: Tensor):
        self.shape, self.dtype = like.shape, like.dtype
        self.pieces = [pinned_block(size, like.dtype) for size in piece_sizes(like.numel(), like.itemsize)]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def parts_of(self, tensor: Tensor) -> Sequence[Tensor]:
        """Views of the contiguous tensor, one for each piece."""
        return tensor.view(-1).split([piece.numel() for piece in self.pieces])


def pinned_block(count: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(count, dtype=dtype, pin_memory=True)


def _pairs(source: Any, target: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Sources and targets of the copies between a tensor and its pieces, or between two tensors."""
    if isinstance(target, HostPieces):
        yield from zip(target.parts_of(source), target.pieces, strict=True)
    elif isinstance(source, HostPieces):
        yield from zip(source.pieces, source.parts_of(target), strict=True)
    else:
        yield source, target


class Transfers:
    """Copies between a device and pinned host memory, on a separate stream.

    A copy begins when the work given to the computing stream so far is done. Before the caller uses the result of a
    copy, or frees one of its tensors, it makes the computing stream wait for the copy's event; so that stream reuses
    memory only after the copy. (Host memory needs no care: torch's allocator knows the copies of pinned memory.)
    """

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.Stream(device)

    def to_host(self, parts: Sequence[Tensor]) -> tuple[tuple[Any, ...], Any]:
        """The parts in host memory, and the event after which they are valid."""
        host = tuple(self.empty(part, None) for part in parts)
        return host, self._copy(parts, host)

    def to_device(self, parts: Sequence[Any]) -> tuple[tuple[Tensor, ...], Any]:
        """The parts, from `to_host`, on the device, and the event after which they are valid."""
        there = tuple(self.empty(part, self.device) for part in parts)
        return there, self._copy(parts, there)

    def wait(self, event: Any) -> None:
        """Let the computing stream wait for a copy."""
        torch.accelerator.current_stream(self.device).wait_event(event)

    def empty(self, like: Any, device: torch.device | None) -> Any:
        """device: None for pinned host memory, in pieces."""
        return HostPieces(like) if device is None else torch.empty(like.shape, dtype=like.dtype, device=device)

    def _copy(self, sources: Sequence[Any], targets: Sequence[Any]) -> Any:
        self.stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self.stream:
            for whole in zip(sources, targets, strict=True):
                for source, target in _pairs(*whole):
                    target.copy_(source, non_blocking=True)
        return self.stream.record_event()


def transfers(device: torch.device) -> Transfers | None:
    """None where host and device are one memory."""
    return None if device.type == "cpu" else Transfers(device)


class _Saved:
    """Autograd's handle of a saved tensor. position: in the order of saving. taken: the backward pass has used it."""

    __slots__ = ("__weakref__", "position", "stored", "taken")

    def __init__(self, stored: _StoredTensor, position: int = 0):
        self.stored, self.position, self.taken = stored, position, False


class OnDevice:
    """Saved tensors now on the device: the last `AHEAD` saved, then the next `AHEAD` needed.

    The backward pass uses them in the opposite order of saving; a recomputed block uses its inputs in their order. Each
    access prefetches the `AHEAD` earlier tensors; later ones stay until used.
    """

    def __init__(self, through: Transfers):
        self.through = through
        self._order: list[ref[_Saved]] = []
        self.pending_copies: dict[_StoredTensor, tuple[tuple[Tensor, ...], Any]] = {}

    def saved(self, stored: _StoredTensor) -> _Saved:
        """Enter a tensor into the order of saving."""
        while self._order and self._order[-1]() is None:
            self._order.pop()
        handle = _Saved(stored, len(self._order))
        self._order.append(ref(handle))
        return handle

    def send_to_host(self, stored: _StoredTensor) -> None:
        """Begin to copy a new tensor to the host."""
        here = stored.parts
        stored.parts, event = self.through.to_host(here)
        self.pending_copies[stored] = here, event
        self._keep(list(self.pending_copies)[-AHEAD:])

    def take(self, saved: _Saved) -> Tensor:
        """The tensor, for work that the computing stream gets from now on."""
        saved.taken = True
        self._fetch(saved.stored)
        parts, event = self.pending_copies[saved.stored]
        self.through.wait(event)
        before = self._waiting(range(saved.position - 1, -1, -1))
        after = self._waiting(range(saved.position + 1, min(len(self._order), saved.position + 1 + AHEAD)))
        for stored in before:
            self._fetch(stored)
        self._keep([*before, *after])
        return saved.stored.tensor(parts)

    def bytes(self) -> int:
        return sum(part.nbytes for parts, _ in self.pending_copies.values() for part in parts)

    def _fetch(self, stored: _StoredTensor) -> None:
        if stored not in self.pending_copies:
            self.pending_copies[stored] = self.through.to_device(stored.parts)

    def _waiting(self, positions: range) -> list[_StoredTensor]:
        """The first `AHEAD` different tensors at these positions that are still to be used."""
        waiting: dict[_StoredTensor, None] = {}
        for handle in (self._order[position]() for position in positions):
            if handle is not None and not handle.taken:
                waiting[handle.stored] = None
            if len(waiting) == AHEAD:
                break
        return list(waiting)

    def _keep(self, wanted: Sequence[_StoredTensor]) -> None:
        for stored in self.pending_copies.keys() - set(wanted):
            self.through.wait(self.pending_copies[stored][1])
            del self.pending_copies[stored]


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
        self.by_device: dict[torch.device, OnDevice | None] = {}

    def __deepcopy__(self, memo: Any) -> Offloader:
        return Offloader(self.compress, self.offload)  # streams and copies stay with this object

    def host_bytes(self) -> int:
        """Bytes that saved tensors occupy in host memory now."""
        return sum(part.nbytes for stored in self._live.values() for part in stored.parts) if self.offload else 0

    def device_bytes(self) -> int:
        """Bytes of offloaded tensors that are on a device now, because their copies may be under way."""
        return sum(each.bytes() for each in self.by_device.values() if each is not None)

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

        def pack(tensor: Tensor) -> Tensor | _Saved:
            if not _storable(tensor) or (storage := storage_of(tensor)) in excluded:
                return tensor
            squeeze = compress and tensor.is_floating_point() and tensor.itemsize > 1 and chosen in (None, storage)
            return self._store(tensor, self.compress if squeeze else None)

        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            yield

    def _store(self, tensor: Tensor, compress: Format | None) -> Tensor | _Saved:
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
        stored, on_device = self._live.get(key), self._on_device_of(plain.device)
        if stored is None:
            with torch.no_grad():
                stored = self._live[key] = _StoredTensor(tensor, compress)
                if on_device is not None:
                    on_device.send_to_host(stored)
                elif self.offload:
                    stored.parts = tuple(part.clone() for part in stored.parts)
            self.stored += 1
        return _Saved(stored) if on_device is None else on_device.saved(stored)

    def _unpack(self, saved: Tensor | _Saved) -> Tensor:
        if not isinstance(saved, _Saved):
            return saved
        with torch.no_grad():
            on_device = self._on_device_of(saved.stored.device)
            return saved.stored.tensor(saved.stored.parts) if on_device is None else on_device.take(saved)

    def _on_device_of(self, device: torch.device) -> OnDevice | None:
        if self.offload and device not in self.by_device:
            through = transfers(device)
            self.by_device[device] = None if through is None else OnDevice(through)
        return self.by_device.get(device)


def module_storages(module: nn.Module) -> set[int]:
    """Storages of a module's parameters and buffers as they are now; under FSDP2 the gathered ones."""
    return {storage_of(tensor) for tensor in (*module.parameters(), *module.buffers())}


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
