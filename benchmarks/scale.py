"""Runs of 10^6, 10^8 and 10^9 pairs on 1 to 512 GPUs: storage, requests, hours, checkpoints, traffic, and what stops.

The tables of docs/measurements.md; `--page FILE` writes them there. The model is `benchmarks.scale_model`, its
constants and those of `benchmarks.reading_simulator` stand at the top with their sources. Reading is simulated
with the real schedule, planner and loader for the 8 processes of one node and some steps of the first epoch. All nodes
read about alike, as the plans of all ranks show, so the sums for 64 nodes and an epoch are multiplied up. `--quick`
prints some of the same rows.

Keys per case PAIRS_GPUS_KIND: amplification (bytes fetched per byte read), requests, fetched_gb, hashed_gb (per node
and step), wait_s (per step). train_gpu_hours_PAIRS and encode_gpu_hours_PAIRS. peak_mib: memory of this process.
"""

from __future__ import annotations

import argparse
import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks import scale_model as scale
from benchmarks.reading_simulator import ImaginedSnapshot, MirrorModel
from benchmarks.report import finish, resident
from benchmarks.scale_model import Reading, Training
from sana_pipe.base.amounts import duration
from sana_pipe.base.processes import run_and_exit
from sana_pipe.data.cache.codec import INT8, LOSSLESS
from sana_pipe.data.loader import randomness
from sana_pipe.data.loader.planner import Planner

PAIRS = (10**6, 10**8, 10**9)
GPUS = (1, 8, 64, 512)


class Case(NamedTuple):
    """A simulated run. mib, window: of packed shards (None: not packed). steps, skip: counted ones, and before them."""

    pairs: int
    gpus: int
    mib: int | None
    window: int
    steps: int
    skip: int

    @property
    def key(self) -> str:
        kind = "plain" if self.mib is None else f"packed{self.mib}x{self.window}"
        return f"{self.pairs:.0e}_{self.gpus}_{kind}".replace("+", "")


DEFAULT, PLAIN_ORDER = Case(10**9, 512, 64, 4, 100, 60), Case(10**9, 512, None, 4, 5, 0)
SMALL_SHARDS, SMALL_WINDOW = Case(10**9, 512, 16, 4, 100, 60), Case(10**9, 512, 64, 1, 100, 60)
CASES = (
    Case(10**6, 8, None, 4, 100, 900),
    Case(10**6, 8, 64, 4, 400, 900),
    Case(10**8, 64, None, 4, 20, 0),
    Case(10**8, 64, 64, 4, 200, 300),
    PLAIN_ORDER,
    DEFAULT,
    SMALL_SHARDS,
    SMALL_WINDOW,
)


SEVERAL = tuple(case for case in CASES if case.mib is not None and case.gpus > scale.PER_NODE)


class Table(NamedTuple):
    """In Markdown."""

    head: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def lines(self) -> list[str]:
        rows = [self.head, ("---",) * len(self.head), *self.rows]
        return ["| " + " | ".join(row) + " |" for row in rows]


def number(value: float) -> str:
    """Two significant digits, in words up to 10^15."""
    if value == 0:
        return "0"
    for size, word in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size * 0.995:
            return f"{float(f'{value / size:.2g}'):g} {word}"
    return f"{float(f'{value:.2g}'):,g}"


def size(value: float, unit: str = "B") -> str:
    return "0" if value == 0 else f"{number(value)}{unit}"


def power(pairs: int) -> str:
    return f"10^{len(str(pairs)) - 1}"


@lru_cache
def best(gpus: int) -> Training:
    """With an FSDP2 group in each node, which is faster than one over all nodes."""
    return scale.training(gpus, scale.layouts(gpus)[-1])


@lru_cache
def simulated(case: Case) -> Reading:
    step_s = best(case.gpus).time.step
    return scale.reading(
        case.pairs, case.gpus, step_s, mib=case.mib, window=case.window, steps=case.steps, skip=case.skip
    )


def cache_table() -> Table:
    rows = []
    for pairs in PAIRS:
        plain = scale.cache_of(pairs)
        others = [scale.cache_of(pairs, storage).total for storage in (LOSSLESS, INT8)]
        rows.append(
            (
                power(pairs),
                *(size(value) for value in (plain.latents, plain.text, plain.index, *others)),
                number(plain.shards),
                number(plain.requests),
                number(plain.hours),
                number(plain.exact_hours - plain.hours),
                size(plain.snapshot),
            )
        )
    return Table(
        (
            "pairs",
            "latents",
            "text",
            "tables",
            "all, bf16-zstd",
            "all, int8",
            "shards",
            "requests to encode",
            "encode GPU-hours",
            "more with text.mode: exact",
            "snapshot's index",
        ),
        rows,
    )


