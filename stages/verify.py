"""`sana-pipe verify`: reads a whole cache, names what is damaged, and with `--repair` makes just that again."""

from __future__ import annotations

import json
from functools import partial

import click

from sana_pipe.base.amounts import amount
from sana_pipe.base.errors import IntegrityError, UserError, expanded
from sana_pipe.config import Config
from sana_pipe.data.cache import audit, layout
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.findings import Replaced
from sana_pipe.data.encoding.encoder_settings import EncoderSettings
from sana_pipe.data.encoding.repair import Repairs
from sana_pipe.data.encoding.unit_encoder import UnitEncoder
from sana_pipe.data.signals import Encoders
from sana_pipe.data.verification import repairing
from sana_pipe.data.verification.report import Report
from sana_pipe.data.work.progress import Progress
from sana_pipe.tools.locations import cache_location


def run(config: Config, repair: bool = False, data: tuple[str, ...] = (), as_json: bool = False) -> int:
    """Verify, and repair if asked. Prints each finding as it appears, and its outcome as soon as that is known.

    Args:
        repair: put documents right, encode damaged records again and restore their shards.
        data: locations of the sources that have moved since the scan (`NAME=DIR`).

    Returns:
        0 if everything is right (or was restored), else the exit code of an integrity error.

    Raises:
        CacheError: there is no cache.
        UserError: a repair needs a source or a model that is not there. All other damage is repaired first.
    """
    cache = cache_location(config).open()
    repairs = _repairs(config, cache, data) if repair else None
    with Progress("files", None) as bar:
        report = Report(cache.files.where, _nothing if as_json else click.echo)
        size = 0

        def count(more: int) -> None:
            nonlocal size
            size += more
            bar.add(1)

        documents = report.add(audit.verify_documents(cache, count))
        if repairs is not None:
            repairing.repair_documents(cache, documents, report)
        replaced: Replaced = {}
        contents = report.add(audit.verify_contents(cache, count, replaced))
        error = None
        if repairs is not None:
            error = repairing.repair_contents(repairs, contents, replaced, report)
            report.late = repairing.check_snapshots(cache, contents, replaced, report)
            report.add(finding for finding in report.late if finding not in contents)
    left = report.left()
    if as_json:
        click.echo(json.dumps({"files": bar.done, "bytes": size, "ok": not left, "findings": report.rows()}))
    else:
        result = f"{len(left)} damaged" if left else "no damage"
        click.echo(f"{bar.done} files, {amount(size)} read: {result}")
        for fix in sorted({finding.fix for finding in left if not (repair and finding.fix == layout.REPAIR)}):
            click.echo(f"fix: {fix}")
    if error is not None:
        raise error
    return IntegrityError.exit_code if left else 0


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
