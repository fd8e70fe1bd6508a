"""Prompts for pictures during training: read a file of them, and list their text records as work.

A prompt is encoded like a caption, so a prompt that is also a caption of some source is not encoded again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import pyarrow as pa

from sana_pipe.base.errors import UserError
from sana_pipe.data.cache.encodings import CaptionEncoding
from sana_pipe.data.cache.prompts import TRIGGER_CONTEXTS, has_words
from sana_pipe.data.encoding.plan import text_work
from sana_pipe.data.sources import caption_rules
from sana_pipe.data.sources.filenames import error_text, short_repr
from sana_pipe.data.sources.remote import read_file

DEFAULT = "default"
PROMPTS = (
    "a red cube on a blue table",
    "a portrait of an elderly fisherman in morning light, photograph",
    "a street market at night in the rain, neon signs reflected on the pavement",
    "a watercolour of a lighthouse on a cliff above a stormy sea",
    "three green apples in a white bowl beside an open book",
)
"""The prompts that `DEFAULT` means: an attribute and a place, a face, a crowded scene, a style, a number."""
_PAGES = ("<!doctype", "<html", "<?xml")
"""The beginnings of pages that servers send instead of a file."""


@dataclass(frozen=True)
class PromptWork:
    """Prompts, and the records that they need.

    Attributes:
        texts: as written, each once.
        keys: of their records.
        work: rows of `plan.CAPTIONS`, with the null record.
    """

    texts: tuple[str, ...]
    keys: tuple[bytes, ...]
    work: pa.Table


def of_trigger(prefix: str) -> list[tuple[int, str]]:
    """Prompts with the trigger word of a data set in several contexts, numbered.

    Args:
        prefix: `data.caption_prefix`, such as `sks dog, `.
    """
    return list(enumerate((context.format(_word(prefix)) for context in TRIGGER_CONTEXTS), 1))


def with_trigger(lines: list[tuple[int, str]], prefix: str) -> tuple[list[tuple[int, str]], list[str]]:
    """Prompts, and those of `of_trigger` behind them if none has the trigger word; and notes that say so.

    Args:
        prefix: as of `of_trigger`; blank: there is no trigger word.
    """
    word = _word(prefix)
    if not word or any(has_words(text, word) for _, text in lines):
        return lines, []
    more = [(lines[-1][0] + number, text) for number, text in of_trigger(prefix)]
    note = (
        f"note: no prompt has the trigger word {word!r} (data.caption_prefix), so their pictures would not show what "
        f"is learned: {len(more)} prompts with it are added"
    )
    return [*lines, *more], [note]


def _word(prefix: str) -> str:
    return prefix.strip().rstrip(",;:. ")


def read(file: str, patience_s: float) -> list[tuple[int, str]]:
    """(number of the line, prompt) for every line of a UTF-8 file that is not blank and does not begin with `#`.
    Whitespace around a prompt is removed.

    Args:
        file: a path, a URL, or `DEFAULT`; `.json`: a list of prompts.
        patience_s: how long to wait for a server that does not answer.

    Raises:
        UserError: it cannot be read, is not UTF-8, is a web page, or has no prompt.
    """
    if file == DEFAULT:
        return list(enumerate(PROMPTS, 1))
    expected = "a text file in UTF-8 with a prompt on each line"
    try:
        text = read_file(file, patience_s).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(f"{file}: line {line} is not UTF-8", expected=expected) from None
    except (OSError, ValueError) as error:  # ValueError: no path at all
        raise UserError(
            f"{file}: cannot be read: {error_text(error)}", expected=expected, fix="--prompts default"
        ) from None
    if file.endswith(".json"):
        prompts = list(enumerate(_listed(file, text), 1))
    else:
        lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1)]
        prompts = [(number, line) for number, line in lines if line and not line.startswith("#")]
    if not prompts:
        raise UserError(
            f"{file}: contains no prompts",
            expected=f"{expected}; lines that begin with # are comments",
            fix="write some, or remove the file: captions of the pictures are drawn then",
        )
    if prompts[0][1].lower().startswith(_PAGES):
        raise UserError(
            f"{file}: is a web page, not a list of prompts",
            expected=expected,
            found=short_repr(prompts[0][1]),
            fix="use the link of the file itself (often called raw)",
        )
    for number, prompt in prompts:
        caption_rules.check_prompt(prompt, f"{file}: line {number}")
    return prompts


def _listed(file: str, text: str) -> list[str]:
    try:
        prompts = json.loads(text)
    except ValueError as error:
        raise UserError(f"{file}: is not JSON: {error}") from None
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        raise UserError(f"{file}: contains no prompts", expected="a JSON list of strings")
    return prompts


def of(lines: list[tuple[int, str]], encoding: CaptionEncoding) -> tuple[PromptWork, list[str]]:
    """The prompts of some lines, and a line of text about each that repeats an earlier prompt."""
    first: dict[bytes, tuple[int, str]] = {}
    repeated = []
    for number, text in lines:
        key = encoding.key(caption_rules.normalise(text, encoding.normalisation))
        if key in first:
            repeated.append(f"line {number} repeats the prompt of line {first[key][0]}: it is drawn once")
        else:
            first[key] = number, text
    texts = tuple(text for _, text in first.values())
    return PromptWork(texts, tuple(first), text_work([pa.array(texts, pa.string())], encoding)), repeated
