"""Stage `train`: a snapshot and a configuration in, a run directory with checkpoints out.

What: opens the snapshot, finds what the run reads (`pipeline.training.inputs`), decides what is `auto`, and calls the
trainer; with `phases` for each phase in turn (`pipeline.training.phases`). No encoder is imported here.
Price: a snapshot must exist; `sana-pipe encode` and `sana-pipe bucket` make it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from pipeline.cache.cache import Cache
from pipeline.cache.snapshot import Snapshot
from pipeline.config import Config, ParallelConfig
from pipeline.errors import CacheError, ConfigError
from pipeline.launch import Launch, check_compiler, detect, resolve_device
from pipeline.loader import shard_prefetch
from pipeline.loader.schedule import Schedule
from pipeline.models.spec import ModelSpec
from pipeline.parallel.collectives import all_gather_objects, broadcast_from_rank_0
from pipeline.parallel.mesh import agreed_device, open_mesh, reopening
from pipeline.planning import auto
from pipeline.planning.expectation import Expectation, expect
from pipeline.planning.predict import Data, Machine
from pipeline.processes import follow_with
from pipeline.reporting import run_pictures
from pipeline.training import changes, checkpoint, phases
from pipeline.training.build import architecture_of, with_text
from pipeline.training.checkpoint import Document
from pipeline.training.inputs import Inputs, find_inputs, task_of
from pipeline.training.stop_request import StopRequest, catch_signals_of
from pipeline.training.task import Context, Log, Report
from pipeline.training.trainer import fit

T = TypeVar("T")
_PREDICTION_S = 300
"""Seconds that the other processes wait at least, beside the usual ones, for the predictions of the first."""
Choice = str | Path | None
"""Of a checkpoint or a file, as the command line names it."""


def run(
    config: Config,
    snapshot: str | None = None,
    resume: Choice = None,
    quarantine: Choice = None,
    log: Callable[[str], None] | None = None,
    origin: Choice = None,
) -> Report:
    """Train on a snapshot, or the phases of the configuration one after the other.

    Args:
        snapshot: a name, an id or a prefix of one; None is the newest, for a resumed run the snapshot it began with.
        resume: None, `auto` or a checkpoint folder.
        quarantine: file that lists unreadable records; other samples then substitute for theirs.
        log: prints one line (default: print, flushed); called on the first process only.
        origin: a checkpoint or run directory that a new run begins from (`--from`); `train.phase` follows its phase
            unless the configuration gives one.

    Raises:
        UserError: no snapshot, one that does not fit the model or that `gc` elsewhere may remove, a run directory in
            use, and whatever `pipeline.training.checks` refuses.
    """
    launch = reopening(detect(), config.patience_s)
    log = (log or (lambda line: print(line, flush=True))) if launch.is_main else (lambda line: None)
    call = _Call(launch, resume, quarantine, origin, log)
    if not config.phases:
        report = _train(config, call, snapshot)
    elif snapshot is not None or resume not in (None, "auto"):
        raise ConfigError(
            f"--resume {resume} does not go with phases" if snapshot is None else "--snapshot does not go with phases",
            fix="give each phase its snapshot in the configuration, and --resume auto",
        )
    else:
        with catch_signals_of(launch) as stop:
            report = _chain(config, call, stop)
    _decode_later(config, launch, report)
    return report


def _decode_later(config: Config, launch: Launch, report: Report) -> None:
    """Let the first process of a finished run decode what was drawn once it has ended: then no process holds the
    transformer."""
    output = Path(config.train.output)
    if report.stopped_by is None and report.checkpoint is not None and launch.is_main and run_pictures.files(output):
        folder = report.checkpoint.parent.parent
        pictures = (config.of_phase(folder.name) if config.phases else config).train.pictures
        if pictures is not None and pictures.decode:
            follow_with("finish", "--run", str(output), "--config", str(folder / "config.yaml"))


@dataclass(frozen=True)
class _Call:
    """A process of the launch, and what `run` was asked for."""

    launch: Launch
    resume: Choice
    quarantine: Choice
    origin: Choice
    log: Log


def _chain(config: Config, call: _Call, stop: StopRequest) -> Report:
    """Train the phases that are not finished. The first process reads where they stand, for all."""
    cache, launch, log = Cache.of(config), call.launch, call.log
    places, summaries = _from_rank_0(config, launch, lambda: _survey(config, cache, call))
    report = Report(0, None, None, None)
    for number, (place, phase) in enumerate(zip(places, config.phases, strict=True), start=1):
        last = place.last
        title = f"phase {phase.name} ({number} of {len(places)})"
        if place.finished and last is not None:
            log(f"{title}: finished after step {last.done}, as {place.folder / 'config.yaml'} says")
            report = Report(last.done, last.folder, None, None)
        else:
            log(title)
            report = _train(config.of_phase(phase.name), call, phase.snapshot, stop)
            if report.stopped_by is not None:
                return report
            _give_back()
            summaries.append(_from_rank_0(config, launch, partial(_summary, cache, place, report.checkpoint)))
        call = replace(call, origin=report.checkpoint)
        if number == len(places) or not place.finished:
            for line in phases.table(summaries):
                log(line)
    return report


def _survey(config: Config, cache: Cache, call: _Call) -> tuple[list[phases.PhaseState], list[dict[str, Any]]]:
    """Where the phases stand, and the summaries of the finished ones; refuses a chain that cannot go on from there."""
    places = phases.survey(config)
    begun = [place for place in places if place.last is not None]
    output, origin = Path(config.train.output), call.origin
    if begun and call.resume is None:
        raise ConfigError(
            f"{output}: phase {begun[-1].name!r} already holds checkpoints",
            fix="--resume auto to continue the phases, or --set train.output=DIR for new ones",
        )
    if begun and origin is not None:
        call.log(f"--from {origin} is not used: phase {begun[0].name!r} has begun")
    if not begun and origin is None and checkpoint.newest(output / "checkpoints") is not None:
        raise ConfigError(
            f"{output} holds checkpoints of a run without phases, from which the first phase would not begin",
            fix=f"--from {output}, or --set train.output=DIR",
        )
    for place, phase in zip(places, config.phases, strict=True):
        if place.last is None:
            try:
                cache.open_snapshot(phase.snapshot)
            except CacheError as error:
                call.log(f"note: phase {phase.name!r} cannot begin yet: {error.line}")
    return places, [_summary(cache, place, place.last.folder) for place in places if place.finished and place.last]


def _summary(cache: Cache, place: phases.PhaseState, folder: Path | None) -> dict[str, Any]:
    assert folder is not None
    last = checkpoint.Resumed(folder, checkpoint.read_document(folder))
    try:
        head = cache.open_snapshot(last.document.state.snapshot).head
    except CacheError:
        head = None
    return phases.summarize(replace(place, last=last), head)


def _from_rank_0(config: Config, launch: Launch, function: Callable[[], T]) -> T:
    """What the first process finds, on every process."""
    with open_mesh(launch, ParallelConfig(), torch.device("cpu"), patience_s=config.patience_s):
        return broadcast_from_rank_0(function)


def _for_the_smallest(config: Config, launch: Launch, machine: Machine, function: Callable[[Machine], T]) -> T:
    """What the first process chooses for the smallest memory of all devices, on every process. It chooses between two
    process groups, since a prediction opens one that sends nothing."""
    opened, chosen = partial(open_mesh, launch, ParallelConfig(), torch.device("cpu")), Future[T]()
    patience_s = max(_PREDICTION_S, config.patience_s)
    with opened(patience_s=patience_s):
        memory = min(all_gather_objects(machine.memory))
    if launch.is_main:
        try:
            chosen.set_result(function(replace(machine, memory=memory)))
        except Exception as error:
            chosen.set_exception(error)
    with opened(patience_s=patience_s):
        return broadcast_from_rank_0(chosen.result)


def _give_back() -> None:
    """Free the memory of a phase: models and graphs refer to each other in circles."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _train(config: Config, call: _Call, snapshot: str | None, stop: StopRequest | None = None) -> Report:
    """One run. `stop`: it is a phase, which keeps the snapshot that it began with whatever the configuration says."""
    cache, launch, log = Cache.of(config), call.launch, call.log
    start = partial(_start, config, cache, call, snapshot, is_phase=stop is not None)
    resumed, chosen = start() if stop is None else _from_rank_0(config, launch, start)
    continued = None if resumed is None or resumed.begins else resumed.document
    opened = cache.open_snapshot(chosen)
    samples = sum(bucket.samples for bucket in opened.buckets)
    log(f"snapshot {opened.id[:12]}: {samples} samples in {len(opened.buckets)} buckets")
    if launch.is_main and continued is not None:
        for line in _newer(config, cache, opened, snapshot, stop is not None):
            log(line)
    if (warning := shard_prefetch.advice(opened)) is not None:
        log(warning)
    if config.train.epochs is not None:
        config = _with_steps(config, opened, 0 if resumed is None else resumed.phase)
        log(f"{config.train.steps} steps: train.epochs of this snapshot")
    if stop is None and snapshot is None and continued is not None and continued.state.step >= config.train.steps:
        lines = changes.since(config, cache, continued, cache.snapshot_of("latest"))
        changes.refuse(Path(config.train.output), lines)
    config = _as_encoded(config, cache, opened, log)
    config, inputs = find_inputs(config, cache, opened, resumed, log)
    data = Data.of(config, opened)
    device = agreed_device(launch, config.patience_s, partial(_device, config, launch, log))
    config = with_text(config, device)
    if config.train.undecided:
        config = _decided(config, inputs, launch, device, data, continued, log)

    def predicted(context: Context) -> Expectation | None:
        given = context.config
        return expect(given, lambda: architecture_of(given, context.task), data, device, launch, context.log)

    given = replace(
        task_of(config, inputs, launch, call.quarantine), expect=predicted, accepted=partial(inputs.keep, cache)
    )
    return fit(config, given, launch, resume=call.resume, origin=call.origin, log=log, stop=stop)


