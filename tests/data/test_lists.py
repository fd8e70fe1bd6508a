"""Lists of documents as tables: the units of a plan and the commits of a segment."""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pytest

from sana_pipe.base.errors import IntegrityError
from sana_pipe.data.cache import audit, garbage, index, keys, layout
from sana_pipe.data.cache.cache import Cache, Unit, Units
from sana_pipe.data.cache.contradictions import contradictions
from sana_pipe.data.cache.folder_store import FolderStore
from sana_pipe.data.cache.keys import Digests
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.cache.lost import repair_documents
from sana_pipe.data.cache.snapshot_lists import publish
from sana_pipe.data.signals.latent import LatentEncoding
from tests.support import tiny_cache

ENCODING = LatentEncoding(weights="w")
DOCUMENTS = ["plans", "segments"]


def commits(count: int) -> list[index.Commit]:
    made_by = {"torch": "2", "threads": 1, "odd": 'ü "quoted" \\ \n', "nested": {"empty": [], "more": [1, {}]}}
    reject = index.RecordReject("00" * 16, "a\n ]\n.jpg", "unreadable")
    return [
        index.Commit(
            unit=f"{n:032x}",
            shard=f"{n * 7:032x}" if n % 3 else None,
            bytes=n << 33,
            records=n % 5,
            table=None if n % 2 else f"{n:032x}",
            rejects=(reject, index.RecordReject("ff" * 16, "b", "gone", retry=True)) * (n % 4 == 1),
            provenance=made_by if n % 7 else {},
        )
        for n in range(count)
    ]


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    """A snapshot whose plans are finished, as after `gc`."""
    cache = tiny_cache.build(tmp_path / "cache")
    for path in [*cache.root.glob("units/**/*.json"), *cache.root.glob("copies/units/**/*.json")]:
        path.unlink()
    return cache


def listed(cache: Cache, folder: str) -> tuple[str, str]:
    """The first document of a folder, and the table of its list."""
    name = sorted(path.relative_to(cache.root).as_posix() for path in cache.root.glob(f"{folder}/*/*.json"))[0]
    key = {"plans": "units", "segments": "commits"}[folder]
    return name, Paths.table(cache.files.document(name)[key]["table"], "arrow")


def lose(cache: Cache, table: str) -> None:
    for name in (table, Paths.copy(table)):
        cache.files.path(name).unlink()


@pytest.mark.parametrize("count", [0, 1, 7, 50])
@pytest.mark.parametrize("at_a_time", [1, 3, 4096])
def test_lists_give_back_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, at_a_time: int
) -> None:
    for module in ("index", "cache", "snapshot_lists"):
        monkeypatch.setattr(f"sana_pipe.data.cache.{module}.ENTRIES", at_a_time)
    files = Cache(tmp_path / "cache", create=True).files
    units = [Unit(f"{n:032x}", 3 * n, 3, 8) for n in range(count)]
    made = Units.read(files, publish(files, Units.table_of(iter(units))).values())
    assert len(made) == count and list(made) == units and made[1:] == units[1:]
    assert [made[n] for n in range(-count, count)] == units * 2
    with pytest.raises(IndexError):
        made[count]
    done = commits(count)
    assert list(index.Commits.read(files, publish(files, index.Commits.table_of(iter(done))).values())) == done


def test_equal_provenance_is_stored_once_and_is_one_object(tmp_path: Path) -> None:
    table = index.Commits.table_of(commits(50))
    assert len(table.column("provenance").chunk(0).dictionary) == 2
    assert len({id(commit.provenance) for commit in index.Commits.entries(table)}) == 2


