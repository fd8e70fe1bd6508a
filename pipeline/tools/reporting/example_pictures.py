"""Pictures for the examples of a report, read from the sources where they still exist."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.tools.reporting.controls_and_masks import ControlExample, control_and_mask_encodings
from sana_pipe.tools.reporting.data_figures import Alike, Example, Reject, Visits
from sana_pipe.tools.reporting.figures import Figures
from sana_pipe.tools.reporting.source_pictures import Embedded, SourcePictures, embedded

Entry = TypeVar("Entry", Reject, Visits, Alike)


def with_pictures(figures: Figures, snapshot: Snapshot, photos: SourcePictures) -> Figures:
    """Add pictures to all examples of the snapshot."""
    if (data := figures.snapshot) is None:
        return figures
    sources = photos.cache.sources()

    def shown(entries: list[Entry]) -> list[Entry]:
        return [replace(entry, examples=[_thumbnail(photos, sources, x) for x in entry.examples]) for entry in entries]

    if (others := data.controls_and_masks) is not None:
        others = replace(others, examples=[_as_encoded(photos, snapshot, each) for each in others.examples])
    rejects, visits, alike = shown(data.rejects), shown(data.visits), shown(data.alike)
    data = replace(data, rejects=rejects, visits=visits, alike=alike, controls_and_masks=others)
    return replace(figures, snapshot=data)


def _thumbnail(photos: SourcePictures, sources: list[str], example: Example) -> Example:
    """Add the item's picture. A reject of encoding does not name its source: all are tried."""
    for name in sources if example.source is None else [example.source]:
        if (picture := photos.thumbnail(name, example.item)) is not None:
            return replace(example, picture=embedded(picture, example.item))
    return replace(example, picture=Embedded(example.item))


def _as_encoded(photos: SourcePictures, snapshot: Snapshot, example: ControlExample) -> ControlExample:
    """Add the sample's picture, control pictures and masks, each as its encoder gets it."""
    source, item, size = example.source, example.item, (example.height, example.width)
    shown = [embedded(photos.cropped(source, item, size), "picture")]
    for kind, encoding in control_and_mask_encodings(snapshot).items():
        shown.append(embedded(photos.control_or_mask(source, item, encoding, size), kind))
    return replace(example, pictures=shown)
