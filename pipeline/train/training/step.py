"""One optimizer step, for any number of processes and microbatches.

Loss and gradient are means over the global batch for any split, also with a smaller last microbatch: each process
divides its sum by the number of its samples, and averaging over processes gives the mean. A non-finite loss or gradient
stops the run and names step, bucket and samples; in fp16 an overflow with a finite loss skips the step everywhere. On a
GPU the host reads this verdict one step later, so that it need not wait for the device in each step.
Price: after such a stop on a GPU the weights in memory may be spoilt; the last checkpoint is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from sana_pipe.base import hub
from sana_pipe.base.errors import UserError
from sana_pipe.data.loader.loader import Batch
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.kernels.sample_dropout import rows_of
from sana_pipe.train.parallel.collectives import all_gather_objects
from sana_pipe.train.parallel.data_parallel import COMPUTE
from sana_pipe.train.parallel.microbatch import Microbatch
from sana_pipe.train.parallel.parallelize import ParallelModel
from sana_pipe.train.training.loss_scale import LossScale
from sana_pipe.train.training.objectives import Objective, StepLoss, visit_hashes

_MAX_NAMED = 64
"""Samples that an error names at most."""


class NonFiniteError(UserError):
    """The loss or the gradient of a step is not a finite number."""

    exit_code = 9
    everywhere = True


@dataclass(frozen=True)
class Outcome:
    """Result of one step, as tensors on the device (read them only after `TrainStep.await_verdict`).

    loss: mean over the global batch, fp32 scalar. grad_norm: global L2 norm before clipping, fp32 scalar.
    parts: the same for each loss of an objective that has several, not weighted. samples: size of the global batch.
    skipped: the fp16 gradient overflowed and the weights stayed as they were.
    """

    step: int
    loss: Tensor
    grad_norm: Tensor
    samples: int
    bucket: tuple[int, int]
    skipped: bool = False
    parts: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class _Pending:
    """A step whose verdict is on its way to the host.

    verdict: float64 on the host, valid once `ready` has passed: whether the loss is finite, whether the norm is, the
    sum of the processes' sample counts, the sum of their squares, the number of processes that want to stop.
    """

    outcome: Outcome
    losses: list[Tensor]
    sample_ids: tuple[int, ...]
    verdict: Tensor
    ready: torch.cuda.Event | None


def clip_factor(norm: Tensor, limit: float | None, divisor: float) -> Tensor | None:
    """Return what the gradient is multiplied by to divide it by `divisor` and then clip it to length `limit`: fp32
    scalar; None where there is nothing to do. norm: after the division, fp32 scalar."""
    if limit is None and divisor == 1:
        return None
    factor = torch.full_like(norm, 1.0) if limit is None else (limit / (norm + 1e-6)).clamp(max=1.0)
    return factor / divisor


class TrainStep:
    """Callable that does one optimizer step. Build it once per run.

    Args:
        model: called with the objective's inputs by name.
        names: sample ids -> names for error messages, as far as they are known.

    Attributes:
        stop_wanted: a process asked to stop in a step whose verdict is in; the same on every process.
        scale: what the loss is multiplied with (fp16).
    """

    def __init__(
        self,
        model: ParallelModel,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        train: TrainConfig,
        device: torch.device,
        names: Callable[[Sequence[int]], Mapping[int, str]] = lambda ids: {},
    ):
        self.model, self.objective, self.optimizer, self.names = model, objective, optimizer, names
        self.loss = StepLoss(objective)
        self.clip, self.dtype, self.device = train.optim.clip, COMPUTE[train.precision], device
        self._masked = any(getattr(part, "mask_columns", None) is not None for part in model.module.modules())
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.stop_wanted = False
        self.scale = LossScale(train.precision == "fp16")
        self._pending: _Pending | None = None

    def __call__(self, batches: Sequence[Batch], step: int, *, stop: bool = False) -> Outcome:
        """Do optimizer step number `step` (1 for the first) on this process's share of the global batch.

        Args:
            batches: the microbatches, all of one bucket; every process has the same shapes in the same order.
            stop: this process wants the run to end (see `stop_wanted`).

        Raises:
            NonFiniteError: on the CPU for this step, on a GPU for the step before it.
        """
        ids = tuple(identity for batch in batches for identity in batch.sample_ids)
        factor = self.scale.value
        loss = self.loss if factor == 1 else StepLoss(self.objective, factor)
        rows = self.model.forward_backward(map(self.prepare, batches), loss, len(ids))
        self.await_verdict()
        norm = self._to_device(self.model.gradient_norm()) / factor
        outcome = self._reduce(rows, factor, norm, ids, step, batches[0].bucket, stop)
        skipped = False
        if self.device.type == "cpu" or self.scale.dynamic:
            skipped = self.await_verdict()
        if not skipped:
            self._update(clip_factor(outcome.grad_norm, self.clip, factor))
        self.optimizer.zero_grad(set_to_none=True)
        return replace(outcome, skipped=skipped)

    def _update(self, factor: Tensor | None) -> None:
        """Step the optimizer on the gradient times `factor`, an fp32 scalar on the device (None: 1). Our optimizers and
        torch's fused ones multiply in their fp32 arithmetic, which saves a pass over all gradients."""
        if hasattr(self.optimizer, "gradient_factor"):
            self.optimizer.gradient_factor, factor = factor, None
        if getattr(self.optimizer, "_step_supports_amp_scaling", False):
            # torch would copy it to offloaded gradients without waiting for the copy
            device = self.optimizer.param_groups[0]["params"][0].device
            self.optimizer.grad_scale = None if factor is None else (1 / factor).to(device)  # type: ignore[attr-defined]
        elif factor is not None:
            self.model.scale_gradients(factor)
        self.optimizer.step()

    def prepare(self, batch: Batch, level: float | None = None) -> Microbatch:
        """See `Objective.prepare`; on this step's device and in its dtype."""
        prepared = self.objective.prepare(batch, self._to_device, self.dtype, level)
        if not self._masked or level is not None:
            return prepared
        captions, mask = (prepared.inputs[name] for name in ("captions", "mask"))
        packed = len(captions) if captions.ndim == 2 else None
        hashes = visit_hashes(batch, "dropout")
        hashes *= len(mask) // len(hashes)  # both pictures of a preference pair drop the same
        return prepared._replace(rows=rows_of(hashes, mask, packed))

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)

    def await_verdict(self) -> bool:
        """Wait until the last step is known to be finite on all processes. Returns whether it is to be skipped.

        Raises:
            NonFiniteError: the same message on every process.
            RuntimeError: the processes had shares of different sizes, so the mean over them is not the batch's.
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
        return self._raise_non_finite(pending)

    def _reduce(
        self,
        rows: list[Tensor],
        factor: float,
        norm: Tensor,
        ids: tuple[int, ...],
        step: int,
        bucket: tuple[int, int],
        stop: bool,
    ) -> Outcome:
        """Sum up the step over the processes and start the copy of its verdict to the host. rows: the losses of each
        microbatch, row 0 times `factor`."""
        losses = [part[0] / factor for part in rows]
        total, count = torch.cat(losses).sum(dtype=torch.float64), len(ids)
        parts = torch.cat(rows, dim=1)[1:].sum(1, dtype=torch.float64)
        counts = torch.tensor([count, count * count, stop], dtype=torch.float64).to(self.device, non_blocking=True)
        sums = torch.cat([total[None], counts, parts])
        if self.world > 1:
            dist.all_reduce(sums)
        names = self.objective.parts if len(parts) else ()
        means = dict(zip(names, (sums[4:] / sums[1]).float(), strict=True))
        samples = count * self.model.data_world
        outcome = Outcome(step, (sums[0] / sums[1]).float(), norm, samples, bucket, parts=means)
        finite = torch.isfinite(torch.stack([outcome.loss, outcome.grad_norm])).to(sums.dtype)
        verdict, ready = torch.cat([finite, sums[1:4]]), None
        if self.device.type == "cuda":
            host = torch.empty(verdict.shape, dtype=verdict.dtype, pin_memory=True)
            verdict = host.copy_(verdict, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
        self._pending = _Pending(outcome, losses, ids, verdict, ready)
        return outcome

    def _raise_non_finite(self, pending: _Pending) -> NoReturn:
        losses = torch.cat(pending.losses).cpu().tolist()
        parts = all_gather_objects(list(zip(pending.sample_ids, losses, strict=True)))
        loss_of = dict(item for part in parts for item in part)
        bad = [identity for identity, loss in loss_of.items() if not math.isfinite(loss)]
        culprits = bad or list(loss_of)
        names = self.names(culprits[:_MAX_NAMED])
        listed = hub.listed((names.get(identity, f"{identity:016x}") for identity in culprits), _MAX_NAMED)
        height, width = pending.outcome.bucket
        raise NonFiniteError(
            f"step {pending.outcome.step}: the {'loss' if bad else 'gradient norm'} is not a finite number "
            f"(bucket {height}x{width})",
            found=f"loss {float(pending.outcome.loss)}, gradient norm {float(pending.outcome.grad_norm)}; "
            f"{'samples with such a loss' if bad else 'samples of the step'}: {listed}",
            fix="the step was not saved; resume from the last checkpoint with a lower train.optim.lr, more "
            "train.optim.warmup_steps or train.precision: fp32, and look at the named samples",
        )
