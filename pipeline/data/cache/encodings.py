"""Encodings: what decides the values of records, one class for each kind of record; and the keys of records.

`Encoding` is the base of all kinds. What this room must know of a kind is in its class, in `signals`. A field
enters the id only when it differs from its default, so a field added later leaves old ids unchanged. Weights are named
by their digest. A picture's record is keyed by (encoding, image digest, target height and width, crop), a caption's by
(encoding, normalised caption).
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa

from sana_pipe.base.errors import CacheError, IntegrityError
from sana_pipe.data.cache import layout
from sana_pipe.data.cache.keys import binary, digests_of, framed_all
from sana_pipe.data.cache.layout import digest, framed

SIGNALS = "sana_pipe.data.signals"
"""The folder whose modules declare the kinds of records."""


@dataclass(frozen=True)
class Encoding:
    """Everything that decides the values of records. Subclasses list the fields; defaults do not enter the id.

    Attributes:
        kind: the name of the kind.
        axes: names of a record's dimensions; they are columns of its table. First `channels`: a token is a position,
            else a row (see `cache.codec`).
        later: fields that the first format did not have; documents hold them only where they differ from the default,
            so that older snapshots keep their ids.
        storage: form in which the values are stored; see `cache.codec`.
        bf16: whether values are bits of bf16; otherwise they are plain uint16 and always stored as they are.
    """

    kind: ClassVar[str]
    bf16: ClassVar[bool] = True
    later: ClassVar[tuple[str, ...]] = ()
    axes: ClassVar[tuple[str, ...]]
    storage: str = "bf16"

    def values(self) -> dict[str, Any]:
        """The fields, as documents hold them."""
        unused = {f.name for f in fields(self) if f.name in self.later and getattr(self, f.name) == f.default}
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in unused}

    @cached_property
    def id(self) -> str:
        """32 hex digits over the kind and the fields that differ from their defaults."""
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        # "recipe" is part of the format: another word would change every id
        return digest("recipe", self.kind, layout.canonical(changed)).hex()

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.id}"

    def difference(self, other: Encoding) -> list[str]:
        """Fields that differ, as `name: value here | value in other`."""
        pairs = [(f.name, getattr(self, f.name), getattr(other, f.name, None)) for f in fields(self)]
        return [f"{name}: {ours!r} | {theirs!r}" for name, ours, theirs in pairs if ours != theirs]

    def unlike(self, model: dict[str, Any]) -> list[str]:
        """Fields of a loaded model's description that differ, as `name: value in the encoding | value of the model`."""
        pairs = [(key, getattr(self, key), value) for key, value in model.items()]
        return [f"{key}: {ours!r} | {value!r}" for key, ours, value in pairs if ours != value]

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Self:
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise CacheError(
                f"a {cls.kind} encoding has fields that this version does not know: {', '.join(unknown)}",
                fix="read this cache with the version of sana-pipe that wrote it, or a newer one",
            )
        tuples: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in values.items()}
        return cls(**tuples)


@dataclass(frozen=True)
class PictureEncoding(Encoding, ABC):
    """An encoding of records that belong to a picture at a target resolution.

    Attributes:
        picture: the kind of the control picture or mask that they are made of; "" for the sample's own.
        weighted: whether a snapshot has a weight for each record: that of the pair that the picture is of.
        decoder, resize, crop, background: what decides the pixels; see `images.decoding.load`.
    """

    weighted: ClassVar[bool] = False
    decoder: str = "pillow"
    resize: str = ""
    crop: str = ""
    background: tuple[int, int, int] = (255, 255, 255)

    @property
    def picture(self) -> str:
        return ""

    @abstractmethod
    def shape(self, height: int, width: int) -> tuple[int, ...]:
        """The shape of a record. height, width: the target in pixels."""

    def key(self, image_digest: bytes, height: int, width: int, crop: str = "") -> bytes:
        """16-byte key of a record. height, width: the target in pixels; crop: "" for the encoding's rule."""
        return digest(self.kind, self.id, image_digest, f"{height}x{width}", crop)

    def keys(self, digests: np.ndarray, sizes: Sequence[tuple[int, int]], which: np.ndarray) -> np.ndarray:
        """`key` of many pictures: (n,) S16.

        Args:
            digests: (n,) S16, of the pictures.
            sizes: (height, width) in pixels.
            which: (n,) int64, each picture's position in `sizes`.
        """
        start = framed(self.kind) + framed(self.id) + (16).to_bytes(8, "little")
        ends = pa.array([framed(f"{height}x{width}") + framed("") for height, width in sizes], pa.large_binary())
        return digests_of(start, binary(digests).cast(pa.large_binary()), ends.take(pa.array(which)))


