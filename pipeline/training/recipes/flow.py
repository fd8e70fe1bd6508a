"""Sana's recipe: predict the flow of noised latents (`pipeline.models.objective`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pipeline.config import FlowConfig
from pipeline.loader.loader import Batch, unpack
from pipeline.models.objective import FlowMatching
from pipeline.parallel.microbatch import Microbatch, Outputs
from pipeline.training.recipes import Recipe, ToDevice


class Flow(Recipe):
    """Mean squared error of the flow."""

    parts: Mapping[str, float] = {"flow": 1.0}

    def __init__(self, config: FlowConfig):
        self.objective = FlowMatching(config)

    def prepare(self, batch: Batch, place: ToDevice, dtype: torch.dtype, level: float | None = None) -> Microbatch:
        """Noise and interpolation stay in fp32; latents and captions are cast to the compute dtype here, the timestep
        stays fp32."""
        latents, noise = place(batch.latents).float(), place(batch.noise)
        objective = self.objective
        levels = objective.sigmas(batch.logit) if level is None else objective.at(level, len(latents))
        sigma, timesteps = map(place, levels)
        captions, mask = place(batch.captions), place(batch.mask)
        # An empty caption attends to its padding, as if nothing were masked: then padding rows are needed.
        if batch.cu_seqlens is not None and not bool(batch.mask.any(1).all()):
            captions = unpack(captions, place(batch.cu_seqlens), mask)
        inputs = {
            "latents": objective.noised(latents, noise, sigma).to(dtype),
            "captions": captions.to(dtype),
            "mask": mask,
            "timesteps": timesteps,
        }
        return Microbatch(inputs, {"flow": objective.target(latents, noise)})

    def losses(self, outputs: Outputs, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"flow": self.objective.loss(outputs.prediction, targets["flow"])}
