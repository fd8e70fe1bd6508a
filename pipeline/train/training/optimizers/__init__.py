"""The optimizer that the configuration names, and its learning rate as a pure function of the step.

What differs between optimizers is in their records (`training/optimizer_records.py`) and their modules here. Torch's
Adafactor is left out: it fails on DTensors, so it would work for one process in fp32 only.
Why no scheduler object: a function needs no state in the checkpoint, it counts optimizer steps for any number of
processes (a scheduler stepped by accelerate counts `world` per step), and a resumed run cannot disagree.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch
from torch import nn

from sana_pipe.base.errors import ConfigError, UserError
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.training.config import OptimConfig
from sana_pipe.train.training.optimizer_records import OPTIMIZERS

WSD_PART = 10
"""The rate of `schedule: wsd` falls over the last tenth of the steps."""
NEW_CONCEPTS = 5e-5
"""Rate below which users who fine-tune Sana report that new concepts come slowly."""


def learning_rate(config: OptimConfig, step: int, steps: int, numerics: str = "default") -> float:
    """The rate of a step: lr * min(1, (step + 1) / warmup_steps) * the share that the schedule leaves of it.

    Steps count from 0 here; the loop counts from 1 and passes `step - 1`. So the first step has 1/warmup_steps of the
    peak, not 0, and step `warmup_steps - 1` the peak. NVlabs' trainer is one step behind: its first step has rate 0.

    Args:
        steps: of the run. A rate that falls would reach its end at this step, which is the first after the run.
    """
    done = step if numerics == "nvlabs" else step + 1
    warm = min(1.0, done / config.warmup_steps) if config.warmup_steps else 1.0
    return config.lr * warm * _share_of_peak(config, step, steps)


def _share_of_peak(config: OptimConfig, step: int, steps: int) -> float:
    """Linear, half a cosine, or 1 - sqrt (Haegele et al., arXiv 2405.18392) down to 0."""
    decay_from = config.warmup_steps
    if config.schedule == "wsd":
        decay_from = max(decay_from, steps - max(1, steps // WSD_PART))
    if config.schedule == "constant" or step <= decay_from:
        return 1.0
    progress = min(1.0, (step - decay_from) / max(1, steps - decay_from))
    return {
        "linear": 1 - progress,
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "wsd": 1 - math.sqrt(progress),
    }[config.schedule]


def advice(config: OptimConfig, steps: int) -> list[str]:
    """Notes before a run of so many steps on rates that will not have the expected effect."""
    notes = []
    if 2 * config.warmup_steps > steps:
        reached = learning_rate(config, steps - 1, steps)
        notes.append(
            f"train.optim.warmup_steps = {config.warmup_steps} is more than half of train.steps = {steps}: the last "
            f"step has a rate of {reached:.2g}, the rate after the warm-up is {config.lr:.2g}; "
            f"--set train.optim.warmup_steps={steps // 10} warms up for a tenth of the run"
        )
    if config.lr < NEW_CONCEPTS:
        notes.append(
            f"the rate after the warm-up is {config.lr:.2g}: below {NEW_CONCEPTS:g} new concepts come slowly; for them "
            f"--set train.optim.lr={2 * NEW_CONCEPTS:g}, and about 10,000 steps before a first concept shows"
        )
    return notes


def decays(name: str, parameter: torch.Tensor) -> bool:
    """Return whether weight decay applies: to matrices and convolutions, not to biases, norms, gates and tables."""
    return parameter.ndim > 1 and not name.endswith("scale_shift_table")


def build(
    model: nn.Module, config: OptimConfig, device: torch.device, *, seed: int = 0, numerics: str = "default"
) -> torch.optim.Optimizer:
    """The optimizer of the model's parameters (plain or sharded, fp32 or bf16). Call it after `parallelize`.
    seed: of stochastic rounding, for bf16 parameters."""
    check(config)
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    nvlabs = numerics == "nvlabs"
    groups = [
        {"params": [p for n, p in named if decays(n, p)], "weight_decay": config.weight_decay},
        {"params": [p for n, p in named if not decays(n, p)], "weight_decay": config.weight_decay if nvlabs else 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    module: Any = importlib.import_module(OPTIMIZERS[config.name].module)
    optimizer: torch.optim.Optimizer = module.build(groups, config, named, device, seed=seed, nvlabs=nvlabs)
    return optimizer


def check(config: OptimConfig) -> None:
    """Import the module of the optimizer; refuse one whose package is not installed."""
    record = OPTIMIZERS[config.name]
    try:
        importlib.import_module(record.module)
    except ImportError as error:
        if record.extra is None:
            raise
        raise UserError(
            f"train.optim.name: {config.name} needs {record.extra}, which is not installed or does not work with this "
            "torch",
            found=str(error),
            fix=f"pip install 'sana-pipe[{record.extra}]', or train.optim.name: came (4 bytes of state per parameter)",
        ) from None


def check_resumable(earlier: dict[str, Any], train: TrainConfig) -> None:
    """Refuse to continue with an optimizer that cannot use the checkpoint's state. earlier: its section `train`."""
    before, now, numerics = earlier["optim"]["name"], train.optim.name, (earlier["numerics"], train.numerics)
    record = OPTIMIZERS[now]
    if before == now and record.joins is not None and numerics[0] != numerics[1]:
        raise ConfigError(
            f"the checkpoint holds the state of another form of {record.title}",
            expected=f"train.numerics: {numerics[0]}",
            found=f"train.numerics: {numerics[1]}",
            fix=f"--set train.numerics={numerics[0]}, or begin a new run, with fresh moments: --from CHECKPOINT --set "
            "train.output=DIR",
        )
    state = OPTIMIZERS[before].state
    if state != record.state:
        raise ConfigError(
            f"the checkpoint holds the state of {before}, this run has train.optim.name: {now}",
            expected=" or ".join(name for name, other in OPTIMIZERS.items() if other.state == state),
            fix="restore it, or begin a new run, with fresh moments: --from CHECKPOINT --set train.output=DIR",
        )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group the same rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
