"""A shared prefix: the tokens that every caption begins with, run once by Gemma-2.

Attention is causal, so the keys and values of the instruction serve every caption. Masks and cache are implemented here
and rely on how Gemma2Model calls them; the comparison of `TextEncoder` would notice a change.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch

_ATTENTION = "sana_pipe_after_prefix"


def _attention_after_prefix(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    after_prefix: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' eager attention of Gemma-2, operation by operation, over a prefix and new tokens, without copies of
    the prefix for each caption and of keys for the query heads that share them.

    Args:
        query: (batch, heads, n, d). key, value: (batch, key heads, n, d), of the new tokens alone.
        attention_mask: additive, (1, 1, n, prefix + n).
        after_prefix: transformers' cache of the prefix; its layers hold (1, key heads, prefix, d).
    """
    first = after_prefix.layers[module.layer_idx]
    batch, heads, n, d = query.shape
    kinds = key.shape[1]
    group = heads // kinds
    # Key heads come first, so that one product serves all captions of a key head.
    queries = query.view(batch, kinds, group, n, d).transpose(0, 1).reshape(kinds, batch * group * n, d)
    keys = key.transpose(0, 1).reshape(kinds * batch, n, d)
    scores = torch.cat(
        [
            (queries @ first.keys[0].transpose(1, 2)).view(kinds * batch, group * n, -1),
            queries.view(kinds * batch, group * n, d) @ keys.transpose(1, 2),
        ],
        dim=-1,
    )
    scores.mul_(scaling)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    scores.view(kinds * batch * group, n, -1).add_(attention_mask[0])
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    first_values = first.values.transpose(0, 1).expand(-1, batch, -1, -1)
    values = torch.cat([first_values, value.transpose(0, 1)], dim=2)
    out = weights @ values.view(kinds * batch, -1, d)
    return out.view(kinds, batch, group, n, d).permute(1, 3, 0, 2, 4).reshape(batch, n, heads, d), None


class Prefix:
    """The tokens that every caption begins with (`ids`), run once. bos: (1, width), the hidden state of the first of
    them. cache: their keys and values."""

    def __init__(self, model: torch.nn.Module, ids: Sequence[int]):
        from transformers import AttentionInterface, DynamicCache

        AttentionInterface.register(_ATTENTION, _attention_after_prefix)
        self.model, self.ids = model, list(ids)
        named = signature(model.forward).parameters
        self._option = "cache" if "cache" in named else "past_key_values"  # which transformers 5.40 knows no more
        self.cache = DynamicCache()  # every position in every layer: masks decide what a sliding window sees
        self.bos = self._forward([self.ids], 0)[0, :1].clone()

    def __call__(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Hidden states (rows, longest row, width) of tokens after the prefix; undefined beyond a row's end."""
        return self._forward(rows, len(self.ids))

    def _forward(self, rows: Sequence[Sequence[int]], start: int) -> torch.Tensor:
        length = max(map(len, rows))
        device = self.bos.device if start else next(self.model.parameters()).device
        # token 0 as padding: attention is causal, so no row attends to it
        ids = torch.tensor([[*row, *([0] * (length - len(row)))] for row in rows], device=device)
        positions = torch.arange(start, start + length, device=device)
        config: Any = self.model.config
        usual, options = config._attn_implementation, {self._option: self.cache, "use_cache": True}
        if start:
            config._attn_implementation = _ATTENTION
            options = {"after_prefix": self.cache, "use_cache": False}
        try:
            masks = self.masks(positions, start + length)
            out = self.model(ids, attention_mask=masks, position_ids=positions[None], **options)
        finally:
            config._attn_implementation = usual
        return out.last_hidden_state

    def masks(self, queries: torch.Tensor, keys: int) -> dict[str, torch.Tensor]:
        """Additive masks (1, 1, queries, keys) by layer type, for the first `keys` positions: all up to the last query,
        which is on the device, where reading it would wait."""
        config: Any = self.model.config
        dtype = next(self.model.parameters()).dtype
        behind = queries[:, None] - torch.arange(keys, device=queries.device)

        def mask(visible: torch.Tensor) -> torch.Tensor:
            hidden = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
            return hidden.masked_fill_(~visible, torch.finfo(dtype).min)[None, None]

        causal = behind >= 0
        return {
            "full_attention": mask(causal),
            "sliding_attention": mask(causal & (behind < config.sliding_window)),
        }
