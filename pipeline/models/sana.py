"""The Sana transformer in plain PyTorch, with the parameter names of diffusers' `SanaTransformer2DModel`.

What: `SanaConfig`, `SanaTransformer` (forward pass, from-scratch initialisation), and the way in and out of a diffusers
folder (`load_weights`, `save_weights`, `from_folder`).
Why our own: the training process must not import diffusers' pipelines (they bring every encoder in); linear attention
has to stay in float32 under autocast, which diffusers' does not; and the gated convolution needs a channel layout that
any sharding strategy can cut. The block takes plain tensors, so checkpointing, FSDP2 and pipeline stages wrap it from
outside; the model knows nothing of how it is spread.
Layout: GLUMBConv's 2H channels are stored interleaved [value 0, gate 0, value 1, gate 1, ..] instead of [all values,
all gates]. A contiguous slice of channels is then a valid smaller GLUMBConv, whatever the number of slices. diffusers'
order exists only in files: `interleave` on the way in, `deinterleave` on the way out.
Price: this file has to follow diffusers' numerics by hand; the tests hold outputs and gradients of both against each
other. Sana-Sprint (guidance embedding, scaled timesteps) and learned-variance checkpoints are refused by name.

Architecture and constants: Sana (arXiv 2410.10629), SANA-1.5 (arXiv 2501.18427) and the defaults of diffusers' class.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pipeline.config import ArchConfig
from pipeline.errors import ConfigError, UserError

CLASS_NAME = "SanaTransformer2DModel"
WEIGHTS_STEM = "diffusion_pytorch_model"
MAX_SHARD_BYTES = 5_000_000_000  # diffusers' own default, "5GB"

_SINUSOID_WIDTH = 256
_SINUSOID_MAX_PERIOD = 10_000.0
_MASK_BIAS = -10_000.0
_LINEAR_ATTENTION_EPS = 1e-15
_GLU_PARAMETERS = ("conv_inverted.weight", "conv_inverted.bias", "conv_depth.weight", "conv_depth.bias")


# ------------------------------------------------------------------------------------------------- configuration


@dataclass(frozen=True)
class SanaConfig:
    """Shape of a Sana transformer. Names and defaults are those of diffusers' config.json (defaults: Sana 1.6B).

    `sample_size` is the side of the latent at the base resolution: it selects `SanaPipeline`'s aspect-ratio bins
    (16, 32, 64, 128 for 512 to 4096 px) and, with `interpolation_scale`, the base of the position embedding.

    Raises:
        ConfigError: a combination that this model does not implement; the message names the field.
    """

    in_channels: int = 32
    out_channels: int | None = 32
    num_attention_heads: int = 70
    attention_head_dim: int = 32
    num_layers: int = 20
    num_cross_attention_heads: int = 20
    cross_attention_head_dim: int = 112
    cross_attention_dim: int = 2240
    caption_channels: int = 2304
    mlp_ratio: float = 2.5
    dropout: float = 0.0
    attention_bias: bool = False
    sample_size: int = 32
    patch_size: int = 1
    norm_elementwise_affine: bool = False
    norm_eps: float = 1e-6
    interpolation_scale: float | None = None
    guidance_embeds: bool = False
    guidance_embeds_scale: float = 0.1
    qk_norm: str | None = None
    timestep_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.out_channels is None:
            object.__setattr__(self, "out_channels", self.in_channels)
        if self.guidance_embeds:
            raise ConfigError(
                "the transformer's config has guidance_embeds = true: this is a guidance-distilled model (Sana-Sprint)",
                expected="guidance_embeds = false (Sana, SANA-1.5)",
                fix="take the weights of Sana or SANA-1.5",
            )
        if self.timestep_scale != 1.0:
            raise ConfigError(
                "the transformer's config scales its timesteps (Sana-Sprint), which this model does not implement",
                expected="timestep_scale = 1.0",
                found=f"timestep_scale = {self.timestep_scale}",
            )
        if self.qk_norm not in (None, "rms_norm_across_heads"):
            raise ConfigError(
                "the transformer's config asks for an unknown query/key normalisation",
                expected="qk_norm = null or 'rms_norm_across_heads'",
                found=f"qk_norm = {self.qk_norm!r}",
            )
        if self.out_channels != self.in_channels:
            raise ConfigError(
                "the transformer's config predicts another number of channels than it reads (a learned variance)",
                expected=f"out_channels = in_channels = {self.in_channels}",
                found=f"out_channels = {self.out_channels}",
            )
        if self.cross_attention_dim != self.inner_dim:
            raise ConfigError(
                "cross attention reads captions that are projected to the model's width",
                expected=f"cross_attention_dim = num_attention_heads*attention_head_dim = {self.inner_dim}",
                found=f"cross_attention_dim = {self.cross_attention_dim}",
            )
        if self.interpolation_scale is not None and self.inner_dim % 4:
            raise ConfigError(
                "a two-dimensional sine/cosine position embedding needs a width divisible by 4",
                found=f"num_attention_heads*attention_head_dim = {self.inner_dim}",
            )

    @property
    def inner_dim(self) -> int:
        """Width of the token stream."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def glu_channels(self) -> int:
        """H, the hidden channels of GLUMBConv; conv_inverted and conv_depth carry 2H (value and gate)."""
        return int(self.mlp_ratio * self.inner_dim)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "config.json") -> SanaConfig:
        """Read the contents of a diffusers `config.json`. Keys that start with `_` are diffusers' own bookkeeping.

        Raises:
            ConfigError: another class, or a key this model does not know (its meaning would be lost).
        """
        name = data.get("_class_name", CLASS_NAME)
        if name != CLASS_NAME:
            raise ConfigError(f"{source} describes another model", expected=CLASS_NAME, found=name)
        known = {field.name for field in fields(cls)}
        unknown = sorted(key for key in data if not key.startswith("_") and key not in known)
        if unknown:
            raise ConfigError(
                f"{source} has keys that this Sana transformer does not implement: {', '.join(unknown)}",
                expected=", ".join(sorted(known)),
            )
        return cls(**{key: value for key, value in data.items() if key in known})

    @classmethod
    def from_arch(cls, arch: ArchConfig, sample_size: int) -> SanaConfig:
        """The configuration of a model trained from scratch; `sample_size` serves where `arch` leaves it open."""
        width = arch.num_attention_heads * arch.attention_head_dim
        given = arch.model_dump()
        given["sample_size"] = sample_size if arch.sample_size is None else arch.sample_size
        return cls(out_channels=arch.in_channels, cross_attention_dim=width, **given)

    def to_dict(self) -> dict[str, Any]:
        """What diffusers' `config.json` holds."""
        return {"_class_name": CLASS_NAME, **asdict(self)}


