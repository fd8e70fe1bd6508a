"""A table of scores from beside, joined to a large cache: what that costs.

A source of 10^6 pictures (10^5 with --quick), and a Parquet file with a score, a tag and a list of votes of each, in
another order, keyed by file name stem; a hundredth of its keys name nothing. `bucket --metadata` with a filter on the
score runs in a process of its own. scores_wrong: samples that are not those of a filter by numpy. scores_mib: its
largest private memory (`large_cache.cost`; mapped files do not count); scores_cpu_s: its CPU time; plain_cpu_s: that of
`bucket` with a filter on metadata of the source; scores_join_cpu_s: the difference, which is the join.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import large_cache
from benchmarks.report import part_of_lab
from sana_pipe.base.processes import run_and_exit
from sana_pipe.data.cache.cache import Cache

PICTURES, QUICK = 1_000_000, 100_000
ABOVE = 5.0
"""Samples of a higher score are used."""
WANTED = {"scores_wrong": "== 0", "scores_mib": "<= 600", "scores_join_cpu_s": "<= 10"}


def measure(quick: bool, folder: Path) -> dict[str, float]:
    """The figures of the module's docstring. folder: an empty one."""
    count = QUICK if quick else PICTURES
    large_cache.build(folder, count)
    scores = write(folder / large_cache.SCORES, count)
    plain = large_cache.cost("filter", folder, count)
    cost = large_cache.cost("scores", folder, count)
    return {
        "scores_wrong": float(wrong(Cache(large_cache.configuration(folder).cache), scores)),
        "scores_mib": cost.own / 2**20,
        "scores_cpu_s": cost.cpu,
        "plain_cpu_s": plain.cpu,
        "scores_join_cpu_s": cost.cpu - plain.cpu,
    }


def write(file: Path, count: int) -> np.ndarray:
    """Write the table; returns the scores of the pictures by their number, (count,) fp64."""
    rng = np.random.default_rng(1)
    scores, order = rng.uniform(0, 10, count), rng.permutation(count)
    keys = [f"{number:09d}" if number % 100 else f"none-{number}" for number in order.tolist()]
    votes = rng.integers(0, 5, (count, 3)).tolist()
    table = {"id": keys, "quality": scores[order], "tag": [f"t{number % 50}" for number in order.tolist()]}
    pq.write_table(pa.table({**table, "votes": votes}), file)
    return scores


def wrong(cache: Cache, scores: np.ndarray) -> int:
    """Count the samples that are missing in the snapshot, or are in it though their score is not above `ABOVE`."""
    named = np.arange(len(scores)) % 100 > 0
    wanted, found = named & (scores > ABOVE), np.zeros(len(scores), bool)
    for names in cache.open_snapshot().name_tables():
        found[[int(item[-13:-4]) for item in names.column("item").to_pylist()]] = True
    return int(np.count_nonzero(wanted != found))


if __name__ == "__main__":
    run_and_exit(partial(part_of_lab, __doc__, measure, WANTED))
