"""The settings with which a process encodes, whether it is `encode`, its probe, a Ray worker or `verify --repair`."""

from __future__ import annotations

from dataclasses import dataclass

from sana_pipe.data.encoding.config import EncodeConfig
from sana_pipe.data.signals import Encoders


@dataclass(frozen=True)
class EncoderSettings:
    """The models of the encoders, and what a process needs to run them.

    Attributes:
        models: the sections that name the models.
        encode: the section with the device, the batches and the threads that decode.
        max_pixels: the limit on the pixels of a picture (`data.max_pixels`).
    """

    models: Encoders
    encode: EncodeConfig
    max_pixels: int
