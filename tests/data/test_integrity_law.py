"""The integrity law: whatever happens to a byte of a shard, an index or a snapshot, a reader raises an error that names
the file (and the record), or what it reads is provably what was written. Silent cases are counted; there are none.

The default set tries a sample of the bits; `slow` tries all of them. The bytes that no reader looks at (tar headers and
padding) change nothing that is read, and `verify`'s digest of the whole file sees them.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from sana_pipe.base import disk
from sana_pipe.base.errors import CacheError
from sana_pipe.data.cache import audit, layout
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.files import Files
from sana_pipe.data.cache.garbage import unneeded
from sana_pipe.data.cache.shard import ShardReader
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.cache.snapshot_samples import NAMES
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.signals.text import TextEncoding
from tests.support import tiny_cache
from tests.support.consumed import loader, sequence
from tests.support.damage import flip

SAMPLED = 150


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with one bucket of three samples: a shard of three latents, one of four captions and the null record."""
    root = tmp_path_factory.mktemp("golden") / "cache"
    tiny_cache.build(root, {(16, 16): 3}, batch=3, per_shard=5)
    shutil.rmtree(root / "copies")  # they would be read instead of what is damaged here (see test_documents)
    return root


@pytest.fixture
def copy(golden: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(golden, tmp_path / "cache"))


def read(root: Path) -> list[list[str]]:
    """Everything that training reads: two epochs, every caption, the null record."""
    return sequence(loader(Cache(root), caption_drop=0.1, stop_step=6))


def shards(root: Path, kind: str) -> list[Path]:
    return sorted(root.glob(f"shards/{kind}-*/*/*.tar"))


@dataclass
class Tally:
    """What became of faults. A fault is silent if what is read changes and nobody says so."""

    truth: object
    noticed: int = 0
    harmless: int = 0
    silent: list[str] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)

    def judge(self, what: str, reading: Callable[[], object], names: Iterable[str]) -> bool:
        """Read with the fault in place. Returns whether it was noticed."""
        try:
            result = reading()
        except CacheError as error:
            self.noticed += 1
            if not any(name in str(error) for name in names):
                self.unnamed.append(f"{what}: {error}")
            return True
        if result == self.truth:
            self.harmless += 1
        else:
            self.silent.append(what)
        return False

    def check(self, *, noticed: int | None = None) -> None:
        assert not self.silent, f"{len(self.silent)} silent cases: {self.silent[:5]}"
        assert not self.unnamed, self.unnamed[:3]
        assert self.noticed if noticed is None else self.noticed == noticed


def flips(path: Path, count: int | None, favour: Iterable[int] = ()) -> Iterator[tuple[int, bytes]]:
    """Flip bits of a file, one at a time, in place (open files and mappings see it); restored between and at the end.

    Args:
        count: how many, drawn at random; None: all.
        favour: bytes of which another `count` bits are drawn.
    """
    good, draw = path.read_bytes(), random.Random(0)
    every = range(len(good) * 8)
    chosen: Iterable[int] = every
    if count is not None:
        inside = [byte * 8 + bit for byte in favour for bit in range(8)]
        chosen = sorted({*draw.sample(every, min(count, len(every))), *draw.sample(inside, min(count, len(inside)))})
    descriptor = os.open(path, os.O_RDWR)
    try:
        for position in chosen:
            byte = position // 8
            os.pwrite(descriptor, bytes([good[byte] ^ 1 << position % 8]), byte)
            try:
                yield position, good
            finally:
                os.pwrite(descriptor, good[byte : byte + 1], byte)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------- shards


