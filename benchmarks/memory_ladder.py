"""Real FSDP2 on four gloo processes, adding one memory technique after the other: peak memory and step time of each.

A rung adds a technique to those of the rungs before it. It builds the model anew and does one untimed step and then
timed ones, with the trainer's step, AdamW and synthetic batches. The peak is the highest resident set during these
steps (VmHWM of /proc, reset before), minus what was resident before the model was built; the largest of the four
processes. One step in each precision precedes all rungs, so that one-time allocations are in none of them.
MALLOC_MMAP_THRESHOLD_ makes malloc return every tensor to the system; otherwise its free lists would be measured.
On a CPU, host memory and device memory are the same: the last rungs, which offload, cannot lower the resident set. For
them the table shows the bytes in host memory (saved tensors at the end of the forward pass; shards of parameters,
gradients and moments by their sizes), which a GPU would save. `ladder_reduction` compares the last rung before offload
with the first. Step times are those of 4 processes on the available cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.report import finish, median, reset_peak, resident, table
from sana_pipe.base.launch import detect
from sana_pipe.base.processes import run_and_exit
from sana_pipe.data.loader.loader import Batch
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.sana import SanaTransformer
from sana_pipe.train.models.sana_config import SanaConfig
from sana_pipe.train.parallel import data_parallel
from sana_pipe.train.parallel.mesh import open_mesh
from sana_pipe.train.parallel.parallelize import ParallelModel, parallelize
from sana_pipe.train.training import optimizers
from sana_pipe.train.training.objectives.flow import Flow
from sana_pipe.train.training.optimizers import in_backward
from sana_pipe.train.training.step import TrainStep

PROCESSES = 4
RUNGS: dict[str, dict[str, Any]] = {
    "plain: one FSDP unit, fp32": {},
    "+ each block a unit": {},
    "+ checkpointing: full": {"activation_checkpointing": "full"},
    "+ bf16 parameters and activations": {"precision": "bf16"},
    "+ compression: int8": {"activation_compression": "int8"},
    "+ optimizer's step in the backward pass": {"optim": {"in_backward": True}},
    "+ offload of parameters and optimizer": {"parallel": {"offload": "all"}},
}
BEFORE_OFFLOAD = "+ optimizer's step in the backward pass"
CPU = torch.device("cpu")


def batch(step: int, rank: int, samples: int, side: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 * step + rank)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return Batch(
        latents=normal(samples, 32, side, side).bfloat16(),
        captions=normal(samples, 32, 256).bfloat16(),
        mask=torch.ones(samples, 32, dtype=torch.bool),
        noise=normal(samples, 32, side, side),
        logit=normal(samples),
        sample_ids=tuple(rank * samples + i for i in range(samples)),
        bucket=(side * 32, side * 32),
    )


def rung(name: str, train: TrainConfig, mesh: Any, size: argparse.Namespace, steps: int) -> dict[str, float]:
    """This process's figures of one rung, in bytes and seconds."""
    shape = SanaConfig(
        num_layers=size.layers,
        num_attention_heads=size.heads,
        num_cross_attention_heads=size.heads // 2,
        cross_attention_head_dim=64,
        cross_attention_dim=size.heads * 32,
        caption_channels=256,
        sample_size=size.side,
    )
    reset_peak()
    before = resident("VmRSS")
    model = SanaTransformer.from_scratch(shape, 0)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if name == next(iter(RUNGS)):
        data_parallel.apply_fsdp(model, [], mesh, train)
        parallel = ParallelModel(model, dist.get_world_size())
    else:
        parallel = parallelize(model, mesh, train)
    optimizer = optimizers.build(parallel.module, train.optim, CPU)
    if train.optim.in_backward:
        in_backward.fuse(optimizer, parallel)
    step, times = TrainStep(parallel, Flow(train.flow), optimizer, train, CPU), []
    reset_peak()
    for number in range(steps):
        dist.barrier()
        start = time.perf_counter()
        step([batch(number, dist.get_rank(), size.samples, size.side)], number + 1)
        times.append(time.perf_counter() - start)
    shards = 4 * parameters / dist.get_world_size() * (3 if train.optim.in_backward else 4)
    offloaded = shards if train.parallel.offload == "all" else 0
    return {"peak": float(resident("VmHWM") - before), "host": float(offloaded), "seconds": median(times[1:] or times)}


def worker(size: argparse.Namespace, result: Path) -> None:
    """One process of the launch: runs all rungs; the first one writes the largest figures."""
    values: dict[str, Any] = {"precision": "fp32", "activation_checkpointing": "none", "microbatch": size.samples}
    values |= {"optim": {"clip": None, "warmup_steps": 0, "lr": 1e-5}}
    settings, results = {}, {}
    for name, change in RUNGS.items():
        for key, value in change.items():
            values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
        settings[name] = TrainConfig.model_validate(values)
    with open_mesh(detect(), TrainConfig().parallel, CPU) as mesh:
        for name in (next(iter(RUNGS)), BEFORE_OFFLOAD):  # one-time allocations, in both precisions
            rung(name, settings[name], mesh, size, 1)
        for name, train in settings.items():
            figures = rung(name, train, mesh, size, 1 + size.steps)
            keys = list(figures)
            most = torch.tensor([figures[key] for key in keys], dtype=torch.float64)
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
            results[name] = dict(zip(keys, most.tolist(), strict=True))
        if dist.get_rank() == 0:
            result.write_text(json.dumps(results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    quick = {"layers": 6, "heads": 8, "side": 12, "samples": 2, "steps": 1}
    size = argparse.Namespace(
        **(quick if options.quick else {**quick, "layers": 8, "heads": 16, "side": 16, "steps": 3})
    )
    if options.worker:
        worker(size, options.worker)
        return
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "results.json"
        subprocess.run(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(PROCESSES),
                "-m",
                "benchmarks.memory_ladder",
                "--worker",
                str(result),
                *(["--quick"] if options.quick else []),
            ],
            check=True,
            env={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
        )
        results = json.loads(result.read_text())
    first = next(iter(results.values()))
    rows = [
        [name, f["peak"] / 2**20, 1 - f["peak"] / first["peak"], f["host"] / 2**20, f["seconds"]]
        for name, f in results.items()
    ]
    print(f"{PROCESSES} processes, {size.layers} blocks {32 * size.heads} wide, {size.samples} x {size.side**2} tokens")
    table(["technique", "peak MiB", "less than plain", "of it offloaded MiB", "s/step"], rows)
    figures: dict[str, float | str] = {"ladder_reduction": 1 - results[BEFORE_OFFLOAD]["peak"] / first["peak"]}
    for number, f in enumerate(results.values()):
        figures[f"rung_{number}_mib"] = f["peak"] / 2**20
        figures[f"rung_{number}_s"] = f["seconds"]
    finish(figures)


if __name__ == "__main__":
    run_and_exit(main)
