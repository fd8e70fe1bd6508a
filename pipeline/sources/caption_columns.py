"""Which captions a picture may be trained with, and how often: the rule from columns to weighted candidates.

What: `CaptionRule` names the columns that hold captions, their weights, and the columns of their scores. `read` takes
the candidates out of one row (of a table, a metadata file or a JSON beside a picture), `weigh` gives the weights.
Why: data sets say several things about a picture (short, long, by one captioner or another); a choice among them per
visit is worth more than a choice for good, and a cache must therefore hold all of them.

Weights. Without scores a column's weight is its share (Sana's `proportion`); the entries of a list share their column's
weight. With scores Sana's `clipscore` rule holds: candidates whose score reaches `threshold` are drawn in proportion to
weight * score ** `power` (power 10 is Sana's temperature 0.1); if none reaches it, the best one alone is taken; one
without a score, beside others with, is not drawn. Whatever is never drawn is not encoded, and counted.
NVlabs' trainer takes the captions of columns as they are: not stripped, and a null one as the empty caption. So it is
where `text.recipe` is `nvlabs` (`raw`).
Price: a score that changes the weights changes the scan, not the encoded records.
"""

from __future__ import annotations

import difflib
import math
import posixpath
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pipeline.cache.layout import canonical
from pipeline.config import DataConfig
from pipeline.errors import UserError
from pipeline.sources.filenames import short_repr, stem

SEEN = 1000
"""Columns that are remembered; rows with more than that have keys of their own, not columns."""

TEXT_FILE = "txt"
"""Stands for the text file beside a picture (or the .txt member of a tar) where columns are listed."""


@dataclass(frozen=True)
class Candidate:
    """One thing said about a picture. score: None if nobody scored it."""

    text: str
    weight: float = 1.0
    score: float | None = None


