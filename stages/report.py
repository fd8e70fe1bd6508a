"""`sana-pipe report`: one HTML page about a snapshot and a run.

What: collects the numbers (`reporting.figures`), reads pictures of rejects where their sources still exist,
and writes one file that needs no network. Writes nothing into the cache or the run.
"""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import click

from sana_pipe.base import processes
from sana_pipe.base.amounts import amount
from sana_pipe.base.errors import UserError, shown
from sana_pipe.config import Config
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.tools import outputs
from sana_pipe.tools.locations import cache_location
from sana_pipe.tools.reporting import page, report_page
from sana_pipe.tools.reporting.blocks import Card, Missing
from sana_pipe.tools.reporting.example_pictures import with_pictures
from sana_pipe.tools.reporting.figures import collect
from sana_pipe.tools.reporting.source_pictures import SourcePictures

PAGE = "report.html"


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
    photos = SourcePictures(config.data, cache) if pictures and cache is not None else None
    cards = _gallery(config, opened, photos, gallery) if gallery and opened is not None else []
    if photos is not None and opened is not None:
        figures = with_pictures(figures, opened, photos)
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
        reason = "see above" if stopped_by is None else f"stopped by {stopped_by.name}"
        click.echo(f"note: the pictures were not decoded ({reason}); to decode them: {processes.shown(*decoding)}")
    try:
        out = run / PAGE
        page.check_out(out)
        report_page.write_report(collect(run, None, run=run)[0], out, [])
        click.echo(f"report with the losses and pictures: {out.resolve().as_uri()}")
    except Exception as error:
        known = shown(error)
        reason = known.line if isinstance(known, UserError) else repr(error)
        again = processes.shown("report", "--run", str(run))
        click.echo(f"note: no report was written: {reason}; to write it: {again}")
    return processes.INTERRUPTED if stopped_by == signal.SIGINT else 0


def _nothing(missing: dict[str, Missing]) -> UserError:
    return UserError(
        "there is nothing to report on",
        expected="a snapshot in the cache, or a run directory",
        found="; ".join(missing[section].what for section in ("snapshot", "run")),
        fix=f"{missing['snapshot'].command}; or say where they are: --set cache=DIR, --run DIR",
    )


def _gallery(config: Config, snapshot: Snapshot, photos: SourcePictures | None, count: int) -> list[Card]:
    from sana_pipe.tools.reporting import encoder_process, gallery  # torch, which other pages do not need

    return gallery.decoded_latents(snapshot, photos, count, partial(encoder_process.decode, config))
