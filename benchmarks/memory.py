"""Bytes that autograd keeps for the backward pass: activation checkpointing off and on, fp32 and bf16.

A few blocks of Sana 0.6B's width at 512 px (16 x 16 latent, 100 text rows); every tensor that is saved is counted once
per storage, parameters left out. The ratio is that of the block stack.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.report import finish, table
from pipeline.models.sana import SanaTransformer
from pipeline.models.sana_config import SanaConfig
from pipeline.parallel.activation import checkpoint_blocks


def saved_bytes(model: SanaTransformer, dtype: torch.dtype) -> int:
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or pack(t), lambda t: t):
        out = model(
            torch.randn(1, 32, 16, 16, dtype=dtype), torch.randn(1, 100, 2304, dtype=dtype),
            torch.ones(1, 100, dtype=torch.bool), torch.tensor([500.0]),
        )  # fmt: skip
    out.float().square().mean().backward()
    return sum(seen.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    layers = 3 if parser.parse_args().quick else 8
    rows, ratios = [], {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        config = SanaConfig(
            num_layers=layers, num_attention_heads=36, attention_head_dim=32, num_cross_attention_heads=16,
            cross_attention_head_dim=72, cross_attention_dim=1152,
        )  # fmt: skip
        model = SanaTransformer(config).to(dtype).train()
        plain = saved_bytes(model, dtype)
        checkpoint_blocks(model.blocks)
        full = saved_bytes(model, dtype)
        rows.append([name, layers, plain / 2**20, full / 2**20, plain / full])
        ratios[name] = plain / full
    table(["dtype", "blocks", "none MiB", "full MiB", "ratio"], rows)
    finish({"full": ratios["fp32"], "full_bf16": ratios["bf16"]})


if __name__ == "__main__":
    main()
