"""Listing a folder: keys, captions from both kinds of files, and a reason for everything that is left out."""

from __future__ import annotations

import io
import json
import os
import posixpath
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sana_pipe.base import disk, retrying
from sana_pipe.base.errors import AwayError, UserError
from sana_pipe.data.cache.scratch import Scratch
from sana_pipe.data.sources import filenames
from sana_pipe.data.sources import folder as folder_source
from sana_pipe.data.sources.config import DataConfig
from sana_pipe.data.sources.detect import open_source, reopen
from sana_pipe.data.sources.filenames import stem
from sana_pipe.data.sources.filesystem import LocalFilesystem
from sana_pipe.data.sources.folder import FolderSource
from sana_pipe.data.sources.metadata_files import RowReader
from sana_pipe.data.sources.source import Item, Place, Reject, Source, Unreadable
from tests.support.failing_reads import disconnect
from tests.support.lowered import lower_limits
from tests.support.messages import naming
from tests.support.source_files import make_tar

PHOTOS = Path(__file__).resolve().parents[3] / "shared" / "data" / "photos"


def put(root: Path, **files: str | bytes) -> None:
    """Keys are paths, with `__` for a slash and `_dot_` for the dot."""
    for name, content in files.items():
        write(root, name.replace("__", "/").replace("_dot_", "."), content)


def write(root: Path, key: str, content: str | bytes = b"pixels") -> Path:
    path = root / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def listed(root: Path, field: str = "text") -> tuple[dict[str, Item], dict[str, str]]:
    items: dict[str, Item] = {}
    rejects: dict[str, str] = {}
    for entry in FolderSource(root, field).items():
        if isinstance(entry, Item):
            assert entry.key not in items
            items[entry.key] = entry
        else:
            assert entry.reason
            rejects[entry.key] = f"{rejects[entry.key]}; {entry.reason}" if entry.key in rejects else entry.reason
    assert not items.keys() & rejects.keys()
    return items, rejects


def captions(item: Item) -> list[str]:
    assert len({weight for _, weight in item.captions}) == 1
    return [text for text, _ in item.captions]


def rows(*entries: object) -> str:
    return "".join(entry if isinstance(entry, str) else json.dumps(entry) + "\n" for entry in entries)


# --- keys and sidecars ---------------------------------------------------------------------------------------------


def test_keys_are_sorted_relative_paths(tmp_path: Path) -> None:
    keys = ["b.JPG", "a/z.png", "a.png", "a/b/c.Webp", "é.jpeg", "a-b/1.tif", "B.jpg", "x.y.png"]
    for key in keys:
        write(tmp_path, key)
        write(tmp_path, key.rpartition(".")[0] + ".txt", f" about {key}\n")
    result = list(FolderSource(tmp_path, "text").items())
    assert all(isinstance(entry, Item) for entry in result)
    assert [entry.key for entry in result] == sorted(keys)
    # b.JPG and B.jpg are two pictures with a caption file each wherever names keep their case
    assert dict(zip([e.key for e in result], [captions(e) for e in result if isinstance(e, Item)], strict=True)) == {
        key: [f"about {key}"] for key in keys
    }


def test_the_whole_text_is_the_caption(tmp_path: Path) -> None:
    put(tmp_path, a_dot_png=b"", a_dot_txt="\ufeff\n  first line\nsecond line \r\n\n".encode())
    items, rejects = listed(tmp_path)
    assert captions(items["a.png"]) == ["first line\nsecond line"]
    assert not rejects


def test_two_files_of_one_stem_share_the_caption(tmp_path: Path) -> None:
    put(tmp_path, a_dot_png=b"", a_dot_jpg=b"", a_dot_TXT="shared")
    items, _ = listed(tmp_path)
    assert [captions(item) for item in items.values()] == [["shared"], ["shared"]]


@pytest.mark.parametrize(
    ("text", "reason"),
    [(b"", "is empty"), (b" \n\t", "is empty"), (b"caf\xe9", "not UTF-8"), (b"x" * 2_000_000, "larger")],
)
def test_unusable_sidecars(tmp_path: Path, text: bytes, reason: str) -> None:
    put(tmp_path, a_dot_png=b"", a_dot_txt=text, b_dot_png=b"", b_dot_txt="good")
    items, rejects = listed(tmp_path)
    assert set(items) == {"b.png"}
    assert "a.txt" in rejects["a.png"]
    assert reason in rejects["a.png"]
    write(tmp_path, "metadata.jsonl", rows({"file_name": "a.png", "text": "from the table"}))
    source = FolderSource(tmp_path, "text")
    entries = list(source.items())
    assert all(isinstance(entry, Item) for entry in entries), "a caption is no picture"
    assert captions(entries[0]) == ["from the table"]
    [(kind, examples)] = source.ignored.examples.items()
    assert reason in kind and examples == ["a.png"]


def test_a_picture_without_a_caption_is_rejected(tmp_path: Path) -> None:
    put(tmp_path, a_dot_png=b"", b_dot_png=b"", b_dot_txt="x")
    items, rejects = listed(tmp_path)
    assert set(items) == {"b.png"}
    assert "no caption" in rejects["a.png"]
    assert "a.txt" in rejects["a.png"]


def test_ignored_files_are_counted(tmp_path: Path) -> None:
    put(tmp_path, a_dot_png=b"", a_dot_txt="x", readme_dot_txt="y", notes_dot_md="z", Makefile="w")
    write(tmp_path, ".hidden.png")
    write(tmp_path, ".git/picture.png")
    source = FolderSource(tmp_path, "text")
    assert len(list(source.items())) == 1
    assert source.ignored.total == 5
    assert source.ignored.counts == {
        "hidden": 2,
        ".md file": 1,
        "file without an extension": 1,
        ".txt file without a picture": 1,
    }
    list(source.items())
    assert source.ignored.total == 5  # a second listing counts afresh


