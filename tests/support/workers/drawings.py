"""Pictures under every strategy against one process: python -m tests.support.workers.drawings FOLDER [WORLD ...].

As `tests.support.workers.strategies`: imports once, forks the processes of each launch, writes FOLDER/found-WORLD.json.
"""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors import safe_open
from torch import Tensor

from sana_pipe.base.launch import Launch
from sana_pipe.base.processes import run_and_exit
from sana_pipe.config import Config
from sana_pipe.train.models.config import SampleConfig
from sana_pipe.train.models.sampler import Sampling, prompt_noise, sample
from sana_pipe.train.parallel import mesh
from sana_pipe.train.training import checkpoint
from sana_pipe.train.training import drawings as in_training
from sana_pipe.train.training.stop_request import StopRequest
from sana_pipe.train.training.task import Report
from sana_pipe.train.training.trainer import fit
from tests.support.checkpoints import load_model_state
from tests.support.workers import strategies, tiny_run
from tests.support.workers.pipelines import pp

STEPS = 2
BF16 = {"precision": "bf16"}
CASES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "DDP": {"parallel": strategies.DDP},
        "FSDP2, no reshard": {"parallel": {**strategies.FSDP2, "reshard_after_forward": False}, "without": True},
        "FSDP2, offload": {"parallel": {**strategies.FSDP2, "offload": "all"}},
        "TP, packed": {"parallel": strategies.TP, "text": "packed"},
        "PP": {"parallel": pp(), "without": True},
        "PP, bf16": {"parallel": pp(), **BF16},
    },
    4: {
        "DDP, fewer prompts than processes": {"parallel": {"dp_replicate": 4, "dp_shard": 1}, "texts": 3},
        "HSDP": {"parallel": strategies.HSDP},
        "FSDP2 x TP, resumed": {"parallel": {"tp_size": 2}, "resumed": True},
        "PP x FSDP2": {"parallel": pp(dp_shard=2), "without": True},
        "PP x TP": {"parallel": pp(tp_size=2)},
        "FSDP2, bf16": {"parallel": {}, **BF16, "without": True},
    },
}
"""Launch size -> name -> settings of the train section; `resumed`: from the single process's checkpoint of step 1;
`without`: also run without pictures; `texts`: number of prompts."""
PICTURES = {"every": 1}


def settings_of(case: dict[str, Any], output: Path, drawing: dict[str, Any] | None = PICTURES) -> Config:
    more: dict[str, Any] = {"output": str(output), "steps": STEPS, "ema": {"decay": 0.5}, "pictures": drawing}
    known = {name: value for name, value in case.items() if name not in ("resumed", "without", "texts")}
    config = tiny_run.config(layers=4, **{"microbatch": 2, "optim": {"lr": 3e-3}, **known, **more})
    return config.model_copy(update={"sample": SampleConfig(steps=2)})


def run(
    settings: Config,
    launch: Launch,
    resume: Path | None = None,
    texts: int | None = None,
    stop: StopRequest | None = None,
) -> Report:
    layout = mesh.check_sizes(settings.train.parallel, launch.world)
    task = tiny_run.task(settings, layout.data_rank(launch.rank), layout.data_world)
    if texts is not None and task.pictures is not None:
        task = replace(task, pictures=replace(task.pictures, texts=task.pictures.texts[:texts]))
    return fit(settings.train, task, launch, resume=resume, log=lambda line: None, stop=stop)


