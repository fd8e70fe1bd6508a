"""`sana-pipe encode`: sources to the cache, one encoder in memory at a time.

Scan, then text (plan, encode what is missing), then latents. Running the same command again continues; with nothing
new it loads no model.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial
from typing import Any

import click
import pyarrow as pa
import pyarrow.compute as pc

from pipeline import launch
from pipeline.amounts import amount
from pipeline.cache import copies, layout
from pipeline.cache.index import Reject
from pipeline.cache.objects import files_at
from pipeline.cache.store import Cache, Plan, Unit, check_source_name
from pipeline.config import Config
from pipeline.encoding import estimate, worker
from pipeline.encoding import plan as planning
from pipeline.encoding import scan as scanning
from pipeline.encoding.fragments import Fragments
from pipeline.errors import NoSpaceError, RejectRateError, UserError
from pipeline.images import buckets, decoding
from pipeline.models import encoders
from pipeline.sources import caption_rules, reasons
from pipeline.sources.detect import open_source
from pipeline.sources.reasons import Kinds
from pipeline.sources.source import Source
from pipeline.work import claims, ray_engine
from pipeline.work import engine as engines
from pipeline.work.disk_space import Room
from pipeline.work.progress import Meter, Progress
from pipeline.work.stop import Stop, Stopped


def run(
    config: Config,
    data: str,
    source_name: str | None = None,
    rehash: bool = False,
    task_index: int | None = None,
    task_count: int | None = None,
    format: str | None = None,
    engine: str = "local",
    as_json: bool = False,
    reassign: str | None = None,
) -> dict[str, Any]:
    """Encode a source into the cache.

    Args:
        data: a folder, tars, tables or a listing; see `pipeline.sources.detect`.
        source_name: the source's name in the cache; default: the folder's name.
        format: what `data` is; default: seen from what is there.
        rehash: read every file again instead of trusting size and mtime.
        task_index, task_count: this process's share of the missing units; default: what the launcher says.
        engine: `local`, or `ray`: this process hands the units out on a cluster.
        as_json: what is returned is printed as one JSON object, and everything else goes to stderr.
        reassign: a list (`item,height,width`) of pictures to encode for other buckets than their own, too.

    Returns:
        Counts: `images`, `captions` (made by this run), `rejects` (of the source), `left` (units that other workers
        had in hand, or that wait for another source), `items`; `speed`: for `captions` and `images` what
        `Progress.figures` says. `{"stopped": NAME}` if a signal ended the run.

    Raises:
        UserError: see the messages.
    """
    stop = Stop(config.encode.grace_s)
    with _people_on_stderr(as_json):
        try:
            with stop.signals():
                share = _tasks(task_index, task_count, engine)
                source = _opened(config, data, source_name, format)
                done = _run(config, source, rehash, share, engine, stop, reassign)
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
    """Say what `run` would do, and write nothing.

    Args:
        probe: encode a few batches for an estimate of the time.
        as_json: print one JSON object, and everything else on stderr.

    Returns:
        0, `RejectRateError.exit_code` if nothing is usable, or `NoSpaceError.exit_code` if the space does not suffice.

    Raises:
        UserError: see the messages; no cache can be made there, a source or a model cannot be read.
    """
    with _people_on_stderr(as_json):
        tasks = _tasks(task_index, task_count, engine)[1]
        source = _opened(config, data, source_name, format)
        latent, text = _recipes(config)
        table = buckets.table(config.data, latent.compression)
        cache = Cache.if_there(config)
        if cache is not None:
            latent, text = _known(cache, latent, text, config)
        scan, _ = _scan(config, source, cache, table, rehash, scanning.from_header)
        work = estimate.wanted(scan, cache, latent, text, table)
        count = partial(encoders.count_rows, config.text, text.instruction)
        sizes = estimate.sizes(work, config, latent, text, count)
        times = None
        if probe:
            speed = estimate.probe(work, config, source, latent, engines.device(config))
            times = estimate.times(work, sizes, speed, config, tasks)
        reserve = int(config.encode.min_free_gib * 2**30)
        free = files_at(config.cache, config.mirror, config.patience_s).free_bytes()
        told = estimate.report(source.name, work, sizes, free, reserve, times)
        for line in estimate.lines(told, config.cache):
            click.echo(line)
    if as_json:
        click.echo(json.dumps(told))
    if told["items"] and not told["usable"]:
        return RejectRateError.exit_code
    return 0 if told["enough_space"] else NoSpaceError.exit_code


def _opened(config: Config, data: str, name: str | None, format: str | None) -> Source:
    source = open_source(data, config.data, name, format, config.patience_s, raw=config.text.recipe == "nvlabs")
    check_source_name(source.name)  # before hours of reading
    return source


def _people_on_stderr(wanted: bool) -> AbstractContextManager[Any]:
    return redirect_stdout(sys.stderr) if wanted else nullcontext()


def _scan(
    config: Config,
    source: Source,
    cache: Cache | None,
    table: list[buckets.Shape],
    rehash: bool,
    look: scanning.Look,
    fragments: Fragments | None = None,
) -> tuple[pa.Table, int]:
    """The scan, and how many pictures of the last one are gone."""
    with Progress("scan", None) as bar:
        scan = scanning.scan(
            source,
            source.name,
            cache,
            max_pixels=config.data.max_pixels,
            workers=max(1, config.encode.workers),
            rehash=rehash,
            progress=bar.reach,
            refuse=lambda height, width: buckets.refusal(
                height, width, buckets.nearest(table, height, width), config.data
            ),
            look=look,
            fragments=fragments,
            max_bytes=config.data.max_bytes,
        )
    return scan, scanning.gone(cache, source.name, scan, config.encode.max_shrink) if cache is not None else 0


def _run(
    config: Config,
    source: Source,
    rehash: bool,
    share: tuple[int, int],
    engine: str,
    stop: Stop,
    reassign: str | None,
) -> dict[str, Any]:
    name = source.name
    latent, text = _recipes(config)
    table = buckets.table(config.data, latent.compression)
    targets = planning.read_targets(reassign, latent.compression) if reassign else {}
    cache = Cache.of(config, create=True)
    copies.repair_all(cache.files)
    latent, text = _known(cache, latent, text, config)
    cache.files.sweep()
    for recipe in (latent, text):
        cache.add_recipe(recipe)

    fragments = Fragments(cache, name, claims.Claims(cache.files, config.encode.claim_timeout_s), share, stop)
    with stop.polite():
        scan, gone = _scan(config, source, cache, table, rehash, scanning.from_bytes, fragments)
    out = scan.filter(pc.is_valid(scan.column("reject"))).select(["item", "width", "reject"])
    rejected = [Reject("", row["item"], row["reject"]) for row in out.to_pylist()]
    faults = out.column("width").null_count  # a row that has a width was left out by a setting
    _check_rejects(config, cache, name, scan.num_rows, rejected, faults)
    cache.add_scan(
        name,
        {
            "source": name,
            "root": source.location,
            "table": cache.put_table(scan),
            "latent": latent.name,
            "text": text.name,
            "buckets": [list(b) for b in table],
            **({"source_format": source.format} if source.format != "folder" else {}),
        },
    )
    images = planning.image_work(scan, name, latent, table, targets)
    texts = planning.caption_work(scan, text)
    (new_images, old_images), (new_texts, old_texts) = (
        planning.counted(cache, recipe, work) for recipe, work in ((latent, images), (text, texts))
    )
    text_plans = planning.plan_captions(cache, text, texts, config.encode)
    nothing_new = not new_images + new_texts
    image_plans = planning.plan_images(cache, latent, images, config.encode) if nothing_new else []
    idle = nothing_new and not worker.missing_units(cache, [*text_plans, *image_plans])
    told = [
        f"source {name!r}: {scan.num_rows} items, {len(rejected)} rejected by the scan",
        f"pictures: {new_images} new, {old_images} reused, {gone} gone",
        f"captions: {new_texts} new, {old_texts} reused",
    ]
    if idle:
        click.echo("; ".join([*told, "nothing to do"]))
    else:
        click.echo("\n".join(told))
        if source.ignored:
            click.echo(f"{source.ignored} files, members or captions of it are of no use here and were passed over")

    def missing(plans: list[Plan]) -> list[tuple[Plan, Unit]]:
        return [] if idle else worker.missing_units(cache, plans)

    with _workers(config, cache, source, stop)[engine](share) as encode:
        made_text, left_text, text_speed = encode(missing(text_plans), "captions")
        claims.sweep(cache, text_plans)
        missing(text_plans)

        if not idle:
            image_plans = planning.plan_images(cache, latent, images, config.encode)
        todo = missing(image_plans)
        ready = _readable(cache, todo, name)
        made_images, left_images, image_speed = encode(ready, "images")
        left_images += len(todo) - len(ready)
        claims.sweep(cache, image_plans)
        missing(image_plans)

    fragments.finish()
    failed = _unit_rejects(cache, latent, images) + _unit_rejects(cache, text, texts)
    rejected += failed
    _report_rejects(cache, name, rejected)
    for index in [] if idle else [cache.index(latent.name), cache.index(text.name)]:
        size = amount(sum(index.bytes))
        click.echo(f"{index.kind} store: {len(index)} records in {len(index.shards)} shards, {size}")
    if left_text + left_images:
        click.echo(f"{left_text + left_images} units were in other workers' hands when this one ended")
    _check_rejects(config, cache, name, scan.num_rows, rejected, faults + len(failed))
    return {
        "images": made_images,
        "captions": made_text,
        "rejects": len(rejected),
        "left": left_text + left_images,
        "items": scan.num_rows,
        "new": {"images": new_images, "captions": new_texts},
        "reused": {"images": old_images, "captions": old_texts},
        "gone": gone,
        "speed": {"captions": text_speed, "images": image_speed},
    }


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


def _recipes(config: Config) -> tuple[layout.LatentRecipe, layout.TextRecipe]:
    vae = encoders.describe_vae(config.vae)
    latent = layout.LatentRecipe(
        **vae,
        decoder=decoding.choose(config.data.decoder),
        resize=decoding.RESIZE_RULE,
        crop=decoding.CROP_RULE,
        background=config.data.background,
        storage=config.encode.storage.latent,
    )
    text = encoders.describe_text(config.text, caption_rules.instruction(config.text))
    return latent, layout.TextRecipe(**text, storage=config.encode.storage.text)


def _known(
    cache: Cache, latent: layout.LatentRecipe, text: layout.TextRecipe, config: Config
) -> tuple[layout.LatentRecipe, layout.TextRecipe]:
    """The recipes under which the cache has these values. With `data.decoder: auto`, the decoder with which it has been
    encoded so far goes before the faster one.

    Raises:
        UserError: it cannot be used here; encoding everything again has to be asked for.
    """
    if config.data.decoder == "auto":
        there = [one for one in cache.recipes("latent") if isinstance(one, layout.LatentRecipe)]
        decoders = [one.decoder for one in there if replace(one, decoder=latent.decoder).same_values(latent)]
        if decoders and latent.decoder not in decoders:
            decoding.require(decoders[0])
            click.echo(f"pictures are decoded by {decoders[0]}, as those that are in the cache; see data.decoder")
            latent = replace(latent, decoder=decoders[0])
    return cache.known(latent), cache.known(text)


Encode = Callable[[list[tuple[Plan, Unit]], str], tuple[int, int, dict[str, Any]]]
"""Encodes units (the noun is for the progress line); returns records made, units left to others, and the figures of
the progress line."""


def _workers(
    config: Config, cache: Cache, source: Source, stop: Stop
) -> dict[str, Callable[[tuple[int, int]], AbstractContextManager[Encode]]]:
    """The engines by name."""

    @contextmanager
    def local(share: tuple[int, int]) -> Iterator[Encode]:
        runner = engines.Runner(config, cache, {source.name: source})
        own = claims.Claims(cache.files, config.encode.claim_timeout_s)

        room = Room(cache, config.encode, stop.sleep)

        def encode(todo: list[tuple[Plan, Unit]], noun: str) -> tuple[int, int, dict[str, Any]]:
            with Progress(noun, 0, runner.meter) as bar:
                made, left = engines.run_here(runner, todo, *share, own, stop, bar, room)
            if share[1] > 1:
                click.echo(f"worker {share[0] + 1} of {share[1]}: {made} {noun} encoded here")
            if noun == "captions":
                _tell_captions(runner.unshared, runner.truncated)
            return made, left, bar.figures()

        yield encode

    @contextmanager
    def ray(share: tuple[int, int]) -> Iterator[Encode]:
        opened = partial(engines.reopened, config, source.name)
        with ray_engine.Cluster(config, {source.name: opened}, stop) as cluster:

            def encode(todo: list[tuple[Plan, Unit]], noun: str) -> tuple[int, int, dict[str, Any]]:
                with Progress(noun, 0, Meter(wall_s=0.0)) as bar:
                    done = cluster.run(todo, bar)
                _tell_captions(done.unshared, done.truncated)
                return done.records, 0, bar.figures()

            yield encode

    return {"local": local, "ray": ray}


def _tell_captions(unshared: int, truncated: int) -> None:
    if unshared:
        click.echo(f"{unshared} captions changed the instruction's own tokens and were encoded in full")
    if truncated:
        click.echo(f"{truncated} captions had more tokens than text.max_length keeps and were cut at the end")


def _readable(cache: Cache, todo: list[tuple[Plan, Unit]], name: str) -> list[tuple[Plan, Unit]]:
    """The units whose pictures are all of source `name`; of the others it says which source they wait for."""
    ready = []
    for plan, unit in todo:
        rows = cache.table(plan.table).slice(unit.start, unit.count)
        others = set(rows.column("source").to_pylist()) - {name}
        if others:
            click.echo(
                f"unit {unit.unit} waits for source {', '.join(sorted(others))}: encode that source to finish it"
            )
        else:
            ready.append((plan, unit))
    return ready


def _unit_rejects(cache: Cache, recipe: layout.Recipe, work: pa.Table) -> list[Reject]:
    """Rejects of this source's work that no later unit made good."""
    index = cache.index(recipe.name)
    latest = {r.key: r for r in index.rejects if not index.has(bytes.fromhex(r.key))}
    wanted = work.column("key").filter(planning.among(work, latest))
    return [latest[key.hex()] for key in wanted.to_pylist()]


