"""`sana-pipe plan`: whether a run fits, how fast it is and what it costs, before a GPU is rented.

What: opens the snapshot (if there is one), predicts memory and time of the worst bucket, prints them. `encode` does so
for the encoding of a source. Nothing is written but the configuration of `--write`.
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from pipeline.amounts import amount, duration
from pipeline.cache.root import Cache
from pipeline.config import Config, as_yaml, written
from pipeline.encoding import survey as surveying
from pipeline.errors import UserError, writing
from pipeline.models.spec import ModelSpec
from pipeline.planning import auto
from pipeline.planning import predict as predicting
from pipeline.planning import search as searching
from pipeline.planning.cards import CARDS, UNNAMED, card, memory_of
from pipeline.planning.cost import Time, by_share
from pipeline.planning.predict import Data, Machine, Prediction
from pipeline.training.build import architecture_of_weights

GIB = 2**30


@dataclass(frozen=True)
class Options:
    """What the command line asks for.

    Attributes:
        gpus: of all nodes together; `gpu`, `gpu_memory`: the card, and memory that is not the card's.
        price: of a GPU hour.
        phase: of the configuration; its options and, unless `snapshot` is given, its snapshot count.
        write: file for the configuration that was searched for.
    """

    gpus: int = 1
    gpu: str | None = None
    gpu_memory: str | None = None
    nodes: int = 1
    price: float | None = None
    snapshot: str | None = None
    phase: str | None = None
    search: bool = False
    write: str | None = None
    as_json: bool = False


def run(config: Config, options: Options) -> int:
    """Predict one configuration, or search for the fastest that fits.

    Returns:
        0; 1 if it does not fit, or if `train` would refuse it because nothing leaves a tenth of the memory free.

    Raises:
        UserError: an unknown card, sizes that do not divide, a snapshot that does not exist.
    """
    snapshot = options.snapshot
    if options.phase is not None:
        config, snapshot = config.of_phase(options.phase), snapshot or config.phase(options.phase).snapshot
    elif config.phases:
        raise UserError(
            f"the configuration has {len(config.phases)} phases: which one?",
            fix=f"--phase {config.phases[0].name} (of {', '.join(each.name for each in config.phases)})",
        )
    machine = machine_of(options)
    data = data_of(config, snapshot)
    shape = predicting.architecture(config, data, architecture_of_weights)
    if options.search:
        return _search(config, shape, data, machine, options.write, options.as_json)
    return _predict(config, shape, data, machine, options)


def _predict(config: Config, shape: ModelSpec, data: Data, machine: Machine, options: Options) -> int:
    """Print memory, time and cost of the configuration, with values for what is `auto`."""
    undecided = tuple(name for name in config.train.undecided if name != "compile")
    refused = False
    try:
        config, decided = auto.decide(config, lambda: shape, data, machine)
    except searching.NothingFitsError as error:
        if "parallel" in undecided:
            raise
        smallest = {name: {**auto.FIXED, "microbatch": 1}[name] for name in undecided}
        config, refused = config.with_train(**smallest), True
        decided = [f"auto: {error.what}; of the smallest, {', '.join(f'train.{n}: {v}' for n, v in smallest.items())}:"]
    prediction = predicting.predict(config.train, shape, data, machine)
    largest = predicting.largest_microbatch(prediction, data)
    time = Time.of(prediction, data) if machine.card.is_gpu else None
    if options.as_json:
        report = {"prediction": prediction.as_dict(), "largest_microbatch": largest}
        report["time"] = None if time is None else time.as_dict(options.price)
        report |= (
            {"decided": {name: config.train.model_dump(mode="json")[name] for name in undecided}} if undecided else {}
        )
        click.echo(json.dumps({**report, "gpu": machine.card.name, "gpus": machine.gpus, "nodes": machine.nodes}))
    else:
        for line in (*decided, *memory_lines(prediction, largest), *time_lines(time, prediction, options.price)):
            click.echo(line)
    return 0 if prediction.fits and not refused else 1


def encode(
    config: Config,
    data: str,
    *,
    gpus: int = 1,
    price: float | None = None,
    probe: bool = True,
    as_json: bool = False,
) -> int:
    """Bytes and hours of encoding a source, by storage choice and text mode; nothing is written.

    Args:
        gpus: devices that share the work. probe: measure the encoders on this device.

    Raises:
        UserError: a source or a model that cannot be read.
    """
    with redirect_stdout(sys.stderr):
        survey = surveying.survey(config, data)
        sizes = {storage: asdict(size) | {"total": size.total} for storage, size in survey.by_storage().items()}
        hours = survey.hours() if probe else None
    work = survey.work
    report = {
        "source": survey.source.name,
        "new": {"latents": work.images, "captions": work.texts},
        "bytes": sizes,
        "hours": hours,
        "gpus": gpus,
    }
    if as_json:
        click.echo(json.dumps(report))
        return 0
    click.echo(
        f"source {survey.source.name!r}: {work.items} items, {work.usable} usable; to be encoded: {work.images} "
        f"latents, {work.texts} captions"
    )
    click.echo(f"{'encode.storage':<16}{'latents':>12}{'text':>12}{'index':>12}{'all':>12}")
    for storage, size in sizes.items():
        columns = (amount(size[kind]) for kind in ("latents", "text", "index", "total"))
        click.echo(f"{storage:<16}" + "".join(f"{text:>12}" for text in columns))
    for line in _hours_lines(hours, gpus, price) if hours is not None else ["time: not probed"]:
        click.echo(line)
    return 0


def _hours_lines(hours: dict[str, Any], gpus: int, price: float | None) -> list[str]:
    """Time of encoding for people."""
    lines = [
        f"time, probed on {hours['device']} with {hours['probed_images']} pictures and {hours['probed_captions']} "
        "captions"
        + ("; decoding takes longer than encoding: more encode.workers would help" if hours["decode_bound"] else "")
    ]
    named = {"latents": "latents", "text": "text, shared instruction", "text_exact": "text.mode: exact"}
    for kind, name in named.items():
        value = hours[f"{kind}_hours"]
        if value is None:
            lines.append(f"  {name:<26}unknown: nothing of it could be encoded")
            continue
        cost = "" if price is None else f", cost {value * price:.4g}"
        lines.append(f"  {name:<26}{value:.4g} device-hours, {duration(value / gpus * 3600)} on {gpus}{cost}")
    return lines


def _search(config: Config, shape: ModelSpec, data: Data, machine: Machine, write: str | None, as_json: bool) -> int:
    if write is not None and Path(write).exists():  # before minutes of search
        raise UserError(f"{write} exists already", fix="--write another name, or remove the file")
    weights = config.model.weights
    candidates = searching.search(
        config.train,
        shape,
        data,
        machine,
        bears=lambda precision: weights is None or weights.bears(precision),
    )
    best = candidates[0]
    if write is not None:
        _write(config, best, write)
    if as_json:
        rows = [
            {"images_per_s": c.images_per_s, "total": round(c.total), "traced": c.prediction is not None, **c.changes}
            for c in candidates
        ]
        click.echo(json.dumps({"candidates": rows, "gpu": machine.card.name, "gpus": machine.gpus}))
        return 0
    click.echo(f"{machine.gpus} x {amount(machine.memory)}, {machine.card.name}'s speed: the fastest that fit")
    click.echo(f"{'images/s':>9} {'GiB':>6}  strategy (* traced whole, the others added up from parts)")
    for candidate in candidates:
        mark = "*" if candidate.prediction is not None else " "
        click.echo(f"{candidate.images_per_s:9.3g} {candidate.total / GIB:6.1f} {mark}{_described(candidate)}")
    if write is not None:
        click.echo(f"the first one is in {write}: sana-pipe train --config {write}")
    if best.train.precision != config.train.precision:
        click.echo(f"note: the first one trains in {best.train.precision} instead of {config.train.precision}")
    if best.train.optim.name != config.train.optim.name:
        click.echo(
            f"note: the first one trains with {best.train.optim.name} instead of {config.train.optim.name}, "
            "which needs other values of train.optim.lr and train.optim.weight_decay"
        )
    return 0


def _write(config: Config, best: searching.Candidate, path: str) -> None:
    """Write the configuration with the changes of a candidate to a new file."""
    fitted = written(config)
    for option, value in best.changes.items():
        *sections, name = option.split(".")
        node = fitted
        for section in sections:
            node = node[section]
        node[name] = value
    fitted["train"]["parallel"]["sizes"] = "given"
    if best.train.optim.name != config.train.optim.name:
        fitted["train"]["optim"] |= {"betas": None, "eps": None}
    Config.model_validate(fitted)
    with writing(Path(path), "--write another name"), open(path, "x", encoding="utf-8") as file:
        file.write(as_yaml(fitted, sort_keys=False))


def _described(candidate: searching.Candidate) -> str:
    train = candidate.train
    parts = [
        str(candidate.layout),
        f"checkpointing {train.activation_checkpointing}",
        f"microbatch {train.microbatch}",
        train.precision,
        train.optim.name,
        *([f"compression {train.activation_compression}"] if train.activation_compression != "none" else []),
        *(["parameters offloaded"] if train.parallel.offload == "all" else []),
        *(["update in backward"] if train.optim.in_backward else []),
    ]
    return ", ".join(parts)


def machine_of(options: Options) -> Machine:
    """The GPUs of the options.

    Raises:
        UserError: neither a card nor a memory size, an unknown card, nodes that do not divide the GPUs.
    """
    gpus, gpu, nodes = options.gpus, options.gpu, options.nodes
    if gpu is None and options.gpu_memory is None:
        raise UserError("which GPU?", expected="--gpu " + "|".join(CARDS) + ", or --gpu-memory 24GiB")
    if gpus % nodes:
        raise UserError(
            f"--gpus {gpus} (of all nodes together) cannot be divided by --nodes {nodes}",
            expected="one of " + ", ".join(str(n) for n in range(1, gpus + 1) if gpus % n == 0) + " nodes",
        )
    chosen = card(gpu or UNNAMED)
    memory = auto.usable(chosen, max(1, gpus // nodes)) if options.gpu_memory is None else memory_of(options.gpu_memory)
    return Machine(chosen, memory, gpus, nodes, assumed=gpu is None)


def data_of(config: Config, snapshot: str | None) -> Data:
    """The buckets of a snapshot; without one, those of the configuration.

    Raises:
        CacheError: no such snapshot; lists the names.
    """
    return Data.of(config, None if snapshot is None else Cache.of(config).open_snapshot(snapshot))


def memory_lines(prediction: Prediction, largest: int) -> list[str]:
    """The prediction for people."""
    p, shape = prediction, prediction.shape
    height, width = p.bucket
    count = -(-p.share // shape.microbatch)
    lines = [
        f"{p.machine.gpus} x {amount(p.machine.memory)} ({p.layout}), {p.train.precision}, {p.train.optim.name}, "
        f"checkpointing {p.train.activation_checkpointing}",
        f"worst bucket {height}x{width}: {p.share} samples a GPU and step, {count} x {shape.microbatch}, "
        f"{shape.rows} text rows",
        f"{'GiB per GPU':<24}{'traced':>9}{'closed form':>13}",
    ]
    for kind, size in p.kinds.items():
        closed = f"{p.closed[kind] / GIB:13.2f}" if kind in p.closed else ""
        if size or p.closed.get(kind):
            note = "  (estimate)" if kind in ("context", "fragmentation") else ""
            lines.append(f"  {kind:<22}{size / GIB:9.2f}{closed}{note}")
    verdict = "fits" if p.fits else "DOES NOT FIT"
    state = "free" if p.fits else "missing"
    lines.append(f"  {'peak (' + p.phase + ')':<22}{p.total / GIB:9.2f}   {verdict}: {amount(abs(p.margin))} {state}")
    if p.host:
        lines.append(f"  in host memory, too   {p.host / GIB:9.2f}")
    needed = f"; a step has {p.share} a GPU" if largest > p.share else ""
    lines.append(f"largest microbatch that fits: {largest}{needed}" if largest else "not even a microbatch of 1 fits")
    return lines


def time_lines(time: Time | None, prediction: Prediction, price: float | None) -> list[str]:
    """Speed and cost for people."""
    if time is None:
        return ["time: not predicted for a CPU"]
    machine = prediction.machine
    name = f"speed of {machine.card.name}" + (" (assumed)" if machine.assumed else "")
    lines = [
        f"time (an estimate, {name}): {time.images_per_s:.3g} images/s, {time.step:.3g} s a step, MFU {time.mfu:.0%}",
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
