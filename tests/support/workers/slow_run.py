"""A run that would take minutes, in argv[1]; each process leaves its id next to the run directory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from sana_pipe.base.launch import detect
from sana_pipe.base.processes import run_and_exit
from sana_pipe.train.training.trainer import fit
from tests.support.workers import tiny_run


def main() -> None:
    run, launch = Path(sys.argv[1]), detect()
    (run.parent / f"rank-{launch.rank}.pid").write_text(str(os.getpid()))
    settings = tiny_run.config(run, steps=8000, microbatch=2)
    task = tiny_run.task(settings, launch.rank, launch.world, delay=0.02)
    fit(settings.train, task, launch, log=lambda line: print(line, flush=True))


if __name__ == "__main__":
    run_and_exit(main)
