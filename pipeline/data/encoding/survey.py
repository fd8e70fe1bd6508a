"""Survey: a source and the cache as they are, before anything is encoded.

What: `survey` scans a source by headers and compares it with the cache, for `encode --dry-run`. Nothing is published;
next to the cache there may be temporary files without a name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sana_pipe.base.errors import UserError, escaped
from sana_pipe.data.cache.arrow import batches
from sana_pipe.data.cache.cache import Cache, check_source_name
from sana_pipe.data.cache.encodings import Encoding, PictureEncoding, pictures_of
from sana_pipe.data.cache.scan_table import ABSENT, places
from sana_pipe.data.encoding import estimate, last_scan, scan_rows
from sana_pipe.data.encoding import scan as scanning
from sana_pipe.data.encoding.fragments import Fragments
from sana_pipe.data.encoding.reading import Reading, settled
from sana_pipe.data.encoding.regularisation import without_trigger
from sana_pipe.data.images import buckets, decoding
from sana_pipe.data.signals.latent import are_imported, compression
from sana_pipe.data.sources.config import DataConfig
from sana_pipe.data.sources.detect import open_source
from sana_pipe.data.sources.source import Source
from sana_pipe.data.work.progress import Progress

_BLANK = {"control": "black", "mask": "white"}
"""The mark of a control picture or mask that a sample lacks."""
ENLARGED, CROPPED = 2.0, 1 / 3
"""Pictures that are enlarged by more, or lose more of their area, are counted (`fit_notes`)."""


@dataclass(frozen=True)
class Survey:
    """A source, the encodings of its records, its scan, and the work that the cache lacks.

    Attributes:
        encodings: of the records.
        table: the target resolutions (height, width) of the buckets.
    """

    source: Source
    cache: Cache | None
    encodings: list[Encoding]
    table: list[buckets.Shape]
    scan: pa.Table
    work: estimate.Wanted


def survey(
    source: Source, reading: Reading, cache: Cache | None, encodings: list[Encoding], rehash: bool = False
) -> Survey:
    """Scan a source, and compare it with a cache.

    Args:
        source, reading: as from `opened`.
        encodings: of the records, as of `signals.encodings`.
        rehash: read every file again instead of trusting size and mtime.

    Raises:
        UserError: the source cannot be read.
    """
    check_latents(source, encodings)
    table = bucket_table(reading.data, encodings)
    settings = ScanSettings(reading.data, reading.encode.workers, table, rehash)
    if cache is not None:
        encodings = with_stored_decoder(cache, encodings, reading.data.decoder)
    for look in scan_rows.looks(encodings):
        with scanning_of(source, cache, settings, look) as (scanned, _):
            scan = scanned.table()
        try:
            if cache is not None:
                last_scan.count_missing(cache, source, scan, reading.encode.max_shrink)
            break
        except UserError:
            if not scan_rows.unread(scan):
                raise  # else the missing pictures may be here under other names, which their bytes tell
    table = table or sizes_of(scan)
    work = estimate.wanted(scan, cache, encodings, table)
    return Survey(source, cache, encodings, table, scan, work)


def opened(
    data: str,
    name: str | None,
    asked: Reading,
    scan_of: Callable[[str], dict[str, Any] | None],
    *,
    patience_s: float,
    raw: bool,
) -> tuple[Source, Reading]:
    """Open the source of `--data`, and say how it is read; prints what differs from its last scan.

    Args:
        data, name: as in `sana_pipe.stages.encode.run`.
        asked: the reading that the configuration and `--format` ask for.
        scan_of: name of a source -> its last scan document; None: there is none.
        patience_s, raw: as of `open_source`.
    """
    readings: list[Reading] = []

    def settle(name: str) -> tuple[DataConfig, str | None]:
        check_source_name(name)  # before hours of reading
        last = scan_of(name)
        readings.append(without_trigger(settled(asked, name, last), name, last))
        return readings[0].data, readings[0].format

    source = open_source(data, asked.data, name, asked.format, patience_s, raw, settle)
    for note in readings[0].notes:
        click.echo(note)
    return source, readings[0]


@dataclass(frozen=True)
class ScanSettings:
    """The settings of a scan.

    Attributes:
        data: the section with the rules for pictures that are left out.
        workers: threads that read pictures (`encode.workers`).
        table: the target resolutions (height, width) of the buckets; empty: the sizes that occur.
        rehash: whether every file is read again, whatever its size and mtime.
    """

    data: DataConfig
    workers: int
    table: list[buckets.Shape]
    rehash: bool = False

    def refusal(self, height: int, width: int) -> str | None:
        """Say why a picture of this size is left out; None: it is not."""
        bucket = buckets.nearest(self.table, height, width) if self.table else (height, width)
        return buckets.refusal(height, width, bucket, self.data)


def check_latents(source: Source, encodings: Sequence[Encoding]) -> None:
    """Raise UserError if a source of latents is to be encoded as pictures, or the other way round."""
    if source.holds_latents and not are_imported(encodings):
        raise UserError(
            f"source {source.name!r} holds latents, and the configuration does not say how they are scaled",
            fix="--set vae.imported=S, the number that they were multiplied by (for Sana's VAE 0.41407, or 1)",
        )
    if are_imported(encodings) and not source.holds_latents:
        raise UserError(
            f"vae.imported is for latents of others, and source {source.name!r} holds pictures",
            fix="--format latents for tars of latents; --set vae.imported=null for pictures",
        )


def bucket_table(data: DataConfig, encodings: Sequence[Encoding]) -> list[buckets.Shape]:
    """The target resolutions (height, width) of the buckets; empty for latents of others, of which the scan gives the
    sizes (`sizes_of`). Raises ConfigError as `buckets.table`."""
    return [] if are_imported(encodings) else buckets.table(data, compression(encodings))


def sizes_of(scan: pa.Table) -> list[buckets.Shape]:
    """The sizes (height, width) of the usable items of a scan, sorted."""
    sizes = set[buckets.Shape]()
    for batch in batches(scan.select(["height", "width", "reject"])):
        usable = batch.filter(pc.is_null(batch.column("reject")))
        sizes.update(zip(usable.column("height").to_pylist(), usable.column("width").to_pylist(), strict=True))
    return sorted(sizes)


@contextmanager
def scanning_of(
    source: Source,
    cache: Cache | None,
    settings: ScanSettings,
    look: scan_rows.Look,
    fragments: Fragments | None = None,
) -> Iterator[tuple[scanning.Scan, Progress]]:
    """Begin a scan, and show its progress."""
    with (
        Progress("scan", None) as bar,
        scanning.begin(
            source,
            source.name,
            cache,
            max_pixels=settings.data.max_pixels,
            workers=max(1, settings.workers),
            rehash=settings.rehash,
            progress=bar.reach,
            refuse=settings.refusal,
            look=look,
            fragments=fragments,
        ) as scan,
    ):
        yield scan, bar


def fit_notes(table: pa.Table, shapes: list[buckets.Shape], data: DataConfig) -> list[str]:
    """Return how many usable pictures of a scan fit their buckets badly, where no setting leaves such pictures out, and
    how many samples lack a control picture or mask that they need not have."""
    rules = (
        ("max_upscale", buckets.upscale, ENLARGED, f"are enlarged by more than {ENLARGED:g} times", "{:.3g} times"),
        ("max_crop_loss", buckets.crop_loss, CROPPED, f"lose more than {CROPPED:.0%} of their area", "{:.0%}"),
    )
    counts: dict[str, int] = Counter()
    worst: dict[str, tuple[float, str]] = {}
    lacking: dict[str, int] = Counter()
    for batch in batches(table.select(["item", "width", "height", "reject", "pictures"])):
        usable = batch.filter(pc.and_(pc.is_null(batch.column("reject")), pc.is_valid(batch.column("width"))))
        for kind in _BLANK:
            absent = pc.equal(places(usable, kind).column("digest"), pa.scalar(ABSENT, pa.binary(16)))
            lacking[kind] += pc.sum(absent).as_py() or 0
        height, width = (usable.column(side).to_numpy().astype(np.int64) for side in ("height", "width"))
        sides = np.array(shapes, np.int64)[buckets.nearest_all(shapes, height, width)].T
        for option, measure, limit, _, _ in rules:
            values = measure(height, width, sides)
            if getattr(data, option) is None and (bad := int((values > limit).sum())):
                counts[option] += bad
                row = int(values.argmax())
                if values[row] > worst.get(option, (0.0, ""))[0]:
                    worst[option] = values[row], usable.column("item")[row].as_py()
    return [
        f"{counts[option]} pictures {what}, the worst {form.format(worst[option][0])}: {escaped(worst[option][1])} "
        f"(data.{option} leaves such pictures out)"
        for option, _, _, what, form in rules
        if option in worst
    ] + [
        f"{count} samples have no {kind} picture: a {_BLANK[kind]} one is used instead "
        f"(data.pictures.{kind}.required: false)"
        for kind, count in lacking.items()
        if count
    ]


def with_stored_decoder(cache: Cache, encodings: Sequence[Encoding], decoder: str) -> list[Encoding]:
    """The encodings; with `data.decoder: auto` with the decoder of the cache's records, if it has only others.

    Args:
        decoder: `data.decoder`.

    Raises:
        UserError: that decoder is not installed here; the user must ask for encoding everything again.
    """
    lead = pictures_of(encodings)[0]
    if decoder == "auto" and not are_imported(encodings):
        stored = [encoding for encoding in cache.encodings(lead.kind) if isinstance(encoding, type(lead))]
        decoders = [encoding.decoder for encoding in stored if replace(encoding, decoder=lead.decoder) == lead]
        if decoders and lead.decoder not in decoders:
            decoding.require(decoders[0])
            click.echo(f"pictures are decoded by {decoders[0]}, like those in the cache; see data.decoder")
            return [replace(one, decoder=decoders[0]) if isinstance(one, PictureEncoding) else one for one in encodings]
    return list(encodings)
