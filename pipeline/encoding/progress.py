"""One line that says how far the work is: done of total, rate, time left, rejects.

On a terminal the line is redrawn; elsewhere (a log file) a new one is written every half minute.
Price: the rate is the mean since the start, so it lags behind sudden changes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable


class Progress:
    """Counts done and rejected things of a known or unknown total.

    `also` is a second count that the line shows the rate of: its noun, and what gives it.
    """

    def __init__(self, noun: str, total: int | None, also: tuple[str, Callable[[], int]] | None = None):
        self.noun, self.total, self._also = noun, total, also
        self.done = self.rejected = 0
        self._live = sys.stderr.isatty()
        self._start = self._last = time.monotonic()
        self._wide = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self.done or self.rejected:
            self._show(final=True)

    def add(self, done: int, rejected: int = 0) -> None:
        self.done += done
        self.rejected += rejected
        self._show()

    def expect(self, more: int) -> None:
        """The total is larger than was thought (or smaller)."""
        self.total = (self.total or 0) + more

    def reach(self, done: int, total: int | None = None) -> None:
        self.done, self.total = done, total
        self._show()

    def line(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        rate = (self.done + self.rejected) / seconds
        parts = [f"{self.noun}: {self.done}" + (f"/{self.total}" if self.total is not None else ""), f"{rate:.1f}/s"]
        if self._also is not None:
            noun, count = self._also
            parts.append(f"{count() / seconds:.0f} {noun}/s")
        if self.total is not None and rate:
            parts.append(f"{_span((self.total - self.done - self.rejected) / rate)} left")
        if self.rejected:
            parts.append(f"{self.rejected} rejected")
        return ", ".join(parts)

    def _show(self, final: bool = False) -> None:
        now = time.monotonic()
        if not final and now - self._last < (0.2 if self._live else 30):
            return
        self._last = now
        text = self.line()
        if self._live:
            sys.stderr.write("\r" + text.ljust(self._wide) + ("\n" if final else ""))
            self._wide = len(text)
        else:
            sys.stderr.write(text + "\n")
        sys.stderr.flush()


def _span(seconds: float) -> str:
    minutes, left = divmod(int(max(0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{left:02d}s" if minutes else f"{left}s"
