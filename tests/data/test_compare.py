"""`snapshots diff` between caches and with lists of items, and `snapshots list`, which writes these."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import sana_pipe.stages.bucket
import sana_pipe.stages.encode
import sana_pipe.stages.snapshots
from sana_pipe.base.errors import CacheError, UserError
from sana_pipe.cli import cli
from sana_pipe.config import Config
from sana_pipe.data.cache import layout
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.cache.shard import ShardWriter
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.images import buckets
from sana_pipe.data.snapshots import item_lists
from tests.support import synthetic
from tests.support.messages import naming
from tests.support.synthetic import Picture, add, config, pictures

Row = dict[str, str]


@pytest.fixture
def of(tmp_path: Path) -> Config:
    """A cache with 40 pictures of the source `one` in the snapshot `round1`."""
    made = config(tmp_path / "cache")
    add(made, "one", pictures(40))
    sana_pipe.stages.bucket.run(made, name="round1")
    return made


def diff(of: Config, a: str, b: str) -> tuple[int, dict[str, Any]]:
    words = ["snapshots", "diff", a, b, "--json", "--config", "tiny", "--set", f"cache={of.cache}"]
    result = CliRunner().invoke(cli, words, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.return_value, json.loads(result.output)


def items(entries: list[Row]) -> list[str]:
    return [entry["item"] for entry in entries]


def listed(of: Config, file: Path) -> list[Row]:
    """The rows of the list of `round1`, written to `file`."""
    assert sana_pipe.stages.snapshots.write_list(of, "round1", str(file)) == 0
    if file.suffix == ".parquet":
        return pq.read_table(file).to_pylist()  # type: ignore[no-any-return]
    with file.open(newline="") as text:
        return list(csv.DictReader(text))


def write(file: Path, rows: list[Row]) -> str:
    """Write rows as a list. Returns its path."""
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        with file.open("w", newline="") as text:
            writer = csv.DictWriter(text, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return str(file)


# ---------------------------------------------------------------- between caches


def test_a_snapshot_of_another_folder_is_compared(of: Config, tmp_path: Path) -> None:
    other = config(tmp_path / "other")
    add(other, "one", pictures(40)[1:])
    add(other, "one", [*pictures(40)[1:], Picture("new.png", "new")])
    second = sana_pipe.stages.bucket.run(other, name="round1")
    code, report = diff(of, "round1", f"{other.cache}:round1")
    assert code == 1 and report["b"] == second != report["a"]
    assert (items(report["added"]), items(report["removed"])) == (["new.png"], ["00000.png"])
    backwards = diff(other, f"{of.cache}:round1", second[:9])[1]
    assert (items(backwards["added"]), items(backwards["removed"])) == (["new.png"], ["00000.png"])
    assert report["content_a"] != report["content_b"] == Cache(other.cache).open_snapshot().head.content_id


def test_equal_content_is_said_without_reading_a_sample(
    of: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = config(tmp_path / "other")
    for part in (pictures(40)[20:], pictures(40)):  # other scans and shards
        add(other, "one", part)
    sana_pipe.stages.bucket.run(other, name="round1")
    monkeypatch.setattr(Snapshot, "columns", lambda *of: pytest.fail("reads samples"))
    capsys.readouterr()
    assert sana_pipe.stages.snapshots.diff(of, "round1", f"{other.cache}:round1") == 0
    out = capsys.readouterr().out.splitlines()
    contents = [line.rpartition(" ")[2] for line in out[:2]]
    assert contents[0] == contents[1] and "content is equal" in out[2] and out[0] != out[1]


@pytest.mark.parametrize("axes", [2, 3], ids=["captions", "latents"])
def test_records_of_equal_keys_with_other_values_are_named(
    of: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, axes: int
) -> None:
    """Another kind of device makes other bits of the same picture and caption."""
    real, other = ShardWriter.add, config(tmp_path / "other")
    changed = lambda writer, key, array, **more: real(writer, key, array ^ (array.ndim == axes and key[0] < 40), **more)  # noqa: E731
    monkeypatch.setattr(ShardWriter, "add", changed)
    add(other, "one", pictures(40))
    sana_pipe.stages.bucket.run(other, name="round1")
    code, report = diff(of, "round1", f"{other.cache}:round1")
    assert code == 1 and report["added"] == report["removed"] == []
    assert 0 < len(report["changed"]) < 40 and {tuple(e["what"]) for e in report["changed"]} == {("bytes",)}


def test_a_snapshot_in_an_object_store_is_compared(of: Config, s3_bucket: str) -> None:
    fsspec.filesystem("s3").put(of.cache, f"{s3_bucket}/diffed", recursive=True)
    code, report = diff(of, "round1", f"{s3_bucket}/diffed:round1")
    assert (code, report["a"]) == (0, report["b"])
    add(of, "one", pictures(41))
    sana_pipe.stages.bucket.run(of, name="round2")
    code, report = diff(of, f"{s3_bucket}/diffed:round1", "round2")
    assert code == 1 and items(report["added"]) == ["00040.png"]
    with pytest.raises(CacheError, match="'round9'"):
        diff(of, "round1", f"{s3_bucket}/diffed:round9")


@pytest.mark.parametrize("word", ["s3://bucket/cache", "/no/cache", "./round1", "cache:", "/a/cache:b/c"])
def test_a_word_that_names_neither_a_snapshot_nor_a_list_is_refused(of: Config, word: str) -> None:
    with pytest.raises(UserError, match=naming("names no snapshot of this cache", "CACHE:NAME")):
        diff(of, "round1", word)


# ---------------------------------------------------------------- lists


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_list_says_what_is_missing_additional_or_of_other_bytes(of: Config, tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"list.{ending}"
    rows = listed(of, file)
    assert rows == [{"source": "one", "item": p.item, "digest": layout.digest(p.content).hex()} for p in pictures(40)]
    assert diff(of, "round1", str(file))[0] == 0
    rows[3]["digest"] = "0" * 31 + "1"
    rows[7]["item"] = 'a, "quoted"\nname.png'
    file = tmp_path / f"other.{ending}"
    code, report = diff(of, "round1", write(file, [rows[12], *rows]))  # a row that is there twice is one item
    assert code == 1 and report["in_both"] == 39
    assert report["counts"] == {"missing": 1, "additional": 1, "other_bytes": 1}
    assert report["missing"] == [{"source": "one", "item": 'a, "quoted"\nname.png'}]
    assert report["additional"] == [{"source": "one", "item": "00007.png"}]
    assert report["other_bytes"] == [{"source": "one", "item": "00003.png"}]
    assert "content_b" not in report and report["content_a"] == Cache(of.cache).open_snapshot().head.content_id
    bare = [{name: row[name] for name in ("item", "digest")} for row in rows]
    report = diff(of, "round1", write(tmp_path / f"bare.{ending}", bare))[1]
    assert report["counts"] == {"missing": 1, "additional": 1, "other_bytes": 1}, "without sources"


def test_a_list_needs_no_scan_and_is_only_written_with_one(of: Config, tmp_path: Path) -> None:
    rows = listed(of, file := tmp_path / "list.csv")
    head = Cache(of.cache).open_snapshot("round1").head
    for digest in head.sources.values():
        for name in (Paths.table(digest, "parquet"), Paths.copy(Paths.table(digest, "parquet"))):
            (Path(of.cache) / name).unlink(missing_ok=True)
    assert diff(of, "round1", str(file))[0] == 0
    before = file.read_bytes()
    with pytest.raises(CacheError, match=naming("scan of the source one", "list it in the cache that made it")):
        sana_pipe.stages.snapshots.write_list(of, "round1", str(file))
    assert file.read_bytes() == before and len(rows) == 40 and os.listdir(tmp_path).count("list.csv") == 1


def test_sources_with_equal_names_are_kept_apart(of: Config, tmp_path: Path) -> None:
    add(of, "two", [dataclasses.replace(p, content=f"two {p.content}") for p in pictures(10)])
    sana_pipe.stages.bucket.run(of, name="both")
    sana_pipe.stages.snapshots.write_list(of, "both", str(tmp_path / "both.csv"))
    assert diff(of, "both", str(tmp_path / "both.csv"))[0] == 0
    report = diff(of, "round1", str(tmp_path / "both.csv"))[1]
    assert report["missing"] == [{"source": "two", "item": p.item} for p in pictures(10)]
    with (tmp_path / "both.csv").open(newline="") as text:
        bare = [{name: row[name] for name in ("item", "digest")} for row in csv.DictReader(text)][:40]
    with pytest.raises(UserError, match=naming("names no sources", "one, two")):
        diff(of, "both", write(tmp_path / "bare.csv", bare))


def test_a_picture_of_several_sizes_is_listed_once(tmp_path: Path) -> None:
    sets = ("data.buckets=sana", "data.resolution=128", "bucket.resolutions=[128, 256]")
    of = config(tmp_path / "cache", *sets)
    scaled = [dataclasses.replace(p, height=10 * p.height, width=10 * p.width) for p in pictures(20)]
    for resolution in (128, 256):
        data = of.data.model_copy(update={"resolution": resolution})
        add(of, "one", scaled, table=buckets.table(data, synthetic.LATENT.compression))
    sana_pipe.stages.bucket.run(of, name="round1")
    assert len(Cache(of.cache).open_snapshot("round1")) == 40
    rows = listed(of, tmp_path / "list.csv")
    assert [row["item"] for row in rows] == [p.item for p in scaled]
    assert diff(of, "round1", str(tmp_path / "list.csv"))[0] == 0
    rows[2]["digest"], rows[3]["item"] = "0" * 32, "other.png"
    report = diff(of, "round1", write(tmp_path / "other.csv", rows))[1]
    assert report["counts"] == {"missing": 1, "additional": 1, "other_bytes": 1}, "items, not samples"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("source,item\none,a.png\n", "no column digest"),
        ("item,digest\na.png,12ab\n", "row 1 .* names no picture"),
        (f"item,digest\na.png,{'0' * 32}\n,{'0' * 32}\n", "row 2 .* names no picture"),
        (f"item,digest\na.png,{'A' * 32}\n", "lower case"),
        (f"item,digest\na.png,{'0' * 32}\nb.png,{'0' * 32}\na.png,{'1' * 32}\n", "rows 1 and 3"),
        (f"item,digest\na.png,{'0' * 32},x\n", "cannot be read"),
        ("", "cannot be read"),
    ],
)
def test_a_wrong_list_is_refused_by_its_row(of: Config, tmp_path: Path, text: str, wrong: str) -> None:
    (file := tmp_path / "list.csv").write_text(text)
    with pytest.raises(UserError, match=f"(?s){file}.*{wrong}"):
        diff(of, "round1", str(file))


def test_a_list_that_is_no_parquet_file_is_refused(of: Config, tmp_path: Path) -> None:
    (file := tmp_path / "list.parquet").write_bytes(b"source,item,digest\n")
    with pytest.raises(UserError, match=naming("list.parquet", "cannot be read")):
        diff(of, "round1", str(file))


def test_lists_are_told_from_names(of: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    listed(of, tmp_path / "list.csv")
    monkeypatch.setenv("LISTS", str(tmp_path))
    assert diff(of, "round1", "list.csv")[0] == diff(of, "round1", "$LISTS/list.csv")[0] == 0
    with pytest.raises(UserError, match="there is no such list"):
        diff(of, "round1", "lost.csv")
    with pytest.raises(UserError, match="can only be the second"):
        diff(of, "list.csv", "round1")
    with pytest.raises(UserError, match=naming("FILE.csv")):
        sana_pipe.stages.snapshots.write_list(of, "round1", str(tmp_path / "list.txt"))
    sana_pipe.stages.snapshots.name(of, "round1", "list.csv")
    with pytest.raises(UserError, match=naming("./list.csv", f"{of.cache}:list.csv")):
        diff(of, "round1", "list.csv")
    assert diff(of, "round1", "./list.csv")[0] == diff(of, "round1", f"{of.cache}:list.csv")[0] == 0


def test_people_see_the_first_names_and_counts(of: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = listed(of, tmp_path / "list.csv")
    capsys.readouterr()
    assert sana_pipe.stages.snapshots.diff(of, "round1", write(tmp_path / "few.csv", rows[:10])) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[1].endswith("10 items in both") and "30 additional" in out
    assert "  one: 00010.png" in out and "  one: 00029.png" in out and "  one: 00030.png" not in out
    assert "  and 10 more (--json names all)" in out


def test_memory_does_not_hold_the_names_of_a_list(of: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list is read in pieces, and again for the names of what is missing."""
    monkeypatch.setattr(item_lists, "ROWS", 7)
    rows = listed(of, tmp_path / "list.parquet")
    more = [*rows, *({"source": "one", "item": f"more{i}.png", "digest": f"{i:032x}"} for i in range(15))]
    file = tmp_path / "more.parquet"
    pq.write_table(pa.Table.from_pylist(more), file, row_group_size=4)
    assert max(len(piece) for piece in item_lists.read(file)) <= 7
    assert items(diff(of, "round1", str(file))[1]["missing"]) == sorted(f"more{i}.png" for i in range(15))


