"""The training run: start or resume, the loop, metrics, checkpoints, a clean stop.

What: `fit` builds the model, spreads it over the processes, takes up a checkpoint if asked, and does optimizer steps
until `train.steps` or a signal (SIGTERM, SIGUSR1, Ctrl-C: save, then leave; a second Ctrl-C ends at once).
Why so little in the loop: what a batch is, is decided by the loader; what a step is, by `Step`; the loop only counts,
reports and saves. Every decision that all processes must take alike (what to resume, when to stop) is taken from one
value that all of them have.
Price: a stop signal is obeyed after the step in flight (on a GPU after one more), then one checkpoint is written.
No process ever holds the whole model: it is laid out without memory, spread, and each process reads its own slices.

A run directory holds `config.yaml` (every option of the last start), `metrics.jsonl`, `checkpoints/step-*` and, while a
training has it, `lock.json`.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.cache.local_files import make_folder
from pipeline.config import Config, TrainConfig, dump, reads, written
from pipeline.errors import ConfigError, UserError
from pipeline.launch import Launch, check_accelerate, check_restart, resolve_device
from pipeline.loader.loader import Batch, State
from pipeline.models import hub
from pipeline.models.objective import FlowMatching
from pipeline.models.sana import SanaTransformer
from pipeline.models.sana_config import Numerics, SanaConfig
from pipeline.models.sana_files import architecture_at
from pipeline.models.sana_start import Drawn, Start, Stored
from pipeline.parallel import pipeline_parallel, tensor_parallel
from pipeline.parallel.load_sharded import fill
from pipeline.parallel.mesh import DIMS, Layout, broadcast_from_rank_0, check_sizes, gather, started, together
from pipeline.parallel.parallelize import spread
from pipeline.retrying import stopping
from pipeline.training import checkpoint, optimizers, trackers
from pipeline.training.ema import EMA
from pipeline.training.feeding import Feed, Interrupted
from pipeline.training.lock import Lock, taken
from pipeline.training.metrics import Metrics
from pipeline.training.optimizers import in_backward
from pipeline.training.step import Outcome, Step
from pipeline.training.watch import Watch, memory_errors

Say = Callable[[str], None]

T = TypeVar("T")


@dataclass(frozen=True)
class Task:
    """What is to be trained on, as far as the trainer must know it.

    Attributes:
        origin: snapshot, seed and phase of the order; its step is ignored.
        batch: the global batch that `scale_lr` refers to (the largest of the snapshot's buckets).
        channels, text_width: of the latents and of the text rows.
        sample_size: side of the latent at the base resolution, for a model trained from scratch.
        loader: (start_step, stop_step) -> what yields this process's microbatches and the state after them.
        batches: the global batch of each bucket, by the bucket's name.
        names: what people call the samples of these ids, where that is known.
    """

    origin: State
    batch: int
    channels: int
    text_width: int
    sample_size: int
    loader: Callable[[int, int], Iterable[tuple[list[Batch], State]]]
    batches: Mapping[str, int]
    names: Callable[[Sequence[int]], Mapping[int, str]] = lambda ids: {}


@dataclass(frozen=True)
class Report:
    """How a run ended: steps done, the last checkpoint, the mean loss since the last logged row before the end (None
    if this attempt did no step), and the signal's name if one ended it."""

    step: int
    checkpoint: Path | None
    loss: float | None
    stopped_by: str | None


def fit(
    config: Config,
    task: Task,
    launch: Launch,
    *,
    resume: str | Path | None = None,
    say: Say = print,
    accepted: Callable[[], None] = lambda: None,
) -> Report:
    """Train until `config.train.steps`. Called by every process of the launch.

    Args:
        resume: None starts anew (the run directory must not hold checkpoints), `auto` continues from the newest
            checkpoint there or starts anew, a path continues from that checkpoint.
        say: prints one line; called on the first process only.
        accepted: called on the first process once it is certain that this run may start or resume.

    Raises:
        UserError: what a person can mend, in the same words on every process.
    """
    train, run = config.train, Path(config.train.output)
    quiet: Say = say if launch.is_main else lambda _: None
    layout = check_sizes(train.parallel, launch.world)
    check_accelerate(train, launch, sizes=dict(zip(DIMS[1:], layout.sizes[1:], strict=True)))
    check_restart()
    optimizers.check(train.optim)
    trackers.check(train.trackers)
    device = resolve_device(train.device, launch)
    _check_packed(train, device)
    if layout.copies > 1:
        shape = architecture_of(config, task)
        tensor_parallel.check(shape.tensor_parallel_parts, layout.tp, shape.dropout)
        shares = {bucket: batch // layout.data_world for bucket, batch in task.batches.items()}
        pipeline_parallel.check(shape.num_layers, shares, train.microbatch, train.parallel)
    in_backward.check(train, task.batch, layout.data_world)
    for line in launch.advice:
        quiet(f"note: {line}")
    with (
        memory_errors(train),
        started(launch, train.parallel, device) as mesh,
        _signals(launch.is_main, os.getppid() if launch.kind in ("torchrun", "accelerate") else None) as wanted,
        taken(run, quiet) as lock,
    ):
        found, notes = broadcast_from_rank_0(lambda: _choose(run, resume))
        for line in notes:
            quiet(line)
        architecture = together(lambda: architecture_of(config, task))
        together(lambda: _check_fit(architecture, task))
        if found is not None:
            together(lambda: checkpoint.check_belongs(*found, task.origin, architecture))
            before = found[1].config["train"]
            recipes = before.get("recipe", "default"), train.recipe
            optimizers.check_resumable(before["optim"]["name"], train.optim.name, recipes)
            if (done := found[1].state.step) >= train.steps:
                quiet(f"nothing to do: {done} steps are done, train.steps is {train.steps}")
                return Report(done, found[0], None, None)
        config = with_residual(config, found[1].config if found is not None else None)
        train = config.train
        broadcast_from_rank_0(accepted)
        values = together(lambda: start_values(config, architecture)) if found is None else None
        model = SanaTransformer.on_meta(architecture, numerics(train))
        model.reset_buffers()
        parameters = sum(parameter.numel() for parameter in model.parameters())
        held = spread(model, mesh, train)
        if values is not None:
            _check_equal_start(values)
            if isinstance(values, Stored):
                quiet(f"start weights: {values.taken}")
            together(lambda: fill(held.module, values))
        optimizer = optimizers.build(held.module, train.optim, device, seed=train.seed, recipe=train.recipe)
        averages = [EMA(held.module, train.ema)] if train.ema is not None else []
        step = Step(held, FlowMatching(train.flow), optimizer, train, device, task.names)
        done = 0
        if found is not None:
            source, document = found
            absent = checkpoint.load(source, document, held.module, optimizer, _sections(averages, step))
            done = document.state.step
            for line in _changes(document.config, config):
                quiet(f"changed since the checkpoint: {line}")
            if "ema" in absent:
                for average in averages:
                    average.restart()
                quiet(f"note: {source} holds no running average: it starts from the weights of step {done}")
            quiet(f"resumed from {source} after step {done}")
        if train.optim.in_backward:
            in_backward.fuse(optimizer, held)
        quiet(
            f"training {parameters / 1e6:.1f} M parameters on {launch.world} x {device.type} ({layout}), "
            f"{train.precision}, steps {done + 1} to {train.steps}, run directory {run}"
        )
        for line in optimizers.advice(train.optim, task.batch, train.steps):
            quiet(f"note: {line}")
        facts = {"step": done, "processes": launch.world, "device": device.type, "snapshot": task.origin.snapshot}
        journal = on_main_only(launch, lambda: _open_run(run, config, done, quiet, facts))
        loop = _Loop(config, task, layout, architecture, step, averages, device, journal, wanted, lock, quiet)
        try:
            return loop.run(done, found[0] if found else None)
        finally:
            if journal is not None:
                journal.close()


def with_residual(config: Config, before: dict[str, Any] | None) -> Config:
    """The configuration with `train.residual` decided: as given, else what the run began with, else fp32.

    Args:
        before: the configuration that the checkpoint to be resumed was written with.
    """
    if config.train.residual is not None:
        return config
    residual = "fp32" if before is None else before["train"].get("residual") or "compute"
    return config.model_copy(update={"train": config.train.model_copy(update={"residual": residual})})


def numerics(train: TrainConfig) -> Numerics:
    """How the model computes under `train.residual` (decided, see `with_residual`) and `train.recipe`."""
    theirs = {"cross_norm_eps": 1e-6, "attention_eps": 1e-8} if train.recipe == "nvlabs" else {}
    return Numerics(fp32_residual=train.residual == "fp32", **theirs)


def start_values(config: Config, architecture: SanaConfig) -> Start:
    """What a new run starts from: the files of `model.weights`, or values drawn with `train.seed`.

    Raises:
        UserError: weights that cannot be found or read.
    """
    weights = config.model.weights
    if weights is None:
        return Drawn(architecture, config.train.seed)
    return Stored(hub.resolve(weights, widest=True), weights.variant)


def architecture_of(config: Config, task: Task) -> SanaConfig:
    """The model's shape: that of the weights, or `model.arch`.

    Raises:
        UserError: weights that cannot be found or read.
    """
    if config.model.weights is not None:
        return architecture_at(hub.resolve(config.model.weights, ("config.json",)))
    if config.model.arch is None:
        raise ConfigError("neither model.weights nor model.arch is given")
    return SanaConfig.from_arch(config.model.arch, task.sample_size)


def snapshot_of(config: Config, resume: str | Path | None) -> str | None:
    """The id of the snapshot that the run to be resumed began with; None for a new run.

    Raises:
        UserError: the checkpoint cannot be read.
    """
    if resume is None:
        return None
    source = checkpoint.resolve(Path(config.train.output) / "checkpoints", resume)
    return None if source is None else checkpoint.read_document(source).state.snapshot


def generator_seed(train: TrainConfig, step: int, part: int) -> int:
    """What torch's generators (of dropout, say) are seeded with before a step, on the processes that read this part of
    the batch. A function of the step: a resumed run draws what an uninterrupted one does, and no state is stored."""
    key = f"{train.seed}/{train.phase}/{step}/{part}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


@contextmanager
def ended(steps: Iterator[T]) -> Iterator[Iterator[T]]:
    """Close what reads ahead as soon as the block is left: an error on its way holds on to it, and threads that still
    run when the interpreter ends abort the process."""
    try:
        yield steps
    finally:
        close = getattr(steps, "close", None)
        if close is not None:
            close()


def on_main_only(launch: Launch, function: Callable[[], Any]) -> Any:
    """The result on the first process, None on the others; its error on all of them."""
    return together(lambda: function() if launch.is_main else None)


# --------------------------------------------------------------------------------------------------------- start


def _choose(run: Path, resume: str | Path | None) -> tuple[tuple[Path, checkpoint.Document] | None, list[str]]:
    """Which checkpoint to take up, its document, and what to say about it. Writes nothing."""
    root = run / "checkpoints"
    held = checkpoint.newest(root)
    notes = [
        f"note: {path} is left over from an interrupted save and is ignored" for path in checkpoint.leftovers(root)
    ]
    if resume is None:
        if held is not None:
            raise ConfigError(
                f"the run directory {run} already holds checkpoints, the newest is {held.name}",
                fix="--resume auto to continue it, or --set train.output=DIR for a new run",
            )
        return None, notes
    source = checkpoint.resolve(root, resume)
    if source is None:
        return None, [*notes, f"no checkpoint in {root} yet: starting from the beginning"]
    if held is not None and held.resolve() != source.resolve():
        raise ConfigError(
            f"--resume {source}: the run directory {run} holds another, newer checkpoint, {held.name}",
            fix="--resume auto to continue from that one, or --set train.output=DIR to branch off into a new run",
        )
    return (source, checkpoint.read_document(source)), notes


def _check_packed(train: TrainConfig, device: torch.device) -> None:
    if train.packed_attention and device.type == "cuda":
        able = torch.cuda.get_device_capability(device) >= (8, 0)
        if train.precision == "fp32" or not able:
            raise ConfigError(
                "train.packed_attention: true has no kernel here",
                expected="train.precision: bf16 on a GPU of compute capability 8.0 or newer",
                found=f"train.precision: {train.precision} on {torch.cuda.get_device_name(device)}",
                fix="--set train.packed_attention=false",
            )


def _check_fit(architecture: SanaConfig, task: Task) -> None:
    pairs = (
        ("in_channels", architecture.in_channels, "the latents have", task.channels),
        ("caption_channels", architecture.caption_channels, "the text rows have", task.text_width),
    )
    for name, ours, theirs, found in pairs:
        if ours != found:
            raise ConfigError(
                f"the model and the snapshot do not fit: the model's {name} is {ours}, {theirs} {found}",
                fix="train on a snapshot made with this model's encoders, or change the model section",
            )


def _check_equal_start(values: Start) -> None:
    """Every process takes its slices from its own files or its own generator: different ones would be mixed without a
    trace."""
    found = gather(together(values.fingerprint))
    if len(set(found)) > 1:
        odd = [rank for rank, value in enumerate(found) if value != found[0]]
        raise UserError(
            "the processes start from different weights",
            found=f"processes {odd} differ from process 0",
            fix="give every node the same files under model.weights and the same versions of torch",
        )


def _open_run(run: Path, config: Config, done: int, say: Say, facts: dict[str, Any]) -> Metrics:
    """Make the run directory, keep an earlier configuration that differs under its own name, open the journal."""
    text, path = dump(config), run / "config.yaml"
    try:
        make_folder(run)
        if path.exists() and (earlier := path.read_text(encoding="utf-8")) != text:
            (run / f"config-until-step-{done:08d}.yaml").write_text(earlier, encoding="utf-8")
        fresh = path.with_suffix(".yaml.tmp")
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    except OSError as error:
        raise UserError(f"{run}: cannot be written: {error}", fix="check the rights, or set train.output") from None
    followers = trackers.Trackers(config.train.trackers, run, done, written(config), say)
    journal = Metrics(run / "metrics.jsonl", say, followers)
    journal.start(**facts)
    return journal


def _changes(before: dict[str, Any], config: Config) -> list[str]:
    """`train.optim.lr: 0.0001 -> 2e-05` for every option of training that both versions have and that differs."""

    def differing(old: Any, new: Any, name: str) -> Iterator[str]:
        if isinstance(old, dict) and isinstance(new, dict):
            for below in sorted(old.keys() & new.keys()):
                yield from differing(old[below], new[below], f"{name}.{below}")
        elif old != new and reads("train", name[1:]):
            yield f"{name[1:]}: {old} -> {new}"

    return list(differing(before, written(config), ""))


AGAIN_S = 1.0
"""A second Ctrl-C counts after so long: launchers pass on what the terminal has sent already."""


@dataclass
class _Wanted:
    """Set by a signal; read by the loop.

    begun: the loop runs, so that there will be something to save. launcher: its process id, if its end is to count.
    """

    name: str | None = None
    begun: bool = False
    since: float = 0.0
    launcher: int | None = None

    def asked(self) -> str | None:
        """What asked for the end, if anything did. A launcher that was killed could not; its end is noticed here."""
        if self.name is None and self.launcher not in (None, os.getppid()):
            self.name = "the end of the launcher"
        return self.name

    def check(self) -> None:
        """Raises Interrupted if the end was asked for."""
        if self.asked() is not None:
            raise Interrupted(self.name)


@contextmanager
def _signals(speaks: bool, launcher: int | None = None) -> Iterator[_Wanted]:
    """SIGTERM, SIGUSR1 and SIGINT ask for a clean end; SIGINT ends at once before the first step, and when it is the
    second signal. Elsewhere than in the main thread signals cannot be caught; a SIGINT that is ignored stays so.

    Args:
        speaks: whether this process says on stderr what becomes of the signal.
        launcher: see `_Wanted`.
    """
    wanted = _Wanted(launcher=launcher)
    if threading.current_thread() is not threading.main_thread():
        yield wanted
        return

    def tell(line: str) -> None:
        if speaks:
            os.write(2, f"sana-pipe: {line}\n".encode())  # a signal may come in the middle of a print

    def note(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and not wanted.begun:
            signal.default_int_handler(number, frame)
        if wanted.name is None:
            wanted.name, wanted.since = signal.Signals(number).name, time.monotonic()
            end = "a checkpoint will be written after this step; Ctrl-C then ends at once, without one"
            tell(f"{wanted.name}: {end if wanted.begun else 'the run ends as soon as it has started'}")
        elif number == signal.SIGINT and time.monotonic() - wanted.since > AGAIN_S:
            tell("ended without a checkpoint of the last steps; continue with --resume auto")
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    caught = [signal.SIGTERM, signal.SIGUSR1]
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        caught.append(signal.SIGINT)
    before = {number: signal.signal(number, note) for number in caught}
    try:
        yield wanted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---------------------------------------------------------------------------------------------------------- loop


def _sections(averages: list[EMA], step: Step) -> dict[str, dict[str, Tensor]]:
    """What a checkpoint holds beside model and optimizer."""
    found = {"ema": averages[0].values} if averages else {}
    return {**found, **({"loss_scale": step.scale.state} if step.scale.dynamic else {})}


class _Loop:
    def __init__(
        self,
        config: Config,
        task: Task,
        layout: Layout,
        architecture: SanaConfig,
        step: Step,
        averages: list[EMA],
        device: torch.device,
        journal: Metrics | None,
        wanted: _Wanted,
        lock: Lock,
        say: Say,
    ):
        self.config, self.train, self.task = config, config.train, task
        self.architecture, self.model = architecture, step.spread.module
        self.step, self.averages, self.more = step, averages, _sections(averages, step)
        self.optimizer, self.device = step.optimizer, device
        self.journal, self.wanted, self.lock, self.say = journal, wanted, lock, say
        self.watch = Watch(config.train, architecture, layout, device, say)
        self.part = layout.data_rank(dist.get_rank())
        self.root = Path(config.train.output) / "checkpoints"
        self.began = time.perf_counter()
        self.loss: float | None = None

    def run(self, done: int, source: Path | None) -> Report:
        saved = source
        loader = together(lambda: self.task.loader(done, self.train.steps))
        state = None
        self.model.train()
        self.wanted.begun = True
        with ended(iter(loader)) as steps, self._saver() as saver, stopping(self.wanted.check):
            feed = Feed(steps, lambda: getattr(loader, "replaced", 0), self.config, self.say)
            for waited, microbatches, state in feed:
                rate = optimizers.learning_rate(self.train.optim, self.task.batch, state.step - 1, self.train.recipe)
                optimizers.set_learning_rate(self.optimizer, rate)
                self._seed(state.step)
                stop = self.wanted.asked() is not None or saver.failed or self.lock.lost
                outcome = self.step(microbatches, state.step, stop=stop)
                for average in self.averages:
                    average.update(state.step)
                self.watch.add(outcome, microbatches, waited)
                last = state.step == self.train.steps or self.step.stop_wanted
                if last or state.step % self.train.log_every == 0:
                    self._log(outcome, rate, microbatches, getattr(loader, "replaced", 0), feed.share)
                if last or state.step % self.train.save_every == 0:
                    with self.watch.aside():
                        self.step.settle()
                        saver.save(self.model, self.optimizer, state, self.more)
                    saved = checkpoint.folder_of(self.root, state.step)
                if last:
                    break
            if feed.broken:
                if state is not None and saved != checkpoint.folder_of(self.root, state.step):
                    self.step.settle()
                    saver.save(self.model, self.optimizer, state, self.more)
                    saved = checkpoint.folder_of(self.root, state.step)
                saver.wait()  # so that what was saved is said before the reason
                feed.settle()
        done, stopped = done if state is None else state.step, self.step.stop_wanted or feed.broken
        if done < self.train.steps and not stopped:
            raise RuntimeError(f"the loader ended at step {done} of {self.train.steps}")
        names = [name for name in gather(self.wanted.name) if name] if stopped else []
        if names and done < self.train.steps:
            self.say(f"stopped by {names[0]} after step {done}; continue with --resume auto")
        return Report(done, saved, self.loss, names[0] if names else None)

    def _seed(self, step: int) -> None:
        seed = generator_seed(self.train, step, self.part)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed looks for every kind of device each time
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _log(self, outcome: Outcome, rate: float, microbatches: list[Batch], replaced: int, share: float) -> None:
        self.step.settle()
        counted = self.watch.values(replaced)
        self.loss = counted["loss"]
        if self.journal is None or self.lock.lost:
            return
        values = {
            "step": outcome.step,
            "lr": rate,
            **counted,
            "quarantine_rate": share,
            "bucket": list(outcome.bucket),
            "text_rows": microbatches[0].mask.shape[1],
            "seconds": time.perf_counter() - self.began,
        }
        if self.step.scale.dynamic:
            values |= {"loss_scale": self.step.scale.value, "skipped_steps": self.step.scale.skipped}
        self.journal.row(self.train.steps, values)

    def _saver(self) -> checkpoint.Saver:
        return checkpoint.Saver(self.root, self.architecture, self.config, self.say, self.lock)
