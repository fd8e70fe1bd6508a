"""Tars, parquet, listings and JSON sidecars: what is listed, what is refused by name, and bytes at random."""

from __future__ import annotations

import base64
import csv
import errno
import gc
import io
import json
import os
import random
import re
import shlex
import tarfile
import zipfile
from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset

from sana_pipe.base import retrying
from sana_pipe.base.errors import AwayError, UserError
from sana_pipe.data.cache import scratch
from sana_pipe.data.cache.layout import content_digest
from sana_pipe.data.sources import caption_columns, detect, formats, metadata_files, tables
from sana_pipe.data.sources.caption_columns import CaptionCandidate, CaptionRule
from sana_pipe.data.sources.config import DataConfig
from sana_pipe.data.sources.detect import open_source
from sana_pipe.data.sources.filesystem import LocalFilesystem
from sana_pipe.data.sources.folder import SIDECAR_BATCH, FolderSource
from sana_pipe.data.sources.reject_kinds import Kinds
from sana_pipe.data.sources.source import Given, Item, ListedItems, Place, Reject, Unreadable
from sana_pipe.data.sources.tables import ListingSource
from tests.support.failing_reads import fail_reads
from tests.support.lowered import lower_limits
from tests.support.messages import naming
from tests.support.source_files import Rows, cut, listed, make_tar, opened


def texts(item: Item) -> list[str]:
    return [text for text, _ in item.captions]


@pytest.mark.parametrize(("failures", "is_folder"), [(0, True), (2, True), (10**9, None)])
def test_what_an_entry_is_is_waited_for(
    failures: int, is_folder: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrying, "PAUSE_S", 0.01)
    left = iter([errno.ESTALE] * min(failures, 10**4))

    def is_dir() -> bool:
        if number := next(left, 0):
            raise OSError(number, os.strerror(number))
        return True

    disk, entry = LocalFilesystem(tmp_path, 0.2 if is_folder is None else 60), SimpleNamespace(is_dir=is_dir)
    if is_folder is None:
        with pytest.raises(AwayError):
            disk.is_folder(entry)  # type: ignore[arg-type]
    else:
        assert disk.is_folder(entry) is is_folder  # type: ignore[arg-type]
    (tmp_path / "circle").symlink_to("circle")
    assert [disk.is_folder(entry) for entry in os.scandir(tmp_path)] == [False]


def test_ranges_of_a_folder_hold_each_entry_once(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.png").write_bytes(b"x")
        (tmp_path / f"{number}.txt").write_text("a caption")
        (tmp_path / f"away-{number}.png").symlink_to("/nowhere")
    source = opened(tmp_path)
    [part] = source.parts()
    ranges = cut(source, part, 2)
    entries = [[entry.key for entry in one.items()] for one in ranges]
    assert sorted(key for keys in entries for key in keys) == sorted(
        [f"{kind}{n}.png" for kind in ("", "away-") for n in range(5)]
    )
    assert [one.count for one in ranges] == [len(keys) for keys in entries] == [2, 2, 1] * 2
    assert len({one.identity(one.look()) for one in ranges}) == len(ranges)


def test_parts_without_a_stamp_share_a_temporary_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):  # their rows name files, so they have no stamp
        (tmp_path / f"{name}.png").write_bytes(b"x")
        columns = {"file_name": [f"{name}.png"] * 3, "text": ["a caption"] * 3, "day": [date(2026, 1, 1)] * 3}
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    made, make = list[object](), scratch.Scratch.table_writer
    monkeypatch.setattr(
        scratch.Scratch,
        "table_writer",
        lambda *args: made.append(args) or make(*args),  # type: ignore[func-returns-value]
    )
    source, items = opened(tmp_path / "*.parquet"), ListedItems(scratch.Scratch())
    ranges = [one for part in source.parts() for one in source.fragments(part, 2, items)]
    items.finish()
    assert len(made) == 1 and [one.count for one in ranges] == [2, 1, 2, 1]
    keys = [entry.key for one in ranges for entry in one.items()]
    assert keys == [f"{name}.parquet/{name}.png{end}" for name in "ab" for end in ("", "-2", "-3")]
    [first, *_] = ranges[2].items()
    assert isinstance(first, Item) and first.place == Place("b.parquet/b.png", "b.parquet", "=b.png")
    assert first.captions == (("a caption", 1.0),) and first.meta == {"day": date(2026, 1, 1)}
    before = ranges[0].identity(ranges[0].look())
    os.utime(tmp_path / "a.png", ns=(0, 0))
    assert ranges[0].identity(ranges[0].look()) != before


# --- tars ----------------------------------------------------------------------------------------------------------


def test_a_tar_written_by_webdataset(tmp_path: Path) -> None:
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as sink:
        for n in range(5):
            sink.write({"__key__": f"sub/{n:03d}", "jpg": b"picture %d" % n, "txt": f"caption {n}"})
    source = opened(tmp_path)
    items, rejects = listed(source)
    assert not rejects
    assert list(items) == [f"a.tar/sub/{n:03d}.jpg" for n in range(5)]
    assert [texts(item) for item in items.values()] == [[f"caption {n}"] for n in range(5)]
    for n, item in enumerate(items.values()):
        assert source.read(item.place) == b"picture %d" % n
        assert source.stat(item.place) == (9, os.stat(tmp_path / "a.tar").st_mtime_ns)


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_and_foreign_names(tmp_path: Path, format: int) -> None:
    long = "d" * 90 + "/" + "x" * 90
    names = [long, "été 雪"] if format != tarfile.USTAR_FORMAT else [long]
    make_tar(tmp_path / "a.tar", [m for n in names for m in ((f"./{n}.png", n), (f"./{n}.txt", "said"))], format)
    source = opened(tmp_path / "a.tar")
    items, rejects = listed(source)
    assert not rejects
    assert set(items) == {f"a.tar/{name}.png" for name in names}
    assert all(source.read(items[f"a.tar/{name}.png"].place) == name.encode() for name in names)


def test_a_caption_that_was_not_reached_is_not_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tar(tmp_path / "a.tar", [("1.png", bytes(io.DEFAULT_BUFFER_SIZE)), ("1.txt", "said")])
    fail_reads(monkeypatch, "a.tar", errno.EIO, 1)
    items, rejects = listed(opened(tmp_path))
    assert not items and rejects["a.tar"].startswith("unreadable: ")


def test_captions_next_to_a_tar_that_cannot_be_read_are_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tar(tmp_path / "a.tar", [("1.png", b""), ("1.txt", "said")])
    (tmp_path / "a.json").write_text('{"1": {"text": "more"}}')
    fail_reads(monkeypatch, "a.json", errno.EIO)
    items, rejects = listed(opened(tmp_path))
    assert len(items) == 1 and rejects["a.json"].startswith("unreadable: ")


def test_pictures_json_and_text_of_one_sample(tmp_path: Path) -> None:
    make_tar(
        tmp_path / "a.tar",
        [
            ("1.JPG", b"j"),
            ("1.webp", b"w"),
            ("1.seg.png", b"s"),
            ("1.json", {"text": "object", "id": 7}),
            ("1.txt", " file\n"),
            ("__meta__/x.jpg", b"no"),
            ("README", "no"),
            ("2.txt", "no picture"),
        ],
    )
    source = opened(tmp_path / "a.tar")
    items, rejects = listed(source)
    assert not rejects
    assert {key: texts(item) for key, item in items.items()} == {
        "a.tar/1.JPG": ["file", "object"],
        "a.tar/1.webp": ["file", "object"],
    }
    assert items["a.tar/1.JPG"].meta == {"id": 7}
    assert source.ignored.total == 4


def test_equal_names_in_two_tars_are_two_items(tmp_path: Path) -> None:
    for shard in ("s-0", "s-1"):
        make_tar(tmp_path / f"{shard}.tar", [("0.jpg", shard), ("0.txt", shard)])
    source = opened(tmp_path / "s-{0..1}.tar")
    items, rejects = listed(source)
    assert {key: source.read(item.place) for key, item in items.items()} == {
        "s-0.tar/0.jpg": b"s-0",
        "s-1.tar/0.jpg": b"s-1",
    }
    assert not rejects
    assert list(listed(opened(tmp_path / "s-*.tar"))[0]) == list(items)


