"""Samples as `bucket` joins them, drawn at random."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from sana_pipe.data.cache.keys import of_halves
from sana_pipe.data.snapshots.frames import Frame

SOURCES = ["zoo", "ärger", "b", "a"]


def frame_of(rng: np.random.Generator, pictures: int, texts: int) -> Frame:
    """Pictures at one to three resolutions, of which many share a file; some captions stand twice."""
    sizes = rng.integers(1, 4, pictures)
    of = np.repeat(np.arange(pictures), sizes)
    order = rng.permutation(len(of))
    of = of[order]
    names = rng.permutation([f"{'éa b'[n % 4]}/{n % 97:02d} {n}" for n in range(pictures)])
    many = rng.integers(1, 5, pictures)[of]
    starts = np.cumsum(rng.integers(0, texts, pictures))[of]
    captions = np.concatenate([[0], np.cumsum(many)])
    step = np.arange(captions[-1]) - np.repeat(captions[:-1], many)
    file = rng.integers(0, max(1, pictures // 3), pictures)[of]
    return Frame(
        source=rng.integers(0, len(SOURCES), pictures).astype(np.int32)[of],
        item=pa.array(names[of].tolist(), pa.large_string()),
        sample_id=rng.permutation(1 << 12)[: len(of)].astype(np.uint64),
        picture_id=rng.permutation(1 << 12)[:pictures].astype(np.uint64)[of],
        digest=of_halves(file.astype(np.uint64), 7),
        height=rng.integers(1, 3, pictures)[of] * 64,
        width=rng.integers(1, 3, pictures)[of] * 64,
        bucket=np.arange(len(of)) % 5,
        cluster=np.zeros(len(of), np.int64),
        pictures={"latent": np.arange(len(of))},
        captions=captions,
        text=(np.repeat(starts, many) + step * step % 3) % texts,
        weight=rng.random(captions[-1]).astype(np.float32),
        group=np.zeros(len(of), "S16"),
    )
