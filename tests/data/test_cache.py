"""The format: publication, integrity, identity, and that other tools read it."""

from __future__ import annotations

import gc
import io
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sana_pipe.base import disk
from sana_pipe.base.errors import CacheError, IntegrityError
from sana_pipe.cli import main
from sana_pipe.data.cache import arrow, index, layout, shard
from sana_pipe.data.cache.cache import Cache, Unit
from sana_pipe.data.cache.encodings import Encoding
from sana_pipe.data.cache.files import Files
from sana_pipe.data.cache.keys import SortedKeys, as_keys, halves
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.cache.status import status
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.signals.text import TextEncoding
from sana_pipe.tools.locations import cache_location
from tests.support import synthetic, tiny_cache
from tests.support.lowered import lower_limits
from tests.support.messages import naming
from tests.support.synthetic import LATENT as LATENTS
from tests.support.synthetic import add, config, pictures
from tests.support.trees import files

LATENT = LatentEncoding(weights="w", compression=8, channels=4)
TEXT = TextEncoding(weights="w", width=6)
ROOT = Path(__file__).parents[2]
GROUP = 54321


def bits(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    return values.view(torch.int16).numpy().view(np.uint16)


def write(root: Path, count: int = 3, encoding: Encoding = LATENT, first: int = 0) -> tuple[Cache, str, pa.Table]:
    cache = Cache(root, create=True)
    with shard.ShardWriter(cache.files, encoding, "unit") as writer:
        for i in range(first, first + count):
            if encoding.kind == "latent":
                writer.add(encoding.key(bytes([i] * 16), 16, 24), bits((4, 2, 3), i))
            else:
                writer.add(encoding.key(f"caption {i}"), bits((3 + i, 6), i), caption=f"Caption {i} é")
        name, _, table = writer.finish()
    return cache, name, table


def read_all(cache: Cache, name: str, table: pa.Table, encoding: Encoding = LATENT) -> list[np.ndarray]:
    reader = shard.ShardReader(cache.files, encoding.name)
    out = []
    for row in table.to_pylist():
        shape = (
            (row["channels"], row["height"], row["width"]) if encoding.kind == "latent" else (row["rows"], row["width"])
        )
        into = np.empty(shape, np.uint16)
        reader.read(name, row["offset"], row["key"], row["checksum"], into)
        out.append(into)
    return out


# ---------------------------------------------------------------- other tools


def test_webdataset_reads_the_shards(tmp_path: Path) -> None:
    import webdataset

    cache, name, table = write(tmp_path / "c", encoding=TEXT)
    path = cache.files.path(layout.Paths.shard(TEXT.name, name))
    samples = list(webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False))
    assert [s["__key__"] for s in samples] == [k.hex() for k in table.column("key").to_pylist()]
    for i, sample in enumerate(samples):
        array = np.load(io.BytesIO(sample["npy"]))
        assert array.dtype == np.dtype("<u2") and np.array_equal(array, bits((3 + i, 6), i))
        assert sample["txt"].decode() == f"Caption {i} é"


def test_tar_headers_are_deterministic_and_plain(tmp_path: Path) -> None:
    one, first, _ = write(tmp_path / "a")
    two, second, _ = write(tmp_path / "b")
    assert first == second
    path = one.files.path(layout.Paths.shard(LATENT.name, first))
    assert path.read_bytes() == two.files.path(layout.Paths.shard(LATENT.name, second)).read_bytes()
    with tarfile.open(path) as tar:
        assert all(m.mtime == 0 and m.isreg() for m in tar)


@given(st.lists(st.integers(0, 65535).filter(lambda b: b & 0x7F80 != 0x7F80), min_size=1, max_size=64))
@settings(max_examples=50, deadline=None)
def test_bf16_round_trip_is_bit_exact(values: list[int]) -> None:
    from sana_pipe.data.loader.loader import bf16

    array = np.array(values, np.uint16)
    tensor = bf16(array)
    assert tensor.dtype == torch.bfloat16
    assert np.array_equal(tensor.view(torch.int16).numpy().view(np.uint16), array)
    assert np.array_equal(tensor.float().to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16), array)


