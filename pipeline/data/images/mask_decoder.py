"""Decode mask files where their brightness does not say it: a shape in the transparency, 0 and 1 in place of 0 and
255, numbers or colours of classes.

Tools write masks in several forms. Their brightness alone gave a mask of 1 everywhere for a shape in the transparency
of a white picture, the inverse of one for a black picture, and 0.004 for a mask of 0 and 1.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

from sana_pipe.data.images.pillow_decoder import Header, ImageReject, strips, to_srgb

_CLASSES = 31
"""The largest gray value of 8 bits that counts as the number of a class; a mask that is darker shows nothing."""
_COLOURED, _SHARE = 48, 0.01
"""A mask has colours if the channels of more than this share of its pixels differ by more than this value."""
_HINT = "a mask is gray: white is learned, black is not"


def shape(header: Header) -> Image.Image | None:
    """The mask, L, in the orientation of the file; None: its brightness is the mask.

    Example: RGBA with (255, 255, 255) everywhere and an alpha of 0 and 255: the alpha. L with 0 and 1: 0 and 255.

    Raises:
        ImageReject: colours, or gray values that are numbers of classes.
    """
    image = header.image
    image.load()
    if image.mode in ("LA", "La", "PA", "RGBA") or image.info.get("transparency") is not None:
        rgba = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        *colours, alpha = rgba.split()
        if all(np.ptp(np.asarray(channel)) == 0 for channel in colours) and alpha.getextrema() != (255, 255):
            return alpha
    if image.mode in ("1", "F"):  # 0 and 255; 0 to 1
        return None
    raw = image.mode == "L" or image.mode.startswith("I")
    largest, coloured = 0, 0
    for _, strip in strips(image):
        if raw:
            largest = max(largest, int(np.asarray(strip).max()))
            continue
        pixels = np.asarray(to_srgb(strip, (255, 255, 255)))
        largest = max(largest, int(pixels.max()))
        coloured += int(np.count_nonzero(pixels.max(2).astype(np.int16) - pixels.min(2) > _COLOURED))
    if coloured > _SHARE * image.width * image.height:
        raise ImageReject(f"a mask with colours, such as those of classes; {_HINT}")
    if 1 < largest <= _CLASSES:
        raise ImageReject(f"a mask whose values are at most {largest}, as numbers of classes are; {_HINT}")
    if largest != 1:
        return None
    ones = np.asarray(image if raw else image.convert("L")) > 0
    return Image.fromarray(np.where(ones, 255, 0).astype(np.uint8))
