"""End a training cleanly on SIGTERM, SIGUSR1, SIGHUP (the end of its terminal), Ctrl-C, or the end of its launcher.

The loop asks a `StopRequest` between steps, and the loader while it waits for data. A second Ctrl-C ends the process at
once.
Why not `work.stop`, as encoding does: a process may leave the loop only together with all others, so nothing
is raised here; the request becomes part of the step's verdict.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

from sana_pipe.base.launch import Launch
from sana_pipe.base.processes import catching
from sana_pipe.train.training.feeding import Interrupted

AGAIN_S = 1.0
"""A second Ctrl-C within this time is ignored: launchers pass on the signal that the terminal has sent already."""


@dataclass
class StopRequest:
    """A request to end the run. name, since: of the first signal, in seconds of the monotonic clock. looping: there
    will be something to save. launcher: process id of the launcher, if its end ends the run."""

    name: str | None = None
    looping: bool = False
    since: float = 0.0
    launcher: int | None = None

    def reason(self) -> str | None:
        """The signal, or the end of the launcher: one that was killed sends no signal."""
        if self.name is None and self.launcher not in (None, os.getppid()):
            self.name = "the end of the launcher"
        return self.name

    def check(self) -> None:
        """Raise Interrupted if the run is to end."""
        if self.reason() is not None:
            raise Interrupted(self.name)


@contextmanager
def catch_signals_of(launch: Launch) -> Iterator[StopRequest]:
    """Inside, SIGTERM, SIGUSR1, SIGHUP and SIGINT request a clean end, which the first process announces on stderr.
    SIGINT ends the process at once before the first step, and when it is the second signal. Signals are caught in the
    main thread only; after `nohup` SIGHUP stays ignored."""
    request = StopRequest(launcher=os.getppid() if launch.kind in ("torchrun", "accelerate") else None)

    def announce(line: str) -> None:
        if launch.is_main:
            start = "\n" if os.isatty(2) else ""  # there a progress line may be open
            with suppress(OSError):  # the terminal is gone
                os.write(2, f"{start}sana-pipe: {line}\n".encode())  # a signal may come in the middle of a print

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and not request.looping:
            signal.default_int_handler(number, frame)
        if request.name is None:
            request.name, request.since = signal.Signals(number).name, time.monotonic()
            end = "a checkpoint will be written after this step; Ctrl-C then ends at once, without one"
            announce(f"{request.name}: {end if request.looping else 'the run ends as soon as it has started'}")
        elif number == signal.SIGINT and time.monotonic() - request.since > AGAIN_S:
            announce("ended without a checkpoint of the last steps; continue with --resume auto")
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    with catching([signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT], handle):
        yield request
