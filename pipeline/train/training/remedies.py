"""Settings that lower the memory of a run: one table for `sana-pipe plan` and for the advice of `train`.

`memory_advice` lists them for a run that is out of memory; docs/guides/training-big.md has them in the same order. It
traces nothing: the process has no memory to spare, and its prediction was wrong. So it never proposes what can need
more, and ends with the command that checks the settings. `planning.search` decides those of `searched` itself,
proposes `LADDER` and `OFFLOAD`, and traces each of them.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError

from sana_pipe.base.config import setting
from sana_pipe.base.options import value_at
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.parallel.data_parallel import is_managed
from sana_pipe.train.parallel.mesh import check_sizes
from sana_pipe.train.training.optimizer_records import OPTIMIZERS, OptimizerRecord

Changes = dict[str, Any]
"""Options below `train` (`optim.name`) and their new values."""
Remedy = tuple[Changes, str]
"""Changes and their price."""


def _of_optimizer(name: str, record: OptimizerRecord) -> Changes:
    """The options that choose an optimizer, with its betas and eps where a configuration has those of the default."""
    usual = OPTIMIZERS["adamw"]
    others = {} if (record.betas, record.eps) == (usual.betas, usual.eps) else {"optim.betas": None, "optim.eps": None}
    return {"optim.name": name, **others}


LADDER: tuple[Remedy, ...] = (
    ({"ema.device": "cpu"}, "EMA in host memory; one copy of the weights a step, and the arithmetic on the CPU"),
    ({"parallel.reshard_after_forward": True}, "more gathers, or casts, of each block"),
    *((_of_optimizer(name, record), record.price) for name, record in OPTIMIZERS.items() if record.price),
    (
        {"optim.in_backward": True, "optim.clip": None},
        "each gradient is freed once used; no clipping, and a process's share of a batch must be one microbatch",
    ),
    ({"precision": "bf16_pure"}, "parameters and moments in bf16, with stochastic rounding"),
    ({"precision": "bf16"}, "half of the activations; rounds"),
    (
        {"activation_compression": "int8", "compile": "none"},
        "saved tensors in half the bytes or less; rounds the gradients",
    ),
)
"""The settings that cost more than time; the cheapest first."""
OFFLOAD: Remedy = ({"parallel.offload": "all"}, "parameters and optimizer in host memory; much slower")


def searched(train: TrainConfig) -> tuple[Remedy, ...]:
    """Return what a search varies, since the result stays the same; the cheapest first. Half a microbatch comes with
    the reduction: one microbatch may become two, which would keep a whole gradient between them."""
    each = {"parallel.reduce_each_microbatch": True} if _keeps_gradient(train) else {}
    half = {"microbatch": train.microbatch // 2, **each} if train.microbatch > 1 else {}
    return (
        ({"activation_checkpointing": "selective"}, "a quarter of the blocks' saved tensors; about an eighth slower"),
        ({"activation_checkpointing": "full"}, "each block is computed once more: about a third slower"),
        (each, "no whole gradient between the microbatches of a step; they are sent after each"),
        (half, "the same batch in more and smaller microbatches; slower, since the GPU has less to do at a time"),
        ({"parallel.dp_replicate": 1, "parallel.dp_shard": -1}, "shards instead of replicas; more traffic"),
    )


def memory_advice(train: TrainConfig) -> list[str]:
    """Settings that would lower the memory of this configuration, as `--set` lines, cheapest first. Left out are those
    in force already and those that the configuration would refuse. On a GPU the last line is the command that checks
    such settings by a prediction, for a tenth less memory than the GPU has."""
    lines = [
        f"{flags(changes)}   ({price})"
        for changes, price in (*searched(train), *LADDER, OFFLOAD)
        if _helps(train, changes)
    ]
    lines = lines or ["more processes (train.parallel.dp_shard), or a GPU with more memory"]
    if torch.cuda.is_initialized():
        config = shlex.quote(str(Path(train.output) / "config.yaml"))
        mib = torch.cuda.get_device_properties().total_memory * 9 // 10 >> 20
        lines.append(
            f"what fits by prediction: sana-pipe plan --search --config {config} --gpus {_world()} "
            f"--gpu-memory {mib}MiB"
        )
    return lines


def _helps(train: TrainConfig, changes: Changes) -> bool:
    """Return whether the changes would lower the memory of this configuration, and `train` would accept them."""
    precisions = ("fp16", "bf16_pure", "bf16", "fp32")  # fp16 is for GPUs without bf16
    pointless = {
        "activation_checkpointing": changes.get("activation_checkpointing") == "selective"
        and train.activation_checkpointing != "none",
        "microbatch": train.optim.in_backward,
        "optim.name": OPTIMIZERS[train.optim.name].price is not None,  # it has a small state itself
        "parallel.dp_replicate": train.parallel.dp_replicate == 1,
        "parallel.reduce_each_microbatch": train.optim.in_backward,
        "parallel.reshard_after_forward": train.parallel.reshards(sharing_processes(train))
        or (train.precision == "fp32" and sharing_processes(train) == 1),
        "precision": train.precision == "fp16"
        or precisions.index(changes.get("precision", "fp32")) >= precisions.index(train.precision),
        "activation_compression": train.activation_compression != "none",
    }
    if any(pointless.get(option) for option in changes):
        return False
    after = accepted(train, changes)
    return after is not None and after != train


def _keeps_gradient(train: TrainConfig) -> bool:
    """Return whether several microbatches keep more of the gradient on this process than one does."""
    processes = check_sizes(train.parallel, _world()).data_world if _world() > 1 else 1
    managed = is_managed(train, processes)
    return managed and train.parallel.pp_size == 1 and not train.parallel.reduce_each_microbatch


def sharing_processes(train: TrainConfig) -> int:
    """Processes that share the parameters of a replica."""
    return check_sizes(train.parallel, _world()).dp_shard if _world() > 1 else 1


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def changed(train: TrainConfig, changes: Changes) -> TrainConfig:
    """A configuration with options below `train` replaced. Raises ValidationError as `train` would."""
    tree = train.model_dump()
    for option, value in changes.items():
        section, _, name = option.rpartition(".")
        (value_at(tree, section) if section else tree)[name] = value
    return TrainConfig.model_validate(tree)


def accepted(train: TrainConfig, changes: Changes) -> TrainConfig | None:
    """`changed`; None if `train` would refuse it, or a section is not used (`ema: null`)."""
    try:
        return changed(train, changes)
    except (ValidationError, TypeError):
        return None


def flags(changes: Changes) -> str:
    """Options below `train` as the command line takes them."""
    return " ".join(setting(f"train.{name}", value) for name, value in changes.items())
