"""`bucket.balance`: samples of large clusters are visited less, the same on every machine."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import sana_pipe.stages.bucket
import sana_pipe.stages.encode
import sana_pipe.stages.pack
import sana_pipe.stages.report
from sana_pipe.base.errors import IntegrityError
from sana_pipe.config import Config
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.loader.planner import Planner
from sana_pipe.data.snapshots import balance
from tests.support.constants import set_constants
from tests.support.reports import collect

MakeConfig = Callable[..., Config]
Made = Callable[..., tuple[Snapshot, dict[str, Any]]]
MANY, FEW = 40, 5


@pytest.fixture(scope="module")
def source(made_once: Callable[..., Path]) -> Path:
    """Many dark pictures of one kind, and a few bright ones of another."""

    def make(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        rng = np.random.default_rng(0)
        for kind, count, level, caption in (
            ("product", MANY, 40, "a shoe on white"),
            ("drawing", FEW, 220, "ink lines"),
        ):
            for number in range(count):
                noise = rng.integers(-9, 9, (64, 64, 3))
                pixels = np.clip(level + noise, 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{kind}-{number:02}.png")
                (folder / f"{kind}-{number:02}.txt").write_text(f"{caption} {number}")

    return made_once("unbalanced", make)


@pytest.fixture(scope="module")
def cache(source: Path, make_config: MakeConfig, made_once: Callable[..., Path]) -> Path:
    return (
        made_once("balanced", lambda folder: sana_pipe.stages.encode.run(make_config(folder), data=str(source)))
        / "cache"
    )


@pytest.fixture
def bucket(cache: Path, make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Made:
    shutil.copytree(cache, tmp_path / "cache")

    def run(*options: str) -> tuple[Snapshot, dict[str, Any]]:
        of = make_config(tmp_path, "bucket.batch=5", *options)
        capsys.readouterr()
        made = sana_pipe.stages.bucket.run(of, as_json=True)
        return Cache(of.cache).open_snapshot(made), json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clusters."""
    set_constants(monkeypatch, {"sana_pipe.data.snapshots.balance.CLUSTERS": 2})


def visits(snapshot: Snapshot, steps: int) -> Counter[str]:
    planner, result = Planner(snapshot, seed=0, phase=0), Counter[str]()
    names = {snapshot.sample_id(row): snapshot.source_item(row)[1] for row in range(len(snapshot))}
    for step in range(steps):
        result.update(names[int(each)].partition("-")[0] for each in planner.step(step).sample_id)
    return result


@pytest.mark.parametrize("strength", [1.0, 0.5])
def test_what_is_rare_is_visited_more(bucket: Made, two: None, strength: float) -> None:
    snapshot, report = bucket(f"bucket.balance={strength}")
    [large, small] = report["balance"]
    assert (large["samples"], small["samples"]) == (MANY, FEW) and small["example"].endswith("drawing-00.png")
    wanted = [(MANY + FEW) * size**-strength / (MANY ** (1 - strength) + FEW ** (1 - strength)) for size in (MANY, FEW)]
    assert [large["visits"], small["visits"]] == pytest.approx(wanted, abs=1 / 16)
    assert large["share"] > large["share_of_visits"] and small["share"] < small["share_of_visits"]
    drawn = visits(snapshot, 900)
    assert drawn["drawing"] / drawn.total() == pytest.approx(small["share_of_visits"], abs=0.01)


def test_without_strength_every_sample_counts_the_same(bucket: Made) -> None:
    plain, _ = bucket()
    even, report = bucket("bucket.balance=0")
    assert {each["visits"] for each in report["balance"]} == {1.0}
    assert even.buckets == plain.buckets


def test_a_snapshot_is_the_same_again_and_packed(bucket: Made, make_config: MakeConfig, tmp_path: Path) -> None:
    first, _ = bucket("bucket.balance=0.5", "bucket.heldout=0.2")
    assert bucket("bucket.balance=0.5", "bucket.heldout=0.2")[0].id == first.id
    part = Cache(tmp_path / "cache").open_snapshot("latest.heldout")
    assert all(one.parts is None for one in part.buckets), "validation is not weighted"
    name = sana_pipe.stages.pack.run(make_config(tmp_path), first.id, "packed")
    packed = Cache(tmp_path / "cache").open_snapshot(name)
    assert [one.parts for one in packed.buckets] == [one.parts for one in first.buckets]


def test_clusters_do_not_depend_on_the_order_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    set_constants(monkeypatch, {"sana_pipe.data.snapshots.balance.CLUSTERS": 3})
    rng = np.random.default_rng(1)
    pooled = np.concatenate([rng.normal(middle, 1, (300, 8)) for middle in (0, 9, 30)])
    ids = rng.permutation(len(pooled)).astype(np.uint64)
    member, order = balance.clusters(pooled, ids), rng.permutation(len(pooled))
    assert (balance.clusters(pooled[order], ids[order]) == member[order]).all()
    assert [len(set(member[start : start + 300])) for start in (0, 300, 600)] == [1, 1, 1] and len(set(member)) == 3


def test_equal_vectors_are_one_cluster() -> None:
    member = balance.clusters(np.ones((50, 4)), np.arange(50, dtype=np.uint64))
    assert set(member.tolist()) == {0} and balance.weights(member, 1.0) == [Fraction(1)]


def test_weights_are_bounded() -> None:
    member = np.array([0] * 10_000 + [1])
    large, small = balance.weights(member, 1.0)
    assert (large, small) == (Fraction(1, 2), Fraction(8))


def test_a_damaged_latent_ends_bucket(cache: Path, make_config: MakeConfig, tmp_path: Path, source: Path) -> None:
    of = make_config(tmp_path, "bucket.balance=0.5")
    sana_pipe.stages.encode.run(of, data=str(source))
    path = next((tmp_path / "cache").glob("shards/latent-*/*/*.tar"))
    index = Cache(of.cache).index(Cache(of.cache).encodings("latent")[0].name)
    offset = next(
        int(o)
        for o, s in zip(index.columns["offset"], index.columns["shard"], strict=True)
        if index.shards[s] == path.stem
    )
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match="wrong checksum"):
        sana_pipe.stages.bucket.run(of)


def test_the_report_shows_what_is_visited_how_often(
    bucket: Made, two: None, make_config: MakeConfig, tmp_path: Path
) -> None:
    _, report = bucket("bucket.balance=1")
    of = make_config(tmp_path)
    few, many = collect(of)[0]["snapshot"]["visits"]
    assert [few["samples"], many["samples"]] == [FEW, MANY]
    assert [many["visits"], few["visits"]] == [each["visits"] for each in report["balance"]]
    assert few["share_of_visits"] == pytest.approx(report["balance"][1]["share_of_visits"])
    assert all(example["item"].startswith("drawing") for example in few["examples"]) and len(many["examples"]) == 8
    sana_pipe.stages.report.run(of, tmp_path / "page.html")
    assert "visits an epoch: 5 samples" in (tmp_path / "page.html").read_text()
