"""Two processes of which the second cannot go on, in two runs below argv[1]; writes what each of them met, and when."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from sana_pipe.base.errors import AwayError, UserError
from sana_pipe.base.launch import detect
from sana_pipe.base.processes import run_and_exit
from sana_pipe.data.loader.loader import Batch, LoaderState
from sana_pipe.train.training import feeding
from sana_pipe.train.training.trainer import fit
from tests.support.workers import tiny_run

FAILS_AT = 3


class Standing:
    """A loader of which every sample stands in for another from step `FAILS_AT` on."""

    def __init__(self, steps: Iterator[tuple[list[Batch], LoaderState]], here: bool):
        self.steps, self.here, self.substituted = steps, here, 0

    def __iter__(self) -> Iterator[tuple[list[Batch], LoaderState]]:
        for batches, state in self.steps:
            self.substituted += sum(len(b.sample_ids) for b in batches) * (self.here and state.step > FAILS_AT)
            yield batches, state


def main() -> None:
    folder, launch = Path(sys.argv[1]), detect()
    unlucky = launch.rank == 1
    result: dict[str, Any] = {}

    def touch(step: int) -> None:
        if unlucky and step == FAILS_AT:
            raise AwayError("s3://bucket: no answer")

    def met(name: str, touch: Any, standing: bool, **train: Any) -> None:
        settings = tiny_run.config(folder / name, steps=100, microbatch=2, **train)
        task = tiny_run.task(settings, launch.rank, launch.world, touch=touch)
        if standing:
            loader = task.loader
            task = replace(task, loader=lambda *span: Standing(iter(loader(*span)), unlucky))
        said: list[str] = []
        try:
            fit(settings.train, task, replace(launch, rendezvous=f"file://{folder}/meeting-{name}"), log=said.append)
        except UserError as error:
            result[name] = {"error": error.what, "kind": type(error).__name__, "code": error.exit_code, "said": said}

    met("away", touch, False)
    feeding.MOST = 0.1
    met("rotten", None, True)
    (folder / f"rank-{launch.rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    run_and_exit(main)