@dataclass(frozen=True)
class CaptionEncoding(Encoding):
    """An encoding of records that belong to a caption: (rows, width), the first `valid` of which attention may see. The
    caption as written is stored beside. One null record per encoding has the rows of the empty caption.

    Attributes:
        normalisation: what captions share a record; see `sources.caption_rules.normalise`.
        max_length: rows at most. width: values of a row.
    """

    axes: ClassVar[tuple[str, ...]] = ("rows", "width")
    normalisation: str = "diffusers"
    max_length: int = 300
    width: int = 2304

    @property
    def pads_null(self) -> bool:
        """Return whether the null record has `max_length` rows; else it has those of the empty caption."""
        return True

    @property
    def null_key(self) -> bytes:
        """16-byte key of the null record."""
        return digest("null", self.id)

    def key(self, normalised: str) -> bytes:
        """16-byte key of a caption's rows."""
        return digest(self.kind, self.id, digest(normalised))

    def keys(self, normalised: pa.Array) -> np.ndarray:
        """`key` of many captions (strings without null): (n,) S16."""
        start = framed(self.kind) + framed(self.id) + (16).to_bytes(8, "little")
        return digests_of(start, binary(digests_of(b"", *framed_all(normalised))).cast(pa.large_binary()))


def pictures_of(encodings: Iterable[Encoding]) -> list[PictureEncoding]:
    """Return the encodings of records that belong to a picture."""
    return [encoding for encoding in encodings if isinstance(encoding, PictureEncoding)]


def caption_of(encodings: Iterable[Encoding]) -> CaptionEncoding:
    """Return the encoding of the records that belong to captions.

    Raises:
        IntegrityError: there is none, or there are several.
    """
    found = [encoding for encoding in encodings if isinstance(encoding, CaptionEncoding)]
    if len(found) != 1:
        raise IntegrityError("captions have records of one kind", found=[one.kind for one in found])
    return found[0]


@cache
def _classes() -> dict[str, type[Encoding]]:
    found = importlib.util.find_spec(SIGNALS)
    for module in pkgutil.iter_modules(found.submodule_search_locations if found else []):
        importlib.import_module(f"{SIGNALS}.{module.name}")
    every, new = set[type[Encoding]](), [Encoding]
    while new:
        new = [each for parent in new for each in parent.__subclasses__()]
        every |= set(new)
    return {each.kind: each for each in every if hasattr(each, "kind")}


def encoding_classes() -> list[type[Encoding]]:
    """The classes of all kinds."""
    return list(_classes().values())


def encoding_class(kind: str) -> type[Encoding]:
    """The class of a kind of record.

    Raises:
        CacheError: no such kind is known.
    """
    if kind not in _classes():
        raise CacheError(
            f"a cache has records of the kind {kind!r}, which this version does not know",
            expected=" or ".join(sorted(_classes())),
            fix="read this cache with the version of sana-pipe that wrote it, or a newer one",
        )
    return _classes()[kind]


_KEY = pa.binary(16)
_RECORD = [("key", _KEY), ("offset", pa.uint64()), ("length", pa.uint64()), ("checksum", _KEY)]
_CAPTION = [
    ("valid", pa.uint32()),
    ("caption_offset", pa.uint64()),
    ("caption_length", pa.uint32()),
    ("caption_checksum", _KEY),
]


@cache
def records_schema(kind: str) -> pa.Schema:
    """Schema of the record tables of a kind. offset, length: of the payload inside the shard, in bytes. The axes give
    the shape of the values in every storage."""
    made = encoding_class(kind)
    caption = _CAPTION if issubclass(made, CaptionEncoding) else []
    return pa.schema([*_RECORD, *((axis, pa.uint32()) for axis in made.axes), *caption])
