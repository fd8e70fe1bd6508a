"""Drawing latents with a model's solver and classifier-free guidance (arXiv 2207.12598).

A loop around a scheduler of diffusers (`ModelSpec.scheduler`): for Sana DPM-Solver++ (2211.01095), set as its published
pipelines set it. `SanaPipeline` would import the text encoder and the autoencoder; here captions are cached rows, so
only the transformer is on the device. The loop agrees with `SanaPipeline(output_type="latent",
use_resolution_binning=False)`; a test compares the two. `ModelSpec.sigmas` gives the levels of other pipelines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sana_pipe.train.models.config import SampleConfig

if TYPE_CHECKING:
    from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler

Predict = Callable[..., Tensor]
"""(latents, captions, mask, timesteps) -> flow, as `SanaTransformer.forward`; with controls a fifth argument."""
INPUTS = "latents", "captions", "mask", "timesteps", "control"
"""Their names, in the order of `Predict`."""
SEED_STRIDE = 0x9E3779B97F4A7C15
"""Odd and large: seeds 0, 1, 2 lie so far apart that no two pictures share noise."""


def scheduler(flow_shift: float) -> DPMSolverMultistepScheduler:
    """Sana's sampler settings: second-order DPM-Solver++ on flow sigmas. An exported pipeline has the same."""
    from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler

    return DPMSolverMultistepScheduler(
        num_train_timesteps=1000,
        solver_order=2,
        algorithm_type="dpmsolver++",
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=flow_shift,
    )


def euler(shift: float) -> FlowMatchEulerDiscreteScheduler:
    """The Euler method on flow sigmas, the solver of most flow models."""
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=shift)


def noise_of(identity: int, shape: tuple[int, int, int], seed: int) -> Tensor:
    """(1, C, h, w) float32 standard normal on the CPU: start noise of a picture, from `sample.seed` and what it is of,
    whatever else is drawn."""
    generator = torch.Generator().manual_seed((seed * SEED_STRIDE + identity) % 2**40 * 1_000_003)
    return torch.randn((1, *shape), generator=generator)


def prompt_noise(texts: Sequence[str], shape: tuple[int, int, int], seed: int) -> Tensor:
    """(N, C, h, w) start noise of pictures of prompts: equal texts have equal noise, in training and in `sample`."""
    digests = (hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts)
    return torch.cat([noise_of(int.from_bytes(digest, "little"), shape, seed) for digest in digests])


def pad_rows(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Text rows (n, D) of each caption as (N, L, D), zeros past the caption's length, and their mask (N, L) bool."""
    padded, lengths = pad_sequence(list(rows), batch_first=True), torch.tensor([len(each) for each in rows])
    return padded, (torch.arange(padded.shape[1]) < lengths[:, None]).to(padded.device)


@dataclass(frozen=True)
class Sampling:
    """The way in which latents are drawn.

    Attributes:
        steps: solver steps, one call of the model each (two samples per picture unless guidance is 1).
        guidance: w in v_null + w (v_caption - v_null); 1 uses the caption alone, 0 the empty caption alone.
        flow_shift: that of training.
        batch: at most this many pictures at once; None takes all.
        solver: makes the scheduler from the shift, a new one for each batch.
        sigmas: see `ModelSpec.sigmas`.
    """

    steps: int = 20
    guidance: float = 4.5
    flow_shift: float = 3.0
    batch: int | None = None
    solver: Callable[[float], Any] = scheduler
    sigmas: Callable[[int], list[float] | None] = lambda steps: None

    @classmethod
    def of(
        cls,
        settings: SampleConfig,
        flow_shift: float,
        batch: int | None = None,
        solver: Callable[[float], Any] = scheduler,
        sigmas: Callable[[int], list[float] | None] = lambda steps: None,
    ) -> Sampling:
        return cls(settings.steps, settings.guidance, flow_shift, batch, solver, sigmas)


@torch.no_grad()
def sample(
    predict: Predict,
    rows: Sequence[Tensor],
    null: Tensor,
    noise: Tensor,
    settings: Sampling = Sampling(),
    controls: Tensor | None = None,
) -> Tensor:
    """Draw one latent per caption.

    Args:
        predict: the model, in eval mode.
        rows: (n, D) text rows of each caption, in the dtype and on the device of the model's inputs.
        null: (m, D) rows of the empty caption that its mask shows.
        noise: (N, C, h, w) standard normal, the solver's start.
        controls: (N, C, h, w) latents of the control pictures, for both halves of the guidance; None: there are none.

    Returns:
        (N, C, h, w) float32 latents on the device of `rows`, still multiplied by the autoencoder's scaling factor.
    """
    drawn, size, guided = [], settings.batch or len(rows), settings.guidance != 1
    for first in range(0, len(rows), size):
        captions = list(rows[first : first + size])
        text, mask = pad_rows([*([null.to(captions[0])] * len(captions) if guided else []), *captions])
        latents, solver = (
            noise[first : first + size].to(text.device, torch.float32),
            settings.solver(settings.flow_shift),
        )
        given = []
        if controls is not None:
            given = [controls[first : first + size].to(text).repeat(2 if guided else 1, 1, 1, 1)]
        levels = settings.sigmas(settings.steps)
        solver.set_timesteps(settings.steps, device=text.device, **({} if levels is None else {"sigmas": levels}))
        solver.set_begin_index(0)  # else it looks the first timestep up on the device, and waits for it
        for timestep in solver.timesteps:
            inputs = (torch.cat([latents, latents]) if guided else latents).to(text.dtype)
            flow = predict(inputs, text, mask, timestep.to(torch.float32).expand(len(inputs)), *given).float()
            if guided:
                unconditional, conditional = flow.chunk(2)
                flow = unconditional + settings.guidance * (conditional - unconditional)
            latents = solver.step(flow, timestep, latents, return_dict=False)[0]
        drawn.append(latents)
    return torch.cat(drawn)
