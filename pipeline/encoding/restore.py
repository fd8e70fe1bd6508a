"""Restore: repairs documents that were lost or damaged.

A document is restored from its copy. What is damaged together with its copy is moved to `damaged/`, and other files
stand in for it. An intact shard without a commit is committed again: to the unit that its head names if that is
planned, else to a new plan. Commits whose plan is lost get a plan that lists them. A recipe is read from a snapshot's
head; a scan, a name or a prompt set that is not the last from its successor.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import PurePosixPath

from pipeline.cache import copies, index, layout, shard
from pipeline.cache.cache import Cache, Unit
from pipeline.cache.contradictions import Work
from pipeline.cache.layout import PACKED, REPAIR, Paths, numbers_of
from pipeline.cache.recipes import CaptionRecipe, recipe_class
from pipeline.cache.references import owners, plan_count, references
from pipeline.encoding.plan import CAPTIONS, IMAGES
from pipeline.errors import IntegrityError


def restore_documents(cache: Cache) -> None:
    """Restore or replace every damaged or lost document of a cache."""
    files = cache.files
    files.repairs = True
    for name in [Paths.FORMAT, *(name for name, _ in copies.documents(files))]:
        if not copies.repair(files, name) and name != Paths.FORMAT:
            files.set_aside(name)
    every = {*owners(cache), *files.folders("shards")}
    for name in filter(layout.is_document, (f"snapshots/{name}" for name in files.names("snapshots"))):
        for kind, values in files.document(name)["recipes"].items():
            if (recipe := recipe_class(kind).from_values(values)).name in every:
                cache.add_recipe(recipe)
    _set_aside_without_table(cache)
    prompts = map(Paths.prompts, files.folders("prompts"))
    for folder in (*map(Paths.scans, cache.sources()), *map(Paths.names, cache.snapshot_names()), *prompts):
        _fill_gaps(cache, folder)
    for owner in sorted(every):
        if owner.startswith(PACKED) or files.exists(Paths.recipe(owner)):
            _restore_plans(cache, owner)
            _restore_commits(cache, owner)


def _numbers(cache: Cache, folder: str) -> list[int]:
    """The numbers of the existing documents; unlike `Files.numbers` it accepts gaps."""
    return numbers_of(cache.files.names(folder))


def _set_aside_without_table(cache: Cache) -> None:
    """Set aside plans, segments and earlier scans of which a table is lost with its copy. `encode` makes the table of
    the last scan again."""
    for reference in references(cache):
        if reference.stored == 2 and reference.fix == REPAIR:
            with suppress(IntegrityError):  # the document itself is missing
                lost = [table for table in reference.files if not cache.files.duplicate(table)]
                for name in [reference.document, *lost] if lost else []:
                    cache.files.set_aside(name)


def _fill_gaps(cache: Cache, folder: str) -> None:
    """Fill the gaps in a numbered folder of which only the last document counts, with copies of the next document."""
    numbers = _numbers(cache, folder)
    for number in sorted(set(range(max(numbers, default=0))) - set(numbers), reverse=True):
        successor = cache.files.document(Paths.numbered(folder, number + 1))
        cache.files.put(Paths.numbered(folder, number), layout.seal(successor))


def _restore_plans(cache: Cache, owner: str) -> None:
    """Plan the commits without a plan; a plan that does not list its commits is set aside first. Only `bucket --pack`
    can plan a pack: its commits are set aside."""
    files, packed, folder = cache.files, owner.startswith(PACKED), Paths.plans(owner)
    for plan in () if packed else [cache.plan(owner, number) for number in _numbers(cache, folder)]:
        if not index.committed(files, owner, plan.number) <= {unit.unit for unit in plan.units}:
            files.set_aside(Paths.numbered(folder, plan.number))
    for number in sorted({*range(plan_count(cache, owner))} - {*_numbers(cache, folder)}):
        if packed:
            for name in files.unit_names(Paths.units(owner, number)):
                files.set_aside(name)
        else:
            _add_plan(cache, owner, number, sorted(index.committed(files, owner, number)))


def _add_plan(cache: Cache, owner: str, number: int, units: list[str]) -> None:
    """Add a plan of units whose rows are not known."""
    schema = CAPTIONS if isinstance(cache.recipe(owner), CaptionRecipe) else IMAGES
    cache.add_plan(owner, number, (Unit(unit, 0, 0, 1) for unit in units), schema.empty_table())


def _restore_commits(cache: Cache, owner: str) -> None:
    """Commit the intact shards without a commit, unless they are harmless. Damaged ones are set aside: their records
    are still to be made."""
    files, work = cache.files, Work(cache, owner)
    adopted: dict[str, str] = {}
    for path in work.uncommitted:
        with suppress(IntegrityError, FileNotFoundError):
            if (needed := work.unit_of(path)) is None:
                continue
            unit, number = needed
            if files.digest(path) != PurePosixPath(path).stem:
                files.set_aside(path)
            elif number is not None:
                _commit(cache, owner, number, unit, path)
            elif not owner.startswith(PACKED):
                adopted[index.adopted_unit(owner, PurePosixPath(path).stem)] = path
    if adopted:
        number = len(work.planned)
        _add_plan(cache, owner, number, list(adopted))
        for unit, path in adopted.items():
            _commit(cache, owner, number, unit, path)
    for plan in () if owner.startswith(PACKED) else cache.plans(owner):
        index.merge(files, owner, plan.number, (unit.unit for unit in plan.units))


def _commit(cache: Cache, owner: str, number: int, unit: str, path: str) -> None:
    files, digest = cache.files, PurePosixPath(path).stem
    records = shard.read_table(files, path)
    provenance = {index.ADOPTED: True} if unit == index.adopted_unit(owner, digest) else {}
    made = digest, files.sizes([path])[path], records
    index.publish_commit(files, owner, number, index.commit_of(files, unit, made, provenance=provenance))
