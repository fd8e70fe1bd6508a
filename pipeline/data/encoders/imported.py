"""Latents that others have computed: read from a member of a tar, brought to the scale of this cache, and judged.

`judge` decodes a few, encodes the pictures again and compares: latents of another VAE do not come back.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from sana_pipe.base.errors import UserError
from sana_pipe.data.encoders.config import VaeConfig
from sana_pipe.data.encoders.frozen import finite_bits
from sana_pipe.data.encoders.vae import LatentDecoder, LatentEncoder

JUDGED = 8
"""Latents that are decoded."""
SPREAD = (0.6, 1.7)
"""Standard deviations that normalised latents may have: the scaling factor makes it 1 over a large set."""
LIKENESS = 0.5
"""Least correlation of latents with those of their decoded pictures: about 0 for another VAE."""
_MOST = 1 << 28
"""Bytes of a member."""


class LatentReject(Exception):
    """A member that is no latent; its text is the reason."""


def parsed(data: bytes) -> np.ndarray:
    """Read an array from the bytes of a `.npy` or `.safetensors` file.

    Returns:
        float32 (channels, height, width); a leading axis of 1 is dropped.

    Raises:
        LatentReject: it is none, or holds objects.
    """
    array = _array(data, header_only=False)
    return np.ascontiguousarray(array, dtype=np.float32)


def size(data: bytes, compression: int) -> tuple[int, int]:
    """(width, height) in pixels of the picture of a latent. Raises as `parsed`."""
    _, height, width = _array(data, header_only=True).shape
    return width * compression, height * compression


def _array(data: bytes, header_only: bool) -> np.ndarray:
    if len(data) > _MOST:
        raise LatentReject(f"has {len(data):,} bytes, too many for a latent")
    try:
        if data.startswith(b"\x93NUMPY"):
            array = _npy(data)
        else:
            array = _tensor(data)
    except (ValueError, EOFError, OSError, SyntaxError) as error:
        raise LatentReject(f"is no array: {' '.join(str(error).split())[:120]}") from None
    if array.ndim == 4 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 3 or not all(array.shape) or array.dtype.kind != "f":
        raise LatentReject(f"is no latent (channels, height, width) of floats: {array.dtype} {array.shape}")
    return array


def _npy(data: bytes) -> np.ndarray:
    """The array of a `.npy` file. Nothing is allocated for a header that states more than the file has."""
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(stream)
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which can run code when they are read")
    stated, there = math.prod(shape) * dtype.itemsize, len(data) - stream.tell()
    if stated != there:
        raise ValueError(f"its header states {stated} bytes of values, and it has {there}")
    return np.frombuffer(data, dtype, offset=stream.tell()).reshape(shape, order="F" if fortran else "C")


def _tensor(data: bytes) -> np.ndarray:
    """The only tensor of a safetensors file."""
    import safetensors
    import safetensors.torch

    try:
        tensors = safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise ValueError(str(error)) from None
    if len(tensors) != 1:
        raise ValueError(f"{len(tensors)} tensors, and one is the latent: {', '.join(sorted(tensors)[:5])}")
    [tensor] = tensors.values()
    return tensor.float().numpy()


@dataclass(frozen=True)
class ImportedLatents:
    """Brings latents to the scale of this cache, in the place of an encoder.

    Attributes:
        factor: the VAE's scaling factor, divided by the number that they were multiplied by.
        shift: what is subtracted before; 0 if it was subtracted already, as of latents that were multiplied.
    """

    factor: float
    shift: float = 0.0

    def normalised(self, latents: Any) -> Any:
        """Latents, float32, as they are cached."""
        return (latents - self.shift) * self.factor

    def encode(self, latents: np.ndarray) -> np.ndarray:
        """bf16 bits, uint16 (b, channels, height, width), of float32 latents of that shape.

        Raises:
            NonFiniteOutputError: with the rows that have NaN or infinity.
        """
        return finite_bits(self.normalised(torch.from_numpy(latents)), "imported latents", "fp32")


def judge(name: str, latents: list[np.ndarray], vae: VaeConfig, device: Any) -> tuple[Image.Image, str]:
    """Compare some latents with what the declared VAE makes of their pictures.

    Args:
        name: of the source.
        latents: float32 (channels, height, width) each, normalised.
        vae: the declared VAE.

    Returns:
        The decoded pictures side by side, and a line about them.

    Raises:
        UserError: they do not fit the VAE, or the scale.
    """
    spread = float(np.std(np.concatenate([latent.ravel() for latent in latents])))
    if not SPREAD[0] <= spread <= SPREAD[1]:
        raise UserError(
            f"source {name!r}: latents that are multiplied by the VAE's scaling factor have a standard deviation of "
            "about 1, these have another",
            expected=f"{SPREAD[0]} to {SPREAD[1]}",
            found=f"{spread:.2f} (vae.imported: {vae.imported:g})",
            fix="--set vae.imported=S, the number that the latents were multiplied by; 1 if they were not",
        )
    decoder: Any = LatentDecoder.load(vae, device)
    pictures = [decoder.decode(torch.from_numpy(latent)[None])[0] for latent in latents]
    del decoder  # one of both halves is in memory at a time
    encoder = LatentEncoder.load(vae, device)
    likeness = []
    for latent, picture in zip(latents, pictures, strict=True):
        again = torch.from_numpy(encoder.encode(picture[None]).view(np.int16)).view(torch.bfloat16).float().numpy()
        likeness.append(float(np.corrcoef(latent.ravel(), again.ravel())[0, 1]))
    if not np.median(likeness) >= LIKENESS:
        raise UserError(
            f"source {name!r}: its latents are not those of the VAE that the configuration names: decoded and encoded "
            "again, they do not come back",
            expected=f"a correlation of {LIKENESS} or more",
            found=", ".join(f"{each:.2f}" for each in likeness),
            fix="--set vae.id=ID, the VAE that made them",
        )
    line = f"{len(latents)} latents decoded: standard deviation {spread:.2f}, correlation {np.median(likeness):.2f}"
    return _strip(pictures), line


def _strip(pictures: list[np.ndarray]) -> Image.Image:
    """Pictures side by side, 256 pixels high."""
    thumbs = [Image.fromarray(picture) for picture in pictures]
    thumbs = [thumb.resize((max(1, thumb.width * 256 // thumb.height), 256)) for thumb in thumbs]
    sheet = Image.new("RGB", (sum(thumb.width for thumb in thumbs), 256))
    at = 0
    for thumb in thumbs:
        sheet.paste(thumb, (at, 0))
        at += thumb.width
    return sheet
