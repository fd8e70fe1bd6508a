"""The parts of a page: headings of sections, and what they may hold besides lines of text and plots: tables, cards,
pictures over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from markupsafe import Markup

from sana_pipe.base.amounts import amount
from sana_pipe.tools.reporting.plots import number_text
from sana_pipe.tools.reporting.source_pictures import Embedded

Row = TypeVar("Row")

COLUMNS = 168
"""The columns of the grid along the axis of losses and pictures."""
ROWS = 60
"""Limit on the rows of a table; the page names the number of the others."""


@dataclass(frozen=True)
class Heading:
    """The heading of a section. wide: its plots have the page's width; the second is for narrow pages."""

    id: str
    title: str
    wide: bool = False


@dataclass(frozen=True)
class Missing:
    """The thing that a section lacks, in words, and the command that makes it."""

    what: str
    command: str


def text(value: Any) -> str:
    """A value as text: `a, b` for a list."""
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def number(value: Any) -> str:
    return number_text(value) if isinstance(value, int | float) else text(value)


count, share, size = "{:,}".format, "{:.1%}".format, amount


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A column of a table. value: of a row; shown: the value as text, "" of None. All but plain text is aligned to the
    right."""

    head: str
    value: Callable[[Row], Any]
    shown: Callable[[Any], str] = text

    def cell(self, row: Row) -> str:
        value = self.value(row)
        return "" if value is None else self.shown(value)

    @property
    def right(self) -> bool:
        return self.shown is not text


@dataclass(frozen=True)
class Table(Generic[Row]):
    """Rows of figures in columns; false without rows."""

    columns: Sequence[Column[Row]]
    rows: Sequence[Row]

    def __bool__(self) -> bool:
        return bool(self.rows)


@dataclass(frozen=True)
class Card:
    """Pictures side by side with a text."""

    images: Sequence[Embedded]
    text: str
    note: str = ""


@dataclass(frozen=True)
class Slider:
    """Pictures over time: one of them in sight, or on a wide page all of them along the axis.

    Attributes:
        id: unique on the page.
        frames: (label, picture), by time.
        columns: of each picture, (first, number) of `COLUMNS`.
    """

    id: str
    title: str
    frames: Sequence[tuple[str, Embedded]]
    columns: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Prompt:
    """The sliders of a prompt, side by side: one for each run. controls: the control pictures, of a ControlNet."""

    text: str
    sliders: Sequence[Slider]
    controls: Sequence[Embedded] = ()


Block = str | Markup | Table[Any] | Card | Prompt
"""str: a line of text; Markup: a plot."""


def plain(block: Block) -> list[str]:
    """A block as lines of text; of a plot and of pictures over time none."""
    if isinstance(block, Table):
        heads, cells = [column.head for column in block.columns], [column.cell for column in block.columns]
        rows = [heads, *([cell(row) for cell in cells] for row in block.rows[:ROWS])]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if isinstance(block, Card):
        return [block.text, *filter(None, [block.note])]
    return [] if isinstance(block, Markup | Prompt) else [block]
