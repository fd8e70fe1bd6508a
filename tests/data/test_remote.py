"""Sources over HTTP (with and without ranges) and S3: the same items and bytes as on a disk, and plain errors."""

from __future__ import annotations

import base64
import errno
import io
import json
import os
import re
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sana_pipe.base import retrying
from sana_pipe.base.errors import AwayError, CacheError, NoSpaceError, UserError
from sana_pipe.data.cache import connections, scratch
from sana_pipe.data.cache.config import MirrorConfig
from sana_pipe.data.cache.files import Files
from sana_pipe.data.encoding.prompts import read as read_prompts
from sana_pipe.data.sources import detect, range_prefetch, remote
from sana_pipe.data.sources.config import DataConfig
from sana_pipe.data.sources.detect import open_source
from sana_pipe.data.sources.filesystem import LocalFilesystem
from sana_pipe.data.sources.remote import RemoteFilesystem
from sana_pipe.data.sources.source import Item, Place, Reject, Source, Unreadable
from tests.support.http_server import Server, serve
from tests.support.lowered import lower_limits
from tests.support.messages import naming
from tests.support.waiting import until

COUNT = 12
PATIENCE_S = 1.0  # where there will be no answer


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "PAUSE_S", 0.02)


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


@pytest.fixture(params=[True, False], ids=["ranges", "no-ranges"])
def server(request: pytest.FixtureRequest, data: Path) -> Iterator[Server]:
    yield from serve(data, request.param)


@pytest.fixture
def plain_server(data: Path) -> Iterator[Server]:
    yield from serve(data, False)


@pytest.fixture
def ranged_server(data: Path) -> Iterator[Server]:
    yield from serve(data, True)


def opened(address: str, patience_s: float = 60.0, **config: Any) -> Source:
    return open_source(address, DataConfig(**config), patience_s=patience_s)


def content(source: Source) -> dict[str, tuple[bytes, tuple[tuple[str, float], ...]]]:
    result = list(source.items())
    assert not [entry for entry in result if isinstance(entry, Reject)]
    return {item.key: (source.read(item.place), item.captions) for item in result if isinstance(item, Item)}


def places(source: Source) -> list[Place]:
    return [item.place for item in source.items() if isinstance(item, Item)]


def everything(root: str, data: Path) -> None:
    for name in ("folder", "tars/s-{0..1}.tar", "t.parquet", "list.jsonl"):
        there, here = opened(f"{root}/{name}"), opened(f"{data}/{name}")
        assert content(there) == content(here), name
        assert len(content(here)) == COUNT
        for place in places(here):
            assert there.stat(place)[0] == here.stat(place)[0]
            assert there.stat(place) == there.stat(place)
            assert 0 <= there.stat(place)[1] < 2**63
        assert there.name == here.name
        assert [p.stamp for p in there.parts()] == [p.stamp for p in there.parts()]


def test_http_is_the_same_as_a_disk(server: Server, data: Path) -> None:
    everything(server.url, data)


def test_a_member_is_read_by_its_range(ranged_server: Server) -> None:
    [place] = [p for p in places(opened(f"{ranged_server.url}/tars/s-0.tar")) if p.item == "s-0.tar/4.jpg"]
    source = opened(f"{ranged_server.url}/tars/s-0.tar")
    ranged_server.ranges.clear()
    ranged_server.sent = 0
    assert source.read(place) == picture(4)
    assert len(ranged_server.ranges) == 1
    assert ranged_server.sent == len(picture(4))


def test_a_scan_transfers_a_tar_once(ranged_server: Server, data: Path) -> None:
    source = opened(f"{ranged_server.url}/tars/s-0.tar")
    assert len(content(source)) == COUNT // 2
    assert ranged_server.sent == (data / "tars" / "s-0.tar").stat().st_size
    assert ranged_server.heads == 1


