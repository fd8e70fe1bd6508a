"""Fragments: pieces of a running scan, so that processes share it and a killed process loses little of it.

`Fragments.gather` gives every process the rows of all fragments; each fragment is read by the process that claims it
(see `pipeline.work.engine`). A fragment is a document `fragments/<source>/<id>.json` beside the table that it names.
The id is a digest of everything that decides the rows. So a fragment of a file that has changed since is not used.
Why documents and not messages: processes need not know of one another. A process that starts later finds the documents,
and a killed process has lost only its fragment in hand.
Price: two small files per fragment, and two syncs for its claim. An idle process waits for the living owners of the
rest, because it needs their rows. A stopped owner is overtaken after `Claims.stale_s`; its fragment in hand is read
twice. `finish` removes all fragments of the source at the end of the command, when the other processes have long had
their rows; a process that slept until then starts again from the scan document that exists by then.

A damaged fragment is made again, so `verify` does not look at fragments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.cache import layout, shard
from pipeline.cache.layout import Paths
from pipeline.cache.root import Cache
from pipeline.errors import IntegrityError
from pipeline.work.engine import Job, Worker

POLL_S = 1.0
"""How often, at least, an idle process looks for fragments that the others have made."""


class ScanSuperseded(Exception):
    """Another process finished a scan of this source first; use its rows."""


@dataclass(frozen=True)
class Rows:
    """A fragment's table, how many files its listing skipped, and the caption columns that it has."""

    table: pa.Table
    ignored: int
    columns: tuple[str, ...] = ()


class Fragments:
    """The fragments of one source."""

    def __init__(self, cache: Cache, source: str, worker: Worker):
        self.cache, self.source, self.worker = cache, source, worker

    def gather(
        self, ids: list[str], make: Callable[[str], Rows], arrived: Callable[[str, Rows], None], scans: int
    ) -> None:
        """Have every fragment made by some process.

        Args:
            make: makes a fragment here.
            arrived: called once for each fragment.
            scans: the number of scan documents when this scan began; -1 if they do not matter to it.

        Raises:
            ScanSuperseded: another process finished its scan meanwhile.
            Stopped: a signal asked for the end.
        """
        self._remove_unreadable(ids)
        if self.worker.tasks == 1 and len(ids) == 1:  # publishing it would cost more than losing it
            [fragment] = ids
            self.worker.stop.check()
            arrived(fragment, self.published(fragment) or make(fragment))
            return
        self.worker.run(_Gathering(self, make, arrived, scans), ids, str, POLL_S)

    def published(self, fragment: str) -> Rows | None:
        """The rows of a fragment that some process has made."""
        files, name = self.cache.files, Paths.fragment(self.source, fragment)
        if not files.exists(name):
            return None
        try:
            body = files.document(name)
            table = f"{Paths.fragments(self.source)}/{body['table']}.arrow"
            content = shard.from_ipc(files.content(table, body["table"]), table)
            return Rows(content, body["ignored"], tuple(body["columns"]))
        except IntegrityError:  # damaged, or removed by a process that has finished
            files.remove(name)
            return None

    def publish(self, fragment: str, rows: Rows) -> None:
        files = self.cache.files
        table = files.put_content(shard.to_ipc(rows.table), Paths.fragments(self.source), "arrow")
        body = {"table": table, "ignored": rows.ignored, "columns": list(rows.columns)}
        files.put(Paths.fragment(self.source, fragment), layout.seal(body))

    def finish(self) -> None:
        """Remove the fragments of this source and their claims. Call it when the scan document is published."""
        for folder in (Paths.fragments(self.source), Paths.claims("fragments", self.source)):
            # Documents before tables: a document without its table would look damaged.
            for name in sorted(self.cache.files.names(folder), key=lambda name: not name.endswith(".json")):
                self.cache.files.remove(f"{folder}/{name}")

    def _remove_unreadable(self, ids: list[str]) -> None:
        """Remove fragments of an earlier run that have unreadable rows: the files may be readable now."""
        for fragment in ids:
            rows = self.published(fragment)
            if rows is None:
                continue
            rejects = rows.table.column("reject")
            if pc.any(pc.starts_with(rejects, "unreadable")).as_py():
                self.cache.files.remove(Paths.fragment(self.source, fragment))


@dataclass(frozen=True)
class _Gathering(Job[str]):
    """See `Fragments.gather`."""

    fragments: Fragments
    make_rows: Callable[[str], Rows]
    arrived: Callable[[str, Rows], None]
    scans: int

    def claim(self, item: str) -> tuple[str | int, ...]:
        return "fragments", self.fragments.source, item

    def collect(self, item: str) -> bool:
        rows = self.fragments.published(item)
        if rows is not None:
            self.arrived(item, rows)
        return rows is not None

    def make(self, item: str) -> None:
        documents = self.fragments.cache.files.numbers(Paths.scans(self.fragments.source))
        if 0 <= self.scans < len(documents):
            raise ScanSuperseded
        rows = self.make_rows(item)
        self.fragments.publish(item, rows)
        self.arrived(item, rows)
