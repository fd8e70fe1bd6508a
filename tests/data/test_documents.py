"""Documents of a cache that are lost or damaged: nothing is lost with them, and none looks as if it had never been."""

from __future__ import annotations

import gc
import json
import os
import shutil
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import sana_pipe.stages.bucket
import sana_pipe.stages.encode
import sana_pipe.stages.gc
import sana_pipe.stages.snapshots
import sana_pipe.stages.status
import sana_pipe.stages.verify
from sana_pipe.base.errors import IntegrityError, UserError
from sana_pipe.config import Config, load
from sana_pipe.data.cache import audit, copies, garbage, index, layout, prompts, withdrawn
from sana_pipe.data.cache.cache import Cache, Unit, Units, WorkList
from sana_pipe.data.cache.contradictions import contradictions
from sana_pipe.data.cache.encodings import Encoding
from sana_pipe.data.cache.files import Files
from sana_pipe.data.cache.findings import Finding
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.cache.lost import repair_documents
from sana_pipe.data.cache.snapshot_lists import publish
from sana_pipe.data.cache.status import status
from sana_pipe.data.encoders import vae as encoders
from sana_pipe.data.encoders.text import TextEncoder
from sana_pipe.data.encoding import repair, unit_records
from sana_pipe.data.signals.text import TextEncoding
from tests.support import synthetic, tiny_cache
from tests.support.damage import flip
from tests.support.messages import naming
from tests.support.packed import pack


def documents(root: Path) -> list[str]:
    """All of a cache, without their copies."""
    names = [path.relative_to(root).as_posix() for path in sorted(root.rglob("*.json"))]
    return [name for name in names if layout.is_document(name)]


def content(root: Path) -> dict[str, bytes]:
    """What lies in a cache but reports, unfinished files and rounds of `verify`."""
    names = [path.relative_to(root).as_posix() for path in sorted(root.rglob("*")) if path.is_file()]
    return {name: (root / name).read_bytes() for name in names if not name.startswith(("reports/", "tmp/", "rounds/"))}


def lose(root: Path, pattern: str) -> None:
    """Documents and their copies."""
    result = sorted(path.relative_to(root).as_posix() for path in root.glob(pattern) if path.is_file())
    assert result, pattern
    for name in result:
        (root / name).unlink()
        (root / Paths.copy(name)).unlink()


def lose_all(cache: Cache, folder: str, encoding: str) -> None:
    """Everything of an encoding in a folder of a cache."""
    for place in (cache.root / folder, cache.root / Paths.copy(folder)):
        shutil.rmtree(place / encoding, ignore_errors=True)
        (place / f"{encoding}.json").unlink(missing_ok=True)


