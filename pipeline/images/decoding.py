"""Bytes of a picture file to the pixels that the VAE sees.

What: `probe` reads the size from the header and refuses bombs; `load` decodes, turns upright, converts any mode to
sRGB, and resizes and crops to exactly the bucket. Two decoders do the work behind one interface: `vips` (fast, strict
about damaged data) and `pillow` (every allowed format, no library beside Pillow).
Why two: most pictures are 8-bit JPEG, PNG or WebP, larger than the bucket, and for those the resize costs more than the
decoding; libvips does it 4 times faster at equal quality. What it cannot read, or would not read right (CMYK, 16 bits,
animations, transparency under a colour profile, rare formats), goes the other way, by rules on the header alone, so
that the way a picture takes does not depend on how a library was built.
Price: the two give pixels that differ by rounding (more than 50 dB apart), so the decoder is part of the recipe.

A decoder's name in the recipe changes whenever its pixels would.
"""

from __future__ import annotations

import importlib.metadata

import numpy as np

from pipeline.errors import UserError
from pipeline.images import pillow_decoder, vips_decoder
from pipeline.images.pillow_decoder import ALLOWED, ImageReject
from pipeline.images.resize import CROP_RULE, RESIZE_RULE, cover_box, resample_filter

__all__ = [
    "ALLOWED",
    "CROP_RULE",
    "DECODERS",
    "LIMITS",
    "MAX_BYTES",
    "MAX_PIXELS",
    "RESIZE_RULE",
    "ImageReject",
    "choose",
    "cover_box",
    "load",
    "probe",
    "require",
    "resample_filter",
    "versions",
]

MAX_PIXELS = 200_000_000
MAX_BYTES = 3072 << 20
LIMITS = ("max_pixels", "max_picture_mib")
"""Settings that the reason of an `ImageReject` names where a higher limit would let the picture in."""

DECODERS = {"vips": vips_decoder.DECODER, "pillow": pillow_decoder.DECODER}
"""What `data.decoder` says -> the name in the recipe."""


def choose(wanted: str) -> str:
    """The recipe's name of the decoder that a configuration asks for.

    Args:
        wanted: `vips`, `pillow`, or `auto`: vips where it can be imported.

    Raises:
        UserError: vips is asked for and cannot be imported.
    """
    if wanted == "auto":
        return vips_decoder.DECODER if vips_decoder.why_not() is None else pillow_decoder.DECODER
    name = DECODERS[wanted]
    require(name)
    return name


def require(name: str) -> None:
    """UserError unless this process can decode as the recipe's `decoder` says."""
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
            fix="pip install 'pyvips[binary]' simplejpeg, or --set data.decoder=pillow (another recipe: what was "
            "encoded with vips does not count for it)",
        )


def versions() -> dict[str, str]:
    """Versions of the libraries that decode, for the provenance of a unit."""
    found = {}
    for package in ("pillow", "pyvips", "pyvips-binary", "simplejpeg"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def probe(data: bytes, max_pixels: int = MAX_PIXELS, max_bytes: int = MAX_BYTES) -> tuple[int, int]:
    """Size of a picture from its header alone; no pixel is decoded. The same whatever the decoder.

    Args:
        data: the whole file.
        max_pixels: more than this many pixels are refused.
        max_bytes: so is what takes more memory than this to decode.

    Returns:
        (width, height) in pixels after EXIF orientation.

    Raises:
        ImageReject: not a picture in an allowed format, a damaged header, too many pixels, or too many bytes.
    """
    with pillow_decoder.rejecting():
        return pillow_decoder.open_header(data, max_pixels, max_bytes).upright


def load(
    data: bytes,
    size: tuple[int, int],
    background: tuple[int, int, int] = (255, 255, 255),
    max_pixels: int = MAX_PIXELS,
    decoder: str = pillow_decoder.DECODER,
    max_bytes: int = MAX_BYTES,
) -> np.ndarray:
    """Decode, turn upright, convert to sRGB, resize to cover, crop the centre.

    Animations give their first frame, TIFFs their first page. Transparency is laid over `background`. Embedded ICC
    profiles are applied (perceptual intent) when they are readable and of the picture's own colour space; other
    pictures count as sRGB (CMYK: the plain complement). 16-bit gray is scaled by 65535 (12-bit TIFF by 4095). Integer
    and float samples without a defined white follow their values: 0..1 (floats only), 0..255 and 0..65535
    (integers only) are taken at their face, anything else is stretched from its minimum to its maximum.

    Args:
        data: the whole file.
        size: (height, width) of the result in pixels.
        background: RGB, 0..255.
        max_pixels, max_bytes: as in `probe`.
        decoder: its name in the recipe, from `choose`.

    Returns:
        uint8 array (height, width, 3).

    Raises:
        ImageReject: whatever `probe` refuses, truncated or corrupt data, samples that are not finite.
        UserError: there is no such decoder here.
    """
    require(decoder)
    with pillow_decoder.rejecting():
        header = pillow_decoder.open_header(data, max_pixels, max_bytes)
        picture = vips_decoder.load(data, header, size, background) if decoder == vips_decoder.DECODER else None
        if picture is None:
            picture = pillow_decoder.load(header, size, background)
        return np.array(picture, dtype=np.uint8)
