"""`forget --item`: pictures leave a cache with every record and row; the others keep their bytes; kills do no harm."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sana_pipe.stages.bucket
import sana_pipe.stages.encode
import sana_pipe.stages.forget
import sana_pipe.stages.gc
import sana_pipe.stages.pack
from sana_pipe.base.errors import CacheError, IntegrityError, UserError
from sana_pipe.config import Config
from sana_pipe.data.cache import audit, garbage, layout, prompts, readers, withdrawn
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.contradictions import contradictions
from sana_pipe.data.cache.files import Files
from sana_pipe.data.cache.findings import encoding_names
from sana_pipe.data.cache.keys import as_keys
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.cache.shard import ShardReader
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.signals.text import TextEncoding
from sana_pipe.data.snapshots import group_memory, packing, takedown, takedown_check, takedown_search
from sana_pipe.tools.locations import cache_location
from tests.support import synthetic
from tests.support.dying import dying, forked
from tests.support.messages import naming
from tests.support.synthetic import Picture

MakeConfig = Callable[..., Config]
GO = ("00003.png", "00005.png", "00011.png", "alone.png")
"""The items that go: one with two captions, one whose caption another item has, one that another source has, too, and
one that is alone in its units."""
SHARED, TWIN = "a caption of two pictures", "content of two sources"


def pictures() -> list[Picture]:
    every = synthetic.pictures(24)
    every[5] = Picture("00005.png", "5", captions=((SHARED, 1.0),))
    every[6] = Picture("00006.png", "6", captions=((SHARED, 1.0),))
    every[11] = Picture("00011.png", TWIN)
    return every


def prepared(folder: Path) -> Config:
    """A cache of two sources with a snapshot, one by another rule, and a pack."""
    config = synthetic.config(folder / "cache", "bucket.heldout=0.2")
    synthetic.add(config, "one", pictures())
    synthetic.add(config, "two", [Picture("twin.png", TWIN, captions=(("said of the twin", 1.0),)), Picture("x", "x")])
    synthetic.add(config, "three", [Picture("alone.png", "alone")])
    sana_pipe.stages.bucket.run(config, name="all")
    votes = folder / "votes.jsonl"
    votes.write_text("".join(json.dumps({"item": picture.item, "vote": 1}) + "\n" for picture in pictures()))
    rules = {"heldout": 0.0, "filter": "score < 2 AND vote = 1", "metadata": str(votes)}
    sana_pipe.stages.bucket.run(
        config.model_copy(update={"bucket": config.bucket.model_copy(update=rules)}), name="few"
    )
    votes.unlink()
    for name, packed in (("all", "packed"), ("few", "few.packed")):
        sana_pipe.stages.pack.run(config, snapshot=name, name=packed)
    (folder / "cache/reports").mkdir(exist_ok=True)
    (folder / "cache/reports/rejects-one.csv").write_text("item,reason\n00003.png,broken\n")
    (folder / "cache/reports/rejects-two.csv").write_text("item,reason\nnobody.png,broken\n")
    (folder / "cache" / group_memory.PATH).write_bytes(b"digests of hashes")
    return config


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("takedown")
    prepared(folder)
    return folder / "cache"


@pytest.fixture
def config(made: Path, tmp_path: Path) -> Config:
    shutil.copytree(made, tmp_path / "cache")
    return synthetic.config(tmp_path / "cache", "bucket.heldout=0.2")


def payloads(cache: Cache) -> dict[tuple[str, bytes], bytes]:
    """(encoding, key) -> the stored bytes of every record."""
    found = {}
    for name in encoding_names(cache):
        records, reader = cache.index(name), ShardReader(cache.files, name)
        for row, key in enumerate(records.keys):
            at = {column: records.columns[column][row] for column in ("shard", "offset", "length", "checksum")}
            whole = bytes(key).ljust(16, b"\0"), bytes(at["checksum"]).ljust(16, b"\0")
            shard = records.shards[int(at["shard"])]
            found[name, whole[0]] = bytes(reader.stored(shard, int(at["offset"]), *whole, int(at["length"])))
    return found


def contents(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Every file below a folder as it is, and tables as text too: Parquet compresses them."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            data, name = path.read_bytes(), str(path.relative_to(folder))
            yield name, data
            if data[:4] == b"PAR1":
                yield name, repr(pq.read_table(io.BytesIO(data)).to_pylist()).encode()
            if data[:6] == b"ARROW1":
                yield name, repr(pa.ipc.open_file(pa.BufferReader(data)).read_all().to_pylist()).encode()


def left_of(folder: Path, secrets: list[bytes]) -> list[str]:
    """The files with one of these byte strings. Keys in hex may stand in the documents of takedowns alone."""
    found = set()
    for name, data in contents(folder):
        known = "withdrawn/" in name
        found |= {name for secret in secrets if secret in data and not (known and len(secret) == 32)}
    return sorted(found)


def secrets_of(before: dict[tuple[str, bytes], bytes], gone: set[tuple[str, bytes]]) -> list[bytes]:
    """What must not be found: payloads of records, their keys (also in hex), names and captions."""
    of_records = [form for place in gone for form in (before[place][:64], place[1], place[1].hex().encode())]
    texts = [*GO, "twin.png", "said of the twin", f"caption of {TWIN}", "caption of alone", "'a 3'", "'the 3'"]
    return [*of_records, *(text.encode() for text in texts)]


def intact(config: Config) -> Cache:
    """The cache, checked: whole, nothing unneeded, every sample of every named snapshot readable."""
    cache = Cache(config.cache)
    assert not list(audit.verify(cache)) and not list(contradictions(cache))
    assert not list(garbage.unneeded(cache, 0))
    assert not list(takedown_check.remains(cache))
    for name in cache.snapshot_names():
        snapshot = cache.open_snapshot(name)
        text = snapshot.reader(snapshot.caption.kind)
        for row in range(len(snapshot)):
            sample = snapshot.sample(row)
            for kind in snapshot.pictures:
                snapshot.picture(sample, kind)
            assert snapshot.captions(row, text)
    return cache


def samples(snapshot: Snapshot) -> list[tuple[str, str]]:
    return [snapshot.source_item(row) for row in range(len(snapshot))]


def gone_of(cache: Cache) -> set[tuple[str, bytes]]:
    """The records that the takedown of `GO` takes out."""
    text = next(cache.encoding(name) for name in encoding_names(cache) if name.startswith("text"))
    contents = ["3", "5", TWIN, "alone"]
    said = ["a 3", "the 3", f"caption of {TWIN}", "said of the twin", "caption of alone"]
    latents = {synthetic.LATENT.key(layout.digest(content), *size) for content in contents for size in synthetic.TABLE}
    texts = {(text.name, text.key(each)) for each in said}  # type: ignore[attr-defined]
    return {place for place in payloads(cache) if place[1] in latents or place in texts}


def test_nothing_of_the_pictures_is_left_and_other_records_keep_their_bytes(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = Cache(config.cache)
    before, gone = payloads(cache), gone_of(cache)
    assert len(gone) == 9, "four latents and five texts"
    old = {name: cache.open_snapshot(name) for name in cache.snapshot_names()}
    listed = {name: samples(snapshot) for name, snapshot in old.items()}
    secrets = secrets_of(before, gone)
    assert left_of(cache.root, secrets), "the search finds them before"
    assert sana_pipe.stages.forget.run(config, items=GO) == 0
    said = capsys.readouterr().out
    assert "goes: two: twin.png" in said, "an equal picture goes, too, and is named"
    cache = intact(config)
    assert left_of(cache.root, secrets) == []
    assert payloads(cache) == {place: data for place, data in before.items() if place not in gone}
    victims = {("one", item) for item in GO} | {("two", "twin.png"), ("three", "alone.png")}
    for name, snapshot in old.items():
        new = cache.open_snapshot(name)
        assert new.id != snapshot.id and snapshot.id[:12] in said
        order = [each for each in listed[name] if each not in victims]
        if snapshot.packed:
            assert sorted(samples(new)) == sorted(order)
        else:
            assert samples(new) == order, f"the order of {name}"
            same = new.head.content_id == snapshot.head.content_id
            assert same == (len(order) == len(listed[name]))
            assert same == (cache.snapshot_of(snapshot.id) == new.id), "a run on the same samples goes on"
    assert [path.name for path in (cache.root / "reports").glob("rejects-*")] == ["rejects-two.csv"]
    assert not (cache.root / group_memory.PATH).exists(), "it has digests of hashes of pictures that go"
    shard = next(iter(cache.open_snapshot("few.packed").shard_files()))
    cache.files.remove(shard)
    assert packing.restored(cache, shard), "its source has another id now"
    document = cache.files.document(Paths.numbered(Paths.WITHDRAWN, 0))
    assert document["done"] and len(document["digests"]) == 4 and not document["items"] and not document["texts"]


@pytest.mark.parametrize("before", [True, False])
def test_a_takedown_that_is_killed_at_any_write_is_ended_by_the_next(
    config: Config, tmp_path: Path, before: bool
) -> None:
    cache = Cache(config.cache)
    records, gone = payloads(cache), gone_of(cache)
    secrets, kills = secrets_of(records, gone), 0
    while True:  # each attempt gets a little further; every third write is a place to die
        code, value = forked(dying(lambda: sana_pipe.stages.forget.run(config, items=GO), 3 + 7 * kills, before))
        if code >= 0:
            break
        kills += 1
        if not withdrawn.takedowns(Cache(config.cache)):
            continue  # nothing was promised yet
        with pytest.raises(CacheError):
            sana_pipe.stages.gc.run(config)
        while forked(dying(lambda: sana_pipe.stages.forget.run(config, check=True), 11 * kills, before))[0] < 0:
            kills += 1
        break
    assert kills >= 3
    cache = Cache(config.cache)
    sana_pipe.stages.forget.run(config, check=True)
    cache = intact(config)
    assert left_of(cache.root, secrets) == []
    assert payloads(cache) == {place: data for place, data in records.items() if place not in gone}
    assert len(withdrawn.takedowns(cache)[0].snapshots) == 5, "also those of the processes that were killed"


def test_a_unit_of_which_nothing_is_left_goes_after_a_kill_where_no_snapshot_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = synthetic.config(tmp_path / "cache")
    for source, every in (("one", pictures()), ("three", [Picture("alone.png", "alone")])):
        cache = synthetic.add(config, source, every)
    before, gone = payloads(cache), gone_of(cache)

    real = Files.remove

    def remove(files: Files, name: str) -> None:
        if name.startswith("shards/"):
            raise KeyboardInterrupt
        real(files, name)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Files, "remove", remove)
        sana_pipe.stages.forget.run(config, items=GO)
    assert sana_pipe.stages.forget.run(config, check=True) == 0
    assert payloads(intact(config)) == {place: data for place, data in before.items() if place not in gone}


@pytest.mark.slow
def test_a_kill_at_some_writes_of_a_whole_takedown_does_no_harm(made: Path, tmp_path: Path) -> None:
    """Each on a fresh copy; the next run ends what was promised."""
    whole = Cache(made)
    records, gone = payloads(whole), gone_of(whole)
    secrets, at, code = secrets_of(records, gone), 0, -1
    while code < 0:
        folder = tmp_path / f"{at}"
        shutil.copytree(made, folder / "cache")
        config = synthetic.config(folder / "cache", "bucket.heldout=0.2")
        code, _ = forked(dying(lambda config=config: sana_pipe.stages.forget.run(config, items=GO), at, at % 2 == 0))
        promised = bool(withdrawn.takedowns(Cache(config.cache)))
        assert sana_pipe.stages.forget.run(config, items=() if promised else GO, check=promised) == 0
        cache = intact(config)
        assert left_of(cache.root, secrets) == [], at
        assert payloads(cache) == {place: data for place, data in records.items() if place not in gone}, at
        shutil.rmtree(folder)
        at += 37
    assert at > 100, "many writes"


def test_a_withdrawn_picture_does_not_come_back_with_its_file(
    make_config: MakeConfig, photos: Path, small_cache_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(small_cache_copy.parent, "encode.max_reject_rate=0")
    cache = Cache(config.cache)
    items = [item for _, item in samples(cache.open_snapshot())][:3]
    before = payloads(cache)
    assert sana_pipe.stages.forget.run(config, items=items) == 0
    intact(config)
    left = {key for _, key in payloads(cache)}
    assert left < {key for _, key in before}
    capsys.readouterr()
    done = sana_pipe.stages.encode.run(config, data=str(photos))
    said = capsys.readouterr().out
    assert (done["images"], done["captions"]) == (0, 0) and "3 items were met again" in said
    assert {key for _, key in payloads(cache)} == left
    sana_pipe.stages.bucket.run(config)
    kept = {item for _, item in samples(cache.open_snapshot())}
    assert not kept & set(items) and not list(takedown_check.remains(cache))
    scan = cache.table((cache.last_scan("photos") or {})["table"]).to_pylist()
    again = [row for row in scan if row["item"] in items]
    assert len(again) == 3 and all(row["reject"] == withdrawn.REASON and not row["captions"] for row in again)
    copied = photos.parent / "renamed"
    shutil.copytree(photos, copied)
    name = Path(items[0])
    (copied / name).rename(copied / f"another{name.suffix}")
    (copied / name).with_suffix(".txt").rename(copied / "another.txt")
    sana_pipe.stages.encode.run(config, data=str(copied), source_name="copied")
    assert {key for _, key in payloads(cache)} == left, "neither under another name nor in another source"


def test_what_the_listing_of_a_tar_skipped_outlives_its_first_row(
    make_config: MakeConfig, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unchanged tar is not listed again; with --rehash the picture is met and stays out."""
    config, data = make_config(tmp_path), tmp_path / "tars"
    data.mkdir()
    with tarfile.open(data / "00.tar", "w") as tar:
        for path in sorted(photos.iterdir())[:6]:
            tar.add(path, path.name)
        tar.addfile(tarfile.TarInfo("stray.xyz"))
    sana_pipe.stages.encode.run(config, data=str(data))
    cache = Cache(config.cache)

    def rows() -> list[dict[str, Any]]:
        return list(cache.table((cache.last_scan("tars") or {})["table"]).to_pylist())

    first, *others = rows()
    assert first["ignored"] is not None and all(row["ignored"] is None for row in others)
    assert sana_pipe.stages.forget.run(config, items=[first["item"]]) == 0
    assert [row["ignored"] for row in rows()] == [first["ignored"], *[None] * (len(others) - 1)]
    capsys.readouterr()
    assert sana_pipe.stages.encode.run(config, data=str(data))["images"] == 0
    assert "met again" not in capsys.readouterr().out
    assert sana_pipe.stages.encode.run(config, data=str(data), rehash=True)["images"] == 0
    assert "1 items were met again" in capsys.readouterr().out
    assert [row["item"] for row in rows() if row["reject"] == withdrawn.REASON] == [first["item"]]
    assert not list(takedown_check.remains(cache))


