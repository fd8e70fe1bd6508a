"""Feed a run with microbatches; all processes decide alike whether the next step takes place.

`Feed` yields each step's microbatches once every process has its share. If one cannot read it, or too many samples
are substitutes, iteration ends on all processes before that step, since a process without a batch cannot join
a step's collectives and a begun update cannot be undone. So the last step can be saved; `raise_failure` then raises the
reason, with the same message everywhere.
Price: one gloo reduction of three numbers per step.
"""

from __future__ import annotations

import shlex
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from sana_pipe.base.errors import RejectRateError
from sana_pipe.data.loader.loader import Batch
from sana_pipe.train.parallel.collectives import raise_first_error
from sana_pipe.train.parallel.mesh import wait

WINDOW = 10_000
"""Samples over which the share of substitutes is taken."""
MIN_SAMPLES = 200
"""The share is taken of at least this many samples, so that one bad sample at the start does not end the run."""
MOST = 0.05
"""The run ends if more than this share of the samples are substitutes."""
WARN_AT = 0.2
"""A warning is printed at this share of `MOST`."""

Mark = TypeVar("Mark")


class Interrupted(Exception):
    """A process that waits for its data was asked to stop."""


class Feed(Generic[Mark]):
    """Iterate over it once, on every process.

    Args:
        steps: this process's microbatches and the state after them (or another mark).
        replaced: number of this process's samples so far that are substitutes for unreadable ones.
        folder: the run directory.
        patience_s: how long storage is waited for.
        log: prints one line, on the first process only.
        group: of an earlier feed, to be used again.

    Attributes:
        broken: iteration ended because a process could not go on; the same on every process.
        share: substitutes among the last `WINDOW` samples of all processes, 0 to 1.
    """

    def __init__(
        self,
        steps: Iterator[tuple[list[Batch], Mark]],
        replaced: Callable[[], int],
        folder: Path,
        patience_s: float,
        log: Callable[[str], None],
        group: dist.ProcessGroup | None = None,
    ):
        self._steps, self._replaced, self._log = steps, replaced, log
        self._config_path = shlex.quote(str(folder / "config.yaml"))
        self.broken, self.share = False, 0.0
        self._error: Exception | None = None
        self._warned = False
        self._samples = 0
        self._counts = deque([(0, 0)])  # samples and substitutes since the start, after each step of the window
        timeout = wait(2 * patience_s)  # a process may wait for several reads of a step
        self.group = group
        if group is None and dist.get_world_size() > 1:
            self.group = dist.new_group(backend="gloo", timeout=timeout)

    def __iter__(self) -> Iterator[tuple[float, list[Batch], Mark]]:
        """(seconds that this process waited for its share, its microbatches, the state after them)."""
        while True:
            began, share = time.perf_counter(), None
            try:
                share = next(self._steps, None)
            except Exception as error:
                self._error = error
            waited = time.perf_counter() - began
            samples = 0 if share is None else sum(len(batch.sample_ids) for batch in share[0])
            failed, read, replaced = self._sum(float(self._error is not None), samples, self._replaced())
            if failed or not self.within_limit(int(read), int(replaced)):
                self.broken = True
                return
            if share is None:
                return
            yield waited, *share

    def raise_failure(self) -> None:
        """Raise, on every process, the first error in rank order that ended the iteration; nothing if the run was only
        asked to stop while it waited."""
        raise_first_error(None if isinstance(self._error, Interrupted) else self._error)

    def _sum(self, *numbers: float) -> list[float]:
        """The numbers summed over all processes."""
        if self.group is None:
            return list(numbers)
        sums = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(sums, group=self.group)
        return sums.tolist()

    def within_limit(self, samples: int, replaced: int) -> bool:
        """Count a step. Same on every process. samples: of this step. replaced: since the start."""
        self._samples += samples
        self._counts.append((self._samples, replaced))
        while len(self._counts) > 2 and self._samples - self._counts[1][0] >= WINDOW:
            self._counts.popleft()
        in_window, bad = (last - first for last, first in zip(self._counts[-1], self._counts[0], strict=True))
        self.share = bad / max(in_window, 1)
        allowed = MOST * max(in_window, MIN_SAMPLES)
        what = f"{bad} of the last {in_window} samples are substitutes for samples with unreadable records"
        repair = f"sana-pipe verify --repair --config {self._config_path}"
        if bad > WARN_AT * allowed and not self._warned:
            self._warned = True
            self._log(f"warning: {what}; the run ends at {MOST:.1%}. Fix: {repair}")
        if bad > allowed:
            self._error = RejectRateError(
                what,
                expected=f"at most {MOST:.1%}",
                found=f"{self.share:.1%}",
                fix=repair,
            )
        return bad <= allowed
