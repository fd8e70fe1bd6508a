"""When a process cannot have its data, or too little of it is its own, the run saves and ends, on every process."""

from __future__ import annotations

import json
import os
import shlex
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import sana_pipe.stages.train
from sana_pipe import cli
from sana_pipe.base import retrying
from sana_pipe.base.errors import AwayError, RejectRateError
from sana_pipe.base.launch import Launch
from sana_pipe.config import load
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.train.parallel import mesh
from sana_pipe.train.training import checkpoint, feeding, metrics
from sana_pipe.train.training.trainer import fit
from tests.support.damage import flip
from tests.support.launched import ended_with_the_test, run_worker, torchrun, until_begun
from tests.support.workers import tiny_run


def fitted(run: Path, touch: Any = None, resume: str | None = None, **train: Any) -> list[str]:
    printed: list[str] = []
    settings = tiny_run.config(run, **{"steps": 6, **train})
    fit(settings.train, tiny_run.task(settings, touch=touch), Launch(), resume=resume, log=printed.append)
    return printed


@pytest.mark.parametrize("every", [1000, 3], ids=["between saves", "just saved"])
def test_no_step_is_lost_when_patience_ends(tmp_path: Path, every: int) -> None:
    """Bit for bit the run that nothing disturbed."""

    def gone(step: int) -> None:
        if step == 3:
            raise AwayError("s3://bucket: no answer", fix="wait")

    with pytest.raises(AwayError, match="no answer"):
        fitted(tmp_path / "run", gone, save_every=every)
    assert checkpoint.newest(tmp_path / "run/checkpoints") == checkpoint.folder_of(tmp_path / "run/checkpoints", 3)
    fitted(tmp_path / "run", resume="auto")
    fitted(tmp_path / "whole")
    resumed, whole = (metrics.read(tmp_path / name / "metrics.jsonl") for name in ("run", "whole"))
    assert [row["loss"] for row in resumed] == [row["loss"] for row in whole] and len(whole) == 6


def test_before_the_first_step_there_is_nothing_to_save(tmp_path: Path) -> None:
    def gone(step: int) -> None:
        raise AwayError("s3://bucket: no answer")

    with pytest.raises(AwayError):
        fitted(tmp_path / "run", gone)
    assert checkpoint.newest(tmp_path / "run/checkpoints") is None


@pytest.mark.parametrize("at", [0, 3])
def test_a_signal_while_a_store_is_waited_for_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    monkeypatch.setattr(retrying, "PAUSE_S", 0.05)
    monkeypatch.setattr(retrying, "FIRST_S", 60.0)

    def waits(step: int) -> None:
        if step == at:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
            retrying.retry(lambda: (_ for _ in ()).throw(ConnectionError("away")), "s3://away", 60.0)

    began = time.monotonic()
    printed = fitted(tmp_path / "run", waits)
    assert time.monotonic() - began < 30
    assert any(line.startswith(f"stopped by SIGTERM after step {at}") for line in printed)
    newest = checkpoint.newest(tmp_path / "run/checkpoints")
    assert (newest is None) if at == 0 else newest == checkpoint.folder_of(tmp_path / "run/checkpoints", at)


def test_a_run_whose_launcher_has_ended_saves_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = [os.getppid()]
    monkeypatch.setattr(os, "getppid", lambda: parent[0])

    def killed(step: int) -> None:
        if step == 2:
            parent[0] = 1

    for kind, end in (("torchrun", 3), ("single", 6)):  # without a launcher the shell may go: nohup
        parent[0] = 4711
        settings = tiny_run.config(tmp_path / kind, steps=6)
        printed: list[str] = []
        report = fit(settings.train, tiny_run.task(settings, touch=killed), Launch(kind=kind), log=printed.append)  # type: ignore[arg-type]
        assert report.step == end
        assert checkpoint.newest(tmp_path / kind / "checkpoints") is not None
        assert any("stopped by the end of the launcher" in line for line in printed) == (kind == "torchrun")


# ----------------------------------------------------------------------------------------------------- quarantine


def rotten(cache: Path) -> None:
    """All latents but one of each bucket of a snapshot are damaged."""
    snapshot = Cache(cache).open_snapshot()
    shortest = {}
    for row in range(len(snapshot)):  # the one that fits wherever another was
        sample = snapshot.sample(row)
        place = sample.pictures["latent"]
        rows = max(caption.rows for caption in sample.captions)
        shortest[sample.bucket] = min(shortest.get(sample.bucket, (rows, row)), (rows, row))
    for row in {*range(len(snapshot))} - {row for _, row in shortest.values()}:
        sample = snapshot.sample(row)
        place = sample.pictures["latent"]
        path = cache / f"shards/{snapshot.encoding(LatentEncoding).name}/{place.shard[:2]}/{place.shard}.tar"
        flip(path, place.offset)


