"""A hash of what a picture shows, and its colours: near-duplicates differ in few of the bits, other pictures in about
half of them.

It has the signs of the 128 lowest frequencies of a DCT of the luma, twice: of the whole picture, and of its inner
92.5 % by side, which is the whole of a cropped copy. By the whole alone, crops to 90 % were up to 48 bits away, others
from 41. The bits do not know colours: next to them stands the mean chroma of 4 x 4 cells of both views.
"""

from __future__ import annotations

from math import gcd

import numpy as np

RULE = "dct-sign-2x128-chroma-2x16-1"
"""The algorithm's name in an encoding: a change of the words requires a change of the name."""

VIEW_WORDS = 8
"""16-bit words of the hash of a view. Words 0 to 7: the whole picture; 8 to 15: its inner part."""
WORDS = 2 * VIEW_WORDS
BITS = 16 * VIEW_WORDS
"""The limits of a view: the highest distance, and the highest quality."""
GRID = 4
VIEW_COLOURS = GRID * GRID
"""16-bit words of the colours of a view, of its cells row by row: the low byte is Cb + 128, the high byte Cr + 128."""
LENGTH = WORDS + 1 + 2 * VIEW_COLOURS
"""All words: those of the hash, the quality, the colours of the whole picture, those of its inner part."""
INNER = 0.925
"""Side of the inner part: centred crops from 0.90 to 0.95 have 15 bits or fewer of its hash changed."""

CELLS = 64
_LUMA = np.array([299, 587, 114], np.int64)  # thousandths, ITU-R BT.601
_BASIS_BITS, _CELL_BITS = 18, 8
_CLEAR = 12 << (2 * _BASIS_BITS + _CELL_BITS)
"""12 gray levels: above, a line of text over the picture changes one sign in 21, and JPEG at quality 50 none of 3,900.
Of 3,000 gradients four have more than 63 such coefficients, at most 67; photographs have 78 to 123, a smooth wall of
bricks 37."""

# (row, column) frequencies, lowest sum first, without the mean. Word w holds numbers w, w + 8, ...: each word has low
# and high frequencies, so differences spread over all words.
_ORDER = sorted(((u, v) for u in range(CELLS) for v in range(CELLS) if u + v), key=lambda f: (sum(f), max(f), f))[:BITS]
_ROW, _COLUMN = (np.array(_ORDER).reshape(16, VIEW_WORDS, 2)[..., axis].T for axis in (0, 1))
_BIT = np.uint16(1) << np.arange(16, dtype=np.uint16)
_MIRRORED = (_COLUMN % 2 * _BIT).sum(axis=1)
_MIRRORED = np.concatenate([_MIRRORED, _MIRRORED, np.zeros(LENGTH - WORDS, np.int64)]).astype(np.uint16)
_COLOURS = WORDS + 1 + np.arange(2 * VIEW_COLOURS).reshape(-1, GRID)[:, ::-1].ravel()
_MIRRORED_AT = np.concatenate([np.arange(WORDS + 1), _COLOURS])


def basis(side: float) -> np.ndarray:
    """Orthonormal cosines over the inner `side` (0..1) of a row of cells, integrated over each cell and rounded:
    (frequencies, CELLS) int64, times 2^18."""
    length = side * CELLS
    k = np.arange(1, max(_ROW.max(), _COLUMN.max()) + 1)[:, None]
    border = np.clip((np.arange(CELLS + 1) - CELLS / 2) / length + 0.5, 0, 1)  # of cells, in the inner part
    waves = np.sqrt(2 / length) * length * np.diff(np.sin(np.pi * k * border)) / (np.pi * k)
    mean = np.sqrt(1 / length) * length * np.diff(border)
    return np.rint(np.vstack([mean, waves]) * 2**_BASIS_BITS).astype(np.int64)


def shares(side: float) -> np.ndarray:
    """Compute how much of each of the `CELLS` lies in each of the `GRID` parts of the inner `side` (0..1): (GRID,
    CELLS) int64, in thousandths."""
    border = (np.arange(CELLS + 1) / CELLS - (1 - side) / 2) / side * GRID
    inside = [np.diff(np.clip(border, part, part + 1)) for part in range(GRID)]
    return np.rint(np.array(inside) * (1000 * CELLS * side / GRID)).astype(np.int64)


