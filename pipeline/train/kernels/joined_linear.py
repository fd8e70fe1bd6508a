"""Three matrix products of the same rows as one product: query, key and value of self attention.

Why: one matrix of Sana 1.6B leaves many of a GPU's processors idle in their last round; three at once leave fewer,
above all for the gradients of the weights. The gradient of the rows is one product instead of a sum of three.
Why the matrices are joined at each use: they stay three parameters, in checkpoints, under FSDP2 and for the optimizer.
Joining them moves 60 MB where the sums alone moved 150 (Sana 1.6B, 8 pictures of 1024 tokens).
Price: that copy, in the forward and in the backward pass, and memory for the joined matrices meanwhile.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from sana_pipe.train.kernels.backend import without_autocast


def joined_linear(x: Tensor, first: Tensor, second: Tensor, third: Tensor) -> Tensor:
    """The products of `x` with three matrices, side by side.

    Args:
        x: (.., I), any floating dtype. first, second, third: (O, I) each, cast to the dtype of `x`.

    Returns:
        (.., 3*O), contiguous, dtype of `x`.
    """
    return _operation(x, first, second, third)


@torch.library.custom_op("sana_pipe::joined_linear", mutates_args=())
def _operation(x: Tensor, first: Tensor, second: Tensor, third: Tensor) -> Tensor:
    with without_autocast(x.device):
        return F.linear(x, torch.cat([first, second, third]).to(x.dtype))


@torch.library.custom_op("sana_pipe::joined_linear_backward", mutates_args=())
def _gradients(
    gradient: Tensor, x: Tensor, first: Tensor, second: Tensor, third: Tensor, of_weights: bool = True
) -> tuple[Tensor, Tensor]:
    """Gradients of `x`, and of the joined matrices (3*O, I), empty if not wanted."""
    of_joined = first.new_empty(0)
    with without_autocast(x.device):
        of_x = gradient.matmul(torch.cat([first, second, third]).to(x.dtype))
        if of_weights:
            of_joined = (gradient.flatten(0, -2).t() @ x.flatten(0, -2)).to(first.dtype)
    return of_x, of_joined


@_operation.register_fake
def _(x: Tensor, first: Tensor, second: Tensor, third: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], 3 * first.shape[0])


@_gradients.register_fake
def _(
    gradient: Tensor, x: Tensor, first: Tensor, second: Tensor, third: Tensor, of_weights: bool = True
) -> tuple[Tensor, Tensor]:
    joined = (3 * first.shape[0], first.shape[1]) if of_weights else (0,)
    return x.new_empty(x.shape), first.new_empty(joined)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    of_weights = any(ctx.needs_input_grad[1:])
    of_x, of_joined = _gradients(gradient, *ctx.saved_tensors, of_weights)
    return of_x, *(of_joined.chunk(3) if of_weights else (None, None, None))


_operation.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.sana_pipe.joined_linear)
def _forward_flops(x: tuple[int, ...], first: tuple[int, ...], *args: Any, **kwargs: Any) -> int:
    return 3 * 2 * math.prod(x) * first[0]


@register_flop_formula(torch.ops.sana_pipe.joined_linear_backward)
def _backward_flops(
    gradient: Any,
    x: tuple[int, ...],
    first: tuple[int, ...],
    second: Any,
    third: Any,
    of_weights: bool = True,
    **kwargs: Any,
) -> int:
    return (1 + of_weights) * _forward_flops(x, first)
