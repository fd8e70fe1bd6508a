"""Softmax attention of each sample's queries over the rows of its caption, captions concatenated without padding.

On a GPU one kernel of torch (`torch.nn.attention.varlen`, bf16 or fp16). Elsewhere the slow reference: all rows, and a
mask.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn


class PackedRows(NamedTuple):
    """Positions of captions that are concatenated without padding.

    captions: (B + 1,) int32, the first row of each and the end of the last. images: (B + 1,) int32, the same for the
    image tokens. longest: upper bound on the rows of a caption.
    """

    captions: Tensor
    images: Tensor
    longest: int


def packed_attention(query: Tensor, key: Tensor, value: Tensor, rows: PackedRows) -> Tensor:
    """Softmax attention of each sample's queries over the rows of its caption.

    Args:
        query: (B, N, heads, head_dim). key, value: (T, heads, head_dim). Every sample has at least one row.

    Returns:
        (B, N, heads, head_dim).
    """
    if query.device.type == "cuda":
        count = query.shape[1]
        out = varlen_attn(query.flatten(0, 1), key, value, rows.images, rows.captions, count, rows.longest)
        assert isinstance(out, Tensor)
        return out.unflatten(0, (-1, count))
    positions = torch.arange(len(key), device=key.device)
    mask = (positions >= rows.captions[:-1, None]) & (positions < rows.captions[1:, None])
    keys, values = (x.transpose(0, 1)[None].expand(len(query), -1, -1, -1) for x in (key, value))
    out = F.scaled_dot_product_attention(query.transpose(1, 2), keys, values, attn_mask=mask[:, None, None])
    return out.transpose(1, 2)
