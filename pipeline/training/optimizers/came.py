"""CAME: an optimizer with one full momentum and factored second moments, for any sharding.

What: `CAME` stores the momentum of every parameter in full, but the mean squares of its gradient and of its deviation
from the momentum only as means over rows and over columns. A convolution is treated as the matrix (outputs, all other
dimensions). NVlabs' CAME differs in two points, which `factor_kernels` and `joint` reproduce: it does not factor 3x3
kernels, and its model has one matrix where ours has two or three.
Why not a package: those factor the last two dimensions, which gives a 1x1 convolution (out, in, 1, 1) four factors of
its full size; these are 47 % of Sana, and CAME then needs more memory than AdamW. They also fail on DTensors.
Sharding: the row means of a shard of rows are local, its column means are summed over the processes with the other
rows, and the reverse for shards of columns; any mesh of both works, also with empty shards. Parameters are processed in
groups of a bounded size, with three all-reduces per group and mesh dimension.
Price: 4.01 bytes of state per fp32 parameter of Sana 1.6B, 2.02 for bf16 ones (AdamW: 8 and 4). There is no bias
correction, as published: the first thousands of steps are longer than later ones, so keep the warm-up.

Formulas: arXiv 2307.02047, algorithm 2; the clipping by the root mean square is Adafactor's, arXiv 1804.04235.
Constants are those of NVlabs' Sana configurations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from pipeline.parallel.shards import local
from pipeline.training.optimizers.stochastic_rounding import Noise, to_bf16

BETAS = (0.9, 0.999, 0.9999)
EPS = (1e-30, 1e-16)
CLIP = 1.0
"""Largest root mean square of a normalised gradient."""

_GROUP = 2**26
"""Elements per process whose normalised gradients are in memory at a time (256 MiB)."""

Groups = tuple[dist.ProcessGroup, ...]


@dataclass
class _Part:
    """This process's shard of one parameter, as a matrix (or a vector: `vector`).

    value, momentum: as stored. update: fp32, first the gradient, then the normalised gradient. matrix: number of the
    whole matrix, which joint parameters share; rows, columns: its sizes. other_rows, other_columns: process groups that
    have the rest of it.
    """

    value: Tensor
    momentum: Tensor
    update: Tensor
    state: dict[str, Tensor]
    matrix: int
    rows: int
    columns: int
    other_rows: Groups
    other_columns: Groups
    generator: torch.Generator | None
    group: dict[str, Any]

    @property
    def vector(self) -> bool:
        """Whether squares are stored unfactored."""
        return "exp_avg_sq" in self.state


class CAME(torch.optim.Optimizer):
    """The optimizer. `step` is a collective of all processes that have shards.

    Args:
        params: plain tensors or DTensors, sharded by rows (dimension 0), by columns (dimension 1) or both; fp32, or
            bf16 (then updates and momentum are rounded stochastically, see `stochastic_rounding`).
        betas: decay of the second moment's companions: momentum, squares, squared deviations.
        eps: added to the squares of the gradient and of the deviation.
        clip: largest root mean square of the normalised gradient, over the whole matrix.
        seed: of the rounding.
        factor_kernels: whether squares of convolutions larger than 1x1 are factored (one per cent of Sana's
            parameters). Unfactored they have no confidence.
        joint: parameters that are treated as the rows of one matrix: they share column means and clipping. All of
            them need gradients, or none.

    State: `exp_avg` like the parameter; `exp_avg_sq_row` (rows,), `exp_avg_sq_col` (the other dimensions),
    `exp_avg_res_row` and `exp_avg_res_col` alike, fp32, DTensors where the parameter is one; for a vector or an
    unfactored kernel only `exp_avg_sq`, and no confidence. Joint parameters have equal `_col`.

    Raises:
        ValueError: a parameter that is sharded in another dimension, or of another dtype.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float, float] = BETAS,
        eps: tuple[float, float] = EPS,
        weight_decay: float = 0.0,
        *,
        clip: float = CLIP,
        seed: int = 0,
        factor_kernels: bool = True,
        joint: Iterable[Sequence[Tensor]] = (),
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "clip": clip})
        self.noise, self.factor_kernels = Noise(seed), factor_kernels
        self._joint = {parameter: tuple(members) for members in joint for parameter in members}
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.dtype not in (torch.float32, torch.bfloat16):
                raise ValueError(f"CAME takes fp32 or bf16 parameters, not {parameter.dtype}")
            if isinstance(parameter, DTensor) and any(not _supported(p) for p in parameter.placements):
                raise ValueError(f"CAME reads shards of rows or columns, not {parameter.placements}")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update. Parameters without a gradient stay as they are (the same ones on all processes)."""
        for parts in self._grouped():
            for part in parts:
                _decay(part, part.group["lr"] * part.group["weight_decay"])
            _normalise(parts)
            _clip(parts)
            for part in parts:
                _store(part.momentum, part.momentum.float().lerp_(part.update, 1 - part.group["betas"][0]), part)
            _confide(parts)
            for part in parts:
                _store(part.value, part.value.float().add_(part.update, alpha=-part.group["lr"]), part)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which would cast the means to the parameter's dtype; here they stay fp32."""
        super().load_state_dict(state_dict)
        identities = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for identity, parameter in zip(identities, parameters, strict=True):
            for name, value in state_dict["state"].get(identity, {}).items():
                if name not in ("step", "exp_avg"):
                    self.state[parameter][name] = value.to(parameter.device, torch.float32)

    def _grouped(self) -> Iterator[list[_Part]]:
        """Parts in groups of about `_GROUP` elements, by sizes that all processes agree on, not those of shards."""
        matrices: dict[Tensor, list[tuple[int, Tensor, dict[str, Any]]]] = {}  # by the first of joint parameters
        every = ((parameter, group) for group in self.param_groups for parameter in group["params"])
        for index, (parameter, group) in enumerate(every):
            if parameter.grad is not None:
                first, *_ = self._joint.get(parameter, (parameter,))
                matrices.setdefault(first, []).append((index, parameter, group))
        parts: list[_Part] = []
        elements = 0.0
        for number, members in enumerate(matrices.values()):
            for index, parameter, group in members:
                parts.append(self._part(parameter, group, index, number))
                elements += parameter.numel() / _shards(parameter)
            if elements >= _GROUP:
                yield parts
                parts, elements = [], 0.0
        if parts:
            yield parts

    def _part(self, parameter: Tensor, group: dict[str, Any], index: int, matrix: int) -> _Part:
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
        gradient = parameter.grad
        assert gradient is not None
        if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
            gradient = gradient.redistribute(placements=parameter.placements)
        rounded = parameter.dtype == torch.bfloat16
        rows = parameter.shape[0] if parameter.ndim else 1
        others = [member for member in self._joint.get(parameter, ()) if member is not parameter]
        return _Part(
            value=_matrix(local(parameter)),
            momentum=_matrix(local(state["exp_avg"])),
            update=_matrix(local(gradient).contiguous()).float(),
            state={
                name: _matrix(local(value)) if name == "exp_avg_sq" else local(value)
                for name, value in state.items()
                if name not in ("step", "exp_avg")
            },
            matrix=matrix,
            rows=rows + sum(member.shape[0] for member in others),
            columns=parameter.numel() // rows,
            other_rows=_sharding_groups(parameter, 0),
            other_columns=_sharding_groups(parameter, 1),
            generator=self.noise.at(parameter, int(state["step"].item()), index) if rounded else None,
            group=group,
        )


