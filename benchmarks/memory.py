"""Bytes that a forward pass saves for the backward pass, by technique, and those of the optimizers' states.

Sana 1.6B at 1024 px: 32 x 32 latent tokens, 300 text rows, one sample, 20 blocks. All memory that is allocated in the
forward pass and outlives it is counted, each storage once, without parameters and inputs (`benchmarks.saved_bytes`), on
fake tensors of the real sizes, so nothing is computed; the CPU's kernels save the same as a GPU's with memory-efficient
attention. First a smaller model is counted on real and on fake tensors, and both must agree to the byte.
`full`, `selective` and `int8` compare one block's saved bytes; those of the model's ends are the same under every
technique and listed separately. Optimizer states: measured after one real step of a narrow model with Sana's shapes.
"""

from __future__ import annotations

import argparse
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from benchmarks.report import finish, table
from benchmarks.saved_bytes import saved_bytes
from sana_pipe.base.processes import run_and_exit
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.sana import SanaTransformer
from sana_pipe.train.models.sana_config import SanaConfig
from sana_pipe.train.models.sana_shape import DIFFUSERS, Numerics
from sana_pipe.train.parallel.activation_checkpoint import apply_activation_checkpointing
from sana_pipe.train.training import optimizers
from sana_pipe.train.training.config import OptimConfig

LAYERS = 20
TECHNIQUES: dict[str, tuple[str, Literal["none", "int8"]]] = {
    "none": ("none", "none"),
    "full": ("full", "none"),
    "selective": ("selective", "none"),
    "every-2": ("every-2", "none"),
    "int8": ("none", "int8"),
    "full, int8": ("full", "int8"),
}


def technique(name: str) -> TrainConfig:
    checkpointing, compression = TECHNIQUES[name]
    return TrainConfig(activation_checkpointing=checkpointing, activation_compression=compression)


def shape(layers: int, heads: int = 70, cross: int = 20) -> SanaConfig:
    """Sana 1.6B, or a narrower one."""
    return SanaConfig(
        num_layers=layers,
        num_attention_heads=heads,
        num_cross_attention_heads=cross,
        cross_attention_head_dim=heads * 32 // cross,
        cross_attention_dim=heads * 32,
    )


def fake_model(
    config: SanaConfig, dtype: torch.dtype, train: TrainConfig, numerics: Numerics = DIFFUSERS
) -> SanaTransformer:
    """A model of fake parameters; call it within a FakeTensorMode."""
    model = SanaTransformer.on_meta(config, numerics)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device="cpu")))
    apply_activation_checkpointing(model.blocks, train)
    return model


def real_model(config: SanaConfig, dtype: torch.dtype, train: TrainConfig) -> SanaTransformer:
    model = SanaTransformer.from_scratch(config, 0, dtype=dtype)
    apply_activation_checkpointing(model.blocks, train)
    return model


def count(model: SanaTransformer, dtype: torch.dtype, side: int, rows: int) -> int:
    """Saved bytes."""
    config = model.config
    given: list[Tensor] = [
        torch.randn(1, config.in_channels, side, side, dtype=dtype),
        torch.randn(1, rows, config.caption_channels, dtype=dtype),
        torch.ones(1, rows, dtype=torch.bool),
        torch.rand(1),
    ]
    saved, _graph = saved_bytes(lambda: model(*given), [*model.parameters(), *given])
    return saved


def check_the_count() -> None:
    """Fake tensors must give exactly the bytes of real ones."""
    config = shape(2, heads=8, cross=4)
    for name in TECHNIQUES:
        for dtype in (torch.float32, torch.bfloat16):
            real = count(real_model(config, dtype, technique(name)), dtype, 12, 40)
            with FakeTensorMode():
                fake = count(fake_model(config, dtype, technique(name)), dtype, 12, 40)
            if real != fake:
                raise SystemExit(f"{name}, {dtype}: {real} bytes in a real run, {fake} on fake tensors")
    print(f"a narrow model, {len(TECHNIQUES)} techniques in fp32 and bf16: bytes of a real run = bytes on fake tensors")


def activations(dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    """MB saved by a block, and MB by the ends, by technique. Two lengths suffice: blocks are alike."""
    megabytes = {}
    for name in TECHNIQUES:
        with FakeTensorMode():
            short, long = (count(fake_model(shape(n), dtype, technique(name)), dtype, 32, 300) for n in (2, 4))
        megabytes[name] = (long - short) / 2 / 1e6, (2 * short - long) / 1e6
    return megabytes


def state_bytes(name: str) -> float:
    """Bytes of an optimizer's state per parameter, after one step. Each storage once, also inside tensor subclasses."""
    config = OptimConfig.model_validate({"name": name, "betas": None, "eps": None})
    model = SanaTransformer.from_scratch(shape(1, heads=36, cross=16), 0)
    optimizer = optimizers.build(model, config, torch.device("cpu"))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    total = sum({s._cdata: s.nbytes() for tensor in tensors for s in storages(tensor)}.values())
    return total / sum(parameter.numel() for parameter in model.parameters())


def storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor.untyped_storage()]
    names, _ = tensor.__tensor_flatten__()
    return [storage for name in names for storage in storages(getattr(tensor, name))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.parse_args()
    check_the_count()
    figures: dict[str, float] = {}
    for dtype, suffix in ((torch.float32, ""), (torch.bfloat16, "_bf16")):
        megabytes = activations(dtype)
        block, ends = megabytes["none"]
        rows: list[list[Any]] = []
        for name, (mb, mb_ends) in megabytes.items():
            whole = LAYERS * mb + mb_ends
            rows.append([name, mb, block / mb if mb else "-", mb_ends, whole, (LAYERS * block + ends) / whole])
        print(f"\n{str(dtype).removeprefix('torch.')}, one sample")
        table(["technique", "MB a block", "times fewer", "MB of the ends", "MB of all", "times fewer"], rows)
        figures |= {name + suffix: block / megabytes[name][0] for name in ("full", "selective", "int8")}
        figures["full_model" + suffix] = rows[1][-1]
    states = {name: state_bytes(name) for name in ("adamw", "came", "adamw8bit")}
    print()
    table(["optimizer", "bytes of state per parameter"], [[name, f"{value:.3f}"] for name, value in states.items()])
    finish({**figures, **{name + "_bytes_per_param": value for name, value in states.items()}})


if __name__ == "__main__":
    run_and_exit(main)