@dataclass
class RowCaptions:
    """What one row holds: candidates, and why a caption in it is not one."""

    candidates: list[Candidate] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class CaptionRule:
    """See the module.

    fields: (column, weight); listed: whether somebody listed them, so that a text file counts only if `txt` is there.
    scores: (caption column, score column).
    instead: columns to take where a row has none of `fields`.
    default: what to say of a picture without any caption, as `data.caption` says it; None: nothing.
    before, after: the text around every caption.
    raw: captions of columns as they are, and null ones as empty.
    seen: columns that rows had so far (at most `SEEN`), and `txt`.
    """

    fields: tuple[tuple[str, float], ...] = (("text", 1.0),)
    listed: bool = False
    scores: tuple[tuple[str, str], ...] = ()
    threshold: float = 25.0
    power: float = 10.0
    fallback: tuple[str, ...] = ()
    default: str | None = None
    before: str = ""
    after: str = ""
    raw: bool = False
    seen: set[str] = field(default_factory=set, compare=False, repr=False)

    @classmethod
    def of(cls, config: DataConfig, raw: bool = False) -> CaptionRule:
        fields = tuple(sorted(config.caption_weights.items())) or ((config.caption_field, 1.0),)
        return cls(
            fields,
            bool(config.caption_weights),
            tuple(sorted(config.caption_scores.items())),
            config.score_threshold,
            config.score_power,
            (),
            config.caption,
            config.caption_prefix,
            config.caption_suffix,
            raw,
        )

    @classmethod
    def column(cls, name: str) -> CaptionRule:
        return cls(((name, 1.0),))

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of tables and JSON objects; the text file is none."""
        return tuple(column for column, _ in self.fields if not (self.listed and column == TEXT_FILE))

    @property
    def setting(self) -> str:
        """The setting that names the columns, for messages."""
        return "data.caption_weights" if self.listed else "data.caption_field"

    @property
    def text_weight(self) -> float | None:
        """Weight of the text beside a picture; None if it is not to be used."""
        return dict(self.fields).get(TEXT_FILE) if self.listed else 1.0

    def identity(self) -> str:
        """Equal for rules that find the same candidates in the same row."""
        values = (self.fields, self.listed, self.scores, self.threshold, self.power, self.fallback)
        more = (self.default, self.before, self.after, self.raw)
        own = [str(more)] if more != (None, "", "", False) else []  # rules of earlier versions keep their identity
        return canonical([[*map(str, values), *own]]).decode()

    def check_seen(self) -> None:
        """To be called when the whole source has been listed.

        Raises:
            UserError: a column that somebody listed was in no row.
        """
        listed = [(self.setting, column) for column, _ in self.fields] if self.listed else []
        listed += [("data.caption_scores", column) for _, column in self.scores]
        for setting, column in listed:
            if column not in self.seen and len(self.seen) < SEEN:
                near = difflib.get_close_matches(column, self.seen, n=1, cutoff=0.5)
                raise UserError(
                    f"{setting} names the column {column!r}, which no item has",
                    expected=", ".join(sorted(self.seen)) or "a column of the source; it has none",
                    fix=f"did you mean {near[0]!r}?" if near else f"leave it out of {setting}",
                )

    def text_file(self, text: str, scores: dict[str, Any] | None = None) -> Candidate:
        """What the text file beside a picture says. scores: by column; NVlabs call this caption `prompt`."""
        self.seen.add(TEXT_FILE)
        score = (scores or {}).get(TEXT_FILE, (scores or {}).get("prompt"))
        return Candidate(text, self.text_weight or 1.0, _number(score))

    def lacks_captions(self, columns: Iterable[str]) -> bool:
        """Whether a table with these columns can give no caption at all."""
        return self.default is None and bool(self.columns) and set(self.columns).isdisjoint(columns)

    def read(self, row: dict[str, Any], scores: dict[str, Any] | None = None) -> RowCaptions:
        """The candidates of a row.

        Args:
            scores: scores by column from elsewhere; they go before those of the row.
        """
        found = RowCaptions()
        if len(self.seen) < SEEN:
            self.seen.update(row)
        fields = [(column, weight) for column, weight in self.fields if column in self.columns]
        present = [(column, weight) for column, weight in fields if column in row]
        if not present:
            present = [(column, 1.0) for column in self.fallback if column in row]
        for column, weight in present:
            self._read_column(row, column, weight, scores or {}, found)
        if not found.candidates and not found.problems and self.default is None:
            missing = [column for column, _ in fields]
            empty = [column for column, _ in present]
            found.problems += [f"has an empty {column!r}" for column in empty] or [
                "has no " + " or ".join(map(repr, missing or ["caption column"]))
            ]
        return found

    def _read_column(
        self, row: dict[str, Any], column: str, weight: float, scores: dict[str, float], found: RowCaptions
    ) -> None:
        value = row[column]
        values = value if isinstance(value, list) else [value]
        told = scores.get(column)
        if told is None:
            told = row.get(dict(self.scores).get(column, ""))
        numbers = told if isinstance(told, list) else [told] * len(values)
        if len(numbers) != len(values):
            found.problems.append(
                f"has {len(numbers)} scores for {len(values)} captions in {column!r}; they are not used"
            )
            numbers = [None] * len(values)
        texts: list[Candidate] = []
        for text, number in zip(values, numbers, strict=True):
            if self.raw and text is None:
                text = ""
            elif text is None or (isinstance(text, str) and not text.strip() and not self.raw):
                continue
            if not isinstance(text, str):
                found.problems.append(f"has {short_repr(text)} for {column!r}, which is not text")
                continue
            score = _number(number)
            if number is not None and score is None:
                found.problems.append(f"has the score {short_repr(number)} for {column!r}, which is not a number")
            texts.append(Candidate(text if self.raw else text.strip(), weight, score))
        found.candidates += [Candidate(one.text, one.weight / len(texts), one.score) for one in texts]

    def weigh(self, candidates: list[Candidate], key: str, source: str) -> tuple[tuple[tuple[str, float], ...], int]:
        """Weighted captions, each text once, in the order given.

        Args:
            key, source: of the picture, for what is said of one without candidates.

        Returns:
            (text, weight) with weights above zero; and how many candidates are never drawn.
        """
        if not candidates and self.default is not None:
            candidates = [Candidate(self._default(key, source))]
        weights = [one.weight for one in candidates]
        scored = [one.score for one in candidates if one.score is not None]
        if scored:
            best = max(scored)
            limit = self.threshold if best >= self.threshold else best
            weights = [
                one.weight * ((one.score / best) ** self.power if best > 0 else 1.0)
                if one.score is not None and one.score >= limit
                else 0.0
                for one in candidates
            ]
            if best < self.threshold:  # the best one alone, the first of equals
                first = next(i for i, one in enumerate(candidates) if one.score == best)
                weights = [candidates[i].weight if i == first else 0.0 for i in range(len(candidates))]
        kept: dict[str, float] = {}
        for one, weight in zip(candidates, weights, strict=True):
            if weight > 0:
                kept[one.text] = max(weight, kept.get(one.text, 0.0))
        captions = tuple((f"{self.before}{text}{self.after}", weight) for text, weight in kept.items())
        return captions, len({one.text for one in candidates} - set(kept))

    def _default(self, key: str, source: str) -> str:
        if self.default == "none":
            return ""
        if self.default == "filename":
            return posixpath.basename(stem(key)).replace("_", " ").strip()
        if self.default == "folder":
            folder = posixpath.basename(posixpath.dirname(key)) or source
            return folder.removesuffix(".tar").removesuffix(".parquet").replace("_", " ").strip()
        return self.default or ""


def _number(value: Any) -> float | None:
    """A score; CSV has numbers as text, and a score below zero is as bad as zero."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        score = float(value)
    except (ValueError, OverflowError):
        return None
    return max(0.0, score) if math.isfinite(score) else None
