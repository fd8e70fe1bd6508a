"""The sampling loop against `SanaPipeline` on the same weights, and its own laws."""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pipeline.models.sampler import SEED_STRIDE, draw_noise, noise_of, pad_rows, prompt_noise, sample, scheduler
from pipeline.models.sana import SanaTransformer
from pipeline.models.sana_files import save_weights
from tests.support.hub_layouts import SMALL

CONFIG = replace(SMALL, in_channels=4, out_channels=4, caption_channels=24)
STEPS = 6


@pytest.fixture(scope="module")
def model() -> SanaTransformer:
    model = SanaTransformer.from_scratch(CONFIG, seed=3)
    with torch.no_grad():
        model.caption_norm.weight.fill_(1.0)  # so that captions matter without training
    return model


@pytest.fixture(scope="module")
def captions() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(3, 10, 24, generator=generator)
    mask = torch.arange(10)[None] < torch.tensor([[10], [4], [7]])
    null = torch.randn(10, 24, generator=generator)
    return rows, mask, null, torch.arange(10) < 1


@pytest.mark.parametrize("guidance", [4.5, 1.0])
@pytest.mark.parametrize("size", [(8, 8), (6, 12)])
def test_equals_sana_pipeline(
    model: SanaTransformer,
    captions: tuple[Tensor, Tensor, Tensor, Tensor],
    guidance: float,
    size: tuple[int, int],
    tmp_path: Path,
) -> None:
    from diffusers import SanaPipeline, SanaTransformer2DModel

    rows, mask, null, null_mask = captions
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
    theirs = pipeline(
        prompt_embeds=rows,
        prompt_attention_mask=mask.long(),
        negative_prompt=None,
        negative_prompt_embeds=null.expand(3, -1, -1),
        negative_prompt_attention_mask=null_mask.long().expand(3, -1),
        num_inference_steps=STEPS,
        guidance_scale=guidance,
        height=size[0] * 32,
        width=size[1] * 32,
        latents=noise.clone(),
        use_resolution_binning=False,
        output_type="latent",
    ).images
    ours = sample(model, rows, mask, null, null_mask, noise=noise, steps=STEPS, guidance=guidance)
    assert ours.dtype == torch.float32
    assert _distance(ours, theirs) <= 1e-4
    # the comparison sees another shift, another guidance and swapped captions
    for other in (
        sample(model, rows, mask, null, null_mask, noise=noise, steps=STEPS, guidance=guidance, flow_shift=4.0),
        sample(model, rows, mask, null, null_mask, noise=noise, steps=STEPS, guidance=guidance + 1),
        sample(model, rows.flip(0), mask.flip(0), null, null_mask, noise=noise, steps=STEPS, guidance=guidance),
    ):
        assert _distance(other, theirs) > 1e-3


def test_batches_and_lengths_change_nothing(
    model: SanaTransformer, captions: tuple[Tensor, Tensor, Tensor, Tensor]
) -> None:
    rows, mask, null, null_mask = captions
    noise = draw_noise(3, (4, 8, 8), seed=1)
    seen: list[tuple[int, int]] = []
    whole = sample(model, rows, mask, null, null_mask, noise=noise, steps=STEPS)
    parts = sample(
        model,
        rows,
        mask,
        null[:1],  # only the row that its mask shows
        null_mask[:1],
        noise=noise,
        steps=STEPS,
        batch=2,
        on_step=lambda done, of: seen.append((done, of)),
    )
    assert _distance(parts, whole) <= 1e-4
    assert seen == [(i + 1, 2 * STEPS) for i in range(2 * STEPS)]


def test_guidance_zero_is_the_empty_caption(
    model: SanaTransformer, captions: tuple[Tensor, Tensor, Tensor, Tensor]
) -> None:
    rows, mask, null, null_mask = captions
    noise = draw_noise(3, (4, 8, 8), seed=1)
    empty = sample(model, null.expand(3, -1, -1), null_mask.expand(3, -1), noise=noise, steps=STEPS, guidance=1.0)
    none = sample(model, rows, mask, null, null_mask, noise=noise, steps=STEPS, guidance=0.0)
    assert _distance(none, empty) <= 1e-4


class _Toward(nn.Module):
    """A perfect flow: always leads to `goal`, whatever the noise."""

    def __init__(self, goal: Tensor):
        super().__init__()
        self.goal = nn.Parameter(goal)
        self.noise = torch.zeros_like(goal)
        self.dtypes: list[torch.dtype] = []

    def forward(self, latents: Tensor, captions: Tensor, mask: Tensor, timesteps: Tensor) -> Tensor:
        self.dtypes.append(timesteps.dtype)
        assert not self.training
        return self.noise - self.goal


