"""The order of training, against an oracle that is a few lines long."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.schedule import Schedule, permute


@given(st.integers(1, 5000), st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_permutation_is_a_bijection(size: int, key: int) -> None:
    assert sorted(permute(np.arange(size), size, "t", key).tolist()) == list(range(size))


def test_permutation_depends_on_the_key_and_never_changes() -> None:
    one, other = permute(np.arange(1000), 1000, "samples", 0, 1), permute(np.arange(1000), 1000, "samples", 0, 2)
    assert (one != other).mean() > 0.9
    # Written down: an order that changed between releases would break every resume.
    assert permute(np.arange(8), 1000, "samples", 0, 1).tolist() == GOLDEN


GOLDEN = [207, 198, 230, 906, 754, 848, 882, 527]


def test_a_large_permutation_costs_nothing() -> None:
    spots = permute(np.array([0, 10**9 - 1]), 10**9, "samples", 3)
    assert len(set(spots.tolist())) == 2 and spots.max() < 10**9


def walk(schedule: Schedule, steps: int) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    plans = [schedule.step(t) for t in range(steps)]
    return [(p.bucket, tuple(p.positions.tolist()), tuple(p.visits.tolist())) for p in plans]


cases = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12)), min_size=1, max_size=5)


@given(cases, st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_exactly_once_under_carry(buckets: list[tuple[int, int]], seed: int) -> None:
    counts, batches = [n for n, _ in buckets], [b for _, b in buckets]
    schedule = Schedule(counts, batches, seed=seed, phase=0, small="carry")
    epochs = 50
    seen: dict[int, Counter[int]] = {b: Counter() for b in range(len(buckets))}
    visited: dict[int, set[tuple[int, int]]] = {b: set() for b in range(len(buckets))}
    for bucket, positions, visits in walk(schedule, schedule.steps_upto(epochs)):
        assert len(positions) == batches[bucket]
        seen[bucket].update(positions)
        for pair in zip(positions, visits, strict=True):
            assert pair not in visited[bucket], "a sample was visited twice in one epoch"
            visited[bucket].add(pair)
    for bucket, (count, batch) in enumerate(buckets):
        total = sum(seen[bucket].values())
        assert 0 <= epochs * count - total < batch, "more than the stated remainder is missing"
        if total >= count:
            visits = [seen[bucket][i] for i in range(count)]
            assert max(visits) - min(visits) <= 1


@given(cases, st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_exactly_once_under_drop(buckets: list[tuple[int, int]], seed: int) -> None:
    counts, batches = [n for n, _ in buckets], [b for _, b in buckets]
    if all(n < b for n, b in buckets):
        with pytest.raises(ValueError, match="no bucket"):
            Schedule(counts, batches, seed=seed, phase=0, small="drop")
        return
    schedule = Schedule(counts, batches, seed=seed, phase=0, small="drop")
    for epoch in range(3):
        seen: dict[int, Counter[int]] = {b: Counter() for b in range(len(buckets))}
        for step in range(schedule.steps_upto(epoch), schedule.steps_upto(epoch + 1)):
            plan = schedule.step(step)
            assert plan.epoch == epoch and set(plan.visits.tolist()) == {epoch}
            seen[plan.bucket].update(plan.positions.tolist())
        for bucket, (count, batch) in enumerate(buckets):
            assert sum(seen[bucket].values()) == count // batch * batch
            assert all(n == 1 for n in seen[bucket].values())


def test_epochs_are_reshuffled_and_buckets_are_mixed() -> None:
    schedule = Schedule([64, 64], [8, 8], seed=0, phase=0, small="carry")
    steps = schedule.steps_in(0)
    order = walk(schedule, 2 * steps)
    assert order[:steps] != order[steps:]
    assert [b for b, _, _ in order[:steps]] not in ([0] * 8 + [1] * 8, [1] * 8 + [0] * 8)
    other = walk(Schedule([64, 64], [8, 8], seed=1, phase=0, small="carry"), steps)
    phase = walk(Schedule([64, 64], [8, 8], seed=0, phase=1, small="carry"), steps)
    assert order[:steps] != other and order[:steps] != phase


def test_a_late_step_needs_nothing_before_it() -> None:
    schedule = Schedule([10**9, 12345], [64, 64], seed=0, phase=0, small="carry")
    plan = schedule.step(10**12)
    assert plan.epoch == schedule.epoch_of(10**12) and len(plan.positions) == 64
    assert schedule.steps_upto(plan.epoch) <= 10**12 < schedule.steps_upto(plan.epoch + 1)


def test_the_oracle_can_fail() -> None:
    """Sabotage: a schedule that forgets to move on within an epoch repeats samples, and the check sees it."""

    class Stuck(Schedule):
        def step(self, step: int):  # type: ignore[no-untyped-def]
            return super().step(0)

    seen = Counter(
        p for _, positions, _ in walk(Stuck([16], [4], seed=0, phase=0, small="carry"), 4) for p in positions
    )
    assert max(seen.values()) > 1
