"""A tiny Sana and a loader of made-up batches, for tests of the trainer in one process and under torchrun."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sana_pipe.config import Config, reads, written
from sana_pipe.data.loader.loader import Batch, LoaderState
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.sana import SanaTransformer
from sana_pipe.train.models.sana_config import SanaConfig, numerics
from sana_pipe.train.parallel.mesh import Layout
from sana_pipe.train.parallel.microbatch import Outputs
from sana_pipe.train.parallel.parallelize import ParallelModel
from sana_pipe.train.training import optimizers
from sana_pipe.train.training.assemble import objective_of
from sana_pipe.train.training.optimizers import in_backward
from sana_pipe.train.training.step import TrainStep
from sana_pipe.train.training.task import DrawnPrompts, TrainingTask, WrittenConfiguration
from tests.support.constants import with_site

ROOT = Path(__file__).resolve().parents[3]
CHANNELS, TEXT_WIDTH, GLOBAL_BATCH = 4, 24, 8
SHAPES = ((8, 8, 12), (6, 10, 16))
"""(latent height, latent width, text rows) of the buckets, taken in turn."""


def environ() -> dict[str, str]:
    """Of processes that tests start."""
    return {**os.environ, "PYTHONPATH": with_site(str(ROOT)), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def config(
    output: Path | str = "unused", *, layers: int = 3, arch: dict[str, Any] | None = None, **train: Any
) -> Config:
    """A valid configuration; `train` overrides fields of the train section, nested ones as dictionaries."""
    base: dict[str, Any] = {
        "output": str(output),
        "steps": 8,
        "microbatch": 4,
        "precision": "fp32",
        "activation_checkpointing": "none",
        "compile": "none",
        "device": "cpu",
        "log_every": 1,
        "trackers": [],
        "save_every": 1000,
        "optim": {"lr": 3e-4, "warmup_steps": 0, "clip": 0.1},
        "parallel": {},
    }
    for name, value in train.items():
        base[name] = {**base[name], **value} if isinstance(value, dict) and name in base else value
    shape = {
        "in_channels": CHANNELS,
        "num_layers": layers,
        "num_attention_heads": 4,
        "attention_head_dim": 8,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 16,
        "caption_channels": TEXT_WIDTH,
    }
    sections = {
        "vae": {"id": "none"},
        "text": {"id": "none"},
        "model": {"arch": {**shape, **(arch or {})}},
        "train": base,
        "patience_s": 1.0,
    }
    return Config.model_validate(sections)


def global_batch(step: int, seed: int = 0, *, logit: float | None = None) -> Batch:
    """The whole batch of a step, from (seed, step) alone. `logit` fixes all time draws."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    height, width, rows = SHAPES[step % len(SHAPES)]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    lengths = torch.randint(1, rows + 1, (GLOBAL_BATCH,), generator=generator)
    mask = torch.arange(rows)[None] < lengths[:, None]
    captions = normal(GLOBAL_BATCH, rows, TEXT_WIDTH) * mask[..., None]
    times, shape = normal(GLOBAL_BATCH), (GLOBAL_BATCH, CHANNELS, height, width)
    latents, noise, control = (normal(*shape) for _ in range(3))
    masks = normal(GLOBAL_BATCH, 1, height, width).clamp(0, 1)
    masks[1] = 0
    rejected = normal(*shape)
    return Batch(
        latents=latents.bfloat16(),
        captions=captions.bfloat16(),
        mask=mask,
        noise=noise,
        logit=times if logit is None else torch.full_like(times, logit) + 0.2 * times,
        sample_ids=tuple(step * 1000 + i for i in range(GLOBAL_BATCH)),
        bucket=(height * 8, width * 8),
        pictures={"control": control.bfloat16(), "mask": masks, "rejected": rejected.bfloat16()},
    )


def part(batch: Batch, start: int, stop: int) -> Batch:
    """Samples `start` to `stop` of a batch."""
    return rows_of(batch, range(start, stop))


