"""Claims: who is at which unit of work, so that idle workers take what nobody is doing.

What: `take` puts `claims/<recipe>/<plan>/<unit>.json` (of a piece of a scan: `claims/fragments/<source>/<piece>.json`)
if it is absent; a thread replaces it with a higher beat while the work is done; `release` removes it. A claim that did
not change for `stale_s` seconds of the observer's own monotonic clock belongs to nobody: a file's time and another
machine's clock are never compared with ours. A claim of this machine whose process is gone belongs to nobody at once.
Why: without claims every worker that has run out of work encodes the last units of the others once more.
Price: a small file is written per unit, and one more every `stale_s / BEATS` seconds. Claims are advice: two workers
may come to hold one (one of them was stopped, or both saw it grow stale); both encode, and the commit, which is
put-if-absent, takes the first. So nothing here needs to be right for the cache to be right.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal

from pipeline.cache import index, process_identity
from pipeline.cache.files import Files
from pipeline.cache.layout import Paths
from pipeline.cache.store import Cache, Plan
from pipeline.errors import CacheError, IntegrityError

BEATS = 6
"""Beats in the time after which a claim is stale: five may be lost to a slow file system."""

State = Literal["free", "mine", "held", "moving"]
"""What an observer knows of a unit: nobody has it; it is ours; it has an owner; its owner was seen to beat."""


class Claims:
    """The claims of one process. `work` names what is claimed, as `Paths.claim` takes it.

    Args:
        stale_s: a claim without a change for so long is nobody's.
        clock: a monotonic clock.
    """

    def __init__(self, files: Files, stale_s: float, clock: Callable[[], float] = time.monotonic):
        self.files, self.stale_s, self._clock = files, stale_s, clock
        self.token = uuid.uuid4().hex
        self._place = process_identity.place()
        self._seen: dict[str, tuple[bytes, float]] = {}

    def state(self, *work: str | int) -> State:
        """Look at a claim and remember what it says. `moving`: it changed since the last look."""
        name = Paths.claim(*work)
        content = self._read(name)
        if content is None:
            self._seen.pop(name, None)
            return "free"
        said = _parsed(content)
        if said.get("owner") == self.token:
            return "mine"
        now, before = self._clock(), self._seen.get(name)
        if before is None or before[0] != content:
            self._seen[name] = (content, now)
            return "free" if self._dead(said) else "held" if before is None else "moving"
        return "free" if now - before[1] >= self.stale_s or self._dead(said) else "held"

    def take(self, *work: str | int) -> State:
        """Claim a unit that nobody has, or whose claim is stale: `mine`. Else what is known of it."""
        found = self.state(*work)
        if found != "free":
            return found
        name, content = Paths.claim(*work), self._content(0)
        try:
            if self.files.put(name, content):
                return "mine"
        except IntegrityError:  # swept between the put and its reading back: the work is done
            return "held"
        before = self._read(name)
        seen = self._seen.get(name)
        if before is None or seen is None or before != seen[0]:
            return "held"  # somebody was quicker: look again later
        self.files.replace(name, content)
        self._seen.pop(name, None)
        return "mine" if self._read(name) == content else "held"

    def release(self, *work: str | int) -> None:
        """Remove the claim if it is still ours."""
        name = Paths.claim(*work)
        if self._owned(name):
            self.files.remove(name)

    @contextmanager
    def held(self, *work: str | int) -> Iterator[None]:
        """Beat while the block runs, then release. For a unit that `take` gave us."""
        name, done = Paths.claim(*work), threading.Event()

        def beat() -> None:
            count = 0
            while not done.wait(self.stale_s / BEATS):
                count += 1
                try:
                    found = self._read(name)
                    if found is None:
                        continue  # it cannot be read just now, or the work is done and somebody swept
                    if _parsed(found).get("owner") != self.token:
                        return  # we were thought dead and somebody took over: their claim stays
                    self.files.replace(name, self._content(count))
                except (CacheError, OSError):
                    continue  # a disk that is full now may have room at the next beat

        thread = threading.Thread(target=beat, name="claim", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            with suppress(CacheError):  # permission lost: it grows stale; the error that is on its way counts
                self.release(*work)

    def _content(self, beat: int) -> bytes:
        return json.dumps({"owner": self.token, "beat": beat, **self._place}, sort_keys=True).encode() + b"\n"

    def _owned(self, name: str) -> bool:
        content = self._read(name)
        return content is not None and _parsed(content).get("owner") == self.token

    def _read(self, name: str) -> bytes | None:
        try:
            return self.files.read(name)
        except CacheError:
            return None

    def _dead(self, said: dict[str, object]) -> bool:
        """True if the owner was a process of this very machine that has ended."""
        if not self._place or said.get("machine") != self._place["machine"]:
            return False
        return process_identity.ended(str(said.get("process")), str(said.get("started")))


def sweep(cache: Cache, plans: list[Plan]) -> int:
    """Remove claims of units that are committed (their owners died in between). Returns how many."""
    count = 0
    for plan in plans:
        folder = Paths.claims(plan.recipe, plan.number)
        left = [name for name in cache.files.names(folder) if name.endswith(".json")]
        if left:
            done = index.committed(cache.files, plan.recipe, plan.number)
            for name in left:
                if name.removesuffix(".json") in done:
                    cache.files.remove(f"{folder}/{name}")
                    count += 1
    return count


def _parsed(content: bytes) -> dict[str, object]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
