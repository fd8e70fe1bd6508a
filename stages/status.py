"""`sana-pipe status`: what a cache holds and what is missing, while or after it is filled. Reads only the cache."""

from __future__ import annotations

import json

import click

from pipeline.amounts import amount
from pipeline.cache.root import Cache
from pipeline.cache.status import status
from pipeline.config import Config
from pipeline.errors import IntegrityError


def run(config: Config, as_json: bool = False) -> int:
    """Print the counts.

    Returns:
        0 if every planned unit is done, 1 if some are missing, the exit code of an integrity error if something is
        damaged or a file that a named snapshot needs is not there.

    Raises:
        CacheError: there is no cache.
    """
    report = status(Cache.of(config))
    if as_json:
        click.echo(json.dumps(report))
    else:
        for name, source in report["sources"].items():
            click.echo(
                f"source {name!r}: {source['items']} items, {source['rejected']} rejected, from {source['root']}"
            )
        for name, store in report["stores"].items():
            line = (
                f"{name}: {store['units_done']} of {store['units']} parts done, {store['records']} records, "
                f"{amount(store['bytes'])}, {store['rejects']} rejected"
            )
            if store["records_missing"]:
                line += f", {store['records_missing']} records missing"
                if store["rate"]:
                    line += f" at {store['rate']:.1f}/s: {store['eta_s'] / 60:.0f} min"
            click.echo(line)
        for name, snapshot in report["snapshots"].items():
            click.echo(f"snapshot {name}: {snapshot}" + (" (packed)" if name in report["packed"] else ""))
        for name, known in report["prompts"].items():
            click.echo(f"prompt set {name}: {known['prompts']} prompts, {known['id'][:12]}")
        for name, damage in report["damaged"].items():
            click.echo(f"damaged: {name}: {damage['problem']}")
        for fix in sorted({damage["fix"] for damage in report["damaged"].values()}):
            click.echo(f"fix: {fix}")
        free = "" if report["free_bytes"] is None else f"{amount(report['free_bytes'])} free; "
        click.echo(free + ("complete" if report["complete"] else "not complete"))
    return IntegrityError.exit_code if report["damaged"] else 0 if report["complete"] else 1
