"""The numbers of a report as JSON values, by the configuration of its cache and run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sana_pipe.config import Config
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.tools.locations import cache_location
from sana_pipe.tools.reporting import figures
from sana_pipe.tools.reporting.json_values import json_values


def collect(config: Config, **which: Any) -> tuple[Any, Cache | None, Snapshot | None]:
    """which: as in `figures.collect`."""
    made, cache, snapshot = figures.collect(Path(config.train.output), cache_location(config).open, **which)
    return json_values(made), cache, snapshot
