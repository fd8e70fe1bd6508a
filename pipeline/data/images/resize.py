"""Covering resize and centre crop: which part of a picture the bucket gets, and by which filter.

`RESIZE_RULE` and `CROP_RULE` name these rules in the encoding: a change of the pixels requires a change of the name.
Every decoder follows them.
"""

from __future__ import annotations

from PIL import Image

RESIZE_RULE = "cover-bicubic-lanczos2k-1"
CROP_RULE = "centre-1"


def cover_box(width: int, height: int, size: tuple[int, int]) -> tuple[float, float, float, float]:
    """The centred part of a picture with the target's aspect ratio: what a covering resize and a centre crop keep.

    Args:
        width, height: of the source in pixels.
        size: (height, width) of the target.

    Returns:
        (left, top, right, bottom) in source pixels, within the source and never empty.
    """
    target_height, target_width = size
    if target_width * height >= target_height * width:
        inner = min(float(height), target_height * width / target_width)
        top = max(0.0, (height - inner) / 2)
        return 0.0, top, float(width), min(float(height), top + inner)
    inner = min(float(width), target_width * height / target_height)
    left = max(0.0, (width - inner) / 2)
    return left, 0.0, min(float(width), left + inner), float(height)


def resample_filter(size: tuple[int, int]) -> Image.Resampling:
    """Bicubic, but Lanczos for targets of 2 to 12 megapixels.

    NVlabs' loader uses Lanczos for its 2048 and 2880 tables (3.8 to 8.3 megapixels a bucket) and bicubic for the
    others: 256 to 1024 (at most 1.05) and 4096 (from 15.1). The bounds lie in the gaps between these areas.
    """
    return Image.Resampling.LANCZOS if 2_000_000 <= size[0] * size[1] < 12_000_000 else Image.Resampling.BICUBIC


def fit(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Resize and crop to exactly `size` (height, width). If one side fits and none is too small, only crop."""
    height, width = size
    if image.size == (width, height):
        return image
    if image.width >= width and image.height >= height and (image.width == width or image.height == height):
        left, top = (image.width - width) // 2, (image.height - height) // 2
        return image.crop((left, top, left + width, top + height))
    return image.resize((width, height), resample_filter(size), box=cover_box(image.width, image.height, size))
