"""Train a part of a model: added parameters, or some of its own, with the rest frozen.

An `Adapter` is a file here, and a line in `KINDS`. It changes a module on the meta device before any strategy does, by
`pipeline.layer_classes`, and freezes what is not trained. What is trained then decides what the optimizer, the moving
average and checkpoints hold.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.models.spec import ModelSpec, Values

KINDS: dict[str, str] = {}
"""`kind` -> module:class."""


class Adapter(ABC):
    """A part of a model that is trained. As a string: what it is, for people.

    Attributes:
        kind: its name in `KINDS`.
        formats: what `save` writes, in the order of preference.
    """

    kind: ClassVar[str]
    formats: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def apply(self, module: nn.Module) -> None:
        """Add parameters and freeze the others, in place, on the meta device."""

    @abstractmethod
    def initial(self, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
        """Start value of an added parameter, from name and seed alone; on the CPU."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Its settings, for checkpoints; `from_dict` reads them."""

    @classmethod
    @abstractmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """From `to_dict`."""

    @abstractmethod
    def merged(self, name: str, weight: Tensor, trained: Mapping[str, Tensor], scale: float = 1.0) -> Tensor:
        """A parameter of the model as the adapter changes it.

        Args:
            weight: the base's, fp32, in the module's layout.
            trained: all trained parameters.
            scale: of the change; 0 is the base.
        """

    def save(self, form: str, weights: Merged, folder: Path, dtype: torch.dtype) -> None:
        """Write the trained parameters in one of `formats`, as its readers expect them."""
        raise NotImplementedError(form)


class Merged(Mapping[str, Tensor]):
    """The weights of a base with an adapter's change, by parameter name: fp32, on the CPU, in the module's layout.
    Each is read and computed on access.

    Args:
        trained: the adapter's parameters.
        scale: of the change; 0 is the base.
    """

    def __init__(
        self, spec: ModelSpec, adapter: Adapter, base: Values, trained: Mapping[str, Tensor], scale: float = 1.0
    ):
        self.spec, self.adapter, self.base, self.trained, self.scale = spec, adapter, base, trained, scale

    def __getitem__(self, name: str) -> Tensor:
        shape = self.base.shapes[name]
        weight = self.base.read(name, [0] * len(shape), shape).float()
        return self.adapter.merged(name, weight, self.trained, self.scale) if self.scale else weight.clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self.base.shapes)

    def __len__(self) -> int:
        return len(self.base.shapes)

    def scaled(self, scale: float) -> Merged:
        """The same with another scale."""
        return Merged(self.spec, self.adapter, self.base, self.trained, scale)


def adapter_from(values: Mapping[str, Any] | None) -> Adapter | None:
    """The adapter of a checkpoint's document; None: every parameter was trained.

    Raises:
        ConfigError: a kind that does not exist.
    """
    if values is None:
        return None
    if values.get("kind") not in KINDS:
        raise ConfigError(
            "the checkpoint has an adapter of an unknown kind",
            expected=" or ".join(KINDS) or "none",
            found=str(values.get("kind")),
            fix="use the version of sana-pipe that wrote it",
        )
    module, _, name = KINDS[values["kind"]].partition(":")
    return getattr(importlib.import_module(module), name).from_dict(values)
