"""Floating-point operations of a Sana transformer, from shapes alone.

What: `forward_flops` of one forward pass, `training_flops` of a forward and a backward pass; a multiplication and an
addition are two operations, matrix products and convolutions alone are counted, as torch's `flop_counter` does.
Why by hand: the counter has to run the model; this is arithmetic and can be done for every step.
A training pass is three forward passes (each product's gradient is two products of its size), less the gradients of
the model's inputs, which are not computed. Recomputation (checkpointed blocks, parts of attention) does not count: it
saves memory and is no work of the model. Hence "model FLOPs" (PaLM, arXiv 2204.02311, app. B).
"""

from __future__ import annotations

from pipeline.models.sana_config import SanaConfig

_SINUSOID = 256


def forward_flops(config: SanaConfig, samples: int, tokens: int, text_rows: int) -> int:
    """Of one forward pass.

    Args:
        samples: of the batch.
        tokens: image tokens of one sample (latent height * width / patch size squared).
        text_rows: caption rows of all samples together, with the padding that is computed.
    """
    dim, hidden = config.inner_dim, config.glu_channels
    image = samples * tokens
    attention = 4 * dim**2 + 2 * (config.attention_head_dim + 1) * dim  # projections; two products per head
    glu = 2 * dim * hidden + 9 * 2 * hidden + hidden * dim
    block = image * (attention + 2 * dim**2 + glu) + text_rows * (2 * dim**2 + 2 * tokens * dim)
    ends = 2 * image * _patch(config) * dim + samples * (_SINUSOID * dim + dim**2 + 6 * dim**2)
    text = text_rows * (config.caption_channels * dim + dim**2)
    return 2 * (config.num_layers * block + ends + text)


def training_flops(config: SanaConfig, samples: int, tokens: int, text_rows: int) -> int:
    """Of one forward and backward pass; arguments as in `forward_flops`."""
    inputs = samples * tokens * _patch(config) + text_rows * config.caption_channels + samples * _SINUSOID
    return 3 * forward_flops(config, samples, tokens, text_rows) - 2 * inputs * config.inner_dim


def _patch(config: SanaConfig) -> int:
    return config.in_channels * config.patch_size**2
