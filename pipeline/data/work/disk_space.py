"""Disk space: encoding pauses while the disk is full, and goes on when there is space again.

`check` asks before a unit whether its bytes and a reserve (`RESERVE`) are free. `wait` handles a lack of
space, whether `check` or a failed write reported it (`NoSpaceError`): it prints once what is missing, looks again every
`POLL_S` seconds, and gives up after `WAIT_S`.

The caller must release its claim before it waits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import click

from sana_pipe.base.amounts import amount
from sana_pipe.base.disk import cache_errors
from sana_pipe.base.errors import NoSpaceError
from sana_pipe.data.cache.cache import Cache, Unit, WorkList

RESERVE = 1 << 30
"""Bytes that stay free on the cache's disk in addition to the next unit."""

WAIT_S = 3600.0
"""Seconds to wait for disk space before encoding ends with an error; 0: do not wait."""

POLL_S = 5.0


def shortage(cache: Cache) -> str | None:
    """Say, before a scan that may take hours, that encoding will pause after it; None if there is space now."""
    free = cache.files.free_bytes()
    if free is None or free >= RESERVE:
        return None
    rest = f"less than the {amount(RESERVE)} that stay free: encoding pauses after the scan until there is space"
    return f"{cache.location}: {amount(free)} are free, {rest}"


class DiskSpace:
    """The disk space of one process's cache.

    Args:
        unit_bytes: about how many bytes a unit will take.
        sleep: seconds -> waits; may raise to end the pause (a stop signal).
    """

    def __init__(
        self,
        cache: Cache,
        unit_bytes: Callable[[WorkList, Unit], int],
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.cache, self.unit_bytes, self._sleep = cache, unit_bytes, sleep
        self.reserve, self.wait_s = RESERVE, WAIT_S
        self._paused_since: float | None = None

    def check(self, plan: WorkList, unit: Unit) -> None:
        """NoSpaceError unless a unit's bytes and the reserve are free."""
        free, need = self.cache.files.scratch_bytes(), self.unit_bytes(plan, unit)
        if free < need + self.reserve:
            raise NoSpaceError(
                f"{self.cache.location}: there is too little space for the next shards",
                expected=f"{amount(need)}, and {amount(self.reserve)} in reserve",
                found=f"{amount(free)} free",
                fix="free space (or move the cache), then run the same command again: it continues",
            )

    def wait(self, plan: WorkList, unit: Unit, error: NoSpaceError) -> None:
        """Return when there is space for a unit.

        Raises:
            NoSpaceError: the last such error, if no unit was made for `wait_s` seconds.
        """
        if self._paused_since is None:
            self._paused_since = time.monotonic()
            if self.wait_s:
                need = amount(self.unit_bytes(plan, unit) + self.reserve)
                click.echo(
                    f"paused: {error.line}: waiting at most {self.wait_s:g} s until {need} can be written; "
                    f"{amount(self.cache.files.scratch_bytes())} are free",
                    err=True,
                )
        while True:
            left = self._paused_since + self.wait_s - time.monotonic()
            if left <= 0:
                raise error
            self._sleep(min(POLL_S, left))
            try:
                self.check(plan, unit)
                self._allocate(self.unit_bytes(plan, unit))
                return
            except NoSpaceError as still:
                error = still

    def unit_made(self) -> None:
        """A unit was written: the next pause gets its full time."""
        if self._paused_since is not None:
            click.echo("there is space again: encoding continues", err=True)
        self._paused_since = None

    def _allocate(self, size: int) -> None:
        with self.cache.files.temporary() as path, cache_errors(path), open(path, "xb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, size))
