"""One optimizer step of flow matching, whatever the processes and microbatches.

What: `Step` takes this process's microbatches of one global batch, and does: noise, predict, compare, differentiate,
clip, update. Loss and gradient are the means over the whole global batch for any split into processes and
microbatches, also when the last microbatch is smaller.
Why the division by the global batch and not by the microbatch: a mean of means is wrong as soon as two parts differ
in size. Gradients are averaged over the parts of the batch, so each process divides by the size of its own part.
How the model is spread is not known here: `Spread` runs it and knows the norm of its gradients.
A loss or gradient that is not a number stops the run with the step, the bucket and the samples. On a GPU the host
reads that verdict one step later, so that it need not wait for the device in every step; no later step is reported
and no checkpoint is written before the verdict is in (`Step.settle`). In fp16 a finite loss with a gradient that is
not is an overflow: the step is left out, by the same verdict on every process (`pipeline.training.loss_scale`).
Price: after such a stop on a GPU the weights in memory may be spoilt; the last checkpoint is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.config import TrainConfig
from pipeline.errors import UserError
from pipeline.loader.loader import Batch, unpack
from pipeline.models.objective import FlowMatching
from pipeline.parallel.data_parallel import COMPUTE
from pipeline.parallel.mesh import gather
from pipeline.parallel.parallelize import Spread
from pipeline.training.loss_scale import LossScale

_SHOWN = 64


class NonFiniteError(UserError):
    """The loss or the gradient of a step is not a finite number."""

    exit_code = 9


@dataclass(frozen=True)
class Outcome:
    """What one step did, as tensors on the device (read them only after `Step.settle`).

    loss: mean over the global batch, fp32 scalar. grad_norm: global L2 norm before clipping, fp32 scalar.
    samples: size of the global batch. skipped: the fp16 gradient overflowed and the weights stayed as they were.
    """

    step: int
    loss: Tensor
    grad_norm: Tensor
    samples: int
    bucket: tuple[int, int]
    skipped: bool = False


@dataclass(frozen=True)
class _Pending:
    outcome: Outcome
    per_sample: list[Tensor]
    sample_ids: tuple[int, ...]
    verdict: Tensor  # host: loss finite, norm finite, samples, their squares' sum over the processes, wishes to stop
    ready: torch.cuda.Event | None


class Step:
    """Callable that does one optimizer step. Build it once per run.

    Args:
        spread: the model, called as model(latents, captions, mask, timesteps).
        names: what people call the samples of these ids, where that is known; for the error of `settle`.

    Attributes:
        stop_wanted: a process asked to stop in a step whose verdict is in; the same on every process.
        scale: what the loss is multiplied with (fp16).
    """

    def __init__(
        self,
        spread: Spread,
        objective: FlowMatching,
        optimizer: torch.optim.Optimizer,
        train: TrainConfig,
        device: torch.device,
        names: Callable[[Sequence[int]], Mapping[int, str]] = lambda ids: {},
    ):
        self.spread, self.objective, self.optimizer, self.names = spread, objective, optimizer, names
        self.clip, self.dtype, self.device = train.optim.clip, COMPUTE[train.precision], device
        self.packed = train.packed_attention
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.stop_wanted = False
        self.scale = LossScale(train.precision == "fp16")
        self._pending: _Pending | None = None

    def __call__(self, microbatches: Sequence[Batch], step: int, *, stop: bool = False) -> Outcome:
        """Do optimizer step number `step` (1 for the first) on this process's part of the global batch.

        Args:
            microbatches: all of one bucket; every process has the same shapes in the same order.
            stop: this process wants the run to end (see `stop_wanted`).

        Raises:
            NonFiniteError: on the CPU for this step, on a GPU for the step before it.
        """
        own = sum(len(batch.sample_ids) for batch in microbatches)
        parts = [partial(self.part, batch) for batch in microbatches]
        factor = self.scale.value
        per_sample = self.spread.forward_backward(parts, partial(self._scaled, factor), own)
        self.settle()
        outcome = self._ask(microbatches, [losses / factor for losses in per_sample], own, step, stop, factor)
        skipped = False
        if self.device.type == "cpu" or self.scale.dynamic:
            skipped = self.settle()
        if not skipped:
            self.spread.rescale(outcome.grad_norm, self.clip, factor)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return replace(outcome, skipped=skipped)

    def _scaled(self, factor: float, output: Tensor, target: Tensor) -> Tensor:
        return self.objective.loss(output, target) * factor

    def part(self, batch: Batch) -> tuple[tuple[Tensor, ...], Tensor]:
        """The model's inputs for one microbatch, and the target (b, C, H, W) fp32, on the device.

        Noise and interpolation stay in fp32; latents and captions are cast to the compute dtype here, the timestep is
        not cast at all.
        """
        latents, noise = self._here(batch.latents).float(), self._here(batch.noise)
        sigma, timesteps = (self._here(values) for values in self.objective.sigmas(batch.logit))
        noised = self.objective.noised(latents, noise, sigma).to(self.dtype)
        captions, mask = self._here(batch.captions), self._here(batch.mask)
        # A caption without rows attends to padding, as to rows that nothing masks: there has to be some.
        if batch.cu_seqlens is not None and not (self.packed and bool(batch.mask.any(1).all())):
            captions = unpack(captions, self._here(batch.cu_seqlens), mask)
        return (noised, captions.to(self.dtype), mask, timesteps), self.objective.target(latents, noise)

    def _here(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)

    def settle(self) -> bool:
        """Wait for the verdict on the last step, if it is not in yet. Returns whether that step is to be left out.

        Raises:
            NonFiniteError: the same words on every process.
            RuntimeError: the processes had parts of different sizes, so the mean over them is not the batch's.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return False
        if pending.ready is not None:
            pending.ready.synchronize()
        loss, norm, samples, squares, stop = pending.verdict.tolist()
        if squares * self.world != samples * samples:
            raise RuntimeError(f"step {pending.outcome.step}: the processes had different numbers of samples")
        self.stop_wanted = stop > 0
        if loss and norm:
            self.scale.succeeded()
            return False
        if loss and self.scale.overflowed():
            return True
        return self._refuse(pending)

    def _ask(
        self, microbatches: Sequence[Batch], per_sample: list[Tensor], own: int, step: int, stop: bool, factor: float
    ) -> Outcome:
        """Sum up the step over the processes and start the copy of its verdict to the host."""
        total = torch.cat(per_sample).sum(dtype=torch.float64)
        facts = torch.tensor([own, own * own, stop], dtype=torch.float64).to(self.device, non_blocking=True)
        sums = torch.cat([total[None], facts])
        if self.world > 1:
            dist.all_reduce(sums)
        samples = own * self.spread.data_world
        norm = self._here(self.spread.norm()) / factor
        outcome = Outcome(step, (sums[0] / sums[1]).float(), norm, samples, microbatches[0].bucket)
        finite = torch.isfinite(torch.stack([outcome.loss, outcome.grad_norm])).to(sums.dtype)
        answer = torch.cat([finite, sums[1:]])
        ready = None
        if self.device.type == "cuda":
            verdict = torch.empty(answer.shape, dtype=answer.dtype, pin_memory=True)
            verdict.copy_(answer, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
            answer = verdict
        ids = tuple(identity for batch in microbatches for identity in batch.sample_ids)
        self._pending = _Pending(outcome, per_sample, ids, answer, ready)
        return outcome

    def _refuse(self, pending: _Pending) -> NoReturn:
        losses = torch.cat(pending.per_sample).cpu().tolist()
        mine = list(zip(pending.sample_ids, losses, strict=True))
        everyone = dict(item for part in gather(mine) for item in part).items()
        bad = [identity for identity, loss in everyone if not torch.isfinite(torch.tensor(loss))]
        what = "loss" if bad else "gradient norm"
        named = bad or [identity for identity, _ in everyone]
        names = self.names(named[:_SHOWN])
        shown = ", ".join(names.get(identity, f"{identity:016x}") for identity in named[:_SHOWN])
        if len(named) > _SHOWN:
            shown += f" and {len(named) - _SHOWN} more of this step's batch"
        height, width = pending.outcome.bucket
        raise NonFiniteError(
            f"step {pending.outcome.step}: the {what} is not a finite number (bucket {height}x{width})",
            found=f"loss {float(pending.outcome.loss)}, gradient norm {float(pending.outcome.grad_norm)}; "
            f"{'samples with such a loss' if bad else 'samples of the step'}: {shown}",
            fix="the step was not saved; resume from the last checkpoint with a lower train.optim.lr, more "
            "train.optim.warmup_steps or train.precision: fp32, and look at the named samples",
        )
