"""What a run uses: time, memory, arithmetic; and what to change before memory runs out.

What: `Watch` counts between two rows and puts the counts of all processes together; `relief` lists the settings that
would still lower the memory, cheapest first; `memory_errors` makes an error for people of a failed allocation.
Why maxima with their process: one process that runs full ends the run for all of them, and the mean would hide it.
Why each setting is tried on the configuration: advice that the configuration then refuses is worse than none.
Price: one small gather per row; the peaks are reset with each row, so nobody else may rely on them.

Units: GiB are 2^30 bytes. A token is an image token (a patch of the latent) or a caption row that the mask shows;
padding does not count. MFU is model FLOPs (`pipeline.models.sana_flops`: forward and backward pass, nothing that is
computed a second time) per second over the GPUs' peak in the run's precision, without sparsity.
"""

from __future__ import annotations

import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor

from pipeline.config import TrainConfig
from pipeline.errors import UserError
from pipeline.loader.loader import Batch
from pipeline.models.sana_config import SanaConfig
from pipeline.models.sana_flops import training_flops
from pipeline.parallel.mesh import Layout
from pipeline.training.step import Outcome

FULL = 0.92
"""Share of a GPU's memory from which on a run is warned: the allocator's rounding and other shapes need the rest."""

PEAK_TFLOPS: dict[str, tuple[float, float]] = {
    "B200": (2250.0, 75.0),
    "H200 NVL": (835.0, 60.0),
    "H200": (989.0, 67.0),
    "H100 NVL": (835.0, 60.0),
    "H100 PCIe": (756.0, 51.0),
    "H100": (989.0, 67.0),
    "H20": (148.0, 44.0),
    "A100": (312.0, 19.5),
    "A800": (312.0, 19.5),
    "A30": (165.0, 10.3),
    "A40": (149.7, 37.4),
    "A10": (125.0, 31.2),
    "L40S": (362.0, 91.6),
    "L40": (181.0, 90.5),
    "L4": (121.0, 30.3),
    "RTX 6000 Ada": (364.2, 91.1),
    "RTX A6000": (154.8, 38.7),
    "RTX A5000": (111.1, 27.8),
    "RTX 5090": (209.5, 104.8),
    "RTX 4090": (165.2, 82.6),
    "RTX 4080": (97.5, 48.7),
    "RTX 3090 Ti": (80.0, 40.0),
    "RTX 3090": (71.0, 35.6),
}
"""By a part of torch's device name: dense 10^12 operations per second, (16 bit with fp32 accumulation, fp32 without
TF32). NVIDIA's data sheets and architecture whitepapers."""


def peak_tflops(name: str, precision: str) -> float | None:
    """The data sheet's peak of a GPU, None where this table does not know it.

    Args:
        name: as `torch.cuda.get_device_name` gives it.
        precision: `train.precision`.
    """
    known = [part for part in PEAK_TFLOPS if re.search(rf"\b{re.escape(part)}\b", name)]
    if not known:
        return None
    return PEAK_TFLOPS[max(known, key=len)][precision == "fp32"]


@dataclass
class _Window:
    """What happened on this process since the last row."""

    began: float = field(default_factory=time.perf_counter)
    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    samples: int = 0
    waited: float = 0.0
    padded: int = 0
    tokens: int = 0
    flops: int = 0


class Watch:
    """Counts of a run, on one process. Build it on every process.

    Args:
        say: prints one line, on the first process only.
    """

    def __init__(
        self,
        train: TrainConfig,
        architecture: SanaConfig,
        layout: Layout,
        device: torch.device,
        say: Callable[[str], None],
    ):
        self.train, self.architecture, self.layout, self.device, self._say = train, architecture, layout, device, say
        self.on_gpu = device.type == "cuda"
        self.peak = train.peak_tflops
        if self.peak is None and self.on_gpu:
            self.peak = peak_tflops(torch.cuda.get_device_name(device), train.precision)
        self._warned = False
        self._begin()

    def add(self, outcome: Outcome, microbatches: list[Batch], waited: float) -> None:
        """Count one step. `waited`: seconds until its microbatches were there."""
        now = self._window
        now.losses.append(outcome.loss)
        if not outcome.skipped:
            now.norms.append(outcome.grad_norm)
        now.samples += outcome.samples
        now.waited += waited
        for batch in microbatches:
            samples, _, height, width = batch.latents.shape
            tokens = height * width // self.architecture.patch_size**2
            shown = int(batch.mask.sum())
            computed = shown if self.train.packed_attention else batch.mask.numel()
            now.padded += batch.mask.numel() - shown
            now.tokens += samples * tokens + shown
            now.flops += training_flops(self.architecture, samples, tokens, computed)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is done inside (a checkpoint) is no time of the steps."""
        began = time.perf_counter()
        yield
        self._window.began += time.perf_counter() - began

    def values(self, replaced: int) -> dict[str, Any]:
        """The counts since the last row over all processes, the same on all of them; begins anew. Every process calls.

        Warns, once, of a GPU that is nearly full.

        Args:
            replaced: samples that stood in for unreadable ones on this process since the start.
        """
        now = self._window
        loss, norm = _mean(now.losses), _mean(now.norms) if now.norms else None
        elapsed = time.perf_counter() - now.began
        mine = [now.padded, replaced, now.tokens, now.flops, now.waited / elapsed, rss(), *self._gpu()]
        counts, (waited, host, allocated, reserved, share) = _split(_everyone(mine, self.device), 4)
        padded, replaced_in_all, tokens, flops = (sum(column) / self.layout.copies for column in counts)
        self._warn(share, reserved)
        self._begin()
        capacity = None if self.peak is None else self.peak * 1e12 * self.layout.world
        return {
            "loss": loss,
            "grad_norm": norm,
            "images_per_s": now.samples / elapsed,
            "tokens_per_s": tokens / elapsed,
            "mfu": None if capacity is None else flops / elapsed / capacity,
            "data_wait": max(waited),
            "padded_tokens": round(padded),
            "quarantined": round(replaced_in_all),
            **_worst("memory", allocated if self.on_gpu else None),
            **_worst("reserved", reserved if self.on_gpu else None),
            **_worst("rss", host),
        }

    def _begin(self) -> None:
        self._window = _Window()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)

    def _gpu(self) -> tuple[float, float, float]:
        """Peak bytes allocated and reserved, and the share of the GPU that is reserved."""
        if not self.on_gpu:
            return 0.0, 0.0, 0.0
        reserved = torch.cuda.max_memory_reserved(self.device)
        total = torch.cuda.get_device_properties(self.device).total_memory
        return torch.cuda.max_memory_allocated(self.device), reserved, reserved / total

    def _warn(self, share: list[float], reserved: list[float]) -> None:
        worst = max(share)
        if self._warned or worst <= FULL:
            return
        self._warned = True
        rank = share.index(worst)
        self._say(
            f"warning: the GPU of process {rank} is nearly full: {reserved[rank] / 2**30:.1f} GiB, {100 * worst:.0f} % "
            "of it, are reserved. What would lower that, cheapest first:\n  " + "\n  ".join(relief(self.train))
        )


def _everyone(mine: list[float], device: torch.device) -> list[list[float]]:
    """Each number of each process: by number, then by rank."""
    own = torch.tensor(mine, dtype=torch.float64, device=device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return torch.stack(found, dim=1).tolist()


def _mean(found: list[Tensor]) -> float:
    return float(torch.stack(found).double().mean())


def _split(columns: list[list[float]], at: int) -> tuple[list[list[float]], list[list[float]]]:
    return columns[:at], columns[at:]


def _worst(name: str, values: list[float] | None) -> dict[str, Any]:
    if values is None:
        return {f"{name}_gib": None, f"{name}_rank": None}
    return {f"{name}_gib": max(values) / 2**30, f"{name}_rank": values.index(max(values))}


def rss() -> int:
    """Bytes of main memory that this process has occupied at most since it began."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


