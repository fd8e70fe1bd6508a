"""`train.numerics: nvlabs` trains as NVlabs' trainer: fifty steps against a reference written from their formulas."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sana_pipe.base.launch import Launch
from sana_pipe.train.kernels.linear_attention import linear_attention
from sana_pipe.train.models.config import ModelConfig, StartWeights
from sana_pipe.train.models.sana import SanaTransformer
from sana_pipe.train.models.sana_config import SanaConfig
from sana_pipe.train.models.sana_files import save_weights
from sana_pipe.train.models.sana_shape import deinterleave
from sana_pipe.train.training import metrics
from sana_pipe.train.training.trainer import fit
from tests.support import nvlabs_reference as nvlabs
from tests.support.checkpoints import load_model_state
from tests.support.tiny_sana import load_transformer
from tests.support.workers import tiny_run

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS, WARMUP, LAYERS = 50, 20, 2
ARCH = {"num_attention_heads": 2, "attention_head_dim": 32, "num_cross_attention_heads": 4}
QK_NORM = "rms_norm_across_heads"
RATE, DECAY, CLIP = 5e-4, 0.01, 0.1
NAMES = {
    "patch_embed.proj": "x_embedder.proj",
    "caption_projection.linear_1": "y_embedder.y_proj.fc1",
    "caption_projection.linear_2": "y_embedder.y_proj.fc2",
    "caption_norm": "attention_y_norm",
    "time_embed.emb.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "time_embed.linear": "t_block.1",
    "time_embed.emb.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "proj_out": "final_layer.linear",
}
BLOCK_NAMES = {
    "attn1.to_out.0": "attn.proj",
    "attn1.norm_q": "attn.q_norm",
    "attn1.norm_k": "attn.k_norm",
    "attn2.to_q": "cross_attn.q_linear",
    "attn2.to_out.0": "cross_attn.proj",
    "attn2.norm_q": "cross_attn.q_norm",
    "attn2.norm_k": "cross_attn.k_norm",
    "ff.conv_inverted": "mlp.inverted_conv.conv",
    "ff.conv_depth": "mlp.depth_conv.conv",
    "ff.conv_point": "mlp.point_conv.conv",
}


def theirs(weights: dict[str, Tensor]) -> nvlabs.Weights:
    """Our weights under NVlabs' names."""
    left = {name: deinterleave(name, value.detach()).float().clone() for name, value in weights.items()}
    result = {"final_layer.scale_shift_table": left.pop("scale_shift_table")}
    for ours, name in NAMES.items():
        result |= {
            f"{name}.{kind}": left.pop(f"{ours}.{kind}") for kind in ("weight", "bias") if f"{ours}.{kind}" in left
        }
    for number in range(LAYERS):
        ours, block = f"transformer_blocks.{number}.", f"blocks.{number}."
        result[block + "scale_shift_table"] = left.pop(ours + "scale_shift_table")
        for kind in ("weight", "bias"):
            for name, parts in (
                ("attn.qkv", ("attn1.to_q", "attn1.to_k", "attn1.to_v")),
                ("cross_attn.kv_linear", ("attn2.to_k", "attn2.to_v")),
            ):
                rows = [left.pop(f"{ours}{part}.{kind}") for part in parts if f"{ours}{part}.{kind}" in left]
                result |= {f"{block}{name}.{kind}": torch.cat(rows)} if rows else {}
            for part, name in BLOCK_NAMES.items():
                if f"{ours}{part}.{kind}" in left:
                    result[f"{block}{name}.{kind}"] = left.pop(f"{ours}{part}.{kind}")
    assert not left
    return result


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Folders of weights in which every parameter matters, by qk_norm. The tokens have no common direction: a query
    channel that is negative for all of them has no gradient but rounding noise. Seed: with some (0 of 0 to 4), a value
    comes so near to ReLU's corner that rounding decides on its gradient; CAME then differs by 1e-5."""
    result = {}
    for qk_norm in (False, True):
        arch = tiny_run.config(layers=LAYERS, arch={**ARCH, "qk_norm": QK_NORM if qk_norm else None}).model.arch
        assert arch is not None
        model = SanaTransformer.from_scratch(SanaConfig.from_arch(arch, 8), 1)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
            model.caption_norm.weight.fill_(1.0)
            model.get_parameter("patch_embed.proj.bias").zero_()
            model.patch_embed.proj.weight.mul_(8)
        result[qk_norm] = tmp_path_factory.mktemp("start")
        save_weights(model.state_dict(), model.config, result[qk_norm], torch.float32)
    return result


def settings_of(folder: Path, start: Path, optimizer: str, precision: str, **more: Any) -> Any:
    optim = {
        "name": optimizer,
        "lr": RATE * math.sqrt(tiny_run.GLOBAL_BATCH / 256),
        "warmup_steps": WARMUP,
        "clip": CLIP,
        "weight_decay": DECAY,
        "betas": None,
        "eps": None,
    }
    options = {"numerics": "nvlabs", "microbatch": 8, "save_every": STEPS, **more}
    settings = tiny_run.config(folder, steps=STEPS, precision=precision, optim=optim, **options)
    return settings.model_copy(update={"model": ModelConfig(weights=StartWeights(id=str(start)))})


