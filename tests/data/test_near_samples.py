"""`bucket` with near-duplicates: one picture of each group, whole groups held out, and what is printed."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

import sana_pipe.stages.bucket
import sana_pipe.stages.encode
import sana_pipe.stages.report
import sana_pipe.stages.snapshots
import sana_pipe.stages.train
import sana_pipe.stages.verify
import sana_pipe.stages.view
from sana_pipe.base.errors import CacheError, ConfigError, IntegrityError
from sana_pipe.config import Config
from sana_pipe.data.cache import layout
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.shard import ShardReader
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.snapshots import frames, group_memory, heldout, near, near_samples, selection
from sana_pipe.data.snapshots.near import DISTANCE
from tests.support.constants import set_constants, unit_sizes
from tests.support.reports import collect

MakeConfig = Callable[..., Config]
SIZE = "encode.signals=[phash]"


def copies(picture: Path) -> dict[str, Image.Image]:
    """What people make of a picture, by the end of the name."""
    with Image.open(picture) as opened:
        whole = opened.convert("RGB")
    width, height = whole.size
    inner = (width // 24, height // 24, width - width // 24, height - height // 24)
    return {
        "small": whole.resize((width // 2, height // 2)),
        "mirrored": ImageOps.mirror(whole),
        "cropped": whole.crop(inner),
    }


@pytest.fixture(scope="module")
def source(photos: Path, made_once: Callable[..., Path]) -> Path:
    """The photographs, and copies of three of them."""

    def make(folder: Path) -> None:
        shutil.copytree(photos, folder / "all")
        for picture in sorted((folder / "all").glob("*.jpg"))[:3]:
            for end, copy in copies(picture).items():
                copy.save(picture.with_name(f"{picture.stem}-{end}.jpg"), quality=60)
                picture.with_name(f"{picture.stem}-{end}.txt").write_text("a copy")

    return made_once("copies", make) / "all"


@pytest.fixture(scope="module")
def encoded(source: Path, make_config: MakeConfig, made_once: Callable[..., Path]) -> Path:
    return (
        made_once("copied", lambda folder: sana_pipe.stages.encode.run(make_config(folder, SIZE), data=str(source)))
        / "cache"
    )


@pytest.fixture
def config(encoded: Path, make_config: MakeConfig, tmp_path: Path) -> Callable[..., Config]:
    shutil.copytree(encoded, tmp_path / "cache")
    return lambda *options: make_config(tmp_path, SIZE, *options)


def items(snapshot: Snapshot) -> set[str]:
    return {snapshot.source_item(row)[1] for row in range(len(snapshot))}


def originals(source: Path) -> list[str]:
    return sorted(path.name.removesuffix("-small.jpg") for path in source.glob("*-small.jpg"))


def test_one_picture_of_each_group_stays_the_largest(
    config: Callable[..., Config], source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    every = items(Cache(config().cache).open_snapshot(sana_pipe.stages.bucket.run(config())))
    capsys.readouterr()
    sana_pipe.stages.bucket.run(config("bucket.dedup=near"), as_json=True)
    report = json.loads(capsys.readouterr().out)
    left = items(Cache(config().cache).open_snapshot())
    ends = ("small", "mirrored", "cropped")
    assert every - left == {f"{name}-{end}.jpg" for name in originals(source) for end in ends}
    [near] = report["duplicates"]
    assert (near["kind"], near["groups"], near["pictures"], near["left_out"]) == ("near", 3, 12, 9)
    assert sorted(group["pictures"] for group in near["largest"]) == [4, 4, 4]
    assert {name for group in near["largest"] for name in group["stays"]} <= {f"all: {item}" for item in left}
    assert {name for group in near["largest"] for name in group["left_out"]} == {
        f"all: {item}" for item in every - left
    }
    [entry] = [entry for entry in report["left_out"] if "looks the same" in entry["reason"]]
    assert entry["samples"] == 9 and "bucket.dedup_keep" in entry["keep"] and "bucket.dedup=image" in entry["keep"]
    sana_pipe.stages.bucket.run(config("bucket.dedup=near"), dry_run=True)
    out = capsys.readouterr().out
    assert "near-duplicates: 3 groups of 12 pictures, 9 left out" in out
    assert all(f"all: {item}" in out for item in every - left), "every picture of a few groups"


def test_the_next_bucket_compares_new_hashes_alone(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A dry run stores nothing; the groups and the snapshot are those of a bucket that compares all."""
    set_constants(monkeypatch, {"sana_pipe.data.snapshots.group_memory.LEAST": 1})
    compared, plain = list[int](), near.Search.__init__

    def counted(search: Any, unique: Any, distance: int, forest: Any, is_new: np.ndarray) -> None:
        compared.append(int(is_new.sum()))
        plain(search, unique, distance, forest, is_new)

    monkeypatch.setattr(near.Search, "__init__", counted)
    stored, of = tmp_path / "cache" / group_memory.PATH, config("bucket.dedup=near")
    sana_pipe.stages.bucket.run(of, dry_run=True)
    assert not stored.exists() and len(compared) == 1
    some = sana_pipe.stages.bucket.run(config("bucket.dedup=near", "bucket.filter=item LIKE '%-%'"))
    assert stored.exists() and 1 < compared[1] < compared[0]
    grown = sana_pipe.stages.bucket.run(of)
    again = sana_pipe.stages.bucket.run(of)
    assert compared[2] <= compared[0] - compared[1] and len(compared) == 3
    stored.unlink()
    assert sana_pipe.stages.bucket.run(of) == grown == again != some and compared[3] == compared[0]