HARM: dict[str, Callable[[Path], object]] = {
    "lost": Path.unlink,
    "flipped": lambda path: flip(path, path.stat().st_size // 2),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-30]),
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.fixture
def tiny(tmp_path: Path) -> Cache:
    """Records of two kinds and a snapshot, as after `gc`: segments stand for the units."""
    cache = tiny_cache.build(tmp_path / "tiny")
    lose(cache.root, "units/**/*.json")
    return cache


def halved(config: Config) -> Config:
    """Another batch, so another snapshot."""
    return config.model_copy(update={"bucket": config.bucket.model_copy(update={"batch": 6})})


def last(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


@pytest.fixture
def config(small_cache_copy: Path, make_config: Callable[..., Config], tmp_path: Path) -> Config:
    """Of a copy of the small cache, as after `gc`, with a prompt set and a withdrawn picture."""
    lose(small_cache_copy, "units/**/*.json")
    cache = Cache(small_cache_copy)
    encoding = cache.open_snapshot().encoding(TextEncoding)
    keys = [key.tobytes() for key in cache.index(encoding.name).keys[:2]]
    assert prompts.publish(cache, "prompts", encoding, ["one", "two"], keys)
    withdrawn.begin(cache, withdrawn.Takedown((layout.digest("a picture").hex(),), {}, done=True))
    return make_config(tmp_path)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Units that are encoded from now on."""
    units: list[str] = []
    real = unit_records.write_unit

    def encode(cache: Cache, encoding: Encoding, plan: WorkList, unit: Unit, *rest: Any, **named: Any) -> index.Commit:
        units.append(unit.unit)
        return real(cache, encoding, plan, unit, *rest, **named)

    monkeypatch.setattr(unit_records, "write_unit", encode)
    return units


# ---------------------------------------------------------------- one of the two


@pytest.mark.parametrize(
    "how", ["lost", "cut", *(pytest.param(h, marks=pytest.mark.slow) for h in ("flipped", "empty"))]
)
def test_harm_to_one_of_the_two_changes_nothing_is_named_and_put_right(config: Config, how: str) -> None:
    root = Path(config.cache)
    whole, answer = content(root), status(Cache(config.cache))
    names = documents(root)
    assert {name.partition("/")[0] for name in names} == {*layout.DOCUMENTS, Paths.FORMAT} - {"units"}
    for name in names:
        HARM[how](root / name)
        damaged = sana_pipe.stages.status.run(config)
        result = status(Cache(config.cache))
        assert damaged == (4 if result["damaged"] else 0) and {**result, "damaged": {}, "complete": True} == {
            **answer,
            "free_bytes": result["free_bytes"],
        }
        assert not list(contradictions(Cache(config.cache))), "a copy is as good"
        assert sana_pipe.stages.gc.run(config, older_than_hours=0) == 0
        assert [finding.path for finding in audit.verify_documents(Cache(config.cache))] == [name]
        assert sana_pipe.stages.verify.run(config, repair=True) == 0
        assert content(root) == whole
        HARM[how](root / Paths.copy(name))
        printed = [finding.path for finding in audit.verify_documents(Cache(config.cache))]
        assert printed == [Paths.copy(name)]
        assert sana_pipe.stages.verify.run(config, repair=True) == 0
        assert content(root) == whole


@pytest.mark.parametrize("how", HARM)
def test_encode_and_bucket_put_right_what_they_meet(config: Config, photos: Path, how: str, encoded: list[str]) -> None:
    """Every document at once, or its copy, in turn."""
    root = Path(config.cache)
    whole = content(root)
    for number, name in enumerate(documents(root)):
        HARM[how](root / (name if number % 2 else Paths.copy(name)))
    sana_pipe.stages.encode.run(config, data=str(photos))
    snapshot = sana_pipe.stages.bucket.run(config)
    assert not encoded
    assert Paths.snapshot(snapshot) in whole
    left = [finding.path for finding in audit.verify_documents(Cache(config.cache))]
    assert all(path.startswith("copies/") for path in left), "damaged copies alone are not looked at"
    assert how != "lost" or content(root) == whole
    assert sana_pipe.stages.verify.run(config, repair=True) == 0
    assert content(root) == whole


def test_the_copy_of_a_lost_document_keeps_its_name(tmp_path: Path) -> None:
    files, name = Files(tmp_path), Paths.numbered(Paths.names("latest"), 0)
    assert files.put(name, layout.seal({"name": "latest", "snapshot": "a"}))
    files.path(name).unlink()
    assert not files.put(name, layout.seal({"name": "latest", "snapshot": "b"}))
    assert files.document(name)["snapshot"] == "a"


def test_a_cache_without_copies_gets_them(config: Config) -> None:
    root = Path(config.cache)
    whole = content(root)
    shutil.rmtree(root / "copies")
    assert sana_pipe.stages.verify.run(config) == 4 and sana_pipe.stages.status.run(config) == 0
    assert not (root / "copies").exists()
    assert sana_pipe.stages.verify.run(config, repair=True) == 0
    assert content(root) == whole


def test_a_document_in_the_place_of_another_is_damage(config: Config) -> None:
    cache = Cache(config.cache)
    one, two = (
        Paths.numbered(Paths.plans(encoding.name), 0)
        for kind in ("latent", "text")
        for encoding in cache.encodings(kind)
    )
    first, second = (cache.files.read(name) for name in (one, two))
    cache.files.replace(one, second)
    assert cache.files.document(one) == layout.unseal(first, one)
    assert [finding.path for finding in audit.verify_documents(cache)] == [one]
    cache.files.replace(Paths.copy(one), second)
    with pytest.raises(IntegrityError):
        cache.files.document(one)


# ---------------------------------------------------------------- both


@pytest.mark.parametrize("how", ["lost", pytest.param("flipped", marks=pytest.mark.slow)])
@pytest.mark.parametrize("folder", [*sorted({*layout.DOCUMENTS} - {"units"}), Paths.FORMAT])
def test_what_is_lost_with_its_copy_is_named_and_encode_and_bucket_make_it_again(
    config: Config, photos: Path, how: str, folder: str
) -> None:
    """A lost scan, prompt set or takedown looks as if it had never been; a name that was given is not needed here."""
    root = Path(config.cache)
    for name in (name for name in documents(root) if name.startswith(folder)):
        for place in (name, Paths.copy(name)):
            HARM[how](root / place)
    if folder != Paths.FORMAT:
        assert sana_pipe.stages.status.run(config) in (0, 1, 4)
        assert sana_pipe.stages.verify.run(config) == 4 or (
            how == "lost" and folder in ("sources", "prompts", "withdrawn")
        )
        sana_pipe.stages.verify.run(config, repair=True)
    sana_pipe.stages.encode.run(config, data=str(photos))
    sana_pipe.stages.bucket.run(config)
    assert sana_pipe.stages.verify.run(config) == sana_pipe.stages.status.run(config) == 0
    assert len(Cache(config.cache).open_snapshot()) == 12
    if how == "flipped" and folder != Paths.FORMAT:
        assert [path for path in root.glob("damaged/**/*") if path.is_file()], "nothing damaged is thrown away"


@pytest.mark.parametrize("how", ["flipped", "cut", "empty", "other"])
@pytest.mark.parametrize("folder", ["segments", "plans", "units"])
def test_what_is_damaged_with_its_copy_is_set_aside_and_missed(tmp_path: Path, folder: str, how: str) -> None:
    """other: both are whole, and differ."""
    cache = tiny_cache.build(tmp_path / "cache")
    encoding = cache.encodings("latent")[0].name
    if folder == "units":
        lose(cache.root, Paths.segment(encoding, 0))
    paths = sorted(cache.root.glob(f"{folder}/{encoding}/**/*.json"))
    name = paths[0].relative_to(cache.root).as_posix()
    if how == "other":
        body = cache.files.document(name)
        cache.files.replace(Paths.copy(name), layout.seal({**body, "table": "0" * 32}))
    else:
        for place in (name, Paths.copy(name)):
            HARM[how](cache.root / place)
    assert name in [finding.path for finding in audit.verify_documents(cache)]
    assert name in repair_documents(cache)
    assert len([*cache.root.glob(f"damaged/**/{Path(name).name}-*")]) >= 2
    if folder != "segments":  # its units stand for it
        shards = [finding.path for finding in audit.verify(Cache(cache.root)) if finding.path.startswith("shards")]
        assert shards
        with pytest.raises(IntegrityError):
            list(garbage.unneeded(cache))


@pytest.mark.parametrize("place", ["lost", "flipped"])
@pytest.mark.parametrize(
    ("pattern", "command"),
    [
        ("encodings/latent-*.json", "sana-pipe encode"),
        ("plans/latent-*/*.json", "sana-pipe encode"),
        ("segments/text-*/*.json", "sana-pipe encode"),
        ("snapshots/*.json", "sana-pipe bucket --name NAME --move"),
        ("names/latest/*.json", "sana-pipe bucket"),
    ],
)
def test_the_error_names_both_files_and_the_way_out(tiny: Cache, pattern: str, command: str, place: str) -> None:
    name = next(iter(sorted(tiny.root.glob(pattern)))).relative_to(tiny.root).as_posix()
    for path in (name, Paths.copy(name)):
        HARM[place](tiny.root / path)
    both = [tiny.files.where(path) for path in (name, Paths.copy(name))]
    with pytest.raises(IntegrityError, match=naming(*both)) as error:
        Cache(tiny.root).files.document(name)
    assert command in str(error.value.fix) and (layout.REPAIR in str(error.value.fix)) == (place != "lost")


@pytest.mark.parametrize("number", [0, 1], ids=["first", "last"])
def test_commits_of_a_lost_plan_are_set_aside_before_another_takes_its_number(tmp_path: Path, number: int) -> None:
    """Their units would count as those of the new plan."""
    of = synthetic.config(tmp_path / "cache")
    for count in (2, 4):
        cache = synthetic.add(of, "one", synthetic.pictures(count))
    encoding = cache.encodings("latent")[0].name
    plan, keys = cache.plan(encoding, number), len(cache.index(encoding))
    lose(cache.root, Paths.numbered(Paths.plans(encoding), number))
    with pytest.raises(IntegrityError, match=naming(layout.REPAIR)):
        cache.add_plan(encoding, number, plan.units, cache.table(plan.table))
    assert Paths.plans(encoding) in repair_documents(cache)
    assert len(cache.plans(encoding)) == (2 if number == 0 else 1), "an empty plan keeps the numbers without a gap"
    assert len(cache.index(encoding)) < keys
    with pytest.raises(IntegrityError):
        list(garbage.unneeded(cache))
    synthetic.add(of, "one", synthetic.pictures(4))
    assert len(cache.index(encoding)) == keys and not list(contradictions(Cache(cache.root)))


@pytest.mark.parametrize("how", ["lost", "flipped"])
@pytest.mark.parametrize("of", ["plans/latent-*/*.json", "plans/text-*/*.json", "sources/*/*.json"])
def test_a_table_that_is_lost_with_its_copy_is_named_and_encode_makes_it_again(
    config: Config, photos: Path, how: str, of: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = Cache(config.cache)
    name = next(iter(sorted(cache.root.glob(of)))).relative_to(cache.root).as_posix()
    table = Paths.table(cache.files.document(name)["table"], "parquet")
    for place in (table, Paths.copy(table)):
        HARM[how](cache.root / place)
    capsys.readouterr()
    assert sana_pipe.stages.verify.run(config, as_json=True) == 4
    result = {finding["path"]: finding["fix"] for finding in last(capsys)["findings"]}
    assert result[table] == (layout.ENCODE if of.startswith("sources") else layout.REPAIR)
    assert sana_pipe.stages.verify.run(config, repair=True) == 4
    sana_pipe.stages.encode.run(config, data=str(photos))
    sana_pipe.stages.bucket.run(config)
    assert sana_pipe.stages.verify.run(config) == 0


def test_another_intact_document_in_place_of_any_is_noticed_and_replaced(tmp_path: Path) -> None:
    """Except for units of one id, which real encodings do not share, and encodings of one kind, which are made
    again."""
    cache = tiny_cache.build(tmp_path / "cache", {(16, 16): 1})
    names = [*(name for name, _ in copies.documents(cache.files)), Paths.FORMAT]
    data = {name: cache.files.read(name) for name in names}
    for name in names:
        for other in names:
            same = data[other] == data[name] or name.split("/")[3:] == other.split("/")[3:] != []
            for place in () if same else (name, Paths.copy(name)):
                cache.files.path(place).write_bytes(data[other])
                pair = copies.inspect(cache.files, name)
                assert (bool(pair.document), bool(pair.copy)) == (place == name, place != name), (place, other)
                assert copies.repair(cache.files, name)
                assert cache.files.read(place) == data[name]


def test_two_lost_scans_in_a_row_say_what_their_successor_says(tmp_path: Path) -> None:
    of = synthetic.config(tmp_path / "cache")
    for count in (2, 4, 6):
        cache = synthetic.add(of, "one", synthetic.pictures(count))
    newest = cache.last_scan("one")
    for number in (0, 1):
        lose(cache.root, Paths.numbered(Paths.scans("one"), number))
    repair_documents(cache)
    assert [cache.files.document(Paths.numbered(Paths.scans("one"), n)) for n in range(3)] == [newest] * 3


def test_only_the_last_scan_stays_without_its_table(tmp_path: Path) -> None:
    """It says where the source is; `encode` makes its table again."""
    of = synthetic.config(tmp_path / "cache")
    for count in (2, 4):
        cache = synthetic.add(of, "one", synthetic.pictures(count))
    newest = cache.last_scan("one")
    for table in sorted(cache.files.document(Paths.numbered(Paths.scans("one"), n))["table"] for n in range(2)):
        cache.files.remove(Paths.table(table, "parquet"))
    repair_documents(Cache(cache.root))
    assert cache.last_scan("one") == newest
    assert [*cache.root.glob("damaged/sources/one/00000000.json-*")]


def test_a_merged_table_is_made_again_from_its_shards(tiny: Cache) -> None:
    encoding = tiny.encodings("text")[0].name
    name = tiny.files.document(Paths.segment(encoding, 0))["table"]
    (tiny.root / Paths.table(name, "arrow")).unlink()
    assert repair.repair_table(tiny, encoding, 0, name) and tiny.files.mapped(Paths.table(name, "arrow"), name)
    assert not repair.repair_table(tiny, encoding, 0, "0" * 32)


def test_an_older_scan_or_name_that_is_lost_says_what_its_successor_says(config: Config) -> None:
    cache = Cache(config.cache)
    cache.add_scan("photos", {**(cache.last_scan("photos") or {}), "root": "elsewhere"})
    newest = sana_pipe.stages.bucket.run(halved(config))
    for folder in ("sources/photos", "names/latest"):
        lose(cache.root, f"{folder}/00000000.json")
        assert folder in [finding.path for finding in audit.verify_documents(cache)]
        with pytest.raises(IntegrityError):
            cache.files.numbers(folder)
    assert sana_pipe.stages.verify.run(config, repair=True) == 0
    assert (cache.last_scan("photos") or {})["root"] == "elsewhere" and cache.snapshot_of("latest") == newest


def test_a_damaged_snapshot_stands_in_nobodys_way(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    """Damage to a named snapshot's head in both places: everything else goes on, and `bucket` makes another."""
    root, first = Path(config.cache), sana_pipe.stages.bucket.run(config, name="one")
    second = sana_pipe.stages.bucket.run(halved(config))
    assert first != second
    name = Paths.snapshot(first)
    for place in (name, Paths.copy(name)):
        HARM["cut"](root / place)
    capsys.readouterr()
    assert sana_pipe.stages.status.run(config, as_json=True) == 4
    result = last(capsys)
    assert list(result["damaged"]) == ["names/one"] and result["snapshots"]["latest"] == second
    assert sana_pipe.stages.snapshots.run(config, as_json=True) == 4
    assert [(e["id"], "damaged" in e) for e in last(capsys)["snapshots"]] == [(first, True), (second, False)]
    assert sana_pipe.stages.verify.run(config, as_json=True) == 4
    assert [finding["path"] for finding in last(capsys)["findings"]] == [name]
    assert [finding.path for finding in contradictions(Cache(config.cache))] == [name]
    assert len(Cache(config.cache).open_snapshot()) == 12
    with pytest.raises(UserError, match=naming("--move")):
        sana_pipe.stages.bucket.run(config, name="one")
    assert sana_pipe.stages.bucket.run(config, name="one", move=True) != second
    for path in (root / name, root / Paths.copy(name)):
        os.utime(path, (1, 1))
    assert sana_pipe.stages.gc.run(config, yes=True) == 0 and not (root / name).exists()
    assert sana_pipe.stages.verify.run(config) == 0


@pytest.mark.parametrize("what", ["shards/latent-*/*/*.tar", "shards/text-*/*/*.tar", "samples", "sources"])
@pytest.mark.parametrize("how", ["lost", "empty"])
def test_a_torn_copy_is_noticed_without_reading_it(config: Config, what: str, how: str) -> None:
    """Files that a snapshot names: by `status`, and by `bucket`, which writes chunks again."""
    cache = Cache(config.cache)
    head = cache.open_snapshot().head
    named = {
        "samples": lambda: Paths.table(head.chunks[0].samples, "arrow"),
        "sources": lambda: Paths.table(head.sources["photos"], "parquet"),
    }
    path = cache.root / named[what]() if what in named else next(cache.root.glob(what))
    assert sana_pipe.stages.status.run(config) == 0
    HARM[how](path)
    assert sana_pipe.stages.status.run(config) == IntegrityError.exit_code
    before = content(cache.root / "names")
    if what == "samples":
        sana_pipe.stages.bucket.run(config)
        assert sana_pipe.stages.status.run(config) == 0
    else:
        with pytest.raises(IntegrityError) as error:
            sana_pipe.stages.bucket.run(config, name="another")
        assert path.name in str(error.value)
        assert content(cache.root / "names") == before, "no name points to what is not there"


def test_an_older_snapshot_is_looked_at_too(tmp_path: Path) -> None:
    """A shard with bytes behind its end. The table of a scan that is not the last any more is for reports alone."""
    of = synthetic.config(tmp_path / "cache")
    cache = synthetic.add(of, "one", synthetic.pictures(4))
    sana_pipe.stages.bucket.run(of, name="old")
    old = cache.open_snapshot("old").head
    synthetic.add(of, "one", synthetic.pictures(8))
    sana_pipe.stages.bucket.run(of)
    assert not status(cache)["damaged"]
    cache.files.remove(Paths.table(old.sources["one"], "parquet"))
    assert not status(cache)["damaged"]
    repair_documents(cache)
    assert not list(audit.verify(cache))
    with (cache.root / next(iter(old.shard_files()))).open("ab") as file:
        file.write(b"more")
    assert "names/old" in status(cache)["damaged"]


def test_repair_loads_one_encoder_at_a_time(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(config.cache)
    for path in cache.root.glob("shards/*/*/*.tar"):
        path.unlink()
    alive: list[weakref.ref[object]] = []
    for cls in (encoders.LatentEncoder, TextEncoder):
        real = cls.load

        def load(*arguments: Any, real: Callable[..., Any] = real) -> Any:
            gc.collect()
            assert not [one for one in alive if one() is not None], "another encoder is still loaded"
            alive.append(weakref.ref(made := real(*arguments)))
            return made

        monkeypatch.setattr(cls, "load", load)
    assert sana_pipe.stages.verify.run(config, repair=True) == 0
    assert len(alive) == 2


def test_what_verify_has_found_is_printed_before_it_ends(
    config: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(config.cache)
    [*_, lost] = sorted(cache.root.glob("shards/latent-*/*/*.tar"))
    lost.unlink()

    def stopped(*arguments: object) -> Iterator[Finding]:
        assert lost.name in capsys.readouterr().out
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(audit, "verify_snapshot", stopped)
    with pytest.raises(KeyboardInterrupt):
        sana_pipe.stages.verify.run(config)


# ---------------------------------------------------------------- contradictions


@pytest.mark.parametrize(
    "pattern",
    [
        "segments/latent-*/00000000.json",
        "segments/text-*/00000000.json",
        "encodings/latent-*.json",
        "encodings/text-*.json",
        "plans/latent-*/00000000.json",
        "snapshots/*.json",
        "names/latest/*.json",
    ],
)
def test_a_lost_document_contradicts_what_it_named(tiny: Cache, pattern: str) -> None:
    assert not list(contradictions(tiny))
    lose(tiny.root, pattern)
    assert list(contradictions(tiny))


@pytest.mark.parametrize("left", ["plans", "units", "segments", "shards"])
def test_an_encoding_is_missed_by_whatever_is_left_of_it(tmp_path: Path, left: str) -> None:
    cache = tiny_cache.build(tmp_path / "tiny")
    encoding = cache.encodings("latent")[0].name
    for folder in {"plans", "units", "segments", "shards"} - {left}:
        lose_all(cache, folder, encoding)
    lose(cache.root, Paths.encoding(encoding))
    assert Paths.encoding(encoding) in [finding.path for finding in contradictions(cache)]


def test_a_gap_in_the_plans_of_an_encoding_is_named(tmp_path: Path) -> None:
    of = synthetic.config(tmp_path / "cache")
    for count in (2, 4, 6):
        cache = synthetic.add(of, "one", synthetic.pictures(count))
    encoding = cache.encodings("latent")[0].name
    assert cache.files.numbers(Paths.plans(encoding)) == [0, 1, 2]
    lose(cache.root, Paths.numbered(Paths.plans(encoding), 1))
    assert [finding.path for finding in contradictions(cache)] == [Paths.plans(encoding)]


def test_a_commit_that_its_plan_does_not_list_is_a_contradiction(tiny: Cache) -> None:
    encoding = tiny.encodings("text")[0].name
    plan = tiny.plan(encoding, 0)
    listed = publish(tiny.files, Units.table_of(plan.units[1:])).values()
    lose(tiny.root, Paths.numbered(Paths.plans(encoding), 0))
    tiny.files.put(
        Paths.numbered(Paths.plans(encoding), 0),
        layout.seal({"encoding": encoding, "number": 0, "table": plan.table, "units": listed}),
    )
    [finding] = contradictions(tiny)
    assert finding.path == Paths.numbered(Paths.plans(encoding), 0) and finding.unit == plan.units[0].unit


def test_a_shard_in_the_folder_of_another_counts_too(tiny: Cache) -> None:
    encoding = tiny.encodings("latent")[0].name
    lose(tiny.root, Paths.segment(encoding, 0))
    before = {finding.path for finding in contradictions(tiny)}
    [first, *_] = sorted(tiny.root.glob(f"shards/{encoding}/*/*.tar"))
    moved = first.rename(first.parent.parent / first.name)
    old, new = (path.relative_to(tiny.root).as_posix() for path in (first, moved))
    assert {finding.path for finding in contradictions(tiny)} == before - {old} | {new}


def test_units_that_are_committed_while_documents_are_read_contradict_nothing(
    tiny: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding, real = tiny.encodings("latent")[0].name, Cache.plans
    commits = index.commits(tiny.files, encoding, 0)
    lose(tiny.root, Paths.segment(encoding, 0))
    assert len(list(contradictions(tiny))) == len(commits)

    def plans(cache: Cache, of: str) -> list[WorkList]:
        for commit in commits:
            index.publish_commit(cache.files, encoding, 0, commit)
        return real(cache, of)

    monkeypatch.setattr(Cache, "plans", plans)
    assert not list(contradictions(tiny))


@pytest.mark.parametrize("lost", ["plan", "table"])
def test_a_lost_plan_of_a_pack_stops_gc_until_its_units_are_set_aside(tmp_path: Path, lost: str) -> None:
    """They were garbage to `gc` and needed to `verify`, so each undid what the other did."""
    cache = tiny_cache.build(tmp_path / "tiny", {(16, 16): 6})
    source, packed = cache.open_snapshot().id, pack(cache, name="packed")
    cache.point("source", source)
    config = load("tiny", [f"cache={cache.root}"])
    table = Paths.table(cache.plan(str(packed.head.folder), 0).table, "parquet")
    if lost == "plan":
        lose(cache.root, "plans/packed-*/00000000.json")
    else:
        HARM["cut"](cache.root / table)
    before = content(cache.root)
    [finding] = audit.verify(cache)
    assert finding.path.startswith("plans/packed-") if lost == "plan" else finding.path == table
    if lost == "plan":
        with pytest.raises(IntegrityError, match=naming(finding.path, "verify --repair")):
            sana_pipe.stages.gc.run(config, yes=True, older_than_hours=0)
        assert content(cache.root) == before
    else:
        sana_pipe.stages.gc.run(config, yes=True, older_than_hours=0)
        assert {name for name in before if "packed-" in name} <= {*content(cache.root)}
    sana_pipe.stages.verify.run(config, repair=True)
    assert sana_pipe.stages.gc.run(config, yes=True, older_than_hours=0) == sana_pipe.stages.verify.run(config) == 0
    assert cache.open_snapshot("packed").id == packed.id
    cache.point("latest", source)
    assert pack(cache, name="packed").id == packed.id and not list(audit.verify(cache))


@pytest.mark.parametrize("named", [(), ("one",), ("one", "two")])
def test_a_snapshot_that_cannot_be_made_again_can_be_done_without(tiny: Cache, named: tuple[str, ...]) -> None:
    """Every hint said `bucket`, which makes only a snapshot with the same content again."""
    lost = tiny.open_snapshot().id
    for name in named:
        tiny.point(name, lost)
    if named:  # `latest` has moved on
        tiny.add_snapshot(replace(tiny.open_snapshot().head, left_out={"a reason": 1}), None)
    lose(tiny.root, Paths.snapshot(lost))
    for name in reversed(named):
        [finding] = contradictions(tiny)
        assert finding.path == Paths.snapshot(lost) and f"sana-pipe forget --snapshot {name}" in finding.fix
        tiny.forget_name(name)
    assert [finding.fix for finding in contradictions(tiny)] == ([] if named else ["sana-pipe bucket"])


def test_a_chunk_of_several_snapshots_is_made_again_by_one_with_a_name(tiny: Cache) -> None:
    head, number = tiny.open_snapshot().head, 0
    while tiny.snapshot_of("latest") == max(name.removesuffix(".json") for name in tiny.files.names("snapshots")):
        tiny.add_snapshot(replace(head, left_out={"a reason": (number := number + 1)}), None)
    table = Paths.table(head.chunks[0].samples, "arrow")
    for place in (table, Paths.copy(table)):
        tiny.files.path(place).unlink()
    fixes = {finding.fix for finding in audit.verify(tiny) if finding.path == table}
    [fix] = fixes
    assert fix.startswith("sana-pipe bucket") and "--name" not in fix


@pytest.mark.parametrize("damaged", ["lists", "chunks"])
def test_a_snapshot_with_a_damaged_table_can_be_done_without(tmp_path: Path, damaged: str) -> None:
    """So has its copy, and its source has changed since."""
    of = synthetic.config(tmp_path / "cache")
    cache = synthetic.add(of, "one", synthetic.pictures(4))
    old = cache.open_snapshot(sana_pipe.stages.bucket.run(of, name="old")).head
    synthetic.add(of, "one", synthetic.pictures(8))
    new = cache.open_snapshot(sana_pipe.stages.bucket.run(of)).head
    tables = {"lists": old.lists() - new.lists(), "chunks": old.tables() - old.lists() - new.tables()}
    table = Paths.table(sorted(tables[damaged])[0], "arrow")
    for place in (table, Paths.copy(table)):
        HARM["flipped"](cache.root / place)
    sana_pipe.stages.bucket.run(of)
    found = {finding.path: finding.fix for finding in audit.verify(Cache(of.cache))}
    again = found[table]
    assert again.startswith("sana-pipe bucket --name old --move")
    assert found == {table: again, Paths.copy(table): again}
    if damaged == "lists":
        with pytest.raises(IntegrityError, match=naming(table, layout.REPAIR)):
            sana_pipe.stages.gc.run(of, yes=True, older_than_hours=0)
    cache.forget_name("old")
    assert {finding.fix for finding in audit.verify(Cache(of.cache))} == {"sana-pipe gc --yes"}
    sana_pipe.stages.gc.run(of, yes=True, older_than_hours=0)
    assert not list(audit.verify(Cache(of.cache)))


@pytest.mark.parametrize("kind", ["latent", "text"])
def test_a_damaged_list_of_a_pack_hides_no_other_damage(tmp_path: Path, kind: str) -> None:
    """Nor is it in the way: its copy is read."""
    of = synthetic.config(tmp_path / "cache")
    cache = synthetic.add(of, "one", synthetic.pictures(4))
    sana_pipe.stages.bucket.run(of)
    packed = pack(cache, name="packed").head
    lists = {kind: names.entry.table for kind, names in packed.shards.items()}
    HARM["flipped"](cache.root / Paths.table(lists[kind], "arrow"))
    found = [finding.path for finding in audit.verify(Cache(of.cache))]
    assert found == [Paths.table(lists[kind], "arrow")]
    assert sana_pipe.stages.verify.run(of, repair=True) == 0


def test_a_damaged_record_table_of_a_pack_is_read_out_of_its_shard(tmp_path: Path) -> None:
    cache = tiny_cache.build(tmp_path / "tiny", {(16, 16): 6})
    owner = pack(cache, name="packed").head.folder
    assert owner is not None
    table = cache.root / Paths.table(str(index.commits(cache.files, owner, 0)[0].table), "arrow")
    good = table.read_bytes()
    for how in ("lost", "flipped"):
        HARM[how](table)
        assert sana_pipe.stages.verify.run(load("tiny", [f"cache={cache.root}"]), repair=True) == 0
        assert table.read_bytes() == good


def test_what_a_crash_leaves_contradicts_nothing_once_the_work_is_finished(tiny: Cache) -> None:
    """A shard of a committed unit, and bytes that are no shard; a shard of a unit that is not committed does."""
    encoding = tiny.encodings("latent")[0].name
    unit = b'"unit":"' + b"0" * 31
    [first, *_] = [path for path in tiny.root.glob(f"shards/{encoding}/*/*.tar") if unit in path.read_bytes()]
    left = tiny.root / Paths.shard(encoding, "0" * 32)
    left.parent.mkdir(exist_ok=True)
    before = content(tiny.root)
    for data in (first.read_bytes(), b"never committed", b""):
        left.write_bytes(data)
        assert not list(contradictions(tiny))
        repair_documents(tiny)
        left.unlink()
        assert content(tiny.root) == before, "nor does repair commit it"
    left.write_bytes(first.read_bytes().replace(unit, b'"unit":"' + b"f" * 31))
    assert not list(contradictions(tiny)), "other shards have its records"
    first.unlink()
    [finding] = contradictions(Cache(tiny.root))
    assert finding.path == Paths.shard(encoding, "0" * 32)


@pytest.mark.parametrize("folder", ["encodings", "sources", "plans", "units", "segments", "names", "prompts"])
def test_an_intact_document_of_another_kind_is_none_of_a_folder(tmp_path: Path, folder: str) -> None:
    """Swapped files; this was found as a KeyError in `bucket`."""
    data = layout.seal({"what": "sana-pipe cache; see cache_layout.md"})
    for copy in ("", "copies/"):
        path = tmp_path / copy / folder / "a/00000000.json"
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
    with pytest.raises(IntegrityError, match=naming(f"{folder}/a/00000000.json")):
        Files(tmp_path).document(f"{folder}/a/00000000.json")


def test_a_document_that_does_not_say_whose_it_is_is_another(config: Config) -> None:
    keys = {"sources": "source", "plans": "encoding", "segments": "plan", "names": "name", "prompts": "name"}
    cache, seen = Cache(config.cache), set[str]()
    for name, _ in copies.documents(cache.files):
        folder, body = name.partition("/")[0], cache.files.document(name)
        if folder in keys:
            seen.add(folder)
            del body[keys[folder]]
            assert layout.contradicts_name(name, body), name
    assert seen == set(keys)
