"""The section `encode`."""

from __future__ import annotations

from typing import Literal

from sana_pipe.base.config import AUTO, Microbatch, NotNegative, Section, Share
from sana_pipe.data.cache.config import StorageConfig


class EncodeConfig(Section):
    """The way in which pictures and captions are encoded. Only `storage` is part of the encoding. Batch sizes are part
    of the plan, so a unit's bytes do not depend on the process that encodes it."""

    storage: StorageConfig = StorageConfig()
    """Storage of values."""
    signals: list[Literal["phash"]] = []
    """Further records of each picture, made from the pixels that are decoded for the latent. phash: a perceptual hash,
    by which near-duplicates are found. A cache gets those that it lacks without encoding latents again."""
    image_batch: Microbatch = AUTO
    """Pictures of one VAE batch. auto: on a GPU for each size as many as are predicted to leave a tenth of the memory
    free, at most 15 of 1024 x 1024 pixels (larger tensors are no faster); 8 on a CPU and with `--engine ray`. A batch
    that does not fit is halved."""
    workers: NotNegative = 4
    """Threads that read and decode pictures."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda or cuda:N."""
    max_reject_rate: Share = 0.5
    """Refuse a source if more than this share of its items is rejected. Items left out by your settings
    (`data.min_side`, ...) do not count; a source without usable items is always refused."""
    max_shrink: Share = 0.2
    """Refuse a scan that misses more than this share of the source's earlier pictures: the source is probably
    unreachable or mistyped. 1: accept it."""
