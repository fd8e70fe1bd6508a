"""Tables whose rows name pictures by URL: dead links are rejects, known links are not asked again, nothing leaks."""

from __future__ import annotations

import csv
import io
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import stages.bucket
import stages.encode
from pipeline import retrying
from pipeline.cache.arrow import ParquetFile
from pipeline.cache.cache import Cache
from pipeline.cache.connections import Connection, RequestFailed
from pipeline.config import Config
from pipeline.encoding import scan_rows
from pipeline.errors import AwayError, RejectRateError
from pipeline.sources import link_tables, links
from pipeline.sources.filesystem import LocalFilesystem
from pipeline.sources.links import DEAD, REFUSED, DeadLink, RefusedLink
from pipeline.sources.reject_kinds import Kinds
from pipeline.sources.source import Item, Place
from tests.support import source_files
from tests.support.link_server import LinkServer, serve_links
from tests.support.lowered import lower_limits
from tests.support.source_files import cut, listed

MakeConfig = Callable[..., Config]
COUNT = 6
Links = partial(links.Links, allowed="all")
opened = partial(source_files.opened, allow_links="all")


def picture(n: int) -> bytes:
    pixels = np.random.default_rng(n).integers(0, 255, (8, 8, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).resize((90, 70), Image.Resampling.BICUBIC).save(out, "PNG")
    return out.getvalue()


@pytest.fixture
def server() -> Iterator[LinkServer]:
    for one in serve_links():
        one.pictures = {f"{n}.png": picture(n) for n in range(COUNT)} | {f"/{n}.png": picture(n) for n in range(COUNT)}
        yield one


@pytest.fixture
def make_config(make_config: MakeConfig) -> MakeConfig:
    """Configurations that allow the servers of this machine, and a store."""

    def make(folder: Path, *overrides: str) -> Config:
        return make_config(folder, "data.allow_links=all", *overrides)

    return make


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "PAUSE_S", 0.02)


def write(path: Path, urls: list[str | None], column: str = "url", text: str = "text", group: int = 4) -> Path:
    captions = [f"picture\n{n}" for n in range(len(urls))]
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"id": range(len(urls)), column: urls, text: captions}), path, row_group_size=group)
        return path
    rows = [{"id": n, column: url, text: caption} for n, (url, caption) in enumerate(zip(urls, captions, strict=True))]
    with open(path, "w", encoding="utf-8-sig", newline="") as file:
        if path.suffix == ".jsonl":
            file.writelines(json.dumps(row) + "\n" for row in rows)
        else:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    return path


TABLES = pytest.mark.parametrize("table", ["web.parquet", "web.jsonl", "web.csv"])


def good(server: LinkServer) -> list[str | None]:
    return [f"{server.url}/{n}.png" for n in range(COUNT)]


def rows_of(config: Config, source: str) -> list[dict[str, Any]]:
    cache = Cache(config.cache)
    body = cache.last_scan(source)
    assert body is not None
    rows: list[dict[str, Any]] = cache.table(body["table"]).to_pylist()
    return rows


