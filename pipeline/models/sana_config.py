"""The shape of a Sana transformer: the part of diffusers' `config.json` that this package implements.

Models that we do not implement (Sana-Sprint's guidance embedding and scaled timesteps, learned variance) are refused
before any weight is read; the error names the field.
Price: fields that diffusers adds have to be added here; until then its folders are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from pipeline.config import TrainConfig
from pipeline.errors import ConfigError
from pipeline.models import hub
from pipeline.models.spec import SANA, DrawnValues, ModelSpec, Values

CLASS_NAME = SANA
GLU_PARAMETERS = ("conv_inverted.weight", "conv_inverted.bias", "conv_depth.weight", "conv_depth.bias")
"""The parameters whose rows have another order in diffusers' files."""
_CONTROLNET_LAYERS = 7
"""The blocks of diffusers' `SanaControlNetModel`."""
_SINUSOID = 256
"""Width of the timestep's embedding before its layers."""


@dataclass(frozen=True)
class SanaConfig(ModelSpec):
    """Shape of a Sana transformer. Names and defaults are those of diffusers' config.json (defaults: Sana 1.6B).

    `sample_size` is the side of the latent at the base resolution: it selects `SanaPipeline`'s aspect-ratio bins
    (16, 32, 64, 128 for 512 to 4096 px) and, with `interpolation_scale`, the base of the position embedding.

    Raises:
        ConfigError: a combination that this model does not implement; the message names the field.
    """

    class_name = CLASS_NAME
    free = ("sample_size", "interpolation_scale")
    pipeline = "SanaPipeline"
    formats = ("diffusers", "nvlabs")

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
        norms, width = (None, "rms_norm_across_heads"), f"num_attention_heads*attention_head_dim = {self.inner_dim}"
        for name, fits, what, expected in (
            ("guidance_embeds", not self.guidance_embeds, "guidance distillation (Sana-Sprint)", "false"),
            ("timestep_scale", self.timestep_scale == 1, "scaled timesteps (Sana-Sprint)", "1.0"),
            ("attention_bias", not self.attention_bias, "biases of queries, keys and values", "false"),
            ("norm_elementwise_affine", not self.norm_elementwise_affine, "norms with weights", "false"),
            ("qk_norm", self.qk_norm in norms, "another norm of queries and keys", f"null or {norms[1]!r}"),
            ("out_channels", self.out_channels == self.in_channels, "a learned variance", f"{self.in_channels}"),
            ("cross_attention_dim", self.cross_attention_dim == self.inner_dim, "captions of another width", width),
        ):
            if not fits:
                raise ConfigError(
                    f"the transformer's config has {what}, which this model does not implement",
                    expected=f"{name} = {expected}",
                    found=f"{name} = {getattr(self, name)!r}",
                    fix="take the weights of Sana or SANA-1.5",
                )
        if self.interpolation_scale is not None and self.inner_dim % 4:
            raise ConfigError("a position embedding needs a width divisible by 4", found=width)

    @property
    def inner_dim(self) -> int:
        """Width of the token stream."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def glu_channels(self) -> int:
        """H, the hidden channels of GLUMBConv; conv_inverted and conv_depth carry 2H (value and gate)."""
        return int(self.mlp_ratio * self.inner_dim)

    @property
    def tensor_parallel_parts(self) -> dict[str, int]:
        """Number of equal parts of what tensor parallelism shards, by name."""
        return {
            "self-attention heads": self.num_attention_heads,
            "cross-attention heads": self.num_cross_attention_heads,
            "GLUMBConv channels": self.glu_channels,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "config.json") -> SanaConfig:
        """Read a diffusers `config.json`. Keys that start with `_` are diffusers' bookkeeping; another
        that is not known is refused, since its meaning would be lost."""
        name = data.get("_class_name") or data.get("model_type") or CLASS_NAME  # the second key is transformers'
        if name != cls.class_name:
            raise ConfigError(f"{source} describes another model", expected=cls.class_name, found=name)
        known = {field.name for field in fields(cls)}
        unknown = sorted(key for key in data if not key.startswith("_") and key not in known)
        if unknown:
            raise ConfigError(
                f"{source} has keys that this Sana transformer does not implement: {', '.join(unknown)}",
                expected=", ".join(sorted(known)),
            )
        return cls(**{key: value for key, value in data.items() if key in known})

    @classmethod
    def from_arch(cls, arch: Mapping[str, Any], sample_size: int) -> SanaConfig:
        """The shape of a model trained from scratch.

        Args:
            arch: `model.arch`, keys of `config.json`. sample_size: the default of that key.

        Raises:
            ConfigError: a key or a type that is not of a Sana transformer; heads of two widths.
        """
        kinds = get_type_hints(cls)
        for name, value in arch.items():
            _check_value(name, value, kinds.get(name))
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

    def to_dict(self) -> dict[str, Any]:
        """The contents of diffusers' `config.json`."""
        return {"_class_name": CLASS_NAME, **asdict(self)}

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
            "model (SANA-1.5) has: it loads there without a word and computes another function (12 % in a tried case); "
            "draw with diffusers or NVlabs' app"
        )

    def controlnet(self, layers: int | None = None) -> SanaControlNetConfig:
        """The shape of a ControlNet of this model. layers: its blocks; None: diffusers' 7, or as many as fit.

        Raises:
            ConfigError: more blocks than the base can add the outputs of, or a base with `qk_norm`.
        """
        if self.qk_norm is not None:
            raise ConfigError(
                "diffusers' SanaControlNetModel has no qk_norm, which this base has",
                fix="give Sana's weights as model.weights, not those of SANA-1.5",
            )
        most = self.num_layers - 1
        if layers is not None and layers > most:
            raise ConfigError(
                f"train.controlnet.layers: a base of {self.num_layers} blocks adds the outputs of {most}, one after "
                "each block but its first",
                expected=f"at most {most}",
                found=layers,
                fix=f"--set train.controlnet.layers={min(most, _CONTROLNET_LAYERS)}",
            )
        shape = {field.name: getattr(self, field.name) for field in fields(self)}
        return SanaControlNetConfig(**{**shape, "num_layers": layers or min(most, _CONTROLNET_LAYERS)})

    # What follows imports the modules that import this one.

    def module(self, train: TrainConfig | None = None) -> nn.Module:
        from pipeline.models.sana import SanaTransformer

        return SanaTransformer.on_meta(self, DIFFUSERS if train is None else numerics(train))

    def stored(self, place: Path, variant: str | None = None) -> Values:
        from pipeline.models.sana_files import WeightFiles

        return WeightFiles(place, variant)

    def initial(self, seed: int) -> Values:
        from pipeline.models.sana_init import initial_value

        return DrawnValues(self.shapes(), partial(initial_value, config=self), seed, largest=1 << 16)

    def rows_from_file(self, name: str, tensor: Tensor) -> Tensor:
        return interleave(name, tensor)

    def rows_to_file(self, name: str, tensor: Tensor) -> Tensor:
        return deinterleave(name, tensor)

    def joined_parts(self) -> dict[str, list[str]]:
        from pipeline.models import nvlabs

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
        from pipeline.models.sana_files import save_nvlabs, save_weights

        if form == "nvlabs":
            save_nvlabs(weights, self, folder, stem, dtype, max_length)
        else:
            save_weights(weights, self, folder, dtype)