def test_a_run_on_a_few_samples_ends(
    small_cache_copy: Path, make_config: Any, tmp_path: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotten(small_cache_copy)
    config = make_config(
        tmp_path,
        f"cache={small_cache_copy}",
        "train.steps=10",
        "train.log_every=1",
        "train.save_every=1000",
    )
    printed: list[str] = []
    with pytest.raises(RejectRateError, match=r"\d+ of the last \d+ samples") as caught:
        sana_pipe.stages.train.run(config, quarantine=tmp_path / "q.jsonl", log=printed.append)
    assert caught.value.exit_code == 5 and "5.0%" in str(caught.value)
    rows = metrics.read(Path(config.train.output) / "metrics.jsonl")
    assert 1 <= len(rows) < 10
    assert rows[-1]["quarantine_rate"] == pytest.approx(rows[-1]["quarantined"] / (12 * len(rows)))
    assert checkpoint.newest(Path(config.train.output) / "checkpoints") is not None
    _, *mend = shlex.split(str(caught.value.fix))
    assert mend[:2] == ["verify", "--repair"]
    given = cli.cli.commands["verify"].make_context("verify", mend[1:]).params
    assert given["repair"] and load(given["config_path"]).cache == str(small_cache_copy)
    assert [line for line in printed if line.startswith("warning:") and "5.0%" in line]
    monkeypatch.setattr(feeding, "MOST", 1.0)
    config = config.with_train(output=str(tmp_path / "b"))
    assert sana_pipe.stages.train.run(config, quarantine=tmp_path / "q.jsonl", log=printed.append).step == 10


def counted(bad: list[int], batch: int, rate: float, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int | None]:
    """(step of the warning, step that ends the run or None) for the stand-ins of each step."""
    printed: list[str] = []
    monkeypatch.setattr(feeding, "MOST", rate)
    monkeypatch.setattr(feeding.dist, "get_world_size", lambda: 1)
    feed = feeding.Feed(iter(()), lambda: 0, Path("unused"), 1.0, printed.append)
    total, warned = 0, 0
    for step, new in enumerate(bad, start=1):
        total += new
        fine = feed.within_limit(batch, total)
        warned = warned or step * bool(printed)
        if not fine:
            return warned, step
    return warned, None


def test_the_ceiling_looks_at_the_last_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    assert counted([0, 1, 0, 0], 4, 0.05, monkeypatch) == (0, None)  # one bad sample is no catastrophe
    assert counted([4] * 9, 4, 0.05, monkeypatch) == (1, 3)
    assert counted([2], 4, 0.05, monkeypatch) == (0, None)  # a fifth of the limit, and the limit, are allowed
    assert counted([2, 8], 4, 0.05, monkeypatch) == (2, None)
    assert counted([0] * 2000 + [64] * 20, 64, 0.05, monkeypatch)[1] == 2008  # however long it went well
    assert counted([3] * 2000, 64, 0.05, monkeypatch) == (1, None)  # 4.7 %
    warned, ended = counted([1] * 2000, 64, 0.05, monkeypatch)
    assert warned and ended is None, "a warning comes long before"
    assert counted([2, 0] * 500, 500, 0.05, monkeypatch) == (0, None)


def test_the_share_is_that_of_the_window_and_the_limit_itself_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(feeding, "MOST", 0.1)
    feed = feeding.Feed(iter(()), lambda: 0, Path("unused"), 1.0, print)
    assert feed.within_limit(feeding.WINDOW // 2, feeding.WINDOW // 20) and feed.share == 0.1
    feed.raise_failure()
    assert all(feed.within_limit(feeding.WINDOW // 2, feeding.WINDOW // 20) for _ in range(2)) and feed.share == 0


# ------------------------------------------------------------------------------------------------------ processes


def test_a_process_is_waited_for_as_long_as_it_may_wait_for_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(feeding.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(feeding.dist, "new_group", lambda **options: made.append(options))
    feeding.Feed(iter(()), lambda: 0, Path("unused"), 40.0, print)
    assert made == [{"backend": "gloo", "timeout": timedelta(seconds=380)}]


def test_processes_wait_for_each_other_by_the_patience_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(mesh, "wait", lambda patience_s: asked.append(patience_s) or timedelta(seconds=60))
    config = tiny_run.config(tmp_path / "run", steps=1, layers=1).model_copy(update={"patience_s": 40.0})
    fit(config.train, tiny_run.task(config), Launch(), log=lambda line: None)
    assert asked == [40.0]


@pytest.mark.dist
def test_what_one_process_cannot_have_ends_all_of_them_alike(tmp_path: Path) -> None:
    run_worker("starved_run", tmp_path, processes=2, timeout_s=200)
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    for run, kind, code in (("away", "AwayError", 75), ("rotten", "RejectRateError", 5)):
        assert (first[run]["error"], first[run]["kind"]) == (second[run]["error"], second[run]["kind"])
        assert first[run]["kind"] == kind and first[run]["code"] == code
    assert checkpoint.newest(tmp_path / "away/checkpoints") == checkpoint.folder_of(tmp_path / "away/checkpoints", 3)
    # 4 of 8 samples stand in from step 4 on; more than 10 % of 200 are reached with the sixth such step
    assert checkpoint.newest(tmp_path / "rotten/checkpoints") == checkpoint.folder_of(
        tmp_path / "rotten/checkpoints", 8
    )


@pytest.mark.dist
def test_workers_of_a_killed_launcher_save_and_end(tmp_path: Path) -> None:
    process = torchrun("tests.support.workers.slow_run", tmp_path / "run")
    rows = tmp_path / "run/metrics.jsonl"
    with ended_with_the_test(process):
        until_begun(process, lambda: rows.exists() and metrics.read(rows))
        pids = [int((tmp_path / f"rank-{rank}.pid").read_text()) for rank in (0, 1)]
        process.kill()
        try:
            deadline = time.monotonic() + 60
            while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()], "they train on"
        finally:
            for pid in pids:
                if Path(f"/proc/{pid}").exists():
                    os.kill(pid, signal.SIGKILL)
            output, _ = process.communicate()
    assert "stopped by the end of the launcher" in output
    assert checkpoint.newest(tmp_path / "run/checkpoints") is not None, output
