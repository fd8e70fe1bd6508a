"""The data between a training step and a parallel model: inputs and targets, outputs, losses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from sana_pipe.train.kernels.sample_dropout import Rows

REFERENCE = "reference"
"""Name of the target that is the base's prediction."""


class Microbatch(NamedTuple):
    """The model's inputs, and the targets (b, ...) that its output is compared with, by name; all on the device.
    reference: inputs for which the base gives one more target, `REFERENCE`, without gradients.
    rows: of the masks of an adapter's dropout; None: nothing is dropped."""

    inputs: Mapping[str, Tensor]
    targets: Mapping[str, Tensor]
    reference: Mapping[str, Tensor] | None = None
    rows: Rows | None = None

    @property
    def samples(self) -> int:
        return len(next(iter(self.targets.values())))


class Outputs(NamedTuple):
    """The results of a forward pass, for a loss.

    prediction: (b, ...), the model's. taps: what blocks returned, by number. modules: those of `EXTRA`, by name.
    """

    prediction: Tensor
    taps: Mapping[int, Tensor]
    modules: Mapping[str, nn.Module]


class Loss(Protocol):
    """Losses (rows, b) fp32 of the samples, each a mean over the sample's values. Row 0 is differentiated, the others
    are reported."""

    rows: int

    def __call__(self, outputs: Outputs, targets: Mapping[str, Tensor]) -> Tensor: ...
