"""Requests, bytes and waits of training from an object store: the real loader over a modelled store.

What: `simulate` runs the loaders of a node's processes step by step and counts. `ImaginedSnapshot` has any number of
samples: its index is computed from the rows that are asked for, so that 10^9 samples take no memory.
Real: the schedule, the planner, each process's part of a batch and its dropped captions, which records are read in one
call, how many shards a process has open, which shards are fetched ahead and when they may be.
Modelled: the mirror and the store. `MirrorModel` has sizes and a clock instead of files.
Not modelled: planning, decoding, verification and copies to the GPU; other users of the network; failures.
Price: a node's processes run one after the other in one process, and only some nodes are run; all nodes read alike.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from sana_pipe.base.disk import Handle
from sana_pipe.base.errors import CacheError
from sana_pipe.data.cache.files import Files
from sana_pipe.data.cache.shard import BLOCK, ShardReader, npy_header
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.cache.snapshot_head import Bucket, Head, PackedOrder, Policies, TextPlace
from sana_pipe.data.cache.snapshot_samples import Columns
from sana_pipe.data.encoding import estimate, plan
from sana_pipe.data.loader.loader import Loader, LoaderSettings
from sana_pipe.data.loader.planner import BatchPlan, Planner
from sana_pipe.data.loader.schedule import permute
from sana_pipe.data.loader.shard_prefetch import THREADS, FetchQueue
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.signals.text import TextEncoding
from sana_pipe.data.snapshots import packing

CAPTION_BYTES = 400
"""Of a caption as written. Assumption, that of `benchmarks.storage`."""
REQUESTS = 2
"""Requests of a fetch: one for the size, one for the bytes (a driver may cut a large transfer into several)."""
_HEAD = 2 * BLOCK
"""Bytes of a shard before its first record: its head is a member of less than a block."""


def caption_rows(count: int = 4096) -> np.ndarray:
    """Rows of typical captions, (count,) int64: quantiles of a log-normal distribution with median 70, sigma 0.55, cut
    to 8 and 300; mean 81. Assumption, that of `benchmarks.loader`."""
    quantiles = [NormalDist(math.log(70), 0.55).inv_cdf((i + 0.5) / count) for i in range(count)]
    return np.clip(np.exp(quantiles), 8, 300).astype(np.int64)


@dataclass(frozen=True)
class Store:
    """An object store, as a node sees it.

    Attributes:
        request_s: until the first byte of an answer arrives. Assumption: tens of milliseconds, as of S3.
        stream_gbs: 10^9 bytes/s of one transfer. Assumption: S3's documentation gives 85 to 90 MB/s.
        node_gbs: 10^9 bytes/s of a node. Assumption: 100 Gbit/s.
        hash_s_gb: seconds per 10^9 bytes to read and check a local copy. Measured by `benchmarks.loader` (0.11 CPU
            seconds, from the page cache); a disk may be slower.
    """

    request_s: float = 0.03
    stream_gbs: float = 0.09
    node_gbs: float = 12.5
    hash_s_gb: float = 0.11

    def fetch_s(self, size: int, streams: int) -> float:
        """Seconds to fetch a shard: a request for its size, then one transfer, alongside others of the same node."""
        return REQUESTS * self.request_s + size / 1e9 / min(self.stream_gbs, self.node_gbs / streams)


@dataclass
class NodeCounts:
    """Of one node.

    Attributes:
        requests: to the store: for each fetch one for the size and one for the bytes.
        fetches, fetched: shards fetched from the store, and their bytes.
        needed, needed_bytes: those of them that a process began to read. A node with time to spare fetches for later
            steps, too, so that a short run has more fetches.
        opened, hashed: openings of shards by all processes, and the bytes of copies that were checked, once each.
        spans, read: reads from copies, and their bytes.
        waited: seconds in which training waited for data.
        steps, samples: of the node.
    """

    requests: int = 0
    fetches: int = 0
    fetched: int = 0
    needed: int = 0
    needed_bytes: int = 0
    opened: int = 0
    hashed: int = 0
    spans: int = 0
    read: int = 0
    waited: float = 0.0
    steps: int = 0
    samples: int = 0

    def __sub__(self, other: NodeCounts) -> NodeCounts:
        return NodeCounts(**{name: value - getattr(other, name) for name, value in asdict(self).items()})

    def __add__(self, other: NodeCounts) -> NodeCounts:
        return NodeCounts(**{name: value + getattr(other, name) for name, value in asdict(self).items()})


class MirrorModel:
    """`cache.mirror.Mirror` without files: at the limit, the copies opened longest ago are removed.

    Args:
        limit: bytes of all copies.
        streams: transfers of the node at the same time, at most.

    Attributes:
        now: the clock of the thread that opens, in seconds; an opening advances it.
    """

    def __init__(self, limit: int, store: Store | None = None, streams: int = 1):
        self.limit, self.store, self.streams = limit, store or Store(), streams
        self.counts, self.now = NodeCounts(), 0.0
        self._copies: OrderedDict[str, tuple[int, float]] = OrderedDict()  # size, and the time from which it is there
        self._used = 0
        self._unread: set[str] = set()

    def read(self, name: str, size: int) -> None:
        """`open` by a process that reads it, not only to fetch it."""
        self.open(name, size)
        if name in self._unread:
            self._unread.remove(name)
            self.counts.needed += 1
            self.counts.needed_bytes += size

    def open(self, name: str, size: int) -> None:
        """Raises CacheError for a shard larger than the limit."""
        if size > self.limit:
            raise CacheError(f"{name}: is larger than the whole mirror", fix="raise mirror.gib")
        if name in self._copies:
            self._copies.move_to_end(name)
            self.now = max(self.now, self._copies[name][1])
        else:
            while self._used + size > self.limit:
                self._used -= self._copies.popitem(last=False)[1][0]
            self.now += self.store.fetch_s(size, self.streams)
            self._copies[name] = size, self.now
            self._used += size
            self._unread.add(name)
            self.counts.requests += REQUESTS
            self.counts.fetches += 1
            self.counts.fetched += size
            self.now += size / 1e9 * self.store.hash_s_gb
            self.counts.hashed += size
        self.counts.opened += 1


class _NoFile(Handle):
    def __init__(self) -> None:
        pass

    def __del__(self) -> None:
        pass


class ModelFiles(Files):
    """A cache folder whose shards are in a modelled object store. root: of a real cache, or any name."""

    def __init__(self, root: Path | str, mirror: MirrorModel):
        super().__init__(root)
        self.mirror, self.room = mirror, mirror.limit
        self.shard_sizes: dict[str, int] = {}

    def open(self, name: str, *, trust: bool = False) -> Handle:
        if not name.startswith("shards/"):
            return super().open(name)
        self.mirror.read(name, self.shard_sizes[name])
        return _NoFile()


class CountingReader(ShardReader):
    """Counts reads instead of reading. Shards are opened as ever."""

    files: ModelFiles

    def read(self, shard: str, offset: int, key: bytes, expected: bytes, into: np.ndarray, *more: Any) -> None:
        self.read_span(shard, offset, [into.nbytes if not more or more[0] is None else more[0]])

    def read_span(self, shard: str, offset: int, views: list[Any]) -> int:
        self._handle(shard)
        size = sum(view if isinstance(view, int) else len(view) for view in views)
        self.files.mirror.counts.spans += 1
        self.files.mirror.counts.read += size
        return size


class CountedSnapshot(Snapshot):
    """A real snapshot in a `ModelFiles`: its index is read, its shards are not."""

    files: ModelFiles

    def __init__(self, files: ModelFiles, snapshot_id: str):
        super().__init__(files, snapshot_id)
        files.shard_sizes = self.shard_files()

    def reader(self, kind: str, **options: Any) -> ShardReader:
        return CountingReader(self.files, self.head.encodings_by_kind[kind].name, folder=self.head.folder, **options)


# ---------------------------------------------------------------- a snapshot of any size


@dataclass(frozen=True)
class Imagined:
    """What an imagined snapshot holds.

    Attributes:
        pairs: samples, each with one caption, in equal parts in all buckets.
        batches: (height, width) in pixels -> global batch.
        blocks: samples of a joint shard, by bucket; (): not packed.
    """

    pairs: int
    batches: dict[tuple[int, int], int]
    latent: LatentEncoding
    text: TextEncoding
    blocks: tuple[int, ...] = ()
    window: int = packing.WINDOW

    def packed(self, mib: int) -> Imagined:
        """The same samples packed into shards of `mib` MiB, by the packer's rule on 2^12 samples of each bucket."""
        few = replace(self, pairs=len(self.batches) << 12)
        return replace(self, blocks=tuple(packing.block_sizes(ImaginedSnapshot(few, MirrorModel(1)), mib << 20)))

    @property
    def head(self) -> Head:
        """Without its shards and chunks, which would be objects by the million."""
        share, more = divmod(self.pairs, len(self.batches))
        buckets = tuple(
            Bucket(height, width, share + (i < more), batch, None, self.blocks[i] if self.blocks else None)
            for i, ((height, width), batch) in enumerate(self.batches.items())
        )
        rows = self.text.max_length
        return Head(
            encodings={"latent": self.latent.values(), "text": self.text.values()},
            policies=Policies("carry", 16, packed=PackedOrder(self.window) if self.blocks else None),
            buckets=buckets,
            shards={},
            null=TextPlace(_name(0), _HEAD, rows, 1, bytes(16), bytes(16)),
            left_out={},
            sources={},
            folder="packed-imagined" if self.blocks else None,
        )


