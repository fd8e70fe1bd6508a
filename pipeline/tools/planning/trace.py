"""One training step of a configuration on fake tensors: the real model, strategy, step and optimizer, without memory.

`trace` builds a process of the run on a process group that sends nothing, does one optimizer step, and returns its
memory peak by kind, its operations and its communication. `Traced.of` does so for two small numbers of blocks and
extrapolates, which is exact, since blocks are alike. Tensors are the CPU's: torch without CUDA ends the process when
autograd touches a fake CUDA tensor. Where a GPU behaves differently, the trace does too (`on_gpu`).
Price: about a second for each number of blocks. CUDA's context, workspaces and the allocator's rounding are not in it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import _sharding_prop
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils._python_dispatch import _disable_current_modes

from sana_pipe.base.errors import ConfigError, UserError
from sana_pipe.data.loader.loader import Batch
from sana_pipe.tools.planning import recorder as kinds
from sana_pipe.tools.planning.recorder import Recorder, Work
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.kernels.backend import SCRATCH
from sana_pipe.train.models.adapters import adapter_of
from sana_pipe.train.models.spec import ModelSpec
from sana_pipe.train.parallel import data_parallel
from sana_pipe.train.parallel.mesh import DIMS, Layout
from sana_pipe.train.parallel.parallelize import ParallelModel, blocks_of
from sana_pipe.train.parallel.shards import local
from sana_pipe.train.training import optimizers
from sana_pipe.train.training.assemble import Trainable, assemble, objective_of
from sana_pipe.train.training.optimizer_records import OPTIMIZERS
from sana_pipe.train.training.optimizers import in_backward
from sana_pipe.train.training.step import TrainStep

CPU = torch.device("cpu")
CUSTOM = ("sana_pipe",)
"""Name spaces of this package's custom operations."""
_ONE_GROUP = threading.Lock()


@dataclass(frozen=True)
class Shape:
    """The shapes that a process computes in a step.

    Attributes:
        height, width: of the latents.
        rows: text rows of a sample, padding included.
        microbatch: samples of a forward pass.
        count: microbatches of a step.
    """

    height: int
    width: int
    rows: int
    microbatch: int
    count: int = 1

    def tokens(self, architecture: ModelSpec) -> int:
        """Image tokens of a sample."""
        return self.height * self.width // architecture.patch_size**2


@dataclass(frozen=True)
class Traced:
    """The trace of a step of one process.

    Attributes:
        peak: bytes of the device by kind, at the moment of the step that has the most. host: bytes in host memory.
        phase: of that moment.
        apart: bytes that the allocator's pools of other streams have beyond the peak.
        parameters: of this process's shard.
        work: by class of kernels. sent: bytes and calls by (collective, size of the group).
    """

    peak: dict[str, float]
    phase: str
    host: float
    parameters: float
    work: dict[str, Work]
    sent: dict[tuple[str, int], list[float]]
    apart: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.peak.values())

    @classmethod
    def of(
        cls, architecture: ModelSpec, train: TrainConfig, layout: Layout, shape: Shape, *, rank: int, on_gpu: bool
    ) -> Traced:
        """A step of process `rank`, extrapolated from few blocks, which are not compiled."""
        small, large = block_numbers(architecture.num_layers, train, layout)
        if not _trained_alike(architecture, train):
            small = large = architecture.num_layers
        shapes = [architecture.with_layers(number) for number in (small, large)]
        first = trace(shapes[0], train, layout, shape, rank=rank, on_gpu=on_gpu)
        if small == large:
            return first
        second = trace(shapes[1], train, layout, shape, rank=rank, on_gpu=on_gpu)
        return _extrapolated(first, second, (architecture.num_layers - small) / (large - small))


def _trained_alike(architecture: ModelSpec, train: TrainConfig) -> bool:
    """Return whether the same parameters of every block are trained."""
    adapter = adapter_of(train, architecture, start=False)
    if adapter is None:
        return True
    module = architecture.module()
    adapter.apply(module)
    trained = [[name for name, p in block.named_parameters() if p.requires_grad] for block in blocks_of(module)]
    return all(names == trained[0] for names in trained)


