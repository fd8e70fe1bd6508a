"""`sana-pipe push`: copy a snapshot with its shards and a data card to a folder or an object store, for others."""

from __future__ import annotations

import json
from dataclasses import replace

import click

from sana_pipe.base.amounts import amount
from sana_pipe.base.errors import UserError
from sana_pipe.base.urls import strip_credentials
from sana_pipe.config import Config
from sana_pipe.data.cache import status
from sana_pipe.data.snapshots import data_card
from sana_pipe.data.snapshots.transfer import parcels, send
from sana_pipe.data.work.progress import Progress
from sana_pipe.tools.locations import cache_location


def run(config: Config, target: str, license: str, snapshot: str | None = None, as_json: bool = False) -> int:
    """Send a snapshot and what was held out of it.

    Args:
        target: a folder or a URL; there is a cache afterwards.
        license: of pictures and captions, for the data card.
        snapshot: name or id; default: the newest.
        as_json: print one JSON object instead of lines.

    Returns:
        0.

    Raises:
        CacheError: no such snapshot, or the target cannot be written.
        IntegrityError: a file is damaged.
        UserError: the name is taken there by another snapshot, or the licence is empty.
    """
    if not license.strip():
        raise UserError("the licence of the pictures and captions is empty", fix="--license cc-by-4.0")
    if target.startswith("hf://"):
        raise UserError(
            f"{target}: a hub makes one commit of each file that is written",
            fix="sana-pipe push DIR --license TEXT, then hf upload-large-folder OWNER/NAME DIR --repo-type dataset",
        )
    location = cache_location(config)
    cache = location.open()
    sent = parcels(cache, snapshot)
    made, names = sent[-1].snapshot, sent[-1].names
    other = replace(location, root=target).open(create=True)
    total = sum(len(parcel.snapshot.shard_files()) for parcel in sent)
    with Progress("shards", total) as bar:
        for parcel in sent:
            send(cache, other, parcel, on_shard=lambda size: bar.add(1))
    address = strip_credentials(target)
    other.files.replace(data_card.NAME, data_card.card(cache, made, names[0], license, address).encode())
    status.join(other)
    size = sum(made.shard_files().values())
    if as_json:
        report = {"snapshot": made.id, "content": made.head.content_id, "names": list(names), "shards": total}
        click.echo(json.dumps({**report, "bytes": size, "card": other.files.where(data_card.NAME)}))
    else:
        click.echo(f"snapshot {made.id} ({', '.join(names)}) is in {address}: {total} shards, {amount(size)}")
        click.echo(f"its data card: {strip_credentials(other.files.where(data_card.NAME))}")
        click.echo(f"others use it by: sana-pipe pull {address} --snapshot {names[0]}")
    return 0
