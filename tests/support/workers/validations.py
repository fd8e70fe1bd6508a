"""Validation under every strategy against one process: python -m tests.support.workers.validations FOLDER [WORLD ...].

As `tests.support.workers.strategies`: imports once, forks the processes of each launch, writes FOLDER/found-WORLD.json.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from sana_pipe.base.launch import Launch
from sana_pipe.base.processes import run_and_exit
from sana_pipe.config import Config
from sana_pipe.train.parallel import mesh
from sana_pipe.train.training import checkpoint, metrics
from sana_pipe.train.training.trainer import fit
from tests.support.workers import strategies, tiny_run
from tests.support.workers.pipelines import pp

STEPS = 2
CASES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "DDP": {"parallel": strategies.DDP},
        "FSDP2, no reshard": {"parallel": {**strategies.FSDP2, "reshard_after_forward": False}, "without": True},
        "TP": {"parallel": strategies.TP},
        "PP": {"parallel": pp(), "without": True},
    },
    4: {
        "HSDP": {"parallel": strategies.HSDP},
        "FSDP2 x TP, resumed": {"parallel": {"tp_size": 2}, "resumed": True},
        "PP x FSDP2": {"parallel": pp(dp_shard=2), "without": True},
        "PP x TP": {"parallel": pp(tp_size=2)},
    },
}
"""Launch size -> name -> settings of the train section; `resumed`: from the single process's checkpoint of step 1;
`without`: also run without validation."""
VALIDATION = {"every": 1}


def settings_of(case: dict[str, Any], output: Path, validation: dict[str, Any] | None = VALIDATION) -> Config:
    more = {"output": str(output), "steps": STEPS, "ema": {"decay": 0.5}, "validation": validation}
    known = {name: value for name, value in case.items() if name not in ("resumed", "without")}
    return tiny_run.config(layers=4, **{"microbatch": 2, **known, **more})


def run(settings: Config, launch: Launch, resume: Path | None = None) -> None:
    layout = mesh.check_sizes(settings.train.parallel, launch.world)
    old = settings.train.validation is not None
    task = tiny_run.task(settings, layout.data_rank(launch.rank), layout.data_world, old=old)
    fit(settings.train, task, launch, resume=resume, log=lambda line: None)


def rows(folder: Path) -> list[dict[str, Any]]:
    return metrics.read_events(folder / "metrics.jsonl").get("validation", [])


def numbers(row: dict[str, Any]) -> list[float]:
    parts = [row[f"{prefix}{name}"] for prefix in ("", "ema_") for name in ("by_sigma", "by_bucket", "by_age")]
    return [row["loss"], row["ema_loss"], *(value for part in parts for value in part.values())]


def stored(folder: Path) -> dict[str, Any]:
    """Digests of the files of the last checkpoint: weights, moments and averages of every process."""
    files = checkpoint.read_document(folder / f"checkpoints/step-{STEPS:08d}").files
    return {name: digest for name, digest in files.items() if name != ".metadata"}


def compare(launch: Launch, folder: Path) -> None:
    found = {}
    expected = {row["step"]: row for row in rows(folder / "alone")}
    for number, (name, case) in enumerate(CASES[launch.world].items()):
        place = folder / f"{launch.world}-{number}"
        resume = folder / "alone/checkpoints/step-00000001" if case.get("resumed") else None
        runs = {"with": VALIDATION, **({"without": None} if case.get("without") else {})}
        for kind, validation in runs.items():
            here = replace(launch, rendezvous=f"{launch.rendezvous}-{number}-{kind}")
            run(settings_of(case, place / kind, validation), here, resume)
        if launch.rank:
            continue
        actual = rows(place / "with")
        found[name] = {
            "steps": [row["step"] for row in actual],
            "samples": [row["samples"] for row in actual],
            "distance": max(
                abs(ours - theirs)
                for row in actual
                for ours, theirs in zip(numbers(row), numbers(expected[row["step"]]), strict=True)
            ),
            "same training": [stored(place / kind) == stored(place / "with") for kind in runs],
        }
    if launch.rank == 0:
        (folder / f"found-{launch.world}.json").write_text(json.dumps(found, indent=1))


def main() -> None:
    alone = settings_of({"parallel": {"dp_shard": 1}, "save_every": 1}, Path(sys.argv[1]) / "alone")
    strategies.alone_and_together(CASES, lambda launch: run(alone, launch), compare)


if __name__ == "__main__":
    run_and_exit(main)
