"""Processes that read batches and write down what they consumed, forked from one that has imported what they need.

Reads jobs from stdin, one JSON object per line: {out, cache, rank, world, start, stop, pace, options}. Forks a process
for each and answers with its id. That process appends `{"step", "seen"}` to `out` for each step consumed, in one write.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from sana_pipe.base.processes import run_and_exit
from sana_pipe.data.cache.cache import Cache
from tests.support.consumed import loader, seen


def consume(job: dict) -> None:
    own = loader(
        Cache(Path(job["cache"])),
        rank=job["rank"],
        world=job["world"],
        start_step=job["start"],
        stop_step=job["stop"],
        **job["options"],
    )
    out = os.open(job["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    draw = random.Random(job["rank"])
    for batches, state in own:
        time.sleep(draw.random() * job["pace"])
        os.write(out, (json.dumps({"step": state.step - 1, "seen": seen(batches)}) + "\n").encode())


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            code = 1
            try:
                consume(json.loads(line))
                code = 0
            finally:
                os._exit(code)
        print(process, flush=True)


if __name__ == "__main__":
    run_and_exit(main)
