"""`sana-pipe encode`: sources to the cache, one encoder in memory at a time.

Scan and plan, then encode text that is missing, then latents. Of several processes one judges the scan and plans, and
the others read its result (see `encoding.fragments`). Running the same command again continues; with nothing
new it loads no model. Prompts (`--prompts`) are text without pictures; the worker that finds all their records
publishes the set.
"""

from __future__ import annotations

import json
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import click

from sana_pipe.base import launch, retrying
from sana_pipe.base.amounts import amount
from sana_pipe.base.errors import IntegrityError, NoSpaceError, UserError
from sana_pipe.config import Config, shared
from sana_pipe.data import signals
from sana_pipe.data.cache import copies, layout, status, withdrawn
from sana_pipe.data.cache import prompts as prompt_sets
from sana_pipe.data.cache.cache import Cache, WorkList
from sana_pipe.data.cache.encodings import CaptionEncoding, Encoding, caption_of
from sana_pipe.data.cache.files import Files
from sana_pipe.data.encoders.text import count_rows
from sana_pipe.data.encoding import (
    estimate,
    image_batch,
    imported_latents,
    refusals,
    scan_rows,
    source_plan,
    understood,
    unit_encoder,
)
from sana_pipe.data.encoding import plan as planning
from sana_pipe.data.encoding import prompts as prompt_lists
from sana_pipe.data.encoding import rejects as rejecting
from sana_pipe.data.encoding import scan as scanning
from sana_pipe.data.encoding import survey as surveying
from sana_pipe.data.encoding.encoder_settings import EncoderSettings
from sana_pipe.data.encoding.fragments import Fragments, ScanSuperseded
from sana_pipe.data.encoding.reading import Reading
from sana_pipe.data.encoding.rejects import Rejects
from sana_pipe.data.encoding.source_plan import SourcePlan, WorkLists
from sana_pipe.data.encoding.unit_encoder import UnitEncoder
from sana_pipe.data.images import buckets
from sana_pipe.data.signals import PictureSignal
from sana_pipe.data.signals.text import TextEncoding
from sana_pipe.data.sources import caption_signs
from sana_pipe.data.sources.reject_kinds import Kinds
from sana_pipe.data.sources.source import Source
from sana_pipe.data.work import alike, claims, disk_space, ray_engine
from sana_pipe.data.work.engine import Work, Worker, make_units, missing_units
from sana_pipe.data.work.progress import Meter, Progress
from sana_pipe.data.work.progress_rows import ProgressRows
from sana_pipe.data.work.stop import Stop, Stopped
from sana_pipe.tools.locations import cache_location


def run(
    config: Config,
    data: str | None,
    source_name: str | None = None,
    rehash: bool = False,
    task_index: int | None = None,
    task_count: int | None = None,
    format: str | None = None,
    engine: str = "local",
    as_json: bool = False,
    prompts: str | None = None,
    prompts_name: str = prompt_sets.NAME,
) -> dict[str, Any]:
    """Encode a source, prompts, or both into the cache.

    Args:
        data: a folder, tars, tables or a listing; see `sources.detect`. None: prompts only.
        source_name: the source's name in the cache; default: the folder's name.
        format: what `data` is; default: detected.
        rehash: read every file again instead of trusting size and mtime.
        task_index, task_count: this process's share of the missing units; default: what the launcher says.
        engine: `local`, or `ray` (this process hands the units to a cluster).
        as_json: print the result as one JSON object; everything else goes to stderr.
        prompts: a file of prompts; see `encoding.prompts.read`. None: with `data.caption_prefix` those of
            `prompt_lists.of_trigger`, as the set `TRIGGER`.
        prompts_name: of their set.

    Returns:
        Counts: `images`, `captions` (made by this run), `rejects` (of the source), `left` (units that other workers
        were making, or that wait for another source), `items`; `speed`: for `captions` and `images` what
        `Progress.figures` says. `prompts`: `name`, `id` (None: other workers have not finished), `prompts` and `new`
        (records made or planned by this call). Without `data`: `captions`, `left`, `speed` and `prompts` only.
        `{"stopped": NAME}` if a signal ended the run.

    Raises:
        UserError: see the messages.
    """
    stop = Stop()
    with _text_on_stderr(as_json):
        try:
            with stop.signals():
                share = _tasks(task_index, task_count, engine)
                _check_alike(config, share, source_name or data or prompts_name)
                prompt_sets.check_prompts_name(prompts_name)
                asked = None if prompts is None else (prompts_name, prompt_lists.read(prompts, config.patience_s))
                if data is None:
                    assert asked is not None
                    done = _run_prompts(config, *asked, share, engine, stop)
                else:
                    config, source, reading = opened(config, data, source_name, format, repairs=True)
                    prefix = config.data.caption_prefix
                    if asked is not None:
                        lines, notes = prompt_lists.with_trigger(asked[1], prefix)
                        asked = prompts_name, lines
                        for line in notes:
                            click.echo(line, err=True)
                    elif prefix.strip():
                        asked = prompt_sets.TRIGGER, prompt_lists.of_trigger(prefix)
                    done = _run(config, reading, source, rehash, share, engine, stop, asked)
        except Stopped:
            click.echo(f"stopped by {stop.name}; no unit of work is half done: run the same command again to continue")
            done = {"stopped": stop.name}
    if as_json:
        click.echo(json.dumps(done))
    return done


