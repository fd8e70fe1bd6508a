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
def _place(tokens, pitch, dim):
    """Offset of this program's head in (B, N, heads * dim), whose rows are `pitch` apart."""
    return tl.program_id(1).to(tl.int64) * tokens * pitch + tl.program_id(0) * dim


@triton.jit
def _state_places(dim):
    """Offsets of this program's head in the state, of the head's first part, and of this program's part."""
    head = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    size, spans = (dim + 1) * dim, tl.num_programs(2)
    return head * size, head * spans * size, (head * spans + tl.program_id(2)) * size


@triton.jit(do_not_specialize=["tokens"])
def _moments(key, value, parts, key_pitch, value_pitch, tokens, dim, EXACT: tl.constexpr, SPAN: tl.constexpr,
             TILE: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """One part of the state."""
    _, _, part = _state_places(dim)
    key += _place(tokens, key_pitch, dim)
    value += _place(tokens, value_pitch, dim)
    lane = tl.arange(0, WIDE)
    matrix, vector = tl.zeros((WIDE, WIDE), tl.float32), tl.zeros((WIDE,), tl.float32)
    for tile in range(0, tl.minimum(SPAN, tokens - tl.program_id(2) * SPAN), TILE):
        token = tl.program_id(2) * SPAN + tile + tl.arange(0, TILE)
        k = tl.maximum(_load(key, token, tokens, key_pitch, lane, dim), 0.0)
        v = _load(value, token, tokens, value_pitch, lane, dim)
        matrix += tl.dot(tl.trans(k), v, input_precision=EXACT)
        vector += tl.sum(k, axis=0)
    _write_state(parts + part, matrix, vector, lane, dim)


@triton.jit(do_not_specialize=["tokens"])
def _query_forward(query, parts, state, out, query_pitch, pitch, tokens, dim, eps, SPAN: tl.constexpr,
                   TILE: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """The result; the first program of a head also writes the sum of the state's parts, if there are several."""
    whole, first, _ = _state_places(dim)
    query += _place(tokens, query_pitch, dim)
    out += _place(tokens, pitch, dim)
    lane = tl.arange(0, WIDE)
    matrix, vector = _read_state(parts + first, tl.num_programs(2), lane, dim)
    if (tl.program_id(2) == 0) & (tl.num_programs(2) > 1):
        _write_state(state + whole, matrix, vector, lane, dim)
    for tile in range(0, tl.minimum(SPAN, tokens - tl.program_id(2) * SPAN), TILE):
        token = tl.program_id(2) * SPAN + tile + tl.arange(0, TILE)
        q = tl.maximum(_load(query, token, tokens, query_pitch, lane, dim), 0.0)
        scale = tl.sum(q * vector[None, :], axis=1) + eps
        x = tl.dot(q, matrix, input_precision="tf32x3") / scale[:, None]
        _store(out, x, token, tokens, pitch, lane, dim)


@triton.jit(do_not_specialize=["tokens"])
def _query_backward(gradient, query, state, of_query, of_state, pitch, query_pitch, of_query_pitch, tokens, dim, eps,
                    SPAN: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Gradient of the queries, and one part of the state's."""
    whole, _, part = _state_places(dim)
    gradient += _place(tokens, pitch, dim)
    query += _place(tokens, query_pitch, dim)
    of_query += _place(tokens, of_query_pitch, dim)
    lane = tl.arange(0, WIDE)
    of_matrix, of_vector = tl.zeros((WIDE, WIDE), tl.float32), tl.zeros((WIDE,), tl.float32)
    for tile in range(0, tl.minimum(SPAN, tokens - tl.program_id(2) * SPAN), TILE):
        token = tl.program_id(2) * SPAN + tile + tl.arange(0, TILE)
        q = tl.maximum(_load(query, token, tokens, query_pitch, lane, dim), 0.0)
        g = _load(gradient, token, tokens, pitch, lane, dim)
        # read for each tile: in registers throughout, its split parts would spill
        matrix, vector = _read_state(state + whole, 1, lane, dim)
        scale = tl.sum(q * vector[None, :], axis=1) + eps
        g = g / scale[:, None]
        product = tl.dot(q, matrix, input_precision="tf32x3")
        of_scale = -tl.sum(g * product, axis=1) / scale
        x = tl.dot(g, tl.trans(matrix), input_precision="tf32x3") + of_scale[:, None] * vector[None, :]
        _store(of_query, tl.where(q > 0, x, 0.0), token, tokens, of_query_pitch, lane, dim)
        of_matrix += tl.dot(tl.trans(q), g, input_precision="tf32x3")
        of_vector += tl.sum(q * of_scale[:, None], axis=0)
    _write_state(of_state + part, of_matrix, of_vector, lane, dim)


@triton.jit(do_not_specialize=["tokens"])
def _key_value_backward(key, value, of_state, of_key, of_value, key_pitch, value_pitch, of_key_pitch, of_value_pitch,
                        tokens, dim, SPAN: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    _, first, _ = _state_places(dim)
    key += _place(tokens, key_pitch, dim)
    value += _place(tokens, value_pitch, dim)
    of_key += _place(tokens, of_key_pitch, dim)
    of_value += _place(tokens, of_value_pitch, dim)
    lane = tl.arange(0, WIDE)
    matrix, vector = _read_state(of_state + first, tl.num_programs(2), lane, dim)
    for tile in range(0, tl.minimum(SPAN, tokens - tl.program_id(2) * SPAN), TILE):
        token = tl.program_id(2) * SPAN + tile + tl.arange(0, TILE)
        k = tl.maximum(_load(key, token, tokens, key_pitch, lane, dim), 0.0)
        v = _load(value, token, tokens, value_pitch, lane, dim)
        x = tl.dot(v, tl.trans(matrix), input_precision="tf32x3") + vector[None, :]
        _store(of_key, tl.where(k > 0, x, 0.0), token, tokens, of_key_pitch, lane, dim)
        _store(of_value, tl.dot(k, matrix, input_precision="tf32x3"), token, tokens, of_value_pitch, lane, dim)


def constants(head_dim: int) -> dict[str, int]:
    """Of every kernel, for heads of this width."""
    wide = max(16, triton.next_power_of_2(head_dim))
    return {"SPAN": SPAN, "TILE": TILE, "WIDE": wide, "num_warps": 4 if wide <= 64 else 8}


def _exact(key: Tensor, value: Tensor) -> str:
    return "tf32" if key.dtype == value.dtype == torch.bfloat16 else "tf32x3"


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """`x` (B, N, width), or a copy, and the distance between its rows: the kernels take a part of wider rows."""
    if x.stride(2) != 1 or x.stride(0) != x.shape[1] * x.stride(1):
        x = x.contiguous()
    return x, x.stride(1)


def forward(query: Tensor, key: Tensor, value: Tensor, head_dim: int, eps: float) -> tuple[Tensor, Tensor]:
    """As `linear_attention`, for tensors that Triton can reach; also the state."""
    batch, tokens, width = query.shape
    heads, spans = width // head_dim, triton.cdiv(tokens, SPAN)
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    state = torch.empty(batch, heads, head_dim + 1, head_dim, dtype=torch.float32, device=query.device)
    if not out.numel():
        return out, state.zero_()
    parts = state
    if spans > 1:
        parts = torch.empty(batch, heads, spans, head_dim + 1, head_dim, dtype=torch.float32, device=query.device)
    grid, given, sizes = (heads, batch, spans), constants(head_dim), (tokens, head_dim)
    (query, query_pitch), (key, key_pitch), (value, value_pitch) = _rows(query), _rows(key), _rows(value)
    _moments[grid](key, value, parts, key_pitch, value_pitch, *sizes, EXACT=_exact(key, value), **given)
    _query_forward[grid](query, parts, state, out, query_pitch, width, *sizes, eps, **given)
    return out, state


def backward(
    gradient: Tensor,
    state: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    of_query: Tensor,
    of_key: Tensor,
    of_value: Tensor,
    head_dim: int,
    eps: float,
) -> None:
    """Write the gradients of query, key and value into the memory that is given for them, row by row."""
    batch, tokens, width = query.shape
    if not query.numel():
        return
    heads, spans = width // head_dim, triton.cdiv(tokens, SPAN)
    of_state = torch.empty(batch, heads, spans, head_dim + 1, head_dim, dtype=torch.float32, device=query.device)
    grid, given, sizes = (heads, batch, spans), constants(head_dim), (tokens, head_dim)
    (query, query_pitch), (key, key_pitch), (value, value_pitch) = _rows(query), _rows(key), _rows(value)
    gradient, pitch = _rows(gradient)
    small, pitches = given | {"TILE": SMALL_TILE}, (pitch, query_pitch, of_query.stride(1))
    _query_backward[grid](gradient, query, state, of_query, of_state, *pitches, *sizes, eps, **small)
    pitches_of_both = key_pitch, value_pitch, of_key.stride(1), of_value.stride(1)
    _key_value_backward[grid](key, value, of_state, of_key, of_value, *pitches_of_both, *sizes, **given)
