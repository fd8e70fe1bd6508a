"""CAME: one full momentum and factored second moments, for any sharding (4.01 bytes per fp32 parameter, 2.02 for bf16).

Why not a package: packages factor the last two dimensions, and a 1x1 convolution (out, in, 1, 1; 47 % of Sana) then has
four factors of its full size; they also fail on DTensors. Parameters of one shape are stacked, in groups of a bounded
size with three all-reduces per group and mesh dimension. `factor_kernels` and `joint` reproduce NVlabs' CAME.
Price: no bias correction, as published: the first thousands of steps are longer, so keep the warm-up.
Formulas: arXiv 2307.02047, algorithm 2; clipping by the root mean square: Adafactor, arXiv 1804.04235.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from sana_pipe.train.parallel.shards import local, sharding_groups
from sana_pipe.train.training.config import OptimConfig
from sana_pipe.train.training.optimizers.stochastic_rounding import Noise, placement_of, scaled, spread, to_bf16

BETAS = (0.9, 0.999, 0.9999)
EPS = (1e-30, 1e-16)
CLIP = 1.0
"""Largest root mean square of a normalised gradient, over the whole matrix."""

GROUP = 2**26
"""Elements per process whose normalised gradients are in memory at a time (256 MiB, and as much for their momenta)."""

_OTHER_STATE = ("step", "exp_avg")

Groups = tuple[dist.ProcessGroup, ...]


@dataclass
class _Member:
    """A process's shard of a parameter. matrix: number of the whole matrix, which joint parameters share; rows: of
    the whole matrix."""

    parameter: Tensor
    group: dict[str, Any]
    index: int
    matrix: int
    rows: int


class _Stack:
    """The shards of n parameters that differ in nothing but their values, as matrices (or vectors: `vector`), so that
    an operation is launched once for all of them.

    Attributes:
        update: (n, rows, columns) or (n, size) fp32, first the gradients, then the normalised gradients.
        state: (n, ...) fp32, copies of the means that are stored; `store_state` writes them back.
        momentum: (n, ...), as stored; set by `_move_momentum`.
        matrix_rows, matrix_columns: sizes of the whole matrix.
        other_rows, other_columns: process groups that have the rest of it.
        vector: squares are stored unfactored.
    """

    def __init__(
        self, members: list[_Member], states: dict[Tensor, dict[str, Any]], noise: Noise, factor: Tensor | None
    ):
        first = members[0].parameter
        self.members, self.group, self._noise = members, members[0].group, noise
        self._stored = [states[member.parameter] for member in members]
        self.vector = "exp_avg_sq" in self._stored[0]
        self.values = [_matrix(local(member.parameter)) for member in members]
        self.momenta = [_matrix(local(stored["exp_avg"])) for stored in self._stored]
        every = (member.parameter.grad for member in members)
        gradients = torch.stack([_matrix(local(grad).contiguous()) for grad in every if grad is not None])
        self.update = scaled(gradients, factor)
        self.state = {name: torch.stack(self._locals(name)) for name in self._stored[0] if name not in _OTHER_STATE}
        self.momentum = self.update
        self.matrix_rows = members[0].rows
        self.matrix_columns = first.numel() // (first.shape[0] if first.ndim else 1)
        self.other_rows, self.other_columns = sharding_groups(first, 0), sharding_groups(first, 1)

    def _locals(self, name: str) -> list[Tensor]:
        tensors = [local(stored[name]) for stored in self._stored]
        return [_matrix(tensor) if name == "exp_avg_sq" else tensor.reshape(-1) for tensor in tensors]

    def store_state(self) -> None:
        for name, means in self.state.items():
            targets = [local(stored[name]) for stored in self._stored]
            torch._foreach_copy_(targets, [m.view(t.shape) for m, t in zip(means.unbind(), targets, strict=True)])

    def rounded(self, stacked: Tensor, draw: int) -> Tensor:
        """fp32 (n, ...) as bf16, rounded stochastically."""
        member, stored = self.members[0], self._stored[0]
        return to_bf16(stacked, self._noise.at(member.parameter, int(stored["step"].item()), member.index, draw))


class CAME(torch.optim.Optimizer):
    """The optimizer. `step` is a collective of all processes that have shards.

    Args:
        params: plain tensors or DTensors, sharded by rows (dimension 0), by columns (dimension 1) or both; fp32, or
            bf16 (then updates and momentum are rounded stochastically, see `stochastic_rounding`).
        betas: decay of the second moment's companions: momentum, squares, squared deviations.
        eps: added to the squares of the gradient and of the deviation.
        factor_kernels: whether squares of convolutions larger than 1x1 are factored (one per cent of Sana's
            parameters). Unfactored they have no confidence.
        joint: parameters that are treated as the rows of one matrix: they share column means and clipping. All of
            them need gradients, or none.

    Attributes:
        gradient_factor: fp32 scalar that the next `step` multiplies the gradients with, in fp32.

    State: `exp_avg` like the parameter; `exp_avg_sq_row` (rows,), `exp_avg_sq_col` (the other dimensions),
    `exp_avg_res_row` and `exp_avg_res_col` alike, fp32, DTensors where the parameter is one; for a vector or an
    unfactored kernel only `exp_avg_sq`, and no confidence. Joint parameters have equal `_col`.
    """

    gradient_factor: Tensor | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float, float] = BETAS,
        eps: tuple[float, float] = EPS,
        weight_decay: float = 0.0,
        *,
        seed: int = 0,
        factor_kernels: bool = True,
        joint: Iterable[Sequence[Tensor]] = (),
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.noise, self.factor_kernels = Noise(seed), factor_kernels
        self._joint = {parameter: tuple(members) for members in joint for parameter in members}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update. Parameters without a gradient stay as they are (the same ones on all processes)."""
        for members in self._grouped():
            stacks = self._stacked(members)
            _normalise(stacks)
            _clip(stacks)
            for stack in stacks:
                _move_momentum(stack)
            _confide(stacks)
            for stack in stacks:
                _move_values(stack)
                stack.store_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, but keep the means in fp32; torch would cast them to the parameter's dtype."""
        super().load_state_dict(state_dict)
        identities = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for identity, parameter in zip(identities, parameters, strict=True):
            for name, value in state_dict["state"].get(identity, {}).items():
                if name not in ("step", "exp_avg"):
                    self.state[parameter][name] = value.to(parameter.device, torch.float32)

    def _grouped(self) -> Iterator[list[_Member]]:
        """Parameters in groups of about `GROUP` elements; equal shapes follow each other. Sizes are of whole
        parameters, so that all processes form the same groups."""
        matrices: dict[Tensor, list[tuple[int, Tensor, dict[str, Any]]]] = {}  # by the first of joint parameters
        every = ((parameter, group) for group in self.param_groups for parameter in group["params"])
        for index, (parameter, group) in enumerate(every):
            if parameter.grad is not None:
                first, *_ = self._joint.get(parameter, (parameter,))
                matrices.setdefault(first, []).append((index, parameter, group))
        members: list[_Member] = []
        elements = 0.0
        for number, (_, together) in enumerate(sorted(matrices.items(), key=lambda item: tuple(item[0].shape))):
            rows = sum(p.shape[0] if p.ndim else 1 for p in self._joint.get(together[0][1], (together[0][1],)))
            for index, parameter, group in together:
                self._advance(parameter)
                members.append(_Member(parameter, group, index, number, rows))
                elements += parameter.numel() / math.prod(group.size() for group in sharding_groups(parameter))
            if elements >= GROUP:
                yield members
                members, elements = [], 0.0
        if members:
            yield members

    def _advance(self, parameter: Tensor) -> None:
        """Count a step in the parameter's state, which the first step makes."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            if parameter.ndim > 1 and (self.factor_kernels or parameter.shape[2:].numel() == 1):
                for what in ("exp_avg_sq", "exp_avg_res"):
                    state[what + "_row"] = _zeros(parameter, 0)
                    state[what + "_col"] = _zeros(parameter, 1)
            else:
                state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
        state["step"] += 1

    def _stacked(self, members: list[_Member]) -> list[_Stack]:
        alike: dict[Any, list[_Member]] = {}
        for member in members:
            parameter = member.parameter
            key = (
                *(id(member.group), parameter.shape, member.rows, parameter.dtype, local(parameter).device),
                *(local(parameter).shape, placement_of(parameter)),
            )
            alike.setdefault(key, []).append(member)
        return [_Stack(same, self.state, self.noise, self.gradient_factor) for same in alike.values()]


def build(
    groups: list[dict[str, Any]],
    config: OptimConfig,
    named: list[tuple[str, Tensor]],
    device: torch.device,
    *,
    seed: int,
    nvlabs: bool,
) -> CAME:
    """CAME of these parameters; under NVlabs' numerics with unfactored kernels and their joint matrices."""
    joint = joint_weights(named) if nvlabs else []
    betas: Any = config.betas
    return CAME(groups, config.lr, betas, seed=seed, factor_kernels=not nvlabs, joint=joint)


