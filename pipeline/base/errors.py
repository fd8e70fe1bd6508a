"""Errors that a user can cause.

Each is a `UserError`: what is wrong, what was expected, what was found, and the command or setting that fixes it. The
command line prints it without a traceback and exits with its `exit_code`. Any other exception is a defect and keeps
its traceback.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sana_pipe.base.urls import strip_credentials


def escaped(text: str, keep: str = "") -> str:
    """Foreign text for terminals, tables and messages: control characters, surrogates and invisible marks escaped.

    keep: characters that stay. Spaces of other scripts and joiners, which words are written with, always stay.
    """
    if text.isprintable():
        return text
    keep += "\u200c\u200d"
    return "".join(
        char if char.isprintable() or char in keep or unicodedata.category(char) == "Zs" else _escape(char)
        for char in text
    )


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def alternatives(flag: str, values: Iterable[str]) -> str:
    """`FLAG A or FLAG B`: a choice in a fix, each quoted for a shell, where `A|B` would be a pipe."""
    return " or ".join(f"{flag} {shlex.quote(value)}" for value in values)


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
        super().__init__(escaped(strip_credentials("\n".join(lines)), "\n"))

    @classmethod
    def code(cls) -> str:
        """The reason for programs, which stays the same when texts change: `no-space` of NoSpaceError."""
        return re.sub(r"(?<!^)(?=[A-Z])", "-", cls.__name__.removesuffix("Error")).lower()

    @property
    def line(self) -> str:
        """The error with its fix in one line, to print it as a part of another message."""
        return strip_credentials(f"{self.what} ({self.fix})" if self.fix else self.what)

    def fields(self) -> dict[str, Any]:
        """The error as JSON values, for `of`."""
        texts = {"what": self.what, "expected": self.expected, "found": self.found, "fix": self.fix}
        shown = {key: None if value is None else _valid(strip_credentials(str(value))) for key, value in texts.items()}
        return {"kind": type(self).__name__, **shown}

    def as_object(self) -> dict[str, Any]:
        """The object that `--json` prints in place of the result."""
        fields = self.fields()
        fields.pop("kind")
        return {"error": {"code": self.code(), **fields}}

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
    """The cache lacks something, or holds something of another encoding or version."""

    exit_code = 3


class IntegrityError(CacheError):
    """Bytes differ from the bytes that were written, or belong to another record."""

    exit_code = 4


class NoSpaceError(CacheError):
    """There is no disk space or quota for the next file."""

    exit_code = 6


class ResourceError(CacheError):
    """No file descriptors or memory are left, or this user may not read the file. It says nothing about its bytes."""

    exit_code = 2


class PeerError(UserError):
    """Another process of the launch ended, or cannot be reached."""

    exit_code = 1


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


_VARIABLE = re.compile(r"\$(?:[A-Za-z_]\w*|\{[^}]*\})", re.ASCII)


def expanded(path: str) -> str:
    """A path or URL with `~`, `~USER`, `$NAME` and `${NAME}` replaced, as by a shell.

    Raises:
        UserError: the home folder is not known, or a variable is not set and there is no file of this very name.
    """
    text = os.path.expandvars(path)
    unset = _VARIABLE.search(strip_credentials(text))
    if unset is not None and not os.path.lexists(path):
        fix = f"export {unset[0].strip('${}')}=..., or write the whole path"
        raise UserError(f"{path}: the variable {unset[0]} is not set", fix=fix)
    try:
        return str(Path(text).expanduser()) if text.startswith("~") else text
    except RuntimeError:
        raise UserError(f"{path}: the home folder is not known", fix="write the whole path, or set HOME") from None


def local_path(path: str) -> Path:
    """A path on a disk, expanded.

    Raises:
        UserError: a URL. As a path it would name a new folder here.
    """
    path = expanded(path)
    if "://" in path:
        raise UserError(f"{path}: is a URL, not a path on a disk", fix="name a folder, such as a mount of the store")
    return Path(path)


class RejectRateError(UserError):
    """More items were rejected than `encode.max_reject_rate` allows, or more records were unreadable than
    `train --quarantine` replaces."""

    exit_code = 5


# ------------------------------------------------------------------------------- errors of libraries and of the machine

NO_SPACE = {
    errno.ENOSPC: "free space on that disk",
    errno.EDQUOT: "raise the quota of that disk, or remove files there",
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f), or write to a disk that holds larger files",
}
"""Numbers of OSErrors of a full disk -> the fix."""
_RESOURCES = {
    errno.ENOMEM: "end other processes, or raise this one's limit (ulimit -v, or that of its container or job)",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "ulimit -n 65536, or fewer workers"),
}
_NO_MEMORY = re.compile(
    "memoryerror|can't allocate memory|cannot allocate memory|out of memory|bad_alloc|failed to map segment"
    "|can't start new thread|^resource temporarily unavailable$"  # a thread needs memory, too
    "|^could not create a primitive$"  # oneDNN
    # of a full GPU: cuBLAS, cuDNN, cuSOLVER and cuFFT, which allocate by themselves
    r"|(?:ALLOC|ALLOCATION)_FAILED|CUBLAS_STATUS_NOT_INITIALIZED|CUDNN_STATUS_NOT_INITIALIZED"
    "|unable to find an engine to execute this computation",
    re.IGNORECASE,
)


def machine_errno(error: BaseException | None) -> int | None:
    """Number of the OSError by which an error, or what it was raised from, says that disk space, memory or file
    descriptors have run out; None: it says nothing of the kind."""
    cause = _machine_cause(error)
    return None if cause is None else _errno(cause)


def _machine_cause(error: BaseException | None) -> BaseException | None:
    while error is not None and _errno(error) not in {*NO_SPACE, *_RESOURCES}:
        error = error.__cause__ or error.__context__
    return error


def _errno(error: BaseException) -> int | None:
    """Some libraries have exceptions of their own."""
    if isinstance(error, OSError | UserError):
        return getattr(error, "errno", None)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's, of a GPU
        return errno.ENOMEM
    if of_rust := re.search(r"\(os error (\d+)\)", str(error)):
        return int(of_rust[1])
    return errno.ENOMEM if _NO_MEMORY.search(str(error)) else None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory has run out, main memory or that of a GPU."""
    return machine_errno(error) == errno.ENOMEM


