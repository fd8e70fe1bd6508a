"""Layers that several transformers have, with the parameter names of diffusers."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

SINUSOID_WIDTH = 256
"""Width of a timestep's embedding before its layers."""
_MAX_PERIOD = 10_000.0


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension; statistics in float32, result in the weight's dtype."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        full = x.float()
        full = full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + self.eps)
        return full.to(self.weight.dtype) * self.weight


def timestep_sinusoid(timesteps: Tensor) -> Tensor:
    """(B,) float32 in [0, 1000) -> (B, 256) float32: 128 cosines, then 128 sines, periods up to 2 pi 10^4.

    Raises:
        TypeError: not float32. bf16 has 8 bits: 873 becomes 872, which costs nine times the gradient error of all
            the rest of a bf16 model.
    """
    if timesteps.dtype != torch.float32:
        raise TypeError(
            f"timesteps arrive as {timesteps.dtype} and must be float32: something cast the model's inputs "
            "(FSDP2: MixedPrecisionPolicy(cast_forward_inputs=False) on the root)"
        )
    half = SINUSOID_WIDTH // 2
    steps = torch.arange(half, dtype=torch.float32, device=timesteps.device)
    frequency = torch.exp(-math.log(_MAX_PERIOD) * steps / half)
    angle = timesteps[:, None] * frequency[None]
    return torch.cat([angle.cos(), angle.sin()], dim=-1)