def test_names_that_are_unknown_or_shared_are_refused(config: Config, tmp_path: Path) -> None:
    synthetic.add(config, "four", [Picture("00003.png", "of four")])
    cache = Cache(config.cache)
    with pytest.raises(UserError, match=naming("00003.png", "one: 00003.png", "four: 00003.png")):
        sana_pipe.stages.forget.run(config, items=["00003.png"])
    with pytest.raises(UserError, match=naming("nothing.png")):
        sana_pipe.stages.forget.run(config, items=["00004.png", "nothing.png"])
    listed = tmp_path / "digests"
    listed.write_text("# mine\n\n00\n")
    with pytest.raises(UserError, match=naming(str(listed), "line 3")):
        sana_pipe.stages.forget.run(config, digests=str(listed))
    assert not withdrawn.takedowns(cache)
    assert sana_pipe.stages.forget.run(config, items=["four: 00003.png"]) == 0
    rest = {item for _, item in samples(cache.open_snapshot("all")) + samples(cache.open_snapshot("all.heldout"))}
    assert "00003.png" in rest, "that of another source stays"
    listed.write_text(layout.digest("4").hex() + "\n" + layout.digest("of no cache").hex())
    assert sana_pipe.stages.forget.run(config, digests=str(listed)) == 0
    names = {item for _, item in samples(cache.open_snapshot("all")) + samples(cache.open_snapshot("all.heldout"))}
    assert names == rest - {"00004.png"}
    intact(config)


