"""Sources over HTTP (with and without ranges) and S3: the same items and bytes as on a disk, and plain errors."""

from __future__ import annotations

import functools
import http.server
import io
import json
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import retrying
from pipeline.config import DataConfig
from pipeline.data import remote
from pipeline.data.detect import open_source
from pipeline.data.source import Item, Reject, Source, Unreadable
from pipeline.errors import UserError

COUNT = 12


def picture(n: int) -> bytes:
    return b"picture %d " % n * (n + 1) * 50


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """folder/, tars/, t.parquet and list.jsonl of the same pictures."""
    root = tmp_path_factory.mktemp("data")
    (root / "folder").mkdir()
    (root / "tars").mkdir()
    rows = []
    for shard in range(2):
        with tarfile.open(root / "tars" / f"s-{shard}.tar", "w") as tar:
            for n in range(shard, COUNT, 2):
                for kind, content in (("jpg", picture(n)), ("txt", f"caption {n}".encode())):
                    (root / "folder" / f"a {n}.{kind}").write_bytes(content)
                    info = tarfile.TarInfo(f"{n}.{kind}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
                rows.append({"file_name": f"folder/a {n}.jpg", "text": f"caption {n}"})
    (root / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = pa.table({"jpg": [picture(n) for n in range(COUNT)], "text": [f"caption {n}" for n in range(COUNT)]})
    pq.write_table(table, root / "t.parquet", row_group_size=5)
    return root


@dataclass
class Server:
    url: str
    ranges: list[str | None] = field(default_factory=list)
    """The Range header of every GET."""
    sent: int = 0
    fail: int = 0
    """How many of the next requests end in an error of the server."""


def serve(root: Path, ranged: bool) -> Iterator[Server]:
    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers.get("Range")
            server.ranges.append(asked)
            if server.fail:
                server.fail -= 1
                self.send_error(503)
                return
            path = Path(self.translate_path(self.path))
            if asked is None or not ranged or not path.is_file():
                server.sent += path.stat().st_size if path.is_file() else 0
                super().do_GET()
                return
            content = path.read_bytes()
            first, _, last = asked.removeprefix("bytes=").partition("-")
            part = content[int(first) : int(last) + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}")
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            server.sent += len(part)  # before the client can have it and ask
            self.wfile.write(part)

        def log_message(self, *arguments: object) -> None:
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(root)))
    server = Server(f"http://127.0.0.1:{httpd.server_address[1]}")
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    yield server
    httpd.shutdown()
    httpd.server_close()
    thread.join()


@pytest.fixture(params=[True, False], ids=["ranges", "no-ranges"])
def server(request: pytest.FixtureRequest, data: Path) -> Iterator[Server]:
    yield from serve(data, request.param)


@pytest.fixture
def plain_server(data: Path) -> Iterator[Server]:
    yield from serve(data, False)


@pytest.fixture
def ranged_server(data: Path) -> Iterator[Server]:
    yield from serve(data, True)


def opened(address: str, **config: Any) -> Source:
    return open_source(address, DataConfig(**config))


def content(source: Source) -> dict[str, tuple[bytes, tuple[tuple[str, float], ...]]]:
    found = list(source.items())
    assert not [entry for entry in found if isinstance(entry, Reject)]
    return {item.key: (source.read(item.key), item.captions) for item in found if isinstance(item, Item)}


def everything(root: str, data: Path) -> None:
    for name in ("folder", "tars/s-{0..1}.tar", "t.parquet", "list.jsonl"):
        there, here = opened(f"{root}/{name}"), opened(f"{data}/{name}")
        assert content(there) == content(here), name
        assert len(content(here)) == COUNT
        for key in content(here):
            assert there.stat(key)[0] == here.stat(key)[0]
            assert there.stat(key) == there.stat(key)
            assert 0 <= there.stat(key)[1] < 2**63
        assert there.name == here.name
        assert [p.stamp for p in there.parts()] == [p.stamp for p in there.parts()]


def test_http_is_the_same_as_a_disk(server: Server, data: Path) -> None:
    everything(server.url, data)


def test_a_member_is_read_by_its_range(ranged_server: Server) -> None:
    first = opened(f"{ranged_server.url}/tars/s-0.tar")
    places = [(item.key, "s-0.tar", item.where or "") for item in first.items() if isinstance(item, Item)]
    source = opened(f"{ranged_server.url}/tars/s-0.tar")
    source.recall(places)
    ranged_server.ranges.clear()
    ranged_server.sent = 0
    assert source.read("s-0.tar/4.jpg") == picture(4)
    assert len(ranged_server.ranges) == 1
    assert ranged_server.sent == len(picture(4))


