"""Boundaries, ties, which of several comes first, missing values and counters that start anew."""

from __future__ import annotations

import dataclasses
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import sana_pipe.stages.bucket
from sana_pipe.base.errors import UserError
from sana_pipe.data.cache import codec, index, layout, shard
from sana_pipe.data.cache.cache import Cache, Unit, WorkList
from sana_pipe.data.cache.keys import as_keys
from sana_pipe.data.cache.scan_table import SCAN
from sana_pipe.data.cache.scratch import Scratch
from sana_pipe.data.cache.snapshot_head import BucketPart
from sana_pipe.data.encoding import plan as planning
from sana_pipe.data.encoding import scan as scanning
from sana_pipe.data.encoding import unit_records
from sana_pipe.data.encoding.config import EncodeConfig
from sana_pipe.data.encoding.last_scan import unchanged_row
from sana_pipe.data.encoding.scan import check_unique
from sana_pipe.data.images import buckets
from sana_pipe.data.signals.text import TextEncoding
from sana_pipe.data.snapshots import join, selection
from sana_pipe.data.snapshots.filters import Filter
from sana_pipe.data.snapshots.frames import Frame, FrameColumns
from sana_pipe.data.snapshots.join import ENCODE, Joined, Resolution, usable, without_policy
from sana_pipe.data.sources import caption_columns, sidecars, tars
from sana_pipe.data.sources.caption_columns import MAX_COLUMNS, CaptionCandidate, CaptionRule
from sana_pipe.data.sources.config import DataConfig
from sana_pipe.data.sources.folder import FolderSource
from sana_pipe.data.sources.reject_kinds import EXAMPLES, Kinds
from sana_pipe.data.work import engine
from tests.support.constants import constants, unit_sizes
from tests.support.lowered import lower_limits
from tests.support.messages import naming
from tests.support.source_files import listed, make_tar, opened
from tests.support.synthetic import LATENT, TABLE, Picture, add, config, pictures, text_encoding

RULE = CaptionRule(DataConfig(caption_scores={"text": "score"}))


# ---------------------------------------------------------------- captions and their scores


def drawn(*scored: tuple[str, float | None]) -> dict[str, float]:
    return dict(RULE.weigh([CaptionCandidate(text, 1.0, score) for text, score in scored], "a.png", "s")[0])


def test_a_score_at_the_threshold_passes_it() -> None:
    assert set(drawn(("at", 25.0), ("above", 30.0), ("below", 24.9), ("none", None))) == {"at", "above"}
    assert drawn(("at", 25.0), ("also", 25.0), ("below", 24.0)) == {"at": 1.0, "also": 1.0}
    assert drawn(("best", 24.0), ("equal", 24.0), ("worse", 23.0)) == {"best": 1.0}, "the first of equals, alone"


def test_scores_of_zero_and_below_and_equal_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drawn(("a", 0.0), ("b", 0.0)) == {"a": 1.0}
    monkeypatch.setattr(caption_columns, "SCORE_THRESHOLD", 0.0)
    assert drawn(("a", 0.0), ("b", 0.0)) == {"a": 1.0, "b": 1.0}
    assert RULE.read({"text": ["a"], "score": [-3]}).candidates == [CaptionCandidate("a", 1.0, 0.0)]
    plain = CaptionRule()
    for weights in ((1.0, 3.0), (3.0, 1.0)):
        assert plain.weigh([CaptionCandidate("same", weight) for weight in weights], "a.png", "s")[0] == (
            ("same", 3.0),
        )


def test_scores_from_elsewhere_go_before_those_of_the_row() -> None:
    result = RULE.read({"text": "a", "score": 1.0}, {"text": 2.0})
    assert [one.score for one in result.candidates] == [2.0]
    result = RULE.read({"text": "a", "score": 1.0}, {"text": 0.0})
    assert [one.score for one in result.candidates] == [0.0], "zero is a score, too"


def test_a_truth_is_no_score() -> None:
    result = RULE.read({"text": "a", "score": True})
    assert result.candidates == [CaptionCandidate("a")] and "not a number" in result.problems[0][1]


def test_texts_of_a_list_share_its_weight_and_empty_ones_have_none() -> None:
    assert CaptionRule().read({"text": ["a", " ", "b"]}).candidates == [
        CaptionCandidate("a", 0.5),
        CaptionCandidate("b", 0.5),
    ]
    raw = CaptionRule(raw=True).read({"text": [" a ", ""]}).candidates
    assert raw == [CaptionCandidate(" a ", 0.5), CaptionCandidate("", 0.5)]


def test_a_text_that_is_never_drawn_counts_once_and_not_where_it_is_drawn() -> None:
    scored = [("same", 30.0), ("same", 1.0), ("below", 1.0), ("below", 2.0)]
    captions, never = RULE.weigh([CaptionCandidate(text, 1.0, score) for text, score in scored], "a.png", "s")
    assert (captions, never) == ((("same", 1.0),), 1)


