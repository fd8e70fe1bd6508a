"""Survey: a source and the cache as they are, before anything is encoded.

What: `survey` opens a source, scans it by headers and compares it with the cache, for `encode --dry-run`. Nothing is
published; beside the cache there may be temporary files without a name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import click
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline import signals
from pipeline.cache.arrow import batches
from pipeline.cache.cache import Cache, CacheLocation, check_source_name
from pipeline.cache.recipes import PictureRecipe, Recipe, pictures_of
from pipeline.cache.scan_table import ABSENT, places
from pipeline.config import Config, DataConfig
from pipeline.encoding import estimate, last_scan, scan_rows
from pipeline.encoding import scan as scanning
from pipeline.encoding.fragments import Fragments
from pipeline.encoding.reading import Reading, settled
from pipeline.encoding.understood import without_trigger
from pipeline.errors import IntegrityError, UserError, escaped
from pipeline.images import buckets, decoding
from pipeline.models.text import count_rows
from pipeline.signals.latent import compression
from pipeline.sources import caption_rules
from pipeline.sources.detect import open_source
from pipeline.sources.source import Source
from pipeline.work.progress import Progress

_BLANK = {"control": "black", "mask": "white"}
"""The mark of a further picture that a sample lacks."""
ENLARGED, CROPPED = 2.0, 1 / 3
"""Pictures that are enlarged by more, or lose more of their area, are counted (`fit_notes`)."""


@dataclass(frozen=True)
class Survey:
    """A source, the recipes of its records, its scan, and the work that the cache lacks.

    Attributes:
        recipes: of the records.
        table: the target resolutions (height, width) of the buckets.
        count_rows: normalised captions -> their rows.
    """

    config: Config
    source: Source
    cache: Cache | None
    recipes: list[Recipe]
    table: list[buckets.Shape]
    scan: pa.Table
    work: estimate.Wanted
    count_rows: Callable[[Sequence[str]], list[int]]


def survey(
    config: Config, data: str, name: str | None = None, rehash: bool = False, format: str | None = None
) -> Survey:
    """Open and scan a source.

    Args:
        data, name, rehash, format: as in `stages.encode.run`.

    Raises:
        UserError: a source, a model or a cache that cannot be read.
    """
    source, reading = opened(config, data, name, format)
    config = reading.config
    recipes = signals.recipes(signals.Encoders(config.vae, config.text), config.data, config.encode)
    table = buckets.table(config.data, compression(recipes))
    cache = CacheLocation(config.cache, config.mirror, config.patience_s).open_if_there()
    if cache is not None:
        recipes = with_stored_decoder(cache, recipes, config)
    for look in (scan_rows.from_header, scan_rows.from_bytes):
        with scanning_of(config, source, cache, table, rehash, look) as (scanned, _):
            scan = scanned.table()
        try:
            if cache is not None:
                last_scan.gone(cache, source, scan, config.encode.max_shrink)
            break
        except UserError:
            if not scan_rows.unread(scan):
                raise  # else the missing pictures may be here under other names, which their bytes tell
    work = estimate.wanted(scan, cache, recipes, table)
    count = partial(count_rows, config.text, caption_rules.instruction(config.text))
    return Survey(config, source, cache, recipes, table, scan, work, count)


def opened(
    config: Config, data: str, name: str | None, format: str | None, *, mends: bool = False
) -> tuple[Source, Reading]:
    """The source of `--data`, and how it is read; prints what differs from its last scan. mends: write a damaged
    `format.json` of the cache again."""
    location = CacheLocation(config.cache, config.mirror, config.patience_s)
    readings: list[Reading] = []

    def settle(name: str) -> tuple[DataConfig, str | None]:
        check_source_name(name)  # before hours of reading
        try:
            cache = location.open_if_there()
        except IntegrityError:
            if not mends:
                raise
            cache = location.open(create=True)
        last = None if cache is None else cache.last_scan(name)
        readings.append(without_trigger(settled(config, format, name, last), name, last))
        return readings[0].config.data, readings[0].format

    raw = config.text.recipe == "nvlabs"
    source = open_source(data, config.data, name, format, config.patience_s, raw, settle)
    for note in readings[0].notes:
        click.echo(note)
    return source, readings[0]


@contextmanager
def scanning_of(
    config: Config,
    source: Source,
    cache: Cache | None,
    table: list[buckets.Shape],
    rehash: bool,
    look: scan_rows.Look,
    fragments: Fragments | None = None,
) -> Iterator[tuple[scanning.Scan, Progress]]:
    """A scan with the settings of a configuration, and its progress."""
    with (
        Progress("scan", None) as bar,
        scanning.begin(
            source,
            source.name,
            cache,
            max_pixels=config.data.max_pixels,
            workers=max(1, config.encode.workers),
            rehash=rehash,
            progress=bar.reach,
            refuse=lambda height, width: buckets.refusal(
                height, width, buckets.nearest(table, height, width), config.data
            ),
            look=look,
            fragments=fragments,
        ) as scan,
    ):
        yield scan, bar


def fit_notes(table: pa.Table, shapes: list[buckets.Shape], data: DataConfig) -> list[str]:
    """Return how many usable pictures of a scan fit their buckets badly, where no setting leaves such pictures out, and
    how many samples lack a further picture that they need not have."""
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
        f"{count} samples have no {kind} picture: a {_BLANK[kind]} one stands for it "
        f"(data.pictures.{kind}.required: false)"
        for kind, count in lacking.items()
        if count
    ]


def with_stored_decoder(cache: Cache, recipes: Sequence[Recipe], config: Config) -> list[Recipe]:
    """The recipes; with `data.decoder: auto` with the decoder of the cache's records, if it has only others.

    Raises:
        UserError: that decoder is not installed here; the user must ask for encoding everything again.
    """
    lead = pictures_of(recipes)[0]
    if config.data.decoder == "auto":
        stored = [recipe for recipe in cache.recipes(lead.kind) if isinstance(recipe, type(lead))]
        decoders = [recipe.decoder for recipe in stored if replace(recipe, decoder=lead.decoder) == lead]
        if decoders and lead.decoder not in decoders:
            decoding.require(decoders[0])
            click.echo(f"pictures are decoded by {decoders[0]}, like those in the cache; see data.decoder")
            return [replace(one, decoder=decoders[0]) if isinstance(one, PictureRecipe) else one for one in recipes]
    return list(recipes)
