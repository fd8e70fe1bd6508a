"""Errors that a user can cause.

Each is a `UserError`: what is wrong, what was expected, what was found, and the command or setting that fixes it. The
command line prints it without a traceback and exits with its `exit_code`. Any other exception is a defect and keeps
its traceback.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.urls import strip_credentials


class UserError(Exception):
    """An error that the reader of the message can fix.

    Args:
        what: one sentence that names the object (file, key, shard, record) and what is wrong with it.
        expected: what would be right, if `what` does not say it.
        found: what is there instead.
        fix: the command or the setting that fixes it.
    """

    exit_code = 2
    everywhere = False
    """The same error is raised on every process of the launch."""

    def __init__(self, what: str, *, expected: object = None, found: object = None, fix: str | None = None):
        what = strip_credentials(what)
        self.what, self.expected, self.found, self.fix = what, expected, found, fix
        lines = [what]
        if expected is not None:
            lines.append(f"  expected: {expected}")
        if found is not None:
            lines.append(f"  found:    {found}")
        if fix:
            lines.append(f"  fix:      {fix}")
        super().__init__(strip_credentials("\n".join(lines)))

    def fields(self) -> dict[str, Any]:
        """The error as JSON values, for `of`."""
        texts = {"what": self.what, "expected": self.expected, "found": self.found, "fix": self.fix}
        shown = {key: None if value is None else _valid(strip_credentials(str(value))) for key, value in texts.items()}
        return {"kind": type(self).__name__, **shown}

    @classmethod
    def of(cls, fields: dict[str, Any]) -> UserError:
        """The same error from its `fields`, of another process."""
        kinds = [cls]
        for kind in kinds:
            kinds += kind.__subclasses__()
        named = {kind.__name__: kind for kind in kinds if kind.__init__ is UserError.__init__}
        texts = {key: fields[key] for key in ("expected", "found", "fix")}
        return named.get(fields["kind"], cls)(fields["what"], **texts)


def _valid(text: str) -> str:
    """Without lone surrogates, which names of files may have and UTF-8 has not."""
    return text.encode("utf-8", "backslashreplace").decode()


class ConfigError(UserError):
    """A key, a type or a combination in the configuration is wrong."""


class CacheError(UserError):
    """The cache lacks something, or holds something of another recipe or version."""

    exit_code = 3


class IntegrityError(CacheError):
    """Bytes differ from the bytes that were written, or belong to another record."""

    exit_code = 4


class NoSpaceError(CacheError):
    """There is no disk space or quota for the next file."""

    exit_code = 6


class ResourceError(CacheError):
    """No file descriptors or memory are left, or this user may not read the file. It says nothing about its bytes."""


class AwayError(CacheError):
    """Storage did not answer within `patience_s`. The same command may succeed later."""

    exit_code = 75  # EX_TEMPFAIL


def not_permitted(path: Path, kind: type[UserError] = UserError) -> UserError | None:
    """The error for a file or folder that this user may not read; None: that is permitted.

    For the handling of an error of reading: libraries call such a file missing or damaged.
    """
    closed = next((folder for folder in reversed(path.absolute().parents) if not os.access(folder, os.X_OK)), None)
    if (not os.path.isdir(closed)) if closed else (not os.path.lexists(path) or os.access(path, os.R_OK)):
        return None
    what = f"{path}: may not be read by this user" + (f": {closed} may not be entered" if closed else "")
    mode = "a+rx" if closed or path.is_dir() else "a+r"
    return kind(what, fix=f"chmod {mode} {shlex.quote(str(closed or path))}, as its owner or root")


def expanded(path: str) -> Path:
    """A path with `~` and `~USER` replaced.

    Raises:
        UserError: the home folder is not known.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{path}: the home folder is not known", fix="write the whole path, or set HOME") from None


def local_path(path: str) -> Path:
    """A path on a disk.

    Raises:
        UserError: a URL. As a path it would name a new folder here.
    """
    if "://" in path:
        raise UserError(f"{path}: is a URL, not a path on a disk", fix="name a folder, such as a mount of the store")
    return Path(path)


class RejectRateError(UserError):
    """More items were rejected than `encode.max_reject_rate` allows, or more records were unreadable than
    `train.max_quarantine_rate` allows."""

    exit_code = 5


def print_error(error: BaseException, prefix: str = "") -> None:
    """Print an error to stderr, a UserError without its traceback; nothing if it has been printed.

    Args:
        prefix: names the process, such as `process 3: `.
    """
    if was_printed(error):
        return
    error.printed = True  # type: ignore[attr-defined]
    if isinstance(error, UserError):
        print(f"sana-pipe: {prefix}{error}", file=sys.stderr, flush=True)
    else:
        sys.excepthook(type(error), error, error.__traceback__)


def was_printed(error: BaseException) -> bool:
    """Whether `print_error` has printed it."""
    return getattr(error, "printed", False)


@contextmanager
def printed_first(rank: int, world: int) -> Iterator[None]:
    """Print an error of this process alone before anything that may wait for another process handles it.

    An error of all processes, or one that tells that another process ended, is left to the end of this process: with
    many processes those lines would bury the first message.
    """
    try:
        yield
    except Exception as error:
        if world > 1 and not getattr(error, "everywhere", False) and not _tells_of_a_peer(error):
            print_error(error, f"process {rank}: " if rank else "")
        raise


def _tells_of_a_peer(error: Exception) -> bool:
    """Whether a collective failed. NCCL's errors have a class, gloo's are RuntimeErrors with the place in its code."""
    names = {cls.__name__ for cls in type(error).__mro__}
    return "DistError" in names or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


_CACHE = (
    "encode",
    "bucket",
    "snapshots",
    "diff",
    "name",
    "train",
    "plan",
    "sample",
    "status",
    "verify",
    "gc",
    "forget",
    "inspect",
    "report",
    "view",
)
EXIT_CODES: dict[int, tuple[str, tuple[str, ...]]] = {
    0: ("done, or ended cleanly after a signal (SIGTERM, SIGUSR1)", ()),
    1: (
        "units are missing (status), the snapshots differ (diff), the run does not fit (plan), or a defect of "
        "sana-pipe with a traceback",
        (),
    ),
    2: ("a wrong option, setting, file or environment", ()),
    3: ("the cache lacks something, holds something of another recipe, or cannot be reached", _CACHE),
    4: ("bytes of the cache are damaged", _CACHE),
    5: (
        "more items were rejected than encode.max_reject_rate allows, or all of them (encode); more samples replaced "
        "unreadable ones than train.max_quarantine_rate allows (train, which saved)",
        ("encode", "train"),
    ),
    6: ("there is no disk space for the next file", _CACHE),
    7: ("a checkpoint is damaged, incomplete, of another run, or could not be written", ("train", "export", "sample")),
    8: ("the process that decodes pictures, or encodes prompts, failed", ("sample", "report")),
    9: ("the loss or the gradient is not a finite number", ("train",)),
    10: ("another training uses the run directory", ("train",)),
    74: ("done, but lines could not be written to stdout (its reader ended, a full disk)", ()),
    75: ("storage did not answer within patience_s (train saved); the same command may succeed later", _CACHE),
    130: ("interrupted by Ctrl-C", ()),
}
"""Meaning of each exit code, and the commands that can end with it (none named: all). `demo` ends with the code of the
command that failed."""
