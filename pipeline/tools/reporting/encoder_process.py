"""Use an encoder in a separate process, so that it and the transformer never share one.

`decode` starts `sana-pipe decode`, which loads the VAE of the configuration, `encode_prompts` starts `sana-pipe encode
--prompts`, which loads the text encoder; this process imports neither. The whole configuration goes with them, in a
file: they are commands, which read any section. Of what they print only warnings and errors are shown.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save

from sana_pipe.base.errors import NoSpaceError, UserError
from sana_pipe.base.processes import command
from sana_pipe.config import Config, dump
from sana_pipe.data.cache.cache import Cache, CacheLocation
from sana_pipe.data.cache.config import StorageConfig
from sana_pipe.data.cache.keys import key_bytes
from sana_pipe.data.cache.prompts import NAME, PromptSet, newest
from sana_pipe.data.cache.shard import ShardReader
from sana_pipe.data.images import decoding
from sana_pipe.data.loader.loader import bf16
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.sources.config import DataConfig


class DecodeError(UserError):
    """The process with the encoder failed; it has printed its error."""

    exit_code = 8


def decode(config: Config, tensors: dict[str, torch.Tensor], work: Path) -> Path:
    """Decode latents; returns the folder with a PNG for each.

    Args:
        config: of the process.
        tensors: by name, (C, h, w) float32, multiplied by the scaling factor.
        work: a folder for files of this call.

    Raises:
        DecodeError: the decoding process failed.
    """
    latents, pictures = work / "latents.safetensors", work / "pictures"
    latents.write_bytes(save({name: tensor.contiguous() for name, tensor in tensors.items()}))
    arguments = ("--latents", str(latents), "--out", str(pictures))
    _run(dump(config), work, "decode", *arguments, what="the process that decodes the latents")
    return pictures


def encode_prompts(
    config: Config, prompts: Sequence[str], work: Path, picture: Path | None = None, size: tuple[int, int] = (0, 0)
) -> tuple[PromptSet, torch.Tensor | None]:
    """Encode prompts, and perhaps a picture, into a temporary cache; equal prompts (after normalisation) once.

    Args:
        config: of the process, but for its cache.
        work: a folder for files of this call; the set reads its records there.
        picture: a file, cropped and resized as those of a data set to `size` (height, width).

    Returns:
        The prompts, and the picture's latent (C, h, w) float32.

    Raises:
        UserError: the picture cannot be read.
        DecodeError: the encoding process failed.
    """
    encoding = config.encode.model_copy(update={"storage": StorageConfig()})  # read once: nothing is gained by another
    config = config.model_copy(update={"cache": str(work / "cache"), "encode": encoding})
    file = work / "prompts.json"
    file.write_text(json.dumps(list(prompts)), encoding="utf-8")
    words = ["--prompts", str(file)]
    if picture is not None:
        folder, data = work / "control", config.data
        folder.mkdir()
        try:
            content = picture.read_bytes()
            decoding.load(content, size)
        except (OSError, decoding.ImageReject) as error:
            found = error.strerror if isinstance(error, OSError) else None
            what, fix = f"--control {picture}: cannot be read", "give the file of a picture"
            raise UserError(what, found=found or str(error), fix=fix) from None
        (folder / "control.png").write_bytes(content)  # a source needs an ending, decoders look at the content
        given = {"background": data.background, "decoder": data.decoder, "max_upscale": 1e9, "max_crop_loss": 1}
        data = DataConfig.model_validate({"buckets": [size], "caption": "none", **given})
        config = config.model_copy(update={"data": data})
        words += ["--data", str(folder), "--format", "folder"]
    _run(dump(config), work, "encode", *words, what="the process that encodes the prompts")
    cache = CacheLocation(config.cache, config.mirror, config.patience_s).open()
    made = newest(cache, NAME)
    assert made is not None
    return made, None if picture is None else _latent(cache, size)


def _latent(cache: Cache, size: tuple[int, int]) -> torch.Tensor:
    """The only latent of a cache. size: (height, width) in pixels."""
    [encoding] = (one for one in cache.encodings("latent") if isinstance(one, LatentEncoding))
    index = cache.index(encoding.name)
    key, checksum = key_bytes(index.keys[0]), key_bytes(index.columns["checksum"][0])
    shard, offset = index.shards[int(index.columns["shard"][0])], int(index.columns["offset"][0])
    values = np.empty(encoding.shape(*size), np.uint16)
    ShardReader(cache.files, encoding.name).read(shard, offset, key, checksum, values)
    return bf16(values).float()


def _run(config: str, work: Path, *words: str, what: str) -> None:
    """Run a command with a configuration, which is YAML. what: names the process in errors."""
    settings = work / "config.yaml"
    settings.write_text(config, encoding="utf-8")
    torch.cuda.empty_cache()  # the process needs the memory
    words = "--quiet", *words, "--config", str(settings)
    done = subprocess.run(command(*words), check=False, stdout=subprocess.DEVNULL)  # warnings and errors are on stderr
    if done.returncode == NoSpaceError.exit_code:
        raise NoSpaceError(f"{what} found no space left on the disk", fix="see its message above")
    if done.returncode:
        raise DecodeError(
            f"{what} ended with an error",
            found=f"exit code {done.returncode}" if done.returncode > 0 else f"signal {-done.returncode}",
            fix="see its message above",
        )
