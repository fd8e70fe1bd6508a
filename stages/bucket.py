"""`sana-pipe bucket`: make an immutable snapshot from one cache or several. Copies no tensor bytes of the first.

Steps: read the scans and indexes of every cache, filter, join, deduplicate, hold out a part, take a subset, move or
drop small buckets; then adopt the shards of other caches and publish the snapshot.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any

import click
import numpy as np
import pyarrow as pa

from pipeline.amounts import amount
from pipeline.cache import copies
from pipeline.cache.adopt import adopt, bring
from pipeline.cache.arrow import batches
from pipeline.cache.cache import Cache, check_snapshot_name
from pipeline.cache.findings import fix_of_head
from pipeline.cache.index import RecordIndex
from pipeline.cache.layout import Paths
from pipeline.cache.recipes import Recipe
from pipeline.cache.snapshot import Head, HeldOut, Policies, Snapshot, check_sizes, unwritten_chunk, write_chunk
from pipeline.config import BalanceConfig, BucketConfig, Config, DataConfig, SourceConfig, setting
from pipeline.errors import CacheError, IntegrityError, UserError, escaped
from pipeline.images import buckets
from pipeline.signals import Signal
from pipeline.signals.latent import compression
from pipeline.signals.phash import HashRecipe
from pipeline.snapshots import balance, near_samples, packing, selection
from pipeline.snapshots.filters import Filter
from pipeline.snapshots.join import (
    Assembled,
    BucketTable,
    EncodedRecords,
    Frame,
    Joined,
    Resolution,
    assemble,
    folder_repeats,
    join,
    pieces,
    usable,
    without_policy,
)
from pipeline.snapshots.near import Report
from pipeline.sources import reject_kinds
from pipeline.work.progress import Progress


@dataclass(frozen=True)
class _Scan:
    """The last scan of a source, and the cache that holds it. table: digest of the scan's table."""

    cache: Cache
    table: str
    recipes: dict[str, str]


MANY = 200_000
"""Samples from which on the progress of a comparison is shown."""


