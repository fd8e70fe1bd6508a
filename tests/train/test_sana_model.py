"""Our Sana transformer against diffusers', in values, gradients and files; precision, initialisation and refusals."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.utils.checkpoint import CheckpointError
from torch.utils.flop_counter import FlopCounterMode

from sana_pipe.base.errors import ConfigError, UserError
from sana_pipe.train.kernels import linear_attention as kernel
from sana_pipe.train.kernels.linear_attention import linear_attention
from sana_pipe.train.models import sana_layers
from sana_pipe.train.models.sana import SanaTransformer
from sana_pipe.train.models.sana_config import SanaConfig
from sana_pipe.train.models.sana_files import save_weights
from sana_pipe.train.models.sana_init import initial_value
from sana_pipe.train.models.sana_shape import deinterleave, interleave
from tests.support.tiny_sana import TINY, inputs, load_transformer, load_weights, make

VARIANTS = {
    "plain": {},
    "qk_norm": {"qk_norm": "rms_norm_across_heads"},
    "position": {"interpolation_scale": 1.5},
    "patches": {"patch_size": 2, "interpolation_scale": 1.0},
}
SHAPES = [(8, 8), (6, 12), (16, 4), (10, 2)]
# Relative L2 over all tensors together. attn2.to_k.bias has no gradient in exact arithmetic (softmax does not see a
# shift), so a measure per tensor would compare noise with noise. With some inputs a query meets hardly any key, divides
# by almost nothing and makes rounding errors of 1e-5, which depend on the threads; those of seed 4 have none.
LIMIT = {"plain": 2e-6, "qk_norm": 5e-6, "position": 2e-6, "patches": 2e-6}


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    error = sum((ours[n].double() - theirs[n].double()).square().sum() for n in ours)
    return math.sqrt(error / sum(t.double().square().sum() for t in theirs.values()))


def gradients(model: torch.nn.Module, output: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(output.device)
    (output * weight).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    from diffusers import SanaTransformer2DModel

    model, report = SanaTransformer2DModel.from_pretrained(folder, torch_dtype=dtype, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model


def compare(
    model: SanaTransformer, theirs: Any, shape: tuple[int, int], cast: torch.dtype = torch.float32
) -> tuple[float, float]:
    """(output, gradient) distance from diffusers' model."""
    latents, captions, mask, timesteps = inputs(shape)
    latents, captions = latents.to(cast), captions.to(cast)
    our_output = model(latents, captions, mask, timesteps)
    their_output = theirs(
        latents, encoder_hidden_states=captions, encoder_attention_mask=mask.long(), timestep=timesteps
    ).sample
    ours, expected = gradients(model, our_output), gradients(theirs, their_output)
    return (
        distance({"x": our_output.detach()}, {"x": their_output.detach()}),
        distance(ours, {name: interleave(name, tensor) for name, tensor in expected.items()}),
    )


# ------------------------------------------------------------------------------------------- parity with diffusers


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Any]:
    model = make(replace(TINY, **VARIANTS[request.param]))
    folder = tmp_path_factory.mktemp("weights")
    save_weights(model.state_dict(), model.config, folder, torch.float32)
    return request.param, model, reference(folder)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_gradients_equal_diffusers(pair: tuple[str, Any, Any], shape: tuple[int, int]) -> None:
    name, model, theirs = pair
    output, gradient = compare(model, theirs, shape)
    assert output <= LIMIT[name]
    assert gradient <= LIMIT[name]


def test_parity_goes_red_without_the_interleave(tmp_path: Path) -> None:
    model = make(TINY)
    save_weights(model.state_dict(), TINY, tmp_path, torch.float32)
    theirs = reference(tmp_path)
    plain = SanaTransformer(TINY)
    plain.load_state_dict(load_file(tmp_path / "diffusion_pytorch_model.safetensors"))  # diffusers' order, as it is
    assert min(compare(plain, theirs, (8, 8))) > 1e-3


def test_parity_goes_red_with_timesteps_in_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(TINY)
    save_weights(model.state_dict(), TINY, tmp_path, torch.float32)
    theirs = reference(tmp_path)
    exact = sana_layers.timestep_sinusoid
    assert max(compare(model, theirs, (8, 8))) <= LIMIT["plain"]
    monkeypatch.setattr(sana_layers, "timestep_sinusoid", lambda t: exact(t.bfloat16().float()))
    assert min(compare(model, theirs, (8, 8))) > 1e-3


