"""Losses of training in float8 in one process and in two, for `tests/test_float8.py`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pipeline.launch import Launch
from pipeline.parallel import mesh
from pipeline.parallel.parallelize import parallelize
from pipeline.processes import run_and_exit
from tests.support.workers import strategies, tiny_run

CASES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "FSDP2, recomputed": {"parallel": {"dp_shard": 2}, "activation_checkpointing": "full"},
        "PP": {"parallel": {"dp_shard": 1, "pp_size": 2}},
    },
}


def losses(case: dict[str, Any], launch: Launch) -> list[float]:
    settings = tiny_run.config(layers=2, precision="bf16", float8="rowwise", **case)
    with mesh.open_mesh(launch, settings.train.parallel, torch.device("cpu")) as group:
        layout = mesh.check_sizes(settings.train.parallel, launch.world)
        model = parallelize(tiny_run.model(settings), group, settings.train)
        return tiny_run.train_losses(model, settings, 3, layout.data_rank(launch.rank), layout.data_world)


def alone(launch: Launch) -> None:
    (Path(sys.argv[1]) / "alone.json").write_text(json.dumps(losses({}, launch)))


def compare(launch: Launch, folder: Path) -> None:
    results = {}
    for number, (name, case) in enumerate(CASES[launch.world].items()):
        results[name] = losses(case, replace(launch, rendezvous=f"{launch.rendezvous}-{number}"))
    if launch.rank == 0:
        expected = json.loads((folder / "alone.json").read_text())
        rows = {name: {"losses": values, "alone": expected} for name, values in results.items()}
        (folder / f"found-{launch.world}.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    run_and_exit(lambda: strategies.alone_and_together(CASES, alone, compare))
