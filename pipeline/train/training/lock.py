"""Lock of a run directory: one training at a time writes into it.

`run_lock` puts `lock.json` there: a token of this attempt and its owner; a thread touches it every `BEAT_S` seconds.
`Lock.check` raises `RunTaken` when the token is another, before every publication and removal, so an earlier owner that
wakes up changes nothing. The lock is free after a process of this host that has ended, for the next attempt of a SLURM
job, and `STALE_S` seconds after the last touch, by the file system's clock alone.
Price: of two trainings that start in the same instant, one stops at its first check.
"""

from __future__ import annotations

import json
import os
import platform
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from sana_pipe.base import process_identity
from sana_pipe.base.amounts import duration
from sana_pipe.base.disk import make_folder, now_in, replacing
from sana_pipe.base.errors import CacheError, UserError, machine_error
from sana_pipe.base.launch import scheduled_attempt
from sana_pipe.base.processes import beating
from sana_pipe.data.cache.layout import Paths
from sana_pipe.train.parallel.collectives import broadcast_from_rank_0

NAME = "lock.json"
BEAT_S = 2.0
STALE_S = 60.0
"""A lock that was not touched for this long may be replaced. Far above `BEAT_S`: file systems may be slow."""
POLL_S = 0.5


class RunTaken(UserError):
    """Another training uses the run directory."""

    exit_code = 10


