"""The order of packed snapshots: the laws of every order, and that blocks are read one window after the other."""

from __future__ import annotations

from collections import Counter, defaultdict
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sana_pipe.data.loader import schedule as module
from sana_pipe.data.loader.schedule import Blocks, Schedule
from tests.support.parameters import first_quick
from tests.support.schedules import cases, mixes, order_digest, walk

lies = st.builds(Blocks, st.integers(1, 12), st.integers(1, 5))


@given(st.integers(1, 3000), lies, st.integers(0, 2**40))
@settings(max_examples=80, deadline=None)
def test_a_block_permutation_is_a_bijection_whose_windows_are_whole_blocks(size: int, lie: Blocks, key: int) -> None:
    places = np.arange(size)
    result = lie.one_pass(places, size, "t", key)
    assert sorted(result.tolist()) == list(range(size))
    assert lie.one_pass(places[::-1], size, "t", key).tolist() == result[::-1].tolist(), "depends on its company"
    spans: dict[int, list[int]] = defaultdict(list)
    for place, position in enumerate(result.tolist()):
        spans[position // lie.block].append(place)
    assert max(max(span) - min(span) for span in spans.values()) < lie.block * lie.window


def test_the_short_block_and_every_block_come_early_and_late() -> None:
    lie = Blocks(10, 2)
    at = [int(np.flatnonzero(lie.one_pass(np.arange(95), 95, "t", key) == 94)[0]) for key in range(60)]
    assert min(at) < 20 and max(at) > 75


@given(cases, st.lists(lies, min_size=5, max_size=5), st.integers(0, 99))
@settings(max_examples=8, deadline=None)
def test_exactly_once_and_fair_under_carry(buckets: list[tuple[int, int]], lie: list[Blocks], seed: int) -> None:
    counts, batches = [n for n, _ in buckets], [b for _, b in buckets]
    schedule = Schedule(counts, batches, seed=seed, phase=0, remainder="carry", orders=lie[: len(counts)])
    plain = Schedule(counts, batches, seed=seed, phase=0, remainder="carry")
    seen: dict[int, Counter[tuple[int, int]]] = {b: Counter() for b in range(len(buckets))}
    for epoch in range(8):
        assert schedule.steps_upto(epoch) == plain.steps_upto(epoch)
    for bucket, positions, visits in walk(schedule, schedule.steps_upto(8)):
        seen[bucket].update(zip(positions, visits, strict=True))
    for bucket, (count, batch) in enumerate(buckets):
        assert all(n == 1 for n in seen[bucket].values()), "a sample was visited twice in one epoch"
        total = len(seen[bucket])
        assert 0 <= 8 * count - total < batch
        each = Counter(position for position, _ in seen[bucket])
        if total >= count:
            assert max(each.values()) - min(each[i] for i in range(count)) <= 1


@given(mixes, lies, st.sampled_from(["carry", "drop"]), st.integers(0, 99))
@settings(max_examples=10, deadline=None)
def test_weights_and_policies_give_every_sample_its_visits(
    buckets: list[tuple[list[tuple[int, Fraction]], int]], lie: Blocks, small: str, seed: int
) -> None:
    """Oracle: the plain order of the same snapshot. Over each epoch, each part of each bucket has as many visits."""
    counts, batches = [sum(n for n, _ in parts) for parts, _ in buckets], [batch for _, batch in buckets]
    options = {"seed": seed, "phase": 0, "remainder": small, "parts": [parts for parts, _ in buckets]}
    try:
        plain = Schedule(counts, batches, **options)
    except ValueError:
        return
    schedule = Schedule(counts, batches, orders=[lie] * len(counts), **options)
    done, numbers = 0, set()
    visited: dict[int, Counter[int]] = {b: Counter() for b in range(len(buckets))}
    for epoch in range(6):
        begin, end = plain.steps_upto(epoch), plain.steps_upto(epoch + 1)
        assert (schedule.steps_upto(epoch), schedule.steps_upto(epoch + 1)) == (begin, end)
        steps = [schedule.step(t) for t in range(begin, end)]
        assert Counter(s.bucket for s in steps) == Counter(plain.step(t).bucket for t in range(begin, end))
        for s in steps:
            numbers |= {(s.bucket, *pair) for pair in zip(s.positions.tolist(), s.visits.tolist(), strict=True)}
            visited[s.bucket].update(s.positions.tolist())
            done += len(s.positions)
    assert len(numbers) == done, "two visits of a sample have the same number, so the same noise"
    for (parts, batch), seen in zip(buckets, visited.values(), strict=True):
        at = 0
        for samples, weight in parts:
            due = 6 * samples * weight
            result = [seen[i] for i in range(at, at + samples)]
            at += samples
            assert sum(result) <= due
            if small == "carry":
                assert sum(result) > due - batch - 1


@pytest.mark.parametrize("small", first_quick("carry", "drop"))
def test_a_block_is_open_for_two_windows_at_most(small: str) -> None:
    counts, batches, lie = [1000, 333, 90], [8, 6, 4], [Blocks(32, 4), Blocks(20, 3), Blocks(50, 2)]
    schedule = Schedule(counts, batches, seed=1, phase=0, remainder=small, orders=lie)
    batches_seen = Counter[int]()
    first: dict[tuple[int, int, int], int] = {}
    fetched = Counter[tuple[int, int, int]]()
    for t in range(schedule.steps_upto(4)):
        step = schedule.step(t)
        at = batches_seen[step.bucket] * batches[step.bucket]
        batches_seen[step.bucket] += 1
        for position, visit in zip(step.positions.tolist(), step.visits.tolist(), strict=True):
            block = (step.bucket, position // lie[step.bucket].block, visit)
            span = lie[step.bucket].block * lie[step.bucket].window + 2 * batches[step.bucket]
            assert at - first.setdefault(block, at) <= span + batches[step.bucket]
            fetched[block] += 1
    assert len({b for b in fetched if b[2] == 0}) == 32 + 17 + 2


def test_buckets_take_turns_evenly() -> None:
    schedule = Schedule([6400, 1600, 10], [8, 8, 8], seed=0, phase=0, remainder="carry", orders=[Blocks(64, 4)] * 3)
    steps = schedule.steps_upto(1)
    buckets = [schedule.step(t).bucket for t in range(steps)]
    for start in range(0, steps - 128, 64):
        share = Counter(buckets[start : start + 128])
        assert 16 <= share[1] <= 36, "a fifth of the batches is of the second bucket, everywhere"
    places = set()
    for seed in range(24):
        other = Schedule([640, 160, 10], [8, 8, 8], seed=seed, phase=0, remainder="drop", orders=[Blocks(64, 4)] * 3)
        places.add(next(t for t in range(101) if other.step(t).bucket == 2) * 4 // 101)
    assert places == {0, 1, 2, 3}, "a rare bucket has no fixed place"


def test_every_epoch_seed_and_phase_is_another_order() -> None:
    def blocks_of(epoch: int, seed: int, phase: int) -> list[int]:
        schedule = Schedule([640], [8], seed=seed, phase=phase, remainder="carry", orders=[Blocks(32, 2)])
        return [int(p) // 32 for t in range(80 * epoch, 80 * epoch + 80) for p in schedule.step(t).positions]

    orders = [tuple(blocks_of(*key)) for key in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))]
    assert len(set(orders)) == 4
    first = [order[:64] for order in orders]
    assert len({frozenset(order) for order in first}) > 1, "the same blocks come first"


def test_a_late_step_of_a_large_snapshot_needs_nothing_before_it() -> None:
    lie = [Blocks(128, 4)] * 2
    schedule = Schedule([10**9, 12345], [64, 64], seed=0, phase=0, remainder="carry", orders=lie)
    plan = schedule.step(10**12)
    assert plan.epoch == schedule.epoch_of(10**12) and len(set(plan.positions.tolist())) == 64
    assert len(set((plan.positions // 128).tolist())) <= 8


def test_block_orders_are_kept() -> None:
    """Written down: an order that changed between releases would break every resume."""
    counts, batches, lie = [17, 3, 64, 1000], [4, 8, 16, 7], [Blocks(4, 2), Blocks(8, 4), Blocks(9, 3), Blocks(33, 4)]
    result = {
        small: order_digest(Schedule(counts, batches, seed=3, phase=1, remainder=small, orders=lie)) for small in GOLDEN
    }
    assert result == GOLDEN


GOLDEN = {
    "carry": "91d6281d4a0139be64ddec705678103a",
    "drop": "2a787cd02ebd168f81e32f0e159ab49b",
}


def test_the_laws_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: a plain permutation in the place of the block permutation leaves blocks open all the time."""
    monkeypatch.setattr(module.Blocks, "one_pass", lambda self, index, size, *key: module.permute(index, size, *key))
    with pytest.raises(AssertionError):
        test_a_block_is_open_for_two_windows_at_most("carry")
