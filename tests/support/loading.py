"""Settings of a loader, with the defaults of most tests."""

from __future__ import annotations

from typing import Any

from sana_pipe.data.loader.loader import LoaderSettings


def loader_settings(**options: Any) -> LoaderSettings:
    """One process that reads in its calling thread, without caption drop."""
    defaults: dict[str, Any] = {"seed": 0, "phase": 0, "rank": 0, "world": 1, "microbatch": 12}
    reading: dict[str, Any] = {"caption_drop": 0.0, "prefetch": 0, "threads": 1}
    return LoaderSettings(**{**defaults, **reading, **options})
