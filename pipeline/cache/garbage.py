"""What nothing needs any more, and its removal.

What: `unneeded` lists the files of a cache that no commit, snapshot or open plan refers to, `remove` removes them.
Why: absence of a reference proves something only in a cache that is whole, and only for a moment. So nothing is listed
while documents and shards contradict one another, and of what was listed only that is removed which is still unneeded
and old when it is looked at again.
Price: every document is read once for the list, once for every folder that files are removed from, and again whenever
`REREAD_S` have gone into removal.

Removal races with those who use a file again. They freshen it (`Files.freshen`, `Files.publish_content`) before they
publish what refers to it, a snapshot's head before they name it. The references are read again before removal from a
folder begins, the age of each file at its removal (`Files.discard`): a reference that appeared after that reading was
preceded by a freshening, so that the file is young, however many files were removed in between. Only a writer that does
not freshen (of an earlier version) depends on how old the reading is, and that is bounded in seconds. What a head
refers to is not freshened when the head is named; so heads are removed first, and what an existing head that is named
or young refers to stays. Where a writer took longer than the age between the two, or a store gives no such order, a
commit's missing shard is made again by `encode` or brought again by `bucket`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import PurePosixPath

from pipeline.cache import index, process_identity
from pipeline.cache.contradictions import contradictions
from pipeline.cache.files import STALE_TMP_S
from pipeline.cache.findings import packs, recipe_names
from pipeline.cache.layout import Paths
from pipeline.cache.store import Cache
from pipeline.errors import CacheError, IntegrityError

REREAD_S = 60.0
"""How long files are removed after one reading of the references."""

Unneeded = tuple[str, int, str]
"""A file, its size in bytes, and why nothing needs it."""

# Units before plans: what is left of a pack if this is cut short is no pack. Heads before what they refer to.
_ORDER = ("tmp", "units", "plans", "snapshots", "shards", "tables", "claims", "fragments")


def unneeded(cache: Cache, older_than_s: float = STALE_TMP_S, now: float | None = None) -> Iterator[Unneeded]:
    """Files that nothing refers to. Younger files are spared: a writer may be about to commit them.

    Every snapshot that a name points to now, every scan, every plan and every commit are spared with all they refer to.

    Args:
        older_than_s: seconds since a file was last written.
        now: the time by the store's clock; default: `Files.now`.

    Raises:
        IntegrityError: documents and shards contradict one another: what a lost document referred to looks unneeded.
    """
    found = next(contradictions(cache), None)
    if found is not None:
        raise IntegrityError(
            f"{cache.files.where(found.path)}: {found.problem}",
            expected="a whole cache",
            fix=f"{found.fix}; where work was stopped before its end: sana-pipe encode --data DIR",
        )
    before = (cache.files.now() if now is None else now) - older_than_s
    needed = _Needed(cache, before)
    for folder in _ORDER:
        for entry in cache.files.walk(folder):
            why = needed.why_not(entry.name)
            if why is not None and entry.modified <= before:
                yield entry.name, entry.size, why


def remove(
    cache: Cache,
    found: Iterable[Unneeded],
    older_than_s: float,
    now: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Unneeded]:
    """Remove files that `unneeded` listed, in its order; returns those that are gone now: the rest is needed again or
    young. clock: seconds, for `REREAD_S`."""
    before = (cache.files.now() if now is None else now) - older_than_s
    removed = []
    for _, of_folder in groupby(found, key=lambda entry: entry[0].partition("/")[0]):
        read = -math.inf
        for entry in list(of_folder):
            if clock() - read > REREAD_S:
                needed, read = _Needed(cache, before), clock()
            if needed.why_not(entry[0]) is not None and cache.files.discard(entry[0], before):
                removed.append(entry)
    return removed


class _Needed:
    """What a cache's documents refer to, as read at one moment.

    Args:
        before: a head without a name that was last written at or before this moment counts no more.
    """

    def __init__(self, cache: Cache, before: float):
        self.shards: set[str] = set()
        self.tables: set[str] = set()
        self.heads: set[str] = set()
        self.merged: set[str] = set()
        self.given_up: set[str] = set()
        forgotten = cache.forgotten_scans()
        for source in cache.sources():
            for number in cache.files.numbers(Paths.scans(source)):
                name = Paths.numbered(Paths.scans(source), number)
                if name not in forgotten:
                    self.tables.add(cache.files.document(name)["table"])
        named = {cache.snapshot_of(name) for name in cache.snapshot_names()}
        packed = self._add_heads(cache, named, before)
        for recipe in recipe_names(cache):
            if cache.files.exists(Paths.scale(recipe)):
                self.tables.add(cache.files.document(Paths.scale(recipe))["table"])
            for plan in cache.plans(recipe):
                self.tables.add(plan.table)
                segment = Paths.segment(recipe, plan.number)
                if cache.files.exists(segment):
                    self.tables.add(cache.files.document(segment)["table"])
                    self.merged.add(Paths.units(recipe, plan.number))
                self._add_commits(index.commits(cache.files, recipe, plan.number))
        for pack in packs(cache):
            plan = cache.plan(pack, 0)
            source = cache.table(plan.table).column("snapshot")[0].as_py()
            # One that no snapshot was made of yet goes on, as long as what it packs is wanted.
            if not packed.get(pack, source in named):
                self.given_up.add(pack)
                continue
            self.tables.add(plan.table)
            self._add_commits(index.commits(cache.files, pack, 0))

    def _add_heads(self, cache: Cache, named: set[str | None], before: float) -> dict[str, bool]:
        """Returns the packs that some snapshot lies in, and whether one of these counts."""
        packed: dict[str, bool] = {}
        written = {entry.name: entry.modified for entry in cache.files.walk("snapshots")}
        for name in (f"snapshots/{head}" for head in cache.files.names("snapshots")):
            snapshot_id = PurePosixPath(name).stem
            counts = snapshot_id in named or written.get(name, math.inf) > before  # inf: only its copy is there
            try:
                body = cache.files.document(name)
            except CacheError:
                if counts and snapshot_id in named:
                    raise
                continue  # nobody can read it, and nobody named it
            if "folder" in body:
                packed[body["folder"]] = packed.get(body["folder"], False) or counts
            if counts:
                self.heads.add(name)
                self.tables |= {chunk[kind] for chunk in body["chunks"] for kind in ("samples", "names")}
                self.tables |= set(body["sources"].values())
                self.shards |= {s["name"] for shards in body["shards"].values() for s in shards}
        return packed

    def _add_commits(self, commits: Iterable[index.Commit]) -> None:
        for commit in commits:
            self.shards |= {commit.shard} if commit.shard else set()
            self.tables |= {commit.table} if commit.table else set()

    def why_not(self, name: str) -> str | None:
        """Why nothing needs a file; None if something does."""
        path = PurePosixPath(name)
        folder, stem = path.parts[0], path.stem
        if folder in ("plans", "units") and path.parts[1] in self.given_up:
            return "no name points to the snapshot of this pack"
        if folder == "tmp" and not process_identity.lives(path.name):
            return "left by a writer that died"
        if folder == "shards" and stem not in self.shards:
            return "no commit or snapshot refers to this shard"
        if folder == "tables" and stem not in self.tables:
            return "nothing refers to this table"
        if folder == "claims":
            return "claimed by a worker that died"
        if folder == "fragments":
            return "of a scan that ended long ago"
        if folder == "snapshots" and name not in self.heads:
            return "no name points to this snapshot"
        return "its plan's segment stands for it" if folder == "units" and str(path.parent) in self.merged else None
