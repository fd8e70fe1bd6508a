"""Fetching ahead: the shards of coming steps are brought into the mirror while training goes on.

What: `Fetcher` follows the training order some way ahead of the loader and opens each shard that comes, which fetches
it.
Why: in a packed snapshot all shards of a window are needed at once when it begins; fetched only then, the run waits for
whole shards every few steps.
Price: coming steps are planned twice. Shards that are fetched and not needed yet take at most half of the mirror, so
that the other half is left to those that are being read.

An error is left to the loader, which meets it at the batch that it belongs to.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping

from pipeline.amounts import amount
from pipeline.cache.files import Files
from pipeline.cache.snapshot import Snapshot

STEPS = 1024
"""Steps that are planned ahead at most; all of them, once the mirror holds everything."""
_THREADS = 2


def advice(snapshot: Snapshot) -> str | None:
    """What to say of a mirror that is too small for a packed snapshot; None if it will do.

    Two windows of each bucket may be open at a time, and half of the mirror is for what is fetched ahead.
    """
    room, files = snapshot.files.room, snapshot.shard_files()
    if room is None or not snapshot.packed:
        return None
    window = snapshot.head["policies"]["packed"]["window"]
    mean = sum(files.values()) / len(files)
    shards = sum(min(2 * window, -(-b["samples"] // b["block"])) for b in snapshot.head["buckets"])
    wanted = min(sum(files.values()), 2 * shards * mean)
    if room >= wanted:
        return None
    return (
        f"the mirror holds {amount(room)}; with less than {amount(wanted)} (mirror.gib) some shards of "
        "this packed snapshot are fetched more than once per epoch"
    )


class ShardPrefetch:
    """Opens the shards of steps first, first + 1, ... in threads.

    Args:
        files: the cache; `room` says how much of it can be kept here.
        sizes: bytes of every shard that may come, by the file's name.
        needed: step -> names of the shards that it reads.
        first, stop: the first step, and the one before which to stop (None: never).
    """

    def __init__(
        self, files: Files, sizes: Mapping[str, int], needed: Callable[[int], list[str]], first: int, stop: int | None
    ):
        assert files.room is not None
        self._files, self._sizes, self._needed, self._stop = files, sizes, needed, stop
        self._limit = files.room // 2
        self._next = self._reached = first
        self._ahead: dict[str, int] = {}  # fetched for a step that was not reached yet
        self._seen: OrderedDict[str, int] = OrderedDict()  # shards that the mirror should hold, oldest first
        self._waiting: list[tuple[str, int]] = []
        self._closed = False
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=self._run, name=f"fetch-{i}", daemon=True) for i in range(_THREADS)]
        for thread in self._threads:
            thread.start()

    def reached(self, step: int) -> None:
        """The loader begins a step: what was fetched for it, and for those before, no longer counts as ahead."""
        with self._changed:
            self._reached = max(self._reached, step)
            self._ahead = {name: own for name, own in self._ahead.items() if own > self._reached}
            self._changed.notify_all()

    def close(self) -> None:
        """Stop. A fetch in progress is left behind; it ends by itself or with the process."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                if not self._waiting and self._may_plan():
                    self._plan()  # one step, so that the loader never waits long for the lock
                    continue
                if not self._waiting or not self._fits(*self._waiting[0]):
                    self._changed.wait()
                    continue
                name = self._take()
            try:
                self._files.open(name)
            except Exception:
                continue

    def _may_plan(self) -> bool:
        return (self._stop is None or self._next < self._stop) and self._next - self._reached < STEPS

    def _plan(self) -> None:
        """Put the shards of one more step in line, but for those that the mirror should hold."""
        step = self._next
        self._next += 1
        try:
            names = self._needed(step)
        except Exception:
            return
        for name in names:
            if name in self._seen:
                self._seen.move_to_end(name)
            else:
                self._waiting.append((name, step))
        self._changed.notify_all()

    def _fits(self, name: str, step: int) -> bool:
        held = sum(self._sizes[other] for other in self._ahead)
        return step <= self._reached or not self._ahead or held + self._sizes[name] <= self._limit

    def _take(self) -> str:
        """The first in line, which fits."""
        name, step = self._waiting.pop(0)
        if step > self._reached:
            self._ahead[name] = step
        self._seen[name] = self._sizes[name]
        while sum(self._seen.values()) > 2 * self._limit:
            self._seen.popitem(last=False)
        return name
