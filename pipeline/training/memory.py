"""Memory of a run: peaks per process, a warning before a GPU is full, advice when an allocation fails.

What: `MemoryMonitor` measures peaks between two logged rows; `memory_advice` lists the settings that would still lower
the memory, cheapest first; `memory_errors` adds them to a failed allocation.
Why the maximum and its process: one process that runs full ends the run for all of them, and the mean would hide it.
Why each setting is tried on the configuration: advice that the configuration then refuses is worse than none.
Price: torch's peak counters are reset with each row, so no other code may rely on them.

GiB are 2^30 bytes.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError

from pipeline.config import TrainConfig
from pipeline.errors import ResourceError, is_out_of_memory
from pipeline.parallel.mesh import check_sizes

NEARLY_FULL = 0.92
"""Reserved share of a GPU's memory that triggers a warning: the allocator's rounding and other shapes need the rest."""


class MemoryMonitor:
    """Peaks of this process between two rows.

    Args:
        log: prints one line, on the first process only.
    """

    def __init__(self, train: TrainConfig, device: torch.device, log: Callable[[str], None]):
        self.train, self.device, self._log = train, device, log
        self._warned = False
        self.peaks()

    def peaks(self) -> tuple[float, float, float, float]:
        """Peak bytes since the last call: of main memory (since the process began), allocated and reserved on the GPU,
        and the share of the GPU that is reserved; the last three are 0 on the CPU."""
        allocated, reserved, share = gpu_peaks(self.device) if self.device.type == "cuda" else (0.0, 0.0, 0.0)
        return peak_rss(), allocated, reserved, share

    def row(
        self, rss: list[float], allocated: list[float], reserved: list[float], share: list[float]
    ) -> dict[str, Any]:
        """The largest peaks and their processes, from `peaks` of all processes by rank. Warns once of a GPU that is
        nearly full."""
        fullest = share.index(max(share))
        if not self._warned and share[fullest] > NEARLY_FULL:
            self._warned = True
            self._log(
                f"warning: the GPU of process {fullest} is nearly full: {reserved[fullest] / 2**30:.1f} GiB, "
                f"{100 * share[fullest]:.0f} % of it, are reserved. What would lower that, cheapest first:\n  "
                + "\n  ".join(memory_advice(self.train))
            )
        on_gpu = self.device.type == "cuda"
        return {
            **_largest("memory", allocated if on_gpu else None),
            **_largest("reserved", reserved if on_gpu else None),
            **_largest("rss", rss),
        }


def gpu_peaks(device: torch.device) -> tuple[float, float, float]:
    """Peak bytes allocated and reserved since the last call, and the reserved share of the GPU."""
    reserved = torch.cuda.max_memory_reserved(device)
    allocated = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return allocated, reserved, reserved / torch.cuda.get_device_properties(device).total_memory


def peak_rss() -> int:
    """Peak of this process's resident main memory since it began, bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _largest(name: str, values: list[float] | None) -> dict[str, Any]:
    if values is None:
        return {f"{name}_gib": None, f"{name}_rank": None}
    return {f"{name}_gib": max(values) / 2**30, f"{name}_rank": values.index(max(values))}


# --------------------------------------------------------------------------------------------------------- advice


def _uncompiled(train: TrainConfig) -> dict[str, Any]:
    return {"compile": "none"} if train.compile == "block" else {}


OPTIONS: tuple[tuple[Callable[[TrainConfig], dict[str, Any]], str], ...] = (
    (
        lambda train: {"activation_checkpointing": "selective"} if train.activation_checkpointing == "none" else {},
        "a quarter of the blocks' saved tensors; about an eighth slower",
    ),
    (lambda train: {"activation_checkpointing": "full"}, "each block is computed once more: about a third slower"),
    (
        lambda train: {} if train.optim.in_backward else {"microbatch": max(1, train.microbatch // 2)},
        "the same batch in more and smaller microbatches; slower, since the GPU has less to do at a time",
    ),
    (
        lambda train: {"optim.in_backward": True, "optim.clip": None},
        "each gradient is freed once used; no clipping, and a process's part of a batch must be one microbatch",
    ),
    (lambda train: {"optim.name": "adamw8bit"}, "2 instead of 8 bytes of optimizer state per parameter"),
    (
        lambda train: {"optim.name": "came", "optim.betas": None, "optim.eps": None},
        "4 instead of 8 bytes per parameter; another optimizer: look at lr and weight_decay",
    ),
    (lambda train: {"ema.device": "cpu", "ema.every": 10}, "EMA in host memory; one copy of the weights per update"),
    (lambda train: {"parallel.dp_replicate": 1, "parallel.dp_shard": -1}, "shards instead of replicas; more traffic"),
    (lambda train: {"parallel.reshard_after_forward": True}, "more gathers of each block"),
    (lambda train: {"precision": "bf16"}, "half the activations; rounds"),
    (
        lambda train: {"activation_compression": "int8", **_uncompiled(train)},
        "saved tensors in half the bytes or less; rounds the gradients",
    ),
    (lambda train: {"parallel.offload": "all"}, "parameters and optimizer in host memory; much slower"),
)
_SMALL_STATE = ("adamw8bit", "came")


def memory_advice(train: TrainConfig) -> list[str]:
    """Settings that would lower the memory of this configuration, as `--set` lines, cheapest first. Left out are those
    in force already and those that the configuration would refuse."""
    changes = [(change(train), price) for change, price in OPTIONS]
    lines = [f"{_flags(change)}   ({price})" for change, price in changes if _helps(train, change)]
    return lines or ["more processes (train.parallel.dp_shard), or a GPU with more memory"]


def _flags(changes: dict[str, Any]) -> str:
    yaml = {None: "null", True: "true"}
    return " ".join(
        f"--set train.{key}={yaml[v] if v is None or isinstance(v, bool) else v}" for key, v in changes.items()
    )


def _helps(train: TrainConfig, changes: dict[str, Any]) -> bool:
    tree = train.model_dump()
    before = train.model_dump()
    for key, value in changes.items():
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.get(section) or {}
        if name not in node:
            return False  # a section that is not used
        if key in _without_effect(train):
            return False
        node[name] = value
    if tree == before:
        return False
    try:
        TrainConfig.model_validate(tree)
    except ValidationError:
        return False
    return True


def _without_effect(train: TrainConfig) -> set[str]:
    """Settings whose change would not lower the memory, or that the start of the run would refuse."""
    reasons = {
        "optim.name": train.optim.name in _SMALL_STATE,
        "parallel.dp_replicate": train.parallel.dp_replicate == 1,
        "parallel.reshard_after_forward": train.parallel.reshards(sharing_processes(train))
        or (train.precision == "fp32" and sharing_processes(train) == 1),
        "precision": train.precision != "fp32",
        "activation_compression": train.activation_compression != "none",
    }
    return {key for key, applies in reasons.items() if applies}


def sharing_processes(train: TrainConfig) -> int:
    """Processes that share the parameters of a replica."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    return check_sizes(train.parallel, world).dp_shard if world > 1 else 1


class OutOfMemory(ResourceError):
    """An allocation failed."""


@contextmanager
def memory_errors(train: TrainConfig) -> Iterator[None]:
    """Turn a failed allocation inside, on a GPU or in main memory, into a UserError.

    Raises:
        OutOfMemory: with the settings that would lower the memory.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(
            "there is not enough memory for this configuration",
            found=str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__,
            fix="one or more of these, cheapest first:\n    " + "\n    ".join(memory_advice(train)),
        ) from None
