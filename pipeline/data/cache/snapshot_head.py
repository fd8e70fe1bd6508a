"""The head of a snapshot: a JSON document that says which samples, records and policies it has.

Parsed and written here and nowhere else. Its lists of shards and chunks are tables (`cache.snapshot_lists`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from sana_pipe.base.errors import IntegrityError
from sana_pipe.data.cache import layout
from sana_pipe.data.cache.codec import PLAIN
from sana_pipe.data.cache.encodings import Encoding, caption_of, encoding_class
from sana_pipe.data.cache.files import Files
from sana_pipe.data.cache.index import RecordIndex
from sana_pipe.data.cache.keys import Digests, key_bytes
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.cache.snapshot_lists import (
    HEX,
    ChunkTable,
    Form,
    HeadObject,
    ShardTable,
    nested,
    nested_list,
    publish,
)

R = TypeVar("R", bound=Encoding)


@dataclass(frozen=True)
class BucketPart(HeadObject):
    """Samples of a bucket that are visited `weight` times per epoch."""

    samples: int
    weight: Fraction
    forms: ClassVar[Mapping[str, Form]] = {
        "weight": (lambda pair: Fraction(*pair), lambda weight: [weight.numerator, weight.denominator])
    }


@dataclass(frozen=True)
class Bucket(HeadObject):
    """One resolution.

    Attributes:
        height, width: pixels.
        samples: number of samples.
        batch: global batch of a step.
        parts: its parts in the order of rows; None if every sample is visited once per epoch.
        block: samples per joint shard (packed snapshots).
    """

    height: int
    width: int
    samples: int
    batch: int
    parts: tuple[BucketPart, ...] | None = None
    block: int | None = None
    forms: ClassVar[Mapping[str, Form]] = {"parts": nested_list(BucketPart)}


@dataclass(frozen=True)
class PackedOrder(HeadObject):
    """window: blocks that are shuffled together while training."""

    window: int


@dataclass(frozen=True)
class HeldOut(HeadObject):
    """share: of the pictures that is held out. side: `train` or `heldout`. distance: bits of 128 in which the hashes of
    pictures differ that stay on one side; None: only equal files do. group: the column whose values stay on one side,
    too (`bucket.group`)."""

    share: float
    side: str
    distance: int | None = None
    group: str | None = None


@dataclass(frozen=True)
class Policies(HeadObject):
    """Settings that decide the training order; options of `bucket` in the configuration.

    Attributes:
        small: `bucket.remainder`, `carry` or `drop`.
        pad_text_multiple: padded text lengths are multiples of it.
    """

    small: str
    pad_text_multiple: int
    heldout: HeldOut | None = None
    packed: PackedOrder | None = None
    forms: ClassVar[Mapping[str, Form]] = {"heldout": nested(HeldOut), "packed": nested(PackedOrder)}


@dataclass(frozen=True)
class TextPlace(HeadObject):
    """The place of the text record of the empty caption or of a prompt. Attention sees its first `valid` rows; the
    empty caption has all rows.

    length: bytes of the payload, where it is not plain bf16.
    """

    shard: str
    offset: int
    rows: int
    valid: int
    key: bytes
    checksum: bytes
    length: int | None = None
    forms: ClassVar[Mapping[str, Form]] = {"key": HEX, "checksum": HEX}

    @classmethod
    def of(cls, index: RecordIndex, row: int, storage: str) -> Self:
        """The place of the record in a row of an index of text records."""
        offset, rows, valid, length = (int(index.columns[name][row]) for name in ("offset", "rows", "valid", "length"))
        return cls(
            shard=index.shards[int(index.columns["shard"][row])],
            offset=offset,
            rows=rows,
            valid=valid,
            key=key_bytes(index.columns["key"][row]),
            checksum=key_bytes(index.columns["checksum"][row]),
            length=None if storage == PLAIN else length,
        )


@dataclass(frozen=True)
class Head(HeadObject):
    """The head of a snapshot.

    Attributes:
        encodings: values of the encodings by kind.
        shards: lists of shards by kind; the samples' tables count into them.
        left_out: reason -> items that are not in the snapshot.
        sources: source -> digest of its scan's table.
        parent: id of the snapshot that the name pointed to before; of the source, if this snapshot is packed.
        folder: of the joint shards of a packed snapshot, below `shards/`.
        options: settings of the configuration that `bucket` made it with, where they are not the defaults, by section.
        counts: `samples`, for other tools.
        leaked: held-out snapshot -> its samples that look like one of these or share its group, where that was counted.
        content_id: digest of samples, records, order and policies alone: equal for equal ones in any cache, whatever
            scans and shards it has. None: an earlier version wrote the head.
    """

    encodings: Mapping[str, Mapping[str, Any]]
    policies: Policies
    buckets: tuple[Bucket, ...]
    shards: Mapping[str, ShardTable]
    null: TextPlace
    left_out: Mapping[str, int]
    sources: Mapping[str, str]
    chunks: ChunkTable = field(default_factory=lambda: ChunkTable.of(()))
    parent: str | None = None
    folder: str | None = None
    options: Mapping[str, Mapping[str, Any]] | None = None
    counts: Mapping[str, int] | None = None
    leaked: Mapping[str, int] | None = None
    content_id: str | None = None
    forms: ClassVar[Mapping[str, Form]] = {
        "policies": nested(Policies),
        "buckets": nested_list(Bucket),
        "null": nested(TextPlace),
        "chunks": (ChunkTable.parse, ChunkTable.values),
        "shards": (
            lambda kinds: {kind: ShardTable.parse(shards) for kind, shards in kinds.items()},
            lambda kinds: {kind: shards.values() for kind, shards in kinds.items()},
        ),
    }

    @classmethod
    def read(cls, files: Files, snapshot_id: str) -> Self:
        """The head of a snapshot. Its lists are read when they are used, with errors as of `columns`.

        Raises:
            IntegrityError: it is missing, damaged or another snapshot's.
        """
        return cls.parse(files.document(Paths.snapshot(snapshot_id))).bound(files)

    def bound(self, files: Files) -> Self:
        """Return this head with its lists in a cache."""
        for part in self._lists():
            part.files = files
        return self

    def put_lists(self, files: Files) -> None:
        """Publish those of its lists that are in memory."""
        for part in self._lists():
            if part.files is None:
                publish(files, part.table)

    def _lists(self) -> list[ShardTable | ChunkTable]:
        return [*self.shards.values(), self.chunks]

    def values(self) -> dict[str, Any]:
        return {**super().values(), "parent": self.parent}

    def sealed(self) -> bytes:
        """The head as a document."""
        return layout.seal(self.values())

    @property
    def id(self) -> str:
        """The snapshot's id: the digest of the head."""
        return layout.content_digest(layout.canonical(self.values()))

    @property
    def without_history(self) -> bytes:
        """The head without its parent, options and leaks; equal for snapshots of the same samples, records and
        policies from the same scans and shards."""
        values = {**self.values(), **dict.fromkeys(("parent", "options", "leaked"))}
        values.pop("content_id", None)
        return layout.canonical(values)

    def with_content_id(self, samples: Mapping[str, str]) -> Self:
        """Return the head with its `content_id`. samples: `ContentDigest.values`."""
        of_head = self.values()
        decisive = {name: of_head[name] for name in ("encodings", "policies", "buckets")}
        null = {"key": self.null.key.hex(), "checksum": self.null.checksum.hex()}
        content = {**decisive, "null": null, "samples": dict(samples)}
        return replace(self, content_id=layout.content_digest(layout.canonical(content)))

    @cached_property
    def encodings_by_kind(self) -> Mapping[str, Encoding]:
        """The encodings of its records."""
        return {kind: encoding_class(kind).from_values(dict(values)) for kind, values in self.encodings.items()}

    def encoding(self, kind: type[R]) -> R:
        """The encoding of a kind of record.

        Raises:
            IntegrityError: the snapshot has no such records.
        """
        encoding = self.encodings_by_kind.get(kind.kind)
        if not isinstance(encoding, kind):
            raise IntegrityError(
                f"the snapshot has no records of the kind {kind.kind}", found=", ".join(self.encodings)
            )
        return encoding

    @property
    def metadata(self) -> str | None:
        """Return the digest of the table that `bucket.metadata` joined; None: there was none."""
        digest: str | None = (self.options or {}).get("bucket", {}).get("metadata")
        return digest

    @property
    def samples(self) -> int:
        return sum(bucket.samples for bucket in self.buckets)

    def shard_path(self, kind: str, name: str) -> str:
        """A shard as a file of the cache."""
        return Paths.shard(self.folder or self.encodings_by_kind[kind].name, name)

    def shard_files(self, share: slice = slice(None)) -> dict[str, int]:
        """The shards as files of the cache, with their sizes in bytes. share: of each list, by number."""
        return dict(self.each_shard_file(share))

    def each_shard_file(self, share: slice = slice(None)) -> Iterator[tuple[str, int]]:
        """`shard_files`, one at a time; a shard that two kinds share occurs twice."""
        for kind, shards in self.shards.items():
            for number in range(*share.indices(len(shards))):
                yield self.shard_path(kind, shards[number]), int(shards.sizes[number])

    def shard_sizes(self) -> np.ndarray:
        """Bytes of each shard, (shards,) uint64. All joint shards of a packed snapshot have texts."""
        caption = caption_of(self.encodings_by_kind.values()).kind
        lists = [self.shards[caption]] if self.folder is not None else self.shards.values()
        return np.concatenate([part.sizes for part in lists])

    def tables(self) -> set[str]:
        """Digests of the tables of all chunks, and of the lists."""
        return self.lists() | {digest for chunk in self.chunks for digest in (chunk.samples, chunk.names)}

    def lists(self) -> set[str]:
        """Digests of the tables of the lists."""
        return {part.entry.table for part in self._lists()}


