"""Real steps on the present device, and the constants of the time that follow from them.

What: `calibrate` runs steps of a configuration on made-up batches, as many of its blocks and samples as take seconds,
and corrects the seconds of each class of kernels (`Constants.corrected`). `save` writes the result into the card's
document (`path_of`), `load` reads it.
Why by class: checkpointing, another optimizer or larger pictures change the classes' shares, so one factor would not
carry over.
Price: collectives are not measured: one process runs. Each precision and optimizer is calibrated separately.
"""

from __future__ import annotations

import fcntl
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from pipeline.cache.local_files import replacing
from pipeline.config import TrainConfig
from pipeline.errors import UserError, writing
from pipeline.loader.loader import Batch
from pipeline.models.objective import FlowMatching
from pipeline.models.sana import SanaTransformer
from pipeline.models.sana_config import SanaConfig
from pipeline.parallel.mesh import Layout
from pipeline.parallel.parallelize import parallelize
from pipeline.parallel.shards import local
from pipeline.planning.cards import Card
from pipeline.planning.cost import Constants, Time, class_of, loads
from pipeline.planning.predict import Data, Machine, Prediction, as_new_run, predict
from pipeline.planning.trace import CUSTOM, Shape, watch_updates
from pipeline.planning.tracker import UPDATE, Stopwatch
from pipeline.training import optimizers
from pipeline.training.build import numerics
from pipeline.training.ema import EMA
from pipeline.training.memory import memory_errors
from pipeline.training.optimizers import in_backward
from pipeline.training.step import TrainStep

STEPS = 5
"""Steps whose median counts."""
STEP_S = 10.0
"""A calibrated step has so many blocks and samples that it takes about this long at most."""
Clock = Callable[[], float]


# ---------------------------------------------------------------------------------------------------------- real steps


class RealStep:
    """Optimizer steps of one process on made-up batches: the run's model, strategy, step, optimizer and EMA.

    Args:
        mesh: of this process alone or of a launch.
    """

    def __init__(
        self, architecture: SanaConfig, train: TrainConfig, shape: Shape, device: torch.device, mesh: DeviceMesh
    ):
        whole = SanaTransformer.on_meta(architecture, numerics(train))
        whole.reset_buffers()
        self.model = parallelize(whole, mesh, train)
        with torch.no_grad():
            for parameter in self.model.module.parameters():
                local(parameter).fill_(1e-3)
        self.optimizer = optimizers.build(self.model.module, train.optim, device, seed=train.seed, recipe=train.recipe)
        self.ema = EMA(self.model.module, train.ema) if train.ema is not None else None
        if train.optim.in_backward:
            in_backward.fuse(self.optimizer, self.model)
        self.step = TrainStep(self.model, FlowMatching(train.flow), self.optimizer, train, device)
        self.device, self.done = device, 0
        self._batches = [made_up_batch(architecture, shape, 0)] * shape.count

    def __call__(self, clock: Clock = time.perf_counter) -> float:
        """Do a step. Returns its seconds."""
        began = clock()
        self.step_once()
        return clock() - began

    def watched(self, clock: Clock = time.perf_counter) -> dict[str, float]:
        """Do a step. Returns its seconds by class of kernels; they leave out the time between operations."""
        watch = Stopwatch(inside=() if self.device.type == "cuda" else CUSTOM, device=self.device, clock=clock)
        watch.phase = "forward"
        with watch_updates(self.optimizer, watch), self._compiled_update_in(watch), watch:
            self.step_once(watch)
        return watch.finish()

    @contextmanager
    def _compiled_update_in(self, watch: Stopwatch) -> Iterator[None]:
        """A compiled update is one operation: torch compiles nothing while operations are watched."""
        if not getattr(self.optimizer, "compiled", False):
            yield
            return
        update = self.optimizer.update_one  # type: ignore[attr-defined]
        self.optimizer.update_one = partial(watch.whole, UPDATE, update)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            self.optimizer.update_one = update  # type: ignore[attr-defined]

    def step_once(self, watch: Stopwatch | None = None) -> None:
        self.done += 1
        self.step(self._batches, self.done)
        if watch is not None:
            watch.phase = "optimizer"
        if self.ema is not None:
            self.ema.update(self.done)
        self.step.await_verdict()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def made_up_batch(architecture: SanaConfig, shape: Shape, number: int) -> Batch:
    """Random values of a microbatch's shapes; `number` seeds them."""
    generator = torch.Generator().manual_seed(number)
    samples, size = shape.microbatch, (shape.microbatch, architecture.in_channels, shape.height, shape.width)
    return Batch(
        latents=torch.randn(size, generator=generator).bfloat16(),
        captions=torch.randn(samples, shape.rows, architecture.caption_channels, generator=generator).bfloat16(),
        mask=torch.ones(samples, shape.rows, dtype=torch.bool),
        noise=torch.randn(size, generator=generator),
        logit=torch.randn(samples, generator=generator),
        sample_ids=tuple(range(samples)),
        bucket=(shape.height, shape.width),
    )


