"""`gc` and those who use a file again at the same moment; names and sources that are forgotten; what was lost heals."""

from __future__ import annotations

import datetime
import errno
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pytest

import sana_pipe.stages.bucket
import sana_pipe.stages.encode
import sana_pipe.stages.forget
import sana_pipe.stages.gc
import sana_pipe.stages.pack
import sana_pipe.stages.snapshots
import sana_pipe.stages.train
import sana_pipe.stages.verify
from sana_pipe.base import disk, process_identity, retrying
from sana_pipe.base.disk import STALE_TMP_S
from sana_pipe.base.errors import AwayError, CacheError, IntegrityError, NoSpaceError, ResourceError, UserError
from sana_pipe.config import Config, load
from sana_pipe.data.cache import adopt, audit, garbage, index, layout, object_store, scratch, shard
from sana_pipe.data.cache.cache import Cache, Unit
from sana_pipe.data.cache.contradictions import contradictions
from sana_pipe.data.cache.files import Files
from sana_pipe.data.cache.findings import damage_only, skip_damaged
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.cache.lost import repair_documents
from sana_pipe.data.cache.status import status
from sana_pipe.data.loader.inputs import Inputs
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.snapshots import opening
from tests.support import tiny_cache
from tests.support.damage import flip
from tests.support.messages import naming
from tests.support.packed import pack
from tests.support.parameters import first_quick
from tests.support.synthetic import with_another

MakeConfig = Callable[..., Config]
OLD = 10 * STALE_TMP_S


BOTH = pytest.mark.parametrize("cache", ["disk", "objects"], indirect=True)
BOTH_IN_TIME = pytest.mark.parametrize(
    "cache", ["disk", pytest.param("objects", marks=pytest.mark.slow)], indirect=True
)


