"""Join scans and encoded records into the samples of a snapshot, and count every item that is left out by its reason.

`join` adds the usable items of one source: for each the records of its picture at its bucket and of its captions.
`assemble` turns the selected samples (`pipeline.snapshots.selection`) into a snapshot's head and tables. Items are
joined some thousands at a time; columns of samples are in temporary files (`pipeline.cache.scratch`), about 150 bytes
a sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.cache import scan_table
from pipeline.cache.arrow import ROWS, batches
from pipeline.cache.arrow import text as text_column
from pipeline.cache.files import Files
from pipeline.cache.index import RecordIndex
from pipeline.cache.keys import as_keys, fixed, key_bytes, of_halves, sample_ids, to_column
from pipeline.cache.recipes import CaptionRecipe, PictureRecipe, Recipe, caption_of, pictures_of
from pipeline.cache.scratch import Scratch
from pipeline.cache.snapshot import (
    CHUNK_ROWS,
    NAMES,
    WRITTEN,
    Bucket,
    BucketPart,
    Head,
    Policies,
    TextPlace,
    samples_schema,
    write_chunk,
)
from pipeline.cache.snapshot_lists import ChunkTable, ShardTable
from pipeline.config import DataConfig
from pipeline.errors import CacheError, UserError
from pipeline.images import buckets
from pipeline.sources import caption_rules as captions
from pipeline.sources.reject_kinds import EXAMPLES, Kinds

ENCODE = "run sana-pipe encode"
Shape = tuple[int, int]


def ranges(begin: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """`begin[0]`, `begin[0] + 1`, ...: `counts[0]` numbers, then those from `begin[1]`, and so on."""
    before = np.cumsum(counts) - counts
    return np.repeat(begin - before, counts) + np.arange(counts.sum())


@dataclass(frozen=True)
class EncodedRecords:
    """The encoded records that samples are joined with.

    Attributes:
        recipes: those of pictures, then that of captions.
        indexes: by kind.
    """

    recipes: Sequence[Recipe]
    indexes: Mapping[str, RecordIndex]

    @property
    def pictures(self) -> list[PictureRecipe]:
        return pictures_of(self.recipes)

    @property
    def caption(self) -> CaptionRecipe:
        return caption_of(self.recipes)

    @property
    def texts(self) -> RecordIndex:
        """Return the texts of the captions' records."""
        return self.indexes[self.caption.kind]


@dataclass(frozen=True)
class Resolution:
    """A bucket table that the items of a source are assigned to.

    Attributes:
        table: (height, width) of its buckets in pixels.
        first: number of its first bucket in the snapshot.
        variant: name of the resolution; "" for that of the configuration.
        policy: judge the items by its `min_side`, `max_upscale` and `max_crop_loss` at this table; None: the scan
            judged them.
    """

    table: Sequence[Shape]
    first: int = 0
    variant: str = ""
    policy: DataConfig | None = None