def _check_alike(config: Config, share: tuple[int, int], work: str) -> None:
    """Raise a UserError if another process of this launch has other options."""
    if share[1] > 1 and (named := launch.identity()) is not None:
        place = f"process {share[0]} on {platform.node()}"
        alike.check(cache_location(config).open(create=True), named, work, shared(config), place)


def dry_run(
    config: Config,
    data: str,
    source_name: str | None = None,
    rehash: bool = False,
    task_index: int | None = None,
    task_count: int | None = None,
    format: str | None = None,
    engine: str = "local",
    probe: bool = True,
    as_json: bool = False,
) -> int:
    """Print what `run` would do; nothing is written.

    Args:
        probe: encode a few batches for an estimate of the time.
        as_json: print the estimate as one JSON object; everything else goes to stderr.

    Returns:
        0, or `NoSpaceError.exit_code` if the space does not suffice.

    Raises:
        RejectRateError: too many rejects, or nothing is usable; after the report.
        UserError: see the messages; no cache can be made there, a source or a model cannot be read.
    """
    with _text_on_stderr(as_json):
        tasks = _tasks(task_index, task_count, engine)[1]
        config, source, reading = opened(config, data, source_name, format)
        encodings = signals.encodings(signals.Encoders(config.vae, config.text), config.data, config.encode)
        survey = surveying.survey(source, reading, cache_location(config).open_if_there(), encodings, rehash)
        work, encodings = survey.work, survey.encodings
        count = partial(count_rows, config.text)
        sizes, times = estimate.sizes(work, caption_of(encodings), count), None
        if probe:
            device = unit_encoder.device(config.encode.device)
            speed = estimate.probe(work, source, encodings, _encoder_settings(config), device)
            times = estimate.times(work, sizes, speed, config.encode.workers, tasks)
        free = Files(config.cache, config.mirror, config.patience_s).free_bytes()
        report = estimate.report(source, work, sizes, free, disk_space.RESERVE, times)
        taken = understood.of(source, survey.scan, config.data)
        normalisation = caption_of(encodings).normalisation
        fit = [
            *taken.lines(config.data, normalisation),
            *caption_signs.emptied(survey.scan, normalisation),
            *surveying.fit_notes(survey.scan, survey.table, config.data),
        ]
        for line in [*estimate.lines(report, config.cache), *fit]:
            click.echo(line)
    if as_json:
        click.echo(json.dumps(report))
    most, rejects = config.encode.max_reject_rate, work.rejects
    if rejecting.too_many(report["items"], rejects.total, rejecting.faults(survey.scan), most):
        rejecting.refuse(source, report["items"], rejects, most, "look at the reasons above", None, taken.remedy)
    refusals.refuse(taken, reading.given, survey.scan, survey.cache)
    return NoSpaceError.exit_code if report["enough_space"] is False else 0


def reading_of(config: Config, format: str | None = None) -> Reading:
    """The way to read a source that a configuration and `--format` ask for."""
    return Reading(config.data, config.encode, config.data_given, format)


