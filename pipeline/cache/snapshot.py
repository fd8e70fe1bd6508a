"""Snapshots: immutable, content-addressed lists of samples grouped by bucket. This is all that training reads first.

What: a JSON head (recipes, bucket table, policies, counts, what was left out and why, shards, chunks) and uncompressed
Arrow IPC chunks, mapped into memory; a chunk's digest is checked when it is first touched.
Why: two runs that name the same snapshot train on the same samples in the same order, wherever the cache was copied.
Price: about 150 bytes of disk per sample; nothing of it is resident until touched.

Rows are ordered by (bucket, sample id), so a sample is addressed by (bucket, position in the bucket). A packed snapshot
has its rows in a shuffled order inside each bucket, and its records in joint shards (`folder` in the head).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.cache import layout
from pipeline.cache.arrow import ipc_table
from pipeline.cache.codec import PLAIN
from pipeline.cache.files import Files
from pipeline.cache.index import fixed, key_bytes
from pipeline.cache.layout import Paths
from pipeline.cache.local_files import digest_of
from pipeline.cache.shard import Reader, to_ipc
from pipeline.errors import CacheError, IntegrityError

CHUNK_ROWS = 1 << 18

_KEY = pa.binary(16)
CAPTION = pa.struct(
    [
        ("shard", pa.uint32()),
        ("offset", pa.uint64()),
        ("rows", pa.uint32()),
        ("weight", pa.float32()),
        ("key", _KEY),
        ("checksum", _KEY),
    ]
)
SAMPLES = pa.schema(
    [
        ("sample_id", pa.uint64()),
        ("shard", pa.uint32()),
        ("offset", pa.uint64()),
        ("key", _KEY),
        ("checksum", _KEY),
        ("captions", pa.list_(CAPTION)),
    ]
)
"""What training reads of a sample. `shard` counts into the head's `shards` of that kind."""


def samples_schema(latent: layout.LatentRecipe, text: layout.TextRecipe) -> pa.Schema:
    """`SAMPLES`, with a `length` (bytes of the payload) last where a kind is not stored as plain bf16."""
    length = pa.field("length", pa.uint64())
    schema = SAMPLES
    if text.storage != PLAIN:
        schema = schema.set(
            schema.get_field_index("captions"), pa.field("captions", pa.list_(pa.struct([*CAPTION, length])))
        )
    return schema if latent.storage == PLAIN else schema.append(length)


WRITTEN = pa.struct([("offset", pa.uint64()), ("length", pa.uint32()), ("checksum", _KEY)])
NAMES = pa.schema(
    [("sample_id", pa.uint64()), ("source", pa.string()), ("item", pa.string()), ("captions", pa.list_(WRITTEN))]
)
"""What people want to know of a sample: where it came from, and where its captions stand in the text shards."""


@dataclass(frozen=True)
class Caption:
    shard: str
    offset: int
    rows: int
    weight: float
    key: bytes
    checksum: bytes
    length: int | None = None


@dataclass(frozen=True)
class Sample:
    """One sample's records. `length`: bytes of a payload that is not plain bf16."""

    sample_id: int
    bucket: int
    shard: str
    offset: int
    key: bytes
    checksum: bytes
    captions: tuple[Caption, ...]
    length: int | None = None


@dataclass(frozen=True)
class Columns:
    """Many samples at once, as columns; what `Sample` and `Caption` say of one. Keys and checksums are S16.

    captions: columns of all their captions, in the samples' order; those of sample i are
        `first[i]:first[i + 1]`. `length` is absent where payloads are plain bf16.
    """

    samples: dict[str, np.ndarray]
    captions: dict[str, np.ndarray]
    first: np.ndarray

    def take(self, which: np.ndarray) -> Columns:
        """The samples at some places ((n,) int64), in that order, with their captions."""
        begin = self.first[which].astype(np.int64)
        counts = self.first[which + 1] - begin
        first = np.zeros(len(which) + 1, np.int64)
        np.cumsum(counts, out=first[1:])
        places = np.arange(first[-1]) + np.repeat(begin - first[:-1], counts)
        return Columns(
            {name: column[which] for name, column in self.samples.items()},
            {name: column[places] for name, column in self.captions.items()},
            first,
        )

    @classmethod
    def join(cls, parts: list[Columns]) -> Columns:
        """One after the other."""
        ends = np.cumsum([0, *(part.first[-1] for part in parts)])
        firsts = [part.first[:-1] + end for part, end in zip(parts, ends[:-1], strict=True)]
        samples, captions = (
            {name: np.concatenate([own[name] for own in columns]) for name in columns[0]}
            for columns in ([part.samples for part in parts], [part.captions for part in parts])
        )
        return cls(samples, captions, np.concatenate([*firsts, ends[-1:]]))


