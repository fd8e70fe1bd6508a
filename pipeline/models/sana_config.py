"""The shape of a Sana transformer: the part of diffusers' `config.json` that this package implements.

What: `SanaConfig`, from a folder (`read_config`) or from the run's configuration (`SanaConfig.from_arch`).
Models that we do not implement (Sana-Sprint's guidance embedding and scaled timesteps, learned variance) are refused
before any weight is read; the error names the field.
Price: fields that diffusers adds have to be added here; until then its folders are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from pipeline.config import ArchConfig
from pipeline.errors import ConfigError, UserError, not_permitted

CLASS_NAME = "SanaTransformer2DModel"


@dataclass(frozen=True)
class SanaConfig:
    """Shape of a Sana transformer. Names and defaults are those of diffusers' config.json (defaults: Sana 1.6B).

    `sample_size` is the side of the latent at the base resolution: it selects `SanaPipeline`'s aspect-ratio bins
    (16, 32, 64, 128 for 512 to 4096 px) and, with `interpolation_scale`, the base of the position embedding.

    Raises:
        ConfigError: a combination that this model does not implement; the message names the field.
    """

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
        if self.guidance_embeds:
            raise ConfigError(
                "the transformer's config has guidance_embeds = true: this is a guidance-distilled model (Sana-Sprint)",
                expected="guidance_embeds = false (Sana, SANA-1.5)",
                fix="take the weights of Sana or SANA-1.5",
            )
        if self.timestep_scale != 1.0:
            raise ConfigError(
                "the transformer's config scales its timesteps (Sana-Sprint), which this model does not implement",
                expected="timestep_scale = 1.0",
                found=f"timestep_scale = {self.timestep_scale}",
            )
        if self.qk_norm not in (None, "rms_norm_across_heads"):
            raise ConfigError(
                "the transformer's config asks for an unknown query/key normalisation",
                expected="qk_norm = null or 'rms_norm_across_heads'",
                found=f"qk_norm = {self.qk_norm!r}",
            )
        if self.out_channels != self.in_channels:
            raise ConfigError(
                "the transformer's config predicts another number of channels than it reads (a learned variance)",
                expected=f"out_channels = in_channels = {self.in_channels}",
                found=f"out_channels = {self.out_channels}",
            )
        if self.cross_attention_dim != self.inner_dim:
            raise ConfigError(
                "cross attention reads captions that are projected to the model's width",
                expected=f"cross_attention_dim = num_attention_heads*attention_head_dim = {self.inner_dim}",
                found=f"cross_attention_dim = {self.cross_attention_dim}",
            )
        if self.interpolation_scale is not None and self.inner_dim % 4:
            raise ConfigError(
                "a two-dimensional sine/cosine position embedding needs a width divisible by 4",
                found=f"num_attention_heads*attention_head_dim = {self.inner_dim}",
            )

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
        """Read the contents of a diffusers `config.json`. Keys that start with `_` are diffusers' bookkeeping.

        Raises:
            ConfigError: another class, or a key this model does not know (its meaning would be lost).
        """
        name = data.get("_class_name") or data.get("model_type") or CLASS_NAME  # the second key is transformers'
        if name != CLASS_NAME:
            raise ConfigError(f"{source} describes another model", expected=CLASS_NAME, found=name)
        known = {field.name for field in fields(cls)}
        unknown = sorted(key for key in data if not key.startswith("_") and key not in known)
        if unknown:
            raise ConfigError(
                f"{source} has keys that this Sana transformer does not implement: {', '.join(unknown)}",
                expected=", ".join(sorted(known)),
            )
        return cls(**{key: value for key, value in data.items() if key in known})

    @classmethod
    def from_arch(cls, arch: ArchConfig, sample_size: int) -> SanaConfig:
        """The configuration of a model trained from scratch; `sample_size` is the default of `arch.sample_size`."""
        width = arch.num_attention_heads * arch.attention_head_dim
        given = arch.model_dump()
        given["sample_size"] = sample_size if arch.sample_size is None else arch.sample_size
        return cls(out_channels=arch.in_channels, cross_attention_dim=width, **given)

    def check_sides(self, height: int, width: int, compression: int, option: str) -> None:
        """Refuse pictures that the model cannot draw.

        Args:
            height, width: in pixels.
            compression: pixels per latent side.
            option: how a side is set, with `{name}` and `{value}`.

        Raises:
            ConfigError: with the nearest side that works.
        """
        multiple = compression * self.patch_size
        for name, side in (("height", height), ("width", width)):
            if side % multiple:
                nearest = max(multiple, round(side / multiple) * multiple)
                raise ConfigError(
                    f"the model draws sides of multiples of {multiple} pixels",
                    found=f"{name} {side}",
                    fix=option.format(name=name, value=nearest),
                )

    def to_dict(self) -> dict[str, Any]:
        """The contents of diffusers' `config.json`."""
        return {"_class_name": CLASS_NAME, **asdict(self)}


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


def read_config(folder: Path) -> SanaConfig:
    """`config.json` of a diffusers transformer folder.

    Raises:
        UserError: missing, not JSON, or of a model that this package does not implement.
    """
    path = Path(folder) / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{folder} is not a transformer folder: there is no config.json",
            expected=f"a folder written by {CLASS_NAME}.save_pretrained",
            fix="name the subfolder too, e.g. model.weights.subfolder: transformer",
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise not_permitted(path) or UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path} is not a JSON object", found=type(data).__name__)
    return SanaConfig.from_dict(data, source=str(path))


def with_sample_size(config: SanaConfig, sample_size: int) -> SanaConfig:
    """The same model at another base resolution. Without a position embedding that changes no value, only
    `SanaPipeline`'s choice of aspect-ratio bins.

    Raises:
        ConfigError: the model has a position embedding, whose base is the sample size.
    """
    if config.interpolation_scale is not None and sample_size != config.sample_size:
        raise ConfigError(
            "sample_size is the base of this model's position embedding and cannot be changed",
            expected=config.sample_size,
            found=sample_size,
        )
    return replace(config, sample_size=sample_size)
