"""The shape of a Sana transformer: the part of diffusers' `config.json` that this package implements, and its numerics.

It stands below the layers, which take it, and below the files of weights; the spec (`sana_config`) stands above them.
Models that we do not implement (Sana-Sprint's guidance embedding and scaled timesteps, learned variance) are refused
before any weight is read; the error names the field.
Price: fields that diffusers adds have to be added here; until then its folders are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor

from sana_pipe.base import hub
from sana_pipe.base.errors import ConfigError
from sana_pipe.train.models.shape_values import made

CLASS_NAME = "SanaTransformer2DModel"
GLU_PARAMETERS = ("conv_inverted.weight", "conv_inverted.bias", "conv_depth.weight", "conv_depth.bias")
"""The parameters whose rows have another order in diffusers' files."""
_CONTROLNET_LAYERS = 7
"""The blocks of diffusers' `SanaControlNetModel`."""


@dataclass(frozen=True)
class SanaShape:
    """Shape of a Sana transformer. Names and defaults are those of diffusers' config.json (defaults: Sana 1.6B).

    `sample_size` is the side of the latent at the base resolution: it selects `SanaPipeline`'s aspect-ratio bins
    (16, 32, 64, 128 for 512 to 4096 px) and, with `interpolation_scale`, the base of the position embedding.

    Raises:
        ConfigError: a combination that this model does not implement; the message names the field.
    """

    class_name: ClassVar[str] = CLASS_NAME
    text_kind: ClassVar[str | None] = "gemma2"
    MAY_BE_ZERO: ClassVar[tuple[str, ...]] = ("dropout", "guidance_embeds_scale")

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
            ("dropout", self.dropout < 1, "a dropout of every value", "below 1"),
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

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "config.json") -> Self:
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
        return made(cls, data, source, may_be_zero=cls.MAY_BE_ZERO)

    def to_dict(self) -> dict[str, Any]:
        """The contents of diffusers' `config.json`."""
        return {"_class_name": CLASS_NAME, **asdict(self)}

    def controlnet(self, layers: int | None = None) -> SanaControlNetShape:
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
        return SanaControlNetShape(**{**shape, "num_layers": layers or min(most, _CONTROLNET_LAYERS)})


@dataclass(frozen=True)
class SanaControlNetShape(SanaShape):
    """Shape of a ControlNet of Sana: the fields of diffusers' `SanaControlNetModel`, which are a transformer's without
    `LACKING`."""

    class_name = "SanaControlNetModel"

    LACKING = frozenset({"guidance_embeds", "guidance_embeds_scale", "qk_norm", "timestep_scale"})

    def to_dict(self) -> dict[str, Any]:
        values = {name: value for name, value in asdict(self).items() if name not in self.LACKING}
        return {"_class_name": self.class_name, **values}


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


def read_config(folder: Path) -> SanaShape:
    """`config.json` of a diffusers transformer folder."""
    path = folder / "config.json"
    return SanaShape.from_dict(hub.read_json(path), source=str(path))
