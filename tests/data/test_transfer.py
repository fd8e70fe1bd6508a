"""A snapshot that travels: pushed to a folder or an S3 store and pulled from there, whatever kills it on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import sana_pipe.stages.pull
import sana_pipe.stages.push
from sana_pipe.base.errors import CacheError, IntegrityError, UserError
from sana_pipe.config import Config
from sana_pipe.data.cache import layout, withdrawn
from sana_pipe.data.cache.audit import verify
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.snapshots import data_card, packing, transfer
from tests.support import tiny_cache
from tests.support.consumed import loader, sequence

MakeConfig = Callable[..., Config]
KILLED = """
import os, signal, sys
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.folder_store import FolderStore
from sana_pipe.data.snapshots import transfer
left, create = int(sys.argv[3]), FolderStore.create
def counted(self, name, data):
    global left
    if str(self.root) == sys.argv[2]:
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
    return create(self, name, data)
FolderStore.create = counted
cache, other = Cache(sys.argv[1]), Cache(sys.argv[2], create=True)
for parcel in transfer.parcels(cache, None):
    transfer.send(cache, other, parcel)
"""


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    made = tiny_cache.build(tmp_path / "made")
    made.point("round1", made.snapshot_id())
    return made


def pack(cache: Cache) -> str:
    source = cache.open_snapshot("round1")
    plan = packing.planned(cache, source, 1)
    packer = packing.Packer(cache, source, plan)
    for unit in plan.units:
        packer.pack_unit(unit)
    return cache.add_snapshot(packing.assembled(cache, source, plan), "packed", latest=True, move=True)


def needed(cache: Cache, name: str = "latest") -> dict[str, bytes]:
    """The files that a snapshot's readers use: its shards, tables and head."""
    snapshot = cache.open_snapshot(name)
    tables = [Paths.table(digest, "arrow") for digest in snapshot.head.tables()]
    return {name: cache.files.read(name) for name in [*snapshot.shard_files(), *tables, Paths.snapshot(snapshot.id)]}


def transferred(cache: Cache, other: Cache, name: str | None = None) -> None:
    for parcel in transfer.parcels(cache, name):
        transfer.send(cache, other, parcel)


@pytest.mark.parametrize("packed", [False, True])
def test_there_and_back_the_bytes_are_equal_and_every_command_accepts_them(
    cache: Cache, tmp_path: Path, packed: bool
) -> None:
    name = "packed" if packed else "round1"
    if packed:
        pack(cache)
    sent, back = Cache(tmp_path / "sent", create=True), Cache(tmp_path / "back", create=True)
    transferred(cache, sent, name)
    transferred(sent, back, name)
    for there in (sent, back):
        assert list(verify(there)) == []
        assert needed(there, name) == needed(cache, name)
        assert there.snapshot_id() == there.snapshot_id(name) == cache.snapshot_id(name)
    assert sequence(loader(back, stop_step=3)) == sequence(loader(cache, stop_step=3))
    snapshot = cache.open_snapshot(name)
    folders = [snapshot.head.folder or encoding.name for encoding in snapshot.head.encodings_by_kind.values()]
    assert sent.files.folders("shards") == sorted(set(folders)), "what the snapshot does not need is not sent"


