"""Runs under torchrun that lose processes, and nodes, at any moment: the end is that of a run that lost none."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sana_pipe.train.training import checkpoint, metrics
from tests.support.checkpoints import load_model_state
from tests.support.constants import set_constants
from tests.support.launched import children
from tests.support.workers import tiny_run
from tests.support.workers.mortal_run import STEPS

pytestmark = [pytest.mark.fault, pytest.mark.timeout(600)]
LAST = f"checkpoints/step-{STEPS:08d}"
ALONE = ("--standalone", "--nproc-per-node", "2")


def torchrun(
    folder: Path,
    *options: str,
    deaths: list[list[float]] | None = None,
    name: str = "log",
    **variables: str,
) -> subprocess.Popen[bytes]:
    """Start torchrun on `mortal_run` in `folder`; what it prints is in `folder`/name."""
    command = [sys.executable, "-m", "torch.distributed.run", "--monitor-interval", "0.1", *options]
    command += ["-m", "tests.support.workers.mortal_run", str(folder / "run"), json.dumps(deaths or [])]
    environ = {**tiny_run.environ(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **variables}
    with (folder / name).open("w") as log:
        return subprocess.Popen(
            command, env=environ, cwd=tiny_run.ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


def ended(process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for success; nothing is left running."""
    try:
        assert process.wait(300) == 0, log.read_text()
    finally:
        if process.poll() is None:
            for pid in (process.pid, *children(process.pid)):
                os.kill(pid, signal.SIGKILL)


def starts(folder: Path) -> list[tuple[int, int]]:
    """(step, processes) that each attempt began with."""
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["processes"]) for row in rows if row.get("event") == "start"]


def losses(folder: Path) -> list[float]:
    rows = metrics.read(folder / "run/metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return [row["loss"] for row in rows]


def tensors(folder: Path) -> dict[str, Any]:
    files = checkpoint.read_document(folder / "run" / LAST).files
    return {name: value for name, value in files.items() if name != ".metadata"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    ended(torchrun(folder, *ALONE), folder / "log")
    return folder


def test_a_killed_process_is_restarted_and_nothing_else_changes(
    fault_seed: int, undisturbed: Path, tmp_path: Path
) -> None:
    """SIGKILL at a random instant of a random step; bitwise the same weights and moments."""
    chance = random.Random(fault_seed)
    death = [chance.randrange(STEPS), chance.randrange(2), chance.choice([0, chance.uniform(0.0, 0.4)])]
    process = torchrun(tmp_path, *ALONE, "--max-restarts", "1", deaths=[death])
    ended(process, tmp_path / "log")
    log = (tmp_path / "log").read_text()
    if "exitcode: -9" in log:  # a death timed near the end may come too late
        assert len(starts(tmp_path)) == 2 or death[0] == 0, log
    assert losses(tmp_path) == losses(undisturbed)
    assert tensors(tmp_path) == tensors(undisturbed)
    assert not checkpoint.leftovers(tmp_path / "run/checkpoints")


def test_a_process_that_hangs_ends_the_others_and_all_are_restarted(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_constants(monkeypatch, {"sana_pipe.train.parallel.mesh.WAIT_S": 14})
    began = time.monotonic()
    process = torchrun(
        tmp_path,
        *ALONE,
        "--max-restarts",
        "1",
        deaths=[[5, 1, -1]],
        TORCH_ELASTIC_SHUTDOWN_TIMEOUT="1",
    )
    ended(process, tmp_path / "log")
    assert time.monotonic() - began > 15
    assert [step for step, _ in starts(tmp_path)] == [0, 4]
    assert tensors(tmp_path) == tensors(undisturbed)


def test_the_signal_before_a_time_limit_passes_through_torchrun(undisturbed: Path, tmp_path: Path) -> None:
    """SIGUSR1 to torchrun, as the SLURM recipe has it: both save after the same step; the next start ends the run."""
    signals = ("--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
    process = torchrun(tmp_path, *ALONE, *signals)
    rows, deadline = tmp_path / "run/metrics.jsonl", time.monotonic() + 300
    while not rows.exists() or len(metrics.read(rows)) < 3:
        assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.005)
    process.send_signal(signal.SIGUSR1)
    process.wait(300)
    log = (tmp_path / "log").read_text()
    assert "stopped by SIGUSR1 after step" in log
    newest = checkpoint.newest(tmp_path / "run/checkpoints")
    assert newest is not None
    step = checkpoint.read_document(newest).state.step
    assert step == metrics.read(rows)[-1]["step"] < STEPS
    assert not checkpoint.leftovers(tmp_path / "run/checkpoints")
    ended(torchrun(tmp_path, *ALONE), tmp_path / "log")
    assert [first for first, _ in starts(tmp_path)] == [0, step]
    assert tensors(tmp_path) == tensors(undisturbed)


def test_of_two_nodes_one_is_lost_and_the_other_goes_on(undisturbed: Path, tmp_path: Path) -> None:
    """Two agents with one process each; the second, with its process, is killed after some steps."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    conf = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=2,join_timeout=120"
    options = [
        "--nnodes",
        "1:2",
        "--nproc-per-node",
        "1",
        "--max-restarts",
        "3",
        "--rdzv-backend",
        "c10d",
        "--rdzv-id",
        "x",
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
    ]
    first = torchrun(tmp_path, *options, "--rdzv-conf", conf + ",is_host=1", name="first")
    second = torchrun(tmp_path, *options, "--rdzv-conf", conf + ",is_host=0", name="second")
    deadline = time.monotonic() + 200
    rows, saved = tmp_path / "run/metrics.jsonl", tmp_path / "run/checkpoints"  # saved in the background
    while not rows.exists() or len(metrics.read(rows)) < 4 or checkpoint.newest(saved) is None:
        assert first.poll() is None, (tmp_path / "first").read_text()
        assert time.monotonic() < deadline, (tmp_path / "first").read_text() + (tmp_path / "second").read_text()
        time.sleep(0.01)
    for lost in (second.pid, *children(second.pid)):  # in this order: an agent that lives would start another one
        os.kill(lost, signal.SIGKILL)
    second.wait()
    ended(first, tmp_path / "first")
    (zero, two), (step, one) = starts(tmp_path)
    assert (zero, two, one) == (0, 2, 1)
    assert step >= 2
    assert losses(tmp_path) == pytest.approx(losses(undisturbed), abs=1e-5)
    actual, expected = (load_model_state(where / "run" / LAST)[1] for where in (tmp_path, undisturbed))
    assert tiny_run.distance(actual, expected) <= 1e-5