def _device(config: Config, launch: Launch, log: Log) -> torch.device:
    device = resolve_device(config.train.device, launch, log=log)
    check_compiler(device, config.train.compile == "block")
    return device


def _decided(
    config: Config,
    inputs: Inputs,
    launch: Launch,
    device: torch.device,
    data: Data,
    continued: Document | None,
    log: Log,
) -> Config:
    """The configuration with values for what is `auto`."""
    as_begun, processes = (None, None) if continued is None else (continued.config, continued.processes)

    def shape() -> ModelSpec:
        return architecture_of(config, task_of(config, inputs, launch))

    def decide(machine: Machine) -> tuple[Config, list[str]]:
        return auto.decide(config, shape, data, machine, as_begun, processes, log)

    machine = auto.present(device, launch)
    if launch.world > 1 and config.train.undecided != ("compile",):
        chosen, lines = _for_the_smallest(config, launch, machine, decide)
    else:
        chosen, lines = decide(machine)
    chosen, more = auto.decide_compile(chosen, device, as_begun)
    for line in (*lines, *more):
        log(line)
    return chosen


def _start(
    config: Config, cache: Cache, call: _Call, snapshot: str | None, *, is_phase: bool
) -> tuple[checkpoint.Resumed | None, str]:
    """The checkpoint that the run starts from, if any, and the id of its snapshot."""
    output = Path(config.train.output)
    resumed, _ = checkpoint.choose(output, call.resume, call.origin)  # its notes come under the run's lock
    run_snapshot = None if resumed is None or resumed.begins else resumed.document.state.snapshot
    wanted = run_snapshot if is_phase and run_snapshot is not None else snapshot or run_snapshot
    return resumed, cache.open_snapshot(wanted).id


