"""`verify` in shares, continued after a kill, of a sample, of one snapshot."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import sana_pipe.stages.verify
from sana_pipe.base.errors import CacheError, IntegrityError, UserError
from sana_pipe.config import Config, load
from sana_pipe.data.cache import audit
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.files import Files
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.verification import round as rounds
from sana_pipe.data.verification.round import Scope, join
from tests.support import tiny_cache
from tests.support.constants import constants, set_constants
from tests.support.damage import flip
from tests.support.forked import Forked
from tests.support.messages import naming
from tests.support.packed import pack
from tests.support.slow_reads import note_reads, reads


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return tiny_cache.build(tmp_path / "cache")


@pytest.fixture
def config(cache: Cache) -> Config:
    return load("tiny", [f"cache={cache.root}"])


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are read whole, in order."""
    names, real = list[str](), Files.digest
    monkeypatch.setattr(Files, "digest", lambda self, name: (names.append(name), real(self, name))[1])
    return names


def verified(config: Config, capsys: pytest.CaptureFixture[str], **options: Any) -> dict[str, Any]:
    """The result as JSON values, with the exit code."""
    capsys.readouterr()
    code = sana_pipe.stages.verify.run(config, as_json=True, **options)
    return {**json.loads(capsys.readouterr().out.splitlines()[-1]), "code": code}


def shards_of(cache: Cache) -> list[str]:
    return [entry.name for entry in cache.files.walk("shards")]


