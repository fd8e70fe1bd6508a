"""`sana-pipe pull`: copy a snapshot with its shards from another cache, such as one that `push` made, into this one."""

from __future__ import annotations

import json
from dataclasses import replace

import click

from sana_pipe.base.amounts import amount
from sana_pipe.base.urls import strip_credentials
from sana_pipe.config import Config
from sana_pipe.data.cache.cache import check_snapshot_name
from sana_pipe.data.snapshots.transfer import parcels, send
from sana_pipe.data.work.progress import Progress
from sana_pipe.tools.locations import cache_location


def run(
    config: Config,
    origin: str,
    snapshot: str | None = None,
    name: str | None = None,
    move: bool = False,
    as_json: bool = False,
) -> int:
    """Fetch a snapshot and what was held out of it.

    Args:
        origin: a folder or a URL with a cache.
        snapshot: name or id there; default: the newest.
        name: the name that it gets here; default: the one that it has there.
        move: let the name point to it though it points to another snapshot here.
        as_json: print one JSON object instead of lines.

    Returns:
        0.

    Raises:
        CacheError: there is no cache or no such snapshot.
        IntegrityError: a file is damaged.
        UserError: the name is taken here by another snapshot, or not valid.
    """
    if name is not None:
        check_snapshot_name(name)
    location = cache_location(config)
    cache = replace(location, root=origin).open()
    sent = parcels(cache, snapshot, name)
    made, names = sent[-1].snapshot, sent[-1].names
    here = location.open(create=True)
    total = sum(len(parcel.snapshot.shard_files()) for parcel in sent)
    with Progress("shards", total) as bar:
        for parcel in sent:
            send(cache, here, parcel, move, on_shard=lambda size: bar.add(1))
    size = sum(made.shard_files().values())
    if as_json:
        report = {"snapshot": made.id, "content": made.head.content_id, "names": list(names), "shards": total}
        click.echo(json.dumps({**report, "bytes": size}))
    else:
        click.echo(
            f"snapshot {made.id} ({', '.join(names)}) of {strip_credentials(origin)} is in this cache: "
            f"{total} shards, {amount(size)}"
        )
        click.echo(f"train on it: sana-pipe train --snapshot {names[0]}")
    return 0
