"""What a new plan lists: work of no plan, failed for a time, or lost; by the index and not by earlier plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sana_pipe.data.cache import index
from sana_pipe.data.cache.cache import Cache, Unit, WorkList
from sana_pipe.data.cache.index import RecordReject
from sana_pipe.data.cache.keys import binary, key_bytes
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.encoding import plan as planning
from sana_pipe.data.encoding.config import EncodeConfig
from sana_pipe.data.encoding.unit_records import EncodedRecord, write_unit
from tests.support.constants import constants, unit_sizes
from tests.support.lowered import lower_limits
from tests.support.synthetic import LATENT

FATES = ("made", "refused", "failed")


def work_of(keys: np.ndarray) -> pa.Table:
    columns = {"key": binary(keys), "source": pa.repeat("photos", len(keys)), "digest": binary(keys)}
    items = {"item": [f"{key_bytes(key).hex()}.png" for key in keys]}
    items |= {name: pa.nulls(len(keys), pa.string()) for name in ("part", "where")}  # type: ignore[dict-item]
    sides = {side: pa.array(np.full(len(keys), 16, np.int32)) for side in ("height", "width")}
    return pa.table({**columns, **items, **sides}).select(planning.IMAGES.names).cast(planning.IMAGES)


def commit(cache: Cache, plan: WorkList, unit: Unit, fates: dict[bytes, str]) -> index.Commit:
    keys = cache.unit_rows(plan, unit).column("key").to_pylist()
    made = [EncodedRecord(key, np.zeros((4, 2, 2), np.uint16)) for key in keys if fates[key] == "made"]
    bad = [RecordReject(key.hex(), "x", "broken", fates[key] == "failed") for key in keys if fates[key] != "made"]
    return write_unit(cache, LATENT, plan, unit, [(made, bad)], lambda good, bad: None)


def plans_of(cache: Cache, work: pa.Table) -> list[WorkList]:
    with constants(unit_sizes(3, 512, WINDOW=8)):
        return planning.plan_images(cache, LATENT, work, EncodeConfig())


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    cache = Cache(tmp_path / "cache", create=True)
    cache.add_encoding(LATENT)
    return cache


@pytest.mark.timeout(120)  # where a plan lists what an unfinished plan does, planning does not end
@pytest.mark.parametrize("lowered", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_a_new_plan_lists_what_is_missing(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, seed: int, lowered: bool
) -> None:
    """Against the rule itself, over random histories of plans, commits and lost shards."""
    if lowered:
        lower_limits(monkeypatch)
    rng = np.random.default_rng(seed)
    keys = np.frombuffer(rng.bytes(16 * 40), "S16")
    there: dict[bytes, str] = {}  # key -> its shard
    latest, listed = dict[bytes, str](), dict[int, set[bytes]]()
    for _ in range(4):
        finished = {
            number
            for number in listed
            if index.committed(cache.files, LATENT.name, number)
            == {unit.unit for unit in cache.plan(LATENT.name, number).units}
        }
        waiting = set[bytes]().union(*(some for number, some in listed.items() if number not in finished))
        asked = work_of(rng.permutation(keys)[: rng.integers(10, 40)])
        wanted = asked.column("key").to_pylist()
        expected = [k for k in wanted if k not in there and k not in waiting and latest.get(k) != "refused"]
        plans = plans_of(cache, asked)
        new = [plan for plan in plans if plan.number not in listed]
        lists = [cache.table(plan.table).column("key").to_pylist() for plan in new]
        assert sorted(lists[0] if lists else []) == sorted(expected)
        listed |= {plan.number: set(keys) for plan, keys in zip(new, lists, strict=True)}
        for plan in plans:
            for unit in plan.units:
                if unit.unit in index.committed(cache.files, LATENT.name, plan.number) or rng.random() < 0.2:
                    continue
                fates = {key: FATES[rng.choice(3, p=[0.7, 0.15, 0.15])] for key in map(key_bytes, keys)}
                done = commit(cache, plan, unit, fates)
                for key in cache.unit_rows(plan, unit).column("key").to_pylist():
                    if fates[key] == "made":
                        assert done.shard is not None
                        there[key] = done.shard
                    latest[key] = fates[key]
            index.merge(cache.files, LATENT.name, plan.number, [unit.unit for unit in plan.units])
        lost = rng.choice(sorted(set(there.values())))
        cache.files.path(Paths.shard(LATENT.name, lost)).unlink()
        there = {key: shard for key, shard in there.items() if shard != lost}


@pytest.mark.parametrize("fate", ["made", "refused"])
def test_a_record_that_failed_for_a_time_is_planned_until_its_end_is_known(cache: Cache, fate: str) -> None:
    keys = np.frombuffer(np.random.default_rng(0).bytes(16 * 3), "S16")
    others, last = dict.fromkeys(map(key_bytes, keys[:2]), "made"), key_bytes(keys[2])
    for run, end in enumerate(["failed", "failed", fate]):
        assert planning.count_missing(cache, LATENT, work_of(keys)) == ((1, 2) if run else (3, 0))
        plan = plans_of(cache, work_of(keys))[run]
        for unit in plan.units:
            commit(cache, plan, unit, {**others, last: end})
        index.merge(cache.files, LATENT.name, run, [unit.unit for unit in plan.units])
    assert len(plans_of(cache, work_of(keys))) == 3
    assert planning.count_missing(cache, LATENT, work_of(keys)) == (0, 3 if fate == "made" else 2)
    assert planning.retryable_at_another_place(cache, LATENT, lambda _: work_of(keys)) is None


def finished_plans(cache: Cache, count: int) -> pa.Table:
    """As many finished plans, and the work list of all of them."""
    keys = np.frombuffer(np.random.default_rng(0).bytes(16 * 4 * count), "S16")
    fates = dict.fromkeys(map(key_bytes, keys), "made")
    for number in range(count):
        plan = plans_of(cache, work_of(keys[4 * number : 4 * number + 4]))[number]
        for unit in plan.units:
            commit(cache, plan, unit, fates)
        assert index.merge(cache.files, LATENT.name, number, [unit.unit for unit in plan.units])
    return work_of(keys)


def test_tables_of_finished_plans_are_not_read(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    work = finished_plans(cache, 5)
    monkeypatch.setattr(Cache, "table", lambda *_: 1 / 0)
    assert len(plans_of(Cache(cache.location), work)) == 5


def test_a_plan_that_is_finished_meanwhile_is_not_planned_again(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = np.frombuffer(np.random.default_rng(0).bytes(16 * 4), "S16")
    plan = plans_of(cache, work_of(keys))[0]
    build = index.RecordIndex

    def built(*args: Any) -> index.RecordIndex:
        result = build(*args)
        for unit in plan.units:
            commit(cache, plan, unit, dict.fromkeys(map(key_bytes, keys), "made"))
        return result

    monkeypatch.setattr(index, "RecordIndex", built)
    assert len(plans_of(cache, work_of(keys))) == 1
