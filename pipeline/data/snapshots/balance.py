"""Weights that balance what a data set has too much of, from clusters of the records in the caches.

What: `vectors` pools the latent of each picture (mean and spread of each channel); `clusters` groups them by k-means;
`weights` gives a sample of a large cluster fewer visits.
Why k-means here: scikit-learn's rounds as its threads and libraries do, and a snapshot must be the same everywhere.
Vectors are rounded to integers, whose products and sums are exact in float64 in any order.
Price: every latent is read once. 1 KiB of memory a sample for latents of 32 channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.codec import to_float
from sana_pipe.data.snapshots.frames import Frame
from sana_pipe.data.snapshots.join import EncodedRecords
from sana_pipe.data.snapshots.record_values import read_records

CLUSTERS = 32
"""Groups at most."""
FITTED = 1 << 15
"""Samples, those with the smallest ids, that decide the clusters; the others join the nearest."""
ROUNDS = 30
SCALE, LARGEST = 1024, 8191
"""A standard deviation in rounded vectors, and the largest value."""
STEPS, MOST = 8, 8
"""Weights are multiples of 1/8, from 1/8 to 8 visits an epoch."""


def vectors(
    frame: Frame, records: EncodedRecords, caches: Sequence[Cache], shapes: Sequence[tuple[int, int]]
) -> np.ndarray:
    """A vector of each sample, (n, d) float64.

    Args:
        shapes: (height, width) of the buckets in pixels.

    Raises:
        IntegrityError: a record is damaged.
    """
    encoding = records.pictures[0]
    rows, result = frame.pictures[encoding.kind], list[tuple[np.ndarray, np.ndarray]]()
    for bucket in np.unique(frame.bucket).tolist():
        ours = np.flatnonzero(frame.bucket == bucket)
        channels, *grid = encoding.shape(*shapes[bucket])
        count = np.full(len(ours), channels)
        for some, values, _ in read_records(
            encoding, records.indexes[encoding.kind], caches, rows[ours], count, tuple(grid)
        ):
            flat = to_float(values).reshape(len(some), channels, -1).astype(np.float64)
            result.append((ours[some], np.concatenate([flat.mean(axis=2), flat.std(axis=2)], axis=1)))
    pooled = np.empty((len(rows), result[0][1].shape[1] if result else 0))
    for some, values in result:
        pooled[some] = values
    return pooled


def clusters(pooled: np.ndarray, sample_id: np.ndarray) -> np.ndarray:
    """The cluster of each sample, (n,) int64: 0 to at most `CLUSTERS` - 1, the same for any order of the samples.

    Args:
        pooled: from `vectors`. sample_id: (n,) uint64.
    """
    order = np.argsort(sample_id, kind="stable")
    fitted = pooled[order[:FITTED]]
    middle, spread = fitted.mean(axis=0), fitted.std(axis=0)
    spread[spread == 0] = 1
    rounded = np.clip(np.rint((pooled - middle) / spread * SCALE), -LARGEST, LARGEST)
    chosen = rounded[order[:FITTED]]
    centres = _first_centres(chosen)
    for _ in range(ROUNDS):
        member = _nearest(chosen, centres)
        sizes = np.bincount(member, minlength=len(centres))
        sums = np.zeros_like(centres)
        np.add.at(sums, member, chosen)
        new = np.where(sizes[:, None] > 0, np.rint(sums / np.maximum(sizes, 1)[:, None]), centres)
        if np.array_equal(new, centres):
            break
        centres = new
    return np.concatenate(
        [
            np.empty(0, np.int64),
            *(_nearest(rounded[at : at + FITTED], centres) for at in range(0, len(rounded), FITTED)),
        ]
    )


def _first_centres(chosen: np.ndarray) -> np.ndarray:
    """k-means++: each centre is a sample, drawn by the square of its distance from those before it."""
    rng = np.random.Generator(np.random.PCG64(0))
    centres = chosen[rng.integers(len(chosen))][None]
    distance = _squares(chosen, centres)[:, 0]
    while len(centres) < CLUSTERS and (total := int(distance.sum())):
        at = int(np.searchsorted(np.cumsum(distance), rng.integers(total), side="right"))
        centres = np.concatenate([centres, chosen[at][None]])
        distance = np.minimum(distance, _squares(chosen, centres[-1:])[:, 0])
    return centres


def _squares(values: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Squared distances (n, k) of vectors of integers, exact."""
    return (values**2).sum(axis=1)[:, None] - 2 * values @ centres.T + (centres**2).sum(axis=1)


def _nearest(values: np.ndarray, centres: np.ndarray) -> np.ndarray:
    return _squares(values, centres).argmin(axis=1)


def weights(member: np.ndarray, strength: float) -> list[Fraction]:
    """Visits per epoch of a sample of each cluster.

    Args:
        member: (n,) cluster of each sample.
        strength: 0: equal for all; 1: every cluster has as many visits, as far as 1/8 to 8 visits a sample allow.
    """
    sizes = np.bincount(member).astype(np.float64)
    raw = np.where(sizes > 0, np.maximum(sizes, 1) ** -strength, 0)
    scale = len(member) / float((sizes * raw).sum())
    return [Fraction(min(MOST * STEPS, max(1, round(STEPS * value * scale))), STEPS) for value in raw.tolist()]
