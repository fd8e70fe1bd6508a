"""The numbers of a snapshot: buckets, crop loss, sources, captions, duplicates, items left out, storage, new samples.

What: `snapshot_figures` computes them from the snapshot's head and tables and from the scans that the head names.
Why here: pages, scripts and tests read the same numbers. Rules that decide a number (crop loss, steps per epoch, kinds
of rejects) are those of `images.buckets`, `snapshots.assemble` and `sources.reject_kinds`.
Price: all tables of the snapshot are read, mapped and in columns; the keys of all samples and captions (16 bytes each)
and the scans' items are in memory to be compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sana_pipe.base.errors import CacheError, IntegrityError
from sana_pipe.data.cache import index
from sana_pipe.data.cache.cache import MOVING, Cache
from sana_pipe.data.cache.keys import fixed
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.cache.snapshot_head import Bucket, BucketPart
from sana_pipe.data.cache.snapshot_samples import picture_keys
from sana_pipe.data.images import buckets
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.signals.phash import ANEW, HashEncoding
from sana_pipe.data.signals.text import TextEncoding
from sana_pipe.data.snapshots import near, near_samples
from sana_pipe.data.snapshots.assemble import SourceShare, epoch_steps, mixture
from sana_pipe.data.sources.reject_kinds import EXAMPLES, kind
from sana_pipe.tools.reporting.controls_and_masks import ControlsAndMasks, controls_and_masks
from sana_pipe.tools.reporting.json_values import INLINE
from sana_pipe.tools.reporting.source_pictures import Embedded

CROP_EDGES = np.linspace(0.0, 0.5, 21)
"""Bins of the crop loss, shares of the picture's area; the last bin has the larger ones, too."""
SHOWN = 8
"""Samples of a group that are shown."""
COMPARED = 100_000
"""Samples up to which those that look the same are looked for: half a minute."""
REJECTED = ("rejected by the scan", "rejected while encoding", "caption rejected while encoding")
"""Beginnings of the reasons of `Head.left_out` that count rejects by kind."""


@dataclass(frozen=True)
class Example:
    """An item that an entry counts. source: None: the record does not name it. picture: on a page."""

    source: str | None
    item: str
    picture: Embedded | None = None


@dataclass(frozen=True)
class BucketFigures:
    """A bucket. steps: of an epoch. crop: the mean crop loss, if it is known. note: on the steps."""

    height: int
    width: int
    samples: int
    batch: int
    steps: float
    crop: float | None
    note: str

    @property
    def name(self) -> str:
        return f"{self.height}x{self.width}"


@dataclass(frozen=True)
class CropFigures:
    """The crop loss, shares of a picture's area. enlarged: how many pictures are. samples: between the edges."""

    mean: float
    largest: float
    enlarged: int
    edges: list[float]
    samples: list[int]


@dataclass(frozen=True)
class CaptionFigures:
    """The captions. per_sample: samples by their number of captions. by_tokens: captions by their number of tokens."""

    captions: int
    per_sample: dict[str, int]
    max_length: int
    at_max_length: int
    share_at_max_length: float
    mean_tokens: float
    p50: int
    p95: int
    by_tokens: list[int]


@dataclass(frozen=True)
class Repeats:
    """The keys of pictures or captions. repeated: entries whose key occurs more than once; most: how often at most."""

    entries: int
    distinct: int
    repeated: int
    most: int


@dataclass(frozen=True)
class Duplicates:
    """The repeats of pictures and of captions."""

    pictures: Repeats
    captions: Repeats


@dataclass(frozen=True)
class Visits:
    """The samples with so many visits per epoch, and their shares of all samples and of all visits."""

    visits: float
    samples: int
    share: float
    share_of_visits: float
    examples: list[Example]


@dataclass(frozen=True)
class Alike:
    """A group of pictures that look the same. pictures: how many."""

    pictures: int
    examples: list[Example]


@dataclass(frozen=True)
class LeftOut:
    """The number of samples that were left out for a reason."""

    reason: str
    samples: int


