"""Errors that are for people.

Every mistake a user can make ends in a `UserError`: what is wrong, what was expected, what was found, and the
command or setting that mends it. The command line prints it without a traceback and exits with its `exit_code`.
Anything else that escapes is a defect of ours and keeps its traceback.

Price: messages are written by hand where the check is made; there is no catalogue of codes.
"""

from __future__ import annotations

from pipeline.urls import strip_credentials


class UserError(Exception):
    """A mistake that the reader of the message can mend.

    Args:
        what: one sentence that names the thing (file, key, shard, record) and what is wrong with it.
        expected: what would have been right, if that is not plain from `what`.
        found: what was there instead.
        fix: the command or the setting that mends it.
    """

    exit_code = 2
    everywhere = False
    """Raised in the same words on every process of the launch."""

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


class ConfigError(UserError):
    """A key, a type or a combination in the configuration that cannot be right."""


class CacheError(UserError):
    """The cache is missing something, or holds something of another recipe or version."""

    exit_code = 3


class IntegrityError(CacheError):
    """Bytes that were read are not the bytes that were written (or not those of this record)."""

    exit_code = 4


class NoSpaceError(CacheError):
    """There is no room (or no quota) for what is to be written."""

    exit_code = 6


class AwayError(CacheError):
    """A store did not answer for as long as `patience_s` says. The same command may well succeed later."""

    exit_code = 75  # EX_TEMPFAIL


class RejectRateError(UserError):
    """More items were rejected than `encode.max_reject_rate` allows, or more records could not be read than
    `train.max_quarantine_rate` does."""

    exit_code = 5


_CACHE = ("encode", "bucket", "snapshots", "diff", "name", "train", "sample", "status", "verify", "gc", "forget")
EXIT_CODES: dict[int, tuple[str, tuple[str, ...]]] = {
    0: ("the work is done; a signal that asks for a clean end was obeyed (SIGTERM, SIGUSR1; in train also Ctrl-C)", ()),
    1: ("units are missing (status), the snapshots differ (diff), or a defect of sana-pipe with its traceback", ()),
    2: ("a wrong option, setting, file or environment", ()),
    3: ("the cache lacks something, holds something of another recipe, or cannot be reached", _CACHE),
    4: ("bytes of the cache are damaged", _CACHE),
    5: (
        "more items were rejected than encode.max_reject_rate allows, or all of them (encode); more samples stood in "
        "for unreadable ones than train.max_quarantine_rate allows (train, which saved)",
        ("encode", "train"),
    ),
    6: ("there is no space for what is to be written", _CACHE),
    7: ("a checkpoint is damaged, incomplete, of another run, or could not be written", ("train", "export", "sample")),
    8: ("the process that decodes pictures failed", ("sample",)),
    9: ("the loss or the gradient is not a finite number", ("train",)),
    10: ("another training has the run directory", ("train",)),
    74: ("the work is done, but its last lines could not be written to stdout", ()),
    75: ("a store did not answer for patience_s (train saved); the same command may succeed later", _CACHE),
    130: ("interrupted by Ctrl-C", ()),
}
"""What the exit code of a command means, and which commands can end with it (none named: all). `demo` ends with the
code of the command that failed."""
