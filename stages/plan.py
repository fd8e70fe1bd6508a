"""`sana-pipe plan`: whether a run fits, how fast it is and what it costs, before a GPU is rented.

Opens the snapshot (if there is one), predicts memory and time of the worst bucket, and prints them. Writes nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import click

from sana_pipe.base.errors import print_error
from sana_pipe.config import Config
from sana_pipe.data.encoders.latent_shape import latent_shape
from sana_pipe.data.encoders.text_kind import max_length
from sana_pipe.data.snapshots.opening import unused_records
from sana_pipe.tools.locations import cache_location
from sana_pipe.tools.planning import auto, extent
from sana_pipe.tools.planning import predict as predicting
from sana_pipe.tools.planning.predict import Data
from sana_pipe.tools.planning.prediction_lines import memory_lines, ranking_lines, time_lines
from sana_pipe.tools.planning.search import NothingFitsError, Search
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.training.assemble import objective_of


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
    data = _configured(config) if opened is None else Data.of(opened)
    shape = predicting.architecture(config.model, config.data.resolution, data)
    search = Search(shape, data, machine, config.supports)
    try:
        return (_search if options.search else _predict)(config.train, search, options)
    except NothingFitsError as error:
        print_error(error)
        return 1


def _configured(config: Config) -> Data:
    """The data before there is a snapshot. Says on stderr where the VAE's shape is assumed."""
    latent = latent_shape(config.vae)
    compression = None if latent is None else latent[0]
    data = Data.configured(config.model, config.data, config.bucket, max_length(config.text), compression)
    if latent is None:
        assumed = f"{data.compression} pixels per latent side are assumed, for a model of {data.channels} channels"
        click.echo(f"note: vae.id: {config.vae.id} cannot be read: {assumed}", err=True)
    return data


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
    for line in ranking_lines(train, machine, candidates):
        click.echo(line)
    return 0
