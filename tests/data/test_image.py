"""Decoding, colour, orientation, refusals, and the geometry of the covering resize; every test with both decoders."""

from __future__ import annotations

import ctypes
import gc
import io
import itertools
import math
import mmap
import re
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms, ImageFile, ImageOps, PngImagePlugin

from sana_pipe.base.errors import UserError
from sana_pipe.data.images import decoding, pillow_decoder, resize, vips_decoder
from sana_pipe.data.images.decoding import ImageReject, probe
from sana_pipe.data.images.resize import cover_box

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
HOSTILE, EXIF = SHARED / "hostile", SHARED / "exif"
SECONDS_PER_FILE = 10.0

# pytest replaces the module's own filters; that it is quiet by itself is checked in a process of its own.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::PIL.Image.DecompressionBombWarning")

decoder = ""


@pytest.fixture(scope="module", autouse=True, params=["pillow", "vips"])
def _decoder(request: pytest.FixtureRequest) -> None:
    global decoder
    if request.param == "vips" and vips_decoder.why_not() is not None:
        pytest.skip(f"vips: {vips_decoder.why_not()}")
    decoder = decoding.DECODERS[request.param]


def load(
    data: bytes,
    size: tuple[int, int],
    background: tuple[int, int, int] = (255, 255, 255),
    max_pixels: int = decoding.MAX_PIXELS,
) -> np.ndarray:
    return decoding.load(data, size, background, max_pixels, decoder)


