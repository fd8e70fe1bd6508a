"""Triton kernels of `kernels.linear_attention`.

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
def _read_state(state, count, lane, dim):
    """The sum of a head's parts: (WIDE, WIDE) by key and value, (WIDE,) by key."""
    inside = (lane < dim)[:, None] & (lane < dim)[None, :]
    matrix = tl.load(state + lane[:, None] * dim + lane[None, :], mask=inside, other=0.0)
    vector = tl.load(state + dim * dim + lane, mask=lane < dim, other=0.0)
    for _ in range(1, count):
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
def _state_place(dim, count):
    """Offset of this program's head in a state of so many parts."""
    head = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    return head * count * (dim + 1) * dim


@triton.jit
def _part_place(dim):
    """Offset of this program's part."""
    return _state_place(dim, tl.num_programs(2)) + tl.program_id(2) * (dim + 1) * dim


@triton.jit(do_not_specialize=["tokens"])
def _moments(key, value, parts, key_pitch, value_pitch, tokens, dim, EXACT: tl.constexpr, SPAN: tl.constexpr,
             TILE: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """One part of the state."""
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
    _write_state(parts + _part_place(dim), matrix, vector, lane, dim)


@triton.jit(do_not_specialize=["tokens", "count"])
def _query_forward(query, parts, state, out, query_pitch, pitch, count, tokens, dim, eps, SPAN: tl.constexpr,
                   TILE: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """The result; the first program of a head also writes the sum of the state's parts, if there are several."""
    query += _place(tokens, query_pitch, dim)
    out += _place(tokens, pitch, dim)
    lane = tl.arange(0, WIDE)
    matrix, vector = _read_state(parts + _state_place(dim, count), count, lane, dim)
    if (tl.program_id(2) == 0) & (count > 1):
        _write_state(state + _state_place(dim, 1), matrix, vector, lane, dim)
    for tile in range(0, tl.minimum(SPAN, tokens - tl.program_id(2) * SPAN), TILE):
        token = tl.program_id(2) * SPAN + tile + tl.arange(0, TILE)
        q = tl.maximum(_load(query, token, tokens, query_pitch, lane, dim), 0.0)
        scale = tl.sum(q * vector[None, :], axis=1) + eps
        x = tl.dot(q, matrix, input_precision="tf32x3") / scale[:, None]
        _store(out, x, token, tokens, pitch, lane, dim)


@triton.jit(do_not_specialize=["tokens", "count"])
def _query_backward(gradient, query, state, of_query, of_parts, pitch, query_pitch, of_query_pitch, count, tokens, dim,
                    eps, SPAN: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Gradient of the queries, and one part of the state's."""
    gradient += _place(tokens, pitch, dim)
    query += _place(tokens, query_pitch, dim)
    of_query += _place(tokens, of_query_pitch, dim)
    lane = tl.arange(0, WIDE)
    of_matrix, of_vector = tl.zeros((WIDE, WIDE), tl.float32), tl.zeros((WIDE,), tl.float32)
    for tile in range(0, tl.minimum(SPAN, tokens - tl.program_id(2) * SPAN), TILE):
        token = tl.program_id(2) * SPAN + tile + tl.arange(0, TILE)
        q = tl.maximum(_load(query, token, tokens, query_pitch, lane, dim), 0.0)
        g = _load(gradient, token, tokens, pitch, lane, dim)
        # read twice for each tile: in registers throughout, its split parts would spill; with a constant `count` the
        # compiler would read it once
        matrix, vector = _read_state(state + _state_place(dim, count), count, lane, dim)
        scale = tl.sum(q * vector[None, :], axis=1) + eps
        g = g / scale[:, None]
        product = tl.dot(q, matrix, input_precision="tf32x3")
        of_scale = -tl.sum(g * product, axis=1) / scale
        matrix, vector = _read_state(state + _state_place(dim, count), count, lane, dim)
        x = tl.dot(g, tl.trans(matrix), input_precision="tf32x3") + of_scale[:, None] * vector[None, :]
        _store(of_query, tl.where(q > 0, x, 0.0), token, tokens, of_query_pitch, lane, dim)
        of_matrix += tl.dot(tl.trans(q), g, input_precision="tf32x3")
        of_vector += tl.sum(q * of_scale[:, None], axis=0)
    _write_state(of_parts + _part_place(dim), of_matrix, of_vector, lane, dim)


@triton.jit(do_not_specialize=["tokens", "count"])
def _key_value_backward(key, value, of_parts, of_key, of_value, key_pitch, value_pitch, of_key_pitch, of_value_pitch,
                        count, tokens, dim, SPAN: tl.constexpr, TILE: tl.constexpr,
                        WIDE: tl.constexpr):  # fmt: skip
    key += _place(tokens, key_pitch, dim)
    value += _place(tokens, value_pitch, dim)
    of_key += _place(tokens, of_key_pitch, dim)
    of_value += _place(tokens, of_value_pitch, dim)
    lane = tl.arange(0, WIDE)
    matrix, vector = _read_state(of_parts + _state_place(dim, count), count, lane, dim)
    for tile in range(0, tl.minimum(SPAN, tokens - tl.program_id(2) * SPAN), TILE):
        token = tl.program_id(2) * SPAN + tile + tl.arange(0, TILE)
        k = tl.maximum(_load(key, token, tokens, key_pitch, lane, dim), 0.0)
        v = _load(value, token, tokens, value_pitch, lane, dim)
        x = tl.dot(v, tl.trans(matrix), input_precision="tf32x3") + vector[None, :]
        _store(of_key, tl.where(k > 0, x, 0.0), token, tokens, of_key_pitch, lane, dim)
        _store(of_value, tl.dot(k, matrix, input_precision="tf32x3"), token, tokens, of_value_pitch, lane, dim)


def constants(head_dim: int) -> dict[str, int]:
    """Return the constants of every kernel for heads of this width."""
    wide = max(16, triton.next_power_of_2(head_dim))
    return {"SPAN": SPAN, "TILE": TILE, "WIDE": wide, "num_warps": 4 if wide <= 64 else 8}


def _exact(key: Tensor, value: Tensor) -> str:
    return "tf32" if key.dtype == value.dtype == torch.bfloat16 else "tf32x3"


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """`x` (B, N, width), or a copy, and the distance between its rows: the kernels take a part of wider rows."""
    if x.stride(2) != 1 or x.stride(0) != x.shape[1] * x.stride(1):
        x = x.contiguous()
    return x, x.stride(1)


def _grid(x: Tensor, head_dim: int) -> tuple[int, int, int]:
    return x.shape[2] // head_dim, x.shape[0], triton.cdiv(x.shape[1], SPAN)


def _empty_state(x: Tensor, head_dim: int, *parts: int) -> Tensor:
    shape = x.shape[0], x.shape[2] // head_dim, *parts, head_dim + 1, head_dim
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def forward(query: Tensor, key: Tensor, value: Tensor, head_dim: int, eps: float) -> tuple[Tensor, Tensor]:
    """Compute `linear_attention` and the state, for tensors that Triton can reach."""
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    state, grid = _empty_state(query, head_dim), _grid(query, head_dim)
    if not out.numel():
        return out, state.zero_()
    parts = state if grid[2] == 1 else _empty_state(query, head_dim, grid[2])
    given, sizes = constants(head_dim), (query.shape[1], head_dim)
    (query, query_pitch), (key, key_pitch), (value, value_pitch) = _rows(query), _rows(key), _rows(value)
    _moments[grid](key, value, parts, key_pitch, value_pitch, *sizes, EXACT=_exact(key, value), **given)
    _query_forward[grid](query, parts, state, out, query_pitch, out.shape[2], grid[2], *sizes, eps, **given)
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
    if query.numel():
        parts = _query_gradients(gradient, state, query, of_query, head_dim, eps)
        _key_value_gradients(parts, key, value, of_key, of_value, head_dim)


def _query_gradients(
    gradient: Tensor, state: Tensor, query: Tensor, of_query: Tensor, head_dim: int, eps: float
) -> Tensor:
    """Write the queries' gradient. Returns the parts of the state's."""
    grid, small = _grid(query, head_dim), constants(head_dim) | {"TILE": SMALL_TILE}
    parts = _empty_state(query, head_dim, grid[2])
    (query, query_pitch), (gradient, pitch) = _rows(query), _rows(gradient)
    pitches, sizes = (pitch, query_pitch, of_query.stride(1)), (query.shape[1], head_dim)
    _query_backward[grid](gradient, query, state, of_query, parts, *pitches, 1, *sizes, eps, **small)
    return parts


def _key_value_gradients(
    parts: Tensor, key: Tensor, value: Tensor, of_key: Tensor, of_value: Tensor, head_dim: int
) -> None:
    """parts: of the state's gradient."""
    (key, key_pitch), (value, value_pitch) = _rows(key), _rows(value)
    pitches, sizes = (key_pitch, value_pitch, of_key.stride(1), of_value.stride(1)), (key.shape[1], head_dim)
    given = parts, of_key, of_value, *pitches, parts.shape[2], *sizes
    _key_value_backward[_grid(key, head_dim)](key, value, *given, **constants(head_dim))
