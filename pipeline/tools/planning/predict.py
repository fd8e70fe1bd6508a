"""Predict what a run needs of each GPU.

`predict` traces the configuration's worst bucket on one process and adds what no trace sees; `Prediction` says whether
it fits and by how much. Not in a trace, and so estimates: the CUDA context and libraries' workspaces, NCCL's buffers,
and the allocator's rounding. `CONTEXT`, `NCCL` and `FRAGMENTATION` state them. `fragmentation` is the rounding and what
the allocator's pools of FSDP2's streams hold beyond the peak, which is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from sana_pipe.base.errors import ConfigError
from sana_pipe.base.gpus import GIB, Card
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.images import buckets
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.signals.text import TextEncoding
from sana_pipe.data.snapshots.config import BucketConfig
from sana_pipe.data.sources.config import DataConfig
from sana_pipe.tools.planning.recorder import KINDS, LASTING
from sana_pipe.tools.planning.trace import Shape, Traced
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.adapters import adapter_of
from sana_pipe.train.models.config import ModelConfig, StartWeights
from sana_pipe.train.models.spec import ModelSpec, spec_from_arch, spec_of
from sana_pipe.train.parallel.mesh import Layout, check_sizes
from sana_pipe.train.training.build import architecture_of_weights
from sana_pipe.train.training.checks import check_layout
from sana_pipe.train.training.optimizer_records import OPTIMIZERS

CONTEXT, NCCL, FRAGMENTATION = 0.8 * GIB, 0.4 * GIB, 0.04
"""Bytes of the CUDA context with cuBLAS and cuDNN (on a CPU: of the interpreter with its libraries), of NCCL's buffers,
and the share of short-lived memory that the allocator loses by rounding; estimates."""
COMPRESSION, CHANNELS, TEXT_WIDTH = 32, 32, 2304
"""The shapes of Sana's VAE and text encoder, where neither a snapshot nor the model says."""
_ZIMAGE = "Tongyi-MAI/Z-Image"
_RELEASED: dict[str, dict[str, Any]] = {
    "Sana_600M": {
        "num_layers": 28,
        "num_attention_heads": 36,
        "num_cross_attention_heads": 16,
        "cross_attention_head_dim": 72,
        "cross_attention_dim": 1152,
    },
    "Sana_1600M": {},
    "SANA1.5_1.6B": {"qk_norm": "rms_norm_across_heads"},
    "SANA1.5_4.8B": {"qk_norm": "rms_norm_across_heads", "num_layers": 60},
}
_PRX_DC_AE = {"_class_name": "PRXTransformer2DModel", "in_channels": 32, "patch_size": 1}
"""`Photoroom/prx-512-t2i-dc-ae` and what was trained on from it."""


