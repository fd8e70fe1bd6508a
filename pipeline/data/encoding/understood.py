"""The reading of a source: captions, masks, control pictures, in a few lines for people, for `init` and `encode`.

Law: nothing that could be a caption, a mask, a control picture or a trigger word is silently taken for something else
or ignored. `Understood.lines` say what was taken for what, with a caption as the model reads it, and what else a name
may mean; `encoding.refusals` refuses what is likely something else.
Price: captions are looked at in a sample of `SHOWN`, names as `sources.name_patterns` does.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from sana_pipe.base.config import setting
from sana_pipe.base.errors import escaped
from sana_pipe.data.cache.arrow import batches, spread_rows
from sana_pipe.data.cache.prompts import has_words
from sana_pipe.data.cache.scan_table import ABSENT, places
from sana_pipe.data.encoding import remarks
from sana_pipe.data.encoding.caption_commands import placing
from sana_pipe.data.encoding.default_captions import has_caption, made_of
from sana_pipe.data.encoding.picture_commands import commands, option, renaming, settings_of
from sana_pipe.data.sources import caption_rules, caption_signs, name_patterns, unread_lists
from sana_pipe.data.sources.caption_columns import TEXT_FILE, CaptionRule, text_columns
from sana_pipe.data.sources.caption_signs import Sign
from sana_pipe.data.sources.config import DataConfig
from sana_pipe.data.sources.filenames import shortened
from sana_pipe.data.sources.filesystem import Unreadable
from sana_pipe.data.sources.name_patterns import CONTROL, MASK, REJECTED, Pattern
from sana_pipe.data.sources.reject_kinds import examples
from sana_pipe.data.sources.sidecars import MAX_CAPTION_BYTES, read_sidecar
from sana_pipe.data.sources.source import Source
from sana_pipe.data.sources.unread_lists import UnreadList

SHOWN = 256
"""Captions of a source that are looked at."""
LENGTH = 160
"""Characters of a caption that are printed."""

_OF_FILES = {"image", "images", "file", "path", "mask", "masks", "control", "conditioning", "canny", "depth"}
"""Words in the names of columns that hold pictures, where only their names are known."""


@dataclass(frozen=True)
class Understood:
    """The reading of a scan: what its files, captions, control pictures and masks were taken for.

    Attributes:
        usable: pictures. captioned: those with a caption of their own, usable or not.
        origins: where captions were read from, as far as this scan read any.
        captions: some of them, as the scan has them, with their items; those of pictures with a caption of their own.
        controls_and_masks: usable pictures with a control picture or mask, by kind. lacking: those without one.
        patterns: what names say of pictures without a caption. regularisation: folders of such pictures.
        loose: files that read as captions of pictures without one, and are not used.
        lists: files that name pictures without a caption, and are not used.
        notes: what else should be looked at, for people. signs: of other meanings, in the captions of the scan.
    """

    source: Source
    data: DataConfig
    usable: int
    captioned: int
    origins: tuple[str, ...]
    captions: tuple[tuple[str, str], ...]
    controls_and_masks: dict[str, int]
    lacking: dict[str, int]
    patterns: tuple[Pattern, ...]
    regularisation: tuple[Pattern, ...]
    loose: tuple[Pattern, ...]
    lists: tuple[UnreadList, ...]
    notes: tuple[str, ...]
    signs: tuple[Sign, ...]

    def lines(self, data: DataConfig, normalisation: str) -> list[str]:
        """Describe it for people. data: the settings that the captions will be made with; normalisation: of the text
        encoding."""
        return [*self.summary(data, normalisation), *self.remarks(data)]

    def summary(self, data: DataConfig, normalisation: str) -> list[str]:
        """Return what was taken for what."""
        pictures = [f"{kind} pictures: {count} of {self.usable}" for kind, count in self.controls_and_masks.items()]
        return [*self._captions(data, normalisation), *pictures]

    def remarks(self, data: DataConfig) -> list[str]:
        """Say what was not used, and may be meant. data: the settings that the captions will be made with."""
        patterns = [_said(each, self.source) for each in self.patterns]
        lists = [f"{escaped(each.file)} names pictures without a caption and is not used" for each in self.lists]
        signs = [*self._twice(data), *caption_signs.said(self.signs, data)]
        return [*patterns, *map(_said_loose, self.loose), *lists, *self.notes, *signs]

    def _twice(self, data: DataConfig) -> Iterator[str]:
        """Captions that have the trigger word already."""
        word, before = data.caption_prefix.strip().rstrip(",;:. "), self.data.caption_prefix
        texts = [text.removeprefix(before) for _, text in self.captions if text.startswith(before)]
        if word and (twice := [text for text in texts if has_words(text, word)]):
            yield (
                f"captions: {len(twice)} of {len(texts)} that were checked already have {escaped(word)!r} and get it "
                f"twice: {escaped(shortened(twice[0], LENGTH))!r} "
                f"({setting('data.caption_prefix', '')} if all have it)"
            )

    @property
    def remedy(self) -> str | None:
        """Say what a user can do where pictures without a caption are too many; None: their names say nothing."""
        if self.data.caption is not None:
            return None
        lines = [placing(self.source, each) for each in self.loose]
        lines += commands(self.patterns, self.source, lambda settings: " ".join(map(option, settings)))
        return "; ".join(lines) or None

    def _captions(self, data: DataConfig, normalisation: str) -> list[str]:
        lacking = self.usable - self.captioned
        origin = f" ({' and '.join(self.origins)})" if self.origins else ""
        what = f"captions: {self.captioned} of {self.usable} pictures{origin}"
        if lacking > 0 and data.caption is not None:
            what += f"; the other {lacking} get " + setting("data.caption", data.caption).removeprefix("--set ")
        elif lacking > 0:
            what += f"; the other {lacking} are left out"
        lines = [what]
        if self.captions:
            item, text = self.captions[0]
            if data != self.data:
                text = made_of(data, text, item, self.source.name)
            seen = escaped(shortened(caption_rules.normalise(text, normalisation), LENGTH))
            lines.append(f"  as the model reads one: {seen!r} ({escaped(item)})")
        elif lacking > 0 and data.caption is not None and data.caption not in ("none", "filename", "folder"):
            text = caption_rules.normalise(made_of(data, "", "", self.source.name), normalisation)
            lines.append(f"  as the model reads it: {escaped(shortened(text, LENGTH))!r}")
        return lines


def of(source: Source, scan: pa.Table, data: DataConfig, is_chosen: bool | None = None) -> Understood:
    """Return what a scan was taken for.

    Args:
        data: the settings that it was made with.
        is_chosen: whether the user named the column of the captions; None: if it is not the default one.
    """
    usable = pc.is_null(scan.column("reject"))
    with_caption = has_caption(scan, data, source.name)
    items, both = scan.column("item"), pc.and_(usable, with_caption)
    some = spread_rows(scan.select(["item", "captions", "meta"]), both, SHOWN).to_pylist()
    is_chosen = not source.rule.is_default if is_chosen is None else is_chosen
    columns = {} if is_chosen else remarks.other_columns(source.rule, some)
    others = [*remarks.said(source.rule, columns), *remarks.unnamed(source, scan)]
    others += [*remarks.several_pictures(source, scan), *remarks.more_members(source)]
    captions = tuple((row["item"], row["captions"][0]["text"]) for row in some)
    by_name = source.paired_by & {"suffix", "folder"}
    patterns = name_patterns.controls_and_masks(items, with_caption) if by_name else []
    loose = [each for each in name_patterns.captions(source.loose, items, with_caption) if _reads(source, each.example)]
    files = list[str]()
    if "suffix" in source.paired_by:  # of tables, what is ignored are rows
        ignored = (file for some in source.ignored.examples.values() for file in some)
        rejected = _names(scan, pc.invert(usable))
        files = unread_lists.candidates(ignored, rejected)
    bare = _names(scan, pc.and_(usable, pc.invert(with_caption))) if files else []
    lists = unread_lists.naming(source.read_next_to, files, bare) if bare else ()
    labelled = bool(data.caption_prefix.strip()) or data.caption is not None
    number, controls_and_masks = _true(usable), _controls_and_masks(scan, data)
    return Understood(
        source,
        data,
        number,
        _true(both),
        _origins(source.rule, columns),
        captions,
        controls_and_masks,
        {kind: number - count for kind, count in controls_and_masks.items()},
        tuple(pattern for pattern in patterns if not _is_used(pattern, data)),
        tuple(name_patterns.regularisation(items)) if by_name and labelled else (),
        tuple(loose),
        tuple(lists),
        (*_notes(source, data, number, _true(both)), *others, *caption_signs.without_variants(scan, data)),
        tuple(caption_signs.signs(scan)),
    )


def _reads(source: Source, file: str) -> bool:
    """Tell whether a file reads as a caption: text of more words than numbers, or a JSON object with such a column."""
    with suppress(Unreadable):
        content = read_sidecar(file, source.read_next_to(file, MAX_CAPTION_BYTES))
        if isinstance(content, dict):
            return bool(source.rule.columns) and (
                source.rule.has_caption_column(content) or bool(text_columns(content))
            )
        words = content.split() if isinstance(content, str) else []
        return 2 * sum(any(map(str.isalpha, word)) for word in words) > len(words) and not words[0].startswith("<")
    return False


def _said(pattern: Pattern, source: Source) -> str:
    kinds = {MASK: "masks", CONTROL: "control pictures", REJECTED: "rejected pictures of preference pairs"}
    what = kinds.get(pattern.kind, "masks or control pictures")
    ways = " or ".join(map(option, settings_of(pattern)))
    if pattern.pair is not None:
        ways = f"{renaming(pattern, source)}, then {ways}"
    return (
        f"{pattern.count} pictures without a caption look like {what} and are not used as such: "
        f"{escaped(pattern.example)} of {escaped(pattern.of)} ({ways})"
    )


def _said_loose(pattern: Pattern) -> str:
    return (
        f"{pattern.count} files that look like captions of pictures without one are not used: "
        f"{escaped(pattern.example)} of {escaped(pattern.of)}"
    )


def _is_used(pattern: Pattern, data: DataConfig) -> bool:
    return any(each is not None and getattr(each, pattern.way, None) == pattern.value for _, each in data.pictures)


def _origins(rule: CaptionRule, unused: Collection[str]) -> tuple[str, ...]:
    columns = [column for column in (*rule.columns, *rule.fallback) if column in rule.seen and column not in unused]
    files = ["text files"] if TEXT_FILE in rule.seen else []
    return (*files, *(f"column {escaped(column)!r}" for column in dict.fromkeys(columns)))


def _names(scan: pa.Table, where: pa.ChunkedArray) -> list[str]:
    """Some of the items where `where` is true."""
    return spread_rows(scan.select(["item"]), where, SHOWN).column("item").to_pylist()


def _controls_and_masks(scan: pa.Table, data: DataConfig) -> dict[str, int]:
    counts = {kind: 0 for kind, each in data.pictures if each is not None and "made" not in each.ways}
    for batch in batches(scan.select(["pictures", "reject"])) if counts else ():
        usable = batch.filter(pc.is_null(batch.column("reject")))
        for kind in counts:
            digests = places(usable, kind).column("digest")
            here = pc.and_(pc.is_valid(digests), pc.not_equal(digests, pa.scalar(ABSENT, pa.binary(16))))
            counts[kind] += _true(here)
    return counts


def _notes(source: Source, data: DataConfig, usable: int, captioned: int) -> Iterator[str]:
    for what, count in source.shared.counts.items():
        yield f"{count} times a {what}: {examples(source.shared.examples[what], count)}"
    rule, taken = source.rule, {each.column for _, each in data.pictures if each is not None}
    named = {
        c for c in rule.seen if name_patterns.kind_of(c) and not _OF_FILES.isdisjoint(re.findall("[a-z]+", c.lower()))
    }
    for column in sorted({*source.unused_columns, *named} - taken - {*rule.columns}):
        kinds = [kind] if (kind := name_patterns.kind_of(column)) else [CONTROL, MASK]
        ways = " or ".join(setting(f"data.pictures.{kind}.column", column) for kind in kinds)
        yield f"the column {escaped(column)!r} of pictures is not used ({ways})"
    if usable and not captioned:
        rest = sorted(rule.seen - {*rule.columns, TEXT_FILE})
        likely = rule.likely(rest) if rest else None
        if likely is not None:
            names = ", ".join(map(repr, map(escaped, rest[:10])))
            yield f"no picture has a caption; other columns: {names} ({setting('data.caption_field', likely)})"
        for kind, count in source.ignored.counts.items():
            if "file without a picture" in kind:
                shown = examples(source.ignored.examples[kind], count)
                yield f"no picture has a caption, but the source has {count} times a {kind}: {shown}"


def _true(values: pa.ChunkedArray) -> int:
    return pc.sum(values).as_py() or 0