@dataclass(frozen=True)
class Owner:
    """Contents of `lock.json`. `place`: see `process_identity`. `since`: when it was taken, in seconds
    of the file system's clock. `job`, `attempt`: SLURM's, if any."""

    token: str
    host: str
    process: int
    place: dict[str, str]
    since: float
    job: str | None
    attempt: int

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"

    @property
    def text(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    def follows(self, other: Owner) -> bool:
        """Return whether the scheduler says that this attempt replaces the other."""
        return self.job is not None and self.job == other.job and self.attempt > other.attempt


class Lock:
    """The lock of this attempt, made on every process; only the first process touches and checks the file.

    Attributes:
        token: part of the names of unpublished files of this attempt; the same on every process.
        lost: the file has another token.
    """

    def __init__(self, path: Path, token: str):
        self.token, self.lost, self._path = token, False, path

    def check(self) -> None:
        """Call it on the first process before each publication and removal.

        Raises:
            RunTaken: another training has taken over, or the lock was removed.
        """
        owner = _owner(self._path)
        self.lost = owner is None or owner.token != self.token
        if self.lost:
            what = (
                "was removed"
                if owner is None
                else "belongs to another training, which has taken over this run directory"
            )
            raise RunTaken(
                f"{self._path}: {what}",
                expected=f"the token of this attempt, {self.token}",
                found=None if owner is None else f"{owner.token}, of {owner}",
                fix="let the other training continue, from the last published checkpoint; or if there is none, start "
                "again with --resume auto",
            )

    def release(self) -> None:
        """Remove the lock, if it is still this attempt's."""
        with suppress(OSError, UserError):
            self.check()
            self._path.unlink()

    def beat(self) -> None:
        """Touch the file through the descriptor that it was read from, so never the file of a new owner."""
        with suppress(OSError), self._path.open("r+", encoding="utf-8") as file:
            owner = _parsed(file.read())
            self.lost = owner is None or owner.token != self.token
            if not self.lost:
                os.utime(file.fileno())


def owner_here(run: Path) -> Owner | None:
    """The process of this host that trains in a run directory, or in a folder of run directories, at this moment; None:
    there is none. A lock that was not touched for `STALE_S` counts for nothing."""
    for path in sorted([*run.glob(NAME), *run.glob(f"*/{NAME}")]):
        with suppress(OSError, UserError):
            owner, age = _owner(path), time.time() - path.stat().st_mtime
            is_here = owner is not None and owner.host == platform.node() and age < STALE_S
            if owner is not None and is_here and not process_identity.has_ended(owner.place):
                return owner
    return None


@contextmanager
def run_lock(run: Path, log: Callable[[str], None]) -> Iterator[Lock]:
    """Own the run directory inside the block: created if missing, removed again if it stays empty. Collective.

    Raises:
        RunTaken: another training uses it.
        UserError: the directory cannot be written, or is a cache.
    """
    path, candidate, made = run / NAME, _Candidate(run / NAME), broadcast_from_rank_0(lambda: _make(run))
    token = broadcast_from_rank_0(lambda: candidate.token)
    try:
        # short calls in turn: no process waits in a broadcast for long
        while (wait := broadcast_from_rank_0(candidate.attempt)) is not None:
            if wait:
                log(wait)
            time.sleep(POLL_S)
        lock, is_first = Lock(path, token), dist.get_rank() == 0
        try:
            with beating(lock.beat, BEAT_S, "lock") if is_first else nullcontext():
                yield lock
        finally:
            if is_first:
                lock.release()
    finally:
        if made and dist.get_rank() == 0:
            with suppress(OSError):
                run.rmdir()


class _Candidate:
    """Polls the lock of a run directory until it is this attempt's; an owner that touches it meanwhile is alive. On the
    first process."""

    def __init__(self, path: Path):
        self.path, self.token = path, uuid.uuid4().hex[:12]
        self._last_touch: float | None = None

    def attempt(self) -> str | None:
        """None if the lock is ours now; else a message to print, perhaps empty, and another attempt is needed. Raises
        RunTaken if the owner is alive."""
        try:
            now = now_in(self.path.parent)
            job, number = scheduled_attempt() or (None, 0)
            ours = Owner(self.token, platform.node(), os.getpid(), process_identity.place(), now, job, number)
            if not self.path.exists() and _create(self.path, ours):
                return None
            with self.path.open(encoding="utf-8") as file:
                owner, touched = _parsed(file.read()), os.fstat(file.fileno()).st_mtime
            described = "an unknown process" if owner is None else f"{owner}, for {duration(now - owner.since)}"
            ended = owner is not None and (process_identity.has_ended(owner.place) or ours.follows(owner))
            if ended or now - touched >= STALE_S:
                with replacing(self.path) as fresh:
                    fresh.write_text(ours.text, encoding="utf-8")
                return None if _owner(self.path) == ours else ""
        except FileNotFoundError:  # released meanwhile
            return ""
        except (OSError, CacheError) as error:
            raise _unwritable(self.path.parent, error.__cause__ or error) from None
        if self._last_touch not in (None, touched):
            raise RunTaken(
                f"another training uses the run directory {self.path.parent}",
                found=f"{described}; it last touched the lock {duration(now - touched)} ago",
                fix="wait for it or end it, or --set train.output=DIR for another run",
            )
        first, self._last_touch = self._last_touch is None, touched
        left = duration(STALE_S - (now - touched))
        return f"{self.path}: locked by {described}; waiting at most {left} for a sign of life" if first else ""


def _make(run: Path) -> bool:
    try:
        if (run / Paths.FORMAT).exists():
            raise UserError(f"{run}: is a cache, not a run directory", fix="--set train.output=DIR, such as runs/NAME")
        existed = run.exists()
        make_folder(run)
    except OSError as error:
        raise _unwritable(run, error) from None
    return not existed


def _unwritable(run: Path, error: BaseException) -> UserError:
    what = f"{run}: cannot be written"
    fix = "check the permissions, or set train.output"
    return machine_error(error, what, "--resume auto") or UserError(f"{what}: {error}", fix=fix)


def _create(path: Path, owner: Owner) -> bool:
    try:
        file = path.open("x", encoding="utf-8")
    except FileExistsError:
        return False
    try:
        with file:
            file.write(owner.text)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)  # a lock without an owner would hold up the next attempt
        raise
    return True


def _owner(path: Path) -> Owner | None:
    """The owner of a lock; None if there is no lock or it cannot be parsed."""
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