def drawn(folder: Path, step: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The latents of a step's file, and its description."""
    with safe_open(folder / f"pictures/step-{step:08d}.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in sorted(file.keys())}, json.loads(file.metadata()["drawing"])


def plain(
    config: Config, weights: dict[str, Tensor] | None = None, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """The latents that a whole model of these weights draws in this process (None: the first ones)."""
    model, prompts = tiny_run.model(config), tiny_run.prompts(config)
    if weights is not None:
        model.load_state_dict(weights)
    model.to(dtype)
    null, null_mask = prompts.null()
    latents = {}
    for number, text in enumerate(prompts.texts):
        noise = prompt_noise([text], (tiny_run.CHANNELS, 8, 8), config.sample.seed)
        rows = [prompts.rows(number).to(dtype)]
        (latents[f"{number:04d}"],) = sample(
            model, rows, null[null_mask], noise, Sampling.of(config.sample, config.train.flow.shift)
        )
    return latents


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest relative L2 distance of a picture; not a number if a value of them is none."""
    assert list(ours) == list(theirs)
    return float(torch.stack([(ours[name] - theirs[name]).norm() / theirs[name].norm() for name in ours]).max())


def _only(names: list[str], latents: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: latents[name] for name in names}


def stored(folder: Path) -> dict[str, Any]:
    """Digests of the files of the last checkpoint: weights, moments and averages of every process."""
    files = checkpoint.read_document(folder / f"checkpoints/step-{STEPS:08d}").files
    return {name: digest for name, digest in files.items() if name != ".metadata"}


def stopped(launch: Launch, folder: Path) -> dict[str, Any]:
    """How a run ends of which the last process alone is asked to stop, in the middle of the second drawing."""
    stop, calls = StopRequest(), itertools.count()

    def draw(*inputs: Any) -> Tensor:
        if launch.rank == launch.world - 1 and next(calls) == 4:  # a drawing has three passes
            stop.name = "SIGTERM"
        return sample(*inputs)

    settings = settings_of({"parallel": strategies.FSDP2}, folder)
    with mock.patch.object(in_training, "sample", draw):
        report = run(settings, replace(launch, rendezvous=f"{launch.rendezvous}-stopped"), stop=stop)
    steps = sorted(int(path.stem.removeprefix("step-")) for path in (folder / "pictures").iterdir())
    return {"steps": steps, "step": report.step, "stopped_by": report.stopped_by}


def compare(launch: Launch, folder: Path) -> None:
    found = {}
    for number, (name, case) in enumerate(CASES[launch.world].items()):
        place = folder / f"{launch.world}-{number}"
        resume = folder / "alone/checkpoints/step-00000001" if case.get("resumed") else None
        runs = {"with": PICTURES, **({"without": None} if case.get("without") else {})}
        for kind, drawing in runs.items():
            here = replace(launch, rendezvous=f"{launch.rendezvous}-{number}-{kind}")
            run(settings_of(case, place / kind, drawing), here, resume, case.get("texts"))
        if launch.rank:
            continue
        steps = sorted(int(path.stem.removeprefix("step-")) for path in (place / "with/pictures").iterdir())
        names = [f"{number:04d}" for number in range(case.get("texts", len(tiny_run.TEXTS)))]
        latents = {step: drawn(place / "with", step)[0] for step in steps}
        expected = {step: _only(names, drawn(folder / "alone", step)[0]) for step in steps}
        config = settings_of({**case, "parallel": {"dp_shard": 1}, "text": None}, place)
        dtype = torch.bfloat16 if case.get("precision") == "bf16" else torch.float32
        distances, rounding = [], 0.0
        for step in steps:
            checkpointed = place / f"with/checkpoints/step-{step:08d}"
            if dtype == torch.float32:
                distances.append(distance(latents[step], expected[step]))
            if checkpointed.exists():
                weights = load_model_state(checkpointed, ema=True)[1]
                alone = plain(config, weights, dtype)
                distances.append(distance(latents[step], _only(names, alone)))
                if dtype != torch.float32:
                    rounding = max(rounding, distance(alone, plain(config, weights)))
        found[name] = {
            "steps": steps,
            # In bf16 some CPUs compute a row of another batch by another kernel.
            "tolerance": 1e-5 if dtype == torch.float32 else 1.25 * rounding,
            "distances": distances,
            "distance of two steps": distance(latents[1], latents[2]),
            "same training": [stored(place / kind) == stored(place / "with") for kind in runs],
            "encoders": [name for name in sys.modules if name.endswith(("autoencoder_dc", "modeling_gemma2"))],
        }
    ended = stopped(launch, folder / "stopped") if launch.world == 2 else None
    if launch.rank == 0:
        found |= {"stopped": ended} if ended is not None else {}
        (folder / f"found-{launch.world}.json").write_text(json.dumps(found, indent=1))


def main() -> None:
    alone = settings_of({"parallel": {"dp_shard": 1}, "save_every": 1}, Path(sys.argv[1]) / "alone")
    strategies.alone_and_together(CASES, lambda launch: run(alone, launch), compare)


if __name__ == "__main__":
    run_and_exit(main)
