"""Print what `sana-pipe plan` predicts: memory, time and cost of a configuration, or the fastest that fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sana_pipe.base.amounts import amount, duration, figure
from sana_pipe.base.gpus import GIB
from sana_pipe.tools.planning.cost import Time, by_share
from sana_pipe.tools.planning.predict import Machine, Prediction
from sana_pipe.tools.planning.search import Candidate
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.training.remedies import flags


def memory_lines(prediction: Prediction) -> list[str]:
    """The prediction for people."""
    p, shape = prediction, prediction.shape
    height, width = p.bucket
    count = -(-p.share // shape.microbatch)
    lines = [
        f"{_gpus(p.machine)} ({p.layout}), {p.train.precision}, {p.train.optim.name}, "
        f"checkpointing {p.train.activation_checkpointing}",
        f"worst bucket {height}x{width}: {p.share} samples a GPU and step, {count} x {shape.microbatch}, "
        f"{shape.rows} text rows",
        f"{'GiB per GPU':<24}{'traced':>9}",
    ]
    for kind, size in p.kinds.items():
        if size:
            note = "  (estimate)" if kind in ("context", "fragmentation") else ""
            lines.append(f"  {kind:<22}{size / GIB:9.2f}{note}")
    verdict = "fits" if p.fits else "DOES NOT FIT"
    state = "free" if p.fits else "missing"
    lines.append(f"  {'peak (' + p.phase + ')':<22}{p.total / GIB:9.2f}   {verdict}: {amount(abs(p.margin))} {state}")
    if p.machine.card.is_gpu:
        lines.append("  what other programs (a desktop: about 0.9 GiB) use of the GPU is not counted")
    if p.host:
        lines.append(f"  in host memory, too   {p.host / GIB:9.2f}")
    return lines


def time_lines(time: Time | None, prediction: Prediction, price: float | None) -> list[str]:
    """Speed and cost for people."""
    if time is None:
        return ["time: not predicted for a CPU"]
    machine = prediction.machine
    name = f"speed of {machine.card.name}" + (" (assumed)" if machine.assumed else "")
    lines = [
        f"time (an estimate, {name}): {figure(time.images_per_s)} images/s, {time.step:.3g} s a step, "
        f"MFU {time.mfu:.0%}",
        "  " + ", ".join(f"{name} {share:.0%}" for name, share in by_share(time.kernels) if share >= 0.005),
    ]
    if time.traffic:
        sent = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in time.traffic.items())
        lines.append(f"  traffic: {sent}; not hidden {time.exposed:.3g} s")
    if time.bubble:
        lines.append(f"  idle in the pipeline: {time.bubble:.3g} s")
    hours = time.epoch_hours
    if hours is None:
        images = 1e6 / time.images_per_s / 3600
        cost = "" if price is None else f", cost {images * time.gpus * price:.4g}"
        lines.append(f"  10^6 images: {duration(images * 3600)}, {images * time.gpus:.4g} GPU-hours{cost}")
    else:
        cost = "" if price is None else f", cost {time.cost(price):.4g}"
        lines.append(
            f"  an epoch of {time.epoch_samples} images: {duration(hours * 3600)}, "
            f"{hours * time.gpus:.4g} GPU-hours{cost}"
        )
    return lines


def ranking_lines(train: TrainConfig, machine: Machine, candidates: Sequence[Candidate]) -> Iterator[str]:
    """The table of the candidates, and the options of the first.

    Args:
        train: the options that the search began with.
    """
    yield f"{_gpus(machine)}, {machine.card.name}'s speed: the fastest that fit"
    yield f"{'images/s':>9} {'GiB':>6}  strategy"
    for candidate in candidates:
        total = candidate.prediction.total / GIB
        yield f"{figure(candidate.time.images_per_s):>9} {total:6.1f}  {_described(candidate)}"
    sizes = {"parallel.sizes": "given"} if train.parallel.sizes == "auto" else {}
    yield f"the first one: {flags({**sizes, **candidates[0].changes})}"


def _described(candidate: Candidate) -> str:
    """The strategy of a candidate in words."""
    train = candidate.train
    offload = ", parameters offloaded" if train.parallel.offload == "all" else ""
    layout, each = candidate.prediction.layout, train.parallel.reduce_each_microbatch
    microbatch = f"microbatch {train.microbatch}" + (", gradients reduced after each" if each else "")
    return f"{layout}, checkpointing {train.activation_checkpointing}, {microbatch}{offload}"


def _gpus(machine: Machine) -> str:
    """The number of GPUs, their memory and nodes."""
    nodes = f" on {machine.nodes} nodes" if machine.nodes > 1 else ""
    return f"{machine.gpus} x {amount(machine.memory)}{nodes}"
