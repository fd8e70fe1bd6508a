"""Documents with a long list: read and written in pieces, byte for byte and error for error as whole ones."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.cache import copies, layout, long_lists
from pipeline.cache.files import Files
from pipeline.cache.folder_store import FolderStore
from pipeline.cache.key_columns import Digests
from pipeline.cache.layout import Paths
from pipeline.errors import IntegrityError

RECIPE = "latent-00"
PLAN = Paths.numbered(Paths.plans(RECIPE), 0)
SEGMENT = Paths.segment(RECIPE, 0)


def units(count: int) -> list[dict[str, Any]]:
    return [{"unit": f"{n:032x}", "start": 3 * n, "count": 3, "batch": 8} for n in range(count)]


def commits(count: int) -> list[dict[str, Any]]:
    made_by = {"torch": "2", "threads": 1, "odd": 'ü "quoted" \\ \n  },\n  {', "nested": {"empty": [], "more": [1, {}]}}
    reject = {"key": "00" * 16, "item": "a\n ]\n.jpg", "reason": "unreadable", "retry": False}
    return [
        {
            "unit": f"{n:032x}",
            "shard": f"{n * 7:032x}" if n % 3 else None,
            "bytes": n,
            "records": n % 5,
            "table": None,
            "rejects": [reject] * (n % 4 == 1),
            "provenance": made_by if n % 7 else {},
        }
        for n in range(count)
    ]


def documents(count: int) -> dict[str, dict[str, Any]]:
    return {
        PLAN: {"recipe": RECIPE, "number": 0, "table": "aa", "units": units(count)},
        SEGMENT: {"recipe": RECIPE, "plan": 0, "table": "bb", "records": 9, "commits": commits(count)},
    }


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SMALL", 0), ("PIECE", 700), ("ENTRIES", 3)):
        monkeypatch.setattr(long_lists, name, value)


def in_pieces(data: bytes, size: int) -> Iterator[bytes]:
    return (data[at : at + size] for at in range(0, len(data), size))


@pytest.mark.parametrize("name", documents(1))
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 50])
def test_a_list_in_pieces_has_the_bytes_and_the_values_of_a_whole_one(
    small_pieces: None, name: str, count: int
) -> None:
    body = documents(count)[name]
    key, data = long_lists.KEYS[name.partition("/")[0]], layout.seal(body)
    listed = {**body, key: long_lists.LongList(body[key])}
    assert b"".join(long_lists.pieces(listed, key)) == data
    for size in (400, 1000, len(data)):
        parsed = long_lists.parse(in_pieces(data, size), key)
        assert parsed is not None
        assert {**parsed, key: list(parsed[key])} == layout.unseal(data, name) == body
        assert len(parsed[key]) == count
        assert [parsed[key][n] for n in range(-count, count)] == body[key] * 2
        assert parsed[key][1:] == body[key][1:]
        with pytest.raises(IndexError):
            parsed[key][count]


@pytest.mark.parametrize("name", documents(1))
def test_a_document_is_published_in_pieces_with_its_copy_and_once(
    small_pieces: None, tmp_path: Path, name: str
) -> None:
    files, body = Files(tmp_path), documents(20)[name]
    key = long_lists.KEYS[name.partition("/")[0]]
    listed = {**body, key: long_lists.LongList(body[key])}
    assert files.put_long(name, listed)
    for path in (name, Paths.copy(name)):
        assert files.read(path) == layout.seal(body)
    assert files.path(name).stat().st_ino != files.path(Paths.copy(name)).stat().st_ino
    assert isinstance(files.document(name)[key], long_lists.LongList)
    assert isinstance(files.parse(name, files.read(name))[key], long_lists.LongList), "of a store"
    files.path(name).unlink()
    assert not files.put_long(name, listed), "the copy of a lost document takes the name"
    assert not files.path(name).exists()
    assert not list((tmp_path / "tmp").iterdir())


def test_pieces_that_do_not_read_back_are_not_published(
    small_pieces: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, body = Files(tmp_path), documents(9)[PLAN]
    monkeypatch.setattr(
        "pipeline.cache.local_files.sync", lambda file: (file.seek(0), file.write(b"rot"), file.flush())
    )
    with pytest.raises(IntegrityError):
        files.put_long(PLAN, {**body, "units": long_lists.LongList(body["units"])})
    assert not files.exists(PLAN)


def test_who_copies_a_document_meanwhile_takes_nobodys_name(
    small_pieces: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may repair between the publication of a document and that of its copy."""
    files, body, publish = Files(tmp_path), documents(9)[PLAN], FolderStore.create

    def published(self: FolderStore, name: str, data: bytes | Path) -> bool:
        done = publish(self, name, data)
        return done and (name != PLAN or copies.repair(files, name))

    monkeypatch.setattr(FolderStore, "create", published)
    assert files.put_long(PLAN, {**body, "units": long_lists.LongList(body["units"])})
    assert copies.inspect(files, PLAN).whole