@dataclass(frozen=True)
class Reject:
    """The rejects of a kind. stage: of `REJECTED`."""

    stage: str
    kind: str
    samples: int
    examples: list[Example]


@dataclass(frozen=True)
class KindStorage:
    """The shards of a kind of record."""

    shards: int
    bytes: int
    storage: str


@dataclass(frozen=True)
class StorageFigures:
    """The bytes of a snapshot. kinds: by kind of record, of the shards that the snapshot names, which may hold other
    records, too. A packed snapshot has all kinds in its joint shards, counted under each."""

    kinds: dict[str, KindStorage] = field(metadata=INLINE)
    shards_bytes: int
    tables_bytes: int


@dataclass(frozen=True)
class NewAndOld:
    """Samples by whether the earlier snapshot has them."""

    new: int
    old: int


@dataclass(frozen=True)
class NewInBucket:
    """The new and the old samples of a bucket."""

    height: int
    width: int
    new: int
    old: int

    @property
    def name(self) -> str:
        return f"{self.height}x{self.width}"


@dataclass(frozen=True)
class MeanTokens:
    """The tokens per caption of new and of old samples; None without samples."""

    new: float | None
    old: float | None


@dataclass(frozen=True)
class NewSamples:
    """The samples against those of an earlier snapshot. earlier: its id. removed: samples that only it has."""

    earlier: str
    earlier_names: list[str]
    new: int
    old: int
    removed: int
    buckets: list[NewInBucket]
    sources: dict[str, NewAndOld]
    mean_tokens: MeanTokens


@dataclass(frozen=True)
class HeldOutFigures:
    """The rule of the held-out part, as of `cache.snapshot_head.HeldOut`."""

    share: float
    side: str
    group: str | None


@dataclass(frozen=True)
class SnapshotFigures:
    """All numbers of a snapshot.

    Attributes:
        crop: None, with the reason in `crop_missing`, where a scan is missing.
        sources: samples by source.
        mixture: weight, visits and share of each source.
        heldout: None: nothing was held out.
        rules: as of `Head.options`; None: an earlier version made the snapshot.
        controls_and_masks: None without any.
        not_compared: a sentence about pictures that were not looked at for `alike`.
        new: None without an earlier snapshot.
    """

    id: str
    content: str | None
    names: list[str]
    named: dict[str, str] | None
    parent: str | None
    packed: bool
    samples: int
    steps_per_epoch: float
    buckets: list[BucketFigures]
    crop: CropFigures | None
    crop_missing: str | None
    sources: dict[str, int]
    mixture: list[SourceShare]
    heldout: HeldOutFigures | None
    rules: dict[str, dict[str, Any]] | None
    captions: CaptionFigures
    duplicates: Duplicates
    controls_and_masks: ControlsAndMasks | None
    visits: list[Visits]
    alike: list[Alike]
    not_compared: str
    left_out: list[LeftOut]
    rejects: list[Reject]
    storage: StorageFigures
    new: NewSamples | None


def snapshot_figures(cache: Cache, snapshot: Snapshot) -> SnapshotFigures:
    """Compute all numbers of a snapshot.

    Raises:
        IntegrityError: a table of the snapshot is missing or damaged.
    """
    head = snapshot.head
    samples, names = pa.concat_tables(snapshot.tables()), pa.concat_tables(snapshot.name_tables())
    bucket = np.repeat(np.arange(len(snapshot.buckets)), [each.samples for each in snapshot.buckets])
    crop, by_bucket, missing = _crop(cache, snapshot, names, bucket)
    alike, not_compared = _alike(snapshot, names)
    caption_keys = pc.struct_field(pc.list_flatten(samples.column("captions")), "key")
    return SnapshotFigures(
        id=snapshot.id,
        content=head.content_id,
        names=_names(cache, snapshot.id),
        named=cache.first_named(snapshot.id),
        parent=head.parent,
        packed=snapshot.packed,
        samples=len(snapshot),
        steps_per_epoch=sum(float(_steps(bucket, head.policies.small)[0]) for bucket in snapshot.buckets),
        buckets=[_bucket(snapshot, i, mean) for i, mean in enumerate(by_bucket)],
        crop=crop,
        crop_missing=missing,
        sources=dict(sorted(_counts(names.column("source")).items(), key=lambda pair: (-pair[1], pair[0]))),
        mixture=_mixture(snapshot, names),
        heldout=None if (rule := head.policies.heldout) is None else HeldOutFigures(rule.share, rule.side, rule.group),
        rules=None if head.options is None else {section: dict(values) for section, values in head.options.items()},
        captions=_captions(snapshot, samples.column("captions")),
        duplicates=Duplicates(
            pictures=_repeated(picture_keys(samples, LatentEncoding.kind)), captions=_repeated(fixed(caption_keys))
        ),
        controls_and_masks=controls_and_masks(snapshot),
        visits=_visits(snapshot),
        alike=alike,
        not_compared=not_compared,
        left_out=[
            LeftOut(reason, count)
            for reason, count in sorted(head.left_out.items(), key=lambda pair: (-pair[1], pair[0]))
        ],
        rejects=rejects(cache, snapshot),
        storage=_storage(cache, snapshot),
        new=_new_samples(cache, snapshot, samples, names, bucket),
    )


