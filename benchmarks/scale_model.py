"""Large runs before they start: storage, requests, hours, checkpoints and traffic for any number of pairs and GPUs.

What: `cache_of` gives the bytes and objects of a cache and what encoding costs, `training` the speed, traffic and
checkpoints of a launch, `reading` what its nodes ask of the object store, by `benchmarks.reading_simulator`.
Bytes, times and shards are computed elsewhere: bytes and encoding hours by `encoding.estimate` on a few
thousand typical items, training hours by `planning.cost`.
Price: every figure inherits the assumptions of those, and the constants below.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.reading_simulator import (
    CAPTION_BYTES,
    REQUESTS,
    Imagined,
    ImaginedSnapshot,
    MirrorModel,
    NodeCounts,
    Store,
    caption_rows,
    nodes,
    simulate,
)
from sana_pipe.base.gpus import card
from sana_pipe.config import Config, load
from sana_pipe.data.cache import codec
from sana_pipe.data.cache.snapshot_samples import CHUNK_ROWS
from sana_pipe.data.encoders.text_kind import max_length
from sana_pipe.data.encoding import estimate, plan
from sana_pipe.data.loader.loader import LoaderSettings
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.signals.text import TextEncoding
from sana_pipe.tools.planning.cost import LINK, REACHED, Time
from sana_pipe.tools.planning.predict import Data, Machine, Prediction, architecture, checkpoint_bytes, predict
from sana_pipe.tools.planning.recorder import MATMUL
from sana_pipe.train.parallel.mesh import Layout
from sana_pipe.train.training.inputs import PREFETCH_MIB, THREADS

CONFIGURATION = "sana_1600m_1024"
CARD = "h100"
PER_NODE = 8
"""GPUs of a node. Assumption."""
BATCH_PER_GPU, SMALLEST_BATCH = 8, 64
"""Samples of a step for each GPU, and of the smallest global batch (the shipped batch). Assumption."""
NETWORK_GBS = 50.0
"""10^9 bytes/s of a node to the other nodes (400 Gbit/s). Assumption."""
MIRROR_GIB = 1024
"""`mirror.gib`: local disk of a node. Assumption."""
VAE_FLOPS = 5.1796e12
"""Operations to encode a picture of 1024 x 1024 with DC-AE f32c32. Counted by torch on the module of diffusers
(`tests/data/test_scale.py`)."""
TEXT_FLOPS = 4.066e9
"""Operations of Gemma-2-2b per position, at 80 positions. Counted as above."""
INSTRUCTION, POSITIONS = 234, 300
"""Positions of Sana's instruction and of a padded caption, which `text.mode: exact` computes for every caption.
Assumption: the instruction's length depends on the tokenizer."""
DECODE_S = 0.05
"""Seconds of a core to decode and resize a picture of 12 megapixels. Measured by `benchmarks.decode`."""
UNIT_REQUESTS = 5
"""Requests to the store for a unit: a look whether it is committed, its shard, record table, commit and the commit's
copy. Counted (`benchmarks.s3_listing`). Claims, plans and scans come on top."""
CHUNK_BYTES = 28e6
"""Of a chunk of a snapshot's index (2^18 rows). Measured: the file's size; `benchmarks.snapshot_scale` prints what a
resumed run reads of it."""
LINK_GBS, NODE_DISK_GBS, SHARED_DISK_GBS = 25.0, 2.0, 20.0
"""10^9 bytes/s: from a GPU to its host, from a node to the shared file system, of that file system. Assumptions."""
SCRATCH_BYTES, SCAN_CPU_S = 890.0, 12e-6
"""Temporary files and CPU seconds of `encode` with nothing to do, per item of each process. Measured on the synthetic
tars of `benchmarks.encode_scale`: files without a name, 10^6 items; CPU seconds, 10^7 items."""
SAMPLE = 1024
"""Typical items of each bucket from which bytes per pair follow."""


def configured(gpus: int, **changes: Any) -> Config:
    """The shipped configuration with the batch of a launch."""
    batch = max(SMALLEST_BATCH, BATCH_PER_GPU * gpus)
    fixed = {"train.microbatch": 8, "train.activation_checkpointing": "full", "bucket.batch": batch, **changes}
    return load(CONFIGURATION, [f"{name}={value}" for name, value in fixed.items()])


# ---------------------------------------------------------------- the cache


