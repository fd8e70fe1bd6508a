"""The numbers of a snapshot: buckets, crop loss, sources, captions, duplicates, items left out, storage, new samples.

What: `snapshot_figures` gives JSON values from the snapshot's head and tables and from the scans that the head names.
Why here: pages, scripts and tests read the same numbers. Rules that decide a number (crop loss, steps per epoch, kinds
of rejects) are those of `images.buckets`, `snapshots.assemble` and `sources.reject_kinds`.
Price: all tables of the snapshot are read, mapped and in columns; the keys of all samples and captions (16 bytes each)
and the scans' items are in memory to be compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.base.errors import CacheError, IntegrityError
from pipeline.data.cache import index
from pipeline.data.cache.cache import MOVING, Cache
from pipeline.data.cache.keys import fixed
from pipeline.data.cache.layout import Paths
from pipeline.data.cache.snapshot import Snapshot
from pipeline.data.cache.snapshot_head import Bucket, BucketPart
from pipeline.data.cache.snapshot_samples import picture_keys
from pipeline.data.images import buckets
from pipeline.data.signals.latent import LatentEncoding
from pipeline.data.signals.phash import ANEW, HashEncoding
from pipeline.data.signals.text import TextEncoding
from pipeline.data.snapshots import near, near_samples
from pipeline.data.snapshots.assemble import epoch_steps
from pipeline.data.sources.reject_kinds import EXAMPLES, kind
from pipeline.tools.reporting.further_figures import further_figures

CROP_EDGES = np.linspace(0.0, 0.5, 21)
"""Bins of the crop loss, shares of the picture's area; the last bin has the larger ones, too."""
SHOWN = 8
"""Samples of a group that are shown."""
COMPARED = 100_000
"""Samples up to which those that look the same are looked for: half a minute."""
REJECTED = ("rejected by the scan", "rejected while encoding", "caption rejected while encoding")
"""Beginnings of the reasons of `Head.left_out` that count rejects by kind."""


def snapshot_figures(cache: Cache, snapshot: Snapshot) -> dict[str, Any]:
    """All numbers of a snapshot: JSON values.

    `crop` is null, with `crop_missing`, where a scan is gone. `further` is null without control pictures and masks.
    `new` is null for a snapshot without an earlier snapshot.

    Raises:
        IntegrityError: a table of the snapshot is missing or damaged.
    """
    head = snapshot.head
    samples, names = pa.concat_tables(snapshot.tables()), pa.concat_tables(snapshot.name_tables())
    bucket = np.repeat(np.arange(len(snapshot.buckets)), [each.samples for each in snapshot.buckets])
    crop, by_bucket, missing = _crop(cache, snapshot, names, bucket)
    alike, not_compared = _alike(snapshot, names)
    caption_keys = pc.struct_field(pc.list_flatten(samples.column("captions")), "key")
    return {
        "id": snapshot.id,
        "names": _names(cache, snapshot.id),
        "parent": head.parent,
        "packed": snapshot.packed,
        "samples": len(snapshot),
        "steps_per_epoch": sum(float(_steps(bucket, head.policies.small)[0]) for bucket in snapshot.buckets),
        "buckets": [_bucket(snapshot, i, mean) for i, mean in enumerate(by_bucket)],
        "crop": crop,
        "crop_missing": missing,
        "sources": dict(sorted(_counts(names.column("source")).items(), key=lambda pair: (-pair[1], pair[0]))),
        "captions": _captions(snapshot, samples.column("captions")),
        "duplicates": {
            "pictures": _repeated(picture_keys(samples, LatentEncoding.kind)),
            "captions": _repeated(fixed(caption_keys)),
        },
        "further": further_figures(snapshot),
        "visits": _visits(snapshot),
        "alike": alike,
        "not_compared": not_compared,
        "left_out": [
            {"reason": reason, "samples": count}
            for reason, count in sorted(head.left_out.items(), key=lambda pair: (-pair[1], pair[0]))
        ],
        "rejects": rejects(cache, snapshot),
        "storage": _storage(cache, snapshot),
        "new": _new_samples(cache, snapshot, samples, names, bucket),
    }