def encoded(picture: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    out = io.BytesIO()
    picture.save(out, kind, **options)
    return out.getvalue()


def scene(width: int = 48, height: int = 32, seed: int = 0) -> Image.Image:
    """Smooth colours, so that lossy formats and small resizes stay near."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(40, 216, (4, 6, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def pixels(picture: Image.Image) -> np.ndarray:
    return np.asarray(picture.convert("RGB")).astype(int)


def gap(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.abs(first.astype(int) - second.astype(int)).mean())


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, depth: int, colour: int, rows: bytes, *extra: bytes) -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(extra) + body + chunk(b"IEND", b"")


# --- formats -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "near"),
    [
        ("PNG", {}, 0),
        ("BMP", {}, 0),
        ("TIFF", {}, 0),
        ("TIFF", {"compression": "tiff_lzw"}, 0),
        ("PPM", {}, 0),
        ("TGA", {}, 0),
        ("WEBP", {"lossless": True}, 0),
        ("JPEG2000", {}, 1),
        ("JPEG", {"quality": 95}, 3),
        ("JPEG", {"quality": 95, "progressive": True}, 3),
        ("MPO", {"quality": 95}, 3),
        ("MPO", {"quality": 95, "save_all": True, "append_images": [Image.new("RGB", (48, 32))]}, 3),
        ("WEBP", {"quality": 95}, 4),
        ("AVIF", {"quality": 95}, 4),
        ("GIF", {}, 8),
        ("QOI", {}, 0),
    ],
)
def test_formats(kind: str, options: dict[str, object], near: float) -> None:
    data = encoded(scene(), kind, **options)
    assert probe(data, 10_000) == (48, 32)
    out = load(data, (32, 48))
    assert out.shape == (32, 48, 3)
    assert out.dtype == np.uint8
    assert out.flags["C_CONTIGUOUS"]
    assert out.flags["WRITEABLE"]
    assert gap(out, pixels(scene())) <= near


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "TGA", "WEBP", "JPEG2000", "JPEG", "AVIF", "GIF", "QOI"])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 0.9])
def test_truncated_files_are_rejected(kind: str, share: float) -> None:
    data = encoded(scene(160, 96, seed=3), kind)
    with pytest.raises(ImageReject) as caught:
        load(data[: int(len(data) * share)], (64, 64))
    assert str(caught.value)
    assert "0x" not in str(caught.value)


def test_truncation_is_refused_even_when_another_library_allowed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(scene(160, 96), "JPEG")
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with Image.open(io.BytesIO(data[: len(data) // 2])) as lenient:
        lenient.load()  # what would happen without the guard: no error
    with pytest.raises(ImageReject, match=r"truncated|Premature end"):
        load(data[: len(data) // 2], (64, 64))


def test_both_decoders_judge_a_png_without_its_end_alike() -> None:
    def verdict(data: bytes, own: str) -> bool:
        try:
            return decoding.load(data, (64, 64), decoder=own).size > 0
        except ImageReject:
            return False

    data = encoded(scene(160, 96))
    files = [data[:-cut] for cut in range(1, 40)]
    files += [data[:-12] + struct.pack(">I", 100) + kind + b"abc" for kind in (b"tEXt", b"eXIf", b"iTXt")]
    verdicts = [verdict(file, decoder) for file in files]
    assert verdicts == [verdict(file, pillow_decoder.DECODER) for file in files]
    assert verdicts.count(False) > 0


def test_corrupt_png_is_rejected() -> None:
    data = bytearray(encoded(scene(160, 96)))
    data[len(data) // 2] ^= 0xFF
    with pytest.raises(ImageReject):
        load(bytes(data), (64, 64))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"\x00" * 400, "not a picture"),
        (b"hello, this is text\n" * 40, "not a picture"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "EPS"),
        (b"%PDF-1.7\n", "PDF"),
        (b"\xd7\xcd\xc6\x9a" + b"\x00" * 60, "WMF"),
        (b'  <svg xmlns="http://www.w3.org/2000/svg"/>', "SVG"),
        (b"\x00\x00\x00\x18ftypheic" + b"\x00" * 60, "HEIC"),
    ],
)
def test_other_files_are_rejected_by_name(data: bytes, reason: str) -> None:
    for attempt in (lambda: probe(data, 1000), lambda: load(data, (32, 32))):
        with pytest.raises(ImageReject, match=reason):
            attempt()


@pytest.mark.parametrize(
    ("name", "starts"),
    [
        ("EPS/PostScript", [b"%!PS"]),
        ("EPS", [b"\xc5\xd0\xd3\xc6"]),
        ("PDF", [b"%PDF", b"\xef\xbb\xbf%PDF", b" \t\r\n%PDF"]),
        ("WMF", [b"\xd7\xcd\xc6\x9a"]),
        ("PSD", [b"8BPS"]),
        ("DDS", [b"DDS "]),
        ("BLP", [b"BLP"]),
        ("SVG", [b"<svg"]),
        ("XML or SVG", [b"<?xml"]),
        ("HTML", [b"<!DOCTYPE", b"<html"]),
        ("JPEG XL", [b"\xff\x0a", b"\x00\x00\x00\x0cJXL "]),
        ("ZIP", [b"PK\x03\x04"]),
        ("gzip", [b"\x1f\x8b"]),
        ("OpenEXR", [b"v/1\x01"]),
        ("HEIC", [b"0000ftyp" + brand for brand in (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1")]),
    ],
)
def test_known_formats_are_named(name: str, starts: list[bytes]) -> None:
    for start in starts:
        assert pillow_decoder.unidentified(start + b"\0" * 60).startswith(f"{name} is not an allowed format (")
    for other in (starts[0][:-1] + b"\x02", b"0000ftypqt  ", b"0000f00pheic"):
        assert pillow_decoder.unidentified(other + b"\0" * 60).startswith("not a picture in an allowed format")


def test_interpreters_are_never_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import EpsImagePlugin

    reached = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *args, **kwargs: reached.append("eps"))
    eps = encoded(scene(), "EPS")
    with Image.open(io.BytesIO(eps)) as opened:
        assert opened.format == "EPS"  # Pillow by itself would take it
    with pytest.raises(ImageReject):
        load(eps, (32, 32))
    assert not reached


# --- bombs ---------------------------------------------------------------------------------------------------------


def test_bombs_are_refused_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = png(60_000, 60_000, 1, 0, b"\x00" * 1000)
    webp = encoded(Image.new("RGB", (2000, 2000)), "WEBP")
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded a pixel"))
    for data, limit in ((bomb, 200_000_000), (encoded(scene()), 48 * 32 - 1), (webp, 7_999_999)):
        with pytest.raises(ImageReject, match="max_pixels"):
            probe(data, limit)
        with pytest.raises(ImageReject, match="max_pixels"):
            load(data, (32, 32), max_pixels=limit)
    assert probe(encoded(scene()), 48 * 32) == (48, 32)
    assert probe(webp, 8_000_000) == (2000, 2000)


def test_a_picture_hidden_in_an_ico_obeys_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = encoded(Image.new("RGB", (400, 400)))
    ico = struct.pack("<HHH", 0, 1, 1) + struct.pack("<BBBBHHII", 16, 16, 0, 0, 1, 32, len(inner), 22) + inner
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", lambda self: pytest.fail("decoded a pixel"))
    with pytest.raises(ImageReject, match="max_pixels"):
        load(ico, (32, 32), max_pixels=10_000)


def test_the_limit_holds_when_pillows_guard_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "_decompression_bomb_check", lambda *args, **kwargs: None)
    with pytest.raises(ImageReject, match="max_pixels = 1,000"):
        probe(encoded(scene()), 1000)


def test_the_limit_is_the_configured_one_not_pillows() -> None:
    wide = png(20_000, 10_000, 1, 0, b"")  # Pillow refuses above 179 million by itself
    assert probe(wide, 200_000_000) == (20_000, 10_000)


def test_the_limit_on_pixels_is_lower_for_formats_that_take_more_memory() -> None:
    for kind, mode, times in (("TIFF", "F", 1), ("PNG", "RGB", 1), ("WEBP", "RGB", 2), ("JPEG2000", "RGB", 2)):
        data, most = encoded(Image.new(mode, (1000, 1000)), kind), times * 10**6
        assert decoding.probe(data, most) == (1000, 1000)
        for refused in (decoding.probe, lambda data, most: load(data, (8, 8), max_pixels=most)):
            with pytest.raises(ImageReject, match="max_pixels"):
                refused(data, most - 1)


def resident(kind: str) -> int:
    """Bytes of this process in memory. VmHWM: the most since 5 was written to clear_refs."""
    return 1024 * int(re.search(rf"{kind}:\s+(\d+)", Path("/proc/self/status").read_text())[1])  # type: ignore[index]


def taken_by(call: Callable[[], object]) -> int:
    """Bytes that a call takes at its peak: the most that two calls agree on, since one alone may be that of a library
    that makes its threads. What the process gives back meanwhile hides as much: so a call does not count if the kernel
    drops pages of mapped files, but for a sixteenth, which is added (a kernel that looks for idle pages drops some all
    the time, and many for seconds)."""

    def mapped() -> int:
        return resident("RssFile") + resident("RssShmem")

    c = ctypes.CDLL(None)
    c.mallopt(-3, 1 << 17)  # M_MMAP_THRESHOLD: large memory is new, not what other tests have freed
    peaks: list[int] = []
    end = time.monotonic() + 60
    while not (agreed := [high for low, high in itertools.pairwise(sorted(peaks)) if low > 0.9 * high]):
        assert time.monotonic() < end, f"no two calls agree; those that count: {peaks}"
        gc.collect()
        c.malloc_trim(0)
        files = mapped()
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmHWM")
        call()
        taken, dropped = resident("VmHWM") - before, max(0, files - mapped())
        if dropped <= taken / 16:
            peaks.append(taken + dropped)
        else:
            time.sleep(0.05)
    return max(agreed)


TELLS_PEAK = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells the peak of memory")


@TELLS_PEAK
def test_pages_of_files_that_are_dropped_meanwhile_hide_no_memory(tmp_path: Path) -> None:
    size = 1 << 25
    half = b"1" * (size // 2)
    (tmp_path / "file").write_bytes(2 * half)
    with (tmp_path / "file").open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapped:
        mapped.find(b"2")  # reads all pages

        def call() -> None:
            mapped.madvise(mmap.MADV_DONTNEED)
            with mmap.mmap(-1, size // 2) as fresh:  # `malloc` may give memory that is resident since an earlier test
                fresh.write(half)

        assert 0.9 * size // 2 <= taken_by(call) < 1.25 * size // 2


@TELLS_PEAK
@pytest.mark.parametrize(
    ("kind", "mode", "options"),
    [
        ("TIFF", "F", {"compression": "tiff_adobe_deflate", "tiffinfo": {274: 6}}),
        ("PNG", "RGBA", {"compress_level": 1}),
        ("WEBP", "RGBA", {"lossless": True, "quality": 0, "method": 0}),
        ("JPEG2000", "RGBA", {}),
    ],
)
def test_a_picture_takes_no_more_memory_than_is_stated(
    monkeypatch: pytest.MonkeyPatch, kind: str, mode: str, options: dict[str, Any]
) -> None:
    side = 2000
    monkeypatch.setattr(pillow_decoder, "STRIP", 1 << 16)
    data = encoded(Image.new(mode, (side, side)), kind, **options)
    load(encoded(scene(), kind), (16, 16))  # libraries are loaded
    taken = taken_by(lambda: load(data, (64, 64))) / side**2
    assert taken < pillow_decoder.COST.get(kind, pillow_decoder.COST_OF_OTHERS), f"{taken:.1f} bytes a pixel"
    assert taken > 1, "nothing was measured"


def test_probe_decodes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    files = [encoded(scene(), kind) for kind in ("PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF", "AVIF")]
    turned = [encoded(scene(), kind, exif=exif) for kind in ("PNG", "JPEG", "WEBP", "AVIF")]
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded a pixel"))
    assert {probe(data, 10_000) for data in files} == {(48, 32)}
    assert {probe(data, 10_000) for data in turned} == {(32, 48)}


# --- orientation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "AVIF", "TIFF"])
@pytest.mark.parametrize("value", range(1, 9))
def test_orientation(kind: str, value: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = value
    data = encoded(scene(), kind, exif=exif, **({"quality": 95} if kind in ("JPEG", "WEBP", "AVIF") else {}))
    with Image.open(io.BytesIO(data)) as opened:
        upright = ImageOps.exif_transpose(opened).convert("RGB")
    assert upright.size == ((48, 32) if value < 5 else (32, 48))
    assert probe(data, 10_000) == upright.size
    assert np.array_equal(load(data, (upright.height, upright.width)), np.asarray(upright))


def test_orientation_behind_the_pixels_of_a_png() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    plain = encoded(scene())
    late = plain[:-12] + chunk(b"eXIf", exif.tobytes()[6:]) + plain[-12:]
    assert probe(late, 10_000) == (32, 48)
    assert np.array_equal(load(late, (48, 32)), np.asarray(scene().transpose(Image.Transpose.ROTATE_270)))


def test_the_metadata_of_a_png_are_all_its_chunks_that_may_hold_an_orientation() -> None:
    start, end = b"\x89PNG\r\n\x1a\n", chunk(b"IDAT", b"") + chunk(b"IEND", b"")
    kept = [chunk(kind, kind * 3) for kind in (b"IHDR", b"eXIf", b"iTXt", b"zTXt", b"tEXt")]
    other = [chunk(kind, b"x" * 50) for kind in (b"IDAT", b"gAMA", b"PLTE", b"iCCP", b"IDAT")]
    mixed = b"".join(part for pair in zip(kept, other) for part in pair)
    late = chunk(b"tEXt", b"")
    for after in (b"", chunk(b"IEND", b"") + kept[1], kept[1][:-1], late[:11]):
        assert pillow_decoder.png_metadata(start + mixed + after) == start + b"".join(kept) + end
    assert pillow_decoder.png_metadata(start + mixed + late) == start + b"".join(kept) + late + end


def test_a_damaged_tiff_is_rejected_without_libtiffs_words(capfd: pytest.CaptureFixture[str]) -> None:
    data = bytearray(encoded(scene(), "TIFF", compression="tiff_lzw"))
    data[200:1000] = bytes(800)
    with pytest.raises(ImageReject, match="decoder error"):
        load(bytes(data), (32, 48))
    assert capfd.readouterr().err == ""


def test_damaged_exif_leaves_the_picture_as_stored() -> None:
    data = encoded(scene(), "JPEG", exif=b"Exif\x00\x00" + b"MM\x00\x2a\xff\xff\xff\xff broken")
    assert probe(data, 10_000) == (48, 32)
    assert load(data, (32, 48)).shape == (32, 48, 3)


# --- modes ---------------------------------------------------------------------------------------------------------

RAMP = np.linspace(0, 1, 64)[None, :].repeat(16, 0)
RAMP8 = np.rint(RAMP * 255).astype(np.uint8)


def ramp16(white: int, dtype: str) -> np.ndarray:
    return np.rint(RAMP * white).astype(dtype)


def tiff16(values: np.ndarray, bits: int, photometric: int) -> bytes:
    """A bare little-endian TIFF; Pillow itself cannot write 12 bits or WhiteIsZero."""
    height, width = values.shape
    if bits == 12:
        pairs = values.reshape(-1, 2).astype(np.uint16)
        body = np.stack([pairs[:, 0] >> 4, (pairs[:, 0] & 15) << 4 | pairs[:, 1] >> 8, pairs[:, 1] & 255], 1)
        raster = body.astype(np.uint8).tobytes()
    else:
        raster = values.astype("<u2").tobytes()
    tags = [(256, width), (257, height), (258, bits), (259, 1), (262, photometric), (273, 8), (277, 1), (278, height)]
    tags.append((279, len(raster)))
    directory = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    at = 8 + len(raster)
    return struct.pack("<2sHI", b"II", 42, at) + raster + struct.pack("<H", len(tags)) + directory + b"\0\0\0\0"


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("png16", encoded(Image.fromarray(ramp16(65535, "u2")))),
        ("tiff16", encoded(Image.fromarray(ramp16(65535, "u2")), "TIFF")),
        ("tiff16be", encoded(Image.fromarray(ramp16(65535, ">u2")), "TIFF")),
        ("pgm16", b"P5 64 16 65535\n" + ramp16(65535, ">u2").tobytes()),
        ("pgm10", b"P5 64 16 1023\n" + ramp16(1023, ">u2").tobytes()),
        ("tiff12", tiff16(ramp16(4095, "u2"), 12, 1)),
        ("tiff16-white-is-zero", tiff16(65535 - ramp16(65535, "u2"), 16, 0)),
        ("int32-of-16-bits", encoded(Image.fromarray(ramp16(65535, "i4")), "TIFF")),
        ("int32-of-8-bits", encoded(Image.fromarray(RAMP8.astype("i4")), "TIFF")),
        ("int32-wide", encoded(Image.fromarray(ramp16(2_000_000_000, "i4") - 1_000_000_000), "TIFF")),
        ("float-unit", encoded(Image.fromarray(RAMP.astype("f4")), "TIFF")),
        ("float-255", encoded(Image.fromarray((RAMP * 255).astype("f4")), "TIFF")),
        ("float-wide", encoded(Image.fromarray((RAMP * 9000 - 4000).astype("f4")), "TIFF")),
        ("pfm", b"Pf\n64 16\n-1.0\n" + RAMP.astype("<f4").tobytes()),
        ("l", encoded(Image.fromarray(RAMP8))),
    ],
)
def test_gray_of_any_depth_is_scaled(name: str, data: bytes) -> None:
    out = load(data, (16, 64))
    assert np.array_equal(out[..., 0], out[..., 1])
    assert np.array_equal(out[..., 0], out[..., 2])
    assert np.abs(out[..., 0].astype(int) - RAMP8).max() <= 1, name


def test_every_16_bit_value_has_its_own_rounding() -> None:
    values = np.arange(65536).reshape(256, 256)
    sixteen = np.rint(values / 65535 * 255)
    for data, expected in (
        (encoded(Image.fromarray(values.astype("u2"))), sixteen),
        (tiff16(values, 16, 1), sixteen),
        (tiff16(values, 16, 0), 255 - sixteen),
        (tiff16(values[:16], 12, 1), np.rint(values[:16] / 4095 * 255)),
    ):
        assert np.array_equal(load(data, expected.shape)[..., 1], expected)


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        ("f4", [0, 0.5, 1], [0, 128, 255]),
        ("f4", [0, 0.5, 1.5], [0, 0, 2]),
        ("f4", [0, 7, 255], [0, 7, 255]),
        ("f4", [64, 128, 256], [0, 85, 255]),
        ("f4", [-1, 127, 255], [0, 128, 255]),
        ("f4", [-1, 0, 1], [0, 128, 255]),
        ("f4", [300, 300, 300], [0, 0, 0]),
        ("i4", [0, 1, 1], [0, 1, 1]),
        ("i4", [0, 9, 255], [0, 9, 255]),
        ("i4", [1000, 1000, 65535], [4, 4, 255]),
        ("i4", [256, 512, 512], [1, 2, 2]),
        ("i4", [-1, 127, 255], [0, 128, 255]),
        ("i4", [1000, 1000, 65536], [0, 0, 255]),
    ],
)
def test_which_value_is_white(kind: str, values: list[float], expected: list[int]) -> None:
    data = encoded(Image.fromarray(np.array([values], kind)), "TIFF")
    assert load(data, (1, 3))[0, :, 0].tolist() == expected


def striped() -> list[bytes]:
    """Pictures of every mode whose rows differ."""
    plain = scene(90, 70, seed=5)
    gray = np.asarray(plain.convert("L"))
    clear = plain.convert("RGBA")
    clear.putalpha(plain.convert("L").rotate(90).resize(plain.size))
    key = png(
        3,
        2,
        16,
        0,
        b"".join(b"\0" + np.array(r, ">u2").tobytes() for r in ([1, 2, 3], [3, 2, 1])),
        chunk(b"tRNS", struct.pack(">H", 2)),
    )
    return [
        encoded(clear),
        encoded(clear.convert("LA")),
        encoded(plain.convert("P")),
        encoded(plain.convert("1")),
        key,
        encoded(plain.convert("CMYK"), "JPEG"),
        encoded(plain.convert("LAB"), "TIFF"),
        encoded(plain, "GIF"),
        encoded(plain, "PNG", icc_profile=ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()),
        encoded(Image.fromarray(gray.astype("u2") * 200), "TIFF"),
        encoded(Image.fromarray(gray.astype("u2")), "PNG"),
        *(
            encoded(Image.fromarray((gray.astype(kind) - offset) * by), "TIFF")
            for kind, offset, by in (("i4", 9, 10**6), ("f4", 0, 1), ("f4", 90, 9.5), ("f4", 0, 1 / 255))
        ),
    ]


def test_strips_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    for data in striped():
        size = probe(data, 10**6)[::-1]
        monkeypatch.setattr(pillow_decoder, "STRIP", 1 << 20)
        whole = load(data, size)
        assert len(np.unique(whole)) > 1
        monkeypatch.setattr(pillow_decoder, "STRIP", 7 * size[1])
        assert np.array_equal(load(data, size), whole)


def test_a_dark_16_bit_scan_stays_dark() -> None:
    out = load(encoded(Image.fromarray(ramp16(2570, "u2"))), (16, 64))
    assert out.max() == 10


def test_plain_conversion_would_clip_16_bits() -> None:
    with Image.open(io.BytesIO(encoded(Image.fromarray(ramp16(65535, "i4")), "TIFF"))) as opened:
        assert np.asarray(opened.convert("RGB")).mean() > 230  # the trap: nearly all white, true mean 127.5


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_samples_that_are_not_finite_are_rejected(value: float) -> None:
    broken = RAMP.astype("f4").copy()
    broken[3, 3] = value
    with pytest.raises(ImageReject, match="not finite"):
        load(encoded(Image.fromarray(broken), "TIFF"), (16, 64))


def test_16_bit_rgb_png() -> None:
    values = np.stack([ramp16(65535, "u2")] * 3, -1).astype(">u2")
    values[..., 1] = 0
    rows = b"".join(b"\x00" + row.tobytes() for row in values)
    out = load(png(64, 16, 16, 2, rows), (16, 64)).astype(int)
    assert np.abs(out[..., 0] - RAMP8).max() <= 1
    assert out[..., 1].max() == 0
    for column in (40, 63):
        key = chunk(b"tRNS", struct.pack(">HHH", *values[0, column].tolist()))
        keyed = load(png(64, 16, 16, 2, rows, key), (16, 64), (1, 2, 3))
        assert [x for x in range(64) if keyed[0, x].tolist() == [1, 2, 3]] == [column]
        assert keyed[0, 0].tolist() == [0, 0, 0]


def test_bilevel() -> None:
    checker = (np.indices((16, 16)).sum(0) % 2 * 255).astype(np.uint8)
    out = load(encoded(Image.fromarray(checker).convert("1")), (16, 16))
    assert np.array_equal(out[..., 0], checker)


HIDDEN, BACKGROUND = (200, 10, 10), (0, 128, 255)


def half_transparent() -> Image.Image:
    picture = Image.new("RGBA", (32, 32), (*HIDDEN, 0))
    picture.paste((20, 60, 90, 255), (0, 0, 16, 32))
    return picture


def gray_alpha() -> bytes:
    picture = Image.new("LA", (32, 32), (200, 0))
    picture.paste((50, 255), (0, 0, 16, 32))
    return encoded(picture)


def palette_index() -> bytes:
    picture = Image.new("P", (32, 32), 1)
    picture.putpalette([20, 60, 90, *HIDDEN])
    picture.paste(0, (0, 0, 16, 32))
    return encoded(picture, transparency=1)


def gray16_key() -> bytes:
    values = np.full((32, 32), 40_000, ">u2")
    values[:, :16] = 257 * 50
    rows = b"".join(b"\x00" + row.tobytes() for row in values)
    return png(32, 32, 16, 0, rows, chunk(b"tRNS", struct.pack(">H", 40_000)))


def premultiplied_tiff(straight: Image.Image) -> bytes:
    data = bytearray(encoded(straight, "TIFF"))
    at = data.index(struct.pack("<HHI", 338, 3, 1))
    data[at + 8 : at + 10] = struct.pack("<H", 1)  # ExtraSamples: associated alpha
    return bytes(data)


@pytest.mark.parametrize(
    ("make", "solid"),
    [
        (lambda: encoded(half_transparent()), (20, 60, 90)),
        (lambda: encoded(half_transparent(), "WEBP", lossless=True, exact=True), (20, 60, 90)),
        (lambda: encoded(half_transparent(), "TIFF"), (20, 60, 90)),
        (lambda: premultiplied_tiff(half_transparent()), (20, 60, 90)),
        pytest.param(
            lambda: premultiplied_tiff(Image.open(io.BytesIO(gray_alpha()))),
            (50, 50, 50),
            marks=pytest.mark.skipif(PIL.__version__ < "13", reason="earlier Pillow rejects such gray"),
        ),
        (palette_index, (20, 60, 90)),
        (lambda: encoded(half_transparent().quantize(4), "PNG"), (20, 60, 90)),
        (gray_alpha, (50, 50, 50)),
        (gray16_key, (50, 50, 50)),
    ],
)
def test_transparency_shows_the_background(make: Callable[[], bytes], solid: tuple[int, int, int]) -> None:
    out = load(make(), (32, 32), BACKGROUND)
    assert out[5, 5].tolist() == list(solid)
    assert out[5, 28].tolist() == list(BACKGROUND)


def test_half_transparency_is_mixed() -> None:
    data = encoded(Image.new("RGBA", (8, 8), (255, 0, 0, 128)))
    assert np.abs(load(data, (8, 8), (0, 0, 255))[0, 0].astype(int) - [128, 0, 127]).max() <= 1


def test_palettes_may_have_an_alpha_channel() -> None:
    alpha = Image.new("L", (16, 16), 0)
    alpha.paste(255, (0, 0, 8, 16))
    palette = Image.new("RGB", (16, 16), (220, 30, 30)).quantize(4).convert("PA")
    palette.putalpha(alpha)
    out = load(encoded(palette, "TIFF"), (16, 16), BACKGROUND)
    assert np.abs(out[0, 0].astype(int) - (220, 30, 30)).max() <= 30, "a colour of the palette"
    assert out[0, 15].tolist() == list(BACKGROUND)


def test_animations_give_their_first_frame() -> None:
    red, blue = (Image.new("RGB", (16, 16), colour) for colour in ((255, 0, 0), (0, 0, 255)))
    for kind in ("GIF", "WEBP", "PNG", "TIFF", "AVIF"):
        data = encoded(red, kind, save_all=True, append_images=[blue])
        assert gap(load(data, (16, 16)), pixels(red)) < 4, kind


# --- colour --------------------------------------------------------------------------------------------------------


def shifted_profile() -> bytes:
    """sRGB with its red and green primaries exchanged: a profile whose effect cannot be missed."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    red, green = profile.index(b"rXYZ"), profile.index(b"gXYZ")
    profile[red : red + 4], profile[green : green + 4] = b"gXYZ", b"rXYZ"
    return bytes(profile)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF", "AVIF"])
def test_embedded_profiles_are_applied(kind: str) -> None:
    data = encoded(Image.new("RGB", (16, 16), (220, 30, 30)), kind, icc_profile=shifted_profile())
    assert gap(load(data, (16, 16)), np.full((16, 16, 3), (30, 220, 30))) < 6


def test_profiles_under_transparency_and_palettes() -> None:
    keyed = Image.new("RGBA", (16, 16), (220, 30, 30, 0))
    keyed.paste((220, 30, 30, 255), (0, 0, 8, 16))
    out = load(encoded(keyed, icc_profile=shifted_profile()), (16, 16), BACKGROUND)
    assert np.abs(out[0, 0].astype(int) - (30, 220, 30)).max() <= 2
    assert out[0, 15].tolist() == list(BACKGROUND)
    palette = encoded(Image.new("RGB", (16, 16), (220, 30, 30)).quantize(2), icc_profile=shifted_profile())
    assert np.abs(load(palette, (16, 16))[0, 0].astype(int) - (30, 220, 30)).max() <= 2


def test_profiles_in_every_mode() -> None:
    for mode in ("RGB", "P", "RGBX", "YCbCr", "HSV"):
        strip = scene().convert(mode)
        plain, strip.info["icc_profile"] = strip.convert("RGB"), shifted_profile()
        expected = pillow_decoder.apply_profile(plain, shifted_profile())
        assert expected is not None and gap(pixels(expected), pixels(plain)) > 10
        actual = pillow_decoder.strip_to_srgb(strip, None, BACKGROUND)
        assert np.array_equal(pixels(actual), pixels(expected)), mode


def linear_gray_profile() -> bytes:
    """A gray profile without a gamma (ICC.1): sRGB shows its 55 as 129."""
    tags = {b"wtpt": b"XYZ \0\0\0\0" + struct.pack(">3i", 63190, 65536, 54061), b"kTRC": b"curv" + bytes(8)}
    at, table = 128 + 4 + 12 * len(tags), struct.pack(">I", len(tags))
    for name, body in tags.items():
        table, at = table + name + struct.pack(">II", at, len(body)), at + len(body)
    body = table + b"".join(tags.values())
    head = (
        struct.pack(">II", 128 + len(body), 0) + struct.pack(">I", 0x02100000) + b"mntrGRAYXYZ " + bytes(12) + b"acsp"
    )
    return head.ljust(68, b"\0") + struct.pack(">3i", 63190, 65536, 54061) + bytes(48) + body


def test_gray_profiles_are_applied_with_and_without_transparency() -> None:
    gray = Image.new("L", (16, 16), 55)
    for data in (
        encoded(gray, icc_profile=linear_gray_profile()),
        encoded(gray, "JPEG", icc_profile=linear_gray_profile()),
        encoded(gray.convert("LA"), icc_profile=linear_gray_profile()),
    ):
        assert np.abs(load(data, (16, 16)).astype(int) - 129).max() <= 2
    for mode in ("LA", "La", "L"):
        strip = gray.convert("LA").convert(mode)
        strip.info |= {"icc_profile": linear_gray_profile()} | ({"transparency": 7} if mode == "L" else {})
        assert np.abs(pixels(pillow_decoder.strip_to_srgb(strip, None, BACKGROUND)) - 129).max() <= 2, mode


def test_levels_of_wide_samples_are_exact() -> None:
    graymaps = [b"P5 8 8 65535\n" + value.to_bytes(2, "big") * 64 for value in (128, 129)]  # a level has 257 values
    assert [load(data, (8, 8))[0, 0, 0] for data in graymaps] == [0, 1]
    inverted = Image.new("F", (8, 8), 0.0)
    inverted.paste(1.0, (0, 0, 8, 4))
    out = load(encoded(inverted, "TIFF", tiffinfo={262: 0}), (8, 8))
    assert (out[0, 0].tolist(), out[7, 0].tolist()) == ([0] * 3, [255] * 3)


@pytest.mark.parametrize("profile", [b"nonsense", shifted_profile()[:200], b"\x00" * 128])
def test_damaged_profiles_count_as_srgb(profile: bytes) -> None:
    assert gap(load(encoded(scene(), icc_profile=profile), (32, 48)), pixels(scene())) == 0


def test_a_profile_of_another_space_counts_as_none() -> None:
    gray = Image.fromarray(RAMP8)
    assert np.array_equal(load(encoded(gray, icc_profile=shifted_profile()), (16, 64))[..., 0], RAMP8)


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_cmyk(kind: str) -> None:
    data = encoded(scene().convert("CMYK"), kind, **({"quality": 95} if kind == "JPEG" else {}))
    with Image.open(io.BytesIO(data)) as opened:
        assert opened.mode == "CMYK"
    assert gap(load(data, (32, 48)), pixels(scene())) < 3


def test_lab() -> None:
    to_lab = ImageCms.buildTransform(ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), "RGB", "LAB")
    lab = ImageCms.applyTransform(scene(), to_lab)
    assert lab is not None
    assert gap(load(encoded(lab, "TIFF"), (32, 48)), pixels(scene())) < 4


