"""One training at a time in a run directory: who is refused, who takes over, and what a fenced run leaves alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from sana_pipe.base import disk, process_identity
from sana_pipe.base.errors import NoSpaceError, UserError
from sana_pipe.base.launch import Launch, scheduled_attempt
from sana_pipe.data.cache.cache import Cache
from sana_pipe.train.training import checkpoint, lock, metrics
from sana_pipe.train.training.task import Report
from sana_pipe.train.training.trainer import fit
from tests.support.foreign_lock import ELSEWHERE, plant
from tests.support.messages import naming
from tests.support.waiting import until
from tests.support.workers import tiny_run

pytestmark = pytest.mark.usefixtures("one_thread")
NEVER = 1e9


def train(
    run: Path,
    *,
    steps: int = 1,
    resume: str | None = None,
    touch: Any = None,
    log: Callable[[str], None] = lambda line: None,
    **options: Any,
) -> Report:
    settings = tiny_run.config(run, steps=steps, **options)
    return fit(settings.train, tiny_run.task(settings, touch=touch), Launch(), resume=resume, log=log)


@pytest.fixture
def beats() -> Iterator[Callable[[Path], None]]:
    """`beats(path)`: touch a file until the test ends, as a living owner does."""
    ended = threading.Event()
    threads: list[threading.Thread] = []

    def begin(path: Path) -> None:
        def beat() -> None:
            while not ended.wait(0.05):
                os.utime(path)

        threads.append(threading.Thread(target=beat))
        threads[-1].start()

    yield begin
    ended.set()
    for thread in threads:
        thread.join()


@pytest.fixture
def process() -> Iterator[tuple[lock.Owner, subprocess.Popen[bytes]]]:
    """Another process of this machine."""
    child = subprocess.Popen(["sleep", "600"])
    started = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
    place = {**process_identity.place(), "process": str(child.pid), "started": started}
    yield replace(ELSEWHERE, host="here", process=child.pid, place=place), child
    child.kill()
    child.wait()


# ------------------------------------------------------------------------------------------------------ who may begin


@pytest.mark.parametrize("here", [True, False])
def test_a_second_training_is_refused_with_the_firsts_host_process_and_age(
    tmp_path: Path, process: Any, beats: Callable[[Path], None], here: bool
) -> None:
    owner = process[0] if here else ELSEWHERE
    path = plant(tmp_path / "run", owner)
    before = path.read_bytes()
    beats(path)
    with pytest.raises(lock.RunTaken) as caught:
        train(tmp_path / "run")
    printed = str(caught.value)
    assert caught.value.exit_code == 10
    assert f"process {owner.process} on {owner.host}, for 2h" in printed
    assert "train.output" in printed
    assert path.read_bytes() == before
    assert list((tmp_path / "run").iterdir()) == [path]


def test_the_successor_of_a_process_that_ended_here_does_not_wait(
    tmp_path: Path, process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, child = process
    assert not process_identity.has_ended(owner.place)
    plant(tmp_path / "run", owner)
    child.kill()
    child.wait()
    assert process_identity.has_ended(owner.place)
    monkeypatch.setattr(lock, "STALE_S", NEVER)
    assert train(tmp_path / "run").step == 1


def test_a_lock_that_was_removed_is_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(lock.RunTaken, match=naming("lock.json", "--resume auto")) as caught:
        train(run, steps=2, touch=lambda step: (run / lock.NAME).unlink(missing_ok=True))
    assert "another training has taken over" not in str(caught.value)


def test_a_number_that_is_used_again_is_another_process(process: Any) -> None:
    owner, _ = process
    assert process_identity.has_ended({**owner.place, "started": "1"})
    assert not process_identity.has_ended({**owner.place, "started": "1", "machine": "another"})
    assert not process_identity.has_ended({})


def test_the_successor_of_a_lost_host_waits_for_a_sign_by_the_file_systems_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "STALE_S", 3.0)
    monkeypatch.setattr(lock, "POLL_S", 0.05)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 1e6)  # a clock of this machine that is wrong by days
    waits: list[float] = []
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda s: (waits.append(s), sleep(s))[1])
    plant(tmp_path / "stale", ELSEWHERE, untouched_s=30 + 1e6)
    assert train(tmp_path / "stale").step == 1
    assert lock.POLL_S not in waits
    plant(tmp_path / "fresh", ELSEWHERE, untouched_s=1e6)
    printed: list[str] = []
    assert train(tmp_path / "fresh", log=printed.append).step == 1
    assert lock.POLL_S in waits
    [line] = [line for line in printed if "locked" in line]
    assert re.search(naming("lock.json", ELSEWHERE.host) + r".*waiting at most [123]s for a sign of life", line)


def test_a_requeued_job_takes_over_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: Any, beats: Callable[[Path], None]
) -> None:
    """Though the process of its first attempt still lives; another job does not, nor the same attempt."""
    monkeypatch.setattr(lock, "STALE_S", NEVER)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    assert scheduled_attempt() == (" 77", 0)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert scheduled_attempt() == (" 77", 1)
    for name, job, attempt, refused in (("a", " 77", 0, False), ("b", " 77", 1, True), ("c", " 76", 0, True)):
        path = plant(tmp_path / name, process[0], job=job, attempt=attempt)
        if refused:
            beats(path)
            with pytest.raises(lock.RunTaken):
                train(tmp_path / name)
        else:
            assert train(tmp_path / name).step == 1


def test_a_copied_run_directory_is_nobodys(tmp_path: Path, process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock names a process that lives, and that never touches this copy."""
    monkeypatch.setattr(lock, "STALE_S", 0.5)
    plant(tmp_path / "run", process[0])
    assert train(tmp_path / "run").step == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"token": 1}'])
