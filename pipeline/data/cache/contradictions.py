"""Contradictions: documents and shards that do not fit together, because a document was lost or damaged.

Price: every document is read, and the heads of the shards that no commit refers to.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache as run_once
from pathlib import PurePosixPath

from sana_pipe.base.errors import CacheError
from sana_pipe.data.cache import copies, index, shard
from sana_pipe.data.cache.cache import Cache, list_of
from sana_pipe.data.cache.findings import (
    BACKUP,
    Finding,
    damage_only,
    encoding_names,
    fix_of_head,
    named_snapshots,
    skip_damaged,
)
from sana_pipe.data.cache.keys import Digests, fixed
from sana_pipe.data.cache.layout import BUCKET, ENCODE, PACKED, Paths
from sana_pipe.data.cache.references import owners, plan_count


def contradictions(cache: Cache) -> Iterator[Finding]:
    """Find where documents and shards contradict each other.

    While there is a contradiction, nothing may be removed from the cache: files that a lost document referred to look
    unneeded.

    A shard without a commit is harmless in three cases: its unit is committed with another shard (by a late worker, or
    after a crash), other shards have all of its records, or its bytes are no shard. Else either a document was lost or
    the work was not finished. Joint shards are copies of records, so they do not count.
    """
    unreadable = list(_unreadable_documents(cache))
    yield from unreadable
    yield from _snapshot_contradictions(cache)
    prompts = map(Paths.prompts, cache.files.folders("prompts"))
    every = (*map(Paths.scans, cache.sources()), *map(Paths.names, cache.snapshot_names()), *prompts, Paths.WITHDRAWN)
    for folder in every:
        yield from _gap(cache, folder)
    files, encodings = cache.files, set(encoding_names(cache))
    for owner in sorted({*owners(cache), *files.folders("shards"), *encodings}):
        if owner.startswith(PACKED):
            plan = Paths.numbered(Paths.plans(owner), 0)
            if files.unit_names(Paths.units(owner, 0)) and not files.exists(plan):
                yield Finding(plan, "is missing, but there are commits of its units")
            continue
        if owner not in encodings:
            problem = "is missing, but there are plans, commits or shards of this encoding"
            yield Finding(Paths.encoding(owner), problem, fix=ENCODE)
        gap = list(_gap(cache, Paths.plans(owner)))
        yield from gap
        try:
            yield from _work_contradictions(cache, owner)
        except CacheError as error:
            damage_only(error)
            if not (unreadable or gap):  # the document could be read a moment ago
                raise


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
                _ = listed.table
        except CacheError as error:
            yield Finding(name, damage_only(error))


def _snapshot_contradictions(cache: Cache) -> Iterator[Finding]:
    """Names without snapshots, and snapshots without any name."""
    heads = set(cache.files.names("snapshots"))
    for snapshot, name in sorted(named_snapshots(cache).items()):
        if f"{snapshot}.json" not in heads:
            problem = f"is missing, but {Paths.names(name)} refers to it"
            yield Finding(Paths.snapshot(snapshot), problem, fix=fix_of_head(name))
    if heads and not any(cache.files.names(Paths.names(name)) for name in cache.snapshot_names()):
        yield Finding("names", "there are snapshots, but no name points to any of them", fix=BUCKET)


def _gap(cache: Cache, folder: str) -> Iterator[Finding]:
    """A missing number in a folder of numbered documents."""
    try:
        cache.files.numbers(folder)
    except CacheError as error:
        yield Finding(folder, damage_only(error))


def _work_contradictions(cache: Cache, owner: str) -> Iterator[Finding]:
    """Commits that no plan lists, and shards without a commit that are not harmless.

    Raises:
        CacheError: a document is damaged, or a plan is missing between others.
    """
    files = cache.files
    # Shards are listed before commits, and commits before plans, so that work that is published meanwhile is no
    # contradiction.
    shards, others = Digests(), list[str]()
    for name in files.names_below(f"shards/{owner}"):
        stem = PurePosixPath(name).stem
        shards.add(stem) if name == Paths.shard(owner, stem) else others.append(name)
    committed, made = dict[int, Digests](), Digests()
    for number in range(plan_count(cache, owner)):
        for commit in index.each_commit(files, owner, number):
            committed.setdefault(number, Digests()).add(commit.unit)
            made.update([commit.shard] if commit.shard is not None else [])
    planned = {plan.number: Digests(unit.unit for unit in plan.units) for plan in cache.plans(owner)}
    for number, units in sorted(committed.items()):
        plan = Paths.numbered(Paths.plans(owner), number)
        if number not in planned:
            yield Finding(plan, "is missing, but there are commits of its units", owner, number)
        elif (unit := next((unit for unit in units if unit not in planned[number]), None)) is not None:
            yield Finding(plan, f"does not list unit {unit}, which is committed", owner, number, unit, fix=BACKUP)
    uncommitted = [name for name in others if PurePosixPath(name).stem not in made]
    uncommitted += [Paths.shard(owner, name) for name in shards if name not in made]
    if uncommitted:
        yield from _uncommitted(cache, owner, uncommitted, planned, committed)


def _uncommitted(
    cache: Cache, owner: str, paths: list[str], planned: dict[int, Digests], committed: dict[int, Digests]
) -> Iterator[Finding]:
    """Shards without a commit that are not harmless.

    Args:
        planned, committed: number of a plan -> its units.
    """

    @run_once
    def records() -> index.RecordIndex:
        return cache.index(owner)

    def is_spare(path: str) -> bool:
        """Return whether other shards have every record of a shard."""
        with skip_damaged():
            keys = fixed(shard.read_table(cache.files, path).column("key"))
            return bool(records().present(keys).all())
        return False

    def is_listed(unit: str, by: dict[int, Digests]) -> bool:
        return any(unit in units for units in by.values())

    for path in paths:
        try:
            named, digest = shard.read_head(cache.files, path)["unit"], PurePosixPath(path).stem
        except (shard.NotAShardError, FileNotFoundError):
            continue
        except CacheError as error:
            fix = "check the disk; if the file stays unreadable, remove it: no commit refers to it"
            yield Finding(path, damage_only(error), fix=fix)
            continue
        adopted = index.adopted_unit(owner, digest)  # its unit here, if it is another cache's
        unit = adopted if is_listed(adopted, planned) or is_listed(adopted, committed) else named
        plans = [number for number, units in planned.items() if unit in units]
        meanwhile = (unit in index.committed(cache.files, owner, number) for number in plans)
        if is_listed(unit, committed) or any(meanwhile) or (not plans and is_spare(path)):
            continue
        problem = "is not committed" if plans else "is in no plan, and other shards lack records of it"
        because = f"encode or bucket was stopped there, or a {'commit' if plans else 'plan'} was lost"
        yield Finding(path, f"unit {unit} of this shard {problem}: {because}", fix=f"{ENCODE}, or {BUCKET} as before")
