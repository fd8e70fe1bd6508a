"""The task of a run and its end: the data types between the stage, the checks, the build and the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sana_pipe.base.launch import Launch
from sana_pipe.base.options import MISSING, flat, value_at
from sana_pipe.base.retrying import PATIENCE_S
from sana_pipe.data.loader.loader import Batch, LoaderState
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.adapters import Adapter
from sana_pipe.train.models.config import ModelConfig, SampleConfig
from sana_pipe.train.parallel.mesh import Layout
from sana_pipe.train.training.objectives import Objective

Log = Callable[[str], None]
Compare = Callable[[dict[str, Any]], tuple[list[str], dict[str, Any]]]
"""A row of metrics -> lines to print about predicted and measured values, and `prediction.json`."""


@dataclass(frozen=True)
class DrawnPrompts:
    """The prompts that a run draws.

    Attributes:
        texts: as written.
        rows: number of a prompt -> (n, D) text rows. Each process reads the rows of its part when the run begins.
        null: -> the null record (M, D) and its mask (M,) bool.
        height, width: of the pictures in pixels, and compression: pixels for a latent's side of 1.
        names: `prompt_set` (its id) and what else the files say of prompts and latents.
        control: number of a prompt -> (C, h, w) latent of its control picture; None: the model is given none.
    """

    texts: tuple[str, ...]
    rows: Callable[[int], Tensor]
    null: Callable[[], tuple[Tensor, Tensor]]
    height: int
    width: int
    compression: int
    names: Mapping[str, Any]
    control: Callable[[int], Tensor] | None = None


@dataclass(frozen=True)
class WrittenConfiguration:
    """The whole configuration as a run writes it into its files: without credentials, of which nothing is read back.

    Attributes:
        tree: section -> option -> value, with defaults.
        is_read: (option) -> whether a training reads it.
    """

    tree: dict[str, Any]
    is_read: Callable[[str], bool]

    def changed_since(self, earlier: dict[str, Any]) -> list[str]:
        """`train.optim.lr: 0.0001 -> 2e-05` for every option or section of training that differs from that of an
        earlier tree and that both have."""
        names = sorted({name for tree in (earlier, self.tree) for name, _ in flat(tree) if self.is_read(name)})
        values = [(name, value_at(earlier, name, MISSING), value_at(self.tree, name, MISSING)) for name in names]
        return [f"{name}: {old} -> {new}" for name, old, new in values if MISSING not in (old, new) and old != new]


@dataclass(frozen=True)
class TrainingTask:
    """The data of a run and what else it needs next to the options of `train`, as far as the trainer must know it.

    Attributes:
        first_state: snapshot, seed and phase of the order; its step is ignored.
        earlier_id: the id that a checkpoint has for the same samples, where they got another id since; "": none.
        channels, text_width: of the latents and of the text rows. text_kind: of the encoder of these; None: not known.
        text_rows: of a caption at most. vae_factors: scaling and shift factor of the latents. None: not known.
        sample_size: side of the latent at the base resolution, for a model trained from scratch.
        compression: pixels per latent side; None: the sides of buckets are not looked at.
        loader: (layout, start_step, stop_step) -> an iterable of this process's microbatches and the state after them.
        batches: global batch by bucket name.
        names: sample ids -> names for error messages, as far as they are known.
        epoch_steps: optimizer steps of an epoch, for the progress lines; None: not known.
        validation: layout -> this process's microbatches of the held-out samples, the same in every iteration, and how
            many samples at the beginning of each count; equally many on every process. None: no validation.
        leaked: held-out samples that look like one of the training, as far as that is known.
        old_samples: ids of held-out samples whose loss is shown apart, uint64 (n,); None: none.
        pictures: what is drawn at `train.pictures`; None: nothing. sample: steps, guidance and seed of the drawing.
        objective: what is learned; None: that of the configuration. adapter: the part of the model that is trained;
            None: that of the configuration. preserved: (n, D) text rows of each of `train.preserve.prompt`.
        model: the weights that the run begins with, or the shape of a new model.
        written: the configuration for the files of the run.
        patience_s: how long processes wait for each other and for storage, at least.
        textfile: see `metrics.textfile`.
        check: refuses what the data do not allow under a layout; called before anything is started.
        expect: predicts memory and speed; called on the first process, before there is a process group.
        accepted: called on the first process once it is certain that this run may start or resume.
    """

    first_state: LoaderState
    channels: int
    text_width: int
    sample_size: int
    loader: Callable[[Layout, int, int], Iterable[tuple[list[Batch], LoaderState]]]
    batches: Mapping[str, int]
    model: ModelConfig
    sample: SampleConfig
    written: WrittenConfiguration
    names: Callable[[Sequence[int]], Mapping[int, str]] = lambda ids: {}
    epoch_steps: float | None = None
    validation: Callable[[Layout], Iterable[tuple[Batch, int]]] | None = None
    leaked: int = 0
    old_samples: np.ndarray | None = None
    pictures: DrawnPrompts | None = None
    objective: Objective | None = None
    adapter: Adapter | None = None
    preserved: Sequence[Tensor] = ()
    text_kind: str | None = None
    text_rows: int | None = None
    vae_factors: tuple[float, float] | None = None
    compression: int | None = None
    patience_s: float = PATIENCE_S
    textfile: str | None = None
    earlier_id: str = ""
    check: Callable[[Layout], None] = lambda layout: None
    expect: Callable[[Context], Compare | None] = lambda context: None
    accepted: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Report:
    """The end of a run. loss: mean since the last logged row before the end; None if this attempt did no step.
    stopped_by: the signal's name if one ended the run."""

    step: int
    checkpoint: Path | None
    loss: float | None
    stopped_by: str | None


@dataclass(frozen=True)
class Context:
    """The checked inputs of a run. log: prints one line, on the first process only."""

    train: TrainConfig
    task: TrainingTask
    launch: Launch
    layout: Layout
    device: torch.device
    log: Log

    @property
    def folder(self) -> Path:
        """The run directory."""
        return Path(self.train.output)
