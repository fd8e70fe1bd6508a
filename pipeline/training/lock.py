"""One training at a time writes into a run directory.

What: `taken` puts `lock.json` into the run directory: a token made for this attempt, and whose it is (host, process,
since when). A thread touches the file every `BEAT_S` seconds. `Lock.check` raises `RunTaken` when the file does not
hold this token any more; it is called before everything that is published or removed.
Who is refused: a training that sees the lock being touched while it looks, which takes `BEAT_S` seconds.
Who is not: the successor of a process of this host that has ended; a requeued SLURM job, of which the scheduler itself
says that it is the next attempt of the same job; and, `STALE_S` seconds after the last touch, the successor of a host
that died. An earlier owner that wakes up finds another token and stops without having published or removed anything.
Times are those of the file system that holds the run directory: the clocks of two machines are never compared.
Price: of two newcomers in the same instant both may believe for a moment that the lock is theirs: it belongs to the
last one to write, the other stops at its first check.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from pipeline.cache import process_identity as processes
from pipeline.cache.local_files import make_folder, now_in
from pipeline.errors import CacheError, UserError
from pipeline.launch import scheduled_attempt
from pipeline.parallel.mesh import broadcast_from_rank_0

NAME = "lock.json"
BEAT_S = 2.0
STALE_S = 60.0
"""A lock that was not touched for so long is nobody's. Far above `BEAT_S`: file systems may be slow."""
POLL_S = 0.5


class RunTaken(UserError):
    """Another training has the run directory."""

    exit_code = 10


@dataclass(frozen=True)
class Owner:
    """What `lock.json` says. `place`: see `pipeline.cache.process_identity`. `since`: when it was taken, in seconds of
    the file system's clock. `job`, `attempt`: those of SLURM, if any."""

    token: str
    host: str
    process: int
    place: dict[str, str]
    since: float
    job: str | None
    attempt: int

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"

    def has_ended(self) -> bool:
        """True of a process of this machine that is no more; of another machine's nothing is known."""
        here, there = processes.place(), self.place
        same = bool(here) and there.get("machine") == here["machine"]
        return same and processes.ended(there.get("process", ""), there.get("started", ""))

    def follows(self, other: Owner) -> bool:
        """Whether the scheduler says that this attempt replaces the other."""
        return self.job is not None and self.job == other.job and self.attempt > other.attempt


class Lock:
    """The lock of this attempt, made on every process; only the first one touches and checks the file.

    Attributes:
        token: in the names of what this attempt has not published yet; the same on every process.
        lost: the file was found with another token.
    """

    def __init__(self, path: Path, token: str):
        self.token, self.lost = token, False
        self._path, self._ended = path, threading.Event()
        self._thread: threading.Thread | None = None
        if dist.get_rank() == 0:
            self._thread = threading.Thread(target=self._beats, name="lock", daemon=True)
            self._thread.start()

    def check(self) -> None:
        """Call it on the first process before anything is published or removed.

        Raises:
            RunTaken: another training has taken over, or somebody removed the lock.
        """
        owner = _owner(self._path)
        self.lost = owner is None or owner.token != self.token
        if self.lost:
            raise RunTaken(
                f"{self._path.parent}: another training has taken over this run directory",
                expected=f"the token of this attempt, {self.token}, in {self._path}",
                found="no lock" if owner is None else f"{owner.token}, of {owner}",
                fix="let the other one go on; it started from the last checkpoint that was published",
            )

    def release(self) -> None:
        """Remove the lock, if it is still this attempt's."""
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            with suppress(OSError, UserError):
                self.check()
                self._path.unlink()

    def _beats(self) -> None:
        while not self._ended.wait(BEAT_S):
            self._beat()

    def _beat(self) -> None:
        """Touch the file through the descriptor that it was read from: never the one of a new owner."""
        with suppress(OSError), self._path.open("r+", encoding="utf-8") as file:
            owner = _parsed(file.read())
            self.lost = owner is None or owner.token != self.token
            if not self.lost:
                os.utime(file.fileno())


