"""`sana-pipe forget`: exclude a source from new snapshots, or remove the name of a snapshot or a prompt set. `gc` then
removes the files that nothing needs."""

from __future__ import annotations

import click

from sana_pipe.config import Config
from sana_pipe.data.cache import prompts
from sana_pipe.tools.locations import cache_location


def run(config: Config, source: str | None = None, snapshot: str | None = None, prompt_set: str | None = None) -> int:
    """Forget a source, a snapshot's name or a prompt set.

    Args:
        source: its records stay, because other sources and snapshots may share them.
        snapshot: a name of a snapshot.
        prompt_set: its records stay, too.

    Returns:
        0.

    Raises:
        UserError: see `Cache.forget_source`, `Cache.forget_name` and `prompts.forget`.
    """
    cache = cache_location(config).open()
    if source is not None:
        cache.forget_source(source)
        click.echo(
            f"source {source!r} is forgotten: `bucket` makes no samples from it. Its records stay, and are used if it "
            "is encoded again; snapshots that hold it stay as they are"
        )
    if snapshot is not None:
        snapshot_id = cache.forget_name(snapshot)
        names = cache.names_of(snapshot_id)
        click.echo(
            f"{snapshot!r} no longer names snapshot {snapshot_id[:12]}, which "
            + (f"is still called {', '.join(names)}" if names else "has no other name")
        )
    if prompt_set is not None:
        prompts.forget(cache, prompt_set)
        click.echo(f"prompt set {prompt_set!r} is forgotten. Its records stay, and are used if it is encoded again")
    click.echo("sana-pipe gc lists what nothing needs any more, and removes it with --yes")
    return 0
