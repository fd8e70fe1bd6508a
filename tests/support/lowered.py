"""Limits of memory so low that a handful of items spill, are sorted in many runs and merged in many ranges."""

from __future__ import annotations

import pytest

from sana_pipe.data.cache import arrow, cache, connections, index, keys, scratch, snapshot, snapshot_lists
from sana_pipe.data.encoding import scan_rows
from sana_pipe.data.snapshots import frames
from sana_pipe.data.sources import folder


def lower_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of two, runs of three, one byte in memory. Limits on which bytes depend (rows of a chunk, of a block, of a
    row group) stay as they are, so that results can be compared with those under the usual limits."""
    for module in (arrow, scan_rows, frames):
        monkeypatch.setattr(module, "ROWS", 2)
    for module in (keys, index):
        monkeypatch.setattr(module, "BATCH", 2)
    monkeypatch.setattr(snapshot, "OPEN_CHUNKS", 1)
    for module in (snapshot_lists, index, cache):
        monkeypatch.setattr(module, "ENTRIES", 1)
    monkeypatch.setattr(scan_rows, "RUN", 2)
    monkeypatch.setattr(folder, "METADATA_BATCH", 2)
    monkeypatch.setattr(folder, "SIDECAR_BATCH", 2)
    monkeypatch.setattr(connections, "PAGE", 2)
    monkeypatch.setattr(scratch, "LIMIT", 1)
    monkeypatch.setattr(scratch, "RUN", 3)
    monkeypatch.setattr(scratch, "TEXTS", 2)
