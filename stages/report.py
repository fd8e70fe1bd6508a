"""`sana-pipe report`: one HTML page about a snapshot and a run.

What: collects the numbers (`reporting.figures`), reads pictures of rejects where their sources still exist,
and writes one file that needs no network. Writes nothing into the cache or the run.
"""

from __future__ import annotations

import signal
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import click
from PIL import Image

from pipeline.base import processes
from pipeline.base.amounts import amount
from pipeline.base.errors import UserError, shown
from pipeline.config import Config
from pipeline.data.cache.cache import Cache
from pipeline.data.cache.prompts import spread
from pipeline.data.cache.snapshot import Snapshot
from pipeline.tools import outputs
from pipeline.tools.locations import cache_location
from pipeline.tools.reporting import page, report_page
from pipeline.tools.reporting.blocks import Card, Missing
from pipeline.tools.reporting.data_figures import Alike, Example, Reject, SnapshotFigures, Visits
from pipeline.tools.reporting.figures import collect
from pipeline.tools.reporting.further_figures import FurtherExample, further_encodings
from pipeline.tools.reporting.source_pictures import Embedded, SourcePictures, embedded

PAGE = "report.html"
T = TypeVar("T", Reject, Visits, Alike)


def run(
    config: Config,
    out: Path,
    run: Path | None = None,
    snapshot: str | None = None,
    compare: Path | None = None,
    pictures: bool = True,
    gallery: int = 0,
) -> int:
    """Write the page.

    Args:
        out: the file.
        run, snapshot, compare: see `reporting.figures.collect`.
        pictures: read the sources for thumbnails.
        gallery: how many latents are decoded, evenly spaced in the snapshot. 0 is the default because the decoder needs
            the weights of the VAE, and minutes where there is no GPU.

    Returns:
        0.

    Raises:
        UserError: as `collect`; there is neither a snapshot nor a run; the page cannot be written.
        DecodeError: the decoding process failed.
    """
    outputs.check(config, out)
    page.check_out(out)
    figures, cache, opened = collect(
        Path(config.train.output), cache_location(config).open, run=run, snapshot=snapshot, compare=compare
    )
    if opened is None and figures.run is None:
        raise _nothing(figures.missing)
    thumbnails = _Thumbnails(config, cache) if pictures and cache is not None else None
    cards = _gallery(config, opened, thumbnails, gallery) if gallery and opened is not None else []
    if thumbnails is not None and opened is not None and figures.snapshot is not None:
        figures = replace(figures, snapshot=_with_pictures(figures.snapshot, opened, thumbnails))
    sections = report_page.write_report(figures, out, cards)
    click.echo(f"{out}: {len(sections)} sections, {amount(out.stat().st_size)}")
    return 0


def finish(config: Config, run: Path, file: str) -> int:
    """After a training: decode its drawings in a process of its own, and write `run`/report.html about the run alone.

    Args:
        file: of the configuration.

    Returns:
        0, or 130 after Ctrl-C: a training that ended well does not fail because of its pictures. What is missing is
        printed with the command that makes it.
    """
    click.echo("decoding the pictures of the run")
    decoding = ("sample", "--watch", str(run), "--once", "--config", file)
    code, stopped_by = processes.call(processes.command("--quiet", *decoding), send=signal.SIGTERM)
    if code or stopped_by is not None:
        reason = "see above" if stopped_by is None else stopped_by.name
        click.echo(f"note: pictures were not decoded, {reason}; later: {processes.shown(*decoding)}")
    try:
        out = run / PAGE
        page.check_out(out)
        report_page.write_report(collect(run, None, run=run)[0], out, [])
        click.echo(f"report with the losses and pictures: {out.resolve().as_uri()}")
    except Exception as error:
        known = shown(error)
        reason = known.line if isinstance(known, UserError) else repr(error)
        click.echo(f"note: no report was written: {reason}; later: {processes.shown('report', '--run', str(run))}")
    return processes.INTERRUPTED if stopped_by == signal.SIGINT else 0


def _nothing(missing: dict[str, Missing]) -> UserError:
    return UserError(
        "there is nothing to report on",
        expected="a snapshot in the cache, or a run directory",
        found="; ".join(missing[section].what for section in ("snapshot", "run")),
        fix=f"{missing['snapshot'].command}; or name what is elsewhere: --set cache=DIR, --run DIR",
    )


def _gallery(config: Config, snapshot: Snapshot, thumbnails: _Thumbnails | None, count: int) -> list[Card]:
    """Decoded latents next to the pictures of their sources, with the captions."""
    from pipeline.tools.reporting import draw_latents, encoder_process  # torch, which other pages do not need

    rows = spread(len(snapshot), min(count, len(snapshot)))
    records = draw_latents.SnapshotTensors(snapshot)
    latents = {str(row): records.latent(snapshot.sample(row)) for row in rows}
    cards = []
    with tempfile.TemporaryDirectory(prefix="sana-pipe-") as work:
        folder = encoder_process.decode(config, latents, Path(work))
        for row in rows:
            source, item = snapshot.source_item(row)
            shape = snapshot.buckets[snapshot.sample(row).bucket]
            size = (shape.height, shape.width)
            photo = None if thumbnails is None else thumbnails.photos.cropped(source, item, size)
            with Image.open(folder / f"{row}.png") as decoded:
                images = [embedded(photo, "source")] if thumbnails is not None else []
                images.append(embedded(decoded, "decoded latent"))
            note = f"{source}: {item}, {size[0]}x{size[1]}, sample {snapshot.sample_id(row)}"
            cards.append(Card(images, " | ".join(snapshot.captions(row, records.texts)), note))
    return cards


def _with_pictures(data: SnapshotFigures, snapshot: Snapshot, thumbnails: _Thumbnails) -> SnapshotFigures:
    """The figures, with the pictures of all examples."""

    def shown(entries: list[T]) -> list[T]:
        return [replace(entry, examples=[thumbnails.of_example(each) for each in entry.examples]) for entry in entries]

    further = data.further
    if further is not None:
        further = replace(further, examples=[thumbnails.of_sample(snapshot, each) for each in further.examples])
    rejects, visits, alike = shown(data.rejects), shown(data.visits), shown(data.alike)
    return replace(data, rejects=rejects, visits=visits, alike=alike, further=further)


class _Thumbnails:
    """Pictures of rejects by (source, item). A reject of encoding does not name its source: all are tried."""

    def __init__(self, config: Config, cache: Cache):
        self.photos, self.sources = SourcePictures(config.data, cache), cache.sources()

    def of_example(self, example: Example) -> Example:
        for name in self.sources if example.source is None else [example.source]:
            if (picture := self.photos.thumbnail(name, example.item)) is not None:
                return replace(example, picture=embedded(picture, example.item))
        return replace(example, picture=Embedded(example.item))

    def of_sample(self, snapshot: Snapshot, example: FurtherExample) -> FurtherExample:
        """The example with its picture as it is encoded, and the control pictures and masks."""
        source, item, size = example.source, example.item, (example.height, example.width)
        shown = [embedded(self.photos.cropped(source, item, size), "picture")]
        for kind, encoding in further_encodings(snapshot).items():
            shown.append(embedded(self.photos.further(source, item, encoding, size), kind))
        return replace(example, pictures=shown)
