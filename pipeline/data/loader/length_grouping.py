"""Length grouping: batches whose captions are about equally long, in an order that stays random.

A window is a few batches of every bucket. Its steps keep their buckets; the samples of each bucket in it are sorted by
the rows of their captions and cut into the same number of batches, and a keyed permutation orders these batches.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np

from sana_pipe.data.loader.schedule import ScheduledBatch, permute

_CACHED_WINDOWS = 4


class StepOrder(Protocol):
    """The global batch of each step, and where epochs begin (`Schedule`)."""

    def step(self, step: int) -> ScheduledBatch: ...
    def epoch_of(self, step: int) -> int: ...
    def steps_upto(self, epochs: int) -> int: ...


class LengthGrouping:
    """A training order with length windows, made from another order. Safe for several threads.

    Args:
        order: the schedule.
        steps: optimizer steps in a window; the last window of an epoch may be shorter.
        rows: (bucket, positions, visits) -> rows of the captions that these visits see, (n,) integers.
        seed, phase: key the order of the sorted batches.
    """

    def __init__(
        self,
        order: StepOrder,
        steps: int,
        rows: Callable[[int, np.ndarray, np.ndarray], np.ndarray],
        *,
        seed: int,
        phase: int,
    ):
        if steps < 1:
            raise ValueError(f"a window has at least one step, not {steps}")
        self.order, self.steps, self.rows, self.seed, self.phase = order, steps, rows, seed, phase
        self._windows: OrderedDict[int, list[ScheduledBatch]] = OrderedDict()
        self._lock = threading.Lock()

    def step(self, step: int) -> ScheduledBatch:
        """The global batch of a step."""
        epoch = self.order.epoch_of(step)
        begin, end = self.order.steps_upto(epoch), self.order.steps_upto(epoch + 1)
        first = begin + (step - begin) // self.steps * self.steps
        with self._lock:
            window = self._windows.get(first)
            if window is None:
                window = self._windows[first] = self._sorted(first, min(first + self.steps, end))
                if len(self._windows) > _CACHED_WINDOWS:
                    self._windows.popitem(last=False)
        return window[step - first]

    def _sorted(self, first: int, stop: int) -> list[ScheduledBatch]:
        window = [self.order.step(step) for step in range(first, stop)]
        for bucket in sorted({step.bucket for step in window}):
            steps = [i for i, step in enumerate(window) if step.bucket == bucket]
            if len(steps) < 2:
                continue
            positions = np.concatenate([window[i].positions for i in steps])
            visits = np.concatenate([window[i].visits for i in steps])
            by_length = np.argsort(self.rows(bucket, positions, visits), kind="stable")
            batches = np.split(by_length, np.cumsum([len(window[i].positions) for i in steps])[:-1])
            places = permute(np.arange(len(steps)), len(steps), "window", self.seed, self.phase, first, bucket)
            for i, place in zip(steps, places.tolist(), strict=True):
                samples = batches[place]
                window[i] = replace(window[i], positions=positions[samples], visits=visits[samples])
        return window
