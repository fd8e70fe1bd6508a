"""`sana-pipe bucket` and `snapshots`: which samples are taken, which are left out and counted, how they are batched."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any
from uuid import uuid4

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner

import sana_pipe.stages.bucket
import sana_pipe.stages.encode
import sana_pipe.stages.pack
import sana_pipe.stages.snapshots
from sana_pipe.base.errors import CacheError, ConfigError, IntegrityError, UserError
from sana_pipe.cli import cli
from sana_pipe.config import Config
from sana_pipe.data.cache import audit, compare, index, layout
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.files import Files
from sana_pipe.data.cache.garbage import unneeded
from sana_pipe.data.cache.keys import as_keys, item_keys, key_bytes, sample_ids
from sana_pipe.data.cache.shard import from_ipc, to_ipc
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.cache.snapshot_head import BucketPart
from sana_pipe.data.cache.snapshot_lists import publish
from sana_pipe.data.cache.status import status
from sana_pipe.data.images import buckets
from sana_pipe.data.loader.loader import Loader
from sana_pipe.data.loader.planner import Planner
from sana_pipe.data.loader.schedule import Schedule
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.signals.text import TextEncoding
from sana_pipe.data.snapshots import assemble, filters, frames, selection
from sana_pipe.tools.locations import cache_location
from tests.support import synthetic
from tests.support.damage import flip
from tests.support.loading import loader_settings
from tests.support.lowered import lower_limits
from tests.support.messages import naming
from tests.support.reports import collect
from tests.support.synthetic import Picture, add, config, pictures, with_another


def made(of: Config, name: str | None = None) -> Snapshot:
    snapshot_id = sana_pipe.stages.bucket.run(of, name=name)
    return Cache(of.cache).open_snapshot(snapshot_id)


def items(snapshot: Snapshot) -> set[str]:
    return {"/".join(snapshot.source_item(row)) for row in range(len(snapshot))}


def report(of: Config, capsys: pytest.CaptureFixture[str], **options: Any) -> dict[str, Any]:
    capsys.readouterr()
    sana_pipe.stages.bucket.run(of, as_json=True, **options)
    return json.loads(capsys.readouterr().out)


def files(root: Path) -> dict[str, int]:
    return {str(p.relative_to(root)): p.stat().st_mtime_ns for p in root.rglob("*") if p.is_file()}


def batches(of: Config, steps: int) -> list[list[int]]:
    """Sample ids of the first steps, through the real loader: every byte is read and verified."""
    loader = Loader(
        Cache(of.cache).open_snapshot(),
        loader_settings(microbatch=64, stop_step=steps),
    )
    return [[i for batch in parts for i in batch.sample_ids] for parts, _ in loader]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of six pictures, for commands that write nothing."""
    place = tmp_path_factory.mktemp("six") / "cache"
    add(config(place), "one", pictures(6))
    return place


# ---------------------------------------------------------------- joining


def test_snapshots_come_out_the_same(root: Path) -> None:
    """Ids written down: same rows, same bytes, same heads."""
    one = pictures(130)
    one[5] = dataclasses.replace(one[5], reject="broken")
    add(config(root), "one", one, without=["00007.png"])
    add(config(root), "two", pictures(60, "two-"))
    assert sana_pipe.stages.bucket.run(config(root)) == "845c3baaff68cc36fffbf69aa0667b9e"
    dropped = config(root, "bucket.remainder=drop", "bucket.batch=16")
    assert sana_pipe.stages.bucket.run(dropped, name="dropped") == "a527b2595c1f065e6b897af5f16b1bb4"


@pytest.mark.parametrize("where", ["here", "there"])
def test_a_dry_run_ends_as_the_real_one_where_a_shard_is_lost(tmp_path: Path, where: str) -> None:
    of = with_another(tmp_path)
    sana_pipe.stages.bucket.run(of, dry_run=True)
    min((tmp_path / where).glob("shards/latent-*/*/*.tar")).unlink()
    for dry_run in (True, False):
        with pytest.raises(IntegrityError):
            sana_pipe.stages.bucket.run(of, dry_run=dry_run)


def test_every_sample_has_its_own_latent_and_captions(root: Path) -> None:
    """Row by row against an oracle that knows one picture at a time."""
    of = config(root)
    all_of = [*pictures(70), Picture("last.png", "last", 16, 32, (("x", 2.0), ("X ", 1.0), ("y", 0.5)))]
    cache = add(of, "one", all_of)
    opened = made(of)
    latents, texts, text = (
        cache.index(synthetic.LATENT.name),
        cache.index(opened.encoding(TextEncoding).name),
        opened.encoding(TextEncoding),
    )
    known = {layout.sample_id("one", p.item): p for p in all_of}
    assert len(opened) == len(all_of)
    for row in range(len(opened)):
        sample = opened.sample(row)
        place = sample.pictures["latent"]
        picture = known[sample.sample_id]
        assert opened.source_item(row) == ("one", picture.item)
        size = buckets.nearest(synthetic.TABLE, picture.height, picture.width)
        bucket = opened.buckets[sample.bucket]
        assert (bucket.height, bucket.width) == size
        assert place.key == synthetic.LATENT.key(layout.digest(picture.content), *size)
        at = int(latents.find(as_keys([place.key]))[0])
        assert place.shard == latents.shards[latents.columns["shard"][at]]
        assert place.offset == latents.columns["offset"][at]
        assert len(sample.captions) == len(picture.texts)
        for caption, (written, weight) in zip(sample.captions, picture.texts, strict=True):
            assert caption.key == text.key(written.lower().strip())
            at = int(texts.find(as_keys([caption.key]))[0])
            assert caption.shard == texts.shards[texts.columns["shard"][at]]
            assert (caption.rows, caption.weight) == (texts.columns["valid"][at], np.float32(weight))
    read = [i for batch in batches(of, 10) for i in batch]
    assert len(read) == len(set(read)) == 40


def test_a_snapshot_names_only_shards_that_it_needs(root: Path) -> None:
    cache = [add(config(root), source, pictures(30, f"{source}-")) for source in ("one", "two")][-1]
    opened = made(config(root, "bucket.sources={one: {weight: 0}}"))
    samples = [opened.sample(row) for row in range(len(opened))]
    assert {sample.pictures["latent"].shard for sample in samples} == set(opened.shards["latent"])
    assert len(opened.shards["latent"]) < len(cache.index(synthetic.LATENT.name).shards)


def test_many_keys_are_the_keys_of_each() -> None:
    digests, sizes = [layout.digest(str(i)) for i in range(9)], [(16, 24), (512, 2048)]
    which = np.arange(9) % 2
    latents = synthetic.LATENT.keys(as_keys(digests), sizes, which)
    each = [synthetic.LATENT.key(d, *sizes[i]) for d, i in zip(digests, which, strict=True)]
    assert latents.tobytes() == b"".join(each)
    words = ["", "a cat", "é 日本", "x" * 500]
    keys = b"".join(TextEncoding().key(w) for w in words)
    for kind in (pa.string(), pa.large_string()):
        column = pa.array(["left out", *words], kind)[1:]
        assert TextEncoding().keys(column).tobytes() == keys
        ids = [layout.sample_id("photos", word) for word in words]
        assert sample_ids("photos", column).tolist() == ids
    assert item_keys(words).tobytes() == b"".join(bytes.fromhex(layout.content_digest(word.encode())) for word in words)
    of_variant = layout.digest("sample", "photos", "a cat", "512")[:8]
    assert sample_ids("photos", pa.array(["a cat"]), "512").tobytes() == of_variant


# ---------------------------------------------------------------- filters


