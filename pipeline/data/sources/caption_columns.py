"""The caption rule: from columns of a row to weighted caption candidates.

Data sets have several captions per picture (short, long, of different captioners). Choosing one per visit is worth more
than choosing one for good, so a cache holds all of them. The weight of a column is its share (Sana's `proportion`),
which the entries of a list share. Candidates with scores (Sana's `clipscore`) of at least `SCORE_THRESHOLD` are
drawn in proportion to weight * score ** `SCORE_POWER`; if all are lower, the best alone. One without a score is never
drawn next to scored ones. What is never drawn is not encoded, and counted.
"""

from __future__ import annotations

import difflib
import math
import posixpath
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

from sana_pipe.base.config import setting
from sana_pipe.base.errors import UserError
from sana_pipe.data.cache.layout import canonical
from sana_pipe.data.cache.prompts import with_prefix
from sana_pipe.data.sources.config import DataConfig
from sana_pipe.data.sources.filenames import REPEATS, escaped, short_repr, stem
from sana_pipe.data.sources.tag_sets import joined, variants
from sana_pipe.data.sources.text_parts import CAPTIONS, TAGS, lines_of, parts_of, unpacked

MAX_COLUMNS = 1000
"""Limit on the columns that are remembered; a source with more has rows with arbitrary keys, not columns."""

DEPTH = 3
"""Objects within objects of a row whose columns are named."""

SHOWN = 10
"""Columns of a row that a message names."""

CAPTION_WORDS = (
    "caption",
    "text",
    "prompt",
    "descri",
    "tags",
    "tag_string",
    "alt",
    "sentences",
    "content",
    "title",
    "label",
)
"""Parts of the names of caption columns, the best first."""

_NO_CAPTION = re.compile(
    r"(?i)(?:^|[^a-z])neg(?:ative)?(?:[^a-z]|$|prompt)|(?:^|\.)(?:artist|author|channel|owner|uploader|user)s?\."
)
"""Columns that hold something else, though their names have such words: negative prompts, and texts about people."""

_SURE = ("caption", "captions", "text", "texts", "prompt", "prompts", "description", "sentences", "tag", "tags")
"""Words in the names of columns that hold captions and nothing else."""

_TURNS = {"from", "role"}
"""Columns of the objects of a conversation, of which questions are a part."""

SCORE_THRESHOLD = 25.0
"""Captions with a lower score are not drawn; if all scores are lower, the best caption is (Sana's `clip_thr`)."""

SCORE_POWER = 10.0
"""Captions are drawn in proportion to their score to this power (one over Sana's `clip_thr_temperature`)."""

TEXT_FILE = "txt"
"""The name, in a list of columns, of the text file next to a picture or the .txt member of a tar."""


@dataclass(frozen=True)
class CaptionCandidate:
    """A caption of a picture. score: None if it has none."""

    text: str
    weight: float = 1.0
    score: float | None = None


@dataclass
class PictureCaptions:
    """The captions that files and rows give a picture.

    problems: captions that cannot be used: (file, line or "", reason).
    meta: the other columns; of several values of a column the first counts.
    hidden: a column with a caption that the rule does not read, where a default caption would take its place.
    is_lost: whether a caption file, or a caption column, holds what cannot be read, so that a default caption would
        take the place of what was meant.
    """

    candidates: list[CaptionCandidate] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)
    hidden: str | None = None
    is_lost: bool = False

    def add(self, other: PictureCaptions) -> None:
        self.candidates += other.candidates
        self.problems += other.problems
        self.hidden, self.is_lost = self.hidden or other.hidden, self.is_lost or other.is_lost
        for column, value in other.meta.items():
            self.meta.setdefault(column, value)


_DECISIVE = (
    *("caption_field", "caption_weights", "caption_scores"),
    *("caption", "caption_prefix", "caption_parts", "tags"),
)
"""Options of `data` that decide the captions."""


