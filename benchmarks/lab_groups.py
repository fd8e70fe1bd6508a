"""Groups of pictures in a large cache: no artist on both sides of the held-out part, and what that costs.

A source of 10^6 pictures (10^5 with --quick) of artists with twenty each. A tenth has no artist, a hundredth is an
equal file of another picture, and half as many name two artists. `bucket` holds a tenth out by whole groups, in a
process of its own. groups_leaks: artists and files that both snapshots have. groups_mib: its largest private memory
(`large_cache.cost`; mapped files do not count), with what it begins with; groups_cpu_s: its CPU time. plain_mib: the
memory of `bucket` without groups.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks import large_cache
from benchmarks.report import part_of_lab
from sana_pipe.base.processes import run_and_exit
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.keys import binary, fixed

PICTURES, QUICK = 1_000_000, 100_000
PER_ARTIST = 20
WANTED = {"groups_leaks": "== 0", "groups_mib": "<= 600"}


def measure(quick: bool, folder: Path) -> dict[str, float]:
    """The figures of the module's docstring. folder: an empty one."""
    count = QUICK if quick else PICTURES
    large_cache.build(folder, count, lambda scan: _with_artists(scan, count))
    plain = large_cache.cost("bucket", folder, count)
    cost = large_cache.cost("group", folder, count)
    return {
        "groups_leaks": float(leaks(Cache(large_cache.configuration(folder).cache))),
        "groups_mib": cost.own / 2**20,
        "groups_cpu_s": cost.cpu,
        "plain_mib": plain.own / 2**20,
    }


def _with_artists(scan: pa.Table, count: int) -> pa.Table:
    """A tar's scan whose pictures have artists, and of which some are equal files."""
    rng = np.random.default_rng(int(scan.column("item")[0].as_py()[:6]))  # the number of the tar
    artists = rng.integers(0, count // PER_ARTIST, (len(scan), 2)).tolist()
    kinds = np.arange(len(scan)) % 200
    metas = [
        json.dumps({} if kind % 10 == 0 else {"artist": pair if kind == 1 else pair[0]})
        for pair, kind in zip(artists, kinds.tolist(), strict=True)
    ]
    rows = np.arange(len(scan))
    rows[kinds % 100 == 2] = rng.permutation(rows[kinds % 100 == 3])  # equal files, and so of equal size
    columns = {"meta": pa.array(metas), "digest": binary(fixed(scan.column("digest"))[rows])}
    for side in ("width", "height"):
        columns[side] = scan.column(side).take(pa.array(rows))
    for name, column in columns.items():
        scan = scan.set_column(scan.schema.get_field_index(name), scan.schema.field(name), column)
    return scan


def leaks(cache: Cache) -> int:
    """Count artists and files that the training and its held-out part have in common."""
    scan = cache.last_scan(large_cache.SOURCE)
    assert scan is not None
    table = cache.table(scan["table"], ["item", "meta", "digest"])
    part = set[str]()
    for names in cache.open_snapshot("latest.heldout").name_tables():
        part.update(names.column("item").to_pylist())
    sides: tuple[set[object], set[object]] = set(), set()
    for batch in table.to_batches(max_chunksize=1 << 16):
        for item, meta, digest in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            artist = json.loads(meta).get("artist")
            side = sides[item in part]
            side.add(digest)
            side.update(artist if isinstance(artist, list) else [] if artist is None else [artist])
    if not part or not all(sides):
        raise RuntimeError("one side is empty")
    return len(sides[0] & sides[1])


if __name__ == "__main__":
    run_and_exit(partial(part_of_lab, __doc__, measure, WANTED))