@dataclass(frozen=True)
class Bucket:
    """One resolution: `height` and `width` in pixels, its samples and the global batch of a step."""

    height: int
    width: int
    samples: int
    batch: int


def build(files: Files, head: dict[str, Any], samples: pa.Table, names: pa.Table) -> dict[str, Any]:
    """Write the chunks of a snapshot; returns its whole head, to be published by `Cache.add_snapshot`.

    Args:
        head: everything but `chunks` and `parent`; `buckets` must count the rows of `samples`, in order.
        samples, names: tables of the schemas above, in the same order.
    """
    starts = range(0, samples.num_rows, CHUNK_ROWS)
    chunks = [chunk(files, samples.slice(start, CHUNK_ROWS), names.slice(start, CHUNK_ROWS)) for start in starts]
    return {**head, "chunks": chunks}


def chunk(files: Files, samples: pa.Table, names: pa.Table) -> dict[str, Any]:
    """Write one chunk of at most `CHUNK_ROWS` rows; returns its entry in a head."""
    return {
        "rows": samples.num_rows,
        "samples": files.put_content(to_ipc(samples), "tables", "arrow"),
        "names": files.put_content(to_ipc(names), "tables", "arrow"),
    }


def identity(head: dict[str, Any]) -> str:
    """A snapshot's id: the digest of its head."""
    return layout.content_digest(layout.canonical(head))


def shard_files(head: dict[str, Any]) -> dict[str, int]:
    """The shards that a head names as files of the cache, with their sizes in bytes."""
    folders = {kind: layout.RECIPES[kind].from_values(head["recipes"][kind]).name for kind in ("latent", "text")}
    return {
        Paths.shard(head.get("folder", folder), shard["name"]): shard["bytes"]
        for kind, folder in folders.items()
        for shard in head["shards"][kind]
    }


def maker(head: dict[str, Any]) -> str:
    """The command that makes a snapshot, and writes what is damaged of it again."""
    return "sana-pipe bucket --pack" if "folder" in head else "sana-pipe bucket"


def check_files(files: Files, head: dict[str, Any]) -> None:
    """Ask for the sizes of everything that a head names, and read nothing.

    Raises:
        IntegrityError: a shard is missing or of another size than the head says; a chunk or a scan's table is missing
            or empty.
    """
    shards = shard_files(head)
    chunks = {Paths.table(chunk[kind], "arrow") for chunk in head["chunks"] for kind in ("samples", "names")}
    scans = {Paths.table(table, "parquet") for table in head["sources"].values()}
    found = files.sizes([*shards, *sorted(chunks | scans)])
    for name in [*shards, *sorted(chunks | scans)]:
        fix = maker(head) if name in chunks else "sana-pipe encode --data DIR" if name in scans else layout.REPAIR
        if not found.get(name):
            raise IntegrityError(f"{files.where(name)}: is missing (or empty), and a snapshot needs it", fix=fix)
        if name in shards and found[name] != shards[name]:
            raise IntegrityError(
                f"{files.where(name)}: has another size than a snapshot says",
                expected=f"{shards[name]} bytes",
                found=f"{found[name]} bytes",
                fix=fix,
            )


