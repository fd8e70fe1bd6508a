"""What a run's steps are made of, with the same decision about it on every process.

What: `Feed` yields each step's microbatches once every process has its part. If one process cannot read its part, or
too many samples stand in for unreadable ones, iteration ends on all of them before that step is begun, so that the
step before it can be saved; `settle` then raises the reason, in the same words everywhere.
Why before the step: a process without a batch cannot take part in the collectives of a step, and the others would hang
in them until the timeout; an update that is under way cannot be taken back.
Price: one reduction of three numbers over gloo per step; each process waits there for the slowest reader, as it would
in the step itself.
"""

from __future__ import annotations

import shlex
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from pipeline.config import Config
from pipeline.errors import RejectRateError
from pipeline.loader.loader import Batch, State
from pipeline.parallel.mesh import agree

WINDOW = 10_000
"""Samples over which the share of stand-ins is taken."""
LEAST = 200
"""The share is taken of so many at least, so that one bad sample at the start is no catastrophe."""
WARNED_AT = 0.2
"""A warning comes at this part of `train.max_quarantine_rate`."""

Steps = Iterator[tuple[list[Batch], State]]


class Interrupted(Exception):
    """A process that waits for its data was asked to stop."""


class Feed:
    """Iterate over it once, on every process.

    Args:
        steps: this process's microbatches and the state after them.
        replaced: how many samples of this process stood in for unreadable ones so far.
        say: prints one line, on the first process only.

    Attributes:
        broken: iteration ended because a process could not go on; the same on every process.
        share: of the last `WINDOW` samples, all processes together, those that stood in for unreadable ones.
    """

    def __init__(self, steps: Steps, replaced: Callable[[], int], config: Config, say: Callable[[str], None]):
        self._steps, self._replaced, self._say = steps, replaced, say
        self._most = config.train.max_quarantine_rate
        self._settings = shlex.quote(str(Path(config.train.output) / "config.yaml"))
        self.broken, self.share = False, 0.0
        self._error: Exception | None = None
        self._warned = False
        self._samples = 0
        self._counts = deque([(0, 0)])  # samples and stand-ins, after each step of the window
        # A process may wait for its data as long as the configuration says, and the others for it.
        timeout = timedelta(seconds=config.train.parallel.timeout_s + config.patience_s)
        self._group = dist.new_group(backend="gloo", timeout=timeout) if dist.get_world_size() > 1 else None

    def __iter__(self) -> Iterator[tuple[float, list[Batch], State]]:
        """(seconds that this process waited for its part, its microbatches, the state after them)."""
        while True:
            began, found = time.perf_counter(), None
            try:
                found = next(self._steps, None)
            except Exception as error:
                self._error = error
            waited = time.perf_counter() - began
            samples = 0 if found is None else sum(len(batch.sample_ids) for batch in found[0])
            failed, taken, replaced = self._sum(float(self._error is not None), samples, self._replaced())
            if failed or not self._bearable(int(taken), int(replaced)):
                self.broken = True
                return
            if found is None:
                return
            yield waited, *found

    def settle(self) -> None:
        """Raise, on every process, what broke the iteration on the first one that it broke on; nothing if all that
        happened is that the run was asked to stop while it waited."""
        agree(None if isinstance(self._error, Interrupted) else self._error)

    def _sum(self, *mine: float) -> list[float]:
        if self._group is None:
            return list(mine)
        numbers = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(numbers, group=self._group)
        return numbers.tolist()

    def _bearable(self, samples: int, replaced: int) -> bool:
        """Count a step. The same numbers and the same answer on every process."""
        self._samples += samples
        self._counts.append((self._samples, replaced))
        while len(self._counts) > 2 and self._samples - self._counts[1][0] >= WINDOW:
            self._counts.popleft()
        seen, bad = (last - first for last, first in zip(self._counts[-1], self._counts[0], strict=True))
        self.share = bad / max(seen, 1)
        allowed = self._most * max(seen, LEAST)
        what = f"{bad} of the last {seen} samples stood in for others whose records cannot be read"
        mend = f"sana-pipe verify --repair --config {self._settings}"
        if bad > WARNED_AT * allowed and not self._warned:
            self._warned = True
            self._say(f"warning: {what}; the run ends at {self._most:.1%} (train.max_quarantine_rate). Mend: {mend}")
        if bad > allowed:
            self._error = RejectRateError(
                what,
                expected=f"at most {self._most:.1%} (train.max_quarantine_rate)",
                found=f"{self.share:.1%}",
                fix=f"{mend}; or --set train.max_quarantine_rate=1",
            )
        return bad <= allowed
