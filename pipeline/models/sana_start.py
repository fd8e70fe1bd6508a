"""The values that a Sana transformer starts from, slice by slice.

What: `Stored` (a diffusers folder) and `Drawn` (a seed) give any slice of any parameter in our layout, and a short
fingerprint of the whole.
Why by slice: a process that holds a part of the model reads or keeps just that part. Sana 1.6B in fp32 is 6.4 GB, which
eight processes of one machine need not hold eight times.
Price: a drawn parameter is drawn as a whole before its slice is cut out, on every process. The fingerprint samples:
it tells one model from another, not one flipped bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from pipeline.models.sana_config import SanaConfig
from pipeline.models.sana_files import WeightFiles, expected_shapes
from pipeline.models.sana_init import initial_value

_SMALL = 1 << 16


class Start(Protocol):
    """Where the first values of a model come from."""

    @property
    def config(self) -> SanaConfig:
        """The model's shape."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of every parameter."""
        ...

    def read(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """The box of a parameter that begins at `offsets`, in our layout, on the CPU, in any floating dtype."""
        ...

    def fingerprint(self) -> str:
        """The same on every process whose values are the same."""
        ...


class Stored(WeightFiles):
    """The values of a diffusers folder (see `WeightFiles`)."""

    def fingerprint(self) -> str:
        """Of every parameter its dtype, its shape and up to 64 values of its first, middle and last row."""
        digest = xxhash.xxh3_128()
        for name, shape in sorted(self.shapes.items()):
            digest.update(f"{name} {shape} {self.dtype(name)}\0".encode())
            for row in sorted({0, shape[0] // 2, shape[0] - 1}):
                lengths = [1, *(min(side, 64) for side in shape[1:])]
                box = self.read(name, [row] + [0] * (len(shape) - 1), lengths)
                digest.update(_bytes(box.flatten()[:64]))
        return digest.hexdigest()


class Drawn:
    """NVlabs' from-scratch values (see `pipeline.models.sana_init`)."""

    def __init__(self, config: SanaConfig, seed: int):
        self.config, self.seed = config, seed
        self.shapes = expected_shapes(config)

    def read(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        whole = initial_value(name, self.shapes[name], self.seed, self.config)
        return whole[tuple(slice(at, at + length) for at, length in zip(offsets, lengths, strict=True))]

    def fingerprint(self) -> str:
        """Of the shape, the seed and the values of all small parameters, which name torch's generator."""
        digest = xxhash.xxh3_128(f"{self.config} {self.seed}".encode())
        for name, shape in sorted(self.shapes.items()):
            if torch.Size(shape).numel() <= _SMALL:
                digest.update(_bytes(self.read(name, [0] * len(shape), shape)))
        return digest.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
