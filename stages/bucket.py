"""`sana-pipe bucket`: the cache, or several, to an immutable snapshot. Moves no tensor bytes of its own cache.

Scans and indexes of every cache, then filters, join, deduplication, held-out part, subset, small buckets; then the
shards of other caches are adopted and the snapshot is published.
"""

from __future__ import annotations

import csv
import io
import json
import os
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any

import click
import numpy as np
import pyarrow as pa

from pipeline.amounts import amount
from pipeline.cache import copies, layout, snapshot
from pipeline.cache.adopt import adopt, bring
from pipeline.cache.index import RecordIndex
from pipeline.cache.layout import Paths
from pipeline.cache.snapshot import Snapshot
from pipeline.cache.store import Cache, check_snapshot_name
from pipeline.config import Config
from pipeline.errors import CacheError, UserError
from pipeline.images import buckets
from pipeline.snapshots import selection
from pipeline.snapshots.filters import Filter
from pipeline.snapshots.join import BucketReport, Frame, Joined, assemble, join, unjudged, usable
from pipeline.sources import reasons
from pipeline.sources.caption_rules import instruction


@dataclass
class _Made:
    """A snapshot that is ready to be published."""

    head: dict[str, Any]
    samples: pa.Table
    names: pa.Table
    report: list[BucketReport]
    joined: Joined
    frame: Frame
    moves: list[selection.Move] = field(default_factory=list)


def run(
    config: Config, name: str | None = None, dry_run: bool = False, as_json: bool = False, move: bool = False
) -> str:
    """Make a snapshot of the sources in the cache and in `bucket.caches`.

    Args:
        name: a name that will point to it, beside `latest`. The held-out part is called NAME.heldout.
        dry_run: report, and write nothing.
        as_json: print one JSON object instead of lines.
        move: let the name point to it though it points to another snapshot.

    Returns:
        The snapshot's id; "" for a dry run.

    Raises:
        CacheError: no source yet, or sources of different recipes, or of other settings than the configuration.
        IntegrityError: a file that the snapshot would name is missing, or a shard is of another size.
        UserError: nothing is left to train on, a setting names what is not there, or the name is none or taken.
    """
    own = config.bucket
    heldout_name = f"{name or 'latest'}.heldout"
    for label in ([name] if name is not None else []) + ([heldout_name] if own.heldout else []):
        check_snapshot_name(label)
    caches = _caches(config, dry_run)
    cache = caches[0]
    if not dry_run:
        copies.repair_all(cache.files)
    unused = {source for source, one in own.sources.items() if not one.weight}
    found = _sources(caches, unused)
    if not found:
        raise CacheError(
            f"{config.cache}: no source has been encoded into this cache", fix="sana-pipe encode --data DIR"
        )
    if unknown := sorted(set(own.sources) - set(found)):
        raise CacheError(
            f"bucket.sources names {', '.join(unknown)}, which no cache holds", expected=", ".join(sorted(found))
        )
    latent, text = _recipes(config, {source: one for source, one in found.items() if source not in unused} or found)
    tables = buckets.resolutions(own, config.data, latent.compression)
    shapes = [shape for _, table in tables for shape in table]
    batches = buckets.batches(own, shapes, latent.compression)
    latents, texts = (RecordIndex.union([one.index(name) for one in caches]) for name in (latent.name, text.name))

    joined = Joined()
    scans = _selected(config, joined, found)
    for source, scan in scans.items():
        first = 0
        for variant, table in tables:
            join(
                joined,
                source,
                scan,
                table,
                latent,
                text,
                latents,
                texts,
                first=first,
                variant=variant,
                policy=config.data if own.resolutions else None,
            )
            first += len(table)
    frame = joined.frame()
    earlier = _sample_ids(cache.open_snapshot(own.grow)) if own.grow else np.empty(0, np.uint64)
    if own.dedup == "image":
        frame = selection.deduplicated(joined, frame, list(own.sources), earlier)
    away = selection.heldout(frame, own.heldout)

    def make(frame: Frame, joined: Joined, small: str, policies: dict[str, Any]) -> _Made:
        moves: list[selection.Move] = []
        if small == "reassign":
            small, first = "carry", 0
            for _, table in tables:
                part = batches[first : first + len(table)]
                frame, more = selection.reassigned(joined, frame, table, part, first, latent, latents)
                moves, first = moves + more, first + len(table)
        head, samples, names, report = assemble(
            joined,
            shapes,
            batch=batches,
            small=small,
            pad_text_multiple=own.pad_text_multiple,
            latent=latent,
            text=text,
            latents=latents,
            texts=texts,
            frame=frame,
            before=selection.places(frame, earlier),
            sources={source: body["table"] for source, (_, body) in sorted(found.items()) if source in scans},
            weights=_weights(config),
            policies=policies,
        )
        return _Made(head, samples, names, report, joined, frame, moves)

    told: dict[str, Any] = {"dry_run": dry_run, "name": name, "reports": []}
    kept_away = None
    if away.any():
        side = Joined(joined.sources)
        side.leave("not in the held-out part", int((~away).sum()))
        policies: dict[str, Any] = {"heldout": {"share": own.heldout, "side": "heldout"}}
        kept_away = make(frame.take(away), side, "carry", policies)
        joined.leave("held out for validation", int(away.sum()), "bucket.heldout=0")
        frame = frame.take(~away)
    if own.subset is not None:
        pictures = len(np.unique(frame.picture_id))
        if pictures < own.subset:
            told["note"] = f"bucket.subset = {own.subset}, but there are only {pictures} pictures"
        frame = selection.subset(joined, frame, own.subset, earlier)
    policies = {"order": own.order} if own.order != "random" else {}
    if own.heldout:
        policies["heldout"] = {"share": own.heldout, "side": "train"}
    made = make(frame, joined, own.small, policies)
    told |= _publish(made, caches, (latents, texts), dry_run, name, move)
    if kept_away is not None:
        told["heldout"] = _publish(kept_away, caches, (latents, texts), dry_run, heldout_name, move, latest=False)
    told["reassign"] = _reassign_lists(cache, made.moves, joined.sources, dry_run) if own.small == "reassign" else []
    if joined.examples:
        lists = ((one, reasons.report(source)) for source, (one, _) in found.items() if source in scans)
        told["reports"] = [one.files.where(name) for one, name in lists if one.files.exists(name)]
    _tell(told, as_json)
    return told["snapshot"] or ""


