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
    import numpy as np

    from sana_pipe.data.encoders.imported import ImportedLatents
    from sana_pipe.data.encoders.vae import ExactComparison, Footprint


@dataclass(frozen=True)
class LatentEncoding(PictureSignal):
    """Values of a latent: bf16((encoder(image in [-1, 1]) - shift_factor) * scaling_factor in fp32), shape (channels,
    H/f, W/f). The defaults are Sana's VAE, and do not enter ids."""

    kind: ClassVar[str] = "latent"
    noun: ClassVar[str] = "images"
    section: ClassVar[str] = "vae"
    optional: ClassVar[bool] = False
    later: ClassVar[tuple[str, ...]] = ("shift_factor", "imported")
    axes: ClassVar[tuple[str, ...]] = ("channels", "height", "width")
    weights: str = ""
    compression: int = 32
    channels: int = 32
    dtype: str = "fp32"
    scaling_factor: float = 0.41407
    shift_factor: float = 0.0
    tiling: bool = False
    imported: float | None = None
    """The number that latents of others were multiplied by; None: they are encoded here."""

    def shape(self, height: int, width: int) -> tuple[int, ...]:
        return self.channels, height // self.compression, width // self.compression

    @classmethod
    def wanted(cls, encoders: Encoders, data: DataConfig, encode: EncodeConfig) -> Self:
        from sana_pipe.data.encoders.vae import describe_vae
        from sana_pipe.data.images.decoding import pixel_fields

        made = describe_vae(encoders.vae)
        if encoders.vae.imported is not None:
            return cls(**made, decoder="", storage=encode.storage.latent, imported=encoders.vae.imported)
        return cls(**made, **pixel_fields(data), storage=encode.storage.latent)

    def model(self, encoders: Encoders) -> dict[str, Any]:
        from sana_pipe.data.encoders.vae import describe_vae

        return describe_vae(encoders.vae)

    def settings(self, encoders: Encoders, data: DataConfig, encode: EncodeConfig) -> Mapping[str, tuple[Any, Any]]:
        vae = encoders.vae
        return {
            "vae.dtype": (vae.dtype, self.dtype),
            "vae.imported": (vae.imported, self.imported),
            "data.background": (data.background, self.background if self.imported is None else data.background),
            "encode.storage.latent": (encode.storage.latent, self.storage),
        }

    @property
    def of_others(self) -> ImportedLatents:
        """The encoder's place for latents of others: brings them to this encoding's scale."""
        from sana_pipe.data.encoders.imported import ImportedLatents

        assert self.imported is not None
        shift = self.shift_factor if self.imported == 1 else 0.0
        return ImportedLatents(self.scaling_factor / self.imported, shift)

    def pixels(self, data: bytes, size: tuple[int, int], max_pixels: int) -> np.ndarray:
        if self.imported is None:
            return super().pixels(data, size, max_pixels)
        from sana_pipe.data.encoders import imported
        from sana_pipe.data.images.decoding import ImageReject

        try:
            latent = imported.parsed(data)
        except imported.LatentReject as reject:
            raise ImageReject(str(reject)) from None
        if latent.shape != self.shape(*size):
            raise ImageReject(f"has the shape {latent.shape}, and the VAE's latents have {self.shape(*size)}")
        return latent

    def encoder(self, encoders: Encoders, device: Any) -> Any:
        if self.imported is not None:
            return self.of_others
        from sana_pipe.data.encoders.vae import LatentEncoder

        return LatentEncoder.load(encoders.vae, device)

    def provenance(self, encoders: Encoders) -> dict[str, Any]:
        from sana_pipe.data.encoders.frozen import provenance_of

        return provenance_of(encoders.vae)

    def comparison(self, encoders: Encoders) -> ExactComparison | None:
        from sana_pipe.data.encoders.vae import ExactComparison

        return None if encoders.vae.dtype == "fp32" or self.imported is not None else ExactComparison(encoders.vae)

    def footprint(self, encoders: Encoders, height: int, width: int) -> Footprint | None:
        if self.imported is not None:
            return None
        from sana_pipe.data.encoders.vae import footprint

        return footprint(encoders.vae, height, width)


def are_imported(encodings: Sequence[Encoding]) -> bool:
    """Return whether the latents come from others. Their buckets are then the sizes that occur."""
    return any(isinstance(one, LatentEncoding) and one.imported is not None for one in encodings)


def compression(encodings: Sequence[Encoding]) -> int:
    """Pixels of a side that the sides of buckets are multiples of: those of a latent's position."""
    return next(encoding.compression for encoding in encodings if isinstance(encoding, LatentEncoding))
