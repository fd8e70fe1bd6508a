"""Wait for what another thread or process does: on a busy machine it may take seconds."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    """Wait for a condition.

    Raises:
        AssertionError: it does not come true within `limit_s`.
    """
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)
