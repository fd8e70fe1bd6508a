"""Under torchrun, CACHE FOLDER LENGTH_WINDOW [QUARANTINE]: every rank reads its part of the same steps; the first one
writes what all of them saw to FOLDER/found.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from sana_pipe.base.processes import run_and_exit
from sana_pipe.data.cache.cache import Cache
from tests.support.consumed import loader, seen


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    own = loader(
        Cache(Path(sys.argv[1])),
        rank=rank,
        world=world,
        prefetch=2,
        threads=2,
        length_window=int(sys.argv[3]),
        quarantine=sys.argv[4] if len(sys.argv) > 4 else None,
    )
    steps = []
    for batches, _ in own:
        mine = seen(batches)
        shapes = torch.tensor([batches[0].mask.shape[1], len(mine), *batches[0].latents.shape[1:]])
        first = shapes.clone()
        dist.broadcast(first, 0)
        assert torch.equal(shapes, first), "ranks see different shapes"
        everyone: list[list[str]] = [[] for _ in range(world)]
        dist.all_gather_object(everyone, mine)
        steps.append([row for part in everyone for row in part])
    if rank == 0:
        (Path(sys.argv[2]) / "found.json").write_text(json.dumps(steps))
    dist.destroy_process_group()


if __name__ == "__main__":
    run_and_exit(main)
