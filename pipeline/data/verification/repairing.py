"""The repairs of a verification: documents first, then tables and shards, snapshots last.

Each finding gets its outcome in the report. `data.encoding.repair` encodes records again, `cache.lost` restores
documents, `snapshots.packing` copies joint shards again.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from sana_pipe.base.errors import AwayError, CacheError, IntegrityError, NoSpaceError, UserError
from sana_pipe.data.cache import audit, layout
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.findings import BACKUP, Finding, Replaced, encoding_names, named_snapshots, packs
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.cache.lost import repair_documents as restore_documents
from sana_pipe.data.encoding.repair import Repairs, repair_table
from sana_pipe.data.snapshots import packing
from sana_pipe.data.verification.report import FAILED, SET_ASIDE, Report


def repair_documents(cache: Cache, findings: list[Finding], report: Report) -> None:
    """Repair damaged documents; also write the copies that are missing, with or without findings."""
    lost, known = restore_documents(cache), {finding.path for finding in findings}
    names = sorted(name for name in lost - known if layout.is_document(name))
    findings += report.add(Finding(name, "is lost together with its copy, or lacks a table") for name in names)
    still = {finding.path for finding in audit.verify_documents(cache)} if findings else set()
    for finding in findings:
        if finding.path in lost:
            command = layout.way_out(finding.path)
            report.outcome(finding.path, f"lost together with its copy; to make its content again: {command}")
        else:
            report.outcome(finding.path, FAILED if finding.path in still else "restored")


def repair_contents(repairs: Repairs, findings: list[Finding], replaced: Replaced, report: Report) -> UserError | None:
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


def check_snapshots(cache: Cache, findings: list[Finding], replaced: Replaced, report: Report) -> list[Finding]:
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
