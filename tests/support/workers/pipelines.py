"""Pipelines against one process: python -m tests.support.workers.pipelines FOLDER [--long] [WORLD ...].

As `tests.support.workers.strategies`: imports once, forks the processes of each launch, writes FOLDER/found-WORLD.json.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from sana_pipe.base.errors import UserError
from sana_pipe.base.launch import Launch
from sana_pipe.base.processes import run_and_exit
from sana_pipe.config import Config
from sana_pipe.data.loader.loader import Batch
from sana_pipe.train.models.sana import SanaTransformer
from sana_pipe.train.parallel import collectives, mesh
from sana_pipe.train.parallel.activation_checkpoint import ManagedActivations
from sana_pipe.train.parallel.parallelize import ParallelModel, PipelineParallelModel, parallelize
from sana_pipe.train.parallel.pipeline_parallel import Pipeline
from sana_pipe.train.training import metrics
from sana_pipe.train.training.trainer import fit
from tests.support.checkpoints import load_model_state
from tests.support.workers import strategies, tiny_run

CPU = torch.device("cpu")
STEPS, LAYERS = 20, 5  # a case may have fewer steps, but for `--long`
SEED = 2
"""Of start values whose linear attention has no denominators close to zero: those turn a different order of summation
into 1e-5 of the loss and more within twenty steps, in one process, too (with the norm, seeds 0 and 10 of 0 to 11)."""
STALL = 6
LATE = 1.5
"""Logit of the timesteps: between 750 and 990, where bf16 counts in steps of 4."""


def pp(size: int = 2, **sizes: Any) -> dict[str, Any]:
    return {"pp_size": size, "dp_shard": 1, **sizes}


RECOMPUTED, SHORT = {"activation_checkpointing": "full"}, {"steps": 6}
CASES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "two": {"parallel": pp()},
        "recomputed": {"parallel": pp(), **RECOMPUTED, **SHORT},
        "norm": {"parallel": pp(), "arch": "norm", **SHORT},
        "bf16": {"parallel": pp(), "precision": "bf16", **SHORT},
        "every-2": {"parallel": pp(), "activation_checkpointing": "every-2", **SHORT},
    },
    4: {
        "four": {"parallel": pp(4)},
        "x FSDP2": {"parallel": pp(dp_shard=2)},
        "x FSDP2, recomputed": {
            "parallel": pp(dp_shard=2),
            **RECOMPUTED,
            "microbatch": 1,
            **SHORT,
        },
        "x FSDP2, bf16": {"parallel": pp(dp_shard=2), "precision": "bf16", **SHORT},
        "x DDP": {"parallel": pp(dp_replicate=2), **SHORT},
        "x TP, norm": {"parallel": pp(tp_size=2), "arch": "norm", **SHORT},
    },
    8: {"x FSDP2 x TP": {"parallel": pp(dp_shard=2, tp_size=2)}},
}
"""Launch size -> name -> settings of the train section; `arch`: of `strategies.ARCHS`."""


def settings_of(case: dict[str, Any]) -> Config:
    return strategies.settings_of({"layers": LAYERS, "microbatch": 2, **case})


def batch(step: int) -> Batch:
    return tiny_run.global_batch(step, logit=LATE)


def own(settings: Config, launch: Launch, step: int) -> list[Batch]:
    layout = mesh.check_sizes(settings.train.parallel, launch.world)
    size = settings.train.microbatch
    return tiny_run.microbatches(batch(step), size, layout.data_rank(launch.rank), layout.data_world)


def start(settings: Config) -> SanaTransformer:
    return tiny_run.model(settings, SEED)


def reference(folder: Path) -> None:
    """One process without any wrapping, the whole global batch at once: (loss, norm, gradients) of two shapes, how far
    a plain bf16 model's gradients are from them, and the losses of all steps."""
    for arch in (strategies.PLAIN, "norm"):
        full = settings_of({"microbatch": 8, "arch": arch, "precision": "fp32"})
        steps = [tiny_run.gradients(start(full), full, [batch(step)]) for step in (0, 1)]
        half = settings_of({"microbatch": 8, "arch": arch, "precision": "bf16"})
        plain = [tiny_run.gradients(start(half).bfloat16(), half, [batch(step)])[2] for step in (0, 1)]
        distances = [
            tiny_run.distance({name: value.float() for name, value in found.items()}, exact[2])
            for found, exact in zip(plain, steps, strict=True)
        ]
        losses = tiny_run.train_losses(start(full), full, STEPS)
        torch.save({"steps": steps, "losses": losses, "bf16": distances}, folder / f"alone-{arch}.pt")


