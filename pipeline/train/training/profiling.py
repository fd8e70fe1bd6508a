"""A trace of some steps (`train.profile`): what the host and the GPU did, and which memory was in use.

Into the run directory: a Chrome trace (for https://ui.perfetto.dev), and on a GPU a memory snapshot (for
https://pytorch.org/memory_viz). Price: traced steps are slower, and a trace takes some ten MB per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from sana_pipe.base.disk import make_folder

_MEMORY_EVENTS = 200_000
"""The newest allocations that a memory snapshot remembers."""


@contextmanager
def tracing(
    traced: str | None, folder: Path, rank: int, device: torch.device, log: Callable[[str], None]
) -> Iterator[Callable[[int], None]]:
    """Trace steps on the first process. A trace is named by its last step, and a failure to write it is logged. Yields
    what is to be called with the number of each optimizer step when it is done.

    Args:
        traced: `train.profile`, steps of this attempt such as 10-12; None: none.
        folder: of the run.
    """
    if traced is None or rank:
        yield lambda step: None
        return
    numbers = [int(number) for number in traced.split("-")]
    first, on_gpu, last = numbers[0], device.type == "cuda", 0

    def write(trace: profile) -> None:
        name = f"step-{last:08d}-process-{rank}"
        path = folder / "profile" / f"trace-{name}.json.gz"
        try:
            make_folder(path.parent)
            trace.export_chrome_trace(str(path))
            if on_gpu:
                torch.cuda.memory._dump_snapshot(str(path.with_name(f"memory-{name}.pickle")))
            log(f"profile: {path}")
        except (OSError, RuntimeError) as error:
            log(f"note: the profile could not be written: {error}")
        if on_gpu:
            torch.cuda.memory._record_memory_history(enabled=None)

    def done(step: int) -> None:
        nonlocal last
        last = step
        if on_gpu and running.step_num == first - 2:  # the next step is the first that is traced
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
        running.step()

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    steps = schedule(skip_first=first - 2, wait=0, warmup=1, active=numbers[-1] - first + 1, repeat=1)
    with profile(
        activities=activities, schedule=steps, on_trace_ready=write, record_shapes=True, profile_memory=True
    ) as running:
        yield done
