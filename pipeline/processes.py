"""How one sana-pipe process starts another, and whether a process has ended.

Why: decoding runs apart from sampling so that the VAE and the transformer never share a process, and the demo runs
the commands that a person would type. Both must reach this very package, installed or not, from any directory.
A process is known by its machine, its number and when it was started: numbers are used again, and mean something on
one boot of one machine only.
Price: the child's command line is not the one to copy by hand; `shown` gives that one. Without /proc no process is
ever said to have ended.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_START = "import sys; sys.path.insert(0, sys.argv.pop(1)); from pipeline.cli import main; main()"


def command(*arguments: str) -> list[str]:
    """The argument vector that runs `sana-pipe ARGUMENTS` with this interpreter and this package."""
    return [sys.executable, "-c", _START, str(_ROOT), *arguments]


def shown(*arguments: str) -> str:
    """The same command as a person would type it."""
    return shlex.join(["sana-pipe", *arguments])


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