def opened(
    config: Config, data: str, name: str | None, format: str | None, *, repairs: bool = False
) -> tuple[Config, Source, Reading]:
    """Open the source of `--data`; prints what differs from its last scan.

    Args:
        data, name, format: as of `run`.
        repairs: write a damaged `format.json` of the cache again.

    Returns:
        The configuration with the values with which the source is read, the source, and how it is read.
    """

    def scan_of(name: str) -> dict[str, Any] | None:
        try:
            cache = cache_location(config).open_if_there()
        except IntegrityError:
            if not repairs:
                raise
            cache = cache_location(config).open(create=True)
        return None if cache is None else cache.last_scan(name)

    raw = config.text.prompting == "nvlabs"
    source, reading = surveying.opened(
        data, name, reading_of(config, format), scan_of, patience_s=config.patience_s, raw=raw
    )
    return config.model_copy(update={"data": reading.data, "encode": reading.encode}), source, reading


def _encoder_settings(config: Config) -> EncoderSettings:
    return EncoderSettings(signals.Encoders(config.vae, config.text), config.encode, config.data.max_pixels)


def _text_on_stderr(wanted: bool) -> AbstractContextManager[Any]:
    return redirect_stdout(sys.stderr) if wanted else nullcontext()


@dataclass(frozen=True)
class _TextRun:
    """The settings of encoding prompts. sources: by name, those that pictures are read from."""

    config: Config
    cache: Cache
    text: CaptionEncoding
    worker: Worker
    engine: str
    sources: dict[str, Source]

    def metrics(self) -> AbstractContextManager[ProgressRows]:
        """The metrics of this process, which are closed at the end of the block."""
        name, worker = ", ".join(self.sources) or "prompts", self.worker
        places = self.cache.files.reports, self.cache.place
        return closing(
            ProgressRows(self.config.metrics.textfile, *places, name, worker.task, worker.tasks, retrying.log)
        )


@dataclass(frozen=True)
class EncodeRun(_TextRun):
    """The state that every step of a run with a source needs.

    Attributes:
        encodings: of the records, as of `signals.encodings`.
        table: the target resolutions (height, width) of the buckets.
    """

    source: Source
    reading: Reading
    encodings: list[Encoding]
    table: list[buckets.Shape]

    @property
    def inputs(self) -> source_plan.Inputs:
        """The part of this state that planning reads."""
        fitting = partial(_fitting, self.config, self.engine)
        return source_plan.Inputs(self.cache, self.source, self.reading, self.encodings, self.table, fitting)

    @property
    def pictures(self) -> list[PictureSignal]:
        """The kinds of picture records, as `Inputs.pictures`."""
        return self.inputs.pictures


Lines = list[tuple[int, str]]
"""Prompts with their line numbers."""


def _run_prompts(
    config: Config, name: str, lines: Lines, share: tuple[int, int], engine: str, stop: Stop
) -> dict[str, Any]:
    text = TextEncoding.wanted(signals.Encoders(config.vae, config.text), config.data, config.encode)
    cache = _prepared(config)
    cache.files.sweep()
    cache.add_encoding(text)
    worker = Worker(claims.Claims(cache.files), stop, *share)
    run = _TextRun(config, cache, text, worker, engine, {})
    prompts = _prompts(run, lines)
    new, reused = planning.count_missing(cache, text, prompts.work)
    click.echo(f"prompts: {new} records new, {reused} reused")
    plans = planning.plan_captions(cache, text, prompts.work, config.encode)
    with ENGINES[engine](run) as make:
        made = make(missing_units(cache, plans), "captions")
        claims.sweep(cache, plans)
        missing_units(cache, plans)  # writes the segments of finished plans
    published = _publish_prompts(run, name, prompts)
    status.join(cache)
    return {
        "captions": made.records,
        "left": made.left,
        "speed": {"captions": made.speed},
        "prompts": {**published, "new": new},
    }


def _prepared(config: Config) -> Cache:
    """Open or make the cache, before any source is scanned: it can be written to, is whole, and has space."""
    cache = cache_location(config).open(create=True)
    copies.repair_all(cache.files)
    withdrawn.check_finished(cache)
    if (shortage := disk_space.shortage(cache)) is not None:
        click.echo(shortage, err=True)
    return cache


def _prompts(run: _TextRun, lines: Lines) -> prompt_lists.PromptWork:
    prompts, repeated = prompt_lists.of(lines, run.text)
    for line in repeated:
        click.echo(f"--prompts: {line}", err=True)
    return prompts