def check_files(files: Files, head: Head, intact: Digests | None = None) -> None:
    """Compare the sizes of all files that training needs with what a head says. Reads only the head's lists.

    Args:
        intact: names of files without folder and suffix, which are not asked for again; those of this head are added.

    Raises:
        IntegrityError: a shard is missing or has another size; a list or a chunk is missing or empty.
    """
    if intact is None:
        check_sizes(files, _each_file(head))
        return
    check_sizes(files, (pair for pair in _each_file(head) if _digest(pair[0]) not in intact))
    intact.update(_digest(name) for name, _ in _each_file(head))


def _each_file(head: Head) -> Iterator[tuple[str, int | None]]:
    """The files that training needs, and their sizes; None: any but 0."""
    yield from head.each_shard_file()
    yield from ((Paths.table(digest, "arrow"), None) for digest in sorted(head.tables()))


def _digest(name: str) -> str:
    return name.rpartition("/")[2].partition(".")[0]


def check_sizes(files: Files, wanted: Iterable[tuple[str, int | None]]) -> None:
    """wanted: files and their sizes; None: any but 0. Raises as `check_files`."""
    for name, size, actual in files.sized(wanted):
        if not actual:
            raise IntegrityError(
                f"{files.where(name)}: is missing (or empty), and a snapshot needs it", fix=layout.REPAIR
            )
        if size not in (None, actual):
            raise IntegrityError(
                f"{files.where(name)}: does not have the size that the snapshot says",
                expected=f"{size} bytes",
                found=f"{actual} bytes",
                fix=layout.REPAIR,
            )
