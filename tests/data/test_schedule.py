"""The order of training, against an oracle that is a few lines long."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from math import floor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sana_pipe.data.loader.schedule import Schedule, permute
from tests.support.schedules import cases, mixes, order_digest, walk


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
    for few in (0, 1, 100):
        assert permute(np.arange(few), 1000, "samples", 3).dtype == np.int64
    spots = permute(np.array([0, 10**9 - 1]), 10**9, "samples", 3)
    assert len(set(spots.tolist())) == 2 and spots.max() < 10**9


@given(cases, st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_exactly_once_under_carry(buckets: list[tuple[int, int]], seed: int) -> None:
    counts, batches = [n for n, _ in buckets], [b for _, b in buckets]
    schedule = Schedule(counts, batches, seed=seed, phase=0, remainder="carry")
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
@settings(max_examples=10, deadline=None)
def test_exactly_once_under_drop(buckets: list[tuple[int, int]], seed: int) -> None:
    counts, batches = [n for n, _ in buckets], [b for _, b in buckets]
    if all(n < b for n, b in buckets):
        with pytest.raises(ValueError, match="no bucket"):
            Schedule(counts, batches, seed=seed, phase=0, remainder="drop")
        return
    schedule = Schedule(counts, batches, seed=seed, phase=0, remainder="drop")
    for epoch in range(50):
        seen: dict[int, Counter[int]] = {b: Counter() for b in range(len(buckets))}
        for step in range(schedule.steps_upto(epoch), schedule.steps_upto(epoch + 1)):
            plan = schedule.step(step)
            assert plan.epoch == epoch and set(plan.visits.tolist()) == {epoch}
            seen[plan.bucket].update(plan.positions.tolist())
        for bucket, (count, batch) in enumerate(buckets):
            assert sum(seen[bucket].values()) == count // batch * batch
            assert all(n == 1 for n in seen[bucket].values())


def test_epochs_are_reshuffled_and_buckets_are_mixed() -> None:
    schedule = Schedule([64, 64], [8, 8], seed=0, phase=0, remainder="carry")
    steps = schedule.steps_upto(1)
    order = walk(schedule, 2 * steps)
    assert order[:steps] != order[steps:]
    assert [b for b, _, _ in order[:steps]] not in ([0] * 8 + [1] * 8, [1] * 8 + [0] * 8)
    other = walk(Schedule([64, 64], [8, 8], seed=1, phase=0, remainder="carry"), steps)
    phase = walk(Schedule([64, 64], [8, 8], seed=0, phase=1, remainder="carry"), steps)
    assert order[:steps] != other and order[:steps] != phase


def test_a_late_step_needs_nothing_before_it() -> None:
    schedule = Schedule([10**9, 12345], [64, 64], seed=0, phase=0, remainder="carry")
    plan = schedule.step(10**12)
    assert plan.epoch == schedule.epoch_of(10**12) and len(plan.positions) == 64
    assert schedule.steps_upto(plan.epoch) <= 10**12 < schedule.steps_upto(plan.epoch + 1)


def test_the_oracle_can_fail() -> None:
    """Sabotage: a schedule that forgets to move on within an epoch repeats samples, and the check sees it."""

    class Stuck(Schedule):
        def step(self, step: int):  # type: ignore[no-untyped-def]
            return super().step(0)

    seen = Counter(
        p for _, positions, _ in walk(Stuck([16], [4], seed=0, phase=0, remainder="carry"), 4) for p in positions
    )
    assert max(seen.values()) > 1


# ---------------------------------------------------------------- orders that never change


@pytest.mark.parametrize(
    ("small", "counts", "batches", "expected"),
    [
        ("carry", [17, 3, 64, 1000], [4, 8, 16, 7], "655d42f5d60e5e613d19de6503588c66"),
        ("carry", [12345], [64], "84b9666ff56f03a8aeab713f49fcf9e9"),
        ("carry", [40000, 7], [64, 4], "795c3f0d18f62452abf030918045ba48"),
        ("carry", [5, 5, 5], [2, 2, 2], "09b9bbc297e5b2d9297846070f3c0c18"),
        ("drop", [17, 3, 64, 1000], [4, 8, 16, 7], "50ac082b4c63c2018c2a3966bbec361b"),
        ("drop", [12345], [64], "5581ad4a1984921e731c310af14c96b4"),
        ("drop", [5, 5, 5], [2, 2, 2], "cc1fefcbcf8ad77029107badd7be74be"),
    ],
)
def test_orders_of_earlier_versions_are_kept(small: str, counts: list[int], batches: list[int], expected: str) -> None:
    """Written down before weights existed: a snapshot made then trains in the same order now."""
    assert order_digest(Schedule(counts, batches, seed=3, phase=1, remainder=small)) == expected


def test_weighted_orders_are_kept() -> None:
    parts = [[(10, Fraction(3, 2)), (7, Fraction(1, 4))], None, [(40, Fraction(1))]]
    options = {"seed": 3, "phase": 1, "parts": parts}
    result = {small: order_digest(Schedule([17, 30, 40], [4, 8, 16], remainder=small, **options)) for small in WEIGHTED}
    assert result == WEIGHTED


WEIGHTED = {
    "carry": "3c52b15bc2e0b870221cb93e5585ffdc",
    "drop": "ceb3753d51d0354b5001c917989d7027",
}

# ---------------------------------------------------------------- weights


def mixed(buckets: list[tuple[list[tuple[int, Fraction]], int]], small: str, seed: int) -> Schedule | None:
    """None where no bucket ever fills a batch."""
    counts, batches = [sum(n for n, _ in parts) for parts, _ in buckets], [batch for _, batch in buckets]
    try:
        parts = [parts for parts, _ in buckets]
        return Schedule(counts, batches, seed=seed, phase=0, remainder=small, parts=parts)
    except ValueError:
        assert small == "drop"
        return None


@given(mixes, st.sampled_from(["carry", "drop"]), st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_weights_are_exact(buckets: list[tuple[list[tuple[int, Fraction]], int]], small: str, seed: int) -> None:
    """Oracle: part k of n samples has had floor(E n w) visits after E epochs, spread evenly; nothing else is seen."""
    schedule = mixed(buckets, small, seed)
    if schedule is None:
        return
    epochs = 50 if small == "carry" else 10
    seen = [Counter[int]() for _ in buckets]
    numbers: set[tuple[int, int, int]] = set()
    done = 0
    for epoch in range(epochs):
        whole = [0] * len(buckets)
        for step in range(schedule.steps_upto(epoch), schedule.steps_upto(epoch + 1)):
            plan = schedule.step(step)
            assert (plan.step, plan.epoch, len(plan.positions)) == (step, epoch, buckets[plan.bucket][1])
            seen[plan.bucket].update(plan.positions.tolist())
            whole[plan.bucket] += 1
            done += len(plan.positions)
            numbers |= {
                (plan.bucket, *pair) for pair in zip(plan.positions.tolist(), plan.visits.tolist(), strict=True)
            }
        for (parts, batch), count in zip(buckets, whole, strict=True):
            due = sum(floor((epoch + 1) * n * w) - floor(epoch * n * w) for n, w in parts)
            if small == "drop":
                assert count == due // batch
    assert len(numbers) == done, "two visits of a sample have the same number, so the same noise"
    for (parts, batch), counted in zip(buckets, seen, strict=True):
        first = 0
        for samples, weight in parts:
            due = floor(epochs * samples * weight)
            visits = [counted[i] for i in range(first, first + samples)]
            first += samples
            if small == "carry":
                assert due - batch < sum(visits) <= due, "more than the stated remainder is missing"
                assert min(visits) >= due // samples - batch
            else:
                assert sum(visits) <= due
        assert not set(counted) - set(range(first))


def test_whole_parts_are_seen_evenly_at_every_epoch_end() -> None:
    parts = [(8, Fraction(1, 2)), (4, Fraction(3))]
    schedule = Schedule([12], [4], seed=0, phase=0, remainder="carry", parts=[parts])
    seen: Counter[int] = Counter()
    for epoch in range(20):
        for step in range(schedule.steps_upto(epoch), schedule.steps_upto(epoch + 1)):
            seen.update(schedule.step(step).positions.tolist())
        slow, fast = [seen[i] for i in range(8)], [seen[i] for i in range(8, 12)]
        assert sum(slow) == 4 * (epoch + 1) and max(slow) - min(slow) <= 1
        assert fast == [3 * (epoch + 1)] * 4


def test_a_late_step_of_a_weighted_stream_needs_nothing_before_it() -> None:
    parts = [(10**9, Fraction(1, 1000)), (12345, Fraction(333, 1000)), (3, Fraction(7))]
    for small in ("carry", "drop"):
        schedule = Schedule([10**9 + 12348], [64], seed=0, phase=0, remainder=small, parts=[parts])
        plan = schedule.step(10**12)
        assert plan.epoch == schedule.epoch_of(10**12) and len(plan.positions) == 64
        assert schedule.steps_upto(plan.epoch) <= 10**12 < schedule.steps_upto(plan.epoch + 1)


def test_parts_that_do_not_add_up_are_refused() -> None:
    for parts in ([(3, Fraction(1))], [(4, Fraction(0))]):
        with pytest.raises(ValueError, match="its parts are"):
            Schedule([4], [2], seed=0, phase=0, remainder="carry", parts=[parts])
