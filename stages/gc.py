"""`sana-pipe gc`: lists, and with `--yes` removes, what no commit, snapshot or scan of a cache refers to."""

from __future__ import annotations

import json

import click

from sana_pipe.base.amounts import amount
from sana_pipe.config import Config
from sana_pipe.data.cache import withdrawn
from sana_pipe.data.cache.garbage import remove, unneeded
from sana_pipe.tools.locations import cache_location


def run(config: Config, yes: bool = False, older_than_hours: float = 48, as_json: bool = False) -> int:
    """List or remove.

    Args:
        yes: remove; otherwise only list.
        older_than_hours: younger files stay, because a running encoder may be about to commit them.

    Returns:
        0.

    Raises:
        CacheError: pictures are being taken out of the cache.
        IntegrityError: documents and shards contradict one another, so it is unknown what is needed.
    """
    cache = cache_location(config).open()
    withdrawn.check_finished(cache)
    age, now = older_than_hours * 3600, cache.files.now()
    listed = list(unneeded(cache, age, now))
    entries = remove(cache, listed, age, now) if yes else listed
    size = sum(entry[1] for entry in entries)
    if as_json:
        rows = [{"path": path, "bytes": count, "why": why} for path, count, why in entries]
        click.echo(json.dumps({"removed": yes, "bytes": size, "files": rows}))
        return 0
    for path, count, why in entries:
        click.echo(f"{count:12d}  {path}  ({why})")
    if len(entries) < len(listed):
        click.echo(f"{len(listed) - len(entries)} files were used again, or removed by others, in the meantime")
    verb = "removed" if yes else "could be removed (--yes)"
    click.echo(f"{len(entries)} files, {amount(size)} {verb}")
    return 0
