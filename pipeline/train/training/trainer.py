"""The training run in outline: check, build, loop.

`fit` does optimizer steps until `train.steps` or a stop request (SIGTERM, SIGUSR1, SIGHUP, Ctrl-C: save, then leave),
which takes effect after the step in flight (on a GPU after one more). What all processes must decide alike (what to
resume, when to stop) derives from one value that all of them have.
A run directory holds `config.yaml` (every option of the last start), `metrics.jsonl`, `checkpoints/step-*`, and, where
used, `prediction.json`, `pictures/`, `profile/`, `from.json` (`--from`), and `lock.json` while a training uses it; the
stage adds `summary.json` at the end.
"""

from __future__ import annotations

import hashlib
import shlex
import sys
import time
from collections.abc import Generator, Iterable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from sana_pipe.base import retrying, software
from sana_pipe.base.disk import free_if_known, replacing
from sana_pipe.base.errors import UserError, printed_first, writing
from sana_pipe.base.launch import Launch, set_tf32
from sana_pipe.base.metrics.textfile import Textfile
from sana_pipe.base.metrics.trackers import Trackers
from sana_pipe.base.processes import shown
from sana_pipe.base.terminal import LiveLine
from sana_pipe.base.yaml_text import as_yaml
from sana_pipe.data.loader.loader import Batch, LoaderState
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.parallel.collectives import all_gather_objects, broadcast_from_rank_0, run_on_all
from sana_pipe.train.parallel.mesh import open_mesh
from sana_pipe.train.training import checkpoint, optimizers
from sana_pipe.train.training.assemble import Trainable
from sana_pipe.train.training.build import TrainingRun, build, trainable_of
from sana_pipe.train.training.checkpoint import Resumed
from sana_pipe.train.training.checks import check_inputs, check_start, check_versions
from sana_pipe.train.training.drawings import Drawings
from sana_pipe.train.training.feeding import Feed
from sana_pipe.train.training.lock import Lock, run_lock
from sana_pipe.train.training.memory import memory_errors
from sana_pipe.train.training.metrics import Metrics, export, not_looked_at, read_events
from sana_pipe.train.training.profiling import tracing
from sana_pipe.train.training.step import Outcome
from sana_pipe.train.training.stop_request import StopRequest, catch_signals_of
from sana_pipe.train.training.task import Compare, Context, Log, Report, TrainingTask
from sana_pipe.train.training.throughput import Throughput
from sana_pipe.train.training.validation import Validation

T = TypeVar("T")


def fit(
    train: TrainConfig,
    task: TrainingTask,
    launch: Launch,
    *,
    resume: str | Path | None = None,
    origin: str | Path | None = None,
    log: Log = print,
    stop: StopRequest | None = None,
) -> Report:
    """Train until `train.steps`. Called by every process of the launch.

    Args:
        resume: None starts anew (the run directory must not hold checkpoints), `auto` continues from the newest
            checkpoint there or starts anew, a path continues from that checkpoint.
        origin: a checkpoint whose weights, moments and averages a new run begins with; the task's phase should be
            another than its phase. With `resume="auto"` it counts until the run has a checkpoint.
        log: prints one line; called on the first process only.
        stop: of a caller that catches the signals; None: they are caught here.

    Raises:
        UserError: the same message on every process.
    """
    progress = LiveLine(launch.is_main and sys.stdout.isatty() and sys.stderr.isatty())
    log = progress.above(log)
    context = check_inputs(train, task, launch, log if launch.is_main else lambda line: None)
    log = context.log
    set_tf32(train.tf32)
    for line in launch.advice:
        log(f"note: {line}")
    expected = task.expect(context) if launch.is_main else None
    with (
        open_mesh(launch, train.parallel, context.device, context.layout, patience_s=task.patience_s) as mesh,
        memory_errors(train),
        catch_signals_of(launch) if stop is None else nullcontext(stop) as stop,
        run_lock(context.folder, log) as lock,
    ):
        stop.looping = False
        check_versions()
        resumed, notes = broadcast_from_rank_0(lambda: checkpoint.choose(context.folder, resume, origin))
        for line in notes:
            log(line)
        trainable = run_on_all(lambda: trainable_of(train, task, start=resumed is None))
        check_start(context, trainable, resumed)
        if resumed is not None and (done := resumed.done) >= train.steps:
            lacking = broadcast_from_rank_0(lambda: _not_looked_at(context)) if done == train.steps else []
            if not lacking:
                log(f"nothing to do: {done} steps are done, and train.steps is {train.steps}")
                return Report(done, resumed.folder, None, None)
            log(
                f"{done} steps are done, and train.steps is {train.steps}; still to do after the last step: "
                f"{', '.join(lacking)}"
            )
        under_way = resumed if resumed and not resumed.begins and resumed.done < train.steps else None
        if under_way and (why := broadcast_from_rank_0(lambda: _why_ended(context, trainable, under_way))):
            log(_ended(under_way.done, why))
            return Report(under_way.done, under_way.folder, None, None)
        broadcast_from_rank_0(task.accepted)
        run = build(context, mesh, trainable, resumed)
        for line in optimizers.advice(train.optim, train.steps):
            log(f"note: {line}")
        journal = run_on_all(lambda: _open_run_directory(run, expected, progress) if launch.is_main else None)
        with closing(journal) if journal is not None else nullcontext():
            return Loop(run, journal, stop, lock).execute()


