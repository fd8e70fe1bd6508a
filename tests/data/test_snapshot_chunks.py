"""Chunks of a snapshot: few are mapped at a time, each is checked once, and again if its file has changed."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import sana_pipe.stages.bucket
from sana_pipe.base import disk
from sana_pipe.base.disk import Handle, digest_of
from sana_pipe.base.errors import IntegrityError
from sana_pipe.data.cache import arrow, audit, compare
from sana_pipe.data.cache import snapshot as snapshots
from sana_pipe.data.cache.arrow import ipc_table
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.files import Files
from sana_pipe.data.cache.folder_store import FolderStore
from sana_pipe.data.cache.garbage import Needed
from sana_pipe.data.cache.layout import REPAIR, Paths
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.cache.snapshot_samples import CHUNK_ROWS
from sana_pipe.data.cache.status import status
from sana_pipe.data.loader.planner import Planner
from sana_pipe.data.snapshots import assemble
from tests.support import tiny_cache
from tests.support.damage import flip
from tests.support.synthetic import add, config, pictures

ROWS, OPEN = 5, 2


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Snapshot:
    monkeypatch.setattr(assemble, "CHUNK_ROWS", ROWS)
    monkeypatch.setattr(snapshots, "OPEN_CHUNKS", OPEN)
    add(config(tmp_path / "cache"), "one", pictures(40))
    return Cache(tmp_path / "cache").open_snapshot(sana_pipe.stages.bucket.run(config(tmp_path / "cache")))


def test_snapshots_are_compared_a_chunk_at_a_time(snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    of = config(snapshot.files.root)
    add(of, "two", pictures(7, "two-"))
    more = Cache(snapshot.files.root).open_snapshot(sana_pipe.stages.bucket.run(of))
    asked, real = list[int](), Snapshot.columns
    monkeypatch.setattr(compare, "CHUNK_ROWS", ROWS)
    monkeypatch.setattr(Snapshot, "columns", lambda self, rows: (asked.append(len(rows)), real(self, rows))[1])
    difference = compare.difference(snapshot, more)
    assert sorted(more.source_item(row)[0] for row in difference.added) == ["two"] * 7
    assert not difference.removed and not difference.changed
    assert sum(asked) == len(snapshot) + len(more) and max(asked) <= ROWS, "whole columns of all samples at once"


@pytest.fixture
def digests(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A list that grows with each file that is checked."""
    checked: list[object] = []

    def counted(handle: object) -> str:
        checked.append(handle)
        return digest_of(handle)  # type: ignore[arg-type]

    monkeypatch.setattr(disk, "digest_of", counted)
    return checked


