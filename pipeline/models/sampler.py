"""Drawing latents with DPM-Solver++ for flow matching and classifier-free guidance.

What: a loop around diffusers' `DPMSolverMultistepScheduler`, set as Sana's published pipelines set it.
Why not `SanaPipeline`: constructing it imports the text encoder and the autoencoder, and it draws one resolution per
call from prompts. Here captions are cached rows, so only the transformer is on the device, and validation during
training imports no encoder.
Price: the loop has to agree with `SanaPipeline(output_type="latent", use_resolution_binning=False)`; a test compares
the two on the same weights.

Source: arXiv 2211.01095 (DPM-Solver++), arXiv 2207.12598 (classifier-free guidance).
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

if TYPE_CHECKING:
    from diffusers import DPMSolverMultistepScheduler

Predict = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(latents, captions, mask, timesteps) -> flow, as `SanaTransformer.forward`."""
INPUTS = "latents", "captions", "mask", "timesteps"
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


def draw_noise(count: int, shape: tuple[int, int, int], seed: int) -> Tensor:
    """(count, C, h, w) float32 standard normal on the CPU. Picture i gets the same noise whatever `count` is."""
    generator = torch.Generator()
    drawn = []
    for number in range(count):
        generator.manual_seed(seed * 1_000_003 + number)
        drawn.append(torch.randn(shape, generator=generator))
    return torch.stack(drawn)


def noise_of(identity: int, shape: tuple[int, int, int], seed: int) -> Tensor:
    """(1, C, h, w) start noise of a picture, from `sample.seed` and what the picture is of, whatever else is drawn."""
    return draw_noise(1, shape, (seed * SEED_STRIDE + identity) % 2**40)


def prompt_noise(texts: Sequence[str], shape: tuple[int, int, int], seed: int) -> Tensor:
    """(N, C, h, w) start noise of pictures of prompts: equal texts have equal noise, in training and in `sample`."""
    digests = (hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts)
    return torch.cat([noise_of(int.from_bytes(digest, "little"), shape, seed) for digest in digests])


