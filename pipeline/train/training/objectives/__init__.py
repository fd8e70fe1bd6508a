"""The objectives that a run may learn: from a batch and its draws to the model's inputs, and from its output to losses
by name.

An `Objective` is a file here; `flow` is Sana's. An objective may tap blocks, whose outputs its losses are given, and
may have modules of its own, which are trained and saved but not exported.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from sana_pipe.data.loader.loader import Batch
from sana_pipe.train.models.spec import ModelSpec
from sana_pipe.train.parallel.microbatch import Microbatch, Outputs

ToDevice = Callable[[Tensor], Tensor]


class Objective(ABC):
    """The objective of a run.

    Attributes:
        parts: weight of each loss in the sum that is differentiated, by name.
        pictures: kinds of picture records that `Batch.pictures` is to have, in addition to the latents.
        taps: numbers of the blocks whose outputs `losses` is given.
        asks_base: every batch asks the base, too (`Microbatch.reference`), so a whole model needs a copy of it.
        contrast: what a validation calls the loss of the batches of `contrasted`; None: it measures none.
        may_end: `why_end` is asked after each validation.
    """

    parts: Mapping[str, float]
    pictures: tuple[str, ...] = ()
    taps: tuple[int, ...] = ()
    asks_base: bool = False
    contrast: str | None = None
    may_end: bool = False

    @abstractmethod
    def prepare(self, batch: Batch, place: ToDevice, dtype: torch.dtype, level: float | None = None) -> Microbatch:
        """The model's inputs and what its output is compared with.

        Args:
            place: moves a tensor to the device. dtype: of the computation.
            level: noise level of all samples; None: those of the batch's draws.
        """

    @abstractmethod
    def losses(self, outputs: Outputs, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The losses of `parts`, not weighted: (b,) fp32, one value a sample, so that their mean over the global batch
        is that over its samples."""

    def why_end(self, validations: Sequence[Mapping[str, float | None]]) -> str | None:
        """Say why the run should end before its last step; None: it should not. validations: the held-out losses by
        name of each validation so far, the last one included."""
        return None

    def contrasted(self, batch: Batch) -> Batch:
        """A batch of two samples or more with what the model should have learned to use exchanged between them."""
        raise NotImplementedError(f"{type(self).__name__} has no contrast")

    def modules(self, spec: ModelSpec) -> dict[str, nn.Module]:
        """Modules of the objective's own, made anew; `Outputs.modules` has them in the run."""
        return {}

    def initial(self, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
        """Start value of a parameter of `modules`, from name and seed alone; on the CPU."""
        raise NotImplementedError(f"{type(self).__name__} has no start value for {name}")


def visit_hashes(batch: Batch, purpose: str) -> list[int]:
    """Return, for choices about samples, a number below 2**64 for each sample's visit, the same in every topology."""
    draws = zip(batch.sample_ids, batch.logit.tolist(), strict=True)
    return [xxhash.xxh3_64_intdigest(f"{purpose}/{identity}/{logit!r}".encode()) for identity, logit in draws]


def visit_chosen(batch: Batch, purpose: str, share: float) -> Tensor:
    """Find which samples a share of the visits is, bool (b,)."""
    return torch.tensor([value < share * 2**64 for value in visit_hashes(batch, purpose)], dtype=torch.bool)


class StepLoss:
    """An objective's losses as `ParallelModel` takes them: row 0 is the weighted sum times `scale`; where there are
    several parts, a row of each follows, as it is."""

    def __init__(self, objective: Objective, scale: float = 1.0):
        self.objective, self.scale = objective, scale
        self.rows = 1 + (len(objective.parts) if len(objective.parts) > 1 else 0)

    def __call__(self, outputs: Outputs, targets: Mapping[str, Tensor]) -> Tensor:
        losses, total = self.objective.losses(outputs, targets), None
        for name, weight in self.objective.parts.items():
            part: Any = losses[name] if weight == 1 else losses[name] * weight
            total = part if total is None else total + part
        assert total is not None
        reported = [losses[name].detach() for name in self.objective.parts] if self.rows > 1 else []
        return torch.stack([total if self.scale == 1 else total * self.scale, *reported])
