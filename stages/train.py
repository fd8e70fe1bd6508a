"""Stage `train`: a snapshot and a configuration in, a run directory with checkpoints out.

What: opens the snapshot and what else the run reads (`snapshots.opening`), decides what is `auto`, and calls
the trainer. A finished run gets its `summary.json`. No encoder is imported here.
Price: a snapshot must exist; `sana-pipe encode` and `sana-pipe bucket` make it.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from sana_pipe.base.errors import ConfigError
from sana_pipe.base.launch import Launch, check_compiler, detect, resolve_device
from sana_pipe.base.processes import follow_with
from sana_pipe.config import Config, reads, written
from sana_pipe.data.cache import readers
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.prompts import PromptSet
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.loader import shard_prefetch
from sana_pipe.data.loader.inputs import Inputs
from sana_pipe.data.loader.schedule import Schedule
from sana_pipe.data.snapshots import opening, provenance
from sana_pipe.tools.locations import cache_location
from sana_pipe.tools.planning import auto
from sana_pipe.tools.planning.expectation import Expectation, expect
from sana_pipe.tools.planning.predict import Data, Machine
from sana_pipe.tools.planning.search import Search
from sana_pipe.tools.reporting import run_pictures
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.parallel.mesh import agreed_device, reopening
from sana_pipe.train.training import changes, checkpoint, summary
from sana_pipe.train.training.assemble import objective_of
from sana_pipe.train.training.build import architecture_of, text_layout
from sana_pipe.train.training.checkpoint import Document
from sana_pipe.train.training.inputs import task_of
from sana_pipe.train.training.task import Context, Log, Report, TrainingTask, WrittenConfiguration
from sana_pipe.train.training.trainer import fit

Choice = str | Path | None
"""The choice of a checkpoint or a file, as the command line names it."""


def run(
    config: Config,
    snapshot: str | None = None,
    resume: Choice = None,
    quarantine: Choice = None,
    log: Callable[[str], None] | None = None,
    origin: Choice = None,
) -> Report:
    """Train on a snapshot.

    Args:
        snapshot: a name, an id or a prefix of one; None is the newest, for a resumed run the snapshot it began with.
        resume: None, `auto` or a checkpoint folder.
        quarantine: file that lists unreadable records; other samples then substitute for theirs.
        log: prints one line (default: print, flushed); called on the first process only.
        origin: a checkpoint or run directory that a new run begins from (`--from`): with the same seed order
            and noise are others.

    Raises:
        UserError: no snapshot, one that does not fit the model or that `gc` elsewhere may remove, a run directory in
            use, and whatever `training.checks` refuses.
    """
    launch = reopening(detect(), config.patience_s)
    log = (log or (lambda line: print(line, flush=True))) if launch.is_main else (lambda line: None)
    report = _train(config, _Call(launch, resume, quarantine, origin, log), snapshot)
    _decode_later(config, launch, report)
    return report


def _decode_later(config: Config, launch: Launch, report: Report) -> None:
    """Let the first process of a finished run decode what was drawn once it has ended: then no process holds the
    transformer. Not with several nodes: the others would wait."""
    output, one_node = Path(config.train.output), launch.world == launch.local_world
    finished = report.stopped_by is None and report.checkpoint is not None
    if finished and one_node and launch.is_main and config.train.pictures is not None and run_pictures.files(output):
        follow_with("finish", "--run", str(output), "--config", str(output / "config.yaml"))


@dataclass(frozen=True)
class _Call:
    """A process of the launch, and what `run` was asked for."""

    launch: Launch
    resume: Choice
    quarantine: Choice
    origin: Choice
    log: Log


def _summarize(last: Path, snapshot: Snapshot, log: Log) -> None:
    """Write the summary of a finished run, and print it next to those of the runs that it began from."""
    summary.summarize(last, checkpoint.read_document(last).state, snapshot.head)
    if len(summaries := summary.rounds(last.parents[1])) > 1:
        for line in summary.table(summaries):
            log(line)


def _train(config: Config, call: _Call, snapshot: str | None) -> Report:
    cache, launch, log = cache_location(config).open(), call.launch, call.log
    resumed, chosen = _start(config, cache, call, snapshot)
    continued = None if resumed is None or resumed.begins else resumed.document
    opened = cache.open_snapshot(chosen)
    samples = sum(bucket.samples for bucket in opened.buckets)
    content = f" (content {opened.head.content_id[:12]})" if opened.head.content_id else ""
    log(f"snapshot {opened.id[:12]}{content}: {samples} samples in {len(opened.buckets)} buckets")
    if launch.is_main and continued is not None:
        for line in _newer(config, cache, opened, snapshot):
            log(line)
    if (warning := shard_prefetch.advice(opened)) is not None:
        log(warning)
    if config.train.epochs is not None:
        config = _with_steps(config, opened, 0 if resumed is None else resumed.phase)
        log(f"{config.train.steps} steps: train.epochs on this snapshot")
    if snapshot is None and continued is not None and continued.state.step >= config.train.steps:
        differing = provenance.since(cache, continued.state.snapshot, cache.snapshot_of("latest"))
        lines = [*changes.of_weights(config.model.weights, continued), *differing]
        changes.refuse(Path(config.train.output), lines)
    config = _as_encoded(config, cache, opened, log)
    config, inputs = open_inputs(config, cache, opened, resumed, log)
    data = Data.of(opened)
    device = agreed_device(launch, cache.patience_s, partial(_device, config, launch, log))
    config = config.with_train(text=text_layout(config.train, device))
    if config.train.undecided:
        config = _decided(config, inputs, launch, device, data, continued, log)

    def predicted(context: Context) -> Expectation | None:
        shape = partial(architecture_of, config.model, context.task.sample_size)
        return expect(config.train, shape, data, device, launch, context.log)

    with ExitStack() as reading:
        given = replace(
            training_task(config, inputs, launch, call.quarantine),
            expect=predicted,
            accepted=partial(_accepted, config, cache, inputs, reading),
            earlier_id="" if continued is None else _earlier_id(cache, opened, continued.state.snapshot),
        )
        report = fit(config.train, given, launch, resume=call.resume, origin=call.origin, log=log)
    if launch.is_main and report.stopped_by is None and report.checkpoint is not None:
        _summarize(report.checkpoint, opened, log)
    return report


def _earlier_id(cache: Cache, opened: Snapshot, began_with: str) -> str:
    """The id that a run began with, if the cache says that the opened snapshot has the same samples; else ""."""
    return began_with if began_with != opened.id and cache.snapshot_of(began_with) == opened.id else ""


def _accepted(config: Config, cache: Cache, inputs: Inputs, reading: ExitStack) -> None:
    """Name the snapshots of an accepted run and say that it reads them, until `reading` ends. On the first process."""
    run, host = str(Path(config.train.output).resolve()), platform.node()
    opening.keep(cache, inputs, run, host)
    snapshots = [each.id for each in (inputs.snapshot, inputs.heldout, inputs.old_heldout) if each is not None]
    reading.enter_context(readers.reading(cache, snapshots, run, host))


def open_inputs(
    config: Config, cache: Cache, snapshot: Snapshot, resumed: checkpoint.Resumed | None, log: Log
) -> tuple[Config, Inputs]:
    """Open what a run reads next to its snapshot; returns the configuration with the ids of what was chosen, too. A
    resumed run keeps its choice."""
    for note in opening.unused_records(snapshot, objective_of(config.train).pictures):
        log(note)
    config, part = _validated_on(config, cache, snapshot, resumed, log)
    earlier = None if part is None or resumed is None else (resumed.began_from or {}).get("heldout")
    old = None if part is None else opening.earlier_part(cache, part, earlier, log)
    config, prompts = _drawn(config, cache, snapshot, part, resumed, log)
    preserve = config.train.preserve
    rows = opening.preserved_rows(cache, snapshot, () if preserve is None else preserve.prompts)
    phase = 0 if resumed is None else resumed.phase
    return config, Inputs(snapshot, config.data.resolution, part, old, prompts, rows, phase)


def _validated_on(
    config: Config, cache: Cache, snapshot: Snapshot, resumed: checkpoint.Resumed | None, log: Log
) -> tuple[Config, Snapshot | None]:
    """The configuration with the id of the snapshot that the run is validated on, and that snapshot, if any."""
    validation = config.train.validation
    if validation is None:
        for note in opening.unused_part(cache, snapshot):
            log(note)
        return config, None
    name = validation.snapshot or (resumed and resumed.as_begun("validation.snapshot"))
    part = opening.held_out(cache, snapshot, name, validation.samples, log)
    return config.with_train(validation=validation.model_copy(update={"snapshot": part.id})), part


def _drawn(
    config: Config,
    cache: Cache,
    snapshot: Snapshot,
    part: Snapshot | None,
    resumed: checkpoint.Resumed | None,
    log: Log,
) -> tuple[Config, Sequence[PromptSet]]:
    """The configuration with the name of the prompts that the run draws, and their sets, if any."""
    pictures = config.train.pictures
    if pictures is None:
        return config, ()
    if config.train.controlnet is not None:
        prompts = opening.controls_to_draw(part or snapshot, pictures.size)
    else:
        name = pictures.prompts or (resumed and resumed.as_begun("pictures.prompts"))
        prompts = opening.prompts_to_draw(cache, snapshot, name)
    if not prompts:
        log("note: no pictures are drawn: all captions are empty (sana-pipe encode --prompts FILE gives prompts)")
        return config.with_train(pictures=None), ()
    log(f"pictures: {prompts.described}, every {pictures.every} steps")
    return config.with_train(pictures=pictures.model_copy(update={"prompts": prompts.name})), prompts.sets


def training_task(config: Config, inputs: Inputs, launch: Launch, quarantine: Choice = None) -> TrainingTask:
    """The task of a run: its data, and what it needs of the other sections."""
    tree = WrittenConfiguration(written(config), partial(reads, "train"))
    task = task_of(config.train, inputs, launch, quarantine, model=config.model, sample=config.sample, written=tree)
    return replace(task, textfile=config.metrics.textfile)


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
    begun = None if continued is None else auto.Begun(continued.config["train"], continued.processes)

    def decide(machine: Machine) -> tuple[TrainConfig, list[str]]:
        def search() -> Search:
            return Search(architecture_of(config.model, inputs.sample_size), data, machine, config.supports)

        return auto.decide(config.train, machine, search, begun, log)

    machine = auto.present(device, launch)
    if launch.world > 1 and config.train.undecided != ("compile",):
        chosen, lines = auto.for_the_smallest(launch, machine, decide, config.patience_s)
    else:
        chosen, lines = decide(machine)
    chosen, more = auto.decide_compile(chosen, device, begun)
    for line in (*lines, *more):
        log(line)
    return config.model_copy(update={"train": chosen})


def _start(config: Config, cache: Cache, call: _Call, snapshot: str | None) -> tuple[checkpoint.Resumed | None, str]:
    """The checkpoint that the run starts from, if any, and the id of its snapshot."""
    output = Path(config.train.output)
    resumed, _ = checkpoint.choose(output, call.resume, call.origin)  # its notes come under the run's lock
    run_snapshot = None if resumed is None or resumed.begins else resumed.document.state.snapshot
    return resumed, cache.open_snapshot(snapshot or run_snapshot).id


def _newer(config: Config, cache: Cache, opened: Snapshot, snapshot: str | None) -> list[str]:
    """Return what to print when a resumed run could train on another snapshot."""
    other = cache.snapshot_of("latest")
    if other in (None, opened.id) or snapshot is not None:
        return []
    return [
        f"the run began with this snapshot and keeps it; the newest is {str(other)[:12]}; to train on it: sana-pipe "
        f"train {checkpoint.beginning(Path(config.train.output))}"
    ]


def _as_encoded(config: Config, cache: Cache, snapshot: Snapshot, log: Log) -> Config:
    """The configuration with the text that stands in front of the snapshot's captions, as the cache remembers it: the
    file may have changed since, and checkpoints and exports name it."""
    given, known = config.data.caption_prefix, provenance.prefixes(cache, snapshot.head)
    if not known or given in known:
        return config
    encoded = next(filter(None, known), "")
    log(f"note: data.caption_prefix is {given!r} now; the captions of this snapshot were encoded with {encoded!r}")
    return config.model_copy(update={"data": config.data.model_copy(update={"caption_prefix": encoded})})


def _with_steps(config: Config, snapshot: Snapshot, phase: int) -> Config:
    """The configuration with the steps of `train.epochs` on a snapshot. phase: of the order of its samples.

    Raises:
        ConfigError: in so few epochs no bucket fills a batch.
    """
    train = config.train
    assert train.epochs is not None
    steps = Schedule.of(snapshot.head, seed=train.seed, phase=phase).steps_upto(train.epochs)
    if not steps:
        raise ConfigError(
            f"train.epochs = {train.epochs} on snapshot {snapshot.id[:12]} makes no step: no bucket fills a batch",
            fix="more train.epochs, train.steps instead, or a snapshot with a smaller bucket.batch",
        )
    return config.with_train(steps=steps, epochs=None)
