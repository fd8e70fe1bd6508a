"""Layers of the Sana transformer in plain PyTorch, with the parameter names of diffusers' `SanaTransformer2DModel`.

The block takes plain tensors, so that checkpointing, FSDP2 and pipeline stages wrap it from outside; it knows no
strategy. Linear attention stays in float32 under autocast, unlike diffusers', and any strategy can cut the channels of
`GLUMBConv`. Tests compare outputs and gradients with diffusers'. `SanaEnds` is what precedes and follows the blocks.

Architecture and constants: Sana (arXiv 2410.10629), SANA-1.5 (arXiv 2501.18427) and the defaults of diffusers' class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sana_pipe.train.kernels.gated_convolution import gated_convolution
from sana_pipe.train.kernels.linear_attention import joined_linear_attention, linear_attention
from sana_pipe.train.kernels.packed_attention import PackedRows, packed_attention
from sana_pipe.train.models.adapters.low_rank import joined_products
from sana_pipe.train.models.layers import SINUSOID_WIDTH, RMSNorm, timestep_sinusoid
from sana_pipe.train.models.sana_shape import Numerics, SanaShape

_SELF_NORM_EPS = 1e-5
_MASK_BIAS = -10_000.0


class _Attention(nn.Module):
    """Projections of self and cross attention. Head counts follow from the projections' widths at run time, so that the
    module also works on tensor-parallel shards."""

    norm_q: RMSNorm | None
    norm_k: RMSNorm | None

    def __init__(
        self,
        dim: int,
        context_dim: int,
        heads: int,
        head_dim: int,
        bias: bool,
        dropout: float,
        norm_eps: float | None,
    ):
        super().__init__()
        inner = heads * head_dim
        self.head_dim = head_dim
        self.norm_q = None if norm_eps is None else RMSNorm(inner, eps=norm_eps)
        self.norm_k = None if norm_eps is None else RMSNorm(inner, eps=norm_eps)
        self.to_q = nn.Linear(dim, inner, bias=bias)
        self.to_k = nn.Linear(context_dim, inner, bias=bias)
        self.to_v = nn.Linear(context_dim, inner, bias=bias)
        self.to_out = nn.ModuleList([nn.Linear(inner, dim), nn.Dropout(dropout)])

    def project(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of `x`, keys and values of `context`, each (B, tokens, heads*head_dim)."""
        return *self.normalise(self.to_q(x), self.to_k(context)), self.to_v(context)

    def normalise(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys after their norms, if the model has these."""
        if self.norm_q is None or self.norm_k is None:
            return query, key
        return self.norm_q(query), self.norm_k(key)

    def output(self, x: Tensor) -> Tensor:
        for layer in self.to_out:
            x = layer(x)
        return x


class SelfAttention(_Attention):
    """Linear attention over image tokens. Projections are computed as one product, adapted or not; a strategy that
    replaces their class (tensor parallelism, compressed activations) has three."""

    eps: float
    joined = "to_q", "to_k", "to_v"
    """Layers of one input and one product; adapted they share the masks of a dropout, even if a strategy parts them."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.output(self._attended(x).to(x.dtype))
        return out.clamp(-65504, 65504) if x.dtype == torch.float16 else out

    def _attended(self, x: Tensor) -> Tensor:
        joined = joined_products(x, [getattr(self, name) for name in self.joined])
        if joined is None:
            return linear_attention(*self.project(x, x), self.head_dim, self.eps)
        if self.norm_q is None:
            return joined_linear_attention(joined, self.head_dim, self.eps)
        query, key, value = joined.chunk(3, dim=-1)
        return linear_attention(*self.normalise(query, key), value, self.head_dim, self.eps)


class CrossAttention(_Attention):
    """Softmax attention of image tokens over caption tokens."""

    def forward(self, x: Tensor, captions: Tensor, mask_bias: Tensor | PackedRows) -> Tensor:
        """`mask_bias` is (B, 1, 1, L), 0 where attention is allowed and -10000 elsewhere, for captions (B, L, D); or
        `PackedRows`, for captions (T, D) without padding."""
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in self.project(x, captions))
        value = value.to(query.dtype)  # under autocast the norms leave float32, the value projection bf16
        if isinstance(mask_bias, PackedRows):
            return self.output(packed_attention(query, key, value, mask_bias).flatten(2))
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask_bias.to(query.dtype))
        return self.output(out.transpose(1, 2).flatten(2))


class _Pointwise(nn.Conv2d):
    """A 1x1 convolution of tokens (.., channels): a matrix product with the convolution's weight."""

    of_tokens = True

    def __init__(self, channels: int, results: int, bias: bool = True):
        super().__init__(channels, results, 1, bias=bias)

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(input, weight.flatten(1), bias)


class _GatedDepthwise(nn.Conv2d):
    """(B, height, width, 2H) -> (B, height, width, H): SiLU, 3x3 depthwise, value * SiLU(gate)."""

    def __init__(self, hidden: int):
        super().__init__(2 * hidden, 2 * hidden, 3, padding=1, groups=2 * hidden)

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert bias is not None
        return gated_convolution(input, weight, bias)


