"""Engine: processes share work by claims.

`Worker.run` goes through items until each is made by some process. Scans (`encoding.fragments`), encoding and
packing (`make_units`) use it. A process makes its share of the items first, then those that no process has claimed (see
`work.claims`). The other engine is `work.ray_engine`. What a unit becomes does not depend on either.
"""

from __future__ import annotations

import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Generic, Literal, Protocol, TypeVar

from sana_pipe.base.errors import NoSpaceError
from sana_pipe.base.metrics.textfile import store_counts
from sana_pipe.data.cache import index, layout
from sana_pipe.data.cache.cache import Cache, Unit, WorkList
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.work.claims import BEATS, Claims
from sana_pipe.data.work.disk_space import DiskSpace
from sana_pipe.data.work.progress import Progress
from sana_pipe.data.work.stop import Stop

FEW_UNITS = 8
"""Limit on units that are looked up one by one; more are listed."""

Item = TypeVar("Item")
Work = list[tuple[WorkList, Unit]]


class UnitMaker(Protocol):
    """Makes units of a cache: `encoding.unit_encoder.UnitEncoder` or `snapshots.packing.Packer`."""

    cache: Cache

    def make(self, plan: WorkList, unit: Unit, progress: Callable[[int, int], None]) -> index.Commit:
        """Make and commit a unit. `progress` is called with (records made, records rejected) after each batch."""


# ---------------------------------------------------------------- items that processes share


class Job(ABC, Generic[Item]):
    """The way in which items of one kind are claimed and made."""

    @abstractmethod
    def claim_key(self, item: Item) -> tuple[str | int, ...]:
        """The arguments of `Claims` for an item."""

    def unmade(self, items: list[Item]) -> Iterator[Item]:
        """The items that no process has published; of the others the results are taken. Called for each round."""
        return (item for item in items if not self.collect(item))

    @abstractmethod
    def collect(self, item: Item) -> bool:
        """Return whether some process has published the item, and take its result."""

    @abstractmethod
    def make(self, item: Item) -> None:
        """Make and publish an item whose claim is ours."""

    def leave(self, item: Item) -> bool:
        """Return whether to leave the item to its owner, which is alive, when nothing else is to be done."""
        return False

    def idle(self) -> bool:
        """Called when other processes have all that is left, before this process waits: do something else meanwhile.
        Returns False if there was nothing to do."""
        return False

    def wait_for_space(self, item: Item, error: NoSpaceError) -> None:
        """Return when the item can be tried again, else raise. No claim is ours meanwhile."""
        raise error


def in_share(item_id: str, task: int, tasks: int) -> bool:
    """Return whether an item (its id in hex) is in the share of `task`. Shares do not shift as items are made."""
    return int(item_id[:8], 16) % tasks == task


@dataclass(frozen=True)
class Worker:
    """A process among those that share the work.

    Args:
        claims: this process's claims.
        stop: asked between items.
        task, tasks: which share this process makes first, of how many.
    """

    claims: Claims
    stop: Stop
    task: int = 0
    tasks: int = 1

    def in_my_share(self, item_id: str) -> bool:
        return in_share(item_id, self.task, self.tasks)

    def run(
        self, job: Job[Item], items: Iterable[Item], id_of: Callable[[Item], str], poll_s: float = float("inf")
    ) -> None:
        """Have every item made: by this process, or by the process that claims it.

        Args:
            id_of: an item's id in hex, which decides its share.
            poll_s: how often, at least, an idle process looks for items that others have made.

        Raises:
            Stopped: a signal asked for the end.
            NoSpaceError: from `Job.wait_for_space`.
        """
        share: list[Item] = []
        others: list[Item] = []
        for item in items:
            (share if self.in_my_share(id_of(item)) else others).append(item)
        # The order differs between processes, so that two seldom meet at an item.
        others.sort(key=lambda item: layout.digest(self.claims.token, id_of(item)))
        poll_s = min(poll_s, self.claims.stale_s / (4 * BEATS))
        rounds, idle = [share, others], False
        while any(rounds):
            again, worked = list[Item](), False
            for item in chain.from_iterable(map(job.unmade, rounds)):
                self.stop.check()
                outcome = self._attempt(job, item, idle)
                worked |= outcome in ("made", "paused")
                if outcome in ("paused", "claimed"):
                    again.append(item)
            rounds, idle = [again], not worked
            if again and idle and not job.idle():
                self.stop.sleep(poll_s)

    def _attempt(self, job: Job[Item], item: Item, idle: bool) -> Literal["made", "paused", "claimed", "settled"]:
        try:
            state = self.claims.take(*job.claim_key(item))
            if state == "ours":
                with self.claims.heartbeat(*job.claim_key(item)):
                    if job.collect(item):  # published since the look
                        return "settled"
                    job.make(item)
                return "made"
        except NoSpaceError as error:
            job.wait_for_space(item, error)
            return "paused"
        return "settled" if idle and state == "alive" and job.leave(item) else "claimed"