def _not_looked_at(context: Context) -> list[str]:
    """Return what the run lacks after its last step: a signal ended it before."""
    validation, task = context.train.validation, context.task
    snapshot, validated = None if validation is None else validation.snapshot, task.validation is not None
    drawn = task.pictures is not None
    return not_looked_at(context.folder, context.train.steps, snapshot, validated=validated, drawn=drawn)


def _why_ended(context: Context, trainable: Trainable, resumed: Resumed) -> str | None:
    """Say why the validation after a checkpoint has ended the run; None: it has not, or would not under the options of
    today."""
    journal, objective, validation = context.folder / "metrics.jsonl", trainable.objective, context.train.validation
    if not objective.may_end or validation is None or not journal.exists():
        return None
    rows = read_events(journal, events_only=True).get("validation", [])
    rows = [row for row in rows if row["snapshot"] == validation.snapshot and row["step"] <= resumed.done]
    if not rows or rows[-1]["step"] != resumed.done:
        return None
    return objective.why_end([row["parts"] for row in rows if row.get("parts")])


def _ended(step: int, why: str) -> str:
    return (
        f"ended after step {step}: {why}. sana-pipe export --best takes the checkpoint with the lowest held-out loss; "
        "--resume auto --set train.prefer.stop=null goes on"
    )


def _open_run_directory(run: TrainingRun, expected: Compare | None, progress: LiveLine) -> Metrics:
    """Make the run directory, rename an earlier configuration that differs, open the journal."""
    context, folder = run.context, run.context.folder
    tree = context.task.written.tree
    text, path = as_yaml(tree, sort_keys=False), folder / "config.yaml"
    with writing(folder, "check the permissions, or set train.output", again="--resume auto"):
        if path.exists() and (earlier := path.read_bytes()) != text.encode():
            (folder / f"config-until-step-{run.done:08d}.yaml").write_bytes(earlier)
        checkpoint.record(folder, run.resumed)
        with replacing(path) as work:
            work.write_text(text, encoding="utf-8")
    services = Trackers(context.train.trackers, folder, run.done, tree, context.log)
    journal = Metrics(folder / "metrics.jsonl", context.log, services, expected, progress, context.task.epoch_steps)
    journal.start(
        step=run.done,
        processes=context.launch.world,
        device=context.device.type,
        tf32=context.train.tf32,
        snapshot=context.task.first_state.snapshot,
        **software.written_by(gpu_name(context.device)),
        **({"began_from": str(run.resumed.folder)} if run.resumed is not None and run.resumed.begins else {}),
    )
    board = [f"tensorboard --logdir {shlex.quote(str(folder))}"] if "tensorboard" in context.train.trackers else []
    context.log(f"losses and pictures at any time: {'; '.join([shown('report', '--run', str(folder)), *board])}")
    return journal


