"""The section `train`, which the rooms of this wing read.

It stands above them, since it composes their sections, and imports nothing but these: each room may take it whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from sana_pipe.base.config import AUTO, LocalPath, Microbatch, NotNegative, Positive, Section, Share, Steps
from sana_pipe.base.metrics.config import Tracker
from sana_pipe.train.models.config import AdapterConfig, ControlNetConfig, FlowConfig
from sana_pipe.train.parallel.config import ParallelConfig
from sana_pipe.train.training.config import (
    EmaConfig,
    MaskConfig,
    OptimConfig,
    PicturesConfig,
    PreferConfig,
    PreserveConfig,
    ValidationConfig,
)
from sana_pipe.train.training.optimizer_records import OPTIMIZERS


def _check_recompute(mode: str) -> str:
    if mode not in ("none", "full", "selective", "auto") and not re.fullmatch(r"every-([2-9]|[1-9]\d+)", mode):
        raise ValueError("must be none, full, selective, every-K (every-2: each second block; K at least 2), or auto")
    return mode


Recompute = Annotated[str, AfterValidator(_check_recompute), "none | full | selective | every-K | auto"]


def _check_traced(steps: str) -> str:
    first, _, last = steps.partition("-")
    if not re.fullmatch(r"[1-9]\d*(-[1-9]\d*)?", steps) or int(first) < 2 or (last and int(last) < int(first)):
        raise ValueError("must be steps FIRST-LAST or one step, from 2 on: 10-12 or 10")
    return steps


TracedSteps = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
    AfterValidator(_check_traced),
    "FIRST-LAST",
]


class TrainConfig(Section):
    """The training run."""

    output: LocalPath = "./runs/default"
    """The run directory: checkpoints, metrics.jsonl, the configuration."""
    steps: Steps = 10_000
    """Optimizer steps; null: those of `epochs`."""
    epochs: Positive | None = None
    """Epochs of the snapshot in place of `steps`, as its batches and weights define one. The run directory has their
    number of steps."""
    seed: NotNegative = 0
    """Seed of the order, noise, times, caption choice and caption drop."""
    microbatch: Microbatch = AUTO
    """Samples per process and forward pass; lower it if memory runs out. auto: on a GPU the fastest that is predicted
    to leave a tenth of its memory free, chosen as with `parallel.sizes: auto`; 8 on a CPU. A resumed run keeps its
    choice. `sample` takes 8 for auto."""
    precision: Literal["fp32", "bf16", "fp16", "bf16_pure"] = "bf16"
    """Precision of the computation, on fp32 parameters. fp16 scales the loss and skips steps that overflow. bf16_pure:
    parameters and moments are bf16, too, updated with stochastic rounding."""
    tf32: bool = False
    """On a GPU, round the factors of fp32 matrix products and convolutions to TF32 (10 bits): up to eight times as
    fast. Under bf16 and fp16 it changes nothing on a GPU of compute capability 8.0 or newer: only linear attention
    multiplies in fp32 there, in a kernel that is as exact either way."""
    numerics: Literal["default", "nvlabs"] = "default"
    """nvlabs: follow NVlabs' trainer where no other option does: CAME (3x3 kernels unfactored and without confidence;
    query, key and value as one matrix), weight decay of all parameters, a first step of rate 0, eps of attention. See
    docs/training.md; default is better where they differ, and has the constants of diffusers' pipeline."""
    activation_checkpointing: Recompute = "auto"
    """The part of a block that is computed again in the backward pass. none: nothing. full: everything; only its inputs
    are saved. selective: as full, but the results of matrix products that are no wider than their inputs are saved,
    too. every-K (every-2): full for each K-th block. auto: on a GPU the fastest of none, selective and full that fits,
    chosen as with `microbatch: auto`; otherwise full."""
    activation_compression: Literal["none", "int8"] = "none"
    """Store saved tensors in 8 bits, 128 values with one scale: the inputs of blocks that recompute, the saved tensors
    of Linear and convolution layers of the others. Not with `selective`."""
    caption_drop: Share = 0.1
    """Share of samples that are trained with the empty caption, under the mask of their caption, as NVlabs train."""
    flow: FlowConfig = FlowConfig()
    """Flow matching."""
    optim: OptimConfig = OptimConfig()
    """The optimizer."""
    adapter: AdapterConfig | None = None
    """Train a LoRA or DoRA of frozen weights; null: none, {}: with its defaults."""
    only: Annotated[list[str], Field(min_length=1)] | None = None
    """Train these modules and parameters and freeze the rest; patterns as in `adapter.targets`, such as `[attn2]`.
    null: train all."""
    controlnet: ControlNetConfig | None = None
    """Train a ControlNet and freeze the model; null: none, {}: with its defaults."""
    preserve: PreserveConfig | None = None
    """On a share of the samples, learn the prediction of the base; with `adapter`. null: not, {}: with its defaults."""
    prefer: PreferConfig | None = None
    """Learn from preference pairs. null: not, {}: with its defaults."""
    mask: MaskConfig | None = None
    """Weight the loss by the masks of the snapshot; null: not, {}: with its defaults."""
    ema: EmaConfig | None = None
    """EMA weights, a moving average; null: none, {}: with its defaults."""
    validation: ValidationConfig | None = None
    """Validation on held-out samples; null: none, {}: with its defaults."""
    pictures: PicturesConfig | None = None
    """Pictures of captions or prompts; null: none, {}: with its defaults."""
    parallel: ParallelConfig = ParallelConfig()
    """Strategies that divide the model and the batch over processes."""
    text: Literal["padded", "packed"] | None = None
    """Layout in which captions travel to the GPU and are attended to. padded: to the batch's longest. packed: one after
    the other, without padding (on a GPU: of compute capability 8.0 or newer, in 16 bits; not with a pipeline). null:
    packed on such a GPU, else padded."""
    length_window: NotNegative = 0
    """Batches of a bucket, on average, that are sorted by caption length together (length grouping); 0: none. Part of
    the order, so a run cannot be resumed with another value."""
    log_every: Positive = 10
    """Steps between rows of metrics."""
    save_every: Positive = 500
    """Steps between checkpoints."""
    keep_checkpoints: Positive = 3
    """Newest checkpoints that are kept; with `validation` also the one with the lowest held-out loss."""
    keep_every: Positive | None = None
    """Keep the checkpoint of every this many steps for ever; a multiple of `save_every`; null: none."""
    trackers: list[Tracker] = ["tensorboard"]
    """Trackers that get the metrics of `metrics.jsonl`, too, by accelerate's names."""
    compile: Literal["auto", "none", "block"] = "auto"
    """block: compile each block with torch.compile, once for all shapes, and what prepares text and timestep. auto:
    block on a GPU of compute capability 8.0 or newer with Triton, unless another option excludes it; else none. A
    resumed run keeps its choice."""
    profile: TracedSteps | None = None
    """Trace these steps with torch.profiler on the first process, into the folder `profile` of the run: 10-12, or 10.
    They are counted since the run started or resumed, and begin at 2, because the step before is a warm-up; null:
    none."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda or cuda:N."""

    @property
    def undecided(self) -> tuple[str, ...]:
        """The options that are `auto`. `planning.auto.decide` gives them values before a run reads them."""
        parts: dict[str, Any] = {
            "parallel": self.parallel.sizes,
            "microbatch": self.microbatch,
            "activation_checkpointing": self.activation_checkpointing,
            "compile": self.compile,
        }
        return tuple(name for name, value in parts.items() if value == "auto")

    @property
    def drawn_at_once(self) -> int:
        """`microbatch` for `sample`, which does not train."""
        size: Any = self.microbatch
        return 8 if size == "auto" else size

    @model_validator(mode="before")
    @classmethod
    def _steps_or_epochs(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("epochs") is not None:
            if data.get("steps") is not None:
                raise ValueError(
                    f"give either train.steps (it is {data['steps']}) or train.epochs (it is {data['epochs']}), not "
                    "both: the other one is null"
                )
            data = {**data, "steps": None}
        elif isinstance(data, dict) and "steps" in data and data["steps"] is None:
            raise ValueError("'train.steps' is null, and so is 'train.epochs': give one of them")
        return data

    def _prefer_conflicts(self) -> Iterator[str]:
        if self.prefer is None:
            return
        for name in ("preserve", "mask", "controlnet"):
            if getattr(self, name) is not None:
                yield f"prefer does not go with {name}; set {name}: null, or prefer: null"
        if self.prefer.stop is None:
            return
        if self.validation is None:
            yield "prefer.stop looks at held-out pairs; set validation: {}, or prefer: {stop: null}"
        elif self.validation.every % self.save_every:
            yield (
                f"prefer.stop keeps the checkpoint of the best validation, so validation.every = "
                f"{self.validation.every} must be a multiple of save_every = {self.save_every}; set save_every: "
                f"{self.validation.every}"
            )

    def _conflicts(self) -> Iterator[str]:
        if self.activation_compression != "none" and self.activation_checkpointing == "selective":
            yield (
                f"activation_compression: {self.activation_compression} does not go with activation_checkpointing: "
                "selective; use activation_checkpointing: full, every-K or none, or activation_compression: none"
            )
        if self.optim.in_backward:
            optimizer = OPTIMIZERS[self.optim.name]
            if self.numerics == "nvlabs" and optimizer.joins is not None:
                yield (
                    f"optim.in_backward updates one parameter at a time, and {optimizer.title} under numerics: nvlabs "
                    f"takes {optimizer.joins} together; set numerics: default or optim.in_backward: false"
                )
            if self.optim.clip is not None:
                yield (
                    "optim.in_backward updates parameters before the norm of the gradient is known; "
                    f"set optim.clip: null (it is {self.optim.clip:g}) or optim.in_backward: false"
                )
            if self.precision not in ("fp32", "bf16"):
                why = {"fp16": "the loss scale decides afterwards whether a step counts"}
                yield (
                    f"optim.in_backward does not go with precision: {self.precision} "
                    f"({why.get(self.precision, 'its rounding is drawn in the order of all parameters')}); "
                    "set precision to fp32 or bf16, or optim.in_backward: false"
                )
            if self.parallel.pp_size > 1:
                yield (
                    "optim.in_backward needs one backward pass per step, and a pipeline has one per microbatch; "
                    f"set parallel.pp_size: 1 (it is {self.parallel.pp_size}) or optim.in_backward: false"
                )
        if self.preserve is not None and self.adapter is None:
            reason = "without one there is no base to be asked"
            if self.controlnet is not None:
                reason = "a ControlNet leaves its base as it is"
            yield f"preserve needs adapter: {reason}; set preserve: null, or train by adapter"
        yield from self._prefer_conflicts()
        given = [name for name in ("adapter", "only", "controlnet") if getattr(self, name) is not None]
        if len(given) > 1:
            yield f"give either {given[0]} or {given[1]}, not both: each says what is trained"
        prompts = None if self.pictures is None else self.pictures.prompts
        if self.controlnet is not None and prompts not in (None, "captions"):
            yield f"pictures.prompts = {prompts}: these have no control pictures; with controlnet set it to captions"
        if self.compile == "block" and self.activation_compression != "none":  # its backward pass is one piece
            yield (
                f"compile: block does not go with activation_compression: {self.activation_compression}; set "
                "activation_compression to none, or compile: none"
            )
        if self.text == "packed" and self.parallel.pp_size > 1:
            yield (
                "text: packed: the stages of a pipeline exchange padded captions; "
                f"set text: padded or parallel.pp_size: 1 (it is {self.parallel.pp_size})"
            )
        if self.keep_every is not None and self.keep_every % self.save_every:
            yield (
                f"keep_every = {self.keep_every} must be a multiple of save_every = {self.save_every}, such as "
                f"{self.save_every}, {2 * self.save_every}, {10 * self.save_every}"
            )