def test_a_torn_lock_grows_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(lock, "STALE_S", 0.2)
    path = plant(tmp_path / "run", ELSEWHERE)
    path.write_text(text)
    assert train(tmp_path / "run").step == 1


def test_what_a_run_makes_survives_a_loss_of_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, files, fsync = list[Path](), list[str](), os.fsync

    def file_synced(descriptor: int) -> None:
        files.append(os.readlink(f"/dev/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(disk, "sync_path", synced.append)
    monkeypatch.setattr(os, "fsync", file_synced)
    train(tmp_path / "runs" / "a")
    assert {tmp_path, tmp_path / "runs", tmp_path / "runs" / "a"} <= set(synced)
    assert str(tmp_path / "runs" / "a" / lock.NAME) in files


def test_a_lock_that_appears_after_the_look_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beats: Callable[[Path], None]
) -> None:
    path, exists = plant(tmp_path / "run", ELSEWHERE), Path.exists
    beats(path)
    monkeypatch.setattr(Path, "exists", lambda of, **options: of != path and exists(of, **options))
    with pytest.raises(lock.RunTaken):
        train(tmp_path / "run")
    assert json.loads(path.read_text())["token"] == ELSEWHERE.token


def test_a_run_directory_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Path) -> float:
        with disk.cache_errors(folder):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(lock, "now_in", full)
    with pytest.raises(NoSpaceError, match=naming(tmp_path / "run", "--resume auto")):
        train(tmp_path / "run")


def test_a_cache_is_no_run_directory(tmp_path: Path) -> None:
    Cache(tmp_path / "run", create=True)
    with pytest.raises(UserError, match="is a cache") as caught:
        train(tmp_path / "run")
    assert "train.output" in str(caught.value.fix)
    assert not (tmp_path / "run" / lock.NAME).exists()