# ---------------------------------------------------------------- units of plans


def missing_units(cache: Cache, plans: list[WorkList]) -> Work:
    """Units without a commit, in plan order. Finished plans get their segment on the way."""
    todo: Work = []
    for plan in plans:
        if cache.files.exists(Paths.segment(plan.encoding, plan.number)):
            continue
        done = index.committed(cache.files, plan.encoding, plan.number)
        missing = [unit for unit in plan.units if unit.unit not in done]
        if not missing:
            index.merge(cache.files, plan.encoding, plan.number, (unit.unit for unit in plan.units))
        todo.extend((plan, unit) for unit in missing)
    return todo


def is_done(cache: Cache, plan: WorkList, unit: Unit) -> bool:
    """Return whether a unit is committed."""
    exists = cache.files.exists
    commit = Paths.unit(plan.encoding, plan.number, unit.unit)
    return exists(commit) or exists(Paths.segment(plan.encoding, plan.number))


def make_units(
    maker: UnitMaker, todo: Work, worker: Worker, bar: Progress, space: DiskSpace | None = None
) -> tuple[int, int]:
    """The local engine.

    Args:
        todo: every unit that is missing, of all processes.
        space: where to wait while the disk is full; None: a full disk is an error.

    Returns:
        Records made here, and units that living workers were still making at the end.

    Raises:
        Stopped: a signal asked for the end.
        NoSpaceError: there was too little space for too long.
    """
    job = _Units(maker, worker, bar, space)
    share = {"node": platform.node(), "task": worker.task, "tasks": worker.tasks}
    worker.claims.progress = lambda: {**share, **bar.brief(), **store_counts()}
    bar.expect(sum(unit.count for _, unit in todo if worker.in_my_share(unit.unit)))
    with worker.stop.polite():
        worker.run(job, todo, lambda item: item[1].unit)
    return job.records, job.left


class _Units(Job[tuple[WorkList, Unit]]):
    """Units of plans. The bar expects the units of this process's share from the start, others when they are taken."""

    def __init__(self, maker: UnitMaker, worker: Worker, bar: Progress, space: DiskSpace | None):
        self.maker, self.worker, self.bar, self.space = maker, worker, bar, space
        self.records = self.left = 0

    def claim_key(self, item: tuple[WorkList, Unit]) -> tuple[str | int, ...]:
        plan, unit = item
        return plan.encoding, plan.number, unit.unit

    def unmade(self, items: Work) -> Iterator[tuple[WorkList, Unit]]:
        cache, plans = self.maker.cache, {(plan.encoding, plan.number): plan for plan, _ in items}
        few = len(items) <= FEW_UNITS
        done = {} if few else {of: index.committed(cache.files, *of) for of in plans}
        for plan, unit in items:
            if is_done(cache, plan, unit) if few else unit.unit in done[plan.encoding, plan.number]:
                self._expect_no_more(unit)
            else:
                yield plan, unit

    def collect(self, item: tuple[WorkList, Unit]) -> bool:
        plan, unit = item
        done = self.maker.cache.files.has_file(Paths.unit(plan.encoding, plan.number, unit.unit))
        if done:
            self._expect_no_more(unit)
        return done

    def make(self, item: tuple[WorkList, Unit]) -> None:
        plan, unit = item
        counts = self.bar.done, self.bar.rejected
        taken_over = 0 if self.worker.in_my_share(unit.unit) else unit.count
        self.bar.expect(taken_over)
        try:
            if self.space is not None:
                self.space.check(plan, unit)
            self.records += self.maker.make(plan, unit, self._batch_made).records
        except NoSpaceError:
            self.bar.expect(-taken_over)
            self.bar.forget(*counts)
            raise
        if self.space is not None:
            self.space.unit_made()

    def leave(self, item: tuple[WorkList, Unit]) -> bool:
        self.left += 1
        self._expect_no_more(item[1])
        return True

    def wait_for_space(self, item: tuple[WorkList, Unit], error: NoSpaceError) -> None:
        if self.space is None:
            raise error
        self.space.wait(*item, error)

    def _expect_no_more(self, unit: Unit) -> None:
        if self.worker.in_my_share(unit.unit):
            self.bar.expect(-unit.count)

    def _batch_made(self, records: int, rejects: int) -> None:
        self.bar.add(records, rejects)
        self.worker.stop.check_batch()
