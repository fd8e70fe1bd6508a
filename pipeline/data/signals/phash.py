"""Perceptual hashes: near-duplicate pictures differ in few bits, other pictures in about half of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from sana_pipe.base.errors import CacheError
from sana_pipe.data.encoding.config import EncodeConfig
from sana_pipe.data.images.decoding import pixel_fields
from sana_pipe.data.images.perceptual_hash import LENGTH, RULE, WORDS, hashes
from sana_pipe.data.signals import Encoders, PictureEncoder, PictureSignal
from sana_pipe.data.sources.config import DataConfig

LENGTHS = {"dct-sign-2x128-1": WORDS + 1, RULE: LENGTH}
"""Words of a hash by its rule. Hashes of earlier rules can be read, but not compared: the first has no colours."""

ANEW = "sana-pipe encode --set 'encode.signals=[phash]' for each source and resolution (latents stay)"
"""Makes hashes that a cache lacks, or has by an earlier rule."""


class _Hasher:
    def encode(self, images: np.ndarray) -> np.ndarray:
        return hashes(images)


@dataclass(frozen=True)
class HashEncoding(PictureSignal):
    """Values of a hash: `hashes` of `images.perceptual_hash` of the picture at its target resolution, 16
    words of bits, the quality and 32 words of colours."""

    kind: ClassVar[str] = "phash"
    noun: ClassVar[str] = "hashes"
    section: ClassVar[str] = "version of sana-pipe"
    shares_pixels: ClassVar[bool] = True
    axes: ClassVar[tuple[str, ...]] = ("words",)
    bf16: ClassVar[bool] = False
    rule: str = ""

    @property
    def is_compared(self) -> bool:
        """True if this version compares such hashes."""
        return self.rule == RULE

    def shape(self, height: int, width: int) -> tuple[int, ...]:
        """Raises CacheError for a rule that this version does not know."""
        if self.rule not in LENGTHS:
            raise CacheError(
                f"hashes of the rule {self.rule!r}, which this version does not know",
                expected=" or ".join(LENGTHS),
                fix="read this cache with the version of sana-pipe that wrote it, or a newer one",
            )
        return (LENGTHS[self.rule],)

    @classmethod
    def wanted(cls, encoders: Encoders, data: DataConfig, encode: EncodeConfig) -> Self | None:
        return cls(**pixel_fields(data), rule=RULE) if cls.kind in encode.signals else None

    def model(self, encoders: Encoders) -> dict[str, Any]:
        return {"rule": RULE}

    def encoder(self, encoders: Encoders, device: Any) -> PictureEncoder:
        return _Hasher()