def _publish_prompts(run: _TextRun, name: str, prompts: prompt_lists.PromptWork) -> dict[str, Any]:
    """Publish the set once all its records are there, whoever made them.

    Raises:
        UserError: a prompt could not be encoded.
    """
    work = prompts.work
    if bad := rejecting.of_units(run.cache, run.text, lambda keys: work.filter(planning.has_key(work, keys))):
        raise UserError(
            f"{len(bad)} of {len(prompts.texts)} prompts cannot be encoded, so the set {name!r} is left as it was",
            found="; ".join(f"{reject.item}: {reject.reason}" for reject in bad[:3]),
            fix="leave them out of the file",
        )
    published = prompt_sets.publish(run.cache, name, run.text, prompts.texts, prompts.keys)
    if published is None:
        click.echo(f"prompt set {name!r}: other workers are encoding some of its prompts; the last one publishes it")
    else:
        click.echo(f"prompt set {name!r}: {len(published)} prompts, {published.id[:12]}")
    return {"name": name, "id": published and published.id, "prompts": len(prompts.texts)}


def _run(
    config: Config,
    reading: Reading,
    source: Source,
    rehash: bool,
    share: tuple[int, int],
    engine: str,
    stop: Stop,
    asked: tuple[str, Lines] | None,
) -> dict[str, Any]:
    encodings = signals.encodings(signals.Encoders(config.vae, config.text), config.data, config.encode)
    surveying.check_latents(source, encodings)
    table = surveying.bucket_table(config.data, encodings)
    cache = _prepared(config)
    encodings = surveying.with_stored_decoder(cache, encodings, config.data.decoder)
    cache.files.sweep()
    for encoding in encodings:
        cache.add_encoding(encoding)
    text = caption_of(encodings)
    worker = Worker(claims.Claims(cache.files), stop, *share)
    run = EncodeRun(config, cache, text, worker, engine, {source.name: source}, source, reading, encodings, table)
    done = encode_source(run, rehash, asked)
    status.join(cache)
    return done


def encode_source(run: EncodeRun, rehash: bool, asked: tuple[str, Lines] | None = None) -> dict[str, Any]:
    """Scan a source and make its missing records; see `run` for the result.

    Args:
        asked: the name of a prompt set, and its prompts.
    """
    cache, source = run.cache, run.source
    cache.reuses_indexes = True
    fragments = Fragments(cache, source.name, run.worker)
    planned, work = _planned(run, rehash, fragments)
    prompts = None if asked is None else _prompts(run, asked[1])
    new_prompts = 0 if prompts is None else planning.count_missing(cache, run.text, prompts.work)[0]
    try:
        made, idle = _encode(run, planned, work, prompts)
    finally:  # the scan is published, even if a signal ends the encoding
        fragments.finish()

    unmade = (reject for one in run.encodings for reject in rejecting.of_units(cache, one, partial(work.of, one)))
    failed = list({(reject.item, reject.reason): reject for reject in unmade}.values())
    rejects = Rejects(work.table, planned.rejects, failed)
    path = rejecting.write(cache, source.name, rejects)
    if rejects:
        click.echo(f"{len(rejects)} items are rejected, each with its reason in {cache.files.where(path)}")
        for line in Kinds.of(rejects).lines():
            click.echo(line)
    for index in [] if idle else [cache.index(encoding.name) for encoding in run.encodings]:
        size = amount(int(index.bytes.sum()))
        click.echo(f"{index.kind} store: {len(index)} records in {len(index.shards)} shards, {size}")
    left = sum(part.left for part in made.values())
    if left:
        click.echo(f"{left} units of work were not done here: other workers have them, or they wait for another source")
    published = {} if asked is None or prompts is None else _publish_prompts(run, asked[0], prompts)
    most = run.config.encode.max_reject_rate
    rejecting.check(cache, source, planned.items, rejects, planned.faults + len(failed), most)
    return {
        **{noun: part.records for noun, part in made.items()},
        "rejects": len(rejects),
        "left": left,
        "items": planned.items,
        "new": planned.new,
        "reused": planned.reused,
        "missing": planned.missing,
        "speed": {noun: part.speed for noun, part in made.items()},
        **({"prompts": {**published, "new": new_prompts}} if published else {}),
    }


