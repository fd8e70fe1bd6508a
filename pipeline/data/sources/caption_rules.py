"""Text rules before the text encoder: instruction, normalisation, and the choice among captions.

Why two ways of prompting: `SanaPipeline` of diffusers lower-cases and strips the prompt and quotes one phrase of the
instruction with single quotes; NVlabs' trainer does neither. A model should be trained on the rows that it gets at
inference, so `diffusers` is the default; `nvlabs` continues a training that NVlabs' code began.
Price: with `diffusers` the capitals of a caption do not reach the model, as at inference.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from sana_pipe.base.errors import UserError
from sana_pipe.data.encoders.config import INSTRUCTIONS, TextConfig
from sana_pipe.data.sources import prx_cleaning

_FLAGS = re.compile(
    r"(?<!\S)--(?:[A-Za-z]{1,2}|seed|steps|width|height|neg|negative|niji|style|stylize|chaos)(?=[\s=]|$)"
)
"""kohya's (`--n blurry --w 64 --d 42`), Midjourney's (`--ar 16:9 --v 6`) and their like."""
_UNCHANGED = ("nvlabs", "unchanged")
_ASCII_SPACE = "".join(character for character in map(chr, range(128)) if character.isspace())


def instruction(config: TextConfig) -> str:
    """The text before every caption of Sana: the configured one, else that of the prompting."""
    return INSTRUCTIONS[config.prompting] if config.instruction is None else config.instruction


def normalise(caption: str, rule: str) -> str:
    """The caption as the encoder receives it, without the instruction.

    Args:
        rule: an encoding's `normalisation`. `diffusers`: lower case, surrounding whitespace removed (SanaPipeline,
            `clean_caption=False`); `nvlabs` and `unchanged`: as written; `prx`: cleaned (PRXPipeline).
    """
    if rule == "diffusers":
        return caption.lower().strip()
    if rule in _UNCHANGED:
        return caption
    if rule == "prx":
        return prx_cleaning.clean(caption)
    raise ValueError(f"unknown normalisation {rule!r}")


def normalise_all(captions: pa.Array, rule: str) -> pa.Array:
    """`normalise` of many captions (strings without null)."""
    if rule in _UNCHANGED:
        return captions
    normalised = pc.ascii_lower(captions)
    if rule == "prx":
        plain = pc.match_substring_regex(captions, prx_cleaning.PLAIN)
        other = pc.invert(pc.and_not(plain, pc.match_substring_regex(captions, prx_cleaning.UNUSUAL)))
    else:
        other = pc.invert(pc.string_is_ascii(captions))  # Arrow knows other lower-case letters than Python
        normalised = pc.ascii_trim(normalised, characters=_ASCII_SPACE)
    rest = [normalise(caption, rule) for caption in captions.filter(other).to_pylist()]
    return pc.replace_with_mask(normalised, other, pa.array(rest, captions.type)) if rest else normalised


def check_prompt(text: str, place: str) -> None:
    """Refuse a prompt with options of other trainers and services behind it, which would be drawn as words.

    Args:
        place: where it stands, for people.
    """
    if found := _FLAGS.findall(text):
        raise UserError(
            f"{place}: has options of another program, which would be read as words of the prompt",
            expected="words alone; sizes are train.pictures.size, or --height and --width of sample; seed, "
            "steps and guidance are sample.seed, sample.steps and sample.guidance; there are no negative prompts",
            found=" ".join(found),
            fix="remove them from the prompt",
        )


def choose(weights: Sequence[float], draw: float) -> int:
    """The index of a caption, drawn in proportion to the weights (Sana's `caption_selection_type: proportion`).

    Args:
        weights: one per candidate, finite, not negative, not all zero; they need not sum to one.
        draw: uniform in [0, 1).

    Raises:
        ValueError: weights or draw outside these bounds.
    """
    if not weights or not all(math.isfinite(w) and w >= 0 for w in weights) or not any(weights):
        raise ValueError(f"caption weights must be finite, not negative and not all zero: {list(weights)}")
    if not 0 <= draw < 1:
        raise ValueError(f"the draw must lie in [0, 1): {draw}")
    largest = max(weights)  # dividing first: the sum of huge weights could overflow
    scaled = [w / largest for w in weights]
    target = draw * math.fsum(scaled)
    reached, last = 0.0, 0
    for index, weight in enumerate(scaled):
        if weight == 0:
            continue
        reached += weight
        last = index
        if target < reached:
            break
    return last
