"""Pipeline parallelism (1F1B): a slice of the blocks on each process, microbatches passed from one to the next.

Why the shapes are declared to torch's schedules: otherwise torch runs every stage once more to infer them, for every
new shape, and drops FSDP2's gradients afterwards. A schedule has buffers for one shape only (another shape ends the
process from within gloo), and buckets change shapes, so the last few shapes have one schedule each.
Price: a process idles for (pp_size - 1) / (microbatches + pp_size - 1) of a step, which has at least
`pp_size` microbatches, all of one size. FSDP2 alone is faster and simpler where a block's model fits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B

from sana_pipe.base.errors import ConfigError
from sana_pipe.train.parallel.microbatch import Loss, Microbatch, Outputs

_CACHED_SHAPES = 4
_SHOWN = 8

Inputs = Mapping[str, Tensor]
"""The inputs of the whole model, by name."""
Hidden = tuple[Tensor, ...]
"""Between two stages."""


class Stage(Protocol):
    """A slice of a model; see `models.sana_stage.SanaStage`."""

    @property
    def blocks(self) -> list[nn.Module]: ...

    def split(self, inputs: Inputs) -> tuple[Hidden, dict[str, Any]]: ...

    def example_hidden(self, inputs: Inputs) -> Hidden: ...

    def example_output(self, inputs: Inputs) -> Tensor: ...


# ---------------------------------------------------------------------------------------------------------- cutting


def stage_ranges(blocks: int, stages: int) -> list[range]:
    """The blocks of each stage, as equal as possible. The last stages get the remainder, because the first ones hold
    the activations of more microbatches."""
    # 20 blocks on 3 processes: the edges are 0, 6, 13 and 20, so the stages have 6, 7 and 7 blocks. With 4 microbatches
    # the processes do forward passes F and backward passes B in this order (1F1B), if both took equally long:
    #   process 0   F0 F1 F2 -- -- B0 F3 B1 -- B2 -- B3    saves at most 3 microbatches at once, of 6 blocks each
    #   process 1   -- F0 F1 -- B0 F2 B1 F3 B2 -- B3 --    2, of 7 blocks
    #   process 2   -- -- F0 B0 F1 B1 F2 B2 F3 B3 -- --    1, of 7 blocks
    # Each process idles in 4 of 12 places: (3 - 1) / (4 + 3 - 1) of the step. A column's F0 sends image tokens,
    # captions, modulation and embedding to the next process, its B0 their gradients back.
    edges = [number * blocks // stages for number in range(stages + 1)]
    return [range(start, stop) for start, stop in pairwise(edges)]


def build_stage(model: nn.Module, blocks: int, mesh: DeviceMesh) -> nn.Module:
    """Build this process's stage of `model`, sharing its parameters; `model` itself if the pipeline has one process."""
    if mesh.size() == 1:
        return model
    mine = stage_ranges(blocks, mesh.size())[mesh.get_local_rank()]
    return model.stage(mine.start, mine.stop)  # type: ignore[operator]


# ---------------------------------------------------------------------------------------------------------- running


def check(blocks: int, shares: Mapping[str, int], microbatch: int, size: int) -> None:
    """Refuse a model or batches that cannot go through a pipeline of `size` processes.

    Args:
        shares: samples of a step for one pipeline (global batch / data-parallel size), by bucket.
    """
    if size == 1:
        return
    if blocks < size:
        raise ConfigError(
            f"a model of {blocks} blocks cannot be cut into {size} stages",
            expected="a block for every stage",
            found=f"train.parallel.pp_size = {size}",
            fix=f"train.parallel.pp_size of at most {blocks}",
        )
    wrong = [name for name, share in shares.items() if not _fits(size, share, microbatch)]
    if not wrong:
        return
    first = shares[wrong[0]]
    sizes = [m for m in range(1, max(shares.values()) + 1) if all(_fits(size, s, m) for s in shares.values())]
    near = sorted(sorted(sizes, key=lambda m: abs(m - microbatch))[:_SHOWN])
    other = f"sana-pipe bucket with bucket.batch_multiple = {size} x the data-parallel processes"
    raise ConfigError(
        f"bucket {wrong[0]}: {first} samples per step and pipeline cannot go through {size} processes"
        + (f" (nor can those of {len(wrong) - 1} other buckets)" if wrong[1:] else ""),
        expected=f"equal microbatches, at least {size} of them",
        found=f"train.microbatch = {microbatch}: {first // microbatch} of this size and {first % microbatch} samples "
        "more",
        fix=f"train.microbatch = {', '.join(map(str, near))}" if near else other,
    )


def _fits(size: int, share: int, microbatch: int) -> bool:
    """Return whether `size` processes take `share` samples in microbatches of this size."""
    count, rest = divmod(share, microbatch)
    return not rest and count >= size


