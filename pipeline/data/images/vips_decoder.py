"""The fast decoder: libvips resizes, and reads PNG and WebP; libjpeg-turbo reads JPEG and reports damage.

`load` decodes 8-bit JPEG, PNG and WebP, and lets libvips resize pictures that shrink; for all others it returns None,
and Pillow decodes them. The header alone decides.

`DECODER` names these rules in the encoding: a change of the pixels requires a change of the name.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from typing import Any

import numpy as np
from PIL import Image

from sana_pipe.data.images import pillow_decoder, resize
from sana_pipe.data.images.pillow_decoder import Header, ImageReject

DECODER = "vips-srgb-1"

_MODES = {
    "JPEG": ("L", "RGB"),
    "MPO": ("L", "RGB"),
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA"),
    "WEBP": ("RGB", "RGBA"),
}
_LOADERS = {"PNG": "pngload_buffer", "WEBP": "webpload_buffer"}
_KERNELS = {Image.Resampling.BICUBIC: ("cubic", 2), Image.Resampling.LANCZOS: ("lanczos3", 3)}  # name, radius
_MIN_FILTER_FACTOR = 3.0
_MAX_FACTOR = 8.0  # above, libvips' rounded coefficients no longer sum up to one: white becomes light gray
_EXACT, _NEAR = 1 / 128, 1 / 32
_SLACK = 24

_PNG_END = b"IEND\xaeB`\x82"
_EXTRA = re.compile(r"(\d+) extraneous bytes before marker 0xd9")


@functools.cache
def why_not() -> str | None:
    """Name what is missing for this decoder; None if it can be used."""
    try:
        import pyvips
        import simplejpeg  # noqa: F401
    except Exception as error:  # a libvips that does not load raises OSError, cffi's errors and others
        return f"{type(error).__name__}: {error}"
    missing = [name for name in _LOADERS.values() if not pyvips.type_find("VipsOperation", name)]
    if missing:
        return f"this libvips was built without {', '.join(missing)}"
    logging.getLogger("pyvips").setLevel(logging.CRITICAL)  # its messages are raised, too
    pyvips.concurrency_set(1)
    pyvips.cache_set_max(0)  # it would cache decoded pictures, which are never needed again
    return None


def load(data: bytes, header: Header, size: tuple[int, int], background: tuple[int, int, int]) -> Image.Image | None:
    """Decode, resize and crop to `size` (height, width): RGB; None if Pillow must decode this picture.

    Raises:
        ImageReject: truncated or corrupt data.
        Exception: anything a decoder raises.
    """
    image, profile = header.image, header.image.info.get("icc_profile")
    if image.mode not in _MODES.get(image.format or "", ()):
        return None
    if image.format != "MPO" and getattr(image, "is_animated", False):  # the other pictures of an MPO are not frames
        return None
    if image.format == "PNG" and (data[24] > 8 or _PNG_END not in data):  # libvips does not notice a missing end
        return None
    if header.orientation in (5, 6, 7, 8):
        size = size[1], size[0]  # the orientation is applied last
    if image.format in ("JPEG", "MPO"):
        shrunk = shrink_on_load(image.size, size)
        pixels = _jpeg(data, image, shrunk)
    else:
        if profile and image.has_transparency_data:
            return None  # the profile must be applied before the background, at full size
        shrunk, pixels = 1, _decode(data, _LOADERS[str(image.format)], background)
    if pixels is None:
        return None
    expected = (math.ceil(image.height / shrunk), math.ceil(image.width / shrunk))
    if pixels.shape[:2] != expected:
        raise ImageReject(
            f"the header says {image.width}x{image.height}, the picture is {pixels.shape[1]}x{pixels.shape[0]}"
            + (f" at 1/{shrunk}" if shrunk > 1 else "")
        )
    fitted = _fit(pixels, image.size, shrunk, size)
    rgb = pillow_decoder.apply_profile(fitted, profile)
    return pillow_decoder.turn(rgb if rgb is not None else fitted.convert("RGB"), header.orientation)


def shrink_on_load(stored: tuple[int, int], size: tuple[int, int]) -> int:
    """The factor by which a JPEG of `stored` (width, height) is shrunk during decoding: 1, 2, 4 or 8."""
    left, _, right, _ = resize.cover_box(*stored, size)
    factor = (right - left) / size[1]
    return next((by for by in (8, 4, 2) if factor / by >= _MIN_FILTER_FACTOR), 1)


def _jpeg(data: bytes, image: Image.Image, shrunk: int) -> np.ndarray | None:
    """A JPEG's pixels, (height, width) or (height, width, 3); None if this library cannot read it."""
    import simplejpeg

    least = {"min_width": math.ceil(image.width / shrunk), "min_height": math.ceil(image.height / shrunk)}
    options = {"colorspace": "GRAY" if image.mode == "L" else "RGB", **(least if shrunk > 1 else {})}
    try:
        pixels = simplejpeg.decode_jpeg(data, strict=True, **options)
    except ValueError as error:  # a warning or an error
        message = str(error).strip()
        if not message.startswith(("Corrupt JPEG data", "Premature end")) or _is_harmless(message, data):
            return None  # Pillow reads some that this library refuses, even without `strict`, for an unusual header
        reason = message.removeprefix("Corrupt JPEG data: ").replace("0x", "")
        raise ImageReject(f"damaged JPEG: {reason}") from None
    return pixels[..., 0] if pixels.shape[2] == 1 else pixels


