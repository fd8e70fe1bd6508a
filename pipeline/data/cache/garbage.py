"""Garbage: files of a cache that no commit, snapshot or open plan refers to, and their removal.

`unneeded` lists such files, `remove` removes them. Why a file that a writer uses again survives: docs/design.md.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import PurePosixPath

from sana_pipe.base import process_identity
from sana_pipe.base.disk import STALE_TMP_S
from sana_pipe.base.errors import CacheError, IntegrityError
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.contradictions import contradictions
from sana_pipe.data.cache.findings import damage_only, packs
from sana_pipe.data.cache.keys import Digests
from sana_pipe.data.cache.references import references
from sana_pipe.data.cache.snapshot_head import Head

REREAD_S = 60.0
"""Seconds for which one reading of the references serves for removals."""

Unneeded = tuple[str, int, str]
"""A file, its size in bytes, and why nothing needs it."""

# Units before plans: if removal is interrupted, the rest of a pack is not a pack. Heads before what they refer to.
_ORDER = ("tmp", "units", "plans", "snapshots", "shards", "tables", "copies/tables", "claims", "fragments")


def unneeded(cache: Cache, older_than_s: float = STALE_TMP_S, now: float | None = None) -> Iterator[Unneeded]:
    """Files that nothing refers to. Named snapshots, scans, plans and commits stay, with everything they refer to.

    Args:
        older_than_s: seconds since a file was last written; younger files stay, because a writer may be about to commit
            them.
        now: the time by the store's clock; default: `Files.now`.

    Raises:
        IntegrityError: documents and shards contradict each other (see `contradictions`).
    """
    contradiction = next(contradictions(cache), None)
    if contradiction is not None:
        raise IntegrityError(
            f"{cache.files.where(contradiction.path)}: {contradiction.problem}",
            expected="a whole cache",
            fix=f"{contradiction.fix}; if work was stopped before its end: sana-pipe encode --data DIR",
        )
    before = (cache.files.now() if now is None else now) - older_than_s
    needed = Needed(cache, before)
    for folder in _ORDER:
        for entry in cache.files.walk(folder):
            why = needed.why_unneeded(entry.name)
            if why is not None and entry.modified <= before:
                yield entry.name, entry.size, why


def remove(
    cache: Cache,
    listed: Iterable[Unneeded],
    older_than_s: float,
    now: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Unneeded]:
    """Remove files that `unneeded` listed, in its order.

    Args:
        older_than_s, now: as in `unneeded`.
        clock: seconds, for `REREAD_S`.

    Returns:
        The removed files. The others are needed again, young, or already gone.
    """
    before = (cache.files.now() if now is None else now) - older_than_s
    removed = []
    for _, of_folder in groupby(listed, key=lambda entry: entry[0].partition("/")[0]):
        read_at = -math.inf
        for entry in list(of_folder):
            if clock() - read_at > REREAD_S:
                needed, read_at = Needed(cache, before), clock()
            if needed.why_unneeded(entry[0]) is not None and cache.files.discard(entry[0], before):
                removed.append(entry)
    return removed


class Needed:
    """The names that a cache's documents refer to, as read at one moment.

    Args:
        before: a head without a name does not count if it was last written at or before this moment. A source counts as
            being scanned if one of its fragments or claims was written later.
    """

    def __init__(self, cache: Cache, before: float):
        self.shards, self.tables = Digests(), Digests()
        self.heads: set[str] = set()
        self.merged: set[str] = set()
        young = (e for top in ("claims/fragments", "fragments") for e in cache.files.walk(top) if e.modified > before)
        self.being_scanned = {PurePosixPath(entry.name.removeprefix("claims/")).parts[1] for entry in young}
        self.abandoned_packs = self._add_heads(cache, before)
        for reference in references(cache):
            folder, owner = reference.document.split("/")[:2]
            if owner in self.abandoned_packs or (folder == "snapshots" and reference.document not in self.heads):
                continue
            if folder == "segments":
                self.merged.add(reference.document.replace(folder, "units", 1).removesuffix(".json"))
            for path in reference.files:
                kind, _, name = path.partition("/")
                digest = name.rpartition("/")[2].partition(".")[0]
                (self.shards if kind == "shards" else self.tables).add(digest)

    def _add_heads(self, cache: Cache, before: float) -> set[str]:
        """Returns the packs that nothing needs. A pack is needed by its snapshots that count; a pack without a snapshot
        is unfinished, and needed while a name points to the snapshot that it packs."""
        files = cache.files
        named = {cache.snapshot_of(name) for name in cache.snapshot_names()}
        packs_in_use: dict[str | None, bool] = {}
        written = {entry.name: entry.modified for entry in files.walk("snapshots")}
        for name in (f"snapshots/{entry}" for entry in files.names("snapshots")):
            snapshot_id = PurePosixPath(name).stem
            counts = snapshot_id in named or written.get(name, math.inf) > before  # inf: only its copy exists
            try:
                folder = Head.read(files, snapshot_id).folder
            except CacheError as error:
                damage_only(error)
                if snapshot_id in named:
                    raise
                continue
            packs_in_use[folder] = packs_in_use.get(folder, False) or counts
            self.heads.update([name] if counts else [])
        for pack in packs(cache):
            if pack not in packs_in_use:
                packs_in_use[pack] = cache.table(cache.plan(pack, 0).table).column("snapshot")[0].as_py() in named
        return {pack for pack, in_use in packs_in_use.items() if pack is not None and not in_use}

    def why_unneeded(self, name: str) -> str | None:
        """Say why nothing needs a file; None if something needs it."""
        path = PurePosixPath(name.removeprefix("copies/"))
        folder, stem = path.parts[0], path.stem
        if folder in ("plans", "units") and path.parts[1] in self.abandoned_packs:
            return "no name points to the snapshot of this pack"
        if folder == "tmp" and not process_identity.is_owned_by_live_process(path.name):
            return "left by a writer that died"
        if folder == "shards" and stem not in self.shards:
            return "no commit or snapshot refers to this shard"
        if folder == "tables" and stem not in self.tables:
            return "nothing refers to this table"
        if folder == "claims":
            return "claimed by a worker that died"
        if folder == "fragments" and path.parts[1] not in self.being_scanned:
            return "left by a scan that ended long ago"
        if folder == "snapshots" and name not in self.heads:
            return "no name points to this snapshot"
        merged = folder == "units" and "/".join(path.parts[:3]) in self.merged
        return "merged into the segment of its plan" if merged else None
