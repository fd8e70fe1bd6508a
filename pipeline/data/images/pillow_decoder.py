"""The Pillow decoder: reads the header of every picture, and the pixels of those that the fast decoder leaves to it.

`open_header` identifies a picture and refuses decompression bombs; `load` decodes it, applies the orientation and
converts any mode to sRGB; the other decoder uses `apply_profile`, too.

`DECODER` names these rules in the encoding: a change of the pixels requires a change of the name.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import logging
import math
import re
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageCms, ImageFile

from sana_pipe.data.images import resize

DECODER = "pillow-srgb-1"

# Interpreters (EPS, WMF, PDF), containers of scientific data and formats without a tested path stay out. JPEG brings
# MPO with it. TGA has no signature and comes last.
ALLOWED = ("JPEG", "PNG", "WEBP", "AVIF", "GIF", "TIFF", "BMP", "JPEG2000", "PPM", "QOI", "ICO", "TGA")

_KNOWN_OTHERS = (
    (b"%!PS", "EPS/PostScript"),
    (b"\xc5\xd0\xd3\xc6", "EPS"),
    (b"%PDF", "PDF"),
    (b"\xd7\xcd\xc6\x9a", "WMF"),
    (b"8BPS", "PSD"),
    (b"DDS ", "DDS"),
    (b"BLP", "BLP"),
    (b"<svg", "SVG"),
    (b"<?xml", "XML or SVG"),
    (b"<!DOCTYPE", "HTML"),
    (b"<html", "HTML"),
    (b"\xff\x0a", "JPEG XL"),
    (b"\x00\x00\x00\x0cJXL ", "JPEG XL"),
    (b"PK\x03\x04", "ZIP"),
    (b"\x1f\x8b", "gzip"),
    (b"v/1\x01", "OpenEXR"),
)

_TRANSPOSES = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ORIENTATION = 0x0112
STRIP = 1 << 20
"""Pixels converted at a time."""
COST = {"JPEG2000": 32, "WEBP": 32}
"""Peak memory of decoding in bytes per pixel, by format (measured); `COST_OF_OTHERS` otherwise. The limit on pixels is
that of the others."""
COST_OF_OTHERS = 16
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"

# Messages of decoders go into the reason of an ImageReject; on the terminal they would not name the file.
warnings.filterwarnings("ignore", module=r"PIL\..*")
logging.getLogger("PIL").setLevel(logging.CRITICAL)


class ImageReject(Exception):
    """A picture cannot be used; the message is the reason in plain words, without the file's name."""


@dataclass(frozen=True)
class Header:
    """A picture of which only the header has been read."""

    image: Image.Image
    orientation: int

    @property
    def upright(self) -> tuple[int, int]:
        """(width, height) after EXIF orientation."""
        width, height = self.image.size
        return (height, width) if self.orientation in (5, 6, 7, 8) else (width, height)


def open_header(data: bytes, max_pixels: int) -> Header:
    """Identify a picture by its first bytes and read its header, without decoding pixels.

    Raises:
        ImageReject: not a picture in an allowed format, a damaged header, too many pixels.
    """
    image = _open(data, max_pixels)
    times = COST.get(str(image.format), COST_OF_OTHERS) / COST_OF_OTHERS
    if image.width * image.height * times > max_pixels:
        raise ImageReject(
            f"{_x(image.size)} pixels of {image.format}, which take {times:g} times the memory of others: more than "
            f"max_pixels = {max_pixels:,} allows"
        )
    return Header(image, _orientation(image, data))


def load(header: Header, size: tuple[int, int], background: tuple[int, int, int]) -> Image.Image:
    """Decode, convert to sRGB, apply the orientation, resize to cover and crop: RGB of `size` (height, width)."""
    image = header.image
    header_size = image.size
    image.load()
    if image.size != header_size:
        raise ImageReject(f"the header says {_x(header_size)}, the picture is {_x(image.size)}")
    return resize.fit(turn(to_srgb(image, background), header.orientation), size)


def load_alpha(header: Header, size: tuple[int, int]) -> Image.Image:
    """The transparency of a picture as `load` gives its colours: L, 255 where it is opaque."""
    image = header.image
    image.load()
    alpha = Image.new("L", image.size, 255)
    if image.mode in ("LA", "La", "PA", "RGBA") or image.info.get("transparency") is not None:
        alpha = (image.convert("LA") if image.mode == "La" else _with_8bit_key(image)).convert("RGBA").getchannel("A")
    return resize.fit(turn(alpha, header.orientation), size)


def turn(image: Image.Image, orientation: int) -> Image.Image:
    """The picture with EXIF `orientation` applied."""
    return image.transpose(_TRANSPOSES[orientation]) if orientation in _TRANSPOSES else image