@pytest.mark.parametrize("name", ["plain", "qk_norm"])
def test_bf16_parts_equal_diffusers_bf16_bit_for_bit(name: str, tmp_path: Path) -> None:
    model = make(replace(TINY, **VARIANTS[name]))
    save_weights(model.state_dict(), model.config, tmp_path, torch.bfloat16)
    ours = load_transformer(tmp_path, dtype=torch.bfloat16)
    theirs = reference(tmp_path, torch.bfloat16)
    latents, captions, mask, timesteps = inputs((8, 8))
    latents, captions = latents.bfloat16(), captions.bfloat16()
    with torch.no_grad():
        hidden, context, bias, modulation, embedded = ours.embed(latents, captions, mask, timesteps)
        assert torch.equal(hidden, theirs.patch_embed(latents))
        assert torch.equal(context, theirs.caption_norm(theirs.caption_projection(captions)))
        their_modulation, their_embedded = theirs.time_embed(timesteps, batch_size=3, hidden_dtype=torch.bfloat16)
        assert torch.equal(modulation.flatten(1), their_modulation)
        assert torch.equal(embedded, their_embedded)
        for block, other in zip(ours.transformer_blocks, theirs.transformer_blocks, strict=True):
            # What enters to_out; bf16 matrix products on the CPU round with the layout, which is diffusers' no longer.
            attended, their_attended = (_entering(a.to_out[0], a, hidden) for a in (block.attn1, other.attn1))
            assert torch.equal(attended, their_attended)
            expected = other.attn2(hidden, encoder_hidden_states=context, attention_mask=bias[:, 0])
            assert torch.equal(block.attn2(hidden, context, bias), expected)
            image = hidden.unflatten(1, (8, 8)).permute(0, 3, 1, 2)
            twin = copy.deepcopy(other.ff).double()(image.double()).flatten(2).transpose(1, 2)
            errors = [
                distance({"x": x.double()}, {"x": twin})
                for x in (block.ff(hidden, 8, 8), other.ff(image).flatten(2).transpose(1, 2))
            ]
            assert errors[0] <= 1.1 * errors[1] < 2e-2  # matrix products round otherwise than convolutions
            hidden = block(hidden, context, bias, modulation, 8, 8)
        # Whole models differ in memory layout, so convolutions round differently: compare with float32 instead.
        exact = model_output(load_transformer(tmp_path), torch.float32)
        error = distance({"x": model_output(ours, torch.bfloat16)}, {"x": exact})
        their_output = theirs(
            latents, encoder_hidden_states=captions, encoder_attention_mask=mask.long(), timestep=timesteps
        ).sample
        their_error = distance({"x": their_output}, {"x": exact})
    assert error <= 1.25 * their_error
    assert their_error < 2e-2


def _entering(layer: torch.nn.Module, module: torch.nn.Module, x: Tensor) -> Tensor:
    """What `layer` is given while `module` computes `x`."""
    seen: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    module(x)
    handle.remove()
    return seen[0]


def model_output(model: SanaTransformer, dtype: torch.dtype) -> Tensor:
    latents, captions, mask, timesteps = inputs((8, 8))
    return model(latents.to(dtype), captions.to(dtype), mask, timesteps)


# ------------------------------------------------------------------------------------------------------ precision


def _product_dtypes(model: SanaTransformer, dtype: torch.dtype, autocast: bool) -> set[torch.dtype]:
    """Of the results of linear attention's products, forward and backward."""
    latents, captions, mask, timesteps = inputs((8, 8))
    matmul, seen = torch.matmul, list[torch.dtype]()

    def recorded(*factors: Tensor) -> Tensor:
        result = matmul(*factors)
        seen.append(result.dtype)
        return result

    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        patch.setattr(torch, "matmul", recorded)
        out = model(latents.to(dtype), captions.to(dtype), mask, timesteps)
        out.float().sum().backward()
    assert len(seen) == (2 + 5) * model.config.num_layers
    return set(seen)


