"""`sana-pipe plan`: whether a run fits, how fast it is and what it costs, before a GPU is rented.

Opens the snapshot (if there is one), predicts memory and time of the worst bucket, and prints them. Writes nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import click

from pipeline.base.amounts import amount, duration, figure
from pipeline.base.errors import print_error
from pipeline.base.gpus import GIB
from pipeline.config import Config
from pipeline.data.encoders.text_kind import max_length
from pipeline.data.snapshots.opening import unused_records
from pipeline.tools.locations import cache_location
from pipeline.tools.planning import auto, extent
from pipeline.tools.planning import predict as predicting
from pipeline.tools.planning.cost import Time, by_share
from pipeline.tools.planning.predict import Data, Machine, Prediction
from pipeline.tools.planning.search import Candidate, NothingFitsError, Search
from pipeline.train.config import TrainConfig
from pipeline.train.training.assemble import objective_of
from pipeline.train.training.remedies import flags


@dataclass(frozen=True)
class Options:
    """The options of the command line.

    Attributes:
        gpus: of all nodes together; `gpu`, `gpu_memory`: the card, and memory that is not the card's.
        nodes: None: as `predict.least_nodes`; of CPUs one.
        price: of a GPU hour.
    """

    gpus: int = 1
    gpu: str | None = None
    gpu_memory: str | None = None
    nodes: int | None = None
    price: float | None = None
    snapshot: str | None = None
    search: bool = False
    as_json: bool = False


def run(config: Config, options: Options) -> int:
    """Predict one configuration, or search for the fastest that fits.

    Returns:
        0; 1 if it does not fit.

    Raises:
        UserError: an unknown card, sizes that do not divide, a snapshot that does not exist.
    """
    machine = auto.named(options.gpu, options.gpu_memory, options.gpus, options.nodes)
    predicting.check_precision(config.train.precision, config.supports, machine)
    opened = None if options.snapshot is None else cache_location(config).open().open_snapshot(options.snapshot)
    for note in () if opened is None else unused_records(opened, objective_of(config.train).pictures):
        click.echo(note, err=True)
    data = (
        Data.configured(config.model, config.data, config.bucket, max_length(config.text))
        if opened is None
        else Data.of(opened)
    )
    shape = predicting.architecture(config.model, config.data.resolution, data)
    search = Search(shape, data, machine, config.supports)
    try:
        return (_search if options.search else _predict)(config.train, search, options)
    except NothingFitsError as error:
        print_error(error)
        return 1


def _predict(train: TrainConfig, search: Search, options: Options) -> int:
    """Print memory, time and cost of the configuration, with values for what is `auto`."""
    undecided = tuple(name for name in train.undecided if name != "compile")
    data, machine, decided = search.data, search.machine, list[str]()
    error = None
    try:
        train, decided = auto.decide(train, machine, lambda: search)
        layout = predicting.check(train, search.shape, data, machine.gpus)
        candidate = search.candidate(train, layout)
        if not candidate.prediction.fits:
            error = search.refusal(train, candidate)
    except NothingFitsError as refused:
        error, candidate = refused, refused.smallest
        decided = ["auto: nothing fits; the most frugal case:"]
    prediction = candidate.prediction
    time = candidate.time if machine.card.is_gpu else None
    if options.as_json:
        report: dict[str, Any] = {"prediction": prediction.as_dict()}
        report["time"] = None if time is None else time.as_dict(options.price)
        values = candidate.train.model_dump(mode="json")
        report |= {"decided": {name: values[name] for name in undecided}} if undecided else {}
        report |= {"fix": error.fix} if error is not None else {}
        click.echo(json.dumps({**report, "gpu": machine.card.name, "gpus": machine.gpus, "nodes": machine.nodes}))
    else:
        run_lines = extent.lines(train, search.shape, data, None if time is None else time.step)
        memory, speed = memory_lines(prediction), time_lines(time, prediction, options.price)
        for line in (*decided, *memory, *speed, *run_lines):
            click.echo(line)
    if error is not None:
        raise error
    return 0


def _search(train: TrainConfig, search: Search, options: Options) -> int:
    """Print what fits, the fastest first."""
    machine = search.machine
    try:
        candidates = search.ranked(train)
    except NothingFitsError as error:
        raise search.refusal(train, error.smallest) from None
    if options.as_json:
        rows = [
            {
                "images_per_s": candidate.time.images_per_s,
                "total": round(candidate.prediction.total),
                **{f"train.{name}": value for name, value in candidate.changes.items()},
            }
            for candidate in candidates
        ]
        click.echo(json.dumps({"candidates": rows, "gpu": machine.card.name, "gpus": machine.gpus}))
        return 0
    click.echo(f"{_gpus(machine)}, {machine.card.name}'s speed: the fastest that fit")
    click.echo(f"{'images/s':>9} {'GiB':>6}  strategy")
    for candidate in candidates:
        total = candidate.prediction.total / GIB
        click.echo(f"{figure(candidate.time.images_per_s):>9} {total:6.1f}  {_described(candidate)}")
    sizes = {"parallel.sizes": "given"} if train.parallel.sizes == "auto" else {}
    click.echo(f"the first one: {flags({**sizes, **candidates[0].changes})}")
    return 0


def _described(candidate: Candidate) -> str:
    train = candidate.train
    offload = ", parameters offloaded" if train.parallel.offload == "all" else ""
    layout, each = candidate.prediction.layout, train.parallel.reduce_each_microbatch
    microbatch = f"microbatch {train.microbatch}" + (", gradients reduced after each" if each else "")
    return f"{layout}, checkpointing {train.activation_checkpointing}, {microbatch}{offload}"


def _gpus(machine: Machine) -> str:
    nodes = f" on {machine.nodes} nodes" if machine.nodes > 1 else ""
    return f"{machine.gpus} x {amount(machine.memory)}{nodes}"


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