@dataclass(frozen=True)
class CacheFigures:
    """Of the latents and texts of so many pairs.

    Attributes:
        latents, text, index: bytes. shards, documents: objects (each document and its copy, until units are merged).
        snapshot: bytes of a snapshot's index. requests: of encoding.
        hours: GPU-hours of encoding, latents and text; exact_hours: with `text.mode: exact`.
    """

    pairs: int
    latents: float
    text: float
    index: float
    shards: float
    documents: float
    snapshot: float
    requests: float
    hours: float
    exact_hours: float

    @property
    def total(self) -> float:
        """Bytes."""
        return self.latents + self.text + self.index


def data_of(config: Config) -> Data:
    return Data.configured(config.model, config.data, config.bucket, max_length(config.text))


def cache_of(pairs: int, storage: str = codec.PLAIN) -> CacheFigures:
    """The cache of `pairs` pictures at 1024 px, each with one caption, equally many in each bucket."""
    config = configured(8)
    latent, text = (
        LatentEncoding(weights="scale", storage=storage),
        TextEncoding(weights="scale", storage=storage),
    )
    shapes = list(data_of(config).buckets)
    rows = [int(n) for n in caption_rows()]
    captions = [(str(rows[i * 1031 % len(rows)]), CAPTION_BYTES) for i in range(SAMPLE * len(shapes))]
    work = estimate.Wanted(
        items=len(captions),
        pictures={latent: estimate.Pictures(Counter(dict.fromkeys(shapes, SAMPLE)))},
        captions=len(captions),
        caption_bytes=len(captions) * CAPTION_BYTES,
        sample=captions[:: math.ceil(len(captions) / estimate.SAMPLE)],
        null=False,
    )
    size = estimate.sizes(work, text, lambda texts: [int(text) for text in texts])
    scale = pairs / work.images
    units = [plan.unit_images(latent, shape) for shape in shapes]
    made = scale * (sum(SAMPLE / unit for unit in units) + len(captions) / plan.UNIT_CAPTIONS)
    hours = [_encode_hours(latent, work, size, config, positions) for positions in (None, INSTRUCTION + POSITIONS - 2)]
    return CacheFigures(
        pairs,
        size.records[latent.noun] * scale,
        size.records[text.noun] * scale,
        size.index * scale,
        made,
        2 * made,
        math.ceil(pairs / CHUNK_ROWS) * CHUNK_BYTES,
        UNIT_REQUESTS * made,
        hours[0] * scale,
        hours[1] * scale,
    )


def _speed(latent: LatentEncoding, config: Config) -> estimate.Speed:
    """Of the encoders on one GPU, from operations and the card's peak."""
    chosen, reached = card(CARD), REACHED[MATMUL]
    peak = chosen.fp32_tflops if config.vae.dtype == "fp32" else chosen.bf16_tflops
    image_s = VAE_FLOPS / (peak * 1e12 * reached)
    token_s = TEXT_FLOPS / (chosen.bf16_tflops * 1e12 * reached)
    return estimate.Speed({latent: image_s / 1024**2}, DECODE_S, token_s, 0.0, 1, 1, CARD)


def _encode_hours(
    latent: LatentEncoding, work: estimate.Wanted, size: estimate.Sizes, config: Config, positions: int | None
) -> float:
    """GPU-hours. positions: that the text encoder computes for each caption; None: its rows."""
    tokens = size.tokens if positions is None else positions * work.captions
    size, workers = replace(size, tokens=tokens), config.encode.workers
    hours = estimate.times(work, size, _speed(latent, config), workers, 1)["device_hours"]
    assert hours is not None
    return float(hours)


# ---------------------------------------------------------------- training


@dataclass(frozen=True)
class Training:
    """A launch of the shipped configuration.

    Attributes:
        sent: bytes that a node sends to other nodes in a step.
        checkpoint: bytes. copy: bytes of it in each process's host memory. blocked, written: seconds for which training
            stops, and until the checkpoint is published (it is written and read back).
    """

    prediction: Prediction
    time: Time
    sent: float
    checkpoint: float
    copy: float
    blocked: float
    written: float

    @property
    def gpus(self) -> int:
        return self.time.gpus

    def hours(self, pairs: int) -> float:
        """Of an epoch."""
        return pairs / self.time.images_per_s / 3600


