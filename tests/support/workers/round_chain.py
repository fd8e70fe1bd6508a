"""Three rounds in argv[1], which holds a cache and gets the runs: the stage `train` with --from and --resume auto.

argv[2] is the name of the folder of the runs; argv[3], if given, the seconds that a step takes longer.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from sana_pipe.base.launch import detect
from sana_pipe.base.processes import run_and_exit
from sana_pipe.config import Config
from sana_pipe.stages import train
from sana_pipe.train.parallel.mesh import reopening
from sana_pipe.train.training.trainer import Loop
from tests.support.workers import tiny_run

ROUNDS: dict[str, dict[str, Any]] = {
    "a": {"steps": 5},
    "b": {"steps": None, "epochs": 2, "optim": {"lr": 1e-3}, "text": "packed"},
    "c": {"steps": 6, "optim": {"schedule": "linear"}, "caption_drop": 0.5},
}


def config(folder: Path, name: str, options: dict[str, Any]) -> Config:
    shape = {"in_channels": 2, "caption_channels": 3, "sample_size": 2}
    common: dict[str, Any] = {"save_every": 2, "microbatch": 4, "ema": {"decay": 0.9}}
    made = tiny_run.config(folder / name, arch=shape, **common, **options)
    return Config.model_validate(made.model_dump(exclude_unset=True) | {"cache": str(folder / "cache")})


def main() -> None:
    folder, name = Path(sys.argv[1]), sys.argv[2]
    if len(sys.argv) > 3:
        step = Loop.step_once

        def slow(self: Loop, *rest: Any, **named: Any) -> Any:
            time.sleep(float(sys.argv[3]))
            return step(self, *rest, **named)

        Loop.step_once = slow  # type: ignore[method-assign]
    launch, origin = reopening(detect(), 60), None
    train.reopening = lambda *_: launch  # a command of its own would meet anew at the same address
    for each, options in ROUNDS.items():
        report = train.run(config(folder, f"{name}/{each}", options), resume="auto", origin=origin)
        print(json.dumps({"step": report.step}), flush=True)
        if report.stopped_by is not None:
            return
        origin = folder / name / each


if __name__ == "__main__":
    run_and_exit(main)
