"""The Sana transformer: our layers (`sana_layers`) under the parameter names of diffusers' class, so its files fit.

Why not `SanaTransformer2DModel` with our blocks in it (tried with diffusers 0.42): it would spare about a hundred lines
of input and output layers, but its `forward` is one piece, and pipeline stages and packed captions need the parts.
Importing it, too, takes 5.4 s of CPU time against 2.8 s, and 140 MiB, in every process (it loads no encoder and no
pipeline). PEFT adapts this module as it is, since all names are equal; ControlNet's additions are lines of `forward`.

First values are in `sana_init`, weight files in `sana_files`; `sana_stage` is a part for pipeline parallelism.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.models.sana_config import DIFFUSERS, Numerics, SanaConfig
from pipeline.models.sana_init import initial_value
from pipeline.models.sana_layers import (
    ModulatedNorm,
    PatchEmbed,
    RMSNorm,
    SanaEnds,
    SanaTransformerBlock,
    TimeEmbed,
    TwoLayers,
)
from pipeline.models.sana_stage import SanaStage


class SanaTransformer(SanaEnds):
    """Sana's transformer. `config` is its shape."""

    def __init__(self, config: SanaConfig, numerics: Numerics = DIFFUSERS):
        super().__init__()
        self.config, self.numerics = config, numerics
        dim = config.inner_dim
        self.patch_embed = PatchEmbed(config)
        self.time_embed = TimeEmbed(dim)
        self.caption_projection = TwoLayers(config.caption_channels, dim, nn.GELU(approximate="tanh"))
        self.caption_norm = RMSNorm(dim, eps=1e-5)
        self.transformer_blocks = nn.ModuleList(
            [SanaTransformerBlock(config, numerics) for _ in range(config.num_layers)]
        )
        self.scale_shift_table = nn.Parameter(torch.randn(2, dim) / dim**0.5)
        self.norm_out = ModulatedNorm(dim)
        self.proj_out = nn.Linear(dim, config.patch_size**2 * config.in_channels)

    @property
    def blocks(self) -> list[nn.Module]:
        """The transformer blocks in order, which strategies wrap one by one."""
        return list(self.transformer_blocks)

    @property
    def tensor_parallel_plan(self) -> dict[str, str]:
        """Role of each submodule of a block under tensor parallelism (`pipeline.parallel.tensor_parallel`)."""
        plan = {"attn1": "region", "attn2": "region", "ff": "region"}
        for attention in ("attn1", "attn2"):
            plan |= {f"{attention}.{name}": "column" for name in ("to_q", "to_k", "to_v")}
            plan[f"{attention}.to_out.0"] = "row"
            if self.config.qk_norm is not None:
                plan |= {f"{attention}.{name}": "norm" for name in ("norm_q", "norm_k")}
        return plan | {"ff.conv_inverted": "column", "ff.conv_depth": "column", "ff.conv_point": "row"}

    @property
    def adapter_targets(self) -> dict[str, tuple[str, ...]]:
        """What `train.adapter.targets` may name: ends of module names."""
        projections = tuple(f"{a}.{name}" for a in ("attn1", "attn2") for name in ("to_q", "to_k", "to_v", "to_out.0"))
        return {"attention": projections, "all": (*projections, "ff.conv_inverted", "ff.conv_point")}

    def stage(self, start: int, stop: int) -> SanaStage:
        """Blocks [start, stop) as a pipeline stage that shares this model's parameters."""
        return SanaStage(self, start, stop)

    def forward(self, latents: Tensor, captions: Tensor, mask: Tensor, timesteps: Tensor) -> Tensor:
        """Predict the flow (noise minus data).

        Args:
            latents: (B, C, H, W) noised latents, in the model's dtype.
            captions: (B, L, caption_channels) text rows, in the model's dtype; or (T, caption_channels), only the rows
                that the mask shows, one sample after the other.
            mask: (B, L) bool, True = attend. The mask is a finite bias: a sample without any True attends to all L
                rows as if none were masked, and yields no NaN. For captions without padding the True of each sample
                come first, and there is at least one.
            timesteps: (B,) float32 in [0, 1000).

        Returns:
            (B, C, H, W) in the model's dtype.
        """
        height, width = self.grid(latents, mask)
        hidden, context, bias, modulation, embedded = self.embed(latents, captions, mask, timesteps)
        modulation = modulation.to(hidden.dtype)
        for block in self.transformer_blocks:
            hidden = block(hidden, context, bias, modulation, height, width)
        return self.head(hidden, embedded, height, width)

    @classmethod
    def on_meta(cls, config: SanaConfig, numerics: Numerics = DIFFUSERS) -> SanaTransformer:
        """The model without memory: names and shapes only."""
        with torch.device("meta"):
            return cls(config, numerics)

    @classmethod
    @torch.no_grad()
    def from_scratch(
        cls, config: SanaConfig, seed: int, dtype: torch.dtype = torch.float32, numerics: Numerics = DIFFUSERS
    ) -> SanaTransformer:
        """A model on the CPU with the values of `initial_value`."""
        model = cls.on_meta(config, numerics).to(dtype).to_empty(device="cpu")
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(name, tuple(parameter.shape), seed, config))
        return model
