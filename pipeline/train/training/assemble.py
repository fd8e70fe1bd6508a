"""The one place that builds a trainable thing: a model, what it learns, and the part of it that is trained.

`Trainable` joins a `ModelSpec`, an `Objective` and perhaps an `Adapter`. The names that are trained (`requires_grad`)
decide what the optimizer, the EMA and checkpoints hold.
Why on the meta device first: no process ever holds the whole model. It is parallelized without memory, and each process
reads its own shards of the values (`Trainable.values`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from sana_pipe.base.errors import ConfigError
from sana_pipe.base.layer_classes import adapted_layers
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.adapters import Adapter
from sana_pipe.train.models.spec import DrawnValues, ModelSpec, Values, reset_buffers
from sana_pipe.train.parallel.parallelize import EXTRA, ParallelModel, parallelize, parallelize_reference
from sana_pipe.train.training import optimizers
from sana_pipe.train.training.ema import EMA
from sana_pipe.train.training.objectives import Objective
from sana_pipe.train.training.objectives.control import Controlled
from sana_pipe.train.training.objectives.flow import Flow
from sana_pipe.train.training.objectives.prefer import Preferring
from sana_pipe.train.training.objectives.preserve import Preserving
from sana_pipe.train.training.step import TrainStep


@dataclass(frozen=True)
class Trainable:
    """The model, objective and adapter of a run. adapter: None: every parameter is trained."""

    spec: ModelSpec
    objective: Objective
    adapter: Adapter | None = None

    def module(self, train: TrainConfig) -> nn.Module:
        """Make the module on the meta device, before any strategy. One that does not go with adapter or objective is
        refused."""
        self._check(train)
        with torch.device("meta"):
            module, own = self.spec.module(train), self.objective.modules(self.spec)
        if self.adapter is not None:
            self.adapter.apply(module)
        if own:
            module.add_module(EXTRA, nn.ModuleDict(own))
        return module

    def reference(self, module: nn.Module, train: TrainConfig) -> nn.Module | None:
        """Make the frozen copy of the base on the meta device; None: no objective asks the base, or the base is
        `module` without its adapter."""
        if not self.objective.asks_base or adapted_layers(module):
            return None
        with torch.device("meta"):
            return self.spec.module(train).requires_grad_(False)

    def _check(self, train: TrainConfig) -> None:
        divided = [name for name in ("tp_size", "pp_size") if getattr(train.parallel, name) > 1]
        reasons = {
            "an adapter": self.adapter is not None,
            "an objective that taps blocks": bool(self.objective.taps),
            "an objective that asks the base (train.prefer)": self.objective.asks_base,
        }
        reason = next((words for words, holds in reasons.items() if holds), None)
        if divided and reason is not None:
            raise ConfigError(
                f"{reason} does not go with train.parallel.{divided[0]}", fix=f"--set train.parallel.{divided[0]}=1"
            )

    def values(self, base: Values, module: nn.Module, seed: int) -> Values:
        """Start values of all parameters of `module`: the model's, the adapter's, the objective's."""
        added = {name: tuple(p.shape) for name, p in module.named_parameters() if name not in base.shapes}
        own = {name: shape for name, shape in added.items() if name.startswith(f"{EXTRA}.")}
        parts: list[Values] = [base, DrawnValues(own, self.objective.initial, seed)]
        if self.adapter is not None:
            shapes = {name: shape for name, shape in added.items() if name not in own}
            parts.append(DrawnValues(shapes, partial(self.adapter.initial, base=base), seed))
        return _Joined(parts)


class _Joined:
    """Values of several sources, each with names of its own."""

    def __init__(self, parts: Sequence[Values]):
        self._parts, self._of = parts, {name: part for part in parts for name in part.shapes}
        self.description = parts[0].description

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: part.shapes[name] for name, part in self._of.items()}

    def read(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        return self._of[name].read(name, offsets, lengths)

    def fingerprint(self) -> str:
        return "-".join(part.fingerprint() for part in self._parts)


def objective_of(train: TrainConfig, prompts: Sequence[Tensor] = ()) -> Objective:
    """The objective of a configuration. prompts: text rows of `train.preserve.prompt`."""
    if train.controlnet is not None:
        return Controlled(train.flow, train.controlnet.control_drop, train.mask)
    if train.prefer is not None:
        return Preferring(train.flow, train.prefer)
    if train.preserve is not None:
        return Preserving(train.flow, train.preserve, prompts, train.mask)
    return Flow(train.flow, train.mask)


def assemble(
    trainable: Trainable,
    module: nn.Module,
    mesh: DeviceMesh,
    train: TrainConfig,
    device: torch.device,
    *,
    reference: nn.Module | None = None,
    placed: Callable[[ParallelModel], None] = lambda model: None,
    names: Callable[[Sequence[int]], Mapping[int, str]] = lambda ids: {},
    step: type[TrainStep] = TrainStep,
) -> tuple[ParallelModel, torch.optim.Optimizer, EMA | None, TrainStep]:
    """Parallelize a module, give it its values, and make what trains it: optimizer, average, step.

    Args:
        module, reference: of `trainable`; changed in place.
        placed: gives the parallel model its values, before the optimizer and the average are made.
        names: see `TrainStep`.
    """
    model = parallelize(module, mesh, train, trainable.objective.taps)
    reset_buffers(model.module)
    if reference is not None:
        model.reference = parallelize_reference(reference, mesh, train)
        reset_buffers(model.reference.module)
    placed(model)
    optimizer = optimizers.build(model.module, train.optim, device, seed=train.seed, numerics=train.numerics)
    ema = EMA(model.module, train.ema) if train.ema is not None else None
    if ema is not None:
        optimizer.register_step_pre_hook(lambda *_: ema.await_copy())
    return model, optimizer, ema, step(model, trainable.objective, optimizer, train, device, names)
