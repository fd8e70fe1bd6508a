"""The metrics of a process that encodes, from its `Progress`: rows of JSON lines, textfile.

A thread writes a row every `ROW_S` seconds, also while a store is silent, and one more at the end of each kind of
record. Counts only grow, also where a unit is made again; a process without work writes nothing. Nothing here ends the
work. docs/metrics.md says what a row has.
Price: with Ray one process writes the counts of all nodes.
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sana_pipe.base.disk import free_if_known, make_folder
from sana_pipe.base.metrics.rows import Rows
from sana_pipe.base.metrics.textfile import Textfile, store_counts
from sana_pipe.base.processes import beating
from sana_pipe.data.work.progress import Progress

ROW_S = 15.0


@dataclass
class _Counts:
    """Sums over the bars of one noun. ended: of those that have ended. shown: in the last row, with its time."""

    ended: Counter[str] = field(default_factory=Counter)
    rejects: Counter[str] = field(default_factory=Counter)
    shown: Counter[str] = field(default_factory=Counter)
    shown_at: float = 0.0


class ProgressRows:
    """The metrics of one process. Close it.

    Args:
        textfile: `metrics.textfile`.
        folder: of the rows; made with the first row.
        cache: the place that is encoded into, a label of the textfile.
        run: name of what is encoded. task, tasks: this process's share.
        log: prints one line.
    """

    def __init__(
        self,
        textfile: str | None,
        folder: Path,
        cache: str,
        run: str,
        task: int,
        tasks: int,
        log: Callable[[str], None],
    ):
        labels = {"stage": "encode", "run": run, "task": task}
        self._folder, self._log = folder, log
        self._facts = {**labels, "tasks": tasks, "node": platform.node()}
        self._textfile = Textfile(textfile, {**labels, "folder": cache}, log)
        self._began = time.monotonic()
        self._rows: Rows | None = None
        self._failed = False
        self._counts: dict[str, _Counts] = {}

    @contextmanager
    def of(self, bar: Progress) -> Iterator[None]:
        """Write the metrics of a bar while the block runs."""
        counts = self._counts.setdefault(bar.noun, _Counts())
        counts.shown_at = time.monotonic()
        try:
            with beating(lambda: self._write(bar, counts), ROW_S, "metrics"):
                yield
        finally:
            self._write(bar, counts)
            counts.ended = Counter(counts.shown)
            counts.rejects += Counter(bar.meter.rejects)

    def close(self) -> None:
        """Close the files; the textfile says that the process has ended."""
        if self._rows is not None:
            self._rows.close()
        if self._counts:
            self._textfile.renew(running=False)

    def _write(self, bar: Progress, counts: _Counts) -> None:
        if not (bar.total or bar.done or bar.rejected):
            return
        row = self._row(bar, counts)
        self._textfile.update(**{bar.noun: row})
        if (rows := self._opened()) is not None:
            rows.write(row)

    def _row(self, bar: Progress, counts: _Counts) -> dict[str, Any]:
        made, (busy_s, wall_s), now = bar.meter, bar.encoder_seconds(), time.monotonic()
        last, seconds = counts.shown, max(now - counts.shown_at, 1e-9)
        sums = Counter(samples=bar.done, tokens=made.tokens, bytes=made.bytes)
        sums.update({"busy_s": busy_s, "data_wait_s": max(0.0, wall_s - busy_s)})
        sums.update(made.stores)
        sums.update(counts.ended)
        counts.shown, counts.shown_at = sums | last, now  # the larger of both: a unit may be made again
        new = {name: counts.shown[name] - last[name] for name in ("samples", "tokens", "busy_s", "data_wait_s")}
        wall_s = new["busy_s"] + new["data_wait_s"]
        return {
            **self._facts,
            "noun": bar.noun,
            "samples": counts.shown["samples"],
            f"{bar.noun}_per_s": new["samples"] / seconds,
            "tokens_per_s": new["tokens"] / seconds,
            "left": bar.left,
            "left_s": bar.left_s,
            "rejects": dict(counts.rejects + Counter(made.rejects)),  # a copy: another thread may count meanwhile
            "bytes": counts.shown["bytes"],
            "data_wait": new["data_wait_s"] / wall_s if wall_s else 0.0,
            "data_wait_s": counts.shown["data_wait_s"],
            **{name: count + counts.shown[name] for name, count in store_counts().items()},
            "seconds": now - self._began,
            "free_bytes": free_if_known(self._folder),
        }

    def _opened(self) -> Rows | None:
        """The rows, opened with the first one; None if they cannot be, which is said once."""
        if self._rows is None and not self._failed:
            name = f"encode-{self._facts['run']}-{self._facts['node']}-{self._facts['task']}"
            try:
                make_folder(self._folder, self._folder.parent)
                self._rows = Rows(self._folder / f"{name}.jsonl", self._log)
            except OSError as error:
                self._failed = True
                self._log(f"warning: {self._folder}: no metrics can be written there: {error.strerror}")
        return self._rows
