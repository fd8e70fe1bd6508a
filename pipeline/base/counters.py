"""Counts of this process that its metrics show: requests to stores, retries, waiting, evictions, bytes read.

`add` is called where it happens, `totals` by whoever writes metrics. Counts only grow.
"""

from __future__ import annotations

import threading

NAMES = ("requests", "request_s", "retries", "store_wait_s", "evictions", "read_bytes")
"""requests to stores that were answered, and the seconds that they took; repeated requests; seconds from a request
that failed to the store's next answer; copies removed from the mirror to make space; bytes of records read."""

_totals: dict[str, float] = dict.fromkeys(NAMES, 0)
_lock = threading.Lock()


def add(**amounts: float) -> None:
    """Add to counts, by name."""
    with _lock:
        for name, amount in amounts.items():
            _totals[name] += amount


def totals() -> dict[str, float]:
    """Every count since the process began."""
    with _lock:
        return dict(_totals)


def since(earlier: dict[str, float]) -> dict[str, float]:
    """Return what was counted after `totals` returned `earlier`."""
    return {name: total - earlier[name] for name, total in totals().items()}
