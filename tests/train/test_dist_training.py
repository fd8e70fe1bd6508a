"""Several processes against one: parity, resuming across numbers of processes, one verdict for all, signals.

One launch of torchrun runs all the checks (`tests/support/workers/two_processes.py`); the tests
below judge its results.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from sana_pipe.base.processes import DEFECT
from sana_pipe.train.training import checkpoint, metrics
from tests.support.checkpoints import load_model_state
from tests.support.forked import ranks, succeed
from tests.support.launched import ended_with_the_test, found, torchrun, until_begun
from tests.support.workers import failing_run, tiny_run

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("two")
    process = torchrun("tests.support.workers.two_processes", folder)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    return found(folder)


def test_the_launch_is_recognised(results: dict[str, Any]) -> None:
    assert results["launch"] == {"kind": "torchrun", "size": 2, "backend": "gloo"}


def test_the_model_is_really_sharded(results: dict[str, Any]) -> None:
    sharded = results["wrapped"]
    assert sharded["wrapped"] == sharded["blocks"] + 1
    assert sharded["share"] == pytest.approx(0.5, abs=0.02)


def test_gradients_are_reduced_with_the_last_microbatch_or_with_each(results: dict[str, Any]) -> None:
    assert results["wrapped"]["microbatches"] == 4
    units = results["wrapped"]["blocks"] + 1
    assert results["wrapped"]["reductions"] == {"False": units, "True": 4 * units}


EACH = "microbatch 1, each reduced"


@pytest.mark.parametrize(
    "split", ["microbatch 4", "microbatch 3 (3 + 1)", "microbatch 1, recomputed", "no reshard", EACH]
)
def test_fp32_first_step(results: dict[str, Any], split: str) -> None:
    assert results["fp32"]["gradient"][split] <= 2e-6
    assert results["fp32"]["loss"][split] <= 2e-6
    assert results["fp32"]["norm"][split] <= 2e-6


@pytest.mark.parametrize("split", ["microbatch 4", "microbatch 3 (3 + 1)", EACH])
def test_fp32_twenty_steps(results: dict[str, Any], split: str) -> None:
    assert results["fp32"]["losses"][split] <= 1e-5


def test_bf16_two_processes_are_one(results: dict[str, Any]) -> None:
    assert results["bf16"]["gradient of two from one"] <= 1e-5
    assert results["bf16"]["losses"] <= 1e-4


def test_bf16_is_the_bf16_model(results: dict[str, Any]) -> None:
    assert results["bf16"]["one from plain"] <= 3e-4
    assert results["bf16"]["two from plain"] <= 3e-4


def test_a_timestep_in_bf16_would_be_noticed(results: dict[str, Any]) -> None:
    """The same comparison with FSDP2's default, which casts every input of the root."""
    assert results["bf16"]["sabotaged two from plain"] > 1e-3
    assert results["bf16"]["sabotaged gradient from fp32"] > results["bf16"]["gradient from fp32"]


def test_gradients_of_replicas_are_reduced_in_place(results: dict[str, Any]) -> None:
    """Bit for bit those that are copied. Edit: an `_InPlace` that halves its buffer."""
    every = {"4": True, "1": True}
    assert results["replicas"] == {"losses": every, "gradient": every}


def test_a_bad_number_on_one_process_stops_all_in_the_same_words(results: dict[str, Any]) -> None:
    first, second = results["bad_number"]["said"]
    assert first == second
    assert "NonFiniteError: step 2" in first
    assert "48x80" in first
    assert f"such a loss: {1006:016x}\n" in first


def test_processes_that_start_from_other_weights_are_refused(results: dict[str, Any]) -> None:
    first, second = results["other_weights"]["said"]
    assert first == second
    assert "different weights" in first
    assert "process 1" in first


def test_processes_with_other_options_are_refused(results: dict[str, Any]) -> None:
    first, second = results["other_options"]["said"]
    assert first == second
    assert "process 1: {'train.steps': 2}; process 0: {'train.steps': 3}" in first


def test_resumed_on_the_same_number_of_processes_is_bitwise_equal(results: dict[str, Any]) -> None:
    assert results["resumed"]["bitwise"]["same"]
    assert results["resumed"]["losses"]["same"] == 0


