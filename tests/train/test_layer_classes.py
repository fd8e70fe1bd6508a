"""Mixins of a layer have one order, whichever came first, and none bypasses another."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn

from sana_pipe.base.layer_classes import LayerMixin, add_mixin, mixins_of
from sana_pipe.train.parallel.activation_checkpoint import CompressedActivations
from sana_pipe.train.parallel.tensor_parallel import ShardedColumns, ShardedRows


def telling(where: str) -> type[LayerMixin]:
    class Told(LayerMixin):
        place = where

        def forward(self, x: torch.Tensor) -> Any:
            self.told.append(where)  # type: ignore[attr-defined]
            return super().forward(x)  # type: ignore[misc]

    return Told


Outer, Middle, Inner = telling("compression"), telling("sharding"), telling("adapter")


@pytest.mark.parametrize("order", itertools.permutations((Outer, Middle, Inner)))
def test_the_order_is_the_stated_one(order: tuple[type[LayerMixin], ...]) -> None:
    layer = nn.Linear(3, 2)
    plain, names = copy.deepcopy(layer), list(layer.state_dict())
    for mixin in (*order, *order):
        add_mixin(layer, mixin)
    layer.told = []  # type: ignore[assignment]
    x = torch.randn(4, 3)
    assert torch.equal(layer(x), plain(x))
    assert layer.told == ["compression", "sharding", "adapter"]
    assert list(copy.deepcopy(layer).state_dict()) == names
    assert mixins_of(layer) == ((Outer, Middle, Inner), nn.Linear)


@pytest.mark.parametrize(("first", "second"), [(ShardedColumns, Inner), (Inner, ShardedRows), (ShardedRows, Middle)])
def test_a_layer_that_would_be_bypassed_is_refused(first: Any, second: Any) -> None:
    layer = nn.Linear(3, 2)
    add_mixin(layer, CompressedActivations)
    add_mixin(layer, first)
    with pytest.raises(ValueError, match="bypass"):
        add_mixin(layer, second)