# --- metadata ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_metadata(tmp_path: Path, kind: str) -> None:
    put(tmp_path, a_dot_png=b"", sub__b_dot_png=b"", sub__deep__c_dot_png=b"")
    if kind == "jsonl":
        write(tmp_path, "metadata.jsonl", rows({"file_name": "a.png", "text": " A, quoted \n", "score": 0.5}, "\n"))
        second = rows({"file_name": "./b.png", "text": "B"}, {"file_name": "deep/c.png", "text": "C"})
    else:
        write(tmp_path, "metadata.csv", '\ufefffile_name,text,score\r\na.png," A, quoted \n",0.5\r\n\r\n')
        second = "text,file_name\nB,./b.png\nC,deep/c.png\n"
    write(tmp_path, f"sub/Metadata.{kind}", second)
    items, rejects = listed(tmp_path)
    assert not rejects
    assert {key: captions(item) for key, item in items.items()} == {
        "a.png": ["A, quoted"],
        "sub/b.png": ["B"],
        "sub/deep/c.png": ["C"],
    }
    assert items["a.png"].meta == {"score": 0.5 if kind == "jsonl" else "0.5"}
    assert items["sub/b.png"].meta == {}


def test_both_kinds_of_caption_are_candidates(tmp_path: Path) -> None:
    put(tmp_path, a_dot_png=b"", a_dot_txt="from the file", b_dot_png=b"", b_dot_txt="same")
    put(tmp_path, c_dot_png=b"", c_dot_json='{"text": "from the object", "n": 1}')
    write(
        tmp_path,
        "metadata.jsonl",
        rows(
            {"file_name": "c.png", "text": "from the row", "n": 2, "m": 3},
            {"file_name": "a.png", "text": "from the row", "n": 1},
            {"file_name": "a.png", "text": "from another row", "n": 2, "m": 3},
            {"file_name": "b.png", "text": " same "},
        ),
    )
    items, rejects = listed(tmp_path)
    assert not rejects
    assert captions(items["a.png"]) == ["from the file", "from the row", "from another row"]
    assert items["a.png"].meta == {"n": 1, "m": 3}
    assert captions(items["b.png"]) == ["same"]
    assert captions(items["c.png"]) == ["from the object", "from the row"]
    assert items["c.png"].meta == {"n": 1, "m": 3}, "objects come before rows"


def test_the_caption_column_is_configured(tmp_path: Path) -> None:
    put(tmp_path, a_dot_png=b"", metadata_dot_csv="file_name,text,prompt\na.png,wrong,right\n")
    items, _ = listed(tmp_path, "prompt")
    assert captions(items["a.png"]) == ["right"]
    assert items["a.png"].meta == {"text": "wrong"}


MISTAKES = [
    ({"file_name": "gone.png", "text": "x"}, "does not exist"),
    ({"file_name": "notes.md", "text": "x"}, "is not usable"),
    ({"file_name": "/etc/passwd", "text": "x"}, "absolute"),
    ({"file_name": "../out.png", "text": "x"}, "'..'"),
    ({"file_name": "sub/../a.png", "text": "x"}, "'..'"),
    ({"file_name": "sub\\a.png", "text": "x"}, "does not exist as a picture under sub"),
    ({"file_name": "a\n.png", "text": "x"}, "control"),
    ({"file_name": "a\u0000.png", "text": "x"}, "control"),
    ({"file_name": "", "text": "x"}, "names no file"),
    ({"file_name": None, "text": "x"}, "names no file"),
    ({"file_name": 7, "text": "x"}, "names no file"),
    ({"text": "x"}, "names no file"),
    ({"file_name": "a.png"}, "has no 'text'"),
    ({"file_name": "a.png", "text": None}, "empty"),
    ({"file_name": "a.png", "text": " \n"}, "empty"),
    ({"file_name": "a.png", "text": [["x"]]}, "not text"),
    ('{"file_name": "a.png", "text": NaN}\n', "empty"),
    ('{"file_name": "a.png", "text": "\\ud83d"}\n', "half a character"),
    ('{"file_name": "\\udc80.png", "text": "x"}\n', "half a character"),
    ('{"file_name": "a.png", "text": "x"\n', "not JSON"),
    ("[" * 100_000 + "\n", "not JSON"),
    ("[1, 2]\n", "not a JSON object"),
    ("17\n", "not a JSON object"),
]


@pytest.mark.parametrize(("row", "reason"), MISTAKES)
def test_bad_rows_are_rejected_one_by_one(tmp_path: Path, row: object, reason: str) -> None:
    put(tmp_path, a_dot_png=b"", b_dot_png=b"", notes_dot_md="")
    write(tmp_path, "metadata.jsonl", rows({"file_name": "b.png", "text": "B"}, row))
    items, rejects = listed(tmp_path)
    assert set(items) == {"b.png"}
    assert reason in rejects.get("metadata.jsonl:2", rejects["a.png"])
    assert "caption" in rejects["a.png"]
    assert all(key.isprintable() and reason.isprintable() for key, reason in rejects.items())


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    put(tmp_path, a_dot_png=b"", b_dot_png=b"", c_dot_png=b"", d_dot_png=b"")
    lines = b'{"file_name": "a.png", "text": "A"}\n{"file_name": "b.png", "text": "\xff"}\n'
    write(tmp_path, "metadata.jsonl", lines)
    write(tmp_path, "metadata.csv", b"file_name,text\nc.png,C\nd.png,\xff\n")
    items, rejects = listed(tmp_path)
    assert set(items) == {"a.png", "c.png"}
    assert "UTF-8" in rejects["metadata.jsonl:2"]
    assert "UTF-8" in rejects["metadata.csv:3"]