# ---------------------------------------------------------------- what goes in


def _caches(config: Config, dry_run: bool) -> list[Cache]:
    """The own cache, then the others."""
    others = [Cache(root, mirror=config.mirror) for root in config.bucket.caches]
    first = Cache.of(config, create=bool(others) and not dry_run)
    roots = [one.location if "://" in one.location else os.path.realpath(one.location) for one in (first, *others)]
    if len(set(roots)) < len(roots):
        raise UserError("bucket.caches names a cache twice, or the own one", found=", ".join(roots))
    return [first, *others]


def _sources(caches: list[Cache], unused: set[str]) -> dict[str, tuple[Cache, dict[str, Any]]]:
    """Source -> the cache that holds it, and its last scan. Sources that are not used may contradict one another."""
    found: dict[str, tuple[Cache, dict[str, Any]]] = {}
    for cache in caches:
        for source in cache.sources():
            body = cache.last_scan(source)
            if body is None:
                continue
            first = found.setdefault(source, (cache, body))
            if first[1]["table"] != body["table"] and source not in unused:
                raise CacheError(
                    f"{first[0].location} and {cache.location} both have a source {source!r}, with different items",
                    fix="encode one of them with another --source-name: samples are told apart by it",
                )
    return dict(sorted(found.items()))


def _selected(config: Config, joined: Joined, found: dict[str, tuple[Cache, dict[str, Any]]]) -> dict[str, pa.Table]:
    """The usable items of the sources, filtered."""
    own, scans = config.bucket, {}
    for source, (cache, body) in found.items():
        scan = cache.table(body["table"])
        if source in own.sources and not own.sources[source].weight:
            setting = f"bucket.sources.{source}.weight"
            joined.leave(f"{setting} is 0", scan.num_rows, f"another {setting}")
            continue
        scans[source] = usable(joined, unjudged(scan) if own.resolutions else scan)
    common = Filter(own.filter, "bucket.filter") if own.filter else None
    by_source = {
        source: Filter(setting.filter, f"bucket.sources.{source}.filter")
        for source, setting in own.sources.items()
        if setting.filter and source in scans
    }
    return selection.filtered(joined, scans, common, by_source) if common or by_source else scans


