"""`sana-pipe snapshots`: lists the snapshots of a cache, names them, and compares two of them."""

from __future__ import annotations

import json

import click

from pipeline.amounts import amount
from pipeline.cache import compare, layout
from pipeline.cache.snapshot import Snapshot
from pipeline.cache.store import Cache, check_snapshot_name
from pipeline.config import Config
from pipeline.errors import IntegrityError

SHOWN = 20
"""Samples of each kind that `diff` names without `--json`."""


def run(config: Config, as_json: bool = False) -> int:
    """Print one line per snapshot, parents first.

    Returns:
        0, or the exit code of an integrity error if a head or a name cannot be read.

    Raises:
        CacheError: there is no cache.
    """
    found = compare.listed(Cache.of(config))
    damaged = [entry for entry in found if "damaged" in entry]
    if as_json:
        click.echo(json.dumps({"snapshots": found}))
        return IntegrityError.exit_code if damaged else 0
    click.echo(f"{'id':<12}  {'parent':<12}  {'samples':>9}  {'buckets':>7}  {'left out':>8}  {'size':>10}  names")
    for entry in found:
        if "damaged" in entry:
            click.echo(f"damaged: {', '.join(entry['names']) or entry['id']}: {entry['damaged']}")
            continue
        click.echo(
            f"{entry['id'][:12]}  {(entry['parent'] or '-')[:12]:<12}  {entry['samples']:>9}  {entry['buckets']:>7}  "
            f"{entry['left_out']:>8}  {amount(entry['bytes']):>10}  {', '.join(entry['names']) or '-'}"
            + (" (packed)" if entry["packed"] else "")
        )
    if damaged:
        click.echo(f"fix: {layout.REPAIR}, then sana-pipe bucket")
    return IntegrityError.exit_code if damaged else 0


def name(config: Config, snapshot: str, label: str, move: bool = False) -> int:
    """Give a snapshot a name.

    Args:
        snapshot: a name, an id or the beginning of an id.
        move: also if the name points to another snapshot.

    Returns:
        0.

    Raises:
        UserError: the name is taken, or is none.
        CacheError: no such snapshot.
    """
    check_snapshot_name(label)
    cache = Cache.of(config)
    found = cache.open_snapshot(snapshot).id
    cache.point(label, found, move=move)
    click.echo(f"snapshot {found} ({label})")
    return 0


def diff(config: Config, a: str, b: str, as_json: bool = False) -> int:
    """Print the samples that differ.

    Args:
        a, b: names, ids or beginnings of ids.

    Returns:
        0 if both hold the same samples with the same records, 1 if not.

    Raises:
        CacheError: no such snapshot, or one that is damaged.
    """
    cache = Cache.of(config)
    one, other = cache.open_snapshot(a), cache.open_snapshot(b)
    found = compare.difference(one, other)
    kinds = {
        "added": _named(other, [(row, ()) for row in found.added]),
        "removed": _named(one, [(row, ()) for row in found.removed]),
        "changed": _named(other, found.changed),
    }
    if as_json:
        told: dict[str, object] = {"a": one.id, "b": other.id}
        for kind, samples in kinds.items():
            told[kind] = [
                {"source": source, "item": item, **({"what": list(what)} if what else {})}
                for source, item, what in samples
            ]
        click.echo(json.dumps(told))
        return 1 if found else 0
    for kind, samples in kinds.items():
        click.echo(f"{len(samples)} {kind}")
        for source, item, what in samples[:SHOWN]:
            click.echo(f"  {source}: {item}" + (f" ({', '.join(what)})" if what else ""))
        if len(samples) > SHOWN:
            click.echo(f"  and {len(samples) - SHOWN} more (--json names all)")
    return 1 if found else 0


def _named(snapshot: Snapshot, rows: list[tuple[int, tuple[str, ...]]]) -> list[tuple[str, str, tuple[str, ...]]]:
    """(source, item, what) of samples, by name: rows stand in the order of sample ids, which says nothing to people."""
    return sorted((*snapshot.origin(row), what) for row, what in rows)
