"""`sana-pipe encode`: sources to the cache, one encoder in memory at a time.

Scan, then text (plan, encode what is missing), then latents. Running the same command again continues; with nothing
new it loads no model. Prompts (`--prompts`) are text without pictures; the worker that finds all their records
publishes the set.
"""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import click
import pyarrow as pa
import pyarrow.compute as pc

from pipeline import launch
from pipeline.amounts import amount
from pipeline.cache import copies, layout
from pipeline.cache import prompts as prompt_sets
from pipeline.cache.arrow import batches
from pipeline.cache.index import RecordReject
from pipeline.cache.local_files import cache_errors
from pipeline.cache.objects import files_at
from pipeline.cache.root import Cache, WorkPlan
from pipeline.config import Config
from pipeline.encoding import estimate, image_batch, unit_encoder
from pipeline.encoding import plan as planning
from pipeline.encoding import prompts as prompting
from pipeline.encoding import scan as scanning
from pipeline.encoding import survey as surveying
from pipeline.encoding.fragments import Fragments
from pipeline.encoding.unit_encoder import UnitEncoder
from pipeline.errors import NoSpaceError, RejectRateError, UserError
from pipeline.images import buckets
from pipeline.sources import reasons
from pipeline.sources.reasons import Kinds
from pipeline.sources.source import Source
from pipeline.work import claims, ray_engine
from pipeline.work.engine import Work, Worker, make_units, missing_units
from pipeline.work.progress import Meter, Progress
from pipeline.work.stop import Stop, Stopped


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
    reassign: str | None = None,
    prompts: str | None = None,
    prompts_name: str = prompt_sets.NAME,
) -> dict[str, Any]:
    """Encode a source, prompts, or both into the cache.

    Args:
        data: a folder, tars, tables or a listing; see `pipeline.sources.detect`. None: prompts only.
        source_name: the source's name in the cache; default: the folder's name.
        format: what `data` is; default: detected.
        rehash: read every file again instead of trusting size and mtime.
        task_index, task_count: this process's share of the missing units; default: what the launcher says.
        engine: `local`, or `ray` (this process hands the units to a cluster).
        as_json: print the result as one JSON object; everything else goes to stderr.
        reassign: a list (`item,height,width`) of pictures to encode for other buckets, in addition to their own.
        prompts: a file of prompts; see `pipeline.encoding.prompts.read`.
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
    stop = Stop(config.encode.grace_s)
    with _text_on_stderr(as_json):
        try:
            with stop.signals():
                share = _tasks(task_index, task_count, engine)
                prompt_sets.check_prompts_name(prompts_name)
                asked = None if prompts is None else (prompts_name, prompting.read(prompts, config.patience_s))
                if data is None:
                    assert asked is not None
                    done = _run_prompts(config, *asked, share, engine, stop)
                else:
                    source = surveying.opened(config, data, source_name, format)
                    done = _run(config, source, rehash, share, engine, stop, reassign, asked)
        except Stopped:
            click.echo(f"stopped by {stop.name}; nothing half done was left: run the same command again to continue")
            done = {"stopped": stop.name}
    if as_json:
        click.echo(json.dumps(done))
    return done


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
        0, `RejectRateError.exit_code` if nothing is usable, or `NoSpaceError.exit_code` if the space does not suffice.

    Raises:
        UserError: see the messages; no cache can be made there, a source or a model cannot be read.
    """
    with _text_on_stderr(as_json):
        tasks = _tasks(task_index, task_count, engine)[1]
        survey = surveying.survey(config, data, source_name, rehash, format)
        sizes = survey.sizes()
        times = estimate.times(survey.work, sizes, survey.probe(), config, tasks) if probe else None
        reserve = int(config.encode.min_free_gib * 2**30)
        free = files_at(config.cache, config.mirror, config.patience_s).free_bytes()
        report = estimate.report(survey.source.name, survey.work, sizes, free, reserve, times)
        for line in estimate.lines(report, config.cache):
            click.echo(line)
    if as_json:
        click.echo(json.dumps(report))
    if report["items"] and not report["usable"]:
        return RejectRateError.exit_code
    return 0 if report["enough_space"] else NoSpaceError.exit_code