@contextmanager
def taken(run: Path, say: Callable[[str], None]) -> Iterator[Lock]:
    """Have the run directory inside the block. Entered by all processes of a launch together.

    Args:
        run: the run directory; made if it is not there, and removed again if it stays empty.
        say: prints one line.

    Raises:
        RunTaken: another training has it.
        UserError: the directory cannot be written.
    """
    path, newcomer, made = run / NAME, _Newcomer(run / NAME), broadcast_from_rank_0(lambda: _make(run))
    token = broadcast_from_rank_0(lambda: newcomer.token)
    try:
        while (
            news := broadcast_from_rank_0(newcomer.attempt)
        ) is not None:  # short calls: no process waits long for the first
            if news:
                say(news)
            time.sleep(POLL_S)
        lock = Lock(path, token)
        try:
            yield lock
        finally:
            lock.release()
    finally:
        if made and dist.get_rank() == 0:
            with suppress(OSError):
                run.rmdir()


class _Newcomer:
    """Looks at the lock of a run directory until it is this attempt's. On the first process."""

    def __init__(self, path: Path):
        self.path, self.token = path, uuid.uuid4().hex[:12]
        self._seen: float | None = None

    def attempt(self) -> str | None:
        """None: the lock is ours. Else look again later; the text, if any, says why.

        Raises:
            RunTaken: the owner lives.
        """
        try:
            now = now_in(self.path.parent)
            job, number = scheduled_attempt() or (None, 0)
            ours = Owner(self.token, platform.node(), os.getpid(), processes.place(), now, job, number)
            if not self.path.exists() and _create(self.path, ours):
                return None
            with self.path.open(encoding="utf-8") as file:
                owner, touched = _parsed(file.read()), os.fstat(file.fileno()).st_mtime
            described = "somebody" if owner is None else f"{owner}, for {_span(now - owner.since)}"
            ended = owner is not None and (owner.has_ended() or ours.follows(owner))
            if ended or now - touched >= STALE_S:
                _replace(self.path, ours)
                return None if _owner(self.path) == ours else ""
        except FileNotFoundError:  # it was released while we looked
            return ""
        except (OSError, CacheError) as error:
            raise _unwritable(self.path.parent, error.__cause__ or error) from None
        if self._seen not in (None, touched):
            raise RunTaken(
                f"another training has the run directory {self.path.parent}",
                found=f"{described}; its last sign came {_span(max(0.0, now - touched))} ago",
                fix="wait for it or end it, or --set train.output=DIR for another run",
            )
        first, self._seen = self._seen is None, touched
        left = _span(max(0.0, STALE_S - (now - touched)))
        return f"waiting for a sign of {described}, at most {left}: {self.path}" if first else ""


def _make(run: Path) -> bool:
    try:
        there = run.exists()
        make_folder(run)
    except OSError as error:
        raise _unwritable(run, error) from None
    return not there


def _unwritable(run: Path, error: BaseException) -> UserError:
    return UserError(f"{run}: cannot be written: {error}", fix="check the rights, or set train.output")


def _create(path: Path, owner: Owner) -> bool:
    try:
        with path.open("x", encoding="utf-8") as file:
            _write(file.fileno(), owner)
    except FileExistsError:
        return False
    return True


def _replace(path: Path, owner: Owner) -> None:
    fresh = path.with_name(f"{NAME}.{owner.token}")
    with fresh.open("w", encoding="utf-8") as file:
        _write(file.fileno(), owner)
    fresh.replace(path)


def _write(descriptor: int, owner: Owner) -> None:
    os.write(descriptor, (json.dumps(asdict(owner), indent=1) + "\n").encode())
    os.fsync(descriptor)


def _owner(path: Path) -> Owner | None:
    """Whose lock it is; None: there is none, or it says nothing.

    Raises:
        UserError: the file system does not answer.
    """
    try:
        return _parsed(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error}", fix="check the file system, then --resume auto") from None


def _parsed(text: str) -> Owner | None:
    try:
        return Owner(**json.loads(text))
    except (ValueError, TypeError):
        return None


def _span(seconds: float) -> str:
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
