"""The prediction that a run is compared with when it starts.

What: `expect` predicts the run of this launch on this device, for `pipeline.training.expectation`.
When: on a GPU always. On a CPU memory only, from 2 GiB of predicted parameters and states (`closed_form`, which takes
milliseconds). So small runs on a CPU pay nothing.
Price: two to four seconds for Sana 1.6B, on the first process; the others wait for it where they meet. Whatever fails
is a note: a prediction never ends a training.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import torch

from pipeline.amounts import amount
from pipeline.cache.local_files import free_at
from pipeline.config import Config, TrainConfig
from pipeline.launch import Launch
from pipeline.models.spec import ModelSpec
from pipeline.parallel.mesh import check_sizes
from pipeline.planning import auto, extent
from pipeline.planning.cost import Time
from pipeline.planning.predict import Data, as_new_run, checkpoint_bytes, closed_form, predict
from pipeline.planning.tracker import BUFFERS, GRADIENTS, LASTING
from pipeline.training.checkpoint import complete
from pipeline.training.expectation import MEANINGFUL, Expected


def expect(
    config: Config,
    shape: Callable[[], ModelSpec],
    data: Data,
    device: torch.device,
    launch: Launch,
    log: Callable[[str], None],
) -> Expected | None:
    """The prediction of a run; None if there is nothing to compare, or after a note that says why there is none.
    Also prints what the run means (`extent`).

    Args:
        config: decided, with `train.residual`. shape: gives the model's shape.
    """
    expected, step_s = None, None
    try:
        architecture = shape()
        if (note := _short_of_space(config.train, architecture)) is not None:
            log(note)
        expected, step_s = _expect(config, architecture, data, device, launch)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        log(f"note: memory and speed are not predicted: {reason}")
    else:
        for line in extent.lines(config.train, architecture, data, step_s):
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
    config: Config, shape: ModelSpec, data: Data, device: torch.device, launch: Launch
) -> tuple[Expected | None, float | None]:
    """And the seconds of a step, without what the compiler saves, where the card is known."""
    machine, given = auto.present(device, launch), config.train
    is_bound = given.compile != "none"
    train = as_new_run(given).model_copy(update={"compile": "none"})
    layout = check_sizes(train.parallel, launch.world)
    on_gpu = machine.card.is_gpu
    if not on_gpu and sum(closed_form(shape, train, layout).values()) < MEANINGFUL:
        return None, None
    prediction = predict(train, shape, data, machine, layout=layout)
    time = Time.of(prediction, data)
    known = on_gpu and not is_bound and not machine.assumed
    peak = prediction.traced.peak
    lasting = sum(peak[kind] for kind in (*LASTING, GRADIENTS, BUFFERS))
    expected = Expected(
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
