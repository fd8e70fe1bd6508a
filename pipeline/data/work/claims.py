"""Claims: which worker makes which unit, so that idle workers take units that no other worker makes.

`take` puts `claims/<encoding>/<plan>/<unit>.json` (for a fragment of a scan: `claims/fragments/<source>/<id>.json`) if
it is absent. While the unit is made, a thread replaces the file with a higher beat. `release` removes it. A claim is
free if it did not change for `stale_s` seconds of the observer's monotonic clock; file times and clocks of other
machines are never compared. A claim of a process of this machine is free as soon as that process has ended.
"""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal

from sana_pipe.base import process_identity
from sana_pipe.base.errors import CacheError
from sana_pipe.base.processes import beating
from sana_pipe.data.cache import index
from sana_pipe.data.cache.cache import Cache, WorkList
from sana_pipe.data.cache.files import Files
from sana_pipe.data.cache.layout import Paths

STALE_S = 60.0
"""Seconds without a sign of life after which idle processes take over a worker's unit."""

BEATS = 6
"""Beats in `stale_s`; a slow file system may lose five of them."""

State = Literal["free", "ours", "claimed", "alive"]
"""The state of a claim, as an observer knows it. free: it can be taken. ours: this process has it. claimed: another
process has it. alive: another process has it, and wrote a beat since the last look."""


class Claims:
    """The claims of one process. `work` is always the arguments of `Paths.claim`.

    Args:
        stale_s: a claim that did not change for so long is free; None: `STALE_S`.
        clock: a monotonic clock, in seconds.

    Attributes:
        progress: how far this process is, as JSON values; every beat has it, for `sana-pipe status`.
    """

    def __init__(self, files: Files, stale_s: float | None = None, clock: Callable[[], float] = time.monotonic):
        self.files, self._clock = files, clock
        self.stale_s = STALE_S if stale_s is None else stale_s
        self.token = uuid.uuid4().hex
        self.place = process_identity.place()
        self.progress: Callable[[], dict[str, object]] = dict
        self._seen: dict[str, tuple[bytes, float]] = {}  # name -> content, and when it was first seen
        self._written: dict[str, float] = {}  # name of a claim of ours -> when it was last written

    def state(self, *work: str | int) -> State:
        """Read a claim, and remember it for the next look."""
        name = Paths.claim(*work)
        content = self.read(name)
        if content is None:
            self._seen.pop(name, None)
            return "free"
        fields = parse_claim(content)
        if fields.get("owner") == self.token:
            return "ours"
        now, before = self._clock(), self._seen.get(name)
        if before is None or before[0] != content:
            self._seen[name] = (content, now)
            return "free" if process_identity.has_ended(fields) else "claimed" if before is None else "alive"
        return "free" if now - before[1] >= self.stale_s or process_identity.has_ended(fields) else "claimed"

    def take(self, *work: str | int) -> State:
        """Claim a unit if it is free. Returns `ours`, or the state of the other claim."""
        name, content = Paths.claim(*work), self.content(0)
        state = self.state(*work) if name in self._seen else "free"
        if state == "free" and name not in self._seen:  # as far as is known there is no claim
            if self.files.put(name, content):
                self._written[name] = self._clock()
                return "ours"
            state = self.state(*work)
        if state != "free":
            return state
        before = self.read(name)
        seen = self._seen.get(name)
        if before is None or seen is None or before != seen[0]:
            return "claimed"  # another worker was quicker
        self.files.replace(name, content)
        self._seen.pop(name, None)
        return "ours" if self.read(name) == content else "claimed"

    def release(self, *work: str | int) -> None:
        """Remove the claim if it is still ours."""
        name = Paths.claim(*work)
        age = self._clock() - self._written.pop(name, float("-inf"))
        if age < self.stale_s / 2 or self._owned(name):  # no other worker takes so young a claim over
            self.files.remove(name)

    @contextmanager
    def heartbeat(self, *work: str | int) -> Iterator[None]:
        """Beat while the block runs, then release. The claim must be ours."""
        name, counts = Paths.claim(*work), itertools.count(1)

        def beat() -> None:
            with suppress(CacheError, OSError):  # a full disk may have space at the next beat
                if self._owned(name):  # no longer when another worker took over, or the unit is committed
                    self.files.replace(name, self.content(next(counts)))
                    self._written[name] = self._clock()

        try:
            with beating(beat, self.stale_s / BEATS, "claim"):
                yield
        finally:  # without permission the claim becomes stale; an error of the block is more important
            with suppress(CacheError):
                self.release(*work)

    def content(self, beat: int) -> bytes:
        fields: dict[str, object] = {"owner": self.token, "beat": beat, **self.place}
        if progress := self.progress():
            fields["progress"] = progress
        return json.dumps(fields).encode() + b"\n"

    def _owned(self, name: str) -> bool:
        content = self.read(name)
        return content is not None and parse_claim(content).get("owner") == self.token

    def read(self, name: str) -> bytes | None:
        try:
            return self.files.read(name)
        except CacheError:
            return None


def sweep(cache: Cache, plans: list[WorkList]) -> int:
    """Remove claims of committed units, whose owners died before they released them. Returns how many."""
    count = 0
    for plan in plans:
        folder = Paths.claims(plan.encoding, plan.number)
        names = [name for name in cache.files.names(folder) if name.endswith(".json")]
        if names:
            done = index.committed(cache.files, plan.encoding, plan.number)
            for name in names:
                if name.removesuffix(".json") in done:
                    cache.files.remove(f"{folder}/{name}")
                    count += 1
    return count


def parse_claim(content: bytes) -> dict[str, object]:
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}