@pytest.mark.parametrize(
    ("expression", "selected"),
    [
        ("score > 3", lambda p: p.meta["score"] > 3),
        ("score BETWEEN 3 AND 4", lambda p: 3 <= p.meta["score"] <= 4),
        ("tag = 'even' AND NOT score == 2", lambda p: p.meta["tag"] == "even" and p.meta["score"] != 2),
        ("tag IN ('odd', 'other') OR width > height", lambda p: p.meta["tag"] == "odd" or p.width > p.height),
        ("score NOT IN (1, 2, 3)", lambda p: p.meta["score"] not in (1, 2, 3)),
        ("least(width, height) >= 24 -- pixels", lambda p: min(p.width, p.height) >= 24),
        ("aspect >= 1.5", lambda p: p.width / p.height >= 1.5),
        ("pixels / 2 - 100 < abs(-200)", lambda p: p.width * p.height / 2 - 100 < 200),
        ("captions = 2", lambda p: len(p.texts) == 2),
        ("caption LIKE '%1%'", lambda p: any("1" in text for text, _ in p.texts)),
        ("item LIKE '0000%' OR ends_with(item, '9.png')", lambda p: p.item[:4] == "0000" or p.item[-5] == "9"),
        ("regexp_matches(item, '^0+[13]')", lambda p: p.item.lstrip("0")[0] in "13"),
        ("contains(tag, 've') AND source = 'one'", lambda p: p.meta["tag"] == "even"),
        ("deep.inner.x >= 1", lambda p: p.meta["deep"]["inner"]["x"] >= 1),
        ("\"odd 'name'\" = 'yes'", lambda p: p.meta["odd 'name'"] == "yes"),
        ("meta.width > 100 AND width > 1", lambda p: p.meta["width"] > 100),
        ("nsfw", lambda p: p.meta["nsfw"]),
        ("nsfw = false", lambda p: not p.meta["nsfw"]),
        ("list_contains(tags, 'c') AND len(tags) = 2", lambda p: p.meta["tags"] == ["b", "c"]),
        ("text_number < 10 AND text_number != '3'", lambda p: float(p.meta["text_number"]) in {*range(10)} - {3}),
        ("CASE WHEN score::INTEGER % 2 = 0 THEN bytes = 1 ELSE false END", lambda p: p.meta["score"] % 2 == 0),
    ],
)
def test_filters_select_what_python_would(root: Path, expression: str, selected: Any) -> None:
    one = [
        dataclasses.replace(
            p,
            meta={
                **p.meta,
                "deep": {"inner": {"x": i % 3}},
                "odd 'name'": "yes" if i % 4 else "no",
                "tags": ["a", "b"] if i % 2 else ["b", "c"],
                "width": 10 * i,
                "nsfw": i % 5 == 0,
                "text_number": str(i),
            },
        )
        for i, p in enumerate(pictures(40))
    ]
    of = config(root)
    of = of.model_copy(update={"bucket": of.bucket.model_copy(update={"filter": expression})})
    add(of, "one", one)
    snapshot = made(of)
    expected = {f"one/{p.item}" for p in one if selected(p)}
    assert expected, "the expression selects nothing"
    assert items(snapshot) == expected
    left = 40 - len(expected)
    assert sum(snapshot.head.left_out.values()) == left
    assert not left or snapshot.head.left_out == {f"not selected by bucket.filter: {expression}": left}


