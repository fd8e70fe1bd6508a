"""Our Z-Image transformer against diffusers', in values, gradients and files; packed captions, FLOPs, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from sana_pipe.base.errors import ConfigError, UserError
from sana_pipe.train.models.sampler import Sampling, sample
from sana_pipe.train.models.spec import Call, spec_at, spec_of
from sana_pipe.train.models.zimage_config import ZImageConfig
from tests.support.messages import naming
from tests.support.tiny_zimage import TINY, inputs, predicted, reference, save, weights

BATCHES = (
    ((8, 12), (3, 40, 32, 64), 64),  # 24 tokens of a picture: padded
    ((16, 8), (1, 33), 33),  # 32 tokens: none are padded; rows that are no multiple of 32
    ((2, 4), (7,), 50),
)
"""Sides of the latents, lengths of the captions, rows of the batch."""


def made(seed: int = 0) -> list[dict[str, Tensor]]:
    return [inputs(*sides, lengths, rows, seed=seed + number) for number, (sides, lengths, rows) in enumerate(BATCHES)]


def total(outputs: list[Tensor]) -> Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.stack([(out * torch.randn(out.shape, generator=generator)).sum() for out in outputs]).sum()


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative L2 distance."""
    return float((found - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def theirs() -> Any:
    return reference()


@pytest.fixture
def ours() -> torch.nn.Module:
    return TINY.loaded(weights())


def test_the_forward_pass_is_diffusers_for_every_length_and_size(theirs: Any, ours: torch.nn.Module) -> None:
    """diffusers has all samples in one list, with its own padding between them."""
    assert TINY.shapes() == {name: tuple(p.shape) for name, p in theirs.named_parameters()}
    with torch.no_grad():
        expected = predicted(theirs, made())
        for batch, wanted in zip(made(), expected, strict=True):
            assert distance(ours(**batch), wanted) <= 1e-6


def test_the_gradients_are_diffusers(theirs: Any, ours: torch.nn.Module) -> None:
    theirs.zero_grad()
    total(predicted(theirs, made())).backward()
    total([ours(**batch) for batch in made()]).backward()
    found, wanted = ({name: p.grad for name, p in each.named_parameters()} for each in (ours, theirs))
    assert found.keys() == wanted.keys() and all(grad is not None for grad in found.values())
    error = sum((found[name] - wanted[name]).double().square().sum() for name in wanted)
    size = sum(grad.double().square().sum() for grad in wanted.values())
    assert (error / size).sqrt() <= 1e-5
    for name in ("x_pad_token", "cap_pad_token"):
        assert wanted[name].norm() > 1e-3, "the tokens of paddings take part"


def test_rows_past_a_caption_and_other_samples_change_nothing(ours: torch.nn.Module) -> None:
    batch = made()[0]
    with torch.no_grad():
        expected = ours(**batch)
        noisy = batch["captions"] + 5 * torch.randn(batch["captions"].shape) * ~batch["mask"][..., None]
        torch.testing.assert_close(ours(**{**batch, "captions": noisy}), expected, atol=0, rtol=0)
        for number in range(4):
            alone = {name: each[number : number + 1] for name, each in batch.items()}
            length = BATCHES[0][1][number]
            alone |= {name: alone[name][:, :length] for name in ("captions", "mask")}
            assert distance(ours(**alone), expected[number : number + 1]) <= 2e-6


def test_packed_captions_are_the_padded_ones(ours: torch.nn.Module) -> None:
    for batch in made():
        with torch.no_grad():
            packed = {**batch, "captions": batch["captions"][batch["mask"]]}
            torch.testing.assert_close(ours(**packed), ours(**batch), atol=0, rtol=0)


def test_a_caption_without_rows_gives_numbers(ours: torch.nn.Module) -> None:
    batch = inputs(8, 8, (0, 5), 6)
    assert ours(**batch).isfinite().all()


def test_in_bf16_it_is_as_near_as_diffusers(theirs: Any, ours: torch.nn.Module) -> None:
    half = [
        {name: each.bfloat16() if name in ("latents", "captions") else each for name, each in batch.items()}
        for batch in made()
    ]
    with torch.no_grad():
        exact = torch.cat([out.flatten() for out in predicted(theirs, made())])
        bf16 = torch.cat([out.flatten() for out in predicted(reference().bfloat16(), half)]).float()
        found = torch.cat([ours.bfloat16()(**batch).flatten() for batch in half]).float()
    assert (found - exact).norm() <= 1.2 * (bf16 - exact).norm() < 0.05 * exact.norm()


def test_timesteps_that_something_cast_are_refused(ours: torch.nn.Module) -> None:
    batch = made()[0]
    with pytest.raises(TypeError, match="float32"):
        ours(**{**batch, "timesteps": batch["timesteps"].bfloat16()})
    with pytest.raises(TypeError, match="bool"):
        ours(**{**batch, "mask": batch["mask"].long()})
    with pytest.raises(ValueError, match="patches"):
        ours(**{**batch, "latents": batch["latents"][..., 1:]})


@pytest.mark.parametrize("rows", [64, 70])
def test_operations_are_counted_from_shapes(rows: int) -> None:
    model = TINY.loaded(weights())
    batch = inputs(8, 12, (rows, 5), rows)
    with sdpa_kernel(SDPBackend.MATH):  # the counter does not know the CPU's kernel
        with FlopCounterMode(display=False) as forward:
            out = model(**batch)
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
    assert TINY.forward_flops(2, 24, 2 * rows) == forward.get_total_flops()
    whole = forward.get_total_flops() + backward.get_total_flops()
    assert TINY.training_flops(2, 24, 2 * rows) == whole


# ------------------------------------------------------------------------------------------------------------- files


def test_a_folder_goes_through_us_and_diffusers_unchanged(tmp_path: Path, theirs: Any) -> None:
    from diffusers import ZImageTransformer2DModel

    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    spec = spec_at(tmp_path / "theirs")
    assert spec == TINY and hash(spec) == hash(TINY)
    stored = spec.stored(tmp_path / "theirs")
    values = {name: stored.read(name, [0] * len(sides), sides) for name, sides in stored.shapes.items()}
    assert values.keys() == weights().keys() and all(torch.equal(values[name], weights()[name]) for name in values)
    part = stored.read("layers.1.feed_forward.w1.weight", [3, 5], [4, 2])
    assert torch.equal(part, weights()["layers.1.feed_forward.w1.weight"][3:7, 5:7])
    spec.save(values, tmp_path / "ours", torch.float32)
    loaded = ZImageTransformer2DModel.from_pretrained(tmp_path / "ours")
    assert all(torch.equal(p, values[name]) for name, p in loaded.named_parameters())


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    save(tmp_path)
    with pytest.raises(UserError, match="another shape"):
        replace(TINY, cap_feat_dim=20).stored(tmp_path / "transformer")
    with pytest.raises(UserError, match=r"layers\.3"):
        replace(TINY, n_layers=4).stored(tmp_path / "transformer")


def test_comfyui_joins_what_its_own_table_joins() -> None:
    """`z_image_to_diffusers` of ComfyUI, as read: query, key and value are rows of one tensor, in this order."""
    parts = TINY.joined_parts()
    assert sorted(name for names in parts.values() for name in names) == sorted(TINY.shapes())
    block = "context_refiner.1.attention"
    assert parts[f"{block}.qkv.weight"] == [f"{block}.{name}.weight" for name in ("to_q", "to_k", "to_v")]
    renamed = {
        "layers.2.attention.out.weight": "layers.2.attention.to_out.0.weight",
        "layers.2.attention.q_norm.weight": "layers.2.attention.norm_q.weight",
        "noise_refiner.0.attention.k_norm.weight": "noise_refiner.0.attention.norm_k.weight",
        "x_embedder.bias": "all_x_embedder.2-1.bias",
        "final_layer.adaLN_modulation.1.weight": "all_final_layer.2-1.adaLN_modulation.1.weight",
    }
    for name in ("x_pad_token", "cap_embedder.0.weight", "layers.0.adaLN_modulation.0.bias", "t_embedder.mlp.2.bias"):
        renamed[name] = name
    assert {name: parts[name] for name in renamed} == {theirs: [ours] for theirs, ours in renamed.items()}


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("siglip_feat_dim", 1152),
        ("all_patch_size", [2, 4]),
        ("all_f_patch_size", [2]),
        ("qk_norm", False),
        ("n_kv_heads", 1),
        ("axes_dims", [4, 4, 4]),
        ("context_scale", 2),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        spec_of({**TINY.to_dict(), field: value})


def test_widths_sides_and_strategies_are_refused_by_name() -> None:
    whole = ZImageConfig()
    with pytest.raises(ConfigError, match=r"in_channels is 16.*32"):
        whole.check_widths("the snapshot", "fix", channels=32)
    with pytest.raises(ConfigError, match=r"caption_channels is 2560.*2304"):
        whole.check_widths("the snapshot", "fix", text_width=2304)
    for sizes, name in (((2, 1), "tp_size"), ((1, 2), "pp_size")):
        with pytest.raises(ConfigError, match=name):
            whole.check_parallel(*sizes)
    whole.check_sides(1024, 768, 8, "--size {height}x{width}")
    with pytest.raises(ConfigError, match="multiples of 16"):
        whole.check_sides(1024, 760, 8, "--size {height}x{width}")
    with pytest.raises(ConfigError, match="8192"):
        whole.check_sides(1024, 8208, 8, "--size {height}x{width}")


def test_the_released_shape_has_the_released_number_of_parameters() -> None:
    numbers = {name: torch.Size(sides).numel() for name, sides in ZImageConfig().shapes().items()}
    assert sum(numbers.values()) == 6_154_908_736


def test_drawn_values_are_those_of_their_names() -> None:
    first, again, other = (TINY.initial(seed) for seed in (3, 3, 4))
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()
    model = TINY.loaded({name: first.read(name, [0] * len(sides), sides) for name, sides in TINY.shapes().items()})
    assert model(**made()[0]).isfinite().all()


def test_a_file_is_read_by_any_reader_of_safetensors(tmp_path: Path) -> None:
    values = save(tmp_path)
    stored = load_file(tmp_path / "transformer/diffusion_pytorch_model.safetensors")
    assert stored.keys() == values.keys() and all(torch.equal(stored[name], values[name]) for name in stored)


@pytest.mark.parametrize(("guidance", "scale"), [(6.0, "5"), (1.0, "0")])
def test_the_call_counts_guidance_as_the_pipeline_does(guidance: float, scale: str) -> None:
    """v_caption + s (v_caption - v_null) is v_null + (s + 1) (v_caption - v_null)."""
    call = Call(1024, 8, True, 50, guidance, None, None)
    assert TINY.call_arguments(call)["guidance_scale"] == scale
    assert TINY.call_arguments(replace(call, max_length=256))["max_sequence_length"] == "256"


def test_it_draws_at_the_noise_levels_of_its_pipeline() -> None:
    from diffusers.pipelines.z_image.pipeline_z_image import get_default_z_image_sigmas

    seen: list[float] = []

    def predict(latents: torch.Tensor, text: torch.Tensor, mask: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        seen.append(float(times[0]))
        return torch.zeros_like(latents)

    rows, noise = torch.zeros(3, TINY.cap_feat_dim), torch.zeros(1, TINY.in_channels, 4, 4)
    settings = Sampling(steps=5, flow_shift=6.0, solver=TINY.scheduler, sigmas=TINY.sigmas)
    sample(predict, [rows], rows, noise, settings)
    theirs = TINY.scheduler(6.0)
    theirs.set_timesteps(sigmas=get_default_z_image_sigmas(5))
    assert seen == pytest.approx(theirs.timesteps.tolist(), rel=1e-6)
    alone = TINY.scheduler(6.0)
    alone.set_timesteps(5)
    assert seen[-1] > 2 * float(alone.timesteps[-1]), "the scheduler's levels are others"


def test_captions_are_as_long_as_diffusers_has_positions_for(theirs: Any) -> None:
    longest = TINY.longest_caption
    assert (longest, ZImageConfig().longest_caption) == (224, 992)
    TINY.check_rows("text.max_length", longest)
    with torch.no_grad():
        assert predicted(theirs, [inputs(8, 8, (longest,))])
        with pytest.raises(IndexError):
            predicted(theirs, [inputs(8, 8, (longest + 1,))])
    with pytest.raises(ConfigError, match=naming("text.max_length", longest, longest + 1)):
        TINY.check_rows("text.max_length", longest + 1)


def test_latents_of_another_vae_of_as_many_channels_are_refused() -> None:
    """Flux's, which Z-Image has, and SD3's."""
    ZImageConfig().check_factors("these latents", "vae.id", 0.3611, 0.1159)
    for found in ((1.5305, 0.0609), (0.3611, 0.0), (0.41407, 0.0)):
        with pytest.raises(ConfigError, match=naming("these latents", "vae.id", 0.3611, 0.1159, *found[:1])):
            ZImageConfig().check_factors("these latents", "vae.id", *found)
    TINY.check_factors("latents of 4 channels, of no known VAE", "", 1.0, 0.0)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_comfyui_has_no_size_of_patches_in_its_names(size: int) -> None:
    names = replace(TINY, all_patch_size=(size,)).joined_parts()
    assert {"x_embedder.weight", "final_layer.linear.weight"} <= names.keys()
    assert not any("all_" in name or "-1" in name for name in names)
