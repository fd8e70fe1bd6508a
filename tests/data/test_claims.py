"""Claims: who may take a unit, judged by an observer's own clock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sana_pipe.base import process_identity as owner
from sana_pipe.base.errors import CacheError
from sana_pipe.data.cache.files import Files
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.work.claims import Claims
from tests.support.waiting import until

UNIT = ("latent-0", 0, "ab" * 16)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def two(tmp_path: Path, clock: Clock) -> tuple[Claims, Claims]:
    """Two workers of one cache (in one living process, so that neither looks dead)."""
    return Claims(Files(tmp_path), 60, clock), Claims(Files(tmp_path), 60, clock)


def claim_file(tmp_path: Path) -> Path:
    return tmp_path / Paths.claim(*UNIT)


def beat(owner: Claims, tmp_path: Path, count: int) -> None:
    owner.files.replace(Paths.claim(*UNIT), owner.content(count))


def test_one_takes_the_other_waits(two: tuple[Claims, Claims]) -> None:
    first, second = two
    assert first.take(*UNIT) == "ours"
    assert second.take(*UNIT) == "claimed"
    second.release(*UNIT)  # not its own: nothing happens
    assert first.state(*UNIT) == "ours"
    first.release(*UNIT)
    assert second.take(*UNIT) == "ours"


def test_a_claim_that_does_not_change_grows_stale_by_the_observers_clock(
    two: tuple[Claims, Claims], clock: Clock, tmp_path: Path
) -> None:
    first, second = two
    first.take(*UNIT)
    os.utime(claim_file(tmp_path), (0, 0))  # as if written in 1970, or by a machine whose clock is wrong
    assert second.take(*UNIT) == "claimed"
    clock.now += 59.9
    assert second.take(*UNIT) == "claimed"
    clock.now += 0.1
    assert second.take(*UNIT) == "ours"
    assert first.state(*UNIT) == "claimed", "the first has lost it and sees somebody else's"
    first.release(*UNIT)
    assert second.state(*UNIT) == "ours"


def test_a_beat_starts_the_time_anew(two: tuple[Claims, Claims], clock: Clock, tmp_path: Path) -> None:
    first, second = two
    first.take(*UNIT)
    assert second.state(*UNIT) == "claimed"
    for count in range(1, 5):
        clock.now += 59
        beat(first, tmp_path, count)
        assert second.take(*UNIT) == "alive"
        assert second.take(*UNIT) == "claimed"
    clock.now += 60
    assert second.take(*UNIT) == "ours"


def test_a_file_from_the_future_is_no_younger(two: tuple[Claims, Claims], clock: Clock, tmp_path: Path) -> None:
    first, second = two
    first.take(*UNIT)
    assert second.state(*UNIT) == "claimed"
    far = time.time() + 1e8
    os.utime(claim_file(tmp_path), (far, far))
    clock.now += 60
    assert second.state(*UNIT) == "free"


def test_a_dead_process_of_this_machine_holds_nothing(tmp_path: Path, clock: Clock) -> None:
    if not owner.place():
        pytest.skip("this system has no /proc to ask about processes")
    code = (
        "import sys; from sana_pipe.data.cache.files import Files; from sana_pipe.data.work.claims import Claims\n"
        f"print(Claims(Files(sys.argv[1]), 60).take(*{UNIT!r}))"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "ours"
    assert Claims(Files(tmp_path), 60, clock).take(*UNIT) == "ours"


@pytest.mark.parametrize("change", [{"machine": "another"}, {"machine": None}])
def test_of_another_machines_process_nothing_is_known(tmp_path: Path, clock: Clock, change: dict[str, str]) -> None:
    there = Claims(Files(tmp_path), 60, clock)
    there.place = {**there.place, "process": "999999999", "started": "1", **change}
    there.take(*UNIT)
    here = Claims(Files(tmp_path), 60, clock)
    assert here.take(*UNIT) == "claimed"
    clock.now += 60
    assert here.take(*UNIT) == "ours"


def test_a_process_id_used_again_is_another_process(tmp_path: Path, clock: Clock) -> None:
    if not owner.place():
        pytest.skip("this system has no /proc to ask about processes")
    old = Claims(Files(tmp_path), 60, clock)
    old.place = {**old.place, "started": "12"}  # our own id, of a process that started at another time
    old.take(*UNIT)
    assert Claims(Files(tmp_path), 60, clock).take(*UNIT) == "ours"


def test_a_damaged_claim_is_a_claim_like_any_other(two: tuple[Claims, Claims], clock: Clock, tmp_path: Path) -> None:
    claim_file(tmp_path).parent.mkdir(parents=True)
    for content in (b"", b"\xff\x00", b"[1]", b'{"owner": 3'):
        claim_file(tmp_path).write_bytes(content)
        assert two[0].take(*UNIT) in ("claimed", "alive")
    clock.now += 60
    assert two[0].take(*UNIT) == "ours"


def test_two_who_saw_it_grow_stale_rarely_both_have_it(
    two: tuple[Claims, Claims], clock: Clock, tmp_path: Path
) -> None:
    dead = Claims(Files(tmp_path), 60, clock)
    dead.take(*UNIT)
    first, second = two
    assert (first.state(*UNIT), second.state(*UNIT)) == ("claimed", "claimed")
    clock.now += 60
    assert first.take(*UNIT) == "ours"
    assert second.take(*UNIT) == "alive"


def test_a_claim_beats_while_it_lasts_and_is_removed_afterwards(tmp_path: Path) -> None:
    owner, watcher = Claims(Files(tmp_path), 0.3), Claims(Files(tmp_path), 0.3)
    owner.take(*UNIT)
    seen = set()

    def beats() -> bool:
        seen.add(json.loads(claim_file(tmp_path).read_bytes())["beat"])
        return len(seen) > 3

    with owner.heartbeat(*UNIT):
        until(beats)
        assert watcher.take(*UNIT) != "ours"
    assert not claim_file(tmp_path).exists()
    assert not any(thread.name == "claim" for thread in threading.enumerate())


def test_a_woken_owner_leaves_the_new_owners_claim(tmp_path: Path) -> None:
    owner, other = Claims(Files(tmp_path), 0.3), Claims(Files(tmp_path), 60)
    owner.take(*UNIT)
    with owner.heartbeat(*UNIT):
        for _ in range(10):  # a beat between reading and writing the claim overwrites it once
            other.files.replace(Paths.claim(*UNIT), other.content(0))
            time.sleep(0.5)
            if other.state(*UNIT) == "ours":
                break
        assert other.state(*UNIT) == "ours"
    assert other.state(*UNIT) == "ours"


def test_an_error_releases_the_claim(tmp_path: Path) -> None:
    owner = Claims(Files(tmp_path), 60)
    owner.take(*UNIT)
    with pytest.raises(KeyboardInterrupt), owner.heartbeat(*UNIT):
        raise KeyboardInterrupt
    assert not claim_file(tmp_path).exists()


def test_a_claim_that_goes_while_it_is_put_is_another_ones(
    two: tuple[Claims, Claims], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two
    monkeypatch.setattr(first.files, "put", lambda name, data: False)  # another worker had it, and has released it
    assert first.take(*UNIT) == "claimed"
    assert second.state(*UNIT) == "free"


def test_a_young_claim_is_released_without_a_look_an_old_one_is_looked_at(
    two: tuple[Claims, Claims], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two
    reads: list[str] = []
    real = first.read
    monkeypatch.setattr(first, "read", lambda name: (reads.append(name), real(name))[1])
    for age, looks in ((0, 0), (29.9, 0), (30, 1)):
        reads.clear()
        assert first.take(*UNIT) == "ours"
        clock.now += age
        first.release(*UNIT)
        assert len(reads) == looks and second.state(*UNIT) == "free"
    first.take(*UNIT)
    clock.now += 60
    second.files.replace(Paths.claim(*UNIT), second.content(0))
    first.release(*UNIT)
    assert second.state(*UNIT) == "ours", "another worker has taken it over"


def test_of_two_who_take_it_at_once_the_last_to_write_has_it(
    two: tuple[Claims, Claims], clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two
    real = Files.put

    def late(files: Files, name: str, data: bytes) -> bool:
        real(second.files, name, second.content(0))
        return real(files, name, data)

    with monkeypatch.context() as patch:
        patch.setattr(Files, "put", late)
        assert first.take(*UNIT) == "claimed", "put first by the other"
    assert second.state(*UNIT) == "ours"
    assert first.state(*UNIT) == "claimed"
    clock.now += 60
    with monkeypatch.context() as patch:
        real_state = first.state
        patch.setattr(first, "state", lambda *work: (real_state(*work), beat(second, tmp_path, 1))[0])
        assert first.take(*UNIT) == "claimed", "it beat between the look and the taking"
    assert second.state(*UNIT) == "ours"
    assert first.state(*UNIT) == "alive"
    clock.now += 60
    third = Claims(Files(tmp_path), 60, clock)
    replace = first.files.replace

    def overtaken(name: str, data: bytes) -> None:
        replace(name, data)
        replace(name, third.content(0))

    with monkeypatch.context() as patch:
        patch.setattr(first.files, "replace", overtaken)
        assert first.take(*UNIT) == "claimed"
    assert third.state(*UNIT) == "ours"
    assert first.state(*UNIT) == "claimed", "its time starts anew"


def test_a_beat_that_fails_is_followed_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = Claims(Files(tmp_path), 0.06)
    written: list[bytes] = []
    real, read, enough = holder.files.replace, holder.read, threading.Event()
    reads: Iterator[bytes | None] = iter([None, None])

    def replace(name: str, data: bytes) -> None:
        written.append(data)
        if len(written) <= 2:
            raise (OSError if len(written) == 1 else CacheError)("full")
        real(name, data)
        if len(written) == 5:
            enough.set()

    holder.take(*UNIT)
    monkeypatch.setattr(holder.files, "replace", replace)
    monkeypatch.setattr(holder, "read", lambda name: next(reads, read(name)))
    with holder.heartbeat(*UNIT):
        assert enough.wait(30)
        [thread] = [thread for thread in threading.enumerate() if thread.name == "claim"]
        assert thread.daemon, "it does not keep a process alive"
    beats = [json.loads(data) for data in written]
    assert [one["beat"] for one in beats[:5]] == [1, 2, 3, 4, 5], "each beat is another; two looks found nothing before"
    assert all(one == {"owner": holder.token, "beat": one["beat"], **holder.place} for one in beats)
    assert all(data.endswith(b"}\n") for data in written)


def test_a_claim_that_cannot_be_removed_is_no_error_of_the_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(name: str) -> None:
        raise CacheError("no permission")

    holder = Claims(Files(tmp_path), 60)
    holder.take(*UNIT)
    monkeypatch.setattr(holder.files, "remove", refused)
    with holder.heartbeat(*UNIT):
        pass
    assert claim_file(tmp_path).exists()
    monkeypatch.undo()
    claim_file(tmp_path).write_bytes(b"no JSON")
    holder.release(*UNIT)
    assert claim_file(tmp_path).exists(), "not known to be ours"
    claim_file(tmp_path).unlink()
    holder.release(*UNIT)


def test_a_forked_process_has_an_identity_of_its_own(tmp_path: Path) -> None:
    here = owner.place()
    if (child := os.fork()) == 0:
        (tmp_path / "child").write_text(json.dumps(owner.place()))
        os._exit(0)
    os.waitpid(child, 0)
    there = json.loads((tmp_path / "child").read_text())
    assert (there["machine"], there["process"]) == (here["machine"], str(child)) and owner.place() == here


def test_a_process_has_ended_only_where_that_is_certain(monkeypatch: pytest.MonkeyPatch) -> None:
    here = owner.place()
    assert here["process"] == str(os.getpid())
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    assert here["started"] == started and owner.is_owned_by_live_process(f"{owner.name_prefix()}-name")
    assert not owner.ended("", started) and not owner.ended("x1", started)
    for state, ended in (("S", False), ("R", False), ("D", False), ("Z", True), ("X", True)):
        monkeypatch.setattr(owner, "stat_of", lambda process, state=state: (state, "17"))
        assert owner.ended("1", "17") == ended and owner.ended("1", "18")

    def hidden(process: str) -> tuple[str, str]:
        raise FileNotFoundError

    monkeypatch.setattr(owner, "stat_of", hidden)
    monkeypatch.setattr(owner, "place", owner.place.__wrapped__)
    asked: list[tuple[int, int]] = []
    for error, ended in ((ProcessLookupError, True), (OverflowError, True), (PermissionError, False), (None, False)):

        def kill(process: int, signal: int, error: type[Exception] | None = error) -> None:
            asked.append((process, signal))
            if error is not None:
                raise error

        monkeypatch.setattr(os, "kill", kill)
        assert owner.ended("12", "17") is ended
    assert asked == [(12, 0)] * 4, "it is asked whether it is there, and not ended"
    assert owner.place() == {} and owner.name_prefix() == f"{os.getpid():x}"
    assert not owner.is_owned_by_live_process(f"{os.getpid():x}")