# --- geometry ------------------------------------------------------------------------------------------------------

sides = st.integers(1, 5000)
targets = st.tuples(st.integers(1, 160).map(lambda n: n * 8), st.integers(1, 160).map(lambda n: n * 8))


@given(sides, sides, targets)
@example(1, 5000, (512, 2048))
@example(5000, 1, (2048, 512))
@example(1, 1, (1024, 1024))
@example(4999, 3333, (1024, 1024))
def test_cover_box_lies_in_the_picture_and_has_the_targets_shape(
    width: int, height: int, size: tuple[int, int]
) -> None:
    left, top, right, bottom = cover_box(width, height, size)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    assert (bottom - top) / (right - left) == pytest.approx(size[0] / size[1], rel=1e-6)
    assert left == 0 or top == 0
    assert right - left == width or bottom - top == height
    assert left + right == pytest.approx(width, abs=1e-6)
    assert top + bottom == pytest.approx(height, abs=1e-6)


@settings(max_examples=150, deadline=None)
@given(sides, sides, st.tuples(st.integers(1, 96), st.integers(1, 96)), st.booleans())
@example(1, 5000, (3, 96), False)
@example(5000, 1, (96, 3), True)
@example(97, 64, (64, 96), False)
def test_any_source_gives_exactly_the_target(width: int, height: int, size: tuple[int, int], lossless: bool) -> None:
    picture = Image.new("1", (width, height), 1)  # bilevel: cheap at any size
    out = load(encoded(picture, "PNG" if lossless else "TIFF"), size)
    assert out.shape == (*size, 3)
    assert out.min() == 255  # no border of another colour creeps in


