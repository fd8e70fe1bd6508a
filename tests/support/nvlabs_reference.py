"""One NVlabs training step, written from their formulas and with their parameter names; nothing of `pipeline` is used.

Sources: NVlabs/Sana `diffusion/model/nets/{sana_multi_scale,sana_blocks,basic_modules}.py`, `diffusion/model/norms.py`,
`diffusion/utils/optimizer.py`, `train_scripts/train.py`; arXiv 2307.02047 (CAME), 1711.05101 (AdamW). Precision is that
of their autocast on a GPU: products in bf16 on fp32 parameters, layer norm, linear attention and what the fp32
parameters promote (gates, residual) in fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    depth: int
    linear_head_dim: int
    cross_heads: int


def _full(x: Tensor) -> Tensor:
    """In float32, or in float64 if it is that."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return F.linear(x, w[name + ".weight"], w.get(name + ".bias"))


def _layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(_full(x), x.shape[-1:], eps=1e-6)  # CUDA's autocast casts its input; the CPU's does not


def _rms_norm(w: Weights, name: str, x: Tensor, eps: float) -> Tensor:
    if name not in w:
        return x
    full = _full(x)
    return (w[name] * (full / (full.square().mean(-1, keepdim=True) + eps).sqrt())).to(x.dtype)


def _linear_attention(w: Weights, name: str, x: Tensor, shape: Shape) -> Tensor:
    query, key, value = _linear(w, name + ".qkv", x).chunk(3, dim=-1)
    query = _rms_norm(w, name + ".q_norm.weight", query, 1e-5)
    key = _rms_norm(w, name + ".k_norm.weight", key, 1e-5)
    q, k, v = (t.unflatten(-1, (-1, shape.linear_head_dim)).transpose(1, 2) for t in (query, key, value))
    with torch.autocast(x.device.type, enabled=False):
        q, k, v = _full(F.relu(q)), _full(F.relu(k)), _full(v)
        sums = k.transpose(2, 3) @ v
        out = (q @ sums) / (q @ k.sum(2)[..., None] + 1e-8)
    return _linear(w, name + ".proj", out.to(query.dtype).transpose(1, 2).flatten(2))


def _cross_attention(w: Weights, name: str, x: Tensor, y: Tensor, mask: Tensor, shape: Shape) -> Tensor:
    query = _rms_norm(w, name + ".q_norm.weight", _linear(w, name + ".q_linear", x), 1e-6)
    key, value = _linear(w, name + ".kv_linear", y).chunk(2, dim=-1)
    key = _rms_norm(w, name + ".k_norm.weight", key, 1e-6)
    q, k, v = (t.unflatten(-1, (shape.cross_heads, -1)).transpose(1, 2) for t in (query, key, value))
    bias = (1 - mask.to(q.dtype))[:, None, None] * -10000.0
    return _linear(
        w, name + ".proj", F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)
    )


def _mlp(w: Weights, name: str, x: Tensor, height: int, width: int) -> Tensor:
    def conv(part: str, z: Tensor, **options: int) -> Tensor:
        return F.conv2d(z, w[f"{name}.{part}.conv.weight"], w.get(f"{name}.{part}.conv.bias"), **options)

    z = x.transpose(1, 2).unflatten(2, (height, width))
    z = F.silu(conv("inverted_conv", z))
    value, gate = conv("depth_conv", z, padding=1, groups=z.shape[1]).chunk(2, dim=1)
    return conv("point_conv", value * F.silu(gate)).flatten(2).transpose(1, 2)


