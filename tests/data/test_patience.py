"""A store that is away: waited for, named, given up in time; what no waiting will mend fails at once."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

from sana_pipe.base import retrying
from sana_pipe.base.errors import AwayError, CacheError, ResourceError
from sana_pipe.data.cache import layout
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.config import MirrorConfig
from sana_pipe.data.cache.files import Files
from sana_pipe.data.cache.shard import RecordError, ShardReader, read_head, read_table
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.signals.text import TextEncoding
from sana_pipe.data.work.stop import Stop, Stopped
from tests.support import tiny_cache
from tests.support.consumed import loader, sequence


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No store is known yet, and pauses are short."""
    monkeypatch.setattr(retrying, "_states", {})
    monkeypatch.setattr(retrying, "PAUSE_S", 0.05)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(retrying, "log", lines.append)
    monkeypatch.setattr(retrying, "NOTICE_S", 0.3)
    return lines


class Line:
    """What lies between a client and a server: it can be cut, and mended at the same address; or swallow all."""

    def __init__(self, to: tuple[str, int]):
        self.to = to
        self.port = 0
        self.listener: socket.socket | None = None
        self.silent = False
        self.open: list[socket.socket] = []
        self.mend()

    def mend(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self.listener,), daemon=True).start()

    def cut(self) -> None:
        if self.listener is not None:
            self.listener.shutdown(socket.SHUT_RDWR)
            self.listener.close()
            self.listener = None
        for end in self.open:
            end.close()
        self.open.clear()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near = listener.accept()[0]
                far = socket.create_connection(self.to)
            except OSError:
                return
            self.open += [near, far]
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(1 << 16):
                if not self.silent:
                    other.sendall(data)
        except OSError:
            pass
        finally:
            other.close()