def test_members_that_do_not_stand_together_are_refused_never_joined(tmp_path: Path) -> None:
    whole: Rows = [("a.jpg", b"A"), ("a.txt", "a"), ("b.jpg", b"B"), ("b.txt", "b"), ("c.jpg", b"C"), ("c.txt", "c")]
    items, rejects = listed(opened(make_tar(tmp_path / "x.tar", whole)))
    assert len(items) == 3
    assert not rejects
    split = [whole[0], whole[2], whole[3], whole[1], *whole[4:]]
    items, rejects = listed(opened(make_tar(tmp_path / "x.tar", split)))
    assert set(items) == {"x.tar/b.jpg", "x.tar/c.jpg"}
    assert set(rejects) == {"x.tar/a"}
    assert "do not stand together" in rejects["x.tar/a"]


def test_every_shuffle_gives_whole_samples_or_rejects(tmp_path: Path) -> None:
    chance = random.Random(1)
    members: Rows = [(f"{n}.{kind}", f"{n}") for n in range(6) for kind in ("png", "txt", "json")]
    members = [(name, {"text": name[0]} if name.endswith("json") else content) for name, content in members]
    refused = 0
    for _ in range(30):
        some = members[:]
        for _ in range(3):
            i, j = chance.randrange(len(some)), chance.randrange(len(some))
            some[i], some[j] = some[j], some[i]
        source = opened(make_tar(tmp_path / "x.tar", some))
        items, rejects = listed(source)
        for key, item in items.items():
            assert source.read(item.place).decode() == texts(item)[0] == key[len("x.tar/")]
        assert len(items) + len(rejects) == 6
        refused += len(rejects)
    assert refused


HOSTILE: list[tuple[str, str]] = [
    ("/etc/passwd.jpg", "absolute"),
    ("../up.jpg", "climbs"),
    ("a/../../b.jpg", "climbs"),
    ("a\\b.jpg", "backslash"),
    ("bell\a.jpg", "control"),
]


@pytest.mark.parametrize(("name", "reason"), HOSTILE)
def test_hostile_member_names_are_refused_by_name(tmp_path: Path, name: str, reason: str) -> None:
    make_tar(tmp_path / "x.tar", [(name, b"bad"), ("good.jpg", b"good"), ("good.txt", "good")])
    source = opened(tmp_path / "x.tar")
    items, rejects = listed(source)
    assert set(items) == {"x.tar/good.jpg"}
    (key,) = rejects
    assert reason in rejects[key]
    with pytest.raises(Unreadable):
        source.read(Place(f"x.tar/{name}"))


