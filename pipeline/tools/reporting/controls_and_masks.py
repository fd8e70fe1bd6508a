"""The numbers of a snapshot's control pictures and masks: samples that have a control or a mask, and how much masks
show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from sana_pipe.base.errors import CacheError, escaped
from sana_pipe.data.cache.prompts import spread
from sana_pipe.data.cache.scan_table import ABSENT
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.cache.snapshot_samples import picture_keys
from sana_pipe.data.signals import PictureSignal
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.signals.mask import MaskEncoding
from sana_pipe.tools.reporting.source_pictures import Embedded

MASKS = 1000
"""Limit on the masks that are read: some 2 KiB each at 1024 px."""
LOOKED_AT = 200
"""Masks that `bucket` looks at."""
EXAMPLES = 4


@dataclass(frozen=True)
class ControlOrMask:
    """The control pictures or the masks of a snapshot.

    Attributes:
        samples: that have a picture; blank: that have none.
        made: the way in which it was made; "": it is a file.
    """

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
class ControlExample:
    """A sample with a control picture or a mask. pictures: on a page."""

    source: str
    item: str
    height: int
    width: int
    pictures: list[Embedded] | None = None


@dataclass(frozen=True)
class ControlsAndMasks:
    """Numbers of control pictures and masks. learned: None without masks, or where they cannot be read."""

    kinds: list[ControlOrMask]
    learned: Learned | None
    examples: list[ControlExample]


def control_and_mask_encodings(snapshot: Snapshot) -> dict[str, PictureSignal]:
    """Return the encodings of the control pictures and masks by kind."""
    return {
        kind: encoding
        for kind, encoding in snapshot.pictures.items()
        if isinstance(encoding, PictureSignal) and encoding.axes == LatentEncoding.axes and kind != LatentEncoding.kind
    }


def controls_and_masks(snapshot: Snapshot) -> ControlsAndMasks | None:
    """Compute the numbers of the control pictures and masks; None: the snapshot has none."""
    encodings = control_and_mask_encodings(snapshot)
    if not encodings:
        return None
    kinds = []
    for kind, encoding in encodings.items():
        absent = np.array([encoding.key(ABSENT, bucket.height, bucket.width) for bucket in snapshot.buckets], "S16")
        blank = sum(int(np.isin(picture_keys(samples, kind), absent).sum()) for samples in snapshot.tables())
        kinds.append(ControlOrMask(kind, len(snapshot) - blank, blank, getattr(encoding, "made", "")))
    examples = []
    for row in spread(len(snapshot), min(EXAMPLES, len(snapshot))):
        (source, item), bucket = snapshot.source_item(row), snapshot.buckets[snapshot.sample(row).bucket]
        examples.append(ControlExample(source, item, bucket.height, bucket.width))
    learned = None
    if MaskEncoding.kind in encodings and len(snapshot):
        with suppress(CacheError):  # `verify` names what is damaged
            learned = _learned(snapshot)
    return ControlsAndMasks(kinds, learned, examples)


def _learned(snapshot: Snapshot) -> Learned:
    """Mean of the masks of evenly spaced samples."""
    shares = [float(mask.mean()) for _, mask in _masks(snapshot, MASKS)]
    return Learned(len(shares), float(np.mean(shares)))


def _masks(snapshot: Snapshot, most: int) -> Iterator[tuple[int, np.ndarray]]:
    """Row and mask, fp32 (1, H/f, W/f), of at most so many evenly spaced samples; of those without a mask, 1."""
    reader = snapshot.reader(MaskEncoding.kind)
    for row in spread(len(snapshot), min(most, len(snapshot))):
        bits = snapshot.picture(snapshot.sample(row), MaskEncoding.kind, reader)
        yield row, (bits.astype(np.uint32) << 16).view(np.float32)


def mask_notes(snapshot: Snapshot) -> Iterator[str]:
    """Say what is odd about the masks of a snapshot, of `LOOKED_AT` evenly spaced samples: masks that are the same
    everywhere, and masks that are nowhere brighter than half. Samples without a mask do not count."""
    encoding = snapshot.pictures.get(MaskEncoding.kind)
    if not isinstance(encoding, MaskEncoding) or encoding.made:  # an opaque picture has no shape
        return
    absent = [encoding.key(ABSENT, bucket.height, bucket.width) for bucket in snapshot.buckets]
    odd: dict[str, list[int]] = {"the same everywhere": [], "nowhere brighter than half": []}
    read = 0
    for row, mask in _masks(snapshot, LOOKED_AT):
        sample = snapshot.sample(row)
        if sample.pictures[MaskEncoding.kind].key == absent[sample.bucket]:
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
                f"{len(rows)} of {read} checked masks are {what}: {names}{more}; "
                "white is learned, black is not (sana-pipe view NAME shows a mask)"
            )