class Snapshot:
    """An opened snapshot.

    Args:
        files: the cache.
        snapshot_id: hex id.

    Raises:
        IntegrityError: the head is missing, damaged or another snapshot's.
    """

    def __init__(self, files: Files, snapshot_id: str):
        self.files, self.id = files, snapshot_id
        where = Paths.snapshot(snapshot_id)
        self.head = files.document(where)
        self.buckets = [
            Bucket(**{k: b[k] for k in ("height", "width", "samples", "batch")}) for b in self.head["buckets"]
        ]
        self.latent_recipe = layout.LatentRecipe.from_values(self.head["recipes"]["latent"])
        self.text_recipe = layout.TextRecipe.from_values(self.head["recipes"]["text"])
        self._schema = samples_schema(self.latent_recipe, self.text_recipe)
        self.null = self.head["null"]
        self._starts = np.concatenate([[0], np.cumsum([b.samples for b in self.buckets])]).astype(np.int64)
        self._chunk_starts = np.concatenate([[0], np.cumsum([c["rows"] for c in self.head["chunks"]])]).astype(np.int64)
        if self._starts[-1] != self._chunk_starts[-1]:
            raise IntegrityError(f"{files.where(where)}: buckets and chunks count differently")
        self._chunks: dict[int, _Chunk] = {}
        self._names: dict[int, pa.Table] = {}

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def shards(self) -> dict[str, list[str]]:
        """Names of the shards by kind; `shard` columns count into these lists."""
        return {kind: [s["name"] for s in shards] for kind, shards in self.head["shards"].items()}

    @property
    def packed(self) -> bool:
        """Whether its records lie in joint shards, in a shuffled order."""
        return "folder" in self.head

    def folder(self, kind: str) -> str:
        """Where the shards of a kind lie, below `shards/`."""
        recipe = self.latent_recipe if kind == "latent" else self.text_recipe
        return self.head.get("folder", recipe.name)

    def reader(self, kind: str, **options: Any) -> Reader:
        """A reader of the records of a kind. options: those of `Reader`."""
        recipe = self.latent_recipe if kind == "latent" else self.text_recipe
        return Reader(self.files, recipe.name, folder=self.folder(kind), **options)

    def shard_files(self) -> dict[str, int]:
        """The shards as files of the cache, with their sizes in bytes."""
        return shard_files(self.head)

    def check_shards(self) -> None:
        """Refuse at once if a shard is missing or of another size than when the snapshot was made."""
        check_files(self.files, {**self.head, "chunks": [], "sources": {}})

    def check_chunk(self, number: int) -> None:
        """Read a chunk whole and check it, samples and names."""
        self._map(number, "samples", self._schema)
        self._map(number, "names", NAMES)

    def row(self, bucket: int, position: int) -> int:
        if not 0 <= position < self.buckets[bucket].samples:
            raise IndexError(f"bucket {bucket} has {self.buckets[bucket].samples} samples, not {position + 1}")
        return int(self._starts[bucket]) + position

    def sample(self, row: int) -> Sample:
        chunk, at = self._locate(row)
        return chunk.sample(at, int(np.searchsorted(self._starts, row, side="right")) - 1, self.shards_of)

    def columns(self, rows: np.ndarray) -> Columns:
        """Samples by their rows ((n,) int64), without an object for each.

        Raises:
            IntegrityError: a chunk that is touched for the first time is damaged.
        """
        low, high = (int(rows.min()), int(rows.max())) if len(rows) else (0, 0)
        chunk, start = self._locate(low)
        if self._chunk_of(high) == self._chunk_of(low):
            return chunk.columns.take(rows - (low - start))
        numbers = np.searchsorted(self._chunk_starts, rows, side="right") - 1
        parts, order = [], []
        for number in np.unique(numbers).tolist():
            begin = int(self._chunk_starts[number])
            order.append(np.flatnonzero(numbers == number))
            parts.append(self._locate(begin)[0].columns.take(rows[order[-1]] - begin))
        return Columns.join(parts).take(np.argsort(np.concatenate(order)))

    def caption_rows(self, row: int) -> tuple[list[int], list[float]]:
        """Valid rows and weights of a sample's captions, without reading any text."""
        chunk, at = self._locate(row)
        span = slice(chunk.columns.first[at], chunk.columns.first[at + 1])
        return chunk.caption["rows"][span].tolist(), chunk.caption["weight"][span].tolist()

    def sample_ids(self) -> Iterator[np.ndarray]:
        """Sample ids in the order of rows: (rows of a chunk,) uint64, chunk after chunk."""
        for table in self.tables():
            yield table.column("sample_id").to_numpy()

    def tables(self) -> Iterator[pa.Table]:
        """The samples in the order of rows, chunk after chunk (schema: `samples_schema`)."""
        for number in range(len(self.head["chunks"])):
            yield self._map(number, "samples", self._schema)

    def sample_id(self, row: int) -> int:
        chunk, at = self._locate(row)
        return int(chunk.sample_id[at])

    @property
    def shards_of(self) -> dict[str, list[str]]:
        cached = self.__dict__.get("_shards")
        if cached is None:
            cached = self.__dict__["_shards"] = self.shards
        return cached

    def origin(self, row: int) -> tuple[str, str]:
        """(source, item) of a sample."""
        table, at = self._named(row)
        return table.column("source")[at].as_py(), table.column("item")[at].as_py()

    def names(self, sample_ids: Sequence[int]) -> dict[int, str]:
        """`source: item` of these samples; those that the snapshot does not hold, or cannot name, are left out."""
        found: dict[int, str] = {}
        first = 0
        for part in self.sample_ids():
            for at in np.flatnonzero(np.isin(part, np.array(sample_ids, np.uint64))):
                with suppress(CacheError):
                    found[int(part[at])] = ": ".join(self.origin(first + int(at)))
            first += len(part)
        return found

    def written(self, row: int) -> list[dict[str, Any]]:
        """Where a sample's captions stand in the text shards: `offset`, `length`, `checksum` of each."""
        table, at = self._named(row)
        return table.column("captions")[at].as_py()

    def captions(self, row: int, reader: Reader) -> list[str]:
        """A sample's captions as they were written, verified."""
        sample = self.sample(row)
        return [
            reader.caption(caption.shard, where["offset"], where["length"], caption.key, where["checksum"])
            for caption, where in zip(sample.captions, self.written(row), strict=True)
        ]

    def _named(self, row: int) -> tuple[pa.Table, int]:
        number = self._chunk_of(row)
        if number not in self._names:
            self._names[number] = self._map(number, "names", NAMES)
        return self._names[number], row - int(self._chunk_starts[number])

    def _locate(self, row: int) -> tuple[_Chunk, int]:
        number = self._chunk_of(row)
        chunk = self._chunks.get(number)
        if chunk is None:
            chunk = self._chunks[number] = _Chunk(self._map(number, "samples", self._schema))
        return chunk, row - int(self._chunk_starts[number])

    def _chunk_of(self, row: int) -> int:
        if not 0 <= row < len(self):
            raise IndexError(f"snapshot {self.id} has {len(self)} samples, not {row + 1}")
        return bisect_right(self._chunk_starts, row) - 1

    def _map(self, number: int, which: str, schema: pa.Schema) -> pa.Table:
        """Map a chunk and check its digest."""
        entry = self.head["chunks"][number]
        path = self.files.where(Paths.table(entry[which], "arrow"))
        try:
            handle = self.files.open(Paths.table(entry[which], "arrow"))
        except FileNotFoundError:
            raise IntegrityError(f"{path}: a chunk of snapshot {self.id} is missing", fix=maker(self.head)) from None
        found = digest_of(handle)  # not through the mapping: only what is looked up shall take up memory
        if found != entry[which]:
            raise IntegrityError(
                f"{path}: a chunk of snapshot {self.id} does not match its name",
                expected=entry[which],
                found=found,
                fix=maker(self.head),
            )
        table = ipc_table(handle.map())
        if table.schema != schema or table.num_rows != entry["rows"]:
            raise IntegrityError(f"{path}: is not chunk {number} of snapshot {self.id}", found=str(table.schema.names))
        return table