def test_non_finite_is_never_stored(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "c", create=True)
    for bad in (0x7F80, 0xFF80, 0x7FC0):
        array = bits((4, 2, 3))
        array[1, 1, 1] = bad
        with shard.ShardWriter(cache.files, LATENT, "u") as writer, pytest.raises(IntegrityError, match="NaN"):
            writer.add(bytes(16), array)
    assert cache.files.names("tmp") == [] and not (tmp_path / "c" / "shards").exists()


# ---------------------------------------------------------------- integrity


def test_every_flipped_bit_of_a_shard_is_noticed_or_harmless(tmp_path: Path) -> None:
    cache, name, table = write(tmp_path / "c", count=1)
    path = cache.files.path(layout.Paths.shard(LATENT.name, name))
    good = path.read_bytes()
    truth = read_all(cache, name, table)
    row = table.to_pylist()[0]
    reader, into = shard.ShardReader(cache.files, LATENT.name), np.empty_like(truth[0])
    noticed = harmless = 0
    with open(path, "r+b", buffering=0) as file:
        for position in range(len(good) * 8):
            byte = position // 8
            os.pwrite(file.fileno(), bytes([good[byte] ^ 1 << (position % 8)]), byte)
            try:
                reader.read(name, row["offset"], row["key"], row["checksum"], into)
            except IntegrityError as error:
                noticed += 1
                assert name in str(error)
                assert row["key"].hex() in str(error)
            else:
                harmless += 1
                assert np.array_equal(into, truth[0]), "a silent case"
            assert layout.content_digest(path.read_bytes()) != name, "the whole file's digest does not see it"
            os.pwrite(file.fileno(), good[byte : byte + 1], byte)
    assert noticed == 4 * 2 * 3 * 16
    assert harmless > 0
    assert np.array_equal(read_all(cache, name, table)[0], truth[0])


