"""Snapshots: immutable, content-addressed lists of samples grouped by bucket. Training reads these first.

A snapshot is a JSON head (`Head`), tables that list its shards and chunks (`pipeline.cache.snapshot_lists`), and
uncompressed Arrow IPC chunks. A chunk is mapped and checked whole at the first touch, and again if its file has changed
since. Rows are ordered by (bucket, sample id), so a sample is addressed by (bucket, position in the bucket). A packed
snapshot has its rows in a shuffled order inside each bucket, and joint shards.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache, partial
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.cache import layout
from pipeline.cache.arrow import ipc_table
from pipeline.cache.codec import PLAIN
from pipeline.cache.files import Files
from pipeline.cache.index import RecordIndex
from pipeline.cache.keys import Digests, fixed, key_bytes
from pipeline.cache.layout import Paths
from pipeline.cache.recipes import Recipe, caption_of, pictures_of, recipe_class
from pipeline.cache.shard import ShardReader, to_ipc
from pipeline.cache.snapshot_lists import (
    HEX,
    Chunk,
    ChunkTable,
    Form,
    HeadObject,
    ShardTable,
    nested,
    nested_list,
    publish,
)
from pipeline.errors import CacheError, IntegrityError

T = TypeVar("T")
R = TypeVar("R", bound=Recipe)

CHUNK_ROWS = 1 << 18
OPEN_CHUNKS = 4096
"""Chunks of a snapshot that stay mapped, for samples and for names; 10 KB of memory each. Those of 10^9 samples: every
step has samples of nearly all chunks, and opening one again takes half a millisecond."""
MIRRORED_CHUNKS = 64
"""The same over a mirror, or as many as a quarter of it holds: a mapped file of an object store occupies its disk, even
after the mirror has evicted the file."""
CHUNK_BYTES = 40 << 20
"""About the size of a chunk."""

_KEY = pa.binary(16)
_PLACE = [("shard", pa.uint32()), ("offset", pa.uint64()), ("key", _KEY), ("checksum", _KEY)]
_LENGTH = ("length", pa.uint64())


def _place(recipe: Recipe, *more: tuple[str, pa.DataType]) -> pa.StructType:
    return pa.struct([*_PLACE, *([] if recipe.storage == PLAIN else [_LENGTH]), *more])


def samples_schema(recipes: Iterable[Recipe]) -> pa.Schema:
    """Rows that training reads, one per sample: `sample_id`, a struct with the place of its record for each kind of
    picture record (named after the kind), and `captions`, a list of such structs with `rows` and `weight`.

    `shard` is an index into the head's `shards` of that kind. `length` (bytes of the payload) is there where a kind is
    not stored as plain values.
    """
    every = list(recipes)
    caption = caption_of(every)
    pictures = [(recipe.kind, _place(recipe)) for recipe in pictures_of(every)]
    captions = pa.list_(_place(caption, ("rows", pa.uint32()), ("weight", pa.float32())))
    return pa.schema([("sample_id", pa.uint64()), *pictures, ("captions", captions)])


def picture_keys(samples: pa.Table, kind: str) -> np.ndarray:
    """Keys of the picture records of a kind in a table of samples, S16 (n,)."""
    return fixed(pc.struct_field(samples.column(kind), "key"))


WRITTEN = pa.struct([("offset", pa.uint64()), ("length", pa.uint32()), ("checksum", _KEY)])
NAMES = pa.schema(
    [("sample_id", pa.uint64()), ("source", pa.string()), ("item", pa.string()), ("captions", pa.list_(WRITTEN))]
)
"""Rows for people, one per sample: where it came from, and where its captions lie in the text shards."""


# ---------------------------------------------------------------- the head


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
        samples: how many it has.
        batch: global batch of a step.
        parts: in the order of rows; None if every sample is visited once per epoch.
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
    pictures differ that stay on one side; None: only equal files do."""

    share: float
    side: str
    distance: int | None = None


