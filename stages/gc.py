"""`sana-pipe gc`: lists, and with `--yes` removes, what no commit, snapshot or scan of a cache refers to."""

from __future__ import annotations

import json

import click

from pipeline.amounts import amount
from pipeline.cache import audit
from pipeline.cache.store import Cache
from pipeline.config import Config


def run(config: Config, yes: bool = False, older_than_hours: float = 48, as_json: bool = False) -> int:
    """List or remove.

    Args:
        yes: remove; otherwise only list.
        older_than_hours: younger files are spared, since a running encoder may be about to commit them.

    Returns:
        0.
    """
    cache = Cache.of(config)
    found = list(audit.unneeded(cache, older_than_hours * 3600))
    size = sum(entry[1] for entry in found)
    if yes:
        for path, _, _ in found:
            cache.files.remove(path)
    if as_json:
        entries = [{"path": path, "bytes": count, "why": why} for path, count, why in found]
        click.echo(json.dumps({"removed": yes, "bytes": size, "files": entries}))
        return 0
    for path, count, why in found:
        click.echo(f"{count:12d}  {path}  ({why})")
    verb = "removed" if yes else "could be removed (--yes)"
    click.echo(f"{len(found)} files, {amount(size)} {verb}")
    return 0
