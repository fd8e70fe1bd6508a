"""Batch prefetch: threads work on coming steps, the consumer gets the results in order.

`BatchPrefetch.get` returns what `work(step, on_read)` returned for the next step, or raises what it raised there.
Why not a pool of futures: the limit of reading ahead is a number of bytes, and a step's bytes are known only after it
is read; and a pool waits for its threads when the process ends, so a read from a dead file system would keep it alive.
Price: a thread that hangs in the kernel cannot be stopped. It is abandoned and ends with the process.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from sana_pipe.base.errors import AwayError, UserError

T = TypeVar("T")
OnRead = Callable[[Callable[[], str]], None]
"""A function that a thread calls when it starts an operation; the argument returns the operation's description for
error messages."""
_JOIN_S = 5.0


class _Closed(Exception):
    pass


class _Failed:
    def __init__(self, error: BaseException):
        self.error = error


class BatchPrefetch(Generic[T]):
    """Runs `work` for the steps first, first + 1, ... in threads.

    Args:
        work: (step, on_read) -> result; calls `on_read` before each operation that may block.
        first, stop: the first step, and the step before which to stop (None: never).
        threads: number of threads.
        steps: limit on the steps that are read ahead; None: no limit.
        limit: no step is begun while the results that are ready have this many bytes; one step is always in work.
        size: bytes of a result.
        timeout_s: seconds that one operation of a thread may take while the consumer waits for its step.

    Attributes:
        bytes: of the results that are ready.
    """

    def __init__(
        self,
        work: Callable[[int, OnRead], T],
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
        self._wanted = self._next = first
        self._ready: dict[int, T | _Failed] = {}
        self._active: dict[int, tuple[float, Callable[[], str]]] = {}
        self.bytes = self._last_size = 0
        self._closed = False
        self._failed: int | None = None
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=self._run, name=f"loader-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def get(self) -> T:
        """The next step's result.

        Raises:
            AwayError: an operation for this step takes longer than `timeout_s`; names it.
            BaseException: what `work` raised for this step.
        """
        with self._changed:
            step = self._wanted
            while step not in self._ready:
                self._check(step)
                self._changed.wait(min(1.0, self._timeout / 4))
            result = self._ready.pop(step)
            self._wanted += 1
            if not isinstance(result, _Failed):
                self.bytes -= self._size(result)
            self._changed.notify_all()
        if isinstance(result, _Failed):
            raise result.error
        return result

    def close(self) -> None:
        """Stop the threads; a thread that hangs is abandoned."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        end = time.monotonic() + _JOIN_S
        for thread in self._threads:
            stuck = any(time.monotonic() - began > self._timeout for began, _ in self._active.copy().values())
            thread.join(0.05 if stuck else max(0.0, end - time.monotonic()))
        self._ready.clear()

    def _check(self, step: int) -> None:
        began, describe = self._active.get(step, (None, None))
        if began is not None and describe is not None and time.monotonic() - began > self._timeout:
            raise AwayError(
                f"{describe()} takes too long",
                expected=f"less than {self._timeout:g} s",
                found=f"{time.monotonic() - began:.1f} s so far, and no answer",
                fix="check the disk or the network file system, or set patience_s to wait longer",
            )
        if not any(thread.is_alive() for thread in self._threads):
            raise RuntimeError(f"the loader's threads ended before step {step}")

    def _may_begin(self) -> bool:
        if self._failed is not None and self._next > self._failed:
            return False  # the run ends at the failed step
        ahead = self._next - self._wanted
        if ahead <= 0:
            return True
        if self._steps is not None and ahead > self._steps:
            return False
        return self.bytes + self._last_size * len(self._active) < self._limit

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
                self._active[step] = (time.monotonic(), partial("planning step {}".format, step))
            result: Any
            try:
                result = self._work(step, partial(self._report, step))
            except BaseException as error:  # of any kind: the consumer raises it at this step
                if not isinstance(error, UserError):
                    error.add_note("".join(traceback.format_exception(error)))
                result = _Failed(error.with_traceback(None))  # the frames refer to a buffer
            with self._changed:
                del self._active[step]
                self._ready[step] = result
                if isinstance(result, _Failed):
                    self._failed = step if self._failed is None else min(step, self._failed)
                else:
                    self._last_size = self._size(result)
                    self.bytes += self._last_size
                del result
                self._changed.notify_all()

    def _report(self, step: int, describe: Callable[[], str]) -> None:
        if self._closed:
            raise _Closed
        self._active[step] = (time.monotonic(), describe)
