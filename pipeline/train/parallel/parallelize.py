"""Parallelize a model over the processes of a run, so that the training step has no branch for any strategy.

The order is fixed here. Tensor parallelism comes first, because it replaces parameters. Activation checkpointing
follows, because it replaces the blocks' classes and counts blocks through the whole model; compilation comes after it,
so that the checkpointed forward pass is compiled. Then the model is cut into pipeline stages, and FSDP2 shards each
stage as if it were a whole model.
Price: the norm takes one reduction for each mesh dimension that parameters are sharded over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from sana_pipe.base.layer_classes import without_adapter
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.kernels.sample_dropout import give_rows
from sana_pipe.train.parallel import data_parallel, pipeline_parallel, tensor_parallel
from sana_pipe.train.parallel.activation_checkpoint import apply_activation_checkpointing
from sana_pipe.train.parallel.compile import compile_blocks, compile_conditions
from sana_pipe.train.parallel.mesh import PP, SHARD, TP
from sana_pipe.train.parallel.microbatch import REFERENCE, Loss, Microbatch, Outputs
from sana_pipe.train.parallel.shards import local, sharding_groups

COMPILE_BACKEND = "inductor"
"""torch.compile's backend."""
EXTRA = "objective"
"""Submodule of a model with the modules that what is learned adds to it; used outside of the model's forward pass."""

_ByGroups = dict[tuple[ProcessGroup, ...], list[Tensor]]
"""Local gradients, or their norms, by the process groups over which they are sharded."""


class Model(Protocol):
    """A model as `parallelize` needs it: its blocks in order, the role of each submodule of a block under tensor
    parallelism (`tensor_parallel`), blocks [start, stop) as a separate module (`pipeline_parallel.Stage`)."""

    @property
    def blocks(self) -> list[nn.Module]: ...

    @property
    def tensor_parallel_plan(self) -> Mapping[str, str]: ...

    def stage(self, start: int, stop: int) -> nn.Module: ...


