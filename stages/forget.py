"""`sana-pipe forget`: exclude a source from new snapshots, or remove the name of a snapshot or a prompt set. `gc` then
removes the files that nothing needs. `--item` and `--digests` take pictures out of the cache with all that was made of
them, and `--check` proves that nothing is left."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from sana_pipe.base.errors import IntegrityError, UserError
from sana_pipe.config import Config
from sana_pipe.data.cache import copies, prompts, status, withdrawn
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.cache.withdrawn import Takedown
from sana_pipe.data.snapshots import takedown, takedown_check, takedown_search
from sana_pipe.data.work import claims
from sana_pipe.tools.locations import cache_location
from sana_pipe.tools.reporting import run_copies


def run(
    config: Config,
    source: str | None = None,
    snapshot: str | None = None,
    prompt_set: str | None = None,
    items: Sequence[str] = (),
    digests: str | None = None,
    check: bool = False,
) -> int:
    """Forget a source, a snapshot's name or a prompt set, or take pictures out.

    Args:
        source: its records stay, because other sources and snapshots may share them.
        snapshot: a name of a snapshot.
        prompt_set: its records stay, too.
        items: names of pictures that go with all their records, `ITEM` or `SOURCE: ITEM`.
        digests: a file with the digests of such pictures, one a line.
        check: end takedowns that were stopped, and look for what is left of all.

    Returns:
        0, or the exit code of an integrity error if a check finds something.

    Raises:
        UserError: see `Cache.forget_source`, `Cache.forget_name`, `prompts.forget` and `takedown.begin`.
    """
    cache = cache_location(config).open()
    if items or digests is not None or check:
        with _alone(cache):
            return _take_down(config, cache, items, digests)
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


@contextmanager
def _alone(cache: Cache) -> Iterator[None]:
    """Keep other processes from taking pictures out at the same time.

    Raises:
        UserError: another one does.
    """
    ours, name = claims.Claims(cache.files), Paths.claim(takedown.CLAIM)
    entry = next((entry for entry in cache.files.walk("claims") if entry.name == name), None)
    if entry is not None and cache.files.now() - entry.modified > takedown.CLAIM_S:
        cache.files.remove(name)  # of a process of another machine that has ended
    if ours.take(takedown.CLAIM) != "ours":
        raise UserError(
            f"{cache.files.where(name)}: another process takes pictures out of this cache",
            fix=f"wait until it has ended; if it has, the claim is old in {takedown.CLAIM_S / 60:.0f} minutes",
        )
    with ours.heartbeat(takedown.CLAIM):
        yield


def _take_down(config: Config, cache: Cache, items: Sequence[str], digests: str | None) -> int:
    """End the takedowns that were stopped, carry out a new one if pictures are given, and check."""
    copies.repair_all(cache.files)
    for number, earlier in enumerate(withdrawn.takedowns(cache)):
        if not earlier.done:
            click.echo(f"a takedown of {len(earlier.digests)} pictures was stopped; it is ended first")
            _carry_out(config, cache, number, earlier)
    if items or digests is not None:
        listed = [] if digests is None else takedown_search.read_digests(digests)
        number, new = takedown.begin(cache, items, listed)
        for name, of in new.items:
            click.echo(f"goes: {name}: {of}")
        if not new.items:
            click.echo("no scan of this cache has these pictures; they stay out from now on")
        _carry_out(config, cache, number, new)
    status.join(cache)
    return _check(cache)


def _carry_out(config: Config, cache: Cache, number: int, begun: Takedown) -> None:
    done = takedown.carry_out(cache, number, begun, click.echo)
    here = {Path(run) for _, host, run in done.runs if run and host == platform.node()}
    for folder in sorted({*here, Path(config.train.output)}):
        for line in run_copies.remove(folder, done.texts, [item for _, item in done.items]):
            click.echo(line)
    sets = [
        f"prompt set {name} has a caption of theirs (sana-pipe forget --prompts {name})" for name in done.prompt_sets
    ]
    left = [*_learned(config, done), *sets]
    withdrawn.finish(cache, number, done)
    click.echo(f"{len(done.digests)} pictures are out of this cache, and `encode` leaves them out from now on")
    for line in left:
        click.echo(f"cannot be undone here: {line}")


def _learned(config: Config, done: Takedown) -> list[str]:
    """Say which checkpoints learned from the pictures, as far as is known, and where else they may be."""
    lines = []
    gone = {old for old, _, _ in done.runs}
    folders = {Path(run): host for _, host, run in done.runs if run}
    folders.setdefault(Path(config.train.output).resolve(), platform.node())
    for folder, host in sorted(folders.items()):
        checkpoints = run_copies.checkpoints(folder, gone) if host == platform.node() else []
        lines += [f"checkpoint {path} learned from them" for path in checkpoints]
        if not checkpoints and any(run == str(folder) for _, _, run in done.runs):
            lines.append(f"run {folder} on {host} learned from them; its checkpoints are not here")
    lines += [f"a run on snapshot {old[:12]}, of which only that is known" for old, _, run in done.runs if not run]
    if gone:
        lines.append("exports of these checkpoints, and copies of them")
    others = "other caches that took over shards (bucket.caches), backups, and mirrors on other machines: run the same"
    return [*lines, f"{others} command there"]


def _check(cache: Cache) -> int:
    found = list(takedown_check.remains(cache))
    for finding in found:
        click.echo(f"{cache.files.where(finding.path)}: {finding.problem}")
    result = f"{len(found)} files have something of them" if found else "nothing is left of them"
    click.echo(f"{len(withdrawn.withdrawn(cache))} withdrawn pictures: {result}")
    return IntegrityError.exit_code if found else 0
