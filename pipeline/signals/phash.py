"""Perceptual hashes: near-duplicate pictures differ in few bits, other pictures in about half of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from pipeline.config import Config
from pipeline.images.decoding import pixel_fields
from pipeline.images.perceptual_hash import LENGTH, RULE, hashes
from pipeline.signals import PictureEncoder, PictureSignal


class _Hasher:
    def encode(self, images: np.ndarray) -> np.ndarray:
        return hashes(images)


@dataclass(frozen=True)
class HashRecipe(PictureSignal):
    """Values of a hash: `hashes` of `pipeline.images.perceptual_hash` of the picture at its target resolution, 16
    words of bits, the quality and 32 words of colours."""

    kind: ClassVar[str] = "phash"
    noun: ClassVar[str] = "hashes"
    section: ClassVar[str] = "version of sana-pipe"
    beside: ClassVar[bool] = True
    axes: ClassVar[tuple[str, ...]] = ("words",)
    bf16: ClassVar[bool] = False
    rule: str = ""

    def shape(self, height: int, width: int) -> tuple[int, ...]:
        return (LENGTH,)

    @classmethod
    def wanted(cls, config: Config) -> Self | None:
        return cls(**pixel_fields(config.data), rule=RULE) if cls.kind in config.encode.signals else None

    def model(self, config: Config) -> dict[str, Any]:
        return {"rule": RULE}

    def encoder(self, config: Config, device: Any) -> PictureEncoder:
        return _Hasher()