@pytest.mark.parametrize("limit", ["SPOOL_BYTES", "free"])
def test_a_tar_without_space_for_a_copy_is_read_by_ranges_or_not_at_all(
    limit: str, ranged_server: Server, plain_server: Server, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (data / "tars" / "s-0.tar").stat().st_size
    for space, read in ((size, COUNT // 2), (size - 1, 0)):
        if limit == "free":  # half of it may be used
            disk = SimpleNamespace(free=2 * space)
            monkeypatch.setattr(remote.shutil, "disk_usage", lambda folder, disk=disk: disk)
        else:
            monkeypatch.setattr(remote, "SPOOL_BYTES", space)
        assert len(content(opened(f"{ranged_server.url}/tars/s-0.tar"))) == COUNT // 2
        items = list(opened(f"{plain_server.url}/tars/s-0.tar").items())
        assert sum(isinstance(item, Item) for item in items) == read
    assert ["lacks space" in item.reason for item in items if isinstance(item, Reject)] == [True]


def test_the_copy_that_was_read_last_stays(plain_server: Server, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "SPOOLED_FILES", 2)
    files = RemoteFilesystem(plain_server.url, PATIENCE_S)
    files.supports_ranges = False
    names = ["list.jsonl", "tars/s-0.tar", "tars/s-1.tar"]
    whole = {name: (data / name).read_bytes() for name in names}
    for name, transferred in zip((*names, names[1], names[0], names[1], names[2]), (1, 1, 1, 0, 1, 0, 1), strict=True):
        plain_server.sent = 0
        assert files.read_range(name, 0, 5) == whole[name][:5]
        assert plain_server.sent == transferred * len(whole[name])


def test_a_full_temporary_folder_is_no_fault_of_the_files(
    ranged_server: Server, plain_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.BytesIO):
        def write(self, data: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    source, keys = again(f"{plain_server.url}/tars/s-0.tar")
    monkeypatch.setattr(remote.tempfile, "TemporaryFile", Full)
    for server in (ranged_server, plain_server):
        with pytest.raises(NoSpaceError):
            list(opened(f"{server.url}/tars/s-0.tar").items())
    with pytest.raises(NoSpaceError):
        source.read(keys[0])


def test_a_limit_of_this_machine_is_no_fault_of_the_file(
    ranged_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = remote.RemoteFilesystem(ranged_server.url, PATIENCE_S)

    def refused(*args: object, **options: object) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(files.fs, "cat_file", refused)
    with pytest.raises(CacheError):
        files.read("t.parquet")


def test_a_server_without_ranges_sends_a_tar_once_not_per_member(plain_server: Server, data: Path) -> None:
    source = opened(f"{plain_server.url}/tars/s-0.tar")
    result = content(source)
    assert len(result) == COUNT // 2
    size = (data / "tars" / "s-0.tar").stat().st_size
    assert plain_server.sent <= 2 * size  # once to find out, once to keep
    later = opened(f"{plain_server.url}/tars/s-0.tar")
    assert {place.item: later.read(place) for place in places(source)} == {
        key: value[0] for key, value in result.items()
    }


def test_too_many_bytes_never_pass_for_a_range(plain_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard is what makes the difference: without it the beginning of the file would be the picture."""
    source = opened(f"{plain_server.url}/tars/s-0.tar")
    there = places(source)
    monkeypatch.setattr(
        remote.RemoteFilesystem, "_fetch", lambda self, name, offset, length: self.fs.cat_file(self.path(name))
    )
    later = opened(f"{plain_server.url}/tars/s-0.tar")
    for place in there:
        with pytest.raises(Unreadable, match="gave"):
            later.read(place)


def again(url: str) -> tuple[Source, list[Place]]:
    """The source as another process reads it: nothing is kept of the listing but the places."""
    return opened(url), places(opened(url))


def test_neighbours_in_a_tar_are_fetched_together(
    ranged_server: Server, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{ranged_server.url}/tars/s-{{0..1}}.tar"
    truth = {key: value[0] for key, value in content(opened(url)).items()}
    counts = []
    for gap, request in ((1 << 20, 1 << 25), (1 << 20, 1 << 14), (-1, 1 << 25)):
        monkeypatch.setattr(range_prefetch, "GAP", gap)
        monkeypatch.setattr(range_prefetch, "REQUEST", request)
        source, keys = again(url)
        ranged_server.ranges.clear()
        with source.reading(keys) as read:
            assert {key.item: read(key) for key in keys} == truth
        counts.append(len(ranged_server.ranges))
        for asked in ranged_server.ranges:
            first, _, last = (asked or "").removeprefix("bytes=").partition("-")
            assert int(last) + 1 - int(first) <= request
    assert (counts[0], counts[2]) == (2, COUNT)
    assert 2 < counts[1] < COUNT
    source, keys = again(url)
    with source.reading(keys[:3]) as read:  # out of order, not named, and twice
        for key in (keys[2], keys[5], keys[0], keys[0]):
            assert read(key) == truth[key.item]


def test_no_more_than_the_window_is_fetched_before_it_is_needed(
    ranged_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_prefetch, "GAP", -1)
    monkeypatch.setattr(range_prefetch, "WINDOW", len(picture(0)) + len(picture(2)) + len(picture(4)))
    source, keys = again(f"{ranged_server.url}/tars/s-0.tar")
    ranged_server.ranges.clear()
    order = sorted(keys, key=lambda key: int(key.item.partition("/")[2].partition(".")[0]))
    with source.reading(order) as read:
        read(order[0])
        until(lambda: len(ranged_server.ranges) >= 3)
        time.sleep(0.3)
        assert len(ranged_server.ranges) == 3
        for key in order[1:3]:
            read(key)
        until(lambda: len(ranged_server.ranges) >= 4)
        time.sleep(0.3)
        assert len(ranged_server.ranges) == 4, "what has been read makes room for the next"
        for key in order[3:]:
            read(key)
    assert len(ranged_server.ranges) == len(keys)


@pytest.mark.parametrize("table", ["list.jsonl", "names.parquet"])
def test_small_objects_are_fetched_side_by_side(ranged_server: Server, data: Path, table: str) -> None:
    rows = [json.loads(line) for line in (data / "list.jsonl").read_text().splitlines()]
    pq.write_table(pa.Table.from_pylist(rows), data / "names.parquet")
    source = opened(f"{ranged_server.url}/{table}")
    truth = {key: value[0] for key, value in content(source).items()}
    ranged_server.pause, ranged_server.at_once = 0.05, 0
    keys = places(source)
    ranged_server.at_once = 0
    with source.reading(keys) as read:
        assert {key.item: read(key) for key in keys} == truth
    (data / "names.parquet").unlink()
    assert ranged_server.at_once > 4


def test_a_request_that_fails_does_not_take_its_pictures_with_it(
    ranged_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{ranged_server.url}/tars/s-0.tar"
    truth = {key: value[0] for key, value in content(opened(url)).items()}
    source, keys = again(url)
    keys[0] = Place(keys[0].item, "s-0.tar", "999999999+10")
    with source.reading(keys) as read:
        with pytest.raises(Unreadable):
            read(keys[0])
        assert {key: read(key) for key in keys[1:]} == {key: truth[key.item] for key in keys[1:]}


def test_a_server_without_ranges_is_found_out_by_one_request(
    plain_server: Server, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_prefetch, "GAP", -1)
    url = f"{plain_server.url}/tars/s-0.tar"
    truth = {key: value[0] for key, value in content(opened(url)).items()}
    source, keys = again(url)
    plain_server.sent, plain_server.pause = 0, 0.05
    with source.reading(keys) as read:
        assert {key.item: read(key) for key in keys} == truth
    assert plain_server.sent <= 2 * (data / "tars" / "s-0.tar").stat().st_size


@pytest.mark.parametrize("works", [True, False])
def test_each_key_is_counted_once_and_read_alone_where_its_request_failed(works: bool) -> None:
    def fetch(at: range_prefetch.FileRange) -> bytes:
        if not works:
            raise Unreadable("no")
        return f"{at.file} {at.offset} {at.size}".encode()

    ranges = [("a", range_prefetch.FileRange("t.parquet", 0, 13))]
    with range_prefetch.RangePrefetch(fetch, ranges, lambda key: b"alone") as reader:
        assert [reader.read("a"), reader.read("a")] == [b"t.parquet 0 13"[:13] if works else b"alone", b"alone"]
        assert reader._bytes_in_window == 0


def test_no_range_is_asked_of_a_server_that_sends_none(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(LocalFilesystem, "is_remote", True)
    source = opened(str(data / "tars" / "s-0.tar"))
    keys, real = places(source), LocalFilesystem.read_range

    def read_range(self: LocalFilesystem, *args: Any) -> bytes:
        asked.append(threading.get_ident())
        return real(self, *args)

    monkeypatch.setattr(LocalFilesystem, "read_range", read_range)
    with source.reading(keys) as read:
        monkeypatch.setattr(LocalFilesystem, "is_remote", False)
        assert len([read(key) for key in keys]) == len(asked) == len(keys)
    assert set(asked) == {threading.get_ident()}, "each is read alone"


def test_a_disk_is_read_as_ever(data: Path) -> None:
    source = opened(str(data / "tars"))
    list(source.items())
    with source.reading([]) as read:
        assert read == source.read


def test_a_hiccup_is_tried_again_and_a_store_that_is_away_is_no_bad_picture(ranged_server: Server) -> None:
    keys = places(opened(f"{ranged_server.url}/tars/s-0.tar"))
    source = opened(f"{ranged_server.url}/tars/s-0.tar", PATIENCE_S)
    ranged_server.fail = 3
    assert source.read(keys[0]) and not ranged_server.fail
    ranged_server.fail = 10**6
    with pytest.raises(AwayError, match="503"):
        source.read(keys[0])
    ranged_server.fail = 0
    assert source.read(keys[0])


def test_a_file_that_never_comes_while_others_do_is_that_file_s_fault(ranged_server: Server) -> None:
    # A busy machine may need a second for a picture that does come.
    source = opened(f"{ranged_server.url}/folder/{{0..1}}.tar", 5 * PATIENCE_S).filesystem
    ranged_server.broken = "/folder/a%203.jpg"
    with ThreadPoolExecutor(2) as pool:
        bad = pool.submit(source.read, "a 3.jpg")
        while not bad.done():
            assert source.read("a 4.jpg") == picture(4)
        with pytest.raises(Unreadable, match="500"):
            bad.result()


def test_missing_things_are_reported(ranged_server: Server) -> None:
    with pytest.raises(UserError, match=naming("/tars", "gone.tar")):
        list(opened(f"{ranged_server.url}/tars/gone.tar").items())
    with pytest.raises(UserError, match=r"holds no picture|cannot be listed"):
        list(opened(f"{ranged_server.url}/gone").items())
    with pytest.raises(UserError, match=naming("nonsense://")):
        opened("nonsense://x/y.tar")


@pytest.mark.parametrize("how", ["error", "reset"])
def test_a_listing_that_is_not_whole_is_an_error(
    ranged_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """fsspec's general `find` gives what it could list, and nothing of a server that is gone."""
    source = open_source(ranged_server.url, DataConfig(), format="folder")
    assert len([item for item in source.items() if isinstance(item, Item)]) == COUNT
    monkeypatch.setattr(source.filesystem.connection, "patience_s", PATIENCE_S)
    ranged_server.broken, ranged_server.how = "/folder", how
    with pytest.raises(UserError, match="cannot be listed"):
        list(source.items())
    cache = Files(ranged_server.url, MirrorConfig(path=str(tmp_path)), PATIENCE_S)
    with pytest.raises(CacheError):
        list(cache.walk(""))
    with pytest.raises(UserError, match="cannot be listed"):  # captions and scores next to the tars are files, too
        list(opened(f"{ranged_server.url}/folder/{{x,y}}.tar", PATIENCE_S).filesystem.names(""))
    ranged_server.broken = ""
    assert len(list(cache.walk("tars"))) == 2
    assert list(cache.walk("nothing")) == []


@pytest.mark.parametrize("status", ["403", "405", "501"])
def test_a_web_server_that_lists_no_folders_has_no_names_next_to_its_tars(ranged_server: Server, status: str) -> None:
    filesystem = opened(f"{ranged_server.url}/tars/s-{{0,1}}.tar", PATIENCE_S).filesystem
    assert filesystem.names("")
    ranged_server.broken, ranged_server.how = "/tars/", status
    filesystem.refresh()
    assert filesystem.names("") == []


def test_a_folder_that_was_listed_and_is_missing_is_an_error(ranged_server: Server) -> None:
    ranged_server.broken, ranged_server.how = "/folder/", "404"
    with pytest.raises(UserError, match="cannot be listed"):
        list(RemoteFilesystem(ranged_server.url, PATIENCE_S).find())


def test_a_listing_that_names_its_own_folder_and_the_one_above_ends(
    ranged_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = RemoteFilesystem(f"{ranged_server.url}/folder", PATIENCE_S)
    names, listed, real = sorted(files.find()), [], files.fs.ls

    def ls(path: str, **options: Any) -> Any:
        listed.append(path)
        assert len(listed) < 10
        return [
            *real(path, **options),
            *({"name": name, "type": "directory"} for name in (path, f"{path}/", ranged_server.url)),
        ]

    monkeypatch.setattr(files.fs, "ls", ls)
    assert sorted(files.find()) == names and len(names) == 2 * COUNT


def test_a_table_that_does_not_come_is_waited_for_once(ranged_server: Server) -> None:
    source = opened(f"{ranged_server.url}/t.parquet", PATIENCE_S)
    ranged_server.broken = "/t.parquet"
    assert source.is_remote
    with pytest.raises(AwayError):
        list(source.items())


@pytest.mark.parametrize("place", ["tars/s-{0,1}.tar", "folder"])
def test_who_may_not_read_learns_how_to_pass_credentials(ranged_server: Server, place: str) -> None:
    ranged_server.login = "Basic x"
    with pytest.raises(UserError, match="401") as refused:
        list(opened(f"{ranged_server.url}/{place}", PATIENCE_S).items())
    assert ".netrc" in str(refused.value.fix)


def test_a_server_that_does_not_answer_has_no_empty_listing(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for address, what in (("http://127.0.0.1:9/x", "listed"), ("http://127.0.0.1:9/x/{0..1}.tar", "read")):
        with pytest.raises(UserError, match=f"cannot be {what}") as refused:
            list(opened(address, PATIENCE_S).items())
        assert "does not exist" not in str(refused.value)


def test_credentials_come_from_the_driver_and_not_from_the_address(
    ranged_server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The way out that the refusal names works."""
    address = ranged_server.url.replace("127.0.0.1", "user:secret@127.0.0.1")
    for refused in (
        f"{address}/list.jsonl",
        f"{ranged_server.url}/list.jsonl?X-Amz-Signature=secret",
        f"{ranged_server.url}/list?token=secret-{{0..1}}.tar",
        "s3://key:sec/ret@bucket/x",
        "s3://key:secret@bucket/{0..1}.tar",
    ):
        with pytest.raises(UserError) as error:
            opened(refused)
        assert not re.search("sec/?ret", str(error.value))
    with pytest.raises(CacheError) as error:
        Files(address, MirrorConfig(path=str(tmp_path)))
    assert "secret" not in str(error.value)
    [fix] = re.findall(r"FSSPEC_HTTP='(.*)'", str(error.value.fix))
    ranged_server.login = "Basic " + base64.b64encode(b"user:secret").decode()
    with pytest.raises(UserError, match="401"):
        list(opened(f"{ranged_server.url}/list.jsonl").items())
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login user password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    fsspec.config.set_conf_env(result := {}, {"FSSPEC_HTTP": fix})
    monkeypatch.setitem(fsspec.config.conf, "http", result["http"])
    assert len(content(opened(f"{ranged_server.url}/list.jsonl"))) == COUNT


def test_prompts_behind_a_url_wait_for_the_server_and_refuse_credentials(
    plain_server: Server, data: Path, tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_text("a cat\n")
    (tmp_path / "my prompts.txt").write_text("a dog\n")
    (data / "lists").symlink_to(tmp_path)
    prompts = f"{plain_server.url}/lists/prompts.txt"
    plain_server.fail = 3
    assert read_prompts(prompts, 60.0) == [(1, "a cat")]
    assert read_prompts(prompts.replace("prompts.txt", "my%20prompts.txt"), 60.0) == [(1, "a dog")]
    for refused in (prompts.replace("127.0.0.1", "user:secret@127.0.0.1"), f"{prompts}?token=secret"):
        with pytest.raises(UserError, match="credentials") as error:
            read_prompts(refused, 60.0)
        assert "secret" not in str(error.value)
    with pytest.raises(UserError, match=naming(f"{plain_server.url}/gone.txt")):
        read_prompts(f"{plain_server.url}/gone.txt", 60.0)
    plain_server.fail = 10**6
    with pytest.raises(AwayError, match="503"):
        read_prompts(prompts, PATIENCE_S)
    (data / "lists").unlink()


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
    before = source.stat(Place("a.png"))
    fs.pipe_file("bucket/other/a.png", b"two")
    source = opened("s3://bucket/other")
    assert content(source)["a.png"][0] == b"two"
    assert source.stat(Place("a.png")) != before


def test_hostile_object_names_are_refused(s3: str) -> None:
    import fsspec

    fs = fsspec.filesystem("s3")
    fs.pipe_file("bucket/bad/ok.png", b"ok")
    fs.pipe_file("bucket/bad/ok.txt", b"said")
    fs.pipe_file("bucket/bad/x\\y.png", b"no")
    source = opened("s3://bucket/bad")
    result = list(source.items())
    assert [type(entry) for entry in result] == [Reject, Item]
    with pytest.raises(Unreadable, match="climbs"):
        source.read(Place("../set/t.parquet"))


def test_the_names_in_a_folder_are_those_of_its_files(s3: str) -> None:
    assert RemoteFilesystem(s3, PATIENCE_S).names("") == ["list.jsonl", "t.parquet"]


def test_a_file_of_unknown_size_cannot_be_used(ranged_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    files = RemoteFilesystem(ranged_server.url, PATIENCE_S)
    monkeypatch.setattr(files.fs, "info", lambda path: {"name": path, "type": "file", "size": None})
    with pytest.raises(Unreadable, match="how large"):
        files.stat("t.parquet")


def test_a_folder_is_no_file(s3: str) -> None:
    bucket, _, folder = s3.rpartition("/")
    with pytest.raises(Unreadable, match="is a folder"):
        RemoteFilesystem(bucket, PATIENCE_S).stat(folder)


def test_no_such_bucket_is_reported(s3: str) -> None:
    with pytest.raises(UserError, match="nowhere"):
        list(opened("s3://nowhere/set").items())


Answer = Callable[[dict[str, Any]], dict[str, Any]]
Opened = tuple[RemoteFilesystem, list[str]]


@pytest.fixture
def pages(s3: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Opened]:
    """Opens the folder of pictures with pages of 5 files; returns it with a list of the requests that it makes.
    `answers` replace what the server says to the first requests for further pages: an error, or a changed page."""
    monkeypatch.setattr(connections, "PAGE", 5)

    def opened_folder(*answers: Exception | Answer) -> Opened:
        files, requests, waiting = RemoteFilesystem(f"{s3}/folder", PATIENCE_S), [], list(answers)
        list_page, info = files.fs.call_s3, files.fs.info

        def counted_page(method: str, *options: Any, **wanted: Any) -> dict[str, Any]:
            requests.append(method)
            answer: dict[str, Any] = list_page(method, *options, **wanted)
            if wanted.get("ContinuationToken") and waiting:
                change = waiting.pop(0)
                if isinstance(change, Exception):
                    raise change
                return change(answer)
            return answer

        def counted_info(path: str) -> dict[str, Any]:
            requests.append("info")
            return dict(info(path))

        monkeypatch.setattr(files.fs, "call_s3", counted_page)
        monkeypatch.setattr(files.fs, "info", counted_info)
        return files, requests

    return opened_folder


NAMES = sorted(f"a {n}.{kind}" for n in range(COUNT) for kind in ("jpg", "txt"))
PAGES = ["list_objects_v2"] * 5


def test_s3_says_names_sizes_and_versions_page_by_page(
    pages: Callable[..., Opened], monkeypatch: pytest.MonkeyPatch
) -> None:
    files, requests = pages()
    lower_limits(monkeypatch)
    monkeypatch.setattr(connections, "PAGE", 5)
    assert list(files.find_with_sizes(scratch.Scratch())) == NAMES and requests == PAGES
    listed = files.stat_many(NAMES)
    assert listed == {name: files.stat(name) for name in NAMES} and requests == PAGES
    for name, seen in listed.items():
        written = picture(int(name[2:-4])) if name.endswith("jpg") else f"caption {name[2:-4]}"
        assert not isinstance(seen, Unreadable) and seen[0] == len(written)
    files.refresh()
    assert isinstance(files.stat_many(["none", *NAMES])["none"], Unreadable)
    assert {name: files.stat(name) for name in NAMES} == listed, "asked for each"
    assert requests == [*PAGES, *["info"] * (1 + len(NAMES))]


def test_a_page_that_does_not_come_is_asked_for_again_alone(
    pages: Callable[..., Opened],
) -> None:
    files, requests = pages(ConnectionResetError("cut"), ConnectionResetError("cut"))
    assert sorted(files.find()) == NAMES
    assert requests == [*PAGES, *PAGES[:2]]


def test_a_listing_without_its_end_is_an_error(pages: Callable[..., Opened]) -> None:
    files, _ = pages(lambda page: {key: value for key, value in page.items() if key != "NextContinuationToken"})
    with pytest.raises(UserError, match=naming("set/folder", "cannot be listed")):
        list(files.find())
    files, _ = pages(*[ConnectionResetError("cut")] * 1000)
    with pytest.raises(AwayError, match=naming("set/folder", "cannot be listed")):
        list(files.find_with_sizes(scratch.Scratch()))


def test_only_the_last_files_that_were_asked_for_are_remembered(
    pages: Callable[..., Opened], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "KNOWN", 2)
    files, requests = pages()
    for name in ("a 1.jpg", "a 2.jpg", "a 2.jpg", "a 3.jpg", "a 2.jpg", "a 1.jpg"):
        assert files.stat(name)[0] == len(picture(int(name[2])))
    assert requests == ["info"] * 4


def test_a_file_without_a_mark_of_change_counts_as_changed(
    pages: Callable[..., Opened], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "CHANGE_MARKS", ())
    files, _ = pages()
    assert list(files.find_with_sizes(scratch.Scratch()))
    assert files.stat("a 1.jpg")[0] == files.stat("a 1.jpg")[0] == len(picture(1))
    assert files.stat("a 1.jpg")[1] < files.stat("a 1.jpg")[1] < files.stat_many(["a 1.jpg"])["a 1.jpg"][1]  # type: ignore[index]


def test_times_in_a_listing_are_read_without_the_slow_parser(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def connection() -> connections.Connection:
        return connections.Connection(f"{s3}/folder", UserError, PATIENCE_S, skip_instance_cache=True)

    usual = connection()
    expected = usual.fs.info(f"{usual.root}/a 1.jpg")["LastModified"]  # a header, in another form
    slow: list[Any] = []
    monkeypatch.setattr("botocore.parsers.DEFAULT_TIMESTAMP_PARSER", slow.append)
    times = [info["LastModified"] for _, info in connection().find(usual.root)]
    assert not slow and len(times) == len(NAMES) and all(abs(when - expected).total_seconds() < 60 for when in times)


def test_the_kind_of_a_folder_in_s3_is_known_from_its_top_and_its_first_files(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "PAGE", 2)
    monkeypatch.setattr(detect, "MAX_EXAMINED", 3)
    fs = fsspec.filesystem("s3")
    for name in ("top/a/0.jpg", "top/a/1.txt", "top/b/2.jpg", "top/z.tar"):
        fs.pipe_file(f"bucket/{name}", b"x")
    for number in range(9):
        fs.pipe_file(f"bucket/late/{number}.md", b"x")
    fs.pipe_file("bucket/late/y/0.tar", b"x")
    requests: list[str] = []
    list_page = type(fs).call_s3

    def counted(self: Any, *options: Any, **wanted: Any) -> Any:
        requests.append(wanted["Prefix"])
        return list_page(self, *options, **wanted)

    monkeypatch.setattr(type(fs), "call_s3", counted)
    with pytest.raises(UserError, match=naming("several kinds", "z.tar", "a/0.jpg")):
        opened("s3://bucket/top")
    assert opened("s3://bucket/late").format == "webdataset", "no kind is known before the last file"
    requests.clear()
    monkeypatch.setattr(detect, "MAX_EXAMINED", 1)
    assert opened("s3://bucket/set/folder").format == "folder"
    assert len(requests) == 1


@pytest.mark.parametrize("place", ["disk", "s3"])
def test_what_a_folder_is_does_not_depend_on_its_place(place: str, s3: str, tmp_path: Path) -> None:
    table = io.BytesIO()
    pq.write_table(pa.table({"file_name": ["pictures/0.jpg"], "text": ["of the table"]}), table)
    files = {"pictures/0.jpg": b"x", "pictures/0.txt": b"said", "metadata.parquet": table.getvalue()}

    def put(files: dict[str, bytes]) -> str:
        for name, content in files.items():
            if place == "s3":
                fsspec.filesystem("s3").pipe_file(f"bucket/placed/{name}", content)
            else:
                (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name).write_bytes(content)
        return "s3://bucket/placed" if place == "s3" else str(tmp_path)

    source = opened(put(files))
    assert content(source) == {"metadata.parquet/pictures/0.jpg": (b"x", (("of the table", 1.0),))}
    assert source.ignored.examples == {".txt file": ["pictures/0.txt"]}
    put({"old/0.tar": b"x", "a.jpg?x=1": b"x"})
    with pytest.raises(UserError, match=naming("folder", "parquet", "old/0.tar")):
        opened(put({}))
    source = open_source(put({}), DataConfig(), None, "folder")
    assert [(type(entry), entry.key) for entry in source.items()] == [(Reject, "a.jpg?x=1"), (Item, "pictures/0.jpg")]
    assert source.ignored.counts == {".tar file": 1, ".parquet file": 1}


def test_an_option_that_s3_does_not_have_is_no_traceback(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fsspec.config.conf, "s3", {"no_such_option": 1})
    with pytest.raises(UserError, match=naming(f"{s3}/folder", "no_such_option")):
        RemoteFilesystem(f"{s3}/folder", PATIENCE_S)