def test_a_table_wants_no_column_where_text_files_alone_are_listed() -> None:
    assert not CaptionRule(DataConfig(caption_weights={"txt": 1.0})).lacks_captions(["other"])
    assert CaptionRule().lacks_captions(["other"])


def test_as_many_columns_as_are_remembered_are_too_many_to_say_that_one_is_absent() -> None:
    config = DataConfig(caption_weights={"long": 1.0})
    CaptionRule(config, seen={str(n) for n in range(MAX_COLUMNS)}).check_seen()
    with pytest.raises(UserError, match=naming("'long'")):
        CaptionRule(config, seen={str(n) for n in range(MAX_COLUMNS - 1)}).check_seen()


def test_a_column_that_no_row_has_is_named_with_the_nearest() -> None:
    seen, weights = {"short", "long", "clip"}, {"long": 3.0, "short": 1.0}

    def rule(weights: dict[str, float], scores: dict[str, str]) -> CaptionRule:
        return CaptionRule(DataConfig(caption_weights=weights, caption_scores=scores), seen=seen)

    rule(weights, {"long": "clip"}).check_seen()
    with pytest.raises(UserError, match=naming("data.caption_weights", "'lnog'", "did you mean 'long'?")):
        rule({"lnog": 3.0, "short": 1.0}, {}).check_seen()
    with pytest.raises(UserError, match=naming("data.caption_scores", "'clpi'", "did you mean 'clip'?")):
        rule(weights, {"long": "clpi"}).check_seen()


def test_a_named_column_next_to_text_files_alone_is_an_error_and_the_default_is_not() -> None:
    CaptionRule(seen={"txt"}).check_seen()
    rule = CaptionRule(DataConfig(caption_field="caption"))
    rule.text_file("a cat")
    with pytest.raises(UserError, match=naming("data.caption_field", "'caption'", "txt", "leave it out")):
        rule.check_seen()


def test_a_caption_file_of_the_largest_size_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecars, "MAX_CAPTION_BYTES", 5)
    assert sidecars.read_sidecar("a.txt", b"abcde") == "abcde"
    assert isinstance(sidecars.read_sidecar("a.txt", b"abcdef"), sidecars.Reject)


def test_a_caption_in_a_tar_that_is_too_large_is_refused_and_not_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (sidecars, tars):
        monkeypatch.setattr(module, "MAX_CAPTION_BYTES", 5)
    members = [("0.png", b"p"), ("0.txt", "abcde"), ("1.png", b"p"), ("1.txt", "abcdef")]
    items, rejects = listed(opened(make_tar(tmp_path / "a.tar", members)))
    assert list(items) == ["a.tar/0.png"] and list(rejects) == ["a.tar/1.png"]


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


# ---------------------------------------------------------------- numbers


def test_ties_are_rounded_to_even() -> None:
    low = np.array([0x3F80, 0x3F81, 0x3F82, 0xBF81, 0x0000, 0x7F7E], np.uint32) << 16
    for tail in (0x7FFF, 0x8000, 0x8001):
        values = (low | tail).astype(np.uint32).view(np.float32)
        expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(codec.from_float(values), expected), hex(tail)
    tokens = np.array([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127.0]], np.float32)
    steps, quantised = codec.quantise(tokens, np.ones(8, np.float32))
    assert codec.to_float(steps).tolist() == [1.0]
    assert quantised.tolist() == [[127, 0, 2, 2, 0, -2, -2, -127]]


def test_a_nearly_silent_channel_has_a_floor() -> None:
    loud = np.array([[1024.0, 2.0**-30], [1024.0, 2.0**-30]], np.float32)
    scale = codec.to_float(codec.channel_scales(loud))
    assert scale.tolist() == [1024.0, 0.5], "1/1024 of the mean of 1024 and (nearly) 0"
    for value, limit in ((2.0**-120, 2.0**-100), (2.0**120, 2.0**100)):
        tokens = np.full((2, 2), value, np.float32)
        assert codec.to_float(codec.channel_scales(tokens)).tolist() == [limit] * 2


# ---------------------------------------------------------------- the index


def commit_records(cache: Cache, plan: int, unit: str, keys: list[int], adopted: bool, **rejected: Any) -> str | None:
    """Commit a unit with a record of each key as a plan of its own; returns the name of its shard."""
    table = pa.table({"key": pa.array([bytes([key] * 16) for key in keys], pa.binary(16))})
    assert cache.add_plan(LATENT.name, plan, [Unit(unit, 0, len(keys), 1)], table)
    rejects = tuple(
        index.RecordReject(bytes([int(key)] * 16).hex(), "item", "gone", retry) for key, retry in rejected.items()
    )
    stored = [key for key in keys if bytes([key] * 16).hex() not in {one.key for one in rejects}]
    how = {index.ADOPTED: "elsewhere"} if adopted else {}
    commit = index.Commit(unit, None, 0, 0, None, rejects, how)
    if stored:
        with shard.ShardWriter(cache.files, LATENT, unit) as writer:
            for key in stored:
                writer.add(bytes([key] * 16), np.full((4, 2, 3), plan, np.uint16))
            commit = index.commit_of(cache.files, unit, writer.finish(), rejects, how)
    assert index.publish_commit(cache.files, LATENT.name, plan, commit)
    return commit.shard


