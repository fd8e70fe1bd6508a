"""`sana-pipe snapshots`: list the snapshots of a cache, say how one was made, name them, and compare two of them."""

from __future__ import annotations

import json

import click

from sana_pipe.base.amounts import amount
from sana_pipe.base.errors import IntegrityError, escaped
from sana_pipe.config import Config
from sana_pipe.data.cache import compare, layout
from sana_pipe.data.cache.cache import MOVING, check_snapshot_name, name_taken
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.snapshots import provenance
from sana_pipe.tools.locations import cache_location

SHOWN = 20
"""Samples of each kind that `diff` names without `--json`."""


def run(config: Config, as_json: bool = False) -> int:
    """Print one line per snapshot, parents first.

    Returns:
        0, or the exit code of an integrity error if a head or a name cannot be read.

    Raises:
        CacheError: there is no cache.
    """
    entries = compare.listed(cache_location(config).open())
    damaged = [entry for entry in entries if "damaged" in entry]
    if as_json:
        click.echo(json.dumps({"snapshots": entries}))
        return IntegrityError.exit_code if damaged else 0
    columns = f"{'id':<12}  {'content':<12}  {'parent':<12}  {'samples':>9}"
    click.echo(f"{columns}  {'buckets':>7}  {'left out':>8}  {'size':>10}  names")
    for entry in entries:
        if "damaged" in entry:
            click.echo(f"damaged: {', '.join(entry['names']) or entry['id']}: {entry['damaged']}")
            continue
        ids = "  ".join(f"{(entry[name] or '-')[:12]:<12}" for name in ("id", "content", "parent"))
        click.echo(
            f"{ids}  {entry['samples']:>9}  {entry['buckets']:>7}  {entry['left_out']:>8}  "
            f"{amount(entry['bytes']):>10}  {', '.join(entry['names']) or '-'}"
            + (" (packed)" if entry["packed"] else "")
        )
    if damaged:
        click.echo(f"fix: {layout.REPAIR}, then sana-pipe bucket")
    return IntegrityError.exit_code if damaged else 0


def show(config: Config, snapshot: str, as_json: bool = False) -> int:
    """Print how a snapshot was made.

    Args:
        snapshot: a name, an id or the beginning of an id.

    Returns:
        0.

    Raises:
        CacheError: no such snapshot, or it is damaged.
    """
    cache = cache_location(config).open()
    report = provenance.described(cache, cache.open_snapshot(snapshot))
    for line in [json.dumps(report)] if as_json else provenance.lines(report):
        click.echo(line)
    return 0


def name(config: Config, snapshot: str, label: str, move: bool = False) -> int:
    """Give a snapshot a name.

    Args:
        snapshot: a name, an id or the beginning of an id.
        move: let the name point to it though it points to another snapshot.

    Returns:
        0.

    Raises:
        UserError: the name is taken or not valid.
        CacheError: no such snapshot.
    """
    check_snapshot_name(label)
    cache = cache_location(config).open()
    snapshot_id = cache.open_snapshot(snapshot).id
    current = cache.snapshot_of(label) if label in MOVING else None  # only `bucket` moves these unasked
    if current not in (None, snapshot_id) and not move:
        raise name_taken(label, str(current), snapshot_id)
    cache.point(label, snapshot_id, move=move)
    click.echo(f"snapshot {snapshot_id} ({label})")
    return 0


def diff(config: Config, a: str, b: str, as_json: bool = False) -> int:
    """Print the samples that differ.

    Args:
        a, b: names, ids or beginnings of ids.

    Returns:
        0 if both hold the same samples with the same records, 1 if not.

    Raises:
        CacheError: no such snapshot, or it is damaged.
    """
    cache = cache_location(config).open()
    first, second = cache.open_snapshot(a), cache.open_snapshot(b)
    difference = compare.difference(first, second)
    kinds = {
        "added": _named(second, [(row, ()) for row in difference.added]),
        "removed": _named(first, [(row, ()) for row in difference.removed]),
        "changed": _named(second, difference.changed),
    }
    if as_json:
        report: dict[str, object] = {"a": first.id, "b": second.id}
        report["signals"], report["encodings"] = list(difference.signals), list(difference.encodings)
        for kind, samples in kinds.items():
            report[kind] = [
                {"source": source, "item": item, **({"what": list(what)} if what else {})}
                for source, item, what in samples
            ]
        click.echo(json.dumps(report))
        return 1 if difference else 0
    for kind, samples in kinds.items():
        click.echo(f"{len(samples)} {kind}")
        for source, item, what in samples[:SHOWN]:
            click.echo(f"  {source}: {escaped(item)}" + (f" ({', '.join(what)})" if what else ""))
        if len(samples) > SHOWN:
            click.echo(f"  and {len(samples) - SHOWN} more (--json names all)")
    for signal in difference.signals:
        click.echo(f"only {'A' if signal in first.pictures else 'B'} has records of the kind {signal}")
    for signal in difference.encodings:
        click.echo(f"records of the kind {signal} have different encodings and are not compared")
    return 1 if difference else 0


def _named(snapshot: Snapshot, rows: list[tuple[int, tuple[str, ...]]]) -> list[tuple[str, str, tuple[str, ...]]]:
    """(source, item, what changed) of samples, sorted by name."""
    return sorted((*snapshot.source_item(row), what) for row, what in rows)