class GLUMBConv(nn.Module):
    """Gated inverted bottleneck: 1x1 up to 2H, SiLU, 3x3 depthwise, value * SiLU(gate), 1x1 down.

    Channels of the first two convolutions are interleaved: value i is channel 2i, its gate channel 2i+1. So any
    contiguous slice of channels is a valid smaller GLUMBConv. diffusers' order (all values, all gates) is in files
    only."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.conv_inverted = _Pointwise(dim, 2 * hidden)
        self.conv_depth = _GatedDepthwise(hidden)
        self.conv_point = _Pointwise(hidden, dim, bias=False)

    def forward(self, x: Tensor, height: int, width: int) -> Tensor:
        """(B, height*width, D) -> (B, height*width, D)."""
        batch, tokens, _ = x.shape
        x = self.conv_depth(self.conv_inverted(x).unflatten(1, (height, width)))
        return self.conv_point(x.view(batch, tokens, -1))


class SanaTransformerBlock(nn.Module):
    """Linear self attention, cross attention, gated convolution; the first and last are modulated by the timestep."""

    def __init__(self, config: SanaShape, numerics: Numerics):
        super().__init__()
        dim, qk = config.inner_dim, config.qk_norm is not None
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False, eps=config.norm_eps)
        self.attn1 = SelfAttention(
            dim,
            dim,
            config.num_attention_heads,
            config.attention_head_dim,
            bias=False,
            dropout=config.dropout,
            norm_eps=_SELF_NORM_EPS if qk else None,
        )
        self.attn1.eps = numerics.attention_eps
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False, eps=config.norm_eps)
        self.attn2 = CrossAttention(
            dim,
            config.cross_attention_dim,
            config.num_cross_attention_heads,
            config.cross_attention_head_dim,
            bias=True,
            dropout=config.dropout,
            norm_eps=numerics.cross_norm_eps if qk else None,
        )
        self.ff = GLUMBConv(dim, config.glu_channels)
        self.scale_shift_table = nn.Parameter(torch.randn(6, dim) / dim**0.5)

    def forward(
        self,
        hidden: Tensor,
        captions: Tensor,
        mask_bias: Tensor | PackedRows,
        modulation: Tensor,
        height: int,
        width: int,
    ) -> Tensor:
        """One block. Matrix products take the dtype of `captions`; norms, gates and sums that of `hidden`.

        Args:
            hidden: (B, height*width, D) image tokens, row by row; the dtype of `captions`, or float32.
            captions: (B, L, D) projected and normalised caption tokens; or (T, D), without padding.
            mask_bias: (B, 1, 1, L) additive bias, 0 or -10000; or `PackedRows` for unpadded captions.
            modulation: (B, 6, D) the timestep's shift, scale and gate for attention, then for the convolution; in the
                dtype of `hidden`, or cast here.
            height, width: of the token grid.

        Returns:
            (B, height*width, D), dtype of `hidden`.
        """
        hidden = hidden.unflatten(1, (height, width)).flatten(1, 2)  # compiled, other sizes of tokens mean copies
        table = self.scale_shift_table + modulation.to(hidden.dtype)
        shift1, scale1, gate1, shift2, scale2, gate2 = table.chunk(6, dim=1)

        x = self.norm1(hidden) * (1 + scale1) + shift1
        hidden = hidden + gate1 * self.attn1(x.to(captions.dtype))

        hidden = hidden + self.attn2(hidden.to(captions.dtype), captions, mask_bias)

        x = self.norm2(hidden) * (1 + scale2) + shift2
        return hidden + gate2 * self.ff(x.to(captions.dtype), height, width)


def position_embedding(
    height: int, width: int, dim: int, *, base: int, scale: float, device: torch.device | None = None
) -> Tensor:
    """Sine/cosine position embedding of a token grid, (height*width, dim) float32.

    Coordinates are stretched so that any grid spans `base / scale` units. The first half of the channels carries the
    column and the second half the row, each half sines then cosines. Angles in float64.
    """
    count = dim // 4
    omega = 1.0 / 10_000 ** (torch.arange(count, dtype=torch.float64, device=device) / count)

    def table(length: int) -> Tensor:
        position = torch.arange(length, dtype=torch.float32, device=device) / (length / base) / scale
        angle = position.double()[:, None] * omega[None]
        return torch.cat([angle.sin(), angle.cos()], dim=1).float()

    by_row = table(height)[:, None].expand(-1, width, -1)
    by_column = table(width)[None].expand(height, -1, -1)
    return torch.cat([by_column, by_row], dim=-1).flatten(0, 1)


def mask_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, L) bool, True = attend -> (B, 1, 1, L) in `dtype`, 0 or -10000."""
    return (~mask).to(dtype)[:, None, None, :] * _MASK_BIAS