def holder(cache: Cache, key: int) -> str:
    result = cache.index(LATENT.name)
    row = int(result.find(as_keys([bytes([key] * 16)]))[0])
    assert row >= 0
    return result.shards[int(result.columns["shard"][row])]


def test_of_adopted_plans_the_first_counts_and_every_other_plan_before_them(tmp_path: Path) -> None:
    cache = Cache(tmp_path, create=True)
    first = commit_records(cache, 0, "aa", [1, 2], adopted=True)
    commit_records(cache, 1, "bb", [1, 2], adopted=True)
    commit_records(cache, 2, "cc", [1, 2], adopted=True)
    assert holder(cache, 1) == holder(cache, 2) == first
    name = commit_records(cache, 3, "dd", [2], adopted=False)
    assert holder(cache, 1) == first and holder(cache, 2) == name
    later = commit_records(cache, 4, "ee", [2], adopted=False)
    commit_records(cache, 5, "ff", [2], adopted=True)
    assert holder(cache, 2) == later


def test_of_several_indexes_the_first_counts(tmp_path: Path) -> None:
    indexes = []
    for number, keys in enumerate(([1, 2], [2, 3])):
        cache = Cache(tmp_path / str(number), create=True)
        for plan in range(number):
            commit_records(cache, plan, f"{plan}0", [9], adopted=False)
        commit_records(cache, number, "aa", keys, adopted=False)
        indexes.append(cache.index(LATENT.name))
    whole = index.RecordIndex.union(indexes)
    rows = whole.find(as_keys([bytes([key] * 16) for key in (1, 2, 3)]))
    assert [whole.caches[int(whole.columns["shard"][row])] for row in rows] == [0, 0, 1]


def test_a_segment_waits_for_exactly_the_units_of_its_plan(tmp_path: Path) -> None:
    cache = Cache(tmp_path, create=True)
    commit_records(cache, 0, "aa", [1], adopted=False)
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
    return work(keys).set_column(6, "height", sides[0]).set_column(7, "width", sides[1])


def planned(cache: Cache, keys: list[int], images: int = 1024, window: int = 65536) -> list[WorkList]:
    with constants(unit_sizes(images, 512, WINDOW=window)):
        return planning.plan_images(cache, LATENT, work(keys), EncodeConfig())


def test_a_failed_record_that_is_stored_since_is_not_planned_again(tmp_path: Path) -> None:
    cache = Cache(tmp_path, create=True)
    commit_records(cache, 0, "aa", [1, 2], adopted=False, **{"1": True})
    assert [plan.number for plan in planned(cache, [1, 2])] == [0, 1], "its cause may have passed"
    units = cache.plan(LATENT.name, 1).units
    assert sum(unit.count for unit in units) == 1
    assert len(planned(cache, [1, 2])) == 2, "a plan that has it and is not finished"
    gone = index.Commit(units[0].unit, None, 0, 0, None, (index.RecordReject("01" * 16, "1", "gone", True),), {})
    index.publish_commit(cache.files, LATENT.name, 1, gone)
    commit_records(cache, 2, "cc", [1], adopted=False)
    assert len(planned(cache, [1, 2])) == 3, "a third plan has stored it"


def test_only_causes_that_may_pass_are_tried_again(tmp_path: Path) -> None:
    cache = Cache(tmp_path, create=True)
    commit_records(cache, 0, "aa", [1, 2], adopted=False, **{"1": False})
    assert len(planned(cache, [1, 2])) == 1


def test_a_unit_is_as_large_as_it_may_be(tmp_path: Path) -> None:
    keys = list(range(1, 8))
    plans = planned(Cache(tmp_path / "a", create=True), keys, 3, 100)
    assert [unit.count for unit in plans[0].units] == [3, 3, 1]
    assert [unit.start for unit in plans[0].units] == [0, 3, 6]
    plans = planned(Cache(tmp_path / "b", create=True), keys, 100, 7)
    assert [unit.count for unit in plans[0].units] == [7]
    plans = planned(Cache(tmp_path / "c", create=True), keys, 100, 6)
    assert [unit.count for unit in plans[0].units] == [6, 1]
    for number, (height, counts) in enumerate(((4096, [1, 1, 1]), (2048, [2, 1]), (2040, [2, 1]), (8192, [1, 1, 1]))):
        cache = Cache(tmp_path / f"large{number}", create=True)  # 1 MiB a latent of 4096 x 2048
        with constants({"sana_pipe.data.encoding.plan.UNIT_BYTES": 1 << 20}):
            plans = planning.plan_images(cache, LATENT, large([1, 2, 3], height, 2048), EncodeConfig())
        assert [unit.count for unit in plans[0].units] == counts


