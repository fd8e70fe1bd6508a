"""The original pictures of a cache's items, where their sources still exist, and pictures inside a page."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image

from pipeline.cache.root import Cache
from pipeline.config import Config
from pipeline.encoding.scan import reopen
from pipeline.errors import UserError
from pipeline.images import decoding
from pipeline.sources.source import Place, Source, Unreadable

SIDE = 192
"""Longer side of a thumbnail in pixels."""


class SourcePictures:
    """Reads original pictures. A source that is unreachable once is not asked again."""

    def __init__(self, config: Config, cache: Cache):
        self.config, self.cache = config, cache
        self.sources: dict[str, tuple[Source, pa.Table] | None] = {}

    def data(self, source: str, item: str) -> bytes | None:
        """The file; None if it is not there any more, or the source cannot be reached."""
        if source not in self.sources:
            self.sources[source] = self._open(source)
        opened = self.sources[source]
        at = -1 if opened is None else pc.index(opened[1].column("item"), item).as_py()
        if opened is None or at < 0:
            return None
        try:
            return opened[0].read(Place(*(column[at].as_py() for column in opened[1].columns)))
        except Unreadable:  # moved or changed since
            return None
        except UserError:  # the source is unreachable: do not wait for each of its pictures
            self.sources[source] = None
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
        settings = self.config.data
        try:
            width, height = decoding.probe(data, settings.max_pixels, settings.max_bytes)
        except decoding.ImageReject:
            return None
        scale = min(1.0, side / max(width, height))
        return self._decoded(data, (max(1, round(height * scale)), max(1, round(width * scale))))

    def _decoded(self, data: bytes, size: tuple[int, int]) -> Image.Image | None:
        settings = self.config.data
        try:
            pixels = decoding.load(data, size, settings.background, settings.max_pixels, max_bytes=settings.max_bytes)
        except decoding.ImageReject:
            return None
        return Image.fromarray(pixels)

    def _open(self, name: str) -> tuple[Source, pa.Table] | None:
        """A source, and where its items are."""
        scan = self.cache.last_scan(name)
        try:
            places = None if scan is None else self.cache.table(scan["table"], list(Place._fields))
            return None if places is None else (reopen(self.cache, name, self.config.data), places)
        except UserError:  # removed or unreachable
            return None


@dataclass(frozen=True)
class Embedded:
    """A picture of a page. data: a `data:` URI, "" if there is no picture; alt: its text; why: there is none."""

    alt: str
    data: str = ""
    width: int = 0
    height: int = 0
    why: str = "cannot be read any more"


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