def test_a_scan_transfers_a_tar_once(ranged_server: Server, data: Path) -> None:
    source = opened(f"{ranged_server.url}/tars/s-0.tar")
    assert len(content(source)) == COUNT // 2
    assert ranged_server.sent == (data / "tars" / "s-0.tar").stat().st_size


def test_a_server_without_ranges_sends_a_tar_once_not_per_member(plain_server: Server, data: Path) -> None:
    source = opened(f"{plain_server.url}/tars/s-0.tar")
    found = content(source)
    assert len(found) == COUNT // 2
    size = (data / "tars" / "s-0.tar").stat().st_size
    assert plain_server.sent <= 2 * size  # once to find out, once to keep
    later = opened(f"{plain_server.url}/tars/s-0.tar")
    later.recall((i.key, "s-0.tar", i.where or "") for i in source.items() if isinstance(i, Item))
    assert {key: later.read(key) for key in found} == {key: value[0] for key, value in found.items()}


def test_too_many_bytes_never_pass_for_a_range(plain_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard is what makes the difference: without it the beginning of the file would be the picture."""
    source = opened(f"{plain_server.url}/tars/s-0.tar")
    keys = list(content(source))
    monkeypatch.setattr(remote.Remote, "_fetch", lambda self, name, offset, length: self.fs.cat_file(self.path(name)))
    later = opened(f"{plain_server.url}/tars/s-0.tar")
    later.recall((i.key, "s-0.tar", i.where or "") for i in source.items() if isinstance(i, Item))
    for key in keys:
        with pytest.raises(Unreadable, match="gave"):
            later.read(key)


def test_a_hiccup_is_tried_again_and_a_failure_is_told(ranged_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "PAUSE_S", 0.01)
    source = opened(f"{ranged_server.url}/tars/s-0.tar")
    keys = list(content(source))
    source = opened(f"{ranged_server.url}/tars/s-0.tar")
    first = opened(f"{ranged_server.url}/tars/s-0.tar")
    source.recall((i.key, "s-0.tar", i.where or "") for i in first.items() if isinstance(i, Item))
    ranged_server.fail = retrying.ATTEMPTS - 1
    assert source.read(keys[0])
    ranged_server.fail = retrying.ATTEMPTS
    with pytest.raises(Unreadable, match="503"):
        source.read(keys[0])
    assert not ranged_server.fail
    assert source.read(keys[0])


def test_missing_things_are_told(ranged_server: Server) -> None:
    (found,) = opened(f"{ranged_server.url}/tars/gone.tar").items()
    assert isinstance(found, Reject)
    assert "does not exist" in found.reason
    with pytest.raises(UserError, match=r"holds no picture|cannot be listed"):
        list(opened(f"{ranged_server.url}/gone").items())
    with pytest.raises(UserError, match="cannot be opened"):
        opened("nonsense://x/y.tar")


# --- S3 ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def s3(s3_bucket: str, data: Path) -> str:
    import fsspec

    fs = fsspec.filesystem("s3")
    for path in sorted(data.rglob("*")):
        if path.is_file():
            fs.pipe_file(f"bucket/set/{path.relative_to(data)}", path.read_bytes())
    return f"{s3_bucket}/set"


def test_s3_is_the_same_as_a_disk(s3: str, data: Path) -> None:
    everything(s3, data)
    assert content(opened(f"{s3}/tars")) == content(opened(str(data / "tars")))
    assert content(opened(f"{s3}/tars/s-*.tar")) == content(opened(str(data / "tars")))


def test_an_object_that_changes_has_another_stamp(s3: str) -> None:
    import fsspec

    fs = fsspec.filesystem("s3")
    fs.pipe_file("bucket/other/a.png", b"one")
    fs.pipe_file("bucket/other/a.txt", b"said")
    source = opened("s3://bucket/other")
    assert content(source) == {"a.png": (b"one", (("said", 1.0),))}
    before = source.stat("a.png")
    fs.pipe_file("bucket/other/a.png", b"two")
    source = opened("s3://bucket/other")
    assert content(source)["a.png"][0] == b"two"
    assert source.stat("a.png") != before


def test_hostile_object_names_are_refused(s3: str) -> None:
    import fsspec

    fs = fsspec.filesystem("s3")
    fs.pipe_file("bucket/bad/ok.png", b"ok")
    fs.pipe_file("bucket/bad/ok.txt", b"said")
    fs.pipe_file("bucket/bad/x\\y.png", b"no")
    source = opened("s3://bucket/bad")
    found = list(source.items())
    assert [type(entry) for entry in found] == [Reject, Item]
    with pytest.raises(Unreadable, match="climbs"):
        source.read("../set/t.parquet")


def test_no_such_bucket_is_told(s3: str) -> None:
    with pytest.raises(UserError, match="nowhere"):
        list(opened("s3://nowhere/set").items())