def test_the_first_of_equal_pictures_is_the_one_that_is_read() -> None:
    rows = [
        {"item": item, "digest": layout.digest(content), "width": 24, "height": 24, "captions": []}
        for item, content in (("b", "x"), ("a", "x"), ("c", "y"), ("d", "x"))
    ]
    result = planning.image_work(pa.Table.from_pylist(rows, schema=SCAN), "s", LATENT, TABLE)
    assert result.column("item").to_pylist() == ["b", "c"]


def test_the_null_record_is_a_unit_and_captions_stand_by_length(tmp_path: Path) -> None:
    texts = ["ccc", None, "", "a", "bb"]
    rows = [{"key": bytes([n] * 16), "caption": text} for n, text in enumerate(texts)]
    work = pa.Table.from_pylist(rows, schema=planning.CAPTIONS)
    cache = Cache(tmp_path, create=True)
    encoding = TextEncoding(weights="w", width=6)
    with constants(unit_sizes(1024, 3)):
        [plan] = planning.plan_captions(cache, encoding, work, EncodeConfig())
    captions = cache.table(plan.table).column("caption").to_pylist()
    units = [captions[unit.start : unit.start + unit.count] for unit in plan.units]
    assert units == [[None], ["", "a", "ccc"], ["bb"]]


def test_units_of_the_same_keys_in_another_plan_have_other_names(tmp_path: Path) -> None:
    cache = Cache(tmp_path, create=True)
    [plan] = planned(cache, [1])
    away = index.Commit(plan.units[0].unit, None, 0, 0, None, (index.RecordReject("01" * 16, "1", "gone", True),), {})
    index.publish_commit(cache.files, LATENT.name, 0, away)
    _, again = planned(cache, [1])
    assert again.units[0].unit != plan.units[0].unit


def test_a_record_that_failed_for_good_is_neither_new_nor_there(tmp_path: Path) -> None:
    cache = Cache(tmp_path, create=True)
    commit_records(cache, 0, "aa", [1, 2, 3], adopted=False, **{"1": True, "2": False})
    assert planning.count_missing(cache, LATENT, work([1, 2, 3, 4])) == (2, 1)


def test_records_of_a_lost_shard_are_planned_again(tmp_path: Path) -> None:
    cache = Cache(tmp_path, create=True)
    lost = commit_records(cache, 0, "aa", [1, 2], adopted=False)
    commit_records(cache, 1, "bb", [3], adopted=False)
    assert lost is not None
    cache.files.remove(layout.Paths.shard(LATENT.name, lost))
    plans = planned(cache, [1, 2, 3])
    assert [unit.count for plan in plans[2:] for unit in plan.units] == [2]


# ---------------------------------------------------------------- encoding


def test_a_batch_that_does_not_fit_is_halved_and_counted() -> None:
    calls: list[int] = []
    limits = unit_records.Limits()

    def encode(inputs: list[int]) -> list[np.ndarray]:
        calls.append(len(inputs))
        if len(inputs) > 3:
            raise MemoryError
        return [np.array([one]) for one in inputs]

    assert [int(a[0]) for a in unit_records.encode_finite(list(range(7)), encode, limits) if a is not None] == list(
        range(7)
    )
    assert calls == [7, 4, 2, 2, 3], "the first half is the larger one"
    assert unit_records.provenance(limits.halved)["halved_batches"] == 2
    calls.clear()
    unit_records.encode_finite(list(range(3)), encode, limits)
    assert calls == [3] and limits.halved == 2


def test_captions_are_halved_batch_by_batch(tmp_path: Path) -> None:
    """The next ones may be shorter."""
    calls: list[int] = []

    class Encoder:
        def encode(self, texts: list[str]) -> list[np.ndarray]:
            calls.append(len(texts))
            if sum(map(len, texts)) > 8:
                raise MemoryError
            return [np.zeros((1, 3), np.uint16) for _ in texts]

    rows = pa.table(
        {"key": pa.array([bytes([i] * 16) for i in range(8)], pa.binary(16)), "caption": ["long"] * 4 + ["a"] * 4}
    )
    limits, unit = unit_records.Limits(), Unit("u", 0, 8, 4)
    encoding = text_encoding(config(tmp_path / "cache"))
    made = list(unit_records.caption_records(encoding, unit, rows, Encoder(), limits=limits))  # type: ignore[arg-type]
    assert [len(records) for records, _ in made] == [4, 4]
    assert calls == [4, 2, 2, 4] and limits.halved == 1


def test_the_batch_that_fits_is_searched_once_per_size_of_picture() -> None:
    """Later batches are divided as the first one was, without a failure."""
    calls: list[tuple[int, int]] = []

    def encode(pictures: list[np.ndarray]) -> list[np.ndarray]:
        calls.append((len(pictures), pictures[0].size))
        if len(pictures) * pictures[0].size > 30:
            raise MemoryError
        return pictures

    limits = unit_records.Limits()
    for turn in range(2):
        for size in (10, 4):
            calls.clear()
            made = unit_records.encode_finite([np.full(size, i) for i in range(8)], encode, limits)
            assert [int(a[0]) for a in made if a is not None] == list(range(8))
            failed = {10: [8, 4], 4: [8]}[size] if turn == 0 else []
            fits = {10: [2, 2, 2, 2], 4: [4, 4]}[size]
            assert [count for count, _ in calls] == failed + fits, (turn, size)
    assert limits.halved == 2 * (3 + 1)


