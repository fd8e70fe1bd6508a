"""What a checkpoint holds, for comparisons."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from sana_pipe.train.models.spec import ModelSpec
from sana_pipe.train.training.checkpoint import ModelTensors


def load_model_state(folder: str | Path, *, ema: bool = False) -> tuple[ModelSpec, dict[str, Tensor]]:
    """The architecture and all the weights of a checkpoint. Arguments and errors as in `ModelTensors`."""
    weights = ModelTensors(folder, ema=ema)
    return weights.architecture, dict(weights)
