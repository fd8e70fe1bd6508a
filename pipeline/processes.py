"""How a sana-pipe process starts another, and how it ends.

Decoding runs apart from sampling so that the VAE and the transformer never share a process, and the demo runs the
commands that a person would type. Both must reach this very package, installed or not, from any directory. The price:
the child's command line is not the one to copy by hand; `shown` gives that one.

`run_and_exit` is how every process of ours ends. Threads that Arrow, libvips, gloo or fsspec start outlive the work
that they were started for. One that asks for the interpreter while the interpreter is being torn down ends the process
with SIGABRT, after all work is done and printed. So the interpreter is not torn down: what Python does at its end
(joining threads, exit functions, flushing) is done, then the operating system ends the process. `multiprocessing` ends
its children in the same way.
"""

from __future__ import annotations

import atexit
import os
import resource
import shlex
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
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
