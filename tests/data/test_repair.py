"""`verify --repair` of damage that comes in several steps: what it leaves, and which command it names."""

from __future__ import annotations

import dataclasses
import json
import shutil
import weakref
from collections.abc import Callable, Container, Iterable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import sana_pipe.stages.bucket
import sana_pipe.stages.encode
import sana_pipe.stages.gc
import sana_pipe.stages.status
import sana_pipe.stages.verify
from sana_pipe.base.errors import AwayError, CacheError, IntegrityError, NoSpaceError, UserError
from sana_pipe.config import Config, load
from sana_pipe.data.cache import audit, index, layout, shard
from sana_pipe.data.cache.cache import Cache, Unit, WorkList
from sana_pipe.data.cache.findings import GC, Finding
from sana_pipe.data.cache.keys import as_keys
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.cache.status import status
from sana_pipe.data.encoders import vae as encoders
from sana_pipe.data.encoders.text import TextEncoder
from sana_pipe.data.encoding import unit_records
from sana_pipe.data.encoding.encoder_settings import EncoderSettings
from sana_pipe.data.encoding.unit_encoder import UnitEncoder
from sana_pipe.data.signals import Encoders
from sana_pipe.data.signals.text import TextEncoding
from tests.support import tiny_cache
from tests.support.damage import flip
from tests.support.source_files import make_tar
from tests.support.synthetic import with_another

MakeConfig = Callable[..., Config]
MOVED = "sana-pipe bucket"


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return tiny_cache.build(tmp_path / "cache")


