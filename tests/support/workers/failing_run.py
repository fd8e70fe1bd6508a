"""A run in argv[1] of which the last process fails in step 3: argv[2] is `user` (a UserError) or `defect`."""

from __future__ import annotations

import sys
from pathlib import Path

from sana_pipe.base.errors import UserError
from sana_pipe.base.launch import detect
from sana_pipe.cli import main as command_line
from sana_pipe.data.loader.loader import Batch
from sana_pipe.stages import train as stage
from sana_pipe.train.parallel.parallelize import Microbatch
from sana_pipe.train.training.step import TrainStep
from sana_pipe.train.training.trainer import fit
from tests.support.workers import tiny_run

MESSAGE = "the third step cannot be done here"


def run(*args: object, **options: object) -> None:
    launch, prepare, done = detect(), TrainStep.prepare, []

    def fail(self: TrainStep, batch: Batch, level: float | None = None) -> Microbatch:
        done.append(batch)
        if len(done) == 3 and launch.rank == launch.world - 1:
            raise UserError(MESSAGE) if sys.argv[2] == "user" else ValueError(MESSAGE)
        return prepare(self, batch, level)

    TrainStep.prepare = fail  # type: ignore[method-assign]
    settings = tiny_run.config(Path(sys.argv[1]), steps=8, save_every=2)
    fit(settings.train, tiny_run.task(settings, launch.rank, launch.world), launch, log=lambda line: None)


def main() -> None:
    stage.run = run  # type: ignore[assignment]
    command_line(["train"])