def mapped(snapshot: Snapshot) -> int:
    """How many chunks of the snapshot this process has mapped."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("this system has no /proc to ask about mapped files")
    chunks = {digest for chunk in snapshot.head.chunks for digest in (chunk.samples, chunk.names)}
    folder = str(snapshot.files.path("tables").resolve())
    files = [Path(line.split()[-1]) for line in maps.read_text().splitlines() if folder in line]
    return sum(file.suffix == ".arrow" and file.stem in chunks for file in files)


READS: dict[str, Callable[[Snapshot, int], object]] = {
    "samples": lambda snapshot, row: snapshot.sample(row),
    "names": lambda snapshot, row: snapshot.source_item(row),
}


@pytest.mark.parametrize("which", READS)
def test_few_chunks_are_open_and_each_is_checked_once(snapshot: Snapshot, digests: list[object], which: str) -> None:
    chunks = len(snapshot.head.chunks)
    assert chunks == 8
    in_order = [READS[which](snapshot, row) for row in range(len(snapshot))]
    descriptors, before = len(os.listdir("/dev/fd")), mapped(snapshot)
    assert len(digests) == chunks and 0 < before <= OPEN
    for row in np.random.default_rng(0).permutation(np.repeat(np.arange(len(snapshot)), 3)).tolist():
        assert READS[which](snapshot, row) == in_order[row]
        assert mapped(snapshot) <= before
    assert len(digests) == chunks and len(os.listdir("/dev/fd")) == descriptors


def test_a_snapshot_that_is_let_go_of_maps_nothing(snapshot: Snapshot) -> None:
    gc.collect()
    gc.disable()  # it would unmap them, at some time
    try:
        opened = Cache(snapshot.files.root).open_snapshot(snapshot.id)
        opened.sample(0)
        opened.source_item(0)
        assert mapped(snapshot) == 2
        del opened
        assert mapped(snapshot) == 0
    finally:
        gc.enable()


def test_a_chunk_that_changes_while_it_is_checked_is_checked_again(
    snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = snapshot.files.path(Paths.table(snapshot.head.chunks[0].samples, "arrow"))

    def meanwhile(handle: Handle) -> str:
        digest = digest_of(handle)
        flip(path, path.stat().st_size // 2)
        return digest

    with monkeypatch.context() as patch:
        patch.setattr(disk, "digest_of", meanwhile)
        snapshot.sample(0)
    for row in range(ROWS, 4 * ROWS):  # other chunks, so that it is mapped again
        snapshot.sample(row)
    with pytest.raises(IntegrityError, match="do not match its name"):
        snapshot.sample(0)


def test_a_chunk_that_has_changed_since_is_checked_again(snapshot: Snapshot, digests: list[object]) -> None:
    for row in range(len(snapshot)):
        snapshot.sample(row)
    path = snapshot.files.path(Paths.table(snapshot.head.chunks[0].samples, "arrow"))
    shutil.copy(path, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)
    checked = len(digests)
    snapshot.sample(0)
    assert len(digests) == checked + 1
    for row in range(ROWS, len(snapshot)):
        snapshot.sample(row)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match="do not match its name"):
        for row in range(ROWS):
            snapshot.sample(row)


def test_a_check_reads_what_was_checked_before(snapshot: Snapshot, digests: list[object]) -> None:
    for _ in range(2):
        snapshot.check_chunk(0)
    assert len(digests) == 4


def test_a_folder_keeps_the_chunks_of_a_billion_samples_and_a_mirror_a_quarter_of_itself() -> None:
    assert snapshots.open_chunks(None) * CHUNK_ROWS >= 10**9
    assert snapshots.open_chunks(1 << 30) == 64
    assert 15 << 30 < snapshots.open_chunks(64 << 30) * snapshots.CHUNK_BYTES <= 16 << 30
    assert snapshots.open_chunks(1 << 50) == snapshots.open_chunks(None)


def test_every_chunk_is_opened_once_where_all_may_stay_open(
    snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "OPEN_CHUNKS", 8)
    again, opened, real = Snapshot(snapshot.files, snapshot.id), list[str](), Files.open
    again.columns(np.arange(len(again)))
    monkeypatch.setattr(Files, "open", lambda *args, **options: (opened.append(args[1]), real(*args, **options))[1])
    for _ in range(3):
        again.columns(np.arange(len(again)))
    assert not opened
    monkeypatch.setattr(snapshots, "OPEN_CHUNKS", OPEN)
    fewer = Snapshot(snapshot.files, snapshot.id)
    for _ in range(3):
        fewer.columns(np.arange(len(fewer)))
    assert len(opened) >= 3 * 8


def test_planning_checks_the_chunks_of_its_steps_and_no_others(snapshot: Snapshot, digests: list[object]) -> None:
    """Of the global batch: its longest caption decides how long the texts of every process are padded."""
    opened = Snapshot(snapshot.files, snapshot.id)
    digests.clear()
    planner = Planner(opened, seed=0, phase=0)
    assert not digests
    touched = set[int]()
    for step in range(2):
        batch = planner.schedule.step(step)
        touched |= set((batch.positions + opened.row(batch.bucket, 0)) // ROWS)
        planner.step(step)
        assert len(digests) == len(touched)
    assert len(touched) < len(snapshot.head.chunks)


def test_every_reader_of_a_damaged_chunk_is_refused_and_others_are_read(snapshot: Snapshot) -> None:
    path = snapshot.files.path(Paths.table(snapshot.head.chunks[1].samples, "arrow"))
    good, key = path.read_bytes(), snapshot.sample(ROWS).pictures["latent"].key
    assert good.count(key) == 1
    path.write_bytes(good.replace(key, bytes(16)))
    opened = Snapshot(snapshot.files, snapshot.id)
    assert opened.sample(0) == snapshot.sample(0)
    for read in (
        lambda: opened.sample(ROWS + 1),
        lambda: opened.columns(np.array([0, ROWS + 1])),
        lambda: opened.columns(np.array([ROWS])),
        lambda: opened.columns(np.array([ROWS + 1])),
        lambda: opened.sample_id(ROWS),
        lambda: next(t for i, t in enumerate(opened.tables()) if i == 1),
    ):
        for _ in range(2):
            with pytest.raises(IntegrityError, match=path.name):
                read()


def test_a_chunk_of_several_batches_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "LIMIT", 2000)
    opened = tiny_cache.build(tmp_path / "cache").open_snapshot()
    [chunk] = opened.head.chunks
    table = ipc_table(pa.py_buffer(opened.files.path(Paths.table(chunk.samples, "arrow")).read_bytes()))
    assert table.num_rows > 1 and table.column("latent").num_chunks > 1
    assert [opened.sample(row).pictures["latent"].key for row in range(len(opened))] == [
        row["key"] for row in table.column("latent").to_pylist()
    ]


@pytest.mark.parametrize("which", ["shards", "chunks"])
@pytest.mark.parametrize("harm", ["lost", "damaged"])
def test_a_list_that_is_lost_or_damaged_is_named_and_written_again(snapshot: Snapshot, which: str, harm: str) -> None:
    part = snapshot.head.shards["latent"] if which == "shards" else snapshot.head.chunks
    path = snapshot.files.path(Paths.table(part.entry.table, "arrow"))
    root, good = path.parents[2], path.read_bytes()
    copy = snapshot.files.path(Paths.copy(Paths.table(part.entry.table, "arrow")))
    assert path.stem in Needed(Cache(root), 0.0).tables, "gc spares it"
    for place in (path, copy):
        Snapshot(snapshot.files, snapshot.id).sample(0)  # one of the two is enough
        if harm == "lost":
            place.unlink()
        else:
            place.write_bytes(good[:-9] + bytes([good[-9] ^ 1]) + good[-8:])
    with pytest.raises(IntegrityError, match=path.name) as raised:
        Snapshot(snapshot.files, snapshot.id).sample(0)
    assert raised.value.fix == REPAIR
    findings = list(audit.verify(Cache(root)))
    assert any(path.name in finding.path + finding.problem for finding in findings)
    assert sana_pipe.stages.bucket.run(config(root)) == snapshot.id
    assert path.read_bytes() == copy.read_bytes() == good
    assert not list(audit.verify(Cache(root)))


def test_status_asks_for_each_file_once_for_all_names(snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    of = config(snapshot.files.root)
    cache = Cache(of.cache)
    cache.point("first", snapshot.id)
    add(of, "two", pictures(7, "two-"))
    more = Cache(of.cache).open_snapshot(sana_pipe.stages.bucket.run(of))
    asked, real = list[str](), FolderStore.stat
    monkeypatch.setattr(FolderStore, "stat", lambda self, name: (asked.append(name), real(self, name))[1])
    assert set(status(cache)["snapshots"].values()) == {snapshot.id, more.id}
    assert sorted(name for name in asked if name.startswith("shards/")) == sorted(more.shard_files())
    (lost := cache.files.path(next(iter(snapshot.shard_files())))).unlink()
    assert {name: lost.name in found["problem"] for name, found in status(cache)["damaged"].items()} == {
        f"names/{name}": True for name in ("first", "latest")
    }