def test_linear_attention_stays_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _product_dtypes(make(TINY), torch.float32, autocast=True) == {torch.float32}
    assert _product_dtypes(make(TINY).bfloat16(), torch.bfloat16, autocast=False) == {torch.float32}
    monkeypatch.setattr(kernel, "without_autocast", lambda device: contextlib.nullcontext())
    assert torch.bfloat16 in _product_dtypes(make(TINY), torch.float32, autocast=True)  # what the guard prevents


def test_linear_attention_is_its_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 7, 12, generator=generator) for _ in range(3))
    out = linear_attention(query, key, value, head_dim=4)
    for b in range(2):
        for h in range(3):
            part = slice(4 * h, 4 * h + 4)
            q, k, v = query[b, :, part].relu().double(), key[b, :, part].relu().double(), value[b, :, part].double()
            weight = q @ k.T
            expected = weight @ v / (weight.sum(1, keepdim=True) + 1e-15)
            assert torch.allclose(out[b, :, part].double(), expected, atol=1e-5)
    nothing = linear_attention(-query.abs(), key, value, head_dim=4)  # every denominator is zero
    assert torch.equal(nothing, torch.zeros_like(nothing))


def _plain_linear_attention(query: Tensor, key: Tensor, value: Tensor, head_dim: int) -> Tensor:
    """The formula in float32 under ordinary autograd."""
    q, k, v = (x.float().unflatten(2, (-1, head_dim)).transpose(1, 2) for x in (query, key, value))
    q, k, v = q.relu(), k.relu(), torch.nn.functional.pad(v, (0, 1), value=1.0)
    out = q @ (k.transpose(2, 3) @ v)
    return (out[..., :-1] / (out[..., -1:] + 1e-15)).transpose(1, 2).flatten(2)


def _with_gradients(attention: Any, inputs: list[Tensor], weight: Tensor) -> dict[str, Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = attention(*leaves, 16)
    out.backward(weight.to(out.dtype))
    return dict(zip("oqkv", [out.detach(), *(leaf.grad for leaf in leaves)], strict=True))


def test_linear_attention_keeps_its_inputs_and_a_small_state_and_its_gradients_are_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    *inputs, weight = (torch.randn(2, 40, 64, generator=generator) for _ in range(4))
    exact = _with_gradients(_plain_linear_attention, inputs, weight)
    actual = _with_gradients(linear_attention, inputs, weight)
    for name in exact:
        assert distance({"x": actual[name]}, {"x": exact[name]}) <= 1e-6, name
    # In bf16: no farther from float32 than float32 arithmetic on bf16 inputs with its results rounded to bf16.
    coarse = [x.bfloat16() for x in inputs]
    exact = _with_gradients(_plain_linear_attention, [x.float() for x in coarse], weight.bfloat16().float())
    actual = _with_gradients(linear_attention, coarse, weight)
    for name in exact:
        assert actual[name].dtype == torch.bfloat16
        rounding = distance({"x": exact[name].bfloat16()}, {"x": exact[name]})
        assert distance({"x": actual[name]}, {"x": exact[name]}) <= 1.01 * rounding, name
    saved: list[Tensor] = []
    leaves = [x.requires_grad_() for x in coarse]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear_attention(*leaves, 16)
    assert saved.pop(0).shape == (2, 4, 16 + 1, 16)
    assert [t.data_ptr() for t in saved] == [leaf.data_ptr() for leaf in leaves]


@pytest.mark.parametrize("variant", VARIANTS)
def test_projections_are_one_product_unless_their_class_forbids_it(variant: str) -> None:
    """Alike in values and gradients."""

    class Replaced(torch.nn.Linear):
        pass

    model = make(replace(TINY, **VARIANTS[variant]))
    results, products = [], []
    for replaced in (False, True):
        for block in model.transformer_blocks:
            if replaced:
                block.attn1.to_v.__class__ = Replaced
        with FlopCounterMode(display=False) as counter:
            out = model(*inputs((8, 8)))
            results.append({"out": out.detach(), **gradients(model, out)})
        counts = counter.get_flop_counts()["Global"]
        products.append([torch.ops.sana_pipe.joined_linear in counts, sum(counts.values())])
    assert [joined for joined, _ in products] == [True, False]
    assert products[0][1] == products[1][1]
    assert distance(*results) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64])
def test_timesteps_other_than_float32_are_refused(dtype: torch.dtype) -> None:
    latents, captions, mask, timesteps = inputs((8, 8))
    with pytest.raises(TypeError, match="must be float32"):
        make(TINY)(latents, captions, mask, timesteps.to(dtype))