def forward(w: Weights, shape: Shape, x: Tensor, timestep: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """The predicted flow. x (B, C, H, W), timestep (B,) whole numbers, y (B, L, caption), mask (B, L); patch size 1."""
    height, width = x.shape[-2:]
    tokens = F.conv2d(x, w["x_embedder.proj.weight"], w["x_embedder.proj.bias"]).flatten(2).transpose(1, 2)
    frequencies = torch.exp(-math.log(10000) * torch.arange(128) / 128)
    angles = timestep.to(y.dtype)[:, None] * frequencies[None]
    t = torch.cat([angles.cos(), angles.sin()], dim=1)
    t = _linear(w, "t_embedder.mlp.2", F.silu(_linear(w, "t_embedder.mlp.0", t)))
    modulation = _linear(w, "t_block.1", F.silu(t)).unflatten(1, (6, -1))
    y = _linear(w, "y_embedder.y_proj.fc2", F.gelu(_linear(w, "y_embedder.y_proj.fc1", y), approximate="tanh"))
    y = _rms_norm(w, "attention_y_norm.weight", y, 1e-5)
    for number in range(shape.depth):
        block = f"blocks.{number}"
        shift1, scale1, gate1, shift2, scale2, gate2 = (w[block + ".scale_shift_table"] + modulation)[
            :, :, None
        ].unbind(1)
        z = _layer_norm(tokens) * (1 + scale1) + shift1
        tokens = tokens + gate1 * _linear_attention(w, block + ".attn", z, shape)
        tokens = tokens + _cross_attention(w, block + ".cross_attn", tokens, y, mask, shape)
        z = _layer_norm(tokens) * (1 + scale2) + shift2
        tokens = tokens + gate2 * _mlp(w, block + ".mlp", z, height, width)
    shift, scale = (w["final_layer.scale_shift_table"] + t[:, None])[:, :, None].unbind(1)
    out = _linear(w, "final_layer.linear", _layer_norm(tokens) * (1 + scale) + shift)
    return out.transpose(1, 2).unflatten(2, (height, width))


def loss(
    w: Weights, shape: Shape, z: Tensor, noise: Tensor, logit: Tensor, y: Tensor, mask: Tensor, bf16: bool
) -> Tensor:
    """Mean squared error of the flow at logit-normal times, flow shift 3."""
    level = (torch.sigmoid(logit.double()) * 1000).long().double() / 1000
    sigma = 3 * level / (1 + 2 * level)
    timestep = (1000 * sigma + 1e-9).floor().long()
    s = sigma.to(noise.dtype).view(-1, 1, 1, 1)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        prediction = forward(w, shape, (1 - s) * z + s * noise, timestep, y, mask)
    return (noise - z - _full(prediction)).square().mean(dim=(1, 2, 3)).mean()


def learning_rate(base: float, batch: int, warmup: int, step: int) -> float:
    """Of step `step`, from 0: `auto_lr` by the square root, constant after a linear warm-up from 0."""
    return base * math.sqrt(batch / 256) * min(1.0, step / warmup)


def clip(gradients: Weights, limit: float) -> None:
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    for gradient in gradients.values():
        gradient.mul_(min(1.0, limit / (float(norm) + 1e-6)))


@dataclass
class AdamW:
    """torch.optim.AdamW as NVlabs configure it: every parameter decays."""

    decay: float
    eps: float = 1e-8
    step: int = 0
    state: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def update(self, w: Weights, gradients: Weights, rate: float) -> None:
        self.step += 1
        for name, g in gradients.items():
            m, v = self.state.setdefault(name, (torch.zeros_like(g), torch.zeros_like(g)))
            m.mul_(0.9).add_(0.1 * g)
            v.mul_(0.999).add_(0.001 * g * g)
            w[name].mul_(1 - rate * self.decay)
            unbiased = (v / (1 - 0.999**self.step)).sqrt() + self.eps
            w[name].sub_(rate * m / (1 - 0.9**self.step) / unbiased)


@dataclass
class CAME:
    """NVlabs' CAMEWrapper: Linear layers and 1x1 convolutions are factored, everything else is not."""

    decay: float
    state: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def update(self, w: Weights, gradients: Weights, rate: float) -> None:
        for name, gradient in gradients.items():
            matrix = gradient.ndim == 2 or (gradient.ndim == 4 and gradient.shape[2:] == (1, 1))
            g = gradient.flatten(1) if matrix else gradient
            state = self.state.setdefault(name, {})
            u = g * self._inverse_root(state, "sq", g.square() + 1e-30, 0.999, matrix)
            u = u / max(1.0, float(u.square().mean().sqrt()))
            m = self._moved(state, "m", u, 0.9)
            deviation = (u - m).square() + 1e-16
            step = m * self._inverse_root(state, "res", deviation, 0.9999, True) if matrix else m
            w[name].mul_(1 - rate * self.decay)
            w[name].sub_(rate * step.view_as(w[name]))

    @staticmethod
    def _moved(state: dict[str, Tensor], name: str, value: Tensor, beta: float) -> Tensor:
        state[name] = beta * state.get(name, torch.zeros_like(value)) + (1 - beta) * value
        return state[name]

    def _inverse_root(self, state: dict[str, Tensor], name: str, squares: Tensor, beta: float, matrix: bool) -> Tensor:
        """Of the running mean of squares; of a matrix, of its approximation by rows and columns."""
        if not matrix:
            return self._moved(state, name, squares, beta).rsqrt()
        rows = self._moved(state, name + "_row", squares.mean(1), beta)
        columns = self._moved(state, name + "_col", squares.mean(0), beta)
        return (rows / rows.mean()).rsqrt()[:, None] * columns.rsqrt()[None]
