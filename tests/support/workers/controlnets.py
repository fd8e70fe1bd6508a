"""Gradients of a ControlNet by each strategy against diffusers' classes in one process.

python -m tests.support.workers.controlnets FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sana_pipe.base.launch import Launch
from sana_pipe.base.processes import run_and_exit
from sana_pipe.train.models.adapters.controlnet import PREFIX
from sana_pipe.train.models.sana_config import SanaConfig
from sana_pipe.train.models.sana_shape import deinterleave
from sana_pipe.train.parallel import mesh
from sana_pipe.train.parallel.microbatch import Outputs
from sana_pipe.train.parallel.parallelize import parallelize
from tests.support.controlnets import saved, trained
from tests.support.workers import strategies, tiny_run

CPU = torch.device("cpu")
CASES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "FSDP2": {"parallel": strategies.FSDP2, "microbatch": 4},
        "FSDP2, two microbatches, recomputed": {
            "parallel": strategies.FSDP2,
            "microbatch": 2,
            "activation_checkpointing": "full",
        },
        "DDP": {"parallel": strategies.DDP, "microbatch": 4},
    }
}


def settings_of(case: dict[str, Any]) -> Any:
    return tiny_run.config(layers=4, controlnet={"layers": 2, "control_drop": 0.3}, **case)


def model(settings: Any) -> Any:
    return trained(SanaConfig.from_arch(settings.model.arch, 8), layers=2)


def alone(launch: Launch) -> None:
    """The loss and its gradients of the whole batch, through the classes of diffusers."""
    settings = settings_of({"microbatch": 8})
    step = tiny_run.train_step(nn.Identity(), settings.train)
    inputs, targets, *_ = step.prepare(tiny_run.global_batch(0))
    base, control = saved(model(settings), Path(sys.argv[1]))
    base.requires_grad_(False)
    given: dict[str, Any] = {
        "encoder_hidden_states": inputs["captions"],
        "encoder_attention_mask": inputs["mask"].long(),
    }
    given |= {"timestep": inputs["timesteps"], "return_dict": False}
    (added,) = control(inputs["latents"], controlnet_cond=inputs["control"], conditioning_scale=1.0, **given)
    output = base(inputs["latents"], controlnet_block_samples=tuple(added), **given)[0]
    loss = step.objective.losses(Outputs(output, {}, {}), targets)["flow"].mean()
    loss.backward()
    gradients = {f"{PREFIX}{name}": p.grad for name, p in control.named_parameters()}
    torch.save((loss.item(), gradients), Path(sys.argv[1]) / "alone.pt")


def compare(launch: Launch, folder: Path) -> None:
    loss, gradients = torch.load(folder / "alone.pt")
    result = {}
    for number, (name, case) in enumerate(CASES[launch.world].items()):
        settings = settings_of(case)
        here = Launch(launch.rank, launch.world, launch.rank, launch.world, rendezvous=f"{launch.rendezvous}-{number}")
        with mesh.open_mesh(here, settings.train.parallel, CPU) as group:
            layout = mesh.check_sizes(settings.train.parallel, launch.world)
            parts = (settings.train.microbatch, layout.data_rank(launch.rank), layout.data_world)
            pieces = tiny_run.microbatches(tiny_run.global_batch(0), *parts)
            found = tiny_run.gradients(parallelize(model(settings), group, settings.train), settings, pieces)
        ours = {name: deinterleave(name, value) for name, value in found[2].items()}
        result[name] = {"loss": abs(found[0] / loss - 1), "gradient": tiny_run.distance(ours, gradients)}
    if launch.is_main:
        (folder / f"found-{launch.world}.json").write_text(json.dumps(result))


def main() -> None:
    strategies.alone_and_together(CASES, alone, compare)


if __name__ == "__main__":
    run_and_exit(main)