def test_a_line_that_is_no_csv_is_that_line_alone() -> None:
    read = list(RowReader("x.csv", io.BytesIO(b'a,b\n1,2\n3,"4"5\n6,7\n')))
    assert [row if isinstance(row, dict) else "bad" for _, row in read] == [
        {"a": "1", "b": "2"},
        "bad",
        {"a": "6", "b": "7"},
    ]
    assert [isinstance(row, str) for _, row in RowReader("x.csv", io.BytesIO(b'"a"b\n'))] == [True]


def test_bad_csv(tmp_path: Path) -> None:
    put(tmp_path, a_dot_png=b"", b_dot_png=b"", c_dot_png=b"")
    write(
        tmp_path,
        "metadata.csv",
        'file_name,text\na.png,A\nb.png\nb.png,x,y\nb.png,"x"y\nc.png,C\nb.png,"never closed\n',
    )
    items, rejects = listed(tmp_path)
    assert {key: captions(item) for key, item in items.items()} == {"a.png": ["A"], "c.png": ["C"]}
    assert "1 fields" in rejects["metadata.csv:3"]
    assert "3 fields" in rejects["metadata.csv:4"]
    assert "not CSV" in rejects["metadata.csv:5"]
    assert "not CSV" in rejects["metadata.csv:7"]
    assert "b.png" in rejects


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv"])
def test_empty_metadata_is_reported(tmp_path: Path, name: str) -> None:
    put(tmp_path, a_dot_png=b"", a_dot_txt="x")
    write(tmp_path, name, "")
    items, rejects = listed(tmp_path)
    assert set(items) == {"a.png"}
    assert rejects == {name: "has no rows"}


# --- mistakes of the user ------------------------------------------------------------------------------------------


def test_missing_caption_column(tmp_path: Path) -> None:
    put(tmp_path, a_dot_png=b"")
    write(tmp_path, "sub/metadata.jsonl", rows({"file_name": "a.png", "caption": "x", "score": 1}))
    with pytest.raises(UserError) as caught:
        list(FolderSource(tmp_path, "text").items())
    assert "'text'" in caught.value.what
    assert "'caption', 'score'" in str(caught.value.found)
    assert "data.caption_field=caption" in str(caught.value.fix)


def test_missing_file_column(tmp_path: Path) -> None:
    put(tmp_path, a_dot_png=b"", metadata_dot_csv="image,text\na.png,x\n")
    with pytest.raises(UserError, match="'file_name'") as caught:
        list(FolderSource(tmp_path, "text").items())
    assert "'image', 'text'" in str(caught.value.found)


def test_no_folder_and_no_picture(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=naming(tmp_path / "gone")):
        open_source(str(tmp_path / "gone"), DataConfig(), format="folder")
    with pytest.raises(UserError, match=naming(tmp_path / "file")):
        open_source(str(write(tmp_path, "file")), DataConfig(), format="folder")
    write(tmp_path, "folder/notes.md")
    with pytest.raises(UserError, match=naming(tmp_path / "folder")) as caught:
        list(FolderSource(tmp_path / "folder", "text").items())
    assert ".md file" in str(caught.value.found) and "notes.md" in str(caught.value.found)
    assert issubclass(FolderSource, Source)


# --- hostile names and files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (b"back\\slash.png", "backslash"),
        (b"new\nline.png", "control"),
        (b"es\x1b[31m.png", "control"),
        (b"\xff.png", "UTF-8"),
    ],
)
def test_hostile_names(tmp_path: Path, name: bytes, reason: str) -> None:
    put(tmp_path, a_dot_png=b"", a_dot_txt="x")
    try:
        with open(os.path.join(os.fsencode(tmp_path), name), "wb"):
            pass
    except OSError:
        pytest.skip("this file system refuses the name itself")
    items, rejects = listed(tmp_path)
    assert set(items) == {"a.png"}
    assert len(rejects) == 1
    [(key, said)] = rejects.items()
    assert reason in said
    assert key.isprintable()
    key.encode()


