"""`sana-pipe verify`: reads a whole cache, names what is damaged, and with `--repair` makes just that again.

Several processes share the work, and a killed one is continued by the same command (`verification.round`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial

import click

from sana_pipe.base import launch
from sana_pipe.base.amounts import amount
from sana_pipe.base.errors import AwayError, CacheError, IntegrityError, UserError, expanded
from sana_pipe.config import Config
from sana_pipe.data.cache import layout
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.encoding.encoder_settings import EncoderSettings
from sana_pipe.data.encoding.repair import Repairs
from sana_pipe.data.encoding.unit_encoder import UnitEncoder
from sana_pipe.data.signals import Encoders
from sana_pipe.data.verification.report import Report
from sana_pipe.data.verification.round import Round, Scope, join
from sana_pipe.data.verification.shares import Totals, Verification
from sana_pipe.data.work.claims import Claims
from sana_pipe.data.work.engine import Worker
from sana_pipe.data.work.progress import Progress
from sana_pipe.data.work.stop import Stop
from sana_pipe.tools.locations import cache_location


def run(
    config: Config,
    repair: bool = False,
    data: tuple[str, ...] = (),
    as_json: bool = False,
    snapshot: str | None = None,
    sample: float | None = None,
    task_index: int | None = None,
    task_count: int | None = None,
) -> int:
    """Verify, and repair if asked. Prints each finding as it appears, and its outcome as soon as that is known.

    Args:
        repair: put documents right, encode damaged records again and restore their shards.
        data: locations of the sources that have moved since the scan (`NAME=DIR`).
        snapshot: the only snapshot whose shards and tables are read; None: everything.
        sample: share of the shards (0 to 1) that is read; None: all.
        task_index, task_count: this process's share of the work; default: what the launcher says.

    Returns:
        0 if everything is right (or was restored), else the exit code of an integrity error.

    Raises:
        CacheError: there is no cache, or no such snapshot.
        UserError: a repair needs a source or a model that is not there (all other damage is repaired first); several
            processes share a cache that nothing can be written to.
    """
    task, tasks = launch.chosen_share(task_index, task_count)
    cache = cache_location(config).open()
    repairs = _repairs(config, cache, data) if repair else None
    scope = Scope(None if snapshot is None else cache.snapshot_id(snapshot), sample, repair)
    report = Report(cache.files.where, _nothing if as_json else click.echo)
    worker = Worker(Claims(cache.files), Stop(), task, tasks)
    with Progress("MiB", None) as bar:
        round = _round(cache, scope, task, tasks)
        verification = Verification(cache, scope, report, bar, worker, round, repairs)
        verification.run()
    left, totals = report.left(), verification.totals
    if as_json:
        amounts = {"total": vars(totals.total), "verified": vars(totals.verified), "read": vars(totals.read)}
        shards = {"shards": totals.shards, "shards_verified": totals.chosen}
        result = {**vars(totals.verified), "ok": not left, "share": totals.share, **amounts, **shards}
        click.echo(json.dumps({**result, "findings": report.rows()}))
    else:
        for line in _result(totals, len(left), scope, snapshot, worker):
            click.echo(line)
        for fix in sorted({finding.fix for finding in left if not (repair and finding.fix == layout.REPAIR)}):
            click.echo(f"fix: {fix}")
    if verification.error is not None:
        raise verification.error
    return IntegrityError.exit_code if left else 0


def _result(totals: Totals, damaged: int, scope: Scope, snapshot: str | None, worker: Worker) -> Iterator[str]:
    if worker.tasks > 1:
        read = f"{totals.read.files} files, {amount(totals.read.bytes)} read here"
        yield f"worker {worker.task + 1} of {worker.tasks}: {read}"
    result = f"{damaged} damaged" if damaged else "no damage"
    of = "" if snapshot is None else f"snapshot {snapshot}: "
    line = f"{of}{totals.verified.files} files, {amount(totals.verified.bytes)} read: {result}"
    if scope.sample is None:
        yield line
        return
    yield f"{line} in the sample"
    shards = f"{totals.chosen} of {totals.shards} shards were read"
    yield f"{shards}, {totals.share:.1%} of {amount(totals.total.bytes)}: nothing is known of the others"


def _round(cache: Cache, scope: Scope, task: int, tasks: int) -> Round:
    """Join the round of this scope; without rights to write, one in memory alone."""
    try:
        return join(cache.files, scope, task, tasks)
    except AwayError:
        raise
    except CacheError as error:
        if tasks > 1:
            raise UserError(
                f"{cache.location}: processes share a verification by results that they write into the cache",
                expected="a cache that can be written to",
                found=error.what,
                fix="verify with one process, which needs read rights alone",
            ) from None
        click.echo(f"what is read cannot be recorded, so after a kill the next one begins anew: {error.line}", err=True)
        return Round()


def _nothing(_line: str) -> None:
    pass


def _repairs(config: Config, cache: Cache, data: tuple[str, ...]) -> Repairs:
    settings = EncoderSettings(Encoders(config.vae, config.text), config.encode, config.data.max_pixels)
    encoder = UnitEncoder(settings, cache, {}, check=True)
    others = partial(cache_location(config).open_others, config.bucket.caches)
    return Repairs(encoder, config.data, others, dict(_pair(text) for text in data))


def _pair(text: str) -> tuple[str, str]:
    name, _, folder = text.partition("=")
    if not folder:
        raise UserError(f"--data {text!r} is not of the form NAME=DIR")
    return name, expanded(folder)