def rows_of(batch: Batch, rows: Sequence[int]) -> Batch:
    """These samples of a batch."""
    names, numbers = ("latents", "captions", "mask", "noise", "logit"), list(rows)
    tensors = {name: getattr(batch, name)[numbers] for name in names}
    pictures = {kind: each[numbers] for kind, each in batch.pictures.items()}
    tensors |= {} if batch.pair_weight is None else {"pair_weight": batch.pair_weight[numbers]}
    return replace(batch, **tensors, pictures=pictures, sample_ids=tuple(batch.sample_ids[row] for row in numbers))


def packed(batch: Batch) -> Batch:
    """The batch with text rows without padding."""
    ends = torch.cat([torch.zeros(1), batch.mask.sum(1).cumsum(0)]).int()
    return replace(batch, captions=batch.captions[batch.mask], cu_seqlens=ends)


def microbatches(batch: Batch, size: int, rank: int = 0, world: int = 1) -> list[Batch]:
    """A rank's share of a batch in pieces of `size`; the last may be smaller."""
    share = len(batch.sample_ids) // world
    mine = part(batch, rank * share, (rank + 1) * share)
    return [part(mine, at, min(at + size, share)) for at in range(0, share, size)]


HELD_OUT = (5, 6)
"""Held-out samples by bucket."""
OLD = (1_000_000, 1_000_003, 1_001_001)
"""Ids of old samples among them: two of the first bucket, one of the second."""