def test_links(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    put(root, a_dot_png=b"A", a_dot_txt="x", sub__b_dot_png=b"B", sub__b_dot_txt="y")
    put(outside, secret_dot_png=b"S", secret_dot_txt="secret", folder__c_dot_png=b"C")
    (root / "inside.png").symlink_to(root / "sub" / "b.png")
    (root / "inside.txt").symlink_to("a.txt")
    (root / "leaves.png").symlink_to(outside / "secret.png")
    (root / "broken.png").symlink_to(root / "nothing.png")
    (root / "circle.png").symlink_to(root / "circle.png")
    (root / "linked").symlink_to(outside / "folder")
    (root / "loop").symlink_to(root)
    (root / "sub" / "b2.txt").symlink_to(outside / "secret.txt")
    write(root, "sub/b2.png")
    items, rejects = listed(root)
    assert {key: captions(item) for key, item in items.items()} == {
        "a.png": ["x"],
        "inside.png": ["x"],
        "sub/b.png": ["y"],
    }
    assert "out of the source" in rejects["leaves.png"]
    assert "out of the source" in rejects["sub/b2.txt"]
    assert "no caption" in rejects["sub/b2.png"]
    assert "linked folder" in rejects["linked"]
    assert "linked folder" in rejects["loop"]
    assert rejects["broken.png"] == "is a broken link"
    assert "circle.png" in rejects
    assert not any("secret" in str(item) for item in items.values())


def test_a_linked_root_works(tmp_path: Path) -> None:
    put(tmp_path / "real", a_dot_png=b"A", a_dot_txt="x")
    (tmp_path / "link").symlink_to("real")
    items, rejects = listed(tmp_path / "link")
    assert set(items) == {"a.png"}
    assert not rejects
    assert FolderSource(tmp_path / "link", "text").read(Place("a.png")) == b"A"


def test_pipes_and_sockets_do_not_hang(tmp_path: Path) -> None:
    put(tmp_path, a_dot_png=b"", a_dot_txt="x", b_dot_png=b"")
    os.mkfifo(tmp_path / "pipe.png")
    os.mkfifo(tmp_path / "b.txt")
    source = FolderSource(tmp_path, "text")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s.png")) if len(str(tmp_path)) < 90 else write(tmp_path, "s.png")
        result: list[Item | Reject] = []
        worker = threading.Thread(target=lambda: result.extend(source.items()), daemon=True)
        worker.start()
        worker.join(10)
    assert not worker.is_alive()
    reasons = {entry.key: entry.reason for entry in result if isinstance(entry, Reject)}
    assert "not a regular file" in reasons["pipe.png"]
    assert "not a regular file" in reasons["b.txt"]
    assert "no caption" in reasons["b.png"]
    with pytest.raises(Unreadable, match="not a regular file"):
        source.read(Place("pipe.png"))
    with pytest.raises(Unreadable, match="not a regular file"):
        source.stat(Place("pipe.png"))


LISTING = """
import sys
from sana_pipe.data.sources.config import DataConfig
from sana_pipe.base.errors import UserError
from sana_pipe.data.sources.detect import open_source
for data in sys.argv[1:]:
    try:
        print(list(open_source(data, DataConfig()).items()))
    except UserError as error:
        print(error.what.partition(":")[0], error.fix.partition(", ")[0], sep="|")
"""


def test_a_folder_that_may_be_listed_and_not_entered_is_named(
    tmp_path: Path, bound_by_permissions: Callable[[], None]
) -> None:
    put(tmp_path, p__a_dot_png=b"", p__a_dot_txt="x", p__in__b_dot_png=b"", p__in__b_dot_txt=b"", tars__c_dot_tar=b"")
    pictures, tars = shut = tmp_path / "p" / "in", tmp_path / "tars"
    for folder in shut:
        folder.chmod(0o600)
    data = [tmp_path / "p", pictures, tars, tars / "*.tar", tars / "c.tar"]
    told = subprocess.run(
        [sys.executable, "-c", LISTING, *data], preexec_fn=bound_by_permissions, capture_output=True, text=True
    )
    for folder in shut:
        folder.chmod(0o700)
    listed = [f"{folder}|chmod -R u+rX {folder}" for folder in (pictures, pictures, tars, tars)]
    assert told.stdout.splitlines() == [*listed, f"{tars / 'c.tar'}|chmod a+rx {tars}"], told.stderr


def test_unreadable_folder_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, a_dot_png=b"", a_dot_txt="x", shut__b_dot_png=b"", c_dot_png=b"", c_dot_txt="x")
    scan, open_file = os.scandir, os.open

    def denied(function: Callable[..., object], name: str) -> Callable[..., object]:
        def call(path: object, *args: object) -> object:
            if str(path).endswith(name):
                raise PermissionError(13, "Permission denied", str(path))
            return function(path, *args)

        return call

    monkeypatch.setattr(os, "open", denied(open_file, "c.txt"))
    items, rejects = listed(tmp_path)
    assert set(items) == {"a.png"}
    assert "cannot be read: Permission denied" in rejects["c.png"]
    monkeypatch.setattr(os, "scandir", denied(scan, "shut"))
    for listing in (
        lambda: listed(tmp_path),
        lambda: list(LocalFilesystem(tmp_path).find()),
        lambda: LocalFilesystem(tmp_path).names("shut"),
    ):
        with pytest.raises(UserError, match="shut"):  # what lies in it would be missing from the source
            listing()


@pytest.mark.parametrize("format", ["folder", "webdataset", "parquet"])
def test_a_network_file_system_that_goes_away_is_waited_for(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if format == "folder":
        put(
            tmp_path,
            sub__a_dot_png=b"12345",
            sub__a_dot_txt="x",
            b_dot_png=b"",
            metadata_dot_csv="file_name,text\nb.png,y",
        )
    elif format == "webdataset":
        make_tar(tmp_path / "a.tar", [("1.png", bytes(3 * io.DEFAULT_BUFFER_SIZE)), ("1.txt", "said"), ("2.png", b"")])
    else:
        pq.write_table(pa.table({"jpg": [b"1", b"2"], "text": ["x", "y"]}), tmp_path / "a.parquet")

    def content() -> list[object]:
        source = open_source(str(tmp_path), DataConfig(), patience_s=30)
        entries = list(source.items())
        read = [(source.read(e.place), source.stat(e.place)) for e in entries if isinstance(e, Item)]
        return [entries, read, sorted(LocalFilesystem(tmp_path).find()), LocalFilesystem(tmp_path).names("")]

    truth = content()
    monkeypatch.setattr(retrying, "PAUSE_S", 1e-3)
    failed = disconnect(monkeypatch, str(tmp_path), every=2)
    assert content() == truth
    assert {"open", "stat", "scandir", "readinto"} <= failed


@pytest.mark.parametrize("call", ["open", "stat", "scandir", "readinto", "readall"])
def test_a_network_file_system_that_stays_away_rejects_nothing(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, a_dot_png=b"12345", a_dot_txt="x")
    files = LocalFilesystem(tmp_path, patience_s=0.01)
    monkeypatch.setattr(retrying, "PAUSE_S", 1e-3)
    real = {name: getattr(os, name) for name in ("open", "stat", "scandir")}
    disconnect(monkeypatch, str(tmp_path))
    for name in real.keys() - {call}:
        monkeypatch.setattr(os, name, real[name])
    calls: dict[str, list[Callable[[], object]]] = {
        "stat": [lambda: files.stat("a.png")],
        "readall": [lambda: files.read("a.png")],
        "scandir": [lambda: list(files.find()), lambda: files.names("")],
    }
    for read in calls.get(call, [lambda: files.read("a.png", 3), lambda: files.read_range("a.png", 1, 2)]):
        with pytest.raises(AwayError):
            read()


def test_a_source_that_is_away_from_the_start_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "PAUSE_S", 1e-3)
    disconnect(monkeypatch, str(tmp_path))
    with pytest.raises(AwayError):
        open_source(str(tmp_path), DataConfig(), patience_s=0.01)
    with pytest.raises(AwayError):
        reopen({"root": str(tmp_path), "source_format": "webdataset"}, DataConfig(), "x", patience_s=0.01)


