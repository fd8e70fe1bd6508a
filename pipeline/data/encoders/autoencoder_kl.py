"""The VAE of Z-Image, Flux and Stable Diffusion 3: a posterior for each latent, of which the mode is taken.

Released ones have 8 pixels per latent side, 4 or 16 channels, a scale, and those with 16 channels a shift.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from sana_pipe.data.encoders.vae_kind import VaeKind

_UNSTATED_SCALE = 0.18215
"""The scaling factor of Stable Diffusion's VAEs, whose files are older than the key; diffusers' default."""
_OLD_NAMES = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
"""Names of diffusers before 0.16 in an attention -> those of now."""


class Variational(VaeKind):
    """diffusers' `AutoencoderKL`."""

    halves: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "encoder": ("encoder", "quant_conv"),
        "decoder": ("decoder", "post_quant_conv"),
    }
    example: ClassVar[str] = "0.3611 and shift_factor 0.1159 for the VAE of Z-Image and Flux"
    architecture_defaults: ClassVar[Mapping[str, Any]] = {
        "_class_name": "AutoencoderKL",
        "in_channels": 3,
        "latent_channels": 4,
        "down_block_types": ["DownEncoderBlock2D"],
        "block_out_channels": [64],
        "layers_per_block": 1,
        "act_fn": "silu",
        "norm_num_groups": 32,
        "mid_block_add_attention": True,
        "use_quant_conv": True,
    }

    @property
    def compression(self) -> int:
        return 2 ** (len(self.architecture["block_out_channels"]) - 1)

    @property
    def scaling_factor(self) -> float:
        return super().scaling_factor if "scaling_factor" in self.settings else _UNSTATED_SCALE

    @property
    def shift_factor(self) -> float:
        stated = self.settings.get("shift_factor")
        return 0.0 if stated is None else self._number("shift_factor", stated)

    def tensor_name(self, stored: str, half: str) -> str | None:
        name = super().tensor_name(stored, half)
        if name is None or ".attentions." not in name:
            return name
        return ".".join(_OLD_NAMES.get(part, part) for part in name.split("."))

    def encode(self, model: Any, pixels: torch.Tensor) -> torch.Tensor:
        return model.encode(pixels).latent_dist.mode()
