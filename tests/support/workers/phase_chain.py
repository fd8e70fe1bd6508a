"""A chain of three phases in argv[1], which holds a cache and gets the runs: the stage `train` with --resume auto.

argv[2] is the name of the run; argv[3], if given, the seconds that a step takes longer.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from pipeline.config import Config
from pipeline.processes import run_and_exit
from pipeline.training.trainer import Loop
from stages import train
from tests.support.workers import tiny_run

PHASES: list[dict[str, Any]] = [
    {"name": "a", "snapshot": "latest", "steps": 5},
    {"name": "b", "snapshot": "latest", "epochs": 2, "set": {"train.optim.lr": 1e-3, "train.text": "packed"}},
    {
        "name": "c",
        "snapshot": "latest",
        "steps": 6,
        "set": {"train.optim.schedule": "linear", "train.caption_drop": 0.5},
    },
]


def config(folder: Path, name: str) -> Config:
    shape = {"in_channels": 2, "caption_channels": 3, "sample_size": 2}
    made = tiny_run.config(folder / name, arch=shape, save_every=2, microbatch=4, ema={"decay": 0.9})
    tree = made.model_dump(exclude_unset=True) | {"cache": str(folder / "cache"), "phases": PHASES}
    return Config.model_validate(tree)


def main() -> None:
    folder, name = Path(sys.argv[1]), sys.argv[2]
    if len(sys.argv) > 3:
        step = Loop.step_once

        def slow(self: Loop, *rest: Any, **named: Any) -> Any:
            time.sleep(float(sys.argv[3]))
            return step(self, *rest, **named)

        Loop.step_once = slow  # type: ignore[method-assign]
    report = train.run(config(folder, name), resume="auto")
    print(json.dumps({"step": report.step}), flush=True)


if __name__ == "__main__":
    run_and_exit(main)
