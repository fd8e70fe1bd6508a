"""Start a sana-pipe process from another, catch signals, and end a process.

A child must use this package, installed or not, from any directory; so its command line is not the command to copy by
hand, which `shown` gives. `run_and_exit` ends every sana-pipe process: threads of Arrow, libvips, gloo and fsspec
outlive their work, and one that enters the interpreter while it is torn down ends the process with SIGABRT. So it joins
threads, runs exit functions and flushes, as Python does, and does not tear the interpreter down (nor does
`multiprocessing` in its children). A lost line ends no work: further lines are dropped, `OUTPUT_LOST` says so.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

from sana_pipe.base.errors import escaped
from sana_pipe.base.urls import strip_credentials

_START = "from sana_pipe.cli import console; console()"

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

INTERRUPTED = 130
"""The shells' exit code for a process that SIGINT ended."""
GRACE_S = 5.0
"""Seconds that `alongside` waits between two signals."""
DEFECT = 70  # EX_SOFTWARE
"""Exit code of an exception that is not handled: a defect, with its traceback."""
OUTPUT_LOST = 74
"""Exit code (EX_IOERR) if the work is done but lines could not be written to stdout."""


def command(*arguments: str) -> list[str]:
    """The argument vector that runs `sana-pipe ARGUMENTS` with this interpreter."""
    return [sys.executable, "-c", _START, *arguments]


def shown(*arguments: str) -> str:
    """The same command as a user types it, without the credentials of URLs."""
    return shlex.join(["sana-pipe", *map(strip_credentials, arguments)])


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent is killed. For `preexec_fn` of a child; on Linux only."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_FOLLOWING: list[str] = []


def follow_with(*arguments: str) -> None:
    """Let `sana-pipe ARGUMENTS` take this process's place when it ends with 0: the same process to its launcher, with
    all memory of this one given back, on GPUs too."""
    _FOLLOWING[:] = command(*arguments)


def pass_on(*words: str) -> bool:
    """Add words to the command of `follow_with`; False if no command follows."""
    if _FOLLOWING:
        _FOLLOWING.extend(words)
    return bool(_FOLLOWING)


