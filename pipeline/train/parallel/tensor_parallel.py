"""Tensor parallelism: every process of the `tp` dimension has a shard of each matrix and does its part of the product.

Why not torch's `ColwiseParallel`: DTensor has no convolution over channels (a 1x1 convolution sharded by rows even
gives wrong numbers without an error), and half of Sana's parameters are convolutions. Any slice of channels is valid,
because GLUMBConv stores value and gate side by side. Parameters outside the plan are replicated.
Price: two reductions of an activation per region and pass, so it belongs inside a node.
Source: Megatron-LM (arXiv 1909.08053) for columns, rows and regions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from sana_pipe.base.errors import ConfigError
from sana_pipe.base.layer_classes import LayerMixin, add_mixin
from sana_pipe.train.parallel.shards import local, sum_over_shards


def check(parts: Mapping[str, int], size: int, dropout: float) -> None:
    """Refuse a `tp_size` that does not divide the model. parts: number of equal parts by name (heads, channels)."""
    if size == 1:
        return
    wrong = {name: count for name, count in parts.items() if count % size}
    if wrong:
        common = reduce(gcd, parts.values())
        raise ConfigError(
            f"train.parallel.tp_size = {size} does not divide the model",
            expected=f"one of {[n for n in range(1, min(common, 64) + 1) if common % n == 0]}",
            found=", ".join(f"{count} {name}" for name, count in wrong.items()),
            fix="set train.parallel.tp_size to one of these and leave the rest to dp_shard",
        )
    if dropout:
        raise ConfigError(
            f"the model has dropout = {dropout:g}, which would differ between the processes of a tensor-parallel group",
            fix="dropout = 0 as in every released Sana, or train.parallel.tp_size = 1",
        )


def apply(blocks: Iterable[nn.Module], plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Shard each block in place, before `fully_shard`. No effect on a mesh of one process.

    Args:
        plan: role of each submodule by its name in a block. region: its input is replicated; the gradients of the input
            are summed over the shards, once for query, key and value. column: Linear or convolution of channels-last
            tokens, sharded by output channels; a depthwise one, too, if its `_conv_forward` takes the number of
            channels from the weight. row: Linear or 1x1 convolution, sharded by input channels; outputs are summed over
            the shards, then comes the bias. norm: RMS norm over sharded channels.
    """
    if mesh.size() == 1:
        return
    for block in blocks:
        for name, role in plan.items():
            module = block.get_submodule(name)
            for parameter, dim in _SHARD_DIMS[role].items():
                _shard_parameter(module, parameter, dim, mesh)
            add_mixin(module, _ROLES[role])
            module._mesh = mesh  # type: ignore[assignment]


def _shard_parameter(module: nn.Module, name: str, dim: int, mesh: DeviceMesh) -> None:
    whole = getattr(module, name, None)
    if whole is None:
        return
    # src_data_rank=None: every process has the same values, nothing is sent
    sharded = distribute_tensor(whole.detach(), mesh, [Shard(dim)], src_data_rank=None)
    setattr(module, name, nn.Parameter(sharded, requires_grad=whole.requires_grad))


def _apply(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if isinstance(module, nn.Conv2d):
        return module._conv_forward(x, weight, bias)
    return F.linear(x, weight, bias)


class Sharded(LayerMixin):
    place = "sharding"
    replaces = True
    _mesh: DeviceMesh
    weight: Tensor
    bias: Tensor | None


class Region(Sharded):
    replaces = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        def enter(value: Any) -> Any:
            differentiable = isinstance(value, Tensor) and value.is_floating_point()
            return sum_over_shards(value, self._mesh, backward=True) if differentiable else value

        entered = {name: enter(value) for name, value in kwargs.items()}
        return super().forward(*map(enter, args), **entered)  # type: ignore[misc]


class ShardedColumns(Sharded):
    def forward(self, x: Tensor) -> Tensor:
        return _apply(self, x, local(self.weight), local(self.bias))  # type: ignore[arg-type]


class ShardedRows(Sharded):
    def forward(self, x: Tensor) -> Tensor:
        product = _apply(self, x, local(self.weight), None)  # type: ignore[arg-type]
        summed = sum_over_shards(product, self._mesh, forward=True)
        if self.bias is None:
            return summed
        return summed + self.bias


class ShardedNorm(Sharded):
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        full, weight = x.float(), local(self.weight)
        squares = sum_over_shards(full.square().sum(-1, keepdim=True), self._mesh, forward=True, backward=True)
        full = full * torch.rsqrt(squares / (x.shape[-1] * self._mesh.size()) + self.eps)
        return full.to(weight.dtype) * weight


_ROLES: dict[str, type[Sharded]] = {
    "region": Region,
    "column": ShardedColumns,
    "row": ShardedRows,
    "norm": ShardedNorm,
}
_SHARD_DIMS: dict[str, dict[str, int]] = {
    "region": {},
    "column": {"weight": 0, "bias": 0},
    "row": {"weight": 1},
    "norm": {"weight": 0},
}
