"""Stage `train`: a snapshot and a configuration in, a run directory with checkpoints out.

What: opens the snapshot, prints its size, decides what is `auto`, and hands the trainer a `Task` that makes the loader;
with `phases` for each phase in turn (`pipeline.training.phases`).
Why apart from the trainer: the trainer knows no cache, this file no optimizer. No encoder is imported here.
Price: a snapshot must exist; `sana-pipe encode` and `sana-pipe bucket` make it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from pipeline.cache import prompts as prompt_sets
from pipeline.cache.cache import CAPTIONS, Cache
from pipeline.cache.prompts import PromptSet
from pipeline.cache.snapshot import Snapshot
from pipeline.config import Config, ParallelConfig, PicturesConfig
from pipeline.errors import CacheError, ConfigError
from pipeline.launch import Launch, detect, resolve_device
from pipeline.loader import shard_prefetch
from pipeline.loader.loader import Loader, LoaderSettings, LoaderState, bf16
from pipeline.loader.schedule import Schedule
from pipeline.loader.validation_loader import ValidationLoader
from pipeline.models.spec import ModelSpec
from pipeline.parallel.collectives import all_gather_objects, broadcast_from_rank_0
from pipeline.parallel.mesh import Layout, open_mesh, reopening
from pipeline.planning import auto
from pipeline.planning.expectation import Expectation, expect
from pipeline.planning.predict import Data, Machine
from pipeline.processes import follow_with
from pipeline.reporting import run_pictures
from pipeline.retrying import TIMEOUT_S
from pipeline.signals.control import ControlRecipe
from pipeline.signals.latent import LatentRecipe
from pipeline.signals.text import TextRecipe
from pipeline.snapshots import heldout
from pipeline.sources import caption_rules
from pipeline.training import checkpoint, phases
from pipeline.training.assemble import recipe_of
from pipeline.training.build import architecture_of, with_text
from pipeline.training.checkpoint import Document
from pipeline.training.stop_request import StopRequest, catch_signals_of
from pipeline.training.task import Context, DrawnPrompts, Log, Report, TrainingTask
from pipeline.training.trainer import fit

T = TypeVar("T")
Choice = str | Path | None
"""Of a checkpoint or a file, as the command line names it."""
_MANY = 1000
"""Epochs that the mean length of an epoch is taken from."""
_CAPTIONS = 8
"""Captions of the snapshot that are drawn."""


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
    launch = reopening(detect(), config.train.parallel.timeout_s)
    log = (log or (lambda line: print(line, flush=True))) if launch.is_main else (lambda line: None)
    if not config.phases:
        report = _train(config, _Call(launch, resume, quarantine, origin, log), snapshot)
        return _decoded_later(config, launch, report)
    if snapshot is not None or resume not in (None, "auto"):
        raise ConfigError(
            f"--resume {resume} does not go with phases" if snapshot is None else "--snapshot does not go with phases",
            fix="give each phase its snapshot in the configuration, and --resume auto",
        )
    with catch_signals_of(launch) as stop:
        report = _chain(config, _Call(launch, resume, quarantine, origin, log), stop)
    return _decoded_later(config, launch, report)


def _decoded_later(config: Config, launch: Launch, report: Report) -> Report:
    """Let the first process of a finished run decode what was drawn once it has ended: then no process holds the
    transformer."""
    output = Path(config.train.output)
    if report.stopped_by is None and report.checkpoint is not None and launch.is_main and run_pictures.files(output):
        folder = report.checkpoint.parent.parent
        pictures = (config.of_phase(folder.name) if config.phases else config).train.pictures
        if pictures is not None and pictures.decode:
            follow_with("finish", "--run", str(output), "--config", str(folder / "config.yaml"))
    return report


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
    parallel = ParallelConfig(timeout_s=config.train.parallel.timeout_s)
    with open_mesh(launch, parallel, torch.device("cpu")):
        return broadcast_from_rank_0(function)


def _for_the_smallest(config: Config, launch: Launch, machine: Machine, function: Callable[[Machine], T]) -> T:
    """What the first process chooses for the smallest memory of all devices, on every process. It chooses between two
    process groups, since a prediction opens one that sends nothing."""
    parallel, chosen = ParallelConfig(timeout_s=max(600, config.train.parallel.timeout_s)), Future[T]()
    with open_mesh(launch, parallel, torch.device("cpu")):
        memory = min(all_gather_objects(machine.memory))
    if launch.is_main:
        try:
            chosen.set_result(function(replace(machine, memory=memory)))
        except Exception as error:
            chosen.set_exception(error)
    with open_mesh(launch, parallel, torch.device("cpu")):
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
    if resumed is not None and "phase" not in config.train.model_fields_set:
        config = config.with_train(phase=resumed.phase)
    opened = cache.open_snapshot(chosen)
    samples = sum(bucket.samples for bucket in opened.buckets)
    log(f"snapshot {opened.id[:12]}: {samples} samples in {len(opened.buckets)} buckets")
    if launch.is_main and continued is not None:
        for line in _newer(config, cache, opened, snapshot, stop is not None):
            log(line)
    if (warning := shard_prefetch.advice(opened)) is not None:
        log(warning)
    if config.train.epochs is not None:
        config = _with_steps(config, opened)
        log(f"{config.train.steps} steps: train.epochs of this snapshot")
    config, inputs = _inputs(config, cache, opened, resumed, log)
    data, device = Data.of(config, opened), resolve_device(config.train.device, launch)
    config = with_text(config, device)
    if config.train.undecided:
        config = _decided(config, inputs, launch, device, data, continued, log)

    def predicted(context: Context) -> Expectation | None:
        given = context.config
        return expect(given, lambda: architecture_of(given, context.task), data, device, launch, context.log)

    given = replace(
        task(config, inputs, launch, call.quarantine), expect=predicted, accepted=partial(inputs.keep, cache)
    )
    return fit(config, given, launch, resume=call.resume, origin=call.origin, log=log, stop=stop)


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
        return architecture_of(config, task(config, inputs, launch))

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


def _with_steps(config: Config, snapshot: Snapshot) -> Config:
    """The configuration with the steps of `train.epochs` on a snapshot.

    Raises:
        ConfigError: in so few epochs no bucket fills a batch.
    """
    train = config.train
    assert train.epochs is not None
    steps = Schedule.of(snapshot.head, seed=train.seed, phase=train.phase).steps_upto(train.epochs)
    if not steps:
        raise ConfigError(
            f"train.epochs = {train.epochs} of snapshot {snapshot.id[:12]} are no step: no batch fills in them",
            fix="more train.epochs, train.steps instead, or a snapshot with a smaller bucket.batch",
        )
    return config.with_train(steps=steps, epochs=None)


@dataclass(frozen=True)
class Inputs:
    """What a run reads from the cache.

    Attributes:
        heldout: the samples that it is validated on. old_heldout: those of them that an earlier run was validated on,
            too. prompts: sets of the pictures that it draws. preserved: text rows of `train.preserve.prompt`.
    """

    snapshot: Snapshot
    heldout: Snapshot | None = None
    old_heldout: Snapshot | None = None
    prompts: Sequence[PromptSet] = ()
    preserved: list[np.ndarray] = field(default_factory=list)

    def keep(self, cache: Cache) -> None:
        """Keep the snapshots from `gc`.

        Raises:
            UserError: training and held-out samples overlap.
        """
        cache.keep(self.snapshot.id)
        if self.heldout is not None:
            heldout.check_disjoint(self.snapshot, self.heldout)
            cache.keep(self.heldout.id)
        if self.old_heldout is not None:
            cache.keep(self.old_heldout.id)


def _inputs(
    config: Config, cache: Cache, snapshot: Snapshot, resumed: checkpoint.Resumed | None, log: Log
) -> tuple[Config, Inputs]:
    """The inputs of a run, and its configuration with their ids. A resumed run keeps its choice."""
    config, part = _heldout(config, cache, snapshot, resumed, log)
    config, old = _old_heldout(config, cache, part, resumed, log)
    if config.train.controlnet is None or config.train.pictures is None:
        config, prompts = _prompts(config, cache, snapshot, resumed, log)
    else:
        config, prompts = _controlled(config, part or snapshot, log)
    return config, Inputs(snapshot, part, old, prompts, _preserved(config, cache, snapshot))


def _heldout(
    config: Config, cache: Cache, snapshot: Snapshot, resumed: checkpoint.Resumed | None, log: Log
) -> tuple[Config, Snapshot | None]:
    """The snapshot to validate on, if any, and the configuration with its id."""
    validation = config.train.validation
    if validation is None:
        if (there := heldout.find(cache, snapshot)) is not None:
            log(f"note: snapshot {there[:12]} was held out of this one; --set train.validation={{}} validates on it")
        return config, None
    name = validation.snapshot
    if name is None and resumed is not None and not resumed.begins:
        then = resumed.document
        name = _validated_on(then, "snapshot") if then.state.snapshot == snapshot.id else None
    name = name or heldout.find(cache, snapshot)
    if name is None:
        raise ConfigError(
            f"train.validation: nothing was held out of snapshot {snapshot.id[:12]}, as far as names show",
            fix=f"{_hold_out(snapshot)} (a larger share if there are few pictures), or --set "
            "train.validation.snapshot=NAME, or --set train.validation=null",
        )
    part = cache.open_snapshot(name)
    heldout.check(snapshot, part)
    log(f"validation: {min(len(part), validation.samples)} of {len(part)} samples of snapshot {part.id[:12]}")
    if leaked := _leaked(snapshot, part):
        log(
            f"warning: {leaked} of them look like a sample that is trained on, so the loss on them is not of unseen "
            "pictures; sana-pipe bucket --set bucket.heldout=0.01 holds out a part without copies"
        )
    return config.with_train(validation=validation.model_copy(update={"snapshot": part.id})), part


def _leaked(snapshot: Snapshot, part: Snapshot) -> int:
    """Samples of a held-out part that look like one of the training, as far as `bucket` counted them."""
    return (snapshot.head.leaked or {}).get(part.id, 0)


def _hold_out(snapshot: Snapshot) -> str:
    """The command that makes a held-out part; for a snapshot that had one, of the same pictures."""
    side = snapshot.head.policies.heldout
    return f"sana-pipe bucket --set bucket.heldout={0.01 if side is None else side.share}"


def _old_heldout(
    config: Config, cache: Cache, part: Snapshot | None, resumed: checkpoint.Resumed | None, log: Log
) -> tuple[Config, Snapshot | None]:
    """The snapshot of the old held-out samples, if there are old and new ones, and the configuration with its id."""
    validation = config.train.validation
    if part is None or validation is None:
        return config, None
    old = None if validation.old is None else cache.open_snapshot(validation.old)
    if old is None and resumed is not None:
        then = _validated_on(resumed.document, "snapshot" if resumed.begins else "old")
        try:
            old = None if then is None else cache.open_snapshot(then)
        except CacheError as error:
            log(f"note: old and new held-out samples are not told apart: {error.line}")
    if old is None or old.id == part.id:
        return config, None
    return config.with_train(validation=validation.model_copy(update={"old": old.id})), old


def _validated_on(document: Document, field: str) -> str | None:
    return (document.config["train"].get("validation") or {}).get(field)


def _prompts(
    config: Config, cache: Cache, snapshot: Snapshot, resumed: checkpoint.Resumed | None, log: Log
) -> tuple[Config, Sequence[PromptSet]]:
    """The prompt sets to draw, if any, and the configuration with the id of the set, or `CAPTIONS`."""
    pictures, recipe = config.train.pictures, snapshot.recipe(TextRecipe)
    if pictures is None:
        return config, ()
    name = pictures.prompts
    if name is None and resumed is not None and not resumed.begins:
        name = (resumed.document.config["train"].get("pictures") or {}).get("prompts")
    if name is None and prompt_sets.newest(cache, prompt_sets.NAME) is None:
        name = CAPTIONS
    if name != CAPTIONS:
        chosen = prompt_sets.open_prompts(cache, name, recipe)
        log(f"pictures: {len(chosen)} prompts of set {chosen.id[:12]} every {pictures.every} steps")
        return config.with_train(pictures=pictures.model_copy(update={"prompts": chosen.id})), (chosen,)
    sets = [prompt_sets.of_snapshot(snapshot, _CAPTIONS)]
    if (trigger := prompt_sets.newest(cache, prompt_sets.TRIGGER)) is not None and trigger.recipe == recipe:
        sets.append(trigger)
    if not any(map(len, sets)):
        log("note: no pictures are drawn: all captions are empty (sana-pipe encode --prompts FILE has others)")
        return config.with_train(pictures=None), ()
    counted = f"{len(sets[0])} captions of the snapshot" + "".join(f", {len(more)} prompts" for more in sets[1:])
    log(f"pictures: {counted}, every {pictures.every} steps")
    return config.with_train(pictures=pictures.model_copy(update={"prompts": CAPTIONS})), sets


def _controlled(config: Config, snapshot: Snapshot, log: Log) -> tuple[Config, Sequence[PromptSet]]:
    """Captions that are drawn with the controls of their samples, all of one bucket, and the configuration with
    `CAPTIONS`."""
    pictures = config.train.pictures
    assert pictures is not None
    _check_kinds([snapshot], [ControlRecipe.kind])
    wanted, buckets = (pictures.height, pictures.width), snapshot.buckets
    fitting = [
        number
        for number, bucket in enumerate(buckets)
        if bucket.samples and wanted[0] in (None, bucket.height) and wanted[1] in (None, bucket.width)
    ]
    if not fitting:
        raise ConfigError(
            "train.pictures: a ControlNet's pictures have the shape of their controls, which is that of a bucket",
            expected=", ".join(f"{bucket.height}x{bucket.width}" for bucket in buckets),
            found="x".join("any" if side is None else str(side) for side in wanted),
            fix="--set train.pictures.height=null --set train.pictures.width=null",
        )
    number = max(fitting, key=lambda number: buckets[number].samples)
    bucket, first = buckets[number], snapshot.row(number, 0)
    chosen = prompt_sets.of_snapshot(snapshot, _CAPTIONS, range(first, first + bucket.samples))
    if not len(chosen):
        log("note: no pictures are drawn: all captions are empty")
        return config.with_train(pictures=None), ()
    of = f"samples of snapshot {snapshot.id[:12]}, {bucket.height}x{bucket.width}"
    log(f"pictures: {len(chosen)} captions and controls of {of}, every {pictures.every} steps")
    return config.with_train(pictures=pictures.model_copy(update={"prompts": CAPTIONS})), (chosen,)


def _preserved(config: Config, cache: Cache, snapshot: Snapshot) -> list[np.ndarray]:
    """Text rows of `train.preserve.prompt`."""
    recipe, found = snapshot.recipe(TextRecipe), []
    for prompt in [] if config.train.preserve is None else config.train.preserve.prompts:
        rows = prompt_sets.find_rows(cache, recipe, prompt, caption_rules.normalise)
        if rows is None:
            raise ConfigError(
                f"train.preserve.prompt: the cache holds no record of {prompt!r} by the snapshot's text recipe",
                fix="sana-pipe encode --prompts FILE, with these prompts as lines of FILE",
            )
        found.append(rows)
    return found


def _check_kinds(snapshots: Sequence[Snapshot], kinds: Sequence[str]) -> None:
    """Refuse snapshots without the further pictures that a recipe reads."""
    for snapshot in snapshots:
        if lacking := [kind for kind in kinds if kind not in snapshot.pictures]:
            raise ConfigError(
                f"snapshot {snapshot.id[:12]} has no {' or '.join(lacking)} records, which this training reads",
                found=", ".join(snapshot.pictures),
                fix=f"set data.pictures.{lacking[0]}, then sana-pipe encode and sana-pipe bucket",
            )


def task(config: Config, inputs: Inputs, launch: Launch, quarantine: Choice = None) -> TrainingTask:
    """The data of a run."""
    snapshot, part = inputs.snapshot, inputs.heldout
    train, kinds = config.train, recipe_of(config.train).pictures

    def check(layout: Layout) -> None:
        _check_kinds([snapshot] if part is None else [snapshot, part], kinds)
        if quarantine is not None and layout.model_parallel_size > 1:
            raise ConfigError(
                f"--quarantine with train.parallel.tp_size = {layout.tp} and pp_size = {layout.pp}: "
                "processes that share a batch each read it themselves; if only one of them finds a "
                "record unreadable, they go on with different samples",
                fix="train without --quarantine: a bad record then stops the run and is named (sana-pipe verify "
                "--repair)",
            )

    def settings(layout: Layout, start: int, stop: int) -> LoaderSettings:
        return LoaderSettings(
            seed=train.seed,
            phase=train.phase,
            rank=layout.data_rank(launch.rank),
            world=layout.data_world,
            microbatch=train.microbatch,
            caption_drop=train.caption_drop,
            null_mask=train.null_mask,
            prefetch=train.prefetch,
            threads=train.loader_threads,
            start_step=start,
            stop_step=stop,
            prefetch_mib=train.prefetch_mib,
            text=train.text or "padded",
            pictures=kinds,
            length_window=train.length_window,
            pin=resolve_device(train.device, launch).type == "cuda",
            timeout_s=config.patience_s + 2 * TIMEOUT_S,  # readers of a store give up first
            quarantine=quarantine,
        )

    def validation(layout: Layout) -> ValidationLoader:
        assert part is not None and train.validation is not None
        training, seed = settings(layout, 0, 0), train.validation.seed
        fixed = replace(training, seed=seed, phase=0, caption_drop=0.0, length_window=0, quarantine=None)
        return ValidationLoader(part, fixed, train.validation.samples)

    drawn = _pictures(config, inputs) if inputs.prompts else None
    return TrainingTask(
        first_state=LoaderState(snapshot.id, train.seed, train.phase, 0, train.length_window),
        channels=snapshot.recipe(LatentRecipe).channels,
        text_width=snapshot.recipe(TextRecipe).width,
        sample_size=config.data.resolution // snapshot.recipe(LatentRecipe).compression,
        loader=lambda layout, start, stop: Loader(snapshot, settings(layout, start, stop)),
        batches={f"{bucket.height}x{bucket.width}": bucket.batch for bucket in snapshot.buckets},
        names=snapshot.names,
        epoch_steps=Schedule.of(snapshot.head, seed=train.seed, phase=train.phase).steps_upto(_MANY) / _MANY,
        validation=None if part is None else validation,
        leaked=0 if part is None else _leaked(snapshot, part),
        old_samples=None if inputs.old_heldout is None else np.concatenate([*inputs.old_heldout.sample_ids()]),
        pictures=drawn,
        preserved=[bf16(rows) for rows in inputs.preserved],
        check=check,
    )


def _pictures(config: Config, inputs: Inputs) -> DrawnPrompts:
    settings, sets = config.train.pictures or PicturesConfig(), inputs.prompts
    recipe, drawn_from = inputs.snapshot.recipe(LatentRecipe), inputs.heldout or inputs.snapshot
    places = [(prompts, number) for prompts in sets for number in range(len(prompts))]

    def rows(number: int) -> torch.Tensor:
        prompts, place = places[number]
        return bf16(prompts.rows(place))

    def null() -> tuple[torch.Tensor, torch.Tensor]:
        rows, mask = sets[0].null()
        return bf16(rows), torch.from_numpy(mask)

    drawn = DrawnPrompts(
        texts=tuple(text for prompts in sets for text in prompts.texts),
        rows=rows,
        null=null,
        height=settings.height or config.data.resolution,
        width=settings.width or config.data.resolution,
        compression=recipe.compression,
        names={
            "latent_recipe": recipe.id,
            "latent": recipe.values(),
            "prompt_set": "+".join(prompts.id for prompts in sets),
        },
    )
    if config.train.controlnet is None:
        return drawn
    samples = [drawn_from.sample(row) for row in sets[0].samples]
    bucket = drawn_from.buckets[samples[0].bucket]
    controls = {"snapshot": drawn_from.id, "samples": [sample.sample_id for sample in samples]}
    return replace(
        drawn,
        height=bucket.height,
        width=bucket.width,
        names={**drawn.names, "controls": controls},
        control=lambda number: bf16(drawn_from.picture(samples[number], ControlRecipe.kind)),
    )