@dataclass(frozen=True)
class _Inputs:
    """What a snapshot is made from.

    Attributes:
        caches: the cache of the configuration, then `bucket.caches`.
        scans: by source, also of sources that are not used.
        unused: sources of weight 0.
        resolutions: one after the other, they are `table`.
        options: what the configuration says, as `Head.options`.
    """

    caches: list[Cache]
    scans: dict[str, _Scan]
    unused: set[str]
    records: EncodedRecords
    resolutions: list[Resolution]
    table: BucketTable
    options: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Made:
    """A snapshot to be published. near: the pictures that look the same, where they were compared; leaked: as in
    `Head`; balance: the clusters."""

    assembled: Assembled
    joined: Joined
    frame: Frame
    near: near_samples.NearGroups | None = None
    leaked: dict[str, int] = field(default_factory=dict)
    balance: list[dict[str, Any]] = field(default_factory=list)


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
        UserError: nothing is left to train on, a setting names what is not there, or the name is not valid or taken.
    """
    settings, heldout_name = config.bucket, f"{name or 'latest'}.heldout"
    for label in ([name] if name is not None else []) + ([heldout_name] if settings.heldout else []):
        check_snapshot_name(label)
    caches = _caches(config, dry_run)
    cache = caches[0]
    if not dry_run:
        copies.repair_all(cache.files)
    inputs = _inputs(config, caches)
    report: dict[str, Any] = {"dry_run": dry_run, "name": name, "reports": []}
    made, heldout_made, note = _both(config, inputs)
    joined = made.joined
    report |= {"note": note} if note else {}
    report |= _publish(made, inputs, dry_run, name, move)
    if heldout_made is not None:
        report["heldout"] = _publish(heldout_made, inputs, dry_run, heldout_name, move, latest=False)
    if joined.examples:
        lists = [(scan.cache.files, reject_kinds.report(source)) for source, scan in _used(inputs)]
        report["reports"] = [files.where(path) for files, path in lists if files.exists(path)]
    _print(report, as_json)
    return report["snapshot"] or ""


def again(config: Config, name: str, move: bool = False) -> str:
    """Write the lists and chunks of a snapshot again, from the scans and with the options that it was made with.

    Args:
        name: of the snapshot, or its id.
        move: if its sources or records have changed, let the name point to the snapshot that those give.

    Returns:
        The snapshot's id.

    Raises:
        CacheError: there is no such snapshot, or it cannot be made again.
    """
    cache = Cache.of(config)
    copies.repair_all(cache.files)
    snapshot_id = cache.snapshot_of(name) or name
    head = Head.read(cache.files, snapshot_id)
    try:
        made = _made_again(config, cache, head) if head.folder is None else _packed_again(cache, head)
    except IntegrityError as error:
        raise CacheError(
            f"{cache.location}: snapshot {name} cannot be made again: {error.what}", fix=fix_of_head(name)
        ) from None
    new, lists = made.with_tables()
    if (new.chunks, new.shards) == (head.chunks, head.shards):
        cache.put_lists(lists)
    elif move:
        snapshot_id = cache.add_snapshot(made, name, latest=False, move=True)
    else:
        raise CacheError(
            f"{cache.location}: snapshot {name} cannot be made again: its records have changed since",
            fix=f"sana-pipe bucket --again {name} --move, which lets the name point to what comes out now",
        )
    click.echo(f"snapshot {snapshot_id} ({name})")
    return snapshot_id


def _made_again(config: Config, cache: Cache, head: Head) -> Head:
    options = head.options or {}
    bucket = BucketConfig.model_validate(options.get("bucket", {}))
    used = {source: setting for source, setting in bucket.sources.items() if source in head.sources}
    bucket = bucket.model_copy(update={"sources": used})
    data = DataConfig.model_validate({**config.data.model_dump(), **options.get("data", {})})
    config = config.model_copy(update={"bucket": bucket, "data": data})
    recipes = {kind: recipe.name for kind, recipe in head.recipes_by_kind.items()}
    scans = {source: _Scan(cache, table, recipes) for source, table in sorted(head.sources.items())}
    made, heldout, _ = _both(config, _inputs(config, [cache], scans))
    side = head.policies.heldout
    assembled = (heldout or made).assembled if side is not None and side.side == "heldout" else made.assembled
    chunks = tuple(write_chunk(cache.files, *tables) for tables in assembled.chunks())
    return replace(assembled.head, chunks=chunks, options=head.options)


def _packed_again(cache: Cache, head: Head) -> Head:
    packed, source = head.policies.packed, head.parent
    assert head.folder is not None and packed is not None and source is not None
    return packing.assembled(cache, Snapshot(cache.files, source), cache.plan(head.folder, 0), packed.window)


# ---------------------------------------------------------------- inputs


def _caches(config: Config, dry_run: bool) -> list[Cache]:
    """The cache of the configuration, then `bucket.caches`."""
    others = Cache.others_of(config)
    caches = [Cache.of(config, create=bool(others) and not dry_run), *others]
    roots = [cache.location if "://" in cache.location else os.path.realpath(cache.location) for cache in caches]
    if len(set(roots)) < len(roots):
        raise UserError("bucket.caches names a cache twice, or the one of `cache`", found=", ".join(roots))
    return caches


def _inputs(config: Config, caches: list[Cache], scans: dict[str, _Scan] | None = None) -> _Inputs:
    """scans: of the sources that are used; default: the last of every source."""
    settings = config.bucket
    unused = {source for source, setting in settings.sources.items() if not setting.weight}
    scans = _scans(caches, unused) if scans is None else scans
    if not scans:
        raise CacheError(
            f"{config.cache}: no source has been encoded into this cache", fix="sana-pipe encode --data DIR"
        )
    if unknown := sorted(set(settings.sources) - set(scans)):
        raise CacheError(
            f"bucket.sources names {', '.join(unknown)}, which no cache holds", expected=", ".join(sorted(scans))
        )
    recipes = _recipes(config, {source: scan for source, scan in scans.items() if source not in unused} or scans)
    factor = compression(recipes)
    resolutions, shapes = [], list[tuple[int, int]]()
    for variant, table in buckets.resolutions(settings, config.data, factor):
        policy = config.data if settings.resolutions else None
        resolutions.append(Resolution(table, len(shapes), variant, policy))
        shapes += table
    batches = buckets.batches(settings, shapes, factor)
    indexes = {one.kind: RecordIndex.union([cache.index(one.name) for cache in caches]) for one in recipes}
    records = EncodedRecords(recipes, indexes)
    options = _options(config, caches[0])
    return _Inputs(caches, scans, unused, records, resolutions, BucketTable(shapes, batches), options)


def _options(config: Config, cache: Cache) -> dict[str, dict[str, Any]]:
    """What decides a snapshot beside its scans. Records of other caches lie in its own."""
    elsewhere = {"caches", "pack_mib", "pack_window"}
    bucket = config.bucket.model_dump(mode="json", exclude_defaults=True, exclude=elsewhere)
    if config.bucket.grow:
        bucket["grow"] = cache.open_snapshot(config.bucket.grow).id  # the name may move
    policy = {"resolution", "buckets", "min_side", "max_upscale", "max_crop_loss"}
    return {"bucket": bucket, "data": config.data.model_dump(mode="json", include=policy)}


def _scans(caches: list[Cache], unused: set[str]) -> dict[str, _Scan]:
    """The last scan of each source. Caches may hold different scans of an unused source."""
    scans: dict[str, _Scan] = {}
    for cache in caches:
        for source in cache.sources():
            body = cache.last_scan(source)
            if body is None:
                continue
            scan = _Scan(cache, body["table"], body["recipes"])
            first = scans.setdefault(source, scan)
            if first.table != scan.table and source not in unused:
                raise CacheError(
                    f"{first.cache.location} and {cache.location} both have a source {source!r}, with different items",
                    fix="encode one of them with another --source-name: it is part of a sample's id",
                )
    return dict(sorted(scans.items()))


def _used(inputs: _Inputs) -> Iterator[tuple[str, _Scan]]:
    return ((source, scan) for source, scan in inputs.scans.items() if source not in inputs.unused)


def _joined(config: Config, inputs: _Inputs) -> Joined:
    """The usable items of the sources, filtered, at all resolutions."""
    settings, joined = config.bucket, Joined(scratch=inputs.caches[0].files.scratch)
    items: dict[str, pa.Table] = {}
    for source, scan in inputs.scans.items():
        table = scan.cache.table(scan.table)
        if source in inputs.unused:
            option = f"bucket.sources.{source}.weight"
            joined.leave(f"{option} is 0", table.num_rows, f"another {option}")
            continue
        items[source] = usable(joined, without_policy(table) if settings.resolutions else table)
    common = Filter(settings.filter, "bucket.filter") if settings.filter else None
    by_source = {
        source: Filter(setting.filter, f"bucket.sources.{source}.filter")
        for source, setting in settings.sources.items()
        if setting.filter and source in items
    }
    if common or by_source:
        items = selection.filtered(joined, items, common, by_source)
    for source, table in items.items():
        if repeats := _repeats(table, settings.sources.get(source, SourceConfig()).repeats):
            joined.repeats[source] = repeats
        for resolution in inputs.resolutions:
            join(joined, source, table, inputs.records, resolution)
    return joined


def _repeats(table: pa.Table, wanted: bool | None) -> dict[int, int]:
    """Visits by the numbers of the folders -> items; empty if they do not count. wanted: `repeats` of the source."""
    counts: Counter[int] = Counter()
    for batch in batches(table.select(["item"])) if wanted is not False else ():
        numbers, items = np.unique(folder_repeats(batch.column("item").combine_chunks()), return_counts=True)
        counts.update(dict(zip(numbers.tolist(), items.tolist(), strict=True)))
    if wanted is None and 0 in counts:
        return {}
    return {visits or 1: items for visits, items in sorted(counts.items())} if set(counts) - {0, 1} else {}


def _earlier(config: Config, cache: Cache) -> selection.Earlier:
    """The snapshot that the new snapshot grows from."""
    ids = cache.open_snapshot(config.bucket.grow).sample_ids() if config.bucket.grow else ()
    return selection.Earlier(cache.files.scratch, ids)


# ---------------------------------------------------------------- outputs


def _both(config: Config, inputs: _Inputs) -> tuple[Made, Made | None, str]:
    """The snapshot to train on, the held-out part if there is one, and a note for the user."""
    settings, note = config.bucket, ""
    joined = _joined(config, inputs)
    frame = joined.frame()
    earlier = _earlier(config, inputs.caches[0])
    dedup = partial(
        selection.deduplicated,
        joined,
        frame,
        list(settings.sources),
        earlier,
        keep_captions=settings.dedup_captions == "keep",
    )
    if settings.dedup == "image":
        frame = dedup()
    near = _near_groups(config, inputs, joined, frame)
    keys = None if near is None else near.keys
    if settings.dedup == "near":
        frame = dedup(keys, selection.larger(frame, inputs.records))
        keys = None  # one picture of each group is left
    frame, heldout_made = _held_out(config, inputs, joined, frame, earlier, keys)
    if settings.subset is not None:
        frame, pictures = selection.subset(joined, frame, settings.subset, earlier)
        if pictures < settings.subset:
            note = f"bucket.subset = {settings.subset}, but there are only {pictures} pictures"
    distance, visits = None if keys is None else settings.dedup_distance, [Fraction(1)]
    if settings.balance is not None and len(frame):
        frame, visits = _balanced(settings.balance, inputs, frame)
    made = _make(config, inputs, joined, frame, earlier, distance=distance, clusters=visits)
    made = replace(made, balance=_described_balance(joined, frame, visits))
    return replace(made, near=near, leaked=_leaked(config, inputs, frame)), heldout_made, note


def _balanced(settings: BalanceConfig, inputs: _Inputs, frame: Frame) -> tuple[Frame, list[Fraction]]:
    """The samples with their clusters, and the visits per epoch of each."""
    pooled = balance.vectors(settings.by, frame, inputs.records, inputs.caches, inputs.table.shapes)
    member = balance.clusters(pooled, frame.sample_id, settings.clusters)
    return replace(frame, cluster=member), balance.weights(member, settings.strength)


def _described_balance(joined: Joined, frame: Frame, visits: list[Fraction]) -> list[dict[str, Any]]:
    """The clusters, the largest first, as JSON values."""
    if len(visits) < 2:
        return []
    sizes = np.bincount(frame.cluster, minlength=len(visits))
    after = sizes * np.array([float(each) for each in visits])
    order = np.argsort(-sizes, kind="stable")
    examples = {int(c): int(row) for c, row in zip(*np.unique(frame.cluster, return_index=True), strict=True)}
    return [
        {
            "samples": int(sizes[c]),
            "share": float(sizes[c] / sizes.sum()),
            "visits": float(visits[c]),
            "share_of_visits": float(after[c] / after.sum()),
            "example": f"{joined.sources[int(frame.source[examples[c]])]}: {frame.item[examples[c]].as_py()}",
        }
        for c in order.tolist()
        if sizes[c]
    ]


def _leaked(config: Config, inputs: _Inputs, frame: Frame) -> dict[str, int]:
    """Of the held-out snapshot that the configuration names, the samples that look like one of the training."""
    validation, cache = config.train.validation, inputs.caches[0]
    named = None if validation is None else validation.snapshot
    if named is None or HashRecipe.kind not in inputs.records.indexes:
        return {}
    try:
        part = cache.open_snapshot(named)
    except CacheError:  # not made yet; `train` says so if it stays away
        return {}
    if part.head.recipes.get(HashRecipe.kind) is None:
        return {}
    distance = config.bucket.dedup_distance
    with _comparing(len(frame)) as report:
        return {part.id: near_samples.leaked(frame, inputs.records, inputs.caches, part, distance, report)}


@contextmanager
def _comparing(samples: int) -> Iterator[Report]:
    """Show how far a comparison of many hashes is."""
    if samples <= MANY:
        yield lambda done, total: None
        return
    with Progress("hashes compared", samples) as bar:
        yield bar.reach


def _near_groups(config: Config, inputs: _Inputs, joined: Joined, frame: Frame) -> near_samples.NearGroups | None:
    """The pictures that look the same, where that decides anything.

    Raises:
        CacheError: `bucket.dedup: near` in a cache without hashes.
    """
    settings, records = config.bucket, inputs.records
    if HashRecipe.kind not in records.indexes:
        if settings.dedup == "near":
            raise CacheError(
                "bucket.dedup: near compares hashes of pictures, and not all sources have them",
                expected=f"records of the kind {HashRecipe.kind}",
                found=", ".join(records.indexes),
                fix="sana-pipe encode --set 'encode.signals=[phash]' with each source and resolution (latents stay)",
            )
        return None
    if settings.dedup != "near" and not settings.heldout:
        return None
    with _comparing(len(frame)) as report:
        return near_samples.near_groups(joined, frame, records, inputs.caches, settings.dedup_distance, report)


def _held_out(
    config: Config,
    inputs: _Inputs,
    joined: Joined,
    frame: Frame,
    earlier: selection.Earlier,
    keys: np.ndarray | None,
) -> tuple[Frame, Made | None]:
    """The samples to train on, and the snapshot of those held out, if there are any. keys: of the groups that stay on
    one side; None: digests."""
    distance = None if keys is None else config.bucket.dedup_distance
    held_out = selection.heldout(frame.digest if keys is None else keys, config.bucket.heldout, joined.scratch)
    if keys is not None:  # a new copy may have another digest, and with it another side
        held_out &= ~selection.in_earlier_snapshot(joined, frame, earlier, keys)
    if not held_out.any():
        return frame, None
    heldout_joined = Joined(joined.sources, scratch=joined.scratch)
    heldout_joined.leave("not in the held-out part", len(frame) - int(held_out.sum()))
    taken = frame.take(held_out, joined.scratch)
    made = _make(config, inputs, heldout_joined, taken, earlier, heldout=True, distance=distance)
    joined.leave("held out for validation", int(held_out.sum()), "bucket.heldout=0")
    return frame.take(np.logical_not(held_out, out=held_out), joined.scratch), made


def _make(
    config: Config,
    inputs: _Inputs,
    joined: Joined,
    frame: Frame,
    earlier: selection.Earlier,
    *,
    heldout: bool = False,
    distance: int | None = None,
    clusters: Sequence[Fraction] = (Fraction(1),),
) -> Made:
    """Assemble a snapshot of some samples.

    Args:
        heldout: it is the held-out part, which keeps small buckets.
        distance: as in `HeldOut`.
        clusters: visits per epoch by `Frame.cluster`.
    """
    settings, records, side = config.bucket, inputs.records, "heldout" if heldout else "train"
    small = "carry" if heldout else settings.remainder
    policies = Policies(
        small=small,
        pad_text_multiple=settings.pad_text_multiple,
        order=None if heldout or settings.order == "random" else settings.order,
        heldout=HeldOut(settings.heldout, side, distance) if settings.heldout else None,
    )
    assembled = assemble(
        joined,
        frame,
        records,
        inputs.table,
        policies,
        {source: scan.table for source, scan in _used(inputs)},
        weights={source: Fraction(str(setting.weight)) for source, setting in settings.sources.items()},
        clusters=clusters,
        places=selection.places(joined, frame, earlier),
    )
    return Made(assembled, joined, frame)


def _publish(
    made: Made, inputs: _Inputs, dry_run: bool, name: str | None, move: bool, latest: bool = True
) -> dict[str, Any]:
    """Adopt the shards of other caches and publish the snapshot; returns the report."""
    cache = inputs.caches[0]
    head = replace(made.assembled.head, options=inputs.options, leaked=made.leaked or None)
    adopted_bytes = _adopt(made, inputs, dry_run)
    before = snapshot_id = None
    if dry_run:
        _check_shards(made, inputs)
        if name is not None and not move and cache.snapshot_of(name) is not None:
            chunks = tuple(unwritten_chunk(*tables) for tables in made.assembled.chunks())
            cache.check_taken(replace(head, chunks=chunks), name)
    else:
        before = cache.snapshot_of("latest")
        chunks = tuple(write_chunk(cache.files, *tables) for tables in made.assembled.chunks())
        snapshot_id = cache.add_snapshot(replace(head, chunks=chunks), name, latest=latest, move=move)
    sources, rows = made.joined.sources, made.assembled.report
    counts = np.zeros(len(sources), np.int64)
    for piece in pieces(len(made.frame)):  # numpy counts in a copy
        counts += np.bincount(made.frame.source[piece], minlength=len(sources))
    repeated = selection.repeated(made.joined, made.frame, inputs.records)
    return {
        "snapshot": snapshot_id,
        "unchanged": snapshot_id is not None and snapshot_id == before,
        "name": name,
        "samples": head.samples,
        "repeated_pictures": repeated,
        "steps_per_epoch": sum(float(row.steps) for row in rows),
        "buckets": [{**asdict(row), "steps": float(row.steps), "crop": float(row.crop)} for row in rows],
        "sources": dict(zip(sources, counts.tolist(), strict=True)),
        "left_out": [
            {
                "reason": reason,
                "samples": count,
                "keep": made.joined.keep.get(reason),
                **({"examples": examples} if (examples := made.joined.examples.get(reason)) else {}),
            }
            for reason, count in head.left_out.items()
        ],
        "adopted_bytes": adopted_bytes,
        "repeats": made.joined.repeats,
        "near": None if made.near is None else _described(made.near),
        "leaked": made.leaked,
        "balance": made.balance,
    }


def _described(near: near_samples.NearGroups) -> dict[str, Any]:
    """As JSON values."""
    return {"groups": near.count, "pictures": near.pictures, "largest": [asdict(group) for group in near.groups]}


def _check_shards(made: Made, inputs: _Inputs) -> None:
    """Raise IntegrityError if a shard is missing, in whichever cache it is, or of another size."""
    head = made.assembled.head
    for index in inputs.records.indexes.values():
        cache_of = dict(zip(index.shards, index.caches, strict=True))
        for number, cache in enumerate(inputs.caches):
            shards = (shard for shard in head.shards[index.kind] if cache_of[shard.name] == number)
            check_sizes(cache.files, ((head.shard_path(index.kind, shard.name), shard.bytes) for shard in shards))


def _adopt(made: Made, inputs: _Inputs, dry_run: bool) -> int:
    """Bring the shards and scans of other caches into the first cache. Returns the bytes of these shards."""
    head, (cache, *others) = made.assembled.head, inputs.caches
    total = 0
    for index in inputs.records.indexes.values():
        cache_of = dict(zip(index.shards, index.caches, strict=True))
        for number, other in enumerate(others, start=1):
            shards = [shard for shard in head.shards[index.kind] if cache_of[shard.name] == number]
            total += sum(shard.bytes for shard in shards)
            if not dry_run:
                adopt(cache, other, index.recipe, {shard.name for shard in shards})
    for other in () if dry_run else others:
        tables = {body["table"] for source in other.sources() if (body := other.last_scan(source)) is not None}
        for digest in tables & set(head.sources.values()):
            bring(cache.files, other.files, Paths.table(digest, "parquet"), digest)
            cache.files.duplicate(Paths.table(digest, "parquet"))
    return total


def _print(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(report))
        return
    _print_buckets(report, report["dry_run"])
    for source, repeats in report["repeats"].items():
        visits = ", ".join(f"{count} pictures {times} times" for times, count in repeats.items())
        click.echo(
            f"the folders of source {source!r} say how often an epoch visits their pictures: {visits} (each once: "
            f"{setting(f'bucket.sources.{source}.repeats', False)})"
        )
    for entry in report["left_out"]:
        keep = f"; to keep: {entry['keep']}" if entry["keep"] else ""
        click.echo(f"left out: {entry['samples']:6d}  {entry['reason']}{keep}")
        if "examples" in entry:
            click.echo(f"{'':18}{reject_kinds.examples(entry['examples'], entry['samples'])}")
    for file in report["reports"]:
        click.echo(f"each reject with its reason: {file}")
    if "note" in report:
        click.echo(report["note"])
    _print_id(report)
    if "heldout" in report:
        click.echo("held out:")
        _print_buckets(report["heldout"], report["dry_run"])
        _print_id(report["heldout"])


def _print_buckets(report: dict[str, Any], dry_run: bool) -> None:
    click.echo(f"{'bucket':>11} {'samples':>9} {'batch':>6} {'steps/epoch':>12} {'crop loss':>10}")
    for row in report["buckets"]:
        click.echo(
            f"{row['height']:>5}x{row['width']:<5} {row['samples']:>9} {row['batch']:>6} {row['steps']:>12.2f} "
            f"{row['crop']:>10.1%}" + (f"  {row['note']}" if row["note"] else "")
        )
    click.echo(f"{report['samples']} samples, {report['steps_per_epoch']:.2f} optimizer steps per epoch")
    if report["repeated_pictures"]:
        click.echo(
            f"note: {report['repeated_pictures']} samples repeat a picture of another sample (equal files); with "
            "--set bucket.dedup=image each picture is used once"
        )
    if report["near"] is not None:
        near = report["near"]
        click.echo(
            f"near-duplicates: {near['groups']} groups of {near['pictures']} pictures"
            + ("; the largest, with their largest picture:" if near["groups"] else "")
        )
        for group in near["largest"]:
            click.echo(f"{group['pictures']:>9} {escaped(group['example'])}")
    if report["balance"]:
        click.echo(f"{'cluster':>9} {'share':>7} {'visits':>7} {'share of visits':>16}  such as")
    for cluster in report["balance"]:
        click.echo(
            f"{cluster['samples']:>9} {cluster['share']:>7.1%} {cluster['visits']:>7g} "
            f"{cluster['share_of_visits']:>16.1%}  {escaped(cluster['example'])}"
        )
    for part, count in report["leaked"].items():
        click.echo(
            f"held-out snapshot {part[:12]}: {count} of its samples look like one of these"
            + ("; a loss on it is not of unseen pictures (bucket.heldout makes a clean part)" if count else "")
        )
    if report["adopted_bytes"]:
        verb = "would be" if dry_run else "were"
        click.echo(f"{amount(report['adopted_bytes'])} of shards {verb} linked or copied from other caches")


def _print_id(report: dict[str, Any]) -> None:
    name = f" ({report['name']})" if report["name"] else ""
    click.echo(f"snapshot {report['snapshot']}{name}" if report["snapshot"] else f"dry run: no snapshot was made{name}")
    if report["unchanged"]:
        click.echo("it is the latest snapshot already: nothing has changed. New pictures: sana-pipe encode first")


# ---------------------------------------------------------------- recipes


def _recipes(config: Config, scans: dict[str, _Scan]) -> list[Recipe]:
    """The recipes of the sources: of the kinds of records that all of them have. They must be equal, and agree with the
    configuration."""
    chosen = list[Recipe]()
    for kind in dict.fromkeys(kind for scan in scans.values() for kind in scan.recipes):
        if without := [source for source, scan in scans.items() if kind not in scan.recipes]:
            click.echo(
                f"note: the snapshot has no records of the kind {kind}, which source {', '.join(without)} lacks "
                f"(encode.signals or data.pictures asks for them, then sana-pipe encode)",
                err=True,
            )
            continue
        by_source = {source: scan.cache.recipe(scan.recipes[kind]) for source, scan in scans.items()}
        first_source, first = next(iter(sorted(by_source.items())))
        for source, recipe in by_source.items():
            if recipe != first:
                raise CacheError(
                    f"sources {first_source!r} and {source!r} were encoded with different {kind} recipes",
                    found="; ".join(first.difference(recipe)),
                    fix="encode both with the same configuration",
                )
        chosen.append(first)
    _check_settings(config, chosen)
    return chosen


def _check_settings(config: Config, recipes: list[Recipe]) -> None:
    """Refuse settings of the encoders that differ from the cache's."""
    pairs = [pair for one in recipes if isinstance(one, Signal) for pair in one.settings(config).items()]
    different = [f"{key}: configuration {ours!r}, cache {theirs!r}" for key, (ours, theirs) in pairs if ours != theirs]
    if different:
        raise CacheError(
            "the cache was encoded with other settings than this configuration has",
            found="; ".join(different),
            fix="run sana-pipe encode with this configuration, or use the configuration of the cache",
        )