@dataclass(frozen=True)
class Policies(HeadObject):
    """Settings that decide the training order; options of `bucket` in the configuration.

    Attributes:
        small: `carry` or `drop`.
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
        recipes: by kind.
        shards: by kind; the samples' tables count into them.
        left_out: reason -> items that are not in the snapshot.
        sources: source -> digest of its scan's table.
        parent: id of the snapshot that the name pointed to before; of the source, if this snapshot is packed.
        folder: of the joint shards of a packed snapshot, below `shards/`.
        options: settings of the configuration that `bucket` made it with, where they are not the defaults, by section.
        counts: `samples`, for other tools.
        leaked: held-out snapshot -> its samples that look like one of these, where that was counted.
    """

    recipes: Mapping[str, Mapping[str, Any]]
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
    def content(self) -> bytes:
        """The head without its parent, options and leaks; equal for snapshots of the same samples, records and
        policies."""
        return layout.canonical({**self.values(), "parent": None, "options": None, "leaked": None})

    @cached_property
    def recipes_by_kind(self) -> Mapping[str, Recipe]:
        """The recipes of its records."""
        return {kind: recipe_class(kind).from_values(dict(values)) for kind, values in self.recipes.items()}

    def recipe(self, kind: type[R]) -> R:
        """The recipe of a kind of record.

        Raises:
            IntegrityError: the snapshot has no such records.
        """
        recipe = self.recipes_by_kind.get(kind.kind)
        if not isinstance(recipe, kind):
            raise IntegrityError(f"the snapshot has no records of the kind {kind.kind}", found=", ".join(self.recipes))
        return recipe

    @property
    def samples(self) -> int:
        return sum(bucket.samples for bucket in self.buckets)

    def shard_path(self, kind: str, name: str) -> str:
        """A shard as a file of the cache."""
        return Paths.shard(self.folder or self.recipes_by_kind[kind].name, name)

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
        caption = caption_of(self.recipes_by_kind.values()).kind
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
                f"{files.where(name)}: has another size than the snapshot says",
                expected=f"{size} bytes",
                found=f"{actual} bytes",
                fix=layout.REPAIR,
            )


def write_chunk(files: Files | None, samples: pa.Table, names: pa.Table) -> Chunk:
    """Write one chunk: up to `CHUNK_ROWS` rows of `samples_schema` and of `NAMES`, in the same order. files: None: the
    result alone."""
    put = partial(files.put_content, folder_of="tables", suffix="arrow", twice=True) if files else layout.content_digest
    return Chunk(samples.num_rows, put(to_ipc(samples)), put(to_ipc(names)))


# ---------------------------------------------------------------- samples


@dataclass(frozen=True, kw_only=True)
class RecordPlace:
    """The place of a record. length: bytes of a payload that is not plain values."""

    shard: str
    offset: int
    key: bytes
    checksum: bytes
    length: int | None = None


@dataclass(frozen=True, kw_only=True)
class Caption(RecordPlace):
    """The place of a caption's record. rows: its valid rows."""

    rows: int
    weight: float


@dataclass(frozen=True)
class Sample:
    """One sample. pictures: its records by kind."""

    sample_id: int
    bucket: int
    pictures: Mapping[str, RecordPlace]
    captions: tuple[Caption, ...]


Places = dict[str, np.ndarray]
"""Many records as columns, with the names of `RecordPlace` or `Caption`. `shard` is a number; keys and checksums are
S16; `length` is absent where payloads are plain values."""


@dataclass(frozen=True)
class Columns:
    """Many samples as columns.

    Attributes:
        sample_id: (n,) uint64.
        pictures: places of the picture records by kind, (n,) each.
        captions: places of the captions of all samples, in the samples' order; sample i has the rows
            `first[i]:first[i + 1]`.
    """

    sample_id: np.ndarray
    pictures: dict[str, Places]
    captions: Places
    first: np.ndarray

    def take(self, rows: np.ndarray, kinds: Collection[str] | None = None) -> Columns:
        """Some samples ((n,) int64), in that order, with their captions. kinds: of picture records; None: all."""
        begin = self.first[rows].astype(np.int64)
        counts = self.first[rows + 1] - begin
        first = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(counts, out=first[1:])
        caption_rows = np.arange(first[-1]) + np.repeat(begin - first[:-1], counts)
        wanted = self.pictures if kinds is None else kinds
        pictures = {kind: taken(self.pictures[kind], rows) for kind in wanted}
        return Columns(self.sample_id[rows], pictures, taken(self.captions, caption_rows), first)

    @classmethod
    def join(cls, parts: list[Columns]) -> Columns:
        """Concatenate."""
        ends = np.cumsum([0, *(part.first[-1] for part in parts)])
        firsts = [part.first[:-1] + end for part, end in zip(parts, ends[:-1], strict=True)]
        return cls(
            np.concatenate([part.sample_id for part in parts]),
            {kind: concatenated([part.pictures[kind] for part in parts]) for kind in parts[0].pictures},
            concatenated([part.captions for part in parts]),
            np.concatenate([*firsts, ends[-1:]]),
        )


def taken(places: Places, rows: np.ndarray | slice) -> Places:
    """Some rows of all columns."""
    return {name: column[rows] for name, column in places.items()}


