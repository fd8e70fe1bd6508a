"""HTML pages in one file, which needs no network, no script and no font: plots are SVG, pictures are inside it.

`write_report` writes the page of `sana-pipe report` from `reporting.sections`. Captions and file names are
foreign text: Jinja2 escapes every value, and a content security policy in the page forbids loading anything. A section
without data is listed at the end with the command that makes its data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from pipeline import __version__
from pipeline.base.disk import replacing
from pipeline.base.errors import UserError, writing
from pipeline.tools.reporting.blocks import COLUMNS, ROWS, Block, Card, Prompt, Table
from pipeline.tools.reporting.sections import FIRST, SECTIONS, Section, headline

_MARK, _HEAD = b'<meta name="generator" content="sana-pipe ', 300
"""The mark of the product's pages, within its first bytes."""
_KINDS: dict[str, type] = {"plots": Markup, "lines": str, "tables": Table, "prompts": Prompt, "cards": Card}


def write_report(figures: dict[str, Any], out: Path, gallery: Sequence[Card] = ()) -> list[str]:
    """Write the report.

    Args:
        figures: of `reporting.figures.collect`, with pictures of rejects as `examples[].picture`.
        gallery: cards of decoded latents.

    Returns:
        Ids of the sections.

    Raises:
        UserError: as `write`.
    """
    sections = [
        (section, list(gallery if section.id == "gallery" else section.blocks_of(figures))) for section in SECTIONS
    ]
    titles = {section.id: section.title for section in SECTIONS}
    commands = {**figures["missing"], **_not_asked_for(figures, gallery)}
    missing = [{"title": titles[name], **entry} for name, entry in commands.items()]
    return write(_title(figures), sections, out, numbers=headline(figures)[:FIRST], missing=missing)


def write(
    title: str,
    sections: Iterable[tuple[Section, Sequence[Block]]],
    out: Path,
    numbers: Sequence[tuple[str, str, str]] = (),
    missing: Sequence[dict[str, str]] = (),
) -> list[str]:
    """Write a page, whole or not at all.

    Args:
        sections: with their blocks; those without are left out.
        numbers: name, value and remark of each number above everything.
        missing: `title`, `what` and `command` of each section that the page lacks.

    Returns:
        Ids of the sections.

    Raises:
        UserError: the page cannot be written, or see `check_out`.
    """
    check_out(out)
    shown: list[dict[str, Any]] = []
    for section, blocks in sections:
        content: dict[str, list[Any]] = {name: [] for name in _KINDS}
        for block in filter(None, blocks):
            content[next(name for name, kind in _KINDS.items() if isinstance(block, kind))].append(block)
        if any(content.values()):
            shown.append({"id": section.id, "title": section.title, "wide": section.wide, **content})
    text = render("page.html", title=title, numbers=numbers, sections=shown, missing=missing)
    with _writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as work:
            work.write_bytes(text.encode("utf-8", "replace"))  # names of files may hold lone surrogates
    return [section["id"] for section in shown]


def render(template: str, **values: Any) -> str:
    """A page or text of `templates/`, with `version` and `time` added."""
    environment = Environment(
        loader=PackageLoader("pipeline.tools.reporting"),
        autoescape=select_autoescape(),
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    settings = {"version": __version__, "time": now, "columns": COLUMNS, "rows_shown": ROWS}
    return environment.get_template(template).render(**settings, **values)


def check_out(out: Path) -> None:
    """Raise a UserError if `out` is there and is no page: `write` would replace it."""
    with _writing(out):
        if not out.exists():
            return
        if out.is_file():
            with out.open("rb") as file:
                if not (head := file.read(_HEAD)) or _MARK in head:
                    return
    raise UserError(f"{out} exists and is no page of sana-pipe", expected="a new file, or a page", fix="another --out")


def _writing(out: Path) -> AbstractContextManager[None]:
    return writing(out, "check the permissions, or give another --out")


def _not_asked_for(figures: dict[str, Any], gallery: Sequence[Card]) -> dict[str, dict[str, str]]:
    absent = {}
    if figures["snapshot"] is not None and not gallery:
        absent["gallery"] = {"what": "no latents were decoded", "command": "sana-pipe report --gallery 8"}
    if figures["run"] is not None and figures["compare"] is None:
        absent["compare"] = {"what": "no second run was named", "command": "sana-pipe report --compare RUN"}
    return absent


def _title(figures: dict[str, Any]) -> str:
    parts = []
    if figures["run"] is not None:
        parts.append(f"run {Path(figures['run']['folder']).name}")
    if (data := figures["snapshot"]) is not None:
        names = [name for name in data["names"] if not name.startswith("trained-")]
        parts.append(f"snapshot {names[0] if names else data['id'][:12]}")
    return "sana-pipe report" + (f": {', '.join(parts)}" if parts else "")
