"""Adopting: records of another cache become records of this one.

What: `adopt` links (or copies) shards of another cache with their record tables and commits, as a plan of its own.
Why: a snapshot must be whole in one cache: it can be verified, moved and read without knowing other folders. Adopted
records are ordinary ones: `verify`, `gc`, `status` and `encode` treat them like those that were encoded here.
Price: every adopted byte is read once to check it, and copied where it cannot be linked (another file system, an
object store). Whole units are adopted.

A record that was encoded here goes before an adopted one of the same key, and an earlier adopted one before a later.
Killed at any point, the next run continues: units whose plan is published are known by their ids.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

import pyarrow as pa

from pipeline.cache import index, layout
from pipeline.cache.files import Files
from pipeline.cache.layout import Paths
from pipeline.cache.local_files import cache_errors
from pipeline.cache.store import Cache, Plan, Unit
from pipeline.errors import CacheError, IntegrityError


def adopt(cache: Cache, other: Cache, recipe: str, shards: set[str]) -> None:
    """Make the records of some of another cache's shards records of this one.

    Args:
        recipe: name of their recipe.
        shards: names of shards that are committed there and not here.

    Raises:
        IntegrityError: a file of the other cache is missing or damaged.
        CacheError: int8 records with other channel scales than this cache's.
    """
    needed: dict[str, tuple[Plan, Unit, index.Commit]] = {}
    for plan in other.plans(recipe):
        units = {unit.unit: unit for unit in plan.units}
        for commit in index.commits(other.files, recipe, plan.number):
            if commit.shard is not None and commit.shard in shards:
                own = index.adopted_unit(recipe, commit.shard)
                marked = replace(commit, unit=own, provenance={**commit.provenance, index.ADOPTED: True})
                needed[own] = (plan, units[commit.unit], marked)
    if not needed:
        return
    cache.add_recipe(other.recipe(recipe))
    _same_scales(cache, other, recipe)
    for _, _, commit in needed.values():
        assert commit.shard is not None
        assert commit.table is not None
        bring(cache.files, other.files, Paths.shard(recipe, commit.shard), commit.shard)
        bring(cache.files, other.files, Paths.table(commit.table, "arrow"), commit.table)
    while True:
        known = {unit.unit: plan for plan in cache.plans(recipe) for unit in plan.units}
        fresh = [own for own in needed if own not in known]
        if not fresh:
            break
        moved, rows, start = list[Unit](), [], 0
        for own in fresh:
            plan, unit, _ = needed[own]
            moved.append(replace(unit, unit=own, start=start))
            rows.append(other.table(plan.table).slice(unit.start, unit.count))
            start += unit.count
        cache.add_plan(recipe, len(cache.files.numbers(Paths.plans(recipe))), moved, pa.concat_tables(rows))
    for own, (_, _, commit) in needed.items():
        index.publish_commit(cache.files, recipe, known[own].number, commit)
    for plan in {known[own].number: known[own] for own in needed}.values():
        index.merge(cache.files, recipe, plan.number, [unit.unit for unit in plan.units])


def bring(files: Files, other: Files, name: str, digest: str) -> None:
    """Link or copy a content-addressed file of another cache, checked.

    Raises:
        IntegrityError: it is missing there, or its bytes are not those of its name.
    """
    if files.freshen(name):
        return
    with files.temporary() as path:
        linked = False
        if type(files) is type(other) is Files:
            try:
                os.link(other.path(name), path)
                os.utime(path)  # its age there is not its age here
                linked = True
            except OSError:  # missing, another file system, links are not allowed, another user's: see below
                path.unlink(missing_ok=True)
        if not linked:
            try:
                handle = other.open(name)
            except FileNotFoundError:
                raise IntegrityError(
                    f"{other.where(name)}: is missing", fix="sana-pipe verify --repair in that cache"
                ) from None
            with cache_errors(path), handle.file() as source, open(path, "xb") as target:
                shutil.copyfileobj(source, target, 4 << 20)
        try:
            files.publish_content(path, name, digest)
        except IntegrityError as error:
            raise IntegrityError(
                f"{other.where(name)}: its bytes do not match its name",
                expected=digest,
                found=error.found,
                fix="sana-pipe verify --repair in that cache",
            ) from None


def _same_scales(cache: Cache, other: Cache, recipe: str) -> None:
    where = Paths.scale(recipe)
    if not other.files.exists(where):
        return
    theirs = other.files.document(where)
    bring(cache.files, other.files, Paths.table(theirs["table"], "npy"), theirs["table"])
    cache.files.put(where, layout.seal(theirs))
    ours = cache.files.document(where)
    if ours["table"] != theirs["table"]:
        raise CacheError(
            f"{cache.location} and {other.location} hold int8 records of one recipe with different channel scales",
            expected=ours["table"],
            found=theirs["table"],
            fix="encode both into one cache, or use storage bf16 or bf16-zstd",
        )
