"""Snapshots side by side: what a cache has, and what one has that another has not.

What: `listed` describes every snapshot from its head, `difference` finds what was added, removed or changed.
Why: two training runs differ by their snapshots; how, should be a question that the cache can answer.
Price: a difference reads all sample chunks of both; the names of samples are read for those that differ only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from pipeline.cache.index import fixed
from pipeline.cache.snapshot import Snapshot
from pipeline.cache.store import Cache
from pipeline.errors import IntegrityError


@dataclass(frozen=True)
class Difference:
    """Rows: `added` of the second snapshot, `removed` of the first, `changed` of the second, with what changed:
    `picture` (another latent), `bucket` (another size), `captions` (other rows, weights or order)."""

    added: list[int]
    removed: list[int]
    changed: list[tuple[int, tuple[str, ...]]]

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)


def listed(cache: Cache) -> list[dict[str, Any]]:
    """Every snapshot: `id`, `names`, `parent`, `samples`, `buckets`, `left_out` (items), `packed`, `bytes` of its
    shards. Of one that cannot be read: `id`, `names` and `damaged`, what is wrong."""
    names: dict[str, list[str]] = {}
    found: list[dict[str, Any]] = []
    for name in cache.snapshot_names():
        try:
            if (pointed := cache.snapshot_of(name)) is not None:
                names.setdefault(pointed, []).append(name)
        except IntegrityError as error:
            found.append({"id": None, "parent": None, "names": [name], "damaged": error.what})
    heads = {entry.removesuffix(".json") for entry in cache.files.names("snapshots") if entry.endswith(".json")}
    for snapshot in sorted(heads | set(names)):
        try:
            opened = Snapshot(cache.files, snapshot)
        except IntegrityError as error:
            found.append(
                {"id": snapshot, "parent": None, "names": sorted(names.get(snapshot, [])), "damaged": error.what}
            )
            continue
        head = opened.head
        found.append(
            {
                "id": opened.id,
                "names": sorted(names.get(opened.id, [])),
                "parent": head["parent"],
                "samples": len(opened),
                "buckets": len(opened.buckets),
                "left_out": sum(head["left_out"].values()),
                "bytes": sum(opened.shard_files().values()),
                "packed": opened.packed,
            }
        )
    return _by_age(found)


def _by_age(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parents before their children, otherwise by id."""
    known = {entry["id"]: entry for entry in found}

    def depth(entry: dict[str, Any]) -> int:
        steps = 0
        while (parent := known.get(entry["parent"] or "")) is not None and steps < len(known):
            entry, steps = parent, steps + 1
        return steps

    return sorted(found, key=lambda entry: (depth(entry), entry["id"] or ""))


def difference(one: Snapshot, other: Snapshot) -> Difference:
    """What `other` has that `one` has not, and so on. Samples are told apart by their id."""
    mine, theirs = _Columns(one), _Columns(other)
    at = np.argsort(mine.sample_id)
    place = np.minimum(np.searchsorted(mine.sample_id, theirs.sample_id, sorter=at), max(len(at) - 1, 0))
    rows = at[place] if len(at) else np.zeros(len(theirs.sample_id), np.int64)
    both = mine.sample_id[rows] == theirs.sample_id if len(at) else np.zeros(len(rows), bool)
    a, b = rows[both], np.flatnonzero(both)
    bucket = (mine.shape[a] != theirs.shape[b]).any(1)
    picture = (mine.key[a] != theirs.key[b]) & ~bucket
    counts = np.diff(mine.offsets)[a]
    captions = counts != np.diff(theirs.offsets)[b]
    same = np.flatnonzero(~captions)
    owner = np.repeat(same, counts[same])
    inner = np.arange(len(owner)) - np.repeat(np.cumsum(counts[same]) - counts[same], counts[same])
    left, right = mine.offsets[a[owner]] + inner, theirs.offsets[b[owner]] + inner
    odd = (mine.caption[left] != theirs.caption[right]) | (mine.weight[left] != theirs.weight[right])
    captions[owner[odd]] = True
    kinds = {"picture": picture, "bucket": bucket, "captions": captions}
    changed = [
        (int(b[i]), tuple(name for name, column in kinds.items() if column[i]))
        for i in np.flatnonzero(picture | bucket | captions)
    ]
    removed = np.ones(len(mine.sample_id), bool)
    removed[a] = False
    return Difference(np.flatnonzero(~both).tolist(), np.flatnonzero(removed).tolist(), changed)


class _Columns:
    """What is compared of a snapshot's samples, by row."""

    def __init__(self, snapshot: Snapshot):
        tables = list(snapshot.tables())
        whole = pa.concat_tables(tables) if tables else None
        sizes = np.array([[b.height, b.width] for b in snapshot.buckets], np.int64).reshape(-1, 2)
        self.shape = np.repeat(sizes, [b.samples for b in snapshot.buckets], axis=0)
        if whole is None:
            self.sample_id, self.key = np.empty(0, np.uint64), np.empty(0, "S16")
            self.offsets, self.caption, self.weight = np.zeros(1, np.int64), np.empty(0, "S16"), np.empty(0, np.float32)
            return
        self.sample_id, self.key = whole.column("sample_id").to_numpy(), fixed(whole.column("key"))
        lists = whole.column("captions")
        self.offsets = np.concatenate([[0], np.cumsum(pa.compute.list_value_length(lists).to_numpy())]).astype(np.int64)
        flat = pa.compute.list_flatten(lists)
        self.caption = fixed(pa.chunked_array([chunk.field("key") for chunk in flat.chunks], pa.binary(16)))
        self.weight = np.concatenate([chunk.field("weight").to_numpy() for chunk in flat.chunks])