def test_a_place_that_is_not_utf8_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9") / "photos"
    put(folder, a_dot_png=b"", a_dot_txt="x")
    make_tar(folder.parent / "a.tar", [("1.png", b""), ("1.txt", "said")])
    monkeypatch.chdir(folder.parent)
    for data in (str(folder), "photos", "a.tar", "*.tar", f"file://{folder}", "memory://caf\udce9"):
        with pytest.raises(UserError, match=naming("UTF-8")):
            open_source(data, DataConfig())
    (tmp_path / os.fsdecode(b"caf\xe9.tar")).write_bytes(b"")
    with pytest.raises(UserError):
        list(open_source(str(tmp_path / os.fsdecode(b"caf\xe9.tar")), DataConfig()).items())


# --- bytes ---------------------------------------------------------------------------------------------------------


def test_read_and_stat(tmp_path: Path) -> None:
    put(tmp_path, sub__a_dot_png=b"12345", sub__a_dot_txt="x")
    source = FolderSource(tmp_path, "text")
    [item] = source.items()
    assert source.read(item.place) == b"12345"
    size, mtime = source.stat(item.place)
    assert (size, mtime) == (5, (tmp_path / "sub/a.png").stat().st_mtime_ns)
    os.utime(tmp_path / "sub/a.png", ns=(mtime + 1, mtime + 1))
    assert source.stat(item.place) == (5, mtime + 1)
    (tmp_path / "sub/a.png").unlink()
    for call in (source.read, source.stat):
        with pytest.raises(Unreadable, match="No such file"):
            call(item.place)


@pytest.mark.parametrize("key", ["../secret", "/etc/passwd", "a/../../secret", "a\\b", "a\0b", "", "leaves/secret"])
def test_keys_that_leave_the_root_are_refused(tmp_path: Path, key: str) -> None:
    root = tmp_path / "root"
    write(root, "a.png")
    write(tmp_path, "secret")
    (root / "leaves").symlink_to(tmp_path)
    source = FolderSource(root, "text")
    for call in (source.stat, source.read):
        with pytest.raises(Unreadable):
            call(Place(key))


# --- whole folders -------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(metadata=st.binary(max_size=300), table=st.binary(max_size=300), sidecar=st.binary(max_size=40))
def test_no_bytes_stop_a_listing(tmp_path: Path, metadata: bytes, table: bytes, sidecar: bytes) -> None:
    put(tmp_path, a_dot_png=b"", a_dot_txt=sidecar)
    write(tmp_path, "metadata.jsonl", b'{"file_name": "a.png", "text": "A"}\n' + metadata)
    write(tmp_path, "metadata.csv", b"file_name,text\n" + table)
    items, _ = listed(tmp_path)
    assert "A" in captions(items["a.png"])
    json.dumps(items["a.png"].meta, ensure_ascii=False).encode()


def test_two_listings_are_the_same(tmp_path: Path) -> None:
    for index in range(50):
        write(tmp_path, f"{index % 7}/{index}.png")
        if index % 3:
            write(tmp_path, f"{index % 7}/{index}.txt", f"caption {index}")
    source = FolderSource(tmp_path, "text")
    assert list(source.items()) == list(source.items()) == list(FolderSource(tmp_path, "text").items())


@pytest.mark.skipif(not PHOTOS.is_dir(), reason=f"no photographs with captions in {PHOTOS.name}/")
def test_photographs() -> None:
    from sana_pipe.data.images.decoding import load, probe

    source = FolderSource(PHOTOS, "text")
    actual = list(source.items())
    assert all(isinstance(entry, Item) for entry in actual)
    expected = {row["file_name"]: row["text"] for row in map(json.loads, (PHOTOS / "metadata.jsonl").open())}
    assert len(expected) == 60
    assert {item.key: captions(item) for item in actual if isinstance(item, Item)} == {
        key: [text] for key, text in expected.items()
    }
    for item in actual[::10]:
        data = source.read(item.place)
        assert len(data) == source.stat(item.place)[0]
        width, height = probe(data)
        assert min(width, height) > 256
        assert load(data, (64, 64)).std() > 5


# ---------------------------------------------------------------- listings of any size


def files_of(pictures: list[str], captions: list[str]) -> tuple[dict[str, list[str]], dict[str, int]]:
    """The caption files of each picture, and those without a picture by kind, in memory."""
    stems, files, left = {stem(name) for name in pictures}, {name: list[str]() for name in sorted(pictures)}, {}
    for kind in ("txt", "json"):
        of_kind = sorted(name for name in captions if name.lower().endswith(kind))
        for name in (name for name in of_kind if stem(name) in stems):
            for picture in files:
                if stem(picture) == stem(name):
                    files[picture].append(name)
        left[kind] = [name for name in of_kind if stem(name) not in stems]
    for name in list(left["json"]):
        own, longest = stem(name), ""
        for begin in (own[:n] for n in range(own.rfind("/") + 2, len(own))):
            longest = begin if begin in stems else longest
        for picture in files if longest else ():
            if stem(picture) == longest:
                files[picture].append(name)
        if longest:
            left["json"].remove(name)
    return files, {kind: len(names) for kind, names in left.items()}


