"""The Z-Image transformer in plain PyTorch, padded and masked, with the parameter names of diffusers' class.

Pictures and captions are tokens of one sequence. diffusers' `ZImageTransformer2DModel` takes lists of samples and cuts
each to its length; here shapes depend on no value, so that planning, compilation and FSDP2 work. A sample's own padding
to a multiple of 32 (`x_pad_token`, `cap_pad_token`) takes part in attention, as there; what a batch adds beyond it is
masked. Tests compare outputs and gradients with diffusers'.

Architecture and constants: the class in diffusers 0.42; Z-Image (arXiv 2511.22699).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sana_pipe.train.models.layers import SINUSOID_WIDTH, RMSNorm, timestep_sinusoid
from sana_pipe.train.models.zimage_shape import ZImageShape

MULTIPLE = 32
"""Tokens of a picture and of a caption are padded to a multiple of it."""
_TIMESTEPS = 1000.0
_ATTENTION_EPS = 1e-5
_FINAL_EPS = 1e-6


def padded(count: int) -> int:
    """Tokens with the padding of a sample."""
    return -(-count // MULTIPLE) * MULTIPLE


class _Attention(nn.Module):
    """Softmax attention of all tokens, with normalised and rotated queries and keys."""

    def __init__(self, dim: int, head_dim: int):
        super().__init__()
        self.head_dim = head_dim
        self.norm_q = RMSNorm(head_dim, eps=_ATTENTION_EPS)
        self.norm_k = RMSNorm(head_dim, eps=_ATTENTION_EPS)
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_k = nn.Linear(dim, dim, bias=False)
        self.to_v = nn.Linear(dim, dim, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(dim, dim, bias=False)])

    def forward(self, x: Tensor, rope: Tensor, mask: Tensor | None) -> Tensor:
        """(B, S, D) -> (B, S, D). rope, mask: see `ZImageBlock.forward`."""
        query, key, value = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.to_q, self.to_k, self.to_v))
        query, key = rotated(self.norm_q(query), rope), rotated(self.norm_k(key), rope)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.to_out[0](out.transpose(1, 2).flatten(2))


class _FeedForward(nn.Module):
    """w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class ZImageBlock(nn.Module):
    """Attention and a gated product, each between two norms. modulated: the timestep scales the inputs and gates the
    results."""

    def __init__(self, shape: ZImageShape, modulated: bool):
        super().__init__()
        dim = shape.dim
        self.attention = _Attention(dim, shape.head_dim)
        self.feed_forward = _FeedForward(dim, shape.hidden)
        self.attention_norm1 = RMSNorm(dim, eps=shape.norm_eps)
        self.ffn_norm1 = RMSNorm(dim, eps=shape.norm_eps)
        self.attention_norm2 = RMSNorm(dim, eps=shape.norm_eps)
        self.ffn_norm2 = RMSNorm(dim, eps=shape.norm_eps)
        self.modulated = modulated
        if modulated:
            self.adaLN_modulation = nn.Sequential(nn.Linear(shape.time_dim, 4 * dim))

    def forward(self, tokens: Tensor, rope: Tensor, mask: Tensor | None, time: Tensor) -> Tensor:
        """One block.

        Args:
            tokens: (B, S, D).
            rope: (2, B, S, 1, head_dim / 2) float32, cosines and sines of the tokens' positions.
            mask: (B, 1, 1, S) bool, True = attend to this token; None: to all.
            time: (B, time_dim), the embedded timestep.

        Returns:
            (B, S, D).
        """
        x = self.attention_norm1(tokens)
        if not self.modulated:
            tokens = tokens + self.attention_norm2(self.attention(x, rope, mask))
            return tokens + self.ffn_norm2(self.feed_forward(self.ffn_norm1(tokens)))
        scale1, gate1, scale2, gate2 = self.adaLN_modulation(time)[:, None].chunk(4, dim=-1)
        x = self.attention_norm2(self.attention(x * (1 + scale1), rope, mask))
        tokens = tokens + gate1.tanh() * x
        x = self.ffn_norm2(self.feed_forward(self.ffn_norm1(tokens) * (1 + scale2)))
        return tokens + gate2.tanh() * x


class _TimestepEmbedder(nn.Module):
    """Timestep to its embedding."""

    def __init__(self, hidden: int, dim: int):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(SINUSOID_WIDTH, hidden), nn.SiLU(), nn.Linear(hidden, dim))

    def forward(self, timesteps: Tensor, dtype: torch.dtype) -> Tensor:
        """(B,) float32 -> (B, time_dim), computed in `dtype`."""
        return self.mlp(timestep_sinusoid(timesteps).to(dtype))