def allow_many_files() -> None:
    """Raise the soft limit on open files (usually 1,024) to the hard limit, because many shards are open at once."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # some systems allow less than they report; the old limit stays
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def in_main_thread() -> bool:
    """Return whether signals can be caught here."""
    return threading.current_thread() is threading.main_thread()


def is_ignored(number: signal.Signals) -> bool:
    """Return whether this is Ctrl-C or the end of the terminal, and this process ignores it: after `nohup`, or in the
    background of a script."""
    return number in (signal.SIGINT, signal.SIGHUP) and signal.getsignal(number) == signal.SIG_IGN


@contextmanager
def catching(numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[bool]:
    """Install a signal handler inside the block, and restore the earlier handlers after it. A signal that a user has
    let this process ignore stays ignored (`is_ignored`).

    Yields:
        False outside the main thread: nothing is installed.
    """
    if not in_main_thread():
        yield False
        return
    before = {number: signal.signal(number, handler) for number in numbers if not is_ignored(number)}
    try:
        yield True
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def call(arguments: Sequence[str], *, send: signal.Signals | None = None) -> tuple[int, signal.Signals | None]:
    """Run a command in a process that does not outlive this one; signals that ask this one to end are passed on to it.

    Args:
        send: passed on in place of any signal; None: the same one.

    Returns:
        Its exit code, 128 + N if signal N ended it, and the signal that this process got.
    """
    passed, children = list[int](), list[subprocess.Popen[bytes]]()

    def pass_it_on(number: int, frame: FrameType | None) -> None:
        passed.append(number)
        for child in children:
            child.send_signal(send or number)

    with catching([signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1], pass_it_on):
        # A group of its own: the terminal sends Ctrl-C to this process alone, and the command gets it once.
        child = subprocess.Popen(arguments, process_group=0, preexec_fn=end_with_parent)
        early = list(passed)
        children.append(child)
        for number in early:
            child.send_signal(send or number)
        code = child.wait()
    return code if code >= 0 else 128 - code, signal.Signals(passed[0]) if passed else None


@contextmanager
def alongside(arguments: Sequence[str]) -> Iterator[Callable[[], str | None]]:
    """Run a command alongside what happens in the block: with the least priority and without output, in a process that
    ends with the block, or with this process.

    Yields:
        Why it has ended by itself, its first line; None: it has not, or with 0.
    """
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            process_group=0,
            preexec_fn=_in_background,
        )

        def failure() -> str | None:
            if not child.poll():
                return None
            said.seek(0)
            lines = said.read().decode(errors="replace").split("\n")
            return next((line.strip() for line in lines if line.strip()), f"it ended with {child.returncode}")

        try:
            yield failure
        finally:
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):  # the second ends what the first finishes
                with suppress(subprocess.TimeoutExpired):
                    child.send_signal(number)
                    child.wait(GRACE_S)
                    break


def free_memory() -> int:
    """Bytes of memory that a further process may take, by the machine and its control group; 0: not known."""
    with suppress(OSError, ValueError, LookupError):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) << 10
        group = Path("/sys/fs/cgroup", Path("/proc/self/cgroup").read_text().rpartition("::/")[2].strip())
        with suppress(OSError, ValueError, LookupError):  # no limit is `max`
            used = int((group / "memory.current").read_text())
            counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            free = min(free, int((group / "memory.max").read_text()) - used + int(counts["inactive_file"]))
        return max(0, free)
    return 0


def _in_background() -> None:
    end_with_parent()
    os.nice(19)


@contextmanager
def beating(beat: Callable[[], None], seconds: float, name: str) -> Iterator[None]:
    """Call `beat` every so many seconds, from a thread of this name, while the block runs. The last call has returned
    when the block is left."""
    ended = threading.Event()

    def beats() -> None:
        while not ended.wait(seconds):
            beat()

    thread = threading.Thread(target=beats, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class Output:
    """A stream for text that drops everything once it cannot be written.

    What a terminal would obey (captions, names and messages are written by others) is escaped; see `errors.escaped`.

    Args:
        keep: control characters that are written.

    Attributes:
        lost: something was dropped.
    """

    def __init__(self, stream: TextIO, keep: str = "\n\t"):
        self._stream, self._keep, self.lost = stream, keep, False

    def write(self, text: str) -> int:
        """Returns the number of characters, also of those that are dropped."""
        if self.lost:
            return len(text)
        try:
            self._stream.write(escaped(text, self._keep))
            return len(text)
        except UnicodeEncodeError as error:  # the terminal's encoding, or the name of a file that is not UTF-8
            return self.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        except (OSError, ValueError):  # ValueError: it was closed
            self.lost = True
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self.lost = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def run_and_exit(main: Callable[[], object]) -> NoReturn:
    """Call `main` and end this process with its exit code, even if native threads are still running.

    The code is what `main` returns or raises in SystemExit: a number, None (0), or a text, which is printed (1). Any
    other exception gives `DEFECT`; its traceback is printed unless `errors.print_error` has printed it. If stdout
    cannot be written, `OUTPUT_LOST` replaces 0. After 0 the command of `follow_with` takes the place of the process.
    """
    nowhere = open(os.devnull, "w")  # noqa: SIM115 - for a stream that is None: the process began without it
    output, errors = Output(sys.stdout or nowhere), Output(sys.stderr or nowhere, "\n\t\r")  # progress lines return
    sys.stdout, sys.stderr = output, errors
    try:
        code = main()
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        if not getattr(error, "printed", False):
            sys.excepthook(*sys.exc_info())
        code = DEFECT
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # joins non-daemon threads, those of pools first
        atexit._run_exitfuncs()
    finally:
        output.flush()
        errors.flush()
        if not code and not output.lost and _FOLLOWING:
            os.execv(_FOLLOWING[0], _FOLLOWING)
        os._exit(int(code or (OUTPUT_LOST if output.lost else 0)) & 0xFF)
