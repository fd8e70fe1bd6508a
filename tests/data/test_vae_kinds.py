"""Kinds of VAEs: what they are digested to, and the classes against diffusers' formulas."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from pipeline.data.encoders import vae as encoders
from pipeline.data.encoders.config import VaeConfig
from pipeline.data.signals.latent import LatentEncoding


def test_ids_and_keys_of_earlier_caches(tmp_path: Path) -> None:
    """Recorded before there were kinds."""
    blocks = {"latent_channels": 4, "encoder_block_out_channels": [8, 16, 16, 16], "scaling_factor": 0.5}
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "AutoencoderDC", **blocks}))
    encoder = {"encoder.conv_in.weight": torch.arange(24.0).reshape(2, 3, 2, 2), "encoder.conv_in.bias": torch.ones(2)}
    save_file({**encoder, "decoder.conv_out.bias": torch.arange(3.0)}, tmp_path / "diffusion_pytorch_model.safetensors")
    described = encoders.describe_vae(VaeConfig(id=str(tmp_path)))
    assert described["weights"] == "affb62e1d2ad9cc7bd795f1a51158b1b"
    encoding = LatentEncoding(**described, decoder="pillow-srgb-1", resize="lanczos")
    assert encoding.id == "2a529732a4393e46c6b808df34983a04"
    assert encoding.key(b"0" * 16, 64, 64).hex() == "deddc2fa423f8ecde95be0c27d2af65a"
    assert LatentEncoding().id == "401be2fa2e7d6d86f17fa70561a4ef99"
    values = encoding.values()
    assert "shift_factor" not in values, "the heads of snapshots, so their ids"
    assert LatentEncoding.from_values(values) == encoding
    shifted = LatentEncoding(shift_factor=0.25)
    assert shifted.id != LatentEncoding().id and LatentEncoding.from_values(shifted.values()) == shifted
