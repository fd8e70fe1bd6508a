"""The numbers of a report as JSON values, by the configuration of its cache and run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from pipeline.cache.cache import Cache
from pipeline.cache.snapshot import Snapshot
from pipeline.config import Config
from pipeline.reporting import figures
from pipeline.reporting.json_values import json_values


def collect(config: Config, **which: Any) -> tuple[Any, Cache | None, Snapshot | None]:
    """which: as in `figures.collect`."""
    made, cache, snapshot = figures.collect(Path(config.train.output), partial(Cache.of, config), **which)
    return json_values(made), cache, snapshot
