"""`python -m tests.cuda.one_of_many CARD JSON`: steps of configurations on one pretended card, as the first of several
processes whose collectives do nothing; a line of JSON of each, with its memory and what `plan` says. The allocator is
as the environment says.

One process stands for all, since they are alike: eight cards cost no more than one. The trainer's loop, loader and
saves are left out.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.gpu import steps
from benchmarks.gpu.sizes import Sizes
from sana_pipe.base.gpus import GIB, card
from sana_pipe.config import load
from sana_pipe.data.loader.loader import Batch
from sana_pipe.tools.planning.predict import Data, Machine, architecture, predict
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.adapters import adapter_of
from sana_pipe.train.models.spec import ModelSpec
from sana_pipe.train.parallel.mesh import DIMS, check_sizes
from sana_pipe.train.training.assemble import Trainable, assemble, objective_of

CUDA = torch.device("cuda", 0)
ROWS = 300
"""Of every caption."""
TIMES = 2
"""That every bucket is trained on: the allocator's pools grow in the first round."""


@contextmanager
def first_of(cards: int, sizes: tuple[int, ...]) -> Iterator[DeviceMesh]:
    """A mesh of these sizes, without the other processes."""
    dist.init_process_group("fake", rank=0, world_size=cards, store=FakeStore())
    try:
        yield init_device_mesh("cuda", sizes, mesh_dim_names=DIMS)
    finally:
        dist.destroy_process_group()


def batch(shape: ModelSpec, train: TrainConfig, height: int, width: int, pictures: tuple[str, ...]) -> Batch:
    """A microbatch of this bucket, in page-locked memory; captions fill all of their rows."""
    sizes = replace(Sizes.of(False), config=shape, rows=ROWS)
    made = steps.batch_of(sizes, train.microbatch, False, (height // sizes.compression, width // sizes.compression))
    mask = torch.ones_like(made.mask).pin_memory()
    full = replace(made, mask=mask, pictures=dict.fromkeys(pictures, made.latents))
    if train.text != "packed":
        return full
    rows = torch.arange(len(made.mask) + 1, dtype=torch.int32) * ROWS
    return replace(full, captions=made.captions.flatten(0, 1).pin_memory(), cu_seqlens=rows.pin_memory())


def measured(name: str, cards: int, options: list[str], buckets: Mapping[tuple[int, int], int]) -> dict[str, Any]:
    """GiB of the steps, allocator retries, and the prediction."""
    config = load(name, options)
    train, data = config.train, Data(buckets, None, ROWS)
    shape, layout = architecture(config.model, config.data.resolution, data), check_sizes(train.parallel, cards)
    here = card(sys.argv[1])
    plan = predict(train, shape, data, Machine(here, here.memory, cards), layout=layout)
    with first_of(cards, layout.sizes) as mesh:
        trainable = Trainable(shape, objective_of(train), adapter_of(train, shape, start=False))
        module = trainable.module(train)
        reference = trainable.reference(module, train)
        model, _, ema, step = assemble(trainable, module, mesh, train, CUDA, reference=reference)
        model.module.train()
        for number in range(TIMES):
            for (height, width), samples in buckets.items():
                each = batch(shape, train, height, width, tuple(trainable.objective.pictures))
                step([each] * -(-samples // cards // train.microbatch), number + 1)
                step.await_verdict()
                if ema is not None:
                    ema.update(number + 1)
        memory = torch.cuda.memory_stats()
    return {
        "peak": memory["allocated_bytes.all.peak"] / GIB,
        "reserved": memory["reserved_bytes.all.peak"] / GIB,
        "retries": memory["num_alloc_retries"],
        "planned_peak": plan.traced.total / GIB,
        "planned_reserved": (plan.total - plan.kinds["context"]) / GIB,
    }


if __name__ == "__main__":
    for name, cards, options, buckets in json.loads(sys.argv[2]):
        figures = measured(name, cards, options, {(height, width): samples for height, width, samples in buckets})
        print(json.dumps({"name": name, "cards": cards, **figures}), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()
