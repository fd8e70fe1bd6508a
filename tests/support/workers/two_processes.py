"""Checks that need several processes, in one launch: torchrun -m tests.support.workers.two_processes FOLDER.

Each check is a function that returns what it found; the first process writes all of it to FOLDER/found.json, and the
tests judge. What one process alone would do is computed first, before any process group exists.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from sana_pipe.base.errors import UserError
from sana_pipe.base.launch import Launch, detect
from sana_pipe.base.processes import run_and_exit
from sana_pipe.config import Config
from sana_pipe.data.loader.loader import Batch
from sana_pipe.train.models import sana_layers
from sana_pipe.train.parallel import collectives, data_parallel, mesh
from sana_pipe.train.parallel.parallelize import ParallelModel, parallelize
from sana_pipe.train.training import build, metrics
from sana_pipe.train.training.task import Report
from sana_pipe.train.training.trainer import fit
from tests.support.checkpoints import load_model_state
from tests.support.workers import tiny_run

CPU = torch.device("cpu")
ALONE = Launch()
STEPS = 20
FOLDER = Path(sys.argv[1])
_meetings = 0


def meeting(launch: Launch) -> Launch:
    """The same processes with a fresh place to meet: a group can be opened once at each."""
    global _meetings
    _meetings += 1
    return replace(launch, rendezvous=f"file://{FOLDER / f'meeting-{_meetings}'}")


@contextmanager
def group(launch: Launch, settings: Config) -> Iterator[DeviceMesh]:
    with mesh.open_mesh(launch if launch.world == 1 else meeting(launch), settings.train.parallel, CPU) as found:
        yield found


def sharded(settings: Config, found: DeviceMesh, seed: int = 0) -> ParallelModel:
    return parallelize(tiny_run.model(settings, seed), found, settings.train)


def late() -> Batch:
    """Timesteps between 750 and 990, where bf16 counts in steps of 4."""
    return tiny_run.global_batch(0, logit=1.5)


def gradients(launch: Launch, settings: Config, batch: Batch | None = None) -> tuple[float, float, dict[str, Any]]:
    whole = batch or tiny_run.global_batch(0)
    pieces = tiny_run.microbatches(whole, settings.train.microbatch, launch.rank, launch.world)
    with group(launch, settings) as found:
        return tiny_run.gradients(sharded(settings, found), settings, pieces)


def losses(launch: Launch, settings: Config) -> list[float]:
    with group(launch, settings) as found:
        return tiny_run.train_losses(sharded(settings, found), settings, STEPS, launch.rank, launch.world)


# ----------------------------------------------------------------------------------------------------------- checks


def fp32(launch: Launch) -> dict[str, Any]:
    whole = tiny_run.config(microbatch=8)
    loss, norm, expected = gradients(ALONE, whole)
    expected_losses = losses(ALONE, whole)
    found: dict[str, Any] = {"gradient": {}, "loss": {}, "norm": {}, "losses": {}}
    variants = {
        "microbatch 4": tiny_run.config(microbatch=4),
        "microbatch 3 (3 + 1)": tiny_run.config(microbatch=3),
        "microbatch 1, recomputed": tiny_run.config(microbatch=1, activation_checkpointing="full"),
        "no reshard": tiny_run.config(microbatch=4, parallel={"reshard_after_forward": False}),
        "microbatch 1, each reduced": tiny_run.config(microbatch=1, parallel={"reduce_each_microbatch": True}),
    }
    for name, settings in variants.items():
        got = gradients(launch, settings)
        found["loss"][name] = abs(got[0] - loss)
        found["norm"][name] = abs(got[1] / norm - 1)
        found["gradient"][name] = tiny_run.distance(got[2], expected)
    for name in ("microbatch 4", "microbatch 3 (3 + 1)", "microbatch 1, each reduced"):
        pairs = zip(losses(launch, variants[name]), expected_losses, strict=True)
        found["losses"][name] = max(abs(a - b) for a, b in pairs)
    return found


def wrapped(launch: Launch) -> dict[str, Any]:
    """Every block and the root are FSDP modules, a process holds its share, and which microbatches reduce."""
    found: dict[str, Any] = {"reductions": {}}
    for each in (False, True):
        settings = tiny_run.config(microbatch=1, parallel={"reduce_each_microbatch": each})
        with group(launch, settings) as devices:
            parallel_model = sharded(settings, devices)
            model: Any = parallel_model.module
            own = sum(parameter.to_local().numel() for parameter in model.parameters())
            total = sum(parameter.numel() for parameter in model.parameters())
            pieces = tiny_run.microbatches(tiny_run.global_batch(0), 1, launch.rank, launch.world)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                tiny_run.gradients(parallel_model, settings, pieces)
            events = [e for e in profile.key_averages() if e.key.startswith("c10d::") and "_scatter" in e.key]
            found["reductions"][str(each)] = sum(e.count for e in events)
            found |= {
                "wrapped": sum(isinstance(module, FSDPModule) for module in model.modules()),
                "blocks": len(model.blocks),
                "share": own / total,
                "microbatches": len(pieces),
            }
    return found


def bf16(launch: Launch) -> dict[str, Any]:
    settings = tiny_run.config(precision="bf16")
    whole = tiny_run.config(precision="bf16")  # the same microbatches of 4 in one process: only the reduction differs
    plain_loss, _, _ = tiny_run.gradients(tiny_run.model(whole).bfloat16(), whole, [late()])
    _, _, exact = tiny_run.gradients(tiny_run.model(whole), tiny_run.config(), [late()])
    one_loss, _, one = gradients(ALONE, whole, late())
    two_loss, _, two = gradients(launch, settings, late())
    # The norm is summed in another order by two processes, and one weight that clipping then rounds the other way to
    # bf16 hides what is compared here; clipping is compared in fp32.
    free = tiny_run.config(precision="bf16", optim={"clip": None})
    one_losses, two_losses = losses(ALONE, free), losses(launch, free)
    found: dict[str, Any] = {
        "one from plain": abs(one_loss - plain_loss),
        "two from plain": abs(two_loss - plain_loss),
        "gradient of two from one": tiny_run.distance(two, one),
        "gradient from fp32": tiny_run.distance(two, exact),
        "losses": max(abs(a - b) for a, b in zip(one_losses, two_losses, strict=True)),
    }
    # Sabotage: FSDP2's own default, without the model's refusal of a rounded timestep.
    policy, sinusoid = data_parallel.MixedPrecisionPolicy, sana_layers.timestep_sinusoid

    def default(**options: Any) -> MixedPrecisionPolicy:
        options.pop("cast_forward_inputs", None)
        return policy(**options)

    data_parallel.MixedPrecisionPolicy = default  # type: ignore[assignment,misc]
    sana_layers.timestep_sinusoid = lambda timesteps: sinusoid(timesteps.float())
    try:
        cast_loss, _, cast = gradients(launch, settings, late())
    finally:
        data_parallel.MixedPrecisionPolicy, sana_layers.timestep_sinusoid = policy, sinusoid  # type: ignore[misc]
    found["sabotaged two from plain"] = abs(cast_loss - plain_loss)
    found["sabotaged gradient from fp32"] = tiny_run.distance(cast, exact)
    return found


def replicas(launch: Launch) -> dict[str, Any]:
    """Two replicas in bf16, whose gradients stay in the buffer of their reduction or are copied."""
    found: dict[str, Any] = {"losses": {}, "gradient": {}}
    parallel = {"dp_replicate": 2, "dp_shard": 1}
    for each in (4, 1):
        settings = tiny_run.config(precision="bf16", microbatch=each, parallel=parallel)
        in_place = losses(launch, settings), gradients(launch, settings)[2]
        with mock.patch.object(data_parallel, "is_reduced_in_place", return_value=False):
            copied = losses(launch, settings), gradients(launch, settings)[2]
        found["losses"][str(each)] = in_place[0] == copied[0]
        found["gradient"][str(each)] = all(torch.equal(in_place[1][key], copied[1][key]) for key in copied[1])
    return found


def bad_number(launch: Launch) -> dict[str, Any]:
    """A sample of the second process is spoilt: every process stops in the same words."""
    settings = tiny_run.config(FOLDER / "bad", steps=4, microbatch=2)
    noise = tiny_run.global_batch(1).noise.clone()
    noise[6] = float("inf")

    def touch(step: int) -> Batch | None:
        return replace(tiny_run.global_batch(1), noise=noise) if step == 1 else None

    return {"said": everywhere(refusal(lambda: run(launch, settings, touch=touch)), launch, settings)}


def other_weights(launch: Launch) -> dict[str, Any]:
    """The second process starts from other values."""
    settings = tiny_run.config(FOLDER / "mixed")
    task = tiny_run.task(settings, launch.rank, launch.world)
    with mock.patch.object(build, "start_values", lambda weights, seed, spec: spec.initial(launch.rank)):
        text = refusal(lambda: fit(settings.train, task, meeting(launch), log=quiet))
    return {"said": everywhere(text, launch, settings)}


def other_options(launch: Launch) -> dict[str, Any]:
    """The second process takes fewer steps."""
    settings = tiny_run.config(FOLDER / "mixed", steps=3 - launch.rank)
    task = tiny_run.task(settings, launch.rank, launch.world)
    text = refusal(lambda: fit(settings.train, task, meeting(launch), log=quiet))
    return {"said": everywhere(text, launch, settings)}


def resumed(launch: Launch) -> dict[str, Any]:
    """Interrupted after 3 of 8 steps and resumed, on the same and on other numbers of processes."""

    def settings(name: str, steps: int, size: int = 2) -> Config:
        return tiny_run.config(FOLDER / name, steps=steps, microbatch=size, activation_checkpointing="full")

    run(launch, settings("whole", 8))
    run(launch, settings("same", 3))
    run(launch, settings("same", 8), resume="auto")
    halfway = FOLDER / "same/checkpoints/step-00000003"
    run(launch, settings("one first", 3), alone=True)
    run(launch, settings("one, then two", 8), resume=FOLDER / "one first/checkpoints/step-00000003")
    run(launch, settings("two, then one", 8), resume=halfway, alone=True)
    run(launch, settings("one", 8), alone=True)
    # Sabotage: continue after the wrong step.
    run(launch, tiny_run.config(FOLDER / "shifted", steps=8, microbatch=2), resume=halfway, shift=1)
    if launch.rank:
        return {}
    found: dict[str, Any] = {"losses": {}, "weights": {}, "bitwise": {}}
    rows = {name: metrics.read(FOLDER / name / "metrics.jsonl") for name in ("whole", "one")}
    expected = {row["step"]: row["loss"] for row in rows["whole"]}
    _, weights = load_model_state(FOLDER / "whole/checkpoints/step-00000008")
    for name in ("same", "one, then two", "two, then one", "one", "shifted"):
        _, others = load_model_state(FOLDER / name / "checkpoints/step-00000008")
        mine = {row["step"]: row["loss"] for row in metrics.read(FOLDER / name / "metrics.jsonl")}
        found["losses"][name] = max(abs(mine[step] - expected[step]) for step in mine)
        found["weights"][name] = tiny_run.distance(others, weights)
        found["bitwise"][name] = all(torch.equal(others[key], weights[key]) for key in weights)
    return found


# ----------------------------------------------------------------------------------------------------------- helpers


def quiet(line: str) -> None:
    pass


def run(
    launch: Launch,
    settings: Config,
    *,
    resume: str | Path | None = None,
    alone: bool = False,
    touch: Any = None,
    shift: int = 0,
) -> Report | None:
    """`fit` with made-up batches, on all processes or on the first one only while the others wait."""
    here = ALONE if alone else meeting(launch)
    report = None
    if launch.rank == 0 or not alone:
        task = tiny_run.task(settings, here.rank, here.world, touch=touch)
        if shift:
            task = tiny_run.task(
                settings, here.rank, here.world, touch=lambda step: tiny_run.global_batch(step + shift)
            )
        report = fit(settings.train, task, here, resume=resume, log=quiet)
    if alone:
        with group(launch, settings):
            dist.barrier()
    return report


def refusal(call: Any) -> str:
    try:
        call()
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def everywhere(text: str, launch: Launch, settings: Config) -> list[str]:
    with group(launch, settings):
        return collectives.all_gather_objects(text)


def main() -> None:
    torch.set_num_threads(1)
    launch = detect()
    with mesh.open_mesh(launch, tiny_run.config().train.parallel, CPU) as found:
        result: dict[str, Any] = {"launch": {"kind": launch.kind, "size": found.size(), "backend": dist.get_backend()}}
    for check in (fp32, wrapped, bf16, replicas, bad_number, other_weights, other_options, resumed):
        result[check.__name__] = check(launch)
    if launch.rank == 0:
        (FOLDER / "found.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    run_and_exit(main)
