"""Control pictures: what the VAE makes of a sample's control picture, or of the edges of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from sana_pipe.base.errors import UserError
from sana_pipe.data.encoding.config import EncodeConfig
from sana_pipe.data.signals import Encoders
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.sources.config import DataConfig

CANNY = "canny-100-200"
"""OpenCV's Canny with these thresholds, which most ControlNets of edges were trained with."""


@dataclass(frozen=True)
class ControlEncoding(LatentEncoding):
    """Values as those of a latent. made: how the picture is made from the sample's; "": it is a picture of its own."""

    kind: ClassVar[str] = "control"
    noun: ClassVar[str] = "controls"
    optional: ClassVar[bool] = True
    made: str = ""

    @property
    def picture(self) -> str:
        return "" if self.made else self.kind

    @classmethod
    def wanted(cls, encoders: Encoders, data: DataConfig, encode: EncodeConfig) -> Self | None:  # type: ignore[override]
        given = data.pictures.control
        if given is None:
            return None
        if given.made is not None:
            _edges()  # refused before anything is read
        latent = LatentEncoding.wanted(encoders, data, encode)
        return cls(**latent.values(), made="" if given.made is None else CANNY)

    def settings(self, encoders: Encoders, data: DataConfig, encode: EncodeConfig) -> Mapping[str, tuple[Any, Any]]:
        return {}

    def comparison(self, encoders: Encoders) -> None:
        return None

    def pixels(self, data: bytes, size: tuple[int, int], max_pixels: int) -> np.ndarray:
        picture = super().pixels(data, size, max_pixels)
        return np.repeat(_edges()(picture, 100, 200)[..., None], 3, axis=2) if self.made else picture


def _edges() -> Any:
    """OpenCV's function.

    Raises:
        UserError: it is not installed.
    """
    try:
        import cv2
    except ImportError:
        raise UserError(
            "data.pictures.control.made: canny needs OpenCV", fix="pip install 'sana-pipe[control]'"
        ) from None
    return cv2.Canny
