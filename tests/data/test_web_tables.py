"""Tables that name pictures by URL: web servers are refused with img2dataset's command, objects of stores are read."""

from __future__ import annotations

import csv
import io
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import sana_pipe.stages.encode
import sana_pipe.stages.init
from sana_pipe.base.errors import UserError
from sana_pipe.config import Config
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.encoding import scan as scanning
from sana_pipe.data.sources.source import Place
from tests.support.http_server import serve
from tests.support.messages import naming
from tests.support.source_files import listed, make_tar, opened

MakeConfig = Callable[..., Config]
COUNT = 4
URLS = [f"https://user:secret@host.example/{n}.jpg?token=t" for n in range(COUNT)]


def picture(n: int) -> bytes:
    pixels = np.random.default_rng(n).integers(0, 255, (8, 8, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).resize((90, 70), Image.Resampling.BICUBIC).save(out, "PNG")
    return out.getvalue()


def write(path: Path, names: list[Any], column: str = "url", text: str = "text", delimiter: str = ",") -> Path:
    rows = [{"id": n, column: name, text: f"picture {n}"} for n, name in enumerate(names)]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], delimiter="\t" if path.suffix == ".tsv" else delimiter)
            writer.writeheader()
            writer.writerows(rows)
    return path


def command(error: UserError) -> tuple[dict[str, str], str]:
    """The options of img2dataset's command in a fix, and what follows `encode --data`."""
    _, _, text = str(error.fix).partition(": img2dataset ")
    words, _, encode = text.partition("; then: sana-pipe encode --data ")
    options = shlex.split(words)
    assert options[::2] == [word for word in options if word.startswith("--")]
    return dict(zip(options[::2], options[1::2], strict=True)), encode


def refused(data: Path, **options: Any) -> UserError:
    with pytest.raises(UserError, match=naming(data)) as caught:
        list(opened(data, **options).items())
    assert "host.example" in str(caught.value.found) and "secret" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("form", ["parquet", "csv", "tsv", "json", "jsonl"])
def test_the_command_fetches_what_a_table_names(tmp_path: Path, form: str) -> None:
    data = write(tmp_path / f"two words.{form}", URLS)
    error = refused(data)
    assert "url" in str(error.found)
    options, encode = command(error)
    assert options == {
        "--url_list": str(data),
        "--input_format": form,
        "--url_col": "url",
        "--caption_col": "text",
        "--output_format": "webdataset",
        "--output_folder": "two words-pictures",
        "--resize_mode": "no",
        "--disable_all_reencoding": "True",
    }
    assert shlex.split(encode) == ["two words-pictures"]


@pytest.mark.parametrize("command_of", ["encode", "dry run", "init"])
def test_each_command_that_scans_refuses(make_config: MakeConfig, tmp_path: Path, command_of: str) -> None:
    data, config = write(tmp_path / "web.parquet", URLS), make_config(tmp_path)
    runs: dict[str, Callable[[], object]] = {
        "encode": lambda: sana_pipe.stages.encode.run(config, data=str(data)),
        "dry run": lambda: sana_pipe.stages.encode.dry_run(config, data=str(data), probe=False),
        "init": lambda: sana_pipe.stages.init.run(
            [str(data)], sana_pipe.stages.init.Options(gpu="4090", out=tmp_path / "made.yaml")
        ),
    }
    with pytest.raises(UserError, match=naming(data)) as caught:
        runs[command_of]()
    assert command(caught.value)[0]["--url_list"] == str(data)
    assert not (tmp_path / "made.yaml").exists()


@pytest.mark.parametrize(("column", "text"), [("URL", "TEXT"), ("image_url", "alt_text"), ("link", "long_caption")])
def test_the_columns_of_published_tables_are_in_the_command(tmp_path: Path, column: str, text: str) -> None:
    for name in ("t.parquet", "t.jsonl", "t.csv"):
        options, _ = command(refused(write(tmp_path / name, URLS, column, text)))
        assert (options["--url_col"], options["--caption_col"]) == (column, text)


def test_columns_that_the_configuration_names_are_kept(tmp_path: Path) -> None:
    rows = [{"target": url, "short": "s", "long": "l", "clip": 30} for url in URLS]
    data = tmp_path / "t.parquet"
    pq.write_table(pa.Table.from_pylist(rows), data)
    weights = {"caption_weights": {"short": 1.0, "long": 3.0}, "caption_scores": {"long": "clip"}}
    options, encode = command(refused(data, image_field="target", **weights))
    assert options["--url_col"] == "target" and "--caption_col" not in options
    assert set(json.loads(options["--save_additional_columns"])) == {"short", "long", "clip"}
    assert "data.caption_weights=" in encode and "data.caption_scores=" in encode
    assert command(refused(data, image_field="target", caption_field="long"))[0]["--caption_col"] == "long"


def test_tables_that_img2dataset_cannot_read_are_to_be_written_again(tmp_path: Path) -> None:
    write(tmp_path / "semicolons.csv", URLS, delimiter=";")
    write(tmp_path / "wide.csv", URLS).write_bytes((tmp_path / "wide.csv").read_text().encode("utf-16"))
    (tmp_path / "object.json").write_text(json.dumps(dict.fromkeys(URLS, "said")))
    write(tmp_path / "lists.jsonl", [[url] for url in URLS])
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    images = pa.array([{"bytes": None, "path": url} for url in URLS], kind)
    pq.write_table(pa.table({"image": images, "text": ["said"] * COUNT}), tmp_path / "structs.parquet")
    for data in tmp_path.glob("*.*"):
        error = refused(data)
        table = f"{data.with_suffix('')}-urls.parquet"
        assert command(error)[0]["--url_list"] == table and str(error.fix).count(table) == 2, data
        assert command(error)[0]["--input_format"] == "parquet"


