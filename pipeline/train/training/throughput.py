"""Throughput of a run: losses, images, tokens, waiting time and model FLOPs between two logged rows.

A token is an image token (a patch of the latent) or an unmasked caption row; padding does not count. MFU is
model FLOPs (`ModelSpec.training_flops`: forward and backward pass, without recomputation) per second over the GPUs'
peak in the run's precision, without sparsity.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sana_pipe.base import counters, gpus
from sana_pipe.base.metrics.textfile import store_counts
from sana_pipe.data.loader.loader import Batch
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.spec import ModelSpec
from sana_pipe.train.parallel.collectives import all_gather_objects
from sana_pipe.train.parallel.mesh import Layout
from sana_pipe.train.training.memory import MemoryMonitor
from sana_pipe.train.training.step import Outcome


@dataclass
class _Window:
    """Counts of this process since the last row."""

    began: float = field(default_factory=lambda: time.perf_counter())
    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    parts: list[Mapping[str, Tensor]] = field(default_factory=list)
    samples: int = 0
    waited: float = 0.0
    padded: int = 0
    tokens: int = 0
    flops: int = 0
    forward_tokens: int = 0


class Throughput:
    """Counts of a run. Build it on every process.

    Attributes:
        of_process: what this process has counted since it began, as in rows, which have the sums.
    """

    def __init__(
        self,
        train: TrainConfig,
        architecture: ModelSpec,
        layout: Layout,
        device: torch.device,
        log: Callable[[str], None],
    ):
        self.train, self.architecture, self.layout, self.device = train, architecture, layout, device
        self.memory = MemoryMonitor(train, device, log)
        self.peak: float | None = None
        if device.type == "cuda" and (card := gpus.of_device(device)) is not None:
            self.peak = card.tflops(train.precision)
        self._window = _Window()
        self._read_before = counters.totals()["read_bytes"]
        self._samples, self._waited = 0, 0.0
        self.of_process: dict[str, float] = {}

    def add(self, outcome: Outcome, microbatches: list[Batch], waited: float) -> None:
        """Count one step. `waited`: seconds until its microbatches were there."""
        window = self._window
        window.losses.append(outcome.loss)
        window.parts.append(outcome.parts)
        if not outcome.skipped:
            window.norms.append(outcome.grad_norm)
        window.samples += outcome.samples
        window.waited += waited
        self._samples += outcome.samples
        self._waited += waited
        for batch in microbatches:
            samples, _, height, width = batch.latents.shape
            tokens = self.architecture.tokens(height, width)
            unmasked = int(batch.mask.sum())
            computed = unmasked if self.train.text == "packed" else batch.mask.numel()
            window.forward_tokens = max(window.forward_tokens, samples * tokens)
            window.padded += batch.mask.numel() - unmasked
            window.tokens += samples * tokens + unmasked
            window.flops += self.architecture.training_flops(samples, tokens, computed)

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
        loss, norm = mean_of(window.losses), mean_of(window.norms) if window.norms else None
        elapsed = time.perf_counter() - window.began
        counts = [window.padded, replaced, window.tokens, window.flops, window.waited / elapsed]
        read = counters.totals()["read_bytes"] - self._read_before
        self.of_process = {"bytes": read, "data_wait_s": self._waited, **store_counts()}
        numbers = [*counts, *self.memory.peaks(), *self.of_process.values()]
        columns = list(map(list, zip(*all_gather_objects(numbers), strict=True)))  # by number, then by rank
        padded, replaced_in_all, tokens, flops = (sum(c) / self.layout.model_parallel_size for c in columns[:4])
        self._window = _Window()
        capacity = None if self.peak is None else self.peak * 1e12 * self.layout.world
        return {
            "loss": loss,
            **({"parts": parts} if (parts := _means(window.parts)) else {}),
            "grad_norm": norm,
            "images_per_s": window.samples / elapsed,
            "tokens_per_s": tokens / elapsed,
            "model_tflops": flops / elapsed / 1e12,
            "mfu": None if capacity is None else flops / elapsed / capacity,
            "data_wait": max(columns[4]),
            "forward_tokens": window.forward_tokens,
            "padded_tokens": round(padded),
            "quarantined": round(replaced_in_all),
            "samples": self._samples,
            **self.memory.row(*columns[5:10]),
            **dict(zip(self.of_process, map(sum, columns[10:]), strict=True)),
        }


def _means(parts: list[Mapping[str, Tensor]]) -> dict[str, float]:
    return {name: mean_of([each[name] for each in parts]) for name in parts[0]}


def mean_of(scalars: list[Tensor]) -> float:
    return float(torch.stack(scalars).double().mean())
