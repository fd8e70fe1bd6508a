"""The numbers of a snapshot: buckets, crop loss, sources, captions, duplicates, items left out, storage, new samples.

What: `snapshot_figures` gives JSON values from the snapshot's head and tables and from the scans that the head names.
Why here: pages, scripts and tests read the same numbers. Rules that decide a number (crop loss, steps per epoch, kinds
of rejects) are those of `pipeline.images.buckets`, `pipeline.snapshots.join` and `pipeline.sources.reject_kinds`.
Price: all tables of the snapshot are read, chunk after chunk, in columns; the keys of all samples and captions (16
bytes each) and the scans' items are in memory to be compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.cache import index
from pipeline.cache.cache import MOVING, Cache
from pipeline.cache.keys import fixed
from pipeline.cache.layout import Paths
from pipeline.cache.snapshot import Bucket, BucketPart, Snapshot, picture_keys
from pipeline.config import BucketConfig
from pipeline.errors import CacheError, IntegrityError
from pipeline.images import buckets
from pipeline.reporting.further_figures import further_figures
from pipeline.signals.latent import LatentRecipe
from pipeline.signals.phash import HashRecipe
from pipeline.signals.text import TextRecipe
from pipeline.snapshots import near, near_samples
from pipeline.snapshots.join import epoch_steps
from pipeline.sources.reject_kinds import EXAMPLES, kind

CROP_EDGES = np.linspace(0.0, 0.5, 21)
"""Bins of the crop loss, shares of the picture's area; the last bin has the larger ones, too."""
QUANTILES = (0.5, 0.95)
SHOWN = 8
"""Samples of a group that are shown."""
COMPARED = 100_000
"""Samples up to which those that look the same are looked for: half a minute."""
REJECTED = ("rejected by the scan", "rejected while encoding", "caption rejected while encoding")
"""Beginnings of the reasons of `Head.left_out` that count rejects by kind."""


