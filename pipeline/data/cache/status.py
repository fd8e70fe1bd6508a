"""Status: what a cache holds and what is missing, without reading records.

Price: on a disk each document is read, and the size of each file that a named snapshot needs is asked for. In an object
store one listing says all sizes and what has changed (`cache.listed`). The table of a scan is read only if the document
of the scan does not count its items.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from sana_pipe.base.errors import CacheError
from sana_pipe.base.urls import strip_credentials
from sana_pipe.data.cache import index, prompts
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.findings import damage_only, encoding_names, packs
from sana_pipe.data.cache.keys import Digests
from sana_pipe.data.cache.layout import REPAIR, Paths
from sana_pipe.data.cache.listed import ListedFiles, listed
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.cache.snapshot_head import check_files, check_sizes

STOPPED_S = 3600
"""Age of a claim at which its process has stopped; much longer than clocks of two machines differ."""


def status(cache: Cache, now: float | None = None) -> dict[str, Any]:
    """Counts of a cache, while or after it is filled: JSON values.

    `damaged` gives the `problem` and the `fix` of each document or
    snapshot that is unreadable or incomplete; the counts leave it out. `tasks` says how far each process is that makes
    records now, as in its claim (`Progress.brief` and the counts of stores), with `silent_s`, the seconds since its
    last beat.
    """
    view = listed(cache)
    report = _counted(view, time.time() if now is None else now)
    if isinstance(view.files, ListedFiles):
        view.files.keep()
    return report


def join(cache: Cache) -> None:
    """Publish what `status` reads as one object, if the cache is in an object store and no plan is being worked on: the
    first `status` of any machine then needs few requests. Commands that change a cache end with it."""
    with suppress(CacheError):  # the command has done its work; `status` names what is damaged
        view = listed(cache)
        if isinstance(view.files, ListedFiles):
            names = [*encoding_names(view), *packs(view)]
            plans = ((name, number) for name in names for number in view.files.numbers(Paths.plans(name)))
            if all(view.files.exists(Paths.segment(*plan)) for plan in plans):
                _counted(view, time.time())
                view.files.keep()
                view.files.join()


def _counted(cache: Cache, now: float) -> dict[str, Any]:
    """The result of `status`."""
    counts = _Counts(cache, now)
    stores = counts.stores()
    sources, scanning = counts.sources(stores)
    names, packed = counts.snapshots()
    sets = counts.prompts()
    damaged = counts.damaged | {name: {"problem": why, "fix": REPAIR} for name, why in cache.files.damage.items()}
    complete = not scanning and not damaged and all(s["units"] == s["units_done"] for s in stores.values())
    return {
        "cache": cache.location,
        "complete": complete,
        "stores": stores,
        "sources": sources,
        "snapshots": names,
        "packed": packed,
        "prompts": sets,
        "tasks": counts.tasks(),
        "damaged": damaged,
        "free_bytes": cache.files.free_bytes(),
    }


class _Counts:
    """Counts the parts of a cache. damaged: filled by the methods."""

    def __init__(self, cache: Cache, now: float):
        self.cache, self.now = cache, now
        self.damaged: dict[str, dict[str, str]] = {}

    @contextmanager
    def _readable(self, what: str) -> Iterator[None]:
        try:
            yield
        except CacheError as error:
            self.damaged[what] = {"problem": damage_only(error), "fix": error.fix or REPAIR}

    def stores(self) -> dict[str, dict[str, Any]]:
        """Count records by encoding or pack."""
        stores = {}
        for name in [*encoding_names(self.cache), *packs(self.cache)]:
            with self._readable(Paths.plans(name)):
                stores[name] = self._store(name)
        return stores

    def _store(self, name: str) -> dict[str, Any]:
        files, plans = self.cache.files, self.cache.plans(name)
        units = done = planned = made = size = rejects = 0
        for plan in plans:
            finished = files.exists(Paths.segment(name, plan.number))
            counts = {} if finished else {unit.unit: unit.count for unit in plan.units}
            units += len(plan.units)
            planned += sum(counts.values())
            for commit in index.each_commit(files, name, plan.number):
                done += 1
                made += commit.records
                size += commit.bytes
                rejects += len(commit.rejects)
                planned -= counts.get(commit.unit, 0)
        return {
            "plans": len(plans),
            "units": units,
            "units_done": done,
            "records": made,
            "records_missing": planned,
            "bytes": size,
            "rejects": rejects,
        }

    def sources(self, stores: dict[str, dict[str, Any]]) -> tuple[dict[str, dict[str, Any]], bool]:
        """Count items by name; and say whether some source is still being scanned or planned."""
        sources: dict[str, dict[str, Any]] = {}
        scanning = any("/planned-" not in name for name in self.cache.files.names_below("fragments"))
        for name in self.cache.sources():
            with self._readable(Paths.scans(name)):
                scan = self.cache.last_scan(name)
                if scan is None:
                    continue
                check_sizes(self.cache.files, [(Paths.table(scan["table"], "parquet"), None)])
                counts = scan.get("counts") or self._counted(scan["table"])
                usable = counts["items"] - counts["rejected"]
                planned = all(stores.get(encoding, {}).get("plans") for encoding in scan["encodings"].values())
                scanning |= usable > 0 and not planned
                sources[name] = {
                    **counts,
                    "root": strip_credentials(scan["root"]),
                    "encodings": scan["encodings"],
                }
        return sources, scanning

    def _counted(self, table: str) -> dict[str, int]:
        """Count the rows of a scan's table, of which a takedown took some."""
        items, usable = self.cache.nulls(table, "reject")
        return {"items": items, "rejected": items - usable}

    def tasks(self) -> list[dict[str, Any]]:
        """Return what the claims of units say of the processes that hold them, by node and task."""
        newest: dict[str, dict[str, Any]] = {}
        for entry in self.cache.files.walk("claims"):
            silent_s = max(0.0, self.now - entry.modified)
            if silent_s >= STOPPED_S:
                continue
            with suppress(CacheError, ValueError, AttributeError):  # removed meanwhile, or not of this program
                claim = json.loads(self.cache.files.read(entry.name))
                if progress := claim.get("progress"):
                    newest[str(claim.get("owner"))] = {**progress, "silent_s": silent_s}
        return sorted(newest.values(), key=lambda task: (str(task.get("node")), str(task.get("task"))))

    def prompts(self) -> dict[str, dict[str, Any]]:
        """The newest prompt set by name."""
        sets: dict[str, dict[str, Any]] = {}
        for name in self.cache.files.folders("prompts"):
            with self._readable(Paths.prompts(name)):
                newest = prompts.newest(self.cache, name)
                if newest is not None:
                    sets[name] = {"id": newest.id, "prompts": len(newest), "text": newest.encoding.name}
        return sets

    def snapshots(self) -> tuple[dict[str, str | None], list[str]]:
        """Name -> snapshot id; and the names of packed snapshots."""
        names: dict[str, str | None] = {}
        packed: list[str] = []
        intact = Digests()
        for name in self.cache.snapshot_names():
            with self._readable(Paths.names(name)):
                names[name] = snapshot_id = self.cache.snapshot_of(name)
                if snapshot_id is not None:
                    snapshot = Snapshot(self.cache.files, snapshot_id)
                    packed.extend([name] * snapshot.packed)
                    check_files(self.cache.files, snapshot.head, intact)
        return names, packed
