"""Packing a small cache in this process."""

from __future__ import annotations

import pytest

from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.snapshots import packing


def pack(cache: Cache, block: int = 4, window: int = 2, name: str | None = None) -> Snapshot:
    """Pack the newest snapshot, `block` samples to a shard, in this process."""
    source = cache.open_snapshot()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "WINDOW", window)
        patch.setattr(packing, "block_sizes", lambda s, target: [min(block, n) for n in (b.samples for b in s.buckets)])
        plan = packing.planned(cache, source, block)
        packer = packing.Packer(cache, source, plan)
        for unit in plan.units:
            packer.make(plan, unit, lambda made, rejected: None)
        return cache.open_snapshot(cache.add_snapshot(packing.assembled(cache, source, plan), name))