def trained(settings: Any) -> tuple[list[float], nvlabs.Weights]:
    """Losses and last weights of a run of ours."""
    report = fit(settings.train, tiny_run.task(settings), Launch(), log=lambda line: None)
    assert report.checkpoint is not None
    rows = metrics.read(Path(settings.train.output) / "metrics.jsonl")
    return [row["loss"] for row in rows], theirs(load_model_state(report.checkpoint)[1])


@cache
def reference(
    start: Path, optimizer: str, bf16: bool, dtype: torch.dtype = torch.float32
) -> tuple[list[float], nvlabs.Weights]:
    """The same of the reference, from the same weights and batches, computed in `dtype`."""
    weights = {n: v.to(dtype) for n, v in theirs(load_transformer(start).state_dict()).items()}
    shape = nvlabs.Shape(LAYERS, linear_head_dim=32, cross_heads=4)
    method = nvlabs.CAME(DECAY) if optimizer == "came" else nvlabs.AdamW(DECAY)
    losses = []
    for step in range(STEPS):
        batch = tiny_run.global_batch(step)
        leaves = {name: value.requires_grad_() for name, value in weights.items()}
        latents, noise, captions = (x.to(dtype) for x in (batch.latents, batch.noise, batch.captions))
        loss = nvlabs.loss(leaves, shape, latents, noise, batch.logit, captions, batch.mask, bf16)
        values = torch.autograd.grad(loss, list(leaves.values()))
        gradients = dict(zip(leaves, values, strict=True))
        weights = {name: value.detach() for name, value in leaves.items()}
        nvlabs.clip(gradients, CLIP)
        method.update(weights, gradients, nvlabs.learning_rate(RATE, tiny_run.GLOBAL_BATCH, WARMUP, step))
        losses.append(float(loss.detach()))
    return losses, weights


def without_noise(weights: nvlabs.Weights, qk_norm: bool) -> nvlabs.Weights:
    """Without norms softmax does not see the bias of the keys: its gradient is rounding noise, of which the optimizer
    makes full steps."""
    if qk_norm:
        return weights
    return {n: v.chunk(2)[1] if n.endswith("kv_linear.bias") else v for n, v in weights.items()}


def apart(
    found: tuple[list[float], nvlabs.Weights], expected: tuple[list[float], nvlabs.Weights], qk_norm: bool
) -> Any:
    """(largest relative difference of a loss, relative L2 distance of all weights together)."""
    losses = max(abs(a - b) / b for a, b in zip(found[0], expected[0], strict=True))
    return losses, tiny_run.distance(without_noise(found[1], qk_norm), without_noise(expected[1], qk_norm))


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "qk_norm"), [("adamw", False), ("adamw", True), ("came", True)])
def test_fifty_steps_in_fp32_are_those_of_nvlabs(
    optimizer: str, qk_norm: bool, starts: dict[bool, Path], tmp_path: Path
) -> None:
    """Against the reference in float64: in fp32 its rounding is ten times ours (CAME)."""
    expected = reference(starts[qk_norm], optimizer, bf16=False, dtype=torch.float64)
    losses, weights = apart(trained(settings_of(tmp_path, starts[qk_norm], optimizer, "fp32")), expected, qk_norm)
    assert losses <= 1e-6
    assert weights <= 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "came"])
def test_fifty_steps_in_bf16_are_those_of_nvlabs(optimizer: str, starts: dict[bool, Path], tmp_path: Path) -> None:
    """Both round to bf16, in other places: ours is nearer to their autocast than their autocast is to fp32."""
    start = starts[True]
    expected = reference(start, optimizer, bf16=True)
    rounding = apart(expected, reference(start, optimizer, bf16=False), True)
    losses, weights = apart(trained(settings_of(tmp_path, start, optimizer, "bf16")), expected, True)
    assert losses <= rounding[0]
    assert weights <= rounding[1]


def test_the_numerics_reaches_every_norm_and_denominator() -> None:
    model = tiny_run.model(tiny_run.config(numerics="nvlabs", arch={"qk_norm": QK_NORM}))
    for block in model.blocks:
        eps = [block.get_submodule(f"{attention}.norm_{part}").eps for attention in ("attn1", "attn2") for part in "qk"]
        assert eps == [1e-5, 1e-5, 1e-6, 1e-6]
        assert block.get_submodule("attn1").eps == 1e-8


def test_the_epsilon_of_linear_attention_is_in_its_denominator() -> None:
    """relu(q) relu(k) = 1e-8 for one token and one channel: half of the value with eps 1e-8, all of it with 1e-15."""
    query, key, value = (torch.full((1, 1, 1), x, requires_grad=True) for x in (1e-4, 1e-4, 3.0))
    for eps, expected in ((1e-8, 1.5), (1e-15, 3.0)):
        out = linear_attention(query, key, value, 1, eps)
        assert float(out) == pytest.approx(expected, rel=1e-6)
        (gradient,) = torch.autograd.grad(out.sum(), query)
        assert float(gradient) == pytest.approx(3.0 * 1e-4 * eps / (1e-8 + eps) ** 2, rel=1e-3, abs=1)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "came"])
def test_without_the_numerics_the_steps_are_others(optimizer: str, starts: dict[bool, Path], tmp_path: Path) -> None:
    expected = reference(starts[True], optimizer, bf16=False, dtype=torch.float64)
    settings = settings_of(tmp_path, starts[True], optimizer, "fp32", numerics="default")
    losses, weights = apart(trained(settings), expected, True)
    assert losses > 1e-5
    assert weights > 1e-5