@dataclass(frozen=True)
class Data:
    """The data of a step.

    Attributes:
        buckets: (height, width) in pixels -> global batch.
        samples: of an epoch; None if there is no snapshot.
        rows: text rows of the longest padded caption.
        compression, channels: pixels per side of a latent, and its channels. text_width: values of a text row.
    """

    buckets: Mapping[tuple[int, int], int]
    samples: int | None
    rows: int
    compression: int = COMPRESSION
    channels: int = CHANNELS
    text_width: int = TEXT_WIDTH

    @classmethod
    def of(cls, snapshot: Snapshot) -> Data:
        """The data of a snapshot."""
        latent, text = snapshot.encoding(LatentEncoding), snapshot.encoding(TextEncoding)
        batches = {(b.height, b.width): b.batch for b in snapshot.buckets}
        return cls(batches, len(snapshot), text.max_length, latent.compression, latent.channels, text.width)

    @classmethod
    def configured(
        cls, model: ModelConfig, data: DataConfig, bucket: BucketConfig, rows: int, compression: int | None = None
    ) -> Data:
        """The data that options describe, before there is a snapshot. rows: of the longest caption. compression: of the
        VAE; None: not known, so Sana's for a model of as many channels as Sana has, else 8."""
        arch = model.arch or {}
        channels, width = arch.get("in_channels", CHANNELS), arch.get("caption_channels", TEXT_WIDTH)
        if model.weights is not None:
            shape = _shape_of(model.weights)
            channels, width = shape.in_channels, shape.caption_channels
        compression = compression or (COMPRESSION if channels == CHANNELS else 8)
        shapes = [s for _, table in buckets.resolutions(bucket, data, compression) for s in table]
        sizes = dict(zip(shapes, buckets.batches(bucket, shapes, compression), strict=True))
        return cls(sizes, None, rows, compression, channels, width)

    def shares(self, data_world: int) -> dict[tuple[int, int], int]:
        """Samples of a step for one data-parallel process, by bucket."""
        return {bucket: max(1, -(-batch // data_world)) for bucket, batch in self.buckets.items()}

    def worst(self, data_world: int, microbatch: int) -> tuple[tuple[int, int], int]:
        """The bucket whose forward pass has the most tokens, and its share."""
        shares = self.shares(data_world)
        bucket = max(shares, key=lambda b: (min(microbatch, shares[b]) * b[0] * b[1], shares[b]))
        return bucket, shares[bucket]


@dataclass(frozen=True)
class Machine:
    """gpus: of all nodes together. memory: bytes of each GPU. network_gbs: 10^9 bytes/s of a node to the others.
    assumed: the card's speed is a guess."""

    card: Card
    memory: int
    gpus: int
    nodes: int = 1
    network_gbs: float = 50.0
    assumed: bool = False

    @property
    def per_node(self) -> int:
        return self.gpus // self.nodes


PER_NODE = 8
"""GPUs of a node, where nothing says otherwise."""


def least_nodes(gpus: int) -> int:
    """The fewest equal nodes with at most `PER_NODE` GPUs each."""
    return next(nodes for nodes in range(-(-gpus // PER_NODE), gpus + 1) if gpus % nodes == 0)


@dataclass(frozen=True)
class Prediction:
    """Memory of the fullest GPU.

    Attributes:
        kinds: bytes by kind at the peak, with `context` and `fragmentation`, which are estimates.
        phase: of the step in which the peak is.
        host: bytes in this process's host memory that are not on the GPU.
        bucket: the worst one. shape: what a process computes for it. rank: the process.
    """

    train: TrainConfig
    layout: Layout
    architecture: ModelSpec
    machine: Machine
    kinds: dict[str, float]
    phase: str
    host: float
    bucket: tuple[int, int]
    shape: Shape
    share: int
    rank: int
    traced: Traced

    @property
    def total(self) -> float:
        """Bytes."""
        return sum(self.kinds.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.machine.memory

    @property
    def margin(self) -> float:
        """Bytes that stay free; negative: that are missing."""
        return self.machine.memory - self.total

    def as_dict(self) -> dict[str, Any]:
        """JSON values; sizes in bytes."""
        return {
            "layout": asdict(self.layout),
            "bucket": list(self.bucket),
            "microbatch": self.shape.microbatch,
            "microbatches": self.share / self.shape.microbatch,
            "kinds": {kind: round(size) for kind, size in self.kinds.items()},
            "total": round(self.total),
            "memory": self.machine.memory,
            "fits": self.fits,
            "margin": round(self.margin),
            "peak_in": self.phase,
            "host": round(self.host),
            "rank": self.rank,
        }


def architecture(model: ModelConfig, resolution: int, data: Data) -> ModelSpec:
    """The model's shape: from `model.arch`, from the name of a released model (without network), or from the weights.

    Args:
        resolution: `data.resolution`.

    Raises:
        UserError: weights that cannot be read.
    """
    weights, side = model.weights, resolution // data.compression
    if weights is None:
        assert model.arch is not None
        return spec_from_arch(model.arch, side)
    shape = _released(weights)
    return architecture_of_weights(weights) if shape is None else shape.with_sample_size(side)


def _shape_of(weights: StartWeights) -> ModelSpec:
    return _released(weights) or architecture_of_weights(weights)


def _released(weights: StartWeights) -> ModelSpec | None:
    """The shape of a released model, by its name."""
    if weights.id == _ZIMAGE:
        return spec_of({"_class_name": "ZImageTransformer2DModel"})
    if weights.id.startswith("Photoroom/prx-") and "-dc-ae" in weights.id:
        return spec_of(_PRX_DC_AE)
    if weights.id.startswith("Efficient-Large-Model/"):
        return next((spec_of(fields) for name, fields in _RELEASED.items() if name in weights.id), None)
    return None


def check(train: TrainConfig, shape: ModelSpec, data: Data, gpus: int) -> Layout:
    """The layout of a launch, or the refusal that `train` would give.

    Raises:
        ConfigError: with the values that would work.
    """
    layout = check_sizes(train.parallel, gpus)
    uneven = {f"{h}x{w}": batch for (h, w), batch in data.buckets.items() if batch % layout.data_world}
    if uneven:
        name, batch = next(iter(uneven.items()))
        divisors = [str(n) for n in range(1, batch + 1) if batch % n == 0]
        raise ConfigError(
            f"bucket {name}: a global batch of {batch} cannot be divided into {layout.data_world} equal parts",
            expected=f"bucket.batch a multiple of {layout.data_world}, such as "
            f"{-(-batch // layout.data_world) * layout.data_world}",
            fix="other numbers of GPUs that work: " + ", ".join(divisors[:12]),
        )
    check_layout(train, lambda: shape, {f"{h}x{w}": batch for (h, w), batch in data.buckets.items()}, layout)
    return layout


def check_precision(precision: str, supports: Callable[[str], bool], machine: Machine) -> None:
    """Refuse a precision without units on the card: torch emulates it at a speed that is not predicted.

    Args:
        supports: whether the weights work in a precision.

    Raises:
        ConfigError: with a precision in which card and weights work.
    """
    card = machine.card
    if card.supports(precision):
        return
    works = next(each for each in ("fp16", "fp32") if each == "fp32" or supports(each))
    raise ConfigError(
        f"train.precision: {precision} on --gpu {card.name}, which has no bf16 (compute capability below 8.0)",
        expected="fp32, fp16 where the weights work in it, or a card of compute capability 8.0 or newer",
        fix=f"--set train.precision={works}",
    )


def uncompiled(train: TrainConfig) -> TrainConfig:
    """Without the compiler: what compiled blocks save is not predicted; it is about as much, or less."""
    return train.model_copy(update={"compile": "none"})


def predict(
    train: TrainConfig, shape: ModelSpec, data: Data, machine: Machine, *, layout: Layout | None = None
) -> Prediction:
    """The peak of the fullest GPU in the worst bucket.

    Raises:
        ConfigError: sizes that do not fit, a technique that is not covered.
    """
    layout = layout or check(train, shape, data, machine.gpus)
    train = uncompiled(train)
    bucket, share = data.worst(layout.data_world, train.microbatch)
    microbatch = min(train.microbatch, share)
    count = -(-share // microbatch)
    height, width = (side // data.compression for side in bucket)
    traced_count = min(count, 2) if layout.pp == 1 else min(count, 2 * layout.pp)
    work = Shape(height, width, data.rows, microbatch, traced_count)
    # A first stage has the most microbatches, a last stage the model's end.
    ranks = [0] if layout.pp == 1 else [0, layout.world - 1]
    on_gpu = machine.card.is_gpu
    traces = {rank: Traced.of(shape, train, layout, work, rank=rank, on_gpu=on_gpu) for rank in ranks}
    rank, traced = max(traces.items(), key=lambda item: item[1].total)
    return Prediction(
        train,
        layout,
        shape,
        machine,
        with_overheads(traced.peak, layout, traced.apart),
        traced.phase,
        traced.host,
        bucket,
        work,
        share,
        rank,
        traced,
    )


def with_overheads(peak: Mapping[str, float], layout: Layout, apart: float = 0.0) -> dict[str, float]:
    """The traced peak, and what no trace sees. apart: of the pools of other streams (`Traced`)."""
    brief = sum(size for kind, size in peak.items() if kind not in LASTING)
    context = CONTEXT + (NCCL if layout.world > 1 else 0.0)
    return {
        **{kind: peak.get(kind, 0.0) for kind in KINDS},
        "context": context,
        "fragmentation": apart + FRAGMENTATION * brief,
    }


def checkpoint_bytes(shape: ModelSpec, train: TrainConfig) -> float:
    """Bytes of a checkpoint: moments, averages and all parameters that are trained, wherever they lie."""
    pure, optimizer = train.precision == "bf16_pure", OPTIMIZERS[train.optim.name]
    state = optimizer.pure_state_bytes if pure else optimizer.state_bytes
    each = (2.0 if pure else 4.0) + state + (0.0 if train.ema is None else 4.0)
    return each * _trained_parameters(shape, train.model_dump_json(include={"adapter", "only", "controlnet"}))


@cache
def _trained_parameters(shape: ModelSpec, part: str) -> int:
    """part: the options that say which parameters are trained, as JSON."""
    module, adapter = shape.module(), adapter_of(TrainConfig.model_validate_json(part), shape, start=False)
    if adapter is not None:
        adapter.apply(module)
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