def test_other_wrong_inputs_are_refused() -> None:
    latents, captions, mask, timesteps = inputs((8, 8))
    with pytest.raises(TypeError, match="must be bool"):
        make(TINY)(latents, captions, mask.long(), timesteps)
    with pytest.raises(ValueError, match="patches of 2x2"):
        make(replace(TINY, patch_size=2))(latents[..., :7], captions, mask, timesteps)


# ----------------------------------------------------------------------------------------------- masks and strides


def test_masked_rows_do_not_matter_and_all_masked_is_finite() -> None:
    model = make(TINY)
    latents, captions, mask, timesteps = inputs((6, 12))
    out = model(latents, captions, mask, timesteps)
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in gradients(model, model(latents, captions, mask, timesteps)).values())
    zeroed = captions.masked_fill(~mask[..., None], 0.0)
    changed = model(latents, zeroed, mask, timesteps)
    assert torch.equal(out[[0, 2]], changed[[0, 2]])
    assert not torch.allclose(out[1], changed[1])  # without any True all rows are attended
    cut = model(latents[:1], captions[:1, :5], mask[:1, :5], timesteps[:1])
    assert torch.allclose(cut, out[:1], atol=1e-5)
    unmasked = model(latents, captions, torch.ones_like(mask), timesteps)
    assert torch.allclose(out[1], unmasked[1], atol=1e-2)  # "as if unmasked", up to the bias's rounding
    assert not torch.allclose(out[0], unmasked[0], atol=1e-2)


@pytest.mark.parametrize("variant", ["plain", "qk_norm"])
def test_captions_without_padding_give_what_padded_ones_give(variant: str) -> None:
    model = make(replace(TINY, **VARIANTS[variant]))
    latents, captions, mask, timesteps = inputs((6, 12))
    mask = mask | (torch.arange(10) < 2)  # every sample has rows
    padded = model(latents, captions, mask, timesteps)
    expected = gradients(model, padded)
    packed = model(latents, captions[mask], mask, timesteps)
    assert distance({"x": packed.detach()}, {"x": padded.detach()}) <= 2e-6
    assert distance(gradients(model, packed), expected) <= LIMIT["qk_norm"]
    other = captions.clone()
    other[0, 0] += 1  # of the first sample: nobody else sees it
    changed = model(latents, other[mask], mask, timesteps)
    assert torch.equal(changed[1:], packed[1:])
    assert not torch.allclose(changed[0], packed[0])


@pytest.mark.gpu
def test_captions_without_padding_on_a_gpu() -> None:
    model = make(replace(TINY, **VARIANTS["qk_norm"])).cuda().bfloat16()
    latents, captions, mask, timesteps = (x.cuda() for x in inputs((6, 12)))
    latents, captions, mask = latents.bfloat16(), captions.bfloat16(), mask | (torch.arange(10).cuda() < 2)
    padded = model(latents, captions, mask, timesteps)
    expected = gradients(model, padded)
    packed = model(latents, captions[mask], mask, timesteps)
    assert distance({"x": packed.detach()}, {"x": padded.detach()}) <= 2e-2
    assert distance(gradients(model, packed), expected) <= 3e-2


def test_blocks_can_be_checkpointed_and_offloaded_from_outside() -> None:
    model = make(TINY)
    arguments = inputs((6, 12))
    plain = gradients(model, model(*arguments))

    def run(contiguous: bool) -> dict[str, Tensor]:
        hidden, captions, bias, modulation, embedded = model.embed(*arguments)
        assert hidden.is_contiguous()
        if not contiguous:
            hidden = hidden.transpose(1, 2).contiguous().transpose(1, 2)
        for block in model.blocks:
            wrapped = offload_wrapper(checkpoint_wrapper(block))
            hidden = wrapped(hidden, captions, bias, modulation, 6, 12)
        return gradients(model, model.head(hidden, embedded, 6, 12))

    again = run(contiguous=True)
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    with pytest.raises(CheckpointError):  # what a transposed view out of patch_embed would cause
        run(contiguous=False)


def test_output_owns_its_memory() -> None:
    out = make(TINY)(*inputs((6, 12)))
    assert out.shape == (3, 4, 6, 12)
    assert out.is_contiguous()