def concatenated(parts: list[Places]) -> Places:
    """Rows of several, one after the other."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


class Snapshot:
    """An opened snapshot.

    Args:
        files: the cache.
        snapshot_id: hex id.

    Raises:
        IntegrityError: the head or its list of chunks is missing, damaged or another snapshot's.
    """

    def __init__(self, files: Files, snapshot_id: str):
        self.files, self.id = files, snapshot_id
        self.head = Head.read(files, snapshot_id)
        self.buckets, self.null = self.head.buckets, self.head.null
        recipes = self.head.recipes_by_kind.values()
        self.pictures = {recipe.kind: recipe for recipe in pictures_of(recipes)}
        self.caption = caption_of(recipes)
        self._starts = np.concatenate([[0], np.cumsum([bucket.samples for bucket in self.buckets])]).astype(np.int64)
        self._chunk_starts = np.concatenate([[0], np.cumsum([c.rows for c in self.head.chunks])]).astype(np.int64)
        self._checked: dict[str, tuple[int, ...]] = {}
        self._map = partial(_mapped, files, self.head.chunks, self._checked)
        # Without `self`: nothing of a snapshot stays mapped when it is let go of.
        recent, mapped = lru_cache(open_chunks(files.room)), self._map
        self._chunk = recent(lambda number: _columns(mapped(number, "samples")))
        self._names = recent(lambda number: mapped(number, "names"))

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def shards(self) -> Mapping[str, Sequence[str]]:
        """Names of the shards by kind; `shard` columns are indexes into these lists."""
        return self.head.shards

    @property
    def packed(self) -> bool:
        """Return whether its records lie in joint shards, in a shuffled order."""
        return self.head.folder is not None

    def recipe(self, kind: type[R]) -> R:
        """See `Head.recipe`."""
        return self.head.recipe(kind)

    def shape(self, kind: str, bucket: int) -> tuple[int, ...]:
        """The shape of a kind of picture record in a bucket."""
        return self.pictures[kind].shape(self.buckets[bucket].height, self.buckets[bucket].width)

    def shard_path(self, kind: str, name: str) -> str:
        """A shard as a file of the cache."""
        return self.head.shard_path(kind, name)

    def reader(self, kind: str, **options: Any) -> ShardReader:
        """A reader of the records of a kind. options: those of `ShardReader`."""
        return ShardReader(self.files, self.head.recipes_by_kind[kind].name, folder=self.head.folder, **options)

    def shard_size(self, kind: str, number: int) -> int:
        """Bytes of a shard by its number."""
        return int(self.head.shards[kind].sizes[number])

    def shard_files(self) -> dict[str, int]:
        """The shards as files of the cache, with their sizes in bytes."""
        return self.head.shard_files()

    def shard_sizes(self) -> np.ndarray:
        """Bytes of each shard, (shards,) uint64."""
        return self.head.shard_sizes()

    def check_shards(self, share: slice = slice(None)) -> None:
        """Raise IntegrityError if a shard is missing or has another size than when the snapshot was made.

        Args:
            share: shards of each list to look at, by number.
        """
        check_sizes(self.files, self.head.each_shard_file(share))

    def check_chunk(self, number: int) -> None:
        """Read both tables of a chunk and check them, also if they were checked before."""
        self._checked.clear()
        self._map(number, "samples")
        self._map(number, "names")

    def row(self, bucket: int, position: int) -> int:
        if not 0 <= position < self.buckets[bucket].samples:
            raise IndexError(f"bucket {bucket} has {self.buckets[bucket].samples} samples, not {position + 1}")
        return int(self._starts[bucket]) + position

    def sample(self, row: int) -> Sample:
        (chunk, at), shards, text = self._locate(row), self.shards, self.caption.kind
        first, last = chunk.first[at : at + 2].tolist()
        return Sample(
            int(chunk.sample_id[at]),
            int(np.searchsorted(self._starts, row, side="right")) - 1,
            {kind: RecordPlace(**_values(some, at, shards[kind])) for kind, some in chunk.pictures.items()},
            tuple(Caption(**_values(chunk.captions, i, shards[text])) for i in range(first, last)),
        )

    def picture(self, sample: Sample, kind: str, reader: ShardReader | None = None) -> np.ndarray:
        """A sample's record of a kind, verified: bits of bf16, uint16, of `shape`."""
        into, place = np.empty(self.shape(kind, sample.bucket), np.uint16), sample.pictures[kind]
        reader = reader or self.reader(kind)
        reader.read(place.shard, place.offset, place.key, place.checksum, into, place.length)
        return into

    def columns(self, rows: np.ndarray, kinds: Collection[str] | None = None) -> Columns:
        """Samples by their rows ((n,) int64), without an object per sample. kinds: of picture records; None: all.

        Raises:
            IntegrityError: a chunk that is touched for the first time is damaged.
        """
        low, high = (int(rows.min()), int(rows.max())) if len(rows) else (0, 0)
        first = self._chunk_of(low)
        if self._chunk_of(high) == first:
            return self._taken(first, rows, kinds)
        numbers = np.searchsorted(self._chunk_starts, rows, side="right") - 1
        parts, order = [], []
        for number in np.unique(numbers).tolist():
            order.append(np.flatnonzero(numbers == number))
            parts.append(self._taken(number, rows[order[-1]], kinds))
        return Columns.join(parts).take(np.argsort(np.concatenate(order)))

    def sample_ids(self) -> Iterator[np.ndarray]:
        """Sample ids in the order of rows: (rows of a chunk,) uint64, chunk after chunk."""
        for table in self.tables():
            yield table.column("sample_id").to_numpy()

    def tables(self) -> Iterator[pa.Table]:
        """The samples in the order of rows, chunk after chunk (schema: `samples_schema`)."""
        for number in range(len(self.head.chunks)):
            yield self._map(number, "samples")

    def name_tables(self) -> Iterator[pa.Table]:
        """The names in the order of rows, chunk after chunk (schema: `NAMES`)."""
        for number in range(len(self.head.chunks)):
            yield self._map(number, "names")

    def sample_id(self, row: int) -> int:
        chunk, at = self._locate(row)
        return int(chunk.sample_id[at])

    def source_item(self, row: int) -> tuple[str, str]:
        """(source, item) of a sample."""
        table, at = self._named(row)
        return table.column("source")[at].as_py(), table.column("item")[at].as_py()

    def names(self, sample_ids: Sequence[int]) -> dict[int, str]:
        """`source: item` by sample id. Samples that the snapshot does not hold, or cannot name, are left out."""
        names: dict[int, str] = {}
        first = 0
        for chunk_ids in self.sample_ids():
            for at in np.flatnonzero(np.isin(chunk_ids, np.array(sample_ids, np.uint64))):
                with suppress(CacheError):
                    names[int(chunk_ids[at])] = ": ".join(self.source_item(first + int(at)))
            first += len(chunk_ids)
        return names

    def written(self, row: int) -> list[dict[str, Any]]:
        """Return where a sample's captions lie in the text shards, as written: `offset`, `length`, `checksum` of
        each."""
        table, at = self._named(row)
        return table.column("captions")[at].as_py()

    def captions(self, row: int, reader: ShardReader) -> list[str]:
        """A sample's captions as they were written, verified."""
        sample = self.sample(row)
        return [
            reader.caption(caption.shard, where["offset"], where["length"], caption.key, where["checksum"])
            for caption, where in zip(sample.captions, self.written(row), strict=True)
        ]

    def _named(self, row: int) -> tuple[pa.Table, int]:
        number = self._chunk_of(row)
        return self._names(number), row - int(self._chunk_starts[number])

    def _locate(self, row: int) -> tuple[Columns, int]:
        """The chunk of a row, and the row's place in it."""
        number = self._chunk_of(row)
        return self._chunk(number), row - int(self._chunk_starts[number])

    def _taken(self, number: int, rows: np.ndarray, kinds: Collection[str] | None) -> Columns:
        """Some rows of a chunk; (n,) int64."""
        return self._chunk(number).take(rows - int(self._chunk_starts[number]), kinds)

    def _chunk_of(self, row: int) -> int:
        if not 0 <= row < len(self):
            raise IndexError(f"snapshot {self.id} has {len(self)} samples, not {row + 1}")
        return bisect_right(self._chunk_starts, row) - 1


