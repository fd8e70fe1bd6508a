"""Triton kernels of `kernels.gated_convolution`: depthwise 3x3, bias and gate in one pass, channels last.

A program has ROWS rows of one picture and a slice of channels, and walks along the columns with a window of three
columns of ROWS + 2 rows in registers. Each value is read, and its SiLU computed, (ROWS + 2) / ROWS times; a program per
tile would do both nine times. Arithmetic is float32 whatever the tensors are.
Gradients of weight and bias: each program writes its part, and a last kernel adds the parts in a fixed order, so equal
runs give equal bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sana_pipe.train.kernels.gated_convolution import ROWS

CONSTANTS = {"ROWS": ROWS, "BLOCK": 256, "num_warps": 4}
"""BLOCK: channels of a program, value and gate counted separately. `_column` is written for four rows."""

SUM_CONSTANTS = {"SUM_BLOCK": 128, "num_warps": 1}
"""The block of the kernel that adds up the parts; its programs are few, so narrow."""


@triton.jit
def _sigmoid(x):
    """Five instructions; tl.exp and a division have twelve, for subnormal numbers that 1 + exp(-x) never is."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return root * root


@triton.jit
def _silu(x):
    return x * _sigmoid(x)


@triton.jit
def _row(source, top, column, height, width, pitch, channel, inside, ROW: tl.constexpr):
    """Row `top + ROW` of one column, float32; zero outside of the picture."""
    row = top + ROW
    there = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    place = (row.to(tl.int64) * width + column) * pitch
    return tl.load(source + place + channel, mask=inside & there, other=0.0).to(tl.float32)


@triton.jit
def _column(source, top, column, height, width, pitch, channel, inside, SILU: tl.constexpr):
    """Rows top - 1 .. top + 4 of one column: six vectors of channels."""
    a = _row(source, top, column, height, width, pitch, channel, inside, -1)
    b = _row(source, top, column, height, width, pitch, channel, inside, 0)
    c = _row(source, top, column, height, width, pitch, channel, inside, 1)
    d = _row(source, top, column, height, width, pitch, channel, inside, 2)
    e = _row(source, top, column, height, width, pitch, channel, inside, 3)
    f = _row(source, top, column, height, width, pitch, channel, inside, 4)
    if SILU:
        a, b, c, d, e, f = _silu(a), _silu(b), _silu(c), _silu(d), _silu(e), _silu(f)
    return a, b, c, d, e, f


@triton.jit
def _taps(weight, channel, inside, FLIP: tl.constexpr):
    """The nine taps of each channel, row by row; FLIP: turned by 180 degrees, as the transposed convolution needs."""
    start: tl.constexpr = 8 if FLIP else 0
    step: tl.constexpr = -1 if FLIP else 1
    place = weight + channel * 9 + start
    return (
        tl.load(place, mask=inside, other=0.0).to(tl.float32),
        tl.load(place + step, mask=inside, other=0.0).to(tl.float32),
        tl.load(place + 2 * step, mask=inside, other=0.0).to(tl.float32),
        tl.load(place + 3 * step, mask=inside, other=0.0).to(tl.float32),
        tl.load(place + 4 * step, mask=inside, other=0.0).to(tl.float32),
        tl.load(place + 5 * step, mask=inside, other=0.0).to(tl.float32),
        tl.load(place + 6 * step, mask=inside, other=0.0).to(tl.float32),
        tl.load(place + 7 * step, mask=inside, other=0.0).to(tl.float32),
        tl.load(place + 8 * step, mask=inside, other=0.0).to(tl.float32),
    )


@triton.jit
def _convolve(left, middle, right, taps, bias, ROW: tl.constexpr):
    """3x3 at row `top + ROW`, centred on the middle column."""
    out = bias
    for i in tl.static_range(3):
        out += taps[3 * i] * left[ROW + i]
        out += taps[3 * i + 1] * middle[ROW + i]
        out += taps[3 * i + 2] * right[ROW + i]
    return out


