"""Start values of a Sana transformer, slice by slice.

What: `Stored` (a diffusers folder) and `InitialValues` (a seed) return any slice of any parameter in our layout, and
a short fingerprint of the whole.
Why by slice: a process reads only its shards. Sana 1.6B in fp32 is 6.4 GB, which eight processes of one machine need
not hold eight times.
Price: every process draws a parameter as a whole before it takes its slice. The fingerprint covers a sample of the
values: it distinguishes models, not single flipped bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor

from pipeline.models.sana_config import SanaConfig
from pipeline.models.sana_files import WeightFiles, expected_shapes
from pipeline.models.sana_init import initial_value

_SMALL = 1 << 16


class Stored(WeightFiles):
    """The values of a diffusers folder (see `WeightFiles`)."""

    def fingerprint(self) -> str:
        """Covers dtype, shape and up to 64 values of the first, middle and last row of every parameter."""
        digest = xxhash.xxh3_128()
        for name, shape in sorted(self.shapes.items()):
            digest.update(f"{name} {shape} {self.dtype(name)}\0".encode())
            for row in sorted({0, shape[0] // 2, shape[0] - 1}):
                lengths = [1, *(min(side, 64) for side in shape[1:])]
                box = self.read(name, [row] + [0] * (len(shape) - 1), lengths)
                digest.update(_bytes(box.flatten()[:64]))
        return digest.hexdigest()


class InitialValues:
    """NVlabs' from-scratch values (see `pipeline.models.sana_init`)."""

    def __init__(self, config: SanaConfig, seed: int):
        self.config, self.seed, self.description = config, seed, ""
        self.shapes = expected_shapes(config)

    def read(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        whole = initial_value(name, self.shapes[name], self.seed, self.config)
        return whole[tuple(slice(at, at + length) for at, length in zip(offsets, lengths, strict=True))]

    def fingerprint(self) -> str:
        """Covers shape, seed and the values of all small parameters, which depend on torch's generator."""
        digest = xxhash.xxh3_128(f"{self.config} {self.seed}".encode())
        for name, shape in sorted(self.shapes.items()):
            if torch.Size(shape).numel() <= _SMALL:
                digest.update(_bytes(self.read(name, [0] * len(shape), shape)))
        return digest.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
