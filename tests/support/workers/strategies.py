"""Every strategy against one process: python -m tests.support.workers.strategies FOLDER [--long] [WORLD ...].

Imports once, then forks the processes of each launch. What one process alone does is worked out first and kept in
FOLDER; the first process of each launch writes what it found to FOLDER/found-WORLD.json, and the tests judge.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from sana_pipe.base.launch import Launch
from sana_pipe.base.processes import run_and_exit
from sana_pipe.config import Config
from sana_pipe.train.parallel import mesh
from sana_pipe.train.parallel import parallelize as parallelizing
from sana_pipe.train.parallel.parallelize import ParallelModel, parallelize
from sana_pipe.train.training import loss_scale
from tests.support.workers import tiny_run

CPU = torch.device("cpu")
STEPS = 20
SHORT = {"steps": 6}
"""Of variants of a strategy that has a case of `STEPS` steps. With `--long` all have as many."""
FSDP2, HSDP, DDP = {"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 1}
TP = {"dp_shard": 1, "tp_size": 2}
UNCLIPPED = {"lr": 3e-4, "warmup_steps": 0, "clip": None}
COMPILED = {"compile": "block"}
CASES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "DDP": {"parallel": DDP},
        "FSDP2": {"parallel": FSDP2},
        "TP": {"parallel": TP},
        "TP, microbatch 3 (3 + 3 + 2), recomputed": {
            "parallel": TP,
            "microbatch": 3,
            "activation_checkpointing": "full",
            **SHORT,
        },
        "TP, norm": {"parallel": TP, "arch": "norm", **SHORT},
        "TP, bf16": {"parallel": TP, "precision": "bf16", "arch": "two heads of 32", **SHORT},
        "DDP, bf16": {"parallel": DDP, "precision": "bf16", "arch": "two heads of 32", **SHORT},
        "FSDP2, recomputed, compiled": {"parallel": FSDP2, "activation_checkpointing": "full", **COMPILED, **SHORT},
        "TP, compiled": {"parallel": TP, **COMPILED, **SHORT},
        "FSDP2, packed": {"parallel": FSDP2, "text": "packed", **SHORT},
        "FSDP2, fp16": {"parallel": FSDP2, "precision": "fp16", "arch": "heads of 32", **SHORT},
        "FSDP2, selective, norm": {
            "parallel": FSDP2,
            "arch": "norm",
            "activation_checkpointing": "selective",
            **SHORT,
        },
        "FSDP2, update in the backward pass": {
            "parallel": FSDP2,
            "microbatch": 8,
            "optim": {**UNCLIPPED, "in_backward": True},
            **SHORT,
        },
    },
    4: {
        "HSDP": {"parallel": HSDP},
        "HSDP, each microbatch reduced": {
            "parallel": {**HSDP, "reduce_each_microbatch": True},
            "microbatch": 1,
            **SHORT,
        },
        "FSDP2 x TP": {"parallel": {"tp_size": 2}},
        "FSDP2 x TP, norm, recomputed": {
            "parallel": {"tp_size": 2},
            "arch": "norm",
            "activation_checkpointing": "full",
            **SHORT,
        },
        "DDP x TP": {"parallel": {**DDP, "tp_size": 2}, **SHORT},
        "FSDP2 x TP, bf16": {
            "parallel": {"tp_size": 2},
            "precision": "bf16",
            "arch": "two heads of 32",
            **SHORT,
        },
    },
    8: {"HSDP x TP": {"parallel": {**HSDP, "tp_size": 2}}},
}
"""Launch size -> name -> settings of the train section; `arch`: of `ARCHS`."""
PLAIN = "plain"
ARCHS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "norm": {"qk_norm": "rms_norm_across_heads", "interpolation_scale": 1.0},
    "heads of 32": {"num_attention_heads": 1, "attention_head_dim": 32},
    "two heads of 32": {"num_attention_heads": 2, "attention_head_dim": 32, "cross_attention_head_dim": 32},
}
"""norm: with RMS norm of queries and keys, and a position embedding. heads of 32: as in Sana. Where ReLU leaves a query
near zero, linear attention's gradient grows as 1 / query. With heads of 8 that happens often enough to let runs drift
apart: in fp32, start weights that differ by 2^-14 move the losses of twenty steps by 3e-3, with heads of 32 by 2e-4.
In fp16 losses were 2.6e-3 to 2.1e-2 away, by microbatch and loss scale; with heads of 32 5e-4 for all of them.
In bf16 losses of twenty steps are 3.8e-3 to 4.3e-3 away with two heads of 32, one for each process of TP."""


parallelizing.COMPILE_BACKEND = "aot_eager"


def settings_of(case: dict[str, Any]) -> Config:
    train = {name: value for name, value in case.items() if name != "arch"}
    return tiny_run.config(arch=ARCHS[case.get("arch", PLAIN)], **train)


def alone(case: dict[str, Any]) -> Config:
    """The same model and batch in one plain process, in fp32."""
    return settings_of({"microbatch": 8, "arch": case.get("arch", PLAIN)})


def launches(world: int, folder: Path, function: Callable[[Launch], object]) -> None:
    """Run `function` in `world` forked processes that have imported what this one has.

    Raises:
        SystemExit: one of them failed.
    """
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a test that times out leaves none behind
            code = 1
            try:
                function(Launch(rank, world, rank, world, rendezvous=f"file://{folder}/meeting-{world}"))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        raise SystemExit(f"a launch of {world} ended with {codes}")


def alone_and_together(
    cases: Mapping[int, Any], alone: Callable[[Launch], object], compare: Callable[[Launch, Path], None]
) -> None:
    """A run in one process, then `compare` with it in launches of each size of `cases`. The command line has the
    folder and, to run some of them, sizes."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    # In a process of its own: one that had a process group cannot be forked.
    launches(1, folder, alone)
    for world in [int(world) for world in sys.argv[2:]] or list(cases):
        launches(world, folder, lambda launch: compare(launch, folder))