def test_position_embedding_needs_no_buffer() -> None:
    config = replace(TINY, interpolation_scale=1.5)
    model = make(config)
    moved = SanaTransformer.on_meta(config).to_empty(device="cpu")
    moved.load_state_dict(model.state_dict())
    arguments = inputs((6, 12))
    assert torch.equal(model(*arguments), moved(*arguments))
    assert not torch.allclose(model(*arguments), _without_position(model)(*arguments))


def _without_position(model: SanaTransformer) -> SanaTransformer:
    other = SanaTransformer(replace(model.config, interpolation_scale=None))
    other.load_state_dict(model.state_dict())
    return other


# -------------------------------------------------------------------------------------------- sizes, initialisation

SANA_1600M = SanaConfig()
SANA_600M = replace(
    SANA_1600M,
    num_layers=28,
    num_attention_heads=36,
    num_cross_attention_heads=16,
    cross_attention_head_dim=72,
    cross_attention_dim=1152,
)
SANA_15 = replace(SANA_1600M, qk_norm="rms_norm_across_heads")


@pytest.mark.parametrize(
    ("config", "parameters", "tensors"),
    [
        (SANA_600M, 591_747_872, 548),
        (SANA_1600M, 1_604_462_752, 396),
        (SANA_15, 1_604_641_952, 476),
        (replace(SANA_15, num_layers=60), 4_721_825_952, 1396),
    ],
    ids=["600M", "1600M", "SANA-1.5 1.6B", "SANA-1.5 4.8B"],
)
def test_published_parameter_counts(config: SanaConfig, parameters: int, tensors: int) -> None:
    shapes = config.shapes()
    assert sum(math.prod(shape) for shape in shapes.values()) == parameters
    assert len(shapes) == tensors


def test_initialisation_depends_on_seed_and_name_only() -> None:
    first = SanaTransformer.from_scratch(TINY, 5)
    deeper = SanaTransformer.from_scratch(replace(TINY, num_layers=4), 5).state_dict()
    other = SanaTransformer.from_scratch(TINY, 6)
    changed = 0
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, deeper[name])
        assert torch.equal(tensor, initial_value(name, tuple(tensor.shape), 5, TINY))
        changed += not torch.equal(tensor, other.state_dict()[name])
    drawn = [n for n, t in first.state_dict().items() if t.unique().numel() > 1]
    assert changed == len(drawn)
    assert len({tuple(first.state_dict()[n].flatten()[:4].tolist()) for n in drawn}) == len(drawn)


def test_initialisation_is_that_of_the_authors() -> None:
    config = replace(SANA_600M, num_layers=1, qk_norm="rms_norm_across_heads")
    shapes = config.shapes()
    d, h = 1152, 2880

    def check(name: str, *, bound: float | None = None, std: float | None = None, value: float | None = None) -> None:
        tensor = initial_value(name, shapes[name], 0, config)
        seen.add(name)
        if value is not None:
            assert torch.equal(tensor, torch.full(shapes[name], value)), name
        elif std is not None:
            assert tensor.std().item() == pytest.approx(std, rel=0.05), name
            assert tensor.abs().max() > 2.5 * std, name  # a normal has tails
        else:
            assert bound is not None
            assert 0.98 * bound < tensor.abs().max() <= bound, name
            assert tensor.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05), name

    seen: set[str] = set()
    check("caption_norm.weight", value=0.01)
    check("scale_shift_table", std=d**-0.5)
    check("patch_embed.proj.weight", bound=math.sqrt(6 / (32 + d)))
    check("patch_embed.proj.bias", bound=32**-0.5)
    check("proj_out.weight", bound=math.sqrt(6 / (32 + d)))
    for name in shapes:
        if name.startswith(("time_embed.", "caption_projection.")) and name.endswith("weight"):
            check(name, std=0.02)
    block = "transformer_blocks.0."
    check(block + "scale_shift_table", std=d**-0.5)
    for part in "qkv":
        check(f"{block}attn1.to_{part}.weight", bound=math.sqrt(6 / (4 * d)))
    check(block + "attn2.to_q.weight", bound=math.sqrt(6 / (2 * d)))
    check(block + "attn2.to_k.weight", bound=math.sqrt(6 / (3 * d)))
    check(block + "attn2.to_v.weight", bound=math.sqrt(6 / (3 * d)))
    for attention in ("attn1.", "attn2."):
        check(block + attention + "to_out.0.weight", bound=math.sqrt(6 / (2 * d)))
        check(block + attention + "norm_q.weight", value=1.0)
        check(block + attention + "norm_k.weight", value=1.0)
    for layer, bound in (("conv_inverted", d**-0.5), ("conv_depth", 1 / 3)):
        check(f"{block}ff.{layer}.weight", bound=bound)
        check(f"{block}ff.{layer}.bias", bound=bound)
    check(block + "ff.conv_point.weight", bound=h**-0.5)
    for name in shapes.keys() - seen:
        assert name.endswith("bias"), name
        check(name, value=0.0)


