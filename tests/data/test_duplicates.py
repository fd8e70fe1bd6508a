"""What `bucket.dedup` leaves out: every group with all its pictures, pictures that are kept by name, and pictures that
were not compared."""

from __future__ import annotations

import csv
import html
import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml
from PIL import Image, ImageDraw

import sana_pipe.stages.bucket
import sana_pipe.stages.encode
import sana_pipe.stages.report
import sana_pipe.stages.view
from sana_pipe.base.errors import ConfigError, UserError
from sana_pipe.config import Config
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.keys import sample_ids
from sana_pipe.data.cache.scratch import Scratch
from sana_pipe.data.images.perceptual_hash import LENGTH, WORDS
from sana_pipe.data.snapshots import duplicates, heldout, selection
from sana_pipe.data.snapshots.duplicates import Duplicates, Named
from sana_pipe.data.snapshots.frames import Frame
from sana_pipe.data.snapshots.group_memory import GroupMemory
from sana_pipe.data.snapshots.join import Joined
from sana_pipe.data.snapshots.near import DISTANCE
from sana_pipe.data.snapshots.near_samples import NearGroups
from tests.support.constants import set_constants
from tests.support.reports import collect

MakeConfig = Callable[..., Config]
SIGNALS = "encode.signals=[phash]"
CUPS = ["coffee.png", "coffee-small.jpg", "coffee-soft.jpg"]


