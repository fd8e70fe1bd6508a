"""How time and memory of encoding's commands grow with the number of items.

Time: synthetic items with a trivial encoder (small zero latents), through the real scan table, plans, shards, commits,
segments and index; medians of three rounds over all sizes. `growth_exponent`: the largest slope of log(seconds) over
log(items) between the two largest sizes, over the phases that take longer than a tenth of a second; 1 is linear.
`noop_seconds_1e5`: what a second run over 10^5 items that are all there takes for planning and looking for missing
units.

Memory: an unchanged source of tars whose items are all encoded (`benchmarks.large_cache`), at 10^6 and 10^7 items (with
`--quick` at 10^6). Each command runs in a process of its own; its private memory counts, mapped files do not.
`scan_join_mib_N`: the largest of an unchanged scan of tars, of the listings of a folder on a disk and in S3, and of
`bucket`, also with `bucket.grow` and with `bucket.filter` over metadata, and of `encode --dry-run`; `noop_mib_N`:
`encode` with nothing to do; `bytes_per_item_exponent`: the largest slope, over these commands, of log(bytes beyond
those before the command) over log(items), between 10^6 and 10^7 items.

With `--quick` the slope is that between 250,000 and 10^6 items, with all buffers divided by 16. A buffer has a fixed
size and grows with the items only until it is full; with its real size it is full at some 10^6 items, so that the
slope below would be that of the buffers. Smaller buffers are full at both sizes, and hide less of what does grow: the
bytes that every item adds are the same.

Units: caches of 20,000 items (100,000 without `--quick`) whose units have 1 record and 64. `bytes_per_unit`: the
largest difference of private memory, over the commands that read something of each unit or shard, per unit that the
first has more; the buffers are divided as above. `unit_cpu_us`: the largest difference of CPU time.

At 10^7 items the folder for temporary files needs 40 GB and the run half an hour.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks import large_cache
from benchmarks.report import finish, median, table
from sana_pipe.base.processes import run_and_exit
from sana_pipe.data.cache import layout
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.status import status
from sana_pipe.data.encoding import plan as planning
from sana_pipe.data.encoding import unit_records
from sana_pipe.data.encoding.config import EncodeConfig
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.work import engine

ENCODING = LatentEncoding(weights="scale", compression=8, channels=4)
SIZES = [(64, 64), (48, 80), (80, 48)]
ROUNDS = 3
GROWING = ("scan", "noop", "bucket", "folder", "s3", "dry", "grow", "filter")
"""Commands whose memory must not grow with the items."""
QUICK_DIVISOR = 16
PHASES = ("work list", "plan", "encode and commit", "merge", "index", "status", "run with nothing to do")


def scan_table(count: int) -> pa.Table:
    return large_cache.scan_of(
        count,
        {
            "item": [f"{i:07d}.jpg" for i in range(count)],
            "size": [1] * count,
            "mtime_ns": [1] * count,
            "digest": pa.array([layout.digest(str(i)) for i in range(count)], pa.binary(16)),
            "width": [SIZES[i % 3][1] for i in range(count)],
            "height": [SIZES[i % 3][0] for i in range(count)],
            "captions": [[{"text": "x", "weight": 1.0}]] * count,
            "meta": ["{}"] * count,
        },
    )


def measure(count: int) -> dict[str, float]:
    """Seconds by phase."""
    seconds: dict[str, float] = {}

    def timed(phase: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = work()
        seconds[phase] = time.perf_counter() - began
        return result

    with tempfile.TemporaryDirectory() as folder:
        cache = Cache(Path(folder) / "cache", create=True)
        cache.add_encoding(ENCODING)
        scan = scan_table(count)
        work = timed("work list", lambda: planning.image_work(scan, "scale", ENCODING, SIZES))
        plans = timed("plan", lambda: planning.plan_images(cache, ENCODING, work, EncodeConfig()))

        def encode() -> None:
            for plan, unit in engine.missing_units(cache, plans):
                rows = cache.unit_rows(plan, unit).to_pylist()
                made: list[tuple[list[unit_records.EncodedRecord], list[Any]]] = [
                    (
                        [
                            unit_records.EncodedRecord(
                                r["key"], np.zeros((4, r["height"] // 8, r["width"] // 8), np.uint16)
                            )
                            for r in rows
                        ],
                        [],
                    )
                ]
                unit_records.write_unit(cache, ENCODING, plan, unit, made, lambda good, bad: None)

        timed("encode and commit", encode)
        timed("merge", lambda: engine.missing_units(cache, plans))
        found = timed("index", lambda: cache.index(ENCODING.name))
        if len(found) != count:
            raise RuntimeError(f"{len(found)} of {count} records are in the index")
        told = timed("status", lambda: status(cache))
        if not told["complete"]:
            raise RuntimeError("the cache is not complete")
        timed("run with nothing to do", lambda: run_with_nothing_to_do(Path(folder), scan))
    return seconds


def run_with_nothing_to_do(folder: Path, scan: pa.Table) -> None:
    cache = Cache(folder / "cache")
    work = planning.image_work(scan, "scale", ENCODING, SIZES)
    if engine.missing_units(cache, planning.plan_images(cache, ENCODING, work, EncodeConfig())):
        raise RuntimeError("there is work left")


def memory_figures(quick: bool) -> dict[str, float]:
    """Print memory and CPU seconds of each command; returns the figures."""
    pair = [(250_000, QUICK_DIVISOR), (1_000_000, QUICK_DIVISOR)] if quick else [(1_000_000, 1), (10_000_000, 1)]
    largest = pair[-1][0]
    runs = [*pair, (largest, 1)] if quick else pair
    costs: dict[tuple[int, int], dict[str, large_cache.Cost]] = {}
    for size in dict.fromkeys(size for size, _ in runs):
        with tempfile.TemporaryDirectory() as folder:
            large_cache.cost("build", Path(folder), size)
            for divisor in (divisor for other, divisor in runs if other == size):
                names = large_cache.COMMANDS if divisor == 1 else GROWING
                costs[size, divisor] = {name: large_cache.cost(name, Path(folder), size, divisor) for name in names}
    for (size, divisor), by_command in costs.items():
        rows = [[name, cost.own / 2**20, cost.per_item(size), cost.cpu] for name, cost in by_command.items()]
        buffers = f", buffers / {divisor}" if divisor > 1 else ""
        table([f"{size:,} items{buffers}", "own MiB", "bytes an item", "CPU s"], rows)

    def slope(name: str) -> float:
        few, many = (costs[run][name].own - costs[run][name].before for run in pair)
        return math.log(many / few) / math.log(largest / pair[0][0])

    tag, whole = f"1e{round(math.log10(largest))}", costs[largest, 1]
    return {
        f"scan_join_mib_{tag}": max(whole[name].own for name in GROWING if name != "noop") / 2**20,
        f"noop_mib_{tag}": whole["noop"].own / 2**20,
        f"status_mib_{tag}": whole["status"].own / 2**20,
        **{f"{name}_cpu_s_{tag}": whole[name].cpu for name in GROWING},
        "bytes_per_item_exponent": max(map(slope, GROWING)),
    }


def unit_figures(count: int) -> dict[str, float]:
    """Print and return what a unit with its shard costs in memory and CPU time."""
    costs: dict[tuple[str, int], large_cache.Cost] = {}
    for per_unit in (1, 64):
        with tempfile.TemporaryDirectory() as folder:
            large_cache.cost("build", Path(folder), count, 1, per_unit)
            for name in large_cache.UNIT_COMMANDS:
                costs[name, per_unit] = large_cache.cost(name, Path(folder), count, QUICK_DIVISOR, per_unit)
    units = 2 * count * (1 - 1 / 64)
    rows: list[list[Any]] = []
    for name in large_cache.UNIT_COMMANDS:
        many, few = costs[name, 1], costs[name, 64]
        rows.append([name, (many.own - few.own) / units, (many.cpu - few.cpu) / units * 1e6])
    table([f"{2 * count:,} units", "bytes a unit", "CPU us a unit"], rows)
    return {"bytes_per_unit": max(row[1] for row in rows), "unit_cpu_us": max(row[2] for row in rows)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="up to 2 x 10^4 items, memory at 10^6")
    options = parser.parse_args()
    sizes = [1000, 5000, 20000] if options.quick else [1000, 10000, 100000]
    rounds = [{size: measure(size) for size in sizes} for _ in range(ROUNDS)]
    results = {size: {phase: median([turn[size][phase] for turn in rounds]) for phase in PHASES} for size in sizes}
    rows = [[phase, *(results[n][phase] for n in sizes)] for phase in PHASES]
    table(["seconds", *(f"{n:,}" for n in sizes)], rows)
    small, large = sizes[-2:]
    slopes = {
        phase: math.log(results[large][phase] / results[small][phase]) / math.log(large / small)
        for phase in PHASES
        if results[large][phase] > 0.1
    }
    memory = memory_figures(options.quick) | unit_figures(20_000 if options.quick else 100_000)
    finish(
        {
            **memory,
            "growth_exponent": max(slopes.values()),
            "slowest_growing": max(slopes, key=slopes.__getitem__),
            "noop_seconds_1e5": results[large]["run with nothing to do"] * (100000 / large),
            "largest": large,
        }
    )


if __name__ == "__main__":
    run_and_exit(main)
