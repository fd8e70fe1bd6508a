"""The optimizer's update within the backward pass, parameter by parameter.

`fuse` lets the run's optimizer update each parameter as soon as its gradient is complete, which is then freed; `step`
finds none. One optimizer and not one per parameter, as in torch's tutorial: its state dict, and so every checkpoint,
stays the same, and the setting can change when a run is resumed.
Price: a call of the optimizer per parameter; no clipping, no accumulation over microbatches. After a non-finite
gradient the weights in memory are spoilt; the last checkpoint is not.
"""

from __future__ import annotations

import torch
from torch import nn

from sana_pipe.base.errors import ConfigError
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.parallel.parallelize import ParallelModel


def check(train: TrainConfig, batch: int, shares: int) -> None:
    """Refuse a largest global batch that, divided into so many shares, needs several microbatches on a process."""
    share = -(-batch // shares)
    if train.optim.in_backward and share > train.microbatch:
        raise ConfigError(
            "train.optim.in_backward needs a process's share of a batch in one microbatch",
            expected=f"train.microbatch = {share} or more (batch {batch} in {shares} share(s)), or bucket.batch = "
            f"{train.microbatch * shares} or less",
            found=f"train.microbatch = {train.microbatch}",
            fix=f"--set train.microbatch={share}, or --set train.optim.in_backward=false",
        )


def fuse(optimizer: torch.optim.Optimizer, model: ParallelModel) -> None:
    """Update every parameter of `model` with `optimizer` within each backward pass from now on."""
    group_of = {p: number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}

    def update(parameter: nn.Parameter) -> None:
        groups = optimizer.param_groups
        optimizer.param_groups = [{**groups[group_of[parameter]], "params": [parameter]}]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = groups

    model.update_in_backward(update)