def test_every_unit_is_some_tasks_and_stays_it() -> None:
    todo = [(WorkList("r", 0, (), ""), Unit(f"{n * 2654435761 % 2**32:08x}", 0, 1, 1)) for n in range(50)]
    shares = [[item for item in todo if engine.in_share(item[1].unit, task, 3)] for task in range(3)]
    assert sorted(unit.unit for part in shares for _, unit in part) == sorted(unit.unit for _, unit in todo)
    assert [sum(engine.in_share(unit.unit, task, 3) for task in range(3)) for _, unit in todo] == [1] * 50


# ---------------------------------------------------------------- selection


def with_meta(*meta: dict[str, Any]) -> pa.Table:
    rows = [{"item": str(n), "meta": json.dumps(one)} for n, one in enumerate(meta)]
    return pa.Table.from_pylist(rows, schema=SCAN)


def test_an_item_is_left_out_by_the_first_filter_alone() -> None:
    scan = with_meta({"s": 1}, {"s": 1, "c": 0}, {"s": 5}, {"s": 5, "c": 0}, {"s": 5, "c": 2}, {"c": 2}, {})
    joined = Joined()
    selected = selection.filtered(joined, {"one": scan}, Filter("s > 3", "all"), {"one": Filter("c > 1", "own")})
    assert selected["one"].column("item").to_pylist() == ["4"]
    assert joined.left_out == {
        "not selected by all: s > 3": 2,
        "all cannot be decided, a value is missing: s > 3": 2,
        "not selected by own: c > 1": 1,
        "own cannot be decided, a value is missing: c > 1": 1,
    }


def test_a_column_of_other_sources_is_none_for_the_filter_of_a_source() -> None:
    scans = {"one": with_meta({"c": "ab"}), "two": with_meta({"d": 1}), "three": with_meta({"c": None})}
    with pytest.raises(UserError, match=naming("'c'")):
        selection.filtered(Joined(), scans, Filter("c IS NULL OR c > ''", "all"), {"two": Filter("c > ''", "own")})
    selected = selection.filtered(Joined(), scans, Filter("starts_with(c, 'a')", "all"), {})
    assert {source: len(scan) for source, scan in selected.items()} == {"one": 1, "two": 0, "three": 0}


@pytest.mark.parametrize("lowered", [False, True])
def test_columns_have_one_type_in_all_of_a_source(monkeypatch: pytest.MonkeyPatch, lowered: bool) -> None:
    """Numbers of some items are text in others; the first item decides nothing, and no item gets another reason."""
    if lowered:
        lower_limits(monkeypatch)
    scan = with_meta({"c": 1}, {"c": 2, "n": 10**400}, {}, {"c": "3"}, {"n": 4.5}, {"c": None, "n": 5}, {"c": "x"})
    joined = Joined()
    everything = {"one": scan, "none": scan.slice(0, 0)}
    selected = selection.filtered(joined, everything, Filter("c < 'w' OR n BETWEEN 4 AND 9", "f"), {})
    assert selected["one"].column("item").to_pylist() == ["0", "1", "3", "4", "5"] and not len(selected["none"])
    assert joined.left_out == {"f cannot be decided, a value is missing: c < 'w' OR n BETWEEN 4 AND 9": 2}
    for value in ([1], True, {"x": 1}):
        scans = {"one": with_meta({"n": 1}, {}, {}, {"n": value}), "b": with_meta({"n": value})}
        with pytest.raises(UserError):
            selection.filtered(Joined(), scans, Filter("n > 1", "f"), {})


def test_text_is_a_number_only_where_it_is_one_in_every_source() -> None:
    """One condition means the same in all sources, so far as it can."""
    scans = {"one": with_meta({"c": "7"}, {"c": "12"}), "two": with_meta({"c": "x"})}
    selected = selection.filtered(Joined(), scans, Filter("c > '2'", "f"), {})
    assert [selected[source].column("item").to_pylist() for source in scans] == [["0"], ["0"]], "compared as text"
    selected = selection.filtered(Joined(), {"one": scans["one"]}, Filter("c > '2'", "f"), {})
    assert selected["one"].column("item").to_pylist() == ["0", "1"], "compared as numbers"


def test_large_identifiers_are_compared_exactly() -> None:
    scan = with_meta({"id": 2**62 + 1}, {"id": 2**62 + 2})
    selected = selection.filtered(Joined(), {"one": scan}, Filter(f"id = {2**62 + 2}", "f"), {})
    assert selected["one"].column("item").to_pylist() == ["1"]


