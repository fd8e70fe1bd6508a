"""Pipeline parallelism: consecutive slices of the blocks on different processes, microbatches travelling through.

What: `cut` gives this process its stages, `Pipeline.forward_backward` runs all microbatches of a step through one of
torch's schedules. A stage is wrapped by the other strategies as a whole model is (tensor parallel, recomputation,
FSDP2), so products need nothing of their own.
Why the shapes are declared: torch would otherwise run every stage once more to find them, for every new shape, and
take the gradients of FSDP2 away afterwards. A schedule holds buffers for one shape only (another one ends the whole
process from within gloo), and buckets change shapes, so there is one for each of the last few shapes.
Price: a process idles for (pp_size - 1) / (microbatches + pp_size - 1) of a step under `1f1b` and `gpipe`, less under
the others, and torch keeps a buffer of what a stage receives for every microbatch of each shape held. All microbatches
of a step must have one size. It pays where the links between nodes are slow, or for a model whose blocks do not fit
(Sana 4.8B); elsewhere FSDP2 alone is faster and simpler.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from pipeline.errors import ConfigError

SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved_1f1b": "Interleaved1F1B",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
}
"""Our names of torch's schedules."""
_V_SHAPED = ("zbv",)
_ROUNDS = ("interleaved_1f1b", "interleaved_zero_bubble")
_SHAPES_HELD = 4

Inputs = tuple[Tensor, ...]
Loss = Callable[[Tensor, Tensor], Tensor]
Model = TypeVar("Model", bound=nn.Module)


class Stage(Protocol):
    """What a slice of a model must be able to do; see `pipeline.models.sana_stage.SanaStage`."""

    def split(self, inputs: Inputs) -> tuple[Inputs, dict[str, Any]]: ...

    def received(self, inputs: Inputs) -> Inputs: ...

    def returned(self, inputs: Inputs) -> Tensor: ...


# ---------------------------------------------------------------------------------------------------------- cutting