@pytest.fixture
def cache(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """A small cache in which every file is old."""
    if getattr(request, "param", "disk") == "disk":
        made = tiny_cache.build(tmp_path / "cache", {(16, 16): 6, (16, 24): 4})
    else:
        monkeypatch.setenv("HOME", str(tmp_path))
        url = f"{request.getfixturevalue('s3_bucket')}/{uuid4().hex}"
        made = tiny_cache.build(url, {(16, 16): 6, (16, 24): 4})  # type: ignore[arg-type]
    age(made.files)
    collect(made)
    return made


def age(files: Files, *names: str) -> None:
    """Make files, or all, old."""
    for name in names or [entry.name for entry in files.walk("")]:
        if not files.on_disk:
            from moto.s3.models import s3_backends

            bucket, _, place = files.where("").removeprefix("s3://").partition("/")
            [of] = [
                b
                for account in s3_backends.values()
                for part in account.values()
                for b in [part.buckets]
                if bucket in b
            ]
            of[bucket].keys[f"{place}/{name}"].last_modified -= datetime.timedelta(seconds=OLD)
        else:
            past = files.now() - OLD
            os.utime(files.path(name), (past, past))


def a_shard(cache: Cache, seed: int = 0, unit: str = f"{0:032x}") -> str:
    """Publish a shard without a commit, of a unit that is committed with another: what a late worker leaves."""
    latent, _ = tiny_cache.encodings()
    values = np.random.default_rng(seed).integers(0, 0x7F80, (2, 2, 2), np.uint16)
    with shard.ShardWriter(cache.files, latent, unit) as writer:
        writer.add(latent.key(bytes(16), 16, 16), values)
        return Paths.shard(latent.name, writer.finish()[0])


def racing(cache: Cache, monkeypatch: pytest.MonkeyPatch, action: Callable[[str], object], at: str = "discard") -> None:
    """Run an action with the name of each file right before gc asks for its removal."""
    real = getattr(type(cache.files), at)

    def hooked(files: Files, name: str, *rest: object) -> object:
        action(name)
        return real(files, name, *rest)

    monkeypatch.setattr(type(cache.files), at, hooked)


def collect(cache: Cache) -> list[str]:
    result = list(garbage.unneeded(cache))
    return [name for name, _, _ in garbage.remove(cache, result, STALE_TMP_S)]


# ---------------------------------------------------------------- absence is no proof


def test_a_lost_document_is_no_permission(cache: Cache, capsys: pytest.CaptureFixture[str]) -> None:
    config = load("tiny", [f"cache={cache.root}"])
    for lost in [*cache.root.glob("segments/*/*.json"), *cache.root.glob("encodings/*.json")]:
        both = [lost, cache.root / "copies" / lost.relative_to(cache.root)]
        data = [path.read_bytes() for path in both]
        for path in both:
            path.unlink()
        before = sorted(path for path in cache.root.rglob("*") if path.is_file())
        with pytest.raises(IntegrityError) as error:
            sana_pipe.stages.gc.run(config, yes=True, older_than_hours=0)
        assert "encode" in str(error.value)
        assert sorted(path for path in cache.root.rglob("*") if path.is_file()) == before
        for path, content in zip(both, data, strict=True):
            path.write_bytes(content)
    assert sana_pipe.stages.gc.run(config, yes=True, older_than_hours=0) == 0
    assert not list(audit.verify(cache))


def unneeded_or_contradiction(cache: Cache) -> object:
    try:
        return list(garbage.unneeded(cache))
    except IntegrityError as error:
        return error.what


@pytest.mark.parametrize("theirs", [f"{0:032x}", "e" * 32], ids=["fork", "other"])
def test_an_adoption_that_was_stopped_stops_gc_until_its_unit_is_committed(theirs: str, cache: Cache) -> None:
    """The head of an adopted shard names its unit in the other cache. A fork of this cache has units of this one."""
    encoding = tiny_cache.encodings()[0].name
    adopted = a_shard(cache, 1, theirs)
    unit = index.adopted_unit(encoding, Path(adopted).stem)
    rows = cache.table(cache.plan(encoding, 0).table).slice(0, 1)
    assert cache.add_plan(encoding, 1, [Unit(unit, 0, 1, 1)], rows)
    assert [finding.path for finding in contradictions(cache)] == [adopted]
    repair_documents(cache)
    assert [finding.path for finding in contradictions(cache)] == [adopted]
    ours = a_shard(cache, 2, unit)
    made = Path(ours).stem, cache.files.path(ours).stat().st_size, shard.read_table(cache.files, ours)
    assert index.publish_commit(cache.files, encoding, 1, index.commit_of(cache.files, unit, made))
    assert not list(contradictions(cache))
    age(cache.files)
    assert collect(cache).count(adopted) == 1


@pytest.mark.parametrize("why", [errno.EIO, errno.EACCES])
def test_a_head_that_cannot_be_read_is_no_permission(why: int, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    orphan, real = a_shard(cache, unit="e" * 32), os.preadv

    def preadv(descriptor: int, views: Any, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(orphan):
            raise OSError(why, os.strerror(why))
        return real(descriptor, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    assert [finding.path for finding in contradictions(cache)] == [orphan]
    monkeypatch.setattr(os, "preadv", real)
    cache.files.path(orphan).write_bytes(b"no shard")
    assert not list(contradictions(cache))


def test_a_document_that_was_readable_a_moment_ago_is_no_permission(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plans(cache: Cache, encoding: str) -> object:
        raise CacheError("cannot be read: too many open files")

    monkeypatch.setattr(Cache, "plans", plans)
    with pytest.raises(CacheError):
        list(contradictions(cache))


def test_a_file_that_is_here_is_not_asked_of_the_other_cache(cache: Cache, tmp_path: Path) -> None:
    other = Cache(tmp_path / "other", create=True)
    name = a_shard(cache)
    adopt.bring(cache.files, other.files, name, Path(name).stem)
    flip(cache.files.path(name), -1)
    with pytest.raises(IntegrityError, match=naming(tmp_path / "other" / name, "verify --repair")):
        adopt.bring(cache.files, other.files, name, Path(name).stem)


@pytest.mark.parametrize("stray", [".nfs000000000001a2b300000007", ".DS_Store", "00000000.json~"])
def test_stray_files_between_the_documents_are_no_documents(stray: str, cache: Cache) -> None:
    folders = {path.parent for top in layout.DOCUMENTS for path in cache.root.glob(f"{top}/**/*.json")}
    folders |= {cache.root / top for top in layout.DOCUMENTS}
    folders |= {path.parent for depth in ("*/*", "*/*/*") for path in cache.root.glob(f"units/{depth}")}
    for folder in folders:
        folder.mkdir(exist_ok=True)
        (folder / stray).write_bytes(b"stray")
    (cache.root / "units" / tiny_cache.encodings()[0].name / f"{stray}.d").mkdir()
    assert list(garbage.unneeded(cache)) == [] and list(audit.verify(cache)) == []
    repair_documents(cache)
    counts(cache)
    assert list(audit.verify(cache)) == []


@BOTH_IN_TIME
def test_files_of_others_in_any_folder_are_neither_damage_nor_garbage(cache: Cache) -> None:
    files, before = cache.files, counts(cache)
    listed = [entry.name for entry in files.walk("")]
    folders = {name.rpartition("/")[0] for name in listed} | {"tmp", "claims", "fragments/x", "shards/.Trash"}
    strays = [
        f"{folder}/{name}".lstrip("/") for folder in folders for name in (".nfs0000000000deadbeef", "._00000000.json")
    ]
    strays += [re.sub("([^/]+)$", r"._\1", name) for name in listed]
    for name in strays:
        files.replace(name, b"Mac OS X")
    age(files, *strays)
    assert [entry.name for entry in files.walk("")] == listed
    assert list(audit.verify(cache)) == [] and counts(cache) == before and collect(cache) == []
    assert files.sweep() == 0 and all(files.has_file(name) for name in strays)


@pytest.mark.parametrize("kind", [AwayError, NoSpaceError, ResourceError])
def test_what_says_nothing_about_a_file_is_no_damage(kind: type[CacheError]) -> None:
    with pytest.raises(kind):
        damage_only(kind("away"))
    with pytest.raises(kind), skip_damaged():
        raise kind("away")


def test_a_limit_of_this_machine_is_no_fault_of_a_file(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot, files = cache.open_snapshot(), cache.files
    path = next(entry.name for entry in files.walk("shards/" + snapshot.encoding(LatentEncoding).name))
    table = next(entry.name for entry in files.walk("tables"))
    name, row = Path(path).stem, shard.read_table(files, path).to_pylist()[0]
    into = np.empty((row["channels"], row["height"], row["width"]), np.uint16)
    reader = shard.ShardReader(files, snapshot.encoding(LatentEncoding).name)
    monkeypatch.setattr(scratch, "LIMIT", 0)

    def exhausted(*args: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    for place, attribute, look in (
        (os, "scandir", lambda: list(files.walk("shards"))),
        (disk, "digest_of", lambda: files.mapped(table, Path(table).stem)),
        (disk.Handle, "file", lambda: shard.read_table(files, path)),
        (disk.Handle, "read_into", lambda: reader.read(name, row["offset"], row["key"], row["checksum"], into)),
    ):
        look()
        with monkeypatch.context() as patch, pytest.raises(ResourceError, match=naming("ulimit -v")):
            patch.setattr(place, attribute, exhausted)
            look()


def counts(cache: Cache) -> object:
    return {**status(cache, 0.0), "free_bytes": None}


@pytest.mark.parametrize("lost", [(), ("plans",), ("segments", "units")], ids=["whole", "no-plan", "no-commits"])
@pytest.mark.parametrize(
    "look", [unneeded_or_contradiction, lambda cache: list(audit.verify(cache)), counts], ids=["gc", "verify", "status"]
)
@pytest.mark.parametrize(
    "error", first_quick(AwayError("no answer"), OSError(errno.EMFILE, "no descriptors")), ids=["away", "full"]
)
def test_storage_that_does_not_answer_changes_no_finding(
    look: Callable[[Cache], object],
    lost: tuple[str, ...],
    error: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever request is not answered or finds no file descriptor (of `verify` and `status` every third is tried):
    the answer is the same, or the command ends."""
    made = tiny_cache.build(tmp_path / "cache", {(16, 16): 1})
    a_shard(made, unit=("e" if lost else "0") * 32)
    for folder in [f"{top}{name}/{tiny_cache.encodings()[0].name}" for top in ("", "copies/") for name in lost]:
        shutil.rmtree(made.root / folder)
    flip(next(made.root.glob("shards/text-*/*/*.tar")), -1)
    head = Paths.snapshot(unnamed(made))
    age(made.files)
    made.files.refresh(head)
    expected, real, asked, k = look(Cache(made.root)), retrying.when_reachable, [0], 1

    def when_reachable(read: Callable[[], object], *rest: Any) -> object:
        asked[0] += 1
        if asked[0] == k:
            raise error
        return real(read, *rest)

    monkeypatch.setattr(retrying, "when_reachable", when_reachable)
    failed, step = True, 1 if look is unneeded_or_contradiction else 3
    while failed:
        asked[0] = 0
        with suppress(AwayError, ResourceError):
            assert look(Cache(made.root)) == expected
        failed, k = asked[0] >= k, k + step
    assert k > 20


def test_a_head_that_becomes_unreadable_after_the_search_for_contradictions_is_no_permission(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = Paths.snapshot(cache.open_snapshot().id)

    def whole(of: Cache) -> Iterator[object]:
        for path in (name, Paths.copy(name)):
            flip(of.files.path(path), 100)
        return iter(())

    monkeypatch.setattr(garbage, "contradictions", whole)
    with pytest.raises(IntegrityError, match=naming(name)):
        list(garbage.unneeded(cache))


# ---------------------------------------------------------------- used again at the same moment


@BOTH_IN_TIME
def test_a_shard_that_is_made_again_while_gc_removes_it_stays(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    needed, other = a_shard(cache), a_shard(cache, 1)
    age(cache.files, needed, other)
    made = []

    def again(name: str) -> None:
        if name == needed and not made:
            made.append(a_shard(cache))  # the file is there: it is used again

    racing(cache, monkeypatch, again)
    assert collect(cache) == [other]
    assert made == [needed] and cache.files.exists(needed)
    assert collect(cache) == [], "it is young now"


@BOTH_IN_TIME
def test_a_table_that_is_put_again_while_gc_removes_it_stays(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = cache.files.put_content(b"content", "tables", "arrow")
    name = Paths.table(digest, "arrow")
    age(cache.files, name)
    racing(cache, monkeypatch, lambda own: own == name and cache.files.put_content(b"content", "tables", "arrow"))
    assert collect(cache) == [] and cache.files.read(name) == b"content"


@pytest.mark.parametrize("put", ["put_content", "put_table"])
def test_a_table_that_is_put_again_is_as_young_as_a_new_one(put: str, cache: Cache) -> None:
    table = pa.table({"a": [1]})

    def again() -> str:
        if put == "put_table":
            digest = cache.put_table(table)
            return Paths.table(digest, "parquet") if cache.table(digest) == table else ""
        return Paths.table(cache.files.put_content(b"content", "tables", "arrow"), "arrow")

    name = again()
    age(cache.files, name)
    assert again() == name
    assert cache.files.now() - cache.files.path(name).stat().st_mtime < 3600


def test_a_link_to_a_disk_that_is_not_mounted_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, tries, real = Files(tmp_path / "cache"), [0], Files.refresh

    def refresh(files: Files, name: str) -> bool:
        tries[0] += 1
        assert tries[0] < 9
        return real(files, name)

    monkeypatch.setattr(Files, "refresh", refresh)
    path = files.path(Paths.table(files.put_content(b"content", "tables", "arrow"), "arrow"))
    for link in (path, path.parent, path.parent.parent):
        shutil.rmtree(link) if link.is_dir() else link.unlink()
        link.symlink_to(tmp_path / "away" / link.name)
        with pytest.raises(CacheError, match=naming(link)):
            files.put_content(b"content", "tables", "arrow")


@pytest.mark.parametrize("young", ["claims/fragments/running/c.json", "fragments/running/z.json"])
def test_the_pieces_of_a_scan_that_goes_on_stay(young: str, cache: Cache) -> None:
    pieces = {of: [f"fragments/{of}/a.json", f"fragments/{of}/{'0' * 32}.arrow"] for of in ("running", "ended")}
    for name in chain(*pieces.values()):
        cache.files.replace(name, b"{}")
        age(cache.files, name)
    cache.files.replace(young, b"{}")
    assert collect(cache) == sorted(pieces["ended"])
    age(cache.files, young)
    assert collect(cache) == sorted([*pieces["running"], young])


def test_at_just_its_age_a_file_goes(cache: Cache) -> None:
    names = {a_shard(cache), "fragments/ended/a.json", Paths.snapshot(unnamed(cache))}
    cache.files.replace("fragments/ended/a.json", b"{}")
    for name in names:
        os.utime(cache.files.path(name), (1e6, 1e6))
    assert not list(garbage.unneeded(cache, STALE_TMP_S, 1e6 + STALE_TMP_S - 1))
    listed = list(garbage.unneeded(cache, STALE_TMP_S, 1e6 + STALE_TMP_S))
    assert {name for name, _, _ in listed} == names
    assert garbage.remove(cache, listed, STALE_TMP_S, 1e6 + STALE_TMP_S) == listed


def test_a_long_name_can_be_discarded(tmp_path: Path) -> None:
    files, name = Files(tmp_path), f"fragments/{'é' * 100}/0.json"
    files.replace(name, b"{}")
    assert files.discard(name, files.now() + 1) and not files.has_file(name)


def test_a_cache_behind_a_link_to_nothing_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "cache").symlink_to(tmp_path / "away")
    with pytest.raises(CacheError, match=naming(tmp_path / "cache", "--set cache=DIR")):
        Cache(tmp_path / "cache", create=True)


def test_a_commit_that_appears_meanwhile_is_seen(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a writer that does not refresh: what refers to a file is read again."""
    left = a_shard(cache)
    age(cache.files, left)
    latent = tiny_cache.encodings()[0].name
    result = list(garbage.unneeded(cache))
    assert left in [name for name, _, _ in result]
    cache.add_plan(latent, 1, [], pa.table({"key": pa.array([], pa.binary(16))}))
    index.publish_commit(cache.files, latent, 1, index.Commit("f" * 32, Path(left).stem, 1, 1, None, (), {}))
    assert left not in [name for name, _, _ in garbage.remove(cache, result, STALE_TMP_S)]
    assert cache.files.exists(left)


def test_the_references_are_read_again_by_time_and_not_by_number_of_files(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, readings, real = [0.0], list[float](), garbage.Needed

    def needed(of: Cache, before: float) -> object:
        readings.append(now[0])
        return real(of, before)

    monkeypatch.setattr(garbage, "Needed", needed)
    left = [a_shard(cache, number) for number in range(3)]
    age(cache.files, *left)
    many = [(f"tables/{number:032x}.arrow", 1, "") for number in range(1001)]
    garbage.remove(cache, many, STALE_TMP_S, clock=lambda: now[0])
    assert readings == [0.0]
    readings.clear()
    latent, of = tiny_cache.encodings()[0].name, sorted(left)

    def committed(name: str) -> None:
        """By a writer that does not refresh, long after the references were read."""
        if name == of[0]:
            cache.add_plan(latent, 1, [], pa.table({"key": pa.array([], pa.binary(16))}))
            commit = index.Commit("f" * 32, Path(of[2]).stem, 1, 1, None, (), {})
            index.publish_commit(cache.files, latent, 1, commit)
        now[0] += garbage.REREAD_S / 2 + 1

    racing(cache, monkeypatch, committed)
    listed = [(name, 1, "") for name in of]
    removed = garbage.remove(cache, listed, STALE_TMP_S, clock=lambda: now[0])
    assert [name for name, _, _ in removed] == of[:2]
    assert readings == [0.0, garbage.REREAD_S + 2]


def unnamed(cache: Cache) -> str:
    """A snapshot with a table of its own that no name points to, everything old; its id."""
    first = cache.open_snapshot().id
    head = replace(cache.open_snapshot().head, parent=None)
    chunk = cache.files.put_content(b"of that snapshot alone", "tables", "parquet")
    other = cache.add_snapshot(replace(head, sources={"gone": chunk}), None)
    cache.point("latest", first)
    age(cache.files, Paths.snapshot(other), Paths.table(chunk, "parquet"))
    return other


def test_a_snapshot_that_is_named_while_gc_removes_it_stays_whole(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = unnamed(cache)
    racing(cache, monkeypatch, lambda name: name == Paths.snapshot(other) and cache.keep(other))
    assert collect(cache) == []
    assert cache.open_snapshot(other[:9]).id == other and not list(audit.verify(cache))


def test_a_head_goes_before_what_it_refers_to(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    other = unnamed(cache)
    gone: list[str] = []
    racing(cache, monkeypatch, gone.append)
    removed = collect(cache)
    assert removed == gone and removed[0] == Paths.snapshot(other) and len(removed) == 2
    assert not cache.files.exists(Paths.snapshot(other)), "its copy is gone, too"
    with pytest.raises(IntegrityError, match="bucket"):
        cache.point("late", other)
    assert cache.snapshot_of("late") is None


def test_a_pack_is_in_use_while_one_of_its_snapshots_has_a_name(cache: Cache) -> None:
    source, ids = cache.open_snapshot().id, dict[str, str]()
    for window in (2, 3):
        ids[f"of-{window}"] = pack(cache, window=window).id
        cache.point("latest", source)
    [folder] = {cache.open_snapshot(packed).head.folder for packed in ids.values()}
    for name, packed in ids.items():
        cache.point(name, packed)
        [*of_pack] = [path for path, _, _ in garbage.unneeded(cache, 0) if f"/{folder}/" in path]
        assert not of_pack
        cache.forget_name(name)


def test_of_a_head_that_was_lost_the_copy_counts(cache: Cache) -> None:
    other = unnamed(cache)
    cache.files.store.remove(Paths.snapshot(other))
    assert collect(cache) == [], "what it refers to stays"
    cache.point("mine", other)
    assert cache.open_snapshot("mine").id == other and not list(audit.verify(cache))


def test_an_adopted_file_is_as_young_as_a_new_one(tmp_path: Path) -> None:
    there = tiny_cache.build(tmp_path / "there", {(16, 16): 6})
    age(there.files)
    here = Files(tmp_path / "here")
    name = next(there.files.walk("shards")).name
    for _ in range(2):
        adopt.bring(here, there.files, name, Path(name).stem)
        assert here.now() - next(here.walk("shards")).modified < 3600
        age(here, name)
    assert here.path(name).stat().st_ino == there.files.path(name).stat().st_ino, "it is linked"


@BOTH_IN_TIME
def test_the_stores_clock_counts(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    young, old = a_shard(cache), a_shard(cache, 1)
    age(cache.files, old)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + OLD)
    assert collect(cache) == [old]
    monkeypatch.setattr(time, "time", lambda: real() - OLD)
    age(cache.files, young)
    assert collect(cache) == [young]


# ---------------------------------------------------------------- temporary files


def test_the_command_goes_by_the_stores_clock(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    young, real = a_shard(cache), time.time
    monkeypatch.setattr(time, "time", lambda: real() + OLD)
    sana_pipe.stages.gc.run(load("tiny", [f"cache={cache.root}"]), yes=True)
    assert cache.files.exists(young)


def test_an_object_goes_by_its_age_and_the_stores_clock(
    s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    files = Files(f"{s3_bucket}/{uuid4().hex}")
    name, began, real = Paths.table(files.put_content(b"content", "tables", "arrow"), "arrow"), time.time(), time.time
    monkeypatch.setattr(time, "time", lambda: real() + OLD)
    assert abs(files.now() - began) < 3600
    with monkeypatch.context() as patch:
        patch.setattr(object_store, "CHANGE_TIMES", ())
        assert not files.discard(name, began + 3600), "of unknown age: never old"
    age(files, name)
    assert files.refresh(name)
    assert not files.discard(name, files.now() - STALE_TMP_S) and files.has_file(name)
    age(files, name)
    assert files.discard(name, files.now() - STALE_TMP_S) and not files.has_file(name)


def test_a_live_process_keeps_its_temporary_files(tmp_path: Path) -> None:
    files = Files(tmp_path)
    if not process_identity.place():
        pytest.skip("this system has no /proc to ask about processes")
    with files.temporary() as mine:
        mine.write_bytes(b"slowly")
        machine, process, started, last = mine.name.split("-")
        dead = mine.with_name(f"{machine}-{process}-{int(started) + 1}-{last}")
        elsewhere = mine.with_name(f"{'0' * 16}-{process}-{started}-{last}")
        for path in (dead, elsewhere, mine.with_name("4d2-of-an-older-version")):
            path.write_bytes(b"x")
        age(files)
        young = mine.with_name(f"{'1' * 16}-{process}-{started}-{last}")
        young.write_bytes(b"x")
        assert files.sweep() == 3
        assert set(files.names("tmp")) == {mine.name, young.name}


def test_a_sweep_leaves_what_an_nfs_client_keeps_open(tmp_path: Path) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()
    for name in (".nfs00000000deadbeef00000001", "of-another-machine"):
        (folder / name).write_bytes(b"x")
        os.utime(folder / name, (1, 1))
    assert Files(tmp_path).sweep() == 1
    assert os.listdir(folder) == [".nfs00000000deadbeef00000001"]


def test_a_sweep_goes_by_the_stores_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files(tmp_path)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / "of-another-machine").write_bytes(b"x")
    monkeypatch.setattr(time, "time", lambda: 1e10)
    assert files.sweep() == 0
    age(files)
    assert files.sweep() == 1


def test_a_shard_that_is_written_slowly_shows_that_it_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path / "cache", create=True)
    latent, _ = tiny_cache.encodings()
    with shard.ShardWriter(cache.files, latent, "0" * 32) as writer:
        [name] = [entry.name for entry in cache.files.walk("tmp")]
        age(cache.files, name)
        writer.add(bytes(16), np.zeros((2, 2, 2), np.uint16))
        assert time.time() - cache.files.path(name).stat().st_mtime > STALE_TMP_S, "what is buffered shows nothing"
        monkeypatch.setattr(shard, "TOUCH_S", 0)
        writer.add(bytes([1] * 16), np.zeros((2, 2, 2), np.uint16))
        assert time.time() - cache.files.path(name).stat().st_mtime < 3600


def test_a_hidden_process_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """With hidepid, /proc shows no other user's processes; a signal to one is refused."""
    here = process_identity.place()
    if not here:
        pytest.skip("this system has no /proc to ask about processes")
    assert not process_identity.ended(here["process"], here["started"])
    assert process_identity.ended(here["process"], "12") and process_identity.ended("999999999", "12")

    def hidden(process: str) -> tuple[str, str]:
        raise FileNotFoundError(process)

    monkeypatch.setattr(process_identity, "stat_of", hidden)
    assert process_identity.ended("999999999", "12"), "nobody has this number"

    def refused(process: int, signal: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refused)
    assert not process_identity.ended("4711", "12")


# ---------------------------------------------------------------- the store


def test_new_folders_outlive_a_loss_of_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each folder's entry is synced in its parent before a file in it counts as published."""
    synced: list[Path] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    files = Files(tmp_path / "a" / "cache")
    files.put("claims/r/00000000/u.json", b"x")
    for folder in (tmp_path, tmp_path / "a", files.root, files.root / "claims", files.root / "claims/r"):
        assert folder in synced
    assert synced[-1] == files.root / "claims/r/00000000"


# ---------------------------------------------------------------- names


def test_a_name_stays_until_it_is_moved(tmp_path: Path) -> None:
    cache = tiny_cache.build(tmp_path / "cache", {(16, 16): 6})
    first = cache.open_snapshot()
    head = replace(first.head, parent=None)
    assert cache.add_snapshot(head, "r1") == first.id
    with pytest.raises(UserError) as error:
        cache.add_snapshot(replace(head, left_out={"x": 1}), "r1")
    assert "--move" in str(error.value) and error.value.found == first.id
    assert cache.snapshot_of("r1") == cache.snapshot_of("latest") == first.id, "nothing was named in part"
    second = cache.add_snapshot(replace(head, left_out={"x": 1}), "r1", move=True)
    assert second != first.id and cache.snapshot_of("r1") == cache.snapshot_of("latest") == second
    assert cache.add_snapshot(replace(head, left_out={"x": 2}), None) == cache.snapshot_of("latest") != second


def test_a_new_snapshot_reads_no_head_that_only_older_names_pointed_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tiny_cache.build(tmp_path / "cache", {(16, 16): 6})
    head = replace(cache.open_snapshot().head, parent=None)
    made = [cache.add_snapshot(replace(head, left_out={"x": number}), None) for number in range(4)]
    cache.point("mine", made[1])
    opened, real = set[str](), Files.document

    def document(self: Files, name: str) -> dict:
        opened.update([Path(name).stem] if name.startswith("snapshots/") else [])
        return real(self, name)

    monkeypatch.setattr(Files, "document", document)
    newest = cache.add_snapshot(replace(head, left_out={"x": 4}), None)
    assert opened - {newest} == {made[3]}


def test_bucket_refuses_a_name_that_points_elsewhere(
    small_cache_copy: Path, make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(small_cache_copy.parent)
    first = sana_pipe.stages.bucket.run(config, name="r1")
    assert sana_pipe.stages.bucket.run(config, name="r1") == first
    other = make_config(small_cache_copy.parent, "bucket.batch=6")
    with pytest.raises(UserError):
        sana_pipe.stages.bucket.run(other, name="r1")
    assert Cache(config.cache).snapshot_of("r1") == Cache(config.cache).snapshot_of("latest") == first
    second = sana_pipe.stages.bucket.run(other, name="r1", move=True)
    assert Cache(config.cache).snapshot_of("r1") == second != first
    assert sana_pipe.stages.snapshots.name(config, first[:10], "old") == 0
    assert Cache(config.cache).snapshot_of("old") == first
    with pytest.raises(UserError):
        sana_pipe.stages.snapshots.name(config, first, "r1")
    assert sana_pipe.stages.snapshots.name(config, second, "latest") == 0, "it points there already"


def test_a_name_is_forgotten_and_may_be_given_again(
    cache: Cache, make_config: MakeConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = unnamed(cache)
    cache.keep(other)
    name = f"trained-{other[:16]}"
    age(cache.files)
    assert collect(cache) == []
    with pytest.raises(UserError):
        cache.forget_name("latest")
    with pytest.raises(CacheError):
        cache.forget_name(other)
    assert cache.forget_name(name) == other
    assert cache.snapshot_of(name) is None and name not in cache.snapshot_names() and not list(audit.verify(cache))
    with pytest.raises(CacheError):
        cache.forget_name(name)
    cache.keep(other)
    assert cache.snapshot_of(name) == other, "a forgotten name is given again"
    cache.forget_name(name)
    age(cache.files)
    assert Paths.snapshot(other) in collect(cache)
    assert not list(audit.verify(cache)) and not list(contradictions(cache))


def test_a_forgotten_source_is_in_no_new_snapshot(
    make_config: MakeConfig, photos: Path, small_cache_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(small_cache_copy.parent)
    cache = Cache(config.cache)
    before = sana_pipe.stages.bucket.run(config, name="with")
    assert sana_pipe.stages.forget.run(config, source="photos") == 0
    assert list(garbage.unneeded(cache, 0)) and "sana-pipe gc lists" in capsys.readouterr().out
    with pytest.raises(CacheError):
        sana_pipe.stages.forget.run(config, source="photos")
    with pytest.raises(CacheError, match="no source"):
        sana_pipe.stages.bucket.run(config)
    assert "photos" not in status(cache)["sources"]
    table = cache.files.document("sources/photos/00000000.json")["table"]
    assert Paths.table(table, "parquet") not in [name for name, _, _ in garbage.unneeded(cache, 0)], "a snapshot's"
    cache.point("latest", before)
    sana_pipe.stages.gc.run(config, yes=True, older_than_hours=0)
    assert not list(audit.verify(cache))
    assert cache.open_snapshot("with").id == before
    done = sana_pipe.stages.encode.run(config, data=str(photos))
    assert (done["images"], done["captions"]) == (0, 0), "its records are still there"
    assert sana_pipe.stages.bucket.run(config) == before


def test_gc_removes_the_scans_of_a_forgotten_source(tmp_path: Path) -> None:
    cache = tiny_cache.build(tmp_path / "cache", {(16, 16): 6})
    tables = [cache.put_table(pa.table({"item": [f"{i}"], "reject": pa.array([None], pa.string())})) for i in range(2)]
    latent, text = (encoding.name for encoding in tiny_cache.encodings())
    for table in tables:
        cache.add_scan(
            "s",
            {"source": "s", "root": "/", "table": table, "encodings": {"latent": latent, "text": text}, "buckets": []},
        )
    age(cache.files)
    assert {name.partition("/")[0] for name in collect(cache)} == {"units"}
    cache.forget_source("s")
    assert cache.last_scan("s") is None
    assert set(collect(cache)) == {Paths.table(table, "parquet") for table in tables}
    assert not list(audit.verify(cache)) and not list(contradictions(cache))
    cache.add_scan(
        "s",
        {
            "source": "s",
            "root": "/",
            "table": cache.put_table(pa.table({"item": ["2"]})),
            "encodings": {"latent": latent, "text": text},
            "buckets": [],
        },
    )
    assert cache.last_scan("s") is not None and not list(audit.verify(cache))


def test_a_source_is_forgotten_though_its_table_is_damaged(tmp_path: Path) -> None:
    cache = tiny_cache.build(tmp_path / "cache", {(16, 16): 6})
    table = cache.put_table(pa.table({"item": ["a"], "reject": pa.array([None], pa.string())}))
    latent, text = (encoding.name for encoding in tiny_cache.encodings())
    cache.add_scan(
        "s", {"source": "s", "root": "/", "table": table, "encodings": {"latent": latent, "text": text}, "buckets": []}
    )
    cache.files.path(Paths.table(table, "parquet")).write_bytes(b"PAR1")
    cache = Cache(tmp_path / "cache")
    cache.forget_source("s")
    assert cache.last_scan("s") is None and "s" not in status(cache)["sources"]


def test_another_users_file_is_freshened_by_a_copy_that_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, calls = Files(tmp_path), []
    files.now()  # makes the folder of temporary files, which is synced, too
    (tmp_path / "a").write_bytes(b"data")
    before = (tmp_path / "a").stat().st_ino

    def denied(*args: object, **kwargs: object) -> None:
        raise PermissionError(1, "not yours")

    real = os.replace
    monkeypatch.setattr(os, "utime", denied)
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append("sync"))
    monkeypatch.setattr(os, "replace", lambda *names: (calls.append("replace"), real(*names)))
    assert files.refresh("a")
    assert calls == ["sync", "replace", "sync"], "the file before it is renamed, the folder behind it"
    assert (tmp_path / "a").stat().st_ino != before and (tmp_path / "a").read_bytes() == b"data"
    monkeypatch.setattr(shutil, "copyfileobj", lambda source, target, *_: target.write(b"dat"))
    with pytest.raises(IntegrityError):
        files.refresh("a")
    assert (tmp_path / "a").read_bytes() == b"data"


def test_a_pack_whose_name_cannot_be_given_is_refused_before_it_is_made(
    small_cache_copy: Path, make_config: MakeConfig
) -> None:
    config = make_config(small_cache_copy.parent)
    sana_pipe.stages.bucket.run(config, name="taken")
    for name in ("my pack", "taken"):
        with pytest.raises(UserError):
            sana_pipe.stages.pack.run(config, name=name)
        assert not list(small_cache_copy.glob("shards/packed-*/*/*.tar"))


# ---------------------------------------------------------------- trainers


def read_only(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bool:
        raise CacheError("cannot be written: Read-only file system")

    for name in ("put", "refresh"):
        monkeypatch.setattr(type(files), name, refuse)


def test_a_snapshot_without_a_name_is_not_trained_on_where_none_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tiny_cache.build(tmp_path / "cache", {(16, 16): 6})
    found = cache.open_snapshot().id
    with monkeypatch.context() as patch:
        read_only(cache.files, patch)
        with pytest.raises(CacheError) as error:
            cache.keep(found)
        assert f"sana-pipe snapshots name {found[:12]}" in str(error.value)
    cache.point("mine", found)
    with monkeypatch.context() as patch:
        read_only(cache.files, patch)
        cache.keep(found)
    cache.forget_name("mine")
    cache.keep(found)
    with monkeypatch.context() as patch:
        read_only(cache.files, patch)
        cache.keep(found)


def test_everything_that_a_run_reads_is_kept(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    head, kept = cache.open_snapshot().head, list[str]()
    ids = [cache.add_snapshot(replace(head, left_out={"a reason": number}), None) for number in range(3)]
    monkeypatch.setattr(Cache, "keep", lambda _, snapshot, *run: kept.append(snapshot))
    monkeypatch.setattr(opening.heldout, "check_disjoint", lambda *_: None)
    trained, *heldout = map(cache.open_snapshot, ids)
    opening.keep(cache, Inputs(trained, 64, *heldout))
    assert kept == ids


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training ends where it would begin."""
    from sana_pipe.train.training import build

    def begin(*_: object) -> None:
        raise UserError("it begins")

    monkeypatch.setattr(build, "start_values", begin)


def test_a_refused_start_names_nothing(
    small_cache_copy: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, started: None
) -> None:
    config = make_config(small_cache_copy.parent)
    cache = Cache(config.cache)
    checkpoint = Path(config.train.output) / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    with pytest.raises(UserError, match=naming(config.train.output, "--resume auto")):
        sana_pipe.stages.train.run(config)
    assert cache.snapshot_names() == ["latest"]
    checkpoint.rmdir()
    with monkeypatch.context() as patch, pytest.raises(CacheError, match=naming("sana-pipe snapshots name")):
        read_only(cache.files, patch)
        sana_pipe.stages.train.run(config)
    with pytest.raises(UserError, match="it begins"):
        sana_pipe.stages.train.run(config)
    assert cache.snapshot_names() == ["latest", f"trained-{cache.open_snapshot().id[:16]}"]


# ---------------------------------------------------------------- what was lost comes back


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_encode_makes_records_again_whose_shard_is_missing(
    damage: str, small_cache_copy: Path, make_config: MakeConfig, photos: Path
) -> None:
    config = make_config(small_cache_copy.parent)
    cache = Cache(config.cache)
    lost = {}
    for kind in ("latent", "text"):
        path = max(small_cache_copy.glob(f"shards/{kind}-*/*/*.tar"), key=lambda p: p.stat().st_size)
        encoding = cache.encodings(kind)[0].name
        [commit] = [c for c in index.commits(cache.files, encoding, 0) if c.shard == path.stem]
        lost[kind] = commit.records
        path.unlink()
        if damage == "cut":
            path.write_bytes(b"cut")
    with pytest.raises(IntegrityError, match="verify --repair"):
        sana_pipe.stages.bucket.run(make_config(small_cache_copy.parent, "bucket.batch=6"))
    done = sana_pipe.stages.encode.run(config, data=str(photos))
    assert (done["images"], done["captions"]) == (lost["latent"], lost["text"]), "these, and no others"
    again = sana_pipe.stages.encode.run(config, data=str(photos))
    assert (again["images"], again["captions"]) == (0, 0)
    sana_pipe.stages.bucket.run(config)
    opened = cache.open_snapshot()
    assert len(opened) == 12
    opened.check_shards()
    for kind in ("latent", "text"):
        assert (
            not cache.index(cache.encodings(kind)[0].name)
            .lost[cache.index(cache.encodings(kind)[0].name).columns["shard"]]
            .any()
        )


def test_a_lost_record_table_is_read_out_of_its_shard(cache: Cache) -> None:
    encoding = cache.encodings("latent")[0].name
    before = cache.index(encoding)
    segment = cache.files.document(Paths.segment(encoding, 0))
    names = [segment["table"], *(commit.table for commit in index.commits(cache.files, encoding, 0))]
    for name in names:
        cache.files.remove(Paths.table(name, "arrow"))
    for repairs in (False, True):
        cache.files.repairs = repairs
        result = cache.index(encoding)
        assert (result.keys == before.keys).all() and (result.columns["offset"] == before.columns["offset"]).all()
        assert cache.files.exists(Paths.table(names[0], "arrow")) == repairs


@pytest.mark.parametrize("left", [None, 512])
def test_bucket_brings_an_adopted_shard_again(tmp_path: Path, left: int | None) -> None:
    of = with_another(tmp_path)
    here, there = Path(of.cache), Path(of.bucket.caches[0])
    first = sana_pipe.stages.bucket.run(of)
    shards = {p.relative_to(here) for p in here.glob("shards/*/*/*.tar")} & {
        p.relative_to(there) for p in there.glob("shards/*/*/*.tar")
    }
    assert shards
    for name in shards:
        (here / name).unlink()  # it may be a link to the other cache's
        if left is not None:
            (here / name).write_bytes((there / name).read_bytes()[:left])
    assert sana_pipe.stages.bucket.run(of) == first
    assert all((here / name).read_bytes() == (there / name).read_bytes() for name in shards)
    assert not list(audit.verify(Cache(here)))


def test_a_lost_joint_shard_is_packed_again(
    small_cache_copy: Path, make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(small_cache_copy.parent)
    packed = sana_pipe.stages.pack.run(config, as_json=True)
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    lost = sorted(small_cache_copy.glob("shards/packed-*/*/*.tar"))[0]
    data = lost.read_bytes()
    lost.unlink()
    assert sana_pipe.stages.pack.run(config, name=summary["name"]) == packed
    assert lost.read_bytes() == data