def test_each_kind_of_dead_link_is_a_reject_with_its_reason(
    server: LinkServer, make_config: MakeConfig, tmp_path: Path
) -> None:
    here = server.url.removeprefix("http://")
    dead = {
        f"{server.url}/404!0.png": "HTTP 404 Not Found",
        f"{server.url}/410!0.png": "HTTP 410 Gone",
        f"{server.url}/503!0.png": "HTTP 503 Service Unavailable",
        f"{server.url}/599!0.png": "HTTP 599",
        f"{server.url}/slow!0.png": "no picture within 1.5 s (data.link_timeout_s)",
        f"{server.url}/trickle!0.png": "no picture within 1.5 s (data.link_timeout_s)",
        f"{server.url}/loop!0.png": "more than 10 redirects",
        f"{server.url}/file!0.png": "no valid address, or redirected to one that is not of the web",
        f"{server.url}/cut!0.png": "the answer broke off",
        f"{server.url}/garbage!0.png": "ClientResponseError",
        f"{server.url}/empty": "an empty answer",
        f"{server.url}/endless": "more than 1,048,576 bytes (data.max_picture_mib)",
        "http://no.such.host.invalid/0.png": "the host is not known",
        "http://127.0.0.1:9/0.png": "no connection",
        "http://[broken/0.png": "no valid address, or redirected to one that is not of the web",
        "gopher://there/0.png": "addresses of the kind gopher:// are not fetched",
        f"http://user:wrong@{here}/login!0.png": "HTTP 401 Unauthorized",
    }
    alive = [*good(server), f"{server.url}/moved!/0.png", f"http://user:secret@{here}/login!1.png"]
    page, local = f"{server.url}/page", "../up.png"
    data = write(tmp_path / "web.parquet", [*alive, *dead, page, local, "file:///etc/hostname", None])
    config = make_config(tmp_path, "encode.max_reject_rate=0.9", "data.link_timeout_s=1.5", "data.max_picture_mib=1")
    done = stages.encode.run(config, data=str(data))
    rows = rows_of(config, "web")
    rejects = {row["item"]: row["reject"] for row in rows if row["reject"]}
    assert len(rejects) == len(dead) + 4 == done["rejects"]
    names = [f"web.parquet/{n:09d}" for n in range(len(rows))]
    for name, (url, reason) in zip(names[len(alive) :], dead.items(), strict=False):
        assert rejects[name].startswith(f"{DEAD}: {reason} ('"), url
    assert rejects[names[-4]] and not rejects[names[-4]].startswith(DEAD), "a page is no picture"
    assert [rejects[name].rpartition(": ")[2] for name in names[-3:-1]] == ["is no link, in a table of links"] * 2
    assert rejects[names[-1]] == "has no picture"
    assert {row["digest"] for row in rows if not row["reject"]} == {row["digest"] for row in rows[:COUNT]}
    assert done["images"] == COUNT, "equal pictures behind two links are encoded once"
    assert len(Kinds.of(rejects.items()).counts) < len(rejects), "reasons are grouped"


