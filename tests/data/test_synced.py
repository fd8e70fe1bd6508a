"""Every file of a cache and of a run directory is synced before it has its name: after a loss of power a name never
stands for less."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import sana_pipe.stages.encode
from sana_pipe.base import disk
from sana_pipe.data.cache.adopt import bring
from sana_pipe.data.cache.config import MirrorConfig
from sana_pipe.data.cache.files import Files
from sana_pipe.data.cache.layout import Paths
from tests.support import tiny_cache
from tests.support.packed import pack
from tests.support.runs import fit_tiny
from tests.support.workers import tiny_run


class Disk:
    """Which files have been synced as they are now, and which got a name below `root` without that."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch):
        self.root = root
        self.named: Counter[str] = Counter()
        self.unsynced: list[str] = []
        self._synced: dict[tuple[int, int], tuple[int, int]] = {}
        sync = os.fsync

        def fsync(descriptor: int) -> None:
            sync(descriptor)
            seen = os.fstat(descriptor)
            self._synced[seen.st_dev, seen.st_ino] = seen.st_size, seen.st_mtime_ns

        monkeypatch.setattr(os, "fsync", fsync)
        for function in (os.link, os.replace, os.rename):
            monkeypatch.setattr(os, function.__name__, self._watched(function))

    def _watched(self, function: Any) -> Any:
        def name(source: Path, target: Path) -> None:
            relative = Path(target).relative_to(self.root).as_posix()
            seen = os.stat(source)
            if self._synced.get((seen.st_dev, seen.st_ino)) != (seen.st_size, seen.st_mtime_ns):
                self.unsynced.append(relative)
            self.named[relative.partition("/")[0]] += 1
            function(source, target)

        return name


def publish_everything(root: Path) -> None:
    """Encodings, shards, plans, commits, scans, segments, tables, snapshots and packed shards."""
    cache = tiny_cache.build(root, {(256, 256): 12, (128, 256): 12}, batch=4, per_shard=6)
    pack(cache, 2)
    files = cache.files
    files.put_content(b"a table", "tables", "arrow")
    files.put_table(lambda file: file.write(b"another table"), "arrow")
    files.put_table(lambda file: file.write(b"a third table"), "arrow", twice=True)
    files.replace("claims/one", b"a claim")


def test_everything_is_on_the_disk_before_it_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Disk(tmp_path / "cache", monkeypatch)
    publish_everything(tmp_path / "cache")
    assert not watched.unsynced
    assert {
        "shards",
        "tables",
        "plans",
        "units",
        "segments",
        "snapshots",
        "encodings",
        "copies",
    } <= watched.named.keys()


def test_what_is_copied_from_another_cache_is_on_the_disk_before_it_has_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, other = (
        Files(tmp_path / "cache"),
        Files(f"memory://{uuid4().hex}", MirrorConfig(path=str(tmp_path / "mirror"))),
    )
    digest = other.put_content(b"a table", "tables", "arrow")
    watched = Disk(tmp_path, monkeypatch)
    bring(files, other, Paths.table(digest, "arrow"), digest)
    assert not [name for name in watched.unsynced if name.startswith("cache/")] and watched.named["cache"] == 1


def test_a_list_of_rejects_is_on_the_disk_before_it_has_a_name(
    small_cache_copy: Path, photos: Path, make_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(shutil.copytree(photos, tmp_path / "photos"))
    (source / "broken.png").write_bytes(b"no picture")
    (source / "broken.txt").write_text("a caption")
    watched = Disk(small_cache_copy, monkeypatch)
    assert sana_pipe.stages.encode.run(make_config(tmp_path), data=str(source))["rejects"] == 1
    assert watched.named["reports"] and not watched.unsynced


@pytest.mark.parametrize(
    ("helper", "lost"),
    [("write_synced", {"encodings", "tables", "claims"}), ("sync", {"tables"})],
)
def test_a_missing_sync_is_seen(helper: str, lost: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage."""
    watched = Disk(tmp_path / "cache", monkeypatch)
    monkeypatch.setattr(disk, helper, lambda file, *data: file.write_bytes(*data) if data else None)
    publish_everything(tmp_path / "cache")
    assert lost <= {name.partition("/")[0] for name in watched.unsynced}


def test_the_files_of_a_run_are_on_the_disk_before_they_have_a_name(
    one_thread: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit_tiny(tiny_run.config(tmp_path / "first", steps=1))
    watched = Disk(tmp_path / "run", monkeypatch)
    fit_tiny(tiny_run.config(tmp_path / "run", steps=1), origin=tmp_path / "first")
    assert not watched.unsynced
    assert {"config.yaml", "from.json", "checkpoints"} <= watched.named.keys()


def test_a_damaged_file_is_replaced_durably(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files(tmp_path)
    path = tmp_path / Paths.table(files.put_content(b"data", "tables", "npy"), "npy")
    path.write_bytes(b"rot")
    synced: list[tuple[Path, bytes]] = []
    monkeypatch.setattr("sana_pipe.base.disk.sync_path", lambda what: synced.append((what, path.read_bytes())))
    files.put_content(b"data", "tables", "npy")
    assert synced == [(path.parent, b"data")]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), disk.replacing(path) as work:
        work.write_text("half")
        raise ZeroDivisionError
    assert [entry.read_text() for entry in tmp_path.iterdir()] == ["old"]
    synced: list[tuple[str, str]] = []
    monkeypatch.setattr(disk, "sync_path", lambda what: synced.append((what.name, path.read_text())))
    with disk.replacing(path) as work:
        work.write_text("new")
    assert synced == [(work.name, "old"), (tmp_path.name, "new")]
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
