"""Which checkpoint of a run directory a stage means."""

from __future__ import annotations

from pathlib import Path

from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.training import checkpoint


def find(config: Config, which: str) -> Path:
    """The folder that `--checkpoint` names: `auto` is the newest of `train.output`, anything else a folder.

    Raises:
        ConfigError: there is none.
    """
    root = Path(config.train.output) / "checkpoints"
    if which != "auto":
        if not Path(which).is_dir():
            raise ConfigError(
                f"--checkpoint {which}: there is no such folder",
                expected=f"auto, or a folder such as {checkpoint.folder_of(root, 500)}",
            )
        return Path(which)
    found = checkpoint.newest(root)
    if found is None:
        raise ConfigError(f"{root} holds no checkpoint yet", fix="sana-pipe train, or --checkpoint PATH")
    return found
