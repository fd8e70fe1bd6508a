"""A trace of some steps (`train.profile`): what the host and the GPU did, and which memory was in use.

Into the run directory: a Chrome trace (for https://ui.perfetto.dev), and on a GPU a memory snapshot (for
https://pytorch.org/memory_viz). Price: traced steps are slower, and a trace takes some ten MB per step.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from pipeline.cache.disk import make_folder
from pipeline.config import ProfileConfig

_MEMORY_EVENTS = 200_000
"""Allocations that a memory snapshot remembers."""


class Profiler:
    """Traces the steps of this process that `config` names; none without one. folder: of the run."""

    def __init__(
        self,
        config: ProfileConfig | None,
        folder: Path,
        rank: int,
        device: torch.device,
        log: Callable[[str], None],
    ):
        self._config = config if config is not None and (rank == 0 or config.ranks == "all") else None
        self._folder, self._rank, self._device, self._log = folder / "profile", rank, device, log
        self._begun = self._step = 0
        self._profile: profile | None = None

    def begin_step(self, step: int) -> None:
        """Before optimizer step `step`. Ends a trace that is complete, begins a trace that is due."""
        if self._config is None:
            return
        self._begun += 1
        if self._begun == self._config.start + self._config.steps:
            self.close()
        self._step = step
        if self._begun == self._config.start:
            self._start()

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
        self._profile = profile(activities=activities, record_shapes=True, profile_memory=True)
        self._profile.start()

    def close(self) -> None:
        """End the trace, if one has begun, and write it, named by its last step. A failure is logged."""
        running, self._profile = self._profile, None
        if running is None:
            return
        name = f"step-{self._step:08d}-process-{self._rank}"
        try:
            running.stop()
            make_folder(self._folder)
            trace = self._folder / f"trace-{name}.json.gz"
            running.export_chrome_trace(str(trace))
            if self._device.type == "cuda":
                torch.cuda.memory._dump_snapshot(str(self._folder / f"memory-{name}.pickle"))
            self._log(f"profile: {trace}")
        except (OSError, RuntimeError) as error:
            self._log(f"note: the profile could not be written: {error}")
        finally:
            if self._device.type == "cuda":
                torch.cuda.memory._record_memory_history(enabled=None)
