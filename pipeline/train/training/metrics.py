"""The journal of a run: one JSON line per logged step (`metrics`), and the same on the terminal.

`Metrics` appends rows to `metrics.jsonl` and prints them, on a terminal as one line that the next row overwrites;
`read`, whose docstring says what a row has, returns one row per step, that of the last attempt.
Why: a killed and resumed run repeats the steps after its last checkpoint, so the file is append-only; `start` rows
separate the attempts.
Price: a reader other than `read` has to handle repeated steps.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import fmean
from typing import Any

from sana_pipe.base.amounts import duration
from sana_pipe.base.disk import replacing
from sana_pipe.base.errors import writing
from sana_pipe.base.metrics import rows
from sana_pipe.base.metrics.textfile import Textfile
from sana_pipe.base.metrics.trackers import Trackers
from sana_pipe.base.terminal import LiveLine, shorter
from sana_pipe.train.training.loss_band import LossBand
from sana_pipe.train.training.task import Compare

_TREND_ROWS = 40
"""Rows that the trend of the loss is taken from."""


class Metrics:
    """The journal of one run, written by one process. Close it."""

    def __init__(
        self,
        path: Path,
        log: Callable[[str], None],
        trackers: Trackers | None = None,
        expected: Compare | None = None,
        line: LiveLine | None = None,
        epoch_steps: float | None = None,
    ):
        """Open for appending. A last line torn by a kill gets its newline first.

        Args:
            trackers: receive each row's numbers, too; closed with the journal.
            expected: compared once with what was measured.
            line: shows progress in place of a printed line per row, if it is live.
            epoch_steps: optimizer steps of an epoch; None: lines say no epoch.
        """
        self.path, self._log, self._expected = path, log, expected
        self._line, self._epoch_steps = line or LiveLine(False), epoch_steps
        self._losses: deque[float] = deque(maxlen=_TREND_ROWS)
        self._rows, self._band = 0, LossBand()
        self._validations: list[dict[str, Any]] = []
        self._drawn: set[int] = set()
        self._last: tuple[int, float] | None = None
        with self._writing():
            self._journal = rows.Rows(path, log, trackers)

    def _writing(self) -> AbstractContextManager[None]:
        return writing(self.path, "check the permissions, or set train.output", again="--resume auto")

    def start(self, **facts: Any) -> None:
        """Write the row that begins an attempt. `facts`: step it starts at, processes, device, tf32, snapshot, and what
        `software.written_by` says."""
        with self._writing():
            self._journal.append({"event": "start", **facts})
        self._last, self._band = (facts["step"], 0.0), LossBand()
        events = read_events(self.path)
        self._validations = events.get("validation", [])
        self._drawn = {row["step"] for row in events.get("pictures", [])}
        for row in events.get(None, []):
            if isinstance(row.get("loss"), float):
                self._band.add(row["loss"])

    def row(self, steps: int, values: dict[str, Any]) -> dict[str, Any]:
        """Write one row and print it. `steps`: `train.steps`. Returns the row as it was written."""
        left_s = self._seconds_left(values, steps)
        values = {**values, "left": steps - values["step"], "left_s": left_s}
        self._journal.write(values)
        elapsed = [f"{duration(values['seconds'])} elapsed"] if "seconds" in values else []
        left = [f"{duration(left_s)} left"] if left_s else []
        self._losses.append(values["loss"])
        if self._line.live:
            self._line.show(*self._live(steps, values, left, elapsed))
        else:
            self._log("  ".join([self._done(values["step"], steps), _line(values), *elapsed, *left]))
        parts = {f"loss_{name}": value for name, value in (values.get("parts") or {}).items()}
        self._journal.track(values["step"], {**values, **parts}, "train")
        if (band := self._band.add(values["loss"])) is not None:
            self._log(
                f"warning: the loss {values['loss']:.4f} is outside its usual range, {band[0]:.4f} to {band[1]:.4f}: "
                f"look at lr and grad_norm in {self.path.name}, and at the samples of the last steps"
            )
        self._rows += 1
        if self._expected is not None and (self._rows == 2 or values["step"] == steps):
            expected, self._expected = self._expected, None
            self._compare(expected, values)
        return values

    def validation(self, steps: int, values: dict[str, Any]) -> None:
        """Write the row of a validation and print it with the change since the last validation on the same samples."""
        earlier = [row for row in self._validations if row["snapshot"] == values["snapshot"]]
        self._journal.write({"event": "validation", **values})
        self._log(_validation_line(values, earlier[-1] if earlier else {}, steps))
        self._validations.append(values)
        by_sigma = {f"sigma_{sigma}": loss for sigma, loss in values["by_sigma"].items()}
        parts = {**(values.get("by_age") or {}), **(values.get("parts") or {})}
        self._journal.track(values["step"], {**values, **by_sigma, **parts}, "validation")

    def has_validation(self, step: int, snapshot: str | None) -> bool:
        """Return whether a validation after this step, on samples of this snapshot, is in the journal."""
        return any(row["step"] == step and row["snapshot"] == snapshot for row in self._validations)

    def validated_parts(self, snapshot: str | None) -> list[dict[str, float | None]]:
        """Return the held-out losses by name of all validations on samples of this snapshot."""
        return [row["parts"] for row in self._validations if row["snapshot"] == snapshot and row.get("parts")]

    def pictures(self, steps: int, values: dict[str, Any]) -> None:
        """Write the row of a drawing and print it."""
        self._journal.write({"event": "pictures", **values})
        self._drawn.add(values["step"])
        place, count = self.path.parent / values["file"], values["count"]
        self._log(f"pictures after step {values['step']}/{steps}  {count} prompts  {values['seconds']:.1f} s  {place}")

    def has_pictures(self, step: int) -> bool:
        """Return whether pictures were drawn after this step."""
        return step in self._drawn

    def _compare(self, expected: Compare, values: dict[str, Any]) -> None:
        """Record what was predicted and measured. Nothing here ends the run."""
        try:
            lines, document = expected(values)
            for line in lines:
                self._log(line)
            with replacing(self.path.parent / "prediction.json") as work:
                work.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        except Exception as error:
            self._log(f"note: the prediction is not compared: {error}")

    def _done(self, step: int, steps: int) -> str:
        """Steps, their share of the run, and epochs of the snapshot."""
        epoch = f", epoch {step / self._epoch_steps:.1f}" if self._epoch_steps else ""
        return f"step {step:>{len(str(steps))}}/{steps} ({100 * step // steps}%{epoch})"

    def _live(self, steps: int, row: dict[str, Any], left: list[str], elapsed: list[str]) -> Iterator[str]:
        """The line that a terminal overwrites, and shorter ones for narrower terminals: step, loss and time left come
        first and are never left out. Behind the loss: the mean of the newer half of the last rows minus that of the
        older half."""
        step = f"step {row['step']:>{len(str(steps))}}/{steps}"
        losses, half = list(self._losses), len(self._losses) // 2
        trend = f" ({fmean(losses[-half:]) - fmean(losses[:half]):+.4f})" if half else ""
        loss = f"loss {row['loss']:.4f}"
        more = []
        if self._validations and (value := self._validations[-1]["loss"]) is not None:
            more.append(f"validation {value:.4f}")
        more.append(f"{row['images_per_s']:.1f} images/s")
        if self._epoch_steps:
            more.append(f"epoch {row['step'] / self._epoch_steps:.1f}")
        first = [f"{step} ({100 * row['step'] // steps}%)", loss + trend, *left]
        yield from shorter([*first, *more, *elapsed], len(first), "  ")
        yield from ("  ".join([step, loss, *left]), " ".join([step.removeprefix("step ").strip(), loss, *left]))
        yield " ".join([step.removeprefix("step ").strip(), loss.removeprefix("loss "), *left])

    def _seconds_left(self, row: dict[str, Any], steps: int) -> float | None:
        """Estimate them at the speed since the last row; None if that is not known."""
        last, self._last = self._last, (row["step"], row.get("seconds", 0.0))
        if row["step"] >= steps:
            return 0.0
        if last is None or row["step"] <= last[0] or self._last[1] <= last[1]:
            return None
        return (self._last[1] - last[1]) / (row["step"] - last[0]) * (steps - row["step"])

    def close(self) -> None:
        self._line.end()
        self._journal.close()


_OF_IMAGES = ("samples", "images_per_s", "tokens_per_s")
_OF_STEPS = ("step", "left", "left_s", "loss", "grad_norm", "lr", "mfu", "checkpoint_at", "free_bytes")


def export(textfile: Textfile, process: dict[str, Any], row: dict[str, Any] | None = None) -> None:
    """Write a process's textfile.

    Args:
        process: this process's counts (`Throughput.of_process`).
        row: of the run, on the process that writes the journal.
    """
    if row is None:
        textfile.update(images=process)
    else:
        images = {**{name: row[name] for name in _OF_IMAGES}, "rejects": {"quarantined": row["quarantined"]}}
        textfile.update(images={**images, **process}, steps={name: row[name] for name in _OF_STEPS})


def read(path: Path) -> list[dict[str, Any]]:
    """The rows by step, each step once (the last attempt's), without events and torn lines.

    Raises:
        UserError: the file is missing.

    A row has: step (optimizer steps done), loss and grad_norm (means over the steps since the last row, over the global
    batch, before clipping), parts (of a loss that has several, by name, not weighted), lr, images_per_s and
    tokens_per_s (of all processes together), model_tflops (10^12 model FLOPs a second of all processes), mfu (their
    share of the devices' peak; null where that is not known), data_wait (share of the wall time that the slowest
    process waited for data), bucket ([height, width] of the row's last step), text_rows (its padded caption length),
    forward_tokens (the most image tokens of a forward pass of a process), padded_tokens (padding caption rows since the
    last row, all processes), quarantined (samples that substitute for unreadable ones since this attempt began, all
    processes), quarantine_rate (their share of the last 10,000 samples), memory_gib, reserved_gib (peaks on a GPU since
    the last row, allocated and reserved: the largest of any process, whose number is memory_rank, reserved_rank; null
    on the CPU), alloc_retries (how often since the last row the allocator of a GPU gave memory back and tried again,
    the most of any process; null on the CPU), rss_gib, rss_rank (the same for main memory, since the process began),
    seconds (since this attempt began) and time (UTC). In fp16 also loss_scale and skipped_steps (steps of the whole run
    that were skipped because the gradient overflowed); such steps do not count in grad_norm, which is null if the row
    has no other step.

    As rows of `encode` (docs/metrics.md) it has left (steps), left_s (seconds, at the speed since the last row), and of
    all processes samples, bytes (of records read), data_wait_s and the counts of stores.

    A row `event: validation` (`read_events` returns them) has step, loss (mean over the samples and noise levels of
    `training.validation`; null if it is not finite), by_sigma and by_bucket (its parts by noise level and by
    bucket), by_age (of `old` and of `new` samples, where they are separate), parts (and `Objective.contrast`), the same
    with `ema_` before the name (with the moving averages; null without them), samples, snapshot (where the samples are
    from), seconds and time. A row `event: pictures` has step, count, prompt_set, file (of the latents, in the run
    directory), seconds and time.
    """
    return read_events(path).get(None, [])


def read_events(path: Path, *, events_only: bool = False) -> dict[str | None, list[dict[str, Any]]]:
    """All rows with a step by their `event` (None: logged steps), each step once (the last attempt's); `start` rows are
    those of all attempts, each with the `seconds` of its last logged step.

    Args:
        events_only: leave out logged steps, which are nearly all rows.

    Raises:
        UserError: the file is missing.
    """
    starts: list[dict[str, Any]] = []
    events: dict[str | None, dict[int, dict[str, Any]]] = {}
    for values in rows.read(path, '"event"' if events_only else ""):
        if not isinstance(values.get("step"), int):
            continue
        if values.get("event") == "start":
            starts.append(values)
            # drop the steps of an earlier attempt after the step that this attempt starts from
            events = {
                event: {step: row for step, row in of_step.items() if step <= values["step"]}
                for event, of_step in events.items()
            }
        else:
            events.setdefault(values.get("event"), {})[values["step"]] = values
            if starts and "event" not in values:
                starts[-1]["seconds"] = values.get("seconds", 0.0)
    return {"start": starts} | {event: [of_step[step] for step in sorted(of_step)] for event, of_step in events.items()}


def not_looked_at(folder: Path, step: int, snapshot: str | None, *, validated: bool, drawn: bool) -> list[str]:
    """Say what a run lacks after its last step, in words.

    Args:
        folder: the run directory. snapshot: of the validation.
        validated, drawn: whether there is to be a validation, and a drawing.
    """
    journal = folder / "metrics.jsonl"
    events = read_events(journal) if journal.exists() else {}
    steps = [row["step"] for row in events.get("validation", []) if row.get("snapshot") == snapshot]
    lacking = ["validation"] if validated and step not in steps else []
    there = step in [row["step"] for row in events.get("pictures", []) if (folder / row["file"]).exists()]
    return lacking + (["pictures"] if drawn and not there else [])


def _line(row: dict[str, Any]) -> str:
    height, width = row["bucket"]
    parts = [
        f"loss {row['loss']:.4f}",
        *_parts(row),
        "grad overflow" if row["grad_norm"] is None else f"grad {row['grad_norm']:.3f}",
        f"lr {row['lr']:.2e}",
        f"{row['images_per_s']:.1f} images/s",
        f"data {100 * row['data_wait']:.0f}%",
        f"{height}x{width}",
    ]
    if row.get("skipped_steps"):
        parts.append(f"{row['skipped_steps']} skipped")
    if row.get("quarantined"):
        parts.append(f"{row['quarantined']} quarantined")
    if row.get("mfu") is not None:
        parts.insert(4, f"MFU {100 * row['mfu']:.0f}%")
    if row.get("memory_gib") is not None:
        parts.append(f"{row['memory_gib']:.1f} GiB on process {row['memory_rank']}, {row['reserved_gib']:.1f} reserved")
    elif row.get("rss_gib") is not None:
        parts.append(f"{row['rss_gib']:.1f} GiB of main memory")
    return "  ".join(parts)


def _validation_line(row: dict[str, Any], earlier: dict[str, Any], steps: int) -> str:
    parts = [f"validation after step {row['step']}/{steps}"]
    for name, key in (("loss", "loss"), ("EMA", "ema_loss")):
        value, before = row[key], earlier.get(key)
        if value is not None:
            parts.append(f"{name} {value:.4f}" + (f" ({value - before:+.4f})" if before is not None else ""))
        elif key == "loss" or row["ema_by_sigma"] is not None:
            parts.append(f"{name} is not a finite number")
    parts += _parts(row)
    ages = row.get("by_age") or {}
    parts += [f"{age} samples {value:.4f}" for age, value in ages.items() if value is not None]
    return "  ".join([*parts, f"{row['samples']} samples", f"{row['seconds']:.1f} s"])


def _parts(row: dict[str, Any]) -> list[str]:
    return [f"{name} {value:.4f}" for name, value in (row.get("parts") or {}).items() if value is not None]