@dataclass
class Frame:
    """Samples in columns, in the order in which they were joined. n samples, m captions.

    Attributes:
        source: (n,) int32 into `Joined.sources`.
        item: (n,) large strings.
        sample_id, picture_id: (n,) uint64; they differ for the records of a picture at further resolutions.
        digest: (n,) S16, of the picture's file.
        height, width: (n,) int64 of the picture, in pixels.
        bucket: (n,) int64 into the bucket table.
        cluster: (n,) int64, of samples that are balanced together; 0 until they are.
        pictures: kind -> (n,) int64 rows of its index.
        captions: (n + 1,) int64 offsets into the next two.
        text, weight: (m,) int64 rows of the texts' index; (m,) float32.
    """

    source: np.ndarray
    item: pa.Array
    sample_id: np.ndarray
    picture_id: np.ndarray
    digest: np.ndarray
    height: np.ndarray
    width: np.ndarray
    bucket: np.ndarray
    cluster: np.ndarray
    pictures: dict[str, np.ndarray]
    captions: np.ndarray
    text: np.ndarray
    weight: np.ndarray

    def __len__(self) -> int:
        return len(self.sample_id)

    def take(self, rows: np.ndarray, scratch: Scratch) -> Frame:
        """Some rows (a boolean mask, or numbers), in their order. scratch: temporary storage."""
        columns = FrameColumns(scratch, self.pictures)
        for start in range(0, len(rows), ROWS):
            some = rows[start : start + ROWS]
            columns.add(self._take(start + np.flatnonzero(some) if rows.dtype == bool else some))
        return columns.frame()

    def captions_of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of the captions of rows (n,), one row after the other, and (n + 1,) offsets into them."""
        counts = self.captions[rows + 1] - self.captions[rows]
        return ranges(self.captions[rows], counts), np.concatenate([[0], np.cumsum(counts)])

    def _take(self, rows: np.ndarray) -> Frame:
        captions, offsets = self.captions_of(rows)
        return Frame(
            item=self.item.take(pa.array(rows)),
            captions=offsets,
            text=self.text[captions],
            weight=self.weight[captions],
            pictures={kind: column[rows] for kind, column in self.pictures.items()},
            **{name: getattr(self, name)[rows] for name in _PER_SAMPLE},
        )


_PER_SAMPLE = {
    "source": np.int32,
    "sample_id": np.uint64,
    "picture_id": np.uint64,
    "digest": "S16",
    "height": np.int64,
    "width": np.int64,
    "bucket": np.int64,
    "cluster": np.int64,
}
_PER_CAPTION = {"text": np.int64, "weight": np.float32}


class FrameColumns:
    """Concatenates frames. kinds: of their picture records."""

    def __init__(self, scratch: Scratch, kinds: Iterable[str]):
        dtypes: dict[str, Any] = {**_PER_SAMPLE, **_PER_CAPTION, "captions": np.int64, "ends": np.int64, "items": "u1"}
        self._writers = {name: scratch.writer(dtype) for name, dtype in dtypes.items()}
        self._pictures = {kind: scratch.writer(np.int64) for kind in kinds}
        for name in ("captions", "ends"):
            self._writers[name].add(np.zeros(1))
        self._captions = self._bytes = 0

    def add(self, frame: Frame) -> None:
        for name in (*_PER_SAMPLE, *_PER_CAPTION):
            self._writers[name].add(getattr(frame, name))
        for kind, writer in self._pictures.items():
            writer.add(frame.pictures[kind])
        self._writers["captions"].add(frame.captions[1:] + self._captions)
        self._captions += len(frame.text)
        _, ends, data = frame.item.buffers()
        first = frame.item.offset
        ends = np.frombuffer(ends, np.int64, len(frame) + 1, first * 8) if len(frame) else np.zeros(1, np.int64)
        size = int(ends[-1] - ends[0])
        self._writers["ends"].add(ends[1:] - ends[0] + self._bytes)
        self._writers["items"].add(np.frombuffer(data, np.uint8, size, int(ends[0])) if size else np.empty(0, np.uint8))
        self._bytes += size

    def frame(self) -> Frame:
        """All of them; nothing can be added any more."""
        columns = {name: writer.finish() for name, writer in self._writers.items()}
        ends, items = columns.pop("ends"), columns.pop("items")
        buffers = [None, pa.py_buffer(ends), pa.py_buffer(items)]
        return Frame(
            item=pa.LargeStringArray.from_buffers(len(ends) - 1, buffers[1], buffers[2]),
            pictures={kind: writer.finish() for kind, writer in self._pictures.items()},
            **columns,
        )


@dataclass
class Joined:
    """The samples joined so far, and the items left out.

    Attributes:
        sources: names; `Frame.source` counts into them.
        left_out: reason -> items.
        keep: reason -> the change that would keep these items; None where the reason says it.
        examples: reason -> a few of the items, where the reason is of single items.
        scratch: temporary storage.
        notes: what the user is to know of the choice.
        repeats: source -> {visits: items}, where the numbers of its folders multiply the visits (`folder_repeats`).
    """

    sources: list[str] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    keep: dict[str, str | None] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    frames: list[Frame] = field(default_factory=list)
    scratch: Scratch = field(default_factory=Scratch)
    notes: list[str] = field(default_factory=list)
    repeats: dict[str, dict[int, int]] = field(default_factory=dict)

    def leave(self, reason: str, count: int, keep: str | None = None) -> None:
        if count:
            self.left_out[reason] += int(count)
            self.keep[reason] = keep

    def leave_kinds(self, what: str, kinds: Kinds, keep: Callable[[str], str]) -> None:
        """Leave out items, counted by kind of reason. keep: kind -> the change that would keep them."""
        for kind, count in kinds.counts.items():
            self.leave(f"{what}: {kind}", count, keep(kind))
            examples = self.examples.setdefault(f"{what}: {kind}", [])
            examples += kinds.examples[kind][: EXAMPLES - len(examples)]

    def frame(self) -> Frame:
        """All joined samples in one frame."""
        if len(self.frames) != 1:
            columns = FrameColumns(self.scratch, self.frames[0].pictures if self.frames else ())
            for frame in self.frames:
                for start in range(0, len(frame), ROWS):
                    columns.add(frame._take(np.arange(start, min(start + ROWS, len(frame)))))
            self.frames = [columns.frame()]
        return self.frames[0]


def usable(joined: Joined, scan: pa.Table) -> pa.Table:
    """The items that the scan did not reject; rejects are counted."""

    def keep(kind: str) -> str:
        return f"change that setting and {ENCODE}" if "data." in kind else f"fix the file and {ENCODE}"

    def rejects() -> Iterator[tuple[str, str]]:
        for batch in batches(scan.select(["item", "reject"])):
            rejected = batch.filter(pc.is_valid(batch.column("reject")))
            yield from zip(*(column.to_pylist() for column in rejected.columns), strict=True)

    joined.leave_kinds("rejected by the scan", Kinds.of(rejects()), keep)
    if not scan.num_rows - scan.column("reject").null_count:
        return scan
    left = (batch.filter(pc.is_null(batch.column("reject"))) for batch in batches(scan))
    return joined.scratch.table(scan.schema, left)


def without_policy(scan: pa.Table) -> pa.Table:
    """The scan with its rejects by policy taken back, because they were judged at one resolution. They have a width."""
    judged = pc.and_(pc.is_valid(scan.column("width")), pc.is_valid(scan.column("reject")))
    reject = pc.if_else(judged, pa.scalar(None, pa.string()), scan.column("reject"))
    return scan.set_column(scan.schema.get_field_index("reject"), "reject", reject)


def join(joined: Joined, source: str, scan: pa.Table, records: EncodedRecords, resolution: Resolution) -> None:
    """Add the samples of one source at one resolution. scan: the source's scan table."""
    scan = usable(joined, scan)
    if resolution.policy is not None:
        scan = allowed(joined, scan, resolution)
    failed = {reject.key: reject.reason for index in records.indexes.values() for reject in index.rejects}
    if source not in joined.sources:
        joined.sources.append(source)
    missing = _Missing(failed)
    columns = FrameColumns(joined.scratch, (recipe.kind for recipe in records.pictures))
    for batch in batches(scan):
        columns.add(_joined(joined, source, batch, records, resolution, missing))
    joined.frames.append(columns.frame())
    for what, kinds in missing.rejects.items():
        joined.leave_kinds(what, kinds.ranked(), lambda _: f"fix the files and {ENCODE}")