def pad_rows(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Text rows (n, D) of each caption as (N, L, D), zeros past the caption's length, and their mask (N, L) bool."""
    lengths = torch.tensor([len(each) for each in rows])
    return pad_sequence(list(rows), batch_first=True), torch.arange(int(lengths.max())) < lengths[:, None]


@torch.no_grad()
def sample(
    model: nn.Module | Predict,
    captions: Tensor,
    mask: Tensor,
    null_captions: Tensor | None = None,
    null_mask: Tensor | None = None,
    *,
    noise: Tensor,
    steps: int = 20,
    guidance: float = 4.5,
    flow_shift: float = 3.0,
    batch: int | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    on_step: Callable[[int, int], Any] | None = None,
) -> Tensor:
    """Draw one latent per caption.

    Args:
        model: called as `model(latents, captions, mask, timesteps)`; a module is put in eval mode for the duration.
        captions, mask: (N, L, D) text rows and (N, L) bool.
        null_captions, null_mask: the empty caption, (M, D) and (M,), or the same with a leading 1 or N. M may differ
            from L: the shorter of the two is padded with masked zeros. Not needed at guidance 1.
        noise: (N, C, h, w) standard normal, the solver's start.
        steps: solver steps, one call of the model each (two samples per picture unless guidance is 1).
        guidance: w in v_null + w (v_caption - v_null); 1 uses the caption alone, 0 the empty caption alone.
        flow_shift: that of training.
        batch: at most this many pictures at once; None takes all.
        device, dtype: of the model's inputs; None takes those of its parameters. Required for a callable that is no
            module, and for a sharded model that computes in another precision than it stores.
        on_step: called with (model calls done, model calls in all).

    Returns:
        (N, C, h, w) float32 latents on the model's device, still multiplied by the autoencoder's scaling factor.

    Raises:
        ValueError: shapes that do not go together, steps < 1, no empty caption where guidance needs it, no device or
            dtype.
    """
    _check(captions, mask, noise, steps)
    if isinstance(model, nn.Module):
        parameter = next(model.parameters())
        device, dtype = device or parameter.device, dtype or parameter.dtype
    if device is None or dtype is None:
        raise ValueError("a callable that is no module needs device and dtype")
    captions, mask = captions.to(device, dtype), mask.to(device)
    count = captions.shape[0]
    size = batch or max(count, 1)
    calls, total = itertools.count(1), steps * -(-count // size)
    parts = [slice(first, first + size) for first in range(0, count, size)]
    texts = _texts(captions, mask, null_captions, null_mask, guidance, parts)

    flow_of = partial(_flow, model, guidance, dtype, lambda: on_step and on_step(next(calls), total))
    with _evaluating(model):
        drawn = [
            _solve(noise[part].to(device, torch.float32), partial(flow_of, *text), steps, flow_shift)
            for part, text in zip(parts, texts, strict=True)
        ]
    return torch.cat(drawn) if drawn else noise.to(device, torch.float32)


def _texts(
    captions: Tensor,
    mask: Tensor,
    null_captions: Tensor | None,
    null_mask: Tensor | None,
    guidance: float,
    parts: Sequence[slice],
) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows and mask of each part; unless guidance is 1, with the empty captions first, all padded to one length."""
    if guidance == 1:
        return ((captions[part], mask[part]) for part in parts)
    if null_captions is None or null_mask is None:
        raise ValueError(f"guidance {guidance} needs the empty caption")
    null = _expand(null_captions.to(captions), null_mask.to(mask.device), len(captions))
    length = max(captions.shape[1], null[0].shape[1])
    given, null = _pad(captions, mask, length), _pad(*null, length)
    return ((torch.cat([null[0][p], given[0][p]]), torch.cat([null[1][p], given[1][p]])) for p in parts)


def _flow(
    model: nn.Module | Predict,
    guidance: float,
    dtype: torch.dtype,
    called: Callable[[], Any],
    rows: Tensor,
    mask: Tensor,
    latents: Tensor,
    timestep: Tensor,
) -> Tensor:
    """The guided flow at `timestep`. rows, mask: with the empty captions first unless guidance is 1."""
    inputs = latents if guidance == 1 else torch.cat([latents, latents])
    flow = model(inputs.to(dtype), rows, mask, timestep.to(torch.float32).expand(inputs.shape[0])).float()
    called()
    if guidance == 1:
        return flow
    unconditional, conditional = flow.chunk(2)
    return unconditional + guidance * (conditional - unconditional)


def _solve(latents: Tensor, flow_of: Callable[[Tensor, Tensor], Tensor], steps: int, flow_shift: float) -> Tensor:
    """Solve from noise to latents. flow_of: (latents, timestep) -> flow."""
    solver = scheduler(flow_shift)
    solver.set_timesteps(steps, device=latents.device)
    for timestep in solver.timesteps:
        latents = solver.step(flow_of(latents, timestep), timestep, latents, return_dict=False)[0]
    return latents


def _check(captions: Tensor, mask: Tensor, noise: Tensor, steps: int) -> None:
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}")
    if captions.ndim != 3 or mask.shape != captions.shape[:2]:
        raise ValueError(f"captions {tuple(captions.shape)} and mask {tuple(mask.shape)} do not go together")
    if noise.ndim != 4 or noise.shape[0] != captions.shape[0]:
        raise ValueError(f"{captions.shape[0]} captions and noise of shape {tuple(noise.shape)} do not go together")


@contextmanager
def _evaluating(model: nn.Module | Predict) -> Iterator[None]:
    if not isinstance(model, nn.Module):
        yield
        return
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _expand(captions: Tensor, mask: Tensor, count: int) -> tuple[Tensor, Tensor]:
    if captions.ndim == 2:
        captions, mask = captions[None], mask[None]
    if captions.ndim != 3 or mask.shape != captions.shape[:2] or captions.shape[0] not in (1, count):
        raise ValueError(
            f"empty caption {tuple(captions.shape)} and its mask {tuple(mask.shape)} do not go together "
            f"with {count} captions"
        )
    return captions.expand(count, -1, -1), mask.expand(count, -1)


def _pad(captions: Tensor, mask: Tensor, length: int) -> tuple[Tensor, Tensor]:
    padding = length - captions.shape[1]
    return F.pad(captions, (0, 0, 0, padding)), F.pad(mask, (0, padding), value=False)
