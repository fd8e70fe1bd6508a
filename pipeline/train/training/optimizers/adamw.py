"""AdamW: torch's for fp32 parameters, fused where it can be; with stochastic rounding for bf16 ones."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from sana_pipe.train.training.config import OptimConfig
from sana_pipe.train.training.optimizers import stochastic_rounding


def build(
    groups: list[dict[str, Any]],
    config: OptimConfig,
    named: list[tuple[str, torch.Tensor]],
    device: torch.device,
    *,
    seed: int,
    nvlabs: bool,
) -> torch.optim.Optimizer:
    """AdamW of fp32 parameters is fused, on a GPU and on the CPU, where the parameters are under `offload: all`: one
    pass over the memory (torch's `foreach` needs temporaries of the parameters' size: +5 GiB for Sana 1.6B). Not fused:
    fp32 under tensor parallelism alone, whose parameters are in part plain tensors; torch's kernel takes one kind."""
    options: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    if any(parameter.dtype == torch.bfloat16 for _, parameter in named):
        return stochastic_rounding.AdamW(groups, **options, seed=seed)
    fused = device.type in ("cpu", "cuda") and len({isinstance(p, DTensor) for _, p in named}) == 1
    return torch.optim.AdamW(groups, **options, foreach=None if fused else False, fused=True if fused else None)