def _mixture(snapshot: Snapshot, names: pa.Table) -> list[SourceShare]:
    """The sources, with the weights that the head says."""
    samples: dict[str, dict[Fraction, int]] = {}
    for weight, start, count in _parts(snapshot):
        for source, some in _counts(names.column("source").slice(start, count)).items():
            of = samples.setdefault(source, {})
            of[weight] = of.get(weight, 0) + some
    options = snapshot.head.options
    given = None if options is None else dict(options.get("bucket", {})).get("sources", {})
    weights = None if given is None else {name: Fraction(str(each.get("weight", 1))) for name, each in given.items()}
    return mixture(samples, weights)


def _parts(snapshot: Snapshot) -> Iterator[tuple[Fraction, int, int]]:
    """The parts of all buckets: visits of a sample per epoch, first row, samples."""
    first = 0
    for bucket in snapshot.buckets:
        for part in bucket.parts or (BucketPart(bucket.samples, Fraction(1)),):
            yield part.weight, first, part.samples
            first += part.samples


def _visits(snapshot: Snapshot) -> list[Visits]:
    """The samples by their visits per epoch, the most first; [] where all have one."""
    ranges: dict[Fraction, list[np.ndarray]] = {}
    for weight, start, count in _parts(snapshot):
        ranges.setdefault(weight, []).append(np.arange(start, start + count))
    rows = {weight: np.concatenate(ranges[weight]) for weight in sorted(ranges, reverse=True)}
    visits = sum((weight * len(some) for weight, some in rows.items()), Fraction(0))
    return [
        Visits(
            visits=float(weight),
            samples=len(some),
            share=len(some) / len(snapshot),
            share_of_visits=float(weight * len(some) / visits),
            examples=_examples(snapshot, some[np.linspace(0, len(some) - 1, min(SHOWN, len(some))).astype(int)]),
        )
        for weight, some in (rows.items() if rows.keys() - {1} else ())
    ]


def _alike(snapshot: Snapshot, names: pa.Table) -> tuple[list[Alike], str]:
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
        Alike(int(sizes[group]), _examples(snapshot, first[member == group][:SHOWN]))
        for group in largest.tolist()
        if sizes[group] > 1
    ]
    return groups, f"{flat:,} pictures have too little detail to be compared." if flat else ""


def _examples(snapshot: Snapshot, rows: np.ndarray) -> list[Example]:
    return [Example(*snapshot.source_item(row)) for row in rows.tolist()]


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


def _bucket(snapshot: Snapshot, number: int, crop: float | None) -> BucketFigures:
    bucket = snapshot.buckets[number]
    steps, note = _steps(bucket, snapshot.head.policies.small)
    return BucketFigures(bucket.height, bucket.width, bucket.samples, bucket.batch, float(steps), crop, note)