def snapshot_figures(cache: Cache, snapshot: Snapshot) -> dict[str, Any]:
    """All numbers of a snapshot: JSON values.

    `crop` is null, with `crop_missing`, where a scan is gone. `further` is null without further pictures. `new` is null
    for a snapshot without an earlier snapshot.

    Raises:
        IntegrityError: a table of the snapshot is missing or damaged.
    """
    head = snapshot.head
    sizes = _Sizes(cache, snapshot)
    lengths, captions_per_sample, latent_keys, caption_keys = [], Counter[int](), [], []
    sources = Counter[str]()
    first = 0
    starts = np.concatenate([[0], np.cumsum([bucket.samples for bucket in snapshot.buckets])])
    for samples, names in zip(snapshot.tables(), snapshot.name_tables(), strict=True):
        bucket = np.searchsorted(starts, np.arange(first, first + samples.num_rows), side="right") - 1
        first += samples.num_rows
        captions = _flat(samples.column("captions"))
        rows = captions.field("rows").to_numpy()
        lengths.append(np.bincount(rows, minlength=snapshot.recipe(TextRecipe).max_length + 1))
        counts, how_many = np.unique(pc.list_value_length(samples.column("captions")).to_numpy(), return_counts=True)
        captions_per_sample.update(dict(zip(counts.tolist(), how_many.tolist(), strict=True)))
        latent_keys.append(picture_keys(samples, LatentRecipe.kind))
        caption_keys.append(fixed(captions.field("key")))
        for entry in pc.value_counts(names.column("source")).to_pylist():
            sources[entry["values"]] += entry["counts"]
        sizes.add(names, bucket)
    return {
        "id": snapshot.id,
        "names": _names(cache, snapshot.id),
        "parent": head.parent,
        "packed": snapshot.packed,
        "samples": len(snapshot),
        "steps_per_epoch": sum(float(_steps(bucket, head.policies.small)[0]) for bucket in snapshot.buckets),
        "buckets": [_bucket(snapshot, i, sizes.mean(i)) for i in range(len(snapshot.buckets))],
        "crop": sizes.figures(),
        "crop_missing": sizes.missing,
        "sources": dict(sorted(sources.items(), key=lambda pair: (-pair[1], pair[0]))),
        "captions": _captions(snapshot, lengths, captions_per_sample),
        "duplicates": {"pictures": _repeated(latent_keys), "captions": _repeated(caption_keys)},
        "further": further_figures(snapshot),
        "visits": _visits(snapshot),
        "alike": _alike(snapshot),
        "left_out": [
            {"reason": reason, "samples": count}
            for reason, count in sorted(head.left_out.items(), key=lambda pair: (-pair[1], pair[0]))
        ],
        "rejects": rejects(cache, snapshot),
        "storage": _storage(cache, snapshot),
        "new": new_samples(cache, snapshot),
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


def _alike(snapshot: Snapshot) -> list[dict[str, Any]]:
    """The largest groups of pictures that look the same; [] without hashes, and of more than `COMPARED` samples."""
    if HashRecipe.kind not in snapshot.pictures or len(snapshot) > COMPARED:
        return []
    settings = BucketConfig.model_validate((snapshot.head.options or {}).get("bucket", {}))
    names = pa.concat_tables([table.select(["source", "item"]) for table in snapshot.name_tables()])
    rows = names.append_column("row", pa.array(np.arange(len(snapshot)))).group_by(["source", "item"])
    first = np.sort(rows.aggregate([("row", "min")]).column("row_min").to_numpy())  # of several resolutions
    member = near.groups(near_samples.hashes_of(snapshot)[first], settings.dedup_distance)
    sizes = np.bincount(member)
    largest = np.argsort(-sizes, kind="stable")[: near_samples.LARGEST]
    return [
        {"pictures": int(sizes[group]), "examples": _examples(snapshot, first[member == group][:SHOWN])}
        for group in largest.tolist()
        if sizes[group] > 1
    ]


def _examples(snapshot: Snapshot, rows: np.ndarray) -> list[dict[str, str]]:
    names = (snapshot.source_item(row) for row in rows.tolist())
    return [{"source": source, "item": item} for source, item in names]


def _names(cache: Cache, snapshot_id: str) -> list[str]:
    try:
        return cache.names_of(snapshot_id)
    except CacheError:  # a damaged name elsewhere; `status` names it
        return []


def _flat(column: pa.ChunkedArray) -> Any:
    """The structs of all lists in one array."""
    flat = pc.list_flatten(column)
    return flat.combine_chunks() if isinstance(flat, pa.ChunkedArray) else flat


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


class _Sizes:
    """Crop loss of the samples, from the sizes in the scans.

    Attributes:
        missing: why there are no sizes; None if all scans are there.
    """

    def __init__(self, cache: Cache, snapshot: Snapshot):
        self.shapes = np.array([[b.height, b.width] for b in snapshot.buckets], np.int64).reshape(-1, 2)
        self.missing: str | None = None
        self.scans: dict[str, tuple[pa.Array, np.ndarray, np.ndarray]] = {}
        self.sums, self.counts = np.zeros(len(self.shapes)), np.zeros(len(self.shapes), np.int64)
        self.histogram = np.zeros(len(CROP_EDGES) - 1, np.int64)
        self.largest, self.enlarged = 0.0, 0
        try:
            for source, digest in snapshot.head.sources.items():
                table = cache.table(digest)
                table = table.filter(pc.is_valid(table.column("width")))
                height, width = (table.column(name).to_numpy().astype(np.int64) for name in ("height", "width"))
                self.scans[source] = (table.column("item"), height, width)
        except IntegrityError as error:
            self.missing = error.what

    def add(self, names: pa.Table, bucket: np.ndarray) -> None:
        """Samples of a chunk. bucket: (n,) of each."""
        if self.missing is not None:
            return
        source, items = names.column("source"), names.column("item")
        for name, (known, height, width) in self.scans.items():
            chosen = pc.equal(source, name).to_numpy(zero_copy_only=False) if len(source) else np.zeros(0, bool)
            if not chosen.any():
                continue
            rows = pc.index_in(items.filter(pa.array(chosen)), known.cast(items.type))
            if rows.null_count:
                self.missing = f"the scan of source {name!r} does not list all of its samples"
                return
            at, of = rows.to_numpy(), bucket[chosen]
            fit = height[at], width[at], self.shapes[of].T
            scale, loss = buckets.upscale(*fit), buckets.crop_loss(*fit)
            self.sums += np.bincount(of, loss, len(self.sums))
            self.counts += np.bincount(of, minlength=len(self.counts))
            self.histogram += np.histogram(np.minimum(loss, CROP_EDGES[-1]), CROP_EDGES)[0]
            self.largest = max(self.largest, float(loss.max()))
            self.enlarged += int((scale > 1).sum())

    def mean(self, bucket: int) -> float | None:
        """Mean crop loss of a bucket; None if unknown."""
        if self.missing is not None or not self.counts[bucket]:
            return None
        return float(self.sums[bucket] / self.counts[bucket])

    def figures(self) -> dict[str, Any] | None:
        if self.missing is not None or not self.counts.sum():
            return None
        return {
            "mean": float(self.sums.sum() / self.counts.sum()),
            "largest": self.largest,
            "enlarged": self.enlarged,
            "edges": CROP_EDGES.tolist(),
            "samples": self.histogram.tolist(),
        }


def _captions(snapshot: Snapshot, lengths: list[np.ndarray], per_sample: Counter[int]) -> dict[str, Any]:
    """Numbers of captions by tokens. A caption with `max_length` tokens was cut, or just fits."""
    longest, count = snapshot.recipe(TextRecipe).max_length, 0
    by_tokens = np.zeros(longest + 1, np.int64)
    for part in lengths:
        by_tokens += part[: longest + 1]
    count = int(by_tokens.sum())
    below = np.cumsum(by_tokens)
    quantiles = {f"p{round(100 * q)}": int(np.searchsorted(below, q * count)) for q in QUANTILES} if count else {}
    return {
        "captions": count,
        "per_sample": {str(number): samples for number, samples in sorted(per_sample.items())},
        "max_length": longest,
        "at_max_length": int(by_tokens[longest]),
        "share_at_max_length": float(by_tokens[longest] / count) if count else 0.0,
        "mean_tokens": float(np.arange(longest + 1) @ by_tokens / count) if count else 0.0,
        **quantiles,
        "by_tokens": by_tokens.tolist(),
    }


def _repeated(parts: list[np.ndarray]) -> dict[str, int]:
    """How many keys are distinct, and how many entries have a key that occurs more than once."""
    keys = np.concatenate([np.empty(0, "S16"), *parts])
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
            table = cache.table(digest).select(["item", "reject"])
        except IntegrityError:  # `crop_missing` says it
            continue
        table = table.filter(pc.is_valid(table.column("reject")))
        for batch in table.to_batches(max_chunksize=4096):
            for item, reason in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True):
                yield REJECTED[0], source, item, reason
    for stage, recipe in ((REJECTED[1], snapshot.recipe(LatentRecipe)), (REJECTED[2], snapshot.recipe(TextRecipe))):
        for plan in cache.files.numbers(Paths.plans(recipe.name)):
            for commit in index.each_commit(cache.files, recipe.name, plan):
                for reject in commit.rejects:
                    yield stage, None, reject.item, reject.reason


