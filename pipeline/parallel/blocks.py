"""Find the blocks of a model: the repeated layers that strategies take hold of, one by one.

What: `find_blocks` looks for the list of modules of one class that holds most of the model's parameters.
Why by looking and not by class names: a name in a configuration is right for one model, and where it is wrong FSDP
wraps nothing, or stops with "could not find the transformer layer class".
Price: a model whose layers are not kept in a `ModuleList` or `ModuleDict`, or are of several classes, is refused.
"""

from __future__ import annotations

from torch import nn


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of `model` in order. To be called before anything was wrapped.

    Raises:
        ValueError: no list of equal modules holds half of the parameters or more.
    """
    best: list[nn.Module] = []
    for module in model.modules():
        held = list(module.children())
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and len({type(child) for child in held}) == 1:
            best = max(best, held, key=_size)
    if 2 * _size(best) < _size([model]):
        raise ValueError(
            f"{type(model).__name__} has no list of equal blocks with half of its parameters: found "
            f"{len(best)} x {type(best[0]).__name__ if best else 'nothing'}"
        )
    return best


def _size(modules: list[nn.Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())