def test_a_folder_of_tables_is_fetched_at_once(tmp_path: Path) -> None:
    (tmp_path / "web").mkdir()
    for name in ("a.parquet", "b.parquet"):
        write(tmp_path / "web" / name, URLS)
    with pytest.raises(UserError, match=naming("a.parquet")) as caught:
        list(opened(tmp_path / "web").items())
    options, encode = command(caught.value)
    assert (options["--url_list"], options["--output_folder"], encode) == (str(tmp_path / "web"), *["web-pictures"] * 2)
    write(tmp_path / "web" / "a.parquet", ["0.png"])
    with pytest.raises(UserError, match=naming("b.parquet")):
        list(opened(tmp_path / "web").items())


@pytest.mark.parametrize("table", ["t.parquet", "t.jsonl", "t.csv"])
def test_the_first_name_decides_and_other_rows_with_urls_are_rejects(tmp_path: Path, table: str) -> None:
    (tmp_path / "a.png").write_bytes(picture(0))
    others = ["a.png", URLS[0], "ftp://host/x.png", "file:///etc/passwd", "s3://user:secret@bucket/a.png"]
    items, rejects = listed(opened(write(tmp_path / table, others)))
    assert len(items) == 1 and len(rejects) == 4
    assert sum("img2dataset" in reason for reason in rejects.values()) == 1
    assert "secret" not in str(rejects)
    refused(write(tmp_path / table, [URLS[0], "a.png"]))


def test_metadata_of_a_folder_may_have_urls_next_to_names(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(0))
    row = {"file_name": "a.png", "url": URLS[0], "text": "said"}
    (tmp_path / "metadata.jsonl").write_text(json.dumps(row))
    [item] = listed(opened(tmp_path))[0].values()
    assert item.meta["url"] == URLS[0]
    (tmp_path / "metadata.jsonl").write_text(json.dumps({**row, "file_name": URLS[0]}))
    with pytest.raises(UserError, match=naming(tmp_path / "metadata.jsonl")) as caught:
        list(opened(tmp_path).items())
    assert command(caught.value)[0]["--url_col"] == "file_name"


def test_names_below_a_web_server_that_is_the_source_are_its_files(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(0))
    for server in serve(tmp_path, True):
        for table in ("t.parquet", "t.jsonl"):
            write(tmp_path / table, [f"{server.url}/a.png"])
            source = opened(f"{server.url}/{table}")
            [item] = listed(source)[0].values()
            assert source.read(item.place) == picture(0)


def test_tars_of_img2dataset_are_read(make_config: MakeConfig, tmp_path: Path) -> None:
    """With `--disable_all_reencoding` the pictures keep their format and are called .jpg."""
    (tmp_path / "tars").mkdir()
    members = [(f"{n:09d}.json", json.dumps({"url": URLS[n], "caption": "c"}).encode()) for n in range(COUNT)]
    members += [(f"{n:09d}.{kind}", data) for n in range(COUNT) for kind, data in (("jpg", picture(n)), ("txt", b"c"))]
    make_tar(tmp_path / "tars" / "00000.tar", sorted(members))
    write(tmp_path / "tars" / "00000.parquet", URLS, text="caption")
    (tmp_path / "tars" / "00000_stats.json").write_text("{}")
    done = sana_pipe.stages.encode.run(make_config(tmp_path), data=str(tmp_path / "tars"))
    assert (done["images"], done["rejects"]) == (COUNT, 0)


# ------------------------------------------------------------------------------------------- objects of stores


@pytest.fixture
def store(s3_bucket: str) -> Any:
    store = fsspec.filesystem("s3")
    for n in range(COUNT):
        store.pipe_file(f"{s3_bucket}/seen/{n}.png", picture(n))
    return store


def rows_of(config: Config, name: str) -> list[dict[str, Any]]:
    cache = Cache(config.cache)
    body = cache.last_scan(name)
    assert body is not None
    rows: list[dict[str, Any]] = cache.table(body["table"]).to_pylist()
    return rows


@pytest.mark.parametrize("table", ["t.parquet", "t.csv"])
def test_objects_of_a_store_are_read_as_files_are(
    s3_bucket: str, store: Any, make_config: MakeConfig, tmp_path: Path, table: str
) -> None:
    (tmp_path / "here.png").write_bytes(picture(COUNT))
    names = [f"{s3_bucket}/seen/{n}.png" for n in range(COUNT)]
    data = write(tmp_path / table, [*names, f"{s3_bucket}/seen/none.png", "here.png"])
    config = make_config(tmp_path)
    assert opened(data).is_remote
    done = sana_pipe.stages.encode.run(config, data=str(data))
    assert (done["images"], done["rejects"]) == (COUNT + 1, 1)
    assert ["does not exist" in row["reject"] for row in rows_of(config, "t") if row["reject"]] == [True]
    assert sana_pipe.stages.encode.run(config, data=str(data))["images"] == 0
    store.pipe_file(names[1], picture(99))
    assert sana_pipe.stages.encode.run(config, data=str(data))["images"] == 1, "a changed object"
    source = scanning.reopen(Cache(config.cache), "t", config.data)
    [row] = [row for row in rows_of(config, "t") if str(row["where"] or row["item"]).endswith("/1.png")]
    assert source.read(Place(row["item"], row["part"], row["where"])) == picture(99)


def test_names_may_be_relative_to_a_folder_of_a_store(s3_bucket: str, store: Any, tmp_path: Path) -> None:
    for table in ("t.parquet", "t.jsonl"):
        source = opened(write(tmp_path / table, ["0.png", "seen/../0.png"]), image_root=f"{s3_bucket}/seen")
        items, rejects = listed(source)
        [item] = items.values()
        assert source.read(item.place) == picture(0) and len(rejects) == 1