def wrapping(parallel_model: ParallelModel) -> dict[str, Any]:
    """What is really there."""
    parameters = dict(parallel_model.module.named_parameters())
    dims = {name: (isinstance(p, DTensor) and p.device_mesh.mesh_dim_names) or () for name, p in parameters.items()}
    blocks = [m for m in parallel_model.module.modules() if type(m).__name__.endswith("SanaTransformerBlock")]
    over_tp = sorted(
        name
        for name, p in parameters.items()
        if isinstance(p, DTensor) and "tp" in dims[name] and any(isinstance(q, Shard) for q in p.placements[-1:])
    )
    local = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters.values())
    return {
        "fsdp_blocks": sum(isinstance(block, FSDPModule) for block in blocks),
        "blocks": len(blocks),
        "compiled": sum("forward" in vars(block) for block in blocks),
        "over_tp": len(over_tp),
        "dims": sorted({"/".join(names) for names in dims.values()}),
        "share": local / sum(p.numel() for p in parameters.values()),
        "data_world": parallel_model.data_world,
    }


def tokens_of(parallel_model: ParallelModel) -> set[str]:
    """Filled with the dtypes of what the blocks return from now on."""
    result: set[str] = set()
    for block in parallel_model.module.modules():
        if type(block).__name__.endswith("SanaTransformerBlock"):
            block.register_forward_hook(lambda module, inputs, output: result.add(str(output.dtype)))
    return result


def gradients(case: dict[str, Any], launch: Launch, group: Any) -> tuple[float, float, dict[str, torch.Tensor]]:
    settings = settings_of(case)
    parallel_model = parallelize(tiny_run.model(settings), group, settings.train)
    return tiny_run.gradients(parallel_model, settings, pieces(settings, launch))


def pieces(settings: Config, launch: Launch) -> list[Any]:
    layout = mesh.check_sizes(settings.train.parallel, launch.world)
    whole = tiny_run.global_batch(0, logit=1.5)
    parts = tiny_run.microbatches(whole, settings.train.microbatch, layout.data_rank(launch.rank), layout.data_world)
    return [tiny_run.packed(part) for part in parts] if settings.train.text == "packed" else parts


def reference(folder: Path) -> None:
    for arch in ARCHS:
        settings = alone({"arch": arch})
        loss, length, result = tiny_run.gradients(tiny_run.model(settings), settings, pieces(settings, Launch()))
        losses = tiny_run.train_losses(tiny_run.model(settings), settings, STEPS)
        without = settings_of({"microbatch": 8, "arch": arch, "optim": UNCLIPPED})
        unclipped = tiny_run.train_losses(tiny_run.model(without), without, STEPS)
        # With bf16 tokens, whose rounding outweighs that of the partial sums under tensor parallelism.
        half = settings_of({"precision": "bf16", "arch": arch})
        plain = tiny_run.gradients(tiny_run.model(settings).bfloat16(), half, pieces(settings, Launch()))
        kept = {
            "loss": loss,
            "norm": length,
            "gradients": result,
            "losses": losses,
            "unclipped": unclipped,
            "bf16": tiny_run.distance({n: g.float() for n, g in plain[2].items()}, result),
        }
        torch.save(kept, folder / f"alone-{arch}.pt")


def compare(launch: Launch, folder: Path, long: bool) -> None:
    loss_scale.INITIAL = 4.0  # the tiny model's gradients overflow fp16 at the scale of a run's first step
    result = {}
    for number, (name, case) in enumerate(CASES[launch.world].items()):
        settings = settings_of(case)
        expected = torch.load(folder / f"alone-{case.get('arch', PLAIN)}.pt")
        here = Launch(launch.rank, launch.world, launch.rank, launch.world, rendezvous=f"{launch.rendezvous}-{number}")
        with mesh.open_mesh(here, settings.train.parallel, CPU) as group:
            layout = mesh.check_sizes(settings.train.parallel, launch.world)
            parallel_model = parallelize(tiny_run.model(settings), group, settings.train)
            what, tokens = wrapping(parallel_model), tokens_of(parallel_model)
            loss, norm, mine = tiny_run.gradients(parallel_model, settings, pieces(settings, here))
            if settings.train.compile == "none":  # else compiled once: these gradients were not applied
                parallel_model = parallelize(tiny_run.model(settings), group, settings.train)
            steps = STEPS if long else case.get("steps", STEPS)
            losses = tiny_run.train_losses(
                parallel_model, settings, steps, layout.data_rank(here.rank), layout.data_world
            )
        clipped = "losses" if settings.train.optim.clip is not None else "unclipped"
        result[name] = {
            "precision": settings.train.precision,
            "qk_norm": case.get("arch") == "norm",
            "wrapping": what,
            "tokens": sorted(tokens),
            "loss": abs(loss - expected["loss"]),
            "norm": abs(norm / expected["norm"] - 1),
            "gradient": tiny_run.distance(mine, expected["gradients"]),
            "plain_bf16": expected["bf16"],
            "losses": max(abs(a - b) for a, b in zip(losses, expected[clipped][:steps], strict=True)),
        }
    if launch.is_main:
        (folder / f"found-{launch.world}.json").write_text(json.dumps(result))


def main() -> None:
    folder, words = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    launches(1, folder, lambda launch: reference(folder))
    for world in [int(word) for word in words if word != "--long"] or list(CASES):
        launches(world, folder, lambda launch: compare(launch, folder, "--long" in words))


if __name__ == "__main__":
    run_and_exit(main)