@TABLES
def test_a_known_link_is_not_asked_again(
    server: LinkServer, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    lower_limits(monkeypatch)
    urls = [*good(server), f"{server.url}/404!1.png"]
    data, config = write(tmp_path / table, urls), make_config(tmp_path)

    def run(config: Config = config, **options: Any) -> tuple[dict[str, Any], int]:
        before = server.asked.total()
        return stages.encode.run(config, data=str(data), **options), server.asked.total() - before

    done, asked = run()
    assert (done["images"], done["rejects"]) == (COUNT, 1)
    rows = rows_of(config, "web")
    assert [row["size"] for row in rows[:COUNT]] == [len(picture(n)) for n in range(COUNT)]
    done, asked = run()
    assert (done["images"], done["rejects"], asked) == (0, 1, 0)
    assert rows_of(config, "web") == rows
    again = config.model_copy(update={"data": config.data.model_copy(update={"retry_links": True})})
    assert run(again)[1] == 1, "the dead link alone"
    write(data, [*urls, f"{server.url}/2.png"])
    done, asked = run()
    assert (done["items"], done["images"], done["captions"], asked) == (COUNT + 2, 0, 1, 1)
    write(data, [*urls, f"{server.url}/3.png"])
    assert run()[1] == 1, "another link in a known row"
    # links that die, or lead to a page, keep the pictures that they gave, even where each is fetched again
    server.gone = {"/0.png", "/1.png"}
    server.pictures["/2.png"] = b"<html>"
    server.pictures["/4.png"] = server.pictures["/5.png"]
    done, asked = run(rehash=True)
    assert asked == COUNT + 2
    assert (done["images"], done["rejects"], done["gone"]) == (0, 1, 0)
    later = rows_of(config, "web")
    assert [row["digest"] for row in later[:4]] == [row["digest"] for row in rows[:4]]
    assert later[4]["digest"] == later[5]["digest"] == rows[5]["digest"], "a changed picture"
    stages.bucket.run(config)
    assert len(Cache(config.cache).open_snapshot()) == COUNT + 1


def test_a_picture_that_changed_since_the_scan_is_a_reject_and_no_record(
    server: LinkServer, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, config = write(tmp_path / "web.parquet", good(server)), make_config(tmp_path)
    real = stages.encode.planning.plan_images

    def change(*args: Any) -> Any:
        server.pictures["/1.png"] = picture(99)
        server.gone = {"/2.png"}
        return real(*args)

    monkeypatch.setattr(stages.encode.planning, "plan_images", change)
    done = stages.encode.run(config, data=str(data))
    assert (done["images"], done["rejects"]) == (COUNT - 2, 2)
    report = (Path(config.cache) / "reports/rejects-web.csv").read_text()
    assert "changed since it was scanned" in report and f"{DEAD}: HTTP 404 Not Found" in report


@TABLES
def test_credentials_stay_in_the_table(
    server: LinkServer, make_config: MakeConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str], table: str
) -> None:
    here = server.url.removeprefix("http://")
    urls = [f"http://user:secret@{here}/login!{n}.png?signature=secret{n}" for n in range(COUNT)]
    dead = [f"http://user:secret@{here}/404!x?signature=secret", "http://user:secret@[x/?signature=secret"]
    odd = ["ftp://user:secret@there/x?signature=secret", "file://user:secret@there/x"]
    data = write(tmp_path / table, [*urls, *dead, *odd])
    config = make_config(tmp_path)
    done = stages.encode.run(config, data=str(data))
    assert (done["images"], done["rejects"]) == (COUNT, 4)
    assert server.queries >= {f"signature=secret{n}" for n in range(COUNT)}, "a query reaches the server"
    stages.bucket.run(config)
    cache = Cache(config.cache)
    tables = [str(cache.table(path.stem).to_pylist()) for path in (cache.files.root / "tables").glob("*.*")]
    files = [path for path in cache.files.root.rglob("*") if path.is_file()]
    captured = capfd.readouterr()
    for text in (*tables, *captured, *(path.read_bytes().decode("latin-1") for path in files)):
        assert "secret" not in text


def test_a_dead_host_ends_nothing_and_a_dead_network_does(
    server: LinkServer, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "SILENT", 3)
    monkeypatch.setattr(links, "SILENT_FROM_START", 5)
    nobody: list[str | None] = [f"http://127.0.0.1:9/{n}" for n in range(4)]
    data = write(tmp_path / "web.parquet", [*nobody, *good(server), *nobody, *nobody, f"{server.url}/moved!/5.png"])
    config = make_config(tmp_path, "encode.max_reject_rate=0.9", "patience_s=0.2")
    monkeypatch.setattr(links, "REQUESTS", 1)
    done = stages.encode.run(config, data=str(data))
    assert (done["images"], done["rejects"]) == (COUNT, 3 * len(nobody))
    server.away = True
    fetch = Links(patience_s=0.2)
    fetch.witness = f"{server.url}/0.png"
    for n in range(2):
        with pytest.raises(DeadLink, match=DEAD):
            fetch.read(f"{server.url}/{n}.png")
    with pytest.raises(AwayError, match="no link"):
        fetch.read(f"{server.url}/2.png")
    fetch = Links(patience_s=60)
    fetch.witness = f"{server.url}/0.png"
    back = threading.Timer(0.5, setattr, (server, "away", False))
    back.start()
    for n in range(3):  # the third waits until the network is back
        with pytest.raises(DeadLink, match=DEAD):
            fetch.read(f"{server.url}/{n}.png")
    back.join()
    assert fetch.read(f"{server.url}/3.png") == picture(3)


def test_where_nothing_answers_the_source_is_refused(
    server: LinkServer, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.away = True
    data, config = write(tmp_path / "web.parquet", good(server)), make_config(tmp_path)
    with pytest.raises(RejectRateError):
        stages.encode.run(config, data=str(data))
    monkeypatch.setattr(links, "SILENT_FROM_START", 3)
    with pytest.raises(AwayError):
        stages.encode.run(config, data=str(data), rehash=True)


@TABLES
def test_a_killed_scan_goes_on_where_it_was(
    server: LinkServer, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    """Dead links among the fetched ones do not make them be fetched again."""
    monkeypatch.setattr(scan_rows, "RUN", 2)
    urls = [*good(server), *(f"{server.url}/404!{n}.png" for n in range(COUNT))]
    data = write(tmp_path / table, [url for pair in zip(urls[:COUNT], urls[COUNT:], strict=True) for url in pair])
    config = make_config(tmp_path)
    real, fetched = links.Links.read, list[str]()

    def killed(self: links.Links, url: str) -> bytes:
        if len(fetched) >= 2 * 3 and url.endswith("!3.png"):
            raise KeyboardInterrupt
        fetched.append(url)
        return real(self, url)

    monkeypatch.setattr(links.Links, "read", killed)
    with pytest.raises(KeyboardInterrupt):
        stages.encode.run(config, data=str(data))
    monkeypatch.setattr(links.Links, "read", real)
    server.asked.clear()
    done = stages.encode.run(config, data=str(data))
    assert (done["images"], done["rejects"]) == (COUNT, COUNT)
    assert not [n for n in range(3) if server.asked[f"/404!{n}.png"]]


@pytest.mark.parametrize(("column", "text"), [("url", "TEXT"), ("URL", "caption"), ("image_url", "alt_text")])
@TABLES
def test_the_columns_of_published_tables_are_found(tmp_path: Path, column: str, text: str, table: str) -> None:
    items, rejects = listed(opened(write(tmp_path / table, [None, "", "https://x/y.png"], column, text)))
    assert [item.captions for item in items.values()] == [(("picture\n2", 1.0),)]
    assert [item.meta for item in items.values()] == [{"id": "2" if table.endswith("csv") else 2}]
    assert len(rejects) == 2


@pytest.mark.parametrize("table", ["jsonl", "csv"])
def test_a_table_without_rows_among_others_is_reported(tmp_path: Path, table: str) -> None:
    write(tmp_path / f"a.{table}", ["https://x/y.png"])
    (tmp_path / f"b.{table}").write_text("")
    items, rejects = listed(opened(tmp_path / f"*.{table}"))
    assert (len(items), rejects) == (1, {f"b.{table}": "holds no row"})


@pytest.mark.parametrize("table", ["jsonl", "csv"])
def test_a_folder_with_a_table_alone_is_that_table(tmp_path: Path, table: str) -> None:
    write(tmp_path / f"web.{table}", ["https://x/y.png"])
    (tmp_path / "notes.md").write_text("where they come from")
    [item] = listed(opened(tmp_path))[0].values()
    assert item.part == f"web.{table}" and item.where


def test_the_first_name_decides_what_a_table_holds(tmp_path: Path) -> None:
    items, rejects = listed(opened(write(tmp_path / "t.parquet", ["a.png", "https://u:p@x/y?z"])))
    assert (set(items), set(rejects)) == ({"t.parquet/000000000"}, {"t.parquet/000000001"})
    assert rejects["t.parquet/000000001"] == "names 'https://x/...': is a URL, not a name within the data"
    _, rejects = listed(opened(write(tmp_path / "t.parquet", ["file:///etc/passwd", "/etc/passwd"])))
    assert len(rejects) == 2


@TABLES
def test_a_link_that_changed_in_the_table_is_not_read_as_the_scanned_one(
    server: LinkServer, tmp_path: Path, table: str
) -> None:
    data = write(tmp_path / table, good(server))
    items = [item for item in opened(data).items() if isinstance(item, Item)]
    later = opened(data)
    assert [later.read(item.place) for item in items] == [picture(n) for n in range(COUNT)]
    write(data, [*reversed(good(server)), None])
    later = opened(data)
    for item in items:
        with pytest.raises(OSError, match="another link"):
            later.read(item.place)


def test_each_link_of_many_listings_is_found_and_few_listings_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_tables, "MAX_READ", 2)
    lower_limits(monkeypatch)
    names = [f"https://x/{n}.png" for n in range(300)]
    write(tmp_path / "a.csv", [names[0], "", None, "no link", *names[1:]])
    for n in range(3):
        write(tmp_path / f"b{n}.jsonl", [None, *names])
    monkeypatch.setattr(links.Links, "read", lambda self, url: url)
    real, opens = LocalFilesystem.open, list[str]()

    def counted(self: LocalFilesystem, name: str, spool: bool = False) -> Any:
        opens.append(name)
        return real(self, name, spool)

    monkeypatch.setattr(LocalFilesystem, "open", counted)
    for pattern, count, again in (("*.csv", 1, 0), ("*.jsonl", 3, 1)):
        source = opened(tmp_path / pattern)
        places = [item.place for item in source.items() if isinstance(item, Item)]
        opens.clear()
        assert [source.read(place) for place in places] == names * count
        assert len(opens) == count, "each is read once"
        assert [source.read(places[at]) for at in (-1, 0)] == [names[-1], names[0]]
        assert len(opens) == count + again, "the first of three was forgotten"
        with pytest.raises(OSError, match="another link"):
            source.read(Place(places[0].item, places[0].part, f"400000@{'0' * 16}"))


def test_a_row_group_that_is_cut_into_ranges_is_read_once(
    server: LinkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, real = list[int](), ParquetFile.read_row_group

    def counted(file: ParquetFile, group: int, **options: Any) -> pa.Table:
        if options["columns"] == ["id", "text"]:
            reads.append(group)
        return real(file, group, **options)

    monkeypatch.setattr(ParquetFile, "read_row_group", counted)
    source = opened(write(tmp_path / "t.parquet", good(server) + good(server), group=COUNT))
    [part] = source.parts()
    ranges = cut(source, part, 2)
    assert len(ranges) > 4
    assert len([item for items in ranges for item in items.items() if isinstance(item, Item)]) == 2 * COUNT
    assert reads == [0, 1]


def test_many_links_are_fetched_at_once(server: LinkServer, make_config: MakeConfig, tmp_path: Path) -> None:
    data = write(tmp_path / "t.parquet", [f"{server.url}/slow!{n}" for n in range(40)], group=40)
    config = make_config(tmp_path, "data.link_timeout_s=9", "encode.workers=1")
    with pytest.raises(RejectRateError):
        stages.encode.run(config, data=str(data))
    assert server.asked.total() == 40
    assert server.at_once > 16


def test_links_into_an_object_store(s3_bucket: str, make_config: MakeConfig, tmp_path: Path) -> None:
    store = fsspec.filesystem("s3")
    for n in range(COUNT):
        store.pipe_file(f"{s3_bucket}/links/{n}.png", picture(n))
    urls = [f"{s3_bucket}/links/{n}.png" for n in range(COUNT)]
    data = write(tmp_path / "t.parquet", [*urls, f"{s3_bucket}/links/none.png", "s3://no-such-bucket/0.png"])
    config = make_config(tmp_path)
    done = stages.encode.run(config, data=str(data))
    assert (done["images"], done["rejects"]) == (COUNT, 2)
    reasons = [row["reject"] for row in rows_of(config, "t") if row["reject"]]
    assert reasons[0] == f"{DEAD}: does not exist ('bucket')"
    assert reasons[1].startswith(DEAD)
    config = make_config(tmp_path / "small", "data.max_picture_mib=1")
    store.pipe_file(f"{s3_bucket}/links/5.png", bytes(2 << 20))
    assert stages.encode.run(config, data=str(data))["rejects"] == 3
    assert rows_of(config, "t")[5]["reject"].startswith(f"{DEAD}: more than 1,048,576 bytes")
    url, size = f"{s3_bucket}/links/0.png", len(picture(0))
    assert Links(size).read(url) == picture(0)
    with pytest.raises(DeadLink, match=f"more than {size - 1:,} bytes"):
        Links(size - 1).read(url)


def test_a_store_that_refuses_one_object_is_no_silence(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def request(self: Connection, *args: Any) -> bytes:
        raise RequestFailed("what") from PermissionError("of it")

    monkeypatch.setattr(Connection, "request", request)
    fetch = Links()
    with pytest.raises(DeadLink, match=f"{DEAD}: PermissionError"):
        fetch.read(f"{s3_bucket}/0.png")
    assert fetch.witness is not None


def test_a_url_may_hold_another(server: LinkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Links().read(f"{server.url}/0.png?from=https://museum/0") == picture(0)
    monkeypatch.setattr(links, "REDIRECTS", 3)
    with pytest.raises(DeadLink, match="more than 3 redirects"):
        Links().read(f"{server.url}/loop!0.png")
    assert server.asked["/loop!0.png"] == 3


def test_a_picture_of_just_the_limit_is_fetched(server: LinkServer) -> None:
    url, *_ = good(server)
    data = Links().read(url)
    assert Links(len(data)).read(url) == data
    with pytest.raises(DeadLink, match="more than"):
        Links(len(data) - 1).read(url)


def test_what_counts_as_an_answer(server: LinkServer) -> None:
    """An answer ends the count of silent links and makes its link the witness; what was not asked does neither."""
    answers = dict.fromkeys(["404!x", "410!x", "599!x", "loop!x", "cut!0.png", "garbage!x", "empty", "0.png"], 30.0)
    answers["trickle!0.png"] = 3.0
    silent = {"http://127.0.0.1:9/0.png": 30.0, "http://no.such.host.invalid/0.png": 30.0}
    silent[f"{server.url}/slow!0.png"] = 0.5
    fetch = Links()

    def read(url: str, timeout_s: float = 30.0) -> tuple[int, str | None]:
        fetch.timeout_s = timeout_s
        with suppress(DeadLink):
            fetch.read(url)
        return fetch.silent, fetch.witness

    for number, (url, timeout_s) in enumerate(silent.items(), 1):
        assert read(url, timeout_s) == (number, None), url
    for url in ("gopher://there/0.png", "http://[broken/0.png", f"{server.url}/file!0.png"):
        assert read(url) == (len(silent), None), url
    for path, timeout_s in answers.items():
        fetch.silent = 1
        assert read(f"{server.url}/{path}", timeout_s) == (0, f"{server.url}/{path}")
    server.away = True
    assert read(f"{server.url}/1.png") == (1, fetch.witness)


def test_what_counts_as_an_answer_of_an_object_store(s3_bucket: str, tmp_path: Path) -> None:
    fetch = Links()
    for url, silent in (
        ("s3://no-such-bucket/0.png", 1),
        ("s3://no-such-bucket/1.png", 2),
        (f"{s3_bucket}/none.png", 0),
    ):
        with pytest.raises(DeadLink, match=DEAD):
            fetch.read(url)
        assert (fetch.silent, fetch.witness) == (silent, None if silent else url), url


def test_the_session_has_no_cookies_and_obeys_fsspecs_configuration(
    server: LinkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fsspec.config.conf, "http", {"client_kwargs": {"headers": {"User-Agent": "a museum"}}})
    links.opened.cache_clear()
    try:
        for _ in range(2):
            Links().read(server.url.replace("127.0.0.1", "localhost") + "/0.png")
        assert (server.agents, server.cookies) == ({"a museum"}, set())
        daemons = {thread.name: thread.daemon for thread in threading.enumerate()}
        assert daemons["links"], "the interpreter does not wait for it"
    finally:
        links.opened.cache_clear()


LOCAL = ("127.0.0.1", "localhost", "2130706433", "127.1", "0.0.0.0", "[::ffff:127.0.0.1]", "[::1]", "[64:ff9b::7f00:1]")


@pytest.mark.parametrize("name", LOCAL)
def test_no_link_reaches_this_machine_unless_it_is_allowed(server: LinkServer, name: str) -> None:
    port = server.url.rpartition(":")[2]
    with pytest.raises(DeadLink):
        links.Links().read(f"http://{name}:{port}/0.png")
    assert server.asked.total() == 0
    assert Links().read(f"{server.url}/0.png") == picture(0)
    with pytest.raises(RefusedLink, match=REFUSED):
        links.Links().read(f"{server.url}/0.png")
    assert server.asked.total() == 1, "an open connection is not used either"


@pytest.mark.parametrize(
    "address",
    [
        *(
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "0.0.0.0",
            "224.0.0.1",
            "240.0.0.1",
        ),
        *(
            "::1",
            "::",
            "fe80::1%eth0",
            "fd00::1",
            "fec0::1",
            "ff02::1",
            "::127.0.0.1",
            "::ffff:10.0.0.1",
            "2002:7f00:1::",
        ),
        *("64:ff9b::a9fe:a9fe", "2001:db8::1", "127.1", "2130706433"),
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not links.is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_addresses(address: str) -> None:
    assert links.is_public(address)


def test_the_address_that_is_connected_is_checked(server: LinkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name may lead elsewhere when it is resolved again, and a server of the web to one of this network."""
    port = int(server.url.rpartition(":")[2])
    answers = iter(["8.8.8.8", *["127.0.0.1"] * 9])
    real, seen = socket.getaddrinfo, list[str]()

    def rebinding(host: Any, *args: Any, **options: Any) -> Any:
        return real(next(answers) if host == "museum.example" else host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    assert socket.getaddrinfo("museum.example", port)[0][4][0] == "8.8.8.8", "whoever asks first"
    with pytest.raises(RefusedLink):
        links.Links().read(f"http://museum.example:{port}/0.png")
    monkeypatch.setattr(links, "is_public", lambda address: not seen.append(address) and address == "127.0.0.1")
    with pytest.raises(RefusedLink):
        links.Links().read(f"{server.url}/moved!http://127.0.0.2:{port}/0.png")
    assert seen == ["127.0.0.1", "127.0.0.2"] and server.asked.total() == 1


@TABLES
def test_refused_links_are_rejects_that_name_the_option_and_are_fetched_once_it_is_set(
    server: LinkServer, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    def no_store(*args: Any, **options: Any) -> None:
        raise AssertionError("a store was asked")

    monkeypatch.setattr(links, "Connection", no_store)
    data = write(tmp_path / table, [*good(server), "s3://bucket/0.png", "hf://datasets/a/b/0.png"])
    with pytest.raises(RejectRateError, match=r"data\.allow_links=private"):
        stages.encode.run(make_config(tmp_path, "data.allow_links=none"), data=str(data))
    assert server.asked.total() == 0
    done = stages.encode.run(make_config(tmp_path, "data.allow_links=private"), data=str(data))
    assert (done["images"], done["rejects"]) == (COUNT, 2)
    reasons = [row["reject"] for row in rows_of(make_config(tmp_path), "web") if row["reject"]]
    assert all(reason.startswith(REFUSED) and "data.allow_links=all" in reason for reason in reasons)
