"""Snapshots: immutable, content-addressed lists of samples grouped by bucket. Training reads these first.

A snapshot is a JSON head (`cache.snapshot_head`), tables that list its shards and chunks
(`cache.snapshot_lists`), and uncompressed Arrow IPC chunks (`cache.snapshot_samples`). A chunk is
mapped and checked whole at the first touch, and again if its file has changed since. Rows are ordered by (bucket,
sample id), so a sample is addressed by (bucket, position in the bucket). A packed snapshot has its rows in a shuffled
order inside each bucket, and joint shards.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from sana_pipe.base.errors import CacheError
from sana_pipe.data.cache.arrow import ipc_table
from sana_pipe.data.cache.encodings import Encoding, caption_of, pictures_of
from sana_pipe.data.cache.files import Files
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.cache.shard import ShardReader
from sana_pipe.data.cache.snapshot_head import Head, check_sizes
from sana_pipe.data.cache.snapshot_lists import ChunkTable
from sana_pipe.data.cache.snapshot_samples import Caption, Columns, RecordPlace, Sample, columns_of, values_at

R = TypeVar("R", bound=Encoding)
OPEN_CHUNKS = 4096
"""Chunks of a snapshot that stay mapped, for samples and for names; 10 KB of memory each. Those of 10^9 samples: every
step has samples of nearly all chunks, and opening one again takes half a millisecond."""
MIRRORED_CHUNKS = 64
"""Chunks that stay mapped over a mirror, or as many as a quarter of it holds: a mapped file of an object store occupies
its disk, even after the mirror has evicted the file."""
CHUNK_BYTES = 40 << 20
"""Bytes of a chunk, roughly."""


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
        encodings = self.head.encodings_by_kind.values()
        self.pictures = {encoding.kind: encoding for encoding in pictures_of(encodings)}
        self.caption = caption_of(encodings)
        self._starts = np.concatenate([[0], np.cumsum([bucket.samples for bucket in self.buckets])]).astype(np.int64)
        self._chunk_starts = np.concatenate([[0], np.cumsum([c.rows for c in self.head.chunks])]).astype(np.int64)
        self._checked: dict[str, tuple[int, ...]] = {}
        self._map = partial(_mapped, files, self.head.chunks, self._checked)
        # Without `self`: nothing of a snapshot stays mapped when it is let go of.
        recent, mapped = lru_cache(open_chunks(files.room)), self._map
        self._chunk = recent(lambda number: columns_of(mapped(number, "samples")))
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

    def encoding(self, kind: type[R]) -> R:
        """See `Head.encoding`."""
        return self.head.encoding(kind)

    def shape(self, kind: str, bucket: int) -> tuple[int, ...]:
        """The shape of a kind of picture record in a bucket."""
        return self.pictures[kind].shape(self.buckets[bucket].height, self.buckets[bucket].width)

    def shard_path(self, kind: str, name: str) -> str:
        """A shard as a file of the cache."""
        return self.head.shard_path(kind, name)

    def reader(self, kind: str, **options: Any) -> ShardReader:
        """A reader of the records of a kind. options: those of `ShardReader`."""
        return ShardReader(self.files, self.head.encodings_by_kind[kind].name, folder=self.head.folder, **options)

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
            {kind: RecordPlace(**values_at(some, at, shards[kind])) for kind, some in chunk.pictures.items()},
            tuple(Caption(**values_at(chunk.captions, i, shards[text])) for i in range(first, last)),
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
