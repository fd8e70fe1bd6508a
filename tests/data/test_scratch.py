"""Temporary tables and arrays: what is in a file equals what is in memory, is sorted, found and gone afterwards."""

from __future__ import annotations

import dataclasses
import errno
import os
import tempfile
import tracemalloc
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from sana_pipe.base import disk
from sana_pipe.base.errors import CacheError, NoSpaceError
from sana_pipe.data.cache import arrow, scratch
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.files import Files
from sana_pipe.data.cache.item_rows import ItemRows
from sana_pipe.data.cache.keys import as_keys, binary, fixed, key_bytes
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.cache.scratch import Scratch
from sana_pipe.data.cache.status import status
from sana_pipe.data.snapshots import selection
from sana_pipe.data.snapshots.frames import Frame
from sana_pipe.data.snapshots.join import Joined
from tests.support.lowered import lower_limits
from tests.support.synthetic import TABLE


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    lower_limits(monkeypatch)
    return tmp_path / "tmp"


def scratch_in(folder: Path) -> Scratch:
    return Scratch(partial(disk.temporary_in, folder))


def keys_of(kind: str) -> list[bytes]:
    """200 keys, some of them twice or more."""
    rng = np.random.default_rng(1)
    some = [bytes(rng.integers(0, 256, 16, np.uint8)) for _ in range(60)]
    if kind == "skewed":  # one range of keys holds them all; first halves are equal, second halves are not
        some = [bytes(8) + key[:7] + b"\0" for key in some]
    elif kind == "equal":
        some = [b"\xff" * 16]
    return [some[n] for n in rng.integers(0, len(some), 200)]


@pytest.mark.parametrize("kind", ["random", "skewed", "equal"])
@pytest.mark.parametrize("run", [3, 50, 1000])
def test_rows_are_sorted_by_key_and_stay_in_order_within_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, run: int
) -> None:
    monkeypatch.setattr(scratch, "RUN", run)
    keys = keys_of(kind)
    table = pa.table({"key": binary(as_keys(keys)), "row": range(200), "text": [f"text {n}" for n in range(200)]})
    parts = list(scratch_in(folder).sorted_by_key(arrow.batches(table)))
    rows = [row for part in parts for row in part.column("row").to_pylist()]
    assert rows == sorted(range(200), key=lambda row: (keys[row], row))
    assert [text for part in parts for text in part.column("text").to_pylist()] == [f"text {row}" for row in rows]
    ends = [(key_bytes(fixed(part.column("key"))[0]), key_bytes(fixed(part.column("key"))[-1])) for part in parts]
    assert all(before[1] < after[0] for before, after in pairwise(ends)), "a key is in two parts"
    assert (len(parts) > 1) == (kind == "random" and run < 200)
    assert list(scratch_in(folder).sorted_by_key(iter([]))) == []


@pytest.mark.parametrize("run", [1, 3, 50, 200, 1000])
def test_rows_of_text_are_sorted_by_code_point(folder: Path, monkeypatch: pytest.MonkeyPatch, run: int) -> None:
    monkeypatch.setattr(scratch, "RUN", run)
    monkeypatch.setattr(scratch, "TEXTS", 2)
    rng = np.random.default_rng(2)
    letters = list('ab./-0\n,"é\U0001f600\uffee')
    rows = [("".join(rng.choice(letters, rng.integers(0, 5))), f"{rng.integers(0, 3)}") for _ in range(200)]
    assert list(scratch_in(folder).sorted_rows(iter(rows))) == sorted(rows)
    assert list(scratch_in(folder).sorted_rows([])) == []
    assert not folder.exists() or not os.listdir(folder)


def test_rows_whose_first_texts_are_equal_are_not_sorted_all_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, real = list[int](), scratch.sorted_by_all
    monkeypatch.setattr(scratch, "RUN", 64)
    monkeypatch.setattr(scratch, "sorted_by_all", lambda table: (sizes.append(len(table)), real(table))[1])
    rows = [("a", f"{7919 * n % 2000:04d}") for n in range(2000)]
    assert list(scratch_in(folder).sorted_rows(rows)) == sorted(rows)
    assert max(sizes) <= 2 * 64


def test_runs_that_are_merged_need_little_memory_each(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "LIMIT", 1 << 16)
    keys = np.random.default_rng(0).integers(0, 2**63, (1500, 2)).view("S16").ravel()
    scratch_here = scratch_in(folder)
    tracemalloc.start()
    try:
        parts = scratch_here.sorted_by_key(pa.table({"key": binary(keys[n : n + 3])}) for n in range(0, 1500, 3))
        next(parts)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 500 * 8 * scratch.BINS / 3