def _visits(snapshot: Snapshot) -> list[dict[str, Any]]:
    """The samples by their visits per epoch, the most first; [] where all have one."""
    ranges: dict[Fraction, list[np.ndarray]] = {}
    first = 0
    for bucket in snapshot.buckets:
        for part in bucket.parts or (BucketPart(bucket.samples, Fraction(1)),):
            ranges.setdefault(part.weight, []).append(np.arange(first, first + part.samples))
            first += part.samples
    rows = {weight: np.concatenate(ranges[weight]) for weight in sorted(ranges, reverse=True)}
    visits = sum((weight * len(some) for weight, some in rows.items()), Fraction(0))
    return [
        {
            "visits": float(weight),
            "samples": len(some),
            "share": len(some) / len(snapshot),
            "share_of_visits": float(weight * len(some) / visits),
            "examples": _examples(snapshot, some[np.linspace(0, len(some) - 1, min(SHOWN, len(some))).astype(int)]),
        }
        for weight, some in (rows.items() if rows.keys() - {1} else ())
    ]


def _alike(snapshot: Snapshot, names: pa.Table) -> tuple[list[dict[str, Any]], str]:
    """The largest groups of pictures that look the same; and what was not compared, "" if nothing."""
    if HashEncoding.kind not in snapshot.pictures:
        return [], ""
    if not near_samples.has_hashes(snapshot.head.encodings_by_kind.values()):
        return [], f"The pictures were not compared: their hashes are of an earlier version; {ANEW} makes them again."
    if len(snapshot) > COMPARED:
        return [], f"The pictures were not compared, since there are more than {COMPARED:,} samples."
    rows = (
        names.select(["source", "item"])
        .append_column("row", pa.array(np.arange(len(snapshot))))
        .group_by(["source", "item"])
    )
    first = np.sort(rows.aggregate([("row", "min")]).column("row_min").to_numpy())  # of several resolutions
    hashed = near_samples.hashes_of(snapshot)[first]
    member, flat = near.groups(hashed, near.DISTANCE), int(near_samples.is_flat(hashed).sum())
    sizes = np.bincount(member)
    largest = np.argsort(-sizes, kind="stable")[: near_samples.LARGEST]
    groups = [
        {"pictures": int(sizes[group]), "examples": _examples(snapshot, first[member == group][:SHOWN])}
        for group in largest.tolist()
        if sizes[group] > 1
    ]
    return groups, f"{flat:,} pictures have too little detail to be compared." if flat else ""


def _examples(snapshot: Snapshot, rows: np.ndarray) -> list[dict[str, str]]:
    names = (snapshot.source_item(row) for row in rows.tolist())
    return [{"source": source, "item": item} for source, item in names]


def _names(cache: Cache, snapshot_id: str) -> list[str]:
    try:
        return cache.names_of(snapshot_id)
    except CacheError:  # a damaged name elsewhere; `status` names it
        return []


def _counts(column: pa.ChunkedArray) -> dict[str, int]:
    """Count how often each text occurs."""
    return {entry["values"]: entry["counts"] for entry in pc.value_counts(column).to_pylist()}


def _steps(bucket: Bucket, small: str) -> tuple[float, str]:
    parts = bucket.parts or ()
    visits = sum((part.samples * part.weight for part in parts), Fraction(0)) if parts else Fraction(bucket.samples)
    return epoch_steps(visits, bucket.batch, small)


def _bucket(snapshot: Snapshot, number: int, crop: float | None) -> dict[str, Any]:
    bucket = snapshot.buckets[number]
    steps, note = _steps(bucket, snapshot.head.policies.small)
    return {
        "height": bucket.height,
        "width": bucket.width,
        "samples": bucket.samples,
        "batch": bucket.batch,
        "steps": float(steps),
        "crop": crop,
        "note": note,
    }