@dataclass(frozen=True)
class CaptionRule:
    """See the module.

    config: the options. A column `a+b` is one caption: the values of both columns, joined with a comma.
    raw: use captions of columns unchanged, and null as the empty caption.
    fallback: for a row without any of `fields`, the first of these columns that is not empty is used.
    seen: columns of the rows read so far (at most `MAX_COLUMNS`), and `txt`.
    offered: columns of captions that rows have in place of `fields`, and of which a default caption would take the
        place; of tables that were refused also columns that likely hold captions.
    """

    config: DataConfig = field(default_factory=DataConfig)
    raw: bool = False
    fallback: tuple[str, ...] = ()
    seen: set[str] = field(default_factory=set, compare=False, repr=False)
    offered: set[str] = field(default_factory=set, compare=False, repr=False)

    @classmethod
    def column(cls, name: str) -> CaptionRule:
        return cls(DataConfig(caption_field=name))

    @property
    def listed(self) -> bool:
        """Return whether the user listed `fields`; then text files are used only if `txt` is one of them."""
        return bool(self.config.caption_weights)

    @cached_property
    def fields(self) -> tuple[tuple[str, float], ...]:
        """(column, weight)."""
        return tuple(sorted(self.config.caption_weights.items())) or ((self.config.caption_field, 1.0),)

    @property
    def is_default(self) -> bool:
        """Return whether the user named no column."""
        return self.fields == ((DataConfig.model_fields["caption_field"].default, 1.0),) and not self.listed

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """The caption columns of tables and JSON objects, without `txt`; of joined columns also the single ones."""
        fields = [column for column, _ in self.fields if not (self.listed and column == TEXT_FILE)]
        return tuple(dict.fromkeys(name for field in fields for name in (field, *_parts(field))))

    @property
    def setting(self) -> str:
        """The setting that names the columns, for messages."""
        return "data.caption_weights" if self.listed else "data.caption_field"

    @property
    def text_weight(self) -> float | None:
        """Weight of the text file next to a picture; None if text files are not used."""
        return dict(self.fields).get(TEXT_FILE) if self.listed else 1.0

    def identity(self) -> str:
        """Equal for rules that read the same candidates from the same row."""
        options = {name: repr(getattr(self.config, name)) for name in _DECISIVE}
        places = ["places"] * bool(self.config.caption_prefix.strip())  # filled with the prefix: not in older listings
        return canonical([options, self.raw, list(self.fallback), *places]).decode()

    def check_seen(self) -> None:
        """Check the columns that the user named after the whole source has been listed.

        Raises:
            UserError: such a column was in no row.
        """
        fields = [] if self.is_default else [field for field, _ in self.fields if field not in self.seen]
        if self.config.caption is not None:  # text files alone count, and there is none
            fields = [field for field in fields if field != TEXT_FILE]
        listed = [(self.setting, column) for field in fields for column in _parts(field)]
        listed += [("data.caption_scores", column) for column in self.config.caption_scores.values()]
        for option, column in listed:
            if not has_column(self.seen, column) and len(self.seen) < MAX_COLUMNS:
                near = difflib.get_close_matches(column, self.seen, n=1, cutoff=0.5)
                raise UserError(
                    f"{option} names the column {column!r}, which no item has",
                    expected=", ".join(sorted(self.seen)) or "a column of the source; it has none",
                    fix=f"did you mean {near[0]!r}?" if near else f"leave it out of {option}",
                )

    def text_file(self, text: str, scores: dict[str, Any] | None = None) -> list[CaptionCandidate]:
        """The candidates from the text file next to a picture. scores: by column; NVlabs call this caption `prompt`."""
        self.seen.add(TEXT_FILE)
        score = (scores or {}).get(TEXT_FILE, (scores or {}).get("prompt"))
        texts, weight = self._lines(text), self.text_weight or 1.0
        return [CaptionCandidate(each, weight / len(texts), _number(score)) for each in texts]

    def _lines(self, text: str) -> list[str]:
        """The captions in a text."""
        if self.raw or self.config.caption_parts == "auto" or len(lines := lines_of(text)) < 2:
            return [text]
        return lines if self.config.caption_parts == CAPTIONS else [joined(lines)]

    def likely(self, columns: Iterable[str]) -> str | None:
        """The column of a table without any of `fields` that most likely holds its captions."""
        columns = [column for column in columns if not _NO_CAPTION.search(column)]
        matches = (min((c for c in columns if word in c.lower()), key=len, default=None) for word in CAPTION_WORDS)
        return next(filter(None, matches), next(iter(columns), None))

    def hides(self, columns: Iterable[str]) -> str | None:
        """The column of captions that a default caption would take the place of, unless the user named a column."""
        if self.config.caption is None or not self.is_default:
            return None
        sure = sure_columns(columns)
        return self.likely(sure) if sure else None

    def lacks_captions(self, columns: Collection[str]) -> bool:
        """Return whether a table with these columns cannot have any caption, or a default caption would hide those it
        has."""
        usable = {*self.columns, *self.fallback}
        lacks = bool(self.columns) and not any(has_column(columns, c) for c in usable)
        return lacks and (self.config.caption is None or self.hides(columns) is not None)

    def has_caption_column(self, row: dict[str, Any]) -> bool:
        """Return whether a row has any of the caption columns."""
        return any(has_column(row, column) for column in (*self.columns, *self.fallback))

    def read(self, row: dict[str, Any], scores: dict[str, Any] | None = None, where: str = "") -> PictureCaptions:
        """Return what a row says.

        Args:
            scores: by column, from another file; they take precedence over those of the row.
            where: the row is, for its problems.
        """
        captions = PictureCaptions(meta={name: value for name, value in row.items() if name not in self.columns})
        problems = list[str]()
        if len(self.seen) < MAX_COLUMNS:
            self.seen.update(columns_of(row) if any(map(_is_nested, row.values())) else row)
        fields = [(column, weight) for column, weight in self.fields if column in self.columns]
        present = [
            (f, weight) for f, weight in fields if f in row or value_of(row, f) is not _ABSENT or _has_part(row, f)
        ]
        if not present:
            present = sorted(((c, 1.0) for c in self.fallback if c in row), key=lambda field: not row[field[0]])[:1]
        for column, weight in present:
            captions.candidates += self._read_column(row, column, weight, scores or {}, problems)
        captions.is_lost = bool(problems) and not captions.candidates
        if not captions.candidates and not problems:
            captions.hidden = self.hides(c for c in columns_of(row) if _has_text(value_of(row, c)))
        if not captions.candidates and not problems and self.config.caption is None:
            problems = [f"has an empty {column!r}" for column, _ in present] or [self.lacking(row)]
        captions.problems = [(where, problem) for problem in problems]
        return captions

    def lacking(self, row: dict[str, Any]) -> str:
        """Say what a row without a caption column has instead, and the setting that would take one of its texts."""
        missing = [column for column, _ in self.fields if column in self.columns]
        names = list(islice(columns_of(row), SHOWN + 1))
        has = ", ".join([repr(escaped(column)) for column in names[:SHOWN]] + ["..."] * (len(names) > SHOWN))
        advice = f" ({advice})" if (advice := self.advice(row)) else ""
        return f"has no {' or '.join(map(repr, missing or ['caption column']))}{has and f', only {has}'}{advice}"

    def advice(self, row: dict[str, Any]) -> str | None:
        """The setting that takes captions from the most likely column of a row; None: it has no text."""
        texts = (column for column in columns_of(row) if _has_text(value_of(row, column)))
        likely = None if self.listed else self.likely(texts)
        return likely and setting("data.caption_field", likely)

    def _read_column(
        self, row: dict[str, Any], column: str, weight: float, scores: dict[str, float], problems: list[str]
    ) -> list[CaptionCandidate]:
        value = row[column] if column in row else value_of(row, column)
        as_it_is = self.raw or (
            type(value) is str and self.config.caption_parts == "auto" and value.lstrip()[:1] != "["
        )
        value = value if as_it_is else unpacked(value)
        given = scores.get(column)
        if given is None:
            given = row.get(self.config.caption_scores.get(column, ""))
        values = value if isinstance(value, list) else [value]
        if value is _ABSENT:
            values = [_joined(row, column)]
        elif not as_it_is and not isinstance(given, list):
            try:
                values = self._parts_of(column, values, is_list=isinstance(value, list))
            except ValueError as error:
                problems.append(str(error))
                return []
        numbers = given if isinstance(given, list) else [given] * len(values)
        if len(numbers) != len(values):
            problems.append(f"has {len(numbers)} scores for {len(values)} captions in {column!r}; they are not used")
            numbers = [None] * len(values)
        texts: list[CaptionCandidate] = []
        for text, number in zip(values, numbers, strict=True):
            if self.raw and text is None:
                text = ""
            elif text is None or (isinstance(text, str) and not text.strip() and not self.raw):
                continue
            if not isinstance(text, str):
                what = "an object" if isinstance(text, dict) else short_repr(text)
                way = self.advice({column: text}) if isinstance(text, dict) else None
                problem = f"has {what} for {column!r}, which is not text" + (f" ({way})" if way else "")
                problems += [problem] if problem not in problems else []
                continue
            score = _number(number)
            if number is not None and score is None:
                problems.append(f"has the score {short_repr(number)} for {column!r}, which is not a number")
            texts.append(CaptionCandidate(text if self.raw else text.strip(), weight, score))
        return [CaptionCandidate(text.text, text.weight / len(texts), text.score) for text in texts]

    def _parts_of(self, column: str, values: list[Any], *, is_list: bool) -> list[Any]:
        """The captions in the text, or the list, of a column.

        Raises:
            ValueError: a list may be tags or captions; the message names the settings.
        """
        texts = [value for value in values if isinstance(value, str) and value.strip()]
        if not is_list:
            return self._lines(texts[0].strip()) if texts else values
        if len(texts) < 2 or len(texts) < sum(value is not None and value != "" for value in values):
            return values
        parts = self.config.caption_parts
        meant = parts_of(column, texts) if parts == "auto" else parts
        if meant is None:
            ways = " or ".join(setting("data.caption_parts", way) for way in (CAPTIONS, TAGS))
            raise ValueError(f"has a list in {column!r} that may be captions or tags: {short_repr(texts)} ({ways})")
        return texts if meant == CAPTIONS else [joined(texts)]

    def weigh(
        self, candidates: list[CaptionCandidate], key: str, source: str
    ) -> tuple[tuple[tuple[str, float], ...], int]:
        """Weighted captions, each text once, in the order of the candidates.

        Args:
            key, source: of the picture, for the default caption.

        Returns:
            (text, weight) with weights above zero; and the number of texts that are never drawn.
        """
        if not candidates and self.config.caption is not None:
            candidates = [CaptionCandidate(self._default(key, source))]
        weights: dict[str, float] = {}
        for candidate, weight in zip(candidates, self._scored_weights(candidates), strict=True):
            if weight > 0:
                weights[candidate.text] = max(weight, weights.get(candidate.text, 0.0))
        drawn = self._with_variants(weights, key, source) if self.config.tags else weights
        captions = dict[str, float]()  # texts that are equal once a place has the trigger word count as any equal texts
        for text, weight in drawn.items():
            made = with_prefix(text, self.config.caption_prefix)
            captions[made] = max(weight, captions.get(made, 0.0))
        return tuple(captions.items()), len({candidate.text for candidate in candidates} - set(weights))

    def _with_variants(self, weights: dict[str, float], key: str, source: str) -> dict[str, float]:
        """Texts and the variants of tag lists among them, which share a list's weight evenly with it."""
        assert self.config.tags is not None
        drawn: dict[str, float] = {}
        for caption, weight in weights.items():
            texts = [caption, *variants(caption, source, key, self.config.tags)]
            for text in texts:
                drawn[text] = drawn.get(text, 0.0) + weight / len(texts)
        return drawn

    def _scored_weights(self, candidates: list[CaptionCandidate]) -> list[float]:
        """The weight of each candidate by the rules in the module."""
        scores = [candidate.score for candidate in candidates if candidate.score is not None]
        if not scores:
            return [candidate.weight for candidate in candidates]
        best = max(scores)
        if best < SCORE_THRESHOLD:  # the best alone; the first of equals
            first = next(i for i, candidate in enumerate(candidates) if candidate.score == best)
            return [candidate.weight if i == first else 0.0 for i, candidate in enumerate(candidates)]

        def weight(candidate: CaptionCandidate) -> float:
            if candidate.score is None or candidate.score < SCORE_THRESHOLD:
                return 0.0
            return candidate.weight * ((candidate.score / best) ** SCORE_POWER if best > 0 else 1.0)

        return [weight(candidate) for candidate in candidates]

    def _default(self, key: str, source: str) -> str:
        if self.config.caption == "none":
            return ""
        if self.config.caption == "filename":
            return posixpath.basename(stem(key)).replace("_", " ").strip()
        if self.config.caption == "folder":
            folder = posixpath.basename(posixpath.dirname(key)) or source
            folder = folder.removesuffix(".tar").removesuffix(".parquet")
            return REPEATS.sub("", folder).replace("_", " ").strip()
        return self.config.caption or ""