def test_links_specials_and_duplicates_are_refused_by_name(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for name, kind in (("l.jpg", tarfile.SYMTYPE), ("h.jpg", tarfile.LNKTYPE), ("p.jpg", tarfile.FIFOTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
        for name in ("d.jpg", "d.txt", "d.jpg", "t.txt", "ok.jpg", "ok.txt"):
            info = tarfile.TarInfo(name)
            info.size = 1
            tar.addfile(info, io.BytesIO(b"x"))
        for name in ("t.jpg", "first.txt"):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, "ok.jpg"
            tar.addfile(info)
        tar.addfile(tarfile.TarInfo("first.jpg"))
    items, rejects = listed(opened(tmp_path / "x.tar"))
    assert set(items) == {"x.tar/ok.jpg"}
    assert rejects == {
        "x.tar/l.jpg": "is a link",
        "x.tar/h.jpg": "is a link",
        "x.tar/p.jpg": "is not a regular file",
        "x.tar/t.jpg": "is a link",
        "x.tar/d": "has two members .jpg",
        "x.tar/first.txt": "is a link",
        "x.tar/first": "its .txt is a link",
    }


def test_the_head_of_a_member_ends_with_it(tmp_path: Path) -> None:
    make_tar(tmp_path / "x.tar", [("a.jpg", b"0123456789"), ("a.txt", "a"), ("b.jpg", b""), ("b.txt", "b")])
    source = opened(tmp_path / "x.tar")
    items, _ = listed(source)
    for name, length, expected in (("a", 4, b"0123"), ("a", 40, b"0123456789"), ("b", 4, b"")):
        assert source.head(items[f"x.tar/{name}.jpg"].place, length) == expected


def _cut(data: bytes) -> bytes:
    return data[:2000]


def _header(data: bytes) -> bytes:
    return data[:1024] + b"garbage" * 10 + data[1094:]


def _appended(data: bytes) -> bytes:
    return data + data


@pytest.mark.parametrize(
    ("damage", "reason"),
    [(_cut, "cut|not a whole tar|without an end"), (_header, "is damaged"), (_appended, "another tar after its end")],
)
def test_a_damaged_tar_is_reported_and_the_rest_is_used(
    tmp_path: Path, damage: Callable[[bytes], bytes], reason: str
) -> None:
    path = make_tar(tmp_path / "x.tar", [(f"{n}.{k}", b"x" * 300) for n in range(3) for k in ("txt", "jpg")])
    items, rejects = listed(opened(path))
    assert len(items) == 3
    assert not rejects
    size = path.stat().st_size
    path.write_bytes(damage(path.read_bytes()))
    items, rejects = listed(opened(path))
    assert damage is not _appended or f"the {size:,} bytes from {size} on" in rejects["x.tar"]
    assert len(items) == {_cut: 1, _header: 0, _appended: 3}[damage]
    assert re.search(reason, "; ".join(rejects.values()))
    assert any(key == "x.tar" for key in rejects)


def test_a_long_rest_of_a_tar_is_reported_once(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "x.tar", [("1.jpg", b"x"), ("1.txt", "one")])
    whole = path.read_bytes()
    path.write_bytes(whole + whole + bytes(3 << 20) + whole)
    assert len([entry for entry in opened(path).items() if isinstance(entry, Reject)]) == 1


def test_a_caption_of_a_csv_may_be_as_long_as_any(tmp_path: Path) -> None:
    caption = "long " * 40_000
    (tmp_path / "a.png").write_bytes(b"x")
    (tmp_path / "metadata.csv").write_text(f"file_name,text\na.png,{caption}\n")
    before = csv.field_size_limit(1 << 17)  # Python's default, whatever other tests have read
    try:
        items, rejects = listed(opened(tmp_path))
    finally:
        csv.field_size_limit(before)
    assert (items["a.png"].captions, rejects) == (((caption.strip(), 1.0),), {})


def test_an_empty_and_a_compressed_tar(tmp_path: Path) -> None:
    import gzip

    make_tar(tmp_path / "d" / "a.tar", [("1.jpg", b"x"), ("1.txt", "x")])
    (tmp_path / "d" / "empty.tar").write_bytes(b"")
    make_tar(tmp_path / "d" / "none.tar", [])
    (tmp_path / "d" / "z.tar").write_bytes(gzip.compress((tmp_path / "d" / "a.tar").read_bytes()))
    items, rejects = listed(opened(tmp_path / "d"))
    assert set(items) == {"a.tar/1.jpg"}
    assert rejects["empty.tar"] == "is empty"
    assert rejects["none.tar"] == "holds no picture"
    assert "compressed (gzip)" in rejects["z.tar"]
    (tmp_path / "d" / "z.tar").rename(tmp_path / "z.tar.gz")
    with pytest.raises(UserError, match="compressed"):
        opened(tmp_path / "z.tar.gz")
    (tmp_path / "only").mkdir()
    (tmp_path / "z.tar.gz").rename(tmp_path / "only" / "z.tar.gz")
    with pytest.raises(UserError, match=naming("compressed", "z.tar.gz", "unpack")):
        opened(tmp_path / "only")


def test_a_caption_file_that_cannot_be_used_is_reported_next_to_one_that_can(tmp_path: Path) -> None:
    members: Rows = [("1.jpg", b"x"), ("1.txt", b"\xff"), ("1.json", {"text": "one"})]
    source = opened(make_tar(tmp_path / "x.tar", members))
    items, rejects = listed(source)
    assert items["x.tar/1.jpg"].captions == (("one", 1.0),)
    assert not rejects
    [(kind, examples)] = source.ignored.examples.items()
    assert "its .txt is not UTF-8" in kind and examples == ["x.tar/1.jpg"]


def test_a_listed_file_that_is_missing_is_an_error(tmp_path: Path) -> None:
    make_tar(tmp_path / "wd-0.tar", [("1.jpg", b"x"), ("1.txt", "x")])
    assert len(listed(opened(tmp_path / "wd-{0..0}.tar"))[0]) == 1
    with pytest.raises(UserError, match=naming("1 of 2", "wd-1.tar")):
        listed(opened(tmp_path / "wd-{0..1}.tar"))
    with pytest.raises(UserError, match=naming("3 of 3", "wd-0.tar")):
        listed(opened(tmp_path / "wdd-{0..2}.tar"))
    for name in ("gone.parquet", "gone.jsonl"):
        with pytest.raises(UserError, match=naming("1 of 1", name)):
            listed(opened(tmp_path / f"{{{name},{name}}}"))
    (tmp_path / "wd-1.tar").mkdir()
    with pytest.raises(UserError, match=naming("1 of 2", "wd-1.tar: is not a regular file")):
        listed(opened(tmp_path / "wd-{0..1}.tar"))


def test_the_nearest_name_is_one_that_was_not_given(tmp_path: Path) -> None:
    for number in (0, 2):
        make_tar(tmp_path / "d" / f"wd-{number}.tar", [("1.jpg", b"x"), ("1.txt", "x")])
    with pytest.raises(UserError, match=naming("1 of 3", "wd-1.tar")) as refused:
        listed(opened(tmp_path / "d" / "wd-{0..2}.tar"))
    assert "did you mean" not in str(refused.value)
    for typo, near in (("d/dw-0.tar", "wd-0.tar"), ("dd", "d")):
        with pytest.raises(UserError, match=naming(typo, f"--data {tmp_path / Path(typo).parent / near}")):
            opened(tmp_path / typo)
    with pytest.raises(UserError, match=naming("dw-*.tar", "2 files")) as refused:
        opened(tmp_path / "d" / "dw-*.tar")
    assert refused.value.fix


def test_a_link_to_itself_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for data in ("loop", "loop/x-{0..1}.tar", "loop/x.jsonl"):
        with pytest.raises(UserError, match=naming("loop", "symbolic links")):
            opened(tmp_path / data)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match=naming("pipe", "neither a folder nor a file")):
        opened(tmp_path / "pipe")


def test_no_caption_at_all_names_the_columns_there_are(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "x.tar", [("1.jpg", b"x"), ("1.json", {"prompt": "a", "width": 3})])
    with pytest.raises(UserError, match="'prompt'"):
        listed(opened(path))
    items, _ = listed(opened(path, caption_field="prompt"))
    assert texts(items["x.tar/1.jpg"]) == ["a"]


def test_bytes_by_place_without_listing(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "x.tar", [(f"{n}.{k}", f"{n}{k}") for n in range(20) for k in ("jpg", "txt")])
    first = opened(path)
    places = [item.place for item in first.items() if isinstance(item, Item)]
    later = opened(path)
    for foreign in (Place("x.tar/3.jpg"), Place("x.tar/3.jpg", "x.tar", "0:3+2"), Place("3.jpg", None, "512+2")):
        with pytest.raises(Unreadable, match="none of the files"):
            later.read(foreign)
    random.Random(0).shuffle(places)
    assert all(later.read(place) == place.item[6:].replace(".", "").encode() for place in places)
    assert all(later.stat(place) == first.stat(place) for place in places)
    os.truncate(path, 1000)
    with pytest.raises(Unreadable, match="cut or changed"):
        later.read(next(place for place in places if place.item == "x.tar/9.jpg"))


# --- NVlabs' layout ------------------------------------------------------------------------------------------------


def nvlabs(root: Path) -> Path:
    make_tar(
        root / "0000.tar",
        [
            m
            for n in range(3)
            for m in ((f"{n}.png", f"picture {n}"), (f"{n}.json", {"prompt": f"prompt {n}", "height": 64, "width": 64}))
        ],
    )
    (root / "wids-meta.json").write_text(
        json.dumps({"wids_version": 1, "shardlist": [{"url": "0000.tar", "nsamples": 3}]})
    )
    (root / "0000_VILA.json").write_text(json.dumps({str(n): {"VILA": f"vila {n}"} for n in range(3)}))
    (root / "0000_InternVL.json").write_text(json.dumps({"0": {"InternVL": "intern 0"}}))
    (root / "0000_stats.json").write_text(json.dumps({"count": 3}))
    return root


def test_nvlabs_layout_without_scores_uses_the_prompt(tmp_path: Path) -> None:
    source = opened(nvlabs(tmp_path))
    assert source.format == "wids"
    items, rejects = listed(source)
    assert not rejects
    assert items["0000.tar/1.png"].captions == (("prompt 1", 1.0),)
    assert source.read(items["0000.tar/1.png"].place) == b"picture 1"


def test_nvlabs_several_captions_by_clip_score(tmp_path: Path) -> None:
    scores = {
        "0": {"prompt": 24.0, "VILA": 30.0, "InternVL": 27.0},  # one below the threshold
        "1": {"prompt": 10.0, "VILA": 12.0},  # none passes: the best one
        # 2 has no scores: plain shares
    }
    (nvlabs(tmp_path) / "0000_clip.json").write_text(json.dumps(scores))
    weights = {"prompt": 1.0, "VILA": 1.0, "InternVL": 1.0}
    source = opened(tmp_path, caption_weights=weights)
    items, rejects = listed(source)
    assert not rejects
    zero = dict(items["0000.tar/0.png"].captions)
    assert set(zero) == {"vila 0", "intern 0"}
    assert zero["intern 0"] / zero["vila 0"] == pytest.approx((27 / 30) ** 10)
    assert texts(items["0000.tar/1.png"]) == ["vila 1"]
    assert set(items["0000.tar/2.png"].captions) == {("prompt 2", 1.0), ("vila 2", 1.0)}
    assert source.ignored.total >= 2
    before = [part.stamp for part in opened(tmp_path, caption_weights=weights).parts()]
    (tmp_path / "0000_clip.json").write_text("{}")
    assert [part.stamp for part in opened(tmp_path, caption_weights=weights).parts()] != before


def test_a_score_of_400_digits_costs_its_caption_alone(tmp_path: Path) -> None:
    scores = {"0": {"prompt": 10**400, "VILA": 30.0}, "1": {"prompt": 26.0, "VILA": 27.0}}
    (nvlabs(tmp_path) / "0000_clip.json").write_text(json.dumps(scores))
    source = opened(tmp_path, caption_weights={"prompt": 1.0, "VILA": 1.0})
    items, rejects = listed(source)
    assert texts(items["0000.tar/0.png"]) == ["vila 0"]
    assert set(texts(items["0000.tar/1.png"])) == {"prompt 1", "vila 1"}
    assert not rejects
    assert [names for kind, names in source.ignored.examples.items() if "not a number" in kind] == [["0000.tar/0.png"]]


def test_wids_index_that_does_not_count_is_none_the_worse(tmp_path: Path) -> None:
    nvlabs(tmp_path)
    (tmp_path / "wids-meta.json").write_text(json.dumps({"shardlist": [{"url": "0000.tar"}]}))
    items, rejects = listed(opened(tmp_path))
    assert (len(items), rejects) == (3, {})


def test_so_many_files_decide_what_a_folder_is_and_the_rest_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detect, "MAX_EXAMINED", 3)
    for n in range(4):
        (tmp_path / f"{n}.md").write_text("")
    make_tar(tmp_path / "below" / "0000.tar", [("1.jpg", b"x"), ("1.txt", "one")])
    assert opened(tmp_path).format == "webdataset", "no kind is known before the last file"
    (tmp_path / "0.jpg").write_bytes(b"x")
    (tmp_path / "0.txt").write_text("one")
    source = opened(tmp_path)
    assert (source.format, set(listed(source)[0])) == ("folder", {"0.jpg"})
    assert source.ignored.examples[".tar file"] == ["below/0000.tar"]


def test_hidden_files_are_no_data(tmp_path: Path) -> None:
    make_tar(tmp_path / "0000.tar", [("1.jpg", b"x"), ("1.txt", "one")])
    for hidden in ("._0000.tar", ".copy/0000.tar"):
        make_tar(tmp_path / hidden, [("2.jpg", b"x"), ("2.txt", "two")])
    items, rejects = listed(opened(tmp_path))
    assert (set(items), rejects) == ({"0000.tar/1.jpg"}, {})


def test_an_index_below_the_folder_is_not_the_folders(tmp_path: Path) -> None:
    make_tar(tmp_path / "a" / "0000.tar", [("1.jpg", b"x"), ("1.txt", "one")])
    (tmp_path / "a" / "wids-meta.json").write_text(json.dumps({"shardlist": [{"url": "0000.tar", "nsamples": 1}]}))
    make_tar(tmp_path / "b" / "0000.tar", [("2.jpg", b"x"), ("2.txt", "two")])
    source = opened(tmp_path)
    assert (source.format, set(listed(source)[0])) == ("webdataset", {"a/0000.tar/1.jpg", "b/0000.tar/2.jpg"})


def test_wids_index_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "wids-meta.json").write_text('{"shards": []}')
    with pytest.raises(UserError, match=naming(tmp_path / "wids-meta.json", "shardlist")):
        opened(tmp_path)