def _is_harmless(message: str, data: bytes) -> bool:
    """Return whether a warning of libjpeg does not concern the pixels, but the header or padding at the end."""
    import simplejpeg

    try:
        simplejpeg.decode_jpeg_header(data, strict=True)
    except ValueError:
        return True
    extra = _EXTRA.search(message)
    end = data.rfind(b"\xff\xd9")
    return extra is not None and len(set(data[max(0, end - int(extra[1])) : end])) == 1  # some cameras pad files


def _decode(data: bytes, loader: str, background: tuple[int, int, int]) -> np.ndarray:
    """An 8-bit PNG's or WebP's pixels over the background: (height, width) or (height, width, 3)."""
    import pyvips

    picture = getattr(pyvips.Image, loader)(data, fail_on="error").copy_memory()
    if picture.bands in (2, 4):
        colours = [picture[band] for band in range(picture.bands)]
        straight = colours[0].bandjoin([colours[0], colours[0], colours[1]]) if len(colours) == 2 else picture
        picture = straight.flatten(background=list(background))
    return _array(picture)


def _fit(pixels: np.ndarray, stored: tuple[int, int], shrunk: int, size: tuple[int, int]) -> Image.Image:
    """Resize and crop as `resize.fit` does, by libvips if the picture shrinks.

    Args:
        pixels: the picture, shrunk on load.
        stored: (width, height) in the file; `pixels` may cover a fraction of a pixel more.
        size: (height, width) of the result.
    """
    left, top, right, bottom = (side / shrunk for side in resize.cover_box(*stored, size))
    height, width = size
    kernel, radius = _KERNELS[resize.resample_filter(size)]
    across, down = window(left, right, width, radius), window(top, bottom, height, radius)
    if shrunk == 1 and min(stored[0] - width, stored[1] - height) <= 0:
        return resize.fit(Image.fromarray(pixels), size)
    if across is None or down is None:  # no exact window at this factor; Pillow's filter takes any border
        return Image.fromarray(pixels).resize((width, height), resize.resample_filter(size), (left, top, right, bottom))
    return Image.fromarray(reduce(pixels, across, down, size, kernel))


Window = tuple[int, int, int, float]
"""First source pixel, number of source pixels, output pixels to skip, source pixels per output pixel."""


def window(low: float, high: float, count: int, margin: int) -> Window | None:
    """Integer borders with which libvips' reduce gives `count` output pixels exactly between `low` and `high`.

    libvips centres its output over its input. With input `first .. first + width`, `out` output pixels and a factor f,
    output pixel `skip` begins at first + (width - out * f) / 2 + skip * f, which must be `low`. Wider inputs, whose
    first output pixels are discarded, give other phases if f is not an integer.

    Args:
        low, high: borders in source pixels, may be fractional.
        margin: output pixels required beyond each border, so that the filter reads the pixels there.

    Returns:
        The smallest window that is exact to 1/128 of a source pixel, else the best window that is exact to 1/32; None
        if there is none, or the factor is below 1 or above 8. Windows may extend beyond the source.
    """
    factor = (high - low) / count
    if not 1 <= factor <= _MAX_FACTOR:
        return None
    best: tuple[float, Window] | None = None
    for beyond in range(2 * margin, 2 * margin + _SLACK):
        out = count + beyond
        for skip in range(margin, beyond - margin + 1):
            exact = 2 * low + (out - 2 * skip) * factor  # 2 * first + width
            twice = round(exact)
            error = abs(exact - twice) / 2
            if best is not None and error >= best[0]:
                continue
            width = math.ceil((out - 0.49) * factor)
            width += (twice - width) % 2
            if width < (out + 0.49) * factor:  # else libvips gives another number of output pixels
                best = error, ((twice - width) // 2, width, skip, factor)
        if best is not None and best[0] <= _EXACT:
            break
    return best[1] if best is not None and best[0] <= _NEAR else None


def reduce(pixels: np.ndarray, across: Window, down: Window, size: tuple[int, int], kernel: str) -> np.ndarray:
    """Shrink `pixels` to `size` (height, width) with two windows. Beyond its border the picture is mirrored."""
    import pyvips

    x, width, skip_x, factor_x = across
    y, height, skip_y, factor_y = down
    inside = pixels[max(0, y) : y + height, max(0, x) : x + width]
    beyond = [
        (max(0, -first), max(0, first + count - side))
        for first, count, side in ((y, height, pixels.shape[0]), (x, width, pixels.shape[1]))
    ]
    mirrored = np.pad(inside, [*beyond, (0, 0)][: pixels.ndim], mode="symmetric")
    picture = pyvips.Image.new_from_array(mirrored).reducev(factor_y, kernel=kernel).reduceh(factor_x, kernel=kernel)
    return _array(picture.crop(skip_x, skip_y, size[1], size[0]))


def _array(picture: Any) -> np.ndarray:
    """Pixels of a libvips picture; pyvips' `numpy()` would drop dimensions of length 1."""
    values = np.frombuffer(picture.write_to_memory(), np.float32 if picture.format == "float" else np.uint8)
    return values.reshape(picture.height, picture.width, picture.bands)[..., 0 if picture.bands == 1 else slice(None)]