def test_covering_resize_equals_resize_then_crop() -> None:
    picture = scene(300, 200, seed=5)
    out = load(encoded(picture), (64, 64))
    reference = picture.resize((96, 64), Image.Resampling.BICUBIC).crop((16, 0, 80, 64))
    assert gap(out, pixels(reference)) < 0.6
    stretched = picture.resize((64, 64), Image.Resampling.BICUBIC)
    assert gap(out, pixels(stretched)) > 5


def test_shrinking_does_not_alias() -> None:
    stripes = np.zeros((512, 512), np.uint8)
    stripes[:, ::2] = 255
    out = load(encoded(Image.fromarray(stripes)), (64, 64))
    assert out.std() < 2
    assert abs(out.mean() - 127.5) < 2


def test_nothing_is_resampled_that_fits() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(noise))
    assert np.array_equal(load(data, (64, 96)), noise)
    assert np.array_equal(load(data, (64, 64)), noise[:, 16:80])
    assert np.array_equal(load(data, (63, 96)), noise[:63])


@pytest.fixture
def fast() -> None:
    if decoder != vips_decoder.DECODER:
        pytest.skip("of the decoder vips")


def detailed(width: int, height: int) -> Image.Image:
    """A photograph's spectrum (amplitude falls as 1/f), so that a shift by a fraction of a pixel costs much."""
    rng = np.random.default_rng(width * height)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = np.inf
    planes = []
    for _ in range(3):
        spectrum = np.fft.rfft2(rng.standard_normal((height, width))) / frequency
        plane = np.fft.irfft2(spectrum, s=(height, width))
        planes.append(128 + 45 * plane / plane.std())
    return Image.fromarray(np.clip(np.stack(planes, -1), 0, 255).astype(np.uint8))


