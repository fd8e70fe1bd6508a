"""Stop signals: SIGTERM and SIGUSR1, which schedulers send before they take a machine away, and SIGHUP, the end of a
terminal or connection, end encoding cleanly.

Inside `signals()` the first signal gives the current unit `GRACE_S` more seconds: `check` raises `Stopped` between
units, `check_batch` between batches after the grace. A second signal ends the grace. Outside `polite()` (planning) the
signal raises immediately, as Ctrl-C does.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from sana_pipe.base import retrying
from sana_pipe.base.processes import catching, in_main_thread, is_ignored

GRACE_S = 20.0
"""Seconds that the current unit may take after a signal; then it is dropped at its next batch."""

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class Stopped(BaseException):
    """A signal asked for the end. A `BaseException`, so that error handlers do not swallow it."""


class Stop:
    """Set by a signal; asked by the loops.

    Args:
        grace_s: how long the current unit may go on; None: `GRACE_S`.

    Attributes:
        name: of the signal; None before it came.
    """

    def __init__(self, grace_s: float | None = None):
        self.grace_s = GRACE_S if grace_s is None else grace_s
        self.name: str | None = None
        self._deadline = float("inf")
        self._polite = False
        self._caught: list[signal.Signals] = []

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Catch the signals inside the block."""
        self._caught = [number for number in SIGNALS if not is_ignored(number)]
        with catching(self._caught, self.note) as caught:
            if not caught:
                yield
                return
            with retrying.stopping(self.check_batch):
                yield

    def catch(self) -> None:
        """Install the handlers again, after a library has replaced them."""
        if in_main_thread():
            for number in self._caught:
                signal.signal(number, self.note)

    @contextmanager
    def polite(self) -> Iterator[None]:
        """Inside the block a signal does not raise by itself; `check` and `check_batch` do."""
        self._polite = True
        try:
            yield
        finally:
            self._polite = False

    def check(self) -> None:
        """Raise `Stopped` if a signal came."""
        if self.name is not None:
            raise Stopped(self.name)

    def check_batch(self) -> None:
        """Raise `Stopped` if a signal came and the grace is over."""
        if time.monotonic() >= self._deadline:
            raise Stopped(self.name)

    def sleep(self, seconds: float) -> None:
        """Sleep; raise `Stopped` when a signal comes."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.check()
            time.sleep(min(left, 0.1))

    def note(self, number: int, _frame: object) -> None:
        again = self.name is not None
        self.name = signal.Signals(number).name
        self._deadline = time.monotonic() + (0.0 if again else self.grace_s)
        if not self._polite:
            raise Stopped(self.name)
