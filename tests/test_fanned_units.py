"""Commits of large plans are in folders of their first two characters: read, finished, collected as in one folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import stages.encode
from pipeline.cache import audit, contradictions, garbage, index, layout, root
from pipeline.cache.layout import Paths
from pipeline.cache.root import Cache, Unit, WorkPlan
from pipeline.cache.status import status
from pipeline.config import Config
from pipeline.encoding.rebuild import rebuild_documents
from pipeline.errors import CacheError
from pipeline.work import engine
from tests.support import tiny_cache

RECIPE = layout.LatentRecipe(weights="w")


def planned(folder: Path, count: int = 40) -> tuple[Cache, WorkPlan]:
    cache = Cache(folder, create=True)
    cache.add_recipe(RECIPE)
    keys = [layout.digest(str(n)) for n in range(count)]
    units = [Unit(key.hex(), n, 1, 1) for n, key in enumerate(keys)]
    assert cache.add_plan(RECIPE.name, 0, units, pa.table({"key": pa.array(keys, pa.binary(16))}))
    return cache, cache.plan(RECIPE.name, 0)


def commit(cache: Cache, plan: WorkPlan, unit: Unit) -> bool:
    empty = index.Commit(unit.unit, None, 0, 0, None, (), {"n": unit.start})
    return index.publish_commit(cache.files, plan.recipe, plan.number, empty, plan.fanned)


def unit_files(cache: Cache) -> set[str]:
    return {path.relative_to(cache.root).as_posix() for path in cache.root.glob("units/**/*.json")}


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Cache, WorkPlan]]:
    """The same plan with its commits in one folder (as of earlier versions) and in several."""
    flat = planned(tmp_path / "flat")
    monkeypatch.setattr(root, "FLAT_UNITS", 3)
    return [flat, planned(tmp_path / "fanned")]


def test_a_large_plan_is_fanned_out_and_its_segment_is_that_of_a_flat_one(two: list[tuple[Cache, WorkPlan]]) -> None:
    for cache, plan in two:
        for unit in list(plan.units)[::-1]:
            assert not engine.is_done(cache, plan, unit)
            assert commit(cache, plan, unit) and not commit(cache, plan, unit)
            assert engine.is_done(cache, plan, unit)
    (flat, of_flat), (fanned, of_fanned) = two
    assert (of_flat.fanned, of_fanned.fanned) == (False, True)
    assert unit_files(flat) == {Paths.unit(RECIPE.name, 0, unit.unit) for unit in of_flat.units}
    folder = Paths.units(RECIPE.name, 0)
    assert unit_files(fanned) == {f"{folder}/{unit.unit[:2]}/{unit.unit}.json" for unit in of_flat.units}
    assert fanned.files.unit_names(folder) == sorted(unit_files(fanned))
    assert index.commits(flat.files, RECIPE.name, 0) == index.commits(fanned.files, RECIPE.name, 0)
    assert status(fanned)["stores"][RECIPE.name] | {"rate": 0, "eta_s": 0} == (
        status(flat)["stores"][RECIPE.name] | {"rate": 0, "eta_s": 0}
    )
    for cache, plan in two:
        assert not engine.missing_units(cache, [plan])
    segment = Paths.segment(RECIPE.name, 0)
    assert flat.files.read(segment) == fanned.files.read(segment)


def test_what_is_missing_is_found_among_the_folders_and_the_copies(two: list[tuple[Cache, WorkPlan]]) -> None:
    for cache, plan in two:
        for unit in plan.units[:30]:
            commit(cache, plan, unit)
        lost = Paths.unit(RECIPE.name, 0, plan.units[4].unit, plan.fanned)
        cache.files.path(lost).unlink()
        assert [unit for _, unit in engine.missing_units(cache, [plan])] == list(plan.units[30:])
        assert [c.unit for c in index.commits(cache.files, RECIPE.name, 0)] == sorted(u.unit for u in plan.units[:30])
        assert lost in cache.files.damage


def test_the_segment_stands_for_the_commits_and_gc_removes_them(two: list[tuple[Cache, WorkPlan]]) -> None:
    for cache, plan in two:
        for unit in plan.units:
            commit(cache, plan, unit)
        assert not [name for name, _, _ in garbage.unneeded(cache, 0.0) if name.startswith("units/")]
        engine.missing_units(cache, [plan])
        assert not list(contradictions.contradictions(cache))
        assert {name for name, _, _ in garbage.unneeded(cache, -9.0)} == unit_files(cache)
        garbage.remove(cache, list(garbage.unneeded(cache, -9.0)), -9.0)
        assert not unit_files(cache) and not list(cache.root.glob("copies/units/**/*.json"))
        assert len(index.committed(cache.files, RECIPE.name, 0)) == 40
        assert not list(audit.verify(cache))


def test_a_commit_in_another_folder_is_no_commit(two: list[tuple[Cache, WorkPlan]]) -> None:
    cache, plan = two[1]
    unit = plan.units[0]
    commit(cache, plan, unit)
    name = Paths.unit(RECIPE.name, 0, unit.unit, fanned=True)
    wrong = name.replace(f"/{unit.unit[:2]}/", "/zz/")
    cache.files.path(wrong).parent.mkdir()
    for path in (name, Paths.copy(name)):
        target = cache.files.path(path.replace(name, wrong))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(cache.files.path(path), target)
    assert not index.committed(cache.files, RECIPE.name, 0) and not engine.is_done(cache, plan, unit)
    assert [finding.path for finding in audit.verify_documents(cache)] == [wrong]


def test_an_earlier_version_refuses_a_fanned_plan(two: list[tuple[Cache, WorkPlan]]) -> None:
    for (cache, _), version in zip(two, (1, 2), strict=True):
        data = cache.files.read(Paths.numbered(Paths.plans(RECIPE.name), 0))
        assert f'"version": {version}'.encode() in data and (b'"fanned"' in data) == (version == 2)
        if version == 2:
            with pytest.raises(CacheError):
                layout.unseal(data, "plan")


def test_encode_writes_the_same_segments_and_shards_whatever_the_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, photos: Path, make_config: Callable[..., Config]
) -> None:
    written = []
    for limit in (root.FLAT_UNITS, 0):
        monkeypatch.setattr(root, "FLAT_UNITS", limit)
        config = make_config(tmp_path / str(limit), "encode.unit_images=3", "encode.unit_captions=4")
        stages.encode.run(config, data=str(photos))
        cache = Cache(config.cache)
        assert len(unit_files(cache)) > 4
        assert all((Path(name).parent.name == Path(name).name[:2]) == (limit == 0) for name in unit_files(cache))
        paths = [
            path for folder in ("segments", "shards") for path in cache.root.glob(f"{folder}/**/*") if path.is_file()
        ]
        written.append({path.relative_to(cache.root): path.read_bytes() for path in paths})
    assert written[0] == written[1]


def test_lost_commits_of_a_fanned_plan_are_made_again_from_their_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(root, "FLAT_UNITS", 0)
    cache = tiny_cache.build(tmp_path / "c")
    recipes = [path.name for path in (cache.root / "plans").iterdir()]
    before = {recipe: index.commits(cache.files, recipe, 0) for recipe in recipes}
    for recipe in recipes:
        for folder in ("units", "copies/units", "segments", "copies/segments"):
            shutil.rmtree(cache.root / folder / recipe)
    rebuild_documents(cache)
    for recipe in recipes:
        assert cache.plan(recipe, 0).fanned
        after = index.commits(cache.files, recipe, 0)
        assert [(c.unit, c.shard, c.records) for c in after] == [(c.unit, c.shard, c.records) for c in before[recipe]]
        assert all(Path(name).parent.name == Path(name).name[:2] for name in unit_files(cache) if recipe in name)