def _text_on_stderr(wanted: bool) -> AbstractContextManager[Any]:
    return redirect_stdout(sys.stderr) if wanted else nullcontext()


@dataclass(frozen=True)
class _TextRun:
    """What encoding needs. sources: by name, those that pictures are read from."""

    config: Config
    cache: Cache
    text: layout.TextRecipe
    worker: Worker
    engine: str
    sources: dict[str, Source]


@dataclass(frozen=True)
class EncodeRun(_TextRun):
    """What every step of a run with a source needs. table: the target resolutions (height, width) of the buckets."""

    source: Source
    latent: layout.LatentRecipe
    table: list[buckets.Shape]


@dataclass(frozen=True)
class _Scanned:
    """A published scan. gone: usable pictures of the last scan that are missing now; faults: rejects that no setting
    asked for."""

    table: pa.Table
    gone: int
    faults: int


@dataclass(frozen=True)
class _Rejects:
    """Items of a source that are left out, as (item, reason): by the scan's table, and by units (failed)."""

    table: pa.Table
    failed: Sequence[RecordReject] = ()

    def __len__(self) -> int:
        return len(self.table) - self.table.column("reject").null_count + len(self.failed)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        for batch in batches(self.table.select(["item", "reject"])):
            rejected = batch.filter(pc.is_valid(batch.column("reject")))
            yield from zip(*(column.to_pylist() for column in rejected.columns), strict=True)
        yield from ((reject.item, reject.reason) for reject in self.failed)


Lines = list[tuple[int, str]]
"""Prompts with their line numbers."""


def _run_prompts(
    config: Config, name: str, lines: Lines, share: tuple[int, int], engine: str, stop: Stop
) -> dict[str, Any]:
    text = surveying.text_recipe(config)
    cache = Cache.of(config, create=True)
    copies.repair_all(cache.files)
    text = cache.known(text)
    cache.files.sweep()
    cache.add_recipe(text)
    worker = Worker(claims.Claims(cache.files, config.encode.claim_timeout_s), stop, *share)
    run = _TextRun(config, cache, text, worker, engine, {})
    prompts = _prompts(run, lines)
    new, reused = planning.count_missing(cache, text, prompts.work)
    click.echo(f"prompts: {new} records new, {reused} reused")
    plans = planning.plan_captions(cache, text, prompts.work, config.encode)
    with _ENGINES[engine](run) as make:
        made = make(missing_units(cache, plans), "captions")
        claims.sweep(cache, plans)
        missing_units(cache, plans)  # writes the segments of finished plans
    return {
        "captions": made.records,
        "left": made.left,
        "speed": {"captions": made.speed},
        "prompts": {**_publish_prompts(run, name, prompts), "new": new},
    }


def _prompts(run: _TextRun, lines: Lines) -> prompting.PromptWork:
    prompts, repeated = prompting.of(lines, run.text)
    for line in repeated:
        click.echo(f"--prompts: {line}")
    return prompts


def _publish_prompts(run: _TextRun, name: str, prompts: prompting.PromptWork) -> dict[str, Any]:
    """Publish the set once all its records are there, whoever made them.

    Raises:
        UserError: a prompt could not be encoded.
    """
    if bad := _unit_rejects(run.cache, run.text, prompts.work):
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
    source: Source,
    rehash: bool,
    share: tuple[int, int],
    engine: str,
    stop: Stop,
    reassign: str | None,
    asked: tuple[str, Lines] | None,
) -> dict[str, Any]:
    latent, text = surveying.recipes(config)
    table = buckets.table(config.data, latent.compression)
    targets = planning.read_targets(reassign, latent.compression, config.patience_s) if reassign else {}
    cache = Cache.of(config, create=True)
    copies.repair_all(cache.files)
    latent, text = surveying.known(cache, latent, text, config)
    cache.files.sweep()
    for recipe in (latent, text):
        cache.add_recipe(recipe)
    worker = Worker(claims.Claims(cache.files, config.encode.claim_timeout_s), stop, *share)
    run = EncodeRun(config, cache, text, worker, engine, {source.name: source}, source, latent, table)
    return encode_source(run, rehash, targets, asked)


