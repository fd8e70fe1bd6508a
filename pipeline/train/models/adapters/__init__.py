"""Train a part of a model: added parameters, or some of its own, with the rest frozen.

An `Adapter` is a file here, and a line in `KINDS`. It changes a module on the meta device before any strategy does, by
`layer_classes`, and freezes what is not trained. What is trained then decides what the optimizer, the moving
average and checkpoints hold.
"""

from __future__ import annotations

import difflib
import itertools
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from sana_pipe.base.errors import ConfigError
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.spec import ModelSpec, Values

KINDS: dict[str, str] = {
    "lora": "sana_pipe.train.models.adapters.lora:LoRA",
    "dora": "sana_pipe.train.models.adapters.lora:DoRA",
    "only": "sana_pipe.train.models.adapters.chosen:Chosen",
    "controlnet": "sana_pipe.train.models.adapters.controlnet:ControlNet",
}
"""`kind` -> module:class."""


class Adapter(ABC):
    """A part of a model that is trained. As a string: what it is, for people.

    Attributes:
        kind: its name in `KINDS`.
        formats: what `save` writes, in the order of preference.
        stays: what is trained stays next to the model's parameters, which do not change.
        readme: template of an export's README.
    """

    kind: ClassVar[str]
    formats: ClassVar[tuple[str, ...]] = ()
    stays: ClassVar[bool] = False
    readme: ClassVar[str] = "adapter"

    @classmethod
    def from_config(cls, train: TrainConfig, spec: ModelSpec, start: bool) -> Self:
        """Make the adapter from the options of a run, as far as they fit the model. start: with the start values of a
        file they name."""
        raise NotImplementedError(f"{cls.__name__} has no options")

    @abstractmethod
    def apply(self, module: nn.Module) -> None:
        """Add parameters and freeze the others, in place, on the meta device."""

    @abstractmethod
    def initial(self, name: str, shape: tuple[int, ...], seed: int, base: Values) -> Tensor:
        """Start value of an added parameter, from name, seed and the model's start values; on the CPU."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return the settings, for checkpoints; `from_dict` reads them."""

    @classmethod
    @abstractmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make the adapter from what `to_dict` returned."""

    @abstractmethod
    def merged(self, name: str, weight: Tensor, trained: Mapping[str, Tensor], strength: float = 1.0) -> Tensor:
        """A parameter of the model with the training in it, for a model without the adapter; if the adapter `stays`, a
        parameter that is trained.

        Args:
            name, weight: of the model's parameter, as it was before the training; or of a trained one.
            trained: the parameters that are trained, by name.
            strength: a factor of the change.

        Returns:
            fp32 if the training changed it, else `weight` itself.
        """

    def change_norms(self, trained: Mapping[str, Tensor]) -> dict[str, float]:
        """Frobenius norm of the change of each module's matrix, by its path; empty where it takes the base to know."""
        return {}

    def save(
        self,
        form: str,
        weights: Merged,
        folder: Path,
        dtype: torch.dtype,
        header: Mapping[str, str] = {},
        stem: str = "",
    ) -> None:
        """Write the trained parameters in one of `formats`, as its readers expect them.

        Args:
            header: what the file says of itself, see `files.header`.
            stem: of its name, where readers expect no other.
        """
        raise NotImplementedError(form)


class Merged(Mapping[str, Tensor]):
    """The weights of a base with an adapter's change, by parameter name: fp32, on the CPU, in the module's layout. The
    parameters of an adapter that `stays` follow the base's. Each is read and computed on access. strength: a factor of
    the change; 0 is the base, without the adapter's parameters."""

    def __init__(
        self, spec: ModelSpec, adapter: Adapter, base: Values, trained: Mapping[str, Tensor], strength: float = 1.0
    ):
        self.spec, self.adapter, self.base, self.trained, self.strength = spec, adapter, base, trained, strength
        self._added: frozenset[str] = frozenset(trained) if adapter.stays and strength else frozenset()

    def __getitem__(self, name: str) -> Tensor:
        if name in self._added:
            weight = self.trained[name]
        else:
            shape = self.base.shapes[name]
            weight = self.base.read(name, [0] * len(shape), shape).float()
        return self.adapter.merged(name, weight, self.trained, self.strength) if self.strength else weight.clone()

    def __iter__(self) -> Iterator[str]:
        return itertools.chain(self.base.shapes, self._added)

    def __len__(self) -> int:
        return len(self.base.shapes) + len(self._added)

    def at(self, strength: float) -> Merged:
        """The same with another strength."""
        return Merged(self.spec, self.adapter, self.base, self.trained, strength)


def adapter_from(values: Mapping[str, Any] | None) -> Adapter | None:
    """The adapter of a checkpoint's document; None: every parameter was trained."""
    if values is None:
        return None
    if values.get("kind") not in KINDS:
        raise ConfigError(
            "the checkpoint has an adapter of an unknown kind",
            expected=" or ".join(KINDS) or "none",
            found=str(values.get("kind")),
            fix="use the version of sana-pipe that wrote it",
        )
    return pkgutil.resolve_name(KINDS[values["kind"]]).from_dict(values)


def adapter_of(train: TrainConfig, spec: ModelSpec, *, start: bool = True) -> Adapter | None:
    """The adapter of a configuration; None: every parameter is trained. start: False: without the file that it starts
    from, for a prediction."""
    kind = adapter_class(train)
    return None if kind is None else kind.from_config(train, spec, start)


def adapter_class(train: TrainConfig) -> type[Adapter] | None:
    """The class of a configuration's adapter; None: every parameter is trained."""
    others = {"only": train.only, "controlnet": train.controlnet}
    kind = next((kind for kind, given in others.items() if given is not None), None)
    if train.adapter is not None:
        kind = train.adapter.kind
    return None if kind is None else pkgutil.resolve_name(KINDS[kind])


def matching(patterns: Sequence[str], names: Iterable[str], option: str) -> list[str]:
    """The names of modules or parameters that patterns choose, in the order of `names`. `*` stands for any text; a
    pattern fits a whole name or its end (`attn2.to_k`, `transformer_blocks.1?.attn*`). One without a fit is refused."""
    names = list(names)
    chosen: set[str] = set()
    for pattern in patterns:
        fitting = {name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")}
        if not fitting:
            parts = pattern.count(".") + 1
            ends = list(dict.fromkeys(".".join(name.split(".")[-parts:]) for name in names))
            near = difflib.get_close_matches(pattern, [*ends, *names], n=3, cutoff=0.5) or ends[:8]
            raise ConfigError(
                f"{option}: {pattern!r} matches no name in the model", expected=f"such as {', '.join(near)}"
            )
        chosen |= fitting
    return [name for name in names if name in chosen]
