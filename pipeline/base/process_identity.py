"""Identifies the process that owns a file, and tells whether it is still alive.

Why: the age of a lock file says nothing about a process that is stopped, slow, or has another clock. The kernel can be
asked about a process of this machine; about one of another machine nothing is known.
Price: identities come from /proc (Linux). Elsewhere every owner is unknown, and only ages decide.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import xxhash


@cache
def place() -> dict[str, str]:
    """Identity of this process: `machine` (host name, boot id, pid namespace), `process` (pid) and `started` (clock
    ticks since boot). Empty where /proc does not tell. Not to be changed by the caller."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        numbers = os.readlink("/proc/self/ns/pid")  # pids are unique within a namespace only
        started = stat_of("self")[1]
    except OSError:
        return {}
    return {"machine": f"{platform.node()} {boot} {numbers}", "process": str(os.getpid()), "started": started}


os.register_at_fork(after_in_child=place.cache_clear)


def has_ended(other: Mapping[str, object]) -> bool:
    """Return whether the process of a `place` ran on this machine and has certainly ended; False if that is not
    known."""
    machine = place().get("machine")
    if machine is None or other.get("machine") != machine:
        return False
    return ended(str(other.get("process")), str(other.get("started")))


def ended(process: str, started: str) -> bool:
    """Return whether a process of this machine (see `place`) has certainly ended."""
    if not process.isdigit():
        return False
    try:
        state, since = stat_of(process)
    except OSError:  # it has ended, or belongs to another user and is hidden (mount option hidepid)
        try:
            os.kill(int(process), 0)
        except (ProcessLookupError, OverflowError):
            return True
        except OSError:
            pass
        return False
    return state in "ZX" or since != started


def name_prefix() -> str:
    """A file name prefix that identifies this process."""
    identity = place()
    if not identity:
        return f"{os.getpid():x}"
    return f"{_short(identity)}-{identity['process']}-{identity['started']}"


def is_owned_by_live_process(name: str) -> bool:
    """Return whether a file name has the prefix of a process of this machine that has not ended."""
    machine, _, rest = name.partition("-")
    process, _, rest = rest.partition("-")
    identity = place()
    if not identity or machine != _short(identity):
        return False
    return not ended(process, rest.partition("-")[0])


def stat_of(process: str) -> tuple[str, str]:
    """(state letter, start in clock ticks since boot) of a process."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


def age_s() -> float:
    """Seconds since this process began; 0 where /proc does not tell."""
    try:
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return uptime - int(stat_of("self")[1]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return 0.0


def _short(identity: dict[str, str]) -> str:
    return xxhash.xxh3_64_hexdigest(identity["machine"].encode())