def test_a_field_that_differs_from_a_column_in_case_is_that_field() -> None:
    scan = with_meta({"Source": "x"}, {"Source": "y"})
    selected = selection.filtered(Joined(), {"one": scan}, Filter("Source = 'y'", "f"), {})
    assert selected["one"].column("item").to_pylist() == ["1"]
    with pytest.raises(UserError, match=naming("differ in case only", "write meta.Source")):
        selection.filtered(Joined(), {"one": scan}, Filter("Source = 'y' AND item = '1' AND source = 'one'", "f"), {})


def test_a_field_is_no_value_and_object_at_once() -> None:
    scan = with_meta({"a": [1]})
    with pytest.raises(UserError, match="as a value and as an object"):
        selection.filtered(Joined(), {"one": scan}, Filter('a IS NULL OR a."0" = 1', "f"), {})


def test_the_value_that_a_filter_cannot_use_is_shown() -> None:
    scan, joined = with_meta({"n": 4.5}, {"n": "many"}, {"n": 3}, {"n": [7]}), Joined()
    selected = selection.filtered(joined, {"one": scan}, Filter("n > 1", "f"), {})
    assert selected["one"].column("item").to_pylist() == ["0", "2"]
    [note] = joined.notes
    assert "2 of 4" in note and "'1'" in note and "many" in note
    with pytest.raises(UserError, match=naming("'n'", "[7]", "'3'")):
        selection.filtered(Joined(), {"one": scan.slice(2)}, Filter("n > 1", "f"), {})


def test_rejects_of_several_sources_have_as_many_examples_as_those_of_one() -> None:
    joined = Joined()
    for prefix in "ab":
        rejects = [(f"{prefix}{n}", "broken") for n in range(EXAMPLES - 1)]
        joined.leave_kinds("rejected", Kinds.of(rejects), lambda kind: "mend it")
    assert joined.examples == {"rejected: broken": [*(f"a{n}" for n in range(EXAMPLES - 1)), "b0"]}
    assert joined.left_out == {"rejected: broken": 2 * (EXAMPLES - 1)}


def test_the_first_half_of_a_digest_decides_what_is_held_out() -> None:
    low, high = bytes(7) + b"\x01", b"\xff" * 8
    frame = dataclasses.replace(Joined().frame(), digest=np.array([low + high, high + low], "S16"))
    assert selection.heldout(frame.digest, 0.5).tolist() == [True, False]


def test_frames_are_joined_whose_names_are_parts_of_other_columns(tmp_path: Path) -> None:
    columns = FrameColumns(Scratch(), ["latent"])
    names = pa.array(["first", "", "bird", "c", "ü"], pa.large_string())
    for part in (names.slice(1, 3), names.slice(0, 0), names.slice(3), names):
        columns.add(dataclasses.replace(frame_of(np.zeros(len(part), int), [""] * len(part)), item=part))
    assert columns.frame().item.to_pylist() == ["", "bird", "c", "c", "ü", *names.to_pylist()]


def frame_of(bucket: np.ndarray, items: list[str]) -> Frame:
    """Samples of one source and digest by their buckets, which may be of several tables."""
    count, sides = len(bucket), np.array(TABLE)[bucket % len(TABLE)]
    return Frame(
        source=np.zeros(count, np.int32),
        item=pa.array(items, pa.large_string()),
        sample_id=np.arange(count, dtype=np.uint64),
        picture_id=np.arange(count, dtype=np.uint64),
        digest=np.full(count, b"1" * 16),
        height=sides[:, 0],
        width=sides[:, 1],
        bucket=bucket,
        cluster=np.zeros(count, np.int64),
        pictures={"latent": np.arange(count)},
        captions=np.arange(count + 1),
        text=np.zeros(count, np.int64),
        weight=np.ones(count, np.float32),
        group=np.zeros(count, "S16"),
    )


# ---------------------------------------------------------------- buckets


def test_a_bucket_of_exactly_one_batch_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = {(16, 32): 4, (16, 24): 3}
    many = [
        dataclasses.replace(p, height=shape[0], width=shape[1])
        for p, shape in zip(pictures(7), [s for s, n in shapes.items() for _ in range(n)], strict=True)
    ]
    of = config(tmp_path / "cache", "bucket.remainder=drop")
    add(of, "one", many)
    snapshot = Cache(of.cache).open_snapshot(sana_pipe.stages.bucket.run(of))
    assert [(b.height, b.width, b.samples) for b in snapshot.buckets] == [(16, 32, 4)]
    keep = "(keep them: bucket.remainder=carry, or a smaller bucket.batch)"
    reason = f"bucket 16x24 has fewer samples than one batch of 4 {keep}"
    assert snapshot.head.left_out == {reason: 3}, "reasons are part of a snapshot's id"
    capsys.readouterr()
    for small in ("drop", "carry"):
        settings = config(tmp_path / "cache", f"bucket.remainder={small}")
        sana_pipe.stages.bucket.run(settings, dry_run=True, as_json=True)
        notes = {row["samples"]: row["note"] for row in json.loads(capsys.readouterr().out)["buckets"]}
        assert notes[4] == "" and notes[3]


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
    snapshot = Cache(of.cache).open_snapshot(sana_pipe.stages.bucket.run(of))
    weights = {
        snapshot.source_item(row)[1]: [caption.weight for caption in snapshot.sample(row).captions]
        for row in range(len(snapshot))
    }
    assert weights == {one.item: [1.0], two.item: [1.0, 0.5]}


