"""Latents: what the VAE makes of a picture at its target resolution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from sana_pipe.data.cache.encodings import Encoding
from sana_pipe.data.encoding.config import EncodeConfig
from sana_pipe.data.signals import Encoders, PictureSignal
from sana_pipe.data.sources.config import DataConfig

if TYPE_CHECKING:
    from sana_pipe.data.encoders.vae import ExactComparison, Footprint, LatentEncoder


@dataclass(frozen=True)
class LatentEncoding(PictureSignal):
    """Values of a latent: bf16((encoder(image in [-1, 1]) - shift_factor) * scaling_factor in fp32), shape (channels,
    H/f, W/f). The defaults are Sana's VAE, and do not enter ids."""

    kind: ClassVar[str] = "latent"
    noun: ClassVar[str] = "images"
    section: ClassVar[str] = "vae"
    optional: ClassVar[bool] = False
    later: ClassVar[tuple[str, ...]] = ("shift_factor",)
    axes: ClassVar[tuple[str, ...]] = ("channels", "height", "width")
    weights: str = ""
    compression: int = 32
    channels: int = 32
    dtype: str = "fp32"
    scaling_factor: float = 0.41407
    shift_factor: float = 0.0
    tiling: bool = False

    def shape(self, height: int, width: int) -> tuple[int, ...]:
        return self.channels, height // self.compression, width // self.compression

    @classmethod
    def wanted(cls, encoders: Encoders, data: DataConfig, encode: EncodeConfig) -> Self:
        from sana_pipe.data.encoders.vae import describe_vae
        from sana_pipe.data.images.decoding import pixel_fields

        return cls(**describe_vae(encoders.vae), **pixel_fields(data), storage=encode.storage.latent)

    def model(self, encoders: Encoders) -> dict[str, Any]:
        from sana_pipe.data.encoders.vae import describe_vae

        return describe_vae(encoders.vae)

    def settings(self, encoders: Encoders, data: DataConfig, encode: EncodeConfig) -> Mapping[str, tuple[Any, Any]]:
        vae = encoders.vae
        return {
            "vae.dtype": (vae.dtype, self.dtype),
            "data.background": (data.background, self.background),
            "encode.storage.latent": (encode.storage.latent, self.storage),
        }

    def encoder(self, encoders: Encoders, device: Any) -> LatentEncoder:
        from sana_pipe.data.encoders.vae import LatentEncoder

        return LatentEncoder.load(encoders.vae, device)

    def provenance(self, encoders: Encoders) -> dict[str, Any]:
        from sana_pipe.data.encoders.frozen import provenance_of

        return provenance_of(encoders.vae)

    def comparison(self, encoders: Encoders) -> ExactComparison | None:
        from sana_pipe.data.encoders.vae import ExactComparison

        return None if encoders.vae.dtype == "fp32" else ExactComparison(encoders.vae)

    def footprint(self, encoders: Encoders, height: int, width: int) -> Footprint:
        from sana_pipe.data.encoders.vae import footprint

        return footprint(encoders.vae, height, width)


def compression(encodings: Sequence[Encoding]) -> int:
    """Pixels of a side that the sides of buckets are multiples of: those of a latent's position."""
    return next(encoding.compression for encoding in encodings if isinstance(encoding, LatentEncoding))
