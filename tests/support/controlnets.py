"""Small models with a ControlNet, and the same in the classes of diffusers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.adapters import Merged, adapter_of
from sana_pipe.train.models.adapters.controlnet import PREFIX, ControlNet
from sana_pipe.train.models.sana import SanaTransformer
from sana_pipe.train.models.sana_config import SanaConfig
from sana_pipe.train.models.sana_files import save_weights
from tests.support.tiny_sana import TINY, make

BASE = replace(TINY, num_layers=4)


def settings(**controlnet: Any) -> TrainConfig:
    return TrainConfig.model_validate({"controlnet": controlnet})


def start(config: Any = BASE, **controlnet: Any) -> SanaTransformer:
    """A model with a ControlNet as a run begins."""
    model, base = make(config), dict(make(config).named_parameters())
    adapter = adapter_of(settings(**controlnet), config)
    assert isinstance(adapter, ControlNet)
    adapter.apply(model)

    class Base:
        def read(self, name: str, offsets: Any, lengths: Any) -> Tensor:
            return base[name].detach()

    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == name.startswith(PREFIX)
        if parameter.requires_grad:
            parameter.data.copy_(adapter.initial(name, tuple(parameter.shape), 0, Base()))  # type: ignore[arg-type]
    return model


def trained(config: Any = BASE, **controlnet: Any) -> SanaTransformer:
    """The same after a training: no parameter is the base's, none is zero."""
    model, generator = start(config, **controlnet), torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if name.startswith(PREFIX):
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def weights_of(model: SanaTransformer, of_control: bool) -> dict[str, Tensor]:
    values = {name: p.detach() for name, p in model.named_parameters() if name.startswith(PREFIX) == of_control}
    return {name.removeprefix(PREFIX): value for name, value in values.items()}


def saved(model: SanaTransformer, folder: Path) -> tuple[Any, Any]:
    """The base and the ControlNet in diffusers' classes, through files that our export writes."""
    from diffusers import SanaControlNetModel, SanaTransformer2DModel

    save_weights(weights_of(model, False), model.config, folder / "transformer", torch.float32)
    assert model.controlnet is not None
    adapter, spec = ControlNet(model.controlnet.config.num_layers), model.config
    assert isinstance(spec, SanaConfig)
    values = {f"{PREFIX}{name}": value for name, value in weights_of(model, True).items()}
    merged = Merged(spec, adapter, spec.initial(0), values)
    adapter.save("diffusers", merged, folder, torch.float32)
    theirs = SanaControlNetModel.from_pretrained(folder / "controlnet")
    return SanaTransformer2DModel.from_pretrained(folder / "transformer"), theirs
