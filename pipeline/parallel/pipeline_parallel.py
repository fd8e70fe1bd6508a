"""Pipeline parallelism: consecutive slices of the blocks on different processes, microbatches passed between them.

Why the shapes are declared to torch's schedules: otherwise torch runs every stage once more to infer them, for every
new shape, and drops FSDP2's gradients afterwards. A schedule has buffers for one shape only (another shape ends the
process from within gloo), and buckets change shapes, so the last few shapes have one schedule each.
Price: a process idles for (pp_size - 1) / (microbatches + pp_size - 1) of a step under `1f1b` and `gpipe`, less
interleaved; all microbatches of a step have one size. FSDP2 alone is faster and simpler where a block's model fits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from pipeline.config import ParallelConfig
from pipeline.errors import ConfigError
from pipeline.parallel.microbatch import Loss, Microbatch, Outputs

SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved_1f1b": "Interleaved1F1B"}
"""`train.parallel.pp_schedule` -> torch's name."""
_CACHED_SHAPES = 4
_SHOWN = 8

Inputs = Mapping[str, Tensor]
"""Of the whole model, by name."""
Hidden = tuple[Tensor, ...]
"""Between two stages."""


class Stage(Protocol):
    """A slice of a model; see `pipeline.models.sana_stage.SanaStage`."""

    @property
    def blocks(self) -> list[nn.Module]: ...

    def split(self, inputs: Inputs) -> tuple[Hidden, dict[str, Any]]: ...

    def example_hidden(self, inputs: Inputs) -> Hidden: ...

    def example_output(self, inputs: Inputs) -> Tensor: ...


# ---------------------------------------------------------------------------------------------------------- cutting


