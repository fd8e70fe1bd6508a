"""`bucket --like`: the rules of a snapshot, used again on the data of today."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import sana_pipe.stages.bucket
import sana_pipe.stages.inspect
import sana_pipe.stages.snapshots
from sana_pipe import __version__
from sana_pipe.base.errors import CacheError, UserError
from sana_pipe.cli import cli
from sana_pipe.config import Config
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.snapshots.config import BucketConfig
from sana_pipe.data.snapshots.inputs import PLACES
from sana_pipe.data.snapshots.repeating import Rules
from tests.support.messages import naming
from tests.support.reports import collect
from tests.support.synthetic import Picture, add, config, pictures, with_another

RULES = (
    *("bucket.filter='score > 0'", "bucket.dedup=image", "bucket.dedup_captions=keep", "bucket.balance=0.5"),
    *("bucket.heldout=0.2", "bucket.group=tag", "bucket.batch=2", "bucket.remainder=drop", "bucket.subset=30"),
    *("bucket.sources={two: {weight: 0.5, filter: 'score < 6'}}", "data.max_crop_loss=0.3"),
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "cache"
    add(config(root), "one", pictures(60))
    add(config(root), "two", pictures(20, "two-"))
    return root


def report(of: Config, capsys: pytest.CaptureFixture[str], **options: Any) -> dict[str, Any]:
    capsys.readouterr()
    sana_pipe.stages.bucket.run(of, as_json=True, **options)
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_the_same_data_give_the_same_snapshot(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By a configuration that states none of the rules."""
    first = sana_pipe.stages.bucket.run(config(root, *RULES), name="one")
    assert sana_pipe.stages.bucket.run(config(root)) != first
    assert sana_pipe.stages.bucket.run(config(root), name="again", like="one") == first
    assert "nothing differs" in capsys.readouterr().out
    cache = Cache(root)
    assert cache.snapshot_of("again.heldout") == cache.snapshot_of("one.heldout")
    assert sana_pipe.stages.bucket.run(config(root), like=first[:12]) == first


def test_new_data_are_taken_by_the_same_rules_and_what_differs_is_said(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sana_pipe.stages.bucket.run(
        config(root, "bucket.filter='score > 0'", "bucket.sources={two: {weight: 0.5}}"), name="one"
    )
    cache = Cache(root)
    add(config(root), "one", pictures(70))
    add(config(root), "three", pictures(7, "three-"))
    assert report(config(root), capsys, like="one", dry_run=True)["like"] == {"name": "one"}
    shown = report(config(root), capsys, like="one", name="two")
    like = shown["like"]
    now, then = cache.open_snapshot("two"), cache.open_snapshot("one")
    assert (like["snapshot"], like["added"], like["removed"], like["changed"]) == (then.id, len(now) - len(then), 0, 0)
    assert shown["samples"] == sum(p.meta["score"] > 0 for p in [*pictures(70), *pictures(20), *pictures(7)])
    assert any("three" in line for line in like["why"]) and any("source one" in line for line in like["why"])
    assert now.head.options == then.head.options
    assert {part.weight for bucket in now.buckets for part in bucket.parts or ()} == {1, Fraction(1, 2)}
    sana_pipe.stages.bucket.run(config(root), like="one", name="three")
    out = capsys.readouterr().out
    assert f"{like['added']} added, 0 removed, 0 changed" in out and "sana-pipe snapshots diff one" in out


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--set", "bucket.batch=3"], "bucket.batch"),
        (["--set", "bucket.filter=null"], "bucket.filter"),
        (["--filter", "score > 1"], "bucket.filter"),
        (["--set", "bucket.sources={two: {weight: 2}}"], "bucket.sources.two"),
        (["--set", "bucket.sources.one.weight=2"], "bucket.sources.one.weight"),
        (["--set", "data.max_crop_loss=0.4"], "data.max_crop_loss"),
        (["--set", "bucket.tokens=4096"], "bucket.tokens"),
    ],
)
def test_a_contradiction_is_refused(root: Path, tmp_path: Path, words: list[str], option: str) -> None:
    of = config(root, *RULES)
    sana_pipe.stages.bucket.run(of, name="one")
    before = Cache(root).snapshot_of("latest")
    file = tmp_path / "file.yaml"
    file.write_text(of.model_dump_json())
    given = ["bucket", "--config", str(file), "--like", "one"]
    runner = CliRunner()
    result = runner.invoke(cli, [*given, *words])
    assert isinstance(result.exception, UserError), result.output
    assert option in str(result.exception) and "snapshots show one" in str(result.exception)
    assert Cache(root).snapshot_of("latest") == before
    for agrees in (["--set", "bucket.batch=2"], ["--filter", "score > 0"], ["--set", "bucket.pack_mib=8"]):
        assert runner.invoke(cli, [*given, *agrees]).exit_code == 0