# --- parquet -------------------------------------------------------------------------------------------------------


def hf_table(count: int = 10) -> pa.Table:
    return pa.table(
        {
            "image": pa.array(
                [{"bytes": b"picture %d" % n, "path": f"{n}.jpg"} for n in range(count)],
                pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
            ),
            "text": [f"caption {n}" for n in range(count)],
            "label": list(range(count)),
        }
    )


def row_name(file: str, picture: bytes) -> str:
    return f"{file}/{content_digest(picture)}"


def test_parquet_with_image_structs(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    pq.write_table(hf_table(), tmp_path / "data" / "train-00000-of-00001.parquet", row_group_size=3)
    source = opened(tmp_path)
    items, rejects = listed(source)
    assert not rejects
    key = row_name("data/train-00000-of-00001.parquet", b"picture 4")
    assert items[key].captions == (("caption 4", 1.0),)
    assert items[key].meta == {"label": 4, "path": "4.jpg"}
    later = opened(tmp_path)
    for key in random.Random(0).sample(sorted(items), len(items)):
        place = items[key].place
        assert later.read(place) == b"picture %d" % items[key].meta["label"]
        assert later.stat(place) == source.stat(place)
        assert later.head(place, 4)[:4] == b"pict"


@pytest.mark.parametrize("rows", ["bytes", "one without"])
@pytest.mark.parametrize("form", ["struct", "plain"])
def test_a_table_of_which_a_row_has_no_bytes_is_listed_anew(tmp_path: Path, rows: str, form: str) -> None:
    """Such a row may name a file, which can change without the table."""
    table = hf_table()
    pictures = table.column("image").to_pylist()
    if rows == "one without":
        pictures[7]["bytes"] = None
    values = pictures if form == "struct" else [picture["bytes"] for picture in pictures]
    kind = table.schema.field("image").type if form == "struct" else pa.binary()
    pq.write_table(table.set_column(0, "image", pa.array(values, kind)), tmp_path / "t.parquet", row_group_size=3)
    (part,) = opened(tmp_path / "t.parquet").parts()
    assert (part.stamp is None) == (rows == "one without")


def test_parquet_columns_of_bytes_and_bad_rows(tmp_path: Path) -> None:
    table = pa.table(
        {"jpg": [b"a", None, b"c", b""], "thumb": [b"t"] * 4, "caption": [["the one", "the two"], ["x"], [], ["y"]]}
    )
    pq.write_table(table, tmp_path / "t.parquet")
    source = opened(tmp_path / "t.parquet", caption_field="caption")
    items, rejects = listed(source)
    assert {key: item.captions for key, item in items.items()} == {
        row_name("t.parquet", b"a"): (("the one", 0.5), ("the two", 0.5))
    }
    assert "thumb" not in items[row_name("t.parquet", b"a")].meta
    assert rejects == {
        "t.parquet/000000001": "has no picture",
        "t.parquet/000000002": "has no usable caption: its row has an empty 'caption'",
        "t.parquet/000000003": "has no picture",
    }


@pytest.mark.parametrize("column", ["file_name", "url"])
def test_parquet_whose_names_are_damaged_is_rejected(tmp_path: Path, column: str) -> None:
    pq.write_table(pa.table({column: ["https://x/a.png"] * 9, "text": ["said"] * 9}), tmp_path / "a.parquet")
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[4:40] = b"\xff" * 36
    (tmp_path / "a.parquet").write_bytes(data)
    entries = list(opened(tmp_path / "a.parquet").items())
    assert [type(entry).__name__ for entry in entries] == ["Reject"]


def test_parquet_of_names_reads_files_and_refuses_hostile_ones(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"A")
    (tmp_path / "secret.png").write_bytes(b"secret")
    (tmp_path / "pictures" / "out.png").symlink_to(tmp_path / "secret.png")
    names = ["a.png", "/etc/passwd", "../secret.png", "http://x/y.png", "out.png", "gone.png"]
    pq.write_table(pa.table({"file_name": names, "text": ["said"] * 6}), tmp_path / "pictures" / "t.parquet")
    source = opened(tmp_path / "pictures", format="parquet")
    items, rejects = listed(source)
    assert source.read(items["t.parquet/a.png"].place) == b"A"
    assert set(rejects) == {f"t.parquet/{n:09d}" for n in (1, 2, 3)}
    for key, reason in (("t.parquet/out.png", "leads out"), ("t.parquet/gone.png", "No such file")):
        assert key in items
        with pytest.raises(Unreadable, match=reason):
            source.stat(items[key].place)
    assert source.parts()[0].stamp is None, "its pictures may change without it"


def test_parquet_mistakes_are_for_people(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(hf_table().drop_columns("text"), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"data\.caption_field=label"):
        listed(opened(tmp_path / "a.parquet"))
    pq.write_table(hf_table().drop_columns("image"), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"data\.image_field"):
        listed(opened(tmp_path / "a.parquet"))
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no PAR1")
    assert "not a parquet file" in listed(opened(tmp_path / "a.parquet"))[1]["a.parquet"]
    pq.write_table(hf_table(), tmp_path / "a.parquet")
    monkeypatch.setattr(tables, "MAX_GROUP_BYTES", 10)
    with pytest.raises(UserError, match="row_group_size"):
        listed(opened(tmp_path / "a.parquet"))


def not_utf8(texts: list[bytes]) -> pa.Array:
    _, offsets, data = pa.array(texts, pa.binary()).buffers()
    return pa.StringArray.from_buffers(len(texts), offsets, data)


@pytest.mark.parametrize(
    ("column", "named"),
    [
        (pa.array([1_000, 1_001, 2_000], pa.timestamp("ns")), "timestamp[ns]"),
        (pa.array([1, 10**15, 2], pa.timestamp("ms")), "timestamp[ms]"),
        (pa.array([1, 10**7, 2], pa.date32()), "date32"),
        (pa.array([0, 1, 1_000], pa.time64("ns")), "time64[ns]"),
        (not_utf8([b"one", b"tw\xff", b"three"]), "UTF-8"),
        (pa.ListArray.from_arrays([0, 1, 2, 3], not_utf8([b"one", b"tw\xff", b"three"])), "UTF-8"),
    ],
    ids=["nanoseconds", "far time", "far date", "nanoseconds of a day", "text", "texts"],
)
def test_a_value_that_cannot_be_read_costs_its_row_alone(tmp_path: Path, column: pa.Array, named: str) -> None:
    pq.write_table(hf_table(3).append_column("odd", column), tmp_path / "t.parquet")
    items, rejects = listed(opened(tmp_path))
    assert list(items) == [row_name("t.parquet", b"picture %d" % number) for number in (0, 2)]
    assert set(rejects) == {"t.parquet/000000001"}
    assert "'odd'" in rejects["t.parquet/000000001"] and named in rejects["t.parquet/000000001"]


def test_a_column_that_cannot_be_read_at_all_is_named_with_the_way(tmp_path: Path) -> None:
    odd = pa.array([1, 2, 3, 4], pa.timestamp("ns"))
    pq.write_table(hf_table(4).append_column("odd", odd), tmp_path / "t.parquet", row_group_size=2)
    items, rejects = listed(opened(tmp_path))
    assert not items and len(rejects) == 4
    [reason] = set(rejects.values())
    assert "'odd' holds a timestamp[ns]" in reason and "write it as text" in reason


def test_pictures_captions_and_columns_that_cannot_be_read(tmp_path: Path) -> None:
    names = not_utf8([b"a.png", b"\xff.png", b"c.png"])
    pq.write_table(pa.table({"file_name": names, "text": not_utf8([b"one", b"two", b"\xff"])}), tmp_path / "t.parquet")
    items, rejects = listed(opened(tmp_path / "t.parquet"))
    assert list(items) == ["t.parquet/a.png"]
    assert "'file_name'" in rejects["t.parquet/000000001"] and "'text'" in rejects["t.parquet/000000002"]
    twice = pa.table([pa.array([b"a"]), pa.array(["x"]), pa.array(["y"])], names=["jpg", "text", "text"])
    pq.write_table(twice, tmp_path / "t.parquet")
    with pytest.raises(UserError, match=naming("t.parquet", "'text'")):
        listed(opened(tmp_path / "t.parquet"))


def test_few_row_groups_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "GROUP_BYTES", 1)
    pq.write_table(hf_table(12), tmp_path / "a.parquet", row_group_size=2)
    source = opened(tmp_path / "a.parquet")
    items = sorted(listed(source)[0].values(), key=lambda item: item.meta["label"])
    assert [source.read(item.place) for item in reversed(items)] == [b"picture %d" % n for n in reversed(range(12))]
    assert isinstance(source, tables.ParquetSource)
    assert len(source._groups) == 1


# --- listings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_listings(tmp_path: Path, kind: str) -> None:
    (tmp_path / "p").mkdir()
    for name in ("a.png", "b c.png"):
        (tmp_path / "p" / name).write_bytes(name.encode())
    rows = [
        ("p/a.png", "one"),
        ("p/a.png", "two"),
        ("p/b c.png", "three"),
        ("/abs.png", "x"),
        ("p/../../up.png", "x"),
        (" https://user:secret@x/secret.png?token=secret", "x"),
        ("https://user:secret@x/../secret.png", "x"),
        ("p/a.png", ""),
    ]
    if kind == "jsonl":
        text = "".join(json.dumps({"image": name, "text": said}) + "\n" for name, said in rows)
    else:
        text = "image,text\n" + "".join(f"{name},{said}\n" for name, said in rows)
    (tmp_path / f"list.{kind}").write_text(text)
    source = opened(tmp_path / f"list.{kind}")
    items, rejects = listed(source)
    assert {key: texts(item) for key, item in items.items()} == {"p/a.png": ["one", "two"], "p/b c.png": ["three"]}
    assert source.read(Place("p/b c.png")) == b"b c.png"
    assert len(rejects) == 4 and "secret" not in str(rejects)
    assert {reason.rpartition(": ")[2] for reason in rejects.values()} == {
        "the name is absolute",
        "the name climbs with '..'",
        "img2dataset fetches pictures (docs/encoding.md)",
    }
    assert list(source.ignored.counts.values()) == [1], "the empty caption"


def test_rows_of_a_picture_are_joined_in_order_wherever_they_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every limit of memory lowered, too; and of a folder's metadata file alike."""
    (tmp_path / "pictures").mkdir()
    rows = [
        {"file_name": f"{n % 3}.png", "text": f"said {n}" if n else "", f"of {n % 2}": n, "all": n} for n in range(12)
    ]
    names = ("a.jsonl", "b.jsonl", "pictures/metadata.jsonl")
    for name, part in zip(names, (rows[:7], rows[7:], rows), strict=True):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in part))
    for n in range(3):
        (tmp_path / f"pictures/{n}.png").write_bytes(b"")
    rule = CaptionRule.column("text")
    given = Given(LocalFilesystem(tmp_path), None, rule, DataConfig(), "x", 60)
    expected = {
        f"{n}.png": (
            tuple(f"said {row}" for row in range(n, 12, 3) if row),
            {f"of {n % 2}": n, "all": n, f"of {(n + 1) % 2}": n + 3},
        )
        for n in range(3)
    }
    for _ in range(2):
        for source in (ListingSource(given, names[:2], "jsonl"), FolderSource(tmp_path / "pictures", rule, "x")):
            entries = list(source.items())
            items = {e.key: (tuple(text for text, _ in e.captions), e.meta) for e in entries if isinstance(e, Item)}
            assert items == expected
            assert [list(meta) for _, meta in items.values()] == [list(meta) for _, meta in expected.values()]
            assert len(items) == len(entries)
            assert list(source.ignored.examples.values()) == [["0.png"]]
        lower_limits(monkeypatch)