@pytest.mark.parametrize("packed", [False, True])
def test_what_is_there_is_not_sent_again(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    if packed:
        pack(cache)
    sent = Cache(tmp_path / "sent", create=True)
    transferred(cache, sent)
    before = sorted((str(path), path.stat().st_ino) for path in sent.root.rglob("*.*") if path.is_file())
    transferred(cache, sent)
    assert sorted((str(path), path.stat().st_ino) for path in sent.root.rglob("*.*") if path.is_file()) == before


@pytest.mark.fault
@pytest.mark.parametrize("packed", [False, True])
def test_killed_at_any_file_the_next_transfer_ends_it(cache: Cache, tmp_path: Path, packed: bool) -> None:
    """Five kills of one transfer, each after more files; no snapshot shows before it is whole."""
    if packed:
        pack(cache)
    for survived in (3, 1, 4, 15, 9):
        words = [sys.executable, "-c", KILLED, str(cache.root), str(tmp_path / "sent"), str(survived)]
        assert subprocess.run(words, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode == -signal.SIGKILL
        if (tmp_path / "sent/format.json").exists():
            assert Cache(tmp_path / "sent").snapshot_names() == []
    sent = Cache(tmp_path / "sent", create=True)
    sent.files.sweep()
    transferred(cache, sent)
    assert list(verify(sent)) == []
    assert needed(sent) == needed(cache)


@pytest.mark.parametrize("what", ["shard", "chunk"])
def test_one_flipped_bit_is_named(cache: Cache, tmp_path: Path, what: str) -> None:
    """Of the cache that is sent, and of the one that has it, which the next transfer restores."""
    snapshot = cache.open_snapshot()
    name = (
        next(iter(snapshot.shard_files()))
        if what == "shard"
        else f"tables/{snapshot.head.chunks[0].samples[:2]}/{snapshot.head.chunks[0].samples}.arrow"
    )

    def flip(root: Path) -> None:
        data = bytearray((root / name).read_bytes())
        data[len(data) // 2] ^= 1
        (root / name).unlink()  # it may be a link to the other cache's file
        (root / name).write_bytes(data)

    sent = Cache(tmp_path / "sent", create=True)
    transferred(cache, sent)
    flip(sent.root)
    transferred(cache, sent)
    assert (sent.root / name).read_bytes() == (cache.root / name).read_bytes()
    flip(cache.root)
    with pytest.raises(IntegrityError) as caught:
        transferred(cache, Cache(tmp_path / "other", create=True))
    assert name in caught.value.what and "made" in caught.value.what


def test_what_was_taken_out_of_a_cache_does_not_come_back(cache: Cache, tmp_path: Path) -> None:
    """The pictures of the small cache are known by the digests that its keys are made of."""
    other = Cache(tmp_path / "other", create=True)
    withdrawn.begin(other, withdrawn.Takedown((layout.digest("item", "9999").hex(),), {}, done=True))
    transferred(cache, other)
    withdrawn.begin(other, withdrawn.Takedown((layout.digest("item", "3").hex(),), {}, done=True))
    with pytest.raises(CacheError, match="taken out"):
        transferred(cache, other)
    withdrawn.begin(cache, withdrawn.Takedown((), {}))
    with pytest.raises(CacheError, match="are being taken out"):
        transferred(cache, Cache(tmp_path / "third", create=True))


def test_a_name_that_is_taken_stays(cache: Cache, tmp_path: Path) -> None:
    other = tiny_cache.build(tmp_path / "other", seed=1)
    other.point("round1", other.snapshot_id())
    shards = sorted(entry.name for entry in other.files.walk("shards"))
    with pytest.raises(UserError, match="round1"):
        transferred(cache, other)
    assert sorted(entry.name for entry in other.files.walk("shards")) == shards, "refused before anything is sent"
    for parcel in transfer.parcels(cache, None):
        transfer.send(cache, other, parcel, move=True)
    assert other.snapshot_id("round1") == cache.snapshot_id()


def test_the_card_reads_the_shards_with_webdataset_alone(
    cache: Cache, tmp_path: Path, make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    sana_pipe.stages.push.run(make_config(tmp_path, f"cache={cache.root}"), str(tmp_path / "sent"), "cc0-1.0")
    code = (tmp_path / "sent" / data_card.NAME).read_text().partition("```python\n")[2].partition("```")[0]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "sent", capture_output=True, text=True, check=True
    )
    indexes = [cache.index(cache.encodings(kind)[0].name) for kind in ("latent", "text")]
    assert len(done.stdout.splitlines()) == sum(map(len, indexes))


def test_wrong_words_of_push(cache: Cache, tmp_path: Path, make_config: MakeConfig) -> None:
    config = make_config(tmp_path, f"cache={cache.root}")
    with pytest.raises(UserError, match="licence"):
        sana_pipe.stages.push.run(config, str(tmp_path / "sent"), " ")
    with pytest.raises(UserError) as caught:
        sana_pipe.stages.push.run(config, "hf://datasets/me/mine", "mit")
    assert "hf upload-large-folder" in str(caught.value.fix)
    assert not (tmp_path / "sent").exists()
