"""The typed head of a snapshot: written as it was read."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from pipeline.cache import layout
from pipeline.cache.files import Files
from pipeline.cache.snapshot import BucketPart, Head, Snapshot
from pipeline.errors import CacheError
from tests.support import tiny_cache
from tests.support.golden import GOLDEN
from tests.support.trees import unpack


def with_unknown_keys(value: Any) -> Any:
    """The same JSON with a key in every object of fixed fields that this version does not know."""
    if isinstance(value, list):
        return [with_unknown_keys(item) for item in value]
    if not isinstance(value, dict):
        return value
    free = {"recipes", "left_out", "sources", "counts"}  # their keys are data
    return {name: inner if name in free else with_unknown_keys(inner) for name, inner in value.items()} | {"new": [1]}


def head_of(root: Path) -> dict[str, Any]:
    """A head with every optional field, as JSON."""
    values = tiny_cache.build(root).open_snapshot().head.values()
    bucket = {**values["buckets"][0], "parts": [{"samples": 30, "weight": [1, 2]}], "block": 4}
    policies = {"order": "largest_first", "heldout": {"share": 0.1, "side": "train"}, "packed": {"window": 2}}
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
        assert head.with_tables() == (head, [])


def test_keys_of_a_later_version_stay_in_the_head(tmp_path: Path) -> None:
    values = head_of(tmp_path / "cache")
    assert Head.parse(values).values() == values
    later = with_unknown_keys(values)
    later["shards"].pop("new")  # its keys are kinds of records
    head = Head.parse(later)
    assert head.values() == later
    assert head.id == layout.content_digest(layout.canonical(later)) != Head.parse(values).id
    assert head.buckets[0].parts == (BucketPart(30, Fraction(1, 2), other={"new": [1]}),)
    assert replace(head, parent=None).values() == {**later, "parent": None}


def test_a_recipe_with_unknown_fields_is_refused(tmp_path: Path) -> None:
    values = head_of(tmp_path / "cache")
    values["recipes"] = {**values["recipes"], "latent": {**values["recipes"]["latent"], "new": 1}}
    with pytest.raises(CacheError, match="new"):
        _ = Head.parse(values).latent


def test_a_snapshot_with_keys_of_a_later_version_is_read_under_its_id(tmp_path: Path) -> None:
    cache = tiny_cache.build(tmp_path / "cache")
    first = cache.open_snapshot()
    later = Head.parse({**first.head.values(), "new": 1, "parent": first.id}).bound(cache.files)
    opened = cache.open_snapshot(cache.add_snapshot(later, None))
    assert opened.id == later.id and opened.head.other == {"new": 1} and len(opened) == len(first)
