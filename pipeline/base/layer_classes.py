"""Replace a layer's class by a subclass, in a stated order.

What: `add_mixin` puts a mixin before a module's class. Names of parameters, the state dict and deep copies stay as they
are, which a wrapper module would change.
Several mixins on one layer are ordered by `ORDER`, whichever came first, so that none bypasses another: a mixin calls
what is below it by `super().forward`. One that computes the layer itself (`replaces`) has nothing below it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from torch import nn

ORDER = ("activations", "compression", "sharding", "adapter")
"""Outermost first: what a block keeps, what a layer's saved tensors become, shards of a matrix, added parameters."""


class LayerMixin:
    """Goes before a layer's class.

    Attributes:
        place: in `ORDER`.
        replaces: its forward pass does not call the layer's.
        adapter_off: of an adapted layer: it is the base's for now (`without_adapter`).
    """

    place: ClassVar[str]
    replaces: ClassVar[bool] = False
    adapter_off: bool


_CLASSES: dict[tuple[tuple[type[LayerMixin], ...], type[nn.Module]], type[nn.Module]] = {}


def add_mixin(module: nn.Module, mixin: type[LayerMixin]) -> None:
    """Replace the module's class by a subclass that has `mixin` at its place. Idempotent.

    Raises:
        ValueError: two mixins of one place, or one below another that does not call it.
    """
    present, cls = mixins_of(module)
    if mixin in present:
        return
    ordered = tuple(sorted((*present, mixin), key=lambda each: ORDER.index(each.place)))
    for upper, lower in itertools.pairwise(ordered):
        if upper.place == lower.place or upper.replaces:
            raise ValueError(f"{upper.__name__} of a {cls.__name__} would bypass {lower.__name__}")
    if (ordered, cls) not in _CLASSES:
        name = "".join(each.__name__ for each in ordered) + cls.__name__
        _CLASSES[ordered, cls] = type(name, (*ordered, cls), {"__module__": cls.__module__, "_mixed": (ordered, cls)})
    module.__class__ = _CLASSES[ordered, cls]


def mixins_of(module: nn.Module) -> tuple[tuple[type[LayerMixin], ...], type[nn.Module]]:
    """The mixins of a module, outermost first, and its class without them."""
    return type(module).__dict__.get("_mixed", ((), type(module)))


def adapted_layers(module: nn.Module) -> list[LayerMixin]:
    """The layers of a module that `without_adapter` makes the base's."""
    return [layer for layer in module.modules() if isinstance(layer, LayerMixin) and hasattr(layer, "adapter_off")]


@contextmanager
def without_adapter(module: nn.Module) -> Iterator[None]:
    """Inside, the adapted layers of a module are the base's."""
    layers = adapted_layers(module)
    for layer in layers:
        layer.adapter_off = True
    try:
        yield
    finally:
        for layer in layers:
            layer.adapter_off = False