@pytest.fixture
def verified(cache: Cache, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """`verified(encode)`: exit code of `verify` and its findings as (path's folder, fix, outcome)."""
    config = load("tiny", [f"cache={cache.root}"])

    def verify(
        encode: Callable[..., Iterable[unit_records.Made]] | None = None,
    ) -> tuple[int, list[tuple[str, str, str]]]:
        if encode is not None:
            monkeypatch.setattr(UnitEncoder, "remake", encode)
        capsys.readouterr()
        code = sana_pipe.stages.verify.run(config, repair=encode is not None, as_json=True)
        result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
        return code, [(f["path"].partition("/")[0], f["fix"], f["outcome"]) for f in result["findings"]]

    return verify


def encoder(cache: Cache, flip: int) -> Callable[..., Iterable[unit_records.Made]]:
    """Makes the latents again that the cache holds now, with some bits flipped (0: as they were)."""
    encoding = cache.encodings("latent")[0].name
    reader = shard.ShardReader(cache.files, encoding)
    arrays = {}
    for commit in index.commits(cache.files, encoding, 0):
        for row in audit.record_rows(cache, commit):
            arrays[row["key"]] = audit.payload(reader, encoding, str(commit.shard), row).copy()

    def encode(
        _: object, plan: WorkList, unit: Unit, commit: index.Commit, only: Container[bytes], rows: object = None
    ) -> list[unit_records.Made]:
        keys = cache.unit_rows(plan, unit).column("key").to_pylist()
        return [([unit_records.EncodedRecord(key, arrays[key] ^ np.uint16(flip)) for key in keys if key in only], [])]

    return encode


def latents(cache: Cache, number: int = 0) -> tuple[Path, list[dict[str, Any]], index.Commit]:
    """The shard of a latent commit, its records, and the commit."""
    encoding = cache.encodings("latent")[0].name
    commit = index.commits(cache.files, encoding, 0)[number]
    return cache.root / Paths.shard(encoding, str(commit.shard)), audit.record_rows(cache, commit), commit


def healed(cache: Cache, unit: index.Commit, damage: Callable[[Path], None] = Path.unlink) -> None:
    """Damage a latent shard, and make its records again in a later plan, as `encode` does."""
    encoding = cache.encodings("latent")[0]
    made = encoder(cache, 1)
    plan = cache.plans(encoding.name)[0]
    [planned] = [u for u in plan.units if u.unit == unit.unit]
    rows = cache.table(plan.table).slice(planned.start, planned.count)
    damage(cache.root / Paths.shard(encoding.name, str(unit.shard)))
    again = Unit("a" * 32, 0, planned.count, 1)
    assert cache.add_plan(encoding.name, 1, [again], rows)
    keys = set(rows.column("key").to_pylist())
    unit_records.write_unit(
        cache, encoding, cache.plan(encoding.name, 1), again, made(None, plan, planned, unit, keys), lambda a, b: None
    )
    assert index.merge(cache.files, encoding.name, 1, [again.unit])


@pytest.mark.parametrize(
    "damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:2000])], ids=["lost", "cut"]
)
def test_a_shard_that_a_named_snapshot_needs_is_restored_though_encode_healed_it(
    cache: Cache, verified: Callable[..., Any], damage: Callable[[Path], None]
) -> None:
    same, (path, _, commit) = encoder(cache, 0), latents(cache)
    whole = path.read_bytes()
    healed(cache, commit, damage)
    code, findings = verified()
    assert code == 4 and ("shards", layout.REPAIR, None) in findings
    assert {fix for _, fix, _ in findings} == {layout.REPAIR, MOVED}
    assert verified(same)[0] == 0
    assert path.read_bytes() == whole
    assert verified() == (0, [])


def test_where_other_bytes_come_out_a_healed_shard_leads_to_bucket(cache: Cache, verified: Callable[..., Any]) -> None:
    other, (_, _, commit) = encoder(cache, 2), latents(cache)
    healed(cache, commit)
    for _ in range(2):
        code, result = verified(other)
        assert code == 4
        assert result == [("shards", layout.REPAIR, "replaced"), ("snapshots", MOVED, "failed")]
    assert len(cache.plans(cache.encodings("latent")[0].name)) == 2, "the records are there already"
    cache.keep(cache.open_snapshot().id)
    assert "sana-pipe bucket --name trained-" in verified()[1][-1][1]
    for name in (cache.root / "names").rglob("*.json"):
        name.unlink()
        (cache.root / Paths.copy(name.relative_to(cache.root).as_posix())).unlink()
    assert not list(audit.verify_contents(Cache(cache.root))), "nobody needs the snapshot or its shard"


def test_damaged_records_that_nobody_needs_are_no_finding(cache: Cache) -> None:
    _, rows, commit = latents(cache)
    healed(cache, commit, lambda path: flip(path, rows[0]["offset"]))
    for name in (cache.root / "names").rglob("*.json"):
        name.unlink()
        (cache.root / Paths.copy(name.relative_to(cache.root).as_posix())).unlink()
    assert not list(audit.verify_contents(Cache(cache.root)))


def test_a_snapshot_refers_to_latents_captions_and_the_null_record(cache: Cache) -> None:
    snapshot = cache.open_snapshot()
    sample = snapshot.sample(0)
    for place in (*sample.pictures.values(), *sample.captions, snapshot.null):
        found = np.concatenate([*audit.referred_keys(snapshot, {place.shard: {place.key, bytes(16)}})])
        assert (found == as_keys([place.key])).all() and len(found) == 1


def test_a_second_damage_next_to_a_replaced_record_is_repaired(cache: Cache, verified: Callable[..., Any]) -> None:
    same, other, (path, rows, _) = encoder(cache, 0), encoder(cache, 1), latents(cache)
    whole = path.read_bytes()
    plans = lambda: len(cache.plans(cache.encodings("latent")[0].name))  # noqa: E731
    for number in (0, 1):
        flip(path, rows[number]["offset"])
        code, result = verified(other)
        assert code == 4 and ("shards", layout.REPAIR, "replaced") in result
        assert plans() == 2 + number
    flip(path, rows[2]["offset"])
    assert verified(same)[0] == 0
    assert path.read_bytes() == whole and plans() == 3
    assert verified() == (0, [])


def test_the_worked_example_of_a_repair(cache: Cache, verified: Callable[..., Any]) -> None:
    """As in the comment of `Repairs._unit`."""
    same, other, (path, rows, _) = encoder(cache, 0), encoder(cache, 1), latents(cache)
    whole, encoding, encoded = path.read_bytes(), cache.encodings("latent")[0].name, list[set[bytes]]()

    def encode(of: object, plan: WorkList, unit: Unit, commit: index.Commit, only: set[bytes], *rest: Any) -> Any:
        encoded.append(only)
        return other(of, plan, unit, commit, only, *rest)

    b, a = (row["key"] for row in rows[:2])
    for row in rows[:2]:
        flip(path, row["offset"])
        assert ("shards", layout.REPAIR, "replaced") in verified(encode)[1]
    assert encoded == [{b}, {b, a}]
    plans = [plan for plan in cache.plans(encoding) if plan.number]
    keys = [cache.unit_rows(plan, unit).column("key").to_pylist() for plan in plans for unit in plan.units]
    assert keys == [[b], [a]], "the later plan has b already"
    assert verified(same)[0] == 0 and path.read_bytes() == whole


def test_a_restored_head_hides_no_damaged_records_of_its_snapshot(cache: Cache, verified: Callable[..., Any]) -> None:
    other, (path, rows, _) = encoder(cache, 1), latents(cache)
    flip(path, rows[0]["offset"])
    [head] = (cache.root / "snapshots").glob("*.json")
    flip(head, 40)
    code, result = verified(other)
    assert code == 4
    assert result == [
        ("snapshots", layout.REPAIR, "restored"),
        ("shards", layout.REPAIR, "replaced"),
        ("snapshots", MOVED, "failed"),
    ]
    assert verified()[0] == 4


def test_a_stray_file_among_the_snapshots_stops_no_repair(cache: Cache, verified: Callable[..., Any]) -> None:
    (cache.root / "snapshots" / ".nfs01").write_bytes(b"x")
    assert verified(encoder(cache, 0)) == (0, [])


def test_segments_that_changed_places_are_damage(cache: Cache, verified: Callable[..., Any]) -> None:
    same, whole = encoder(cache, 0), {kind: index_keys(cache, kind) for kind in ("latent", "text")}
    names = [Paths.segment(cache.encodings(kind)[0].name, 0) for kind in ("latent", "text")]
    bodies = [cache.files.document(name) for name in names]
    for name, body in zip(names, bodies[::-1], strict=True):
        cache.files.replace(name, layout.seal(body))
    for kind, keys in whole.items():
        assert index_keys(cache, kind) == keys, "the copy is read"
    assert verified()[0] == 4
    verified(same)
    assert {kind: index_keys(cache, kind) for kind in whole} == whole
    assert verified() == (0, [])


def index_keys(cache: Cache, kind: str) -> bytes:
    cache = Cache(cache.root)
    return cache.index(cache.encodings(kind)[0].name).keys.tobytes()


@pytest.mark.parametrize("kind", [UserError, CacheError, AwayError, NoSpaceError])
def test_an_error_of_one_repair_ends_the_others_only_if_they_would_fare_no_better(
    cache: Cache, verified: Callable[..., Any], capsys: pytest.CaptureFixture[str], kind: type[UserError]
) -> None:
    same, damaged, asked = encoder(cache, 0), dict[Path, bytes](), list[str]()
    for number in range(3):
        path, rows, _ = latents(cache, number)
        damaged[path] = path.read_bytes()
        flip(path, rows[0]["offset"])

    def encode(of: object, plan: WorkList, unit: Unit, *rest: Any) -> Iterable[unit_records.Made]:
        asked.append(unit.unit)
        if len(asked) < 3:
            raise kind(f"error {len(asked)}")
        return same(of, plan, unit, *rest)

    with pytest.raises(kind, match=r"^error 1$"):
        verified(encode)
    right = sum(path.read_bytes() == whole for path, whole in damaged.items())
    if kind in (AwayError, NoSpaceError):
        assert (len(asked), right) == (1, 0)
        return
    assert (len(asked), right) == (3, 1)
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["findings"]
    outcomes = [f["outcome"] for f in result if f["path"].startswith("shards/")]
    assert outcomes == ["failed: error 1", "failed: error 2", "restored"]


def test_many_damaged_shards_of_an_encoding_are_looked_up_in_one_index(
    cache: Cache, verified: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    same = encoder(cache, 0)
    for number in range(3):
        path, rows, _ = latents(cache, number)
        flip(path, rows[0]["offset"])
    opened, real = list[str](), Cache.index

    def counted(self: Cache, encoding: str) -> index.RecordIndex:
        opened.append(encoding)
        return real(self, encoding)

    monkeypatch.setattr(Cache, "index", counted)
    assert [folder for folder, _, _ in verified()[1]] == ["shards"] * 3
    assert opened == [cache.encodings("latent")[0].name]
    opened.clear()
    assert verified(same)[0] == 0
    assert len(opened) == 2, "one to verify, one to repair"


def test_status_names_what_mends_each_damage(cache: Cache, capsys: pytest.CaptureFixture[str]) -> None:
    config = load("tiny", [f"cache={cache.root}"])
    segment = Paths.segment(cache.encodings("latent")[0].name, 0)
    flip(cache.root / segment, 40)
    (cache.root / Paths.table(cache.open_snapshot().head.chunks[0].samples, "arrow")).unlink()
    fixes = {"names/latest": layout.REPAIR, segment: layout.REPAIR}
    assert {name: damage["fix"] for name, damage in status(Cache(cache.root))["damaged"].items()} == fixes
    assert sana_pipe.stages.status.run(config) == IntegrityError.exit_code
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("fix:")] == [f"fix: {fix}" for fix in sorted(set(fixes.values()))]


def test_a_damaged_table_that_nothing_refers_to_is_for_gc(cache: Cache, verified: Callable[..., Any]) -> None:
    digests = [cache.files.put_content(b"left", "tables", "arrow"), cache.files.put_content(b"over", "tables", "npy")]
    for path in (cache.root / Paths.table(digests[0], "arrow"), cache.root / Paths.table(digests[1], "npy")):
        flip(path, 1)
    assert verified() == (4, [("tables", GC, None)] * 2)
    assert verified(encoder(cache, 0)) == (4, [("tables", GC, "failed")] * 2)
    assert sana_pipe.stages.gc.run(load("tiny", [f"cache={cache.root}"]), yes=True, older_than_hours=0) == 0
    assert verified() == (0, [])


def test_a_damaged_chunk_of_a_snapshot_without_a_copy_is_for_bucket(
    cache: Cache, verified: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    chunk = Paths.table(cache.open_snapshot().head.chunks[0].names, "arrow")
    for place in (chunk, Paths.copy(chunk)):
        flip(cache.root / place, 100)
    again = "sana-pipe bucket"
    code, result = verified()
    assert code == 4 and {fix for _, fix, _ in result} == {again}
    assert sana_pipe.stages.verify.run(load("tiny", [f"cache={cache.root}"]), repair=True) == 4
    printed = capsys.readouterr().out
    assert f"read: {len(result)} damaged" in printed, "each once"
    assert [line for line in printed.splitlines() if line.startswith("fix:")] == [f"fix: {again}"]


# ---------------------------------------------------------------- real encoders


@pytest.mark.parametrize("out_of_memory", [False, True])
def test_a_repair_of_both_kinds_has_one_encoder_in_memory_at_a_time(
    small_cache_copy: Path,
    make_config: Callable[..., Config],
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    out_of_memory: bool,
) -> None:
    """Also if the findings of the kinds alternate, and if the first encoder fails: its error holds its frames."""
    config, cache = make_config(tmp_path), Cache(small_cache_copy)
    whole: dict[Path, bytes] = {}
    for kind in ("latent", "text"):
        encoding = cache.encodings(kind)[0].name
        for commit in index.commits(cache.files, encoding, 0):
            path = cache.root / Paths.shard(encoding, str(commit.shard))
            whole[path] = path.read_bytes()
            flip(path, audit.record_rows(cache, commit)[0]["offset"])
    loads: list[str] = []
    in_memory: list[int] = []
    loaded: list[weakref.ref[Any]] = []

    def watched(kind: str, load: Callable[..., Any]) -> Callable[..., Any]:
        def watch(*arguments: Any) -> Any:
            loads.append(kind)
            in_memory.append(sum(reference() is not None for reference in loaded))
            encoder = load(*arguments)
            loaded.extend([weakref.ref(encoder), weakref.ref(encoder.model)])
            return encoder

        return watch

    def alternating(*arguments: Any) -> list[Finding]:
        findings = list(verify_contents(*arguments))
        halves = [[f for f in findings if f.encoding.startswith(kind)] for kind in ("text", "latent")]
        assert min(map(len, halves)) > 0
        return [f for pair in zip_longest(*halves) for f in pair if f is not None]

    def exhausted(*arguments: Any) -> Any:
        raise MemoryError

    verify_contents = audit.verify_contents
    monkeypatch.setattr(audit, "verify_contents", alternating)
    monkeypatch.setattr(encoders.LatentEncoder, "load", watched("latent", encoders.LatentEncoder.load))
    monkeypatch.setattr(TextEncoder, "load", watched("text", TextEncoder.load))
    if out_of_memory:
        monkeypatch.setattr(encoders.LatentEncoder, "encode", exhausted)
        with pytest.raises(UserError):
            sana_pipe.stages.verify.run(config, repair=True, data=(f"photos={photos}",))
    else:
        assert sana_pipe.stages.verify.run(config, repair=True, data=(f"photos={photos}",)) == 0
    assert (sorted(loads), in_memory) == (["latent", "text"], [0, 0])
    right = [path for path, data in whole.items() if path.read_bytes() == data]
    assert {"text-" in str(path) for path in right} == ({True} if out_of_memory else {True, False})


def test_each_encoding_is_compared_with_the_encoder_that_is_loaded(
    small_cache_copy: Path, make_config: Callable[..., Config], tmp_path: Path
) -> None:
    cache = Cache(small_cache_copy)
    encoding = cache.encodings("text")[0]
    assert isinstance(encoding, TextEncoding)
    other = dataclasses.replace(encoding, weights="0" * 32)
    cache.add_encoding(other)
    plan = cache.plans(encoding.name)[0]
    commit = index.commits(cache.files, encoding.name, 0)[0]
    unit = next(unit for unit in plan.units if unit.unit == commit.unit)
    only = {row["key"] for row in audit.record_rows(cache, commit)}
    config = make_config(tmp_path)
    settings = EncoderSettings(Encoders(config.vae, config.text), config.encode, config.data.max_pixels)
    encoder = UnitEncoder(settings, cache, {}, check=True)
    rows = cache.unit_rows(plan, unit)
    assert list(encoder.remake(plan, unit, commit, only, rows))
    with pytest.raises(CacheError) as caught:
        encoder.remake(dataclasses.replace(plan, encoding=other.name), unit, commit, only, rows)
    assert "weights" in str(caught.value.found)


# ---------------------------------------------------------------- adopted shards


@pytest.fixture
def adopted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Config, Path, Path]:
    """A configuration of a cache and another; a latent shard that the first has adopted, and that of the other."""
    of = with_another(tmp_path)
    sana_pipe.stages.bucket.run(of)
    here, there = Path(of.cache), Path(of.bucket.caches[0])
    shared = {path.relative_to(there) for path in there.glob("shards/latent-*/*/*.tar")}
    name = min(path for path in shared if (here / path).exists())
    (here / name).unlink()  # it is a link to the other's
    shutil.copy(there / name, here / name)
    return of, here / name, there / name


def repaired(of: Config, capsys: pytest.CaptureFixture[str], *caches: str) -> tuple[int, list[str]]:
    """Exit code and outcomes of `verify --repair` with these `bucket.caches`."""
    capsys.readouterr()
    bucket = of.bucket.model_copy(update={"caches": list(caches)})
    code = sana_pipe.stages.verify.run(of.model_copy(update={"bucket": bucket}), repair=True, as_json=True)
    return code, [finding["outcome"] for finding in json.loads(capsys.readouterr().out)["findings"]]


def test_bytes_outside_the_records_of_an_adopted_shard_are_restored(
    adopted: tuple[Config, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    of, here, there = adopted
    flip(here, -10)
    assert repaired(of, capsys) == (0, ["restored"])
    assert here.read_bytes() == there.read_bytes()


@pytest.mark.parametrize("damage", ["head", "record", "missing"])
def test_an_adopted_shard_is_taken_over_again(
    adopted: tuple[Config, Path, Path],
    damage: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    of, here, there = adopted
    intact = there.read_bytes()

    def refused(*_: object) -> list[unit_records.Made]:
        return [([], [index.RecordReject(key.hex(), "x", "is gone") for key in _[-2]])]  # type: ignore[attr-defined]

    monkeypatch.setattr(UnitEncoder, "remake", refused)
    if damage == "missing":
        here.unlink()
    else:
        offsets = shard.read_table(Cache(of.cache).files, str(here.relative_to(of.cache))).column("offset")
        flip(here, offsets[0].as_py() if damage == "record" else intact.index(b'"unit"') + 10)
    flip(there, 0)  # useless, too
    code, outcomes = repaired(of, capsys, of.bucket.caches[0])
    assert (code, "bucket.caches=" in outcomes[0]) == (4, True)
    there.write_bytes(intact)
    assert repaired(of, capsys, of.bucket.caches[0])[0] == 0
    assert here.read_bytes() == intact


def test_where_an_adopted_shard_is_is_said_next_to_where_its_source_may_be(
    adopted: tuple[Config, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    of, here, _ = adopted
    here.unlink()
    real = Cache.unit_rows

    def unit_rows(cache: Cache, plan: WorkList, unit: Unit) -> pa.Table:
        rows = real(cache, plan, unit)
        return rows.set_column(1, "source", pa.array(["two"] * len(rows)))

    monkeypatch.setattr(Cache, "unit_rows", unit_rows)
    bucket = of.bucket.model_copy(update={"caches": []})
    with pytest.raises(UserError) as raised:
        sana_pipe.stages.verify.run(of.model_copy(update={"bucket": bucket}), repair=True)
    assert "--data two=" in str(raised.value.fix) and "bucket.caches=" in str(raised.value.fix)


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_a_picture_that_has_moved_is_repaired_from_its_new_place(
    kind: str, make_config: MakeConfig, photos: Path, tmp_path: Path
) -> None:
    """Another name in a folder; another offset in a tar."""
    data, config = tmp_path / "photos", make_config(tmp_path)
    stems = [path.stem for path in sorted(photos.glob("*.txt"))[:2]]
    contents = {path.name: path.read_bytes() for path in sorted(photos.iterdir()) if path.stem in stems}

    def put(names: dict[str, bytes]) -> None:
        data.mkdir(exist_ok=True)
        if kind == "tar":
            make_tar(data / "0.tar", names.items())
            return
        for path in data.iterdir():
            path.unlink()
        for name, content in names.items():
            (data / name).write_bytes(content)

    put(contents)
    sana_pipe.stages.encode.run(config, str(data))
    put({f"0{name}" if kind == "folder" else name: contents[name] for name in sorted(contents, reverse=True)})
    assert sana_pipe.stages.encode.run(config, str(data))["images"] == 0
    cache = Cache(config.cache)
    encoding = cache.encodings("latent")[0].name
    commit = index.commits(cache.files, encoding, 0)[0]
    path = cache.root / layout.Paths.shard(encoding, str(commit.shard))
    whole = path.read_bytes()
    flip(path, audit.record_rows(cache, commit)[0]["offset"])
    assert sana_pipe.stages.verify.run(config, repair=True) == 0
    assert path.read_bytes() == whole
