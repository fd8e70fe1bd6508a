"""A model spread over the processes of a run, and the few things that a training step asks of it.

What: `spread` cuts, recomputes and shards a model as the configuration says and returns a `Spread`, which runs the
forward and backward passes of a step's microbatches and knows the norm of its gradients.
Why: the step and the loop then have no branch for any strategy, and a strategy knows no objective and no optimizer.
Order matters and is written once, here: tensor parallelism first (it exchanges parameters), then recomputation (it
exchanges the blocks' classes, counting them through the whole model), then compilation (of what the class then does),
then the stages of a pipeline, each of which is from there on treated like a model, then sharding (it takes hold of what
it finds).
Price: the norm takes one sum over the processes for each dimension of the mesh that parameters are sharded over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from pipeline.config import TrainConfig
from pipeline.parallel import data_parallel, pipeline_parallel, tensor_parallel
from pipeline.parallel.activation_checkpoint import apply_activation_checkpointing
from pipeline.parallel.blocks import find_blocks
from pipeline.parallel.compile import compile_blocks
from pipeline.parallel.mesh import PP, TP

Part = Callable[[], tuple[tuple[Tensor, ...], Tensor]]
"""Makes the model's inputs for one microbatch, and the target that its output is compared with."""

_Kinds = dict[tuple[ProcessGroup, ...], list[Tensor]]
"""Local gradients, or their lengths, by the groups over which they are sharded."""


class Model(Protocol):
    """What a strategy must know of a model beside its blocks, which are found (`pipeline.parallel.blocks`): how one of
    them is cut for tensor parallelism (see `pipeline.parallel.tensor_parallel`), and what blocks [start, stop) are
    alone (see `pipeline_parallel.Stage`)."""

    @property
    def tensor_parallel_plan(self) -> Mapping[str, str]: ...

    def stage(self, start: int, stop: int) -> nn.Module: ...


class Spread:
    """A model of which every process holds all layers, perhaps cut and sharded; also a model alone in one process.

    Attributes:
        module: what this process holds, with the whole model's parameter names.
        data_world: how many parts a global batch has.
    """

    def __init__(self, module: nn.Module, data_world: int = 1):
        self.module, self.data_world = module, data_world
        self._handed: _Kinds | None = None

    def forward_backward(
        self, parts: Sequence[Part], loss: Callable[[Tensor, Tensor], Tensor], share: int
    ) -> list[Tensor]:
        """Accumulate the gradient of the mean loss over this process's `share` samples of the global batch; averaged
        over the parts of the batch as soon as the last microbatch is done.

        Args:
            parts: the microbatches, all of one shape but for the last, which may be smaller.
            loss: (output, target) -> (b,) fp32 losses of the samples.

        Returns:
            The losses of each microbatch, detached; the same on every process that has this part of the batch.
        """
        found = []
        for number, part in enumerate(parts, start=1):
            inputs, target = part()
            data_parallel.sync_gradients(self.module, number == len(parts))
            losses = loss(self.module(*inputs), target)
            (losses.sum() / share).backward()
            found.append(losses.detach())
        return found

    def hand_over(self, update: Callable[[nn.Parameter], None]) -> None:
        """From now on call `update` for each parameter within the backward pass, as soon as its gradient is complete,
        and give the gradient back afterwards. For one microbatch a step."""
        self._handed = {}

        def complete(parameter: nn.Parameter) -> None:
            gradient = parameter.grad
            assert gradient is not None and self._handed is not None
            length = torch.linalg.vector_norm(_local(gradient), dtype=torch.float32)
            self._handed.setdefault(_sharded_over(gradient), []).append(length)
            update(parameter)
            parameter.grad = None

        for parameter in self.module.parameters():
            if parameter.requires_grad:
                # FSDP2 calls the hooks of sharded parameters after it has reduced their gradients
                parameter.register_post_accumulate_grad_hook(complete)

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]

    def norm(self) -> Tensor:
        """L2 norm of the whole model's gradient, fp32 scalar, the same on every process. To be asked once per step."""
        kinds: _Kinds = {}
        if self._handed is not None:
            kinds, self._handed = self._handed, {}
        for gradient in self.gradients():
            kinds.setdefault(_sharded_over(gradient), []).append(_local(gradient))
        squares = torch.stack([_squares(own, groups) for groups, own in kinds.items()]).sum()
        return self.over_stages(squares).sqrt()

    def over_stages(self, squares: Tensor) -> Tensor:
        """The sum over the stages of a pipeline; here all layers are one stage."""
        return squares

    def rescale(self, norm: Tensor, limit: float | None, divisor: float = 1.0) -> None:
        """Divide the gradient by `divisor` and scale it to length `limit` if it is longer, in one pass.

        Args:
            norm: of the divided gradient. The factor is computed on the device.
        """
        if limit is None and divisor == 1:
            return
        factor = torch.full_like(norm, 1.0) if limit is None else (limit / (norm + 1e-6)).clamp(max=1.0)
        factor = factor / divisor
        factors: dict[torch.device, Tensor] = {}
        for gradient in map(_local, self.gradients()):
            gradient.mul_(factors.setdefault(gradient.device, factor.to(gradient.device)))


