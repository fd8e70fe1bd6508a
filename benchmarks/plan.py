"""The memory prediction of `sana-pipe plan` against real peaks, and the time that it takes.

Several blocks of Sana 1.6B's width in real processes on the CPU: the trainer's step, optimizer and strategy on made-up
batches, two steps. Real peak: the highest resident set during the steps (VmHWM of /proc, reset before) minus what was
resident before the model was built; the largest of the processes. One narrow step precedes, so that one-time
allocations do not count, and MALLOC_MMAP_THRESHOLD_ makes malloc return every tensor to the system.
`seconds_one`: CPU seconds of a prediction for the whole Sana 1.6B on 4 GPUs, without imports; `seconds_search`: of the
search over all strategies of the shipped configuration for four cards of 24 GB.
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

from benchmarks.report import finish, reset_peak, resident, table
from pipeline.config import TrainConfig, load
from pipeline.launch import detect
from pipeline.loader.loader import Batch
from pipeline.models.objective import FlowMatching
from pipeline.models.sana import SanaTransformer
from pipeline.models.sana_config import SanaConfig
from pipeline.parallel.mesh import Layout, check_sizes, open_mesh
from pipeline.parallel.parallelize import parallelize
from pipeline.parallel.shards import local
from pipeline.planning.cards import card, memory_of
from pipeline.planning.predict import Data, Machine, architecture
from pipeline.planning.search import search
from pipeline.planning.trace import Shape, Traced
from pipeline.processes import run_and_exit
from pipeline.training import optimizers
from pipeline.training.build import numerics
from pipeline.training.ema import EMA
from pipeline.training.optimizers import in_backward
from pipeline.training.step import TrainStep

CPU = torch.device("cpu")
CAME = {"name": "came", "betas": None, "eps": None}
CONFIGURATIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "fp32, recomputed": (1, {"precision": "fp32"}),
    "fp32, nothing recomputed": (1, {"precision": "fp32", "activation_checkpointing": "none"}),
    "bf16, recomputed": (1, {}),
    "bf16, nothing recomputed": (1, {"activation_checkpointing": "none"}),
    "bf16, selective": (1, {"activation_checkpointing": "selective"}),
    "bf16, every-2": (1, {"activation_checkpointing": "every-2"}),
    "bf16, int8": (1, {"activation_checkpointing": "none", "activation_compression": "int8"}),
    "bf16, CAME": (1, {"optim": CAME}),
    "fp32, CAME, EMA": (1, {"precision": "fp32", "optim": CAME, "ema": {}}),
    "bf16_pure": (1, {"precision": "bf16_pure"}),
    "bf16, update in backward": (1, {"optim": {"clip": None, "in_backward": True}}),
    "FSDP2 of 2, bf16": (2, {}),
    "FSDP2 of 2, fp32, int8": (
        2,
        {"precision": "fp32", "activation_checkpointing": "none", "activation_compression": "int8"},
    ),
    "FSDP2 of 4, bf16, CAME": (4, {"optim": CAME}),
    "FSDP2 of 4, fp32, not resharded": (4, {"precision": "fp32", "parallel": {"reshard_after_forward": False}}),
}
QUICK = ("bf16, recomputed", "fp32, nothing recomputed", "FSDP2 of 2, bf16")


def settings(change: dict[str, Any]) -> TrainConfig:
    return TrainConfig.model_validate({"microbatch": 2, "residual": "fp32", **change})


def real_batch(architecture: SanaConfig, shape: Shape, number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    samples, size = shape.microbatch, (shape.microbatch, architecture.in_channels, shape.height, shape.width)
    return Batch(
        latents=torch.randn(size, generator=generator).bfloat16(),
        captions=torch.randn(samples, shape.rows, architecture.caption_channels, generator=generator).bfloat16(),
        mask=torch.ones(samples, shape.rows, dtype=torch.bool),
        noise=torch.randn(size, generator=generator),
        logit=torch.randn(samples, generator=generator),
        sample_ids=tuple(range(samples)),
        bucket=(shape.height * 32, shape.width * 32),
    )


def real(architecture: SanaConfig, train: TrainConfig, shape: Shape, mesh: Any, steps: int) -> float:
    """Peak bytes of this process during real steps."""
    reset_peak()
    before = resident("VmRSS")
    model = parallelize(SanaTransformer.on_meta(architecture, numerics(train)), mesh, train)
    with torch.no_grad():
        for parameter in model.module.parameters():
            local(parameter).fill_(1e-3)
    optimizer = optimizers.build(model.module, train.optim, CPU, recipe=train.recipe)
    ema = EMA(model.module, train.ema) if train.ema is not None else None
    if train.optim.in_backward:
        in_backward.fuse(optimizer, model)
    step = TrainStep(model, FlowMatching(train.flow), optimizer, train, CPU)
    reset_peak()
    for number in range(steps):
        step([real_batch(architecture, shape, number)] * shape.count, number + 1)
        if ema is not None:
            ema.update(number + 1)
    return float(resident("VmHWM") - before)


def sizes(options: argparse.Namespace) -> tuple[SanaConfig, Shape]:
    side, rows = (12, 64) if options.quick else (16, 128)
    return SanaConfig(num_layers=3, sample_size=side), Shape(side, side, rows, 2)


def worker(name: str, options: argparse.Namespace) -> None:
    """One process of a launch; the first one writes the largest peak."""
    train = settings(CONFIGURATIONS[name][1])
    architecture, shape = sizes(options)
    narrow = SanaConfig(
        num_layers=2,
        num_attention_heads=4,
        num_cross_attention_heads=2,
        cross_attention_head_dim=64,
        cross_attention_dim=128,
    )
    with open_mesh(detect(), train.parallel, CPU) as mesh:
        real(narrow, train, Shape(8, 8, 16, 2), mesh, 2)
        peak = torch.tensor(real(architecture, train, shape, mesh, 2), dtype=torch.float64)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            options.worker.write_text(json.dumps(float(peak)))


def measured(name: str, processes: int, quick: bool) -> float:
    """Real peak bytes, from processes that are started for it."""
    launch = [sys.executable, "-m"]
    if processes > 1:
        launch += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "peak.json"
        command = [*launch, "benchmarks.plan", "--worker", str(result), "--only", name, *(["--quick"] if quick else [])]
        environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ}
        subprocess.run(command, check=True, env={**environment, "MALLOC_MMAP_THRESHOLD_": "65536"})
        return float(json.loads(result.read_text()))


def compare(options: argparse.Namespace) -> dict[str, float | str]:
    names = [options.only] if options.only else list(QUICK if options.quick else CONFIGURATIONS)
    architecture, shape = sizes(options)
    rows, errors = [], {}
    for name in names:
        processes, change = CONFIGURATIONS[name]
        train = settings(change)
        traced = Traced.of(architecture, train, check_sizes(train.parallel, processes), shape, rank=0, on_gpu=False)
        peak = measured(name, processes, options.quick)
        errors[name] = traced.total / peak - 1
        rows.append([name, processes, traced.total / 2**20, peak / 2**20, f"{errors[name]:+.1%}", traced.phase])
        print(*rows[-1], flush=True)
    print()
    table(["configuration", "processes", "predicted MiB", "real MiB", "error", "peak in"], rows)
    return {"max_error": max(abs(error) for error in errors.values()), "configurations": len(errors)}


def seconds_one() -> float:
    """CPU seconds of a prediction, after one that loads torch's lazy parts."""
    whole, layout, shape = SanaConfig(), Layout(1, 1, 4, 1), Shape(32, 32, 300, 8)
    Traced.of(SanaConfig(num_layers=1), TrainConfig(), layout, shape, rank=0, on_gpu=True)
    began = time.process_time()
    Traced.of(whole, TrainConfig(), layout, shape, rank=0, on_gpu=True)
    return time.process_time() - began


def seconds_search() -> float:
    """CPU seconds of `plan --search` for the shipped configuration on four cards of 24 GB."""
    config = load("sana_1600m_1024")
    data = Data.of(config)
    machine = Machine(card("3090"), memory_of("24GiB"), 4)
    began = time.process_time()
    search(config.train, architecture(config, data), data, machine)
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=list(CONFIGURATIONS), help="one configuration")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.only, options)
        return
    figures = compare(options)
    finish({**figures, "seconds_one": seconds_one(), "seconds_search": seconds_search()})


if __name__ == "__main__":
    run_and_exit(main)
