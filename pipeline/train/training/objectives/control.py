"""Sana's objective with a control picture: `train.controlnet`.

The model reads the latents of the control next to the noised latents. Dropped controls are zeros; samples are drawn by
a hash of the visit's other draws, so that every topology and every resume draws the same ones. A validation drops none,
and also measures the loss with the controls of other samples: it rises above the loss as the model learns to follow.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from sana_pipe.data.loader.loader import Batch
from sana_pipe.train.models.config import FlowConfig
from sana_pipe.train.parallel.microbatch import Microbatch
from sana_pipe.train.training.config import MaskConfig
from sana_pipe.train.training.objectives import ToDevice, visit_chosen
from sana_pipe.train.training.objectives.flow import Flow


class Controlled(Flow):
    """The flow, with the samples' control records as the model's input `control`. drop: share that is zeros."""

    pictures = ("control",)
    contrast = "shuffled_control"

    def __init__(self, flow: FlowConfig, drop: float = 0.0, mask: MaskConfig | None = None):
        super().__init__(flow, mask)
        self.drop = drop

    def prepare(self, batch: Batch, place: ToDevice, dtype: torch.dtype, level: float | None = None) -> Microbatch:
        inputs, targets, *_ = super().prepare(batch, place, dtype, level)
        control = place(batch.pictures[self.pictures[0]]).to(dtype)
        if self.drop and level is None:
            control = control.masked_fill(place(visit_chosen(batch, "control", self.drop))[:, None, None, None], 0)
        return Microbatch({**inputs, "control": control}, targets)

    def contrasted(self, batch: Batch) -> Batch:
        control = self.pictures[0]
        return replace(batch, pictures={**batch.pictures, control: batch.pictures[control].roll(1, 0)})