def test_follows_the_flow_to_the_data() -> None:
    """With the true flow eps - x0 the solver ends at x0: sign and time direction agree with the objective's target."""
    generator = torch.Generator().manual_seed(2)
    goal = torch.randn(1, 4, 3, 5, generator=generator)
    model = _Toward(goal)
    model.noise = noise = torch.randn(1, 4, 3, 5, generator=generator)
    # the solver starts at sigma = .999.., where the noised latent is not quite the noise
    start = (noise * 0.999 * 3 + goal * 0.001) / (1 + 2 * 0.999)
    out = sample(model, torch.zeros(1, 2, 8), torch.ones(1, 2, dtype=torch.bool), noise=start, steps=4, guidance=1.0)
    assert (out - goal).abs().max() < 1e-4
    assert set(model.dtypes) == {torch.float32}
    assert model.training


def test_a_model_in_eval_mode_stays_in_it() -> None:
    model = _Toward(torch.zeros(1, 4, 2, 2)).eval()
    sample(model, torch.zeros(1, 2, 8), torch.ones(1, 2).bool(), noise=torch.zeros(1, 4, 2, 2), steps=1, guidance=1.0)
    assert not model.training


def test_mode_is_restored_after_a_failure() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, *_: Tensor) -> Tensor:
            raise RuntimeError("broken")

    model = Broken()
    with contextlib.suppress(RuntimeError):
        sample(model, torch.zeros(1, 2, 8), torch.ones(1, 2).bool(), noise=torch.zeros(1, 4, 2, 2), guidance=1.0)
    assert model.training


def test_noise_of_a_picture_does_not_depend_on_the_others() -> None:
    assert torch.equal(draw_noise(2, (4, 2, 3), seed=7), draw_noise(5, (4, 2, 3), seed=7)[:2])
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
    second = torch.randn(shape, generator=torch.Generator().manual_seed(7 * 1_000_003 + 1))
    assert torch.equal(draw_noise(2, shape, seed=7)[1], second)
    identity = 0x0123456789ABCDEF
    assert torch.equal(noise_of(identity, shape, 3), draw_noise(1, shape, (3 * SEED_STRIDE + identity) % 2**40))
    text = int.from_bytes(hashlib.blake2b(b"a cat", digest_size=8).digest(), "little")
    assert torch.equal(prompt_noise(["a cat"], shape, 3), noise_of(text, shape, 3))


def test_defaults_are_those_of_the_published_pipeline() -> None:
    class Toy(nn.Linear):
        def forward(self, latents: Tensor, captions: Tensor, mask: Tensor, timesteps: Tensor) -> Tensor:
            return latents * captions.mean((1, 2))[:, None, None, None] + timesteps[0] / 1000

    texts = torch.ones(1, 2, 8), torch.ones(1, 2).bool(), torch.zeros(2, 8), torch.ones(2).bool()
    noise, seen = draw_noise(1, (4, 2, 3), 0), list[int]()
    drawn = sample(Toy(1, 1), *texts, noise=noise, on_step=lambda done, of: seen.append(of))
    assert seen == [20] * 20
    assert torch.equal(drawn, sample(Toy(1, 1), *texts, noise=noise, steps=20, guidance=4.5, flow_shift=3.0))


def test_a_callable_draws_what_its_module_draws(
    model: SanaTransformer, captions: tuple[Tensor, Tensor, Tensor, Tensor]
) -> None:
    rows, mask, null, null_mask = captions
    padded, lengths = pad_rows([row[shown] for row, shown in zip(rows, mask, strict=True)])
    assert torch.equal(lengths, mask)
    assert torch.equal(padded, rows * mask[..., None])
    noise = draw_noise(3, (4, 8, 8), seed=1)
    whole = sample(model, rows, mask, null, null_mask, noise=noise, steps=2)
    place = {"device": torch.device("cpu"), "dtype": torch.float32}
    called = sample(lambda *inputs: model(*inputs), padded, mask, null, null_mask, noise=noise, steps=2, **place)
    assert _distance(called, whole) <= 1e-5
    with pytest.raises(ValueError, match="needs device and dtype"):
        sample(lambda *inputs: model(*inputs), rows, mask, null, null_mask, noise=noise, dtype=torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"null_captions": None}, "needs the empty caption"),
        ({"mask": torch.ones(2, 3).bool()}, "do not go together"),
        ({"noise": torch.zeros(1, 4, 8, 8)}, "do not go together"),
        ({"null_mask": torch.ones(3).bool()}, "do not go together"),
    ],
)
def test_refuses_what_does_not_fit(model: SanaTransformer, change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "captions": torch.zeros(2, 5, 24),
        "mask": torch.ones(2, 5).bool(),
        "null_captions": torch.zeros(1, 24),
        "null_mask": torch.ones(1).bool(),
        "noise": torch.zeros(2, 4, 8, 8),
        "steps": 1,
    }
    with pytest.raises(ValueError, match=message):
        sample(model, **(arguments | change))  # type: ignore[arg-type]


def _distance(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()