# ------------------------------------------------------------------------------------------------------- the formulas


def _decay(part: _Part, amount: float) -> None:
    if amount:
        _store(part.value, part.value.float().mul_(1 - amount), part)


def _normalise(parts: list[_Part]) -> None:
    """update <- gradient / sqrt(its second moment)."""
    for part in (part for part in parts if part.vector):
        beta, eps = part.group["betas"][1], part.group["eps"][0]
        square = part.state["exp_avg_sq"].lerp_(part.update.square().add_(eps), 1 - beta)
        part.update = part.update * square.rsqrt()
    matrices = [part for part in parts if not part.vector]
    scales = _factors(matrices, "exp_avg_sq", 1, 0, lambda part: part.update.square())
    for part, (rows, columns) in zip(matrices, scales, strict=True):
        part.update = (part.update * rows).mul_(columns)


def _clip(parts: list[_Part]) -> None:
    """update <- update / max(1, RMS / clip), the RMS over the whole parameter."""
    sums = [part.update.square().sum() for part in parts]
    _sum(sums, [part.other_rows + part.other_columns for part in parts])
    _sum_joint(parts, sums)
    for part, total in zip(parts, sums, strict=True):
        rms = (total / (part.rows * part.columns)).sqrt()
        part.update.div_((rms / part.group["clip"]).clamp(min=1.0))


