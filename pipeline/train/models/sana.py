"""The Sana transformer: our layers (`sana_layers`) under the parameter names of diffusers' class, so its files fit.

Why not `SanaTransformer2DModel` with our blocks in it (tried with diffusers 0.42): it would spare about a hundred lines
of input and output layers, but its `forward` is one piece, and pipeline stages and packed captions need the parts.
Importing it, too, takes 5.4 s of CPU time against 2.8 s, and 140 MiB, in every process (it loads no encoder and no
pipeline). PEFT adapts this module as it is, since all names are equal. A ControlNet (`sana_control`) is a child. First
values are in `sana_init`, weight files in `sana_files`; `sana_stage` is a part for pipeline parallelism.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sana_pipe.train.models.sana_control import SanaControlNet
from sana_pipe.train.models.sana_init import initial_value
from sana_pipe.train.models.sana_layers import ModulatedNorm, SanaEnds, SanaTransformerBlock
from sana_pipe.train.models.sana_shape import DIFFUSERS, Numerics, SanaControlNetShape, SanaShape
from sana_pipe.train.models.sana_stage import SanaStage


def parameter_shapes(shape: SanaShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of a transformer or a ControlNet, in the model's order."""
    with torch.device("meta"):
        if isinstance(shape, SanaControlNetShape):
            module: nn.Module = SanaControlNet(shape, DIFFUSERS)
        else:
            module = SanaTransformer(shape)
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


class SanaTransformer(SanaEnds):
    """Sana's transformer. `config` is its shape."""

    def __init__(self, config: SanaShape, numerics: Numerics = DIFFUSERS):
        super().__init__()
        self.config, self.numerics = config, numerics
        dim = config.inner_dim
        self.controlnet: SanaControlNet | None = None
        self.add_inputs(config)
        self.transformer_blocks = nn.ModuleList(
            [SanaTransformerBlock(config, numerics) for _ in range(config.num_layers)]
        )
        self.scale_shift_table = nn.Parameter(torch.randn(2, dim) / dim**0.5)
        self.norm_out = ModulatedNorm(dim)
        self.proj_out = nn.Linear(dim, config.patch_size**2 * config.in_channels)

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks in the order of the forward pass, which strategies wrap one by one."""
        return [*(self.controlnet.blocks if self.controlnet is not None else []), *self.transformer_blocks]

    @property
    def tensor_parallel_plan(self) -> dict[str, str]:
        """Role of each submodule of a block under tensor parallelism (`parallel.tensor_parallel`)."""
        plan = {"attn1": "region", "attn2": "region", "ff": "region"}
        for attention in ("attn1", "attn2"):
            plan |= {f"{attention}.{name}": "column" for name in ("to_q", "to_k", "to_v")}
            plan[f"{attention}.to_out.0"] = "row"
            if self.config.qk_norm is not None:
                plan |= {f"{attention}.{name}": "norm" for name in ("norm_q", "norm_k")}
        return plan | {"ff.conv_inverted": "column", "ff.conv_depth": "column", "ff.conv_point": "row"}

    @property
    def adapter_targets(self) -> dict[str, tuple[str, ...]]:
        """The names that `train.adapter.targets` may have: ends of module names."""
        projections = tuple(f"{a}.{name}" for a in ("attn1", "attn2") for name in ("to_q", "to_k", "to_v", "to_out.0"))
        return {"attention": projections, "all": (*projections, "ff.conv_inverted", "ff.conv_point")}

    def add_controlnet(self, layers: int) -> None:
        """Add a ControlNet of so many blocks, on the device of the model and not initialised."""
        with self.proj_out.weight.device:
            self.controlnet = SanaControlNet(self.config.controlnet(layers), self.numerics)

    def stage(self, start: int, stop: int) -> SanaStage:
        """Blocks [start, stop) as a pipeline stage that shares this model's parameters."""
        return SanaStage(self, start, stop)

    def forward(
        self, latents: Tensor, captions: Tensor, mask: Tensor, timesteps: Tensor, control: Tensor | None = None
    ) -> Tensor:
        """Predict the flow (noise minus data).

        Args:
            latents: (B, C, H, W) noised latents, in the model's dtype.
            captions: (B, L, caption_channels) text rows, in the model's dtype; or (T, caption_channels), only the rows
                that the mask shows, one sample after the other.
            mask: (B, L) bool, True = attend. The mask is a finite bias: a sample without any True attends to all L
                rows as if none were masked, and yields no NaN. For captions without padding the True of each sample
                come first, and there is at least one.
            timesteps: (B,) float32 in [0, 1000).
            control: (B, C, H, W) latents of the control pictures, in the model's dtype; None: the base's prediction.

        Returns:
            (B, C, H, W) in the model's dtype.
        """
        added = []
        if control is not None:
            assert self.controlnet is not None, "a control needs a ControlNet"
            added = self.controlnet(latents, control, captions, mask, timesteps)
        height, width = self.grid(latents, mask)
        hidden, context, bias, modulation, embedded = self.embed(latents, captions, mask, timesteps)
        modulation = modulation.to(hidden.dtype)
        for number, block in enumerate(self.transformer_blocks):
            hidden = block(hidden, context, bias, modulation, height, width)
            if 0 < number <= len(added):
                hidden = hidden + added[number - 1]
        return self.head(hidden, embedded, height, width)

    @classmethod
    def on_meta(cls, config: SanaShape, numerics: Numerics = DIFFUSERS) -> SanaTransformer:
        """The model without memory: names and shapes only."""
        with torch.device("meta"):
            return cls(config, numerics)

    @classmethod
    @torch.no_grad()
    def from_scratch(
        cls, config: SanaShape, seed: int, dtype: torch.dtype = torch.float32, numerics: Numerics = DIFFUSERS
    ) -> SanaTransformer:
        """A model on the CPU with the values of `initial_value`."""
        model = cls.on_meta(config, numerics).to(dtype).to_empty(device="cpu")
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(name, tuple(parameter.shape), seed, config))
        return model