@pytest.fixture
def line(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    host, _, port = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://").partition(":")
    made = Line((host, int(port)))
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{made.port}")
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    yield made
    made.cut()
    s3fs.S3FileSystem.clear_instance_cache()


def files_of(s3_bucket: str, tmp_path: Path, patience_s: float) -> Files:
    return Files(f"{s3_bucket}/{uuid4().hex}", MirrorConfig(path=str(tmp_path / "mirror")), patience_s)


def test_a_store_that_comes_back_in_time_is_waited_for_and_named(
    s3_bucket: str, line: Line, tmp_path: Path, said: list[str]
) -> None:
    files = files_of(s3_bucket, tmp_path, 30)
    files.put("a", b"1")
    said.clear()
    line.cut()
    back = threading.Timer(1.0, line.mend)
    back.start()
    began = time.monotonic()
    assert files.read("a") == b"1"
    assert 0.9 < time.monotonic() - began < 20
    waiting, answered = said
    assert "s3://bucket" in waiting and "at most 30 s (patience_s)" in waiting and "answered after" in answered


def test_a_silent_store_is_named_when_its_first_request_ends(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    monkeypatch.setattr(retrying, "NOTICE_S", 0.2)
    monkeypatch.setattr(retrying, "PAUSE_S", 0.01)
    silences = iter([0.3, 0.0])

    def ask() -> None:
        if (seconds := next(silences)) > 0:
            time.sleep(seconds)
            raise TimeoutError

    retrying.retry(ask, "s3://silent", 60)
    waiting, answered = said
    assert "waiting for s3://silent" in waiting and "s3://silent answered after" in answered


@pytest.mark.parametrize("silent", [True, False])
def test_a_store_that_stays_away_is_given_up_in_time(
    s3_bucket: str, line: Line, tmp_path: Path, silent: bool, said: list[str]
) -> None:
    """The drivers' tries within tries do not add to it."""
    files = files_of(s3_bucket, tmp_path, 2.0)
    files.put("a", b"1")
    said.clear()
    line.silent = True
    if not silent:
        line.cut()
    began = time.monotonic()
    with pytest.raises(AwayError) as caught:
        files.read("a")
    assert 1.5 < time.monotonic() - began < 10, "patience, and at most one attempt more"
    assert caught.value.exit_code == 75 and "patience_s" in (caught.value.fix or "")
    assert silent or (len(said) == 1 and "at most 2 s" in said[0])
    assert not files.store.local.exists() or not list(files.store.local.glob("tmp/*"))


@pytest.mark.parametrize(
    ("endpoint", "without", "fix"),
    [
        ("http://no.such.host.invalid", (), "address"),
        ("https://{line}", (), "https or http"),
        (None, ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "AWS_ACCESS_KEY_ID"),
        ("http://127.0.0.1:9", (), "address"),
    ],
    ids=["host", "tls", "credentials", "port"],
)
def test_a_wrong_address_and_missing_credentials_fail_at_once(
    s3_bucket: str,
    line: Line,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    endpoint: str | None,
    without: tuple[str, ...],
    fix: str,
) -> None:
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    port = endpoint is not None and endpoint.endswith(":9")
    if not port:  # a server may come to be there; the others not
        monkeypatch.setattr(retrying, "FIRST_S", 300.0)
    if endpoint is not None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint.format(line=f"127.0.0.1:{line.port}"))
    for name in without:
        monkeypatch.delenv(name)
    began = time.monotonic()
    with pytest.raises(CacheError) as caught:
        Cache(s3_bucket, mirror=MirrorConfig(path=str(tmp_path / "mirror")), patience_s=300.0)
    assert time.monotonic() - began < 15
    assert fix in (caught.value.fix or "") and isinstance(caught.value, AwayError) == port


@pytest.mark.parametrize(
    ("code", "status", "what", "fix"),
    [
        ("AccessDenied", 403, "may not be read", "AWS_ACCESS_KEY_ID"),
        ("400", 400, "cannot be read", "AWS_DEFAULT_REGION"),  # what S3 says of a HEAD with expired credentials
        ("", 404, "cannot be read", "AWS_ENDPOINT_URL"),  # a web server
    ],
)
def test_a_refusal_is_no_missing_object_and_says_what_to_check(
    s3_bucket: str,
    line: Line,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    status: int,
    what: str,
    fix: str,
) -> None:
    import s3fs
    from botocore.exceptions import ClientError
    from s3fs.errors import translate_boto_error

    def forbidden(self: object, method: str, *args: object, **options: object) -> object:
        raise translate_boto_error(
            ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, method)
        )

    files = files_of(s3_bucket, tmp_path, 300)
    monkeypatch.setattr(s3fs.S3FileSystem, "call_s3", forbidden)
    with pytest.raises(CacheError, match=what) as refused:
        files.exists("a")
    assert fix in str(refused.value.fix)


class Refused(Exception):
    """An answer with a status, and a code as S3 gives it."""

    def __init__(self, status: int, code: str = ""):
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        *((Refused(status), True) for status in (408, 409, 425, 429, 500, 503)),
        *((Refused(status), False) for status in (400, 403, 404, 410, 501)),
        *((Refused(400, code), True) for code in ("RequestTimeout", "BadDigest", "IncompleteBody")),
        (Refused(400, "ExpiredToken"), False),
        (socket.gaierror(socket.EAI_AGAIN, "try again"), True),
        (socket.gaierror(socket.EAI_NONAME, "no such host"), False),
    ],
    ids=lambda value: str(getattr(value, "response", value)),
)
def test_what_may_pass_is_waited_for_and_nothing_else(error: Exception, passes: bool) -> None:
    answers: list[Any] = [error, "here"]

    def ask() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    if passes:
        assert retrying.retry(ask, "s3://x", 10) == "here"
    else:
        with pytest.raises((Refused, PermissionError, retrying.Refused)):
            retrying.retry(ask, "s3://x", 10)
        assert answers == ["here"]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_limit_of_this_machine_is_not_waited_for(number: int) -> None:
    asked: list[int] = []

    def ask() -> None:
        asked.append(number)
        raise RuntimeError("the driver failed") from OSError(number, os.strerror(number))

    with pytest.raises(OSError, match=os.strerror(number)):
        retrying.retry(ask, "s3://x", 10)
    assert len(asked) == 1


