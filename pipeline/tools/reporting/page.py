"""HTML pages in one file, which needs no network, no script and no font: plots are SVG, pictures are inside it.

Captions and file names are foreign text: Jinja2 escapes every value, and a content security policy in the page forbids
loading anything. A section without data is listed at the end with the command that makes its data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from sana_pipe import __version__
from sana_pipe.base.disk import replacing
from sana_pipe.base.errors import UserError, writing
from sana_pipe.tools.reporting.blocks import COLUMNS, ROWS, Block, Card, Heading, Missing, Prompt, Table

_MARK, _HEAD = b'<meta name="generator" content="sana-pipe ', 300
"""The mark of the product's pages, within its first bytes."""


@dataclass(frozen=True)
class _Content:
    """The blocks of a section by their kind, in the order of the page."""

    heading: Heading
    lines: list[str] = field(default_factory=list)
    plots: list[Markup] = field(default_factory=list)
    tables: list[Table[Any]] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)
    cards: list[Card] = field(default_factory=list)

    @classmethod
    def of(cls, heading: Heading, blocks: Iterable[Block]) -> _Content | None:
        """None without a block that shows something."""
        content, shown = cls(heading), [block for block in blocks if block]
        for block in shown:
            match block:
                case Markup():  # a str, too
                    content.plots.append(block)
                case str():
                    content.lines.append(block)
                case Table():
                    content.tables.append(block)
                case Prompt():
                    content.prompts.append(block)
                case Card():
                    content.cards.append(block)
        return content if shown else None


def write(
    title: str,
    sections: Iterable[tuple[Heading, Sequence[Block]]],
    out: Path,
    numbers: Sequence[tuple[str, str, str]] = (),
    missing: Sequence[tuple[str, Missing]] = (),
    option: str = "--out",
) -> list[str]:
    """Write a page, whole or not at all.

    Args:
        sections: with their blocks; those without are left out.
        numbers: name, value and remark of each number above everything.
        missing: of each section that the page lacks, with its title.
        option: names `out`.

    Returns:
        Ids of the sections.

    Raises:
        UserError: the page cannot be written, or see `check_out`.
    """
    check_out(out, option)
    contents = (_Content.of(heading, blocks) for heading, blocks in sections)
    shown = [content for content in contents if content is not None]
    text = render("page.html", title=title, numbers=numbers, contents=shown, missing=missing)
    with _writing(out, option):
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as work:
            work.write_bytes(text.encode("utf-8", "replace"))  # names of files may hold lone surrogates
    return [content.heading.id for content in shown]


def render(template: str, **values: Any) -> str:
    """A page or text of `templates/`, with `version` and `time` added."""
    environment = Environment(
        loader=PackageLoader("sana_pipe.tools.reporting"),
        autoescape=select_autoescape(),
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    settings = {"version": __version__, "time": now, "columns": COLUMNS, "rows_shown": ROWS}
    return environment.get_template(template).render(**settings, **values)


def check_out(out: Path, option: str = "--out") -> None:
    """Raise a UserError if `out` is there and is no page: `write` would replace it."""
    with _writing(out, option):
        if not out.exists():
            return
        if out.is_file():
            with out.open("rb") as file:
                if not (head := file.read(_HEAD)) or _MARK in head:
                    return
    raise UserError(
        f"{out}: exists and is not a page that sana-pipe wrote",
        expected="a new file, or such a page",
        fix=f"give another {option}",
    )


def _writing(out: Path, option: str) -> AbstractContextManager[None]:
    return writing(out, f"check the permissions, or give another {option}")
