"""Which checkpoint of a run directory a stage means."""

from __future__ import annotations

from pathlib import Path

from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.training import checkpoint


def find(config: Config, which: str) -> Path:
    """The folder that `--checkpoint` names: `auto` is the newest of `train.output`; else see `checkpoint.resolve`.

    Raises:
        ConfigError: there is none.
    """
    root = Path(config.train.output) / "checkpoints"
    found = checkpoint.resolve(root, which)
    if found is None:
        raise ConfigError(f"{root} holds no checkpoint yet", fix="sana-pipe train, or --checkpoint PATH")
    return found