def test_the_first_row_with_a_name_says_which_column_has_the_names(tmp_path: Path) -> None:
    rows = [{"note": "x", "text": "x"}, {"path": "a.png", "text": "y"}, {"file_name": "b.png", "text": "z"}]
    (tmp_path / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = opened(tmp_path / "list.jsonl")
    items, rejects = listed(source)
    assert (set(items), set(rejects)) == ({"a.png"}, {"list.jsonl:1", "list.jsonl:3"})
    assert source.picture_columns == {"path"}


def test_rows_are_not_in_memory(tmp_path: Path) -> None:
    count = 4 * SIDECAR_BATCH
    rows = [json.dumps({"file_name": f"{n:04d}.png", "text": f"said {n}"}) for n in range(count)]
    (tmp_path / "list.jsonl").write_text("\n".join(rows))

    def candidates() -> int:
        return sum(isinstance(each, CaptionCandidate) for each in gc.get_objects())

    alive, items, others = [], 0, candidates()
    source = opened(tmp_path / "list.jsonl")
    for items, _ in enumerate(source.items(), 1):
        if items % 100 == 0:
            alive.append(candidates() - others)
    assert items == count and 0 < max(alive) <= SIDECAR_BATCH


def test_a_listing_that_cannot_be_read_to_its_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "l.jsonl").write_text('{"file_name": "a.png", "text": "x"}\n')
    source = opened(tmp_path / "l.jsonl")
    fail_reads(monkeypatch, "l.jsonl", errno.EIO, 1)
    with pytest.raises(UserError, match=naming("l.jsonl", os.strerror(errno.EIO))):
        list(source.items())


def test_a_listing_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"A")
    (tmp_path / "l.jsonl").write_text('{"src": "a.png", "text": "x"}\n')
    with pytest.raises(UserError, match=r"data\.image_field"):
        listed(opened(tmp_path / "l.jsonl"))
    items, _ = listed(opened(tmp_path / "l.jsonl", image_field="src"))
    assert set(items) == {"a.png"}
    items, _ = listed(opened(tmp_path / "l.jsonl", image_field="src", image_root="sub"))
    assert set(items) == {"sub/a.png"}


# --- folders with JSON ---------------------------------------------------------------------------------------------


def test_json_next_to_pictures(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / f"{name}.png").write_bytes(b"")
    (tmp_path / "a.json").write_text('{"text": ["the one", "the two"], "id": 1}')
    (tmp_path / "b.json").write_text('{"id": 2}')
    (tmp_path / "b.txt").write_text("plain")
    (tmp_path / "c.json").write_text("[1]")
    (tmp_path / "d.json").write_text('{"prompt": "x"}')
    (tmp_path / "other.json").write_text("{}")
    source = opened(tmp_path)
    items, rejects = listed(source)
    assert items["a.png"].captions == (("the one", 0.5), ("the two", 0.5))
    assert items["a.png"].meta == {"id": 1}
    assert items["b.png"].captions == (("plain", 1.0),)
    assert items["b.png"].meta == {"id": 2}
    assert set(rejects) == {"c.png", "d.png"}
    assert "not a JSON object" in rejects["c.png"]
    assert "has no 'text'" in rejects["d.png"]
    assert source.ignored.total == 1


