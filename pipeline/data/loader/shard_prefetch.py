"""Shard prefetch: the shards of coming steps are fetched into the mirror while training goes on.

`ShardPrefetch` follows the training order ahead of the loader and opens each shard of the coming steps, which fetches
it. In a packed snapshot all shards of a window are needed at once when it begins; without prefetching, the run would
wait for whole shards every few steps.

Errors are ignored here: the loader meets them at the batch that they belong to.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress

from sana_pipe.base.amounts import amount
from sana_pipe.data.cache.files import Files
from sana_pipe.data.cache.snapshot import Snapshot

STEPS = 1024
"""Limit on the steps that are planned ahead."""
THREADS = 2
"""Fetches of one process at the same time."""


def advice(snapshot: Snapshot) -> str | None:
    """A warning about a mirror that is too small for a packed snapshot; None if it is large enough.

    Two windows of each bucket may be open at a time, and half of the mirror is for shards fetched ahead.
    """
    room, packed = snapshot.files.room, snapshot.head.policies.packed
    if room is None or packed is None:
        return None
    sizes = snapshot.shard_sizes()
    shards = sum(min(2 * packed.window, -(-b.samples // b.block)) for b in snapshot.buckets if b.block)
    needed = min(float(sizes.sum()), 2 * shards * float(sizes.mean()))
    if room >= needed:
        return None
    return (
        f"the mirror holds {amount(room)}; with less than {amount(needed)} (mirror.gib) some shards of "
        "this packed snapshot are fetched more than once per epoch"
    )


class FetchQueue:
    """The order in which shards are fetched: those of steps first, first + 1, ... in this order, as far ahead as half
    of the mirror goes. It fetches nothing and has no threads, so that a simulator can ask it, too.

    Args:
        room: size of the mirror in bytes.
        needed: step -> names of the shards that it reads, with their sizes in bytes.
        first, stop: the first step, and the step before which to stop (None: never).
    """

    def __init__(self, room: int, needed: Callable[[int], Mapping[str, int]], first: int, stop: int | None):
        self._needed, self._stop = needed, stop
        self._limit = room // 2
        self._next = self._reached = first
        self._ahead: dict[str, tuple[int, int]] = {}  # shard -> the step it was fetched for, not reached yet; its bytes
        self._mirrored: OrderedDict[str, int] = OrderedDict()  # shards that the mirror should hold, oldest first
        self._queue: list[tuple[str, int, int]] = []  # shard, bytes, step

    def reached(self, step: int) -> None:
        """The loader begins a step: shards fetched for it, and for earlier steps, no longer count as ahead."""
        self._reached = max(self._reached, step)
        self._ahead = {name: wanted for name, wanted in self._ahead.items() if wanted[0] > self._reached}

    def may_plan(self) -> bool:
        """Return whether the queue is empty and may be given the shards of another step."""
        more = self._stop is None or self._next < self._stop
        return not self._queue and more and self._next - self._reached < STEPS

    def plan(self) -> None:
        """Queue the shards of one more step, except those that the mirror should hold."""
        step = self._next
        self._next += 1
        try:
            names = self._needed(step)
        except Exception:
            return
        for name, size in names.items():
            if name in self._mirrored:
                self._mirrored.move_to_end(name)
            else:
                self._queue.append((name, size, step))

    def take(self) -> str | None:
        """Remove and return the first shard of the queue; None: the queue is empty, or the shard has no room yet."""
        if not self._queue or not self._fits(*self._queue[0]):
            return None
        name, size, step = self._queue.pop(0)
        if step > self._reached:
            self._ahead[name] = step, size
        self._mirrored[name] = size
        while sum(self._mirrored.values()) > 2 * self._limit:
            self._mirrored.popitem(last=False)
        return name

    def _fits(self, name: str, size: int, step: int) -> bool:
        ahead = sum(size for _, size in self._ahead.values())
        return step <= self._reached or not self._ahead or ahead + size <= self._limit


class ShardPrefetch:
    """Opens the shards of steps first, first + 1, ... in threads.

    Args:
        files: the cache; `room` is the size of its mirror in bytes.
        needed, first, stop: as for `FetchQueue`.
    """

    def __init__(self, files: Files, needed: Callable[[int], Mapping[str, int]], first: int, stop: int | None):
        assert files.room is not None
        self._files, self._queue = files, FetchQueue(files.room, needed, first, stop)
        self._closed = False
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=self._run, name=f"fetch-{i}", daemon=True) for i in range(THREADS)]
        for thread in self._threads:
            thread.start()

    def reached(self, step: int) -> None:
        """The loader begins a step."""
        with self._changed:
            self._queue.reached(step)
            self._changed.notify_all()

    def close(self) -> None:
        """Stop. A fetch in progress is abandoned; it ends by itself or with the process."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                if self._queue.may_plan():
                    self._queue.plan()  # one step, so that the loader never waits long for the lock
                    self._changed.notify_all()
                    continue
                name = self._queue.take()
                if name is None:
                    self._changed.wait()
                    continue
            with suppress(Exception):
                self._files.open(name, trust=True)
