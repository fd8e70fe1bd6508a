"""A hash of what a picture shows: near-duplicates differ in few of its 256 bits, other pictures in about half of them.

What: signs of the 256 lowest frequencies of a DCT of the luma, and how many of these lie above the noise of a JPEG.
Why signs, where pHash and PDQ compare with the median: a mirrored picture has the same coefficients with the opposite
sign in odd columns, so `flipped` is exact; with the median, mirrored photographs were up to 24 bits away. Other
distances were equal. No library: imagehash and pdqhash (one wheel for each Python, no median of ours) hash one picture
a call in floating point; integers give the same bytes on every machine, in every batch and number of threads.
"""

from __future__ import annotations

from math import gcd

import numpy as np

RULE = "dct-sign-256-1"
"""The algorithm's name in a recipe: a change of the bits requires a change of the name."""

WORDS = 16
"""16-bit words of a hash; the quality is one more."""
MAX_QUALITY = 256

_CELLS = 64
_LUMA = np.array([299, 587, 114], np.int64)  # thousandths, ITU-R BT.601
_BASIS_BITS, _CELL_BITS = 18, 8
_NOISE = 2 << (2 * _BASIS_BITS + _CELL_BITS)
"""2 gray levels: above, JPEG at quality 50 changed no sign of 20,000; below 1 level it changed one in 5."""

# (row, column) frequencies, lowest sum first, without the mean. Word w holds numbers w, w + 16, ...: each word has low
# and high frequencies, so differences spread over all words.
_ORDER = sorted(((u, v) for u in range(_CELLS) for v in range(_CELLS) if u + v), key=lambda f: (sum(f), max(f), f))[
    :256
]
_ROW, _COLUMN = (np.array(_ORDER).reshape(16, WORDS, 2)[..., axis].T for axis in (0, 1))
_BIT = np.uint16(1) << np.arange(16, dtype=np.uint16)
_MIRRORED = np.append((_COLUMN % 2 * _BIT).sum(axis=1), 0).astype(np.uint16)


def _basis() -> np.ndarray:
    """The orthonormal DCT-II, (frequencies, _CELLS) int64, times 2^18. No value is near a tie of the rounding."""
    k, x = np.arange(max(_ROW.max(), _COLUMN.max()) + 1)[:, None], np.arange(_CELLS)
    scale = np.where(k, np.sqrt(2 / _CELLS), np.sqrt(1 / _CELLS)) * 2**_BASIS_BITS
    return np.rint(scale * np.cos(np.pi / (2 * _CELLS) * k * (2 * x + 1))).astype(np.int64)


BASIS = _basis()


def hashes(pictures: np.ndarray) -> np.ndarray:
    """The hash of each picture and its quality.

    Args:
        pictures: uint8 (b, H, W, 3), sRGB. A picture's hash hardly depends on the size; sides that 64 divides are
            fastest (0.7 ms for 1024 x 1024), others take longer by up to 64 / gcd(side, 64).

    Returns:
        uint16 (b, 17): 16 words of 16 bits; then how many of the 256 coefficients are above the noise of a strong
        compression. Photographs have over 170; flat areas, gradients and empty frames under 128 say too little to
        compare.
    """
    means = cells(pictures)
    coefficients = (BASIS @ means @ BASIS.T)[:, _ROW, _COLUMN]
    result = np.empty((len(pictures), WORDS + 1), np.uint16)
    result[:, :WORDS] = ((coefficients > 0) * _BIT).sum(axis=2)
    result[:, WORDS] = (np.abs(coefficients) >= _NOISE).sum(axis=(1, 2))
    return result


def flipped(hashed: np.ndarray) -> np.ndarray:
    """The hashes of the pictures mirrored left to right.

    Exact, except bits of coefficients that are exactly 0: a symmetric picture is found by its hash itself.

    Args:
        hashed: uint16 (..., 17), or (..., 16) without the quality.
    """
    return hashed ^ _MIRRORED[: hashed.shape[-1]]


def cells(pictures: np.ndarray) -> np.ndarray:
    """Mean luma of 64 x 64 equal cells, (b, 64, 64) int64, times 2^8 and rounded down. Borders of cells cut pixels."""
    count, height, width, _ = pictures.shape
    rows = _sums(pictures.reshape(count, height, width * 3), np.uint32).reshape(count, _CELLS, width, 3) @ _LUMA
    sums = _sums(rows.transpose(0, 2, 1), np.int64).transpose(0, 2, 1)
    pixels = height // gcd(height, _CELLS) * (width // gcd(width, _CELLS))
    return (sums << _CELL_BITS) // (1000 * pixels)


def _sums(values: np.ndarray, dtype: type[np.unsignedinteger | np.signedinteger]) -> np.ndarray:
    """Sums over 64 equal parts of axis 1, which is first repeated so that 64 divides it: (b, 64, n)."""
    repeats = _CELLS // gcd(values.shape[1], _CELLS)
    parts = np.repeat(values, repeats, axis=1) if repeats > 1 else values
    return parts.reshape(len(values), _CELLS, parts.shape[1] // _CELLS, values.shape[2]).sum(axis=2, dtype=dtype)