@pytest.mark.parametrize("kind", ["latent", "text"])
@pytest.mark.parametrize("count", [SAMPLED, pytest.param(None, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])])
def test_bits_of_a_shard(copy: Path, kind: str, count: int | None) -> None:
    tested = loader(Cache(copy), caption_drop=0.0, stop_step=None)

    snapshot, null = tested.snapshot, tested.snapshot.null
    captions, steps = {c.key for row in range(3) for c in snapshot.sample(row).captions}, 0
    while captions:  # until every caption has been seen
        captions -= {key.ljust(16, b"\0") for key in tested.planner.step(steps).texts["key"].tolist()}
        steps += 1
    reader, rows = ShardReader(snapshot.files, snapshot.encoding(TextEncoding).name), np.empty((9, 3), np.uint16)

    def reading() -> object:
        reader.read(null.shard, null.offset, null.key, null.checksum, rows)
        loaded = [tested.load(step).batches for step in range(steps)]
        return [[b.latents.tolist(), b.captions.tolist()] for batches in loaded for b in batches], rows.tolist()

    records: dict[str, list[tuple[int, int, str]]] = {}
    for row in range(len(snapshot)):
        sample = snapshot.sample(row)
        latents = [(sample.pictures["latent"], 2 * 2 * 2 * 2)]
        for place, size in latents if kind == "latent" else [(each, each.rows * 3 * 2) for each in sample.captions]:
            records.setdefault(place.shard, []).append((place.offset, size, place.key.hex()))
    if kind == "text":
        records[null.shard].append((null.offset, null.rows * 6, null.key.hex()))
    tally, inside = Tally(reading()), 0
    for path in shards(copy, kind):
        known = records[path.stem]
        inner = [byte for offset, size, _ in known for byte in range(offset, offset + size)]
        for position, _ in flips(path, count, inner):
            hit = [key for offset, size, key in known if offset <= position // 8 < offset + size]
            noticed = tally.judge(f"bit {position} of {path.name}", reading, [path.stem])
            inside += bool(hit)
            assert noticed == bool(hit), "an error where no record is, or none where one is"
            assert Files(copy).digest(path.relative_to(copy).as_posix()) != path.stem, "verify does not see it"
    tally.check(noticed=inside)
    assert inside > 100 and tally.harmless > 100


def test_a_record_that_is_hit_is_named(copy: Path) -> None:
    """Every bit of one latent and of one caption's rows."""
    snapshot = Cache(copy).open_snapshot()
    sample = snapshot.sample(1)
    for encoding, place, size in (
        (snapshot.encoding(LatentEncoding), sample.pictures["latent"], 16),
        (snapshot.encoding(TextEncoding), sample.captions[0], sample.captions[0].rows * 6),
    ):
        path = copy / layout.Paths.shard(encoding.name, place.shard)
        reader, into = ShardReader(Files(copy), encoding.name), np.empty(size // 2, np.uint16)
        good = path.read_bytes()
        for position in range(place.offset * 8, (place.offset + size) * 8):
            bad = bytearray(good)
            bad[position // 8] ^= 1 << position % 8
            path.write_bytes(bad)
            with pytest.raises(CacheError, match=f"{place.shard}.*record {place.key.hex()} at byte {place.offset} "):
                reader.read(place.shard, place.offset, place.key, place.checksum, into)
        path.write_bytes(good)
        reader.read(place.shard, place.offset, place.key, place.checksum, into)


@pytest.mark.parametrize("kind", ["latent", "text"])
@pytest.mark.parametrize("step", [97, pytest.param(1, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])])
def test_truncation_at_every_length(copy: Path, kind: str, step: int) -> None:
    truth = read(copy)
    for path in shards(copy, kind):
        good, tally = path.read_bytes(), Tally(truth)
        lengths = range(len(good) - 1, -1, -step)
        for length in lengths:
            os.truncate(path, length)
            tally.judge(f"{path.name} cut to {length}", lambda: Cache(copy).open_snapshot().check_shards(), [path.stem])
        tally.check(noticed=len(lengths))
        path.write_bytes(good)
    assert read(copy) == truth


def test_truncation_while_it_is_read(copy: Path) -> None:
    """Open already, so that the size is not looked at again."""
    for path in (*shards(copy, "latent"), *shards(copy, "text")):
        good, own = path.read_bytes(), loader(Cache(copy), caption_drop=0.0)

        def reading(own: object = own) -> object:
            return [[b.latents.tolist(), b.captions.tolist()] for s in (0, 1) for b in own.load(s).batches]  # type: ignore[attr-defined]

        tally = Tally(reading())
        for length in range(len(good) - 1, 0, -37):
            os.truncate(path, length)
            tally.judge(f"{path.name} cut to {length}", reading, [path.stem])
        tally.check()
        path.write_bytes(good)


def test_a_zeroed_page(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    tiny_cache.build(root, {(16, 16): 24}, batch=24, per_shard=12)
    tally = Tally(read(root))
    for path in (*shards(root, "latent"), *shards(root, "text")):
        good = path.read_bytes()
        for page in range(0, len(good), 4096):
            bad = bytearray(good)
            bad[page : page + 4096] = bytes(len(bad[page : page + 4096]))
            if bad == good:
                continue  # the end of a tar is zeros
            path.write_bytes(bad)
            tally.judge(f"page {page} of {path.name}", lambda: read(root), [path.stem])
            assert Files(root).digest(path.relative_to(root).as_posix()) != path.stem
        path.write_bytes(good)
    tally.check()
    assert tally.judge("control", lambda: read(root), []) is False


# ---------------------------------------------------------------- whole files


def swap(one: Path, two: Path) -> None:
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)


def test_whole_files(tmp_path: Path) -> None:
    """Swapped siblings of equal size, swapped records, a foreign shard of equal shape, a deleted, doubled and extra
    shard; and the control without a fault."""
    root = tmp_path / "cache"
    tiny_cache.build(root, {(16, 16): 24}, batch=24, per_shard=8)  # three latent shards of equal size
    truth = read(root)
    foreign = tmp_path / "foreign"
    tiny_cache.build(foreign, {(16, 16): 24}, batch=24, per_shard=8, names="other", seed=1)

    def sibling(cache: Path) -> list[Path]:
        one, two = shards(cache, "latent")[:2]
        assert one.stat().st_size == two.stat().st_size
        swap(one, two)
        return [one, two]

    def records(cache: Path, kind: str) -> list[Path]:
        """Two records of one shard change places, headers and all."""
        snapshot = Cache(cache).open_snapshot()
        places: dict[str, list[tuple[int, int]]] = {}
        for row in range(len(snapshot)):
            sample = snapshot.sample(row)
            latents = [(sample.pictures["latent"], 16)]
            for place, size in latents if kind == "latent" else [(c, c.rows * 6) for c in sample.captions]:
                places.setdefault(place.shard, []).append((place.offset, size))
        for name, result in places.items():
            for i, (a, size) in enumerate(result):
                for b, other in result[i + 1 :]:
                    path = next(cache.glob(f"shards/{kind}-*/*/{name}.tar"))
                    data = bytearray(path.read_bytes())
                    if size == other and data[a : a + size] != data[b : b + size]:
                        data[a - 640 : a + size], data[b - 640 : b + size] = (
                            data[b - 640 : b + size],
                            data[a - 640 : a + size],
                        )
                        path.write_bytes(data)
                        return [path]
        raise AssertionError("no two records of equal size")

    def stranger(cache: Path) -> list[Path]:
        target, source = shards(cache, "latent")[0], shards(foreign, "latent")
        other = next(path for path in source if path.stat().st_size == target.stat().st_size)
        target.write_bytes(other.read_bytes())
        return [target]

    def deleted(cache: Path) -> list[Path]:
        path = shards(cache, "text")[0]
        path.unlink()
        return [path]

    def grown(cache: Path) -> list[Path]:
        path = shards(cache, "latent")[0]
        path.write_bytes(path.read_bytes() * 2)
        return [path]

    noisy: dict[str, Callable[[Path], list[Path]]] = {
        "swapped siblings": sibling,
        "swapped latents": lambda c: records(c, "latent"),
        "swapped texts": lambda c: records(c, "text"),
        "foreign shard": stranger,
        "deleted shard": deleted,
        "shard with its content twice": grown,
    }
    tally = Tally(truth)
    for number, (what, fault) in enumerate(noisy.items()):
        cache = Path(shutil.copytree(root, tmp_path / str(number)))
        touched = fault(cache)
        assert tally.judge(what, lambda cache=cache: read(cache), [path.stem for path in touched]), what
        findings = [f.path for f in audit.verify(Cache(cache))]
        assert any(path.stem in name for path in touched for name in findings), f"verify does not see {what}"
    tally.check(noticed=len(noisy))

    # A second copy of a shard under another name, and a shard of another cache: nothing refers to them, nothing is read
    # from them, so nothing changes; `gc` lists them.
    cache = Path(shutil.copytree(root, tmp_path / "extra"))
    doubled = shards(cache, "latent")[0]
    for name, source in (("0" * 32, doubled), (shards(foreign, "latent")[0].stem, shards(foreign, "latent")[0])):
        target = doubled.parent.parent / name[:2] / f"{name}.tar"
        target.parent.mkdir(exist_ok=True)
        shutil.copy(source, target)
    assert tally.judge("doubled and extra shard", lambda: read(cache), []) is False
    assert tally.harmless == 1
    assert {path for path, _, _ in unneeded(Cache(cache), older_than_s=0)} >= {
        t.relative_to(cache).as_posix()
        for t in shards(cache, "latent")
        if t.stem not in {p.stem for p in shards(root, "latent")}
    }
    assert tally.judge("control", lambda: read(root), []) is False


# ---------------------------------------------------------------- index and snapshot


@pytest.mark.parametrize("count", [40, pytest.param(None, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])])
@pytest.mark.parametrize("of", ["segments", "tables"])
def test_bits_of_the_index(copy: Path, of: str, count: int | None) -> None:
    """Segments, and the record tables that they name: what `bucket` reads."""
    cache = Cache(copy)
    encodings = [r.name for r in tiny_cache.encodings()]

    def reading() -> object:
        result = [Cache(copy).index(encoding) for encoding in encodings]
        return [(i.shards, i.bytes, {name: column.tolist() for name, column in i.columns.items()}) for i in result]

    tally = Tally(reading())
    if of == "segments":
        paths = [copy / layout.Paths.segment(encoding, 0) for encoding in encodings]
    else:
        tables = [cache.files.document(layout.Paths.segment(encoding, 0))["table"] for encoding in encodings]
        paths = [copy / layout.Paths.table(table, "arrow") for table in tables]
    bits = 0
    for path in paths:
        for position, _ in flips(path, count):
            tally.judge(f"bit {position} of {path.name}", reading, [path.name])
            assert bits % (10 if count else 1000) or any(path.stem in f.path for f in audit.verify(Cache(copy)))
            bits += 1
    # A damaged table does no harm while its shard says the same; `verify` names it all the same.
    tally.check(noticed=bits if of == "segments" else bits - tally.harmless)
    assert reading() == tally.truth


@pytest.mark.parametrize("count", [100, pytest.param(None, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])])
@pytest.mark.parametrize("of", ["head", "shards", "chunks", "samples", "names"])
def test_bits_of_a_snapshot(copy: Path, of: str, count: int | None) -> None:
    opened = Cache(copy).open_snapshot()
    [chunk] = opened.head.chunks
    shards, chunks = opened.head.shards["latent"], opened.head.chunks
    tables = {
        "samples": chunk.samples,
        "names": chunk.names,
        "shards": shards.entry.table,
        "chunks": chunks.entry.table,
    }
    path = copy / (layout.Paths.snapshot(opened.id) if of == "head" else layout.Paths.table(tables[of], "arrow"))

    def reading() -> object:
        snapshot = Snapshot(Files(copy), opened.id)
        if of == "names":
            return [snapshot.source_item(row) for row in range(len(snapshot))], str(NAMES)
        return snapshot.head, [snapshot.sample(row) for row in range(len(snapshot))]

    tally, bits = Tally(reading()), 0
    for position, _ in flips(path, count):
        tally.judge(f"bit {position} of {path.name}", reading, [path.name])
        bits += 1
    for length in range(0, path.stat().st_size, 1 if count is None else 101):
        good = path.read_bytes()
        path.write_bytes(good[:length])
        tally.judge(f"{path.name} cut to {length}", reading, [path.name])
        bits += 1
        path.write_bytes(good)
    tally.check(noticed=bits)
    assert reading() == tally.truth