def test_the_integrity_check_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: with the checksum switched off, flipped bytes pass unnoticed."""
    cache, name, table = write(tmp_path / "c", count=1)
    path = cache.files.path(layout.Paths.shard(LATENT.name, name))
    bad = bytearray(path.read_bytes())
    bad[table.column("offset")[0].as_py()] ^= 1
    path.write_bytes(bad)
    with pytest.raises(IntegrityError):
        read_all(cache, name, table)
    expected = table.column("checksum")[0].as_py()
    monkeypatch.setattr(layout, "checksum", lambda *a: expected)
    read_all(cache, name, table)


def test_truncation_at_every_length_is_noticed(tmp_path: Path) -> None:
    cache, name, table = write(tmp_path / "c", count=1)
    path = cache.files.path(layout.Paths.shard(LATENT.name, name))
    good = path.read_bytes()
    end = table.column("offset")[0].as_py() + table.column("length")[0].as_py()
    for length in range(0, end, 7):
        path.write_bytes(good[:length])
        with pytest.raises(IntegrityError, match=r"cut short|wrong checksum"):
            read_all(cache, name, table)
    path.unlink()
    with pytest.raises(IntegrityError, match="missing"):
        read_all(cache, name, table)


def test_a_right_record_in_a_wrong_place_is_refused(tmp_path: Path) -> None:
    cache, name, table = write(tmp_path / "c", count=2)
    other, foreign, _ = write(tmp_path / "c", count=2, first=7)
    rows = table.to_pylist()
    reader = shard.ShardReader(cache.files, LATENT.name)
    into = np.empty((4, 2, 3), np.uint16)
    with pytest.raises(IntegrityError):  # another record of the same shard
        reader.read(name, rows[1]["offset"], rows[0]["key"], rows[0]["checksum"], into)
    with pytest.raises(IntegrityError):  # a shard of the same shape
        reader.read(foreign, rows[0]["offset"], rows[0]["key"], rows[0]["checksum"], into)
    elsewhere = shard.ShardReader(cache.files, LatentEncoding(weights="x").name)
    elsewhere.encoding = LATENT.name  # the same bytes under another encoding
    with pytest.raises(IntegrityError):
        elsewhere.read(name, rows[0]["offset"], rows[0]["key"], rows[0]["checksum"], into)


def test_every_flipped_bit_of_a_document_is_noticed(tmp_path: Path) -> None:
    data = layout.seal({"what": "é", "n": [1, 2.5, None], "deep": {"a": True}})
    assert layout.unseal(data, "x") == {"what": "é", "n": [1, 2.5, None], "deep": {"a": True}}
    for position in range(len(data) * 8):
        bad = bytearray(data)
        bad[position // 8] ^= 1 << (position % 8)
        with pytest.raises((IntegrityError, CacheError)):
            layout.unseal(bytes(bad), "x")


def test_a_cache_of_a_newer_version_or_of_none_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Cache(tmp_path, create=True)
    body = layout.unseal((tmp_path / Paths.FORMAT).read_bytes(), "")
    with monkeypatch.context() as later:
        later.setattr(layout, "VERSION", layout.VERSION + 1)
        newer = layout.seal(body)
    for data, error in ((b"damaged", IntegrityError), (newer, CacheError)):
        for name in (Paths.FORMAT, Paths.copy(Paths.FORMAT)):
            (tmp_path / name).write_bytes(data)
        with pytest.raises(error, match=naming(tmp_path / Paths.FORMAT)):
            Cache(tmp_path)


COMMANDS = [
    *("status --json", "verify", "verify --repair", "gc --yes", "bucket", "train", "encode --data .", "snapshots"),
    *("view x", "push PLACE --license x", "pull PLACE", "forget --source s", "forget --check", "inspect"),
    *("bucket --pack", "snapshots name latest x", "snapshots diff latest latest", "snapshots show latest"),
]


def test_every_command_says_what_to_do_about_a_cache_of_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A message and its exit code; nothing is written."""
    monkeypatch.chdir(tmp_path)
    root = tiny_cache.build(tmp_path / "cache").root
    for path in root.rglob("*.json"):
        body = {key: v for key, v in json.loads(path.read_text()).items() if key not in ("digest", "format", "version")}
        with monkeypatch.context() as later:
            later.setattr(layout, "VERSION", layout.VERSION + 1)
            path.write_bytes(layout.seal(body))
    before = files(root)
    for command in COMMANDS:
        words = [word.replace("PLACE", str(root)) for word in command.split()]
        cache = tmp_path / "other" if "pull" in words else root
        with pytest.raises(SystemExit) as ended:
            main([*words, "--config", "tiny", "--set", f"cache={cache}"])
        printed = capsys.readouterr()
        said = printed.out + printed.err
        # `inspect` goes on without a snapshot, and says why
        assert ended.value.code == (0 if command == "inspect" else CacheError.exit_code), (command, printed)
        assert f"format version {layout.VERSION + 1}" in said, (command, printed)
        assert "use the version of sana-pipe that wrote it" in said, (command, printed)
    assert files(root) == before


def test_a_newer_version_is_refused_with_a_message() -> None:
    body = {"format": layout.FORMAT, "version": layout.VERSION + 1, "a": 1}
    body["digest"] = layout.content_digest(layout.canonical(body))
    data = (json.dumps(body, sort_keys=True, indent=1, ensure_ascii=False) + "\n").encode()
    with pytest.raises(CacheError, match="version"):
        layout.unseal(data, "x")


# ---------------------------------------------------------------- identity


def test_fields_at_their_default_stay_out_of_the_id() -> None:
    values = {"weights": "w", "compression": 8, "channels": 4}
    assert LATENT.id == layout.digest("recipe", "latent", layout.canonical(values)).hex()
    assert LatentEncoding(weights="w", compression=8, channels=4, tiling=False).id == LATENT.id


def test_a_caption_with_half_a_character_has_a_digest() -> None:
    assert layout.digest("caption", "\ud83d").hex() == "490ca870fc0d1fb3ed16f502415769a9"
    assert layout.digest("caption", "\ud83d\ude00") != layout.digest("caption", "\U0001f600")


