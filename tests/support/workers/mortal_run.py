"""A run in argv[1] whose processes kill themselves: argv[2] is a JSON list of [step, rank, seconds].

A process of that rank dies by SIGKILL so many seconds after it got the batch of that step, once; with a negative number
it stops (SIGSTOP), as if the machine hung.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from sana_pipe.base.launch import detect
from sana_pipe.base.processes import run_and_exit
from sana_pipe.train.training.trainer import fit
from tests.support.workers import tiny_run

STEPS = 12
SAVE_EVERY = 2


def main() -> None:
    run, deaths, launch = Path(sys.argv[1]), json.loads(sys.argv[2]), detect()

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def touch(step: int) -> None:
        for number, (when, rank, seconds) in enumerate(deaths):
            mark = run.parent / f"death-{number}"
            if (step, launch.rank) == (when, rank) and not mark.exists():
                mark.touch()
                if seconds < 0:
                    saved = run / f"checkpoints/step-{step // SAVE_EVERY * SAVE_EVERY:08d}"
                    while not saved.exists():  # it is written alongside the steps, by all processes
                        time.sleep(0.02)
                    os.kill(os.getpid(), signal.SIGSTOP)
                elif seconds:
                    threading.Timer(seconds, die).start()
                else:
                    die()
        time.sleep(0.02)  # so that a death some seconds later is in the middle of something

    settings = tiny_run.config(run, steps=STEPS, save_every=SAVE_EVERY, microbatch=2)
    task = tiny_run.task(settings, launch.rank, launch.world, touch=touch)
    fit(settings.train, task, launch, resume="auto", log=lambda line: print(line, flush=True))


if __name__ == "__main__":
    run_and_exit(main)
