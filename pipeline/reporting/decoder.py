"""Decode latents in a process of its own, so that the VAE and the transformer never share one.

`decode` starts `sana-pipe decode`, which loads the VAE of the configuration; this process imports no encoder.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch
from safetensors.torch import save_file

from pipeline.config import Config, dump
from pipeline.errors import UserError
from pipeline.processes import command


class DecodeError(UserError):
    """The decoding process failed; it has printed its error."""

    exit_code = 8


def decode(config: Config, tensors: dict[str, torch.Tensor], work: Path) -> Path:
    """Decode latents; returns the folder with a PNG for each.

    Args:
        tensors: by name, (C, h, w) float32, multiplied by the scaling factor.
        work: a folder for files of this call.

    Raises:
        DecodeError: the decoding process failed.
    """
    latents, settings, pictures = work / "latents.safetensors", work / "config.yaml", work / "pictures"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, latents)
    settings.write_text(dump(config), encoding="utf-8")
    arguments = ("--config", str(settings), "--latents", str(latents), "--out", str(pictures))
    done = subprocess.run(command("decode", *arguments), check=False)
    if done.returncode:
        raise DecodeError(
            "the process that decodes the latents ended with an error",
            found=f"exit code {done.returncode}" if done.returncode > 0 else f"signal {-done.returncode}",
            fix="see its message above",
        )
    return pictures