# -------------------------------------------------------------------------------------------------------- layers


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension; statistics in float32, result in the weight's dtype."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        full = x.float()
        full = full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + self.eps)
        return full.to(self.weight.dtype) * self.weight


def _without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if device.type == "meta":  # autocast does not know the device
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def linear_attention(query: Tensor, key: Tensor, value: Tensor, head_dim: int) -> Tensor:
    """ReLU linear attention, accumulated in float32 whatever the inputs are and whether or not autocast is on.

    Args:
        query, key, value: (B, N, heads*head_dim), any floating dtype.

    Returns:
        (B, N, heads*head_dim) float32: relu(q) (relu(K)^T V) / (relu(q) sum relu(K) + 1e-15). A position whose
        denominator is zero yields zero.
    """
    with _without_autocast(query.device):
        q = F.relu(query).float().transpose(1, 2).unflatten(1, (-1, head_dim))  # (B, h, d, N)
        k = F.relu(key).float().unflatten(2, (-1, head_dim)).transpose(1, 2)  # (B, h, N, d)
        v = value.float().transpose(1, 2).unflatten(1, (-1, head_dim))  # (B, h, d, N)
        v = F.pad(v, (0, 0, 0, 1), value=1.0)  # the row of ones carries the denominator
        out = torch.matmul(torch.matmul(v, k), q)  # (B, h, d+1, N)
        out = out[:, :, :-1] / (out[:, :, -1:] + _LINEAR_ATTENTION_EPS)
        return out.flatten(1, 2).transpose(1, 2)


