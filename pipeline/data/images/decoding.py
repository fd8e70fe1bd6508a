"""Decode the bytes of a picture file into the pixels that the VAE gets.

`probe` reads the size from the header and refuses decompression bombs; `load` decodes, applies the orientation,
converts any mode to sRGB, and resizes and crops to exactly the bucket. There are two decoders behind one interface:
`vips` (fast, strict about damaged data) and `pillow` (every allowed format, no library besides Pillow).

The name of a decoder in the encoding changes whenever its pixels change.
"""

from __future__ import annotations

import importlib.metadata
from contextlib import suppress
from typing import Any

import numpy as np

from sana_pipe.base.errors import UserError
from sana_pipe.data.images import mask_decoder, pillow_decoder, resize, vips_decoder
from sana_pipe.data.images.pillow_decoder import ImageReject as ImageReject
from sana_pipe.data.images.resize import CROP_RULE, RESIZE_RULE
from sana_pipe.data.sources.config import DataConfig

MAX_PIXELS = 200_000_000
LIMIT = "max_pixels"
"""The setting that the reason of an `ImageReject` names if a higher limit would admit the picture."""

DECODERS = {"vips": vips_decoder.DECODER, "pillow": pillow_decoder.DECODER}
"""Value of `data.decoder` -> name in the encoding."""


def choose(wanted: str) -> str:
    """The name in the encoding of the configured decoder.

    Args:
        wanted: `vips`, `pillow`, or `auto` (vips if it can be imported).

    Raises:
        UserError: vips is required and cannot be imported.
    """
    if wanted == "auto":
        return vips_decoder.DECODER if vips_decoder.why_not() is None else pillow_decoder.DECODER
    name = DECODERS[wanted]
    require(name)
    return name


def require(name: str) -> None:
    """Raises a UserError unless this process has the decoder with this name in the encoding."""
    if name not in DECODERS.values():
        raise UserError(
            f"this version has no decoder {name!r}",
            expected=" or ".join(DECODERS.values()),
            fix="encode with the version of sana-pipe that made the cache, or into a new cache",
        )
    missing = vips_decoder.why_not() if name == vips_decoder.DECODER else None
    if missing is not None:
        raise UserError(
            "the decoder vips cannot be used here",
            found=missing,
            fix="pip install 'pyvips[binary]' simplejpeg, or --set data.decoder=pillow (another encoding: pictures "
            "encoded with vips are encoded again)",
        )


def pixel_fields(data: DataConfig) -> dict[str, Any]:
    """Return what decides the pixels of a picture, as fields of a `PictureEncoding`. Errors as in `choose`."""
    return {
        "decoder": choose(data.decoder),
        "resize": RESIZE_RULE,
        "crop": CROP_RULE,
        "background": data.background,
    }


def versions() -> dict[str, str]:
    """Versions of the decoding libraries, for the provenance of a unit."""
    installed = {}
    for package in ("pillow", "pyvips", "pyvips-binary", "simplejpeg"):
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed


def probe(data: bytes, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Size of a picture from its header, without decoding pixels; the same for every decoder.

    Args:
        data: the whole file.
        max_pixels: limit on width x height, and with it on the memory for decoding.

    Returns:
        (width, height) in pixels after EXIF orientation.

    Raises:
        ImageReject: not a picture in an allowed format, a damaged header, too many pixels.
    """
    with pillow_decoder.rejecting():
        return pillow_decoder.open_header(data, max_pixels).upright


def load(
    data: bytes,
    size: tuple[int, int],
    background: tuple[int, int, int] = (255, 255, 255),
    max_pixels: int = MAX_PIXELS,
    decoder: str = pillow_decoder.DECODER,
) -> np.ndarray:
    """Decode, apply the orientation, convert to sRGB, resize to cover, crop the centre.

    Of animations the first frame is used, of TIFFs the first page. Transparency is composited over `background`.
    Embedded ICC profiles are applied (perceptual intent) if they are readable and of the picture's colour space; other
    pictures count as sRGB (CMYK: the plain complement). 16-bit gray is divided by 65535 (12-bit TIFF by 4095). For
    integer and float samples without a defined white the values decide: ranges within 0..1 (floats only), 0..255 and
    0..65535 (integers only) are scaled as such, any other from its minimum to its maximum.

    Args:
        data: the whole file.
        size: (height, width) of the result in pixels.
        background: RGB, 0..255.
        max_pixels: as in `probe`.
        decoder: its name in the encoding, from `choose`.

    Returns:
        uint8 array (height, width, 3).

    Raises:
        ImageReject: as `probe`; truncated or corrupt data, samples that are not finite.
        UserError: the decoder is not available.
    """
    require(decoder)
    with pillow_decoder.rejecting():
        header = pillow_decoder.open_header(data, max_pixels)
        picture = vips_decoder.load(data, header, size, background) if decoder == vips_decoder.DECODER else None
        if picture is None:
            picture = pillow_decoder.load(header, size, background)
        return np.array(picture, dtype=np.uint8)


def load_alpha(data: bytes, size: tuple[int, int], max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """The transparency of a picture, cropped and resized as `load` does: uint8 (height, width), 255 where it is opaque.
    Decoded by Pillow. Arguments and errors as in `load`."""
    with pillow_decoder.rejecting():
        return np.array(pillow_decoder.load_alpha(pillow_decoder.open_header(data, max_pixels), size))


def load_mask(data: bytes, size: tuple[int, int], max_pixels: int = MAX_PIXELS) -> np.ndarray | None:
    """A mask whose meaning is not its brightness (`mask_decoder`), cropped and resized as `load` does: uint8 (height,
    width); None: its brightness is the mask. Decoded by Pillow. Arguments and errors as in `load`."""
    with pillow_decoder.rejecting():
        header = pillow_decoder.open_header(data, max_pixels)
        mask = mask_decoder.shape(header)
        return None if mask is None else np.array(resize.fit(pillow_decoder.turn(mask, header.orientation), size))
