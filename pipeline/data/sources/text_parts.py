"""Decide what the entries of a list in a caption column are: tags of one caption, or several captions.

An entry that reads as a sentence makes captions of all of them. Else a column that is named after tags, words joined by
underscores, or `MANY` short entries make tags. A list that shows none of these is for the user to decide.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

CAPTIONS, TAGS = "captions", "tags"
TAG_COLUMNS = ("tag", "keyword", "label", "categor")
"""Parts of the names of columns that hold tags."""

MANY = 5
"""Entries of a list of tags, at least, where nothing else tells."""
TAG_WORDS = 4
"""Words of a tag, at most."""
_ARTICLES = {"a", "an", "the", "there", "this", "these"}
_NO_COMMA = re.compile(r"(['\"])\s+(['\"])")
_ENDS = (".", "!", "?", "。", "！", "？")


def parts_of(column: str, texts: Sequence[str]) -> str | None:
    """`CAPTIONS`, `TAGS`, or None where a list may be either. texts: its entries, two or more."""
    if any(map(_is_sentence, texts)):
        return CAPTIONS
    named = any(word in column.lower() for word in TAG_COLUMNS)
    return TAGS if named or len(texts) >= MANY or any("_" in text for text in texts) else None


def unpacked(value: Any) -> Any:
    """The list of texts that a text holds as JSON or as Python or NumPy print it, such as in a cell of a CSV file; any
    other value as it is."""
    if not isinstance(value, str) or not (value := value.strip()).startswith("[") or not value.endswith("]"):
        return value
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            texts = read(value if read is json.loads else _NO_COMMA.sub(r"\1, \2", value))
            if texts and isinstance(texts, list) and all(isinstance(text, str) for text in texts):
                return texts
    return value


def lines_of(text: str) -> list[str]:
    """The lines of a text that are not blank."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def _is_sentence(text: str) -> bool:
    """Return whether an entry reads as a caption: a full stop, an article, a list of its own, or many words."""
    text = text.strip()
    words = text.lower().split()
    wide = sum("\u3040" <= character <= "\u9fff" for character in text)  # Chinese and Japanese have no spaces
    return (
        text.endswith(_ENDS)
        or not _ARTICLES.isdisjoint(words)
        or any(comma in text for comma in (", ", "，", "\n"))
        or len(words) + wide // 3 > TAG_WORDS
    )
