"""Which shards are fetched ahead of training, and in what order."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sana_pipe.data.loader import shard_prefetch
from sana_pipe.data.loader.shard_prefetch import FetchQueue, ShardPrefetch

WAIT_S = 30.0


@pytest.mark.parametrize(("room", "enough"), [(12 * 30, True), (12 * 30 - 1, False)])
def test_a_mirror_holds_two_windows_of_each_bucket_and_as_much_ahead(room: int, enough: bool) -> None:
    buckets = [SimpleNamespace(samples=40, block=10), SimpleNamespace(samples=15, block=10)]
    snapshot: Any = SimpleNamespace(
        files=SimpleNamespace(room=room),
        head=SimpleNamespace(policies=SimpleNamespace(packed=SimpleNamespace(window=2))),
        buckets=[*buckets, SimpleNamespace(samples=9, block=None)],
        shard_sizes=lambda: np.array([20, 40] * 20),
    )
    assert (shard_prefetch.advice(snapshot) is None) == enough
    snapshot.shard_sizes = lambda: np.array([30])
    assert shard_prefetch.advice(snapshot) is None, "the mirror holds the whole snapshot"


def drain(queue: FetchQueue) -> list[str]:
    """What is fetched before the loader reaches another step."""
    taken: list[str] = []
    while True:
        if (name := queue.take()) is not None:
            taken.append(name)
        elif queue.may_plan():
            queue.plan()
        else:
            return taken


def test_shards_come_in_the_order_of_the_steps_each_once() -> None:
    steps = [{"a": 1, "b": 1}, {"b": 1, "c": 1}, {"a": 1}, {"d": 1}]
    queue = FetchQueue(100, steps.__getitem__, 0, len(steps))
    assert drain(queue) == ["a", "b", "c", "d"]


def test_it_begins_at_the_first_step_and_ends_before_the_last() -> None:
    asked: list[int] = []

    def needed(step: int) -> Mapping[str, int]:
        asked.append(step)
        return {f"s{step}": 1}

    queue = FetchQueue(100, needed, 3, 6)
    assert drain(queue) == ["s3", "s4", "s5"]
    assert asked == [3, 4, 5]


def test_no_more_than_half_of_the_mirror_is_fetched_ahead() -> None:
    queue = FetchQueue(100, lambda step: {f"s{step}": 10}, 0, None)
    assert drain(queue) == ["s0", *(f"s{n}" for n in range(1, 6))], "s0 is not ahead, five others are half of 100"
    queue.reached(1)
    assert drain(queue) == ["s6"], "s1 is not ahead any more"
    queue.reached(4)
    assert drain(queue) == ["s7", "s8", "s9"]
    queue.reached(2)
    assert drain(queue) == [], "a thread that reports an earlier step changes nothing"


def test_a_shard_larger_than_half_is_fetched_when_no_other_is_ahead() -> None:
    queue = FetchQueue(100, lambda step: {f"s{step}": 60}, 0, None)
    assert drain(queue) == ["s0", "s1"]
    queue.reached(1)
    assert drain(queue) == ["s2"]


def test_shards_of_a_step_that_is_reached_need_no_room() -> None:
    queue = FetchQueue(10, lambda step: {f"{step}{letter}": 5 for letter in "abcd"}, 0, 2)
    assert drain(queue) == ["0a", "0b", "0c", "0d", "1a"]
    queue.reached(1)
    assert drain(queue) == ["1b", "1c", "1d"]


def test_no_step_is_planned_while_shards_wait_or_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_prefetch, "STEPS", 5)
    asked: list[int] = []

    def needed(step: int) -> Mapping[str, int]:
        asked.append(step)
        return {"a": 1} if step < 10 else {f"s{step}": 60}

    queue = FetchQueue(100, needed, 0, None)
    drain(queue)
    assert asked == [*range(5)]
    queue.reached(8)
    assert drain(queue) == ["s10"]
    assert asked == [*range(12)], "s11 waits"


def test_a_step_that_cannot_be_planned_is_left_to_the_loader() -> None:
    def needed(step: int) -> Mapping[str, int]:
        if step == 1:
            raise OSError("no answer")
        return {f"s{step}": 1}

    assert drain(FetchQueue(100, needed, 0, 3)) == ["s0", "s2"]


def test_what_the_mirror_has_evicted_is_fetched_again() -> None:
    steps = [f"s{n}" for n in range(101)]
    queue = FetchQueue(100, lambda step: {steps[step % 101]: 1}, 0, None)
    taken = []
    for step in range(102):
        queue.reached(step)
        queue.plan()
        taken.append(queue.take())
    assert taken == [*steps, "s0"], "101 are more than 100"


def test_what_is_used_again_stays() -> None:
    """The mirror evicts what was opened longest ago; a shard that a step needs again is opened again."""
    used = [{"a": 40}, {"b": 40}, {"a": 40}, {"c": 40}, {"a": 40}, {"b": 40}]
    queue = FetchQueue(100, used.__getitem__, 0, len(used))
    taken = []
    for step in range(len(used)):
        queue.reached(step)
        taken.append(drain(queue))
    assert [name for names in taken for name in names] == ["a", "b", "c", "b"]


class Opened:
    """A mirror of 100 bytes that records what is opened. Shards whose name ends with 2 cannot be fetched."""

    room = 100

    def __init__(self) -> None:
        self.names: Counter[str] = Counter()
        self.changed = threading.Condition()

    def open(self, name: str, *, trust: bool) -> None:
        assert trust, "a shard is checked when its records are read"
        with self.changed:
            self.names[name] += 1
            self.changed.notify_all()
        if name.endswith("2"):
            raise OSError("no answer")

    def wait_for(self, *names: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: set(names) <= self.names.keys(), WAIT_S), self.names


@pytest.fixture
def opened() -> Iterator[tuple[Opened, ShardPrefetch]]:
    files: Any = Opened()
    others = set(threading.enumerate())
    prefetch = ShardPrefetch(files, lambda step: {f"s{step}": 10}, 0, 20)
    threads = set(threading.enumerate()) - others
    yield files, prefetch
    prefetch.close()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_threads_fetch_as_far_as_there_is_room_and_go_on_when_a_step_is_reached(
    opened: tuple[Opened, ShardPrefetch],
) -> None:
    files, prefetch = opened
    files.wait_for(*(f"s{n}" for n in range(6)))
    prefetch.reached(3)
    files.wait_for(*(f"s{n}" for n in range(9)))
    for step in range(4, 20):
        prefetch.reached(step)
    files.wait_for(*(f"s{n}" for n in range(20)))
    assert set(files.names.values()) == {1}, "also those that could not be fetched: the loader reports them"


def test_closing_ends_threads_that_wait_for_room(opened: tuple[Opened, ShardPrefetch]) -> None:
    files, _ = opened
    files.wait_for("s5")
    assert "s6" not in files.names
