"""Decoded latents of a snapshot next to the pictures of their sources, as cards of the report."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image

from sana_pipe.data.cache.prompts import spread
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.tools.reporting.blocks import Card
from sana_pipe.tools.reporting.draw_latents import SnapshotTensors
from sana_pipe.tools.reporting.source_pictures import SourcePictures, embedded

Decode = Callable[[dict[str, torch.Tensor], Path], Path]
"""Decodes latents by name, with a folder for files of the call; returns the folder with a PNG for each."""


def decoded_latents(snapshot: Snapshot, photos: SourcePictures | None, count: int, decode: Decode) -> list[Card]:
    """Decode latents of evenly spaced samples, each with its captions.

    Args:
        photos: the pictures of their sources; None: the latents alone.
        count: of latents, at most.
        decode: see `encoder_process.decode`, whose errors it raises.
    """
    rows = spread(len(snapshot), min(count, len(snapshot)))
    records = SnapshotTensors(snapshot)
    latents = {str(row): records.latent(snapshot.sample(row)) for row in rows}
    cards = []
    with tempfile.TemporaryDirectory(prefix="sana-pipe-") as work:
        folder = decode(latents, Path(work))
        for row in rows:
            with Image.open(folder / f"{row}.png") as decoded:
                cards.append(_card(snapshot, row, records, photos, decoded))
    return cards


def _card(
    snapshot: Snapshot, row: int, records: SnapshotTensors, photos: SourcePictures | None, decoded: Image.Image
) -> Card:
    (source, item), bucket = snapshot.source_item(row), snapshot.buckets[snapshot.sample(row).bucket]
    size = bucket.height, bucket.width
    images = [] if photos is None else [embedded(photos.cropped(source, item, size), "source")]
    captions = " | ".join(snapshot.captions(row, records.texts))
    note = f"{source}: {item}, {size[0]}x{size[1]}, sample {snapshot.sample_id(row)}"
    return Card([*images, embedded(decoded, "decoded latent")], captions, note)
