"""The spec of Sana: its shape with all that depends on the architecture, above its layers and its files of weights.

What is imported on use takes seconds to import, and whoever reads a checkpoint's document needs none of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sana_pipe.base.errors import ConfigError
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.sana_shape import (
    DIFFUSERS,
    Numerics,
    SanaControlNetShape,
    SanaShape,
    deinterleave,
    interleave,
)
from sana_pipe.train.models.shape_values import checked
from sana_pipe.train.models.spec import Call, DrawnValues, ModelSpec, Values

_BINS = {16: 512, 32: 1024, 64: 2048, 128: 4096}
"""sample_size -> the resolution of `SanaPipeline`'s aspect-ratio bins; they are made for a compression of 32."""
_MAX_LENGTH = 300
"""`max_sequence_length` of `SanaPipeline`."""
_SINUSOID = 256
"""Width of the timestep's embedding before its layers."""


@dataclass(frozen=True)
class SanaConfig(SanaShape, ModelSpec):
    """The spec of a Sana transformer."""

    free = ("sample_size", "interpolation_scale")
    family = "sana"
    pipeline = "SanaPipeline"
    formats = ("diffusers", "nvlabs")
    readme = "diffusers"
    overflow_in_fp16 = "the text encoder and the VAE"
    PIPELINE_MULTIPLE: ClassVar[int] = 32
    """`SanaPipeline` refuses a height or width that is no multiple of this, whatever the VAE."""

    @classmethod
    def from_arch(cls, arch: Mapping[str, Any], sample_size: int) -> SanaConfig:
        """The shape of a model trained from scratch.

        Args:
            arch: `model.arch`, keys of `config.json`. sample_size: the default of that key.

        Raises:
            ConfigError: a key or a type that is not of a Sana transformer; heads of two widths.
        """
        checked(cls, arch, "model.arch", may_be_zero=cls.MAY_BE_ZERO)
        base = cls()
        heads, width = (arch.get(name, getattr(base, name)) for name in ("num_attention_heads", "attention_head_dim"))
        channels = arch.get("in_channels", base.in_channels)
        derived = {"out_channels": channels, "cross_attention_dim": heads * width, "sample_size": sample_size}
        shape = cls.from_dict({**derived, **arch}, "model.arch")
        cross = shape.num_cross_attention_heads * shape.cross_attention_head_dim
        if cross != shape.inner_dim:
            raise ConfigError(
                "model.arch: both attentions must have the same width",
                expected=f"num_attention_heads*attention_head_dim = {shape.inner_dim}",
                found=f"num_cross_attention_heads*cross_attention_head_dim = {cross}",
            )
        return shape

    @property
    def tensor_parallel_parts(self) -> dict[str, int]:
        """Number of equal parts of what tensor parallelism shards, by name."""
        return {
            "self-attention heads": self.num_attention_heads,
            "cross-attention heads": self.num_cross_attention_heads,
            "GLUMBConv channels": self.glu_channels,
        }

    def with_sample_size(self, sample_size: int) -> SanaConfig:
        """The same model at another base resolution: other aspect-ratio bins of `SanaPipeline`. Refused for a model
        with a position embedding, whose base it is."""
        if self.interpolation_scale is not None and sample_size != self.sample_size:
            raise ConfigError(
                "sample_size is the base of this model's position embedding and cannot be changed",
                expected=self.sample_size,
                found=sample_size,
            )
        return replace(self, sample_size=sample_size)

    def scheduler(self, shift: float) -> Any:
        from sana_pipe.train.models.sampler import scheduler

        return scheduler(shift)

    def call_arguments(self, call: Call) -> dict[str, str]:
        resolution = self.sample_size * (call.compression or call.resolution // self.sample_size)
        side = -(-resolution // self.PIPELINE_MULTIPLE) * self.PIPELINE_MULTIPLE
        arguments = super().call_arguments(replace(call, resolution=side))
        if _BINS.get(self.sample_size) != resolution or not call.table:
            arguments["use_resolution_binning"] = "False"
        if call.max_length not in (None, _MAX_LENGTH):
            arguments["max_sequence_length"] = str(call.max_length)
        if call.instruction is not None:
            arguments["complex_human_instruction"] = "json.loads(INSTRUCTION)" if call.instruction else "None"
        return arguments

    def forward_flops(self, samples: int, tokens: int, text_rows: int) -> int:
        """Operations of the matrix products and convolutions of a forward pass, as torch's `flop_counter` counts them;
        from shapes alone, since it is done for every step. Arguments as in `training_flops`."""
        dim, hidden = self.inner_dim, self.glu_channels
        image = samples * tokens
        attention = 4 * dim**2 + 2 * (self.attention_head_dim + 1) * dim  # projections; two products per head
        glu = 2 * dim * hidden + 9 * 2 * hidden + hidden * dim
        block = image * (attention + 2 * dim**2 + glu) + text_rows * (2 * dim**2 + 2 * tokens * dim)
        ends = 2 * image * self._patch_values * dim + samples * (_SINUSOID * dim + dim**2 + 6 * dim**2)
        text = text_rows * (self.caption_channels * dim + dim**2)
        return 2 * (self.num_layers * block + ends + text)

    def training_flops(self, samples: int, tokens: int, text_rows: int) -> int:
        """Three forward passes (each product's gradient is two products of its size) without the gradients of the
        model's inputs. Recomputation does not count: "model FLOPs" (PaLM, arXiv 2204.02311, app. B)."""
        inputs = samples * tokens * self._patch_values + text_rows * self.caption_channels + samples * _SINUSOID
        return 3 * self.forward_flops(samples, tokens, text_rows) - 2 * inputs * self.inner_dim

    @property
    def _patch_values(self) -> int:
        return self.in_channels * self.patch_size**2

    @property
    def described(self) -> str:
        norm = "true" if self.qk_norm else "false"
        return f"depth {self.num_layers}, width {self.inner_dim}, `qk_norm` and `cross_norm` {norm}"

    @property
    def comfyui_warning(self) -> str:
        if self.qk_norm is None:
            return ""
        return (
            "ComfyUI's nodes for Sana never apply the norms of queries and keys of the cross attention, which this "
            "model (SANA-1.5) has: it loads there without a warning and draws something else (an error of 12 % in a "
            "test); draw with diffusers or NVlabs' app"
        )

    def controlnet(self, layers: int | None = None) -> SanaControlNetConfig:
        return SanaControlNetConfig(**asdict(SanaShape.controlnet(self, layers)))

    def module(self, train: TrainConfig | None = None) -> nn.Module:
        from sana_pipe.train.models.sana import SanaTransformer

        return SanaTransformer.on_meta(self, DIFFUSERS if train is None else numerics(train))

    def stored(self, place: Path, variant: str | None = None) -> Values:
        from sana_pipe.train.models.sana_files import WeightFiles

        return WeightFiles(place, variant)

    def initial(self, seed: int) -> Values:
        from sana_pipe.train.models.sana_init import initial_value

        return DrawnValues(self.shapes(), partial(initial_value, config=self), seed, largest=1 << 16)

    def rows_from_file(self, name: str, tensor: Tensor) -> Tensor:
        return interleave(name, tensor)

    def rows_to_file(self, name: str, tensor: Tensor) -> Tensor:
        return deinterleave(name, tensor)

    def joined_parts(self) -> dict[str, list[str]]:
        from sana_pipe.train.models import nvlabs

        return nvlabs.parts(self.shapes())

    def save(
        self,
        weights: Mapping[str, Tensor],
        folder: Path,
        dtype: torch.dtype,
        form: str = "diffusers",
        stem: str = "",
        max_length: int = 300,
    ) -> None:
        from sana_pipe.train.models.sana_files import save_nvlabs, save_weights

        if form == "nvlabs":
            save_nvlabs(weights, self, folder, stem, dtype, max_length)
        else:
            save_weights(weights, self, folder, dtype)


@dataclass(frozen=True)
class SanaControlNetConfig(SanaControlNetShape, SanaConfig):
    """The spec of a ControlNet of Sana. Of the methods only those of shapes and files are for it."""

    def module(self, train: TrainConfig | None = None) -> nn.Module:
        from sana_pipe.train.models.sana_control import SanaControlNet

        with torch.device("meta"):
            return SanaControlNet(self, DIFFUSERS if train is None else numerics(train))

    def stored(self, place: Path, variant: str | None = None) -> Values:
        from sana_pipe.train.models.sana_files import WeightFiles

        return WeightFiles(place, variant, self)


FP32_RESIDUAL = True
"""`Numerics.fp32_residual` of a training: `python -m benchmarks.residual` has its benefit and cost."""


def numerics(train: TrainConfig) -> Numerics:
    """Return the numerics of `train.numerics`. The residual is in fp32, as under NVlabs' autocast."""
    epsilons = {"cross_norm_eps": 1e-6, "attention_eps": 1e-8} if train.numerics == "nvlabs" else {}
    return Numerics(fp32_residual=FP32_RESIDUAL, **epsilons)