def layouts(gpus: int) -> list[Layout]:
    """One FSDP2 group over all GPUs, and on several nodes one for each node (HSDP)."""
    groups = [Layout(1, 1, gpus, 1)]
    return groups if gpus <= PER_NODE else [*groups, Layout(1, gpus // PER_NODE, PER_NODE, 1)]


def training(gpus: int, layout: Layout) -> Training:
    """Speed, traffic and checkpoints by `sana-pipe plan`'s prediction."""
    count = max(1, gpus // PER_NODE)
    config = configured(
        gpus, **{"train.parallel.dp_replicate": layout.dp_replicate, "train.parallel.dp_shard": layout.dp_shard}
    )
    data, chosen = data_of(config), card(CARD)
    machine = Machine(chosen, chosen.memory, gpus, count, NETWORK_GBS)
    shape = architecture(config.model, config.data.resolution, data)
    prediction = predict(config.train, shape, data, machine)
    time = Time.of(prediction, data)
    inside = Time.of(replace(prediction, machine=replace(machine, network_gbs=math.inf)), data)
    between_s = sum(s for name, s in time.traffic.items() if s > inside.traffic[name])  # at the network's rate
    checkpoint = checkpoint_bytes(shape, config.train)
    rate = min(SHARED_DISK_GBS, count * NODE_DISK_GBS) * 1e9
    copy = checkpoint / layout.dp_shard
    return Training(
        prediction,
        time,
        between_s * NETWORK_GBS * 1e9 * LINK,
        checkpoint,
        copy,
        copy / (LINK_GBS * 1e9),
        2 * checkpoint / rate,
    )


# ---------------------------------------------------------------- reading


@dataclass(frozen=True)
class Reading:
    """What training asks of the object store.

    Attributes:
        counts: of the simulated nodes together, per node and step by `each`.
        nodes, simulated: of the run, and how many of them were simulated.
        steps: of an epoch.
        shards: of the snapshot.
    """

    pairs: int
    gpus: int
    packed: bool
    counts: NodeCounts
    nodes: int
    simulated: int
    steps: float
    shards: int

    def each(self, name: str) -> float:
        """A count per node and step."""
        return getattr(self.counts, name) / self.counts.steps

    def epoch(self, name: str) -> float:
        """A count of all nodes in an epoch."""
        return self.each(name) * self.nodes * self.steps

    @property
    def amplification(self) -> float:
        """Bytes fetched for each byte that is read."""
        return self.counts.needed_bytes / self.counts.read

    @property
    def requests(self) -> float:
        """Per node and step."""
        return REQUESTS * self.each("needed")


FIRST = 1000
"""The step at which simulated runs begin: of the first epoch, after its largest batches."""


def imagined(pairs: int, gpus: int, mib: int | None, window: int) -> Imagined:
    """A snapshot of so many pairs in the buckets and batches of a launch. mib: of packed shards; None: not packed."""
    batches = dict(data_of(configured(gpus)).buckets)
    latent, text = LatentEncoding(weights="scale"), TextEncoding(weights="scale")
    content = Imagined(pairs, batches, latent, text, window=window)
    return content if mib is None else content.packed(mib)


def reading(
    pairs: int,
    gpus: int,
    step_s: float,
    *,
    mib: int | None = 64,
    window: int = 4,
    steps: int = 200,
    skip: int = 100,
    sample: int = 1,
    store: Store | None = None,
) -> Reading:
    """Simulate some nodes of a launch over a snapshot of `pairs` pairs.

    Args:
        step_s: seconds of an optimizer step.
        mib: of packed shards; None: a snapshot that is not packed.
        steps, skip: counted steps, and steps before them. sample: nodes that are simulated.
    """
    content, train = imagined(pairs, gpus, mib, window), configured(gpus).train
    settings = LoaderSettings(
        seed=0,
        phase=0,
        rank=0,
        world=gpus,
        microbatch=train.microbatch,
        caption_drop=train.caption_drop,
        text=train.text or "padded",
        prefetch=None,
        threads=THREADS,
        prefetch_mib=PREFETCH_MIB,
        start_step=FIRST,
    )
    total, simulated = NodeCounts(), 0
    for ranks in nodes(gpus, PER_NODE, sample):
        snapshot = ImaginedSnapshot(content, MirrorModel(MIRROR_GIB << 30, store))
        total += simulate(snapshot, settings, ranks, steps, step_s=step_s, skip=skip)
        simulated += 1
    return Reading(
        pairs,
        gpus,
        mib is not None,
        total,
        max(1, gpus // PER_NODE),
        simulated,
        pairs / next(iter(content.batches.values())),
        snapshot.shard_count,
    )
