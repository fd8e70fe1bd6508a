"""The original pictures of a cache's items, where their sources still exist, and pictures inside a page."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image

from sana_pipe.base.errors import UserError
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.scan_table import PLACE, places
from sana_pipe.data.encoding.scan import reopen
from sana_pipe.data.images import decoding
from sana_pipe.data.signals import PictureSignal
from sana_pipe.data.sources.config import DataConfig
from sana_pipe.data.sources.source import Place, Source, Unreadable

SIDE = 192
"""Longer side of a thumbnail in pixels."""


class SourcePictures:
    """Reads original pictures. A source that is unreachable once is not asked again."""

    def __init__(self, settings: DataConfig, cache: Cache):
        self.settings, self.cache = settings, cache
        self.sources: dict[tuple[str, str], _Opened | None] = {}

    def data(self, source: str, item: str, picture: str = "") -> bytes | None:
        """The file; None if it is not there any more, or the source cannot be reached; b"" if the sample has no such
        picture. picture: the kind of a control picture or mask; "": the item's own."""
        if (source, picture) not in self.sources:
            self.sources[source, picture] = self._open(source, picture)
        opened = self.sources[source, picture]
        at = -1 if opened is None else pc.index(opened.items, item).as_py()
        if opened is None or at < 0:
            return None
        place = Place(*(opened.places.column(name)[at].as_py() for name in Place._fields))
        try:
            return b"" if place.item is None else opened.source.read(place)
        except Unreadable:  # moved or changed since
            return None
        except UserError:  # the source is unreachable: do not wait for each of its pictures
            self.sources[source, picture] = None
            return None

    def control_or_mask(
        self, source: str, item: str, encoding: PictureSignal, size: tuple[int, int]
    ) -> Image.Image | None:
        """A control picture or mask at (height, width), as its encoder gets it; None if it cannot be read."""
        data, settings = self.data(source, item, encoding.picture), self.settings
        if not data:
            return None if data is None else Image.new("RGB", size[::-1], (encoding.blank,) * 3)
        try:
            return Image.fromarray(encoding.pixels(data, size, settings.max_pixels))
        except (decoding.ImageReject, UserError):  # or OpenCV is missing
            return None

    def cropped(self, source: str, item: str, size: tuple[int, int]) -> Image.Image | None:
        """The picture at (height, width) of its bucket, as the VAE gets it; None if it cannot be read."""
        data = self.data(source, item)
        return None if data is None else self._decoded(data, size)

    def thumbnail(self, source: str, item: str, side: int = SIDE) -> Image.Image | None:
        """The whole picture, its longer side at most `side` pixels; None if it cannot be read."""
        data = self.data(source, item)
        if data is None:
            return None
        settings = self.settings
        try:
            width, height = decoding.probe(data, settings.max_pixels)
        except decoding.ImageReject:
            return None
        scale = min(1.0, side / max(width, height))
        return self._decoded(data, (max(1, round(height * scale)), max(1, round(width * scale))))

    def _decoded(self, data: bytes, size: tuple[int, int]) -> Image.Image | None:
        settings = self.settings
        try:
            pixels = decoding.load(data, size, settings.background, settings.max_pixels)
        except decoding.ImageReject:
            return None
        return Image.fromarray(pixels)

    def _open(self, name: str, picture: str) -> _Opened | None:
        """A source, and where its items' pictures are."""
        scan = self.cache.last_scan(name)
        try:
            if scan is None:
                return None
            table = self.cache.table(scan["table"], [*PLACE.names, *(["pictures"] if picture else [])])
            return _Opened(reopen(self.cache, name, self.settings), table.column("item"), places(table, picture))
        except UserError:  # removed or unreachable
            return None


@dataclass(frozen=True)
class _Opened:
    """A source. items: keys of its items; places: `PLACE` of the picture of each."""

    source: Source
    items: pa.ChunkedArray
    places: pa.Table


@dataclass(frozen=True)
class Embedded:
    """A picture of a page. data: a `data:` URI, "" if there is no picture; alt: its text; why: there is none."""

    alt: str
    data: str = ""
    width: int = 0
    height: int = 0
    why: str = "can no longer be read"


def embedded(picture: Image.Image | None, alt: str, side: int = SIDE) -> Embedded:
    """A picture as WebP inside the page, its longer side at most `side` pixels."""
    if picture is None:
        return Embedded(alt)
    small = picture.convert("RGB")
    small.thumbnail((side, side))
    sink = io.BytesIO()
    small.save(sink, "WEBP", quality=80)
    data = base64.b64encode(sink.getvalue()).decode()
    return Embedded(alt, f"data:image/webp;base64,{data}", small.width, small.height)
