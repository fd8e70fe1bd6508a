"""Full-rank training of chosen modules, the rest frozen: `train.only`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.adapters import Adapter, Merged, files, matching
from sana_pipe.train.models.spec import ModelSpec, Values


class Chosen(Adapter):
    """Some of the model's parameters, by name, in the model's order."""

    kind = "only"
    formats = ("comfyui",)

    def __init__(self, parameters: Sequence[str]):
        self.parameters = list(parameters)

    @classmethod
    def from_config(cls, train: TrainConfig, spec: ModelSpec, start: bool) -> Self:
        assert train.only is not None
        module = spec.module()
        owners = {name: part for name, part in module.named_modules() if name}
        leaves = [name for name, _ in module.named_parameters()]
        chosen = matching(train.only, [*owners, *leaves], "train.only")
        return cls([leaf for leaf in leaves if any(leaf == name or leaf.startswith(f"{name}.") for name in chosen)])

    def apply(self, module: nn.Module) -> None:
        trained = set(self.parameters)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in trained)

    def initial(self, name: str, shape: tuple[int, ...], seed: int, base: Values) -> Tensor:
        raise NotImplementedError(f"{name}: no parameter is added")

    def merged(self, name: str, weight: Tensor, trained: Mapping[str, Tensor], strength: float = 1.0) -> Tensor:
        return weight.lerp(trained[name].float(), strength) if name in trained else weight

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "parameters": self.parameters}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(values["parameters"])

    def save(
        self,
        form: str,
        weights: Merged,
        folder: Path,
        dtype: torch.dtype,
        header: Mapping[str, str] = {},
        stem: str = "",
    ) -> None:
        files.check_applied(weights.spec, self.parameters)
        files.save_differences(weights, self.parameters, folder, dtype, header, stem)

    def __str__(self) -> str:
        return f"training of {len(self.parameters)} parameters"