def joint_weights(named: Iterable[tuple[str, torch.Tensor]]) -> list[list[torch.Tensor]]:
    """The parameters that are rows of one matrix (or bias) in NVlabs' model: query, key and value of self attention,
    key and value of cross attention."""
    joint: dict[str, list[torch.Tensor]] = {}
    for name, parameter in named:
        if match := re.fullmatch(r"(.*\.)(attn1\.to_[qkv]|attn2\.to_[kv])\.(weight|bias)", name):
            before, layer, tensor = match.groups()
            joint.setdefault(f"{before}{layer[:5]}.{tensor}", []).append(parameter)
    return list(joint.values())


# ------------------------------------------------------------------------------------------------------- the formulas


def _normalise(stacks: list[_Stack]) -> None:
    """update <- gradient / sqrt(its second moment)."""
    for stack in (stack for stack in stacks if stack.vector):
        beta, eps = stack.group["betas"][1], stack.group["eps"][0]
        square = stack.state["exp_avg_sq"].lerp_(stack.update.square().add_(eps), 1 - beta)
        stack.update.mul_(square.rsqrt())
    matrices = [stack for stack in stacks if not stack.vector]
    scales = _factors(matrices, "exp_avg_sq", 1, 0, lambda stack: stack.update.square())
    for stack, (rows, columns) in zip(matrices, scales, strict=True):
        stack.update.mul_(rows).mul_(columns)