def test_a_snapshot_that_a_living_run_reads_is_refused(config: Config) -> None:
    cache = Cache(config.cache)
    before = {path: path.read_bytes() for path in cache.root.rglob("*") if path.is_file()}
    with readers.reading(cache, [cache.open_snapshot("all").id], "/runs/mine", "node7"):
        with pytest.raises(UserError, match=naming("/runs/mine", "node7")):
            sana_pipe.stages.forget.run(config, items=GO[:1])
    assert {path: path.read_bytes() for path in cache.root.rglob("*") if path.is_file()} == before
    name = Paths.claim("trained-" + "0" * 16, "dead")
    cache.files.put(name, json.dumps({"snapshot": "0" * 32, "run": "r", "host": "h", "process": "1"}).encode())
    past = cache.files.now() - 2 * readers.STALE_S
    os.utime(cache.files.path(name), (past, past))
    assert sana_pipe.stages.forget.run(config, items=GO[:1]) == 0, "one that has not beaten for long has ended"


def test_a_prompt_keeps_its_caption_and_is_named(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    cache = Cache(config.cache)
    [text] = cache.encodings("text")
    assert isinstance(text, TextEncoding)
    key = text.key("a 3")
    prompts.publish(cache, "mine", text, ["a 3"], [key])
    assert sana_pipe.stages.forget.run(config, items=GO[:1]) == 0
    assert "prompt set mine" in capsys.readouterr().out
    records = {each for _, each in payloads(cache)}
    assert key in records and text.key("the 3") not in records
    intact(config)


@pytest.mark.slow
def test_objects_and_their_local_copies_go(s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = synthetic.config(f"{s3_bucket}/{uuid4().hex}", f"mirror.path={tmp_path / 'mirror'}")
    cache = synthetic.add(config, "one", [*pictures(), Picture("alone.png", "alone")])
    sana_pipe.stages.bucket.run(config)
    before = payloads(cache)
    secrets = [before[place][:64] for place in gone_of(cache) if place in before]
    assert left_of(tmp_path / "mirror", secrets), "the local copies have them before"
    cache.files.replace("reports/duplicates-image.csv", f"group,picture\n1,one: {GO[0]}\n".encode())
    cache.files.replace("reports/rejects-two.csv", b"item,reason\nnobody.png,broken\n")
    cache.files.close_readers()
    assert sana_pipe.stages.forget.run(config, items=GO) == 0
    assert left_of(tmp_path, secrets) == []
    assert {entry.name for entry in cache.files.walk("reports")} == {Paths.LISTED, "reports/rejects-two.csv"}
    cache = cache_location(config).open()
    assert not list(takedown_check.remains(cache)) and not list(audit.verify(cache))
    assert len(payloads(cache)) == len(before) - len(secrets)


def test_another_process_that_encodes_is_named(config: Config) -> None:
    cache = Cache(config.cache)
    cache.files.put(Paths.claim("latent-x", 0, "unit"), json.dumps({"machine": "node9 a b", "process": "7"}).encode())
    with pytest.raises(UserError, match=naming("node9", "7")):
        sana_pipe.stages.forget.run(config, items=GO[:1])
    assert not withdrawn.takedowns(cache)


def test_a_report_that_quotes_a_name_goes(tmp_path: Path) -> None:
    name, of = 'the "best" one.png', synthetic.config(tmp_path / "cache")
    cache = synthetic.add(of, "one", [Picture(name, "quoted"), Picture("other.png", "other")])
    sana_pipe.stages.bucket.run(of)
    report = cache.files.reports / "duplicates-near.csv"
    report.parent.mkdir(exist_ok=True)
    with report.open("w", newline="") as sheet:
        csv.writer(sheet).writerows([["group", "picture"], [1, f"one: {name}"]])
    assert sana_pipe.stages.forget.run(of, items=[name]) == 0
    assert not report.exists()


def test_the_document_of_a_launch_is_no_process(config: Config) -> None:
    document = {"launch": "SLURM_JOB_ID=7", "place": "process 0 on a", "options": {}}
    Cache(config.cache).files.put(Paths.claim("launch-x"), json.dumps(document).encode())
    assert sana_pipe.stages.forget.run(config, items=GO[:1]) == 0


def test_two_takedowns_at_once_are_refused(config: Config) -> None:
    cache = Cache(config.cache)
    other = json.dumps({"owner": "x", "beat": 1, "machine": "node9 a b", "process": "7"}).encode()
    name = Paths.claim(takedown.CLAIM)
    cache.files.put(name, other)
    with pytest.raises(UserError, match=naming(name)):
        sana_pipe.stages.forget.run(config, items=GO[:1])
    past = cache.files.now() - 2 * takedown.CLAIM_S
    os.utime(cache.files.path(name), (past, past))
    assert sana_pipe.stages.forget.run(config, items=GO[:1]) == 0
    assert not cache.files.has_file(name)
    intact(config)


def test_a_takedown_that_is_not_ended_stops_what_could_bring_its_pictures_back(config: Config) -> None:
    cache = Cache(config.cache)
    takedown.begin(cache, GO, [])
    for command in (sana_pipe.stages.gc.run, sana_pipe.stages.bucket.run, sana_pipe.stages.pack.run):
        with pytest.raises(CacheError, match=naming("withdrawn/00000000.json")):
            command(config)
    assert sana_pipe.stages.forget.run(config, check=True) == 0
    intact(config)
    sana_pipe.stages.bucket.run(config)


@pytest.mark.parametrize("began", [False, True])
def test_no_picture_is_taken_out_while_a_snapshot_is_made(
    began: bool, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its snapshot would name shards that are gone, and leave digests of the pictures in new tables.

    began: the takedown has looked at the claims once, and has written its document after `bucket` looked for one.
    """
    real, refused = sana_pipe.stages.bucket.make, list[str]()

    def make(*given: Any) -> Any:
        result = real(*given)
        with monkeypatch.context() as patch:
            if began:
                patch.setattr(takedown, "begin", lambda cache, items, listed: (withdrawn.begin(cache, goes), goes))
            with pytest.raises(UserError, match="another process works in this cache") as error:
                sana_pipe.stages.forget.run(config, items=GO[:1])
        refused.append(error.value.what)
        return result

    cache = Cache(config.cache)
    goes = takedown_search.find(cache, GO[:1], [])
    with monkeypatch.context() as patch:
        patch.setattr(sana_pipe.stages.bucket, "make", make)
        sana_pipe.stages.bucket.run(config, name="raced")
    assert len(refused) == 1 and "claims/bucket/" in refused[0]
    assert "00003.png" in {item for _, item in samples(cache.open_snapshot("raced"))}
    assert [each.done for each in withdrawn.takedowns(cache)] == [False] * began
    assert not list(cache.files.walk("claims/bucket"))
    assert sana_pipe.stages.forget.run(config, items=() if began else GO[:1], check=began) == 0
    assert "00003.png" not in {item for _, item in samples(Cache(config.cache).open_snapshot("raced"))}
    assert not list(takedown_check.remains(cache))


def test_another_cache_that_still_has_the_picture_is_not_adopted(config: Config, tmp_path: Path) -> None:
    there = synthetic.config(tmp_path / "there")
    synthetic.add(there, "four", [Picture("other.png", TWIN), *synthetic.pictures(4, "four-")])
    sana_pipe.stages.forget.run(config, items=["one: 00011.png"])
    here = synthetic.config(config.cache, f"bucket.caches=[{there.cache}]")
    with pytest.raises(CacheError, match=naming(there.cache)):
        sana_pipe.stages.bucket.run(here)
    sana_pipe.stages.forget.run(there, items=["other.png"])
    sana_pipe.stages.bucket.run(here, name="both")
    cache = Cache(config.cache)
    assert ("four", "other.png") not in samples(cache.open_snapshot("both"))
    assert not list(audit.verify(cache)) and not list(takedown_check.remains(cache))


def test_the_check_finds_what_is_left_anywhere(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    cache = Cache(config.cache)
    latents = next(cache.files.walk(f"shards/{synthetic.LATENT.name}"))
    old = cache.files.read(latents.name)
    assert sana_pipe.stages.forget.run(config, items=GO) == 0
    cache.files.replace(latents.name, old)
    capsys.readouterr()
    assert sana_pipe.stages.forget.run(config, check=True) == IntegrityError.exit_code
    assert latents.name in capsys.readouterr().out


def test_a_damaged_record_stops_a_takedown_until_it_is_repaired(config: Config) -> None:
    cache = Cache(config.cache)
    records = cache.index(synthetic.LATENT.name)
    key = synthetic.LATENT.key(layout.digest("0"), 24, 24)
    [row] = records.find(as_keys([key])).tolist()
    name = Paths.shard(synthetic.LATENT.name, records.shards[int(records.columns["shard"][row])])
    good = cache.files.read(name)
    bad = bytearray(good)
    bad[int(records.columns["offset"][row])] ^= 1
    cache.files.replace(name, bytes(bad))
    with pytest.raises(IntegrityError, match=naming(key.hex())):
        sana_pipe.stages.forget.run(config, items=GO)
    cache.files.replace(name, good)
    assert sana_pipe.stages.forget.run(config, check=True) == 0
    intact(config)
