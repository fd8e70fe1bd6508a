"""Verification in shares: documents, then parts of the contents, then snapshots and repairs.

Several processes share the parts by claims, as `encode` shares units (`work.engine`). Every one of them ends with the
result of the whole round (`verification.round`). The last step is a part, too, which one process does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

from sana_pipe.base.amounts import amount
from sana_pipe.base.errors import UserError
from sana_pipe.data.cache import audit, layout
from sana_pipe.data.cache.audit import Contents, Part
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.findings import Finding, Replaced
from sana_pipe.data.encoding.repair import Repairs
from sana_pipe.data.verification import repairing
from sana_pipe.data.verification.report import Report
from sana_pipe.data.verification.round import Result, Round, Scope, StoredRound
from sana_pipe.data.work.engine import Job, Worker
from sana_pipe.data.work.progress import Progress

DOCUMENTS = Part(("documents",), (0,))
"""The first part. Every process verifies it, and repairs it if asked, one after the other: what was right when a killed
process read it may be wrong now, and the other parts are planned by it."""


@dataclass
class Amount:
    """A number of files and of bytes."""

    files: int = 0
    bytes: int = 0

    def add(self, files: int, size: int) -> None:
        """Count more of them."""
        self.files += files
        self.bytes += size


@dataclass
class Totals:
    """The counts of a round.

    Attributes:
        total: what the scope has, documents included.
        verified: with a result in this round.
        before: of these, before this process began.
        read: by this process.
        shards, chosen: number of shards in the scope, and in the sample.
    """

    total: Amount = field(default_factory=Amount)
    verified: Amount = field(default_factory=Amount)
    before: Amount = field(default_factory=Amount)
    read: Amount = field(default_factory=Amount)
    shards: int = 0
    chosen: int = 0

    @property
    def share(self) -> float:
        """The share of the bytes that was verified, 0 to 1."""
        return self.verified.bytes / self.total.bytes if self.total.bytes else 1.0


class Verification:
    """One process's verification of a cache.

    Args:
        scope: what is verified.
        report: where findings go as they appear.
        bar: shows MiB of the total.
        worker: this process among those that share the parts.
        round: their results.
        repairs: None: nothing is repaired.

    Attributes:
        totals: so far.
        error: the first error of a repair that needs a source or a model that is not there.
    """

    def __init__(
        self,
        cache: Cache,
        scope: Scope,
        report: Report,
        bar: Progress,
        worker: Worker,
        round: Round,
        repairs: Repairs | None,
    ):
        self.cache, self.scope, self.report, self.bar = cache, scope, report, bar
        self.worker, self.round, self.repairs = worker, round, repairs
        self.totals = Totals()
        self.error: UserError | None = None
        self._replaced: Replaced = {}
        self._earlier = set[str]()  # parts with a result when this process began
        self._stale = set[str]()  # of these the ones of a round that was stopped, until this process verifies them
        self._new = 0  # bytes verified since, by any process
        self._todo: int | None = None  # bytes to be verified since; None: not known yet

    def run(self) -> None:
        """Verify everything, and repair. Findings and outcomes are in the report then, also those of other processes.

        Raises:
            AwayError, NoSpaceError: the cache cannot be reached, or has no space for results.
        """
        known = self.round.done()
        if self.repairs is None:
            self.made(DOCUMENTS, self._documents(DOCUMENTS))
        else:
            self._share([DOCUMENTS], self._documents)
        documents = self.totals.verified
        self.totals.total.add(documents.files, documents.bytes)
        contents = Contents(self.cache, self.scope.snapshot)
        parts = list(contents.parts())
        for part in parts:
            self.totals.total.add(_files(part), part.bytes)
        chosen = self._sample(parts)
        self.round.parts = layout.digest("parts", *(part.id for part in chosen)).hex()
        done = None if self.round.done() is None else known
        for part in chosen:
            if done is None or part.id in done:
                self._earlier.add(part.id)
                self.totals.before.add(_files(part), part.bytes)
        self._stale = set() if done is None else set(self._earlier)
        self._todo = self._new + sum(part.bytes for part in chosen) - self.totals.before.bytes
        if self._earlier and self.round.begun is not None:
            begun = datetime.fromtimestamp(self.round.begun, UTC)
            before = f"{self.totals.before.files} files, {amount(self.totals.before.bytes)} were read before"
            self.report.say(f"continues the verification of {begun:%Y-%m-%d %H:%M} UTC: {before}")
        self._share(chosen, lambda part: self._part(contents, part))
        last = Part(("snapshots", self.round.parts), (0, 0))  # another one, if the cache has changed
        self._share([last], lambda part: self._last(contents))
        if self.error is None:
            self.round.end(self.worker.task, self.worker.tasks)

    def _sample(self, parts: list[Part]) -> list[Part]:
        """The parts that are verified: all, or all tables and a share of the shards that the round's seed draws."""
        shards = [part for part in parts if part.is_shard]
        self.totals.shards = self.totals.chosen = len(shards)
        if self.scope.sample is None:
            return parts
        self.totals.chosen = math.ceil(self.scope.sample * len(shards))
        drawn = sorted(shards, key=lambda part: layout.digest("sample", self.round.seed, part.id))
        chosen = {part.id for part in drawn[: self.totals.chosen]}
        return [part for part in parts if not part.is_shard or part.id in chosen]

    def _share(self, parts: list[Part], make: Callable[[Part], Result]) -> None:
        job = _Verifying(self, make)
        if isinstance(self.round, StoredRound):
            self.worker.run(job, parts, lambda part: part.id)
            return
        for part in parts:  # there is nobody to share with
            job.make(part)

    # ------------------------------------------------------------ making results

    def _documents(self, part: Part) -> Result:
        counted, findings = Amount(), list[Finding]()
        for finding in audit.verify_documents(self.cache, lambda size: counted.add(1, size)):
            findings += self.report.add([finding])
        outcomes: dict[str, str] = {}
        repaired = DOCUMENTS.id in (self.round.done() or ())  # by another process, which read all tables for it
        if self.repairs is not None and (findings or not repaired):
            repairing.repair_documents(self.cache, findings, self.report)
            outcomes = {finding.path: self.report.outcomes[finding.path] for finding in findings}
        return Result(counted.files, counted.bytes, tuple(findings), outcomes=outcomes)

    def _part(self, contents: Contents, part: Part) -> Result:
        counted, findings, replaced = Amount(), list[Finding](), dict[str, set[bytes]]()
        for finding in contents.verify(part, replaced, lambda size: counted.add(1, size)):
            findings += self.report.add([finding])
        return Result(counted.files, counted.bytes, tuple(findings), replaced)

    def _last(self, contents: Contents) -> Result:
        """Verify the snapshots and repair what was found. After an error there are findings for another process."""
        report, before = self.report, dict(self.report.outcomes)
        damaged = [finding for finding in report.findings if finding.path not in before]
        snapshots = report.add(contents.verify_snapshots(self._replaced))
        if self.repairs is None:
            return Result(findings=tuple(snapshots))
        wanted = [*damaged, *snapshots]
        self.error = repairing.repair_contents(self.repairs, wanted, self._replaced, report)
        report.late = repairing.check_snapshots(self.cache, wanted, self._replaced, report)
        more = report.add(finding for finding in report.late if finding not in wanted)
        outcomes = {path: outcome for path, outcome in report.outcomes.items() if before.get(path) != outcome}
        return Result(findings=(*snapshots, *more), outcomes=outcomes, late=tuple(report.late))

    # ------------------------------------------------------------ results

    def made(self, part: Part, result: Result) -> None:
        """Publish a result of this process. Repairs that lack a source or a model are tried again by the next one."""
        self.totals.read.add(result.files, result.bytes)
        self._stale.discard(part.id)
        self._count(part, result)
        if self.error is None:
            self.round.publish(part.id, Result() if part == DOCUMENTS else result, (_files(part), part.bytes))

    def take(self, part: Part) -> bool:
        """Take the result of another process, or of an earlier command; returns False if there is none."""
        if part == DOCUMENTS:
            return False
        if (result := self.round.result(part.id, (_files(part), part.bytes))) is None:
            return False
        if result.findings and part.id in self._stale:  # may have been put right since
            return False
        self.report.add(result.findings)
        for path, outcome in result.outcomes.items():
            self.report.outcome(path, outcome)
        self.report.late += result.late
        self._count(part, result)
        return True

    def _count(self, part: Part, result: Result) -> None:
        self._replaced.update(result.replaced)
        self.totals.verified.add(result.files, result.bytes)
        if part.id not in self._earlier:
            self._new += result.bytes
        self.bar.reach(self._new >> 20, None if self._todo is None else max(self._new, self._todo) >> 20)


class _Verifying(Job[Part]):
    """Parts that processes share."""

    def __init__(self, verification: Verification, make: Callable[[Part], Result]):
        self.verification, self._make = verification, make

    def claim_key(self, item: Part) -> tuple[str | int, ...]:
        round = self.verification.round
        assert isinstance(round, StoredRound)
        return layout.Paths.ROUNDS, round.number, item.id

    def unmade(self, items: list[Part]) -> Iterator[Part]:
        done = self.verification.round.done()
        return (item for item in items if (done is not None and item.id not in done) or not self.collect(item))

    def collect(self, item: Part) -> bool:
        return self.verification.take(item)

    def make(self, item: Part) -> None:
        self.verification.made(item, self._make(item))


def _files(part: Part) -> int:
    """The files of a part that are there."""
    return sum(map(bool, part.sizes))
