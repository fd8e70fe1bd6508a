"""Build a run: the parallel model, its values, optimizer, EMA and step, new or from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sana_pipe.base import hub
from sana_pipe.base.errors import ConfigError
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.adapters import adapter_of
from sana_pipe.train.models.config import ModelConfig, StartWeights
from sana_pipe.train.models.spec import ModelSpec, Values, digest_of, spec_at, spec_from_arch
from sana_pipe.train.parallel.collectives import broadcast_from_rank_0, require_equal, run_on_all
from sana_pipe.train.parallel.load_sharded import load_sharded
from sana_pipe.train.parallel.parallelize import ParallelModel
from sana_pipe.train.training import checkpoint, optimizers
from sana_pipe.train.training.assemble import Trainable, assemble, objective_of
from sana_pipe.train.training.base_weights import check_base, lacks_base, start_values
from sana_pipe.train.training.checkpoint import Resumed
from sana_pipe.train.training.ema import EMA
from sana_pipe.train.training.optimizers import in_backward
from sana_pipe.train.training.step import TrainStep
from sana_pipe.train.training.task import Context, TrainingTask


@dataclass(frozen=True)
class TrainingRun:
    """The parts that the loop drives. done: optimizer steps. checkpoint: what the run was resumed from; resumed: or
    begun from. base: digest of the start weights, where they are frozen or the objective's base; None: neither, or the
    base is the checkpoint that the run began from."""

    context: Context
    trainable: Trainable
    model: ParallelModel
    optimizer: torch.optim.Optimizer
    ema: EMA | None
    step: TrainStep
    done: int = 0
    checkpoint: Path | None = None
    resumed: Resumed | None = None
    base: str | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """Return what a checkpoint says of the model: its shape and text encoder, and of a part that is trained its
        settings and base."""
        adapter = self.trainable.adapter
        part = {} if adapter is None else {"adapter": adapter.to_dict()}
        base = {} if self.base is None else {"base": self.base}
        return {"architecture": self.trainable.spec.to_dict(), "text_kind": self.context.task.text_kind, **part, **base}

    @property
    def began_from(self) -> dict[str, Any] | None:
        """See `training.checkpoint.Document`."""
        return self.resumed and self.resumed.began_from

    @property
    def steps_before(self) -> int:
        """Optimizer steps of the runs before this run, which its average of the weights covers, too."""
        return self.began_from["total"] if self.began_from else 0

    def sections(self) -> dict[str, dict[str, Tensor]]:
        """Tensors of a checkpoint in addition to those of model and optimizer. The frozen copy of the base is one of
        them where another run has trained it: that run's checkpoint may be removed."""
        ema = {"ema": self.ema.values} if self.ema is not None else {}
        reference = {}
        if self.began_from is not None and self.model.reference is not None:
            values = self.model.reference.module.named_parameters()
            reference = {"reference": {name: parameter.detach() for name, parameter in values}}
        return {**ema, **reference, **({"loss_scale": self.step.scale.state} if self.step.scale.dynamic else {})}


def build(context: Context, mesh: DeviceMesh, trainable: Trainable, resumed: Resumed | None) -> TrainingRun:
    """Build a run in its start state. Collective; errors are the same on every process."""
    train, device, log = context.train, context.device, context.log
    module = trainable.module(train)
    reference = trainable.reference(module, train)
    counts = [p.numel() * (1 + 1j * p.requires_grad) for p in module.parameters()]
    start, base = None, None
    is_base = reference is not None and (resumed is None or resumed.began_from is None)
    has_base = trainable.adapter is not None or is_base
    if resumed is None or has_base:
        values = run_on_all(lambda: start_values(context.task.model.weights, train.seed, trainable.spec))
        start = trainable.values(values, module, train.seed)
        base = broadcast_from_rank_0(lambda: digest_of(values)) if has_base else None
        if resumed is not None:
            folder, of_run = resumed.folder, resumed.document.base
            run_on_all(lambda: check_base(folder, of_run, base))

    def place(model: ParallelModel) -> None:
        if start is not None:
            load_start(model, start, context)
            if model.reference is not None:
                model.copy_to_reference()

    names = context.task.names
    made = assemble(trainable, module, mesh, train, device, reference=reference, placed=place, names=names)
    kept = resumed.document.base if resumed is not None and not resumed.begins else None
    run = TrainingRun(context, trainable, *made, base=base or kept)
    if resumed is not None:
        run = _restore(run, resumed)
    if train.optim.in_backward:
        in_backward.fuse(run.optimizer, run.model)
    adapter = train.adapter
    if adapter is not None and adapter.alpha not in (None, adapter.rank):
        factor = adapter.alpha / adapter.rank
        log(
            f"note: train.adapter.alpha is {adapter.alpha:g} and the rank {adapter.rank}: the product is multiplied by "
            f"{factor:g}; --set train.adapter.alpha=null follows the rank"
        )
    whole, trained = sum(counts).real, sum(counts).imag
    part = "" if trained == whole else f" of {whole / 1e6:.1f}"
    log(
        f"training {trained / 1e6:.1f}{part} M parameters on {context.launch.world} x {device.type} "
        f"({context.layout}), {train.precision}, steps {run.done + 1} to {train.steps}, run directory "
        f"{context.folder.resolve()}"
    )
    return run