def _weights(config: Config) -> dict[str, Fraction]:
    return {source: Fraction(str(setting.weight)) for source, setting in config.bucket.sources.items()}


def _sample_ids(opened: Snapshot) -> np.ndarray:
    return np.concatenate([np.empty(0, np.uint64), *opened.sample_ids()])


# ---------------------------------------------------------------- what comes out


def _publish(
    made: _Made,
    caches: list[Cache],
    indexes: tuple[RecordIndex, RecordIndex],
    dry_run: bool,
    name: str | None,
    move: bool,
    latest: bool = True,
) -> dict[str, Any]:
    """Adopt what is of other caches and publish the snapshot; returns the report."""
    cache, head = caches[0], made.head
    brought = 0
    for index in indexes:
        origin = dict(zip(index.shards, index.origin, strict=True))
        for at, other in enumerate(caches[1:], start=1):
            used = [shard for shard in head["shards"][index.kind] if origin[shard["name"]] == at]
            brought += sum(shard["bytes"] for shard in used)
            if not dry_run:
                adopt(cache, other, index.recipe, {shard["name"] for shard in used})
    snapshot_id = None
    if not dry_run:
        for other in caches[1:]:
            tables = {body["table"] for source in other.sources() if (body := other.last_scan(source)) is not None}
            for digest in tables & set(head["sources"].values()):
                bring(cache.files, other.files, Paths.table(digest, "parquet"), digest)
        whole = snapshot.build(cache.files, head, made.samples, made.names)
        snapshot_id = cache.add_snapshot(whole, name, latest=latest, move=move)
    frame, sources = made.frame, made.joined.sources
    held = np.bincount(frame.source, minlength=len(sources)).tolist()
    return {
        "snapshot": snapshot_id,
        "name": name,
        "samples": head["counts"]["samples"],
        "steps_per_epoch": sum(float(row.steps) for row in made.report),
        "buckets": [{**asdict(row), "steps": float(row.steps), "crop": float(row.crop)} for row in made.report],
        "sources": dict(zip(sources, held, strict=True)),
        "left_out": [
            {
                "reason": reason,
                "samples": count,
                "keep": made.joined.keep.get(reason),
                **({"examples": some} if (some := made.joined.examples.get(reason)) else {}),
            }
            for reason, count in head["left_out"].items()
        ],
        "adopted_bytes": brought,
    }


def _reassign_lists(
    cache: Cache, moves: list[selection.Move], sources: list[str], dry_run: bool
) -> list[dict[str, Any]]:
    """Write what `encode --reassign` takes, a file per source; lists that are done are removed."""
    told = []
    for source in sources:
        where = f"reports/reassign-{source}.csv"
        rows = [move[1:] for move in moves if move[0] == source]
        if rows:
            told.append({"source": source, "items": len(rows), "file": cache.files.where(where)})
        if dry_run:
            continue
        if not rows:
            cache.files.remove(where)
            continue
        sheet = io.StringIO()
        out = csv.writer(sheet, lineterminator="\n")
        out.writerow(["item", "height", "width"])
        out.writerows(sorted(rows))
        cache.files.replace(where, sheet.getvalue().encode())
    return told


