"""NVlabs' from-scratch initialisation of Sana, one parameter at a time.

Why by parameter: a value depends only on the seed and the parameter's name, so a process draws just the parameters that
it holds, and every parallel strategy starts from the same weights.
Price: the rules are keyed by names, which have to follow the module tree of `models.sana`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sana_pipe.train.models.sana_shape import SanaShape
from sana_pipe.train.models.spec import generator_of


def initial_value(name: str, shape: tuple[int, ...], seed: int, config: SanaShape) -> Tensor:
    """NVlabs' from-scratch value of one parameter, float32 on the CPU, in our layout.

    Rules (NVlabs/Sana `diffusion/model/nets/`: `sana_multi_scale.py`, `sana.py`; `diffusion/model/norms.py`):
    linear weights Xavier-uniform (over the fused qkv and kv matrices they are slices of), linear biases 0; patch
    convolution Xavier-uniform as a linear layer; timestep and caption layers N(0, 0.02); caption norm 0.01, other
    norms 1; scale_shift_table N(0, 1/D); GLUMBConv and the patch bias as PyTorch's convolutions (uniform within
    1/sqrt(fan in)).
    """
    owner, _, kind = name.rpartition(".")
    layer = owner.rpartition(".")[2]
    generator = generator_of(seed, name)

    def uniform(bound: float) -> Tensor:
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)

    def normal(std: float) -> Tensor:
        return torch.empty(shape).normal_(0.0, std, generator=generator)

    if kind == "scale_shift_table":
        return normal(shape[-1] ** -0.5)
    if name == "caption_norm.weight":
        return torch.full(shape, 0.01)
    if layer in ("norm_q", "norm_k"):
        return torch.ones(shape)
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