def test_training_from_scratch_uses_the_arch() -> None:
    arch = {
        "num_layers": 2,
        "num_attention_heads": 6,
        "attention_head_dim": 8,
        "num_cross_attention_heads": 3,
        "cross_attention_head_dim": 16,
        "caption_channels": 24,
        "in_channels": 4,
    }
    config = SanaConfig.from_arch(arch, sample_size=16)
    assert (config.cross_attention_dim, config.out_channels, config.sample_size) == (48, 4, 16)
    assert SanaConfig.from_arch({**arch, "sample_size": 7}, 16).sample_size == 7
    assert config.with_sample_size(32).sample_size == 32
    with pytest.raises(ConfigError, match="position embedding"):
        replace(config, interpolation_scale=1.0).with_sample_size(32)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_layer": 2}, "num_layer"),
        ({"num_layers": "2"}, "num_layers"),
        ({"num_layers": True}, "num_layers"),
        ({"num_layers": 0}, "num_layers"),
        ({"mlp_ratio": -1.0}, "mlp_ratio"),
        ({"cross_attention_head_dim": 111}, "num_cross_attention_heads"),
        ({"guidance_embeds": True}, "guidance"),
    ],
)
def test_a_shape_that_is_none_is_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        SanaConfig.from_arch(change, 32)
    assert SanaConfig.from_arch({"mlp_ratio": 3, "interpolation_scale": None}, 16).glu_channels == 3 * 2240


# ----------------------------------------------------------------------------------------------------------- files


def test_interleave_and_back() -> None:
    assert interleave("ff.conv_inverted.bias", torch.arange(6)).tolist() == [0, 3, 1, 4, 2, 5]
    for name, shape in TINY.shapes().items():
        tensor = torch.randn(shape)
        assert torch.equal(deinterleave(name, interleave(name, tensor)), tensor)
        moved = ".ff.conv_inverted." in name or ".ff.conv_depth." in name
        assert torch.equal(interleave(name, tensor), tensor) != moved


