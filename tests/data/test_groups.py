"""`bucket.group`: samples of equal values are on one side of a held-out part, also through copies of pictures."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sana_pipe.stages.bucket
import sana_pipe.stages.inspect
import sana_pipe.stages.snapshots
from sana_pipe.base.errors import ConfigError, UserError
from sana_pipe.config import Config
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.scratch import Scratch
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.snapshots import groups, heldout, opening
from sana_pipe.data.snapshots.frames import FrameColumns
from sana_pipe.data.snapshots.join import Joined
from tests.support.frames import frame_of
from tests.support.reports import collect
from tests.support.synthetic import Picture, add, config

GROUP, HALF = "bucket.group=artist", "bucket.heldout=0.5"


def items(snapshot: Snapshot) -> set[str]:
    return {snapshot.source_item(row)[1] for row in range(len(snapshot))}


def sides(of: Config) -> tuple[set[str], set[str]]:
    sana_pipe.stages.bucket.run(of)
    cache = Cache(of.cache)
    return items(cache.open_snapshot()), items(cache.open_snapshot("latest.heldout"))


def report(of: Config, capsys: pytest.CaptureFixture[str], **options: Any) -> dict[str, Any]:
    capsys.readouterr()
    sana_pipe.stages.bucket.run(of, as_json=True, **options)
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def by(artists: list[Any], prefix: str = "") -> list[Picture]:
    """A picture by each artist; None: of nobody."""
    metas = ({} if artist is None else {"artist": artist} for artist in artists)
    return [Picture(f"{prefix}{n:03d}.png", f"{prefix}{n}", meta=meta) for n, meta in enumerate(metas)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 pictures of 8 artists, 4 of nobody; and 20 pictures of 4 of them, of whom one is a number, as text or not."""
    root = tmp_path_factory.mktemp("groups") / "cache"
    add(config(root), "one", by([f" a{n % 7} " if n % 8 else 7 for n in range(40)] + [None, "", " ", []]))
    add(config(root), "two", by([f"a{n % 3}" if n % 4 else "7.0" for n in range(20)], "two-"))
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "cache"))


def artist(item: str) -> str | None:
    n, of_two = int(item[-7:-4]), item.startswith("two-")
    if not of_two and n >= 40:
        return None
    return "7" if n % (4 if of_two else 8) == 0 else f"a{n % (3 if of_two else 7)}"


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_no_artist_is_on_both_sides(root: Path, share: float) -> None:
    train, part = sides(config(root, GROUP, f"bucket.heldout={share}"))
    assert not {artist(item) for item in train} & {artist(item) for item in part} - {None}
    assert len(train | part) == 64 and train and part
    plain = sides(config(root, f"bucket.heldout={share}"))
    assert {artist(item) for item in plain[0]} & {artist(item) for item in plain[1]} - {None}


def test_more_pictures_of_an_artist_move_nobody(root: Path) -> None:
    of = config(root, GROUP, HALF)
    before = sides(of)
    add(of, "three", by([f"a{n % 7}" for n in range(30)] + ["new"], "three-"))
    after = sides(of)
    assert before[0] <= after[0] and before[1] <= after[1]


def test_equal_files_and_lists_join_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A chain of 60 artists: neighbours share a file, or a picture that both drew; one that `dedup` leaves out."""
    chain: list[Picture] = []
    for n in range(60):
        chain.append(Picture(f"{n:03d}.png", f"{n}", meta={"artist": f"a{n}"}))
        if n % 3 == 0:
            chain.append(Picture(f"{n:03d}-both.png", f"both {n}", meta={"artist": [f"a{n}", f"a{n + 1}"]}))
        else:
            chain.append(Picture(f"{n:03d}-copy.png", f"{n}", meta={"artist": f"a{n + 1}"}))
    for dedup in ("none", "image"):
        of = config(tmp_path / dedup, GROUP, HALF, f"bucket.dedup={dedup}")
        add(of, "one", [*chain, *by([f"b{n}" for n in range(40)], "b-")])
        shown = report(of, capsys)["groups"]
        assert (shown["values"], shown["groups"], shown["largest"][0]["samples"]) == (101, 41, 120)
        cache = Cache(of.cache)
        both = [items(cache.open_snapshot(name)) for name in ("latest", "latest.heldout")]
        assert [{item[:2] == "b-" for item in side} for side in both] in (
            [{True}, {True, False}],
            [{True, False}, {True}],
        )


def test_sets_are_those_of_a_slow_search() -> None:
    """Against components that are found one row at a time, in pieces of any size."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        joined, frame = Joined(["a", "b", "c", "d"], scratch=Scratch()), frame_of(rng, 40, 30)
        names = rng.integers(0, 25, len(frame))
        keys = np.array([groups.value_key(f"v{name}") if name < 18 else bytes(16) for name in names], "S16")
        frame = dataclasses.replace(frame, group=keys)
        pairs = np.array([[groups.value_key("v1"), groups.value_key(f"v{rng.integers(18)}")]], "S16")
        near = np.array([b"%016d" % n for n in rng.integers(0, 30, len(frame))], "S16")
        found, shown = groups.united(joined, frame, groups.Values("v", pairs), near)
        links = [*zip(near, [b"value" + key if key else b"" for key in keys], strict=True)]
        links += [(b"value" + pairs[0, 0], b"value" + pairs[0, 1])]
        of = {name: {name} for link in links for name in link if name}
        for first, second in links:
            if first and second:
                together = of[first] | of[second]
                of |= dict.fromkeys(together, together)
        slow = [frozenset(of[key]) for key in near]
        assert len(set(zip(found.tolist(), slow, strict=True))) == len(set(slow)) == len(set(found.tolist()))
        assert shown["without_value"] == int((names >= 18).sum()) and shown["values"] == len(set(names[names < 18]))
        assert shown["groups"] == len({each for each, name in zip(slow, names, strict=True) if name < 18})


