"""A tiny Z-Image: its shape, random values, inputs, and diffusers' class with the same values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sana_pipe.train.models.zimage_config import ZImageConfig

TINY = ZImageConfig(
    in_channels=4,
    dim=32,
    n_layers=3,
    n_refiner_layers=2,
    n_heads=2,
    n_kv_heads=2,
    cap_feat_dim=24,
    axes_dims=(4, 6, 6),
    axes_lens=(256, 64, 64),
)
"""Without a multiple of 32 tokens in the pictures of the tests, so that all paddings occur."""


def weights(shape: ZImageConfig = TINY, seed: int = 0) -> dict[str, Tensor]:
    """Values with which gates, scales and paddings show, and rounding stays small: with larger ones diffusers differs
    from itself by 1e-4 between batches."""
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for name, sides in shape.shapes().items():
        drawn = torch.randn(sides, generator=generator)
        values[name] = 1 + 0.2 * drawn if "norm" in name or name == "cap_embedder.0.weight" else 0.05 * drawn
    return values


def save(folder: Path, shape: ZImageConfig = TINY, seed: int = 0) -> dict[str, Tensor]:
    """A folder `transformer`, as diffusers reads it; returns the values."""
    values = weights(shape, seed)
    shape.save(values, folder / "transformer", torch.float32)
    return values


def reference(shape: ZImageConfig = TINY, seed: int = 0) -> Any:
    """diffusers' model with the values of `weights`."""
    from diffusers import ZImageTransformer2DModel

    config = {name: value for name, value in shape.to_dict().items() if not name.startswith("_")}
    model = ZImageTransformer2DModel(**config)
    model.load_state_dict(weights(shape, seed))
    return model


def inputs(
    height: int, width: int, lengths: Sequence[int], rows: int | None = None, shape: ZImageConfig = TINY, seed: int = 0
) -> dict[str, Tensor]:
    """A microbatch with captions of these lengths. rows: that they are padded to."""
    generator = torch.Generator().manual_seed(seed)
    rows, count = rows or max(lengths), len(lengths)
    mask = torch.arange(rows) < torch.tensor(lengths)[:, None]
    captions = torch.randn(count, rows, shape.cap_feat_dim, generator=generator) * mask[..., None]
    return {
        "latents": torch.randn(count, shape.in_channels, height, width, generator=generator),
        "captions": captions,
        "mask": mask,
        "timesteps": torch.linspace(0, 1000, count + 2)[1:-1].floor(),
    }


def predicted(model: Any, batches: Sequence[dict[str, Tensor]]) -> list[Tensor]:
    """What diffusers' model says of batches, all samples in one list, by our conventions of time and sign."""
    latents = [sample[:, None] for batch in batches for sample in batch["latents"]]
    pairs = (pair for batch in batches for pair in zip(batch["captions"], batch["mask"], strict=True))
    captions = [rows[shown] for rows, shown in pairs]
    times = (1000 - torch.cat([batch["timesteps"] for batch in batches])) / 1000
    flat = iter(model(latents, times, captions, return_dict=False)[0])
    return [torch.stack([-next(flat)[:, 0] for _ in batch["latents"]]) for batch in batches]