def psnr(first: np.ndarray, second: np.ndarray) -> float:
    return float(10 * np.log10(255**2 / np.mean((first.astype(float) - second) ** 2)))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize(
    ("source", "size"),
    [
        ((640, 480), (144, 192)),  # whole: 10/3
        ((640, 480), (160, 160)),  # cropped at the sides: 3
        ((641, 479), (150, 201)),  # nothing divides anything
        ((479, 641), (201, 97)),
        ((500, 331), (300, 301)),  # 1.1
        ((689, 517), (60, 81)),  # a JPEG loses factors of 2 on load, and the last half pixel with them
        ((803, 601), (48, 64)),
        ((653, 656), (10, 10)),  # after a JPEG's 8 on load, more than libvips shrinks by
    ],
)
def test_vips_shows_what_pillow_shows(fast: None, kind: str, source: tuple[int, int], size: tuple[int, int]) -> None:
    picture = detailed(*source)
    data = encoded(picture, kind, **({"quality": 92} if kind != "PNG" else {}))
    out = load(data, size)
    with Image.open(io.BytesIO(data)) as opened:
        full = opened.convert("RGB")
    box = cover_box(*full.size, size)
    exact = np.asarray(full.resize((size[1], size[0]), Image.Resampling.BICUBIC, box))
    assert np.array_equal(out, exact) or psnr(out, exact) > (46 if box[2] - box[0] > 6 * size[1] else 50)
    half = tuple(side + 0.5 * (box[2] - box[0]) / size[1] for side in box[:1]) + box[1:]
    shifted = np.asarray(full.resize((size[1], size[0]), Image.Resampling.BICUBIC, half))
    assert psnr(shifted, exact) < 45  # the measure would see half a pixel at one border


