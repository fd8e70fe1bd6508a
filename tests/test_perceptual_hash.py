"""The perceptual hash: its bytes are fixed, near-duplicates are near, mirrored pictures are found, flat pictures are
marked."""

from __future__ import annotations

import io

import numpy as np
import pytest
import skimage.data
from PIL import Image

from pipeline.images import perceptual_hash
from pipeline.images.perceptual_hash import MAX_QUALITY, WORDS, flipped, hashes

PHOTOGRAPHS = ("astronaut", "chelsea", "coffee", "rocket", "retina", "hubble_deep_field")
GOLDEN = "22cfe20ae2ee7a65d4e2f5ec9c125c4c6cce774e4b6a7762c2638a7aca6b430df600"


def photograph(name: str, size: tuple[int, int] = (256, 256)) -> np.ndarray:
    return np.asarray(Image.fromarray(getattr(skimage.data, name)()).convert("RGB").resize(size[::-1]))


def one(picture: np.ndarray) -> np.ndarray:
    return hashes(picture[None])[0]


def distance(first: np.ndarray, second: np.ndarray) -> int:
    return int(np.bitwise_count(first[..., :WORDS] ^ second[..., :WORDS]).sum())


def pattern(height: int, width: int) -> np.ndarray:
    """A picture of integers alone: the same on every machine."""
    y, x = np.mgrid[:height, :width]
    return np.stack([(x * x // 7 + y * 3) % 256, (x * y // 11) % 256, (y * y // 5 + x) % 256], -1).astype(np.uint8)


def test_the_bytes_are_fixed() -> None:
    assert perceptual_hash.RULE == "dct-sign-256-1"
    assert one(pattern(96, 80)).tobytes().hex() == GOLDEN


def test_no_value_of_the_basis_is_near_a_tie() -> None:
    """Else another machine's cosine could round to another integer, and to other bits."""
    k, x = np.arange(1, len(perceptual_hash.BASIS))[:, None], np.arange(64)
    exact = 2**18 * np.sqrt(2 / 64) * np.cos(np.pi / 128 * k * (2 * x + 1))
    assert np.abs(exact - np.floor(exact) - 0.5).min() > 1e-4
    assert not perceptual_hash.BASIS[1:].sum(axis=1).any(), "the mean shows in other coefficients"


@pytest.mark.parametrize("shape", [(96, 80), (64, 64), (31, 200)])
def test_a_batch_changes_nothing(shape: tuple[int, int]) -> None:
    pictures = np.random.default_rng(0).integers(0, 256, (5, *shape, 3), np.uint8)
    each = np.stack([one(picture) for picture in pictures])
    assert each.dtype == np.uint16 and each.shape == (5, WORDS + 1)
    assert np.array_equal(hashes(pictures), each)
    wide = np.zeros((5, shape[0], 2 * shape[1], 3), np.uint8)
    wide[:, :, ::2] = pictures
    assert np.array_equal(hashes(wide[:, :, ::2]), each), "strides count"
    assert hashes(pictures[:0]).shape == (0, WORDS + 1)


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
    assert np.array_equal(perceptual_hash.cells(picture[None])[0], means)


@pytest.mark.parametrize("name", PHOTOGRAPHS)
def test_near_duplicates_are_near(name: str) -> None:
    picture = photograph(name)
    compressed = io.BytesIO()
    Image.fromarray(picture).save(compressed, "JPEG", quality=50)
    base = one(picture)
    assert base[WORDS] >= 170
    assert distance(base, one(photograph(name, (512, 480)))) <= 12
    assert distance(base, one(np.asarray(Image.open(compressed)))) <= 8
    assert distance(base, one(np.clip(picture.astype(np.int16) + 20, 0, 255).astype(np.uint8))) <= 31


def test_other_photographs_are_far() -> None:
    hashed = hashes(np.stack([photograph(name) for name in PHOTOGRAPHS]))
    for row in range(len(hashed)):
        for other in range(row):
            assert distance(hashed[row], hashed[other]) > 64
            assert distance(hashed[row], flipped(hashed[other])) > 64


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
    assert max(quality.values()) < 128, quality
    assert quality["black"] == quality["white"] == 0
    noise = np.random.default_rng(0).integers(0, 256, (1, 128, 128, 3), np.uint8)
    assert hashes(noise)[0, WORDS] > 240 and MAX_QUALITY == 256
