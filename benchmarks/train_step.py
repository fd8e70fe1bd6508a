"""Overhead of the trainer: a step against a bare PyTorch loop, and the wait for data.

overhead: `TrainStep` (casts, noise, per-sample losses, verdict, global norm, clipping, optimizer) against a loop of
plain PyTorch that does the same arithmetic on float32 tensors in memory: noise already mixed in, mean loss,
`clip_grad_norm_`, AdamW. The same model and values, alternating, CPU time of one thread (the machine may be shared);
the median of the ratios of neighbours, and the larger one of two models: the demonstration's (batch 12), and two blocks
of Sana 0.6B at 512 px with its ends (batch 2).

data_wait: from the trainer's rows: the share of the wall time that it waited for batches of a real snapshot of the
demonstration's shape, read from the page cache and verified; without the first rows.

    python -m benchmarks.train_step [--quick]

Keys: overhead, overhead_demo, overhead_600m, data_wait.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import sana_pipe.stages.train
from benchmarks.loader import build
from benchmarks.report import finish, median, table
from sana_pipe.base.processes import run_and_exit
from sana_pipe.config import Config, load
from sana_pipe.data.loader.loader import Batch
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.signals.text import TextEncoding
from sana_pipe.train.models.config import FlowConfig
from sana_pipe.train.models.flow_matching import FlowMatching
from sana_pipe.train.models.sana import SanaTransformer
from sana_pipe.train.models.sana_config import SanaConfig
from sana_pipe.train.parallel.parallelize import ParallelModel
from sana_pipe.train.training import metrics
from sana_pipe.train.training import optimizers as optim
from sana_pipe.train.training.objectives.flow import Flow
from sana_pipe.train.training.step import TrainStep

CPU = torch.device("cpu")
TINY = [(48, 80), (56, 72), (64, 64), (72, 56), (80, 48)]


def demo_model() -> SanaConfig:
    arch = load("tiny").model.arch
    assert arch is not None
    return SanaConfig.from_arch(arch, 8)


def blocks_of_600m(count: int) -> SanaConfig:
    return replace(
        SanaConfig(),
        num_layers=count,
        num_attention_heads=36,
        num_cross_attention_heads=16,
        cross_attention_head_dim=72,
        cross_attention_dim=1152,
    )


def batch_of(config: SanaConfig, samples: int, side: int, rows: int) -> Batch:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    mask = torch.arange(rows)[None] < torch.randint(rows // 2, rows + 1, (samples, 1), generator=generator)
    latents = (samples, config.in_channels, side, side)
    captions = (normal(samples, rows, config.caption_channels) * mask[..., None]).bfloat16()
    size = (32 * side, 32 * side)
    return Batch(
        normal(*latents).bfloat16(), captions, mask, normal(*latents), normal(samples), (*range(samples),), size
    )


def overhead(config: SanaConfig, batch: Batch, rounds: int) -> tuple[list[float], list[float]]:
    """CPU seconds of a step, (ours, bare), in neighbouring pairs."""
    train = load("tiny").train.model_copy(update={"precision": "fp32"})
    flow = FlowMatching(FlowConfig())
    models = [SanaTransformer.from_scratch(config, seed=0) for _ in range(2)]
    optimizers = [optim.build(model, train.optim, CPU) for model in models]
    step = TrainStep(ParallelModel(models[0]), Flow(FlowConfig()), optimizers[0], train, CPU)
    assert train.optim.clip is not None
    clip = train.optim.clip
    sigma, timesteps = flow.sigmas(batch.logit)
    noised = flow.noised(batch.latents, batch.noise, sigma)
    target, captions = flow.target(batch.latents, batch.noise), batch.captions.float()

    def ours() -> None:
        step([batch], 1)

    def bare() -> None:
        model, optimizer = models[1], optimizers[1]
        loss = (model(noised, captions, batch.mask, timesteps) - target).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 2):
        sides: list[tuple[list[float], Callable[[], None]]] = [(seconds[0], ours), (seconds[1], bare)]
        for times, side in sides if turn % 2 else sides[::-1]:
            began = time.process_time()
            side()
            if turn >= 2:
                times.append(time.process_time() - began)
    return seconds


def data_wait(folder: Path, steps: int) -> tuple[float, float]:
    """(share of the wall time waited, seconds a step) of a run on a snapshot, after its first rows."""
    latent = LatentEncoding(compression=8, channels=16)
    build(folder / "cache", 240, buckets=TINY, batch=12, latent=latent, text=TextEncoding(width=128))
    settings = [
        f"cache={folder / 'cache'}",
        f"train.output={folder / 'run'}",
        f"train.steps={steps}",
        "train.log_every=5",
    ]
    config: Config = load("tiny", [*settings, "train.save_every=100000", "train.optim.lr=1e-5"])
    sana_pipe.stages.train.run(config, log=lambda line: None)
    rows = metrics.read(folder / "run/metrics.jsonl")
    wall = rows[-1]["seconds"] - rows[0]["seconds"]
    waited = sum(row["data_wait"] * 5 * 12 / row["images_per_s"] for row in rows[1:])
    return waited / wall, wall / (len(rows[1:]) * 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    ratios, rows = {}, []
    for name, config, batch, rounds in (
        ("demo", demo_model(), (12, 8, 40), 15 if quick else 101),
        ("600m", blocks_of_600m(2), (2, 16, 96), 3 if quick else 15),
    ):
        ours, bare = overhead(config, batch_of(config, *batch), rounds)
        ratios[name] = median([a / b for a, b in zip(ours, bare, strict=True)])
        rows.append([name, 1000 * median(ours), 1000 * median(bare), ratios[name]])
    table(["model", "step ms", "bare ms", "ratio"], rows)
    with tempfile.TemporaryDirectory() as folder:
        waited, seconds = data_wait(Path(folder), 25 if quick else 205)
    print(f"data wait {100 * waited:.2f} % of a step of {1000 * seconds:.0f} ms")
    figures = {f"overhead_{name}": value for name, value in ratios.items()}
    finish({"overhead": max(ratios.values()), **figures, "data_wait": waited})


if __name__ == "__main__":
    run_and_exit(main)
