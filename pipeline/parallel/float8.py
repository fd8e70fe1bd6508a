"""Matrix products of the blocks in float8, by torchao: Linear layers and 1x1 convolutions of channels-last tokens.

What: `apply` replaces the classes of these layers. Each product's factors are cast to e4m3 when they are used; each
row of a factor, along the sum, has its scale, a power of two: torchao's recipe `rowwise`. With
`rowwise_with_gw_hp` the gradients of the weights stay products of the compute dtype.
Why by replacing classes: parameters, their names and their fp32 values stay, and so do checkpoints, exports and FSDP2's
shards. torchao's converter knows Linear layers alone, and half of Sana's weights are 1x1 convolutions.
On a CPU the products are emulated: the factors are rounded to float8, and multiplied in the compute dtype.
Price: casts of every factor, which only torch.compile makes cheap; query, key and value are three products again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.errors import ConfigError, UserError

MULTIPLE = 16
"""The products of a GPU want sizes of a multiple of this; tokens are padded to it by torchao."""
CAPABILITY = (8, 9)
"""Least compute capability of a GPU with float8 products."""


class _Float8:
    """Mixin before a layer's class. `settings`: torchao's, of the products and of the casts."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    settings: tuple[Any, Any]

    def forward(self, x: Tensor) -> Tensor:
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args as product

        out = product.apply(x, self.weight.flatten(1).t(), *self.settings)
        return out if self.bias is None else out + self.bias.to(out.dtype)


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def apply(blocks: Iterable[nn.Module], recipe: str, device_type: str) -> None:
    """Let the layers of each block multiply in float8; in place, before `fully_shard`.

    Args:
        recipe: `train.float8`, not none.
    """
    settings = _settings(recipe, emulate=device_type == "cpu")
    for block in blocks:
        for _, layer in layers(block):
            cls = type(layer)
            if cls not in _CLASSES:
                _CLASSES[cls] = type(f"Float8{cls.__name__}", (_Float8, cls), {"__module__": cls.__module__})
            layer.__class__ = _CLASSES[cls]  # type: ignore[assignment]
            layer.settings = settings  # type: ignore[assignment]


def layers(block: nn.Module) -> Iterator[tuple[str, nn.Linear | nn.Conv2d]]:
    """Name and module of each layer whose products are in float8."""
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1)):
            yield name, module


def _settings(recipe: str, emulate: bool) -> tuple[Any, Any]:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    config = dataclasses.replace(config, emulate=emulate, pad_inner_dim=True)
    # torchao makes the products' settings in a layer, and mends inductor when it converts the first layer
    template: Any = convert_to_float8_training(nn.Linear(MULTIPLE, MULTIPLE, device="meta"), config=config)
    return template.linear_mm_config, template.config


def check(recipe: str, device: torch.device) -> None:
    """Refuse a device without float8 products, or a missing torchao.

    Args:
        recipe: `train.float8`, not none.

    Raises:
        UserError: names it.
    """
    off = "--set train.float8=none"
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"train.float8: {recipe} has no products on {device.type}", fix=off)
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < CAPABILITY:
        raise ConfigError(
            f"train.float8: {recipe} has no products on this GPU",
            expected="compute capability {}.{} or newer".format(*CAPABILITY),
            found="{}, {}.{}".format(torch.cuda.get_device_name(device), *capability),
            fix=off,
        )
    try:
        import torchao.float8  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"train.float8: {recipe} needs torchao, which is not installed or does not fit this torch",
            found=str(error),
            fix=f"pip install 'sana-pipe[torchao]', or {off}",
        ) from None


def check_sizes(block: nn.Module, recipe: str) -> None:
    """Refuse layers that no float8 product takes.

    Raises:
        ConfigError: names them.
    """
    sizes = {name: (layer.weight.shape[1], layer.weight.shape[0]) for name, layer in layers(block)}
    wrong = {name: size for name, size in sizes.items() if any(n % MULTIPLE for n in size)}
    if wrong:
        raise ConfigError(
            f"train.float8: {recipe} cannot multiply by all layers of this model",
            expected=f"inputs and results of a multiple of {MULTIPLE}",
            found=", ".join(f"{name} {first} x {second}" for name, (first, second) in wrong.items()),
            fix="--set train.float8=none, or a model of other widths",
        )