@pytest.mark.parametrize(("side", "by"), [(1024, 1), (6143, 1), (6144, 2), (12287, 2), (12288, 4), (24576, 8)])
def test_shrinking_on_load_leaves_a_factor_of_three(fast: None, side: int, by: int) -> None:
    assert vips_decoder.shrink_on_load((side, side), (1024, 1024)) == by
    assert vips_decoder.shrink_on_load((side, 3 * side), (1024, 1024)) == by


@settings(max_examples=150, deadline=None)
@given(st.integers(24, 400), st.floats(0, 0.5), st.integers(8, 300))
@example(400, 0.0, 399)
@example(257, 0.25, 128)
def test_windows_are_exact(width: int, cut: float, count: int) -> None:
    """A ramp is its own coordinate: after the resize each value says where it was taken."""
    if decoder != vips_decoder.DECODER:
        return
    low, high = width * cut / 2, width - width * cut / 2
    result = vips_decoder.window(low, high, count, 2)
    factor = (high - low) / count
    if result is None:
        assert factor < 1.2 or factor > 8
        return
    _, taken, skip, _ = result
    assert skip >= 2 and round(taken / factor) - skip - count >= 2, "what the filter reads beyond the borders"
    ramp = np.tile(np.arange(width, dtype=np.float32) + 0.5, (6, 1))
    out = vips_decoder.reduce(ramp, result, (0, 6, 0, 1.0), (6, count), "cubic")
    expected = low + (np.arange(count) + 0.5) * factor
    inner = (expected > 2 * factor) & (expected < width - 2 * factor)  # the border's mirror image bends the ramp
    assert np.abs(out[3] - expected)[inner].max(initial=0) < 1 / 32 + 1 / 64


