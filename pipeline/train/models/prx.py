"""PRX: diffusers' own module with the inputs of an objective, and its spec.

Why diffusers' module here and not for Sana: its forward pass has shapes that follow from its inputs, and needs neither
pipeline stages nor a kernel for packed captions; rows without padding are padded again, which costs memory alone.
Price: no tensor or pipeline parallelism; importing diffusers takes seconds, so the module is made on use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from sana_pipe.base.errors import ConfigError
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.layers import SINUSOID_WIDTH
from sana_pipe.train.models.shape_values import made
from sana_pipe.train.models.spec import Call, DrawnValues, ModelSpec, Values, generator_of
from sana_pipe.train.models.weight_files import FolderWeights, save_folder

CLASS_NAME = "PRXTransformer2DModel"
_TIMES = 1000.0
"""Our times end here, PRX's at 1."""
_BINS = (256, 512, 1024)
"""The resolutions of `PRXPipeline`'s tables of aspect ratios."""
_ROWS = 256
"""Text rows of PRX, which the tokenizer of its pipeline states."""


@cache
def _module_class() -> type[nn.Module]:
    from diffusers.models.transformers.transformer_prx import PRXTransformer2DModel

    class PRXTransformer(PRXTransformer2DModel):
        tensor_parallel_plan: ClassVar[Mapping[str, str]] = {}
        _ATTENTION = ("attention.img_qkv_proj", "attention.txt_kv_proj", "attention.to_out.0")
        adapter_targets: ClassVar[Mapping[str, tuple[str, ...]]] = {
            "attention": _ATTENTION,
            "all": (*_ATTENTION, "gate_proj", "up_proj", "down_proj"),
        }

        def forward(self, latents: Tensor, captions: Tensor, mask: Tensor, timesteps: Tensor) -> Tensor:
            """Predict the flow. Arguments as of `SanaTransformer.forward`; a sample without any True has no text."""
            if captions.dim() == 2:
                captions = captions[(mask.flatten().cumsum(0) - 1).clamp(min=0)].unflatten(0, mask.shape)
            given = {"encoder_hidden_states": captions, "attention_mask": mask}
            return super().forward(latents, timesteps / _TIMES, **given, return_dict=False)[0].clone()

    return PRXTransformer


@dataclass(frozen=True)
class PRX(ModelSpec):
    """The spec of a PRX transformer. Names and defaults are those of diffusers' config.json (defaults: PRX 1.3B on the
    latents of Flux's VAE; on DC-AE's it has 32 channels and patches of 1)."""

    class_name = CLASS_NAME
    pipeline = "PRXPipeline"
    family = "prx"
    text_kind = "t5gemma"
    overflow_in_fp16 = "the text encoder and the VAE"
    libraries: ClassVar[Mapping[str, str]] = {"T5GemmaEncoder": "prx"}
    unread = ("diffusers", "comfyui")
    dropout = 0.0

    in_channels: int = 16
    patch_size: int = 2
    context_in_dim: int = 2304
    hidden_size: int = 1792
    mlp_ratio: float = 3.5
    num_heads: int = 28
    depth: int = 16
    axes_dim: tuple[int, ...] = (32, 32)
    theta: int = 10000
    time_factor: float = 1000.0
    time_max_period: int = 10000
    bottleneck_size: None = None
    resolution_embeds: bool = False

    @property
    def caption_channels(self) -> int:
        return self.context_in_dim

    @property
    def num_layers(self) -> int:
        return self.depth

    @property
    def inner_dim(self) -> int:
        return self.hidden_size

    @property
    def vae_factors(self) -> tuple[float, float] | None:
        """The factors of DC-AE 1.1, Sana's VAE, for the models on its 32 channels."""
        return (0.41407, 0.0) if self.in_channels == 32 else None

    def with_layers(self, count: int) -> Self:
        return replace(self, depth=count)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "config.json") -> Self:
        known = {field.name: data[field.name] for field in fields(cls) if field.name in data}
        unknown = sorted(name for name in data if not name.startswith("_") and name not in known)
        other = [name for name in ("bottleneck_size", "resolution_embeds") if known.get(name)]
        if unknown or other:
            raise ConfigError(
                f"{source} has keys that this PRX transformer does not implement: {', '.join(unknown + other)}",
                expected="PRX on latents, such as Photoroom/prx-512-t2i-dc-ae, not PRX in pixels",
            )
        if known.get("axes_dim", ()) is None:
            del known["axes_dim"]  # diffusers' default
        shape = made(cls, known, source)
        if any(width % 2 for width in shape.axes_dim):
            raise ConfigError(
                f"{source}: axes_dim has a position of an odd width",
                expected="even numbers",
                found=list(shape.axes_dim),
            )
        if shape.hidden_size != sum(shape.axes_dim) * shape.num_heads:
            raise ConfigError(
                f"{source}: heads of another width than their positions",
                expected=f"hidden_size = sum(axes_dim)*num_heads = {sum(shape.axes_dim) * shape.num_heads}",
                found=shape.hidden_size,
            )
        return shape

    def to_dict(self) -> dict[str, Any]:
        return {"_class_name": CLASS_NAME, **asdict(self), "axes_dim": list(self.axes_dim)}

    def module(self, train: TrainConfig | None = None) -> nn.Module:
        with torch.device("meta"):
            return _module_class()(**{**asdict(self), "axes_dim": list(self.axes_dim)})

    def stored(self, place: Path, variant: str | None = None) -> Values:
        return FolderWeights(place, self.shapes(), variant)

    def initial(self, seed: int) -> Values:
        return DrawnValues(self.shapes(), _initial_value, seed, largest=1 << 16)

    def training_flops(self, samples: int, tokens: int, text_rows: int) -> int:
        """Three forward passes (each product's gradient is two products of its size) without the gradients of the
        model's inputs. A forward pass is the matrix products, as torch's `flop_counter` counts them."""
        dim, image = self.hidden_size, samples * tokens
        mlp, patch = int(dim * self.mlp_ratio), self.in_channels * self.patch_size**2
        block = image * (4 * dim**2 + 3 * dim * mlp) + text_rows * 2 * dim**2 + samples * 6 * dim**2
        block += 2 * (image * tokens + text_rows * tokens) * dim
        inputs = (image * patch + text_rows * self.context_in_dim + samples * SINUSOID_WIDTH) * dim
        ends = inputs + image * patch * dim + samples * 3 * dim**2
        return 6 * (self.depth * block + ends) - 2 * inputs

    def save(
        self,
        weights: Mapping[str, Tensor],
        folder: Path,
        dtype: torch.dtype,
        form: str = "diffusers",
        stem: str = "",
        max_length: int = 300,
    ) -> None:
        save_folder(weights, self.shapes(), self.to_dict(), folder, dtype)

    def call_arguments(self, call: Call) -> dict[str, str]:
        arguments = super().call_arguments(replace(call, guidance=max(call.guidance, 1.0)))
        arguments["use_resolution_binning"] = "False"
        return {**arguments, "tokenizer_max_length": str(call.max_length or _ROWS)}

    def pipeline_settings(self, call: Call) -> dict[str, Any]:
        return {"default_sample_size": min(_BINS, key=lambda side: abs(side - call.resolution))}


def _initial_value(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """A value as diffusers' class has it when it is made: modulations 0, norms 1, other layers uniform within
    1/sqrt(inputs)."""
    if ".modulation." in name:
        return torch.zeros(shape)
    if len(shape) == 1 and name.endswith("weight"):
        return torch.ones(shape)
    bound = shape[-1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=generator_of(seed, name))