@pytest.fixture(scope="module")
def source(photos: Path, made_once: Callable[..., Path]) -> Path:
    """Two photographs, two copies of one of them, an equal file, and a logo at two sizes."""

    def make(folder: Path) -> None:
        data = folder / "all"
        data.mkdir(parents=True)
        for name in ("coffee.png", "rocket.png"):
            shutil.copy(photos / name, data)
        shutil.copy(photos / "rocket.png", data / "rocket-again.png")
        with Image.open(photos / "coffee.png") as opened:
            cup = opened.convert("RGB")
        cup.resize((cup.width * 3 // 4, cup.height * 3 // 4)).save(data / "coffee-small.jpg", quality=90)
        cup.save(data / "coffee-soft.jpg", quality=60)
        logo = Image.new("RGB", (128, 128), (230, 230, 225))
        ImageDraw.Draw(logo).ellipse((30, 40, 90, 100), fill=(225, 205, 205))
        logo.save(data / "logo.png")
        logo.resize((64, 64), Image.Resampling.LANCZOS).save(data / "logo-small.png")
        for picture in sorted(data.iterdir()):
            picture.with_suffix(".txt").write_text(f"caption of {picture.stem}")

    return made_once("duplicates-source", make) / "all"


@pytest.fixture(scope="module")
def encoded(source: Path, make_config: MakeConfig, made_once: Callable[..., Path]) -> Path:
    def make(folder: Path) -> None:
        sana_pipe.stages.encode.run(make_config(folder, SIGNALS), data=str(source))

    return made_once("duplicates-encoded", make) / "cache"


@pytest.fixture
def config(encoded: Path, make_config: MakeConfig, tmp_path: Path) -> Callable[..., Config]:
    shutil.copytree(encoded, tmp_path / "cache")
    return lambda *options: make_config(tmp_path, SIGNALS, *options)


@pytest.fixture
def bucket(config: Callable[..., Config], capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[set[str], Any]]:
    """Run `bucket` with some options: the items of the snapshot, and the report."""

    def run(*options: str) -> tuple[set[str], Any]:
        of = config(*options)
        capsys.readouterr()
        snapshot = Cache(of.cache).open_snapshot(sana_pipe.stages.bucket.run(of, as_json=True))
        report = json.loads(capsys.readouterr().out)
        return {snapshot.source_item(row)[1] for row in range(len(snapshot))}, report

    return run


def listed(path: str) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as sheet:
        return list(csv.DictReader(sheet))


@pytest.mark.parametrize("dedup", ["near", "image"])
def test_every_picture_of_every_group_is_listed(dedup: str, bucket: Callable[..., tuple[set[str], Any]]) -> None:
    left, report = bucket(f"bucket.dedup={dedup}")
    [groups] = report["duplicates"]
    rockets = ["rocket.png", "rocket-again.png"]
    wanted = [CUPS, rockets] if dedup == "near" else [rockets]
    rows = listed(groups["list"])
    compared = [row for row in rows if row["stays"] != "not compared"]
    assert [row["group"] for row in compared] == [str(n) for n, each in enumerate(wanted, 1) for _ in each]
    for number, names in enumerate(wanted, 1):
        group = [row for row in compared if row["group"] == str(number)]
        assert {row["picture"] for row in group} == {f"all: {name}" for name in names}
        assert [row["stays"] for row in group] == ["yes", *["no"] * (len(names) - 1)]
        assert group[0]["picture"].removeprefix("all: ") in left
        for row in group:
            why = "looks the same" if names == CUPS else "equal file"
            assert row["why"] == ("" if row is group[0] else why)
            near = (0, DISTANCE) if names == CUPS else (0, 0)
            if row is group[0] or dedup == "image":
                assert row["distance"] == ""
            else:
                assert near[0] <= int(row["distance"]) <= near[1]
    assert {row["why"] for row in rows if row not in compared} <= {"too little detail"}
    assert groups["left_out"] == sum(len(names) - 1 for names in wanted)
    assert len(left) == 7 - groups["left_out"]


def test_the_distance_is_to_the_first_picture_and_says_who_is_only_near_another() -> None:
    """A looks like B and B like C, in other bits; D has the file of A at another resolution, E the bits in other
    colours."""
    frame = _frame(np.array(["a", "b", "c", "d", "e"]))
    frame.digest[3] = frame.digest[0]
    hashed = np.random.default_rng(1).integers(0, 1 << 16, (1, LENGTH), np.uint16).repeat(5, 0)
    hashed[:, WORDS + 1 :] = 0x8080
    hashed[:, WORDS] = 255
    hashed[1, 0] ^= 0x03FF
    hashed[2, :2] ^= np.array([0x03FF, 0x0FFF], np.uint16)
    hashed[4, WORDS + 1 :] = 0xFF00
    keys = np.full(5, b"%016d" % 7, "S16")
    near_groups = NearGroups(keys, np.empty(0, np.int64), np.array([0, 1, 2, 0, 4]), hashed, GroupMemory(DISTANCE))
    joined = Joined(["s"])
    groups = Duplicates("near", joined, frame, near_groups)
    selection.deduplicated(joined, frame, [], selection.Earlier(Scratch()), keys, listed=groups)
    [(count, members)] = groups.largest(5, 12)
    assert count == 5 and [member.stays for member in members] == [True, *[False] * 4]
    whole = [(member.item, member.bits, member.why) for member in members]
    through = "looks the same as another of its group"
    assert whole[:3] == [("a", None, ""), ("b", 10, "looks the same"), ("c", 22, through)]
    assert whole[3:] == [("d", 0, "equal file"), ("e", None, through)]
    [(count, few)] = groups.largest(5, 2)
    assert count == 5 and few == members[:2]


def test_the_page_shows_each_group_with_what_stays_first(
    config: Callable[..., Config], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, keep = tmp_path / "duplicates.html", 'bucket.dedup_keep=["all: rocket.png"]'
    before = sorted(path for path in (tmp_path / "cache").rglob("*"))
    sana_pipe.stages.bucket.run(config("bucket.dedup=near", keep), dry_run=True, show_duplicates=out)
    assert str(out) in capsys.readouterr().out
    assert sorted(path for path in (tmp_path / "cache").rglob("*")) == before, "a dry run writes the page alone"
    text = html.unescape(out.read_text())
    cards = text.split('<div class="card">')[1:]
    assert len(cards) == 2 and ["Group 1: 3 pictures" in cards[0], "Group 2: 2 pictures" in cards[1]] == [True, True]
    captions = re.findall("<figcaption>(.*?)</figcaption>", cards[0])
    assert [caption.partition(",")[0].partition(":")[0] for caption in captions] == ["stays", "left out", "left out"]
    assert all(re.search(r"looks the same, distance \d+: all: coffee", caption) for caption in captions[1:])
    left_out = [re.search(r": (all: \S+) \(", caption)[1] for caption in captions[1:]]  # type: ignore[index]
    [words] = [shlex.split(line) for line in re.findall("(--set .*?)</p>", cards[0])]
    assert words[0] == "--set" and yaml.safe_load(words[1].partition("=")[2]) == ["all: rocket.png", *left_out]
    assert len(re.findall("<img ", text)) == 5 and "2 pictures have too little detail" in text
    of = config("bucket.dedup=near", words[1])
    snapshot = Cache(of.cache).open_snapshot(sana_pipe.stages.bucket.run(of))
    after = {snapshot.source_item(row)[1] for row in range(len(snapshot))}
    assert set(CUPS) <= after


def test_the_page_is_bounded_and_says_so(
    config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_constants(
        monkeypatch,
        {"sana_pipe.tools.reporting.duplicates_page.GROUPS": 1, "sana_pipe.tools.reporting.duplicates_page.MEMBERS": 2},
    )
    out = tmp_path / "duplicates.html"
    sana_pipe.stages.bucket.run(config("bucket.dedup=near"), dry_run=True, show_duplicates=out)
    text = html.unescape(out.read_text())
    assert text.count("<img ") == 2 and "the 1 largest groups" in text
    assert "Group 1: 3 pictures, of which 2 are shown" in text


def test_a_page_that_cannot_be_written_is_refused_before_the_work(
    config: Callable[..., Config], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="--show-duplicates") as refused:
        sana_pipe.stages.bucket.run(config(), show_duplicates=tmp_path / "none.html")
    assert "bucket.dedup=near" in str(refused.value.fix) and not Cache(config().cache).snapshot_names()
    (tmp_path / "notes.html").write_text("mine")
    with pytest.raises(UserError, match="not a page") as foreign:
        sana_pipe.stages.bucket.run(config(f"cache={tmp_path / 'no'}"), show_duplicates=tmp_path / "notes.html")
    assert "--show-duplicates" in str(foreign.value.fix) and (tmp_path / "notes.html").read_text() == "mine"


def test_pictures_with_too_little_detail_are_counted_and_named(
    bucket: Callable[..., tuple[set[str], Any]],
    config: Callable[..., Config],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    left, report = bucket("bucket.dedup=near")
    [groups] = report["duplicates"]
    flat = {"all: logo.png", "all: logo-small.png"}
    assert {"logo.png", "logo-small.png"} <= left, "they are not compared"
    assert groups["not_compared"]["pictures"] == 2 and set(groups["not_compared"]["examples"]) == flat
    assert {row["picture"] for row in listed(groups["list"]) if row["stays"] == "not compared"} == flat
    sana_pipe.stages.bucket.run(config("bucket.dedup=near"), dry_run=True)
    assert "2 pictures have too little detail" in capsys.readouterr().out
    said = {}
    for name in ("logo.png", "coffee.png"):
        sana_pipe.stages.view.run(
            config(), next(item for item in left if item.startswith(name[:4])), as_json=True, near=True
        )
        said[name] = json.loads(capsys.readouterr().out)["too_little_detail"]
    assert said == {"logo.png": {"this": True, "others": 1}, "coffee.png": {"this": False, "others": 2}}
    sana_pipe.stages.view.run(config(), "logo.png", near=True)
    assert "this picture has too little detail" in capsys.readouterr().out
    assert collect(config())[0]["snapshot"]["not_compared"].startswith("2 pictures")


def test_pictures_with_too_little_detail_are_compared_as_files(
    source: Path, make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An equal file is a duplicate and, of a held-out part, a leak; the same logo at another size is unknown."""
    data = tmp_path / "data"
    data.mkdir()
    for name, other in {"a": "logo", "b": "logo", "c": "logo-small", "d": "rocket"}.items():
        shutil.copy(source / f"{other}.png", data / f"{name}.png")
        (data / f"{name}.txt").write_text(f"caption of {name}")
    sana_pipe.stages.encode.run(make_config(tmp_path, SIGNALS), data=str(data))
    of = make_config(tmp_path, SIGNALS, "bucket.dedup=near")
    snapshot = Cache(of.cache).open_snapshot(sana_pipe.stages.bucket.run(of))
    assert {snapshot.source_item(row)[1] for row in range(len(snapshot))} == {"a.png", "c.png", "d.png"}
    sana_pipe.stages.bucket.run(make_config(tmp_path, SIGNALS, "bucket.filter=item IN ('a.png', 'c.png')"), name="part")
    others = make_config(
        tmp_path, SIGNALS, "bucket.filter=item IN ('b.png', 'd.png')", "train.validation.snapshot=part"
    )
    capsys.readouterr()
    sana_pipe.stages.bucket.run(others, as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert list(report["leaked"].values()) == [1]
    assert any("2 samples of part have too little detail" in note for note in report["notes"])


def test_a_held_out_part_without_dedup_lists_the_groups_that_it_keeps_whole(
    bucket: Callable[..., tuple[set[str], Any]],
) -> None:
    _, report = bucket("bucket.heldout=0.4")
    [groups] = report["duplicates"]
    assert (groups["kind"], groups["groups"], groups["left_out"]) == ("near", 2, 0)
    assert {row["stays"] for row in listed(groups["list"])} == {"yes", "not compared"}


@pytest.mark.parametrize("form", ["{}", "all: {}"])
def test_a_picture_that_is_kept_by_name_stays_next_to_the_one_of_its_group(
    form: str, bucket: Callable[..., tuple[set[str], Any]]
) -> None:
    before, _ = bucket("bucket.dedup=near")
    name = min({"coffee-small.jpg", "coffee-soft.jpg"} - before)
    after, report = bucket("bucket.dedup=near", f'bucket.dedup_keep=["{form.format(name)}"]')
    assert after == before | {name}
    [groups] = report["duplicates"]
    assert next(row["stays"] for row in listed(groups["list"]) if row["picture"] == f"all: {name}") == "yes"
    assert groups["left_out"] == 2 and report["notes"] == []
    both, _ = bucket("bucket.dedup=image", 'bucket.dedup_keep=["rocket.png", "rocket-again.png"]')
    assert {"rocket.png", "rocket-again.png"} <= both


def test_captions_of_what_is_left_out_go_to_the_one_picture_alone(
    bucket: Callable[..., tuple[set[str], Any]], config: Callable[..., Config]
) -> None:
    before, _ = bucket("bucket.dedup=near")
    lost = sorted(set(CUPS) - before)
    bucket("bucket.dedup=near", "bucket.dedup_captions=keep", f'bucket.dedup_keep=["{lost[0]}"]')
    snapshot = Cache(config().cache).open_snapshot()
    reader = snapshot.reader("text")
    said = {snapshot.source_item(row)[1]: snapshot.captions(row, reader) for row in range(len(snapshot))}
    assert said[lost[0]] == [f"caption of {Path(lost[0]).stem}"]
    [one] = set(CUPS) & before
    assert sorted(said[one]) == sorted(f"caption of {Path(name).stem}" for name in (one, lost[1]))


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_a_picture_that_is_kept_by_name_is_on_the_side_of_its_group(
    share: float, config: Callable[..., Config]
) -> None:
    """So none moves that was there before, and no loss is measured on a picture that looks like one of the training."""
    sides = []
    for keep in ([], CUPS):
        of = config("bucket.dedup=near", f"bucket.heldout={share}", f"bucket.dedup_keep={json.dumps(keep)}")
        cache = Cache(of.cache)
        train = cache.open_snapshot(sana_pipe.stages.bucket.run(of))
        part = cache.open_snapshot("latest.heldout")
        sides.append([{each.source_item(row)[1] for row in range(len(each))} for each in (train, part)])
        assert (train.head.policies.heldout.distance is None) == (not keep)  # type: ignore[union-attr]
        heldout.check_disjoint(train, part)
    assert all(before <= after for before, after in zip(*sides, strict=True))
    assert sum(bool(set(CUPS) & side) for side in sides[1]) == 1 and set(CUPS) <= sides[1][0] | sides[1][1]


def test_names_that_keep_nothing_are_refused_or_noted(
    bucket: Callable[..., tuple[set[str], Any]], config: Callable[..., Config], encoded: Path, make_config: MakeConfig
) -> None:
    with pytest.raises(UserError, match="cofee-small") as refused:
        sana_pipe.stages.bucket.run(config("bucket.dedup=near", "bucket.dedup_keep=[cofee-small.jpg]"), dry_run=True)
    assert "coffee-small.jpg" in str(refused.value.expected)
    options = ("bucket.dedup=near", "bucket.filter=item <> 'rocket.png'")
    _, report = bucket(*options, "bucket.dedup_keep=[rocket.png, logo.png, coffee-soft.jpg, coffee.png]")
    [note] = report["notes"]
    assert "rocket.png" in note and "logo.png" in note and "coffee" not in note
    _, report = bucket("bucket.dedup_keep=[coffee.png]")
    assert len(report["notes"]) == 1 and "no effect" in report["notes"][0]


def test_a_name_of_two_sources_asks_for_the_source(
    source: Path, config: Callable[..., Config], bucket: Callable[..., tuple[set[str], Any]]
) -> None:
    sana_pipe.stages.encode.run(config(), data=str(source), source_name="other")
    with pytest.raises(UserError, match="2 pictures") as refused:
        sana_pipe.stages.bucket.run(config("bucket.dedup=near", "bucket.dedup_keep=[coffee.png]"), dry_run=True)
    assert "other: coffee.png" in str(refused.value.found)
    sana_pipe.stages.bucket.run(config("bucket.dedup=near", 'bucket.dedup_keep=["other: coffee.png"]'), name="kept")
    snapshot = Cache(config().cache).open_snapshot("kept")
    names = {snapshot.source_item(row) for row in range(len(snapshot))}
    assert ("other", "coffee.png") in names and any(each[0] == "all" and each[1] in CUPS for each in names)


def test_many_groups_are_listed_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Groups of all sizes over borders of parts, against a plain loop; a picture at several resolutions counts once."""
    rng = np.random.default_rng(0)
    sizes = np.append(rng.integers(1, 7, 300), 400)
    group = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    items = np.array([f"{n:04d}.png" for n in range(len(group))])
    twice = rng.random(len(group)) < 0.2  # at two resolutions
    number = np.concatenate([np.arange(len(group)), np.flatnonzero(twice)])
    joined = Joined(["s"])
    frame = _frame(items[number])
    keys = np.array([b"%016d" % group[n] for n in number], "S16")
    monkeypatch.setattr(duplicates, "AT_A_TIME", 7)
    monkeypatch.setattr("sana_pipe.data.snapshots.frames.ROWS", 50)
    groups = Duplicates("near", joined, frame)
    _, _ = selection.deduplicated(joined, frame, [], selection.Earlier(Scratch()), keys, listed=groups)
    files = Cache(tmp_path / "cache", create=True).files
    rows = listed(files.where(groups.write(files)))
    wanted = {frozenset(items[group == n]) for n in range(len(sizes)) if (group == n).sum() > 1}
    got: dict[str, list[str]] = {}
    for row in rows:
        got.setdefault(row["group"], []).append(row["picture"].removeprefix("s: "))
    assert {frozenset(names) for names in got.values()} == wanted
    assert [len(names) for names in got.values()] == sorted((len(each) for each in wanted), reverse=True)
    assert sum(row["stays"] == "yes" for row in rows) == len(wanted)
    report = groups.report()
    assert (report["groups"], report["pictures"]) == (len(wanted), sum(map(len, wanted)))
    assert report["largest"][0]["pictures"] == 400 and len(report["largest"][0]["left_out"]) == duplicates.NAMED


def test_names_may_have_colons() -> None:
    frame = _frame(np.array(["a: b.png", "b.png", "s: c.png"]), source=np.array([0, 1, 0], np.int32))
    joined = Joined(["s", "a"])
    for name, row in (("s: a: b.png", 0), ("s: c.png", 2), ("b.png", 1)):
        named, pictures = Named.of([name], joined.sources).rows(joined, frame)
        assert named.tolist() == [each == row for each in range(3)] and list(pictures) == [name]
    with pytest.raises(UserError, match="2 pictures"):
        Named.of(["a: b.png"], joined.sources).rows(joined, frame)


def _frame(items: np.ndarray, source: np.ndarray | None = None) -> Frame:
    """Samples of the source(s) `s`, `a`, each of one caption."""
    count, column = len(items), pa.array(items.tolist(), pa.large_string())
    source = np.zeros(count, np.int32) if source is None else source
    ids = np.array([sample_ids(["s", "a"][of], pa.array([item]))[0] for of, item in zip(source, items, strict=True)])
    size = np.full(count, 64)
    return Frame(
        source, column, ids, ids, np.array([b"%016d" % n for n in range(count)], "S16"), size, size,
        np.zeros(count, np.int64), np.zeros(count, np.int64), {"latent": np.arange(count)}, np.arange(count + 1),
        np.arange(count), np.ones(count, np.float32), np.zeros(count, "S16"),
    )  # fmt: skip
