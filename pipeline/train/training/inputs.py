"""Make a run's task of its inputs: loaders with the settings of the training, the prompts that it draws, checks.

The stage opens the inputs (`loader.inputs`), so that this room knows no cache and no kind of record.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from sana_pipe.base.errors import ConfigError
from sana_pipe.base.launch import Launch, resolve_device
from sana_pipe.base.retrying import TIMEOUT_S
from sana_pipe.data.loader.inputs import Inputs
from sana_pipe.data.loader.loader import Loader, LoaderSettings, LoaderState, bf16
from sana_pipe.data.loader.schedule import Schedule
from sana_pipe.data.loader.validation_loader import ValidationLoader
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.config import ModelConfig, SampleConfig
from sana_pipe.train.parallel.mesh import Layout
from sana_pipe.train.training.assemble import objective_of
from sana_pipe.train.training.config import PicturesConfig
from sana_pipe.train.training.task import DrawnPrompts, TrainingTask, WrittenConfiguration

_MANY = 1000
"""Epochs that the mean length of an epoch is taken from."""
THREADS = 2
"""Threads of each process that read batches ahead."""
PREFETCH_MIB = 128
"""MiB of batches that each process reads ahead."""
VALIDATION_SEED = 0
"""Seed of the choice of held-out samples, of their captions and noise; not `train.seed`, so that runs can be
compared."""


def _check_quarantine(layout: Layout) -> None:
    """Refuse a quarantine where several processes read the same batch."""
    if layout.model_parallel_size > 1:
        raise ConfigError(
            f"--quarantine with train.parallel.tp_size = {layout.tp} and pp_size = {layout.pp}: processes of one "
            "batch read it each; if only one of them finds a record unreadable, they go on with other samples",
            fix="train without --quarantine: a bad record stops the run and is named (sana-pipe verify --repair)",
        )


def task_of(
    train: TrainConfig,
    inputs: Inputs,
    launch: Launch,
    quarantine: str | Path | None = None,
    *,
    model: ModelConfig,
    sample: SampleConfig,
    written: WrittenConfiguration,
) -> TrainingTask:
    """The data of a run, and what it needs of other sections."""
    snapshot, part = inputs.snapshot, inputs.heldout
    kinds = objective_of(train).pictures

    def check(layout: Layout) -> None:
        inputs.check_pictures(kinds)
        if quarantine is not None:
            _check_quarantine(layout)

    def settings(layout: Layout, start: int, stop: int) -> LoaderSettings:
        return LoaderSettings(
            seed=train.seed,
            phase=inputs.phase,
            rank=layout.data_rank(launch.rank),
            world=layout.data_world,
            microbatch=train.microbatch,
            caption_drop=train.caption_drop,
            prefetch=None,
            threads=THREADS,
            start_step=start,
            stop_step=stop,
            prefetch_mib=PREFETCH_MIB,
            text=train.text or "padded",
            pictures=kinds,
            length_window=train.length_window,
            pin=resolve_device(train.device, launch).type == "cuda",
            timeout_s=inputs.patience_s + 2 * TIMEOUT_S,  # readers of a store give up first
            quarantine=quarantine,
        )

    def validation(layout: Layout) -> ValidationLoader:
        assert part is not None and train.validation is not None
        training = settings(layout, 0, 0)
        fixed = replace(training, seed=VALIDATION_SEED, phase=0, caption_drop=0.0, length_window=0, quarantine=None)
        return ValidationLoader(part, fixed, train.validation.samples)

    return TrainingTask(
        first_state=LoaderState(snapshot.id, train.seed, inputs.phase, 0, train.length_window),
        channels=inputs.latent.channels,
        text_width=inputs.text_width,
        text_kind=inputs.text_kind,
        text_rows=inputs.text_rows,
        vae_factors=(inputs.latent.scaling_factor, inputs.latent.shift_factor),
        sample_size=inputs.sample_size,
        compression=inputs.latent.compression,
        loader=lambda layout, start, stop: Loader(snapshot, settings(layout, start, stop)),
        batches={f"{bucket.height}x{bucket.width}": bucket.batch for bucket in snapshot.buckets},
        model=model,
        sample=sample,
        written=written,
        names=snapshot.names,
        epoch_steps=Schedule.of(snapshot.head, seed=train.seed, phase=inputs.phase).steps_upto(_MANY) / _MANY,
        validation=None if part is None else validation,
        leaked=inputs.leaked,
        old_samples=inputs.old_samples,
        pictures=_drawn_prompts(train, inputs) if inputs.prompts else None,
        preserved=[bf16(rows) for rows in inputs.preserved],
        patience_s=inputs.patience_s,
        check=check,
    )


def _drawn_prompts(train: TrainConfig, inputs: Inputs) -> DrawnPrompts:
    """The prompts of a run's sets, one after the other, and how large their pictures are."""
    pictures, sets, latent = train.pictures or PicturesConfig(), inputs.prompts, inputs.latent
    numbered = [(prompts, number) for prompts in sets for number in range(len(prompts))]

    def rows(number: int) -> torch.Tensor:
        prompts, inside = numbered[number]
        return bf16(prompts.rows(inside))

    def null() -> tuple[torch.Tensor, torch.Tensor]:
        rows, mask = sets[0].null()
        return bf16(rows), torch.from_numpy(mask)

    names = {
        "latent_encoding": latent.id,
        "latent": latent.values(),
        "prompt_set": "+".join(prompts.id for prompts in sets),
    }
    height, width = pictures.size or (inputs.resolution, inputs.resolution)
    texts = tuple(text for prompts in sets for text in prompts.texts)
    drawn = DrawnPrompts(texts, rows, null, height, width, latent.compression, names)
    if train.controlnet is None:
        return drawn
    height, width = inputs.control_sides
    return replace(
        drawn,
        height=height,
        width=width,
        names={**names, "controls": inputs.control_names},
        control=lambda number: bf16(inputs.control(number)),
    )
