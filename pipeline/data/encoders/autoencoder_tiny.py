"""A small decoder of another VAE's latents. Its encoder is not used: it only imitates that VAE's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from sana_pipe.data.encoders.vae_kind import VaeKind


class TinyDecoder(VaeKind):
    """diffusers' `AutoencoderTiny`. It takes latents as a model draws them, divided by the scaling factor of its
    configuration (1 unless stated) plus its shift (0 unless stated), as in diffusers' pipelines."""

    imitates: ClassVar[bool] = True
    example: ClassVar[str] = "1.0 unless the model's card says otherwise"
    architecture_defaults: ClassVar[Mapping[str, Any]] = {"latent_channels": 4}

    @property
    def compression(self) -> int:
        stages = self.settings.get("num_decoder_blocks", (3, 3, 3, 1))
        return int(self.settings.get("upsampling_scaling_factor", 2) ** (len(stages) - 1))

    @property
    def scaling_factor(self) -> float:
        return self._number("scaling_factor", self.settings.get("scaling_factor", 1), lambda value: value > 0)

    @property
    def shift_factor(self) -> float:
        return self._number("shift_factor", self.settings.get("shift_factor", 0))

    def encode(self, model: Any, pixels: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("latents are those of the VAE")
