"""Small runs of training in this process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sana_pipe.base.launch import Launch
from sana_pipe.config import Config
from sana_pipe.train.models.config import ModelConfig
from sana_pipe.train.training import build, checkpoint
from sana_pipe.train.training.task import Report
from sana_pipe.train.training.trainer import fit
from tests.support.checkpoints import load_model_state
from tests.support.workers import tiny_run


def fit_tiny(
    settings: Config,
    *,
    resume: str | Path | None = None,
    origin: Path | None = None,
    log: Any = None,
    **options: Any,
) -> Report:
    task = tiny_run.task(settings, **options)
    return fit(settings.train, task, Launch(), resume=resume, origin=origin, log=log or (lambda line: None))


def same_checkpoints(one: Path, other: Path) -> bool:
    """Bitwise: weights and moments of two checkpoints."""
    return {k: v for k, v in checkpoint.read_document(one).files.items() if k != ".metadata"} == {
        k: v for k, v in checkpoint.read_document(other).files.items() if k != ".metadata"
    } and all(
        torch.equal(a, b)
        for a, b in zip(load_model_state(one)[1].values(), load_model_state(other)[1].values(), strict=True)
    )


def dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = build.architecture_of

    def architecture(model: ModelConfig, sample_size: int) -> Any:
        spec: Any = plain(model, sample_size)
        return replace(spec, dropout=0.3)

    monkeypatch.setattr(build, "architecture_of", architecture)