def parity(launch: Launch, folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    settings = settings_of(case)
    layout = mesh.check_sizes(settings.train.parallel, launch.world)
    expected = torch.load(folder / f"alone-{case.get('arch', strategies.PLAIN)}.pt")
    found: dict[str, Any] = {
        "loss": [],
        "norm": [],
        "gradient": [],
        "plain bf16": expected["bf16"],
    }
    with mesh.open_mesh(launch, settings.train.parallel, CPU) as group:
        parallel_model = parallelize(start(settings), group, settings.train)
        tokens = strategies.tokens_of(parallel_model)
        for step, (loss, norm, gradients) in enumerate(expected["steps"]):  # two shapes, one after the other
            mine = tiny_run.gradients(parallel_model, settings, own(settings, launch, step))
            found["loss"].append(abs(mine[0] - loss))
            found["norm"].append(abs(mine[1] / norm - 1))
            found["gradient"].append(tiny_run.distance(whole(collectives.all_gather_objects(mine[2])), gradients))
        found["wrapping"], found["tokens"] = collectives.all_gather_objects(wrapping(parallel_model)), sorted(tokens)
        parallel_model = parallelize(start(settings), group, settings.train)
        steps = STEPS if "--long" in sys.argv else case.get("steps", STEPS)
        losses = tiny_run.train_losses(
            parallel_model, settings, steps, layout.data_rank(launch.rank), layout.data_world
        )
    found["losses"] = max(abs(a - b) for a, b in zip(losses, expected["losses"][:steps], strict=True))
    return found


def whole(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: value for part in parts for name, value in part.items()}


def wrapping(parallel_model: ParallelModel) -> dict[str, Any]:
    """What is really there, on this process."""
    assert isinstance(parallel_model, PipelineParallelModel)
    parameters = dict(parallel_model.module.named_parameters())
    stage = parallel_model.pipeline.stage
    dims = {p.device_mesh.mesh_dim_names if isinstance(p, DTensor) else () for p in parameters.values()}
    return {
        "names": sorted(parameters),
        "blocks": sorted(stage.transformer_blocks),
        "sharded": sum(isinstance(module, FSDPModule) for module in (stage, *stage.blocks)),
        "recomputed": [
            name
            for name, block in stage.transformer_blocks.items()
            if isinstance(block, ManagedActivations) and block.activation_policy.checkpointing == "full"
        ],
        "dims": sorted("/".join(names or ()) for names in dims),
    }


# ----------------------------------------------------------------------------------------------------- runs by `fit`


def run(
    folder: Path, name: str, launch: Launch, steps: int, case: dict[str, Any], resume: Any = None, **task: Any
) -> None:
    settings = settings_of({**case, "output": str(folder / name), "steps": steps, "ema": {"decay": 0.9}})
    layout = mesh.check_sizes(settings.train.parallel, launch.world)
    given = tiny_run.task(settings, layout.data_rank(launch.rank), layout.data_world, **task)
    fit(settings.train, given, launch, resume=resume, log=lambda line: None)


def resumed(launch: Launch, folder: Path) -> None:
    """The halves of runs that change their number of processes and stages; see `chains`."""
    fsdp2 = launch.world == 4
    case = {"parallel": pp(dp_shard=2) if fsdp2 else pp()}
    name = "pp x fsdp2" if fsdp2 else "pp"
    run(folder, f"{name} first", at(launch, 1), 3, case)
    run(folder, f"one, then {name}", at(launch, 2), 6, case, resume=folder / "one first/checkpoints/step-00000003")


def chains(folder: Path, then: bool) -> dict[str, Any]:
    """In one process: what comes before the pipelines, or what follows them and the comparison."""
    alone = {"parallel": {"dp_shard": 1}}
    if not then:
        run(folder, "one first", Launch(), 3, alone)
        run(folder, "one", Launch(), 6, alone)
        return {}
    found = {}
    expected = stored(folder / "one/checkpoints/step-00000006")
    losses = {row["step"]: row["loss"] for row in metrics.read(folder / "one/metrics.jsonl")}
    for name in ("pp", "pp x fsdp2"):
        run(folder, f"{name}, then one", Launch(), 6, alone, resume=folder / f"{name} first/checkpoints/step-00000003")
        for chain in (f"{name}, then one", f"one, then {name}"):
            weights, averages = stored(folder / chain / "checkpoints/step-00000006")
            rows = {row["step"]: row["loss"] for row in metrics.read(folder / chain / "metrics.jsonl")}
            found[chain] = {
                "weights": tiny_run.distance(weights, expected[0]),
                "averages": tiny_run.distance(averages, expected[1]),
                "losses": max(abs(rows[step] - losses[step]) for step in (4, 5, 6)),
                "files": len(list((folder / chain / "checkpoints/step-00000006").glob("*.distcp"))),
            }
    return found


def stored(folder: Path) -> list[dict[str, torch.Tensor]]:
    """Weights and running averages of a checkpoint."""
    return [load_model_state(folder, ema=ema)[1] for ema in (False, True)]


def bad_number(launch: Launch, folder: Path) -> str:
    """A sample of the second step is spoilt; only the last stage sees its loss."""
    noise = tiny_run.global_batch(1).noise.clone()
    noise[6] = float("inf")

    def touch(step: int) -> Batch | None:
        return replace(tiny_run.global_batch(1), noise=noise) if step == 1 else None

    try:
        run(folder, "bad", launch, 4, {"parallel": pp()}, touch=touch)
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def stalled(launch: Launch, folder: Path) -> float:
    """Seconds until a process gives up on another one of its pipeline, which holds still with all connections open."""
    settings = settings_of({"parallel": pp(dp_shard=2)})
    mesh.WAIT_S = STALL
    with mesh.open_mesh(launch, settings.train.parallel, CPU) as group:
        parallel_model = parallelize(start(settings), group, settings.train)
        began = time.monotonic()
        if launch.rank > 1:
            while time.monotonic() < began + 10 * STALL and len(list(folder.glob("gave-up-*"))) < 2:
                time.sleep(0.1)
            return 0.0
        try:
            tiny_run.gradients(parallel_model, settings, own(settings, launch, 0))
        except RuntimeError:
            waited = time.monotonic() - began
            (folder / f"gave-up-{launch.rank}").touch()
            return waited
    return float("inf")


def another_shape(launch: Launch, folder: Path) -> None:
    """Sabotage: the schedule of the first shape is used for the second one, too. Ends the processes."""
    settings = settings_of({"parallel": pp()})
    mesh.WAIT_S = 10
    pick = Pipeline.schedule_for

    def first(self: Pipeline, count: int, inputs: Any) -> Any:
        return next(iter(self.schedules.values()), None) or pick(self, count, inputs)

    Pipeline.schedule_for = first  # type: ignore[method-assign]
    with mesh.open_mesh(launch, settings.train.parallel, CPU) as group:
        parallel_model = parallelize(start(settings), group, settings.train)
        for step in (0, 1):
            tiny_run.gradients(parallel_model, settings, own(settings, launch, step))


# -------------------------------------------------------------------------------------------------------------- main


def at(launch: Launch, number: int) -> Launch:
    """The same processes with another place to meet."""
    return replace(launch, rendezvous=f"{launch.rendezvous}-{number}")


def everything(launch: Launch, folder: Path) -> None:
    found: dict[str, Any] = {"parity": {}}
    for number, (name, case) in enumerate(CASES[launch.world].items(), start=10):
        found["parity"][name] = parity(at(launch, number), folder, case)
    if launch.world < 8:
        resumed(launch, folder)
    if launch.world == 2:
        said = bad_number(at(launch, 3), folder)
        with mesh.open_mesh(at(launch, 4), settings_of({"parallel": pp()}).train.parallel, CPU):
            found["said"] = collectives.all_gather_objects(said)
    if launch.world == 4:
        found["gave up after"] = stalled(at(launch, 5), folder)
    if launch.is_main:
        (folder / f"found-{launch.world}.json").write_text(json.dumps(found))


def before(folder: Path) -> None:
    reference(folder)
    chains(folder, then=False)


def after(folder: Path) -> None:
    (folder / "found-1.json").write_text(json.dumps(chains(folder, then=True)))


def main() -> None:
    folder, words = Path(sys.argv[1]), sys.argv[2:]
    worlds = [int(word) for word in words if word != "--long"] or list(CASES)
    torch.set_num_threads(1)
    strategies.launches(1, folder, lambda launch: before(folder))
    for world in worlds:
        strategies.launches(world, folder, lambda launch: everything(launch, folder))
    if {2, 4} <= set(worlds):
        strategies.launches(1, folder, lambda launch: after(folder))
    try:
        strategies.launches(2, folder, lambda launch: another_shape(at(launch, 6), folder))
        ended = "well"
    except SystemExit as error:
        ended = str(error)
    (folder / "another-shape.txt").write_text(ended)


if __name__ == "__main__":
    run_and_exit(main)
