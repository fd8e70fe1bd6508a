"""`sana-pipe bucket`: make an immutable snapshot from one cache or several. Copies no tensor bytes of the first.

Steps: read the scans and indexes of every cache, choose the samples and assemble them (`snapshots.making`),
then adopt the shards of other caches and publish the snapshot.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import click

from sana_pipe.base.amounts import amount
from sana_pipe.base.config import setting
from sana_pipe.base.errors import CacheError, ConfigError, escaped
from sana_pipe.config import Config
from sana_pipe.data.cache import copies, status, withdrawn
from sana_pipe.data.cache.cache import Cache, check_snapshot_name
from sana_pipe.data.signals import Encoders
from sana_pipe.data.snapshots import metadata_table
from sana_pipe.data.snapshots.inputs import PLACES, Inputs, open_caches, read_inputs
from sana_pipe.data.snapshots.making import Made, make
from sana_pipe.data.snapshots.near import Report
from sana_pipe.data.snapshots.publishing import publish
from sana_pipe.data.snapshots.repeating import Rules
from sana_pipe.data.sources import reject_kinds
from sana_pipe.data.work import claims
from sana_pipe.data.work.progress import Progress
from sana_pipe.tools import outputs
from sana_pipe.tools.locations import cache_location
from sana_pipe.tools.reporting import duplicates_page, page
from sana_pipe.tools.reporting.controls_and_masks import mask_notes
from sana_pipe.tools.reporting.source_pictures import SourcePictures

MANY = 200_000
"""Samples from which on the progress of a comparison is shown."""


def run(
    config: Config,
    name: str | None = None,
    dry_run: bool = False,
    as_json: bool = False,
    move: bool = False,
    like: str | None = None,
    chosen: Sequence[str] = (),
    show_duplicates: Path | None = None,
) -> str:
    """Make a snapshot of the sources in the cache and in `bucket.caches`.

    Args:
        name: a name that will point to it, in addition to `latest`. The held-out part is called NAME.heldout.
        dry_run: report, and write nothing.
        as_json: print one JSON object instead of lines.
        move: let the name point to it though it points to another snapshot.
        like: a snapshot whose rules are used again, in place of those of the configuration.
        chosen: options that the command line states; with `like` they may not say another rule.
        show_duplicates: file of a page with the pictures of the largest groups of duplicates.

    Returns:
        The snapshot's id; "" for a dry run.

    Raises:
        CacheError: no source yet, or sources of different encodings, or of other settings than the configuration.
        ConfigError: `show_duplicates`, and no rule compares pictures.
        IntegrityError: a file that the snapshot would name is missing, or a shard is of another size.
        UserError: nothing is left to train on, a setting names what is not there, or the name is not valid or taken.
    """
    if name is not None:
        check_snapshot_name(name)
    if show_duplicates is not None:
        outputs.check(config, show_duplicates, option=duplicates_page.SHOW)
        page.check_out(show_duplicates, duplicates_page.SHOW)
    caches = open_caches(cache_location(config), config.bucket.caches, dry_run or like is not None)
    cache = caches[0]
    with nullcontext() if dry_run else _claimed(cache):
        table, config = _metadata(config, caches)
        rules, notes = None, list[str]()
        if like is not None:
            rules, config, notes = _like(config, caches, like, chosen)
            if table is None or config.bucket.metadata != table.digest:
                table, config = _metadata(config, caches)
        settings, heldout_name = config.bucket, f"{name or 'latest'}.heldout"
        if settings.heldout:
            check_snapshot_name(heldout_name)
        inputs = read_inputs(caches, settings, config.data, Encoders(config.vae, config.text), config.encode, table)
        _note_lacking(inputs)
        report: dict[str, Any] = {"dry_run": dry_run, "name": name, "reports": []}
        validation = config.train.validation
        part = None if validation is None else validation.snapshot
        made, heldout_made = make(inputs, settings, part, _comparing)
        if show_duplicates is not None:
            _show_duplicates(config, inputs, made, show_duplicates)
            report["page"] = str(show_duplicates)
        joined = made.joined
        if table is not None and not dry_run:
            metadata_table.stored(caches, table)
        report["notes"] = [*notes, *joined.notes]
        report |= publish(made, inputs, dry_run, name, move)
        report["by_group"] = settings.group
        if report["snapshot"]:
            with suppress(CacheError):  # `verify` names what is damaged
                report["notes"] += mask_notes(cache.open_snapshot(report["snapshot"]))
        if heldout_made is not None:
            report["heldout"] = publish(heldout_made, inputs, dry_run, heldout_name, move, latest=False)
        if rules is not None:
            report["like"] = {"name": like, **({} if dry_run else rules.compared(cache, report["snapshot"]))}
        if joined.examples:
            lists = [(scan.cache.files, reject_kinds.report(source)) for source, scan in inputs.used()]
            report["reports"] = [files.where(path) for files, path in lists if files.exists(path)]
    _print(report, as_json)
    if not dry_run:
        status.join(cache)
    return report["snapshot"] or ""


@contextmanager
def _claimed(cache: Cache) -> Iterator[None]:
    """Keep `forget` from taking pictures out while the block runs.

    Raises:
        CacheError: it does that now, or was stopped.
    """
    copies.repair_all(cache.files)
    ours = claims.Claims(cache.files)
    ours.take("bucket", ours.token)
    with ours.heartbeat("bucket", ours.token):
        withdrawn.check_finished(cache)
        yield


def _metadata(config: Config, caches: Sequence[Cache]) -> tuple[metadata_table.MetadataTable | None, Config]:
    """The table of `bucket.metadata`, and the configuration that names it by its digest. Errors as of `opened`."""
    settings = config.bucket
    if settings.metadata is None:
        return None, config
    table = metadata_table.opened(caches, settings.metadata, settings.metadata_key)
    return table, config.model_copy(update={"bucket": settings.model_copy(update={"metadata": table.digest})})


def _like(config: Config, caches: Sequence[Cache], like: str, chosen: Sequence[str]) -> tuple[Rules, Config, list[str]]:
    """The rules of a snapshot, the configuration with them, and notes. Errors as of `Rules.of` and `Rules.check`."""
    rules = Rules.of(caches[0], like)
    notes = rules.check(caches[0], config.bucket, config.data, chosen)
    settings, gone = rules.without({source for cache in caches for source in cache.sources()})
    notes += [
        f"source {source!r} of {like} is in no cache now: it was forgotten, or bucket.caches does not name its cache"
        for source in gone
    ]
    places = {option: getattr(config.bucket, option) for option in PLACES}
    sections = {"bucket": settings.model_copy(update=places), "data": config.data.model_copy(update=rules.data)}
    return rules, config.model_copy(update=sections), notes


def _show_duplicates(config: Config, inputs: Inputs, made: Made, out: Path) -> None:
    """Write the page of the largest groups of duplicates.

    Raises:
        ConfigError: no rule compares pictures.
        UserError: the page cannot be written.
    """
    if not made.duplicates:
        raise ConfigError(
            f"{duplicates_page.SHOW}: no pictures are compared, so there is nothing to show",
            expected="bucket.dedup: near or image; or bucket.heldout above 0 in a cache with hashes",
            found=f"bucket.dedup: {config.bucket.dedup}",
            fix=setting("bucket.dedup", "near", "image"),
        )
    photos = {source: SourcePictures(config.data, scan.cache) for source, scan in inputs.scans.items()}
    duplicates_page.write(
        made.duplicates, config.bucket.dedup_keep, lambda source, item: photos[source].thumbnail(source, item), out
    )


@contextmanager
def _comparing(samples: int) -> Iterator[Report]:
    """Show how far a comparison of many hashes is."""
    if samples <= MANY:
        yield lambda done, total: None
        return
    with Progress("hashes compared", samples) as bar:
        yield bar.reach


def _note_lacking(inputs: Inputs) -> None:
    for kind, sources in inputs.lacking.items():
        click.echo(
            f"note: the snapshot has no records of the kind {kind}, which source {', '.join(sources)} lacks "
            f"(encode.signals or data.pictures asks for them, then sana-pipe encode)",
            err=True,
        )


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
    if report["metadata"]:
        _print_metadata(report["metadata"])
    for note in report["notes"]:
        click.echo(f"note: {note}")
    if "page" in report:
        click.echo(f"page of the largest groups: {report['page']}")
    _print_id(report)
    if "like" in report:
        _print_like(report["like"], report["snapshot"])
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
    kinds = f" with {', '.join(more)}" if (more := report["controls_and_masks"]) else ""
    click.echo(f"{report['samples']} samples{kinds}, {report['steps_per_epoch']:.2f} optimizer steps per epoch")
    click.echo(f"{'source':>20} {'samples':>9} {'weight':>7} {'visits/epoch':>12} {'share':>7}")
    for source in report["mixture"]:
        click.echo(
            f"{escaped(source['source']):>20} {source['samples']:>9} {source['weight']:>7g} {source['visits']:>12.2f} "
            f"{source['share']:>7.1%}"
        )
    if report["repeated_pictures"] and not any(each["left_out"] for each in report["duplicates"]):
        click.echo(
            f"note: {report['repeated_pictures']} samples repeat a picture of another sample (equal files); with "
            "--set bucket.dedup=image each picture is used once"
        )
    for duplicates in report["duplicates"]:
        _print_duplicates(duplicates)
    if report["balance"]:
        click.echo(f"{'cluster':>9} {'share':>7} {'visits':>7} {'share of visits':>16}  such as")
    for cluster in report["balance"]:
        click.echo(
            f"{cluster['samples']:>9} {cluster['share']:>7.1%} {cluster['visits']:>7g} "
            f"{cluster['share_of_visits']:>16.1%}  {escaped(cluster['example'])}"
        )
    if report["groups"]:
        _print_groups(report["groups"])
    for part, count in report["leaked"].items():
        click.echo(
            f"held-out snapshot {part[:12]}: {count} of its samples look like one of these"
            + (" or share its group" if report.get("by_group") else "")
            + ("; its loss is then not that of unseen pictures (bucket.heldout makes a clean part)" if count else "")
        )
    if report["adopted_bytes"]:
        verb = "would be" if dry_run else "were"
        click.echo(f"{amount(report['adopted_bytes'])} of shards {verb} linked or copied from other caches")


def _print_like(like: dict[str, Any], made: str | None) -> None:
    """Print what the same rules give now."""
    if made is None:
        click.echo(f"made by the rules of {like['name']}; what differs from it is known without --dry-run")
        return
    if made == like["snapshot"] or like["same_content"]:
        click.echo(f"made by the rules of {like['name']}: nothing differs from it")
        return
    counts = ", ".join(f"{like[kind]} {kind}" for kind in ("added", "removed", "changed"))
    click.echo(f"made by the rules of {like['name']}: {counts} (sana-pipe snapshots diff {like['name']} {made[:12]})")
    for line in like["why"]:
        click.echo(f"  {escaped(line)}")


def _print_groups(groups: dict[str, Any]) -> None:
    """Print the groups of `bucket.group`, and what of them is held out."""
    click.echo(
        f"groups by {groups['column']}: {groups['groups']} of {groups['values']} values (pictures that look the same "
        f"join groups); {groups['without_value']} of {groups['samples']} samples have no value, and each is a group of "
        f"its own; held out: {groups['heldout_samples']} samples ({groups['heldout_share']:.2%})"
    )
    for group in groups["largest"]:
        click.echo(f"{group['samples']:>9} {group['share']:>7.1%}  such as {escaped(group['example'])}")


def _print_metadata(metadata: dict[str, Any]) -> None:
    """Print what a table of metadata was joined with, and what of it was not."""
    click.echo(
        f"metadata {escaped(metadata['file'])} (table {metadata['table']}): {metadata['matched']} of "
        f"{metadata['pictures']} pictures have a row, by their {metadata['by']} in the column {metadata['key']!r}"
    )
    if metadata["rows_without_key"]:
        click.echo(f"{metadata['rows_without_key']:>9} of {metadata['rows']} rows have no key")
    kinds = {
        "pictures_without_row": "pictures have no row",
        "keys_without_picture": "keys name no picture of a source that is used",
        "repeated_keys": "keys stand in several rows; the first counts",
        "keys_of_several": "keys name several pictures that are not equal files, and are not used",
    }
    for kind, what in kinds.items():
        if count := metadata[kind]["count"]:
            click.echo(f"{count:>9} {what}: {reject_kinds.examples(metadata[kind]['examples'], count)}")
    if metadata["replaced"]:
        click.echo(
            f"{'':>9} values of the table take the place of the pictures' own: {', '.join(metadata['replaced'])}"
        )


def _print_duplicates(duplicates: dict[str, Any]) -> None:
    """Print the largest groups: what stays, then what is left out."""
    what = "near-duplicates" if duplicates["kind"] == "near" else "equal files"
    groups, largest, flat = duplicates["groups"], duplicates["largest"], duplicates["not_compared"]
    more = "; the largest" if groups > len(largest) else ""
    click.echo(
        f"{what}: {groups} groups of {duplicates['pictures']} pictures, {duplicates['left_out']} left out{more}"
        + (":" if groups else "")
    )
    for group in largest:
        stays = group["pictures"] - group["left_out_pictures"]
        sides = [("stays", group["stays"], stays), ("left out", group["left_out"], group["left_out_pictures"])]
        texts = [f"{side}: {_listed(names, count)}" for side, names, count in sides if count]
        click.echo(f"{group['pictures']:>9} {'; '.join(texts)}")
    if flat["pictures"]:
        click.echo(
            f"note: {flat['pictures']} pictures have too little detail to be compared; among them only equal files "
            f"count as duplicates: {reject_kinds.examples(flat['examples'], flat['pictures'])}"
        )
    if duplicates["list"]:
        click.echo(f"each group with its pictures: {duplicates['list']}")
    elif more:
        click.echo("without --dry-run a list in the cache has each group")


def _listed(names: list[str], count: int) -> str:
    """The first names of `count`."""
    return ", ".join(map(escaped, names)) + (f" and {count - len(names)} more" if count > len(names) else "")


def _print_id(report: dict[str, Any]) -> None:
    name = f" ({report['name']})" if report["name"] else ""
    made = f"snapshot {report['snapshot']}{name}" + (f", content {report['content']}" if report["content"] else "")
    click.echo(made if report["snapshot"] else f"dry run: no snapshot was made{name}")
    if report["unchanged"]:
        click.echo(
            "this is the latest snapshot already: nothing has changed. For new pictures run sana-pipe encode first"
        )