# --------------------------------------------------------------------------------------------------------- relief

_WAYS: tuple[tuple[Callable[[TrainConfig], dict[str, Any]], str], ...] = (
    (
        lambda train: {"activation_checkpointing": "selective"} if train.activation_checkpointing == "none" else {},
        "a quarter of what blocks keep; about an eighth slower",
    ),
    (lambda train: {"activation_checkpointing": "full"}, "each block is computed once more: about a third slower"),
    (
        lambda train: {} if train.optim.in_backward else {"microbatch": max(1, train.microbatch // 2)},
        "the same batch in more parts; less parallel work",
    ),
    (lambda train: {"optim.name": "adamw8bit"}, "2 instead of 8 bytes of optimizer state per parameter"),
    (
        lambda train: {"optim.name": "came", "optim.betas": None, "optim.eps": None},
        "4 instead of 8 bytes per parameter; another optimizer: look at lr and weight_decay",
    ),
    (lambda train: {"ema.device": "cpu"}, "the average in host memory; a copy per update"),
    (lambda train: {"parallel.dp_replicate": 1, "parallel.dp_shard": -1}, "shards instead of copies; more traffic"),
    (lambda train: {"parallel.reshard_after_forward": True}, "one more gather per block"),
    (lambda train: {"precision": "bf16"}, "half the activations; rounds"),
    (lambda train: {"activation_offload": True}, "what blocks keep waits in host memory; slower"),
    (lambda train: {"parallel.offload": "all"}, "parameters and optimizer in host memory; much slower"),
)
_LIGHT = ("adamw8bit", "came")


def relief(train: TrainConfig) -> list[str]:
    """Settings that would lower the memory of this configuration and that it allows, as `--set` lines, cheapest first.

    What is set already is left out, and what this configuration would refuse.
    """
    lines = [f"{_flags(way(train))}   ({price})" for way, price in _WAYS if _helps(train, way(train))]
    return lines or ["more processes (train.parallel.dp_shard), or a GPU with more memory"]


def _flags(changes: dict[str, Any]) -> str:
    words = {None: "null", True: "true"}
    return " ".join(
        f"--set train.{key}={words[v] if v is None or isinstance(v, bool) else v}" for key, v in changes.items()
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
        if key in _pointless(train):
            return False
        node[name] = value
    if tree == before:
        return False
    try:
        TrainConfig.model_validate(tree)
    except ValidationError:
        return False
    return True


def _pointless(train: TrainConfig) -> set[str]:
    """Settings whose change would lower nothing here, or that the start of the run would refuse."""
    reasons = {
        "microbatch": train.optim.in_backward,
        "optim.name": train.optim.name in _LIGHT,
        "parallel.dp_replicate": train.parallel.dp_replicate == 1,
        "parallel.reshard_after_forward": train.parallel.reshards,
        "precision": train.precision != "fp32",
    }
    return {key for key, holds in reasons.items() if holds}


class OutOfMemory(UserError):
    """An allocation failed."""


@contextmanager
def memory_errors(train: TrainConfig) -> Iterator[None]:
    """A failed allocation inside, on a GPU or in main memory, becomes an error for people.

    Raises:
        OutOfMemory: with the settings that would lower the memory.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_memory(error):
            raise
        raise OutOfMemory(
            "there is not enough memory for this configuration",
            found=str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__,
            fix="one or more of these, cheapest first:\n    " + "\n    ".join(relief(train)),
        ) from None


def _is_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return re.search("out of memory|can't allocate memory", str(error)) is not None
