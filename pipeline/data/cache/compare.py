"""Compare snapshots: list those of a cache, and find the samples in which two of them differ.

`listed` reads heads only. `difference` reads all sample chunks of both snapshots, and the names of samples that differ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sana_pipe.base.errors import IntegrityError
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.encodings import pictures_of
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.cache.snapshot_samples import CHUNK_ROWS, Columns


@dataclass(frozen=True)
class Difference:
    """Rows that differ between two snapshots.

    Attributes:
        added: rows of the second.
        removed: rows of the first.
        changed: (row of the second, what changed). What: `picture` (other records of it), `bucket` (another size),
            `captions` (other records, weights or order), `bytes` (records of equal keys have other values, as after
            encoding on another kind of device).
        signals: kinds of records that only one of them has.
        encodings: kinds of records, in addition to those of the pictures themselves, that the two have by different
            encodings; they are not compared.
    """

    added: list[int]
    removed: list[int]
    changed: list[tuple[int, tuple[str, ...]]]
    signals: tuple[str, ...] = ()
    encodings: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed or self.signals or self.encodings)


def listed(cache: Cache) -> list[dict[str, Any]]:
    """All snapshots, parents first: `id`, `content` (see `Head.content_id`), `names`, `parent`, `samples`, `buckets`,
    `left_out` (items), `packed`, `bytes` of its shards. A snapshot or name that cannot be read has `id`, `parent`,
    `names` and `damaged`: the message."""
    names: dict[str, list[str]] = {}
    entries: list[dict[str, Any]] = []
    for name in cache.snapshot_names():
        try:
            if (pointed := cache.snapshot_of(name)) is not None:
                names.setdefault(pointed, []).append(name)
        except IntegrityError as error:
            entries.append({"id": None, "parent": None, "names": [name], "damaged": error.what})
    heads = {entry.removesuffix(".json") for entry in cache.files.names("snapshots") if entry.endswith(".json")}
    for snapshot_id in sorted(heads | set(names)):
        entry: dict[str, Any] = {"id": snapshot_id, "names": sorted(names.get(snapshot_id, [])), "parent": None}
        try:
            head = Snapshot(cache.files, snapshot_id).head
        except IntegrityError as error:
            entries.append({**entry, "damaged": error.what})
            continue
        entry |= {
            "parent": head.parent,
            "content": head.content_id,
            "samples": head.samples,
            "buckets": len(head.buckets),
            "left_out": sum(head.left_out.values()),
            "bytes": int(head.shard_sizes().sum()),
            "packed": head.folder is not None,
        }
        entries.append(entry)
    return _parents_first(entries)


def _parents_first(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parents before their children, otherwise by id."""
    by_id = {entry["id"]: entry for entry in entries}

    def depth(entry: dict[str, Any]) -> int:
        steps = 0
        while (parent := by_id.get(entry["parent"] or "")) is not None and steps < len(by_id):
            entry, steps = parent, steps + 1
        return steps

    return sorted(entries, key=lambda entry: (depth(entry), entry["id"] or ""))


def difference(first: Snapshot, second: Snapshot) -> Difference:
    """Say what changed from the first snapshot to the second. Samples are matched by id. Equal content ids mean equal
    samples, so these are not read then."""
    if first.head.content_id is not None and first.head.content_id == second.head.content_id:
        return Difference([], [], [])
    old, new = _compared(first), _compared(second)
    order = np.argsort(old.sample_id)
    places = np.minimum(np.searchsorted(old.sample_id, new.sample_id, sorter=order), len(order) - 1)
    candidates = order[places]
    common = old.sample_id[candidates] == new.sample_id
    a, b = candidates[common], np.flatnonzero(common)
    bucket = (_sizes(first)[a] != _sizes(second)[b]).any(1)
    picture, values = np.zeros(len(a), bool), np.zeros(len(a), bool)
    encodings, others = first.head.encodings_by_kind, second.head.encodings_by_kind
    lead = pictures_of(encodings.values())[0].kind
    both = old.pictures.keys() & new.pictures.keys()
    different = {kind for kind in both if kind != lead and encodings[kind] != others[kind]}
    for kind in both - different:
        before, after = old.pictures[kind], new.pictures[kind]
        same = before["key"][a] == after["key"][b]
        picture |= ~same & ~bucket
        values |= same & (before["checksum"][a] != after["checksum"][b])
    counts = np.diff(old.first)[a]
    captions = counts != np.diff(new.first)[b]
    comparable = np.flatnonzero(~captions)
    sample = np.repeat(comparable, counts[comparable])
    ends = np.cumsum(counts[comparable])
    inner = np.arange(len(sample)) - np.repeat(ends - counts[comparable], counts[comparable])
    left, right = old.first[a[sample]] + inner, new.first[b[sample]] + inner
    for name in ("key", "weight"):
        captions[sample[old.captions[name][left] != new.captions[name][right]]] = True
    equal = old.captions["key"][left] == new.captions["key"][right]
    values[sample[equal & (old.captions["checksum"][left] != new.captions["checksum"][right])]] = True
    kinds = {"picture": picture, "bucket": bucket, "captions": captions, "bytes": values}
    changed = [
        (int(b[i]), tuple(name for name, column in kinds.items() if column[i]))
        for i in np.flatnonzero(picture | bucket | captions | values)
    ]
    removed = np.ones(len(old.sample_id), bool)
    removed[a] = False
    signals = tuple(sorted(set(first.pictures) ^ set(second.pictures)))
    rows = np.flatnonzero(~common).tolist(), np.flatnonzero(removed).tolist()
    return Difference(*rows, changed, signals, tuple(sorted(different)))


def _compared(snapshot: Snapshot) -> Columns:
    """Return what is compared of all samples."""
    parts = list[Columns]()
    for start in range(0, len(snapshot), CHUNK_ROWS):
        part = snapshot.columns(np.arange(start, min(start + CHUNK_ROWS, len(snapshot))))
        pictures = {kind: {name: of[name] for name in ("key", "checksum")} for kind, of in part.pictures.items()}
        captions = {name: part.captions[name] for name in ("key", "checksum", "weight")}
        parts.append(replace(part, pictures=pictures, captions=captions))
    return Columns.join(parts)


def _sizes(snapshot: Snapshot) -> np.ndarray:
    """(height, width) of the samples by row."""
    sizes = np.array([[bucket.height, bucket.width] for bucket in snapshot.buckets])
    return np.repeat(sizes, [bucket.samples for bucket in snapshot.buckets], axis=0)