def test_every_encoding_field_changes_the_id() -> None:
    import dataclasses

    for encoding in (LATENT, TEXT):
        for field in dataclasses.fields(encoding):
            value = getattr(encoding, field.name)
            other = {bool: lambda v: not v, int: lambda v: v + 1, float: lambda v: v + 1.0}.get(
                type(value), lambda v: (1, 2, 3) if isinstance(v, tuple) else "other"
            )(value)
            changed = dataclasses.replace(encoding, **{field.name: other})
            assert changed.id != encoding.id, field.name
            assert any(line.startswith(field.name + ":") for line in encoding.difference(changed))


def test_golden_identities() -> None:
    """Written down: changing one of these orphans every cache there is."""
    assert LATENT.key(bytes(16), 64, 32).hex() == GOLDEN["latent"]
    assert TEXT.key("a cat").hex() == GOLDEN["text"]
    assert TEXT.null_key.hex() == GOLDEN["null"]
    assert layout.sample_id("photos", "a/b.jpg") == GOLDEN["sample"]
    assert layout.checksum(LATENT.id, bytes(16), b"payload").hex() == GOLDEN["checksum"]


GOLDEN = {
    "latent": "7958c041f4ce05251f5487a60c1e560b",
    "text": "6176cbbcfc8de3f457ae6d8e94fb4648",
    "null": "84bc2bbda8a43b4616077c81fd4d008c",
    "sample": 16899451730638848447,
    "checksum": "3eb512c065d1733b63dc77405422fb46",
}


# ---------------------------------------------------------------- publication


@pytest.mark.parametrize(
    "open_cache", [lambda root: Cache(root, create=True), lambda root: cache_location(config(root)).open_if_there()]
)
def test_another_process_may_make_the_cache_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_cache: Callable[[Path], object]
) -> None:
    """After it was looked for, and before the folder is listed."""
    real = Files.names

    def names(files: Files, folder: str) -> list[str]:
        monkeypatch.undo()
        Cache(tmp_path / "cache", create=True)
        return real(files, folder)

    monkeypatch.setattr(Files, "names", names)
    open_cache(tmp_path / "cache")
    assert Files.names is real


def test_a_folder_without_a_cache_is_named_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is in another folder than the day before sees it at once."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CacheError, match=re.escape(f"{tmp_path}/cache: there is no cache here")):
        Cache("./cache")


def test_put_if_absent_has_one_winner(tmp_path: Path) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); from sana_pipe.data.cache.files import Files; "
        "f = Files(sys.argv[2]);"
        "print(sum(f.put(f'race/{i}.json', sys.argv[3].encode()) for i in range(200)))"
    )
    racers = [
        subprocess.Popen([sys.executable, "-c", script, ROOT, tmp_path, str(n)], stdout=subprocess.PIPE, text=True)
        for n in range(4)
    ]
    wins = [int(racer.communicate()[0]) for racer in racers]
    assert sum(wins) == 200 and len(Files(tmp_path).names("race")) == 200
    assert Files(tmp_path).names("tmp") == []


def test_a_damaged_shard_is_replaced_by_a_writer_of_the_same_content(tmp_path: Path) -> None:
    cache, name, table = write(tmp_path / "c")
    path = cache.files.path(layout.Paths.shard(LATENT.name, name))
    path.write_bytes(b"rot" + path.read_bytes()[3:])
    write(tmp_path / "c")
    assert cache.files.mapped(layout.Paths.shard(LATENT.name, name), name)
    read_all(cache, name, table)


def test_a_file_that_does_not_read_back_is_not_published(tmp_path: Path) -> None:
    place = Files(tmp_path)
    with place.temporary() as path:
        path.write_bytes(b"other bytes")
        with pytest.raises(IntegrityError):
            place.publish_content(path, "x/name", layout.content_digest(b"bytes"))
    assert not place.exists("x/name")


