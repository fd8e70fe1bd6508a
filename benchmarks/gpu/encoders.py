"""Rows of the frozen encoders: DC-AE by arithmetic and layout, Gemma with the shared instruction, both in the loop."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks import text_encode
from benchmarks.gpu.sizes import Sizes
from sana_pipe.base.hub import no_progress_bars
from sana_pipe.data.encoders.config import TextConfig, VaeConfig
from sana_pipe.data.encoders.frozen import from_bits
from sana_pipe.data.encoders.text import TextEncoder
from sana_pipe.data.encoders.vae import LatentEncoder, footprint
from sana_pipe.data.encoding import image_batch
from sana_pipe.tools.demo import small_models

VAE = {
    "encoder_block_types": ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
    "decoder_block_types": ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
    "encoder_layers_per_block": (2, 2, 2, 3, 3, 3),
    "downsample_block_type": "conv",
    "upsample_block_type": "interpolate",
    "scaling_factor": 0.41407,
}
"""What Sana's DC-AE has other than diffusers' defaults."""
ARITHMETIC = ("fp32", "tf32", "bf16")


def save_vae(folder: Path, sizes: Sizes) -> None:
    """A random DC-AE, in diffusers' layout."""
    if sizes.dry:
        small_models.make_vae(folder / "vae", [], steps=0, sizes=[(16, 16)])
        return
    from diffusers import AutoencoderDC

    with torch.device(sizes.device):
        torch.manual_seed(0)
        AutoencoderDC(**VAE).save_pretrained(folder / "vae")


def save_gemma(folder: Path, sizes: Sizes) -> list[str]:
    """A random Gemma-2-2b and a tokenizer, as Sana's repositories have them. Returns the tokenizer's captions."""
    short, long, _ = text_encode.read_captions(None)
    captions = [*short, *long]
    width = sizes.config.caption_channels
    small = {"hidden_size": width, "intermediate_size": width, "num_hidden_layers": 2, "head_dim": 16}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "query_pre_attn_scalar": 16}
    with torch.device(sizes.device):  # released sizes are the defaults of Gemma2Config
        text_encode.build(
            folder, text_encode.tokenizer_for(captions), small if sizes.dry else {"vocab_size": 256_000}, torch.bfloat16
        )
    return captions


def pictures(sizes: Sizes, samples: int, seed: int = 0) -> np.ndarray:
    """uint8 (b, H, W, 3), smooth with some noise."""
    rng, side = np.random.default_rng(seed), sizes.side * sizes.compression
    rough = [Image.fromarray(rng.integers(0, 255, (12, 12, 3), np.uint8)) for _ in range(samples)]
    smooth = np.stack([np.asarray(one.resize((side, side), Image.Resampling.BICUBIC)) for one in rough])
    return np.clip(smooth + rng.normal(0, 8, smooth.shape), 0, 255).astype(np.uint8)


def online(sizes: Sizes, samples: int) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
    """Both encoders on the device, as diffusers' training scripts use them: DC-AE in bf16, `encode_prompt` with the
    instruction. Returns a function that encodes a batch: latents (B, C, h, w), rows (B, 300, D), mask (B, 300)."""
    from diffusers import AutoencoderDC, SanaPipeline
    from transformers import AutoTokenizer, Gemma2Model

    with tempfile.TemporaryDirectory() as place, no_progress_bars():
        folder = Path(place)
        save_vae(folder, sizes)
        captions = save_gemma(folder, sizes)
        vae = AutoencoderDC.from_pretrained(folder / "vae", torch_dtype=torch.bfloat16).to(sizes.device)
        gemma = Gemma2Model.from_pretrained(folder / "text_encoder", dtype=torch.bfloat16).to(sizes.device)
        pipe = SanaPipeline(AutoTokenizer.from_pretrained(folder / "tokenizer"), gemma, None, None, None)
    pixels = torch.from_numpy(pictures(sizes, samples)).permute(0, 3, 1, 2).contiguous()
    prompts = [captions[i % len(captions)] for i in range(samples)]

    @torch.no_grad()
    def encode() -> tuple[Tensor, Tensor, Tensor]:
        x = pixels.to(sizes.device).bfloat16() / 127.5 - 1
        latents = torch.cat([vae.encode(part).latent for part in x.split(4)]) * vae.config.scaling_factor
        rows, mask, _, _ = pipe.encode_prompt(
            prompts,
            do_classifier_free_guidance=False,
            device=sizes.device,
            max_sequence_length=sizes.rows,
            complex_human_instruction=text_encode.INSTRUCTION.split("\n"),
        )
        return latents, rows, mask.bool()

    return encode


# ------------------------------------------------------------------------------------------------------------- rows


