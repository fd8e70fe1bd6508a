"""Text: the rows that the text encoder makes of a caption."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pipeline.cache.recipes import CaptionRecipe


@dataclass(frozen=True)
class TextRecipe(CaptionRecipe):
    """Values of text rows: the encoder's last hidden state after its final norm, selected by `selection`."""

    kind: ClassVar[str] = "text"
    weights: str = ""
    tokenizer: str = ""
    dtype: str = "bf16"
    attention: str = "eager"
    instruction: str = ""
    selection: str = "sana"