@dataclass(frozen=True)
class SanaControlNetConfig(SanaConfig):
    """Shape of a ControlNet of Sana: the fields of diffusers' `SanaControlNetModel`, which are a transformer's without
    `LACKING`. Of the methods only those of shapes and files are for it."""

    class_name = "SanaControlNetModel"

    LACKING = frozenset({"guidance_embeds", "guidance_embeds_scale", "qk_norm", "timestep_scale"})

    def to_dict(self) -> dict[str, Any]:
        values = {name: value for name, value in asdict(self).items() if name not in self.LACKING}
        return {"_class_name": self.class_name, **values}

    def module(self, train: TrainConfig | None = None) -> nn.Module:
        from pipeline.models.sana_control import SanaControlNet

        with torch.device("meta"):
            return SanaControlNet(self, DIFFUSERS if train is None else numerics(train))

    def stored(self, place: Path, variant: str | None = None) -> Values:
        from pipeline.models.sana_files import WeightFiles

        return WeightFiles(place, variant, self)


@dataclass(frozen=True)
class Numerics:
    """Numerics of a Sana transformer, which `config.json` lacks. The defaults are diffusers'.

    fp32_residual: tokens between the blocks, their norms and the gates are float32 for any dtype of the matrix
        products.
    cross_norm_eps: of the RMS norms of cross attention's queries and keys.
    attention_eps: added to the denominator of linear attention.
    """

    fp32_residual: bool = False
    cross_norm_eps: float = 1e-5
    attention_eps: float = 1e-15


DIFFUSERS = Numerics()
FP32_RESIDUAL = True
"""`Numerics.fp32_residual` of a training: `python -m benchmarks.residual` has its benefit and cost."""


def numerics(train: TrainConfig) -> Numerics:
    """Return the numerics of `train.recipe`. The residual is in fp32, as under NVlabs' autocast."""
    epsilons = {"cross_norm_eps": 1e-6, "attention_eps": 1e-8} if train.recipe == "nvlabs" else {}
    return Numerics(fp32_residual=FP32_RESIDUAL, **epsilons)


def interleave(name: str, tensor: Tensor) -> Tensor:
    """diffusers' order -> ours, for the parameters of GLUMBConv's first two convolutions; others pass unchanged.

    [values 0..H-1, gates 0..H-1] becomes [value 0, gate 0, value 1, gate 1, ..] along dimension 0 (a copy).
    """
    if not name.endswith(GLU_PARAMETERS):
        return tensor
    return tensor.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1).contiguous()


def deinterleave(name: str, tensor: Tensor) -> Tensor:
    """Our order -> diffusers'; the inverse of `interleave`."""
    if not name.endswith(GLU_PARAMETERS):
        return tensor
    return tensor.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1).contiguous()


def read_config(folder: Path) -> SanaConfig:
    """`config.json` of a diffusers transformer folder."""
    path = folder / "config.json"
    return SanaConfig.from_dict(hub.read_json(path), source=str(path))


def _check_value(name: str, value: Any, kind: Any) -> None:
    """ConfigError unless a value of `model.arch` has the type of its key, and a size is above 0. kind: None: the key
    is not one of this model's, which `from_dict` says."""
    if kind is None:
        return
    try:
        TypeAdapter(kind).validate_python(value, strict=True)
    except ValidationError:
        wanted = getattr(kind, "__name__", str(kind)).replace("None", "null")
        raise ConfigError(
            f"model.arch.{name} has a value of another type", expected=wanted, found=repr(value)
        ) from None
    if (isinstance(value, int) or name == "mlp_ratio") and kind is not bool and value <= 0:
        raise ConfigError(f"model.arch.{name} must be above 0", found=repr(value))
