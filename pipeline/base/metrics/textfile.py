"""A textfile for the textfile collector of Prometheus' node exporter: one file per process, replaced whole.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/ (version 0.0.4). `Textfile.update` takes the rows
that go into the JSON lines; `FAMILIES` says which of their values are exported. A file stays when its process ends,
with `sana_pipe_running 0` and without rates, so that the last counts are scraped; the next start replaces it.
Price: values are as old as the last row; only the counts of stores are renewed between rows.
"""

from __future__ import annotations

import hashlib
import math
import platform
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from sana_pipe import __version__
from sana_pipe.base import counters
from sana_pipe.base.disk import make_folder, replacing
from sana_pipe.base.processes import beating

RENEW_S = 15.0
"""Seconds between two writes when no row comes: the usual scrape interval."""
_NAME = 80
"""Letters of a label in the name of a file; digests tell longer ones apart."""


class Family(NamedTuple):
    """One metric: its name without `sana_pipe_`, its type, and its help. live: left out once the process ends."""

    name: str
    type: Literal["counter", "gauge"]
    help: str
    live: bool = False


FAMILIES = {
    "samples": Family("samples_total", "counter", "Records encoded, or images trained on, since the process began."),
    "left": Family("left", "gauge", "Records of this task, or optimizer steps, that are not done yet."),
    "left_s": Family("left_seconds", "gauge", "Estimated seconds until nothing is left.", live=True),
    "per_s": Family("samples_per_second", "gauge", "Records encoded, or images trained on, per second.", live=True),
    "tokens_per_s": Family("tokens_per_second", "gauge", "Caption or image tokens per second.", live=True),
    "rejects": Family("rejects_total", "counter", "Records that could not be made, or samples that were replaced."),
    "bytes": Family("bytes_total", "counter", "Bytes of shards written, or of records read for training."),
    "data_wait_s": Family("data_wait_seconds_total", "counter", "Seconds in which the model waited for data."),
    "requests": Family("store_requests_total", "counter", "Answered requests to stores."),
    "request_s": Family("store_request_seconds_total", "counter", "Seconds that answered requests to stores took."),
    "retries": Family("store_retries_total", "counter", "Requests to stores that were repeated."),
    "store_wait_s": Family("store_wait_seconds_total", "counter", "Seconds in which a store did not answer."),
    "evictions": Family("mirror_evictions_total", "counter", "Local copies removed to make space for others."),
    "step": Family("step", "gauge", "Optimizer steps done."),
    "loss": Family("loss", "gauge", "Training loss, mean since the last row.", live=True),
    "grad_norm": Family("gradient_norm", "gauge", "Gradient norm before clipping, mean since the last row.", live=True),
    "lr": Family("learning_rate", "gauge", "Learning rate.", live=True),
    "mfu": Family("mfu_ratio", "gauge", "Model FLOPs per second over the devices' peak.", live=True),
    "checkpoint_at": Family("checkpoint_timestamp_seconds", "gauge", "When the last checkpoint was complete."),
    "free_bytes": Family(
        "free_bytes", "gauge", "Free bytes of the disk of the run, or of the cache or its mirror.", live=True
    ),
}
"""Families by the name in a row. `per_s` stands for `images_per_s` and `captions_per_s`; `rejects` holds counts by
reason."""
_OF_RUN = ("step", "loss", "grad_norm", "lr", "mfu", "checkpoint_at")
"""Values that have no label `noun`."""
RUNNING = Family("running", "gauge", "1 while the process runs, 0 after it ended by itself.")
INFO = Family("info", "gauge", "1; the label is the version of sana-pipe.")
_STORE_COUNTS = ("requests", "request_s", "retries", "store_wait_s", "evictions")


def store_counts() -> dict[str, float]:
    """Return the counts of `counters` that rows and textfiles have, since the process began."""
    totals = counters.totals()
    return {name: totals[name] for name in _STORE_COUNTS}


