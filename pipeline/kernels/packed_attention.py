"""Softmax attention of each sample's queries over the rows of its caption, captions concatenated without padding.

On a GPU one kernel of torch (`torch.nn.attention.varlen`, bf16 or fp16). Elsewhere the slow reference, one product per
sample. A custom op: it reads caption offsets on the host, which a compiled graph cannot.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.utils.flop_counter import register_flop_formula

from pipeline.kernels.backend import without_autocast


class PackedRows(NamedTuple):
    """Positions of captions that are concatenated without padding.

    captions: (B + 1,) int32, the first row of each and the end of the last. images: (B + 1,) int32, the same for the
    image tokens. longest: upper bound on the rows of a caption.
    """

    captions: Tensor
    images: Tensor
    longest: int


def packed_attention(query: Tensor, key: Tensor, value: Tensor, where: PackedRows) -> Tensor:
    """Softmax attention of each sample's queries over the rows of its caption.

    Args:
        query: (B, N, heads, head_dim). key, value: (T, heads, head_dim). Every sample has at least one row.

    Returns:
        (B, N, heads, head_dim).
    """
    if query.device.type == "cuda":
        count = query.shape[1]
        out = varlen_attn(query.flatten(0, 1), key, value, where.images, where.captions, count, where.longest)
        assert isinstance(out, Tensor)
        return out.unflatten(0, (-1, count))
    return _operation(query, key, value, where.captions)


@torch.library.custom_op("sana_pipe::packed_attention", mutates_args=())
def _operation(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor) -> Tensor:
    with without_autocast(query.device):
        parts = [F.scaled_dot_product_attention(*sample) for sample in _samples(bounds, query, key, value)]
        return torch.cat(parts).transpose(1, 2).contiguous()


@torch.library.custom_op("sana_pipe::packed_attention_backward", mutates_args=())
def _gradients(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    full = torch.promote_types(query.dtype, torch.float32)
    results = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    with without_autocast(query.device):
        outputs = zip(_samples(bounds, gradient, key, value), _samples(bounds, *results), strict=True)
        for sample, ((g, _, _), (of_q, of_k, of_v)) in zip(_samples(bounds, query, key, value), outputs, strict=True):
            q, k, v, g = (x.to(full) for x in (*sample, g))
            scale = q.shape[-1] ** -0.5
            weights = torch.softmax(q @ k.transpose(2, 3) * scale, dim=-1)
            of_v.copy_(weights.transpose(2, 3) @ g)
            of_weights = g @ v.transpose(2, 3)
            of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale
            of_q.copy_(of_scores @ k)
            of_k.copy_(of_scores.transpose(2, 3) @ q)
    return results


def _samples(bounds: Tensor, queries: Tensor, keys: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Views of one sample after the other, (1, heads, rows, head_dim)."""
    q, k, v = queries.transpose(1, 2), keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    for i, (first, end) in enumerate(itertools.pairwise(bounds.tolist())):
        yield q[i : i + 1], k[:, :, first:end], v[:, :, first:end]


@_operation.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor) -> Tensor:
    return query.new_empty(query.shape)


@_gradients.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return *_gradients(gradient, *ctx.saved_tensors), None


_operation.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.sana_pipe.packed_attention)
def _forward_flops(query: tuple[int, ...], key: tuple[int, ...], *args: Any, **kwargs: Any) -> int:
    return 4 * query[1] * math.prod(key)


@register_flop_formula(torch.ops.sana_pipe.packed_attention_backward)
def _backward_flops(
    gradient: tuple[int, ...], query: tuple[int, ...], key: tuple[int, ...], *args: Any, **kwargs: Any
) -> int:
    return 2 * _forward_flops(query, key)
