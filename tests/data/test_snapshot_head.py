"""The typed head of a snapshot: written as it was read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sana_pipe.base.errors import CacheError
from sana_pipe.data.cache import layout
from sana_pipe.data.cache.files import Files
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.cache.snapshot_head import Head
from tests.support import tiny_cache
from tests.support.golden import GOLDEN
from tests.support.trees import unpack


def head_of(root: Path) -> dict[str, Any]:
    """A head with every optional field, as JSON."""
    values = tiny_cache.build(root).open_snapshot().head.values()
    bucket = {**values["buckets"][0], "parts": [{"samples": 30, "weight": [1, 2]}], "block": 4}
    policies = {"heldout": {"share": 0.1, "side": "train"}, "packed": {"window": 2}}
    return {
        **values,
        "buckets": [bucket, *values["buckets"][1:]],
        "policies": {**values["policies"], **policies},
        "counts": {"samples": 63},
        "folder": "packed-0",
        "parent": "0" * 32,
    }


def test_earlier_heads_are_written_as_they_were_read(tmp_path: Path) -> None:
    unpack(GOLDEN, tmp_path)
    files = Files(tmp_path / "cache")
    ids = [path.stem for path in (tmp_path / "cache" / "snapshots").glob("*.json")]
    assert len(ids) >= 4
    for snapshot_id in ids:
        head = Head.read(files, snapshot_id)
        assert head.values() == files.document(layout.Paths.snapshot(snapshot_id))
        assert head.id == snapshot_id and head.samples == len(Snapshot(files, snapshot_id))


def test_unknown_keys_are_refused_by_name(tmp_path: Path) -> None:
    values = head_of(tmp_path / "cache")
    assert Head.parse(values).values() == values
    for part in (values, values["policies"], values["buckets"][0]["parts"][0], values["null"], values["chunks"]):
        part["new"] = 1
        with pytest.raises(CacheError, match="new"):
            Head.parse(values)
        del part["new"]


def test_an_encoding_with_unknown_fields_is_refused(tmp_path: Path) -> None:
    values = head_of(tmp_path / "cache")
    values["encodings"] = {**values["encodings"], "latent": {**values["encodings"]["latent"], "new": 1}}
    with pytest.raises(CacheError, match="new"):
        _ = Head.parse(values).encodings_by_kind