def test_distance_zero_leaves_copies_alone(config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    every = items(Cache(config().cache).open_snapshot(sana_pipe.stages.bucket.run(config())))
    near = items(Cache(config().cache).open_snapshot(sana_pipe.stages.bucket.run(config("bucket.dedup=near"))))
    set_constants(monkeypatch, {"sana_pipe.data.snapshots.near.DISTANCE": 0})
    sure = items(Cache(config().cache).open_snapshot(sana_pipe.stages.bucket.run(config("bucket.dedup=near"))))
    assert near < sure <= every


def test_a_longer_caption_wins_between_equal_sizes(source: Path, make_config: MakeConfig, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    picture = originals(source)[0]
    for name, caption in (("a", "short"), ("b", "a much longer caption of it"), ("c", "middle one")):
        with Image.open(source / f"{picture}.jpg") as opened:
            opened.save(data / f"{name}.jpg", quality={"a": 95, "b": 60, "c": 80}[name])
        (data / f"{name}.txt").write_text(caption)
    of = make_config(tmp_path, SIZE, "bucket.dedup=near")
    sana_pipe.stages.encode.run(of, data=str(data))
    assert items(Cache(of.cache).open_snapshot(sana_pipe.stages.bucket.run(of))) == {"b.jpg"}


@pytest.mark.parametrize("share", [0.2, 0.4, 0.6, 0.8])
def test_groups_are_held_out_whole(config: Callable[..., Config], source: Path, share: float) -> None:
    of = config(f"bucket.heldout={share}")
    sana_pipe.stages.bucket.run(of)
    cache = Cache(of.cache)
    train, part = cache.open_snapshot(), cache.open_snapshot("latest.heldout")
    for name in originals(source):
        group = {f"{name}.jpg", *(f"{name}-{end}.jpg" for end in ("small", "mirrored", "cropped"))}
        assert group <= items(train) or group <= items(part)
    assert train.head.policies.heldout is not None and train.head.policies.heldout.distance == DISTANCE
    heldout.check_disjoint(train, part)
    assert heldout.find(cache, train) == part.id


@pytest.mark.parametrize("dedup", ["none", "image"])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_near_duplicates_join_groups(config: Callable[..., Config], source: Path, dedup: str, share: float) -> None:
    """The copies have one caption, so they are a group; each of three photographs is in it by a copy."""
    of = config("bucket.group=caption", f"bucket.heldout={share}", f"bucket.dedup={dedup}")
    sana_pipe.stages.bucket.run(of)
    cache = Cache(of.cache)
    train, part = (items(cache.open_snapshot(name)) for name in ("latest", "latest.heldout"))
    copied = {f"{name}{end}.jpg" for name in originals(source) for end in ("", "-small", "-mirrored", "-cropped")}
    assert copied <= train or copied <= part
    assert train and part and not train & part


def test_a_cache_without_hashes_says_how_to_get_them(small_cache: Path, make_config: MakeConfig) -> None:
    of = make_config(small_cache.parent, "bucket.dedup=near")
    with pytest.raises(CacheError, match="compares hashes") as caught:
        sana_pipe.stages.bucket.run(of, dry_run=True)
    assert "encode.signals=[phash]" in str(caught.value.fix)


def test_a_damaged_hash_ends_bucket_with_its_repair(config: Callable[..., Config], tmp_path: Path) -> None:
    path = next((tmp_path / "cache").glob("shards/phash-*/*/*.tar"))
    data = bytearray(path.read_bytes())
    snapshot = Cache(config().cache).open_snapshot(sana_pipe.stages.bucket.run(config()))
    place = snapshot.sample(0).pictures["phash"]
    data[place.offset] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match=place.key.hex()):
        sana_pipe.stages.bucket.run(config("bucket.dedup=near"))
    assert sana_pipe.stages.verify.run(config(), repair=True) == 0
    sana_pipe.stages.bucket.run(config("bucket.dedup=near"))


def test_a_pack_and_another_order_of_caches_change_nothing(
    config: Callable[..., Config], encoded: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    of = config("bucket.dedup=near")
    here = Cache(of.cache).open_snapshot(sana_pipe.stages.bucket.run(of))
    other = make_config(tmp_path / "joined", SIZE, "bucket.dedup=near", f"bucket.caches=[{encoded}]")
    sana_pipe.stages.bucket.run(other)
    there = Cache(other.cache).open_snapshot()
    ids = [next(snapshot.sample_ids()).tolist() for snapshot in (here, there)]
    assert items(here) == items(there) and ids[0] == ids[1]


def test_copies_in_training_of_an_older_held_out_part_are_counted(
    config: Callable[..., Config], source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The part has one picture of each group, whose copies are trained on."""
    kept = ", ".join(f"'{name}-small.jpg'" for name in originals(source))
    sana_pipe.stages.bucket.run(config(f"bucket.filter=item IN ({kept})"), name="old")
    others = f"bucket.filter=item NOT IN ({kept})"
    assert "train.validation" not in others
    sana_pipe.stages.bucket.run(config(others, "train.validation.snapshot=not-made-yet"))
    before = Cache(config().cache).open_snapshot(sana_pipe.stages.bucket.run(config(others)))
    capsys.readouterr()
    sana_pipe.stages.bucket.run(config(others, "train.validation.snapshot=old"), name="new")
    assert "3 of its samples look like one of these; its loss is then not that of unseen" in capsys.readouterr().out
    cache = Cache(config().cache)
    part = cache.open_snapshot("old")
    assert cache.open_snapshot("new").head.leaked == {part.id: 3}
    assert before.head.leaked is None and cache.open_snapshot().head.leaked == {part.id: 3}
    assert sana_pipe.stages.bucket.run(config(others)) == cache.snapshot_of("new"), "it says as much, and more"
    clean = (
        f"bucket.filter=item NOT LIKE '%-%' AND item NOT IN ({', '.join(repr(f'{n}.jpg') for n in originals(source))})"
    )
    sana_pipe.stages.bucket.run(config(clean, "train.validation.snapshot=old"), name="clean")
    assert cache.open_snapshot("clean").head.leaked == {part.id: 0}
    run = config(others, "train.validation={snapshot: old, every: 2}", "train.steps=2")
    sana_pipe.stages.train.run(run, snapshot="new")
    assert "warning: 3 of them look like a sample that is trained on" in capsys.readouterr().out
    rows = [json.loads(line) for line in (Path(run.train.output) / "metrics.jsonl").read_text().splitlines()]
    [row] = [row for row in rows if "leaked" in row][:1]
    assert row["leaked"] == 3


@pytest.mark.parametrize("dedup", ["near", "image"])
def test_captions_of_what_is_left_out_are_kept_once(
    dedup: str, source: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    picture = (source / f"{originals(source)[0]}.jpg").read_bytes()
    for name, caption in (("a", "one"), ("b", "the longest caption"), ("c", "one"), ("d", "another")):
        (data / f"{name}.jpg").write_bytes(picture)
        (data / f"{name}.txt").write_text(caption)
    other = min(source.glob("*.png"))
    for name in ("0", "z"):
        shutil.copy(other, data / f"{name}.png")
        (data / f"{name}.txt").write_text(f"text {name}")
    of = make_config(tmp_path, SIZE, f"bucket.dedup={dedup}", "bucket.dedup_captions=keep")
    sana_pipe.stages.encode.run(of, data=str(data))
    snapshot = Cache(of.cache).open_snapshot(sana_pipe.stages.bucket.run(of))
    reader = snapshot.reader("text")
    said = {snapshot.source_item(row)[1]: snapshot.captions(row, reader) for row in range(len(snapshot))}
    stays = {"near": "b.jpg", "image": "a.jpg"}[dedup]
    assert said.keys() == {stays, "0.png"}
    assert sorted(said[stays]) == ["another", "one", "the longest caption"] and said["0.png"] == ["text 0", "text z"]
    weights = {c.weight for row in range(len(snapshot)) for c in snapshot.sample(row).captions}
    assert weights == {1.0}


def test_view_names_the_samples_that_look_the_same(
    config: Callable[..., Config], source: Path, small_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of, name = config(), originals(source)[0]
    sana_pipe.stages.bucket.run(of)
    capsys.readouterr()
    sana_pipe.stages.view.run(of, f"{name}.jpg", as_json=True, near=True)
    near = json.loads(capsys.readouterr().out)["near"]
    assert {each["item"] for each in near} == {f"all: {name}-{end}.jpg" for end in ("small", "mirrored", "cropped")}
    assert [each["bits"] for each in near] == sorted(each["bits"] for each in near)
    assert all(each["bits"] <= DISTANCE for each in near)
    sana_pipe.stages.view.run(of, f"{name}.jpg", near=True)
    assert f"near:      all: {name}-small.jpg (" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no hashes"):
        sana_pipe.stages.view.run(of.model_copy(update={"cache": str(small_cache)}), "coffee.png", near=True)


def test_hashes_are_read_a_part_at_a_time(config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    of = config()
    snapshot = Cache(of.cache).open_snapshot(sana_pipe.stages.bucket.run(of))
    whole, asked, read = near_samples.hashes_of(snapshot), list[int](), list[int]()
    columns, read_batch = Snapshot.columns, ShardReader.read_batch
    monkeypatch.setattr(near_samples, "CHUNK_ROWS", 3)
    monkeypatch.setattr(frames, "ROWS", 4)
    monkeypatch.setattr(
        Snapshot, "columns", lambda self, rows, *of: (asked.append(len(rows)), columns(self, rows, *of))[1]
    )
    monkeypatch.setattr(
        ShardReader, "read_batch", lambda *given, **more: (read.append(len(given[3])), read_batch(*given, **more))[1]
    )
    np.testing.assert_array_equal(near_samples.hashes_of(snapshot), whole)
    kept = [snapshot.picture(snapshot.sample(row), "phash").ravel() for row in range(len(snapshot))]
    np.testing.assert_array_equal(np.array(kept), whole)
    assert (max(asked), sum(asked), max(read)) == (3, len(snapshot), 4), "whole columns of all samples at once"


def test_the_report_shows_groups_with_their_pictures(
    config: Callable[..., Config], source: Path, tmp_path: Path
) -> None:
    sana_pipe.stages.bucket.run(config())
    figures, _, _ = collect(config())
    assert [group["pictures"] for group in figures["snapshot"]["alike"]] == [4, 4, 4]
    names = {example["item"] for group in figures["snapshot"]["alike"] for example in group["examples"]}
    assert names >= {f"{name}-mirrored.jpg" for name in originals(source)} and figures["snapshot"]["visits"] == []
    sana_pipe.stages.report.run(config(), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count("4 pictures look the same") == 3 and "Pictures that look the same" in page
    sana_pipe.stages.bucket.run(config("bucket.dedup=near"))
    assert collect(config())[0]["snapshot"]["alike"] == []
    sana_pipe.stages.report.run(config(), tmp_path / "page.html")
    assert "look the same" not in (tmp_path / "page.html").read_text()


def test_the_resolutions_of_a_picture_are_one(
    source: Path, make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = [SIZE, "data.buckets=sana", "data.max_upscale=100", "bucket.resolutions=[128, 256]"]
    for size in (128, 256):
        of = make_config(tmp_path, *sizes, f"data.resolution={size}")
        sana_pipe.stages.encode.run(of, data=str(source))
    every = Cache(of.cache).open_snapshot(sana_pipe.stages.bucket.run(of))
    assert [group["pictures"] for group in collect(of)[0]["snapshot"]["alike"]] == [4, 4, 4]
    name = originals(source)[0]
    capsys.readouterr()
    row = next(row for row in range(len(every)) if every.source_item(row)[1] == f"{name}.jpg")
    sana_pipe.stages.view.run(of, str(every.sample_id(row)), as_json=True, near=True)
    near = sorted(each["item"] for each in json.loads(capsys.readouterr().out)["near"])
    assert near == [f"all: {name}-{end}.jpg" for end in ("cropped", "mirrored", "small")]
    sure = make_config(tmp_path, *sizes, "data.resolution=256", "bucket.dedup=near")
    left = Cache(of.cache).open_snapshot(sana_pipe.stages.bucket.run(sure))
    assert (len(every) - len(left), len(items(every)) - len(items(left))) == (18, 9)


def test_the_progress_of_a_long_comparison_is_shown(
    config: Callable[..., Config], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sana_pipe.stages.bucket.run(config("bucket.dedup=near"))
    assert "compared" not in capsys.readouterr().err
    monkeypatch.setattr(sana_pipe.stages.bucket, "MANY", 1)
    sana_pipe.stages.bucket.run(config("bucket.dedup=near"))
    assert re.search(r"hashes compared: (\d+)/\1, ", capsys.readouterr().err)


def test_a_difference_names_hashes_that_only_one_snapshot_has(
    config: Callable[..., Config], make_config: MakeConfig, source: Path, tmp_path: Path, capsys: Any
) -> None:
    with_hashes = sana_pipe.stages.bucket.run(config())
    plain = make_config(tmp_path, "encode.signals=[]")
    sana_pipe.stages.encode.run(plain, data=str(source))
    without = sana_pipe.stages.bucket.run(plain)
    capsys.readouterr()
    assert sana_pipe.stages.snapshots.diff(plain, with_hashes, without) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == ["0 changed", "only A has records of the kind phash"]
    assert sana_pipe.stages.snapshots.diff(plain, without, with_hashes, as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["signals"] == ["phash"]
    assert sana_pipe.stages.snapshots.diff(plain, with_hashes, with_hashes) == 0


def test_tasks_and_a_changed_picture(
    source: Path, encoded: Path, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tasks give the snapshot of one; a picture that changes leaves its group."""
    set_constants(monkeypatch, unit_sizes(4, 512))
    data = Path(shutil.copytree(source, tmp_path / "all"))
    options = (SIZE, "bucket.dedup=near")
    alone, shared = (make_config(tmp_path / name, *options) for name in ("alone", "shared"))
    sana_pipe.stages.encode.run(alone, data=str(data))
    for task in (1, 0):
        sana_pipe.stages.encode.run(shared, data=str(data), task_index=task, task_count=2)
    assert sana_pipe.stages.bucket.run(alone) == sana_pipe.stages.bucket.run(shared)
    name = originals(source)[0]
    before = items(Cache(alone.cache).open_snapshot())
    (data / f"{name}-small.jpg").unlink()
    (data / f"{name}-small.txt").write_text("another picture now")
    Image.effect_noise((90, 70), 90).convert("RGB").save(data / f"{name}-small.png")
    sana_pipe.stages.encode.run(alone, data=str(data))
    sana_pipe.stages.bucket.run(alone)
    assert items(Cache(alone.cache).open_snapshot()) == before | {f"{name}-small.png"}


def test_growth_holds_out_nothing_that_was_trained_on(source: Path, make_config: MakeConfig, tmp_path: Path) -> None:
    """The side of a group hangs on the smallest digest of its files, which a new copy may have."""
    data = Path(shutil.copytree(source, tmp_path / "all"))
    config = make_config(tmp_path, SIZE, "bucket.heldout=0.5")
    sana_pipe.stages.encode.run(config, data=str(data))
    sana_pipe.stages.bucket.run(config, name="one")
    trained = items(Cache(config.cache).open_snapshot("one"))
    moved, smallest = 0, min(layout.digest(path.read_bytes()) for path in data.glob("*.jpg"))
    for item in sorted(trained)[:3]:
        picture = Image.open(data / item).convert("RGB")
        for quality in range(95, 40, -1):
            picture.save(out := io.BytesIO(), "JPEG", quality=quality)
            digest = layout.digest(out.getvalue())
            if digest < smallest and selection.is_held_out(np.array([digest], "S16"), 0.5)[0]:
                (data / f"{item.removesuffix('.jpg')}-again.jpg").write_bytes(out.getvalue())
                (data / f"{item.removesuffix('.jpg')}-again.txt").write_text("a copy")
                moved += 1
                break
    assert moved
    sana_pipe.stages.encode.run(config, data=str(data))
    sana_pipe.stages.bucket.run(config, name="anew")
    assert trained & items(Cache(config.cache).open_snapshot("anew.heldout")), "without growth they change sides"
    sana_pipe.stages.bucket.run(make_config(tmp_path, SIZE, "bucket.heldout=0.5", "bucket.grow=one"), name="two")
    cache = Cache(config.cache)
    assert not trained & items(cache.open_snapshot("two.heldout"))
    assert trained < items(cache.open_snapshot("two"))


def test_a_source_without_hashes_is_named(
    config: Callable[..., Config], photos: Path, make_config: MakeConfig, tmp_path: Path, capsys: Any
) -> None:
    sana_pipe.stages.encode.run(make_config(tmp_path), data=str(photos), source_name="plain")
    capsys.readouterr()
    sana_pipe.stages.bucket.run(config("bucket.heldout=0.3"))
    assert "no records of the kind phash, which source plain lacks" in capsys.readouterr().err
    assert list(Cache(config().cache).open_snapshot().pictures) == ["latent"]
    with pytest.raises(CacheError, match="not all sources have them"):
        sana_pipe.stages.bucket.run(config("bucket.dedup=near"))
    sana_pipe.stages.bucket.run(config("bucket.sources={plain: {weight: 0}}", "bucket.dedup=near"))
    assert list(Cache(config().cache).open_snapshot().pictures) == ["latent", "phash"]
