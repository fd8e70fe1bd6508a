"""Fragments of a running scan: processes share it, and a killed process loses only its fragment in hand.

A fragment is a document `fragments/<source>/<id>.json` next to the table that it names. The id is a digest of all that
decides the rows, so a fragment of a file that has changed since is not used; a damaged one is made again. Documents and
not messages, so that processes need not know of one another and one that starts later finds them.
Price: two small files per fragment, and two syncs for its claim; an idle process waits for the owners of the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sana_pipe.base.errors import CacheError, IntegrityError, UserError
from sana_pipe.data.cache import layout, shard
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.sources.reject_kinds import Kinds
from sana_pipe.data.work.engine import Job, Worker

POLL_S = 1.0
"""The longest pause of an idle process before it looks for fragments that the others have made."""

_PLANNED = "planned-"


class ScanSuperseded(Exception):
    """Another process finished a scan of this source first; use its rows."""


@dataclass(frozen=True)
class Rows:
    """A fragment's table, what its listing skipped, and the caption columns that it has."""

    table: pa.Table
    ignored: Kinds
    columns: tuple[str, ...] = ()


class Fragments:
    """The fragments of one source."""

    def __init__(self, cache: Cache, source: str, worker: Worker):
        self.cache, self.source, self.worker = cache, source, worker
        self._folders = (Paths.fragments(source), Paths.claims("fragments", source))
        self._before = {f"{folder}/{name}" for folder in self._folders for name in cache.files.names(folder)}

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

    def help(self, ids: list[str], make: Callable[[str], Rows], arrived: Callable[[int], None], scans: int) -> None:
        """Work as `gather` does, for a process that does not need the rows. arrived: called with the number of rows of
        fragments that others have made."""
        self._remove_unreadable(ids)
        self.worker.run(_Helping(self, make, lambda fragment, rows: None, scans, arrived), ids, str, POLL_S)

    def once(
        self, identity: str, make: Callable[[], dict[str, Any]], help: Callable[[], None], scans: int
    ) -> dict[str, Any]:
        """Have one process compute a result, which all of them return: its document stays next to the fragments. A
        document of an earlier launch is not used; a process that begins after the result was published computes it
        again.

        Args:
            identity: a digest of all that decides the result.
            make: computes it: JSON values by name.
            help: called once by a process that waits for the result.
            scans: as in `gather`.

        Raises:
            UserError: that of `make`, in every process; a CacheError (files, space, no answer) is one process's.
            ScanSuperseded, Stopped: as in `gather`.
        """
        job = _Planning(self, make, help, scans)
        earlier = Paths.fragment(self.source, _PLANNED).removesuffix(".json")
        item = layout.digest(identity, *sorted(name for name in self._before if name.startswith(earlier))).hex()
        self.worker.run(job, [item], str, POLL_S)
        error = job.result.get("error")
        if error is not None:
            raise UserError.of(error)
        return job.result

    def document(self, name: str) -> dict[str, Any] | None:
        """A fragment, or a result of `once`; None if it is not there, or damaged and therefore removed."""
        files, path = self.cache.files, Paths.fragment(self.source, name)
        if not files.exists(path):
            return None
        try:
            return files.document(path)
        except IntegrityError:  # damaged, or removed by a process that has finished
            files.remove(path)
            return None

    def published(self, fragment: str) -> Rows | None:
        """The rows of a fragment that some process has made."""
        files, body = self.cache.files, self.document(fragment)
        if body is None:
            return None
        try:
            table = f"{Paths.fragments(self.source)}/{body['table']}.arrow"
            content = shard.from_ipc(files.mapped(table, body["table"]), table)
            return Rows(content, Kinds(**body["ignored"]), tuple(body["columns"]))
        except IntegrityError:  # as above
            files.remove(Paths.fragment(self.source, fragment))
            return None

    def publish(self, fragment: str, rows: Rows) -> None:
        files = self.cache.files
        table = files.put_content(shard.to_ipc(rows.table), Paths.fragments(self.source), "arrow")
        unreadable = pc.any(pc.starts_with(rows.table.column("reject"), "unreadable")).as_py()
        body = {"table": table, "ignored": vars(rows.ignored), "columns": list(rows.columns)}
        counts = {"rows": len(rows.table), "unreadable": bool(unreadable)}
        files.put(Paths.fragment(self.source, fragment), layout.seal(body | counts))

    def finish(self) -> None:
        """Remove the fragments of this source and their claims. Call it when the scan document is published.

        What `once` has published in this launch stays until the next one, since others may not have read it yet.
        """
        for folder in self._folders:
            # Documents before tables: a document without its table would look damaged.
            for name in sorted(self.cache.files.names(folder), key=lambda name: not name.endswith(".json")):
                if not name.startswith(_PLANNED) or f"{folder}/{name}" in self._before:
                    self.cache.files.remove(f"{folder}/{name}")

    def check_current(self, scans: int) -> None:
        """Raise `ScanSuperseded` if there are more than so many scan documents; -1: never."""
        if 0 <= scans < len(self.cache.files.numbers(Paths.scans(self.source))):
            raise ScanSuperseded

    def _remove_unreadable(self, ids: list[str]) -> None:
        """Remove fragments of an earlier run that have unreadable rows: the files may be readable now."""
        for fragment in ids:
            if (path := Paths.fragment(self.source, fragment)) not in self._before:
                continue
            body = self.document(fragment)
            if body is not None and body["unreadable"]:
                self.cache.files.remove(path)


@dataclass(frozen=True)
class _Gathering(Job[str]):
    """See `Fragments.gather`."""

    fragments: Fragments
    make_rows: Callable[[str], Rows]
    arrived: Callable[[str, Rows], None]
    scans: int

    def claim_key(self, item: str) -> tuple[str | int, ...]:
        return "fragments", self.fragments.source, item

    def collect(self, item: str) -> bool:
        rows = self.fragments.published(item)
        if rows is not None:
            self.arrived(item, rows)
        return rows is not None

    def make(self, item: str) -> None:
        self.fragments.check_current(self.scans)
        rows = self.make_rows(item)
        self.fragments.publish(item, rows)
        self.arrived(item, rows)


@dataclass(frozen=True)
class _Helping(_Gathering):
    """See `Fragments.help`."""

    made_elsewhere: Callable[[int], None]

    def collect(self, item: str) -> bool:
        body = self.fragments.document(item)
        if body is not None:
            self.made_elsewhere(body["rows"])
        return body is not None


class _Planning(Job[str]):
    """See `Fragments.once`."""

    def __init__(self, fragments: Fragments, make: Callable[[], dict[str, Any]], help: Callable[[], None], scans: int):
        self.fragments, self.scans = fragments, scans
        self.make_result, self.help = make, help
        self.result: dict[str, Any] = {}
        self._helped = False

    def claim_key(self, item: str) -> tuple[str | int, ...]:
        return "fragments", self.fragments.source, _PLANNED + item

    def collect(self, item: str) -> bool:
        body = self.fragments.document(_PLANNED + item)
        self.result = body or {}
        return body is not None

    def make(self, item: str) -> None:
        self.fragments.check_current(self.scans)
        try:
            self.result = self.make_result()
        except CacheError:  # of files: another machine may do better
            raise
        except UserError as error:
            self._publish(item, {"error": error.fields()})
            raise
        self._publish(item, self.result)

    def idle(self) -> bool:
        helped, self._helped = self._helped, True
        if not helped:
            self.help()
        return not helped

    def _publish(self, item: str, body: dict[str, Any]) -> None:
        self.fragments.cache.files.put(Paths.fragment(self.fragments.source, _PLANNED + item), layout.seal(body))
