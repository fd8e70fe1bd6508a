"""DC-AE, Sana's VAE: 32 pixels per latent side, 32 channels, no posterior, no shift.

Its linear attention is global, so a tiled encoding would be another latent. It overflows in fp16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from sana_pipe.data.encoders.vae_kind import VaeKind


class DeepCompression(VaeKind):
    """diffusers' `AutoencoderDC`."""

    example: ClassVar[str] = "0.41407 for Sana's DC-AE"
    architecture_defaults: ClassVar[Mapping[str, Any]] = {
        "in_channels": 3,
        "latent_channels": 32,
        "attention_head_dim": 32,
        "encoder_block_types": "ResBlock",
        "encoder_block_out_channels": [128, 256, 512, 512, 1024, 1024],
        "encoder_layers_per_block": [2, 2, 2, 3, 3, 3],
        "encoder_qkv_multiscales": [[], [], [], [5], [5], [5]],
        "downsample_block_type": "pixel_unshuffle",
        "encoder_out_shortcut": True,
    }

    @property
    def compression(self) -> int:
        return 2 ** (len(self.architecture["encoder_block_out_channels"]) - 1)

    @property
    def decoder_compression(self) -> int:
        blocks = self.settings.get("decoder_block_out_channels")
        return 2 ** (len(blocks or self.architecture_defaults["encoder_block_out_channels"]) - 1)

    def encode(self, model: Any, pixels: torch.Tensor) -> torch.Tensor:
        return model.encode(pixels).latent