@pytest.mark.parametrize("kernel", ["cubic", "lanczos3"])
@pytest.mark.parametrize("factor", [1.05, 1.5, 2.0, 3.0, 4.7, 8.0])
def test_vips_keeps_white_white(fast: None, kernel: str, factor: float) -> None:
    side = math.ceil(24 * factor) + 2
    result = vips_decoder.window(1.0, 1.0 + 24 * factor, 24, 3)
    assert result is not None
    white = np.full((side, side), 255, np.uint8)
    assert vips_decoder.reduce(white, result, result, (24, 24), kernel).min() == 255


@pytest.mark.parametrize(
    ("data", "left"),
    [
        (encoded(scene(160, 96), "JPEG"), False),
        (encoded(scene(160, 96).convert("L"), "JPEG"), False),
        (
            encoded(scene(160, 96), icc_profile=ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()),
            False,
        ),
        (encoded(scene(160, 96).convert("RGBA")), False),
        (encoded(scene(160, 96).quantize(16)), False),
        (encoded(scene(160, 96), "WEBP"), False),
        (encoded(scene(160, 96), "MPO", save_all=True, append_images=[scene(160, 96, 1)]), False),
        (encoded(scene(160, 96).convert("CMYK"), "JPEG"), True),
        (encoded(scene(160, 96), "WEBP", save_all=True, append_images=[scene(160, 96, 1)]), True),
        (encoded(scene(160, 96), "PNG", save_all=True, append_images=[scene(160, 96, 1)]), True),
        (encoded(Image.fromarray(np.zeros((96, 160), "u2"))), True),
        (png(160, 96, 16, 2, b"".join(b"\x00" + bytes(160 * 6) for _ in range(96))), True),
        (encoded(scene(160, 96).convert("RGBA"), icc_profile=b"\x00" * 128), True),
        (encoded(scene(160, 96), "TIFF"), True),
        (encoded(scene(160, 96), "AVIF"), True),
    ],
)
def test_which_pictures_are_left_to_pillow(
    fast: None, data: bytes, left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[bool] = []
    real = pillow_decoder.load
    monkeypatch.setattr(pillow_decoder, "load", lambda *args: taken.append(True) or real(*args))
    load(data, (48, 64))
    assert bool(taken) == left


def damaged(data: bytes, seed: int) -> bytes:
    """20 bytes in the middle third replaced; none of them an 0xFF, which would be a marker and no corrupt data."""
    rng = np.random.default_rng(seed)
    at = len(data) // 3 + int(rng.integers(len(data) // 3))
    return data[:at] + bytes(rng.integers(0, 255, 20, dtype=np.uint8).tolist()) + data[at + 20 :]


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_rows": 2}])
def test_vips_notices_damage_in_the_middle_of_a_jpeg(fast: None, options: dict[str, object]) -> None:
    data = encoded(detailed(320, 240), "JPEG", quality=92, **options)
    load(data, (64, 64))
    noticed = {"pillow": 0, "vips": 0}
    for seed in range(40):
        for name, decoder in decoding.DECODERS.items():
            try:
                decoding.load(damaged(data, seed), (64, 64), decoder=decoder)
            except ImageReject as reject:
                noticed[name] += 1
                assert name == "pillow" or str(reject).startswith("damaged JPEG")
    assert noticed["vips"] >= 12
    assert noticed["vips"] >= noticed["pillow"] + 10


@pytest.mark.parametrize("count", [1, 7, 500])
def test_a_jpeg_that_is_filled_up_is_no_damaged_one(count: int) -> None:
    data = encoded(scene(160, 96), "JPEG", quality=95)
    out = load(data, (48, 64))
    assert gap(load(data[:-2] + b"\x00" * count + data[-2:], (48, 64)), out) < 0.5
    assert np.array_equal(load(data + b"\x00" * count, (48, 64)), out)


def test_odd_headers_are_no_damage() -> None:
    data = encoded(scene(160, 96), "JPEG")
    assert load(data.replace(b"\xff\xdb", b"\x01\x02\xff\xdb", 1), (48, 64)).shape == (48, 64, 3)


def test_damage_below_the_crop_is_noticed() -> None:
    for kind in ("PNG", "JPEG", "WEBP"):
        data = encoded(detailed(64, 640), kind)
        with pytest.raises(ImageReject):
            load(data[: len(data) * 95 // 100], (64, 64))


def test_a_picture_that_lies_about_its_size_is_rejected(fast: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import simplejpeg

    monkeypatch.setattr(simplejpeg, "decode_jpeg", lambda *args, **kwargs: np.zeros((9, 9, 3), np.uint8))
    with pytest.raises(ImageReject, match=r"160x96.*9x9"):
        load(encoded(scene(160, 96), "JPEG"), (48, 64))


def test_the_choice_of_a_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decoding.choose("pillow") == pillow_decoder.DECODER
    with monkeypatch.context() as patch:
        patch.setattr(vips_decoder, "why_not", lambda: None)
        assert decoding.choose("auto") == decoding.choose("vips") == vips_decoder.DECODER
    monkeypatch.setattr(vips_decoder, "why_not", lambda: "ModuleNotFoundError: No module named 'pyvips'")
    assert decoding.choose("auto") == pillow_decoder.DECODER
    for attempt in (
        lambda: decoding.choose("vips"),
        lambda: decoding.load(encoded(scene()), (32, 32), decoder=vips_decoder.DECODER),
    ):
        with pytest.raises(UserError, match="'pyvips'") as caught:
            attempt()
        assert "pip install" in str(caught.value.fix)
    with pytest.raises(UserError, match="'vips-srgb-9'"):
        decoding.load(encoded(scene()), (32, 32), decoder="vips-srgb-9")


def test_filter_by_target() -> None:
    from sana_pipe.data.images.buckets import table
    from sana_pipe.data.sources.config import DataConfig

    for resolution in (256, 512, 1024, 4096):
        shapes = table(DataConfig(resolution=resolution), resolution // 16)
        assert {resize.resample_filter(shape) for shape in shapes} == {Image.Resampling.BICUBIC}
    shapes = table(DataConfig(resolution=2048), 32)
    assert {resize.resample_filter(shape) for shape in shapes} == {Image.Resampling.LANCZOS}


def test_threads_do_not_disturb_each_other() -> None:
    files = [encoded(scene(200, 150, seed), "PNG", icc_profile=shifted_profile()) for seed in range(6)]
    files += [encoded(scene(200, 150, 9), kind) for kind in ("JPEG", "WEBP", "TIFF")]
    alone = [load(data, (64, 64)) for data in files]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda data: load(data, (64, 64)), files * 8))
    for index, out in enumerate(together):
        assert np.array_equal(out, alone[index % len(files)])


def test_rule_names() -> None:
    """They stand in cache encodings: changing one asks everybody to encode again, changing the pixels must."""
    assert decoding.DECODERS == {"vips": "vips-srgb-1", "pillow": "pillow-srgb-1"}
    assert (resize.RESIZE_RULE, resize.CROP_RULE) == ("cover-bicubic-lanczos2k-1", "centre-1")


@pytest.mark.parametrize("options", [[], ["-W", "error"], ["-W", "always"]])
def test_decoders_that_warn_print_nothing(tmp_path: Path, options: list[str]) -> None:
    """Decoders that warn (Python warnings, logging, libtiff's own writing) leave the terminal alone."""
    bad = bytearray(encoded(scene(160, 96), "TIFF", compression="tiff_lzw"))
    noisy = [bytes(bad[: len(bad) // 2]), encoded(scene(), "JPEG", exif=b"Exif\x00\x00MM\x00\x2a\xff\xff\xff\xff")]
    fax = encoded(Image.new("1", (64, 64)), "TIFF", compression="group4")
    at = fax.index(struct.pack("<HHI", 273, 4, 1)) + 8
    noisy.append(fax[:at] + struct.pack("<I", len(fax) + 500) + fax[at + 4 :])
    wrong = bytearray(encoded(detailed(160, 96)))
    wrong[len(wrong) // 2] ^= 0xFF
    noisy.append(bytes(wrong))
    for index, data in enumerate(noisy):
        (tmp_path / str(index)).write_bytes(data)
    script = (
        "import logging, sys, pathlib\nlogging.basicConfig()\nfrom sana_pipe.data.images import decoding\n"
        "for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):\n"
        "    try: decoding.load(path.read_bytes(), (32, 32), decoder=sys.argv[2]); print('loaded')\n"
        "    except decoding.ImageReject as error: print('reject')\n"
    )
    done = subprocess.run(
        [sys.executable, *options, "-c", script, str(tmp_path), decoder],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["reject", "loaded", "reject", "reject"]
    assert done.stderr == ""


# --- files from outside --------------------------------------------------------------------------------------------


@pytest.mark.skipif(not HOSTILE.is_dir(), reason=f"no collection of odd and damaged pictures in {HOSTILE.name}/")
def test_hostile_files_load_or_are_rejected() -> None:
    files = sorted(path for path in HOSTILE.rglob("*") if path.is_file())
    loaded = rejected = 0
    for path in files:
        data = path.read_bytes()
        begun = time.monotonic()
        size, out, reasons = None, None, []
        try:
            size = probe(data, 50_000_000)
        except ImageReject as reject:
            reasons.append(str(reject))
        try:
            out = load(data, (64, 96), max_pixels=50_000_000)
        except ImageReject as reject:
            reasons.append(str(reject))
        assert all(reason and "0x" not in reason for reason in reasons), path
        if out is None:
            rejected += 1
        else:
            assert size is not None, path
            assert out.shape == (64, 96, 3), path
            loaded += 1
        assert time.monotonic() - begun < SECONDS_PER_FILE, path
    assert loaded > 300
    assert rejected > 50


@pytest.mark.skipif(not HOSTILE.is_dir(), reason=f"no collection of odd and damaged pictures in {HOSTILE.name}/")
def test_probe_and_decoder_agree_on_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(resize, "fit", lambda picture, size: seen.append(picture.size) or Image.new("RGB", (1, 1)))
    monkeypatch.setattr(vips_decoder, "load", lambda *args: None)  # checks the size itself
    for path in sorted(path for path in HOSTILE.rglob("*") if path.is_file()):
        data = path.read_bytes()
        try:
            load(data, (1, 1), max_pixels=50_000_000)
        except ImageReject:
            continue
        assert probe(data, 50_000_000) == seen[-1], path
    assert len(seen) > 300


@pytest.mark.skipif(not EXIF.is_dir(), reason=f"no pictures in every EXIF orientation in {EXIF.name}/")
@pytest.mark.parametrize("name", ["Landscape", "Portrait"])
def test_eight_orientations_of_one_picture(name: str) -> None:
    size = (64, 96) if name == "Landscape" else (96, 64)
    first = load((EXIF / f"{name}_1.jpg").read_bytes(), size)
    for value in range(2, 9):
        data = (EXIF / f"{name}_{value}.jpg").read_bytes()
        assert probe(data) == ((1800, 1200) if name == "Landscape" else (1200, 1800))
        assert gap(load(data, size), first) < 3, value
        with Image.open(io.BytesIO(data)) as stored:  # without the orientation it is plainly another picture
            lying = stored.convert("RGB").resize((size[1], size[0]))
        assert gap(pixels(lying), first) > 20, value
