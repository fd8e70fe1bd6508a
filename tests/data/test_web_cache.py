"""A cache behind a plain web server: read like any other, never written."""

from __future__ import annotations

import functools
import http.server
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import sana_pipe.stages.status
import sana_pipe.stages.verify
from sana_pipe.base.errors import AwayError, CacheError, IntegrityError
from sana_pipe.config import Config, load
from sana_pipe.data.cache import object_store
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.config import MirrorConfig
from sana_pipe.data.cache.object_store import ObjectStore
from tests.support import tiny_cache
from tests.support.consumed import loader, sequence
from tests.support.damage import flip
from tests.support.messages import naming
from tests.support.packed import pack

pytest.importorskip("aiohttp")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Cache, str]]:
    """A packed cache on a disk, and the URL of it. The server knows no ranges."""
    cache = tiny_cache.build(tmp_path / "cache")
    pack(cache)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield cache, f"http://127.0.0.1:{server.server_port}/cache"
    server.shutdown()
    server.server_close()


def opened(url: str, tmp_path: Path) -> Cache:
    return Cache(url, mirror=MirrorConfig(path=str(tmp_path / "mirror")))


def configured(url: str, tmp_path: Path) -> Config:
    return load("tiny", [f"cache={url}", f"mirror.path={tmp_path / 'mirror'}"])


@pytest.mark.parametrize("packed", [True, False])
def test_training_reads_the_same(served: tuple[Cache, str], tmp_path: Path, packed: bool) -> None:
    cache, url = served
    if not packed:
        head = cache.open_snapshot(cache.open_snapshot().head.parent).head
        cache.add_snapshot(replace(head, parent=None), None)
    assert cache.open_snapshot().packed is packed
    assert sequence(loader(opened(url, tmp_path), prefetch=2)) == sequence(loader(cache))


def test_verify_and_status(
    served: tuple[Cache, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "PIECE", 5000)  # a server that knows ranges would be asked for these
    cache, url = served
    assert sana_pipe.stages.status.run(configured(url, tmp_path)) == 0
    assert "(packed)" in capsys.readouterr().out
    packed = cache.open_snapshot()
    path, sample = (
        next(p for p in packed.shard_files() if packed.sample(0).pictures["latent"].shard in p),
        packed.sample(0),
    )
    flip(cache.root / path, sample.pictures["latent"].offset)
    capsys.readouterr()
    assert sana_pipe.stages.verify.run(configured(url, tmp_path)) == IntegrityError.exit_code
    assert (
        f"{url}/{path}: 1 records are damaged\n  record {sample.pictures['latent'].key.hex()}"
        in capsys.readouterr().out
    )
    shutil.rmtree(tmp_path / "mirror")
    with pytest.raises(IntegrityError, match=f"record {sample.pictures['latent'].key.hex()}"):
        list(loader(opened(url, tmp_path), stop_step=20))


def test_names_are_listed_without_asking_for_sizes(
    served: tuple[Cache, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing of a web server has no sizes: each would be a request of its own."""
    here, there = served[0].files, opened(served[1], tmp_path).files
    monkeypatch.setattr(ObjectStore, "stat", lambda *_: pytest.fail("asked"))
    units = [f"units/{owner}/{plan}" for owner in here.folders("units") for plan in here.folders(f"units/{owner}")]
    assert [list(there.names_below(top)) for top in ("shards", "none")] == [list(here.names_below("shards")), []]
    assert list(here.names_below("shards")) and units
    assert [there.unit_names(folder) for folder in units] == [here.unit_names(folder) for folder in units]


def test_nothing_is_written_there(served: tuple[Cache, str], tmp_path: Path) -> None:
    _, url = served
    with pytest.raises(CacheError, match=naming(url)):
        Cache(url, create=True, mirror=MirrorConfig(path=str(tmp_path / "mirror")))
    cache = opened(url, tmp_path)
    for act in (
        lambda: cache.files.put("a", b""),
        lambda: cache.files.remove("format.json"),
        lambda: cache.files.replace("a", b""),
        lambda: cache.files.put_content(b"x", "tables", "npy"),
    ):
        with pytest.raises(CacheError, match=naming(url)):
            act()


def test_a_server_that_does_not_answer_is_no_missing_file(served: tuple[Cache, str], tmp_path: Path) -> None:
    cache = Cache(served[1], mirror=MirrorConfig(path=str(tmp_path / "mirror")), patience_s=0.1)
    files = cache.files
    assert isinstance(files.store, ObjectStore)
    with pytest.raises(FileNotFoundError):
        files.open("tables/00/" + "0" * 32 + ".arrow")
    files.store._base = "http://127.0.0.1:9/cache"
    for ask in (
        lambda: files.exists("format.json"),
        lambda: files.names("names"),
        lambda: files.open("tables/00/" + "0" * 32 + ".arrow"),
    ):
        with pytest.raises(AwayError, match="cannot be read"):
            ask()