def encode_source(
    run: EncodeRun, rehash: bool, targets: dict[str, tuple[int, int]], asked: tuple[str, Lines] | None = None
) -> dict[str, Any]:
    """Scan a source and make its missing records; see `run` for the result.

    Args:
        targets: see `planning.image_work`.
        asked: the name of a prompt set, and its prompts.
    """
    cache, source, latent, text = run.cache, run.source, run.latent, run.text
    cache.reuses_indexes = True
    fragments = Fragments(cache, source.name, run.worker)
    scanned = _scan_and_publish(run, rehash, fragments)
    images = planning.image_work(scanned.table, source.name, latent, run.table, targets, cache.files.scratch)
    texts = planning.caption_work(scanned.table, text, cache.files.scratch)
    prompts = None if asked is None else _prompts(run, asked[1])
    further = 0 if prompts is None else planning.count_missing(cache, text, prompts.work)[0]
    counts = {
        "images": planning.count_missing(cache, latent, images),
        "captions": planning.count_missing(cache, text, texts),
    }
    new = any(missing for missing, _ in counts.values())
    works = [texts] if prompts is None else [texts, prompts.work]
    made, idle = _encode(run, images, works, new, _summary(run, scanned, counts))
    fragments.finish()

    failed = _unit_rejects(cache, latent, images) + _unit_rejects(cache, text, texts)
    rejects = _Rejects(scanned.table, failed)
    _report_rejects(cache, source.name, rejects)
    for index in [] if idle else [cache.index(latent.name), cache.index(text.name)]:
        size = amount(sum(index.bytes))
        click.echo(f"{index.kind} store: {len(index)} records in {len(index.shards)} shards, {size}")
    left = sum(part.left for part in made.values())
    if left:
        click.echo(f"{left} units were not encoded here: other workers have them, or they wait for another source")
    published = {} if asked is None or prompts is None else _publish_prompts(run, asked[0], prompts)
    _check_rejects(run.config, cache, source.name, scanned.table.num_rows, rejects, scanned.faults + len(failed))
    return {
        **{noun: part.records for noun, part in made.items()},
        "rejects": len(rejects),
        "left": left,
        "items": scanned.table.num_rows,
        "new": {noun: missing for noun, (missing, _) in counts.items()},
        "reused": {noun: reused for noun, (_, reused) in counts.items()},
        "gone": scanned.gone,
        "speed": {noun: part.speed for noun, part in made.items()},
        **({"prompts": {**published, "new": further}} if published else {}),
    }


def _scan_and_publish(run: EncodeRun, rehash: bool, fragments: Fragments) -> _Scanned:
    config, cache, source = run.config, run.cache, run.source
    with run.worker.stop.polite():
        table, gone = surveying.scanned(config, source, cache, run.table, rehash, scanning.from_bytes, fragments)
    left_out = (
        batch.filter(pc.is_valid(batch.column("reject"))) for batch in batches(table.select(["width", "reject"]))
    )
    faults = sum(part.column("width").null_count for part in left_out)  # a row with a width was left out by a setting
    _check_rejects(config, cache, source.name, table.num_rows, _Rejects(table), faults)
    cache.add_scan(
        source.name,
        {
            "source": source.name,
            "root": source.location,
            "table": cache.put_table(table),
            "latent": run.latent.name,
            "text": run.text.name,
            "buckets": [list(shape) for shape in run.table],
            **({"source_format": source.format} if source.format != "folder" else {}),
        },
    )
    return _Scanned(table, gone, faults)


def _summary(run: EncodeRun, scanned: _Scanned, counts: dict[str, tuple[int, int]]) -> list[str]:
    """What the source has, for people. counts: new and reused records of each kind."""
    (new_images, old_images), (new_texts, old_texts) = counts["images"], counts["captions"]
    left_out = len(_Rejects(scanned.table))
    return [
        f"source {run.source.name!r}: {scanned.table.num_rows} items, {left_out} rejected by the scan",
        f"pictures: {new_images} new, {old_images} reused, {scanned.gone} gone",
        f"captions: {new_texts} new, {old_texts} reused",
    ]