def test_what_is_said_of_groups(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add(config(root), "bare", [Picture("x.png", "x")])
    of = config(root, GROUP, HALF)
    shown = report(of, capsys)
    assert (shown["groups"]["column"], shown["groups"]["values"], shown["groups"]["without_value"]) == ("artist", 8, 5)
    assert shown["groups"]["heldout_samples"] == shown["heldout"]["samples"]
    assert any("'bare'" in note and "artist" in note for note in shown["notes"])
    sana_pipe.stages.bucket.run(of)
    assert "groups by artist: 8 of 8 values" in capsys.readouterr().out
    for name, side in (("latest", "train"), ("latest.heldout", "heldout")):
        policy = Cache(of.cache).open_snapshot(name).head.policies.heldout
        assert policy is not None and (policy.group, policy.side, policy.distance) == ("artist", side, None)
        sana_pipe.stages.snapshots.show(of, name)
        assert "by whole groups of artist" in capsys.readouterr().out
    cache = Cache(of.cache)
    assert heldout.find(cache, cache.open_snapshot()) == cache.snapshot_of("latest.heldout")
    assert collect(of)[0]["snapshot"]["heldout"]["group"] == "artist"
    capsys.readouterr()
    sana_pipe.stages.inspect.run(of)
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("by whole groups of artist", "bucket.group", "share of visits"))
    nothing = report(config(root, GROUP, "bucket.heldout=0.0001"), capsys)
    assert "heldout" not in nothing and any("holds nothing out" in note for note in nothing["notes"])
    assert any("no effect" in note for note in report(config(root, GROUP), capsys)["notes"])


def test_a_part_is_refused_whose_artists_have_changed_sides(tmp_path: Path) -> None:
    """The rule is the same, and yet the side of a picture is not decided by its digest."""
    of = config(tmp_path / "cache", GROUP, HALF)
    add(of, "one", by([f"a{n // 4}" for n in range(40)]))
    sana_pipe.stages.bucket.run(of, name="old")
    add(of, "one", by([f"b{n // 4}" for n in range(40)]))
    sana_pipe.stages.bucket.run(of, name="new")
    cache = Cache(of.cache)
    train, part = cache.open_snapshot("new"), cache.open_snapshot("old.heldout")
    assert items(train) & items(part)
    with pytest.raises(ConfigError, match="are trained on"):
        heldout.check_disjoint(train, part)
    heldout.check_disjoint(train, cache.open_snapshot("new.heldout"))


