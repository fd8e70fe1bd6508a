"""The findings of a verification and their outcomes, collected and printed as they appear."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from sana_pipe.data.cache.findings import Finding

SET_ASIDE = "moved to damaged/: only reports of snapshots read it"
REPAIRED = ("restored", "replaced", SET_ASIDE)
"""Outcomes after which nothing is left to do."""
FAILED = "failed"
"""The outcome where the fix of the finding, which is printed at the end, says what to do."""
SHOWN = 20
"""Records of a finding that are printed."""


class Report:
    """Findings and their outcomes.

    Args:
        where: path in the cache -> the file's full name.
        say: prints a line.

    Attributes:
        findings: in the order in which they appeared.
        outcomes: path -> outcome.
        late: what is wrong with snapshots after the repairs; replaces earlier findings of the same paths.
    """

    def __init__(self, where: Callable[[str], str], say: Callable[[str], None]):
        self.where, self.say = where, say
        self.late: list[Finding] = []
        self.findings: list[Finding] = []
        self.outcomes: dict[str, str] = {}

    def add(self, findings: Iterable[Finding]) -> list[Finding]:
        """Print and collect findings as they come."""
        added = []
        for finding in findings:
            added.append(finding)
            self._print(finding)
        self.findings.extend(added)
        return added

    def outcome(self, path: str, outcome: str) -> None:
        """Print and collect the outcome of the findings of a path."""
        self.outcomes[path] = outcome
        self.say(f"{self.where(path)}: {outcome}")

    def left(self) -> list[Finding]:
        """Return what is still wrong."""
        late = {finding.path for finding in self.late}
        repaired = {path for path, outcome in self.outcomes.items() if outcome in REPAIRED}
        return [finding for finding in self.findings if finding.path not in late | repaired] + self.late

    def rows(self) -> list[dict[str, Any]]:
        """The findings as JSON values."""
        return [
            {**vars(finding), "outcome": FAILED if finding in self.late else self.outcomes.get(finding.path)}
            for finding in self.findings
        ]

    def _print(self, finding: Finding) -> None:
        where = self.where(finding.path)
        self.say(finding.problem if finding.problem.startswith(where) else f"{where}: {finding.problem}")
        for key in finding.records[:SHOWN]:
            self.say(f"  record {key}")
        if len(finding.records) > SHOWN:
            self.say(f"  and {len(finding.records) - SHOWN} more records")
