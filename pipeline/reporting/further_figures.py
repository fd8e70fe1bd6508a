"""The numbers of a snapshot's further pictures: samples that have a control or a mask, and how much masks show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from pipeline.cache.prompts import spread
from pipeline.cache.scan_table import ABSENT
from pipeline.cache.snapshot import Snapshot, picture_keys
from pipeline.errors import CacheError, escaped
from pipeline.reporting.source_pictures import Embedded
from pipeline.signals import PictureSignal
from pipeline.signals.latent import LatentRecipe
from pipeline.signals.mask import MaskRecipe

MASKS = 1000
"""Limit on the masks that are read: some 2 KiB each at 1024 px."""
LOOKED_AT = 200
"""Masks that `bucket` looks at."""
EXAMPLES = 4


@dataclass(frozen=True)
class FurtherKind:
    """The further pictures of a kind. samples: that have a picture; blank: that have none. made: the way in which it
    was made; "": it is a file."""

    kind: str
    samples: int
    blank: int
    made: str


@dataclass(frozen=True)
class Learned:
    """The mean share of the area that so many masks show."""

    read: int
    mean: float


@dataclass(frozen=True)
class FurtherExample:
    """A sample with further pictures. pictures: on a page."""

    source: str
    item: str
    height: int
    width: int
    pictures: list[Embedded] | None = None


@dataclass(frozen=True)
class FurtherFigures:
    """Numbers of further pictures. learned: None without masks, or where they cannot be read."""

    kinds: list[FurtherKind]
    learned: Learned | None
    examples: list[FurtherExample]


def further_recipes(snapshot: Snapshot) -> dict[str, PictureSignal]:
    """The recipes of records that are pictures beside the sample's, by kind."""
    return {
        kind: recipe
        for kind, recipe in snapshot.pictures.items()
        if isinstance(recipe, PictureSignal) and recipe.axes == LatentRecipe.axes and kind != LatentRecipe.kind
    }


def further_figures(snapshot: Snapshot) -> FurtherFigures | None:
    """Numbers of the further pictures; None: the snapshot has none."""
    recipes = further_recipes(snapshot)
    if not recipes:
        return None
    kinds = []
    for kind, recipe in recipes.items():
        absent = np.array([recipe.key(ABSENT, bucket.height, bucket.width) for bucket in snapshot.buckets], "S16")
        blank = sum(int(np.isin(picture_keys(samples, kind), absent).sum()) for samples in snapshot.tables())
        kinds.append(FurtherKind(kind, len(snapshot) - blank, blank, getattr(recipe, "made", "")))
    examples = []
    for row in spread(len(snapshot), min(EXAMPLES, len(snapshot))):
        (source, item), bucket = snapshot.source_item(row), snapshot.buckets[snapshot.sample(row).bucket]
        examples.append(FurtherExample(source, item, bucket.height, bucket.width))
    learned = None
    if MaskRecipe.kind in recipes and len(snapshot):
        with suppress(CacheError):  # `verify` names what is damaged
            learned = _learned(snapshot)
    return FurtherFigures(kinds, learned, examples)


def _learned(snapshot: Snapshot) -> Learned:
    """Mean of the masks of evenly spaced samples."""
    shares = [float(mask.mean()) for _, mask in _masks(snapshot, MASKS)]
    return Learned(len(shares), float(np.mean(shares)))


def _masks(snapshot: Snapshot, most: int) -> Iterator[tuple[int, np.ndarray]]:
    """Row and mask, fp32 (1, H/f, W/f), of at most so many evenly spaced samples; of those without a mask, 1."""
    reader = snapshot.reader(MaskRecipe.kind)
    for row in spread(len(snapshot), min(most, len(snapshot))):
        bits = snapshot.picture(snapshot.sample(row), MaskRecipe.kind, reader)
        yield row, (bits.astype(np.uint32) << 16).view(np.float32)


def mask_notes(snapshot: Snapshot) -> Iterator[str]:
    """Say what is odd about the masks of a snapshot, of `LOOKED_AT` evenly spaced samples: masks that are the same
    everywhere, and masks that are nowhere brighter than half. Samples without a mask do not count."""
    recipe = snapshot.pictures.get(MaskRecipe.kind)
    if not isinstance(recipe, MaskRecipe) or recipe.made:  # an opaque picture has no shape
        return
    absent = [recipe.key(ABSENT, bucket.height, bucket.width) for bucket in snapshot.buckets]
    odd: dict[str, list[int]] = {"the same everywhere": [], "nowhere brighter than half": []}
    read = 0
    for row, mask in _masks(snapshot, LOOKED_AT):
        sample = snapshot.sample(row)
        if sample.pictures[MaskRecipe.kind].key == absent[sample.bucket]:
            continue
        read += 1
        if mask.min() == mask.max():
            odd["the same everywhere"].append(row)
        elif mask.max() <= 0.5:
            odd["nowhere brighter than half"].append(row)
    for what, rows in odd.items():
        if rows:
            names = ", ".join(escaped(snapshot.source_item(row)[1]) for row in rows[:EXAMPLES])
            more = ", ..." if len(rows) > EXAMPLES else ""
            yield (
                f"{len(rows)} of {read} masks that were looked at are {what}: {names}{more}; "
                "white is learned, black is not (sana-pipe view NAME shows a mask)"
            )