def test_json_with_a_longer_name_belongs_to_the_pictures_with_the_longest_beginning(tmp_path: Path) -> None:
    for count, name in enumerate(["a.png", "ab.png", "ab.jpg", "b.png", "c.png"], 1):
        (tmp_path / name).write_bytes(b"")
        (tmp_path / f"{name[:-4]}_more.json").write_text(json.dumps({name[:-4]: {"more": name[:-4]}}))
        source = opened(tmp_path, caption_weights={"more": 1.0})
        items, rejects = listed(source)
        assert {key: texts(item) for key, item in items.items()} == {key: [key[:-4]] for key in items}
        assert (len(items), len(rejects), source.ignored.total) == (count, 0, 0)


def test_weights_and_scores_of_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    (tmp_path / "a.txt").write_text("from the file")
    (tmp_path / "metadata.jsonl").write_text(
        json.dumps({"file_name": "a.png", "short": "s", "long": ["l1.", "l2."], "clip": [26, "30.0"]}) + "\n"
    )
    (tmp_path / "b.png").write_bytes(b"")
    items, rejects = listed(opened(tmp_path, caption_weights={"short": 1.0, "long": 3.0}))
    assert dict(items["a.png"].captions) == {"s": 1.0, "l1.": 1.5, "l2.": 1.5}
    assert set(rejects) == {"b.png"}
    items, _ = listed(opened(tmp_path, caption_weights={"short": 1.0, "txt": 3.0}))
    assert dict(items["a.png"].captions) == {"s": 1.0, "from the file": 3.0}
    scored = {"caption_weights": {"long": 1.0}, "caption_scores": {"long": "clip"}}
    weights = dict(listed(opened(tmp_path, **scored))[0]["a.png"].captions)
    assert weights["l1."] / weights["l2."] == pytest.approx((26 / 30) ** 10)
    for threshold in (31.0, 28.0):
        monkeypatch.setattr(caption_columns, "SCORE_THRESHOLD", threshold)
        assert texts(listed(opened(tmp_path, **scored))[0]["a.png"]) == ["l2."]


# --- detection -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folder", "name"),
    [("photos-", "photos-"), ("my dogs", "my-dogs"), ("_Fotos für Anna (2)", "Fotos-f-r-Anna-2"), ("写真", "写真")],
)
def test_a_folder_names_its_source_as_far_as_it_can(folder: str, name: str, tmp_path: Path) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "a.png").write_bytes(b"x")
    assert open_source(str(tmp_path / folder), DataConfig()).name == name
    assert open_source(str(tmp_path / folder), DataConfig(), "mine").name == "mine"


def test_detection_and_force(tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    make_tar(folder / "x.tar", [("1.jpg", b"x"), ("1.txt", "x")])
    assert opened(folder).format == "webdataset"
    assert opened(folder).name == "mixed"
    assert opened(folder / "x.tar").name == "x"
    pq.write_table(hf_table(), folder / "t.parquet")
    with pytest.raises(UserError, match=naming("mixed/*.parquet", "mixed/*.tar")):
        opened(folder)
    assert opened(folder, "parquet").format == "parquet"
    assert opened(folder, "webdataset").format == "webdataset"
    assert opened(f"file://{folder}/x.tar").format == "webdataset"
    with pytest.raises(UserError, match=naming(tmp_path / "absent")):
        opened(tmp_path / "absent")
    with pytest.raises(UserError, match=naming(tmp_path / "absent")):
        opened(tmp_path / "absent" / "{0..3}.tar")
    with pytest.raises(UserError, match=naming(folder / "*.csv")):
        opened(folder / "*.csv")
    with pytest.raises(UserError, match=naming(folder, ".csv")):
        opened(folder, "csv")
    with pytest.raises(UserError, match="--format 'zip'"):
        opened(folder, "zip")
    with pytest.raises(UserError, match=naming(__file__, "--format")):
        opened(Path(__file__))


def test_captions_next_to_a_tar_that_was_not_asked_for_are_not_taken(tmp_path: Path) -> None:
    """`10.json` is of `10.tar`, also where only `1.tar` is read."""
    for number in (1, 10):
        with tarfile.open(tmp_path / f"{number}.tar", "w") as tar:
            for kind, data in (("jpg", b"picture"), ("txt", b"inside")):
                info = tarfile.TarInfo(f"000000.{kind}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        (tmp_path / f"{number}.json").write_text(json.dumps({"000000": {"text": f"beside {number}"}}))
    result = list(open_source(str(tmp_path / "1.tar"), DataConfig(), None, None).items())
    said = [caption for item in result if isinstance(item, Item) for caption, _ in item.captions]
    assert said == ["inside", "beside 1"]


@pytest.mark.parametrize("data", ["https://host/data/a.tar?X-Amz-Signature=1", "http://host/pics?token=1"])
def test_an_address_with_a_query_is_refused_before_anything_is_listed(data: str) -> None:
    with pytest.raises(UserError, match="or a query"):
        open_source(data, DataConfig(), None, None)


# --- what a folder is, and what of it is not used ------------------------------------------------------------------

JPEG = b"\xff\xd8\xff\xe0" + b"picture"


def parquet(path: Path, **columns: Any) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path.read_bytes()


def bytes_of(count: int = 2, column: str = "image", data: bytes = JPEG) -> dict[str, Any]:
    return {column: [data] * count, "text": ["said"] * count}


def mixed(folder: Path, case: str) -> Path:
    (folder / "new" / "deep").mkdir(parents=True)
    (folder / "new" / "deep" / "0.jpg").write_bytes(JPEG)
    (folder / "new" / "deep" / "0.txt").write_text("said")
    if case == "tar":
        make_tar(folder / "old.tar", [("1.jpg", JPEG), ("1.txt", "old")])
    elif case == "table of bytes":
        parquet(folder / "new" / "data" / "0.parquet", **bytes_of())
    elif case == "table of links":
        parquet(folder / "0.parquet", url=["http://host/0.jpg"], text=["said"])
    elif case == "listing of links":
        (folder / "0.jsonl").write_text(json.dumps({"url": "http://host/0.jpg", "caption": "said"}))
    elif case == "index":
        make_tar(folder / "0.tar", [("1.jpg", JPEG), ("1.txt", "old")])
        (folder / "wids-meta.json").write_text(json.dumps({"shardlist": [{"url": "0.tar"}]}))
    elif case == "two tables":
        for name in ("a.parquet", "b.parquet"):
            parquet(folder / name, **bytes_of())
        parquet(folder / "a.parquet", file_name=["new/deep/0.jpg"], text=["said"])
    return folder


MIXED = {
    "tar": ("webdataset", "old.tar"),
    "table of bytes": ("parquet", "new/data/0.parquet"),
    "table of links": ("parquet", "0.parquet"),
    "listing of links": ("jsonl", "0.jsonl"),
    "index": ("wids", "wids-meta.json"),
    "two tables": ("parquet", "a.parquet"),
}


@pytest.mark.parametrize("case", MIXED)
def test_a_folder_of_several_kinds_is_a_choice_at_any_depth_and_the_rest_is_named(tmp_path: Path, case: str) -> None:
    format, file = MIXED[case]
    mixed(tmp_path, case)
    with pytest.raises(UserError, match=naming("new/deep/0.jpg", file)) as caught:
        opened(tmp_path)
    assert str(caught.value.fix).partition(";")[0] == " or ".join(
        f"--format {kind}" for kind in sorted({"folder", format})
    )
    source = opened(tmp_path, "folder")
    assert set(listed(source)[0]) == {"new/deep/0.jpg"}
    assert file.rpartition("/")[2] in str(source.ignored.examples)
    source = opened(tmp_path, format)
    if "links" in case:
        with pytest.raises(UserError, match=naming(file, "img2dataset")):
            listed(source)
        return
    assert "new/deep/0.jpg" not in listed(source)[0]
    used = case == "two tables"  # a row names the picture
    assert (".jpg file" in source.ignored.counts) != used


@pytest.mark.parametrize("name", ["metadata.parquet", "new/metadata.parquet", "list.jsonl", "list.csv"])
def test_a_table_that_names_files_wins_over_the_files(tmp_path: Path, name: str) -> None:
    mixed(tmp_path, "")
    named = "deep/0.jpg" if name.startswith("new") else "new/deep/0.jpg"
    if name.endswith("parquet"):
        parquet(tmp_path / name, file_name=[named], text=["of the table"])
    elif name.endswith("jsonl"):
        (tmp_path / name).write_text(json.dumps({"file_name": named, "text": "of the table"}))
    else:
        (tmp_path / name).write_text(f"file_name;text\n{named};of the table\n")
    source = opened(tmp_path)
    [item] = listed(source)[0].values()
    assert (texts(item), source.read(item.place)) == (["of the table"], JPEG)
    assert source.ignored.examples == {".txt file": ["new/deep/0.txt"]}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("scores.csv", "file_name,score\nnew/deep/0.jpg,3\n"),
        ("gone.csv", "file_name,text\nelsewhere/0.jpg,x\n"),
        ("links.csv", "url,score\nhttp://host/0.jpg,3\n"),
    ],
)
def test_a_listing_of_other_things_is_named_and_decides_nothing(tmp_path: Path, name: str, text: str) -> None:
    mixed(tmp_path, "")
    (tmp_path / name).write_text(text)
    for config in ({}, {"caption": "none"}):
        source = opened(tmp_path, **config)
        assert (source.format, set(listed(source)[0])) == ("folder", {"new/deep/0.jpg"})
        assert source.ignored.examples[".csv file"] == [name]


