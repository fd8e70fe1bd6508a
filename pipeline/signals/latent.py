"""Latents: what the VAE makes of a picture at its target resolution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pipeline.cache.recipes import PictureRecipe


@dataclass(frozen=True)
class LatentRecipe(PictureRecipe):
    """Values of a latent: bf16(encoder(image in [-1, 1]) * scaling_factor in fp32), shape (channels, H/f, W/f)."""

    kind: ClassVar[str] = "latent"
    axes: ClassVar[tuple[str, ...]] = ("channels", "height", "width")
    weights: str = ""
    compression: int = 32
    channels: int = 32
    dtype: str = "fp32"
    scaling_factor: float = 0.41407
    tiling: bool = False
    decoder: str = "pillow"
    resize: str = ""
    crop: str = ""
    background: tuple[int, int, int] = (255, 255, 255)
    tf32: bool = False
    channels_last: bool = False

    def shape(self, height: int, width: int) -> tuple[int, ...]:
        return self.channels, height // self.compression, width // self.compression
