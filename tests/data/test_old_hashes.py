"""Caches whose hashes are of the rule before colours: they are read, packed and trained on; to compare them is refused,
with the command that makes them again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import sana_pipe.stages.bucket
import sana_pipe.stages.encode
import sana_pipe.stages.pack
import sana_pipe.stages.report
import sana_pipe.stages.snapshots
import sana_pipe.stages.verify
import sana_pipe.stages.view
from sana_pipe.base.errors import CacheError
from sana_pipe.config import Config
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.encoding.reading import settled
from sana_pipe.data.images import perceptual_hash
from sana_pipe.data.images.perceptual_hash import WORDS
from sana_pipe.data.signals import phash
from sana_pipe.data.snapshots import heldout
from tests.support.reports import collect

MakeConfig = Callable[..., Config]
SIGNALS, BEFORE = "encode.signals=[phash]", "dct-sign-2x128-1"


@pytest.fixture(scope="module")
def old(photos: Path, make_config: MakeConfig, made_once: Callable[..., Path]) -> Path:
    """A cache with the snapshots `old`, of all pictures, and `part`, of some of them."""

    def make(folder: Path) -> None:
        (folder / "all").mkdir(parents=True)
        for name in ("cat", "coffee", "rocket"):
            for end in ("png", "txt"):
                shutil.copy(photos / f"{name}.{end}", folder / "all")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(phash, "RULE", BEFORE)
            patch.setattr(phash, "hashes", lambda pictures: perceptual_hash.hashes(pictures)[:, : WORDS + 1])
            config = make_config(folder, SIGNALS)
            sana_pipe.stages.encode.run(config, data=str(folder / "all"))
        sana_pipe.stages.bucket.run(config, name="old")
        sana_pipe.stages.bucket.run(make_config(folder, "bucket.filter=item = 'coffee.png'"), name="part")

    return made_once("old-hashes", make)


@pytest.fixture
def config(old: Path, make_config: MakeConfig, tmp_path: Path) -> Callable[..., Config]:
    shutil.copytree(old / "cache", tmp_path / "cache")
    return lambda *options: make_config(tmp_path, *options)


def test_a_comparison_is_refused_with_the_command_that_makes_them_again(
    config: Callable[..., Config], old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And with those anew, a difference names the kind in place of all samples."""
    options = ("bucket.dedup=near", "bucket.heldout=0.3")
    for option in options:
        with pytest.raises(CacheError) as refused:
            sana_pipe.stages.bucket.run(config(option), dry_run=True)
        assert (refused.value.expected, refused.value.found) == (phash.RULE, BEFORE)
        assert "encode.signals=[phash]" in str(refused.value.fix)
    sana_pipe.stages.encode.run(config(SIGNALS), data=str(old / "all"))
    for option in options:
        sana_pipe.stages.bucket.run(config(option), name="new", move=True)
    latents = [Cache(config().cache).open_snapshot(name).head.encodings["latent"] for name in ("old", "new")]
    assert latents[0] == latents[1]
    capsys.readouterr()
    assert sana_pipe.stages.snapshots.diff(config(), "old", "new", as_json=True) == 1
    difference = json.loads(capsys.readouterr().out)
    assert (difference["changed"], difference["encodings"]) == ([], ["phash"])


def test_what_compares_nothing_reads_them(
    config: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = collect(config(), snapshot="old")[0]["snapshot"]
    assert figures["alike"] == [] and "encode.signals=[phash]" in figures["not_compared"]
    sana_pipe.stages.report.run(config(), tmp_path / "page.html", snapshot="old")
    assert "The pictures were not compared" in (tmp_path / "page.html").read_text()
    sana_pipe.stages.pack.run(config(), snapshot="old", name="packed")
    cache = Cache(config().cache)
    plain, packed = (cache.open_snapshot(name) for name in ("old", "packed"))
    hashes = [
        {each.picture(each.sample(row), "phash").tobytes() for row in range(len(each))} for each in (plain, packed)
    ]
    assert hashes[0] == hashes[1]
    assert sana_pipe.stages.verify.run(config()) == 0
    with pytest.raises(CacheError, match="earlier version"):
        sana_pipe.stages.view.run(config(), "coffee.png", snapshot="old", near=True)


def test_an_older_part_is_validated_on_and_said_not_to_be_compared(
    config: Callable[..., Config], old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sana_pipe.stages.encode.run(config(), data=str(old / "all"))
    others = config("bucket.filter=item <> 'coffee.png'", "train.validation.snapshot=part")
    capsys.readouterr()
    sana_pipe.stages.bucket.run(others, as_json=True)
    [note] = json.loads(capsys.readouterr().out)["notes"]
    assert "part" in note and "encode.signals=[phash]" in note
    trained, part = (Cache(others.cache).open_snapshot(name) for name in ("latest", "part"))
    assert trained.head.leaked is None and trained.head.encodings != part.head.encodings
    heldout.check(trained, part)


def test_hashes_of_a_source_stay_where_its_scan_does_not_remember_them(
    config: Callable[..., Config], old: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Scans of versions that did not remember `encode.signals` name the records alone."""
    cache = Cache(config().cache)
    [document] = sorted((tmp_path / "cache" / "sources" / "all").glob("*.json"))
    body = cache.last_scan("all")
    assert body is not None and document.exists() and body["read"]["used"].pop("signals") == ["phash"]

    reading = settled(sana_pipe.stages.encode.reading_of(config()), "all", body)
    assert reading.encode.signals == ["phash"] and "encode.signals" in " ".join(reading.notes)
    assert settled(sana_pipe.stages.encode.reading_of(config("encode.signals=[]")), "all", body).encode.signals == []


def test_hashes_of_an_unknown_rule_need_a_newer_version() -> None:
    with pytest.raises(CacheError, match="does not know"):
        phash.HashEncoding(rule="of-tomorrow").shape(64, 64)
