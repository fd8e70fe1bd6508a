"""`sana-pipe report`: one HTML page about a snapshot and a run.

What: collects the numbers (`pipeline.reporting.figures`), reads pictures of rejects where their sources still exist,
and writes one file that needs no network. Writes nothing into the cache or the run.
"""

from __future__ import annotations

from pathlib import Path

import click

from pipeline.amounts import amount
from pipeline.cache.root import Cache
from pipeline.config import Config
from pipeline.reporting import page
from pipeline.reporting.figures import collect
from pipeline.reporting.photos import Embedded, Photos, embedded


def run(
    config: Config,
    out: Path,
    run: Path | None = None,
    snapshot: str | None = None,
    compare: Path | None = None,
    pictures: bool = True,
) -> int:
    """Write the page.

    Args:
        out: the file.
        run, snapshot, compare: see `pipeline.reporting.figures.collect`.
        pictures: read the sources for thumbnails of rejects.

    Returns:
        0.

    Raises:
        UserError: as `collect`; the page cannot be written.
    """
    figures, cache, _ = collect(config, run=run, snapshot=snapshot, compare=compare)
    thumbnails = _Thumbnails(config, cache) if pictures and cache is not None else None
    sections = page.write_page(figures, out, thumbnails=thumbnails)
    click.echo(f"{out}: {len(sections)} sections, {amount(out.stat().st_size)}")
    return 0


class _Thumbnails:
    """Pictures of rejects by (source, item). A reject of encoding does not name its source: all are tried."""

    def __init__(self, config: Config, cache: Cache):
        self.photos, self.sources = Photos(config, cache), cache.sources()

    def __call__(self, source: str | None, item: str) -> Embedded:
        for name in self.sources if source is None else [source]:
            if (picture := self.photos.thumbnail(name, item)) is not None:
                return embedded(picture, item)
        return Embedded(item)
