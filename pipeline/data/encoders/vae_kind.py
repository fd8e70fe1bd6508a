"""All that names a class of VAE, behind one class.

A `VaeKind` is the `config.json` of one VAE, and what depends on its class. Signals, stages and `vae.py` name no class;
they call `vae_at` and `decoder_at`. Another class is a subclass in a file of its own and a line in `KINDS`.
"""

from __future__ import annotations

import math
import pkgutil
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from sana_pipe.base.hub import ModelError, read_json, read_settings

KINDS: dict[str, str] = {
    "AutoencoderDC": "sana_pipe.data.encoders.autoencoder_dc:DeepCompression",
    "AutoencoderKL": "sana_pipe.data.encoders.autoencoder_kl:Variational",
}
"""diffusers' `_class_name` of an encoder with its decoder -> module:class."""

DECODERS: dict[str, str] = {**KINDS, "AutoencoderTiny": "sana_pipe.data.encoders.autoencoder_tiny:TinyDecoder"}
"""The same of what `vae.decoder` may name."""

_OF_VIDEOS = re.compile(
    r"Wan|QwenImage|CogVideoX|Cosmos|HunyuanVideo|HunyuanImageRefiner|LTX|Magvit|Mochi|Allegro|Temporal|Video|VidTok"
)
"""Parts of the class names of VAEs whose latents have an axis of time, also those of a single picture."""


@dataclass(frozen=True)
class VaeKind(ABC):
    """One VAE. Its encoder and its decoder are loaded apart.

    Attributes:
        folder: that of the `config.json`, for messages. settings: its contents.
        halves: name of a half, as it is called in the module -> its parts, so the beginnings of its tensors' names.
        architecture_defaults: the settings that decide a latent, with diffusers' defaults for files that lack a key.
        imitates: whether it decodes another VAE's latents as a model draws them, by factors that are not that VAE's.
        example: a usable scaling factor, for people.
    """

    halves: ClassVar[Mapping[str, tuple[str, ...]]] = {"encoder": ("encoder",), "decoder": ("decoder",)}
    architecture_defaults: ClassVar[Mapping[str, Any]]
    imitates: ClassVar[bool] = False
    example: ClassVar[str]

    folder: Path
    settings: Mapping[str, Any]

    def check(self, fix: str) -> None:
        """Refuse settings that no kind implements. fix: says which option names another model."""
        if named := [name for name in ("latents_mean", "latents_std") if self.settings.get(name) is not None]:
            raise ModelError(
                f"{self.folder / 'config.json'} normalises each channel of a latent apart, which is not implemented",
                expected="latents_mean and latents_std null; scaling_factor and shift_factor are for all channels",
                found=", ".join(named),
                fix=fix,
            )

    @property
    def architecture(self) -> dict[str, Any]:
        """The settings that decide a latent."""
        return {key: self.settings.get(key, default) for key, default in self.architecture_defaults.items()}

    @property
    @abstractmethod
    def compression(self) -> int:
        """Pixels per latent side, of the encoder."""

    @property
    def decoder_compression(self) -> int:
        """The same of the decoder."""
        return self.compression

    @property
    def channels(self) -> int:
        """The channels of a latent."""
        return int(self.architecture["latent_channels"])

    @property
    def shift_factor(self) -> float:
        """The number that is subtracted from a latent before it is multiplied by the scaling factor."""
        return 0.0

    @property
    def scaling_factor(self) -> float:
        """The number that a latent is multiplied by. Raises ModelError where the configuration states no usable one."""
        return self._number("scaling_factor", self.settings.get("scaling_factor"), lambda value: value > 0)

    def _number(self, name: str, value: Any, usable: Callable[[float], bool] = lambda value: True) -> float:
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or not usable(value):
            raise ModelError(
                f"{self.folder / 'config.json'} states no usable {name}",
                expected=f"a {'positive ' if name == 'scaling_factor' else ''}number ({self.example})",
                found=repr(value),
                fix=f"write the authors' value into {self.folder / 'config.json'}, or fetch the folder again",
            )
        return float(value)

    @property
    def described(self) -> dict[str, Any]:
        """Fields of the encoding of latents that `config.json` alone decides."""
        return {
            "compression": self.compression,
            "channels": self.channels,
            "scaling_factor": self.scaling_factor,
            "shift_factor": self.shift_factor,
        }

    def tensor_name(self, stored: str, half: str) -> str | None:
        """The name of a stored tensor in the module; None: it does not belong to the half."""
        return stored if stored.startswith(tuple(f"{part}." for part in self.halves[half])) else None

    def on_meta(self, half: str) -> Any:
        """diffusers' module with one of its halves, on the meta device; the other half is never allocated."""
        import diffusers

        made = getattr(diffusers, self.settings["_class_name"])
        try:
            with torch.device("meta"):
                model = made.from_config(dict(self.settings))
        except (RuntimeError, ValueError, TypeError, LookupError) as error:
            raise ModelError(
                f"{self.folder / 'config.json'} describes no {made.__name__} that can be built",
                found=" ".join(str(error).split())[:600],
                fix="fetch the folder again",
            ) from None
        for other in self.halves.keys() - {half}:
            for part in self.halves[other]:
                if getattr(model, part, None) is not None:
                    delattr(model, part)
        return model

    @abstractmethod
    def encode(self, model: Any, pixels: torch.Tensor) -> torch.Tensor:
        """The latent, in the model's precision. pixels: (b, 3, H, W) in [-1, 1]."""

    def normalise(self, latent: torch.Tensor) -> torch.Tensor:
        """The latent as it is cached, in fp32: (latent - shift_factor) * scaling_factor."""
        latent = latent.float()
        return (latent - self.shift_factor if self.shift_factor else latent) * self.scaling_factor

    def denormalise(self, latent: torch.Tensor) -> torch.Tensor:
        """The inverse of `normalise`."""
        latent = latent / self.scaling_factor
        return latent + self.shift_factor if self.shift_factor else latent

    def decode(self, model: Any, latent: torch.Tensor) -> torch.Tensor:
        """The pixels, (b, 3, H, W) in [-1, 1], of a denormalised latent."""
        return model.decode(latent).sample


def vae_at(folder: Path) -> VaeKind:
    """The VAE whose `config.json` is in a folder. Raises ModelError for a class that is not in `KINDS`."""
    fix = "point vae.id at the VAE that the model was trained with, or at the model's repository"
    return _kind(KINDS, folder, "VAE", fix)


def decoder_at(folder: Path) -> VaeKind:
    """The decoder whose `config.json` is in a folder. Raises ModelError for a class that is not in `DECODERS`."""
    fix = "vae.decoder: null, or the hub id or the folder of such a model"
    return _kind(DECODERS, folder, "decoder", fix)


def _kind(kinds: Mapping[str, str], folder: Path, what: str, fix: str) -> VaeKind:
    name = read_json(folder / "config.json").get("_class_name")
    if isinstance(name, str) and name not in kinds and _OF_VIDEOS.search(name):
        what += " of pictures"
        fix += "; latents of a VAE of videos have an axis of time, which records of pictures do not have"
    settings = read_settings(folder, "_class_name", tuple(kinds), what, fix)
    kind: VaeKind = pkgutil.resolve_name(kinds[settings["_class_name"]])(folder, settings)
    kind.check(fix)
    return kind
