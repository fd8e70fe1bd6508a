"""Time and cost of a step: operations and bytes of the traced step against a card's peaks.

What: `Time.of` gives each class of kernels the longer of its arithmetic and its memory traffic, at stated efficiencies,
adds communication that arithmetic cannot hide and the pipeline's bubble, and scales to an epoch. It is an estimate.
Assumptions: the share of a peak that kernels reach in practice; a start of 4 microseconds a kernel;
all-gathers, reduce-scatters and all-reduces over replicas overlap with arithmetic, those of tensor parallelism do not.
With tensor parallelism and replicas together, no all-reduce overlaps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sana_pipe.tools.planning.predict import Data, Prediction
from sana_pipe.tools.planning.recorder import ATTENTION, DEPTHWISE, KERNELS, MATMUL, UPDATE
from sana_pipe.train.parallel.mesh import Layout

_GB, _TERA = 1e9, 1e12
REPLICAS = "over replicas"
"""Marks the name of a sum over replicas, where its group may be as large as that of tensor parallelism."""


REACHED = {MATMUL: 0.60, ATTENTION: 0.35, KERNELS: 0.60}
"""Shares of the card's FLOP/s that kernels reach, by class."""
MEMORY, DEPTHWISE_MEMORY, LINK, OVERLAP = 0.75, 0.35, 0.70, 0.80
"""Shares of the card's memory rate and link that are reached, and of the arithmetic that traffic overlaps with."""
START_S = 4e-6
"""Seconds to start a kernel."""


@dataclass(frozen=True)
class Time:
    """The time of an optimizer step on all GPUs, in seconds.

    Attributes:
        kernels: by class. traffic: by collective. exposed: traffic that arithmetic does not hide. bubble: idle time of
            the pipeline. samples: of the global batch. flops: of the model, without recomputation. peak: FLOP/s of all
            GPUs.
    """

    kernels: dict[str, float]
    traffic: dict[str, float]
    exposed: float
    bubble: float
    samples: int
    flops: float
    peak: float
    gpus: int
    epoch_samples: int | None

    @property
    def step(self) -> float:
        return sum(self.kernels.values()) + self.exposed + self.bubble

    @property
    def images_per_s(self) -> float:
        return self.samples / self.step

    @property
    def mfu(self) -> float:
        return self.flops / self.step / self.peak

    @property
    def epoch_hours(self) -> float | None:
        """Hours of an epoch of the snapshot; None without one."""
        return None if self.epoch_samples is None else self.epoch_samples / self.images_per_s / 3600

    def cost(self, price: float) -> float | None:
        """Compute the cost of an epoch, at a price per GPU hour."""
        return None if self.epoch_hours is None else self.epoch_hours * self.gpus * price

    def as_dict(self, price: float | None = None) -> dict[str, Any]:
        """JSON values."""
        hours = self.epoch_hours
        return {
            "step_s": self.step,
            "images_per_s": self.images_per_s,
            "mfu": self.mfu,
            "epoch_samples": self.epoch_samples,
            "epoch_hours": hours,
            "epoch_gpu_hours": None if hours is None else hours * self.gpus,
            "epoch_cost": None if price is None else self.cost(price),
            "kernels_s": self.kernels,
            "traffic_s": self.traffic,
            "exposed_s": self.exposed,
            "bubble_s": self.bubble,
        }

    @classmethod
    def of(cls, prediction: Prediction, data: Data) -> Time:
        """The time of a step of the worst bucket. Buckets of one table have about the same area, so it is near the
        mean."""
        shape = prediction.shape
        count = -(-prediction.share // shape.microbatch)
        repeats = count / shape.count
        kernels = _kernels(prediction)
        traffic = _traffic(prediction, repeats)
        busy = sum(kernels.values())
        divided = prediction.layout.tp > 1  # blocks wait for sums of activations
        overlapped = ("gather", "scatter") if divided else ("gather", "reduce")
        hidden = sum(s for name, s in traffic.items() if any(word in name for word in overlapped))
        exposed = max(0.0, hidden - OVERLAP * busy) + sum(traffic.values()) - hidden
        stages = prediction.layout.pp
        tokens = shape.tokens(prediction.architecture)
        samples = prediction.share * prediction.layout.data_world
        return cls(
            kernels,
            traffic,
            exposed,
            busy * (stages - 1) / count if stages > 1 else 0.0,
            samples,
            float(prediction.architecture.training_flops(samples, tokens, samples * shape.rows)),
            prediction.machine.card.tflops(prediction.train.precision) * _TERA * prediction.machine.gpus,
            prediction.machine.gpus,
            data.samples,
        )


def _kernels(prediction: Prediction) -> dict[str, float]:
    """Seconds of a step by class: the longest of arithmetic, memory traffic and the starts of kernels."""
    shape, card = prediction.shape, prediction.machine.card
    repeats = -(-prediction.share // shape.microbatch) / shape.count
    peak = card.tflops(prediction.train.precision) * _TERA
    result = {}
    for name, work in prediction.traced.work.items():
        times = 1.0 if name == UPDATE else repeats
        arithmetic = work.flops / (peak * REACHED.get(name, 1.0))
        share = DEPTHWISE_MEMORY if name == DEPTHWISE else MEMORY
        moved = work.bytes / (card.memory_gbs * _GB * share)
        result[name] = times * max(arithmetic, moved, work.calls * START_S)
    return result


def _traffic(prediction: Prediction, repeats: float) -> dict[str, float]:
    """Seconds of each collective: bytes over the slowest link that its group uses. Groups that share a node share its
    network. One group over whole nodes uses the full link: its ring crosses each node boundary once."""
    machine, layout = prediction.machine, prediction.layout
    parallel = prediction.train.parallel
    gathers_once, scatters_once = not parallel.reshards(layout.dp_shard), not parallel.reduce_each_microbatch
    seconds: dict[str, float] = {}
    for (name, size), (payload, _) in prediction.traced.sent.items():
        group = size or layout.dp_shard
        if group < 2 and name not in ("send", "recv"):
            continue
        span = _span(name, group, layout)
        rate = machine.card.link_gbs
        if span > machine.per_node:
            members = max(1, machine.per_node * group // span)  # of the group in a node
            rate = min(rate, machine.network_gbs * members / machine.per_node)
        share = (group - 1) / group if group > 1 else 1.0
        passes = 2 * share if "reduce" in name and "scatter" not in name else share
        once = _over_replicas(name, group, layout)
        once |= ("scatter" in name and scatters_once) or ("gather" in name and gathers_once)
        times = 1.0 if once else repeats
        seconds[name] = seconds.get(name, 0.0) + times * payload * passes / (rate * _GB * LINK)
    return seconds


def _span(name: str, group: int, layout: Layout) -> int:
    """Consecutive processes from a group's first to its last; the order is pp, dp_replicate, dp_shard, tp."""
    if _over_replicas(name, group, layout):
        return group if layout.dp_replicate == 1 else group * layout.dp_shard * layout.tp
    return group if "all" in name and "reduce" in name else group * layout.tp


def _over_replicas(name: str, group: int, layout: Layout) -> bool:
    """Return whether a collective sums gradients over replicas, and not activations over tensor parallelism."""
    sums = "all" in name and "reduce" in name
    return sums and (REPLICAS in name or layout.tp == 1 or group != layout.tp)


def by_share(times: Mapping[str, float]) -> list[tuple[str, float]]:
    """Names and shares of the sum, the largest first."""
    whole = sum(times.values()) or 1.0
    return sorted(((name, value / whole) for name, value in times.items()), key=lambda pair: -pair[1])
