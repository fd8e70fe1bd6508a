"""Units without records, and a maker that only commits them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from sana_pipe.data.cache import index, layout
from sana_pipe.data.cache.cache import Cache, Unit, WorkList
from sana_pipe.data.work.engine import Work

ENCODING = "latent-0123456789abcdef0123456789abcdef"


def planned(cache: Cache, count: int = 8) -> Work:
    """The units of a new plan."""
    units = [Unit(layout.digest("unit", str(n)).hex(), n, 1, 1) for n in range(count)]
    cache.add_plan(ENCODING, 0, units, pa.table({"n": list(range(count))}))
    plan = cache.plan(ENCODING, 0)
    return [(plan, unit) for unit in plan.units]


class Maker:
    """Commits units without records.

    Args:
        hook: called in the middle of each unit with the unit and the maker's `progress`.

    Attributes:
        done: ids of the units that it committed.
    """

    def __init__(self, cache: Cache, hook: Callable[[Unit, Callable[[int, int], None]], None] = lambda u, p: None):
        self.cache, self.hook = cache, hook
        self.done: list[str] = []

    def make(self, plan: WorkList, unit: Unit, progress: Callable[[int, int], None]) -> index.Commit:
        self.hook(unit, progress)
        commit = index.Commit(unit.unit, None, 0, 0, None, (), {})
        if index.publish_commit(self.cache.files, plan.encoding, plan.number, commit):
            self.done.append(unit.unit)
        return commit


def claimed(cache: Cache) -> list[Path]:
    return [path for path in (cache.root / "claims").rglob("*") if path.is_file()]
