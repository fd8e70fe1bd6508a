"""How a sana-pipe process starts another, how it ends, and whether another one has ended.

Decoding runs apart from sampling so that the VAE and the transformer never share a process, and the demo runs the
commands that a person would type. Both must reach this very package, installed or not, from any directory. The price:
the child's command line is not the one to copy by hand; `shown` gives that one.

`run_and_exit` is how every process of ours ends. Threads that Arrow, libvips, gloo or fsspec start outlive the work
that they were started for. One that asks for the interpreter while the interpreter is being torn down ends the process
with SIGABRT, after all work is done and printed. So the interpreter is not torn down: what Python does at its end
(joining threads, exit functions, flushing) is done, then the operating system ends the process. `multiprocessing` ends
its children in the same way.

A process is known by its machine, its number and when it was started: numbers are used again, and mean something on one
boot of one machine only. Without /proc no process is ever said to have ended.
"""

from __future__ import annotations

import atexit
import os
import platform
import resource
import shlex
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

_ROOT = Path(__file__).resolve().parent.parent
_START = "import sys; sys.path.insert(0, sys.argv.pop(1)); from pipeline.cli import console; console()"

OUTPUT_LOST = 74
"""Exit code (EX_IOERR) of a process whose work is done and whose last lines could not be written."""


def command(*arguments: str) -> list[str]:
    """The argument vector that runs `sana-pipe ARGUMENTS` with this interpreter and this package."""
    return [sys.executable, "-c", _START, str(_ROOT), *arguments]


def shown(*arguments: str) -> str:
    """The same command as a person would type it."""
    return shlex.join(["sana-pipe", *arguments])


def allow_many_files() -> None:
    """Raise the soft limit on open files to the hard one: many shards are open at once, and 1,024 is usual."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # some systems allow less than they say; then what there is has to do
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run_and_exit(main: Callable[[], object]) -> NoReturn:
    """Call `main` and end this process with its exit code, while native threads may still be running.

    The code is what `main` returns or raises in SystemExit: a number, None for 0, or a text that is printed (1). Any
    other exception is printed with its traceback (1). `OUTPUT_LOST` takes the place of 0 if stdout cannot be flushed.
    """
    try:
        code = main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # joins threads that are no daemons, pools' first
        atexit._run_exitfuncs()
    finally:
        try:
            sys.stdout.flush()
        except (OSError, ValueError):  # a closed pipe, a full disk
            code = code or OUTPUT_LOST
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(int(code or 0) & 0xFF)


@dataclass(frozen=True)
class Identity:
    """One process. `machine` is "" where it cannot be known; `started` counts ticks of that machine's clock."""

    host: str
    machine: str
    process: int
    started: str

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"


def this_process() -> Identity:
    host, number = platform.node(), os.getpid()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        numbers = os.readlink("/proc/self/ns/pid")  # process ids mean something inside one namespace only
    except OSError:
        return Identity(host, "", number, "")
    return Identity(host, f"{host} {boot} {numbers}", number, _started(number) or "")


def has_ended(process: Identity) -> bool:
    """True if it was a process of this very machine and is no more; False if it lives or cannot be seen from here."""
    if not process.machine or process.machine != this_process().machine:
        return False
    now = _started(process.process)
    return now is not None and now != process.started


def _started(process: int) -> str | None:
    """A process's start in clock ticks; "" if there is none (or a zombie), None if it is hidden from this user."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return ""
        except OSError:
            pass
        return None
    return "" if fields[0] in "ZX" else fields[19]