def test_what_is_in_files_is_what_is_in_memory_and_has_no_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [pa.table({"a": [n, None], "b": [[{"x": f"{n}"}], []]}) for n in range(5)]
    for limit in (1, 1 << 20):
        monkeypatch.setattr(scratch, "LIMIT", limit)
        there = scratch_in(folder)
        table = there.table(batches[0].schema, iter(batches))
        assert table.equals(pa.concat_tables(batches))
        assert table.column("a").num_chunks == (1 if limit > 1 else 5)
        assert there.table(batches[0].schema, iter([])).num_rows == 0
        writer = there.writer("<u2")
        for start in range(0, 10, 3):
            writer.add(np.arange(start, min(start + 3, 10)))
        assert writer.finish().tolist() == list(range(10)) and there.writer("S16").finish().dtype == "S16"
        array = there.array(7, np.int64)
        assert array.tolist() == [0] * 7
        array[3] = 5
        assert array.tolist() == [0, 0, 0, 5, 0, 0, 0]
        assert isinstance(array.base, np.ndarray) == (limit == 1), "mapped, not in memory"
        assert not os.listdir(folder) if folder.exists() else limit > 1


def test_chunks_of_a_table_in_a_file_do_not_grow_in_number_with_its_pieces(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "LIMIT", 1000)
    pieces = [pa.table({"a": [n], "b": [f"{n}"]}) for n in range(300)]
    writer = scratch_in(folder).table_writer(pieces[0].schema)
    assert [writer.add(piece) for piece in pieces] == [(n, 1) for n in range(300)]
    table = writer.finish()
    assert table.equals(pa.concat_tables(pieces))
    assert 1 < table.column("a").num_chunks <= pa.concat_tables(pieces).nbytes // 1000 + 1


def test_finished_tables_and_arrays_need_no_descriptors(folder: Path) -> None:
    there, before, finished = scratch_in(folder), len(os.listdir("/dev/fd")), []
    for n in range(4):
        writer = there.writer(np.int64)
        writer.add(np.full(3, n))
        finished.append((writer.finish(), there.table(pa.schema([("a", pa.int64())]), [pa.table({"a": [n]})])))
    assert len(os.listdir("/dev/fd")) == before
    for n, (array, table) in enumerate(finished):
        assert (array.tolist(), table.to_pydict()) == ([n] * 3, {"a": [n]})


def test_a_file_has_no_name_when_it_gets_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def watched(module: object, name: str) -> None:
        real = getattr(module, name)

        def write(*args: object) -> object:
            calls.append(name)
            assert not os.listdir(folder)
            return real(*args)

        monkeypatch.setattr(module, name, write)

    watched(disk, "allocate")
    watched(disk, "write_all")
    watched(pa.ipc, "new_file")
    there = scratch_in(folder)
    there.array(3, np.int64)
    there.writer(np.int64).add(np.zeros(3))
    there.table(pa.schema([("a", pa.int64())]), iter([pa.table({"a": [1]})]))
    assert calls == ["allocate", "write_all", "new_file"]


def test_a_full_disk_is_reported_as_such(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, "write_all", full)
    monkeypatch.setattr(os, "posix_fallocate", full)
    there = scratch_in(folder)
    with pytest.raises(NoSpaceError):
        there.array(3, np.int64)
    with pytest.raises(NoSpaceError):
        there.writer(np.int64).add(np.zeros(3))
    monkeypatch.setattr(pa.ipc.RecordBatchFileWriter, "write_table", full)
    with pytest.raises(NoSpaceError):
        there.table(pa.schema([("a", pa.int64())]), iter([pa.table({"a": [1]})]))
    assert not os.listdir(folder)


def test_items_are_found_by_name(folder: Path) -> None:
    items = [f"{n % 40}.jpg" for n in range(50)]
    rows = ItemRows(pa.table({"item": items}), scratch_in(folder))
    last = {item: row for row, item in enumerate(items)}
    assert rows.find(["7.jpg", "none", "39.jpg", "9.jpg"]).tolist() == [last["7.jpg"], -1, 39, 49]
    assert ItemRows(pa.table({"item": pa.array([], pa.string())}), scratch_in(folder)).find(["x"]).tolist() == [-1]


def test_a_cache_that_cannot_be_written_is_still_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path / "cache", create=True)
    table = pa.table({"item": [f"{n}.jpg" for n in range(9)]})
    digest = cache.put_table(table)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(Files, "temporary", lambda self: 1 / 0)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert Cache(tmp_path / "cache").table(digest).equals(table)
    assert folder.exists()