class ParallelModel:
    """A model without pipeline stages: in one process, or under DDP, FSDP2 or tensor parallelism.

    Attributes:
        module: what this process holds, under the whole model's parameter names.
        data_world: number of shares that a global batch is divided into.
        keep_gathered: gathered parameters stay from one microbatch of a step to the next.
        reduce_each: each microbatch of a step reduces its gradient (`data_parallel.prepare_microbatch`).
        reference: a frozen copy of the base, whose predictions a loss compares with (`parallelize_reference`); None:
            the base is the module without its adapter.
    """

    def __init__(
        self,
        module: nn.Module,
        data_world: int = 1,
        keep_gathered: bool = False,
        taps: dict[int, Tensor] | None = None,
        reduce_each: bool = False,
    ):
        self.module, self.data_world, self.keep_gathered = module, data_world, keep_gathered
        self.reduce_each = reduce_each
        self.reference: ParallelModel | None = None
        self._taps = {} if taps is None else taps  # what the last forward pass put there
        self._modules = dict(getattr(module, EXTRA, nn.ModuleDict()).items())
        self._freed_norms: _ByGroups | None = None  # norms of gradients that `update_in_backward` has freed

    def forward_backward(self, microbatches: Iterable[Microbatch], loss: Loss, samples: int) -> list[Tensor]:
        """Accumulate the gradient of the mean loss over this process's samples of the global batch. With the last
        microbatch the gradient is averaged over the data-parallel processes.

        Args:
            microbatches: consumed one by one; of one shape, except that the last may have fewer samples.
            samples: their total number of samples.

        Returns:
            The losses (rows, b) of each microbatch, detached; equal on all processes that read this share of the batch.
        """
        per_microbatch, remaining = [], samples
        for microbatch in microbatches:
            remaining -= microbatch.samples
            data_parallel.prepare_microbatch(self.module, remaining == 0, self.keep_gathered, self.reduce_each)
            losses = self._losses(microbatch, loss)
            (losses[0].sum() / samples).backward()
            per_microbatch.append(losses.detach())
        return per_microbatch

    def losses(self, microbatches: Iterable[Microbatch], loss: Loss) -> list[Tensor]:
        """The losses (rows, b) of each microbatch, equal on all processes that read them; no gradients. Every process
        has equally many microbatches. Call `reshard` before the parameters change."""
        with torch.no_grad():
            return [self._losses(microbatch, loss) for microbatch in microbatches]

    def _losses(self, microbatch: Microbatch, loss: Loss) -> Tensor:
        inputs, targets, reference, rows = microbatch
        if rows is not None:
            give_rows(self.module, rows)
        if reference is not None:
            targets = {**targets, REFERENCE: self._predict_base(reference)}
        prediction = self.module(**inputs)
        taps = dict(self._taps)
        self._taps.clear()
        return loss(Outputs(prediction, taps, self._modules), targets)

    def _predict_base(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The base's output (b, ...), without gradients."""
        if self.reference is None:
            with without_adapter(self.module):
                return self.predict(**inputs)
        prediction = self.reference.predict(**inputs)
        self.reference.reshard()
        return prediction

    @torch.no_grad()
    def copy_to_reference(self) -> None:
        """Give the reference the weights that the model has now, rounded to the reference's dtype."""
        assert self.reference is not None
        weights = dict(self.module.named_parameters())
        for name, value in self.reference.module.named_parameters():
            local(value).copy_(local(weights[name]))

    def predict(self, **inputs: Tensor) -> Tensor:
        """The model's output (b, ...) for the inputs of a microbatch, equal on all processes that have them; no
        gradients. Every process calls it equally often. Call `reshard` before the parameters change."""
        with torch.no_grad():
            prediction = self.module(**inputs)
            self._taps.clear()
            return prediction

    def reshard(self) -> None:
        """Free gathered parameters that forward passes without a backward pass have left."""
        data_parallel.reshard(self.module)

    def update_in_backward(self, update: Callable[[nn.Parameter], None]) -> None:
        """Call `update` from now on for each parameter within the backward pass, as soon as its gradient is complete,
        and free the gradient afterwards. Requires one microbatch per step."""
        self._freed_norms = {}

        def complete(parameter: nn.Parameter) -> None:
            gradient = parameter.grad
            assert gradient is not None and self._freed_norms is not None
            if torch.cuda.is_initialized() and local(gradient).device.type == "cpu":
                torch.cuda.current_stream().synchronize()  # torch before 2.13 may still be copying it to the host
            norm = torch.linalg.vector_norm(local(gradient), dtype=torch.float32)
            self._freed_norms.setdefault(sharding_groups(gradient), []).append(norm)
            update(parameter)
            parameter.grad = None

        for parameter in self.module.parameters():
            if parameter.requires_grad:
                # FSDP2 calls the hooks of sharded parameters after it has reduced their gradients
                parameter.register_post_accumulate_grad_hook(complete)

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]

    def gradient_norm(self) -> Tensor:
        """L2 norm of the whole model's gradient, fp32 scalar, equal on every process. Call it once per step."""
        by_groups: _ByGroups = {}
        if self._freed_norms is not None:
            by_groups, self._freed_norms = self._freed_norms, {}
        for gradient in self.gradients():
            by_groups.setdefault(sharding_groups(gradient), []).append(local(gradient))
        squares = torch.stack([_sum_of_squares(tensors, groups) for groups, tensors in by_groups.items()]).sum()
        return self._sum_over_stages(squares).sqrt()

    def _sum_over_stages(self, squares: Tensor) -> Tensor:
        return squares

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply an fp32 gradient by an fp32 scalar; one pass."""
        gradients = [local(gradient) for gradient in self.gradients()]
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))


class PipelineParallelModel(ParallelModel):
    """Every process has some of the model's layers, under the names that they have in the whole model."""

    def __init__(self, pipeline: pipeline_parallel.Pipeline, data_world: int):
        super().__init__(pipeline.stage, data_world)
        self.pipeline = pipeline

    def forward_backward(self, microbatches: Iterable[Microbatch], loss: Loss, samples: int) -> list[Tensor]:
        """Compute `ParallelModel.forward_backward` for microbatches of one shape, all of them on the device at once."""
        return self.pipeline.forward_backward(microbatches, loss, samples)

    def losses(self, microbatches: Iterable[Microbatch], loss: Loss) -> list[Tensor]:
        with torch.no_grad():
            return self.pipeline.losses(microbatches, loss)

    def predict(self, **inputs: Tensor) -> Tensor:
        with torch.no_grad():
            return self.pipeline.predict(inputs)

    def _sum_over_stages(self, squares: Tensor) -> Tensor:
        dist.all_reduce(squares, group=self.pipeline.group)
        return squares


