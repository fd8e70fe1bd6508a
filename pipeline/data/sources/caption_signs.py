"""Find what captions hold that the model would read as words, though other trainers mean something else by it: places
for the trigger word, choices, and several lines. Counted over a scan.

Price: captions are searched in batches, by Arrow; those without any of `_MARKS` cost a search for five bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from sana_pipe.base.errors import escaped
from sana_pipe.data.cache.arrow import batches
from sana_pipe.data.cache.prompts import TRIGGER_PLACE
from sana_pipe.data.sources import caption_rules
from sana_pipe.data.sources.config import DataConfig
from sana_pipe.data.sources.filenames import shortened
from sana_pipe.data.sources.tag_sets import tags_of

_MARKS = (b"[", b"<", b"{", b"|", b"\n")
"""Bytes of which each sign has one."""

PLACEHOLDER = r"(?i)[\[{<](?:name|token|filewords|placeholder|concept|instance)[\]}>]"
SEPARATOR = r"\|\|\|"
CHOICE = r"\{[^{}|]*\|[^{}]*\}"
PARAMETERS = r"(?m)^(?:Negative prompt:|Steps: \d+, )"
LINES = r"\n"

_LOOKED_AT = 1000
"""Captions that are looked at to find out whether any is a list of tags."""


@dataclass(frozen=True)
class Sign:
    """Something in captions. pattern: one of those above. count: pictures; item, text: the first of them, with its
    caption; match: as it stands there."""

    pattern: str
    count: int
    item: str
    text: str
    match: str


_MEANING = {
    TRIGGER_PLACE: "{match} in a caption, which is read as written; other trainers put the trigger word there, as "
    "init --trigger 'WORD' and --set data.caption_prefix='WORD, ' do",
    PLACEHOLDER: "{match} in a caption, which is read as written; other trainers put the trigger word there: write the "
    "word in its place",
    SEPARATOR: "{match} in a caption, which is read as written; in kohya's trainer it ends the tags that stay in "
    "place: remove it, and give their number as data.tags.keep",
    CHOICE: "{match} in a caption, which is read as written; other trainers draw one of the words: write several "
    "captions",
    PARAMETERS: "{match} in a caption, which is read as written, with all that follows; AUTOMATIC1111's web UI "
    "writes it after the prompt: remove both, as sed -i '/^Negative prompt:/,$d; /^Steps: /,$d' *.txt does",
    LINES: "a caption of several lines, read as one; --set data.caption_parts=captions if each line is a caption, "
    "--set data.caption_parts=tags if each line is a tag",
}


def signs(table: pa.Table) -> list[Sign]:
    """The signs in the captions of a scan's usable pictures (columns `item`, `captions`, `reject`)."""
    counts, first = dict.fromkeys(_MEANING, 0), dict[str, tuple[str, str, str]]()
    for items, owners, texts in _captions(table):
        data = texts.buffers()[2]
        data = b"" if data is None else data.to_pybytes()
        if not any(mark in data for mark in _MARKS):
            continue
        for pattern in _MEANING:
            has = pc.match_substring_regex(texts, pattern)
            if pattern == LINES:
                has = pc.and_(has, pc.invert(pc.match_substring_regex(texts, PARAMETERS)))
            owned = pc.unique(owners.filter(has))
            if not len(owned):
                continue
            counts[pattern] += len(owned)
            if pattern not in first:
                text = texts.filter(has)[0].as_py()
                match = pc.extract_regex(texts.filter(has).slice(0, 1), f"(?P<match>{pattern})")[0].as_py()["match"]
                first[pattern] = items[owned[0].as_py()].as_py(), text, match
    return [Sign(pattern, counts[pattern], *example) for pattern, example in first.items()]


def said(found: Iterable[Sign], config: DataConfig) -> list[str]:
    """`signs` for people. config: with which the captions are made."""
    lines = []
    for sign in found:
        meaning = _MEANING[sign.pattern].format(match=repr(escaped(sign.match)))
        if sign.pattern == TRIGGER_PLACE and config.caption_prefix.strip():
            meaning = f"{escaped(sign.match)!r} in a caption: the words of data.caption_prefix take its place"
        lines.append(f"captions: {sign.count} pictures have {meaning} ({_shown(sign)})")
    return lines


def without_variants(table: pa.Table, config: DataConfig) -> list[str]:
    """Say how many pictures get no variant by `data.tags`, as they have a single caption, or that none does."""
    if config.tags is None:
        return []
    pictures, alone, example, looked = 0, 0, "", list[str]()
    for items, captions in _usable(table):
        lengths = pc.list_value_length(captions)
        single = pc.equal(lengths, 1)
        if not example and (here := items.filter(single)):
            example = f"{escaped(here[0].as_py())}: {_text(captions.filter(single)[0].as_py()[0]['text'])}"
        pictures, alone = pictures + len(items), alone + (pc.sum(single).as_py() or 0)
        several = captions.filter(pc.greater(lengths, 1)).slice(0, _LOOKED_AT - len(looked))
        looked += [each["text"] for row in several.to_pylist() for each in row]
    before = config.caption_prefix
    if pictures and not any(tags_of(text.removeprefix(before)) for text in looked):
        found = f" ({example})" if example else ""
        return [f"captions: data.tags makes no variant: no caption is a list of tags with commas between them{found}"]
    return [f"captions: {alone} of {pictures} pictures get no variant by data.tags ({example})"] if alone else []


def emptied(table: pa.Table, normalisation: str) -> list[str]:
    """Say how many usable pictures of a scan have a caption that PRX's cleaning empties (an address, Chinese alone),
    and name the first. Other normalisations empty none but blank captions."""
    if normalisation != "prx":
        return []
    count, example = 0, ""
    for items, owners, texts in _captions(table):
        empty = pc.equal(caption_rules.normalise_all(texts, normalisation), "")
        empty = pc.and_(empty, pc.not_equal(pc.utf8_trim_whitespace(texts), ""))
        owned = pc.unique(owners.filter(empty))
        if len(owned) and not count:
            example = f"{escaped(items[owned[0].as_py()].as_py())}: {_text(texts.filter(empty)[0].as_py())}"
        count += len(owned)
    if not count:
        return []
    return [
        f"captions: {count} pictures have a caption of which PRX's cleaning leaves nothing, which is encoded as the "
        f"empty caption ({example})"
    ]


def _shown(sign: Sign) -> str:
    return f"{escaped(sign.item)}: {_text(sign.text)}"


def _text(text: str) -> str:
    return repr(escaped(shortened(text.replace("\n", " / "), 80)))


def _captions(table: pa.Table) -> Iterator[tuple[pa.Array, pa.Array, pa.Array]]:
    """Yield, for each batch of a scan, the usable items, and for each caption the position of its item, and its
    text."""
    for items, captions in _usable(table):
        yield items, pc.list_parent_indices(captions), pc.struct_field(pc.list_flatten(captions), "text")


def _usable(table: pa.Table) -> Iterator[tuple[pa.Array, pa.Array]]:
    """Yield, for each batch of a scan, the usable items and their captions."""
    for batch in batches(table.select(["item", "captions", "reject"])):
        usable = batch.filter(pc.is_null(batch.column("reject"))).combine_chunks()
        if len(usable):
            yield usable.column("item").chunk(0), usable.column("captions").chunk(0)