def training_row(run: Training) -> tuple[str, ...]:
    layout = run.prediction.layout
    return (
        str(run.gpus),
        str(layout.dp_replicate),
        str(layout.dp_shard),
        f"{run.time.step:.2g}",
        number(run.time.images_per_s),
        f"{run.time.mfu:.0%}",
        f"{run.time.exposed:.2g}",
        size(run.sent),
        *(f"{number(run.hours(pairs) * run.gpus)}" for pairs in PAIRS),
        duration(run.hours(PAIRS[-1]) * 3600),
    )


def training_table(runs: list[Training]) -> Table:
    return Table(
        (
            "GPUs",
            "replicas",
            "shards",
            "s a step",
            "images/s",
            "MFU",
            "s not hidden",
            "sent by a node, a step",
            *(f"GPU-hours an epoch of {power(pairs)}" for pairs in PAIRS),
            f"an epoch of {power(PAIRS[-1])}",
        ),
        [training_row(run) for run in runs],
    )


def checkpoint_table(runs: list[Training]) -> Table:
    return Table(
        ("GPUs", "replicas", "shards", "checkpoint", "copy in each process", "s training stops", "s until published"),
        [
            (
                *training_row(run)[:3],
                size(run.checkpoint),
                size(run.copy),
                f"{run.blocked:.2g}",
                f"{run.written:.2g}",
            )
            for run in runs
        ],
    )


def reading_row(case: Case) -> tuple[str, ...]:
    result, step_s = simulated(case), best(case.gpus).time.step
    wait_s = result.each("waited")
    return (
        power(case.pairs),
        str(case.gpus),
        *(("no", "") if case.mib is None else (f"{case.mib} MiB", str(case.window))),
        number(result.requests),
        size(result.each("needed_bytes")),
        size(result.each("read")),
        number(result.amplification),
        size(result.each("hashed")),
        number(result.each("spans")),
        f"{wait_s:.2g}" if wait_s >= 0.005 else "0",
        size(result.each("needed_bytes") / (step_s + wait_s), "B/s"),
        number(result.requests * result.nodes * result.steps),
        size(result.epoch("needed_bytes")),
    )


def reading_table(cases: tuple[Case, ...]) -> Table:
    return Table(
        (
            "pairs",
            "GPUs",
            "packed shard",
            "window",
            "requests",
            "fetched",
            "read",
            "fetched / read",
            "checked",
            "reads",
            "s waited",
            "network of a node",
            "requests of an epoch",
            "fetched in an epoch",
        ),
        [reading_row(case) for case in cases],
    )


