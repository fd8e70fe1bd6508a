"""Sana's training objective: flow matching with shifted logit-normal times, in float32.

NVlabs' schedule exactly: under another one, or rounded to bf16, a model is trained on noise levels that the sampler
never visits. diffusers' scripts differ in three points (float timesteps, a descending table, bf16 sigmas). 1000 levels;
where 1000 sigma is a whole number, the trainer's double arithmetic sometimes falls one timestep short (at shift 3:
entries 100 and 700 of the table); here the exact value is taken. The caller draws the random numbers.

Source: NVlabs/Sana `gaussian_diffusion.py`, `respace.py`; arXiv 2403.03206 (times and shift), arXiv 2410.10629 (Sana).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sana_pipe.train.models.config import FlowConfig

TIMESTEPS = 1000


def equidistant(count: int) -> list[float]:
    """The noise levels of a validation: the middles of `count` equal parts of [0, 1]."""
    return [(i + 0.5) / count for i in range(count)]


class FlowMatching:
    """x_t = (1 - sigma) x_0 + sigma eps; the model predicts v = eps - x_0; plain mean squared error.

    sigma comes from the table sigma'_i = s sigma_i / (1 + (s - 1) sigma_i), sigma_i = i/1000, i = 0..999, with s the
    flow shift: logit-normal first, then shifted. No weighting over timesteps.
    """

    def __init__(self, config: FlowConfig):
        self.config = config
        level = torch.arange(TIMESTEPS, dtype=torch.float64) / TIMESTEPS
        shifted = config.shift * level / (1 + (config.shift - 1) * level)
        self.table = shifted.float()
        # the margin corrects whole numbers that rounding left just below; all others are at least 1/(1000 shift) away
        self.timestep_table = (shifted * TIMESTEPS + 1e-9).floor().float()

    def sigmas(self, logit: Tensor) -> tuple[Tensor, Tensor]:
        """Noise levels of a batch.

        Args:
            logit: (B,) float32 standard normal draws.

        Returns:
            sigma (B,) float32 in [0, 1), and timesteps (B,) float32 = floor(1000 sigma), the model's input;
            on the device of `logit`. A draw selects the same entry on every device: the index is computed on the CPU
            in float64.
        """
        cpu = logit.detach().to("cpu", torch.float64)
        uniform = torch.sigmoid(cpu)
        index = (uniform * TIMESTEPS).long().clamp_(0, TIMESTEPS - 1)
        return self.table[index].to(logit.device), self.timestep_table[index].to(logit.device)

    def at(self, level: float, count: int) -> tuple[Tensor, Tensor]:
        """Sigma and timesteps (count,) as `sigmas` returns them, for one noise level in [0, 1), on the CPU."""
        return torch.full((count,), level), torch.full((count,), float(math.floor(level * TIMESTEPS + 1e-9)))

    def noised(self, latents: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
        """(B, C, h, w) latents and noise of any floating dtype, sigma (B,) -> (B, C, h, w) float32."""
        level = sigma.float().view(-1, *[1] * (latents.ndim - 1))
        return (1 - level) * latents.float() + level * noise.float()

    def target(self, latents: Tensor, noise: Tensor) -> Tensor:
        """The target of the prediction, noise - latents, float32."""
        return noise.float() - latents.float()

    def loss(
        self,
        prediction: Tensor,
        target: Tensor,
        weights: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Mean squared error of each sample, (B,) of `dtype`. Samples of one batch share a shape, so their mean over
        the global batch is the mean over all elements.

        Args:
            weights: (B, 1, h, w) float32, not negative: of each cell, for all channels. The mean of a sample is then
                sum(w e) / sum(w), so that its level does not depend on the area of the weights; 0 if all are 0.

        Raises:
            ValueError: shapes differ (broadcasting would hide it).
        """
        if prediction.shape != target.shape:
            raise ValueError(f"prediction {tuple(prediction.shape)} and target {tuple(target.shape)} differ in shape")
        errors = (prediction.to(dtype) - target.to(dtype)).square()
        if weights is None:
            return errors.flatten(1).mean(1)
        if weights.shape != (len(target), 1, *target.shape[2:]):
            raise ValueError(f"weights {tuple(weights.shape)} are not those of cells of {tuple(target.shape)}")
        total = weights.sum((1, 2, 3)) * target.shape[1]
        return (errors * weights).sum((1, 2, 3)) / total.where(total > 0, 1)