class Pipelined(Spread):
    """A model of which every process holds some layers, with the names that they have in the whole."""

    def __init__(self, pipeline: pipeline_parallel.Pipeline, data_world: int):
        super().__init__(pipeline_parallel.joined(pipeline.stages), data_world)
        self.pipeline = pipeline

    def forward_backward(
        self, parts: Sequence[Part], loss: Callable[[Tensor, Tensor], Tensor], share: int
    ) -> list[Tensor]:
        """As `Spread.forward_backward`, for microbatches that are all of one shape."""
        return self.pipeline.forward_backward([part() for part in parts], loss, share)

    def over_stages(self, squares: Tensor) -> Tensor:
        dist.all_reduce(squares, group=self.pipeline.group)
        return squares


def spread(model: nn.Module, mesh: DeviceMesh, train: TrainConfig) -> Spread:
    """Spread a model in place over a run's mesh.

    Args:
        model: a `Model` with fp32 parameters, on the meta device (`filling.fill` then gives them their values) or the
            same values on every process; they become bf16 for `bf16_pure`.
        mesh: with the dimensions of `pipeline.parallel.mesh`.
    """
    model.to(data_parallel.STORED.get(train.precision, torch.float32))
    blocks = find_blocks(model)
    tensor_parallel.cut(blocks, model.tensor_parallel_plan, mesh[TP])  # type: ignore[arg-type]
    apply_activation_checkpointing(blocks, train)
    if train.compile == "block":
        compile_blocks(blocks, train.compile_backend, train.compile_max_shapes)
    stages = pipeline_parallel.stages(model, len(blocks), mesh[PP], train.parallel)
    for stage in stages:
        inside = set(stage.modules())
        data_parallel.shard(stage, [block for block in blocks if block in inside], mesh, train)
    data_world = data_parallel.data_mesh(mesh).size()
    if mesh[PP].size() == 1:
        return Spread(model, data_world)
    return Pipelined(pipeline_parallel.Pipeline(stages, mesh[PP], train.parallel), data_world)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sharded_over(tensor: Tensor) -> tuple[ProcessGroup, ...]:
    """The groups whose processes hold different parts of a tensor."""
    if not isinstance(tensor, DTensor):
        return ()
    return tuple(tensor.device_mesh.get_group(i) for i, kind in enumerate(tensor.placements) if not kind.is_replicate())


def _squares(own: list[Tensor], groups: tuple[ProcessGroup, ...]) -> Tensor:
    """Sum of squares over this process's parts of some tensors and those of the groups' other processes."""
    if own[0].device.type == "cuda":
        norms = list(torch._foreach_norm(own, dtype=torch.float32))  # of bf16 gradients, too
    else:
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in own]
    total = torch.linalg.vector_norm(torch.stack(norms)).square()
    for group in groups:
        if group.size() > 1:
            dist.all_reduce(total, group=group)
    return total