def held_out(settings: Config, rank: int = 0, world: int = 1) -> Iterator[tuple[Batch, int]]:
    """What `Task.validation` yields: the held-out samples in microbatches of `train.microbatch`, the last of a bucket
    filled with copies."""
    size = settings.train.microbatch
    for bucket, count in enumerate(HELD_OUT):
        whole = global_batch(1000 + bucket)
        for first in range(rank * size, -(-count // (size * world)) * size * world, size * world):
            rows = [min(row, count - 1) for row in range(first, first + size)]
            yield rows_of(whole, rows), max(0, min(size, count - first))


class HeldOut:
    """`held_out` anew in every iteration."""

    def __init__(self, settings: Config, rank: int, world: int):
        self.values = settings, rank, world

    def __iter__(self) -> Iterator[tuple[Batch, int]]:
        return held_out(*self.values)


TEXTS = ("a red house", "a blue house", "two cats", "a road", "rain on a window")
"""Prompts, each with some text rows."""


def prompts(settings: Config, size: tuple[int, int] = (64, 64)) -> DrawnPrompts:
    """What `Task.pictures` is for pictures of (height, width)."""

    def rows(number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        return torch.randn(3 + 2 * number, TEXT_WIDTH, generator=generator).bfloat16()

    def null() -> tuple[Tensor, Tensor]:
        return rows(99)[:10], torch.arange(10) < 2

    def control(number: int) -> Tensor:
        return torch.randn(CHANNELS, size[0] // 8, size[1] // 8, generator=torch.Generator().manual_seed(number))

    names = {"latent_encoding": "latents", "prompt_set": "five"}
    given = control if settings.train.controlnet is not None else None
    return DrawnPrompts(TEXTS, rows, null, *size, compression=8, names=names, control=given)


def task(
    settings: Config,
    rank: int = 0,
    world: int = 1,
    *,
    snapshot: str = "5eed",
    touch: Callable[[int], Batch | None] | None = None,
    delay: float = 0.0,
    phase: int = 0,
    old: bool = False,
) -> TrainingTask:
    """What `fit` needs. `touch(step)` may return another batch for a step, or do something at that step. old: some of
    the held-out samples are old."""
    train = settings.train

    def loader(layout: Layout, start: int, stop: int) -> Iterator[tuple[list[Batch], LoaderState]]:
        for step in range(start, stop):
            batch = (touch(step) if touch else None) or global_batch(step, train.seed)
            time.sleep(delay)
            state = LoaderState(snapshot, train.seed, phase, step + 1, train.length_window)
            yield microbatches(batch, train.microbatch, rank, world), state

    return TrainingTask(
        LoaderState(snapshot, train.seed, phase, 0, train.length_window),
        CHANNELS,
        TEXT_WIDTH,
        8,
        loader,
        {f"{height * 8}x{width * 8}": GLOBAL_BATCH for height, width, _ in SHAPES},
        validation=None if train.validation is None else lambda layout: HeldOut(settings, rank, world),
        old_samples=np.array(OLD, np.uint64) if old else None,
        pictures=None if train.pictures is None else prompts(settings),
        sample=settings.sample,
        model=settings.model,
        written=written_of(settings),
        patience_s=settings.patience_s,
        textfile=settings.metrics.textfile,
    )


def written_of(settings: Config) -> WrittenConfiguration:
    """What `Task.written` is for a configuration."""
    return WrittenConfiguration(written(settings), partial(reads, "train"))


def model(settings: Config, seed: int = 0) -> SanaTransformer:
    assert settings.model.arch is not None
    shape = SanaConfig.from_arch(settings.model.arch, 8)
    return SanaTransformer.from_scratch(shape, seed, numerics=numerics(settings.train))


class Recorder:
    """Stands where the optimizer stands and keeps the gradients of the step instead of applying them."""

    def __init__(self, module: torch.nn.Module):
        self.module, self.gradients = module, dict[str, Tensor]()

    def step(self) -> None:
        for name, parameter in self.module.named_parameters():
            if not parameter.requires_grad:
                continue
            gradient = parameter.grad
            assert gradient is not None, name
            whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            self.gradients[name] = whole.clone()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.module.zero_grad(set_to_none)


def train_step(
    model: torch.nn.Module | ParallelModel, train: TrainConfig, optimizer: Any = None, **options: Any
) -> TrainStep:
    """A step on the CPU. Without an optimizer it only records the gradients."""
    parallel_model = model if isinstance(model, ParallelModel) else ParallelModel(model)
    optimizer = optimizer or Recorder(parallel_model.module)
    return TrainStep(parallel_model, objective_of(train), optimizer, train, torch.device("cpu"), **options)


def losses(step: TrainStep, batch: Batch) -> Tensor:
    """Losses of the samples of one microbatch, with their graph."""
    inputs, targets, *_ = step.prepare(batch)
    return step.loss(Outputs(step.model.module(**inputs), {}, {}), targets)[0]


def gradients(
    model: torch.nn.Module | ParallelModel, settings: Config, pieces: list[Batch]
) -> tuple[float, float, dict[str, Tensor]]:
    """(loss, gradient norm, gradients) of one step, not clipped, not applied."""
    train = settings.train.model_copy(update={"optim": settings.train.optim.model_copy(update={"clip": None})})
    recorder = Recorder(model.module if isinstance(model, ParallelModel) else model)
    outcome = train_step(model, train, recorder)(pieces, 1)
    return float(outcome.loss), float(outcome.grad_norm), recorder.gradients


def train_losses(
    model: torch.nn.Module | ParallelModel, settings: Config, steps: int, rank: int = 0, world: int = 1
) -> list[float]:
    """The losses of `steps` optimizer steps over made-up batches."""
    train, parallel_model = settings.train, model if isinstance(model, ParallelModel) else ParallelModel(model)
    optimizer = optimizers.build(parallel_model.module, train.optim, torch.device("cpu"), numerics=train.numerics)
    step = train_step(parallel_model, train, optimizer)
    if train.optim.in_backward:
        in_backward.fuse(optimizer, parallel_model)
    result = []
    for number in range(steps):
        optimizers.set_learning_rate(
            optimizer, optimizers.learning_rate(train.optim, number, train.steps, train.numerics)
        )
        outcome = step(microbatches(global_batch(number), train.microbatch, rank, world), number + 1)
        result.append(float(outcome.loss))
    return result


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Relative L2 distance over all tensors together. Not per tensor: the bias of the cross attention's keys has a
    gradient of exactly zero in theory, so its relative error means nothing."""
    assert found.keys() == expected.keys()
    difference = sum(float((found[n].double() - expected[n].double()).square().sum()) for n in expected)
    return (difference / sum(float(expected[n].double().square().sum()) for n in expected)) ** 0.5
