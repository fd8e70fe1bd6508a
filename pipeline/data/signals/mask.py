"""Masks: how much of each position of a latent is to be learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from sana_pipe.data.encoding.config import EncodeConfig
from sana_pipe.data.signals import Encoders, PictureEncoder, PictureSignal
from sana_pipe.data.sources.config import DataConfig


@dataclass(frozen=True)
class _Averages:
    """Means of squares of pixels."""

    side: int

    def encode(self, images: np.ndarray) -> np.ndarray:
        import torch

        from sana_pipe.data.encoders.frozen import bf16_bits

        gray = images @ np.array([299, 587, 114], np.float64) / 255_000
        count, height, width = gray.shape
        squares = gray.reshape(count, height // self.side, self.side, width // self.side, self.side)
        return bf16_bits(torch.from_numpy(squares.mean((2, 4)))[:, None])


@dataclass(frozen=True)
class MaskEncoding(PictureSignal):
    """Values from 0 to 1: the mean brightness (ITU-R BT.601) of the pixels of each position of the latent, (1, H/f,
    W/f). made: `alpha`: of the transparency of the sample's picture; "": of the mask's file, or of its transparency
    where its colours are flat (`images/mask_decoder.py`)."""

    kind: ClassVar[str] = "mask"
    noun: ClassVar[str] = "masks"
    section: ClassVar[str] = "vae"
    axes: ClassVar[tuple[str, ...]] = ("channels", "height", "width")
    blank: ClassVar[int] = 255
    compression: int = 32
    made: str = ""

    @property
    def picture(self) -> str:
        return "" if self.made else self.kind

    def shape(self, height: int, width: int) -> tuple[int, ...]:
        return 1, height // self.compression, width // self.compression

    @classmethod
    def wanted(cls, encoders: Encoders, data: DataConfig, encode: EncodeConfig) -> Self | None:
        from sana_pipe.data.images.decoding import pixel_fields

        given = data.pictures.mask
        if given is None:
            return None
        return cls(**pixel_fields(data), **_compression(encoders), made=given.made or "")

    def model(self, encoders: Encoders) -> dict[str, Any]:
        return _compression(encoders)

    def encoder(self, encoders: Encoders, device: Any) -> PictureEncoder:
        return _Averages(self.compression)

    def pixels(self, data: bytes, size: tuple[int, int], max_pixels: int) -> np.ndarray:
        from sana_pipe.data.images import decoding

        gray = (decoding.load_alpha if self.made else decoding.load_mask)(data, size, max_pixels)
        if gray is None:
            return super().pixels(data, size, max_pixels)
        return np.repeat(gray[..., None], 3, axis=2)


def _compression(encoders: Encoders) -> dict[str, Any]:
    from sana_pipe.base.hub import resolve
    from sana_pipe.data.encoders.vae import vae_shape

    return {"compression": vae_shape(resolve(encoders.vae))[0]}
