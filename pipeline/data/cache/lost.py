"""Documents that are lost with their copies: what `verify --repair` does in addition to writing each document from its
copy.

It moves what is damaged twice, and commits whose plan is lost, to `damaged/`, and closes gaps between numbers. Then
`encode` makes the records again that no commit names any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from sana_pipe.base.errors import IntegrityError
from sana_pipe.data.cache import copies, layout
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.layout import PACKED, REPAIR, Paths, numbers_of
from sana_pipe.data.cache.references import owners, plan_count, references


def repair_documents(cache: Cache) -> set[str]:
    """Write every document and every copy from the intact file of both; move what is damaged twice out of the way.

    Returns:
        Documents that are lost, and that something else has to be made for: those that were moved, and lost plans, with
        the folders of these plans.
    """
    files = cache.files
    files.repairs = True
    names = [name for name, _ in copies.documents(files) if not copies.repair(files, name)]
    copies.repair(files, Paths.FORMAT)
    for name in names:
        files.set_aside(name)
    lost = {*names, *_set_aside_without_table(cache)}
    prompts = map(Paths.prompts, files.folders("prompts"))
    every = (*map(Paths.scans, cache.sources()), *map(Paths.names, cache.snapshot_names()), *prompts, Paths.WITHDRAWN)
    for folder in every:
        lost.difference_update(_fill_gaps(cache, folder))
    for owner in owners(cache):
        lost.update(_set_aside_without_plan(cache, owner))
    return lost


def _set_aside_without_table(cache: Cache) -> Iterator[str]:
    """Set aside plans, segments and earlier scans of which a table is lost with its copy, and yield them. `encode`
    makes the table of the last scan again."""
    for reference in references(cache):
        if reference.stored == 2 and reference.fix == REPAIR:
            with suppress(IntegrityError):  # the document itself is missing
                lost = [table for table in reference.files if not cache.files.duplicate(table)]
                for name in [reference.document, *lost] if lost else []:
                    cache.files.set_aside(name)
                    yield name


def _fill_gaps(cache: Cache, folder: str) -> Iterator[str]:
    """Fill the gaps in a numbered folder of which only the last document counts, with copies of the next document.
    Yields what it fills."""
    numbers = numbers_of(cache.files.names(folder))
    for number in sorted(set(range(max(numbers, default=0))) - set(numbers), reverse=True):
        successor = cache.files.document(Paths.numbered(folder, number + 1))
        cache.files.put(Paths.numbered(folder, number), layout.seal(successor))
        yield Paths.numbered(folder, number)


def _set_aside_without_plan(cache: Cache, owner: str) -> Iterator[str]:
    """Set aside the commits of lost plans; yield these plans and their folder. An empty plan takes the place of a plan
    before others."""
    files, folder = cache.files, Paths.plans(owner)
    numbers = numbers_of(files.names(folder))
    for number in sorted({*range(plan_count(cache, owner))} - {*numbers}):
        yield from (folder, Paths.numbered(folder, number))
        for name in (Paths.segment(owner, number), *files.unit_names(Paths.units(owner, number))):
            files.set_aside(name)
        if number < max(numbers, default=0) and not owner.startswith(PACKED):
            rows = cache.table(cache.plan(owner, max(numbers)).table)
            cache.add_plan(owner, number, [], rows.slice(0, 0))
