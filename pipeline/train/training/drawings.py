"""Pictures while a run goes on: latents of a prompt set, drawn with the weights of a step.

`Drawings` draws at the steps of `train.pictures`, with the moving averages if the run has them, and publishes
`pictures/step-XXXXXXXX.safetensors`: float32 (C, h, w) tensors `0000`, `0001`, ..., multiplied by the scaling factor,
and a description (metadata `drawing`). A ControlNet's run draws captions with the controls of their samples, which are
in the file, too (`0000-control`). Latents, since the training process imports no encoder; `sana-pipe sample
--watch` decodes them. Prompts are divided over the data-parallel processes. Nothing of the training changes.
Price: `sample.steps` forward passes of two samples per prompt, and no memory beyond that of a step.
"""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from sana_pipe.base.disk import make_folder, replacing
from sana_pipe.base.errors import ConfigError, writing
from sana_pipe.train.models.sampler import INPUTS, Sampling, prompt_noise, sample
from sana_pipe.train.models.spec import ModelSpec
from sana_pipe.train.parallel.collectives import all_gather_objects, broadcast_from_rank_0, require_equal, run_on_all
from sana_pipe.train.parallel.data_parallel import COMPUTE
from sana_pipe.train.training.build import TrainingRun
from sana_pipe.train.training.config import PicturesConfig
from sana_pipe.train.training.feeding import Interrupted
from sana_pipe.train.training.lock import Lock
from sana_pipe.train.training.metrics import Metrics
from sana_pipe.train.training.stop_request import StopRequest
from sana_pipe.train.training.task import DrawnPrompts, TrainingTask
from sana_pipe.train.training.validation import evaluating, is_due

FOLDER = "pictures"
_MOST = 3
"""A forward pass without gradients may have this many times the image tokens of a training microbatch. Traced for Sana
1.6B at 1024 x 1024 with full recomputation, updates in the backward pass and 8 shards: a step with one sample takes
1094 MiB in addition to the optimizer's states, drawing with 4 samples 788."""