def machine_error(
    error: BaseException, what: str | None = None, again: str = "run the same command again"
) -> CacheError | None:
    """The error to show if disk space, memory or file descriptors have run out (`machine_errno`), else None.

    Args:
        what: names the file and what failed; None: the file that the error names.
        again: what to do once there is space.
    """
    if (cause := _machine_cause(error)) is None:
        return None
    number = _errno(cause)
    assert number is not None
    place = getattr(cause, "filename2", None) or getattr(cause, "filename", None) or "a file"
    if number in NO_SPACE:
        fix = f"{NO_SPACE[number]}, then {again}"
        return NoSpaceError(f"{what or f'{place}: cannot be written'}: {os.strerror(number)}", fix=fix)
    if what is None and number == errno.ENOMEM:
        found = (str(cause).strip() or type(cause).__name__).partition("\n")[0]
        return ResourceError("there is not enough memory", found=found, fix=_RESOURCES[number])
    return ResourceError(f"{what or f'{place}: cannot be opened'}: {os.strerror(number)}", fix=_RESOURCES[number])


@contextmanager
def writing(
    place: Path | str, fix: str, kind: type[UserError] = UserError, again: str = "run the same command again"
) -> Iterator[None]:
    """Raise errors of writing to `place` with its name.

    Args:
        fix: for other errors than a full disk: rights, a missing mount.
        kind: of those errors.
        again: see `machine_error`.

    Raises:
        NoSpaceError: the disk is full.
    """
    what = f"{place}: cannot be written"
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if machine_errno(error) not in NO_SPACE and not isinstance(error, OSError):
            raise
        raise machine_error(error, what, again) or kind(f"{what}: {error}", fix=fix) from error


def shown(error: BaseException) -> BaseException:
    """The error as it is printed: another UserError if the machine or another process caused it, else itself."""
    if isinstance(error, NoSpaceError | ResourceError | AwayError):
        return error
    known: UserError | None = machine_error(error, error.what if isinstance(error, UserError) else None)
    if known is None and not isinstance(error, UserError) and _tells_of_a_peer(error):
        reason = re.sub(r"^\[\S+\] ", "", str(error))  # without the place in gloo's code
        known = PeerError(
            "another process of this launch ended, or cannot be reached",
            found=re.split(r"\n|\. ", reason)[0],
            fix="see the first message of the launch, then start all processes again (a training with --resume auto)",
        )
    if known is None:
        return error
    known.everywhere = getattr(error, "everywhere", False)
    known.printed = was_printed(error)  # type: ignore[attr-defined]
    return known


def print_error(error: BaseException, prefix: str = "") -> None:
    """Print an error to stderr, a UserError (see `shown`) without its traceback; nothing if it has been printed.

    Args:
        prefix: names the process, such as `process 3: `.
    """
    if was_printed(error):
        return
    error.printed = True  # type: ignore[attr-defined]
    error = shown(error)
    if isinstance(error, UserError):
        print(f"sana-pipe: {prefix}{error}", file=sys.stderr, flush=True)
    else:
        sys.excepthook(type(error), error, error.__traceback__)


def was_printed(error: BaseException) -> bool:
    """Return whether `print_error` has printed it."""
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


def _tells_of_a_peer(error: BaseException) -> bool:
    """Return whether a collective failed. NCCL's errors have a class, gloo's are RuntimeErrors with the place in its
    code."""
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
    "push",
    "pull",
    "inspect",
    "report",
    "view",
)
EXIT_CODES: dict[int, tuple[str, tuple[str, ...]]] = {
    0: ("done, or ended cleanly after a signal (SIGTERM, SIGUSR1, SIGHUP)", ()),
    1: (
        "records are missing (status), the snapshots differ (diff), the run does not fit (plan), or another process of "
        "the launch ended",
        (),
    ),
    2: ("a wrong option, setting, file or environment", ()),
    3: ("the cache lacks something, holds something of another encoding, or cannot be reached", _CACHE),
    4: ("bytes of the cache are damaged", _CACHE),
    5: (
        "more items were rejected than encode.max_reject_rate allows, or all of them (encode); more than 5 % of the "
        "samples replaced unreadable ones (train --quarantine, which saved)",
        ("encode", "train"),
    ),
    6: ("a disk is full, or a quota or the limit on the size of a file is reached", ()),
    7: (
        "a checkpoint is damaged, incomplete, of another run, or could not be written for another reason than a full "
        "disk",
        ("train", "export", "sample"),
    ),
    8: ("the process that decodes pictures, or encodes prompts, failed", ("sample", "report")),
    9: ("the loss or the gradient is not a finite number", ("train",)),
    10: ("another training uses the run directory", ("train",)),
    70: ("a defect of sana-pipe, with a traceback", ()),
    74: ("done, but lines could not be written to stdout (its reader ended, a full disk)", ()),
    75: ("storage did not answer within patience_s (train saved); the same command may succeed later", _CACHE),
    130: ("interrupted by Ctrl-C", ()),
}
"""Meaning of each exit code, and the commands that can end with it (none named: all). `demo` and `run` end with the
code of the command that failed."""
