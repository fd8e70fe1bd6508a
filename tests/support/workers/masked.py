"""Masked training by each strategy against one process: python -m tests.support.workers.masked FOLDER."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from sana_pipe.base.launch import Launch
from sana_pipe.base.processes import run_and_exit
from sana_pipe.train.parallel import collectives, mesh
from sana_pipe.train.parallel.parallelize import parallelize
from tests.support.workers import pipelines, strategies, tiny_run

CPU = torch.device("cpu")
MASK: dict[str, Any] = {"mask": {"outside": 0.1}}
CASES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "FSDP2": {"parallel": strategies.FSDP2, "microbatch": 4},
        "TP, accumulated": {"parallel": strategies.TP, "microbatch": 3},
        "PP": {"parallel": pipelines.pp(), "microbatch": 2},
    }
}


def settings_of(case: dict[str, Any]) -> Any:
    return tiny_run.config(layers=4, **MASK, **case)


def alone(launch: Launch) -> None:
    settings = settings_of({"microbatch": 8})
    result = tiny_run.gradients(tiny_run.model(settings), settings, [tiny_run.global_batch(0)])
    torch.save(result, Path(sys.argv[1]) / "alone.pt")


def compare(launch: Launch, folder: Path) -> None:
    loss, norm, gradients = torch.load(folder / "alone.pt")
    result = {}
    for number, (name, case) in enumerate(CASES[launch.world].items()):
        settings = settings_of(case)
        here = Launch(launch.rank, launch.world, launch.rank, launch.world, rendezvous=f"{launch.rendezvous}-{number}")
        with mesh.open_mesh(here, settings.train.parallel, CPU) as group:
            layout = mesh.check_sizes(settings.train.parallel, launch.world)
            model = parallelize(tiny_run.model(settings), group, settings.train)
            parts = (settings.train.microbatch, layout.data_rank(launch.rank), layout.data_world)
            pieces = tiny_run.microbatches(tiny_run.global_batch(0), *parts)
            mine = tiny_run.gradients(model, settings, pieces)
            whole = pipelines.whole(collectives.all_gather_objects(mine[2]))
        distance = tiny_run.distance(whole, gradients)
        result[name] = {"loss": abs(mine[0] - loss), "norm": abs(mine[1] / norm - 1), "gradient": distance}
    if launch.is_main:
        (folder / f"found-{launch.world}.json").write_text(json.dumps(result))


def main() -> None:
    strategies.alone_and_together(CASES, alone, compare)


if __name__ == "__main__":
    run_and_exit(main)