def _mapped(files: Files, chunks: ChunkTable, checked: dict[str, tuple[int, ...]], number: int, which: str) -> pa.Table:
    """Map a chunk and check its digest, unless this very file was checked before."""
    digest = getattr(chunks[number], which)
    return ipc_table(files.mapped(Paths.table(digest, "arrow"), digest, mirrored=True, checked=checked))


def open_chunks(room: int | None) -> int:
    """Return how many chunks of a snapshot stay mapped. room: bytes of the mirror, if there is one."""
    return OPEN_CHUNKS if room is None else min(OPEN_CHUNKS, max(MIRRORED_CHUNKS, room // (4 * CHUNK_BYTES)))


def _columns(table: pa.Table) -> Columns:
    """Numpy views of a mapped chunk."""
    whole = table.combine_chunks()
    columns = {name: whole.column(name).chunk(0) for name in whole.schema.names}
    lists, sample_id = columns.pop("captions"), columns.pop("sample_id")
    pictures = {kind: _places(column) for kind, column in columns.items()}
    return Columns(sample_id.to_numpy(), pictures, _places(lists.values), lists.offsets.to_numpy())


def _places(struct: pa.StructArray) -> Places:
    fields = {each.name: struct.field(i) for i, each in enumerate(struct.type)}
    return {
        name: fixed(column) if column.type == _KEY else column.to_numpy(zero_copy_only=False)
        for name, column in fields.items()
    }


def _values(places: Places, at: int, shards: Sequence[str]) -> dict[str, Any]:
    """A record's place by name."""
    values = {name: key_bytes(c[at]) if c.dtype.kind == "S" else c[at].item() for name, c in places.items()}
    return {**values, "shard": shards[int(places["shard"][at])]}
