"""Contradictions: documents and shards that do not fit together, because a document was lost or damaged.

Price: every document is read, and the heads of the shards that no commit refers to.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from pipeline.cache import codec, copies, index, shard
from pipeline.cache.findings import BUCKET, ENCODE, Finding, named_snapshots, recipe_names
from pipeline.cache.layout import PACKED, REPAIR, Paths
from pipeline.cache.store import Cache
from pipeline.errors import CacheError


def contradictions(cache: Cache) -> Iterator[Finding]:
    """Where documents and shards contradict one another, as they do when a document was lost or damaged.

    Nothing may be removed from a cache while there is one: what a lost document referred to looks unneeded. Reads every
    document, and the heads of those shards that no commit refers to.

    A shard that no commit refers to is harmless if its unit is committed with another one (a late worker's, a crash
    before the commit) and if its bytes do not say what it is. If its unit is planned and not committed, or in no plan,
    either its document was lost or the work was never finished. Joint shards are copies of records that are elsewhere:
    they count for nothing here.
    """
    files, named = cache.files, named_snapshots(cache)
    heads = set(files.names("snapshots"))
    for name, _ in copies.documents(files):
        folder, *rest = PurePosixPath(name).with_suffix("").parts
        if folder == "snapshots" and rest[0] not in named:
            continue  # nobody needs it
        if folder == "units" and files.exists(f"segments/{rest[0]}/{rest[1]}.json"):
            continue  # the segment stands for it
        try:
            files.document(name)
        except CacheError as error:
            yield Finding(name, error.what)
    for snapshot, name in sorted(named.items()):
        if f"{snapshot}.json" not in heads:
            yield Finding(Paths.snapshot(snapshot), f"is missing, and {Paths.names(name)} refers to it", fix=BUCKET)
    if heads and not any(files.names(Paths.names(name)) for name in cache.snapshot_names()):
        yield Finding("names", "there are snapshots, and no name points to any", fix=BUCKET)
    for folder in (*map(Paths.scans, cache.sources()), *map(Paths.names, cache.snapshot_names())):
        yield from _gap(cache, folder)
    owners = {name for folder in ("plans", "units", "segments", "shards") for name in files.folders(folder)}
    known = set(recipe_names(cache))
    for owner in sorted(owners | {name.removesuffix(".json") for name in files.names("scales")} | known):
        if not owner.startswith(PACKED) and owner not in known:
            yield Finding(Paths.recipe(owner), "is missing, and there are plans, commits or shards of this recipe")
        yield from _gap(cache, Paths.plans(owner))
        if not owner.startswith(PACKED):
            yield from _unfounded(cache, owner)


def _gap(cache: Cache, folder: str) -> Iterator[Finding]:
    try:
        cache.files.numbers(folder)
    except CacheError as error:
        yield Finding(folder, error.what)


def _unfounded(cache: Cache, owner: str) -> Iterator[Finding]:
    """Commits, shards and scales of a recipe without the document that they follow from."""
    files = cache.files
    # Against the order in which they are written: what appears meanwhile is then no contradiction.
    written = [entry.name for entry in files.walk(f"shards/{owner}")]
    planned: dict[str, int] = {}
    try:
        listed = {name.removesuffix(".json") for name in files.names(f"segments/{owner}")}
        listed |= set(files.folders(f"units/{owner}"))
        commits = [(int(name), commit) for name in sorted(listed) for commit in index.commits(files, owner, int(name))]
        for plan in cache.plans(owner):
            planned.update((unit.unit, plan.number) for unit in plan.units)
    except CacheError:
        return  # the damaged document has been named already
    plans = set(planned.values())
    for number in sorted({number for number, _ in commits} - plans):
        where = Paths.numbered(Paths.plans(owner), number)
        yield Finding(where, "is missing, and there are commits of its units", recipe=owner, plan=number)
    for number, commit in commits:
        if number in plans and planned.get(commit.unit) != number:
            where = Paths.numbered(Paths.plans(owner), number)
            yield Finding(where, f"does not list unit {commit.unit}, which is committed", owner, number, commit.unit)
    shards, units = {commit.shard for _, commit in commits}, {commit.unit for _, commit in commits}
    for name in written:
        stem = PurePosixPath(name).stem
        if stem in shards:
            continue
        try:
            unit = shard.read_head(files, name)["unit"]
        except CacheError:
            continue
        number = planned.get(unit, planned.get(index.adopted_unit(owner, stem), -1))
        if unit in units or (number >= 0 and unit in index.committed(files, owner, number)):
            continue
        if number >= 0:
            what = f"unit {unit} of this shard is not committed: encode was stopped there, or its commit was lost"
            yield Finding(name, what, fix=f"{ENCODE}, or {REPAIR}")
        else:
            what = f"unit {unit} of this shard is in no plan: bucket was stopped at another cache, or a plan was lost"
            yield Finding(name, what, fix=f"{BUCKET}, or {REPAIR}")
    if shards - {None} and not files.exists(Paths.scale(owner)):
        try:
            lossy = codec.storage_of(cache.recipe(owner)) == codec.INT8
        except CacheError:
            return
        if lossy:
            yield Finding(Paths.scale(owner), "is missing, and there are records that were made with these scales")
