"""The shape of a Z-Image transformer: the part of diffusers' `config.json` that this package implements.

It stands below the module, which takes it; the spec (`zimage_config`) stands above both. Models that the module does
not implement (Z-Image-Omni with SigLIP features, other patches) are refused before any weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Self

from sana_pipe.base.errors import ConfigError
from sana_pipe.train.models.shape_values import made

CLASS_NAME = "ZImageTransformer2DModel"
_TIME_DIM, _TIME_HIDDEN = 256, 1024


@dataclass(frozen=True)
class ZImageShape:
    """Shape of a Z-Image transformer. Names and defaults are those of diffusers' config.json (defaults: Z-Image, 6B).

    Raises:
        ConfigError: a combination that this model does not implement; the message names the field.
    """

    class_name: ClassVar[str] = CLASS_NAME

    all_patch_size: tuple[int, ...] = (2,)
    all_f_patch_size: tuple[int, ...] = (1,)
    in_channels: int = 16
    dim: int = 3840
    n_layers: int = 30
    n_refiner_layers: int = 2
    n_heads: int = 30
    n_kv_heads: int = 30
    norm_eps: float = 1e-5
    qk_norm: bool = True
    cap_feat_dim: int = 2560
    siglip_feat_dim: int | None = None
    rope_theta: float = 256.0
    t_scale: float = 1000.0
    axes_dims: tuple[int, ...] = (32, 48, 48)
    axes_lens: tuple[int, ...] = (1024, 512, 512)

    def __post_init__(self) -> None:
        width = f"a sum of dim/n_heads = {self.dim / max(1, self.n_heads):g}"
        axes = len(self.axes_dims) == 3 and not any(each % 2 for each in self.axes_dims)
        for name, fits, what, expected in (
            ("all_patch_size", len(self.all_patch_size) == 1, "patches of several sizes", "one number"),
            ("all_f_patch_size", self.all_f_patch_size == (1,), "patches of several frames", "[1]"),
            ("siglip_feat_dim", self.siglip_feat_dim is None, "SigLIP features (Z-Image-Omni)", "null"),
            ("qk_norm", self.qk_norm, "queries and keys without norms", "true"),
            ("n_kv_heads", self.n_kv_heads == self.n_heads, "key heads that several query heads share", self.n_heads),
            ("axes_lens", len(self.axes_lens) == 3, "another number of axes", "three numbers"),
            ("axes_dims", axes and sum(self.axes_dims) * self.n_heads == self.dim, "other positions", width),
        ):
            if not fits:
                raise ConfigError(
                    f"the transformer's config has {what}, which this model does not implement",
                    expected=f"{name} = {expected}",
                    found=f"{name} = {getattr(self, name)!r}",
                    fix="take the weights of Z-Image (Tongyi-MAI/Z-Image)",
                )

    @property
    def patch_size(self) -> int:
        return self.all_patch_size[0]

    @property
    def patch_values(self) -> int:
        """Values of a token in the latent."""
        return self.in_channels * self.patch_size**2

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def hidden(self) -> int:
        """Width between the products of a block's second half."""
        return int(self.dim / 3 * 8)

    @property
    def time_dim(self) -> int:
        """Width of the embedded timestep."""
        return min(self.dim, _TIME_DIM)

    @property
    def time_hidden(self) -> int:
        """Width between the layers that embed the timestep."""
        return _TIME_HIDDEN

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "config.json") -> Self:
        """Read a diffusers `config.json`. Keys that start with `_` are diffusers' bookkeeping; another
        that is not known is refused, since its meaning would be lost."""
        if data.get("_class_name") != cls.class_name:
            raise ConfigError(
                f"{source} describes another model", expected=cls.class_name, found=data.get("_class_name")
            )
        known = {field.name for field in fields(cls)}
        unknown = sorted(key for key in data if not key.startswith("_") and key not in known)
        if unknown:
            raise ConfigError(
                f"{source} has keys that this Z-Image transformer does not implement: {', '.join(unknown)}",
                expected=", ".join(sorted(known)),
            )
        return made(cls, data, source, may_be_zero=("n_refiner_layers",))

    def to_dict(self) -> dict[str, Any]:
        """The contents of diffusers' `config.json`."""
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return {"_class_name": CLASS_NAME, **values}