@pytest.mark.parametrize("shard", [None, 30_000], ids=["one file", "shards"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_files_round_trip_bit_for_bit(tmp_path: Path, shard: int | None, dtype: torch.dtype) -> None:
    model = make(replace(TINY, qk_norm="rms_norm_across_heads")).to(dtype)
    limit = {} if shard is None else {"max_shard_bytes": shard}
    save_weights(model.state_dict(), model.config, tmp_path, dtype, **limit)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 1 if shard is None else len(files) > 2
    if shard is not None:
        assert all(file.stat().st_size <= shard + 8192 for file in files)
    config, weights = load_weights(tmp_path)
    assert config == model.config
    for name, tensor in model.state_dict().items():
        assert weights[name].dtype == dtype
        assert torch.equal(weights[name], tensor)
    theirs = reference(tmp_path, dtype).state_dict()
    for name, tensor in theirs.items():
        assert torch.equal(interleave(name, tensor), weights[name])
    loaded = load_transformer(tmp_path, dtype=None)
    assert all(p.requires_grad and p.dtype == dtype for p in loaded.parameters())


def test_a_folder_that_diffusers_wrote(tmp_path: Path) -> None:
    from diffusers import SanaTransformer2DModel

    theirs = SanaTransformer2DModel(**{k: v for k, v in TINY.to_dict().items() if not k.startswith("_")})
    theirs.save_pretrained(tmp_path / "one", variant="fp16")
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="30KB")
    theirs.save_pretrained(tmp_path / "both", max_shard_size="30KB", variant="fp16")
    assert len(list((tmp_path / "both").glob("*.safetensors"))) > 1
    for folder, variant in (("one", "fp16"), ("one", None), ("shards", None), ("both", "fp16"), ("both", None)):
        model = load_transformer(tmp_path / folder, variant=variant)
        assert model.config == TINY
        assert max(compare(model, theirs, (8, 8))) <= LIMIT["plain"]
    with pytest.raises(UserError, match="has no weights") as error:
        load_weights(tmp_path / "one", "bf16")
    assert "diffusion_pytorch_model.fp16.safetensors" in str(error.value)
    assert "model.weights.variant" in str(error.value)


def _rewrite(folder: Path, **changes: Tensor | None) -> None:
    path = folder / "diffusion_pytorch_model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(path).items()}
    for key, tensor in changes.items():
        name = key.replace("__", ".")
        if tensor is None:
            del weights[name]
        else:
            weights[name] = tensor
    save_file(weights, path, metadata={"format": "pt"})


def test_wrong_folders_are_named(tmp_path: Path) -> None:
    def fresh(name: str) -> Path:
        save_weights(make(TINY).state_dict(), TINY, tmp_path / name, torch.float32)
        return tmp_path / name

    def message(folder: Path) -> str:
        with pytest.raises(UserError) as error:
            load_weights(folder)
        return str(error.value)

    (tmp_path / "empty").mkdir()
    assert "config.json is missing" in message(tmp_path / "empty")

    folder = fresh("missing")
    _rewrite(folder, proj_out__weight=None)
    assert "missing proj_out.weight" in message(folder)

    folder = fresh("unexpected")
    _rewrite(folder, extra__weight=torch.zeros(1))
    assert "unexpected extra.weight" in message(folder)

    folder = fresh("shape")
    _rewrite(folder, proj_out__bias=torch.zeros(7))
    text = message(folder)
    assert "proj_out.bias" in text
    assert "[4]" in text
    assert "[7]" in text

    folder = fresh("cut")
    path = folder / "diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    assert "cannot be read as safetensors" in message(folder)

    folder = fresh("both")
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text("{}")
    assert "no weight_map" in message(folder)

    folder = fresh("shard")
    save_weights(make(TINY).state_dict(), TINY, folder, torch.float32, max_shard_bytes=20_000)
    shard = sorted(folder.glob("*-00002-of-*"))[0]
    shard.unlink()
    assert shard.name in message(folder)
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text("[]")
    assert "must hold a JSON object" in message(folder)

    folder = fresh("json")
    (folder / "config.json").write_text("{")
    assert "cannot be read" in message(folder)

    incomplete = {name: tensor for name, tensor in make(TINY).state_dict().items() if name != "caption_norm.weight"}
    with pytest.raises(UserError, match=r"missing caption_norm\.weight"):
        save_weights(incomplete, TINY, tmp_path / "incomplete", torch.float32)
    assert not (tmp_path / "incomplete").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"guidance_embeds": True}, "guidance_embeds"),
        ({"timestep_scale": 1000.0}, "timestep_scale"),
        ({"qk_norm": "layer_norm"}, "qk_norm"),
        ({"out_channels": 8}, "out_channels"),
        ({"cross_attention_dim": 33}, "cross_attention_dim"),
        ({"rope_theta": 5}, "rope_theta"),
        ({"_class_name": "PixArtTransformer2DModel"}, "PixArtTransformer2DModel"),
        (
            {"num_attention_heads": 1, "attention_head_dim": 2, "cross_attention_dim": 2, "interpolation_scale": 1.0},
            "divisible by 4",
        ),
    ],
)
def test_other_models_are_refused_by_name(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY.to_dict() | {"_diffusers_version": "0.32"} | change))
    with pytest.raises(ConfigError, match=message):
        load_weights(tmp_path)


def test_defaults_are_those_of_diffusers(tmp_path: Path) -> None:
    import inspect

    from diffusers import SanaTransformer2DModel

    theirs = inspect.signature(SanaTransformer2DModel.__init__).parameters
    ours = {k: v for k, v in SanaConfig().to_dict().items() if not k.startswith("_")}
    assert ours == {name: p.default for name, p in theirs.items() if name != "self"}
    assert SanaConfig.from_dict({}) == SanaConfig()
    assert replace(TINY, out_channels=None) == TINY