class Pipeline:
    """Runs the microbatches of a step through the stages of a group of processes.

    Args:
        stage: this process's, after `fully_shard`.
        mesh: the processes of this pipeline in the order of their stages.
    """

    def __init__(self, stage: nn.Module, mesh: DeviceMesh):
        self.stage: Any = stage
        self.group, self.rank, self.last = mesh.get_group(), mesh.get_local_rank(), mesh.size() - 1
        self.device = torch.device(mesh.device_type)  # not that of the parameters, which may be in host memory
        if self.device.type != "cpu":
            self.device = torch.device(mesh.device_type, torch.accelerator.current_device_index())
        self.schedules: OrderedDict[Any, Any] = OrderedDict()
        self._loss: Any = None  # of the step at hand, (prediction, target) -> scalar

    def forward_backward(self, microbatches: Iterable[Microbatch], loss: Loss, samples: int) -> list[Tensor]:
        """Accumulate the gradient of sum(losses[0]) / samples over all microbatches in this process's stages.

        Args:
            microbatches, loss: as in `ParallelModel.forward_backward`, of one shape (see `check`); the same on every
                process.

        Returns:
            The losses of each microbatch, detached, on every process.
        """
        given = list(microbatches)
        inputs = [each.inputs for each in given]
        args, kwargs = self.stage.split({key: torch.cat([each[key] for each in inputs]) for key in inputs[0]})
        per_microbatch: list[Tensor] = []

        def scaled_loss(prediction: Tensor, _: Tensor) -> Tensor:  # in the order of the microbatches
            losses = loss(Outputs(prediction, {}, {}), given[len(per_microbatch)].targets)
            per_microbatch.append(losses.detach())
            return losses[0].sum() / samples

        self._loss = scaled_loss
        schedule = self.schedule_for(len(inputs), inputs[0])
        first = args if self.rank == 0 else ()
        target = torch.empty(len(given)) if self.rank == self.last else None  # torch wants one tensor
        schedule.step(*first, target=target, return_outputs=False, **kwargs)
        self._loss = None
        sizes, device = [each.samples for each in given], _device(inputs[0])
        if per_microbatch:
            losses = torch.cat(per_microbatch, dim=1)
        else:
            losses = torch.empty(loss.rows, sum(sizes), dtype=torch.float32, device=device)
        dist.broadcast(losses, group=self.group, group_src=self.last)
        return list(losses.split(sizes, dim=1))

    def losses(self, microbatches: Iterable[Microbatch], loss: Loss) -> list[Tensor]:
        """The losses (rows, b) of each microbatch on every process, without gradients; shapes may differ.

        Not by torch's `eval`, which allocates buffers for each shape anew and wants counts that suit the schedule.
        """
        results = []
        for each in microbatches:
            output, device = self._forward(each.inputs), _device(each.inputs)
            unknown = torch.empty(loss.rows, each.samples, dtype=torch.float32, device=device)
            results.append(unknown if output is None else loss(Outputs(output, {}, {}), each.targets))
        joined = torch.cat(results, dim=1)
        dist.broadcast(joined, group=self.group, group_src=self.last)
        return list(joined.split([losses.shape[1] for losses in results], dim=1))

    def predict(self, inputs: Inputs) -> Tensor:
        """The model's output for these inputs on every process; in the order of `losses`."""
        output = self._forward(inputs)
        if output is None:
            output = torch.empty_like(self.stage.example_output(inputs), device=_device(inputs))
        output = output.contiguous()
        dist.broadcast(output, group=self.group, group_src=self.last)
        return output

    def _forward(self, inputs: Inputs) -> Tensor | None:
        """The output of the last stage, on the process that has it."""
        hidden, kwargs = self.stage.split(inputs)
        if self.rank > 0:
            hidden = tuple(torch.empty_like(t, device=_device(inputs)) for t in self.stage.example_hidden(inputs))
            for tensor in hidden:
                dist.recv(tensor, group=self.group, group_src=self.rank - 1)
        output = self.stage(*hidden, **kwargs)
        if self.rank == self.last:
            return cast(Tensor, output)
        for tensor in output:
            dist.send(tensor, group=self.group, group_dst=self.rank + 1)
        return None

    def schedule_for(self, count: int, inputs: Inputs) -> Any:
        """The cached schedule for `count` microbatches of these shapes. Every process of the pipeline sees the same
        shapes in the same order, so all of them make and evict the same schedules."""
        key = (count, *((tensor.shape, tensor.dtype) for tensor in inputs.values()))
        if key not in self.schedules:
            self.schedules[key] = self._make_schedule(count, inputs)
            if len(self.schedules) > _CACHED_SHAPES:
                self.schedules.popitem(last=False)
        self.schedules.move_to_end(key)
        return self.schedules[key]

    def _make_schedule(self, count: int, inputs: Inputs) -> Any:
        hidden, output = self.stage.example_hidden(inputs), self.stage.example_output(inputs)
        first, _ = self.stage.split(inputs)
        stage = PipelineStage(
            self.stage,
            self.rank,
            self.last + 1,
            self.device,
            input_args=first if self.rank == 0 else hidden,
            output_args=output if self.rank == self.last else hidden,
            group=self.group,
        )
        return Schedule1F1B(stage, count, loss_fn=lambda *tensors: self._loss(*tensors), scale_grads=False)


def _device(inputs: Inputs) -> torch.device:
    return next(iter(inputs.values())).device