def _planned(run: EncodeRun, rehash: bool, fragments: Fragments) -> tuple[SourcePlan, WorkLists]:
    """Scan and plan, in one process of those that share the work."""
    stop, look, inputs = run.worker.stop, scan_rows.looks(run.encodings)[1], run.inputs
    settings = surveying.ScanSettings(run.config.data, run.config.encode.workers, run.table, rehash)
    works: list[WorkLists] = []

    def plan(scan: scanning.Scan, bar: Progress) -> dict[str, Any]:
        with stop.polite():
            table = scan.table()
        bar.end()
        sized, device = inputs.with_sizes(table), partial(unit_encoder.device, run.config.encode.device)
        if run.source.holds_latents and imported_latents.are_new(sized, table):
            click.echo(imported_latents.judged(sized, table, run.config.vae, device))
        works.append(WorkLists(sized, table))
        return vars(source_plan.publish_scan(sized, table, works[0]))

    def help(scan: scanning.Scan) -> None:
        with stop.polite():
            scan.help()

    while True:
        begun = surveying.scanning_of(run.source, run.cache, settings, look, fragments)
        with suppress(ScanSuperseded), begun as (scan, bar):
            if run.worker.tasks == 1:
                planned = SourcePlan(**plan(scan, bar))
            else:
                with stop.polite():
                    identity = layout.digest(scan.id, source_plan.decisive(inputs)).hex()
                make, assist = partial(plan, scan, bar), partial(help, scan)
                planned = SourcePlan(**fragments.once(identity, make, assist, scan.scans))
            return planned, works[0] if works else source_plan.opened(inputs, planned)


def _fitting(config: Config, engine: str, encoding: PictureSignal) -> image_batch.Fitting | None:
    """The limit on a batch of pictures on this machine; None: with Ray the pictures are encoded on other machines."""
    if engine != "local":
        return None
    footprint = partial(encoding.footprint, signals.Encoders(config.vae, config.text))
    return image_batch.fitting(footprint, lambda: unit_encoder.device(config.encode.device))


@dataclass(frozen=True)
class Made:
    """Records of one kind that this run made, units left to others, and the figures of the progress line. following:
    records of other kinds that were made from the same pixels."""

    records: int
    left: int
    speed: dict[str, Any]
    following: Counter[str] = field(default_factory=Counter)


def _encode(
    run: EncodeRun, planned: SourcePlan, work: WorkLists, prompts: prompt_lists.PromptWork | None
) -> tuple[dict[str, Made], bool]:
    """Encode captions, then pictures. Prompts are planned by themselves, so they do not change the captions' units.

    Returns:
        What was made, and whether there was nothing to do.
    """
    cache, config = run.cache, run.config.encode
    text_plans = work.plans[run.text.name]
    if prompts is not None:
        text_plans = planning.plan_captions(cache, run.text, prompts.work, config)
    image_plans = [plan for encoding in run.pictures for plan in work.plans[encoding.name]]
    idle = not any(planned.new.values()) and not missing_units(cache, [*text_plans, *image_plans])
    if idle:
        click.echo("; ".join([*planned.summary(run.source), "nothing to do"]))
    else:
        click.echo("\n".join([*planned.summary(run.source), *planned.taken]))
    for line in planned.fit + estimate.ignored_lines(run.source.ignored):
        click.echo(line)

    if not idle and run.engine == "local":
        unit_encoder.device(
            run.config.encode.device, click.echo
        )  # a GPU that cannot be used shows before the models are read

    def missing(plans: list[WorkList]) -> Work:
        return [] if idle else missing_units(cache, plans)

    with ENGINES[run.engine](run) as make:
        captions = make(missing(text_plans), "captions")
        claims.sweep(cache, text_plans)
        missing(text_plans)  # writes the segments of finished plans
        made, following = dict[str, Made](), Counter[str]()
        for encoding in run.pictures:
            pictures = _encode_pictures(run, work.plans[encoding.name], missing, make, encoding.noun)
            moved = None
            if not idle:
                moved = planning.retryable_at_another_place(cache, encoding, partial(work.of, encoding))
            if moved is not None:
                more = _encode_pictures(
                    run, source_plan.plan_images(run.inputs, encoding, moved), missing, make, encoding.noun
                )
                pictures = replace(pictures, records=pictures.records + more.records, left=pictures.left + more.left)
            made[encoding.noun] = replace(pictures, records=pictures.records + following[encoding.kind])
            following += pictures.following
    return {**made, "captions": captions}, idle


