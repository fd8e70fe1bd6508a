"""The dtype of the tokens between the blocks, under every way to run a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sana_pipe.base.launch import Launch
from sana_pipe.train.models.sana import SanaTransformer
from sana_pipe.train.models.sana_config import SanaConfig
from sana_pipe.train.models.sana_shape import Numerics
from sana_pipe.train.parallel import mesh
from sana_pipe.train.parallel.parallelize import parallelize
from tests.support.workers import tiny_run

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
DEEP = SanaConfig(
    in_channels=4,
    out_channels=4,
    num_attention_heads=4,
    attention_head_dim=32,
    num_cross_attention_heads=4,
    cross_attention_head_dim=32,
    cross_attention_dim=128,
    caption_channels=24,
    num_layers=8,
)


def gradients(settings: Any, seen: list[torch.dtype]) -> dict[str, Tensor]:
    """Of one step, spread as the settings say; `seen` gets the dtype of what each block returns."""
    with mesh.open_mesh(Launch(), settings.train.parallel, CPU) as group:
        parallel_model = parallelize(tiny_run.model(settings), group, settings.train)
        for block in parallel_model.module.blocks:  # type: ignore[union-attr]
            block.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
        return tiny_run.gradients(parallel_model, settings, [tiny_run.global_batch(0)])[2]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16_pure"])
def test_the_tokens_are_fp32(precision: str) -> None:
    seen: list[torch.dtype] = []
    gradients(tiny_run.config(precision=precision, layers=2), seen)
    assert seen == [torch.float32] * 2


def test_fp32_tokens_halve_the_error_of_a_deep_bf16_model() -> None:
    """Gradients of the same weights, rounded to bf16 for all three, against fp32 arithmetic."""
    generator = torch.Generator().manual_seed(0)
    latents, captions = torch.randn(2, 4, 8, 8, generator=generator), torch.randn(2, 10, 24, generator=generator)
    mask, times = torch.ones(2, 10, dtype=torch.bool), torch.tensor([300.0, 900.0])
    start = SanaTransformer.from_scratch(DEEP, 0).bfloat16().state_dict()

    def actual(numerics: Numerics, dtype: torch.dtype) -> dict[str, Tensor]:
        model = SanaTransformer(DEEP, numerics).to(dtype)
        model.load_state_dict(start)
        with torch.no_grad():
            model.patch_embed.proj.weight.mul_(16)  # as deep in a trained model, what a block adds is small
        out = model(latents.bfloat16().to(dtype), captions.bfloat16().to(dtype), mask, times)
        assert out.dtype == dtype
        out.float().square().mean().backward()
        return {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}

    exact = actual(Numerics(), torch.float32)
    errors = [tiny_run.distance(actual(Numerics(fp32), torch.bfloat16), exact) for fp32 in (True, False)]
    print(errors)
    assert errors[0] <= 0.6 * errors[1]


@pytest.mark.parametrize(
    "options",
    [
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": "full", "activation_compression": "int8"},
        pytest.param(
            {"compile": "block", "activation_checkpointing": "full"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_fp32_tokens_go_with_every_way_to_keep_activations(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sana_pipe.train.parallel.parallelize.COMPILE_BACKEND", "aot_eager")
    seen: list[torch.dtype] = []
    base: dict[str, Any] = {"precision": "bf16", "layers": 2}
    expected = gradients(tiny_run.config(**base), [])
    actual = gradients(tiny_run.config(**base, **options), seen)
    assert set(seen) == {torch.float32}
    limit = 2e-2 if "activation_compression" in options else 2e-3 if "compile" in options else 0.0
    assert tiny_run.distance(actual, expected) <= limit
