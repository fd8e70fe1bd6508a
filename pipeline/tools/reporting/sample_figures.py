"""The numbers of one sample of a snapshot: its picture and crop, its records and where their bytes lie, its captions.

`sample_figures` reads them; `sana-pipe view` prints them, or writes them as JSON with the fields in their order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

import numpy as np
import pyarrow.compute as pc

from sana_pipe.base.errors import IntegrityError
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.cache.snapshot_samples import RecordPlace
from sana_pipe.data.images import buckets
from sana_pipe.data.images.resize import cover_box
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.signals.text import TextEncoding
from sana_pipe.data.snapshots import near_samples
from sana_pipe.tools.reporting.json_values import INLINE


@dataclass(frozen=True)
class SampleBucket:
    """The bucket of a sample. samples: how many it has."""

    height: int
    width: int
    batch: int
    samples: int

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.height, self.width


@dataclass(frozen=True)
class ScannedItem:
    """An item's row in the scan. digest, width, height: None of what is no picture; reject: the reason to leave the
    item out."""

    size: int
    digest: bytes | None
    width: int | None
    height: int | None
    meta: str | None
    reject: str | None


@dataclass(frozen=True)
class SamplePicture:
    """The file of a sample as scanned, and its crop to the bucket.

    Attributes:
        digest: hex.
        crop: left, top, right, bottom, in the picture's pixels.
        crop_loss: the share of the picture's area that the crop removes.
        upscale: the factor of the crop's sides.
    """

    width: int
    height: int
    bytes: int
    digest: str
    crop: list[float]
    crop_loss: float
    upscale: float
    meta: str | None


@dataclass(frozen=True)
class RecordBytes:
    """The place of a record's bytes. shard: its file; storage: how values are stored there."""

    key: str
    shard: str
    offset: int
    bytes: int
    storage: str


@dataclass(frozen=True)
class RecordValues:
    """Statistics of a record that is a picture, such as a latent. channel_std: of each channel."""

    shape: list[int]
    mean: float
    std: float
    min: float
    max: float
    channel_std: list[float]


@dataclass(frozen=True)
class SampleRecord:
    """A record of a sample's picture. values: None where the record is no picture, such as a hash."""

    place: RecordBytes = field(metadata=INLINE)
    values: RecordValues | None = field(default=None, metadata=INLINE)


@dataclass(frozen=True)
class SampleCaption:
    """A caption. tokens: those that are stored; at_max_length: it was cut there, or just fits."""

    text: str
    tokens: int
    max_length: int
    at_max_length: bool
    weight: float
    place: RecordBytes = field(metadata=INLINE)


@dataclass(frozen=True)
class NearSample:
    """A sample that looks like another. bits: those in which their hashes differ."""

    row: int
    item: str
    bits: int


@dataclass(frozen=True)
class TooLittleDetail:
    """Pictures that cannot be compared. this: whether the sample's is; others: how many."""

    this: bool
    others: int


@dataclass(frozen=True)
class NearFigures:
    """The samples that look like one, the nearest first."""

    near: list[NearSample]
    too_little_detail: TooLittleDetail


@dataclass(frozen=True)
class SampleFigures:
    """All numbers of a sample.

    Attributes:
        snapshot: its id. row: in the snapshot.
        picture: None where the scan is missing.
        records: those of the picture by kind, the latent first.
        near: None: not asked for.
        readable: whether the picture's file can be read today; None: not tried.
    """

    sample_id: int
    snapshot: str
    row: int
    source: str
    item: str
    bucket: SampleBucket
    picture: SamplePicture | None
    records: dict[str, SampleRecord] = field(metadata=INLINE)
    captions: list[SampleCaption]
    near: NearFigures | None = field(default=None, metadata=INLINE)
    readable: bool | None = None


def sample_figures(cache: Cache, snapshot: Snapshot, row: int) -> SampleFigures:
    """Read the numbers of a sample, without `near` and `readable`.

    Raises:
        IntegrityError: a record is damaged.
    """
    sample, bucket = snapshot.sample(row), snapshot.buckets[snapshot.sample(row).bucket]
    source, item = snapshot.source_item(row)
    return SampleFigures(
        sample_id=sample.sample_id,
        snapshot=snapshot.id,
        row=row,
        source=source,
        item=item,
        bucket=SampleBucket(bucket.height, bucket.width, bucket.batch, bucket.samples),
        picture=_picture(scanned(cache, snapshot, source, item), (bucket.height, bucket.width)),
        records=_records(snapshot, row),
        captions=_captions(snapshot, row),
    )


