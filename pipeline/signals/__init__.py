"""Signals: the kinds of records that a cache holds, one module each.

A signal is a recipe (`pipeline.cache.recipes`: name, key, shape, storage) and what makes its records. `recipes` gives
those that a configuration asks for. A new kind is a module here and its section of the configuration; nothing else
names it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from pipeline.cache.recipes import CaptionRecipe, PictureRecipe, Recipe, recipe_classes
from pipeline.config import Config

if TYPE_CHECKING:
    import numpy as np

    from pipeline.models.encoders import Footprint


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
    """What makes the records of a recipe.

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
    def wanted(cls, config: Config) -> Self | None:
        """The recipe that a configuration asks for; None: no records of this kind.

        Raises:
            UserError: its model cannot be read.
        """

    @abstractmethod
    def model(self, config: Config) -> dict[str, Any]:
        """The fields of the recipe that the configured model decides, read from its files."""

    def settings(self, config: Config) -> Mapping[str, tuple[Any, Any]]:
        """Settings that decide the values: name -> (as configured, as in this recipe)."""
        return {}

    @abstractmethod
    def encoder(self, config: Config, device: Any) -> Any:
        """Load what makes the records: a `PictureEncoder` or a `CaptionEncoder`."""

    def provenance(self, config: Config) -> dict[str, Any]:
        """Where the model comes from, for the provenance of units."""
        return {}

    def comparison(self, config: Config) -> Comparison | None:
        """What compares the records of the first unit of a run with exact ones; None: they are exact."""
        return None


class PictureSignal(Signal, PictureRecipe):
    """Records of pictures.

    Attributes:
        beside: whether the records are made beside latents, from the same pixels, by an encoder that loads no model;
            others are made in a pass of their own, since a process holds one model at a time.
        blank: the value of all pixels of a picture that a sample lacks and need not have.
    """

    beside: ClassVar[bool] = False
    blank: ClassVar[int] = 0

    def pixels(self, data: bytes, size: tuple[int, int], max_pixels: int) -> np.ndarray:
        """What the encoder is given of a picture: uint8 (H, W, 3).

        Args:
            data: the file. size: (height, width) in pixels. max_pixels: as in `decoding.load`.

        Raises:
            ImageReject: as in `decoding.load`.
        """
        from pipeline.images import decoding

        return decoding.load(data, size, self.background, max_pixels, self.decoder)

    def footprint(self, config: Config, height: int, width: int) -> Footprint | None:
        """What the encoder needs for pictures of height x width pixels; None: no memory of a GPU."""
        return None


class CaptionSignal(Signal, CaptionRecipe):
    """Records of captions."""

    @abstractmethod
    def encoder(self, config: Config, device: Any) -> CaptionEncoder: ...


def recipes(config: Config) -> list[Recipe]:
    """The recipes that a configuration asks for: of pictures, the latents first, then of captions.

    Raises:
        UserError: a model cannot be read.
    """
    every = [each for each in recipe_classes() if issubclass(each, Signal)]
    every.sort(key=lambda each: (issubclass(each, CaptionRecipe), each.optional, each.kind))
    return [recipe for each in every if (recipe := each.wanted(config)) is not None]
