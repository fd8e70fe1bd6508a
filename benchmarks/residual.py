"""Benefit and cost of fp32 tokens between the blocks under bf16: `sana_config.FP32_RESIDUAL` true and false.

A few blocks of Sana 1.6B's width on the CPU, fp32 parameters, sharded as in training, so that matrix products are in
bf16. Loss and gradient of the same batches are compared with those in fp32. Two starts: the weights of a new model, and
the same with a patch embedding ten times as large, so that what a block adds is small compared with the tokens, as it
is deep in a trained model. Memory: a block's saved bytes at 1024 px, counted on fake tensors
(`benchmarks.memory`).
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.memory import count, fake_model, shape, technique
from benchmarks.report import finish, table
from sana_pipe.base.launch import Launch
from sana_pipe.base.processes import run_and_exit
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models import sana_config
from sana_pipe.train.models.config import FlowConfig
from sana_pipe.train.models.flow_matching import FlowMatching
from sana_pipe.train.models.sana import SanaTransformer
from sana_pipe.train.models.sana_config import numerics
from sana_pipe.train.models.sana_shape import Numerics
from sana_pipe.train.parallel.mesh import open_mesh
from sana_pipe.train.parallel.microbatch import Microbatch
from sana_pipe.train.parallel.parallelize import parallelize
from sana_pipe.train.training.objectives import StepLoss
from sana_pipe.train.training.objectives.flow import Flow

CPU = torch.device("cpu")
SCALES = {"new weights": 1.0, "tokens x 10": 10.0}
WAYS = {"fp32": ("fp32", False), "fp32 residual": ("bf16", True), "bf16 residual": ("bf16", False)}
"""(precision, whether the residual is in fp32)."""


def gradients(layers: int, scale: float, name: str, samples: int, side: int) -> tuple[float, dict[str, Tensor]]:
    """Loss of one batch and its gradient, fp32."""
    precision, sana_config.FP32_RESIDUAL = WAYS[name]
    train = TrainConfig.model_validate({"precision": precision, "activation_checkpointing": "full"})
    generator = torch.Generator().manual_seed(0)
    latents, noise = (torch.randn(samples, 32, side, side, generator=generator) for _ in range(2))
    captions, mask = torch.randn(samples, 24, 2304, generator=generator), torch.ones(samples, 24, dtype=torch.bool)
    flow = FlowMatching(FlowConfig())
    sigma, timesteps = flow.sigmas(torch.randn(samples, generator=generator))
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    with open_mesh(Launch(), train.parallel, CPU) as mesh:
        model = SanaTransformer.from_scratch(shape(layers), 0, numerics=numerics(train))
        with torch.no_grad():
            model.patch_embed.proj.weight.mul_(scale)
            model.caption_norm.weight.fill_(1.0)
        parallel = parallelize(model, mesh, train)
        noised = flow.noised(latents, noise, sigma).to(dtype)
        inputs = {"latents": noised, "captions": captions.to(dtype), "mask": mask, "timesteps": timesteps}
        microbatch = Microbatch(inputs, {"flow": flow.target(latents, noise)})
        (losses,) = parallel.forward_backward([microbatch], StepLoss(Flow(FlowConfig())), samples)
        whole = {}
        for key, parameter in parallel.module.named_parameters():
            gradient = parameter.grad
            assert gradient is not None
            whole[key] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        return float(losses.mean()), whole


def distance(rounded: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Relative L2 over all tensors together."""
    error = sum(float((rounded[name] - exact[name]).square().sum()) for name in exact)
    return (error / sum(float(value.square().sum()) for value in exact.values())) ** 0.5


def saved_mb(fp32_residual: bool, checkpointing: str) -> float:
    """MB that a block saves for one 1024 px sample in bf16."""
    both = []
    for layers in (2, 4):
        with FakeTensorMode():
            model = fake_model(shape(layers), torch.bfloat16, technique(checkpointing), Numerics(fp32_residual))
            both.append(count(model, torch.bfloat16, 32, 300))
    return (both[1] - both[0]) / 2 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--side", type=int, default=8, help="of the token grid")
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="one block")
    size = parser.parse_args()
    layers = 1 if size.quick else size.layers
    figures: dict[str, float | str | None] = {"layers": float(layers)}
    rows = []
    for label, scale in SCALES.items():
        exact_loss, exact = gradients(layers, scale, "fp32", size.samples, size.side)
        errors = {}
        for name in list(WAYS)[1:]:
            loss, rounded = gradients(layers, scale, name, size.samples, size.side)
            errors[name] = abs(loss - exact_loss) / exact_loss, distance(rounded, exact)
            rows.append([label, name, *(f"{error:.1e}" for error in errors[name])])
        for number, what in enumerate(("loss", "gradient")):
            fp32, bf16 = (errors[name][number] for name in list(WAYS)[1:])
            figures |= {f"{what} ppm fp32, {label}": 1e6 * fp32, f"{what} ppm bf16, {label}": 1e6 * bf16}
    print(f"{layers} block(s) of width 2240, {size.samples} samples of {size.side} x {size.side} tokens; from fp32:")
    table(["start", "residual", "loss, relative", "gradient, relative L2"], rows)
    memory = []
    for checkpointing in ("none", "selective", "full"):
        fp32, bf16 = saved_mb(True, checkpointing), saved_mb(False, checkpointing)
        memory.append([checkpointing, fp32, bf16, fp32 / bf16])
        figures |= {f"MB fp32, {checkpointing}": fp32, f"MB bf16, {checkpointing}": bf16}
    print("\nsaved for the backward pass by a block for a 1024 px sample, MB")
    table(["checkpointing", "fp32 residual", "bf16 residual", "ratio"], memory)
    finish(figures)


if __name__ == "__main__":
    run_and_exit(main)