# ---------------------------------------------------------------- sabotage


def test_without_verification_there_are_silent_cases(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same judge, with the check of records taken out of the code: it must find silent cases."""
    truth = read(copy)
    snapshot = Cache(copy).open_snapshot()
    place = snapshot.sample(0).pictures["latent"]
    path = copy / layout.Paths.shard(snapshot.encoding(LatentEncoding).name, place.shard)
    flip(path, place.offset)
    with_it, without = Tally(truth), Tally(truth)
    assert with_it.judge("flip", lambda: read(copy), [path.stem])
    monkeypatch.setattr(ShardReader, "matches", lambda *a: True)
    assert not without.judge("flip", lambda: read(copy), [path.stem])
    assert without.silent == ["flip"]
    with pytest.raises(AssertionError, match="1 silent cases"):
        without.check()


@pytest.mark.parametrize("forgotten", ["key", "encoding"])
def test_without_identity_swapped_records_would_be_silent(
    copy: Path, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    """A checksum of the payload alone: the judge must see that a wrong record passes."""
    real = layout.checksum
    snapshot = Cache(copy).open_snapshot()
    one, two = (snapshot.sample(row).pictures["latent"] for row in range(2))
    reader, into = ShardReader(Files(copy), snapshot.encoding(LatentEncoding).name), np.empty((2, 2, 2), np.uint16)
    reader.read(one.shard, one.offset, one.key, one.checksum, into)
    path = copy / layout.Paths.shard(snapshot.encoding(LatentEncoding).name, one.shard)
    payload = path.read_bytes()[one.offset : one.offset + 16]
    encoding = snapshot.encoding(LatentEncoding).id
    other = (encoding, two.key) if forgotten == "key" else (LatentEncoding(weights="x").id, one.key)
    assert real(*other, payload) != one.checksum
    weak = (lambda r, k, p: real(r, b"", p)) if forgotten == "key" else (lambda r, k, p: real("00" * 16, k, p))
    monkeypatch.setattr(layout, "checksum", weak)
    assert layout.checksum(*other, payload) == layout.checksum(encoding, one.key, payload)


@pytest.mark.parametrize(
    "guard", ["the chunk's digest", "the list's digest", "the document's digest", "the table's digest"]
)
def test_without_digests_the_index_and_the_snapshot_would_be_silent(
    copy: Path, monkeypatch: pytest.MonkeyPatch, guard: str
) -> None:
    def unchecked(self: Files, name: str, digest: str, **given: object) -> pa.Buffer:
        return pa.py_buffer(self.read(name))

    opened = Cache(copy).open_snapshot()
    if guard == "the chunk's digest":
        name = opened.head.chunks[0].samples
        path, old = copy / layout.Paths.table(name, "arrow"), opened.sample(0).pictures["latent"].key
        monkeypatch.setattr(disk, "digest_of", lambda handle: name)
        reading: Callable[[], object] = lambda: Snapshot(Files(copy), opened.id).sample(0)  # noqa: E731
    elif guard == "the list's digest":
        name = opened.head.shards["latent"].entry.table
        path, old = copy / layout.Paths.table(name, "arrow"), bytes.fromhex(opened.sample(0).pictures["latent"].shard)
        monkeypatch.setattr(Files, "mapped", unchecked)
        reading = lambda: opened.head.parse(opened.head.values()).bound(Files(copy)).shards["latent"][:]  # noqa: E731
    elif guard == "the document's digest":
        path, old = copy / layout.Paths.segment(opened.encoding(LatentEncoding).name, 0), b'"records": 3'
        monkeypatch.setattr(layout, "unseal", lambda data, where: json.loads(data))
        reading = lambda: Cache(copy).files.document(path.relative_to(copy).as_posix())  # noqa: E731
    else:
        table = Cache(copy).files.document(layout.Paths.segment(opened.encoding(LatentEncoding).name, 0))["table"]
        path, old = copy / layout.Paths.table(table, "arrow"), opened.sample(0).pictures["latent"].key
        monkeypatch.setattr(Files, "mapped", unchecked)
        reading = lambda: Cache(copy).index(opened.encoding(LatentEncoding).name).keys.tolist()  # noqa: E731
    tally = Tally(reading())
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, old[:-1] + bytes([old[-1] ^ 1]), 1))
    tally.judge(guard, reading, [])
    assert tally.silent == [guard]
