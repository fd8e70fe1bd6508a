"""Runs of a tiny Z-Image and a tiny PRX on two processes: torchrun -m tests.support.workers.other_models FOLDER.

FOLDER has a folder for each model, with its start weights and the runs of one process; the results are run directories
next to them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from sana_pipe.base.launch import Launch, detect
from sana_pipe.base.processes import run_and_exit
from sana_pipe.config import Config
from sana_pipe.train.models.config import ModelConfig
from sana_pipe.train.parallel import mesh
from sana_pipe.train.training.task import Report
from sana_pipe.train.training.trainer import fit
from tests.support import tiny_prx, tiny_zimage
from tests.support.workers import tiny_run

MODELS = {"zimage": ("full", "lora", "dora"), "prx": ("full", "lora")}
"""The kinds of runs of each model."""
RUNS = [(model, kind) for model, kinds in MODELS.items() for kind in kinds]
KINDS: dict[str, dict[str, Any]] = {
    "full": {"ema": {"decay": 0.5}},
    "lora": {"adapter": {"kind": "lora", "rank": 3, "targets": "all", "dropout": 0.2}},
    "dora": {"adapter": {"kind": "dora", "rank": 3}},
}
PARALLEL: dict[str, dict[str, Any]] = {"FSDP2": {"dp_shard": 2}, "DDP": {"dp_replicate": 2, "dp_shard": 1}}


def save(folder: Path) -> None:
    """Write the start weights of both models."""
    tiny_zimage.save(folder / "zimage")
    tiny_prx.of_diffusers().save_pretrained(folder / "prx/transformer")


def settings(folder: Path, kind: str, name: str, **train: Any) -> Config:
    """A run of the folder's weights, saved after two steps of four."""
    usual = {"steps": 4, "save_every": 2, "activation_checkpointing": "full", "optim": {"lr": 1e-3}}
    given = tiny_run.config(folder / f"{kind}, {name}", **{**usual, **KINDS[kind], **train})
    weights = ModelConfig.model_validate({"weights": str(folder / "transformer")})
    return Config.model_validate({**given.model_dump(), "model": weights.model_dump()})


def run(given: Config, launch: Launch | None = None, **options: Any) -> Report:
    launch = launch or Launch()
    layout = mesh.check_sizes(given.train.parallel, launch.world)
    task = tiny_run.task(given, layout.data_rank(launch.rank), layout.data_world)
    return fit(given.train, task, launch, log=lambda line: None, **options)


def main() -> None:
    launch = mesh.reopening(detect(), 0)
    for model, kind in RUNS:
        folder = Path(sys.argv[1]) / model
        for name, parallel in PARALLEL.items():
            run(settings(folder, kind, name, parallel=parallel), launch)
        resumed = settings(folder, kind, "resumed", parallel=PARALLEL["FSDP2"])
        run(resumed, launch, resume=folder / f"{kind}, one/checkpoints/step-00000002")
        bf16 = settings(folder, kind, "bf16", parallel=PARALLEL["FSDP2"], precision="bf16")
        run(bf16, launch)


if __name__ == "__main__":
    run_and_exit(main)