def test_what_is_read_back_comes_from_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No page of a written file is in memory when it is compared."""
    resident: list[bool] = []
    real = disk.check_digest

    def check(path: Path, digest: str) -> None:
        with open(path, "rb") as file:
            try:
                os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
                resident.append(True)
            except BlockingIOError:
                resident.append(False)
            except OSError:
                pytest.skip("this file system cannot tell what is in memory")
        real(path, digest)

    if not hasattr(os, "RWF_NOWAIT"):
        pytest.skip("this system cannot tell what is in memory")
    monkeypatch.setattr(disk, "check_digest", check)
    with tempfile.TemporaryDirectory() as folder:  # on a disk: pytest's folder may be in memory
        place = Files(Path(folder))
        assert place.put("names/a/00000000.json", layout.seal({"name": "a"}))
        place.put_content(b"some bytes", "tables", "npy")
        place.put_table(lambda file: file.write(b"more bytes"), "npy")
        with shard.ShardWriter(place, LATENT, "u") as writer:
            writer.add(b"k" * 16, bits((4, 2, 3)))
            writer.finish()
    assert resident == [False] * 5


def test_a_read_only_cache_is_an_error_for_people(tmp_path: Path, bound_by_permissions: Callable[[], None]) -> None:
    cache = Cache(tmp_path / "c", create=True)
    os.chmod(tmp_path / "c", 0o555)
    script = "import sys; from sana_pipe.data.cache.files import Files; Files(sys.argv[1]).put('x', b'y')"
    put = [sys.executable, "-c", script, str(tmp_path / "c")]
    done = subprocess.run(put, cwd=ROOT, preexec_fn=bound_by_permissions, capture_output=True, text=True)
    assert "CacheError" in done.stderr and "cannot be written" in done.stderr
    assert f"found:    {tmp_path / 'c'} is dr-xr-xr-x of user " in done.stderr
    assert f"fix:      chmod -R g+ws {tmp_path / 'c'}, as its owner" in done.stderr
    assert not cache.files.exists("x")


@pytest.mark.parametrize("mode", [0o2775, 0o770, 0o700])
def test_the_group_may_do_with_a_file_what_it_may_with_the_cache(mode: int, tmp_path: Path) -> None:
    top = tmp_path / "cache"
    top.mkdir()
    top.chmod(mode)
    before = os.umask(0o077)
    try:
        cache = add(config(top), "s", pictures(3))
        cache.files.replace("x", b"y")
    finally:
        os.umask(before)
    for path in top.rglob("*"):
        wanted = mode & (0o2070 if path.is_dir() else 0o060)
        assert path.stat().st_mode & 0o2070 == wanted, path


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")
def test_users_of_one_group_write_into_one_cache() -> None:
    """Whatever their umask: each publishes, refreshes, replaces and removes what the other made."""

    def writes(top: Path, user: int, other: int) -> None:
        os.umask(0o077)
        os.setgroups([])
        os.setresgid(GROUP, GROUP, GROUP)
        os.setresuid(user, user, user)
        files, theirs = Files(str(top)), f"units/{other}"
        assert files.put(f"units/{user}", b"1") and files.put_content(b"both", "tables", "x")
        if files.has_file(theirs):
            assert files.store.refresh(theirs)
            files.replace(theirs, b"2")
            assert files.store.remove(theirs)

    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        top = Path(folder, "cache")
        top.mkdir()
        os.chown(top, GROUP + 1, GROUP)
        top.chmod(0o2775)
        for user, other in ((GROUP + 1, GROUP + 2), (GROUP + 2, GROUP + 1)):
            process = multiprocessing.get_context("fork").Process(target=writes, args=(top, user, other))
            process.start()
            process.join()
            assert process.exitcode == 0
        assert not (top / "units" / str(GROUP + 1)).exists() and (top / "units" / str(GROUP + 2)).exists()


def test_gaps_in_numbered_documents_are_noticed(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "c", create=True)
    for n in range(3):
        assert cache.add_plan(LATENT.name, n, [], pa.table({"key": pa.array([], pa.binary(16))}))
    lost = layout.Paths.numbered(layout.Paths.plans(LATENT.name), 1)
    cache.files.path(lost).unlink()
    assert len(cache.plans(LATENT.name)) == 3, "its copy counts"
    cache.files.path(layout.Paths.copy(lost)).unlink()
    with pytest.raises(IntegrityError, match="missing"):
        cache.plans(LATENT.name)


def test_a_folder_that_is_no_cache_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"x")
    with pytest.raises(CacheError, match=naming(tmp_path, "--set cache=DIR")):
        Cache(tmp_path, create=True)
    with pytest.raises(CacheError, match=naming(tmp_path / "absent", "sana-pipe encode")):
        Cache(tmp_path / "absent")


# ---------------------------------------------------------------- commits


def commit_unit(cache: Cache, plan: int, unit: str, first: int, count: int = 2) -> index.Commit:
    with shard.ShardWriter(cache.files, LATENT, unit) as writer:
        for i in range(first, first + count):
            writer.add(LATENT.key(bytes([i] * 16), 16, 24), bits((4, 2, 3), i))
        made = writer.finish()
    commit = index.commit_of(
        cache.files, unit, made, [index.RecordReject("00" * 16, "bad.jpg", "broken")], {"torch": "2"}
    )
    index.publish_commit(cache.files, LATENT.name, plan, commit)
    return commit


def planned(cache: Cache) -> None:
    table = pa.table({"key": pa.array([bytes([i] * 16) for i in range(4)], pa.binary(16))})
    assert cache.add_plan(LATENT.name, 0, [Unit("aa", 0, 2, 2), Unit("bb", 2, 2, 2)], table)
    assert not cache.add_plan(LATENT.name, 0, [], table)


def test_segments_replace_unit_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path / "c", create=True)
    planned(cache)
    commit_unit(cache, 0, "aa", 0)
    assert not index.merge(cache.files, LATENT.name, 0, ["aa", "bb"])
    assert len(cache.index(LATENT.name)) == 2
    commit_unit(cache, 0, "bb", 2)
    loose = cache.index(LATENT.name)
    assert index.merge(cache.files, LATENT.name, 0, ["aa", "bb"])
    with monkeypatch.context() as patch:  # records that are merged are not read again
        patch.setattr(index, "merged", None)
        assert index.merge(cache.files, LATENT.name, 0, ["aa", "bb"])
    import shutil

    shutil.rmtree(cache.files.path(f"units/{LATENT.name}"))
    merged = cache.index(LATENT.name)
    for name, column in loose.columns.items():
        assert np.array_equal(column, merged.columns[name]), name
    assert loose.shards == merged.shards and len(merged.rejects) == 2
    assert index.committed(cache.files, LATENT.name, 0) == {"aa", "bb"}


def test_an_index_keeps_no_commits_of_its_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path / "c", create=True)
    for plan in range(5):
        table = pa.table({"key": pa.array([bytes([plan]) * 16], pa.binary(16))})
        assert cache.add_plan(LATENT.name, plan, [Unit("aa", 0, 1, 1)], table)
        commit_unit(cache, plan, "aa", 2 * plan)
        if plan < 4:
            assert index.merge(cache.files, LATENT.name, plan, ["aa"])
    fill = index.RecordIndex._fill

    def commits() -> dict[int, index.Commit]:
        gc.collect()
        return {id(one): one for one in gc.get_objects() if isinstance(one, index.Commit)}

    of_other_tests, kept = commits(), list[index.Commit]()

    def filled(self: index.RecordIndex, batches: Any) -> None:
        kept.extend(one for name, one in commits().items() if name not in of_other_tests)
        fill(self, batches)

    monkeypatch.setattr(index.RecordIndex, "_fill", filled)
    assert len(found := cache.index(LATENT.name)) == 10
    assert (len(found.shards), len(found.rejects)) == (5, 5)
    assert len(kept) == 1 and (kept[0].rejects, kept[0].provenance) == ((), {}), "only that without a segment"


@pytest.mark.parametrize("lowered", [False, True])
def test_a_merged_table_is_that_of_the_units_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lowered: bool
) -> None:
    cache = Cache(tmp_path / "c", create=True)
    done = [commit_unit(cache, 0, unit, first, count) for unit, first, count in (("aa", 0, 3), ("bb", 3, 1))]
    done = [*done, index.Commit("cc", None, 0, 0, None, (), {}), commit_unit(cache, 0, "dd", 4, 5)]
    tables = [
        cache.files.mapped(layout.Paths.table(one.table, "arrow"), one.table) for one in done if one.table is not None
    ]
    shards = [[one.shard] * one.records for one in done if one.shard is not None]
    parts = [
        shard.from_ipc(data, "").append_column("shard", pa.array(names, pa.string()).dictionary_encode())
        for data, names in zip(tables, shards, strict=True)
    ]
    expected = shard.to_ipc(pa.concat_tables(parts))
    if lowered:
        lower_limits(monkeypatch)
    whole = index.whole_table(cache.files, LATENT.name, done)
    before = pa.total_allocated_bytes()
    assert arrow.combined(whole).equals(whole) and pa.total_allocated_bytes() == before, "no copy is made to write it"
    assert (str(tmp_path) in Path("/proc/self/maps").read_text()) == lowered
    digest, rows = index.merged(cache.files, LATENT.name, done)
    assert (cache.files.mapped(layout.Paths.table(digest, "arrow"), digest), rows) == (expected, 9)
    assert not list((tmp_path / "c" / "tmp").iterdir())


def test_keys_are_found_where_they_are_and_only_there() -> None:
    """Against a dictionary; with keys that share a first half, end in zeros, or are the smallest and the largest."""
    rng = np.random.default_rng(0)
    keys = [bytes(rng.integers(0, 256, 16, np.uint8)) for _ in range(300)]
    keys += [keys[0][:8] + bytes([i, *[0] * 7]) for i in range(5)] + [bytes(16), b"\xff" * 16, keys[1][:15] + b"\0"]
    present, absent = keys[::2], keys[1::2]
    for sorted_keys in (sorted(present), sorted([*present, *present])):
        result = SortedKeys(*halves(as_keys(sorted_keys)))
        rows = result.find(as_keys(keys))
        assert rows.tolist() == [sorted_keys.index(key) if key in present else -1 for key in keys]
        assert (result.find(as_keys(absent)) == -1).all()
    assert SortedKeys(*halves(as_keys([]))).find(as_keys(keys[:3])).tolist() == [-1, -1, -1]


def test_a_late_commit_changes_nothing(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "c", create=True)
    planned(cache)
    first = commit_unit(cache, 0, "aa", 0)
    before = cache.files.read(layout.Paths.unit(LATENT.name, 0, "aa"))
    commit_unit(cache, 0, "aa", 40)  # a zombie with other bytes
    assert cache.files.read(layout.Paths.unit(LATENT.name, 0, "aa")) == before
    assert cache.index(LATENT.name).shards == [first.shard]


def test_the_later_plan_wins(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "c", create=True)
    planned(cache)
    commit_unit(cache, 0, "aa", 0)
    cache.add_plan(LATENT.name, 1, [Unit("cc", 0, 1, 1)], pa.table({"key": pa.array([bytes(16)], pa.binary(16))}))
    commit_unit(cache, 1, "cc", 1, count=1)
    result = cache.index(LATENT.name)
    assert len(result) == 2
    row = result.find(as_keys([LATENT.key(bytes([1] * 16), 16, 24)]))[0]
    assert result.shards[result.columns["shard"][row]] == result.shards[1]
    assert not result.has(bytes(16))


def test_a_repaired_shard_is_published_only_if_it_has_the_same_bytes(tmp_path: Path) -> None:
    _, name, _ = write(tmp_path / "first")
    for only in (name, "0" * len(name)):
        cache = Cache(tmp_path / only, create=True)
        with shard.ShardWriter(cache.files, LATENT, "unit") as writer:
            for i in range(3):
                writer.add(LATENT.key(bytes([i] * 16), 16, 24), bits((4, 2, 3), i))
            assert writer.finish(only=only)[0] == name
        assert cache.files.exists(layout.Paths.shard(LATENT.name, name)) == (only == name)


def test_a_lost_index_is_made_again_from_the_shard(tmp_path: Path) -> None:
    cache, name, table = write(tmp_path / "c", encoding=TEXT)
    again = shard.read_table(cache.files, layout.Paths.shard(TEXT.name, name))
    assert again.equals(table)
    reader = shard.ShardReader(cache.files, TEXT.name)
    row = table.to_pylist()[1]
    where = (row["caption_offset"], row["caption_length"], row["key"])
    assert reader.caption(name, *where, row["caption_checksum"]) == "Caption 1 é"
    with pytest.raises(IntegrityError, match="caption"):
        reader.caption(name, *where, bytes(16))


@pytest.mark.parametrize("kind", ["latent", "text"])
def test_a_lost_table_whose_shards_are_lost_too_is_an_error_of_the_table(tmp_path: Path, kind: str) -> None:
    cache = tiny_cache.build(tmp_path / "cache")
    name = cache.encodings(kind)[0].name
    for folder in ("tables", "shards"):
        for path in cache.files.path(folder).rglob("*.*"):
            path.unlink()
    with pytest.raises(IntegrityError, match=r"tables/.*\.arrow: is missing"):
        cache.index(name)


def test_an_index_is_built_again_when_there_is_another_plan(tmp_path: Path) -> None:
    of = config(tmp_path / "cache")
    cache = add(of, "one", pictures(6))
    name = LATENTS.name
    first = cache.index(name)
    assert cache.index(name) is not first, "by default others' records are looked for each time"
    cache.reuses_indexes = True
    first = cache.index(name)
    assert cache.index(name) is first and len(first) == 6
    add(of, "two", pictures(10, "other"))
    assert len(cache.index(name)) == 16


def test_the_names_of_shards_are_looked_up_once_for_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, real, numbered = [], pc.index_in, index._numbered
    monkeypatch.setattr(pc, "index_in", lambda names, **rest: (asked.append(len(names)), real(names, **rest))[1])
    monkeypatch.setattr(arrow, "ROWS", 3)
    shards = ["b", "a", "c", "a", "b", "b", "a", "c", "c", "a"]
    chunks = [pa.array(some).dictionary_encode() for some in (shards[:4], shards[4:6], shards[6:])]
    table = pa.table({"key": range(10), "shard": pa.chunked_array(chunks)})
    names = pa.array(["a", "b", "a", "c"])  # of equal names the last
    parts = list(numbered(table, names, 5))
    assert [len(part) for part in parts] == [3, 3, 3, 1]
    positions = [5 + "-bac".index(shard) for shard in shards]
    assert pa.concat_tables(parts).to_pydict() == {"key": list(range(10)), "shard": positions}
    assert asked == [3]
    assert list(numbered(table.slice(0, 0), names, 0)) == []


def test_status_counts_what_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "PER_UNIT", 10)
    items = [*pictures(45), replace(pictures(1, "bad-")[0], reject="broken")]
    cache = add(config(tmp_path / "cache"), "s", items)
    name, root = LATENTS.name, tmp_path / "cache"
    (plan,) = cache.plans(name)
    missing = plan.units[-1]
    for document in (Paths.segment(name, 0), Paths.unit(name, 0, missing.unit)):
        for place in (document, Paths.copy(document)):
            (root / place).unlink()

    result = status(Cache(root))
    named = {name: result[name] for name in ("cache", "snapshots", "packed", "prompts", "damaged", "complete")}
    assert named == dict(zip(named, (cache.location, {}, [], {}, {}, False))) and result["free_bytes"] > 0
    assert result["sources"]["s"].items() >= {"items": 46, "rejected": 1, "root": "/nowhere"}.items()
    (text,) = (counts for key, counts in result["stores"].items() if key != name)
    assert (text["units_done"], text["records_missing"]) == (text["units"], 0)
    assert [unit.count for unit in plan.units] == [10, 10, 10, 10, 5]
    assert result["stores"][name] == {
        "plans": 1,
        "units": 5,
        "units_done": 4,
        "records": 40,
        "records_missing": 5,
        "rejects": 0,
        "bytes": sum(commit.bytes for commit in index.commits(cache.files, name, 0)),
    }


def test_ctrl_c_that_meets_the_closing_of_a_handle_is_not_lost(tmp_path: Path) -> None:
    """What a `__del__` raises is dropped: `status --watch` went on. So no Python function may run."""
    (tmp_path / "file").touch()
    handle = disk.Handle(os.open(tmp_path / "file", os.O_RDONLY))
    descriptor, called = handle.descriptor, []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    del handle
    sys.setprofile(None)
    assert not called
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