def _report_rejects(cache: Cache, name: str, rejects: list[Reject]) -> None:
    path = reasons.report(name)
    sheet = io.StringIO()
    rows = csv.writer(sheet, lineterminator="\n")
    rows.writerow(["item", "reason"])
    rows.writerows((reasons.cell(item), reasons.cell(why)) for item, why in sorted((r.item, r.reason) for r in rejects))
    cache.files.replace(path, sheet.getvalue().encode())
    if rejects:
        click.echo(f"{len(rejects)} rejected; each with its reason in {cache.files.where(path)}")
        for line in Kinds.of((r.item, r.reason) for r in rejects).lines():
            click.echo(line)


def _check_rejects(config: Config, cache: Cache, name: str, items: int, rejects: list[Reject], faults: int) -> None:
    """Raises a RejectRateError if there are too many rejects, or nothing else.

    Args:
        faults: rejects that no setting asked for.
    """
    most, where = config.encode.max_reject_rate, cache.files.where(reasons.report(name))
    if not items or (faults / items <= most and len(rejects) < items):
        return
    _report_rejects(cache, name, rejects)
    kinds = Kinds.of((r.item, r.reason) for r in rejects)
    if len(rejects) < items:
        expected = f"at most {most:.1%} (encode.max_reject_rate)"
        fix = f"look at {where}, or raise encode.max_reject_rate"
    else:
        expected = "some that can be used; the source is left as it was"
        fix = f"look at {where}"
        if any("caption" in kind for kind in kinds.counts):
            fix = "put the caption of X.jpg into X.txt, say where it is (--set data.caption_field=COLUMN), or let all "
            fix += "say the same: --set 'data.caption=a photo of sks dog' (or filename, folder, none)"
    raise RejectRateError(
        f"{len(rejects)} of {items} items of source {name!r} were rejected",
        expected=expected,
        found="\n" + "\n".join(kinds.lines()),
        fix=fix,
    )
