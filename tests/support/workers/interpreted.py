"""Runs the Triton kernels in Triton's interpreter on the CPU and prints their errors as JSON.

The interpreter is chosen when the kernels are imported (TRITON_INTERPRET=1), so this is a process of its own. Every
memory that a launcher takes is filled with NaN first, and so is what surrounds it: a value that no program writes, or
one that is written or read outside, shows.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from sana_pipe.base.processes import run_and_exit
from sana_pipe.train.kernels import gated_convolution_triton, linear_attention_triton

_splat = InterpreterBuilder.create_splat
"""In triton 3.9 it repeats the result of a scalar comparison as int32, which no mask may be."""


def _create_splat(self: Any, type_: Any, scalar: Any) -> Any:
    result = _splat(self, type_, scalar)
    if scalar.data.dtype == bool:
        result.data = result.data.astype(bool)
    return result


InterpreterBuilder.create_splat = _create_splat
MARGIN = 4096
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CONVOLUTIONS = {  # (B, height, width, 2H)
    "one token, one channel": (1, 1, 1, 2),
    "a row": (1, 1, 5, 4),
    "a column, channels beyond a program's": (1, 5, 1, 258),
    "odd sides, two pictures": (2, 5, 3, 10),
}
ATTENTIONS = {  # (B, N, heads, head_dim)
    "one token": (1, 1, 1, 32),
    "narrow heads, two samples": (2, 67, 3, 8),
    "tokens beyond a program's": (1, 515, 1, 20),
}


class Poisoned:
    """Allocations within NaN."""

    def __init__(self) -> None:
        self.made: list[tuple[Tensor, Tensor]] = []

    def empty(self, *size: Any, dtype: torch.dtype, device: Any = None) -> Tensor:
        shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        whole = torch.full((shape.numel() + 2 * MARGIN,), torch.nan, dtype=dtype)
        self.made.append((whole, part := whole[MARGIN:-MARGIN].view(shape)))
        return part

    def empty_like(self, x: Tensor) -> Tensor:
        return self.empty(x.shape, dtype=x.dtype)

    def check(self) -> None:
        for whole, part in self.made:
            assert part.isfinite().all(), "a value was not written"
            assert whole[:MARGIN].isnan().all() and whole[-MARGIN:].isnan().all(), "written outside"


class _Torch:
    """`torch` with poisoned allocations, for a launcher."""

    def __init__(self, memory: Poisoned):
        self.empty, self.empty_like = memory.empty, memory.empty_like

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def convolution(u: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The formula, under ordinary autograd."""
    out = F.conv2d(F.silu(u).permute(0, 3, 1, 2), weight, bias, padding=1, groups=len(bias)).permute(0, 2, 3, 1)
    return out[..., 0::2] * F.silu(out[..., 1::2])


def attention(query: Tensor, key: Tensor, value: Tensor, head_dim: int, eps: float, constant: str = "") -> Tensor:
    """The formula, under ordinary autograd, by the matrix of all pairs of tokens; `constant` names a part (numerator,
    denominator) through which no gradient goes."""
    q, k, v = (x.unflatten(2, (-1, head_dim)).transpose(1, 2) for x in (query, key, value))
    weights = q.relu() @ k.relu().transpose(2, 3)
    numerator, denominator = weights @ v, weights.sum(-1, keepdim=True) + eps
    if constant:
        numerator, denominator = (
            x.detach() if name == constant else x
            for name, x in (("numerator", numerator), ("denominator", denominator))
        )
    return (numerator / denominator).transpose(1, 2).flatten(2)


def poisoned(x: Tensor, dtype: torch.dtype, memory: Poisoned) -> Tensor:
    return memory.empty(x.shape, dtype=dtype).copy_(x)


def gradient_sizes(leaves: list[Tensor], head_dim: int, eps: float) -> list[float]:
    """Usual norms of what passes through attention's numerator and through its denominator, summed. A gradient is the
    difference of the two (of one token's query it is zero) and, by chance, may be small itself; rounding is relative to
    what is subtracted. Usual: root mean square over eight random gradients of the result."""

    query, key, value = leaves

    def norms(constant: str) -> Tensor:
        result = attention(query, key, value, head_dim, eps, constant)
        drawn = [
            torch.autograd.grad(result, leaves, torch.randn_like(result), True, allow_unused=True) for _ in "12345678"
        ]
        return (
            torch.tensor([[0.0 if g is None else float(g.norm()) for g in one] for one in drawn])
            .square()
            .mean(0)
            .sqrt()
        )

    return (norms("numerator") + norms("denominator")).tolist()