def block_numbers(blocks: int, train: TrainConfig, layout: Layout) -> tuple[int, int]:
    """Two numbers of blocks, from which `blocks` is extrapolated: 3 and 5, or more where blocks take turns; 2 and 3
    where nothing spans blocks (one process, an optimizer that stacks nothing, nothing offloaded)."""
    plain = not OPTIMIZERS[train.optim.name].stacks and not train.optim.in_backward and train.precision != "bf16_pure"
    takes_turns = train.activation_checkpointing.startswith("every-")
    if layout.world == 1 and plain and train.parallel.offload == "none" and not takes_turns:
        return (2, 3) if blocks > 3 else (blocks, blocks)
    period = 1
    if takes_turns:
        period = int(train.activation_checkpointing.removeprefix("every-"))
    if layout.pp > 1:
        period *= layout.pp
    step = period if period > 1 else 2
    small = max(period, 3)
    small += (blocks - small) % step if period > 1 else 0
    return (small, small + step) if small + step < blocks else (blocks, blocks)


def _extrapolated(a: Traced, b: Traced, factor: float) -> Traced:
    def line(x: float, y: float) -> float:
        return x + (y - x) * factor

    work = {
        name: Work(
            *(round(line(getattr(a.work[name], f), getattr(b.work[name], f))) for f in ("flops", "bytes", "calls"))
        )
        for name in b.work
        if name in a.work
    }
    sent = {key: [line(x, y) for x, y in zip(a.sent.get(key, [0, 0]), b.sent[key], strict=True)] for key in b.sent}
    peak = {kind: max(0.0, line(a.peak[kind], b.peak[kind])) for kind in b.peak}
    apart = max(0.0, line(a.apart, b.apart))
    return Traced(peak, b.phase, line(a.host, b.host), line(a.parameters, b.parameters), work, sent, apart)


def trace(
    architecture: ModelSpec, train: TrainConfig, layout: Layout, shape: Shape, *, rank: int = 0, on_gpu: bool = True
) -> Traced:
    """One step of process `rank` of a run, with all of its blocks.

    Args:
        on_gpu: predict a GPU's memory; otherwise that of a run on the CPU, where host and device are one.

    Raises:
        UserError: this process belongs to a process group already; torchao is missing; shapes that depend on data.
    """
    optimizers.check(train.optim)  # imports it: what a module computes there must not be of fake tensors
    # Packed captions have the shapes of padded ones that fill all rows.
    sizes = [shape.microbatch] * shape.count
    parameters: list[nn.Parameter] = []
    with (
        _shapes_only(architecture),
        _process_group(rank, layout) as mesh,
        FakeTensorMode(allow_non_fake_inputs=True),
        _real_meshes(),
    ):
        recorder = Recorder((), SCRATCH) if on_gpu else Recorder(CUSTOM, gloo=True)
        with recorder:
            plain = train.model_copy(update={"preserve": None, "mask": None})  # neither saves a tensor of a block
            trainable = Trainable(architecture, objective_of(plain), adapter_of(train, architecture, start=False))

            def placed(model: ParallelModel) -> None:
                parameters.extend(model.module.parameters())
                recorder.mark(kinds.PARAMETERS, parameters)
                if model.reference is not None:
                    recorder.mark(kinds.PARAMETERS, model.reference.module.parameters())

            module = trainable.module(train)
            reference = trainable.reference(module, train)
            module = _on_fake_tensors(module, train)
            reference = None if reference is None else _on_fake_tensors(reference, train)
            model, optimizer, ema, step = assemble(
                trainable, module, mesh, train, CPU, reference=reference, placed=placed, step=TracedStep
            )
            del module, reference
            if on_gpu and train.parallel.offload == "none" and hasattr(optimizer, "update_one"):
                optimizer.update_one = lambda *args: None  # the compiled update makes no copies
            if ema is not None:
                away = train.ema.device == "cpu" if train.ema is not None else False
                recorder.mark(kinds.HOST if away and on_gpu else kinds.EMA, ema.values.values())
                copies = [torch.empty_like(each) for each in ema.values.values()] if away and on_gpu else []
                recorder.mark(kinds.HOST, copies)  # page-locked, of `HostCopy`
            if train.optim.in_backward:
                in_backward.fuse(optimizer, model)
            recorder.phase = "forward"
            batches = [_batch(architecture, shape, size, trainable.objective.pictures) for size in sizes]
            for batch in batches:
                recorder.mark(kinds.INPUTS, [*vars(batch).values(), *batch.pictures.values()])
            with watch_updates(optimizer, recorder):
                step(batches, 1)
            recorder.phase = "optimizer"
            if ema is not None:
                ema.update(1)
            recorder.mark(kinds.OPTIMIZER, _states(optimizer))
    host, phases = ((), ()) if not on_gpu or train.parallel.offload == "none" else _OFFLOADED
    peak, on_host = recorder.peak(host, phases)
    return Traced(
        {kind: float(size) for kind, size in peak.kinds.items()},
        peak.phase,
        float(on_host),
        float(sum(local(parameter).numel() for parameter in parameters)),
        dict(recorder.work),
        {key: [float(x) for x in value] for key, value in recorder.sent.items()},
        float(peak.apart) if on_gpu else 0.0,
    )


