"""The sampling loop against `SanaPipeline` on the same weights, and its own laws."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sana_pipe.train.models.sampler import SEED_STRIDE, Sampling, noise_of, pad_rows, prompt_noise, sample, scheduler
from sana_pipe.train.models.sana import SanaTransformer
from sana_pipe.train.models.sana_files import save_weights
from tests.support.hub_layouts import SMALL

CONFIG = replace(SMALL, in_channels=4, out_channels=4, caption_channels=24)
STEPS = 6


def draw_noise(count: int, shape: tuple[int, int, int], seed: int) -> Tensor:
    return torch.cat([noise_of(number, shape, seed) for number in range(count)])


@pytest.fixture(scope="module")
def model() -> SanaTransformer:
    model = SanaTransformer.from_scratch(CONFIG, seed=3)
    with torch.no_grad():
        model.caption_norm.weight.fill_(1.0)  # so that captions matter without training
    return model.eval()


@pytest.fixture(scope="module")
def captions() -> list[Tensor]:
    """Text rows (n, 24) of three captions; behind them those of the empty one."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(count, 24, generator=generator) for count in (10, 4, 7, 1)]


@pytest.mark.parametrize("guidance", [4.5, 1.0])
@pytest.mark.parametrize("size", [(8, 8), (6, 12)])
def test_equals_sana_pipeline(
    model: SanaTransformer, captions: list[Tensor], guidance: float, size: tuple[int, int], tmp_path: Path
) -> None:
    from diffusers import SanaPipeline, SanaTransformer2DModel

    *rows, null = captions
    save_weights(model.state_dict(), CONFIG, tmp_path, torch.float32)
    pipeline = SanaPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=None,
        transformer=SanaTransformer2DModel.from_pretrained(tmp_path),
        scheduler=scheduler(3.0),
    )
    pipeline.set_progress_bar_config(disable=True)
    noise = draw_noise(3, (4, *size), seed=1)
    padded, mask = pad_rows([*rows, null])
    theirs = pipeline(
        prompt_embeds=padded[:3],
        prompt_attention_mask=mask[:3].long(),
        negative_prompt=None,
        negative_prompt_embeds=padded[3:].expand(3, -1, -1),
        negative_prompt_attention_mask=mask[3:].long().expand(3, -1),
        num_inference_steps=STEPS,
        guidance_scale=guidance,
        height=size[0] * 32,
        width=size[1] * 32,
        latents=noise.clone(),
        use_resolution_binning=False,
        output_type="latent",
    ).images
    settings = Sampling(STEPS, guidance)
    ours = sample(model, rows, null, noise, settings)
    assert ours.dtype == torch.float32
    assert _distance(ours, theirs) <= 1e-4
    # the comparison sees another shift, another guidance and swapped captions
    for other in (
        sample(model, rows, null, noise, replace(settings, flow_shift=4.0)),
        sample(model, rows, null, noise, replace(settings, guidance=guidance + 1)),
        sample(model, rows[::-1], null, noise, settings),
    ):
        assert _distance(other, theirs) > 1e-3


def test_batches_change_nothing(model: SanaTransformer, captions: list[Tensor]) -> None:
    *rows, null = captions
    noise, calls = draw_noise(3, (4, 8, 8), seed=1), list[int]()

    def counted(*inputs: Tensor) -> Tensor:
        calls.append(len(inputs[0]))
        return model(*inputs)

    whole = sample(model, rows, null, noise, Sampling(STEPS))
    parts = sample(counted, rows, null, noise, Sampling(STEPS, batch=2))
    assert _distance(parts, whole) <= 1e-4
    assert calls == [4] * STEPS + [2] * STEPS


def test_guidance_zero_is_the_empty_caption(model: SanaTransformer, captions: list[Tensor]) -> None:
    *rows, null = captions
    noise = draw_noise(3, (4, 8, 8), seed=1)
    empty = sample(model, [null] * 3, null, noise, Sampling(STEPS, guidance=1.0))
    none = sample(model, rows, null, noise, Sampling(STEPS, guidance=0.0))
    assert _distance(none, empty) <= 1e-4


def test_follows_the_flow_to_the_data() -> None:
    """With the true flow eps - x0 the solver ends at x0: sign and time direction agree with the objective's target."""
    generator, dtypes = torch.Generator().manual_seed(2), set[torch.dtype]()
    goal, noise = (torch.randn(1, 4, 3, 5, generator=generator) for _ in range(2))

    def flow(latents: Tensor, captions: Tensor, mask: Tensor, timesteps: Tensor) -> Tensor:
        dtypes.add(timesteps.dtype)
        return noise - goal

    # the solver starts at sigma = .999.., where the noised latent is not quite the noise
    start = (noise * 0.999 * 3 + goal * 0.001) / (1 + 2 * 0.999)
    out = sample(flow, [torch.zeros(2, 8)], torch.zeros(1, 8), start, Sampling(4, guidance=1.0))
    assert (out - goal).abs().max() < 1e-4
    assert dtypes == {torch.float32}


def test_noise_of_a_picture_is_that_of_no_other() -> None:
    seen = torch.cat([draw_noise(50, (4, 2, 3), seed=seed).flatten(1) for seed in range(20)])
    assert len(torch.unique(seen, dim=0)) == 50 * 20, "no picture of a seed is one of another seed"


def test_noise_of_a_prompt_depends_on_its_text_and_the_seed_alone() -> None:
    shape = (4, 2, 3)
    first = prompt_noise(["a cat", "a dog"], shape, 0)
    assert torch.equal(prompt_noise(["ein Hund", "a dog", "a cat"], shape, 0)[1:], first.flip(0))
    seen = torch.cat([first, prompt_noise(["a cat", "a dog", "a cat "], shape, 1)]).flatten(1)
    assert len(torch.unique(seen, dim=0)) == 5


def test_noise_is_the_same_in_every_version() -> None:
    """A published picture can be drawn again."""
    shape = (4, 2, 3)
    identity = 0x0123456789ABCDEF
    seed = (3 * SEED_STRIDE + identity) % 2**40 * 1_000_003
    assert torch.equal(
        noise_of(identity, shape, 3)[0], torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    )
    text = int.from_bytes(hashlib.blake2b(b"a cat", digest_size=8).digest(), "little")
    assert torch.equal(prompt_noise(["a cat"], shape, 3), noise_of(text, shape, 3))


def test_defaults_are_those_of_the_published_pipeline() -> None:
    assert Sampling() == Sampling(steps=20, guidance=4.5, flow_shift=3.0, batch=None)


def test_the_model_computes_in_the_dtype_of_the_rows(captions: list[Tensor]) -> None:
    *rows, null = captions
    seen = set[torch.dtype]()

    def flow(latents: Tensor, text: Tensor, mask: Tensor, timesteps: Tensor) -> Tensor:
        seen.update((latents.dtype, text.dtype))
        assert mask.dtype == torch.bool and mask.sum(1).tolist() == [1, 1, 1, 10, 4, 7]
        return latents

    drawn = sample(flow, [each.bfloat16() for each in rows], null, draw_noise(3, (4, 2, 2), 0), Sampling(1))
    assert seen == {torch.bfloat16} and drawn.dtype == torch.float32


def _distance(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()