@pytest.mark.parametrize("lowered", [False, True])
def test_captions_of_a_listing_in_temporary_files_are_those_of_the_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lowered: bool
) -> None:
    if lowered:
        lower_limits(monkeypatch)
        monkeypatch.setattr(folder_source, "SIDECAR_BATCH", 3)
    there = Scratch(partial(disk.temporary_in, tmp_path))
    rng = np.random.default_rng(3)
    kinds = {".jpg": None, ".png": None, ".txt": "0", ".TXT": "0", ".json": "1", ".JSON": "1"}
    for count in (0, 1, 40, 400):
        parts = (["", "f/", "f-/", "f/a/"], ["a", "é"], *[["a", "b", "é", ".", "", ""]] * 4, list(kinds))
        names = {"".join(rng.choice(part) for part in parts) for _ in range(count)}
        by_kind = [(kinds[posixpath.splitext(name)[1]], name) for name in rng.permutation(sorted(names)).tolist()]
        pictures, captions = [n for kind, n in by_kind if kind is None], [n for kind, n in by_kind if kind is not None]
        beside = [(filenames.base(name), kind, name) for kind, name in by_kind if kind is not None]
        table = there.rows(folder_source.FILES, beside)
        listing = folder_source.Listing(there, pictures, partial(pa.concat_tables, [table]))
        expected, left = files_of(pictures, captions)
        assert listing.keys(0, len(listing)) == list(expected)
        for start in range(0, len(listing), 7):
            stop = min(start + 7, len(listing))
            keys = listing.keys(start, stop)
            files = [[name for kind in sorted(each) for name in each[kind]] for each in listing.next_to(keys)]
            assert dict(zip(keys, files, strict=True)) == {name: expected[name] for name in keys}
        orphans = listing.orphans.counts
        assert orphans == {f".{kind} file without a picture": count for kind, count in left.items() if count}
        rejects = [(f"{rng.integers(0, 9)}", f"{n}") for n in range(count)]
        listing.reject(rejects)
        assert [(r.key, r.reason) for r in listing.rejected(0, count)] == sorted(rejects, key=lambda r: r[0])
        assert list(listing.rejected(1, 3)) == list(listing.rejected(0, count))[1:3]
    assert not list(tmp_path.iterdir())


def test_names_that_other_people_chose() -> None:
    for name, reason in (
        ("a/b..c/d.png", None),
        ("\u00e9\u4e2d/\U0001f600.png", None),
        ("a\ud7ff\ue000", None),
        ("a\ud800", "not valid UTF-8"),
        ("\udfffa", "not valid UTF-8"),
        ("a\nb", "control characters"),
        ("a\x7fb", "control characters"),
        ("a\\b", "a backslash"),
        ("/a", "is absolute"),
        ("", "is empty"),
        ("../a", "climbs"),
        ("a/..", "climbs"),
    ):
        actual = filenames.unsafe_reason(name)
        assert (actual is None) if reason is None else actual is not None and reason in actual, name
    for name, is_url in (
        ("s3://x", True),
        ("Git+http.1-x://", True),
        ("http:/x", False),
        ("/http://x", False),
        ("1s://", False),
    ):
        assert filenames.is_url(name) == is_url
    assert (filenames.extension("a.b/C.JPG"), filenames.extension("a.b/c")) == ("jpg", "")
    assert filenames.escaped("a\tb\u200e\ud800 \u00e9\\") == "a\\tb\\u200e\\ud800 \u00e9\\"
    assert filenames.short_repr("x" * 58) == repr("x" * 58)
    assert filenames.short_repr("x" * 59) == "'" + "x" * 56 + "..."
    assert filenames.error_text(FileNotFoundError(2, "No such file", "secret/name")) == "No such file"
    assert [filenames.error_text(error) for error in (ValueError("why"), OSError("odd"), ValueError())] == [
        *("why", "odd", "ValueError")
    ]


# ---------------------------------------------------------------- as other tools write them


def test_caption_files_of_other_tools(tmp_path: Path) -> None:
    write(tmp_path, "a.jpg.txt", "whole name")
    write(tmp_path, "b.caption", "kohya")
    write(tmp_path, "c.CAP", "short")
    write(tmp_path, "d.jpg.json", json.dumps({"text": "gallery-dl"}))
    write(tmp_path, "e.jpg.caption", "of the jpg")
    write(tmp_path, "e.txt", "of both")
    write(tmp_path, "f.jpg.txt", "of a picture that was converted")
    write(tmp_path, "g.jpg.txt", "twice an ending")
    write(tmp_path, "h.json", json.dumps({"text": "ours"}))
    write(tmp_path, "h.jpg.json", json.dumps({"text": "theirs"}))
    for name in ("a.jpg", "b.jpg", "c.jpg", "d.jpg", "e.jpg", "e.png", "f.webp", "g.jpg.webp", "h.jpg"):
        write(tmp_path, name)
    items, rejects = listed(tmp_path)
    assert not rejects
    assert {key: set(captions(item)) for key, item in items.items()} == {
        "a.jpg": {"whole name"},
        "b.jpg": {"kohya"},
        "c.jpg": {"short"},
        "d.jpg": {"gallery-dl"},
        "e.jpg": {"of the jpg", "of both"},
        "e.png": {"of both"},
        "f.webp": {"of a picture that was converted"},
        "g.jpg.webp": {"twice an ending"},
        "h.jpg": {"ours", "theirs"},
    }