_ABSENT = object()


def _is_nested(value: Any) -> bool:
    """Tell whether a value is an object, or a list of objects."""
    return type(value) is dict or (type(value) is list and bool(value) and type(value[0]) is dict)


def value_of(row: Any, column: str) -> Any:
    """The value of a column of a row; of `json.prompt` that of `prompt` in the object `json`, or in each object of a
    list; or `_ABSENT`."""
    if column in row:
        return row[column]
    for place, character in enumerate(column):
        inner = row.get(column[:place]) if character == "." else None
        if isinstance(inner, dict) and (value := value_of(inner, column[place + 1 :])) is not _ABSENT:
            return value
        if isinstance(inner, list):
            values = [value_of(each, column[place + 1 :]) for each in inner if isinstance(each, dict)]
            if values := [value for value in values if value is not _ABSENT]:
                return values
    return _ABSENT


def columns_of(row: dict[str, Any], above: str = "") -> Iterator[str]:
    """The columns of a row, those of objects, and of the first object of lists, in it behind a dot."""
    for column, value in row.items():
        yield f"{above}{column}"
        if isinstance(value, list) and value and not _TURNS.intersection(value[0] if _is_nested(value) else ()):
            value = value[0]
        if isinstance(value, dict) and above.count(".") < DEPTH:
            yield from columns_of(value, f"{above}{column}.")


