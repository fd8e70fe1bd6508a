"""Read snapshots as batches: verified records, the same global batch on every topology.

`Loader` yields, per optimizer step, this rank's microbatches and the state after them. The state counts
yielded steps, not prefetched ones.

Threads read records with preadv into their place in the batch and verify them there, in buffers of a pool: no worker
processes, no shared memory. An error in a thread is raised at the batch that it belongs to.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from sana_pipe.base.errors import ConfigError
from sana_pipe.data.cache.shard import RecordError, ShardReader
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.loader import randomness
from sana_pipe.data.loader.batch_prefetch import BatchPrefetch, OnRead
from sana_pipe.data.loader.buffer_pool import Allocator, BufferPool, aligned
from sana_pipe.data.loader.planner import BatchOrder, BatchPlan, Planner
from sana_pipe.data.loader.quarantine import Quarantine, Substitution, UnreadableRecord
from sana_pipe.data.loader.shard_prefetch import ShardPrefetch
from sana_pipe.data.signals.latent import LatentEncoding


@dataclass(frozen=True)
class Batch:
    """One microbatch of one rank, on the CPU. b samples.

    The tensors share one loader buffer. The loader reuses it when all of them are garbage-collected; a pinned buffer
    one step later, because its copy to the GPU may still be running.

    Attributes:
        latents: (b, C, h, w) bf16, already multiplied by the encoding's scaling factor.
        captions: (b, L, D) bf16, zeros past the mask; or packed: (t, D), one after the other without padding.
            Caption drop is already applied.
        mask: (b, L) bool, True where attention may look.
        noise: (b, C, h, w) fp32 standard normal, keyed by (seed, phase, visit, sample id).
        logit: (b,) fp32 standard normal, keyed in the same way; the objective makes times of it.
        sample_ids: of the samples.
        bucket: (H, W) in pixels.
        cu_seqlens: (b + 1,) int32 offsets of the packed captions; None if they are padded.
        pictures: the records of `LoaderSettings.pictures` by kind, (b, *shape): bf16, or uint16.
        pair_weight: (b,) fp32, the weights of the preference pairs whose `rejected` pictures are in `pictures`; else
            None.
    """

    latents: torch.Tensor
    captions: torch.Tensor
    mask: torch.Tensor
    noise: torch.Tensor
    logit: torch.Tensor
    sample_ids: tuple[int, ...]
    bucket: tuple[int, int]
    cu_seqlens: torch.Tensor | None = None
    pictures: Mapping[str, torch.Tensor] = field(default_factory=dict)
    pair_weight: torch.Tensor | None = None


@dataclass(frozen=True)
class LoaderState:
    """The state of a run: `step` optimizer steps of this order are done.

    length_window: belongs to the order (`train.length_window`); not written where it is 0.
    """

    snapshot: str
    seed: int
    phase: int
    step: int
    length_window: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "length_window" or value}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LoaderState:
        return cls(**values)


@dataclass(frozen=True)
class Loaded:
    """A step's samples for this rank.

    Attributes:
        size: bytes of its tensors.
        unreadable: records that could not be read, also of substitutes.
        substitutes: samples of the share that stand for others.
    """

    batches: list[Batch]
    size: int
    unreadable: list[UnreadableRecord]
    substitutes: int = 0


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """The steps that are read, the share of them, and the way."""

    seed: int
    phase: int
    """Number of the phase: with the seed, the key of the order and of all draws."""
    length_window: int = 0
    """See `Planner`."""
    start_step: int = 0
    stop_step: int | None = None
    """The step before which to stop; None: never."""

    rank: int
    world: int
    """This process among the data-parallel processes. `world` must divide every global batch."""
    microbatch: int
    """Samples per forward pass; the last microbatch of a step may be smaller."""

    caption_drop: float
    """Share of visits that see the null record instead of their caption, under the mask of their caption (as NVlabs
    train)."""
    text: Literal["padded", "packed"] = "padded"
    """Layout of `Batch.captions`."""
    pictures: tuple[str, ...] = ()
    """Kinds of picture records that batches have in addition to the latents. Records of other kinds are not read."""

    prefetch: int | None
    """Steps that threads read ahead at most; None: as many as `prefetch_mib` allows. 0 reads in the calling thread,
    without a time limit."""
    threads: int
    """Reading threads."""
    prefetch_mib: int = 128
    """MiB of steps read ahead from which on no other step is begun."""
    pin: bool = False
    """Buffers in page-locked memory."""
    timeout_s: float = 300.0
    """Seconds that one read may take while the training loop waits for it."""
    quarantine: Path | str | None = None
    """Replace samples with a record that stays wrong after one re-read, and write them to this file (see
    `loader.quarantine`); None: stop the run."""
    verify: bool = True
    """False skips the checksums; only to measure their cost."""


@dataclass(frozen=True)
class _Arrays:
    """The arrays of a share of n samples, in one buffer. Text of sample i: rows `begin[i]:end[i]` of `texts`.

    pictures: uint16 by kind, such as latents (n, C, h, w). noise: (n, C, h, w) float32. mask: (n, L) bool. logit: (n,)
    float32. texts: (n * L, D) uint16, or packed (t, D).
    """

    pictures: dict[str, np.ndarray]
    noise: np.ndarray
    mask: np.ndarray
    logit: np.ndarray
    texts: np.ndarray
    begin: np.ndarray
    end: np.ndarray

    @property
    def nbytes(self) -> int:
        arrays = (*self.pictures.values(), self.noise, self.mask, self.logit, self.texts)
        return sum(array.nbytes for array in arrays)


class Loader:
    """Yields this rank's share of every step.

    Args:
        order: another order than the snapshot's schedule.

    Attributes:
        substituted: samples of the yielded batches that stand for others.
        null: (rows, D) uint16, bf16 bits of the null record.
        readers: readers by kind of record.

    Raises:
        ConfigError: `world` does not divide a global batch.
        IntegrityError: a shard is missing or cut short (at construction, of those that this rank looks at; of others at
            their batch), or bytes are wrong (at their batch).
        CacheError: a read takes longer than `timeout_s` (at its batch); names shard and record.
    """

    def __init__(self, snapshot: Snapshot, settings: LoaderSettings, order: BatchOrder | None = None):
        self._batches = [bucket.batch for bucket in snapshot.buckets] if order is None else order.batches
        _check(snapshot, settings, self._batches)
        self.snapshot, self.settings = snapshot, settings
        self.quarantine = None if settings.quarantine is None else Quarantine(settings.quarantine)
        self.substituted = 0
        limit = max_open_shards(snapshot)
        self.pictures = (LatentEncoding.kind, *settings.pictures)
        self.texts = snapshot.caption.kind
        self.readers = {kind: snapshot.reader(kind, limit=limit) for kind in (*self.pictures, self.texts)}
        self.null = self._read_null()
        self.planner = Planner(
            snapshot,
            seed=settings.seed,
            phase=settings.phase,
            length_window=settings.length_window,
            kinds=self.pictures,
            order=order,
        )
        self.pool = BufferPool(self._largest_share(), pin=settings.pin)
        self._shard_prefetch: ShardPrefetch | None = None

    def load(self, step: int, on_read: OnRead | None = None) -> Loaded:
        """Read this rank's microbatches of a step.

        Args:
            on_read: called before each read.
        """
        if self._shard_prefetch is not None:
            self._shard_prefetch.reached(step)
        plan = self._share(step)
        substitution = Substitution(self.planner)
        while True:
            batches, size, bad = self._read(plan, on_read)
            if not bad:
                return Loaded(batches, size, substitution.unreadable, len(substitution))
            for i, error in bad.items():
                if self.quarantine is None:
                    raise error
                plan = substitution.replace(plan, i, error)

    def __iter__(self) -> Generator[tuple[list[Batch], LoaderState]]:
        settings = self.settings
        step, recent = settings.start_step, deque[list[Batch]]()
        prefetch = self._start_prefetch() if settings.prefetch != 0 else None
        try:
            while settings.stop_step is None or step < settings.stop_step:
                if len(recent) == 2:
                    recent.popleft()  # its copies to the GPU are done: the consumer asks for the next batch but one
                loaded = self.load(step) if prefetch is None else prefetch.get()
                if loaded.unreadable and self.quarantine is not None:
                    self.substituted += loaded.substitutes
                    self.quarantine.write(loaded.unreadable)
                if settings.pin:
                    recent.append(loaded.batches)
                step += 1
                yield (
                    loaded.batches,
                    LoaderState(self.snapshot.id, settings.seed, settings.phase, step, settings.length_window),
                )
        finally:
            if self._shard_prefetch is not None:
                self._shard_prefetch.close()
                self._shard_prefetch = None
            if prefetch is not None:
                prefetch.close()

    def shard_paths(self, step: int) -> dict[str, int]:
        """The shards that this rank reads in a step, as files of the cache, with their sizes in bytes."""
        plan, paths = self._share(step), dict[str, int]()
        for kind, places in (*plan.pictures.items(), (self.texts, plan.texts)):
            for number in dict.fromkeys(places["shard"].tolist()):
                path = self.snapshot.shard_path(kind, self.snapshot.shards[kind][number])
                paths[path] = self.snapshot.shard_size(kind, number)
        return paths

    def _start_prefetch(self) -> BatchPrefetch[Loaded]:
        settings, files = self.settings, self.snapshot.files
        if self.snapshot.packed and files.room is not None:
            self._shard_prefetch = ShardPrefetch(files, self.shard_paths, settings.start_step, settings.stop_step)
        return BatchPrefetch(
            self.load,
            settings.start_step,
            settings.stop_step,
            threads=settings.threads,
            steps=settings.prefetch,
            limit=settings.prefetch_mib << 20,
            timeout_s=settings.timeout_s,
            # A pinned buffer occupies all of its memory, however little of it a step uses.
            size=lambda loaded: self.pool.size if self.pool.pin else loaded.size,
        )

    def _read_null(self) -> np.ndarray:
        null = self.snapshot.null
        rows = np.empty((null.rows, self.snapshot.caption.width), np.uint16)
        self.readers[self.texts].read(null.shard, null.offset, null.key, null.checksum, rows, null.length)
        return rows

    def _share(self, step: int) -> BatchPlan:
        """Return this rank's share of the global batch."""
        plan, world = self.planner.step(step), self.settings.world
        if world == 1:
            return plan
        share = len(plan) // world
        return plan.share(slice(self.settings.rank * share, (self.settings.rank + 1) * share))

    def _largest_share(self) -> int:
        """Bytes of the largest possible share of a step."""
        text = self.snapshot.caption
        rows, largest = text.max_length, 0
        for number, batch in enumerate(self._batches):
            share = batch // self.settings.world
            records = [2 * math.prod(self.snapshot.shape(kind, number)) for kind in self.pictures]
            sizes = (*records, 2 * records[0], rows * text.width * 2, rows, 4)  # the noise is fp32
            largest = max(largest, sum(aligned(share * size) for size in sizes))
        return largest

    def _read(self, plan: BatchPlan, on_read: OnRead | None) -> tuple[list[Batch], int, dict[int, RecordError]]:
        """Read a plan: its microbatches, their bytes, and the samples with a record that stays wrong."""
        settings = self.settings
        ids, visits = plan.sample_id.tolist(), plan.visits.tolist()
        draws = randomness.draws(settings.seed, settings.phase, visits, ids)
        dropped = draws.drop < settings.caption_drop
        rows = self._text_rows(plan, dropped)
        arrays = self._allocate(plan, rows)
        np.less(np.arange(plan.length), rows[:, None], out=arrays.mask)
        arrays.logit[:] = draws.logit
        bad = self._read_records(plan, arrays, np.flatnonzero(~dropped), on_read)
        for i in np.flatnonzero(dropped).tolist():
            arrays.texts[arrays.begin[i] : arrays.end[i]] = self.null[: rows[i]]
        if settings.text == "padded":
            for i in range(len(plan)):
                arrays.texts[arrays.end[i] : (i + 1) * plan.length] = 0
        if not bad:
            for i in range(len(plan)):
                randomness.noise(settings.seed, settings.phase, visits[i], ids[i], arrays.noise[i])
        return self._microbatches(plan, arrays, ids), arrays.nbytes, bad

    def _text_rows(self, plan: BatchPlan, dropped: np.ndarray) -> np.ndarray:
        """Rows of text that each sample shows, (n,) int64."""
        rows = plan.texts["rows"].astype(np.int64)
        return np.minimum(np.where(dropped, np.minimum(rows, len(self.null)), rows), plan.length)

    def _allocate(self, plan: BatchPlan, rows: np.ndarray) -> _Arrays:
        count, shapes = len(plan), {kind: self.snapshot.shape(kind, plan.bucket) for kind in self.pictures}
        end = np.cumsum(rows) if self.settings.text == "packed" else np.arange(count) * plan.length + rows
        text_rows = int(rows.sum()) if self.settings.text == "packed" else count * plan.length
        allocator = Allocator(self.pool.take())
        return _Arrays(
            pictures={kind: allocator.cut((count, *shape), np.uint16) for kind, shape in shapes.items()},
            noise=allocator.cut((count, *shapes[LatentEncoding.kind]), np.float32),
            mask=allocator.cut((count, plan.length), bool),
            logit=allocator.cut((count,), np.float32),
            texts=allocator.cut((text_rows, self.snapshot.caption.width), np.uint16),
            begin=end - rows,
            end=end,
        )

    def _read_records(
        self, plan: BatchPlan, arrays: _Arrays, with_caption: np.ndarray, on_read: OnRead | None
    ) -> dict[int, RecordError]:
        """Read all records into their arrays; returns the first error of each sample that has one."""
        every, bad = np.arange(len(plan)), dict[int, RecordError]()
        reads = []
        for kind, places in plan.pictures.items():
            rows = arrays.pictures[kind].shape[1]
            into = arrays.pictures[kind].reshape(-1, *arrays.pictures[kind].shape[2:])
            reads.append((kind, places, every, into, every * rows, (every + 1) * rows))
        reads.append((self.texts, plan.texts, with_caption, arrays.texts, arrays.begin, arrays.end))
        for kind, places, which, into, begin, end in reads:
            reader, shards = self.readers[kind], self.snapshot.shards[kind]
            for i, error in reader.read_batch(
                shards,
                places,
                which,
                into,
                begin,
                end,
                verify=self.settings.verify,
                on_read=_with_place(reader, on_read),
            ):
                bad.setdefault(i, error)
        return bad

    def _microbatches(self, plan: BatchPlan, arrays: _Arrays, ids: list[int]) -> list[Batch]:
        count, bucket = len(plan), self.snapshot.buckets[plan.bucket]
        packed = self.settings.text == "packed"
        captions = arrays.texts if packed else arrays.texts.reshape(count, plan.length, arrays.texts.shape[-1])
        bounds = np.append(arrays.begin, arrays.end[-1])
        weights = next((places["weight"] for places in plan.pictures.values() if "weight" in places), None)
        batches = []
        for start in range(0, count, self.settings.microbatch):
            chosen = slice(start, min(start + self.settings.microbatch, count))
            offsets = bounds[chosen.start : chosen.stop + 1]
            text_rows = slice(*offsets[[0, -1]].tolist()) if packed else chosen
            batches.append(
                Batch(
                    bf16(arrays.pictures[LatentEncoding.kind][chosen]),
                    bf16(captions[text_rows]),
                    torch.from_numpy(arrays.mask[chosen]),
                    torch.from_numpy(arrays.noise[chosen]),
                    torch.from_numpy(arrays.logit[chosen]),
                    tuple(ids[chosen]),
                    (bucket.height, bucket.width),
                    torch.from_numpy((offsets - offsets[0]).astype(np.int32)) if packed else None,
                    {kind: self._tensor(kind, arrays.pictures[kind][chosen]) for kind in self.settings.pictures},
                    None if weights is None else torch.from_numpy(weights[chosen].copy()),
                )
            )
        return batches

    def _tensor(self, kind: str, values: np.ndarray) -> torch.Tensor:
        return bf16(values) if self.snapshot.pictures[kind].bf16 else torch.from_numpy(values)


