"""Runs with adapters and with a second loss on two processes: torchrun -m tests.support.workers.seams FOLDER. On four
processes those that learn from pairs, under HSDP.

FOLDER has the runs of one process (`made`); the results are run directories next to them.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sana_pipe.base.launch import Launch, detect
from sana_pipe.base.processes import run_and_exit
from sana_pipe.config import Config
from sana_pipe.train.models.config import AdapterConfig, ControlNetConfig, SampleConfig
from sana_pipe.train.parallel import mesh
from sana_pipe.train.training.config import PicturesConfig, PreferConfig, PreserveConfig
from sana_pipe.train.training.task import Report
from sana_pipe.train.training.trainer import fit
from tests.support.low_rank import Aligned, LowRank
from tests.support.workers import tiny_run

KINDS = ("low rank", "aligned", "dora", "controlnet", "prefer", "prefer, whole")
"""The adapter of the tests, the second loss, and by configuration DoRA with preservation, a ControlNet and pairs."""
PAIRS = KINDS[-2:]
PROMPT = torch.randn(7, tiny_run.TEXT_WIDTH, generator=torch.Generator().manual_seed(5)).bfloat16()
"""Text rows of the prompt of preserved samples; with so few of these a process has none in some steps."""
PARALLEL: dict[str, dict[str, Any]] = {
    "FSDP2": {"dp_shard": 2},
    "DDP": {"dp_replicate": 2, "dp_shard": 1},
}


def settings(folder: Path, name: str, **train: Any) -> Config:
    usual = {"steps": 4, "save_every": 2, "ema": {"decay": 0.5}, "optim": {"lr": 1e-2}, "validation": {"every": 2}}
    return tiny_run.config(folder / name, **{**usual, **train})


def run(kind: str, given: Config, launch: Launch | None = None, **options: Any) -> Report:
    launch = launch or Launch()
    layout = mesh.check_sizes(given.train.parallel, launch.world)
    task = tiny_run.task(given, layout.data_rank(launch.rank), layout.data_world)
    parts: dict[str, dict[str, Any]] = {
        "dora": {"preserved": [PROMPT]},
        "controlnet": {},
        "prefer": {},
        "prefer, whole": {},
        "low rank": {"adapter": LowRank()},
        "aligned": {"objective": Aligned(given.train.flow)},
    }
    changes = parts[kind]
    if kind == "dora":
        adapter = AdapterConfig(kind="dora", rank=3, alpha=5.0, targets="all", dropout=0.2)
        given = given.with_train(adapter=adapter, preserve=PreserveConfig(share=0.3, prompt="a dog"))
        task = tiny_run.task(given, layout.data_rank(launch.rank), layout.data_world)
    if kind == "controlnet":
        drawing = PicturesConfig(every=2)
        given = given.with_train(controlnet=ControlNetConfig(layers=2, control_drop=0.3), pictures=drawing)
        given = given.model_copy(update={"sample": SampleConfig(steps=2)})
        task = tiny_run.task(given, layout.data_rank(launch.rank), layout.data_world)
    if kind.startswith("prefer"):
        whole = {"adapter": None, "optim": given.train.optim.model_copy(update={"lr": 1e-3})}
        part = whole if kind == "prefer, whole" else {"adapter": AdapterConfig(rank=3)}
        given = given.with_train(prefer=PreferConfig(beta=4.0, stop=None), **part)
        task = tiny_run.task(given, layout.data_rank(launch.rank), layout.data_world)
    return fit(given.train, replace(task, **changes), launch, log=lambda line: None, **options)


def main() -> None:
    folder, launch = Path(sys.argv[1]), mesh.reopening(detect(), 0)
    if launch.world == 4:
        for kind in PAIRS:
            given = {"steps": 2, "ema": None, "validation": None, "parallel": {"dp_replicate": 2, "dp_shard": 2}}
            run(kind, settings(folder, f"{kind}, HSDP", **given), launch)
        return
    for kind in KINDS:
        for name, parallel in PARALLEL.items():
            run(kind, settings(folder, f"{kind}, {name}", parallel=parallel), launch)
        resumed = settings(folder, f"{kind}, resumed", parallel=PARALLEL["FSDP2"], activation_checkpointing="full")
        run(kind, resumed, launch, resume=folder / f"{kind}, one/checkpoints/step-00000002")
        bf16 = {"precision": "bf16", "activation_checkpointing": "full"}
        run(kind, settings(folder, f"{kind}, bf16", parallel=PARALLEL["FSDP2"], **bf16), launch)


if __name__ == "__main__":
    run_and_exit(main)
