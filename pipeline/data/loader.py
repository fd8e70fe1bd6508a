"""Snapshots to batches: verified reads, the same global batch on every topology.

What: `Loader` yields, per optimizer step, this rank's microbatches and the state after them.
Why: records are read with preadv straight into the rows of the batch, verified there, by threads (no worker
processes, no shared memory, nothing left behind); an error in a thread reaches the training loop at that batch.
Price: the scalars of a global batch (which caption, how long) are worked out on every rank.

The state belongs to the batches that were handed out with it, so prefetching never runs ahead of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from pipeline.cache.shard import Reader
from pipeline.cache.snapshot import Caption, Sample, Snapshot
from pipeline.data import randomness
from pipeline.data.captions import choose
from pipeline.data.schedule import Schedule
from pipeline.errors import ConfigError


@dataclass(frozen=True)
class Batch:
    """One microbatch of one rank, on the CPU.

    Attributes:
        latents: (b, C, h, w) bf16, already multiplied by the recipe's scaling factor.
        captions: (b, L, D) bf16, zeros past the mask; caption drop already applied.
        mask: (b, L) bool, True where attention may look.
        noise: (b, C, h, w) fp32 standard normal, keyed by (seed, phase, visit, sample id).
        logit: (b,) fp32 standard normal, keyed alike; the objective makes times of it.
        sample_ids: which samples these are.
        bucket: (H, W) in pixels.
    """

    latents: torch.Tensor
    captions: torch.Tensor
    mask: torch.Tensor
    noise: torch.Tensor
    logit: torch.Tensor
    sample_ids: tuple[int, ...]
    bucket: tuple[int, int]


@dataclass(frozen=True)
class State:
    """Where a run stands: `step` optimizer steps of this order are done."""

    snapshot: str
    seed: int
    phase: int
    step: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> State:
        return cls(**values)


@dataclass(frozen=True)
class Member:
    """One sample of a global batch: its records, the caption chosen for this visit, and its draws."""

    sample: Sample
    visit: int
    caption: Caption
    draws: randomness.Draws


@dataclass(frozen=True)
class GlobalBatch:
    """One optimizer step before it is cut into ranks and microbatches. `length`: rows that text is padded to."""

    step: int
    epoch: int
    bucket: int
    length: int
    members: tuple[Member, ...]


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
        prefetch: steps read ahead by threads; 0 reads inline.
        threads: how many.
        start_step, stop_step: the first step, and the one before which to stop (None: never).

    Raises:
        ConfigError: `world` does not divide a global batch.
        IntegrityError: a shard is missing or cut short (at construction), or bytes are wrong (at their batch).
    """

    def __init__(
        self, snapshot: Snapshot, *, seed: int, phase: int, rank: int, world: int, microbatch: int,
        caption_drop: float, null_mask: str, prefetch: int, threads: int, start_step: int = 0,
        stop_step: int | None = None,
    ):  # fmt: skip
        batches = sorted({bucket.batch for bucket in snapshot.buckets})
        for batch in batches:
            if batch % world:
                fits = [w for w in range(1, batch + 1) if batch % w == 0]
                raise ConfigError(
                    f"a global batch of {batch} cannot be shared evenly by {world} data-parallel processes",
                    expected=f"a number of processes out of {fits}",
                    fix=f"launch that many, or set bucket.batch to a multiple of {world} and run sana-pipe bucket",
                )
        snapshot.check_shards()
        self.snapshot, self.seed, self.phase = snapshot, seed, phase
        self.rank, self.world, self.microbatch = rank, world, microbatch
        self.caption_drop, self.null_mask = caption_drop, null_mask
        self.prefetch, self.threads = prefetch, threads
        self.start_step, self.stop_step = start_step, stop_step
        self.schedule = Schedule.of(snapshot.head, seed=seed, phase=phase)
        self._multiple = int(snapshot.head["policies"]["pad_text_multiple"])
        self._latents = Reader(snapshot.files, snapshot.latent_recipe.name)
        self._text = Reader(snapshot.files, snapshot.text_recipe.name)
        null = snapshot.null
        self._null = np.empty((null["rows"], snapshot.text_recipe.width), np.uint16)
        self._null_valid = int(null["valid"])
        self._text.read(
            null["shard"],
            null["offset"],
            bytes.fromhex(null["key"]),
            bytes.fromhex(null["checksum"]),
            self._null,
            null.get("length"),
        )

    def global_batch(self, step: int) -> GlobalBatch:
        """The whole batch of a step, the same on every rank; reads no tensor bytes."""
        plan = self.schedule.step(step)
        members = []
        for position, visit in zip(plan.positions.tolist(), plan.visits.tolist(), strict=True):
            sample = self.snapshot.sample(self.snapshot.row(plan.bucket, position))
            drawn = randomness.draws(self.seed, self.phase, visit, sample.sample_id)
            at = choose([caption.weight for caption in sample.captions], drawn.caption)
            members.append(Member(sample, visit, sample.captions[at], drawn))
        longest = max(member.caption.rows for member in members)
        length = min(-(-longest // self._multiple) * self._multiple, self.snapshot.text_recipe.max_length)
        return GlobalBatch(step, plan.epoch, plan.bucket, length, tuple(members))

    def load(self, step: int) -> list[Batch]:
        """Read this rank's microbatches of a step."""
        whole = self.global_batch(step)
        share = len(whole.members) // self.world
        mine = whole.members[self.rank * share : (self.rank + 1) * share]
        return [self._batch(whole, mine[i : i + self.microbatch]) for i in range(0, share, self.microbatch)]

    def __iter__(self) -> Iterator[tuple[list[Batch], State]]:
        step = self.start_step
        if self.prefetch == 0:
            while self.stop_step is None or step < self.stop_step:
                yield self.load(step), self._state(step + 1)
                step += 1
            return
        pool = ThreadPoolExecutor(self.threads, thread_name_prefix="loader")
        ahead: deque[Future[list[Batch]]] = deque()
        planned = step
        try:
            while self.stop_step is None or step < self.stop_step:
                while len(ahead) <= self.prefetch and (self.stop_step is None or planned < self.stop_step):
                    ahead.append(pool.submit(self.load, planned))
                    planned += 1
                yield ahead.popleft().result(), self._state(step + 1)
                step += 1
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _state(self, step: int) -> State:
        return State(self.snapshot.id, self.seed, self.phase, step)

    def _batch(self, whole: GlobalBatch, members: tuple[Member, ...]) -> Batch:
        recipe, width = self.snapshot.latent_recipe, self.snapshot.text_recipe.width
        bucket = self.snapshot.buckets[whole.bucket]
        shape = (recipe.channels, bucket.height // recipe.compression, bucket.width // recipe.compression)
        latents = np.empty((len(members), *shape), np.uint16)
        captions = np.zeros((len(members), whole.length, width), np.uint16)
        mask = np.zeros((len(members), whole.length), bool)
        noise = np.empty((len(members), *shape), np.float32)
        for i, member in enumerate(members):
            sample, caption = member.sample, member.caption
            self._latents.read(sample.shard, sample.offset, sample.key, sample.checksum, latents[i], sample.length)
            randomness.noise(self.seed, self.phase, member.visit, sample.sample_id, noise[i])
            rows = caption.rows
            if member.draws.drop < self.caption_drop:
                rows = min(rows if self.null_mask == "caption" else self._null_valid, len(self._null))
                captions[i, :rows] = self._null[:rows]
            else:
                self._text.read(
                    caption.shard, caption.offset, caption.key, caption.checksum, captions[i, :rows], caption.length
                )
            mask[i, :rows] = True
        return Batch(
            bf16(latents), bf16(captions), torch.from_numpy(mask), torch.from_numpy(noise),
            torch.tensor([member.draws.logit for member in members], dtype=torch.float32),
            tuple(member.sample.sample_id for member in members), (bucket.height, bucket.width),
        )  # fmt: skip


def bf16(bits: np.ndarray) -> torch.Tensor:
    """A bf16 tensor over the same memory as an array of its bits (uint16)."""
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
