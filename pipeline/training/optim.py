"""AdamW as Sana uses it, and its learning rate as a pure function of the step.

What: `build` makes the optimizer with two groups (matrices decay; biases, norms and tables do not), `learning_rate`
gives the rate of a step: linear warm-up, then constant.
Why a function and no scheduler object: it needs no state in the checkpoint, it counts optimizer steps whatever the
number of processes (a scheduler stepped by accelerate counts `world` per step), and a resumed run cannot disagree.
Price: schedules other than warm-up and constant have to be written here.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from pipeline.config import OptimConfig


def peak_learning_rate(config: OptimConfig, batch: int) -> float:
    """The rate after the warm-up: `lr`, times sqrt(batch / 256) for `scale_lr: sqrt` (the rule of NVlabs' trainer).

    Args:
        batch: the global batch of one optimizer step.
    """
    return config.lr * (math.sqrt(batch / 256) if config.scale_lr == "sqrt" else 1.0)


def learning_rate(config: OptimConfig, batch: int, step: int) -> float:
    """The rate of optimizer step `step` (the first one is 0): peak * min(1, (step + 1) / warmup_steps).

    The first step thus takes 1/warmup_steps of the peak, not 0, and step `warmup_steps - 1` takes all of it.
    """
    peak = peak_learning_rate(config, batch)
    return peak * min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else peak


def decays(name: str, parameter: torch.Tensor) -> bool:
    """Whether weight decay pulls this parameter to zero: matrices and convolutions yes, the rest no."""
    return parameter.ndim > 1 and not name.endswith("scale_shift_table")


def build(model: nn.Module, config: OptimConfig, device: torch.device) -> torch.optim.AdamW:
    """AdamW over the model's parameters (plain or sharded). Call it after `shard`.

    Fused on a GPU (the default `foreach` needs temporaries of the parameters' size: +5 GiB for Sana 1.6B), a plain
    loop on the CPU.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for n, p in named if decays(n, p)], "weight_decay": config.weight_decay},
        {"params": [p for n, p in named if not decays(n, p)], "weight_decay": 0.0},
    ]
    on_gpu = device.type == "cuda"
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        foreach=False if not on_gpu else None,
        fused=True if on_gpu else None,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group the same rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
