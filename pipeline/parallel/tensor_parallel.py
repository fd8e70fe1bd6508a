"""Tensor parallelism: every process of the `tp` dimension holds a slice of each matrix and does a slice of the work.

What: `cut` takes a plan, {module of a block: role}, makes the parameters of these modules DTensors that are sharded
over `tp`, and has them compute with their own slice. The roles:
  region  what the module reads is whole; the gradients of what it reads are summed over the slices
  column  Linear or convolution, cut by output channels (a depthwise convolution, where groups = channels, too)
  row     Linear or 1x1 convolution, cut by input channels; its outputs are summed over the slices, then comes the bias
  norm    RMS norm over channels that are cut; the mean square is that of all channels
Why by hand and not torch's `ColwiseParallel`: DTensor has no convolution over channels (a 1x1 convolution cut by rows
even gives wrong numbers without an error), and half of Sana's parameters are convolutions. One way for both, with the
gradients summed once per region instead of once for each of query, key and value.
Why the channels can be cut anywhere: GLUMBConv keeps value and gate of a channel side by side (see
`pipeline.models.sana`), so plain `Shard(0)` is right for any size, and a checkpoint made with one size is read by any.
What is not in the plan stays whole on every process; its gradients come out equal on all of them.
Price: two sums of an activation per region and pass, so it belongs inside a node. Sana 1.6B has 70, 20 and 5600 equal
parts to cut, so 2, 5 and 10 processes are possible; 0.6B has 36, 16 and 2880: 2 and 4.

Megatron-LM (arXiv 1909.08053) for columns, rows and regions.
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
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from pipeline.errors import ConfigError


def check(parts: Mapping[str, int], size: int, dropout: float) -> None:
    """Refuse a `tp_size` that does not divide the model.

    Args:
        parts: what is cut, by name, and how many equal parts there are.

    Raises:
        ConfigError: names what does not divide, and the sizes that would work.
    """
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


def cut(blocks: Iterable[nn.Module], plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Cut each block in place, before `fully_shard`. Nothing happens on a mesh of one process.

    Args:
        plan: role of each submodule by its name in a block.
        mesh: one dimension. Every process has the same values and keeps its slice of them.
    """
    if mesh.size() == 1:
        return
    for block in blocks:
        for name, role in plan.items():
            module = block.get_submodule(name)
            for own, dim in _DIMS[role].items():
                _shard_parameter(module, own, dim, mesh)
            module.__class__ = _cut_class(_CUT[role], type(module))
            module._mesh = mesh  # type: ignore[assignment]


def _shard_parameter(module: nn.Module, name: str, dim: int, mesh: DeviceMesh) -> None:
    whole = getattr(module, name, None)
    if whole is None:
        return
    # Every process has the same values: no need to send them.
    sliced = distribute_tensor(whole.detach(), mesh, [Shard(dim)], src_data_rank=None)
    setattr(module, name, nn.Parameter(sliced, requires_grad=whole.requires_grad))


def _summed_backward(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """`x` as it is; its gradient is summed over the slices."""
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def _summed(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of `x` over the slices; its gradient goes to each of them as it is."""
    return DTensor.from_local(x, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()]).to_local()


def _local(parameter: Any) -> Any:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _apply(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if isinstance(module, nn.Conv2d):
        groups = 1 if module.groups == 1 else weight.shape[0]
        return F.conv2d(x, weight, bias, module.stride, module.padding, module.dilation, groups)
    return F.linear(x, weight, bias)


class _Cut:
    """Mixed in before a module's own class."""

    _mesh: DeviceMesh
    weight: Tensor
    bias: Tensor | None


class _Region(_Cut):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        def enter(value: Any) -> Any:
            whole = isinstance(value, Tensor) and value.is_floating_point()
            return _summed_backward(value, self._mesh) if whole else value

        inside = {name: enter(value) for name, value in kwargs.items()}
        return super().forward(*map(enter, args), **inside)  # type: ignore[misc]


class _Column(_Cut):
    def forward(self, x: Tensor) -> Tensor:
        return _apply(self, x, _local(self.weight), _local(self.bias))  # type: ignore[arg-type]


class _Row(_Cut):
    def forward(self, x: Tensor) -> Tensor:
        whole = _summed(_apply(self, x, _local(self.weight), None), self._mesh)  # type: ignore[arg-type]
        if self.bias is None:
            return whole
        return whole + (self.bias.view(-1, 1, 1) if isinstance(self, nn.Conv2d) else self.bias)


class _Norm(_Cut):
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        full, weight = x.float(), _local(self.weight)
        squares = _summed_backward(_summed(full.square().sum(-1, keepdim=True), self._mesh), self._mesh)
        full = full * torch.rsqrt(squares / (x.shape[-1] * self._mesh.size()) + self.eps)
        return full.to(weight.dtype) * weight


_CUT: dict[str, type[_Cut]] = {"region": _Region, "column": _Column, "row": _Row, "norm": _Norm}
_DIMS: dict[str, dict[str, int]] = {
    "region": {},
    "column": {"weight": 0, "bias": 0},
    "row": {"weight": 1},
    "norm": {"weight": 0},
}
_CLASSES: dict[tuple[type[_Cut], type[nn.Module]], type[nn.Module]] = {}


def _cut_class(role: type[_Cut], cls: type[nn.Module]) -> type[nn.Module]:
    if issubclass(cls, _Cut):
        raise ValueError(f"{cls.__name__} has been cut already")
    if (role, cls) not in _CLASSES:
        _CLASSES[role, cls] = type(f"Cut{cls.__name__}", (role, cls), {"__module__": cls.__module__})
    return _CLASSES[role, cls]
