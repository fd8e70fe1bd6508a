"""`sana-pipe` commands and workers in real processes, forked from one that has imported the packages already.

Each has a process number, an environment, streams and signals of its own. Only the start of the interpreter differs
from that of a command: tests of the start use `subprocess`.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path

from sana_pipe import cli
from sana_pipe.base import processes
from tests.support import constants

_SERVER = multiprocessing.get_context("forkserver")


class Forked:
    """A process, with methods of `subprocess.Popen`.

    Args:
        arguments: of `sana-pipe`, or of `worker`.
        worker: a module of `tests.support.workers` with a function `main`, which reads `sys.argv`.
        environ: changes of the environment.
        before: is called first in the process.
        log: a file for what it prints. Without one, `output` tells.
    """

    def __init__(
        self,
        *arguments: str,
        worker: str | None = None,
        environ: Mapping[str, str] | None = None,
        before: Callable[[], None] | None = None,
        log: Path | None = None,
    ):
        forkserver.set_forkserver_preload(["tests.support.workers.everything"])
        self._printed = tempfile.TemporaryFile() if log is None else log.open("w+b")  # noqa: SIM115
        stream = f"/proc/{os.getpid()}/fd/{self._printed.fileno()}"
        environ = {**os.environ, **(environ or {})}
        self._process = _SERVER.Process(target=_run, args=(arguments, worker, environ, before, stream))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0)
        return self._process.exitcode

    def output(self, timeout: float | None = None) -> str:
        """What it printed, errors included, at its end."""
        self.wait(timeout)
        return self._said()

    def says(self, pattern: str, times: int = 1) -> bool:
        """Wait until so many lines that match have been printed; False if the process ends first."""
        lines = re.compile(pattern, re.MULTILINE)
        while self.poll() is None and len(lines.findall(self._said())) < times:
            time.sleep(0.01)
        return len(lines.findall(self._said())) >= times

    def _said(self) -> str:
        return os.pread(self._printed.fileno(), os.fstat(self._printed.fileno()).st_size, 0).decode()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@atexit.register
def _end() -> None:
    """What a test that failed has left, also if it is stopped: Python would wait for it."""
    for process in multiprocessing.active_children():
        process.kill()


def ranks(processes: int, *arguments: str, worker: str | None = None) -> list[Forked]:
    """A launch of several processes on this machine, with the variables that torchrun sets."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    size = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    meeting = {**size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    own = [{**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    return [Forked(*arguments, worker=worker, environ=environ) for environ in own]


def succeed(started: Iterable[Forked], timeout: float) -> None:
    """Wait until all have ended, which must be a success."""
    started, end = list(started), time.monotonic() + timeout
    try:
        codes = [process.wait(max(0.0, end - time.monotonic())) for process in started]
    finally:
        for process in started:
            process.kill()
    assert not any(codes), "\n".join(process.output() for process in started)


def lose_permissions() -> None:
    """Let permission bits bind this process and its children, also if it is root's."""
    if os.geteuid() == 0:
        libc, header, sets = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        libc.capget(header, sets)
        for kind in range(3):  # effective, permitted, inheritable: CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
            sets[kind] &= ~0b110
        for capability in (1, 2):
            libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP, for programs that are started
        libc.capset(header, sets)


def _run(
    arguments: tuple[str, ...],
    worker: str | None,
    environ: dict[str, str],
    before: Callable[[], None] | None,
    stream: str,
) -> None:
    opened = os.open(stream, os.O_WRONLY | os.O_APPEND)
    os.dup2(opened, 1)
    os.dup2(opened, 2)
    os.environ.clear()
    os.environ.update(environ)
    constants.apply(environ)
    if before is not None:
        before()
    sys.argv = [worker or "sana-pipe", *arguments]
    if worker is None:
        cli.console()
    processes.run_and_exit(importlib.import_module(f"tests.support.workers.{worker}").main)
