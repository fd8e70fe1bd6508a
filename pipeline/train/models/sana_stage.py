"""A pipeline stage of the Sana transformer: consecutive blocks, with the ends of the model on the outer stages.

`SanaStage` has blocks [start, stop) under the names they have in the whole model; the first stage also has what
precedes the blocks, the last stage what follows them. A stage sends the image tokens, the projected captions, the six
modulation vectors and the timestep's embedding to the next one: their parameters exist on the first stage only, and
their gradients equal the whole model's. Every stage is given the caption mask and the token grid.
Price: with 1024 image and 300 caption tokens, 30 % more bytes between stages than the image tokens alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sana_pipe.train.models.sana_layers import SanaEnds, mask_bias


class _ContiguousGradient(torch.autograd.Function):
    """Identity with a contiguous gradient, which can be sent to the previous stage."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


class SanaStage(SanaEnds):
    """Blocks [start, stop) of `model`, sharing its modules and parameters."""

    def __init__(self, model: SanaEnds, start: int, stop: int):
        super().__init__()
        blocks = model.blocks
        self.config, self.numerics = model.config, model.numerics
        self.is_first, self.is_last = start == 0, stop == len(blocks)
        if self.is_first:
            self.patch_embed = model.patch_embed
            self.time_embed = model.time_embed
            self.caption_projection = model.caption_projection
            self.caption_norm = model.caption_norm
        self.transformer_blocks = nn.ModuleDict({str(i): blocks[i] for i in range(start, stop)})
        if self.is_last:
            self.scale_shift_table = model.scale_shift_table
            self.norm_out = model.norm_out
            self.proj_out = model.proj_out

    @property
    def blocks(self) -> list[nn.Module]:
        """The stage's blocks in order."""
        return list(self.transformer_blocks.children())

    def forward(self, *inputs: Tensor, mask: Tensor, grid: tuple[int, int]) -> Any:
        """Run the stage on the first part of `split` (first stage) or on the output of the previous stage.

        Args:
            mask, grid: the second part of `split`.

        Returns:
            (image tokens (B, N, D), captions (B, L, D), modulation (B, 6, D), embedding (B, D)), all contiguous and in
            the model's dtype, the image tokens in float32 if `numerics` says so; the last stage returns the prediction
            (B, C, H, W).
        """
        if self.is_first:
            latents, captions, timesteps = inputs
            hidden, context, bias, modulation, embedded = self.embed(latents, captions, mask, timesteps)
            conditions = context, modulation.clone(), embedded  # a copy, because FSDP2 warns of views
        else:
            hidden, context, modulation, embedded = (_ContiguousGradient.apply(x) for x in inputs)
            conditions = inputs[1:]  # type: ignore[assignment]
            bias = mask_bias(mask, context.dtype)
        modulation = modulation.to(hidden.dtype)
        for block in self.blocks:
            hidden = block(hidden, context, bias, modulation, *grid)
        if self.is_last:
            return self.head(hidden, embedded, *grid)
        return hidden.contiguous(), *conditions

    def split(self, inputs: Mapping[str, Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Split the inputs of `SanaTransformer.forward`: some are for the first stage, the others for every stage."""
        latents, captions, mask, timesteps = (inputs[name] for name in ("latents", "captions", "mask", "timesteps"))
        return (latents, captions, timesteps), {"mask": mask, "grid": self.grid(latents, mask)}

    def example_hidden(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Meta tensors like those passed between stages, for these inputs of the model."""
        latents, captions, mask = (inputs[name] for name in ("latents", "captions", "mask"))
        batch, dim = latents.shape[0], self.config.inner_dim
        height, width = self.grid(latents, mask)
        shapes = (batch, height * width, dim), (batch, captions.shape[1], dim), (batch, 6, dim), (batch, dim)
        first = torch.float32 if self.numerics.fp32_residual else latents.dtype
        dtypes = first, *[latents.dtype] * 3
        return tuple(
            torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        )

    def example_output(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """A meta tensor like the output of the last stage, for these inputs of the model."""
        return torch.empty_like(inputs["latents"], device="meta", requires_grad=True)