@pytest.mark.parametrize(
    ("column", "says"),
    [("artits", "artist"), ("artist = 'a1'", "column"), ("crop_loss", "column"), ("artist; folder", "bucket.group")],
)
def test_what_is_no_column_is_refused(root: Path, column: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        sana_pipe.stages.bucket.run(config(root, HALF, f"bucket.group={json.dumps(column)}"))
    assert "bucket.group" in str(caught.value) and says in str(caught.value)


@pytest.mark.parametrize("column", ["exif.model", '"clip-score"', "meta.width", "big"])
def test_columns_are_those_of_filters(tmp_path: Path, column: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also nested and quoted ones, one that a column of the scan hides, and numbers that fp64 would round."""
    of = config(tmp_path / "cache", f"bucket.group={json.dumps(column)}", HALF)
    metas = [
        {"exif": {"model": f"m{n // 4}"}, "clip-score": n // 4, "width": f"{n // 4}", "big": 10**17 + n // 4}
        for n in range(40)
    ]
    add(of, "one", [Picture(f"{n}.png", f"{n}", meta=meta) for n, meta in enumerate(metas)])
    shown = report(of, capsys)["groups"]
    assert (shown["values"], shown["groups"], shown["without_value"]) == (10, 10, 0)
    cache = Cache(of.cache)
    train, part = (items(cache.open_snapshot(name)) for name in ("latest", "latest.heldout"))
    assert not {int(item[:-4]) // 4 for item in train} & {int(item[:-4]) // 4 for item in part}


def test_a_filter_that_leaves_nothing_is_named_and_not_the_column(root: Path) -> None:
    with pytest.raises(UserError, match="nothing is left"):
        sana_pipe.stages.bucket.run(config(root, GROUP, HALF, "bucket.filter=width > 10000"))


def test_samples_of_an_older_part_whose_artist_is_trained_on_are_counted(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are of other pictures, and the cache has no hashes: the column alone tells."""
    part = config(root, "bucket.filter=item IN ('000.png', '001.png', '009.png', '002.png', '041.png')")
    sana_pipe.stages.bucket.run(part, name="old")
    validated = "train.validation.snapshot=old"
    others = "bucket.filter=item NOT IN ('000.png', '001.png', '009.png', '041.png') AND artist NOT LIKE '%a2%'"
    result = report(config(root, others, GROUP, validated), capsys, name="new")
    cache = Cache(config(root).cache)
    old, trained = cache.open_snapshot("old"), cache.open_snapshot("new")
    mine = {artist(item) for item in items(trained)} - {None}
    shared = sum(artist(old.source_item(row)[1]) in mine for row in range(len(old)))
    assert 0 < shared < len(old) and result["leaked"] == trained.head.leaked == {old.id: shared}
    assert any(f"{shared} samples of old share a group of artist" in note for note in result["notes"])
    assert not any("no effect" in note for note in result["notes"])
    assert report(config(root, others, validated), capsys)["leaked"] == {}, "without bucket.group nothing is known"
    lines: list[str] = []
    opening.held_out(cache, trained, "old", 10, lines.append)
    assert any(f"{shared} of them" in line and "artist" in line for line in lines)


def test_groups_of_a_table_from_beside_are_counted_on_both_sides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And no count is made up where none of one side has a value."""
    of, names = config(tmp_path / "cache"), [f"{number}.png" for number in range(6)]
    add(of, "one", [Picture(name, name) for name in names])
    part = "bucket.filter=item IN ('4.png', '5.png')"
    sana_pipe.stages.bucket.run(config(tmp_path / "cache", part), name="old")
    table = tmp_path / "artists.jsonl"
    options = ("bucket.group=artist", "train.validation.snapshot=old", f"bucket.metadata={table}")
    training = ("bucket.filter=item NOT IN ('4.png', '5.png')", *options)
    for artists, leaked in ((dict.fromkeys(names, "same"), [1]), ({"0.png": "a", "1.png": "b"}, [])):
        rows = ({"item": item, "artist": artist} for item, artist in artists.items() if item != "5.png")
        table.write_text("".join(json.dumps(row) + "\n" for row in rows))
        result = report(config(tmp_path / "cache", *training), capsys)
        assert list(result["leaked"].values()) == leaked
        assert any("none of one side has a value" in note for note in result["notes"]) == (not leaked)


def test_lists_join_the_groups_of_both_snapshots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """x is trained on; a picture of x and y is in the part, and so are one of y and one of z."""
    of = config(tmp_path / "cache", GROUP)
    metas = {"1.png": "x", "2.png": ["x", "y"], "3.png": "y", "4.png": "z", "5.png": None, "6.png": ["z", "w"]}
    add(of, "one", [Picture(item, item, meta={"artist": value}) for item, value in metas.items()])
    held_out = "'2.png', '3.png', '4.png', '5.png'"
    sana_pipe.stages.bucket.run(config(tmp_path / "cache", f"bucket.filter=item IN ({held_out})"), name="old")
    some = ("train.validation.snapshot=old", "bucket.filter=item = '1.png'")
    assert list(report(config(tmp_path / "cache", GROUP, *some), capsys)["leaked"].values()) == [2]
    every = ("train.validation.snapshot=old", f"bucket.filter=item NOT IN ({held_out})")
    assert list(report(config(tmp_path / "cache", GROUP, *every), capsys)["leaked"].values()) == [3]


def test_folders_are_groups(tmp_path: Path) -> None:
    of = config(tmp_path / "cache", "bucket.group=folder", HALF)
    add(of, "books", [Picture(f"book {n // 5}/part/{n}.png", f"{n}") for n in range(60)] + [Picture("top.png", "top")])
    of_folder = defaultdict(set)
    for number, side in enumerate(sides(of)):
        for item in side:
            of_folder[item.rpartition("/")[0]].add(number)
    assert len(of_folder) == 13 and all(len(numbers) == 1 for numbers in of_folder.values())
    assert {number for numbers in of_folder.values() for number in numbers} == {0, 1}


def test_a_frame_keeps_its_groups() -> None:
    frame = frame_of(np.random.default_rng(0), 9, 9)
    frame = dataclasses.replace(frame, group=np.array([b"%016d" % n for n in range(len(frame))], "S16"))
    columns = FrameColumns(Scratch(), frame.pictures)
    columns.add(frame)
    rows = np.array([3, 1])
    assert columns.frame().take(rows, Scratch()).group.tolist() == frame.group[rows].tolist()
