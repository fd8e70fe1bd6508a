"""Publish a snapshot: bring the shards of other caches, write its chunks and its head, and say what it holds."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np

from sana_pipe.data.cache.adopt import adopt, bring
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.cache.snapshot_head import Head, check_sizes
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.snapshots import selection
from sana_pipe.data.snapshots.frames import pieces
from sana_pipe.data.snapshots.inputs import Inputs
from sana_pipe.data.snapshots.making import Made


def publish(
    made: Made, inputs: Inputs, dry_run: bool, name: str | None, move: bool, latest: bool = True
) -> dict[str, Any]:
    """Adopt the shards of other caches and publish the snapshot; returns the report that `bucket` prints.

    Raises:
        IntegrityError: a file that the snapshot would name is missing, or a shard is of another size.
        UserError: the name is taken.
    """
    cache = inputs.caches[0]
    head = replace(made.assembled.head, options=inputs.options, leaked=made.leaked or None)
    assembled = replace(made.assembled, head=head)
    adopted_bytes = _adopt(made, inputs, dry_run)
    before = snapshot_id = content = None
    if dry_run:
        _check_shards(made, inputs)
        if name is not None and not move and cache.snapshot_of(name) is not None:
            cache.check_taken(assembled.written(None), name)
    else:
        before = cache.snapshot_of("latest")
        snapshot_id = cache.add_snapshot(assembled.written(cache.files), name, latest=latest, move=move)
        content = Head.read(cache.files, snapshot_id).content_id  # an equal snapshot that was there may state none
    if made.memory is not None and not dry_run:
        made.memory.write(cache.files)
    sources, rows = made.joined.sources, made.assembled.report
    lists = [None if dry_run else cache.files.where(groups.write(cache.files)) for groups in made.duplicates]
    counts = np.zeros(len(sources), np.int64)
    for piece in pieces(len(made.frame)):  # numpy counts in a copy
        counts += np.bincount(made.frame.source[piece], minlength=len(sources))
    # a picture may be chosen in several pairs, of which bucket.dedup leaves none out
    repeated = 0 if made.frame.pairs else selection.repeated(made.joined, made.frame, inputs.records)
    return {
        "snapshot": snapshot_id,
        "content": content,
        "unchanged": snapshot_id is not None and snapshot_id == before,
        "name": name,
        "samples": head.samples,
        "controls_and_masks": [kind for kind in made.frame.pictures if kind != LatentEncoding.kind],
        "repeated_pictures": repeated,
        "steps_per_epoch": sum(float(row.steps) for row in rows),
        "buckets": [{**asdict(row), "steps": float(row.steps), "crop": float(row.crop)} for row in rows],
        "sources": dict(zip(sources, counts.tolist(), strict=True)),
        "mixture": [asdict(source) for source in made.assembled.mixture],
        "left_out": [
            {
                "reason": reason,
                "samples": count,
                "keep": made.joined.keep.get(reason),
                **({"examples": examples} if (examples := made.joined.examples.get(reason)) else {}),
            }
            for reason, count in head.left_out.items()
        ],
        "adopted_bytes": adopted_bytes,
        "repeats": made.joined.repeats,
        "duplicates": [
            {**groups.report(), "list": where} for groups, where in zip(made.duplicates, lists, strict=True)
        ],
        "leaked": made.leaked,
        "balance": made.balance,
        "groups": made.groups,
        "metadata": made.joined.metadata,
    }


def _check_shards(made: Made, inputs: Inputs) -> None:
    """Raise IntegrityError if a shard is missing, in whichever cache it is, or of another size."""
    head = made.assembled.head
    for index in inputs.records.indexes.values():
        cache_of = dict(zip(index.shards, index.caches, strict=True))
        for number, cache in enumerate(inputs.caches):
            shards = zip(head.shards[index.kind], head.shards[index.kind].sizes.tolist(), strict=True)
            wanted = ((head.shard_path(index.kind, name), size) for name, size in shards if cache_of[name] == number)
            check_sizes(cache.files, wanted)


def _adopt(made: Made, inputs: Inputs, dry_run: bool) -> int:
    """Bring the shards and scans of other caches into the first cache. Returns the bytes of these shards."""
    head, (cache, *others) = made.assembled.head, inputs.caches
    total = 0
    for index in inputs.records.indexes.values():
        cache_of = dict(zip(index.shards, index.caches, strict=True))
        for number, other in enumerate(others, start=1):
            shards = zip(head.shards[index.kind], head.shards[index.kind].sizes.tolist(), strict=True)
            sizes = {name: size for name, size in shards if cache_of[name] == number}
            total += sum(sizes.values())
            if not dry_run:
                adopt(cache, other, index.encoding, set(sizes))
    for other in () if dry_run else others:
        tables = {body["table"] for source in other.sources() if (body := other.last_scan(source)) is not None}
        for digest in tables & set(head.sources.values()):
            bring(cache.files, other.files, Paths.table(digest, "parquet"), digest)
            cache.files.duplicate(Paths.table(digest, "parquet"))
    return total