def load_start(model: ParallelModel, start: Values, context: Context) -> None:
    """Load the start values, after a check that all processes have the same ones: each reads its own files or uses its
    own generator, and a mixture would go unnoticed."""
    require_equal(
        run_on_all(start.fingerprint),
        "the processes start from different weights",
        "give every node the same files under model.weights and the same versions of torch",
    )
    if start.description:
        context.log(f"start weights: {start.description}")
    run_on_all(lambda: load_sharded(model.module, start))


def _restore(run: TrainingRun, resumed: Resumed) -> TrainingRun:
    folder, document, begins = resumed
    log, done = run.context.log, document.state.step
    fresh = _why_fresh(run.context.train, document.config["train"]) if begins else None
    sections = run.sections() if begins else replace(run, resumed=resumed).sections()
    absent = checkpoint.load(folder, document, run.model.module, run.optimizer, sections, moments=fresh is None)
    if begins:
        return _begin(run, resumed, fresh, absent)
    if "reference" in absent:
        raise lacks_base(folder)
    for line in run.context.task.written.changed_since(document.config):
        log(f"changed since the checkpoint: {line}")
    if "ema" in absent and run.ema is not None:
        run.ema.restart()
        log(f"note: {folder} holds no EMA weights: they start from the weights of step {done}")
    log(f"resumed from {folder} after step {done}")
    return replace(run, done=done, checkpoint=folder, resumed=resumed)


def _why_fresh(train: TrainConfig, earlier: dict[str, Any]) -> str | None:
    """Say why a run cannot take the moments of a checkpoint; None: it can, by the rule for a resumed run."""
    try:
        optimizers.check_resumable(earlier, train)
    except ConfigError as error:
        return error.what
    return None


def _begin(run: TrainingRun, resumed: Resumed, fresh: str | None, absent: set[str]) -> TrainingRun:
    """The run before its first step, with the values of a checkpoint of another run."""
    folder, state = resumed.folder, resumed.document.state
    if run.model.reference is not None:
        run.model.copy_to_reference()
    kept = ["weights", *(["moments"] if fresh is None else [])]
    if run.ema is not None and "ema" in absent:
        run.ema.restart()
    elif run.ema is not None:
        kept.append("averages")
    if run.step.scale.dynamic:
        run.step.scale.state["skipped_steps"].zero_()
    lost = [] if fresh is None else [f"the optimizer's moments start anew ({fresh})"]
    lost += ["the average of the weights starts from its weights"] if run.ema is not None and "ema" in absent else []
    run.context.log(
        f"begins from {folder} (round {state.phase + 1}, step {state.step}): {', '.join(kept)} are kept"
        + "".join(f"; {part}" for part in lost)
        + f"; in round {run.context.task.first_state.phase + 1} steps, warm-up and schedule begin at 0"
    )
    return replace(run, resumed=resumed)


def text_layout(train: TrainConfig, device: torch.device) -> Literal["padded", "packed"]:
    """Decide `train.text`: as given, else packed where a kernel is."""
    fits = train.parallel.pp_size == 1 and has_packed_kernel(train, device)
    return train.text or ("packed" if fits else "padded")


def has_packed_kernel(train: TrainConfig, device: torch.device) -> bool:
    """Return whether torch's attention without padding runs on a GPU in this precision."""
    fits = device.type == "cuda" and train.precision != "fp32"
    return fits and torch.cuda.get_device_capability(device) >= (8, 0)


def trainable_of(train: TrainConfig, task: TrainingTask, *, start: bool = True) -> Trainable:
    """Return what the run trains. start: False: a checkpoint has its values, so that no start file of an adapter is
    read. Errors as in `architecture_of`."""
    spec = architecture_of(task.model, task.sample_size)
    adapter = task.adapter if task.adapter is not None else adapter_of(train, spec, start=start)
    return Trainable(spec, task.objective or objective_of(train, task.preserved), adapter)


def architecture_of(model: ModelConfig, sample_size: int) -> ModelSpec:
    """The model's shape: that of the weights, or `model.arch` with this side of the latent."""
    if model.arch is not None:
        return spec_from_arch(model.arch, sample_size)
    assert model.weights is not None
    return architecture_of_weights(model.weights)


def architecture_of_weights(weights: StartWeights) -> ModelSpec:
    """The shape of `model.weights`, from its `config.json`."""
    return spec_at(hub.resolve(weights, ("config.json",)), weights.variant)
