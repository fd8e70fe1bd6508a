"""One of several processes judges the scan and plans; the others use its result, or take over if it ends."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from benchmarks import large_cache
from sana_pipe.base import launch
from sana_pipe.base.errors import AwayError, IntegrityError, NoSpaceError, RejectRateError, UserError
from sana_pipe.config import load, shared
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.encoding.fragments import Fragments, Rows, ScanSuperseded
from sana_pipe.data.sources.reject_kinds import Kinds
from sana_pipe.data.work import alike
from sana_pipe.data.work.claims import Claims
from sana_pipe.data.work.engine import Worker
from sana_pipe.data.work.stop import Stop, Stopped
from sana_pipe.stages import encode
from tests.support.constants import constants, set_constants, unit_sizes, with_site
from tests.support.messages import naming
from tests.support.trees import files

ROOT = Path(__file__).resolve().parents[2]
COUNT = 10
OPTIONS = ["data.resolution=512"]


@pytest.fixture(scope="module", autouse=True)
def small_units() -> Iterator[None]:
    """Small units."""
    with constants(unit_sizes(2, 3)):
        yield


def picture(n: int) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.random.default_rng(n).integers(0, 255, (600, 600, 3), np.uint8)).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    root.mkdir()
    for n in range(COUNT):
        (root / f"{n:03d}.png").write_bytes(picture(n))
        (root / f"{n:03d}.txt").write_text(f"caption {n}")
    (root / "broken.png").write_bytes(b"no picture")
    (root / "broken.txt").write_text("a caption")
    (root / "readme.md").write_text("no picture")
    return root


def start(folder: Path, place: Path, task: int, tasks: int, **options: Any) -> subprocess.Popen[str]:
    place.mkdir(exist_ok=True)
    words = {"cache": str(place / "cache"), "data": str(folder), "log": str(place / "log"), "task": task}
    argv = [sys.executable, "-m", "tests.support.workers.planning"]
    options = {"options": [*OPTIONS, "encode.max_reject_rate=0.5"], **options}
    return subprocess.Popen(
        [*argv, json.dumps({**words, "tasks": tasks, **options})],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": with_site(str(ROOT))},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def ended(processes: list[subprocess.Popen[str]]) -> list[int]:
    outputs = [process.communicate(timeout=280)[0] for process in processes]
    assert all(process.returncode in (0, -9) for process in processes), outputs
    return [process.returncode for process in processes]


def notes(place: Path, kind: str) -> list[str]:
    lines = (line.split(" ", 2) for line in (place / "log").read_text().splitlines())
    return [line[2] if len(line) > 2 else line[0] for line in lines if line[1] == kind]


def results(place: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in notes(place, "done")]


@pytest.fixture
def alone(folder: Path, tmp_path: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The cache and the result of one process."""
    ended([start(folder, tmp_path / "alone", 0, 1)])
    [done] = results(tmp_path / "alone")
    return files(tmp_path / "alone" / "cache"), done


COUNTED = ("items", "rejects", "new", "reused", "missing")


@pytest.mark.dist
def test_of_three_processes_one_plans_and_the_cache_is_that_of_one(
    folder: Path, tmp_path: Path, alone: tuple[dict[str, bytes], dict[str, Any]]
) -> None:
    place = tmp_path / "three"
    ended([start(folder, place, task, 3, meetings={"once": 3, "finish": 3}) for task in range(3)])
    assert len(notes(place, "planned")) == 1
    units = notes(place, "made")
    assert len(units) == len(set(units)) == 5 + 4 + 1
    assert files(place / "cache") == alone[0]
    assert (place / "cache/reports/rejects-photos.csv").read_bytes() == (
        tmp_path / "alone/cache/reports/rejects-photos.csv"
    ).read_bytes()
    for done in results(place):
        assert {name: done[name] for name in COUNTED} == {name: alone[1][name] for name in COUNTED}