def vae(sizes: Sizes, *, batch: int) -> dict[str, Any]:
    """DC-AE encoding by precision: images/s, and the relative error (root mean square) against the exact
    latents; null where it does not fit. Next to it the batch of `encode.image_batch: auto`: its images/s, its peak, and
    the peak that chose it."""
    images = pictures(sizes, sizes.count(batch))
    figures: dict[str, Any] = {}
    exact: Tensor | None = None
    with tempfile.TemporaryDirectory() as folder:
        save_vae(Path(folder), sizes)
        for name in ARITHMETIC:
            figures |= dict.fromkeys((f"{name}_images_per_s", f"{name}_error", f"{name}_peak_gib"))
            try:
                encoder = LatentEncoder.load(VaeConfig.model_validate({"id": folder, "dtype": name}), sizes.device)
                latents = from_bits(encoder.encode(images)).float()
                seconds = sizes.after_warming(lambda encoder=encoder: encoder.encode(images), 1, 3)  # type: ignore[misc]
                fits = True
            except torch.OutOfMemoryError:
                fits = False
            peak, encoder = sizes.memory()["peak_gib"], None  # type: ignore[assignment]
            sizes.free()  # after the error, whose frames refer to tensors
            if not fits:
                continue
            exact = latents if name == "fp32" else exact
            figures |= _batch_by_memory(sizes, name, VaeConfig.model_validate({"id": folder, "dtype": name}))
            figures[f"{name}_images_per_s"] = len(images) / seconds
            figures[f"{name}_peak_gib"] = peak
            if exact is not None:
                error = (latents - exact).square().mean().sqrt() / exact.square().mean().sqrt()
                figures[f"{name}_error"] = float(error)
    return figures


def _batch_by_memory(sizes: Sizes, name: str, config: VaeConfig) -> dict[str, Any]:
    """Of one arithmetic: the batch that is chosen, and what it takes; null where it does not fit after all. In a dry
    run it is the fixed one."""
    side = sizes.side * sizes.compression
    batch, each = (
        image_batch.fitting(partial(footprint, config), lambda: sizes.device)(side, side),
        footprint(config, side, side),
    )
    figures: dict[str, Any] = {f"{name}_auto_{figure}": None for figure in ("images_per_s", "peak_gib")}
    sizes.reset_peak()
    with contextlib.suppress(torch.OutOfMemoryError):
        images, encoder = pictures(sizes, batch), LatentEncoder.load(config, sizes.device)
        figures[f"{name}_auto_images_per_s"] = batch / sizes.after_warming(lambda: encoder.encode(images), 1, 1)
        figures[f"{name}_auto_peak_gib"] = sizes.memory()["peak_gib"]
    encoder = None  # type: ignore[assignment]
    sizes.free()
    predicted = (each.weights + batch * each.picture) / 2**30
    return figures | {f"{name}_auto_batch": batch, f"{name}_auto_predicted_gib": predicted}


def gemma(sizes: Sizes, *, captions: int, lengths: list[int]) -> dict[str, Any]:
    """`TextEncoder` with the instruction computed once, against `encode_prompt`, on the same captions in the same
    batch; the encoder first compares itself with the reference, as at the start of `encode`, and refuses if they
    differ by more than bf16's rounding."""
    from diffusers import SanaPipeline

    figures: dict[str, Any] = {"max_rel_error": 0.0}
    with tempfile.TemporaryDirectory() as folder, no_progress_bars():
        made = save_gemma(Path(folder), sizes)
        encoder = TextEncoder.load(TextConfig(id=folder), sizes.device)
    sizes.free()
    peak = 0.0
    pipe = SanaPipeline(encoder.tokenizer, encoder.model, None, None, None)
    words = text_encode.single_words(encoder, made)
    for length in lengths:
        chosen = text_encode.of_length(encoder, words, length, sizes.count(captions))
        encoder.encode(chosen)  # the comparison
        sizes.reset_peak()
        ours = sizes.seconds(lambda chosen=chosen: encoder.encode(chosen), sizes.count(3, 1))  # type: ignore[misc]
        peak = max(peak, sizes.memory()["peak_gib"])
        rows = text_encode.reference_rows(pipe, [chosen], sizes.device)
        theirs = sizes.seconds(
            lambda chosen=chosen: text_encode.reference_rows(pipe, [chosen], sizes.device),  # type: ignore[misc]
            sizes.count(3, 1),
        )
        error = text_encode.largest_error(encoder, chosen, rows)
        figures["max_rel_error"] = max(figures["max_rel_error"], error)
        figures |= {f"captions_per_s_{length}": len(chosen) / ours, f"speedup_{length}": theirs / ours}
    return figures | {"peak_gib": peak}
