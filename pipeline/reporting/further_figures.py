"""The numbers of a snapshot's further pictures: samples that have a control or a mask, and how much masks show."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np

from pipeline.cache.prompts import spread
from pipeline.cache.scan_table import ABSENT
from pipeline.cache.snapshot import Snapshot, picture_keys
from pipeline.errors import CacheError
from pipeline.signals import PictureSignal
from pipeline.signals.latent import LatentRecipe
from pipeline.signals.mask import MaskRecipe

MASKS = 1000
"""Limit on the masks that are read: some 2 KiB each at 1024 px."""
EXAMPLES = 4


def further_recipes(snapshot: Snapshot) -> dict[str, PictureSignal]:
    """The recipes of records that are pictures beside the sample's, by kind."""
    return {
        kind: recipe
        for kind, recipe in snapshot.pictures.items()
        if isinstance(recipe, PictureSignal) and recipe.axes == LatentRecipe.axes and kind != LatentRecipe.kind
    }


def further_figures(snapshot: Snapshot) -> dict[str, Any] | None:
    """Numbers of the further pictures; None: the snapshot has none.

    `kinds`: of each, how many samples have a picture (`samples`) or none (`blank`), and how it was `made` ("": it is a
    file). `learned`: the `mean` share of the area that masks show; null without masks, or where they cannot be read.
    `examples`: a few samples.
    """
    recipes = further_recipes(snapshot)
    if not recipes:
        return None
    kinds = []
    for kind, recipe in recipes.items():
        absent = np.array([recipe.key(ABSENT, bucket.height, bucket.width) for bucket in snapshot.buckets], "S16")
        blank = sum(int(np.isin(picture_keys(samples, kind), absent).sum()) for samples in snapshot.tables())
        kinds.append(
            {"kind": kind, "samples": len(snapshot) - blank, "blank": blank, "made": getattr(recipe, "made", "")}
        )
    examples = []
    for row in spread(len(snapshot), min(EXAMPLES, len(snapshot))):
        (source, item), bucket = snapshot.source_item(row), snapshot.buckets[snapshot.sample(row).bucket]
        examples.append({"source": source, "item": item, "height": bucket.height, "width": bucket.width})
    learned = None
    if MaskRecipe.kind in recipes and len(snapshot):
        with suppress(CacheError):  # `verify` names what is damaged
            learned = _learned(snapshot)
    return {"kinds": kinds, "learned": learned, "examples": examples}


def _learned(snapshot: Snapshot) -> dict[str, Any]:
    """Mean of the masks of evenly spaced samples."""
    rows, reader = spread(len(snapshot), min(MASKS, len(snapshot))), snapshot.reader(MaskRecipe.kind)
    bits = (snapshot.picture(snapshot.sample(row), MaskRecipe.kind, reader) for row in rows)
    shares = [float((mask.astype(np.uint32) << 16).view(np.float32).mean()) for mask in bits]
    return {"read": len(rows), "mean": float(np.mean(shares))}
