"""Quarantine: replace samples whose records cannot be read, and write down which.

Without a quarantine file an unreadable record stops the run. With the file, a substitute of the same bucket
(`Planner.substitutes`) takes the sample's place, the same on every topology, and the file gets a line of JSON. Only
batches that were handed out are written down.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sana_pipe.base.errors import writing
from sana_pipe.data.cache.shard import RecordError
from sana_pipe.data.loader.planner import BatchPlan, Planner


@dataclass(frozen=True)
class UnreadableRecord:
    """A record of `sample` that could not be read at a step, and the sample `by` that was tried in its place."""

    shard: str
    record: str
    sample: int
    step: int
    by: int
    reason: str


class Quarantine:
    """Appends to a file.

    Raises:
        UserError: the file cannot be written.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.write(())  # an unwritable file is an error now, not at the first bad record

    def write(self, unreadable: Sequence[UnreadableRecord]) -> None:
        """Append a line for each."""
        entries = [
            {**asdict(entry), "sample": f"{entry.sample:016x}", "by": f"{entry.by:016x}"} for entry in unreadable
        ]
        with (
            writing(self.path, "--quarantine FILE in a folder that you may write to", again="--resume auto"),
            open(self.path, "a", encoding="utf-8") as file,
        ):
            fcntl.lockf(file, fcntl.LOCK_EX)  # other ranks write to it, perhaps from other nodes
            file.write("".join(json.dumps(entry) + "\n" for entry in entries))
            file.flush()
            os.fsync(file.fileno())


class Substitution:
    """The replacements in one rank's share of a step.

    Attributes:
        unreadable: records that could not be read, also of substitutes.
    """

    def __init__(self, planner: Planner):
        self._planner = planner
        self._candidates: dict[int, Iterator[BatchPlan]] = {}
        self.unreadable: list[UnreadableRecord] = []

    def __len__(self) -> int:
        """Samples of the share that have a substitute."""
        return len(self._candidates)

    def replace(self, plan: BatchPlan, i: int, error: RecordError) -> BatchPlan:
        """The plan with another sample in the place of the i-th, whose record could not be read.

        Raises:
            RecordError: the bucket has no other substitute.
        """
        if i not in self._candidates:
            self._candidates[i] = self._planner.substitutes(plan, i)
        substitute = next(self._candidates[i], None)
        if substitute is None:
            raise error
        old, new = int(plan.sample_id[i]), int(substitute.sample_id[0])
        self.unreadable.append(UnreadableRecord(error.shard, error.key.hex(), old, plan.step, new, error.what))
        return plan.put(i, substitute)
