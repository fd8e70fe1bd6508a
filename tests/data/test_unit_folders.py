"""Commits are in folders of their unit's first two characters: read, finished, collected."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from sana_pipe.data.cache import audit, contradictions, garbage, index, layout
from sana_pipe.data.cache.cache import Cache, Unit, WorkList
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.work import engine

ENCODING = LatentEncoding(weights="w")


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    cache = Cache(tmp_path / "cache", create=True)
    cache.add_encoding(ENCODING)
    keys = [layout.digest(str(n)) for n in range(40)]
    units = [Unit(key.hex(), n, 1, 1) for n, key in enumerate(keys)]
    assert cache.add_plan(ENCODING.name, 0, units, pa.table({"key": pa.array(keys, pa.binary(16))}))
    return cache


@pytest.fixture
def plan(cache: Cache) -> WorkList:
    return cache.plan(ENCODING.name, 0)


def commit(cache: Cache, plan: WorkList, unit: Unit) -> bool:
    empty = index.Commit(unit.unit, None, 0, 0, None, (), {"n": unit.start})
    return index.publish_commit(cache.files, plan.encoding, plan.number, empty)


def unit_files(cache: Cache) -> set[str]:
    return {path.relative_to(cache.root).as_posix() for path in cache.root.glob("units/**/*.json")}


def test_each_commit_is_in_its_folder_and_counts_once(cache: Cache, plan: WorkList) -> None:
    for unit in list(plan.units)[::-1]:
        assert not engine.is_done(cache, plan, unit)
        assert commit(cache, plan, unit) and not commit(cache, plan, unit)
        assert engine.is_done(cache, plan, unit)
    folder = Paths.units(ENCODING.name, 0)
    assert unit_files(cache) == {f"{folder}/{unit.unit[:2]}/{unit.unit}.json" for unit in plan.units}
    assert cache.files.unit_names(folder) == sorted(unit_files(cache))
    assert not engine.missing_units(cache, [plan])


def test_what_is_missing_is_found_among_the_folders_and_the_copies(cache: Cache, plan: WorkList) -> None:
    for unit in plan.units[:30]:
        commit(cache, plan, unit)
    lost = Paths.unit(ENCODING.name, 0, plan.units[4].unit)
    cache.files.path(lost).unlink()
    assert [unit for _, unit in engine.missing_units(cache, [plan])] == list(plan.units[30:])
    assert [c.unit for c in index.commits(cache.files, ENCODING.name, 0)] == sorted(u.unit for u in plan.units[:30])
    assert lost in cache.files.damage


def test_the_segment_stands_for_the_commits_and_gc_removes_them(cache: Cache, plan: WorkList) -> None:
    for unit in plan.units:
        commit(cache, plan, unit)
    assert not [name for name, _, _ in garbage.unneeded(cache, 0.0) if name.startswith("units/")]
    engine.missing_units(cache, [plan])
    assert not list(contradictions.contradictions(cache))
    assert {name for name, _, _ in garbage.unneeded(cache, -9.0)} == unit_files(cache)
    garbage.remove(cache, list(garbage.unneeded(cache, -9.0)), -9.0)
    assert not unit_files(cache) and not list(cache.root.glob("copies/units/**/*.json"))
    assert len(index.committed(cache.files, ENCODING.name, 0)) == 40
    assert not list(audit.verify(cache))


@pytest.mark.parametrize("folder", ["/zz/", "/"])
def test_a_commit_in_another_folder_is_no_commit(cache: Cache, plan: WorkList, folder: str) -> None:
    unit = plan.units[0]
    commit(cache, plan, unit)
    name = Paths.unit(ENCODING.name, 0, unit.unit)
    wrong = name.replace(f"/{unit.unit[:2]}/", folder)
    for path in (name, Paths.copy(name)):
        target = cache.files.path(path.replace(name, wrong))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(cache.files.path(path), target)
    assert not index.committed(cache.files, ENCODING.name, 0) and not engine.is_done(cache, plan, unit)
    assert [finding.path for finding in audit.verify_documents(cache)] == [wrong]