def _crop(
    cache: Cache, snapshot: Snapshot, names: pa.Table, bucket: np.ndarray
) -> tuple[dict[str, Any] | None, list[float | None], str | None]:
    """Crop loss of the samples, by the sizes in the scans: its figures, its mean by bucket, and why it is unknown.

    bucket: (n,) of each sample.
    """
    shapes = np.array([[each.height, each.width] for each in snapshot.buckets], np.int64)
    loss, scale, known = np.zeros(len(bucket)), np.zeros(len(bucket)), np.zeros(len(bucket), bool)
    try:
        for source, digest in snapshot.head.sources.items():
            table = cache.table(digest, ["item", "height", "width"])
            table = table.filter(pc.is_valid(table.column("width")))
            chosen = pc.equal(names.column("source"), source).to_numpy()
            items = names.column("item").filter(pa.array(chosen))
            rows = pc.index_in(items, table.column("item").cast(items.type))
            if rows.null_count:
                raise IntegrityError(f"the scan of source {source!r} does not list all of its samples")
            sides = (table.column(side).to_numpy().astype(np.int64)[rows.to_numpy()] for side in ("height", "width"))
            fit = *sides, shapes[bucket[chosen]].T
            scale[chosen], loss[chosen], known[chosen] = buckets.upscale(*fit), buckets.crop_loss(*fit), True
    except IntegrityError as error:
        return None, [None] * len(shapes), error.what
    counts, sums = np.bincount(bucket[known], minlength=len(shapes)), np.bincount(bucket, loss, len(shapes))
    by_bucket = [float(total / count) if count else None for total, count in zip(sums, counts, strict=True)]
    if not known.any():
        return None, by_bucket, None
    figures = {
        "mean": float(loss[known].mean()),
        "largest": float(loss.max()),
        "enlarged": int((scale > 1).sum()),
        "edges": CROP_EDGES.tolist(),
        "samples": np.histogram(np.minimum(loss[known], CROP_EDGES[-1]), CROP_EDGES)[0].tolist(),
    }
    return figures, by_bucket, None


def _captions(snapshot: Snapshot, lists: pa.ChunkedArray) -> dict[str, Any]:
    """Numbers of captions by tokens. A caption with `max_length` tokens was cut, or just fits."""
    longest = snapshot.encoding(TextEncoding).max_length
    tokens = pc.struct_field(pc.list_flatten(lists), "rows").to_numpy()
    by_tokens, count = np.bincount(tokens, minlength=longest + 1), max(1, len(tokens))
    numbers, samples = np.unique(pc.list_value_length(lists).to_numpy(), return_counts=True)
    median, most = np.quantile(tokens, (0.5, 0.95), method="inverted_cdf") if len(tokens) else (0, 0)
    return {
        "captions": len(tokens),
        "per_sample": dict(zip(map(str, numbers.tolist()), samples.tolist(), strict=True)),
        "max_length": longest,
        "at_max_length": int(by_tokens[longest]),
        "share_at_max_length": float(by_tokens[longest] / count),
        "mean_tokens": float(tokens.sum() / count),
        "p50": int(median),
        "p95": int(most),
        "by_tokens": by_tokens.tolist(),
    }


def _repeated(keys: np.ndarray) -> dict[str, int]:
    """Count the keys that are distinct, and how many entries have a key that occurs more than once."""
    _, counts = np.unique(keys, return_counts=True)
    return {
        "entries": len(keys),
        "distinct": len(counts),
        "repeated": int(counts[counts > 1].sum()),
        "most": int(counts.max(initial=0)),
    }


def rejects(cache: Cache, snapshot: Snapshot) -> list[dict[str, Any]]:
    """The rejects that the snapshot counted: `stage`, `kind`, `samples`, and as `examples` a few items with the
    `source` (null if the record does not say it) and `item`."""
    wanted: dict[tuple[str, str], int] = {}
    for reason, count in snapshot.head.left_out.items():
        stage, found, name = reason.partition(": ")
        if found and stage in REJECTED:
            wanted[stage, name] = count
    examples: dict[tuple[str, str], list[dict[str, str | None]]] = {key: [] for key in wanted}
    lacking = set(wanted)
    for stage, source, item, reason in _rejected_items(cache, snapshot) if wanted else ():
        key = (stage, kind(item, reason))
        if key in lacking:
            examples[key].append({"source": source, "item": item})
            if len(examples[key]) == min(EXAMPLES, wanted[key]):
                lacking.discard(key)
                if not lacking:
                    break
    ordered = sorted(wanted.items(), key=lambda pair: (-pair[1], pair[0]))
    return [
        {"stage": stage, "kind": name, "samples": count, "examples": examples[stage, name]}
        for (stage, name), count in ordered
    ]


