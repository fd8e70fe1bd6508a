"""The recipes under configs/launch: their commands are understood by the launchers they name, and the batch scripts do
what their comments say when SLURM sends its signal. Nothing is started but stand-ins for SLURM's commands."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from sana_pipe.base.launch import check_accelerate
from tests.support.workers import tiny_run

RECIPES = tiny_run.ROOT / "configs" / "launch"


def commands(program: str) -> list[tuple[str, list[str]]]:
    """(recipe, words after the program) of every call of a launcher."""
    calls = []
    for path in sorted(RECIPES.iterdir()):
        lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
        for line in "\n".join(lines).replace("\\\n", " ").splitlines():
            words = shlex.split(line.rstrip(" &"), comments=True)
            if program in words and words[0] in {program, "srun"}:
                calls.append((path.name, words[words.index(program) + 1 :]))
    return calls


TORCHRUN, ACCELERATE = commands("torchrun"), commands("accelerate")


@pytest.mark.parametrize(("recipe", "words"), TORCHRUN)
def test_torchrun_understands_its_recipes(recipe: str, words: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    numbers = {"$NODE": "1", "1:$SLURM_JOB_NUM_NODES": "1:4"}
    parsed = get_args_parser().parse_args([numbers.get(word, word) for word in words])
    assert parsed.no_python
    assert parsed.training_script == "sana-pipe"
    elastic = parsed.max_restarts > 0
    if elastic:
        assert parsed.standalone or parsed.rdzv_backend == "c10d"
        assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in (RECIPES / recipe).read_text()
    assert elastic or parsed.nnodes in ("1:1", "2")


@pytest.mark.parametrize(("recipe", "words"), ACCELERATE)
def test_accelerate_understands_its_recipes(recipe: str, words: list[str]) -> None:
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    assert words[0] == "launch"
    parsed = launch_command_parser().parse_args([{"$NODE": "1"}.get(word, word) for word in words[1:]])
    assert parsed.no_python
    assert parsed.training_script == "sana-pipe"
    assert parsed.multi_gpu, "otherwise accelerate starts one process"
    parsed.main_process_port = 0 if parsed.num_machines == 1 else 29500  # it asks whether the port is free
    environ = prepare_multi_gpu_env(parsed)
    if "train" in parsed.training_script_args:
        train = tiny_run.config(precision="bf16", activation_checkpointing="full").train
        new = {name: value for name, value in environ.items() if name not in os.environ}
        given = {"precision": train.precision, "compiled": train.compile, "chosen": train.device}
        check_accelerate(torch.device("cuda"), **given, environ=new)


def test_the_recipes_are_read() -> None:
    assert {name for name, _ in TORCHRUN} == {"torchrun.sh", "slurm_torchrun_elastic.sbatch"}
    assert len(TORCHRUN) == 7
    assert len(ACCELERATE) == 4


STAND_INS = {
    # A function, so that nothing is left to parse when the signal comes: bash can then lose its place in a `$(...)`.
    "srun": """#!/bin/bash
main() {
    echo "srun $*" >> "$LOG"
    trap 'echo signalled >> "$LOG"; exit "${ON_SIGNAL:-0}"' USR1
    echo ready >> "$LOG"
    [ -n "$LASTS" ] && for ((n = 0; n < 400; n++)); do sleep 0.05; done
    exit "${CODE:-0}"
}
main "$@"
""",
    "sana-pipe": """#!/bin/bash
exit "${ON_STATUS:-0}"
""",
    "scontrol": """#!/bin/bash
