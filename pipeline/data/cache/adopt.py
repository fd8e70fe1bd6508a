"""Adopting: take over records of another cache.

`adopt` links (or copies) shards of another cache with their record tables and commits, as a plan of this cache.

A record encoded here takes precedence over an adopted record of the same key, and an earlier adopted record over a
later. After a kill the next run continues: units with a published plan are recognised by their ids.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace

import pyarrow as pa

from sana_pipe.base.disk import cache_errors, sync
from sana_pipe.base.errors import IntegrityError
from sana_pipe.data.cache import index
from sana_pipe.data.cache.cache import Cache, Unit, WorkList
from sana_pipe.data.cache.files import Files
from sana_pipe.data.cache.layout import Paths


def adopt(
    cache: Cache, other: Cache, encoding: str, shards: set[str], on_shard: Callable[[int], None] = lambda size: None
) -> None:
    """Take over the records of some shards of another cache.

    Args:
        encoding: name of their encoding.
        shards: names of shards that are committed in the other cache and not in this cache.
        on_shard: called with the bytes of each shard that is here now.

    Raises:
        IntegrityError: a file of the other cache is missing or damaged.
    """
    adopted = _units_of(other, encoding, shards)
    if not adopted:
        return
    cache.add_encoding(other.encoding(encoding))
    for _, _, commit in adopted.values():
        assert commit.shard is not None
        assert commit.table is not None
        bring(cache.files, other.files, Paths.shard(encoding, commit.shard), commit.shard)
        bring(cache.files, other.files, Paths.table(commit.table, "arrow"), commit.table)
        on_shard(commit.bytes)
    plan_of = _add_plans(cache, other, encoding, adopted)
    for unit, (_, _, commit) in adopted.items():
        index.publish_commit(cache.files, encoding, plan_of[unit].number, commit)
    for plan in {plan_of[unit].number: plan_of[unit] for unit in adopted}.values():
        index.merge(cache.files, encoding, plan.number, (unit.unit for unit in plan.units))


Adopted = dict[str, tuple[WorkList, Unit, index.Commit]]
"""Id of the unit in this cache -> its plan and unit in the other cache, and its commit for this cache."""


def _units_of(other: Cache, encoding: str, shards: set[str]) -> Adopted:
    """The units of the other cache that made the shards."""
    adopted: Adopted = {}
    for plan in other.plans(encoding):
        units = {unit.unit: unit for unit in plan.units}
        for commit in index.commits(other.files, encoding, plan.number):
            if commit.shard is not None and commit.shard in shards:
                unit_id = index.adopted_unit(encoding, commit.shard)
                marked = replace(commit, unit=unit_id, provenance={**commit.provenance, index.ADOPTED: True})
                adopted[unit_id] = (plan, units[commit.unit], marked)
    return adopted


def _add_plans(cache: Cache, other: Cache, encoding: str, adopted: Adopted) -> dict[str, WorkList]:
    """Plan the adopted units that no plan of this cache has; returns the plan of every unit."""
    while True:
        plan_of = {unit.unit: plan for plan in cache.plans(encoding) for unit in plan.units}
        missing = [unit for unit in adopted if unit not in plan_of]
        if not missing:
            return plan_of
        units, rows, start = list[Unit](), [], 0
        for unit_id in missing:
            plan, unit, _ = adopted[unit_id]
            units.append(replace(unit, unit=unit_id, start=start))
            rows.append(other.unit_rows(plan, unit))
            start += unit.count
        cache.add_plan(encoding, len(cache.files.numbers(Paths.plans(encoding))), units, pa.concat_tables(rows))


def bring(files: Files, other: Files, name: str, digest: str) -> None:
    """Link or copy a content-addressed file of another cache, checked. A damaged file of this cache is replaced.

    Raises:
        IntegrityError: it is missing there, or its bytes are not those of its name.
    """
    if files.refresh_intact(name):
        return
    with files.temporary() as path:
        linked = False
        if files.on_disk and other.on_disk:
            try:
                os.link(other.path(name), path)
                os.utime(path)  # it counts as new in this cache
                linked = True
            except OSError:  # missing, another file system, links not allowed, another user's file: copy it
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
                sync(target)
        try:
            files.publish_content(path, name, digest)
        except IntegrityError as error:
            raise IntegrityError(
                f"{other.where(name)}: its bytes do not match its name",
                expected=digest,
                found=error.found,
                fix="sana-pipe verify --repair in that cache",
            ) from None