def errors(
    module: ModuleType,
    exact: Callable[..., Tensor],
    given: list[Tensor],
    *more: Any,
    sizes: Callable[..., list[float]] | None = None,
) -> dict[str, float]:
    """L2 error of the result and of each gradient, relative to the exact one or to `sizes(leaves, *more)`; a
    gradient that is small compared with the others is compared with a tenth of the largest."""
    memory = Poisoned()
    given = [poisoned(x, x.dtype, memory) for x in given]
    leaves = [x.double().requires_grad_() for x in given]
    result = exact(*leaves, *more)
    gradient = poisoned(torch.randn(result.shape), given[0].dtype, memory)
    result.backward(gradient.double())
    expected = [result.detach(), *(leaf.grad for leaf in leaves)]
    norms = [float(e.norm()) for e in expected]  # type: ignore[union-attr]
    if sizes is not None:
        norms[1:] = sizes(leaves, *more)
    module.torch = _Torch(memory)  # type: ignore[attr-defined]
    actual = run(module, gradient, given, *more, memory=memory)
    assert [a.dtype for a in actual] == [given[0].dtype] * 4
    memory.check()
    floor = 0.1 * max(norms[1:])
    return {
        name: float((a.double() - e).norm()) / max(norm, floor)  # type: ignore[operator]
        for name, a, e, norm in zip(("result", "first", "second", "third"), actual, expected, norms, strict=True)
    }


def run(module: ModuleType, gradient: Tensor, given: list[Tensor], *more: Any, memory: Poisoned) -> list[Tensor]:
    """The result and the gradients. Of attention: of inputs side by side, whose gradients are side by side, too, and
    a state that the forward pass leaves to the backward pass."""
    if module is not linear_attention_triton:
        return [module.forward(*given, *more), *module.backward(gradient, *given, *more)]
    whole = poisoned(torch.cat(given, dim=2), given[0].dtype, memory)
    query, key, value = whole.chunk(3, dim=2)
    value = given[2] if query.shape[1] % 2 else value  # the norms of SANA-1.5 leave the inputs apart
    result, state = module.forward(query, key, value, *more)
    of_parts = memory.empty(whole.shape, dtype=whole.dtype).chunk(3, dim=2)
    module.backward(gradient, state, query, key, value, *of_parts, *more)
    return [result, *of_parts]


def cases(seed: int, more: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The shapes above, or three of each drawn by the seed."""
    if not more:
        return CONVOLUTIONS, ATTENTIONS
    draw = random.Random(seed)
    convolutions = [
        (draw.randint(1, 3), draw.randint(3, 11), draw.randint(1, 11), 2 * draw.randint(1, 200)) for _ in "123"
    ]
    attentions = [(draw.randint(1, 3), draw.randint(5, 1100), draw.randint(1, 4), draw.randint(1, 40)) for _ in "123"]
    return {str(shape): shape for shape in convolutions}, {str(shape): shape for shape in attentions}


def main(seed: int, more: bool) -> None:
    torch.manual_seed(seed)
    found = {}
    convolutions, attentions = cases(seed, more)
    for precision, dtype in DTYPES.items():
        for name, (batch, height, width, channels) in convolutions.items():
            if precision == "bf16" and width == 1:
                continue
            shapes = (batch, height, width, channels), (channels, 1, 3, 3), (channels,)
            given = [torch.randn(shape).to(dtype) for shape in shapes]
            found[f"convolution, {name}, {precision}"] = errors(gated_convolution_triton, convolution, given)
        for name, (batch, tokens, heads, head_dim) in attentions.items():
            given = [torch.randn(batch, tokens, heads * head_dim).to(dtype) for _ in range(3)]
            eps = 1e-15 if precision == "fp32" else 0.5
            found[f"attention, {name}, {precision}"] = errors(
                linear_attention_triton, attention, given, head_dim, eps, sizes=gradient_sizes
            )
    print(json.dumps(found))


if __name__ == "__main__":
    run_and_exit(lambda: main(int(sys.argv[1]), "--more" in sys.argv))
