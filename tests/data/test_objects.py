"""A cache in an object store, over the S3 protocol: the same files as on a disk, the same laws, plain errors."""

from __future__ import annotations

import errno
import gc
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import numpy as np
import pyarrow as pa
import pytest
import yaml
from fsspec.implementations.memory import MemoryFileSystem

import sana_pipe.stages.bucket
import sana_pipe.stages.encode
import sana_pipe.stages.gc
import sana_pipe.stages.pull
import sana_pipe.stages.push
import sana_pipe.stages.status
import sana_pipe.stages.verify
from benchmarks import s3_listing, scale_model
from sana_pipe.base import retrying
from sana_pipe.base.errors import AwayError, CacheError, IntegrityError, NoSpaceError
from sana_pipe.config import Config, dump
from sana_pipe.data.cache import connections, copies, layout, listed, scratch
from sana_pipe.data.cache import mirror as mirrors
from sana_pipe.data.cache.audit import verify
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.config import MirrorConfig
from sana_pipe.data.cache.files import Files
from sana_pipe.data.cache.folder_store import FolderStore
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.cache.object_store import ObjectStore
from sana_pipe.data.cache.shard import ShardWriter
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.cache.status import join, status
from sana_pipe.data.loader.loader import Loader, LoaderSettings
from sana_pipe.data.snapshots import data_card
from sana_pipe.data.work import engine
from sana_pipe.tools.locations import cache_location
from tests.support import tiny_cache
from tests.support.constants import set_constants, unit_sizes
from tests.support.forked import Forked
from tests.support.messages import naming

MakeConfig = Callable[..., Config]


@pytest.fixture
def place(s3_bucket: str) -> str:
    """A place of its own in the bucket."""
    return f"{s3_bucket}/{uuid4().hex}"


@pytest.fixture
def mirror(tmp_path: Path) -> MirrorConfig:
    return MirrorConfig(path=str(tmp_path / "mirror"))


@pytest.fixture
def objects(place: str, mirror: MirrorConfig) -> Files:
    return Files(place, mirror)


def store_of(files: Files) -> ObjectStore:
    assert isinstance(files.store, ObjectStore)
    return files.store


def put_raw(files: Files, name: str, data: bytes) -> None:
    store_of(files).fs.pipe_file(f"{files.where(name).removeprefix('s3://')}", data)


# ---------------------------------------------------------------- the same operations


@pytest.mark.parametrize("kind", ["disk", "objects"])
def test_documents_exist_twice_in_both_stores(kind: str, tmp_path: Path, place: str, mirror: MirrorConfig) -> None:
    files = Files(tmp_path / "disk") if kind == "disk" else Files(place, mirror)
    name, copy, body = "names/a/00000000.json", "copies/names/a/00000000.json", {"name": "a", "snapshot": "one"}
    assert files.put(name, layout.seal(body)) and files.read(copy) == files.read(name)
    assert files.put("claims/a.json", b"1") and not files.has_file("copies/claims/a.json")
    files.replace(name, b"damaged")
    assert files.document(name) == body and list(files.damage) == [name] and files.read(name) == b"damaged"
    files.repairs = True
    assert list(files.documents([name, name])) == [body, body] and files.read(name) == layout.seal(body)
    files.store.remove(name)
    assert files.exists(name) and not files.has_file(name)
    assert files.names("names/a") == ["00000000.json"] and files.folders("names") == ["a"]
    assert files.numbers("names/a") == [0] and not files.put(name, layout.seal({**body, "snapshot": "two"}))
    copies.repair_all(files)
    assert files.read(name) == layout.seal(body)
    for one in (name, copy):
        files.replace(one, b"damaged")
    with pytest.raises(IntegrityError):
        files.document(name)
    files.set_aside(name)
    assert not files.exists(name) and [len(files.read(e.name)) for e in files.walk("damaged")] == [7, 7]
    assert files.put(name, layout.seal(body)) and files.discard(name, files.now() + 60) and not files.exists(name)