def _rejected_items(cache: Cache, snapshot: Snapshot) -> Iterator[tuple[str, str | None, str, str]]:
    """(stage, source, item, reason) of rejects that the cache still lists."""
    for source, digest in snapshot.head.sources.items():
        try:
            table = cache.table(digest, ["item", "reject"])
        except IntegrityError:  # `crop_missing` says it
            continue
        table = table.filter(pc.is_valid(table.column("reject")))
        for batch in table.to_batches(max_chunksize=4096):
            for item, reason in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True):
                yield REJECTED[0], source, item, reason
    for stage, encoding in (
        (REJECTED[1], snapshot.encoding(LatentEncoding)),
        (REJECTED[2], snapshot.encoding(TextEncoding)),
    ):
        for plan in cache.files.numbers(Paths.plans(encoding.name)):
            for commit in index.each_commit(cache.files, encoding.name, plan):
                for reject in commit.rejects:
                    yield stage, None, reject.item, reject.reason


def _storage(cache: Cache, snapshot: Snapshot) -> dict[str, Any]:
    """Bytes by kind, of the shards that the snapshot names, which may hold other records, too. A packed snapshot has
    all kinds in its joint shards, counted under each."""
    tables = [Paths.table(digest, "arrow") for digest in snapshot.head.tables()]
    return {
        **{
            encoding.kind: {
                "shards": len(snapshot.head.shards[encoding.kind]),
                "bytes": int(snapshot.head.shards[encoding.kind].sizes.sum()),
                "storage": encoding.storage,
            }
            for encoding in snapshot.head.encodings_by_kind.values()
        },
        "shards_bytes": int(snapshot.shard_sizes().sum()),
        "tables_bytes": sum(cache.files.sizes(tables).values()),
    }


def earlier(cache: Cache, snapshot: Snapshot) -> Snapshot | None:
    """The previous snapshot: the latest with a permanent name, else the latest; None if there is none. A packed
    snapshot counts as its source."""
    current = snapshot.head.parent if snapshot.packed else snapshot.id
    history = cache.history("latest")
    before = history[: history.index(current)] if current in history else [snapshot.head.parent]
    last = None
    for snapshot_id in dict.fromkeys(reversed(before)):
        if snapshot_id is None or snapshot_id in (snapshot.id, current):
            continue
        try:
            candidate = Snapshot(cache.files, snapshot_id)
        except IntegrityError:  # removed by gc
            continue
        if set(_names(cache, snapshot_id)) - set(MOVING):
            return candidate
        last = last or candidate
    return last


def _new_samples(
    cache: Cache, snapshot: Snapshot, samples: pa.Table, names: pa.Table, bucket: np.ndarray
) -> dict[str, Any] | None:
    """The samples that `earlier` lacks, against the others: counts by bucket and source, and tokens per caption.

    bucket: (n,) of each sample.
    """
    before = earlier(cache, snapshot)
    if before is None:
        return None
    old = np.isin(samples.column("sample_id").to_numpy(), np.concatenate([*before.sample_ids()]))
    lists, sides = samples.column("captions"), {"new": ~old, "old": old}
    tokens, captions = pc.struct_field(pc.list_flatten(lists), "rows").to_numpy(), pc.list_value_length(lists)
    of_side = {side: tokens[np.repeat(chosen, captions.to_numpy())] for side, chosen in sides.items()}
    by_bucket = {side: np.bincount(bucket[chosen], minlength=len(snapshot.buckets)) for side, chosen in sides.items()}
    by_source = {side: _counts(names.column("source").filter(pa.array(chosen))) for side, chosen in sides.items()}
    return {
        "earlier": before.id,
        "earlier_names": _names(cache, before.id),
        "new": int((~old).sum()),
        "old": int(old.sum()),
        "removed": len(before) - int(old.sum()),
        "buckets": [
            {"height": each.height, "width": each.width, **{side: int(by_bucket[side][i]) for side in sides}}
            for i, each in enumerate(snapshot.buckets)
        ],
        "sources": {
            name: {side: by_source[side].get(name, 0) for side in sides}
            for name in sorted(by_source["new"].keys() | by_source["old"].keys())
        },
        "mean_tokens": {side: float(some.mean()) if len(some) else None for side, some in of_side.items()},
    }


def bucket_name(bucket: dict[str, Any]) -> str:
    return f"{bucket['height']}x{bucket['width']}"