@dataclass(frozen=True)
class _Made:
    """Records of one kind that this run made, units left to others, and the figures of the progress line."""

    records: int
    left: int
    speed: dict[str, Any]


def _encode(
    run: EncodeRun, images: pa.Table, texts: list[pa.Table], new: bool, summary: list[str]
) -> tuple[dict[str, _Made], bool]:
    """Plan and encode captions, then pictures.

    Args:
        images: the pictures of the source.
        texts: its captions, and prompts. Each list is planned by itself, so prompts do not change the captions' units.
        new: whether the cache lacks a record of them.
        summary: printed first.

    Returns:
        What was made, and whether there was nothing to do; then pictures were planned only once.
    """
    cache, config = run.cache, run.config.encode
    fitting = None  # with Ray the pictures are encoded on other machines
    if run.engine == "local":
        fitting = image_batch.fitting(run.config.vae, lambda: unit_encoder.device(run.config))
    for work in texts:
        text_plans = planning.plan_captions(cache, run.text, work, config)
    image_plans = [] if new else planning.plan_images(cache, run.latent, images, config, fitting)
    idle = not new and not missing_units(cache, [*text_plans, *image_plans])
    if idle:
        click.echo("; ".join([*summary, "nothing to do"]))
    else:
        click.echo("\n".join(summary))
        if run.source.ignored:
            click.echo(f"{run.source.ignored} files, members or captions of the source are not used")

    def missing(plans: list[WorkPlan]) -> Work:
        return [] if idle else missing_units(cache, plans)

    with _ENGINES[run.engine](run) as make:
        captions = make(missing(text_plans), "captions")
        claims.sweep(cache, text_plans)
        missing(text_plans)  # writes the segments of finished plans
        if not idle:
            image_plans = planning.plan_images(cache, run.latent, images, config, fitting)
        pictures = _encode_pictures(run, image_plans, missing, make)
        moved = images.slice(0, 0) if idle else planning.retryable_from_another_item(cache, run.latent, images)
        if len(moved):
            plans = planning.plan_images(cache, run.latent, moved, config, fitting)
            more = _encode_pictures(run, plans, missing, make)
            pictures = replace(pictures, records=pictures.records + more.records)
    return {"images": pictures, "captions": captions}, idle


def _encode_pictures(
    run: EncodeRun, plans: list[WorkPlan], missing: Callable[[list[WorkPlan]], Work], make: Make
) -> _Made:
    todo = missing(plans)
    ready = _readable(run.cache, todo, run.source.name)
    pictures = make(ready, "images")
    claims.sweep(run.cache, plans)
    missing(plans)
    return replace(pictures, left=pictures.left + len(todo) - len(ready))


def _tasks(index: int | None, count: int | None, engine: str) -> tuple[int, int]:
    if (index is None) != (count is None):
        raise UserError("--task-index and --task-count go together", fix="--task-index 0 --task-count 4")
    if index is None or count is None:
        index, count = launch.share_of_work()
    if not 0 <= index < count:
        raise UserError("--task-index must be between 0 and --task-count - 1", found=f"{index} of {count}")
    if engine == "ray" and count > 1:
        raise UserError(
            "with --engine ray one process hands out all units",
            found=f"{count} processes or tasks",
            fix="start sana-pipe once; Ray uses every node of its cluster",
        )
    return index, count


Make = Callable[[Work, str], _Made]
"""Makes units; the noun is for the progress line."""


@contextmanager
def _local(run: _TextRun) -> Iterator[Make]:
    worker, encoder = run.worker, UnitEncoder(run.config, run.cache, run.sources)
    space = encoder.disk_space(worker.stop.sleep)

    def make(todo: Work, noun: str) -> _Made:
        with Progress(noun, 0, encoder.meter) as bar:
            records, left = make_units(encoder, todo, worker, bar, space)
        if worker.tasks > 1:
            click.echo(f"worker {worker.task + 1} of {worker.tasks}: {records} {noun} encoded here")
        if noun == "captions":
            _report_captions(encoder.meter)
        return _Made(records, left, bar.figures())

    yield make


