"""Contradictions: documents and shards that do not fit together, because a document was lost or damaged.

Price: every document is read, and the heads of the shards that no commit refers to.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from pipeline.cache import copies, index, shard
from pipeline.cache.cache import Cache, list_of
from pipeline.cache.findings import BUCKET, ENCODE, Finding, damage_only, fix_of_head, named_snapshots, recipe_names
from pipeline.cache.keys import Digests
from pipeline.cache.layout import PACKED, REPAIR, Paths
from pipeline.cache.references import owners, plan_count
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
    for owner in sorted({*owners(cache), *files.folders("shards"), *recipes}):
        if owner.startswith(PACKED):
            plan = Paths.numbered(Paths.plans(owner), 0)
            if files.unit_names(Paths.units(owner, 0)) and not files.exists(plan):
                yield Finding(plan, "is missing, and there are commits of its units")
            continue
        if owner not in recipes:
            yield Finding(Paths.recipe(owner), "is missing, and there are plans, commits or shards of this recipe")
        gap = list(_gap(cache, Paths.plans(owner)))
        yield from gap
        try:
            work = Work(cache, owner)
        except CacheError as error:
            damage_only(error)
            if not (unreadable or gap):  # the document could be read a moment ago
                raise
            continue
        yield from _work_contradictions(work)


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


class Work:
    """Units and shards of a recipe or pack.

    Attributes:
        planned, committed: number of a plan -> its units.
        uncommitted: paths of shards that no commit names.

    Raises:
        CacheError: a document is damaged, or a plan is missing between others.
    """

    def __init__(self, cache: Cache, owner: str):
        self.cache, self.owner, files = cache, owner, cache.files
        # Shards are listed before commits, and commits before plans, so that work that is published meanwhile is no
        # contradiction.
        shards, others = Digests(), list[str]()
        for entry in files.walk(f"shards/{owner}"):
            stem = PurePosixPath(entry.name).stem
            shards.add(stem) if entry.name == Paths.shard(owner, stem) else others.append(entry.name)
        self.committed, made = dict[int, Digests](), Digests()
        for number in range(plan_count(cache, owner)):
            for commit in index.each_commit(files, owner, number):
                self.committed.setdefault(number, Digests()).add(commit.unit)
                made.update([commit.shard] if commit.shard is not None else [])
        self.planned = {plan.number: Digests(unit.unit for unit in plan.units) for plan in cache.plans(owner)}
        self.uncommitted = [name for name in others if PurePosixPath(name).stem not in made]
        self.uncommitted += [Paths.shard(owner, name) for name in shards if name not in made]

    def unlisted(self, number: int) -> str | None:
        """A committed unit of a plan that the plan does not list; None if there is none."""
        return next((unit for unit in self.committed.get(number, ()) if unit not in self.planned[number]), None)

    def unit_of(self, path: str) -> tuple[str, int | None] | None:
        """The unit of a shard that no commit names, and the number of the plan that lists it.

        Returns:
            None if the shard is harmless: its unit is committed with another shard, or its bytes are no shard.

        Raises:
            CacheError: the shard cannot be read.
        """
        try:
            named = shard.read_head(self.cache.files, path)["unit"]
        except (shard.NotAShardError, FileNotFoundError):
            return None
        unit = index.unit_of(
            self.owner,
            PurePosixPath(path).stem,
            named,
            lambda unit: self._plan_of(unit) is not None or self._is_committed(unit),
        )
        number = self._plan_of(unit)
        if self._is_committed(unit):
            return None
        if number is not None and unit in index.committed(self.cache.files, self.owner, number):  # meanwhile
            return None
        return unit, number

    def _plan_of(self, unit: str) -> int | None:
        return next((number for number, units in reversed(self.planned.items()) if unit in units), None)

    def _is_committed(self, unit: str) -> bool:
        return any(unit in units for units in self.committed.values())


def _work_contradictions(work: Work) -> Iterator[Finding]:
    """Commits that no plan lists, and shards without a commit that are not harmless."""
    for number in sorted(work.committed):
        plan = Paths.numbered(Paths.plans(work.owner), number)
        if number not in work.planned:
            yield Finding(plan, "is missing, and there are commits of its units", work.owner, number)
        elif (unit := work.unlisted(number)) is not None:
            yield Finding(plan, f"does not list unit {unit}, which is committed", work.owner, number, unit)
    for path in work.uncommitted:
        try:
            needed = work.unit_of(path)
        except CacheError as error:
            fix = "check the disk; if the file stays unreadable, remove it: no commit refers to it"
            yield Finding(path, damage_only(error), fix=fix)
            continue
        if needed is not None and needed[1] is not None:
            problem = "is not committed: encode was stopped there, or its commit was lost"
            yield Finding(path, f"unit {needed[0]} of this shard {problem}", fix=f"{ENCODE}, or {REPAIR}")
        elif needed is not None:
            problem = "is in no plan: bucket was stopped at another cache, or a plan was lost"
            yield Finding(path, f"unit {needed[0]} of this shard {problem}", fix=f"{BUCKET}, or {REPAIR}")
