"""Trying again: bounded, with pauses that grow and differ between processes.

Why one helper: every place that asks a server gives up at the same time and in the same way, and a thousand processes
that were turned away together do not come back together (the pauses are drawn at random).
Price: what will never work is tried `ATTEMPTS` times too, some ten seconds, unless the caller says that it is final.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

ATTEMPTS = 4
PAUSE_S = 0.5

T = TypeVar("T")


def tried(ask: Callable[[], T], final: tuple[type[Exception], ...] = ()) -> T:
    """What `ask` returns, at the latest at the attempt number `ATTEMPTS`.

    Args:
        final: errors that another attempt will not mend.

    Raises:
        Exception: one of `final`, or the last attempt's.
    """
    for attempt in range(1, ATTEMPTS):
        try:
            return ask()
        except final:
            raise
        except Exception:  # every driver has its own
            time.sleep(PAUSE_S * 3**attempt * random.uniform(0.3, 1))
    return ask()
