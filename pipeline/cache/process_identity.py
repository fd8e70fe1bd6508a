"""Who owns a file: which process of which machine, and whether it still lives.

Why: a lock file or a file's age says nothing of a process that is stopped, slow, or sees another clock. A process of
this machine can be asked for; of another machine's nothing is known.
Price: names and numbers of processes are Linux' (/proc); elsewhere nobody is known, and only ages count.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import xxhash


def place() -> dict[str, str]:
    """Which process of which boot of which machine this is: `machine`, `process` and `started`; empty where /proc does
    not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        numbers = os.readlink("/proc/self/ns/pid")  # process ids mean something inside one namespace only
        started = _stat("self")[1]
    except OSError:
        return {}
    return {"machine": f"{platform.node()} {boot} {numbers}", "process": str(os.getpid()), "started": started}


def ended(process: str, started: str) -> bool:
    """Whether a process of this machine (see `place`) is gone for sure."""
    if not process.isdigit():
        return False
    try:
        state, since = _stat(process)
    except OSError:  # it is gone, or another user's and hidden (the mount option hidepid)
        try:
            os.kill(int(process), 0)
        except (ProcessLookupError, OverflowError):
            return True
        except OSError:
            pass
        return False
    return state in "ZX" or since != started


def name_prefix() -> str:
    """A beginning for names of files of this process."""
    here = place()
    if not here:
        return f"{os.getpid():x}"
    return f"{_short(here)}-{here['process']}-{here['started']}"


def is_owned_by_live_process(name: str) -> bool:
    """Whether a name begins with the mark of a process of this machine that has not ended."""
    machine, _, rest = name.partition("-")
    process, _, rest = rest.partition("-")
    here = place()
    if not here or machine != _short(here):
        return False
    return not ended(process, rest.partition("-")[0])


def _stat(process: str) -> tuple[str, str]:
    """State of a process, and its start in clock ticks."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


def _short(here: dict[str, str]) -> str:
    return xxhash.xxh3_64_hexdigest(here["machine"].encode())
