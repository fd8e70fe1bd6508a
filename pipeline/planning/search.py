"""Strategies for a machine, ranked by predicted speed.

What: `search` takes a configuration and varies what a user would otherwise try: the layout {FSDP2, HSDP, DDP, tensor
and pipeline parallelism and products}, checkpointing, optimizer, compression, offload and the update in the backward
pass (if `train.optim.clip` is null); and the largest microbatch of each that fits.
Why not a trace for each: there are thousands. Memory is a sum: what lasts follows from counts of parameters
(`closed_form`), and what a block and the ends need is traced once for each way of treating activations, at two
microbatches, and is linear in the microbatch. The best candidates are then traced whole, and dropped if they do not fit
after all.
What is not varied: numbers that change the result of training beyond rounding, such as the batch and the precision.
Another optimizer changes it, too: every candidate names it, and `optimizers=False` leaves the configured one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from pipeline.config import TrainConfig
from pipeline.errors import ConfigError, UserError
from pipeline.models.sana_config import SanaConfig
from pipeline.parallel.mesh import Layout
from pipeline.planning import predict as predicting
from pipeline.planning.cost import Constants, Time
from pipeline.planning.predict import Data, Machine, Prediction
from pipeline.planning.trace import Shape, Traced
from pipeline.planning.tracker import BUFFERS, GRADIENTS, LASTING

_ACTIVATIONS: tuple[dict[str, Any], ...] = (
    {"activation_checkpointing": "none"},
    {"activation_checkpointing": "selective"},
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": "none", "activation_compression": "int8"},
    {"activation_checkpointing": "full", "activation_offload": True},
)
_OPTIMIZERS: tuple[dict[str, Any], ...] = (
    {},
    {"name": "came", "betas": None, "eps": None},
    {"name": "adamw8bit", "betas": None, "eps": None},
)
_TRACED_AT = 4  # samples, beside one
_SHOWN = 12


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
            "train.activation_offload": train.activation_offload,
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
    optimizers: bool = True,
    constants: Constants | None = None,
    verified: int = 2,
) -> list[Candidate]:
    """What fits, the fastest first.

    Args:
        optimizers: also consider optimizers with smaller states.
        verified: how many of the best are traced whole.

    Raises:
        UserError: nothing fits; says what is missing in the best case.
    """
    train = train if train.residual is not None else train.model_copy(update={"residual": "fp32"})
    pieces = _Pieces(train, shape, data, constants or Constants(), machine)
    candidates, smallest = [], float("inf")
    for changed, layout in _variants(train, shape, data, machine, optimizers):
        try:
            base = TrainConfig.model_validate({**changed, "microbatch": 1})
        except ValidationError:
            continue  # a combination that `train` refuses
        for microbatch in pieces.microbatches(layout):
            candidate = pieces.candidate(base.model_copy(update={"microbatch": microbatch}), layout)
            if candidate is None:
                continue
            smallest = min(smallest, candidate.total)
            if candidate.total <= machine.memory:
                candidates.append(candidate)
                break  # larger microbatches come first
    candidates.sort(key=lambda c: (-round(c.images_per_s, 3), c.total))
    best: list[Candidate] = []
    rest = candidates
    tried = 0
    while rest and len(best) < verified and (tried < 2 * verified or not best):
        candidate, *rest = rest
        tried += 1
        prediction = predicting.predict(candidate.train, shape, data, machine, layout=candidate.layout)
        if prediction.fits:
            step = Time.of(prediction, data, constants).step
            best.append(replace(candidate, prediction=prediction, total=prediction.total, step=step))
    best.sort(key=lambda c: -c.images_per_s)
    if not best:
        raise UserError(
            f"nothing fits into {machine.gpus} x {machine.memory / 2**30:.1f} GiB",
            expected=f"at least {smallest / 2**30:.1f} GiB a GPU in the most frugal case that was considered",
            fix="more GPUs, a smaller bucket.batch, or train.parallel.offload=all",
        )
    return [*best, *rest[: _SHOWN - len(best)]]


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


def _variants(
    train: TrainConfig, shape: SanaConfig, data: Data, machine: Machine, optimizers: bool
) -> Iterator[tuple[dict[str, Any], Layout]]:
    """Trees of the section `train` and layouts that `train` would accept, but for the microbatch."""
    choices = _OPTIMIZERS if optimizers else _OPTIMIZERS[:1]
    for layout in layouts(machine.gpus, shape, machine.per_node):
        if any(batch % layout.data_world for batch in data.buckets.values()):
            continue
        for activation, optimizer, offload in itertools.product(_ACTIVATIONS, choices, ("none", "all")):
            for in_backward in (False, True) if train.optim.clip is None else (False,):
                parallel = {
                    **train.parallel.model_dump(),
                    "dp_replicate": layout.dp_replicate,
                    "dp_shard": layout.dp_shard,
                    "tp_size": layout.tp,
                    "pp_size": layout.pp,
                    "offload": offload,
                }
                frugal = {"activation_compression": "none", "activation_offload": False, **activation}
                optim = {**train.optim.model_dump(), **optimizer, "in_backward": in_backward}
                yield {**train.model_dump(), **frugal, "optim": optim, "parallel": parallel}, layout


class _Pieces:
    """Traces of one process without parallelism, from which candidates are added up."""

    def __init__(self, train: TrainConfig, shape: SanaConfig, data: Data, constants: Constants, machine: Machine):
        self.train, self.shape, self.data, self.constants, self.machine = train, shape, data, constants, machine
        self._traced: dict[tuple[str, str, bool], tuple[Traced, Traced]] = {}

    def microbatches(self, layout: Layout) -> list[int]:
        """Divisors of a process's share of every bucket, the largest first."""
        shares = set(self.data.shares(layout.data_world).values())
        largest = min(shares) // (2 * layout.pp if layout.pp > 1 else 1)
        return [m for m in range(max(1, largest), 0, -1) if all(s % m == 0 for s in shares)]

    def candidate(self, train: TrainConfig, layout: Layout) -> Candidate | None:
        """The sum for a candidate; None if `train` would refuse it."""
        try:
            predicting.check(train, self.shape, self.data, self.machine.gpus)
        except ConfigError:
            return None
        microbatch = train.microbatch
        one, some = self._traces(train)
        bucket, share = self.data.worst(layout.data_world, microbatch)
        count = -(-share // microbatch)
        lasting = predicting.closed_form(self.shape, train, layout)
        brief = _line(_brief(one), _brief(some), microbatch) / layout.tp
        in_flight = min(count, layout.pp)
        brief = brief * in_flight / layout.pp if layout.pp > 1 else brief
        blocks = 2 if train.parallel.reshards(layout.dp_shard) else 1  # one is gathered ahead
        gathered = blocks * lasting[BUFFERS] + (4.0 * one.parameters / (layout.tp * layout.pp) if count > 1 else 0.0)
        gradients = lasting[GRADIENTS] if train.activation_checkpointing != "none" else 0.5 * lasting[GRADIENTS]
        peak = {kind: lasting[kind] for kind in LASTING} | {GRADIENTS: gradients, "activations": brief}
        total = sum(predicting.with_overheads({**peak, BUFFERS: gathered}, layout).values())
        step = self._seconds(train, layout, bucket, microbatch, count, one, some)
        return Candidate(train, layout, total, step, share * layout.data_world)

    def _traces(self, train: TrainConfig) -> tuple[Traced, Traced]:
        key = train.activation_checkpointing, train.activation_compression, train.activation_offload
        if key not in self._traced:
            bucket, _ = self.data.worst(1, 1)
            height, width = (side // self.data.compression for side in bucket)
            alone = train.model_dump() | {"parallel": {}, "optim": {**train.optim.model_dump(), "in_backward": False}}
            plain = TrainConfig.model_validate(alone | {"optim": self.train.optim.model_dump()})
            shapes = [Shape(height, width, self.data.rows, samples) for samples in (1, _TRACED_AT)]
            one, some = (Traced.of(self.shape, plain, Layout(1, 1, 1, 1), s, rank=0, on_gpu=True) for s in shapes)
            self._traced[key] = one, some
        return self._traced[key]

    def _seconds(
        self,
        train: TrainConfig,
        layout: Layout,
        bucket: tuple[int, int],
        microbatch: int,
        count: int,
        one: Traced,
        some: Traced,
    ) -> float:
        """Of a step: kernels of the trace, divided over tp and pp; gathers and scatters of parameters; the bubble."""
        height, width = (side // self.data.compression for side in bucket)
        work = {
            name: type(w)(
                *(
                    round(_line(getattr(one.work[name], f), getattr(w, f), microbatch))
                    for f in ("flops", "bytes", "calls")
                )
            )
            for name, w in some.work.items()
            if name in one.work
        }
        for name, w in work.items():
            parts = layout.tp * layout.pp * (layout.dp_shard if name == "optimizer" else 1)
            work[name] = type(w)(w.flops // parts, w.bytes // parts, w.calls // layout.pp)
        compute = 4 if train.precision == "fp32" else 2
        whole = one.parameters / (layout.tp * layout.pp)
        sent: dict[tuple[str, int], list[float]] = {}
        if layout.dp_shard > 1:
            gathers = 2 if train.parallel.reshards(layout.dp_shard) else 1
            sent["allgather", layout.dp_shard] = [gathers * compute * whole, 1]
            sent["reduce_scatter", layout.dp_shard] = [4 * whole, 1]
        if layout.dp_replicate > 1:
            sent["all_reduce", layout.dp_replicate] = [4 * whole / layout.dp_shard, 1]
        if layout.tp > 1:
            tokens = height * width * self.shape.inner_dim * compute * microbatch
            sent["all_reduce", layout.tp] = [8.0 * self.shape.num_layers / layout.pp * tokens, 1]
        if train.parallel.offload == "all":  # parameters to the GPU and gradients back, over PCIe
            sent["send", 2] = [(compute * 2 + 4) * whole / layout.dp_shard, 1]
        traced = replace(some, work=work, sent=sent)
        shape = Shape(height, width, self.data.rows, microbatch)
        prediction = Prediction(
            train, layout, self.shape, self.machine, {}, "", 0.0, bucket, shape, microbatch * count, 0, traced
        )
        return Time.of(prediction, self.data, self.constants).step


def _brief(traced: Traced) -> float:
    """Short-lived bytes at the peak, without gradients and gathered parameters."""
    return sum(size for kind, size in traced.peak.items() if kind not in (*LASTING, GRADIENTS, BUFFERS))


def _line(at_one: float, at_some: float, microbatch: int) -> float:
    return at_one + (at_some - at_one) * (microbatch - 1) / (_TRACED_AT - 1)