class Drawings:
    """Call it after every step, and before the first. Build it on every process; the journal is the first one's."""

    def __init__(self, run: TrainingRun, journal: Metrics | None, stop: StopRequest, lock: Lock):
        self.run, self.journal, self.stop, self.lock = run, journal, stop, lock
        context = run.context
        self.prompts, self.settings = context.task.pictures, context.task.sample
        self.every = (context.train.pictures or PicturesConfig()).every
        if self.prompts is None:
            return
        require_equal(
            self.prompts.names["prompt_set"],
            "the processes opened different prompt sets",
            "start again: a newer set was published in between; or --set train.pictures.prompts=ID",
        )
        count, layout, rank = len(self.prompts.texts), context.layout, dist.get_rank()
        share, reader = -(-count // layout.data_world), layout.data_rank(rank)
        self.numbers = [min(number, count - 1) for number in range(reader * share, (reader + 1) * share)]
        self.sends = rank == min(other for other in range(layout.world) if layout.data_rank(other) == reader)
        self.size = drawn_at_once(context.train.microbatch, context.task)
        self.rows, self.null, self.controls = run_on_all(self._read)

    def __call__(self, step: int) -> bool:
        """Draw if it is due. Collective. Returns False if a stop request ended it early."""
        if self.prompts is None or not is_due(self.run, step, self.every, self._is_done):
            return True
        self.run.step.await_verdict()
        began, ema = time.perf_counter(), self.run.ema
        with nullcontext() if ema is None else ema.swapped_in(), evaluating(self.run):
            drawn = self._drawn(self.prompts)
        if drawn is None:
            return False
        path = broadcast_from_rank_0(lambda: self._publish(step, drawn))
        if self.journal is not None:
            row = {"step": step, "count": len(drawn), "prompt_set": self.prompts.names["prompt_set"]}
            place = {"file": f"{FOLDER}/{path.name}", "seconds": time.perf_counter() - began}
            self.journal.pictures(self.run.context.train.steps, row | place)
        return True

    def _read(self) -> tuple[dict[int, Tensor], Tensor, list[Tensor]]:
        """Text rows of this process's prompts, those of the null record, and the controls of all prompts, if any."""
        assert self.prompts is not None
        (null, mask), control = self.prompts.null(), self.prompts.control
        controls = [] if control is None else [control(number).float() for number in range(len(self.prompts.texts))]
        return {number: self.prompts.rows(number) for number in self.numbers}, null[mask], controls

    def _drawn(self, prompts: DrawnPrompts) -> dict[int, Tensor] | None:
        """The latents by number on every process; None if a stop request ended the drawing. Collective."""
        context, settings = self.run.context, self.settings
        shape = (context.task.channels, prompts.height // prompts.compression, prompts.width // prompts.compression)
        latents, dtype = dict[int, Tensor](), COMPUTE[context.train.precision]
        try:
            for first in range(0, len(self.numbers), self.size):
                numbers = self.numbers[first : first + self.size]
                rows = [self.rows[number].to(context.device, dtype) for number in numbers]
                noise = prompt_noise([prompts.texts[number] for number in numbers], shape, settings.seed)
                controls = torch.stack([self.controls[number] for number in numbers]) if self.controls else None
                spec, shift = self.run.trainable.spec, context.train.flow.shift
                sampling = Sampling.of(settings, shift, solver=spec.scheduler, sigmas=spec.sigmas)
                drawn = sample(self._predict, rows, self.null, noise, sampling, controls)
                latents.update(zip(numbers, drawn.cpu(), strict=True))
        except Interrupted:
            return None
        parts = all_gather_objects(latents if self.sends else {})
        return {number: latent for part in parts for number, latent in part.items()}

    def _predict(self, *inputs: Tensor) -> Tensor:
        """The model's flow. Raises Interrupted on every process if one is asked to stop. Collective."""
        flow = self.run.model.predict(**dict(zip(INPUTS, inputs, strict=False)))
        if any(all_gather_objects(self.stop.reason() is not None)):
            raise Interrupted
        return flow

    def _is_done(self) -> bool:
        """Return whether an earlier attempt drew after the step that this attempt starts from. On the first process."""
        step = self.run.done
        if self.journal is None or not self.journal.has_pictures(step):
            return False
        try:
            with safe_open(self._path(step), framework="pt"):
                return True
        except (OSError, SafetensorError):
            return False

    def _publish(self, step: int, latents: dict[int, Tensor]) -> Path:
        path = self._path(step)
        tensors = {f"{number:04d}": latents[number].contiguous() for number in sorted(latents)}
        tensors |= {f"{number:04d}-control": control for number, control in enumerate(self.controls)}
        with writing(path, "check the permissions, then --resume auto", again="--resume auto"):
            self.lock.check()
            make_folder(path.parent)
            for leftover in path.parent.glob(".step-*.partial"):
                leftover.unlink()
            with replacing(path, self.lock.check) as work:
                work.write_bytes(save(tensors, {"drawing": self._description(step)}))
        return path

    def _path(self, step: int) -> Path:
        return self.run.context.folder / FOLDER / f"step-{step:08d}.safetensors"

    def _description(self, step: int) -> str:
        prompts, context, settings = self.prompts, self.run.context, self.settings
        assert prompts is not None
        values = {
            "step": step,
            "phase": context.task.first_state.phase,
            "snapshot": context.task.first_state.snapshot,
            **prompts.names,
            "prompts": list(prompts.texts),
            "sampling_steps": settings.steps,
            "guidance": settings.guidance,
            "seed": settings.seed,
            "ema": self.run.ema is not None,
            "height": prompts.height,
            "width": prompts.width,
        }
        return json.dumps(values, ensure_ascii=False)


def drawn_at_once(microbatch: int, task: TrainingTask) -> int:
    """Pictures in a forward pass of a process: as many as have the image tokens of a training microbatch, at least 1.

    Raises:
        ConfigError: a single picture would have more than `_MOST` times as many.
    """
    assert task.pictures is not None
    size, samples = task.pictures.height * task.pictures.width, 1 if task.sample.guidance == 1 else 2
    largest = max(int(height) * int(width) for height, width in (name.split("x") for name in task.batches))
    trained = microbatch * largest
    if size * samples > _MOST * trained:
        raise ConfigError(
            f"train.pictures: {task.pictures.height}x{task.pictures.width} may need more memory than a step",
            expected=f"height x width of at most {_MOST * trained // samples} pixels: a microbatch has {trained}",
            found=f"{size} pixels",
            fix="lower train.pictures.size, or draw with sana-pipe sample",
        )
    return max(1, trained // (size * samples))


def check(microbatch: int, task: TrainingTask, architecture: ModelSpec) -> None:
    """Refuse pictures that the model cannot draw, or that need more memory than a step."""
    prompts = task.pictures
    assert prompts is not None
    option = "--set 'train.pictures.size=[{height}, {width}]'"
    architecture.check_sides(prompts.height, prompts.width, prompts.compression, option)
    drawn_at_once(microbatch, task)