def _encode_pictures(
    run: EncodeRun, plans: list[WorkList], missing: Callable[[list[WorkList]], Work], make: Make, noun: str
) -> Made:
    todo = missing(plans)
    lead = run.pictures[0].name
    lead_made = {(plan.encoding, plan.number): planning.lead_made(run.cache, plan, lead) for plan in plans}
    ready = [(plan, unit) for plan, unit in todo if lead_made[plan.encoding, plan.number](unit)]
    ready, waiting = source_plan.readable(run.cache, ready, run.source.name)
    for line in waiting:
        click.echo(line)
    pictures = make(ready, noun)
    claims.sweep(run.cache, plans)
    missing(plans)
    return replace(pictures, left=pictures.left + len(todo) - len(ready))


def _tasks(index: int | None, count: int | None, engine: str) -> tuple[int, int]:
    index, count = launch.chosen_share(index, count)
    if engine == "ray" and count > 1:
        raise UserError(
            "with --engine ray one process hands out all units",
            found=f"{count} processes or tasks",
            fix="start sana-pipe once; Ray uses every node of its cluster",
        )
    return index, count


Make = Callable[[Work, str], Made]
"""Makes units; the noun is for the progress line."""


def _following(run: _TextRun) -> Sequence[Encoding]:
    """The encodings whose records are made with others, from the same pixels."""
    return [each for each in run.pictures[1:] if each.shares_pixels] if isinstance(run, EncodeRun) else ()


@contextmanager
def _local(run: _TextRun) -> Iterator[Make]:
    worker = run.worker
    encoder = UnitEncoder(_encoder_settings(run.config), run.cache, run.sources, _following(run))
    space = encoder.disk_space(worker.stop.sleep)

    def make(todo: Work, noun: str) -> Made:
        encoder.meter = Meter()
        with Progress(noun, 0, encoder.meter) as bar, metrics.of(bar):
            records, left = make_units(encoder, todo, worker, bar, space)
        if worker.tasks > 1:
            click.echo(f"worker {worker.task + 1} of {worker.tasks}: {records} {noun} encoded here")
        if noun == "captions":
            _report_captions(encoder.meter)
        return Made(records, left, bar.figures(), encoder.meter.following)

    with run.metrics() as metrics:
        yield make


@contextmanager
def _ray(run: _TextRun) -> Iterator[Make]:
    key = run.config.model_dump_json()
    build = partial(ray_encoder, key, tuple(run.sources), tuple(encoding.name for encoding in _following(run)))
    with ray_engine.Cluster(run.config.encode, key, build, run.worker.stop) as cluster, run.metrics() as metrics:

        def make(todo: Work, noun: str) -> Made:
            meter = Meter(wall_s=0.0)
            with Progress(noun, 0, meter) as bar, metrics.of(bar):
                records = cluster.run(todo, bar)
            _report_captions(meter)
            return Made(records, 0, bar.figures(), meter.following)

        yield make


def ray_encoder(config_json: str, source_names: tuple[str, ...], following: tuple[str, ...]) -> UnitEncoder:
    """Build the encoder of a Ray worker process.

    The sources are not listed again: their items are known from the scan.

    Args:
        config_json: the configuration of the driver.
        source_names: of the sources that pictures are read from.
        following: names of the encodings whose records are made with others, from the same pixels.
    """
    launch.prefer_expandable_segments()
    config = Config.model_validate_json(config_json)
    cache = cache_location(config).open()
    sources = {name: scanning.reopen(cache, name, config.data) for name in source_names}
    encodings = [cache.encoding(name) for name in following]
    return UnitEncoder(_encoder_settings(config), cache, sources, encodings, check=True)


ENGINES: dict[str, Callable[[_TextRun], AbstractContextManager[Make]]] = {"local": _local, "ray": _ray}


def _report_captions(meter: Meter) -> None:
    if meter.unshared:
        click.echo(f"{meter.unshared} captions change tokens of the instruction in front of them: encoded in full")
    if meter.truncated:
        what = "captions had more tokens than text.max_length keeps and were cut at the end"
        click.echo(f"{meter.truncated} {what}", err=True)