# ---------------------------------------------------------------- real encoding


def test_two_machines_with_equal_files_have_one_content_id(
    make_config: Callable[..., Config], photos: Path, tmp_path: Path
) -> None:
    """Two folders of equal bytes with other file times, each encoded into a cache of its own."""
    made = []
    for name, age in (("here", 0), ("there", 86400)):
        source = Path(shutil.copytree(photos, tmp_path / name / "photos"))
        for number, file in enumerate(sorted(path for path in source.rglob("*") if path.is_file())):
            os.utime(file, (1e9 + age, 1e9 + age + number))
        of = make_config(tmp_path / name)
        sana_pipe.stages.encode.run(of, data=str(source))
        made.append((of, sana_pipe.stages.bucket.run(of, name="round1")))
    (first, first_id), (second, second_id) = made
    assert first_id != second_id, "times of files are in the scan"
    location = f"{second.cache}:round1"
    report: dict[str, Any] = diff(first, "round1", location)[1]
    assert report["content_a"] == report["content_b"] is not None
    assert sana_pipe.stages.snapshots.diff(first, "round1", location) == 0
    lists = [tmp_path / f"{side}.csv" for side in "ab"]
    for (of, _), file in zip(made, lists, strict=True):
        sana_pipe.stages.snapshots.write_list(of, "round1", str(file))
    assert lists[0].read_bytes() == lists[1].read_bytes()
    assert sana_pipe.stages.snapshots.diff(second, "round1", str(lists[0])) == 0