class PatchEmbed(nn.Module):
    """Latents to tokens: a strided convolution, plus a position embedding if `interpolation_scale` is set (not for Sana
    at 512 and 1024 px). The embedding is computed for each shape instead of being a buffer, which a model on the meta
    device would lose and which could be cast to bf16."""

    def __init__(self, config: SanaShape):
        super().__init__()
        self.patch_size = config.patch_size
        self.base = config.sample_size // config.patch_size
        self.scale = config.interpolation_scale
        self.proj = nn.Conv2d(config.in_channels, config.inner_dim, config.patch_size, stride=config.patch_size)

    def forward(self, latents: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """(B, C, H, W) -> (B, H/p * W/p, D) in `dtype` (None: the convolution's), contiguous: torch's
        `save_on_cpu` rebuilds saved tensors contiguous, and recomputation would otherwise find other strides."""
        x = self.proj(latents)
        height, width = x.shape[-2:]
        x = x.flatten(2).transpose(1, 2)
        x = x if dtype is None else x.to(dtype)
        if self.scale is not None:
            embedding = position_embedding(
                height, width, x.shape[-1], base=self.base, scale=self.scale, device=x.device
            )
            x = (x + embedding).to(x.dtype)
        return x.contiguous()


class TwoLayers(nn.Module):
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
        self.timestep_embedder = TwoLayers(SINUSOID_WIDTH, dim, nn.SiLU())


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
        """(B, N, D) in the dtype of `hidden`."""
        shift, scale = (table[None] + embedded[:, None].to(hidden.dtype)).chunk(2, dim=1)
        return self.norm(hidden) * (1 + scale) + shift


def _packed(mask: Tensor, tokens: int) -> PackedRows:
    """`PackedRows` from the mask (B, L), computed on the device without synchronisation."""
    ends = F.pad(mask.sum(1, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))
    images = torch.arange(0, (len(mask) + 1) * tokens, tokens, dtype=torch.int32, device=mask.device)
    return PackedRows(ends, images, mask.shape[1])


class SanaEnds(nn.Module, ABC):
    """The modules before and after the blocks. The whole model has all of these modules, a pipeline stage some of
    them."""

    config: SanaShape
    numerics: Numerics
    patch_embed: PatchEmbed
    time_embed: TimeEmbed
    caption_projection: TwoLayers
    caption_norm: RMSNorm
    scale_shift_table: nn.Parameter
    norm_out: ModulatedNorm
    proj_out: nn.Linear

    @property
    @abstractmethod
    def blocks(self) -> list[nn.Module]:
        """The transformer blocks in order."""

    def add_inputs(self, config: SanaShape) -> None:
        """Add the modules that precede the blocks."""
        dim = config.inner_dim
        self.patch_embed = PatchEmbed(config)
        self.time_embed = TimeEmbed(dim)
        self.caption_projection = TwoLayers(config.caption_channels, dim, nn.GELU(approximate="tanh"))
        self.caption_norm = RMSNorm(dim, eps=1e-5)

    def grid(self, latents: Tensor, mask: Tensor) -> tuple[int, int]:
        """Height and width in tokens of these latents. Refused are sides that the patch size does not divide, and a
        mask that is not bool."""
        p = self.config.patch_size
        if latents.shape[-2] % p or latents.shape[-1] % p:
            raise ValueError(f"latents of {tuple(latents.shape[-2:])} cannot be cut into patches of {p}x{p}")
        if mask.dtype != torch.bool:
            raise TypeError(f"the caption mask must be bool (True = attend), not {mask.dtype}")
        return latents.shape[-2] // p, latents.shape[-1] // p

    def embed(
        self, latents: Tensor, captions: Tensor, mask: Tensor, timesteps: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | PackedRows, Tensor, Tensor]:
        """Compute what the blocks are given; arguments as in `SanaTransformer.forward`.

        Returns:
            hidden (B, N, D), float32 if `numerics` says so, captions (B, L, D) or (T, D), mask_bias (B, 1, 1, L) or
            `PackedRows`, modulation (B, 6, D), embedded (B, D).
        """
        hidden = self.patch_embed(latents, torch.float32 if self.numerics.fp32_residual else None)
        context, bias, modulation, embedded = self.conditions(captions, mask, timesteps, latents.dtype)
        return hidden, context, _packed(mask, hidden.shape[1]) if bias is None else bias, modulation, embedded

    def conditions(
        self, captions: Tensor, mask: Tensor, timesteps: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Compute what `embed` returns besides the tokens; None in place of `PackedRows`. Many small operations;
        compiled they are few (`parallel.compile`)."""
        modulation, embedded = self.time_embed(timesteps, dtype)
        context = self.caption_norm(self.caption_projection(captions))
        return context, mask_bias(mask, dtype) if captions.ndim == 3 else None, modulation, embedded

    def head(self, hidden: Tensor, embedded: Tensor, height: int, width: int) -> Tensor:
        """Compute the output from the last block's: (B, height*width, D) tokens -> (B, C, height*p, width*p),
        contiguous."""
        p = self.config.patch_size
        x = self.proj_out(self.norm_out(hidden, embedded, self.scale_shift_table).to(embedded.dtype))
        x = x.reshape(x.shape[0], height, width, p, p, -1).permute(0, 5, 1, 3, 2, 4)
        return x.reshape(x.shape[0], -1, height * p, width * p).contiguous()
