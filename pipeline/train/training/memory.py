"""Memory of a run: peaks per process, a warning before a GPU is full, advice when an allocation fails.

Why the maximum and its process: one process that runs full ends the run for all of them, and the mean would hide it.
Price: torch's peak counters are reset with each row, so no other code may rely on them. GiB are 2^30 bytes.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sana_pipe.base.errors import ResourceError, is_out_of_memory
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.training.remedies import memory_advice

NEARLY_FULL = 0.92
"""Reserved share of a GPU's memory that triggers a warning: the allocator's rounding and other shapes need the rest."""


class MemoryMonitor:
    """Peaks of this process between two rows."""

    def __init__(self, train: TrainConfig, device: torch.device, log: Callable[[str], None]):
        self.train, self.device, self._log = train, device, log
        self._warned, self._retries = False, 0
        self.peaks()

    def peaks(self) -> tuple[float, float, float, float, float]:
        """Peak bytes since the last call: of main memory (since the process began), allocated and reserved on the GPU,
        the share of the GPU that is reserved, and how often the allocator gave memory back to the GPU and tried again;
        the last four are 0 on the CPU."""
        if self.device.type != "cuda":
            return peak_rss(), 0, 0, 0, 0
        allocated = torch.cuda.max_memory_allocated(self.device)
        reserved = torch.cuda.max_memory_reserved(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before, self._retries = self._retries, torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0)
        share = reserved / torch.cuda.get_device_properties(self.device).total_memory
        return peak_rss(), allocated, reserved, share, self._retries - before

    def row(
        self,
        rss: list[float],
        allocated: list[float],
        reserved: list[float],
        share: list[float],
        retries: list[float],
    ) -> dict[str, Any]:
        """The largest peaks and their processes, from `peaks` of all processes by rank. Warns once of a GPU that is
        nearly full, or whose allocator had to try again: each time the GPU stands still, and other programs on it may
        be the cause."""
        most = share if not any(retries) else retries
        fullest = most.index(max(most))
        if not self._warned and (share[fullest] > NEARLY_FULL or retries[fullest]):
            self._warned = True
            again = f"; {retries[fullest]:.0f} times the allocator had to wait for the GPU and free its cached memory"
            self._log(
                f"warning: the GPU of process {fullest} is nearly full: {reserved[fullest] / 2**30:.1f} GiB, "
                f"{100 * share[fullest]:.0f} % of it, are reserved{again if retries[fullest] else ''}. What would "
                "lower that, cheapest first:\n  " + "\n  ".join(memory_advice(self.train))
            )
        on_gpu = self.device.type == "cuda"
        return {
            **_largest("memory", allocated if on_gpu else None),
            **_largest("reserved", reserved if on_gpu else None),
            **_largest("rss", rss),
            "alloc_retries": round(max(retries)) if on_gpu else None,
        }


def peak_rss() -> int:
    """Peak of this process's resident main memory since it began, bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _largest(name: str, values: list[float] | None) -> dict[str, Any]:
    if values is None:
        return {f"{name}_gib": None, f"{name}_rank": None}
    return {f"{name}_gib": max(values) / 2**30, f"{name}_rank": values.index(max(values))}


@contextmanager
def memory_errors(train: TrainConfig) -> Iterator[None]:
    """Turn a failed allocation inside, on a GPU or in main memory, into ResourceError with advice."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ResourceError(
            "there is not enough memory for this configuration",
            found=str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__,
            fix="one or more of these, cheapest first:\n    " + "\n    ".join(memory_advice(train)),
        ) from None