_VIEWS = (basis(1.0), basis(INNER))
_SHARES = (shares(1.0), shares(INNER))
_CHROMA = np.array([[-169, -331, 500], [500, -419, -81]], np.int64).T  # thousandths, ITU-R BT.601


def hashes(pictures: np.ndarray) -> np.ndarray:
    """The hash of each picture, its quality and its colours.

    Args:
        pictures: uint8 (b, H, W, 3), sRGB. A picture's hash hardly depends on the size; sides that 64 divides are
            fastest (0.8 ms for 1024 x 1024), others take longer by up to 64 / gcd(side, 64).

    Returns:
        uint16 (b, 49): 16 words of 16 bits; then the quality: how many of the 128 coefficients of the view that has
        fewer are clearly not 0. Flat areas, nearly all gradients and empty frames have under 64: too little to
        compare. Then the colours of the cells of both views.
    """
    sums, pixels = _cell_sums(pictures)
    means, words, quality = _luma(sums, pixels), list[np.ndarray](), list[np.ndarray]()
    for view in _VIEWS:
        coefficients = (view @ means @ view.T)[:, _ROW, _COLUMN]
        words.append(((coefficients > 0) * _BIT).sum(axis=2))
        quality.append((np.abs(coefficients) >= _CLEAR).sum(axis=(1, 2)))
    colours = [_colours(sums, pixels, share) for share in _SHARES]
    return np.concatenate([*words, np.minimum(*quality)[:, None], *colours], axis=1).astype(np.uint16)


def flipped(hashed: np.ndarray) -> np.ndarray:
    """The hashes of the pictures mirrored left to right.

    Exact, except bits of coefficients that are exactly 0: a symmetric picture is found by its hash itself.

    Args:
        hashed: uint16 (..., 49), or (..., 16) or fewer without quality and colours.
    """
    count = hashed.shape[-1]
    return (hashed[..., _MIRRORED_AT] if count == LENGTH else hashed) ^ _MIRRORED[:count]


def chroma(words: np.ndarray) -> np.ndarray:
    """The chroma of words of colours, (..., 2 n) int16 from -128 to 127."""
    return np.concatenate([words & 255, words >> 8], axis=-1).astype(np.int16) - 128


def cells(pictures: np.ndarray) -> np.ndarray:
    """Mean luma of 64 x 64 equal cells, (b, 64, 64) int64, times 2^8 and rounded down. Borders of cells cut pixels."""
    return _luma(*_cell_sums(pictures))


def _cell_sums(pictures: np.ndarray) -> tuple[np.ndarray, int]:
    """Sums of red, green and blue of 64 x 64 equal cells, (b, 64, 64, 3) int64; and of how many pixels each."""
    count, height, width, _ = pictures.shape
    rows = _sums(pictures.reshape(count, height, width * 3), np.uint32).reshape(count, CELLS, width, 3)
    columns = _sums(rows.transpose(0, 2, 1, 3).reshape(count, width, CELLS * 3), np.int64)
    sums = columns.reshape(count, CELLS, CELLS, 3).transpose(0, 2, 1, 3)
    return sums, height // gcd(height, CELLS) * (width // gcd(width, CELLS))


def _luma(sums: np.ndarray, pixels: int) -> np.ndarray:
    return ((sums @ _LUMA) << _CELL_BITS) // (1000 * pixels)


def _colours(sums: np.ndarray, pixels: int, share: np.ndarray) -> np.ndarray:
    """The words of the colours of a view, (b, 16) int64."""
    of_parts = np.einsum("pi,bijc,qj->bpqc", share, (sums << _CELL_BITS) // pixels, share, optimize=True) @ _CHROMA
    area = (share.sum(axis=1)[:, None] * share.sum(axis=1))[None, :, :, None]
    values = np.clip(of_parts // ((1000 * area) << _CELL_BITS) + 128, 0, 255).reshape(len(sums), VIEW_COLOURS, 2)
    return values[..., 0] | values[..., 1] << 8


def _sums(values: np.ndarray, dtype: type[np.unsignedinteger | np.signedinteger]) -> np.ndarray:
    """Sums over 64 equal parts of axis 1, which is first repeated so that 64 divides it: (b, 64, n)."""
    repeats = CELLS // gcd(values.shape[1], CELLS)
    parts = np.repeat(values, repeats, axis=1) if repeats > 1 else values
    return parts.reshape(len(values), CELLS, parts.shape[1] // CELLS, values.shape[2]).sum(axis=2, dtype=dtype)