def _storage(cache: Cache, snapshot: Snapshot) -> dict[str, Any]:
    """Bytes by kind, of the shards that the snapshot names, which may hold other records, too. A packed snapshot has
    all kinds in its joint shards, counted under each."""
    tables = [Paths.table(digest, "arrow") for digest in snapshot.head.tables()]
    return {
        **{
            recipe.kind: {
                "shards": len(snapshot.head.shards[recipe.kind]),
                "bytes": int(snapshot.head.shards[recipe.kind].sizes.sum()),
                "storage": recipe.storage,
            }
            for recipe in snapshot.head.recipes_by_kind.values()
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


def new_samples(cache: Cache, snapshot: Snapshot) -> dict[str, Any] | None:
    """The samples that `earlier` lacks, against the others: counts by bucket and source, and tokens per caption."""
    before = earlier(cache, snapshot)
    if before is None:
        return None
    old_ids = np.sort(np.concatenate([np.empty(0, np.uint64), *before.sample_ids()]))
    starts = np.concatenate([[0], np.cumsum([bucket.samples for bucket in snapshot.buckets])])
    counts = np.zeros((2, len(snapshot.buckets)), np.int64)
    sources: dict[str, list[int]] = {}
    tokens, captions, first = np.zeros(2, np.int64), np.zeros(2, np.int64), 0
    for samples, names in zip(snapshot.tables(), snapshot.name_tables(), strict=True):
        new = ~_contains(old_ids, samples.column("sample_id").to_numpy())
        bucket = np.searchsorted(starts, np.arange(first, first + len(new)), side="right") - 1
        first += len(new)
        lists = samples.column("captions")
        of_caption = np.repeat(new, pc.list_value_length(lists).to_numpy())
        rows = _flat(lists).field("rows").to_numpy()
        for side, chosen, chosen_captions in ((0, new, of_caption), (1, ~new, ~of_caption)):
            counts[side] += np.bincount(bucket[chosen], minlength=counts.shape[1])
            tokens[side] += rows[chosen_captions].sum()
            captions[side] += int(chosen_captions.sum())
            for entry in pc.value_counts(names.column("source").filter(pa.array(chosen))).to_pylist():
                sources.setdefault(entry["values"], [0, 0])[side] += entry["counts"]
    mean = [float(total / number) if number else None for total, number in zip(tokens, captions, strict=True)]
    new_count, old_count = counts.sum(1).tolist()
    return {
        "earlier": before.id,
        "earlier_names": _names(cache, before.id),
        "new": new_count,
        "old": old_count,
        "removed": len(before) - old_count,
        "buckets": [
            {"height": bucket.height, "width": bucket.width, "new": int(counts[0, i]), "old": int(counts[1, i])}
            for i, bucket in enumerate(snapshot.buckets)
        ],
        "sources": {name: {"new": pair[0], "old": pair[1]} for name, pair in sorted(sources.items())},
        "mean_tokens": {"new": mean[0], "old": mean[1]},
    }


def _contains(ordered: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Which values are in a sorted array: (n,) bool."""
    if not len(ordered):
        return np.zeros(len(values), bool)
    return ordered[np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)] == values


def bucket_name(bucket: dict[str, Any]) -> str:
    return f"{bucket['height']}x{bucket['width']}"