def test_status_needs_no_temporary_file(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path / "cache", create=True)
    rejects = pa.table({"item": list("abcde"), "reject": pa.array([None, "x", None, None, "y"], pa.string())})
    cache.add_scan(
        "photos", {"root": "/photos", "table": cache.put_table(rejects), "encodings": {"latent": "l", "text": "t"}}
    )
    monkeypatch.setattr(Files, "temporary", lambda self: 1 / 0)
    result = status(Cache(tmp_path / "cache"))
    assert (result["damaged"], result["complete"]) == ({}, False)
    assert (result["sources"]["photos"]["items"], result["sources"]["photos"]["rejected"]) == (5, 2)


def test_an_unchanged_table_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path / "cache", create=True)
    table = pa.table({"item": ["a", "b"]})
    digest = cache.put_table(table)
    assert cache.table(digest).equals(table)
    path = cache.files.path(Paths.table(digest, "parquet"))
    os.utime(path, (0, 0))
    with monkeypatch.context() as patch:
        patch.setattr(Files, "put_table", lambda *_: 1 / 0)
        assert cache.put_table(pa.table({"item": ["a", "b"]})) == digest
    assert path.stat().st_mtime > 0, "its age counts from the last reference on"
    assert cache.put_table(pa.table({"item": ["a", "c"]})) != digest
    path.unlink()
    assert cache.put_table(table) == digest and path.exists()


def test_a_full_disk_is_no_damage_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise NoSpaceError("the disk is full")

    cache = Cache(tmp_path / "cache", create=True)
    table = cache.put_table(pa.table({"item": ["a"], "reject": pa.array([None], pa.string())}))
    cache.add_scan("photos", {"root": "/photos", "table": table, "encodings": {"latent": "l", "text": "t"}})
    monkeypatch.setattr(Files, "mapped", full)
    with pytest.raises(NoSpaceError):
        status(cache)


def test_a_folder_for_temporary_files_is_asked_for_when_it_is_needed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", absent)
    there = Scratch()
    assert there.array(0, np.int64).tolist() == []
    for write in (lambda: there.array(3, np.int64), lambda: there.writer(np.int64).add(np.zeros(3))):
        with pytest.raises(CacheError) as error:
            write()
        assert "TMPDIR" in (error.value.fix or "")


def test_samples_of_an_earlier_snapshot_are_found_and_their_pictures_stay(folder: Path) -> None:
    """Against sets; pictures have one or two records, and ids are as small and as large as they can be."""
    rng = np.random.default_rng(0)
    ids = rng.permutation(np.append(rng.integers(0, 1 << 64, 60, np.uint64), np.array([0, (1 << 64) - 1], np.uint64)))
    earlier = ids[rng.permutation(len(ids))[:20]]
    joined = Joined(scratch=scratch_in(folder))
    known = selection.Earlier(joined.scratch, np.split(earlier, [0, 1, 7]))
    row = {sample: number for number, sample in enumerate(earlier.tolist())}
    assert len(known) == 20 and known.find(ids).tolist() == [row.get(sample, 20) for sample in ids.tolist()]
    frame = dataclasses.replace(joined.frame(), sample_id=ids, picture_id=ids % np.uint64(40))
    assert selection.places(joined, frame, known).tolist() == [row.get(sample, 20) for sample in ids.tolist()]
    stay = {sample % 40 for sample in earlier.tolist()}
    assert selection.in_earlier_snapshot(joined, frame, known).tolist() == [
        sample % 40 in stay for sample in ids.tolist()
    ]
    none = selection.Earlier(joined.scratch)
    assert (
        not selection.places(joined, frame, none).any() and not selection.in_earlier_snapshot(joined, frame, none).any()
    )


def test_samples_that_are_selected_are_next_to_the_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path / "cache", create=True)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: 1 / 0)
    joined = Joined(["photos"], scratch=cache.files.scratch)
    ids = np.arange(3, dtype=np.uint64)
    sides = np.array([TABLE[0], TABLE[0], TABLE[2]])
    columns = {"bucket": np.array([0, 0, 2]), "height": sides[:, 0], "width": sides[:, 1]}
    frame = Frame(
        source=np.zeros(3, np.int32),
        item=pa.array(["a", "b", "c"], pa.large_string()),
        sample_id=ids,
        picture_id=ids,
        digest=np.array([b"1" * 16, b"1" * 16, b"2" * 16], "S16"),
        cluster=np.zeros(3, np.int64),
        pictures={"latent": np.arange(3)},
        captions=np.arange(4),
        text=np.zeros(3, np.int64),
        weight=np.ones(3, np.float32),
        group=np.zeros(3, "S16"),
        **columns,
    )
    earlier = selection.Earlier(joined.scratch)
    assert selection.deduplicated(joined, frame, [], earlier)[0].item.to_pylist() == ["a", "c"]
    assert selection.subset(joined, frame, 2, earlier)[0].item.to_pylist() == ["a", "b"]
