"""The spec of Z-Image: its shape with all that depends on the architecture, above the module.

The base is trained, not the distilled Z-Image-Turbo, whose few steps a training on plain noise levels undoes: both have
one `config.json`, so a Turbo is known by its name (`check_base`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from sana_pipe.base.errors import ConfigError
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.layers import SINUSOID_WIDTH
from sana_pipe.train.models.spec import Call, DrawnValues, ModelSpec, Values, generator_of
from sana_pipe.train.models.weight_files import FolderWeights, save_folder
from sana_pipe.train.models.zimage import MULTIPLE, ZImageTransformer, padded, parameter_shapes
from sana_pipe.train.models.zimage_shape import ZImageShape

_TURBO = re.compile(r"z[-_ ]?image[-_ ]?turbo", re.IGNORECASE)
_MAX_LENGTH = 512
"""Rows of a caption in `ZImagePipeline`."""
_FUSED = ("to_q", "to_k", "to_v")
_COMFYUI = {"attention.to_out.0": "attention.out", "attention.norm_q": "attention.q_norm"}
_COMFYUI |= {"attention.norm_k": "attention.k_norm"}


@dataclass(frozen=True)
class ZImageConfig(ZImageShape, ModelSpec):
    """The spec of a Z-Image transformer."""

    family = "zimage"
    pipeline = "ZImagePipeline"
    text_kind = "qwen3"
    overflow_in_fp16 = "values inside the transformer"
    dropout = 0.0

    @property
    def caption_channels(self) -> int:
        return self.cap_feat_dim

    @property
    def num_layers(self) -> int:
        return self.n_layers

    @property
    def inner_dim(self) -> int:
        return self.dim

    @property
    def longest_caption(self) -> int:
        """Positions begin at 1, captions are padded, and the picture has the position behind them: 992 of 1024."""
        return (self.axes_lens[0] - 2) // MULTIPLE * MULTIPLE

    @property
    def vae_factors(self) -> tuple[float, float] | None:
        """The factors of Flux's VAE. It has 16 channels, as the VAEs of SD3 and others."""
        return (0.3611, 0.1159) if self.in_channels == 16 else None

    @property
    def described(self) -> str:
        return f"depth {self.n_layers}, width {self.dim}"

    def with_layers(self, count: int) -> ZImageConfig:
        return replace(self, n_layers=count)

    def with_sample_size(self, sample_size: int) -> ZImageConfig:
        """The same: positions are counted, and no field names a resolution."""
        return self

    def check_sides(self, height: int, width: int, compression: int, option: str) -> None:
        super().check_sides(height, width, compression, option)
        limits = [limit * compression * self.patch_size for limit in self.axes_lens[1:]]
        if height > limits[0] or width > limits[1]:
            raise ConfigError(
                f"the model has positions for pictures up to {limits[0]}x{limits[1]} pixels",
                found=f"{height}x{width}",
                fix=option.format(height=min(height, limits[0]), width=min(width, limits[1])),
            )

    def sigmas(self, steps: int) -> list[float]:
        """The levels of `ZImagePipeline`, from 1 to 1 / steps; its scheduler alone would shift the last level twice."""
        return [1 - step / steps for step in range(steps)]

    def call_arguments(self, call: Call) -> dict[str, str]:
        """`guidance_scale` counts from the caption's prediction, `sample.guidance` from that of the empty caption."""
        arguments = {**super().call_arguments(call), "guidance_scale": f"{call.guidance - 1:g}"}
        if call.max_length not in (None, _MAX_LENGTH):
            arguments["max_sequence_length"] = str(call.max_length)
        return arguments

    def check_base(self, names: Sequence[str]) -> None:
        turbo = next((name for name in names if _TURBO.search(name)), None)
        if turbo is not None:
            raise ConfigError(
                "model.weights: Z-Image-Turbo is distilled to eight steps, which a training undoes",
                expected="the base, Tongyi-MAI/Z-Image; a LoRA of it can be loaded into the Turbo, too",
                found=turbo,
                fix="--set model.weights.id=Tongyi-MAI/Z-Image",
            )

    def module(self, train: TrainConfig | None = None) -> nn.Module:
        return ZImageTransformer.on_meta(self)

    def stored(self, place: Path, variant: str | None = None) -> Values:
        return FolderWeights(place, parameter_shapes(self), variant)

    def initial(self, seed: int) -> Values:
        return DrawnValues(parameter_shapes(self), _initial_value, seed, largest=1 << 16)

    def save(
        self,
        weights: Mapping[str, Tensor],
        folder: Path,
        dtype: torch.dtype,
        form: str = "diffusers",
        stem: str = "",
        max_length: int = 300,
    ) -> None:
        save_folder(weights, parameter_shapes(self), self.to_dict(), folder, dtype)

    def joined_parts(self) -> dict[str, list[str]]:
        """ComfyUI joins query, key and value, and has no number of patches in its names."""
        parts: dict[str, list[str]] = {}
        patches = f"{self.patch_size}-1"
        for name in parameter_shapes(self):
            theirs = name.replace(f"all_x_embedder.{patches}", "x_embedder")
            theirs = theirs.replace(f"all_final_layer.{patches}", "final_layer")
            for ours, other in _COMFYUI.items():
                theirs = theirs.replace(ours, other)
            for last in _FUSED:
                theirs = theirs.replace(f"attention.{last}.", "attention.qkv.")
            parts.setdefault(theirs, []).append(name)
        return parts

    def forward_flops(self, samples: int, tokens: int, text_rows: int) -> int:
        """Operations of the matrix products of a forward pass, as torch's `flop_counter` counts them. Arguments as in
        `training_flops`."""
        picture, text = padded(tokens), padded(-(-text_rows // samples))
        every = self.n_refiner_layers * (picture + text) + self.n_layers * (picture + text)
        squares = self.n_refiner_layers * (picture**2 + text**2) + self.n_layers * (picture + text) ** 2
        modulated = self.n_refiner_layers + self.n_layers
        block = every * (4 * self.dim**2 + 3 * self.dim * self.hidden) + 2 * squares * self.dim
        time = SINUSOID_WIDTH * self.time_hidden + self.time_hidden * self.time_dim
        time += self.time_dim * (4 * self.dim * modulated + self.dim)
        ends = 2 * tokens * self.patch_values * self.dim + text * self.cap_feat_dim * self.dim
        return 2 * samples * (block + time + ends)

    def training_flops(self, samples: int, tokens: int, text_rows: int) -> int:
        """Three forward passes (each product's gradient is two products of its size) without the gradients of the
        model's inputs; of captions the norm before the first product has one."""
        inputs = samples * (tokens * self.patch_values * self.dim + SINUSOID_WIDTH * self.time_hidden)
        return 3 * self.forward_flops(samples, tokens, text_rows) - 2 * inputs


def _initial_value(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """A value as torch initialises layers: norms 1, biases 0, weights uniform within 1/sqrt(inputs); N(0, 0.02) of the
    tokens of paddings."""
    generator = generator_of(seed, name)
    if name.endswith("_pad_token"):
        return torch.empty(shape).normal_(0.0, 0.02, generator=generator)
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    bound = shape[1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