@dataclass(frozen=True)
class _Missing:
    """Records that could not be encoded.

    Attributes:
        failed: key (hex) -> reason.
        rejects: what is missing -> the items that lack it.
    """

    failed: Mapping[str, str]
    rejects: dict[str, Kinds] = field(default_factory=dict)

    def leave(
        self, joined: Joined, scan: pa.Table, rows: np.ndarray, reasons: list[str | None], what: str, pending: str
    ) -> None:
        """Leave out items without a record. reasons: of each; None (its work is not done yet) is counted as
        `pending`."""
        items = scan.column("item").take(pa.array(rows)).to_pylist()
        pairs = ((item, reason) for item, reason in zip(items, reasons, strict=True) if reason)
        self.rejects.setdefault(what, Kinds()).add(pairs)
        joined.leave(pending, reasons.count(None))


def _joined(
    joined: Joined, source: str, scan: pa.Table, records: EncodedRecords, resolution: Resolution, missing: _Missing
) -> Frame:
    """The samples of some items; see `join`."""
    scan, columns, pictures = _with_pictures(joined, scan, records, resolution, missing)
    with_caption, offsets, text, weight = _caption_records(joined, scan, records, missing)
    items = text_column(scan.column("item").filter(pa.array(with_caption)))
    picture_id = sample_ids(source, items)
    variant = resolution.variant
    return Frame(
        source=np.full(len(items), joined.sources.index(source), np.int32),
        item=items,
        sample_id=sample_ids(source, items, variant) if variant else picture_id,
        picture_id=picture_id,
        cluster=np.zeros(len(items), np.int64),
        captions=offsets,
        text=text,
        weight=weight,
        pictures={kind: rows[with_caption] for kind, rows in pictures.items()},
        **{name: column[with_caption] for name, column in columns.items()},
    )


