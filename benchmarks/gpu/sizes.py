"""What a row measures with: released sizes on a GPU, or tiny ones on the CPU for a dry run."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.report import resident
from sana_pipe.train.models.sana_config import SanaConfig

GIB = 2**30
_TINY = SanaConfig(
    in_channels=16,
    out_channels=16,
    num_layers=1,
    num_attention_heads=4,
    attention_head_dim=16,
    num_cross_attention_heads=2,
    cross_attention_head_dim=32,
    cross_attention_dim=64,
    caption_channels=64,
    sample_size=8,
)


@dataclass(frozen=True)
class Sizes:
    """Of a row.

    Attributes:
        config: the transformer. compression: pixels per latent side. side: of the latents. rows: of a padded caption.
        warm, timed: steps before the clock runs, and steps that it counts.
        graphs: a dry run traces the graphs of rows that compile (seconds each), but compiles none.
    """

    dry: bool
    device: torch.device
    config: SanaConfig
    compression: int
    side: int
    rows: int
    warm: int
    timed: int
    graphs: bool = False

    @classmethod
    def of(cls, dry: bool) -> Sizes:
        if dry:
            return cls(True, torch.device("cpu"), _TINY, 8, 8, 12, 1, 1)
        return cls(False, torch.device("cuda", 0), SanaConfig(), 32, 32, 300, 3, 10)

    def count(self, number: int, least: int = 2) -> int:
        """This many; few in a dry run."""
        return min(number, least) if self.dry else number

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, call: Callable[[], object], times: int | None = None) -> float:
        """Mean of `times` calls (the row's `timed`), the device's work included."""
        times = times or self.timed
        self.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            call()
        self.synchronize()
        return (time.perf_counter() - began) / times

    def after_warming(self, call: Callable[[], object], warm: int | None = None, times: int | None = None) -> float:
        """`seconds` after the row's `warm` calls, with memory peaks counted from then on."""
        for _ in range(warm or self.warm):
            call()
        self.synchronize()
        self.reset_peak()
        return self.seconds(call, times)

    def reset_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def memory(self) -> dict[str, float]:
        """Peaks in GiB; in a dry run, of the process's resident memory."""
        if self.device.type != "cuda":
            return dict.fromkeys(("peak_gib", "reserved_gib"), resident("VmHWM") / GIB)
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return {"peak_gib": allocated / GIB, "reserved_gib": reserved / GIB}

    def free(self) -> None:
        """Give cached memory back, so that a next variant in the same process starts with all of it."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def cap(self, gib: float | None) -> None:
        """Limit what this process may allocate."""
        if gib is not None and self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, gib * GIB / total), self.device)
