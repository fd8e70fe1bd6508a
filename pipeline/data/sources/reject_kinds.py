"""Group the reasons of rejects by kind, so that a report on a million rejects can be read.

`kind` removes from a reason what concerns a single item (its name, names of other files, numbers); `Kinds` counts the
kinds with a few examples; `cell` makes a text safe for a CSV that a spreadsheet opens.
Price: a kind is derived from the text, so two causes that differ only in a number or a file name count as one.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice

from sana_pipe.data.sources.filenames import escaped, shortened, stem

EXAMPLES = 5
KINDS = 100
"""Kinds that are counted separately; the rarest of more are counted together."""

SHOWN = 20
"""Kinds that are printed."""

WIDTH = 300
"""Characters of a kind that are printed."""

OTHERS = "other reasons"
_SETTING = re.compile(r"(--set (?:'[^']*'|[^\s'()]+))")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_FILE = re.compile(r"[^\s;:,'\"()=*]+\.[A-Za-z][A-Za-z0-9]{1,4}\b(?! =|\.\w)")
_NUMBER = re.compile(r"(?<![A-Za-z_] = )(?<![A-Za-z_.,0-9])(?<!UTF-)[-+]?(?:0x[0-9a-fA-F]+|\d[\d,.x]*(?<![,.x]))")


def kind(item: str, reason: str) -> str:
    """The reason without what concerns a single item. Settings with their values (`data.min_side = 41`, `--set a.b=c`)
    stay."""
    text = f" {reason}"
    for name in (item, posixpath.basename(item)):
        for form, sign in ((name, "*"), (f"{stem(name)}.", "*.")):
            if "." in form:
                text = text.replace(f" {form}", f" {sign}")
    return _general(text).removeprefix(" ")


@lru_cache(4096)  # most reasons are equal once the item's name is removed
def _general(text: str) -> str:
    parts = _SETTING.split(text)
    for place in range(0, len(parts), 2):
        part = _QUOTED.sub(lambda match: match[0] if match[0][1:-1].isidentifier() else "*", parts[place])
        parts[place] = _NUMBER.sub("N", _FILE.sub("*", part))
    return "".join(parts)


@dataclass
class Kinds:
    """Rejects by kind: how many, and the first few items."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, rejects: Iterable[tuple[str, str]]) -> Kinds:
        """The kinds of (item, reason) pairs, the most frequent first."""
        every = cls()
        every.add(rejects)
        return every.ranked()

    def add(self, rejects: Iterable[tuple[str, str]]) -> None:
        """Count (item, reason) pairs."""
        for item, reason in rejects:
            self.count(kind(item, reason), 1, [item])

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def merge(self, other: Kinds) -> None:
        """Add the counts and examples of another one."""
        for name, count in other.counts.items():
            self.count(name, count, other.examples[name])

    def ranked(self) -> Kinds:
        """The same kinds, the most frequent first, and at most `KINDS` of them."""
        order = sorted(self.counts, key=lambda name: (-self.counts[name], name))
        kinds = Kinds()
        for rank, name in enumerate(order):
            kinds.count(name if rank < KINDS else OTHERS, self.counts[name], self.examples[name])
        return kinds

    def count(self, name: str, count: int, items: Sequence[str]) -> None:
        """Count a kind. items: some of those that are counted."""
        self.counts[name] = self.counts.get(name, 0) + count
        examples = self.examples.setdefault(name, [])
        examples += items[: EXAMPLES - len(examples)]

    def note(self, name: str, count: int, items: Sequence[str]) -> None:
        """Count names that nobody limits: kinds beyond a bound are counted together."""
        self.count(name if name in self.counts or len(self.counts) < KINDS else OTHERS, count, items)

    def lines(self) -> list[str]:
        """Lines to print: each kind with its count, its examples below it."""
        printed = islice(self.counts.items(), SHOWN)
        out = [
            f"  {count:6d}  {shortened(name, WIDTH)}\n          {examples(self.examples[name], count)}"
            for name, count in printed
        ]
        rest = list(self.counts.values())[SHOWN:]
        return out + ([f"  {sum(rest):6d}  for {len(rest)} other reasons"] if rest else [])


def examples(items: list[str], count: int) -> str:
    """Some of `count` items, on one line."""
    shown = [shortened(text) for text in map(escaped, items)]
    return ", ".join(shown + ["..."] * (count > len(items)))


def report(source: str) -> str:
    """Path of the list of a source's rejects, within the cache."""
    return f"reports/rejects-{source}.csv"


def cell(text: str) -> str:
    """The text for a CSV cell, quoted if a spreadsheet would evaluate it as a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) else text