class _Attention(nn.Module):
    """Projections that self and cross attention share. Head counts follow from the projections' widths at run time, so
    that a module whose projections were cut across devices still works on its part."""

    norm_q: RMSNorm | None
    norm_k: RMSNorm | None

    def __init__(self, dim: int, context_dim: int, heads: int, head_dim: int, bias: bool, dropout: float, norm: bool):
        super().__init__()
        inner = heads * head_dim
        self.head_dim = head_dim
        self.norm_q = RMSNorm(inner, eps=1e-5) if norm else None
        self.norm_k = RMSNorm(inner, eps=1e-5) if norm else None
        self.to_q = nn.Linear(dim, inner, bias=bias)
        self.to_k = nn.Linear(context_dim, inner, bias=bias)
        self.to_v = nn.Linear(context_dim, inner, bias=bias)
        self.to_out = nn.ModuleList([nn.Linear(inner, dim), nn.Dropout(dropout)])

    def project(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of `x`, keys and values of `context`, each (B, tokens, heads*head_dim)."""
        query, key, value = self.to_q(x), self.to_k(context), self.to_v(context)
        if self.norm_q is not None and self.norm_k is not None:
            query, key = self.norm_q(query), self.norm_k(key)
        return query, key, value

    def output(self, x: Tensor) -> Tensor:
        for layer in self.to_out:
            x = layer(x)
        return x


class SelfAttention(_Attention):
    """Linear attention over image tokens."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x, x)
        out = self.output(linear_attention(query, key, value, self.head_dim).to(x.dtype))
        return out.clamp(-65504, 65504) if x.dtype == torch.float16 else out


class CrossAttention(_Attention):
    """Softmax attention of image tokens over caption tokens."""

    def forward(self, x: Tensor, captions: Tensor, mask_bias: Tensor) -> Tensor:
        """`mask_bias` is (B, 1, 1, L), 0 where attention is allowed and -10000 elsewhere."""
        query, key, value = (
            part.unflatten(2, (-1, self.head_dim)).transpose(1, 2) for part in self.project(x, captions)
        )
        value = value.to(query.dtype)  # under autocast the norms leave float32, the value projection bf16
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask_bias.to(query.dtype))
        return self.output(out.transpose(1, 2).flatten(2))


class GLUMBConv(nn.Module):
    """Gated inverted bottleneck: 1x1 up to 2H, SiLU, 3x3 depthwise, value * SiLU(gate), 1x1 down. Channels of the first
    two convolutions are interleaved: value i is channel 2i, its gate channel 2i+1."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.conv_inverted = nn.Conv2d(dim, 2 * hidden, 1)
        self.conv_depth = nn.Conv2d(2 * hidden, 2 * hidden, 3, padding=1, groups=2 * hidden)
        self.conv_point = nn.Conv2d(hidden, dim, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, D, H, W) -> (B, D, H, W)."""
        x = self.conv_depth(F.silu(self.conv_inverted(x)))
        value, gate = x.unflatten(1, (-1, 2)).unbind(2)  # x[:, 0::2], x[:, 1::2] with a cheaper backward
        return self.conv_point(value * F.silu(gate))


class SanaTransformerBlock(nn.Module):
    """Linear self attention, cross attention, gated convolution; the first and last are modulated by the timestep."""

    def __init__(self, config: SanaConfig):
        super().__init__()
        dim, qk = config.inner_dim, config.qk_norm is not None
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False, eps=config.norm_eps)
        self.attn1 = SelfAttention(
            dim,
            dim,
            config.num_attention_heads,
            config.attention_head_dim,
            bias=config.attention_bias,
            dropout=config.dropout,
            norm=qk,
        )
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=config.norm_elementwise_affine, eps=config.norm_eps)
        self.attn2 = CrossAttention(
            dim,
            config.cross_attention_dim,
            config.num_cross_attention_heads,
            config.cross_attention_head_dim,
            bias=True,
            dropout=config.dropout,
            norm=qk,
        )
        self.ff = GLUMBConv(dim, config.glu_channels)
        self.scale_shift_table = nn.Parameter(torch.randn(6, dim) / dim**0.5)

    def forward(
        self, hidden: Tensor, captions: Tensor, mask_bias: Tensor, modulation: Tensor, height: int, width: int
    ) -> Tensor:
        """One block.

        Args:
            hidden: (B, height*width, D) image tokens, row by row.
            captions: (B, L, D) projected and normalised caption tokens.
            mask_bias: (B, 1, 1, L) additive bias, 0 or -10000.
            modulation: (B, 6, D) the timestep's shift, scale and gate for attention, then for the convolution.
            height, width: of the token grid.

        Returns:
            (B, height*width, D), dtype of `hidden`.
        """
        shift1, scale1, gate1, shift2, scale2, gate2 = (self.scale_shift_table + modulation).chunk(6, dim=1)

        x = self.norm1(hidden) * (1 + scale1) + shift1
        hidden = hidden + gate1 * self.attn1(x.to(hidden.dtype))

        hidden = hidden + self.attn2(hidden, captions, mask_bias)

        x = self.norm2(hidden) * (1 + scale2) + shift2
        x = self.ff(x.unflatten(1, (height, width)).permute(0, 3, 1, 2))
        return hidden + gate2 * x.flatten(2).transpose(1, 2)