@contextmanager
def _ray(run: _TextRun) -> Iterator[Make]:
    key = run.config.model_dump_json()
    build = partial(unit_encoder.build, key, tuple(run.sources))
    with ray_engine.Cluster(run.config.encode, key, build, run.worker.stop) as cluster:

        def make(todo: Work, noun: str) -> _Made:
            meter = Meter(wall_s=0.0)
            with Progress(noun, 0, meter) as bar:
                records = cluster.run(todo, bar)
            _report_captions(meter)
            return _Made(records, 0, bar.figures())

        yield make


_ENGINES: dict[str, Callable[[_TextRun], AbstractContextManager[Make]]] = {"local": _local, "ray": _ray}


def _report_captions(meter: Meter) -> None:
    if meter.unshared:
        click.echo(f"{meter.unshared} captions changed the instruction's own tokens and were encoded in full")
    if meter.truncated:
        click.echo(f"{meter.truncated} captions had more tokens than text.max_length keeps and were cut at the end")


def _readable(cache: Cache, todo: Work, name: str) -> Work:
    """The units whose pictures are all of source `name`; prints which source each of the others waits for."""
    ready = []
    for plan, unit in todo:
        rows = cache.unit_rows(plan, unit)
        others = set(rows.column("source").to_pylist()) - {name}
        if others:
            click.echo(
                f"unit {unit.unit} waits for source {', '.join(sorted(others))}: encode that source to finish it"
            )
        else:
            ready.append((plan, unit))
    return ready


def _unit_rejects(cache: Cache, recipe: layout.Recipe, work: pa.Table) -> list[RecordReject]:
    """Rejects of this source's work whose record no later unit has made."""
    index = cache.index(recipe.name)
    latest = {r.key: r for r in index.rejects if not index.has(bytes.fromhex(r.key))}
    wanted = work.column("key").filter(planning.has_key(work, latest))
    return [latest[key.hex()] for key in wanted.to_pylist()]


def _report_rejects(cache: Cache, name: str, rejects: _Rejects) -> None:
    path, files = reasons.report(name), cache.files
    with files.temporary() as temporary:
        with cache_errors(temporary), open(temporary, "x", encoding="utf-8", newline="") as sheet:
            rows = csv.writer(sheet, lineterminator="\n")
            rows.writerow(["item", "reason"])
            rows.writerows(map(reasons.cell, row) for row in files.scratch.sorted_rows(rejects))
            sheet.flush()
            os.fsync(sheet.fileno())
        files.replace_by(temporary, path)
    if rejects:
        click.echo(f"{len(rejects)} rejected; each with its reason in {cache.files.where(path)}")
        for line in Kinds.of(rejects).lines():
            click.echo(line)


def _check_rejects(config: Config, cache: Cache, name: str, items: int, rejects: _Rejects, faults: int) -> None:
    """RejectRateError if there are too many rejects, or nothing but rejects.

    Args:
        faults: rejects that no setting asked for.
    """
    most, where = config.encode.max_reject_rate, cache.files.where(reasons.report(name))
    if not items or (faults / items <= most and len(rejects) < items):
        return
    _report_rejects(cache, name, rejects)
    kinds = Kinds.of(rejects)
    if len(rejects) < items:
        expected = f"at most {most:.1%} (encode.max_reject_rate)"
        fix = f"look at {where}, or raise encode.max_reject_rate"
    else:
        expected = "some that can be used; the source is left as it was"
        fix = f"look at {where}"
        if any("caption" in kind for kind in kinds.counts):
            fix = "put the caption of X.jpg into X.txt, name its column (--set data.caption_field=COLUMN), or give all "
            fix += "pictures one caption: --set 'data.caption=a photo of sks dog' (or filename, folder, none)"
    raise RejectRateError(
        f"{len(rejects)} of {items} items of source {name!r} were rejected",
        expected=expected,
        found="\n" + "\n".join(kinds.lines()),
        fix=fix,
    )
