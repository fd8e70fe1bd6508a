"""Boundaries, ties, which of several comes first, missing values and counters that start anew."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import stages.bucket
from pipeline.cache import codec, index, layout, shard
from pipeline.cache.files import Files
from pipeline.cache.store import Cache, Plan, Unit
from pipeline.config import EncodeConfig
from pipeline.encoding import plan as planning
from pipeline.encoding import worker
from pipeline.encoding.scan import SCAN, _Scan
from pipeline.images import buckets
from pipeline.snapshots.filters import Filter
from pipeline.sources import source
from pipeline.sources.caption_columns import Candidate, CaptionRule
from tests.support.synthetic import LATENT, TABLE, add, config, pictures
from tests.test_sources import listed, make_tar, opened

RULE = CaptionRule(scores=(("text", "score"),), threshold=25.0)


# ---------------------------------------------------------------- captions and their scores


def drawn(*scored: tuple[str, float | None], rule: CaptionRule = RULE) -> dict[str, float]:
    return dict(rule.settle([Candidate(text, 1.0, score) for text, score in scored], "a.png", "s")[0])


def test_a_score_at_the_threshold_passes_it() -> None:
    assert set(drawn(("at", 25.0), ("above", 30.0), ("below", 24.9), ("none", None))) == {"at", "above"}
    assert drawn(("at", 25.0), ("also", 25.0), ("below", 24.0)) == {"at": 1.0, "also": 1.0}
    assert drawn(("best", 24.0), ("equal", 24.0), ("worse", 23.0)) == {"best": 1.0}, "the first of equals, alone"


def test_scores_of_zero_and_below_and_equal_texts() -> None:
    rule = dataclasses.replace(RULE, threshold=0.0)
    assert drawn(("a", 0.0), ("b", 0.0), rule=rule) == {"a": 1.0, "b": 1.0}
    assert rule.read({"text": ["a"], "score": [-3]}).candidates == [Candidate("a", 1.0, 0.0)]
    plain = CaptionRule()
    for weights in ((1.0, 3.0), (3.0, 1.0)):
        assert plain.settle([Candidate("same", weight) for weight in weights], "a.png", "s")[0] == (("same", 3.0),)


def test_scores_from_elsewhere_go_before_those_of_the_row() -> None:
    found = RULE.read({"text": "a", "score": 1.0}, {"text": 2.0})
    assert [one.score for one in found.candidates] == [2.0]


def test_a_caption_file_of_the_largest_size_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_CAPTION_BYTES", 5)
    assert source.sidecar("a.txt", b"12345") == "12345"
    assert isinstance(source.sidecar("a.txt", b"123456"), source.Reject)


def test_a_last_member_that_ends_with_the_tar_is_whole(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "a.tar", [("0.txt", "said"), ("0.png", b"p" * 512)])
    whole = path.read_bytes()
    assert not listed(opened(path))[1]
    end = 4 * 512
    for cut, count in ((end, 1), (end + 511, 1), (end + 512, 0)):
        path.write_bytes(whole[:cut])
        items, rejects = listed(opened(path))
        assert list(items) == ["a.tar/0.png"], "the picture is whole"
        assert len(rejects) == count and all("end mark" in reason for reason in rejects.values())
    path.write_bytes(whole[: end - 1])
    items, rejects = listed(opened(path))
    assert not items and "is cut" in rejects["a.tar/0.png"]


# ---------------------------------------------------------------- filters


@pytest.mark.parametrize(
    ("text", "selected"),
    [
        # rows: (a, b) = (null, 0), (2, null), (2, 2), (0, 0)
        ("not (a > 1 and b > 1)", [True, None, False, True]),
        ("a > 1 and b > 1", [False, None, True, False]),
        ("a > 1 or b > 1", [None, True, True, False]),
        ("not (a < 3 < b)", [True, None, True, True]),
        ("a in [2, 5] or b is None", [None, True, True, False]),
        ("a not in [2, 5]", [None, False, False, True]),
        ("min(a, b) < 1", [None, None, False, True]),
        ("max(a, b) > 1", [None, None, True, False]),
        ("a != b", [None, None, False, False]),
        ("a >= 2", [None, True, True, False]),
        ("a > 2", [None, False, False, False]),
    ],
)
def test_a_missing_value_decides_only_where_it_must(text: str, selected: list[bool | None]) -> None:
    columns = {"a": pa.array([None, 2.0, 2.0, 0.0]), "b": pa.array([0.0, None, 2.0, 0.0])}
    chosen, unknown = Filter(text, "f").select(columns.__getitem__, 4, [])
    found = [None if u else c for c, u in zip(chosen.to_pylist(), unknown.to_pylist(), strict=True)]
    assert found == selected


# ---------------------------------------------------------------- numbers


def test_ties_are_rounded_to_even() -> None:
    low = np.array([0x3F80, 0x3F81, 0x3F82, 0xBF81, 0x0000, 0x7F7E], np.uint32) << 16
    for tail in (0x7FFF, 0x8000, 0x8001):
        values = (low | tail).astype(np.uint32).view(np.float32)
        expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(codec.from_float(values), expected), hex(tail)
    tokens = np.array([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127.0]], np.float32)
    steps, quantised = codec._quantise(tokens, np.ones(8, np.float32))
    assert codec.to_float(steps).tolist() == [1.0]
    assert quantised.tolist() == [[127, 0, 2, 2, 0, -2, -2, -127]]


def test_a_nearly_silent_channel_has_a_floor() -> None:
    loud = codec.from_float(np.array([[1024.0, 2.0**-30], [1024.0, 2.0**-30]], np.float32))
    scale = codec.measure_scale([loud], "text")
    assert scale.tolist() == [1024.0, 0.5], "1/1024 of the mean of 1024 and (nearly) 0"


# ---------------------------------------------------------------- the index


def held(cache: Cache, plan: int, unit: str, keys: list[int], adopted: bool, **rejected: Any) -> str | None:
    """Commit a unit with a record of each key as a plan of its own; returns the name of its shard."""
    table = pa.table({"key": pa.array([bytes([key] * 16) for key in keys], pa.binary(16))})
    assert cache.add_plan(LATENT.name, plan, [Unit(unit, 0, len(keys), 1)], table)
    name, size, digest = None, 0, None
    rejects = tuple(
        index.Reject(bytes([int(key)] * 16).hex(), "item", "gone", retry) for key, retry in rejected.items()
    )
    stored = [key for key in keys if bytes([key] * 16).hex() not in {one.key for one in rejects}]
    if stored:
        with shard.ShardWriter(cache.files, LATENT, unit) as writer:
            for key in stored:
                writer.add(bytes([key] * 16), np.full((4, 2, 3), plan, np.uint16))
            name, size, records = writer.finish()
        digest = cache.files.put_content(index.table_bytes(records), "tables", "arrow")
    how = {index.ADOPTED: "elsewhere"} if adopted else {}
    commit = index.Commit(unit, name, size, len(stored), digest, rejects, how)
    assert index.publish_commit(cache.files, LATENT.name, plan, commit)
    return name


def holder(cache: Cache, key: int) -> str:
    found = cache.index(LATENT.name)
    row = int(found.find(index.as_keys([bytes([key] * 16)]))[0])
    assert row >= 0
    return found.shards[int(found.columns["shard"][row])]


def test_of_adopted_plans_the_first_counts_and_every_other_plan_before_them(tmp_path: Path) -> None:
    cache = Cache(tmp_path, create=True)
    first = held(cache, 0, "aa", [1, 2], adopted=True)
    held(cache, 1, "bb", [1, 2], adopted=True)
    held(cache, 2, "cc", [1, 2], adopted=True)
    assert holder(cache, 1) == holder(cache, 2) == first
    own = held(cache, 3, "dd", [2], adopted=False)
    assert holder(cache, 1) == first and holder(cache, 2) == own
    later = held(cache, 4, "ee", [2], adopted=False)
    held(cache, 5, "ff", [2], adopted=True)
    assert holder(cache, 2) == later


def test_of_several_indexes_the_first_counts(tmp_path: Path) -> None:
    indexes = []
    for number, keys in enumerate(([1, 2], [2, 3])):
        cache = Cache(tmp_path / str(number), create=True)
        for plan in range(number):
            held(cache, plan, f"{plan}0", [9], adopted=False)
        held(cache, number, "aa", keys, adopted=False)
        indexes.append(cache.index(LATENT.name))
    whole = index.RecordIndex.union(indexes)
    rows = whole.find(index.as_keys([bytes([key] * 16) for key in (1, 2, 3)]))
    assert [whole.origin[int(whole.columns["shard"][row])] for row in rows] == [0, 0, 1]


def test_a_segment_waits_for_exactly_the_units_of_its_plan(tmp_path: Path) -> None:
    cache = Cache(tmp_path, create=True)
    held(cache, 0, "aa", [1], adopted=False)
    assert not index.merge(cache.files, LATENT.name, 0, ["aa", "bb"])
    index.publish_commit(cache.files, LATENT.name, 0, index.Commit("zz", None, 0, 0, None, (), {}))
    assert not index.merge(cache.files, LATENT.name, 0, ["aa"]), "a unit that is not the plan's"


# ---------------------------------------------------------------- planning


def work(keys: list[int]) -> pa.Table:
    rows = [
        {"key": bytes([key] * 16), "source": "s", "item": str(key), "digest": bytes(16), "height": 16, "width": 16}
        for key in keys
    ]
    return pa.Table.from_pylist(rows, schema=planning.IMAGES)


def large(keys: list[int], height: int, width: int) -> pa.Table:
    sides = [pa.array([side] * len(keys), pa.int32()) for side in (height, width)]
    return work(keys).set_column(4, "height", sides[0]).set_column(5, "width", sides[1])


def planned(cache: Cache, keys: list[int], **options: Any) -> list[Plan]:
    return planning.plan_images(cache, LATENT, work(keys), EncodeConfig(**options))


def test_a_failed_record_that_is_stored_since_is_not_planned_again(tmp_path: Path) -> None:
    cache = Cache(tmp_path, create=True)
    held(cache, 0, "aa", [1, 2], adopted=False, **{"1": True})
    assert [plan.number for plan in planned(cache, [1, 2])] == [0, 1], "its cause may have passed"
    units = cache.plan(LATENT.name, 1).units
    assert sum(unit.count for unit in units) == 1
    assert len(planned(cache, [1, 2])) == 2, "a plan that has it and is not finished"
    gone = index.Commit(units[0].unit, None, 0, 0, None, (index.Reject("01" * 16, "1", "gone", True),), {})
    index.publish_commit(cache.files, LATENT.name, 1, gone)
    held(cache, 2, "cc", [1], adopted=False)
    assert len(planned(cache, [1, 2])) == 3, "a third plan has stored it"


def test_only_causes_that_may_pass_are_tried_again(tmp_path: Path) -> None:
    cache = Cache(tmp_path, create=True)
    held(cache, 0, "aa", [1, 2], adopted=False, **{"1": False})
    assert len(planned(cache, [1, 2])) == 1


def test_a_unit_is_as_large_as_it_may_be(tmp_path: Path) -> None:
    keys = list(range(1, 8))
    plans = planned(Cache(tmp_path / "a", create=True), keys, unit_images=3, window=100)
    assert [unit.count for unit in plans[0].units] == [3, 3, 1]
    assert [unit.start for unit in plans[0].units] == [0, 3, 6]
    plans = planned(Cache(tmp_path / "b", create=True), keys, unit_images=100, window=7)
    assert [unit.count for unit in plans[0].units] == [7]
    plans = planned(Cache(tmp_path / "c", create=True), keys, unit_images=100, window=6)
    assert [unit.count for unit in plans[0].units] == [6, 1]
    for number, (height, counts) in enumerate(((4096, [1, 1, 1]), (2048, [2, 1]), (2040, [2, 1]), (8192, [1, 1, 1]))):
        cache = Cache(tmp_path / f"large{number}", create=True)  # 1 MiB a latent of 4096 x 2048
        plans = planning.plan_images(cache, LATENT, large([1, 2, 3], height, 2048), EncodeConfig(unit_mib=1))
        assert [unit.count for unit in plans[0].units] == counts


def test_the_first_of_equal_pictures_is_the_one_that_is_read() -> None:
    rows = [
        {"item": item, "digest": layout.digest(content), "width": 24, "height": 24, "captions": []}
        for item, content in (("b", "x"), ("a", "x"), ("c", "y"), ("d", "x"))
    ]
    found = planning.image_work(pa.Table.from_pylist(rows, schema=SCAN), "s", LATENT, TABLE)
    assert found.column("item").to_pylist() == ["b", "c"]


# ---------------------------------------------------------------- encoding


def test_a_halved_batch_counts_for_its_own_unit_alone() -> None:
    worker.provenance()
    calls: list[int] = []

    def encode(inputs: list[int]) -> list[np.ndarray]:
        calls.append(len(inputs))
        if len(inputs) > 3:
            raise MemoryError
        return [np.array([one]) for one in inputs]

    assert [int(a[0]) for a in worker._finite(list(range(7)), encode) if a is not None] == list(range(7))
    assert calls == [7, 4, 2, 2, 3], "the first half is the larger one"
    assert worker.provenance()["halved_batches"] == 2
    assert "halved_batches" not in worker.provenance(), "counted once"
    calls.clear()
    worker._finite(list(range(3)), encode)
    assert calls == [3] and "halved_batches" not in worker.provenance()


def test_every_unit_is_some_tasks_and_stays_it() -> None:
    todo = [(Plan("r", 0, (), ""), Unit(f"{n * 2654435761 % 2**32:08x}", 0, 1, 1)) for n in range(50)]
    shares = [worker.share(todo, task, 3) for task in range(3)]
    assert sorted(unit.unit for part in shares for _, unit in part) == sorted(unit.unit for _, unit in todo)
    assert all(set(worker.share(todo[25:], task, 3)) <= set(shares[task]) for task in range(3))


def test_a_shard_is_on_the_disk_before_it_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Cache(tmp_path, create=True).files
    calls: list[str] = []
    sync, publish = os.fsync, Files.publish_content

    def fsync(descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        calls.append(f"sync {size}")
        sync(descriptor)

    def published(self: Files, temporary: Path, name: str, digest: str) -> None:
        calls.append(f"publish {os.stat(temporary).st_size}")
        publish(self, temporary, name, digest)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Files, "publish_content", published)
    with shard.ShardWriter(files, LATENT, "unit") as writer:
        writer.add(bytes(16), np.zeros((4, 2, 3), np.uint16))
        _, size, _ = writer.finish()
    at = calls.index(f"publish {size}")
    assert f"sync {size}" in calls[:at], "all bytes, before the name"


# ---------------------------------------------------------------- buckets


def test_a_bucket_of_exactly_one_batch_stays(tmp_path: Path) -> None:
    shapes = {(16, 32): 4, (16, 24): 3}
    many = [
        dataclasses.replace(p, height=shape[0], width=shape[1])
        for p, shape in zip(pictures(7), [s for s, n in shapes.items() for _ in range(n)], strict=True)
    ]
    of = config(tmp_path / "cache", "bucket.small=drop")
    add(of, "one", many)
    snapshot = Cache(of.cache).open_snapshot(stages.bucket.run(of))
    assert [(b.height, b.width, b.samples) for b in snapshot.buckets] == [(16, 32, 4)]


def test_a_caption_without_weight_is_not_in_a_snapshot(tmp_path: Path) -> None:
    of = config(tmp_path / "cache")
    one, two = pictures(2)
    add(
        of,
        "one",
        [
            dataclasses.replace(one, captions=(("a", 1.0), ("never", 0.0))),
            dataclasses.replace(two, captions=(("b", 1.0), ("c", 0.5))),
        ],
    )
    snapshot = Cache(of.cache).open_snapshot(stages.bucket.run(of))
    weights = {snapshot.origin(row)[1]: snapshot.caption_rows(row)[1] for row in range(len(snapshot))}
    assert weights == {one.item: [1.0], two.item: [1.0, 0.5]}


def test_limits_of_a_policy_are_allowed_themselves() -> None:
    data = config(Path("x"), "data.min_side=24", "data.max_upscale=2", "data.max_crop_loss=0.5").data
    assert buckets.refusal(24, 24, (48, 48), data) is None
    assert buckets.refusal(23, 24, (24, 24), data) is not None
    assert buckets.refusal(24, 24, (48, 49), data) is not None
    assert buckets.refusal(24, 48, (24, 24), data) is None, "half of it is cropped"
    assert buckets.refusal(24, 49, (24, 24), data) is not None


def test_a_row_is_known_by_its_size_and_its_time() -> None:
    known = _Scan.__new__(_Scan)
    known._known = {"a": {"size": 1, "mtime_ns": 2}}
    assert known._before("a", 1, 2) is not None
    assert known._before("a", 1, 3) is None and known._before("a", 2, 2) is None and known._before("b", 1, 2) is None


def test_unit_documents_tell_what_may_pass() -> None:
    reject = index.Reject("00" * 16, "item", "gone", retry=True)
    body = json.loads(json.dumps(index.Commit("aa", None, 0, 0, None, (reject,), {}).body()))
    assert index.Commit.from_body(body).rejects == (reject,)


def test_which_causes_may_pass(tmp_path: Path) -> None:
    (tmp_path / "changed").write_bytes(b"other")
    (tmp_path / "broken").write_bytes(b"no picture")
    rows = work([1, 2, 3]).to_pylist()
    for row, item, data in zip(rows, ("changed", "broken", "gone"), (b"one", b"no picture", b"x"), strict=True):
        row.update(item=item, digest=layout.digest(data))
    made = worker.image_records(
        LATENT,
        Unit("aa", 0, 3, 3),
        pa.Table.from_pylist(rows, schema=planning.IMAGES),
        {"s": source.FolderSource(tmp_path, "text")},
        None,
        max_pixels=100,
        workers=1,  # type: ignore[arg-type]
    )
    rejects = {reject.item: reject.retry for _, found in made for reject in found}
    assert rejects == {"changed": True, "broken": False, "gone": True}
