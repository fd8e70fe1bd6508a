"""Layers with an added low-rank product, and the joined product of several such layers.

What: `LowRank` is a mixin before the class of a layer of tokens, (.., inputs) -> (.., outputs): a Linear layer or a 1x1
convolution of tokens. LoRA (arXiv 2106.09685): W x + s B A x. DoRA (arXiv 2402.09353): m (W x + s B A x) / n, where n
is the norm of each row of W + s B A, taken as a constant in the backward pass, as in PEFT.
Why not PEFT's layers: see `models.adapters.lora`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sana_pipe.base.layer_classes import LayerMixin, add_mixin, mixins_of
from sana_pipe.train.kernels.joined_linear import joined_linear
from sana_pipe.train.kernels.sample_dropout import Columns, Rows, columns_of, sample_dropout


class LowRank(LayerMixin):
    """A layer with a low-rank product.

    Attributes:
        lora_A: (rank, inputs). lora_B: (outputs, rank). lora_magnitude: (outputs,); None: LoRA.
        lora_scale: s. lora_dropout: share of the inputs of A that training drops. mask_columns, mask_rows: what its
            masks are made of (`kernels.sample_dropout`); None without dropout, and before a microbatch.
    """

    place = "adapter"
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_magnitude: nn.Parameter | None
    lora_scale: float
    lora_dropout: float
    mask_columns: Columns | None
    mask_rows: Rows | None
    weight: Tensor
    bias: Tensor | None
    training: bool

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)  # type: ignore[misc]
        if self.adapter_off:
            return out
        out = _added(out, F.linear(self.lora_input(x), self.lora_A), self.lora_B, self.lora_strength)
        factors = self.lora_factors()
        if factors is None:
            return out
        return out * factors if self.bias is None else out * factors + self.bias * (1 - factors)

    def lora_input(self, x: Tensor) -> Tensor:
        """`x` after the dropout, which `lora_strength` makes up for."""
        if self.mask_columns is None or not self.training:
            return x
        return sample_dropout(x, self.lora_dropout, self.mask_columns, self.mask_rows)

    @property
    def lora_strength(self) -> float:
        """Return the factor of the product: s, in training divided by the share that the dropout leaves."""
        return self.lora_scale / (1 - self.lora_dropout) if self.training else self.lora_scale

    def lora_factors(self) -> Tensor | None:
        """DoRA's m / n, (outputs,) in the dtype of the weights; None: LoRA."""
        magnitude = self.lora_magnitude
        if magnitude is None:
            return None
        with torch.no_grad():
            norms = torch.linalg.vector_norm(updated(self.weight, self.lora_A, self.lora_B, self.lora_scale), dim=1)
            norms = norms.to(magnitude.dtype).float()  # rounded alike, so that the first step is the base's
        return (magnitude.float() / norms).to(self.weight.dtype)


def updated(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + s B A, (outputs, inputs) fp32. weight: (outputs, inputs), or of a 1x1 convolution."""
    return torch.addmm(weight.flatten(1).float(), b.float(), a.float(), alpha=scale)


def add_low_rank(layer: nn.Module, rank: int, scale: float, dropout: float, magnitude: bool, masks: str = "") -> None:
    """Add the parameters to a layer in place, on the device of its weight and not initialised. masks: the name that its
    masks are drawn by; layers of one name and one input have the same."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    outputs, inputs = weight.flatten(1).shape
    layer.register_parameter("lora_A", nn.Parameter(weight.new_empty(rank, inputs)))
    layer.register_parameter("lora_B", nn.Parameter(weight.new_empty(outputs, rank)))
    layer.register_parameter("lora_magnitude", nn.Parameter(weight.new_empty(outputs)) if magnitude else None)
    layer.lora_scale, layer.lora_dropout, layer.adapter_off = scale, dropout, False  # type: ignore[assignment]
    layer.mask_columns = columns_of(masks, inputs) if dropout else None  # type: ignore[assignment]
    layer.mask_rows = None  # type: ignore[assignment]
    add_mixin(layer, LowRank)


def joined_products(x: Tensor, layers: Sequence[Any]) -> Tensor | None:
    """Three Linear layers, which have no bias, as one product, side by side: one product of the weights, and where
    layers are adapted one with all A and one with all B. The layers share the masks of a dropout.

    Args:
        x: (.., inputs).

    Returns:
        (.., sum of outputs), contiguous; None: the class of a layer computes something else (tensor parallelism,
        compressed activations).
    """
    classes = [mixins_of(layer) for layer in layers]
    if any(cls is not nn.Linear or mixins not in ((), (LowRank,)) for mixins, cls in classes):
        return None
    first, second, third = (layer.weight for layer in layers)
    joined = joined_linear(x, first, second, third)
    adapted: list[Any] = [layer for layer in layers if isinstance(layer, LowRank) and not layer.adapter_off]
    if not adapted:
        return joined
    hidden = F.linear(adapted[0].lora_input(x), torch.cat([layer.lora_A for layer in adapted]))
    wide = [layer.lora_B if layer in adapted else layer.weight.new_empty(len(layer.weight), 0) for layer in layers]
    joined = _added(joined, hidden, torch.block_diag(*wide), adapted[0].lora_strength)
    if adapted[0].lora_magnitude is None:
        return joined
    rows = [each.lora_factors() if each in adapted else each.weight.new_ones(len(each.weight)) for each in layers]
    return joined * torch.cat(rows)


def _added(out: Tensor, hidden: Tensor, b: Tensor, scale: float) -> Tensor:
    """out + scale * B hidden, as one product."""
    return torch.addmm(out.flatten(0, -2), hidden.flatten(0, -2), b.t(), alpha=scale).view_as(out)