def test_files_next_to_tars_are_named_but_for_those_of_the_tars(tmp_path: Path) -> None:
    make_tar(tmp_path / "0.tar", [("1.jpg", JPEG), ("1.txt", "x")])
    for name in ("0_scores.json", "info.json", "README.md", "wids-meta.json"):
        (tmp_path / name).write_text("{}")
    source = opened(tmp_path, "webdataset")
    assert set(listed(source)[0]) == {"0.tar/1.jpg"}
    assert source.ignored.counts == {
        ".md file": 1,
        ".json file": 1,
        ".json file next to a tar that describes no samples": 1,
    }


def test_a_new_format_is_one_file_and_one_line_of_the_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(2):
        with zipfile.ZipFile(tmp_path / f"{number}.zip", "w") as archive:
            archive.writestr("a.jpg", JPEG)
            archive.writestr("a.txt", f"of {number}")
            archive.writestr("b.jpg", JPEG)
    with pytest.raises(UserError, match=naming("zip")):
        opened(tmp_path, "zip")
    monkeypatch.setitem(formats.FORMATS, "zip", "tests.support.zip_source:Zip")
    for data in (tmp_path, tmp_path / "{0,1}.zip"):
        source = opened(data)
        items, rejects = listed(source)
        assert {key: texts(item) for key, item in items.items()} == {"0.zip/a.jpg": ["of 0"], "1.zip/a.jpg": ["of 1"]}
        assert set(rejects) == {"0.zip/b.jpg", "1.zip/b.jpg"}
    again = detect.reopen(source.document(), DataConfig(), "x")
    assert [again.read(item.place) for item in items.values()] == [JPEG, JPEG]
    assert set(listed(opened(tmp_path / "1.zip"))[0]) == {"1.zip/a.jpg"}
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "1.jpg").write_bytes(JPEG)
    with pytest.raises(UserError, match=naming("0.zip")) as caught:
        opened(tmp_path)
    assert "--format folder or --format zip; " in str(caught.value.fix)
    assert opened(tmp_path, "zip").left_out.counts == {".jpg file": 1}
    with pytest.raises(UserError, match=naming(tmp_path / "none")) as caught:
        opened(tmp_path / "none")
    assert ".zip" in str(caught.value.expected)


def test_the_page_of_sources_names_each_format() -> None:
    page = (Path(__file__).parents[2] / "docs" / "encoding.md").read_text()
    for name, format in formats.formats().items():
        assert f"`{name}`" in page
        for ending in (*format.endings, *format.named_endings):
            assert f".{ending}`" in page, f"{name}: .{ending}"


LOST = ["a.jpg_large", "d.jpeg?x=1.5", "e.jpg ", "g.JPG.1", "k.png:large", "m.webp!w640"]


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_a_picture_that_is_lost_for_its_name_is_a_reject(tmp_path: Path, kind: str) -> None:
    """Backups and files about a picture are none."""
    others = ["b.jpg~", "c.jpg.xmp", "d.jpg.bak"]
    for number, name in enumerate([*LOST, *others, "last.jpg"]):
        (tmp_path / name).write_bytes(JPEG)
        (tmp_path / f"{name.partition('.')[0]}.txt").write_text(f"picture {number}")
    if kind == "tar":
        tar = tmp_path / "x" / "a.tar"
        make_tar(tar, [(path.name, path.read_bytes()) for path in sorted(tmp_path.iterdir())])
    source = opened(tmp_path if kind == "folder" else tar)
    items, rejects = listed(source)
    before = "a.tar/" if kind == "tar" else ""
    assert set(items) == {before + "last.jpg"}
    assert set(rejects) == {before + name for name in LOST}
    assert {before + name for name in others} <= {name for names in source.ignored.examples.values() for name in names}


@pytest.mark.parametrize(
    ("names", "usable", "lost"),
    [
        (["i.v2.jpg", "i.v2.txt", "j.jpg", "j.txt"], ["j.jpg"], ["i.v2.jpg"]),
        (["i.0.jpg", "i.0.txt", "i.1.jpg", "i.1.txt"], [], ["i.0.jpg", "i.1.jpg"]),
        (["i.jpg", "i.txt", "i.1.jpg", "i.1.json"], ["i.jpg"], ["i.1.jpg"]),
        (["i.edited.jpg", "i.input.jpg", "i.txt"], [], ["i.edited.jpg", "i.input.jpg"]),
        (["i.jpg", "i.seg.png", "i.txt"], ["i.jpg"], []),
        (["d/._i.jpg", "d/i.jpg", "d/._i.txt", "d/i.txt", "d/.DS_Store"], ["d/i.jpg"], []),
        (["._i.jpg", "i.jpg", "__MACOSX/._i.txt", "i.txt"], ["i.jpg"], []),
    ],
)
def test_names_in_tars_with_dots(tmp_path: Path, names: list[str], usable: list[str], lost: list[str]) -> None:
    members: Rows = [(name, b"{}" if name.endswith("json") else JPEG if name.endswith("g") else "x") for name in names]
    source = opened(make_tar(tmp_path / "a.tar", members))
    items, rejects = listed(source)
    assert [set(items), set(rejects)] == [{f"a.tar/{name}" for name in some} for some in (usable, lost)]
    used = {*usable, *lost, "i.txt", "j.txt", "d/i.txt"}
    assert source.ignored.total == len(set(names) - used), "all others are named"


# --- columns of pictures -------------------------------------------------------------------------------------------


def struct(data: bytes = JPEG) -> pa.Array:
    return pa.array([{"bytes": data, "path": "x.jpg"}], pa.struct([("bytes", pa.binary()), ("path", pa.string())]))


HASH = [b"\x01" * 16]


@pytest.mark.parametrize(
    ("columns", "taken"),
    [
        ({"mask": struct(b"mask"), "image": struct()}, "image"),
        ({"conditioning_image": struct(b"c"), "Image": struct()}, "Image"),
        ({"hash": HASH, "data": [JPEG]}, "data"),
        ({"hash": HASH, "image": ["a.jpg"]}, "image"),
        ({"embedding": HASH, "file_name": pa.array(["a.jpg"]).dictionary_encode()}, "file_name"),
        ({"file_name": ["name of the bytes.jpg"], "data": [JPEG]}, "data"),
        ({"audio": struct(b"RIFFxxxxWAVE"), "shot": struct()}, "shot"),
        ({"jpg": [JPEG], "url": ["http://host/a.jpg"], "md5": HASH}, "jpg"),
        ({"source": struct(), "target": struct()}, None),
        ({"a|b": struct(), "two words": struct()}, None),
        ({"source": struct(), "edited": [JPEG], "target": struct()}, None),
        ({"mask": struct(), "image": ["gone.jpg"]}, None),
        ({"mask": struct(), "file_name": ["a.jpg"]}, None),
        ({"mask": struct(), "url": ["s3://host/a.jpg"]}, None),
    ],
)
def test_of_several_columns_the_best_known_is_taken_or_the_user_asked(
    tmp_path: Path, columns: dict[str, Any], taken: str | None
) -> None:
    (tmp_path / "a.jpg").write_bytes(JPEG)
    parquet(tmp_path / "t.parquet", **columns, text=pa.array(["said"]).dictionary_encode())
    if taken is None:
        with pytest.raises(UserError) as caught:
            listed(opened(tmp_path / "t.parquet"))
        fix = str(caught.value.fix)
        choices = [word.partition("=")[2] for word in shlex.split(fix)[1::3]]
        assert set(choices) == set(columns)
    for field in choices if taken is None else [None]:
        source = opened(tmp_path / "t.parquet", image_field=field)
        items, rejects = listed(source)
        assert not rejects and source.picture_columns == {field or taken}
        if (field or taken) != "url" and columns.get("image") != ["gone.jpg"]:
            assert [source.read(item.place) for item in items.values()] == [JPEG]
        assert [texts(item) for item in items.values()] == [["said"]]