def _clip(stacks: list[_Stack]) -> None:
    """update <- update / max(1, RMS / clip), the RMS over the whole parameter."""
    sums = [stack.update.square().reshape(len(stack.members), -1).sum(1) for stack in stacks]
    _sum(sums, [stack.other_rows + stack.other_columns for stack in stacks])
    _sum_joint(stacks, sums)
    for stack, total in zip(stacks, sums, strict=True):
        rms = (total / (stack.matrix_rows * stack.matrix_columns)).sqrt()
        stack.update.div_((rms / CLIP).clamp(min=1.0).view(-1, *[1] * (stack.update.ndim - 1)))


def _move_momentum(stack: _Stack) -> None:
    """momentum <- its mean with the update, stored."""
    share, momenta = 1 - stack.group["betas"][0], stack.momenta
    if momenta[0].dtype == torch.float32:
        torch._foreach_lerp_(momenta, list(stack.update.unbind()), share)
        stack.momentum = torch.stack(momenta)
        return
    stack.momentum = stack.rounded(torch.stack(momenta).float().lerp_(stack.update, share), 0)
    torch._foreach_copy_(momenta, list(stack.momentum.unbind()))


def _confide(stacks: list[_Stack]) -> None:
    """update <- momentum / sqrt(mean square of the update's deviation from it); for a vector the momentum itself."""
    for stack in (stack for stack in stacks if stack.vector):
        stack.update = stack.momentum.float()
    matrices = [stack for stack in stacks if not stack.vector]
    scales = _factors(matrices, "exp_avg_res", 2, 1, lambda stack: (stack.update - stack.momentum).square_())
    for stack, (rows, columns) in zip(matrices, scales, strict=True):
        stack.update = (stack.momentum * rows).mul_(columns)


def _move_values(stack: _Stack) -> None:
    """value <- value * (1 - rate * weight decay) - rate * update, stored."""
    rate, decay = stack.group["lr"], 1 - stack.group["lr"] * stack.group["weight_decay"]
    if stack.values[0].dtype == torch.float32:
        if decay != 1:
            torch._foreach_mul_(stack.values, decay)
        torch._foreach_add_(stack.values, list(stack.update.unbind()), alpha=-rate)
        return
    moved = torch.stack(stack.values).float().mul_(decay).add_(stack.update, alpha=-rate)
    torch._foreach_copy_(stack.values, list(stack.rounded(moved, 1).unbind()))


