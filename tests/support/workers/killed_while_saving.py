"""Train 6 steps in the run directory argv[1]; die by SIGKILL at the point argv[2] of the save after step 4.

`writing`: tensors are on the disk, torch's metadata is not. `written`: before our document. `renaming`: before the
rename. `renamed`: after it. `removing`: an old checkpoint is renamed for removal and still there. `never`: no kill of
its own, a checkpoint after every step, resuming what is there. argv[3], if given: the sections of `train` to change, as
JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter

from sana_pipe.base.launch import Launch
from sana_pipe.base.processes import run_and_exit
from sana_pipe.train.training import checkpoint
from sana_pipe.train.training.trainer import fit
from tests.support.workers import tiny_run


def dying(original: Callable[..., Any], when: Callable[..., bool]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        if when(*args, **options):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **options)

    return call


def main() -> None:
    run, point = Path(sys.argv[1]), sys.argv[2]
    root = run / "checkpoints"
    options: dict[str, Any] = {"steps": 6, "save_every": 2}
    if point == "never":
        options["save_every"] = 1
    elif point == "writing":
        FileSystemWriter.finish = dying(  # type: ignore[method-assign]
            FileSystemWriter.finish, lambda writer, *rest, **more: "00000004" in str(writer.path)
        )
    elif point == "written":
        checkpoint.publish = dying(checkpoint.publish, lambda work, final, *rest: "00000004" in final.name)
    elif point == "renaming":
        os.rename = dying(os.rename, lambda work, final: final == checkpoint.folder_of(root, 4))
    elif point == "renamed":
        checkpoint.Saver.remove_old = dying(  # type: ignore[method-assign]
            checkpoint.Saver.remove_old, lambda saver: checkpoint.folder_of(root, 4).exists()
        )
    elif point == "removing":
        options["keep_checkpoints"] = 1
        checkpoint.shutil.rmtree = dying(  # type: ignore[assignment]
            checkpoint.shutil.rmtree, lambda path, **more: "00000002" in str(path) and str(path).endswith(".removing")
        )
    else:
        raise SystemExit(f"unknown point {point}")
    settings = tiny_run.config(run, **options, **json.loads(sys.argv[3] if len(sys.argv) > 3 else "{}"))
    fit(settings.train, tiny_run.task(settings), Launch(), resume="auto", log=lambda line: print(line, flush=True))


if __name__ == "__main__":
    run_and_exit(main)