def test_filters_know_the_bucket_and_the_words_of_captions(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Against the functions that decide the bucket of one picture."""
    sizes = [(24, 24), (30, 20), (20, 33), (48, 48), (12, 12), (16, 40)]
    one = [
        Picture(f"{'in/deep/' if n % 2 else ''}{n}.png", f"{n}", *size, (("a b", 1.0), ("word " * n, 1.0)) if n else ())
        for n, size in enumerate(sizes)
    ]
    add(config(root), "one", one)
    shapes = [buckets.nearest(synthetic.TABLE, *size) for size in sizes]
    loss = [buckets.crop_loss(*size, shape) for size, shape in zip(sizes, shapes, strict=True)]
    scale = [buckets.upscale(*size, shape) for size, shape in zip(sizes, shapes, strict=True)]
    for condition, expected in {
        "crop_loss > 0.05": [n for n in range(6) if loss[n] > 0.05],
        "upscale > 1": [n for n in range(6) if scale[n] > 1],
        "bucket = '24x24'": [n for n in range(6) if shapes[n] == (24, 24)],
        "caption_words >= 3": [0, 3, 4, 5],
        "caption_words = 2": [1, 2],
        "folder = 'in/deep'": [1, 3, 5],
        "folder = ''": [0, 2, 4],
    }.items():
        assert 0 < len(expected) < 6
        assert items(made(config(root, f"bucket.filter={json.dumps(condition)}"))) == {
            f"one/{one[n].item}" for n in expected
        }
    several = ("data.buckets=sana", "bucket.resolutions=[512, 1024]")
    for option in ("bucket.filter='crop_loss < 0.1'", "bucket.sources={one: {filter: \"bucket = '8x8'\"}}"):
        with pytest.raises(UserError, match=naming("filter", "at each of 2 resolutions")) as caught:
            sana_pipe.stages.bucket.run(config(root, option, *several))
        assert "data.max_crop_loss" in str(caught.value)


def test_what_a_mixture_is(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By source; numbers of folders multiply, and samples that a small bucket leaves out do not count."""
    for source, count in (("one", 20), ("two", 12), ("art", 8)):
        add(config(root), source, pictures(count, f"{source}-"))
    add(config(root), "kohya", [Picture(f"{n % 2 + 2}_dog/{n}.png", f"dog {n}") for n in range(10)])
    of = config(
        root, "bucket.sources={one: {weight: 0.5}, two: {weight: 2}}", "bucket.remainder=drop", "bucket.batch=8"
    )
    shown = report(of, capsys)
    counts = {source["source"]: source["samples"] for source in shown["mixture"]}
    assert sum(counts.values()) == shown["samples"] < 50 and counts["kohya"] == 10
    visits = {name: count * {"one": 0.5, "two": 2, "art": 1, "kohya": 2.5}[name] for name, count in counts.items()}
    assert {each["source"]: each["visits"] for each in shown["mixture"]} == visits
    for each in shown["mixture"]:
        assert each["share"] == pytest.approx(visits[each["source"]] / sum(visits.values()))
        assert each["weight"] == {"one": 0.5, "two": 2}.get(each["source"], 1)
    order = [each["visits"] for each in shown["mixture"]]
    assert order == sorted(order, reverse=True)
    assert collect(of)[0]["snapshot"]["mixture"] == shown["mixture"]
    sana_pipe.stages.bucket.run(of)
    assert "visits/epoch" in capsys.readouterr().out


def test_a_missing_value_is_left_out_by_name_and_none_can_be_asked_for(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = [
        dataclasses.replace(p, meta={} if i < 3 else {"clip": None} if i < 5 else {"clip": i})
        for i, p in enumerate(pictures(10))
    ]
    add(config(root), "one", one)
    add(config(root), "two", pictures(4, "two-"))  # a source without that field at all
    summary = report(config(root, "bucket.filter='clip >= 7'"), capsys)
    assert summary["samples"] == 3
    assert {(e["reason"], e["samples"], e["keep"]) for e in summary["left_out"]} == {
        (
            "bucket.filter cannot be decided, a value is missing: clip >= 7",
            9,
            "change bucket.filter (test with `IS NULL`)",
        ),
        ("not selected by bucket.filter: clip >= 7", 2, "change bucket.filter"),
    }
    assert report(config(root, "bucket.filter='clip IS NULL OR clip >= 7'"), capsys)["samples"] == 12
    assert report(config(root, "bucket.filter='clip IS NOT NULL'"), capsys)["samples"] == 5


def test_numbers_beyond_all_bounds_are_infinite_and_nan_is_missing(root: Path) -> None:
    huge = 10**400
    values = [-huge, huge, float("nan"), float("inf"), 3, 8]
    one = [dataclasses.replace(p, meta={"clip": v}) for p, v in zip(pictures(6), values, strict=True)]
    add(config(root), "one", one)
    assert items(made(config(root, "bucket.filter='clip >= 7'"))) == {f"one/0000{i}.png" for i in (1, 3, 5)}
    assert items(made(config(root, "bucket.filter='clip IS NULL'"))) == {"one/00002.png"}


def test_a_division_by_zero_is_a_missing_value(root: Path) -> None:
    values = [(0, 0), (1, 0), (12, 2)]
    one = [dataclasses.replace(p, meta={"a": a, "b": b}) for p, (a, b) in zip(pictures(3), values, strict=True)]
    add(config(root), "one", one)
    for expression in ("a / b > 5", "a // b > 5"):
        snapshot = made(config(root, f"bucket.filter='{expression}'"))
        assert items(snapshot) == {"one/00002.png"}
        assert snapshot.head.left_out == {f"bucket.filter cannot be decided, a value is missing: {expression}": 2}


def test_the_time_zone_of_the_machine_does_not_matter() -> None:
    code = (
        "from sana_pipe.data.snapshots.filters import engine; "
        "print(engine().execute(\"SELECT hour('2024-01-01 00:30:00+00'::TIMESTAMPTZ)\").fetchone()[0])"
    )
    for zone in ("UTC", "America/New_York"):
        assert subprocess.check_output([sys.executable, "-c", code], env={**os.environ, "TZ": zone}).strip() == b"0"


def test_a_similar_column_is_spelled_as_a_condition_has_it() -> None:
    rule = filters.Filter("clip_score > 1", "bucket.filter")
    with pytest.raises(UserError, match=naming("did you mean '\"clip-score\"'")):
        rule.check_columns(set(), ["clip-score"])


@pytest.mark.parametrize(
    ("expression", "named"),
    [
        ("scroe > 3", "did you mean 'score'"),
        ("Width > 3", "did you mean 'width'"),
        ("WIDTH > 3", "did you mean 'width'"),
        ("nothing > 3", "expected: aspect, bucket, bytes, caption, caption_words, captions, crop_loss, folder, height"),
        ('tag = "even"', "text goes in single quotes: 'even'"),
        ("score.x = 1", "names the column 'score.x'"),
        ("score >", 'syntax error at or near ")"'),
        ("score is None", 'syntax error at or near "None"'),
        ("1 < score < 3", "is not an SQL condition"),
        ("score", "width >= 512"),
        ("'yes'", "width >= 512"),
        ("tag > 3", "TRY_CAST(column AS DOUBLE)"),
        ("tag > 3", "tag is VARCHAR"),
        ("tag > DATE '2024-03-01'", "TRY_CAST(column AS DATE)"),
        ("len(range(1000000000)) > 0", "calls 'range', which is not a function of the row's values alone"),
        ("length(repeat(item, 1000000000)) > 0", "calls 'repeat'"),
        ("lpad(item, 1000000000, 'x') > 'y'", "calls 'lpad'"),
        ("len(list_resize([1], 1000000000)) > 0", "calls 'list_resize'"),
        ("len(generate_series(1, 1000000000)) > 0", "calls 'generate_series'"),
        ("score = 'high'", "Could not convert string 'high' to DOUBLE"),
        ("starts_with(score, 'a')", "cannot be computed"),
        ("regexp_matches(tag, '(')", "cannot be computed"),
        ("min(width, height) > 3", "did you mean 'least'?"),
        ("startswith(tag, 'a')", "did you mean 'starts_with'?"),
        ("random() < 0.5", "calls 'random', which is not a function of the row's values alone"),
        ("now() > '2020-01-01'::TIMESTAMP", "calls 'now'"),
        ("current_date > '2020-01-01'::DATE", "current_date"),
        ("ago(INTERVAL 1 DAY) > '2020-01-01'::TIMESTAMP", "calls 'ago'"),
        ("age('2020-01-01'::TIMESTAMP) > INTERVAL 1 DAY", "calls 'age'"),
        ("count(*) > 1", "calls 'count_star'"),
        ("geomean(score) > 1", "calls 'geomean', which is not a function of the row's values alone"),
        ("generate_subscripts([1, 2], 1) = 1", "calls 'generate_subscripts'"),
        ("score > (SELECT 1)", "has a subquery"),
        ("sum(score) OVER () > 1", "has a window"),
        ("score IN (SELECT 1)", "has a subquery"),
        ("tag = read_text('/etc/passwd')", "calls 'read_text', which is not a function of the row's values alone"),
        ("list_transform([1], x -> x) = [1]", "has a lambda"),
        ("score > $limit", "is more than one condition"),
        ("*", "has a star"),
        ("true), (true", "is more than one condition"),
        ("true) UNION SELECT (true", "is more than one condition"),
        ("true) FROM read_text('/etc/passwd') WHERE (true", "is more than one condition"),
        ("true); COPY (SELECT 1) TO '/tmp/x'; SELECT (1", "is not an SQL condition"),
        ("true) ORDER BY (1", "is more than one condition"),
        ("(" * 500, "is not an SQL condition"),
        ("NOT " * 4000 + "true", "is not an SQL condition"),
        ("NOT " * 900 + "true", "is not an SQL condition"),
        ("score > \udcff", "is not an SQL condition"),
        ("-" * 100_000 + "1", "has 100,001 characters"),
    ],
)
def test_a_wrong_filter_says_what_is_wrong(six: Path, expression: str, named: str) -> None:
    before, given = files(six), config(six)
    with pytest.raises(UserError) as caught:
        sana_pipe.stages.bucket.run(
            given.model_copy(update={"bucket": given.bucket.model_copy(update={"filter": expression})})
        )
    assert named in str(caught.value)
    assert "bucket.filter" in str(caught.value)
    assert files(six) == before


def test_an_odd_value_is_missing_and_named_with_its_item(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = {3: [4.5], 5: "n/a", 6: {"x": 1}, 7: True}
    add(config(root), "one", [dataclasses.replace(p, meta={"clip": odd.get(i, i)}) for i, p in enumerate(pictures(10))])
    kept = config(root, "bucket.filter='clip >= 2'")
    assert items(made(kept)) == {f"one/0000{i}.png" for i in (2, 4, 8, 9)}
    [note] = report(kept, capsys)["notes"]
    assert all(word in note for word in ("'one'", "4 of 10", "'clip'", "[4.5]", "00003.png"))
    assert items(made(config(root, "bucket.filter='clip IS NULL'"))) == {f"one/0000{i}.png" for i in odd}


def test_a_source_without_a_filters_column_is_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add(config(root), "one", [dataclasses.replace(p, meta={"clip": i}) for i, p in enumerate(pictures(4))])
    add(config(root), "two", pictures(4, "two-"))
    [note] = report(config(root, "bucket.filter='clip >= 1'"), capsys)["notes"]
    assert all(word in note for word in ("'two'", "4 items", "clip", "bucket.filter"))
    assert report(config(root, "bucket.filter='width >= 1'"), capsys)["notes"] == []


def test_a_process_that_forks_after_a_filter_has_a_child_that_ends() -> None:
    code = (
        "import os, signal\n"
        "from sana_pipe.data.snapshots.filters import Filter\n"
        "Filter('width > 1', 'bucket.filter')\n"
        "if not os.fork():\n    signal.alarm(20)\n    raise SystemExit\n"
        "raise SystemExit(os.WIFSIGNALED(os.wait()[1]))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_engines_memory_is_limited() -> None:
    limit = filters.engine().execute("SELECT current_setting('memory_limit')").fetchone()
    assert limit == ("1.0 GiB",)


def test_an_interrupt_ends_a_filter_as_it_ends_python() -> None:
    """DuckDB turns it into a RuntimeError, which would be reported as a fault of the product."""
    rule = filters.Filter("levenshtein(item, reverse(item)) > 3", "bucket.filter")
    batch = pa.table({"item": [f"{number:0200}" for number in range(6000)], "meta": ["{}"] * 6000})
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        filters.select([rule], batch, "photos", {})
        timer.join()


def test_no_filter_reads_a_file() -> None:
    """Besides the refusal of its syntax, the engine itself is closed."""
    with pytest.raises(duckdb.Error, match="disabled"):
        filters.engine().execute("SELECT content FROM read_text('/etc/hostname')")
    with pytest.raises(duckdb.Error, match="locked"):
        filters.engine().execute("SET enable_external_access = true")


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, 2.5, None], "DOUBLE"),
        ([1, -(2**63), 2**64 - 1], "HUGEINT"),
        ([2**62, 0.5], "DOUBLE"),
        ([2**53, None], "DOUBLE"),
        ([2**53 + 1], "HUGEINT"),
        ([-(2**53) - 1, 1], "HUGEINT"),
        ([2**63, 2**64, 10**400], "DOUBLE"),
        (["123456789012345"], "DOUBLE"),
        (["1234567890123456"], "VARCHAR"),
        ([True, None], "BOOLEAN"),
        (["x", "1"], "VARCHAR"),
        (["1", "-2.5e3", 4], "DOUBLE"),
        (["1", "07"], "VARCHAR"),
        (["1", ""], "VARCHAR"),
        ([3, "x"], "VARCHAR"),
        ([["a", "b"], []], "VARCHAR[]"),
        ([None], None),
        ([True, 1], UserError),
        ([[1], 2], UserError),
        ([{"x": 1}, "text"], UserError),
        ([{"x": 1}, {"x": 2}, 3], UserError),
        ([[1], 2, 3.5], "DOUBLE"),
        ([[1], "x", 3.5], "VARCHAR"),
        ([[1], "x", "y"], "VARCHAR"),
        ([True, False, "n/a"], "BOOLEAN"),
        ([["a"], ["b"], "a"], "VARCHAR[]"),
        ([4, 5, "n/a"], "DOUBLE"),
        ([2**53 + 1, 5, "n/a"], "HUGEINT"),
        (["4", "5", "n/a"], "VARCHAR"),
        ([*map(str, range(99)), "n/a"], "DOUBLE"),
    ],
)
def test_fields_have_one_type_each(values: list[Any], kind: Any) -> None:
    path = ("a.b/~", "c'd")
    rows = ["", *(json.dumps({"a.b/~": {"c'd": value}}) for value in values), json.dumps({"a.b/~": 1})]
    tables = [
        {"item": ["x.png"] * len(part), "meta": pa.array(part, pa.large_string())} for part in (rows[:2], rows[2:])
    ]
    parts = [pa.table(columns) for columns in tables]
    metadata = filters.Metadata(parts, {path, ("absent",), ("width",)})
    assert metadata.known == {path, ("width",)}
    assert metadata.valid == [*filters.BUILTIN, "a.b/~"]
    if kind is UserError:
        with pytest.raises(UserError, match="c'd"):
            metadata.types(metadata.text)
    else:
        assert metadata.types(metadata.text) == ({path: kind} if kind else {})