def test_rules_of_a_file_that_are_not_used_are_noted(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sana_pipe.stages.bucket.run(config(root, "bucket.batch=2"), name="one")
    shown = report(config(root, "bucket.batch=8", "bucket.dedup=image"), capsys, like="one")
    noted = [note.partition(":")[0] for note in shown["notes"] if "one" in note]
    assert noted == ["bucket.batch", "bucket.dedup"]
    assert {row["batch"] for row in shown["buckets"]} == {2}


def test_every_rule_is_in_the_head(root: Path) -> None:
    """Every option of `bucket`, but for places of records, comes back as it was."""
    sana_pipe.stages.bucket.run(config(root, "bucket.subset=9"), name="first")
    given: dict[str, Any] = {
        "batch": 8,
        "tokens": 64,
        "batch_multiple": 4,
        "remainder": "drop",
        "sources": {"one": {"weight": 2.5, "filter": "score > 2", "repeats": False}},
        "filter": "score > 1",
        "dedup": "image",
        "dedup_captions": "keep",
        "dedup_keep": ["one: 00001.png"],
        "balance": 0.25,
        "heldout": 0.25,
        "group": "tag",
        "subset": 20,
        "grow": "first",
        "resolutions": [512, 1024],
        "metadata": str(root.parent / "scores.jsonl"),
        "metadata_key": "name",
    }
    Path(given["metadata"]).write_text('{"name": "00001.png", "quality": 1}\n')
    assert {*given, *PLACES} == set(BucketConfig.model_fields), "a new option: add it"
    options = {name: value for name, value in given.items() if name != "resolutions"}  # needs Sana's table
    sana_pipe.stages.bucket.run(
        config(root, *(f"bucket.{name}={json.dumps(value)}" for name, value in options.items())), name="x"
    )
    cache = Cache(root)
    rules = Rules.of(cache, "x")
    table = cache.open_snapshot("x").head.metadata
    expected = {**options, "grow": cache.snapshot_of("first"), "metadata": table}
    assert rules.bucket == BucketConfig(**expected)
    assert collect(config(root))[0]["snapshot"]["rules"] == rules.options
    assert rules.data.keys() == {"resolution", "buckets", "min_side", "max_upscale", "max_crop_loss"}


def test_a_rule_is_recorded_that_changes_nothing_yet(root: Path) -> None:
    """So that it is used when there are pictures that it leaves out."""
    plain = sana_pipe.stages.bucket.run(config(root), name="plain")
    ruled = sana_pipe.stages.bucket.run(config(root, "bucket.filter=pixels < 577"))
    cache = Cache(root)
    heads = [cache.open_snapshot(each).head for each in (plain, ruled)]
    assert plain != ruled and heads[0].content_id == heads[1].content_id
    assert sana_pipe.stages.bucket.run(config(root, "bucket.filter=pixels < 577")) == ruled, "the same rules"
    add(config(root), "large", [Picture(f"{n}.png", f"large {n}", 32, 32) for n in range(5)])
    assert len(cache.open_snapshot(sana_pipe.stages.bucket.run(config(root), like=ruled))) == heads[1].samples
    assert len(cache.open_snapshot(sana_pipe.stages.bucket.run(config(root), like="plain"))) == heads[0].samples + 5


def test_what_has_no_rules_of_its_own_is_refused(root: Path) -> None:
    of = config(root, "bucket.heldout=0.5")
    sana_pipe.stages.bucket.run(of, name="one")
    with pytest.raises(UserError, match=naming("--like one")):
        sana_pipe.stages.bucket.run(of, like="one.heldout")
    with pytest.raises(CacheError):
        sana_pipe.stages.bucket.run(of, like="nothing")


def test_a_source_that_is_gone_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Once in another cache that is not named, with a weight; named again, nothing differs."""
    both = with_another(tmp_path)
    weighted = both.model_copy(
        update={"bucket": BucketConfig(**{**both.bucket.model_dump(), "sources": {"two": {"weight": 2.0}}})}
    )
    first = sana_pipe.stages.bucket.run(weighted, name="one")
    shown = report(config(tmp_path / "here"), capsys, like="one")
    assert any("'two'" in note and "bucket.caches" in note for note in shown["notes"])
    assert (shown["like"]["removed"], shown["like"]["added"], shown["samples"]) == (60, 0, 10)
    again = report(both, capsys, like="one")
    assert again["content"] == Cache(tmp_path / "here").open_snapshot(first).head.content_id
    assert again["like"] | {"same_content": True, "added": 0, "removed": 0, "changed": 0} == again["like"]


def test_a_snapshot_says_since_when_it_has_a_name(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of its names the first; the time is no part of its id."""
    of, cache = config(root), Cache(root)
    first = sana_pipe.stages.bucket.run(of, name="one")
    named = cache.first_named(first)
    assert named is not None and named["version"] == __version__
    age = datetime.now(UTC) - datetime.fromisoformat(named["at"])
    assert timedelta(seconds=-1) < age < timedelta(minutes=10)
    later = cache.append(Paths.names("two"), {"name": "two", "snapshot": first, "by": "9"})
    os.utime(root / str(later), (4e9, 4e9))
    assert cache.first_named(first) == named and sana_pipe.stages.bucket.run(of) == first
    capsys.readouterr()
    sana_pipe.stages.snapshots.show(of, "two")
    sana_pipe.stages.inspect.run(of)
    shown = capsys.readouterr().out
    assert f"named here first: {named['at']}, by sana-pipe {__version__}" in shown and f"since {named['at']}" in shown
