"""Turn the selected samples into a snapshot: its head, and the tables of its chunks.

Samples are put into buckets and, where sources or clusters have weights, into parts of these; the order of rows is
(bucket, part, sample id). Columns of samples stay in temporary files; tables are made a chunk at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sana_pipe.base.errors import CacheError, UserError
from sana_pipe.data.cache.files import Files
from sana_pipe.data.cache.index import RecordIndex
from sana_pipe.data.cache.keys import as_keys, of_halves, to_column
from sana_pipe.data.cache.scratch import Scratch
from sana_pipe.data.cache.snapshot_head import Bucket, BucketPart, Head, Policies, TextPlace
from sana_pipe.data.cache.snapshot_lists import Chunk, ChunkTable, ShardTable
from sana_pipe.data.cache.snapshot_samples import CHUNK_ROWS, NAMES, WRITTEN, ContentDigest, samples_schema, write_chunk
from sana_pipe.data.images import buckets
from sana_pipe.data.snapshots.frames import Frame, pieces
from sana_pipe.data.snapshots.join import EncodedRecords, Joined


@dataclass(frozen=True)
class BucketReport:
    """One line of the table that `sana-pipe bucket` prints. steps: per epoch. crop: mean share cut off."""

    height: int
    width: int
    samples: int
    batch: int
    steps: float
    crop: float
    note: str


@dataclass(frozen=True)
class SourceShare:
    """The part of a mixture that a source is.

    Attributes:
        weight: `bucket.sources.NAME.weight`; None: not known.
        visits: per epoch, of all its samples together. Numbers of folders and `bucket.balance` multiply the weight.
        share: of all visits.
    """

    source: str
    samples: int
    weight: float | None
    visits: float
    share: float


def mixture(samples: Mapping[str, Mapping[Fraction, int]], weights: Mapping[str, Fraction] | None) -> list[SourceShare]:
    """The sources, the most visits first.

    Args:
        samples: source -> {visits of a sample per epoch: samples}.
        weights: source -> weight, where it is not 1; None: not known.
    """
    visits = {source: sum((each * count for each, count in of.items()), Fraction(0)) for source, of in samples.items()}
    total = sum(visits.values(), Fraction(0)) or Fraction(1)
    return [
        SourceShare(
            source,
            sum(samples[source].values()),
            None if weights is None else float(weights.get(source, 1)),
            float(of),
            float(of / total),
        )
        for source, of in sorted(visits.items(), key=lambda pair: (-pair[1], pair[0]))
    ]


@dataclass(frozen=True)
class BucketTable:
    """All buckets of a snapshot: (height, width) in pixels, and the global batch of each."""

    shapes: Sequence[buckets.Shape]
    batches: Sequence[int]


@dataclass(frozen=True)
class Assembled:
    """A snapshot that is not written yet: its head without chunks. chunks: makes their tables (samples, names);
    mixture: its sources."""

    head: Head
    chunks: Callable[[], Iterator[tuple[pa.Table, pa.Table]]]
    report: list[BucketReport]
    mixture: list[SourceShare]

    def written(self, files: Files | None) -> Head:
        """The head with its chunks, which are written, and its content id. files: None: the head alone."""
        digest = ContentDigest()

        def chunks() -> Iterator[Chunk]:
            for samples, names in self.chunks():
                digest.add(samples)
                yield write_chunk(files, samples, names)

        head = replace(self.head, chunks=ChunkTable.of(chunks()))
        return head.with_content_id(digest.values())


def assemble(
    joined: Joined,
    frame: Frame,
    records: EncodedRecords,
    table: BucketTable,
    policies: Policies,
    sources: Mapping[str, str],
    *,
    weights: Mapping[str, Fraction] | None = None,
    clusters: Sequence[Fraction] = (Fraction(1),),
    places: np.ndarray | None = None,
) -> Assembled:
    """Turn samples into a snapshot.

    Args:
        frame: the samples, of `joined`.
        sources: source -> digest of its scan's table.
        weights: visits per epoch by source, where they are not 1.
        clusters: visits per epoch by `Frame.cluster`.
        places: (n,) place of each sample in an earlier snapshot. Inside a bucket and part, samples are ordered by
            (place, sample id).

    Raises:
        UserError: no sample is left, with the reasons; or two samples share an id.
        CacheError: the null record is missing.
    """
    scratch = joined.scratch
    parts = _Parts(joined, weights or {}, clusters)
    entries, report, left_out = _grouped(joined, frame, table, parts, policies.small)
    places = scratch.array(len(frame), np.int64) if places is None else places
    if left_out.any():
        some = ({"row": piece.start + np.flatnonzero(~left_out[frame.bucket[piece]])} for piece in pieces(len(frame)))
        stays = scratch.arrays(some, {"row": np.int64})["row"]
        left = ({"place": places[stays[piece]]} for piece in pieces(len(stays)))
        frame, places = frame.take(stays, scratch), scratch.arrays(left, {"place": np.int64})["place"]
    _check_samples(joined, frame)
    null_row = row_of_null(records)
    numbered = {kind: _numbered_shards(records.indexes[kind], rows) for kind, rows in frame.pictures.items()}
    numbered[records.caption.kind] = _numbered_shards(records.texts, frame.text, null_row)
    numbers = {kind: number for kind, (number, _) in numbered.items()}
    head = Head(
        encodings={encoding.kind: encoding.values() for encoding in records.encodings},
        policies=policies,
        buckets=tuple(entries),
        shards={kind: shards for kind, (_, shards) in numbered.items()},
        null=TextPlace.of(records.texts, null_row, records.caption.storage),
        left_out=dict(sorted(joined.left_out.items())),
        sources=dict(sources),
        counts={"samples": len(frame)},
    )
    order = _order(frame, parts, places, scratch)

    def chunks() -> Iterator[tuple[pa.Table, pa.Table]]:
        for start in range(0, len(order), CHUNK_ROWS):
            rows = frame.take_in_memory(order[start : start + CHUNK_ROWS])
            yield _tables(rows, joined.sources, records, numbers)

    return Assembled(head, chunks, report, mixture(parts.samples(frame), weights or {}))


_REPEATS = r"(?:^|/)(?P<repeats>[1-9][0-9]{0,2})_[^_/][^/]*/[^/]+$"


def folder_repeats(items: pa.Array) -> np.ndarray:
    """(n,) int64: the number that each item's folder begins with, as in kohya's `10_sks dog` (see
    `sources.filenames.REPEATS`); 0: none."""
    found = pc.struct_field(pc.extract_regex(items, _REPEATS), 0)
    return pc.fill_null(found, "0").cast(pa.int64()).to_numpy()


class _Parts:
    """The parts of buckets: samples of equal weight, by source, by folder where it repeats, and by cluster.

    Attributes:
        weights: of the parts, falling.
    """

    def __init__(self, joined: Joined, weights: Mapping[str, Fraction], clusters: Sequence[Fraction]):
        self._sources = joined.sources
        self._repeats = [joined.repeats.get(name, {}) for name in joined.sources]
        base = [weights.get(name, Fraction(1)) for name in joined.sources]
        of = {
            (s, r, c): w * r * more
            for s, w in enumerate(base)
            for r in (*self._repeats[s], 1)
            for c, more in enumerate(clusters)
        }
        self.weights = sorted(set(of.values()), reverse=True)
        self._part = np.zeros((len(base), max((r for _, r, _ in of), default=1) + 1, len(clusters)), np.int64)
        for place, weight in of.items():
            self._part[place] = self.weights.index(weight)

    def of(self, frame: Frame, piece: slice) -> np.ndarray:
        """The part of some samples, int64."""
        source, cluster = frame.source[piece], frame.cluster[piece]
        repeating = np.array([bool(repeats) for repeats in self._repeats], bool)[source]
        if not repeating.any():
            return self._part[source, 1, cluster]
        visits = np.maximum(folder_repeats(frame.item[piece]), 1)
        return self._part[source, np.where(repeating, visits, 1), cluster]

    def samples(self, frame: Frame) -> dict[str, dict[Fraction, int]]:
        """Source -> {visits of a sample per epoch: samples}."""
        counts = np.zeros((len(self._sources), len(self.weights)), np.int64)
        for piece in pieces(len(frame)):
            np.add.at(counts, (frame.source[piece], self.of(frame, piece)), 1)
        return {
            name: {weight: int(count) for weight, count in zip(self.weights, of, strict=True) if count}
            for name, of in zip(self._sources, counts, strict=True)
        }


def _order(frame: Frame, parts: _Parts, places: np.ndarray, scratch: Scratch) -> np.ndarray:
    """(n,) int64: the rows by (bucket, part, place, sample id).

    The sort key is the group (bucket, part, new or not), then the place or, for the new samples, which share the last
    place, the sample id, both stretched over 64 bits.
    """
    last = max((int(places[piece].max()) for piece in pieces(len(frame))), default=0)
    groups = 2 * max(1, len(parts.weights))
    count = groups * max((int(frame.bucket[piece].max()) + 1 for piece in pieces(len(frame))), default=1)
    group_size, place_size = np.uint64((1 << 64) // max(2, count)), np.uint64((1 << 64) // (last + 2))

    def keys() -> Iterator[np.ndarray]:
        for piece in pieces(len(frame)):
            is_new = places[piece] == last
            group = frame.bucket[piece] * groups + parts.of(frame, piece) * 2 + is_new
            within = np.where(is_new, frame.sample_id[piece], places[piece].astype(np.uint64) * place_size)
            high = group.astype(np.uint64) * group_size + within // np.uint64(count + 1)
            yield of_halves(high, within)

    return scratch.arrays(({"row": rows} for _, rows, _ in scratch.by_key(keys())), {"row": np.int64})["row"]


def _grouped(
    joined: Joined,
    frame: Frame,
    table: BucketTable,
    parts: _Parts,
    small: str,
) -> tuple[list[Bucket], list[BucketReport], np.ndarray]:
    """The buckets that have samples: their entries in the head, their reports, and which of the table are left out."""
    count = len(table.shapes)
    shapes = np.array(table.shapes, np.int64).reshape(-1, 2)
    crops, part_sizes = np.zeros(count), np.zeros((len(parts.weights), count), np.int64)
    for piece in pieces(len(frame)):
        which = frame.bucket[piece]
        loss = buckets.crop_loss(frame.height[piece], frame.width[piece], shapes[which].T)
        np.add.at(crops, which, loss)
        np.add.at(part_sizes, (parts.of(frame, piece), which), 1)
    sizes = part_sizes.sum(axis=0)
    entries, report = [], []
    left_out = np.zeros(count, bool)
    for bucket in np.flatnonzero(sizes).tolist():
        (height, width), batch, samples = table.shapes[bucket], table.batches[bucket], int(sizes[bucket])
        members = tuple(
            BucketPart(int(size[bucket]), weight)
            for size, weight in zip(part_sizes, parts.weights, strict=True)
            if size[bucket]
        )
        visits = sum((entry.samples * entry.weight for entry in members), Fraction(0))
        steps, note = epoch_steps(visits, batch, small)
        if small == "drop" and not steps:
            left_out[bucket] = True
            joined.leave(
                f"bucket {height}x{width} has fewer samples than one batch of {batch} "
                "(keep them: bucket.remainder=carry, or a smaller bucket.batch)",
                samples,
            )
        else:
            weighted = any(entry.weight != 1 for entry in members)
            entries.append(Bucket(height, width, samples, batch, members if weighted else None))
        report.append(BucketReport(height, width, samples, batch, steps, crops[bucket] / samples, note))
    return entries, report, left_out


def epoch_steps(visits: Fraction, batch: int, small: str) -> tuple[float, str]:
    """Optimizer steps per epoch of a bucket, and a note on what does not fill a batch."""
    if small == "carry":
        note = "smaller than one batch: batches repeat samples of later epochs" if visits < batch else ""
        return float(visits / batch), note
    if visits < batch:
        return 0, "left out: smaller than one batch"
    rest = float(visits % batch)
    note = (
        f"{rest:g} samples are skipped, different ones each epoch; to use them: bucket.remainder=carry" if rest else ""
    )
    return visits // batch, note


def _check_samples(joined: Joined, frame: Frame) -> None:
    ids = (of_halves(frame.sample_id[piece]) for piece in pieces(len(frame)))
    if doubled := sum(int((~first).sum()) for _, _, first in joined.scratch.by_key(ids)):
        raise UserError(f"{doubled} samples share a 64-bit sample id with another", fix="rename their files")
    if not len(frame):
        left_out = joined.left_out.most_common()
        reasons = "; ".join(f"{count} items: {reason}" for reason, count in left_out) or "the scan is empty"
        raise UserError("nothing is left to train on", found=reasons, fix="fix the most frequent reason")


def row_of_null(records: EncodedRecords) -> int:
    """The null record's row in the index of text records."""
    row = int(records.texts.find(as_keys([records.caption.null_key]))[0])
    if row < 0:
        raise CacheError("the cache has no null record", fix="sana-pipe encode (it encodes it first)")
    return row