def all_nodes(pairs: int, gpus: int, mib: int, window: int, steps: int, skip: int) -> tuple[float, float]:
    """Shards that each node reads for the first time, per step, of a packed snapshot, from the plans of all ranks:
    the mean of all nodes, and the mean of the largest number of each step."""
    snapshot = ImaginedSnapshot(scale.imagined(pairs, gpus, mib, window), MirrorModel(1))
    count = max(1, gpus // scale.PER_NODE)
    planner = Planner(snapshot, seed=0, phase=0)
    known: list[set[int]] = [set() for _ in range(count)]
    fresh = []
    for step in range(scale.FIRST, scale.FIRST + skip + steps):
        parts = np.array_split(planner.step(step).pictures["latent"]["shard"], count)
        read = [set(part.tolist()) - before for part, before in zip(parts, known, strict=True)]
        for before, new in zip(known, read, strict=True):
            before |= new
        fresh.append([len(new) for new in read])
    counted = np.array(fresh[skip:])
    return float(counted.mean()), float(counted.max(axis=1).mean())


def nodes_table(cases: tuple[Case, ...]) -> Table:
    rows = []
    for case in cases:
        assert case.mib is not None
        mean, most = all_nodes(case.pairs, case.gpus, case.mib, case.window, case.steps, case.skip)
        result = simulated(case)
        counts = (result.each("needed"), mean, most)
        rows.append((*reading_row(case)[:4], str(result.nodes), *(f"{count:.2g}" for count in counts)))
    return Table(
        (
            "pairs",
            "GPUs",
            "packed shard",
            "window",
            "nodes",
            "shards fetched by one node",
            "by a mean node",
            "by the most",
        ),
        rows,
    )


def limits_table() -> Table:
    """What stops at 10^9 pairs and 512 GPUs."""
    pairs, cache = PAIRS[-1], scale.cache_of(PAIRS[-1])
    plain, packed, hsdp = simulated(PLAIN_ORDER), simulated(DEFAULT), best(512)
    epochs = cache.hours / (hsdp.hours(pairs) * hsdp.gpus)
    small, narrow = simulated(SMALL_SHARDS), simulated(SMALL_WINDOW)
    return Table(
        ("design", f"at {power(pairs)} pairs, 512 GPUs", "a limit from", "what replaces it"),
        [
            (
                "every process scans, plans and joins, in temporary files",
                f"{number(scale.SCRATCH_BYTES * pairs)}B of disk and {number(scale.SCAN_CPU_S * pairs / 3600)} hours "
                "of a core, each",
                "10^8 pairs, with 8 processes a node",
                "one planner (`encode` has it; each process still lists files and opens the indexes)",
            ),
            (
                "random order over shards as encoded",
                f"{number(plain.amplification)} bytes fetched for each read, {number(plain.each('waited'))} s waited "
                "a step",
                "a cache larger than mirror.gib",
                "bucket --pack",
            ),
            (
                "whole shards for a part of their samples",
                f"{number(packed.amplification)} bytes fetched for each read",
                "several nodes",
                f"smaller shards ({number(small.amplification)}) or windows ({number(narrow.amplification)}); windows "
                "read by one node (not built)",
            ),
            (
                "two fetches of a process, each one transfer",
                f"{number(packed.each('waited'))} s waited a step of {hsdp.time.step:.2g} s",
                "several nodes, at 90 MB/s a transfer",
                f"--set bucket.pack_mib=16 ({number(small.each('waited'))} s); one shard by several ranges (not built)",
            ),
            (
                "one document a unit, in 256 folders",
                f"{number(cache.documents)} documents until units are merged",
                "a million documents, which each process lists when it starts",
                "commits of several units in one document (not built)",
            ),
            (
                "the VAE in fp32",
                f"{number(cache.hours)} GPU-hours, {number(epochs)} epochs of training",
                "10^8 pairs",
                "vae.dtype: tf32 or bf16, another encoding with another error",
            ),
        ],
    )


def tables(quick: bool) -> dict[str, Table]:
    """By heading."""
    several = [best(gpus) for gpus in ((512,) if quick else GPUS)]
    wide = [] if quick else [scale.training(gpus, scale.layouts(gpus)[0]) for gpus in GPUS if gpus > scale.PER_NODE]
    runs = sorted([*several, *wide], key=lambda run: (run.gpus, run.prediction.layout.dp_replicate))
    result = {
        "the cache": cache_table(),
        "training": training_table(runs),
        "checkpoints": checkpoint_table(several),
        "reading, a node and step": reading_table((DEFAULT, PLAIN_ORDER) if quick else CASES),
        "all nodes, a step": nodes_table((DEFAULT,) if quick else SEVERAL),
    }
    return result if quick else {**result, "what stops": limits_table()}


def write(page: Path, printed: dict[str, Table]) -> None:
    """Replace the tables of a page, which are known by their heads."""
    text = page.read_text(encoding="utf-8")
    for table in printed.values():
        head = re.escape(table.lines()[0])
        text, count = re.subn(rf"{head}\n(\|.*\n)*", "\n".join(table.lines()).replace("\\", r"\\") + "\n", text)
        if count != 1:
            raise ValueError(f"{page} has {count} tables with the head {table.lines()[0]}")
    page.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--page", type=Path, help="write the tables into this page")
    options = parser.parse_args()
    randomness.noise = lambda *_: None
    printed = tables(options.quick)
    for heading, table in printed.items():
        print(f"\n{heading}\n", *table.lines(), sep="\n")
    if options.page:
        write(options.page, printed)
    figures: dict[str, float | str | None] = {}
    for case in (DEFAULT, PLAIN_ORDER) if options.quick else CASES:
        result = simulated(case)
        figures |= {
            f"amplification_{case.key}": result.amplification,
            f"requests_{case.key}": result.requests,
            f"fetched_gb_{case.key}": result.each("needed_bytes") / 1e9,
            f"hashed_gb_{case.key}": result.each("hashed") / 1e9,
            f"wait_s_{case.key}": result.each("waited"),
        }
    for pairs in PAIRS:
        figures[f"encode_gpu_hours_1e{len(str(pairs)) - 1}"] = scale.cache_of(pairs).hours
        figures[f"train_gpu_hours_1e{len(str(pairs)) - 1}"] = best(512).hours(pairs) * 512
    finish({**figures, "peak_mib": resident("VmHWM") / 2**20})


if __name__ == "__main__":
    run_and_exit(main)
