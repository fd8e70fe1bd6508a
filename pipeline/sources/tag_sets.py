"""Captions that are tag lists: shuffled variants with dropped tags, each a caption beside the original.

Trainers that run the text encoder shuffle and drop tags at every visit; with a cache the variants are made once, by the
scan, and encoded like other captions. A visit draws one of them or the original.
A variant depends on source, key, caption and its number alone, not on process, machine or Python's generator.
Price: each variant is a record of its own, so `shuffle: 4` takes up to five times the bytes of the text.
"""

from __future__ import annotations

from pipeline.cache.layout import digest
from pipeline.config import TagsConfig

MAX_WORDS = 8
"""Words of a tag; a longer part between commas is a sentence's."""


def tags_of(caption: str) -> list[str]:
    """The tags between commas; [] of a caption that is no list: one tag, a part of more than `MAX_WORDS` words, or a
    full stop at the end."""
    tags = [tag for part in caption.split(",") if (tag := part.strip())]
    is_list = (
        len(tags) > 1 and max(len(tag.split()) for tag in tags) <= MAX_WORDS and not caption.rstrip().endswith(".")
    )
    return tags if is_list else []


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
