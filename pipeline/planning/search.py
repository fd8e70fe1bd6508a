"""Strategies for a machine, ranked by predicted speed.

What: `search` takes a configuration and varies what a user would otherwise try: the layout {FSDP2, HSDP, DDP, tensor
and pipeline parallelism and products}, checkpointing, optimizer, precision, compression, offload and the update in the
backward pass (if `train.optim.clip` is null); and the largest microbatch of each that fits. `AXES` names them.
Why not a trace for each: there are thousands. Memory is a sum. Lasting memory follows from counts of parameters
(`closed_form`). Activations of a block, and of the layers before and after the blocks, are traced once for each kind of
checkpointing, with two sizes of microbatch; they are linear in it. The best candidates are then traced whole, and
dropped if they do not fit after all.
What is not varied: the batch. Another optimizer, precision or compression changes the result, not only its rounding. So
each candidate shows it, `axes` can exclude it, and a candidate's speed counts 5 % less for each (`WEIGHT_OF_A_CHANGE`).
fp32 and fp16 are considered only if they are configured.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from pipeline.config import TrainConfig
from pipeline.errors import ConfigError, UserError
from pipeline.models.sana_config import SanaConfig
from pipeline.parallel.mesh import Layout, check_sizes
from pipeline.planning import predict as predicting
from pipeline.planning.cost import REPLICAS, Time
from pipeline.planning.predict import Data, Machine, Prediction
from pipeline.planning.trace import Shape, Traced
from pipeline.planning.tracker import BUFFERS, GRADIENTS, LASTING, UPDATE

_ACTIVATIONS: tuple[dict[str, Any], ...] = (
    {"activation_checkpointing": "none"},
    {"activation_checkpointing": "selective"},
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": "none", "activation_compression": "int8"},
)
_OPTIMIZERS: tuple[dict[str, Any], ...] = (
    {},
    {"name": "came", "betas": None, "eps": None},
    {"name": "adamw8bit", "betas": None, "eps": None},
)
_CHECKPOINTING: tuple[dict[str, Any], ...] = _ACTIVATIONS[:3]
_BF16 = "bf16", "bf16_pure"
AXES = frozenset(
    ("parallel", "microbatch", "activation_checkpointing", "compression", "optimizer", "in_backward", "precision")
)
"""What can be varied. parallel: layout, and offload of parameters. compression: of activations, or their offload."""
WEIGHT_OF_A_CHANGE = 0.95
_TRACED_AT = 4  # samples, beside one
_AUTO = ("parallel", "activation_checkpointing", "microbatch")
_SHOWN = 12


class NothingFitsError(UserError):
    """No configuration that was considered fits into the memory."""


@dataclass(frozen=True)
class Candidate:
    """A way to run the configuration on a machine.

    Attributes:
        total: bytes of the fullest GPU, with overheads. step: seconds. samples: of a step on all GPUs.
        prediction: the whole trace, for the best ones.
    """

    train: TrainConfig
    layout: Layout
    total: float
    step: float
    samples: int
    prediction: Prediction | None = None

    @property
    def images_per_s(self) -> float:
        return self.samples / self.step

    @property
    def changes(self) -> dict[str, Any]:
        """The options that the search decides."""
        train, parallel = self.train, self.train.parallel
        return {
            "train.parallel.dp_replicate": parallel.dp_replicate,
            "train.parallel.dp_shard": parallel.dp_shard,
            "train.parallel.tp_size": parallel.tp_size,
            "train.parallel.pp_size": parallel.pp_size,
            "train.parallel.offload": parallel.offload,
            "train.activation_checkpointing": train.activation_checkpointing,
            "train.activation_compression": train.activation_compression,
            "train.optim.name": train.optim.name,
            "train.optim.in_backward": train.optim.in_backward,
            "train.precision": train.precision,
            "train.microbatch": train.microbatch,
        }


def search(
    train: TrainConfig,
    shape: SanaConfig,
    data: Data,
    machine: Machine,
    *,
    axes: Collection[str] = AXES,
    bears: Callable[[str], bool] = lambda precision: True,
    verified: int = 2,
) -> list[Candidate]:
    """What fits, the fastest first (see `WEIGHT_OF_A_CHANGE`).

    Args:
        axes: what is varied; the rest stays as configured.
        bears: whether the weights work in a precision.
        verified: how many of the best are traced whole.

    Raises:
        NothingFitsError: it says what is missing in the best case.
    """
    train = with_placeholders(predicting.as_new_run(train))
    pieces = _Pieces(train, shape, data, machine)
    candidates, smallest = _candidates(pieces, axes, bears)
    best, rest, needed = trace_best(pieces, candidates, axes, verified)
    if not best and smallest == float("inf"):
        predicting.check(train, shape, data, machine.gpus)  # says what is wrong with the sizes
    if not best:
        raise _nothing_fits(machine, axes, min(needed, default=smallest))
    return [*best, *rest[: _SHOWN - len(best)]]


def _candidates(pieces: _Pieces, axes: Collection[str], bears: Callable[[str], bool]) -> tuple[list[Candidate], float]:
    """What fits by sums, with the largest microbatch each; and the bytes of the smallest that was considered."""
    train, machine = pieces.train, pieces.machine
    candidates, smallest = [], float("inf")
    for changed, layout in variants_of(train, pieces.shape, pieces.data, machine, axes, bears):
        try:
            base = TrainConfig.model_validate(changed)
        except ValidationError:
            continue  # a combination that `train` refuses
        for microbatch in pieces.microbatches(layout) if "microbatch" in axes else [train.microbatch]:
            candidate = pieces.candidate(base.model_copy(update={"microbatch": microbatch}), layout)
            if candidate is None:
                continue
            smallest = min(smallest, candidate.total)
            if candidate.total <= machine.memory:
                candidates.append(candidate)
                break  # larger microbatches come first
    return candidates, smallest


def trace_best(
    pieces: _Pieces, candidates: list[Candidate], axes: Collection[str], count: int
) -> tuple[list[Candidate], list[Candidate], list[float]]:
    """The best `count` that fit when traced whole, the candidates after them, and the bytes of those that do not fit.
    All are ranked."""
    train, data, machine = pieces.train, pieces.data, pieces.machine

    def rank(candidate: Candidate) -> tuple[float, float]:
        other = candidate.train
        changed = (other.optim.name != train.optim.name) + (other.precision != train.precision)
        changed += other.activation_compression != train.activation_compression
        return -round(candidate.images_per_s * WEIGHT_OF_A_CHANGE**changed, 3), candidate.total

    best: list[Candidate] = []
    rest, needed = sorted(candidates, key=rank), list[float]()
    tried = 0
    while rest and len(best) < count and (tried < 2 * count or not best):
        candidate, *rest = rest
        tried += 1
        prediction = predicting.predict(candidate.train, pieces.shape, data, machine, layout=candidate.layout)
        if prediction.fits:
            step = Time.of(prediction, data).step
            best.append(replace(candidate, prediction=prediction, total=prediction.total, step=step))
            continue
        needed.append(prediction.total)
        if "microbatch" in axes and (smaller := pieces.smaller(candidate, prediction.total)) is not None:
            rest = sorted([smaller, *rest], key=rank)
    return sorted(best, key=rank), rest, needed


def _nothing_fits(machine: Machine, axes: Collection[str], needed: float) -> NothingFitsError:
    on_gpu = machine.card.is_gpu
    frugal = ["more GPUs"] if on_gpu else []
    frugal += ["a smaller bucket.batch, then sana-pipe bucket"]
    frugal += ["--set train.parallel.offload=all"] if on_gpu and "parallel" not in axes else []
    frugal += [f"--set train.{name}=auto" for name in _AUTO if name not in axes]
    return NothingFitsError(
        f"nothing fits into {machine.gpus} x {machine.memory / 2**30:.1f} GiB",
        expected=f"at least {needed / 2**30:.1f} GiB each in the most frugal case that was considered",
        fix=", ".join(frugal),
    )


def layouts(gpus: int, shape: SanaConfig, per_node: int) -> Iterator[Layout]:
    """Every product of sizes that the model allows; tensor parallelism inside a node only."""
    for tp, pp in itertools.product((1, 2, 4, 5, 8), (1, 2, 4)):
        if gpus % (tp * pp) or tp > per_node or shape.num_layers < 2 * pp:
            continue
        if any(parts % tp for parts in shape.tensor_parallel_parts.values()):
            continue
        data = gpus // (tp * pp)
        for shards in {1, min(data, per_node), data}:
            if data % shards == 0:
                yield Layout(pp, data // shards, shards, tp)


def with_placeholders(train: TrainConfig) -> TrainConfig:
    """With plain values for what is `auto`."""
    values = {
        "parallel": train.parallel.model_copy(update={"sizes": "given"}),
        "microbatch": 1,
        "activation_checkpointing": "full",
        "compile": "none",
    }
    return train.model_copy(update={name: values[name] for name in train.undecided})


def variants_of(
    train: TrainConfig,
    shape: SanaConfig,
    data: Data,
    machine: Machine,
    axes: Collection[str],
    bears: Callable[[str], bool],
) -> Iterator[tuple[dict[str, Any], Layout]]:
    """Trees of the section `train` and layouts that `train` would accept, but for the microbatch."""
    whole, given = train.model_dump(), train.parallel.model_dump()
    activations: Sequence[dict[str, Any]] = [{}]
    if "activation_checkpointing" in axes:
        plain = {"activation_compression": "none"}
        activations = [{**plain, **change} for change in _ACTIVATIONS] if "compression" in axes else _CHECKPOINTING
    optimizers: Sequence[dict[str, Any]] = _OPTIMIZERS if "optimizer" in axes else _OPTIMIZERS[:1]
    precisions: list[str] = [train.precision]
    if "precision" in axes and train.precision != "fp16":
        precisions = [*dict.fromkeys((train.precision, *(name for name in _BF16 if bears(name))))]
    fused = (False, True) if "in_backward" in axes and train.optim.clip is None else (train.optim.in_backward,)
    varied = "parallel" in axes
    for layout in (
        layouts(machine.gpus, shape, machine.per_node) if varied else [check_sizes(train.parallel, machine.gpus)]
    ):
        if any(batch % layout.data_world for batch in data.buckets.values()):
            continue
        offloads = ("none", "all") if varied else (train.parallel.offload,)
        for activation, optimizer, precision, offload, in_backward in itertools.product(
            activations, optimizers, precisions, offloads, fused
        ):
            sizes = {
                "dp_replicate": layout.dp_replicate,
                "dp_shard": layout.dp_shard,
                "tp_size": layout.tp,
                "pp_size": layout.pp,
                "offload": offload,
            }
            optim = {**train.optim.model_dump(), **optimizer, "in_backward": in_backward}
            tree = {**whole, **activation, "precision": precision, "optim": optim, "parallel": {**given, **sizes}}
            yield tree, layout


class _Pieces:
    """Traces of one process without parallelism, from which candidates are added up."""

    def __init__(self, train: TrainConfig, shape: SanaConfig, data: Data, machine: Machine):
        self.train, self.shape, self.data, self.machine = train, shape, data, machine
        self._traced: dict[tuple[str, str, str], tuple[Traced, Traced]] = {}

    def microbatches(self, layout: Layout) -> list[int]:
        """Sizes of nearly equal microbatches, the largest first; in a pipeline divisors of every bucket's share."""
        shares = set(self.data.shares(layout.data_world).values())
        if layout.pp == 1:
            return sorted({-(-max(shares) // count) for count in range(1, max(shares) + 1)}, reverse=True)
        largest = min(shares) // (2 * layout.pp)
        return [m for m in range(max(1, largest), 0, -1) if all(s % m == 0 for s in shares)]

    def smaller(self, candidate: Candidate, needed: float) -> Candidate | None:
        """The candidate with a smaller microbatch that may fit, after its whole trace has needed so many bytes."""
        before = candidate.train.microbatch
        sizes = [size for size in self.microbatches(candidate.layout) if size < before]
        if not sizes:
            return None
        most = before * self.machine.memory / needed
        size = next((size for size in sizes if size <= most), sizes[-1])
        return self.candidate(candidate.train.model_copy(update={"microbatch": size}), candidate.layout)

    def candidate(self, train: TrainConfig, layout: Layout) -> Candidate | None:
        """The sum for a candidate; None if `train` would refuse it."""
        try:
            predicting.check(train, self.shape, self.data, self.machine.gpus)
        except ConfigError:
            return None
        microbatch = train.microbatch
        single, several = self._traces(train)
        bucket, share = self.data.worst(layout.data_world, microbatch)
        count = -(-share // microbatch)
        lasting = predicting.closed_form(self.shape, train, layout)
        brief = _line(_brief(single), _brief(several), microbatch) / layout.tp
        in_flight = min(count, layout.pp)
        brief = brief * in_flight / layout.pp if layout.pp > 1 else brief
        blocks = 2 if train.parallel.reshards(layout.dp_shard) else 1  # one is gathered ahead
        gathered = blocks * lasting[BUFFERS] + (4.0 * single.parameters / (layout.tp * layout.pp) if count > 1 else 0.0)
        gradients = lasting[GRADIENTS] if train.activation_checkpointing != "none" else 0.5 * lasting[GRADIENTS]
        peak = {kind: lasting[kind] for kind in LASTING} | {GRADIENTS: gradients, "activations": brief}
        total = sum(predicting.with_overheads({**peak, BUFFERS: gathered}, layout).values())
        step = self._seconds(train, layout, bucket, microbatch, count, single, several)
        return Candidate(train, layout, total, step, share * layout.data_world)

    def _traces(self, train: TrainConfig) -> tuple[Traced, Traced]:
        precision = "bf16" if train.precision == "bf16_pure" else train.precision  # activations are the same
        key = train.activation_checkpointing, train.activation_compression, precision
        if key not in self._traced:
            bucket, _ = self.data.worst(1, 1)
            height, width = (side // self.data.compression for side in bucket)
            optim = {**self.train.optim.model_dump(), "in_backward": False}
            alone = train.model_dump() | {"parallel": {}, "optim": optim, "precision": precision, "compile": "none"}
            plain = TrainConfig.model_validate(alone)
            shapes = [Shape(height, width, self.data.rows, samples) for samples in (1, _TRACED_AT)]
            on_gpu = self.machine.card.is_gpu
            single, several = (
                Traced.of(self.shape, plain, Layout(1, 1, 1, 1), s, rank=0, on_gpu=on_gpu) for s in shapes
            )
            self._traced[key] = single, several
        return self._traced[key]

    def _seconds(
        self,
        train: TrainConfig,
        layout: Layout,
        bucket: tuple[int, int],
        microbatch: int,
        count: int,
        single: Traced,
        several: Traced,
    ) -> float:
        """Of a step: kernels of the trace, divided over tp and pp; gathers and scatters of parameters; the bubble."""
        height, width = (side // self.data.compression for side in bucket)
        work = {
            name: type(w)(
                *(
                    round(_line(getattr(single.work[name], f), getattr(w, f), microbatch))
                    for f in ("flops", "bytes", "calls")
                )
            )
            for name, w in several.work.items()
            if name in single.work
        }
        for name, w in work.items():
            parts = layout.tp * layout.pp * (layout.dp_shard if name == UPDATE else 1)
            parts *= 2 if name == UPDATE and train.precision == "bf16_pure" else 1
            work[name] = type(w)(w.flops // parts, w.bytes // parts, w.calls // layout.pp)
        compute = 4 if train.precision == "fp32" else 2
        whole = single.parameters / (layout.tp * layout.pp)
        sent: dict[tuple[str, int], list[float]] = {}
        if layout.dp_shard > 1:
            gathers = 2 if train.parallel.reshards(layout.dp_shard) else 1
            sent["allgather", layout.dp_shard] = [gathers * compute * whole, 1]
            sent["reduce_scatter", layout.dp_shard] = [4 * whole, 1]
        if layout.dp_replicate > 1:
            sent[f"all_reduce {REPLICAS}", layout.dp_replicate] = [4 * whole / layout.dp_shard, 1]
        if layout.tp > 1:
            tokens = height * width * self.shape.inner_dim * compute * microbatch
            sent["all_reduce", layout.tp] = [8.0 * self.shape.num_layers / layout.pp * tokens, 1]
        if train.parallel.offload == "all":  # parameters to the GPU and gradients back, over PCIe
            sent["send", 2] = [(compute * 2 + 4) * whole / layout.dp_shard, 1]
        traced = replace(several, work=work, sent=sent)
        shape = Shape(height, width, self.data.rows, microbatch)
        prediction = Prediction(
            train, layout, self.shape, self.machine, {}, "", 0.0, bucket, shape, microbatch * count, 0, traced
        )
        return Time.of(prediction, self.data).step


def _brief(traced: Traced) -> float:
    """Short-lived bytes at the peak, without gradients and gathered parameters."""
    return sum(size for kind, size in traced.peak.items() if kind not in (*LASTING, GRADIENTS, BUFFERS))


def _line(at_one: float, at_some: float, microbatch: int) -> float:
    return at_one + (at_some - at_one) * (microbatch - 1) / (_TRACED_AT - 1)
