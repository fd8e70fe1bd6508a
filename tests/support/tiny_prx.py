"""A tiny PRX for the batches of `workers.tiny_run`, and diffusers' class with values that let every part matter."""

from __future__ import annotations

from dataclasses import asdict

import torch
from diffusers import PRXTransformer2DModel

from sana_pipe.train.models.prx import PRX

TINY = PRX(in_channels=4, patch_size=1, context_in_dim=24, hidden_size=32, num_heads=4, depth=3, axes_dim=(4, 4))


def of_diffusers(spec: PRX = TINY) -> PRXTransformer2DModel:
    """diffusers' model with values that let every part matter."""
    torch.manual_seed(0)
    made = PRXTransformer2DModel(**{**asdict(spec), "axes_dim": list(spec.axes_dim)})
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.1)
    return made
