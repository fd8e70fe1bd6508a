"""A ControlNet of Sana, with the parameter names of diffusers' `SanaControlNetModel`.

A copy of the base's first blocks and of what precedes them reads the noised latents and the control picture's latents.
A linear layer after block i gives what the base adds to its tokens after its block i + 1 (blocks are counted from 0).
`input_block` and these layers are zero at first: the model is then its base.
Why diffusers' rule and not NVlabs', which feeds the copy with the output of the base's block 0 and adds before a block:
diffusers' pipeline is what people load. With equal weights the two differ (tests/train/test_controlnet.py).
"""

from __future__ import annotations

from torch import Tensor, nn

from sana_pipe.train.models.sana_layers import SanaEnds, SanaTransformerBlock
from sana_pipe.train.models.sana_shape import Numerics, SanaControlNetShape


class SanaControlNet(SanaEnds):
    """A ControlNet; `config` is its shape."""

    def __init__(self, config: SanaControlNetShape, numerics: Numerics):
        super().__init__()
        self.config, self.numerics = config, numerics
        dim, count = config.inner_dim, config.num_layers
        self.add_inputs(config)
        self.transformer_blocks = nn.ModuleList([SanaTransformerBlock(config, numerics) for _ in range(count)])
        self.controlnet_blocks = nn.ModuleList([nn.Linear(dim, dim) for _ in range(count)])
        self.input_block = nn.Linear(dim, dim)

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.transformer_blocks)

    def forward(
        self, latents: Tensor, control: Tensor, captions: Tensor, mask: Tensor, timesteps: Tensor
    ) -> list[Tensor]:
        """Compute what the base adds after its blocks 1, 2, ...: (B, N, D) each, in the model's dtype. Arguments as in
        `SanaTransformer.forward`."""
        height, width = self.grid(latents, mask)
        hidden, context, bias, modulation, _ = self.embed(latents, captions, mask, timesteps)
        hidden = hidden + self.input_block(self.patch_embed(control))
        modulation, added = modulation.to(hidden.dtype), []
        for block, output in zip(self.transformer_blocks, self.controlnet_blocks, strict=True):
            hidden = block(hidden, context, bias, modulation, height, width)
            added.append(output(hidden.to(context.dtype)))
        return added