def _name(number: int) -> str:
    return f"{number:032x}"


class _Names(list[str]):
    """Names of shards by their numbers, without a list of them."""

    def __getitem__(self, number: Any) -> Any:
        return _name(number)


class _Sizes(dict[str, int]):
    """Bytes of shards by the file's name, computed when they are asked for."""

    def __init__(self, snapshot: ImaginedSnapshot):
        super().__init__()
        self._snapshot = snapshot

    def __missing__(self, name: str) -> int:
        _, folder, _, file = name.split("/")
        self[name] = size = self._snapshot.shard_bytes(folder.partition("-")[0], int(file.partition(".")[0], 16))
        return size


class ImaginedSnapshot(CountedSnapshot):
    """A snapshot of an `Imagined`. Where a record lies and how many rows it has are functions of its row.

    Unpacked: units of one resolution each, and units of captions; rows lie in them in a permuted order, since rows are
    sorted by a digest. Packed: in the order of rows.
    """

    def __init__(self, content: Imagined, mirror: MirrorModel):
        self.files, self.id, self.content = ModelFiles("/imagined", mirror), "imagined", content
        self.head = content.head
        self.buckets, self.null = self.head.buckets, self.head.null
        self.pictures, self.caption = {"latent": content.latent}, content.text
        self._starts = np.cumsum([0, *(bucket.samples for bucket in self.buckets)])
        self.files.shard_sizes = _Sizes(self)
        self._rows = caption_rows()
        shapes = [self.shape("latent", b) for b in range(len(self.buckets))]
        self._latent_member = [estimate.member_bytes(content.latent, shape) for shape in shapes]
        width = content.text.width
        written = BLOCK + -(-CAPTION_BYTES // BLOCK) * BLOCK
        self._text_member = np.array(
            [estimate.member_bytes(content.text, (n, width)) + written for n in range(content.text.max_length + 1)]
        )
        self._units = list(content.blocks) or [
            plan.unit_images(content.latent, (b.height, b.width)) for b in self.buckets
        ]
        """Samples of a shard with latents, by bucket."""
        counts = [-(-b.samples // unit) for b, unit in zip(self.buckets, self._units, strict=True)]
        self._first_shard = np.cumsum([0, *counts])

    shards = {"latent": _Names(), "text": _Names()}  # noqa: RUF012

    @property
    def shard_count(self) -> int:
        """Shards of the whole snapshot, without that of the null record."""
        texts = 0 if self.packed else -(-len(self) // plan.UNIT_CAPTIONS)
        return int(self._first_shard[-1]) + texts

    def shard_files(self) -> dict[str, int]:
        return self.files.shard_sizes

    def shard_size(self, kind: str, number: int) -> int:
        return self.files.shard_sizes[self.shard_path(kind, _name(number))]

    def shard_sizes(self) -> np.ndarray:
        """Of a full shard of each bucket (and of texts), which stands for all the others."""
        return np.array(self.full_shards(), np.uint64)

    def check_shards(self, share: slice = slice(None)) -> None:
        pass

    def rows(self, places: np.ndarray) -> np.ndarray:
        """Text rows of the captions at some places of the storage, int64."""
        mixed = places.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return self._rows[(mixed >> np.uint64(40)) % np.uint64(len(self._rows))]

    def shard_bytes(self, kind: str, number: int) -> int:
        """Bytes of a shard's records. kind: `latent`, `text` or `packed`."""
        if kind == "text":
            unit = plan.UNIT_CAPTIONS
            places = np.arange(number * unit, min((number + 1) * unit, len(self)))
            return _HEAD + int(self._text_member[self.rows(places)].sum())
        bucket = int(np.searchsorted(self._first_shard, number, side="right")) - 1
        if bucket == len(self.buckets):
            raise KeyError(number)
        first = (number - int(self._first_shard[bucket])) * self._units[bucket]
        count = min(self._units[bucket], self.buckets[bucket].samples - first)
        size = _HEAD + count * self._latent_member[bucket]
        if kind == "packed":
            places = self._starts[bucket] + np.arange(first, first + count)
            size += int(self._text_member[self.rows(places)].sum())
        return size

    def full_shards(self) -> list[int]:
        if self.packed:
            return [self.shard_bytes("packed", int(first)) for first in self._first_shard[:-1]]
        return [
            self.shard_bytes("text", 0),
            *(self.shard_bytes("latent", int(first)) for first in self._first_shard[:-1]),
        ]

    def columns(self, rows: np.ndarray, kinds: Collection[str] | None = None) -> Columns:
        """As of a real snapshot, for rows of one bucket. Keys and checksums are zeros."""
        bucket = int(np.searchsorted(self._starts, rows[0], side="right")) - 1
        start, count = int(self._starts[bucket]), self.buckets[bucket].samples
        place, unit, member = rows - start, self._units[bucket], self._latent_member[bucket]
        header = BLOCK + len(npy_header(self.shape("latent", bucket)))
        if self.packed:
            text_shard, before, text_rows = self._before(place, start, unit, member, count)
            text_shard += self._first_shard[bucket]
            shard, offset = text_shard, before + header
            text_offset = before + member + header
        else:
            place = permute(place, count, "storage", bucket)
            shard = self._first_shard[bucket] + place // unit
            offset = _HEAD + place % unit * member + header
            captions = permute(rows, len(self), "captions")
            unit = plan.UNIT_CAPTIONS
            text_shard, before, text_rows = self._before(captions, 0, unit, 0, len(self))
            text_offset = before + header
        empty = np.zeros(len(rows), "S16")

        def place_of(number: np.ndarray, at: np.ndarray) -> dict[str, np.ndarray]:
            return {"shard": number.astype(np.uint32), "offset": at.astype(np.uint64), "key": empty, "checksum": empty}

        ids = rows.astype(np.uint64) * np.uint64(0xD6E8FEB86659FD93)
        caption = {"rows": text_rows.astype(np.uint32), "weight": np.ones(len(rows), np.float32)}
        return Columns(
            ids,
            {"latent": place_of(shard, offset)},
            {**place_of(text_shard, text_offset), **caption},
            np.arange(len(rows) + 1),
        )

    def _before(
        self, place: np.ndarray, start: int, unit: int, latent: int, count: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Shards of some places, bytes in the shard before their samples, and the samples' text rows; (n,) int64 each.

        Args:
            start: place of the first sample of the bucket among all. unit: samples of a shard. latent: bytes of a
                latent's member in the same shard. count: samples of the bucket.
        """
        numbers, which = np.unique(place // unit, return_inverse=True)
        inside = numbers[:, None] * unit + np.arange(unit)
        rows = self.rows(start + np.minimum(inside, count - 1))
        sizes = latent + self._text_member[rows]
        before = _HEAD + np.cumsum(sizes, axis=1) - sizes
        at = place % unit
        return numbers[which], before[which, at], rows[which, at]


# ---------------------------------------------------------------- the run


class _Remembering(Planner):
    """A planner that several ranks ask for the same steps; each asks for all of a batch, as always."""

    def __init__(self, planner: Planner):
        self.__dict__.update(planner.__dict__)
        self._plans: OrderedDict[int, BatchPlan] = OrderedDict()

    def step(self, step: int) -> BatchPlan:
        if step not in self._plans:
            self._plans[step] = super().step(step)
            if len(self._plans) > 8:
                self._plans.popitem(last=False)
        return self._plans[step]


def simulate(
    snapshot: CountedSnapshot,
    settings: LoaderSettings,
    ranks: Sequence[int],
    steps: int,
    *,
    step_s: float = 1.0,
    skip: int = 0,
) -> NodeCounts:
    """Run the loaders of the processes of one node.

    Args:
        settings: of a process (`rank`, `prefetch` and `verify` do not matter); its `prefetch_mib` limits how far
            reading is ahead of training, its `threads` read.
        steps: how many are counted, after the first `skip`.
        step_s: seconds of an optimizer step, as predicted by `planning.cost`.
    """
    node = _Node(snapshot, settings, ranks, step_s)
    counts, before = snapshot.files.mirror.counts, NodeCounts()
    for number in range(skip + steps):
        if number == skip and skip:
            before = replace(counts)
        node.step(settings.start_step + number)
    return counts - before


class _Node:
    def __init__(self, snapshot: CountedSnapshot, settings: LoaderSettings, ranks: Sequence[int], step_s: float):
        self.mirror, self.step_s, self.settings = snapshot.files.mirror, step_s, settings
        self.mirror.streams = len(ranks) * (THREADS + settings.threads if snapshot.packed else settings.threads)
        self.loaders = [Loader(snapshot, replace(settings, rank=rank, prefetch=0, verify=False)) for rank in ranks]
        planner = _Remembering(self.loaders[0].planner)
        for loader in self.loaders:
            loader.planner = planner
        self._paths: OrderedDict[int, list[dict[str, int]]] = OrderedDict()
        self.queues = [
            FetchQueue(
                self.mirror.limit,
                lambda step, rank=rank: self._shards(step)[rank],  # type: ignore[misc]
                settings.start_step,
                settings.stop_step,
            )
            for rank in range(len(ranks) if snapshot.packed and settings.prefetch != 0 else 0)
        ]
        self.fetchers = [[0.0] * THREADS for _ in ranks]
        self.readers = [[0.0] * settings.threads for _ in ranks]
        self.starts: list[float] = []
        self.end, self.size = 0.0, 1

    def _shards(self, step: int) -> list[dict[str, int]]:
        """Shards that each process reads in a step, with their bytes."""
        if step not in self._paths:
            self._paths[step] = [loader.shard_paths(step) for loader in self.loaders]
            if len(self._paths) > 2048:
                self._paths.popitem(last=False)
        return self._paths[step]

    def step(self, step: int) -> None:
        """Load a step in all processes, and train it when the last process has it."""
        counts, ready = self.mirror.counts, 0.0
        ahead = max(1, (self.settings.prefetch_mib << 20) // self.size)
        may_begin = self.starts[-ahead] if len(self.starts) >= ahead else 0.0
        for rank, loader in enumerate(self.loaders):
            threads = self.readers[rank]
            thread = threads.index(min(threads))
            now = max(threads[thread], may_begin)
            if self.queues:
                self.queues[rank].reached(step)
                self._fetch_ahead(rank, now)
            self.mirror.now = now
            loaded = loader.load(step)
            threads[thread] = self.mirror.now
            ready = max(ready, self.mirror.now)
            self.size = max(self.size, loaded.size)
            counts.samples += sum(len(batch.sample_ids) for batch in loaded.batches)
        start = max(self.end, ready)
        counts.waited += start - self.end
        counts.steps += 1
        self.starts.append(start)
        self.end = start + self.step_s

    def _fetch_ahead(self, rank: int, until: float) -> None:
        """What the prefetching threads of a process begin until a moment."""
        fetchers = self.fetchers[rank]
        while (earliest := min(fetchers)) <= until:
            thread = fetchers.index(earliest)
            name = self._next(self.queues[rank])
            if name is None:
                fetchers[:] = [max(clock, until) for clock in fetchers]
                return
            self.mirror.now = earliest
            self.mirror.open(name, self._size(name))
            fetchers[thread] = self.mirror.now

    def _size(self, name: str) -> int:
        return self.loaders[0].snapshot.shard_files()[name]

    @staticmethod
    def _next(queue: FetchQueue) -> str | None:
        while queue.may_plan():
            queue.plan()
        return queue.take()


def nodes(world: int, per_node: int, sample: int) -> Iterator[range]:
    """The ranks of some nodes, evenly spread: all of them if there are no more than `sample`."""
    count = max(1, world // per_node)
    for number in sorted({i * count // sample for i in range(sample)}):
        yield range(number * per_node, min(world, (number + 1) * per_node))
