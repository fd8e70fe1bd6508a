"""The perceptual hash: its bytes are fixed, near-duplicates are near, mirrored pictures are found, flat pictures are
marked."""

from __future__ import annotations

import io

import numpy as np
import pytest
import skimage.data
from PIL import Image

from sana_pipe.data.images.perceptual_hash import (
    BITS,
    INNER,
    LENGTH,
    RULE,
    VIEW_WORDS,
    WORDS,
    basis,
    cells,
    flipped,
    hashes,
)

PHOTOGRAPHS = ("astronaut", "chelsea", "coffee", "rocket", "retina", "hubble_deep_field")
GOLDEN = (
    "a42c2e7e8e746e3f18f199d5d8e15a31a4242622067c6e3f08718915d8e15a317400"
    "8a927cba859f8893a6a690937f6f7d7a91c079657c867c86948975738285817a"
    "8d967fb9879b8a89a2a68e907d707c718abc7a617c8183919085726f868a7778"
)


def photograph(name: str, size: tuple[int, int] = (256, 256)) -> np.ndarray:
    return np.asarray(Image.fromarray(getattr(skimage.data, name)()).convert("RGB").resize(size[::-1]))


def one(picture: np.ndarray) -> np.ndarray:
    return hashes(picture[None])[0]


def distance(first: np.ndarray, second: np.ndarray) -> int:
    return int(np.bitwise_count(first[:WORDS] ^ second[:WORDS]).sum())


def pattern(height: int, width: int) -> np.ndarray:
    """A picture of integers alone: the same on every machine."""
    y, x = np.mgrid[:height, :width]
    return np.stack([(x * x // 7 + y * 3) % 256, (x * y // 11) % 256, (y * y // 5 + x) % 256], -1).astype(np.uint8)


def test_the_bytes_are_fixed() -> None:
    assert RULE == "dct-sign-2x128-chroma-2x16-1"
    assert one(pattern(96, 80)).tobytes().hex() == GOLDEN


@pytest.mark.parametrize("side", [1.0, INNER])
def test_no_value_of_the_basis_is_near_a_tie(side: float) -> None:
    """Else another machine's sine could round to another integer, and to other bits."""
    values = basis(side)
    k, x = np.arange(1, len(values))[:, None], (np.arange(65) - 32) / (64 * side) + 0.5
    waves = np.diff(np.sin(np.pi * k * np.clip(x, 0, 1))) / (np.pi * k)
    exact = waves * 2**18 * np.sqrt(2 * 64 * side)
    assert np.array_equal(np.rint(exact), values[1:])
    assert np.abs(exact - np.floor(exact) - 0.5).min() > 1e-4
    assert np.abs(values[1:].sum(axis=1)).max() <= 4, "the mean shows in other coefficients"
    assert np.array_equal(values[:, ::-1], values * (-1) ** np.arange(len(values))[:, None]), "not exact when mirrored"


@pytest.mark.parametrize("shape", [(96, 80), (64, 64), (31, 200)])
def test_a_batch_changes_nothing(shape: tuple[int, int]) -> None:
    pictures = np.random.default_rng(0).integers(0, 256, (5, *shape, 3), np.uint8)
    each = np.stack([one(picture) for picture in pictures])
    assert each.dtype == np.uint16 and each.shape == (5, LENGTH)
    assert np.array_equal(hashes(pictures), each)
    wide = np.zeros((5, shape[0], 2 * shape[1], 3), np.uint8)
    wide[:, :, ::2] = pictures
    assert np.array_equal(hashes(wide[:, :, ::2]), each), "strides count"
    assert hashes(pictures[:0]).shape == (0, LENGTH)


@pytest.mark.parametrize("shape", [(64, 64), (96, 80), (45, 31), (130, 257)])
def test_mirrored_pictures_are_known_from_the_hash(shape: tuple[int, int]) -> None:
    pictures = np.random.default_rng(1).integers(0, 256, (3, *shape, 3), np.uint8)
    hashed = hashes(pictures)
    assert np.array_equal(flipped(hashed), hashes(pictures[:, :, ::-1]))
    assert np.array_equal(flipped(hashed[:, :WORDS]), flipped(hashed)[:, :WORDS])
    assert np.array_equal(flipped(flipped(hashed)), hashed)
    assert min(distance(flipped(row), row) for row in hashed) > 80


def test_cells_are_the_exact_means() -> None:
    """Against a mean over a picture that is enlarged until every border is whole."""
    picture = pattern(45, 70)
    large = np.repeat(np.repeat(picture, 64, axis=0), 64, axis=1).astype(np.int64) @ np.array([299, 587, 114])
    means = large.reshape(64, 45, 64, 70).sum(axis=(1, 3)) * 256 // (1000 * 45 * 70)
    assert np.array_equal(cells(picture[None])[0], means)


@pytest.mark.parametrize("name", PHOTOGRAPHS)
def test_near_duplicates_are_near(name: str) -> None:
    picture = photograph(name)
    compressed = io.BytesIO()
    Image.fromarray(picture).save(compressed, "JPEG", quality=50)
    base = one(picture)
    assert base[WORDS] >= 80
    assert distance(base, one(photograph(name, (512, 480)))) <= 8
    assert distance(base, one(np.asarray(Image.open(compressed)))) <= 6
    assert distance(base, one(np.clip(picture.astype(np.int16) + 20, 0, 255).astype(np.uint8))) <= 20


@pytest.mark.parametrize("name", PHOTOGRAPHS)
@pytest.mark.parametrize("side", [0.9, 0.95])
def test_the_inner_part_of_a_picture_is_the_whole_of_a_cropped_copy(name: str, side: float) -> None:
    picture = photograph(name, (400, 400))
    margin = round(400 * (1 - side) / 2)
    cropped = one(picture[margin:-margin, margin:-margin])
    assert distance(one(picture)[VIEW_WORDS:WORDS], cropped[:VIEW_WORDS]) <= 15


def test_other_photographs_are_far() -> None:
    hashed = hashes(np.stack([photograph(name) for name in PHOTOGRAPHS]))
    for row in range(len(hashed)):
        for other in range(row):
            for words in (hashed[other], flipped(hashed[other])):
                assert distance(hashed[row, :VIEW_WORDS], words[:VIEW_WORDS]) > 30
                assert distance(hashed[row, :VIEW_WORDS], words[VIEW_WORDS:WORDS]) > 30


def test_what_says_too_little_is_marked() -> None:
    y, x = np.mgrid[:128, :128]
    frame = np.full((128, 128), 240)
    frame[:6] = frame[-6:] = frame[:, :6] = frame[:, -6:] = 0
    gray = {
        "black": np.zeros((128, 128)),
        "white": np.full((128, 128), 255),
        "across": 2 * x,
        "diagonal": x + y,
        "radial": np.hypot(x - 64, y - 64) * 2.8,
        "frame": frame,
        "dim noise": np.random.default_rng(0).integers(0, 2, (128, 128)),
    }
    pictures = np.stack([np.repeat(values[..., None], 3, axis=-1) for values in gray.values()]).astype(np.uint8)
    quality = dict(zip(gray, hashes(pictures)[:, WORDS].tolist(), strict=True))
    assert max(quality.values()) < 64, quality
    assert quality["black"] == quality["white"] == 0
    noise = np.random.default_rng(0).integers(0, 256, (1, 128, 128, 3), np.uint8)
    assert 64 < hashes(noise)[0, WORDS] <= BITS
