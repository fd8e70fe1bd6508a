"""Stochastic rounding to bf16 (arXiv 2010.06192), and AdamW (arXiv 1711.05101) for parameters without fp32 copies.

bf16 has 8 bits: rounded to nearest, an update of 1e-4 of a weight would be dropped and a moment with beta 0.999 hardly
ever change. Rounded up or down at random both are right on average. The bits depend only on (seed, step, parameter,
shard), so replicas of a shard stay equal, a resumed run draws the same, and no random state goes into the checkpoint.
Price: weights carry noise of half a bit (0.2 %), another number of shards draws other noise, and fp32 copies of the
parameters that are updated together (`_GROUP`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from sana_pipe.train.parallel.shards import local


def to_bf16(value: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Round finite fp32 to bf16 stochastically; the expected result is `value`. Exact values are unchanged."""
    bits = value.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, generator=generator, device=bits.device, dtype=torch.int32)
    return noise.add_(bits).bitwise_and_(-(1 << 16)).view(torch.float32).to(torch.bfloat16)


def scaled(gradient: Tensor, factor: Tensor | None) -> Tensor:
    """A gradient in fp32, times an fp32 scalar if there is one; in place for an fp32 gradient."""
    gradient = gradient.float()
    return gradient if factor is None else gradient.mul_(factor.to(gradient.device))


_GROUP = 2**25
"""Elements per process that are updated at a time: six fp32 buffers of 128 MiB."""

_Member = tuple[int, Tensor]
"""A parameter and its number in the optimizer."""


def placement_of(parameter: Tensor) -> Any:
    """Equal for parameters whose shards lie on the same processes; hashable."""
    return (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None


class Noise:
    """Random bits by (seed, step, parameter, shard): one generator per device, seeded anew for each use."""

    def __init__(self, seed: int):
        self.seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def at(self, parameter: Tensor, step: int, index: int, draw: int = 0) -> torch.Generator:
        """Make the numbers of parameter `index` in optimizer step `step`: equal on all replicas of a shard. `draw`:
        number of an independent draw."""
        shard = 0
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            coordinate = mesh.get_coordinate() or [0] * mesh.ndim
            for dimension, placement in enumerate(parameter.placements):
                if not placement.is_replicate():
                    shard = shard * mesh.size(dimension) + coordinate[dimension]
        device = local(parameter).device
        generator = self._generators.setdefault(device, torch.Generator(device))
        key = struct.pack("<5Q" if draw else "<4Q", self.seed, step, index, shard, *([draw] if draw else []))
        return generator.manual_seed(xxhash.xxh3_64_intdigest(key) >> 1)


class RoundingAdamW(torch.optim.Optimizer):
    """The base of AdamW with bf16 parameters and of AdamW with moments in 8 bits. Parameters are plain
    tensors or DTensors of any placement: all is elementwise. seed: of the rounding, see `Noise`."""

    gradient_factor: Tensor | None = None
    """As in `CAME`."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        seed: int = 0,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.noise = Noise(seed)

    def _counted(self) -> Iterator[tuple[int, dict[str, Any], Tensor, dict[str, Any]]]:
        """Number, group, parameter and state of each parameter with a gradient; its step is counted."""
        index = -1
        for group in self.param_groups:
            for parameter in group["params"]:
                index += 1
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state |= {name: self._zero_moment(parameter, name) for name in ("exp_avg", "exp_avg_sq")}
                state["step"] += 1
                yield index, group, parameter, state

    def _zero_moment(self, parameter: Tensor, name: str) -> Tensor:
        return torch.zeros_like(parameter)


class AdamW(RoundingAdamW):
    """AdamW with bf16 parameters and bf16 moments: 4 bytes of state per parameter, fp32 arithmetic."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update. Parameters without a gradient stay as they are."""
        for group, count, members in self._alike():
            self._update(group, count, members)

    def _alike(self) -> Iterator[tuple[dict[str, Any], int, list[_Member]]]:
        """Parameters of a group with equal step counts, devices and placements, in lists of about `_GROUP` elements."""
        waiting: dict[Any, tuple[dict[str, Any], int, list[_Member]]] = {}
        for index, group, parameter, state in self._counted():
            count = int(state["step"].item())
            key = id(group), count, local(parameter).device, placement_of(parameter)
            members = waiting.setdefault(key, (group, count, []))[2]
            members.append((index, parameter))
            if sum(local(member).numel() for _, member in members) >= _GROUP:
                yield waiting.pop(key)
        yield from waiting.values()

    def _update(self, group: dict[str, Any], count: int, members: list[_Member]) -> None:
        """All members at a time, one after the other in flat fp32 buffers: a bounded number of launches."""
        (beta1, beta2), rate = group["betas"], group["lr"]
        index, first = members[0]
        parameters = [parameter for _, parameter in members]
        generator = self.noise.at(first, count, index)
        means, squares = ([local(self.state[p][name]) for p in parameters] for name in ("exp_avg", "exp_avg_sq"))
        values = [local(parameter) for parameter in parameters]
        gradient = scaled(_flat([local(p.grad) for p in parameters if p.grad is not None]), self.gradient_factor)
        mean = _flat(means).lerp_(gradient, 1 - beta1)
        square = _flat(squares).lerp_(gradient.square(), 1 - beta2)
        spread(to_bf16(mean, generator), means)
        spread(to_bf16(square, generator), squares)
        root = square.div_(1 - beta2**count).sqrt_().add_(group["eps"])
        value = _flat(values).mul_(1 - rate * group["weight_decay"])
        value.addcdiv_(mean, root, value=-rate / (1 - beta1**count))
        spread(to_bf16(value, generator), values)


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).float()


def spread(flat: Tensor, tensors: list[Tensor]) -> None:
    """Write a flat tensor back."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(tensors, [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)])
