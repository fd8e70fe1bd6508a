"""`sana-pipe verify`: reads a whole cache, names what is damaged, and with `--repair` makes just that again."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable
from functools import cache as remembered
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import click

from pipeline.amounts import amount
from pipeline.cache import audit, layout
from pipeline.cache.index import Commit, RecordIndex
from pipeline.cache.layout import Paths
from pipeline.cache.store import Cache, Plan, Unit
from pipeline.config import Config
from pipeline.encoding import rebuild, repair, worker
from pipeline.encoding.scan import reopen
from pipeline.errors import AwayError, CacheError, IntegrityError, NoSpaceError, UserError
from pipeline.snapshots import packing
from pipeline.sources.source import Source
from pipeline.work.engine import Runner
from pipeline.work.progress import Progress


def run(config: Config, mend: bool = False, data: tuple[str, ...] = (), as_json: bool = False) -> int:
    """Verify, and repair if asked. Each finding is printed when it is found, what became of it when that is known.

    Args:
        mend: put documents right, encode damaged records again and restore their shards.
        data: folders of the sources, where they are no longer where they were scanned (`NAME=DIR`).

    Returns:
        0 if everything is right (or was restored), else the exit code of an integrity error.

    Raises:
        CacheError: there is no cache.
        UserError: a repair needs a source or a model that is not there; all else is mended first.
    """
    cache = Cache.of(config)
    findings: list[audit.Finding] = []
    outcomes: dict[str, str] = {}
    size = 0

    with Progress("files", None) as bar:

        def count(of_file: int) -> None:
            nonlocal size
            size += of_file
            bar.add(1)

        def shown(found: Iterable[audit.Finding]) -> list[audit.Finding]:
            new = []
            for finding in found:
                new.append(finding)
                if not as_json:
                    _show(cache, finding)
            findings.extend(new)
            return new

        def became(path: str, outcome: str) -> None:
            outcomes[path] = outcome
            if not as_json:
                click.echo(f"{cache.files.where(path)}: {outcome}")

        documents = shown(audit.verify_documents(cache, count))
        if mend:
            _documents_again(cache, documents, became)
        again: dict[str, set[bytes]] = {}
        contents = shown(audit.verify_contents(cache, count, again))
        late: list[audit.Finding] = []
        error: UserError | None = None
        if mend:
            error = _contents_again(Repairs(config, cache, data), contents, again, became)
            late = _snapshots_again(cache, contents, again, became)
            shown(finding for finding in late if finding not in contents)
    later = {finding.path for finding in late}
    left = [f for f in findings if f.path not in later and outcomes.get(f.path) not in ("restored", "replaced")] + late
    if as_json:
        told: dict[str, Any] = {
            "files": bar.done,
            "bytes": size,
            "ok": not left,
            "findings": [
                {**vars(f), "outcome": f"failed: {f.fix}" if f in late else outcomes.get(f.path)} for f in findings
            ],
        }
        click.echo(json.dumps(told))
    else:
        click.echo(f"{bar.done} files, {amount(size)} read: " + (f"{len(left)} damaged" if left else "all is right"))
        for fix in sorted({f.fix for f in left if not (mend and f.fix == layout.REPAIR)}):
            click.echo(f"fix: {fix}")
    if error is not None:
        raise error
    return IntegrityError.exit_code if left else 0


def _show(cache: Cache, finding: audit.Finding) -> None:
    where = cache.files.where(finding.path)
    click.echo(finding.problem if finding.problem.startswith(where) else f"{where}: {finding.problem}")
    for key in finding.records[:20]:
        click.echo(f"  record {key}")
    if len(finding.records) > 20:
        click.echo(f"  and {len(finding.records) - 20} more records")


Became = Callable[[str, str], None]
"""Told of what became of a damaged path."""


def _documents_again(cache: Cache, findings: list[audit.Finding], became: Became) -> None:
    """Those that are damaged, and always those that have no copy yet."""
    rebuild.rebuilt(cache)
    still = {finding.path: finding for finding in audit.verify_documents(cache)} if findings else {}
    for finding in findings:
        if finding.path in still:
            became(finding.path, f"failed: {still[finding.path].fix}")
        elif cache.files.has_file(finding.path):
            became(finding.path, "restored")
        else:
            became(finding.path, f"moved to damaged/; to make again what it was for: {audit.maker(finding.path)}")


def _contents_again(
    repairs: Repairs, findings: list[audit.Finding], again: dict[str, set[bytes]], became: Became
) -> UserError | None:
    """Tables first: repairing a shard reads them. Returns the first error that is not of the cache's bytes: other
    findings need another source or model.

    Args:
        again: damaged records that other shards have; kept true.

    Raises:
        AwayError, NoSpaceError: no other finding would fare better.
    """
    first: UserError | None = None
    for finding in sorted(findings, key=lambda finding: not _of_records(finding.path)):
        try:
            outcome = _content_again(repairs, finding, again)
        except (AwayError, NoSpaceError):
            raise
        except IntegrityError as error:
            outcome = f"failed: {error.what} (once that is mended, repair again)"
        except UserError as error:
            first, outcome = first or error, f"failed: {error.what}"
        if outcome:
            became(finding.path, outcome)
    return first


def _of_records(path: str) -> bool:
    return path.startswith("tables/") and path.endswith(".arrow")


def _content_again(repairs: Repairs, finding: audit.Finding, again: dict[str, set[bytes]]) -> str | None:
    """What became of a finding; None for snapshots, which come last."""
    if _of_records(finding.path):
        return _table_again(repairs.cache, finding)
    if finding.unit:
        return repairs.unit(finding, again)
    if finding.path.startswith(f"shards/{layout.PACKED}"):
        return _packed_again(repairs.cache, finding.path)
    return None if finding.path.startswith("snapshots/") else f"failed: {finding.fix}"


def _snapshots_again(
    cache: Cache, findings: list[audit.Finding], again: dict[str, set[bytes]], became: Became
) -> list[audit.Finding]:
    """What is wrong now with named snapshots, and with those of the findings."""
    pointed = audit.named_snapshots(cache)
    damaged = {finding.path for finding in findings if finding.path.startswith("snapshots/")}
    left = []
    for name in sorted(damaged | set(map(Paths.snapshot, pointed))):
        still = list(audit.verify_snapshot(cache, name, again, pointed))
        left += still
        if name in damaged:
            became(name, f"failed: {still[0].fix}" if still else "restored")
    return left


def _table_again(cache: Cache, finding: audit.Finding) -> str:
    digest = PurePosixPath(finding.path).stem
    problem = audit.BACKUP if finding.fix == layout.REPAIR else finding.fix
    for recipe in audit.recipe_names(cache):
        try:
            for plan in cache.plans(recipe):
                if repair.repair_table(cache, recipe, plan.number, digest):
                    return "restored"
        except (AwayError, NoSpaceError):
            raise
        except CacheError as error:  # of this recipe; the table may be another's
            problem = error.what
    return f"failed: {problem}"


def _packed_again(cache: Cache, path: str) -> str:
    try:
        return "restored" if packing.restored(cache, path) else "failed: sana-pipe bucket --pack"
    except (AwayError, NoSpaceError):
        raise
    except CacheError as error:
        return f"failed: the snapshot that it was packed from cannot be read: {error}"


class Repairs:
    """Makes damaged records again, with the encoder of their recipe; one encoder at a time is loaded."""

    def __init__(self, config: Config, cache: Cache, data: tuple[str, ...]):
        self.config, self.cache = config, cache
        self.given = dict(_pair(text) for text in data)
        self.runner = Runner(config, cache, {}, check=True)
        self._records: dict[str, Callable[[], RecordIndex]] = {}

    def unit(self, finding: audit.Finding, again: dict[str, set[bytes]]) -> str:
        """Restore the shard of a finding; see `repair.repair_unit`."""
        recipe = finding.recipe
        records = self._records.get(recipe) or remembered(partial(self.cache.index, recipe))
        self._records = {}
        outcome = repair.repair_unit(self.cache, self.cache.recipe(recipe), finding, self._encode, again, records)
        if outcome == "restored":  # else there may be a new plan
            self._records = {recipe: records}
        return outcome

    def _encode(self, plan: Plan, unit: Unit, commit: Commit, bad: Container[bytes]) -> Iterable[worker.Made]:
        rows = self.cache.table(plan.table).slice(unit.start, unit.count)
        if "source" in rows.column_names:
            for name in set(rows.column("source").to_pylist()) - set(self.runner.sources):
                self.runner.sources[name] = self._source(name)
        return self.runner.again(plan, unit, commit, bad)

    def _source(self, name: str) -> Source:
        try:
            return reopen(self.cache, name, self.config.data, self.given.get(name))
        except UserError as error:
            raise UserError(
                f"damaged latents need source {name!r}: {error.what}", fix=f"--data {name}=DIR, where it is now"
            ) from None


def _pair(text: str) -> tuple[str, str]:
    name, equals, folder = text.partition("=")
    if not equals:
        raise UserError(f"--data {text!r} is not of the form NAME=DIR")
    return name, folder
