"""The needs of a run, predicted when it starts and set next to what it measures.

When: on a GPU always. On a CPU memory only, from 2 GiB of trained parameters and states on: small runs pay nothing.
The journal compares once, after the second row (the first contains the start), or at the end of a shorter run.
Price: two to four seconds for Sana 1.6B, on the first process; the others wait for it where they meet. Whatever fails
is a note: a prediction never ends a training.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sana_pipe.base.amounts import amount
from sana_pipe.base.disk import free_at
from sana_pipe.base.launch import Launch
from sana_pipe.tools.planning import auto, extent
from sana_pipe.tools.planning.cost import Time
from sana_pipe.tools.planning.predict import Data, checkpoint_bytes, predict, uncompiled
from sana_pipe.tools.planning.recorder import BUFFERS, GRADIENTS, LASTING
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.spec import ModelSpec
from sana_pipe.train.parallel.mesh import check_sizes
from sana_pipe.train.training.checkpoint import complete

MEANINGFUL = 2 << 30
"""Bytes of main memory below which the resident set is not compared."""
TOLERANCE = 0.1
"""A larger deviation is shown as a warning."""


@dataclass(frozen=True)
class Expectation:
    """A prediction for the worst bucket.

    Memory: on a GPU what torch has allocated, without context and fragmentation. On the CPU the growth of the resident
    set since before the model was built, from `MEANINGFUL` on: below, buffers of the loader and of libraries weigh too
    much. Speed: by model FLOPs, because a row has other buckets than the worst.

    Attributes:
        lasting, brief: bytes of the fullest process, whatever the bucket, and in proportion to the image tokens of a
            forward pass. tokens: of the worst bucket's.
        flops_per_s: model FLOPs of all processes together; None: the device's speed is not known.
        is_bound: predicted without compiled blocks, which need about as much memory or less.
        before: on the CPU, resident bytes of this process before the model was built; None on a GPU.
        document: of the run directory.
    """

    lasting: float
    brief: float
    tokens: int
    flops_per_s: float | None
    before: float | None
    document: dict[str, Any]
    is_bound: bool = False

    def __call__(self, row: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
        """The `lines` of a row of metrics, and the document of the run directory."""
        compared, step = self.compare(row), row["step"]
        return self.lines(compared, step), {**self.document, "measured": compared, "until_step": step}

    def compare(self, row: dict[str, Any]) -> dict[str, float]:
        """`KIND_predicted` and `KIND` for `memory_gib` and `images_per_s`, as far as they can be compared."""
        result: dict[str, float] = {}
        memory = self.lasting + self.brief * min(1.0, row["forward_tokens"] / self.tokens)
        measured = row["memory_gib"] if self.before is None else row["rss_gib"] - self.before / 2**30
        if self.before is None or memory >= MEANINGFUL:
            result |= {"memory_gib_predicted": memory / 2**30, "memory_gib": measured}
        if self.flops_per_s is not None and row["model_tflops"]:
            ratio = self.flops_per_s / (row["model_tflops"] * 1e12)
            result |= {"images_per_s_predicted": row["images_per_s"] * ratio, "images_per_s": row["images_per_s"]}
        return result

    def lines(self, compared: dict[str, float], step: int) -> list[str]:
        """The comparison for people; a line for each large deviation."""
        parts, warnings = [], []
        for kind, name, unit in (("memory_gib", "memory", "GiB"), ("images_per_s", "speed", "images/s")):
            if kind not in compared:
                continue
            predicted, measured = compared[f"{kind}_predicted"], compared[kind]
            deviation = measured / predicted - 1
            parts.append(f"{name} {predicted:.3g} and {measured:.3g} {unit} ({deviation:+.0%})")
            if abs(deviation) > TOLERANCE and not (self.is_bound and deviation < 0):
                side = "above" if deviation > 0 else "below"
                warnings.append(f"warning: the {name} is {abs(deviation):.0%} {side} the prediction")
        return [f"predicted and measured until step {step}: {', '.join(parts)}", *warnings] if parts else []


def expect(
    train: TrainConfig,
    shape: Callable[[], ModelSpec],
    data: Data,
    device: torch.device,
    launch: Launch,
    log: Callable[[str], None],
) -> Expectation | None:
    """The prediction of a run; None if there is nothing to compare, or after a note that says why there is none.
    Also prints what the run means (`extent`).

    Args:
        train: decided. shape: gives the model's shape.
    """
    expected, step_s = None, None
    try:
        architecture = shape()
        if (note := _short_of_space(train, architecture)) is not None:
            log(note)
        expected, step_s = _expect(train, architecture, data, device, launch)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        log(f"note: memory and speed are not predicted: {reason}")
    else:
        for line in extent.lines(train, architecture, data, step_s):
            log(line)
    return expected


def _short_of_space(train: TrainConfig, shape: ModelSpec) -> str | None:
    """A note if the disk holds fewer checkpoints than the run keeps and the one that it writes."""
    root, size = Path(train.output) / "checkpoints", checkpoint_bytes(shape, train)
    there, free = len(complete(root)), free_at(root)
    wanted = min(extent.kept_checkpoints(train, train.steps) + 1, -(-train.steps // train.save_every)) - there
    if wanted * size <= free:
        return None
    options = f"train.keep_checkpoints = {train.keep_checkpoints}"
    options += f", train.keep_every = {train.keep_every}" if train.keep_every is not None else ""
    return (
        f"note: {amount(free)} are free on the disk of {root}; the checkpoints still to come ({options}, and the one "
        f"that is being written) take {wanted} x {amount(size)}"
    )


def _expect(
    given: TrainConfig, shape: ModelSpec, data: Data, device: torch.device, launch: Launch
) -> tuple[Expectation | None, float | None]:
    """And the seconds of a step, without what the compiler saves, where the card is known."""
    machine = auto.present(device, launch)
    is_bound = given.compile != "none"
    train = uncompiled(given)
    on_gpu = machine.card.is_gpu
    if not on_gpu and checkpoint_bytes(shape, train) < MEANINGFUL:
        return None, None
    layout = check_sizes(train.parallel, launch.world)
    prediction = predict(train, shape, data, machine, layout=layout)
    time = Time.of(prediction, data)
    known = on_gpu and not is_bound and not machine.assumed
    peak = prediction.traced.peak
    lasting = sum(peak[kind] for kind in (*LASTING, GRADIENTS, BUFFERS))
    expected = Expectation(
        lasting,
        prediction.traced.total - lasting,
        prediction.shape.microbatch * prediction.shape.tokens(shape),
        time.flops / time.step if known else None,
        None if on_gpu else _resident(),
        {"prediction": prediction.as_dict(), **({"time": time.as_dict()} if known else {})},
        is_bound,
    )
    return expected, time.step if on_gpu and not machine.assumed else None


def _resident() -> float:
    """Bytes of this process in main memory."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:  # no /proc: the peak so far
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
