"""Flow matching: the table of noise levels, the timesteps, the noised latents, the target and the loss."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sana_pipe.train.models.config import FlowConfig
from sana_pipe.train.models.flow_matching import FlowMatching


@pytest.mark.parametrize("shift", [1.0, 3.0, 4.0, 6.0])
def test_table_and_timesteps_in_exact_arithmetic(shift: float) -> None:
    flow = FlowMatching(FlowConfig(shift=shift))
    s = Fraction(shift)
    for i in range(1000):
        sigma = s * Fraction(i, 1000) / (1 + (s - 1) * Fraction(i, 1000))
        assert flow.table[i].item() == pytest.approx(float(sigma), rel=1e-7, abs=0)
        assert flow.timestep_table[i].item() == 1000 * sigma.numerator // sigma.denominator
    assert flow.table[0] == 0
    assert flow.table[999] < 1


def test_logit_normal_first_then_shift() -> None:
    config = FlowConfig(shift=3.0)
    flow = FlowMatching(config)
    sigma, timesteps = flow.sigmas(torch.tensor([0.0, -20.0, 20.0, 1.0]))
    # sigmoid(0) = 1/2 -> entry 500 -> 3/2 / 2 = 3/4; sigmoid(1) = .731058 -> entry 731 -> 2.193 / 2.462
    assert sigma.tolist() == pytest.approx([0.75, 0.0, 2.997 / 2.998, 2.193 / 2.462], rel=1e-6)
    assert timesteps.tolist() == [750.0, 0.0, 999.0, 890.0]
    assert sigma.dtype == timesteps.dtype == torch.float32


def test_sign_and_spread_of_the_logit() -> None:
    """Entries are counted from the middle: sigmoid of the draw - 1/2."""
    flow = FlowMatching(FlowConfig())
    for draw, entry in ((-1.0, 268), (0.0, 500), (0.5, 622), (1.0, 731), (2.0, 880)):
        assert flow.sigmas(torch.tensor([draw]))[0] == flow.table[entry]


@pytest.mark.parametrize(("shift", "mean"), [(3.0, 0.714), (4.0, 0.761), (6.0, 0.819)])
def test_mean_noise_level(shift: float, mean: float) -> None:
    logit = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    sigma, _ = FlowMatching(FlowConfig(shift=shift)).sigmas(logit)
    assert sigma.mean().item() == pytest.approx(mean, abs=2e-3)


def test_the_entry_is_computed_in_float64() -> None:
    """In float32 a few of these draws select a neighbour, and other ones on other devices."""
    logit = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    flow = FlowMatching(FlowConfig())
    entry = np.floor(1000 / (1 + np.exp(-logit.double().numpy()))).astype(int)
    assert torch.equal(flow.sigmas(logit)[0], flow.table[entry])
    assert not np.array_equal(np.floor(1000 * torch.sigmoid(logit).numpy()), entry)


@given(st.floats(-60, 60, width=32), st.sampled_from([1.0, 3.0, 4.0, 6.0]))
def test_timestep_goes_with_its_sigma(logit: float, shift: float) -> None:
    sigma, timestep = FlowMatching(FlowConfig(shift=shift)).sigmas(torch.tensor([logit]))
    assert 0 <= sigma.item() < 1
    assert timestep.item() == int(timestep.item())
    assert -1 < timestep.item() - 1000 * sigma.item() < 1e-4  # the table test pins whole numbers; float32 blurs them


def test_noised_target_and_loss() -> None:
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(3, 4, 5, 7, generator=generator).bfloat16()
    noise = torch.randn(3, 4, 5, 7, generator=generator)
    flow = FlowMatching(FlowConfig())
    sigma = torch.tensor([0.0, 0.3, 0.999])
    noised, target = flow.noised(latents, noise, sigma), flow.target(latents, noise)
    assert noised.dtype == target.dtype == torch.float32
    assert torch.equal(noised[0], latents[0].float())
    exact = latents.double() + sigma.double().view(-1, 1, 1, 1) * (noise.double() - latents.double())
    assert (noised - exact).abs().max() < 1e-6
    # the flow leads from the noised latent back to the latent
    back = noised.double() - sigma.double().view(-1, 1, 1, 1) * target.double()
    assert (back - latents.double()).abs().max() < 1e-6

    prediction = torch.randn(3, 4, 5, 7, generator=generator).bfloat16()
    loss = flow.loss(prediction, target)
    assert loss.shape == (3,)
    assert loss.dtype == torch.float32
    exact_loss = (prediction.double() - target.double()).square().flatten(1).mean(1)
    assert torch.allclose(loss.double(), exact_loss, rtol=1e-6)
    assert torch.equal(flow.loss(target, target), torch.zeros(3))
    with pytest.raises(ValueError, match="differ in shape"):
        flow.loss(prediction[:1], target)


def test_bf16_noise_levels_would_be_seen() -> None:
    """The noised latents are computed from float32 levels: rounding sigma to bf16 moves them by more than 1e-3."""
    flow = FlowMatching(FlowConfig())
    latents, noise = torch.zeros(1, 1, 2, 2), torch.ones(1, 1, 2, 2)
    sigma, _ = flow.sigmas(torch.tensor([0.9]))
    exact = flow.noised(latents, noise, sigma)
    rounded = flow.noised(latents, noise, sigma.bfloat16().float())
    assert (exact - sigma.item()).abs().max() < 1e-7
    assert (exact - rounded).abs().max() > 1e-3 * sigma.item()
