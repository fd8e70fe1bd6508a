"""Estimate: what encoding a source would read, make and store, and how long it would take. Nothing is written.

`wanted` lists the work that is not in the cache yet, `sizes` its bytes, `probe` the speed of the real encoders on real
batches.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sana_pipe.base.amounts import amount, duration
from sana_pipe.data.cache import codec
from sana_pipe.data.cache.arrow import batches
from sana_pipe.data.cache.cache import Cache, Unit, WorkList
from sana_pipe.data.cache.encodings import CaptionEncoding, Encoding, PictureEncoding, caption_of, records_schema
from sana_pipe.data.cache.scratch import Scratch
from sana_pipe.data.cache.shard import BLOCK, npy_header
from sana_pipe.data.encoding import image_batch, scan_rows
from sana_pipe.data.encoding import plan as planning
from sana_pipe.data.encoding.encoder_settings import EncoderSettings
from sana_pipe.data.encoding.plan import images_of_batch
from sana_pipe.data.images import buckets, decoding
from sana_pipe.data.signals import CaptionSignal, PictureEncoder, PictureSignal
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.signals.text import TextEncoding
from sana_pipe.data.sources import caption_rules
from sana_pipe.data.sources.config import DataConfig
from sana_pipe.data.sources.filenames import escaped
from sana_pipe.data.sources.reject_kinds import Kinds
from sana_pipe.data.sources.source import Place, Source

Shape = tuple[int, int]

SAMPLE = 4096
"""Limit on captions that are tokenized."""
FIRST = 1024
"""Pictures of a bucket that a probe may read."""

PROBE_S = 60.0
"""Seconds that a probe may take, without loading the encoders. A started batch is finished."""

_UNIT = 2500  # bytes of a unit's commit document, and of its place in the plan and in the segment
_PLAN = 9000  # bytes of a plan, its segment and their lists, with copies, in addition to their rows
_SHARD = 4400  # bytes of a shard's head, of its table's frame and of its end


@dataclass
class Pictures:
    """Pictures without a record of some kind.

    Attributes:
        sizes: target (height, width) -> number of new pictures.
        first: target (height, width) -> places of the first of these, at most `FIRST`.
        cached: records that the cache already holds.
    """

    sizes: Counter[Shape] = field(default_factory=Counter)
    first: dict[Shape, list[Place]] = field(default_factory=dict)
    cached: int = 0

    @property
    def new(self) -> int:
        """New pictures."""
        return self.sizes.total()

    def add(self, new: pa.Table) -> None:
        """Count new pictures, rows of `planning.IMAGES`."""
        for shape, rows in planning.by_target(new):
            self.sizes[shape] += len(rows)
            first = self.first.setdefault(shape, [])
            places = new.select(Place._fields).take(pa.array(rows[: FIRST - len(first)]))
            first += [Place(**place) for place in places.to_pylist()]


@dataclass
class Wanted:
    """The work of a source.

    Attributes:
        items, usable: counts of the scan.
        unread: usable items that were judged by their header only.
        rejects: by kind of reason.
        buckets: (height, width) -> samples and the sum of their crop losses.
        pictures: by the encoding of their records.
        captions: number of new captions. caption_bytes: their length as written.
        sample: some of them, normalised, and their length in bytes as written.
        cached_captions: records that the cache already holds (the null record included).
        null: whether the null record is missing.
    """

    items: int = 0
    usable: int = 0
    unread: int = 0
    rejects: Kinds = field(default_factory=Kinds)
    buckets: dict[Shape, list[float]] = field(default_factory=dict)
    pictures: dict[PictureSignal, Pictures] = field(default_factory=dict)
    captions: int = 0
    caption_bytes: int = 0
    sample: list[tuple[str, int]] = field(default_factory=list)
    cached_captions: int = 0
    null: bool = True

    @property
    def images(self) -> int:
        """New pictures that are decoded: what is made with others is made of their pixels."""
        alone = sum(each.new for encoding, each in self.pictures.items() if not encoding.shares_pixels)
        return max([alone, *(each.new for each in self.pictures.values())])

    @property
    def texts(self) -> int:
        """New text records."""
        return self.captions + self.null


def wanted(scan: pa.Table, cache: Cache | None, encodings: Sequence[Encoding], table: list[Shape]) -> Wanted:
    """Compare a scan (of whole pictures or of headers) with a cache.

    Args:
        encodings: as of `signals.encodings`. table: the target resolutions of the buckets.
    """
    text = caption_of(encodings)
    scratch = cache.files.scratch if cache is not None else Scratch()
    work, refused = _counted(scan, table), dict[tuple[str, str], None]()
    for encoding in (encoding for encoding in encodings if isinstance(encoding, PictureSignal)):
        pictures = work.pictures[encoding] = Pictures()
        for new, cached in _new(
            planning.image_work(scan, "", encoding, table, scratch), "item", cache, encoding, refused
        ):
            pictures.cached += cached
            pictures.add(new)

    captions = scratch.table_writer(planning.CAPTIONS)
    every = planning.caption_work(scan, text, scratch)
    for new, cached in _new(every.slice(1), "caption", cache, text, refused):  # the null record is the first
        work.cached_captions += cached
        work.captions += len(new)
        work.caption_bytes += pc.sum(pc.binary_length(new.column("caption"))).as_py() or 0
        captions.add(new)
    work.sample = list(_sampled(captions.finish(), text))
    work.null = cache is None or not cache.index(text.name).has(text.null_key)
    work.cached_captions += not work.null
    work.rejects.add(refused)
    work.rejects = work.rejects.ranked()
    return work


def _counted(scan: pa.Table, table: list[Shape]) -> Wanted:
    """Return what the scan alone says: items, rejects and buckets."""
    work, shapes = Wanted(items=scan.num_rows, unread=scan_rows.unread(scan)), np.array(table, np.int64)
    for batch in batches(scan.select(planning.SCANNED)):
        refused = batch.filter(pc.is_valid(batch.column("reject")))
        work.rejects.add(zip(*(refused.column(name).to_pylist() for name in ("item", "reject")), strict=True))
        usable = batch.filter(pc.is_null(batch.column("reject")))
        work.usable += len(usable)
        height, width = (usable.column(name).to_numpy().astype(np.int64) for name in ("height", "width"))
        which = buckets.nearest_all(table, height, width)
        loss = buckets.crop_loss(height, width, shapes[which].T)
        for number in np.unique(which).tolist():
            bucket = work.buckets.setdefault(table[number], [0, 0.0])
            bucket[0] += int((which == number).sum())
            bucket[1] += float(loss[which == number].sum())
    return work


def _new(
    records: pa.Table, name: str, cache: Cache | None, encoding: Encoding, refused: dict[tuple[str, str], None]
) -> Iterator[tuple[pa.Table, int]]:
    """Divide pieces of a work list: the rows that the cache lacks, and the number of those that it has. Rows that
    cannot be made are added to `refused`, as (value of column `name`, reason): each once, whatever kinds of records
    lack it."""
    if cache is None:
        yield from ((batch, 0) for batch in batches(records))
        return
    reasons = cache.index(encoding.name).outcomes
    for batch, present, failed in planning.settled(cache, encoding, records):
        unmade = batch.filter(pa.array(failed))
        pairs = zip(unmade.column(name).to_pylist(), unmade.column("key").to_pylist(), strict=True)
        refused |= {(label, reasons[key.hex()].reason): None for label, key in pairs}
        yield batch.filter(pa.array(~present & ~failed)), int(present.sum())


def _sampled(captions: pa.Table, encoding: CaptionEncoding) -> Iterator[tuple[str, int]]:
    """About `SAMPLE` captions at equal distances."""
    step, before = max(1, math.ceil(len(captions) / SAMPLE)), 0
    for batch in batches(captions.select(["caption"])):
        rows = np.arange(-before % step, len(batch), step)
        before += len(batch)
        for caption in batch.column("caption").take(pa.array(rows)).to_pylist():
            yield caption_rules.normalise(caption, encoding.normalisation), len(caption.encode())


# ---------------------------------------------------------------- bytes


def unit_bytes(cache: Cache, plan: WorkList, unit: Unit) -> int:
    """Bytes that a unit's shard will take, about: of captions only the lengths are known."""
    encoding = cache.encoding(plan.encoding)
    rows = cache.unit_rows(plan, unit)
    if isinstance(encoding, PictureEncoding):
        shapes = zip(rows.column("height").to_pylist(), rows.column("width").to_pylist(), strict=True)
        return sum(picture_bytes(encoding, height, width) for height, width in shapes)
    assert isinstance(encoding, CaptionEncoding)
    lengths = [None if text is None else len(text.encode()) for text in rows.column("caption").to_pylist()]
    return sum(
        text_bytes(encoding, encoding.max_length if length is None else likely_rows(encoding, length), length or 0)
        for length in lengths
    )


