"""Use an encoder in a separate process, so that it and the transformer never share one.

`decode` starts `sana-pipe decode`, which loads the VAE of the configuration, `encode_prompts` starts `sana-pipe encode
--prompts`, which loads the text encoder; this process imports neither.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save

from pipeline.cache.prompts import NAME, PromptSet, newest
from pipeline.cache.root import Cache
from pipeline.config import Config, dump
from pipeline.errors import NoSpaceError, UserError
from pipeline.processes import command


class DecodeError(UserError):
    """The process with the encoder failed; it has printed its error."""

    exit_code = 8


def decode(config: Config, tensors: dict[str, torch.Tensor], work: Path) -> Path:
    """Decode latents; returns the folder with a PNG for each.

    Args:
        tensors: by name, (C, h, w) float32, multiplied by the scaling factor.
        work: a folder for files of this call.

    Raises:
        DecodeError: the decoding process failed.
    """
    latents, pictures = work / "latents.safetensors", work / "pictures"
    latents.write_bytes(save({name: tensor.contiguous() for name, tensor in tensors.items()}))
    arguments = ("--latents", str(latents), "--out", str(pictures))
    _run(config, work, "decode", *arguments, what="the process that decodes the latents")
    return pictures


def encode_prompts(config: Config, prompts: Sequence[str], work: Path) -> PromptSet:
    """Encode prompts into a temporary cache; equal ones (after normalisation) once.

    Args:
        work: a folder for files of this call; the set reads its records there.

    Raises:
        DecodeError: the encoding process failed.
    """
    storage = config.encode.storage.model_copy(update={"text": "bf16"})  # read once: nothing is gained by a storage
    encoding = config.encode.model_copy(update={"storage": storage})
    config = config.model_copy(update={"cache": str(work / "cache"), "encode": encoding})
    file = work / "prompts.json"
    file.write_text(json.dumps(list(prompts)), encoding="utf-8")
    _run(config, work, "encode", "--prompts", str(file), what="the process that encodes the prompts")
    made = newest(Cache.of(config), NAME)
    assert made is not None
    return made


def _run(config: Config, work: Path, *words: str, what: str) -> None:
    settings = work / "config.yaml"
    settings.write_text(dump(config), encoding="utf-8")
    torch.cuda.empty_cache()  # the process needs the memory
    done = subprocess.run(command("--quiet", *words, "--config", str(settings)), check=False)
    if done.returncode == NoSpaceError.exit_code:
        raise NoSpaceError(f"{what} met a full disk", fix="see its message above")
    if done.returncode:
        raise DecodeError(
            f"{what} ended with an error",
            found=f"exit code {done.returncode}" if done.returncode > 0 else f"signal {-done.returncode}",
            fix="see its message above",
        )
