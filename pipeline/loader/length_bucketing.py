"""Length windows: batches of captions that are about equally long, in an order that stays random.

What: the steps of a window (a few batches of every bucket) keep their buckets; the samples of each bucket in it are
sorted by the rows of their captions, cut into the same number of batches, and those permuted by a key.
Why: a random batch of 32 captions is padded to 2.7 times its bytes, one out of a window of 8 batches to 1.25 times
(reference measurements). It is a pure function of the schedule, the window and the rows, so ranks agree without
talking and step t is found at any t; every sample is visited as often as without, in the same epoch.
Price: the first step of a window plans all of them (scalars only). A batch is no longer a uniform draw: its captions
are alike in length; over a window the samples are the schedule's.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

import numpy as np

from pipeline.loader.schedule import Step, permute

_KEPT = 4


class Order(Protocol):
    """What gives the global batch of a step and knows where epochs begin (`Schedule`)."""

    def step(self, step: int) -> Step: ...
    def epoch_of(self, step: int) -> int: ...
    def steps_upto(self, epochs: int) -> int: ...


class Windows:
    """An order of training with length windows over another. Safe for several threads.

    Args:
        order: the schedule.
        steps: optimizer steps in a window; the last one of an epoch may be shorter.
        rows: (bucket, positions, visits) -> rows of the captions those visits see, (n,) integers.
        seed, phase: key the order of the sorted batches.
    """

    def __init__(
        self,
        order: Order,
        steps: int,
        rows: Callable[[int, np.ndarray, np.ndarray], np.ndarray],
        *,
        seed: int,
        phase: int,
    ):
        if steps < 1:
            raise ValueError(f"a window holds at least one step, not {steps}")
        self.order, self.steps, self.rows, self.seed, self.phase = order, steps, rows, seed, phase
        self._kept: OrderedDict[int, list[Step]] = OrderedDict()
        self._lock = threading.Lock()

    def step(self, step: int) -> Step:
        """The global batch of a step."""
        epoch = self.order.epoch_of(step)
        begin, end = self.order.steps_upto(epoch), self.order.steps_upto(epoch + 1)
        first = begin + (step - begin) // self.steps * self.steps
        with self._lock:
            window = self._kept.get(first)
            if window is None:
                window = self._kept[first] = self._sorted(first, min(first + self.steps, end))
                if len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
        return window[step - first]

    def _sorted(self, first: int, stop: int) -> list[Step]:
        window = [self.order.step(step) for step in range(first, stop)]
        for bucket in sorted({own.bucket for own in window}):
            mine = [i for i, own in enumerate(window) if own.bucket == bucket]
            if len(mine) < 2:
                continue
            positions = np.concatenate([window[i].positions for i in mine])
            visits = np.concatenate([window[i].visits for i in mine])
            by_length = np.argsort(self.rows(bucket, positions, visits), kind="stable")
            batches = np.split(by_length, np.cumsum([len(window[i].positions) for i in mine])[:-1])
            places = permute(np.arange(len(mine)), len(mine), "window", self.seed, self.phase, first, bucket)
            for i, place in zip(mine, places.tolist(), strict=True):
                own, chosen = window[i], batches[place]
                window[i] = Step(own.step, own.epoch, bucket, positions[chosen], visits[chosen])
        return window
