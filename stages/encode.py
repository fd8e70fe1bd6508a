"""`sana-pipe encode`: sources to the cache, one encoder in memory at a time.

Scan, then text (plan, encode what is missing), then latents. Running the same command again continues; with nothing
new it loads no model.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from dataclasses import replace
from typing import Any

import click
import pyarrow as pa

from pipeline import launch
from pipeline.cache import codec, layout
from pipeline.cache.index import Reject
from pipeline.cache.store import Cache, Plan, Unit
from pipeline.config import Config
from pipeline.data import buckets, captions, image
from pipeline.data.detect import open_source
from pipeline.data.source import Source
from pipeline.encoding import calibrate, worker
from pipeline.encoding import plan as planning
from pipeline.encoding import scan as scanning
from pipeline.encoding.progress import Progress
from pipeline.errors import RejectRateError, UserError
from pipeline.models import encoders


def run(
    config: Config, data: str, source_name: str | None = None, rehash: bool = False,
    task_index: int | None = None, task_count: int | None = None, format: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Encode a source into the cache.

    Args:
        data: a folder, tars, tables or a listing; see `pipeline.data.detect`.
        source_name: the source's name in the cache; default: the folder's name.
        format: what `data` is; default: seen from what is there.
        rehash: read every file again instead of trusting size and mtime.
        task_index, task_count: this process's share of the missing units; default: what the launcher says.

    Returns:
        Counts: `images`, `captions` (made by this run), `rejects` (of the source), `left` (units of other tasks).

    Raises:
        UserError: see the messages.
    """
    task, tasks = _tasks(task_index, task_count)
    source = open_source(data, config.data, source_name, format)
    name = source.name
    latent, text = _recipes(config)
    table = buckets.table(config.data, latent.compression)
    cache = Cache(config.cache, create=True)
    latent = _with_decoder_of(cache, latent, config)
    cache.files.sweep()
    for recipe in (latent, text):
        cache.add_recipe(recipe)

    with Progress("scan", None) as bar:
        scan = scanning.scan(
            source, name, cache, max_pixels=config.data.max_pixels, workers=max(1, config.encode.workers),
            rehash=rehash, progress=bar.reach,
            refuse=lambda height, width: buckets.refusal(
                height, width, buckets.nearest(table, height, width), config.data
            ),
        )  # fmt: skip
    cache.add_scan(
        name,
        {
            "source": name, "root": source.location, "table": cache.put_table(scan), "latent": latent.name,
            "text": text.name, "buckets": [list(b) for b in table],
            **({"source_format": source.format} if source.format != "folder" else {}),
        },
    )  # fmt: skip
    rejected = [Reject("", row["item"], row["reject"]) for row in scan.to_pylist() if row["reject"] is not None]
    usable = scan.num_rows - len(rejected)
    click.echo(f"source {name!r}: {scan.num_rows} items, {usable} usable, {len(rejected)} rejected by the scan")
    if source.ignored:
        click.echo(f"{source.ignored} files, members or captions of it are of no use here and were passed over")
    _check_rejects(config, cache, name, scan.num_rows, rejected)

    images = planning.image_work(scan, name, latent, table)
    texts = planning.caption_work(scan, text)
    text_plans = planning.plan_captions(cache, text, texts, config.encode)
    made_text, left_text = _captions(config, cache, text, worker.missing_units(cache, text_plans), task, tasks)
    worker.missing_units(cache, text_plans)

    image_plans = planning.plan_images(cache, latent, images, config.encode)
    made_images, left_images = _images(
        config, cache, latent, worker.missing_units(cache, image_plans), {name: source}, task, tasks
    )
    worker.missing_units(cache, image_plans)

    rejected += _unit_rejects(cache, latent, images) + _unit_rejects(cache, text, texts)
    _report_rejects(cache, name, rejected)
    for index in (cache.index(latent.name), cache.index(text.name)):
        size = sum(index.bytes)
        click.echo(f"{index.kind} store: {len(index)} records in {len(index.shards)} shards, {size / 1e6:.1f} MB")
    if left_text + left_images:
        click.echo(f"{left_text + left_images} units belong to other tasks and were not done when this one ended")
    _check_rejects(config, cache, name, scan.num_rows, rejected)
    return {
        "images": made_images, "captions": made_text, "rejects": len(rejected), "left": left_text + left_images,
        "items": scan.num_rows,
    }  # fmt: skip


def _tasks(index: int | None, count: int | None) -> tuple[int, int]:
    if (index is None) != (count is None):
        raise UserError("--task-index and --task-count go together", fix="--task-index 0 --task-count 4")
    if index is None or count is None:
        here = launch.detect()
        return here.rank, here.world
    if not 0 <= index < count:
        raise UserError("--task-index must be between 0 and --task-count - 1", found=f"{index} of {count}")
    return index, count


def _recipes(config: Config) -> tuple[layout.LatentRecipe, layout.TextRecipe]:
    vae = encoders.describe_vae(config.vae)
    latent = layout.LatentRecipe(
        model=vae.pop("id"), **vae, decoder=image.choose(config.data.decoder), resize=image.RESIZE_RULE,
        crop=image.CROP_RULE, background=config.data.background, storage=config.encode.storage.latent,
    )  # fmt: skip
    text = encoders.describe_text(config.text, captions.instruction(config.text))
    return latent, layout.TextRecipe(model=text.pop("id"), **text, storage=config.encode.storage.text)