class _FinalLayer(nn.Module):
    """Tokens to the values of their patches, scaled by the timestep."""

    def __init__(self, shape: ZImageShape):
        super().__init__()
        self.norm_final = nn.LayerNorm(shape.dim, elementwise_affine=False, eps=_FINAL_EPS)
        self.linear = nn.Linear(shape.dim, shape.patch_values)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(shape.time_dim, shape.dim))

    def forward(self, tokens: Tensor, time: Tensor) -> Tensor:
        return self.linear(self.norm_final(tokens) * (1 + self.adaLN_modulation(time)[:, None]))


class ZImageTransformer(nn.Module):
    """Z-Image's transformer. `config` is its shape."""

    def __init__(self, config: ZImageShape):
        super().__init__()
        self.config, dim, refiners = config, config.dim, config.n_refiner_layers
        self.patches = f"{config.patch_size}-1"
        self.all_x_embedder = nn.ModuleDict({self.patches: nn.Linear(config.patch_values, dim)})
        self.all_final_layer = nn.ModuleDict({self.patches: _FinalLayer(config)})
        self.noise_refiner = nn.ModuleList([ZImageBlock(config, modulated=True) for _ in range(refiners)])
        self.context_refiner = nn.ModuleList([ZImageBlock(config, modulated=False) for _ in range(refiners)])
        self.t_embedder = _TimestepEmbedder(config.time_hidden, config.time_dim)
        self.cap_embedder = nn.Sequential(
            RMSNorm(config.cap_feat_dim, eps=config.norm_eps), nn.Linear(config.cap_feat_dim, dim)
        )
        self.x_pad_token = nn.Parameter(torch.empty(1, dim))
        self.cap_pad_token = nn.Parameter(torch.empty(1, dim))
        self.layers = nn.ModuleList([ZImageBlock(config, modulated=True) for _ in range(config.n_layers)])

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks in the order of the forward pass, which strategies wrap one by one."""
        return [*self.noise_refiner, *self.context_refiner, *self.layers]

    @property
    def tensor_parallel_plan(self) -> dict[str, str]:
        """None: `ModelSpec.check_parallel` refuses tensor parallelism."""
        return {}

    @property
    def adapter_targets(self) -> dict[str, tuple[str, ...]]:
        """The names that `train.adapter.targets` may have: ends of module names."""
        projections = tuple(f"attention.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0"))
        return {
            "attention": projections,
            "all": (*projections, *(f"feed_forward.{name}" for name in ("w1", "w2", "w3"))),
        }

    def forward(self, latents: Tensor, captions: Tensor, mask: Tensor, timesteps: Tensor) -> Tensor:
        """Predict the flow (noise minus data).

        Args:
            latents: (B, C, H, W) noised latents, in the model's dtype.
            captions: (B, L, cap_feat_dim) text rows, in the model's dtype; or (T, cap_feat_dim), only the rows that the
                mask shows, one sample after the other.
            mask: (B, L) bool, True = a row of the caption. The True of each sample come first.
            timesteps: (B,) float32 in [0, 1000], 1000: noise.

        Returns:
            (B, C, H, W) in the model's dtype.
        """
        size = self.config.patch_size
        if latents.shape[-2] % size or latents.shape[-1] % size:
            raise ValueError(f"latents of {tuple(latents.shape[-2:])} cannot be cut into patches of {size}x{size}")
        if mask.dtype != torch.bool:
            raise TypeError(f"the caption mask must be bool (True = attend), not {mask.dtype}")
        height, width = latents.shape[-2] // size, latents.shape[-1] // size
        tokens = self.picture_tokens(latents, height, width)
        text, time, rope, attended = self.conditions(captions, mask, timesteps, height, width, latents.dtype)
        count = tokens.shape[1]
        for block in self.noise_refiner:
            tokens = block(tokens, rope[:, :, :count], None, time)
        for block in self.context_refiner:
            text = block(text, rope[:, :, count:], attended[..., count:], time)
        tokens = torch.cat([tokens, text], dim=1)
        for block in self.layers:
            tokens = block(tokens, rope, attended, time)
        return self.head(tokens[:, : height * width], time, height, width)

    def picture_tokens(self, latents: Tensor, height: int, width: int) -> Tensor:
        """(B, C, H, W) -> (B, height * width and the padding, D), row by row."""
        size = self.config.patch_size
        patches = latents.unflatten(3, (width, size)).unflatten(2, (height, size)).permute(0, 2, 4, 3, 5, 1)
        tokens = self.all_x_embedder[self.patches](patches.flatten(3).flatten(1, 2))
        count = height * width
        tokens = F.pad(tokens, (0, 0, 0, padded(count) - count))
        is_padding = torch.arange(tokens.shape[1], device=tokens.device) >= count
        return torch.where(is_padding[:, None], self.x_pad_token, tokens)

    def conditions(
        self, captions: Tensor, mask: Tensor, timesteps: Tensor, height: int, width: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute what the blocks are given besides the picture's tokens; many small operations, compiled few
        (`parallel.compile`).

        Returns:
            Tokens of the captions (B, L and the padding, D); the embedded timestep (B, time_dim); cosines and sines of
            the positions of all tokens (2, B, S, 1, head_dim / 2); the tokens that are attended to (B, 1, 1, S) bool.
        """
        lengths = mask.sum(1)
        rows = padded(mask.shape[1])
        row = torch.arange(rows, device=mask.device)
        if captions.ndim == 2:
            first = lengths.cumsum(0) - lengths
            captions = captions[(first[:, None] + row).clamp(max=len(captions) - 1)]
        else:
            captions = F.pad(captions, (0, 0, 0, rows - captions.shape[1]))
        is_padding = row >= lengths[:, None]
        text = torch.where(is_padding[..., None], self.cap_pad_token, self.cap_embedder(captions))
        lengths = ((lengths + (MULTIPLE - 1)) // MULTIPLE * MULTIPLE).clamp(min=MULTIPLE)
        reversed_time = (_TIMESTEPS - timesteps) / _TIMESTEPS * self.config.t_scale
        time = self.t_embedder(reversed_time, dtype)
        positions = self.positions(lengths, rows, height, width)
        attended = F.pad(row < lengths[:, None], (padded(height * width), 0), value=True)
        return text, time, self.rope(positions), attended[:, None, None]

    def positions(self, lengths: Tensor, rows: int, height: int, width: int) -> Tensor:
        """(B, S, 3) positions of a picture's tokens, (length + 1, row, column), its padding at (0, 0, 0), and of its
        caption's, (1.., 0, 0). lengths: of the captions with their padding."""
        count, device = height * width, lengths.device
        number = torch.arange(count, device=device)
        grid = torch.stack([number // width, number % width], dim=-1)
        picture = torch.cat(
            [(lengths + 1)[:, None, None].expand(-1, count, 1), grid.expand(len(lengths), -1, -1)], dim=-1
        )
        picture = F.pad(picture, (0, 0, 0, padded(count) - count))
        text = F.pad(torch.arange(1, rows + 1, device=device)[:, None], (0, 2)).expand(len(lengths), -1, -1)
        return torch.cat([picture, text], dim=1)

    def rope(self, positions: Tensor) -> Tensor:
        """(B, S, 3) -> (2, B, S, 1, head_dim / 2) float32. Angles in float64, rounded once, as in diffusers."""
        angles = []
        for axis, width in enumerate(self.config.axes_dims):
            exponents = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device) / width
            angles.append(positions[..., axis, None] * (1 / self.config.rope_theta**exponents))
        angle = torch.cat(angles, dim=-1).float().unsqueeze(2)
        return torch.stack([angle.cos(), angle.sin()])

    def head(self, tokens: Tensor, time: Tensor, height: int, width: int) -> Tensor:
        """Compute the output from the picture's tokens (B, height * width, D)."""
        size = self.config.patch_size
        x = self.all_final_layer[self.patches](tokens, time)
        x = x.unflatten(2, (size, size, -1)).unflatten(1, (height, width)).permute(0, 5, 1, 3, 2, 4)
        return -x.flatten(4, 5).flatten(2, 3)

    @classmethod
    def on_meta(cls, config: ZImageShape) -> ZImageTransformer:
        """The model without memory: names and shapes only."""
        with torch.device("meta"):
            return cls(config)


def rotated(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate pairs of neighbours of (B, S, heads, head_dim) by the angles of `rope`, in float32."""
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = rope[0], rope[1]
    turned = torch.stack([first * cosine - second * sine, first * sine + second * cosine], dim=-1)
    return turned.flatten(-2).to(x.dtype)


def parameter_shapes(config: ZImageShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter, in the model's order."""
    return {name: tuple(parameter.shape) for name, parameter in ZImageTransformer.on_meta(config).named_parameters()}
