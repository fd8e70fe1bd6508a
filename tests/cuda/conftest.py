"""Commands on the pretended card."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sana_pipe.config import Config, dump


@pytest.fixture
def words(small_cache: Path, make_config: Callable[..., Config], tmp_path: Path) -> Callable[..., list[str]]:
    """`words("train", "train.steps=4", ...)`: a command whose configuration is that of `make_config` with these
    changes, in bf16 and uncompiled, on the device that is there; the run directory is `tmp_path / "run"`."""

    def made(command: str, *overrides: str) -> list[str]:
        usual = ("train.device=auto", "train.precision=bf16", "train.compile=none", "train.optim.warmup_steps=1")
        short = ("train.steps=4", "train.log_every=1", "train.save_every=100")
        file = tmp_path / f"sana-pipe-{len(list(tmp_path.glob('*.yaml')))}.yaml"
        file.write_text(dump(make_config(tmp_path, f"cache={small_cache}", *usual, *short, *overrides)))
        return [command, "--config", str(file)]

    return made
