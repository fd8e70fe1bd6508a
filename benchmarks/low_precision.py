"""Loss of training in float8 beside bf16's: `train.float8` of each recipe, emulated on the CPU.

The demonstration's model from the same weights on the same batches, noise and times: latents are one of eight patterns,
which the caption names, and a little noise. Mean losses over stretches of steps, and at the end the loss of samples
that were not trained on, at the same noise levels for all.

    python -m benchmarks.low_precision [--quick]

Keys: for each recipe, last stretch and held-out loss relative to bf16's.
"""

from __future__ import annotations

import argparse
from statistics import fmean

import torch

from benchmarks.report import finish, table
from benchmarks.train_step import demo_model
from pipeline.config import TrainConfig
from pipeline.launch import Launch
from pipeline.loader.loader import Batch
from pipeline.models.objective import FlowMatching
from pipeline.models.sana import SanaTransformer
from pipeline.models.sana_config import SanaConfig
from pipeline.parallel.mesh import open_mesh
from pipeline.parallel.parallelize import parallelize
from pipeline.processes import run_and_exit
from pipeline.training import optimizers
from pipeline.training.build import numerics
from pipeline.training.step import TrainStep

CPU = torch.device("cpu")
RECIPES = ("none", "rowwise", "rowwise_with_gw_hp")
PATTERNS, ROWS, SIDE, SAMPLES, STRETCHES = 8, 12, 8, 12, 6


def batch_of(config: SanaConfig, number: int) -> Batch:
    fixed, drawn = torch.Generator().manual_seed(0), torch.Generator().manual_seed(number + 1)
    latents = torch.randn(PATTERNS, config.in_channels, SIDE, SIDE, generator=fixed)
    captions = torch.randn(PATTERNS, ROWS, config.caption_channels, generator=fixed)
    which = torch.randint(PATTERNS, (SAMPLES,), generator=drawn)
    noise = torch.randn(2, SAMPLES, *latents.shape[1:], generator=drawn)
    return Batch(
        (latents[which] + 0.1 * noise[0]).bfloat16(),
        captions[which].bfloat16(),
        torch.ones(SAMPLES, ROWS, dtype=torch.bool),
        noise[1],
        torch.randn(SAMPLES, generator=drawn),
        (*range(SAMPLES),),
        (SIDE, SIDE),
    )


def losses(recipe: str, steps: int) -> tuple[list[float], float]:
    """Loss of each step, and of held-out samples after them."""
    config = demo_model()
    train = TrainConfig.model_validate(
        {"float8": recipe, "residual": "fp32", "activation_checkpointing": "none", "optim": {"lr": 1e-3}}
    )
    with open_mesh(Launch(), train.parallel, CPU) as mesh:
        model = parallelize(SanaTransformer.from_scratch(config, 0, numerics=numerics(train)), mesh, train)
        optimizer = optimizers.build(model.module, train.optim, CPU)
        optimizers.set_learning_rate(optimizer, train.optim.lr)
        step = TrainStep(model, FlowMatching(train.flow), optimizer, train, CPU)
        trained = [float(step([batch_of(config, number)], number + 1).loss) for number in range(steps)]
        unseen = [step.prepare(batch_of(config, 10**6 + number)) for number in range(8)]
        held_out = fmean(float(part.mean()) for part in model.losses(unseen, step.objective.loss))
        return trained, held_out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps")
    steps = 12 if parser.parse_args().quick else 120
    torch.set_num_threads(1)
    size, curves, rows = steps // STRETCHES, {}, []
    for recipe in RECIPES:
        trained, held_out = losses(recipe, steps)
        curves[recipe] = [fmean(trained[start : start + size]) for start in range(0, steps, size)] + [held_out]
        rows.append([recipe, *(f"{loss:.4f}" for loss in curves[recipe])])
    table(["train.float8", *(f"steps to {end}" for end in range(size, steps + 1, size)), "held out"], rows)
    figures = {}
    for recipe in RECIPES[1:]:
        figures[f"{recipe}, last steps"] = curves[recipe][-2] / curves["none"][-2]
        figures[f"{recipe}, held out"] = curves[recipe][-1] / curves["none"][-1]
    finish(figures)


if __name__ == "__main__":
    run_and_exit(main)