def test_who_is_known_to_exist_gets_the_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that refuses is there, and so is the file system of a file that could be opened."""
    monkeypatch.setattr(retrying, "FIRST_S", 0.01)

    def answers(error: Exception) -> Callable[[], str]:
        left: list[Exception | str] = [error] * 4 + ["here"]

        def ask() -> str:
            answer = left.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return ask

    assert retrying.retry(answers(Refused(503)), "s3://x", 60) == "here"
    assert retrying.when_reachable(answers(OSError(errno.ESTALE, "stale")), "/mnt", 60) == "here"
    with pytest.raises(retrying.NoAnswer):
        retrying.retry(answers(ConnectionError("away")), "s3://y", 60)


def test_a_store_that_refuses_to_be_tried_is_asked_once(
    s3_bucket: str, line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import s3fs
    from botocore.exceptions import ClientError

    asked: list[str] = []

    async def refused(self: object, method: str, *args: object, **options: object) -> object:
        asked.append(method)
        raise ClientError({"Error": {"Code": "InvalidAccessKeyId"}, "ResponseMetadata": {}}, method)

    files = files_of(s3_bucket, tmp_path, 300)
    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", refused)
    with pytest.raises(CacheError, match="cannot be written"):
        files.probe()
    assert asked == ["put_object"]


def test_a_network_file_system_that_is_away_is_no_damaged_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tiny_cache.build(tmp_path / "cache")
    expected = sequence(loader(cache, stop_step=3))
    real, gone = os.preadv, [errno.ESTALE]

    def preadv(descriptor: int, views: Any, offset: int) -> int:
        if gone and os.readlink(f"/proc/self/fd/{descriptor}").endswith(".tar"):
            raise OSError(gone[0], os.strerror(gone[0]))
        return real(descriptor, views, offset)

    batches = loader(cache, stop_step=3, quarantine=tmp_path / "q.jsonl")
    monkeypatch.setattr(os, "preadv", preadv)
    back = threading.Timer(0.5, gone.clear)
    back.start()
    assert sequence(batches) == expected and not (tmp_path / "q.jsonl").read_text()
    gone.append(errno.ENOTCONN)
    cache.files.patience_s = 0.3
    sample = cache.open_snapshot().sample(0)
    place = sample.pictures["latent"]
    reader = ShardReader(cache.files, cache.open_snapshot().encoding(LatentEncoding).name)
    with pytest.raises(AwayError, match="not connected"):
        reader.stored(
            place.shard,
            place.offset,
            place.key,
            place.checksum,
            16,
        )


def test_a_handle_that_stays_stale_when_the_disk_is_back_is_not_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tiny_cache.build(tmp_path / "cache")
    snapshot = cache.open_snapshot()
    sample, encoding = snapshot.sample(0), snapshot.encoding(LatentEncoding)
    place = sample.pictures["latent"]
    bucket = snapshot.buckets[sample.bucket]
    length = 2 * encoding.channels * (bucket.height // encoding.compression) * (bucket.width // encoding.compression)
    real, tries, cache.files.patience_s = os.preadv, [0], 3.0
    reader = ShardReader(cache.files, encoding.name)
    expected = reader.stored(
        place.shard,
        place.offset,
        place.key,
        place.checksum,
        length,
    )
    dead = reader._handle(place.shard).descriptor

    def preadv(descriptor: int, views: Any, offset: int) -> int:
        if descriptor == dead or tries[0] < 3:
            tries[0] += 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(descriptor, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    held = reader._handle(place.shard)  # its number is given to no other file
    assert (
        reader.stored(
            place.shard,
            place.offset,
            place.key,
            place.checksum,
            length,
        )
        == expected
    )
    assert tries[0] > 1 and held.descriptor == dead


def test_a_shard_that_was_replaced_while_it_was_open_is_opened_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tiny_cache.build(tmp_path / "cache")
    snapshot = cache.open_snapshot()
    first, encoding = snapshot.sample(0), snapshot.encoding(LatentEncoding)
    place = first.pictures["latent"]
    name, length = place.shard, 2 * np.empty(snapshot.shape("latent", first.bucket)).size
    beside = next(
        s
        for s in map(snapshot.sample, range(1, len(snapshot)))
        if (s.pictures["latent"].shard, s.bucket) == (name, first.bucket)
    )
    path = cache.files.path(layout.Paths.shard(encoding.name, name))
    whole, reader = path.read_bytes(), ShardReader(cache.files, encoding.name)
    path.write_bytes(bytes(len(whole)))
    with pytest.raises(RecordError):
        reader.stored(name, place.offset, place.key, place.checksum, length)
    path.with_suffix(".new").write_bytes(whole)
    path.with_suffix(".new").replace(path)
    opened, real = [], cache.files.open
    monkeypatch.setattr(cache.files, "open", lambda *args, **how: (opened.append(args), real(*args, **how))[1])
    for place in (first.pictures["latent"], beside.pictures["latent"]):
        reader.stored(name, place.offset, place.key, place.checksum, length)
    assert len(opened) == 1
    text, caption = cache.open_snapshot().reader("text"), first.captions[0]
    table = read_table(cache.files, layout.Paths.shard(snapshot.encoding(TextEncoding).name, caption.shard)).to_pylist()
    row = next(row for row in table if row["key"] == caption.key)
    opened.clear()
    for _ in range(2):
        text.caption(caption.shard, row["caption_offset"], row["caption_length"], row["key"], row["caption_checksum"])
    assert len(opened) == 1, "an intact shard is not opened for each caption"


@pytest.mark.parametrize("storage", ["bf16", "bf16-zstd"])
def test_a_machine_without_memory_puts_no_record_into_quarantine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str
) -> None:
    cache = tiny_cache.build(tmp_path / "cache", storage=storage)
    real = os.preadv

    def preadv(descriptor: int, views: Any, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".tar"):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return real(descriptor, views, offset)

    batches = loader(cache, stop_step=3, quarantine=tmp_path / "q.jsonl")
    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(ResourceError):
        sequence(batches)
    assert not (tmp_path / "q.jsonl").read_text()


@pytest.mark.parametrize("call", ["preadv", "dup"])
def test_whole_files_on_a_disk_that_is_away_are_waited_for(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tiny_cache.build(tmp_path / "cache")
    name = next(entry.name for entry in cache.files.walk("shards"))
    real, gone = getattr(os, call), list[int]()

    def away(*args: Any) -> Any:
        if gone:
            raise OSError(gone.pop(), "away")
        return real(*args)

    monkeypatch.setattr(os, call, away)
    readers: dict[str, list[Callable[[str], object]]] = {
        "preadv": [cache.files.digest, partial(read_head, cache.files)],
        "dup": [partial(read_table, cache.files)],
    }
    for look in readers[call]:
        expected = look(name)
        gone.append(errno.ESTALE)
        assert look(name) == expected and not gone


def test_listings_and_looks_at_a_disk_that_is_away_wait_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files(tmp_path, patience_s=30)
    (tmp_path / "a").write_bytes(b"1")
    gone: list[int] = []

    def away(real: Any) -> Any:
        def ask(*args: Any, **kwargs: Any) -> Any:
            if gone:
                raise OSError(gone.pop(), "away")
            return real(*args, **kwargs)

        return ask

    for name in ("stat", "scandir"):
        monkeypatch.setattr(os, name, away(getattr(os, name)))
    for look in (lambda: files.has_file("a"), lambda: files.names(""), lambda: files.sizes(["a"])):
        expected = look()
        gone.append(errno.ESTALE)
        assert look() == expected and not gone
    files.store.patience_s = 0
    gone += [errno.EIO] * 3
    with pytest.raises(CacheError):
        files.has_file("a")


def test_a_signal_ends_the_waiting(s3_bucket: str, line: Line, tmp_path: Path) -> None:
    files = files_of(s3_bucket, tmp_path, 60)
    files.put("a", b"1")
    line.cut()
    stop = Stop(0.0)
    began = time.monotonic()
    with stop.signals(), stop.polite(), pytest.raises(Stopped):
        threading.Timer(0.3, lambda: stop.note(15, None)).start()
        files.read("a")
    assert time.monotonic() - began < 10
