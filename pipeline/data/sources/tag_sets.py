"""Captions that are tag lists: shuffled variants with dropped tags, each a caption next to the original.

Trainers that run the text encoder shuffle and drop tags at every visit; with a cache the variants are made once, by the
scan, and encoded like other captions. A visit draws one of them or the original.
A variant depends on source, key, caption and its number alone, not on process, machine or Python's generator.
Price: each variant is a record of its own, so `shuffle: 4` takes up to five times the bytes of the text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from sana_pipe.data.cache.layout import digest
from sana_pipe.data.sources.config import TagsConfig

MAX_WORDS = 8
"""Words of a tag; a longer part between commas is a sentence's."""


_COMMAS, _SEMICOLONS = re.compile(r"[,，、]"), re.compile(r"(?<=\w)[;；]")  # not those of tags such as ;)
_ARTICLES = {"a", "an", "the"}
_SENTENCE_WORDS = {*_ARTICLES, "is", "are", "of", "on", "in", "at", "with", "and", "to", "by", "from"}


def tags_of(caption: str) -> list[str]:
    """The tags between commas (also full-width ones), between semicolons where there is no comma, in lines, or between
    spaces where words are joined by underscores (Danbooru's tag strings); [] of a caption that is no list: one tag, a
    part of more than `MAX_WORDS` words, several lines that are captions, or a full stop at the end."""
    lines = [line.strip() for line in caption.splitlines() if line.strip()]
    separator = _COMMAS if _COMMAS.search(caption) else _SEMICOLONS
    if not lines or lines[-1].endswith((".", "。")) or not _are_tags(lines, separator):
        return []
    parts = [tag for line in lines for part in separator.split(line) if (tag := part.strip())]
    tags = [tag for part in parts for tag in (part.split() if _is_tag_string(part) else [part])]
    return tags if len(tags) > 1 and max(len(tag.split()) for tag in tags) <= MAX_WORDS else []


def _are_tags(lines: list[str], separator: re.Pattern[str]) -> bool:
    """Return whether several lines are a tag each, or a list that goes on in the next line."""
    if all(separator.split(line)[-1] == "" for line in lines[:-1]):
        return True
    return not any(separator.search(line) for line in lines) and _ARTICLES.isdisjoint(" ".join(lines).lower().split())


def _is_tag_string(part: str) -> bool:
    """Return whether a part between commas is a list of tags between spaces."""
    return "_" in part and len(words := part.lower().split()) > 2 and _SENTENCE_WORDS.isdisjoint(words)


def joined(tags: Sequence[str]) -> str:
    """A caption of tags."""
    return ", ".join(tag for text in tags if (tag := text.strip().strip(",，").strip()))


def variants(caption: str, source: str, key: str, config: TagsConfig) -> list[str]:
    """The different variants of a caption, at most `config.shuffle`, without the caption itself.

    Args:
        source, key: of the picture.
    """
    tags = tags_of(caption)
    fixed, rest = tags[: config.keep], tags[config.keep :]

    def variant(number: int) -> str:
        drawn = [digest("tags", source, key, caption, str(number), str(place)) for place in range(len(rest))]
        order = sorted(range(len(rest)), key=drawn.__getitem__)
        stay = [place for place in order if _uniform(drawn[place]) >= config.drop]
        return ", ".join([*fixed, *(rest[place] for place in stay or (order[:1] if not fixed else []))])

    made = dict.fromkeys(variant(number) for number in range(config.shuffle if rest else 0))
    return [text for text in made if text != ", ".join(tags)]


def _uniform(value: bytes) -> float:
    """A number in [0, 1) from the last eight of a digest's 16 bytes; the order is by the first ones."""
    return int.from_bytes(value[8:], "little") / 2**64
