"""The storage that a configuration names."""

from __future__ import annotations

from sana_pipe.config import Config
from sana_pipe.data.cache.cache import CacheLocation


def cache_location(config: Config) -> CacheLocation:
    """The location of the cache. The only place that knows which options give it, so it takes the whole `Config`."""
    return CacheLocation(config.cache, config.mirror, config.patience_s)
