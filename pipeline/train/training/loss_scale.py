"""Dynamic loss scale, which keeps fp16 gradients from underflow.

A step with a non-finite gradient is skipped and the scale halved; after 2000 good steps it is doubled (constants of
torch.amp.GradScaler; arXiv 1710.03740).
Why not torch's GradScaler: it looks for overflow in each process's local gradients, so processes could decide
differently, and it does not support DTensors. Here the norm of the whole gradient decides, the same everywhere.
Price: in fp16 the host waits for the verdict of every step before the optimizer's update.
"""

from __future__ import annotations

import torch
from torch import Tensor

INITIAL = 2.0**16
PATIENCE = 2000


class LossScale:
    """The scale and its counters; constant 1 for every precision but fp16.

    Attributes:
        dynamic: whether the scale changes.
        state: 0-d tensors for the checkpoint, changed in place: `scale`, `good_steps` (since the last change),
            `skipped_steps` (of the whole run). Empty if not dynamic.
    """

    def __init__(self, dynamic: bool):
        self.dynamic = dynamic
        self.state: dict[str, Tensor] = {}
        if dynamic:
            self.state["scale"] = torch.tensor(INITIAL, dtype=torch.float64)
            self.state["good_steps"] = torch.tensor(0)
            self.state["skipped_steps"] = torch.tensor(0)

    @property
    def value(self) -> float:
        return self.state["scale"].item() if self.dynamic else 1.0

    @property
    def skipped(self) -> int:
        return int(self.state["skipped_steps"].item()) if self.dynamic else 0

    def succeeded(self) -> None:
        """The gradient of a step was finite."""
        if not self.dynamic:
            return
        self.state["good_steps"] += 1
        if self.state["good_steps"] >= PATIENCE:
            self.state["scale"] *= 2
            self.state["good_steps"].zero_()

    def overflowed(self) -> bool:
        """The gradient of a step was not finite. Returns whether the step is to be skipped; False if the scale is 1
        already, so that a smaller scale cannot help."""
        if self.value <= 1:
            return False
        self.state["scale"] /= 2
        self.state["good_steps"].zero_()
        self.state["skipped_steps"] += 1
        return True
