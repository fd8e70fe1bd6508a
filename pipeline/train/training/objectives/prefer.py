"""Sana's objective of preference pairs: rather the chosen picture than the rejected one (`train.prefer`).

The loss is Diffusion-DPO (arXiv 2311.12908) with the errors of flow matching (arXiv 2501.13918, its constant beta). The
reference is the model without its adapter, or a frozen copy of the start weights. Both pictures of a pair have one
noise, one noise level and one caption. The anchor is DPO-Positive's penalty (arXiv 2402.13228) as a part of its own.
Price: a microbatch of b pairs is a forward and backward pass of 2 b samples, and a forward pass without gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from sana_pipe.data.loader.loader import Batch
from sana_pipe.train.models.config import FlowConfig
from sana_pipe.train.parallel.microbatch import REFERENCE, Microbatch, Outputs
from sana_pipe.train.training.config import PreferConfig
from sana_pipe.train.training.objectives import ToDevice
from sana_pipe.train.training.objectives.flow import Flow

PATIENCE = 2
"""Validations in a row below the best pair accuracy, and above the lowest loss, that end a run."""
_FLOW, _WEIGHT = "flow", "pair_weight"


class Preferring(Flow):
    """The loss of preference pairs. With w and l the flow's mean squared errors of the chosen and the rejected picture,
    and w0 and l0 those of the reference, the parts of a pair are

        margin = (w0 - w) - (l0 - l)
        prefer = -weight log sigmoid(beta/2 margin)
        anchor = weight beta/2 max(0, w - w0)

    Example: beta 2000, w 0.50, w0 0.51, l 0.63, l0 0.60, weight 1: margin 0.01 + 0.03 = 0.04, prefer = -log sigmoid(40)
    = 4e-18, anchor = 0. The other parts are reported and not learned: `accuracy` (1 where margin > 0), `margin`,
    `chosen` (w), `chosen_reference` (w0), `rejected` (l) and `rejected_reference` (l0).
    """

    def __init__(self, flow: FlowConfig, prefer: PreferConfig):
        super().__init__(flow)
        self.pictures, self.asks_base = ("rejected",), True
        self.beta, self.stop, self.may_end = prefer.beta, prefer.stop, prefer.stop is not None
        reported = ("accuracy", "margin", "chosen", "chosen_reference", "rejected", "rejected_reference")
        self.parts: Mapping[str, float] = {"prefer": 1.0, "anchor": prefer.anchor, **dict.fromkeys(reported, 0.0)}

    def prepare(self, batch: Batch, place: ToDevice, dtype: torch.dtype, level: float | None = None) -> Microbatch:
        """Inputs of 2 b samples: the chosen pictures, then the rejected ones. Targets of b pairs: `flow` is
        (b, 2, C, h, w), `pair_weight` (b,) fp32."""
        chosen, targets, *_ = super().prepare(batch, place, dtype, level)
        other = replace(batch, latents=batch.pictures["rejected"])
        rejected, targets_rejected, *_ = super().prepare(other, place, dtype, level)
        inputs = {name: torch.cat([value, rejected[name]]) for name, value in chosen.items()}
        weight = torch.ones(len(batch.latents)) if batch.pair_weight is None else batch.pair_weight
        flows = torch.stack([targets[_FLOW], targets_rejected[_FLOW]], 1)
        return Microbatch(inputs, {_FLOW: flows, _WEIGHT: place(weight)}, reference=inputs)

    def losses(self, outputs: Outputs, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Differences of errors are taken in fp64: two errors of 1 in fp32 differ by 1e-7 more or less, and half a beta
        of 2000 makes 1e-4 of it."""
        target, weight = targets[_FLOW].transpose(0, 1).flatten(0, 1), targets[_WEIGHT]
        chosen, rejected = self.flow.loss(outputs.prediction, target, dtype=torch.float64).chunk(2)
        reference = self.flow.loss(targets[REFERENCE], target, dtype=torch.float64)
        chosen_reference, rejected_reference = reference.chunk(2)
        margin = (chosen_reference - chosen) - (rejected_reference - rejected)
        half = self.beta / 2
        losses = {
            "prefer": -weight * F.logsigmoid(half * margin),
            "anchor": weight * half * (chosen - chosen_reference).relu(),
            "accuracy": margin > 0,
            "margin": margin.detach(),
            "chosen": chosen.detach(),
            "chosen_reference": chosen_reference,
            "rejected": rejected.detach(),
            "rejected_reference": rejected_reference,
        }
        return {name: values.float() for name, values in losses.items()}

    def why_end(self, validations: Sequence[Mapping[str, float | None]]) -> str | None:
        """Say that the chosen pictures' loss is too far above the reference's, or that the accuracy fell.

        The accuracy of few pairs goes up and down by chance. So the loss has to rise, too: a run whose held-out loss
        still falls goes on.
        Example: accuracies 0.5, 0.9, 0.8, 0.9, 0.8, 0.7 with losses 0.6, 0.4, 0.5, 0.3, 0.4, 0.4 end a run at the last
        one, the second in a row below 0.9 and above 0.3.
        """
        needed = {"prefer", "anchor", "accuracy", "chosen", "chosen_reference"}
        validations = [each for each in validations if needed <= each.keys()]  # others are of another objective
        if not validations:
            return None
        loss, reference = (validations[-1][name] for name in ("chosen", "chosen_reference"))
        if self.stop is None or loss is None or reference is None:
            return None
        if loss > (1 + self.stop) * reference:
            return (
                f"the held-out chosen pictures' loss is {loss:.4f}, that of the base {reference:.4f}: more than "
                f"{self.stop:.0%} above it (train.prefer.stop)"
            )
        accuracies = [each["accuracy"] or 0.0 for each in validations]
        losses = [self._loss(each) for each in validations]
        best, lowest = max(accuracies), min(losses)
        last = list(zip(accuracies, losses, strict=True))[-PATIENCE:]
        if all(accuracy < best and loss > lowest for accuracy, loss in last):
            return (
                f"the held-out pair accuracy is {accuracies[-1]:.3f}, and was {best:.3f}; the held-out loss is "
                f"{losses[-1]:.4f}, and was {lowest:.4f} (train.prefer.stop)"
            )
        return None

    def _loss(self, validation: Mapping[str, float | None]) -> float:
        """The loss that is trained, of a validation; infinite if it is not finite."""
        parts = [(weight, validation[name]) for name, weight in self.parts.items() if weight]
        return sum(math.inf if value is None else weight * value for weight, value in parts)