def test_the_lock_is_touched_and_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT_S", 0.05)
    path, seen = tmp_path / "run" / lock.NAME, list[int]()

    def touch(step: int) -> None:
        until(lambda: path.stat().st_mtime_ns not in seen)
        seen.append(path.stat().st_mtime_ns)

    train(tmp_path / "run", steps=3, touch=touch)
    assert len(seen) == 3
    assert not path.exists()
    with pytest.raises(ZeroDivisionError):
        train(tmp_path / "other", touch=lambda step: 1 // 0)
    assert not (tmp_path / "other" / lock.NAME).exists()
    assert not [thread for thread in threading.enumerate() if thread.name == "lock"]


# ------------------------------------------------------------------------------------------------------ who is fenced


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def taken_over(run: Path) -> None:
    """The twin begins: its token in the lock, its work in the folder."""
    plant(run, ELSEWHERE)
    (run / "checkpoints/step-00000009.07e4.tmp").mkdir(parents=True)


def test_a_run_that_was_taken_over_ends_at_its_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT_S", 0.02)
    run, steps, touched = tmp_path / "run", list[int](), list[int]()

    def touch(step: int) -> None:
        steps.append(step)
        if step == 2:
            taken_over(run)
            touched.append((run / lock.NAME).stat().st_mtime_ns)
        if step >= 2:
            time.sleep(0.2)

    with pytest.raises(lock.RunTaken):
        train(run, steps=20, save_every=20, touch=touch)
    assert steps[-1] <= 4, "it did not wait for its next save"
    assert names(run) == ["step-00000009.07e4.tmp"]
    assert metrics.read(run / "metrics.jsonl")[-1]["step"] <= 2, "the rows are the twin's"
    assert json.loads((run / lock.NAME).read_text())["token"] == "07e4", "the twin's lock stays"
    assert [(run / lock.NAME).stat().st_mtime_ns] == touched, "and only the twin says that it lives"


@pytest.mark.parametrize("when", ["before", "written", "synced", "published"])
def test_a_run_that_was_taken_over_publishes_and_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Stopped at that moment of its second save, and woken up when the twin is at work; no beat has warned it."""
    monkeypatch.setattr(lock, "BEAT_S", NEVER)
    run = tmp_path / "run"
    save, sync = dcp.save, checkpoint.sync_path

    def late(*args: Any, **options: Any) -> Any:
        result = save(*args, **options)
        if when == "written" and "00000004" in str(options["storage_writer"].path):
            taken_over(run)
        return result

    def synced(path: Path) -> None:
        sync(path)
        if when == "synced" and path.name.startswith("step-00000004."):
            taken_over(run)
        if when == "published" and (run / "checkpoints/step-00000004").exists():
            taken_over(run)

    def touch(step: int) -> None:
        if step == 3:
            own = json.loads((run / lock.NAME).read_text())["token"]
            (run / f"checkpoints/step-00000001.{own}.removing").mkdir()
            if when == "before":
                taken_over(run)

    monkeypatch.setattr(dcp, "save", late)
    monkeypatch.setattr(checkpoint, "sync_path", synced)
    monkeypatch.setattr(disk, "sync_path", synced)
    monkeypatch.setattr(checkpoint, "IN_BACKGROUND", False)
    with pytest.raises(lock.RunTaken):
        train(run, steps=4, save_every=2, keep_checkpoints=1, touch=touch)
    left = {name for name in names(run) if not name.startswith("step-00000004.")}
    [own] = [name for name in left if name.endswith(".removing")]
    left.remove(own)
    twins = {"step-00000002", "step-00000009.07e4.tmp"}
    assert left == (twins | {"step-00000004"} if when == "published" else twins)


def test_a_run_removes_what_was_left_before_it_and_what_it_left_itself(tmp_path: Path) -> None:
    root = tmp_path / "run/checkpoints"
    for name in ("step-00000001.abc.tmp", "step-00000001.abc.removing"):
        (root / name).mkdir(parents=True)

    def touch(step: int) -> None:
        if step == 1:
            (root / "step-00000009.07e4.tmp").mkdir()
            mine = json.loads((tmp_path / "run" / lock.NAME).read_text())["token"]
            (root / f"step-00000001.{mine}.removing").mkdir()  # a removal that a busy file system refused

    train(tmp_path / "run", steps=2, touch=touch)
    assert names(tmp_path / "run") == ["step-00000002", "step-00000009.07e4.tmp"]


def test_what_is_unfinished_has_the_token_of_its_attempt_in_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A twin must not take it for its own."""
    run, unfinished, tokens = tmp_path / "run", list[str](), list[str]()
    save, remove = dcp.save, shutil.rmtree

    def saved(*args: Any, **options: Any) -> Any:
        unfinished.append(Path(options["storage_writer"].path).name)
        return save(*args, **options)

    def removed(path: Path, **options: Any) -> None:
        unfinished.append(path.name)
        remove(path, **options)

    monkeypatch.setattr(dcp, "save", saved)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", removed)

    def touch(step: int) -> None:
        tokens.append(json.loads((run / lock.NAME).read_text())["token"])

    monkeypatch.setattr(checkpoint, "IN_BACKGROUND", False)
    train(run, steps=2, save_every=1, keep_checkpoints=1, touch=touch)
    assert {name.rpartition(".")[2] for name in unfinished} == {"tmp", "removing"}
    assert {name.split(".")[1] for name in unfinished} == {*tokens}
