"""Fragments: the pieces of a scan that is going on, so that processes share it and a killed one loses little of it.

What: `Fragments.gather` has the rows of every fragment made once, by whichever process claims it (see `claims`), and
gives them all to each process. A fragment is a document `fragments/<source>/<id>.json` that names a table beside it;
its id is a digest of all that decides its rows, so that of a file that changed in between nothing old is taken over.
Why documents and not messages: processes need not know of one another, one that comes later finds what is there, and
one that was killed has lost nothing but the fragment in hand.
Price: two small files for each fragment, and two syncs for its claim. A process that has nothing left waits for the
living owners of the rest (their fragments are needed); a stopped owner is overtaken after `claims.stale_s`, so that
its fragment in hand is read twice. `finish` removes all fragments of the source, at the end of the command, when every
other process has long had its own; one that slept until then starts over with the scan document that there is now.

A damaged fragment is made again. So nothing here needs `verify`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.cache import layout, shard
from pipeline.cache.layout import Paths
from pipeline.cache.store import Cache
from pipeline.errors import IntegrityError
from pipeline.work.claims import BEATS, Claims
from pipeline.work.stop import Stop

LOOK_S = 1.0
"""How often, at least, a process without work looks for what the others have made."""


class ScanSuperseded(Exception):
    """Somebody finished a scan of this source while this process was at one: its rows are to be taken over."""


@dataclass(frozen=True)
class Rows:
    """A fragment's table, how many files its listing passed over, and the columns that were seen so far."""

    table: pa.Table
    ignored: int
    columns: tuple[str, ...] = ()


class Fragments:
    """The fragments of one source.

    Args:
        share: (this process, number of processes); each does its own share first.
        stop: asked between fragments.
    """

    def __init__(self, cache: Cache, source: str, claims: Claims, share: tuple[int, int], stop: Stop):
        self.cache, self.source, self.claims, self.share, self.stop = cache, source, claims, share, stop

    def gather(
        self, ids: list[str], make: Callable[[str], Rows], arrived: Callable[[str, Rows], None], last: int
    ) -> None:
        """Have every fragment made by somebody.

        Args:
            make: makes a fragment here.
            arrived: called once for each.
            last: the number of scan documents that this scan began with; -1 if they do not matter to it.

        Raises:
            Outdated: see there.
            Stopped: a signal asked for the end.
        """
        task, tasks = self.share
        mine = [one for one in ids if int(one[:8], 16) % tasks == task]
        own = set(mine)
        # Every process goes through the others' fragments in an order of its own, so that two seldom meet at one.
        others = sorted((one for one in ids if one not in own), key=lambda one: layout.digest(self.claims.token, one))
        waiting = [*mine, *others]
        self._forget_unread(ids)
        # One piece of work and one process: to publish it would cost more than to lose it.
        alone = tasks == 1 and len(ids) == 1
        while waiting:
            later, worked = [], False
            for one in waiting:
                self.stop.check()
                rows = self._published(one)
                if rows is None and alone:
                    rows = make(one)
                elif rows is None and self.claims.take("fragments", self.source, one) == "mine":
                    with self.claims.held("fragments", self.source, one):
                        rows = self._published(one)  # between our first look and our claim
                        if rows is None:
                            if 0 <= last < self._scans():
                                raise ScanSuperseded
                            rows = make(one)
                            self._publish(one, rows)
                    worked = True
                if rows is None:
                    later.append(one)
                else:
                    arrived(one, rows)
            waiting = later
            if waiting and not worked:
                self.stop.sleep(min(LOOK_S, self.claims.stale_s / (4 * BEATS)))

    def _forget_unread(self, ids: list[str]) -> None:
        """Remove the fragments that an earlier run left with rows that could not be read: now they may be."""
        for one in ids:
            rows = self._published(one)
            if rows is None:
                continue
            rejects = rows.table.column("reject")
            if pc.any(pc.starts_with(rejects, "unreadable")).as_py():
                self.cache.files.remove(Paths.fragment(self.source, one))

    def finish(self) -> None:
        """Remove the fragments of this source and claims to them. For when the scan document is published."""
        for folder in (Paths.fragments(self.source), Paths.claims("fragments", self.source)):
            # Documents before tables: a document without its table would look damaged.
            for name in sorted(self.cache.files.names(folder), key=lambda name: not name.endswith(".json")):
                self.cache.files.remove(f"{folder}/{name}")

    def _scans(self) -> int:
        return len(self.cache.files.numbers(Paths.scans(self.source)))

    def _published(self, one: str) -> Rows | None:
        files, name = self.cache.files, Paths.fragment(self.source, one)
        if not files.exists(name):
            return None
        try:
            body = files.document(name)
            table = f"{Paths.fragments(self.source)}/{body['table']}.arrow"
            return Rows(
                shard.from_ipc(files.content(table, body["table"]), table), body["ignored"], tuple(body["columns"])
            )
        except IntegrityError:  # damaged, or removed by one that has finished
            files.remove(name)
            return None

    def _publish(self, one: str, rows: Rows) -> None:
        files = self.cache.files
        table = files.put_content(shard.to_ipc(rows.table), Paths.fragments(self.source), "arrow")
        files.put(
            Paths.fragment(self.source, one),
            layout.seal({"table": table, "ignored": rows.ignored, "columns": list(rows.columns)}),
        )