@triton.jit
def _gate_forward(u, weight, bias, out, height, width, channels, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    result = tl.program_id(0) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
    inside, is_result = channel < channels, result < channels // 2
    top = tl.program_id(1) * ROWS
    image = tl.program_id(2).to(tl.int64) * width
    u += image * height * channels
    out += image * height * (channels // 2)
    taps = _taps(weight, channel, inside, False)
    start = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    left = _column(u, top, -1, height, width, channels, channel, inside, True)
    middle = _column(u, top, 0, height, width, channels, channel, inside, True)
    for column in range(width):
        right = _column(u, top, column + 1, height, width, channels, channel, inside, True)
        for r in tl.static_range(ROWS):
            value, gate = tl.split(tl.reshape(_convolve(left, middle, right, taps, start, r), (BLOCK // 2, 2)))
            place = ((top + r).to(tl.int64) * width + column) * (channels // 2) + result
            tl.store(out + place, (value * _silu(gate)).to(out.dtype.element_ty), mask=is_result & (top + r < height))
        left = middle
        middle = right


@triton.jit
def _gate_backward(gradient, u, weight, bias, inner, parts, height, width, channels,
                   ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Compute the gradients of `inner` (the convolution's result), weight and bias from the output gradient."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    result = tl.program_id(0) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
    inside, is_result = channel < channels, result < channels // 2
    top = tl.program_id(1) * ROWS
    image = tl.program_id(2).to(tl.int64) * width
    u += image * height * channels
    inner += image * height * channels
    gradient += image * height * (channels // 2)
    taps = _taps(weight, channel, inside, False)
    start = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    left = _column(u, top, -1, height, width, channels, channel, inside, True)
    middle = _column(u, top, 0, height, width, channels, channel, inside, True)
    zero = tl.zeros((BLOCK,), tl.float32)
    a, b, c, d, e, f, g, h, i = zero, zero, zero, zero, zero, zero, zero, zero, zero
    total = zero
    for column in range(width):
        right = _column(u, top, column + 1, height, width, channels, channel, inside, True)
        for r in tl.static_range(ROWS):
            value, gate = tl.split(tl.reshape(_convolve(left, middle, right, taps, start, r), (BLOCK // 2, 2)))
            place = (top + r).to(tl.int64) * width + column
            below = top + r < height
            of_result = tl.load(gradient + place * (channels // 2) + result, mask=is_result & below, other=0.0)
            of_result = of_result.to(tl.float32)
            sigmoid = _sigmoid(gate)
            of_value = of_result * gate * sigmoid
            of_gate = of_result * value * sigmoid * (1.0 + gate * (1.0 - sigmoid))
            delta = tl.reshape(tl.join(of_value, of_gate), (BLOCK,))
            tl.store(inner + place * channels + channel, delta.to(inner.dtype.element_ty), mask=inside & below)
            total += delta
            a += delta * left[r]
            b += delta * middle[r]
            c += delta * right[r]
            d += delta * left[r + 1]
            e += delta * middle[r + 1]
            f += delta * right[r + 1]
            g += delta * left[r + 2]
            h += delta * middle[r + 2]
            i += delta * right[r + 2]
        left = middle
        middle = right
    part = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    parts += part * channels * 10 + channel
    sums = (a, b, c, d, e, f, g, h, i, total)
    for tap in tl.static_range(10):
        tl.store(parts + tap * channels, sums[tap], mask=inside)


@triton.jit
def _input_backward(inner, u, weight, out, height, width, channels, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Turn the gradient of the convolution's result into that of `u`."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    top = tl.program_id(1) * ROWS
    image = tl.program_id(2).to(tl.int64) * width * channels
    inner += image * height
    u += image * height
    out += image * height
    taps = _taps(weight, channel, inside, True)
    zero = tl.zeros((BLOCK,), tl.float32)
    left = _column(inner, top, -1, height, width, channels, channel, inside, False)
    middle = _column(inner, top, 0, height, width, channels, channel, inside, False)
    for column in range(width):
        right = _column(inner, top, column + 1, height, width, channels, channel, inside, False)
        for r in tl.static_range(ROWS):
            x = _row(u, top, column, height, width, channels, channel, inside, r)
            sigmoid = _sigmoid(x)
            delta = _convolve(left, middle, right, taps, zero, r) * sigmoid * (1.0 + x * (1.0 - sigmoid))
            place = ((top + r).to(tl.int64) * width + column) * channels + channel
            tl.store(out + place, delta.to(out.dtype.element_ty), mask=inside & (top + r < height))
        left = middle
        middle = right


@triton.jit(do_not_specialize=["count"])
def _sum_parts(parts, of_weight, of_bias, count, channels, SUM_BLOCK: tl.constexpr):
    """Gradients of weight and bias from the programs' parts (count, 10, channels), added in order."""
    channel = tl.program_id(0) * SUM_BLOCK + tl.arange(0, SUM_BLOCK)
    tap = tl.program_id(1)
    inside = channel < channels
    total = tl.zeros((SUM_BLOCK,), tl.float32)
    for _ in range(count):
        total += tl.load(parts + tap * channels + channel, mask=inside, other=0.0)
        parts += 10 * channels
    tl.store(of_weight + channel * 9 + tap, total.to(of_weight.dtype.element_ty), mask=inside & (tap < 9))
    tl.store(of_bias + channel, total.to(of_bias.dtype.element_ty), mask=inside & (tap == 9))


def forward(u: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute `gated_convolution` for tensors that Triton can reach."""
    *sizes, channels = u.shape
    out = torch.empty(*sizes, channels // 2, dtype=u.dtype, device=u.device)
    if out.numel():
        given = u.contiguous(), weight.contiguous(), bias.contiguous(), out
        _gate_forward[_grid(u)](*given, *u.shape[1:], **CONSTANTS)
    return out


def backward(
    gradient: Tensor, u: Tensor, weight: Tensor, bias: Tensor, of_weights: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `u`, and of weight and bias (empty if not wanted)."""
    channels = u.shape[3]
    out = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    of_weight = torch.empty(weight.shape if of_weights else (0,), dtype=weight.dtype, device=u.device)
    of_bias = torch.empty(bias.shape if of_weights else (0,), dtype=bias.dtype, device=u.device)
    if not u.numel():
        return out, of_weight.zero_(), of_bias.zero_()
    u, weight = u.contiguous(), weight.contiguous()
    inner, grid = torch.empty_like(u), _grid(u)
    parts = torch.empty(grid[1] * grid[2], 10, channels, dtype=torch.float32, device=u.device)
    sizes = u.shape[1:]
    _gate_backward[grid](gradient.contiguous(), u, weight, bias.contiguous(), inner, parts, *sizes, **CONSTANTS)
    _input_backward[grid](inner, u, weight, out, *sizes, **CONSTANTS)
    if of_weights:
        whole = triton.cdiv(channels, SUM_CONSTANTS["SUM_BLOCK"]), 10
        _sum_parts[whole](parts, of_weight, of_bias, len(parts), channels, **SUM_CONSTANTS)
    return out, of_weight, of_bias


def _grid(u: Tensor) -> tuple[int, int, int]:
    batch, height, _, channels = u.shape
    return triton.cdiv(channels, CONSTANTS["BLOCK"]), triton.cdiv(height, CONSTANTS["ROWS"]), batch