@pytest.mark.parametrize("kind", ["disk", "objects"])
def test_both_stores_answer_alike(
    kind: str, tmp_path: Path, place: str, mirror: MirrorConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "PAGE", 1)
    files = Files(tmp_path / "disk") if kind == "disk" else Files(place, mirror)
    assert files.names("") == [] and list(files.walk("a")) == [] and not files.exists("a/b.json")
    assert files.put("a/00000000.json", b"zero") and files.put("a/b/00000001.json", b"one")
    assert not files.put("a/00000000.json", b"other") and files.read("a/00000000.json") == b"zero"
    assert files.names("a") == ["00000000.json", "b"] and files.folders("a") == ["b"] and files.folders("") >= ["a"]
    assert [(e.name, e.size) for e in files.walk("a")] == [("a/00000000.json", 4), ("a/b/00000001.json", 3)]
    assert all(abs(e.modified - next(files.walk("a")).modified) < 60 and e.modified > 1e9 for e in files.walk("a"))
    assert files.sizes(["a/00000000.json", "a/none", "c/none"]) == {"a/00000000.json": 4}
    assert files.numbers("a") == [0]
    with pytest.raises(IntegrityError, match="missing"):
        files.numbers("a/b")
    with pytest.raises(IntegrityError, match=r"a/none.*missing"):
        files.read("a/none")
    digest = files.put_content(b"content", "tables", "npy")
    name = layout.Paths.table(digest, "npy")
    assert files.digest(name) == digest == layout.content_digest(b"content")
    assert files.mapped(name, digest) == b"content" == bytes(files.open(name).map())
    with pytest.raises(FileNotFoundError):
        files.open(layout.Paths.table("0" * 32, "npy"))
    handle, view = files.open(name), bytearray(4)
    assert handle.read_into(memoryview(view), 3) == 4 and view == b"tent"
    assert handle.read_into(memoryview(view), 5) == 2 and handle.file().read() == b"content"
    files.replace("r", b"1")
    files.replace("r", b"2")
    assert files.read("r") == b"2"
    files.remove("r")
    files.remove("r")
    assert not files.exists("r")


