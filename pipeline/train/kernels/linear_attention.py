"""ReLU linear attention, accumulated in float32; forward and backward.

Saves its inputs, in their dtype, and each head's state: (head_dim + 1) x head_dim values. Everything else that autograd
would save (float32 copies of the inputs in another layout, the product, its denominators) is recomputed: a small
product, which costs less than those copies. The Triton kernels read and write 11 token matrices in all, the
reference about 110.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from sana_pipe.train.kernels.backend import kernels, without_autocast


def linear_attention(query: Tensor, key: Tensor, value: Tensor, head_dim: int, eps: float = 1e-15) -> Tensor:
    """ReLU linear attention, accumulated in float32 whatever the inputs are and whether or not autocast is on.

    Args:
        query, key, value: (B, N, heads*head_dim), any floating dtype.

    Returns:
        (B, N, heads*head_dim), contiguous, in `value`'s dtype: relu(q) (relu(K)^T V) / (relu(q) sum relu(K) + eps). A
        position whose denominator is zero yields zero.
    """
    return _operation(query, key, value, head_dim, eps)[0]


def joined_linear_attention(joined: Tensor, head_dim: int, eps: float = 1e-15) -> Tensor:
    """`linear_attention` of query, key and value side by side (B, N, 3*heads*head_dim). So is their gradient, which
    then needs no copy."""
    return _operation(joined, None, None, head_dim, eps)[0]


@torch.library.custom_op("sana_pipe::linear_attention", mutates_args=())
def _operation(
    query: Tensor, key: Tensor | None, value: Tensor | None, head_dim: int, eps: float
) -> tuple[Tensor, Tensor]:
    """The result, and the state: (B, heads, head_dim + 1, head_dim) float32 for the backward pass. Reference and
    kernels arrange it differently. Without key and value, `query` has all three."""
    q, k, v = _three(query, key, value)
    module = kernels("linear_attention", q, k, v)
    with torch.cuda.device_of(query):  # Triton launches on the current GPU
        return (module.forward if module else forward)(q, k, v, head_dim, eps)


@torch.library.custom_op("sana_pipe::linear_attention_backward", mutates_args=())
def _gradients(
    gradient: Tensor, state: Tensor, query: Tensor, key: Tensor | None, value: Tensor | None, head_dim: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; side by side, and two empty tensors, where the inputs are so."""
    q, k, v = _three(query, key, value)
    module = kernels("linear_attention", gradient, q, k, v)
    first, second, third = (
        torch.empty((0,) if x is None else x.shape, dtype=query.dtype if x is None else x.dtype, device=query.device)
        for x in (query, key, value)
    )
    of_q, of_k, of_v = first.chunk(3, dim=2) if key is None else (first, second, third)
    with torch.cuda.device_of(query):
        (module.backward if module else backward)(gradient, state, q, k, v, of_q, of_k, of_v, head_dim, eps)
    return first, second, third


def _three(query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    if key is None or value is None:
        query, key, value = query.chunk(3, dim=2)
    return query, key, value


@_operation.register_fake
def _(query: Tensor, key: Tensor | None, value: Tensor | None, head_dim: int, eps: float) -> tuple[Tensor, Tensor]:
    batch, tokens, width = query.shape
    width = width // 3 if key is None else width
    out = (query if value is None else value).new_empty(batch, tokens, width)
    return out, query.new_empty(batch, width // head_dim, head_dim + 1, head_dim, dtype=torch.float32)


@_gradients.register_fake
def _(
    gradient: Tensor, state: Tensor, query: Tensor, key: Tensor | None, value: Tensor | None, head_dim: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(query.new_empty(0) if x is None else x.new_empty(x.shape) for x in (query, key, value))  # type: ignore[return-value]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.head_dim, ctx.eps = inputs
    ctx.save_for_backward(output[1], *tensors)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return None, None, None, None, None
    state, query, key, value = ctx.saved_tensors
    results = _gradients(gradient, state, query, key, value, ctx.head_dim, ctx.eps)
    return *(results if key is not None else (results[0], None, None)), None, None


_operation.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.sana_pipe.linear_attention)
def _forward_flops(query: tuple[int, ...], key: Any, value: Any, head_dim: int, *args: Any, **kwargs: Any) -> int:
    return 4 * math.prod(query) // (3 if key is None else 1) * (head_dim + 1)


@register_flop_formula(torch.ops.sana_pipe.linear_attention_backward)
def _backward_flops(gradient: Any, state: Any, *args: Any, **kwargs: Any) -> int:
    """Count the operations of the gradients. The product that is repeated does not count as the model's work."""
    return 2 * _forward_flops(*args)


# ------------------------------------------------------------------------------------------------------- reference


def forward(query: Tensor, key: Tensor, value: Tensor, head_dim: int, eps: float) -> tuple[Tensor, Tensor]:
    """Compute `linear_attention`, and the state [V, 1]^T relu(K)."""
    with without_autocast(query.device):
        q, k, v = _parts(query, key, value, head_dim)
        moments = torch.matmul(v.transpose(2, 3), k)
        out = torch.matmul(moments, q.transpose(2, 3))  # (B, h, d+1, N), as diffusers: equal bit for bit
        return _joined((out[:, :, :-1] / (out[:, :, -1:] + eps)).transpose(2, 3), value.dtype), moments


def backward(
    gradient: Tensor,
    moments: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    of_query: Tensor,
    of_key: Tensor,
    of_value: Tensor,
    head_dim: int,
    eps: float,
) -> None:
    """Write the gradients of query, key and value into the memory that is given for them."""
    with without_autocast(query.device):
        q, k, v = _parts(query, key, value, head_dim)
        out = torch.matmul(q, moments.transpose(2, 3))
        scale = out[..., -1:] + eps
        of_result = _by_head(gradient, head_dim)
        of_scale = -(of_result * (out[..., :-1] / scale / scale)).sum(-1, keepdim=True)
        of_out = torch.cat([of_result / scale, of_scale], dim=-1)  # (B, h, N, d+1)
        of_moments = torch.matmul(of_out.transpose(2, 3), q)
        relu = torch.ops.aten.threshold_backward
        of_query.copy_(relu(_joined(torch.matmul(of_out, moments), query.dtype), query, 0))
        of_key.copy_(relu(_joined(torch.matmul(v, of_moments), key.dtype), key, 0))
        of_value.copy_(_joined(torch.matmul(k, of_moments[:, :, :-1].transpose(2, 3)), value.dtype))


def _by_head(x: Tensor, head_dim: int) -> Tensor:
    """(B, N, heads*head_dim) of any dtype -> (B, heads, N, head_dim) float32, contiguous: one pass casts and moves."""
    heads = x.unflatten(2, (-1, head_dim)).transpose(1, 2)
    return heads.to(torch.float32, memory_format=torch.contiguous_format)


def _joined(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, heads, N, head_dim) -> (B, N, heads*head_dim) in `dtype`, contiguous: the inverse of `_by_head`."""
    return x.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format).flatten(2)


def _parts(query: Tensor, key: Tensor, value: Tensor, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """relu(q), relu(k) (B, h, N, d) and [v, 1] (B, h, N, d+1), float32; the ones carry the denominator."""
    ones = F.pad(value.unflatten(2, (-1, head_dim)), (0, 1), value=1.0).flatten(2)
    return _by_head(F.relu(query), head_dim), _by_head(F.relu(key), head_dim), _by_head(ones, head_dim + 1)
