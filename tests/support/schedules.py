"""Orders of training as lists and digests."""

from __future__ import annotations

from fractions import Fraction

import xxhash
from hypothesis import strategies as st

from sana_pipe.data.loader.schedule import Schedule


def walk(schedule: Schedule, steps: int) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    plans = [schedule.step(t) for t in range(steps)]
    return [(p.bucket, tuple(p.positions.tolist()), tuple(p.visits.tolist())) for p in plans]


cases = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12)), min_size=1, max_size=5)


def order_digest(schedule: Schedule) -> str:
    """Over the first steps and two late ones."""
    state = xxhash.xxh3_128()
    for t in [*range(300), 10**6, 10**9 + 7]:
        p = schedule.step(t)
        state.update(repr((p.step, p.epoch, p.bucket, p.positions.tolist(), p.visits.tolist())).encode())
    return state.hexdigest()


WEIGHTS = st.sampled_from([Fraction(1, 10), Fraction(1, 4), Fraction(1, 2), Fraction(1), Fraction(3, 2), Fraction(3)])
mixes = st.lists(
    st.tuples(st.lists(st.tuples(st.integers(1, 25), WEIGHTS), min_size=1, max_size=3), st.integers(1, 9)),
    min_size=1,
    max_size=3,
)