def timestep_sinusoid(timesteps: Tensor) -> Tensor:
    """(B,) float32 in [0, 1000) -> (B, 256) float32: 128 cosines, then 128 sines, periods up to 2 pi 10^4.

    Raises:
        TypeError: not float32. bf16 keeps 8 bits: 873 becomes 872, which costs nine times the gradient error of all
            the rest of a bf16 model.
    """
    if timesteps.dtype != torch.float32:
        raise TypeError(
            f"timesteps arrive as {timesteps.dtype} and must be float32: something cast the model's inputs "
            "(FSDP2: MixedPrecisionPolicy(cast_forward_inputs=False) on the root)"
        )
    half = _SINUSOID_WIDTH // 2
    steps = torch.arange(half, dtype=torch.float32, device=timesteps.device)
    frequency = torch.exp(-math.log(_SINUSOID_MAX_PERIOD) * steps / half)
    angle = timesteps[:, None] * frequency[None]
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


def position_embedding(
    height: int, width: int, dim: int, *, base: int, scale: float, device: torch.device | None = None
) -> Tensor:
    """Sine/cosine position embedding of a token grid, (height*width, dim) float32.

    Coordinates are stretched so that any grid spans `base / scale` units. The first half of the channels carries the
    column and the second half the row, each half sines then cosines. Angles in float64.
    """
    where = torch.device("cpu") if device is not None and device.type == "mps" else device  # mps has no float64
    count = dim // 4
    omega = 1.0 / 10_000 ** (torch.arange(count, dtype=torch.float64, device=where) / count)

    def table(length: int) -> Tensor:
        position = torch.arange(length, dtype=torch.float32, device=where) / (length / base) / scale
        angle = position.double()[:, None] * omega[None]
        return torch.cat([angle.sin(), angle.cos()], dim=1).float().to(device)

    columns = table(width)[None].expand(height, width, -1)
    rows = table(height)[:, None].expand(height, width, -1)
    return torch.cat([columns, rows], dim=-1).flatten(0, 1)


class PatchEmbed(nn.Module):
    """Latents to tokens: a strided convolution, plus a position embedding where `interpolation_scale` asks for one
    (Sana at 512 and 1024 px has none). The embedding is computed for the shape at hand and is no buffer: nothing to
    lose when a model is built on the meta device, nothing to be cast to bf16, any height and width."""

    def __init__(self, config: SanaConfig):
        super().__init__()
        self.patch_size = config.patch_size
        self.base = config.sample_size // config.patch_size
        self.scale = config.interpolation_scale
        self.proj = nn.Conv2d(config.in_channels, config.inner_dim, config.patch_size, stride=config.patch_size)

    def forward(self, latents: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, H/p * W/p, D), contiguous: offloading and recomputation rebuild saved tensors contiguous
        and would otherwise find other strides than those that were saved."""
        x = self.proj(latents)
        height, width = x.shape[-2:]
        x = x.flatten(2).transpose(1, 2)
        if self.scale is not None:
            embedding = position_embedding(
                height, width, x.shape[-1], base=self.base, scale=self.scale, device=x.device
            )
            x = (x + embedding).to(x.dtype)
        return x.contiguous()


class _TwoLayers(nn.Module):
    """linear_1, activation, linear_2."""

    def __init__(self, inputs: int, dim: int, activation: nn.Module):
        super().__init__()
        self.linear_1 = nn.Linear(inputs, dim)
        self.act = activation
        self.linear_2 = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(self.act(self.linear_1(x)))


class _TimestepEmbedder(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.timestep_embedder = _TwoLayers(_SINUSOID_WIDTH, dim, nn.SiLU())


class TimeEmbed(nn.Module):
    """Timestep to its embedding and to the six modulation vectors that all blocks share."""

    def __init__(self, dim: int):
        super().__init__()
        self.emb = _TimestepEmbedder(dim)
        self.linear = nn.Linear(dim, 6 * dim)

    def forward(self, timesteps: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(B,) float32 -> modulation (B, 6, D), embedding (B, D), both computed in `dtype`."""
        embedded = self.emb.timestep_embedder(timestep_sinusoid(timesteps).to(dtype))
        return self.linear(F.silu(embedded)).unflatten(1, (6, -1)), embedded


