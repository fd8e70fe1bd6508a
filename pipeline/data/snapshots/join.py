"""Join scans and encoded records into samples, and count every item that is left out by its reason.

`join` adds the usable items of one source: for each the records of its picture at its bucket and of its captions. Items
are joined some thousands at a time; the samples are columns in temporary files (`snapshots.frames`).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sana_pipe.data.cache import scan_table
from sana_pipe.data.cache.arrow import batches
from sana_pipe.data.cache.arrow import text as text_column
from sana_pipe.data.cache.encodings import CaptionEncoding, Encoding, PictureEncoding, caption_of, pictures_of
from sana_pipe.data.cache.index import RecordIndex
from sana_pipe.data.cache.keys import fixed, key_bytes, sample_ids
from sana_pipe.data.cache.scratch import Scratch
from sana_pipe.data.images import buckets
from sana_pipe.data.snapshots.frames import Frame, FrameColumns, pieces
from sana_pipe.data.sources import caption_rules as captions
from sana_pipe.data.sources.config import DataConfig
from sana_pipe.data.sources.reject_kinds import EXAMPLES, Kinds

ENCODE = "run sana-pipe encode"
GROUP = "group"
"""Column of a scan table, added by `snapshots.groups`: `Frame.group` of each item."""


@dataclass(frozen=True)
class EncodedRecords:
    """The encoded records that samples are joined with.

    Attributes:
        encodings: encodings of pictures, then that of captions.
        indexes: indexes of their records by kind.
    """

    encodings: Sequence[Encoding]
    indexes: Mapping[str, RecordIndex]

    @property
    def pictures(self) -> list[PictureEncoding]:
        return pictures_of(self.encodings)

    @property
    def caption(self) -> CaptionEncoding:
        return caption_of(self.encodings)

    @property
    def of_pairs(self) -> PictureEncoding | None:
        """Return the encoding of the rejected pictures; None: the samples are no preference pairs."""
        return next((encoding for encoding in self.pictures if encoding.weighted), None)

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

    table: Sequence[buckets.Shape]
    first: int = 0
    variant: str = ""
    policy: DataConfig | None = None


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
        metadata: what `bucket` prints of the table of `bucket.metadata`; None: there is none.
    """

    sources: list[str] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    keep: dict[str, str | None] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    frames: list[Frame] = field(default_factory=list)
    scratch: Scratch = field(default_factory=Scratch)
    notes: list[str] = field(default_factory=list)
    repeats: dict[str, dict[int, int]] = field(default_factory=dict)
    metadata: dict[str, Any] | None = None

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
            kinds = self.frames[0].pictures if self.frames else ()
            columns = FrameColumns(self.scratch, kinds, any(frame.pairs for frame in self.frames))
            for frame in self.frames:
                for piece in pieces(len(frame)):
                    columns.add(frame.take_in_memory(np.arange(piece.start, piece.stop)))
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


def join(
    joined: Joined,
    source: str,
    scan: pa.Table,
    records: EncodedRecords,
    resolution: Resolution,
    weight: str | None = None,
) -> None:
    """Add the samples of one source at one resolution.

    Args:
        scan: the source's scan table. weight: column of the pairs' weights; None: 1.
    """
    scan = usable(joined, scan)
    if resolution.policy is not None:
        scan = allowed(joined, scan, resolution)
    failed = {reject.key: reject.reason for index in records.indexes.values() for reject in index.rejects}
    if source not in joined.sources:
        joined.sources.append(source)
    missing = _Missing(failed)
    every = (encoding.kind for encoding in records.pictures)
    columns = FrameColumns(joined.scratch, every, records.of_pairs is not None)
    for batch in batches(scan):
        columns.add(_joined(joined, source, batch, records, resolution, missing, weight))
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
    joined: Joined,
    source: str,
    scan: pa.Table,
    records: EncodedRecords,
    resolution: Resolution,
    missing: _Missing,
    weight_column: str | None,
) -> Frame:
    """The samples of some items; see `join`."""
    scan, columns, pictures = _with_pictures(joined, scan, records, resolution, missing)
    with_caption, offsets, text, weight = _caption_records(joined, scan, records, missing)
    items = text_column(scan.column("item").filter(pa.array(with_caption)))
    picture_id = sample_ids(source, items)
    paired = records.of_pairs
    of_pairs = {} if paired is None else pair_columns(scan, paired.picture, weight_column)
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
        group=fixed(scan.column(GROUP))[with_caption] if GROUP in scan.column_names else np.zeros(len(items), "S16"),
        pairs={name: column[with_caption] for name, column in of_pairs.items()},
        **{name: column[with_caption] for name, column in columns.items()},
    )


def pair_columns(scan: pa.Table, picture: str, weight: str | None) -> dict[str, np.ndarray]:
    """`Frame.pairs` of usable items. picture: kind of the rejected pictures; weight: column of the metadata."""
    return {
        "rejected": fixed(scan_table.places(scan, picture).column("digest")),
        "weight": np.array([_weight(meta, weight) for meta in scan.column("meta").to_pylist()], np.float32),
    }


def _weight(meta: str | None, column: str | None) -> float:
    """The weight of a pair, 0 of a tie; NaN where the column holds no number of at least 0. meta: JSON object."""
    if column is None:
        return 1.0
    try:
        value = float(json.loads(meta or "{}").get(column))
    except (TypeError, ValueError):
        return math.nan
    return value if 0 <= value < math.inf else math.nan


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
    for encoding in records.pictures:
        of_picture = scan_table.places(scan, encoding.picture).column("digest")
        there = pc.is_valid(of_picture).to_numpy()
        keys, rows = np.zeros(len(scan), "S16"), np.full(len(scan), -1, np.int64)
        keys[there] = encoding.keys(fixed(of_picture.drop_null()), resolution.table, bucket[there])
        rows[there] = records.indexes[encoding.kind].find(keys[there])
        pictures[encoding.kind] = rows
        missing = np.flatnonzero(stays & (rows < 0))
        reasons = [missing_records.failed.get(key_bytes(key).hex()) for key in keys[missing]]
        missing_records.leave(
            joined,
            scan,
            missing,
            reasons,
            "rejected while encoding",
            f"its {encoding.kind}{at} is not encoded yet ({ENCODE}{setting})",
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