def test_an_unreadable_piece_is_damage_and_the_copy_is_read(
    small_pieces: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, body = Files(tmp_path), documents(9)[SEGMENT]
    files.put_long(SEGMENT, {**body, "commits": long_lists.LongList(body["commits"])})
    data = bytearray(files.path(SEGMENT).read_bytes())
    data[len(data) // 2] ^= 1
    files.path(SEGMENT).write_bytes(data)
    assert list(files.document(SEGMENT)["commits"]) == body["commits"]
    assert list(files.damage) == [SEGMENT]
    files.repairs = True
    files.document(SEGMENT)
    assert files.path(SEGMENT).read_bytes() == layout.seal(body)


@pytest.mark.parametrize("name", documents(1))
def test_both_copies_are_inspected_in_pieces(
    small_pieces: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    files, body = Files(tmp_path), documents(9)[name]
    key = long_lists.KEYS[name.partition("/")[0]]
    files.put_long(name, {**body, key: long_lists.LongList(body[key])})
    with monkeypatch.context() as patch:
        patch.setattr(Files, "read", lambda *_: pytest.fail("read whole"))
        assert copies.inspect(files, name).whole
    for path in (Paths.copy(name), name):
        good = files.read(path)
        for bad in (None, good[:-9], good.replace(b"0", b"1", 1), layout.seal({**body, "table": "another"})):
            files.path(path).unlink() if bad is None else files.path(path).write_bytes(bad)
            pair = copies.inspect(files, name)
            assert not pair.whole
            assert pair.document or pair.copy
            assert pair.data == (None if bad is not None and b"another" in bad else good)
        files.path(path).write_bytes(good)
    assert copies.inspect(files, name).whole


@pytest.mark.parametrize("name", documents(1))
def test_every_flipped_bit_is_refused_as_by_the_whole_reader(small_pieces: None, name: str) -> None:
    data, key = layout.seal(documents(4)[name]), long_lists.KEYS[name.partition("/")[0]]
    step = 1 if name == PLAN else 5
    for at in range(0, 8 * len(data), step):
        damaged = bytearray(data)
        damaged[at // 8] ^= 1 << at % 8
        assert long_lists.parse(in_pieces(bytes(damaged), 500), key) is None, at


@pytest.mark.parametrize("name", documents(1))
def test_what_is_written_in_another_way_is_refused(small_pieces: None, name: str) -> None:
    body = documents(5)[name]
    data, key = layout.seal(body), long_lists.KEYS[name.partition("/")[0]]
    sealed = json.loads(data)
    others = [
        data[:-1],
        data + b" ",
        data + data,
        b"",
        json.dumps(sealed, sort_keys=True, indent=1).encode(),
        json.dumps(dict(reversed(sealed.items())), indent=1).encode() + b"\n",
        layout.canonical(sealed),
        layout.seal({**body, key: []}),
        layout.seal({**body, key: [1, 2]}),
        layout.seal({**body, key: [{}]}),
        *(layout.seal({**body, key: [odd, *body[key]]}) for odd in ({}, 1, [], "text", [{}], None)),
        layout.seal(body).replace(b'"version": 1', b'"version": 2'),
        data.replace(b"\n  }", b"\n   }", 1),
        data.replace(b': "', b':  "', 1),
    ]
    for other in others:
        assert long_lists.parse(in_pieces(other, 500), key) is None
        assert long_lists.parse(iter([other]), key) is None


@pytest.mark.parametrize("name", documents(1))
def test_foreign_bytes_never_crash_the_reader_in_pieces(small_pieces: None, name: str) -> None:
    data, key = layout.seal(documents(6)[name]), long_lists.KEYS[name.partition("/")[0]]
    rng = random.Random(4)
    for _ in range(300):
        other = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(other))
            other[at : at + rng.randrange(9)] = rng.randbytes(rng.randrange(9))
        if bytes(other) != data:
            assert long_lists.parse(in_pieces(bytes(other), 300), key) is None


def test_another_plan_under_this_name_is_refused_in_pieces(small_pieces: None, tmp_path: Path) -> None:
    files, body = Files(tmp_path), documents(9)[PLAN]
    path = files.path(Paths.numbered(Paths.plans(RECIPE), 1))
    path.parent.mkdir(parents=True)
    path.write_bytes(layout.seal(body))
    with pytest.raises(IntegrityError):
        files.document(Paths.numbered(Paths.plans(RECIPE), 1))


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


def test_a_long_segment_needs_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read whole, its entries are 2 KB each."""
    for name, value in (("SMALL", 0), ("PIECE", 1 << 14), ("ENTRIES", 32)):
        monkeypatch.setattr(long_lists, name, value)
    files, count = Files(tmp_path), 2000
    made_by = {f"library {n}": f"{n}.{n}.{n}" for n in range(12)}
    entries = ({**commit, "provenance": made_by, "rejects": []} for commit in commits(count))
    body = {"recipe": RECIPE, "plan": 0, "table": "bb", "records": 9, "commits": long_lists.LongList(entries)}
    files.put_long(SEGMENT, body)
    files.path(SEGMENT).unlink()
    files.path(Paths.copy(SEGMENT)).unlink()
    tracemalloc.start()
    try:
        files.put_long(SEGMENT, body)
        written = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        listed = files.document(SEGMENT)["commits"]
        read = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(listed) == count and files.path(SEGMENT).stat().st_size > 1_000_000
    assert read < 600_000 and written < (4 << 20) + 600_000, "writing, 4 MiB are for reading back"