def slices(blocks: int, stages: int) -> list[range]:
    """The blocks of each stage, as equal as can be; the last stages get one more where they must, because the first
    ones hold the activations of more microbatches.

    Raises:
        ConfigError: fewer blocks than stages.
    """
    if stages > blocks:
        raise ConfigError(
            f"a model of {blocks} blocks cannot be cut into {stages} stages (train.parallel.pp_size x the stages of "
            "each process)",
            expected=f"at most {blocks} stages, each of which needs a block",
            found=stages,
            fix="a smaller train.parallel.pp_size or train.parallel.pp_stages_per_rank",
        )
    edges = [number * blocks // stages for number in range(stages + 1)]
    return [range(start, stop) for start, stop in pairwise(edges)]


def stages_of(rank: int, size: int, per_rank: int, schedule: str) -> list[int]:
    """Numbers of the stages of process `rank` of `size`: every `size`-th one, or first and last for a V."""
    if schedule in _V_SHAPED:
        return [rank, 2 * size - 1 - rank]
    return [rank + size * turn for turn in range(per_rank)]


def cut(
    model: Model, make: Callable[[Model, int, int], nn.Module], blocks: int, mine: Sequence[int], stages: int
) -> list[nn.Module]:
    """This process's stages of `model`: `make(model, start, stop)` for each number in `mine`."""
    parts = slices(blocks, stages)
    return [make(model, parts[number].start, parts[number].stop) for number in mine]


class Parts(nn.Module):
    """The stages of one process as one module, for the optimizer and for checkpoints: the names are those of the whole
    model. Built after the stages were wrapped; it is never called."""

    def __init__(self, stages: Sequence[nn.Module]):
        super().__init__()
        for stage in stages:
            for name, child in stage.named_children():
                held = self._modules.get(name)
                self.add_module(name, nn.ModuleDict({**held, **child}) if isinstance(held, nn.ModuleDict) else child)  # type: ignore[dict-item]
            if stage._parameters:
                # One dictionary for both: FSDP2 exchanges the entries of the stage, and must not leave others here.
                self._parameters = stage._parameters


# ---------------------------------------------------------------------------------------------------------- running


def check_microbatches(schedule: str, size: int, share: int, microbatch: int, where: str) -> None:
    """Refuse a share that the schedule cannot run.

    Args:
        size: processes of the pipeline.
        share: samples of one step for one pipeline (the global batch over the data-parallel processes).
        where: of what batch this is the share.

    Raises:
        ConfigError: with the values of `train.microbatch` that would work.
    """
    if _runs(schedule, size, share, microbatch):
        return
    count = -(-share // microbatch)
    good = [str(m) for m in range(1, share + 1) if _runs(schedule, size, share, m)]
    others = [name for name in ("1f1b", "gpipe", "interleaved_1f1b") if _runs(name, size, share, microbatch)]
    what = f"microbatches of {microbatch} do not divide it" if share % microbatch else f"{count} microbatches"
    raise ConfigError(
        f"{where}: a share of {share} samples cannot go through a pipeline of {size} processes with "
        f"train.parallel.pp_schedule = {schedule}",
        expected=f"equal microbatches{_rule(schedule, size)}",
        found=what,
        fix=" or ".join(
            [f"train.microbatch = {', '.join(good)}"] * bool(good)
            + [f"train.parallel.pp_schedule = {', '.join(others)}"] * bool(others)
            + [f"a bucket.batch of at least {size} samples per pipeline"] * (not good)
        ),
    )


def _runs(schedule: str, size: int, share: int, microbatch: int) -> bool:
    count, rest = divmod(share, microbatch)
    if rest:
        return False
    if schedule == "1f1b":
        return count >= size
    return count % max(1, count // size) == 0 if schedule in _ROUNDS else True


def _rule(schedule: str, size: int) -> str:
    if schedule == "1f1b":
        return f", at least {size} of them"
    return f", whose number is a multiple of itself // {size}" if schedule in _ROUNDS else ""


class Pipeline:
    """Runs the microbatches of a step through the stages of a group of processes.

    Args:
        stages: this process's, wrapped, in the order of `numbers`.
        numbers: see `stages_of`.
        total: stages of all processes.
        group: the processes of this pipeline, in the order of their stages.
        schedule: a key of `SCHEDULES`.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        numbers: Sequence[int],
        total: int,
        group: dist.ProcessGroup,
        schedule: str,
        device: torch.device,
    ):
        self.stages, self.numbers, self.total = list(stages), list(numbers), total
        self.group, self.schedule, self.device = group, schedule, device
        self.last = 0 if schedule in _V_SHAPED else dist.get_world_size(group) - 1
        self._schedules: OrderedDict[Any, Any] = OrderedDict()
        self._loss: Callable[[Tensor, Tensor], Tensor] | None = None

    def forward_backward(self, parts: Iterable[tuple[Inputs, Tensor]], loss: Loss, share: int) -> list[Tensor]:
        """Gradients of sum(losses) / share over all microbatches, added to the parameters of this process's stages.

        Args:
            parts: the model's inputs and the target of each microbatch, all of the same shapes, the same on every
                process of the pipeline.
            loss: (prediction, target) -> (b,) losses of the samples.

        Returns:
            The losses of each microbatch, (b,) fp32 without a graph, on every process.
        """
        inputs, targets = zip(*parts, strict=True)
        args, kwargs = self._stage.split(tuple(torch.cat(tensors) for tensors in zip(*inputs, strict=True)))
        found: list[Tensor] = []

        def last(prediction: Tensor, target: Tensor) -> Tensor:
            losses = loss(prediction, target)
            found.append(losses.detach())
            return losses.sum() / share

        self._loss = last
        schedule = self._for(len(inputs), inputs[0])
        first = args if 0 in self.numbers else ()
        target = torch.cat(targets) if self.total - 1 in self.numbers else None
        schedule.step(*first, target=target, return_outputs=False, **kwargs)
        self._loss = None
        losses = torch.cat(found) if found else targets[0].new_empty(sum(map(len, targets)), dtype=torch.float32)
        dist.broadcast(losses, group=self.group, group_src=self.last)
        return list(losses.split([len(target) for target in targets]))

    @property
    def _stage(self) -> Any:
        return self.stages[0]

    def _for(self, count: int, inputs: Inputs) -> Any:
        """The schedule for `count` microbatches of these shapes. The same steps meet the same shapes on every process
        of the pipeline, so all of them make and forget the same schedules."""
        key = (count, *((tensor.shape, tensor.dtype) for tensor in inputs))
        if key not in self._schedules:
            self._schedules[key] = self._make(count, inputs)
            if len(self._schedules) > _SHAPES_HELD:
                self._schedules.popitem(last=False)
        self._schedules.move_to_end(key)
        return self._schedules[key]

    def _make(self, count: int, inputs: Inputs) -> Any:
        received, returned = self._stage.received(inputs), self._stage.returned(inputs)
        first, _ = self._stage.split(inputs)
        stages = [
            PipelineStage(
                stage,
                number,
                self.total,
                self.device,
                input_args=first if number == 0 else received,
                output_args=returned if number == self.total - 1 else received,
                group=self.group,
            )
            for stage, number in zip(self.stages, self.numbers, strict=True)
        ]
        kind = get_schedule_class(SCHEDULES[self.schedule])
        several = self.schedule not in ("1f1b", "gpipe")
        return kind(stages if several else stages[0], count, loss_fn=self._call_loss, scale_grads=False)  # type: ignore[arg-type]

    def _call_loss(self, prediction: Tensor, target: Tensor) -> Tensor:
        assert self._loss is not None
        return self._loss(prediction, target)
