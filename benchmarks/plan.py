"""The predictions of `sana-pipe plan` against real peaks and real steps, and the time that they take.

Several blocks of Sana 1.6B's width in real processes on the CPU: the trainer's step, optimizer and strategy on made-up
batches, two steps. Real peak: the highest resident set during the steps (VmHWM of /proc, reset before) minus what was
resident before the model was built; the largest of the processes. Two steps of one block precede, so that what oneDNN
and others allocate only once (20 MiB in bf16) does not count, and MALLOC_MMAP_THRESHOLD_ makes malloc return every
tensor to the system.
`seconds_one`: CPU seconds of a prediction for the whole Sana 1.6B on 4 GPUs, without imports;
`seconds_search`: of the search over all strategies of the shipped configuration for four cards of 24 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.real_step import RealStep
from benchmarks.report import finish, reset_peak, resident, table
from sana_pipe.base.gpus import card, memory_of
from sana_pipe.base.launch import detect
from sana_pipe.base.processes import run_and_exit
from sana_pipe.config import load
from sana_pipe.data.encoders.text_kind import max_length
from sana_pipe.tools.planning.predict import Data, Machine, architecture
from sana_pipe.tools.planning.search import Search
from sana_pipe.tools.planning.trace import Shape, Traced
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.prx import PRX
from sana_pipe.train.models.sana_config import SanaConfig
from sana_pipe.train.models.spec import ModelSpec
from sana_pipe.train.models.zimage_config import ZImageConfig
from sana_pipe.train.parallel.mesh import Layout, check_sizes, open_mesh

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
CONFIGURATIONS |= {
    "large latents, fp32": (1, {"precision": "fp32", "activation_checkpointing": "none"}),
    "large latents, bf16": (1, {"activation_checkpointing": "none"}),
    "large latents, selective": (1, {"activation_checkpointing": "selective"}),
    "large latents, int8": (1, {"activation_checkpointing": "none", "activation_compression": "int8"}),
}
LORA = {"adapter": {"kind": "lora", "rank": 16}}
CONFIGURATIONS |= {
    "Z-Image, bf16, recomputed": (1, {}),
    "Z-Image, LoRA, bf16, recomputed": (1, LORA),
    "Z-Image, LoRA, fp32, nothing recomputed": (1, {"precision": "fp32", "activation_checkpointing": "none", **LORA}),
    "Z-Image, FSDP2 of 2, bf16": (2, {}),
}
CONFIGURATIONS |= {
    "PRX, bf16, recomputed": (1, {}),
    "PRX, LoRA, fp32, nothing recomputed": (1, {"precision": "fp32", "activation_checkpointing": "none", **LORA}),
    "PRX, FSDP2 of 2, bf16": (2, {}),
}
ZIMAGE = ZImageConfig(dim=1280, n_heads=10, n_kv_heads=10, n_layers=3, n_refiner_layers=1)
PRX_OF_DC_AE = PRX(in_channels=32, patch_size=1, hidden_size=896, num_heads=14, depth=3)
NARROW = SanaConfig(
    num_layers=2,
    num_attention_heads=18,
    num_cross_attention_heads=8,
    cross_attention_head_dim=72,
    cross_attention_dim=576,
)
QUICK = ("bf16, recomputed", "fp32, nothing recomputed", "FSDP2 of 2, bf16")


def settings(change: dict[str, Any]) -> TrainConfig:
    return TrainConfig.model_validate({"microbatch": 2, "activation_checkpointing": "full", **change})


def real(architecture: ModelSpec, train: TrainConfig, shape: Shape, mesh: Any, steps: int) -> float:
    """Peak bytes of this process during real steps."""
    reset_peak()
    before = resident("VmRSS")
    step = RealStep(architecture, train, shape, CPU, mesh)
    reset_peak()
    for _ in range(steps):
        step()
    return float(resident("VmHWM") - before)


def sizes(name: str, options: argparse.Namespace) -> tuple[ModelSpec, Shape]:
    if name.startswith("Z-Image"):
        return ZIMAGE, Shape(32, 32, 64, 2)
    if name.startswith("PRX"):
        return PRX_OF_DC_AE, Shape(32, 32, 64, 2)
    if name.startswith("large latents"):
        return replace(NARROW, num_layers=4), Shape(48, 48, 128, 2)
    side, rows = (12, 64) if options.quick else (16, 128)
    return SanaConfig(num_layers=3, sample_size=side), Shape(side, side, rows, 2)


def worker(name: str, options: argparse.Namespace) -> None:
    """One process of a launch; the first one writes the largest peak."""
    train = settings(CONFIGURATIONS[name][1])
    architecture, shape = sizes(name, options)
    with open_mesh(detect(), train.parallel, CPU) as mesh:
        real(architecture.with_layers(1), train, shape, mesh, 2)
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
    rows, errors = [], {}
    for name in names:
        architecture, shape = sizes(name, options)
        processes, change = CONFIGURATIONS[name]
        train = settings(change)
        traced = Traced.of(architecture, train, check_sizes(train.parallel, processes), shape, rank=0, on_gpu=False)
        peak = measured(name, processes, options.quick)
        errors[name] = traced.total / peak - 1
        brief = traced.peak["activations"] / traced.total
        row = [
            name,
            processes,
            traced.total / 2**20,
            peak / 2**20,
            f"{errors[name]:+.1%}",
            f"{brief:.0%}",
            traced.phase,
        ]
        rows.append(row)
        print(*rows[-1], flush=True)
    print()
    table(["configuration", "processes", "predicted MiB", "real MiB", "error", "activations", "peak in"], rows)
    return {"max_error": max(abs(error) for error in errors.values()), "configurations": len(errors)}


def seconds_one() -> float:
    """CPU seconds of a prediction, after one that loads torch's lazy parts."""
    whole, layout, shape = SanaConfig(), Layout(1, 1, 4, 1), Shape(32, 32, 300, 8)
    Traced.of(
        SanaConfig(num_layers=1),
        TrainConfig(activation_checkpointing="full", microbatch=8),
        layout,
        shape,
        rank=0,
        on_gpu=True,
    )
    began = time.process_time()
    Traced.of(whole, TrainConfig(activation_checkpointing="full", microbatch=8), layout, shape, rank=0, on_gpu=True)
    return time.process_time() - began


def seconds_search() -> float:
    """CPU seconds of `plan --search` for the shipped configuration on four cards of 24 GB."""
    config = load("sana_1600m_1024")
    data = Data.configured(config.model, config.data, config.bucket, max_length(config.text))
    machine = Machine(card("3090"), memory_of("24GiB"), 4)
    began = time.process_time()
    Search(architecture(config.model, config.data.resolution, data), data, machine).ranked(config.train)
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