@contextlib.contextmanager
def _shapes_only(architecture: ModelSpec) -> Iterator[None]:
    """Refuse a model whose step cannot be followed by shapes alone."""
    try:
        yield
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise ConfigError(
            f"the shapes of {architecture.class_name} depend on its data, so its memory and time cannot be predicted",
            expected="a forward pass whose shapes follow from those of its inputs",
            found=str(error.func),
            fix="numbers instead of auto, and train without a plan: what a run needs is in its log",
        ) from error


_OFFLOADED = (kinds.PARAMETERS, kinds.GRADIENTS, kinds.OPTIMIZER, kinds.EMA), ("optimizer",)


class TracedStep(TrainStep):
    """A step without a verdict: fake tensors have no values."""

    def await_verdict(self) -> bool:
        self._pending = None
        return False


def _on_fake_tensors(module: nn.Module, train: TrainConfig) -> nn.Module:
    """The module with parameters and buffers that are fake already: `.to` and `.to_empty` have nothing to do (torch
    cannot swap them), nor have those of its stages."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            values = torch.empty(parameter.shape, dtype=data_parallel.stored_dtype(parameter, train.precision))
            part.register_parameter(name, nn.Parameter(values, requires_grad=parameter.requires_grad))
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    whole: Any = _staying(module)
    if (stage := getattr(whole, "stage", None)) is not None:
        whole.stage = lambda start, stop: _staying(stage(start, stop))
    return module


def _staying(module: Any) -> nn.Module:
    module.to = lambda *args, **kwargs: module
    module.to_empty = lambda *args, **kwargs: module
    return module


def _batch(architecture: ModelSpec, shape: Shape, samples: int, pictures: Sequence[str]) -> Batch:
    latent = (samples, architecture.in_channels, shape.height, shape.width)
    return Batch(
        latents=torch.empty(latent, dtype=torch.bfloat16),
        captions=torch.empty(samples, shape.rows, architecture.caption_channels, dtype=torch.bfloat16),
        mask=torch.empty(samples, shape.rows, dtype=torch.bool),
        noise=torch.empty(latent),
        logit=torch.empty(samples),
        sample_ids=tuple(range(samples)),
        bucket=(shape.height, shape.width),
        pictures={kind: torch.empty(latent, dtype=torch.bfloat16) for kind in pictures},
    )


def _states(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for state in optimizer.state.values():
        for value in state.values():
            yield from value if isinstance(value, (list, tuple)) else [value]


@contextlib.contextmanager
def watch_updates(optimizer: torch.optim.Optimizer, recorder: Recorder) -> Iterator[None]:
    """Mark gradients before and states after each update, and name the phase between."""
    before: list[str] = []

    def start(*_: Any) -> None:
        gradients = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        recorder.mark(kinds.GRADIENTS, gradients)
        before.append(recorder.phase)
        recorder.phase = "optimizer"

    def end(*_: Any) -> None:
        recorder.mark(kinds.OPTIMIZER, _states(optimizer))
        recorder.phase = before.pop()

    hooks = optimizer.register_step_pre_hook(start), optimizer.register_step_post_hook(end)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _real_meshes() -> Iterator[None]:
    """Meshes compute with real tensors, and DTensor's sharding propagation in a separate mode: it makes whole tensors
    that are never allocated."""

    def undisturbed(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> DeviceMesh:
            with _disable_current_modes():
                return function(*args, **kwargs)

        return staticmethod(call)

    with (
        mock.patch.object(_sharding_prop, "detect_fake_mode", return_value=None),
        mock.patch.object(DeviceMesh, "_concatenate", undisturbed(DeviceMesh._concatenate)),
        mock.patch.object(DeviceMesh, "from_group", undisturbed(DeviceMesh.from_group)),
    ):
        yield


@contextlib.contextmanager
def _process_group(rank: int, layout: Layout) -> Iterator[Any]:
    """A mesh of the run's sizes on a group whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise UserError("this process already belongs to a process group", fix="run the plan in a separate process")
    with _ONE_GROUP:
        hook = sys.excepthook  # torch puts the rank before every line of a traceback, and leaves it there
        dist.init_process_group("fake", rank=rank, world_size=layout.world, store=FakeStore())
        try:
            yield init_device_mesh("cpu", layout.sizes, mesh_dim_names=DIMS)
        finally:
            dist.destroy_process_group()
            sys.excepthook = hook
            _clear_sharding_prop_cache()  # its entries name groups that are gone
