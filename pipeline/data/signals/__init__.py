"""Signals: the kinds of records that a cache holds, one module each.

A signal is an encoding (`cache.encodings`: name, key, shape, storage) and what makes its records. `encodings` gives
those that a configuration asks for. A new kind is a module here and its section of the configuration; nothing else
names it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from sana_pipe.data.cache.encodings import CaptionEncoding, Encoding, PictureEncoding, encoding_classes
from sana_pipe.data.encoders.config import TextConfig, VaeConfig
from sana_pipe.data.encoding.config import EncodeConfig
from sana_pipe.data.sources.config import DataConfig

if TYPE_CHECKING:
    import numpy as np

    from sana_pipe.data.encoders.vae import Footprint


@dataclass(frozen=True)
class Encoders:
    """The sections of the configuration that name the frozen models."""

    vae: VaeConfig
    text: TextConfig


class PictureEncoder(Protocol):
    """`PictureSignal.pixels` of b pictures, uint8 (b, H, W, 3), to records, uint16 (b, *shape)."""

    def encode(self, images: np.ndarray) -> np.ndarray: ...


class CaptionEncoder(Protocol):
    """Normalised captions to bf16 bits, uint16 (rows, width) each; `null` gives the null record and its valid rows."""

    def encode(self, captions: list[str]) -> list[np.ndarray]: ...

    def null(self) -> tuple[np.ndarray, int]: ...


class Comparison(Protocol):
    """Compares the first outputs of an encoder with those of another form of it, after a unit."""

    def add(self, batch: Any, outputs: Any) -> None: ...

    @property
    def ready(self) -> bool: ...

    def line(self, device: Any) -> str: ...


class Signal(ABC):
    """An encoding with what makes its records.

    Attributes:
        noun: what progress lines and reports call its records.
        section: of the configuration that names its model, for messages.
        optional: whether records exist only where a configuration asks for them.
    """

    noun: ClassVar[str]
    section: ClassVar[str]
    optional: ClassVar[bool] = True

    @classmethod
    @abstractmethod
    def wanted(cls, encoders: Encoders, data: DataConfig, encode: EncodeConfig) -> Self | None:
        """Return the encoding that a configuration asks for; None: no records of this kind.

        Raises:
            UserError: its model cannot be read.
        """

    @abstractmethod
    def model(self, encoders: Encoders) -> dict[str, Any]:
        """Return the fields of the encoding that the configured model decides, read from its files."""

    def settings(self, encoders: Encoders, data: DataConfig, encode: EncodeConfig) -> Mapping[str, tuple[Any, Any]]:
        """Return the settings that decide the values: name -> (as configured, as in this encoding)."""
        return {}

    @abstractmethod
    def encoder(self, encoders: Encoders, device: Any) -> Any:
        """Load what makes the records: a `PictureEncoder` or a `CaptionEncoder`."""

    def provenance(self, encoders: Encoders) -> dict[str, Any]:
        """Say where the model comes from, for the provenance of units."""
        return {}

    def comparison(self, encoders: Encoders) -> Comparison | None:
        """Return what compares the first unit's records with exact ones; None: they are exact."""
        return None


class PictureSignal(Signal, PictureEncoding):
    """Records of pictures.

    Attributes:
        shares_pixels: whether the records are made with latents, from the same pixels, by an encoder that loads no
            model; others are made in a pass of their own, since a process holds one model at a time.
        blank: the value of all pixels of a picture that a sample lacks and need not have.
    """

    shares_pixels: ClassVar[bool] = False
    blank: ClassVar[int] = 0

    def pixels(self, data: bytes, size: tuple[int, int], max_pixels: int) -> np.ndarray:
        """Decode what the encoder is given of a picture: uint8 (H, W, 3).

        Args:
            data: the file. size: (height, width) in pixels. max_pixels: as in `decoding.load`.

        Raises:
            ImageReject: as in `decoding.load`.
        """
        from sana_pipe.data.images import decoding

        return decoding.load(data, size, self.background, max_pixels, self.decoder)

    def footprint(self, encoders: Encoders, height: int, width: int) -> Footprint | None:
        """Return what the encoder needs for pictures of height x width pixels; None: no memory of a GPU."""
        return None


class CaptionSignal(Signal, CaptionEncoding):
    """Records of captions."""

    @abstractmethod
    def encoder(self, encoders: Encoders, device: Any) -> CaptionEncoder: ...


def encodings(encoders: Encoders, data: DataConfig, encode: EncodeConfig) -> list[Encoding]:
    """Return the encodings that a configuration asks for: of pictures, the latents first, then of captions.

    Raises:
        UserError: a model cannot be read.
    """
    every = [each for each in encoding_classes() if issubclass(each, Signal)]
    every.sort(key=lambda each: (issubclass(each, CaptionEncoding), each.optional, each.kind))
    return [encoding for each in every if (encoding := each.wanted(encoders, data, encode)) is not None]
