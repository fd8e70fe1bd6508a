"""`sana-pipe bucket --pack`: a snapshot to a packed one, for caches that are read from object storage.

Plan, copy the units that are missing (shared with other processes that run the same command), publish the snapshot when
all are there. Running the same command again continues.
"""

from __future__ import annotations

import json
from typing import Any

import click

from pipeline import launch
from pipeline.amounts import amount
from pipeline.cache import copies, index
from pipeline.cache.store import Cache, check_snapshot_name, name_taken
from pipeline.config import Config
from pipeline.snapshots import packing
from pipeline.work import claims, engine
from pipeline.work.progress import Progress
from pipeline.work.stop import Stop, Stopped


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
        name: a name that will point to the packed snapshot. Default: that of what is packed (its id), and `.packed`.
        as_json: print one JSON object instead of lines.
        move: let the name point to it though it points to another snapshot.
        latest: let `latest` point to it, too.

    Returns:
        The packed snapshot's id; None if other processes still had units in hand, or a signal ended the run.

    Raises:
        CacheError: no such snapshot, or a record of it is damaged.
        UserError: it is packed already, or the name is none or taken.
    """
    if name is not None:
        check_snapshot_name(name)
    stop = Stop(config.encode.grace_s)
    cache = Cache.of(config)
    copies.repair_all(cache.files)
    source = cache.open_snapshot(snapshot)
    of = snapshot if snapshot is not None and cache.snapshot_of(snapshot) else source.id[:12]
    name = name if name is not None else f"{of[:93]}.packed"
    plan = packing.planned(cache, source, config.bucket.pack_mib)
    taken = cache.snapshot_of(name)  # asked before the work; `add_snapshot` asks again
    if taken is not None and not move and cache.open_snapshot(taken).head.get("folder") != plan.recipe:
        raise name_taken(name, taken, f"a pack of {source.id}")
    packer = packing.Packer(cache, source, plan)
    commits = index.commits(cache.files, plan.recipe, plan.number)
    done = {commit.unit for commit in commits}
    todo = [(plan, unit) for unit in plan.units if unit.unit not in done]
    own = claims.Claims(cache.files, config.encode.claim_timeout_s)
    try:
        shards, sizes = [str(commit.shard) for commit in commits], [commit.bytes for commit in commits]
        for at in index.lost(cache.files, plan.recipe, shards, sizes).nonzero()[0].tolist():
            packer.restore(shards[at])
        with stop.signals(), Progress("samples", 0) as bar:
            made, left = engine.run_here(packer, todo, *launch.share_of_work(), own, stop, bar)
    except Stopped:
        click.echo(f"stopped by {stop.name}; nothing half done was left: run the same command again to continue")
        return None
    claims.sweep(cache, [plan])
    told: dict[str, Any] = {"packed_from": source.id, "shards": len(plan.units), "made": made, "left": left}
    packed = None
    if {unit.unit for unit in plan.units} <= index.committed(cache.files, plan.recipe, plan.number):
        head = packing.assembled(cache, source, plan, config.bucket.pack_window)
        packed = cache.add_snapshot(head, name, latest=latest, move=move)
        told["bytes"] = sum(shard["bytes"] for shard in head["shards"]["text"])
    told |= {"snapshot": packed, "name": name}
    if as_json:
        click.echo(json.dumps(told))
    elif packed is None:
        click.echo(f"{left} units are in other processes' hands: the last of them publishes the packed snapshot")
    else:
        click.echo(f"packed {source.id} into {told['shards']} shards, {amount(told['bytes'])}")
        click.echo(f"snapshot {packed} ({name})")
    return packed
