"""A ControlNet next to a frozen model: `train.controlnet`.

What: the child `controlnet` of the module (`models.sana_control`), a copy of the base's first blocks with zero
layers, so that the first step is the base's. It is never part of the base: exports are a folder of diffusers'
`SanaControlNetModel` for `SanaControlNetPipeline`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from sana_pipe.base import hub
from sana_pipe.base.errors import ConfigError, UserError
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.adapters import Adapter, Merged
from sana_pipe.train.models.spec import ModelSpec, Values

PREFIX = "controlnet."
"""The prefix of its parameters' names."""
FOLDER = "controlnet"
"""The folder of an export."""
_OUTPUTS = f"{PREFIX}controlnet_blocks."
_ZERO = _OUTPUTS, f"{PREFIX}input_block."


class ControlNet(Adapter):
    """A ControlNet of the model's first blocks, as many as `layers`."""

    kind = "controlnet"
    formats = ("diffusers",)
    stays = True
    readme = "controlnet"

    def __init__(self, layers: int):
        self.layers = layers
        self._start: Values | None = None

    @classmethod
    def from_config(cls, train: TrainConfig, spec: ModelSpec, start: bool) -> Self:
        given = train.controlnet
        assert given is not None
        shape = spec.controlnet(given.layers)
        adapter = cls(shape.num_layers)
        if start and given.start is not None:
            adapter._start = _opened(Path(given.start), shape)
        return adapter

    def apply(self, module: nn.Module) -> None:
        module.requires_grad_(False)
        added: Any = module
        added.add_controlnet(self.layers)

    def initial(self, name: str, shape: tuple[int, ...], seed: int, base: Values) -> Tensor:
        """The base's value under the same name, and zero of the layers that the base lacks. With
        `train.controlnet.start` those of the file."""
        if self._start is None and name.startswith(_ZERO):
            return torch.zeros(shape)
        source = base if self._start is None else self._start
        return source.read(name.removeprefix(PREFIX), [0] * len(shape), shape)

    def merged(self, name: str, weight: Tensor, trained: Mapping[str, Tensor], strength: float = 1.0) -> Tensor:
        """Multiply the last layers by the strength: what the base adds is linear in them."""
        return strength * weight if strength != 1 and name.startswith(_OUTPUTS) else weight

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "layers": self.layers}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(values["layers"])

    def save(
        self,
        form: str,
        weights: Merged,
        folder: Path,
        dtype: torch.dtype,
        header: Mapping[str, str] = {},
        stem: str = "",
    ) -> None:
        shape = weights.spec.controlnet(self.layers)
        shape.save(
            {name.removeprefix(PREFIX): weights.trained[name] for name in weights.trained}, folder / FOLDER, dtype
        )

    def __str__(self) -> str:
        return f"a ControlNet of {self.layers} blocks"


def _opened(place: Path, shape: ModelSpec) -> Values:
    """The values in an export, or a folder or file of diffusers' `SanaControlNetModel`.

    Raises:
        ConfigError: unreadable, or of another shape.
    """
    place = place / FOLDER if (place / FOLDER).is_dir() else place
    fix = "give one of this base, and its number of blocks as train.controlnet.layers"
    try:
        stored = hub.read_json(place / "config.json") if (place / "config.json").is_file() else {}
        layers = stored.get("num_layers")
        if stored.get("_class_name") == shape.class_name and isinstance(layers, int) and layers != shape.num_layers:
            fix = f"--set train.controlnet.layers={layers}"
            raise UserError(f"{place} holds {layers} blocks, this run {shape.num_layers}")
        return shape.stored(place)
    except (UserError, OSError) as error:
        what = error.what if isinstance(error, UserError) else f"{place}: {error.strerror}"
        raise ConfigError(
            f"train.controlnet.start: {what}",
            expected=f"a folder or safetensors file of a {shape.class_name} of {shape.num_layers} blocks, as "
            "save_pretrained writes it",
            fix=fix,
        ) from None
