"""One sample of a snapshot as people see it: lines of text, and a page with its pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from sana_pipe.base.amounts import amount
from sana_pipe.data.signals import PictureSignal
from sana_pipe.tools.reporting import page
from sana_pipe.tools.reporting.blocks import Block, Card, Column, Heading, Table
from sana_pipe.tools.reporting.sample_figures import (
    NearFigures,
    RecordBytes,
    SampleCaption,
    SampleFigures,
    SamplePicture,
    SampleRecord,
)
from sana_pipe.tools.reporting.source_pictures import SIDE, Embedded, SourcePictures, embedded

LARGE = 480
"""Longer side of pictures in pixels."""

Line = tuple[str, str]
"""A name, "" if the line belongs to the one before it, and a text."""


# ---------------------------------------------------------------- text


def lines(sample: SampleFigures) -> Iterator[Line]:
    """Describe a sample in lines: its numbers, the samples that look like it, its captions."""
    yield from numbers(sample)
    if sample.near is not None:
        yield from (("near", f"{other.item} ({other.bits} bits)") for other in sample.near.near)
        yield "near", _compared(sample.near)
    for caption in sample.captions:
        yield "caption", caption.text
        yield "", _caption(caption)


def numbers(sample: SampleFigures) -> list[Line]:
    """Describe a sample and its records; the captions are left out."""
    bucket = sample.bucket
    size = f"{bucket.height}x{bucket.width} (height x width)"
    source = "the picture can be read" if sample.readable else "the picture can no longer be read"
    return [
        ("sample", str(sample.sample_id)),
        ("item", f"{sample.source}: {sample.item}"),
        ("snapshot", f"{sample.snapshot[:12]}, row {sample.row}"),
        ("bucket", f"{size}, {bucket.samples} samples, batch {bucket.batch}"),
        *([] if sample.picture is None else _picture(sample.picture)),
        ("source", source),
        *((kind, _record(record)) for kind, record in sample.records.items()),
    ]


def _picture(picture: SamplePicture) -> list[Line]:
    left, top, right, bottom = picture.crop
    size = f"{picture.width} x {picture.height} pixels (width x height)"
    crop = f"left {left:g}, top {top:g}, right {right:g}, bottom {bottom:g}"
    return [
        ("picture", f"{size}, {amount(picture.bytes)}, digest {picture.digest}"),
        ("crop", f"{crop}: {picture.crop_loss:.1%} cut off, scaled by {picture.upscale:.3g}"),
    ]


def _record(record: SampleRecord) -> str:
    if (values := record.values) is None:
        return _place(record.place)
    shape, numbers = " x ".join(map(str, values.shape)), f"mean {values.mean:.4g}, std {values.std:.4g}"
    return f"{shape}, {numbers}, {values.min:.4g} to {values.max:.4g}; {_place(record.place)}"


def _caption(caption: SampleCaption) -> str:
    cut = " (it was cut, or just fits)" if caption.at_max_length else ""
    tokens = f"{caption.tokens} of {caption.max_length} tokens{cut}"
    return f"{tokens}, weight {caption.weight:g}; {_place(caption.place)}"


def _place(record: RecordBytes) -> str:
    return f"{record.bytes} bytes ({record.storage}) at {record.offset} in {record.shard}, {record.key}"


def _compared(figures: NearFigures) -> str:
    """Count the pictures that look like this one, and say what was not compared."""
    flat = figures.too_little_detail
    if flat.this:
        return "this picture has too little detail to be compared with others"
    rest = f"; {flat.others} others have too little detail to be compared" if flat.others else ""
    return f"{len(figures.near)} look like it{rest}"


# ---------------------------------------------------------------- page


def write_page(sample: SampleFigures, images: Sequence[Embedded], out: Path) -> None:
    """Write a page about a sample. images: see `pictures`. Errors: as `page.write`."""
    columns = Column[Line]("", lambda line: line[0]), Column[Line]("", lambda line: line[1])
    captions = [Card([], caption.text, _caption(caption)) for caption in sample.captions]
    sections: list[tuple[Heading, Sequence[Block]]] = [
        (Heading("pictures", "Pictures"), [Card(images, "")]),
        (Heading("captions", "Captions"), captions),
        (Heading("numbers", "Numbers"), [Table(columns, numbers(sample))]),
    ]
    page.write(f"{sample.source}: {sample.item}", sections, out)


def pictures(
    photos: SourcePictures,
    sample: SampleFigures,
    records: Mapping[str, np.ndarray],
    controls_and_masks: Mapping[str, PictureSignal],
) -> list[Embedded]:
    """Draw the original with its crop, the crop as the VAE gets it, the control pictures and masks as their encoders
    get them, and the records.

    Args:
        records: of `sample_figures.picture_records`.
        controls_and_masks: their encodings by kind.
    """
    source, item, size = sample.source, sample.item, sample.bucket.size
    original = photos.thumbnail(source, item, LARGE)
    if original is not None and sample.picture is not None:
        _frame(original, sample.picture)
    name = f"{size[0]}x{size[1]}"
    others = {kind: photos.control_or_mask(source, item, each, size) for kind, each in controls_and_masks.items()}
    return [
        embedded(original, "original, with the crop as a frame", LARGE),
        embedded(photos.cropped(source, item, size), f"crop at {name}", LARGE),
        *(embedded(picture, f"{kind} at {name}", LARGE) for kind, picture in others.items()),
        *(embedded(projected(record), _title(kind, record), SIDE) for kind, record in records.items()),
    ]


def _frame(original: Image.Image, picture: SamplePicture) -> None:
    """Draw the crop of a picture into its thumbnail."""
    scale = original.width / picture.width, original.height / picture.height
    left, top, right, bottom = (side * scale[i % 2] for i, side in enumerate(picture.crop))
    box = (left, top, max(left, right - 1), max(top, bottom - 1))
    ImageDraw.Draw(original).rectangle(box, outline=(255, 64, 0), width=3)


def _title(kind: str, record: np.ndarray) -> str:
    return f"{kind}, its three main components as red, green, blue" if len(record) > 1 else f"{kind}, from 0 to 1"


def projected(latent: np.ndarray) -> Image.Image:
    """A latent (C, h, w) as a picture: its first three principal components over the positions, scaled to 0..255; of
    one channel the values themselves, from 0 to 1."""
    channels, height, width = latent.shape
    scale = max(1, SIDE // max(height, width))
    if channels == 1:
        gray = Image.fromarray(np.round(np.clip(latent[0], 0, 1) * 255).astype(np.uint8)).convert("RGB")
        return gray.resize((width * scale, height * scale), Image.Resampling.NEAREST)
    flat = latent.reshape(channels, -1).astype(np.float64)
    flat = flat - flat.mean(1, keepdims=True)
    directions, _, _ = np.linalg.svd(flat, full_matrices=False)
    parts = np.zeros((3, height * width))
    chosen = directions[:, :3].T @ flat
    parts[: len(chosen)] = chosen
    low, high = parts.min(1, keepdims=True), parts.max(1, keepdims=True)
    levels = np.divide(parts - low, high - low, out=np.zeros_like(parts), where=high > low)
    picture = Image.fromarray(np.round(levels * 255).astype(np.uint8).T.reshape(height, width, 3))
    return picture.resize((width * scale, height * scale), Image.Resampling.NEAREST)