class ModulatedNorm(nn.Module):
    """Layer norm, scaled and shifted by the timestep's embedding plus a learned table."""

    def __init__(self, dim: int):
        super().__init__()
        self.norm = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)

    def forward(self, hidden: Tensor, embedded: Tensor, table: Tensor) -> Tensor:
        shift, scale = (table[None] + embedded[:, None]).chunk(2, dim=1)
        return self.norm(hidden) * (1 + scale) + shift


# --------------------------------------------------------------------------------------------------------- model


class SanaTransformer(nn.Module):
    """Sana's transformer. `config` is its shape; `blocks` is what strategies wrap, one by one."""

    def __init__(self, config: SanaConfig):
        super().__init__()
        self.config = config
        dim = config.inner_dim
        self.patch_embed = PatchEmbed(config)
        self.time_embed = TimeEmbed(dim)
        self.caption_projection = _TwoLayers(config.caption_channels, dim, nn.GELU(approximate="tanh"))
        self.caption_norm = RMSNorm(dim, eps=1e-5)
        self.transformer_blocks = nn.ModuleList([SanaTransformerBlock(config) for _ in range(config.num_layers)])
        self.scale_shift_table = nn.Parameter(torch.randn(2, dim) / dim**0.5)
        self.norm_out = ModulatedNorm(dim)
        self.proj_out = nn.Linear(dim, config.patch_size**2 * config.in_channels)

    @property
    def blocks(self) -> list[nn.Module]:
        """The transformer blocks in order."""
        return list(self.transformer_blocks)

    def embed(
        self, latents: Tensor, captions: Tensor, mask: Tensor, timesteps: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What precedes the blocks; arguments as in `forward`.

        Returns:
            hidden (B, N, D), captions (B, L, D), mask_bias (B, 1, 1, L), modulation (B, 6, D), embedded (B, D).
        """
        hidden = self.patch_embed(latents)
        modulation, embedded = self.time_embed(timesteps, hidden.dtype)
        context = self.caption_norm(self.caption_projection(captions))
        mask_bias = (~mask).to(hidden.dtype)[:, None, None, :] * _MASK_BIAS
        return hidden, context, mask_bias, modulation, embedded

    def head(self, hidden: Tensor, embedded: Tensor, height: int, width: int) -> Tensor:
        """What follows the blocks: (B, height*width, D) tokens -> (B, C, height*p, width*p), contiguous."""
        p = self.config.patch_size
        x = self.proj_out(self.norm_out(hidden, embedded, self.scale_shift_table))
        x = x.reshape(x.shape[0], height, width, p, p, -1).permute(0, 5, 1, 3, 2, 4)
        return x.reshape(x.shape[0], -1, height * p, width * p).contiguous()

    def forward(self, latents: Tensor, captions: Tensor, mask: Tensor, timesteps: Tensor) -> Tensor:
        """Predict the flow (noise minus data).

        Args:
            latents: (B, C, H, W) noised latents, in the model's dtype.
            captions: (B, L, caption_channels) text rows, in the model's dtype.
            mask: (B, L) bool, True = attend. The mask is a finite bias: a sample without any True attends to all L
                rows as if none were masked, and yields no NaN.
            timesteps: (B,) float32 in [0, 1000).

        Returns:
            (B, C, H, W) in the model's dtype.

        Raises:
            TypeError: timesteps that are not float32, a mask that is not bool.
            ValueError: sides that the patch size does not divide.
        """
        p = self.config.patch_size
        if latents.shape[-2] % p or latents.shape[-1] % p:
            raise ValueError(f"latents of {tuple(latents.shape[-2:])} cannot be cut into patches of {p}x{p}")
        if mask.dtype != torch.bool:
            raise TypeError(f"the caption mask must be bool (True = attend), not {mask.dtype}")
        height, width = latents.shape[-2] // p, latents.shape[-1] // p
        hidden, context, mask_bias, modulation, embedded = self.embed(latents, captions, mask, timesteps)
        for block in self.transformer_blocks:
            hidden = block(hidden, context, mask_bias, modulation, height, width)
        return self.head(hidden, embedded, height, width)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Overwrite every parameter with NVlabs' from-scratch initialisation (see `initial_value`). The values depend
        on the seed and the parameter's name only: not on device, order or the rest of the model."""
        for name, parameter in self.named_parameters():
            parameter.copy_(initial_value(name, tuple(parameter.shape), seed, self.config))

    def reset_buffers(self) -> None:
        """To be called after `to_empty`, which leaves buffers undefined. This model derives its position embedding in
        the forward pass and registers none; should one have been added from outside, its content is unknown here.

        Raises:
            RuntimeError: there is a buffer that this method cannot restore.
        """
        names = [name for name, _ in self.named_buffers()]
        if names:
            raise RuntimeError(f"buffers that the model did not create cannot be restored: {', '.join(names)}")

    @classmethod
    def on_meta(cls, config: SanaConfig) -> SanaTransformer:
        """The model without memory: names and shapes only."""
        with torch.device("meta"):
            return cls(config)

    @classmethod
    def from_scratch(
        cls, config: SanaConfig, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> SanaTransformer:
        """A model with `initialise(seed)` weights, without initialising it twice."""
        model = cls.on_meta(config).to(dtype).to_empty(device=device)
        model.initialise(seed)
        model.reset_buffers()
        return model

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        dtype: torch.dtype | None = torch.float32,
        device: torch.device | str = "cpu",
        variant: str | None = None,
    ) -> SanaTransformer:
        """Build from a diffusers transformer folder; `dtype=None` keeps the file's. Errors as in `load_weights`."""
        config, weights = load_weights(folder, variant)
        for name in list(weights):
            # a copy: what was loaded is a mapping of the file, which may change or shrink later
            weights[name] = weights[name].to(device=device, dtype=dtype, copy=True)
        model = cls.on_meta(config)
        model.load_state_dict(weights, assign=True)
        model.requires_grad_(True)
        model.reset_buffers()
        return model


# ------------------------------------------------------------------------------------------------ initialisation


def initial_value(name: str, shape: tuple[int, ...], seed: int, config: SanaConfig) -> Tensor:
    """NVlabs' from-scratch value of one parameter, float32 on the CPU, in our layout.

    A generator per parameter, keyed by seed and name: a process that holds a part of the model can draw just that.
    Rules (NVlabs/Sana `diffusion/model/nets/sana_multi_scale.py`, `sana.py`, `norms.py`):
    linear weights Xavier-uniform (over the fused qkv and kv matrices they are slices of), linear biases 0; patch
    convolution Xavier-uniform as a linear layer; timestep and caption layers N(0, 0.02); caption norm 0.01, other
    norms 1; scale_shift_table N(0, 1/D); GLUMBConv and the patch bias as PyTorch's convolutions (uniform within
    1/sqrt(fan in)).

    Raises:
        ValueError: the name is not one of a Sana transformer.
    """
    owner, _, kind = name.rpartition(".")
    layer = owner.rpartition(".")[2]
    key = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)

    def uniform(bound: float) -> Tensor:
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)

    def normal(std: float) -> Tensor:
        return torch.empty(shape).normal_(0.0, std, generator=generator)

    if kind == "scale_shift_table":
        return normal(shape[-1] ** -0.5)
    if name == "caption_norm.weight":
        return torch.full(shape, 0.01)
    if layer in ("norm_q", "norm_k", "norm2"):
        return torch.ones(shape) if kind == "weight" else torch.zeros(shape)
    if layer in ("conv_inverted", "conv_depth", "conv_point", "proj"):
        fan_in = {
            "conv_inverted": config.inner_dim,
            "conv_depth": 9,
            "conv_point": config.glu_channels,
            "proj": config.in_channels * config.patch_size**2,
        }[layer]
        if name == "patch_embed.proj.weight":
            return uniform(math.sqrt(6 / (fan_in + shape[0])))
        return uniform(fan_in**-0.5)
    if kind == "bias":
        return torch.zeros(shape)
    if name.startswith(("time_embed.", "caption_projection.")):
        return normal(0.02)
    if len(shape) != 2:
        raise ValueError(f"{name} {shape} is not a parameter of a Sana transformer")
    slices = 3 if ".attn1.to_" in name else 2
    fused = slices if layer in ("to_k", "to_v") or (layer == "to_q" and slices == 3) else 1
    return uniform(math.sqrt(6 / (shape[1] + fused * shape[0])))