def picture_records(snapshot: Snapshot, row: int) -> dict[str, np.ndarray]:
    """Read the records of a sample that are pictures, by kind, the latent first: (C, h, w) float32.

    Raises:
        IntegrityError: a record is damaged.
    """
    sample = snapshot.sample(row)
    return {
        kind: (snapshot.picture(sample, kind).astype(np.uint32) << 16).view(np.float32)
        for kind, encoding in snapshot.pictures.items()
        if encoding.axes == LatentEncoding.axes
    }


def near_figures(snapshot: Snapshot, row: int) -> NearFigures:
    """Compare a sample with all others by their hashes. Errors: as `near_samples.alike`."""
    alike = near_samples.alike(snapshot, row)
    near = [NearSample(other, ": ".join(snapshot.source_item(other)), bits) for other, bits in alike.pictures]
    return NearFigures(near, TooLittleDetail(alike.is_flat, alike.flat))


def scanned(cache: Cache, snapshot: Snapshot, source: str, item: str) -> ScannedItem | None:
    """Read an item's row in the scan that the snapshot was made from; None: the scan is missing or lacks the item."""
    columns = [column.name for column in fields(ScannedItem)]
    try:
        table = cache.table(snapshot.head.sources[source], ["item", *columns])
    except (IntegrityError, KeyError):
        return None
    at = pc.index(table.column("item"), item).as_py()
    return None if at < 0 else ScannedItem(**table.select(columns).slice(at, 1).to_pylist()[0])


def _picture(row: ScannedItem | None, size: tuple[int, int]) -> SamplePicture | None:
    """The file as scanned, and its crop to the bucket's (height, width)."""
    if row is None or row.digest is None or row.width is None or row.height is None:
        return None
    return SamplePicture(
        width=row.width,
        height=row.height,
        bytes=row.size,
        digest=row.digest.hex(),
        crop=[round(side, 1) for side in cover_box(row.width, row.height, size)],
        crop_loss=buckets.crop_loss(row.height, row.width, size),
        upscale=buckets.upscale(row.height, row.width, size),
        meta=row.meta,
    )


def _records(snapshot: Snapshot, row: int) -> dict[str, SampleRecord]:
    sample, values = snapshot.sample(row), picture_records(snapshot, row)
    return {
        kind: SampleRecord(
            _place(snapshot, kind, record, 2 * math.prod(snapshot.shape(kind, sample.bucket))),
            _statistics(values[kind]) if kind in values else None,
        )
        for kind, record in sample.pictures.items()
    }


def _captions(snapshot: Snapshot, row: int) -> list[SampleCaption]:
    encoding, texts = snapshot.encoding(TextEncoding), snapshot.captions(row, snapshot.reader("text"))
    return [
        SampleCaption(
            text=text,
            tokens=caption.rows,
            max_length=encoding.max_length,
            at_max_length=caption.rows >= encoding.max_length,
            weight=caption.weight,
            place=_place(snapshot, "text", caption, 2 * caption.rows * encoding.width),
        )
        for text, caption in zip(texts, snapshot.sample(row).captions, strict=True)
    ]


def _place(snapshot: Snapshot, kind: str, record: RecordPlace, plain: int) -> RecordBytes:
    """The place of a record. plain: its bytes as plain values."""
    return RecordBytes(
        key=record.key.hex(),
        shard=snapshot.files.where(snapshot.shard_path(kind, record.shard)),
        offset=record.offset,
        bytes=plain if record.length is None else record.length,
        storage=snapshot.head.encodings_by_kind[kind].storage,
    )


def _statistics(record: np.ndarray) -> RecordValues:
    return RecordValues(
        shape=list(record.shape),
        mean=float(record.mean(dtype=np.float64)),
        std=float(record.std(dtype=np.float64)),
        min=float(record.min()),
        max=float(record.max()),
        channel_std=record.reshape(len(record), -1).std(1, dtype=np.float64).tolist(),
    )