def _with_pictures(
    joined: Joined, scan: pa.Table, records: EncodedRecords, resolution: Resolution, missing_records: _Missing
) -> tuple[pa.Table, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The items with all records of their picture, and their `height`, `width`, `digest` and `bucket`, and `pictures`
    of a frame."""
    at, setting = "", ""
    if resolution.variant:
        at, setting = f" at {resolution.variant} px", f" --set data.resolution={resolution.variant}"
    height, width = (scan.column(c).to_numpy().astype(np.int64) for c in ("height", "width"))
    digest = fixed(scan.column("digest"))
    bucket = buckets.nearest_all(resolution.table, height, width)
    pictures, stays = dict[str, np.ndarray](), np.ones(len(scan), bool)
    for recipe in records.pictures:
        of_picture = scan_table.places(scan, recipe.picture).column("digest")
        there = pc.is_valid(of_picture).to_numpy()
        keys, rows = np.zeros(len(scan), "S16"), np.full(len(scan), -1, np.int64)
        keys[there] = recipe.keys(fixed(of_picture.drop_null()), resolution.table, bucket[there])
        rows[there] = records.indexes[recipe.kind].find(keys[there])
        pictures[recipe.kind] = rows
        missing = np.flatnonzero(stays & (rows < 0))
        reasons = [missing_records.failed.get(key_bytes(key).hex()) for key in keys[missing]]
        missing_records.leave(
            joined,
            scan,
            missing,
            reasons,
            "rejected while encoding",
            f"its {recipe.kind}{at} is not encoded yet ({ENCODE}{setting})",
        )
        stays &= rows >= 0
    columns = {"height": height, "width": width, "digest": digest, "bucket": bucket + resolution.first}
    return (
        scan.filter(pa.array(stays)),
        {name: column[stays] for name, column in columns.items()},
        {kind: rows[stays] for kind, rows in pictures.items()},
    )


def _caption_records(
    joined: Joined, scan: pa.Table, records: EncodedRecords, missing_records: _Missing
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The encoded captions with a weight. Items without one are left out.

    Returns:
        Which items have such a caption, (items,) bool; of these `captions`, `text` and `weight` of a frame.
    """
    offsets, texts, weight = _captions(scan)
    normalised = (captions.normalise_all(some, records.caption.normalisation) for some in texts)
    keys = np.concatenate([np.empty(0, "S16"), *(records.caption.keys(some) for some in normalised)])
    rows = records.texts.find(keys)
    usable_caption = (rows >= 0) & (weight > 0)
    counts = np.diff(offsets)
    encoded = np.add.reduceat(np.append(usable_caption, False), offsets[:-1]) if len(scan) else np.empty(0, np.int64)
    encoded = np.where(counts > 0, encoded, 0)
    missing = np.flatnonzero(encoded == 0)
    item_keys = ([key_bytes(key).hex() for key in keys[offsets[row] : offsets[row + 1]]] for row in missing)
    failed = missing_records.failed
    reasons = [next((failed[key] for key in item if key in failed), None) for item in item_keys]
    missing_records.leave(
        joined,
        scan,
        missing,
        reasons,
        "caption rejected while encoding",
        f"its caption is not encoded yet ({ENCODE})",
    )
    joined.leave(
        "(caption only, the sample stays) one of several captions is not encoded",
        int(((encoded > 0) & (encoded < counts)).sum()),
        ENCODE,
    )
    with_caption = encoded > 0
    new_offsets = np.concatenate([[0], np.cumsum(encoded[with_caption])]).astype(np.int64)
    return with_caption, new_offsets, rows[usable_caption], weight[usable_caption]


def _captions(scan: pa.Table) -> tuple[np.ndarray, Iterator[pa.Array], np.ndarray]:
    """Offsets (n + 1,), texts in pieces and weights of a scan's captions."""
    column = scan.column("captions")
    counts = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
    chunks = [pc.list_flatten(chunk) for chunk in column.chunks]  # in one piece texts could pass Arrow's 2 GiB
    texts = (chunk.field("text") for chunk in chunks)
    weight = np.concatenate([np.empty(0, np.float32), *(chunk.field("weight").to_numpy() for chunk in chunks)])
    return np.concatenate([[0], np.cumsum(counts)]), texts, weight.astype(np.float32, copy=False)


def allowed(joined: Joined, scan: pa.Table, resolution: Resolution) -> pa.Table:
    """The items that the policy allows at this table; refused items are counted by reason."""
    table, policy = resolution.table, resolution.policy
    assert policy is not None
    height, width = (scan.column(c).to_numpy().astype(np.int64) for c in ("height", "width"))
    shapes = np.array(table, np.int64)[buckets.nearest_all(table, height, width)]
    refused = np.zeros(len(height), bool)
    for reason, excluded in buckets.refusals(height, width, shapes.T, policy):
        where = f"at {resolution.variant or policy.resolution} px"
        joined.leave(f"{where} {reason}", int((excluded & ~refused).sum()), "change that setting")
        refused |= excluded
    return scan.filter(pa.array(~refused))


# ---------------------------------------------------------------- the snapshot


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
class BucketTable:
    """All buckets of a snapshot: (height, width) in pixels, and the global batch of each."""

    shapes: Sequence[Shape]
    batches: Sequence[int]


@dataclass(frozen=True)
class Assembled:
    """A snapshot that is not written yet: its head without chunks. chunks: makes their tables (samples, names)."""

    head: Head
    chunks: Callable[[], Iterator[tuple[pa.Table, pa.Table]]]
    report: list[BucketReport]

    def written(self, files: Files | None) -> Head:
        """The head with its chunks, which are written. files: None: the head alone."""
        return replace(self.head, chunks=ChunkTable.of(write_chunk(files, *tables) for tables in self.chunks()))


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
        recipes={recipe.kind: recipe.values() for recipe in records.recipes},
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
            rows = frame._take(order[start : start + CHUNK_ROWS])
            yield _tables(rows, joined.sources, records, numbers)

    return Assembled(head, chunks, report)


_REPEATS = r"(?:^|/)(?P<repeats>[1-9][0-9]{0,2})_[^_/][^/]*/[^/]+$"


def folder_repeats(items: pa.Array) -> np.ndarray:
    """(n,) int64: the number that each item's folder begins with, as in kohya's `10_sks dog` (see
    `pipeline.sources.filenames.REPEATS`); 0: none."""
    found = pc.struct_field(pc.extract_regex(items, _REPEATS), 0)
    return pc.fill_null(found, "0").cast(pa.int64()).to_numpy()


class _Parts:
    """The parts of buckets: samples of equal weight, by source, by folder where it repeats, and by cluster.

    Attributes:
        weights: of the parts, falling.
    """

    def __init__(self, joined: Joined, weights: Mapping[str, Fraction], clusters: Sequence[Fraction]):
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


def pieces(count: int) -> Iterator[slice]:
    """Ranges of `ROWS` rows."""
    return (slice(start, min(start + ROWS, count)) for start in range(0, count, ROWS))


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
    note = f"{rest:g} samples skipped, other ones each epoch; to use them: bucket.remainder=carry" if rest else ""
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
    schema = samples_schema(records.recipes)
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
    pictures = [places(kind, rows, schema.field(kind).type) for kind, rows in frame.pictures.items()]
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
