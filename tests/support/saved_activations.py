"""What a small model keeps for the backward pass, by the way in which it is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.saved_bytes import saved_bytes
from sana_pipe.train.models.sana import SanaTransformer
from sana_pipe.train.models.sana_config import SanaConfig
from sana_pipe.train.parallel import activation_checkpoint
from sana_pipe.train.parallel.activation_checkpoint import ManagedActivations, apply_activation_checkpointing
from sana_pipe.train.parallel.saved_tensors import Compressor
from tests.support.workers import tiny_run

SHAPE = SanaConfig(
    in_channels=4,
    out_channels=4,
    num_attention_heads=8,
    attention_head_dim=32,
    num_cross_attention_heads=4,
    cross_attention_head_dim=64,
    cross_attention_dim=256,
    caption_channels=24,
    num_layers=4,
)
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def settings(checkpointing: str = "none", compression: str = "none") -> Any:
    return tiny_run.config(activation_checkpointing=checkpointing, activation_compression=compression).train


def model(dtype: torch.dtype, *way: Any, layers: int = 4) -> SanaTransformer:
    made = SanaTransformer.from_scratch(replace(SHAPE, num_layers=layers), 0).to(dtype)
    apply_activation_checkpointing(made.blocks, settings(*way))
    return made


def inputs(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    mask = torch.arange(32)[None] < torch.tensor([20, 32])[:, None]
    latents = torch.randn(2, 4, 12, 10, generator=generator).to(dtype)
    captions = torch.randn(2, 32, 24, generator=generator).to(dtype)
    return [latents, captions, mask, torch.tensor([300.0, 900.0])]


def measure(module: SanaTransformer, dtype: torch.dtype) -> tuple[int, dict[str, Tensor]]:
    """Bytes kept, gradients."""
    given = inputs(dtype)
    kept, out = saved_bytes(lambda: module(*given), [*module.parameters(), *given])
    out.float().square().mean().backward()
    return kept, {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def compressors(module: nn.Module) -> set[Compressor]:
    managed = [m for m in module.modules() if isinstance(m, ManagedActivations)]
    compressed = [m for m in module.modules() if isinstance(m, activation_checkpoint.CompressedActivations)]
    every = {m.activation_policy.compressor for m in managed} | {m.compressor for m in compressed}
    return {compressor for compressor in every if compressor is not None}


# least number of times fewer bytes in fp32 and bf16 (all of the model, its ends included), gradients exact?
WAYS = {
    "full": (("full",), 11.4, 11.1, True),
    "selective": (("selective",), 2.5, 2.45, True),
    "every-2": (("every-2",), 1.8, 1.8, True),
    "int8": (("none", "int8"), 1.5, 1.25, False),
    "full, int8": (("full", "int8"), 17.5, 14.2, False),
    "every-2, int8": (("every-2", "int8"), 2.75, 2.3, False),
}
