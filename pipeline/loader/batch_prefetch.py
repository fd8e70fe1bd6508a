"""Reading ahead: threads work on coming steps, the consumer gets them in order.

What: `ReadAhead.get` returns what `work(step, doing)` made of the next step, or raises at that step what it raised.
Why not a pool of futures: how far to read ahead is a number of bytes, which is only known once a step is read; and a
pool waits for its threads when the process ends, so that one read of a dead file system would keep it alive for ever.
Price: a thread that hangs in the kernel cannot be stopped; it is left behind, and ends with the process.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from pipeline.errors import AwayError, UserError

T = TypeVar("T")
Doing = Callable[[Callable[[], str]], None]
"""Told of what a thread begins to do, as a function that says it in words."""
_JOIN_S = 5.0


class _Closed(Exception):
    pass


class _Failed:
    def __init__(self, error: BaseException):
        self.error = error


class BatchPrefetch(Generic[T]):
    """Runs `work` for the steps first, first + 1, ... in threads.

    Args:
        work: (step, doing) -> result; calls `doing` before everything that may block.
        first, stop: the first step, and the one before which to stop (None: never).
        threads: how many.
        steps: how many steps may be ready or in work beyond the one that is asked for (None: any number).
        limit: no step is begun while those ahead hold this many bytes; at least one is always in work.
        size: bytes of a result.
        timeout_s: how long one thing that a thread does may take while its step is waited for.

    Attributes:
        bytes: of the results that are ready and were not asked for yet.
    """

    def __init__(
        self,
        work: Callable[[int, Doing], T],
        first: int,
        stop: int | None,
        *,
        threads: int,
        steps: int | None,
        limit: int,
        size: Callable[[T], int],
        timeout_s: float,
    ):
        self._work, self._stop, self._size = work, stop, size
        self._steps, self._limit, self._timeout = steps, limit, timeout_s
        self._asked = self._next = first
        self._ready: dict[int, T | _Failed] = {}
        self._doing: dict[int, tuple[float, Callable[[], str]]] = {}
        self.bytes = self._last = 0
        self._closed = False
        self._failed: int | None = None
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=self._run, name=f"loader-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def get(self) -> T:
        """The next step's result.

        Raises:
            AwayError: what a thread does for this step takes longer than `timeout_s`; says what.
            BaseException: whatever `work` raised for this step.
        """
        with self._changed:
            step = self._asked
            self._changed.notify_all()
            while step not in self._ready:
                self._check(step)
                self._changed.wait(min(1.0, self._timeout / 4))
            found = self._ready.pop(step)
            self._asked += 1
            if not isinstance(found, _Failed):
                self.bytes -= self._size(found)
            self._changed.notify_all()
        if isinstance(found, _Failed):
            raise found.error
        return found

    def close(self) -> None:
        """Stop the threads; one that hangs is left behind."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        end = time.monotonic() + _JOIN_S
        for thread in self._threads:
            stuck = any(time.monotonic() - began > self._timeout for began, _ in self._doing.copy().values())
            thread.join(0.05 if stuck else max(0.0, end - time.monotonic()))
        self._ready.clear()

    def _check(self, step: int) -> None:
        began, what = self._doing.get(step, (None, None))
        if began is not None and what is not None and time.monotonic() - began > self._timeout:
            raise AwayError(
                f"{what()} takes too long",
                expected=f"less than {self._timeout:g} s",
                found=f"{time.monotonic() - began:.1f} s so far, and no answer",
                fix="look at the disk or the network file system, or set patience_s to wait longer",
            )
        if not any(thread.is_alive() for thread in self._threads):
            raise RuntimeError(f"the loader's threads ended before step {step}")

    def _may_begin(self) -> bool:
        if self._failed is not None and self._next > self._failed:
            return False  # the run ends there
        ahead = self._next - self._asked
        if ahead <= 0:
            return True
        if self._steps is not None and ahead > self._steps:
            return False
        return self.bytes + self._last * len(self._doing) < self._limit

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not (self._stop is not None and self._next >= self._stop):
                    if self._may_begin():
                        break
                    self._changed.wait()
                else:
                    return
                step = self._next
                self._next += 1
                self._doing[step] = (time.monotonic(), f"planning step {step}".__str__)
            found: Any
            try:
                found = self._work(step, partial(self._note, step))
            except BaseException as error:  # whatever it is, the consumer must see it at this step
                if not isinstance(error, UserError):
                    error.add_note("".join(traceback.format_exception(error)))
                found = _Failed(error.with_traceback(None))  # the frames hold a buffer
            with self._changed:
                del self._doing[step]
                self._ready[step] = found
                if isinstance(found, _Failed):
                    self._failed = step if self._failed is None else min(step, self._failed)
                else:
                    self._last = self._size(found)
                    self.bytes += self._last
                del found
                self._changed.notify_all()

    def _note(self, step: int, what: Callable[[], str]) -> None:
        if self._closed:
            raise _Closed
        self._doing[step] = (time.monotonic(), what)