# --------------------------------------------------------------------------------------------------------- calibration


@dataclass(frozen=True)
class Steps:
    """Of one microbatch: seconds of a step, as expected before and after, and as measured; `measured` by class."""

    microbatch: int
    before: float
    after: float
    measured: dict[str, float]

    @property
    def step(self) -> float:
        return sum(self.measured.values())


@dataclass(frozen=True)
class Calibration:
    """Measured steps of one precision and optimizer on one device.

    Attributes:
        blocks: of the measured model.
    """

    constants: Constants
    card: Card
    shape: Shape
    blocks: int
    steps: tuple[Steps, ...]


def calibrate(
    train: TrainConfig,
    architecture: SanaConfig,
    data: Data,
    machine: Machine,
    device: torch.device,
    mesh: Callable[[], Any],
    constants: Constants | None = None,
    clock: Clock = time.perf_counter,
) -> Calibration:
    """Measure steps of the worst bucket with the configured microbatch and with half of it (with 1 and 2).

    Args:
        machine: of this device alone. mesh: opens a mesh of this process alone. constants: to be corrected.

    Raises:
        ConfigError: a technique that the trace does not cover.
        UserError: not even the smallest step fits.
    """
    constants = constants or Constants()
    largest = largest_fitting(as_new_run(train), architecture, data, machine)
    microbatch = largest.train.microbatch
    measured = []
    for samples in (microbatch, microbatch // 2 or 2):
        part = largest.at(samples)
        prediction = part.predicted()
        with mesh() as opened, memory_errors(part.train):
            step = RealStep(part.architecture, part.train, prediction.shape, device, opened)
            seconds = timed(step, clock)
            del step
            gc.collect()  # FSDP2's modules refer to each other
            if device.type == "cuda":
                torch.cuda.empty_cache()
        named = {class_of(name, train): value for name, value in seconds.items()}
        measured.append((part, prediction, named))
    after = constants.corrected([(seconds, loads(prediction, constants)) for _, prediction, seconds in measured])
    steps = []
    for part, prediction, seconds in measured:
        before_s, after_s = (Time.of(prediction, part.data, each).step for each in (constants, after))
        steps.append(Steps(part.train.microbatch, before_s, after_s, seconds))
    return Calibration(after, machine.card, measured[0][1].shape, largest.architecture.num_layers, tuple(steps))


def timed(step: RealStep, clock: Clock = time.perf_counter) -> dict[str, float]:
    """Seconds of a step by class: medians of `STEPS` steps, scaled so that they make up a step without stopwatch."""
    for _ in range(2):  # kernels are chosen, states are made
        step()
    watched, plain = [], []
    for _ in range(STEPS):
        plain.append(step(clock))
        watched.append(step.watched(clock))
    names = sorted({name for seconds in watched for name in seconds})
    medians = {name: statistics.median(seconds.get(name, 0.0) for seconds in watched) for name in names}
    factor = statistics.median(plain) / sum(medians.values())
    return {name: seconds * factor for name, seconds in medians.items()}


@dataclass(frozen=True)
class _Part:
    """What one process runs of a configuration."""

    train: TrainConfig
    architecture: SanaConfig
    data: Data
    machine: Machine

    def at(self, microbatch: int) -> _Part:
        """With a step of one microbatch of so many samples."""
        ((bucket, _),) = self.data.buckets.items()
        train = self.train.model_copy(update={"microbatch": microbatch})
        return replace(self, train=train, data=replace(self.data, buckets={bucket: microbatch}))

    def predicted(self) -> Prediction:
        return predict(self.train, self.architecture, self.data, self.machine, layout=Layout(1, 1, 1, 1))


def largest_fitting(train: TrainConfig, architecture: SanaConfig, data: Data, machine: Machine) -> _Part:
    """The largest part of the configuration that fits and takes `STEP_S` at most by the constants of the table."""
    bucket, share = data.worst(1, train.microbatch)
    sizes = {"dp_replicate": 1, "dp_shard": -1, "tp_size": 1, "cp_size": 1, "pp_size": 1}
    parallel = train.parallel.model_copy(update=sizes)
    alone = train.model_copy(update={"parallel": parallel})
    part = _Part(alone, architecture, replace(data, buckets={bucket: share}), machine)
    part = part.at(min(train.microbatch, share))
    while True:
        prediction = part.predicted()
        fits = prediction.total <= 0.9 * machine.memory
        layers, microbatch = part.architecture.num_layers, part.train.microbatch
        if fits and (Time.of(prediction, part.data).step <= STEP_S or (layers <= 2 and microbatch == 1)):
            return part
        if layers > 2:
            part = replace(part, architecture=replace(part.architecture, num_layers=max(2, layers // 2)))
        elif microbatch > 1:
            part = part.at(microbatch // 2)
        else:
            raise UserError(
                "not even two blocks and one sample of this configuration fit into this device's memory",
                expected=f"{prediction.total / 2**30:.1f} GiB",
                found=f"{machine.memory / 2**30:.1f} GiB",
                fix="calibrate with a smaller --config",
            )


# -------------------------------------------------------------------------------------------------------- the document


def path_of(card: Card) -> Path:
    """Where the calibration of a card is stored: one JSON document, for any precision."""
    try:
        home = Path.home()
    except RuntimeError:
        raise UserError("there is no home folder for calibrations", fix="set HOME") from None
    return home / ".config" / "sana-pipe" / "calibration" / f"{card.name}.json"


def _key(train: TrainConfig) -> str:
    return train.precision + (" with tf32" if train.tf32 else "")


def save(calibration: Calibration, train: TrainConfig, device: torch.device) -> Path:
    """Add a calibration to its card's document.

    Raises:
        UserError: the document cannot be written.
    """
    path = path_of(calibration.card)
    on_gpu = device.type == "cuda"
    entry = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if on_gpu else "CPU",
        "threads": None if on_gpu else torch.get_num_threads(),
        "blocks": calibration.blocks,
        **asdict(calibration.shape),
        "steps": [asdict(steps) for steps in calibration.steps],
        "constants": asdict(calibration.constants),
    }
    with writing(path, "check the rights of this folder"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)  # other calibrations add their precision
            entries = {**_entries(path), _key(train): entry}
            with replacing(path) as work:
                work.write_text(json.dumps({"card": calibration.card.name, "precisions": entries}, indent=1) + "\n")
    return path


def find(card: Card, train: TrainConfig) -> Constants | None:
    """The calibrated constants for a card in this precision; None: there are none.

    Raises:
        UserError: a document that cannot be read.
    """
    path = path_of(card)
    entry = _entries(path).get(_key(train))
    if entry is None:
        return None
    try:
        return Constants(**entry["constants"])
    except (KeyError, TypeError) as error:
        raise _unreadable(path, error) from None


def constants_or_default(machine: Machine) -> Callable[[TrainConfig], Constants]:
    """The constants for a configuration on this machine: calibrated, or those of the data sheet. A document that cannot
    be read counts as none."""
    known: dict[str, Constants] = {}

    def constants(train: TrainConfig) -> Constants:
        key = _key(train)
        if key not in known:
            known[key] = Constants()
            with suppress(UserError):
                known[key] = find(machine.card, train) or Constants()
        return known[key]

    return constants


def load(card: Card, train: TrainConfig) -> Constants:
    """The constants for a card: calibrated for this precision, else those of the data sheet.

    Raises:
        UserError: a CPU that is not calibrated, or a document that cannot be read.
    """
    constants = find(card, train)
    if constants is None and not card.is_gpu:
        known = ", ".join(_entries(path_of(card)))
        raise UserError(
            f"the speed of a CPU in {_key(train)} is in no table",
            expected=f"one of {known}, which are calibrated" if known else "a calibration",
            fix="sana-pipe plan --calibrate --set train.device=cpu, with this --config",
        )
    return constants or Constants()


def _entries(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return dict(document["precisions"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} cannot be read: {error}", fix="remove it, and sana-pipe plan --calibrate")
