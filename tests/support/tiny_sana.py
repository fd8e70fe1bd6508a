"""A small Sana in which every parameter matters, and inputs for it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from sana_pipe.train.models.sana import SanaTransformer
from sana_pipe.train.models.sana_config import SanaConfig
from sana_pipe.train.models.sana_files import WeightFiles

TINY = SanaConfig(
    in_channels=4,
    out_channels=4,
    num_attention_heads=4,
    attention_head_dim=8,
    num_layers=3,
    num_cross_attention_heads=2,
    cross_attention_head_dim=16,
    cross_attention_dim=32,
    caption_channels=24,
    sample_size=8,
)


def make(config: SanaConfig, seed: int = 1) -> SanaTransformer:
    """A model in which every parameter matters: no zero biases, no caption norm of 0.01."""
    model = SanaTransformer.from_scratch(config, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name == "caption_norm.weight":
                parameter.fill_(1.0)
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def inputs(shape: tuple[int, int], seed: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(3, 4, *shape, generator=generator)
    captions = torch.randn(3, 10, 24, generator=generator)
    mask = torch.arange(10)[None] < torch.tensor([[5], [0], [10]])  # the second sample masks everything
    return latents, captions, mask, torch.tensor([873.0, 1.0, 500.0])


def load_weights(folder: Path, variant: str | None = None) -> tuple[SanaConfig, dict[str, Tensor]]:
    """The configuration, and every parameter in the file's dtype and our layout."""
    files = WeightFiles(folder, variant)
    config = SanaConfig.from_dict(files.config.to_dict())
    return config, {name: files.read(name, [0] * len(shape), shape) for name, shape in files.shapes.items()}


def load_transformer(
    folder: Path, dtype: torch.dtype | None = torch.float32, variant: str | None = None
) -> SanaTransformer:
    """The model in a folder; `dtype=None` keeps the file's."""
    config, weights = load_weights(folder, variant)
    copies = {name: value.to(dtype=dtype, copy=True) for name, value in weights.items()}
    model = SanaTransformer.on_meta(config)
    model.load_state_dict(copies, assign=True)
    return model.requires_grad_(True)