@pytest.mark.dist
def test_with_little_to_encode_one_of_three_plans(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "idle"
    for runs in (1, 2):
        for flag in place.glob("once-*"):
            flag.unlink()
        ended([start(folder, place, task, 3, meetings={"once": 3}) for task in range(3)])
        assert len(notes(place, "planned")) == runs


@pytest.mark.dist
@pytest.mark.parametrize(("moment", "plannings"), [("planning", 2), ("published", 1)])
def test_a_killed_planner_is_replaced_unless_it_has_published(
    moment: str, plannings: int, folder: Path, tmp_path: Path, alone: tuple[dict[str, bytes], dict[str, Any]]
) -> None:
    place = tmp_path / "killed"
    meetings = {"once": 3, "finish": 2}
    codes = ended([start(folder, place, task, 3, dies=moment, meetings=meetings) for task in range(3)])
    assert sorted(codes) == [-9, 0, 0]
    assert len(notes(place, "planned")) == plannings
    assert len(results(place)) == 2
    assert files(place / "cache") == alone[0]


ITEMS = 100_000


@pytest.mark.dist
def test_a_process_that_did_not_plan_needs_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Private memory (RssAnon) beyond that before the scan, of two processes over an unchanged source of tars."""
    place = tmp_path / "large"
    place.mkdir()
    large_cache.scanned(place, ITEMS)
    set_constants(monkeypatch, unit_sizes(4096, 16384, UNIT_BYTES=4096 << 20))
    meetings = {"once": 2, "finish": 2}
    both = [start(place, place, n, 2, items=ITEMS, options=[], meetings=meetings) for n in range(2)]
    peak = dict.fromkeys((process.pid for process in both), 0)
    while any(process.poll() is None for process in both):
        for pid in peak:
            with suppress(OSError, StopIteration):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                now = next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
                peak[pid] = max(peak[pid], now * 1024)
        time.sleep(0.005)
    ended(both)
    assert [done["items"] for done in results(place)] == [ITEMS] * 2
    noted = [line.split() for line in (place / "log").read_text().splitlines()]
    grown = {int(pid): peak[int(pid)] - int(rest[0]) for pid, kind, *rest in noted if kind == "began"}
    [owner] = (int(line[0]) for line in noted if line[1] == "planned")
    [other] = set(grown) - {owner}
    cpu = {int(line[0]): float(line[2]) for line in noted if line[1] == "cpu"}
    print({name: (grown[pid] >> 20, cpu[pid]) for name, pid in (("planner", owner), ("other", other))}, "MiB, CPU s")
    assert grown[other] < 0.7 * grown[owner]


# ---------------------------------------------------------------- in one process


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", create=True)


def fragments(cache: Cache, task: int = 0, stale_s: float = 60, stop: Stop | None = None) -> Fragments:
    return Fragments(cache, "photos", Worker(Claims(cache.files, stale_s), stop or Stop(0), task, 3))


def refuse() -> Any:
    raise AssertionError("computed twice")


def nothing() -> None:
    pass


def test_the_result_of_one_process_is_that_of_all(cache: Cache) -> None:
    first, second, other = (fragments(cache, task) for task in range(3))
    assert first.once("id", lambda: {"items": 3}, refuse, 0) == {"items": 3}
    assert second.once("id", refuse, refuse, 0)["items"] == 3
    assert other.once("another", lambda: {"items": 4}, refuse, 0)["items"] == 4


def test_who_is_slow_reads_a_result_though_its_maker_has_finished(cache: Cache) -> None:
    """A process with nothing to encode finishes at once, while the others still wait for their next look."""
    first, slow = (fragments(cache, task) for task in range(2))
    first.once("id", lambda: {"items": 3}, refuse, 0)
    first.finish()
    assert slow.once("id", refuse, refuse, 0)["items"] == 3
    slow.finish()
    fragments(cache).finish()
    assert not cache.files.names("fragments/photos"), "the next launch removes it"
    assert not cache.files.names("claims/fragments/photos")


def test_who_finishes_leaves_the_claim_of_another_planning(cache: Cache) -> None:
    first, other = (fragments(cache, task) for task in range(2))
    assert other.worker.claims.take("fragments", "photos", "planned-another") == "ours"
    first.finish()
    assert cache.files.names("claims/fragments/photos") == ["planned-another.json"]


def test_a_result_of_an_earlier_launch_is_not_used(cache: Cache) -> None:
    """Its processes were killed: unreadable files may be readable now, and shards may be lost."""
    fragments(cache).once("id", lambda: {"items": 3}, refuse, 0)
    late = [fragments(cache, task) for task in range(2)]
    assert late[0].once("id", lambda: {"items": 4}, refuse, 0)["items"] == 4
    assert late[1].once("id", refuse, refuse, 0)["items"] == 4


@pytest.mark.parametrize(
    "error",
    [
        RejectRateError("3 of 4", expected="fewer", found=["a"], fix="look"),
        UserError("not UTF-8: \udcff"),
        UserError("s3://user:secret@host/x is wrong"),
    ],
)
def test_an_error_reaches_every_process(cache: Cache, error: UserError) -> None:
    def fail() -> Any:
        raise error

    processes = [fragments(cache, task) for task in range(3)]
    with pytest.raises(UserError) as own:
        processes[0].once("id", fail, refuse, 0)
    assert own.value is error
    for process in processes[1:]:
        with pytest.raises(UserError) as same:
            process.once("id", refuse, refuse, 0)
        shown = str(error).encode("utf-8", "backslashreplace").decode()
        assert (type(same.value), str(same.value)) == (type(error), shown)
        assert (same.value.exit_code, same.value.fix) == (error.exit_code, error.fix)
    assert fragments(cache).once("id", lambda: {"items": 1}, refuse, 0), "mended: the next launch tries again"


@pytest.mark.parametrize(
    "error",
    [NoSpaceError("full"), AwayError("away"), IntegrityError("damaged"), ZeroDivisionError(), KeyboardInterrupt()],
)
def test_what_fails_on_one_machine_is_tried_by_another(cache: Cache, error: BaseException) -> None:
    def fail() -> Any:
        raise error

    processes = [fragments(cache, task) for task in range(2)]
    with pytest.raises(type(error)):
        processes[0].once("id", fail, refuse, 0)
    assert processes[1].once("id", lambda: {"items": 1}, refuse, 0) == {"items": 1}


def test_a_damaged_result_is_computed_again(cache: Cache) -> None:
    first, second = (fragments(cache, task) for task in range(2))
    first.once("id", lambda: {"items": 3}, refuse, 0)
    [name] = cache.files.names("fragments/photos")
    path = cache.root / "fragments/photos" / name
    path.write_bytes(path.read_bytes().replace(b"3", b"4"))
    assert second.once("id", lambda: {"items": 5}, refuse, 0) == {"items": 5}


def rows(number: int, reject: str | None = None) -> Rows:
    return Rows(pa.table({"item": [str(number)], "reject": pa.array([reject], pa.string())}), Kinds())


def test_pieces_with_unreadable_rows_are_made_again_by_the_next_launch(cache: Cache) -> None:
    pieces = {"0" * 32: rows(0, "unreadable: no answer"), "1" * 32: rows(1)}
    fragments(cache).gather([*pieces], pieces.__getitem__, lambda *_: None, -1)
    made: list[str] = []

    def make(piece: str) -> Rows:
        made.append(piece)
        return rows(0)

    fragments(cache).gather([*pieces], make, lambda *_: None, -1)
    fragments(cache).gather([*pieces], lambda _: refuse(), lambda *_: None, -1)
    assert made == ["0" * 32]


def test_documents_of_pieces_go_before_the_tables_that_they_name(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = {f"{number:032x}": rows(number) for number in range(6)}
    fragments(cache).gather([*pieces], pieces.__getitem__, lambda *_: None, -1)
    removed, remove = list[str](), type(cache.files).remove

    def noted(files: Any, name: str) -> None:
        removed.append(name.rpartition(".")[2])
        remove(files, name)

    monkeypatch.setattr(type(cache.files), "remove", noted)
    fragments(cache).finish()
    assert removed == ["json"] * 6 + ["arrow"] * 6


def test_nobody_plans_by_a_scan_that_is_not_the_newest(cache: Cache) -> None:
    first, second = fragments(cache), fragments(cache, 1)
    cache.add_scan("photos", {"root": "/", "table": "t", "encodings": {"latent": "l", "text": "t"}})
    with pytest.raises(ScanSuperseded):
        first.once("id", refuse, refuse, 0)
    assert second.once("id", lambda: {"items": 3}, refuse, -1), "a scan with --rehash reads what it claims"


def test_a_waiting_process_helps_once_and_takes_over_from_a_silent_one(cache: Cache) -> None:
    events: list[str] = []
    other, mine = fragments(cache), fragments(cache, 1, stale_s=1.2)
    other.worker.claims.place = {}  # of another machine
    taken: list[bool] = []
    take = mine.worker.claims.take

    def watched(*work: str | int) -> Any:
        if not taken:
            taken.append(other.worker.claims.take(*work) == "ours")
        return take(*work)

    mine.worker.claims.take = watched  # type: ignore[method-assign]
    began = time.monotonic()

    def plan() -> dict[str, Any]:
        events.append("planned")
        return {"items": 1}

    result = mine.once("id", plan, lambda: events.append("helped"), 0)
    assert result == {"items": 1} and events == ["helped", "planned"] and taken == [True]
    assert time.monotonic() - began >= 1.2, "the claim was watched"


def test_a_signal_ends_the_waiting(cache: Cache) -> None:
    stop = Stop(0)
    other, mine = fragments(cache), fragments(cache, 1, stop=stop)
    take, claims = mine.worker.claims.take, other.worker.claims

    def watched(*work: str | int) -> Any:
        claims.take(*work)
        return take(*work)

    mine.worker.claims.take = watched  # type: ignore[method-assign]

    def signalled() -> None:
        stop.name = "SIGTERM"

    with pytest.raises(Stopped, match="SIGTERM"):
        mine.once("id", refuse, signalled, 0)


def test_two_workers_of_one_launch_with_other_options_end_with_both_values(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one is refused before it reads a picture; another source, job or machine's place is not compared."""
    cache = f"cache={tmp_path / 'cache'}"
    for name, value in {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "7"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_STEP_NODELIST", "node")
    named = launch.identity()
    assert named is not None
    first = shared(load("tiny", [cache, "data.resolution=512"]))
    made, source = Cache(tmp_path / "cache", create=True), str(folder)
    alike.check(made, named, source, first, "process 0 on node")
    for setting in ("data.resolution=256", "vae.dtype=bf16", "data.min_side=100"):
        other = load("tiny", [cache, "data.resolution=512", setting])
        with pytest.raises(UserError, match=naming(setting.partition("=")[0], "process 0 on node")) as caught:
            encode.run(other, source, as_json=True)
        name, _, value = setting.partition("=")
        assert str(caught.value.expected).startswith(json.dumps(first[name])) and value in str(caught.value.found)
        assert not Cache(tmp_path / "cache").sources()
    more = load("tiny", [cache, "data.resolution=512", "encode.workers=7", "patience_s=1", "encode.device=cpu"])
    alike.check(made, named, source, shared(more), "process 1")
    other = shared(load("tiny", [cache, "data.resolution=256"]))
    alike.check(made, named, "another source", other, "process 1")
    alike.check(made, ("another job", True), source, other, "process 1")


def test_a_launch_that_has_the_name_of_an_earlier_one_is_not_compared_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its document is older than the process; that of a process that was refused goes with it."""
    cache = Cache(tmp_path / "cache", create=True)

    def check(value: int, unique: bool = False, place: str = "process 1") -> None:
        alike.check(cache, ("none host:29500", unique), "s", {"data.resolution": value}, place)

    check(1, place="process 0")
    with pytest.raises(UserError):
        check(2)
    check(2, place="process 0")
    [document] = (tmp_path / "cache" / "claims").iterdir()
    os.utime(document, (0, 0))
    with pytest.raises(UserError):
        check(4, unique=True)
    check(4)
    check(4, unique=True, place="process 0")
    check(5, unique=True)  # the next command of the process that was first