def _check(snapshot: Snapshot, settings: LoaderSettings, batches: Sequence[int]) -> None:
    for batch in sorted(set(batches)):
        if batch % settings.world:
            divisors = [world for world in range(1, batch + 1) if batch % world == 0]
            raise ConfigError(
                f"a global batch of {batch} cannot be shared evenly by {settings.world} data-parallel processes",
                expected=f"a number of processes out of {divisors}",
                fix=f"launch that many, or set bucket.batch to a multiple of {settings.world} and run sana-pipe bucket",
            )
    if lacking := sorted(set(settings.pictures) - set(snapshot.pictures)):
        raise ConfigError(
            f"the snapshot has no records of the kind {' or '.join(lacking)}, which this run asks for",
            found=", ".join(snapshot.pictures),
            fix="encode them (sana-pipe encode), then sana-pipe bucket",
        )
    if settings.text not in ("padded", "packed"):
        raise ValueError(f"text must be 'padded' or 'packed', found {settings.text!r}")
    if snapshot.files.room is None:
        # Together the processes look at every shard. The reader notices a shard that only another machine lacks.
        snapshot.check_shards(slice(settings.rank, None, settings.world))
    elif settings.rank == 0:  # the listing of a store is the same for all
        snapshot.check_shards()


def max_open_shards(snapshot: Snapshot) -> int:
    """Limit on open shards. A file that the mirror removed occupies disk space while it is open, so with a mirror open
    shards may take at most half of its size."""
    room = snapshot.files.room
    return 256 if room is None else max(4, min(256, room // (2 * int(snapshot.shard_sizes().max()))))


def _with_place(reader: ShardReader, on_read: OnRead | None) -> Callable[[str, int, bytes], None] | None:
    if on_read is None:
        return None
    return lambda *place: on_read(lambda: f"reading {reader.where(*place)}")


def bf16(bits: np.ndarray) -> torch.Tensor:
    """A bf16 tensor over the same memory as an array of its bits (uint16)."""
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def unpack(captions: torch.Tensor, cu_seqlens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Packed captions (t, D) as padded captions (b, L, D), zeros past the mask. Does not synchronise with the device.

    Args:
        cu_seqlens: (b + 1,) int32.
        mask: (b, L) bool, as in `Batch`.
    """
    places = cu_seqlens[:-1, None] + torch.arange(mask.shape[1], device=mask.device, dtype=cu_seqlens.dtype)
    rows = captions[places.clamp(max=len(captions) - 1)]
    return rows.masked_fill_(~mask[..., None], 0)