def _confide(parts: list[_Part]) -> None:
    """update <- momentum / sqrt(mean square of the update's deviation from it); for a vector the momentum itself."""
    for part in (part for part in parts if part.vector):
        part.update = part.momentum.float()
    matrices = [part for part in parts if not part.vector]
    scales = _factors(matrices, "exp_avg_res", 2, 1, lambda part: (part.update - part.momentum).square_())
    for part, (rows, columns) in zip(matrices, scales, strict=True):
        part.update = (part.momentum * rows).mul_(columns)


def _factors(
    parts: list[_Part], name: str, beta: int, eps: int, squares: Callable[[_Part], Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Update the row and column means of `squares` + eps.

    Returns:
        Factors (n, 1) and (1, m) whose product is 1 / sqrt(row mean * column mean / mean of the row means).
    """
    row_sums, column_sums = [], []
    for part in parts:
        square = squares(part)
        row_sums.append(square.sum(1))
        column_sums.append(square.sum(0))
    _sum(column_sums, [part.other_rows for part in parts])
    _sum_joint(parts, column_sums)
    totals = []
    for part, sums in zip(parts, column_sums, strict=True):
        columns = part.state[name + "_col"].view(-1)
        columns.lerp_(sums.div_(part.rows).add_(part.group["eps"][eps]), 1 - part.group["betas"][beta])
        totals.append(columns.sum())
    _sum([*row_sums, *totals], [part.other_columns for part in parts] * 2)
    factors = []
    for part, sums, total in zip(parts, row_sums, totals, strict=True):
        rows, columns = part.state[name + "_row"], part.state[name + "_col"].view(-1)
        rows.lerp_(sums.div_(part.columns).add_(part.group["eps"][eps]), 1 - part.group["betas"][beta])
        mean = total / part.columns  # of all squares; equal to the mean of the row means
        factors.append(((rows / mean).rsqrt_()[:, None], columns.rsqrt()[None]))
    return factors


def _sum_joint(parts: list[_Part], sums: list[Tensor]) -> None:
    """Add up, in place, the sums of joint parameters."""
    members: dict[int, list[Tensor]] = {}
    for part, value in zip(parts, sums, strict=True):
        members.setdefault(part.matrix, []).append(value)
    for values in members.values():
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
        for tensor, part in zip(members, flat.split([tensor.numel() for tensor in members]), strict=True):
            tensor.copy_(part.view_as(tensor))


def _matrix(tensor: Tensor) -> Tensor:
    """(out, all other dimensions), sharing memory; a vector stays one. Sizes are explicit because of empty shards."""
    return tensor.view(tensor.shape[0], tensor.shape[1:].numel()) if tensor.ndim > 1 else tensor


def _supported(placement: Placement) -> bool:
    return placement.is_replicate() or _dimension(placement) in (0, 1)


def _dimension(placement: Placement) -> int | None:
    """The dimension that a placement shards, also a strided one (FSDP2 over tensor parallelism)."""
    return getattr(placement, "dim", None)


def _sharding_groups(parameter: Tensor, dimension: int) -> Groups:
    """The groups over which `dimension` is sharded; none for a plain tensor or a mesh of one."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    sharded = (i for i, p in enumerate(parameter.placements) if _dimension(p) == dimension and mesh.size(i) > 1)
    return tuple(mesh.get_group(i) for i in sharded)


def _shards(parameter: Tensor) -> int:
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    return torch.Size([mesh.size(i) for i, p in enumerate(parameter.placements) if not p.is_replicate()]).numel()


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
    """The placement of a parameter's row means (side 0) or column means (1)."""
    if _dimension(placement) != side:
        return Replicate()
    if side == 0 or isinstance(placement, Shard):
        return placement if side == 0 else Shard(0)
    return type(placement)(0, split_factor=placement.split_factor)  # type: ignore[call-arg,attr-defined]


# ------------------------------------------------------------------------------------------------------- the storage


def _store(target: Tensor, value: Tensor, part: _Part) -> None:
    """Round `value`, computed from `target.float()`, into `target`. For fp32 both are the same tensor."""
    if value is not target:
        target.copy_(to_bf16(value, part.generator))
