"""Snapshots to batches: verified reads, the same global batch on every topology.

What: `Loader` yields, per optimizer step, this rank's microbatches and the state after them.
Why: records are read with preadv straight into the rows of the batch, verified there, by threads (no worker
processes, no shared memory, nothing left behind), in buffers that are used again and again; an error in a thread
reaches the training loop at that batch.
Price: the plan of a global batch (which samples, which captions, how long) is worked out on every rank. Buffers have
the size of the largest step there can be (every caption at its longest); memory that is not pinned is only taken up as
far as it is written.

The state belongs to the batches that were handed out with it, so prefetching never runs ahead of it.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.cache.layout import Paths
from pipeline.cache.shard import Reader, RecordError
from pipeline.cache.snapshot import Snapshot
from pipeline.errors import ConfigError, UserError
from pipeline.loader import randomness
from pipeline.loader.batch_prefetch import BatchPrefetch, Doing
from pipeline.loader.buffer_pool import Allocator, BufferPool, room
from pipeline.loader.planner import Plan, Planner
from pipeline.loader.shard_prefetch import ShardPrefetch


@dataclass(frozen=True)
class Batch:
    """One microbatch of one rank, on the CPU.

    Its tensors lie in a buffer of the loader, which is used again once none of them is left. If it is page-locked, the
    next batch but one has been asked for by then too: copies to a GPU may be in flight until then, whoever lets go of
    the tensors.

    Attributes:
        latents: (b, C, h, w) bf16, already multiplied by the recipe's scaling factor.
        captions: (b, L, D) bf16, zeros past the mask; or packed: (t, D), one after the other without padding.
            Caption drop is already applied.
        mask: (b, L) bool, True where attention may look.
        noise: (b, C, h, w) fp32 standard normal, keyed by (seed, phase, visit, sample id).
        logit: (b,) fp32 standard normal, keyed alike; the objective makes times of it.
        sample_ids: which samples these are.
        bucket: (H, W) in pixels.
        cu_seqlens: (b + 1,) int32 where each packed caption begins and the last one ends; None if they are padded.
    """

    latents: torch.Tensor
    captions: torch.Tensor
    mask: torch.Tensor
    noise: torch.Tensor
    logit: torch.Tensor
    sample_ids: tuple[int, ...]
    bucket: tuple[int, int]
    cu_seqlens: torch.Tensor | None = None


@dataclass(frozen=True)
class State:
    """Where a run stands: `step` optimizer steps of this order are done.

    length_window: part of the order (`train.length_window`); not written where it is 0.
    """

    snapshot: str
    seed: int
    phase: int
    step: int
    length_window: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "length_window" or value}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> State:
        return cls(**values)


@dataclass(frozen=True)
class Replaced:
    """A record that could not be read, and the sample that stood in for its own at one step."""

    shard: str
    record: str
    sample: int
    step: int
    by: int
    reason: str


@dataclass(frozen=True)
class Loaded:
    """This rank's part of a step, as it was read.

    size: bytes of its tensors. replaced: what could not be read, substitutes included. stand_ins: samples that stand
    for others.
    """

    batches: list[Batch]
    size: int
    replaced: list[Replaced]
    stand_ins: int = 0


class Loader:
    """Yields this rank's part of every step.

    Args:
        snapshot: what to read.
        seed, phase: key the order and all draws.
        rank, world: this process among the data-parallel ones; `world` must divide every global batch.
        microbatch: samples per forward pass; the last one of a step may be smaller.
        caption_drop: share of visits that see the null record instead of their caption.
        null_mask: `caption` keeps the caption's mask on a drop (NVlabs' trainer), `bos` shows only the null
            record's valid rows (`SanaPipeline` at inference).
        prefetch: steps read ahead by threads at most (None: as `prefetch_mib` allows); 0 reads inline, without
            threads and without a time limit.
        threads: how many.
        start_step, stop_step: the first step, and the one before which to stop (None: never).
        prefetch_mib: no further step is begun while those read ahead hold this many MiB.
        text: `padded` or `packed` (see `Batch`).
        length_window: see `Planner`.
        pin: buffers in page-locked memory.
        timeout_s: how long one read may take while the training loop waits for it.
        quarantine: a file. A record that stays wrong after one re-read then does not stop the run: another sample of
            its bucket takes its place, the same on any topology, and the file gets a line of JSON.
        verify: False skips the checksums; only for measuring what they cost.

    Attributes:
        replaced: how many samples were replaced in the batches handed out.

    Raises:
        ConfigError: `world` does not divide a global batch.
        IntegrityError: a shard is missing or cut short (at construction), or bytes are wrong (at their batch).
        CacheError: a read takes longer than `timeout_s` (at its batch); names shard and record.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        seed: int,
        phase: int,
        rank: int,
        world: int,
        microbatch: int,
        caption_drop: float,
        null_mask: str,
        prefetch: int | None,
        threads: int,
        start_step: int = 0,
        stop_step: int | None = None,
        prefetch_mib: int = 128,
        text: str = "padded",
        length_window: int = 0,
        pin: bool = False,
        timeout_s: float = 300.0,
        quarantine: Path | str | None = None,
        verify: bool = True,
    ):
        batches = sorted({bucket.batch for bucket in snapshot.buckets})
        for batch in batches:
            if batch % world:
                fits = [w for w in range(1, batch + 1) if batch % w == 0]
                raise ConfigError(
                    f"a global batch of {batch} cannot be shared evenly by {world} data-parallel processes",
                    expected=f"a number of processes out of {fits}",
                    fix=f"launch that many, or set bucket.batch to a multiple of {world} and run sana-pipe bucket",
                )
        if text not in ("padded", "packed"):
            raise ValueError(f"text must be 'padded' or 'packed', found {text!r}")
        snapshot.check_shards()
        self.snapshot, self.seed, self.phase = snapshot, seed, phase
        self.rank, self.world, self.microbatch, self.pin = rank, world, microbatch, pin
        self.caption_drop, self.null_mask = caption_drop, null_mask
        self.prefetch, self.prefetch_mib, self.threads, self.timeout_s = prefetch, prefetch_mib, threads, timeout_s
        self.start_step, self.stop_step = start_step, stop_step
        self.packed, self.length_window, self.verify = text == "packed", length_window, verify
        self.quarantine = None if quarantine is None else Path(quarantine)
        if self.quarantine is not None:
            self._write_down([])  # found out now, not at the first bad record
        self.replaced = 0
        handles = _handles(snapshot)
        self._latents = snapshot.reader("latent", limit=handles)
        self._text = snapshot.reader("text", limit=handles)
        self._fetcher: ShardPrefetch | None = None
        self._shards = snapshot.shards
        null = snapshot.null
        self._null = np.empty((null["rows"], snapshot.text_recipe.width), np.uint16)
        self._null_valid = int(null["valid"])
        shown = self._null_valid if null_mask == "bos" and caption_drop > 0 else 0
        self.planner = Planner(snapshot, seed=seed, phase=phase, length_window=length_window, least=shown)
        self._text.read(
            null["shard"],
            null["offset"],
            bytes.fromhex(null["key"]),
            bytes.fromhex(null["checksum"]),
            self._null,
            null.get("length"),
        )
        self.ring = BufferPool(self._largest(), pin=pin)

    def load(self, step: int, doing: Doing | None = None) -> Loaded:
        """Read this rank's microbatches of a step.

        Args:
            doing: told of each read before it is done.
        """
        if self._fetcher is not None:
            self._fetcher.reached(step)
        plan = self._part(step)
        replaced: list[Replaced] = []
        tried: dict[int, Iterator[Plan]] = {}
        while True:
            loaded, bad = self._read(plan, doing)
            if not bad:
                return Loaded(loaded.batches, loaded.size, replaced, len(tried))
            for i, error in bad.items():
                plan = self._replace(plan, i, error, tried, replaced)

    def __iter__(self) -> Iterator[tuple[list[Batch], State]]:
        step, recent = self.start_step, deque[list[Batch]]()
        ahead: BatchPrefetch[Loaded] | None = None
        if self.prefetch != 0:
            ahead = BatchPrefetch(
                self.load,
                step,
                self.stop_step,
                threads=self.threads,
                steps=self.prefetch,
                limit=self.prefetch_mib << 20,
                timeout_s=self.timeout_s,
                # Page-locked memory is taken in full, whatever of a buffer is used.
                size=lambda loaded: self.ring.size if self.ring.pin else loaded.size,
            )
            if self.snapshot.packed and self.snapshot.files.room is not None:
                self._fetcher = ShardPrefetch(
                    self.snapshot.files, self.snapshot.shard_files(), self._files_of, step, self.stop_step
                )
        try:
            while self.stop_step is None or step < self.stop_step:
                if len(recent) == 2:
                    recent.popleft()  # its copies to a GPU are done: the next batch but one is being asked for
                loaded = self.load(step) if ahead is None else ahead.get()
                self._note(loaded)
                if self.pin:
                    recent.append(loaded.batches)
                step += 1
                yield loaded.batches, State(self.snapshot.id, self.seed, self.phase, step, self.length_window)
        finally:
            if self._fetcher is not None:
                self._fetcher.close()
                self._fetcher = None
            if ahead is not None:
                ahead.close()

    def _part(self, step: int) -> Plan:
        """What this rank reads of a step."""
        whole = self.planner.step(step)
        if self.world == 1:
            return whole
        share = len(whole) // self.world
        return whole.part(slice(self.rank * share, (self.rank + 1) * share))

    def _files_of(self, step: int) -> list[str]:
        """The shards that this rank reads in a step."""
        plan, found = self._part(step), dict[str, None]()
        for kind, columns in (("latent", plan.samples), ("text", plan.texts)):
            for number in dict.fromkeys(columns["shard"].tolist()):
                found[Paths.shard(self.snapshot.folder(kind), self._shards[kind][number])] = None
        return list(found)

    def _largest(self) -> int:
        """Bytes of the largest part of a step that there can be."""
        recipe, text = self.snapshot.latent_recipe, self.snapshot.text_recipe
        rows = max(text.max_length, self._null_valid)
        largest = 0
        for bucket in self.snapshot.buckets:
            share = bucket.batch // self.world
            elements = recipe.channels * (bucket.height // recipe.compression) * (bucket.width // recipe.compression)
            sizes = (elements * 2, elements * 4, rows * text.width * 2, rows, 4)
            largest = max(largest, sum(room(share * size) for size in sizes))
        return largest

    def _read(self, plan: Plan, doing: Doing | None) -> tuple[Loaded, dict[int, RecordError]]:
        """Read a plan; also the samples with a record that stays wrong."""
        recipe, width = self.snapshot.latent_recipe, self.snapshot.text_recipe.width
        bucket, count = self.snapshot.buckets[plan.bucket], len(plan)
        channels, *grid = recipe.channels, bucket.height // recipe.compression, bucket.width // recipe.compression
        every = np.arange(count)
        ids, visits = plan.samples["sample_id"].tolist(), plan.visits.tolist()
        draws = randomness.draws(self.seed, self.phase, visits, ids)
        dropped = draws.drop < self.caption_drop
        rows = plan.texts["rows"].astype(np.int64)
        nulls = np.minimum(rows if self.null_mask == "caption" else self._null_valid, len(self._null))
        rows = np.minimum(np.where(dropped, nulls, rows), plan.length)
        bounds = np.zeros(count + 1, np.int64)
        np.cumsum(rows, out=bounds[1:])

        carver = Allocator(self.ring.take())
        latents = carver.cut((count * channels, *grid), np.uint16)
        noise = carver.cut((count, channels, *grid), np.float32)
        mask, logit = carver.cut((count, plan.length), bool), carver.cut((count,), np.float32)
        texts = carver.cut((int(bounds[-1]) if self.packed else count * plan.length, width), np.uint16)
        begin = bounds[:-1] if self.packed else every * plan.length
        end = begin + rows
        np.less(np.arange(plan.length), rows[:, None], out=mask)
        logit[:] = draws.logit

        bad: dict[int, RecordError] = {}
        for reader, kind, columns, which, into, first, last in (
            (self._latents, "latent", plan.samples, every, latents, every * channels, (every + 1) * channels),
            (self._text, "text", plan.texts, np.flatnonzero(~dropped), texts, begin, end),
        ):
            for i, error in reader.read_batch(
                self._shards[kind], columns, which, into, first, last, verify=self.verify, doing=_told(reader, doing)
            ):
                bad.setdefault(i, error)
        for i in np.flatnonzero(dropped).tolist():
            texts[begin[i] : end[i]] = self._null[: rows[i]]
        if not self.packed:
            for i in range(count):
                texts[end[i] : (i + 1) * plan.length] = 0
        if not bad:
            for i in range(count):
                randomness.noise(self.seed, self.phase, visits[i], ids[i], noise[i])

        latents = latents.reshape(count, channels, *grid)
        captions = texts if self.packed else texts.reshape(count, plan.length, width)
        batches = []
        for at in range(0, count, self.microbatch):
            part = slice(at, min(at + self.microbatch, count))
            ends = bounds[part.start : part.stop + 1]
            own = slice(*ends[[0, -1]].tolist()) if self.packed else part
            starts = torch.from_numpy((ends - ends[0]).astype(np.int32)) if self.packed else None
            batches.append(
                Batch(
                    bf16(latents[part]),
                    bf16(captions[own]),
                    torch.from_numpy(mask[part]),
                    torch.from_numpy(noise[part]),
                    torch.from_numpy(logit[part]),
                    tuple(ids[part]),
                    (bucket.height, bucket.width),
                    starts,
                )
            )
        size = sum(array.nbytes for array in (latents, captions, mask, noise, logit))
        return Loaded(batches, size, []), bad

    def _replace(
        self, plan: Plan, i: int, error: RecordError, tried: dict[int, Iterator[Plan]], replaced: list[Replaced]
    ) -> Plan:
        """The plan with another sample in i's place; notes what was bad.

        Raises:
            RecordError: there is no quarantine, or nothing to put in its place.
        """
        if self.quarantine is None:
            raise error
        if i not in tried:
            tried[i] = iter(self.planner.substitutes(plan, i))
        other = next(tried[i], None)
        if other is None:
            raise error
        gone, new = int(plan.samples["sample_id"][i]), int(other.samples["sample_id"][0])
        replaced.append(Replaced(error.shard, error.key.hex(), gone, plan.step, new, error.what))
        return plan.put(i, other)

    def _note(self, loaded: Loaded) -> None:
        """Count what was replaced in a step that is handed out, and write it down."""
        if not loaded.replaced or self.quarantine is None:
            return
        self.replaced += loaded.stand_ins
        lines = [
            json.dumps({**asdict(own), "sample": f"{own.sample:016x}", "by": f"{own.by:016x}"}) + "\n"
            for own in loaded.replaced
        ]
        self._write_down(lines)

    def _write_down(self, lines: list[str]) -> None:
        assert self.quarantine is not None
        try:
            with open(self.quarantine, "a", encoding="utf-8") as file:
                fcntl.lockf(file, fcntl.LOCK_EX)  # other ranks write to it, perhaps from other nodes
                file.write("".join(lines))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(
                f"{self.quarantine}: cannot be written: {error.strerror}", fix="--quarantine FILE where you may write"
            ) from None


def _handles(snapshot: Snapshot) -> int:
    """How many shards stay open. What is open keeps its room on the disk even when the mirror lets go of it, so over a
    mirror there are no more of them than fit into it a second time."""
    room, shards = snapshot.files.room, snapshot.shard_files()
    return 256 if room is None else max(4, min(256, room // (2 * max(shards.values()))))


def _told(reader: Reader, doing: Doing | None) -> Callable[[str, int, bytes], None] | None:
    if doing is None:
        return None
    return lambda *place: doing(lambda: f"reading {reader.where(*place)}")


def bf16(bits: np.ndarray) -> torch.Tensor:
    """A bf16 tensor over the same memory as an array of its bits (uint16)."""
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def unpack(captions: torch.Tensor, cu_seqlens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Packed captions (t, D) as padded ones (b, L, D), zeros past the mask, on their device and without waiting for it.

    Args:
        cu_seqlens: (b + 1,) int32.
        mask: (b, L) bool, as in `Batch`.
    """
    places = cu_seqlens[:-1, None] + torch.arange(mask.shape[1], device=mask.device, dtype=cu_seqlens.dtype)
    rows = captions[places.clamp(max=len(captions) - 1)]
    return rows.masked_fill_(~mask[..., None], 0)