def interrupt(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Ctrl-C after so many parts have been read."""
    real, left = audit.Contents.verify, [after]

    def verify(self: audit.Contents, *args: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return real(self, *args)

    monkeypatch.setattr(audit.Contents, "verify", verify)


def test_a_stopped_round_is_continued_and_a_complete_one_is_not(
    cache: Cache, config: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, read: list[str]
) -> None:
    """What was found before the stop is found after it, too."""
    shards = shards_of(cache)
    flip(cache.files.path(shards[0]), cache.files.path(shards[0]).stat().st_size // 2)
    with monkeypatch.context() as patch:
        interrupt(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            sana_pipe.stages.verify.run(config)
    before = [name for name in read if name in shards]
    assert shards[0] in before and len(before) < len(shards)
    with monkeypatch.context() as patch:
        interrupt(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            sana_pipe.stages.verify.run(config)
    said = capsys.readouterr().out
    assert "continues" in said and shards[0] in said, "what was found is told again"
    before = [name for name in read if name in shards]
    read.clear()
    result = verified(config, capsys)
    assert {*before} & {*read} == {shards[0]} and {*before, *read} >= {*shards}, "what was damaged is read again"
    assert result["code"] == 4 and [finding["path"] for finding in result["findings"]] == [shards[0]]
    assert result["verified"] == result["total"] and result["share"] == 1.0
    assert result["read"]["files"] < result["verified"]["files"]
    read.clear()
    assert verified(config, capsys)["read"] == result["verified"] and {*read} >= {*shards}, "a new round reads all"


def test_what_was_put_right_since_a_stopped_round_is_not_told_again(
    cache: Cache, config: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = cache.files.path(shards_of(cache)[0])
    intact, continued = shard.read_bytes(), 0
    for put_right in (lambda: shard.write_bytes(intact), lambda: sana_pipe.stages.verify.run(config, repair=True)):
        flip(shard, len(intact) // 2)
        with monkeypatch.context() as patch:
            interrupt(patch, 5)
            with pytest.raises(KeyboardInterrupt):
                sana_pipe.stages.verify.run(config)
        assert shard.name in capsys.readouterr().out
        shard.chmod(0o644)
        put_right()
        shard.write_bytes(intact)  # a repair needs the pictures
        result = verified(config, capsys)
        assert (result["code"], result["findings"], result["ok"]) == (0, [], True)
        if result["read"]["files"] < result["verified"]["files"]:  # continued; after a repair a round begins anew
            told = {name for name in cache.files.names_below(Paths.ROUNDS) if name.endswith(".json")}
            assert {name.rpartition("/")[2] for name in told} == {"00000000.json", "complete.json"}, (
                "no finding is left"
            )
            continued += 1
    assert continued == 1


def test_an_old_round_is_not_continued(
    cache: Cache, config: Config, monkeypatch: pytest.MonkeyPatch, read: list[str]
) -> None:
    with monkeypatch.context() as patch:
        interrupt(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            sana_pipe.stages.verify.run(config)
    read.clear()
    set_constants(monkeypatch, {"sana_pipe.data.verification.round.ROUND_S": 0})
    assert sana_pipe.stages.verify.run(config) == 0 and {*read} >= {*shards_of(cache)}
    assert cache.files.names(Paths.ROUNDS) == ["00000001", "00000001.json"], "the earlier one is removed"


def test_a_complete_round_leaves_few_files(cache: Cache, config: Config) -> None:
    for _ in range(2):
        assert sana_pipe.stages.verify.run(config) == 0
    names = [name.rpartition("/")[2] for name in cache.files.names_below(Paths.ROUNDS)]
    documents = [name for name in names if len(name) == len("0" * 32 + ".json")]
    assert sorted({*names} - {*documents}) == ["00000001.json", "complete.json", "ended-0-of-1"]
    assert not documents
    assert not list(cache.files.names_below("claims"))


def test_a_share_that_starts_late_tells_the_result_of_the_others(
    cache: Cache, config: Config, capsys: pytest.CaptureFixture[str], read: list[str]
) -> None:
    [first, *_] = shards_of(cache)
    cache.files.path(first).unlink()
    whole = verified(config, capsys, task_index=1, task_count=2)
    read.clear()
    late = verified(config, capsys, task_index=0, task_count=2)
    assert not read and late["read"]["bytes"] < whole["read"]["bytes"], "documents alone"
    told = ("code", "findings", "verified", "total")
    assert {key: late[key] for key in told} == {key: whole[key] for key in told} and whole["code"] == 4
    assert verified(config, capsys, task_index=0, task_count=2)["read"]["files"], "its next command is a new round"


def test_a_shard_that_was_added_since_is_read_by_a_late_share(
    cache: Cache, config: Config, capsys: pytest.CaptureFixture[str], read: list[str]
) -> None:
    whole = verified(config, capsys, task_index=1, task_count=2)
    joint = {*pack(cache).shard_files()}
    read.clear()
    late = verified(config, capsys, task_index=0, task_count=2)
    assert {*read} >= joint and late["verified"]["files"] > whole["verified"]["files"]
    assert late["share"] == 1.0


def test_a_damaged_result_is_no_result(
    cache: Cache, config: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    [first, *_] = shards_of(cache)
    cache.files.path(first).unlink()
    with monkeypatch.context() as patch:
        patch.setattr(audit.Contents, "verify_snapshots", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            sana_pipe.stages.verify.run(config)
    for path in cache.root.glob(f"{Paths.ROUNDS}/*/*.json"):
        flip(path, 20)
    assert [finding["path"] for finding in verified(config, capsys)["findings"]][:1] == [first]


# ---------------------------------------------------------------- samples and snapshots


def test_a_sample_reads_a_share_and_says_so(
    cache: Cache, config: Config, capsys: pytest.CaptureFixture[str], read: list[str]
) -> None:
    shards, drawn = shards_of(cache), set[tuple[str, ...]]()
    for _ in range(4):
        read.clear()
        result = verified(config, capsys, sample=0.2)
        drawn.add(tuple(sorted(name for name in read if name in shards)))
        assert (result["shards"], result["shards_verified"]) == (len(shards), -(-len(shards) // 5))
        assert len(max(drawn)) == result["shards_verified"] and 0 < result["share"] < 1 and result["code"] == 0
    assert len(drawn) > 1, "another sample each time"
    assert sana_pipe.stages.verify.run(config, sample=0.2) == 0
    said = capsys.readouterr().out
    assert "sample" in said and f"{result['shards_verified']} of {len(shards)} shards" in said


def test_a_sample_that_has_damage_ends_with_its_code(
    cache: Cache, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in shards_of(cache):
        flip(cache.files.path(name), 700)
    result = verified(config, capsys, sample=0.01)
    assert result["code"] == 4 and len([f for f in result["findings"] if f["path"].startswith("shards/")]) == 1


def test_a_snapshot_alone_is_read(
    cache: Cache, config: Config, capsys: pytest.CaptureFixture[str], read: list[str]
) -> None:
    """A packed snapshot has its own shards."""
    small = cache.open_snapshot()
    joint = {*pack(cache, name="packed").shard_files()}
    for name, needed in ((small.id, {*small.shard_files()}), ("packed", joint)):
        read.clear()
        result = verified(config, capsys, snapshot=name)
        assert {each for each in read if each.startswith("shards/")} == needed
        assert result["code"] == 0 and result["share"] == 1.0
    other = next(iter(joint))
    flip(cache.files.path(other), 700)
    assert verified(config, capsys, snapshot=small.id)["code"] == 0
    assert [finding["path"] for finding in verified(config, capsys, snapshot="packed")["findings"]] == [other]
    assert sana_pipe.stages.verify.run(config, snapshot="packed", repair=True) == 0
    assert verified(config, capsys)["code"] == 0
    with pytest.raises(CacheError, match=naming("nothing")):
        sana_pipe.stages.verify.run(config, snapshot="nothing")


def test_a_damaged_list_of_the_snapshot_hides_no_shard(
    cache: Cache, config: Config, capsys: pytest.CaptureFixture[str], read: list[str]
) -> None:
    snapshot = cache.open_snapshot()
    needed = {*snapshot.shard_files()}
    table = Paths.table(min(snapshot.head.lists()), "arrow")
    flip(cache.files.path(table), 100)
    for repair, code in ((False, 4), (True, 0)):
        read.clear()
        result = verified(config, capsys, snapshot=snapshot.id, repair=repair)
        assert result["code"] == code and [finding["path"] for finding in result["findings"]] == [table]
        assert {*read} >= needed
    for name in (table, Paths.copy(table)):
        cache.files.path(name).unlink()
    with pytest.raises(IntegrityError, match=naming(table)):
        sana_pipe.stages.verify.run(config, snapshot=snapshot.id)


def test_repairs_in_shares_are_done_once_and_told_by_all(
    cache: Cache, config: Config, capsys: pytest.CaptureFixture[str], read: list[str]
) -> None:
    joint = next(iter(pack(cache, name="packed").shard_files()))
    flip(cache.files.path(joint), 700)
    document = Paths.numbered(Paths.names("packed"), 0)
    for task in (1, 0):
        cache.files.path(document).unlink()  # documents are looked at by each process
        read.clear()
        result = verified(config, capsys, repair=True, task_index=task, task_count=2)
        told = [(finding["path"], finding["outcome"]) for finding in result["findings"]]
        assert told == [(document, "restored"), (joint, "restored")] and result["code"] == 0
    assert not [name for name in read if name.startswith("shards/")] and verified(config, capsys)["code"] == 0


def test_documents_are_verified_again_where_a_round_is_continued(
    cache: Cache, config: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            sana_pipe.stages.verify.run(config)
    document = Paths.snapshot(cache.snapshot_id())
    cache.files.path(document).unlink()
    assert [finding["path"] for finding in verified(config, capsys)["findings"]] == [document]


# ---------------------------------------------------------------- who may not write


def test_with_read_rights_alone_one_process_verifies_and_several_are_refused(
    cache: Cache, config: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> float:
        raise CacheError(f"{cache.root}: cannot be written")

    monkeypatch.setattr(Files, "now", refused)
    assert verified(config, capsys)["share"] == 1.0 and not cache.files.names(Paths.ROUNDS)
    with pytest.raises(UserError, match=naming(str(cache.root))):
        sana_pipe.stages.verify.run(config, task_index=0, task_count=2)


def test_rounds_of_other_scopes_are_apart(cache: Cache) -> None:
    first = join(cache.files, Scope(), 0, 1)
    assert [join(cache.files, scope, 0, 1).number for scope in (Scope(), Scope(sample=0.5), Scope(repair=True))] == [
        first.number,
        first.number + 1,
        first.number + 2,
    ]
    assert join(cache.files, Scope(sample=0.5), 3, 8).number == first.number + 3, "what was repaired is not known to it"
    again = join(cache.files, Scope(), 0, 1)
    assert again.number == first.number + 4
    assert join(cache.files, Scope(), 3, 8).number == again.number, "another number of shares continues it, too"
    again.end(0, 1)
    assert join(cache.files, Scope(), 0, 1).number == first.number + 5
    assert rounds.LATE_S < rounds.ROUND_S


# ---------------------------------------------------------------- processes


@pytest.mark.fault
@pytest.mark.timeout(300)
def test_killed_five_times_each_shard_is_read_once(tmp_path: Path, fault_seed: int) -> None:
    """Two processes share the work; one of them is killed at a random moment, five times, and started again."""
    chance, log = random.Random(fault_seed), tmp_path / "reads"
    cache = tiny_cache.build(tmp_path / "cache", per_shard=3)
    shards = shards_of(cache)
    damaged = chance.choice(shards)
    flip(cache.files.path(damaged), cache.files.path(damaged).stat().st_size // 2)

    def start(task: int, attempt: int) -> Forked:
        words = ("verify", "--config", "tiny", "--set", f"cache={cache.root}", "--json")
        share = ("--task-index", str(task), "--task-count", "2")
        slow = partial(note_reads, str(log), 0.06)
        return Forked(*words, *share, before=slow, log=tmp_path / f"{task}-{attempt}")

    with constants({"sana_pipe.data.work.claims.STALE_S": 3}):
        steady, kills = start(0, 0), 0
        for attempt in range(5):
            process, seen = start(1, attempt), reads(log).total()
            while reads(log).total() < seen + 2 and process.poll() is None:
                time.sleep(0.01)
            try:
                process.wait(timeout=chance.uniform(0.0, 0.2))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
                kills += 1
        last = start(1, 5)
        codes = [steady.wait(), last.wait()]
    assert codes == [4, 4] and kills == 5, (tmp_path / "0-0").read_text()
    counted = reads(log)
    # a damaged shard is read again to find its damaged records, by other calls than are counted here
    assert {*counted} == {*shards}
    assert counted.total() <= len(shards) + kills, counted
    for said in ("0-0", "1-5"):
        result = json.loads((tmp_path / said).read_text().splitlines()[-1])
        assert [finding["path"] for finding in result["findings"]] == [damaged]
        assert result["verified"] == result["total"]