def _mapped(column: pa.ChunkedArray) -> pa.Array:
    """A column of one piece as it is; pyarrow's and numpy's own ways to join pieces copy even a single one."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


class _Chunk:
    """Numpy views of a mapped chunk."""

    def __init__(self, table: pa.Table):
        whole = table.combine_chunks()
        self.sample_id = _mapped(whole.column("sample_id")).to_numpy()
        self.shard = _mapped(whole.column("shard")).to_numpy()
        self.offset = _mapped(whole.column("offset")).to_numpy()
        self.key = fixed(_mapped(whole.column("key")))
        self.checksum = fixed(_mapped(whole.column("checksum")))
        lists = _mapped(whole.column("captions"))
        self.length = _mapped(whole.column("length")).to_numpy() if "length" in whole.schema.names else None
        names = ("sample_id", "shard", "offset", "key", "checksum", "length")
        samples = {name: own for name in names if (own := getattr(self, name)) is not None}
        struct = lists.values
        self.caption: dict[str, np.ndarray] = {}
        for i, field in enumerate(lists.type.value_type):
            column = struct.field(i)
            self.caption[field.name] = fixed(column) if field.type == _KEY else column.to_numpy(zero_copy_only=False)
        self.columns = Columns(samples, self.caption, lists.offsets.to_numpy())

    def sample(self, at: int, bucket: int, shards: dict[str, list[str]]) -> Sample:
        own = self.caption
        lengths = own.get("length")
        return Sample(
            int(self.sample_id[at]),
            bucket,
            shards["latent"][int(self.shard[at])],
            int(self.offset[at]),
            key_bytes(self.key[at]),
            key_bytes(self.checksum[at]),
            tuple(
                Caption(
                    shards["text"][int(own["shard"][i])],
                    int(own["offset"][i]),
                    int(own["rows"][i]),
                    float(own["weight"][i]),
                    key_bytes(own["key"][i]),
                    key_bytes(own["checksum"][i]),
                    None if lengths is None else int(lengths[i]),
                )
                for i in range(int(self.columns.first[at]), int(self.columns.first[at + 1]))
            ),
            None if self.length is None else int(self.length[at]),
        )
