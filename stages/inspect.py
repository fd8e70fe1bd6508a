"""`sana-pipe inspect`: the numbers of the report for scripts, and its lines and tables for people. Writes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click

from sana_pipe.base.errors import escaped
from sana_pipe.config import Config
from sana_pipe.tools.locations import cache_location
from sana_pipe.tools.reporting.blocks import plain
from sana_pipe.tools.reporting.figures import Figures, collect
from sana_pipe.tools.reporting.json_values import json_values
from sana_pipe.tools.reporting.sections import SECTIONS


def run(config: Config, run: Path | None = None, snapshot: str | None = None, as_json: bool = False) -> int:
    """Print the numbers. Arguments and errors: see `reporting.figures.collect`.

    Returns:
        0.
    """
    figures, _, _ = collect(Path(config.train.output), cache_location(config).open, run=run, snapshot=snapshot)
    if as_json:
        click.echo(json.dumps(json_values(figures)))
        return 0
    for line in _lines(figures):
        click.echo(line)
    return 0


def _lines(figures: Figures) -> Iterator[str]:
    for section in SECTIONS:
        if section.wide:  # losses and pictures over time
            continue
        if lines := [line for block in section.blocks_of(figures) if block for line in plain(block)]:
            yield f"{section.title}:"
            yield from (f"  {escaped(line)}" for line in lines)
    if figures.missing:
        titles = {section.id: section.title for section in SECTIONS}
        yield "Missing:"
        yield from (escaped(f"  {titles[name]}: {each.what}; {each.command}") for name, each in figures.missing.items())