def sure_columns(columns: Iterable[str]) -> list[str]:
    """The columns that hold captions and nothing else by their names."""
    sure = {*_SURE}
    return [c for c in columns if not sure.isdisjoint(re.findall("[a-z]+", c.lower())) and not _NO_CAPTION.search(c)]


def has_column(columns: Collection[str], column: str) -> bool:
    """Return whether a column, or an object that may hold it, is among those of a table."""
    return column in columns or any(
        column[:place] in columns for place, character in enumerate(column) if character == "."
    )


def text_columns(row: dict[str, Any]) -> list[str]:
    """The columns of a row that hold text and are called like captions, the best names first."""
    columns = [column for column in columns_of(row) if _has_text(value_of(row, column))]
    return [column for word in CAPTION_WORDS for column in sorted(columns, key=len) if word in column.lower()]


def _has_part(row: dict[str, Any], field: str) -> bool:
    return any(value_of(row, part) is not _ABSENT for part in _parts(field))


def _parts(field: str) -> list[str]:
    """The columns that a caption is joined from: of `a+b` a and b."""
    return [part.strip() for part in field.split("+") if part.strip()]


def _has_text(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return any(isinstance(each, str) and each.strip() for each in values)


def _joined(row: dict[str, Any], field: str) -> str:
    """The values of several columns, and the entries of lists among them, with commas between."""
    values = [unpacked(value) for part in _parts(field) if (value := value_of(row, part)) is not _ABSENT]
    entries = [entry for value in values for entry in (value if isinstance(value, list) else [value])]
    texts = (str(entry).strip() for entry in entries if entry is not None)
    return ", ".join(text for text in texts if text)


def _number(value: Any) -> float | None:
    """A score, at least zero, from a number or its text (CSV); None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        score = float(value)
    except (ValueError, OverflowError):
        return None
    return max(0.0, score) if math.isfinite(score) else None