def test_a_sample_that_lacks_one_of_two_captions_stays_and_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of = config(tmp_path / "cache")
    both = (("a", 1.0), ("b", 1.0))
    cache = add(of, "one", [dataclasses.replace(one, captions=both) for one in pictures(3)])
    body = cache.last_scan("one")
    assert body is not None
    rows = cache.table(body["table"]).to_pylist()
    rows[0]["captions"][1]["text"] = "never encoded"
    rows[1]["captions"] = []
    cache.add_scan("one", {**body, "table": cache.put_table(pa.Table.from_pylist(rows, schema=SCAN))})
    snapshot = cache.open_snapshot(sana_pipe.stages.bucket.run(of))
    (lacks, one), (none, other) = sorted(snapshot.head.left_out.items())
    assert (len(snapshot), one, other) == (2, 1, 1)
    assert "one of several captions" in lacks and none.startswith("its caption is not encoded")
    for line in (line for line in capsys.readouterr().out.splitlines() if "not encoded" in line):
        assert ENCODE in line, "what would add the caption"


def test_the_reject_of_a_second_caption_is_the_reason_where_the_first_is_absent(tmp_path: Path) -> None:
    of = config(tmp_path / "cache")
    cache, text = add(of, "one", pictures(2)), text_encoding(of)
    key, plan = text.key("bad"), len(cache.plans(text.name))
    cache.add_plan(text.name, plan, [Unit("ff", 0, 1, 1)], pa.table({"key": pa.array([key], pa.binary(16))}))
    reject = index.RecordReject(key.hex(), "bad", "not finite")
    index.publish_commit(cache.files, text.name, plan, index.Commit("ff", None, 0, 0, None, (reject,), {}))
    body = cache.last_scan("one")
    assert body is not None
    rows = cache.table(body["table"]).to_pylist()
    rows[0]["captions"] = [{"text": text, "weight": 1.0} for text in ("never encoded", "bad")]
    cache.add_scan("one", {**body, "table": cache.put_table(pa.Table.from_pylist(rows, schema=SCAN))})
    head = cache.open_snapshot(sana_pipe.stages.bucket.run(of)).head
    assert head.left_out == {"caption rejected while encoding: not finite": 1}


def shaped(count: int, prefix: str, height: int, width: int) -> list[Picture]:
    return [dataclasses.replace(one, height=height, width=width) for one in pictures(count, prefix)]


def test_a_bucket_without_samples_of_a_weight_has_no_part_for_it(tmp_path: Path) -> None:
    of = config(tmp_path / "cache", "bucket.sources={one: {weight: 2}}")
    add(of, "one", shaped(4, "one-", 16, 24))
    cache = add(of, "two", shaped(5, "two-", 16, 32))
    result = {bucket.width: bucket.parts for bucket in cache.open_snapshot(sana_pipe.stages.bucket.run(of)).buckets}
    assert result == {24: (BucketPart(4, Fraction(2)),), 32: None}


def test_growth_keeps_parts_together_and_old_samples_first_in_each(tmp_path: Path) -> None:
    root, weights = tmp_path / "cache", "bucket.sources={two: {weight: 2}, three: {weight: 2}}"
    add(config(root), "one", [*shaped(3, "few-", 16, 24), *shaped(8, "one-", 16, 32)])
    drop = ("bucket.remainder=drop", "bucket.batch=4")
    cache = Cache(root)
    old = cache.open_snapshot(sana_pipe.stages.bucket.run(config(root, *drop), name="old"))
    add(config(root), "three", shaped(8, "three-", 16, 32))
    three = {layout.sample_id("three", one.item) for one in pictures(8, "three-")}
    weighted = config(root, *drop, "bucket.grow=old", "bucket.sources={three: {weight: 2}}")
    sana_pipe.stages.bucket.run(weighted, name="middle")
    add(config(root), "two", shaped(8, "two-", 16, 32))
    grown = cache.open_snapshot(sana_pipe.stages.bucket.run(config(root, *drop, "bucket.grow=middle", weights)))
    result = [grown.sample_id(row) for row in range(len(grown))]
    assert result[16:] == [old.sample_id(row) for row in range(8)], "their weight is the smaller one"
    assert set(result[:8]) == three
    plain = config(root, *drop, "bucket.grow=old")
    grown = cache.open_snapshot(sana_pipe.stages.bucket.run(plain))
    assert [grown.sample_id(row) for row in range(8)] == [old.sample_id(row) for row in range(8)]


