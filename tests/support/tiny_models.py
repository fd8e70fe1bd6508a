"""Small real models for the tests: VAE, text encoder, tokenizer and scheduler, unfitted, made in a few seconds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sana_pipe.base.hub import no_progress_bars
from sana_pipe.data.sources.caption_rules import INSTRUCTIONS
from sana_pipe.tools.demo import small_models
from sana_pipe.train.models.sampler import scheduler

CAPTIONS = (
    "a red circle on a white table",
    "two small dogs run through green grass",
    "an old house by the sea at night",
    'a sign that says "open" in a shop window',
    "portrait of a woman with short hair",
    "a bowl of fruit, bananas and apples",
    "snow on the mountains behind a lake",
    "a yellow bicycle leaning against a brick wall",
)


def build(folder: Path, seed: int = 0) -> Path:
    """Make `vae/` (f8, 16 channels), `text_encoder/` (128 wide), `tokenizer/` and `scheduler/` in `folder`.

    The weights are random: enough for every test that is not about pictures. `id: FOLDER` in a configuration names
    them all.
    """
    small_models.make_vae(folder / "vae", [], steps=0, seed=seed)
    instruction = INSTRUCTIONS["diffusers"]
    small_models.make_text(folder / "text_encoder", CAPTIONS, instruction=instruction, seed=seed, layers=2, heads=2)
    scheduler(3.0).save_pretrained(folder / "scheduler")
    return folder


def build_kl(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Make a random `AutoencoderKL` like that of Z-Image in `vae/`: f8, 16 channels, a shift, no `quant_conv`."""
    from diffusers import AutoencoderKL

    settings: dict[str, Any] = {
        "latent_channels": 16,
        "block_out_channels": (8, 8, 16, 16),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "norm_num_groups": 4,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
        "scaling_factor": 0.3611,
        "shift_factor": 0.1159,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoencoderKL(**{**settings, **changes}).eval()
    model.save_pretrained(folder / "vae")
    return folder


TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
"""What Qwen3's chat template makes of one turn."""


def build_qwen3(folder: Path, captions: Sequence[str] = CAPTIONS, seed: int = 0) -> Path:
    """Make a random Qwen3 (128 wide, three layers) in `text_encoder/`, and in `tokenizer/` one like Qwen's: byte-level
    BPE, special tokens of a chat, no <bos>, a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3Model

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learner.train_from_iterator(
        captions, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(learner.to_str())["model"]
    special = {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    merges: Any = [tuple(pair) for pair in model["merges"]]
    tokenizer = Qwen2Tokenizer(vocab=model["vocab"], merges=merges, chat_template=TEMPLATE, **special)
    tokenizer.save_pretrained(folder / "tokenizer")
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=small_models.TEXT_WIDTH,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.1,
    )
    return _saved(Qwen3Model, config, folder, seed)


def build_t5gemma(folder: Path, captions: Sequence[str] = CAPTIONS, seed: int = 0) -> Path:
    """Make the encoder of a random T5Gemma (128 wide, three layers, a window of 16) in `text_encoder/`, and Gemma's
    tokenizer in `tokenizer/`."""
    from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

    tokenizer = small_models.new_tokenizer([*captions, *(text.lower() for text in captions)], 1024)
    tokenizer.model_max_length = 256
    tokenizer.save_pretrained(folder / "tokenizer")
    return _saved(T5GemmaEncoder, t5gemma_config(len(tokenizer)).encoder, folder, seed)


def t5gemma_config(vocabulary: int) -> Any:
    """The configuration of a small T5Gemma, both halves alike."""
    from transformers import T5GemmaConfig

    half = {
        "vocab_size": vocabulary,
        "hidden_size": small_models.TEXT_WIDTH,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 16,
        "max_position_embeddings": 2048,
        "initializer_range": 0.1,
    }
    return T5GemmaConfig(encoder=half, decoder=half, vocab_size=vocabulary)


def _saved(kind: Any, config: Any, folder: Path, seed: int) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config).eval()
    with no_progress_bars():
        model.save_pretrained(folder / "text_encoder")
    return folder