def picture_bytes(encoding: PictureEncoding, height: int, width: int) -> int:
    """Bytes of a picture's record in a shard, including its row of the shard's table. height, width: in pixels."""
    return _record(encoding, encoding.shape(height, width))


def text_bytes(encoding: CaptionEncoding, rows: int, caption: int) -> int:
    """Bytes of a text record in a shard. rows: of the record; caption: bytes of the caption as written."""
    return _record(encoding, (rows, encoding.width)) + BLOCK + _padded(caption)


def member_bytes(encoding: Encoding, shape: tuple[int, ...]) -> int:
    """Bytes of a record's member in a shard: tar header, npy header, payload, padding. shape: of the values."""
    size = codec.payload_bytes(encoding, shape)
    return BLOCK + _padded(len(npy_header(shape)) + size)


def _record(encoding: Encoding, shape: tuple[int, ...]) -> int:
    return member_bytes(encoding, shape) + _row(encoding.kind)


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _row(kind: str) -> int:
    return sum(column.type.bit_width // 8 for column in records_schema(kind))


def likely_rows(encoding: CaptionEncoding, caption: int) -> int:
    """Rows of a caption of so many bytes, without a tokenizer: three bytes per token, fewer than most captions have."""
    return min(encoding.max_length, 2 + -(-caption // 3))


def likely_bytes(scan: pa.Table, data: DataConfig, latent: LatentEncoding, text: TextEncoding) -> int:
    """Bytes of a new cache of a scan, without a tokenizer."""
    work = wanted(scan, None, [latent, text], buckets.table(data, latent.compression))
    return sizes(work, text, lambda texts: [likely_rows(text, len(each.encode())) for each in texts]).total


@dataclass(frozen=True)
class Sizes:
    """Bytes that the work will take.

    Attributes:
        records: of shards, by the noun of the records.
        index: of all tables and documents.
        tokens: rows of all new captions, without the first of each and without the null record.
        sampled: captions that were tokenized.
    """

    records: dict[str, int]
    index: int
    tokens: int
    sampled: int

    @property
    def total(self) -> int:
        return sum(self.records.values()) + self.index


def sizes(work: Wanted, text: CaptionEncoding, count_rows: Callable[[Sequence[str]], list[int]]) -> Sizes:
    """Bytes by kind.

    Args:
        text: the encoding of captions.
        count_rows: normalised captions -> their rows (a tokenizer); called for `Wanted.sample` and the null record.
    """
    assert isinstance(text, CaptionSignal)
    rows = count_rows([caption for caption, _ in work.sample]) if work.sample else []
    scale = work.captions / len(rows) if rows else 0.0
    body = sum(text_bytes(text, n, size) for n, (_, size) in zip(rows, work.sample, strict=True))
    null = text_bytes(text, text.max_length if text.pads_null else count_rows([""])[0], 0) if work.null else 0
    units = -(-work.captions // planning.UNIT_CAPTIONS) + work.null
    captions = round(body * scale) + null + units * _SHARD
    # Twice a row: the tables of the unit and the plan. Scan and plan, which have copies, hold keys, digests and text.
    index = work.texts * (2 * _row(text.kind) + 48) + work.caption_bytes + work.items * 96
    index += _PLAN * bool(units) + units * _UNIT
    records = dict[str, int]()
    for encoding, pictures in work.pictures.items():
        records[encoding.noun], units = _picture_bytes(pictures, encoding)
        index += pictures.new * (2 * _row(encoding.kind) + 128) + _PLAN * bool(units) + units * _UNIT
    records[text.noun] = captions
    tokens = round((sum(rows) - len(rows)) * scale)
    return Sizes(records, index if work.images + work.texts else 0, tokens, len(rows))


def _picture_bytes(pictures: Pictures, encoding: PictureEncoding) -> tuple[int, int]:
    """Bytes of the shards of new pictures, and the number of shards."""
    total = units = 0
    for shape, count in pictures.sizes.items():
        total += count * picture_bytes(encoding, *shape)
        units += -(-count // planning.unit_images(encoding, shape))
    return total + units * _SHARD, units


# ---------------------------------------------------------------- time


@dataclass(frozen=True)
class Speed:
    """The seconds that a probe measured; None if nothing could be measured.

    Attributes:
        pixel_s: the encoder's, of each pixel of a picture, by encoding.
        decode_s: reading and decoding a picture in one thread.
        token_s: encoding a caption token.
        load_s: loading the encoders.
        images, captions: how many were encoded.
    """

    pixel_s: dict[PictureSignal, float]
    decode_s: float | None
    token_s: float | None
    load_s: float
    images: int
    captions: int
    device: str


def probe(
    work: Wanted,
    source: Source,
    encodings: Sequence[Encoding],
    settings: EncoderSettings,
    device: Any,
    budget_s: float = PROBE_S,
) -> Speed:
    """Encode a real batch of captions, and one of the most frequent bucket of each kind of pictures, and drop the
    results.

    Each encoder runs once before the clock starts. If a batch would take too long, a single picture is measured.

    Raises:
        UserError: the encoders cannot be loaded, or their output is wrong.
    """
    text, encoders = caption_of(encodings), settings.models
    assert isinstance(text, CaptionSignal)
    pixel_s: dict[PictureSignal, float] = {}
    decoded: list[float] = []
    load_s, texts, images = 0.0, 0, 0
    token_s = None
    if work.captions:
        began = time.monotonic()
        encoder: Any = text.encoder(encoders, device)
        load_s += time.monotonic() - began
        token_s, texts = _probe_text(encoder, work, settings, began + load_s + budget_s / 3)
        del encoder
    new = {encoding: each for encoding, each in work.pictures.items() if each.sizes}
    for encoding, pictures in new.items():
        began = time.monotonic()
        encoder = encoding.encoder(encoders, device)
        loaded = time.monotonic()
        load_s += loaded - began
        [(shape, _)] = pictures.sizes.most_common(1)
        fitting = image_batch.fitting(partial(encoding.footprint, encoders), lambda: device)
        images_of = ImageProbe(encoder, encoding, source, shape, images_of_batch(settings.encode, shape, fitting))
        end = loaded + budget_s * 2 / 3 / len(new)
        seconds, count = images_of.measure(pictures.first[shape], settings.max_pixels, end)
        decoded += images_of.decoded
        if seconds is not None:
            pixel_s[encoding] = seconds / math.prod(shape)
            images = max(images, count)
        del encoder
    decode_s = sum(decoded) / len(decoded) if decoded else None
    return Speed(pixel_s, decode_s, token_s, load_s, images, texts, str(device))


def _probe_text(encoder: Any, work: Wanted, settings: EncoderSettings, end: float) -> tuple[float | None, int]:
    by_length = sorted((caption for caption, _ in work.sample), key=len)
    take, tokens = min(len(by_length), planning.captions_of_batch(settings.encode)), list[int]()

    def encode(captions: list[str]) -> None:
        before = encoder.tokens
        encoder.encode(captions)
        tokens.append(encoder.tokens - before)

    seconds, count = _measured(encode, [by_length[i * len(by_length) // take] for i in range(take)], end)
    return (seconds / tokens[-1] if tokens[-1] else None), count


def _measured(encode: Callable[[list[Any]], object], batch: list[Any], end: float) -> tuple[float, int]:
    """Seconds of encoding a batch, and its size: 1 if the whole batch would take longer than until `end`."""
    one = batch[len(batch) // 2 :][:1]
    encode(one)  # loads kernels; of captions it runs the instruction, and compares with the reference
    began = time.monotonic()
    encode(one)
    seconds = time.monotonic() - began
    if 2 * seconds * len(batch) > end - time.monotonic():
        return seconds, 1
    encode(batch)
    began = time.monotonic()
    encode(batch)
    return time.monotonic() - began, len(batch)


@dataclass
class ImageProbe:
    """The measurement of an encoder on pictures of a bucket.

    Attributes:
        shape: the target (height, width) of the bucket.
        batch: the number of pictures in a batch.
        decoded: the seconds of reading and decoding each picture.
    """

    encoder: PictureEncoder
    encoding: PictureSignal
    source: Source
    shape: Shape
    batch: int
    decoded: list[float] = field(default_factory=list)

    def measure(self, places: list[Place], max_pixels: int, end: float) -> tuple[float | None, int]:
        """Return the seconds per picture (None if no picture could be read), and the number of pictures encoded.

        Args:
            places: of pictures of the bucket.
            max_pixels: the limit on the pixels of a picture.
            end: the time at which the measurement should be done.
        """
        pictures: list[np.ndarray] = []
        began = time.monotonic()
        there = [place for place in places if place.item is not None]  # a sample may lack a control picture or mask
        for place in there[: self.batch]:
            start = time.monotonic()
            if pictures and start - began > (end - began) / 4:
                break
            try:
                pictures.append(self.encoding.pixels(self.source.read(place), self.shape, max_pixels))
            except (OSError, decoding.ImageReject):
                continue
            self.decoded.append(time.monotonic() - start)
        if not pictures:
            return None, 0
        seconds, count = _measured(lambda some: self.encoder.encode(np.stack(some)), pictures, end)
        return seconds / count, count


def times(work: Wanted, size: Sizes, speed: Speed, workers: int, tasks: int) -> dict[str, Any]:
    """Device-hours of the work, and hours for each of `tasks` equal tasks (JSON values; null: not measured).

    A picture takes as long as its pixels say. Decoding runs at the same time as the encoder in `workers` threads
    (`encode.workers`), so the slower of the two decides.
    """
    by_kind = [_image_s(each, speed.pixel_s.get(encoding)) for encoding, each in work.pictures.items()]
    encode_s = None if None in by_kind else sum(seconds or 0.0 for seconds in by_kind)
    text_s = size.tokens * speed.token_s if speed.token_s is not None else (0.0 if not work.captions else None)
    decode_s = work.images * (speed.decode_s or 0.0) / max(1, workers)
    known = encode_s is not None and text_s is not None
    seconds = max(encode_s or 0.0, decode_s) + (text_s or 0.0)
    return {
        "device": speed.device,
        "probed_images": speed.images,
        "probed_captions": speed.captions,
        "load_s": speed.load_s,
        "image_encode_s": encode_s,
        "image_decode_s": decode_s,
        "text_encode_s": text_s,
        "decode_bound": encode_s is not None and decode_s > encode_s,
        "device_hours": seconds / 3600 if known else None,
        "tasks": tasks,
        "hours_per_task": (seconds / tasks + speed.load_s) / 3600 if known else None,
    }


def _image_s(pictures: Pictures, pixel_s: float | None) -> float | None:
    """Seconds of encoding new pictures; None: not measured."""
    if not pictures.new:
        return 0.0
    return None if pixel_s is None else pixel_s * sum(h * w * count for (h, w), count in pictures.sizes.items())


# ---------------------------------------------------------------- the report


def report(
    source: Source, work: Wanted, size: Sizes, free: int | None, reserve: int, time_estimate: dict[str, Any] | None
) -> dict[str, Any]:
    """The whole estimate as JSON values.

    Args:
        free: free bytes; None if the store does not say.
        reserve: bytes that must stay free (`disk_space.RESERVE`).
        time_estimate: from `times`; None if nothing was probed.
    """
    pictures = work.pictures.items()
    return {
        "source": source.name,
        "picture_columns": sorted(source.picture_columns),
        "items": work.items,
        "usable": work.usable,
        "rejects": sum(work.rejects.counts.values()),
        "unread": work.unread,
        "reasons": work.rejects.counts,
        "examples": work.rejects.examples,
        "ignored": vars(source.ignored.ranked()),
        "buckets": [
            {"height": shape[0], "width": shape[1], "samples": int(count), "crop_loss": loss / count}
            for shape, (count, loss) in sorted(work.buckets.items())
        ],
        "reused": {**{encoding.noun: each.cached for encoding, each in pictures}, "captions": work.cached_captions},
        "new": {**{encoding.noun: each.new for encoding, each in pictures}, "captions": work.texts},
        "tokens": {"total": size.tokens, "captions_tokenized": size.sampled, "captions": work.captions},
        "bytes": {**size.records, "index": size.index, "total": size.total},
        "free_bytes": free,
        "reserve_bytes": reserve,
        "enough_space": None if free is None else size.total + reserve <= free,
        "time": time_estimate,
    }


def column_lines(columns: Sequence[str]) -> list[str]:
    """Find which columns of a table have the pictures, for people."""
    names = " or ".join(repr(escaped(column)) for column in columns)
    return [f"pictures are taken from the column {names}"] if columns else []


def ignored_lines(ignored: Kinds) -> list[str]:
    """Say what of a source is not used, for people."""
    head = f"{ignored.total} files, members or captions of the source are not used:"
    return [head, *ignored.ranked().lines()] if ignored.total else []


def lines(report: dict[str, Any], cache: str) -> list[str]:
    """The report for people. cache: its location."""
    out = [
        f"source {report['source']!r}: {report['items']} items, {report['usable']} usable, "
        f"{report['rejects']} rejects expected",
        *column_lines(report["picture_columns"]),
        *Kinds(report["reasons"], report["examples"]).lines(),
        *ignored_lines(Kinds(**report["ignored"])),
    ]
    if report["unread"]:
        out.append(
            f"  {report['unread']} pictures were judged by their headers alone: damaged and duplicate "
            "pictures are noticed only when they are read whole"
        )
    out += [
        f"  {bucket['height']:5d} x {bucket['width']:<5d} {bucket['samples']:8d} samples, "
        f"mean crop loss {bucket['crop_loss']:.1%}"
        for bucket in report["buckets"]
    ]
    tokens = report["tokens"]
    for what, counts in (("already in the cache", report["reused"]), ("to be encoded", report["new"])):
        out.append(f"{what}: " + ", ".join(f"{count} {noun}" for noun, count in counts.items()))
    if tokens["captions_tokenized"] < tokens["captions"]:
        out.append(f"  tokens counted in a sample of {tokens['captions_tokenized']} of {tokens['captions']} captions")
    return [*out, *_space_lines(report, cache), *_time_lines(report["time"])]


def _space_lines(report: dict[str, Any], cache: str) -> list[str]:
    size = report["bytes"]
    state = {True: "enough", False: "NOT ENOUGH", None: "whether that is enough is unknown"}[report["enough_space"]]
    free = "free space unknown" if report["free_bytes"] is None else f"{amount(report['free_bytes'])} free"
    return [
        "bytes: "
        + ", ".join(f"{what} {amount(count)}" for what, count in size.items() if what != "total")
        + f"; {amount(size['total'])} in total",
        f"space at {cache}: {free}, {amount(size['total'])} needed and "
        f"{amount(report['reserve_bytes'])} in reserve: {state}",
    ]


def _time_lines(estimate: dict[str, Any] | None) -> list[str]:
    if estimate is None:
        return ["time: not probed"]
    if estimate["device_hours"] is None:
        return ["time: unknown, because the probe could not encode any of the work"]
    tasks, hours = estimate["tasks"], estimate["hours_per_task"]
    share = f", {duration(hours * 3600)} for each of {tasks} tasks" if tasks > 1 else ""
    out = [
        f"time: {duration(estimate['device_hours'] * 3600)} on one device "
        f"({estimate['device_hours']:.3g} device-hours, {estimate['device']}){share}; "
        f"probed with {estimate['probed_images']} pictures and {estimate['probed_captions']} captions"
    ]
    if estimate["decode_bound"]:
        out.append("  decoding takes longer than encoding: raise encode.workers")
    return out
