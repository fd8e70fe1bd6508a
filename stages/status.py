"""`sana-pipe status`: what a cache holds and what is missing, and the processes that encode or train now.

Reads the cache, the claims in it, and the last row of a training in `train.output`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from sana_pipe.base.amounts import amount, duration
from sana_pipe.base.errors import IntegrityError, UserError
from sana_pipe.base.metrics import rows
from sana_pipe.config import Config
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.status import status
from sana_pipe.tools.locations import cache_location

SILENT_S = 60.0
"""A process whose claim or lock is older is called silent, or not running."""


def run(config: Config, as_json: bool = False) -> int:
    """Print the counts.

    Returns:
        0 if every planned unit is done, 1 if some are missing, the exit code of an integrity error if something is
        damaged or a file that a named snapshot needs is not there.

    Raises:
        CacheError: there is no cache.
    """
    report = _report(config, cache_location(config).open())
    click.echo(json.dumps(report) if as_json else "\n".join(_lines(report)))
    return IntegrityError.exit_code if report["damaged"] else 0 if report["complete"] else 1


def watch(config: Config, every_s: float, as_json: bool = False) -> int:
    """Print the counts every `every_s` seconds until Ctrl-C: over the last ones on a terminal, else below them. A pipe
    that nobody reads any more ends it, too.

    An error (a store that does not answer, a cache that does not exist yet) is printed in their place.
    """
    redraws = sys.stdout.isatty() and not as_json
    cache: Cache | None = None
    with suppress(KeyboardInterrupt):
        while not getattr(sys.stdout, "lost", False):
            try:
                if cache is None or cache.files.on_disk or cache.files.damage:
                    cache = cache_location(config).open()
                report = _report(config, cache)
                text = json.dumps(report) if as_json else "\n".join(_lines(report))
            except (UserError, OSError) as error:
                known = error if isinstance(error, UserError) else UserError(str(error))
                text = json.dumps(known.as_object()) if as_json else f"{known.line}: waiting for it"
            if redraws:
                sys.stdout.flush()
                sys.stdout.buffer.write(b"\x1b[2J\x1b[H")  # clear the screen; a print would escape it
                sys.stdout.buffer.flush()
            click.echo(text if as_json else f"{datetime.now():%H:%M:%S}, every {every_s:g} s; Ctrl-C ends\n{text}")
            sys.stdout.flush()
            time.sleep(every_s)
    return 0


def _report(config: Config, cache: Cache) -> dict[str, Any]:
    return {**status(cache), "trainings": list(_trainings(Path(config.train.output)))}


def _trainings(output: Path) -> Iterator[dict[str, Any]]:
    """The last rows of the trainings that hold the lock of a run directory: `output` or folders in it."""
    for lock in [output / "lock.json", *sorted(output.glob("*/lock.json"))]:
        with suppress(OSError):
            if time.time() - lock.stat().st_mtime < SILENT_S:
                yield {"run": str(lock.parent), **(rows.last(lock.parent / "metrics.jsonl") or {})}


def _lines(report: dict[str, Any]) -> Iterator[str]:
    for name, source in report["sources"].items():
        yield f"source {name!r}: {source['items']} items, {source['rejected']} rejected, from {source['root']}"
    for name, store in report["stores"].items():
        line = (
            f"{name}: {store['units_done']} of {store['units']} units done, {store['records']} records, "
            f"{amount(store['bytes'])}, {store['rejects']} rejected"
        )
        if store["records_missing"]:
            line += f", {store['records_missing']} records missing"
        yield line
    yield from map(_task_line, report["tasks"])
    yield from map(_training_line, report["trainings"])
    for name, snapshot in report["snapshots"].items():
        yield f"snapshot {name}: {snapshot}" + (" (packed)" if name in report["packed"] else "")
    for name, known in report["prompts"].items():
        yield f"prompt set {name}: {known['prompts']} prompts, {known['id'][:12]}"
    for name, damage in report["damaged"].items():
        yield f"damaged: {name}: {damage['problem']}"
    for fix in sorted({damage["fix"] for damage in report["damaged"].values()}):
        yield f"fix: {fix}"
    free = "" if report["free_bytes"] is None else f"{amount(report['free_bytes'])} free; "
    yield free + ("complete" if report["complete"] else "not complete")


def _task_line(task: dict[str, Any]) -> str:
    line = (
        f"{task['node']}, task {task['task'] + 1} of {task['tasks']}: {task['samples']} {task['noun']} at "
        f"{task['per_s']:.1f}/s, {task['left']} left"
    )
    line += f" ({duration(task['left_s'])})" if task["left_s"] is not None else ""
    line += _troubles(task, "rejected")
    return line + (f", silent for {duration(task['silent_s'])}" if task["silent_s"] > SILENT_S else "")


def _training_line(row: dict[str, Any]) -> str:
    if "step" not in row:
        return f"training {row['run']}: no step yet"
    line = f"training {row['run']}: step {row['step']}, {row['left']} left"
    line += f" ({duration(row['left_s'])})" if row["left_s"] is not None else ""
    line += f", {row['images_per_s']:.1f} images/s, loss {row['loss']:.4f}, data {100 * row['data_wait']:.0f}%"
    return line + _troubles(row, "quarantined")


def _troubles(counts: dict[str, Any], lost: str) -> str:
    """Return what is not 0 of the counts of stores and of the records that are `lost`."""
    line = "".join(f", {counts[name]:.0f} {name}" for name in (lost, "retries", "evictions") if counts[name])
    return line + (f", {duration(counts['store_wait_s'])} of waiting for stores" if counts["store_wait_s"] else "")