@pytest.mark.parametrize("chain", ["one, then two", "two, then one", "one"])
def test_resumed_on_another_number_of_processes(results: dict[str, Any], chain: str) -> None:
    assert results["resumed"]["losses"][chain] <= 1e-5
    assert results["resumed"]["weights"][chain] <= 1e-5


def test_a_run_resumed_at_the_wrong_step_would_be_noticed(results: dict[str, Any]) -> None:
    assert results["resumed"]["losses"]["shifted"] > 1e-3
    assert results["resumed"]["weights"]["shifted"] > 1e-4


def test_a_mistake_is_printed_once(tmp_path: Path) -> None:
    output, _ = torchrun("sana_pipe.cli", "train", "--config", "tiny", "--set", "train.stepps=3").communicate(
        timeout=90
    )
    assert output.count("did you mean 'train.steps'?") == 1


@pytest.mark.parametrize(("kind", "code"), [("user", 2), ("defect", DEFECT)])
def test_an_error_of_one_process_is_printed_once_and_ends_the_others_soon(tmp_path: Path, kind: str, code: int) -> None:
    """Without a launcher that would end them."""
    processes = ranks(3, str(tmp_path / "run"), kind, worker="failing_run")
    processes[2].wait(120)
    failed = time.monotonic()
    for process in processes[:2]:
        process.wait(60)
    assert time.monotonic() - failed < 30
    errors = [process.output() for process in processes]
    assert [process.poll() for process in processes] == [1, 1, code], errors
    assert [text.count(failing_run.MESSAGE) for text in errors] == [0, 0, 1], errors
    assert ("Traceback" in errors[2]) == (kind == "defect")


def test_two_processes_on_a_real_cache(small_cache_copy: Path, make_config: Any, tmp_path: Path) -> None:
    """The command line in a launch, the cache's own loader, against one process."""
    runs, padded = {}, {}
    pipeline = ["train.parallel.pp_size=2", "train.microbatch=2"]
    runs_of = ("one", 1, []), ("FSDP2", 2, []), ("pipeline", 2, pipeline), ("packed", 2, ["train.text=packed"])
    for name, processes, more in runs_of:
        sets = [
            f"cache={small_cache_copy}",
            f"train.output={tmp_path / name}",
            "train.steps=3",
            "train.log_every=1",
            "train.precision=fp32",
            "train.device=cpu",
            "train.optim.warmup_steps=0",
            *more,
        ]
        options = [word for text in sets for word in ("--set", text)]
        succeed(ranks(processes, "train", "--config", "tiny", *options), timeout=200)
        journal = metrics.read(tmp_path / name / "metrics.jsonl")
        runs[name] = [row["loss"] for row in journal]
        padded[name] = [row["padded_tokens"] for row in journal]
        assert all(row["rss_rank"] < processes and row["rss_gib"] > 0.1 for row in journal)
    assert len(runs["one"]) == 3
    assert runs["FSDP2"] == pytest.approx(runs["one"], abs=1e-5)
    assert runs["pipeline"] == pytest.approx(runs["one"], abs=1e-5)
    assert padded["pipeline"] == padded["FSDP2"] == padded["one"] != [0, 0, 0]


@pytest.mark.parametrize("whom", ["one worker", "the launcher"])
def test_a_signal_saves_on_all_processes(tmp_path: Path, whom: str) -> None:
    """SIGUSR1 to a process that is not the first, or SIGTERM to torchrun, which passes it on: all processes end after
    the same step, and the checkpoint of that step is whole."""
    run = tmp_path / "run"
    process = torchrun("tests.support.workers.slow_run", run)
    rows = run / "metrics.jsonl"
    with ended_with_the_test(process):
        until_begun(process, lambda: rows.exists() and metrics.read(rows))
        if whom == "one worker":
            os.kill(int((tmp_path / "rank-1.pid").read_text()), signal.SIGUSR1)
        else:
            process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=180)
    if whom == "one worker":
        assert process.returncode == 0, output
        assert "stopped by SIGUSR1" in output
    newest = checkpoint.newest(run / "checkpoints")
    assert newest is not None, output
    document = checkpoint.read_document(newest)
    assert 0 < document.state.step < tiny_run.config().train.steps * 1000
    assert document.state.step == metrics.read(run / "metrics.jsonl")[-1]["step"]
    load_model_state(newest)
    assert not checkpoint.leftovers(run / "checkpoints")
