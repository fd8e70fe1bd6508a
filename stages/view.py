"""`sana-pipe view ID`: one sample of a snapshot: picture, crop, latent, captions, and where its bytes lie."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from pipeline.base.amounts import amount
from pipeline.base.errors import escaped
from pipeline.config import Config
from pipeline.data.snapshots import near_samples
from pipeline.tools import outputs
from pipeline.tools.locations import cache_location
from pipeline.tools.reporting import page, sample_view
from pipeline.tools.reporting.blocks import Block, Card, Column, Heading, Table
from pipeline.tools.reporting.further_figures import further_encodings
from pipeline.tools.reporting.source_pictures import SourcePictures


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
    row = sample_view.find(cache, opened, text)
    values, records = sample_view.describe(cache, opened, row)
    if near:
        alike = near_samples.alike(opened, row)
        names = {other: ": ".join(opened.source_item(other)) for other, _ in alike.pictures}
        values["near"] = [{"row": other, "item": names[other], "bits": bits} for other, bits in alike.pictures]
        values["too_little_detail"] = {"this": alike.is_flat, "others": alike.flat}
    photos = SourcePictures(config.data, cache)
    values["readable"] = photos.data(values["source"], values["item"]) is not None
    rows = [*_rows(values), *((kind, _record(values[kind])) for kind in opened.pictures)]
    if out is not None:
        outputs.check(config, out)
        shown = sample_view.pictures(photos, values, records, further_encodings(opened))
        captions = [Card([], caption["text"], _caption(caption)) for caption in values["captions"]]
        columns = Column[tuple[str, str]]("", lambda row: row[0]), Column[tuple[str, str]]("", lambda row: row[1])
        numbers = Table(columns, rows)
        sections: list[tuple[Heading, Sequence[Block]]] = [
            (Heading("pictures", "Pictures"), [Card(shown, "")]),
            (Heading("captions", "Captions"), captions),
            (Heading("numbers", "Numbers"), [numbers]),
        ]
        page.write(f"{values['source']}: {values['item']}", sections, out)
    if as_json:
        click.echo(json.dumps(values))
        return 0
    for name, value in rows:
        click.echo(f"{name + ':':<10} {escaped(value)}")
    for other in values.get("near", ()):
        click.echo(f"{'near:':<10} {escaped(other['item'])} ({other['bits']} bits)")
    if near:
        click.echo(f"{'near:':<10} {_compared(values)}")
    for caption in values["captions"]:
        click.echo(f"{'caption:':<10} {escaped(caption['text'])}\n{'':<10} {_caption(caption)}")
    if out is not None:
        click.echo(f"{'page:':<10} {out}")
    return 0


def _compared(values: dict[str, Any]) -> str:
    """Count the pictures that look like this one, and say what was not compared."""
    flat, found = values["too_little_detail"], len(values["near"])
    if flat["this"]:
        return "this picture has too little detail to be compared with others"
    return f"{found} look like it" + (
        f"; {flat['others']} others have too little detail to be compared" if flat["others"] else ""
    )


def _rows(values: dict[str, Any]) -> list[tuple[str, str]]:
    bucket, picture = values["bucket"], values["picture"]
    rows = [
        ("sample", str(values["sample_id"])),
        ("item", f"{values['source']}: {values['item']}"),
        ("snapshot", f"{values['snapshot'][:12]}, row {values['row']}"),
        (
            "bucket",
            f"{bucket['height']}x{bucket['width']} (height x width), {bucket['samples']} samples, batch "
            f"{bucket['batch']}",
        ),
    ]
    if picture is not None:
        left, top, right, bottom = picture["crop"]
        rows += [
            (
                "picture",
                f"{picture['width']} x {picture['height']} pixels (width x height), {amount(picture['bytes'])}, digest "
                f"{picture['digest']}",
            ),
            (
                "crop",
                f"left {left:g}, top {top:g}, right {right:g}, bottom {bottom:g}: {picture['crop_loss']:.1%} cut off, "
                f"scaled by {picture['upscale']:.3g}",
            ),
        ]
    rows.append(("source", "the picture can be read" if values["readable"] else "the picture can no longer be read"))
    return rows


def _record(record: dict[str, Any]) -> str:
    """Describe the record of a picture: its numbers, if it has them, and its place."""
    if "shape" not in record:
        return _place(record)
    return (
        f"{' x '.join(map(str, record['shape']))}, mean {record['mean']:.4g}, std {record['std']:.4g}, "
        f"{record['min']:.4g} to {record['max']:.4g}; {_place(record)}"
    )


def _caption(caption: dict[str, Any]) -> str:
    cut = " (cut there, or just fits)" if caption["at_max_length"] else ""
    return (
        f"{caption['tokens']} of {caption['max_length']} tokens{cut}, weight {caption['weight']:g}; {_place(caption)}"
    )


def _place(record: dict[str, Any]) -> str:
    return f"{record['bytes']} bytes ({record['storage']}) at {record['offset']} in {record['shard']}, {record['key']}"
