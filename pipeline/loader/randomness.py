"""Random numbers that belong to a visit of a sample, not to a process.

What: counter-based (Philox) generators keyed by (seed, phase, visit, sample id) and a purpose.
Why: noise, times, caption choice and caption drop are then the same on every topology, on every tensor- and
pipeline-parallel rank and after every resume, without any state to save.
Price: a microsecond to key a generator, per sample and purpose, and 0.4 ms for the noise of a 1024 px latent; drawn on
the CPU. The streams are numpy's (`Generator.random`, `Generator.standard_normal`), which numpy keeps stable but does
not promise to keep for ever.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import xxhash


class Draws(NamedTuple):
    """The scalar draws of visits: uniform `caption` and `drop` in [0, 1), standard normal `logit`; (n,) float64."""

    caption: np.ndarray
    drop: np.ndarray
    logit: np.ndarray


_own = threading.local()
_KEY = struct.Struct("<QQQQ").pack
_WORDS = struct.Struct("<QQ").unpack


def generator(purpose: str, seed: int, phase: int, visit: int, sample_id: int) -> np.random.Generator:
    """The generator for one purpose of one visit of one sample; good until this thread asks for the next.

    The stream of a new `Philox(key=...)`; setting the state of an old one is several times faster.
    """
    try:
        bits, state, own = _own.kept
    except AttributeError:
        bits = np.random.Philox(key=np.zeros(2, np.uint64))
        fresh: Any = bits.state
        fresh["buffer"] = fresh["state"]["counter"] = (0, 0, 0, 0)  # read in twice as fast as arrays
        state, own = fresh, np.random.Generator(bits)
        _own.kept = bits, state, own
    packed = _KEY(seed, phase, visit, sample_id) + purpose.encode()
    state["state"]["key"] = _WORDS(xxhash.xxh3_128_digest(packed))
    bits.state = state
    return own


def draws(seed: int, phase: int, visits: Iterable[int], sample_ids: Iterable[int]) -> Draws:
    """The scalars of some visits, of each in an order that never changes."""
    found: list[float] = []
    for visit, sample_id in zip(visits, sample_ids, strict=True):
        own = generator("draws", seed, phase, visit, sample_id)
        found += own.random(), own.random(), own.standard_normal()
    return Draws(*np.array(found).reshape(-1, 3).T)


def noise(seed: int, phase: int, visit: int, sample_id: int, out: np.ndarray) -> None:
    """Fill a C-contiguous float32 array with the standard normal noise of a visit."""
    generator("noise", seed, phase, visit, sample_id).standard_normal(dtype=np.float32, out=out)
