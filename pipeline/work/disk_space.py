"""Room: encoding pauses while the disk is full, and goes on when there is space again.

What: `check` asks before a unit whether its bytes and a reserve (`encode.min_free_gib`) are free; `wait` is the
reaction to too little of it, found by `check` or by a write that failed (`NoSpaceError`): it says once what is missing,
looks again every `POLL_S` seconds, and gives up after `encode.low_disk_wait_s`.
Why: a full disk is mended by a person in minutes or hours; a hundred workers that have all ended must be started again.
Free bytes do not show quotas, so after a failed write the unit's bytes are allocated once, and freed, before it is
tried again.
Price: what a text unit needs is guessed from its captions' lengths. A unit whose write failed is encoded again.

Nobody may hold a claim while he waits: whoever catches the error has left the block that held it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import click

from pipeline.amounts import amount
from pipeline.cache import layout
from pipeline.cache.local_files import cache_errors
from pipeline.cache.store import Cache, Plan, Unit
from pipeline.config import EncodeConfig
from pipeline.encoding import estimate
from pipeline.errors import NoSpaceError

POLL_S = 5.0


class Room:
    """The space of one process's cache.

    Args:
        sleep: seconds -> waits; may raise to end the pause (a stop signal).
    """

    def __init__(self, cache: Cache, config: EncodeConfig, sleep: Callable[[float], None] = time.sleep):
        self.cache, self._sleep = cache, sleep
        self.reserve = int(config.min_free_gib * 2**30)
        self.wait_s = config.low_disk_wait_s
        self._since: float | None = None

    def need(self, plan: Plan, unit: Unit) -> int:
        """Bytes that a unit will take, about."""
        recipe = self.cache.recipe(plan.recipe)
        rows = self.cache.table(plan.table).slice(unit.start, unit.count)
        if isinstance(recipe, layout.LatentRecipe):
            shapes = zip(rows.column("height").to_pylist(), rows.column("width").to_pylist(), strict=True)
            return sum(estimate.latent_bytes(recipe, height, width) for height, width in shapes)
        assert isinstance(recipe, layout.TextRecipe)
        total = 0
        for caption in rows.column("caption").to_pylist():
            size = len((caption or "").encode())
            rows_ = recipe.max_length if caption is None else estimate.likely_rows(recipe, size)
            total += estimate.text_bytes(recipe, rows_, size)
        return total

    def check(self, plan: Plan, unit: Unit) -> None:
        """NoSpaceError unless a unit's bytes and the reserve are free."""
        free, need = self.cache.files.scratch_bytes(), self.need(plan, unit)
        if free < need + self.reserve:
            raise NoSpaceError(
                f"{self.cache.location}: there is too little space for the next unit",
                expected=f"{amount(need)}, and {amount(self.reserve)} in reserve (encode.min_free_gib)",
                found=f"{amount(free)} free",
                fix="free space (or move the cache), then run the same command again: it continues",
            )

    def wait(self, plan: Plan, unit: Unit, error: NoSpaceError) -> None:
        """Return when there is room for a unit.

        Raises:
            NoSpaceError: `error`, if there was none for `wait_s` seconds since a unit last came through.
        """
        now = time.monotonic()
        if self._since is None:
            self._since = now
            if self.wait_s:
                need = amount(self.need(plan, unit) + self.reserve)
                click.echo(
                    f"paused: {error.what}: waiting at most {self.wait_s:g} s until {need} can be written; "
                    f"{amount(self.cache.files.scratch_bytes())} are free",
                    err=True,
                )
        while True:
            left = self._since + self.wait_s - time.monotonic()
            if left <= 0:
                raise error
            self._sleep(min(POLL_S, left))
            try:
                self.check(plan, unit)
                self._allocate(self.need(plan, unit))
            except NoSpaceError as still:
                error = still
                continue
            return

    def passed(self) -> None:
        """A unit came through: the next pause is a new one."""
        if self._since is not None:
            click.echo("there is room again: encoding goes on", err=True)
        self._since = None

    def _allocate(self, size: int) -> None:
        with self.cache.files.temporary() as path, cache_errors(path), open(path, "xb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, size))