[ "$1" = show ] && { echo node7; echo node8; exit; }
echo "scontrol $*" >> "$LOG"
""",
}


def start_batch_script(tmp_path: Path, script: Path, variables: dict[str, str]) -> tuple[subprocess.Popen[str], Path]:
    """The running script, and the log that the stand-ins write."""
    for program, text in STAND_INS.items():
        path = tmp_path / program
        path.write_text(text)
        path.chmod(0o755)
    log = tmp_path / "log"
    environ = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "LOG": str(log),
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_ARRAY_JOB_ID": "77",
        "SLURM_ARRAY_TASK_ID": "3",
        **variables,
    }
    return subprocess.Popen(["bash", str(script)], env=environ, stdout=subprocess.PIPE, text=True), log


@pytest.mark.parametrize("name", ["slurm_train.sbatch", "slurm_torchrun_elastic.sbatch"])
@pytest.mark.parametrize(
    ("variables", "signalled", "code", "requeued"),
    [
        ({"LASTS": "1"}, True, 0, True),  # the time limit is near: saved, then back into the queue
        ({}, False, 0, False),  # train.steps are done
        ({"CODE": "7"}, False, 7, False),  # an error: a person has to look
    ],
)
def test_batch_scripts_requeue_after_the_signal_only(
    tmp_path: Path, name: str, variables: dict[str, str], signalled: bool, code: int, requeued: bool
) -> None:
    script, log = start_batch_script(tmp_path, RECIPES / name, variables)
    deadline = time.monotonic() + 30
    while not (log.exists() and "ready" in log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if signalled:
        script.send_signal(signal.SIGUSR1)
    script.communicate(timeout=30)
    lines = log.read_text()
    assert script.returncode == code, lines
    assert ("signalled" in lines) == signalled
    assert ("scontrol requeue 77" in lines) == requeued
    assert "sana-pipe train" in lines
    if "torchrun" in name:
        assert re.search(r"--nnodes 1:2 .*--rdzv-endpoint node7:29500 --rdzv-id 77", lines)


@pytest.mark.parametrize("where", ["before the child", "between", "as the child starts", "twice"])
@pytest.mark.parametrize("name", ["slurm_train.sbatch", "slurm_torchrun_elastic.sbatch", "slurm_encode_array.sbatch"])
def test_an_early_signal_reaches_the_child(tmp_path: Path, name: str, where: str) -> None:
    """The script itself sends the signal, at the instant that is tried."""
    text = (RECIPES / name).read_text()
    assert text.count("\nsrun ") == 1 and text.count(" &\nchild=$!\n") == 1
    if where == "before the child":
        text = text.replace(" USR1 TERM\n", " USR1 TERM\nkill -USR1 $$\n")
    elif where == "between":
        text = text.replace("\nsrun ", "\nkill -USR1 $$\nsrun ")
    else:
        wait = "until grep -q ready $LOG; do :; done 2>/dev/null; "
        text = text.replace(" &\nchild=$!\n", f" &\n{wait}kill -USR1 $$\nchild=$!\n")
        if where == "twice":
            text = text.replace("child=$!\n", "child=$!\nkill -USR1 $$\n", 1)
    (tmp_path / "job.sbatch").write_text(text)
    script, log = start_batch_script(tmp_path, tmp_path / "job.sbatch", {"LASTS": "1", "ON_STATUS": "1"})
    script.communicate(timeout=30)
    assert script.returncode == 0, log.read_text()
    assert "scontrol requeue 77" in log.read_text()
    if where == "between":  # the signal may have ended the child before it could say so
        assert "signalled" in log.read_text() or "ready" not in log.read_text()
    else:
        assert ("signalled" in log.read_text()) == (where != "before the child")
        assert ("srun" in log.read_text()) == (where != "before the child")


def test_a_run_that_failed_at_the_signal_is_not_requeued(tmp_path: Path) -> None:
    """sana-pipe under srun says by its exit code whether it saved; torchrun does not."""
    test_batch_scripts_requeue_after_the_signal_only(
        tmp_path, "slurm_train.sbatch", {"LASTS": "1", "ON_SIGNAL": "6"}, True, 6, False
    )


@pytest.mark.parametrize(
    "recipe", ["torchrun.sh", "accelerate.sh", "slurm_train.sbatch", "slurm_torchrun_elastic.sbatch"]
)
def test_recipes_of_training_let_the_allocator_grow_its_blocks(recipe: str) -> None:
    (line,) = (line for line in (RECIPES / recipe).read_text().splitlines() if "PYTORCH_ALLOC_CONF=" in line)
    for given, expected in (
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "a:1"}, "a:1"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "b:2"}, ""),
    ):
        script = f'set -e\n{line}\necho "${{PYTORCH_ALLOC_CONF:-}}"'
        said = subprocess.run(["bash", "-c", script], env=given, capture_output=True, text=True, check=True).stdout
        assert said.strip() == expected