def test_a_hash_is_no_picture_and_bytes_in_lists_are_no_columns_of_an_item(tmp_path: Path) -> None:
    parquet(tmp_path / "t.parquet", hash=HASH, text=["said"])
    with pytest.raises(UserError, match=r"hash: binary"):
        listed(opened(tmp_path / "t.parquet"))
    parquet(tmp_path / "t.parquet", image=struct(), more=pa.array([[{"raw": JPEG}]]), text=["said"])
    [item] = listed(opened(tmp_path / "t.parquet"))[0].values()
    assert item.meta == {"path": "x.jpg"}


# --- listings as other programs write them -------------------------------------------------------------------------

ROWS = [{"file_name": f"{n}.jpg", "text": text} for n, text in enumerate(["a; b", 'ü "q", c', "Ċ 猫"])]


def csv_text(separator: str, end: str = "\r\n") -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, ["file_name", "text"], delimiter=separator, lineterminator=end)
    writer.writeheader()
    writer.writerows(ROWS)
    return out.getvalue()


LISTINGS = {
    "semicolon.csv": csv_text(";").encode(),
    "tab.csv": csv_text("\t").encode(),
    "tab.tsv": csv_text("\t", "\n").encode(),
    "pipe.csv": csv_text("|").encode(),
    "named.csv": ("sep=;\r\n" + csv_text(";")).encode(),
    "excel.csv": csv_text("\t").encode("utf-16"),
    "big-endian.csv": b"\xfe\xff" + csv_text(",").encode("utf-16-be"),
    "cut.csv": csv_text(",").encode("utf-16") + b"a",
    "powershell.jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in ROWS).encode("utf-16"),
    "array.json": json.dumps(ROWS).encode(),
    "lines.json": json.dumps(ROWS, indent=2, ensure_ascii=False).encode("utf-8-sig"),
    "wide.json": json.dumps(ROWS, indent=2, ensure_ascii=False).encode("utf-16"),
    "captions.json": json.dumps({row["file_name"]: row["text"] for row in ROWS}).encode(),
    "meta_cap.json": json.dumps({row["file_name"][0]: {"caption": row["text"], "tags": "t"} for row in ROWS}).encode(),
    "tags.json": json.dumps({row["file_name"]: {"caption": "", "tags": row["text"]} for row in ROWS}).encode(),
    "index.json": json.dumps({str(n): row for n, row in enumerate(ROWS)}).encode(),
}


@pytest.mark.parametrize("name", LISTINGS)
def test_listings_of_other_programs(tmp_path: Path, name: str) -> None:
    for row in ROWS:
        (tmp_path / row["file_name"]).write_bytes(JPEG)
    (tmp_path / name).write_bytes(LISTINGS[name])
    items, rejects = listed(opened(tmp_path / name))
    expected = [[row["text"]] for row in ROWS]
    assert len(rejects) == (name == "cut.csv") and list(items) == [row["file_name"] for row in ROWS]
    assert [texts(item) for item in items.values()] == expected


@pytest.mark.parametrize(
    ("text", "usable"),
    [
        ('[{"file_name": "0.jpg", "text": "a"}, {"file_name": "1.jp', 0),
        ('[{"file_name": "0.jpg", "text": "a"} {"file_name": "1.jpg", "text": "b"}]', 0),
        ('[{"file_name": "0.jpg", "text": "a"}][{"file_name": "1.jpg", "text": "b"}]', 0),
        ('[{"file_name": "0.jpg", "text": "a"}, 7]', 1),
        ('[{"file_name": "0.jpg", "text": "\\ud83d"}, {"file_name": "1.jpg", "text": "b"}]', 1),
        ('{"0.jpg": ["a", 1], "1.jpg": "b"}', 1),
        ("[]", 0),
        ("", 0),
        ("7", 0),
        ("[" * 100_000, 0),
        ('[{"file_name": "0.jpg", "text": "' + "a" * 200_000 + '"}]', 0),
    ],
)
def test_json_that_is_no_listing_is_said(
    tmp_path: Path, text: str, usable: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata_files, "MAX_JSON", 200_000)
    for n in range(2):
        (tmp_path / f"{n}.jpg").write_bytes(JPEG)
    (tmp_path / "list.json").write_text(text)
    items, rejects = listed(opened(tmp_path / "list.json"))
    assert (len(items), len(rejects)) == (usable, 1)
    assert all(key.startswith("list.json") for key in rejects)


@pytest.mark.parametrize(("file", "indent"), [("list.json", None), ("list.jsonl", 1), ("list.jsonl", None)])
def test_json_and_jsonl_under_the_name_of_the_other(tmp_path: Path, file: str, indent: int | None) -> None:
    for n in range(2):
        (tmp_path / f"{n}.jpg").write_bytes(JPEG)
    said = [{"file_name": f"{n}.jpg", "text": f"said {n}"} for n in range(2)]
    lines = "\n".join(map(json.dumps, said))
    (tmp_path / file).write_text(lines if file == "list.json" else json.dumps(said, indent=indent))
    items, rejects = listed(opened(tmp_path / file))
    assert {key: item.captions for key, item in items.items()} == {f"{n}.jpg": ((f"said {n}", 1.0),) for n in range(2)}
    assert not rejects


@pytest.mark.parametrize("file", ["t.parquet", "list.csv"])
def test_the_caption_column_that_the_fix_names_holds_captions(tmp_path: Path, file: str) -> None:
    row = {"key": "000", "caption_length": "9", "my_caption": "a dog", "status": "ok"}
    if file == "t.parquet":
        pq.write_table(pa.Table.from_pylist([{"jpg": JPEG, **row}]), tmp_path / file)
    else:
        row = {"file": "a.jpg", **row}
        (tmp_path / file).write_text(",".join(row) + "\n" + ",".join(row.values()) + "\n")
    with pytest.raises(UserError) as caught:
        listed(opened(tmp_path / file))
    assert str(caught.value.fix).split(",")[0] == "--set data.caption_field=my_caption"


def test_a_picture_as_text_is_no_name(tmp_path: Path) -> None:
    text = base64.b64encode(bytes(range(256)) * 9).decode()
    pq.write_table(pa.table({"image": [text, "/9j/" + text], "text": ["a", "b"]}), tmp_path / "t.parquet")
    items, rejects = listed(opened(tmp_path / "t.parquet"))
    assert not items and len(Kinds.of(rejects.items()).counts) == 1
    assert all("bytes" in reason and len(reason) < len(text) for reason in rejects.values())


def test_a_folder_without_pictures_says_what_it_holds(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "meta_cap.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(UserError) as caught:
        listed(opened(tmp_path))
    assert "a.txt" in str(caught.value.found) and "meta_cap.json" in str(caught.value.found)


def test_an_index_of_tars_that_cannot_be_read_has_a_fix(tmp_path: Path) -> None:
    (tmp_path / "wids-meta.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(UserError, match="git lfs pull") as caught:
        opened(tmp_path)
    assert caught.value.fix


def test_a_json_file_of_another_form_is_an_error_that_says_the_way(tmp_path: Path) -> None:
    captions = {"info": {"year": 1}, "images": [{"id": 1}], "annotations": [{"caption": "x"}]}
    (tmp_path / "coco.json").write_text(json.dumps(captions))
    with pytest.raises(UserError, match=r"\.jsonl"):
        listed(opened(tmp_path / "coco.json"))
