"""The band in which the loss of a run lies, to report a loss that leaves it.

What: mean and standard deviation of the rows of metrics, weighted by exp(-age / `ROWS`). A loss more than `WIDTH`
standard deviations away is outside. It counts from then on, so that a lasting change becomes the new band.
Why rows and not steps: a row is a mean over steps, so the noise of single batches is already averaged out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

ROWS = 50
BEFORE = 20
"""Rows before the first judgement."""
WIDTH = 6.0
LEAST = 0.01
"""Smallest standard deviation, as a share of the mean."""


@dataclass
class LossBand:
    """mean, variance: weighted as above. rows: that were added. inside: whether the last row was."""

    mean: float = 0.0
    variance: float = 0.0
    rows: int = 0
    inside: bool = True

    def add(self, loss: float) -> tuple[float, float] | None:
        """Count a row's loss. Returns the band (lowest, highest) if this row leaves it, and None otherwise."""
        half = WIDTH * max(math.sqrt(self.variance), LEAST * abs(self.mean))
        band = self.mean - half, self.mean + half
        inside = self.rows < BEFORE or band[0] <= loss <= band[1]
        left = self.inside and not inside
        self.rows, self.inside = self.rows + 1, inside
        share = max(1 / self.rows, 1 - math.exp(-1 / ROWS))
        change = loss - self.mean
        self.mean += share * change
        self.variance = (1 - share) * (self.variance + share * change**2)
        return band if left else None