def stage_ranges(blocks: int, stages: int) -> list[range]:
    """The blocks of each stage, as equal as possible. The last stages get the remainder, because the first ones hold
    the activations of more microbatches."""
    edges = [number * blocks // stages for number in range(stages + 1)]
    return [range(start, stop) for start, stop in pairwise(edges)]


def build_stages(model: nn.Module, blocks: int, mesh: DeviceMesh, parallel: ParallelConfig) -> list[nn.Module]:
    """Build this process's stages of `model`, sharing its parameters; `model` itself if the pipeline has one
    process."""
    if mesh.size() == 1:
        return [model]
    ranges = stage_ranges(blocks, mesh.size() * parallel.stages_per_rank)
    numbers = stage_numbers(mesh.get_local_rank(), mesh.size(), parallel)
    return [model.stage(ranges[n].start, ranges[n].stop) for n in numbers]  # type: ignore[operator]


def stage_numbers(rank: int, size: int, parallel: ParallelConfig) -> list[int]:
    """The stages of process `rank` of `size`: every `size`-th one."""
    return [rank + size * turn for turn in range(parallel.stages_per_rank)]


def join_stages(stages: Sequence[nn.Module]) -> nn.Module:
    """The stages of one process as one module with the whole model's names, for the optimizer and for checkpoints. Call
    it after `fully_shard`."""
    return stages[0] if len(stages) == 1 else _JoinedStages(stages)


class _JoinedStages(nn.Module):
    def __init__(self, stages: Sequence[nn.Module]):
        super().__init__()
        for stage in stages:
            for name, child in stage.named_children():
                earlier = self._modules.get(name)
                merge = isinstance(earlier, nn.ModuleDict) and isinstance(child, nn.ModuleDict)
                self.add_module(name, nn.ModuleDict({**earlier, **child}) if merge else child)  # type: ignore[dict-item]
            if stage._parameters:
                # The same dictionary, not a copy: FSDP2 replaces entries of the stage's.
                self._parameters = stage._parameters


# ---------------------------------------------------------------------------------------------------------- running


def check(blocks: int, shares: Mapping[str, int], microbatch: int, parallel: ParallelConfig) -> None:
    """Refuse a model or batches that cannot go through the pipeline. shares: samples of a step for one pipeline (global
    batch / data-parallel size), by bucket."""
    size, schedule, each = parallel.pp_size, parallel.pp_schedule, parallel.stages_per_rank
    if size == 1:
        return
    if blocks < size * each:
        raise ConfigError(
            f"a model of {blocks} blocks cannot be cut into {size * each} stages",
            expected="a block for every stage",
            found=f"train.parallel.pp_size = {size} with {each} stage(s) on each process",
            fix=f"train.parallel.pp_size of at most {blocks // each}"
            + (f", or fewer stages on each with pp_schedule = 1f1b (at most {blocks})" if each > 1 else ""),
        )
    wrong = [name for name, share in shares.items() if not _fits(schedule, size, share, microbatch)]
    if not wrong:
        return
    first = shares[wrong[0]]
    sizes = [m for m in range(1, max(shares.values()) + 1) if all(_fits(schedule, size, s, m) for s in shares.values())]
    near = sorted(sorted(sizes, key=lambda m: abs(m - microbatch))[:_SHOWN])
    other = f"sana-pipe bucket with bucket.batch_multiple = {size} x the data-parallel processes"
    if all(_fits("gpipe", size, share, microbatch) for share in shares.values()):
        other = f"train.parallel.pp_schedule = gpipe, or {other}"
    rules = {"1f1b": f", at least {size} of them", "gpipe": ""}
    raise ConfigError(
        f"bucket {wrong[0]}: {first} samples per step and pipeline cannot go through {size} processes by {schedule}"
        + (f" (nor can those of {len(wrong) - 1} other buckets)" if wrong[1:] else ""),
        expected="equal microbatches" + rules.get(schedule, f", as many as {size} processes take in equal rounds"),
        found=f"train.microbatch = {microbatch}: {first // microbatch} of it and {first % microbatch} samples more",
        fix=f"train.microbatch = {', '.join(map(str, near))}" if near else other,
    )


def _fits(schedule: str, size: int, share: int, microbatch: int) -> bool:
    """Return whether a schedule of `size` processes takes `share` samples in microbatches of this size."""
    count, rest = divmod(share, microbatch)
    if rest:
        return False
    if schedule == "1f1b":
        return count >= size
    return schedule == "gpipe" or count % max(1, count // size) == 0


class Pipeline:
    """Runs the microbatches of a step through the stages of a group of processes. stages: this process's, after
    `fully_shard`. mesh: the processes of this pipeline in the order of their stages."""

    def __init__(self, stages: Sequence[nn.Module], mesh: DeviceMesh, parallel: ParallelConfig):
        self.stages, self.schedule, self.group = list(stages), parallel.pp_schedule, mesh.get_group()
        self.rank, self.total = mesh.get_local_rank(), mesh.size() * parallel.stages_per_rank
        self.numbers = stage_numbers(self.rank, mesh.size(), parallel)
        ranks = range(mesh.size())
        self.rank_of = {number: rank for rank in ranks for number in stage_numbers(rank, mesh.size(), parallel)}
        self.last = self.rank_of[self.total - 1]
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
        args, kwargs = self._stage.split({key: torch.cat([each[key] for each in inputs]) for key in inputs[0]})
        per_microbatch: list[Tensor] = []

        def scaled_loss(prediction: Tensor, _: Tensor) -> Tensor:  # in the order of the microbatches
            losses = loss(Outputs(prediction, {}, {}), given[len(per_microbatch)].targets)
            per_microbatch.append(losses.detach())
            return losses[0].sum() / samples

        self._loss = scaled_loss
        schedule = self.schedule_for(len(inputs), inputs[0])
        first = args if 0 in self.numbers else ()
        target = torch.empty(len(given)) if self.total - 1 in self.numbers else None  # torch wants one tensor
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
        Every process runs its stages in the order of (microbatch, stage), so that no two wait for each other.
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
            output = torch.empty_like(self._stage.example_output(inputs), device=_device(inputs))
        output = output.contiguous()
        dist.broadcast(output, group=self.group, group_src=self.last)
        return output

    def _forward(self, inputs: Inputs) -> Tensor | None:
        """The output of the last stage, on the process that has it."""
        hidden, kwargs = self._stage.split(inputs)
        device = _device(inputs)
        for stage, number in zip(self.stages, self.numbers, strict=True):
            before, after = (self.rank_of.get(number + step, self.rank) for step in (-1, 1))
            if before != self.rank:
                hidden = tuple(torch.empty_like(t, device=device) for t in self._stage.example_hidden(inputs))
                for tensor in hidden:
                    dist.recv(tensor, group=self.group, group_src=before)
            hidden = stage(*hidden, **kwargs)
            if after != self.rank:
                for tensor in hidden:
                    dist.send(tensor, group=self.group, group_dst=after)
        return hidden if self.total - 1 in self.numbers else None

    @property
    def _stage(self) -> Any:
        return self.stages[0]

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
        hidden, output = self._stage.example_hidden(inputs), self._stage.example_output(inputs)
        first, _ = self._stage.split(inputs)
        stages = [
            PipelineStage(
                stage,
                number,
                self.total,
                self.device,
                input_args=first if number == 0 else hidden,
                output_args=output if number == self.total - 1 else hidden,
                group=self.group,
            )
            for stage, number in zip(self.stages, self.numbers, strict=True)
        ]
        schedule = get_schedule_class(SCHEDULES[self.schedule])
        takes_list = self.schedule == "interleaved_1f1b"
        given = stages if takes_list else stages[0]
        return schedule(given, count, loss_fn=lambda *tensors: self._loss(*tensors), scale_grads=False)


def _device(inputs: Inputs) -> torch.device:
    return next(iter(inputs.values())).device