def _with_decoder_of(cache: Cache, recipe: layout.LatentRecipe, config: Config) -> layout.LatentRecipe:
    """With `data.decoder: auto`, the decoder with which this cache has been encoded so far goes before the faster one.

    Raises:
        UserError: it cannot be used here; encoding everything again has to be asked for.
    """
    found = [r for r in cache.recipes("latent") if isinstance(r, layout.LatentRecipe)]
    same = [r for r in found if replace(r, decoder=recipe.decoder) == recipe]
    if config.data.decoder != "auto" or not same or recipe in same:
        return recipe
    image.require(same[0].decoder)
    click.echo(f"pictures are decoded by {same[0].decoder}, as those that are in the cache; see data.decoder")
    return same[0]


def _captions(
    config: Config, cache: Cache, recipe: layout.TextRecipe, todo: list[tuple[Plan, Unit]], task: int, tasks: int
) -> tuple[int, int]:
    mine = worker.share(todo, task, tasks)
    if not mine:
        return 0, len(todo)
    encoder = encoders.TextEncoder.load(config.text, captions.instruction(config.text), _device(config))
    calibrate.ensure(
        cache, recipe, cache.plans(recipe.name),
        lambda unit, rows, only: worker.caption_records(recipe, unit, rows, encoder, only=only),
    )  # fmt: skip
    costs = _StorageCosts(recipe)
    made = 0
    with Progress("captions", sum(unit.count for _, unit in mine), ("tokens", lambda: encoder.tokens)) as bar:
        for plan, unit in mine:
            rows = _rows(cache, plan, unit)
            records = worker.caption_records(recipe, unit, rows, encoder)
            how = {"text_mode": encoder.mode}
            made += worker.encode(cache, recipe, plan, unit, records, bar.add, how, costs.measured).records
            costs.tell()
    if encoder.unshared:
        click.echo(f"{encoder.unshared} captions changed the instruction's own tokens and were encoded in full")
    if encoder.truncated:
        click.echo(f"{encoder.truncated} captions had more tokens than text.max_length keeps and were cut at the end")
    return made, len(todo) - len(mine)


def _images(
    config: Config, cache: Cache, recipe: layout.LatentRecipe, todo: list[tuple[Plan, Unit]],
    sources: dict[str, Source], task: int, tasks: int,
) -> tuple[int, int]:  # fmt: skip
    mine = worker.share(todo, task, tasks)
    units = []
    for plan, unit in mine:
        rows = _rows(cache, plan, unit)
        others = set(rows.column("source").to_pylist()) - set(sources)
        if others:
            click.echo(
                f"unit {unit.unit} waits for source {', '.join(sorted(others))}: encode that source to finish it"
            )
        else:
            units.append((plan, unit, rows))
    if not units:
        return 0, len(todo)
    encoder = encoders.LatentEncoder.load(config.vae, _device(config))

    def some(unit: Unit, rows: pa.Table, only: Any) -> Any:
        if set(rows.column("source").to_pylist()) - set(sources):
            return None
        return worker.image_records(
            recipe, unit, rows, sources, encoder, max_pixels=config.data.max_pixels, workers=config.encode.workers,
            only=only,
        )  # fmt: skip

    calibrate.ensure(cache, recipe, cache.plans(recipe.name), some)
    costs = _StorageCosts(recipe)
    made = 0
    with Progress("images", sum(unit.count for _, unit, _ in units)) as bar:
        for plan, unit, rows in units:
            records = worker.image_records(
                recipe, unit, rows, sources, encoder, max_pixels=config.data.max_pixels, workers=config.encode.workers
            )
            made += worker.encode(cache, recipe, plan, unit, records, bar.add, measured=costs.measured).records
            costs.tell()
    return made, len(todo) - len(units)


class _StorageCosts:
    """Says once, after the first unit with records to measure, what a storage other than plain bf16 saves and costs."""

    def __init__(self, recipe: layout.Recipe):
        self.recipe, self.storage = recipe, codec.storage_of(recipe)
        self.measured = None if self.storage == codec.PLAIN else codec.Measured()

    def tell(self) -> None:
        if self.measured is not None and self.measured.records:
            click.echo(self.measured.line(self.recipe.kind, self.storage))
            self.measured = None


def _rows(cache: Cache, plan: Plan, unit: Unit) -> pa.Table:
    return cache.table(plan.table).slice(unit.start, unit.count)


def _device(config: Config) -> Any:
    return launch.resolve_device(config.encode.device)


def _unit_rejects(cache: Cache, recipe: layout.Recipe, work: list[dict[str, Any]]) -> list[Reject]:
    """Rejects of this source's work that no later unit made good."""
    index = cache.index(recipe.name)
    wanted = {row["key"].hex() for row in work}
    latest = {r.key: r for r in index.rejects if r.key in wanted and not index.has(bytes.fromhex(r.key))}
    return list(latest.values())


def _report_rejects(cache: Cache, name: str, rejects: list[Reject]) -> None:
    path = f"reports/rejects-{name}.csv"
    sheet = io.StringIO()
    rows = csv.writer(sheet, lineterminator="\n")
    rows.writerow(["item", "reason"])
    rows.writerows(sorted((r.item, r.reason) for r in rejects))
    cache.files.replace(path, sheet.getvalue().encode())
    if rejects:
        click.echo(f"{len(rejects)} rejected; each with its reason in {cache.files.path(path)}")
        for reason, count in Counter(r.reason for r in rejects).most_common(8):
            click.echo(f"  {count:6d}  {reason}")


def _check_rejects(config: Config, cache: Cache, name: str, items: int, rejects: list[Reject]) -> None:
    if items and len(rejects) / items > config.encode.max_reject_rate:
        _report_rejects(cache, name, rejects)
        raise RejectRateError(
            f"{len(rejects)} of {items} items of source {name!r} were rejected",
            expected=f"at most {config.encode.max_reject_rate:.1%} (encode.max_reject_rate)",
            fix=f"look at {cache.files.path(f'reports/rejects-{name}.csv')}, or raise encode.max_reject_rate",
        )
