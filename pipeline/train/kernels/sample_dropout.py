"""Dropout whose masks belong to a visit of a sample, not to a process or a generator.

Whether a value stays is a hash of its sample's visit, its row (a token) in the sample, its layer and its column. So the
masks are the same on every topology, for padded and packed captions and after every resume, and a pass that is computed
again in the backward pass draws the same ones: there is no state to save, nor a wait for the device.
Why `row * factor + offset` in int32, with random factor and offset of each column: it is one pass over the values, and
any two values of a mask are independent as far as its threshold can tell. Price: with the comparison and the product
three passes where torch's dropout has one; compiled one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor, nn

_STEP = 0x1E3779B1
_MIX = 0x7FEB352D, 0x046CA68B


class Columns(NamedTuple):
    """The hashes of a layer's input columns, (inputs,) int32 each: the factor of a row's hash, and the addend."""

    factors: Tensor
    offsets: Tensor


class Rows(NamedTuple):
    """Hashes of a microbatch, int32: `samples` (b,) of the visits; with packed captions `packed` (t,) of their rows."""

    samples: Tensor
    packed: Tensor | None = None


def columns_of(name: str, inputs: int) -> Columns:
    """Make the hashes of a layer's columns from its name alone, on the CPU."""
    counted = _numbers(inputs, torch.device("cpu")) * _STEP
    first, second = (_signed(xxhash.xxh3_64_intdigest(f"{name}/{part}".encode())) for part in ("factor", "offset"))
    return Columns(_mixed(counted + first) | 1, _mixed(counted + second))


def rows_of(hashes: list[int], mask: Tensor, packed: int | None) -> Rows:
    """`Rows` of visits, from a number for each; on the device of `mask`, without a wait for it.

    Args:
        mask: (b, L) bool of the captions. packed: number of their rows if they are packed, else None.
    """
    samples = torch.tensor([_signed(value) for value in hashes], dtype=torch.int32)
    samples = samples.to(mask.device, non_blocking=True)
    if packed is None:
        return Rows(samples)
    lengths = mask.sum(1)
    ends = lengths.cumsum(0)
    numbers = torch.arange(packed, device=mask.device)
    owners = torch.searchsorted(ends, numbers, right=True)
    within = (numbers - (ends - lengths)[owners]).int()
    return Rows(samples, _mixed(samples[owners] + within * _STEP))


def give_rows(module: nn.Module, rows: Rows) -> None:
    """Give the layers of a module that drop values (`mask_columns`, `mask_rows`) the rows of the microbatch that comes
    next; they stay for its backward pass."""
    layers: list[Any] = [layer for layer in module.modules() if getattr(layer, "mask_columns", None) is not None]
    for layer in layers:
        if layer.mask_columns.factors.device != rows.samples.device:
            layer.mask_columns = Columns(*(each.to(rows.samples.device) for each in layer.mask_columns))
        layer.mask_rows = rows


def sample_dropout(x: Tensor, share: float, columns: Columns, rows: Rows | None) -> Tensor:
    """`x` with a share of its values replaced by 0, not scaled.

    Args:
        x: (b, tokens, inputs), or (t, inputs) of packed captions.
        rows: None: as if the samples' visits had the numbers 0, 1, ..: every call draws the same masks.
    """
    if x.ndim == 2 and rows is not None and rows.packed is not None:
        hashes = rows.packed
    else:
        samples = _numbers(len(x), x.device) if rows is None else rows.samples
        hashes = _mixed(samples if x.ndim == 2 else samples[:, None] + _numbers(x.shape[1], x.device) * _STEP)
    drawn = torch.addcmul(columns.offsets, hashes[..., None], columns.factors)
    return x * (drawn >= int(share * 2**32) - 2**31)


def _numbers(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=device)


def _mixed(values: Tensor) -> Tensor:
    """Hashes of int32 numbers, no two alike."""
    for factor in _MIX:
        values = (values ^ (values >> 16 & 0xFFFF)) * factor  # a shift repeats the sign
    return values ^ (values >> 15 & 0x1FFFF)


def _signed(value: int) -> int:
    """The lowest 32 bits as int32."""
    return (value & 0xFFFFFFFF) - ((value & 0x80000000) << 1)