def _newer(config: Config, cache: Cache, opened: Snapshot, snapshot: str | None, is_phase: bool) -> list[str]:
    """What to print when a resumed run could train on another snapshot."""
    other = cache.snapshot_of(str(snapshot) if is_phase else "latest")
    if other in (None, opened.id) or (snapshot is not None and not is_phase):
        return []
    if is_phase:
        return [
            f"the phase began with this snapshot and keeps it; {snapshot} is {str(other)[:12]} now: to train on that, "
            "add a phase"
        ]
    return [
        f"the run began with this snapshot and keeps it; the newest is {str(other)[:12]}: to train on that, sana-pipe "
        f"train {checkpoint.beginning(Path(config.train.output))}"
    ]


def _as_encoded(config: Config, cache: Cache, snapshot: Snapshot, log: Log) -> Config:
    """The configuration with the text that stands in front of the snapshot's captions, as the cache remembers it: the
    file may have changed since, and checkpoints and exports name it."""
    given, known = config.data.caption_prefix, changes.prefixes(cache, snapshot.head)
    if not known or given in known:
        return config
    encoded = next(filter(None, known), "")
    log(f"note: data.caption_prefix is {given!r} now; the captions of this snapshot were encoded with {encoded!r}")
    return config.model_copy(update={"data": config.data.model_copy(update={"caption_prefix": encoded})})


def _with_steps(config: Config, snapshot: Snapshot, phase: int) -> Config:
    """The configuration with the steps of `train.epochs` on a snapshot. phase: unless `train.phase` gives it.

    Raises:
        ConfigError: in so few epochs no bucket fills a batch.
    """
    train = config.train
    assert train.epochs is not None
    phase = phase if train.phase is None else train.phase
    steps = Schedule.of(snapshot.head, seed=train.seed, phase=phase).steps_upto(train.epochs)
    if not steps:
        raise ConfigError(
            f"train.epochs = {train.epochs} of snapshot {snapshot.id[:12]} are no step: no batch fills in them",
            fix="more train.epochs, train.steps instead, or a snapshot with a smaller bucket.batch",
        )
    return config.with_train(steps=steps, epochs=None)
