"""Train a part of a model: added parameters, or some of its own, with the rest frozen.

An `Adapter` is a file here, and a line in `KINDS`. It changes a module on the meta device before any strategy does, by
`pipeline.layer_classes`, and freezes what is not trained. What is trained then decides what the optimizer, the moving
average and checkpoints hold.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from pipeline.errors import ConfigError

KINDS: dict[str, str] = {}
"""`kind` -> module:class."""


class Adapter(ABC):
    """A part of a model that is trained.

    Attributes:
        kind: its name in `KINDS`.
    """

    kind: ClassVar[str]

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
    def save(self, weights: Mapping[str, Tensor], folder: Path, dtype: torch.dtype) -> None:
        """Write the trained parameters as readers expect them."""


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
