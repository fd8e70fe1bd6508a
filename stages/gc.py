"""`sana-pipe gc`: lists, and with `--yes` removes, what no commit, snapshot or scan of a cache refers to."""

from __future__ import annotations

import json

import click

from pipeline.amounts import amount
from pipeline.cache.garbage import remove, unneeded
from pipeline.cache.store import Cache
from pipeline.config import Config


def run(config: Config, yes: bool = False, older_than_hours: float = 48, as_json: bool = False) -> int:
    """List or remove.

    Args:
        yes: remove; otherwise only list.
        older_than_hours: younger files are spared, since a running encoder may be about to commit them.

    Returns:
        0.

    Raises:
        IntegrityError: documents and shards contradict one another, so that nobody knows what is needed.
    """
    cache = Cache.of(config)
    age, now = older_than_hours * 3600, cache.files.now()
    listed = list(unneeded(cache, age, now))
    found = remove(cache, listed, age, now) if yes else listed
    size = sum(entry[1] for entry in found)
    if as_json:
        entries = [{"path": path, "bytes": count, "why": why} for path, count, why in found]
        click.echo(json.dumps({"removed": yes, "bytes": size, "files": entries}))
        return 0
    for path, count, why in found:
        click.echo(f"{count:12d}  {path}  ({why})")
    if len(found) < len(listed):
        click.echo(f"{len(listed) - len(found)} files were used again or removed by others meanwhile")
    verb = "removed" if yes else "could be removed (--yes)"
    click.echo(f"{len(found)} files, {amount(size)} {verb}")
    return 0