def test_the_table_of_a_list_does_not_depend_on_how_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that merge the same commits write the same segment."""
    before = index.to_ipc(index.Commits.table_of(commits(50)))
    for module in ("index", "snapshot_lists"):
        monkeypatch.setattr(f"sana_pipe.data.cache.{module}.ENTRIES", 7)
    table = index.Commits.table_of(iter(commits(50)))
    assert index.to_ipc(table) == before
    assert index.to_ipc(index.Commits.table_of(index.Commits.entries_of(table))) == before


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("folder", DOCUMENTS)
def test_a_list_and_its_copy_exist_before_its_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, large: bool
) -> None:
    if large:
        monkeypatch.setattr("sana_pipe.data.cache.scratch.LIMIT", 1)
    published, create = list[str](), FolderStore.create
    monkeypatch.setattr(
        FolderStore, "create", lambda store, name, data: [create(store, name, data), published.append(name)][0]
    )
    cache = tiny_cache.build(tmp_path / "cache")
    name, table = listed(cache, folder)
    assert max(published.index(table), published.index(Paths.copy(table))) < published.index(name)


@pytest.mark.parametrize("which", ["table", "copy"])
@pytest.mark.parametrize("folder", DOCUMENTS)
def test_a_list_is_read_from_its_copy_and_repaired(cache: Cache, folder: str, which: str) -> None:
    before = {encoding.name: list(cache.plans(encoding.name)[0].units) for encoding in cache.encodings("latent")}
    _, table = listed(cache, folder)
    broken = table if which == "table" else Paths.copy(table)
    whole = cache.files.read(broken)
    cache.files.path(broken).write_bytes(whole[:-9])
    again = Cache(cache.root)
    assert {
        encoding.name: list(again.plans(encoding.name)[0].units) for encoding in again.encodings("latent")
    } == before
    assert len(again.index(next(iter(before)))) > 0
    assert not list(contradictions(again))
    [finding] = audit.verify(again)
    assert finding.path == broken and finding.fix == layout.REPAIR
    assert again.files.duplicate(table) and again.files.read(broken) == whole
    cache.files.path(broken).unlink()
    [finding] = audit.verify(again)
    assert finding.path == broken and "is missing" in finding.problem


@pytest.mark.parametrize("folder", DOCUMENTS)
def test_a_list_that_is_lost_twice_stops_gc_until_its_records_are_made_again(cache: Cache, folder: str) -> None:
    document, table = listed(cache, folder)
    lose(cache, table)
    again = Cache(cache.root)
    with pytest.raises(IntegrityError):
        list(garbage.unneeded(again, 0, again.files.now() + 9))
    assert document in {finding.path for finding in audit.verify(again)}
    assert document in repair_documents(again)
    with pytest.raises(IntegrityError):
        list(garbage.unneeded(again, 0, again.files.now() + 9))


def test_gc_spares_lists_and_removes_those_that_nothing_names(cache: Cache) -> None:
    left = publish(cache.files, Units.table_of([Unit("aa", 0, 1, 1)])).table
    later = cache.files.now() + 9
    unneeded = {name for name, _, _ in garbage.unneeded(cache, 0, later)}
    assert unneeded == {Paths.table(left, "arrow"), Paths.copy(Paths.table(left, "arrow"))}


def test_opening_a_long_plan_makes_no_object_for_each_unit(tmp_path: Path) -> None:
    cache, count = Cache(tmp_path / "cache", create=True), 20_000
    cache.add_encoding(ENCODING)
    units = (Unit(f"{n:032x}", n, 1, 1) for n in range(count))
    cache.add_plan(ENCODING.name, 0, units, pa.table({"key": pa.nulls(1, pa.binary(16))}))
    tracemalloc.start()
    try:
        [plan] = cache.plans(ENCODING.name)
        assert sum(unit.count for unit in plan.units) == len(plan.units) == count
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < count * 250, "4,096 units at a time; 2 KB for each would be 40 MB"


def test_digests_are_a_set_of_names() -> None:
    rng = random.Random(7)
    names = [rng.randbytes(16).hex() for _ in range(500)]
    names += ["00" * 16, "ff" * 16, "aa" * 15 + "00", "AB" * 16, "aa", "", "no digest", "ab " * 16]
    known, expected = Digests(names[:3]), set(names[:3])
    for name in names[3:]:
        assert (name in known) == (name in expected)
        known.update([name, name])
        expected.add(name)
        assert name in known and len(known) == len(expected)
    assert set(known) == expected and len(list(known)) == len(known)
    assert not any(name in known for name in ("01" * 16, "aa" * 16, "b", "aa" * 15 + "01"))


def test_digests_that_are_added_again_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """`gc` adds the shards of every snapshot."""
    monkeypatch.setattr(keys, "BATCH", 100)
    known, names = Digests(), [layout.digest(str(number)).hex() for number in range(200)]
    tracemalloc.start()
    try:
        for _ in range(200):
            known.update(names)
        assert len(known) == 200 and tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
