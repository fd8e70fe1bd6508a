"""Depthwise 3x3 convolution of SiLU(u) with bias, then value * SiLU(gate), channels last; forward and backward.

Why one operation: its parts are limited by memory. Fused: traffic of 7.5 token matrices of Sana forward (5 widths in,
2.5 out); separate torch operations, in the layout of torch's convolution: 45. Only `u` is saved.
Price: the backward pass computes the convolution again.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from sana_pipe.train.kernels.backend import SCRATCH, kernels, without_autocast

ROWS = 4
"""Rows of a picture that a program of the kernels has."""


def gated_convolution(u: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """value * SiLU(gate), where value i and gate i are channels 2i and 2i + 1 of the depthwise convolution of SiLU(u)
    with padding 1.

    Args:
        u: (B, height, width, 2H), any floating dtype.
        weight: (2H, 1, 3, 3). bias: (2H,).

    Returns:
        (B, height, width, H), contiguous, dtype of `u`.
    """
    return _operation(u, weight, bias)


@torch.library.custom_op("sana_pipe::gated_convolution", mutates_args=())
def _operation(u: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    module = kernels("gated_convolution", u, weight, bias)
    with torch.cuda.device_of(u):  # Triton launches on the current GPU
        return (module.forward if module else forward)(u, weight, bias)


@torch.library.custom_op("sana_pipe::gated_convolution_backward", mutates_args=())
def _gradients(
    gradient: Tensor, u: Tensor, weight: Tensor, bias: Tensor, of_weights: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    module = kernels("gated_convolution", gradient, u, weight, bias)
    with torch.cuda.device_of(u):
        return (module.backward if module else backward)(gradient, u, weight, bias, of_weights)


@_operation.register_fake
def _(u: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return u.new_empty(*u.shape[:3], u.shape[3] // 2)


@_gradients.register_fake
def _(
    gradient: Tensor, u: Tensor, weight: Tensor, bias: Tensor, of_weights: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    of_weight, of_bias = (x.new_empty(x.shape if of_weights else 0) for x in (weight, bias))
    return u.new_empty(u.shape), of_weight, of_bias


def _scratch(gradient: Tensor, u: Tensor, weight: Tensor, bias: Tensor, of_weights: bool = True) -> tuple[Tensor, ...]:
    """The gradient of the convolution, and each program's part of those of weight and bias."""
    batch, height, _, channels = u.shape
    return u.new_empty(u.shape), u.new_empty(batch * -(-height // ROWS), 10, channels, dtype=torch.float32)


SCRATCH["gated_convolution_backward"] = _scratch


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    of_weights = any(ctx.needs_input_grad[1:])
    of_u, of_weight, of_bias = _gradients(gradient, *ctx.saved_tensors, of_weights)
    return of_u, *((of_weight, of_bias) if of_weights else (None, None))


_operation.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.sana_pipe.gated_convolution)
def _forward_flops(u: tuple[int, ...], *args: Any, **kwargs: Any) -> int:
    return 2 * 9 * math.prod(u)


@register_flop_formula(torch.ops.sana_pipe.gated_convolution_backward)
def _backward_flops(gradient: tuple[int, ...], *args: Any, **kwargs: Any) -> int:
    """Count the operations of both gradients. The convolution that is repeated does not count as the model's work."""
    return 2 * 2 * 9 * 2 * math.prod(gradient)


# ------------------------------------------------------------------------------------------------------- reference


def forward(u: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute `gated_convolution` in the dtype of `u`."""
    with without_autocast(u.device):
        value, gate = _pairs(_convolved(F.silu(u), weight, bias))
        return (value * F.silu(gate)).contiguous()


def backward(
    gradient: Tensor, u: Tensor, weight: Tensor, bias: Tensor, of_weights: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `u`, and of weight and bias (empty if not wanted), contiguous."""
    silu_backward = torch.ops.aten.silu_backward
    with without_autocast(u.device):
        active = F.silu(u)
        value, gate = _pairs(_convolved(active, weight, bias))
        inner = torch.stack([gradient * F.silu(gate), silu_backward(gradient * value, gate)], dim=-1).flatten(3)
        of_active, of_weight, of_bias = torch.ops.aten.convolution_backward(
            inner.permute(0, 3, 1, 2),
            active.permute(0, 3, 1, 2),
            weight.to(u.dtype),
            list(bias.shape),
            *([1, 1], [1, 1], [1, 1]),
            *(False, [0, 0], weight.shape[0], [True, of_weights, of_weights]),
        )
        of_u = silu_backward(of_active.permute(0, 2, 3, 1), u).contiguous()
        if not of_weights:
            return of_u, weight.new_empty(0), bias.new_empty(0)
        return of_u, of_weight.to(weight.dtype).contiguous(), of_bias.to(bias.dtype)


def _convolved(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    out = F.conv2d(x.permute(0, 3, 1, 2), weight.to(x.dtype), bias.to(x.dtype), padding=1, groups=weight.shape[0])
    return out.permute(0, 2, 3, 1)


def _pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    value, gate = x.unflatten(3, (-1, 2)).unbind(4)
    return value, gate
