"""Small real models for the whole suite, unfitted: made in seconds, loaded by the same code as the released ones."""

from __future__ import annotations

from pathlib import Path

from pipeline.data.captions import INSTRUCTIONS
from pipeline.models import tiny

CAPTIONS = [
    "an astronaut in an orange space suit beside a US flag", "a cup of coffee on a wooden table", "a cat",
    "a rocket on its launch pad at night", "picture number twelve is very good", "a photo of a dog on grass",
]  # fmt: skip


def build(folder: Path, seed: int = 0) -> Path:
    """Make vae/, text_encoder/, tokenizer/ and scheduler/ in `folder` and return it."""
    tiny.make_all(folder, [], CAPTIONS, instruction=INSTRUCTIONS["diffusers"], steps=0, seed=seed)
    return folder
