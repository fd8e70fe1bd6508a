"""Sana's objective: predict the flow of noised latents (`models.flow_matching`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sana_pipe.data.loader.loader import Batch, unpack
from sana_pipe.train.models.config import FlowConfig
from sana_pipe.train.models.flow_matching import FlowMatching
from sana_pipe.train.parallel.microbatch import Microbatch, Outputs
from sana_pipe.train.training.config import MaskConfig
from sana_pipe.train.training.objectives import Objective, ToDevice

_WEIGHTS = "weights"


class Flow(Objective):
    """Mean squared error of the flow; with a mask a weighted mean over the cells of each sample.

    A sample counts as much as any other, however large its masked area is; one whose weights are all 0 counts with
    loss 0. `train.numerics: nvlabs` changes nothing here: NVlabs' trainer has neither masks nor weights of noise
    levels.
    """

    parts: Mapping[str, float] = {"flow": 1.0}

    def __init__(self, config: FlowConfig, mask: MaskConfig | None = None):
        self.flow, self.mask = FlowMatching(config), mask
        self.pictures = (*self.pictures, *(("mask",) if mask is not None else ()))

    def prepare(self, batch: Batch, place: ToDevice, dtype: torch.dtype, level: float | None = None) -> Microbatch:
        """Noise and interpolation stay in fp32; latents and captions are cast to the compute dtype here, the timestep
        stays fp32."""
        latents, noise = place(batch.latents).float(), place(batch.noise)
        flow = self.flow
        levels = flow.sigmas(batch.logit) if level is None else flow.at(level, len(latents))
        sigma, timesteps = map(place, levels)
        captions, mask = place(batch.captions), place(batch.mask)
        # An empty caption attends to its padding, as if nothing were masked: then padding rows are needed.
        if batch.cu_seqlens is not None and not bool(batch.mask.any(1).all()):
            captions = unpack(captions, place(batch.cu_seqlens), mask)
        inputs = {
            "latents": flow.noised(latents, noise, sigma).to(dtype),
            "captions": captions.to(dtype),
            "mask": mask,
            "timesteps": timesteps,
        }
        targets = {"flow": flow.target(latents, noise)}
        if self.mask is not None:
            outside = self.mask.outside
            targets[_WEIGHTS] = outside + (1 - outside) * place(batch.pictures["mask"]).float()
        return Microbatch(inputs, targets)

    def losses(self, outputs: Outputs, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"flow": self.flow.loss(outputs.prediction, targets["flow"], targets.get(_WEIGHTS))}
