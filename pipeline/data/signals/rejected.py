"""Rejected pictures of preference pairs: what the VAE makes of them at the resolution of the chosen picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np

from sana_pipe.data.encoding.config import EncodeConfig
from sana_pipe.data.signals import Encoders
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.sources.config import DataConfig


@dataclass(frozen=True)
class RejectedEncoding(LatentEncoding):
    """Values as those of a latent, of the picture that `data.pictures.rejected` finds. A record has the key of this
    picture's latent, so that snapshots tell whether they share a picture, chosen or rejected."""

    kind: ClassVar[str] = "rejected"
    noun: ClassVar[str] = "rejected pictures"
    optional: ClassVar[bool] = True
    weighted: ClassVar[bool] = True

    @property
    def picture(self) -> str:
        return self.kind

    @cached_property
    def _latent(self) -> LatentEncoding:
        return LatentEncoding(**self.values())

    def key(self, image_digest: bytes, height: int, width: int, crop: str = "") -> bytes:
        return self._latent.key(image_digest, height, width, crop)

    def keys(self, digests: np.ndarray, sizes: Sequence[tuple[int, int]], which: np.ndarray) -> np.ndarray:
        return self._latent.keys(digests, sizes, which)

    @classmethod
    def wanted(cls, encoders: Encoders, data: DataConfig, encode: EncodeConfig) -> Self | None:  # type: ignore[override]
        if data.pictures.rejected is None:
            return None
        return cls(**LatentEncoding.wanted(encoders, data, encode).values())

    def settings(self, encoders: Encoders, data: DataConfig, encode: EncodeConfig) -> Mapping[str, tuple[Any, Any]]:
        return {}

    def comparison(self, encoders: Encoders) -> None:
        return None
