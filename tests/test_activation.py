"""What blocks keep for the backward pass: fewer bytes, the same gradients, nothing kept that must not be."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.config import load
from pipeline.errors import ConfigError
from pipeline.models.sana import SanaTransformer
from pipeline.models.sana_config import SanaConfig
from pipeline.parallel import activation, saved
from pipeline.parallel.activation import compressible, keep_activations
from pipeline.parallel.compression import BLOCK, quantise, restore
from pipeline.parallel.kept import kept_bytes
from pipeline.parallel.saved import SMALLEST, Keeper
from tests.workers import tiny_run

SHAPE = SanaConfig(
    in_channels=4, out_channels=4, num_attention_heads=8, attention_head_dim=32, num_cross_attention_heads=4,
    cross_attention_head_dim=64, cross_attention_dim=256, caption_channels=24, num_layers=4,
)  # fmt: skip
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def settings(checkpointing: str = "none", compression: str = "none", offload: bool = False) -> Any:
    return tiny_run.config(
        activation_checkpointing=checkpointing, activation_compression=compression, activation_offload=offload
    ).train


def model(dtype: torch.dtype, *way: Any, layers: int = 4) -> SanaTransformer:
    made = SanaTransformer.from_scratch(replace(SHAPE, num_layers=layers), 0).to(dtype)
    keep_activations(made.blocks, settings(*way))
    return made


def inputs(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    mask = torch.arange(32)[None] < torch.tensor([20, 32])[:, None]
    latents = torch.randn(2, 4, 12, 10, generator=generator).to(dtype)
    captions = torch.randn(2, 32, 24, generator=generator).to(dtype)
    return [latents, captions, mask, torch.tensor([300.0, 900.0])]


def measure(module: SanaTransformer, dtype: torch.dtype) -> tuple[int, int, dict[str, Tensor]]:
    """Bytes kept on the device, bytes kept in host memory, gradients."""
    given = inputs(dtype)
    total, out = kept_bytes(lambda: module(*given), [*module.parameters(), *given])
    host = sum(keeper.host_bytes() for keeper in keepers(module))
    out.float().square().mean().backward()
    return total - host, host, {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def keepers(module: nn.Module) -> set[Keeper]:
    found = {m.kept.keeper for m in module.modules() if isinstance(m, activation.Kept)}
    return {k for k in found | {m.keeper for m in module.modules() if isinstance(m, activation.Compressed)} if k}


@pytest.fixture(scope="module")
def plain() -> dict[str, tuple[int, int, dict[str, Tensor]]]:
    return {name: measure(model(dtype), dtype) for name, dtype in PRECISIONS.items()}


# least number of times fewer bytes in fp32 and bf16 (all of the model, its ends included), gradients exact?
WAYS = {
    "full": (("full",), 18, 19, True),
    "selective": (("selective",), 3.8, 4.1, True),
    "every-2": (("every-2",), 1.85, 1.85, True),
    "int8": (("none", "int8"), 1.75, 1.3, False),
    "fp8": (("none", "fp8"), 1.75, 1.3, False),
    "full, int8": (("full", "int8"), 27, 24, False),
    "every-2, int8": (("every-2", "int8"), 3.1, 2.4, False),
    "offload": (("none", "none", True), 32, 32, True),
    "full, offload": (("full", "none", True), 35, 35, True),
    "selective, offload": (("selective", "none", True), 4.3, 4.5, True),
    "full, int8, offload": (("full", "int8", True), 35, 35, False),
    "int8, offload": (("none", "int8", True), 32, 32, False),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", WAYS)
def test_fewer_bytes_are_kept_and_the_gradients_are_the_same(
    name: str, precision: str, plain: dict[str, tuple[int, int, dict[str, Tensor]]]
) -> None:
    way, fp32, bf16, exact = WAYS[name]
    without, _, expected = plain[precision]
    module = model(PRECISIONS[precision], *way)
    kept, host, found = measure(module, PRECISIONS[precision])
    assert without / kept >= (fp32 if precision == "fp32" else bf16), f"{without / kept:.2f} times fewer"
    assert (host > 0) == ("offload" in name)
    if exact:
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[n], expected[n]) for n in expected)
    else:
        assert tiny_run.distance(found, expected) <= (1e-2 if "int8" in name else 4e-2)
        assert tiny_run.distance(found, expected) > 0
    gc.collect()
    assert all(keeper.host_bytes() == 0 for keeper in keepers(module)), "nothing stays after the backward pass"
