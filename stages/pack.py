"""`sana-pipe bucket --pack`: pack a snapshot, for caches that are read from object storage.

Plan, pack the missing units (shared with other processes that run the same command), and publish the packed snapshot
when all units are packed. Running the same command again continues.
"""

from __future__ import annotations

import json
from typing import Any

import click

from sana_pipe.base import launch
from sana_pipe.base.amounts import amount
from sana_pipe.config import Config
from sana_pipe.data.cache import copies, index, status, withdrawn
from sana_pipe.data.cache.cache import check_snapshot_name, name_taken
from sana_pipe.data.cache.snapshot_head import Head
from sana_pipe.data.snapshots import heldout, packing
from sana_pipe.data.work import claims, engine
from sana_pipe.data.work.progress import Progress
from sana_pipe.data.work.stop import Stop, Stopped
from sana_pipe.tools.locations import cache_location


def check_name(name: str | None) -> None:
    """Raise UserError if a name is given that no snapshot may have."""
    if name is not None:
        check_snapshot_name(name)


def run(
    config: Config,
    snapshot: str | None = None,
    name: str | None = None,
    as_json: bool = False,
    move: bool = False,
    latest: bool = False,
) -> str | None:
    """Pack a snapshot.

    Args:
        snapshot: name or id; default: the newest.
        name: a name that will point to the packed snapshot. Default: the name (or id) of the source and `.packed`.
            NAME.heldout will point to what was held out of the source.
        as_json: print one JSON object instead of lines.
        move: let the name point to it though it points to another snapshot.
        latest: let `latest` point to it, too.

    Returns:
        The packed snapshot's id; None if other processes still pack units, or a signal ended the run.

    Raises:
        CacheError: no such snapshot, or one of its records is damaged.
        UserError: it is packed already, or the name is not valid or taken.
    """
    check_name(name)
    stop = Stop()
    cache = cache_location(config).open()
    copies.repair_all(cache.files)
    withdrawn.check_finished(cache)
    source = cache.open_snapshot(snapshot)
    source_name = snapshot if snapshot is not None and cache.snapshot_of(snapshot) else source.id[:12]
    name = name if name is not None else f"{source_name[:85]}.packed"
    mib = config.bucket.pack_mib
    pointed = cache.snapshot_of(name)  # checked before a plan is there to be finished; `add_snapshot` checks again
    if pointed is not None and not move and Head.read(cache.files, pointed).folder != packing.folder_of(source, mib):
        raise name_taken(name, pointed, f"a pack of {source.id}")
    plan = packing.planned(cache, source, mib)
    try:
        made, left = _pack_units(config, packing.Packer(cache, source, plan), stop)
    except Stopped:
        click.echo(f"stopped by {stop.name}; no unit of work is half done: run the same command again to continue")
        return None
    claims.sweep(cache, [plan])
    report: dict[str, Any] = {"packed_from": source.id, "shards": len(plan.units), "made": made, "left": left}
    packed = None
    if {unit.unit for unit in plan.units} <= index.committed(cache.files, plan.encoding, plan.number):
        head = packing.assembled(cache, source, plan)
        packed = cache.add_snapshot(head, name, latest=latest, move=move)
        if (part := heldout.find(cache, source)) is not None:
            cache.point(f"{name}.heldout", part, move=move)
        report |= {"bytes": int(head.shard_sizes().sum()), "content": Head.read(cache.files, packed).content_id}
    status.join(cache)
    report |= {"snapshot": packed, "name": name}
    if as_json:
        click.echo(json.dumps(report))
    elif packed is None:
        click.echo(f"other processes still pack {left} units of work: the last of them publishes the packed snapshot")
    else:
        click.echo(f"packed {source.id} into {report['shards']} shards, {amount(report['bytes'])}")
        content = f", content {report['content']}" if report["content"] else ""
        click.echo(f"snapshot {packed} ({name}){content}")
    return packed


def _pack_units(config: Config, packer: packing.Packer, stop: Stop) -> tuple[int, int]:
    """Restore lost shards, then pack this process's share of the missing units. Returns the units packed, and those
    left to other processes."""
    plan, files = packer.plan, packer.cache.files
    commits = index.commits(files, plan.encoding, plan.number)
    shards, sizes = [str(commit.shard) for commit in commits], [commit.bytes for commit in commits]
    for at in index.missing_shards(files, plan.encoding, shards, sizes).nonzero()[0].tolist():
        packer.restore(shards[at])
    done = {commit.unit for commit in commits}
    todo = [(plan, unit) for unit in plan.units if unit.unit not in done]
    worker = engine.Worker(claims.Claims(files), stop, *launch.share_of_work())
    with stop.signals(), Progress("samples", 0) as bar:
        return engine.make_units(packer, todo, worker, bar)
