"""`sana-pipe verify`: reads a whole cache, names what is damaged, and with `--repair` makes just that again."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import click

from sana_pipe.base.amounts import amount
from sana_pipe.base.errors import AwayError, CacheError, IntegrityError, NoSpaceError, UserError, expanded
from sana_pipe.config import Config
from sana_pipe.data.cache import audit, layout
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.findings import BACKUP, Finding, Replaced, encoding_names, named_snapshots, packs
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.cache.lost import repair_documents
from sana_pipe.data.encoding.encoder_settings import EncoderSettings
from sana_pipe.data.encoding.repair import Repairs, repair_table
from sana_pipe.data.encoding.unit_encoder import UnitEncoder
from sana_pipe.data.signals import Encoders
from sana_pipe.data.snapshots import packing
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
        report = _Report(cache, bar, log=not as_json)
        documents = report.add(audit.verify_documents(cache, report.count))
        if repairs is not None:
            _repair_documents(cache, documents, report)
        replaced: Replaced = {}
        contents = report.add(audit.verify_contents(cache, report.count, replaced))
        error = None
        if repairs is not None:
            error = _repair_contents(repairs, contents, replaced, report)
            report.late = _check_snapshots(cache, contents, replaced, report)
            report.add(finding for finding in report.late if finding not in contents)
    left = report.left()
    if as_json:
        click.echo(json.dumps({"files": bar.done, "bytes": report.bytes, "ok": not left, "findings": report.rows()}))
    else:
        result = f"{len(left)} damaged" if left else "no damage"
        click.echo(f"{bar.done} files, {amount(report.bytes)} read: {result}")
        for fix in sorted({finding.fix for finding in left if not (repair and finding.fix == layout.REPAIR)}):
            click.echo(f"fix: {fix}")
    if error is not None:
        raise error
    return IntegrityError.exit_code if left else 0


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


SET_ASIDE = "moved to damaged/: only reports of snapshots read it"
REPAIRED = ("restored", "replaced", SET_ASIDE)
"""Outcomes after which nothing is left to do."""
FAILED = "failed"
"""The outcome where the fix of the finding, which is printed at the end, says what to do."""


class _Report:
    """Findings and their outcomes.

    Attributes:
        bytes: read so far.
        late: what is wrong with snapshots after the repairs; replaces earlier findings of the same paths.
    """

    def __init__(self, cache: Cache, bar: Progress, log: bool):
        self.cache, self.bar, self.log = cache, bar, log
        self.bytes = 0
        self.late: list[Finding] = []
        self._findings: list[Finding] = []
        self._outcomes: dict[str, str] = {}

    def count(self, size: int) -> None:
        """A file of so many bytes was read."""
        self.bytes += size
        self.bar.add(1)

    def add(self, findings: Iterable[Finding]) -> list[Finding]:
        """Print and collect findings as they come."""
        added = []
        for finding in findings:
            added.append(finding)
            if self.log:
                self._print(finding)
        self._findings.extend(added)
        return added

    def outcome(self, path: str, outcome: str) -> None:
        self._outcomes[path] = outcome
        if self.log:
            click.echo(f"{self.cache.files.where(path)}: {outcome}")

    def left(self) -> list[Finding]:
        """Return what is still wrong."""
        late = {finding.path for finding in self.late}
        repaired = {path for path, outcome in self._outcomes.items() if outcome in REPAIRED}
        return [finding for finding in self._findings if finding.path not in late | repaired] + self.late

    def rows(self) -> list[dict[str, Any]]:
        """The findings as JSON values."""
        return [
            {
                **vars(finding),
                "outcome": FAILED if finding in self.late else self._outcomes.get(finding.path),
            }
            for finding in self._findings
        ]

    def _print(self, finding: Finding) -> None:
        where = self.cache.files.where(finding.path)
        click.echo(finding.problem if finding.problem.startswith(where) else f"{where}: {finding.problem}")
        for key in finding.records[:20]:
            click.echo(f"  record {key}")
        if len(finding.records) > 20:
            click.echo(f"  and {len(finding.records) - 20} more records")


def _repair_documents(cache: Cache, findings: list[Finding], report: _Report) -> None:
    """Repair damaged documents; also write the copies that are missing, with or without findings."""
    lost, known = repair_documents(cache), {finding.path for finding in findings}
    names = sorted(name for name in lost - known if layout.is_document(name))
    findings += report.add(Finding(name, "is lost together with its copy, or lacks a table") for name in names)
    still = {finding.path for finding in audit.verify_documents(cache)} if findings else set()
    for finding in findings:
        if finding.path in lost:
            command = layout.way_out(finding.path)
            report.outcome(finding.path, f"lost together with its copy; to make its content again: {command}")
        else:
            report.outcome(finding.path, FAILED if finding.path in still else "restored")


def _repair_contents(
    repairs: Repairs, findings: list[Finding], replaced: Replaced, report: _Report
) -> UserError | None:
    """Repair tables and shards, one after the other.

    Tables come first, because repairing a shard reads them; then shards by encoding, so that each encoder is loaded
    once.

    Args:
        replaced: updated.

    Returns:
        The first error that does not concern the cache's bytes: a source or a model is missing. Other findings may need
        other ones, so they are repaired first.

    Raises:
        AwayError, NoSpaceError: every other repair would fail, too.
    """
    first: UserError | None = None
    for finding in sorted(findings, key=lambda finding: (not _is_table(finding.path), finding.encoding)):
        try:
            outcome = _repair_content(repairs, finding, replaced)
        except (AwayError, NoSpaceError):
            raise
        except IntegrityError as error:
            outcome = f"failed: {error.what} (once that is fixed, repair again)"
        except UserError as error:
            outcome = f"failed: {error.what}"
            # Frames of the traceback would keep the encoder in memory.
            error.__traceback__ = error.__context__ = error.__cause__ = None
            first = first or error
        if outcome:
            report.outcome(finding.path, outcome)
    return first


def _is_table(path: str) -> bool:
    return path.removeprefix("copies/").startswith("tables/")


def _repair_content(repairs: Repairs, finding: Finding, replaced: Replaced) -> str | None:
    """The outcome of a finding; None for snapshots, which come last."""
    if _is_table(finding.path):
        return _repair_table(repairs.cache, finding)
    if finding.unit:
        return repairs.unit(finding, replaced)
    if finding.path.startswith(f"shards/{layout.PACKED}"):
        return _repair_packed(repairs.cache, finding.path)
    return None if finding.path.startswith("snapshots/") else FAILED


def _repair_table(cache: Cache, finding: Finding) -> str:
    name, digest = finding.path.removeprefix("copies/"), PurePosixPath(finding.path).stem
    if cache.files.duplicate(name):
        return "restored"
    if finding.path.endswith(".parquet") and finding.fix == layout.REPAIR:
        cache.files.set_aside(name)
        return SET_ASIDE
    outcome = f"failed: {BACKUP}" if finding.fix == layout.REPAIR else FAILED
    for owner in (*encoding_names(cache), *packs(cache)):
        try:
            for plan in cache.plans(owner):
                if repair_table(cache, owner, plan.number, digest):
                    return "restored"
        except (AwayError, NoSpaceError):
            raise
        except CacheError as error:  # of this one; the table may be another's
            outcome = f"failed: {error.what}"
    return outcome


def _repair_packed(cache: Cache, path: str) -> str:
    try:
        return "restored" if packing.restored(cache, path) else "failed: sana-pipe bucket --pack"
    except (AwayError, NoSpaceError):
        raise
    except CacheError as error:
        return f"failed: the snapshot that it was packed from cannot be read: {error}"


def _check_snapshots(cache: Cache, findings: list[Finding], replaced: Replaced, report: _Report) -> list[Finding]:
    """Check the named snapshots again, and the snapshots in the findings."""
    named = named_snapshots(cache)
    damaged = {finding.path for finding in findings if finding.path.startswith("snapshots/")}
    left = []
    for name in sorted(damaged | set(map(Paths.snapshot, named))):
        still = list(audit.verify_snapshot(cache, name, replaced, named))
        left += still
        if name in damaged:
            report.outcome(name, FAILED if still else "restored")
    return left