def test_names_in_another_unicode_form(tmp_path: Path) -> None:
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    for root, picture, other in (("one", composed, decomposed), ("two", decomposed, composed)):
        write(tmp_path, f"{root}/{picture}.jpg")
        write(tmp_path, f"{root}/{other}.txt", "beside")
        write(tmp_path, f"{root}/d/{picture}.jpg")
        write(tmp_path, f"{root}/metadata.jsonl", rows({"file_name": f"d/{other}.jpg", "text": "named"}))
        items, rejects = listed(tmp_path / root)
        assert not rejects
        assert {key: captions(item) for key, item in items.items()} == {
            f"{picture}.jpg": ["beside"],
            f"d/{picture}.jpg": ["named"],
        }
        write(tmp_path, f"{root}.jsonl", rows({"path": f"{root}/{other}.jpg", "text": "listed"}))
        source = open_source(str(tmp_path / f"{root}.jsonl"), DataConfig())
        assert [source.read(item.place) for item in source.items() if isinstance(item, Item)] == [b"pixels"]
    write(tmp_path, f"both/{composed}.jpg")
    write(tmp_path, f"both/{composed}.txt", "composed")
    write(tmp_path, f"both/{decomposed}.jpg")
    write(tmp_path, f"both/{decomposed}.txt", "decomposed")
    assert {key: captions(item) for key, item in listed(tmp_path / "both")[0].items()} == {
        f"{composed}.jpg": ["composed"],
        f"{decomposed}.jpg": ["decomposed"],
    }


@pytest.mark.parametrize("kind", ["metadata.jsonl", "list.jsonl", "list.csv", "table.parquet"])
def test_absolute_names_below_the_root(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "real"
    write(root, "d/a.png")
    (tmp_path / "link").symlink_to("real")
    names = [f"{tmp_path}/link/d/a.png", f"{root}/d/a.png", f"file://{root}/d/a.png", f"{root}/../b.png", "/etc/hosts"]
    table = pa.table({"file_name": names, "text": [f"t{n}" for n in range(len(names))]})
    if kind.endswith("parquet"):
        pq.write_table(table, root / kind)
    elif kind.endswith("csv"):
        write(root, kind, "file_name,text\n" + "".join(f"{name},t{n}\n" for n, name in enumerate(names)))
    else:
        write(root, kind, rows(*table.to_pylist()))
    data = "link" if kind == "metadata.jsonl" else f"link/{kind}"
    source = open_source(str(tmp_path / data), DataConfig())
    entries = list(source.items())
    items = [entry for entry in entries if isinstance(entry, Item)]
    assert {text for item in items for text, _ in item.captions} == {"t0", "t1", "t2"}
    assert {source.read(item.place) for item in items} == {b"pixels"}
    assert len(entries) - len(items) == 2


def test_links_of_the_hub_cache_and_of_a_named_file(tmp_path: Path) -> None:
    repository = tmp_path / "datasets--me--pics"
    data = repository / "snapshots" / "abc" / "data"
    data.mkdir(parents=True)
    write(repository, "blobs/1", b"pixels")
    write(repository, "blobs/2", "caption")
    make_tar(repository / "blobs" / "3", [("x.jpg", b"pixels"), ("x.txt", b"caption")])
    for name, blob in (("a.jpg", 1), ("a.txt", 2)):
        (data / name).symlink_to(f"../../../blobs/{blob}")
    (data / "out.jpg").symlink_to(write(tmp_path, "secret.jpg"))
    items, rejects = listed(data.parent)
    assert list(items) == ["data/a.jpg"] and list(rejects) == ["data/out.jpg"]
    (repository / "snapshots" / "tars").mkdir()
    (repository / "snapshots" / "tars" / "x.tar").symlink_to("../../blobs/3")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x.tar").symlink_to(repository / "blobs" / "3")
    for place, name in ((repository / "snapshots" / "tars", "x.tar"), (tmp_path / "elsewhere", "x.tar")):
        source = open_source(str(place / name), DataConfig())
        (item,) = source.items()
        assert source.read(item.place) == b"pixels"
        assert reopen(source.document(), DataConfig(), "x").read(item.place) == b"pixels"
    with pytest.raises(UserError):
        list(open_source(str(tmp_path / "elsewhere"), DataConfig()).items())


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n", "git lfs pull"),
        ("/annex/objects/SHA256E-s5--1.jpg\n", "git annex get"),
        ("../../../blobs/0123456789abcdef", "cp -rL"),
    ],
)
def test_pointers_in_place_of_files_are_named(tmp_path: Path, content: str, named: str) -> None:
    for kind in ("a.tar", "a.parquet", "a.jsonl", "a.csv", "pictures/a.jpg"):
        write(tmp_path, kind, content)
    write(tmp_path, "pictures/a.txt", "caption")
    for kind in ("a.tar", "a.parquet"):
        assert named in "".join(entry.reason for entry in open_source(str(tmp_path / kind), DataConfig()).items())
    for kind in ("a.jsonl", "a.csv"):
        with pytest.raises(UserError, match=named):
            list(open_source(str(tmp_path / kind), DataConfig()).items())
    with pytest.raises(Unreadable, match=named):
        open_source(str(tmp_path / "pictures"), DataConfig()).read(Place("a.jpg"))


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (["data-00000-of-00001.arrow", "state.json", "dataset_info.json"], ["load_from_disk", "to_parquet"]),
        (["train/data-00000-of-00001.arrow", "train/state.json", "dataset_dict.json"], ["load_from_disk", "['train']"]),
        (["parquet-train.arrow", "dataset_info.json"], ["Dataset.from_file", "to_parquet"]),
        (["a.jpg.dvc"], ["dvc pull"]),
        (["pictures.zip"], ["unpack"]),
        (["train.tfrecord"], ["webdataset"]),
    ],
)
def test_what_is_there_in_place_of_pictures_is_named_with_the_way(
    tmp_path: Path, files: list[str], named: list[str]
) -> None:
    for name in files:
        write(tmp_path, name)
    with pytest.raises(UserError) as error:
        list(open_source(str(tmp_path), DataConfig()).items())
    assert error.value.fix is not None and all(word in error.value.fix for word in named)
    if "/" not in files[0]:
        with pytest.raises(UserError) as single:
            open_source(str(tmp_path / files[0]), DataConfig())
        assert single.value.fix == error.value.fix


