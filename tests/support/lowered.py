"""Limits of memory so low that a handful of items spill, are sorted in many runs and merged in many ranges."""

from __future__ import annotations

import pytest

from pipeline.cache import arrow, key_columns, scratch
from pipeline.encoding import scan
from pipeline.snapshots import join
from pipeline.sources import source


def lower_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of two, runs of three, one byte in memory."""
    for module in (arrow, scan, join, source):
        monkeypatch.setattr(module, "ROWS", 2)
    monkeypatch.setattr(key_columns, "BATCH", 2)
    monkeypatch.setattr(scratch, "LIMIT", 1)
    monkeypatch.setattr(scratch, "RUN", 3)
    monkeypatch.setattr(scratch, "TEXTS", 2)
