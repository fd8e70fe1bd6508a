"""What a consumer sees of a loader's steps, sample by sample, so that ranks and microbatches can be put together."""

from __future__ import annotations

from typing import Any

import torch
import xxhash

from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.loader.loader import Batch, Loader, LoaderSettings, unpack


def loader(cache: Cache, **options: Any) -> Loader:
    settings: dict[str, Any] = {
        "seed": 5,
        "phase": 1,
        "rank": 0,
        "world": 1,
        "microbatch": 5,
        "caption_drop": 0.2,
        "prefetch": 0,
        "threads": 1,
        "stop_step": 12,
    }
    return Loader(cache.open_snapshot(), LoaderSettings(**{**settings, **options}))


def seen(batches: list[Batch]) -> list[str]:
    """Per sample: its id, its bucket, the text length, and a digest of everything that reaches the model."""
    out = []
    for batch in batches:
        captions = batch.captions
        if batch.cu_seqlens is not None:
            captions = unpack(captions, batch.cu_seqlens, batch.mask)
        for i, identity in enumerate(batch.sample_ids):
            state = xxhash.xxh3_128()
            for tensor in (batch.latents, captions, batch.mask, batch.noise, batch.logit):
                state.update(tensor[i].contiguous().flatten().view(torch.uint8).numpy().data)
            out.append(f"{identity:016x} {batch.bucket} {batch.mask.shape[1]} {state.hexdigest()}")
    return out


def sequence(steps: Loader) -> list[list[str]]:
    return [seen(batches) for batches, _ in steps]
