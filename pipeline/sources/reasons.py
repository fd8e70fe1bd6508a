"""Reasons for leaving items out, grouped by kind: what people read of a million rejects.

What: `kind` is a reason without what concerns one item alone (its name, other files' names, numbers); `Kinds` counts
them with a few examples; `cell` makes a text safe for a list that a spreadsheet opens.
Why: a reason names its file, so that a report line says all; a list of them by reason would be as long as the source.
Price: a kind is made from the text, so two causes that differ only by a number or a file name count as one.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice

from pipeline.sources.filenames import escaped, short_repr, stem

EXAMPLES = 5
KINDS = 100
"""Kinds that are counted apart; beyond them the rarest are counted together."""

SHOWN = 20
"""Kinds that people are shown."""

OTHERS = "other reasons"
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_FILE = re.compile(r"[^\s;:,'\"()=*]+\.[A-Za-z][A-Za-z0-9]{1,4}\b(?! =)")
_NUMBER = re.compile(r"(?<![A-Za-z_] = )(?<![A-Za-z_.,0-9])[-+]?(?:0x[0-9a-fA-F]+|\d[\d,.x]*(?<![,.x]))")


def kind(item: str, reason: str) -> str:
    """The reason without what is about this item. Settings with their limits (`data.min_side = 41`) stay."""
    text = f" {reason}"
    for own, sign in ((item, "*"), (posixpath.basename(item), "*"), (f"{posixpath.basename(stem(item))}.", "*.")):
        if "." in own:
            text = text.replace(f" {own}", f" {sign}")
    return _general(text).removeprefix(" ")


@lru_cache(4096)  # without an item's own names most reasons are few
def _general(text: str) -> str:
    text = _QUOTED.sub(lambda found: found[0] if found[0][1:-1].isidentifier() else "*", text)
    return _NUMBER.sub("N", _FILE.sub("*", text))


@dataclass
class Kinds:
    """Rejects by kind: how many, and the first few items."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, rejects: Iterable[tuple[str, str]]) -> Kinds:
        """Of (item, reason); the most frequent first."""
        found = cls()
        for item, reason in rejects:
            found._add(kind(item, reason), 1, [item])
        order = sorted(found.counts, key=lambda one: (-found.counts[one], one))
        kinds = cls()
        for at, one in enumerate(order):
            kinds._add(one if at < KINDS else OTHERS, found.counts[one], found.examples[one])
        return kinds

    def _add(self, one: str, count: int, items: list[str]) -> None:
        self.counts[one] = self.counts.get(one, 0) + count
        examples = self.examples.setdefault(one, [])
        examples += items[: EXAMPLES - len(examples)]

    def lines(self) -> list[str]:
        """For people: a kind a line, its examples below it."""
        some = islice(self.counts.items(), SHOWN)
        out = [f"  {count:6d}  {one}\n          {examples(self.examples[one], count)}" for one, count in some]
        rest = list(self.counts.values())[SHOWN:]
        return out + ([f"  {sum(rest):6d}  for {len(rest)} other reasons"] if rest else [])


def examples(items: list[str], count: int) -> str:
    """Some of `count` items, on one line."""
    return ", ".join(escaped(item) if len(item) <= 60 else short_repr(item)[1:-1] for item in items) + (
        ", ..." if count > len(items) else ""
    )


def report(source: str) -> str:
    """The cache's list of the rejects of a source."""
    return f"reports/rejects-{source}.csv"


def cell(text: str) -> str:
    """The text for a CSV; a spreadsheet would compute what begins like a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) else text
