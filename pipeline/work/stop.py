"""Stop signals: SIGTERM and SIGUSR1 (what schedulers send before they take a machine away) end encoding cleanly.

What: inside `signals()` the first signal gives the unit in hand `grace_s` more seconds; `check` raises `Stopped`
between units, `check_batch` between batches once the grace is over. A second signal ends the grace. While no unit is in
hand (scan, planning), the signal raises at once, as Ctrl-C does.
Why: the unit is finished or dropped by the usual way out, which removes its temporary file and its claim; the next run
continues with the units that are left.
Price: a batch is never interrupted, so the end comes at most one batch after the grace.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline import retrying

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Stopped(BaseException):
    """A signal asked for the end. Not an `Exception`: nothing that handles errors may swallow it."""


class Stop:
    """Set by a signal; asked by the loops.

    Args:
        grace_s: how long the unit in hand may go on.
    """

    def __init__(self, grace_s: float):
        self.grace_s = grace_s
        self.name: str | None = None
        self._deadline = float("inf")
        self._busy = False

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Catch the signals. Elsewhere than in the main thread they cannot be caught, and nothing happens."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}
        self.catch()
        try:
            with retrying.stopping(self.check_batch):
                yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def catch(self) -> None:
        """Take the signals (again: some libraries put handlers of their own)."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self._note)

    @contextmanager
    def polite(self) -> Iterator[None]:
        """Inside, a signal does not raise where it finds the process; `check` and `check_batch` do."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def check(self) -> None:
        if self.name is not None:
            raise Stopped(self.name)

    def check_batch(self) -> None:
        if time.monotonic() >= self._deadline:
            raise Stopped(self.name)

    def sleep(self, seconds: float) -> None:
        """Sleep, but not past a signal."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.check()
            time.sleep(min(left, 0.1))

    def _note(self, number: int, _frame: object) -> None:
        again = self.name is not None
        self.name = signal.Signals(number).name
        self._deadline = time.monotonic() if again else min(self._deadline, time.monotonic() + self.grace_s)
        if not self._busy:
            raise Stopped(self.name)