def _factors(
    stacks: list[_Stack], name: str, beta: int, eps: int, squares: Callable[[_Stack], Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Update the row and column means of `squares` + eps. Returns factors (n, rows, 1) and (n, 1, columns), whose
    product is 1 / sqrt(row mean * column mean / mean of the row means)."""
    row_sums, column_sums = [], []
    for stack in stacks:
        square = squares(stack)
        row_sums.append(square.sum(2))
        column_sums.append(square.sum(1))
    _sum(column_sums, [stack.other_rows for stack in stacks])
    _sum_joint(stacks, column_sums)
    totals = []
    for stack, sums in zip(stacks, column_sums, strict=True):
        columns = stack.state[name + "_col"]
        columns.lerp_(sums.div_(stack.matrix_rows).add_(stack.group["eps"][eps]), 1 - stack.group["betas"][beta])
        totals.append(columns.sum(1))
    _sum([*row_sums, *totals], [stack.other_columns for stack in stacks] * 2)
    factors = []
    for stack, sums, total in zip(stacks, row_sums, totals, strict=True):
        rows, columns = stack.state[name + "_row"], stack.state[name + "_col"]
        rows.lerp_(sums.div_(stack.matrix_columns).add_(stack.group["eps"][eps]), 1 - stack.group["betas"][beta])
        mean = total / stack.matrix_columns  # of all squares; equal to the mean of the row means
        factors.append(((rows / mean[:, None]).rsqrt_()[:, :, None], columns.rsqrt()[:, None]))
    return factors


def _sum_joint(stacks: list[_Stack], sums: list[Tensor]) -> None:
    """Add up, in place, the sums of joint parameters."""
    together: dict[int, list[Tensor]] = {}
    for stack, stacked in zip(stacks, sums, strict=True):
        for member, value in zip(stack.members, stacked.unbind(), strict=True):
            together.setdefault(member.matrix, []).append(value)
    for values in together.values():
        if len(values) > 1:
            total = torch.stack(values).sum(0)
            for value in values:
                value.copy_(total)


# --------------------------------------------------------------------------------------------------------- the shards


def _sum(tensors: list[Tensor], groups: list[Groups]) -> None:
    """Sum each tensor in place over each of its groups; tensors with the same groups share an all-reduce."""
    by_groups: dict[Groups, list[Tensor]] = {}
    for tensor, its_groups in zip(tensors, groups, strict=True):
        if its_groups:
            by_groups.setdefault(its_groups, []).append(tensor)
    for its_groups, members in by_groups.items():
        flat = torch.cat([tensor.reshape(-1) for tensor in members])
        for group in its_groups:
            dist.all_reduce(flat, group=group)
        spread(flat, members)


def _matrix(tensor: Tensor) -> Tensor:
    """(out, all other dimensions), sharing memory; a vector stays one. Sizes are explicit because of empty shards."""
    return tensor.view(tensor.shape[0], tensor.shape[1:].numel()) if tensor.ndim > 1 else tensor


def _zeros(parameter: Tensor, side: int) -> Tensor:
    """fp32 zeros for one value per row (side 0: shape (rows,)) or per column (side 1: the other dimensions), sharded
    where the parameter is sharded in that dimension."""

    def reduced(shape: torch.Size) -> torch.Size:
        return shape[:1] if side == 0 else shape[1:]

    shard = torch.zeros(reduced(local(parameter).shape), dtype=torch.float32, device=local(parameter).device)
    if not isinstance(parameter, DTensor):
        return shard
    shape = reduced(parameter.shape)
    placements = [_reduced_placement(p, side) for p in parameter.placements]
    stride = torch.empty(shape, device="meta").stride()
    zeros = DTensor.from_local(shard, parameter.device_mesh, placements, run_check=False, shape=shape, stride=stride)
    return zeros.to(parameter.device)  # an offloaded parameter is on the CPU, its mesh on the GPU


def _reduced_placement(placement: Placement, side: int) -> Placement:
    """The placement of a parameter's row means (side 0) or column means (1); also of a strided one (FSDP2 over tensor
    parallelism)."""
    if getattr(placement, "dim", None) != side:
        return Replicate()
    if side == 0 or isinstance(placement, Shard):
        return placement if side == 0 else Shard(0)
    return type(placement)(0, split_factor=placement.split_factor)  # type: ignore[call-arg,attr-defined]
