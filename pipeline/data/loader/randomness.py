"""Random numbers that belong to a visit of a sample, not to a process.

Counter-based (Philox) generators, keyed by (seed, phase, visit, sample id) and a purpose. Noise, times, caption choice
and caption drop are therefore the same on every topology, on every tensor- and pipeline-parallel rank and after every
resume, and there is no state to save.
Price: keying a generator takes a microsecond per sample and purpose, the noise of a 1024 px latent 0.4 ms, on the CPU.
The streams are numpy's (`Generator.random`, `Generator.standard_normal`); numpy keeps them stable but promises nothing.
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


_thread = threading.local()
_KEY = struct.Struct("<QQQQ").pack
_WORDS = struct.Struct("<QQ").unpack


def generator(purpose: str, seed: int, phase: int, visit: int, sample_id: int) -> np.random.Generator:
    """The generator for one purpose of one visit of one sample; valid until this thread asks for the next.

    It has the stream of a new `Philox(key=...)`; setting the state of an existing Philox is several times faster.
    """
    try:
        bits, state, random = _thread.philox
    except AttributeError:
        bits = np.random.Philox(key=np.zeros(2, np.uint64))
        fresh: Any = bits.state
        fresh["buffer"] = fresh["state"]["counter"] = (0, 0, 0, 0)  # numpy sets tuples twice as fast as arrays
        state, random = fresh, np.random.Generator(bits)
        _thread.philox = bits, state, random
    packed = _KEY(seed, phase, visit, sample_id) + purpose.encode()
    state["state"]["key"] = _WORDS(xxhash.xxh3_128_digest(packed))
    bits.state = state
    return random


def draws(seed: int, phase: int, visits: Iterable[int], sample_ids: Iterable[int]) -> Draws:
    """The scalar draws of some visits. Each stream is read in this order, which must never change."""
    values: list[float] = []
    for visit, sample_id in zip(visits, sample_ids, strict=True):
        random = generator("draws", seed, phase, visit, sample_id)
        values += random.random(), random.random(), random.standard_normal()
    return Draws(*np.array(values).reshape(-1, 3).T)


def noise(seed: int, phase: int, visit: int, sample_id: int, out: np.ndarray) -> None:
    """Fill a C-contiguous float32 array with the standard normal noise of a visit."""
    generator("noise", seed, phase, visit, sample_id).standard_normal(dtype=np.float32, out=out)
