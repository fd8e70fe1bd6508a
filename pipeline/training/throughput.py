"""Throughput of a run: losses, images, tokens, waiting time and model FLOPs between two logged rows.

What: `Throughput` counts on each process; `row` combines the counts of all processes, together with the memory peaks.
Price: one small gather per row.

Units: a token is an image token (a patch of the latent) or an unmasked caption row; padding does not count. MFU is
model FLOPs (`pipeline.models.sana_flops`: forward and backward pass, without recomputation) per second over the GPUs'
peak in the run's precision, without sparsity.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.config import TrainConfig
from pipeline.loader.loader import Batch
from pipeline.models.sana_config import SanaConfig
from pipeline.models.sana_flops import training_flops
from pipeline.parallel.mesh import Layout
from pipeline.training.memory import MemoryMonitor
from pipeline.training.step import Outcome

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
    """The data sheet's peak of a GPU, None for one that the table lacks.

    Args:
        name: as `torch.cuda.get_device_name` returns it.
        precision: `train.precision`.
    """
    known = [part for part in PEAK_TFLOPS if re.search(rf"\b{re.escape(part)}\b", name)]
    if not known:
        return None
    return PEAK_TFLOPS[max(known, key=len)][precision == "fp32"]


@dataclass
class _Window:
    """Counts of this process since the last row."""

    began: float = field(default_factory=lambda: time.perf_counter())
    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    samples: int = 0
    waited: float = 0.0
    padded: int = 0
    tokens: int = 0
    flops: int = 0
    forward_tokens: int = 0


class Throughput:
    """Counts of a run. Build it on every process.

    Args:
        log: prints one line, on the first process only.
    """

    def __init__(
        self,
        train: TrainConfig,
        architecture: SanaConfig,
        layout: Layout,
        device: torch.device,
        log: Callable[[str], None],
    ):
        self.train, self.architecture, self.layout, self.device = train, architecture, layout, device
        self.memory = MemoryMonitor(train, device, log)
        self.peak = train.peak_tflops
        if self.peak is None and device.type == "cuda":
            self.peak = peak_tflops(torch.cuda.get_device_name(device), train.precision)
        self._window = _Window()

    def add(self, outcome: Outcome, microbatches: list[Batch], waited: float) -> None:
        """Count one step. `waited`: seconds until its microbatches were there."""
        window = self._window
        window.losses.append(outcome.loss)
        if not outcome.skipped:
            window.norms.append(outcome.grad_norm)
        window.samples += outcome.samples
        window.waited += waited
        for batch in microbatches:
            samples, _, height, width = batch.latents.shape
            tokens = height * width // self.architecture.patch_size**2
            unmasked = int(batch.mask.sum())
            computed = unmasked if self.train.text == "packed" else batch.mask.numel()
            window.forward_tokens = max(window.forward_tokens, samples * tokens)
            window.padded += batch.mask.numel() - unmasked
            window.tokens += samples * tokens + unmasked
            window.flops += training_flops(self.architecture, samples, tokens, computed)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside (a checkpoint) does not count as time of the steps."""
        began = time.perf_counter()
        yield
        self._window.began += time.perf_counter() - began

    def row(self, replaced: int) -> dict[str, Any]:
        """The counts since the last row over all processes, equal on all of them; starts a new window. Collective.

        Args:
            replaced: this process's samples since the start that are substitutes for unreadable ones.
        """
        window = self._window
        loss, norm = _mean(window.losses), _mean(window.norms) if window.norms else None
        elapsed = time.perf_counter() - window.began
        counts = [window.padded, replaced, window.tokens, window.flops, window.waited / elapsed]
        columns = all_gather_numbers([*counts, *self.memory.peaks()], self.device)
        padded, replaced_in_all, tokens, flops = (sum(c) / self.layout.model_parallel_size for c in columns[:4])
        self._window = _Window()
        capacity = None if self.peak is None else self.peak * 1e12 * self.layout.world
        return {
            "loss": loss,
            "grad_norm": norm,
            "images_per_s": window.samples / elapsed,
            "tokens_per_s": tokens / elapsed,
            "model_tflops": flops / elapsed / 1e12,
            "mfu": None if capacity is None else flops / elapsed / capacity,
            "data_wait": max(columns[4]),
            "forward_tokens": window.forward_tokens,
            "padded_tokens": round(padded),
            "quarantined": round(replaced_in_all),
            **self.memory.row(*columns[5:]),
        }


def all_gather_numbers(numbers: list[float], device: torch.device) -> list[list[float]]:
    """Each number of each process: by number, then by rank."""
    local = torch.tensor(numbers, dtype=torch.float64, device=device)
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, local)
    return torch.stack(gathered, dim=1).tolist()


def _mean(scalars: list[Tensor]) -> float:
    return float(torch.stack(scalars).double().mean())
