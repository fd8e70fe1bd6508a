"""Contradictions: documents and shards that do not fit together, because a document was lost or damaged.

Price: every document is read, and the heads of the shards that no commit refers to.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from pipeline.cache import codec, copies, index, shard
from pipeline.cache.findings import BUCKET, ENCODE, Finding, named_snapshots, recipe_names
from pipeline.cache.layout import PACKED, REPAIR, Paths
from pipeline.cache.root import Cache
from pipeline.errors import CacheError


def contradictions(cache: Cache) -> Iterator[Finding]:
    """Where documents and shards contradict each other.

    While there is a contradiction, nothing may be removed from the cache: files that a lost document referred to look
    unneeded.

    A shard without a commit is harmless in two cases: its unit is committed with another shard (by a late worker, or
    after a crash), or its head is unreadable. If its unit is planned and not committed, or in no plan, either a
    document was lost or the work was not finished. Joint shards are copies of records, so they do not count.
    """
    yield from _unreadable_documents(cache)
    yield from _snapshot_contradictions(cache)
    prompts = map(Paths.prompts, cache.files.folders("prompts"))
    for folder in (*map(Paths.scans, cache.sources()), *map(Paths.names, cache.snapshot_names()), *prompts):
        yield from _gap(cache, folder)
    files, recipes = cache.files, set(recipe_names(cache))
    owners = {name for folder in ("plans", "units", "segments", "shards") for name in files.folders(folder)}
    for owner in sorted(owners | {name.removesuffix(".json") for name in files.names("scales")} | recipes):
        packed = owner.startswith(PACKED)
        if not packed and owner not in recipes:
            yield Finding(Paths.recipe(owner), "is missing, and there are plans, commits or shards of this recipe")
        yield from _gap(cache, Paths.plans(owner))
        if not packed:
            yield from _recipe_contradictions(cache, owner)


def _unreadable_documents(cache: Cache) -> Iterator[Finding]:
    """Documents that are unreadable and needed: no unnamed snapshot, and no commit that is in a segment."""
    files, named = cache.files, named_snapshots(cache)
    for name, _ in copies.documents(files):
        folder, *rest = PurePosixPath(name).with_suffix("").parts
        if folder == "snapshots" and rest[0] not in named:
            continue
        if folder == "units" and files.exists(f"segments/{rest[0]}/{rest[1]}.json"):
            continue
        try:
            files.document(name)
        except CacheError as error:
            yield Finding(name, error.what)


def _snapshot_contradictions(cache: Cache) -> Iterator[Finding]:
    """Names without snapshots, and snapshots without any name."""
    heads = set(cache.files.names("snapshots"))
    for snapshot, name in sorted(named_snapshots(cache).items()):
        if f"{snapshot}.json" not in heads:
            yield Finding(Paths.snapshot(snapshot), f"is missing, and {Paths.names(name)} refers to it", fix=BUCKET)
    if heads and not any(cache.files.names(Paths.names(name)) for name in cache.snapshot_names()):
        yield Finding("names", "there are snapshots, and no name points to any", fix=BUCKET)


def _gap(cache: Cache, folder: str) -> Iterator[Finding]:
    """A missing number in a folder of numbered documents."""
    try:
        cache.files.numbers(folder)
    except CacheError as error:
        yield Finding(folder, error.what)


def _recipe_contradictions(cache: Cache, owner: str) -> Iterator[Finding]:
    """Commits, shards and scales of a recipe whose document is missing."""
    files = cache.files
    # Shards are listed before commits, and commits before plans, so that work that is published meanwhile is no
    # contradiction.
    shard_paths = [entry.name for entry in files.walk(f"shards/{owner}")]
    try:
        numbers = {name.removesuffix(".json") for name in files.names(f"segments/{owner}")}
        numbers |= set(files.folders(f"units/{owner}"))
        commits = [(int(name), commit) for name in sorted(numbers) for commit in index.commits(files, owner, int(name))]
        planned = {unit.unit: plan.number for plan in cache.plans(owner) for unit in plan.units}
    except CacheError:
        return  # `_unreadable_documents` or `_gap` reports it
    yield from _unplanned_commits(owner, commits, planned)
    committed = [commit for _, commit in commits]
    yield from _uncommitted_shards(cache, owner, shard_paths, committed, planned)
    yield from _missing_scale(cache, owner, committed)


def _unplanned_commits(
    owner: str, commits: list[tuple[int, index.Commit]], planned: dict[str, int]
) -> Iterator[Finding]:
    """Commits whose plan is missing or does not list their unit.

    Args:
        commits: (plan number, commit).
        planned: unit -> number of its plan.
    """
    plans = set(planned.values())
    for number in sorted({number for number, _ in commits} - plans):
        plan = Paths.numbered(Paths.plans(owner), number)
        yield Finding(plan, "is missing, and there are commits of its units", recipe=owner, plan=number)
    for number, commit in commits:
        if number in plans and planned.get(commit.unit) != number:
            plan = Paths.numbered(Paths.plans(owner), number)
            yield Finding(plan, f"does not list unit {commit.unit}, which is committed", owner, number, commit.unit)


def _uncommitted_shards(
    cache: Cache, owner: str, shard_paths: list[str], commits: list[index.Commit], planned: dict[str, int]
) -> Iterator[Finding]:
    """Shards without a commit, unless they are harmless (see `contradictions`). planned: unit -> number of its plan."""
    shards, units = {commit.shard for commit in commits}, {commit.unit for commit in commits}
    for path in shard_paths:
        digest = PurePosixPath(path).stem
        if digest in shards:
            continue
        try:
            unit = shard.read_head(cache.files, path)["unit"]
        except CacheError:
            continue
        number = planned.get(unit, planned.get(index.adopted_unit(owner, digest), -1))
        if unit in units or (number >= 0 and unit in index.committed(cache.files, owner, number)):
            continue
        if number >= 0:
            problem = f"unit {unit} of this shard is not committed: encode was stopped there, or its commit was lost"
            yield Finding(path, problem, fix=f"{ENCODE}, or {REPAIR}")
        else:
            problem = (
                f"unit {unit} of this shard is in no plan: bucket was stopped at another cache, or a plan was lost"
            )
            yield Finding(path, problem, fix=f"{BUCKET}, or {REPAIR}")


def _missing_scale(cache: Cache, owner: str, commits: list[index.Commit]) -> Iterator[Finding]:
    """Missing channel scales of an int8 recipe with records."""
    if cache.files.exists(Paths.scale(owner)) or all(commit.shard is None for commit in commits):
        return
    try:
        int8 = codec.storage_of(cache.recipe(owner)) == codec.INT8
    except CacheError:
        return
    if int8:
        yield Finding(Paths.scale(owner), "is missing, and there are records that were made with these scales")