def _crop(
    cache: Cache, snapshot: Snapshot, names: pa.Table, bucket: np.ndarray
) -> tuple[CropFigures | None, list[float | None], str | None]:
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
    figures = CropFigures(
        mean=float(loss[known].mean()),
        largest=float(loss.max()),
        enlarged=int((scale > 1).sum()),
        edges=CROP_EDGES.tolist(),
        samples=np.histogram(np.minimum(loss[known], CROP_EDGES[-1]), CROP_EDGES)[0].tolist(),
    )
    return figures, by_bucket, None


def _captions(snapshot: Snapshot, lists: pa.ChunkedArray) -> CaptionFigures:
    """Numbers of captions by tokens. A caption with `max_length` tokens was cut, or just fits."""
    longest = snapshot.encoding(TextEncoding).max_length
    tokens = pc.struct_field(pc.list_flatten(lists), "rows").to_numpy()
    by_tokens, count = np.bincount(tokens, minlength=longest + 1), max(1, len(tokens))
    numbers, samples = np.unique(pc.list_value_length(lists).to_numpy(), return_counts=True)
    median, most = np.quantile(tokens, (0.5, 0.95), method="inverted_cdf") if len(tokens) else (0, 0)
    return CaptionFigures(
        captions=len(tokens),
        per_sample=dict(zip(map(str, numbers.tolist()), samples.tolist(), strict=True)),
        max_length=longest,
        at_max_length=int(by_tokens[longest]),
        share_at_max_length=float(by_tokens[longest] / count),
        mean_tokens=float(tokens.sum() / count),
        p50=int(median),
        p95=int(most),
        by_tokens=by_tokens.tolist(),
    )


def _repeated(keys: np.ndarray) -> Repeats:
    """Count the keys that are distinct, and how many entries have a key that occurs more than once."""
    _, counts = np.unique(keys, return_counts=True)
    return Repeats(len(keys), len(counts), repeated=int(counts[counts > 1].sum()), most=int(counts.max(initial=0)))


def rejects(cache: Cache, snapshot: Snapshot) -> list[Reject]:
    """The rejects that the snapshot counted, by kind, with a few items of each."""
    wanted: dict[tuple[str, str], int] = {}
    for reason, count in snapshot.head.left_out.items():
        stage, found, name = reason.partition(": ")
        if found and stage in REJECTED:
            wanted[stage, name] = count
    examples: dict[tuple[str, str], list[Example]] = {key: [] for key in wanted}
    lacking = set(wanted)
    for stage, source, item, reason in _rejected_items(cache, snapshot) if wanted else ():
        key = (stage, kind(item, reason))
        if key in lacking:
            examples[key].append(Example(source, item))
            if len(examples[key]) == min(EXAMPLES, wanted[key]):
                lacking.discard(key)
                if not lacking:
                    break
    ordered = sorted(wanted.items(), key=lambda pair: (-pair[1], pair[0]))
    return [Reject(stage, name, count, examples[stage, name]) for (stage, name), count in ordered]


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


def _storage(cache: Cache, snapshot: Snapshot) -> StorageFigures:
    tables, shards = [Paths.table(digest, "arrow") for digest in snapshot.head.tables()], snapshot.head.shards
    kinds = {
        encoding.kind: KindStorage(len(shards[encoding.kind]), int(shards[encoding.kind].sizes.sum()), encoding.storage)
        for encoding in snapshot.head.encodings_by_kind.values()
    }
    return StorageFigures(kinds, int(snapshot.shard_sizes().sum()), sum(cache.files.sizes(tables).values()))


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
) -> NewSamples | None:
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
    return NewSamples(
        earlier=before.id,
        earlier_names=_names(cache, before.id),
        new=int((~old).sum()),
        old=int(old.sum()),
        removed=len(before) - int(old.sum()),
        buckets=[
            NewInBucket(each.height, each.width, int(by_bucket["new"][i]), int(by_bucket["old"][i]))
            for i, each in enumerate(snapshot.buckets)
        ],
        sources={
            name: NewAndOld(by_source["new"].get(name, 0), by_source["old"].get(name, 0))
            for name in sorted(by_source["new"].keys() | by_source["old"].keys())
        },
        mean_tokens=MeanTokens(**{side: float(some.mean()) if len(some) else None for side, some in of_side.items()}),
    )
