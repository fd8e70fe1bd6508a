"""`sana-pipe view ID`: one sample of a snapshot: picture, crop, latent, captions, and where its bytes lie."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import click

from sana_pipe.base.errors import escaped
from sana_pipe.config import Config
from sana_pipe.tools import outputs
from sana_pipe.tools.locations import cache_location
from sana_pipe.tools.reporting import sample_view
from sana_pipe.tools.reporting.controls_and_masks import control_and_mask_encodings
from sana_pipe.tools.reporting.json_values import json_values
from sana_pipe.tools.reporting.sample_figures import near_figures, picture_records, sample_figures
from sana_pipe.tools.reporting.sample_names import find
from sana_pipe.tools.reporting.source_pictures import SourcePictures


def run(
    config: Config,
    text: str,
    snapshot: str | None = None,
    out: Path | None = None,
    as_json: bool = False,
    near: bool = False,
) -> int:
    """Print a sample.

    Args:
        text: its id, name or key, or the beginning of one.
        snapshot: a name or id; None: the newest.
        out: file of a page with the pictures; None: no page.
        near: also the samples that look like it.

    Returns:
        0.

    Raises:
        UserError: no such sample, or several.
        CacheError: no such snapshot; a record is damaged.
        ConfigError: `near` in a snapshot without hashes.
    """
    cache = cache_location(config).open()
    opened = cache.open_snapshot(snapshot)
    row = find(cache, opened, text)
    sample = sample_figures(cache, opened, row)
    if near:
        sample = replace(sample, near=near_figures(opened, row))
    photos = SourcePictures(config.data, cache)
    sample = replace(sample, readable=photos.data(sample.source, sample.item) is not None)
    if out is not None:
        outputs.check(config, out)
        images = sample_view.pictures(photos, sample, picture_records(opened, row), control_and_mask_encodings(opened))
        sample_view.write_page(sample, images, out)
    if as_json:
        click.echo(json.dumps(json_values(sample)))
        return 0
    for name, value in sample_view.lines(sample):
        label = f"{name}:" if name else ""
        click.echo(f"{label:<10} {escaped(value)}")
    if out is not None:
        click.echo(f"{'page:':<10} {out}")
    return 0
