"""Chunks of a snapshot: few are mapped at a time, a file is checked once, a changed file again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import stages.bucket
from pipeline.cache import snapshot as snapshots
from pipeline.cache.layout import Paths
from pipeline.cache.local_files import digest_of
from pipeline.cache.root import Cache
from pipeline.cache.snapshot import Snapshot
from pipeline.errors import IntegrityError
from pipeline.snapshots import join
from tests.support.synthetic import add, config, pictures

ROWS, OPEN = 5, 2


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Snapshot:
    for module in (snapshots, join):
        monkeypatch.setattr(module, "CHUNK_ROWS", ROWS)
    monkeypatch.setattr(snapshots, "OPEN_CHUNKS", OPEN)
    add(config(tmp_path / "cache"), "one", pictures(40))
    return Cache(tmp_path / "cache").open_snapshot(stages.bucket.run(config(tmp_path / "cache")))


@pytest.fixture
def digests(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A list that grows with each file that is checked."""
    checked: list[object] = []

    def counted(handle: object) -> str:
        checked.append(handle)
        return digest_of(handle)  # type: ignore[arg-type]

    monkeypatch.setattr(snapshots, "digest_of", counted)
    return checked


def mapped(snapshot: Snapshot) -> int:
    """How many tables of the snapshot's cache this process has mapped."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("this system has no /proc to ask about mapped files")
    folder = str(snapshot.files.path("tables").resolve())
    return sum(folder in line and line.rstrip().endswith(".arrow") for line in maps.read_text().splitlines())


READS: dict[str, Callable[[Snapshot, int], object]] = {
    "samples": lambda snapshot, row: snapshot.sample(row),
    "names": lambda snapshot, row: snapshot.origin(row),
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
    with pytest.raises(IntegrityError, match="does not match its name"):
        snapshot.sample(0)


def test_a_check_reads_what_was_checked_before(snapshot: Snapshot, digests: list[object]) -> None:
    for _ in range(2):
        snapshot.check_chunk(0)
    assert len(digests) == 4