def test_a_filter_of_one_source_leaves_the_others_alone(root: Path) -> None:
    of = config(root, "bucket.sources={one: {filter: 'score = 0'}}")
    add(of, "one", pictures(20))
    add(of, "two", pictures(20, "two-"))
    snapshot = made(of)
    assert Counter(name.split("/")[0] for name in items(snapshot)) == {"one": 3, "two": 20}
    assert snapshot.head.left_out == {"not selected by bucket.sources.one.filter: score = 0": 17}


# ---------------------------------------------------------------- deduplication, held-out part, subsets


@pytest.mark.parametrize("rows", [frames.ROWS, 3])
def test_one_of_equal_pictures_stays_and_which_is_stated(
    rows: int, root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "ROWS", rows)
    same = ["00003.png", "b.png", "a.png"]
    one = [*pictures(6), Picture("b.png", "3"), Picture("a.png", "3")]
    add(config(root), "one", one)
    add(config(root), "two", [Picture("copy.png", "3"), Picture("own.png", "own"), Picture("zero.png", "0")])
    assert len(made(config(root))) == 11
    assert report(config(root), capsys)["repeated_pictures"] == 4
    assert report(config(root, "bucket.dedup=image"), capsys)["repeated_pictures"] == 0
    first = made(config(root, "bucket.dedup=image"))
    assert items(first) & {f"one/{i}" for i in same} == {"one/00003.png"}
    assert items(first) & {"two/copy.png", "two/own.png", "two/zero.png"} == {"two/own.png"}
    assert first.head.left_out == {"its picture is the same as another sample's": 4}
    preferred = items(made(config(root, "bucket.dedup=image", "bucket.sources={two: {}}")))
    assert preferred >= {"two/copy.png", "two/own.png", "two/zero.png"}
    assert not preferred & {"one/00000.png", *(f"one/{i}" for i in same)}
    assert len(preferred) == len(first)
    # A copy that a filter leaves out does not push out the one that it selects.
    filtered = items(made(config(root, "bucket.dedup=image", "bucket.filter=source != 'one'")))
    assert filtered == {"two/copy.png", "two/own.png", "two/zero.png"}