def gpu_name(device: torch.device) -> str:
    """The name of a GPU, `cpu` for the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def generator_seed(state: LoaderState, step: int, reader: int) -> int:
    """Seed of torch's generators (a model's dropout) before a step, for the processes that read one share of a batch.
    A resumed run draws the values of an uninterrupted one, without stored state. state: of the run."""
    key = f"{state.seed}/{state.phase}/{step}/{reader}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def closable(steps: Iterable[T]) -> Generator[T]:
    """Closing it ends the threads of a loader, which a raised error would keep alive: threads that still run when the
    interpreter ends abort the process."""
    yield from steps


# ---------------------------------------------------------------------------------------------------------- loop


class Loop:
    """The steps of a run, and what is logged and saved after them. The journal is the first process's."""

    def __init__(self, run: TrainingRun, journal: Metrics | None, stop: StopRequest, lock: Lock):
        context = run.context
        self.run, self.context, self.train = run, context, context.train
        self.step, self.journal, self.stop, self.lock = run.step, journal, stop, lock
        self.throughput = Throughput(context.train, run.trainable.spec, context.layout, context.device, context.log)
        self.reader = context.layout.data_rank(dist.get_rank())
        written_by = software.written_by(gpu_name(context.device))
        task, contents = context.task, {**run.identity, "config": context.task.written.tree, "written_by": written_by}
        self.saver = checkpoint.Saver(
            context.folder / "checkpoints", contents, self.train, context.log, lock, run.began_from, task.patience_s
        )
        rank, name = context.launch.rank, "/".join(context.folder.absolute().parts[-2:])
        labels = {"stage": "train", "run": name, "task": rank, "folder": context.folder.resolve()}
        self.textfile = Textfile(task.textfile, labels, retrying.log)
        self.began = time.perf_counter()
        self.done, self.saved = run.done, run.checkpoint
        self.loss: float | None = None
        self.validation, self.drawings = Validation(run, journal, stop, lock), Drawings(run, journal, stop, lock)
        self.interrupted = False
        self.row: dict[str, object] | None = None

    def execute(self) -> Report:
        steps = self.train.steps
        loader = run_on_all(lambda: self.context.task.loader(self.context.layout, self.done, steps))
        self.run.model.module.train()
        self.stop.looping = True
        context, launch = self.context, self.context.launch
        with (
            closing(closable(loader)) as microbatches,
            self.saver,
            printed_first(launch.rank, launch.world),
            memory_errors(self.train),
            retrying.stopping(self.stop.check),
            self.textfile.renewed(),
            tracing(self.train.profile, context.folder, launch.rank, context.device, context.log) as traced,
        ):
            feed = Feed(
                microbatches,
                lambda: getattr(loader, "substituted", 0),
                context.folder,
                context.task.patience_s,
                context.log,
            )
            state: LoaderState | None = None
            self._look(state)
            for waited, batches, state in feed:
                outcome = self.step_once(batches, state.step)
                traced(state.step)
                self.throughput.add(outcome, batches, waited)
                last = state.step == steps or self.step.stop_wanted
                if last or state.step % self.train.log_every == 0:
                    self._log(outcome, batches, getattr(loader, "substituted", 0), feed.share)
                self._look(state)
                last = last or self.interrupted or self.validation.ended is not None
                if last or state.step % self.train.save_every == 0:
                    self._save(state)
                if last:
                    break
            if feed.broken:
                if state is not None:
                    self._save(state)
                self.saver.wait()  # its message comes before the error
                feed.raise_failure()
            self._export_last()
        return self._report(stopped=self.step.stop_wanted or self.interrupted or feed.broken)

    def step_once(self, batches: list[Batch], step: int) -> Outcome:
        optimizers.set_learning_rate(self.run.optimizer, self._learning_rate(step))
        self._seed(step)
        stop = self.stop.reason() is not None or self.saver.failed or self.lock.lost
        outcome = self.step(batches, step, stop=stop)
        if self.run.ema is not None:
            self.run.ema.update(self.run.steps_before + step)
        self.done = step
        return outcome

    def _learning_rate(self, step: int) -> float:
        train = self.train
        return optimizers.learning_rate(train.optim, step - 1, train.steps, train.numerics)

    def _seed(self, step: int) -> None:
        seed = generator_seed(self.context.task.first_state, step, self.reader)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed looks for every kind of device each time
        if self.context.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _log(self, outcome: Outcome, batches: list[Batch], replaced: int, share: float) -> None:
        self.step.await_verdict()
        row = self.throughput.row(replaced)
        self.loss = row["loss"]
        if self.journal is None or self.lock.lost:
            export(self.textfile, self.throughput.of_process)
            return
        values = {
            "step": outcome.step,
            "lr": self._learning_rate(outcome.step),
            **row,
            "quarantine_rate": share,
            "bucket": list(outcome.bucket),
            "text_rows": batches[0].mask.shape[1],
            "seconds": time.perf_counter() - self.began,
            "checkpoint_at": self.saver.saved_at,
            "free_bytes": free_if_known(self.context.folder),
        }
        if self.step.scale.dynamic:
            values |= {"loss_scale": self.step.scale.value, "skipped_steps": self.step.scale.skipped}
        self.row = self.journal.row(self.train.steps, values)
        export(self.textfile, self.throughput.of_process, self.row)

    def _export_last(self) -> None:
        """Write the textfile once more, with the time of the last checkpoint, which comes after the last row."""
        if self.row is not None:
            self.saver.wait()
            export(self.textfile, self.throughput.of_process, {**self.row, "checkpoint_at": self.saver.saved_at})

    def _look(self, state: LoaderState | None) -> None:
        """Validate and draw if it is due. The steps before an error are saved."""
        try:
            with self.throughput.paused():
                self.interrupted = not (self.validation(self.done) and self.drawings(self.done))
        except UserError:
            if state is not None:
                self._save(state)
                self.saver.wait()
            raise

    def _save(self, state: LoaderState) -> None:
        """Save a checkpoint, unless this step has one."""
        folder = checkpoint.folder_of(self.context.folder / "checkpoints", state.step)
        if self.saved == folder:
            return
        with self.throughput.paused():
            self.step.await_verdict()
            self.saver.save(self.run.model.module, self.run.optimizer, state, self.run.sections())
        self.saved = folder

    def _report(self, stopped: bool) -> Report:
        if self.validation.ended is not None and self.done < self.train.steps:
            self.context.log(_ended(self.done, self.validation.ended))
        elif self.done < self.train.steps and not stopped:
            raise RuntimeError(f"the loader ended at step {self.done} of {self.train.steps}")
        names = [name for name in all_gather_objects(self.stop.name) if name] if stopped else []
        if names and self.done < self.train.steps:
            self.context.log(f"stopped by {names[0]} after step {self.done}; continue with --resume auto")
        elif names and self.journal is not None and (lacking := _not_looked_at(self.context)):
            what = ", ".join(lacking)
            self.context.log(f"stopped by {names[0]} after the last step; --resume auto does what is left: {what}")
        return Report(self.done, self.saved, self.loss, names[0] if names else None)
