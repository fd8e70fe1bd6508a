"""Small real models for the tests: VAE, text encoder, tokenizer and scheduler, unfitted, made in a few seconds."""

from __future__ import annotations

from pathlib import Path

from pipeline.data.sources.caption_rules import INSTRUCTIONS
from pipeline.tools.demo import small_models
from pipeline.train.models.sampler import scheduler

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
