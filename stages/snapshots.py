"""`sana-pipe snapshots`: list the snapshots of a cache, say how one was made, name them, and compare two of them."""

from __future__ import annotations

import json
from pathlib import Path

import click

from sana_pipe.base.amounts import amount
from sana_pipe.base.errors import IntegrityError, UserError
from sana_pipe.config import Config
from sana_pipe.data.cache import compare, layout
from sana_pipe.data.cache.cache import MOVING, check_snapshot_name, name_taken
from sana_pipe.data.snapshots import comparing, item_lists, provenance
from sana_pipe.tools import outputs
from sana_pipe.tools.locations import cache_location


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
    """Print the content ids, and the samples or items that differ.

    Args:
        a: a name, an id or the beginning of an id; CACHE:NAME for another cache.
        b: the same, or FILE.csv or FILE.parquet: a list of items.

    Returns:
        0 if both hold the same samples with the same records, 1 if not.

    Raises:
        CacheError: no such snapshot, or it is damaged.
        UserError: a list cannot be read, or A is one.
    """
    location = cache_location(config)
    first, second = (comparing.opened(location, word) for word in (a, b))
    if isinstance(first, Path):
        raise UserError(f"{a}: a list can only be the second", fix=f"sana-pipe snapshots diff SNAPSHOT {a}")
    if isinstance(second, Path):
        differ, report = comparing.of_list(first, second, as_json)
    else:
        differ, report = comparing.of_snapshots(first, second, as_json)
    for line in [json.dumps(report)] if as_json else comparing.lines(report):
        click.echo(line)
    return 1 if differ else 0


def write_list(config: Config, snapshot: str, file: str) -> int:
    """Write the list of the pictures of a snapshot, which `diff` compares with others.

    Args:
        snapshot: a name, an id or the beginning of an id.
        file: ends in .csv or .parquet; it is replaced if it is there.

    Returns:
        0.

    Raises:
        CacheError: no such snapshot, or the scan of a source is not in the cache.
        UserError: the file has another ending, or is one that the configuration reads.
    """
    outputs.check(config, Path(file), option="FILE")
    cache = cache_location(config).open()
    made = cache.open_snapshot(snapshot)
    rows = item_lists.write(cache, made, Path(file))
    click.echo(f"{file}: {rows} items of snapshot {made.id}, content {made.head.content_id or 'not known'}")
    return 0