def parallelize(model: nn.Module, mesh: DeviceMesh, train: TrainConfig, taps: Iterable[int] = ()) -> ParallelModel:
    """Parallelize a model in place over a run's mesh.

    Args:
        model: a `Model` with fp32 parameters (cast here to `data_parallel.stored_dtype`): on the meta device
            (`load_sharded` then gives them their values), or with the same values on every process.
        mesh: with the dimensions of `parallel.mesh`.
        taps: numbers of the blocks whose outputs a loss is given; not in a pipeline.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(data_parallel.stored_dtype(parameter, train.precision))
    blocks = blocks_of(model)
    tensor_parallel.apply(blocks, model.tensor_parallel_plan, mesh[TP])  # type: ignore[arg-type]
    apply_activation_checkpointing(blocks, train)
    if train.compile == "block":
        compile_blocks(blocks, COMPILE_BACKEND)
    tapped: dict[int, Tensor] = {}
    for number in taps:
        blocks[number].register_forward_hook(partial(_tap, tapped, number))
    stage = pipeline_parallel.build_stage(model, len(blocks), mesh[PP])
    if train.compile == "block":
        compile_conditions(stage, COMPILE_BACKEND)
    units = blocks if stage is model else blocks_of(stage)
    data_parallel.apply_fsdp(stage, [*units, *getattr(stage, EXTRA, nn.ModuleDict()).values()], mesh, train)
    data_world = data_parallel.data_mesh(mesh).size()
    if mesh[PP].size() > 1:
        return PipelineParallelModel(pipeline_parallel.Pipeline(stage, mesh[PP]), data_world)
    keep_gathered = not train.parallel.reshards(mesh[SHARD].size())
    return ParallelModel(model, data_world, keep_gathered, tapped, bool(train.parallel.reduce_each_microbatch))


def parallelize_reference(reference: nn.Module, mesh: DeviceMesh, train: TrainConfig) -> ParallelModel:
    """Parallelize a frozen copy of a model in place, for predictions alone. It is sharded as the model is and has the
    dtype of the computation, to which FSDP2 rounds parameters before use: its first predictions are the model's. It
    frees what it has gathered after each block. No pipeline, no tensor parallelism."""
    parallel = train.parallel.model_copy(update={"reshard_after_forward": True})
    saving = {"activation_checkpointing": "none", "activation_compression": "none"}
    model = parallelize(reference, mesh, train.model_copy(update={"parallel": parallel, **saving}))
    model.module.eval()
    return model


def _tap(into: dict[int, Tensor], number: int, block: nn.Module, inputs: Any, output: Tensor) -> None:
    into[number] = output


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The layers that strategies wrap one by one, in order."""
    return model.blocks  # type: ignore[return-value]


def _sum_of_squares(tensors: list[Tensor], groups: tuple[ProcessGroup, ...]) -> Tensor:
    """Sum of squares of some local tensors (or norms) and of those of the other processes of `groups`."""
    if tensors[0].device.type == "cuda":
        runs, single = adjoining(tensors)
        norms = [torch.linalg.vector_norm(run, dtype=torch.float32) for run in runs]
        norms += torch._foreach_norm(single, dtype=torch.float32) if single else []  # of bf16 gradients, too
    else:
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in tensors]
    total = torch.linalg.vector_norm(torch.stack(norms)).square()
    for group in groups:
        dist.all_reduce(total, group=group)
    return total


def adjoining(tensors: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors as runs of memory: FSDP2 reduces the gradients of a block into one buffer. The order does not depend on
    addresses, so that equal runs give equal bits. Returns the runs of two tensors or more, each as one flat view, and
    the tensors that adjoin no other."""
    by_memory: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        by_memory.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    runs: list[list[Tensor]] = []
    for sharing in by_memory.values():
        end = -1
        for tensor in sorted(sharing, key=lambda x: x.storage_offset()):
            if tensor.storage_offset() == end and tensor.is_contiguous() and tensor.dtype == runs[-1][0].dtype:
                runs[-1].append(tensor)
            else:
                runs.append([tensor])
            end = int(tensor.storage_offset()) + tensor.numel() if tensor.is_contiguous() else -1
    joined = [(run[0], sum(part.numel() for part in run)) for run in runs if len(run) > 1]
    flat = [first.as_strided((count,), (1,), first.storage_offset()) for first, count in joined]
    return flat, [run[0] for run in runs if len(run) == 1]
