"""Every allocation and operation of a training step on fake tensors.

`Recorder` logs each storage's birth, growth and death, and the operations between them; `peak` replays the log: what a
storage is for shows later (a tensor that the optimizer makes in the first step is its state in every later step), so
one traced step gives the peak of all later ones. torch's `MemTracker`, which works alike, attributes memory to modules
and refuses several microbatches.
Price: a step passes through Python twice, about 0.3 ms an operation.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from sana_pipe.train.training.optimizer_records import OPTIMIZERS

PARAMETERS, GRADIENTS, OPTIMIZER, EMA = "parameters", "gradients", "optimizer", "ema"
INPUTS, ACTIVATIONS, TEMPORARIES, BUFFERS = "inputs", "activations", "temporaries", "buffers"
HOST = "host"
KINDS = (PARAMETERS, GRADIENTS, OPTIMIZER, EMA, ACTIVATIONS, TEMPORARIES, BUFFERS, INPUTS)
"""The use of a device's memory. activations: made in the forward pass. temporaries: made in the backward pass or by
the optimizer. buffers: gathered parameters and what is sent. inputs: text, latents and noise."""
LASTING = (PARAMETERS, OPTIMIZER, EMA)
MATMUL, DEPTHWISE, ATTENTION, ELEMENTWISE, CASTS = "matmul", "depthwise", "attention", "elementwise", "casts"
UPDATE, COPIES, KERNELS = "optimizer", "copies", "kernels"

_aten = torch.ops.aten
_IN_PLACE = {name for record in OPTIMIZERS.values() for name in record.kernels}
_PRODUCTS = (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm)


@dataclass
class _Storage:
    """kind: None while it is unknown. made: the phase of its birth."""

    made: str
    size: int
    kind: str | None = None


@dataclass
class Work:
    """flops, bytes and number of operations of a class of kernels."""

    flops: int = 0
    bytes: int = 0
    calls: int = 0


@dataclass
class Peak:
    """Bytes on the device at the moment of the step that has the most, by kind; and that moment's phase.

    apart: bytes that an allocator with a pool for each stream has beyond this moment: pools reach their largest sizes
    at other moments and lend each other nothing.
    """

    kinds: dict[str, int]
    phase: str
    apart: int = 0

    @property
    def total(self) -> int:
        return sum(self.kinds.values())


@dataclass(eq=False)
class Recorder(TorchDispatchMode):
    """Enter it inside a FakeTensorMode.

    Args:
        inside: name spaces of custom operations whose Python code is traced, instead of being one operation.
        scratch: by the name of a custom operation, makes what it allocates in addition to its results.
        gloo: gathers and scatters copy the larger side, as gloo does.

    Attributes:
        phase: of what follows: build, forward, backward or optimizer.
        work: by class of kernels.
        sent: bytes that this process contributes and number of calls, by (collective, size of its group).
    """

    inside: tuple[str, ...] = ()
    scratch: Mapping[str, Callable[..., tuple[Tensor, ...]]] = field(default_factory=dict)
    gloo: bool = False
    phase: str = "build"
    work: dict[str, Work] = field(default_factory=lambda: defaultdict(Work))
    sent: dict[tuple[str, int], list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))

    def __post_init__(self) -> None:
        super().__init__()
        self._storages: list[_Storage] = []
        self._live: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._events: list[tuple[int, int, str, int]] = []
        self._streams: dict[int, tuple[int, Any]] = {}
        self._resize = torch.UntypedStorage.resize_

    # ---------------------------------------------------------------- kinds

    def mark(self, kind: str, tensors: Iterable[Any], only_new: bool = False) -> None:
        """Set what these tensors are for. only_new: skip tensors that already have a kind."""
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                continue
            for storage in _storages(tensor):
                known = self._storages[self._note(storage)]
                if not (only_new and known.kind):
                    known.kind = kind

    def peak(self, host: Iterable[str] = (), host_phases: Iterable[str] = ()) -> tuple[Peak, int]:
        """Peak device memory of a later step, and peak host memory in bytes.

        Args:
            host: kinds that are in host memory.
            host_phases: phases whose temporaries are in host memory.
        """
        away, away_phases = {HOST, *host}, set(host_phases)
        lasting, current = dict.fromkeys(LASTING, 0), dict.fromkeys(KINDS, 0)
        sizes: dict[int, int] = defaultdict(int)
        best, total, on_host, most_on_host = Peak(dict(current), "build"), 0, 0, 0
        pools, most_of_pools = dict[int, int](), dict[int, int]()
        of_pool: dict[int, int] = {}
        for number, size, phase, stream in self._events:
            storage = self._storages[number]
            kind = storage.kind or (ACTIVATIONS if storage.made == "forward" else TEMPORARIES)
            change, sizes[number] = size - sizes[number], size
            if kind in away or (kind == TEMPORARIES and storage.made in away_phases):
                on_host += change
                most_on_host = max(most_on_host, on_host)
            elif kind in LASTING:
                lasting[kind] += change
            elif storage.made != "build":
                current[kind] += change
                total += change
                pool = of_pool.setdefault(number, stream) if change < 0 else stream
                of_pool[number] = pool
                pools[pool] = pools.get(pool, 0) + change
                most_of_pools[pool] = max(most_of_pools.get(pool, 0), pools[pool])
                if change > 0 and total >= best.total:
                    best = Peak(dict(current), phase)
        best.apart = sum(most_of_pools.values()) - best.total
        best.kinds |= lasting
        return best, most_on_host

    # ---------------------------------------------------------------- the mode

    def __enter__(self) -> Recorder:
        if not self._entered:
            self._fake, resize, note = active_fake_mode(), self._resize, self._note

            def resized(storage: torch.UntypedStorage, size: int) -> Any:
                result = resize(storage, size)
                known = self._storages[note(storage)]
                known.kind = known.kind or BUFFERS
                return result

            torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign,assignment]
        self._entered += 1
        super().__enter__()
        return self

    _entered = 0

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._entered -= 1
        if not self._entered:
            torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # DTensors and 8-bit states run their own operations first
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # half of all operations
        if func.namespace == "prim" or active_fake_mode() is not self._fake:
            return func(*args, **kwargs)  # a question about a tensor; DTensor's sharding propagation
        if func._opname in _IN_PLACE:
            self._count(func, args, kwargs, [])
            return None  # in place; its form for fake tensors makes copies
        if func is _aten._local_scalar_dense.default:
            return _scalar(args[0].dtype)
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]
        if func.namespace in self.inside:
            with self:
                return _python_code(func)(*args, **kwargs)
        result = func(*args, **kwargs)
        outputs = _tensors(result)
        workspace = self.scratch[func._opname](*args, **kwargs) if func._opname in self.scratch else ()
        for tensor in (*outputs, *workspace):
            for storage in _storages(tensor):
                self._note(storage)
        del workspace
        if self.gloo and func.namespace == "c10d" and ("gather" in func._opname or "scatter" in func._opname):
            sent = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            self.mark(BUFFERS, [torch.empty_like(max(sent, key=Tensor.numel))])
        if func.namespace in ("fsdp", "c10d"):
            self.mark(BUFFERS, (leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)), True)
        if self.phase != "build":
            self._count(func, args, kwargs, outputs)
        return result

    # ---------------------------------------------------------------- storages

    def _now(self) -> str:
        in_graph = torch._C._current_graph_task_id() != -1
        return "backward" if in_graph and self.phase == "forward" else self.phase

    def _stream(self) -> int:
        """The number of the stream in which FSDP2 is computing; 0 for the step's."""
        stream = torch.cpu.current_stream()
        return self._streams.setdefault(id(stream), (len(self._streams), stream))[0]

    def _note(self, storage: torch.UntypedStorage) -> int:
        """The number of a storage, after logging its birth or a change of its size."""
        known, size = self._live.get(storage._cdata), storage.nbytes()
        if known is None or known[1]() is not storage:
            number = len(self._storages)
            self._storages.append(_Storage(self._now(), size))
            self._live[storage._cdata] = number, weakref.ref(storage, partial(self._died, storage._cdata, number))
            self._events.append((number, size, self._now(), self._stream()))
            return number
        number = known[0]
        if self._storages[number].size != size:
            self._storages[number].size = size
            self._events.append((number, size, self._now(), self._stream()))
        return number

    def _died(self, address: int, number: int, _: Any) -> None:
        self._events.append((number, 0, self._now(), 0))
        if self._live.get(address, (None,))[0] == number:
            del self._live[address]

    # ---------------------------------------------------------------- operations

    def _count(self, func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> str | None:
        """Add an operation to its class. Returns the class; None: it is none of the device's kernels."""
        name = func._opname
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count_sent(name, args)
            return None
        if func.is_view or name in ("detach", "empty", "empty_like", "empty_strided", "new_empty", "set_"):
            return None
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name == "_to_copy" and not any(t.dtype != inputs[0].dtype for t in outputs):
            kind = COPIES
        else:
            kind = UPDATE if self.phase == "optimizer" else _class_of(func, name, args)
        work = self.work[kind]
        work.flops += _flops(func, args, kwargs, outputs)
        work.bytes += sum(t.numel() * t.itemsize for t in (*inputs, *outputs))
        work.calls += 1
        return kind

    def _count_sent(self, name: str, args: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        size = 0
        for leaf in tree_leaves(args):
            with suppress(RuntimeError):  # no group, but the operation of a reduction
                if isinstance(leaf, torch.ScriptObject):
                    size = max(size, torch.distributed.ProcessGroup.unbox(leaf).size())
                elif isinstance(leaf, str):
                    size = max(size, _resolve_process_group(leaf).size())  # type: ignore[arg-type]
        largest = max((t.numel() * t.itemsize for t in tensors), default=0)
        if largest:
            entry = self.sent[name.strip("_"), size]
            entry[0] += largest
            entry[1] += 1


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def _class_of(func: Any, name: str, args: Any) -> str:
    packet = func.overloadpacket
    if packet in _PRODUCTS or name.startswith("joined_linear"):
        return MATMUL
    if name == "convolution":
        return MATMUL if args[8] == 1 else DEPTHWISE
    if name == "convolution_backward":
        return MATMUL if args[9] == 1 else DEPTHWISE
    if "scaled_dot_product" in name or "flash_attention" in name:
        return ATTENTION
    if name in ("_to_copy", "copy_"):
        return CASTS
    if func.namespace == "fsdp" or name in ("clone", "cat", "split_with_sizes_copy"):
        return COPIES
    return ELEMENTWISE if func.namespace in ("aten", "prims") else KERNELS


def _flops(func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> int:
    """Multiplications and additions of matrix products and convolutions, as torch's flop counter counts them."""
    name = func._opname
    if name == "convolution_backward":  # torch's formula does not know groups
        gradient, weight, mask = args[0], args[2], args[10]
        once = 2 * gradient.numel() * weight[0].numel()
        return once * (bool(mask[0]) + bool(mask[1]))
    if name == "convolution":
        return 2 * outputs[0].numel() * args[1][0].numel()
    if "scaled_dot_product" in name or "flash_attention" in name:
        backward = "backward" in name
        query, key = (args[1], args[2]) if backward else (args[0], args[1])
        return 2 * query.numel() * key.shape[-2] * (5 if backward else 2)
    formula: Callable[..., int] | None = flop_registry.get(func.overloadpacket)
    if formula is None:
        return 0
    return int(formula(*args, **kwargs, out_val=outputs[0] if len(outputs) == 1 else tuple(outputs)))


def _scalar(dtype: torch.dtype) -> Any:
    """A value that a step may read of a fake tensor: true, finite, one."""
    return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1


def _python_code(func: Any) -> Callable[..., Any]:
    definition = torch._library.custom_ops.OPDEFS[f"{func.namespace}::{func._opname}"]
    return definition._backend_fns.get("cpu") or definition._init_fn


def _storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor.untyped_storage()] if tensor.layout == torch.strided else []
    parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return [storage for part in parts if isinstance(part, Tensor) for storage in _storages(part)]
