"""Contradictions: documents and shards that do not fit together, because a document was lost or damaged.

Price: every document is read, and the heads of the shards that no commit refers to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import PurePosixPath

from pipeline.cache import copies, index, layout, shard
from pipeline.cache.findings import BUCKET, ENCODE, Finding, damage_only, fix_of_head, named_snapshots, recipe_names
from pipeline.cache.key_columns import Digests
from pipeline.cache.layout import PACKED, REPAIR, Paths
from pipeline.cache.root import Cache, list_of
from pipeline.errors import CacheError


def contradictions(cache: Cache) -> Iterator[Finding]:
    """Where documents and shards contradict each other.

    While there is a contradiction, nothing may be removed from the cache: files that a lost document referred to look
    unneeded.

    A shard without a commit is harmless in two cases: its unit is committed with another shard (by a late worker, or
    after a crash), or its bytes are no shard. If its unit is planned and not committed, or in no plan, either a
    document was lost or the work was not finished. Joint shards are copies of records, so they do not count.
    """
    unreadable = list(_unreadable_documents(cache))
    yield from unreadable
    yield from _snapshot_contradictions(cache)
    prompts = map(Paths.prompts, cache.files.folders("prompts"))
    for folder in (*map(Paths.scans, cache.sources()), *map(Paths.names, cache.snapshot_names()), *prompts):
        yield from _gap(cache, folder)
    files, recipes = cache.files, set(recipe_names(cache))
    owners = {name for folder in ("plans", "units", "segments", "shards") for name in files.folders(folder)}
    for owner in sorted(owners | recipes):
        packed = owner.startswith(PACKED)
        if not packed and owner not in recipes:
            yield Finding(Paths.recipe(owner), "is missing, and there are plans, commits or shards of this recipe")
        gap = list(_gap(cache, Paths.plans(owner)))
        yield from gap
        plan = Paths.numbered(Paths.plans(owner), 0)
        if not packed:
            yield from _recipe_contradictions(cache, owner, reported=bool(unreadable or gap))
        elif files.unit_names(Paths.units(owner, 0)) and not files.exists(plan):
            yield Finding(plan, "is missing, and there are commits of its units")


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
            if (listed := list_of(files, name, files.document(name))) is not None:
                listed.check()
        except CacheError as error:
            yield Finding(name, damage_only(error))


def _snapshot_contradictions(cache: Cache) -> Iterator[Finding]:
    """Names without snapshots, and snapshots without any name."""
    heads = set(cache.files.names("snapshots"))
    for snapshot, name in sorted(named_snapshots(cache).items()):
        if f"{snapshot}.json" not in heads:
            problem = f"is missing, and {Paths.names(name)} refers to it"
            yield Finding(Paths.snapshot(snapshot), problem, fix=fix_of_head(name))
    if heads and not any(cache.files.names(Paths.names(name)) for name in cache.snapshot_names()):
        yield Finding("names", "there are snapshots, and no name points to any", fix=BUCKET)


def _gap(cache: Cache, folder: str) -> Iterator[Finding]:
    """A missing number in a folder of numbered documents."""
    try:
        cache.files.numbers(folder)
    except CacheError as error:
        yield Finding(folder, damage_only(error))


def _recipe_contradictions(cache: Cache, owner: str, reported: bool) -> Iterator[Finding]:
    """Commits and shards of a recipe whose document is missing. reported: whether damaged documents were."""
    files = cache.files
    # Shards are listed before commits, and commits before plans, so that work that is published meanwhile is no
    # contradiction.
    shards, others = Digests(), list[str]()
    for entry in files.walk(f"shards/{owner}"):
        stem = PurePosixPath(entry.name).stem
        shards.add(stem) if entry.name == Paths.shard(owner, stem) else others.append(entry.name)
    committed, made = dict[int, Digests](), Digests()
    try:
        numbers = {*layout.numbers_of(files.names(f"segments/{owner}"))}
        numbers |= {*layout.numbers_of(files.folders(f"units/{owner}"), "")}
        for number in sorted(numbers):
            for commit in index.each_commit(files, owner, number):
                committed.setdefault(number, Digests()).add(commit.unit)
                made.update([commit.shard] if commit.shard is not None else [])
        planned = {plan.number: Digests(unit.unit for unit in plan.units) for plan in cache.plans(owner)}
    except CacheError as error:
        damage_only(error)
        if not reported:  # by `_unreadable_documents` or `_gap`, which could read the document a moment ago
            raise
        return
    yield from _unplanned_commits(owner, committed, planned)
    others = [name for name in others if PurePosixPath(name).stem not in made]
    left = chain(others, (Paths.shard(owner, name) for name in shards if name not in made))
    yield from _uncommitted_shards(cache, owner, left, committed, planned)


UnitsOf = dict[int, Digests]
"""Number of a plan -> units."""


def _unplanned_commits(owner: str, committed: UnitsOf, planned: UnitsOf) -> Iterator[Finding]:
    """Commits whose plan is missing or does not list their unit."""
    for number in sorted(committed.keys() - planned.keys()):
        plan = Paths.numbered(Paths.plans(owner), number)
        yield Finding(plan, "is missing, and there are commits of its units", recipe=owner, plan=number)
    for number in sorted(committed.keys() & planned.keys()):
        for unit in committed[number]:
            if unit not in planned[number]:
                plan = Paths.numbered(Paths.plans(owner), number)
                yield Finding(plan, f"does not list unit {unit}, which is committed", owner, number, unit)


def _uncommitted_shards(
    cache: Cache, owner: str, shard_paths: Iterable[str], committed: UnitsOf, planned: UnitsOf
) -> Iterator[Finding]:
    """Shards without a commit, unless they are harmless (see `contradictions`)."""

    def plan_of(unit: str) -> int | None:
        return next((number for number, units in reversed(planned.items()) if unit in units), None)

    def is_committed(unit: str) -> bool:
        return any(unit in units for units in committed.values())

    def is_known(unit: str) -> bool:
        return plan_of(unit) is not None or is_committed(unit)

    for path in shard_paths:
        try:
            named = shard.read_head(cache.files, path)["unit"]
        except (shard.NotAShardError, FileNotFoundError):
            continue
        except CacheError as error:
            fix = "check the disk; if the file stays unreadable, remove it: no commit refers to it"
            yield Finding(path, damage_only(error), fix=fix)
            continue
        unit = index.unit_of(owner, PurePosixPath(path).stem, named, is_known)
        number = plan_of(unit)
        if is_committed(unit) or (number is not None and unit in index.committed(cache.files, owner, number)):
            continue
        if number is not None:
            problem = f"unit {unit} of this shard is not committed: encode was stopped there, or its commit was lost"
            yield Finding(path, problem, fix=f"{ENCODE}, or {REPAIR}")
        else:
            problem = (
                f"unit {unit} of this shard is in no plan: bucket was stopped at another cache, or a plan was lost"
            )
            yield Finding(path, problem, fix=f"{BUCKET}, or {REPAIR}")