@pytest.mark.parametrize("limit", [1, 1 << 20])
def test_a_table_is_checked_and_a_large_one_is_in_a_file_without_a_name(
    objects: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(scratch, "LIMIT", limit)
    data = b"some bytes" * 10
    digest = objects.put_content(data, "tables", "arrow")
    name = layout.Paths.table(digest, "arrow")
    gc.collect()  # what the case before has mapped, whose folder had the same name
    before = pa.total_allocated_bytes()
    table = objects.mapped(name, digest)
    assert table.to_pybytes() == data and pa.total_allocated_bytes() == before
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    assert [line.endswith("(deleted)") for line in mapped] == ([True] if limit == 1 else [])
    assert not [path for path in (tmp_path / "mirror" / "tmp").rglob("*") if path.is_file()]
    put_raw(objects, name, data[1:])
    with pytest.raises(IntegrityError, match="do not match"):
        objects.mapped(name, digest)
    objects.remove(name)
    with pytest.raises(IntegrityError, match="is missing"):
        objects.mapped(name, digest)


def test_a_damaged_namesake_is_replaced(objects: Files) -> None:
    digest = layout.content_digest(b"right")
    name = layout.Paths.table(digest, "npy")
    put_raw(objects, name, b"wrong")
    assert objects.put_content(b"right", "tables", "npy") == digest
    assert objects.read(name) == b"right"


def test_one_of_many_that_put_wins(objects: Files) -> None:
    for turn in range(5):
        with ThreadPoolExecutor(8) as pool:
            wins = list(pool.map(lambda own, t=turn: objects.put(f"race/{t}", b"%d" % own), range(8)))
        assert sum(wins) == 1
        assert objects.read(f"race/{turn}") == b"%d" % wins.index(True)


def test_a_store_that_overwrites_is_refused_at_once(
    place: str, mirror: MirrorConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    Cache(place, create=True, mirror=mirror)  # the server as it is
    import s3fs

    real = s3fs.S3FileSystem._call_s3

    async def careless(self: object, method: str, *args: object, **options: object) -> object:
        options.pop("IfNoneMatch", None)
        return await real(self, method, *args, **options)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", careless)
    with pytest.raises(CacheError, match=naming(f"{place}-2", "If-None-Match")):
        Cache(place + "-2", create=True, mirror=mirror)


def test_a_shard_that_is_given_up_leaves_nothing(objects: Files) -> None:
    import numpy as np

    with pytest.raises(RuntimeError), ShardWriter(objects, tiny_cache.encodings()[0], "u") as writer:
        writer.add(b"k" * 16, np.zeros((32, 4, 4), np.uint16))
        raise RuntimeError
    assert list(objects.walk("")) == [] and list(store_of(objects).mirror.root.glob("tmp/*")) == []


def test_an_upload_that_breaks_off_leaves_nothing(objects: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard of several parts of which one cannot be sent: no object, and no upload that is left open."""
    import s3fs

    monkeypatch.setattr(retrying, "PAUSE_S", 0.1)
    monkeypatch.setattr(retrying, "TIMEOUT_S", 0.0)  # however long an attempt takes here
    store_of(objects).connection.patience_s = 0.5
    real, parts = s3fs.S3FileSystem._call_s3, 0

    async def call(self: object, method: str, *args: object, **options: object) -> object:
        nonlocal parts
        if method == "upload_part":
            parts += 1
            if parts % 2 == 0:
                raise OSError("connection reset")
        return await real(self, method, *args, **options)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", call)
    with objects.temporary() as path:
        path.write_bytes(bytes(101 << 20))
        with pytest.raises(AwayError, match=r"shards/x\.tar: .*OSError: connection reset"):
            objects.store.create("shards/x.tar", path)
        assert parts >= 4, "it was tried again"
        assert not objects.exists("shards/x.tar")
        bucket = store_of(objects).url.removeprefix("s3://").partition("/")[0]
        assert store_of(objects).fs.list_multipart_uploads(bucket) == []


def test_a_server_that_fails_now_and_then_is_asked_again(objects: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    monkeypatch.setattr(retrying, "PAUSE_S", 0.01)
    objects.put("a", b"1")
    real, asked, fine = s3fs.S3FileSystem._call_s3, [], 6

    async def moody(self: object, method: str, *args: object, **options: object) -> object:
        if method == "get_object":
            asked.append(method)
            if len(asked) < fine:
                raise OSError("503 slow down")
        return await real(self, method, *args, **options)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", moody)
    assert objects.read("a") == b"1"
    assert len(asked) == fine
    asked.clear()
    fine, store_of(objects).connection.patience_s = 10**9, 1.0
    with pytest.raises(AwayError, match="503 slow down"):
        objects.read("a")
    assert len(asked) > 1


def test_a_put_whose_answer_is_lost_is_ours(objects: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second attempt finds the object of the first: neither another writer's nor a store that is unfit."""
    import s3fs

    monkeypatch.setattr(retrying, "PAUSE_S", 0.01)
    real, lost = s3fs.S3FileSystem._call_s3, []

    stored: dict[str, object] = {}

    async def call(self: object, method: str, *args: object, **options: object) -> object:
        losing = method == "put_object" and not lost
        answer = await real(self, method, *args, **{**options, **(stored if losing else {})})
        if losing:
            lost.append(method)
            raise OSError("connection reset")
        return answer

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", call)
    objects.probe()
    lost.clear()
    assert objects.put("a", b"1") and lost
    assert not objects.put("a", b"1"), "another writer's equal object"
    lost.clear()
    assert not objects.put("a", b"2") and objects.read("a") == b"1"
    stored["Body"] = b"of another writer, before the second attempt"
    assert not objects.put("b", b"1") and lost and objects.read("b") == stored["Body"]


def test_no_such_bucket_and_no_such_scheme_are_reported(s3_bucket: str, mirror: MirrorConfig) -> None:
    for create in (False, True):
        with pytest.raises(CacheError, match="s3://nowhere/cache") as caught:
            Cache("s3://nowhere/cache", create=create, mirror=mirror)
        assert caught.value.fix == "make the bucket, or correct its name"
    with pytest.raises(CacheError, match=naming(f"{s3_bucket}/nothing", "sana-pipe encode")):
        Cache(f"{s3_bucket}/nothing", mirror=mirror)
    with pytest.raises(CacheError, match="nonsense"):
        Cache("nonsense://x/y", create=True, mirror=mirror)


# ---------------------------------------------------------------- the mirror


def test_the_mirror_fetches_once_heals_itself_and_stays_in_its_bound(place: str, tmp_path: Path) -> None:
    folder = tmp_path / "mirror"
    files = Files(place, MirrorConfig(path=str(folder), gib=25_000 / 2**30))
    names = [layout.Paths.table(files.put_content(bytes([n]) * 10_000, "tables", "npy"), "npy") for n in range(4)]
    fetched: list[str] = []
    real = store_of(files).fs.get_file
    store_of(files).fs.get_file = lambda path, *args: (fetched.append(path), real(path, *args))  # type: ignore[method-assign]
    try:
        for _ in range(3):
            assert bytes(files.open(names[0]).map()) == bytes([0]) * 10_000
        assert len(fetched) == 1
        copy = next(folder.glob("??/*.npy"))
        copy.write_bytes(b"\1" + copy.read_bytes()[1:])  # a damaged copy is fetched again
        assert bytes(files.open(names[0]).map()) == bytes([0]) * 10_000 and len(fetched) == 2
        handle = files.open(names[0])
        for name in names:
            files.open(name)
        left = [path.name for path in folder.glob("??/*.npy")]
        assert len(left) == 2 and Path(names[3]).name in left and Path(names[0]).name not in left
        view = memoryview(bytearray(10_000))
        assert handle.read_into(view, 0) == 10_000 and bytes(view) == bytes([0]) * 10_000  # dropped, and still open
        with pytest.raises(CacheError, match=r"mirror\.gib"):
            big = files.put_content(bytes(30_000), "tables", "npy")
            files.open(layout.Paths.table(big, "npy"))
    finally:
        del store_of(files).fs.get_file
    assert list(folder.glob("tmp/*")) == []


def fetched_into(mirror: mirrors.Mirror, number: int, size: int = 1000) -> None:
    data = number.to_bytes(4, "little") * (size // 4)
    name = layout.Paths.table(layout.content_digest(data), "npy")
    mirror.origin.replace(name, data)
    mirror.open(name)


def mirror_in(folder: Path, limit: int) -> mirrors.Mirror:
    return mirrors.Mirror(folder / "mirror", limit, FolderStore(folder / "origin", 60))


def held(mirror: mirrors.Mirror) -> int:
    return sum(path.stat().st_size for path in mirror.root.glob("??/*.npy"))


def test_no_more_copies_go_than_must(tmp_path: Path) -> None:
    mirror = mirror_in(tmp_path, 3_000)
    for n in range(5):
        fetched_into(mirror, n)
        assert held(mirror) == min(3, n + 1) * 1_000
    mirror.drop(f"tables/{next(mirror.root.glob('??/*.npy')).name}")
    fetched_into(mirror, 5)
    assert held(mirror) == 3_000


def test_many_copies_are_not_listed_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes and a mirror of 64 copies, of which 8 are spare: each lists after four fetches."""
    listed, real = list[object](), mirrors.Mirror.list_copies
    monkeypatch.setattr(mirrors.Mirror, "list_copies", lambda self: (listed.append(self), real(self))[1])
    monkeypatch.setattr(mirrors, "PARTS", 16)
    monkeypatch.setattr(mirrors, "PROCESSES", 2)
    processes = [mirror_in(tmp_path, 6_400) for _ in range(2)]
    for n in range(96):
        fetched_into(processes[n % 2], n, 100)
        assert held(processes[0]) <= 6_400
    assert held(processes[0]) >= 5_600
    assert len(listed) == 24


@pytest.mark.slow
def test_two_processes_count_the_copies_of_both(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom tests.data.test_objects import fetched_into, mirror_in\n"
        f"mirror = mirror_in(Path({str(tmp_path)!r}), 40_000)\n"
        "for n in range(60):\n    fetched_into(mirror, n + int(sys.argv[1]))"
    )
    root = Path(__file__).parents[2]
    started = [subprocess.Popen([sys.executable, "-c", code, str(first)], cwd=root) for first in (0, 30)]
    assert [process.wait() for process in started] == [0, 0]
    assert held(mirror_in(tmp_path, 40_000)) <= 41_000, "one of them may have been on its way"


def test_a_copy_is_checked_once_on_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whichever process opens it with trust; again if it has changed, and whenever trust is not asked for."""
    place, checked = f"memory://{uuid4().hex}", list[object]()
    mirror = MirrorConfig(path=str(tmp_path / "mirror"), gib=0.001)
    real = mirrors.digest_of
    monkeypatch.setattr(mirrors, "digest_of", lambda handle: (checked.append(handle), real(handle))[1])

    def open_copy(trust: bool) -> bytes:
        return bytes(Files(place, mirror).open(name, trust=trust).map())

    good = bytes([7]) * 10_000
    name = layout.Paths.table(Files(place, mirror).put_content(good, "tables", "npy"), "npy")
    for trust in (False, True, True):
        assert open_copy(trust) == good
    assert len(checked) == 1
    assert open_copy(False) == good and len(checked) == 2
    copy = next((tmp_path / "mirror").glob("??/*.npy"))
    status = copy.stat()
    copy.write_bytes(b"\1" + good[1:])
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))  # only its time of change differs
    assert open_copy(True) == good and len(checked) == 4, "found damaged, and fetched again"
    assert open_copy(True) == good and len(checked) == 4
    mark = store_of(Files(place, mirror)).mirror.mark_of(copy)
    mark.unlink()
    assert open_copy(True) == good and len(checked) == 5 and mark.exists()
    store_of(Files(place, mirror)).mirror.drop(name)
    assert not mark.exists() and not copy.exists()


def test_a_trusted_copy_that_is_damaged_heals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage of the disk below the mark: readers of records and of chunks notice, and the copy is fetched again."""
    place, source = uuid4().hex, tiny_cache.build(tmp_path / "cache")
    for path in filter(Path.is_file, (tmp_path / "cache").rglob("*")):
        MemoryFileSystem().pipe_file(f"/{place}/{path.relative_to(tmp_path / 'cache')}", path.read_bytes())
    opened = Cache(f"memory://{place}", mirror=MirrorConfig(path=str(tmp_path / "mirror"), gib=0.01)).open_snapshot()
    truth = [source.open_snapshot().sample(row) for row in range(len(opened))]
    assert [opened.sample(row) for row in range(len(opened))] == truth
    sample, into = truth[0], np.empty(opened.shape("latent", 0), np.uint16)
    opened.reader("latent").read(
        sample.pictures["latent"].shard,
        sample.pictures["latent"].offset,
        sample.pictures["latent"].key,
        sample.pictures["latent"].checksum,
        into,
    )
    monkeypatch.setattr(mirrors.Mirror, "_is_marked", lambda *a: True)
    for name, at in (
        (sample.pictures["latent"].shard, sample.pictures["latent"].offset),
        (opened.head.chunks[0].samples, -1),
    ):
        copy = next((tmp_path / "mirror").glob(f"??/{name}.*"))
        data = bytearray(copy.read_bytes())
        data[at if at >= 0 else data.index(sample.pictures["latent"].key)] ^= 1
        copy.write_bytes(data)
    again = np.empty_like(into)
    fresh = Snapshot(opened.files, opened.id)
    opened.files.reopen_s = 0.0
    fresh.reader("latent").read(
        sample.pictures["latent"].shard,
        sample.pictures["latent"].offset,
        sample.pictures["latent"].key,
        sample.pictures["latent"].checksum,
        again,
    )
    assert (again == into).all()
    assert fresh.sample(0) == sample
    assert fresh.columns(np.arange(5)).sample_id.tolist() == [s.sample_id for s in truth[:5]]


class Disk:
    """The mirror's disk: `capacity` bytes, of which `shown` says what it may."""

    def __init__(self, files: Files, capacity: int, honest: bool, patch: pytest.MonkeyPatch):
        self.files, self.capacity, self.fetches = files, capacity, 0
        real = store_of(files).fs.get_file

        def get_file(remote: str, local: str) -> None:
            self.fetches += 1
            Path(local).write_bytes(b"part")
            if self.free() < store_of(files).fs.info(remote)["size"]:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(remote, local)

        patch.setattr(store_of(files).fs, "get_file", get_file)
        patch.setattr(mirrors, "free_at", lambda root: self.free() if honest else 2**40)
        patch.setattr(mirrors, "SPARE", 2_000)

    def free(self) -> int:
        return self.capacity - sum(path.stat().st_size for path in store_of(self.files).mirror.root.glob("??/*"))


@pytest.mark.parametrize("honest", [True, False], ids=["free space is known", "a quota"])
def test_a_full_mirror_disk_gives_up_copies_and_then_says_so(
    objects: Files, monkeypatch: pytest.MonkeyPatch, honest: bool
) -> None:
    names = [layout.Paths.table(objects.put_content(bytes([n]) * 10_000, "tables", "npy"), "npy") for n in range(5)]
    disk = Disk(objects, 36_000, honest, monkeypatch)
    for turn in range(2):
        for n, name in enumerate(names):
            assert bytes(objects.open(name).map()) == bytes([n]) * 10_000
        left = [path.name for path in store_of(objects).mirror.root.glob("??/*")]
        assert len(left) == 3 and {Path(name).name for name in names[2:]} == set(left), f"turn {turn}"
    assert store_of(objects).mirror.room == (17_000 if honest else store_of(objects).mirror.limit)
    assert objects.duplicate(names[0]), "copies go for a file that is fetched to be stored twice, too"
    objects.close_readers()
    disk.capacity = 9_000
    monkeypatch.setattr(store_of(objects).connection, "is_web", True)  # whose ranges `digest` does not trust
    for read in (objects.open, lambda name: objects.mapped(name, Path(name).stem), objects.digest):
        disk.fetches = 0
        with pytest.raises(NoSpaceError, match=naming(store_of(objects).mirror.root)) as caught:
            read(names[0])
        assert caught.value.exit_code == 6 and "mirror.path" in (caught.value.fix or "")
        assert disk.fetches <= 4, "nothing is fetched again and again"
        assert not list(store_of(objects).mirror.root.glob("tmp/*"))


def test_a_part_of_the_mirrors_disk_stays_free(objects: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(objects, 31_000, True, monkeypatch)
    for n in range(3):
        objects.open(layout.Paths.table(objects.put_content(bytes([n]) * 10_000, "tables", "npy"), "npy"))
    assert len(list(store_of(objects).mirror.root.glob("??/*"))) == 2 and disk.free() >= mirrors.SPARE


@pytest.mark.slow
def test_processes_share_one_mirror(place: str, tmp_path: Path) -> None:
    files = Files(place, MirrorConfig(path=str(tmp_path)))
    digest = files.put_content(os.urandom(3_000_000), "tables", "npy")
    code = (
        "import sys, fsspec\nfrom sana_pipe.data.cache.config import MirrorConfig\n"
        "from sana_pipe.data.cache.files import Files\n"
        "f = Files(sys.argv[1], MirrorConfig(path=sys.argv[2])); count = []\n"
        "real = f.store.fs.get_file; f.store.fs.get_file = lambda *a: (count.append(1), real(*a))\n"
        "assert len(f.open(sys.argv[3]).map()) == 3_000_000; print(len(count))"
    )
    argv = [sys.executable, "-c", code, place, str(tmp_path), layout.Paths.table(digest, "npy")]
    started = [subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) for _ in range(3)]
    assert sum(int(process.communicate()[0]) for process in started) == 1
    assert all(process.returncode == 0 for process in started)


# ---------------------------------------------------------------- the whole job


def content(files: Files) -> dict[str, bytes]:
    return {
        e.name: files.read(e.name) for e in files.walk("") if e.name.split("/")[0] not in ("tmp", "reports", "rounds")
    }


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_encode_bucket_load_verify_repair_over_s3(
    place: str,
    photos: Path,
    small_cache: Path,
    make_config: MakeConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = make_config(tmp_path, f"cache={place}", f"mirror.path={tmp_path / 'mirror'}")
    assert sana_pipe.stages.encode.run(config, data=str(photos))["images"] == 12
    here = cache_location(config).open()
    joined = here.files.read(Paths.LISTED)
    sana_pipe.stages.bucket.run(config)
    assert here.files.read(Paths.LISTED) != joined
    assert content(here.files) == content(Files(small_cache))
    assert sana_pipe.stages.encode.run(config, data=str(photos))["images"] == 0
    assert sana_pipe.stages.status.run(config) == 0 and sana_pipe.stages.verify.run(config) == 0

    settings: dict = {
        "seed": 0,
        "phase": 0,
        "rank": 0,
        "world": 1,
        "microbatch": 12,
        "caption_drop": 0.1,
        "prefetch": 1,
        "threads": 2,
        "stop_step": 3,
    }
    for (ours, state), (local, same) in zip(
        Loader(here.open_snapshot(), LoaderSettings(**settings)),
        Loader(Cache(small_cache).open_snapshot(), LoaderSettings(**settings)),
        strict=True,
    ):
        assert state == same
        assert all(
            a.latents.equal(b.latents) and a.captions.equal(b.captions) for a, b in zip(ours, local, strict=True)
        )

    name = next(entry.name for entry in here.files.walk("shards") if "/latent-" in entry.name)
    row = here.index(name.split("/")[1]).columns
    data = bytearray(here.files.read(name))
    data[int(row["offset"][0]) + 5] ^= 1
    put_raw(here.files, name, bytes(data))
    capsys.readouterr()
    assert sana_pipe.stages.verify.run(config, as_json=True) == IntegrityError.exit_code
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["path"] == name and len(finding["records"]) == 1
    assert sana_pipe.stages.verify.run(config, repair=True) == 0
    assert content(here.files) == content(Files(small_cache))

    left = f"{name.rpartition('/')[0]}/left.tar"
    put_raw(here.files, left, b"left")
    sana_pipe.stages.gc.run(config, yes=True, older_than_hours=0)
    assert not here.files.exists(left)
    assert sana_pipe.stages.verify.run(config) == 0


@pytest.mark.fault
@pytest.mark.timeout(600)
def test_killed_over_s3_then_finished(
    fault_seed: int, place: str, photos: Path, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_constants(monkeypatch, {**unit_sizes(2, 3), "sana_pipe.data.work.claims.STALE_S": 3})
    units = ("encode.image_batch=2",)
    whole = make_config(tmp_path / "whole", *units)
    (tmp_path / "whole").mkdir()
    config = make_config(tmp_path, *units, f"cache={place}", f"mirror.path={tmp_path / 'mirror'}")

    def start(which: Config) -> Forked:
        path = tmp_path / "config.yaml"
        path.write_text(dump(which))
        return Forked("encode", "--config", str(path), "--data", str(photos))

    assert start(whole).wait() == 0
    chance, seen = random.Random(fault_seed), cache_location(config).open(create=True).files
    process = start(config)
    wanted = chance.randrange(1, 12)
    done = threading.Event()
    while process.poll() is None and not done.wait(0.05):
        if sum(1 for _ in seen.walk("units")) >= wanted:
            process.send_signal(signal.SIGKILL)
            done.set()
    process.wait()
    process = start(config)
    assert process.wait() == 0, process.output()
    assert content(seen) == content(Files(tmp_path / "whole" / "cache"))


def test_nothing_of_a_disk_is_reached_by_mistake(objects: Files) -> None:
    with pytest.raises(TypeError, match="not on a disk"):
        objects.path("x")
    with pytest.raises(TypeError, match="not on a disk"):
        _ = objects.root


def test_a_driver_that_looks_first_and_writes_then_is_refused(tmp_path: Path, mirror: MirrorConfig) -> None:
    with pytest.raises(CacheError, match=naming(f"local://{tmp_path}/cache")):
        Cache(f"local://{tmp_path}/cache", create=True, mirror=mirror)


def test_the_store_compares_what_it_gets_with_a_checksum(objects: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read back: each put and each part carries a checksum of its bytes, which S3 verifies."""
    from moto.s3.responses import S3Response

    sent: list[str | None] = []
    real = S3Response.put_object

    def put(self: Any) -> Any:
        sent.append(self.headers.get("x-amz-checksum-crc32") or self.headers.get("x-amz-trailer"))
        return real(self)

    monkeypatch.setattr(S3Response, "put_object", put)
    objects.put("names/a/00000000.json", layout.seal({"name": "a"}))
    with objects.temporary() as path:
        path.write_bytes(bytes(1 << 20))
        objects.store.create("shards/x.tar", path)
    assert len(sent) == 3 and all(sent)


def test_without_checksums_what_is_stored_is_looked_at(objects: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """AWS_REQUEST_CHECKSUM_CALCULATION=when_required ends them; connections of other stores send none."""
    real = store_of(objects).fs.pipe_file

    def cut(path: str, data: bytes, **options: Any) -> None:
        real(path, data[:-1], **options)

    assert store_of(objects).connection.sends_checksums
    monkeypatch.setattr(store_of(objects).fs.s3.meta.config, "request_checksum_calculation", "when_required")
    assert not store_of(objects).connection.sends_checksums and objects.put("a/whole", b"bytes")
    monkeypatch.setattr(store_of(objects).fs, "pipe_file", cut)
    with pytest.raises(IntegrityError, match=naming("a/cut", "read back are not")):
        objects.put("a/cut", b"bytes")
    monkeypatch.setattr(
        store_of(objects).fs, "put_file", lambda local, path, mode: cut(path, Path(local).read_bytes(), mode=mode)
    )
    with objects.temporary() as path, pytest.raises(IntegrityError, match=naming("a/file", "5 bytes")):
        path.write_bytes(b"bytes")
        objects.store.create("a/file", path)


def test_requests_of_a_unit(s3_bucket: str) -> None:
    """A listing tells which units are committed; claim and removal; shard, table, document and its copy."""
    each = s3_listing.unit_requests(engine.FEW_UNITS + 1, engine.FEW_UNITS + 5)
    once = {("PUT", "claims"), ("DELETE", "claims"), ("HEAD", "units")}
    once |= {("PUT", folder) for folder in ("shards", "tables", "units", "copies")}
    assert {kind for kind, number in each.items() if number} == once and set(each.values()) <= {0, 1}
    assert sum(number for (_, folder), number in each.items() if folder != "claims") == scale_model.UNIT_REQUESTS


def test_a_snapshot_travels_there_and_back_by_the_commands(
    tmp_path: Path, place: str, objects: Files, make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """A snapshot is pushed twice and pulled; its card says how."""
    cache, mirror = tiny_cache.build(tmp_path / "made"), f"mirror.path={tmp_path / 'mirror'}"
    cache.point("round1", cache.snapshot_id())
    config = make_config(tmp_path, f"cache={cache.root}", mirror)
    for _ in range(2):
        assert sana_pipe.stages.push.run(config, place, "cc-by-4.0") == 0
    assert f"sana-pipe pull {place} --snapshot round1" in capsys.readouterr().out
    front, text = objects.read(data_card.NAME).decode().split("---\n", 2)[1:]
    assert yaml.safe_load(front)["license"] == "cc-by-4.0"
    assert cache.snapshot_id() in text and f"sana-pipe pull {place} --snapshot round1" in text
    back = make_config(tmp_path, f"cache={tmp_path / 'back'}", mirror)
    assert sana_pipe.stages.pull.run(back, place, name="theirs") == 0
    made = Cache(tmp_path / "back")
    assert list(verify(made)) == [] and made.snapshot_id("theirs") == cache.snapshot_id()
    shards = cache.open_snapshot().shard_files()
    assert all(made.files.read(name) == cache.files.read(name) for name in shards)


@pytest.fixture
def counted(tmp_path: Path) -> Iterator[tuple[str, Counter[tuple[str, str]]]]:
    """A cache of two sources, four encodings and three names on a server that counts requests."""
    cache = tiny_cache.build(tmp_path / "made")
    cache.point("round1", cache.snapshot_id())
    tiny_cache.build(tmp_path / "made", weights="other", names="drawing")
    cache.point("round2", cache.snapshot_id())
    by_kind = {"latent": cache.encodings("latent")[0].name, "text": cache.encodings("text")[0].name}
    for source in ("photos", "drawings"):
        table = cache.put_table(pa.table({"key": [source], "reject": pa.nulls(1, pa.string())}))
        counts = {"items": 1, "rejected": 0}
        cache.add_scan(source, {"root": "/p", "table": table, "encodings": by_kind, "buckets": [], "counts": counts})
    with s3_listing.counting_server() as requests:
        bucket = f"counted-{uuid4().hex}"
        store = fsspec.filesystem("s3")
        store.mkdir(bucket)
        store.put(str(cache.root), f"{bucket}/cache", recursive=True)
        yield f"s3://{bucket}/cache", requests


def test_status_asks_for_what_has_changed_alone(counted: tuple[str, Counter[tuple[str, str]]], tmp_path: Path) -> None:
    """One listing, one object for a new machine; what is new, damaged or gone since is seen."""
    url, requests = counted
    mirrors = (MirrorConfig(path=str(tmp_path / f"mirror{number}")) for number in itertools.count())

    def asked(cache: Cache) -> tuple[dict[str, Any], int]:
        requests.clear()
        return status(cache), sum(requests.values())

    def opened(mirror: MirrorConfig) -> tuple[dict[str, Any], int]:
        requests.clear()
        report = status(Cache(url, mirror=mirror))
        return report, sum(requests.values())

    on_disk = {**status(Cache(tmp_path / "made")), "cache": url, "free_bytes": None}
    assert len(on_disk["sources"]) == 2 and len(on_disk["stores"]) == 4 and len(on_disk["snapshots"]) == 3
    here, there = next(mirrors), Cache(url, mirror=next(mirrors))
    first, many = opened(here)
    assert first == on_disk and many > 5  # nobody has joined them: each document is read
    assert opened(here) == (on_disk, 3)
    join(there)
    requests.clear()
    join(there)
    assert not any(operation == "PUT" for operation, _ in requests)  # nothing is new
    assert opened(next(mirrors)) == (on_disk, 4)
    watching = Cache(url, mirror=here)
    assert asked(watching) == (on_disk, 1) == asked(watching)

    there.point("round3", there.snapshot_id())  # the joined object does not have it
    newer = {**on_disk, "snapshots": {**on_disk["snapshots"], "round3": there.snapshot_id()}}
    assert asked(watching) == (newer, 3) and asked(watching) == (newer, 1)  # this machine reads the object once
    there.point("round4", there.snapshot_id())
    newer["snapshots"]["round4"] = there.snapshot_id()
    assert asked(watching) == (newer, 2) and asked(watching) == (newer, 1)
    assert opened(next(mirrors)) == (newer, 6)

    put_raw(there.files, Paths.LISTED, b"0" * 400)  # damaged: it is not used
    assert opened(next(mirrors))[0] == newer
    plan = f"plans/{next(iter(on_disk['stores']))}/00000000.json"
    put_raw(there.files, plan, there.files.read(plan).replace(b"0", b"1", 1))
    assert set(asked(watching)[0]["damaged"]) == {plan}
    put_raw(there.files, plan, there.files.read(Paths.copy(plan)))
    shard = next(iter(there.open_snapshot("round1").shard_files()))
    there.files.remove(shard)
    assert "names/round1" in asked(watching)[0]["damaged"]


def test_a_takedown_leaves_nothing_of_what_status_keeps(
    counted: tuple[str, Counter[tuple[str, str]]], tmp_path: Path
) -> None:
    cache = Cache(counted[0], mirror=MirrorConfig(path=str(tmp_path / "mirror")))
    join(cache)
    kept = tmp_path / "mirror" / "listed"
    assert cache.files.has_file(Paths.LISTED) and list(kept.iterdir())
    listed.discard(cache.files)
    assert not cache.files.has_file(Paths.LISTED) and not list(kept.iterdir())
