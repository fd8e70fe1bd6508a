"""Starting workers (`tests/support/workers`) in processes of their own, and reading what they note."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.support.forked import Forked, ranks, succeed
from tests.support.waiting import until
from tests.support.workers import tiny_run

ROOT = tiny_run.ROOT
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def torchrun(module: str, *arguments: object, processes: int = 2) -> subprocess.Popen[str]:
    """Start `module` under torchrun; its two outputs are in one pipe."""
    command = [sys.executable, *TORCHRUN, str(processes), "-m", module, *map(str, arguments)]
    return subprocess.Popen(
        command, env=tiny_run.environ(), cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


@contextmanager
def ended_with_the_test(process: subprocess.Popen[str]) -> Iterator[None]:
    """A test that fails leaves no training behind, which the tests after it would share the cores with. Workers end
    when their launcher does."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def until_begun(process: subprocess.Popen[str], begun: Callable[[], object], limit_s: float = 300.0) -> None:
    """Wait until a launch has begun: on a busy machine its imports take minutes."""
    until(lambda: bool(begun()) or process.poll() is not None, limit_s)
    assert process.poll() is None, process.communicate()[0]


def run_worker(name: str, *arguments: object, processes: int = 0, timeout_s: float) -> None:
    """Run a worker to its end, which must be a success: alone, or a launch of `processes`."""
    words = [str(argument) for argument in arguments]
    if processes:
        succeed(ranks(processes, *words, worker=name), timeout_s)
    else:
        succeed([Forked(*words, worker=name, environ={"GLOO_SOCKET_IFNAME": "lo"})], timeout_s)


def found(folder: Path) -> Any:
    """What a worker noted in `folder`."""
    return json.loads((folder / "found.json").read_text())


def found_by_size(folder: Path, sizes: Iterable[int]) -> dict[int, dict[str, Any]]:
    """What the launches of a worker noted in `folder`, by the number of their processes."""
    return {size: json.loads((folder / f"found-{size}.json").read_text()) for size in sizes}


def results_by_case(worker: ModuleType, folder: Path, *, anew: bool = False) -> dict[str, Any]:
    """Run a worker that calls `strategies.alone_and_together`, and return what it noted, by case.

    Args:
        anew: in a new interpreter, for a worker that looks at what is imported.
    """
    if anew:
        command = [sys.executable, "-m", worker.__name__, str(folder)]
        done = subprocess.run(
            command, cwd=ROOT, env=tiny_run.environ(), capture_output=True, text=True, timeout=500, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    else:
        run_worker(worker.__name__.rpartition(".")[2], folder, timeout_s=500)
    return {name: row for rows in found_by_size(folder, worker.CASES).values() for name, row in rows.items()}


def children(pid: int) -> list[int]:
    """The processes that a process has started (workers of torchrun are in sessions of their own)."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