# -------------------------------------------------------------------------------------------------- weight files


def interleave(name: str, tensor: Tensor) -> Tensor:
    """diffusers' order -> ours, for the parameters of GLUMBConv's first two convolutions; others pass unchanged.

    [values 0..H-1, gates 0..H-1] becomes [value 0, gate 0, value 1, gate 1, ..] along dimension 0 (a copy).
    """
    if not name.endswith(_GLU_PARAMETERS):
        return tensor
    return tensor.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1).contiguous()


def deinterleave(name: str, tensor: Tensor) -> Tensor:
    """Our order -> diffusers'; the inverse of `interleave`."""
    if not name.endswith(_GLU_PARAMETERS):
        return tensor
    return tensor.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1).contiguous()


def expected_shapes(config: SanaConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter, in the model's order (nothing is allocated)."""
    return {name: tuple(parameter.shape) for name, parameter in SanaTransformer.on_meta(config).named_parameters()}


def read_config(folder: Path) -> SanaConfig:
    """`config.json` of a diffusers transformer folder.

    Raises:
        UserError: there is none, it is not JSON, or it describes a model that this package does not implement.
    """
    path = Path(folder) / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{folder} is not a transformer folder: there is no config.json",
            expected=f"a folder written by {CLASS_NAME}.save_pretrained",
            fix="name the subfolder too, e.g. model.weights.subfolder: transformer",
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path} is not a JSON object", found=type(data).__name__)
    return SanaConfig.from_dict(data, source=str(path))


