"""Random numbers that belong to a visit of a sample, not to a process.

What: counter-based (Philox) generators keyed by (seed, phase, visit, sample id) and a purpose.
Why: noise, times, caption choice and caption drop are then the same on every topology, on every tensor- and
pipeline-parallel rank and after every resume, without any state to save.
Price: about 20 microseconds to key a generator, per sample and purpose; drawn on the CPU. The streams are numpy's
(`Generator.random`, `Generator.standard_normal`), which numpy keeps stable but does not promise to keep for ever.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import xxhash


@dataclass(frozen=True)
class Draws:
    """The scalar draws of one visit: uniform `caption` and `drop` in [0, 1), standard normal `logit`."""

    caption: float
    drop: float
    logit: float


def generator(purpose: str, seed: int, phase: int, visit: int, sample_id: int) -> np.random.Generator:
    """A generator of its own for one purpose of one visit of one sample."""
    packed = struct.pack("<QQQQ", seed, phase, visit, sample_id) + purpose.encode()
    key = np.frombuffer(xxhash.xxh3_128_digest(packed), np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def draws(seed: int, phase: int, visit: int, sample_id: int) -> Draws:
    """The scalars of a visit, in an order that never changes."""
    own = generator("draws", seed, phase, visit, sample_id)
    return Draws(float(own.random()), float(own.random()), float(own.standard_normal()))


def noise(seed: int, phase: int, visit: int, sample_id: int, out: np.ndarray) -> None:
    """Fill a C-contiguous float32 array with the standard normal noise of a visit."""
    generator("noise", seed, phase, visit, sample_id).standard_normal(dtype=np.float32, out=out)
