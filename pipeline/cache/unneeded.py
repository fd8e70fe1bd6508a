"""What nothing needs any more: files of a cache that no commit, snapshot or open plan refers to.

Price: every document is read once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import PurePosixPath

from pipeline.cache import index
from pipeline.cache.audit import packs, recipe_names
from pipeline.cache.files import STALE_TMP_S
from pipeline.cache.layout import Paths
from pipeline.cache.store import Cache


def unneeded(
    cache: Cache, older_than_s: float = STALE_TMP_S, now: float | None = None
) -> Iterator[tuple[str, int, str]]:
    """Files that nothing refers to: (path, bytes, why). Younger files are spared: a writer may be about to commit them.

    Every snapshot that a name points to now, every scan, every plan and every commit are spared with all they refer to.
    """
    moment = time.time() if now is None else now
    kept_shards: set[str] = set()
    kept_tables: set[str] = set()
    named = {cache.snapshot_of(name) for name in cache.snapshot_names()}
    for source in cache.sources():
        for number in cache.files.numbers(Paths.scans(source)):
            body = cache.files.document(Paths.numbered(Paths.scans(source), number))
            kept_tables.add(body["table"])
    stale_heads = []
    packed_from: dict[str, bool] = {}  # packs that some snapshot lies in; whether a named one does
    for head in cache.files.names("snapshots"):
        snapshot_id = head.removesuffix(".json")
        body = cache.files.document(f"snapshots/{head}")
        if "folder" in body:
            packed_from[body["folder"]] = packed_from.get(body["folder"], False) or snapshot_id in named
        if snapshot_id not in named:
            stale_heads.append(f"snapshots/{head}")
            continue
        kept_tables |= {chunk[kind] for chunk in body["chunks"] for kind in ("samples", "names")}
        kept_tables |= set(body["sources"].values())
        kept_shards |= {s["name"] for shards in body["shards"].values() for s in shards}
    replaced = []
    for recipe in recipe_names(cache):
        if cache.files.exists(Paths.scale(recipe)):
            kept_tables.add(cache.files.document(Paths.scale(recipe))["table"])
        for plan in cache.plans(recipe):
            kept_tables.add(plan.table)
            segment = Paths.segment(recipe, plan.number)
            if cache.files.exists(segment):
                kept_tables.add(cache.files.document(segment)["table"])
                folder = Paths.units(recipe, plan.number)
                replaced += [f"{folder}/{name}" for name in cache.files.names(folder)]
            for commit in index.commits(cache.files, recipe, plan.number):
                kept_shards |= {commit.shard} if commit.shard else set()
                kept_tables |= {commit.table} if commit.table else set()

    stale, stood_for = set(stale_heads), set(replaced)
    given_up: set[str] = set()
    for pack in packs(cache):
        plan = cache.plan(pack, 0)
        source = cache.table(plan.table).column("snapshot")[0].as_py()
        # One that no snapshot was made of yet goes on, as long as what it packs is wanted.
        if not packed_from.get(pack, source in named):
            given_up.add(pack)
            continue
        kept_tables.add(plan.table)
        for commit in index.commits(cache.files, pack, 0):
            kept_shards |= {commit.shard} if commit.shard else set()
            kept_tables |= {commit.table} if commit.table else set()

    def why(name: str) -> str | None:
        folder, stem = name.partition("/")[0], PurePosixPath(name).stem
        if folder in ("plans", "units") and name.split("/")[1] in given_up:
            return "no name points to the snapshot of this pack"
        if folder == "tmp":
            return "left by a writer that died"
        if folder == "shards" and stem not in kept_shards:
            return "no commit or snapshot refers to this shard"
        if folder == "tables" and stem not in kept_tables:
            return "nothing refers to this table"
        if folder == "claims":
            return "claimed by a worker that died"
        if folder == "fragments":
            return "of a scan that ended long ago"
        if name in stale:
            return "no name points to this snapshot"
        return "its plan's segment stands for it" if name in stood_for else None

    # Units before plans, these before tables and shards: what is left of a pack if this is cut short is no pack.
    for folder in ("tmp", "units", "plans", "shards", "tables", "claims", "fragments", "snapshots"):
        for entry in cache.files.walk(folder):
            reason = why(entry.name)
            if reason is not None and moment - entry.modified >= older_than_s:
                yield entry.name, entry.size, reason