def _numbered_shards(index: RecordIndex, rows: np.ndarray, *more: int) -> tuple[np.ndarray, ShardTable]:
    """Number the shards of some records by first appearance. more: rows after these.

    Returns:
        The new number of each shard of the index, (shards,) uint32; and the shards in the new order.
    """
    absent = len(rows) + len(more)
    first = np.full(len(index.shards), absent, np.int64)

    def note(shards: np.ndarray, place: int) -> None:
        new = np.flatnonzero(first[shards] == absent)[::-1]  # of equal shards the last assignment counts
        first[shards[new]] = place + new

    for piece in pieces(len(rows)):
        note(index.columns["shard"][rows[piece]], piece.start)
    note(index.columns["shard"][list(more)], len(rows))
    order = np.argsort(first)[: int((first < absent).sum())]
    numbers = np.zeros(len(index.shards), np.uint32)
    numbers[order] = np.arange(len(order))
    return numbers, ShardTable.of((index.shards[n] for n in order.tolist()), index.bytes[order].tolist())


def _tables(
    frame: Frame, sources: list[str], records: EncodedRecords, numbers: Mapping[str, np.ndarray]
) -> tuple[pa.Table, pa.Table]:
    """The samples and names of one chunk; more rows could have more captions than Arrow's lists can count.

    numbers: of the shards of each kind, by their place in the index.
    """
    schema = samples_schema(records.encodings)
    offsets = pa.array(frame.captions.astype(np.int32))

    def places(kind: str, at: np.ndarray, struct: pa.StructType, /, **given: np.ndarray) -> pa.StructArray:
        columns = records.indexes[kind].columns
        given["shard"] = numbers[kind][columns["shard"][at]]
        values = (given[f.name] if f.name in given else columns[f.name][at] for f in struct)
        return pa.StructArray.from_arrays([to_column(value) for value in values], fields=list(struct))

    def lists(structs: pa.StructArray) -> pa.Array:
        return pa.ListArray.from_arrays(offsets, structs)

    texts = records.texts.columns
    caption = places(
        records.caption.kind,
        frame.text,
        schema.field("captions").type.value_type,
        rows=texts["valid"][frame.text],
        weight=frame.weight,
    )
    weight = {name: column for name, column in frame.pairs.items() if name == "weight"}
    pictures = [places(kind, rows, schema.field(kind).type, **weight) for kind, rows in frame.pictures.items()]
    sample_id = pa.array(frame.sample_id)
    samples = pa.table([sample_id, *pictures, lists(caption)], schema=schema)
    where = [to_column(texts[f"caption_{field.name}"][frame.text]) for field in WRITTEN]
    names = pa.table(
        [
            sample_id,
            pa.DictionaryArray.from_arrays(pa.array(frame.source), sources).cast(pa.string()),
            frame.item.cast(pa.string()),
            lists(pa.StructArray.from_arrays(where, fields=list(WRITTEN))),
        ],
        schema=NAMES,
    )
    return samples, names