def test_the_held_out_part_is_stable_and_has_equal_pictures_on_one_side(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of = config(root, "bucket.heldout=0.2")
    add(of, "one", [*pictures(200), *(Picture(f"copy{i}.png", f"{i}") for i in range(200))])
    summary = report(of, capsys)
    cache = Cache(of.cache)
    train, away = cache.open_snapshot(), cache.open_snapshot("latest.heldout")
    assert (train.id, away.id) == (summary["snapshot"], summary["heldout"]["snapshot"])
    assert items(train) | items(away) == {f"one/{p.item}" for p in pictures(200)} | {
        f"one/copy{i}.png" for i in range(200)
    }
    assert not items(train) & items(away)
    assert 0.1 < len(away) / 400 < 0.3
    for i in range(200):
        assert (f"one/copy{i}.png" in items(away)) == (f"one/{i:05d}.png" in items(away))
    assert summary["left_out"] == [
        {"reason": "held out for validation", "samples": len(away), "keep": "bucket.heldout=0"}
    ]
    assert (train.head.parent, away.head.parent) == (None, None), "the held-out part was the newest for a moment"
    old_train, old_away = items(train), items(away)
    add(of, "two", pictures(100, "two-"))
    sana_pipe.stages.bucket.run(of, name="more")
    assert old_away <= items(cache.open_snapshot("more.heldout"))
    assert old_train <= items(cache.open_snapshot("more"))
    larger = config(root, "bucket.heldout=0.4")
    sana_pipe.stages.bucket.run(larger, name="larger")
    assert items(cache.open_snapshot("more.heldout")) < items(cache.open_snapshot("larger.heldout"))
    assert cache.snapshot_of("latest") == cache.open_snapshot("larger").id, "a held-out part is nobody's newest"


def test_nothing_is_published_when_nothing_is_left(root: Path) -> None:
    add(config(root), "one", pictures(30))
    before = files(root)
    for overrides in (
        ("bucket.heldout=0.3", "bucket.remainder=drop", "bucket.batch=40"),  # the held-out part alone would be possible
        ("bucket.sources={one: {weight: 0}}",),
        ("bucket.sources={one: {weight: 0}}", "bucket.dedup=image", "bucket.heldout=0.1"),
        ("bucket.filter='width < 0'", "bucket.dedup=image", "bucket.heldout=0.1", "bucket.subset=3"),
    ):
        with pytest.raises(UserError, match="nothing is left to train on"):
            sana_pipe.stages.bucket.run(config(root, *overrides))
        assert files(root) == before


def test_a_subset_grows_at_its_end(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add(config(root), "one", pictures(120))
    sizes, before = (40, 60, 100), None
    for size in sizes:
        snapshot = made(config(root, f"bucket.subset={size}"), f"s{size}")
        assert len(snapshot) == size
        assert snapshot.head.left_out == {f"beyond the first {size} pictures": 120 - size}
        rows = by_bucket(snapshot)
        for shape, ids in (before or {}).items():
            assert rows[shape][: len(ids)] == ids, "an earlier sample moved"
        before = rows
    summary = report(config(root, "bucket.subset=500"), capsys)
    assert summary["samples"] == 120
    assert summary["notes"] == ["bucket.subset = 500, but there are only 120 pictures"]
    # More data: without `grow` new pictures may take places, with it the earlier ones stay first.
    add(config(root), "two", pictures(200, "two-"))
    again = made(config(root, "bucket.subset=60"), "again")
    assert not items(Cache(root).open_snapshot("s40")) <= items(again), "this data set is no test of `grow`"
    grown = made(config(root, "bucket.subset=60", "bucket.grow=s40"), "grown")
    assert len(grown) == 60
    for shape, ids in by_bucket(Cache(root).open_snapshot("s40")).items():
        assert by_bucket(grown)[shape][: len(ids)] == ids


def by_bucket(snapshot: Snapshot) -> dict[tuple[int, int], list[int]]:
    result: dict[tuple[int, int], list[int]] = {}
    for row in range(len(snapshot)):
        bucket = snapshot.buckets[snapshot.sample(row).bucket]
        result.setdefault((bucket.height, bucket.width), []).append(snapshot.sample_id(row))
    return result


# ---------------------------------------------------------------- small buckets


def test_drop_says_what_becomes_of_the_rest(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add(config(root), "one", pictures(40))  # 16, 8, 12 and 4 of each shape
    summary = report(config(root, "bucket.remainder=drop", "bucket.batch=5"), capsys)
    assert summary["samples"] == 36
    [left] = summary["left_out"]
    assert left["samples"] == 4
    assert "bucket.remainder=carry" in left["reason"]
    sana_pipe.stages.bucket.run(config(root, "bucket.remainder=drop", "bucket.batch=5"))
    printed = capsys.readouterr().out
    assert "bucket.remainder=carry" in printed
    with pytest.raises(UserError) as caught:
        sana_pipe.stages.bucket.run(config(root, "bucket.remainder=drop", "bucket.batch=41"))
    assert "bucket.remainder=carry" in str(caught.value)
    notes = {(b["height"], b["width"]): b["note"] for b in summary["buckets"]}
    assert "left out" in notes[16, 32]
    assert notes[16, 24].startswith("3 samples are skipped, different ones each epoch")


def test_a_snapshot_of_a_removed_option_is_refused_with_the_way_out(root: Path) -> None:
    of = config(root)
    cache = add(of, "one", pictures(40))
    sana_pipe.stages.bucket.run(of)
    head = cache.open_snapshot().head
    options = {**(head.options or {}), "bucket": {"remainder": "repeat"}}
    policies = dataclasses.replace(head.policies, small="repeat")
    cache.add_snapshot(dataclasses.replace(head, policies=policies, options=options), "earlier")
    with pytest.raises(CacheError, match=naming("bucket.remainder = repeat", "carry or drop", "sana-pipe bucket")):
        Schedule.of(cache.open_snapshot("earlier").head, seed=0, phase=0)
    assert not list(audit.verify(cache))


# ---------------------------------------------------------------- weights, batches, order


def test_weights_decide_how_often_a_source_is_seen(root: Path) -> None:
    of = config(root, "bucket.sources={one: {weight: 2}, two: {weight: 0.25}, none: {weight: 0}}")
    for source in ("one", "two", "none", "plain"):
        add(of, source, [Picture(f"{i}.png", f"{source}{i}") for i in range(16)])
    snapshot = made(of)
    assert snapshot.head.left_out == {"bucket.sources.none.weight is 0": 16}
    [bucket] = snapshot.head.buckets
    assert bucket.parts == (BucketPart(16, Fraction(2)), BucketPart(16, Fraction(1)), BucketPart(16, Fraction(1, 4)))
    names = {layout.sample_id(s, f"{i}.png"): (s, i) for s in ("one", "two", "plain") for i in range(16)}
    steps = Schedule.of(snapshot.head, seed=0, phase=0).steps_upto(4)
    assert steps == 4 * (32 + 4 + 16) // 4
    seen = Counter(names[i] for batch in batches(of, steps) for i in batch)
    for i in range(16):
        assert (seen["one", i], seen["plain", i], seen["two", i]) == (8, 4, 1)


def test_the_numbers_of_kohyas_folders_are_visits(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = [f"{folder}/{i}.png" for folder in ("d/10_sks dog", "d/1_dog") for i in range(4)]
    of = config(root)
    add(of, "kohya", [Picture(key, key) for key in keys])
    add(of, "plain", [Picture(f"{folder}/{i}.png", f"p{folder}{i}") for folder in ("3_x", "y") for i in range(4)])
    summary = report(of, capsys)
    assert summary["repeats"] == {"kohya": {"1": 4, "10": 4}}
    [note] = summary["notes"]
    assert "plain" in note and "bucket.sources.plain.repeats=true" in note, "numbers that do not count are said"
    [bucket] = Cache(of.cache).open_snapshot().head.buckets
    assert bucket.parts == (BucketPart(4, Fraction(10)), BucketPart(12, Fraction(1)))
    sana_pipe.stages.bucket.run(of)
    assert "bucket.sources.kohya.repeats" in capsys.readouterr().out
    seen = Counter(i for batch in batches(of, (40 + 12) // 4) for i in batch)
    assert {seen[layout.sample_id("kohya", key)] for key in keys[:4]} == {10}
    assert {seen[layout.sample_id("kohya", key)] for key in keys[4:]} == {1}
    chosen = config(root, "bucket.sources={kohya: {repeats: false}, plain: {weight: 2, repeats: true}}")
    assert made(chosen).head.buckets[0].parts == (
        BucketPart(4, Fraction(6)),
        BucketPart(4, Fraction(2)),
        BucketPart(8, Fraction(1)),
    )
    assert not report(config(root, "bucket.sources={kohya: {repeats: false}}"), capsys)["repeats"]


def test_sources_that_are_not_there_are_named(root: Path) -> None:
    of = config(root, "bucket.sources={onw: {weight: 2}}")
    add(of, "one", pictures(4))
    with pytest.raises(CacheError, match=naming("onw", "expected: one")):
        sana_pipe.stages.bucket.run(of)
    with pytest.raises(ConfigError, match=naming("bucket.sources.one", "weight")):
        config(root, "bucket.sources={one: {weight: 0.1234}}")


def test_batches_from_a_token_budget(root: Path) -> None:
    of = config(root, "bucket.tokens=60", "bucket.batch_multiple=2")
    add(of, "one", pictures(40))
    result = {(b.height, b.width): b.batch for b in made(of).buckets}
    assert result == {(16, 32): 6, (16, 24): 10, (24, 24): 6, (24, 16): 10}  # 8, 6, 9 and 6 tokens a picture
    for overrides, named in (
        (("bucket.batch_multiple=3",), "bucket.batch = 4 is not a multiple of bucket.batch_multiple = 3"),
        (("bucket.tokens=17", "bucket.batch_multiple=2"), "expected: at least 18: 9 latent tokens each"),
    ):
        with pytest.raises(ConfigError, match=named):
            sana_pipe.stages.bucket.run(config(root, *overrides))


@pytest.mark.parametrize("small", ["carry", "drop"])
def test_every_topology_and_every_resume_sees_the_same_samples(root: Path, small: str) -> None:
    of = config(root, f"bucket.remainder={small}", "bucket.sources={one: {weight: 1.5}}")
    add(of, "one", pictures(40))
    add(of, "two", pictures(23, "two-"))
    opened = made(of)

    def seen(world: int, start: int) -> list[list[tuple[int, bytes]]]:
        ranks = [
            Loader(
                opened,
                loader_settings(
                    seed=1,
                    rank=rank,
                    world=world,
                    microbatch=3,
                    caption_drop=0.1,
                    prefetch=2,
                    threads=2,
                    start_step=start,
                    stop_step=60,
                ),
            )
            for rank in range(world)
        ]
        return [
            [
                (i, noise.numpy().tobytes())
                for parts, _ in step
                for b in parts
                for i, noise in zip(b.sample_ids, b.noise)
            ]
            for step in zip(*ranks, strict=True)
        ]

    truth = seen(1, 0)
    assert seen(2, 0) == truth
    assert seen(4, 7) == truth[7:]
    draws = [one for step in truth for one in step]
    assert len(set(draws)) == len(draws), "two visits drew the same noise"


# ---------------------------------------------------------------- several resolutions, several captions


def resolutions(root: Path, *overrides: str) -> Config:
    return config(root, "data.buckets=sana", "data.resolution=128", *overrides)


def test_two_resolutions_of_a_picture_in_one_snapshot(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of = resolutions(root, "bucket.resolutions=[128, 256]")
    small, large = (buckets.table(of.data.model_copy(update={"resolution": r}), 8) for r in (128, 256))
    all_of = [dataclasses.replace(p, height=10 * p.height, width=10 * p.width) for p in pictures(20)]
    all_of[3] = dataclasses.replace(all_of[3], height=24, width=24, reject="below data.min_side = 100")
    add(of, "one", all_of, table=small)
    add(of, "one", all_of, table=large, without=["00004.png"])
    summary = report(of, capsys)
    assert summary["samples"] == 19 + 18
    assert {e["reason"]: e["samples"] for e in summary["left_out"]} == {
        "its latent at 256 px is not encoded yet (run sana-pipe encode --set data.resolution=256)": 2,
        "its latent is not encoded yet (run sana-pipe encode)": 1,
    }
    snapshot = Cache(root).open_snapshot()
    areas = Counter(b.height * b.width // 16000 > 1 for b in snapshot.buckets for _ in range(b.samples))
    assert areas == {False: 19, True: 18}
    contents = {p.item: layout.digest(p.content) for p in all_of}
    for row in range(len(snapshot)):
        sample, (_, item) = snapshot.sample(row), snapshot.source_item(row)
        size = snapshot.buckets[sample.bucket].height, snapshot.buckets[sample.bucket].width
        assert sample.pictures["latent"].key == synthetic.LATENT.key(contents[item], *size)
    ids = [snapshot.sample_id(row) for row in range(len(snapshot))]
    assert len(set(ids)) == len(ids)
    assert {layout.sample_id("one", p.item) for p in all_of if p.reject is None} < set(ids)
    assert len(items(snapshot)) == 19
    judged = resolutions(root, "bucket.resolutions=[128, 256]", "data.max_upscale=0.9")  # 256 px would be enlarged
    summary = report(judged, capsys)
    assert all(b["height"] * b["width"] < 20000 for b in summary["buckets"])
    assert any("at 256 px" in e["reason"] and "data.max_upscale" in e["reason"] for e in summary["left_out"])
    # A subset counts pictures, and a held-out picture is away at every resolution.
    subset = made(resolutions(root, "bucket.resolutions=[128, 256]", "bucket.subset=10", "bucket.heldout=0.3"))
    assert len(items(subset)) == 10
    away = Cache(root).open_snapshot("latest.heldout")
    assert away and not items(away) & items(subset)


def test_resolutions_that_cannot_be_together_are_refused(root: Path) -> None:
    add(config(root), "one", pictures(4))
    with pytest.raises(ConfigError, match=r"data\.buckets is a list"):
        sana_pipe.stages.bucket.run(config(root, "bucket.resolutions=[128, 256]"))
    with pytest.raises(ConfigError, match=naming("bucket.resolutions", "128 and 128")):
        sana_pipe.stages.bucket.run(resolutions(root, "bucket.resolutions=[128, 256, 128]"))


def test_captions_are_chosen_anew_at_every_visit_by_weight(root: Path) -> None:
    of = config(root)
    add(of, "one", [Picture(f"{i}.png", f"{i}", captions=((f"a {i}", 1.0), (f"b {i}", 3.0))) for i in range(20)])
    snapshot = made(of)
    planner = Planner(snapshot, seed=0, phase=0)
    rare = {snapshot.encoding(TextEncoding).key(f"a {i}") for i in range(20)}
    choices: dict[int, list[bool]] = {}
    for step in range(1000):
        plan = planner.step(step)
        for sample_id, key in zip(plan.sample_id.tolist(), plan.texts["key"], strict=True):
            choices.setdefault(sample_id, []).append(key_bytes(key) in rare)
    assert all(len(picks) == 200 and 0 < sum(picks) < 200 for picks in choices.values()), "chosen once, not per visit"
    assert 0.22 < np.mean([pick for picks in choices.values() for pick in picks]) < 0.28


# ---------------------------------------------------------------- several caches


def test_other_caches_are_taken_in_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    add(config(here), "one", pictures(30))
    add(config(there), "two", [*pictures(30, "two-"), Picture("same.png", "1")])
    of = config(here, f"bucket.caches=[{there}]")
    before = files(here), files(there)
    summary = report(of, capsys, dry_run=True)
    assert (summary["samples"], summary["snapshot"]) == (61, None)
    assert summary["adopted_bytes"] > 0
    assert (files(here), files(there)) == before, "a dry run wrote something"
    snapshot = made(of, "both")
    assert len(snapshot) == 61
    assert files(there).keys() == before[1].keys()
    everything = made(config(tmp_path / "whole", f"bucket.caches=[{here}, {there}]"))  # a new cache from two
    assert compare.difference(snapshot, everything) == compare.Difference([], [], [])
    shutil.rmtree(there)
    assert list(audit.verify(Cache(here))) == []
    assert status(Cache(here))["complete"]
    assert {why for _, _, why in unneeded(Cache(here), older_than_s=0)} <= {"merged into the segment of its plan"}
    assert len({i for batch in batches(of.model_copy(update={"bucket": config(here).bucket}), 16) for i in batch}) >= 50
    assert Cache(here).sources() == ["one"]
    assert len(made(config(here))) == 30


@pytest.mark.parametrize(
    ("name", "options"),
    [("a b", []), ("a b", ["--dry-run"]), ("a b", ["--pack"]), ("n" * 95, ["--set=bucket.heldout=0.1"])],
)
def test_a_name_that_is_none_makes_nothing(tmp_path: Path, name: str, options: list[str]) -> None:
    of = with_another(tmp_path)
    before = files(tmp_path)
    settings = (f"cache={of.cache}", f"data.buckets={[list(size) for size in synthetic.TABLE]}", "bucket.batch=4")
    arguments = [
        "--config=tiny",
        f"--set=bucket.caches=[{of.bucket.caches[0]}]",
        *(f"--set={setting}" for setting in settings),
        *options,
    ]
    done = CliRunner().invoke(cli, ["bucket", "--name", name, *arguments])
    assert isinstance(done.exception, UserError) and "cannot name a snapshot" in str(done.exception)
    assert files(tmp_path) == before


def test_adopting_twice_changes_nothing(tmp_path: Path) -> None:
    of = with_another(tmp_path)
    here, first = Path(of.cache), sana_pipe.stages.bucket.run(of)

    def inodes() -> dict[Path, int]:  # files that are used again become younger, and stay what they are
        return {path: path.stat().st_ino for path in here.rglob("*") if path.is_file()}

    before = inodes()
    assert sana_pipe.stages.bucket.run(of) == first
    assert inodes() == before


def test_a_fork_that_lacks_a_record_takes_it_from_the_other(tmp_path: Path) -> None:
    """Both caches have the same unit; in one of them a picture of it was rejected."""
    there = tmp_path / "there"
    add(config(there), "one", pictures(8))
    here = Path(shutil.copytree(there, tmp_path / "here"))
    encoding = synthetic.LATENT
    [segment] = here.glob(f"segments/{encoding.name}/*.json")
    body = layout.unseal(segment.read_bytes(), str(segment))
    [commit] = index.commits(Cache(here).files, encoding.name, 0)
    empty = dataclasses.replace(commit, shard=None, bytes=0, records=0, table=None)
    listed = publish(Cache(here).files, index.Commits.table_of([empty])).values()
    [table] = here.glob(f"tables/{body['table'][:2]}/{body['table']}.arrow")
    none = Cache(here).files.put_content(to_ipc(from_ipc(table.read_bytes(), "").slice(0, 0)), "tables", "arrow")
    for path in (segment, here / layout.Paths.copy(segment.relative_to(here).as_posix())):
        path.write_bytes(layout.seal({**body, "table": none, "records": 0, "commits": listed}))
    for path in here.glob("shards/latent-*/*/*.tar"):
        path.unlink()
    with pytest.raises(UserError, match="nothing is left"):
        sana_pipe.stages.bucket.run(config(here))
    assert len(made(config(here, f"bucket.caches=[{there}]"))) == 8
    shutil.rmtree(there)
    assert len(made(config(here))) == 8, "the adopted records are not this cache's own"
    assert list(audit.verify(Cache(here))) == []


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.nightly)], ids=["some", "every"])
def test_adopting_goes_on_where_it_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Stopped before publications, the next run makes the same snapshot, and nothing half done is left."""
    from sana_pipe.data.cache.folder_store import FolderStore

    there = tmp_path / "there"
    add(config(there), "two", pictures(120, "two-"))

    class Killed(BaseException):
        pass

    def attempt(root: Path, at: int) -> int:
        count = 0
        real = FolderStore.create

        def publish(self: FolderStore, name: str, data: bytes | Path) -> bool:
            nonlocal count
            if count == at:
                raise Killed
            count += 1
            return real(self, name, data)

        monkeypatch.setattr(FolderStore, "create", publish)
        try:
            sana_pipe.stages.bucket.run(config(root, f"bucket.caches=[{there}]"))
        except Killed:
            pass
        finally:
            monkeypatch.setattr(FolderStore, "create", real)
        return count

    add(config(tmp_path / "whole"), "one", pictures(10))
    shutil.copytree(tmp_path / "whole", tmp_path / "start")
    writes = attempt(tmp_path / "whole", 10**9)
    expected = Cache(tmp_path / "whole").snapshot_of("latest")
    assert writes > 12
    for at in range(0, writes, step):
        root = Path(shutil.copytree(tmp_path / "start", tmp_path / f"k{at}"))
        assert attempt(root, at) == at
        assert sana_pipe.stages.bucket.run(config(root, f"bucket.caches=[{there}]")) == expected
        assert list(audit.verify(Cache(root))) == []
        assert status(Cache(root))["complete"]
        shutil.rmtree(root)


def test_damage_in_another_cache_is_not_taken_over(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    add(config(here), "one", pictures(10))
    add(config(there), "two", pictures(10, "two-"))
    [path] = there.glob("shards/latent-*/*/*.tar")
    flip(path, 700)
    of = config(here, f"bucket.caches=[{there}]")
    with pytest.raises(IntegrityError, match=naming(path, f"expected: {path.stem}")):
        sana_pipe.stages.bucket.run(of)
    assert Cache(here).snapshot_of("latest") is None
    path.unlink()
    with pytest.raises(IntegrityError, match=naming(path)):
        sana_pipe.stages.bucket.run(of)


def test_without_links_shards_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    add(config(here), "one", pictures(4))
    add(config(there), "two", pictures(4, "two-"))
    real = os.link

    def link(source: Any, target: Any) -> None:
        if Path(source).is_relative_to(there):
            raise OSError(18, "Invalid cross-device link")
        real(source, target)

    monkeypatch.setattr(os, "link", link)
    sana_pipe.stages.bucket.run(config(here, f"bucket.caches=[{there}]"))
    monkeypatch.undo()
    for path in there.glob("shards/*/*/*.tar"):
        copied = here / path.relative_to(there)
        assert copied.read_bytes() == path.read_bytes()
        assert copied.stat().st_ino != path.stat().st_ino


@pytest.mark.slow
@pytest.mark.parametrize("own", ["disk", "objects"])
def test_caches_on_disks_and_in_object_stores_mix(
    tmp_path: Path, s3_bucket: str, own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url, disk = f"{s3_bucket}/{uuid4().hex}", str(tmp_path / "disk")
    here, there = (disk, url) if own == "disk" else (url, disk)
    mirror = f"mirror.path={tmp_path / 'mirror'}"
    add(config(here, mirror), "one", pictures(40))
    add(config(there, mirror), "two", pictures(20, "two-"))
    of = config(here, mirror, f"bucket.caches=['{there}']", "bucket.batch=10")
    summary = report(of, capsys)
    assert summary["samples"] == 60
    cache = cache_location(of).open()
    assert list(audit.verify(cache)) == []
    loader = Loader(
        cache.open_snapshot(),
        loader_settings(microbatch=10, stop_step=int(summary["steps_per_epoch"])),
    )
    seen = {i for parts, _ in loader for batch in parts for i in batch.sample_ids}
    assert {layout.sample_id("two", p.item) for p in pictures(20, "two-")} & seen


def test_other_caches_are_waited_for_as_long_as_the_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of, patience, files_of = with_another(tmp_path), dict[str, float](), Files
    monkeypatch.setattr(
        "sana_pipe.data.cache.cache.Files", lambda at, *rest: [patience.update({at: rest[1]}), files_of(at, *rest)][1]
    )
    sana_pipe.stages.bucket.run(of.model_copy(update={"patience_s": 7.0}))
    assert patience == {of.cache: 7.0, of.bucket.caches[0]: 7.0}


def test_caches_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    add(config(here), "one", pictures(4))
    add(config(there), "one", pictures(5))
    with pytest.raises(CacheError, match=naming(here, there, "'one'", "--source-name")):
        sana_pipe.stages.bucket.run(config(here, f"bucket.caches=[{there}]"))
    with pytest.raises(UserError, match=naming("bucket.caches", here)):
        sana_pipe.stages.bucket.run(config(here, f"bucket.caches=[{here}]"))
    with pytest.raises(CacheError, match=naming(tmp_path / "absent", "sana-pipe encode")):
        sana_pipe.stages.bucket.run(config(here, f"bucket.caches=[{tmp_path / 'absent'}]"))
    other = config(tmp_path / "third", "text.max_length=200")
    add(other, "three", pictures(4, "x"))
    with pytest.raises(CacheError, match=naming("'one'", "'three'", "max_length")):
        sana_pipe.stages.bucket.run(config(here, f"bucket.caches=[{other.cache}]"))


@pytest.mark.parametrize(
    "setting",
    [
        "vae.dtype=bf16",
        "text.dtype=bf16",
        "text.prompting=nvlabs",
        "text.max_length=200",
        "text.instruction=Draw",
        "data.background=[0, 0, 0]",
        "encode.storage.latent=bf16-zstd",
        "encode.storage.text=bf16-zstd",
    ],
)
def test_a_setting_that_the_records_do_not_have_is_refused(root: Path, setting: str) -> None:
    add(config(root), "one", pictures(4))
    with pytest.raises(CacheError, match=naming(setting.partition("=")[0])):
        sana_pipe.stages.bucket.run(config(root, setting))


# ---------------------------------------------------------------- dry run, snapshots


def test_a_dry_run_says_the_same_and_writes_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of = config(root, "bucket.heldout=0.2", "bucket.remainder=drop", "bucket.batch=6", "bucket.subset=25")
    add(of, "one", pictures(40))
    before = files(root)
    dry = report(of, capsys, dry_run=True)
    assert files(root) == before
    wet = report(of, capsys)
    for printed in (dry, wet, dry["heldout"], wet["heldout"]):
        printed.pop("dry_run", None)
        made = printed.pop("snapshot"), printed.pop("content")
        assert (None in made) == (made == (None, None)) == (printed is dry or printed is dry["heldout"])
    assert dry == wet
    capsys.readouterr()
    sana_pipe.stages.bucket.run(of, dry_run=True)
    assert "dry run: no snapshot was made" in capsys.readouterr().out


@pytest.mark.parametrize("taken", ["round1", "round1.heldout"])
def test_a_dry_run_ends_as_the_real_one_where_the_name_is_taken(root: Path, taken: str) -> None:
    of = config(root, "bucket.heldout=0.2")
    add(of, "one", pictures(40))
    for _ in range(2):  # the same snapshot again
        sana_pipe.stages.bucket.run(of, name="round1", dry_run=True)
        sana_pipe.stages.bucket.run(of, name="round1")
    add(of, "one", pictures(50))
    cache = Cache(str(root))
    if taken != "round1":
        cache.point("round1", sana_pipe.stages.bucket.run(of, name="other"), move=True)
    before = files(root)
    with pytest.raises(UserError, match=naming(repr(taken), "--move")):
        sana_pipe.stages.bucket.run(of, name="round1", dry_run=True)
    sana_pipe.stages.bucket.run(of, name="round1", dry_run=True, move=True)
    assert files(root) == before
    with pytest.raises(UserError, match=naming(repr(taken), "--move")):
        sana_pipe.stages.bucket.run(of, name="round1")
    sana_pipe.stages.bucket.run(of, name="round1", move=True)


def test_a_run_that_changes_nothing_says_so(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of = config(root, "bucket.heldout=0.2")
    add(of, "one", pictures(40))
    assert not report(of, capsys)["unchanged"]
    again = report(of, capsys)
    assert again["unchanged"] and not again["heldout"]["unchanged"]
    assert not report(of, capsys, dry_run=True)["unchanged"]
    sana_pipe.stages.bucket.run(of)
    assert "sana-pipe encode" in capsys.readouterr().out
    add(of, "one", pictures(41))
    sana_pipe.stages.bucket.run(of)
    assert "sana-pipe encode" not in capsys.readouterr().out


def test_rejects_are_counted_by_kind_with_a_few_examples(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """However many there are: the snapshot's head and the lines stay short, the list has the rest."""
    one = [
        dataclasses.replace(p, reject=f"has no caption: no {p.item[:-4]}.txt beside it" if i % 2 else None)
        for i, p in enumerate(pictures(60))
    ]
    of = config(root)
    cache = add(of, "one", one)
    cache.files.replace("reports/rejects-one.csv", b"item,reason\n")
    summary = report(of, capsys)
    [left] = summary["left_out"]
    reason = "rejected by the scan: has no caption: no *.txt beside it"
    assert (left["reason"], left["samples"]) == (reason, 30)
    assert left["examples"] == [p.item for p in one if p.reject][:5]
    assert summary["reports"] == [str(root / "reports/rejects-one.csv")]
    assert Cache(root).open_snapshot().head.left_out == {reason: 30}
    sana_pipe.stages.bucket.run(of)
    said = capsys.readouterr().out
    assert "30  rejected by the scan: has no caption: no *.txt" in said
    assert "00009.png, ..." in said and "00011.png" not in said
    assert "reports/rejects-one.csv" in said


def test_every_sample_is_in_the_snapshot_or_counted(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = pictures(60)
    one[5] = dataclasses.replace(one[5], reject="broken")
    one.append(Picture("copy.png", "6"))
    of = config(
        root,
        "bucket.filter='score != 3'",
        "bucket.dedup=image",
        "bucket.heldout=0.1",
        "bucket.subset=40",
        "bucket.remainder=drop",
        "bucket.batch=5",
        "bucket.sources={gone: {weight: 0}}",
    )
    add(of, "one", one, without=["00007.png"])
    add(of, "gone", pictures(9, "g"))
    summary = report(of, capsys)
    assert summary["samples"] + sum(e["samples"] for e in summary["left_out"]) == 61 + 9
    assert len(summary["left_out"]) == 8 - (summary["samples"] == 40)
    assert all(e["keep"] or "(" in e["reason"] for e in summary["left_out"]), "a reason without a way out"


def test_snapshots_are_listed_and_compared(root: Path) -> None:
    of = config(root)
    one = pictures(20)
    add(of, "one", one)
    first = sana_pipe.stages.bucket.run(of, name="first")
    changed = [dataclasses.replace(p) for p in one[1:]]
    changed[0] = dataclasses.replace(one[1], content="other")  # picture and caption
    changed[1] = dataclasses.replace(one[2], captions=(("said otherwise", 1.0),))
    changed[2] = dataclasses.replace(one[3], height=32, width=16)  # another bucket
    changed[3] = dataclasses.replace(one[14], item=one[4].item, captions=one[4].texts)
    changed[4] = dataclasses.replace(one[5], captions=((one[5].texts[0][0], 2.0),))  # a weight alone
    add(of, "one", [*changed, Picture("new.png", "new")])
    second = sana_pipe.stages.bucket.run(of, name="second")
    run, options = CliRunner(), config_file(of)
    summary = json.loads(run.invoke(cli, ["snapshots", "--json", *options]).output)
    assert [(e["id"], e["names"], e["samples"]) for e in summary["snapshots"]] == [
        (i, n, 20) for i, n in sorted([(first, ["first"]), (second, ["latest", "second"])])
    ]
    assert all(e["bytes"] > 0 for e in summary["snapshots"])
    assert first[:12] in run.invoke(cli, ["snapshots", *options]).output
    result = run.invoke(cli, ["snapshots", "diff", "first", "second", "--json", *options], standalone_mode=False)
    assert result.return_value == 1
    actual = json.loads(result.output)
    assert actual["added"] == [{"source": "one", "item": "new.png"}]
    assert actual["removed"] == [{"source": "one", "item": "00000.png"}]
    assert [e["item"] for e in actual["changed"]] == [f"{i:05d}.png" for i in range(1, 6)], "by name"
    assert {e["item"]: e["what"] for e in actual["changed"]} == {
        "00001.png": ["picture", "captions"],
        "00002.png": ["captions"],
        "00003.png": ["bucket"],
        "00004.png": ["picture"],
        "00005.png": ["captions"],
    }
    plain = run.invoke(cli, ["snapshots", "diff", "first", "second", *options]).output
    heads = [Cache(of.cache).open_snapshot(each).head for each in (first, second)]
    assert plain.splitlines()[:4] == [
        *(f"{side}: snapshot {h.id}, content {h.content_id}" for side, h in zip("AB", heads, strict=True)),
        *("1 added", "  one: new.png"),
    ]
    assert "  one: 00003.png (bucket)" in plain
    same = run.invoke(cli, ["snapshots", "diff", "second", second[:9], *options], standalone_mode=False)
    assert same.return_value == 0 and same.output.endswith("0 added\n0 removed\n0 changed\n")
    with pytest.raises(CacheError, match="'third'"):
        sana_pipe.stages.snapshots.diff(of, "first", "third")
    with pytest.raises(UserError, match=naming("'latest'", second, "--move")):
        sana_pipe.stages.snapshots.name(of, "first", "latest")
    assert Cache(of.cache).snapshot_of("latest") == second
    assert sana_pipe.stages.snapshots.name(of, "second", "latest") == 0
    assert sana_pipe.stages.snapshots.name(of, "first", "latest", move=True) == 0
    assert Cache(of.cache).snapshot_of("latest") == first


def test_equal_content_has_an_equal_content_id_in_any_cache(root: Path, tmp_path: Path) -> None:
    """Two caches that were filled in other steps, so that scans, shards and ids differ; also of their packs."""
    one = pictures(70)

    def made_in(place: Path, *steps: list[Picture], sets: Sequence[str] = ()) -> Snapshot:
        of = config(place, *sets)
        for step in steps:
            add(of, "one", step)
        return Cache(of.cache).open_snapshot(sana_pipe.stages.bucket.run(of))

    first, second = made_in(root, one), made_in(tmp_path / "b", one[40:], one)
    assert first.id != second.id and first.head.sources != {} and first.head.shards != second.head.shards
    content = first.head.content_id
    assert content is not None and content == second.head.content_id
    packs = [sana_pipe.stages.pack.run(config(place), snapshot="latest") for place in (root, tmp_path / "b")]
    heads = [Cache(place).open_snapshot(pack).head for place, pack in zip((root, tmp_path / "b"), packs, strict=True)]
    assert heads[0].content_id == heads[1].content_id not in (None, content), "another order"
    caption = (one[5].texts[0][0], 2.0)
    others = {
        "weight": made_in(tmp_path / "c", [*one[:5], dataclasses.replace(one[5], captions=(caption,)), *one[6:]]),
        "sample": made_in(tmp_path / "d", one[1:]),
        "picture": made_in(tmp_path / "e", [dataclasses.replace(one[0], content="other"), *one[1:]]),
        "batch": made_in(tmp_path / "f", one, sets=["bucket.batch=16"]),
    }
    assert len({content, *(each.head.content_id for each in others.values())}) == 5


def test_a_snapshot_says_how_it_was_made(root: Path) -> None:
    of = config(root, "bucket.filter='width > 8'", "bucket.sources={one: {weight: 0.5}}")
    add(of, "one", pictures(20))
    made = sana_pipe.stages.bucket.run(of, name="half")
    result = CliRunner().invoke(cli, ["snapshots", "show", "half", "--json", *config_file(of)], standalone_mode=False)
    report = json.loads(result.output)
    assert (report["id"], report["samples"], report["content"]) == (
        made,
        20,
        Cache(root).open_snapshot().head.content_id,
    )
    assert report["options"]["bucket"]["filter"] == "width > 8" and report["sources"]["one"]["scan"]
    assert "bucket.filter" in report["command"] and "--move" not in report["command"]
    plain = CliRunner().invoke(cli, ["snapshots", "show", made[:9], *config_file(of)], standalone_mode=False).output
    assert made in plain and "width > 8" in plain and report["command"] in plain


def config_file(of: Config) -> list[str]:
    return ["--config", "tiny", "--set", f"cache={of.cache}"]


def test_chains_of_snapshots_are_listed_parents_first(root: Path) -> None:
    of, chain = config(root), []
    for round_ in range(4):
        add(of, f"s{round_}", pictures(10, f"{round_}-"))
        chain.append(sana_pipe.stages.bucket.run(of))
    result = compare.listed(Cache(root))
    assert [e["id"] for e in result] == chain
    assert [e["parent"] for e in result] == [None, *chain[:-1]]


# ---------------------------------------------------------------- sabotage


@pytest.mark.parametrize("chosen", [("bucket.dedup=image",), ("bucket.subset=40",), ("bucket.filter='score != 3'",)])
def test_a_selection_in_temporary_files_is_the_same(
    root: Path, monkeypatch: pytest.MonkeyPatch, chosen: tuple[str]
) -> None:
    add(config(root), "one", [*pictures(60), Picture("copy.png", "6"), Picture("another.png", "6")])
    add(config(root), "two", [Picture(f"copy{i}.png", str(i)) for i in range(20, 30)])
    first = sana_pipe.stages.bucket.run(config(root, "bucket.subset=25"))
    options = (*chosen, "bucket.heldout=0.1", f"bucket.grow={first}")
    whole = sana_pipe.stages.bucket.run(config(root, *options), "whole")
    assert len(Cache(root).open_snapshot(whole)) < 72 * 0.9
    lower_limits(monkeypatch)
    assert sana_pipe.stages.bucket.run(config(root, *options), "again") == whole


def test_the_checks_can_fail(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a rule switched off, what its test looks at is otherwise."""
    add(config(root), "one", [*pictures(40), Picture("copy.png", "6")])
    plain = items(made(config(root)))
    away = items(made(config(root, "bucket.heldout=0.3")))
    assert away < plain
    monkeypatch.setattr(selection, "heldout", lambda digests, *_: np.zeros(len(digests), bool))
    assert items(made(config(root, "bucket.heldout=0.3"))) == plain
    monkeypatch.undo()
    monkeypatch.setattr(selection, "deduplicated", lambda joined, frame, *args, **how: (frame, None))
    assert items(made(config(root, "bucket.dedup=image"))) == plain


def test_growth_keeps_its_pictures_when_copies_come_from_elsewhere(root: Path) -> None:
    add(config(root), "one", pictures(40))
    first = made(config(root, "bucket.dedup=image", "bucket.subset=20"), "first")
    add(config(root), "a", [Picture(f"copy{i}.png", str(i)) for i in range(40)])
    assert not items(first) <= items(made(config(root, "bucket.dedup=image", "bucket.subset=30"), "again"))
    grown = made(config(root, "bucket.dedup=image", "bucket.subset=30", "bucket.grow=first"), "grown")
    assert items(first) <= items(grown)
    # Not even where those copies come first by their source's place.
    options = ("bucket.dedup=image", "bucket.subset=30", "bucket.grow=first", "bucket.sources={a: {}}")
    assert items(first) <= items(made(config(root, *options), "preferred"))


def test_a_source_without_weight_may_be_of_another_encoding(root: Path) -> None:
    of = config(root)
    add(of, "one", pictures(8))
    add(of, "old", pictures(8, "old-"))
    cache = Cache(root)
    last = cache.last_scan("old") or {}
    cache.add_scan("old", {**last, "encodings": {**last["encodings"], "latent": "latent-" + "0" * 32}})
    other = LatentEncoding(weights="other")
    cache.add_encoding(other)
    cache.add_scan("old", {**last, "encodings": {**last["encodings"], "latent": other.name}})
    with pytest.raises(CacheError, match=naming("'old'", "'one'", "weights")):
        sana_pipe.stages.bucket.run(of)
    weightless = "bucket.sources={old: {weight: 0}}"
    assert items(made(config(root, weightless))) == {f"one/{i:05d}.png" for i in range(8)}
    beside = root.with_name("beside")
    add(config(beside), "old", pictures(3, "others-"))
    with pytest.raises(CacheError, match=naming(beside, "'old'", "--source-name")):
        sana_pipe.stages.bucket.run(config(root, f"bucket.caches=[{beside}]"))
    assert items(made(config(root, weightless, f"bucket.caches=[{beside}]"))) == {f"one/{i:05d}.png" for i in range(8)}


@pytest.mark.parametrize("number", ["9223372036854775808", "1e999", str(10**400)])
def test_numbers_beyond_all_bounds_are_reported(root: Path, number: str) -> None:
    add(config(root), "one", pictures(4))
    try:
        sana_pipe.stages.bucket.run(config(root, f"bucket.filter=bytes < {number}"))
    except UserError as error:
        assert "bucket.filter" in str(error)


@pytest.mark.parametrize(
    ("small", "visits", "steps", "says"),
    [
        ("carry", 10, 2.5, ""),
        ("carry", 3, 0.75, "smaller than one batch"),
        ("carry", 4, 1.0, ""),
        ("drop", 3, 0, "left out"),
        ("drop", 4, 1, ""),
        ("drop", 10, 2, "2 samples"),
    ],
)
def test_what_does_not_fill_a_batch_is_said(small: str, visits: int, steps: float, says: str) -> None:
    found, note = assemble.epoch_steps(Fraction(visits), 4, small)
    assert found == steps
    assert says in note if says else not note
