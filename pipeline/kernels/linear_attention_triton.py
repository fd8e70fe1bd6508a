"""Triton kernels of `pipeline.kernels.linear_attention`.

A program has one head of one sample and at most SPAN tokens, and keeps the head's state, relu(K)^T V and the sum of
relu(K), in float32. Programs of one head write their parts of the state, and the readers add them in a fixed order:
no atomics, equal bits in equal runs. Loads and stores are in the tensors' dtype, sums in float32; the factors of the
products are split into two tf32 parts (tf32x3), except where bf16 values are exact in tf32. A kernel is compiled once
for all numbers of tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SPAN = 512
TILE = 64
SMALL_TILE = 16
"""Tokens that a program has, and those that it takes at once; fewer where four products would exceed the registers."""


@triton.jit
def _load(source, token, tokens, pitch, lane, dim):
    """(TILE, WIDE) of one head, float32; zero beyond the tokens and the head's width."""
    inside = (token < tokens)[:, None] & (lane < dim)[None, :]
    return tl.load(source + token[:, None].to(tl.int64) * pitch + lane[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store(target, x, token, tokens, pitch, lane, dim):
    inside = (token < tokens)[:, None] & (lane < dim)[None, :]
    place = target + token[:, None].to(tl.int64) * pitch + lane[None, :]
    tl.store(place, x.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _read_state(state, spans, lane, dim):
    """The sum of a head's parts: (WIDE, WIDE) by key and value, (WIDE,) by key."""
    inside = (lane < dim)[:, None] & (lane < dim)[None, :]
    matrix = tl.load(state + lane[:, None] * dim + lane[None, :], mask=inside, other=0.0)
    vector = tl.load(state + dim * dim + lane, mask=lane < dim, other=0.0)
    for _ in range(1, spans):
        state += (dim + 1) * dim
        matrix += tl.load(state + lane[:, None] * dim + lane[None, :], mask=inside, other=0.0)
        vector += tl.load(state + dim * dim + lane, mask=lane < dim, other=0.0)
    return matrix, vector


@triton.jit
def _write_state(state, matrix, vector, lane, dim):
    inside = (lane < dim)[:, None] & (lane < dim)[None, :]
    tl.store(state + lane[:, None] * dim + lane[None, :], matrix, mask=inside)
    tl.store(state + dim * dim + lane, vector, mask=lane < dim)


@triton.jit
def _head(tokens, dim):
    """Offsets of this program: its head in (B, N, heads * dim), its head's first part and its part in the state."""
    head, sample, span = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    heads, spans = tl.num_programs(0), tl.num_programs(2)
    first = (sample * heads + head) * spans
    return sample * tokens * heads * dim + head * dim, first * (dim + 1) * dim, (first + span) * (dim + 1) * dim


@triton.jit(do_not_specialize=["tokens"])
def _moments(key, value, state, tokens, dim, EXACT: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr,
             WIDE: tl.constexpr):  # fmt: skip
    """One part of the state."""
    start, _, part = _head(tokens, dim)
    pitch, lane = tl.num_programs(0) * dim, tl.arange(0, WIDE)
    matrix, vector = tl.zeros((WIDE, WIDE), tl.float32), tl.zeros((WIDE,), tl.float32)
    for tile in range(0, tl.minimum(SPAN, tokens - tl.program_id(2) * SPAN), TILE):
        token = tl.program_id(2) * SPAN + tile + tl.arange(0, TILE)
        k = tl.maximum(_load(key + start, token, tokens, pitch, lane, dim), 0.0)
        v = _load(value + start, token, tokens, pitch, lane, dim)
        matrix += tl.dot(tl.trans(k), v, input_precision=EXACT)
        vector += tl.sum(k, axis=0)
    _write_state(state + part, matrix, vector, lane, dim)


@triton.jit(do_not_specialize=["tokens"])
def _query_forward(query, state, out, tokens, dim, eps, SPAN: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr):
    start, first, _ = _head(tokens, dim)
    pitch, lane = tl.num_programs(0) * dim, tl.arange(0, WIDE)
    matrix, vector = _read_state(state + first, tl.num_programs(2), lane, dim)
    for tile in range(0, tl.minimum(SPAN, tokens - tl.program_id(2) * SPAN), TILE):
        token = tl.program_id(2) * SPAN + tile + tl.arange(0, TILE)
        q = tl.maximum(_load(query + start, token, tokens, pitch, lane, dim), 0.0)
        scale = tl.sum(q * vector[None, :], axis=1) + eps
        x = tl.dot(q, matrix, input_precision="tf32x3") / scale[:, None]
        _store(out + start, x, token, tokens, pitch, lane, dim)


@triton.jit(do_not_specialize=["tokens"])
def _query_backward(gradient, query, state, of_query, of_state, tokens, dim, eps, SPAN: tl.constexpr,
                    TILE: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Gradient of the queries, and one part of the state's."""
    start, first, part = _head(tokens, dim)
    pitch, lane = tl.num_programs(0) * dim, tl.arange(0, WIDE)
    of_matrix, of_vector = tl.zeros((WIDE, WIDE), tl.float32), tl.zeros((WIDE,), tl.float32)
    for tile in range(0, tl.minimum(SPAN, tokens - tl.program_id(2) * SPAN), TILE):
        token = tl.program_id(2) * SPAN + tile + tl.arange(0, TILE)
        q = tl.maximum(_load(query + start, token, tokens, pitch, lane, dim), 0.0)
        g = _load(gradient + start, token, tokens, pitch, lane, dim)
        # read for each tile: in registers throughout, its split parts would spill
        matrix, vector = _read_state(state + first, tl.num_programs(2), lane, dim)
        scale = tl.sum(q * vector[None, :], axis=1) + eps
        g = g / scale[:, None]
        product = tl.dot(q, matrix, input_precision="tf32x3")
        of_scale = -tl.sum(g * product, axis=1) / scale
        x = tl.dot(g, tl.trans(matrix), input_precision="tf32x3") + of_scale[:, None] * vector[None, :]
        _store(of_query + start, tl.where(q > 0, x, 0.0), token, tokens, pitch, lane, dim)
        of_matrix += tl.dot(tl.trans(q), g, input_precision="tf32x3")
        of_vector += tl.sum(q * of_scale[:, None], axis=0)
    _write_state(of_state + part, of_matrix, of_vector, lane, dim)


@triton.jit(do_not_specialize=["tokens"])
def _key_value_backward(key, value, of_state, of_key, of_value, tokens, dim, SPAN: tl.constexpr, TILE: tl.constexpr,
                        WIDE: tl.constexpr):  # fmt: skip
    start, first, _ = _head(tokens, dim)
    pitch, lane = tl.num_programs(0) * dim, tl.arange(0, WIDE)
    matrix, vector = _read_state(of_state + first, tl.num_programs(2), lane, dim)
    for tile in range(0, tl.minimum(SPAN, tokens - tl.program_id(2) * SPAN), TILE):
        token = tl.program_id(2) * SPAN + tile + tl.arange(0, TILE)
        k = tl.maximum(_load(key + start, token, tokens, pitch, lane, dim), 0.0)
        v = _load(value + start, token, tokens, pitch, lane, dim)
        x = tl.dot(v, tl.trans(matrix), input_precision="tf32x3") + vector[None, :]
        _store(of_key + start, tl.where(k > 0, x, 0.0), token, tokens, pitch, lane, dim)
        _store(of_value + start, tl.dot(k, matrix, input_precision="tf32x3"), token, tokens, pitch, lane, dim)


def constants(head_dim: int) -> dict[str, int]:
    """Of every kernel, for heads of this width."""
    wide = max(16, triton.next_power_of_2(head_dim))
    return {"SPAN": SPAN, "TILE": TILE, "WIDE": wide, "num_warps": 4 if wide <= 64 else 8}


def _launch(query: Tensor, head_dim: int) -> tuple[tuple[int, int, int], Tensor]:
    """Grid, and memory for the parts of the state."""
    batch, tokens, width = query.shape
    grid = width // head_dim, batch, triton.cdiv(tokens, SPAN)
    shape = batch, grid[0], grid[2], head_dim + 1, head_dim
    return grid, torch.empty(*shape, dtype=torch.float32, device=query.device)


def _exact(key: Tensor, value: Tensor) -> str:
    return "tf32" if key.dtype == value.dtype == torch.bfloat16 else "tf32x3"


def forward(query: Tensor, key: Tensor, value: Tensor, head_dim: int, eps: float) -> Tensor:
    """As `linear_attention`, for tensors that Triton can reach."""
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    out = torch.empty_like(value)
    if out.numel():
        (grid, state), sizes, given = _launch(query, head_dim), (query.shape[1], head_dim), constants(head_dim)
        _moments[grid](key, value, state, *sizes, EXACT=_exact(key, value), **given)
        _query_forward[grid](query, state, out, *sizes, eps, **given)
    return out


def backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, head_dim: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    of_query, of_key, of_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    if query.numel():
        (grid, state), sizes, given = _launch(query, head_dim), (query.shape[1], head_dim), constants(head_dim)
        of_state = torch.empty_like(state)
        _moments[grid](key, value, state, *sizes, EXACT=_exact(key, value), **given)
        small = given | {"TILE": SMALL_TILE}
        _query_backward[grid](gradient.contiguous(), query, state, of_query, of_state, *sizes, eps, **small)
        _key_value_backward[grid](key, value, of_state, of_key, of_value, *sizes, **given)
    return of_query, of_key, of_value


def state(key: Tensor, value: Tensor, head_dim: int) -> Tensor:
    """As `pipeline.kernels.linear_attention.state`."""
    key, value = key.contiguous(), value.contiguous()
    (grid, parts), sizes = _launch(key, head_dim), (key.shape[1], head_dim)
    _moments[grid](key, value, parts, *sizes, EXACT=_exact(key, value), **constants(head_dim))
    return parts.sum(2)


def read(query: Tensor, state: Tensor, head_dim: int, eps: float) -> Tensor:
    """As `pipeline.kernels.linear_attention.read`."""
    query = query.contiguous()
    out, (grid, parts) = torch.empty_like(query), _launch(query, head_dim)
    _query_forward[grid](query, _as_parts(state, parts), out, query.shape[1], head_dim, eps, **constants(head_dim))
    return out


def state_backward(of_state: Tensor, key: Tensor, value: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Gradients of key and value."""
    key, value = key.contiguous(), value.contiguous()
    of_key, of_value = torch.empty_like(key), torch.empty_like(value)
    grid, parts = _launch(key, head_dim)
    given = _as_parts(of_state, parts), of_key, of_value, key.shape[1], head_dim
    _key_value_backward[grid](key, value, *given, **constants(head_dim))
    return of_key, of_value


def read_backward(gradient: Tensor, query: Tensor, state: Tensor, head_dim: int, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of query and state."""
    gradient, query = gradient.contiguous(), query.contiguous()
    of_query, (grid, parts) = torch.empty_like(query), _launch(query, head_dim)
    of_parts, small = torch.empty_like(parts), constants(head_dim) | {"TILE": SMALL_TILE}
    given = _as_parts(state, parts), of_query, of_parts, query.shape[1], head_dim, eps
    _query_backward[grid](gradient, query, *given, **small)
    return of_query, of_parts.sum(2)


def _as_parts(state: Tensor, parts: Tensor) -> Tensor:
    """`parts` (see `_launch`) with `state` as their sum: the kernels add up as many parts as a head has programs."""
    parts.zero_()[:, :, 0] = state
    return parts
