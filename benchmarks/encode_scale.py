"""How planning, committing, status and a run with nothing to do grow with the number of items.

Synthetic items with a trivial encoder (small zero latents), through the real scan table, plans, shards, commits,
segments and index; medians of three rounds over all sizes. `growth_exponent`: the largest slope of log(seconds) over
log(items) between the two largest sizes, over the phases that take longer than a tenth of a second; 1 is linear.
`noop_seconds_1e5`: what a second run over 10^5 items that are all there takes for planning and looking for missing
units.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.report import finish, median, reset_peak, resident, table
from pipeline.cache import layout
from pipeline.cache.root import Cache
from pipeline.cache.status import status
from pipeline.config import EncodeConfig
from pipeline.encoding import plan as planning
from pipeline.encoding import unit_records
from pipeline.encoding.scan import SCAN
from pipeline.processes import run_and_exit
from pipeline.work import engine

RECIPE = layout.LatentRecipe(weights="scale", compression=8, channels=4)
SIZES = [(64, 64), (48, 80), (80, 48)]
ROUNDS = 3
PHASES = ("work list", "plan", "encode and commit", "merge", "index", "status", "run with nothing to do")


def scan_table(count: int) -> pa.Table:
    return pa.table(
        {
            "item": [f"{i:07d}.jpg" for i in range(count)],
            "size": [1] * count,
            "mtime_ns": [1] * count,
            "digest": pa.array([layout.digest(str(i)) for i in range(count)], pa.binary(16)),
            "width": [SIZES[i % 3][1] for i in range(count)],
            "height": [SIZES[i % 3][0] for i in range(count)],
            "captions": [[{"text": "x", "weight": 1.0}]] * count,
            "meta": ["{}"] * count,
            "reject": pa.nulls(count, pa.string()),
            "part": pa.nulls(count, pa.string()),
            "stamp": pa.nulls(count, pa.string()),
            "where": pa.nulls(count, pa.string()),
        },
        schema=SCAN,
    )


def measure(count: int) -> tuple[dict[str, float], float]:
    """Seconds by phase, and the peak memory in MB of a run with nothing to do, in a process of its own."""
    seconds: dict[str, float] = {}

    def timed(phase: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = work()
        seconds[phase] = time.perf_counter() - began
        return result

    with tempfile.TemporaryDirectory() as folder:
        cache = Cache(Path(folder) / "cache", create=True)
        cache.add_recipe(RECIPE)
        scan = scan_table(count)
        work = timed("work list", lambda: planning.image_work(scan, "scale", RECIPE, SIZES))
        plans = timed("plan", lambda: planning.plan_images(cache, RECIPE, work, EncodeConfig()))

        def encode() -> None:
            for plan, unit in engine.missing_units(cache, plans):
                rows = cache.unit_rows(plan, unit).to_pylist()
                made = [
                    (
                        [
                            unit_records.Record(r["key"], np.zeros((4, r["height"] // 8, r["width"] // 8), np.uint16))
                            for r in rows
                        ],
                        [],
                    )
                ]
                unit_records.write_unit(cache, RECIPE, plan, unit, made, lambda good, bad: None)

        timed("encode and commit", encode)
        timed("merge", lambda: engine.missing_units(cache, plans))
        found = timed("index", lambda: cache.index(RECIPE.name))
        if len(found) != count:
            raise RuntimeError(f"{len(found)} of {count} records are in the index")
        told = timed("status", lambda: status(cache))
        if not told["complete"]:
            raise RuntimeError("the cache is not complete")
        timed("run with nothing to do", lambda: run_with_nothing_to_do(Path(folder), scan))
        told = subprocess.run(
            [sys.executable, "-m", "benchmarks.encode_scale", "--memory-of", folder, str(count)],
            capture_output=True,
            text=True,
            check=True,
        )
    return seconds, float(told.stdout)


def run_with_nothing_to_do(folder: Path, scan: pa.Table) -> None:
    cache = Cache(folder / "cache")
    work = planning.image_work(scan, "scale", RECIPE, SIZES)
    if engine.missing_units(cache, planning.plan_images(cache, RECIPE, work, EncodeConfig())):
        raise RuntimeError("there is work left")


def memory_of(folder: Path, count: int) -> float:
    """MB that a run with nothing to do takes in this process beyond what it had with the scan in memory."""
    scan = scan_table(count)
    reset_peak()
    before = resident("VmRSS")
    run_with_nothing_to_do(folder, scan)
    return (resident("VmHWM") - before) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="up to 2 x 10^4 items only")
    parser.add_argument("--memory-of", nargs=2, metavar=("FOLDER", "ITEMS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        print(memory_of(Path(options.memory_of[0]), int(options.memory_of[1])))
        return
    sizes = [1000, 5000, 20000] if options.quick else [1000, 10000, 100000]
    rounds = [{size: measure(size) for size in sizes} for _ in range(ROUNDS)]
    results = {
        size: (
            {phase: median([turn[size][0][phase] for turn in rounds]) for phase in PHASES},
            median([turn[size][1] for turn in rounds]),
        )
        for size in sizes
    }
    rows = [[phase, *(results[n][0][phase] for n in sizes)] for phase in PHASES]
    rows.append(["peak MB of a run with nothing to do", *(results[n][1] for n in sizes)])
    rows.append(["peak bytes per item", *(results[n][1] * 1e6 / n for n in sizes)])
    table(["seconds", *(f"{n:,}" for n in sizes)], rows)
    small, large = sizes[-2:]
    slopes = {
        phase: math.log(results[large][0][phase] / results[small][0][phase]) / math.log(large / small)
        for phase in PHASES
        if results[large][0][phase] > 0.1
    }
    finish(
        {
            "growth_exponent": max(slopes.values()),
            "slowest_growing": max(slopes, key=slopes.__getitem__),
            "noop_seconds_1e5": results[large][0]["run with nothing to do"] * (100000 / large),
            "largest": large,
        }
    )


if __name__ == "__main__":
    run_and_exit(main)