def test_what_would_keep_a_reject_of_the_scan() -> None:
    joined = Joined()
    rejects = ["is smaller than data.min_side", "is broken"]
    rows = [{"item": f"{n}.png", "reject": why} for n, why in enumerate(rejects)]
    usable(joined, pa.Table.from_pylist(rows, schema=SCAN))
    remedies = {reason.rpartition(": ")[2]: keep for reason, keep in joined.keep.items()}
    assert remedies == {rejects[0]: f"change that setting and {ENCODE}", rejects[1]: f"fix the file and {ENCODE}"}


def test_what_a_policy_left_out_is_judged_again_and_what_cannot_be_read_is_not() -> None:
    rows = [{"item": "small", "width": 8, "reject": "too small"}, {"item": "bad", "reject": "broken"}, {"item": "good"}]
    assert without_policy(pa.Table.from_pylist(rows, schema=SCAN)).column("reject").to_pylist() == [
        None,
        "broken",
        None,
    ]


def test_limits_of_a_policy_are_allowed_themselves() -> None:
    data = config(Path("x"), "data.min_side=24", "data.max_upscale=2", "data.max_crop_loss=0.5").data
    assert buckets.refusal(24, 24, (48, 48), data) is None
    assert buckets.refusal(23, 24, (24, 24), data) is not None
    assert buckets.refusal(24, 24, (48, 49), data) is not None
    assert buckets.refusal(24, 48, (24, 24), data) is None, "half of it is cropped"
    assert buckets.refusal(24, 49, (24, 24), data) is not None


@pytest.mark.parametrize("limit", ["min_side=24", "max_upscale=2", "max_crop_loss=0.5"])
def test_each_limit_of_a_policy_leaves_out_what_is_beyond_it(limit: str) -> None:
    data = config(Path("x"), f"data.{limit}").data
    sizes = {"just.png": (24, 48), "beyond.png": (23, 48) if "crop" not in limit else (24, 49)}
    rows = [{"item": item, "height": height, "width": width} for item, (height, width) in sizes.items()]
    joined, table = Joined(), [(24, 24)] if "crop" in limit else [(48, 96)]
    allowed = join.allowed(
        joined, pa.Table.from_pylist(rows, schema=SCAN), Resolution(table, variant="small", policy=data)
    )
    assert allowed.column("item").to_pylist() == ["just.png"]
    [(reason, count)] = joined.left_out.items()
    assert (count, joined.keep[reason]) == (1, "change that setting")
    assert reason.startswith("at small px ") and limit.partition("=")[0] in reason


def test_a_row_is_known_by_its_size_and_its_time() -> None:
    row = {"size": 1, "mtime_ns": 2}
    assert unchanged_row(row, 1, 2) is row
    assert unchanged_row(row, 1, 3) is None and unchanged_row(row, 2, 2) is None and unchanged_row(None, 1, 2) is None


@pytest.mark.parametrize("lowered", [False, True])
def test_items_with_the_same_sample_id_are_refused(monkeypatch: pytest.MonkeyPatch, lowered: bool) -> None:
    if lowered:
        lower_limits(monkeypatch)
    items = [f"{n}.jpg" for n in range(20)]
    table = pa.Table.from_pylist([{"item": item, "reject": "bad" if item == "3.jpg" else None} for item in items], SCAN)
    same = {"3.jpg": 5, "4.jpg": 5, "17.jpg": 5}

    def ids(source: str, some: pa.Array) -> np.ndarray:
        return np.array([same.get(item, layout.sample_id(source, item)) for item in some.to_pylist()], np.uint64)

    monkeypatch.setattr(scanning, "sample_ids", ids)
    with pytest.raises(UserError) as caught:
        check_unique("photos", table, Scratch())
    assert "4.jpg" in caught.value.what and "17.jpg" in caught.value.what and "'3.jpg'" not in caught.value.what
    check_unique("photos", table.slice(0, 17), Scratch())


def test_unit_documents_tell_what_may_pass() -> None:
    reject = index.RecordReject("00" * 16, "item", "gone", retry=True)
    body = json.loads(json.dumps(index.Commit("aa", None, 0, 0, None, (reject,), {}).body()))
    assert index.Commit.from_body(body).rejects == (reject,)


def test_which_causes_may_pass(tmp_path: Path) -> None:
    (tmp_path / "changed").write_bytes(b"other")
    (tmp_path / "broken").write_bytes(b"no picture")
    rows = work([1, 2, 3]).to_pylist()
    for row, item, data in zip(rows, ("changed", "broken", "gone"), (b"one", b"no picture", b"x"), strict=True):
        row.update(item=item, digest=layout.digest(data))
    made = unit_records.image_records(
        LATENT,
        Unit("aa", 0, 3, 3),
        pa.Table.from_pylist(rows, schema=planning.IMAGES),
        {"s": FolderSource(tmp_path, "text")},
        None,
        max_pixels=100,
        workers=1,  # type: ignore[arg-type]
    )
    rejects = {reject.item: reject.retry for _, result in made for reject in result}
    assert rejects == {"changed": True, "broken": False, "gone": True}
