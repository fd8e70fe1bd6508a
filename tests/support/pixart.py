"""Another architecture that diffusers has, PixArt, as a `ModelSpec`, for tests of the seams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

import torch
import xxhash
from diffusers import PixArtTransformer2DModel
from diffusers.models.embeddings import get_2d_sincos_pos_embed
from safetensors import safe_open
from torch import Tensor, nn

from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.spec import ModelSpec, Values

CLASS = "PixArtTransformer2DModel"


class Module(PixArtTransformer2DModel):
    """diffusers' model with the inputs of an `Objective`, its blocks, and a position embedding that is computed
    anew."""

    tensor_parallel_plan: Mapping[str, str] = {}

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.transformer_blocks)

    def forward(self, latents: Tensor, captions: Tensor, mask: Tensor, timesteps: Tensor) -> Tensor:
        given = {"encoder_hidden_states": captions, "encoder_attention_mask": mask, "timestep": timesteps}
        return super().forward(latents, **given, return_dict=False)[0].clone()

    def reset_buffers(self) -> None:
        embed, config = self.pos_embed, self.config
        grid = config.sample_size // config.patch_size
        values = get_2d_sincos_pos_embed(
            self.inner_dim, grid, base_size=grid, interpolation_scale=embed.interpolation_scale, output_type="pt"
        )
        embed.register_buffer("pos_embed", values.float()[None].to(embed.proj.weight.device), persistent=False)


class Stored:
    """Values of a folder that diffusers wrote, in one file."""

    def __init__(self, folder: Path):
        self._file = safe_open(folder / "diffusion_pytorch_model.safetensors", framework="pt")
        slices = {name: self._file.get_slice(name) for name in self._file.keys()}
        self.shapes, self._slices = {name: tuple(part.get_shape()) for name, part in slices.items()}, slices
        self.description = f"PixArt of {folder}"

    def read(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        return self._slices[name][tuple(slice(a, a + n) for a, n in zip(offsets, lengths, strict=True))]

    def fingerprint(self) -> str:
        sums = [float(self._file.get_tensor(name).double().sum()) for name in sorted(self.shapes)]
        return xxhash.xxh3_128_hexdigest(f"{sums}".encode())


@dataclass(frozen=True)
class PixArt(ModelSpec):
    class_name = CLASS
    pipeline = "PixArtAlphaPipeline"

    num_attention_heads: int = 2
    attention_head_dim: int = 8
    in_channels: int = 16
    out_channels: int = 16
    num_layers: int = 2
    cross_attention_dim: int = 16
    caption_channels: int = 128
    sample_size: int = 8
    patch_size: int = 1
    dropout: float = 0.0

    @property
    def inner_dim(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "config.json") -> Self:
        return cls(**{field.name: data[field.name] for field in fields(cls) if field.name in data})

    def to_dict(self) -> dict[str, Any]:
        return {"_class_name": CLASS, **asdict(self)}

    def module(self, train: TrainConfig | None = None) -> nn.Module:
        with torch.device("meta"):
            return Module(**asdict(self))

    def stored(self, place: Path, variant: str | None = None) -> Values:
        return Stored(place)

    def initial(self, seed: int) -> Values:
        raise NotImplementedError

    def training_flops(self, samples: int, tokens: int, text_rows: int) -> int:
        return 6 * samples * tokens * self.num_layers * 16 * self.inner_dim**2

    def save(
        self,
        weights: Mapping[str, Tensor],
        folder: Path,
        dtype: torch.dtype,
        form: str = "diffusers",
        stem: str = "",
        max_length: int = 300,
    ) -> None:
        made = PixArtTransformer2DModel(**asdict(self)).to(dtype)
        named = dict(made.named_parameters())
        assert named.keys() == weights.keys()
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(weights[name])
        made.save_pretrained(folder)