def load_weights(folder: Path, variant: str | None = None) -> tuple[SanaConfig, dict[str, Tensor]]:
    """Read a diffusers transformer folder: `config.json` and safetensors, in one file or in shards with an index.

    Args:
        folder: local folder.
        variant: the middle part of the file names, such as `fp16` in `diffusion_pytorch_model.fp16.safetensors`.

    Returns:
        The configuration, and every parameter on the CPU in the file's dtype and our layout.

    Raises:
        UserError: no such folder or files, a damaged file, parameters missing, unexpected or of another shape (named).
    """
    folder = Path(folder)
    config = read_config(folder)
    weights: dict[str, Tensor] = {}
    source: dict[str, str] = {}
    for path in _weight_files(folder, variant):
        try:
            part = load_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{path} cannot be read as safetensors: {error}", fix="download or export it again"
            ) from None
        for name, tensor in part.items():
            if name in source:
                raise UserError(f"{folder}: parameter {name} is in two files", found=f"{source[name]}, {path.name}")
            source[name] = path.name
            weights[name] = interleave(name, tensor)
    _check_names(config, weights, str(folder))
    return config, weights


def save_weights(
    state_dict: Mapping[str, Tensor],
    config: SanaConfig,
    folder: Path,
    dtype: torch.dtype,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a folder that diffusers' `SanaTransformer2DModel.from_pretrained` and `load_weights` read.

    Each file is written beside its place and renamed; the index and `config.json` come last. Weight files of an
    earlier export in the same folder are removed at the end.

    Args:
        state_dict: every parameter in full, in our layout, on any device; converted one shard at a time.
        config: written as `config.json`.
        folder: created if absent.
        dtype: of the files.
        max_shard_bytes: files grow no larger than this unless one tensor does.

    Raises:
        UserError: parameters missing, unexpected or of another shape (named); the folder cannot be written.
    """
    folder = Path(folder)
    _check_names(config, state_dict, "the model to be saved")
    shards: list[list[str]] = [[]]
    room, total = max_shard_bytes, 0
    for name in expected_shapes(config):
        size = state_dict[name].numel() * dtype.itemsize
        if shards[-1] and size > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= size
        total += size

    written: list[str] = []
    place: dict[str, str] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, names in enumerate(shards, 1):
            suffix = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
            file = f"{WEIGHTS_STEM}{suffix}.safetensors"
            part = {
                name: deinterleave(name, state_dict[name].detach()).to(device="cpu", dtype=dtype).contiguous()
                for name in names
            }
            temporary = folder / f"{file}.tmp"
            save_file(part, temporary, metadata={"format": "pt"})
            os.replace(temporary, folder / file)
            written.append(file)
            place.update(dict.fromkeys(names, file))
        if len(shards) > 1:
            index = f"{WEIGHTS_STEM}.safetensors.index.json"
            _write_json(folder / index, {"metadata": {"total_size": total}, "weight_map": dict(sorted(place.items()))})
            written.append(index)
        _write_json(folder / "config.json", config.to_dict())
        for path in folder.glob(f"{WEIGHTS_STEM}*.safetensors*"):
            if path.name not in written:
                path.unlink()
    except OSError as error:
        raise UserError(f"the transformer cannot be written to {folder}: {error}") from error


def with_sample_size(config: SanaConfig, sample_size: int) -> SanaConfig:
    """The same model at another base resolution, where that changes no value: without a position embedding only
    `SanaPipeline`'s choice of aspect-ratio bins depends on it.

    Raises:
        ConfigError: the model has a position embedding, whose base is the sample size.
    """
    if config.interpolation_scale is not None and sample_size != config.sample_size:
        raise ConfigError(
            "sample_size is the base of this model's position embedding and cannot be changed",
            expected=config.sample_size,
            found=sample_size,
        )
    return replace(config, sample_size=sample_size)


def _weight_files(folder: Path, variant: str | None) -> list[Path]:
    middle = f".{variant}" if variant else ""
    single = folder / f"{WEIGHTS_STEM}{middle}.safetensors"
    indices = [
        folder / f"{WEIGHTS_STEM}.safetensors.index{middle}.json",
        folder / f"{WEIGHTS_STEM}{middle}.safetensors.index.json",
    ]
    index = next((path for path in indices if path.is_file()), None)
    if single.is_file():
        if index is not None:
            raise UserError(
                f"{folder} has both {single.name} and {index.name}", fix="remove the one that is out of date"
            )
        return [single]
    if index is None:
        there = sorted(path.name for path in folder.glob("*") if ".safetensors" in path.name or path.suffix == ".bin")
        raise UserError(
            f"{folder} has no weights" + (f" of variant {variant!r}" if variant else ""),
            expected=f"{single.name} or {indices[0].name}",
            found=", ".join(there) or "no weight files",
            fix="set model.weights.variant to the middle part of the files' names (null where there is none)",
        )
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{index} cannot be read as an index of shards: {error!r}") from None
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise UserError(f"{index} names shards that are not there: {_some(absent)}", fix="download them again")
    return [folder / name for name in names]


def _check_names(config: SanaConfig, weights: Mapping[str, Tensor], where: str) -> None:
    shapes = expected_shapes(config)
    missing = [name for name in shapes if name not in weights]
    unexpected = [name for name in weights if name not in shapes]
    if missing or unexpected:
        parts = [f"missing {_some(missing)}"] * bool(missing) + [f"unexpected {_some(unexpected)}"] * bool(unexpected)
        raise UserError(
            f"{where} does not hold the parameters of its configuration: {'; '.join(parts)}",
            expected=f"{len(shapes)} parameters",
            found=f"{len(weights)}",
        )
    for name, shape in shapes.items():
        if tuple(weights[name].shape) != shape:
            raise UserError(
                f"{where}: parameter {name} has another shape than its configuration says",
                expected=list(shape),
                found=list(weights[name].shape),
            )


def _some(names: Iterable[str], limit: int = 8) -> str:
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)
