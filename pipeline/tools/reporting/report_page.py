"""The page of `sana-pipe report`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sana_pipe.tools.reporting.blocks import Card, Missing
from sana_pipe.tools.reporting.figures import Figures
from sana_pipe.tools.reporting.page import write
from sana_pipe.tools.reporting.sections import FIRST, SECTIONS, headline


def write_report(figures: Figures, out: Path, gallery: Sequence[Card] = ()) -> list[str]:
    """Write the report.

    Args:
        figures: of `reporting.figures.collect`; examples with a picture show it.
        gallery: cards of decoded latents.

    Returns:
        Ids of the sections.

    Raises:
        UserError: as `reporting.page.write`.
    """
    sections = [
        (section, list(gallery if section.id == "gallery" else section.blocks_of(figures))) for section in SECTIONS
    ]
    titles = {section.id: section.title for section in SECTIONS}
    commands = {**figures.missing, **_not_asked_for(figures, gallery)}
    missing = [(titles[name], entry) for name, entry in commands.items()]
    return write(_title(figures), sections, out, numbers=headline(figures)[:FIRST], missing=missing)


def _not_asked_for(figures: Figures, gallery: Sequence[Card]) -> dict[str, Missing]:
    absent = {}
    if figures.snapshot is not None and not gallery:
        absent["gallery"] = Missing("no latents were decoded", "sana-pipe report --gallery 8")
    if figures.run is not None and figures.compare is None:
        absent["compare"] = Missing("no second run was named", "sana-pipe report --compare RUN")
    return absent


def _title(figures: Figures) -> str:
    parts = []
    if figures.run is not None:
        parts.append(f"run {Path(figures.run.folder).name}")
    if (data := figures.snapshot) is not None:
        names = [name for name in data.names if not name.startswith("trained-")]
        parts.append(f"snapshot {names[0] if names else data.id[:12]}")
    return "sana-pipe report" + (f": {', '.join(parts)}" if parts else "")