@contextlib.contextmanager
def rejecting() -> Iterator[None]:
    """Turn any exception of a decoder into an ImageReject whose reason is the same in every run."""
    try:
        yield
    except ImageReject:
        raise
    except Image.DecompressionBombError:  # a picture inside the file, not visible in the header
        raise ImageReject("holds a picture of more than max_pixels") from None
    except Exception as error:  # untrusted bytes make decoders raise nearly every type
        text = re.sub(r"<[\w.]+ object at 0x[0-9a-fA-F]+>", "the data", str(error)).strip()
        name = type(error).__name__
        raise ImageReject(f"{name}: {text}" if text else name) from None


@functools.cache
def _formats() -> tuple[str, ...]:
    """The allowed formats that this build of Pillow can read."""
    Image.init()
    _hush_libtiff()
    return tuple(name for name in ALLOWED if name in Image.OPEN)


def _hush_libtiff() -> None:
    """Keep libtiff from writing to the terminal; errors still make the decoder fail, warnings are harmless."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # a build of Pillow without a shared libtiff
        library = ctypes.CDLL(Image.core.__file__)
        for setter in ("TIFFSetErrorHandler", "TIFFSetWarningHandler"):
            function = getattr(library, setter)
            function.restype, function.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
            function(None)


def _open(data: bytes, max_pixels: int) -> Image.Image:
    if not data:
        raise ImageReject("the file is empty")
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    # Pillow raises an error above twice this value. This covers internal allocations (WebP's canvas, pictures inside an
    # ICO); the check below names the limit.
    Image.MAX_IMAGE_PIXELS = max_pixels / 2  # type: ignore[assignment]
    try:
        image = Image.open(io.BytesIO(data), formats=_formats())
    except Image.DecompressionBombError:
        raise ImageReject(f"more than max_pixels = {max_pixels:,} pixels") from None
    except Image.UnidentifiedImageError:
        raise ImageReject(unidentified(data)) from None
    width, height = image.size
    if width < 1 or height < 1:
        raise ImageReject(f"the header says {width}x{height} pixels")
    if width * height > max_pixels:
        raise ImageReject(f"{width}x{height} = {width * height:,} pixels, more than max_pixels = {max_pixels:,}")
    return image


def unidentified(data: bytes) -> str:
    allowed = ", ".join(_formats())
    start = data[:64].lstrip(b"\xef\xbb\xbf \t\r\n")
    for magic, name in _KNOWN_OTHERS:
        if start.startswith(magic):
            return f"{name} is not an allowed format (allowed: {allowed})"
    if data[4:8] == b"ftyp" and data[8:12] in (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1"):
        return f"HEIC is not an allowed format (allowed: {allowed})"
    return f"not a picture in an allowed format, or its header is damaged (allowed: {allowed})"


def _x(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


def _orientation(image: Image.Image, data: bytes) -> int:
    """EXIF (else XMP) orientation 1..8 without decoding. Unreadable metadata counts as orientation 1."""
    if image.format == "TIFF":
        return 1  # Pillow applies it while decoding TIFFs, and gives the resulting size before
    try:
        if image.format == "PNG":  # PNG metadata may follow the pixels, where Pillow finds it only by decoding
            with Image.open(io.BytesIO(png_metadata(data)), formats=("PNG",)) as stub:
                value = Image.Image.getexif(stub).get(_ORIENTATION)
        else:
            value = image.getexif().get(_ORIENTATION)
    except Exception:  # a picture with a damaged EXIF block is still usable
        return 1
    return value if isinstance(value, int) and value in _TRANSPOSES else 1


def png_metadata(data: bytes) -> bytes:
    """A PNG with the header and all metadata chunks of `data`, without pixels."""
    parts, start = [_PNG_SIGNATURE], len(_PNG_SIGNATURE)
    while start + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, start)
        kind, end = data[start + 4 : start + 8], start + 12 + length
        if end > len(data) or kind == b"IEND":
            break
        if kind in (b"IHDR", b"eXIf", b"iTXt", b"zTXt", b"tEXt"):
            parts.append(data[start:end])
        start = end
    for kind in (b"IDAT", b"IEND"):
        parts.append(struct.pack(">I", 0) + kind + struct.pack(">I", zlib.crc32(kind)))
    return b"".join(parts)


def to_srgb(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """Any mode to RGB, strip by strip, so that little memory is needed besides the picture and the result."""
    if image.mode == "RGB" and not {"icc_profile", "transparency"} & image.info.keys():
        return image
    wide = image.mode.startswith("I") or image.mode == "F"
    levels = _levels(image) if wide else None
    out = Image.new("RGB", image.size)
    for top, strip in strips(image):
        out.paste(strip_to_srgb(strip, levels, background), (0, top))
    return out


def strips(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """(first row, those rows) of a decoded picture, about `STRIP` pixels each."""
    rows = max(1, STRIP // image.width)
    for top in range(0, image.height, rows):
        yield top, image.crop((0, top, image.width, min(top + rows, image.height)))


def strip_to_srgb(image: Image.Image, levels: Levels | None, background: tuple[int, int, int]) -> Image.Image:
    """Any mode to RGB: numeric range (by `levels`), palette, colour profile, transparency, in this order."""
    profile = image.info.get("icc_profile")
    alpha: Image.Image | None = None
    if levels is not None:
        values, key = np.asarray(image), image.info.get("transparency")
        if isinstance(key, int):
            alpha = Image.fromarray(np.where(values == key, 0, 255).astype(np.uint8))
        image = Image.fromarray(levels(values))
    elif image.mode in ("LA", "La", "PA", "RGBA") or image.info.get("transparency") is not None:
        rgba = (image.convert("LA") if image.mode == "La" else _with_8bit_key(image)).convert("RGBA")
        alpha = rgba.getchannel("A")
        image = rgba.convert("L" if image.mode in ("LA", "La", "L") else "RGB")  # an LA's three channels are equal
    elif image.mode in ("P", "RGBX", "YCbCr", "HSV"):
        image = image.convert("RGB")

    rgb = apply_profile(image, profile)
    if rgb is None:
        rgb = image.convert("RGB")
    if alpha is None:
        return rgb
    rgb.putalpha(alpha)
    return Image.alpha_composite(Image.new("RGBA", rgb.size, (*background, 255)), rgb).convert("RGB")


def _with_8bit_key(image: Image.Image) -> Image.Image:
    """The picture with an 8-bit transparent colour; that of a 16-bit RGB PNG has 16 bits, while Pillow reads 8."""
    key = image.info.get("transparency")
    if image.mode == "RGB" and isinstance(key, tuple) and any(value > 255 for value in key):
        image = image.copy()
        image.info["transparency"] = tuple(value >> 8 for value in key)
    return image


Levels = Callable[[np.ndarray], np.ndarray]
"""Samples of any depth to uint8, in the same shape."""


def _levels(image: Image.Image) -> Levels:
    """The conversion of 16- or 32-bit integer or float gray samples to 8 bits, by the rules of `decoding.load`."""
    tags = getattr(image, "tag_v2", None)
    white_is_zero = tags is not None and tags.get(262) == 0  # PhotometricInterpretation; Pillow inverts 8 bits only
    if image.mode.startswith("I;16"):
        bits = tags[258] if tags is not None else 16
        white = 2 ** (bits[0] if isinstance(bits, tuple) else bits) - 1
        levels = np.rint(np.minimum(np.arange(65536) / white, 1) * 255).astype(np.uint8)
        table = 255 - levels if white_is_zero else levels
        return lambda values: table[values]
    low, high = math.inf, -math.inf
    for _, strip in strips(image):
        values = np.asarray(strip)
        if not np.isfinite(values).all():
            raise ImageReject("the picture has samples that are not finite")
        low, high = min(low, float(values.min())), max(high, float(values.max()))
    if image.format in ("PPM", "PNG") and image.mode == "I":
        low, high = 0.0, 65535.0  # both readers scale to 16 bits
    elif low >= 0 and high <= 1 and image.mode == "F":
        low, high = 0.0, 1.0
    elif low >= 0 and high <= 255:
        low, high = 0.0, 255.0
    elif low >= 0 and high <= 65535 and image.mode == "I":
        low, high = 0.0, 65535.0

    def scaled(values: np.ndarray) -> np.ndarray:
        wide = values.astype(np.float64)
        gray = (wide - low) / ((high - low) or 1)
        return np.rint((1 - gray if white_is_zero else gray) * 255).astype(np.uint8)

    return scaled


_PROFILE_SPACES = {"RGB": "RGB", "L": "GRAY", "CMYK": "CMYK"}


@functools.lru_cache(maxsize=64)
def _profile_transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Transform of `mode` pixels to sRGB; None where the profile is damaged or describes another colour space."""
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if source.profile.xcolor_space.strip() != _PROFILE_SPACES[mode]:
            return None
        return ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), mode, "RGB", ImageCms.Intent.PERCEPTUAL)
    except Exception:  # a picture with a damaged profile counts as sRGB
        return None


def apply_profile(image: Image.Image, profile: object) -> Image.Image | None:
    """The picture (RGB, L or CMYK) in sRGB; None where there is no profile, or one that is damaged or describes another
    colour space."""
    if image.mode not in _PROFILE_SPACES or not isinstance(profile, bytes):
        return None
    transform = _profile_transform(profile, image.mode)
    return ImageCms.applyTransform(image, transform) if transform is not None else None