ANNOTATED = [(0, "a dog"), (1, "a cat"), (0, "it's a dog")]
COCO_PICTURES = {"licenses": [{"id": 1}], "images": [{"id": n, "file_name": f"{n}.jpg"} for n in (0, 1)]}
COCO_FILES = {
    "captions": [{"image_id": n, "caption": text} for n, text in ANNOTATED],
    "boxes": [{"image_id": n, "category_id": 7, "bbox": [1, 2, 3, 4]} for n, _ in ANNOTATED],
}
LLAVA_ROWS = [
    *(
        {"image": f"{n}.jpg", "conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": text}]}
        for n, text in ANNOTATED
    ),
    {"id": "text alone", "conversations": [{"from": "human", "value": "?"}]},
]


def annotation_files() -> dict[str, tuple[str, str]]:
    """Name -> (file, content)."""
    coco = {
        name: {**COCO_PICTURES, "annotations": rows, "categories": [{"id": 7, "name": "dog"}]}
        for name, rows in COCO_FILES.items()
    }
    return {
        "captions": ("c.json", json.dumps(coco["captions"])),
        "indented": ("c.json", json.dumps(coco["captions"], indent=1)),
        "boxes": ("c.json", json.dumps(coco["boxes"])),
        "llava": ("l.json", json.dumps(LLAVA_ROWS)),
        "llava lines": ("l.jsonl", "\n".join(map(json.dumps, LLAVA_ROWS))),
    }


@pytest.mark.parametrize("case", annotation_files())
@pytest.mark.parametrize("whole", [True, False])
def test_annotations_of_coco_and_llava_are_named_with_the_form_to_write(tmp_path: Path, case: str, whole: bool) -> None:
    name, content = annotation_files()[case]
    file = write(tmp_path, f"annotations/{name}", content)
    for n in (0, 1):
        write(tmp_path, f"{n}.jpg")
    with pytest.raises(UserError, match="COCO" if name == "c.json" else "LLaVA") as caught:
        list(open_source(str(tmp_path if whole else file), DataConfig()).items())
    assert '{"image": FILE, "text": CAPTION}' in str(caught.value.expected)


def test_annotations_next_to_pictures_with_captions_are_no_error(tmp_path: Path) -> None:
    put(tmp_path, c_dot_json=annotation_files()["captions"][1], a_dot_jpg=b"a", a_dot_txt="a")
    assert len(listed(tmp_path)[0]) == 1
    rows = [{"image": "a.jpg", "images": [{}], "annotations": [{}], "text": "t", "conversations": []}]
    for name, text in (("r.json", json.dumps(rows)), ("r.jsonl", json.dumps(rows[0])), ("s.json", json.dumps(rows[0]))):
        [item] = open_source(str(write(tmp_path, name, text)), DataConfig()).items()
        assert isinstance(item, Item)


def test_a_table_of_conversations_asks_for_a_column_of_text(tmp_path: Path) -> None:
    values = {"image": [b"\xff\xd8\xff\xe0 picture"], "id": ["a"], "conversations": [[{"from": "gpt", "value": "a"}]]}
    table = pa.table(values)
    pq.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(UserError, match=naming("LLaVA", "data.caption_field=COLUMN")):
        list(open_source(str(tmp_path / "t.parquet"), DataConfig()).items())


KEYS = {"id": 5, "width": [1], "note": "", "tag_string": "dog, cat", "long prompt": "A dog and a cat."}


def test_a_json_file_without_a_caption_column_names_its_columns_and_the_setting(tmp_path: Path) -> None:
    photo = b"pixels"
    put(tmp_path, pictures__a_dot_jpg=photo, pictures__a_dot_json=json.dumps(KEYS))
    make_tar(tmp_path / "b.tar", [("a.jpg", photo), ("a.json", json.dumps(KEYS)), ("b.jpg", photo), ("b.txt", "b")])
    make_tar(tmp_path / "c.tar", [("a.jpg", photo), ("a.json", json.dumps(KEYS))])
    named = naming("'id'", "'tag_string'", "'long prompt'", "--set 'data.caption_field=long prompt'")
    for data in ("pictures", "b.tar"):
        reasons = [
            each.reason for each in open_source(str(tmp_path / data), DataConfig()).items() if isinstance(each, Reject)
        ]
        assert len(reasons) == 1 and re.match(named, reasons[0])
        [item, *_] = open_source(str(tmp_path / data), DataConfig(caption_field="long prompt")).items()
        assert isinstance(item, Item) and item.captions == (("A dog and a cat.", 1.0),)
    with pytest.raises(UserError, match=named):
        list(open_source(str(tmp_path / "c.tar"), DataConfig()).items())
    put(tmp_path, pictures__a_dot_json=json.dumps({"id": 5}))
    [reject] = open_source(str(tmp_path / "pictures"), DataConfig()).items()
    assert isinstance(reject, Reject) and "only 'id'" in reject.reason and "--set" not in reject.reason