class Textfile:
    """The textfile of one process. It ends no work: a file that cannot be written is named once.

    Args:
        folder: the collector's folder; made if it is missing. None: nothing is written.
        labels: of every value: `stage`, `run`, `task`, and `folder`, where it works. The node's name is added. The
            first three and a digest of all name the file: runs of one name in two folders have two.
    """

    def __init__(self, folder: str | None, labels: Mapping[str, object], log: Callable[[str], None]):
        self._labels = {**labels, "node": platform.node()}
        self._log, self._lock = log, threading.Lock()
        self._rows: dict[str, dict[str, Any]] = {}
        self._failed = False
        self._path = None if folder is None else Path(folder) / f"sana_pipe_{_file_name(labels)}.prom"
        if self._path is not None:
            with self._naming_failure(self._path):
                make_folder(self._path.parent)
                for left in self._path.parent.glob(f".{self._path.name}.*"):  # of a process that was killed
                    left.unlink(missing_ok=True)

    def update(self, **rows: Mapping[str, Any]) -> None:
        """Write new rows by what they count (images, captions, steps); the others stay as they were."""
        with self._lock:
            self._rows |= {noun: {"per_s": row.get(f"{noun}_per_s"), **row} for noun, row in rows.items()}
        self.renew()

    def renew(self, running: bool = True) -> None:
        """Write the newest rows again, with the counts of stores as they are now."""
        with self._lock:
            if self._path is not None:
                with self._naming_failure(self._path), replacing(self._path) as work:
                    work.write_text(self._text(running), encoding="utf-8", errors="replace")
                    self._failed = False

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """Renew the file from a thread while the block runs, and write it a last time at its end."""
        if self._path is None:
            yield
            return
        try:
            with beating(self.renew, RENEW_S, "textfile"):
                yield
        finally:
            self.renew(running=False)

    @contextmanager
    def _naming_failure(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._failed:
                self._log(
                    f"warning: {path}: cannot be written (metrics.textfile): {error.strerror}; it is tried again later"
                )
            self._failed = True

    def _text(self, running: bool) -> str:
        lines = _family(RUNNING, [(self._labels, int(running))])
        lines += _family(INFO, [({**self._labels, "version": __version__}, 1)])
        counts = store_counts()
        for key, family in FAMILIES.items():
            if family.live and not running:
                continue
            if key in counts:
                lines += _family(family, [(self._labels, counts[key])])
            else:
                lines += _family(family, list(self._values(key)))
        return "".join(f"{line}\n" for line in lines)

    def _values(self, key: str) -> Iterator[tuple[dict[str, object], float]]:
        for noun, row in self._rows.items():
            value, labels = row.get(key), self._labels if key in _OF_RUN else {**self._labels, "noun": noun}
            if isinstance(value, dict):
                yield from (({**labels, "reason": reason}, count) for reason, count in value.items())
            elif isinstance(value, int | float):
                yield labels, value


def _file_name(labels: Mapping[str, object]) -> str:
    digest = hashlib.blake2b("\0".join(map(str, labels.values())).encode("utf-8", "surrogateescape"), digest_size=4)
    shown = [str(label) for name, label in labels.items() if name != "folder"]
    return "_".join([*(re.sub(r"[^A-Za-z0-9-]", "-", label)[:_NAME] for label in shown), digest.hexdigest()])


def _family(family: Family, values: list[tuple[dict[str, object], float]]) -> list[str]:
    if not values:
        return []
    name = f"sana_pipe_{family.name}"
    head = [f"# HELP {name} {family.help}", f"# TYPE {name} {family.type}"]
    return head + [f"{name}{{{_labels(labels)}}} {_number(value)}" for labels, value in values]


def _labels(labels: Mapping[str, object]) -> str:
    def quoted(value: object) -> str:
        return str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    return ",".join(f'{name}="{quoted(value)}"' for name, value in labels.items())


def _number(value: float) -> str:
    return repr(value) if math.isfinite(value) else {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}[repr(value)]
