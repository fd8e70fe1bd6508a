"""A progress line: done of total, rates, how busy the encoder is, time left, rejects.

On a terminal the line is redrawn; elsewhere (a log file) a new line is written every half minute.
Price: the rates are means since the start (loading the encoder included), so they lag behind sudden changes.
Why not tqdm: it would replace `terminal` and the rate and time in `line`. It writes carriage returns into log
files, so plain lines would need a second path; counts that go back, rejects, tokens and the figures of `--json` stay
ours in any case. rich is the same, and not a dependency yet.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sana_pipe.base.amounts import duration
from sana_pipe.base.terminal import LiveLine, shorter


@dataclass
class Meter:
    """The work of encoders so far.

    Attributes:
        tokens: caption tokens.
        truncated: captions with more tokens than the encoding keeps.
        unshared: captions that changed the instruction's tokens and were encoded in full.
        busy_s: seconds in which an encoder computed.
        wall_s: seconds available to the encoders, where several work at the same time; None: the clock's.
        bytes: of shards written.
        following: records made with those of units, by kind.
        rejects: records that could not be made, by kind of reason.
        stores: counts of stores (`counters`) of processes on other machines.
    """

    tokens: int = 0
    truncated: int = 0
    unshared: int = 0
    busy_s: float = 0.0
    wall_s: float | None = None
    bytes: int = 0
    following: Counter[str] = field(default_factory=Counter)
    rejects: Counter[str] = field(default_factory=Counter)
    stores: Counter[str] = field(default_factory=Counter)

    def add(self, other: Meter) -> None:
        self.tokens += other.tokens
        self.truncated += other.truncated
        self.unshared += other.unshared
        self.busy_s += other.busy_s
        self.bytes += other.bytes
        self.following.update(other.following)
        self.rejects.update(other.rejects)
        self.stores.update(other.stores)
        if other.wall_s is not None:
            self.wall_s = (self.wall_s or 0.0) + other.wall_s

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Count the seconds of the block as busy."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.busy_s += time.monotonic() - began


class Progress:
    """Counts done and rejected items.

    Args:
        noun: what is counted.
        total: None if unknown.
        meter: what the encoders do for these items; None: no encoder works.
    """

    def __init__(self, noun: str, total: int | None, meter: Meter | None = None):
        self.noun, self.total, self._encodes = noun, total, meter is not None
        self.meter = meter or Meter(wall_s=0.0)
        self.done = self.rejected = 0
        self._ended = False
        self._line = LiveLine(sys.stderr.isatty())
        self._start = self._last = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """Show the last line, once."""
        if not self._ended and (self.done or self.rejected):
            self._show(final=True)
        self._ended = True

    def add(self, done: int, rejected: int = 0) -> None:
        self.done += done
        self.rejected += rejected
        self._show()

    def expect(self, more: int) -> None:
        """Change the total by `more`, which may be negative."""
        self.total = (self.total or 0) + more

    def reach(self, done: int, total: int | None = None) -> None:
        """Set the count and the total."""
        self.done, self.total = done, total
        self._show()

    def forget(self, done: int, rejected: int) -> None:
        """Set the counts back, because the work since then will be done again."""
        self.done, self.rejected = done, rejected

    @property
    def _seconds(self) -> float:
        return max(time.monotonic() - self._start, 1e-9)

    @property
    def busy(self) -> float:
        """Share of the time (0 to 1) in which the encoder computed."""
        busy, wall = self.encoder_seconds()
        return min(1.0, busy / wall) if wall > 0 else 0.0

    def encoder_seconds(self) -> tuple[float, float]:
        """Seconds in which the encoders computed, and in which they could have."""
        wall_s = self.meter.wall_s
        return self.meter.busy_s, self._seconds if wall_s is None else wall_s

    @property
    def left(self) -> int:
        """Items that are neither done nor rejected; 0 if the total is unknown."""
        return max(0, self.total - self.done - self.rejected) if self.total is not None else 0

    @property
    def left_s(self) -> float | None:
        """Seconds until nothing is left, at the mean speed so far; None if that is unknown."""
        made = self.done + self.rejected
        return self.left * self._seconds / made if made else None if self.left else 0.0

    def brief(self) -> dict[str, Any]:
        """Return how far the work is, as JSON values, for claims."""
        rate = round((self.done + self.rejected) / self._seconds, 3)
        return {
            "noun": self.noun,
            "samples": self.done,
            "rejected": self.rejected,
            "per_s": rate,
            "left": self.left,
            "left_s": self.left_s,
        }

    def figures(self) -> dict[str, Any]:
        """The figures of the line as JSON values: counts, seconds, rates per second, shares from 0 to 1."""
        seconds = self._seconds
        return {
            "done": self.done,
            "rejected": self.rejected,
            "seconds": seconds,
            "per_s": self.done / seconds,
            "tokens": self.meter.tokens,
            "tokens_per_s": self.meter.tokens / seconds,
            "encoder_busy": self.busy,
        }

    def lines(self) -> Iterator[str]:
        """The line, and shorter ones for narrower terminals. The count, what is rejected and the time left come first
        and are never left out."""
        seconds = self._seconds
        rate = (self.done + self.rejected) / seconds
        first = [f"{self.noun}: {self.done}" + (f"/{self.total}" if self.total is not None else "")]
        if self.rejected:
            first.append(f"{self.rejected} rejected")
        if self.total is not None and self.left_s is not None:
            first.append(f"{duration(self.left_s)} left")
        more = [f"{rate:.1f} {self.noun}/s" if self._encodes else f"{rate:.1f}/s"]
        if self._encodes:
            more.append(f"encoder {self.busy:.0%} busy")
        if self.meter.tokens:
            more.append(f"{self.meter.tokens / seconds:.0f} tokens/s")
        return shorter([*first, *more], len(first), ", ")

    def line(self) -> str:
        return next(self.lines())

    def _show(self, final: bool = False) -> None:
        now = time.monotonic()
        if not final and now - self._last < (0.2 if self._line.live else 30):
            return
        self._last = now
        if self._line.live:
            self._line.show(*self.lines())
        else:
            sys.stderr.write(self.line() + "\n")
            sys.stderr.flush()
        if final:
            self._line.end()