def _tell(told: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(told))
        return
    for one in [told, *([told["heldout"]] if "heldout" in told else [])]:
        if one is not told:
            click.echo("held out:")
        click.echo(f"{'bucket':>11} {'samples':>9} {'batch':>6} {'steps/epoch':>12} {'crop loss':>10}")
        for row in one["buckets"]:
            click.echo(
                f"{row['height']:>5}x{row['width']:<5} {row['samples']:>9} {row['batch']:>6} {row['steps']:>12.2f} "
                f"{row['crop']:>10.1%}" + (f"  {row['note']}" if row["note"] else "")
            )
        click.echo(f"{one['samples']} samples, {one['steps_per_epoch']:.2f} optimizer steps per epoch")
        if one["adopted_bytes"]:
            verb = "would be" if told["dry_run"] else "were"
            click.echo(f"{amount(one['adopted_bytes'])} of shards {verb} linked or copied from other caches")
        if one is told:
            for left in one["left_out"]:
                keep = f"; to keep: {left['keep']}" if left["keep"] else ""
                click.echo(f"left out: {left['samples']:6d}  {left['reason']}{keep}")
                if "examples" in left:
                    click.echo(f"{'':18}{reasons.examples(left['examples'], left['samples'])}")
            for file in told["reports"]:
                click.echo(f"each reject with its reason: {file}")
            for entry in told["reassign"]:
                click.echo(
                    f"{entry['items']} pictures of {entry['source']!r} have to be encoded for another bucket: "
                    f"sana-pipe encode --data ... --reassign {entry['file']}"
                )
            if "note" in told:
                click.echo(told["note"])
        named = f" ({one['name']})" if one["name"] else ""
        click.echo(f"snapshot {one['snapshot']}{named}" if one["snapshot"] else f"dry run: no snapshot was made{named}")


def _recipes(
    config: Config, scans: dict[str, tuple[Cache, dict[str, Any]]]
) -> tuple[layout.LatentRecipe, layout.TextRecipe]:
    """The recipes of the sources, which must agree with one another and with the configuration."""
    chosen: dict[str, layout.Recipe] = {}
    for kind in ("latent", "text"):
        by_source = {source: cache.recipe(body[kind]) for source, (cache, body) in scans.items()}
        first_source, first = next(iter(sorted(by_source.items())))
        for source, recipe in by_source.items():
            if recipe != first:
                raise CacheError(
                    f"sources {first_source!r} and {source!r} were encoded with different {kind} recipes",
                    found="; ".join(first.difference(recipe)),
                    fix="encode both with the same configuration",
                )
        chosen[kind] = first
    latent, text = chosen["latent"], chosen["text"]
    assert isinstance(latent, layout.LatentRecipe)
    assert isinstance(text, layout.TextRecipe)
    wanted: list[tuple[str, Any, Any]] = [
        ("vae.dtype", config.vae.dtype, latent.dtype),
        ("text.dtype", config.text.dtype, text.dtype),
        ("text.recipe", config.text.recipe, text.normalisation),
        ("text.max_length", config.text.max_length, text.max_length),
        ("text.instruction", instruction(config.text), text.instruction),
        ("data.background", config.data.background, latent.background),
    ]
    wanted += [
        ("encode.storage.latent", config.encode.storage.latent, latent.storage),
        ("encode.storage.text", config.encode.storage.text, text.storage),
    ]
    if config.vae.scaling_factor is not None:
        wanted.append(("vae.scaling_factor", config.vae.scaling_factor, latent.scaling_factor))
    for key, section, recipe in (("vae", config.vae, latent), ("text", config.text, text)):
        if recipe.model and (recipe.model, recipe.revision) != (section.id, section.revision):
            click.echo(
                f"note: the cache's {recipe.kind} records were made with {recipe.model!r} (revision "
                f"{recipe.revision!r}), {key} names {section.id!r}: equal weights, if `encode` found nothing new to do",
                err=True,
            )
    wrong = [f"{key}: configuration {mine!r}, cache {theirs!r}" for key, mine, theirs in wanted if mine != theirs]
    if wrong:
        raise CacheError(
            "the cache was encoded with other settings than this configuration asks for",
            found="; ".join(wrong),
            fix="run sana-pipe encode with this configuration, or use the configuration of the cache",
        )
    return latent, text
