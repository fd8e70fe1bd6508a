"""Optimizer steps of one process on made-up batches, with the run's model, strategy, step, optimizer and EMA."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from sana_pipe.data.loader.loader import Batch
from sana_pipe.tools.planning.trace import Shape
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.adapters import adapter_of
from sana_pipe.train.models.spec import ModelSpec
from sana_pipe.train.parallel.parallelize import parallelize
from sana_pipe.train.parallel.shards import local
from sana_pipe.train.training import optimizers
from sana_pipe.train.training.ema import EMA
from sana_pipe.train.training.objectives.flow import Flow
from sana_pipe.train.training.optimizers import in_backward
from sana_pipe.train.training.step import TrainStep


class RealStep:
    """Call it for a step.

    Args:
        mesh: of this process alone or of a launch.
    """

    def __init__(
        self, architecture: ModelSpec, train: TrainConfig, shape: Shape, device: torch.device, mesh: DeviceMesh
    ):
        whole, adapter = architecture.module(train), adapter_of(train, architecture, start=False)
        if adapter is not None:
            adapter.apply(whole)
        self.model = parallelize(whole, mesh, train)
        with torch.no_grad():
            for parameter in self.model.module.parameters():
                local(parameter).fill_(1e-3)
        self.optimizer = optimizers.build(
            self.model.module, train.optim, device, seed=train.seed, numerics=train.numerics
        )
        self.ema = EMA(self.model.module, train.ema) if train.ema is not None else None
        if train.optim.in_backward:
            in_backward.fuse(self.optimizer, self.model)
        self.step = TrainStep(self.model, Flow(train.flow), self.optimizer, train, device)
        self.done = 0
        self._batches = [made_up_batch(architecture, shape, 0)] * shape.count

    def __call__(self) -> None:
        self.done += 1
        self.step(self._batches, self.done)
        if self.ema is not None:
            self.ema.update(self.done)
        self.step.await_verdict()


def made_up_batch(architecture: ModelSpec, shape: Shape, number: int) -> Batch:
    """Random values of a microbatch's shapes; `number` seeds them."""
    generator = torch.Generator().manual_seed(number)
    samples, size = shape.microbatch, (shape.microbatch, architecture.in_channels, shape.height, shape.width)
    return Batch(
        latents=torch.randn(size, generator=generator).bfloat16(),
        captions=torch.randn(samples, shape.rows, architecture.caption_channels, generator=generator).bfloat16(),
        mask=torch.ones(samples, shape.rows, dtype=torch.bool),
        noise=torch.randn(size, generator=generator),
        logit=torch.randn(samples, generator=generator),
        sample_ids=tuple(range(samples)),
        bucket=(shape.height, shape.width),
    )
